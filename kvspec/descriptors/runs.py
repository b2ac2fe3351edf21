"""Row sets: the longest contiguous runs of bytes that one edge moves, as repeating rows.

Invariant: a run follows from the strides of both memories. It depends on no block number and on no
request.

How it works:
    A *run* is a range of bytes in one block that is contiguous on both sides. `row_sets` makes the
    runs of one edge in four steps:

    1. It pairs the parts of all layers that move (`_PartPair`) and groups them. All parts of a
       group are cut alike by every request (`split_key`), so that they share one `TokenSplit`.
    2. It divides each group into boxes: parts with equal strides on both sides (`Boxes`). A box
       has three axes: units, states and content. A *content* is the bytes of one unit in one state.
    3. It decides which kinds of rows the group needs (`_tile_counts`, `_partial_sizes`,
       `_trim_from`).
    4. For each kind, a box becomes runs. An axis whose stride equals the length of the content
       becomes part of the content. Then runs that touch on both sides are joined (`coalesce`).

    For example, a tile has 4 tokens, and one head (a) of the producer's two heads (a, b) moves. The
    content of one head and one token has 8 bytes:

        tokens outermost    producer    a0 b0 a1 b1 a2 b2 a3 b3     four runs of 8 bytes
                            consumer    a0 a1 a2 a3

        heads outermost     producer    a0 a1 a2 a3 b0 b1 b2 b3     one run of 32 bytes
                            consumer    a0 a1 a2 a3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.paging import (
    BlockLayout,
    Paging,
    RowKind,
    TokenSplit,
    partial_sizes_of,
    tile_counts_of,
    tile_tokens,
)
from kvspec.descriptors.request import MAX_TOKENS
from kvspec.descriptors.tiles import Tiles
from kvspec.engines.group import KVCacheGroup
from kvspec.memory.rank_cache import RankCache
from kvspec.memory.region import Region, common_pieces
from kvspec.ownership.part import Part
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.stripes import Stripe
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.specs import LayerSpec

# Addresses of the producer and of the consumer over which no run may lie: one memory ends and
# another begins there, and NIXL registers them separately. See `RankCache.boundaries`.
Boundaries = tuple[tuple[int, ...], tuple[int, ...]]

# The number of bytes that move in the time of one more descriptor. NIXL over shared memory needs
# 2.4 us for a descriptor and moves 9 GB/s: 21,600 bytes. The host's own work adds half of that.
DESCRIPTOR_BYTES = 32_400

# Rows of several tiles are worth their place in the table if a row of two tiles has at most this
# share of the runs of two rows of one tile. The share is 0.5 if all runs become longer, and about 1
# if few do. In between, half of the runs become longer at 0.75.
MOST_RUNS_LEFT = 0.75


@attrs.frozen(eq=False)
class PartSide:
    """One part of one layer on one side: its memory, its paging and its first address."""

    region: Region
    paging: Paging
    first: int

    @property
    def repeats(self) -> tuple[object, ...]:
        """All that decides where contents lie, except the first address and their length."""
        strides = self.region.block_stride, self.region.unit_stride, self.region.state_stride
        counts = self.region.num_blocks, self.region.states
        return (*strides, *counts, self.region.memory_type, self.region.device)


@attrs.frozen(eq=False, slots=False)
class GroupSide:
    """One group of one rank. All its parts share the same `Paging` objects."""

    cache: RankCache
    group: KVCacheGroup

    @cached_property
    def paging(self) -> Paging:
        """Paging in the blocks of the attention kernel."""
        engine, group = self.cache.engine, self.group
        context, null = engine.context(group, self.cache.rank), engine.null_block
        return Paging(group.spec.block_size, group.memory_block_size, context, null_block=null)

    @cached_property
    def _whole(self) -> Paging:
        """Paging in blocks of the table: kernel blocks are joined."""
        return attrs.evolve(self.paging, memory_block_size=self.group.spec.block_size)

    def part(self, layer: str, part: str, unit: int) -> PartSide:
        """Return a part of a layer from the rank's own unit number *unit*."""
        region, paging = self.cache.region(layer, part), self.paging
        first = region.base + unit * region.unit_stride
        kernel_blocks = self.group.kernel_blocks_per_block
        if kernel_blocks > 1 and region.block_stride == region.states * row_stride(region):
            # The states of the kernel blocks of one block are equally far apart, as in one block.
            # Larger blocks have larger tiles, so that fewer and longer rows are needed.
            paging = self._whole
            region = attrs.evolve(
                region,
                num_blocks=region.num_blocks // kernel_blocks,
                block_stride=region.block_stride * kernel_blocks,
                state_stride=row_stride(region),
                states=region.states * kernel_blocks,
            )
        return PartSide(region, paging, first)


