"""Runs: the maximal pieces of a cell that are contiguous on both sides.

Law: a run never depends on a block number. Boxes of two strided regions become runs by strides
alone, and runs of several parts and layers become one wherever they touch on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import gcd

import attrs
import numpy as np

from kvspec.descriptors.paging import Geometry, TokenSide
from kvspec.descriptors.pool import Pool
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import Mismatch, MismatchError
from kvspec.memory.region import Region, common_pieces
from kvspec.memory.regions import RankCache
from kvspec.ownership.part import Part
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.specs import LayerSpec

Seams = tuple[tuple[int, ...], tuple[int, ...]]
"""Where no run of the producer's, of the consumer's, may be joined."""


@attrs.frozen(eq=False)
class RowSet:
    """Runs that repeat alike on both sides.

    Each row is *tokens* tokens that begin *skip* tokens into a step of *unit* tokens; 0 of all for
    a state, which moves whole.
    """

    geometry: Geometry
    unit: int
    skip: int
    tokens: int
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
        ours, theirs = (len(self) * side.ids_per_run for side in sides)
        return ours, theirs

    @property
    def touching(self) -> bool:
        """Whether consecutive ids of a row are consecutive bytes on both sides: NIXL joins them."""
        return all((self.length == side.stride).all() for side in (self.producer, self.consumer))

    @property
    def dense(self) -> bool:
        """Whether so are the cells of each block, so that NIXL joins whatever is contiguous."""
        return self.touching and self.producer.folded and self.consumer.folded


def row_sets(
    edge: Edge,
    groups: tuple[KVCacheGroup, KVCacheGroup],
    producer: RankCache,
    consumer: RankCache,
) -> tuple[RowSet, ...]:
    """Return the runs of one edge between the producer's and the consumer's *groups*.

    For each family of layers and parts that are cut alike: rows for whole cells, rows for several
    cells in one where that makes longer runs, and rows for the end of a cell whose beginning the
    consumer has cached.
    """
    families: dict[Geometry, dict[object, _Boxes]] = {}
    caches = producer, consumer
    for each, layer, part in _pieces(edge, groups[1].spec):
        regions = producer.region(layer, part.name), consumer.region(layer, part.name)
        (mine, ours), (yours, theirs) = (
            _fused(*side) for side in zip(regions, groups, caches, strict=True)
        )
        cell = _cell_tokens(layer, part, ours, theirs) if part.per_token else 0
        spec = groups[1].spec.of_layer(layer)
        geometry = Geometry(spec, each.stripe, cell, part.tokens_per_state, ours, theirs)
        units = len(each.global_range)
        key = (units, part.tokens_per_state, part.content_bytes, mine.shape, yours.shape)
        family = families.setdefault(geometry, {})
        size, pieces = common_pieces(mine, yours)
        if key not in family:
            family[key] = _Boxes(units, part, mine, yours, size)
        first = mine.base + each.remote_range.start * mine.unit_stride
        other = yours.base + each.local_range.start * yours.unit_stride
        # Content that lies in pieces on either side is as many boxes; merge joins what touches.
        family[key].first += (
            (first + mine.piece_offset(byte), other + yours.piece_offset(byte)) for byte in pieces
        )
    seams = producer.seams, consumer.seams
    return tuple(
        rows
        for geometry, boxes in families.items()
        for rows in _family(geometry, tuple(boxes.values()), seams)
    )


def _fused(region: Region, group: KVCacheGroup, cache: RankCache) -> tuple[Region, TokenSide]:
    """Take the kernel's blocks for one where they follow each other like rows of one block."""
    size, memory_size = group.spec.block_size, group.memory_block_size
    row = _row_stride(region)
    if group.split > 1 and region.block_stride == region.states * row:
        region = attrs.evolve(
            region,
            num_blocks=region.num_blocks // group.split,
            block_stride=region.block_stride * group.split,
            state_stride=row,
            states=region.states * group.split,
        )
        memory_size = size
    context, null = cache.engine.context(group, cache.rank), cache.engine.null_block
    return region, TokenSide(size, memory_size, context, null_block=null)


def _pieces(edge: Edge, spec: LayerSpec) -> Iterator[tuple[TPTransferSlice, str, Part]]:
    for each in edge.slices:
        for layer in each.layers:
            for part in spec.of_layer(layer).parts:
                if part.name in each.parts:
                    yield each, layer, part


def _cell_tokens(layer: str, part: Part, ours: TokenSide, theirs: TokenSide) -> int:
    """Return the tokens of a cell: the gcd of everything that cuts the token axis."""
    cell = gcd(ours.memory_block_size, theirs.memory_block_size)
    if not ours.context.alike(theirs.context):
        for context in (ours.context, theirs.context):
            cell = gcd(cell, context.interleave) if context.size > 1 else cell
    if cell % part.tokens_per_state:
        why = "blocks or interleaves would cut a row that stands for several tokens"
        field = f"{layer}.{part.name}.tokens_per_state"
        raise MismatchError([Mismatch(field, part.tokens_per_state, cell, why, ("row", "cut"))])
    return cell


