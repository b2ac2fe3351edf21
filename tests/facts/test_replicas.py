"""Who is read of equal producer ranks, where nodes count; and what no replica policy can be."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest
from builders import sides
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec import RankId, ReplicaPolicy, Topology
from kvspec.ownership.replicas import POLICIES, ReplicaPolicyName
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.stripes import Stripe

MLA = kvspec.MLAAttentionSpec(block_size=16, head_size=8, dtype="bfloat16")


def nodes(*names: str) -> dict[RankId, str]:
    """Return the node of each TP rank."""
    return {RankId(tp=rank): name for rank, name in enumerate(names)}


def reads(producer: str, consumer: str, salt: int = 0) -> list[int]:
    """Return whom each consumer rank reads by ``nearest``; a letter is a rank's node."""
    topology = Topology(producer=nodes(*producer), consumer=nodes(*consumer))
    engines = sides(MLA, len(producer), len(consumer))
    plan = kvspec.plan_transfer(*engines, ReplicaPolicy("nearest", salt, topology))
    return [plan.sources(rank)[0].tp for rank in plan.consumer.parallel.ranks]


@pytest.mark.parametrize(
    ("producer", "consumer", "salt", "wanted"),
    [
        ("aabb", "ab", 0, [0, 2]),  # each its own node
        ("aabb", "aabb", 0, [0, 1, 2, 3]),  # spread within the node
        ("aabb", "aaab", 0, [0, 0, 1, 2]),
        ("aabb", "bbbb", 0, [2, 2, 3, 3]),  # nobody reads node a
        ("aabb", "bbbb", 1, [3, 3, 2, 2]),  # the salt turns within the node
        ("aabb", "cccc", 0, [0, 1, 2, 3]),  # on no member's node: as by spread
        ("aabb", "cacb", 0, [0, 0, 2, 2]),  # the two strangers are spread among all
        ("aa", "ab", 0, [0, 1]),  # who has the same candidates chooses with the others
    ],
)
def test_the_nearest_is_read(producer: str, consumer: str, salt: int, wanted: list[int]) -> None:
    """One on the consumer's own node, if there is any; else by spread."""
    assert wanted == reads(producer, consumer, salt)


@given(
    st.text("abc", min_size=1, max_size=9),
    st.text("abcd", min_size=1, max_size=9),
    st.integers(0, 5),
)
def test_nothing_crosses_a_node_that_need_not(producer: str, consumer: str, salt: int) -> None:
    """A consumer leaves its node only if none there has the bytes; each node is read evenly."""
    sources = reads(producer, consumer, salt)
    for reader, source in enumerate(sources):
        assert producer[source] == consumer[reader] or consumer[reader] not in producer
    for node in set(producer):
        members = [rank for rank, name in enumerate(producer) if name == node]
        load = Counter(dict.fromkeys(members, 0))
        load.update(s for r, s in enumerate(sources) if consumer[r] == node)
        assert max(load.values()) - min(load.values()) <= 1


def test_specs_and_plans_choose_alike() -> None:
    """A spec's slices, of either role, are the plan's edges."""
    topology = Topology(producer=nodes(*"aabb"), consumer=nodes(*"bab"))
    replica_policy = ReplicaPolicy("nearest", 0, topology)
    plan = kvspec.plan_transfer(*sides(MLA, 4, 3), replica_policy)
    planned = {(edge.producer.tp, edge.consumer.tp) for edge in plan.edges}
    pulled = {
        (one.remote_rank, rank)
        for rank in range(3)
        for one in MLA.get_tp_transfer_slices(rank, 3, 4, "consumer", replica_policy)
    }
    pushed = {
        (rank, one.remote_rank)
        for rank in range(4)
        for one in MLA.get_tp_transfer_slices(rank, 4, 3, "producer", replica_policy)
    }
    assert planned == pulled == pushed
    assert "replicas by 'nearest'" in kvspec.explain(plan)


