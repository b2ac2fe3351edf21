"""Runs: the maximal ranges of a tile that are contiguous on both sides.

Law: a run never depends on a block number. Boxes of two strided regions become runs by strides
alone, and runs of several parts and layers become one wherever they touch on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import attrs
import numpy as np

from kvspec.descriptors.boxes import (
    Boundaries,
    Boxes,
    GroupSide,
    PartSide,
    block_layout_of,
    coalesce,
    row_stride,
)
from kvspec.descriptors.paging import (
    BlockLayout,
    RowKind,
    TokenSplit,
    partial_sizes_of,
    tile_tokens,
)

# Bytes that take as long as one more descriptor. NIXL over shared memory needs 2.4 us for a
# descriptor and moves 9 GB/s: 21,600 bytes. The host's own work for a descriptor adds half of that.
from kvspec.descriptors.row_set import RowSet
from kvspec.engines.group import KVCacheGroup
from kvspec.memory.region import Region, common_chunks
from kvspec.memory.regions import RankCache
from kvspec.ownership.part import Part
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.specs import LayerSpec

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
