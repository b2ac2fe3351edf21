"""Count which ranks own what: what should move, and which ranks are replicas.

Invariant: all results are counted from the descriptions of the two engines, unit by unit and
position by position. No plan of the library is used.

How it works:
    Ownership of tokens repeats: with an interleave of 2 and 2 context ranks, rank 0 owns the tokens
    0, 1, 4, 5 and so on. If the other engine has 2 context ranks and an interleave of 3, the
    pattern of both engines repeats after lcm(4, 6) = 12 positions (`horizon`).

    Two producer ranks are replicas if they hold the same units at the same positions. With TP 4 and
    2 heads, the ranks 0 and 1 hold head 0, and the ranks 2 and 3 hold head 1: two classes.
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

from kvspec.check.counting import context_of, rank_layers, rank_units
from kvspec.testing.positions import excluded_layers

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec
    from kvspec.engines.group import KVCacheGroup
    from kvspec.ownership.parallel import RankId
    from kvspec.ownership.part import Part

# The laws check at most this many positions. If ownership repeats earlier, they check two periods.
FAR = 240
Mask = npt.NDArray[np.bool_]


@attrs.frozen
class Target:
    """One part of one layer that a rank holds and that no side excludes."""

    rank: RankId
    group: KVCacheGroup
    layer: str
    part: Part


def targets(engine: EngineSpec, other: EngineSpec) -> Iterator[Target]:
    """Yield each part of each layer that a rank of *engine* holds and that no side excludes."""
    excluded = excluded_layers(engine) | excluded_layers(other)
    for rank, group in product(engine.parallel.ranks, engine.groups):
        for layer in rank_layers(engine, rank, group):
            for part in group.spec.of_layer(layer).parts if layer not in excluded else ():
                yield Target(rank, group, layer, part)


def home(engine: EngineSpec, layer: str) -> KVCacheGroup:
    """Return the group of *engine* that contains *layer*."""
    return next(group for group in engine.groups if layer in group.layers)


def owns(engine: EngineSpec, rank: RankId, part: Part, group: KVCacheGroup, far: int = FAR) -> Mask:
    """Return a mask of the first *far* token positions: True if the rank owns the position.

    Each context rank holds whole states, so a state counts as owned at each position.
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
    """Return the number of positions after which the ownership of both engines repeats."""
    return lcm(
        *(
            context_of(engine, engine.parallel.ranks[0])[1] * engine.parallel.interleave_size
            for engine in (producer, consumer)
        )
    )


@attrs.frozen
class CountedReplicas:
    """Units of one part that several producer ranks hold.

    Attributes:
        layers: The layers that have the part.
        part: The part.
        units: The units.
        replicas: The producer ranks that hold exactly these units at the same positions.
        consumers: The consumer ranks that need any of them.
    """

    layers: tuple[str, ...]
    part: Part
    units: frozenset[int]
    replicas: tuple[RankId, ...]
    consumers: tuple[RankId, ...]


def counted_replicas(producer: EngineSpec, consumer: EngineSpec) -> Iterator[CountedReplicas]:
    """Yield each replica class of *producer*: ranks with equal sets of units and positions."""
    for (stage, _, _, parts), layers in _together(producer, consumer).items():
        for part in parts:
            far = horizon(producer, consumer)
            holds, needs = (_holders(side, part, layers, far) for side in (producer, consumer))
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
    """Return the layers that move, by (producer stage, producer group, consumer group, parts)."""
    excluded = excluded_layers(producer) | excluded_layers(consumer)
    together: dict[Any, list[str]] = {}
    for source, target in product(producer.groups, consumer.groups):
        for rank in producer.parallel.ranks:
            # All ranks of a stage have the same layers, so the first rank of each is enough.
            for layer in rank_layers(producer, rank, source) if not rank.pcp + rank.tp else ():
                if layer in target.layers and layer not in excluded:
                    parts = target.spec.of_layer(layer).parts
                    key = rank.pp, source.name, target.name, parts
                    together.setdefault(key, []).append(layer)
    return together


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
    """Return whether two ranks of *engine* hold the same unit of a layer at the same position."""
    count: dict[tuple[str, str, int], Any] = {}
    for target in targets(engine, engine):
        for unit in rank_units(engine, target.rank, target.part, target.group):
            key = target.layer, target.part.name, unit
            own = owns(engine, target.rank, target.part, target.group).astype(int)
            count[key] = count.get(key, 0) + own
    return any(owners.max() > 1 for owners in count.values())
