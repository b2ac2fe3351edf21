"""Facts about the first and the last of a range, each of a place where a fault went unnoticed."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import builders
import numpy as np
import pytest
from refused import refusal

import kvspec
from kvspec import RankId
from kvspec.check.coverage import _neighbours
from kvspec.memory.rank_cache import Memory
from kvspec.nixl.product_spans import Offsets
from kvspec.nixl.rows import checked_rows
from kvspec.ownership.stripes import WHOLE, Stripe, times_held

RANK = RankId()
ROW: dict[str, Any] = {"total_num_kv_heads": 1, "head_size": 2, "dtype": "uint8"}


def full(block_size: int, **more: Any) -> kvspec.FullAttentionSpec:
    """Return full attention of small rows."""
    return kvspec.FullAttentionSpec(**{**ROW, "block_size": block_size, **more})


def pair_of(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, blocks: int = 16, **more: Any
) -> tuple[kvspec.TransferPlan, Any, kvspec.DescriptorTable]:
    """Return the plan, the caches of both sides, and the table between the first ranks."""
    plan = kvspec.plan_transfer(producer, consumer)
    caches = [
        {rank: kvspec.plan_memory(side, rank, blocks) for rank in side.parallel.ranks}
        for side in (producer, consumer)
    ]
    return plan, caches, kvspec.build_table(plan, caches[0][RANK], caches[1][RANK], **more)


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_row_of_two_tiles_with_its_second_block_beyond_the_pool_is_refused(side: str) -> None:
    """Blocks 15 and 16 follow each other, so one row takes both; a pool of 16 has no block 16."""
    small = builders.engine(full(4, total_num_kv_heads=4), tp=4, layout="LKBNHC")
    large = builders.engine(full(8, total_num_kv_heads=4), tp=2, layout="LBKHNC")
    _, _, table = pair_of(*((small, large) if side == "producer" else (large, small)))
    ids: dict[str, list[int]] = {"producer": [1], "consumer": [1], side: [14, 15]}
    entries = table.tiles(builders.request(8, ids["producer"], ids["consumer"]))
    assert {8} == {entry.rows.kind.tokens for entry, _ in entries}, "one row takes both tiles"
    ids[side] = [15, 16]
    request = builders.request(8, ids["producer"], ids["consumer"])
    for call in (table.select, table.descriptors):
        error = refusal(partial(call, request))
        assert (f"{side}_blocks['g']", 16) == (error.field, error.value)


WHOLE_TWICE = (range(2), range(2))


@pytest.mark.parametrize("prefix_multiple", [8, 12, 24])
def test_cached_prefix_in_interleaves_that_do_not_divide_tiles_begins_in_a_tile(
    prefix_multiple: int,
) -> None:
    """Of 8 cached tokens in interleaves of 6, the first rank owns 6: one and a half tiles of 4."""
    spec = full(12, total_num_kv_heads=2)
    both = builders.engine(
        builders.group(spec, kernel_block_size=4, shardings={"k": WHOLE_TWICE, "v": WHOLE_TWICE}),
        tp=2,
        dcp_size=2,
        interleave_size=6,
    )
    plan, caches, table = pair_of(both, both, prefix_multiple=prefix_multiple)
    for cached in range(0, 40, prefix_multiple):
        request = builders.request(40, [3, 1], [2, 5], cached_tokens=cached)
        copied = int(table.descriptors(request)[:, 2].sum())
        own = sum(1 for token in range(cached, 40) if token // 6 % 2 == 0)
        assert copied >= own * 8
        assert None is kvspec.verify(plan, caches[0], caches[1], request)


def test_parts_of_other_grains_are_cut_each_by_itself() -> None:
    """Of 13 tokens, keys move 8 and 5, and scales of 4 tokens each move whole blocks of 8."""
    spec = full(8, total_num_kv_heads=4, scale_dtype="float32", tokens_per_scale=4)
    sides = (
        builders.engine(spec, tp=2, layout="LKBHNC"),
        builders.engine(spec, tp=4, layout="LKBHNC"),
    )
    plan, caches, table = pair_of(*sides)
    request = builders.request(13, [3, 1], [2, 5])
    cut: dict[str, set[int]] = {}
    for entry, tiles in table.tiles(request):
        assert len(tiles)
        grain = "scales" if entry.rows.token_split.grain == 4 else "keys"
        cut.setdefault(grain, set()).add(entry.rows.kind.tokens)
    assert {"keys": {5, 8}, "scales": {8}} == cut
    assert None is kvspec.verify(plan, caches[0], caches[1], request)


HEADS = full(4, total_num_kv_heads=4, state_content_bytes=9, spans_heads=True)
DEALS = {
    "whole": (range(4), range(4)),
    "halves": (range(2), range(2, 4)),
    "one and three": (range(1), range(1, 4)),
    "three and one": (range(3), range(3, 4)),
    "replicas and none": (range(4), range(0)),
}


@pytest.mark.parametrize("ours", DEALS)
@pytest.mark.parametrize("theirs", DEALS)
def test_content_that_spans_heads_under_explicit_shardings_moves_only_if_ranges_are_equal(
    ours: str, theirs: str
) -> None:
    """Both directions are refused: the smaller and the larger range come first in turn."""
    sides = [
        builders.engine(HEADS, tp=2, shardings={4: DEALS[each]}, layout="LBHNC")
        for each in (ours, theirs)
    ]
    owned = [{(each.start, each.stop) for each in DEALS[name] if each} for name in (ours, theirs)]
    if owned[0] == owned[1]:
        assert kvspec.plan_transfer(sides[0], sides[1]).edges
    else:
        error = refusal(lambda: kvspec.plan_transfer(sides[0], sides[1]), kvspec.MismatchError)
        assert ["l.kv"] == [each.field for each in error.mismatches]


def test_dead_row_after_a_compressed_prompt_need_not_come() -> None:
    """Rows of 4 tokens: a window from token 6 to 12 takes rows 4 and 8, not those at 0 and 12."""
    spec = kvspec.MLAAttentionSpec(block_size=8, head_size=2, dtype="uint8", tokens_per_state=4)
    window = kvspec.SlidingWindowMLASpec(
        block_size=8, head_size=2, dtype="uint8", tokens_per_state=4, sliding_window=7
    )
    for each, first in ((spec, 0), (window, 4)):
        both = builders.engine(each)
        plan, caches, _ = pair_of(both, both)
        request = builders.request(12, [3, 1], [2, 5])
        regions = [side[RANK].regions[0] for side in caches]
        address = [
            [region.address(ids[token // 8], 0, token % 8 // 4) for token in range(first, 12, 4)]
            for region, ids in zip(regions, ([3, 1], [2, 5]), strict=True)
        ]
        rows = np.array([*zip(*address, [2] * len(address[0]), strict=True)], np.uint64)
        judge = partial(kvspec.verify, plan, caches[0], caches[1], request)
        assert None is judge({(RANK, RANK): rows})
        for left in range(len(rows)):
            fault: Any = judge({(RANK, RANK): np.delete(rows, left, 0)})
            assert ("missing", first + 4 * left) == (fault.kind, fault.token)


def test_lookahead_block_of_another_group_in_one_memory_is_refused() -> None:
    """Group b has taken block 3 for tokens to come, so group a must not be written there."""
    both = builders.engine(
        builders.group(full(4), "l.a", name="a"), builders.group(full(4), "l.b", name="b")
    )
    caches = [kvspec.allocate(both, RANK, 16, shared=True)[0] for _ in range(2)]
    table = kvspec.build_table(kvspec.plan_transfer(both, both), *caches)
    ours = {"a": [1, 2], "b": [4, 5]}
    table.select(builders.request(8, ours, {"a": [1, 2], "b": [4, 5, 6]}))
    for theirs, block in (({"a": [1, 3], "b": [4, 5, 3]}, 3), ({"a": [1, 2], "b": [2, 5]}, 2)):
        request = builders.request(8, ours, theirs)
        error = refusal(partial(table.select, request))
        assert ("consumer_blocks['a']", block) == (error.field, error.value)


@pytest.mark.parametrize(("window", "refused"), [(5, False), (6, True)])
def test_block_whose_last_token_is_the_first_live_one_is_still_held(
    window: int, refused: bool
) -> None:
    """Of 12 tokens, windows of 5 and 6 begin at tokens 8 and 7: the latter still holds block 2."""
    spec = kvspec.SlidingWindowSpec(**ROW, block_size=4, sliding_window=window)
    both = builders.engine(
        builders.group(full(4), "l.a", name="a"), builders.group(spec, "l.b", name="b")
    )
    caches = [kvspec.allocate(both, RANK, 16, shared=True)[0] for _ in range(2)]
    table = kvspec.build_table(kvspec.plan_transfer(both, both), *caches)
    theirs = {"a": [1, 2, 3], "b": [9, 2, 5]}
    request = builders.request(12, {"a": [1, 2, 3], "b": [4, 5, 6]}, theirs)
    request = attrs.evolve(request, cached_tokens={"b": 12})  # only group a is written
    if refused:
        error = refusal(lambda: table.select(request))
        assert ("consumer_blocks['a']", 2) == (error.field, error.value)
    else:
        table.select(request)


def test_times_held_counts_stripes_over_the_longest_step() -> None:
    """A block is held twice wherever the overlap lies, and no stripe at all holds none."""
    thirds = [Stripe(first, 3) for first in range(3)]
    for stripes, times in (
        ([], 0), ([WHOLE], 1), (thirds, 1), (thirds[:2], 0), ([WHOLE, WHOLE], 2),
        ([WHOLE, thirds[2]], 2), ([thirds[1], WHOLE], 2), ([*thirds, thirds[2]], 2),
    ):  # fmt: skip
        assert times == times_held(stripes)


def test_null_block_of_a_smaller_later_pool_is_refused() -> None:
    """Each pool must have the null block, and the last one is the smaller."""
    groups = (
        builders.group(full(8), "l.a", name="a"),
        builders.group(full(8), "l.b", name="b", kernel_block_size=4),
    )
    for null, blocks in ((0, 1), (3, 4), (7, 8)):
        both = builders.engine(*groups, null_block=null)
        kvspec.plan_memory(both, RANK, {"a": 16, "b": blocks})
        error = refusal(partial(kvspec.plan_memory, both, RANK, {"a": 16, "b": null}))
        assert error.field in ("null_block", "num_blocks", "num_blocks['b']")


def test_memories_of_ranks_meet_where_one_byte_is_shared() -> None:
    """A memory that ends leaves the line; a longer one that began before it stays."""
    spans = {0: (0, 1000), 1: (100, 50), 2: (150, 50), 3: (1000, 10)}
    caches: dict[RankId, Any] = {
        RankId(tp=tp): _Cache((Memory(1 + start, length),)) for tp, (start, length) in spans.items()
    }
    found = {(one.tp, other.tp) for one, other in _neighbours(caches)}
    assert {(0, 1), (0, 2)} == found


@attrs.frozen
class _Cache:
    """As much of a cache as its memories."""

    memory: tuple[Memory, ...]


@pytest.mark.parametrize("padded", [0, 1])
def test_padding_of_any_layer_needs_pages_in_one_chunk(padded: int) -> None:
    """The layout is refused whichever layer of a uniform group is padded."""
    specs = {f"l.{at}": full(4, total_num_kv_heads=2) for at in range(2)}
    name = f"l.{padded}"
    specs[name] = attrs.evolve(specs[name], page_size_padded=specs[name].page_size_bytes() + 4)
    spec = kvspec.UniformTypeKVCacheSpecs(specs=specs)
    kvspec.plan_memory(builders.engine(spec, layout="LBHNC"), RANK, 4)
    error = refusal(lambda: kvspec.plan_memory(builders.engine(spec, layout="LHBNC"), RANK, 4))
    assert "page_size_padded" == error.field


def test_dead_row_just_behind_the_cached_prefix_may_be_written() -> None:
    """Tokens 0..3 are cached and a window needs 6..8, so what stands in 4 and 5 does not matter."""
    window = kvspec.SlidingWindowMLASpec(block_size=4, head_size=2, dtype="uint8", sliding_window=3)
    both = builders.engine(window)
    plan, caches, _ = pair_of(both, both)
    request = builders.request(9, [3, 1, 6], [2, 5, 7], cached_tokens=4)
    ours, theirs = (side[RANK].regions[0] for side in caches)

    def judged(first: int) -> Any:
        rows = [
            (ours.address(a, 0, token % 4), theirs.address(b, 0, token % 4), 2)
            for token in range(first, 9)
            for a, b in [([3, 1, 6][token // 4], [2, 5, 7][token // 4])]
        ]
        given = {(RANK, RANK): np.array(rows, np.uint64)}
        return kvspec.verify(plan, caches[0], caches[1], request, given)

    assert [None, None] == [judged(first) for first in (4, 6)]
    assert ("unwanted", 3) == (judged(3).kind, judged(3).token)


def test_rows_that_touch_lie_in_areas_of_their_own() -> None:
    """Two registered memories may touch, so only rows that share bytes surely lie in one."""
    rows = [(0x1000, 16, 0, 16, 1), (0x1010, 16, 0, 16, 1), (0x101F, 16, 0, 16, 1)]
    area = checked_rows(np.array(rows, np.uint64)).area.tolist()
    assert area[0] != area[1] == area[2]


def test_marks_that_differ_in_one_place_have_no_common_shift() -> None:
    """Every mark must be shifted by the same bytes on both sides."""
    every = np.array([[0, 4, 8], [0, 4, 8], [0, 0, 0], [0, 0, 0]])
    other = every.copy()
    other[1, 2] += 1
    assert Offsets(every).less(Offsets(other)) is None
    shift = Offsets(every + np.array([[5], [7], [0], [0]])).less(Offsets(every))
    assert shift is not None
    assert [5, 7, 0, 0] == shift.columns[:, 0].tolist()
