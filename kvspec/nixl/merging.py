"""Pair the ids of both sides, merge adjacent descriptors, and cut the result into handles.

Invariant: no destination byte is written twice, and no id is wider than NIXL reads. NIXL itself
accepts both: it truncates wide and fractional ids, and the last of two writes wins.

How it works:
    There are two merges. Each takes runs in an order, and joins a run to the one before if it
    continues it:

        merge          runs             order of        continues if                   done by
        within a row   each id          the caller      next id of the same dense row  NIXL
        across rows    the rest         the destination next byte, in one registered   kvspec
                                                        memory, on both sides

    NIXL joins ids neither across rows nor across handles. So handles are cut between runs, and
    the runs of the second merge are passed to NIXL as plain descriptors. This module does only
    arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.nixl import batches
from kvspec.nixl.rows import Ids, Ints, StridedRows
from kvspec.nixl.spans import Spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

LIMIT = 1.15
"""How many times what merging across rows would leave may be posted without it.

A bound for the reader of `bench/merging.py`, not a saving: few runs cost little either way.
"""
SPARED = 16
"""Descriptors spared from which on merging across rows takes less time than posting them.

Measured, 1 KiB each over shared memory: plain descriptors cost 40 us more than ids (16 of 32 runs
spared: 184 us against 169), and each that is posted 1.5 to 3 us (256 of 512 spared: 615 against
961; 64 of 128: 274 against 330).
"""


_FIRST = np.zeros(1, np.int64)


def checked_ids(field: str, ids: object, total: int) -> Ids:
    """Return *ids* as int32: one-dimensional integers (not bools), each in [0, *total*)."""
    masked = hasattr(ids, "mask")  # as numpy.ma has it, which compares no masked id
    if not isinstance(ids, np.ndarray) or masked or ids.ndim != 1 or ids.dtype.kind not in "iu":
        kind = f"{ids.dtype}{ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise SpecError(field, kind, "a one-dimensional numpy array of integers")
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < total):
        place = int(((ids < 0) | (ids >= total)).argmax())
        raise SpecError(f"{field}[{place}]", int(ids[place]), f"an id in [0, {total})")
    return np.ascontiguousarray(ids, dtype=np.int32)


@attrs.frozen(kw_only=True, eq=False)
class PlainDescriptors:
    """One descriptor a run: (n, 3) uint64 of address, length, device on either side."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]


def _nothing() -> tuple[tuple[Ints, Ints], Spans]:
    return (np.empty(0, np.int64),) * 2, Spans()


@attrs.frozen(kw_only=True, eq=False, slots=False)
class Pairing:
    """Checked pairs of ids, cut into batches that fit one handle each.

    Where runs of different rows were merged, *joined* has them, and *batches* are slices of it;
    else of the ids. *spans* makes `source` and `written`, which are only needed where other bytes
    move too; *posts* counts `runs`, which only who asks for them needs.
    """

    local_ids: Ids
    remote_ids: Ids
    spans: Callable[[], tuple[tuple[Ints, Ints], Spans]] = _nothing
    nbytes: int = 0
    posts: Callable[[], int] = int
    batches: tuple[slice, ...] = ()
    joined: PlainDescriptors | None = None

    @cached_property
    def _spans(self) -> tuple[tuple[Ints, Ints], Spans]:
        return self.spans()

    @cached_property
    def runs(self) -> int:
        """How many descriptors nixl should post."""
        return self.posts()

    @property
    def source(self) -> tuple[Ints, Ints]:
        """Where begins and ends what is read, in any order."""
        return self._spans[0]

    @property
    def written(self) -> Spans:
        """What is written."""
        return self._spans[1]


@attrs.frozen(kw_only=True, eq=False)
class Runs:
    """One side of some runs of touching bytes: the first id of each, its row, and its bytes."""

    rows: StridedRows
    ids: Ids
    row: Ints
    nbytes: Ints

    @cached_property
    def address(self) -> Ints:
        """Where each run begins."""
        return self.rows.address_of(self.ids, self.row)

    def take(self, which: Ints, nbytes: Ints) -> Runs:
        """Return the runs that begin as *which* do, of *nbytes*."""
        return Runs(rows=self.rows, ids=self.ids[which], row=self.row[which], nbytes=nbytes)

    def plain(self, which: Ints, skipped: Ints, length: Ints) -> NDArray[np.uint64]:
        """Return descriptors of *length* bytes that begin *skipped* bytes into the runs *which*."""
        descriptors = np.empty((len(which), 3), np.uint64)
        descriptors[:, 0] = self.address[which] + skipped
        descriptors[:, 1] = length
        descriptors[:, 2] = self.rows.table[self.row[which], 2]
        return descriptors


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
    """Whether each run in *order*, but the first, begins where the one before ends, in one memory.

    Two registered memories may touch, and no descriptor may lie in both.
    """
    area = runs.rows.area[runs.row[order]]
    touches = (runs.address + runs.nbytes)[order[:-1]] == runs.address[order[1:]]
    return np.asarray(touches & (area[:-1] == area[1:]))


