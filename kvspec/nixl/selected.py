"""Pairs of a whole selection: checked and joined by run and by tile, not by run times tile.

Law: what is returned moves what `pair` would of the same ids, in as many descriptors. Only where
nothing is to be merged across rows is it worked out: for any other selection the answer is None,
and `pair` has to look at the ids one by one. That no byte is written twice, `select` has seen to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

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


@attrs.frozen(eq=False)
class _Part:
    """Some runs, and the same tiles of each, joined where they touch; *size*: bytes of one tile.

    *runs*, *joined*: ascending in the destination, the joined of *nbytes*. *posted*: the first
    tiles of what NIXL joins, in the order of ids: no tiles of different rows. Of tiles 1, 2, 3, 5
    of the source that go to 8, 9, 6, 7:

        joined     3 to 6, 5 to 7, 1 to 8    nbytes size, size, 2 size
        posted     0, 2, 3                   1 and 2 are one descriptor
    """

    runs: RepeatedRuns
    joined: Offsets
    nbytes: Ints
    posted: Ints
    tiles: int
    size: int

    @property
    def repeats(self) -> int:
        """How many runs there are."""
        return len(self.runs.every)


def pair_selection(
    selection: Selection, rows: dict[Role, StridedRows], target: Role, local: Role
) -> Pairing | None:
    """Return the pairs of *selection*, whose bytes go to *target*; None where runs may merge."""
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
"""Counts descriptors posted; bytes, and the batches of the ids: none where one handle takes all."""


def _alone(entry: Entry, tiles: Tiles) -> _WorkedOut | None:
    """Return what becomes of one part of which NIXL joins all that touches; None of another."""
    rows, size, count = entry.rows, entry.rows.size, len(tiles)
    if size is None or not rows.plain:
        return None
    total, nbytes = len(rows) * count, len(rows) * count * size
    posts = partial(rows.posted, tiles)
    # What is posted is counted only where that decides.
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
    """Return what becomes of any parts; None where something is to be merged, or may be."""
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
    destination, source = rows["consumer"], rows["producer"]
    if target == "producer":
        destination, source = source, destination
    if (entry, source) not in destination.known:
        destination.known[entry, source] = _runs(entry, rows, target)
    runs, size = destination.known[entry, source], entry.rows.size
    if runs is None or size is None:
        return None
    sides, count = entry.rows.offsets(tiles), len(tiles)
    offsets = Offsets.of(*(sides if target == "producer" else sides[::-1]))
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
    """Return the runs of an entry, by destination; None if one lies in two memories."""
    block_layouts = entry.rows.consumer, entry.rows.producer
    starts = entry.rows.consumer_address, entry.rows.producer_address
    destination = rows["consumer"].areas(
        entry.consumer_first, len(entry.rows), block_layouts[0].rows_per_run
    )
    source = rows["producer"].areas(
        entry.producer_first, len(entry.rows), block_layouts[1].rows_per_run
    )
    if source is None or destination is None:
        return None
    if target == "producer":
        block_layouts, starts, destination, source = (
            block_layouts[::-1],
            starts[::-1],
            source,
            destination,
        )
    block_layout = block_layouts[0]
    extent = (
        block_layout.num_blocks - 1
    ) * block_layout.block_stride + block_layout.tiles * block_layout.tile_stride
    return RepeatedRuns.of(Offsets.of(*starts, destination, source), extent)


def _first(follows: npt.NDArray[np.bool_]) -> Ints:
    return np.concatenate(([0], np.flatnonzero(~follows) + 1))


def _joined(parts: list[_Part]) -> int | None:
    """Return how few descriptors *parts* could be; None where they make no products apart.

    Parts whose groups of runs lie alike in those of another are one product.
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
    """Return the product of several parts of one pattern each, and how many touch of its spans."""
    columns = [part.joined.plus(pattern).columns for part, pattern in some]
    nbytes = np.concatenate([part.nbytes.repeat(len(pattern)) for part, pattern in some])
    inner, order = Offsets(np.concatenate(columns, axis=1)).ascending()
    nbytes = nbytes[order]
    touching = int(inner.follows(nbytes[:-1], nbytes[:-1]).sum())
    return ProductSpans.of_repeated(runs, inner, nbytes), len(runs.begins) * touching


def _spans(picked: Sequence[Picked], target: Role) -> tuple[tuple[Ints, Ints], Spans]:
    """Return begin and end of all that is read, and of all that is written."""
    found = np.concatenate([entry.addresses(tiles) for entry, tiles in picked])
    read, written = (spans_of(found[:, side], found[:, 2]) for side in (0, 1))
    if target == "producer":
        read, written = written, read
    return (read.start, read.end), written


class _Posted:
    """What NIXL posts of all parts, in the order of ids: part by part, run by run."""

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
        """Return part, run of it, and which of this run's is the *run*-th that is posted."""
        part = bisect_right(self._before[0], run, hi=len(self._parts)) - 1
        return part, *divmod(run - self._before[0][part], self._count[part])

    def first(self, run: int) -> int:
        """Return the place of its first id."""
        if run == len(self):
            return self._before[1][-1]
        part, repeat, place = self._split(run)
        tile: int = self._first[part][place]
        return self._before[1][part] + repeat * self._parts[part].tiles + tile

    def reached(self, run: int) -> int:
        """Return the bytes of all before it."""
        if run == len(self):
            return self._before[2][-1]
        part, repeat, place = self._split(run)
        here: int = repeat * self._parts[part].tiles + self._first[part][place]
        return self._before[2][part] + here * self._parts[part].size

    def within(self, nbytes: int) -> int:
        """Return how many, from the first on, take no more than *nbytes* together."""
        if nbytes >= self._before[2][-1]:
            return len(self)
        part = bisect_right(self._before[2], nbytes, hi=len(self._parts)) - 1
        repeat, left = divmod(nbytes - self._before[2][part], self._nbytes[part])
        tiles = left // self._parts[part].size
        place = bisect_right(self._first[part], tiles) - 1
        return self._before[0][part] + repeat * self._count[part] + place

    def length(self, run: int) -> int:
        """Return the bytes of one of its ids."""
        return self._parts[self._split(run)[0]].size
