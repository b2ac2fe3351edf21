"""How blocks repeat in memory, and how the token axis is cut.

Law: numbers only. What a request selects follows from these alone, not from the kind of layer, the
layout or the ranks that they came from.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.ranges import Cyclic, Ints
from kvspec.specs import LayerSpec


@attrs.frozen
class Pool:
    """How the blocks of one side repeat: the same numbers for every run of a set.

    A block holds *cells* cells, *cell_stride* bytes apart. *folded*: a block's stride is a whole
    number of cells, so that one row counts through cells and blocks alike.
    """

    num_blocks: int
    block_stride: int
    cells: int
    cell_stride: int
    memory_type: str
    device: int

    @property
    def folded(self) -> bool:
        """Whether the cells of consecutive blocks are equally far apart."""
        return self.cells == 1 or self.block_stride == self.cells * self.cell_stride

    @property
    def stride(self) -> int:
        """Bytes from one id of a row to the next."""
        return self.cell_stride if self.folded and self.cells > 1 else self.block_stride

    def steps(self, block: Ints, cell: Ints) -> Ints:
        """Return the ids of cells, counted from a run's first id."""
        if self.folded:
            return block * self.cells + cell
        return cell * self.num_blocks + block

    def offsets(self, block: Ints, cell: Ints) -> Ints:
        """Return the bytes of cells, counted from a run's first address."""
        return block * self.block_stride + cell * self.cell_stride

    def rows(self, address: Ints, length: Ints) -> npt.NDArray[np.uint64]:
        """Return the rows (address, length, device, stride, count) of runs."""
        repeat, count = 1, self.num_blocks * self.cells
        if not self.folded:
            repeat, count = self.cells, self.num_blocks
        rows = np.empty((len(address) * repeat, 5), np.uint64)
        first = address[:, None] + (np.arange(repeat) * self.cell_stride)[None, :]
        rows[:, 0] = first.ravel()
        rows[:, 1] = np.repeat(length, repeat)
        rows[:, 2] = self.device
        rows[:, 3] = np.maximum(self.stride, rows[:, 1]) if count == 1 else self.stride
        rows[:, 4] = count
        return rows


@attrs.frozen
class TokenSide:
    """How one side's tokens lie in blocks.

    Tokens of a table's block, tokens of a block in memory, and which positions the rank owns.
    """

    block_size: int
    memory_block_size: int
    context: Cyclic


@attrs.frozen
class Geometry:
    """What decides how a request is cut for some rows of one edge.

    *cell*: tokens that all tables, memory blocks and interleaves cut alike, 0 for states. *spec* is
    the consumer's. *spans*: up to how many cells one row takes. *tails*: whether the end of a cell
    is one row, or a row for each of the part's own rows of *grain* tokens.
    """

    spec: LayerSpec = attrs.field(eq=False)
    stripe: tuple[int, int]
    cell: int
    grain: int
    producer: TokenSide
    consumer: TokenSide
    spans: int = 1
    tails: bool = False
