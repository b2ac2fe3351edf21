"""Facts that planted faults showed to be untested: one small test each."""

from __future__ import annotations

import re
from typing import Any

import attrs
import numpy as np
import pytest
from builders import case, engine, gqa, request
from refused import refusal

from kvspec import (
    BlockTable,
    EngineSpec,
    FullAttentionSpec,
    KeyContent,
    KVCacheGroup,
    LayerSpec,
    Memory,
    MLAAttentionSpec,
    ParallelConfig,
    RankCache,
    RankId,
    build_table,
    plan_memory,
    plan_transfer,
    verify,
)
from kvspec.check import counting
from kvspec.check.ownership import Owners
from kvspec.check.places import Places
from kvspec.descriptors.paging import BlockLayout, RowKind
from kvspec.descriptors.runs import RowSet
from kvspec.descriptors.tiles import Tiles
from kvspec.engines import stages
from kvspec.errors import KVSpecError
from kvspec.ownership.dtypes import ITEMSIZE
from kvspec.ownership.parallel import MAX_RANKS
from kvspec.ownership.stripes import WHOLE, times_held
from kvspec.testing.case import Case
from kvspec.testing.world import described, world


def small_engine() -> EngineSpec:
    """Return an engine of one rank and one layer, with blocks of 4 tokens of 8 bytes."""
    spec = MLAAttentionSpec(block_size=4, head_size=8, dtype="uint8")
    group = KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    return EngineSpec(groups=[group], parallel=ParallelConfig())


@pytest.mark.parametrize("stripes", [2, 3, 4])
def test_times_held_is_two_if_blocks_are_held_more_often(stripes: int) -> None:
    """The caller counts a range at most twice."""
    assert times_held([WHOLE] * stripes) == 2


def test_representation_of_a_cache_leaves_out_the_owner() -> None:
    """The owner may be a list of tensors, whose text is long."""
    cache = attrs.evolve(plan_memory(small_engine(), RankId(), num_blocks=2), owner="tensors")
    assert "tensors" not in repr(cache)


@pytest.mark.parametrize("name", ["layer², part 3", "layers.07.attn", "mtp", "l٣"])
def test_first_number_of_a_layer_has_two_equal_readers(name: str) -> None:
    """A superscript is a digit for `str.isdigit`, but no number for `int`."""
    assert counting._number(name) == stages._number(name)


def places(table: BlockTable) -> Places:
    """Return the places of a request on a rank with 8 blocks of 4 tokens."""
    engine = small_engine()
    cache = plan_memory(engine, RankId(), num_blocks=8)
    return Places(Owners(engine), cache, engine, request(0, {}, {}), frozenset(), {"full": table})


@pytest.mark.parametrize(
    ("first_live", "ids"), [(0, [3, 5]), (11, [3, 5]), (12, [5]), (15, [5]), (16, [])]
)
def test_writable_blocks_begin_with_the_block_of_the_first_live_position(
    first_live: int, ids: list[int]
) -> None:
    """The request may end before the last block. A request without wanted tokens has them too."""
    side = places(BlockTable([3, 5], first_token=8))
    group = side.owners.engine.groups[0]
    part = group.spec.parts[0]
    assert side.usable(group, part, range(0), first_live).tolist() == ids


def test_block_that_occurs_twice_is_not_writable_without_a_null_block() -> None:
    side = places(BlockTable([3, 0, 0]))
    group = side.owners.engine.groups[0]
    assert side.usable(group, group.spec.parts[0], range(2), 0).tolist() == [3]


def test_pool_contains_the_ids_below_its_number_of_blocks() -> None:
    """The first id beyond the pool is outside."""
    side = places(BlockTable([3]))
    group, region = side.owners.engine.groups[0], side.cache.regions[0]
    inside = side._in_pool(group, region, np.array([-1, 0, 7, 8]))
    assert inside.tolist() == [False, True, True, False]


def test_cache_accepts_its_owner_only_by_name() -> None:
    """A fifth argument without a name is more likely a mistake than an owner."""
    cache = plan_memory(small_engine(), RankId(), num_blocks=2)
    parts: Any = (cache.engine, cache.rank, cache.regions, cache.memory)
    with pytest.raises(TypeError):
        RankCache(*parts, "tensors")
    assert RankCache(*parts, owner="tensors").owner == ("tensors",)


