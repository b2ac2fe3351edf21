"""Runs of equal length, copied between a slot of the buffer and where they belong.

Law: only the named bytes change. Addresses were checked before and their owners are held: nothing
here looks at a size. Host memory by numpy; a GPU's by torch, one kernel that gathers and one that
puts, and it is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.nixl.ranges import Ints, Moves

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORD = 8  # bytes: what torch copies at a time where all runs allow it
SPARE = 64 << 10
MOST = 1.5  # items of a slot for each run, for copying all of them


class _Shown:
    """Memory of the process, or of a GPU, as numpy and torch ask for it."""

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
    """Copy *moves* from the slot that begins at *base* to the near side, or back.

    *inward*: as a read does, from the slot. *place*: memory type and device of both. *scratch*:
    where `SPARE` bytes begin that are nobody's, below the slot and above it.
    """
    memory_type, device = place
    if memory_type == "DRAM":
        if not (inward and scratch and _copied_whole(base, moves, scratch)):
            _copy_on_host(base, moves, inward=inward)
    else:
        copy_by_torch(base, moves, inward=inward, device=f"cuda:{device}")


def _copy_on_host(base: int, moves: Moves, *, inward: bool) -> None:
    """Copy by one fancy index a side: items of a run's length that begin at any byte."""
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


def _copied_whole(base: int, moves: Moves, scratch: tuple[int, ...]) -> bool:
    """Copy the slot as items of a run's length, those between the runs to a spare place.

    That takes one pass where picking runs takes two. False where it cannot be: runs that do not lie
    on items, or that are few; near memory on both sides of the slot, or numpy would copy it first.
    """
    length, low, high = moves.length, int(moves.near.min()), int(moves.near.max())
    first, last = int(moves.offset[0]), int(moves.offset[-1])
    count, uneven = divmod(last - first, length)
    count += 1
    if not len(moves.offset) < count < MOST * len(moves.offset) or uneven or length > SPARE:
        return False
    item = (moves.offset - first) // length
    if int(moves.offset.min()) != first or int(moves.offset.max()) != last:
        return False
    if not base + first + count * length <= low and not high + length <= base:
        return False
    if not np.array_equal(item * length, moves.offset - first):
        return False
    spare = scratch[high > base]
    start = min(low, spare)
    places = np.full(count, spare - start)
    places[item] = moves.near - start
    near = _items(start, max(high, spare) - start + 1, length, 1)
    near[places] = _items(base + first, count, length, length)
    return True


def _items(address: int, count: int, length: int, stride: int) -> NDArray[np.void]:
    """Return *count* items of *length* bytes, one every *stride* bytes from *address* on."""
    return np.asarray(_Shown(address, (count,), f"|V{length}", (stride,)))


def copy_by_torch(base: int, moves: Moves, *, inward: bool, device: str) -> None:
    """Copy as `copy_runs` with tensors of *device*: "cuda:0", or "cpu" for host memory."""
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
    """Return the rows of *grain* bytes that runs of *length* bytes have."""
    rows = places[:, None] // grain + np.arange(length // grain)
    return np.ascontiguousarray(rows.reshape(-1))
