"""`kvspec simulate`: which link bounds a transfer, for each replica policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import typer
from rich.text import Text

from kvspec.analysis.simulation import PolicyLoad, Simulation, simulate
from kvspec.cli.options import (
    AS_JSON,
    KEYS,
    MODEL,
    POLICY_NAMES,
    RANKS_PER_NODE,
    engine,
    in_words,
    of_requests,
    output,
    print_json,
    refusals,
    table,
    topology_of,
)
from kvspec.errors import SpecError, counted, nbytes
from kvspec.ownership.replicas import ReplicaPolicyName

_STEPS = "▁▂▃▄▅▆▇█"
BARS = 64
"""Bars of one policy; of more ranks, each bar is the most loaded of its neighbours."""

of_links = partial(typer.Option, 50.0, rich_help_panel="The links")


def simulate_command(
    model: str = MODEL,
    producer: str = in_words("tp=16", help=f"The producer's sizes: {', '.join(KEYS)}."),
    consumer: str = in_words("tp=4", help="Of each consumer engine, such as tp=4,pp=2."),
    consumers: int = of_requests(1, help="Consumer engines that fetch at once, each one prompt."),
    tokens: int = of_requests(8192, help="Tokens of each prompt, none cached."),
    out_speed: float = of_links(help="GB/s out of each producer rank."),
    in_speed: float = of_links(help="GB/s into each consumer rank."),
    replica_policy: list[str] = typer.Option(
        [], metavar=POLICY_NAMES, help="A policy to compare; may be repeated. All unless given."
    ),
    ranks_per_node: int | None = RANKS_PER_NODE,
    as_json: bool = AS_JSON,
) -> None:
    """Predict how long a transfer takes at least, and which link bounds it, for each policy.

    The time is the greatest of load / speed over every rank's own link: a lower bound.
    """
    with refusals():
        engines = engine("producer", model, producer), engine("consumer", model, consumer)
        simulation = simulate(
            engines,
            num_tokens=tokens,
            consumers=consumers,
            out_speed=_speed("out_speed", out_speed),
            in_speed=_speed("in_speed", in_speed),
            replica_policies=cast(
                "Sequence[ReplicaPolicyName]", tuple(dict.fromkeys(replica_policy))
            )
            or None,
            topology=topology_of(
                replica_policy, ranks_per_node, *(each.parallel for each in engines)
            ),
        )
    if as_json:
        policies = {load.replica_policy: _policy(load) for load in simulation.policies}
        whole = {"num_tokens": tokens, "consumers": consumers, "policies": policies}
        print_json({"model": model, **whole})
    else:
        _show(model, simulation)
        links = f"links of {out_speed:g} GB/s out, {in_speed:g} in"
        least = f"predicted: the greatest of load / speed over all {links}; a lower bound"
        output().print(least, style="dim", soft_wrap=True)


def _speed(field: str, value: float) -> float:
    """Return GB/s as bytes a second."""
    if not 0 < value * 1e9 < math.inf:
        raise SpecError(field, value, "finite GB/s > 0, as bytes a second too")
    return value * 1e9


def _show(model: str, simulation: Simulation) -> None:
    """Print the loads of every policy, and a bar for each producer rank or for neighbours."""
    console, first = output(), simulation.policies[0]
    engines = f"{counted(simulation.consumers, 'engine')} of {counted(len(first.into), 'rank')}"
    moved = f"{simulation.num_tokens:,} tokens each: {nbytes(int(first.into.sum()))} to each engine"
    ranks = counted(len(first.out), "producer rank")
    console.print(
        Text.assemble((model, "bold"), f"  {ranks} -> {engines}, {moved}"), soft_wrap=True
    )
    numbers = ("predicted", "busiest out", "max / mean")
    best = simulation.best.seconds
    loads = (_loads(load, best=load.seconds == best) for load in simulation.policies)
    console.print(table(("replicas", *numbers, "bounded by"), loads, numbers))
    step = -(-len(first.out) // BARS)
    ranks = "each producer rank" if step == 1 else f"the busiest of every {step} producer ranks"
    most = max(int(load.out.max()) for load in simulation.policies)
    bars = ((load.replica_policy, _bars(load, step, most)) for load in simulation.policies)
    console.print(table(("replicas", f"bytes out of {ranks}"), bars))


def _loads(load: PolicyLoad, *, best: bool) -> tuple[str | Text, ...]:
    style = "bold green" if best else ""
    return (
        Text(load.replica_policy, style=style),
        Text(f"{load.seconds * 1e3:,.2f} ms", style=style),
        f"{nbytes(load.busiest.load)} {load.busiest.rank}",
        f"{load.unevenness:.2f}",
        f"{load.bottleneck}, {nbytes(load.bottleneck.load)}",
    )


def _bars(load: PolicyLoad, step: int, most: int) -> str:
    tops = [int(load.out[at : at + step].max()) for at in range(0, len(load.out), step)]
    return "".join(_STEPS[(top * len(_STEPS) - 1) // most] if top else "·" for top in tops)


def _policy(load: PolicyLoad) -> dict[str, Any]:
    link = load.bottleneck
    return {
        "seconds": load.seconds,
        "bottleneck": {"side": link.side, "rank": link.rank, "bytes": link.load},
        "max_over_mean": load.unevenness,
        "out_bytes": dict(zip(map(str, load.producer_ranks), load.out.tolist(), strict=True)),
        "in_bytes": dict(zip(map(str, load.consumer_ranks), load.into.tolist(), strict=True)),
    }
