"""Pairs of a whole selection: checked and joined by run and by cell, not by run times cell.

Law: what is returned is what `pair` returns of the same ids. Only the plain case is worked out:
runs of one length, each in one registered memory, whose cells are joined by NIXL or not at all.
For any other the answer is None, and `pair` has to look at the ids one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvspec.descriptors.selection import Picked, Selection
from kvspec.nixl.merging import LIMIT, MAX_BYTES, MAX_DESCRIPTORS, SPARED, Pairing, cut
from kvspec.nixl.rows import Ints, StridedRows
from kvspec.nixl.spans import Spans
from kvspec.ownership.election import Role

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvspec.descriptors.cells import Cells
    from kvspec.descriptors.entries import Entry


@attrs.frozen(eq=False)
class _Side:
    """One side of a part: the address and area of each run, the offset, id and row of each cell."""

    address: Ints
    area: Ints
    offset: Ints
    ids: Ints
    row: Ints | None


@attrs.frozen(eq=False)
class _Joined:
    """A part whose cells are joined, in each run alike: where they touch, and as NIXL posts them.

    *offsets* (origin, goal) and *nbytes*: of those that touch, ascending in the goal. *posted*: the
    first cells of what NIXL joins, in the order of ids: no cells of different rows. There are
    *cells* of *size* bytes. Of cells 1, 2, 3, 5 of the origin that go to 8, 9, 6, 7:

        offsets    3 to 6, 5 to 7, 1 to 8    nbytes size, size, 2 size
        posted     0, 2, 3                   1 and 2 are one descriptor
    """

    origin: _Side
    goal: _Side
    offsets: tuple[Ints, Ints]
    nbytes: Ints
    posted: Ints
    cells: int
    size: int

    @property
    def runs(self) -> int:
        """Runs of the part's rows."""
        return len(self.goal.address)

    def begins(self) -> tuple[Ints, Ints]:
        """Return where the joined begin, run by run: origin, goal."""
        origin = self.origin.address[:, None] + self.offsets[0]
        goal = self.goal.address[:, None] + self.offsets[1]
        return origin.reshape(-1), goal.reshape(-1)

    def repeated(self, by_cell: Ints) -> Ints:
        """Return a number of each of a run's joined cells, of all runs."""
        return np.broadcast_to(by_cell, (self.runs, len(by_cell))).reshape(-1)


