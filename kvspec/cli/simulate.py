"""`kvspec simulate`: which link bounds a transfer, for each policy of election."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import typer
from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from kvspec import catalogue
from kvspec.cli.options import (
    KEYS,
    POLICY_NAMES,
    RANKS_PER_NODE,
    engine,
    engine_words,
    output,
    refusals,
    topology_of,
)
from kvspec.errors import SpecError
from kvspec.ownership.election import Replicas
from kvspec.simulate import PolicyLoad, Simulation, simulate

if TYPE_CHECKING:
    from rich.console import Console

_ENGINES, _REQUESTS, _LINKS = "The two engines", "The requests", "The links"
_STEPS = "▁▂▃▄▅▆▇█"
BARS = 64
"""Bars of one policy; of more ranks, each bar is the most loaded of its neighbours."""


def simulate_command(
    model: str = typer.Option(
        catalogue.DEFAULT, help="A model of the catalogue, or the path of a config.json."
    ),
    producer: str = typer.Option(
        "tp=16",
        metavar="KEY=VALUE,…",
        help=f"The producer's sizes: {', '.join(KEYS)}.",
        rich_help_panel=_ENGINES,
    ),
    consumer: str = typer.Option(
        "tp=4",
        metavar="KEY=VALUE,…",
        help="The sizes of each consumer engine, such as tp=4,pp=2.",
        rich_help_panel=_ENGINES,
    ),
    consumers: int = typer.Option(
        1, help="Consumer engines that fetch at once, each one prompt.", rich_help_panel=_REQUESTS
    ),
    tokens: int = typer.Option(
        8192, help="Tokens of each prompt, none cached.", rich_help_panel=_REQUESTS
    ),
    out_speed: float = typer.Option(
        50.0, help="GB/s out of each producer rank.", rich_help_panel=_LINKS
    ),
    in_speed: float = typer.Option(
        50.0, help="GB/s into each consumer rank.", rich_help_panel=_LINKS
    ),
    replicas: list[str] = typer.Option(
        [], metavar=POLICY_NAMES, help="A policy to compare; may be repeated. All unless given."
    ),
    ranks_per_node: int | None = RANKS_PER_NODE,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of tables."),
) -> None:
    """Predict how long a transfer takes at least, and which link bounds it, for each policy.

    The time is the greatest of load / speed over every rank's own link: a lower bound.
    """
    with refusals():
        ours = engine("producer", model, engine_words("producer", producer))
        theirs = engine("consumer", model, engine_words("consumer", consumer))
        found = simulate(
            (ours, theirs),
            num_tokens=tokens,
            consumers=consumers,
            out_speed=_speed("out_speed", out_speed),
            in_speed=_speed("in_speed", in_speed),
            replicas=cast("Sequence[Replicas]", tuple(dict.fromkeys(replicas))) or None,
            topology=topology_of(ranks_per_node, ours.parallel, theirs.parallel),
        )
    if as_json:
        typer.echo(json.dumps({"model": model, **_plain(found)}, indent=1))
    else:
        _show(output(), model, found)


def _speed(field: str, value: float) -> float:
    """Return GB/s as bytes a second."""
    if not 0 < value * 1e9 < math.inf:
        raise SpecError(field, value, "finite GB/s > 0, as bytes a second too")
    return value * 1e9


def _show(console: Console, model: str, found: Simulation) -> None:
    each = found.policies[0]
    ours, theirs = len(each.producer_ranks), len(each.consumer_ranks)
    engines = f"{found.consumers} engines" if found.consumers > 1 else "1 engine"
    told = f"  {ours} producer ranks -> {engines} of {theirs} rank{'s' if theirs > 1 else ''}, "
    moved = f"{found.num_tokens:,} tokens each: {decimal(int(each.into.sum()))} to each engine"
    console.print(Text.assemble((model, "bold"), told, moved))
    console.print(_loads(found))
    console.print(_bars(found))
    least = "predicted: the greatest of load / speed over all links, a lower bound"
    console.print(least, style="dim")


def _loads(found: Simulation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("replicas")
    for name in ("predicted", "busiest out", "max / mean"):
        table.add_column(name, justify="right")
    table.add_column("bounded by", overflow="fold")
    for each in found.policies:
        style = "bold green" if each.seconds == found.best.seconds else ""
        table.add_row(
            Text(each.replicas, style=style),
            Text(f"{each.seconds * 1e3:,.2f} ms", style=style),
            f"{decimal(each.busiest.load)} {each.busiest.rank}",
            f"{each.unevenness:.2f}",
            f"{each.bottleneck}, {decimal(each.bottleneck.load)}",
        )
    return table


def _bars(found: Simulation) -> Table:
    """Return a bar for each producer rank, or for neighbours where there are too many."""
    wide = len(found.policies[0].out)
    step = -(-wide // BARS)
    ranks = "each producer rank" if step == 1 else f"the busiest of every {step} producer ranks"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("replicas")
    table.add_column(f"bytes out of {ranks}", overflow="fold")
    most = max(int(each.out.max()) for each in found.policies)
    for each in found.policies:
        tops = [int(each.out[at : at + step].max()) for at in range(0, wide, step)]
        bars = (_STEPS[(top * len(_STEPS) - 1) // most] if top else "·" for top in tops)
        table.add_row(each.replicas, Text("".join(bars)))
    return table


def _plain(found: Simulation) -> dict[str, Any]:
    policies = {each.replicas: _plain_policy(each) for each in found.policies}
    return {
        "num_tokens": found.num_tokens,
        "consumers": found.consumers,
        "policies": policies,
    }


def _plain_policy(load: PolicyLoad) -> dict[str, Any]:
    link = load.bottleneck
    return {
        "seconds": load.seconds,
        "bottleneck": {"side": link.side, "rank": str(link.rank), "bytes": link.load},
        "max_over_mean": load.unevenness,
        "out_bytes": dict(zip(map(str, load.producer_ranks), load.out.tolist(), strict=True)),
        "in_bytes": dict(zip(map(str, load.consumer_ranks), load.into.tolist(), strict=True)),
    }
