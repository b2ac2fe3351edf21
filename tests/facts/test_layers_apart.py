"""Layers of one group may lie differently, in memories and pools of their own; by hand."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from builders import case, engine, gqa, mla, request
from moved import moved

import kvspec
from kvspec import RankId
from kvspec.testing import laws

RANK = RankId()
TOKENS = mla(block_size=2, head_size=3, dtype="uint8")
Buffer = np.ndarray[tuple[int], np.dtype[np.uint8]]


def cache(
    side: kvspec.EngineSpec, pages: dict[str, tuple[int, int]]
) -> tuple[kvspec.RankCache, list[Buffer]]:
    """Return a cache of latents in memories of their own: of each layer (blocks, bytes a block)."""
    group, kept, regions = side.groups[0], [], []
    part = group.spec.parts[0]
    for layer, (blocks, stride) in pages.items():
        kept.append(np.zeros(blocks * stride, np.uint8))
        regions.append(
            kvspec.Region(
                group="g", layer=layer, part=part.name, base=kept[-1].ctypes.data,
                num_blocks=blocks, block_stride=stride, unit_stride=0,
                state_stride=part.content_bytes, content_bytes=part.content_bytes, units=1,
                states=part.states,
            )
        )  # fmt: skip
    memory = [kvspec.Memory(each.ctypes.data, each.nbytes) for each in kept]
    return kvspec.RankCache(side, RANK, regions, memory), kept


@pytest.mark.parametrize("fine_reads", [False, True])
def test_rows_run_on_only_where_every_layer_s_blocks_flow(*, fine_reads: bool) -> None:
    """Layer a's blocks follow each other, b's have a gap: no row of b runs over its end.

    Blocks of two tokens on one side, of eight on the other, whichever of them reads.
    """
    fine = engine(TOKENS, layers=("a", "b"))
    wide = engine(mla(block_size=8, head_size=3, dtype="uint8"), layers=("a", "b"))
    small, _small = cache(fine, {"a": (9, 6), "b": (9, 10)})
    large, _large = cache(wide, {"a": (3, 30), "b": (3, 24)})
    tables, sides, caches = ([*range(1, 9)], [2, 0]), (fine, wide), (small, large)
    if fine_reads:
        tables, sides, caches = tables[::-1], sides[::-1], caches[::-1]
    held = {RANK: caches[0]}, {RANK: caches[1]}
    assert [] == moved(*sides, request(16, *tables), held)
    table = kvspec.build_table(kvspec.plan_transfer(*sides), *caches)
    for side, rows in zip(caches, (table.producer_rows, table.consumer_rows), strict=True):
        for address, length, _, stride, count in rows.tolist():
            end = address + (count - 1) * stride + length
            assert any(m.address <= address and end <= m.end for m in side.memory)


def test_each_layer_s_pool_bounds_its_ids() -> None:
    """Block 3 is one of layer a's eight, and none of layer b's two: it is refused."""
    side = engine(TOKENS, layers=("a", "b"))
    ours, _ours = cache(side, {"a": (8, 6), "b": (8, 6)})
    theirs, _theirs = cache(side, {"a": (8, 6), "b": (2, 6)})
    for pair in ((ours, theirs), (theirs, ours)):
        table = kvspec.build_table(kvspec.plan_transfer(side, side), *pair)
        assert len(table.descriptors(request(2, [1], [1])))
        with pytest.raises(kvspec.SpecError, match="=3: expected block ids from 0 to 1"):
            table.select(request(2, [3], [3]))


def test_one_side_has_one_type_of_memory() -> None:
    """Layers in host and in GPU memory on one side are refused, and not told apart in silence."""
    side = engine(TOKENS, layers=("a", "b"))
    plain, _plain = cache(side, {"a": (8, 6), "b": (8, 6)})
    regions = plain.regions[0], attrs.evolve(plain.regions[1], memory_type="VRAM")
    memory = plain.memory[0], attrs.evolve(plain.memory[1], memory_type="VRAM")
    mixed = attrs.evolve(plain, regions=regions, memory=memory)
    plan = kvspec.plan_transfer(side, side)
    for pair in ((plain, mixed), (mixed, plain)):
        with pytest.raises(kvspec.MismatchError, match="memory_type"):
            kvspec.build_table(plan, *pair)


def test_a_region_ends_with_its_memory() -> None:
    """The last byte of a region may be its memory's last; a memory one byte shorter is refused."""
    side = engine(TOKENS)
    right, _right = cache(side, {"l": (4, 6)})
    (memory,) = right.memory
    assert memory.length == len(right.regions[0].extent)
    with pytest.raises(kvspec.SpecError, match="inside the memory given"):
        attrs.evolve(right, memory=(attrs.evolve(memory, length=memory.length - 1),))


