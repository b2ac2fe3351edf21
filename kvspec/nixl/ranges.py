"""Which ranges of the far side an order takes, in which batches, and where its runs lie there.

Law: every run lies whole in one range of one batch, and in no other; a range lies in one memory of
the far side. Where ranges are written, they are the runs and not a byte more. Numbers only.

The *far* side is the peer's: the source of a read, the target of a write. The *near* side is this
rank's, whose runs may lie anywhere. Ranges stand in the far side's order of addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import attrs
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MAX_RANGES = 4096  # of one batch: a handle's descriptors


@attrs.frozen(kw_only=True, eq=False)
class Repeated:
    """Runs that repeat from tile to tile, as (bytes of the) far and the near side.

    Run *r* of tile *c* is `length[r]` bytes at `far[r] + far_tile[c]`, and at `near[r] +
    near_tile[c]`. *area*: equal where runs lie in one memory of the far side.
    """

    far: Ints
    near: Ints
    length: Ints
    area: Ints
    far_tile: Ints
    near_tile: Ints

    @property
    def runs(self) -> int:
        """Runs of all tiles."""
        return len(self.far) * len(self.far_tile)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs of all tiles."""
        return int(self.length.sum()) * len(self.far_tile)


@attrs.frozen(kw_only=True, eq=False)
class Moves:
    """Runs of *length* bytes each: where in their slot they begin, and where on the near side."""

    offset: Ints
    near: Ints
    length: int


