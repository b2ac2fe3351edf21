"""What NIXL would accept and get wrong, refused here in plain arithmetic.

NIXL wraps at 2**64, answers one word for every fault and keeps half of any metadata that it could
not read. So no number and no foreign byte reaches it unchecked; a refusal names the row, its value
and what was wanted. Pure: numbers in, numbers out.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from kvspec.errors import SpecError, TransferError, WireError
from kvspec.memory.regions import MEMORY_TYPES

ADDRESS_END = 2**63
ID_END = 2**31

_MAGIC = b"kvspec-nixl-1\n"
_HEAD = struct.Struct("<IQ")  # length of the name, address of the probe

Ints = NDArray[np.int64]
Ids = NDArray[np.int32]


class Memory(Protocol):
    """One range of bytes to register: anything with these four attributes."""

    @property
    def address(self) -> int:
        """First byte."""

    @property
    def length(self) -> int:
        """Bytes."""

    @property
    def memory_type(self) -> str:
        """One of `MEMORY_TYPES`."""

    @property
    def device(self) -> int:
        """Device index (0 for DRAM)."""


class OneByte(NamedTuple):
    """The memory of one byte at *address*."""

    address: int
    length: int = 1
    memory_type: str = "DRAM"
    device: int = 0


def row_of_one(address: int) -> NDArray[np.uint64]:
    """Return the (1, 5) row of that byte."""
    return np.array([(address, 1, 0, 1, 1)], np.uint64)


@attrs.frozen(order=True)
class Extent:
    """The checked form of a memory: bytes [*address*, *end*) of one device."""

    memory_type: str
    device: int
    address: int
    end: int

    def touches(self, other: Extent) -> bool:
        """Whether a byte lies in both."""
        same = (self.memory_type, self.device) == (other.memory_type, other.device)
        return same and self.address < other.end and other.address < self.end

    def __str__(self) -> str:
        where = f"[{self.address:#x}, {self.end:#x})"
        return f"{self.memory_type} {where} of device {self.device}"


@attrs.frozen(kw_only=True, eq=False)
class Rows:
    """Checked strided rows; id *i* of row *r* lies at `address[r] + (i - start[r]) * stride[r]`."""

    table: NDArray[np.uint64]  # (N, 5): address, length, device, stride, count
    start: Ints  # (N,): first id of each row
    total: int  # ids of all rows

    @property
    def length(self) -> Ints:
        """Bytes of one id, by row."""
        return self.table[:, 1].view(np.int64)

    @property
    def dense(self) -> NDArray[np.bool_]:
        """Whether neighbouring ids touch, by row."""
        return np.asarray(self.table[:, 1] == self.table[:, 3])

    @cached_property
    def area(self) -> Ints:
        """A number for each row, equal where rows surely lie in one registered memory.

        A row lies in one, and those are disjoint: so rows do whose spans share bytes.
        """
        address, length, device, stride, count = self.table.view(np.int64).T
        end = address + (count - 1) * stride + length
        area = np.empty(len(self.table), np.int64)
        known = 0
        for each in np.unique(device):
            at = np.flatnonzero(device == each)
            at = at[np.argsort(address[at], kind="stable")]
            apart = address[at[1:]] >= np.maximum.accumulate(end[at])[:-1]
            area[at] = known + np.concatenate(([0], np.cumsum(apart)))
            known += len(at)
        return area

    def row_of(self, ids: Ids) -> Ints:
        """Return the row of each id."""
        ends = self.start[1:].astype(np.int32)
        return np.asarray(np.searchsorted(ends, ids, side="right"), dtype=np.int64)

    def address_of(self, ids: Ids, row: Ints) -> Ints:
        """Return the address of each id, which lies in *row*."""
        signed = self.table.view(np.int64)
        return np.asarray(signed[row, 0] + (ids - self.start[row]) * signed[row, 3])


def whole(field: str, value: object, low: int, end: int) -> int:
    """Return *value* if it is an int in [*low*, *end*); numpy integers pass, bools do not."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise SpecError(field, value, f"an int >= {low}")
    if not low <= value < end:
        raise SpecError(field, int(value), f"an int in [{low}, {end})")
    return int(value)


