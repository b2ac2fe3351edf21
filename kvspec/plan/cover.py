"""Exact cover of a plan's edges.

Law: the slices of every consumer rank tile every part of every layer that it owns, exactly once;
what cannot be cut between units is not cut.
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
    """Raise `KVSpecError` unless the slices of every consumer rank are exactly what it owns."""
    found: dict[tuple[object, ...], list[TPTransferSlice]] = {}
    for edge in edges:
        context = producer.context(producer.group(edge.producer_group), edge.producer)
        for each in edge.slices:
            for name in each.parts:
                key = (edge.consumer, each.layers, name, context)
                found.setdefault(key, []).append(each)
    for replica_group in replica_groups:
        at_stage = consumer.by_stage(replica_group.layers)
        among = (
            _contexts(producer, replica_group)
            if replica_group.context is None
            else {replica_group.context}
        )
        for rank, own in zip(
            consumer.parallel.ranks, replica_group.consumer_sharding.ranges, strict=True
        ):
            for part in replica_group.parts if own else ():
                keys = ((rank, at_stage[rank.pp], part.name, context) for context in among)
                slices = [each for key in keys for each in found.get(key, ())]
                fault = cover_fault(_tiles(slices), range(len(own)))
                if fault is not None:
                    where = f"consumer {rank}, layer {at_stage[rank.pp][0]}, part {part.name}"
                    raise KVSpecError(f"{where}: units {fault.where} {fault.kind}")


def _contexts(producer: EngineSpec, replica_group: ReplicaGroup) -> set[BlockCyclic]:
    """Return every context of a state's replica group: each of their ranks holds it whole."""
    group = replica_group.pair.producer
    return {producer.context(group, rank) for rank in producer.parallel.ranks}


def check_whole(replica_groups: tuple[ReplicaGroup, ...]) -> None:
    """Refuse slices that would cut what cannot be cut between units."""
    for replica_group in replica_groups:
        if not replica_group.parts[0].whole:
            continue
        held, wanted = (
            sorted((units.start, units.stop) for units in sharding.owned)
            for sharding in (replica_group.producer_sharding, replica_group.consumer_sharding)
        )
        if held != wanted:
            field = f"{replica_group.layers[0]}.{replica_group.parts[0].name}"
            why = "its content spans the heads of a rank, so both sides must shard heads alike"
            raise MismatchError([Mismatch(field, held, wanted, why)])


def _tiles(slices: list[TPTransferSlice]) -> Iterator[range]:
    """Yield each local range once; never if its stripes miss a block, twice if two hold one."""
    stripes: dict[range, list[Stripe]] = {}
    for one in slices:
        stripes.setdefault(one.local_range, []).append(one.stripe)
    for units, ways in stripes.items():
        yield from [units] * times_held(ways)
