"""Tests of plans: edges, releasers of unread ranks, traffic, explicit shardings and contexts."""

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
from kvspec.check.counting import live_positions, rank_units
from kvspec.ownership.tokens import BlockCyclic, meet
from kvspec.testing import Case, laws, strategies
from kvspec.testing.laws import KVSPEC
from kvspec.testing.laws.owners import counted_replicas, owns, targets
from kvspec.testing.world import plan_of

pytestmark = pytest.mark.uncovered

PLANS = strategies.plans()
MANY = settings(max_examples=2 * settings.default.max_examples)
UNEQUAL_CONTEXTS = (
    (1, {"tp": 4, "dcp_size": 2, "interleave_size": 2}, {"pcp_size": 3, "interleave_size": 1}),
    (2, {"tp": 4, "dcp_size": 2}, {"tp": 2, "pcp_size": 2, "interleave_size": 2}),
)
Slice = tuple[Any, ...]


@pytest.mark.parametrize(("heads", "producer", "consumer"), UNEQUAL_CONTEXTS)
@pytest.mark.parametrize("replica_policy", strategies.KNOWN_POLICIES)
def test_plan_keeps_laws_if_sides_shard_tokens_differently(
    heads: int, producer: Any, consumer: Any, replica_policy: Any
) -> None:
    """The sides have different numbers of context ranks and different interleaves."""
    spec = gqa(heads, block_size=2)
    engines = engine(spec, **producer), engine(spec, **consumer)
    planner = laws.System(name="kvspec", moves=KVSPEC.moves, tells=KVSPEC.tells)
    assert [] == laws.broken(planner, bare(*engines, replica_policy=replica_policy))