def row_stride(region: Region) -> int:
    """Return the bytes from one state of *region* to the next, which may be in the next block."""
    return region.state_stride if region.states > 1 else region.block_stride


@attrs.frozen(eq=False)
class Boxes:
    """Boxes (units x states x content) that differ only in their first addresses.

    Attributes:
        units: Units of one box.
        grain: Tokens of one state, or 0 for recurrent states.
        producer: A region with the strides of all boxes on the producer.
        consumer: A region with the strides of all boxes on the consumer.
        content: Bytes of one content.
        first: First addresses on the producer and on the consumer, shape (boxes, 2).
    """

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
        """Yield boxes that repeat like *sides*, one `Boxes` for each length of content.

        Contents of two parts, such as `k` and `v`, become one if they are adjacent on both sides.

        Args:
            units: Units of one box.
            grain: Tokens of one state, or 0.
            sides: The producer's and the consumer's side of any of the parts.
            first: Producer address, consumer address and length of the first content of each
                part, shape (parts, 3).
            boundaries: Addresses over which contents are not joined.
        """
        source, target, content = coalesce([first], boundaries)
        for length in np.unique(content).tolist():
            addresses = np.column_stack([source, target])[content == length]
            yield Boxes(units, grain, sides[0].region, sides[1].region, length, addresses)

    def runs(self, kind: RowKind) -> Ints:
        """Return the runs of the first row of *kind* in the first block.

        Returns:
            Producer address, consumer address and length, shape (runs, 3).
        """
        states = kind.tokens // self.grain if self.grain else self._states
        state_strides = row_stride(self.producer), row_stride(self.consumer)
        unit_strides = self.producer.unit_stride, self.consumer.unit_stride
        axes = [(self.units, *unit_strides), (states, *state_strides)]
        axes = [axis for axis in axes if axis[0] > 1]
        length = self.content
        # An axis whose stride is the length of a run on both sides only makes the run longer.
        while (touching := next((a for a in axes if a[1] == a[2] == length), None)) is not None:
            length *= touching[0]
            axes.remove(touching)
        starts = self.first
        if kind.skip:
            starts = starts + kind.skip // self.grain * np.array(state_strides)
        # Each axis that is left repeats all runs.
        for count, *strides in axes:
            steps = np.arange(count, dtype=np.int64)[:, None] * np.array(strides)
            starts = (starts[:, None, :] + steps).reshape(-1, 2)
        runs = np.empty((len(starts), 3), np.int64)
        runs[:, :2], runs[:, 2] = starts, length
        return runs

    @property
    def _states(self) -> int:
        """Number of rows of a recurrent state that both sides have."""
        return min(self.producer.states, self.consumer.states)


