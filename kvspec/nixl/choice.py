"""Explain, before a rank moves a request, what it costs directly and through the staging buffer.

Invariant: the explanation uses the same ranges and costs as the choice of a rank with the default
`Staging`.
"""

from __future__ import annotations

import attrs

from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.selection import Selection
from kvspec.descriptors.table import DescriptorTable
from kvspec.errors import counted, nbytes
from kvspec.nixl.calibration import calibrated
from kvspec.nixl.costs import Costs
from kvspec.nixl.ranges import Ranges, ranges_of
from kvspec.nixl.rows import checked_rows
from kvspec.nixl.staged import cost_of, repeated
from kvspec.nixl.staging_buffer import SLOT_BYTES


@attrs.frozen(kw_only=True)
class Choice:
    """*descriptors* of *size* bytes in all, or *ranges* that are permuted; None: it cannot be."""

    descriptors: int
    size: int
    ranges: Ranges | None
    costs: Costs

    @staticmethod
    def of(selection: Selection, operation: str, descriptors: int, size: int) -> Choice:
        """Return the ways of what *selection* moves, as a reading or a writing rank would see them.

        Ranges are the producer's where the consumer reads, else the consumer's.
        """
        costs, pulled = calibrated(), operation == "READ"
        rows = checked_rows(selection.producer_rows if pulled else selection.consumer_rows)
        found = repeated(selection.parts, "producer" if pulled else "consumer", rows)
        ranges = None if found is None else ranges_of(found, SLOT_BYTES, costs.gap if pulled else 0)
        return Choice(descriptors=descriptors, size=size, ranges=ranges, costs=costs)

    @property
    def direct(self) -> float:
        """Seconds directly."""
        return self.costs.direct(self.descriptors, self.size)

    @property
    def staged(self) -> bool:
        """Whether the buffer is the cheaper way."""
        return self.ranges is not None and cost_of(self.ranges, self.costs) < self.direct

    def __str__(self) -> str:
        """Return both ways in words, the cheaper one first."""
        direct = f"{1e3 * self.direct:.3g} ms"
        if self.ranges is None:
            return f"directly: {direct} (nothing can be staged)"
        staged = f"{1e3 * cost_of(self.ranges, self.costs):.3g} ms, "
        staged += f"{counted(self.ranges.ranges, 'range')} of {nbytes(self.ranges.read)}"
        if self.staged:
            return f"staged: {staged} (directly: {direct})"
        return f"directly: {direct} (staged: {staged})"


def explain_cost(table: DescriptorTable, request: TransferRequest) -> str:
    """Compare moving a request directly with staging it, as a rank of this machine would.

    Args:
        table: The descriptor table of the pair of ranks.
        request: The request.

    Returns:
        One line for reading, one for writing, and one that names the source of the costs. A
        request that moves no byte has no lines.

    Raises:
        SpecError: If the block tables of the request are wrong, or a calibration file is.
        MismatchError: If the request does not fit the table.
    """
    rows = table.descriptors(request)
    if not len(rows):
        return ""
    moved = int(rows[:, 2].sum())
    selection = table.select(request)
    read, write = (
        Choice.of(selection, operation, len(rows), moved) for operation in ("READ", "WRITE")
    )
    return f"read {read}\nwritten {write}\nby {read.costs.origin}"
