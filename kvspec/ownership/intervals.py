"""Intervals of integers, and the check that intervals cover a target exactly once.

An interval is a `range` of step 1.

Invariant: there is one empty interval, `range(0, 0)`. The one exception is `LayerSpec.live_tokens`:
its start has a meaning even if the range is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs

from kvspec.errors import SpecError

# `range(5, 5) == range(0)`, but their starts differ. With one empty interval, starts compare too.
EMPTY = range(0)


def shift(a: range, by: int) -> range:
    """Return interval *a*, moved by *by*.

    >>> shift(range(2, 4), 10)
    range(12, 14)
    """
    return range(a.start + by, a.stop + by)


@attrs.frozen
class CoverFault:
    """The first place where intervals do not cover a target exactly once.

    Attributes:
        kind: "missing" if no interval contains the place, "double" if two do, "outside" if an
            interval leaves the target.
        where: The integers of that place.
    """

    kind: Literal["missing", "double", "outside"]
    where: range


def cover_fault(intervals: Iterable[range], target: range) -> CoverFault | None:
    """Return the first place where *intervals* do not cover *target* exactly once.

    Args:
        intervals: The intervals, in any order. Empty ones are ignored.
        target: The integers that must each lie in exactly one interval.

    Returns:
        The fault with the lowest position, or None if the cover is exact. An interval that leaves
        the target is returned even if a place before it is missing.

    >>> cover_fault([range(2, 4), range(0, 2)], range(4))
    >>> cover_fault([range(0, 2), range(3, 4)], range(4))
    CoverFault(kind='missing', where=range(2, 3))
    >>> cover_fault([range(0, 3), range(2, 4)], range(4))
    CoverFault(kind='double', where=range(2, 3))
    """
    reached = target.start
    for interval in sorted(intervals, key=lambda r: (r.start, r.stop)):
        if not interval:
            continue
        if interval.start < target.start or interval.stop > target.stop:
            return CoverFault("outside", interval)
        if interval.start > reached:
            return CoverFault("missing", range(reached, interval.start))
        if interval.start < reached:
            return CoverFault("double", range(interval.start, min(reached, interval.stop)))
        reached = interval.stop
    if reached < target.stop:
        return CoverFault("missing", range(reached, target.stop))
    return None


def plain_range(field: str, value: object) -> range:
    """Return *value* if it is an interval that starts at 0 or later, else raise `SpecError`."""
    if not isinstance(value, range) or value.step != 1 or value.start < 0:
        raise SpecError(field, value, "a range of step 1 with start >= 0")
    return value or EMPTY
