"""Pair the ids of both sides, merge adjacent descriptors, and cut the result into handles.

Invariant: no destination byte is written twice, and no id is wider than NIXL reads. NIXL itself
accepts both: it truncates wide and fractional ids, and the last of two writes wins.

How it works:
    There are two merges. Each takes runs in an order, and joins a run to the one before if it
    continues it:

        merge          runs             order of        continues if                   done by
        within a row   each id          the caller      next id of the same dense row  NIXL
        across rows    the rest         the destination next byte, in the same area,   kvspec
                                                        on both sides

    Rows of one area are chained by shared bytes, so they lie in one registered memory. Rows that
    only touch may lie in two memories, and no descriptor may lie in both.

    NIXL joins ids neither across rows nor across handles. So handles are cut between runs, and
    the runs of the second merge are passed to NIXL as plain descriptors. Only a run that is too
    long for one handle is cut inside. This module does only arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.nixl.rows import Ids, Ints, StridedRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The limits of one handle. Posting 1024 descriptors, or copying 16 MiB, takes 2 to 3 ms, which
# nothing can interrupt: small loads beside a large one wait that long. Making and releasing a
# handle costs about 0.05 ms.
MAX_DESCRIPTORS = 1024
MAX_BYTES = 16 << 20
# Ranks merge across rows if NIXL would otherwise post more than this multiple of the descriptors.
# It bounds what `bench/merging.py` shows. It saves little time: few runs cost little either way.
LIMIT = 1.15
# Ranks also merge across rows if that spares at least so many descriptors, even if they are a small
# part. Measured with 1 KiB each over shared memory: plain descriptors cost 40 us more than ids, and
# each posted descriptor costs 1.5 to 3 us. So 16 is near the break-even. Sparing 16 of 32 runs
# loses a little: 184 us instead of 169. Sparing 64 of 128 saves time: 274 us instead of 330.
SPARED = 16

_FIRST = np.zeros(1, np.int64)


def checked_ids(field: str, ids: object, total: int) -> Ids:
    """Return *ids* as int32. Raise `SpecError` unless they are integers in [0, *total*)."""
    # A masked array compares no masked id, so it is refused.
    if (
        not isinstance(ids, np.ndarray)
        or ids.ndim != 1
        or ids.dtype.kind not in "iu"
        or isinstance(ids, np.ma.MaskedArray)
    ):
        kind = f"{ids.dtype}{ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise SpecError(field, kind, "a one-dimensional numpy array of integers")
    if len(ids) == 1:  # numpy compares one id ten times slower than Python.
        wrong = not 0 <= int(ids[0]) < total
    else:
        # A negative number becomes a large unsigned number, so one comparison finds both errors.
        wrong = bool(np.count_nonzero(ids.astype(np.uint64) >= total))
    if wrong:
        place = int(((ids < 0) | (ids >= total)).argmax())
        raise SpecError(f"{field}[{place}]", int(ids[place]), f"an id in [0, {total})")
    return np.ascontiguousarray(ids, dtype=np.int32)


class PlainDescriptors(NamedTuple):
    """Address, length and device of each descriptor on both sides. Shape (n, 3), uint64."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]


class Spans(NamedTuple):
    """Bytes that are copied, in any order: the address on both sides, and the length of each."""

    local: Ints
    remote: Ints
    nbytes: Ints


@attrs.define(eq=False)
class Pairing:
    """Checked pairs of ids, cut into batches that fit one handle each.

    Attributes:
        local_ids: Ids of the local list.
        remote_ids: As many ids of the remote list.
        nbytes: Bytes of all pairs.
        batches: Slices of the ids, or of *joined* if runs of different rows were merged.
        spans: Returns the bytes of all pairs. Called only when it is needed: if other transfers
            are in flight, or if the transfer may be staged.
        joined: The merged descriptors, or None.
    """

    local_ids: Ids
    remote_ids: Ids
    nbytes: int
    batches: tuple[slice, ...]
    _count: Callable[[], int]
    spans: Callable[[], Spans]
    joined: PlainDescriptors | None = None

    @property
    def runs(self) -> int:
        """Number of descriptors that NIXL should post. Counted only when it is needed."""
        return self._count()


