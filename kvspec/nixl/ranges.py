"""Find the ranges of the peer's memory that a staged transfer moves, and copy the runs in them.

Invariant: each run lies in exactly one range of one batch. A range lies in one memory of the far
side. The ranges of a write contain only runs, so that no other byte of the peer is written. A copy
changes only the bytes of its runs, and the scratch bytes of the buffer. Addresses were checked
before, and the owners of the memory are referenced: nothing here checks a size.

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
    >>> runs = Spans(near, far, ints(4, 4, 4, 4))
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

How it copies:
    torch copies GPU memory with two kernels, and `copy_by_torch` waits for them. numpy copies host
    memory. It copies items of any size, here one item a run. A fancy index selects the items of
    each side (`_copy_on_host`). If runs are not adjacent in the slot, that takes two passes: one
    picks the runs from the slot, one puts them to their places.

    `_try_copy_whole` needs one pass. It copies all items of the slot, and sends the items between
    the runs to a scratch place. For example, four runs of 4 bytes begin at 0, 8, 12, 16:

        slot      | run 0 | gap   | run 1 | run 2 | run 3 |    5 items of 4 bytes
        place     near[0] scratch near[1] near[2] near[3]

    The slot is then a plain array without an index. That is faster if few items are gaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvspec.nixl.merging import Spans, starts_of
from kvspec.nixl.rows import Ints

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Descriptors of one handle. Posting more blocks for too long: a post cannot be interrupted.
MAX_RANGES = 4096
# torch copies words of 8 bytes if all addresses and lengths are multiples of 8, else single bytes.
WORD = 8
# Bytes of scratch memory on each side of the slots. Longer runs are never copied whole.
SPARE = 64 << 10
# `_try_copy_whole` is used below so many items per run. With more gaps, two passes are faster.
MOST = 1.5


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


def ranges_of(spans: Spans, begins: Ints, *, longest: int, gap: int) -> tuple[Batch, ...] | None:
    """Return batches of the ranges that contain all runs.

    Args:
        spans: The runs. The remote side is the far side, and its runs may overlap.
        begins: Far addresses at which memories begin, in ascending order. No range has a byte
            before and a byte behind such an address.
        longest: Bytes of a slot. A batch is not longer.
        gap: Ranges at most so many bytes apart are joined.

    Returns:
        The batches, or None if a run is longer than a slot.
    """
    near, far, nbytes = spans
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


class _Shown:
    """Memory of the process or of a GPU, with the interfaces that numpy and torch read."""

    def __init__(self, address: int, shape: tuple[int, ...], kind: str, strides: Any) -> None:  # noqa: ANN401 - None or ints
        interface = {"data": (address, False), "shape": shape, "typestr": kind, "version": 3}
        self.__array_interface__ = self.__cuda_array_interface__ = interface | {"strides": strides}


def copy_runs(
    base: int,
    moves: Moves,
    *,
    inward: bool,
    place: tuple[str, int] = ("DRAM", 0),
    scratch: tuple[int, ...] = (),
) -> None:
    """Copy the runs *moves* between the slot at address *base* and the near side.

    Args:
        base: Address of the slot.
        moves: The runs.
        inward: Copy from the slot to the near side, as a read does. Else copy to the slot.
        place: Memory type and device of both sides.
        scratch: Addresses of `SPARE` unused bytes below and above all slots, or nothing. With
            them, the offsets of *moves* ascend, as those of a batch do.
    """
    memory_type, device = place
    if memory_type == "DRAM":
        if not (inward and scratch and _try_copy_whole(base, moves, scratch)):
            _copy_on_host(base, moves, inward=inward)
    else:
        copy_by_torch(base, moves, inward=inward, device=f"cuda:{device}")


def _copy_on_host(base: int, moves: Moves, *, inward: bool) -> None:
    """Copy with one fancy index on each side. Items begin at any byte."""
    length, low = moves.length, int(moves.near.min())
    near = _items(low, int(moves.near.max()) - low + 1, length, 1)
    offset, places = moves.offset, moves.near - low
    slot: Any
    if ((offset[1:] - offset[:-1]) == length).all():
        slot = _items(base + int(offset[0]), len(offset), length, length)
        where: Any = slice(None)
    else:
        slot, where = _items(base, int(offset.max()) + 1, length, 1), offset
    if inward:
        near[places] = slot[where]
    else:
        slot[where] = near[places]


def _try_copy_whole(base: int, moves: Moves, scratch: tuple[int, ...]) -> bool:
    """Copy all items of the slot in one pass, or return False. See the module docstring."""
    length, offset, first = moves.length, moves.offset, int(moves.offset[0])
    count = (int(offset[-1]) - first) // length + 1
    low, high = int(moves.near.min()), int(moves.near.max())
    # The view of the near side reaches from its first run to its last. If it contained the slot,
    # numpy would see an overlap and copy the whole slot first.
    apart = low >= base + first + count * length or base >= high + length
    # Longer runs do not fit into the scratch bytes. Without gaps `_copy_on_host` needs no index for
    # the slot either. With many gaps, copying them takes more time than a second pass.
    if length > SPARE or not len(offset) < count < MOST * len(offset) or not apart:
        return False
    begins = offset - first
    items = begins // length
    # Each run must be exactly one item. A run between two items would be torn. Two runs with the
    # same bytes would be one item, and it has only one place.
    if (items * length != begins).any() or (items[1:] == items[:-1]).any():
        return False
    # Use the scratch bytes on the near side's side of the slot, so that the view has no slot.
    spare = scratch[high > base]
    start = min(low, spare)
    places = np.full(count, spare - start)
    places[items] = moves.near - start
    near = _items(start, max(high, spare) - start + 1, length, 1)
    near[places] = _items(base + first, count, length, length)
    return True


def _items(address: int, count: int, length: int, stride: int) -> NDArray[np.void]:
    """Return *count* items of *length* bytes. One begins every *stride* bytes from *address* on."""
    return np.asarray(_Shown(address, (count,), f"|V{length}", (stride,)))


def copy_by_torch(base: int, moves: Moves, *, inward: bool, device: str) -> None:
    """Do the same as `copy_runs` with tensors of *device*: "cuda:0", or "cpu" for host memory."""
    import torch  # noqa: PLC0415 - heavy, and only a GPU needs it

    low = int(moves.near.min())
    grain = int(np.gcd.reduce(np.concatenate((moves.offset, moves.near - low, [moves.length]))))
    word = WORD if not (grain | base | low) % WORD else 1
    sides = []
    for address, places in ((base, moves.offset), (low, moves.near - low)):
        rows = int(places.max() + moves.length) // grain
        shape, kind = (rows, grain // word), f"<i{word}" if word > 1 else "|u1"
        shown: Any = _Shown(address, shape, kind, None)
        shown = np.asarray(shown) if device == "cpu" else shown
        sides.append((torch.as_tensor(shown, device=device), _rows(places, moves.length, grain)))
    (source, taken), (target, put) = sides if inward else sides[::-1]
    taken, put = (torch.from_numpy(which).to(device) for which in (taken, put))
    target.index_copy_(0, put, source.index_select(0, taken))
    if device != "cpu":
        torch.cuda.current_stream(device).synchronize()


def _rows(places: Ints, length: int, grain: int) -> Ints:
    """Return the rows of *grain* bytes that the runs occupy."""
    rows = places[:, None] // grain + np.arange(length // grain)
    return np.ascontiguousarray(rows.reshape(-1))
