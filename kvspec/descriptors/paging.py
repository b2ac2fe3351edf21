"""Descriptions of paged memory: how the token axis is cut, and how block rows become ids.

Invariant: this module contains numbers only. It knows no layer, no memory layout letters and no
request. Two edges with equal numbers cut each request in the same way.

How it works:
    A block table and the memory may count in blocks of different sizes. vLLM divides one block of
    the table into several *kernel blocks* if the attention kernel needs smaller blocks:

        token                 0   1   2   3   4   5   6   7 |  8   9 ...
        block of the table    0                             |  1
        block in memory       0             | 1             |  2

    Here `block_size` is 8, `memory_block_size` is 4 and `kernel_blocks_per_block` is 2. A block in
    memory is a kernel block, or the block of the table if the kernel does not divide it.

    A *tile* is the largest number of tokens that no block and no interleave of either side divides
    (`tile_tokens`), or one state if larger tiles would spare no runs (`SplitRows.of`). A *row kind*
    (`RowKind`) is the whole tile or a part of it. A `BlockLayout` numbers the tiles of one side in
    memory.

    The word *row* has two meanings, and names are made of both:

        row of a request  one tile, or the part of it that moves: one descriptor for each run
        row kind          the tokens of its tile that a row of a request moves (`RowKind`)
        row set           runs of one row kind that repeat alike (`RowSet`), perhaps numbered in a
                          table (`NumberedRows`)
        split rows        the row sets of all kinds for parts that are cut alike (`SplitRows`)
        row starts        where the rows of a request begin, by row kind (`RowStarts`)

        strided row       of NIXL: the places of one run that are equally far apart. A request
                          selects some of them (`BlockLayout.rows`, `StridedRows`)

    A row of a block, such as the key of one token, is a *state* here.
"""

from __future__ import annotations

from functools import cached_property
from math import gcd
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.errors import Mismatch, MismatchError
from kvspec.ownership.part import Part
from kvspec.ownership.stripes import Stripe
from kvspec.ownership.tokens import BlockCyclic, Ints

# A block of more tiles has rows by block, if there are fewer blocks than tiles. A run of a block of
# 2**20 tokens then has one row and not 2**20. In usual blocks, rows by tile are better: they share
# bytes. That shows that they lie in one registered memory, so that their descriptors can be joined.
MANY_TILES = 1024


@attrs.frozen
class Paging:
    """The paging of the tokens of one side.

    Attributes:
        block_size: Tokens of one rank in one block of the block table.
        memory_block_size: Tokens of one block in memory. It divides `block_size`.
        context: The token positions that the rank owns.
        null_block: Id that stands for a missing block in block tables, or None.
        is_ring: Whether a block is a ring. A block of the table then has all positions, and the
            position p is in row ``p % memory_block_size``.
    """

    block_size: int
    memory_block_size: int
    context: BlockCyclic
    null_block: int | None = None
    is_ring: bool = False

    @cached_property
    def kernel_blocks_per_block(self) -> int:
        """Number of blocks in memory for each block of the table.

        It is 1 if `GroupSide.part` has joined the kernel blocks of each block, and for a ring.
        """
        return 1 if self.is_ring else self.block_size // self.memory_block_size

    @cached_property
    def virtual_block(self) -> int:
        """Number of token positions that one block of the table covers on all context ranks."""
        return self.block_size * self.context.size

    def places(self, own: Ints, tile: int) -> tuple[Ints, Ints | None, Ints | None]:
        """Return where rows of a request begin in the table and in memory.

        Args:
            own: Number of the rank's own tokens before each row, from the table's first token.
            tile: Tokens of a tile.

        Returns:
            The index in the block table, the kernel block in the block, and the tile in the kernel
            block. The kernel block is None if a block has only one, and so is the tile if a kernel
            block has only one.
        """
        kernel_block, inner = None, None
        if tile < self.memory_block_size:
            inner = own % self.memory_block_size // tile
        if self.kernel_blocks_per_block > 1:
            kernel_block = own // self.memory_block_size % self.kernel_blocks_per_block
        return own // self.block_size, kernel_block, inner


class RowKind(NamedTuple):
    """The tokens of a tile that a row moves: *tokens* tokens after the first *skip* tokens.

    In a tile of 4 tokens, ``RowKind(skip=1, tokens=3)`` moves ``. 1 2 3``. Both numbers are 0 for a
    recurrent state, which moves whole.
    """

    skip: int
    tokens: int


@attrs.frozen(eq=False)
class TokenSplit:
    """The numbers that decide which rows of one edge a request moves.

    Attributes:
        stripe: The virtual blocks of the consumer that move over this edge.
        tile: Tokens that all tables, memory blocks and interleaves cut alike, or the tokens of one
            state if larger tiles would spare no runs. 0 for recurrent states.
        tokens_per_state: Tokens that one state of the part stands for (`Part.tokens_per_state`).
        producer: Paging of the producer.
        consumer: Paging of the consumer.
        opaque: Whether a state is an opaque page, which holds its dead tokens as well.
    """

    stripe: Stripe
    tile: int
    tokens_per_state: int
    producer: Paging
    consumer: Paging
    opaque: bool = False

    @property
    def whole_kind(self) -> RowKind:
        """The kind of the rows that move a whole tile, or a whole state."""
        return RowKind(0, self.tile)