@attrs.frozen(eq=False, slots=False)
class Runs:
    """One side of runs of adjacent bytes.

    Attributes:
        rows: The rows of the side.
        ids: First id of each run.
        row: Row of each first id.
        nbytes: Bytes of each run.
    """

    rows: StridedRows
    ids: Ids
    row: Ints
    nbytes: Ints

    @cached_property
    def address(self) -> Ints:
        """Address of each run."""
        return self.rows.address_of(self.ids, self.row)

    def take(self, which: Ints, nbytes: Ints) -> Runs:
        """Return runs that begin like the runs *which*, and have *nbytes*."""
        return Runs(self.rows, self.ids[which], self.row[which], nbytes)

    def plain(self, which: Ints, skipped: Ints, length: Ints) -> NDArray[np.uint64]:
        """Return descriptors of *length* bytes that begin *skipped* bytes into the runs *which*."""
        device = self.rows.table[self.row[which], 2].view(np.int64)
        return np.column_stack((self.address[which] + skipped, length, device)).view(np.uint64)


def continues_in_row(runs: Runs) -> NDArray[np.bool_]:
    """Whether each run of one id, but the first, is the next of the same dense row.

    >>> from kvspec.nixl.rows import checked_rows  # tiles of 16 bytes, and quarters of them
    >>> rows = checked_rows(np.array([(4096, 16, 0, 16, 8), (4096, 4, 0, 4, 32)], np.uint64))
    >>> ids = np.array([14, 15, 2, 3, 6], np.int32)  # quarters 6 and 7; tiles 2, 3 and 6
    >>> one_each = runs_of(rows, ids)
    >>> [int(address) - 4096 for address in one_each.address]
    [24, 28, 32, 48, 96]
    >>> continues_in_row(one_each).tolist()
    [True, False, True, False]

    Three runs are left: 24 to 32, 32 to 64 and 96 to 112. The first two touch, in different rows:

    >>> left = one_each.take(np.array([0, 2, 4]), np.array([8, 32, 16]))
    >>> continues_in_memory(left, order=np.arange(3)).tolist()
    [True, False]
    """
    row = runs.row
    same_row = (runs.ids[1:] - runs.ids[:-1] == 1) & (row[1:] == row[:-1])
    return np.asarray(same_row & runs.rows.dense[row[1:]])


def continues_in_memory(runs: Runs, order: Ints) -> NDArray[np.bool_]:
    """Whether each run in *order*, but the first, begins where the one before ends, in its area.

    Two registered memories may touch, and no descriptor may lie in both. The addresses of two
    devices may be equal, and are different memory.
    """
    start, row = runs.address[order], runs.row[order]
    touches = (runs.address + runs.nbytes)[order[:-1]] == start[1:]
    where = touches.nonzero()[0]
    if len(where):
        device = runs.rows.table[:, 2][row]
        touches[where] = ~np.isin(start[where + 1], runs.rows.area_begins)
        touches &= device[1:] == device[:-1]
    return np.asarray(touches)


def runs_of(rows: StridedRows, ids: Ids) -> Runs:
    """Return a run for each id."""
    row = rows.row_of(ids)
    return Runs(rows, ids, row, rows.length[row])


def pair(
    local: StridedRows, local_ids: Ids, remote: StridedRows, remote_ids: Ids, destination: str
) -> Pairing:
    """Return the pairs, merged and cut between runs.

    The order is that of the ids, or of the *destination* ("local" or "remote") if merging across
    rows spares enough descriptors.

    Raises:
        SpecError: If two paired ids have different lengths, or a byte of the destination would be
            written twice.
    """
    if len(local_ids) != len(remote_ids):
        raise SpecError(
            "local_ids", len(local_ids), f"as many ids as remote_ids has: {len(remote_ids)}"
        )
    runs = runs_of(local, local_ids), runs_of(remote, remote_ids)
    spans = partial(_spans, *runs)
    if not len(local_ids):
        return Pairing(local_ids, remote_ids, 0, (), int, spans)
    _refuse_unequal(*runs)
    first, length, joined = _FIRST, runs[0].nbytes, None
    if len(local_ids) > 1:
        first = starts_of(continues_in_row(runs[0]) & continues_in_row(runs[1]))
        sums = np.add.reduceat(length, first)
        runs = runs[0].take(first, sums), runs[1].take(first, sums)
        source, target = runs if destination == "remote" else runs[::-1]
        order = target.address.argsort(kind="stable")
        _refuse_overlap(f"{destination}_ids", target, order)
        continues = continues_in_memory(target, order)
        if continues.any():
            continues &= continues_in_memory(source, order)
        if merges(len(first), int(continues.sum())):
            joined = _plain_descriptors(runs, order, starts_of(continues))
            length = joined.local[:, 1].astype(np.int64)
            first = np.arange(len(length))
    nbytes = int(length.sum()) if len(length) > 1 else int(length[0])
    batches: tuple[slice, ...] = (slice(0, len(length)),)
    if not fits(len(first), nbytes):
        batches = tuple(cut(first, length))
    return Pairing(local_ids, remote_ids, nbytes, batches, partial(len, first), spans, joined)


