"""Implement `kvspec plan`: which rank reads what from which rank, how many bytes, how long."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import typer
from rich.text import Text

from kvspec.analysis.counts import Pair, edge_descriptors
from kvspec.analysis.explanation import edge_tokens, head_lines, layer_numbers
from kvspec.analysis.flows import flows
from kvspec.analysis.kvbench import matrix_text, pattern_text, traffic_matrix
from kvspec.analysis.simulation import LinkTime, PolicyLoad, Simulation, simulate
from kvspec.cli import options, printing
from kvspec.draw import plan_svg
from kvspec.errors import SpecError, nbytes
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge, assignments
from kvspec.plan.plan import TransferPlan, plan_transfer

_BAR_HEIGHTS = "▁▂▃▄▅▆▇█"

# Bars of one policy, so that a line fits on a terminal. If there are more ranks, each bar stands
# for several neighbouring ranks and shows the busiest of them.
BARS = 64
SPEED_OPTION = typer.Option(
    50.0, help="GB/s out of each producer rank, or into each consumer rank."
)


def plan(
    model: str = options.MODEL,
    producer: str = options.PRODUCER_OPTION,
    consumer: str = options.CONSUMER_OPTION,
    consumers: int = options.engine_option(1, help="Number of consumer engines that read at once."),
    replica_policy: str = options.REPLICA_POLICY,
    ranks_per_node: int | None = options.RANKS_PER_NODE,
    tokens: int = options.request_option(
        8192, help="Tokens of each prompt, of which none is cached."
    ),
    out_speed: float = SPEED_OPTION,
    in_speed: float = SPEED_OPTION,
    svg: str | None = typer.Option(None, metavar="FILE", help="Also draw the plan as SVG."),
    kvbench: str | None = typer.Option(
        None, metavar="FILE", help="Also write the traffic for NIXL's KVBench, as YAML."
    ),
    as_json: bool = options.AS_JSON,
) -> None:
    """Show which rank reads what from which rank, and predict the time for each replica policy.

    The first table has what one consumer engine reads for one prompt: layers, heads, bytes.
    Heads are KV heads, or heads of a recurrent state.
    Descriptors are counted for blocks of which no two are adjacent.
    Short mean runs are slow without a staging buffer, see `kvspec calibrate`.
    The other tables compare all policies.
    The predicted time is that of the slowest link: load / speed.
    A real transfer takes longer.
    """
    with printing.reported_errors():
        model = options.known_model(model)
        engines = options.engine_pair(model, producer, consumer)
        policy = options.replica_policy_of(replica_policy, ranks_per_node, engines)
        made = plan_transfer(*engines, policy)
        loads = _loads_of_edges(made, tokens)
        counts = _descriptors(made, tokens)
        simulation = simulate(
            engines,
            num_tokens=tokens,
            consumers=consumers,
            out_speed=_speed("out_speed", out_speed),
            in_speed=_speed("in_speed", in_speed),
            topology=policy.topology,
        )
        if svg is not None:
            _draw(made, svg, model)
        if kvbench is not None:
            _write_kvbench(traffic_matrix(made, tokens, consumers), tokens, kvbench)
    if as_json:
        summary = {"model": model, "num_tokens": tokens, "consumers": consumers}
        policies = {load.replica_policy: _policy(load) for load in simulation.policies}
        edges = [
            attrs.asdict(edge, recurse=False)
            | {"bytes": loads[_key(edge)], "descriptors": counts.get(_pair_of(edge))}
            for edge in made.edges
        ]
        printing.as_json(summary | {"edges": edges, "policies": policies})
        return
    console = printing.output()
    printing.heading(console, model, *engines)
    moved = f"{nbytes(loads.total())} of {tokens:,} tokens to each engine"
    console.print(f"{moved}; replicas chosen by {made.policy_name!r}", soft_wrap=True)
    numbers = ("bytes", "descriptors", "mean run")
    rows = [_row(made, edge, loads[_key(edge)], counts.get(_pair_of(edge))) for edge in made.edges]
    names = ("consumer", "producer", "group", "layers", "heads of the model", *numbers)
    printing.pairs(console, names, rows, numbers)
    _show_policies(simulation, stages=_has_stages(made))
    links = f"{out_speed:g} GB/s out of and {in_speed:g} GB/s into each rank"
    note = f"predicted: time of the slowest link, with {links} (a lower bound)"
    console.print(note, style="dim", soft_wrap=True)


def _key(edge: Edge) -> tuple[object, ...]:
    return edge.consumer, edge.group, edge.producer


def _loads_of_edges(made: TransferPlan, tokens: int) -> Counter[tuple[object, ...]]:
    """Return the bytes of each edge for one request of *tokens*."""
    loads: Counter[tuple[object, ...]] = Counter()
    sources, targets = made.producer.parallel.ranks, made.consumer.parallel.ranks
    # `flows` has one entry for each assignment, in the same order.
    assigned = assignments(made.producer, made.consumer, made.replica_groups, made.replica_policy)
    for own, moved in zip(assigned, flows(made, tokens).moved.tolist(), strict=True):
        group = own.replica_group.pair.consumer.name
        loads[targets[own.reader], group, sources[own.unit_range.producer]] += moved
    return loads


def _pair_of(edge: Edge) -> tuple[Pair, str]:
    return (edge.producer, edge.consumer), edge.group


def _descriptors(made: TransferPlan, tokens: int) -> dict[tuple[Pair, str], int]:
    """Return the descriptors of each edge. Empty if the blocks are too many to count them."""
    try:
        return edge_descriptors(made, tokens)
    except SpecError:
        return {}


def _has_stages(made: TransferPlan) -> bool:
    return max(engine.parallel.pp_size for engine in (made.producer, made.consumer)) > 1


def _row(made: TransferPlan, edge: Edge, load: int, count: int | None) -> Iterable[str]:
    tokens, stages = edge_tokens(made, edge), _has_stages(made)
    heads = "\n".join(f"{line}{tokens}" for line in head_lines(made, edge))
    ranks = (printing.rank_name(rank, stages=stages) for rank in (edge.consumer, edge.producer))
    mean = nbytes(load // count) if count else "-"
    numbers = f"{load:,}", "-" if count is None else f"{count:,}", mean
    return *ranks, edge.group, layer_numbers(edge.layers), heads, *numbers


def _draw(made: TransferPlan, file: str, model: str) -> None:
    # A model may also be the path of its config.json.
    name = Path(model).parent.name if model.endswith(".json") else model
    _write("svg", file, plan_svg(made, model=name))


def _write_kvbench(matrix: Ints, tokens: int, file: str) -> None:
    """Write the configuration *file* of KVBench, and the matrix beside it."""
    cells = Path(file).absolute().parent / f"{Path(file).stem}.matrix.txt"
    # The name of the matrix follows from that of *file*, so a wrong name is refused first.
    _write("kvbench", file, pattern_text(str(cells), tokens))
    _write("kvbench", str(cells), matrix_text(matrix))


def _write(field: str, file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(field, file, f"a file that can be written ({error})") from None
    typer.echo(f"wrote {file}", err=True)


def _speed(field: str, value: float) -> float:
    """Convert GB/s to bytes per second."""
    # Large values overflow to infinity in bytes per second.
    if not 0 < value * 1e9 < math.inf:
        raise SpecError(field, value, "GB/s > 0, and finite in bytes per second")
    return value * 1e9


def _show_policies(simulation: Simulation, *, stages: bool) -> None:
    """Print the loads of every policy, and bars of the bytes out of the producer ranks."""
    console, first = printing.output(), simulation.policies[0]
    numbers = ("predicted", "busiest producer", "max / mean")
    best = simulation.best.seconds
    rows = (
        _policy_row(load, best=load.seconds == best, stages=stages) for load in simulation.policies
    )
    console.print(printing.table(("policy", *numbers, "slowest link"), rows, numbers))
    step = -(-len(first.out) // BARS)
    ranks = "each producer rank" if step == 1 else f"the busiest of {step} producer ranks each"
    most = max(int(load.out.max()) for load in simulation.policies)
    bars = ((load.replica_policy, _bars(load, step, most)) for load in simulation.policies)
    console.print(printing.table(("policy", f"bytes out of {ranks}"), bars))


def _policy_row(load: PolicyLoad, *, best: bool, stages: bool) -> Iterable[str | Text]:
    style = "bold green" if best else ""
    return (
        Text(load.replica_policy, style=style),
        Text(f"{load.seconds * 1e3:,.2f} ms", style=style),
        f"{nbytes(load.busiest.load)} {printing.rank_name(load.busiest.rank, stages=stages)}",
        f"{load.unevenness:.2f}",
        f"{_link(load.bottleneck, stages=stages)}, {nbytes(load.bottleneck.load)}",
    )


def _link(link: LinkTime, *, stages: bool) -> str:
    way = "out of" if link.side == "producer" else "into"
    return f"{way} {link.side} {printing.rank_name(link.rank, stages=stages)}"


def _bars(load: PolicyLoad, step: int, most: int) -> str:
    tops = [int(load.out[at : at + step].max()) for at in range(0, len(load.out), step)]
    return "".join(
        _BAR_HEIGHTS[(top * len(_BAR_HEIGHTS) - 1) // most] if top else "·" for top in tops
    )


def _policy(load: PolicyLoad) -> dict[str, Any]:
    link = load.bottleneck
    return {
        "seconds": load.seconds,
        "bottleneck": {"side": link.side, "rank": link.rank, "bytes": link.load},
        "max_over_mean": load.unevenness,
        "out_bytes": dict(zip(map(str, load.producer_ranks), load.out.tolist(), strict=True)),
        "in_bytes": dict(zip(map(str, load.consumer_ranks), load.into.tolist(), strict=True)),
    }
