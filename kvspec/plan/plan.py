"""Plan a transfer: which ranks exchange which units, and which ranks send notifications.

Invariant: both engines compute the same plan from the two descriptions alone. So a consumer that
reads and a producer that writes use the same edges. A plan whose edges do not fill each of its
replica groups exactly once cannot be created.

How it works:
    `plan_transfer` has four steps:

        step                            module
        1. compare the descriptions     `mismatches`
        2. find the replica groups      `replica_groups`
        3. derive the edges             `edges`
        4. check the exact cover        `cover`

    A plan also decides the notifications. A producer rank frees the blocks of a request after all
    its *notifiers* have sent a notification. These are the consumer ranks that read it. A replica
    that no consumer rank reads must free its blocks too, so one consumer rank notifies it. With 4
    heads, producer TP 8 and consumer TP 2, the policy `spread` reads tp0, tp2, tp4 and tp6:

        producer rank     tp0   tp1   tp2   tp3   tp4   tp5   tp6   tp7
        is read by        tp0         tp0         tp1         tp1
        is notified by    tp0   tp0   tp0   tp0   tp1   tp1   tp1   tp1
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from importlib import import_module

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.errors import MismatchError, SpecError
from kvspec.inputs import flag, instance
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import ReplicaPolicy, ReplicaPolicyName
from kvspec.plan.cover import check_cover, check_whole
from kvspec.plan.edges import Edge, edges_of
from kvspec.plan.mismatches import mismatches
from kvspec.plan.replica_groups import GroupPair, ReplicaGroup, group_pairs, replica_groups_of
from kvspec.specs.state import is_of_common_rows


@attrs.frozen(kw_only=True)
class TransferPlan:
    """The edges and notifications between all ranks of two engines. Made by `plan_transfer`.

    Attributes:
        producer: The engine that computes the cache.
        consumer: The engine that reads it.
        replica_policy: The policy that chooses among producer ranks with the same content.
        pairs: The pairs of groups that share layers.
        replica_groups: The cache, divided by layers, parts and tokens of the producer. Within one
            replica group, producer ranks differ only in their units.
        edges: The units that each producer rank sends to each consumer rank.

    >>> import kvspec
    >>> spec = kvspec.FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=8, head_size=64, dtype="bfloat16"
    ... )
    >>> group = kvspec.KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group])
    >>> plan = kvspec.plan_transfer(engine, engine)
    >>> [str(rank) for rank in plan.sources(kvspec.RankId())]
    ['tp0']
    """

    producer: EngineSpec
    consumer: EngineSpec
    replica_policy: ReplicaPolicy
    pairs: tuple[GroupPair, ...] = attrs.field(hash=False)
    replica_groups: tuple[ReplicaGroup, ...] = attrs.field(repr=False, eq=False)
    edges: tuple[Edge, ...] = attrs.field(hash=False)

    def __attrs_post_init__(self) -> None:
        check_cover(self.producer, self.consumer, self.replica_groups, self.edges)

    def _repr_svg_(self) -> str:
        """Return the picture of the plan, which notebooks display. `kvspec.draw` imports plans."""
        svg: str = import_module("kvspec.draw").plan_svg(self)
        return svg

    @property
    def policy_name(self) -> ReplicaPolicyName:
        """Name of the policy that chooses among producer ranks with the same content."""
        return self.replica_policy.name

    @property
    def salt(self) -> int:
        """The number that rotates the choice among producer ranks with the same content."""
        return self.replica_policy.salt

    @cached_property
    def _by_pair(self) -> dict[tuple[RankId, RankId], tuple[Edge, ...]]:
        by_pair: dict[tuple[RankId, RankId], list[Edge]] = {}
        for edge in self.edges:
            by_pair.setdefault((edge.producer, edge.consumer), []).append(edge)
        return {pair: tuple(edges) for pair, edges in by_pair.items()}

    @cached_property
    def _pairs(self) -> dict[tuple[str, str], GroupPair]:
        return {(pair.producer.name, pair.consumer.name): pair for pair in self.pairs}

    def pair_of(self, edge: Edge) -> GroupPair:
        """Return the pair of groups that *edge* belongs to.

        Args:
            edge: An edge of this plan.

        Raises:
            SpecError: If *edge* is not an edge of this plan.
        """
        instance("edge", edge, Edge)
        pair = self._pairs.get((edge.producer_group, edge.group))
        if pair is None:
            raise SpecError("edge", edge, "an edge of this plan")
        return pair

    def between(self, producer: RankId, consumer: RankId) -> tuple[Edge, ...]:
        """Return the edges between two ranks, one for each pair of groups.

        Args:
            producer: A rank of the producer.
            consumer: A rank of the consumer.

        Raises:
            SpecError: If an engine does not have the rank.
        """
        self.producer.parallel.check_rank(producer, "producer")
        self.consumer.parallel.check_rank(consumer, "consumer")
        return self._by_pair.get((producer, consumer), ())

    def sources(self, consumer: RankId) -> tuple[RankId, ...]:
        """Return the producer ranks that the rank *consumer* reads, in ascending order."""
        self.consumer.parallel.check_rank(consumer, "consumer")
        return self._sources.get(consumer, ())

    def targets(self, producer: RankId) -> tuple[RankId, ...]:
        """Return the consumer ranks that read the rank *producer*, in ascending order."""
        self.producer.parallel.check_rank(producer, "producer")
        return self._targets.get(producer, ())

    @cached_property
    def _sources(self) -> dict[RankId, tuple[RankId, ...]]:
        return _by_first((consumer, producer) for producer, consumer in self._by_pair)

    @cached_property
    def _targets(self) -> dict[RankId, tuple[RankId, ...]]:
        return _by_first(self._by_pair)

    @cached_property
    def _notifiers(self) -> dict[RankId, tuple[RankId, ...]]:
        return {
            rank: self._targets.get(rank) or self._notifiers_of_unread(index)
            for index, rank in enumerate(self.producer.parallel.ranks)
        }

    @cached_property
    def _notifies(self) -> dict[RankId, tuple[RankId, ...]]:
        return _by_first(
            (notifier, rank)
            for rank, notifiers in self._notifiers.items()
            for notifier in notifiers
        )

    def _notifiers_of_unread(self, at: int) -> tuple[RankId, ...]:
        """Return the consumer ranks that notify the unread producer rank at index *at*.

        One consumer rank is enough. It needs some of the units that the producer rank holds in one
        replica group, the first such group. If the producer rank holds no units in any replica
        group, all consumer ranks notify it.
        """
        ranks = self.consumer.parallel.ranks
        for replica_group in self.replica_groups:
            units = replica_group.producer_sharding.ranges[at]
            readers = replica_group.consumer_sharding.ranks_of(units)
            if readers:
                members = replica_group.producer_sharding.ranks_of(units)
                # Replica n is notified by the reader at the same relative place. This spreads the
                # notifications over the readers.
                return (ranks[readers[members.index(at) * len(readers) // len(members)]],)
        return ranks

    def notifiers(self, producer: RankId) -> tuple[RankId, ...]:
        """Return the consumer ranks whose notifications the rank *producer* must wait for.

        The rank may release the blocks of a request after all of them have notified it. They are
        the consumer ranks that read it, even if a request moves no byte. A rank that no consumer
        rank reads is notified by one chosen consumer rank.
        """
        self.producer.parallel.check_rank(producer, "producer")
        return self._notifiers[producer]

    def notifies(self, consumer: RankId) -> tuple[RankId, ...]:
        """Return the producer ranks that the rank *consumer* notifies after a request."""
        self.consumer.parallel.check_rank(consumer, "consumer")
        return self._notifies.get(consumer, ())

    @property
    def finished_sending_count(self) -> int:
        """Number of producer ranks that report a request as sent."""
        return len(self.producer.parallel.ranks)

    @property
    def finished_recving_count(self) -> int:
        """Number of consumer ranks that report a request as received."""
        return len(self.consumer.parallel.ranks)


def _by_first(pairs: Iterable[tuple[RankId, RankId]]) -> dict[RankId, tuple[RankId, ...]]:
    """Map the first rank of each pair to the sorted second ranks."""
    seconds: dict[RankId, list[RankId]] = {}
    for first, second in pairs:
        seconds.setdefault(first, []).append(second)
    return {first: tuple(sorted(ranks)) for first, ranks in seconds.items()}


def plan_transfer(
    producer: EngineSpec,
    consumer: EngineSpec,
    replica_policy: ReplicaPolicyName | ReplicaPolicy = "spread",
    *,
    common_states: bool = False,
) -> TransferPlan:
    """Plan the transfer of any request from *producer* to *consumer*.

    Args:
        producer: The engine that computes the cache.
        consumer: The engine that reads it.
        replica_policy: How to choose among producer ranks with the same content: the name of a
            policy or a `ReplicaPolicy`. Both engines must use the same policy.
        common_states: Whether conv states may have more rows on one side, because of speculative
            tokens. The rows that both sides have are moved. By default, a different
            number of rows is a mismatch.

    Returns:
        The plan. It is the same on every rank of both engines.

    Raises:
        MismatchError: If the engines do not fit together. It lists all differences.
        SpecError: If an argument has the wrong type or *replica_policy* is unknown.

    >>> from kvspec import EngineSpec, FullAttentionSpec, KVCacheGroup, ParallelConfig, RankId
    >>> spec = FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=4, head_size=128, dtype="bfloat16")
    >>> group = KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    >>> producer, consumer = (
    ...     EngineSpec(groups=[group], parallel=ParallelConfig(tp_size=size)) for size in (8, 2))
    >>> plan = plan_transfer(producer, consumer)
    >>> [str(rank) for rank in plan.sources(RankId(tp=1))]
    ['tp4', 'tp6']
    >>> [str(rank) for rank in plan.notifies(RankId(tp=1))]
    ['tp4', 'tp5', 'tp6', 'tp7']
    """
    for field, engine in (("producer", producer), ("consumer", consumer)):
        instance(field, engine, EngineSpec)
    replica_policy = ReplicaPolicy.of(replica_policy)
    flag("common_states", common_states)
    found = mismatches(producer, consumer)
    if common_states:
        # `replica_groups` reduces the spec of each state to the rows that both sides have.
        found = tuple(mismatch for mismatch in found if not is_of_common_rows(mismatch.field))
    if found:
        raise MismatchError(found)
    pairs = tuple(group_pairs(producer, consumer))
    replica_groups = tuple(
        replica_group
        for pair in pairs
        for replica_group in replica_groups_of(producer, consumer, pair)
    )
    edges = tuple(edges_of(producer, consumer, replica_groups, replica_policy))
    plan = TransferPlan(
        producer=producer,
        consumer=consumer,
        replica_policy=replica_policy,
        pairs=pairs,
        replica_groups=replica_groups,
        edges=edges,
    )
    check_whole(replica_groups)
    return plan
