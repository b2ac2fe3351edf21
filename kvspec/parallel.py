"""Who owns what: ranks as coordinates, and the deal of a part's units to the TP ranks.

Law: ownership is input. The default deal is contiguous and balanced and equals every engine's
where the units divide; an engine that deals unevenly says so, and the algebra takes it as given.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from functools import lru_cache

import attrs

from kvspec.errors import SpecError
from kvspec.ranges import EMPTY, cover_fault, plain_range, positive_int


@attrs.frozen(order=True)
class RankId:
    """One rank of an engine, as named coordinates: pipeline stage, prefill-context and TP rank."""

    pp: int = 0
    pcp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return f"pp{self.pp}.pcp{self.pcp}.tp{self.tp}" if self.pp or self.pcp else f"tp{self.tp}"


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


@lru_cache(maxsize=65536)
def default_deal(units: int, tp_size: int, deal_in: int = 1) -> Deal:
    """Return the contiguous, balanced deal of *units* over *tp_size* ranks.

    With U = units / deal_in pieces, rank r of T owns pieces [r U // T, (r + 1) U // T) where U >= T
    and otherwise the one piece r U // T, so that neighbouring ranks are replicas.

    >>> default_deal(8, 3).ranges
    (range(0, 2), range(2, 5), range(5, 8))
    >>> default_deal(2, 4).ranges
    (range(0, 1), range(0, 1), range(1, 2), range(1, 2))
    """
    pieces, rest = divmod(units, deal_in)
    if rest:
        raise SpecError("units", units, f"a multiple of deal_in={deal_in}")
    ranges = []
    for rank in range(tp_size):
        start = rank * pieces // tp_size
        stop = (rank + 1) * pieces // tp_size if pieces >= tp_size else start + 1
        ranges.append(range(start * deal_in, stop * deal_in))
    return Deal(units, tuple(ranges))


def _checked_deal(units: int, ranges: tuple[range, ...], tp_size: int) -> Deal:
    field = f"unit_deals[{units}]"
    if len(ranges) != tp_size:
        raise SpecError(field, ranges, f"one range for each of the {tp_size} TP ranks")
    deal = Deal(units, tuple(plain_range(field, each) for each in ranges))
    fault = cover_fault(deal.owned, range(units))
    if fault is not None:
        wanted = f"equal or disjoint ranges that cover 0..{units}"
        raise SpecError(field, ranges, f"{wanted}; units {fault.where} are {fault.kind}")
    return deal


@attrs.frozen(kw_only=True)
class ParallelConfig:
    """The parallel sizes of one engine.

    *interleave_size*: tokens stored on one context rank before the next. *unit_deals*: explicit
    deals, from a part's number of units to one range of units for each TP rank; every part with
    that many units is dealt so. A range is a whole number of the part's `deal_in`.
    """

    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    pcp_size: int = 1
    interleave_size: int = 1
    unit_deals: Mapping[int, tuple[range, ...]] = attrs.field(factory=dict)
    _deals: dict[int, Deal] = attrs.field(init=False, factory=dict, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "dcp_size", "pcp_size", "interleave_size"):
            positive_int(name, getattr(self, name))
        for units, ranges in self.unit_deals.items():
            positive_int("unit_deals", units)
            self._deals[units] = _checked_deal(units, tuple(ranges), self.tp_size)

    @property
    def ranks(self) -> tuple[RankId, ...]:
        """Every rank of the engine, ascending."""
        return tuple(
            RankId(pp, pcp, tp)
            for pp in range(self.pp_size)
            for pcp in range(self.pcp_size)
            for tp in range(self.tp_size)
        )

    def check_rank(self, rank: RankId, field: str = "rank") -> RankId:
        """Return *rank* if this engine has it; else raise `SpecError` naming *field*."""
        sizes = (self.pp_size, self.pcp_size, self.tp_size)
        if not isinstance(rank, RankId):
            raise SpecError(field, rank, "a RankId")
        if not all(0 <= at < size for at, size in zip(attrs.astuple(rank), sizes, strict=True)):
            wanted = f"pp < {self.pp_size}, pcp < {self.pcp_size}, tp < {self.tp_size}"
            raise SpecError(field, rank, f"{wanted}, none negative")
        return rank

    def deal(self, units: int, deal_in: int = 1) -> Deal:
        """Return the deal of a part with *units* units, dealt in multiples of *deal_in*."""
        explicit = self._deals.get(units)
        if explicit is None:
            return default_deal(units, self.tp_size, deal_in)
        for own in explicit.owned:
            if own.start % deal_in or own.stop % deal_in:
                raise SpecError(f"unit_deals[{units}]", own, f"multiples of deal_in={deal_in}")
        return explicit
