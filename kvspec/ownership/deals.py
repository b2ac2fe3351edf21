"""The deal of a part's units to the TP ranks.

Law: ownership is input. The default deal is contiguous and balanced and equals every engine's where
the units divide; an engine that deals unevenly says so, and the algebra takes it as given.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.ownership.intervals import EMPTY, cover_fault, plain_range


@attrs.frozen(eq=False)
class Deal:
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
def default_deal(units: int, tp_size: int, deal_in: int = 1) -> Deal:
    """Return the contiguous, balanced deal of *units* over *tp_size* ranks.

    With U = units / deal_in pieces, rank r of T owns pieces [r U // T, (r + 1) U // T) where U >= T
    and otherwise the one piece r U // T, so that neighbouring ranks are replicas.

    >>> default_deal(8, 3).ranges
    (range(0, 2), range(2, 5), range(5, 8))
    >>> default_deal(2, 4).ranges
    (range(0, 1), range(0, 1), range(1, 2), range(1, 2))
    """
    for field, size in (("units", units), ("tp_size", tp_size), ("deal_in", deal_in)):
        positive_int(field, size)
    pieces, rest = divmod(units, deal_in)
    if rest:
        raise SpecError("units", units, f"a multiple of deal_in={deal_in}")
    ranges = []
    for rank in range(tp_size):
        start = rank * pieces // tp_size
        stop = (rank + 1) * pieces // tp_size if pieces >= tp_size else start + 1
        ranges.append(range(start * deal_in, stop * deal_in))
    return Deal(units, tuple(ranges))


def checked_deal(units: int, given: object, tp_size: int) -> Deal:
    """Return an explicit deal if *given* has a range for each rank and they cover *units*."""
    field = f"unit_deals[{units}]"
    ranges = tuple(given) if isinstance(given, Iterable) else ()
    if len(ranges) != tp_size:
        raise SpecError(field, ranges or given, f"one range for each of the {tp_size} TP ranks")
    deal = Deal(units, tuple(plain_range(field, each) for each in ranges))
    fault = cover_fault(deal.owned, range(units))
    if fault is not None:
        wanted = f"equal or disjoint ranges that cover 0..{units}"
        raise SpecError(field, ranges, f"{wanted}; units {fault.where} are {fault.kind}")
    return deal