def block_layout_of(
    region: Region, kind: RowKind, grain: int, *, contiguous_across_blocks: bool
) -> BlockLayout:
    """Return how rows of *kind* repeat in *region*.

    A row begins in each period of a block if it ends in the same block. If the memory continues
    across blocks, a row of several tiles may end in a later block.
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
    """Join runs that touch on both sides.

    Args:
        runs: Arrays of producer address, consumer address and length, each of shape (n, 3).
        boundaries: Addresses of each side over which no run may lie.

    Returns:
        The joined runs, ascending by producer address, shape (3, m).

    >>> runs = np.array([[8, 108, 8], [0, 100, 8], [16, 200, 8]])
    >>> coalesce([runs], ((), ())).T.tolist()
    [[0, 100, 16], [16, 200, 8]]
    >>> coalesce([runs], ((8,), ())).T.tolist()
    [[0, 100, 8], [8, 108, 8], [16, 200, 8]]
    """
    columns = runs[0].T if len(runs) == 1 else np.concatenate([run.T for run in runs], axis=1)
    source = columns[0]
    # Runs are often in order already. Testing that is faster than sorting.
    if np.count_nonzero(source[:-1] > source[1:]):
        columns = columns.take(source.argsort(kind="stable"), axis=1)
    source, target, length = columns
    touches = source[:-1] + length[:-1] == source[1:]
    if np.count_nonzero(touches):
        touches &= target[:-1] + length[:-1] == target[1:]
    if not np.count_nonzero(touches):
        return np.asarray(columns)
    for starts, boundary in zip((source[1:], target[1:]), boundaries, strict=True):
        if boundary:
            touches &= ~np.isin(starts, boundary)
    first = np.concatenate([[0], np.flatnonzero(~touches) + 1])
    joined = columns.take(first, axis=1)
    joined[2] = np.add.reduceat(length, first)
    return np.asarray(joined)


@attrs.frozen(eq=False)
class RowSet:
    """Runs of one row kind that repeat alike: all of them have the same places on each side.

    Attributes:
        token_split: How requests cut the tokens of these rows.
        kind: The tokens that each row moves.
        producer: How the runs repeat on the producer.
        consumer: How the runs repeat on the consumer.
        producer_address: First address of each run on the producer, shape (runs,).
        consumer_address: First address of each run on the consumer, shape (runs,).
        length: Bytes of each run, shape (runs,).
    """

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
        """The number of ids of all runs on the producer and on the consumer."""
        return len(self) * self.producer.ids_per_run, len(self) * self.consumer.ids_per_run

    @cached_property
    def id_key(self) -> tuple[object, ...]:
        """A key: sets with equal keys have equal ids for the same tiles of a request."""
        return tuple(
            (layout.num_blocks, layout.tiles, layout.coalesced, layout.span)
            for layout in (self.producer, self.consumer)
        )

    @cached_property
    def size(self) -> int | None:
        """Bytes of each run, or None if they differ."""
        size = int(self.length[0])
        return size if (self.length == size).all() else None

    def offsets(self, tiles: Tiles) -> Ints:
        """Return the bytes from a run's first address to each of *tiles*, shape (2, tiles)."""
        offsets: Ints = tiles.block * self._strides[0] + tiles.tile * self._strides[1]
        return offsets

    @cached_property
    def _strides(self) -> Ints:
        """Block strides and tile strides of both sides, shape (2, 2, 1)."""
        layouts = self.producer, self.consumer
        strides = [
            [layout.block_stride for layout in layouts],
            [layout.tile_stride for layout in layouts],
        ]
        return np.array(strides)[:, :, None]

    def next_ids(self, tiles: Tiles) -> npt.NDArray[np.bool_]:
        """Return whether each tile follows the tile before it, shape (tiles - 1,).

        A tile follows if its id is the next id of the same strided row on both sides.
        """
        follows = tiles.ids[:, 1:] - tiles.ids[:, :-1] == 1
        for side, layout in enumerate((self.producer, self.consumer)):
            if layout.rows_per_run > 1:
                row = layout.row(tiles.block[side], tiles.tile[side])
                follows[side] &= row[1:] == row[:-1]
        return np.asarray(follows[0] & follows[1])

    def posted(self, tiles: Tiles) -> int:
        """Return the number of descriptors that NIXL posts for *tiles* of all runs."""
        joined = int(np.count_nonzero(self.joins(tiles, touches=True)))
        return len(self) * len(tiles) - int(np.count_nonzero(self.touches)) * joined

    def joins(self, tiles: Tiles, *, touches: bool) -> npt.NDArray[np.bool_]:
        """Return whether NIXL joins each tile with the tile before it, shape (tiles - 1,).

        *touches* is that of the run, in `touches`.
        """
        if not touches or not self.touches.any():
            return np.zeros(max(0, len(tiles) - 1), bool)
        return self.next_ids(tiles)

    @cached_property
    def touches(self) -> npt.NDArray[np.bool_]:
        """For each run, whether consecutive ids of a row are adjacent bytes on both sides."""
        equal = (self.length == self.producer.stride) & (self.length == self.consumer.stride)
        return np.broadcast_to(equal, len(self))

    @property
    def touching(self) -> bool:
        """Whether consecutive ids are adjacent bytes in all runs, so that NIXL joins them."""
        return bool(self.touches.all())

    @cached_property
    def plain(self) -> bool:
        """Whether each run is one strided row on both sides: coalesced and not spanning.

        Then adjacent tiles have consecutive ids, so that NIXL joins all tiles of equal length that
        touch on both sides.
        """
        return all(
            layout.coalesced and layout.span == 1 for layout in (self.producer, self.consumer)
        )

    @property
    def dense(self) -> bool:
        """Whether NIXL joins all tiles that follow each other, also those of two blocks."""
        return self.touching and self.producer.coalesced and self.consumer.coalesced


