"""Whether regions of one cache share a byte.

Law: two contents of one group are one content or lie apart; which layer, part or block they belong
to does not matter. Blocks of different groups may share memory, as hybrid allocators have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NoReturn

import numpy as np

from kvspec.cache import Region
from kvspec.errors import SpecError


def check_apart(regions: list[Region]) -> None:
    """Raise `SpecError` if two parts of one group share a byte.

    Regions whose extents meet are taken to repeat with the blocks: then their contents, counted
    within a block stride, must be apart.
    """
    for each in regions:
        if not _nested(each):
            _refuse_overlap(each, each)
    ordered = sorted(regions, key=lambda each: each.extent.start)
    meeting: list[Region] = []
    stop = 0
    for each in ordered:
        if each.extent.start >= stop:
            _check_interleaved(meeting)
            meeting = []
        meeting.append(each)
        stop = max(stop, each.extent.stop)
    _check_interleaved(meeting)


def _check_interleaved(regions: list[Region]) -> None:
    if len(regions) < 2:  # noqa: PLR2004 - it takes two to overlap
        return
    blocks = {(each.block_stride, each.num_blocks) for each in regions}
    if len(blocks) > 1:
        _refuse_overlap(regions[0], regions[1])
    stride, count = blocks.pop()
    found: list[tuple[int, int, int]] = []  # place within a block stride, strides before, region
    for number, each in enumerate(regions):
        units = np.arange(each.units)[:, None] * each.unit_stride
        rows = np.arange(each.states) * each.state_stride
        first = (each.base + units + rows).ravel() - regions[0].base
        before, place = np.divmod(first, stride) if count > 1 else (np.zeros_like(first), first)
        found += zip(place.tolist(), before.tolist(), [number] * len(place), strict=True)
    for alike in _sharing(sorted(found), [each.content_bytes for each in regions]):
        alike.sort(key=lambda content: content[1])
        for (_, one, mine), (_, other, yours) in pairwise(alike):
            if other - one < count:
                _refuse_overlap(regions[mine], regions[yours])


def _sharing(
    contents: list[tuple[int, int, int]], sizes: list[int]
) -> Iterator[list[tuple[int, int, int]]]:
    """Yield contents whose places within a block stride meet, those that meet none left out."""
    alike: list[tuple[int, int, int]] = []
    stop = 0
    for content in contents:
        place, _, region = content
        if place >= stop:
            if len(alike) > 1:
                yield alike
            alike = []
        alike.append(content)
        stop = max(stop, place + sizes[region])
    if len(alike) > 1:
        yield alike


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


def _refuse_overlap(one: Region, other: Region) -> NoReturn:
    pair = f"{one.layer}.{one.part} and {other.layer}.{other.part}"
    raise SpecError("tensors", pair, "regions of one group that do not overlap")
