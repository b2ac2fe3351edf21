"""The deal of a part's units to the TP ranks.

Law: ownership is input. The default deal is contiguous and balanced and equals every engine's where
the units divide; an engine that deals unevenly says so, and the algebra takes it as given.
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


Ranges = tuple[range, ...]
"""An explicit deal: one range of units for each TP rank, in order."""


def explicit_deals(given: object, wanted: str) -> Frozen[Any, Ranges]:
    """Return a copy of explicit deals, by whatever names them; `explicit_deal` checks each."""
    deals = mapping("unit_deals", given, f"{wanted} to one range for each TP rank")
    return Frozen(
        {
            key: tuple(ranges) if isinstance(ranges, Iterable) else ranges
            for key, ranges in deals.items()
        }
    )


def explicit_deal(field: str, units: int, ranges: object, tp_size: int) -> Deal:
    """Return the deal of *units* by *ranges*; `SpecError` unless they are one a rank, and cover."""
    if not isinstance(ranges, tuple) or len(ranges) != tp_size:
        raise SpecError(field, ranges, f"one range for each of the {tp_size} TP ranks")
    deal = Deal(units, tuple(plain_range(field, one) for one in ranges))
    fault = cover_fault(deal.owned, range(units))
    if fault is not None:
        wanted = f"equal or disjoint ranges that cover 0..{units}"
        raise SpecError(field, ranges, f"{wanted}; units {fault.where} are {fault.kind}")
    return deal


def check_whole(field: str, deal: Deal, deal_in: int) -> Deal:
    """Return *deal* if its ranges are whole multiples of *deal_in*; else raise `SpecError`."""
    for own in deal.owned:
        if own.start % deal_in or own.stop % deal_in:
            raise SpecError(field, own, f"multiples of deal_in={deal_in}")
    return deal
