"""Divide a cache into replica groups, in which only the units decide which ranks are replicas.

Invariant: a replica group has one set of layers, one set of token positions and one division of
units. Two producer ranks of a group are replicas only if they hold the same units. The replica
policy chooses among them for all consumer ranks that need any of these units.

How it works:
    The cache of a pair of groups is divided in four steps: by the spec of the layers, by the
    pipeline stage of the producer, by the sharding of the parts, and by the context of the
    producer. Within one result, producer ranks differ only in their units. A group of 4 heads on
    TP 8 is thus one replica group with four pairs of replicas. For example, a latent cache
    (one unit, which each TP rank holds) is on a producer with TP 4, DCP 2 and PP 2. The context
    ranks share the TP ranks: tp0 and tp2 hold the even tokens, tp1 and tp3 the odd ones. There are
    four replica groups, and a consumer rank that needs all of the cache reads one rank of each:

        layers     tokens    replicas
        0..29      even      tp0, tp2
        0..29      odd       tp1, tp3
        30..59     even      pp1.tp0, pp1.tp2
        30..59     odd       pp1.tp1, pp1.tp3
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
    """A group of the producer, a group of the consumer, and the layers that both share.

    Attributes:
        producer: The group in the producer's description.
        consumer: The group in the consumer's description.
        layers: Names of the shared layers that neither side excludes.
    """

    producer: KVCacheGroup
    consumer: KVCacheGroup
    layers: tuple[str, ...]

    @cached_property
    def layers_by_spec(self) -> tuple[tuple[LayerSpec, tuple[str, ...]], ...]:
        """The shared layers by the consumer's spec: one entry, unless layers differ in size.

        The spec of a recurrent state is reduced to the rows that both sides have.
        """
        shared = set(self.layers)
        shared_names = (
            (spec, tuple(name for name in names if name in shared))
            for spec, names in self.consumer.layers_by_spec
        )
        return tuple(
            (common_rows(spec, self.producer.spec.of_layer(names[0])), names)
            for spec, names in shared_names
            if names
        )

    @cached_property
    def specs(self) -> dict[str, LayerSpec]:
        """The spec of each shared layer, by layer name."""
        return {layer: spec for spec, names in self.layers_by_spec for layer in names}


def group_pairs(producer: EngineSpec, consumer: EngineSpec) -> Iterator[GroupPair]:
    """Yield the pairs of groups that share at least one layer that neither side excludes."""
    excluded = {*producer.excluded, *consumer.excluded}
    for group in consumer.groups:
        # The pairs are in the order of layers with equal parts. A test vector lists the layers of a
        # group only by parts, so a planner in another language knows no other order.
        in_order = (layer for _, layers in group.layers_by_spec for layer in layers)
        by_home: dict[str, list[str]] = {
            producer.homes[layer].name: [] for layer in in_order if layer not in excluded
        }
        for layer in (layer for layer in group.layers if layer not in excluded):
            by_home[producer.homes[layer].name].append(layer)
        for name, layers in by_home.items():
            yield GroupPair(producer.group(name), group, tuple(layers))


@attrs.frozen(eq=False)
class ReplicaGroup:
    """Parts with the same sharding, for one producer stage and one producer context.

    Attributes:
        pair: The pair of groups.
        spec: The spec of the layers.
        stage: Pipeline stage of the producer ranks.
        layers: Names of the layers.
        parts: The parts, such as k and v. All of them are divided in the same way.
        context: The token positions of the producer ranks. None for recurrent states, because
            each context rank holds the whole state.
        producer_sharding: The units of each producer rank, in the order of `ParallelConfig.ranks`.
            A rank outside the replica group owns no units here.
        consumer_sharding: The same for the consumer ranks.
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
            layers = tuple(name for name in names if producer.stage_of[name] == stage)
            if not layers:
                continue
            stages = {consumer.stage_of[layer] for layer in layers}
            for parts in _parts_by_sharding(producer, consumer, pair, spec.parts):
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


def _parts_by_sharding(
    producer: EngineSpec, consumer: EngineSpec, pair: GroupPair, parts: tuple[Part, ...]
) -> list[tuple[Part, ...]]:
    """Return sets of parts. The units of a set are divided in the same way on each side."""
    by_sharding: dict[tuple[object, ...], list[Part]] = {}
    for part in parts:
        sharded = (
            producer.sharding(pair.producer, part).ranges,
            consumer.sharding(pair.consumer, part).ranges,
        )
        key = (part.units, part.granularity, part.per_token, part.whole, *sharded)
        by_sharding.setdefault(key, []).append(part)
    return [tuple(parts_of_set) for parts_of_set in by_sharding.values()]


def _contexts(engine: EngineSpec, group: KVCacheGroup, part: Part) -> list[BlockCyclic | None]:
    """Return the distinct contexts of an engine's ranks, or [None] if the rows are not tokens."""
    if not part.per_token:
        return [None]
    # Every pipeline stage has the same contexts, so the first stage is enough.
    ranks = (rank for rank in engine.parallel.ranks if rank.pp == 0)
    by_rank = {context.rank: context for context in (engine.context(group, rank) for rank in ranks)}
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
    """Return the units of each rank that is in *stages* and owns positions of *context*.

    A producer rank must own exactly these positions (*equal*). A consumer rank needs the units if
    it owns at least one of them.
    """
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
