"""Spans of bytes that repeat: those of each tile in each run, as sums of two numbers.

Law: what is told of a product is true of its spans one by one, but takes as long as its two sides
together, not as their product.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.inputs import MOST
from kvspec.nixl.rows import Ints


@attrs.frozen(eq=False)
class Offsets:
    """Where something begins: int64 of shape (4, n), addresses or bytes from there on.

    Rows: in the destination; in the source; a number of the memory in the destination; and of that
    in the source.
    """

    columns: Ints

    @staticmethod
    def of(destination: Ints, source: Ints, *areas: Ints) -> Offsets:
        """Return offsets in such *areas*, none of which matters unless given."""
        columns = np.zeros((4, len(destination)), np.int64)
        columns[0], columns[1] = destination, source
        for row, area in enumerate(areas, 2):
            columns[row] = area
        return Offsets(columns)

    def __len__(self) -> int:
        return len(self.destination)

    @property
    def destination(self) -> Ints:
        """Where they begin in the destination."""
        return np.asarray(self.columns[0])

    @cached_property
    def gaps(self) -> Ints:
        """From the begin of each in the destination to that of the next."""
        return np.asarray(self.destination[1:] - self.destination[:-1])

    @cached_property
    def min_gap(self) -> int:
        """The least of the gaps; more than any number if there is none."""
        return int(self.gaps.min()) if len(self) > 1 else MOST

    def follows(self, destination: int | Ints, source: int | Ints) -> npt.NDArray[np.bool_]:
        """Whether each but the first begins so many bytes on, on both sides, in one memory."""
        follows = self.gaps == destination
        for row, wanted in ((1, source), (2, 0), (3, 0)):
            if not np.count_nonzero(follows):
                break
            column = self.columns[row]
            follows &= column[1:] - column[:-1] == wanted
        return np.asarray(follows)

    def disjoint(self, destination: int, source: int) -> bool:
        """Whether what reaches so far from each, in order, shares no byte, and none follows."""
        min_gap = self.min_gap
        return min_gap > destination or (
            min_gap == destination and not np.count_nonzero(self.follows(destination, source))
        )

    def reach(self, size: int) -> tuple[int, int]:
        """Return the bytes from the first begin to the last end, of *size*: destination, source."""
        destination, source = (self.columns[:2, -1] - self.columns[:2, 0]).tolist()
        return destination + size, source + size

    def ascending(self) -> tuple[Offsets, Ints]:
        """Return them in order of the destination, and that order."""
        order = self.destination.argsort(kind="stable")
        return self.take(order), order

    def take(self, which: Ints) -> Offsets:
        """Return some of them."""
        return Offsets(self.columns[:, which])

    def plus(self, other: Offsets) -> Offsets:
        """Return the sums of each of these and all of *other*."""
        return Offsets((self.columns[:, :, None] + other.columns[:, None]).reshape(4, -1))

    def less(self, other: Offsets) -> Offsets | None:
        """Return what *other* needs to be these, as one offset; None if that differs."""
        if len(self) != len(other):
            return None
        shift = self.columns - other.columns
        return None if (shift != shift[:, :1]).any() else Offsets(shift[:, :1])


@attrs.frozen(eq=False)
class RepeatedRuns:
    """Where runs begin, *every* one, in order of the destination, and the sums that they are.

    Of runs at 0 4, 100 104, 200 204, a group *begins* at 0, 100, 200, each a *pattern* of 0 4.
    """

    every: Offsets
    begins: Offsets
    pattern: Offsets
    _inside: dict[RepeatedRuns, Offsets | None] = attrs.field(init=False, factory=dict)

    @staticmethod
    def of(starts: Offsets, min_gap: int) -> RepeatedRuns:
        """Return runs in order, in groups of those less than *min_gap* bytes from each other."""
        if starts.min_gap < 0:
            starts, _ = starts.ascending()
        new = np.flatnonzero(starts.gaps >= min_gap)
        many = int(new[0]) + 1 if len(new) else len(starts)
        first = starts.take(np.arange(many))
        pattern = Offsets(first.columns - first.columns[:, :1])
        repeated = Offsets(starts.columns[:, ::many])
        if len(starts) % many or (repeated.plus(pattern).columns != starts.columns).any():
            return RepeatedRuns(starts, starts, _ZERO)
        return RepeatedRuns(starts, repeated, pattern)

    def inside(self, other: RepeatedRuns) -> Offsets | None:
        """Return the pattern of *other*, counted from these groups; worked out once.

        None where its groups do not lie alike in these.
        """
        if other not in self._inside:
            shift = other.begins.less(self.begins)
            self._inside[other] = shift and shift.plus(other.pattern)
        return self._inside[other]


_ZERO = Offsets(np.zeros((4, 1), np.int64))


@attrs.frozen(eq=False)
class ProductSpans:
    """Spans of *nbytes* at outer + inner, each outer farther from the next than the inners reach.

    Of tiles 1, 2, 4 of runs A, B and runs a, b of groups X, Y, the outer are A and B, or 1, 2 and
    4, or X and Y:

        A1 A2 A4 ....... B1 B2 B4 .......
        A1 B1 .. A2 B2 .. ..... A4 B4 ...
        Xa1 Xb1 . Xa2 Xb2 ..... Xa4 Xb4 ....... Ya1 Yb1 . Ya2 Yb2 ..... Ya4 Yb4
    """

    outer: Offsets
    inner: Offsets
    nbytes: Ints

    @staticmethod
    def of(runs: RepeatedRuns, tiles: Offsets, nbytes: Ints) -> ProductSpans | None:
        """Return the product of *runs* and *tiles* of *nbytes*; None where they make none.

        Tiles ascend in the destination, none over another.
        """
        size = int(nbytes[-1])
        if runs.every.disjoint(*tiles.reach(size)):
            return ProductSpans(runs.every, tiles, nbytes)
        if np.count_nonzero(nbytes != size):
            return None
        if runs.every.disjoint(size, size) and tiles.disjoint(*runs.every.reach(size)):
            return ProductSpans(tiles, runs.every, np.full(len(runs.every), size))
        if runs.pattern.disjoint(size, size) and tiles.disjoint(*runs.pattern.reach(size)):
            inner = tiles.plus(runs.pattern)
            return ProductSpans.of_repeated(runs, inner, np.full(len(inner), size))
        return None

    @staticmethod
    def of_repeated(runs: RepeatedRuns, inner: Offsets, nbytes: Ints) -> ProductSpans | None:
        """Return the product of the groups of *runs* and what is *inner* to them, in order."""
        fits = runs.begins.disjoint(*inner.reach(int(nbytes[-1])))
        return ProductSpans(runs.begins, inner, nbytes) if fits else None

    def __len__(self) -> int:
        return len(self.outer) * len(self.inner)

    @property
    def extent(self) -> tuple[int, int]:
        """Where the first span begins, and where the last ends."""
        last = self.outer.destination[-1] + self.inner.destination[-1] + self.nbytes[-1]
        return int(self.outer.destination[0] + self.inner.destination[0]), int(last)
