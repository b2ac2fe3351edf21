"""Test layers of one group that have different strides, pools and memories."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from builders import case, engine, gqa, mla, request
from moved import moved
from refused import refusal

import kvspec
from kvspec import RankId
from kvspec.testing import laws

RANK = RankId()
TOKENS = mla(block_size=2, head_size=3, dtype="uint8")
Buffer = np.ndarray[tuple[int], np.dtype[np.uint8]]


def cache(
    side: kvspec.EngineSpec, pages: dict[str, tuple[int, int]]
) -> tuple[kvspec.RankCache, list[Buffer]]:
    """Return a cache whose layers have separate memories: (blocks, bytes per block) of each."""
    group, buffers, regions = side.groups[0], [], []
    part = group.spec.parts[0]
    for layer, (blocks, stride) in pages.items():
        buffers.append(np.zeros(blocks * stride, np.uint8))
        regions.append(
            kvspec.Region(
                group="g", layer=layer, part=part.name, base=buffers[-1].ctypes.data,
                num_blocks=blocks, block_stride=stride, unit_stride=0,
                state_stride=part.content_bytes, content_bytes=part.content_bytes, units=1,
                states=part.states,
            )
        )  # fmt: skip
    memory = [kvspec.Memory(buffer.ctypes.data, buffer.nbytes) for buffer in buffers]
    return kvspec.RankCache(side, RANK, regions, memory), buffers


@pytest.mark.parametrize("fine_reads", [False, True])
def test_rows_span_blocks_only_if_blocks_of_every_layer_are_adjacent(*, fine_reads: bool) -> None:
    """Blocks of layer a are adjacent, blocks of layer b have gaps: no row of b leaves its memory.

    One side has blocks of two tokens and the other of eight. Both directions are tested.
    """
    fine = engine(TOKENS, layers=("a", "b"))
    wide = engine(mla(block_size=8, head_size=3, dtype="uint8"), layers=("a", "b"))
    small, _small = cache(fine, {"a": (9, 6), "b": (9, 10)})
    large, _large = cache(wide, {"a": (3, 30), "b": (3, 24)})
    tables, sides, caches = ([*range(1, 9)], [2, 0]), (fine, wide), (small, large)
    if fine_reads:
        tables, sides, caches = tables[::-1], sides[::-1], caches[::-1]
    by_rank = {RANK: caches[0]}, {RANK: caches[1]}
    assert [] == moved(*sides, request(16, *tables), by_rank)
    table = kvspec.build_table(kvspec.plan_transfer(*sides), *caches)
    for side, rows in zip(caches, (table.producer_rows, table.consumer_rows), strict=True):
        for address, length, _, stride, count in rows.tolist():
            end = address + (count - 1) * stride + length
            assert any(m.address <= address and end <= m.end for m in side.memory)


def test_block_id_outside_pool_of_any_layer_is_rejected() -> None:
    """Block 3 is in the pool of layer a (8 blocks), but not in that of layer b (2 blocks)."""
    side = engine(TOKENS, layers=("a", "b"))
    large, _large = cache(side, {"a": (8, 6), "b": (8, 6)})
    small, _small = cache(side, {"a": (8, 6), "b": (2, 6)})
    for pair, small_side in (((large, small), "consumer"), ((small, large), "producer")):
        table = kvspec.build_table(kvspec.plan_transfer(side, side), *pair)
        assert len(table.descriptors(request(2, [1], [1])))
        error = refusal(lambda table=table: table.select(request(2, [3], [3])))
        assert (f"{small_side}_blocks['g']", 3) == (error.field, error.value)


def test_table_rejects_two_memory_types_on_one_side() -> None:
    """One layer is in host memory and the other in GPU memory."""
    side = engine(TOKENS, layers=("a", "b"))
    plain, _plain = cache(side, {"a": (8, 6), "b": (8, 6)})
    regions = plain.regions[0], attrs.evolve(plain.regions[1], memory_type="VRAM")
    memory = plain.memory[0], attrs.evolve(plain.memory[1], memory_type="VRAM")
    mixed = attrs.evolve(plain, regions=regions, memory=memory)
    plan = kvspec.plan_transfer(side, side)
    for pair in ((plain, mixed), (mixed, plain)):
        error = refusal(lambda pair=pair: kvspec.build_table(plan, *pair), kvspec.MismatchError)
        (mismatch,) = error.mismatches
        assert mismatch.field.endswith("memory_type")


def test_cache_rejects_region_that_leaves_its_memory() -> None:
    """The region ends with its memory. A memory that is one byte shorter is rejected."""
    side = engine(TOKENS)
    valid, _valid = cache(side, {"l": (4, 6)})
    (memory,) = valid.memory
    assert memory.length == len(valid.regions[0].address_range)
    short = attrs.evolve(memory, length=memory.length - 1)
    error = refusal(lambda: attrs.evolve(valid, memory=(short,)))
    assert "regions" in error.field


def test_memory_inside_another_does_not_change_boundaries() -> None:
    """[0, 24) contains [6, 12), where layer a begins, and [24, 48) follows: 24 is a boundary."""
    side = engine(TOKENS, layers=("a", "b"))
    flat = np.zeros(48, np.uint8)
    first = flat.ctypes.data
    bare, _bare = cache(side, {"a": (3, 6), "b": (4, 6)})
    regions = [
        attrs.evolve(region, base=first + start)
        for region, start in zip(bare.regions, (6, 24), strict=True)
    ]
    memory = [kvspec.Memory(first + a, length) for a, length in ((0, 24), (6, 6), (24, 24))]
    assert (first + 24,) == kvspec.RankCache(side, RANK, regions, memory).boundaries


@pytest.mark.parametrize("half", [0, 1])
def test_verify_checks_source_of_both_writes_of_a_content(half: int) -> None:
    """A latent of four bytes arrives in two writes, one of them from another token."""
    side = engine(mla(block_size=2, head_size=4, dtype="uint8"))
    allocated = [kvspec.allocate(side, RANK, 2) for _ in range(2)]
    producers, consumers = ({RANK: cache} for cache, _ in allocated)
    plan, load = kvspec.plan_transfer(side, side), request(1, [1], [1])
    start, stop = (caches[RANK].regions[0].address(1, 0, 0) for caches in (producers, consumers))
    writes = np.array([(start + at, stop + at, 2) for at in (0, 2)], np.uint64)
    assert kvspec.verify(plan, producers, consumers, load, {(RANK, RANK): writes}) is None
    writes[half, 0] += np.uint64(4)
    fault = kvspec.verify(plan, producers, consumers, load, {(RANK, RANK): writes})
    assert fault is not None
    assert ("wrong source", 2 * half) == (fault.kind, fault.byte)


def test_verify_names_context_rank_that_owns_missing_token() -> None:
    """With two context ranks and an interleave of 2, rank 1 owns token 2. Both have its head."""
    producer = engine(gqa(1, block_size=4), tp=2, dcp_size=2, interleave_size=2)
    consumer = engine(gqa(1, block_size=4))
    producers = {rank: kvspec.allocate(producer, rank, 4)[0] for rank in producer.parallel.ranks}
    consumers = {RANK: kvspec.allocate(consumer, RANK, 4)[0]}
    plan = kvspec.plan_transfer(producer, consumer)
    load = request(4, [1], [1])
    rows = kvspec.build_table(plan, producers[RANK], consumers[RANK]).descriptors(load)
    fault = kvspec.verify(plan, producers, consumers, load, {(RANK, RANK): rows})
    assert fault is not None
    assert ("missing", 2, (RankId(tp=1),)) == (fault.kind, fault.token, fault.wanted_from)


def test_plan_rejects_edges_that_do_not_cover_heads_once() -> None:
    """One edge is missing, or there twice. Either way the heads of consumer tp0 are wrong."""
    plan = kvspec.plan_transfer(engine(gqa(4), tp=4), engine(gqa(4), tp=2))
    for edges in (plan.edges[1:], (*plan.edges, plan.edges[0])):
        error = refusal(lambda edges=edges: attrs.evolve(plan, edges=edges), kvspec.KVSpecError)
        assert "tp0" in str(error)


def test_plan_rejects_empty_slice() -> None:
    """A slice without units would move the first unit of both ranks."""
    plan = kvspec.plan_transfer(engine(gqa(4), tp=4), engine(gqa(4), tp=2))
    first = plan.edges[0]
    nothing = attrs.evolve(
        first.slices[0], global_range=range(0), local_range=range(0), remote_range=range(0)
    )
    edges = (attrs.evolve(first, slices=(*first.slices, nothing)), *plan.edges[1:])
    error = refusal(lambda: attrs.evolve(plan, edges=edges), kvspec.KVSpecError)
    assert "tp0" in str(error)


def test_table_that_does_not_begin_with_virtual_block_is_rejected() -> None:
    """Two context ranks with blocks of 4 have virtual blocks of 8, so token 4 is inside one."""
    side = engine(gqa(1, block_size=4), tp=2, dcp_size=2, interleave_size=2)
    caches = [kvspec.allocate(side, RANK, 4)[0] for _ in range(2)]
    table = kvspec.build_table(kvspec.plan_transfer(side, side), *caches)
    valid = kvspec.BlockTable([1, 2], 8)
    assert len(table.select(request(20, valid, valid, cached_tokens=8)))
    for at, first in ((0, 4), (1, 12)):
        tables = [valid, valid]
        tables[at] = kvspec.BlockTable([1, 2], first)
        error = refusal(lambda tables=tables: table.select(request(16, *tables, cached_tokens=12)))
        assert error.field.endswith("first_token")
        assert first == error.value


def test_head_of_cut_tile_is_not_joined_to_next_tile() -> None:
    """Blocks have 8 tokens and, padded, 12. With one cached token the first tile moves 3 of 4."""
    sides = (
        engine(gqa(1, block_size=8, head_size=1, dtype="uint8"), layout="LBNHC"),
        engine(
            gqa(1, block_size=12, head_size=1, dtype="uint8", page_size_padded=200), layout="LBNHC"
        ),
    )
    drawn = case(*sides, request(24, [3, 1, 5], [2, 0], cached_tokens=1))
    assert [] == laws.broken(laws.KVSPEC, drawn, drawn)


@pytest.mark.parametrize(
    ("spec", "interleave_size", "word"),
    [
        (gqa(1, block_size=16, tokens_per_state=4), 2, "tokens_per_state"),
        (gqa(1, block_size=16), 3, "block_size"),
    ],
)
def test_engine_rejects_interleave_that_divides_row_or_block_unevenly(
    spec: kvspec.LayerSpec, interleave_size: int, word: str
) -> None:
    """An interleave has whole rows, and a block has whole interleaves."""
    error = refusal(lambda: engine(spec, tp=2, dcp_size=2, interleave_size=interleave_size))
    assert ("interleave_size", interleave_size) == (error.field, error.value)
    assert word in str(error)


def test_allocate_shared_requires_equal_numbers_of_blocks() -> None:
    """Two groups with equal pages share a memory, so they have one pool."""
    groups = [
        kvspec.KVCacheGroup(name=name, layers=(name,), spec=TOKENS) for name in ("one", "two")
    ]
    kvspec.allocate(engine(*groups), RANK, {"one": 4, "two": 4}, shared=True)
    numbers = {"one": 4, "two": 5}
    error = refusal(lambda: kvspec.allocate(engine(*groups), RANK, numbers, shared=True))
    assert "shared" == error.field
    assert "5" in error.value
