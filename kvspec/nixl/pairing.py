"""Check the two sides of a transfer, and pair the ids of both.

Invariant: everything is checked before anything is posted. A selection moves the same bytes as
`merging.pair` of the same ids. `select` has already checked that no byte is written twice, so a
wrong estimate below costs time, and never bytes.

How it works:
    Ids that the caller computed are checked and paired one by one (`merging.pair`). A whole
    selection is paired by its runs and tiles, without a look at each id (`pair_selection`).

    A selection has parts. Each part moves the same tiles of several runs of blocks. NIXL joins
    tiles of one row, so one run shows what it posts for all runs of a part. Three facts are left to
    find:

    1. Does it pay to merge descriptors across rows? Then the answer is None, and `pair` looks at
       each id. One part of plain rows has nothing to merge: NIXL joins all of its tiles that touch.
       Of other selections, a sample is merged. Small ones are their own sample, so the answer is
       exact. Of a large one, the sample is the first tiles of the first bunch of each part. A bunch
       is a set of runs that interleave in memory, for example the layers of one block. All bunches
       of a part look alike, and descriptors of two bunches do not touch.

           bunches     A: runs 1, 2          B: runs 3, 4
           memory      A1 A2 . A1 A2 . A1 A2   B3 B4 . B3 B4 . B3 B4
           sample      A1 A2 . A1 A2

    2. How many descriptors does NIXL post? `RowSet.next_ids` counts them for one run.
    3. Where are the ids cut into handles? Between runs, if the selection exceeds one handle
       (`_cut`). NIXL never joins ids of two runs, so such a cut costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import attrs
import numpy as np

from kvspec.descriptors.selection import Picked, Selection
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.nixl import merging
from kvspec.nixl.agent import Agent
from kvspec.nixl.merging import Pairing, Spans, checked_ids, cut, fits, merges, pair, starts_of
from kvspec.nixl.rows import Ints, StridedRows
from kvspec.ownership.replicas import Role

if TYPE_CHECKING:
    from numpy.typing import NDArray


Operation = Literal["READ", "WRITE"]
# About so many descriptors are merged to decide whether merging pays. That takes about 0.2 ms.
SAMPLE = 4096


@attrs.define(eq=False, repr=False)
class Prepared:
    """A list of descriptors that NIXL has checked. `NixlRank.prepare` returns it.

    Id *i* of row *r* begins at `address[r] + (i - first id of r) * stride[r]`.

    Attributes:
        agent: The agent that checked the list.
        rows: The checked rows.
        memory_type: "DRAM" or "VRAM".
        peer: Name of the peer that has the memory, or None for memory of this rank.
        given_rows: The array that the caller passed to `prepare`, not a copy. If it is an array of
            a selection's table, the list has the rows of that table.
        released: Whether NIXL no longer has the list.
        handle: NIXL's handle, or 0 if there are no rows.
    """

    agent: Agent
    rows: StridedRows
    memory_type: str
    peer: str | None
    handle: int
    given_rows: object
    released: bool = False

    def __repr__(self) -> str:
        side = "local" if self.peer is None else f"peer={self.peer!r}"
        return f"<Prepared {side} {len(self.rows.table)} rows, {self.total} ids>"

    @property
    def total(self) -> int:
        """Number of ids."""
        return self.rows.total

    def release(self) -> None:
        """Release the list. Posted transfers continue. A second call does nothing."""
        with self.agent.lock:
            self.agent.check_open()
            # Set the flag first: after an interrupt in between, the handle is never freed twice.
            known, self.released = not self.released, True
            if known and self.rows.total:
                self.agent.release_list(self.handle)


def check_unreleased(*lists: Prepared) -> None:
    """Raise `TransferError` "closed" if one of *lists* was released."""
    for prepared in lists:
        if prepared.released:
            message = f"{prepared!r} was released: {TransferState.CLOSED.advice}"
            raise TransferError(message, rank=prepared.peer, state=TransferState.CLOSED)


# A local list, ids of it, a remote list, and as many ids of it. Or a selection, and None.
Sides = tuple[Prepared, "NDArray[np.integer] | Selection", Prepared, "NDArray[np.integer] | None"]


def checked_pairs(agent: Agent, operation: Operation, sides: Sides) -> Pairing:
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
    selection, other = local_ids, cast("object", remote_ids)
    if other is not None and other is not selection:
        raise SpecError("remote_ids", other, "None, or the same selection as local_ids")
    near: Role = "consumer" if local.given_rows is selection.consumer_rows else "producer"
    roles = selection.producer_rows, selection.consumer_rows
    far_rows, near_rows = roles if near == "consumer" else roles[::-1]
    if local.given_rows is not near_rows or remote.given_rows is not far_rows:
        rule = "a selection of the table whose rows both lists contain"
        raise SpecError("local_ids", "a selection", rule)
    inward = operation == "READ"
    found = pair_selection(selection, local.rows, remote.rows, near, inward=inward)
    if found is not None:
        return found
    ids = selection[::-1] if near == "consumer" else selection
    return pair(local.rows, ids[0], remote.rows, ids[1], target)


def pair_selection(
    selection: Selection, local: StridedRows, remote: StridedRows, near: Role, *, inward: bool
) -> Pairing | None:
    """Return the pairs of *selection*, or None if it pays to merge descriptors across rows.

    Args:
        selection: The selection.
        local: Rows of this rank.
        remote: Rows of the peer.
        near: The side of this rank.
        inward: Whether this rank is written, as by a read.
    """
    parts = selection.parts
    if len(parts) != 1 or not parts[0][0].rows.plain:
        sides = (local, remote) if near == "producer" else (remote, local)
        if not parts or _merging_pays(parts, sides, int(inward == (near == "consumer"))):
            return None
    producer_ids, consumer_ids = selection
    ids = (producer_ids, consumer_ids) if near == "producer" else (consumer_ids, producer_ids)
    count, nbytes = len(producer_ids), 0
    for entry, tiles in parts:
        size = entry.rows.size
        of_tile = int(entry.rows.length.sum()) if size is None else size * len(entry.rows)
        nbytes += of_tile * len(tiles)
    posted = partial(_posted, parts)
    # Counting the posted descriptors takes time, so do it only if the answer depends on it.
    batches: tuple[slice, ...] = (slice(0, count),)
    if not fits(count, nbytes) and not (fits(1, nbytes) and fits(posted(), nbytes)):
        batches = tuple(_cut(parts))
    return Pairing(*ids, nbytes, batches, posted, partial(_spans, parts, near))


def _posted(parts: Sequence[Picked]) -> int:
    """Return the number of descriptors that NIXL posts."""
    return sum(entry.rows.posted(tiles) for entry, tiles in parts)


def _firsts(picked: Picked) -> Ints:
    """Return the first tile of each descriptor that NIXL posts for one run."""
    entry, tiles = picked
    if not entry.rows.touching:
        return np.arange(len(tiles))
    return starts_of(entry.rows.next_ids(tiles))


def _merging_pays(
    parts: Sequence[Picked], sides: tuple[StridedRows, StridedRows], written: int
) -> bool:
    """Whether a merge across rows would spare enough descriptors. An estimate, if there are many.

    Two descriptors are merged if they touch on both sides and no memory begins in between. *sides*
    are the producer's rows and the consumer's, and *written* is the number of the side to write.
    """
    whole = sum(len(entry.rows) * len(tiles) for entry, tiles in parts) <= SAMPLE
    posted, sample = 0, list[Ints]()
    for entry, tiles in parts:
        rows, runs, count = entry.rows, len(entry.rows), len(tiles)
        if not whole:
            runs = entry.bunch
            count = min(count, max(1, SAMPLE // (runs * len(parts))))
        posted += runs * int(np.count_nonzero(_firsts((entry, tiles)) < count))
        spans = np.empty((3, count, runs), np.int64)
        starts = rows.producer_address[:runs], rows.consumer_address[:runs]
        for column, start, offsets in zip(spans, starts, rows.offsets(tiles), strict=False):
            np.add(start, offsets[:count, None], out=column)
        spans[2] = rows.length[:runs]
        sample.append(spans.reshape(3, -1))
    every = np.concatenate(sample, axis=1)
    begins, nbytes = every[:2], every[2]
    order = begins[written].argsort(kind="stable")
    begins, nbytes = begins[:, order], nbytes[order]
    touches = (begins[:, :-1] + nbytes[:-1] == begins[:, 1:]).all(axis=0).nonzero()[0]
    for begin, side in zip(begins, sides, strict=True):
        if len(touches):
            touches = touches[~np.isin(begin[touches + 1], side.area_begins)]
    spared = posted - (len(order) - len(touches))
    # `pair` takes 0.1 us for each id, so it must spare a part that counts.
    return merges(posted, spared) if whole else posted > merging.LIMIT * (posted - spared)


def _spans(parts: Sequence[Picked], near: Role) -> Spans:
    """Return all descriptors of the selection."""
    found = np.concatenate([entry.addresses(tiles).T for entry, tiles in parts], axis=1)
    producer, consumer, nbytes = found
    sides = (producer, consumer) if near == "producer" else (consumer, producer)
    return Spans(*sides, nbytes)


def _cut(parts: Sequence[Picked]) -> Iterator[slice]:
    """Yield slices of the ids of all parts that fit one handle each, cut between runs of blocks.

    A run of blocks that is too long for one handle has handles of its own.
    """
    start = stop = posted = nbytes = 0
    for picked in parts:
        rows, count, left = picked[0].rows, len(picked[1]), len(picked[0].rows)
        length, most = rows.size or int(rows.length.max()), count
        # At most so many descriptors are posted for one run. Count them only if that is too many.
        if not fits(count, count * length):
            firsts = _firsts(picked)
            most = len(firsts)
            if not fits(most, count * length):
                if stop > start:
                    yield slice(start, stop)
                within = [*cut(firsts, np.full(count, length))]
                for run in range(stop, stop + left * count, count):
                    yield from (slice(run + each.start, run + each.stop) for each in within)
                start = stop = stop + left * count
                posted = nbytes = 0
                continue
        while left:
            room = (merging.MAX_BYTES - nbytes) // (count * length)
            runs = min(left, room, (merging.MAX_DESCRIPTORS - posted) // most)
            left -= runs
            stop += runs * count
            posted += runs * most
            nbytes += runs * count * length
            if left:
                yield slice(start, stop)
                start, posted, nbytes = stop, 0, 0
    if stop > start:
        yield slice(start, stop)
