"""How often each address is written.

Law: counts bytes, whatever the order, the overlaps and the cuts of the writes.
"""

from __future__ import annotations

import numpy as np

from kvspec.ownership.tokens import Ints


class Coverage:
    """The writes of one rank: how many of them touch each byte."""

    def __init__(self, start: Ints, length: Ints) -> None:
        """Take the writes' first addresses and their lengths in bytes."""
        ends = np.concatenate([start, start + length])
        steps = np.repeat([1, -1], len(start))
        order = np.argsort(ends, kind="stable")
        self._at = np.concatenate([[0], ends[order]])
        count = np.concatenate([[0], np.cumsum(steps[order])])
        widths = np.append(np.diff(self._at), 0)
        self._count = count
        self._none = np.concatenate([[0], np.cumsum(widths * (count == 0))])
        self._many = np.concatenate([[0], np.cumsum(widths * (count > 1))])
        self.written = int((widths * (count > 0)).sum())

    def missing(self, start: Ints, length: int) -> Ints:
        """Return how many bytes of [start, start + length) no write touches."""
        return self._upto(start + length, self._none, 0) - self._upto(start, self._none, 0)

    def doubled(self, start: Ints, length: int) -> Ints:
        """Return how many bytes of [start, start + length) several writes touch."""
        return self._upto(start + length, self._many, 2) - self._upto(start, self._many, 2)

    def _upto(self, address: Ints, total: Ints, least: int) -> Ints:
        at = np.searchsorted(self._at, address, "right") - 1
        count = self._count[at]
        inside = count == 0 if least == 0 else count >= least
        return np.asarray(total[at] + (address - self._at[at]) * inside, np.int64)
