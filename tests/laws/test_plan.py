"""What else is true of plans: one plan of two engines, its releasers, its traffic, its words."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from collections import Counter
from typing import Any

import attrs
import numpy as np
import pytest
from builders import case as bare
from builders import engine, gqa, request
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kvspec
from kvspec.ownership.tokens import BlockCyclic, meet
from kvspec.testing import Case, laws, strategies
from kvspec.testing.carve import rank_units
from kvspec.testing.laws import KVSPEC
from kvspec.testing.laws.owners import counted_replicas, owns, targets
from kvspec.testing.positions import live_positions
from kvspec.testing.world import plan_of

PLANS = strategies.plans()
MANY = settings(max_examples=2 * settings.default.max_examples)
DEALT_APART = (
    (1, {"tp": 4, "dcp_size": 2, "interleave_size": 2}, {"pcp_size": 3, "interleave_size": 1}),
    (2, {"tp": 4, "dcp_size": 2}, {"tp": 2, "pcp_size": 2, "interleave_size": 2}),
)
Slice = tuple[Any, ...]


@pytest.mark.parametrize(("heads", "producer", "consumer"), DEALT_APART)
@pytest.mark.parametrize("replica_policy", strategies.POLICIES)
def test_tokens_sharded_apart(
    heads: int, producer: Any, consumer: Any, replica_policy: Any
) -> None:
    """Every law holds where both sides shard tokens, to other sizes and by other interleaves."""
    spec = gqa(heads, block_size=2)
    engines = engine(spec, **producer), engine(spec, **consumer)
    planner = laws.System(name="kvspec", moves=KVSPEC.moves, tells=KVSPEC.tells)
    assert [] == laws.broken(planner, bare(*engines, replica_policy=replica_policy))


@given(PLANS)
def test_a_plan_is_whole(case: Case) -> None:
    """An edge moves something, stands once, and its slices name its own producer.

    As many producer ranks report a request as sent as there are, and consumer ranks received; the
    explanation names every rank that reads or is read.
    """
    plan = plan_of(case)
    names = Counter((e.producer, e.consumer, e.producer_group, e.group) for e in plan.edges)
    assert {1} == set(names.values())
    words = kvspec.explain(plan)
    for edge in plan.edges:
        assert edge.slices
        assert {edge.producer.tp} == {each.remote_rank for each in edge.slices}
        assert set(edge.layers) <= set(case.producer.group(edge.producer_group).layers)
        assert set(edge.layers) <= set(case.consumer.group(edge.group).layers)
        assert str(edge.producer) in words
        assert str(edge.consumer) in words
    assert len(case.producer.parallel.ranks) == plan.finished_sending_count
    assert len(case.consumer.parallel.ranks) == plan.finished_recving_count


@given(PLANS)
def test_each_rank_alone_knows_its_edges(case: Case) -> None:
    """Law 3: what each rank slices for itself, in either role, is what the plan of all ranks says.

    Of engines that differ in their TP sizes alone, since a spec shards by default.
    """
    tp_sizes = [each.parallel.tp_size for each in (case.producer, case.consumer)]
    group = next(group for group in case.consumer.groups if len(group.layers) > len(group.excluded))
    plain = kvspec.KVCacheGroup(name="g", layers=group.layers, spec=group.spec)
    sides = [engine(plain, tp=size) for size in tp_sizes]
    policy = case.replica_policy
    if drawn := policy.topology:
        nodes = zip((drawn.producer, drawn.consumer), sides, strict=True)
        own = [{rank: node[rank] for rank in side.parallel.ranks} for node, side in nodes]
        topology = kvspec.Topology(producer=own[0], consumer=own[1])
        policy = attrs.evolve(policy, topology=topology)
    plan = kvspec.plan_transfer(*sides, policy)
    wanted = {
        (edge.producer.tp, edge.consumer.tp, each.global_range, each.remote_range, each.local_range,
         each.stripe, layer, part)
        for edge in plan.edges
        for each in edge.slices
        for layer in each.layers
        for part in each.parts
    }  # fmt: skip
    for role, (local, remote) in (("consumer", tp_sizes[::-1]), ("producer", tp_sizes)):
        alone: set[Slice] = set()
        for rank in range(local):
            for each in group.spec.get_tp_transfer_slices(
                rank, local, remote, role=role, replica_policy=policy
            ):
                ends = (each.remote_rank, rank), (each.remote_range, each.local_range)
                ranks, places = ends if role == "consumer" else (ends[0][::-1], ends[1][::-1])
                alone |= {
                    (*ranks, each.global_range, *places, each.stripe, layer, part)
                    for layer in each.layers or group.layers
                    for part in each.parts
                }
        assert wanted == alone


PLAN_THEM = """
import hashlib, pickle, sys
from kvspec.testing.world import plan_of
for case in pickle.load(sys.stdin.buffer):
    plan = plan_of(case)
    told = [plan.notifiers(rank) for rank in case.producer.parallel.ranks]
    print(hashlib.sha256(repr((plan.edges, told)).encode()).hexdigest())
