"""Find the ranges of the peer's memory that a staged transfer moves, and the runs in them.

Invariant: each run lies in exactly one range of one batch. A range lies in one memory of the far
side. The ranges of a write contain only runs, so that no other byte of the peer is written.

The *far* side is the peer: the source of a read, the destination of a write. The *near* side is
this rank. Its runs may lie anywhere. This module computes with numbers and moves nothing.

How it works:
    The same runs repeat in each tile. Run r of tile c is `length[r]` bytes at far address
    `far[r] + far_tile[c]` and near address `near[r] + near_tile[c]`. Here 3 runs of 4 bytes repeat
    in 2 tiles:

    >>> def ints(*numbers):
    ...     return np.array(numbers, np.int64)
    >>> runs = Repeated(
    ...     far=ints(0, 8, 40), near=ints(100, 200, 300), length=ints(4, 4, 4),
    ...     area=ints(0, 0, 0), far_tile=ints(1000, 2000), near_tile=ints(0, 16),
    ... )

    1. `_Windows.of` joins runs of one tile that are at most *gap* bytes apart. With a gap of 8, the
       runs at 0 and 8 are one *window* of 12 bytes, and the run at 40 is another. The runs of a
       window begin within a quarter of a slot, because a batch contains whole windows only.
    2. `_Windows.chunks` places the windows in each tile. A *chunk* is one window of one tile. Here
       the chunks begin at 1000, 1040, 2000 and 2040.
    3. `ranges_of` joins chunks that are at most *gap* bytes apart. Here no chunks are.
    4. `_batches` puts the ranges one after the other into slots of *longest* bytes.

    >>> ranges = ranges_of([runs], longest=64, gap=8)
    >>> (batch,) = ranges.batches
    >>> batch.address.tolist(), batch.length.tolist(), batch.offset.tolist()
    ([1000, 1040, 2000, 2040], [12, 4, 12, 4], [0, 12, 16, 28])

    When the batch has arrived in its slot, its runs are copied to the near side. The 4 bytes
    between two runs of a window are not copied:

    >>> (moves,) = ranges.moves(batch)
    >>> moves.offset.tolist(), moves.near.tolist()
    ([0, 8, 12, 16, 24, 28], [100, 200, 300, 116, 216, 316])

    So the transport moves 4 descriptors instead of 6 here, and far fewer in a real cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import attrs
import numpy as np

from kvspec.descriptors.selection import Picked
from kvspec.nixl.merging import Pairing
from kvspec.nixl.rows import Ints, StridedRows
from kvspec.ownership.replicas import Role

# Descriptors of one handle. Posting more blocks for too long: a post cannot be interrupted.
MAX_RANGES = 4096


@attrs.frozen(kw_only=True, eq=False)
class Repeated:
    """Runs that repeat in each tile. See the module docstring for their addresses.

    Attributes:
        far: Far address of each run, counted from its tile. Shape (runs,).
        near: Near address of each run, counted from its tile. Shape (runs,).
        length: Bytes of each run. Shape (runs,).
        area: Number of the far memory of each run. Shape (runs,).
        far_tile: Far address of each tile. Shape (tiles,).
        near_tile: Near address of each tile. Shape (tiles,).
    """

    far: Ints
    near: Ints
    length: Ints
    area: Ints
    far_tile: Ints
    near_tile: Ints

    @property
    def runs(self) -> int:
        """Number of runs in all tiles."""
        return len(self.far) * len(self.far_tile)

    @property
    def nbytes(self) -> int:
        """Bytes of the runs in all tiles."""
        return int(self.length.sum()) * len(self.far_tile)


@attrs.frozen(kw_only=True, eq=False)
class Moves:
    """Runs of equal length that are copied between a slot and the near side.

    Attributes:
        offset: Begin of each run in the slot, in bytes. Shape (runs,).
        near: Near address of each run. Shape (runs,).
        length: Bytes of each run.
    """

    offset: Ints
    near: Ints
    length: int


@attrs.frozen(kw_only=True, eq=False)
class _Windows:
    """Windows of one tile, in ascending order of far addresses.

    Attributes:
        runs: The runs, sorted by far address.
        first: Number of the first run of each window. Its runs end before the next window's first.
        start: Far address of each window, counted from its tile.
        end: End of each window, counted from its tile.
    """

    runs: Repeated
    first: Ints
    start: Ints
    end: Ints

    @staticmethod
    def of(runs: Repeated, longest: int, gap: int) -> _Windows:
        """Return *runs* in windows of at most *longest* bytes, with gaps of at most *gap* bytes."""
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
        # Runs of one window begin within *size* bytes. So the window fits into a slot.
        size = max(1, min(longest // 4, longest - int(runs.length.max()) + 1))
        place = (far - np.repeat(far[begins], _counts(begins, len(far)))) // size
        first = np.flatnonzero(np.concatenate(([True], separate | (place[1:] != place[:-1]))))
        return _Windows(
            runs=runs, first=first, start=far[first], end=np.maximum.reduceat(end, first)
        )

    def chunks(self) -> tuple[Ints, Ints, Ints]:
        """Return the far begin, the window and the tile of each chunk, in order of the begins."""
        tiles = self.runs.far_tile
        starts = self.start[:, None] + tiles
        window = np.broadcast_to(np.arange(len(self.start))[:, None], starts.shape)
        tile = np.broadcast_to(np.arange(len(tiles)), starts.shape)
        # The chunks are usually in order already, by window or by tile. That saves sorting them.
        for turned in (False, True):
            found = [(each.T if turned else each).reshape(-1) for each in (starts, window, tile)]
            if (found[0][1:] >= found[0][:-1]).all():
                return found[0], found[1], found[2]
        order = np.argsort(starts.reshape(-1), kind="stable")
        return starts.reshape(-1)[order], window.reshape(-1)[order], tile.reshape(-1)[order]

    def moves(self, window: Ints, tile: Ints, offset: Ints) -> Iterator[Moves]:
        """Yield the runs of chunks by length. Each chunk begins at its *offset* in the slot."""
        runs_of = self._even_runs if self._runs_per_tile else self._ragged_runs
        offsets, near, lengths = runs_of(window, self.runs.near_tile[tile], offset)
        if len(self._lengths) == 1:
            yield Moves(offset=offsets, near=near, length=self._lengths[0])
            return
        for size in self._lengths:
            which = lengths == size
            if which.any():
                yield Moves(offset=offsets[which], near=near[which], length=size)

    def _ragged_runs(self, window: Ints, near_tile: Ints, offset: Ints) -> tuple[Ints, Ints, Ints]:
        """Return slot offset, near address and length of each run of chunks. The definition.

        For windows of 2 and 1 runs, and the chunks 0, 1, 0, the runs are 0, 1, 2, 0, 1.
        """
        counts = self._counts[window]
        run = np.repeat(self.first[window] - (np.cumsum(counts) - counts), counts)
        run += np.arange(len(run))
        offsets = self._inside[run] + np.repeat(offset, counts)
        return offsets, self.runs.near[run] + np.repeat(near_tile, counts), self.runs.length[run]

    def _even_runs(self, window: Ints, near_tile: Ints, offset: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the same as `_ragged_runs`, faster, if all windows have equally many runs."""
        inside, places, lengths = (
            column.reshape(-1, self._runs_per_tile)[window]
            for column in (self._inside, self.runs.near, self.runs.length)
        )
        offsets, near = inside + offset[:, None], places + near_tile[:, None]
        return offsets.reshape(-1), near.reshape(-1), lengths.reshape(-1)

    @cached_property
    def _counts(self) -> Ints:
        return _counts(self.first, len(self.runs.far))

    @cached_property
    def _runs_per_tile(self) -> int:
        """Number of runs in each window, or 0 if the windows differ."""
        counts = self._counts
        return int(counts[0]) if (counts[1:] == counts[0]).all() else 0

    @cached_property
    def _inside(self) -> Ints:
        """Begin of each run in its window."""
        return self.runs.far - np.repeat(self.start, self._counts)

    @cached_property
    def _lengths(self) -> list[int]:
        """The distinct lengths of runs."""
        length = self.runs.length
        same_length = (length[1:] == length[0]).all()
        return [int(length[0])] if same_length else np.unique(length).tolist()


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """The ranges that one handle moves. They lie one after the other in a slot.

    Attributes:
        address: Far address of each range.
        length: Bytes of each range.
        nbytes: Bytes of all ranges.
        chunks: Which chunks of the transfer are in the batch.
    """

    address: Ints
    length: Ints
    nbytes: int
    chunks: slice

    @property
    def offset(self) -> Ints:
        """Begin of each range in the slot."""
        return np.cumsum(self.length) - self.length


