"""Runs: the maximal ranges of a tile that are contiguous on both sides.

Law: a run never depends on a block number. Boxes of two strided regions become runs by strides
alone, and runs of several parts and layers become one wherever they touch on both sides.

Boxes: the parts of two strided regions that move, and the runs that they are.

Law: strides alone decide; a box knows no request, and no other box until runs are coalesced.

Rows that repeat in the same way on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.paging import (
    BlockLayout,
    Paging,
    RowKind,
    TokenSplit,
    partial_sizes_of,
    tile_tokens,
)
from kvspec.descriptors.tiles import Tiles
from kvspec.engines.group import KVCacheGroup
from kvspec.memory.rank_cache import RankCache
from kvspec.memory.region import Region, common_chunks
from kvspec.ownership.part import Part
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.specs import LayerSpec

Boundaries = tuple[tuple[int, ...], tuple[int, ...]]
"""Where no run of the producer's, of the consumer's, may be joined."""


@attrs.frozen(eq=False)
class PartSide:
    """One part of one layer on one side: where it lies and how its tokens are paged."""

    region: Region
    paging: Paging
    first: int

    @property
    def repeats(self) -> tuple[object, ...]:
        """How its contents repeat, and where: all but how long each is."""
        strides = self.region.block_stride, self.region.unit_stride, self.region.state_stride
        counts = self.region.num_blocks, self.region.states
        return (*strides, *counts, self.region.memory_type, self.region.device)


@attrs.frozen(eq=False, slots=False)
class GroupSide:
    """One group of one rank, of which each part is asked for: what they share is made once."""

    cache: RankCache
    group: KVCacheGroup

    @cached_property
    def paging(self) -> Paging:
        """How tokens lie in blocks, as the kernel has them."""
        engine, group = self.cache.engine, self.group
        context, null = engine.context(group, self.cache.rank), engine.null_block
        return Paging(group.spec.block_size, group.memory_block_size, context, null_block=null)

    @cached_property
    def _whole(self) -> Paging:
        """The same where the kernel's blocks are taken for one."""
        return attrs.evolve(self.paging, memory_block_size=self.group.spec.block_size)

    def part(self, layer: str, part: str, unit: int) -> PartSide:
        """Return the part's units from the rank's own number *unit* on.

        The kernel's blocks are taken for one where they follow each other like rows of one block.
        """
        region, kernel_blocks_per_block, paging = (
            self.cache.region(layer, part),
            self.group.kernel_blocks_per_block,
            self.paging,
        )
        if kernel_blocks_per_block > 1 and region.block_stride == region.states * row_stride(
            region
        ):
            paging = self._whole
            region = attrs.evolve(
                region,
                num_blocks=region.num_blocks // kernel_blocks_per_block,
                block_stride=region.block_stride * kernel_blocks_per_block,
                state_stride=row_stride(region),
                states=region.states * kernel_blocks_per_block,
            )
        return PartSide(region, paging, region.base + unit * region.unit_stride)


def row_stride(region: Region) -> int:
    """Return the bytes from one row of *region* to the next; of one row, to the next block's."""
    return region.state_stride if region.states > 1 else region.block_stride


@attrs.frozen(eq=False)
class Boxes:
    """Boxes (units x states x content) that differ in nothing but where they begin."""

    units: int
    grain: int
    producer: Region
    consumer: Region
    content: int
    first: Ints

    @staticmethod
    def of(
        units: int,
        grain: int,
        sides: tuple[PartSide, PartSide],
        first: Ints,
        boundaries: Boundaries,
    ) -> Iterator[Boxes]:
        """Yield boxes that repeat like *sides*: a key and its value side by side are one content.

        *first*: (producer address, consumer address, length) of each one's first content.
        """
        source, target, content = coalesce([first], boundaries)
        for length in np.unique(content).tolist():
            where = np.column_stack([source, target])[content == length]
            yield Boxes(units, grain, sides[0].region, sides[1].region, length, where)

    def runs(self, kind: RowKind) -> Ints:
        """Return (producer address, consumer address, length) of the first block's first runs."""
        states = kind.tokens // self.grain if self.grain else self._states
        rows = row_stride(self.producer), row_stride(self.consumer)
        length = self.content
        axes = [
            (self.units, self.producer.unit_stride, self.consumer.unit_stride),
            (states, *rows),
        ]
        axes = [axis for axis in axes if axis[0] > 1]
        while (touching := next((a for a in axes if a[1] == a[2] == length), None)) is not None:
            length *= touching[0]
            axes.remove(touching)
        begins = self.first
        if kind.skip:
            begins = begins + kind.skip // self.grain * np.array(rows)
        for count, *strides in axes:
            steps = np.arange(count, dtype=np.int64)[:, None] * np.array(strides)
            begins = (begins[:, None, :] + steps).reshape(-1, 2)
        runs = np.empty((len(begins), 3), np.int64)
        runs[:, :2], runs[:, 2] = begins, length
        return runs

    @property
    def _states(self) -> int:
        """The rows of a state that both sides have."""
        return min(self.producer.states, self.consumer.states)