def test_one_table_names_every_policy() -> None:
    """The type of a policy's name and the table of policies say the same."""
    assert get_args(ReplicaPolicyName) == tuple(POLICIES)


def test_packed_nodes() -> None:
    """Three ranks a node: both engines begin on the first."""
    found = Topology.packed(*(each.parallel for each in sides(MLA, 4, 2)), 3)
    assert [0, 0, 0, 1] == list(found.producer.values())
    assert [0, 0] == list(found.consumer.values())


TWO = Topology(producer=nodes("a", "b"), consumer=nodes("a"))
BAD = [
    (lambda: ReplicaPolicy("nearest"), "topology=None: expected a Topology, for 'nearest'"),
    (
        lambda: ReplicaPolicy("best"),
        "replica_policy='best': expected one of spread, first, stripe, nearest",
    ),
    (
        lambda: ReplicaPolicy(["first"]),
        "replica_policy=['first']: expected one of spread, first, stripe, nearest",
    ),
    *(
        (lambda s=salt: ReplicaPolicy("first", s), f"salt={salt!r}: expected an int >= 0")
        for salt in ("x", 1.5, True, -1, ["l"])
    ),
    (lambda: ReplicaPolicy("first", 0, {}), "topology={}: expected a Topology"),
    (
        lambda: Topology(producer=[], consumer={}),
        "topology=[]: expected a mapping from RankId to the node that it is on",
    ),
    (
        lambda: kvspec.plan_transfer(*sides(MLA, 3, 1), ReplicaPolicy("nearest", 0, TWO)),
        "topology.producer={RankId(pp=0, pcp=0, tp=0): 'a', RankId(pp=0, pcp=0, tp=1): 'b'}: expect",
    ),
    (
        lambda: kvspec.plan_transfer(*sides(MLA, 1, 1), ReplicaPolicy("spread", 0, TWO)),
        "topology.producer=RankId(pp=0, pcp=0, tp=1): expected ranks of the engine",
    ),
    (
        lambda: kvspec.plan_transfer(*sides(MLA, 2, 1), None),
        "replica_policy=None: expected one of",
    ),
    (
        lambda: Topology.packed(*(each.parallel for each in sides(MLA, 1, 1)), 0),
        "ranks_per_node=0:",
    ),
    (lambda: Stripe(2, 2), "stripe.first=2: expected less than step=2"),
    (lambda: Stripe(0, 0), "stripe.step=0: expected an int >= 1"),
    (
        lambda: TPTransferSlice(0, ("k",), range(1), range(1), range(1), (), (0, 1)),
        "stripe=(0, 1): expected a Stripe",
    ),
]


@pytest.mark.parametrize(("make", "words"), BAD)
def test_what_is_no_replica_policy_is_refused(make: Any, words: str) -> None:
    """Each names the field, the value and what was wanted."""
    with pytest.raises(kvspec.SpecError) as error:
        make()
    assert str(error.value).startswith(words)


def test_a_stripe_of_too_many_pairs_is_refused_by_name() -> None:
    """1,009 replicas and 1,000 readers, each of whom would read all: a million edges."""
    spec = kvspec.FullAttentionSpec(block_size=16, total_num_kv_heads=1, head_size=2, dtype="uint8")
    group = kvspec.KVCacheGroup(name="g", layers=("l",), spec=spec)
    producer, consumer = (
        kvspec.EngineSpec(groups=(group,), parallel=kvspec.ParallelConfig(tp_size=size))
        for size in (1009, 1000)
    )
    with pytest.raises(kvspec.SpecError) as caught:
        kvspec.plan_transfer(producer, consumer, "stripe")
    wanted = (
        "replica_policy='stripe': expected 'spread': 1000 readers would read 1009 of 1009 "
        "replicas each"
    )
    assert wanted == str(caught.value)
    assert 1000 == len(kvspec.plan_transfer(producer, consumer, "spread").edges)