def pair_selection(
    selection: Selection, rows: dict[Role, StridedRows], target: Role, local: Role
) -> Pairing | None:
    """Return the pairs of *selection*, whose bytes go to *target*; None where it is not plain."""
    found: list[_Joined] = []
    for picked in selection.parts:
        joined = _joined(picked, rows, target)
        if joined is None:
            return None
        found.append(joined)
    if not found:
        return None
    begins = [part.begins() for part in found]
    source, start = _together([one for one, _ in begins]), _together([one for _, one in begins])
    nbytes = _together([part.repeated(part.nbytes) for part in found])
    end, order = start + nbytes, None
    if (end[:-1] > start[1:]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        if (end[:-1] > start[1:]).any():
            return None  # written twice, which `pair` says in words
    posted = sum(part.runs * len(part.posted) for part in found)
    spared = _touching(found, source, (start, end), order) + posted - len(start)
    if spared >= SPARED or posted > LIMIT * (posted - spared):
        return None
    total = sum(part.runs * part.cells * part.size for part in found)
    ids = selection if local == "producer" else selection[::-1]
    return Pairing(
        local_ids=ids[0],
        remote_ids=ids[1],
        source=(source, source + nbytes),
        written=Spans(start, end),
        nbytes=total,
        runs=posted,
        pieces=tuple(_pieces(found, len(ids[0]), posted, total)),
    )


def _together(arrays: list[Ints]) -> Ints:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _joined(picked: Picked, rows: dict[Role, StridedRows], target: Role) -> _Joined | None:
    """Return one part with its cells joined; None where its runs or memories differ."""
    entry, cells = picked
    length, size = entry.rows.length, int(entry.rows.length[0])
    goal = _side(rows[target], target, entry, cells)
    other: Role = "producer" if target == "consumer" else "consumer"
    origin = _side(rows[other], other, entry, cells)
    if goal is None or origin is None or (length != size).any():
        return None
    begins = origin.offset, goal.offset
    follows = _follows(begins, size)
    posted = _first(follows & _next_id(goal) & _next_id(origin) if follows.any() else follows)
    apart = goal.offset[1:] - goal.offset[:-1]
    if (apart < size).any():
        order = np.argsort(goal.offset, kind="stable")
        begins = origin.offset[order], goal.offset[order]
        if (begins[1][1:] - begins[1][:-1] < size).any():
            return None
        follows = _follows(begins, size)
    if not follows.any():
        nbytes = np.full(len(cells), size)
        return _Joined(origin, goal, begins, nbytes, posted, len(cells), size)
    first = _first(follows)
    nbytes = _counts(first, len(cells)) * size
    offsets = begins[0][first], begins[1][first]
    return _Joined(origin, goal, offsets, nbytes, posted, len(cells), size)


def _side(rows: StridedRows, side: Role, entry: Entry, cells: Cells) -> _Side | None:
    """Return one *side* of a part; None if a run lies in two memories."""
    first, pool = entry.producer_first, entry.rows.producer
    address, block, cell = entry.rows.producer_address, cells.producer_block, cells.producer_cell
    if side == "consumer":
        first, pool = entry.consumer_first, entry.rows.consumer
        address = entry.rows.consumer_address
        block, cell = cells.consumer_block, cells.consumer_cell
    per_run = len(pool.counts) - pool.counts.count(0)
    start = int(rows.start.searchsorted(first, side="right")) - 1
    area = rows.area[start : start + per_run * len(address)].reshape(len(address), per_run)
    if per_run > 1 and (area != area[:, :1]).any():
        return None
    row = pool.row(block, cell) if per_run > 1 else None
    return _Side(address, area[:, 0], pool.offsets(block, cell), pool.ids(block, cell), row)


def _follows(begins: tuple[Ints, Ints], size: int) -> NDArray[np.bool_]:
    """Whether each cell but the first begins where the one before ends, on both sides."""
    one, other = (offset[1:] - offset[:-1] == size for offset in begins)
    return np.asarray(one & other)


def _next_id(side: _Side) -> NDArray[np.bool_]:
    """Whether each cell but the first has the next id of the same row."""
    follows = side.ids[1:] - side.ids[:-1] == 1
    return np.asarray(follows if side.row is None else follows & (side.row[1:] == side.row[:-1]))


def _first(follows: NDArray[np.bool_]) -> Ints:
    return np.concatenate(([0], np.flatnonzero(~follows) + 1))


def _counts(first: Ints, total: int) -> Ints:
    return np.diff(first, append=total)


def _touching(
    found: list[_Joined], source: Ints, spans: tuple[Ints, Ints], order: Ints | None
) -> int:
    """Return how many begin where the one before ends, on both sides, each in one memory."""
    start, end = spans
    touches = end[:-1] == start[1:]
    if not touches.any():
        return 0
    areas = [
        np.concatenate([np.repeat(side.area, len(part.nbytes)) for part, side in sides])
        for sides in ([(p, p.origin) for p in found], [(p, p.goal) for p in found])
    ]
    if order is not None:
        source, areas = source[order], [area[order] for area in areas]
    touches &= source[:-1] + (end - start)[:-1] == source[1:]
    for area in areas:
        touches &= area[:-1] == area[1:]
    return int(touches.sum())


def _pieces(found: list[_Joined], ids: int, posted: int, nbytes: int) -> Iterator[slice]:
    """Yield slices of the ids that fit one handle each."""
    if posted <= MAX_DESCRIPTORS and nbytes <= MAX_BYTES:
        yield slice(0, ids)
        return
    first: list[Ints] = []
    sizes: list[Ints] = []
    length: list[Ints] = []
    place = 0
    for part in found:
        begins = place + np.arange(part.runs)[:, None] * part.cells + part.posted
        first.append(begins.reshape(-1))
        sizes.append(part.repeated(_counts(part.posted, part.cells) * part.size))
        length.append(np.full(part.runs * part.cells, part.size))
        place += part.runs * part.cells
    yield from cut(_together(first), np.cumsum(_together(sizes)), _together(length))
