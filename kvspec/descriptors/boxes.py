"""Boxes: the parts of two strided regions that move, and the runs that they are.

Law: strides alone decide; a box knows no request, and no other box until runs are coalesced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import attrs
import numpy as np

from kvspec.descriptors.paging import BlockLayout, Paging, RowKind
from kvspec.engines.group import KVCacheGroup
from kvspec.memory.region import Region
from kvspec.memory.regions import RankCache
from kvspec.ownership.tokens import Ints

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
