"""Runs: the maximal pieces of a cell that are contiguous on both sides.

Law: a run never depends on a block number. Boxes of two strided regions become runs by strides
alone, and runs of several parts and layers become one wherever they touch on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.cache import RankCache, Region
from kvspec.plan import Edge
from kvspec.slices import Part, TPTransferSlice
from kvspec.specs import LayerSpec

Ints = npt.NDArray[np.int64]


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
        stride = self.cell_stride if self.cells > 1 else self.block_stride
        if not self.folded:
            repeat, count, stride = self.cells, self.num_blocks, self.block_stride
        rows = np.empty((len(address) * repeat, 5), np.uint64)
        first = address[:, None] + (np.arange(repeat) * self.cell_stride)[None, :]
        rows[:, 0] = first.ravel()
        rows[:, 1] = np.repeat(length, repeat)
        rows[:, 2] = self.device
        rows[:, 3] = np.maximum(stride, rows[:, 1]) if count == 1 else stride
        rows[:, 4] = count
        return rows


@attrs.frozen(eq=False)
class RowSet:
    """Runs that repeat alike on both sides.

    *spec* is the consumer's. *tokens* of one cell of these rows, 0 for a state that moves whole.
    *within*: None for whole cells; else the next larger grain: these rows move the end of a cell
    whose beginning the consumer has cached.
    """

    spec: LayerSpec
    producer_block_size: int
    tokens: int
    within: int | None
    stripe: tuple[int, int]
    producer: Pool
    consumer: Pool
    producer_address: Ints
    consumer_address: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.length)

    def ids_used(self) -> tuple[int, int]:
        """Return how many ids the rows of each side take."""
        sides = (self.producer, self.consumer)
        ours, theirs = (len(self) * side.num_blocks * side.cells for side in sides)
        return ours, theirs


def grains(cell: int, least: int) -> tuple[int, ...]:
    """Return *cell* tokens and the ever finer pieces it is cut into, down to *least* tokens.

    Each grain divides the one before, by as little as possible, so that the end of a cell is few
    pieces.

    >>> grains(16, 1)
    (16, 8, 4, 2, 1)
    >>> grains(48, 4)
    (48, 24, 12, 4)
    """
    found = [cell]
    while found[-1] > least:
        ratio = found[-1] // least
        found.append(found[-1] // next(d for d in range(2, ratio + 1) if ratio % d == 0))
    return tuple(found)


def row_sets(
    edge: Edge,
    specs: tuple[LayerSpec, LayerSpec],
    producer: RankCache,
    consumer: RankCache,
) -> tuple[RowSet, ...]:
    """Return the runs of one edge; *specs* are the producer's and the consumer's group's.

    Rows for whole cells come first, then those for ever finer ends of a cell.
    """
    shapes: dict[object, _Boxes] = {}
    for each, layer, part in _pieces(edge, specs[1]):
        ours, theirs = producer.region(layer, part.name), consumer.region(layer, part.name)
        size = specs[0].of_layer(layer).block_size
        key = (each.stripe, len(each.global_range), part, size, ours.shape, theirs.shape)
        if key not in shapes:
            spec = specs[1].of_layer(layer)
            shapes[key] = _Boxes(
                spec, size, each.stripe, len(each.global_range), part, ours, theirs
            )
        first = ours.base + each.remote_range.start * ours.unit_stride
        shapes[key].first.append((first, theirs.base + each.local_range.start * theirs.unit_stride))
    found: dict[tuple[object, ...], list[tuple[_Boxes, _Grain]]] = {}
    for boxes in shapes.values():
        for grain in boxes.grains():
            key = (boxes.stripe, boxes.producer_block_size, *attrs.astuple(grain, recurse=False))
            found.setdefault(key, []).append((boxes, grain))
    whole_first = sorted(found.values(), key=lambda alike: alike[0][1].within is not None)
    return tuple(_row_set(alike) for alike in whole_first)


def _pieces(edge: Edge, spec: LayerSpec) -> Iterator[tuple[TPTransferSlice, str, Part]]:
    for each in edge.slices:
        for layer in each.layers or edge.layers:
            for part in spec.of_layer(layer).parts:
                if part.name in each.parts:
                    yield each, layer, part


@attrs.frozen
class _Grain:
    """One way to cut blocks into cells: the tokens of a cell, and how cells repeat."""

    tokens: int
    within: int | None
    producer: Pool
    consumer: Pool


@attrs.define
class _Boxes:
    """Boxes (units x states x content) that differ in nothing but where they begin."""

    spec: LayerSpec
    producer_block_size: int
    stripe: tuple[int, int]
    units: int
    part: Part
    ours: Region
    theirs: Region
    first: list[tuple[int, int]] = attrs.field(factory=list)

    def grains(self) -> Iterator[_Grain]:
        """Yield every grain that the boxes are cut in: one for a state, which moves whole."""
        least = self.part.tokens_per_state
        cell = gcd(self.producer_block_size, self.spec.block_size) if least else 0
        within = None
        for tokens in grains(cell, least):
            pools = (_pool(side, self.part, tokens) for side in (self.ours, self.theirs))
            yield _Grain(tokens, within, *pools)
            within = tokens

    def runs(self, tokens: int) -> Ints:
        """Return (producer address, consumer address, length) of the first cell's runs."""
        states = tokens // self.part.tokens_per_state if tokens else self.part.states
        length = self.part.content_bytes
        dims = [
            (self.units, self.ours.unit_stride, self.theirs.unit_stride),
            (states, self.ours.state_stride, self.theirs.state_stride),
        ]
        dims = [dim for dim in dims if dim[0] > 1]
        while (touching := next((d for d in dims if d[1] == d[2] == length), None)) is not None:
            length *= touching[0]
            dims.remove(touching)
        at = np.asarray(self.first, np.int64)
        for count, mine, other in dims:
            steps = np.arange(count, dtype=np.int64)[:, None] * np.array([mine, other])
            at = (at[:, None, :] + steps).reshape(-1, 2)
        return np.column_stack([at, np.full(len(at), length)])


def _pool(region: Region, part: Part, tokens: int) -> Pool:
    rows = tokens // part.tokens_per_state if tokens else region.states
    return Pool(
        num_blocks=region.num_blocks,
        block_stride=region.block_stride,
        cells=region.states // rows,
        cell_stride=rows * region.state_stride if region.states > rows else 0,
        memory_type=region.memory_type,
        device=region.device,
    )


def _row_set(alike: list[tuple[_Boxes, _Grain]]) -> RowSet:
    boxes, grain = alike[0]
    ours, theirs, length = merge(each.runs(grain.tokens) for each, _ in alike)
    return RowSet(
        spec=boxes.spec,
        producer_block_size=boxes.producer_block_size,
        tokens=grain.tokens,
        within=grain.within,
        stripe=boxes.stripe,
        producer=grain.producer,
        consumer=grain.consumer,
        producer_address=ours,
        consumer_address=theirs,
        length=length,
    )


def merge(runs: Iterable[Ints]) -> tuple[Ints, Ints, Ints]:
    """Join runs (producer address, consumer address, length) that touch on both sides.

    Takes arrays of shape (n, 3); returns three columns, ascending in the producer's address.
    """
    table = np.concatenate(list(runs))
    table = table[np.argsort(table[:, 0], kind="stable")]
    ours, theirs, length = table.T
    touches = (ours[:-1] + length[:-1] == ours[1:]) & (theirs[:-1] + length[:-1] == theirs[1:])
    starts = np.concatenate([[0], np.flatnonzero(~touches) + 1])
    return ours[starts], theirs[starts], np.add.reduceat(length, starts)
