"""Who owns what, asked of the oracle: what should move, and which ranks are replicas.

Law: everything here is counted from the two engines' descriptions, unit by unit and position by
position; no plan is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import lcm
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.testing.carve import rank_layers, rank_units
from kvspec.testing.positions import context_of, excluded_layers

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec
    from kvspec.engines.group import KVCacheGroup
    from kvspec.ownership.parallel import RankId
    from kvspec.ownership.part import Part

FAR = 240
"""Positions that the laws look at, at most: where ownership repeats earlier, two periods of it."""
Mask = npt.NDArray[np.bool_]


@attrs.frozen
class Target:
    """One part of one layer that a rank holds and neither side excludes."""

    rank: RankId
    group: KVCacheGroup
    layer: str
    part: Part


def targets(engine: EngineSpec, other: EngineSpec) -> Iterator[Target]:
    """Yield all that the ranks of *engine* hold and neither side excludes."""
    still = excluded_layers(engine) | excluded_layers(other)
    for rank, group in product(engine.parallel.ranks, engine.groups):
        for layer in rank_layers(engine, rank, group):
            for part in group.spec.of_layer(layer).parts if layer not in still else ():
                yield Target(rank, group, layer, part)


def home(engine: EngineSpec, layer: str) -> KVCacheGroup:
    """Return the group of *engine* that *layer* is in."""
    return next(group for group in engine.groups if layer in group.layers)


def owns(engine: EngineSpec, rank: RankId, part: Part, group: KVCacheGroup, far: int = FAR) -> Mask:
    """Return which of the first *far* token positions a rank owns, asked one after the other.

    A state is held whole by every context rank: it stands at any position.
    """
    own, size = context_of(engine, rank, group)
    return _owned_positions(
        own, size if part.per_token else 1, engine.parallel.interleave_size, far
    )


@lru_cache(maxsize=4096)
def _owned_positions(own: int, size: int, interleave: int, far: int) -> Mask:
    one_round = [size == 1 or turn == own for turn in range(size) for _ in range(interleave)]
    return np.resize(np.array(one_round), far)


def horizon(producer: EngineSpec, consumer: EngineSpec) -> int:
    """Return how many positions show all pairs of ranks that share one.

    A round of both shardings.
    """
    return lcm(
        *(
            context_of(each, each.parallel.ranks[0])[1] * each.parallel.interleave_size
            for each in (producer, consumer)
        )
    )


@attrs.frozen
class CountedReplicas:
    """What *replicas* hold alike of one part, and its *consumers*.

    All ranks that need any of it.
    """

    layers: tuple[str, ...]
    part: Part
    units: frozenset[int]
    replicas: tuple[RankId, ...]
    consumers: tuple[RankId, ...]


def counted_replicas(producer: EngineSpec, consumer: EngineSpec) -> Iterator[CountedReplicas]:
    """Yield every replica class of *producer*, from sets of layers, units and positions."""
    for (stage, _, _, parts), layers in _together(producer, consumer).items():
        for part in parts:
            far = horizon(producer, consumer)
            holds, needs = (_holders(each, part, layers, far) for each in (producer, consumer))
            same_holdings: dict[Any, list[RankId]] = {}
            for rank, (units, positions) in holds.items():
                if rank.pp == stage and units:
                    same_holdings.setdefault((units, positions.tobytes()), []).append(rank)
            for (units, _), replicas in same_holdings.items():
                positions = holds[replicas[0]][1]
                consumers = [
                    r for r, (u, p) in needs.items() if u & units and (p & positions).any()
                ]
                yield CountedReplicas(tuple(layers), part, units, tuple(replicas), tuple(consumers))


def _together(producer: EngineSpec, consumer: EngineSpec) -> dict[Any, list[str]]:
    """Return the layers that move, by the producer's stage, the groups of both, and their parts."""
    still = excluded_layers(producer) | excluded_layers(consumer)
    found: dict[Any, list[str]] = {}
    for source, target in product(producer.groups, consumer.groups):
        for rank in producer.parallel.ranks:
            for layer in rank_layers(producer, rank, source) if not rank.pcp + rank.tp else ():
                if layer in target.layers and layer not in still:
                    parts = target.spec.of_layer(layer).parts
                    key = rank.pp, source.name, target.name, parts
                    found.setdefault(key, []).append(layer)
    return found


def _holders(
    engine: EngineSpec, part: Part, layers: list[str], far: int
) -> dict[RankId, tuple[frozenset[int], Mask]]:
    """Return the units and positions of *part* that each rank with any of *layers* holds."""
    group = home(engine, layers[0])
    return {
        rank: (
            frozenset(rank_units(engine, rank, part, group)),
            owns(engine, rank, part, group, far),
        )
        for rank in engine.parallel.ranks
        if set(layers) & set(rank_layers(engine, rank, group))
    }


def has_replicas(engine: EngineSpec) -> bool:
    """Return whether any unit of any layer and position of *engine* is held by two ranks."""
    count: dict[tuple[str, str, int], Any] = {}
    for target in targets(engine, engine):
        for unit in rank_units(engine, target.rank, target.part, target.group):
            key = target.layer, target.part.name, unit
            own = owns(engine, target.rank, target.part, target.group).astype(int)
            count[key] = count.get(key, 0) + own
    return any(each.max() > 1 for each in count.values())