class _PartPair(NamedTuple):
    """One part of one layer on both sides, and the units that one slice moves."""

    part: Part
    stripe: Stripe
    units: int
    producer: PartSide
    consumer: PartSide

    @property
    def split_key(self) -> tuple[int, ...]:
        """A key: every request cuts all parts with equal keys in the same way."""
        # The members are plain numbers, because hashing an attrs object for each part is slow.
        blocks = self.producer.paging.memory_block_size, self.consumer.paging.memory_block_size
        grain = self.part.tokens_per_state
        return self.stripe.first, self.stripe.step, grain, self.opaque, *blocks

    @property
    def opaque(self) -> bool:
        """Whether the part is an opaque page. `AttentionSpec` gives its part this name."""
        return self.part.name == "page"

    @property
    def repeats(self) -> tuple[object, ...]:
        """A key: parts with equal keys differ only in first address and content."""
        return self.units, self.producer.repeats, self.consumer.repeats

    def contents(self) -> list[tuple[int, int, int]]:
        """Return producer address, consumer address and length of the first unit and state.

        If the sides order the bytes of a content differently, each piece is a content of its own.
        """
        source, target = self.producer, self.consumer
        return [
            (source.first + offsets[0], target.first + offsets[1], size)
            for _, size, offsets in common_pieces(source.region, target.region)
        ]


def row_sets(
    edge: Edge,
    groups: tuple[KVCacheGroup, KVCacheGroup],
    producer: RankCache,
    consumer: RankCache,
    layers: frozenset[str] | None = None,
    prefix_multiple: int = 1,
    *,
    dead_tokens: bool = False,
) -> tuple[RowSet, ...]:
    """Return all row sets of one edge.

    Args:
        edge: The edge.
        groups: The group of the producer and the group of the consumer.
        producer: Memory of the producer rank.
        consumer: Memory of the consumer rank.
        layers: Names of the layers to include. All by default.
        prefix_multiple: Cached prefixes are multiples of this many tokens. No tile begins with
            cached tokens if this is a multiple of the tile.
        dead_tokens: Whether dead tokens may move if that needs fewer descriptors.

    Returns:
        For each split of the tokens: rows of one tile, rows of several tiles if those make longer
        runs, and rows of a part of a tile.

    Raises:
        MismatchError: If blocks cut a state that stands for several tokens.
    """
    sides = GroupSide(producer, groups[0]), GroupSide(consumer, groups[1])
    boundaries = producer.boundaries, consumer.boundaries
    cut_alike: dict[tuple[int, ...], list[_PartPair]] = {}
    for tp_slice, layer, part in _parts(edge, groups[1].spec, layers):
        source = sides[0].part(layer, part.name, tp_slice.remote_range.start)
        target = sides[1].part(layer, part.name, tp_slice.local_range.start)
        pair = _PartPair(part, tp_slice.stripe, len(tp_slice.global_range), source, target)
        cut_alike.setdefault(pair.split_key, []).append(pair)
    sets: list[RowSet] = []
    for pairs in cut_alike.values():
        token_split = attrs.evolve(
            _token_split(pairs[0], prefix_multiple),
            # All layers of an edge have the same live tokens.
            windowed=_windowed(groups[1].spec.of_layer(edge.layers[0])),
            dead_tokens=dead_tokens,
        )
        boxes = tuple(_boxes(token_split.grain, pairs, boundaries))
        sets += _split_group_rows(token_split, boxes, boundaries)
    return tuple(sets)


def _parts(
    edge: Edge, spec: LayerSpec, layers: frozenset[str] | None
) -> Iterator[tuple[TPTransferSlice, str, Part]]:
    for tp_slice in edge.slices:
        names = tp_slice.layers
        for layer in names if layers is None else filter(layers.__contains__, names):
            for part in spec.of_layer(layer).parts:
                if part.name in tp_slice.parts:
                    yield tp_slice, layer, part


def _token_split(pair: _PartPair, prefix_multiple: int) -> TokenSplit:
    """Return how requests cut *pair*, before it is known which kinds of rows are useful."""
    part, region = pair.part, pair.producer.region
    paging = pair.producer.paging, pair.consumer.paging
    tile = tile_tokens(region.layer, part, *paging) if part.per_token else 0
    grain = part.tokens_per_state
    return TokenSplit(
        pair.stripe, tile, grain, *paging, prefix_multiple=prefix_multiple, opaque=pair.opaque
    )


