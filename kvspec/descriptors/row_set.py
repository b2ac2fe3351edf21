"""Rows that repeat in the same way on both sides."""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.paging import BlockLayout, RowKind, TokenSplit
from kvspec.descriptors.tiles import Tiles
from kvspec.ownership.tokens import Ints

# Bytes that take as long as one more descriptor. NIXL over shared memory needs 2.4 us for a
# descriptor and moves 9 GB/s: 21,600 bytes. The host's own work for a descriptor adds half of that.


@attrs.frozen(eq=False)
class RowSet:
    """Rows of one *kind* that repeat alike on both sides."""

    token_split: TokenSplit
    kind: RowKind
    producer: BlockLayout
    consumer: BlockLayout
    producer_address: Ints
    consumer_address: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.length)

    @cached_property
    def ids_used(self) -> tuple[int, int]:
        """How many ids the rows of each side take."""
        return len(self) * self.producer.ids_per_run, len(self) * self.consumer.ids_per_run

    @cached_property
    def id_key(self) -> tuple[object, ...]:
        """What the ids of its tiles depend on, beside the request and how it is cut."""
        return tuple(
            (layout.num_blocks, layout.tiles, layout.coalesced, layout.span)
            for layout in (self.producer, self.consumer)
        )

    @cached_property
    def size(self) -> int | None:
        """Bytes of one tile of each run; None where they differ."""
        size = int(self.length[0])
        return size if (self.length == size).all() else None

    def offsets(self, tiles: Tiles) -> Ints:
        """Return the bytes from a run's address to each of *tiles*: shape (2, n), as theirs."""
        offsets: Ints = tiles.block * self._strides[0] + tiles.tile * self._strides[1]
        return offsets

    @cached_property
    def _strides(self) -> Ints:
        layouts = self.producer, self.consumer
        strides = [
            [layout.block_stride for layout in layouts],
            [layout.tile_stride for layout in layouts],
        ]
        return np.array(strides)[:, :, None]

    def next_ids(self, tiles: Tiles) -> npt.NDArray[np.bool_]:
        """Whether each of *tiles* but the first has the next id of the same row, on both sides."""
        next_ = tiles.ids[:, 1:] - tiles.ids[:, :-1] == 1
        for side, layout in enumerate((self.producer, self.consumer)):
            if layout.rows_per_run > 1:
                row = layout.row(tiles.block[side], tiles.tile[side])
                next_[side] &= row[1:] == row[:-1]
        return np.asarray(next_[0] & next_[1])

    def posted(self, tiles: Tiles) -> int:
        """Return how many descriptors NIXL posts for *tiles* of all runs."""
        joined = np.count_nonzero(self.next_ids(tiles)) if self.touching else 0
        return len(self) * (len(tiles) - int(joined))

    @cached_property
    def touching(self) -> bool:
        """Whether consecutive ids of a row are consecutive bytes on both sides: NIXL joins them."""
        return all((self.length == side.stride).all() for side in (self.producer, self.consumer))

    @cached_property
    def plain(self) -> bool:
        """Whether each run is one row on either side: what touches has ids that follow each other.

        So NIXL joins all that touches on both sides, in one run of tiles of one length.
        """
        return all(
            layout.coalesced and layout.span == 1 for layout in (self.producer, self.consumer)
        )

    @property
    def dense(self) -> bool:
        """Whether so are all tiles of all blocks: NIXL joins whatever is contiguous."""
        return self.touching and self.producer.coalesced and self.consumer.coalesced
