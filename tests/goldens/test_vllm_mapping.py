"""Which ranks vLLM's connector reads, where it begins in their heads, and whom it tells.

Recorded by running vLLM 0.33: 8960 rows of a consumer rank, two TP sizes and KV heads, for five
kinds of model. Rows that cannot be compared are counted with their reason.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import kvspec

GOLDENS = Path(__file__).parent
TP_MAPPING: list[list[Any]] = json.loads(
    gzip.decompress((GOLDENS / "vllm_tp_mapping.json.gz").read_bytes())
)["rows"]


@cache
def plan_of(kind: str, heads: int, tp_size: int, remote_tp: int) -> kvspec.TransferPlan:
    """Return the plan from *remote_tp* producer ranks to *tp_size* consumer ranks."""
    sizes = {"block_size": 16, "head_size": 8, "dtype": "uint8"}
    full = kvspec.FullAttentionSpec(**sizes, total_num_kv_heads=heads)
    specs: dict[str, kvspec.LayerSpec] = {
        "full": full,
        "sw": kvspec.SlidingWindowSpec(**sizes, total_num_kv_heads=heads, sliding_window=32),
        "mla": kvspec.MLAAttentionSpec(**sizes),
        "mamba": kvspec.MambaSpec.mamba1(
            intermediate_size=48, state_size=4, conv_kernel=4, dtype="uint8"
        ),
    }
    groups = tuple(
        kvspec.KVCacheGroup(name=name, layers=(f"{name}.0",), spec=specs[name])
        for name in kind.split("+")
    )
    engines = [
        kvspec.EngineSpec(groups=groups, parallel=kvspec.ParallelConfig(tp_size=size))
        for size in (remote_tp, tp_size)
    ]
    return kvspec.plan_transfer(*engines)


def shards(heads: int, size: int) -> bool:
    """Return whether a model can have *heads* KV heads on *size* ranks."""
    return heads % size == 0 or size % heads == 0


def fate(row: list[Any]) -> str:
    """Return what can be compared of one row of vLLM's mapping."""
    kind, heads, tp_size, remote_tp, _, answer = row
    if "mla" not in kind and not (shards(heads, tp_size) and shards(heads, remote_tp)):
        return "no such model: heads neither divide nor replicate"
    if isinstance(answer, str):
        return "vLLM refuses: one TP size is no multiple of the other"
    return "compared"


def test_every_row_of_the_mapping_is_accounted_for() -> None:
    """8960 rows: 3588 compared, 593 refused by vLLM, 4779 of heads that no model can shard so."""
    told = Counter(fate(row) for row in TP_MAPPING)
    assert told == {
        "compared": 3588,
        "vLLM refuses: one TP size is no multiple of the other": 593,
        "no such model: heads neither divide nor replicate": 4779,
    }


def test_what_vllm_cannot_map_has_a_plan() -> None:
    """All 1568 (kinds, heads, sizes) have a plan: exact cover is checked where it is made."""
    assert len({id(plan_of(*row[:4])) for row in TP_MAPPING}) == 1568


def test_sources_and_offsets_are_vllm_s() -> None:
    """Source ranks of each group, and the head offset in the one source, are those of vLLM."""
    for row in TP_MAPPING:
        if fate(row) != "compared":
            continue
        kind, heads, tp_size, remote_tp, rank, (sources, head_offset, *_) = row
        plan = plan_of(kind, heads, tp_size, remote_tp)
        edges = [edge for edge in plan.edges if edge.consumer.tp == rank]
        ours = [
            sorted({edge.producer.tp for edge in edges if edge.group == name})
            for name in kind.split("+")
        ]
        assert [sorted(each) for each in sources] == ours
        if tp_size >= remote_tp:
            first = edges[0].slices[0]
            assert head_offset * len(first.local_range) == first.remote_range.start


def test_handshakes_and_counts_are_vllm_s() -> None:
    """A consumer tells whom vLLM's tells, and each of these waits for as many consumers."""
    for row in TP_MAPPING:
        if fate(row) != "compared":
            continue
        kind, heads, tp_size, remote_tp, rank, (*_, consumers, handshakes) = row
        plan = plan_of(kind, heads, tp_size, remote_tp)
        told = plan.notifies(kvspec.RankId(tp=rank))
        assert sorted(handshakes) == [each.tp for each in told]
        assert [consumers] * len(told) == [len(plan.notifiers(each)) for each in told]
