"""The sharding of a part's units to the TP ranks.

Law: ownership is input. The default sharding is contiguous and balanced and equals every engine's
where the units divide; an engine that shards unevenly says so, and the algebra takes it as given.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import Frozen, mapping, positive_int
from kvspec.ownership.intervals import EMPTY, cover_fault, plain_range


@attrs.frozen(eq=False)
class Sharding:
    """The units that each TP rank owns of one part.

    *ranges* holds one range of global units for each rank; two ranks own the same range (they are
    replicas) or disjoint ones. *owned* are the distinct ranges in ascending order, *holders* the
    ranks of each, ascending.
    """

    units: int
    ranges: tuple[range, ...]
    owned: tuple[range, ...] = attrs.field(init=False)
    holders: tuple[tuple[int, ...], ...] = attrs.field(init=False)
    _starts: tuple[int, ...] = attrs.field(init=False)
    _stops: tuple[int, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        ranks: dict[range, list[int]] = {}
        for rank, own in enumerate(self.ranges):
            if own:
                ranks.setdefault(own, []).append(rank)
        owned = tuple(sorted(ranks, key=lambda r: r.start))
        object.__setattr__(self, "owned", owned)
        object.__setattr__(self, "holders", tuple(tuple(ranks[own]) for own in owned))
        object.__setattr__(self, "_starts", tuple(own.start for own in owned))
        object.__setattr__(self, "_stops", tuple(own.stop for own in owned))

    def classes(self, units: range) -> range:
        """Return the indices into `owned` of the ranges that meet *units*."""
        if not units:
            return EMPTY
        return range(bisect_right(self._stops, units.start), bisect_left(self._starts, units.stop))

    def ranks_of(self, units: range) -> tuple[int, ...]:
        """Return, ascending, the ranks that own any of *units*."""
        classes = self.classes(units)
        if len(classes) == 1:
            return self.holders[classes.start]
        return tuple(sorted(rank for i in classes for rank in self.holders[i]))


@lru_cache(maxsize=65536, typed=True)
def even_sharding(units: int, tp_size: int, granularity: int = 1) -> Sharding:
    """Return the contiguous, balanced sharding of *units* over *tp_size* ranks.

    With U = units / granularity packs, rank r of T owns packs [r U // T, (r + 1) U // T) where U >=
    T and otherwise the one pack r U // T, so that neighbouring ranks are replicas.

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


Ranges = tuple[range, ...]
"""An explicit sharding: one range of units for each TP rank, in order."""


def explicit_shardings(given: object, wanted: str) -> Frozen[Any, Ranges]:
    """Return a copy of explicit shardings, by whatever names them.

    `explicit_sharding` checks each.
    """
    shardings = mapping("shardings", given, f"{wanted} to one range for each TP rank")
    return Frozen(
        {
            key: tuple(ranges) if isinstance(ranges, Iterable) else ranges
            for key, ranges in shardings.items()
        }
    )


def explicit_sharding(field: str, units: int, ranges: object, tp_size: int) -> Sharding:
    """Return the sharding of *units* by *ranges*.

    `SpecError` unless they are one a rank, and cover.
    """
    if not isinstance(ranges, tuple) or len(ranges) != tp_size:
        raise SpecError(field, ranges, f"one range for each of the {tp_size} TP ranks")
    sharding = Sharding(units, tuple(plain_range(field, one) for one in ranges))
    fault = cover_fault(sharding.owned, range(units))
    if fault is not None:
        wanted = f"equal or disjoint ranges that cover 0..{units}"
        raise SpecError(field, ranges, f"{wanted}; units {fault.where} are {fault.kind}")
    return sharding


def check_whole(field: str, sharding: Sharding, granularity: int) -> Sharding:
    """Return *sharding* if its ranges are whole multiples of *granularity*.

    Else raise `SpecError`.
    """
    for own in sharding.owned:
        if own.start % granularity or own.stop % granularity:
            raise SpecError(field, own, f"multiples of granularity={granularity}")
    return sharding
