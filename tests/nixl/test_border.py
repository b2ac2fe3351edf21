"""What real engines hand over, moved between real processes over NIXL, every byte compared."""

from __future__ import annotations

from typing import Any

import pytest

import kvspec
from kvspec.run import Job, run_transfer

pytest.importorskip("nixl_cu13")

MLA = kvspec.MLAAttentionSpec(block_size=16, head_size=64, dtype="bfloat16")
DRAFT = kvspec.FullAttentionSpec(
    block_size=16, total_num_kv_heads=1, head_size=32, dtype="bfloat16"
)
HEADS = kvspec.FullAttentionSpec(block_size=16, total_num_kv_heads=6, head_size=32, dtype="float16")


def engine(*groups: kvspec.KVCacheGroup, **parallel: Any) -> kvspec.EngineSpec:
    """Return an engine of these groups."""
    return kvspec.EngineSpec(
        groups=groups, parallel=kvspec.ParallelConfig(**parallel), layout="LKBNHC"
    )


TARGET = kvspec.KVCacheGroup(name="target", layers=["layers.0", "layers.1"], spec=MLA)
BESIDE = kvspec.KVCacheGroup(name="draft", layers=["draft.0"], spec=DRAFT, context_sharded=False)


def dealt(**deals: Any) -> kvspec.KVCacheGroup:
    """Return a group of six heads, dealt as *deals* say by part."""
    return kvspec.KVCacheGroup(name="full", layers=["layers.0"], spec=HEADS, unit_deals=deals)


PAIRS = {
    "a draft whole beside a target that shares its tokens": (
        engine(TARGET, BESIDE),
        engine(TARGET, BESIDE, tp_size=2, dcp_size=2, interleave_size=16),
    ),
    "keys and values dealt differently": (
        engine(dealt(), tp_size=3),
        engine(dealt(k=(range(1), range(1, 6)), v=(range(4), range(4, 6))), tp_size=2),
    ),
}


@pytest.mark.nixl
@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_every_byte_is_right(pair: tuple[kvspec.EngineSpec, kvspec.EngineSpec], mode: Any) -> None:
    """Two requests, the first tokens cached, in blocks of both sides' own."""
    producer, consumer = pair
    report = run_transfer(
        Job(producer=producer, consumer=consumer, tokens=75, cached=16, mode=mode)
    )
    assert () == tuple(report.faults)
    assert report.ok
