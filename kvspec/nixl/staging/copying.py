"""Copy the runs of a slot to their places, or from their places into a slot.

Invariant: a copy changes only the bytes of its runs, and the scratch bytes of the buffer. Addresses
were checked before, and the owners of the memory are referenced: nothing here checks a size.

How it works:
    torch copies GPU memory with two kernels, and `copy_by_torch` waits for them. They have a stream
    of their own, so that the copy does not wait for the kernels of the engine. numpy copies host
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

from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.nixl.staging.ranges import Moves
from kvspec.ownership.tokens import Ints

if TYPE_CHECKING:
    from numpy.typing import NDArray

# torch copies words of 8 bytes if all addresses and lengths are multiples of 8, else single bytes.
WORD = 8
# Bytes of scratch memory on each side of the slots. Longer runs are never copied whole.
SCRATCH_BYTES = 64 << 10
# `_try_copy_whole` is used below so many items per run. With more gaps, two passes are faster.
MAX_ITEMS_PER_RUN = 1.5


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
        scratch: Addresses of `SCRATCH_BYTES` unused bytes below and above all slots, or nothing.
            With them, the offsets of *moves* ascend, as those of a batch do.
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
    elif isinstance(where, slice) and not (places % length).any():
        # One pass, since all runs are items of one array. The mode "raise" would copy twice.
        items = places // length
        whole = _items(low, int(items.max()) + 1, length, length)
        whole.take(items, out=slot, mode="clip")
    else:
        slot[where] = near[places]


def _try_copy_whole(base: int, moves: Moves, scratch: tuple[int, ...]) -> bool:
    """Copy all items of the slot in one pass, or return False. See the module docstring."""
    length, offset, first = moves.length, moves.offset, int(moves.offset[0])
    count = (int(offset[-1]) - first) // length + 1
    low, high = int(moves.near.min()), int(moves.near.max())
    # The view of the near side reaches from its first run to its last. If it contained the bytes to
    # copy, numpy would see an overlap and copy them first.
    apart = low >= base + first + count * length or base >= high + length
    # Longer runs do not fit into the scratch bytes. Without gaps `_copy_on_host` needs no index for
    # the slot either. With many gaps, copying them takes more time than a second pass.
    if (
        length > SCRATCH_BYTES
        or not len(offset) < count < MAX_ITEMS_PER_RUN * len(offset)
        or not apart
    ):
        return False
    begins = offset - first
    items = begins // length
    # Each run must be exactly one item. A run between two items would be torn. Two runs with the
    # same bytes would be one item, and it has only one place.
    if (items * length != begins).any() or (items[1:] == items[:-1]).any():
        return False
    # Use the scratch bytes on the near side's side of the slot, so that the view has no slot.
    below, above = scratch
    spare = above if high > base else below
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

    stream = None if device == "cpu" else _stream(device)
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        _copy_rows(base, moves, inward=inward, device=device)
    if stream is not None:
        stream.synchronize()


@cache
def _stream(device: str) -> Any:  # noqa: ANN401 - torch is imported only if a GPU needs it
    """Return the stream of all copies on *device*."""
    import torch  # noqa: PLC0415 - heavy, and only a GPU needs it

    return torch.cuda.Stream(device)


def _copy_rows(base: int, moves: Moves, *, inward: bool, device: str) -> None:
    """Start the copy on the current stream: one gather and one scatter."""
    import torch  # noqa: PLC0415 - heavy, and only a GPU needs it

    low = int(moves.near.min())
    row_bytes = int(np.gcd.reduce(np.concatenate((moves.offset, moves.near - low, [moves.length]))))
    word = WORD if not (row_bytes | base | low) % WORD else 1
    sides = []
    for address, places in ((base, moves.offset), (low, moves.near - low)):
        rows = int(places.max() + moves.length) // row_bytes
        shape, kind = (rows, row_bytes // word), f"<i{word}" if word > 1 else "|u1"
        shown: Any = _Shown(address, shape, kind, None)
        shown = np.asarray(shown) if device == "cpu" else shown
        sides.append(
            (torch.as_tensor(shown, device=device), _rows(places, moves.length, row_bytes))
        )
    (source, taken), (target, put) = sides if inward else sides[::-1]
    taken, put = (torch.from_numpy(which).to(device) for which in (taken, put))
    target.index_copy_(0, put, source.index_select(0, taken))


def _rows(places: Ints, length: int, row_bytes: int) -> Ints:
    """Return the rows of *row_bytes* bytes that the runs occupy."""
    rows = places[:, None] // row_bytes + np.arange(length // row_bytes)
    return np.ascontiguousarray(rows.reshape(-1))
