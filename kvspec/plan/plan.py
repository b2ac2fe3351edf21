"""The transfer plan: every pair of ranks, what it exchanges, and who tells whom.

Law: both engines compute the same plan from the two descriptions alone, so pulling and pushing
are the same edges. Exact cover is checked where the plan is made: a plan that exists tiles every
part of every layer of every consumer rank exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

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


@attrs.frozen(kw_only=True)
class TransferPlan:
    """Who exchanges what, for every pair of ranks of two engines; see `plan_transfer`."""

    producer: EngineSpec
    consumer: EngineSpec
    replica_policy: ReplicaPolicy
    pairs: tuple[GroupPair, ...] = attrs.field(hash=False)
    replica_groups: tuple[ReplicaGroup, ...] = attrs.field(repr=False, eq=False)
    edges: tuple[Edge, ...] = attrs.field(hash=False)

    def __attrs_post_init__(self) -> None:
        check_cover(self.producer, self.consumer, self.replica_groups, self.edges)

    @property
    def policy_name(self) -> ReplicaPolicyName:
        """The policy by which one of several equal producer ranks is read."""
        return self.replica_policy.name

    @property
    def salt(self) -> int:
        """What rotates the choice among equal producer ranks."""
        return self.replica_policy.salt

    @cached_property
    def _by_pair(self) -> dict[tuple[RankId, RankId], tuple[Edge, ...]]:
        found: dict[tuple[RankId, RankId], list[Edge]] = {}
        for edge in self.edges:
            found.setdefault((edge.producer, edge.consumer), []).append(edge)
        return {pair: tuple(edges) for pair, edges in found.items()}

    @cached_property
    def _pairs(self) -> dict[tuple[str, str], GroupPair]:
        return {(pair.producer.name, pair.consumer.name): pair for pair in self.pairs}

    def pair_of(self, edge: Edge) -> GroupPair:
        """Return the groups between which *edge* is."""
        instance("edge", edge, Edge)
        found = self._pairs.get((edge.producer_group, edge.group))
        if found is None:
            raise SpecError("edge", edge, "an edge of this plan")
        return found

    def between(self, producer: RankId, consumer: RankId) -> tuple[Edge, ...]:
        """Return the edges of one pair of ranks, one for each pair of groups."""
        self.producer.parallel.check_rank(producer, "producer")
        self.consumer.parallel.check_rank(consumer, "consumer")
        return self._by_pair.get((producer, consumer), ())

    def sources(self, consumer: RankId) -> tuple[RankId, ...]:
        """Return the producer ranks that *consumer* reads, ascending."""
        self.consumer.parallel.check_rank(consumer, "consumer")
        return self._sources.get(consumer, ())

    def targets(self, producer: RankId) -> tuple[RankId, ...]:
        """Return the consumer ranks that read *producer*, ascending."""
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
            rank: self._targets.get(rank) or self._releasers(index)
            for index, rank in enumerate(self.producer.parallel.ranks)
        }

    @cached_property
    def _notifies(self) -> dict[RankId, tuple[RankId, ...]]:
        return _by_first((by, rank) for rank, told_by in self._notifiers.items() for by in told_by)

    def _releasers(self, at: int) -> tuple[RankId, ...]:
        """Choose who tells the producer rank at index *at*, which nobody reads.

        The first replica group of which it holds any units names it; a rank that holds nothing that
        moves is told by every consumer.
        """
        ranks = self.consumer.parallel.ranks
        for replica_group in self.replica_groups:
            units = replica_group.producer_sharding.ranges[at]
            readers = replica_group.consumer_sharding.ranks_of(units)
            if readers:
                members = replica_group.producer_sharding.ranks_of(units)
                return (ranks[readers[members.index(at) * len(readers) // len(members)]],)
        return ranks

    def notifiers(self, producer: RankId) -> tuple[RankId, ...]:
        """Return the consumer ranks that notify *producer* when it may release a request.

        They are its readers, also of requests that move no byte; of a rank that nobody reads, one
        chosen releaser.
        """
        self.producer.parallel.check_rank(producer, "producer")
        return self._notifiers[producer]

    def notifies(self, consumer: RankId) -> tuple[RankId, ...]:
        """Return the producer ranks that *consumer* notifies when it is done with a request."""
        self.consumer.parallel.check_rank(consumer, "consumer")
        return self._notifies.get(consumer, ())

    @property
    def finished_sending_count(self) -> int:
        """Producer ranks that report a request as sent."""
        return len(self.producer.parallel.ranks)

    @property
    def finished_recving_count(self) -> int:
        """Consumer ranks that report a request as received."""
        return len(self.consumer.parallel.ranks)


def _by_first(pairs: Iterable[tuple[RankId, RankId]]) -> dict[RankId, tuple[RankId, ...]]:
    """Return, by the first of each pair of ranks, the second ones, ascending."""
    seconds: dict[RankId, list[RankId]] = {}
    for first, second in pairs:
        seconds.setdefault(first, []).append(second)
    return {first: tuple(sorted(ranks)) for first, ranks in seconds.items()}


def plan_transfer(
    producer: EngineSpec,
    consumer: EngineSpec,
    replica_policy: ReplicaPolicyName | ReplicaPolicy = "spread",
    salt: int = 0,
    *,
    common_states: bool = False,
) -> TransferPlan:
    """Plan the transfer of any request from *producer* to *consumer*.

    *replica_policy*: which one of several equal producer ranks is read, by the name of a policy, to
    which *salt* belongs, or as a `ReplicaPolicy`; both engines must use the same. *common_states*:
    where recurrent states have more rows on one side (speculative tokens), move the rows that both
    have instead of refusing. Raises `MismatchError`
    where the engines do not fit, before anything else.
    """
    for field, engine in (("producer", producer), ("consumer", consumer)):
        instance(field, engine, EngineSpec)
    replica_policy = ReplicaPolicy.of(replica_policy, salt)
    flag("common_states", common_states)
    found = mismatches(producer, consumer)
    if common_states:
        found = tuple(each for each in found if not each.field.endswith(".states"))
    if found:
        raise MismatchError(found)
    pairs = tuple(group_pairs(producer, consumer))
    replica_groups = tuple(
        each for pair in pairs for each in replica_groups_of(producer, consumer, pair)
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