"""


def test_both_engines_compute_one_plan() -> None:
    """Law 3: in processes of their own, from pickled descriptions, edge by edge and in one order.

    Each has another seed of hashes, so that nothing may depend on the order of a set.
    """
    drawn: list[Case] = []

    @settings(max_examples=40, phases=[Phase.generate])
    @given(PLANS)
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    found = [
        subprocess.run(  # noqa: S603 - our own interpreter and code
            [sys.executable, "-c", PLAN_THEM],
            input=pickle.dumps(drawn),
            capture_output=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout.split()
        for seed in ("1", "2")
    ]
    own = []
    for case in drawn:
        plan = plan_of(case)
        told = [plan.notifiers(rank) for rank in case.producer.parallel.ranks]
        own.append(hashlib.sha256(repr((plan.edges, told)).encode()).hexdigest().encode())
    assert [own, own] == found


@MANY
@given(PLANS)
def test_an_unread_rank_has_its_releaser(case: Case) -> None:
    """The rank at place j of c is released by g[j len(g) // len(c)]; one that holds nothing by all.

    A rank of several classes (its parts are sharded differently) is told by the releaser of one.
    """
    plan = plan_of(case)
    found = list(counted_replicas(case.producer, case.consumer))
    for rank in case.producer.parallel.ranks:
        if plan.targets(rank):
            assert plan.targets(rank) == plan.notifiers(rank)
            continue
        chosen = [
            each.consumers[each.replicas.index(rank) * len(each.consumers) // len(each.replicas)]
            for each in found
            if rank in each.replicas
        ]
        if chosen:
            (releaser,) = plan.notifiers(rank)
            assert releaser in chosen
        else:
            assert case.consumer.parallel.ranks == plan.notifiers(rank)


@pytest.mark.parametrize(
    ("heads", "told"),
    [(1, {1: 0, 2: 0, 3: 1, 4: 1, 5: 1}), (2, {1: 0, 2: 0, 4: 1, 5: 1})],
)
def test_releasers_by_hand(heads: int, told: dict[int, int]) -> None:
    """Six producer ranks, two consumers, only first replicas read: each half has its releaser."""
    spec = gqa(heads)
    plan = kvspec.plan_transfer(engine(spec, tp=6), engine(spec, tp=2), replica_policy="first")
    unread = [rank for rank in plan.producer.parallel.ranks if not plan.targets(rank)]
    assert told == {rank.tp: each.tp for rank in unread for each in plan.notifiers(rank)}


def test_symmetry_does_not_hold_with_replicas() -> None:
    """Its witness: one head, 1 rank to 2 gives two edges, 2 ranks to 1 give one."""
    one, two = (engine(gqa(1), tp=size) for size in (1, 2))
    assert 2 == len(kvspec.plan_transfer(one, two).edges)
    assert 1 == len(kvspec.plan_transfer(two, one).edges)


@MANY
@given(PLANS, st.integers(1, 40))
def test_traffic_is_what_is_wanted(case: Case, tokens: int) -> None:
    """Bytes moved are the live rows that each consumer rank owns, whatever the producer is."""
    asked = request(tokens, {}, {})
    wanted = Counter[kvspec.RankId]()
    for target in targets(case.consumer, case.producer):
        part, spec = target.part, target.group.spec.of_layer(target.layer)
        live = live_positions(spec, asked)
        live = live & owns(case.consumer, target.rank, part, target.group, tokens)
        each = part.tokens_per_state
        rows = len({token // each for token in live.nonzero()[0].tolist()}) if each else part.states
        units = len(rank_units(case.consumer, target.rank, part, target.group))
        wanted[target.rank] += units * rows * part.content_bytes
    got = Counter[kvspec.RankId]()
    for rank, load in kvspec.traffic(plan_of(case), tokens).consumers.items():
        got[rank] += load.nbytes
    assert +wanted == +got


def test_explicit_shardings_by_hand() -> None:
    """5 heads, vLLM-like 2+2+1 to an engine that gives the odd head to its first rank: 3+2."""
    shardings = (range(2), range(2, 4), range(4, 5)), (range(3), range(3, 5))
    sides = [engine(gqa(5), tp=len(own), shardings={5: own}) for own in shardings]
    plan = kvspec.plan_transfer(*sides)
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


CYCLIC = st.builds(
    lambda size, rank, interleave: BlockCyclic(rank % size, size, interleave),
    st.integers(1, 6), st.integers(0, 5), st.integers(1, 9),
)  # fmt: skip


@given(CYCLIC, CYCLIC)
def test_contexts_meet_where_both_own_a_position(one: BlockCyclic, other: BlockCyclic) -> None:
    """Asked of every position of their common period."""
    period = np.arange(one.size * one.interleave * other.size * other.interleave)
    both = [
        each // own.interleave % own.size == own.rank for own in (one, other) for each in (period,)
    ]
    assert bool((both[0] & both[1]).any()) == meet(one, other)


def test_contexts_of_long_interleaves_are_compared_at_once() -> None:
    """Two interleaves whose common period has 2e12 positions: no array is as long."""
    assert meet(BlockCyclic(0, 2, 2**20), BlockCyclic(1, 3, 3**12))
    assert meet(BlockCyclic(0, 2, 2**40), BlockCyclic(2, 3, 3**30))
    assert not meet(BlockCyclic(0, 2, 2**40), BlockCyclic(3, 4, 2**40))