@attrs.frozen(kw_only=True, eq=False)
class _Windows:
    """Runs of a tile that lie close together on the far side, as one: windows, ascending.

    *runs* are in the far side's order; window *w* has those from `first[w]` to `first[w + 1]`, and
    spans the bytes from `start[w]` to `end[w]`.
    """

    runs: Repeated
    first: Ints
    start: Ints
    end: Ints

    @staticmethod
    def of(runs: Repeated, longest: int, gap: int) -> _Windows:
        """Return *runs* in windows that *longest* bytes can hold, with gaps of *gap* at most."""
        order = np.argsort(runs.far, kind="stable")
        runs = attrs.evolve(
            runs, **{name: getattr(runs, name)[order] for name in ("far", "near", "length", "area")}
        )
        if (runs.far_tile[1:] < runs.far_tile[:-1]).any():
            order = np.argsort(runs.far_tile, kind="stable")
            tiles = runs.far_tile[order], runs.near_tile[order]
            runs = attrs.evolve(runs, far_tile=tiles[0], near_tile=tiles[1])
        far, end = runs.far, runs.far + runs.length
        separate = far[1:] - np.maximum.accumulate(end)[:-1] > gap
        separate |= runs.area[1:] != runs.area[:-1]
        begins = np.concatenate(([0], np.flatnonzero(separate) + 1))
        size = max(1, min(longest // 4, longest - int(runs.length.max()) + 1))
        place = (far - np.repeat(far[begins], _counts(begins, len(far)))) // size
        first = np.flatnonzero(np.concatenate(([True], separate | (place[1:] != place[:-1]))))
        return _Windows(
            runs=runs, first=first, start=far[first], end=np.maximum.reduceat(end, first)
        )

    def chunks(self) -> tuple[Ints, Ints, Ints]:
        """Return where the windows of all tiles begin, ascending, which they are, of which tile."""
        tiles = self.runs.far_tile
        starts = self.start[:, None] + tiles
        window = np.broadcast_to(np.arange(len(self.start))[:, None], starts.shape)
        tile = np.broadcast_to(np.arange(len(tiles)), starts.shape)
        for turned in (False, True):
            found = [(each.T if turned else each).reshape(-1) for each in (starts, window, tile)]
            if (found[0][1:] >= found[0][:-1]).all():
                return found[0], found[1], found[2]
        order = np.argsort(starts.reshape(-1), kind="stable")
        return starts.reshape(-1)[order], window.reshape(-1)[order], tile.reshape(-1)[order]

    def moves(self, window: Ints, tile: Ints, offset: Ints) -> Iterator[Moves]:
        """Yield the runs of chunks, each of which begins at an *offset* of their slot."""
        near_tile = self.runs.near_tile[tile]
        if self._runs_per_tile:  # as many runs in each
            inside, places, length = (
                each.reshape(-1, self._runs_per_tile)[window]
                for each in (self._inside, self.runs.near, self.runs.length)
            )
            offsets = (inside + offset[:, None]).reshape(-1)
            near = (places + near_tile[:, None]).reshape(-1)
            lengths = length.reshape(-1)
        else:
            counts = self._counts[window]
            run = np.repeat(self.first[window] - (np.cumsum(counts) - counts), counts)
            run += np.arange(len(run))
            offsets = self._inside[run] + np.repeat(offset, counts)
            near = self.runs.near[run] + np.repeat(near_tile, counts)
            lengths = self.runs.length[run]
        if len(self._lengths) == 1:
            yield Moves(offset=offsets, near=near, length=self._lengths[0])
            return
        for size in self._lengths:
            which = lengths == size
            if which.any():
                yield Moves(offset=offsets[which], near=near[which], length=size)

    @cached_property
    def _counts(self) -> Ints:
        return _counts(self.first, len(self.runs.far))

    @cached_property
    def _runs_per_tile(self) -> int:
        """How many runs each window has, or 0."""
        counts = self._counts
        return int(counts[0]) if (counts[1:] == counts[0]).all() else 0

    @cached_property
    def _inside(self) -> Ints:
        """Where in its window each run begins."""
        return self.runs.far - np.repeat(self.start, self._counts)

    @cached_property
    def _lengths(self) -> list[int]:
        """The lengths that runs have."""
        length = self.runs.length
        same_length = (length[1:] == length[0]).all()
        return [int(length[0])] if same_length else np.unique(length).tolist()


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """What one handle moves: ranges of the far side, one after the other in the buffer.

    *address*, *length*: of each range. Ranges are *nbytes* together. *chunks*: which of the order's
    chunks it has.
    """

    address: Ints
    length: Ints
    nbytes: int
    chunks: slice

    @property
    def offset(self) -> Ints:
        """Where in the slot each range begins."""
        return np.cumsum(self.length) - self.length


@attrs.frozen(kw_only=True, eq=False)
class Ranges:
    """All batches of an order: *ranges* of *read* bytes together, *runs* of *nbytes* to permute."""

    batches: tuple[Batch, ...]
    runs: int
    nbytes: int
    _windows: tuple[_Windows, ...]
    _repeated_set: Ints
    _window: Ints
    _tile: Ints
    _packed: Ints

    @property
    def ranges(self) -> int:
        """How many descriptors the transport gets."""
        return sum(len(batch.address) for batch in self.batches)

    @property
    def read(self) -> int:
        """How many bytes the transport moves."""
        return sum(batch.nbytes for batch in self.batches)

    def moves(self, batch: Batch) -> Iterator[Moves]:
        """Yield the runs of a batch."""
        window, tile = self._window[batch.chunks], self._tile[batch.chunks]
        offset = self._packed[batch.chunks] - self._packed[batch.chunks.start]
        if len(self._windows) == 1:
            yield from self._windows[0].moves(window, tile, offset)
            return
        repeated_set = self._repeated_set[batch.chunks]
        for place in np.unique(repeated_set).tolist():
            which = repeated_set == place
            yield from self._windows[place].moves(window[which], tile[which], offset[which])


def ranges_of(repeated_sets: Sequence[Repeated], longest: int, gap: int) -> Ranges | None:
    """Return the ranges that hold all runs of *repeated_sets*.

    In batches of *longest* bytes at most.

    Ranges that are *gap* bytes apart or less are one. None where a run is longer than a slot.
    """
    repeated_sets = [runs for runs in repeated_sets if runs.runs]
    if any(int(runs.length.max()) > longest for runs in repeated_sets):
        return None
    windows = tuple(_Windows.of(runs, longest, gap) for runs in repeated_sets)
    if not windows:
        return Ranges(
            batches=(),
            runs=0,
            nbytes=0,
            windows=(),
            **dict.fromkeys(("repeated_set", "window", "tile", "packed"), np.empty(0, np.int64)),
        )
    start, repeated_set, window, tile = _chunks(windows)
    place = window
    if len(windows) > 1:
        place = window + np.cumsum([0, *(len(each.start) for each in windows)])[repeated_set]
    span = np.concatenate([each.end - each.start for each in windows])[place]
    area = np.concatenate([each.runs.area[each.first] for each in windows])[place]
    reach = np.maximum.accumulate(start + span)
    separate = (start[1:] - reach[:-1] > gap) | (area[1:] != area[:-1])
    first = np.concatenate(([0], np.flatnonzero(separate) + 1))
    length = np.append(reach[first[1:] - 1], reach[-1]) - start[first]
    skipped = start[first] - (np.cumsum(length) - length)
    of_range = np.repeat(np.arange(len(first)), _counts(first, len(start)))
    packed = start - skipped[of_range]
    batches = _batches(packed, reach - skipped[of_range], of_range, start, longest)
    return Ranges(
        batches=tuple(batches),
        runs=sum(runs.runs for runs in repeated_sets),
        nbytes=sum(runs.nbytes for runs in repeated_sets),
        windows=windows,
        repeated_set=repeated_set,
        window=window,
        tile=tile,
        packed=packed,
    )


def _counts(first: Ints, total: int) -> Ints:
    return np.append(first[1:], total) - first


def _chunks(windows: Iterable[_Windows]) -> tuple[Ints, Ints, Ints, Ints]:
    """Return where every chunk begins, ascending; of which family, window and tile it is."""
    found = [each.chunks() for each in windows]
    if len(found) == 1:
        return found[0][0], np.empty(0, np.int64), *found[0][1:]
    start, window, tile = (np.concatenate(each) for each in zip(*found, strict=True))
    repeated_set = np.repeat(np.arange(len(found)), [len(each[0]) for each in found])
    order = np.argsort(start, kind="stable")
    return start[order], repeated_set[order], window[order], tile[order]


def _batches(
    packed: Ints, reach: Ints, of_range: Ints, start: Ints, longest: int
) -> Iterator[Batch]:
    """Yield the chunks in batches: their ranges are *packed* one after the other, up to *reach*."""
    begin = 0
    while begin < len(packed):
        stop = int(np.searchsorted(reach, packed[begin] + longest, side="right"))
        stop = min(stop, int(np.searchsorted(of_range, of_range[begin] + MAX_RANGES)))
        inside = of_range[begin:stop]
        first = begin + np.concatenate(([0], np.flatnonzero(inside[1:] != inside[:-1]) + 1))
        last = np.append(first[1:], stop) - 1
        length = reach[last] - packed[first]
        yield Batch(
            address=start[first], length=length, nbytes=int(length.sum()), chunks=slice(begin, stop)
        )
        begin = stop
