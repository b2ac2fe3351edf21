"""Slices and shardings agree with tables recorded from torch and vLLM, row by row.

torch moves shards of a sharded tensor; a KV cache whose heads are sharded to TP ranks is one, so
torch's plan for it is an answer to the same question, worked out by someone else's code.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from builders import engine, gqa

import kvspec
from kvspec.ownership.sharding import even_sharding
from kvspec.ownership.slices import TPTransferSlice

GOLDENS = Path(__file__).parent
TORCH: dict[str, Any] = json.loads(
    gzip.decompress((GOLDENS / "torch_planner.json.gz").read_bytes())
)
QKV: dict[str, Any] = json.loads((GOLDENS / "vllm_qkv_loadable.json").read_text())
HEADS = sorted({row[0] for row in TORCH["rows"]})


def spec_of(heads: int) -> kvspec.FullAttentionSpec:
    """Return a spec of *heads* KV heads; nothing else of it matters to a slice."""
    return gqa(heads, head_size=128)


def offsets(slices: tuple[TPTransferSlice, ...]) -> set[tuple[int, int, int, int]]:
    """Return (source rank, first head in the source, first head in the target, heads) of each."""
    assert {("k", "v")} == {each.parts for each in slices}
    return {
        (each.remote_rank, each.remote_range.start, each.local_range.start, len(each.local_range))
        for each in slices
    }


def wanted(target: list[list[int]]) -> set[tuple[int, ...]]:
    """Return torch's slices of one target rank as a set."""
    return {tuple(each) for each in target}


@pytest.mark.parametrize("heads", HEADS)
def test_a_rank_s_slices_are_torch_s(heads: int) -> None:
    """`get_tp_transfer_slices` gives torch's slices where the lowest replica is read."""
    spec = spec_of(heads)
    wrong = [
        (source, target, rank)
        for each, source, target, ranks in TORCH["rows"]
        if each == heads
        for rank, slices in enumerate(ranks)
        if wanted(slices)
        != offsets(spec.get_tp_transfer_slices(rank, target, source, replica_policy="first"))
    ]
    assert not wrong


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", TORCH["layouts"])
def test_a_plan_s_edges_are_torch_s_in_both_layouts(heads: int, layout: str) -> None:
    """Every edge of the plan is torch's, whichever of heads and tokens is the outer axis."""
    wrong = []
    for each, source, target, ranks in TORCH["rows"]:
        if each != heads:
            continue
        engines = (engine(spec_of(heads), tp=size, layout=layout) for size in (source, target))
        plan = kvspec.plan_transfer(*engines, replica_policy="first")
        found: list[set[tuple[int, ...]]] = [set() for _ in ranks]
        for edge in plan.edges:
            assert {edge.producer.tp} == {s.remote_rank for s in edge.slices}
            found[edge.consumer.tp] |= offsets(edge.slices)
        if [wanted(slices) for slices in ranks] != found:
            wrong.append((source, target))
    assert not wrong


def test_torch_s_table_is_all_there() -> None:
    """All 14,604 recorded rows are compared: 7,302 target ranks, in each of two layouts."""
    targets = sum(len(ranks) for *_, ranks in TORCH["rows"])
    assert len(TORCH["rows"]) == 965
    assert targets == 7302
    assert targets * len(TORCH["layouts"]) == 14604


def test_torch_s_table_reaches_replicas_on_both_sides() -> None:
    """The table has the hard cases: replicated heads, uneven ratios, many sources of one rank."""
    rows = [(heads, source, target) for heads, source, target, _ in TORCH["rows"]]
    assert any(source > heads and target > heads for heads, source, target in rows)
    assert any(source % target and target % source for _, source, target in rows)
    assert max(len(slices) for *_, ranks in TORCH["rows"] for slices in ranks) == 16


@pytest.mark.parametrize(("heads", "tp_size", "per_rank", "replicas"), QKV["rows"])
def test_the_default_sharding_is_vllm_s(
    heads: int, tp_size: int, per_rank: int | None, replicas: int | None
) -> None:
    """Heads of a rank and ranks of a head are vLLM's; where vLLM refuses, no head is lost."""
    sharding = even_sharding(heads, tp_size)
    owners = Counter(head for own in sharding.ranges for head in own)
    assert set(range(heads)) == set(owners)
    if per_rank is None:
        assert heads % tp_size
        assert tp_size % heads
        sizes = [len(own) for own in sharding.ranges]
        assert max(sizes) - min(sizes) <= 1
        return
    assert [per_rank] * tp_size == [len(own) for own in sharding.ranges]
    assert {replicas} == set(owners.values())


def test_vllm_loads_43_of_70() -> None:
    """Of 70 (KV heads, TP) pairs vLLM loads 43, all equal to ours, and refuses 27 uneven ones."""
    assert len(QKV["rows"]) == 70
    assert sum(row[2] is None for row in QKV["rows"]) == 27