def test_engine_may_have_as_many_ranks_as_the_limit() -> None:
    """One rank more is refused."""
    assert len(ParallelConfig(pp_size=MAX_RANKS).ranks) == MAX_RANKS
    assert refusal(lambda: ParallelConfig(pp_size=MAX_RANKS + 1)).value == MAX_RANKS + 1


def test_block_table_reads_ids_of_an_object_that_converts_itself_to_an_array() -> None:
    """A tensor of torch is neither a sequence nor an array of numpy."""

    class Tensor:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.array([3, 5], dtype)

    ids: Any = Tensor()
    assert BlockTable(ids) == BlockTable([3, 5])


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_verify_reads_descriptors_of_any_integer_type(dtype: type) -> None:
    """The rows are right in each of them."""
    plan = plan_transfer(small_engine(), small_engine())
    caches = [plan_memory(small_engine(), RankId(), num_blocks=8) for _ in range(2)]
    load = request(7, {"full": [3, 5]}, {"full": [1, 6]})
    rows = {(RankId(), RankId()): build_table(plan, *caches).descriptors(load).astype(dtype)}
    assert verify(plan, *({RankId(): cache} for cache in caches), load, descriptors=rows) is None


@pytest.mark.parametrize(
    ("layouts", "plain"),
    [
        (("LBNHC", "LBNHC"), {True}),  # blocks lie end to end on both sides
        (("LBHNC", "LBHNC"), {False}),  # another head lies between the tiles of two blocks
        (("LBNHC", "LBHNC"), {False}),  # a tile is one token, and heads lie between two blocks
    ],
)
def test_rows_are_plain_if_each_run_is_one_row_on_both_sides(
    layouts: tuple[str, str], plain: set[bool]
) -> None:
    """Half a block moves to each block, so a block has two tiles on the producer."""
    sides = [
        engine(gqa(2, block_size=size, head_size=2), layout=layout)
        for size, layout in zip((8, 4), layouts, strict=True)
    ]
    caches = [plan_memory(side, RankId(), num_blocks=8) for side in sides]
    rows = [numbered.rows for numbered in build_table(plan_transfer(*sides), *caches).numbered_rows]
    assert plain == {each.plain for each in rows}
    for each in rows:
        counts = {each.producer.rows_per_run, each.consumer.rows_per_run}
        assert each.plain == (counts == {1})


# Two heads whose kernel blocks do not continue in memory, and one head whose blocks do. Rows of two
# tiles make sense there.
APART = engine(
    KVCacheGroup(name="g", layers=("l",), spec=gqa(2, block_size=8), kernel_block_size=4),
    layout="LKBHNC",
)
JOINED = engine(gqa(2, block_size=2), layout="LKBHNC", tp=2)


@pytest.mark.parametrize(
    "asked",
    [
        # A row of two tiles from token 2 on would cross a kernel block.
        case(APART, JOINED, request(8, [1], [1, 2, 3, 4], cached_tokens=2)),
        # The table begins at token 8, and four of its blocks follow each other.
        case(
            JOINED,
            APART,
            request(16, BlockTable([1, 2, 3, 4], 8), BlockTable([1], 8), cached_tokens=8),
        ),
        # Only the consumer has two context ranks, and its table begins at its second block.
        case(
            engine(gqa(1, block_size=4)),
            engine(gqa(1, block_size=4), tp=2, dcp_size=2),
            request(14, [1, 2, 3, 4], BlockTable([5, 6], 8), cached_tokens=8),
        ),
    ],
)
def test_request_at_a_border_delivers_the_true_bytes(asked: Case) -> None:
    """Rows of two tiles end at kernel blocks, and tables may begin late."""
    here = world(asked)
    here.execute(described)
    assert here.differences() == []


def test_row_of_two_tokens_is_not_cut_by_a_cached_prefix() -> None:
    """A state of two tokens is refused if one of them is cached."""
    side = engine(MLAAttentionSpec(block_size=4, head_size=8, dtype="uint8", tokens_per_state=2))
    caches = [plan_memory(side, RankId(), 4, 1 << power) for power in (20, 30)]
    table = build_table(plan_transfer(side, side), *caches)
    error = refusal(lambda: table.select(request(8, [1, 2], [1, 2], cached_tokens=3)))
    assert ("cached_tokens", 3) == (error.field, error.value)


