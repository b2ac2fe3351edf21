"""Check rows of descriptors, because NIXL accepts some rows that it then computes wrongly.

Invariant: no number reaches NIXL unchecked. NIXL's own bounds checks wrap at 2**64, and one
exception covers all faults. Each `SpecError` here names the row, its value and the requirement.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from kvspec.errors import SpecError
from kvspec.inputs import MOST

ID_END = 2**31

Ints = NDArray[np.int64]
Ids = NDArray[np.int32]


@attrs.frozen(kw_only=True, eq=False)
class StridedRows:
    """Checked rows; id *i* of row *r* lies at `address[r] + (i - start[r]) * stride[r]`."""

    table: NDArray[np.uint64]  # (N, 5): address, length, device, stride, count
    start: Ints  # (N,): first id of each row
    total: int  # ids of all rows
    known: dict[object, Any] = attrs.field(init=False, factory=dict)  # what was worked out of it

    @property
    def length(self) -> Ints:
        """Bytes of one id, by row."""
        return self.table[:, 1].view(np.int64)

    @cached_property
    def dense(self) -> NDArray[np.bool_]:
        """Whether neighbouring ids touch, by row."""
        return np.asarray(self.table[:, 1] == self.table[:, 3])

    @cached_property
    def end(self) -> Ints:
        """Where the last id's last byte lies, plus one, by row."""
        address, length, _, stride, count = self.table.view(np.int64).T
        return np.asarray(address + (count - 1) * stride + length)

    @cached_property
    def area(self) -> Ints:
        """A number for each row, equal where rows surely lie in one registered memory.

        A row lies in one, and those are disjoint: so rows do whose spans share bytes.
        """
        address, device = self.table.view(np.int64)[:, (0, 2)].T
        area = np.empty(len(self.table), np.int64)
        areas = 0
        for number in np.unique(device):
            rows = np.flatnonzero(device == number)
            rows = rows[np.argsort(address[rows], kind="stable")]
            separate = address[rows[1:]] >= np.maximum.accumulate(self.end[rows])[:-1]
            area[rows] = areas + np.concatenate(([0], np.cumsum(separate)))
            areas += len(rows)
        return area

    def areas(self, first: int, runs: int, per_run: int) -> Ints | None:
        """Return the `area` of each of some *runs* of *per_run* rows, from the id *first* on.

        None if one lies in two.
        """
        row = int(self.start.searchsorted(first, side="right")) - 1
        area = self.area[row : row + per_run * runs].reshape(runs, per_run)
        return None if (area != area[:, :1]).any() else area[:, 0]

    def row_of(self, ids: Ids) -> Ints:
        """Return the row of each id."""
        return np.asarray(self._ends.searchsorted(ids, side="right"), dtype=np.int64)

    @cached_property
    def _ends(self) -> Ids:
        return self.start[1:].astype(np.int32)

    def address_of(self, ids: Ids, row: Ints) -> Ints:
        """Return the address of each id, which lies in *row*."""
        signed = self.table.view(np.int64)
        return np.asarray(signed[row, 0] + (ids - self.start[row]) * signed[row, 3])

    def expanded(self) -> NDArray[np.uint64]:
        """Return one row an id: (total, 3) of address, length, device."""
        ids = np.arange(self.total, dtype=np.int32)
        row = self.row_of(ids)
        address = self.address_of(ids, row).astype(np.uint64)
        return np.column_stack((address, self.table[row, 1:3]))

    def text(self, row: int) -> str:
        """Return *row* as a message shows it."""
        return _text(self.table[row])


def _text(row: NDArray[np.uint64]) -> str:
    address, length, device, stride, count = (int(number) for number in row)
    return f"{count} x {length} B from {address:#x} every {stride} B on device {device}"


def row_of_one(address: int) -> NDArray[np.uint64]:
    """Return the (1, 5) row of the one byte at *address*."""
    return np.array([(address, 1, 0, 1, 1)], np.uint64)


def checked_rows(rows: object) -> StridedRows:
    """Return *rows*, (N, 5) uint64 of address, length, device, stride, count, copied and checked.

    Every byte lies below 2**63, ids of one row do not overlap, all ids number less than 2**31.
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
    _refuse(table, address + length > limit, below)  # both below 2**63: the sum cannot wrap
    stride[count == 1] = length[count == 1]  # NIXL wants a stride even where nothing strides
    _refuse(table, count - 1 > (limit - address - length) // stride, below)
    table.setflags(write=False)
    ends = np.cumsum(count.astype(np.int64))
    total = int(ends[-1]) if len(table) else 0
    if total >= ID_END:
        raise SpecError("rows", f"{total} ids", "fewer than 2**31 ids; split the table")
    return StridedRows(table=table, start=ends - count.astype(np.int64), total=total)


def _refuse(table: NDArray[np.uint64], wrong: NDArray[np.bool_], wanted: str) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        raise SpecError(f"rows[{row}]", _text(table[row]), wanted)
