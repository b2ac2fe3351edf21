"""Shardings: the units of a part that each TP rank owns.

Invariant: a sharding is an input. The default is contiguous and balanced. Every known engine shards
so if the number of ranks divides the units, or the units divide the ranks. An engine with another
sharding passes it explicitly.

How it works:
    A rank owns one range of units. Two ranks own the same range or disjoint ranges. Ranks of the
    same range are replicas, as with 2 KV heads on 4 ranks:

        rank     0         1         2         3
        units    0         0         1         1

        >>> heads = even_sharding(units=2, tp_size=4)
        >>> heads.owned, heads.holders
        ((range(0, 1), range(1, 2)), ((0, 1), (2, 3)))
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import Frozen, mapping, positive_int
from kvspec.ownership.intervals import EMPTY, cover_fault, plain_range


@attrs.frozen(eq=False)
class Sharding:
    """The units of one part that each TP rank owns.

    Attributes:
        units: Number of units in the whole model.
        ranges: One range of global units for each rank. Two ranges are equal or disjoint. The range
            of a rank that owns no unit is empty.

    >>> sharding = Sharding(4, (range(0, 2), range(0, 2), range(2, 4)))
    >>> sharding.ranks_of(range(1, 3))
    (0, 1, 2)
    """

    units: int
    ranges: tuple[range, ...]

    @cached_property
    def owned(self) -> tuple[range, ...]:
        """The distinct ranges that are not empty, in ascending order."""
        return tuple(sorted({own for own in self.ranges if own}, key=lambda own: own.start))

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each range of `owned`, its ranks in ascending order."""
        ranks: dict[range, list[int]] = {own: [] for own in self.owned}
        for rank, own in enumerate(self.ranges):
            if own:
                ranks[own].append(rank)
        return tuple(map(tuple, ranks.values()))

    # The ranges are disjoint and sorted, so a bisection over their ends finds an intersection.
    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(own.start for own in self.owned)

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        return tuple(own.stop for own in self.owned)

    def classes(self, units: range) -> range:
        """Return the indices into `owned` of the ranges that intersect *units*.

        Each range of `owned` belongs to one class of replicas, so the index numbers a class.
        """
        if not units:
            return EMPTY
        return range(bisect_right(self._stops, units.start), bisect_left(self._starts, units.stop))

    def ranks_of(self, units: range) -> tuple[int, ...]:
        """Return the ranks that own any of *units*, in ascending order."""
        classes = self.classes(units)
        if len(classes) == 1:
            return self.holders[classes.start]
        return tuple(sorted(rank for i in classes for rank in self.holders[i]))


@lru_cache(maxsize=256, typed=True)
def even_sharding(units: int, tp_size: int, granularity: int = 1) -> Sharding:
    """Return the contiguous and balanced sharding of *units* over *tp_size* ranks.

    A pack is *granularity* units, and there are U packs for T ranks. If U >= T, rank r owns packs
    `r * U // T` to `(r + 1) * U // T`. Otherwise it owns the one pack `r * U // T`, so neighbouring
    ranks are replicas. If one of U and T divides the other, this is vLLM's rule:
    `get_num_kv_heads` returns `max(1, U // T)`, and `QKVParallelLinear` loads head `r // (T // U)`.

    Args:
        units: Number of units, such as KV heads.
        tp_size: Number of ranks.
        granularity: Units that stay together.

    Returns:
        The sharding.

    Raises:
        SpecError: If a number is not a positive int, or *granularity* does not divide *units*.

    >>> even_sharding(8, 3).ranges
    (range(0, 2), range(2, 5), range(5, 8))
    >>> even_sharding(2, 4).ranges
    (range(0, 1), range(0, 1), range(1, 2), range(1, 2))
    """
    for field, size in (("units", units), ("tp_size", tp_size), ("granularity", granularity)):
        positive_int(field, size)
    packs, rest = divmod(units, granularity)
    if rest:
        raise SpecError("units", units, f"a multiple of granularity={granularity}")
    ranges = []
    for rank in range(tp_size):
        start = rank * packs // tp_size
        stop = (rank + 1) * packs // tp_size if packs >= tp_size else start + 1
        ranges.append(range(start * granularity, stop * granularity))
    return Sharding(units, tuple(ranges))


# An explicit sharding: one range of units for each TP rank, in the order of ranks.
UnitRanges = tuple[range, ...]


def explicit_shardings(value: object, keys: str) -> Frozen[Any, UnitRanges]:
    """Return an immutable copy of a mapping to explicit shardings.

    The ranges are checked later by `explicit_sharding`, when the number of units is known.

    Args:
        value: The mapping from the user.
        keys: Description of its keys for the error, such as "part names".
    """
    shardings = mapping("shardings", value, f"{keys} to one range for each TP rank")
    return Frozen(
        {
            key: tuple(ranges) if isinstance(ranges, Iterable) else ranges
            for key, ranges in shardings.items()
        }
    )


def explicit_sharding(field: str, units: int, ranges: object, tp_size: int) -> Sharding:
    """Return the sharding of *units* that gives *ranges* to the ranks.

    Args:
        field: Name of the argument for the error.
        units: Number of units in the whole model.
        ranges: One range for each rank.
        tp_size: Number of ranks.

    Raises:
        SpecError: If there is not one range for each rank, or the distinct ranges overlap, or they
            leave out a unit.

    >>> explicit_sharding("shardings[3]", 3, (range(0, 2), range(2, 3)), 2).holders
    ((0,), (1,))
    """
    if not isinstance(ranges, tuple) or len(ranges) != tp_size:
        raise SpecError(field, ranges, f"one range for each of the {tp_size} TP ranks")
    sharding = Sharding(units, tuple(plain_range(field, own) for own in ranges))
    fault = cover_fault(sharding.owned, range(units))
    if fault is not None:
        rule = f"ranges must be equal or disjoint and cover range(0, {units})"
        raise SpecError(field, ranges, rule=f"{rule}, but units {fault.where} are {fault.kind}")
    return sharding


def check_granularity(field: str, sharding: Sharding, granularity: int) -> Sharding:
    """Return *sharding* if each range starts and stops at a multiple of *granularity*."""
    for own in sharding.owned:
        if own.start % granularity or own.stop % granularity:
            raise SpecError(field, own, f"multiples of granularity={granularity}")
    return sharding
