"""Edges: what one producer rank gives to one consumer rank.

Law: edges follow from the replica groups alone; they are the same for who pulls and who pushes.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.ownership.intervals import shift
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import ReplicaPolicy
from kvspec.ownership.slices import TPTransferSlice, UnitRange, consumer_unit_ranges
from kvspec.plan.replica_groups import ReplicaGroup


@attrs.frozen(kw_only=True)
class Edge:
    """What one producer rank gives to one consumer rank, of one pair of groups.

    *slices* are seen from the consumer: local is the consumer's range, remote the producer's.
    """

    producer: RankId
    consumer: RankId
    producer_group: str
    group: str
    layers: tuple[str, ...]
    slices: tuple[TPTransferSlice, ...]


@attrs.frozen(eq=False)
class Assignment:
    """What one consumer rank reads of one replica group.

    Ranks are indices, *layers* those of its stage.
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
    """Yield, replica group by replica group, what every consumer rank reads from whom."""
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
    for one in assignments(producer, consumer, replica_groups, replica_policy):
        key = one.reader, numbers[one.replica_group.pair], one.unit_range.producer
        slices.setdefault(key, []).append(_slice(one, producers))
    for reader, number, source in sorted(slices):
        pair, moved = pairs[number], slices[reader, number, source]
        layers = {layer for one in moved for layer in one.layers}
        yield Edge(
            producer=producers[source],
            consumer=consumers[reader],
            producer_group=pair.producer.name,
            group=pair.consumer.name,
            layers=tuple(layer for layer in pair.layers if layer in layers),
            slices=tuple(moved),
        )


def _slice(one: Assignment, producers: tuple[RankId, ...]) -> TPTransferSlice:
    replica_group, unit_range = one.replica_group, one.unit_range
    units = range(unit_range.start, unit_range.stop)
    return TPTransferSlice(
        remote_rank=producers[unit_range.producer].tp,
        parts=tuple(part.name for part in replica_group.parts),
        global_range=units,
        local_range=shift(units, -replica_group.consumer_sharding.ranges[one.reader].start),
        remote_range=shift(
            units, -replica_group.producer_sharding.ranges[unit_range.producer].start
        ),
        layers=one.layers,
        stripe=unit_range.stripe,
    )
