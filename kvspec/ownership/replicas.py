"""Which of several equal producer ranks is read.

Law: both engines choose the same one, from the two descriptions and the replica policy alone. A
policy only says among whom a consumer chooses; within that, consumers are spread evenly. POLICIES
is the one table of policies: whatever takes a policy takes those, and refuses any other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from math import gcd
from typing import Literal

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import Frozen, instance, mapping, positive_int
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.stripes import WHOLE, Stripe

Role = Literal["consumer", "producer"]
ReplicaPolicyName = Literal["spread", "first", "stripe", "nearest"]
"""The names of the policies."""

Nodes = tuple[Hashable, ...]
MAX_STRIPES = 2**17
"""Pairs of a reader and a replica of what one rank holds, of which each is an edge of the plan."""


@attrs.frozen
class ReplicaClass:
    """Equal producer ranks (*replicas*), and the consumer ranks that need what they hold.

    Both are indices of ranks, ascending.
    """

    replicas: tuple[int, ...]
    consumers: tuple[int, ...]


def _nearest(
    reader: int, replica_class: ReplicaClass, nodes: tuple[Nodes, Nodes]
) -> tuple[int, ...]:
    """Choose among the replicas on the reader's node; where there is none, among all."""
    producer, consumer = nodes
    near = tuple(
        replica for replica in replica_class.replicas if producer[replica] == consumer[reader]
    )
    return near or replica_class.replicas


Candidates = Callable[[int, ReplicaClass, tuple[Nodes, Nodes]], tuple[int, ...]]


@attrs.frozen
class PolicyRule:
    """How one policy chooses.

    *candidates*: from a reader, its whole class and the nodes of both sides' ranks, the replicas
    among which it chooses; None for all of them. Readers with the same candidates choose together,
    so that none of those is read more often than another by more than one. *striped*: each reads
    all candidates, by turns of blocks. *topology*: whether the nodes have to be known.
    """

    candidates: Candidates | None = None
    striped: bool = False
    topology: bool = False


POLICIES: dict[ReplicaPolicyName, PolicyRule] = {
    "spread": PolicyRule(),
    "first": PolicyRule(lambda _reader, replica_class, _nodes: replica_class.replicas[:1]),
    "stripe": PolicyRule(striped=True),
    "nearest": PolicyRule(_nearest, topology=True),
}
"""Every policy by name."""


def known_policies(topology: Topology | None) -> tuple[ReplicaPolicyName, ...]:
    """Return the policies that can be had, in order: those that need no *topology*, or all."""
    return tuple(
        name for name, policy in POLICIES.items() if topology is not None or not policy.topology
    )


def _by_rank(value: object) -> Mapping[RankId, Hashable]:
    return Frozen(mapping("topology", value, "RankId to the node that it is on"))


