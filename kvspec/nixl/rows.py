"""Check rows of descriptors, because NIXL accepts some rows that it then computes wrongly.

Invariant: no number reaches NIXL unchecked. NIXL's own bounds checks wrap at 2**64, and one
exception covers all faults. Each `SpecError` here names the row, its value and the requirement.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvspec.descriptors.selection import RowIds
from kvspec.errors import SpecError
from kvspec.inputs import MOST
from kvspec.ownership.tokens import Ints

if TYPE_CHECKING:
    from numpy.typing import NDArray

ID_END = 2**31
SEVERAL = -1  # The device of rows that lie on several devices.


@attrs.frozen(kw_only=True, eq=False)
class StridedRows:
    """Checked rows. Id *i* of row *r* begins at `address[r] + (i - start[r]) * stride[r]`.

    Attributes:
        table: Address, length, device, stride and count of each row. Shape (rows, 5).
        start: First id of each row.
        total: Number of ids of all rows.
    """

    table: NDArray[np.uint64]
    start: Ints
    total: int

    @cached_property
    def _columns(self) -> Ints:
        return np.ascontiguousarray(self.table.view(np.int64).T)

    @cached_property
    def length(self) -> Ints:
        """Bytes of one id of each row."""
        return np.asarray(self._columns[1])

    @cached_property
    def size(self) -> int | None:
        """Bytes of one id if they are the same for all rows, else None."""
        return int(self.length[0]) if len(np.unique(self.length)) == 1 else None

    @cached_property
    def dense(self) -> NDArray[np.bool_]:
        """Whether neighbouring ids of each row touch."""
        return np.asarray(self.table[:, 1] == self.table[:, 3])

    @cached_property
    def memory_begins(self) -> Ints:
        """Begin of each set of rows that share bytes, or are chained so.

        The rows lie on one device. Each row lies in one registered memory from its first byte to
        its last, with the bytes between its ids, and memories are disjoint. So rows that interleave
        lie in one memory, and rows that only touch may not. An area lies in one memory, and only a
        byte at a begin can lie in another memory than the byte before it.
        """
        by_address = self._columns[:, self._columns[0].argsort(kind="stable")]
        address, length, _, stride, count = by_address
        end = address + (count - 1) * stride + length
        separate = np.ones(len(address), np.bool_)
        separate[1:] = address[1:] >= np.maximum.accumulate(end)[:-1]
        return np.asarray(address[separate])

    @cached_property
    def device(self) -> int:
        """The device of all rows, or `SEVERAL` if there are several devices or no rows."""
        devices = np.unique(self._columns[2])
        return int(devices[0]) if len(devices) == 1 else SEVERAL

    def row_of(self, ids: RowIds) -> Ints:
        """Return the row of each id."""
        return self._ends.searchsorted(ids, side="right")

    @cached_property
    def _ends(self) -> RowIds:
        return self.start[1:].astype(np.int32)

    def address_of(self, ids: RowIds, row: Ints) -> Ints:
        """Return the address of each id, which lies in *row*."""
        return np.asarray(self._columns[0][row] + (ids - self.start[row]) * self._columns[3][row])


def row_text(row: NDArray[np.uint64]) -> str:
    """Return a row of five numbers for a message."""
    address, length, device, stride, count = row.tolist()
    return f"{count} x {length} B from {address:#x} every {stride} B on device {device}"


def row_of_one(address: int) -> NDArray[np.uint64]:
    """Return the (1, 5) row of the one byte at *address*."""
    return np.array([(address, 1, 0, 1, 1)], np.uint64)


def checked_rows(rows: object) -> StridedRows:
    """Return a checked copy of *rows*: address, length, device, stride, count; shape (rows, 5).

    Raise `SpecError` unless all bytes lie below 2**63, the ids of a row do not overlap, and all
    rows together have fewer than 2**31 ids.
    """
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint64:
        kind = rows.dtype if isinstance(rows, np.ndarray) else type(rows).__name__
        raise SpecError("rows", str(kind), "a numpy array of uint64")
    if rows.ndim != 2 or rows.shape[1] != 5:  # noqa: PLR2004 - the five columns above
        raise SpecError("rows", rows.shape, "the shape (N, 5)")
    table = np.array(rows, dtype=np.uint64, order="C")
    address, length, device, stride, count = table.T
    _refuse(table, length < 1, "length >= 1")
    _refuse(table, (count < 1) | (count >= ID_END), "1 <= count < 2**31")
    _refuse(table, device >= ID_END, "device < 2**31")
    _refuse(table, (count > 1) & (stride < length), "stride >= length where count > 1")
    below = "the end of every id below 2**63"
    limit = np.uint64(MOST)
    _refuse(table, (address > limit) | (length > limit) | (stride > limit), below)
    # Both numbers are below 2**63 here, so the sum cannot wrap.
    _refuse(table, address + length > limit, below)
    # NIXL expects a valid stride even if there is only one id.
    stride[count == 1] = length[count == 1]
    _refuse(table, count - 1 > (limit - address - length) // stride, below)
    table.setflags(write=False)
    ends = np.cumsum(count.astype(np.int64))
    total = int(ends[-1]) if len(table) else 0
    if total >= ID_END:
        raise SpecError("rows", f"{total} ids", "fewer than 2**31 ids; split the table")
    return StridedRows(table=table, start=ends - count.astype(np.int64), total=total)


def _refuse(table: NDArray[np.uint64], wrong: NDArray[np.bool_], expected: str) -> None:
    """Raise `SpecError` for the first row that is *wrong*."""
    if wrong.any():
        row = int(wrong.argmax())
        raise SpecError(f"rows[{row}]", row_text(table[row]), expected)
