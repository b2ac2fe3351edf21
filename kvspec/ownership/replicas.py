"""Replica policies: which of several equal producer ranks a consumer rank reads.

Invariant: both engines compute the same choice from the two descriptions and the policy, without a
message. `POLICIES` is the only table of policies.

How it works:
    If TP is larger than the number of KV heads, several producer ranks own the same heads. They are
    *replicas*. The policies, for one head on producer ranks 0 to 3 and consumer ranks 0 to 2:

    policy     consumer 0  consumer 1  consumer 2  use
    ---------  ----------  ----------  ----------  -----------------------------------------------
    `spread`   0           1           2           the default: replicas are read equally often
    `first`    0           0           0           other replicas stay free for other work
    `stripe`   all         all         all         each consumer reads from all links in turns
    `nearest`  same node   same node   same node   no traffic between nodes, if that is possible

    A policy works in two steps. First it selects the candidates of each consumer: all replicas, the
    first one, or those on the node of the consumer. Then the consumers that have equal candidates
    are spread over them evenly (`ReplicaChooser.choose`).

        >>> from kvspec import MLAAttentionSpec
        >>> latent = MLAAttentionSpec(block_size=16, head_size=576, dtype="bfloat16")
        >>> for policy in ("spread", "first", ReplicaPolicy("spread", salt=1)):
        ...     slices = [
        ...         latent.get_tp_transfer_slices(rank, 3, 4, replica_policy=policy)
        ...         for rank in range(3)]
        ...     print([only.remote_rank for (only,) in slices])
        [0, 1, 2]
        [0, 0, 0]
        [1, 2, 3]
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

# The node of each rank of one side, by the index of the rank.
Nodes = tuple[Hashable, ...]

# Each pair of a reader and a replica is an edge of the plan. Under `stripe`, their number grows
# with the product of the two sides, and more than this many would make planning too slow.
MAX_STRIPES = 2**17


@attrs.frozen
class ReplicaClass:
    """Producer ranks that own the same units, and the consumer ranks that need any of these units.

    Attributes:
        replicas: Indices of the producer ranks, in ascending order.
        consumers: Indices of the consumer ranks, in ascending order.
    """

    replicas: tuple[int, ...]
    consumers: tuple[int, ...]


def _nearest(
    reader: int, replica_class: ReplicaClass, nodes: tuple[Nodes, Nodes]
) -> tuple[int, ...]:
    """Return the replicas on the node of the reader, or all replicas if none is on that node."""
    producer, consumer = nodes
    near = tuple(
        replica for replica in replica_class.replicas if producer[replica] == consumer[reader]
    )
    return near or replica_class.replicas


# A function of a reader, its replica class and the nodes of both sides, which returns the replicas
# among which the reader chooses.
Candidates = Callable[[int, ReplicaClass, tuple[Nodes, Nodes]], tuple[int, ...]]


@attrs.frozen
class PolicyRule:
    """The definition of one policy.

    Attributes:
        candidates: Function that returns the candidates of a reader, or None for all replicas.
            Readers with equal candidates are spread together: the numbers of readers of two
            candidates differ by at most one.
        striped: Whether each reader reads all its candidates in turns of blocks.
        needs_topology: Whether the policy needs the nodes of the ranks.
    """

    candidates: Candidates | None = None
    striped: bool = False
    needs_topology: bool = False


POLICIES: dict[ReplicaPolicyName, PolicyRule] = {
    "spread": PolicyRule(),
    "first": PolicyRule(lambda _reader, replica_class, _nodes: replica_class.replicas[:1]),
    "stripe": PolicyRule(striped=True),
    "nearest": PolicyRule(_nearest, needs_topology=True),
}


def known_policies(topology: Topology | None) -> tuple[ReplicaPolicyName, ...]:
    """Return the names of the policies that work with *topology*, which may be None.

    >>> known_policies(None)
    ('spread', 'first', 'stripe')
    """
    return tuple(
        name
        for name, policy in POLICIES.items()
        if topology is not None or not policy.needs_topology
    )


def _by_rank(value: object) -> Mapping[RankId, Hashable]:
    return Frozen(mapping("topology", value, "RankId to the node that it is on"))


@attrs.frozen(kw_only=True)
class Topology:
    """The node of each rank of both engines.

    A node is any hashable value, such as a host name. Two ranks with equal nodes have the cheapest
    connection, for example NVLink.

    Attributes:
        producer: Node of each producer rank.
        consumer: Node of each consumer rank.

    >>> from kvspec import RankId
    >>> nodes = {RankId(tp=0): "host-a", RankId(tp=1): "host-b"}
    >>> topology = Topology(producer=nodes, consumer=nodes)
    >>> ReplicaPolicy("nearest", topology=topology).name
    'nearest'
    """

    producer: Mapping[RankId, Hashable] = attrs.field(converter=_by_rank)
    consumer: Mapping[RankId, Hashable] = attrs.field(converter=_by_rank)

    @staticmethod
    def packed(producer: ParallelConfig, consumer: ParallelConfig, ranks_per_node: int) -> Topology:
        """Return the topology of two engines that both fill the same nodes in order.

        Args:
            producer: Parallel sizes of the producer.
            consumer: Parallel sizes of the consumer.
            ranks_per_node: Ranks of one engine on one node, usually its number of GPUs.

        Returns:
            A topology with nodes 0, 1 and so on.

        >>> two = ParallelConfig(tp_size=2)
        >>> list(Topology.packed(two, two, ranks_per_node=1).consumer.values())
        [0, 1]
        """
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
        requirement = f"a node for each rank, also for {', '.join(missing[:3])}"
        raise SpecError(f"topology.{side}", dict(node_of), requirement)
    # Every rank has a node, so a longer mapping contains ranks that the engine does not have.
    if len(node_of) > len(ranks):
        unknown = next(rank for rank in node_of if rank not in set(ranks))
        raise SpecError(f"topology.{side}", unknown, "ranks of the engine")
    return tuple(node_of[rank] for rank in ranks)


def _policy(_: object, _at: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str) or value not in POLICIES:
        raise SpecError("replica_policy", value, f"one of {', '.join(POLICIES)}")


@attrs.frozen(cache_hash=True)
class ReplicaPolicy:
    """How a consumer rank chooses one of several equal producer ranks.

    Both engines must use equal policies. The handshake compares them.

    Attributes:
        name: `spread` divides consumer ranks evenly among replicas. `first` chooses the first
            replica. `stripe` reads all replicas in turns of blocks. `nearest` prefers replicas on
            the node of the consumer rank.
        salt: Rotates the choice among replicas. If many consumer engines read one producer, give
            each engine another salt, so that they do not all read the same replica.
        topology: Nodes of the ranks. `nearest` requires it.

    >>> ReplicaPolicy("spread", salt=2)
    ReplicaPolicy(name='spread', salt=2, topology=None)
    """

    name: ReplicaPolicyName = attrs.field(default="spread", validator=_policy)
    salt: int = 0
    topology: Topology | None = None

    def __attrs_post_init__(self) -> None:
        positive_int("salt", self.salt, least=0)
        if self.topology is not None:
            instance("topology", self.topology, Topology)
        elif POLICIES[self.name].needs_topology:
            raise SpecError("topology", None, f"a Topology, for {self.name!r}")

    @staticmethod
    def of(replica_policy: ReplicaPolicyName | ReplicaPolicy) -> ReplicaPolicy:
        """Return *replica_policy*, which may be only a name, as a `ReplicaPolicy`.

        >>> ReplicaPolicy.of("first")
        ReplicaPolicy(name='first', salt=0, topology=None)
        """
        if isinstance(replica_policy, str):
            return _cached_policy(replica_policy)
        if not isinstance(replica_policy, ReplicaPolicy):
            # This raises. The cached function cannot do it, because a list has no hash.
            return ReplicaPolicy(replica_policy)
        return replica_policy

    def between(self, producer: tuple[RankId, ...], consumer: tuple[RankId, ...]) -> ReplicaChooser:
        """Return the chooser between two engines. It uses the indices of the ranks."""
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
    """A replica policy, applied to the ranks of two engines.

    Attributes:
        policy: Definition of the policy.
        salt: Rotation of the choice.
        nodes: Node of each producer rank and of each consumer rank, or empty tuples.
    """

    policy: PolicyRule
    salt: int
    nodes: tuple[Nodes, Nodes]
    # For each replica class and each of its readers: the candidates of that reader, and all readers
    # with the same candidates. It is computed once, because each reader of the class needs it.
    _candidate_classes: dict[ReplicaClass, dict[int, ReplicaClass]] = attrs.field(
        init=False, factory=dict
    )

    def choose(
        self, reader: int, replica_class: ReplicaClass
    ) -> tuple[ReplicaClass, tuple[tuple[int, Stripe], ...]]:
        """Return the candidates of *reader*, and the replicas that it reads.

        With M candidates and C readers that have these candidates, reader number i reads replica
        `(i * M // C + salt) % M`. Under `stripe`, it reads block b from replica
        `(b * C + i + salt) % M`. For example, with salt 0:

        reader    M = 2, C = 3    M = 4, C = 2, striped
        0         replica 0       replicas 0, 2, 0, 2, ...
        1         replica 0       replicas 1, 3, 1, 3, ...
        2         replica 1

        Args:
            reader: Index of the consumer rank.
            replica_class: The replicas, and all consumer ranks that need their units.

        Returns:
            The class of the candidates, and pairs of a replica and the stripe of blocks that
            *reader* reads from it.

        Raises:
            SpecError: If `stripe` would make more than `MAX_STRIPES` pairs of ranks.
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
        # `block * consumers` modulo the number of replicas repeats after this many blocks.
        step = len(replicas) // gcd(consumers, len(replicas))
        if step * consumers > MAX_STRIPES:
            reading = f"{consumers} readers would read {step} of {len(replicas)} replicas each"
            raise SpecError("replica_policy", "stripe", f"'spread': {reading}")
        return among, tuple(
            (
                replicas[(block * consumers + number + self.salt) % len(replicas)],
                Stripe(block, step),
            )
            for block in range(step)
        )

    def _among(self, reader: int, replica_class: ReplicaClass) -> ReplicaClass:
        """Return the candidates of *reader*, and all readers that have the same candidates."""
        if self.policy.candidates is None:
            return replica_class
        if replica_class not in self._candidate_classes:
            candidates = {
                rank: self.policy.candidates(rank, replica_class, self.nodes)
                for rank in replica_class.consumers
            }
            readers: dict[tuple[int, ...], list[int]] = {}
            for rank, replicas in candidates.items():
                readers.setdefault(replicas, []).append(rank)
            classes = {
                replicas: ReplicaClass(replicas, tuple(ranks))
                for replicas, ranks in readers.items()
            }
            self._candidate_classes[replica_class] = {
                rank: classes[replicas] for rank, replicas in candidates.items()
            }
        return self._candidate_classes[replica_class][reader]


@lru_cache(maxsize=1024, typed=True)
def tp_chooser(replica_policy: ReplicaPolicy, producer_tp: int, consumer_tp: int) -> ReplicaChooser:
    """Return the chooser between two engines that have tensor parallelism only."""
    sides = (tuple(RankId(tp=rank) for rank in range(size)) for size in (producer_tp, consumer_tp))
    return replica_policy.between(*sides)
