"""Edges: what one producer rank gives to one consumer rank.

Law: edges follow from the shares alone; they are the same for who pulls and who pushes.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.ownership.intervals import shift
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import ReplicaPolicy
from kvspec.ownership.slices import TPTransferSlice, UnitRange, consumer_unit_ranges
from kvspec.plan.shares import Share


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
class Exchange:
    """What one consumer rank reads of one share: ranks are indices, *layers* those of its stage."""

    share: Share
    reader: int
    layers: tuple[str, ...]
    unit_range: UnitRange


def exchanges(
    producer: EngineSpec,
    consumer: EngineSpec,
    dealt: tuple[Share, ...],
    replica_policy: ReplicaPolicy,
) -> Iterator[Exchange]:
    """Yield, share by share, what every consumer rank reads from whom."""
    chooser = replica_policy.between(producer.parallel.ranks, consumer.parallel.ranks)
    stages = [rank.pp for rank in consumer.parallel.ranks]
    for share in dealt:
        at_stage = consumer.by_stage(share.layers)
        for reader, own in enumerate(share.readers.ranges):
            if own:
                layers = at_stage[stages[reader]]
                for unit_range in consumer_unit_ranges(
                    share.readers, share.members, reader, chooser
                ):
                    yield Exchange(share, reader, layers, unit_range)


def edges_of(
    producer: EngineSpec,
    consumer: EngineSpec,
    dealt: tuple[Share, ...],
    replica_policy: ReplicaPolicy,
) -> Iterator[Edge]:
    """Yield the edges, ascending by consumer, then group, then producer."""
    producers, consumers = producer.parallel.ranks, consumer.parallel.ranks
    pairs = list(dict.fromkeys(share.pair for share in dealt))
    numbers = {pair: number for number, pair in enumerate(pairs)}
    slices: dict[tuple[int, int, int], list[TPTransferSlice]] = {}
    for one in exchanges(producer, consumer, dealt, replica_policy):
        key = one.reader, numbers[one.share.pair], one.unit_range.producer
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


def _slice(one: Exchange, producers: tuple[RankId, ...]) -> TPTransferSlice:
    share, unit_range = one.share, one.unit_range
    units = range(unit_range.start, unit_range.stop)
    return TPTransferSlice(
        remote_rank=producers[unit_range.producer].tp,
        parts=tuple(part.name for part in share.parts),
        global_range=units,
        local_range=shift(units, -share.readers.ranges[one.reader].start),
        remote_range=shift(units, -share.members.ranges[unit_range.producer].start),
        layers=one.layers,
        stripe=unit_range.stripe,
    )
