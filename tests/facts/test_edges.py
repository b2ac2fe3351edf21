"""Test the first and the last item of ranges.

Each test covers a place where other tests once did not notice a fault.
"""

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
from kvspec.check.coverage import overlapping_ranks
from kvspec.memory.rank_cache import Memory
from kvspec.nixl.rows import checked_rows
from kvspec.ownership.stripes import WHOLE, Stripe, times_held

RANK = RankId()
ROW: dict[str, Any] = {"total_num_kv_heads": 1, "head_size": 2, "dtype": "uint8"}


def full(block_size: int, **more: Any) -> kvspec.FullAttentionSpec:
    """Return full attention with rows of two bytes for each head."""
    return kvspec.FullAttentionSpec(**{**ROW, "block_size": block_size, **more})


def pair_of(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, blocks: int = 16
) -> tuple[kvspec.TransferPlan, Any, kvspec.DescriptorTable]:
    """Return the plan, the caches of both sides, and the table between the first ranks."""
    plan = kvspec.plan_transfer(producer, consumer)
    caches = [
        {rank: kvspec.plan_memory(side, rank, blocks) for rank in side.parallel.ranks}
        for side in (producer, consumer)
    ]
    return plan, caches, kvspec.build_table(plan, caches[0][RANK], caches[1][RANK])


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_request_whose_second_block_is_outside_pool_is_rejected(side: str) -> None:
    """Both blocks are one block of the other side. The pool ends with block 15."""
    small = builders.engine(full(4, total_num_kv_heads=4), tp=4, layout="LKBNHC")
    large = builders.engine(full(8, total_num_kv_heads=4), tp=2, layout="LBKHNC")
    _, _, table = pair_of(*((small, large) if side == "producer" else (large, small)))
    ids: dict[str, list[int]] = {"producer": [1], "consumer": [1]}
    ids[side] = [15, 16]
    request = builders.request(8, ids["producer"], ids["consumer"])
    for call in (table.select, table.descriptors):
        error = refusal(partial(call, request))
        assert (f"{side}_blocks['g']", 16) == (error.field, error.value)


WHOLE_TWICE = (range(2), range(2))


