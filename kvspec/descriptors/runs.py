"""Row sets: the longest contiguous runs of bytes that one edge moves, as repeating rows.

Invariant: a run follows from the strides of both memories. It depends on no block number and on no
request.

How it works:
    A *run* is a range of bytes in one block that is contiguous on both sides. `split_rows_of` makes
    the rows of one edge in three steps:

    1. It pairs the parts of all layers that move (`_PartPair`) and groups them. All parts of a
       group are cut alike by every request (`split_key`), so that they share one `TokenSplit`.
    2. It divides each group by strides, which are equal on both sides (`RepeatedContents`). A
       *content* is the bytes of one unit in one state. It is repeated along units and states.
    3. Repeated contents become runs. An axis whose stride equals the length of the content becomes
       part of the content. Then runs that touch on both sides are joined (`coalesce`).

    A table has the rows of whole tiles only. The rows of a part of a tile, at the end of a request,
    are made for that request (`SplitRows.rows`). If all of the pool had rows for each part, the
    table could be larger than the pool: parts of transposed keys have a run for each element.

    For example, a tile has 4 tokens, and one head (a) of the producer's two heads (a, b) moves. The
    content of one head and one token has 8 bytes:

        tokens outermost    producer    a0 b0 a1 b1 a2 b2 a3 b3     four runs of 8 bytes
                            consumer    a0 a1 a2 a3

        heads outermost     producer    a0 a1 a2 a3 b0 b1 b2 b3     one run of 32 bytes
                            consumer    a0 a1 a2 a3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.paging import BlockLayout, Paging, RowKind, TokenSplit, tile_tokens
from kvspec.descriptors.tiles import Tiles
from kvspec.engines.group import KVCacheGroup
from kvspec.memory.rank_cache import RankCache
from kvspec.memory.region import Region, common_runs
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
# `kvspec/nixl/merging.py` compares all costs of a descriptor.
DESCRIPTOR_BYTES = 32_400

# The rows of so many kinds are kept for each group of parts that are cut alike. With blocks of 16,
# these are all parts of a tile that begin it or end it.
KEPT_KINDS = 32


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
        size = engine.virtual_block(group) // context.size
        ring = group.spec.is_ring
        return Paging(size, group.memory_block_size, context, null_block=null, is_ring=ring)

    @cached_property
    def _joined_paging(self) -> Paging:
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
            paging = self._joined_paging
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
class RepeatedContents:
    """Contents, repeated along units and states, that differ only in their first addresses.

    Attributes:
        units: Units of each part.
        tokens_per_state: Tokens of one state, or 0 for recurrent states.
        producer: A region with the strides on the producer.
        consumer: A region with the strides on the consumer.
        content_bytes: Bytes of one content.
        first: First addresses on the producer and on the consumer, shape (contents, 2).
    """

    units: int
    tokens_per_state: int
    producer: Region
    consumer: Region
    content_bytes: int
    first: Ints

    @staticmethod
    def of(
        units: int,
        tokens_per_state: int,
        sides: tuple[PartSide, PartSide],
        first: Ints,
        boundaries: Boundaries,
    ) -> Iterator[RepeatedContents]:
        """Yield contents that repeat like *sides*, one `RepeatedContents` for each length.

        Contents of two parts, such as `k` and `v`, become one if they are adjacent on both sides.

        Args:
            units: Units of each part.
            tokens_per_state: Tokens of one state, or 0.
            sides: The producer's and the consumer's side of any of the parts.
            first: Producer address, consumer address and length of the first content of each
                part, shape (parts, 3).
            boundaries: Addresses over which contents are not joined.
        """
        source, target, content = coalesce([first], boundaries)
        for length in np.unique(content).tolist():
            addresses = np.column_stack([source, target])[content == length]
            yield RepeatedContents(
                units, tokens_per_state, sides[0].region, sides[1].region, length, addresses
            )

    def runs(self, kind: RowKind) -> Ints:
        """Return the runs of the first row of *kind* in the first block.

        Returns:
            Producer address, consumer address and length, shape (runs, 3).
        """
        states = kind.tokens // self.tokens_per_state if self.tokens_per_state else self._states
        state_strides = row_stride(self.producer), row_stride(self.consumer)
        unit_strides = self.producer.unit_stride, self.consumer.unit_stride
        axes = [(self.units, *unit_strides), (states, *state_strides)]
        axes = [axis for axis in axes if axis[0] > 1]
        length = self.content_bytes
        # An axis whose stride is the length of a run on both sides only makes the run longer.
        while (touching := next((a for a in axes if a[1] == a[2] == length), None)) is not None:
            length *= touching[0]
            axes.remove(touching)
        starts = self.first
        if kind.skip:
            starts = starts + kind.skip // self.tokens_per_state * np.array(state_strides)
        # Each axis that is left repeats all runs.
        for count, *strides in axes:
            steps = np.arange(count, dtype=np.int64)[:, None] * np.array(strides)
            starts = (starts[:, None, :] + steps).reshape(-1, 2)
        runs = np.empty((len(starts), 3), np.int64)
        runs[:, :2], runs[:, 2] = starts, length
        return runs

    @property
    def _states(self) -> int:
        """Number of states of a recurrent block that both sides have."""
        return min(self.producer.states, self.consumer.states)


def block_layout_of(region: Region, tile: int, tokens_per_state: int) -> BlockLayout:
    """Return how tiles of *tile* tokens repeat in *region*. A recurrent state is one tile."""
    tiles = region.states * tokens_per_state // tile if tokens_per_state else 1
    return BlockLayout(
        num_blocks=region.num_blocks,
        block_stride=region.block_stride,
        tiles=tiles,
        tile_stride=tile // tokens_per_state * row_stride(region) if tiles > 1 else 0,
        memory_type=region.memory_type,
        device=region.device,
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

    Its length is the number of runs. Each row of a request needs one descriptor of each run.

    Attributes:
        kind: The tokens of a tile that each row moves.
        producer: How the runs repeat on the producer.
        consumer: How the runs repeat on the consumer.
        producer_address: First address of each run on the producer, shape (runs,).
        consumer_address: First address of each run on the consumer, shape (runs,).
        length: Bytes of each run, shape (runs,).
    """

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
            (layout.num_blocks, layout.tiles, layout.by_tile)
            for layout in (self.producer, self.consumer)
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all runs of one tile."""
        return int(self.length.sum())

    @cached_property
    def size(self) -> int | None:
        """Bytes of each run, or None if they differ."""
        size = int(self.length[0])
        return size if (self.length == size).all() else None

    @cached_property
    def interleaved_runs(self) -> int:
        """The number of runs in an interleaved set.

        The runs of a set interleave in the producer's memory. All tiles of a set lie before
        those of the next set. The number is guessed from the first gap. A wrong guess costs only
        time: any number that divides the runs is correct.
        """
        layout, starts = self.producer, self.producer_address
        reach = (layout.num_blocks - 1) * layout.block_stride + layout.tiles * layout.tile_stride
        separate = np.flatnonzero(starts[1:] - starts[:-1] >= reach)
        many = int(separate[0]) + 1 if len(separate) else len(self)
        # Sets of unequal size do not fit into one array. One set of all runs is correct, too.
        return len(self) if len(self) % many else many

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

    @cached_property
    def plain(self) -> bool:
        """Whether each run is one strided row on both sides.

        Then adjacent tiles have consecutive ids, so that NIXL joins all tiles of equal length that
        touch on both sides.
        """
        return self.producer.coalesced and self.consumer.coalesced


@attrs.frozen(eq=False, slots=False)
class SplitRows:
    """The parts of one edge that every request cuts alike, as rows.

    Attributes:
        token_split: How requests cut the tokens of the parts.
        contents: The contents of the parts.
        boundaries: Addresses over which no run may lie.
    """

    token_split: TokenSplit
    contents: tuple[RepeatedContents, ...]
    boundaries: Boundaries

    @staticmethod
    def of(pairs: list[_PartPair], boundaries: Boundaries) -> SplitRows:
        """Return the rows of *pairs*, which every request cuts alike.

        A tile is one state if a row of two states has as many runs as two rows of one state. Then
        every state moves whole. A block has 8 tokens, and one head (a) of two heads (a, b) moves:

            tokens outermost    a0 b0 a1 b1 a2 b2 a3 b3 ...     a tile is one token
            heads outermost     a0 a1 a2 a3 ...  b0 b1 ...      a tile is 8 tokens, as one run
        """
        pair, part, tokens_per_state = pairs[0], pairs[0].part, pairs[0].part.tokens_per_state
        paging = pair.producer.paging, pair.consumer.paging
        tile = tile_tokens(pair.producer.region.layer, part, *paging) if part.per_token else 0
        token_split = TokenSplit(pair.stripe, tile, tokens_per_state, *paging, opaque=pair.opaque)
        split_rows = SplitRows(
            token_split, tuple(_repeated_contents(tokens_per_state, pairs, boundaries)), boundaries
        )
        if tokens_per_state < tile:
            one, two = (split_rows.runs(RowKind(0, states * tokens_per_state)) for states in (1, 2))
            if two == 2 * one:
                return attrs.evolve(
                    split_rows, token_split=attrs.evolve(token_split, tile=tokens_per_state)
                )
        return split_rows

    def rows(self, kind: RowKind) -> tuple[RowSet, ...]:
        """Return the row sets of one kind. Those of the last kinds are kept."""
        return self._row_sets(kind)

    @cached_property
    def _row_sets(self) -> Callable[[RowKind], tuple[RowSet, ...]]:
        return lru_cache(KEPT_KINDS)(
            partial(_rows, self.token_split, self.contents, self.boundaries)
        )

    def runs(self, kind: RowKind) -> int:
        """Return the number of descriptors of one row of *kind*."""
        return sum(map(len, self.rows(kind)))

    def dead_cost_less(self, kind: RowKind) -> bool:
        """Whether a whole tile takes less time than its part *kind*, which has no dead tokens.

        The dead bytes must take less time than the descriptors that they spare. If NIXL joins whole
        tiles, it joins this one as well, so that it has no descriptor of its own.
        """
        whole = self.rows(self.token_split.whole_kind)
        spared = self.runs(kind) - sum(len(rows) for rows in whole if not rows.touches.all())
        dead_bytes = sum(rows.nbytes for rows in whole) - sum(
            rows.nbytes for rows in self.rows(kind)
        )
        return spared * DESCRIPTOR_BYTES > dead_bytes


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
        tokens_per_state = self.part.tokens_per_state
        return self.stripe.first, self.stripe.step, tokens_per_state, self.opaque, *blocks

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

        If the sides order the bytes of a content differently, each run is a content of its own.
        """
        source, target = self.producer, self.consumer
        return [
            (source.first + offsets[0], target.first + offsets[1], size)
            for _, size, offsets in common_runs(source.region, target.region)
        ]


