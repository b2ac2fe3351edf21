"""Replica groups: what one set of producer ranks gives to the consumers that need it.

Law: a replica group is fixed by layers, token positions and units together. Replicas are the
producer ranks that hold the same of all three, and the consumers among which they are chosen are
all that need anything of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.sharding import Sharding
from kvspec.ownership.tokens import BlockCyclic, meet
from kvspec.specs import LayerSpec
from kvspec.specs.state import common_rows


@attrs.frozen
class GroupPair:
    """A producer's and a consumer's group, and the layers that move between them."""

    producer: KVCacheGroup
    consumer: KVCacheGroup
    layers: tuple[str, ...]

    @cached_property
    def layers_by_spec(self) -> tuple[tuple[LayerSpec, tuple[str, ...]], ...]:
        """The shared layers by the consumer's spec of them: one entry unless sizes differ.

        Of a state, the spec has the rows that both sides have.
        """
        shared = set(self.layers)
        kept = (
            (s, tuple(x for x in names if x in shared)) for s, names in self.consumer.layers_by_spec
        )
        return tuple(
            (common_rows(spec, self.producer.spec.of_layer(names[0])), names)
            for spec, names in kept
            if names
        )

    @cached_property
    def specs(self) -> dict[str, LayerSpec]:
        """The spec of each shared layer, by layer name."""
        return {layer: spec for spec, names in self.layers_by_spec for layer in names}


def group_pairs(producer: EngineSpec, consumer: EngineSpec) -> Iterator[GroupPair]:
    """Yield the pairs of groups that share layers which neither side excludes."""
    excluded = {*producer.excluded, *consumer.excluded}
    for own in consumer.groups:
        by_home: dict[str, list[str]] = {}
        for layer in (layer for layer in own.layers if layer not in excluded):
            by_home.setdefault(producer.homes[layer].name, []).append(layer)
        for name, layers in by_home.items():
            yield GroupPair(producer.group(name), own, tuple(layers))


@attrs.frozen(eq=False)
class ReplicaGroup:
    """Parts that are sharded alike, of one producer stage's layers and one producer context.

    *producer_sharding* and *consumer_sharding* are shardings over all ranks of the producer and of
    the consumer, in the order of `ParallelConfig.ranks`; a rank outside the replica group owns
    nothing in them. *context* is None for states, which every context rank holds whole.
    """

    pair: GroupPair
    spec: LayerSpec
    stage: int
    layers: tuple[str, ...]
    parts: tuple[Part, ...]
    context: BlockCyclic | None
    producer_sharding: Sharding
    consumer_sharding: Sharding


def replica_groups_of(
    producer: EngineSpec, consumer: EngineSpec, pair: GroupPair
) -> Iterator[ReplicaGroup]:
    """Yield every replica group of one pair of groups."""
    for spec, names in pair.layers_by_spec:
        for stage in range(producer.parallel.pp_size):
            layers = tuple(each for each in names if producer.stage_of[each] == stage)
            if not layers:
                continue
            stages = {consumer.stage_of[each] for each in layers}
            for parts in _same_sharding(producer, consumer, pair, spec.parts):
                for context in _contexts(producer, pair.producer, parts[0]):
                    producer_sharding = _sharding(
                        producer, pair.producer, parts[0], {stage}, context, equal=True
                    )
                    consumer_sharding = _sharding(
                        consumer, pair.consumer, parts[0], stages, context, equal=False
                    )
                    yield ReplicaGroup(
                        pair,
                        spec,
                        stage,
                        layers,
                        parts,
                        context,
                        producer_sharding,
                        consumer_sharding,
                    )


def _same_sharding(
    producer: EngineSpec, consumer: EngineSpec, pair: GroupPair, parts: tuple[Part, ...]
) -> list[tuple[Part, ...]]:
    found: dict[tuple[object, ...], list[Part]] = {}
    for part in parts:
        sharded = (
            producer.sharding(pair.producer, part).ranges,
            consumer.sharding(pair.consumer, part).ranges,
        )
        key = (part.units, part.granularity, part.per_token, part.whole, *sharded)
        found.setdefault(key, []).append(part)
    return [tuple(same) for same in found.values()]


def _contexts(engine: EngineSpec, group: KVCacheGroup, part: Part) -> list[BlockCyclic | None]:
    if not part.per_token:
        return [None]
    ranks = (rank for rank in engine.parallel.ranks if rank.pp == 0)
    by_rank = {context.rank: context for context in (engine.context(group, each) for each in ranks)}
    return [by_rank[number] for number in sorted(by_rank)]


def _sharding(
    engine: EngineSpec,
    group: KVCacheGroup,
    part: Part,
    stages: set[int],
    context: BlockCyclic | None,
    *,
    equal: bool,
) -> Sharding:
    """Return who owns which units, of the ranks in *stages* that own positions of *context*."""
    by_tp = engine.sharding(group, part).ranges

    def own(rank: RankId) -> range:
        if rank.pp not in stages:
            return EMPTY
        if context is not None:
            held = engine.context(group, rank)
            if (held != context) if equal else not meet(held, context):
                return EMPTY
        return by_tp[rank.tp]

    return Sharding(part.units, tuple(own(rank) for rank in engine.parallel.ranks))