@pytest.mark.parametrize("name", ITEMSIZE)
def test_size_of_an_element_is_the_number_of_bits_in_its_name(name: str) -> None:
    """A bool has one byte."""
    bits = re.search(r"\d+", name)
    assert ITEMSIZE[name] == (int(bits[0]) // 8 if bits else 1)


def test_kind_of_layer_must_have_parts() -> None:
    with pytest.raises(NotImplementedError):
        LayerSpec(block_size=4).parts  # noqa: B018


def test_context_rank_stores_the_tokens_of_its_turns_in_each_virtual_block() -> None:
    """Two ranks take turns of two tokens. A virtual block has 8 tokens."""
    side = engine(gqa(1, block_size=4), tp=2, dcp_size=2, interleave_size=2)
    cache = plan_memory(side, RankId(tp=1), num_blocks=8)
    own = Places(Owners(side), cache, side, request(0, {}, {}), frozenset(), {})
    stored = [token for token in range(20) if own.stores(side.groups[0], token)]
    assert stored == [2, 3, 6, 7, 10, 11, 14, 15, 18, 19]


def test_cache_takes_the_order_of_key_elements_from_its_engine() -> None:
    """Regions by hand have no segments. Those of another order are replaced."""
    key = KeyContent(rotary="pairs", rotary_size=4)
    spec = attrs.evolve(gqa(1, block_size=4), key_content=key)
    cache = plan_memory(engine(spec), RankId(), num_blocks=2)
    for wrong in ((), ((0, 1, 2, 2), (1, 1, 2, 2))):
        regions = [attrs.evolve(region, segments=wrong) for region in cache.regions]
        found = RankCache(cache.engine, cache.rank, regions, cache.memory)
        assert [region.segments for region in found.regions] == [spec.segments("k"), ()]
    assert spec.segments("k")


def test_plan_refuses_a_slice_without_units() -> None:
    """It would cover nothing, but its descriptors would move a unit."""
    plan = plan_transfer(small_engine(), small_engine())
    (edge,) = plan.edges
    nothing = dict.fromkeys(("global_range", "local_range", "remote_range"), range(0))
    slices = (*edge.slices, attrs.evolve(edge.slices[0], **nothing))
    with pytest.raises(KVSpecError, match="units"):
        attrs.evolve(plan, edges=(attrs.evolve(edge, slices=slices),))


@pytest.mark.parametrize("swapped", [False, True])
def test_tile_in_another_row_does_not_follow(*, swapped: bool) -> None:
    """One side has a row for each tile, so the id after the last block is in the next row."""
    by_tile = BlockLayout(num_blocks=2, block_stride=90, tiles=3, tile_stride=10)
    in_order = BlockLayout(num_blocks=6, block_stride=10, tiles=1, tile_stride=0)
    layouts = [by_tile, in_order]
    places = np.array([[[0, 1, 0], [0, 1, 2]], [[0, 0, 1], [0, 0, 0]], [[0, 1, 2]] * 2])
    if swapped:
        layouts, places = layouts[::-1], places[:, ::-1]
    first = np.array([0])
    rows = RowSet(RowKind(0, 4), *layouts, first, first, np.array([10]))
    assert rows.next_ids(Tiles(*places)).tolist() == [True, False]


def test_dead_token_does_not_move_if_few_of_the_runs_join_others() -> None:
    """Keys of a block are one run, which touches the next block. Values are apart.

    Three tokens need a run of keys and three of values. Whole tiles spare the run of keys, but need
    one more run of values.
    """
    spec = FullAttentionSpec(
        block_size=4, total_num_kv_heads=1, head_size=8, head_size_v=4, dtype="uint8"
    )
    side = engine(spec, layout="LKBNHC")
    planned = plan_memory(side, RankId(), num_blocks=8)
    keys, values = planned.regions
    values = attrs.evolve(values, base=4096, block_stride=32, state_stride=8)
    cache = RankCache(side, RankId(), [keys, values], [*planned.memory, Memory(4096, 256)])
    table = build_table(plan_transfer(side, side), cache, cache, dead_tokens=True)
    lengths = table.descriptors(request(3, [1], [2]))[:, 2].tolist()
    assert sorted(lengths) == [4, 4, 4, 24]
