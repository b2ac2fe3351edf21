"""Runs: the maximal ranges of a cell that are contiguous on both sides.

Law: a run never depends on a block number. Boxes of two strided regions become runs by strides
alone, and runs of several parts and layers become one wherever they touch on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.boxes import (
    Boxes,
    GroupSide,
    PartSide,
    Seams,
    coalesce,
    pool_of,
    row_stride,
)
from kvspec.descriptors.cells import Cells
from kvspec.descriptors.paging import Geometry, RowKind, cell_tokens, scale_of
from kvspec.descriptors.pool import Pool
from kvspec.engines.group import KVCacheGroup
from kvspec.memory.region import Region, common_chunks
from kvspec.memory.regions import RankCache
from kvspec.ownership.part import Part
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.specs import LayerSpec

# Bytes that take as long as one more descriptor. NIXL over shared memory needs 2.4 us for a
# descriptor and moves 9 GB/s: 21,600 bytes. The host's own work for a descriptor adds half of that.
DEAR = 32_400


@attrs.frozen(eq=False)
class RowSet:
    """Rows of one *kind* that repeat alike on both sides."""

    geometry: Geometry
    kind: RowKind
    producer: Pool
    consumer: Pool
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
    def alike(self) -> tuple[object, ...]:
        """What the ids of its cells depend on, beside the request and how it is cut."""
        return tuple(
            (pool.num_blocks, pool.cells, pool.coalesced, pool.span)
            for pool in (self.producer, self.consumer)
        )

    @cached_property
    def size(self) -> int | None:
        """Bytes of one cell of each run; None where they differ."""
        size = int(self.length[0])
        return size if (self.length == size).all() else None

    def offsets(self, cells: Cells) -> Ints:
        """Return the bytes from a run's address to each of *cells*: shape (2, n), as theirs."""
        offsets: Ints = cells.block * self._strides[0] + cells.cell * self._strides[1]
        return offsets

    @cached_property
    def _strides(self) -> Ints:
        pools = self.producer, self.consumer
        strides = [[pool.block_stride for pool in pools], [pool.cell_stride for pool in pools]]
        return np.array(strides)[:, :, None]

    def next_ids(self, cells: Cells) -> npt.NDArray[np.bool_]:
        """Whether each of *cells* but the first has the next id of the same row, on both sides."""
        next_ = cells.ids[:, 1:] - cells.ids[:, :-1] == 1
        for side, pool in enumerate((self.producer, self.consumer)):
            if pool.rows_per_run > 1:
                row = pool.row(cells.block[side], cells.cell[side])
                next_[side] &= row[1:] == row[:-1]
        return np.asarray(next_[0] & next_[1])

    def posted(self, cells: Cells) -> int:
        """Return how many descriptors NIXL posts for *cells* of all runs."""
        joined = np.count_nonzero(self.next_ids(cells)) if self.touching else 0
        return len(self) * (len(cells) - int(joined))

    @cached_property
    def touching(self) -> bool:
        """Whether consecutive ids of a row are consecutive bytes on both sides: NIXL joins them."""
        return all((self.length == side.stride).all() for side in (self.producer, self.consumer))

    @cached_property
    def plain(self) -> bool:
        """Whether each run is one row on either side: what touches has ids that follow each other.

        So NIXL joins all that touches on both sides, in one run of cells of one length.
        """
        return all(pool.coalesced and pool.span == 1 for pool in (self.producer, self.consumer))

    @property
    def dense(self) -> bool:
        """Whether so are all cells of all blocks: NIXL joins whatever is contiguous."""
        return self.touching and self.producer.coalesced and self.consumer.coalesced


