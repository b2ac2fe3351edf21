"""Slices: the units that two ranks exchange.

Invariant: a slice is the intersection of the units that two ranks own. It contains the same global
units on both sides. The slices of a consumer rank cover the units of that rank exactly once.

How it works:
    Each rank numbers its own units from 0, so a slice has three ranges of equal length. With 8
    heads, consumer rank 1 of TP 3 owns heads 2 to 4, and the producer has TP 2:

        remote rank    global heads    local places    remote places
        0              2, 3            0, 1            2, 3
        1              4               2               0

        >>> from kvspec import FullAttentionSpec
        >>> spec = FullAttentionSpec(
        ...     block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16")
        >>> for s in spec.get_tp_transfer_slices(1, 3, 2):
        ...     print(s.remote_rank, s.global_range, s.local_range, s.remote_range)
        0 range(2, 4) range(0, 2) range(2, 4)
        1 range(4, 5) range(2, 3) range(0, 1)

    The consumer decides from which replica it reads. A producer rank computes the decisions of all
    its consumers, and keeps those that chose it. So both sides obtain the same slices without a
    message.
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
    """The units of some parts that a local rank exchanges with one remote rank.

    The three ranges have equal length. vLLM derives local and remote places from `tp_ratio`.

    Attributes:
        remote_rank: TP rank of the remote side.
        parts: Names of the parts.
        global_range: The units, as numbered in the whole model.
        local_range: The same units, as places among the units that the local rank owns.
        remote_range: The same units, as places among the units that the remote rank owns.
        layers: Names of the layers. It is empty if the slice holds for each layer of a spec.
        stripe: Virtual blocks of a request that move between the two ranks.
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

    @property
    def local_slice(self) -> slice:
        """*local_range* as an index: `cache[:, :, part.local_slice]` is a view of a tensor."""
        return slice(self.local_range.start, self.local_range.stop)

    @property
    def remote_slice(self) -> slice:
        """*remote_range* as an index into a tensor of the remote rank."""
        return slice(self.remote_range.start, self.remote_range.stop)


class UnitRange(NamedTuple):
    """Global units from *start* to *stop* that a consumer rank reads from *producer*.

    Attributes:
        producer: The producer rank that was chosen.
        start: First unit.
        stop: First unit after the range.
        stripe: Virtual blocks that move from this producer rank.
        replicas: Producer ranks among which *producer* was chosen.
    """

    producer: int
    start: int
    stop: int
    stripe: Stripe
    replicas: tuple[int, ...]


def slice_between(
    parts: tuple[str, ...],
    unit_range: UnitRange,
    local_units: range,
    remote_rank: int,
    remote_units: range,
    layers: tuple[str, ...],
) -> TPTransferSlice:
    """Return the slice of *unit_range* between ranks that own *local_units* and *remote_units*.

    One rank alone (`LayerSpec.get_tp_transfer_slices`) and the plan of all ranks (`plan_transfer`)
    both obtain their ranges from `consumer_unit_ranges` and make their slices here.
    """
    units = range(unit_range.start, unit_range.stop)
    return TPTransferSlice(
        remote_rank=remote_rank,
        parts=parts,
        global_range=units,
        local_range=shift(units, -local_units.start),
        remote_range=shift(units, -remote_units.start),
        layers=layers,
        stripe=unit_range.stripe,
    )


@lru_cache(maxsize=65536)
def _replica_class(
    consumer: Sharding, replicas: tuple[int, ...], start: int, stop: int
) -> ReplicaClass:
    return ReplicaClass(replicas, consumer.ranks_of(range(start, stop)))


def consumer_unit_ranges(
    consumer: Sharding, producer: Sharding, rank: int, chooser: ReplicaChooser
) -> list[UnitRange]:
    """Return the ranges that consumer *rank* reads, in ascending order of units.

    Together, the ranges are exactly the units that the rank owns.
    """
    own = consumer.ranges[rank]
    unit_ranges = []
    for index in producer.classes(own):
        units, replicas = producer.owned[index], producer.holders[index]
        start, stop = max(own.start, units.start), min(own.stop, units.stop)
        # Every policy chooses the only replica. Most models take this branch, so it must be fast.
        if len(replicas) == 1:
            unit_ranges.append(UnitRange(replicas[0], start, stop, WHOLE, replicas))
            continue
        among, chosen = chooser.choose(
            rank, _replica_class(consumer, replicas, units.start, units.stop)
        )
        unit_ranges.extend(
            UnitRange(replica, start, stop, stripe, among.replicas) for replica, stripe in chosen
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
    """Return the slices of *parts* that one local rank exchanges with all remote ranks.

    Args:
        parts: Parts of one layer, or of layers that have equal parts.
        role: Role of the local side.
        local_rank: TP rank on the local side.
        local_sharding: Function that returns the sharding of a part on the local side.
        remote_sharding: Function that returns the sharding of a part on the remote side.
        chooser: Chooser between the producer's and the consumer's ranks.
        layers: Names of the layers to write into the slices.

    Returns:
        One slice for each remote rank and range of units. Parts with equal units and granularity
        have common slices.
    """
    slices = []
    for part, names in _names_by_units(parts):
        local, remote = local_sharding(part), remote_sharding(part)
        for remote_rank, unit_range in _exchanged(role, local, remote, local_rank, chooser):
            local_units, remote_units = local.ranges[local_rank], remote.ranges[remote_rank]
            slices.append(
                slice_between(names, unit_range, local_units, remote_rank, remote_units, layers)
            )
    return tuple(slices)


@lru_cache(maxsize=4096)
def _names_by_units(parts: tuple[Part, ...]) -> tuple[tuple[Part, tuple[str, ...]], ...]:
    """Group parts of equal units and granularity. Return one part and all names of each group."""
    by_units: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        by_units.setdefault((part.units, part.granularity), []).append(part)
    return tuple((group[0], tuple(part.name for part in group)) for group in by_units.values())


def _exchanged(
    role: Role, local: Sharding, remote: Sharding, rank: int, chooser: ReplicaChooser
) -> list[tuple[int, UnitRange]]:
    """Return pairs of a remote rank and a range that local *rank* exchanges with it."""
    if role == "consumer":
        return [(p.producer, p) for p in consumer_unit_ranges(local, remote, rank, chooser)]
    # The consumers decide, so a producer rank evaluates the decision of each possible reader.
    return [
        (reader, unit_range)
        for reader in remote.ranks_of(local.ranges[rank])
        for unit_range in consumer_unit_ranges(remote, local, reader, chooser)
        if unit_range.producer == rank
    ]
