"""How often each address is touched.

Law: counts bytes, whatever the order, the overlaps and the cuts of the spans.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from kvspec.ownership.tokens import Ints


class Coverage:
    """Spans of addresses, and how many of them touch each byte.

    The address line is cut where a span begins or ends; every segment between two cuts is touched
    by the same spans. Here 0..8 is written, then 4..6 once more, and 8..12:

    >>> writes = Coverage(np.array([0, 4, 8]), np.array([8, 2, 4]))
    >>> writes.cuts.tolist(), writes.times.tolist()
    ([-1, 0, 4, 6, 8, 12], [0, 1, 2, 1, 1, 0])
    >>> writes.span[3:5].tolist()
    [0, 2]
    >>> writes.first_outside(np.array([6]), np.array([8]))
    (0, 12)

    *cuts* are where segments begin, the first before every address, the last without an end;
    *times* says how often each is touched, and *span* by which, where that is once.
    """

    def __init__(self, start: Ints, length: Ints) -> None:
        """Take the spans' first addresses and their lengths in bytes."""
        number, full = np.arange(len(start)), length > 0
        start, stop, number = start[full], (start + length)[full], number[full]
        ends = np.concatenate([[-1], start, stop])
        order = np.argsort(ends, kind="stable")
        ends = ends[order]
        last = np.append(ends[1:] != ends[:-1], [True])
        self.cuts: Ints = ends[last]
        self.times = _running(np.ones_like(number), order)[last]
        # The sum of the numbers of all spans here: of one span alone, its number.
        self.span = _running(number, order)[last]

    def segments(self, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """Return every (question, segment) for which [start, stop) meets the segment, in order.

        No question is empty.

        >>> writes = Coverage(np.array([0, 4, 8]), np.array([8, 2, 4]))
        >>> [found.tolist() for found in writes.segments(np.array([0, 5]), np.array([4, 9]))]
        [[0, 1, 1, 1], [1, 2, 3, 4]]
        """
        first = np.searchsorted(self.cuts, start, "right") - 1
        count = np.searchsorted(self.cuts, stop, "left") - first
        question = np.repeat(np.arange(len(start)), count)
        before = np.cumsum(count) - count
        return question, np.arange(len(question)) + (first - before)[question]

    def first_outside(self, start: Ints, length: Ints) -> tuple[int, int] | None:
        """Return (question, address) of the first byte asked about that no span touches."""
        outside = self._untouched_before(start + length) > self._untouched_before(start)
        if not outside.any():
            return None
        which = int(np.argmax(outside))
        asked = start[which : which + 1]
        _, segment = self.segments(asked, asked + length[which])
        bare = segment[self.times[segment] == 0][0]
        return which, max(int(asked[0]), int(self.cuts[bare]))

    def _untouched_before(self, address: Ints) -> Ints:
        """Return how many bytes before each address no span touches."""
        segment = np.searchsorted(self.cuts, address, "right") - 1
        rest = (address - self.cuts[segment]) * (self.times[segment] == 0)
        return np.asarray(self._untouched[segment] + rest, np.int64)

    @cached_property
    def _untouched(self) -> Ints:
        """How many bytes no span touches, before each cut."""
        bare = np.diff(self.cuts) * (self.times[:-1] == 0)
        return np.concatenate([[0], np.cumsum(bare)])


def _running(value: Ints, order: Ints) -> Ints:
    """Return the sum over all spans that have begun and not ended, at each end in *order*."""
    return np.cumsum(np.concatenate([[0], value, -value])[order])


def merged(start: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Return the spans that touch the same bytes and neither overlap nor follow each other.

    >>> [found.tolist() for found in merged(np.array([8, 0, 2]), np.array([4, 4, 6]))]
    [[0], [12]]
    """
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate((start + length)[order])
    new = np.append(True, start[1:] > stop[:-1]) if len(start) else np.empty(0, np.bool_)
    last = np.append(new[1:], True) if len(start) else new
    return start[new], stop[last] - start[new]
