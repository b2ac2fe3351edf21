"""A group may own its tokens and its units otherwise than the engine's other groups."""

from __future__ import annotations

from typing import Any

import builders
import pytest
from builders import engine, gqa, group, request

import kvspec
from kvspec import RankId
from kvspec.testing.case import Case
from kvspec.testing.world import described, selected, world

MLA = kvspec.MLAAttentionSpec(block_size=16, head_size=8, dtype="bfloat16")
FOUR = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=4, head_size=4, dtype="bfloat16")
UNEVEN = {"k": (range(1), range(1, 4)), "v": (range(3), range(3, 4))}


def drafting(*, whole: bool, **parallel: Any) -> kvspec.EngineSpec:
    """Return an MLA target with a draft of one head, which may hold every token on every rank."""
    draft = group(gqa(1), "draft.0", name="draft", context_sharded=not whole)
    return engine(group(MLA, "layers.0", name="target"), draft, **parallel)


def sharded(shardings: Any, **parallel: Any) -> kvspec.EngineSpec:
    """Return an engine of one group of four heads, sharded as *shardings* say by part."""
    full = group(FOUR, "layers.0", name="full", shardings=shardings)
    return engine(full, layout="LKBHNC", **parallel)


def case(producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, tokens: int) -> Case:
    """Return a request of *tokens* between two engines, its blocks in order from 1."""
    tables = [
        {
            group.name: list(range(1, 1 + -(-tokens // each.virtual_block(group))))
            for group in each.groups
        }
        for each in (producer, consumer)
    ]
    return builders.case(producer, consumer, request(tokens, *tables))


def check(drawn: Case) -> None:
    """Check that every byte arrives, by ids and by descriptors, and that `verify` agrees."""
    for copies in (selected, described):
        moved = world(drawn)
        moved.execute(copies)
        assert [] == moved.differences()
        caches = [
            {rank: cache for rank, (cache, _) in held.items()}
            for held in (moved.producers, moved.consumers)
        ]
        assert kvspec.verify(moved.plan, *caches, drawn.request) is None


def test_a_draft_runs_whole_beside_a_target_that_shares_its_tokens() -> None:
    """TP 1 to TP 2 with DCP 2: both ranks get every token of the draft, in its own blocks."""
    consumer = drafting(whole=True, tp_size=2, dcp_size=2, interleave_size=16)
    target, draft = consumer.groups
    assert [32, 16] == [consumer.virtual_block(group) for group in (target, draft)]
    check(case(drafting(whole=False), consumer, 64))


@pytest.mark.parametrize("whole", [(True, False), (False, True), (True, True), (False, False)])
def test_either_side_may_hold_a_group_whole(whole: tuple[bool, bool]) -> None:
    """Shared by four on one side, by two or none on the other, with other interleaves."""
    producer = drafting(whole=whole[0], tp_size=4, dcp_size=4, interleave_size=4)
    consumer = drafting(whole=whole[1], tp_size=2, dcp_size=2, interleave_size=8)
    check(case(producer, consumer, 75))


def test_parts_of_one_size_are_sharded_differently() -> None:
    """Keys 1 + 3 and values 3 + 1, from keys and values 2 + 2: both by the group's own word."""
    check(case(sharded({}, tp_size=2), sharded(UNEVEN, tp_size=2), 10))
    check(case(sharded(UNEVEN, tp_size=2), sharded({}, tp_size=3), 10))


def test_an_engine_tells_pages_by_its_own_shardings() -> None:
    """4 rows x 8 bytes x (1 key head + 3 value heads).

    The spec knows the default sharding alone.
    """
    uneven = sharded(UNEVEN, tp_size=2)
    assert 4 * 8 * (1 + 3) == uneven.page_size_bytes("layers.0", RankId(tp=0))
    assert 4 * 8 * (3 + 1) == uneven.page_size_bytes("layers.0", RankId(tp=1))
    five = gqa(5, block_size=4)
    sharding = {
        "k": (range(2), range(2, 4), range(4, 5)),
        "v": (range(2), range(2, 4), range(4, 5)),
    }
    three = engine(group(five, shardings=sharding), tp=3)
    assert [2 * 64, 2 * 64, 64] == [
        three.page_size_bytes("l", RankId(tp=rank)) for rank in range(3)
    ]
    assert [64, 2 * 64, 2 * 64] == [five.page_size_bytes(rank, 3) for rank in range(3)]


def test_descriptions_are_values_that_hash() -> None:
    """Equal engines and plans are one key, however shardings were written.

    Nothing changes later.
    """
    given = {4: [range(1), range(1, 4)]}
    one = kvspec.ParallelConfig(tp_size=2, shardings=given)
    other = kvspec.ParallelConfig(tp_size=2, shardings={4: iter((range(1), range(1, 4)))})
    given[4].append(range(0))
    given[5] = []
    assert one == other
    assert {4: (range(1), range(1, 4))} == one.shardings
    engines = [
        kvspec.EngineSpec(groups=sharded({}).groups, parallel=parallel) for parallel in (one, other)
    ]
    assert 1 == len(set(engines))
    plans = {kvspec.plan_transfer(each, sharded(UNEVEN, tp_size=2)): "" for each in engines}
    assert 1 == len(plans)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: sharded({"q": (range(4),)}),
            "groups['full'].shardings='q': expected the name of a part of the group, one of k, v",
        ),
        (
            lambda: sharded({"k": (range(4),)}, tp_size=2),
            (
                "groups['full'].shardings['k']=(range(0, 4),): expected "
                "one range for each of the 2 TP ranks"
            ),
        ),
        (
            lambda: sharded({"k": (range(2), range(3, 4))}, tp_size=2),
            (
                "groups['full'].shardings['k']=(range(0, 2), range(3, 4)): ranges must be "
                "equal or disjoint and cover range(0, 4), but units range(2, 3) are missing"
            ),
        ),
        (
            lambda: kvspec.KVCacheGroup(name="g", layers=["l"], spec=FOUR, context_sharded=1),  # type: ignore[arg-type]
            "groups['g'].context_sharded=1: expected True or False",
        ),
        (
            lambda: sharded({}).page_size_bytes("layers.9", RankId()),
            "layer='layers.9': expected one of layers.0",
        ),
    ],
)
def test_what_a_group_cannot_own_is_refused(make: Any, words: str) -> None:
    """Each names the group and the part."""
    with pytest.raises(kvspec.SpecError) as error:
        make()
    assert words == str(error.value)
