"""Check the two sides of a transfer, pair their ids, merge neighbours, and cut handles.

Invariant: everything is checked before anything is posted. No destination byte is written twice,
and no id is wider than NIXL reads. NIXL itself accepts both: it truncates wide and fractional ids,
and the last of two writes wins.

How it works:
    Ids that the caller computed are checked and paired one by one (`pair`). The table has joined
    the bytes of one block already (`runs.coalesce`). Two merges are left. A staged transfer
    replaces both by ranges (`staging.ranges`). Each merge takes runs in an order, and joins a run
    to the one before if it continues it:

        merge          runs             order of        continues if                   done by
        within a row   each id          the caller      next id of the same dense row  NIXL
        across rows    the rest         the destination next byte, in the same area,   kvspec
                                                        on both sides

    Rows of one area are chained by shared bytes, so they lie in one registered memory. Rows that
    only touch may lie in two memories, and no descriptor may lie in both.

    NIXL joins ids neither across rows nor across handles. So handles are cut between runs, and
    the runs of the second merge are passed to NIXL as plain descriptors. Only a run that is too
    long for one handle is cut inside.

    The ends of a selection have no ids, so they are plain descriptors as well, in a handle of their
    own. Few runs are passed by address together with them, since a second handle takes longer.

    A whole selection is paired by its runs and tiles, without a look at each id (`pair_selection`).
    The result moves the same bytes as `pair` of the same ids. `select` has already checked that no
    byte is written twice, so a wrong estimate below costs time, and never bytes.

    A selection has parts. Each part moves the same tiles of several runs of blocks, so NIXL joins
    the same tiles in each run whose tiles touch. Three facts are left to find:

    1. Does it pay to merge descriptors across rows? The first line that fits a selection decides:

           selection                         decided by      result
           one part of plain rows, no ends   -               never merged
           up to 1,024 ids                   `pair`          its plain descriptors, if it merged
           only plain rows, little to spare  an upper bound  not merged
           any other                         a sample        `pair`, if the sample pays

       NIXL joins the tiles of one run of plain rows that touch, so next to nothing is left to merge
       in one part. The upper bound is twice the descriptors of all parts but the largest. The
       sample has the first tiles of the first interleaved set of each part. An interleaved set
       has runs that interleave in memory, for example the layers of one block. All interleaved sets
       of a part look alike, and descriptors of two interleaved sets do not touch.

           sets        A: runs 1, 2          B: runs 3, 4
           memory      A1 A2 . A1 A2 . A1 A2   B3 B4 . B3 B4 . B3 B4
           sample      A1 A2 . A1 A2

    2. How many descriptors does NIXL post? `RowSet.posted` counts them.
    3. Where are the ids cut into handles? Between runs, if the selection exceeds one handle
       (`_parts_into_handles`). NIXL never joins ids of two runs, so such a cut costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import attrs
import numpy as np

from kvspec.descriptors.selection import Picked, RowIds, Selection
from kvspec.errors import SpecError
from kvspec.nixl.agent import Prepared, check_unreleased
from kvspec.nixl.rows import SEVERAL, StridedRows
from kvspec.ownership.tokens import Ints

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvspec.nixl.agent import Agent

Operation = Literal["READ", "WRITE"]
# A local list, ids of it, a remote list, and as many ids of it. Or a selection, and None.
PreparedSides = tuple[
    Prepared, "NDArray[np.integer] | Selection", Prepared, "NDArray[np.integer] | None"
]

# The costs of one descriptor. All times are over shared memory, and they differ between machines.
#
#     posting it                              1.5 to 3 us
#     as much as moving                       32,400 bytes (`runs.DESCRIPTOR_BYTES`)
#     as much as permuting                    6 KiB, until a rank learns it (`rule.STAGE_BELOW`)
#     as much as pairing                      20 ids (`IDS_FOR_A_POST`)
#     finding the ranges of a staged transfer costs as much as 96 of them (`rule.LEAST_SAVED`)
#
# The limits of one handle. Posting 1024 descriptors, or copying 16 MiB, takes 2 to 3 ms, which
# nothing can interrupt: small loads beside a large one wait that long. Making and releasing a
# handle costs about 0.05 ms. An id that NIXL receives by its number is never cut. So an id of more
# bytes, such as a block of 64 MiB with all layers, has a handle that takes longer. So has an end.
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
# So few runs are passed by address together with ends. Making a handle of ids besides takes 50 us,
# and an address takes 0.6 us more than an id.
FEW = 64
# Posting a descriptor takes 1.5 to 3 us, and pairing an id 0.1 us: about 20 ids for a post. For
# example, a request of 10,080 ids in order has 160 runs twice: once in whole blocks, once in the
# end of the last one. Merging them would spare 0.4 ms of NIXL's time and take 0.8 ms.
IDS_FOR_A_POST = 20
# About so many ids are paired to decide whether merging pays. That takes about 0.2 ms.
SAMPLE = 1024

_FIRST = np.zeros(1, np.int64)
NO_ID = -1  # Stands for an end in errors.
_ONE = partial(len, _FIRST)


def checked_ids(field: str, ids: object, total: int) -> RowIds:
    """Return *ids* as int32. Raise `SpecError` unless they are integers in [0, *total*)."""
    # An array of another class may compare in another way: a masked array compares no masked id.
    if type(ids) is not np.ndarray or ids.ndim != 1 or ids.dtype.kind not in "iu":
        kind = f"{ids.dtype}{ids.shape}" if type(ids) is np.ndarray else type(ids).__name__
        raise SpecError(field, kind, "a one-dimensional numpy array of integers")
    if len(ids) == 1:  # numpy compares one id ten times slower than Python.
        wrong = not 0 <= ids.item() < total
    else:
        # A negative number becomes a large unsigned number, so one comparison finds both errors.
        wrong = bool(np.count_nonzero(ids.astype(np.uint64) >= total))
    if wrong:
        place = int(((ids < 0) | (ids >= total)).argmax())
        raise SpecError(f"{field}[{place}]", int(ids[place]), f"an id in [0, {total})")
    # A copy: later batches are made of it, and the caller may change its own array.
    return ids.astype(np.int32)


class Runs(NamedTuple):
    """Runs of bytes, in any order: the address on both sides, and the length of each."""

    local: Ints
    remote: Ints
    nbytes: Ints


class Plain(NamedTuple):
    """Descriptors that NIXL receives by address, and the device of each side."""

    moved_runs: Runs
    local_device: int
    remote_device: int

    def batches(self) -> Iterator[Plain]:
        """Yield the descriptors in parts that fit one handle each."""
        moved_runs, *devices = self
        if fits(len(moved_runs.nbytes), int(moved_runs.nbytes.sum())):
            yield self
            return
        for part in into_handles(np.arange(len(moved_runs.nbytes)), moved_runs.nbytes):
            yield Plain(Runs(*(column[part] for column in moved_runs)), *devices)


@attrs.define(eq=False)
class Pairing:
    """Checked pairs of ids, cut into batches that fit one handle each.

    Attributes:
        local_ids: Ids of the local list.
        remote_ids: As many ids of the remote list.
        nbytes: Bytes of all pairs and ends.
        batches: What moves, alone. Slices select pairs of ids. Plain descriptors are the ends, or
            all runs and ends if they were merged across rows: the ids are not used then.
        moved_runs: Returns the bytes of all pairs and ends. Called only when it is needed: if other
            transfers are in flight, or if the transfer may be staged.
    """

    local_ids: RowIds
    remote_ids: RowIds
    nbytes: int
    batches: tuple[slice | Plain, ...]
    _count: Callable[[], int]
    moved_runs: Callable[[], Runs]

    @property
    def runs(self) -> int:
        """Number of descriptors that NIXL should post. Counted only when it is needed."""
        return self._count()


def continues_in_row(rows: StridedRows, ids: RowIds, row: Ints) -> NDArray[np.bool_]:
    """Whether each of *ids*, but the first, is the next id of the same dense row.

    Args:
        rows: The rows of one side.
        ids: Ids of that side.
        row: Row of each id.

    >>> from kvspec.nixl.rows import checked_rows  # tiles of 16 bytes, and quarters of them
    >>> rows = checked_rows(np.array([(4096, 16, 0, 16, 8), (4096, 4, 0, 4, 32)], np.uint64))
    >>> ids = np.array([14, 15, 2, 3, 6], np.int32)  # quarters 6 and 7; tiles 2, 3 and 6
    >>> row = rows.row_of(ids)
    >>> (rows.address_of(ids, row) - 4096).tolist()
    [24, 28, 32, 48, 96]
    >>> continues_in_row(rows, ids, row).tolist()
    [True, False, True, False]

    Three runs are left: 24 to 32, 32 to 64 and 96 to 112. The first two touch, in different rows:

    >>> starts, lengths = np.array([24, 32, 96]) + 4096, np.array([8, 32, 16])
    >>> continues_in_memory(starts, lengths, rows.memory_begins).tolist()
    [True, False]
    """
    next_id = (ids[1:] - ids[:-1] == 1) & (row[1:] == row[:-1])
    return np.asarray(next_id & rows.dense[row[1:]])


def continues_in_memory(starts: Ints, lengths: Ints, begins: Ints) -> NDArray[np.bool_]:
    """Whether each run, but the first, begins where the run before it ends, in its area.

    Two registered memories may touch, and no descriptor may lie in both. *begins* are the
    addresses at which the areas of this side begin.
    """
    touches = starts[:-1] + lengths[:-1] == starts[1:]
    if np.count_nonzero(touches):
        # No begin equals the start. `np.isin` takes ten times as long for few numbers.
        below = begins.searchsorted(starts[1:], side="left")
        touches &= below == begins.searchsorted(starts[1:], side="right")
    return np.asarray(touches)


def pair(
    local: StridedRows,
    local_ids: RowIds,
    remote: StridedRows,
    remote_ids: RowIds,
    destination: str,
    ends: Sequence[Plain] = (),
) -> Pairing:
    """Return the pairs and the *ends*, merged and cut between runs.

    The order is that of the ids, or of the *destination* ("local" or "remote") if merging across
    rows spares enough descriptors. Rows of several devices are not merged: the addresses of two
    devices may be equal, and are different memory.

    Raises:
        SpecError: If two paired ids have different lengths, or a byte of the destination would be
            written twice.
    """
    if len(local_ids) != len(remote_ids):
        raise SpecError(
            "local_ids", len(local_ids), f"as many ids as remote_ids has: {len(remote_ids)}"
        )
    moved_runs = partial(_runs_of_ids, local, local_ids, remote, remote_ids)
    # One pair has nothing to merge, and its row does not matter if all rows have equal lengths.
    alone = len(local_ids) == 1 and not ends
    if alone and local.size is not None and local.size == remote.size:
        return Pairing(local_ids, remote_ids, local.size, (slice(0, 1),), _ONE, moved_runs)
    if not len(local_ids) and not ends:
        return Pairing(local_ids, remote_ids, 0, (), int, moved_runs)
    rows = local.row_of(local_ids), remote.row_of(remote_ids)
    length = local.length[rows[0]]
    _refuse_unequal(local_ids, length, remote_ids, remote.length[rows[1]])
    sides = (local, local_ids, rows[0]), (remote, remote_ids, rows[1])
    first = starts_of(continues_in_row(*sides[0]) & continues_in_row(*sides[1]))[: len(local_ids)]
    near, far = (side.address_of(ids[first], row[first]) for side, ids, row in sides)
    runs = _all_runs([Runs(near, far, np.add.reduceat(length, first)), *_runs_of(ends)])
    target, written = local_ids, runs.local
    if destination == "remote":
        target, written = remote_ids, runs.remote
    order = written.argsort(kind="stable")
    names = np.append(target[first], np.full(len(order) - len(first), NO_ID))
    _refuse_overlap(f"{destination}_ids", names[order], written[order], runs.nbytes[order])
    nbytes, joined = int(runs.nbytes.sum()), _merged(runs, order, local, remote, ends)
    if joined is not None:
        count = partial(len, joined.moved_runs.nbytes)
        return Pairing(local_ids, remote_ids, nbytes, (*joined.batches(),), count, lambda: runs)
    of_ids: tuple[slice, ...] = (slice(0, len(length)),)[: len(first)]
    if not fits(len(first), int(length.sum())):
        of_ids = tuple(into_handles(first, length))
    batches: tuple[slice | Plain, ...] = (*of_ids, *_batches(ends))
    return Pairing(local_ids, remote_ids, nbytes, batches, partial(len, order), lambda: runs)


def _merged(
    runs: Runs, order: Ints, local: StridedRows, remote: StridedRows, ends: Sequence[Plain]
) -> Plain | None:
    """Return *runs* merged across rows, or None if that is impossible or does not pay."""
    if len(order) == 1 or SEVERAL in (local.device, remote.device):
        return None
    continues = np.ones(len(order) - 1, np.bool_)
    for side, starts in ((local, runs.local), (remote, runs.remote)):
        if continues.any():
            continues &= continues_in_memory(starts[order], runs.nbytes[order], side.memory_begins)
    # Ends need a handle of plain descriptors in any case. A few runs join it, merged or not,
    # instead of taking a second handle.
    few = bool(ends) and len(order) <= FEW
    if not few and not merges(len(order), int(np.count_nonzero(continues))):
        return None
    return Plain(_joined(runs, order, starts_of(continues)), local.device, remote.device)


def _runs_of_ids(
    local: StridedRows, local_ids: RowIds, remote: StridedRows, remote_ids: RowIds
) -> Runs:
    near, far = local.row_of(local_ids), remote.row_of(remote_ids)
    begins = local.address_of(local_ids, near), remote.address_of(remote_ids, far)
    return Runs(*begins, local.length[near])


def _runs_of(ends: Sequence[Plain]) -> Iterator[Runs]:
    return (plain.moved_runs for plain in ends)


def _batches(ends: Sequence[Plain]) -> Iterator[Plain]:
    return (part for plain in ends for part in plain.batches())


def _all_runs(every: Sequence[Runs]) -> Runs:
    return every[0] if len(every) == 1 else Runs(*map(np.concatenate, zip(*every, strict=True)))


def _refuse_unequal(local_ids: RowIds, local: Ints, remote_ids: RowIds, remote: Ints) -> None:
    """Raise `SpecError` if the lengths *local* and *remote* differ for a pair of ids."""
    unequal = local != remote
    if np.count_nonzero(unequal):
        place = int(unequal.argmax())
        expected = f"the {int(remote[place])} B of remote id {int(remote_ids[place])}"
        value = f"{int(local_ids[place])} ({int(local[place])} B)"
        raise SpecError(f"local_ids[{place}]", value, expected)


def _refuse_overlap(field: str, ids: RowIds, starts: Ints, lengths: Ints) -> None:
    """Raise `SpecError` if two runs share a byte. They are sorted by address."""
    twice = starts[:-1] + lengths[:-1] > starts[1:]
    if twice.any():
        place = int(twice.argmax())
        one, other = ids[place : place + 2].tolist()
        expected = f"no byte written twice, as {int(starts[place + 1]):#x} is"
        raise SpecError(field, f"runs from {one} and {other}", expected)


def starts_of(continues: NDArray[np.bool_]) -> Ints:
    """Return the first of each group, from whether each member but the first continues one."""
    return np.concatenate((_FIRST, (~continues).nonzero()[0] + 1))


def _joined(runs: Runs, order: Ints, starts: Ints) -> Runs:
    """Return one descriptor for the runs in *order* from each of *starts* to the next.

    A descriptor that is too long for one handle is cut.
    """
    total = np.add.reduceat(runs.nbytes[order], starts)
    cuts = -(-total // MAX_BYTES)
    number = np.repeat(np.arange(len(starts)), cuts)
    skipped = (np.arange(len(number)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * MAX_BYTES
    run, length = order[starts[number]], np.minimum(total[number] - skipped, MAX_BYTES)
    return Runs(runs.local[run] + skipped, runs.remote[run] + skipped, length)


def merges(posted: int, spared: int) -> bool:
    """Whether merging across rows pays. It would spare *spared* of *posted* descriptors.

    The ids are paired already.
    """
    return spared >= SPARED or posted > LIMIT * (posted - spared)


def worth_pairing(posted: int, spared: int, ids: int) -> bool:
    """Whether it pays to pair so many *ids*, to spare *spared* of *posted* descriptors.

    `pair` looks at each id. So to spare a few descriptors is not enough, as it is for `merges`:
    they must be worth the time of pairing, and also be a large enough part of all.
    """
    return spared * IDS_FOR_A_POST > ids and posted > LIMIT * (posted - spared)


def fits(posted: int, nbytes: int) -> bool:
    """Whether one handle takes so many descriptors and bytes."""
    return posted <= MAX_DESCRIPTORS and nbytes <= MAX_BYTES


def into_handles(first: Ints, length: Ints) -> Iterator[slice]:
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


def checked_pairs(agent: Agent, operation: Operation, sides: PreparedSides) -> Pairing:
    """Return the pairs of ids of *sides*, which must be lists of *agent*.

    The ids of a selection are paired by its parts if that is possible.
    """
    local, local_ids, remote, remote_ids = sides
    if not isinstance(local, Prepared) or local.peer is not None or local.agent is not agent:
        raise SpecError("local", local, "a list that this rank prepared of its own memory")
    if not isinstance(remote, Prepared) or remote.peer is None or remote.agent is not agent:
        raise SpecError("remote", remote, "a list that this rank prepared of a peer's memory")
    if local.released or remote.released:
        check_unreleased(local, remote)
    target = "local" if operation == "READ" else "remote"
    if not isinstance(local_ids, Selection):
        local_ids = checked_ids("local_ids", local_ids, local.rows.total)
        remote_ids = checked_ids("remote_ids", remote_ids, remote.rows.total)
        return pair(local.rows, local_ids, remote.rows, remote_ids, target)
    selection = local_ids
    other: object = remote_ids
    if other is not None and other is not selection:
        raise SpecError("remote_ids", other, "None, or the same selection as local_ids")
    rows = selection.producer_rows, selection.consumer_rows
    own = int(local.given_rows is rows[1])
    if local.given_rows is not rows[own] or remote.given_rows is not rows[1 - own]:
        rule = "a selection of the table whose rows both lists contain"
        raise SpecError("local_ids", "a selection", rule)
    return pair_selection(selection, local.rows, remote.rows, own, target)


def pair_selection(
    selection: Selection, local: StridedRows, remote: StridedRows, own: int, destination: str
) -> Pairing:
    """Return the pairs of *selection*, by its parts if it is large and nothing has to be merged.

    Args:
        selection: The selection.
        local: Rows of this rank.
        remote: Rows of the peer.
        own: Place of this rank's side among producer and consumer: 0 or 1.
        destination: The side that is written: "local" or "remote".
    """
    parts, ids = selection.parts, selection.ids
    ends, count = plain_ends(selection.end_parts, own), len(selection.producer_ids)
    # Nothing merges across rows if one part has plain rows.
    alone, small = len(parts) == 1 and parts[0][0].rows.plain, count <= SAMPLE
    if small:
        tries = bool(ends) or not alone
    else:
        tries = not alone and _merging_pays(selection, local, remote, own, destination)
    if tries:
        merged = pair(local, ids[own], remote, ids[1 - own], destination, ends)
        # A small selection was paired to find out whether it merges. If not, that result is not
        # used: its runs are joined within rows, and staging refuses a run that exceeds a slot. The
        # runs of parts are tiles.
        if not small or not parts or isinstance(merged.batches[0], Plain):
            return merged
    nbytes = sum(numbered.rows.nbytes * len(tiles) for numbered, tiles in parts)
    posted = partial(_posted, parts)
    # Counting the posted descriptors takes time, so do it only if the answer depends on it.
    batches = (slice(0, count),)[: len(parts)]
    if not fits(count, nbytes) and not (fits(1, nbytes) and fits(posted(), nbytes)):
        batches = tuple(_parts_into_handles(parts))
    return Pairing(
        ids[own],
        ids[1 - own],
        selection.nbytes,
        (*batches, *_batches(ends)),
        lambda: posted() + sum(len(moved_runs.nbytes) for moved_runs in _runs_of(ends)),
        lambda: _all_runs([_runs_of_parts(parts, own), *_runs_of(ends)]),
    )


def plain_ends(parts: Sequence[Picked], own: int) -> tuple[Plain, ...]:
    """Return the descriptors of the ends, by the device of each side."""
    by_devices: dict[tuple[int, int], list[Picked]] = {}
    for numbered, tiles in parts:
        devices = numbered.rows.producer.device, numbered.rows.consumer.device
        by_devices.setdefault((devices[own], devices[1 - own]), []).append((numbered, tiles))
    return tuple(Plain(_runs_of_parts(same, own), *key) for key, same in by_devices.items())


def _posted(parts: Sequence[Picked]) -> int:
    """Return the number of descriptors that NIXL posts."""
    return sum(numbered.rows.posted(tiles) for numbered, tiles in parts)


def _merging_pays(
    selection: Selection, local: StridedRows, remote: StridedRows, own: int, destination: str
) -> bool:
    """Estimate whether a merge across rows of a large selection would spare enough descriptors.

    The first tiles of the first interleaved set of each part are paired by id. Ends do not count:
    they are few, and each merges with one tile at most.
    """
    parts, total = selection.parts, len(selection.producer_ids)
    if all(numbered.rows.plain for numbered, _ in parts):
        # NIXL joins nearly all that touches within a part. A descriptor of the largest part merges
        # only with those of other parts. Each of these has two neighbours, so at most two merges.
        each = [numbered.rows.posted(tiles) for numbered, tiles in parts]
        if not worth_pairing(sum(each), 2 * (sum(each) - max(each)), total):
            return False
    posted, sample = 0, list[RowIds]()
    for numbered, tiles in parts:
        runs = numbered.rows.interleaved_runs
        count = min(len(tiles), max(1, SAMPLE // (runs * len(parts))))
        touching = int(np.count_nonzero(numbered.rows.touches[:runs]))
        for number, touches in ((touching, True), (runs - touching, False)):
            firsts = starts_of(numbered.rows.joins(tiles, touches=touches))
            posted += number * int(np.count_nonzero(firsts < count))
        ids = numbered.starts[:, :runs] + tiles.ids[:, None, :count].astype(np.int32)
        sample.append(ids.reshape(2, -1))
    ids = np.concatenate(sample, axis=1)
    merged = pair(local, ids[own], remote, ids[1 - own], destination)
    return worth_pairing(posted, posted - merged.runs, ids.shape[1])


def _runs_of_parts(parts: Sequence[Picked], own: int) -> Runs:
    """Return all descriptors of the selection."""
    found = np.concatenate([numbered.addresses(tiles).T for numbered, tiles in parts], axis=1)
    return Runs(found[own], found[1 - own], found[2])


def _parts_into_handles(parts: Sequence[Picked]) -> Iterator[slice]:
    """Yield slices of the ids of all parts that fit one handle each.

    A handle has runs of one part, and as many as fit. If one run of blocks is too long, it has
    several handles of its own.
    """
    start = 0
    for numbered, tiles in parts:
        rows, count = numbered.rows, len(tiles)
        length = rows.size or int(rows.length.max())
        # At most *count* descriptors are posted for one run. Count them only if one run may have
        # several handles.
        long = not fits(count, count * length)
        firsts = {
            touches: starts_of(rows.joins(tiles, touches=touches)) if long else np.arange(count)
            for touches in set(rows.touches.tolist())
        }
        posted = max(map(len, firsts.values()))
        runs = min(MAX_DESCRIPTORS // posted, MAX_BYTES // (count * length))
        within = {
            touches: [slice(0, runs * count)]
            if runs
            else [*into_handles(each, np.full(count, length))]
            for touches, each in firsts.items()
        }
        stop = start + len(rows) * count
        for number in range(0, len(rows), max(runs, 1)):
            run = start + number * count
            for each in within[bool(rows.touches[number])]:
                yield slice(run + each.start, min(run + each.stop, stop))
        start = stop
