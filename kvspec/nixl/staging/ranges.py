"""Find the ranges of the peer's memory that a staged transfer moves.

Invariant: each run lies in exactly one range of one batch. A range lies in one memory of the far
side. The ranges of a write contain only runs, so that no other byte of the peer is written.

The *far* side is the peer: the source of a read, the destination of a write. The *near* side is
this rank. Its runs may lie anywhere.

How it works:
    Sorted by far address, runs that are at most *gap* bytes apart are one *range*. The ranges are
    *packed*: they lie one after the other. Here are four runs of 4 bytes. With a gap of 8, the
    first three are one range of 20 bytes:

        far       1000: run 0 . run 1 .. run 2       2000: run 3
        packed    0: run 0 . run 1 .. run 2 run 3

    >>> def ints(*numbers):
    ...     return np.array(numbers, np.int64)
    >>> far, near = ints(1000, 1008, 1016, 2000), ints(300, 200, 100, 500)
    >>> runs = Runs(near, far, ints(4, 4, 4, 4))
    >>> [batch] = ranges_of(runs, ints(1000), longest=64, gap=8)
    >>> batch.address.tolist(), batch.length.tolist(), batch.offset.tolist()
    ([1000, 2000], [20, 4], [0, 20])

    A batch is one handle. It contains all runs whose packed bytes fit into a slot of *longest*
    bytes. So a range is cut between two runs if the slot ends there:

    >>> [first, second] = ranges_of(runs, ints(1000), longest=12, gap=8)
    >>> first.address.tolist(), first.length.tolist()
    ([1000], [12])
    >>> second.address.tolist(), second.length.tolist()
    ([1016, 2000], [4, 4])

    When the batch has arrived in its slot, its runs are copied to the near side, and the bytes
    between them are not:

    >>> [moves] = batch.moves()
    >>> moves.offset.tolist(), moves.near.tolist()
    ([0, 8, 16, 20], [300, 200, 100, 500])

    So the transport moves 2 descriptors instead of 4 here, and far fewer in a real cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from kvspec.nixl.merging import Runs, starts_of
from kvspec.ownership.tokens import Ints

# Descriptors of one handle. Posting more blocks for too long: a post cannot be interrupted.
MAX_RANGES = 4096


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
class Batch:
    """The ranges that one handle moves. They lie one after the other in a slot.

    Attributes:
        address: Far address of each range.
        length: Bytes of each range.
        nbytes: Bytes of all ranges.
        run_offset: Begin of each run in the slot, in ascending order.
        near: Near address of each run.
        run_length: Bytes of each run.
    """

    address: Ints
    length: Ints
    nbytes: int
    run_offset: Ints
    near: Ints
    run_length: Ints

    @property
    def offset(self) -> Ints:
        """Begin of each range in the slot."""
        return np.cumsum(self.length) - self.length

    def moves(self) -> Iterator[Moves]:
        """Yield the runs by their lengths."""
        offset, lengths = self.run_offset, self.run_length
        if (lengths == lengths[0]).all():
            yield Moves(offset=offset, near=self.near, length=int(lengths[0]))
            return
        for length in np.unique(lengths).tolist():
            which = lengths == length
            yield Moves(offset=offset[which], near=self.near[which], length=length)


def ranges_of(
    moved_runs: Runs, begins: Ints, *, longest: int, gap: int
) -> tuple[Batch, ...] | None:
    """Return batches of the ranges that contain all runs.

    Args:
        moved_runs: The runs. The remote side is the far side, and its runs may overlap.
        begins: Far addresses at which memories begin, in ascending order. No range has a byte
            before and a byte behind such an address.
        longest: Bytes of a slot. A batch is not longer.
        gap: Ranges at most so many bytes apart are joined.

    Returns:
        The batches, or None if a run is longer than a slot.
    """
    near, far, nbytes = moved_runs
    if not len(far):
        return ()
    if int(nbytes.max()) > longest:
        return None
    if (far[1:] < far[:-1]).any():
        order = far.argsort()
        far, near, nbytes = far[order], near[order], nbytes[order]
    runs = far, near, nbytes
    whole, first = _packed(*runs, begins=begins, gap=gap)
    if whole.nbytes <= longest and len(first) <= MAX_RANGES:
        return (whole,)
    batches, begin = list[Batch](), 0
    ends = np.maximum.accumulate(whole.run_offset + nbytes)
    while begin < len(far):
        stop = int(ends.searchsorted(whole.run_offset[begin] + longest, side="right"))
        if len(most := first[first > begin][MAX_RANGES - 1 :]):
            stop = min(stop, int(most[0]))
        # A run of an earlier batch may end beyond this slot. The first run fits in any case.
        inside = slice(begin, max(stop, begin + 1))
        batches.append(_packed(*(each[inside] for each in runs), begins=begins, gap=gap)[0])
        begin = inside.stop
    return tuple(batches)


def _packed(far: Ints, near: Ints, nbytes: Ints, *, begins: Ints, gap: int) -> tuple[Batch, Ints]:
    """Return one batch of all runs, sorted by far address, and the first run of each range."""
    # Runs may overlap, so a range ends at the furthest end of its runs.
    reach = np.maximum.accumulate(far + nbytes)
    joined = far[1:] - reach[:-1] <= gap
    inside = far.searchsorted(begins)
    joined[inside[(inside > 0) & (inside < len(far))] - 1] = False
    first = starts_of(joined)
    last = np.append(first[1:], len(far)) - 1
    length = reach[last] - far[first]
    begin = np.cumsum(length) - length
    batch = Batch(
        address=far[first],
        length=length,
        nbytes=int(length.sum()),
        run_offset=far + np.repeat(begin - far[first], last - first + 1),
        near=near,
        run_length=nbytes,
    )
    return batch, first
