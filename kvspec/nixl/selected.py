"""Pair the ids of a whole selection by its runs and tiles, without a list of all ids.

Invariant: the result moves the same bytes in the same descriptors as `merging.pair` of the same
ids. If descriptors could be merged across rows, the answer is None, and `pair` must look at the
ids one by one. `select` has already checked that no byte is written twice.

How it works:
    A selection has parts. Each part moves the same tiles of several runs of blocks. So its
    descriptors are a product, runs times tiles, and `product_spans` checks a product quickly.

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
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.selection import Entry, Picked, Selection
from kvspec.descriptors.tiles import Tiles
from kvspec.nixl.batches import cut, fits, how_many_fit
from kvspec.nixl.merging import Pairing, merges
from kvspec.nixl.product_spans import Offsets, ProductSpans, RepeatedRuns
from kvspec.nixl.rows import Ints, StridedRows
from kvspec.nixl.spans import Spans, spans_of
from kvspec.ownership.replicas import Role

T = TypeVar("T")


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
    posts, nbytes, batches = worked_out
    ids = selection if local == "producer" else selection[::-1]
    return Pairing(
        local_ids=ids[0],
        remote_ids=ids[1],
        spans=lambda: _spans(picked, target),
        nbytes=nbytes,
        posts=posts,
        batches=batches or (slice(0, len(ids[0])),),
    )


_WorkedOut = tuple[Callable[[], int], int, tuple[slice, ...]]
# A function that counts the posted descriptors, the bytes, and the batches of ids. No batches mean
# that one handle is enough.


def _alone(entry: Entry, tiles: Tiles) -> _WorkedOut | None:
    """Return the result for a single part, if NIXL joins all of its touching tiles. Else None."""
    rows, size, count = entry.rows, entry.rows.size, len(tiles)
    if size is None or not rows.plain:
        return None
    total, nbytes = len(rows) * count, len(rows) * count * size
    posts = partial(rows.posted, tiles)
    # Counting the posted descriptors takes time, so do it only if the answer depends on it.
    if fits(total, nbytes) or (fits(1, nbytes) and fits(posts(), nbytes)):
        return posts, nbytes, ()
    repeats = how_many_fit(count, count * size)  # NIXL never joins two rows
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
    return lambda: posted, nbytes, () if fits(posted, nbytes) else tuple(cut(_Posted(parts)))


def _part(picked: Picked, rows: dict[Role, StridedRows], target: Role) -> _Part | None:
    """Return one part with its tiles joined; None where its runs or memories differ."""
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
            posted = _first(follows & entry.rows.next_ids(tiles))
        if offsets.min_gap < 0:
            offsets, _ = offsets.ascending()
            follows = offsets.follows(size, size)
        if np.count_nonzero(follows):
            first = _first(follows)
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


def _first(follows: npt.NDArray[np.bool_]) -> Ints:
    """Return the numbers of those that do not follow the one before."""
    return np.concatenate(([0], np.flatnonzero(~follows) + 1))


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


def _spans(picked: Sequence[Picked], target: Role) -> tuple[tuple[Ints, Ints], Spans]:
    """Return the begins and ends of all bytes that are read, and the spans that are written."""
    found = np.concatenate([entry.addresses(tiles) for entry, tiles in picked])
    read, written = (spans_of(found[:, side], found[:, 2]) for side in (0, 1))
    if target == "producer":
        read, written = written, read
    return (read.start, read.end), written


class _Posted:
    """The descriptors that NIXL posts for all parts, in the order of ids: by part, run and tile."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self._count = [len(part.posted) for part in parts]
        self._nbytes = [part.tiles * part.size for part in parts]
        self._first = [part.posted.tolist() for part in parts]
        self._before: tuple[list[int], ...] = [0], [0], [0]
        for part, many, nbytes in zip(parts, self._count, self._nbytes, strict=True):
            for before, one in zip(self._before, (many, part.tiles, nbytes), strict=True):
                before.append(before[-1] + part.repeats * one)

    def __len__(self) -> int:
        return self._before[0][-1]

    def _split(self, run: int) -> tuple[int, int, int]:
        """Return part, run and descriptor in the run, of descriptor number *run*."""
        part = bisect_right(self._before[0], run, hi=len(self._parts)) - 1
        return part, *divmod(run - self._before[0][part], self._count[part])

    def first(self, run: int) -> int:
        """Return the place of the first id of descriptor *run*."""
        if run == len(self):
            return self._before[1][-1]
        part, repeat, place = self._split(run)
        tile: int = self._first[part][place]
        return self._before[1][part] + repeat * self._parts[part].tiles + tile

    def reached(self, run: int) -> int:
        """Return the bytes of all descriptors before *run*."""
        if run == len(self):
            return self._before[2][-1]
        part, repeat, place = self._split(run)
        here: int = repeat * self._parts[part].tiles + self._first[part][place]
        return self._before[2][part] + here * self._parts[part].size

    def within(self, nbytes: int) -> int:
        """Return how many of the first descriptors have at most *nbytes* in all."""
        if nbytes >= self._before[2][-1]:
            return len(self)
        part = bisect_right(self._before[2], nbytes, hi=len(self._parts)) - 1
        repeat, left = divmod(nbytes - self._before[2][part], self._nbytes[part])
        tiles = left // self._parts[part].size
        place = bisect_right(self._first[part], tiles) - 1
        return self._before[0][part] + repeat * self._count[part] + place

    def length(self, run: int) -> int:
        """Return the bytes of one id of descriptor *run*."""
        return self._parts[self._split(run)[0]].size
