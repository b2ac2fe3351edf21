"""A set of rows in its table: where its ids begin, and what picked tiles are as ids or addresses.

Law: ids count through the rows of a side in order; the same tiles mean the same bytes either way.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.runs import RowSet
from kvspec.descriptors.tiles import Tiles
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
    def starts(self) -> RowIds:
        """The first id of each run: int32 of shape (2, runs, 1), producer and consumer."""
        block_layouts = self.rows.producer, self.rows.consumer
        step = np.array([block_layout.ids_per_run for block_layout in block_layouts])
        starts = np.array([self.producer_first, self.consumer_first])[:, None]
        return (starts + step[:, None] * np.arange(len(self.rows))).astype(np.int32)[:, :, None]

    def write_ids(self, tiles: Tiles, ids: RowIds) -> None:
        """Write the ids of *tiles*, of both sides, row by row, into *ids* of shape (2, n)."""
        own = tiles.ids.astype(np.int32)[:, None]
        np.add(self.starts, own, out=ids.reshape(2, len(self.rows), len(tiles)))

    @cached_property
    def bunch(self) -> int:
        """How many runs lie among each other, all of whose tiles lie before the next run's."""
        rows, block_layout = self.rows, self.rows.producer
        extent = (
            block_layout.num_blocks - 1
        ) * block_layout.block_stride + block_layout.tiles * block_layout.tile_stride
        starts = rows.producer_address
        separate = np.flatnonzero(starts[1:] - starts[:-1] >= extent)
        many = int(separate[0]) + 1 if len(separate) else len(rows)
        return len(rows) if len(rows) % many else many

    def addresses(self, tiles: Tiles) -> npt.NDArray[np.int64]:
        """Return (producer address, consumer address, length) of *tiles* of all rows, in any order.

        Of shape (n, 3): bunch by bunch, of these tile by tile, so that many are in order.
        """
        rows, bunch = self.rows, self.bunch
        found = np.empty((3, len(rows) // bunch, len(tiles), bunch), np.int64)
        starts = rows.producer_address, rows.consumer_address
        for column, start, offsets in zip(found, starts, rows.offsets(tiles), strict=False):
            np.add(start.reshape(-1, 1, bunch), offsets[:, None], out=column)
        found[2] = rows.length.reshape(-1, 1, bunch)
        return found.reshape(3, -1).T
