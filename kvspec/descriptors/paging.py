"""How the token axis is cut.

Law: numbers only. What a request selects follows from these alone, not from the kind of layer, the
layout or the ranks that they came from.

How the blocks of one side repeat in memory.

Law: numbers only; a block layout knows no layer, no rank and no request.
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
    """How one side's tokens lie in blocks.

    Tokens of a table's block, tokens of a block in memory (the physical blocks of a logical one),
    and which positions the rank owns. *contiguous_across_blocks*: rows run on from one block in
    memory to the next. *null_block*: the id that is no block.
    """

    block_size: int
    memory_block_size: int
    context: BlockCyclic
    contiguous_across_blocks: bool = False
    null_block: int | None = None

    @cached_property
    def kernel_blocks_per_block(self) -> int:
        """Blocks in memory for each block of the table."""
        return self.block_size // self.memory_block_size

    @cached_property
    def virtual_block(self) -> int:
        """The token positions that one block of the table stands for."""
        return self.block_size * self.context.size

    def places(self, own: Ints, kind: RowKind) -> tuple[Ints, Ints | None, Ints | None]:
        """Return where rows of *kind* lie that begin at *own* tokens, counted from the first.

        Block of the table, block in memory of these, tile in it; None where there is but one.
        """
        token, part, tile = own, None, None
        if kind.period < self.memory_block_size:
            token = own % self.memory_block_size
            tile = (token - kind.skip) // kind.period
        if self.kernel_blocks_per_block > 1:
            part = own // self.memory_block_size % self.kernel_blocks_per_block
        return own // self.block_size, part, tile


class RowKind(NamedTuple):
    """Which tokens of a block a row takes: *tokens*, *skip* into each *period*.

    Of a block of 8, ``RowKind(period=4, skip=1, tokens=3)`` takes these: ``. 1 2 3 . 5 6 7``. 0 of
    all for a state, which moves whole.
    """

    period: int
    skip: int
    tokens: int


MOST_LENGTHS = 16
"""Lengths of a part of a tile for which there are rows between two sizes, where sizes divide."""


def partial_sizes_of(grain: int, tile: int) -> tuple[int, ...]:
    """Return sizes from *grain* to *tile* tokens, each of few of the one before.

    A part of a tile is cut into multiples of them: so few rows are enough for all its lengths.

    >>> partial_sizes_of(1, 16), partial_sizes_of(1, 256), partial_sizes_of(4, 1056)
    ((1, 16), (1, 16, 256), (4, 48, 528, 1056))
    """
    sizes = [grain]
    while sizes[-1] < tile:
        left = tile // sizes[-1]
        few = [times for times in range(2, MOST_LENGTHS + 1) if left % times == 0]
        rest = (times for times in range(MOST_LENGTHS + 1, left + 1) if left % times == 0)
        sizes.append(sizes[-1] * (max(few) if few else next(rest)))
    return tuple(sizes)


@attrs.frozen(eq=False)
class TokenSplit:
    """What decides how a request is cut for some rows of one edge.

    *tile*: tokens that all tables, memory blocks and interleaves cut alike, 0 for states; *grain*:
    tokens of one of the part's own rows. *spans*: up to how many tiles one row takes.
    *partial_sizes*: the sizes whose multiples are rows of a part of a tile; () where that moves
    grain by grain. *trim_from*: of how many dead tokens on the last tile moves without them; 0: it
    never does. *prefix_multiple*: tokens of which cached prefixes are whole multiples.
    """

    stripe: Stripe
    tile: int
    grain: int
    producer: Paging
    consumer: Paging
    spans: int = 1
    partial_sizes: tuple[int, ...] = ()
    trim_from: int = 0
    prefix_multiple: int = 1

    @property
    def begun(self) -> bool:
        """Whether a tile may begin with cached tokens, counted by who owns them."""
        tile, context = self.tile, self.consumer.context
        if context.size > 1 and context.same_sharding(self.producer.context):
            tile = lcm(tile, context.interleave) * context.size
        return self.prefix_multiple % tile > 0

    def row_kinds(self) -> Iterator[RowKind]:
        """Yield the kinds of rows that a request may take."""
        if not self.tile:
            yield RowKind(0, 0, 0)
            return
        for tiles in range(1, self.spans + 1):
            yield RowKind(self.tile, 0, tiles * self.tile)
        begun = self.begun
        if self.tile > self.grain and not self.partial_sizes and (begun or self.trim_from):
            yield RowKind(self.grain, 0, self.grain)
        for size, period in pairwise(self.partial_sizes):
            for tokens in range(size, period, size):
                if begun:
                    yield RowKind(period, period - tokens, tokens)
                if self.trim_from:
                    yield RowKind(period, 0, tokens)


def tile_tokens(layer: str, part: Part, producer: Paging, consumer: Paging) -> int:
    """Return the tokens of a tile: the gcd of everything that cuts the token axis."""
    tile = gcd(producer.memory_block_size, consumer.memory_block_size)
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
