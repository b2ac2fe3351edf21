"""Test groups that are sharded in another way than the other groups of their engine."""

from __future__ import annotations

from typing import Any

import builders
import pytest
from builders import engine, gqa, group, request
from refused import refusal

import kvspec
from kvspec import RankId
from kvspec.testing.case import Case
from kvspec.testing.world import described, selected, world

MLA = kvspec.MLAAttentionSpec(block_size=16, head_size=8, dtype="bfloat16")
FOUR = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=4, head_size=4, dtype="bfloat16")
UNEVEN = {"k": (range(1), range(1, 4)), "v": (range(3), range(3, 4))}


def drafting(*, whole: bool, **parallel: Any) -> kvspec.EngineSpec:
    """Return an MLA model with a draft model of one head.

    If *whole*, every rank holds all tokens of the draft.
    """
    draft = group(gqa(1), "draft.0", name="draft", context_sharded=not whole)
    return engine(group(MLA, "layers.0", name="target"), draft, **parallel)


def sharded(shardings: Any, **parallel: Any) -> kvspec.EngineSpec:
    """Return an engine of one group of four heads, with *shardings* by part."""
    full = group(FOUR, "layers.0", name="full", shardings=shardings)
    return engine(full, layout="LKBHNC", **parallel)


def case(producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, tokens: int) -> Case:
    """Return a request of *tokens* between two engines, its blocks in order from 1."""
    tables = [
        {
            group.name: list(range(1, 1 + -(-tokens // side.virtual_block(group))))
            for group in side.groups
        }
        for side in (producer, consumer)
    ]
    return builders.case(producer, consumer, request(tokens, *tables))


def check(drawn: Case) -> None:
    """Check that every byte arrives by ids and by descriptors, and that `verify` accepts it."""
    for copies in (selected, described):
        moved = world(drawn)
        moved.execute(copies)
        assert [] == moved.differences()
        caches = [
            {rank: cache for rank, (cache, _) in side.items()}
            for side in (moved.producers, moved.consumers)
        ]
        assert kvspec.verify(moved.plan, *caches, drawn.request) is None


def test_draft_without_context_sharding_moves_to_all_ranks() -> None:
    """From TP 1 to TP 2 with DCP 2, both ranks receive all tokens of the draft."""
    consumer = drafting(whole=True, tp_size=2, dcp_size=2, interleave_size=16)
    target, draft = consumer.groups
    assert [32, 16] == [consumer.virtual_block(group) for group in (target, draft)]
    check(case(drafting(whole=False), consumer, 64))


@pytest.mark.parametrize("whole", [(True, False), (False, True), (True, True), (False, False)])
def test_draft_may_be_context_sharded_on_either_side(whole: tuple[bool, bool]) -> None:
    """The model is sharded over four ranks and over two, with different interleaves."""
    producer = drafting(whole=whole[0], tp_size=4, dcp_size=4, interleave_size=4)
    consumer = drafting(whole=whole[1], tp_size=2, dcp_size=2, interleave_size=8)
    check(case(producer, consumer, 75))


def test_keys_and_values_with_different_shardings_move() -> None:
    """One side has 1 + 3 heads of keys and 3 + 1 of values. The other has the default."""
    check(case(sharded({}, tp_size=2), sharded(UNEVEN, tp_size=2), 10))
    check(case(sharded(UNEVEN, tp_size=2), sharded({}, tp_size=3), 10))


def test_page_size_of_engine_depends_on_its_shardings() -> None:
    """A page has 4 rows x 8 bytes x (1 head of keys + 3 heads of values).

    The page size of a spec is that of the default sharding.
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


def test_engines_and_plans_with_equal_shardings_hash_equally() -> None:
    """The shardings are copied from lists or iterators, so later changes have no effect."""
    shardings = {4: [range(1), range(1, 4)]}
    first = kvspec.ParallelConfig(tp_size=2, shardings=shardings)
    second = kvspec.ParallelConfig(tp_size=2, shardings={4: iter((range(1), range(1, 4)))})
    shardings[4].append(range(0))
    shardings[5] = []
    assert first == second
    assert {4: (range(1), range(1, 4))} == first.shardings
    engines = [
        kvspec.EngineSpec(groups=sharded({}).groups, parallel=parallel)
        for parallel in (first, second)
    ]
    assert 1 == len(set(engines))
    plans = {kvspec.plan_transfer(side, sharded(UNEVEN, tp_size=2)) for side in engines}
    assert 1 == len(plans)


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (lambda: sharded({"q": (range(4),)}), "groups['full'].shardings", "q"),
        (
            lambda: sharded({"k": (range(4),)}, tp_size=2),
            "groups['full'].shardings['k']",
            (range(4),),
        ),
        (
            lambda: sharded({"k": (range(2), range(3, 4))}, tp_size=2),
            "groups['full'].shardings['k']",
            (range(2), range(3, 4)),
        ),
        (
            lambda: kvspec.KVCacheGroup(name="g", layers=["l"], spec=FOUR, context_sharded=1),  # type: ignore[arg-type]
            "groups['g'].context_sharded",
            1,
        ),
        (lambda: sharded({}).page_size_bytes("layers.9", RankId()), "layer", "layers.9"),
    ],
)
def test_group_rejects_invalid_sharding(make: Any, field: str, value: object) -> None:
    """The error has the group, the part and the value."""
    error = refusal(make)
    assert (field, value) == (error.field, error.value)


def test_sharding_error_names_missing_units() -> None:
    """No range contains unit 2."""
    error = refusal(lambda: sharded({"k": (range(2), range(3, 4))}, tp_size=2))
    assert "range(2, 3)" in str(error)
