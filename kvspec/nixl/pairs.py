"""Which ids of one side go with which of the other, and how they are cut into handles.

NIXL truncates wide and fractional ids and takes a destination that is named twice; here both are
refused. It merges neighbours only inside one handle, so a cut falls between runs. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.nixl.checks import Ids, Ints, Rows

MAX_DESCRIPTORS = 4096  # posted descriptors of one handle: about 13 ms that nothing can interrupt
MAX_BYTES = 64 << 20


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
class Pairing:
    """Checked pairs of ids, cut into pieces that fit one handle each."""

    local_ids: Ids
    remote_ids: Ids
    nbytes: int
    runs: int  # what nixl should post: it merges neighbours within a row, never across rows
    pieces: tuple[slice, ...]


def pair(local: Rows, local_ids: Ids, remote: Rows, remote_ids: Ids, destination: str) -> Pairing:
    """Return the pairs in the given order, cut between runs of touching descriptors.

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
    joined = np.ones(len(local_ids) - 1, dtype=bool)
    for side, ids, row in ((local, local_ids, rows[0]), (remote, remote_ids, rows[1])):
        joined &= (np.diff(ids) == 1) & (np.diff(row) == 0) & side.dense[row[1:]]
    first = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    nbytes = np.add.reduceat(length, first)
    written, ids, row = (
        (local, local_ids, rows[0]) if destination == "local" else (remote, remote_ids, rows[1])
    )
    address = written.address_of(ids[first], row[first])
    _refuse_overlap(f"{destination}_ids", ids[first], address, nbytes)
    pieces = tuple(_cut(first, np.cumsum(nbytes), length))
    return Pairing(
        local_ids=local_ids,
        remote_ids=remote_ids,
        nbytes=int(nbytes.sum()),
        runs=len(first),
        pieces=pieces,
    )


def _refuse_overlap(field: str, ids: Ids, address: Ints, nbytes: Ints) -> None:
    order = np.argsort(address, kind="stable")
    twice = (address + nbytes)[order[:-1]] > address[order[1:]]
    if twice.any():
        at = int(twice.argmax())
        one, two = int(ids[order[at]]), int(ids[order[at + 1]])
        where = f"no byte written twice, as {int(address[order[at + 1]]):#x} is"
        raise SpecError(field, f"runs from {one} and {two}", where)


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