@attrs.frozen(kw_only=True)
class Topology:
    """The node (any name or number) on which each rank of the *producer* and the *consumer* is."""

    producer: Mapping[RankId, Hashable] = attrs.field(converter=_by_rank)
    consumer: Mapping[RankId, Hashable] = attrs.field(converter=_by_rank)

    @staticmethod
    def packed(producer: ParallelConfig, consumer: ParallelConfig, ranks_per_node: int) -> Topology:
        """Return two engines on the same nodes, each engine's ranks filling them in order."""
        positive_int("ranks_per_node", ranks_per_node)
        sides = (
            {rank: number // ranks_per_node for number, rank in enumerate(side.ranks)}
            for side in (producer, consumer)
        )
        return Topology(producer=next(sides), consumer=next(sides))


def _nodes(side: Role, node_of: Mapping[RankId, Hashable], ranks: tuple[RankId, ...]) -> Nodes:
    """Return the node of each of *ranks*, which must be all ranks of *node_of*."""
    missing = [str(rank) for rank in ranks if rank not in node_of]
    if missing:
        wanted = f"a node for each rank, {', '.join(missing[:3])} too"
        raise SpecError(f"topology.{side}", dict(node_of), wanted)
    if len(node_of) > len(ranks):
        unknown = next(rank for rank in node_of if rank not in set(ranks))
        raise SpecError(f"topology.{side}", unknown, "ranks of the engine")
    return tuple(node_of[rank] for rank in ranks)


def _policy(_: object, _at: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str) or value not in POLICIES:
        raise SpecError("replica_policy", value, f"one of {', '.join(POLICIES)}")


@attrs.frozen(cache_hash=True)
class ReplicaPolicy:
    """How one of several equal producer ranks is chosen; both engines must use the same.

    *name* is the policy's: ``spread`` spreads consumers evenly, ``first`` takes the first,
    ``stripe`` reads all by turns of blocks, ``nearest`` takes one on the consumer's own node, if
    any. *salt* rotates the choice among equals, for many consumer engines. *topology*: the nodes,
    which ``nearest`` needs.
    """

    name: ReplicaPolicyName = attrs.field(default="spread", validator=_policy)
    salt: int = 0
    topology: Topology | None = None

    def __attrs_post_init__(self) -> None:
        positive_int("salt", self.salt, least=0)
        if self.topology is not None:
            instance("topology", self.topology, Topology)
        elif POLICIES[self.name].topology:
            raise SpecError("topology", None, f"a Topology, for {self.name!r}")

    @staticmethod
    def of(replica_policy: ReplicaPolicyName | ReplicaPolicy) -> ReplicaPolicy:
        """Return a replica policy, which may be described by its name alone."""
        if isinstance(replica_policy, str):
            return _cached_policy(replica_policy)
        if not isinstance(replica_policy, ReplicaPolicy):
            return ReplicaPolicy(replica_policy)
        return replica_policy

    def between(self, producer: tuple[RankId, ...], consumer: tuple[RankId, ...]) -> ReplicaChooser:
        """Return the replica policy between these ranks, which are indices from now on."""
        nodes: tuple[Nodes, Nodes] = ((), ())
        if self.topology is not None:
            nodes = (
                _nodes("producer", self.topology.producer, producer),
                _nodes("consumer", self.topology.consumer, consumer),
            )
        return ReplicaChooser(POLICIES[self.name], self.salt, nodes)


_cached_policy = lru_cache(maxsize=1024, typed=True)(ReplicaPolicy)


@attrs.frozen(eq=False)
class ReplicaChooser:
    """A replica policy between the ranks of two engines, by their indices."""

    policy: PolicyRule
    salt: int
    nodes: tuple[Nodes, Nodes]
    _together: dict[ReplicaClass, dict[int, ReplicaClass]] = attrs.field(init=False, factory=dict)

    def choose(
        self, reader: int, replica_class: ReplicaClass
    ) -> tuple[ReplicaClass, tuple[tuple[int, Stripe], ...]]:
        """Return among whom *reader* chooses, and the replicas that it reads, each with its stripe.

        With M replicas and C readers among whom it is number i, it reads replica ``i M // C +
        salt``, counted around; striped, block b from replica ``b C + i + salt``.

        ========  ==================  ============================
        blocks    M = 2, C = 3        M = 4, C = 2, striped
        ========  ==================  ============================
        reader 0  replica 0            replicas 0, 2, 0, 2 ...
        reader 1  replica 0            replicas 1, 3, 1, 3 ...
        reader 2  replica 1
        ========  ==================  ============================
        """
        among = self._among(reader, replica_class)
        number, consumers, replicas = (
            among.consumers.index(reader),
            len(among.consumers),
            among.replicas,
        )
        if not self.policy.striped or len(replicas) == 1:
            place = (number * len(replicas) // consumers + self.salt) % len(replicas)
            return among, ((replicas[place], WHOLE),)
        step = len(replicas) // gcd(consumers, len(replicas))
        if step * consumers > MAX_STRIPES:
            told = (
                f"'spread': {consumers} readers would read {step} of {len(replicas)} replicas each"
            )
            raise SpecError("replica_policy", "stripe", told)
        return among, tuple(
            (
                replicas[(block * consumers + number + self.salt) % len(replicas)],
                Stripe(block, step),
            )
            for block in range(step)
        )

    def _among(self, reader: int, replica_class: ReplicaClass) -> ReplicaClass:
        """Return the candidates of *reader*, and the readers that have the same ones."""
        if self.policy.candidates is None:
            return replica_class
        if replica_class not in self._together:
            candidates = {
                r: self.policy.candidates(r, replica_class, self.nodes)
                for r in replica_class.consumers
            }
            consumers: dict[tuple[int, ...], list[int]] = {}
            for one, replicas in candidates.items():
                consumers.setdefault(replicas, []).append(one)
            same = {
                replicas: ReplicaClass(replicas, tuple(ranks))
                for replicas, ranks in consumers.items()
            }
            self._together[replica_class] = {
                one: same[replicas] for one, replicas in candidates.items()
            }
        return self._together[replica_class][reader]


@lru_cache(maxsize=1024, typed=True)
def tp_chooser(replica_policy: ReplicaPolicy, producer_tp: int, consumer_tp: int) -> ReplicaChooser:
    """Return the replica policy between engines of TP ranks alone."""
    sides = (tuple(RankId(tp=rank) for rank in range(size)) for size in (producer_tp, consumer_tp))
    return replica_policy.between(*sides)
