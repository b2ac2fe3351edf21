"""Test that plans read and notify the same ranks as vLLM's connector, at the same heads.

The 8960 rows were recorded by running vLLM 0.33. A row has a consumer rank, two TP sizes and the
KV heads of one of five kinds of model. Rows that cannot be compared are counted with the reason.
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


def comparison_of(row: list[Any]) -> str:
    """Return "compared", or why one row of vLLM's mapping cannot be compared."""
    kind, heads, tp_size, remote_tp, _, answer = row
    if "mla" not in kind and not (shards(heads, tp_size) and shards(heads, remote_tp)):
        return "impossible model"
    if isinstance(answer, str):
        return "rejected by vLLM"
    return "compared"


def test_every_row_of_mapping_is_counted() -> None:
    """The heads of an impossible model cannot be divided or replicated evenly.

    vLLM rejects a row if neither TP size is a multiple of the other.
    """
    assert Counter(comparison_of(row) for row in TP_MAPPING) == {
        "compared": 3588,
        "rejected by vLLM": 593,
        "impossible model": 4779,
    }


def test_every_row_of_mapping_has_plan() -> None:
    """The 1568 different (kinds, heads, sizes) have plans, which check that heads are covered."""
    assert len({id(plan_of(*row[:4])) for row in TP_MAPPING}) == 1568


def test_sources_and_head_offsets_equal_vllms() -> None:
    """The source ranks of each group are equal, and the head offset if there is one source."""
    for row in TP_MAPPING:
        if comparison_of(row) != "compared":
            continue
        kind, heads, tp_size, remote_tp, rank, (sources, head_offset, *_) = row
        plan = plan_of(kind, heads, tp_size, remote_tp)
        edges = [edge for edge in plan.edges if edge.consumer.tp == rank]
        ours = [
            sorted({edge.producer.tp for edge in edges if edge.group == name})
            for name in kind.split("+")
        ]
        assert [sorted(ranks) for ranks in sources] == ours
        if tp_size >= remote_tp:
            first = edges[0].slices[0]
            assert head_offset * len(first.local_range) == first.remote_range.start


def test_notified_ranks_and_consumer_counts_equal_vllms() -> None:
    """A consumer notifies the same ranks, and each of these waits for as many consumers."""
    for row in TP_MAPPING:
        if comparison_of(row) != "compared":
            continue
        kind, heads, tp_size, remote_tp, rank, (*_, consumers, handshakes) = row
        plan = plan_of(kind, heads, tp_size, remote_tp)
        notified = plan.notifies(kvspec.RankId(tp=rank))
        assert sorted(handshakes) == [peer.tp for peer in notified]
        assert [consumers] * len(notified) == [len(plan.notifiers(peer)) for peer in notified]