def seconds(field: str, value: object) -> float:
    """Return *value* if it is a finite number of seconds, at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(field, value, "seconds, a number")
    if not math.isfinite(value) or value < 0:
        raise SpecError(field, value, "finite seconds >= 0")
    return float(value)


def memory_type_of(value: object) -> str:
    """Return *value* if it is one of `MEMORY_TYPES`."""
    if not isinstance(value, str) or value not in MEMORY_TYPES:
        raise SpecError("memory_type", value, " or ".join(MEMORY_TYPES))
    return value


def new_extents(known: Sequence[Extent], memories: Iterable[Memory]) -> tuple[Extent, ...]:
    """Return what of *memories* is still to be registered, given what is *known*.

    A memory inside a registered one is already covered. One that overlaps another without lying
    inside it is refused: a row over the seam would lie in neither.
    """
    asked = [_extent(f"memories[{at}]", memory) for at, memory in enumerate(memories)]
    every = [(each, True) for each in known] + [(each, False) for each in asked]
    every.sort(
        key=lambda each: (each[0].memory_type, each[0].device, each[0].address, -each[0].end)
    )
    fresh: list[Extent] = []
    last: Extent | None = None
    for extent, is_known in every:
        if last is not None and last.touches(extent):
            if is_known or extent.end > last.end:
                raise SpecError("memories", str(extent), f"no overlap with {last}")
            continue
        last = extent
        if not is_known:
            fresh.append(extent)
    return tuple(fresh)


def _extent(field: str, memory: Memory) -> Extent:
    address = whole(f"{field}.address", memory.address, 1, ADDRESS_END)
    length = whole(f"{field}.length", memory.length, 1, ADDRESS_END - address)
    device = whole(f"{field}.device", memory.device, 0, ID_END)
    return Extent(memory_type_of(memory.memory_type), device, address, address + length)


def checked_rows(rows: object) -> Rows:
    """Return *rows*, (N, 5) uint64 of address, length, device, stride, count, copied and checked.

    Every byte lies below 2**63, ids of one row do not overlap, all ids number less than 2**31.
    """
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint64:
        got = rows.dtype if isinstance(rows, np.ndarray) else type(rows).__name__
        raise SpecError("rows", str(got), "a numpy array of uint64")
    if rows.ndim != 2 or rows.shape[1] != 5:  # noqa: PLR2004 - the five columns above
        raise SpecError("rows", rows.shape, "the shape (N, 5)")
    table = np.array(rows, dtype=np.uint64, order="C")
    address, length, device, stride, count = table.T
    _refuse_row(table, length < 1, "length >= 1")
    _refuse_row(table, (count < 1) | (count >= ID_END), "1 <= count < 2**31")
    _refuse_row(table, device >= ID_END, "device < 2**31")
    _refuse_row(table, (count > 1) & (stride < length), "stride >= length where count > 1")
    below = "the end of every id below 2**63"
    limit = np.uint64(ADDRESS_END - 1)
    _refuse_row(table, (address > limit) | (length > limit) | (stride > limit), below)
    _refuse_row(table, address + length > limit, below)  # both below 2**63: the sum cannot wrap
    stride[count == 1] = length[count == 1]  # NIXL wants a stride even where nothing strides
    _refuse_row(table, count - 1 > (limit - address - length) // stride, below)
    table.setflags(write=False)
    ends = np.cumsum(count.astype(np.int64))
    total = int(ends[-1]) if len(table) else 0
    if total >= ID_END:
        raise SpecError("rows", f"{total} ids", "fewer than 2**31 ids; split the table")
    return Rows(table=table, start=ends - count.astype(np.int64), total=total)


def _refuse_row(table: NDArray[np.uint64], wrong: NDArray[np.bool_], wanted: str) -> None:
    if wrong.any():
        at = int(wrong.argmax())
        raise SpecError(f"rows[{at}]", _row_text(table[at]), wanted)


def _row_text(row: NDArray[np.uint64]) -> str:
    address, length, device, stride, count = (int(number) for number in row)
    return f"{count} x {length} B from {address:#x} every {stride} B on device {device}"


def check_inside(rows: Rows, memory_type: str, extents: Sequence[Extent]) -> None:
    """Refuse *rows* unless each lies, whole, inside one of the registered *extents*."""
    address, length, device, stride, count = rows.table.view(np.int64).T
    end = address + (count - 1) * stride + length
    inside = np.zeros(len(rows.table), dtype=bool)
    for extent in extents:
        if extent.memory_type == memory_type:
            here = (address >= extent.address) & (end <= extent.end)
            inside |= here & (device == extent.device)
    if not inside.all():
        at = int((~inside).argmax())
        mine = [each for each in extents if each.memory_type == memory_type]
        near = min(mine, key=lambda each: abs(each.address - int(address[at])), default="nothing")
        raise TransferError(
            f"rows[{at}] ({_row_text(rows.table[at])}, end {int(end[at]):#x}) is not inside"
            f" registered {memory_type} memory; nearest: {near}",
            state="not_registered",
        )


def expanded(rows: Rows) -> NDArray[np.uint64]:
    """Return *rows* with one row an id: (total, 3) of address, length, device."""
    row = np.repeat(np.arange(len(rows.table)), rows.table[:, 4].astype(np.int64))
    ids = np.arange(rows.total, dtype=np.int32)
    out = np.empty((rows.total, 3), dtype=np.uint64)
    out[:, 0] = rows.address_of(ids, row)
    out[:, 1:] = rows.table[row, 1:3]
    return out


@attrs.frozen(kw_only=True)
class Introduction:
    """What a peer needs to reach an agent: its *name*, nixl's *metadata*, and where to knock.

    *probe* is the address of one byte of registered DRAM: reading it proves the connection.
    """

    name: str
    metadata: bytes = attrs.field(repr=False)
    probe: int

    def seal(self) -> bytes:
        """Return the bytes, in an envelope that shows any damage."""
        title = self.name.encode()
        body = _HEAD.pack(len(title), self.probe) + title + self.metadata
        return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def unseal(sealed: object) -> Introduction:
    """Return what was sealed, or raise `WireError`.

    NIXL must not see damaged metadata: it keeps what it could read and then refuses the good one.
    """
    wanted = "what NixlRank.metadata() returned, whole"
    if not isinstance(sealed, bytes):
        raise WireError("metadata", type(sealed).__name__, wanted)
    start = len(_MAGIC) + 4
    if len(sealed) < start + _HEAD.size or not sealed.startswith(_MAGIC):
        raise WireError("metadata", f"{len(sealed)} bytes, {sealed[:16]!r}", wanted)
    if zlib.crc32(sealed[start:]) != int.from_bytes(sealed[start - 4 : start], "little"):
        raise WireError("metadata", f"{len(sealed)} damaged bytes", wanted)
    size, probe = _HEAD.unpack_from(sealed, start)
    title = sealed[start + _HEAD.size :]
    try:
        name = title[:size].decode()
    except UnicodeDecodeError:
        raise WireError("metadata.name", title[:size], "UTF-8") from None
    return Introduction(name=name, metadata=title[size:], probe=probe)
