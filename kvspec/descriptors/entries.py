"""A set of rows in its table: where its ids begin, and what picked cells are as ids or addresses.

Law: ids count through the rows of a side in order; the same cells mean the same bytes either way.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.cells import Cells
from kvspec.descriptors.runs import RowSet
from kvspec.plan.edges import Edge

RowIds = npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class Entry:
    """A set of rows of one edge, and the first id of each side's."""

    edge: Edge
    rows: RowSet
    producer_first: int
    consumer_first: int

    @cached_property
    def starts(self) -> tuple[RowIds, RowIds]:
        """The first id of each run, on both sides, in columns."""
        producer, consumer = (
            (first + np.arange(len(self.rows))[:, None] * pool.ids_per_run).astype(np.int32)
            for pool, first in (
                (self.rows.producer, self.producer_first),
                (self.rows.consumer, self.consumer_first),
            )
        )
        return producer, consumer

    def write_ids(self, cells: Cells, producer: RowIds, consumer: RowIds) -> None:
        """Write the ids of *cells* on both sides, row by row."""
        for starts, own, ids in (
            (self.starts[0], cells.producer_ids, producer),
            (self.starts[1], cells.consumer_ids, consumer),
        ):
            np.add(starts, own.astype(np.int32), out=ids.reshape(len(starts), len(own)))

    def addresses(self, cells: Cells) -> npt.NDArray[np.int64]:
        """Return (producer address, consumer address, length) of *cells*, row by row."""
        rows = self.rows
        found = np.empty((len(rows), len(cells), 3), np.int64)
        sources, targets = rows.offsets(cells)
        found[:, :, 0] = rows.producer_address[:, None] + sources
        found[:, :, 1] = rows.consumer_address[:, None] + targets
        found[:, :, 2] = rows.length[:, None]
        return found.reshape(-1, 3)
