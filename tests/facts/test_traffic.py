"""Test that the traffic of a plan equals the traffic of the tables of its ranks."""

from __future__ import annotations

import re

import builders
from builders import engine
from hypothesis import given, settings
from refused import refusal

import kvspec
from kvspec import RankId
from kvspec.analysis.counts import Amount, Link
from kvspec.testing import strategies
from kvspec.testing.parallels import is_state

HALF = settings(max_examples=settings.default.max_examples // 2)


def separate_tables(
    engine: kvspec.EngineSpec, num_tokens: int
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return tables of descending blocks without adjacent pairs, and the sizes of the pools."""
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
def test_traffic_equals_that_of_tables(case: strategies.Case) -> None:
    """The pairs are compared with tables. Ranks have the sums, and the busiest link the maximum."""
    plan = kvspec.plan_transfer(case.producer, case.consumer, case.replica_policy)
    tokens = case.request.num_tokens
    traffic = kvspec.traffic(plan, tokens)
    assert tokens == traffic.num_tokens
    (producer_blocks, producer_pool), (consumer_blocks, consumer_pool) = (
        separate_tables(side, tokens) for side in (case.producer, case.consumer)
    )
    request = builders.request(tokens, producer_blocks, consumer_blocks, encoder_tokens=tokens)
    assert {(edge.producer, edge.consumer) for edge in plan.edges} == set(traffic.pairs)
    for (producer, consumer), load in traffic.pairs.items():
        caches = (
            kvspec.plan_memory(case.producer, producer, producer_pool),
            kvspec.plan_memory(case.consumer, consumer, consumer_pool),
        )
        rows = kvspec.build_table(plan, *caches).descriptors(request)
        assert load.descriptors == len(rows)
        # Blocks move with the dead tokens at their end.
        assert load.nbytes <= int(rows[:, 2].sum())
    for loads, side in ((traffic.producers, 0), (traffic.consumers, 1)):
        assert tuple(loads) == (case.producer, case.consumer)[side].parallel.ranks
        for rank, load in loads.items():
            of_rank = [other for pair, other in traffic.pairs.items() if pair[side] == rank]
            assert load.nbytes == sum(other.nbytes for other in of_rank)
            assert load.descriptors == sum(other.descriptors for other in of_rank)
    links = [*traffic.producers.values(), *traffic.consumers.values()]
    assert max(load.nbytes for load in links) == traffic.busiest.load.nbytes
    assert traffic.total == Amount.total(traffic.producers.values())
    assert traffic.total == Amount.total(traffic.consumers.values())


def plan_of(first: str = "LBHNC") -> kvspec.TransferPlan:
    """Return the plan of two layers of two heads of 4 bytes: TP 2 in layout *first* to TP 1."""
    spec = builders.gqa(2, block_size=2, head_size=2)
    producer, consumer = (
        engine(spec, layers=("l.0", "l.1"), tp=size, layout=layout)
        for size, layout in ((2, first), (1, "LBHNC"))
    )
    return kvspec.plan_transfer(producer, consumer)


def test_traffic_of_three_tokens() -> None:
    """Three tokens are two blocks. In each block a head of one layer is one chunk of 16 bytes."""
    traffic = kvspec.traffic(plan_of(), 3)
    tp0, tp1 = RankId(tp=0), RankId(tp=1)
    load = Amount(nbytes=2 * 3 * 8, descriptors=2 * 2)
    assert {(tp0, tp0): load, (tp1, tp0): load} == traffic.pairs
    assert {tp0: load, tp1: load} == traffic.producers
    assert {tp0: Amount(96, 8)} == traffic.consumers
    assert Link("consumer", tp0, Amount(96, 8)) == traffic.busiest


def test_traffic_text_lists_total_pairs_and_busiest_link() -> None:
    """Each line has the names of the ranks, the bytes and the descriptors."""
    total, first, second, busiest = str(kvspec.traffic(plan_of(), 3)).splitlines()
    assert ["3", "96", "8"] == re.findall(r"\d+", total)
    assert ["tp0", "tp0", "48", "4"] == re.findall(r"tp\d|\d+", first)
    assert ["tp1", "tp0", "48", "4"] == re.findall(r"tp\d|\d+", second)
    assert ["consumer", "tp0", "96", "8"] == re.findall(r"consumer|producer|tp\d|\d+", busiest)


def test_separate_planes_need_more_descriptors() -> None:
    """K and V are separate planes on one side and packed on the other, so each token is a chunk."""
    assert Amount(96, 2 * 2 * 2 * 3) == kvspec.traffic(plan_of("LKBHNC"), 3).total


def test_busiest_link_is_the_producers_if_loads_are_equal() -> None:
    """One rank of each side has the whole load."""
    plan = kvspec.plan_transfer(plan_of().consumer, plan_of().consumer)
    assert "producer" == kvspec.traffic(plan, 1).busiest.side


def test_traffic_rejects_too_many_blocks() -> None:
    """The number of bytes would fit into 64 bits, but the blocks are counted one by one."""
    error = refusal(lambda: kvspec.traffic(plan_of(), 10**13))
    assert ("num_tokens", 10**13) == (error.field, error.value)
    assert "4194304" in str(error)


def test_traffic_of_no_tokens_is_zero() -> None:
    """The pairs are listed with empty loads."""
    traffic = kvspec.traffic(plan_of(), 0)
    assert [Amount(0, 0)] * 2 == list(traffic.pairs.values())
