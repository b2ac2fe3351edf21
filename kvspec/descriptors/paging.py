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
    (`tile_tokens`). A *row kind* (`RowKind`) selects the same tokens from each period of a block.
    A `TokenSplit` lists all row kinds that a request may need. A `BlockLayout` numbers the places
    of one row kind in the memory of one side.

    The word *row* has two meanings. A *row of a request* is one place of a row kind. It needs one
    descriptor for each run. A *strided row* of NIXL describes the places of one run that are
    equally far apart. A request selects some of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.errors import Mismatch, MismatchError
from kvspec.ownership.part import Part
from kvspec.ownership.stripes import Stripe
from kvspec.ownership.tokens import BlockCyclic, Ints


@attrs.frozen
class Paging:
    """The paging of the tokens of one side.

    Attributes:
        block_size: Tokens of one rank in one block of the block table.
        memory_block_size: Tokens of one block in memory. It divides `block_size`.
        context: The token positions that the rank owns.
        contiguous_across_blocks: Whether the bytes of a row continue from one block in memory into
            the next block.
        null_block: Id that stands for a missing block in block tables, or None.
    """

    block_size: int
    memory_block_size: int
    context: BlockCyclic
    contiguous_across_blocks: bool = False
    null_block: int | None = None

    @cached_property
    def kernel_blocks_per_block(self) -> int:
        """Number of blocks in memory for each block of the table.

        It is 1 if `GroupSide.part` has joined the kernel blocks of each block.
        """
        return self.block_size // self.memory_block_size

    @cached_property
    def virtual_block(self) -> int:
        """Number of token positions that one block of the table covers on all context ranks."""
        return self.block_size * self.context.size

    def places(self, own: Ints, kind: RowKind) -> tuple[Ints, Ints | None, Ints | None]:
        """Return where a request's rows of *kind* begin in the table and in memory.

        Args:
            own: Number of the rank's own tokens before each row, from the table's first token.
            kind: The kind of the rows.

        Returns:
            The index in the block table, the kernel block in the block, and the period in the
            kernel block. A period is a tile if the rows move whole tiles. The kernel block is None
            if a block has only one, and so is the period if a kernel block has only one.
        """
        kernel_block, tile = None, None
        if kind.period < self.memory_block_size:
            tile = (own % self.memory_block_size - kind.skip) // kind.period
        if self.kernel_blocks_per_block > 1:
            kernel_block = own // self.memory_block_size % self.kernel_blocks_per_block
        return own // self.block_size, kernel_block, tile


class RowKind(NamedTuple):
    """The tokens of a block that a row moves: *tokens* tokens, after *skip* in each *period*.

    In a block of 8 tokens, ``RowKind(period=4, skip=1, tokens=3)`` moves ``. 1 2 3 . 5 6 7``. All
    three numbers are 0 for a recurrent state, which moves whole.
    """

    period: int
    skip: int
    tokens: int


# A larger limit needs fewer rows for a request but more rows in the table. With 32, a tile of 256
# tokens has rows of 31 and 7 lengths for two sizes, and not of 255 lengths. Blocks of 32 tokens are
# common, and their last tokens are one row: transposed keys need a descriptor for each element.
MOST_LENGTHS = 32


def partial_sizes_of(grain: int, tile: int) -> tuple[int, ...]:
    """Return sizes from *grain* to *tile* tokens, each a small multiple of the previous size.

    A part of a tile is divided into multiples of these sizes. So a table needs rows for a few
    lengths only, and not for every length up to *tile*.

    >>> partial_sizes_of(1, 16), partial_sizes_of(1, 256), partial_sizes_of(4, 1056)
    ((1, 16), (1, 32, 256), (4, 96, 1056))
    """
    sizes = [grain]
    while sizes[-1] < tile:
        quotient = tile // sizes[-1]
        factors = [factor for factor in range(2, MOST_LENGTHS + 1) if quotient % factor == 0]
        # Without a factor up to the limit, the smallest factor above it is the next best. If the
        # quotient is prime, that factor is the quotient, and the next size is the whole tile.
        larger = (f for f in range(MOST_LENGTHS + 1, quotient + 1) if quotient % f == 0)
        sizes.append(sizes[-1] * (max(factors) if factors else next(larger)))
    return tuple(sizes)


