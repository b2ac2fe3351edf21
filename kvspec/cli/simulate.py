"""Implement `kvspec simulate`: compare the load of the links under each replica policy."""

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
    output,
    print_json,
    reported_errors,
    request_option,
    table,
    topology_of,
    words_option,
)
from kvspec.errors import SpecError, counted, nbytes
from kvspec.ownership.replicas import ReplicaPolicyName

_STEPS = "▁▂▃▄▅▆▇█"

# Bars of one policy, so that a line fits on a terminal. If there are more ranks, each bar stands
# for several neighbouring ranks and shows the busiest of them.
BARS = 64

link_option = partial(typer.Option, 50.0, rich_help_panel="The links")


def simulate_command(
    model: str = MODEL,
    producer: str = words_option("tp=16", help=f"Sizes of the producer: {', '.join(KEYS)}."),
    consumer: str = words_option("tp=4", help="Sizes of each consumer engine."),
    consumers: int = request_option(
        1, help="Number of consumer engines that read at the same time."
    ),
    tokens: int = request_option(8192, help="Tokens of each prompt."),
    out_speed: float = link_option(help="GB/s out of each producer rank."),
    in_speed: float = link_option(help="GB/s into each consumer rank."),
    replica_policy: list[str] = typer.Option(
        [],
        metavar=POLICY_NAMES,
        help="Policy to compare. May be repeated. Default: all policies.",
    ),
    ranks_per_node: int | None = RANKS_PER_NODE,
    as_json: bool = AS_JSON,
) -> None:
    """Predict the shortest possible time of a transfer, for each replica policy.

    Each consumer engine reads one prompt, of which it has cached nothing.
    The predicted time is that of the slowest link: load / speed.
    A real transfer takes longer.
    """
    with reported_errors():
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
                replica_policy, ranks_per_node, *(side.parallel for side in engines)
            ),
        )
    if as_json:
        policies = {load.replica_policy: _policy(load) for load in simulation.policies}
        summary = {"num_tokens": tokens, "consumers": consumers, "policies": policies}
        print_json({"model": model, **summary})
    else:
        _show(model, simulation)
        links = f"{out_speed:g} GB/s out of and {in_speed:g} GB/s into each rank"
        note = f"predicted: time of the slowest link, with {links} (a lower bound)"
        output().print(note, style="dim", soft_wrap=True)


def _speed(field: str, value: float) -> float:
    """Convert GB/s to bytes per second."""
    # Large values overflow to infinity in bytes per second.
    if not 0 < value * 1e9 < math.inf:
        raise SpecError(field, value, "GB/s > 0, and finite in bytes per second")
    return value * 1e9


def _show(model: str, simulation: Simulation) -> None:
    """Print the loads of every policy, and bars of the bytes out of the producer ranks."""
    console, first = output(), simulation.policies[0]
    engines = f"{counted(simulation.consumers, 'engine')} of {counted(len(first.into), 'rank')}"
    moved = f"{simulation.num_tokens:,} tokens each: {nbytes(int(first.into.sum()))} to each engine"
    ranks = counted(len(first.out), "producer rank")
    console.print(
        Text.assemble((model, "bold"), f"  {ranks} -> {engines}, {moved}"), soft_wrap=True
    )
    numbers = ("predicted", "busiest producer", "max / mean")
    best = simulation.best.seconds
    loads = (_loads(load, best=load.seconds == best) for load in simulation.policies)
    console.print(table(("policy", *numbers, "slowest link"), loads, numbers))
    step = -(-len(first.out) // BARS)
    ranks = "each producer rank" if step == 1 else f"the busiest of {step} producer ranks each"
    most = max(int(load.out.max()) for load in simulation.policies)
    bars = ((load.replica_policy, _bars(load, step, most)) for load in simulation.policies)
    console.print(table(("policy", f"bytes out of {ranks}"), bars))


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