def _spans(local: Runs, remote: Runs) -> Spans:
    return Spans(local.address, remote.address, local.nbytes)


def _refuse_unequal(local: Runs, remote: Runs) -> None:
    unequal = local.nbytes != remote.nbytes
    if np.count_nonzero(unequal):
        place = int(unequal.argmax())
        expected = f"the {int(remote.nbytes[place])} B of remote id {int(remote.ids[place])}"
        value = f"{int(local.ids[place])} ({int(local.nbytes[place])} B)"
        raise SpecError(f"local_ids[{place}]", value, expected)


def _refuse_overlap(field: str, target: Runs, order: Ints) -> None:
    """Raise `SpecError` if two runs of *target* share a byte. *order* sorts them by address."""
    start = target.address[order]
    twice = start[:-1] + target.nbytes[order[:-1]] > start[1:]
    if twice.any():
        place = int(twice.argmax())
        one, other = target.ids[order[place : place + 2]].tolist()
        expected = f"no byte written twice, as {int(start[place + 1]):#x} is"
        raise SpecError(field, f"runs from {one} and {other}", expected)


def starts_of(continues: NDArray[np.bool_]) -> Ints:
    """Return the first of each group, from whether each member but the first continues one."""
    return np.concatenate((_FIRST, (~continues).nonzero()[0] + 1))


def _plain_descriptors(runs: tuple[Runs, Runs], order: Ints, starts: Ints) -> PlainDescriptors:
    """Return one descriptor for the runs in *order* from each of *starts* to the next.

    A descriptor that is too long for one handle is cut.
    """
    total = np.add.reduceat(runs[0].nbytes[order], starts)
    cuts = -(-total // MAX_BYTES)
    run = np.repeat(np.arange(len(starts)), cuts)
    skipped = (np.arange(len(run)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * MAX_BYTES
    length = np.minimum(total[run] - skipped, MAX_BYTES)
    local, remote = (side.plain(order[starts[run]], skipped, length) for side in runs)
    return PlainDescriptors(local, remote)


def merges(posted: int, spared: int) -> bool:
    """Whether merging across rows pays. It would spare *spared* of *posted* descriptors."""
    return spared >= SPARED or posted > LIMIT * (posted - spared)


def fits(posted: int, nbytes: int) -> bool:
    """Whether one handle takes so many descriptors and bytes."""
    return posted <= MAX_DESCRIPTORS and nbytes <= MAX_BYTES


def cut(first: Ints, length: Ints) -> Iterator[slice]:
    """Yield slices of ids that fit one handle each, cut between runs.

    A run that is too long for a handle is cut inside. Its parts are long enough to be cheap.

    Args:
        first: Place of the first id of each run.
        length: Bytes of each id. The ids of one run have the same length.
    """
    run, stops = 0, np.append(first[1:], len(length))
    reached = np.add.reduceat(length, first).cumsum()
    while run < len(first):
        begin, before = int(first[run]), int(reached[run - 1]) if run else 0
        stop = int(reached.searchsorted(before + MAX_BYTES, side="right"))
        stop = min(stop, run + MAX_DESCRIPTORS)
        if stop > run:
            yield slice(begin, int(stops[stop - 1]))
        else:
            stop = run + 1
            step, end = max(1, MAX_BYTES // int(length[begin])), int(stops[run])
            for at in range(begin, end, step):
                yield slice(at, min(at + step, end))
        run = stop
