"""Look up spans of bytes by bisection. The spans are disjoint and sorted by address."""

from __future__ import annotations

import attrs
import numpy as np

from kvspec.nixl.rows import Ints


def _none() -> Ints:
    return np.empty(0, np.int64)


@attrs.frozen(eq=False)
class Spans:
    """Disjoint spans [*start*, *end*), in order of address.

    >>> busy = Spans(np.array([10, 40]), np.array([20, 50]))  # 10..19 and 40..49
    >>> busy.meets(np.array([20, 0]), np.array([40, 10]))  # 20..39 and 0..9
    False
    >>> busy.meets(np.array([60, 30]), np.array([70, 41]))  # 60..69 and 30..40
    True
    >>> busy.plus(Spans(np.array([20]), np.array([30]))).start.tolist()
    [10, 20, 40]
    """

    start: Ints = attrs.field(factory=_none)
    end: Ints = attrs.field(factory=_none)

    def meets(self, start: Ints, end: Ints) -> bool:
        """Whether a byte of spans [*start*, *end*), in any order, lies in these."""
        if not len(self.start):
            return False
        last = np.searchsorted(self.start, end, side="left") - 1  # that begins before each end
        return bool(((last >= 0) & (self.end[last] > start)).any())

    def plus(self, other: Spans) -> Spans:
        """Return these and *other*, which must be disjoint."""
        if not len(self.start):
            return other
        places = np.searchsorted(self.start, other.start)
        start = np.insert(self.start, places, other.start)
        return Spans(start, np.insert(self.end, places, other.end))

    def minus(self, other: Spans) -> Spans:
        """Return these without *other*, which were added before."""
        if len(self.start) == len(other.start):
            return Spans()
        places = np.searchsorted(self.start, other.start)
        return Spans(np.delete(self.start, places), np.delete(self.end, places))


def spans_of(start: Ints, nbytes: Ints) -> Spans:
    """Return disjoint spans of *nbytes* from *start* on, in any order: those that touch as one."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], (start + nbytes)[order]
    separate = np.flatnonzero(start[1:] != end[:-1])
    return Spans(start[np.append(0, separate + 1)], end[np.append(separate, len(end) - 1)])
