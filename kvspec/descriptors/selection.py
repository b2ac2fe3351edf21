"""What one request picks of a table: ids, and how they repeat.

Law: ids and parts say the same. Whoever only wants ids unpacks them; who checks or joins them does
that by run and by tile, not by run times tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvspec.descriptors.entries import Entry, RowIds
from kvspec.descriptors.tiles import Tiles

Picked = tuple[Entry, Tiles]
"""A set of rows and the tiles of it that move: an id is its run's first id and its tile's."""


class Selection(tuple[RowIds, RowIds]):  # noqa: SLOT001 - it has more than a tuple
    """The ids of the producer's rows and of the consumer's, as `DescriptorTable.select` picks them.

    Two int32 arrays of equal length, read-only. *producer_rows*, *consumer_rows*: the table's own,
    which the ids count through: lists that were prepared from these two take a selection as it is.
    *parts*: how the ids repeat, in their order.
    """

    producer_rows: npt.NDArray[np.uint64]
    consumer_rows: npt.NDArray[np.uint64]
    parts: Sequence[Picked]

    @staticmethod
    def of(
        parts: Sequence[Picked],
        producer_rows: npt.NDArray[np.uint64],
        consumer_rows: npt.NDArray[np.uint64],
    ) -> Selection:
        """Return *parts* with their ids."""
        sizes = [len(entry.rows) * len(tiles) for entry, tiles in parts]
        ids = np.empty((2, sum(sizes)), np.int32)
        start = 0
        for (entry, tiles), size in zip(parts, sizes, strict=True):
            entry.write_ids(tiles, ids[:, start : start + size])
            start += size
        ids.setflags(write=False)  # whoever takes the parts for the ids looks at no id again
        found = Selection((ids[0], ids[1]))
        found.producer_rows, found.consumer_rows = producer_rows, consumer_rows
        found.parts = parts
        return found