def tile_tokens(layer: str, part: Part, producer: Paging, consumer: Paging) -> int:
    """Return the tokens of a tile: the gcd of all sizes that cut the token axis.

    Raises:
        MismatchError: If a tile would cut a state that stands for several tokens.
    """
    tile = gcd(producer.memory_block_size, consumer.memory_block_size)
    # Ranks that shard alike own the same tokens, so that interleaves do not cut their own counts.
    if not producer.context.same_sharding(consumer.context):
        for context in (producer.context, consumer.context):
            tile = gcd(tile, context.interleave) if context.size > 1 else tile
    if tile % part.tokens_per_state:
        why = "blocks or interleaves would cut a state that stands for several tokens"
        field = f"{layer}.{part.name}.tokens_per_state"
        raise MismatchError([Mismatch(field, part.tokens_per_state, tile, why, ("row", "cut"))])
    return tile


@attrs.frozen
class BlockLayout:
    """The places of all tiles in the memory of one side: equal for all runs of a `RowSet`.

    A layout has two axes, ``(num_blocks, tiles) : (block_stride, tile_stride)``. A *run* is one
    contiguous range of bytes of a tile. Each run has one id for each place where it repeats. NIXL
    receives these places as strided rows, and the strides decide how many rows a run needs. The
    examples show the ids of 2 blocks of 3 tiles:

    >>> def ids(block_stride):
    ...     block_layout = BlockLayout(2, block_stride, tiles=3, tile_stride=10)
    ...     block, tile = np.divmod(np.arange(6), 3)
    ...     return block_layout.ids(block, tile).reshape(2, 3).tolist()

    *Coalesced*: all tiles of all blocks are equally far apart. A run has one row.

    >>> ids(block_stride=30)
    [[0, 1, 2], [3, 4, 5]]

    *By tile*: a run has one row for each tile, and the ids of a row count blocks.

    >>> ids(block_stride=90)
    [[0, 2, 4], [1, 3, 5]]

    *By block*: if a block has very many tiles, a run has one row for each block. The ids are those
    of the coalesced layout.

    Attributes:
        num_blocks: Blocks in memory.
        block_stride: Bytes from one block to the next.
        tiles: Tiles of one block.
        tile_stride: Bytes from one tile to the next. 0 if a block has only one.
        memory_type: NIXL memory type of the rows.
        device: Index of the device for `VRAM`.
    """

    num_blocks: int
    block_stride: int
    tiles: int
    tile_stride: int
    memory_type: str = "DRAM"
    device: int = 0

    @cached_property
    def coalesced(self) -> bool:
        """Whether the tiles of consecutive blocks are equally far apart."""
        return self.tiles == 1 or self.block_stride == self.tiles * self.tile_stride

    @cached_property
    def by_tile(self) -> bool:
        """Whether a run has one row for each tile, whose ids count blocks."""
        few_tiles = self.tiles <= max(self.num_blocks, MANY_TILES)
        return few_tiles and not self.coalesced

    @property
    def stride(self) -> int:
        """Bytes from one id of a row to the next."""
        return self.block_stride if self.tiles == 1 or self.by_tile else self.tile_stride

    @property
    def count(self) -> int:
        """The number of ids in each row."""
        return self.ids_per_run // self.rows_per_run

    @cached_property
    def ids_per_run(self) -> int:
        """The number of ids of one run."""
        return self.num_blocks * self.tiles

    @cached_property
    def rows_per_run(self) -> int:
        """The number of rows of one run."""
        if self.coalesced:
            return 1
        return self.tiles if self.by_tile else self.num_blocks

    def ids(self, block: Ints, tile: Ints) -> Ints:
        """Return the ids of *tile* of *block*, counted from the run's first id."""
        if self.tiles == 1:
            return block
        return tile * self.num_blocks + block if self.by_tile else block * self.tiles + tile

    def row(self, block: Ints, tile: Ints) -> Ints:
        """Return which of the run's rows contains the id of *tile* of *block*."""
        return tile if self.by_tile else block

    def place(self, number: int) -> tuple[int, int]:
        """Return block and tile of the id *number* of a run: the inverse of `ids`."""
        if self.by_tile:
            return number % self.num_blocks, number // self.num_blocks
        return divmod(number, self.tiles)

    def offsets(self, block: Ints, tile: Ints) -> Ints:
        """Return the bytes from the run's first address to *tile* of *block*."""
        return block * self.block_stride + tile * self.tile_stride

    def rows(self, address: Ints, length: Ints) -> npt.NDArray[np.uint64]:
        """Return the strided rows of several runs.

        Args:
            address: First address of each run, shape (runs,).
            length: Bytes of each run, shape (runs,).

        Returns:
            Rows (address, length, device, stride, count), shape (runs * `rows_per_run`, 5).
        """
        # From the first id of a row to that of the next row. `stride` is that of ids in one row.
        between_rows = self.tile_stride if self.by_tile else self.block_stride
        rows = np.empty((len(address), self.rows_per_run, 5), np.uint64)
        rows[:, :, 0] = address[:, None] + np.arange(self.rows_per_run) * between_rows
        rows[:, :, 1] = length[:, None]
        rows[:, :, 2] = self.device
        rows[:, :, 3] = self.stride
        rows[:, :, 4] = self.count
        # The stride of a single descriptor has no meaning and may be 0. NIXL requires that a
        # stride is at least as long as the descriptor.
        if self.count == 1:
            rows[:, :, 3] = np.maximum(self.stride, length)[:, None]
        return rows.reshape(-1, 5)