def test_cached_prefix_may_end_inside_tile_if_interleaves_do_not_divide_tiles() -> None:
    """Interleaves have 6 tokens, so the first rank owns 6 of 8 cached tokens: 1.5 tiles of 4."""
    spec = full(12, total_num_kv_heads=2)
    both = builders.engine(
        builders.group(spec, kernel_block_size=4, shardings={"k": WHOLE_TWICE, "v": WHOLE_TWICE}),
        tp=2,
        dcp_size=2,
        interleave_size=6,
    )
    plan, caches, table = pair_of(both, both)
    for cached in range(0, 40, 4):
        request = builders.request(40, [3, 1], [2, 5], cached_tokens=cached)
        num_copied = int(table.descriptors(request)[:, 2].sum())
        num_owned = sum(1 for token in range(cached, 40) if token // 6 % 2 == 0)
        assert num_copied >= num_owned * 8
        assert kvspec.verify(plan, caches[0], caches[1], request) is None


def test_parts_with_different_grains_are_cut_separately() -> None:
    """13 tokens move: the keys in rows of 8 and 5, the scales of 4 tokens in blocks of 8."""
    spec = full(8, total_num_kv_heads=4, scale_dtype="float32", tokens_per_scale=4)
    sides = (
        builders.engine(spec, tp=2, layout="LKBHNC"),
        builders.engine(spec, tp=4, layout="LKBHNC"),
    )
    plan, caches, table = pair_of(*sides)
    request = builders.request(13, [3, 1], [2, 5])
    row_tokens: dict[str, set[int]] = {}
    for numbered, tiles in table.tiles(request):
        assert len(tiles)
        grain = "scales" if numbered.split_rows.token_split.tokens_per_state == 4 else "keys"
        row_tokens.setdefault(grain, set()).add(numbered.rows.kind.tokens)
    assert {"keys": {5, 8}, "scales": {8}} == row_tokens
    assert kvspec.verify(plan, caches[0], caches[1], request) is None


HEADS = full(4, total_num_kv_heads=4, state_content_bytes=9, spans_heads=True)
SHARDINGS = {
    "whole": (range(4), range(4)),
    "halves": (range(2), range(2, 4)),
    "one and three": (range(1), range(1, 4)),
    "three and one": (range(3), range(3, 4)),
    "replicas and none": (range(4), range(0)),
}


@pytest.mark.parametrize("producer", SHARDINGS)
@pytest.mark.parametrize("consumer", SHARDINGS)
def test_content_that_spans_heads_moves_only_between_equal_shardings(
    producer: str, consumer: str
) -> None:
    """Both directions are rejected, whether the smaller or the larger range is the producer's."""
    sides = [
        builders.engine(HEADS, tp=2, shardings={4: SHARDINGS[name]}, layout="LBHNC")
        for name in (producer, consumer)
    ]
    owned = [
        {(heads.start, heads.stop) for heads in SHARDINGS[name] if heads}
        for name in (producer, consumer)
    ]
    if owned[0] == owned[1]:
        assert kvspec.plan_transfer(sides[0], sides[1]).edges
    else:
        error = refusal(lambda: kvspec.plan_transfer(sides[0], sides[1]), kvspec.MismatchError)
        assert ["l.kv"] == [mismatch.field for mismatch in error.mismatches]


@pytest.mark.parametrize("wholes", [(True, True), (True, False), (False, True)])
def test_part_that_one_side_keeps_whole_moves_only_between_equal_shardings(
    wholes: tuple[bool, bool],
) -> None:
    """The second part of a state is whole on one side, or on both."""

    def side(*, whole: bool, tp: int) -> kvspec.EngineSpec:
        parts = [
            kvspec.Part(
                name=name, units=4, states=1, content_bytes=4, tokens_per_state=0, whole=is_whole
            )
            for name, is_whole in (("a", False), ("b", whole))
        ]
        return builders.engine(kvspec.MambaSpec(state_parts=parts), tp=tp)

    for sizes in ((1, 1), (2, 2)):
        sides = [side(whole=whole, tp=tp) for whole, tp in zip(wholes, sizes, strict=True)]
        assert kvspec.plan_transfer(*sides).edges
    for sizes in ((1, 2), (2, 1)):
        sides = [side(whole=whole, tp=tp) for whole, tp in zip(wholes, sizes, strict=True)]
        error = refusal(lambda: kvspec.plan_transfer(*sides), kvspec.MismatchError)  # noqa: B023
        assert ["l.b"] == [mismatch.field for mismatch in error.mismatches]


def test_verify_does_not_require_dead_row_after_compressed_prompt() -> None:
    """A row has 4 tokens. A window of tokens 6..11 needs the rows at 4 and 8, not 0 and 12."""
    spec = kvspec.MLAAttentionSpec(block_size=8, head_size=2, dtype="uint8", tokens_per_state=4)
    window = kvspec.SlidingWindowMLASpec(
        block_size=8, head_size=2, dtype="uint8", tokens_per_state=4, sliding_window=7
    )
    for layer_spec, first in ((spec, 0), (window, 4)):
        both = builders.engine(layer_spec)
        plan, caches, _ = pair_of(both, both)
        request = builders.request(12, [3, 1], [2, 5])
        regions = [side[RANK].regions[0] for side in caches]
        addresses = [
            [region.address(ids[token // 8], 0, token % 8 // 4) for token in range(first, 12, 4)]
            for region, ids in zip(regions, ([3, 1], [2, 5]), strict=True)
        ]
        rows = np.array([*zip(*addresses, [2] * len(addresses[0]), strict=True)], np.uint64)
        verify = partial(kvspec.verify, plan, caches[0], caches[1], request)
        assert verify({(RANK, RANK): rows}) is None
        for index in range(len(rows)):
            fault: Any = verify({(RANK, RANK): np.delete(rows, index, 0)})
            assert ("missing", first + 4 * index) == (fault.kind, fault.token)


def test_lookahead_block_of_another_group_in_one_memory_is_rejected() -> None:
    """Group b has reserved block 3 for later tokens, so group a must not write it."""
    both = builders.engine(
        builders.group(full(4), "l.a", name="a"), builders.group(full(4), "l.b", name="b")
    )
    caches = [kvspec.allocate(both, RANK, 16, shared=True)[0] for _ in range(2)]
    table = kvspec.build_table(kvspec.plan_transfer(both, both), *caches)
    source = {"a": [1, 2], "b": [4, 5]}
    table.select(builders.request(8, source, {"a": [1, 2], "b": [4, 5, 6]}))
    for target, block in (({"a": [1, 3], "b": [4, 5, 3]}, 3), ({"a": [1, 2], "b": [2, 5]}, 2)):
        request = builders.request(8, source, target)
        error = refusal(partial(table.select, request))
        assert ("consumer_blocks['a']", block) == (error.field, error.value)


@pytest.mark.parametrize(("window", "rejected"), [(5, False), (6, True)])
def test_block_of_another_group_is_free_only_before_its_first_live_token(
    window: int, rejected: bool
) -> None:
    """After 12 tokens, windows of 5 and 6 begin at tokens 8 and 7. Token 7 is in block 2."""
    spec = kvspec.SlidingWindowSpec(**ROW, block_size=4, sliding_window=window)
    both = builders.engine(
        builders.group(full(4), "l.a", name="a"), builders.group(spec, "l.b", name="b")
    )
    caches = [kvspec.allocate(both, RANK, 16, shared=True)[0] for _ in range(2)]
    table = kvspec.build_table(kvspec.plan_transfer(both, both), *caches)
    target = {"a": [1, 2, 3], "b": [9, 2, 5]}
    request = builders.request(12, {"a": [1, 2, 3], "b": [4, 5, 6]}, target)
    request = attrs.evolve(request, cached_tokens={"b": 12})  # only group a is written
    if rejected:
        error = refusal(lambda: table.select(request))
        assert ("consumer_blocks['a']", 2) == (error.field, error.value)
    else:
        table.select(request)


def test_times_held_counts_overlaps_of_stripes() -> None:
    """The overlap may be anywhere. Without stripes no block is held."""
    thirds = [Stripe(first, 3) for first in range(3)]
    for stripes, times in (
        ([], 0), ([WHOLE], 1), (thirds, 1), (thirds[:2], 0), ([WHOLE, WHOLE], 2),
        ([WHOLE, thirds[2]], 2), ([thirds[1], WHOLE], 2), ([*thirds, thirds[2]], 2),
    ):  # fmt: skip
        assert times == times_held(stripes)


def test_null_block_outside_smaller_second_pool_is_rejected() -> None:
    """Every pool must contain the null block, not only the first and larger one."""
    groups = (
        builders.group(full(8), "l.a", name="a"),
        builders.group(full(8), "l.b", name="b", kernel_block_size=4),
    )
    for null, blocks in ((0, 1), (3, 4), (7, 8)):
        both = builders.engine(*groups, null_block=null)
        kvspec.plan_memory(both, RANK, {"a": 16, "b": blocks})
        error = refusal(partial(kvspec.plan_memory, both, RANK, {"a": 16, "b": null}))
        assert error.field in ("null_block", "num_blocks", "num_blocks['b']")


@attrs.frozen
class MemoryOfRank:
    """The only attribute of a cache that `overlapping_ranks` reads."""

    memory: tuple[Memory, ...]


def test_overlapping_ranks_are_those_that_share_a_byte() -> None:
    """Rank 1 ends where rank 2 begins. Rank 0 contains both and ends where rank 3 begins.

    Rank 0 also has a memory inside its own, which is no pair of ranks.
    """
    spans = {0: (0, 1000), 1: (100, 50), 2: (150, 50), 3: (1000, 10)}
    caches: dict[RankId, Any] = {
        RankId(tp=tp): MemoryOfRank((Memory(1 + start, length),))
        for tp, (start, length) in spans.items()
    }
    caches[RankId()] = MemoryOfRank((Memory(1, 1000), Memory(11, 20)))
    pairs = {(first.tp, second.tp) for first, second in overlapping_ranks(caches)}
    assert {(0, 1), (0, 2)} == pairs


@pytest.mark.parametrize("padded", [0, 1])
def test_layout_that_splits_pages_is_rejected_if_any_layer_is_padded(padded: int) -> None:
    """The first or the second layer of a uniform group is padded."""
    specs = {f"l.{at}": full(4, total_num_kv_heads=2) for at in range(2)}
    name = f"l.{padded}"
    specs[name] = attrs.evolve(specs[name], page_size_padded=specs[name].page_size_bytes() + 4)
    spec = kvspec.UniformTypeKVCacheSpecs(specs=specs)
    kvspec.plan_memory(builders.engine(spec, layout="LBHNC"), RANK, 4)
    error = refusal(lambda: kvspec.plan_memory(builders.engine(spec, layout="LHBNC"), RANK, 4))
    assert "page_size_padded" == error.field


def test_verify_accepts_dead_row_just_after_cached_prefix() -> None:
    """Tokens 0..3 are cached and a window needs 6..8, so tokens 4 and 5 may be written."""
    window = kvspec.SlidingWindowMLASpec(block_size=4, head_size=2, dtype="uint8", sliding_window=3)
    both = builders.engine(window)
    plan, caches, _ = pair_of(both, both)
    tables = [3, 1, 6], [2, 5, 7]
    request = builders.request(9, *tables, cached_tokens=4)
    source, target = (side[RANK].regions[0] for side in caches)

    def fault_of_rows_from(first: int) -> Any:
        rows = [
            (
                source.address(tables[0][token // 4], 0, token % 4),
                target.address(tables[1][token // 4], 0, token % 4),
                2,
            )
            for token in range(first, 9)
        ]
        descriptors = {(RANK, RANK): np.array(rows, np.uint64)}
        return kvspec.verify(plan, caches[0], caches[1], request, descriptors)

    assert [None, None] == [fault_of_rows_from(first) for first in (4, 6)]
    fault = fault_of_rows_from(3)
    assert ("unwanted", 3) == (fault.kind, fault.token)


def test_adjacent_rows_have_separate_areas() -> None:
    """Two registered memories may be adjacent, so only rows that share bytes are in one memory."""
    rows = [(0x1000, 16, 0, 16, 1), (0x1010, 16, 0, 16, 1), (0x101F, 16, 0, 16, 1)]
    begins = checked_rows(np.array(rows, np.uint64)).memory_begins
    assert [0x1000, 0x1010] == begins.tolist()
    assert [] == checked_rows(np.empty((0, 5), np.uint64)).memory_begins.tolist()