def block_layout_of(
    region: Region, kind: RowKind, grain: int, *, contiguous_across_blocks: bool
) -> BlockLayout:
    """Return how rows of a kind repeat: each period, as long as they end inside the block.

    Where rows flow from block to block, several tiles may end in a later block.
    """
    tiles, span = 1, 1
    if grain and contiguous_across_blocks and kind.tokens > kind.period and not kind.skip:
        tiles, span = region.states * grain // kind.period, kind.tokens // kind.period
    elif grain:
        tiles = (region.states * grain - kind.skip - kind.tokens) // kind.period + 1
    return BlockLayout(
        num_blocks=region.num_blocks,
        block_stride=region.block_stride,
        tiles=tiles,
        tile_stride=kind.period // grain * row_stride(region) if tiles > 1 or span > 1 else 0,
        memory_type=region.memory_type,
        device=region.device,
        span=span,
    )


def coalesce(runs: Sequence[Ints], boundaries: Boundaries) -> Ints:
    """Join runs (producer address, consumer address, length) that touch on both sides.

    Takes arrays of shape (n, 3); returns one of (3, m), ascending in the producer's address. None
    is joined over a boundary of either side: see `RankCache.boundaries`.
    """
    columns = runs[0].T if len(runs) == 1 else np.concatenate([run.T for run in runs], axis=1)
    source = columns[0]
    if np.count_nonzero(source[:-1] > source[1:]):
        columns = columns.take(source.argsort(kind="stable"), axis=1)
    source, target, length = columns
    touches = source[:-1] + length[:-1] == source[1:]
    if np.count_nonzero(touches):
        touches &= target[:-1] + length[:-1] == target[1:]
    if not np.count_nonzero(touches):
        return np.asarray(columns)
    for begins, boundary in zip((source[1:], target[1:]), boundaries, strict=True):
        if boundary:
            touches &= ~np.isin(begins, boundary)
    starts = np.concatenate([[0], np.flatnonzero(~touches) + 1])
    joined = columns.take(starts, axis=1)
    joined[2] = np.add.reduceat(length, starts)
    return np.asarray(joined)


# Bytes that take as long as one more descriptor. NIXL over shared memory needs 2.4 us for a
# descriptor and moves 9 GB/s: 21,600 bytes. The host's own work for a descriptor adds half of that.


@attrs.frozen(eq=False)
class RowSet:
    """Rows of one *kind* that repeat alike on both sides."""

    token_split: TokenSplit
    kind: RowKind
    producer: BlockLayout
    consumer: BlockLayout
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
    def id_key(self) -> tuple[object, ...]:
        """What the ids of its tiles depend on, beside the request and how it is cut."""
        return tuple(
            (layout.num_blocks, layout.tiles, layout.coalesced, layout.span)
            for layout in (self.producer, self.consumer)
        )

    @cached_property
    def size(self) -> int | None:
        """Bytes of one tile of each run; None where they differ."""
        size = int(self.length[0])
        return size if (self.length == size).all() else None

    def offsets(self, tiles: Tiles) -> Ints:
        """Return the bytes from a run's address to each of *tiles*: shape (2, n), as theirs."""
        offsets: Ints = tiles.block * self._strides[0] + tiles.tile * self._strides[1]
        return offsets

    @cached_property
    def _strides(self) -> Ints:
        layouts = self.producer, self.consumer
        strides = [
            [layout.block_stride for layout in layouts],
            [layout.tile_stride for layout in layouts],
        ]
        return np.array(strides)[:, :, None]

    def next_ids(self, tiles: Tiles) -> npt.NDArray[np.bool_]:
        """Whether each of *tiles* but the first has the next id of the same row, on both sides."""
        next_ = tiles.ids[:, 1:] - tiles.ids[:, :-1] == 1
        for side, layout in enumerate((self.producer, self.consumer)):
            if layout.rows_per_run > 1:
                row = layout.row(tiles.block[side], tiles.tile[side])
                next_[side] &= row[1:] == row[:-1]
        return np.asarray(next_[0] & next_[1])

    def posted(self, tiles: Tiles) -> int:
        """Return how many descriptors NIXL posts for *tiles* of all runs."""
        joined = np.count_nonzero(self.next_ids(tiles)) if self.touching else 0
        return len(self) * (len(tiles) - int(joined))

    @cached_property
    def touching(self) -> bool:
        """Whether consecutive ids of a row are consecutive bytes on both sides: NIXL joins them."""
        return all((self.length == side.stride).all() for side in (self.producer, self.consumer))

    @cached_property
    def plain(self) -> bool:
        """Whether each run is one row on either side: what touches has ids that follow each other.

        So NIXL joins all that touches on both sides, in one run of tiles of one length.
        """
        return all(
            layout.coalesced and layout.span == 1 for layout in (self.producer, self.consumer)
        )

    @property
    def dense(self) -> bool:
        """Whether so are all tiles of all blocks: NIXL joins whatever is contiguous."""
        return self.touching and self.producer.coalesced and self.consumer.coalesced


