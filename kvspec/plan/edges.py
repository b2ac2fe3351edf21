"""Derive the edges of a plan: the units that each producer rank sends to each consumer rank.

Invariant: the edges depend only on the replica groups and the replica policy. A consumer that
reads and a producer that writes use the same edges.

How it works:
    Each replica group says which producer ranks hold which units, and which consumer ranks need
    them. For each consumer rank, the units are cut wherever the owner on the producer changes. If
    several producer ranks hold the same units, the replica policy chooses one of them. With 4 KV
    heads, producer TP 8 and consumer TP 2:

        consumer    head    replicas    chosen
        tp0         0       tp0, tp1    tp0
        tp0         1       tp2, tp3    tp2
        tp1         2       tp4, tp5    tp4
        tp1         3       tp6, tp7    tp6

    The results of all replica groups are then collected. There is one `Edge` for each consumer
    rank, pair of groups and producer rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import ReplicaPolicy
from kvspec.ownership.slices import (
    TPTransferSlice,
    UnitRange,
    consumer_unit_ranges,
    slice_between,
)
from kvspec.plan.replica_groups import ReplicaGroup


@attrs.frozen(kw_only=True)
class Edge:
    """The units that one producer rank sends to one consumer rank, for one pair of groups.

    Attributes:
        producer: The producer rank.
        consumer: The consumer rank.
        producer_group: Name of the group in the producer's description.
        group: Name of the group in the consumer's description.
        layers: Names of the layers that move, in the order of the consumer's group.
        slices: The units of each set of parts. They are written from the consumer's side:
            *local_range* counts the consumer rank's units, *remote_range* the producer rank's.

    >>> import kvspec
    >>> spec = kvspec.FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=4, head_size=128, dtype="bfloat16")
    >>> group = kvspec.KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    >>> producer, consumer = (
    ...     kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=size))
    ...     for size in (8, 2))
    >>> edge = kvspec.plan_transfer(producer, consumer).edges[1]
    >>> str(edge.producer), str(edge.consumer), edge.slices[0].global_range
    ('tp2', 'tp0', range(1, 2))
    """

    producer: RankId
    consumer: RankId
    producer_group: str
    group: str
    layers: tuple[str, ...]
    slices: tuple[TPTransferSlice, ...]


@attrs.frozen(eq=False)
class Assignment:
    """One range of units that one consumer rank reads from one producer rank.

    Attributes:
        replica_group: The replica group that holds the units.
        reader: Index of the consumer rank in `ParallelConfig.ranks`.
        layers: The layers of the replica group that are in the consumer rank's pipeline stage.
        unit_range: The units and the chosen producer rank, as an index too.
    """

    replica_group: ReplicaGroup
    reader: int
    layers: tuple[str, ...]
    unit_range: UnitRange


def assignments(
    producer: EngineSpec,
    consumer: EngineSpec,
    replica_groups: tuple[ReplicaGroup, ...],
    replica_policy: ReplicaPolicy,
) -> Iterator[Assignment]:
    """Yield the unit ranges of every consumer rank, one replica group after the other."""
    chooser = replica_policy.between(producer.parallel.ranks, consumer.parallel.ranks)
    stages = [rank.pp for rank in consumer.parallel.ranks]
    for replica_group in replica_groups:
        at_stage = consumer.by_stage(replica_group.layers)
        for reader, own in enumerate(replica_group.consumer_sharding.ranges):
            if own:
                layers = at_stage[stages[reader]]
                for unit_range in consumer_unit_ranges(
                    replica_group.consumer_sharding,
                    replica_group.producer_sharding,
                    reader,
                    chooser,
                ):
                    yield Assignment(replica_group, reader, layers, unit_range)


def edges_of(
    producer: EngineSpec,
    consumer: EngineSpec,
    replica_groups: tuple[ReplicaGroup, ...],
    replica_policy: ReplicaPolicy,
) -> Iterator[Edge]:
    """Yield the edges, ascending by consumer, then group, then producer."""
    producers, consumers = producer.parallel.ranks, consumer.parallel.ranks
    pairs = list(dict.fromkeys(replica_group.pair for replica_group in replica_groups))
    numbers = {pair: number for number, pair in enumerate(pairs)}
    slices: dict[tuple[int, int, int], list[TPTransferSlice]] = {}
    for assignment in assignments(producer, consumer, replica_groups, replica_policy):
        key = (
            assignment.reader,
            numbers[assignment.replica_group.pair],
            assignment.unit_range.producer,
        )
        slices.setdefault(key, []).append(_slice(assignment, producers))
    # Both engines must list the edges in the same order, so sort by numbers, never by hash.
    for reader, number, source in sorted(slices):
        pair, edge_slices = pairs[number], slices[reader, number, source]
        layers = {layer for edge_slice in edge_slices for layer in edge_slice.layers}
        yield Edge(
            producer=producers[source],
            consumer=consumers[reader],
            producer_group=pair.producer.name,
            group=pair.consumer.name,
            layers=tuple(layer for layer in pair.layers if layer in layers),
            slices=tuple(edge_slices),
        )


def _slice(assignment: Assignment, producers: tuple[RankId, ...]) -> TPTransferSlice:
    replica_group, unit_range = assignment.replica_group, assignment.unit_range
    return slice_between(
        tuple(part.name for part in replica_group.parts),
        unit_range,
        replica_group.consumer_sharding.ranges[assignment.reader],
        producers[unit_range.producer].tp,
        replica_group.producer_sharding.ranges[unit_range.producer],
        assignment.layers,
    )