def _windowed(spec: LayerSpec) -> bool:
    """Return whether the first live token of a long request is not its first token."""
    return spec.live_tokens(MAX_TOKENS).start > 0


def _boxes(grain: int, pairs: list[_PartPair], boundaries: Boundaries) -> Iterator[Boxes]:
    """Yield the boxes of parts that are cut alike."""
    equal_strides: dict[tuple[object, ...], list[_PartPair]] = {}
    for pair in pairs:
        equal_strides.setdefault(pair.repeats, []).append(pair)
    for same in equal_strides.values():
        sides = same[0].producer, same[0].consumer
        first = np.array([content for pair in same for content in pair.contents()], np.int64)
        yield from Boxes.of(same[0].units, grain, sides, first, boundaries)


def _split_group_rows(
    token_split: TokenSplit, boxes: tuple[Boxes, ...], boundaries: Boundaries
) -> list[RowSet]:
    """Return all row sets of parts that are cut alike.

    A kind of row that would not make runs longer is left out.
    """
    if token_split.tile:
        token_split = _with_contiguity(token_split, boxes)
        rows = partial(_rows, token_split, boxes, boundaries)
        counts, sizes = _tile_counts(token_split, rows), _partial_sizes(token_split, rows)
        token_split = attrs.evolve(token_split, tile_counts=counts, partial_sizes=sizes)
        trim_from = _trim_from(token_split, boxes, rows, DESCRIPTOR_BYTES)
        token_split = attrs.evolve(token_split, trim_from=trim_from)
    return [
        row_set
        for kind in token_split.row_kinds()
        for row_set in _rows(token_split, boxes, boundaries, kind)
    ]


def _with_contiguity(token_split: TokenSplit, boxes: tuple[Boxes, ...]) -> TokenSplit:
    """Return *token_split* with `contiguous_across_blocks` of each side."""
    sides = {}
    for name in ("producer", "consumer"):
        regions: list[Region] = [getattr(box, name) for box in boxes]
        contiguous_across_blocks = all(
            row_stride(region) * region.states == region.block_stride for region in regions
        )
        sides[name] = attrs.evolve(
            getattr(token_split, name), contiguous_across_blocks=contiguous_across_blocks
        )
    return attrs.evolve(token_split, **sides)


