"""Whether regions of one cache share a byte that two tokens would both need.

Law: two contents of one group are one content or lie apart; which layer, part or block they belong
to does not matter. A block id is of one group at a time, so that groups may share memory, as hybrid
allocators have it: block i of one then meets block i of another, and no other block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, pairwise

import numpy as np

from kvspec.errors import SpecError
from kvspec.memory.regions import Region

Meeting = tuple[Region, Region, bool]
"""Two regions that share a byte, and whether only blocks of one id do."""

_Span = tuple[int, int, int, int]
"""Where a run begins and stops within a block stride, strides before it, number of its region."""


def check_apart(regions: Iterable[Region], split: Mapping[str, int]) -> None:
    """Raise `SpecError` if two parts of one group, or other blocks of two groups, share a byte.

    *split*: blocks in memory for each block of the table, by group.
    """
    regions = list(regions)
    for each in regions:
        if not _nested(each):
            raise _overlap(each, each)
    for one, other, alike in meetings(regions, split):
        if one.group == other.group or not alike:
            raise _overlap(one, other)


def meetings(regions: Iterable[Region], split: Mapping[str, int]) -> Iterator[Meeting]:
    """Yield regions that share a byte; of many that share one, each with the next.

    Regions whose extents meet are taken to repeat with the blocks of the table: then their
    contents, counted within a block stride, show which blocks meet.
    """
    ordered = sorted(regions, key=lambda r: (r.memory_type, r.device, r.extent.start))
    near: list[Region] = []
    stop = 0
    for each in ordered:
        new = near and (each.memory_type, each.device) != (near[0].memory_type, near[0].device)
        if new or each.extent.start >= stop:
            yield from _repeating(near, split)
            near.clear()
            stop = 0
        near.append(each)
        stop = max(stop, each.extent.stop)
    yield from _repeating(near, split)


def _repeating(regions: list[Region], split: Mapping[str, int]) -> Iterator[Meeting]:
    """Yield meetings of regions whose extents meet, one with the next."""
    if len(regions) < 2:  # noqa: PLR2004 - it takes two to overlap
        return
    tables = [_table(each, split[each.group]) for each in regions]
    stride, count = tables[0]
    if len(set(tables)) > 1:
        pairs = combinations(zip(regions, tables, strict=True), 2)
        yield next(
            (one, other, False)
            for (one, mine), (other, yours) in pairs
            if mine != yours and other.extent.start < one.extent.stop
        )
        return
    spans = [
        span
        for number, each in enumerate(regions)
        for span in _spans(number, each, split[each.group], stride, regions[0].base)
    ]
    edges = sorted({edge for start, stop, *_ in spans for edge in (start, stop)})
    held: list[list[tuple[int, str, int]]] = [[] for _ in edges]
    for start, stop, before, number in spans:
        for at in range(bisect_left(edges, start), bisect_left(edges, stop)):
            held[at].append((before, regions[number].group, number))
    for sharing in held:
        for (one_before, _, mine), (before, _, yours) in pairwise(sorted(sharing)):
            if before - one_before < count:
                yield regions[mine], regions[yours], one_before == before


def _table(region: Region, split: int) -> tuple[int, int]:
    """Return the stride and the number of the table's blocks; one block has no stride."""
    count = max(region.num_blocks // split, 1)
    return region.block_stride * split if count > 1 else 0, count


def _spans(number: int, region: Region, split: int, stride: int, origin: int) -> Iterator[_Span]:
    """Yield the runs of the first block of the table, cut where a block stride ends.

    Axes that lie one piece after the other are one run.
    """
    length, starts = region.content_bytes, np.array([region.base - origin])
    axes = (
        (region.unit_stride, region.units),
        (region.state_stride, region.states),
        (region.block_stride, min(split, region.num_blocks)),
    )
    for step, many in sorted(each for each in axes if each[1] > 1):
        if step == length and len(starts) == 1:
            length *= many
        else:
            starts = (starts[:, None] + np.arange(many) * step).ravel()
    for start in starts.tolist():
        before, place = divmod(start, stride) if stride else (0, start)
        stop = place + length
        if stride and stop > stride:
            yield 0, stop - stride, before + 1, number
            stop = stride
        yield place, stop, before, number


def _nested(region: Region) -> bool:
    """Whether each stride of a region steps over all that the smaller ones reach."""
    reach = region.content_bytes
    axes = (
        (region.block_stride, region.num_blocks),
        (region.unit_stride, region.units),
        (region.state_stride, region.states),
    )
    for stride, count in sorted(each for each in axes if each[1] > 1):
        if stride < reach:
            return False
        reach += stride * (count - 1)
    return True


def _overlap(one: Region, other: Region) -> SpecError:
    pair = f"{one.layer}.{one.part} and {other.layer}.{other.part}"
    if one.group == other.group:
        return SpecError("tensors", pair, "regions of one group that do not overlap")
    wanted = "blocks of different groups that coincide or lie apart"
    return SpecError("tensors", pair, wanted)