@given(PLANS)
def test_plan_edges_are_unique_and_not_empty(case: Case) -> None:
    """The slices of an edge name its own producer and layers of its own groups.

    All producer ranks report a request as sent, and all consumer ranks as received. The explanation
    names every rank that reads or is read.
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
def test_slices_of_one_rank_equal_the_edges_of_the_plan(case: Case) -> None:
    """Law 3: the slices that a rank computes alone, in either role, are those of the whole plan.

    The engines differ only in their TP sizes, because a spec alone uses the default sharding.
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
    planned = {
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
        assert planned == alone


PRINT_PLANS = """
import hashlib, pickle, sys
from kvspec.testing.world import plan_of
for case in pickle.load(sys.stdin.buffer):
    plan = plan_of(case)
    notifiers = [plan.notifiers(rank) for rank in case.producer.parallel.ranks]
    print(hashlib.sha256(repr((plan.edges, notifiers)).encode()).hexdigest())
"""


def test_plans_of_separate_processes_are_equal() -> None:
    """Law 3: both engines compute the same edges in the same order from pickled descriptions.

    Each process has another hash seed, so the order of a set must not matter.
    """
    drawn: list[Case] = []

    @settings(max_examples=40, phases=[Phase.generate])
    @given(PLANS)
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    printed = [
        subprocess.run(  # noqa: S603 - our own interpreter and code
            [sys.executable, "-c", PRINT_PLANS],
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
        notifiers = [plan.notifiers(rank) for rank in case.producer.parallel.ranks]
        own.append(hashlib.sha256(repr((plan.edges, notifiers)).encode()).hexdigest().encode())
    assert [own, own] == printed


@MANY
@given(PLANS)
def test_unread_rank_is_notified_by_its_releaser(case: Case) -> None:
    """Replica number j of a class is released by consumer number j * consumers // replicas.

    The parts of a rank may be sharded differently, so it may belong to several classes. Then the
    releaser of one class notifies it. A rank that holds nothing is notified by all consumer ranks.
    """
    plan = plan_of(case)
    classes = list(counted_replicas(case.producer, case.consumer))
    for rank in case.producer.parallel.ranks:
        if plan.targets(rank):
            assert plan.targets(rank) == plan.notifiers(rank)
            continue
        chosen = [
            replica_class.consumers[
                replica_class.replicas.index(rank)
                * len(replica_class.consumers)
                // len(replica_class.replicas)
            ]
            for replica_class in classes
            if rank in replica_class.replicas
        ]
        if chosen:
            (releaser,) = plan.notifiers(rank)
            assert releaser in chosen
        else:
            assert case.consumer.parallel.ranks == plan.notifiers(rank)


@pytest.mark.parametrize(
    ("heads", "releasers"),
    [(1, {1: 0, 2: 0, 3: 1, 4: 1, 5: 1}), (2, {1: 0, 2: 0, 4: 1, 5: 1})],
)
def test_unread_replicas_are_divided_between_two_releasers(
    heads: int, releasers: dict[int, int]
) -> None:
    """Six producer ranks and two consumer ranks. Only the first replica of each class is read."""
    spec = gqa(heads)
    plan = kvspec.plan_transfer(engine(spec, tp=6), engine(spec, tp=2), replica_policy="first")
    unread = [rank for rank in plan.producer.parallel.ranks if not plan.targets(rank)]
    assert releasers == {rank.tp: each.tp for rank in unread for each in plan.notifiers(rank)}


def test_plans_with_replicas_are_not_symmetric() -> None:
    """With one head, 1 rank to 2 needs two edges, and 2 ranks to 1 need one."""
    one, two = (engine(gqa(1), tp=size) for size in (1, 2))
    assert 2 == len(kvspec.plan_transfer(one, two).edges)
    assert 1 == len(kvspec.plan_transfer(two, one).edges)


@MANY
@given(PLANS, st.integers(1, 40))
def test_traffic_equals_the_live_rows_of_each_consumer_rank(case: Case, tokens: int) -> None:
    """The number of bytes does not depend on the producer."""
    wanted_request = request(tokens, {}, {})
    expected = Counter[kvspec.RankId]()
    for target in targets(case.consumer, case.producer):
        part, spec = target.part, target.group.spec.of_layer(target.layer)
        live = live_positions(spec, wanted_request)
        live = live & owns(case.consumer, target.rank, part, target.group, tokens)
        tokens_per_row = part.tokens_per_state
        rows = (
            len({token // tokens_per_row for token in live.nonzero()[0].tolist()})
            if tokens_per_row
            else part.states
        )
        units = len(rank_units(case.consumer, target.rank, part, target.group))
        expected[target.rank] += units * rows * part.content_bytes
    counted = Counter[kvspec.RankId]()
    for rank, load in kvspec.traffic(plan_of(case), tokens).consumers.items():
        counted[rank] += load.nbytes
    assert +expected == +counted


def test_plan_between_unequal_explicit_shardings() -> None:
    """Five heads: the producer holds 2 + 2 + 1, and the consumer holds 3 + 2."""
    shardings = (range(2), range(2, 4), range(4, 5)), (range(3), range(3, 5))
    sides = [engine(gqa(5), tp=len(own), shardings={5: own}) for own in shardings]
    plan = kvspec.plan_transfer(*sides)
    moves = [
        (
            edge.producer.tp,
            edge.consumer.tp,
            tp_slice.global_range,
            tp_slice.local_range,
            tp_slice.remote_range,
        )
        for edge in plan.edges
        for tp_slice in edge.slices
    ]
    assert sorted(moves, key=str) == [
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
def test_meet_returns_whether_two_contexts_own_a_common_position(
    first: BlockCyclic, second: BlockCyclic
) -> None:
    """The test looks at every position of the common period."""
    period = np.arange(first.size * first.interleave * second.size * second.interleave)
    both = [
        positions // own.interleave % own.size == own.rank
        for own in (first, second)
        for positions in (period,)
    ]
    assert bool((both[0] & both[1]).any()) == meet(first, second)


def test_meet_needs_no_array_for_long_interleaves() -> None:
    """The common period has 2e12 positions, so an array of it would not fit into memory."""
    assert meet(BlockCyclic(0, 2, 2**20), BlockCyclic(1, 3, 3**12))
    assert meet(BlockCyclic(0, 2, 2**40), BlockCyclic(2, 3, 3**30))
    assert not meet(BlockCyclic(0, 2, 2**40), BlockCyclic(3, 4, 2**40))