def test_a_memory_inside_another_hides_neither_its_end_nor_its_boundary() -> None:
    """[0, 24) holds [6, 12), where layer a begins, and [24, 48) follows: the one boundary is 24."""
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
def test_each_write_of_a_content_is_checked_for_its_source(half: int) -> None:
    """A latent of four bytes in two writes, either of them from another token: it is found."""
    side = engine(mla(block_size=2, head_size=4, dtype="uint8"))
    held = [kvspec.allocate(side, RANK, 2) for _ in range(2)]
    ours, theirs = ({RANK: each} for each, _ in held)
    plan, asked = kvspec.plan_transfer(side, side), request(1, [1], [1])
    start, stop = (each[RANK].regions[0].address(1, 0, 0) for each in (ours, theirs))
    writes = np.array([(start + at, stop + at, 2) for at in (0, 2)], np.uint64)
    assert None is kvspec.verify(plan, ours, theirs, asked, {(RANK, RANK): writes})
    writes[half, 0] += np.uint64(4)
    found = kvspec.verify(plan, ours, theirs, asked, {(RANK, RANK): writes})
    assert found is not None
    assert ("wrong source", 2 * half) == (found.kind, found.byte)


def test_a_missing_byte_is_wanted_from_the_rank_that_owns_its_token() -> None:
    """Two context ranks, an interleave of 2: token 2 is rank 1's, though rank 0 has its head."""
    producer = engine(gqa(1, block_size=4), tp=2, dcp_size=2, interleave_size=2)
    consumer = engine(gqa(1, block_size=4))
    ours = {rank: kvspec.allocate(producer, rank, 4)[0] for rank in producer.parallel.ranks}
    theirs = {RANK: kvspec.allocate(consumer, RANK, 4)[0]}
    plan = kvspec.plan_transfer(producer, consumer)
    asked = request(4, [1], [1])
    sent = kvspec.build_table(plan, ours[RANK], theirs[RANK]).descriptors(asked)
    found = kvspec.verify(plan, ours, theirs, asked, {(RANK, RANK): sent})
    assert found is not None
    assert ("missing", 2, (RankId(tp=1),)) == (found.kind, found.token, found.wanted_from)


def test_a_plan_that_covers_too_little_cannot_be_made() -> None:
    """Without one edge, or with one twice, the heads of a consumer rank are not covered once."""
    plan = kvspec.plan_transfer(engine(gqa(4), tp=4), engine(gqa(4), tp=2))
    for edges in (plan.edges[1:], (*plan.edges, plan.edges[0])):
        with pytest.raises(kvspec.KVSpecError, match=r"consumer tp0, layer l, part .: units"):
            attrs.evolve(plan, edges=edges)


def test_tables_begin_with_a_virtual_block() -> None:
    """Two context ranks, blocks of 4: a table cannot start at token 4, in the middle of one."""
    side = engine(gqa(1, block_size=4), tp=2, dcp_size=2, interleave_size=2)
    caches = [kvspec.allocate(side, RANK, 4)[0] for _ in range(2)]
    table = kvspec.build_table(kvspec.plan_transfer(side, side), *caches)
    right = kvspec.BlockTable([1, 2], 8)
    assert len(table.select(request(20, right, right, cached_tokens=8))[0])
    for at, first in ((0, 4), (1, 12)):
        tables = [right, right]
        tables[at] = kvspec.BlockTable([1, 2], first)
        with pytest.raises(
            kvspec.SpecError, match=f"first_token={first}: expected a multiple of 8"
        ):
            table.select(request(16, *tables, cached_tokens=12))


def test_the_end_of_a_tile_is_not_joined_to_the_next() -> None:
    """Blocks of 8 and, padded, of 12, one token cached: 3 of the first tile, then whole ones."""
    sides = (
        engine(gqa(1, block_size=8, head_size=1, dtype="uint8"), layout="LBNHC"),
        engine(
            gqa(1, block_size=12, head_size=1, dtype="uint8", page_size_padded=200), layout="LBNHC"
        ),
    )
    here = case(*sides, request(24, [3, 1, 5], [2, 0], cached_tokens=1))
    assert [] == laws.broken(laws.KVSPEC, here, here)


@pytest.mark.parametrize(
    ("spec", "sizes", "wanted"),
    [
        (gqa(1, block_size=16, tokens_per_state=4), {"interleave_size": 2},
         "interleave_size=2: expected a multiple of tokens_per_state=4"),
        (gqa(1, block_size=16), {"interleave_size": 3},
         "interleave_size=3: expected a divisor of block_size=16"),
    ],
)  # fmt: skip
def test_an_interleave_cuts_no_row(
    spec: kvspec.LayerSpec, sizes: dict[str, int], wanted: str
) -> None:
    """Tokens are sharded in whole rows and whole parts of a block."""
    with pytest.raises(kvspec.SpecError, match=wanted):
        engine(spec, tp=2, dcp_size=2, **sizes)


def test_groups_of_one_memory_have_one_count_of_blocks() -> None:
    """Two groups with equal pages and unequal pools cannot share their memory."""
    groups = [
        kvspec.KVCacheGroup(name=name, layers=(name,), spec=TOKENS) for name in ("one", "two")
    ]
    kvspec.allocate(engine(*groups), RANK, {"one": 4, "two": 4}, shared=True)
    with pytest.raises(kvspec.SpecError, match="one number of blocks in all groups"):
        kvspec.allocate(engine(*groups), RANK, {"one": 4, "two": 5}, shared=True)
