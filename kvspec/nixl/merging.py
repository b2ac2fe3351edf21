"""Which ids of one side go with which of the other, and how they are cut into handles.

NIXL truncates wide and fractional ids and takes a destination that is named twice; here both are
refused. It merges neighbours of a list, inside one row and one handle only, so a cut falls between
runs; and where runs of different rows touch, they are joined here. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.nixl.checks import Ids, Ints, Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_DESCRIPTORS = 4096  # posted descriptors of one handle: about 13 ms that nothing can interrupt
MAX_BYTES = 64 << 20
LIMIT = 1.15  # runs, for each that joining would leave, above which runs are always joined
SPARED = 16  # runs from which joining costs less time than posting them, about 25 us


def checked_ids(field: str, ids: object, total: int) -> Ids:
    """Return *ids* as int32: one-dimensional integers (not bools), each in [0, *total*)."""
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        got = f"{ids.dtype}{ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise SpecError(field, got, "a one-dimensional numpy array of integers")
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < total):
        at = int(((ids < 0) | (ids >= total)).argmax())
        raise SpecError(f"{field}[{at}]", int(ids[at]), f"an id in [0, {total})")
    return np.ascontiguousarray(ids, dtype=np.int32)


@attrs.frozen(kw_only=True, eq=False)
class Descriptors:
    """Plain descriptors, one a run: (n, 3) uint64 of address, length, device on either side."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]


@attrs.frozen(kw_only=True, eq=False)
class Pairing:
    """Checked pairs of ids, cut into pieces that fit one handle each.

    *runs* is what nixl should post: it merges neighbours within a row, never across rows. Where
    runs of different rows touch, *joined* has them as one, and *pieces* are slices of it.
    """

    local_ids: Ids
    remote_ids: Ids
    nbytes: int
    runs: int
    pieces: tuple[slice, ...]
    joined: Descriptors | None = None


@attrs.frozen(kw_only=True, eq=False)
class _Side:
    """One side of all runs: the first id of each, and its row."""

    rows: Rows
    ids: Ids
    row: Ints

    @cached_property
    def address(self) -> Ints:
        """Where each run begins."""
        return self.rows.address_of(self.ids, self.row)

    def ends_at(self, nbytes: Ints, order: Ints) -> NDArray[np.bool_]:
        """Whether each run, in *order*, ends where the next begins, in memory that is surely one.

        Two registered memories may touch, and no descriptor may lie in both.
        """
        ends, starts = (self.address + nbytes)[order[:-1]], self.address[order[1:]]
        area = self.rows.area[self.row[order]]
        return np.asarray((ends == starts) & (area[:-1] == area[1:]))

    def plain(self, order: Ints, length: Ints, skipped: Ints) -> NDArray[np.uint64]:
        """Return the descriptors of *length* bytes that begin *skipped* bytes into runs *order*."""
        found = np.empty((len(order), 3), np.uint64)
        found[:, 0] = self.address[order] + skipped
        found[:, 1] = length
        found[:, 2] = self.rows.table[self.row[order], 2]
        return found


def pair(local: Rows, local_ids: Ids, remote: Rows, remote_ids: Ids, destination: str) -> Pairing:
    """Return the pairs in the given order, cut between runs of touching descriptors.

    Where that spares descriptors, runs of different rows are joined, in the destination's order.
    Refuses pairs of unequal length and any byte of the *destination* ("local" or "remote") that
    would be written twice.
    """
    if len(local_ids) != len(remote_ids):
        raise SpecError("local_ids", len(local_ids), f"as many as remote_ids, {len(remote_ids)}")
    if not len(local_ids):
        return Pairing(local_ids=local_ids, remote_ids=remote_ids, nbytes=0, runs=0, pieces=())
    rows = local.row_of(local_ids), remote.row_of(remote_ids)
    length = local.length[rows[0]]
    other = remote.length[rows[1]]
    if (length != other).any():
        at = int((length != other).argmax())
        wanted = f"the {int(other[at])} B of remote id {int(remote_ids[at])}"
        raise SpecError(f"local_ids[{at}]", f"{int(local_ids[at])} ({int(length[at])} B)", wanted)
    merges = np.ones(len(local_ids) - 1, dtype=bool)
    for side, ids, row in ((local, local_ids, rows[0]), (remote, remote_ids, rows[1])):
        merges &= (np.diff(ids) == 1) & (np.diff(row) == 0) & side.dense[row[1:]]
    first = np.concatenate(([0], np.flatnonzero(~merges) + 1))
    nbytes = np.add.reduceat(length, first)
    sides = [
        _Side(rows=side, ids=ids[first], row=row[first])
        for side, ids, row in ((local, local_ids, rows[0]), (remote, remote_ids, rows[1]))
    ]
    written, source = sides[:: -1 if destination == "remote" else 1]
    order = np.argsort(written.address, kind="stable")
    _refuse_overlap(f"{destination}_ids", written, nbytes, order)
    touches = written.ends_at(nbytes, order)
    if touches.any():
        touches &= source.ends_at(nbytes, order)
    spared, joined = int(touches.sum()), None
    if spared >= SPARED or len(first) > LIMIT * (len(first) - spared):
        joined, first, nbytes = _join(sides, nbytes, order, touches)
        length = nbytes
    return Pairing(
        local_ids=local_ids,
        remote_ids=remote_ids,
        nbytes=int(nbytes.sum()),
        runs=len(first),
        pieces=tuple(_cut(first, np.cumsum(nbytes), length)),
        joined=joined,
    )


def _refuse_overlap(field: str, written: _Side, nbytes: Ints, order: Ints) -> None:
    address, ids = written.address[order], written.ids[order]
    twice = (address + nbytes[order])[:-1] > address[1:]
    if twice.any():
        at = int(twice.argmax())
        where = f"no byte written twice, as {int(address[at + 1]):#x} is"
        raise SpecError(field, f"runs from {int(ids[at])} and {int(ids[at + 1])}", where)


def _join(
    sides: list[_Side], nbytes: Ints, order: Ints, touches: NDArray[np.bool_]
) -> tuple[Descriptors, Ints, Ints]:
    """Return touching runs as one descriptor, none longer than a handle takes, and their bytes."""
    starts = np.concatenate(([0], np.flatnonzero(~touches) + 1))
    total = np.add.reduceat(nbytes[order], starts)
    parts = -(-total // MAX_BYTES)
    run = np.repeat(np.arange(len(starts)), parts)
    skipped = (np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)) * MAX_BYTES
    length = np.minimum(total[run] - skipped, MAX_BYTES)
    begins = order[starts[run]]
    local, remote = (side.plain(begins, length, skipped) for side in sides)
    return Descriptors(local=local, remote=remote), np.arange(len(run)), length


def _cut(first: Ints, reached: Ints, length: Ints) -> Iterable[slice]:
    """Yield slices of the pairs: runs start at *first* and have *reached* so many bytes in all."""
    ends = np.append(first[1:], len(length))
    at, done = 0, 0
    while at < len(first):
        stop = int(np.searchsorted(reached, done + MAX_BYTES, side="right"))
        stop = min(stop, at + MAX_DESCRIPTORS)
        if stop > at:
            yield slice(int(first[at]), int(ends[stop - 1]))
        else:  # one run that is too long for a handle: its parts are long enough to be cheap
            stop = at + 1
            step = max(1, MAX_BYTES // int(length[first[at]]))
            for begin in range(int(first[at]), int(ends[at]), step):
                yield slice(begin, min(begin + step, int(ends[at])))
        at, done = stop, int(reached[stop - 1])