def split_rows_of(
    edge: Edge,
    groups: tuple[KVCacheGroup, KVCacheGroup],
    producer: RankCache,
    consumer: RankCache,
    layers: frozenset[str] | None = None,
) -> list[SplitRows]:
    """Return the rows of one edge, for each way in which requests cut its parts.

    Args:
        edge: The edge.
        groups: The group of the producer and the group of the consumer.
        producer: Memory of the producer rank.
        consumer: Memory of the consumer rank.
        layers: Names of the layers to include. All by default.

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
    return [SplitRows.of(pairs, boundaries) for pairs in cut_alike.values()]


def _parts(
    edge: Edge, spec: LayerSpec, layers: frozenset[str] | None
) -> Iterator[tuple[TPTransferSlice, str, Part]]:
    for tp_slice in edge.slices:
        names = tp_slice.layers
        for layer in names if layers is None else filter(layers.__contains__, names):
            for part in spec.of_layer(layer).parts:
                if part.name in tp_slice.parts:
                    yield tp_slice, layer, part


def _repeated_contents(
    tokens_per_state: int, pairs: list[_PartPair], boundaries: Boundaries
) -> Iterator[RepeatedContents]:
    """Yield the contents of parts that are cut alike."""
    equal_strides: dict[tuple[object, ...], list[_PartPair]] = {}
    for pair in pairs:
        equal_strides.setdefault(pair.repeats, []).append(pair)
    for same in equal_strides.values():
        sides = same[0].producer, same[0].consumer
        first = np.array([content for pair in same for content in pair.contents()], np.int64)
        yield from RepeatedContents.of(same[0].units, tokens_per_state, sides, first, boundaries)


def _rows(
    token_split: TokenSplit,
    contents: tuple[RepeatedContents, ...],
    boundaries: Boundaries,
    kind: RowKind,
) -> tuple[RowSet, ...]:
    """Return the row sets of one kind: the runs of all contents that repeat alike are joined."""
    repeat_alike: dict[tuple[BlockLayout, BlockLayout], list[Ints]] = {}
    for repeated in contents:
        source, target = (
            block_layout_of(region, token_split.tile, repeated.tokens_per_state)
            for region in (repeated.producer, repeated.consumer)
        )
        repeat_alike.setdefault((source, target), []).append(repeated.runs(kind))
    return tuple(
        RowSet(kind, *layouts, *coalesce(runs, boundaries))
        for layouts, runs in repeat_alike.items()
    )