def runs_of(rows: StridedRows, ids: Ids) -> Runs:
    """Return a run for each id."""
    row = rows.row_of(ids)
    return Runs(rows=rows, ids=ids, row=row, nbytes=rows.length[row])


def pair(
    local: StridedRows, local_ids: Ids, remote: StridedRows, remote_ids: Ids, destination: str
) -> Pairing:
    """Return the pairs, merged and cut between runs.

    In the given order, or, if merging across rows spares enough, in the destination's. Refuses
    pairs of unequal length and any byte of the *destination* ("local" or "remote") that would be
    written twice.
    """
    if len(local_ids) != len(remote_ids):
        raise SpecError(
            "local_ids", len(local_ids), f"as many ids as remote_ids has: {len(remote_ids)}"
        )
    ids = runs_of(local, local_ids), runs_of(remote, remote_ids)
    if not len(local_ids):
        return Pairing(local_ids=local_ids, remote_ids=remote_ids)
    _refuse_unequal(*ids)
    first = _starts(continues_in_row(ids[0]) & continues_in_row(ids[1]))
    nbytes = np.add.reduceat(ids[0].nbytes, first)
    runs = [side.take(first, nbytes) for side in ids]
    target, source = runs[:: -1 if destination == "remote" else 1]
    order = target.address.argsort(kind="stable")
    written = _disjoint(f"{destination}_ids", target, order)
    continues = continues_in_memory(target, order)
    if continues.any():
        continues &= continues_in_memory(source, order)
    spared, joined, length = int(continues.sum()), None, ids[0].nbytes
    if merges(len(first), spared):
        joined = _joined(runs, order, _starts(continues))
        length = nbytes = joined.local[:, 1].astype(np.int64)
        first = np.arange(len(nbytes))
    return Pairing(
        local_ids=local_ids,
        remote_ids=remote_ids,
        spans=lambda: ((source.address, source.address + source.nbytes), written),
        nbytes=int(nbytes.sum()),
        posts=lambda: len(first),
        batches=tuple(batches.cut(batches.Each(first, nbytes.cumsum(), length))),
        joined=joined,
    )


def _refuse_unequal(local: Runs, remote: Runs) -> None:
    unequal = local.nbytes != remote.nbytes
    if unequal.any():
        place = int(unequal.argmax())
        wanted = f"the {int(remote.nbytes[place])} B of remote id {int(remote.ids[place])}"
        value = f"{int(local.ids[place])} ({int(local.nbytes[place])} B)"
        raise SpecError(f"local_ids[{place}]", value, wanted)


def _disjoint(field: str, target: Runs, order: Ints) -> Spans:
    """Return the bytes of *target*, by address in *order*; refuse any that is written twice."""
    start = target.address[order]
    end = start + target.nbytes[order]
    twice = end[:-1] > start[1:]
    if twice.any():
        place = int(twice.argmax())
        where = f"no byte written twice, as {int(start[place + 1]):#x} is"
        one, other = target.ids[order[place : place + 2]].tolist()
        raise SpecError(field, f"runs from {one} and {other}", where)
    return Spans(start, end)


def _starts(continues: NDArray[np.bool_]) -> Ints:
    return np.concatenate((_FIRST, (~continues).nonzero()[0] + 1))


def _joined(runs: list[Runs], order: Ints, starts: Ints) -> PlainDescriptors:
    """Return the runs in *order*, from each of *starts* to the next as one that a handle takes."""
    total = np.add.reduceat(runs[0].nbytes[order], starts)
    cuts = -(-total // batches.MAX_BYTES)
    run = np.repeat(np.arange(len(starts)), cuts)
    skipped = (np.arange(len(run)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * batches.MAX_BYTES
    length = np.minimum(total[run] - skipped, batches.MAX_BYTES)
    local, remote = (side.plain(order[starts[run]], skipped, length) for side in runs)
    return PlainDescriptors(local=local, remote=remote)


def merges(posted: int, spared: int) -> bool:
    """Whether it pays to merge across rows what would be *posted*, and *spared* by that."""
    return spared >= SPARED or posted > LIMIT * (posted - spared)
