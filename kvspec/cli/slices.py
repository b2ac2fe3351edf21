"""Implement `kvspec slices`: show the units that each rank exchanges with each other rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, cast

import attrs
import typer

from kvspec.cli.options import (
    AS_JSON,
    RANKS_PER_NODE,
    REPLICA_POLICY,
    model_groups,
    output,
    print_json,
    replica_policy_of,
    reported_errors,
    table,
)
from kvspec.draw import plan_svg
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.ownership.parallel import MAX_RANKS, ParallelConfig
from kvspec.ownership.replicas import ReplicaPolicy, Role
from kvspec.ownership.slices import TPTransferSlice
from kvspec.plan.plan import plan_transfer
from kvspec.specs import FullAttentionSpec, LayerSpec, MambaSpec, MLAAttentionSpec

_ATTENTION: dict[str, Any] = {"block_size": 16, "head_size": 128, "dtype": "bfloat16"}
_STATE: dict[str, Any] = {"conv_kernel": 4, "dtype": "bfloat16"}
# Specs that need no model, from a number of heads (or channels) and of groups (or key heads).
# Slices count units, so the sizes of a unit do not matter here.
KINDS: dict[str, Callable[[int, int], LayerSpec]] = {
    "attention": lambda heads, _: FullAttentionSpec(total_num_kv_heads=heads, **_ATTENTION),
    "mla": lambda *_: MLAAttentionSpec(**_ATTENTION),
    "mamba1": lambda heads, _: MambaSpec.mamba1(intermediate_size=heads, state_size=16, **_STATE),
    "mamba2": lambda heads, groups: MambaSpec.mamba2(
        num_heads=heads, head_dim=64, n_groups=groups, state_size=128, **_STATE
    ),
    "gated-delta-net": lambda heads, groups: MambaSpec.gated_delta_net(
        num_k_heads=groups, num_v_heads=heads, head_k_dim=128, head_v_dim=128, **_STATE
    ),
}

# The name of a group (empty if no model was named), a rank, and one of its slices.
Row = tuple[str, int, TPTransferSlice]


def slices(
    heads: int | None = typer.Option(
        None,
        help="Number of KV heads. For mamba1: channels. For mamba2: SSM heads. "
        "For gated-delta-net: value heads.",
    ),
    model: str | None = typer.Option(
        None,
        help="Name of a model in the catalogue, or path of a config.json. Replaces --heads, "
        "--kind and --groups.",
    ),
    kind: str = typer.Option(
        "attention", metavar="|".join(KINDS), help="Kind of the layers that --heads describes."
    ),
    groups: int = typer.Option(
        1, help="Number of groups of mamba2, or of key heads of gated-delta-net."
    ),
    producer_tp: int = typer.Option(2, help="Tensor-parallel size of the producer."),
    consumer_tp: int = typer.Option(3, help="Tensor-parallel size of the consumer."),
    role: str = typer.Option(
        "consumer", metavar="consumer|producer", help="Side whose ranks are listed."
    ),
    rank: int | None = typer.Option(None, help="List only this rank."),
    replica_policy: str = REPLICA_POLICY,
    ranks_per_node: int | None = RANKS_PER_NODE,
    as_json: bool = AS_JSON,
    svg: str | None = typer.Option(
        None,
        metavar="FILE",
        help="Also draw the exchange as an SVG file. A model with several groups has a file for "
        "each.",
    ),
) -> None:
    """Show which units each rank exchanges with each rank of the other side.

    A unit is a KV head, a latent, or a part of a recurrent state.
    """
    with reported_errors():
        specs = _specs(model, heads, kind, groups)
        positive_int("producer_tp", producer_tp, most=MAX_RANKS)
        positive_int("consumer_tp", consumer_tp, most=MAX_RANKS)
        sides = [ParallelConfig(tp_size=size) for size in (producer_tp, consumer_tp)]
        policy = replica_policy_of(replica_policy, ranks_per_node, *sides)
        local, remote = consumer_tp, producer_tp
        if role == "producer":
            local, remote = remote, local
        if rank is not None and not 0 <= rank < local:
            raise SpecError("rank", rank, f"a rank of the {role}: 0 to {local - 1}")
        rows = [
            (name, own, transfer_slice)
            for name, spec in specs.items()
            for own in (range(local) if rank is None else (rank,))
            for transfer_slice in spec.get_tp_transfer_slices(
                own, local, remote, cast("Role", role), policy
            )
        ]
        if svg is not None:
            _draw(specs, sides, policy, svg)
    if as_json:
        print_json([_values(row, role) for row in rows])
    else:
        _show(rows, role)


def _values(row: Row, role: str) -> dict[str, Any]:
    group, rank, transfer_slice = row
    place = {"group": group or None, "role": role, "rank": rank}
    return place | attrs.asdict(transfer_slice, recurse=False)


def _specs(model: str | None, heads: int | None, kind: str, groups: int) -> dict[str, LayerSpec]:
    if model is not None:
        return {group.name: group.spec for group in model_groups(model, 16)}
    if kind not in KINDS:
        raise SpecError("kind", kind, f"one of {', '.join(KINDS)}")
    if heads is None and kind != "mla":
        raise SpecError("heads", heads, rule="pass --heads, --model or --kind mla")
    return {"": KINDS[kind](1 if heads is None else heads, groups)}


def _draw(
    specs: dict[str, LayerSpec], sides: Sequence[ParallelConfig], policy: ReplicaPolicy, file: str
) -> None:
    """Write pictures of the plan between two engines of these sizes, one file for each group."""
    if not Path(file).name:
        raise SpecError("svg", file, "a file that can be written, but this is a folder")
    groups = [
        KVCacheGroup(name=name or "layers", layers=spec.layers or (f"{name}.0",), spec=spec)
        for name, spec in specs.items()
    ]
    producer, consumer = (EngineSpec(groups=groups, parallel=sizes) for sizes in sides)
    plan = plan_transfer(producer, consumer, policy)
    for group in groups:
        path = Path(file)
        if len(groups) > 1:
            path = path.with_stem(f"{path.stem}-{group.name}")
        try:
            path.write_text(plan_svg(plan, group=group.name), encoding="utf-8")
            typer.echo(f"wrote {path}", err=True)
        except OSError as error:
            raise SpecError("svg", str(path), f"a file that can be written ({error})") from None


def _show(rows: list[Row], role: str) -> None:
    """Print a table without its empty columns."""
    other = "producer" if role == "consumer" else "consumer"
    names = ["group", role, other, "parts", "units of the model", f"in the {role}"]
    names += [f"in the {other}", "blocks", "layers"]
    empty = {
        "group": not any(group for group, _, _ in rows),
        "blocks": all(transfer_slice.stripe.whole for _, _, transfer_slice in rows),
        "layers": not any(transfer_slice.layers for _, _, transfer_slice in rows),
    }
    shown = [not empty.get(name, False) for name in names]
    output().print(table(compress(names, shown), (compress(line, shown) for line in _lines(rows))))


def _lines(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the cells of every slice, and an empty row between two ranks."""
    previous = rows[0][:2] if rows else None
    for group, rank, transfer_slice in rows:
        if previous != (group, rank):
            yield []
        previous = (group, rank)
        units = [
            str(units.start) if len(units) == 1 else f"{units.start}..{units.stop - 1}"
            for units in (
                transfer_slice.global_range,
                transfer_slice.local_range,
                transfer_slice.remote_range,
            )
        ]
        more = f" and {len(transfer_slice.layers) - 1} more" if transfer_slice.layers[1:] else ""
        layers = f"{transfer_slice.layers[0]}{more}" if transfer_slice.layers else ""
        blocks = str(transfer_slice.stripe).removeprefix("blocks ")
        ranks = f"tp{rank}", f"tp{transfer_slice.remote_rank}"
        yield [group, *ranks, "+".join(transfer_slice.parts), *units, blocks, layers]