# Bytes that take as long as one more descriptor. NIXL over shared memory needs 2.4 us for a
# descriptor and moves 9 GB/s: 21,600 bytes. The host's own work for a descriptor adds half of that.

DEAR = 32_400


def row_sets(
    edge: Edge,
    groups: tuple[KVCacheGroup, KVCacheGroup],
    producer: RankCache,
    consumer: RankCache,
    layers: frozenset[str] | None = None,
    prefix_multiple: int = 1,
) -> tuple[RowSet, ...]:
    """Return the runs of one edge, all *layers* or some, between the two sides' *groups*.

    For each split group of layers and parts that are cut alike: rows for whole tiles, rows for
    several tiles in one where that makes longer runs, and rows for a part of a tile; no tile begins
    with cached tokens where *prefix_multiple* is a multiple of it.
    """
    sides = GroupSide(producer, groups[0]), GroupSide(consumer, groups[1])
    split_groups: dict[tuple[object, ...], tuple[TokenSplit, _Contents]] = {}
    for one, layer, part in _parts(edge, groups[1].spec, layers):
        source = sides[0].part(layer, part.name, one.remote_range.start)
        target = sides[1].part(layer, part.name, one.local_range.start)
        tile = tile_tokens(layer, part, source.paging, target.paging) if part.per_token else 0
        sizes = source.paging.memory_block_size, target.paging.memory_block_size
        split_group = (one.stripe.first, one.stripe.step, tile, part.tokens_per_state, sizes)
        if split_group not in split_groups:
            cut = one.stripe, tile, part.tokens_per_state, source.paging, target.paging
            split_groups[split_group] = TokenSplit(*cut, prefix_multiple=prefix_multiple), {}
        _, contents = split_groups[split_group]
        same_key = len(one.global_range), source.repeats, target.repeats
        _, first = contents.setdefault(same_key, ((source, target), []))
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
    boundaries = producer.boundaries, consumer.boundaries
    return tuple(
        rows
        for token_split, contents in split_groups.values()
        for rows in _split_group_rows(
            token_split, tuple(_boxes(token_split.grain, contents, boundaries)), boundaries
        )
    )


_Contents = dict[
    tuple[int, object, object], tuple[tuple[PartSide, PartSide], list[tuple[int, int, int]]]
]
"""By units and by how both sides repeat: the sides, and addresses and length of first contents."""


def _boxes(grain: int, contents: _Contents, boundaries: Boundaries) -> Iterator[Boxes]:
    for (units, *_), (sides, first) in contents.items():
        yield from Boxes.of(units, grain, sides, np.array(first, np.int64), boundaries)


def _parts(
    edge: Edge, spec: LayerSpec, layers: frozenset[str] | None
) -> Iterator[tuple[TPTransferSlice, str, Part]]:
    for one in edge.slices:
        for layer in one.layers if layers is None else filter(layers.__contains__, one.layers):
            for part in spec.of_layer(layer).parts:
                if part.name in one.parts:
                    yield one, layer, part


def _split_group_rows(
    token_split: TokenSplit, boxes: tuple[Boxes, ...], boundaries: Boundaries
) -> list[RowSet]:
    """Return every set of rows that a split group needs.

    And none that would not make runs longer.
    """
    if token_split.tile:
        token_split = _with_contiguity(token_split, boxes)
        rows = partial(_rows, token_split, boxes, boundaries)
        partial_sizes = _partial_sizes(token_split, rows)
        token_split = attrs.evolve(
            token_split,
            spans=_spans(token_split, rows),
            partial_sizes=partial_sizes,
            trim_from=_trim_from(
                attrs.evolve(token_split, partial_sizes=partial_sizes), boxes, rows
            ),
        )
    return [
        rows
        for kind in token_split.row_kinds()
        for rows in _rows(token_split, boxes, boundaries, kind)
    ]


def _with_contiguity(token_split: TokenSplit, boxes: tuple[Boxes, ...]) -> TokenSplit:
    """Return *token_split* with what is known of memory: whose rows run on from block to block."""
    sides = {}
    for name in ("producer", "consumer"):
        regions: list[Region] = [getattr(box, name) for box in boxes]
        contiguous_across_blocks = all(
            row_stride(each) * each.states == each.block_stride for each in regions
        )
        sides[name] = attrs.evolve(
            getattr(token_split, name), contiguous_across_blocks=contiguous_across_blocks
        )
    return attrs.evolve(token_split, **sides)


