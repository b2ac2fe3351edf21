"""How the token axis is cut.

Law: numbers only. What a request selects follows from these alone, not from the kind of layer, the
layout or the ranks that they came from.
"""

from __future__ import annotations

import attrs

from kvspec.ownership.stripes import Stripe
from kvspec.ownership.tokens import Cyclic
from kvspec.specs import LayerSpec


@attrs.frozen
class TokenSide:
    """How one side's tokens lie in blocks.

    Tokens of a table's block, tokens of a block in memory, and which positions the rank owns.
    *flows*: rows run on from one block in memory to the next. *null_block*: the id that is no
    block.
    """

    block_size: int
    memory_block_size: int
    context: Cyclic
    flows: bool = False
    null_block: int | None = None


@attrs.frozen
class Geometry:
    """What decides how a request is cut for some rows of one edge.

    *cell*: tokens that all tables, memory blocks and interleaves cut alike, 0 for states. *spec* is
    the consumer's. *spans*: up to how many cells one row takes. *tails*: whether the end of a cell
    is one row, or a row for each of the part's own rows of *grain* tokens.
    """

    spec: LayerSpec = attrs.field(eq=False)
    stripe: Stripe
    cell: int
    grain: int
    producer: TokenSide
    consumer: TokenSide
    spans: int = 1
    tails: bool = False
