"""How the blocks of one side repeat in memory.

Law: numbers only; a block layout knows no layer, no rank and no request.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.ownership.tokens import Ints


@attrs.frozen
class BlockLayout:
    """How the blocks of one side repeat: the same numbers for every run of a set.

    A layout of two modes, ``(num_blocks, tiles) : (block_stride, tile_stride)``. Ids count a run's
    rows one after the other; what a row is, the strides decide. Of 2 blocks of 4 tiles, these are
    the ids of each block's tiles:

    >>> def ids(**more):
    ...     block_layout = BlockLayout(num_blocks=2, tiles=4, tile_stride=10, **more)
    ...     block, tile = np.divmod(np.arange(8), 4)
    ...     return block_layout.ids(block, tile).reshape(2, 4).tolist()

    *Plain*, as blocks lie apart from their tiles: a row for each tile, which counts blocks.

    >>> ids(block_stride=90)
    [[0, 2, 4, 6], [1, 3, 5, 7]]

    *Coalesced*, as the stride of a block is that of its tiles together: one row counts all tiles.

    >>> ids(block_stride=40)
    [[0, 1, 2, 3], [4, 5, 6, 7]]

    *Spanning* 2 tiles an id, which run on into the next block: a row for each place to begin, so
    that tiles 0+1, 2+3, ... are its first row and 1+2, 3+4, ... its second. No id begins at the
    last tile, with none behind it: the 7 there means nothing.

    >>> ids(block_stride=40, span=2)
    [[0, 4, 1, 5], [2, 6, 3, 7]]
    """

    num_blocks: int
    block_stride: int
    tiles: int
    tile_stride: int
    memory_type: str = "DRAM"
    device: int = 0
    span: int = 1

    @property
    def coalesced(self) -> bool:
        """Whether the tiles of consecutive blocks are equally far apart."""
        return self.tiles == 1 or self.block_stride == self.tiles * self.tile_stride

    @property
    def stride(self) -> int:
        """Bytes from one id of a row to the next."""
        if self.span > 1:
            return self.span * self.tile_stride
        return self.tile_stride if self.coalesced and self.tiles > 1 else self.block_stride

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The ids of each row of one run, in order."""
        total = self.num_blocks * self.tiles
        if self.span > 1:
            return tuple(max(0, total - first) // self.span for first in range(self.span))
        return (total,) if self.coalesced else (self.num_blocks,) * self.tiles

    @cached_property
    def ids_per_run(self) -> int:
        """The ids of one run's rows together."""
        return sum(self.counts)

    @property
    def rows_per_run(self) -> int:
        """The rows of one run: those that have an id."""
        return len(self.counts) - self.counts.count(0)

    def ids(self, block: Ints, tile: Ints) -> Ints:
        """Return the ids that begin at tiles, counted from a run's first id."""
        if self.tiles == self.span == 1:
            return block
        if not self.coalesced:
            return tile * self.num_blocks + block
        number = block * self.tiles + tile
        if self.span == 1:
            return number
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        return np.asarray(starts[number % self.span] + number // self.span, np.int64)

    def row(self, block: Ints, tile: Ints) -> Ints:
        """Return in which of a run's rows the ids of tiles stand."""
        if not self.coalesced:
            return tile
        return (block * self.tiles + tile) % self.span

    def place(self, number: int) -> tuple[int, int]:
        """Return the block and the tile in it of an id, counted from a run's first id."""
        row = 0
        while number >= self.counts[row]:
            number -= self.counts[row]
            row += 1
        if not self.coalesced:
            return number, row
        return divmod(number * self.span + row, self.tiles)

    def offsets(self, block: Ints, tile: Ints) -> Ints:
        """Return the bytes of tiles, counted from a run's first address."""
        return block * self.block_stride + tile * self.tile_stride

    def rows(self, address: Ints, length: Ints) -> npt.NDArray[np.uint64]:
        """Return the rows (address, length, device, stride, count) of runs."""
        counts = np.array([count for count in self.counts if count], np.int64)
        rows = np.empty((len(address), len(counts), 5), np.uint64)
        rows[:, :, 0] = address[:, None] + np.arange(len(counts)) * self.tile_stride
        rows[:, :, 1] = length[:, None]
        rows[:, :, 2] = self.device
        rows[:, :, 3] = self.stride
        rows[:, :, 4] = counts
        if 1 in self.counts:  # one descriptor has no stride, and needs one that is long enough
            single = counts == 1
            rows[:, single, 3] = np.maximum(self.stride, length)[:, None]
        return rows.reshape(-1, 5)
