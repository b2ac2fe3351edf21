"""Check that the edges of a plan cover everything that the consumer ranks own.

Invariant: a `TransferPlan` exists only if its edges fill each replica group exactly once: each
consumer rank receives each of its units once, for every part, layer and producer context. The
check takes the replica groups as they are. `verify` and the laws find a group that is missing.

How it works:
    A consumer rank owns a range of units, and `check_cover` counts them from 0. Each slice fills a
    local range of them. Together, these ranges must be the whole range, without a gap or an
    overlap. For example, 8 heads move from TP 2 to TP 3. Consumer rank 1 owns the heads 2, 3 and 4:

        slice from     heads     local range
        tp0            2..3      0..1
        tp1            4         2
                                 0..2: exactly the 3 units that the rank owns

    With the policy `stripe`, several slices have the same local range, because each carries only
    some blocks. Such slices count as one range if each block is in exactly one of them. Two slices
    with the blocks ``b % 2 == 0`` and ``b % 2 == 1`` count once. The first of them alone does not
    count. A slice with all blocks counts once, and the same slice twice counts twice.

    The producer's context ranks hold different tokens of the same units. So the check runs once
    for each context. A recurrent state has no tokens: each context rank holds all of it, and the
    check takes the slices of all contexts together.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvspec.engines.engine import EngineSpec
from kvspec.errors import KVSpecError, Mismatch, MismatchError
from kvspec.ownership.intervals import cover_fault
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.stripes import Stripe, times_held
from kvspec.ownership.tokens import BlockCyclic
from kvspec.plan.edges import Edge
from kvspec.plan.replica_groups import ReplicaGroup


def check_cover(
    producer: EngineSpec,
    consumer: EngineSpec,
    replica_groups: tuple[ReplicaGroup, ...],
    edges: tuple[Edge, ...],
) -> None:
    """Raise `KVSpecError` unless each consumer rank receives each of its units exactly once."""
    slices_by_key: dict[tuple[object, ...], list[TPTransferSlice]] = {}
    for edge in edges:
        context = producer.context(producer.group(edge.producer_group), edge.producer)
        for transfer_slice in edge.slices:
            # `cover_fault` ignores empty ranges, but the descriptors of an empty slice move a unit.
            if not transfer_slice.local_range:
                where = f"consumer {edge.consumer}, layer {edge.layers[0]}"
                raise KVSpecError(f"{where}: a slice from producer {edge.producer} has no units")
            for name in transfer_slice.parts:
                key = (edge.consumer, transfer_slice.layers, name, context)
                slices_by_key.setdefault(key, []).append(transfer_slice)
    for replica_group in replica_groups:
        at_stage = consumer.by_stage(replica_group.layers)
        contexts = (
            _contexts(producer, replica_group)
            if replica_group.context is None
            else {replica_group.context}
        )
        for rank, own in zip(
            consumer.parallel.ranks, replica_group.consumer_sharding.ranges, strict=True
        ):
            for part in replica_group.parts if own else ():
                # Edges name the layers of the consumer's stage, and so do the keys.
                keys = ((rank, at_stage[rank.pp], part.name, context) for context in contexts)
                slices = [found for key in keys for found in slices_by_key.get(key, ())]
                fault = cover_fault(_counted_ranges(slices), range(len(own)))
                if fault is not None:
                    where = f"consumer {rank}, layer {at_stage[rank.pp][0]}, part {part.name}"
                    raise KVSpecError(f"{where}: units {fault.where} {fault.kind}")


def _contexts(producer: EngineSpec, replica_group: ReplicaGroup) -> set[BlockCyclic]:
    """Return the contexts of all producer ranks: each of them holds the whole state."""
    group = replica_group.pair.producer
    return {producer.context(group, rank) for rank in producer.parallel.ranks}


def check_whole(replica_groups: tuple[ReplicaGroup, ...]) -> None:
    """Raise `MismatchError` if two sides divide a part differently that must stay whole.

    A part must stay whole if one of the sides requires it: only that side may know that the bytes
    of a rank depend on each other.
    """
    for replica_group in replica_groups:
        source = replica_group.pair.producer.spec.of_layer(replica_group.layers[0])
        whole = {part.name for part in (*replica_group.parts, *source.parts) if part.whole}
        names = [part.name for part in replica_group.parts if part.name in whole]
        if not names:
            continue
        producer_ranges, consumer_ranges = (
            sorted((units.start, units.stop) for units in sharding.owned)
            for sharding in (replica_group.producer_sharding, replica_group.consumer_sharding)
        )
        if producer_ranges != consumer_ranges:
            field = f"{replica_group.layers[0]}.{names[0]}"
            why = "its bytes mix all heads of a rank, so both sides must shard the heads equally"
            raise MismatchError([Mismatch(field, producer_ranges, consumer_ranges, why)])


def _counted_ranges(slices: list[TPTransferSlice]) -> Iterator[range]:
    """Yield each local range as often as its stripes hold each block: 0, 1 or 2 times."""
    stripes: dict[range, list[Stripe]] = {}
    for transfer_slice in slices:
        stripes.setdefault(transfer_slice.local_range, []).append(transfer_slice.stripe)
    for units, stripes_of_units in stripes.items():
        yield from [units] * times_held(stripes_of_units)