def row_sets(
    edge: Edge,
    groups: tuple[KVCacheGroup, KVCacheGroup],
    producer: RankCache,
    consumer: RankCache,
    layers: frozenset[str] | None = None,
    cached_in: int = 1,
) -> tuple[RowSet, ...]:
    """Return the runs of one edge, all *layers* or some, between the two sides' *groups*.

    For each family of layers and parts that are cut alike: rows for whole cells, rows for several
    cells in one where that makes longer runs, and rows for a part of a cell; no cell begins with
    cached tokens where *cached_in* is a multiple of it.
    """
    sides = GroupSide(producer, groups[0]), GroupSide(consumer, groups[1])
    families: dict[tuple[object, ...], tuple[Geometry, _Contents]] = {}
    for one, layer, part in _parts(edge, groups[1].spec, layers):
        source = sides[0].part(layer, part.name, one.remote_range.start)
        target = sides[1].part(layer, part.name, one.local_range.start)
        cell = cell_tokens(layer, part, source.paging, target.paging) if part.per_token else 0
        sizes = source.paging.memory_block_size, target.paging.memory_block_size
        family = (one.stripe.first, one.stripe.step, cell, part.tokens_per_state, sizes)
        if family not in families:
            cut = one.stripe, cell, part.tokens_per_state, source.paging, target.paging
            families[family] = Geometry(*cut, cached_in=cached_in), {}
        _, contents = families[family]
        alike = len(one.global_range), source.repeats, target.repeats
        _, first = contents.setdefault(alike, ((source, target), []))
        size, chunks = common_chunks(source.region, target.region)
        if len(chunks) == 1:
            first.append((source.first, target.first, size))
            continue
        # Content that lies in chunks on either side is as many contents.
        first += (
            (
                source.first + source.region.chunk_offset(byte),
                target.first + target.region.chunk_offset(byte),
                size,
            )
            for byte in chunks
        )
    seams = producer.seams, consumer.seams
    return tuple(
        rows
        for geometry, contents in families.values()
        for rows in _family(geometry, tuple(_boxes(geometry.grain, contents, seams)), seams)
    )


_Contents = dict[
    tuple[int, object, object], tuple[tuple[PartSide, PartSide], list[tuple[int, int, int]]]
]
"""By units and by how both sides repeat: the sides, and addresses and length of first contents."""


def _boxes(grain: int, contents: _Contents, seams: Seams) -> Iterator[Boxes]:
    for (units, *_), (sides, first) in contents.items():
        yield from Boxes.of(units, grain, sides, np.array(first, np.int64), seams)


def _parts(
    edge: Edge, spec: LayerSpec, layers: frozenset[str] | None
) -> Iterator[tuple[TPTransferSlice, str, Part]]:
    for one in edge.slices:
        for layer in one.layers if layers is None else filter(layers.__contains__, one.layers):
            for part in spec.of_layer(layer).parts:
                if part.name in one.parts:
                    yield one, layer, part


def _family(geometry: Geometry, boxes: tuple[Boxes, ...], seams: Seams) -> list[RowSet]:
    """Return every set of rows that a family needs, and none that would not make runs longer."""
    if geometry.cell:
        geometry = _flowing(geometry, boxes)
        rows = partial(_rows, geometry, boxes, seams)
        scale = _scale(geometry, rows)
        geometry = attrs.evolve(
            geometry,
            spans=_spans(geometry, rows),
            scale=scale,
            open=_open(attrs.evolve(geometry, scale=scale), boxes, rows),
        )
    return [rows for kind in geometry.row_kinds() for rows in _rows(geometry, boxes, seams, kind)]


def _flowing(geometry: Geometry, boxes: tuple[Boxes, ...]) -> Geometry:
    """Return *geometry* with what is known of memory: whose rows run on from block to block."""
    sides = {}
    for name in ("producer", "consumer"):
        regions: list[Region] = [getattr(box, name) for box in boxes]
        flows = all(row_stride(each) * each.states == each.block_stride for each in regions)
        sides[name] = attrs.evolve(getattr(geometry, name), flows=flows)
    return attrs.evolve(geometry, **sides)


