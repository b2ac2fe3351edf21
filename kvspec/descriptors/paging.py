"""How the token axis is cut.

Law: numbers only. What a request selects follows from these alone, not from the kind of layer, the
layout or the ranks that they came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm
from typing import NamedTuple

import attrs

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
