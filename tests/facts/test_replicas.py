"""Test which replicas the consumer ranks read, and which replica policies are invalid."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest
from builders import engine, gqa, request, sides
from hypothesis import given
from hypothesis import strategies as st
from refused import refusal

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
    """Return the producer rank that each consumer rank reads by ``nearest``.

    Each letter is the node of one rank.
    """
    topology = Topology(producer=nodes(*producer), consumer=nodes(*consumer))
    engines = sides(MLA, len(producer), len(consumer))
    plan = kvspec.plan_transfer(*engines, ReplicaPolicy("nearest", salt, topology))
    return [plan.sources(rank)[0].tp for rank in plan.consumer.parallel.ranks]


@pytest.mark.parametrize(
    ("producer", "consumer", "salt", "sources"),
    [
        ("aabb", "ab", 0, [0, 2]),  # each consumer rank reads from its own node
        ("aabb", "aabb", 0, [0, 1, 2, 3]),  # spread over the replicas of the node
        ("aabb", "aaab", 0, [0, 0, 1, 2]),
        ("aabb", "bbbb", 0, [2, 2, 3, 3]),  # all consumer ranks are on node b
        ("aabb", "bbbb", 1, [3, 3, 2, 2]),  # the salt shifts the choice within the node
        ("aabb", "cccc", 0, [0, 1, 2, 3]),  # no replica on node c: as by spread
        ("aabb", "cacb", 0, [0, 0, 2, 2]),  # the two ranks on c are spread over all replicas
        ("aa", "ab", 0, [0, 1]),  # both consumer ranks share the replicas of node a
    ],
)
def test_nearest_reads_replica_on_own_node(
    producer: str, consumer: str, salt: int, sources: list[int]
) -> None:
    """If the node has no replica, the policy is that of `spread`."""
    assert sources == reads(producer, consumer, salt)


@given(
    st.text("abc", min_size=1, max_size=9),
    st.text("abcd", min_size=1, max_size=9),
    st.integers(0, 5),
)
def test_nearest_reads_own_node_evenly_if_it_has_replicas(
    producer: str, consumer: str, salt: int
) -> None:
    """The numbers of readers of two replicas on one node differ by at most one.

    If all replicas are on one node, the readers of all nodes count.
    """
    sources, one_node = reads(producer, consumer, salt), len(set(producer)) == 1
    for reader, source in enumerate(sources):
        assert producer[source] == consumer[reader] or consumer[reader] not in producer
    for node in set(producer):
        members = [rank for rank, name in enumerate(producer) if name == node]
        load = Counter(dict.fromkeys(members, 0))
        load.update(s for r, s in enumerate(sources) if one_node or consumer[r] == node)
        assert max(load.values()) - min(load.values()) <= 1


def sources(plan: kvspec.TransferPlan) -> list[str]:
    """Return the producer ranks that each consumer rank reads."""
    return [" ".join(map(str, plan.sources(rank))) for rank in plan.consumer.parallel.ranks]


def test_readers_of_different_heads_are_spread_over_replicas() -> None:
    """Both PCP ranks hold all four heads, and each consumer rank needs two of them."""
    producer = engine(gqa(4), pcp_size=2, context_ranks=((0,), (0,)))
    assert ["tp0", "pcp1.tp0"] == sources(kvspec.plan_transfer(producer, engine(gqa(4), tp=2)))


def test_readers_are_numbered_by_rank_and_not_by_head() -> None:
    """The consumer ranks own the heads in reverse order."""
    same, reverse = [range(3)] * 3, [range(head, head + 1) for head in (2, 1, 0)]
    engines = (engine(gqa(3), tp=3, shardings={3: ranges}) for ranges in (same, reverse))
    assert ["tp0", "tp1", "tp2"] == sources(kvspec.plan_transfer(*engines))


def test_stripe_of_state_counts_virtual_blocks_of_context_ranks() -> None:
    """Two context ranks with blocks of 2 have virtual blocks of 4, so token 4 is in block 1.

    Four replicas have two readers: reader i reads block 0 from replica i and block 1 from 2 + i.
    """
    spec = kvspec.MambaSpec.short_conv(conv_dim=2, conv_kernel=2, dtype="int8", block_size=2)
    producer = engine(spec, pcp_size=4, context_ranks=((0,),) * 4)
    plan = kvspec.plan_transfer(producer, engine(spec, tp=2, dcp_size=2), "stripe")
    caches = [
        {rank: kvspec.plan_memory(side, rank, 8, 1 << 20) for rank in side.parallel.ranks}
        for side in (plan.producer, plan.consumer)
    ]
    for tokens, first in ((3, 0), (4, 0), (5, 2)):
        asked = request(tokens, range(3), range(3))
        read = [
            (source.pcp, rank.tp)
            for source in plan.producer.parallel.ranks
            for rank in plan.consumer.parallel.ranks
            if len(kvspec.build_table(plan, caches[0][source], caches[1][rank]).descriptors(asked))
        ]
        assert [(first, 0), (first + 1, 1)] == read


def test_slices_of_spec_read_same_replicas_as_plan() -> None:
    """The slices of both roles are the edges of the plan, and `explain` names the policy."""
    topology = Topology(producer=nodes(*"aabb"), consumer=nodes(*"bab"))
    replica_policy = ReplicaPolicy("nearest", 0, topology)
    plan = kvspec.plan_transfer(*sides(MLA, 4, 3), replica_policy)
    planned = {(edge.producer.tp, edge.consumer.tp) for edge in plan.edges}
    pulled = {
        (slice_.remote_rank, rank)
        for rank in range(3)
        for slice_ in MLA.get_tp_transfer_slices(rank, 3, 4, "consumer", replica_policy)
    }
    pushed = {
        (rank, slice_.remote_rank)
        for rank in range(4)
        for slice_ in MLA.get_tp_transfer_slices(rank, 4, 3, "producer", replica_policy)
    }
    assert planned == pulled == pushed
    assert "'nearest'" in kvspec.explain(plan)


def test_policy_names_of_type_and_table_are_equal() -> None:
    """`ReplicaPolicyName` lists the keys of `POLICIES`."""
    assert get_args(ReplicaPolicyName) == tuple(POLICIES)


def test_packed_topology_fills_nodes_in_order() -> None:
    """A node has three ranks, and both engines begin on the first node."""
    topology = Topology.packed(*(side.parallel for side in sides(MLA, 4, 2)), 3)
    assert [0, 0, 0, 1] == list(topology.producer.values())
    assert [0, 0] == list(topology.consumer.values())


TWO = Topology(producer=nodes("a", "b"), consumer=nodes("a"))
INVALID = [
    (lambda: ReplicaPolicy("nearest"), "topology", None),
    (lambda: ReplicaPolicy("best"), "replica_policy", "best"),
    (lambda: ReplicaPolicy(["first"]), "replica_policy", ["first"]),
    *(
        (lambda salt=salt: ReplicaPolicy("first", salt), "salt", salt)
        for salt in ("x", 1.5, True, -1, ["l"])
    ),
    (lambda: ReplicaPolicy("first", 0, {}), "topology", {}),
    (lambda: Topology(producer=[], consumer={}), "topology", []),
    # The engine has three ranks, and the topology only two.
    (
        lambda: kvspec.plan_transfer(*sides(MLA, 3, 1), ReplicaPolicy("nearest", 0, TWO)),
        "topology.producer",
        nodes("a", "b"),
    ),
    # The engine has one rank.
    (
        lambda: kvspec.plan_transfer(*sides(MLA, 1, 1), ReplicaPolicy("spread", 0, TWO)),
        "topology.producer",
        RankId(tp=1),
    ),
    (lambda: kvspec.plan_transfer(*sides(MLA, 2, 1), None), "replica_policy", None),
    (
        lambda: Topology.packed(*(side.parallel for side in sides(MLA, 1, 1)), 0),
        "ranks_per_node",
        0,
    ),
    (lambda: Stripe(2, 2), "stripe.first", 2),
    (lambda: Stripe(0, 0), "stripe.step", 0),
    (
        lambda: TPTransferSlice(0, ("k",), range(1), range(1), range(1), (), (0, 1)),
        "stripe",
        (0, 1),
    ),
]


@pytest.mark.parametrize(("make", "field", "value"), INVALID)
def test_invalid_replica_policy_is_rejected(make: Any, field: str, value: object) -> None:
    """The error has the field and the value."""
    error = refusal(make)
    assert (field, value) == (error.field, error.value)


def test_stripe_of_too_many_pairs_is_rejected() -> None:
    """Each of 1000 consumer ranks would read all 1009 replicas: a million edges."""
    spec = kvspec.FullAttentionSpec(block_size=16, total_num_kv_heads=1, head_size=2, dtype="uint8")
    producer, consumer = sides(spec, 1009, 1000)
    error = refusal(lambda: kvspec.plan_transfer(producer, consumer, "stripe"))
    assert ("replica_policy", "stripe") == (error.field, error.value)
    assert "1009" in str(error)
    assert 1000 == len(kvspec.plan_transfer(producer, consumer, "spread").edges)