def tile_counts_of(most: int) -> tuple[int, ...]:
    """Return the numbers of tiles that a row may move: 1 to 4, 16, 64 and so on, and *most*.

    A table has rows of each number, beginning at almost every tile. With all numbers up to *most*,
    it would have *most* times as many descriptors. With these, a request needs at most three rows
    of each number but the largest.

    >>> tile_counts_of(64), tile_counts_of(6), tile_counts_of(1)
    ((64, 16, 4, 3, 2, 1), (6, 4, 3, 2, 1), (1,))
    """
    counts = [*range(1, min(most, 4) + 1)]
    while counts[-1] < most:
        counts.append(min(4 * counts[-1], most))
    return tuple(reversed(counts))


@attrs.frozen(eq=False)
class TokenSplit:
    """The numbers that decide which rows of one edge a request selects.

    Attributes:
        stripe: The virtual blocks of the consumer that move over this edge.
        tile: Tokens that all tables, memory blocks and interleaves cut alike. 0 for states.
        grain: Tokens that one state of the part stands for (`Part.tokens_per_state`).
        producer: Paging of the producer.
        consumer: Paging of the consumer.
        tile_counts: The numbers of tiles that one row may move, from the largest to 1. Only 1 if
            rows of one tile are enough.
        partial_sizes: Sizes whose multiples are rows of a part of a tile. If empty, a part of a
            tile moves state by state.
        trim_from: The last tile is shortened if it has at least this many dead tokens. 0 if it
            always moves whole. 1 unless dead tokens may move.
        prefix_multiple: Cached prefixes are multiples of this many tokens.
        windowed: Whether tokens before the first live token may be dead, as in a sliding window.
        dead_tokens: Whether dead tokens may move if that needs fewer descriptors.
        opaque: Whether a state is an opaque page, which holds its dead tokens as well.
    """

    stripe: Stripe
    tile: int
    grain: int
    producer: Paging
    consumer: Paging
    tile_counts: tuple[int, ...] = (1,)
    partial_sizes: tuple[int, ...] = ()
    trim_from: int = 0
    prefix_multiple: int = 1
    windowed: bool = False
    dead_tokens: bool = False
    opaque: bool = False

    @property
    def may_begin_inside(self) -> bool:
        """Whether the first row may begin inside a tile, after cached or dead tokens."""
        if self.windowed and not self.dead_tokens:
            return True
        positions, context = self.tile, self.consumer.context
        if context.size > 1 and context.same_sharding(self.producer.context):
            # Tiles then count the rank's own tokens, but prefixes count positions of the request.
            # No tile begins cached if every prefix has whole tiles and whole interleaves of each
            # rank.
            positions = lcm(self.tile, context.interleave) * context.size
        return self.prefix_multiple % positions > 0

    def row_kinds(self) -> Iterator[RowKind]:
        """Yield all kinds of rows that a request may select."""
        if not self.tile:
            yield RowKind(0, 0, 0)
            return
        for tiles in self.tile_counts:
            yield RowKind(self.tile, 0, tiles * self.tile)
        begins_inside = self.may_begin_inside
        if self.tile > self.grain and not self.partial_sizes and (begins_inside or self.trim_from):
            yield RowKind(self.grain, 0, self.grain)
        for size, period in pairwise(self.partial_sizes):
            for tokens in range(size, period, size):
                if begins_inside:
                    yield RowKind(period, period - tokens, tokens)
                if self.trim_from:
                    yield RowKind(period, 0, tokens)
            if begins_inside and not self.dead_tokens:
                # All rows of a request may lie between the ends of one period.
                yield RowKind(size, 0, size)


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
        why = "blocks or interleaves would cut a row that stands for several tokens"
        field = f"{layer}.{part.name}.tokens_per_state"
        raise MismatchError([Mismatch(field, part.tokens_per_state, tile, why, ("row", "cut"))])
    return tile


