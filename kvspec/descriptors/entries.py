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
        """The first id of each run, on both sides."""
        producer, consumer = (
            (first + np.arange(len(self.rows)) * pool.ids_per_run).astype(np.int32)
            for pool, first in (
                (self.rows.producer, self.producer_first),
                (self.rows.consumer, self.consumer_first),
            )
        )
        return producer, consumer

    def write_ids(self, cells: Cells, producer: RowIds, consumer: RowIds) -> None:
        """Write the ids of *cells* on both sides, row by row."""
        rows = self.rows
        for pool, starts, block, cell, ids in (
            (rows.producer, self.starts[0], cells.producer_block, cells.producer_cell, producer),
            (rows.consumer, self.starts[1], cells.consumer_block, cells.consumer_cell, consumer),
        ):
            own = pool.ids(block, cell).astype(np.int32)
            np.add(starts[:, None], own, out=ids.reshape(len(rows), len(cells)))

    def addresses(self, cells: Cells) -> npt.NDArray[np.int64]:
        """Return (producer address, consumer address, length) of *cells*, row by row."""
        rows = self.rows
        found = np.empty((len(rows), len(cells), 3), np.int64)
        sources = rows.producer.offsets(cells.producer_block, cells.producer_cell)
        targets = rows.consumer.offsets(cells.consumer_block, cells.consumer_cell)
        found[:, :, 0] = rows.producer_address[:, None] + sources
        found[:, :, 1] = rows.consumer_address[:, None] + targets
        found[:, :, 2] = rows.length[:, None]
        return found.reshape(-1, 3)
