"""Edges: what one producer rank gives to one consumer rank.

Law: edges follow from the shares alone; they are the same for who pulls and who pushes.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.ownership.election import Replicas
from kvspec.ownership.intervals import shift
from kvspec.ownership.parallel import RankId
from kvspec.ownership.slices import TPTransferSlice, consumer_pieces
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


def edges_of(
    producer: EngineSpec,
    consumer: EngineSpec,
    dealt: tuple[Share, ...],
    replicas: Replicas,
    salt: int,
) -> Iterator[Edge]:
    """Yield the edges, ascending by consumer, then group, then producer."""
    ours, theirs = producer.parallel.ranks, consumer.parallel.ranks
    pairs = {share.pair: at for at, share in enumerate(dealt)}
    found: dict[tuple[int, int, int], list[TPTransferSlice]] = {}
    for share in dealt:
        names = tuple(part.name for part in share.parts)
        at_stage = consumer.by_stage(share.layers)
        for reader, own in enumerate(share.readers.ranges):
            if not own:
                continue
            layers = at_stage[theirs[reader].pp]
            for piece in consumer_pieces(share.readers, share.members, reader, replicas, salt):
                units = range(piece.start, piece.stop)
                each = TPTransferSlice(
                    remote_rank=ours[piece.producer].tp,
                    parts=names,
                    global_range=units,
                    local_range=shift(units, -own.start),
                    remote_range=shift(units, -share.members.ranges[piece.producer].start),
                    layers=layers,
                    stripe=piece.stripe,
                )
                found.setdefault((reader, pairs[share.pair], piece.producer), []).append(each)
    by_index = {at: pair for pair, at in pairs.items()}
    for reader, at, source in sorted(found):
        pair, slices = by_index[at], found[reader, at, source]
        moved = {layer for each in slices for layer in each.layers}
        layers = tuple(layer for layer in pair.layers if layer in moved)
        yield Edge(
            producer=ours[source],
            consumer=theirs[reader],
            producer_group=pair.producer.name,
            group=pair.consumer.name,
            layers=layers,
            slices=tuple(
                attrs.evolve(each, layers=()) if each.layers == layers else each for each in slices
            ),
        )