@attrs.frozen
class BlockLayout:
    """The repetition of one row kind over the blocks of one side: equal for all runs of a `RowSet`.

    A layout has two axes, ``(num_blocks, tiles) : (block_stride, tile_stride)``. A *run* is one
    contiguous range of bytes of a tile. Each run has one id for each place where it repeats. NIXL
    receives these places as strided rows, and the strides decide how many rows a run needs. There
    are three cases. The examples show the ids of 2 blocks of 4 tiles:

    >>> def ids(**more):
    ...     block_layout = BlockLayout(num_blocks=2, tiles=4, tile_stride=10, **more)
    ...     block, tile = np.divmod(np.arange(8), 4)
    ...     return block_layout.ids(block, tile).reshape(2, 4).tolist()

    *Not coalesced*: the tiles of two blocks are not as far apart as the tiles of one block. A run
    has one row for each tile, and the ids of a row count blocks.

    >>> ids(block_stride=90)
    [[0, 2, 4, 6], [1, 3, 5, 7]]

    *Coalesced*: all tiles of all blocks are equally far apart. A run has one row, which counts
    tiles.

    >>> ids(block_stride=40)
    [[0, 1, 2, 3], [4, 5, 6, 7]]

    *Spanning*: one id covers 2 tiles and may continue in the next block. A run has one row for each
    remainder of the first tile: row 0 has tiles 0+1, 2+3, ..., and row 1 has tiles 1+2, 3+4, ....
    The last tile has no tile after it, so that its id (7) is never used.

    >>> ids(block_stride=40, span=2)
    [[0, 4, 1, 5], [2, 6, 3, 7]]

    Attributes:
        num_blocks: Blocks in memory.
        block_stride: Bytes from one block to the next.
        tiles: Number of places of the row kind in one block, in each of which it moves a tile, a
            part of a tile or several tiles.
        tile_stride: Bytes from one place to the next. 0 if a block has only one place.
        memory_type: NIXL memory type of the rows.
        device: Index of the device for `VRAM`.
        span: Tiles that one id covers in a spanning layout. Otherwise 1, also if the row kind moves
            several tiles of one block.
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
        """The number of ids in each row of one run, in order."""
        total = self.num_blocks * self.tiles
        if self.span > 1:
            return tuple(max(0, total - first) // self.span for first in range(self.span))
        return (total,) if self.coalesced else (self.num_blocks,) * self.tiles

    @cached_property
    def ids_per_run(self) -> int:
        """The number of ids of one run."""
        return sum(self.counts)

    @property
    def rows_per_run(self) -> int:
        """The number of rows of one run that have an id."""
        return len(self.counts) - self.counts.count(0)

    def ids(self, block: Ints, tile: Ints) -> Ints:
        """Return the ids that begin at *tile* of *block*, counted from the run's first id."""
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
        """Return which of the run's rows contains the id of *tile* of *block*."""
        if not self.coalesced:
            return tile
        return (block * self.tiles + tile) % self.span

    def place(self, number: int) -> tuple[int, int]:
        """Return block and tile of the id *number* of a run: the inverse of `ids`."""
        row = 0
        while number >= self.counts[row]:
            number -= self.counts[row]
            row += 1
        if not self.coalesced:
            return number, row
        return divmod(number * self.span + row, self.tiles)

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
        counts = np.array([count for count in self.counts if count], np.int64)
        rows = np.empty((len(address), len(counts), 5), np.uint64)
        rows[:, :, 0] = address[:, None] + np.arange(len(counts)) * self.tile_stride
        rows[:, :, 1] = length[:, None]
        rows[:, :, 2] = self.device
        rows[:, :, 3] = self.stride
        rows[:, :, 4] = counts
        # The stride of a single descriptor has no meaning and may be 0. NIXL requires that a
        # stride is at least as long as the descriptor.
        if 1 in self.counts:
            single = counts == 1
            rows[:, single, 3] = np.maximum(self.stride, length)[:, None]
        return rows.reshape(-1, 5)
