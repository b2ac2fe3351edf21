"""Record which ranges are busy: bytes of transfers in flight, or blocks of loads.

Invariant: no exclusive claim overlaps another claim of the same place. Shared claims may overlap
each other, as two transfers may read the same bytes.

`kvspec.nixl` claims bytes here, and `kvspec.session` claims blocks. This module only computes with
numbers. It has no lock: the caller holds one. Each change of a place is one assignment, so an
interrupt leaves the old state or the new one.

How it works:
    A *place* is a space of numbers, such as the memory of one peer or the blocks of one pool. An
    *owner* claims half-open ranges of a place, and releases all its claims at once. Both may be any
    hashable objects.

    >>> busy = BusyRanges()
    >>> busy.claim("a", "pool", np.array([7, 3]), np.array([9, 4]))  # 3, 7 and 8
    >>> busy.claim("b", "pool", np.array([4]), np.array([7]))  # 4, 5 and 6
    >>> busy.claim("c", "pool", np.array([0, 8]), np.array([1, 12]))  # 0, and 8 to 11
    Conflict(owner='a', start=8)
    >>> busy.release("a")
    >>> busy.claim("c", "pool", np.array([0, 8]), np.array([1, 12]))

    All ranges of a place are kept as two sorted arrays, the starts and the ends. The number of
    ranges that overlap [s, e) is the number of starts below e minus the number of ends up to s.
    So a claim needs two bisections for each of its ranges, however many owners there are, and the
    rule holds for ranges that overlap each other as well. The owner in conflict is searched for
    only if there is a conflict.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from kvspec.ownership.tokens import Ints

if TYPE_CHECKING:
    from numpy.typing import NDArray

Owner = TypeVar("Owner", bound=Hashable)


class Conflict(NamedTuple, Generic[Owner]):
    """A claim that was refused.

    Attributes:
        owner: Owner of the other claim.
        start: A number that both claims contain.
    """

    owner: Owner
    start: int


class Ranges(NamedTuple):
    """Non-empty ranges, which may overlap. Both arrays are sorted on their own."""

    starts: Ints
    ends: Ints

    def overlaps(self, other: Ranges) -> NDArray[np.bool_]:
        """Return for each range of *other* whether it overlaps one of these."""
        below = self.starts.searchsorted(other.ends, side="left")
        return np.asarray(below > self.ends.searchsorted(other.starts, side="right"))


_NONE = Ranges(np.empty(0, np.int64), np.empty(0, np.int64))


def united(starts: Ints, ends: Ints) -> Ranges:
    """Return non-empty ranges in any order as disjoint ranges that do not touch."""
    if (starts[1:] < starts[:-1]).any():
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    if len(starts) == 1:
        return Ranges(starts, ends)
    reach = np.maximum.accumulate(ends)
    # Whether a new range begins before each element, and after the last one.
    begins = np.ones(len(starts) + 1, np.bool_)
    begins[1:-1] = starts[1:] > reach[:-1]
    return Ranges(starts[begins[:-1]], reach[begins[1:]])


def _merged(some: Ints, others: Ints) -> Ints:
    """Return two sorted arrays as one. A stable sort only merges them; `np.insert` is slower."""
    merged = np.concatenate((some, others))
    merged.sort(kind="stable")
    return merged


def _without(some: Ints, others: Ints) -> Ints:
    """Return sorted numbers without *others*, all of which they contain."""
    keep = np.ones(len(some), np.bool_)
    keep[some.searchsorted(others)] = False
    return some[keep]


class _PlaceClaims(NamedTuple, Generic[Owner]):
    """All claims of one place. It is never changed, only replaced.

    Attributes:
        claims: For each owner, pairs of ranges and whether they are shared.
        kept: The ranges of all exclusive claims, and of all shared claims.
    """

    claims: Mapping[Owner, tuple[tuple[Ranges, bool], ...]]
    kept: tuple[Ranges, ...]

    def conflict(self, start: int, end: int, *, shared: bool) -> Conflict[Owner]:
        """Return the first claim that overlaps the busy range from *start* to *end*."""
        wanted = Ranges(np.array([start]), np.array([end]))
        owner, ranges = next(
            (owner, ranges)
            for owner, claimed in self.claims.items()
            for ranges, is_shared in claimed
            if not (shared and is_shared) and ranges.overlaps(wanted).any()
        )
        # The ranges of one claim are disjoint, so both arrays have the same order.
        number = ranges.ends.searchsorted(start, side="right")
        return Conflict(owner, max(int(ranges.starts[number]), start))


class BusyRanges(Generic[Owner]):
    """Claimed ranges by place and owner."""

    def __init__(self) -> None:
        self._places: dict[Hashable, _PlaceClaims[Owner]] = {}

    def claim(
        self, owner: Owner, place: Hashable, starts: Ints, ends: Ints, *, shared: bool = False
    ) -> Conflict[Owner] | None:
        """Claim ranges for *owner*, unless one is busy.

        Args:
            owner: Owner of the claim. It may claim several places, and one place several times.
            place: Place of the ranges.
            starts: First number of each range, in any order.
            ends: Number after each range. No range is empty. Ranges may overlap each other.
            shared: Whether other shared claims may overlap this one.

        Returns:
            None if the ranges are claimed. Otherwise a conflict, and nothing is claimed. The
            owner's own earlier claims can be in conflict as well.
        """
        if not len(starts):
            return None
        ranges = united(starts, ends)
        known = self._places.get(place) or _PlaceClaims({}, (_NONE, _NONE))
        for kept in known.kept[:1] if shared else known.kept:
            busy = kept.overlaps(ranges)
            if busy.any():
                first = int(busy.argmax())
                start, end = int(ranges.starts[first]), int(ranges.ends[first])
                return known.conflict(start, end, shared=shared)
        claims = {**known.claims, owner: (*known.claims.get(owner, ()), (ranges, shared))}
        rest = list(known.kept)
        rest[shared] = Ranges(*map(_merged, rest[shared], ranges))
        self._places[place] = _PlaceClaims(claims, tuple(rest))
        return None

    def release(self, owner: Owner) -> None:
        """Release all claims of *owner*. Do nothing if it has none."""
        for place, (claims, kept) in tuple(self._places.items()):
            if owner not in claims:
                continue
            rest = list(kept)
            for ranges, shared in claims[owner]:
                rest[shared] = Ranges(*map(_without, rest[shared], ranges))
            others = {other: claimed for other, claimed in claims.items() if other != owner}
            if others:
                self._places[place] = _PlaceClaims(others, tuple(rest))
            else:
                del self._places[place]
