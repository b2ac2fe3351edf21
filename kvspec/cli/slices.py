"""`kvspec slices`: which units each rank exchanges with which other rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import attrs
import typer
from rich import box
from rich.table import Table

from kvspec.cli.options import (
    POLICY_NAMES,
    RANKS_PER_NODE,
    election_of,
    model_groups,
    output,
    refusals,
)
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.ownership.election import Election, Role
from kvspec.ownership.parallel import MAX_RANKS, ParallelConfig
from kvspec.ownership.slices import TPTransferSlice
from kvspec.plan.plan import plan_transfer
from kvspec.specs import FullAttentionSpec, LayerSpec, MambaSpec, MLAAttentionSpec

_HEAD = 128  # elements: slices count units, so any size does


def _attention(heads: int, groups: int) -> LayerSpec:
    del groups
    return FullAttentionSpec(
        block_size=16, total_num_kv_heads=heads, head_size=_HEAD, dtype="bfloat16"
    )


def _mla(heads: int, groups: int) -> LayerSpec:
    del heads, groups
    return MLAAttentionSpec(block_size=16, head_size=576, dtype="bfloat16")


def _mamba1(heads: int, groups: int) -> LayerSpec:
    del groups
    return MambaSpec.mamba1(intermediate_size=heads, state_size=16, conv_kernel=4, dtype="bfloat16")


def _mamba2(heads: int, groups: int) -> LayerSpec:
    return MambaSpec.mamba2(
        num_heads=heads,
        head_dim=64,
        n_groups=groups,
        state_size=_HEAD,
        conv_kernel=4,
        dtype="bfloat16",
    )


def _gated_delta_net(heads: int, groups: int) -> LayerSpec:
    return MambaSpec.gated_delta_net(
        num_k_heads=groups,
        num_v_heads=heads,
        head_k_dim=_HEAD,
        head_v_dim=_HEAD,
        conv_kernel=4,
        dtype="bfloat16",
    )


KINDS: dict[str, Callable[[int, int], LayerSpec]] = {
    "attention": _attention,
    "mla": _mla,
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "gated-delta-net": _gated_delta_net,
}
"""Kinds of layer that need no model, each from its heads (or channels) and groups (key heads)."""


@attrs.frozen
class _Row:
    """One slice of one rank of one group (empty if there is only one)."""

    group: str
    rank: int
    slice: TPTransferSlice


def slices(
    heads: int | None = typer.Option(
        None, help="KV heads (SSM or value heads, channels of mamba1) of a model without a name."
    ),
    model: str | None = typer.Option(
        None, help="A model of the catalogue, or the path of a config.json, instead of --heads."
    ),
    kind: str = typer.Option("attention", metavar="|".join(KINDS), help="What --heads counts."),
    groups: int = typer.Option(1, help="Groups of mamba2, or key heads of a gated delta net."),
    producer_tp: int = typer.Option(2, help="Tensor-parallel size of the producer."),
    consumer_tp: int = typer.Option(3, help="Tensor-parallel size of the consumer."),
    role: str = typer.Option(
        "consumer", metavar="consumer|producer", help="Whose ranks to list, one after the other."
    ),
    rank: int | None = typer.Option(None, help="Only this rank."),
    replicas: str = typer.Option(
        "spread", metavar=POLICY_NAMES, help="Which of several equal ranks is read."
    ),
    ranks_per_node: int | None = RANKS_PER_NODE,
    as_json: bool = typer.Option(False, "--json", help="Print a JSON array instead of a table."),
    svg: str | None = typer.Option(
        None, metavar="FILE", help="Draw who reads which units from whom; group by group."
    ),
) -> None:
    """Show which units each rank exchanges with which rank of the other side."""
    with refusals():
        specs = _specs(model, heads, kind, groups)
        positive_int("producer_tp", producer_tp, most=MAX_RANKS)
        positive_int("consumer_tp", consumer_tp, most=MAX_RANKS)
        sides = [ParallelConfig(tp_size=size) for size in (producer_tp, consumer_tp)]
        election = election_of(replicas, ranks_per_node, *sides)
        local, remote = consumer_tp, producer_tp
        if role == "producer":
            local, remote = remote, local
        if rank is not None and not 0 <= rank < local:
            raise SpecError("rank", rank, f"a rank of the {role}: 0 to {local - 1}")
        rows = [
            _Row(name, each, found)
            for name, spec in specs.items()
            for each in (range(local) if rank is None else (rank,))
            for found in spec.get_tp_transfer_slices(
                each, local, remote, cast("Role", role), election
            )
        ]
        if svg is not None:
            _draw(specs, producer_tp, consumer_tp, election, svg)
    if as_json:
        typer.echo(json.dumps([_plain(each, role) for each in rows], indent=1))
    else:
        output().print(_table(rows, role))


def _specs(model: str | None, heads: int | None, kind: str, groups: int) -> dict[str, LayerSpec]:
    if model is not None:
        return {each.name: each.spec for each in model_groups(model, 16)}
    if kind not in KINDS:
        raise SpecError("kind", kind, f"one of {', '.join(KINDS)}")
    if heads is None and kind != "mla":
        raise SpecError("heads", heads, "a number of heads, or --model NAME, or --kind mla")
    return {"": KINDS[kind](1 if heads is None else heads, groups)}


def _draw(
    specs: dict[str, LayerSpec], producer: int, consumer: int, election: Election, file: str
) -> None:
    """Write the picture of the plan between engines of these TP sizes, a file for each group."""
    if find_spec("svg") is None:
        raise SpecError("svg", file, "svg.py to draw with: pip install 'kvspec[draw]'")
    if not Path(file).name:
        raise SpecError("svg", file, "a file that can be written: this is a folder")
    groups = [
        KVCacheGroup(name=name or "layers", layers=spec.layers or (f"{name}.0",), spec=spec)
        for name, spec in specs.items()
    ]
    ours, theirs = (
        EngineSpec(groups=groups, parallel=ParallelConfig(tp_size=size))
        for size in (producer, consumer)
    )
    plan = plan_transfer(ours, theirs, election)
    for group in groups:
        path = Path(file)
        if len(groups) > 1:
            path = path.with_stem(f"{path.stem}-{group.name}")
        try:
            path.write_text(plan.to_svg(group=group.name), encoding="utf-8")
            typer.echo(f"wrote {path}", err=True)
        except OSError as error:
            raise SpecError("svg", str(path), f"a file that can be written: {error}") from None


def _other(role: str) -> str:
    return "producer" if role == "consumer" else "consumer"


def _table(rows: list[_Row], role: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grouped, striped = any(e.group for e in rows), any(not e.slice.stripe.whole for e in rows)
    layered = any(each.slice.layers for each in rows)
    names = [*(["group"] if grouped else []), role, _other(role), "parts", "units of the model"]
    names += [f"in the {role}", f"in the {_other(role)}"]
    names += [*(["blocks"] if striped else []), *(["layers"] if layered else [])]
    for name in names:
        table.add_column(name, overflow="fold")
    before = None
    for each in rows:
        if before is not None and before != (each.group, each.rank):
            table.add_section()
        before = (each.group, each.rank)
        table.add_row(*_cells(each, grouped=grouped, striped=striped, layered=layered))
    return table


def _cells(row: _Row, *, grouped: bool, striped: bool, layered: bool) -> Iterator[str]:
    each = row.slice
    if grouped:
        yield row.group
    yield f"tp{row.rank}"
    yield f"tp{each.remote_rank}"
    yield "+".join(each.parts)
    for units in (each.global_range, each.local_range, each.remote_range):
        yield str(units.start) if len(units) == 1 else f"{units.start}..{units.stop - 1}"
    if striped:
        yield str(each.stripe).removeprefix("blocks ")
    if layered:
        yield (
            f"{each.layers[0]} and {len(each.layers) - 1} more"
            if each.layers[1:]
            else "".join(each.layers)
        )


def _plain(row: _Row, role: str) -> dict[str, Any]:
    each = row.slice
    ranges = {
        name: [units.start, units.stop]
        for name, units in (
            ("global_range", each.global_range),
            ("local_range", each.local_range),
            ("remote_range", each.remote_range),
        )
    }
    return {
        "group": row.group or None,
        "role": role,
        "rank": row.rank,
        "remote_rank": each.remote_rank,
        "parts": list(each.parts),
        **ranges,
        "layers": list(each.layers),
        "stripe": [each.stripe.first, each.stripe.step],
    }
