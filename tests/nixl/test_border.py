"""Test that NIXL moves the memory of real engines. The oracle compares every byte.

The ranks are real processes. Memory that `allocate` cannot make belongs
to agents of this process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import attrs
import builders
import pytest
from typed_tensors import raw_pages

import kvspec
from kvspec.adapters import vllm
from kvspec.nixl import NixlRank
from kvspec.run.job import Job
from kvspec.run.local import run_transfer
from kvspec.testing.carve import logical_views
from kvspec.testing.world import World, world

os.environ.setdefault("UCX_NET_DEVICES", "lo")
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


TARGET_GROUP = kvspec.KVCacheGroup(name="target", layers=["layers.0", "layers.1"], spec=MLA)
DRAFT_GROUP = kvspec.KVCacheGroup(
    name="draft", layers=["draft.0"], spec=DRAFT, context_sharded=False
)


def sharded(**shardings: Any) -> kvspec.KVCacheGroup:
    """Return a group of six heads. *shardings* contains the sharding of each part."""
    return kvspec.KVCacheGroup(name="full", layers=["layers.0"], spec=HEADS, shardings=shardings)


PAIRS = {
    "a whole draft next to a target that shares its tokens": (
        engine(TARGET_GROUP, DRAFT_GROUP),
        engine(TARGET_GROUP, DRAFT_GROUP, tp_size=2, dcp_size=2, interleave_size=16),
    ),
    "keys and values sharded differently": (
        engine(sharded(), tp_size=3),
        engine(sharded(k=(range(1), range(1, 6)), v=(range(4), range(4, 6))), tp_size=2),
    ),
}


@pytest.mark.nixl
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_transfer_of_special_engines_moves_every_byte(
    pair: tuple[kvspec.EngineSpec, kvspec.EngineSpec],
) -> None:
    """The consumer has the first 16 tokens cached. Both sides use block ids of their own."""
    producer, consumer = pair
    report = run_transfer(Job(producer=producer, consumer=consumer, tokens=75, cached=16))
    assert () == tuple(report.faults)
    assert report.ok


Caches = Mapping[kvspec.RankId, kvspec.RankCache]


def carry(here: World, mode: str, caches: tuple[Caches, Caches] | None = None) -> None:
    """Move the request of *here* between real agents, one for each rank, in its caches."""
    sources, targets = caches or (
        {rank: cache for rank, (cache, _) in side.items()}
        for side in (here.producers, here.consumers)
    )
    with ExitStack() as stack:
        agents = [
            {rank: stack.enter_context(NixlRank()) for rank in side} for side in (sources, targets)
        ]
        for own, side in zip(agents, (sources, targets), strict=True):
            for rank, cache in side.items():
                own[rank].register(cache.memory, owner=here)
        moves = 0
        for target, cache in targets.items():
            for source in here.plan.sources(target):
                table = kvspec.build_table(here.plan, sources[source], cache)
                selection = table.select(here.case.request)
                rows = table.producer_rows, table.consumer_rows
                pair = agents[0][source], agents[1][target]
                if mode == "pull":
                    rows, pair = rows[::-1], pair[::-1]
                near, far = pair
                peer = near.connect(far.metadata())
                local, remote = near.prepare(rows[0]), near.prepare(rows[1], peer=peer)
                move = near.read if mode == "pull" else near.write
                move(local, selection, remote, request="border", timeout=20).wait()
                moves += len(selection)
        assert moves > 0


def case(
    producer: kvspec.EngineSpec,
    consumer: kvspec.EngineSpec,
    blocks: tuple[Any, Any],
    tokens: int,
    cached: Any = 0,
) -> Any:
    """Return the case of a request between two engines. *blocks* contains the tables of both."""
    request = builders.request(tokens, *blocks, cached_tokens=cached)
    return builders.case(producer, consumer, request)


def pages(block_size: int, page_format: str, **more: Any) -> kvspec.EngineSpec:
    """Return an engine of four heads. A page contains the keys and values of a head together."""
    spec = builders.gqa(4, block_size=block_size, head_size=16, page_format=page_format)
    return builders.engine(spec, layers=("l", "m"), layout="LBHKNC", **more)


MODES = pytest.mark.parametrize("mode", ["pull", "push"])


@pytest.mark.nixl
@MODES
def test_transposed_keys_move_to_larger_blocks_and_then_to_plain_rows(mode: str) -> None:
    """Pages of CPU attention move from 32 tokens to 64, and from there to rows of 16 tokens."""
    small, large, plain = (
        pages(32, "keys-transposed", tp=2),
        pages(64, "keys-transposed"),
        pages(16, "plain", tp=4),
    )
    large_blocks = [5, 0, 3]
    first = world(case(small, large, ([4, 1, 6, 2, 0], large_blocks), 150))
    carry(first, mode)
    assert [] == first.differences()
    onward = case(large, plain, (large_blocks, [9, 2, 3, 7, 1, 11, 0, 4, 6, 5]), 150, cached=33)
    second = world(onward, producers=first.consumers)
    carry(second, mode)
    assert [] == second.differences()


@pytest.mark.nixl
@MODES
def test_nvfp4_pages_of_four_ranks_move_to_one(mode: str) -> None:
    """Keys, values and their scales are four parts. A row has the scales of four tokens."""
    spec = builders.gqa(
        8, head_size=32, dtype="uint8", scale_dtype="float8_e4m3fn", elements_per_scale=8,
        tokens_per_scale=4,
    )  # fmt: skip
    wide = builders.engine(spec, layers=("l", "m"), tp=4)
    assert ["k", "k_scale", "v", "v_scale"] == [part.name for part in spec.parts]
    blocks = [3, 0, 4, 1], [1, 5, 6, 2]
    here = world(case(wide, builders.engine(spec, layers=("l", "m")), blocks, 60, cached=20))
    carry(here, mode)
    assert [] == here.differences()


HYBRID = [
    builders.group(builders.gqa(4), "a.0", name="rows"),
    builders.group(
        attrs.evolve(builders.mamba2(), page_size_padded=200), "s.0", "s.1", name="states"
    ),
]


def vllm_caches(engine: kvspec.EngineSpec, held: Any, pools: Mapping[str, int]) -> Caches:
    """Return the caches that vLLM's adapter reads from raw pages of states and from rows."""
    caches = {}
    for rank, (_, storage) in held.items():
        raw = raw_pages(engine, rank, storage, pools)
        assert {"s.0", "s.1"} == set(raw)
        keys, values = (logical_views(engine, rank, storage, pools)["rows", "a.0", p] for p in "kv")
        shape = (*keys.shape[:3], keys.shape[3] + values.shape[3])
        rows = storage["rows"].reshape(shape)
        assert (keys.ctypes.data, values.ctypes.data) == (
            rows.ctypes.data, rows.ctypes.data + keys.shape[3]
        )  # fmt: skip
        caches[rank] = vllm.rank_cache(engine, rank, {**raw, "a.0": rows})
    return caches


@pytest.mark.nixl
@MODES
def test_hybrid_moves_if_its_states_are_raw_pages(mode: str) -> None:
    """The adapter of vLLM divides `[B, 1, 1, bytes]` into conv and SSM states."""
    two, four = (builders.engine(*HYBRID, tp=tp) for tp in (2, 4))
    tables = {"rows": [4, 0, 2], "states": [3]}, {"rows": [1, 3, 0], "states": [1]}
    here = world(case(two, four, tables, 45, cached={"rows": 7}))
    caches = (
        vllm_caches(two, here.producers, here.case.producer_pool),
        vllm_caches(four, here.consumers, here.case.consumer_pool),
    )
    carry(here, mode, caches)
    assert [] == here.differences()