def _spans(geometry: Geometry, rows: Callable[[RowKind], list[RowSet]]) -> int:
    """Return up to how many cells one row takes.

    Several, if rows of two cells are fewer than two rows of one each.
    A block of 8 tokens, cells of 4 tokens, two heads (a, b) of which one moves:

        heads outermost     a0 a1 a2 a3 | a4 a5 a6 a7   b0 b1 ...   yes: both cells are one run
        tokens outermost    a0 b0 a1 b1 a2 b2 a3 b3 | a4 b4 ...     no: not even two tokens are

    As many as a block has, on a side whose rows do not flow on from block to block. Where both
    sides' do, NIXL joins cells that touch.
    """
    cell, sides = geometry.cell, (geometry.producer, geometry.consumer)
    spans = min((side.memory_block_size // cell for side in sides if not side.flows), default=1)
    one, two = (RowKind(period=cell, skip=0, tokens=cells * cell) for cells in (1, 2))
    return spans if spans > 1 and _longer(rows, one, two) else 1


def _scale(geometry: Geometry, rows: Callable[[RowKind], list[RowSet]]) -> tuple[int, ...]:
    """Return the sizes of rows of a part of a cell; none where rows of one token each do.

    There are some, if rows of two tokens are fewer than two rows of one each.
    A block of 8 tokens, one cell, of which the last three move (two heads, one of them moves):

        heads outermost     . . . . . a5 a6 a7   b0 b1 ...          yes: one row of three tokens
        tokens outermost    . . . . . . . . . . a5 b5 a6 b6 a7 b7   no: three rows of one token
    """
    cell, grain = geometry.cell, geometry.grain
    one = RowKind(period=grain, skip=0, tokens=grain)
    two = RowKind(period=cell, skip=cell - 2 * grain, tokens=2 * grain)
    return scale_of(grain, cell) if cell > 2 * grain and _longer(rows, one, two) else ()


def _longer(rows: Callable[[RowKind], list[RowSet]], one: RowKind, two: RowKind) -> bool:
    """Return whether rows of *two* are longer than of *one*, and NIXL would not join those."""
    single = rows(one)
    if all(each.dense for each in single):
        return False
    return sum(map(len, rows(two))) < 2 * sum(map(len, single))


def _open(
    geometry: Geometry, boxes: tuple[Boxes, ...], rows: Callable[[RowKind], list[RowSet]]
) -> int:
    """Return of how many dead tokens on the last cell leaves them out; 0 where it never does.

    Of one on, where no more rows do the rest. A block of 8 tokens, one cell, of which three live:

        one head moves      a0 a1 a2 . . . . .   b0 b1 ...              yes: one row, as all 8 are
        two heads move      a0 a1 a2 . . . . .   b0 b1 b2 . . . . .     no: two rows; all 8 are one

    Where NIXL joins whole cells, a part of one is apart: there of as many as take longer than that.
    """
    cell, grain = geometry.cell, geometry.grain
    if cell == grain:
        return 0
    kinds = [RowKind(period=size, skip=0, tokens=size) for size in (cell, grain)]
    whole, part = map(rows, kinds)
    if any(each.touching for each in whole):
        nbytes = sum(int(each.length.sum()) for each in part)
        dead = grain * -(-DEAR * sum(map(len, part)) // nbytes)
        return dead if dead < cell and all(each.touching for each in part) else 0
    times = 1 if geometry.scale else cell // grain
    counts = [[len(box.runs(kind)) for kind in kinds] for box in boxes]
    counts.append([sum(map(len, each)) for each in (whole, part)])
    return int(all(of_whole == times * of_part for of_whole, of_part in counts))


def _rows(
    geometry: Geometry, boxes: tuple[Boxes, ...], seams: Seams, kind: RowKind
) -> list[RowSet]:
    """Return the rows of one kind, those of boxes whose blocks repeat alike joined."""
    alike: dict[tuple[Pool, Pool], list[Ints]] = {}
    for box in boxes:
        pools = (
            pool_of(box.producer, kind, box.grain, flows=geometry.producer.flows),
            pool_of(box.consumer, kind, box.grain, flows=geometry.consumer.flows),
        )
        alike.setdefault(pools, []).append(box.runs(kind))
    return [RowSet(geometry, kind, *pools, *coalesce(runs, seams)) for pools, runs in alike.items()]
