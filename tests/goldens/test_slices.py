"""Test that slices and shardings equal tables recorded from torch and vLLM, row by row.

A KV cache whose heads are sharded over TP ranks is a sharded tensor. torch plans how to move the
shards of such a tensor, so its plan is an independent result for the same task.
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
    """Return a spec of *heads* KV heads. Slices do not depend on its other fields."""
    return gqa(heads, head_size=128)


def offsets(slices: tuple[TPTransferSlice, ...]) -> set[tuple[int, int, int, int]]:
    """Return (source rank, first head in the source, first head in the target, heads) of each."""
    assert {("k", "v")} == {slice_.parts for slice_ in slices}
    return {
        (
            slice_.remote_rank,
            slice_.remote_range.start,
            slice_.local_range.start,
            len(slice_.local_range),
        )
        for slice_ in slices
    }


def torch_offsets(slices: list[list[int]]) -> set[tuple[int, ...]]:
    """Return torch's slices of one target rank as a set."""
    return {tuple(slice_) for slice_ in slices}


@pytest.mark.parametrize("heads", HEADS)
def test_slices_of_rank_equal_torchs(heads: int) -> None:
    """Torch reads the first replica, so the policy is `first`."""
    spec = spec_of(heads)
    wrong = [
        (source, target, rank)
        for row_heads, source, target, ranks in TORCH["rows"]
        if row_heads == heads
        for rank, slices in enumerate(ranks)
        if torch_offsets(slices)
        != offsets(spec.get_tp_transfer_slices(rank, target, source, replica_policy="first"))
    ]
    assert not wrong


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", TORCH["layouts"])
def test_edges_of_plan_equal_torchs_in_both_layouts(heads: int, layout: str) -> None:
    """The outer axis of the layout is the heads or the tokens."""
    wrong = []
    for row_heads, source, target, ranks in TORCH["rows"]:
        if row_heads != heads:
            continue
        engines = (engine(spec_of(heads), tp=size, layout=layout) for size in (source, target))
        plan = kvspec.plan_transfer(*engines, replica_policy="first")
        by_rank: list[set[tuple[int, ...]]] = [set() for _ in ranks]
        for edge in plan.edges:
            assert {edge.producer.tp} == {slice_.remote_rank for slice_ in edge.slices}
            by_rank[edge.consumer.tp] |= offsets(edge.slices)
        if [torch_offsets(slices) for slices in ranks] != by_rank:
            wrong.append((source, target))
    assert not wrong


def test_torch_table_is_complete() -> None:
    """The table has 7,302 target ranks, which are compared in two layouts: 14,604 cases."""
    targets = sum(len(ranks) for *_, ranks in TORCH["rows"])
    assert len(TORCH["rows"]) == 965
    assert targets == 7302
    assert targets * len(TORCH["layouts"]) == 14604


def test_torch_table_has_hard_cases() -> None:
    """It has replicated heads on both sides, uneven ratios, and 16 sources of one rank."""
    rows = [(heads, source, target) for heads, source, target, _ in TORCH["rows"]]
    assert any(source > heads and target > heads for heads, source, target in rows)
    assert any(source % target and target % source for _, source, target in rows)
    assert max(len(slices) for *_, ranks in TORCH["rows"] for slices in ranks) == 16


@pytest.mark.parametrize(("heads", "tp_size", "per_rank", "replicas"), QKV["rows"])
def test_default_sharding_equals_vllms(
    heads: int, tp_size: int, per_rank: int | None, replicas: int | None
) -> None:
    """Heads per rank and ranks per head are equal. Sizes that vLLM rejects are shared evenly."""
    sharding = even_sharding(heads, tp_size)
    owners = Counter(head for heads_of_rank in sharding.ranges for head in heads_of_rank)
    assert set(range(heads)) == set(owners)
    if per_rank is None:
        assert heads % tp_size
        assert tp_size % heads
        sizes = [len(heads_of_rank) for heads_of_rank in sharding.ranges]
        assert max(sizes) - min(sizes) <= 1
        return
    assert [per_rank] * tp_size == [len(heads_of_rank) for heads_of_rank in sharding.ranges]
    assert {replicas} == set(owners.values())


def test_vllm_table_has_43_accepted_and_27_rejected_pairs() -> None:
    """VLLM rejects the 27 pairs of (KV heads, TP) in which neither is a multiple of the other."""
    assert len(QKV["rows"]) == 70
    assert sum(row[2] is None for row in QKV["rows"]) == 27
