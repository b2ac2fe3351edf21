"""Pair the ids of a whole selection by its runs and tiles, without a list of all ids.

Invariant: the result moves the same bytes in the same descriptors as `merging.pair` of the same
ids. If descriptors could be merged across rows, the answer is None, and `pair` must look at the
ids one by one. `select` has already checked that no byte is written twice.

How it works:
    A selection has parts. Each part moves the same tiles of several runs of blocks. So its
    descriptors are a product, runs times tiles. `ProductSpans` checks a product in a time that
    grows with the number of runs plus tiles.

    1. `_part` joins the tiles of one run. For example, tiles 1, 2, 3, 5 of the source go to tiles
       8, 9, 6, 7 of the destination. Sorted by destination, they are:

           source    destination    joined                  posted
           3         6              3 to 6
           5         7              5 to 7
           1         8              1, 2 to 8, 9            1, 2 in one descriptor
           2         9

       *joined* contains the fewest possible descriptors: tiles that touch on both sides. *posted*
       contains what NIXL posts: it joins only consecutive ids in the order of the caller.
    2. `_joined` checks that the joined spans of all parts are disjoint products, and counts them.
       Parts whose groups of runs lie at one shift are one product (`_together`), for example keys
       and values of the same blocks.
    3. If NIXL posts about as many descriptors as there are joined spans, a merge across rows has
       nothing to gain, and `_several` returns the result. `merging.merges` decides that.

    The spans of such a product begin at all sums of an *outer* and an *inner* offset. Two facts
    about the sums follow from the two lists alone:

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

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.selection import Entry, Picked, Selection
from kvspec.descriptors.tiles import Tiles
from kvspec.inputs import MOST
from kvspec.nixl import merging
from kvspec.nixl.merging import Bounds, Pairing, cut, fits, merges, starts_of
from kvspec.nixl.rows import Ints, StridedRows
from kvspec.ownership.replicas import Role

T = TypeVar("T")


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


@attrs.frozen(eq=False)
class _Part:
    """Some runs, and the joined tiles of each.

    Attributes:
        runs: The runs, in order of the destination.
        joined: Begins of the joined tiles, in order of the destination.
        nbytes: Bytes of the joined tiles.
        posted: The first tile of each descriptor that NIXL posts for one run, in the order of ids.
        tiles: Number of tiles.
        size: Bytes of one tile.
    """

    runs: RepeatedRuns
    joined: Offsets
    nbytes: Ints
    posted: Ints
    tiles: int
    size: int

    @property
    def repeats(self) -> int:
        """Number of runs."""
        return len(self.runs.every)


def pair_selection(
    selection: Selection, rows: dict[Role, StridedRows], target: Role, local: Role
) -> Pairing | None:
    """Return the pairs of *selection*, or None if descriptors may be merged across rows.

    Args:
        selection: The selection.
        rows: The rows of both sides.
        target: The side that is written.
        local: The side of this rank.
    """
    picked = selection.parts
    worked_out = _alone(*picked[0]) if len(picked) == 1 else None
    if worked_out is None:
        worked_out = _several(picked, rows, target)
    if worked_out is None:
        return None
    count, nbytes, batches = worked_out
    producer, consumer = selection
    ids = (producer, consumer) if local == "producer" else (consumer, producer)
    batches = batches or (slice(0, len(producer)),)
    return Pairing(*ids, nbytes, batches, count, partial(_bounds, picked, target))


# Three values: a function that counts the posted descriptors, the number of bytes, and the batches
# of ids. No batches mean that one handle is enough.
_WorkedOut = tuple[Callable[[], int], int, tuple[slice, ...]]


def _alone(entry: Entry, tiles: Tiles) -> _WorkedOut | None:
    """Return the result for a single part, if NIXL joins all of its touching tiles. Else None."""
    rows, size, count = entry.rows, entry.rows.size, len(tiles)
    if size is None or not rows.plain:
        return None
    total = len(rows) * count
    nbytes = total * size
    posts = partial(rows.posted, tiles)
    # Counting the posted descriptors takes time, so do it only if the answer depends on it.
    if fits(total, nbytes) or (fits(1, nbytes) and fits(posts(), nbytes)):
        return posts, nbytes, ()
    # NIXL never joins two rows, so every cut between runs is right.
    repeats = min(merging.MAX_DESCRIPTORS // count, merging.MAX_BYTES // (count * size))
    if not repeats:
        return None
    step = repeats * count
    batches = tuple(slice(first, min(first + step, total)) for first in range(0, total, step))
    return posts, nbytes, batches


def _several(
    picked: Sequence[Picked], rows: dict[Role, StridedRows], target: Role
) -> _WorkedOut | None:
    """Return the result for any parts, or None if a merge across rows would save descriptors."""
    parts: list[_Part] = []
    for one in picked:
        part = _part(one, rows, target)
        if part is None:
            return None
        parts.append(part)
    joined = _joined(parts)
    posted = nbytes = 0
    for part in parts:
        posted += part.repeats * len(part.posted)
        nbytes += part.repeats * part.tiles * part.size
    if not joined or merges(posted, posted - joined):
        return None
    return lambda: posted, nbytes, () if fits(posted, nbytes) else tuple(_cut(parts))


def _part(picked: Picked, rows: dict[Role, StridedRows], target: Role) -> _Part | None:
    """Return one part with its tiles joined, or None if its runs or memories differ."""
    entry, tiles = picked
    destination, source = _directed(rows["consumer"], rows["producer"], target)
    # A table is used for many requests, and the runs of its entries never change.
    if (entry, source) not in destination.known:
        destination.known[entry, source] = _runs(entry, rows, target)
    runs, size = destination.known[entry, source], entry.rows.size
    if runs is None or size is None:
        return None
    (producer, consumer), count = entry.rows.offsets(tiles), len(tiles)
    offsets = Offsets.of(*_directed(consumer, producer, target))
    posted, nbytes = np.arange(count), np.full(count, size)
    if offsets.min_gap < 0 or offsets.min_gap == size:
        follows = offsets.follows(size, size)
        if np.count_nonzero(follows):
            posted = starts_of(follows & entry.rows.next_ids(tiles))
        if offsets.min_gap < 0:
            offsets, _ = offsets.ascending()
            follows = offsets.follows(size, size)
        if np.count_nonzero(follows):
            first = starts_of(follows)
            nbytes, offsets = np.diff(first, append=count) * size, offsets.take(first)
    return _Part(runs, offsets, nbytes, posted, count, size)


def _runs(entry: Entry, rows: dict[Role, StridedRows], target: Role) -> RepeatedRuns | None:
    """Return the runs of *entry* by destination, or None if a run is in two memories."""
    count = len(entry.rows)
    producer, consumer = entry.rows.producer, entry.rows.consumer
    consumer_areas = rows["consumer"].areas(entry.consumer_first, count, consumer.rows_per_run)
    producer_areas = rows["producer"].areas(entry.producer_first, count, producer.rows_per_run)
    if consumer_areas is None or producer_areas is None:
        return None
    areas = _directed(consumer_areas, producer_areas, target)
    starts = _directed(entry.rows.consumer_address, entry.rows.producer_address, target)
    layout, _ = _directed(consumer, producer, target)
    # Runs less than the extent of all blocks apart are interleaved: they make a group.
    extent = (layout.num_blocks - 1) * layout.block_stride + layout.tiles * layout.tile_stride
    return RepeatedRuns.of(Offsets.of(*starts, *areas), extent)


def _directed(consumer: T, producer: T, target: Role) -> tuple[T, T]:
    """Return the values of destination and source."""
    return (consumer, producer) if target == "consumer" else (producer, consumer)


def _joined(parts: list[_Part]) -> int | None:
    """Return the least number of descriptors for *parts*, or None if their spans are not products.

    None is also the result if the products of two groups of runs overlap or touch.
    """
    by_runs: list[tuple[RepeatedRuns, list[tuple[_Part, Offsets]]]] = []
    for part in parts:
        for runs, others in by_runs:
            if (pattern := runs.inside(part.runs)) is not None:
                others.append((part, pattern))
                break
        else:
            by_runs.append((part.runs, [(part, part.runs.pattern)]))
    found: list[tuple[int, int]] = []
    joined = 0
    for runs, some in by_runs:
        if len(some) == 1:
            product, touching = ProductSpans.of(runs, some[0][0].joined, some[0][0].nbytes), 0
        else:
            product, touching = _together(runs, some)
        if product is None:
            return None
        found.append(product.extent)
        joined += len(product) - touching
    if any(one[1] >= other[0] for one, other in pairwise(sorted(found))):
        return None
    return joined


def _together(
    runs: RepeatedRuns, some: list[tuple[_Part, Offsets]]
) -> tuple[ProductSpans | None, int]:
    """Return the product of several parts with the same groups, and how many of its spans touch."""
    columns = [part.joined.plus(pattern).columns for part, pattern in some]
    nbytes = np.concatenate([part.nbytes.repeat(len(pattern)) for part, pattern in some])
    inner, order = Offsets(np.concatenate(columns, axis=1)).ascending()
    nbytes = nbytes[order]
    touching = int(inner.follows(nbytes[:-1], nbytes[:-1]).sum())
    return ProductSpans.of_repeated(runs, inner, nbytes), len(runs.begins) * touching


def _bounds(picked: Sequence[Picked], target: Role) -> tuple[Bounds, Bounds]:
    """Return the ranges that are read, and those that are written."""
    found = np.concatenate([entry.addresses(tiles) for entry, tiles in picked])
    producer, consumer, nbytes = found.T
    destination, source = _directed(consumer, producer, target)
    return (source, source + nbytes), (destination, destination + nbytes)


def _cut(parts: Sequence[_Part]) -> Iterator[slice]:
    """Yield slices of the ids of all parts that fit one handle each, cut between runs of blocks.

    A run of blocks that is too long for one handle has handles of its own.
    """
    start = stop = posted = nbytes = 0
    for part in parts:
        pieces = [(part.tiles, len(part.posted), part.tiles * part.size)]
        if not fits(*pieces[0][1:]):
            length = np.full(part.tiles, part.size)
            full = merging.MAX_DESCRIPTORS, merging.MAX_BYTES
            pieces = [(s.stop - s.start, *full) for s in cut(part.posted, length)]
        for tiles, more, size in pieces * part.repeats:
            if stop > start and not fits(posted + more, nbytes + size):
                yield slice(start, stop)
                start, posted, nbytes = stop, 0, 0
            stop, posted, nbytes = stop + tiles, posted + more, nbytes + size
    yield slice(start, stop)