def _family(geometry: Geometry, boxes: tuple[_Boxes, ...], seams: Seams) -> list[RowSet]:
    """Return every set of rows that a family needs, and none that would not make runs longer."""
    cell, grain = geometry.cell, geometry.grain
    sets = partial(_sets, boxes, seams)
    whole = sets(geometry, unit=cell, skip=0, tokens=cell)
    if not cell:
        return whole
    found: list[RowSet] = []
    geometry = _flowing(geometry, boxes)
    cut = [side for side in (geometry.producer, geometry.consumer) if not side.flows]
    spans = min((side.memory_block_size // cell for side in cut), default=1)
    double = partial(sets, geometry, unit=cell, tokens=2 * cell)
    several = spans > 1 and _longer(whole, partial(double, skip=0))
    one = sets(geometry, unit=grain, skip=0, tokens=grain) if cell > grain else []
    double = partial(sets, geometry, unit=cell, tokens=2 * grain)
    tails = cell > 2 * grain and _longer(one, partial(double, skip=cell - 2 * grain))
    final = attrs.evolve(geometry, spans=spans if several else 1, tails=tails)
    for cells in range(1, final.spans + 1):
        found += sets(final, unit=cell, skip=0, tokens=cells * cell)
    if tails:
        for tokens in range(grain, cell, grain):
            found += sets(final, unit=cell, skip=cell - tokens, tokens=tokens)
    elif one:
        found += sets(final, unit=grain, skip=0, tokens=grain)
    return found


def _flowing(geometry: Geometry, boxes: tuple[_Boxes, ...]) -> Geometry:
    """Return *geometry* with what is known of memory: whose rows run on from block to block."""
    ours = all(
        _row_stride(each.ours) * each.ours.states == each.ours.block_stride for each in boxes
    )
    theirs = all(
        _row_stride(each.theirs) * each.theirs.states == each.theirs.block_stride for each in boxes
    )
    return attrs.evolve(
        geometry,
        producer=attrs.evolve(geometry.producer, flows=ours),
        consumer=attrs.evolve(geometry.consumer, flows=theirs),
    )


def _row_stride(region: Region) -> int:
    return region.state_stride if region.states > 1 else region.block_stride


def _longer(single: list[RowSet], double: Callable[[], list[RowSet]]) -> bool:
    """Return whether rows of twice the tokens are longer, and NIXL would not join single ones."""
    if all(rows.dense for rows in single):
        return False
    return sum(map(len, double())) < 2 * sum(map(len, single))


def _sets(
    boxes: tuple[_Boxes, ...],
    seams: Seams,
    geometry: Geometry,
    *,
    unit: int,
    skip: int,
    tokens: int,
) -> list[RowSet]:
    """Return the rows of one cut, boxes whose blocks repeat alike joined."""
    alike: dict[tuple[Pool, Pool], list[Ints]] = {}
    for each in boxes:
        pools = tuple(
            _pool(region, each.part, unit, skip, tokens, flows=side.flows)
            for region, side in ((each.ours, geometry.producer), (each.theirs, geometry.consumer))
        )
        alike.setdefault((pools[0], pools[1]), []).append(each.runs(skip, tokens))
    return [
        RowSet(geometry, unit, skip, tokens, *pools, *merge(runs, seams))
        for pools, runs in alike.items()
    ]


@attrs.define(eq=False)
class _Boxes:
    """Boxes (units x states x a piece of content) that differ in nothing but where they begin."""

    units: int
    part: Part
    ours: Region
    theirs: Region
    size: int
    first: list[tuple[int, int]] = attrs.field(factory=list)

    def runs(self, skip: int, tokens: int) -> Ints:
        """Return (producer address, consumer address, length) of the first block's first runs."""
        grain = self.part.tokens_per_state
        states = tokens // grain if grain else min(self.ours.states, self.theirs.states)
        length = self.size
        dims = [
            (self.units, self.ours.unit_stride, self.theirs.unit_stride),
            (states, _row_stride(self.ours), _row_stride(self.theirs)),
        ]
        dims = [dim for dim in dims if dim[0] > 1]
        while (touching := next((d for d in dims if d[1] == d[2] == length), None)) is not None:
            length *= touching[0]
            dims.remove(touching)
        at = np.asarray(self.first, np.int64)
        if skip:
            row = np.array([_row_stride(self.ours), _row_stride(self.theirs)])
            at = at + skip // grain * row
        for count, mine, other in dims:
            steps = np.arange(count, dtype=np.int64)[:, None] * np.array([mine, other])
            at = (at[:, None, :] + steps).reshape(-1, 2)
        return np.column_stack([at, np.full(len(at), length)])


def _pool(region: Region, part: Part, unit: int, skip: int, tokens: int, *, flows: bool) -> Pool:
    """Return how cells repeat: every *unit* tokens, as long as they end inside the block.

    Where rows flow from block to block, several cells may end in a later block.
    """
    grain, cells, span = part.tokens_per_state, 1, 1
    if grain and flows and tokens > unit and not skip:
        cells, span = region.states * grain // unit, tokens // unit
    elif grain:
        cells = (region.states * grain - skip - tokens) // unit + 1
    return Pool(
        num_blocks=region.num_blocks,
        block_stride=region.block_stride,
        cells=cells,
        cell_stride=unit // grain * _row_stride(region) if cells > 1 or span > 1 else 0,
        memory_type=region.memory_type,
        device=region.device,
        span=span,
    )


def merge(runs: Iterable[Ints], seams: Seams) -> tuple[Ints, Ints, Ints]:
    """Join runs (producer address, consumer address, length) that touch on both sides.

    Takes arrays of shape (n, 3); returns three columns, ascending in the producer's address. None
    is joined over a seam of either side: see `RankCache.seams`.
    """
    table = np.concatenate(list(runs))
    table = table[np.argsort(table[:, 0], kind="stable")]
    ours, theirs, length = table.T
    touches = (ours[:-1] + length[:-1] == ours[1:]) & (theirs[:-1] + length[:-1] == theirs[1:])
    for begins, seam in zip((ours[1:], theirs[1:]), seams, strict=True):
        if seam:
            touches &= ~np.isin(begins, seam)
    starts = np.concatenate([[0], np.flatnonzero(~touches) + 1])
    return ours[starts], theirs[starts], np.add.reduceat(length, starts)