@attrs.frozen(kw_only=True, eq=False)
class Ranges:
    """All batches of one transfer.

    Attributes:
        batches: The batches.
        runs: Number of runs to copy.
        nbytes: Bytes of these runs.
        _windows: The windows of each set of repeated runs.
        _repeated_set: For each chunk, its number in `_windows`. Empty if there is only one.
        _window: For each chunk, its window.
        _tile: For each chunk, its tile.
        _packed: For each chunk, its begin if all ranges lay one after the other.
    """

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
        """Number of descriptors for the transport."""
        return sum(len(batch.address) for batch in self.batches)

    @property
    def read(self) -> int:
        """Bytes that the transport moves."""
        return sum(batch.nbytes for batch in self.batches)

    def moves(self, batch: Batch) -> Iterator[Moves]:
        """Yield the runs of *batch*."""
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
    """Return the ranges that contain all runs of *repeated_sets*, in batches.

    Args:
        repeated_sets: Runs, each set with its own tiles.
        longest: Bytes of a slot. A batch is not longer.
        gap: Ranges at most so many bytes apart are joined.

    Returns:
        The ranges, or None if a run is longer than a slot.
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
    # One element a chunk, in order of far addresses.
    start, repeated_set, window, tile = _chunks(windows)
    # The number of the chunk's window, if the windows of all sets are counted together.
    place = window
    if len(windows) > 1:
        place = window + np.cumsum([0, *(len(each.start) for each in windows)])[repeated_set]
    span = np.concatenate([each.end - each.start for each in windows])[place]
    area = np.concatenate([each.runs.area[each.first] for each in windows])[place]
    # Chunks may overlap, so a range ends at the furthest end of its chunks.
    reach = np.maximum.accumulate(start + span)
    separate = (start[1:] - reach[:-1] > gap) | (area[1:] != area[:-1])
    # One element a range: its first chunk, its bytes, and the bytes before it in no range.
    first = np.concatenate(([0], np.flatnonzero(separate) + 1))
    length = np.append(reach[first[1:] - 1], reach[-1]) - start[first]
    skipped = start[first] - (np.cumsum(length) - length)
    # One element a chunk again: its range, and its begin among the packed ranges.
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
    """Return begin, set, window and tile of each chunk, in order of the begins."""
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
    """Yield batches of chunks.

    *packed* contains the begin of each chunk if all ranges lay one after the other. *reach*
    contains the furthest end up to each chunk, in the same count.
    """
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


def repeated(parts: Sequence[Picked], far: Role, rows: StridedRows) -> tuple[Repeated, ...] | None:
    """Return the runs of a selection's *parts*. *rows* are those of the *far* side.

    The result is None if tiles of one run may lie in different memories.
    """
    found = [_repeated(picked, far, rows) for picked in parts]
    kept = tuple(each for each in found if each is not None)
    return kept if len(kept) == len(found) else None


def _repeated(picked: Picked, far: Role, rows: StridedRows) -> Repeated | None:
    entry, tiles = picked
    sets = entry.rows
    producer, consumer = zip(
        (sets.producer_address, sets.consumer_address), sets.offsets(tiles), strict=True
    )
    block_layout, first, sides = sets.producer, entry.producer_first, (producer, consumer)
    if far == "consumer":
        block_layout, first, sides = sets.consumer, entry.consumer_first, (consumer, producer)
    area = rows.areas(first, len(sets), block_layout.rows_per_run)
    if area is None:
        return None
    (address, offset), (near, near_offset) = sides
    return Repeated(
        far=address,
        near=near,
        length=sets.length,
        area=area,
        far_tile=offset,
        near_tile=near_offset,
    )


def one_by_one(pairs: Pairing, local: StridedRows, remote: StridedRows) -> Repeated:
    """Return each pair of ids as a run of its own, in one tile."""
    rows = local.row_of(pairs.local_ids), remote.row_of(pairs.remote_ids)
    nothing = np.zeros(1, np.int64)
    return Repeated(
        far=remote.address_of(pairs.remote_ids, rows[1]),
        near=local.address_of(pairs.local_ids, rows[0]),
        length=local.length[rows[0]],
        area=remote.area[rows[1]],
        far_tile=nothing,
        near_tile=nothing,
    )