def _tile_counts(
    token_split: TokenSplit, rows: Callable[[RowKind], list[RowSet]]
) -> tuple[int, ...]:
    """Return the numbers of tiles that one row may move, from the largest to 1.

    Rows of several tiles are useful if a row of two tiles needs fewer runs than two rows of one
    tile. A block has 8 tokens, a tile has 4, and one head (a) of two heads (a, b) moves:

        heads outermost     a0 a1 a2 a3 | a4 a5 a6 a7   b0 b1 ...   yes: both tiles are one run
        tokens outermost    a0 b0 a1 b1 a2 b2 a3 b3 | a4 b4 ...     no: each token is a run

    The number is limited by the blocks of a side whose rows do not continue across blocks. If the
    rows of both sides do, NIXL joins tiles that touch, and rows of one tile are enough.
    """
    tile, sides = token_split.tile, (token_split.producer, token_split.consumer)
    most = min(
        (side.memory_block_size // tile for side in sides if not side.contiguous_across_blocks),
        default=1,
    )
    one_tile, two_tiles = (RowKind(period=tile, skip=0, tokens=tiles * tile) for tiles in (1, 2))
    return tile_counts_of(most if most > 1 and _makes_longer(rows, one_tile, two_tiles) else 1)


def _partial_sizes(
    token_split: TokenSplit, rows: Callable[[RowKind], list[RowSet]]
) -> tuple[int, ...]:
    """Return the sizes of rows of a part of a tile. Empty if a row for each state is as good.

    Sizes are useful if a row of two states needs fewer runs than two rows of one state. A block has
    8 tokens and is one tile. Its last three tokens move, of one head (a) of two heads (a, b):

        heads outermost     . . . . . a5 a6 a7   b0 b1 ...          yes: one run of three tokens
        tokens outermost    . . . . . . . . . . a5 b5 a6 b6 a7 b7   no: three runs of one token
    """
    tile, grain = token_split.tile, token_split.grain
    one_state = RowKind(period=grain, skip=0, tokens=grain)
    two_states = RowKind(period=tile, skip=tile - 2 * grain, tokens=2 * grain)
    useful = tile > 2 * grain and _makes_longer(rows, one_state, two_states)
    return partial_sizes_of(grain, tile) if useful else ()


def _makes_longer(
    rows: Callable[[RowKind], list[RowSet]], single: RowKind, double: RowKind
) -> bool:
    """Return whether a row of *double* needs much fewer descriptors than two rows of *single*.

    Rows of all lengths make the table many times larger. That is worth nothing if only a few runs
    become longer. If one side has transposed keys of 32 elements, each element is a run, and only
    the values of adjacent tokens can become one run: 65 instead of 66.
    """
    single_rows = rows(single)
    # NIXL joins dense rows by itself, so longer rows would only make the table larger.
    if all(row_set.dense for row_set in single_rows):
        return False
    return _run_count(rows(double)) <= 2 * MOST_RUNS_LEFT * _run_count(single_rows)


def _run_count(sets: list[RowSet]) -> int:
    return sum(map(len, sets))


def _trim_from(
    token_split: TokenSplit,
    boxes: tuple[Boxes, ...],
    rows: Callable[[RowKind], list[RowSet]],
    descriptor_bytes: int,
) -> int:
    """Return the number of dead tokens from which the last tile is shortened.

    It is 1 unless dead tokens may move. If they may, it is the number that makes a shortened tile
    at least as fast as a whole tile, or 0 if it never is.

    If a shortened tile needs no more descriptors than a whole tile, one dead token is enough. A
    block has 8 tokens and is one tile, of which three tokens are live. The right column has the
    result and the descriptors:

        one head moves      a0 a1 a2 . . . . .   b0 b1 ...              1: one, as if whole
        two heads move      a0 a1 a2 . . . . .   b0 b1 b2 . . . . .     0: two, one if whole

    If NIXL joins whole tiles, a shortened tile costs one more descriptor for each run. Then the
    dead bytes must take longer than those descriptors, at *descriptor_bytes* each.
    """
    tile, grain = token_split.tile, token_split.grain
    if tile == grain:
        return 0  # A tile of one state has no part.
    if not token_split.dead_tokens:
        return 1
    whole, state = (RowKind(period=size, skip=0, tokens=size) for size in (tile, grain))
    whole_rows, state_rows = rows(whole), rows(state)
    if any(row_set.touching for row_set in whole_rows):
        return _dead_tokens_worth(state_rows, tile, grain, descriptor_bytes)
    # With sizes, a shortened tile is one row. Without sizes, it has a row for each of its states.
    factor = 1 if token_split.partial_sizes else tile // grain
    counts = [(len(box.runs(whole)), len(box.runs(state))) for box in boxes]
    # The total may differ from the sum: runs of several boxes are joined where they touch.
    counts.append((_run_count(whole_rows), _run_count(state_rows)))
    return int(all(of_whole == factor * of_state for of_whole, of_state in counts))


def _dead_tokens_worth(
    state_rows: list[RowSet], tile: int, grain: int, descriptor_bytes: int
) -> int:
    """Return how many dead tokens take as long as one more descriptor for each run.

    Returns 0 if a tile has fewer tokens, or if NIXL would not join the states that are left.
    """
    if not all(row_set.touching for row_set in state_rows):
        return 0
    state_bytes = sum(int(row_set.length.sum()) for row_set in state_rows)
    states = -(-descriptor_bytes * _run_count(state_rows) // state_bytes)
    return states * grain if states * grain < tile else 0


def _rows(
    token_split: TokenSplit, boxes: tuple[Boxes, ...], boundaries: Boundaries, kind: RowKind
) -> list[RowSet]:
    """Return the row sets of one kind: the runs of all boxes that repeat alike are joined."""
    repeat_alike: dict[tuple[BlockLayout, BlockLayout], list[Ints]] = {}
    for box in boxes:
        source, target = (
            block_layout_of(
                region,
                kind,
                box.grain,
                contiguous_across_blocks=paging.contiguous_across_blocks,
            )
            for region, paging in (
                (box.producer, token_split.producer),
                (box.consumer, token_split.consumer),
            )
        )
        repeat_alike.setdefault((source, target), []).append(box.runs(kind))
    return [
        RowSet(token_split, kind, *layouts, *coalesce(runs, boundaries))
        for layouts, runs in repeat_alike.items()
    ]
