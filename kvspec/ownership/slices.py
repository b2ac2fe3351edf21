"""The overlap of two shardings.

Law: a slice is the intersection of what two ranks own; it names the same global units at both
ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import attrs

from kvspec.inputs import instance
from kvspec.ownership.intervals import shift
from kvspec.ownership.part import Part
from kvspec.ownership.replicas import ReplicaChooser, ReplicaClass, Role
from kvspec.ownership.sharding import Sharding
from kvspec.ownership.stripes import WHOLE, Stripe


@attrs.frozen
class TPTransferSlice:
    """The units that one pair of ranks exchanges.

    Ranges are in units of *parts*: *global_range* of the model's, *local_range* of what the asking
    rank holds, *remote_range* of what *remote_rank* holds; all three have one length. *layers* are
    those of which they move; a spec, which knows no layers by name, leaves them out. *stripe*:
    which virtual blocks of a request move over this pair.
    """

    remote_rank: int
    parts: tuple[str, ...]
    global_range: range
    local_range: range
    remote_range: range
    layers: tuple[str, ...] = ()
    stripe: Stripe = WHOLE

    def __attrs_post_init__(self) -> None:
        if self.stripe is not WHOLE:
            instance("stripe", self.stripe, Stripe)


class UnitRange(NamedTuple):
    """Global units [start, stop) that a consumer rank reads from *producer*.

    *replicas*: the producer ranks among which this one was chosen.
    """

    producer: int
    start: int
    stop: int
    stripe: Stripe
    replicas: tuple[int, ...]


@lru_cache(maxsize=65536)
def _replica_class(
    consumer: Sharding, replicas: tuple[int, ...], start: int, stop: int
) -> ReplicaClass:
    return ReplicaClass(replicas, consumer.ranks_of(range(start, stop)))


def consumer_unit_ranges(
    consumer: Sharding, producer: Sharding, rank: int, chooser: ReplicaChooser
) -> list[UnitRange]:
    """Return what consumer *rank* reads, ascending in units; together, exactly what it owns."""
    own = consumer.ranges[rank]
    unit_ranges = []
    for index in producer.classes(own):
        units, replicas = producer.owned[index], producer.holders[index]
        start, stop = max(own.start, units.start), min(own.stop, units.stop)
        if len(replicas) == 1:
            unit_ranges.append(UnitRange(replicas[0], start, stop, WHOLE, replicas))
            continue
        among, chosen = chooser.choose(
            rank, _replica_class(consumer, replicas, units.start, units.stop)
        )
        unit_ranges.extend(
            UnitRange(replica, start, stop, way, among.replicas) for replica, way in chosen
        )
    return unit_ranges


def transfer_slices(
    parts: tuple[Part, ...],
    role: Role,
    local_rank: int,
    local_sharding: Callable[[Part], Sharding],
    remote_sharding: Callable[[Part], Sharding],
    chooser: ReplicaChooser,
    layers: tuple[str, ...] = (),
) -> tuple[TPTransferSlice, ...]:
    """Return the slices of *parts* that local rank *local_rank* exchanges with every remote rank.

    Parts of as many units, sharded in equal multiples, share their slices.
    """
    slices = []
    for same, names in _same_sharding(parts):
        local, remote = local_sharding(same), remote_sharding(same)
        first = local.ranges[local_rank].start
        for peer, unit_range in _exchanged(role, local, remote, local_rank, chooser):
            units = range(unit_range.start, unit_range.stop)
            away = shift(units, -remote.ranges[peer].start)
            own = shift(units, -first)
            slices.append(TPTransferSlice(peer, names, units, own, away, layers, unit_range.stripe))
    return tuple(slices)


@lru_cache(maxsize=4096)
def _same_sharding(parts: tuple[Part, ...]) -> tuple[tuple[Part, tuple[str, ...]], ...]:
    """Return the first of the parts that are sharded alike, and the names of all of them."""
    same_sharding: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        same_sharding.setdefault((part.units, part.granularity), []).append(part)
    return tuple((same[0], tuple(part.name for part in same)) for same in same_sharding.values())


def _exchanged(
    role: Role, local: Sharding, remote: Sharding, rank: int, chooser: ReplicaChooser
) -> list[tuple[int, UnitRange]]:
    """Return (remote rank, range) of what local *rank* exchanges, from whichever side it is on."""
    if role == "consumer":
        return [(p.producer, p) for p in consumer_unit_ranges(local, remote, rank, chooser)]
    return [
        (reader, unit_range)
        for reader in remote.ranks_of(local.ranges[rank])
        for unit_range in consumer_unit_ranges(remote, local, reader, chooser)
        if unit_range.producer == rank
    ]
