"""The laws of plans: every pair of ranks of two engines, who reads whom and who tells whom.

Stated over what should be there: every consumer rank's units, every producer rank's release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvspec
from kvspec.testing import strategies
from kvspec.testing.carve import rank_units
from kvspec.testing.oracle import live_positions

PAIRS = strategies.engine_pairs(largest=8)
POLICY = st.sampled_from(strategies.POLICIES)
SALT = st.integers(0, 5)
MANY = settings(max_examples=3 * settings.default.max_examples)
Engines = tuple[kvspec.EngineSpec, kvspec.EngineSpec]
Target = tuple[kvspec.RankId, str, str, kvspec.Part]


def targets(engine: kvspec.EngineSpec) -> Iterator[Target]:
    """Yield (rank, group, layer, part) of everything that *engine* holds."""
    for rank in engine.parallel.ranks:
        for group in engine.groups:
            for layer in group.layers:
                for part in group.spec.of_layer(layer).parts:
                    yield rank, group.name, layer, part


def moves(
    plan: kvspec.TransferPlan, target: Target
) -> Iterator[tuple[kvspec.RankId, kvspec.TPTransferSlice]]:
    """Yield (producer rank, slice) of all that moves into *target*."""
    rank, group, layer, part = target
    for edge in plan.edges:
        if edge.consumer == rank and edge.group == group and layer in edge.layers:
            for each in edge.slices:
                if part.name in each.parts and (not each.layers or layer in each.layers):
                    yield edge.producer, each


def arrivals(plan: kvspec.TransferPlan, target: Target, block: int) -> Counter[tuple[int, int]]:
    """Count (place, global unit) of all that a virtual block of *target* receives.

    The unit is the one that the producer rank holds where the slice says, dealt by the oracle.
    """
    found: Counter[tuple[int, int]] = Counter()
    for producer, each in moves(plan, target):
        held = rank_units(plan.producer, producer, target[-1])
        if block % each.stripe[1] == each.stripe[0]:
            found.update(
                (place, held[source])
                for place, source in zip(each.local_range, each.remote_range, strict=True)
            )
    return found


@MANY
@given(PAIRS, POLICY, SALT)
def test_exact_cover(engines: Engines, replicas: Any, salt: int) -> None:
    """Law 1: every unit of every consumer rank, layer and part arrives once, in its place."""
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    for target in targets(engines[1]):
        rank, _, _, part = target
        wanted = Counter(enumerate(rank_units(engines[1], rank, part)))
        steps = max((each.stripe[1] for _, each in moves(plan, target)), default=1)
        for block in range(steps):
            assert wanted == arrivals(plan, target, block)


@MANY
@given(PAIRS, POLICY, SALT)
def test_edges_are_one_per_pair_and_group(engines: Engines, replicas: Any, salt: int) -> None:
    """An edge moves something, stands once, and its slices name its own producer."""
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    names = Counter((edge.producer, edge.consumer, edge.group) for edge in plan.edges)
    assert {1} == set(names.values())
    for edge in plan.edges:
        assert edge.slices
        assert {edge.producer.tp} == {each.remote_rank for each in edge.slices}
        assert set(edge.layers) <= set(engines[1].group(edge.group).layers)


@MANY
@given(PAIRS, POLICY, SALT)
def test_counts(engines: Engines, replicas: Any, salt: int) -> None:
    """Law 7: notifiers and notifies are the same edges; every producer rank is told by someone."""
    producer, consumer = engines
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    told = {(p, c) for p in producer.parallel.ranks for c in plan.notifiers(p)}
    tell = {(p, c) for c in consumer.parallel.ranks for p in plan.notifies(c)}
    assert told == tell
    assert set(producer.parallel.ranks) == {p for p, _ in told}
    assert {(edge.producer, edge.consumer) for edge in plan.edges} <= told
    assert len(producer.parallel.ranks) == plan.finished_sending_count
    assert len(consumer.parallel.ranks) == plan.finished_recving_count


@MANY
@given(PAIRS, POLICY, SALT)
def test_sources_and_targets_are_the_edges(engines: Engines, replicas: Any, salt: int) -> None:
    """Pull and push ask the same plan: who reads whom is one set of pairs."""
    producer, consumer = engines
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    edges = {(edge.producer, edge.consumer) for edge in plan.edges}
    assert edges == {(p, c) for c in consumer.parallel.ranks for p in plan.sources(c)}
    assert edges == {(p, c) for p in producer.parallel.ranks for c in plan.targets(p)}


def classes(
    plan: kvspec.TransferPlan, rank: kvspec.RankId
) -> Iterator[tuple[list[kvspec.RankId], list[kvspec.RankId]]]:
    """Yield (replicas, readers) of each thing that a producer rank holds, from sets of units."""
    for holder, _, _, part in targets(plan.producer):
        held = set(rank_units(plan.producer, rank, part))
        if holder == rank and held:
            members = [
                each
                for each in plan.producer.parallel.ranks
                if set(rank_units(plan.producer, each, part)) == held
            ]
            readers = [
                each
                for each in plan.consumer.parallel.ranks
                if held & set(rank_units(plan.consumer, each, part))
            ]
            yield members, readers


@MANY
@given(PAIRS, POLICY, SALT)
def test_an_unread_rank_has_its_releaser(engines: Engines, replicas: Any, salt: int) -> None:
    """The rank at place j of c is released by g[j len(g) // len(c)]; one that holds nothing by all.

    A rank of several classes (its parts are dealt differently) is told by the releaser of one.
    """
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    for rank in engines[0].parallel.ranks:
        if plan.targets(rank):
            assert plan.targets(rank) == plan.notifiers(rank)
            continue
        elected = [g[c.index(rank) * len(g) // len(c)] for c, g in classes(plan, rank)]
        if elected:
            (releaser,) = plan.notifiers(rank)
            assert releaser in elected
        else:
            assert engines[1].parallel.ranks == plan.notifiers(rank)


@pytest.mark.parametrize(
    ("heads", "told"),
    [(1, {1: 0, 2: 0, 3: 1, 4: 1, 5: 1}), (2, {1: 0, 2: 0, 4: 1, 5: 1})],
)
def test_releasers_by_hand(heads: int, told: dict[int, int]) -> None:
    """Six producer ranks, two consumers, only first replicas read: each half has its releaser."""
    plan = kvspec.plan_transfer(gqa(heads, 6), gqa(heads, 2), replicas="first")
    unread = [rank for rank in plan.producer.parallel.ranks if not plan.targets(rank)]
    assert told == {rank.tp: each.tp for rank in unread for each in plan.notifiers(rank)}


def gqa(heads: int, size: int, **deals: Any) -> kvspec.EngineSpec:
    """Return an engine of one attention layer."""
    spec = kvspec.FullAttentionSpec(
        block_size=2, total_num_kv_heads=heads, head_size=2, dtype="uint8"
    )
    group = kvspec.KVCacheGroup(name="g", layers=("l",), spec=spec)
    parallel = kvspec.ParallelConfig(tp_size=size, **deals)
    return kvspec.EngineSpec(groups=(group,), parallel=parallel)


def flat(
    plan: kvspec.TransferPlan, *, swapped: bool = False
) -> set[tuple[kvspec.RankId, kvspec.RankId, str, Any, Any, Any]]:
    """Return (producer, consumer, layer and part, ranges) of every slice, by layer and part."""
    found = set()
    for target in targets(plan.consumer):
        for producer, each in moves(plan, target):
            pair = (producer, target[0]), (each.remote_range, each.local_range)
            (a, b), ranges = (pair[0][::-1], pair[1][::-1]) if swapped else pair
            name = f"{target[2]}.{target[3].name}"
            found.add((a, b, name, each.global_range, *ranges))
    return found


def has_replicas(engine: kvspec.EngineSpec) -> bool:
    """Return whether any unit of *engine* is held by two ranks."""
    held = Counter(
        (layer, part.name, unit)
        for rank, _, layer, part in targets(engine)
        for unit in rank_units(engine, rank, part)
    )
    return max(held.values()) > 1


SHARDED = ("full", "full, V of another size", "mamba1", "short conv", "uniform", "mamba2")


@MANY
@given(strategies.engine_pairs(SHARDED, largest=4), POLICY, SALT)
def test_symmetry(engines: Engines, replicas: Any, salt: int) -> None:
    """Law 3: where neither side has replicas, swapping the sides swaps the slices, no more."""
    if any(map(has_replicas, engines)):
        return
    there = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    back = kvspec.plan_transfer(*engines[::-1], replicas=replicas, salt=salt)
    assert flat(there) == flat(back, swapped=True)


def test_symmetry_does_not_hold_with_replicas() -> None:
    """Its witness: one head, 1 rank to 2 gives two edges, 2 ranks to 1 give one."""
    assert len(kvspec.plan_transfer(gqa(1, 1), gqa(1, 2)).edges) == 2
    assert len(kvspec.plan_transfer(gqa(1, 2), gqa(1, 1)).edges) == 1


@MANY
@given(PAIRS, POLICY, SALT, st.integers(1, 40))
def test_traffic_is_what_is_wanted(engines: Engines, replicas: Any, salt: int, tokens: int) -> None:
    """Bytes moved are the live rows of every consumer rank, whatever the producer is."""
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    request = kvspec.TransferRequest(
        request_id="r", num_tokens=tokens, producer_blocks={}, consumer_blocks={}
    )
    wanted = 0
    for rank, group, layer, part in targets(engines[1]):
        spec = engines[1].group(group).spec.of_layer(layer)
        live = live_positions(spec, request).nonzero()[0].tolist()
        each = part.tokens_per_state
        rows = len({token // each for token in live}) if each else part.states
        wanted += len(rank_units(engines[1], rank, part)) * rows * part.content_bytes
    assert wanted == sum(plan.traffic(tokens).values())


@MANY
@given(PAIRS, POLICY, SALT)
def test_explain_names_every_pair(engines: Engines, replicas: Any, salt: int) -> None:
    """The explanation mentions every rank that reads, is read or is told."""
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    words = plan.explain()
    for edge in plan.edges:
        assert str(edge.producer) in words
        assert str(edge.consumer) in words


def test_explicit_deals_by_hand() -> None:
    """5 heads, vLLM-like 2+2+1 to an engine that gives the odd head to its first rank: 3+2."""
    producer = gqa(5, 3, unit_deals={5: (range(2), range(2, 4), range(4, 5))})
    consumer = gqa(5, 2, unit_deals={5: (range(3), range(3, 5))})
    plan = kvspec.plan_transfer(producer, consumer)
    got = [
        (edge.producer.tp, edge.consumer.tp, each.global_range, each.local_range, each.remote_range)
        for edge in plan.edges
        for each in edge.slices
    ]
    assert sorted(got, key=str) == [
        (0, 0, range(2), range(2), range(2)),
        (1, 0, range(2, 3), range(2, 3), range(1)),
        (1, 1, range(3, 4), range(1), range(1, 2)),
        (2, 1, range(4, 5), range(1, 2), range(1)),
    ]