def _spans(token_split: TokenSplit, rows: Callable[[RowKind], list[RowSet]]) -> int:
    """Return up to how many tiles one row takes.

    Several, if rows of two tiles are fewer than two rows of one each.
    A block of 8 tokens, tiles of 4 tokens, two heads (a, b) of which one moves:

        heads outermost     a0 a1 a2 a3 | a4 a5 a6 a7   b0 b1 ...   yes: both tiles are one run
        tokens outermost    a0 b0 a1 b1 a2 b2 a3 b3 | a4 b4 ...     no: not even two tokens are

    As many as a block has, on a side whose rows do not flow on from block to block. Where both
    sides' do, NIXL joins tiles that touch.
    """
    tile, sides = token_split.tile, (token_split.producer, token_split.consumer)
    spans = min(
        (side.memory_block_size // tile for side in sides if not side.contiguous_across_blocks),
        default=1,
    )
    one, two = (RowKind(period=tile, skip=0, tokens=tiles * tile) for tiles in (1, 2))
    return spans if spans > 1 and _longer(rows, one, two) else 1


def _partial_sizes(
    token_split: TokenSplit, rows: Callable[[RowKind], list[RowSet]]
) -> tuple[int, ...]:
    """Return the sizes of rows of a part of a tile; none where rows of one token each do.

    There are some, if rows of two tokens are fewer than two rows of one each.
    A block of 8 tokens, one tile, of which the last three move (two heads, one of them moves):

        heads outermost     . . . . . a5 a6 a7   b0 b1 ...          yes: one row of three tokens
        tokens outermost    . . . . . . . . . . a5 b5 a6 b6 a7 b7   no: three rows of one token
    """
    tile, grain = token_split.tile, token_split.grain
    one = RowKind(period=grain, skip=0, tokens=grain)
    two = RowKind(period=tile, skip=tile - 2 * grain, tokens=2 * grain)
    return partial_sizes_of(grain, tile) if tile > 2 * grain and _longer(rows, one, two) else ()


def _longer(rows: Callable[[RowKind], list[RowSet]], one: RowKind, two: RowKind) -> bool:
    """Return whether rows of *two* are longer than of *one*, and NIXL would not join those."""
    single = rows(one)
    if all(each.dense for each in single):
        return False
    return sum(map(len, rows(two))) < 2 * sum(map(len, single))


def _trim_from(
    token_split: TokenSplit, boxes: tuple[Boxes, ...], rows: Callable[[RowKind], list[RowSet]]
) -> int:
    """Return of how many dead tokens on the last tile leaves them out; 0 where it never does.

    Of one on, where no more rows do the rest. A block of 8 tokens, one tile, of which three live:

        one head moves      a0 a1 a2 . . . . .   b0 b1 ...              yes: one row, as all 8 are
        two heads move      a0 a1 a2 . . . . .   b0 b1 b2 . . . . .     no: two rows; all 8 are one

    Where NIXL joins whole tiles, a part of one is apart: there of as many as take longer than that.
    """
    tile, grain = token_split.tile, token_split.grain
    if tile == grain:
        return 0
    kinds = [RowKind(period=size, skip=0, tokens=size) for size in (tile, grain)]
    whole, part = map(rows, kinds)
    if any(each.touching for each in whole):
        nbytes = sum(int(each.length.sum()) for each in part)
        dead = grain * -(-DEAR * sum(map(len, part)) // nbytes)
        return dead if dead < tile and all(each.touching for each in part) else 0
    times = 1 if token_split.partial_sizes else tile // grain
    counts = [[len(box.runs(kind)) for kind in kinds] for box in boxes]
    counts.append([sum(map(len, each)) for each in (whole, part)])
    return int(all(of_whole == times * of_part for of_whole, of_part in counts))


def _rows(
    token_split: TokenSplit, boxes: tuple[Boxes, ...], boundaries: Boundaries, kind: RowKind
) -> list[RowSet]:
    """Return the rows of one kind, those of boxes whose blocks repeat alike joined."""
    same_key: dict[tuple[BlockLayout, BlockLayout], list[Ints]] = {}
    for box in boxes:
        layouts = (
            block_layout_of(
                box.producer,
                kind,
                box.grain,
                contiguous_across_blocks=token_split.producer.contiguous_across_blocks,
            ),
            block_layout_of(
                box.consumer,
                kind,
                box.grain,
                contiguous_across_blocks=token_split.consumer.contiguous_across_blocks,
            ),
        )
        same_key.setdefault(layouts, []).append(box.runs(kind))
    return [
        RowSet(token_split, kind, *layouts, *coalesce(runs, boundaries))
        for layouts, runs in same_key.items()
    ]
