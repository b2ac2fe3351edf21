"""How the blocks of one side repeat in memory.

Law: numbers only; a pool knows no layer, no rank and no request.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.ownership.tokens import Ints


@attrs.frozen
class Pool:
    """How the blocks of one side repeat: the same numbers for every run of a set.

    A block holds *cells* cells, *cell_stride* bytes apart. *folded*: a block's stride is a whole
    number of cells, so that one row counts through cells and blocks alike. *span*: cells that one
    id takes where they run on from block to block; ids then count every span-th cell, from each of
    the first *span* cells in turn.
    """

    num_blocks: int
    block_stride: int
    cells: int
    cell_stride: int
    memory_type: str
    device: int
    span: int = 1

    @property
    def folded(self) -> bool:
        """Whether the cells of consecutive blocks are equally far apart."""
        return self.cells == 1 or self.block_stride == self.cells * self.cell_stride

    @property
    def stride(self) -> int:
        """Bytes from one id of a row to the next."""
        if self.span > 1:
            return self.span * self.cell_stride
        return self.cell_stride if self.folded and self.cells > 1 else self.block_stride

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The ids of each row of one run, in order."""
        total = self.num_blocks * self.cells
        if self.span > 1:
            return tuple(max(0, total - first) // self.span for first in range(self.span))
        return (total,) if self.folded else (self.num_blocks,) * self.cells

    @cached_property
    def ids_per_run(self) -> int:
        """The ids of one run's rows together."""
        return sum(self.counts)

    def steps(self, block: Ints, cell: Ints) -> Ints:
        """Return the ids of cells, counted from a run's first id."""
        if not self.folded:
            return cell * self.num_blocks + block
        at = block * self.cells + cell
        if self.span == 1:
            return at
        row = at % self.span
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        return np.asarray(starts[row] + at // self.span, np.int64)

    def row(self, block: Ints, cell: Ints) -> Ints:
        """Return in which of a run's rows the ids of cells stand."""
        if not self.folded:
            return cell
        return (block * self.cells + cell) % self.span

    def place(self, step: int) -> tuple[int, int]:
        """Return the block and the cell in it of an id, counted from a run's first id."""
        row = 0
        while step >= self.counts[row]:
            step -= self.counts[row]
            row += 1
        if not self.folded:
            return step, row
        return divmod(step * self.span + row, self.cells)

    def offsets(self, block: Ints, cell: Ints) -> Ints:
        """Return the bytes of cells, counted from a run's first address."""
        return block * self.block_stride + cell * self.cell_stride

    def rows(self, address: Ints, length: Ints) -> npt.NDArray[np.uint64]:
        """Return the rows (address, length, device, stride, count) of runs."""
        counts = np.array([count for count in self.counts if count], np.int64)
        rows = np.empty((len(address) * len(counts), 5), np.uint64)
        first = address[:, None] + (np.arange(len(counts)) * self.cell_stride)[None, :]
        rows[:, 0] = first.ravel()
        rows[:, 1] = np.repeat(length, len(counts))
        rows[:, 2] = self.device
        rows[:, 4] = np.tile(counts, len(address))
        single = rows[:, 4] == 1
        rows[:, 3] = np.where(single, np.maximum(self.stride, rows[:, 1]), self.stride)
        return rows
