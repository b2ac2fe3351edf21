"""What a plan says that a request moves is what the tables of its ranks move."""

from __future__ import annotations

import builders
import pytest
from builders import engine
from hypothesis import given, settings

import kvspec
from kvspec import RankId
from kvspec.analysis.counts import Link, Load
from kvspec.testing import strategies
from kvspec.testing.parallels import is_state

HALF = settings(max_examples=settings.default.max_examples // 2)


def separate_tables(
    engine: kvspec.EngineSpec, num_tokens: int
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return tables of blocks from the end of a pool to its beginning, no two together."""
    tables, pools = {}, {}
    null = 0 if engine.null_block is None else engine.null_block
    for group in engine.groups:
        virtual, blocks = engine.virtual_block(group), 1
        while not is_state(group.spec) and blocks * virtual < num_tokens:
            blocks += 1
        pools[group.name] = 3 * blocks + null + 3
        tables[group.name] = [3 * block + null + 1 for block in reversed(range(blocks))]
    return tables, pools


@HALF
@given(strategies.cases())
def test_traffic_is_that_of_each_pairs_own_table(case: strategies.Case) -> None:
    """Pair by pair, over every axis; ranks have the sums, the busiest link the most."""
    plan = kvspec.plan_transfer(case.producer, case.consumer, case.replica_policy)
    tokens = case.request.num_tokens
    found = kvspec.traffic(plan, tokens)
    assert tokens == found.num_tokens
    (ours, pool), (theirs, other) = (
        separate_tables(e, tokens) for e in (case.producer, case.consumer)
    )
    request = builders.request(tokens, ours, theirs, encoder_tokens=tokens)
    assert {(edge.producer, edge.consumer) for edge in plan.edges} == set(found.pairs)
    for (p, c), load in found.pairs.items():
        caches = (
            kvspec.plan_memory(case.producer, p, pool),
            kvspec.plan_memory(case.consumer, c, other),
        )
        moved = kvspec.build_table(plan, *caches).descriptors(request)
        assert load.descriptors == len(moved)
        assert load.nbytes <= int(moved[:, 2].sum())  # blocks move with their dead ends
    for loads, at in ((found.producers, 0), (found.consumers, 1)):
        assert tuple(loads) == (case.producer, case.consumer)[at].parallel.ranks
        for rank, load in loads.items():
            mine = [each for pair, each in found.pairs.items() if pair[at] == rank]
            assert load.nbytes == sum(each.nbytes for each in mine)
            assert load.descriptors == sum(each.descriptors for each in mine)
    every = [*found.producers.values(), *found.consumers.values()]
    assert max(each.nbytes for each in every) == found.busiest.load.nbytes
    assert found.total == Load.total(found.producers.values())
    assert found.total == Load.total(found.consumers.values())


def plan_of(first: str = "LBHNC") -> kvspec.TransferPlan:
    """Plan two layers of two heads of 4 bytes from TP 2, in layout *first*, to TP 1."""
    spec = builders.gqa(2, block_size=2, head_size=2)
    ours, theirs = (
        engine(spec, layers=("l.0", "l.1"), tp=size, layout=layout)
        for size, layout in ((2, first), (1, "LBHNC"))
    )
    return kvspec.plan_transfer(ours, theirs)


def test_traffic_by_hand() -> None:
    """Three tokens are two blocks: a head of one layer is one chunk a block, 16 bytes long."""
    found = kvspec.traffic(plan_of(), 3)
    tp0, tp1 = RankId(tp=0), RankId(tp=1)
    each = Load(nbytes=2 * 3 * 8, descriptors=2 * 2)
    assert {(tp0, tp0): each, (tp1, tp0): each} == found.pairs
    assert {tp0: each, tp1: each} == found.producers
    assert {tp0: Load(96, 8)} == found.consumers
    assert Link("consumer", tp0, Load(96, 8)) == found.busiest
    text = """3 tokens: 96 bytes in 8 descriptors
  producer tp0 -> consumer tp0: 48 bytes in 4 descriptors
  producer tp1 -> consumer tp0: 48 bytes in 4 descriptors
busiest link: consumer tp0: 96 bytes in 8 descriptors"""
    assert text == str(found)


def test_planes_take_twice_as_many() -> None:
    """K and V in planes of their own on one side, packed on the other: a chunk a live token."""
    assert Load(96, 2 * 2 * 2 * 3) == kvspec.traffic(plan_of("LKBHNC"), 3).total


def test_a_tie_is_the_producers() -> None:
    """Of equally loaded links the producer's is named."""
    plan = kvspec.plan_transfer(plan_of().consumer, plan_of().consumer)
    assert "producer" == kvspec.traffic(plan, 1).busiest.side


def test_more_blocks_than_can_be_looked_at_are_refused() -> None:
    """Bytes would fit, but blocks are counted one by one."""
    with pytest.raises(kvspec.SpecError, match=r"5000000000000 blocks.* at most 4194304") as error:
        kvspec.traffic(plan_of(), 10**13)
    assert ("num_tokens", 10**13) == (error.value.field, error.value.value)


def test_nothing_moves_of_no_tokens() -> None:
    """No token, no byte and no descriptor; the pairs are there."""
    found = kvspec.traffic(plan_of(), 0)
    assert [Load(0, 0)] * 2 == list(found.pairs.values())
