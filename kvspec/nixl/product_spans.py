"""Check spans of bytes that are sums of two offsets, such as one tile in each of many runs.

Invariant: the answers are those for all spans one by one. The time grows with the number of outer
plus inner offsets, not with their product.

How it works:
    A selection moves the same tiles of many runs of blocks. Its spans begin at all sums of an
    *outer* and an *inner* offset. Two facts about the sums follow from the two lists alone:

        If the inner spans ascend without overlap, and each gap between outer offsets is larger
        than the reach of all inner spans, then the sums in the order (outer, inner) ascend. No two
        of them overlap. Two sums touch only if two inner spans touch.

    If a gap equals the reach, the last span of one outer offset may touch the first of the next.
    They are joined only if they touch on the other side as well, which `Offsets.follows` checks.

    `ProductSpans.of` tries three ways to choose the outer offsets: runs, tiles, groups of runs.
    This picture shows tiles 1, 2, 4 of runs A, B, and runs a, b of groups X, Y:

        runs      A1 A2 A4 ....... B1 B2 B4 .......
        tiles     A1 B1 .. A2 B2 .. ..... A4 B4 ...
        groups    Xa1 Xb1 . Xa2 Xb2 ..... Xa4 Xb4 ....... Ya1 Yb1 . Ya2 Yb2 ..... Ya4 Yb4

    Groups come from `RepeatedRuns.of`. Here six runs are three groups of two:

    >>> def offsets(*begins):
    ...     return Offsets.of(np.array(begins), np.array(begins))
    >>> runs = RepeatedRuns.of(offsets(0, 4, 100, 104, 200, 204), min_gap=50)
    >>> runs.begins.destination.tolist(), runs.pattern.destination.tolist()
    ([0, 100, 200], [0, 4])

    Three tiles of 2 bytes at 0, 20, 60 of each run make groups: two runs lie between two tiles,
    and three tiles lie between two groups. Two tiles of 4 bytes at 0 and 8 make runs touch, so no
    way applies, and the spans must be checked one by one:

    >>> product = ProductSpans.of(runs, offsets(0, 20, 60), np.array([2, 2, 2]))
    >>> product.outer.destination.tolist(), product.inner.destination.tolist()
    ([0, 100, 200], [0, 4, 20, 24, 60, 64])
    >>> ProductSpans.of(runs, offsets(0, 8), np.array([4, 4])) is None
    True
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
    """Begins of spans: absolute addresses, or offsets to be added to others.

    Attributes:
        columns: An int64 array of shape (4, n): begin in the destination, begin in the source,
            number of the destination memory, number of the source memory.
    """

    columns: Ints

    @staticmethod
    def of(destination: Ints, source: Ints, *areas: Ints) -> Offsets:
        """Return offsets. *areas* are the numbers of their memories, 0 by default."""
        columns = np.zeros((4, len(destination)), np.int64)
        columns[0], columns[1] = destination, source
        for row, area in enumerate(areas, 2):
            columns[row] = area
        return Offsets(columns)

    def __len__(self) -> int:
        return len(self.destination)

    @property
    def destination(self) -> Ints:
        """Begins in the destination."""
        return np.asarray(self.columns[0])

    @cached_property
    def gaps(self) -> Ints:
        """Distance from each begin in the destination to the next."""
        return np.asarray(self.destination[1:] - self.destination[:-1])

    @cached_property
    def min_gap(self) -> int:
        """The least gap, or a very large number if there is only one offset."""
        return int(self.gaps.min()) if len(self) > 1 else MOST

    def follows(self, destination: int | Ints, source: int | Ints) -> npt.NDArray[np.bool_]:
        """Return for each offset but the first, whether it begins that far behind the one before.

        Both sides must match, and both memories must be the same.
        """
        follows = self.gaps == destination
        for row, wanted in ((1, source), (2, 0), (3, 0)):
            if not np.count_nonzero(follows):
                break
            column = self.columns[row]
            follows &= column[1:] - column[:-1] == wanted
        return np.asarray(follows)

    def disjoint(self, destination: int, source: int) -> bool:
        """Whether spans of this reach neither overlap nor touch on both sides, in this order."""
        min_gap = self.min_gap
        return min_gap > destination or (
            min_gap == destination and not np.count_nonzero(self.follows(destination, source))
        )

    def reach(self, size: int) -> tuple[int, int]:
        """Return the bytes from the first begin to the last end, in destination and source.

        *size*: bytes of the last span.
        """
        destination, source = (self.columns[:2, -1] - self.columns[:2, 0]).tolist()
        return destination + size, source + size

    def ascending(self) -> tuple[Offsets, Ints]:
        """Return the offsets in order of the destination, and the order itself."""
        order = self.destination.argsort(kind="stable")
        return self.take(order), order

    def take(self, which: Ints) -> Offsets:
        """Return the offsets *which*."""
        return Offsets(self.columns[:, which])

    def plus(self, other: Offsets) -> Offsets:
        """Return all sums of one of these and one of *other*. The index of *other* runs faster."""
        return Offsets((self.columns[:, :, None] + other.columns[:, None]).reshape(4, -1))

    def less(self, other: Offsets) -> Offsets | None:
        """Return the shift from *other* to these as one offset, or None if it is not constant."""
        if len(self) != len(other):
            return None
        shift = self.columns - other.columns
        return None if (shift != shift[:, :1]).any() else Offsets(shift[:, :1])


@attrs.frozen(eq=False)
class RepeatedRuns:
    """Runs as sums: groups of runs, and one pattern that all groups share.

    Attributes:
        every: All runs, in order of the destination.
        begins: The first run of each group.
        pattern: The runs of one group, counted from its first.
    """

    every: Offsets
    begins: Offsets
    pattern: Offsets
    _inside: dict[RepeatedRuns, Offsets | None] = attrs.field(init=False, factory=dict)

    @staticmethod
    def of(starts: Offsets, min_gap: int) -> RepeatedRuns:
        """Return *starts* as groups with one pattern. Runs less than *min_gap* apart share a group.

        If the groups differ, each run is a group of its own. The first group determines the
        pattern, and the sums of all begins and the pattern are compared with *starts*.
        """
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
        """Return the pattern of *other*, counted from the begins of these groups.

        The result is None if the groups of *other* do not lie at one shift from these groups. It is
        computed once.
        """
        if other not in self._inside:
            shift = other.begins.less(self.begins)
            self._inside[other] = shift and shift.plus(other.pattern)
        return self._inside[other]


_ZERO = Offsets(np.zeros((4, 1), np.int64))


@attrs.frozen(eq=False)
class ProductSpans:
    """Spans of *nbytes* at all sums of an outer and an inner offset, in ascending order.

    Attributes:
        outer: Each gap is larger than the reach of the inner spans.
        inner: Offsets in ascending order, without overlap.
        nbytes: Bytes of each inner span.
    """

    outer: Offsets
    inner: Offsets
    nbytes: Ints

    @staticmethod
    def of(runs: RepeatedRuns, tiles: Offsets, nbytes: Ints) -> ProductSpans | None:
        """Return the spans of *tiles* in *runs*, or None if no order of them ascends.

        *tiles* must ascend in the destination without overlap. *nbytes* contains their sizes.
        """
        size = int(nbytes[-1])
        if runs.every.disjoint(*tiles.reach(size)):  # A1 A2 A4 ... B1 B2 B4
            return ProductSpans(runs.every, tiles, nbytes)
        # Runs lie between the tiles from here on. Then inner spans need one size.
        if np.count_nonzero(nbytes != size):
            return None
        # A1 B1 ... A2 B2 ... A4 B4
        if runs.every.disjoint(size, size) and tiles.disjoint(*runs.every.reach(size)):
            return ProductSpans(tiles, runs.every, np.full(len(runs.every), size))
        # Xa1 Xb1 . Xa2 Xb2 ... Ya1 Yb1 . Ya2 Yb2
        if runs.pattern.disjoint(size, size) and tiles.disjoint(*runs.pattern.reach(size)):
            inner = tiles.plus(runs.pattern)
            return ProductSpans.of_repeated(runs, inner, np.full(len(inner), size))
        return None

    @staticmethod
    def of_repeated(runs: RepeatedRuns, inner: Offsets, nbytes: Ints) -> ProductSpans | None:
        """Return the spans of *inner* in each group of *runs*, or None if two groups touch."""
        fits = runs.begins.disjoint(*inner.reach(int(nbytes[-1])))
        return ProductSpans(runs.begins, inner, nbytes) if fits else None

    def __len__(self) -> int:
        return len(self.outer) * len(self.inner)

    @property
    def extent(self) -> tuple[int, int]:
        """Begin of the first span and end of the last."""
        last = self.outer.destination[-1] + self.inner.destination[-1] + self.nbytes[-1]
        return int(self.outer.destination[0] + self.inner.destination[0]), int(last)
