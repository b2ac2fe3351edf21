"""Intervals and the exact-cover check.

Law: does not know who is producer and who is consumer. There is one empty interval,
``range(0, 0)``; operations on intervals are total.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs

from kvspec.errors import SpecError

EMPTY = range(0)
"""The one empty interval."""


def shift(a: range, by: int) -> range:
    """Return the interval moved by *by*."""
    return range(a.start + by, a.stop + by)


@attrs.frozen
class CoverFault:
    """The first place where intervals fail to tile a target exactly once."""

    kind: Literal["missing", "double", "outside"]
    where: range


def cover_fault(intervals: Iterable[range], target: range) -> CoverFault | None:
    """Return the first fault of *intervals* as an exact tiling of *target*, or None.

    Intervals come in any order. Every integer of *target* must lie in exactly one interval, and no
    interval may reach outside.

    >>> cover_fault([range(2, 4), range(0, 2)], range(4))
    >>> cover_fault([range(0, 2), range(3, 4)], range(4))
    CoverFault(kind='missing', where=range(2, 3))
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
    """Return *value* if it is a ``range`` of step 1 that starts at 0 or later."""
    if not isinstance(value, range) or value.step != 1 or value.start < 0:
        raise SpecError(field, value, "a range of step 1 with start >= 0")
    return value or EMPTY
