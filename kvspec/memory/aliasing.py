"""Whether regions of one cache share a byte that two tokens would both need.

Law: two contents of one group are one content or lie apart; which layer, part or block they belong
to does not matter. A block id is of one group at a time, so that groups may share memory, as hybrid
allocators have it: block i of one then meets block i of another, and no other block.

Bytes are compared by a sweep over periods, so that it costs as much as there are regions and axes,
not blocks. Regions whose extents meet are laid over each other, one period of their widest stride
upon the next, and what is inside one period is compared again. Keys and values of two layers, in
pages of both layers, rows of 2 heads (``a``, ``b``: keys of one layer; ``A``, ``B``: values):

    bytes      aAbBaAbB cCdDcCdD aAbBaAbB cCdDcCdD ...   one stride, a block of both layers
    a block    aAbBaAbB cCdDcCdD                         two extents that do not meet: one each
    a layer    aAbBaAbB                                  one stride, a row
    a row      aAbB                                      one stride, a head
    a head     aA                                        two extents that do not meet: apart
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from kvspec.errors import SpecError
from kvspec.memory.region import Region

Meeting = tuple[Region, Region, bool]
"""Two regions that share a byte, and whether only blocks of one id do."""

MOST_COPIES = 2**16
"""Contents that are compared one by one, where strides differ; more of them are taken to meet."""


class _Axis(NamedTuple):
    """What repeats: every *stride* bytes, so many *times*; *table*: by blocks of the table."""

    stride: int
    times: int
    table: bool = False


class _Turns(NamedTuple):
    """Which turns of a period something is in: from *first* on, so many *times*."""

    first: int
    times: int
    table: bool

    def meets(self, other: _Turns) -> bool:
        return self.first < other.first + other.times and other.first < self.first + self.times


class _Box(NamedTuple):
    """Contents of *length* bytes from *start* on, repeated along *axes*, widest stride first.

    *turns*: in which turns of the periods that it was taken out of, widest first. *region*: the
    number of the region it belongs to. *single*: whether it is one block of a table, taken out.
    """

    start: int
    length: int
    axes: tuple[_Axis, ...]
    turns: tuple[_Turns, ...]
    region: int
    single: bool = False

    @property
    def stop(self) -> int:
        """The end of its last content."""
        return self.start + self.length + sum(axis.stride * (axis.times - 1) for axis in self.axes)


def check_separate(regions: Iterable[Region], split: Mapping[str, int]) -> None:
    """Raise `SpecError` if two parts of one group, or other blocks of two groups, share a byte.

    *split*: blocks in memory for each block of the table, by group.
    """
    regions = list(regions)
    for each in regions:
        if not _nested(each):
            raise _overlap(each, each)
    groups: dict[str, list[Region]] = {}
    for each in regions:
        groups.setdefault(each.group, []).append(each)
    for own in groups.values():
        for one, other, _ in meetings(own, split):
            raise _overlap(one, other)
    for one, other, same_blocks in meetings(regions, split) if len(groups) > 1 else ():
        if not same_blocks:
            raise _overlap(one, other)


def meetings(regions: Iterable[Region], split: Mapping[str, int]) -> Iterator[Meeting]:
    """Yield regions that share a byte; of many that share one, each with one before it."""
    regions = list(regions)
    places: dict[tuple[str, int], list[_Box]] = {}
    for number, region in enumerate(regions):
        home = places.setdefault((region.memory_type, region.device), [])
        home.append(_box(number, region, split[region.group]))
    seen: set[tuple[int, int, bool]] = set()
    for boxes in places.values():
        for one, other in _sharing(boxes):
            first, second = sorted((one.region, other.region))
            found = first, second, _one_block(one, other)
            if found not in seen:
                seen.add(found)
                yield regions[first], regions[second], found[2]


def groups_that_share(
    regions: Iterable[Region], split: Mapping[str, int]
) -> tuple[frozenset[str], ...]:
    """Return the sets of groups of which blocks of one id share memory.

    Groups of one pool stand together, even if two of them meet only what a third has.
    """
    regions = list(regions)
    if len({each.group for each in regions}) < 2 or not _mixed(regions):  # noqa: PLR2004 - a pair
        return ()
    found: list[frozenset[str]] = []
    for one, other, _ in meetings(regions, split):
        pool = frozenset((one.group, other.group))
        separate = [each for each in found if not each & pool]
        found = [*separate, pool.union(*(each for each in found if each & pool))]
    return tuple(each for each in found if len(each) > 1)


def _mixed(regions: list[Region]) -> bool:
    """Return whether memory of one group begins before that of another ends."""
    ordered = sorted(regions, key=lambda r: (r.memory_type, r.device, r.extent.start))
    stop, last = 0, ordered[0]
    for each in ordered:
        same = (each.memory_type, each.device) == (last.memory_type, last.device)
        if same and each.group != last.group and each.extent.start < stop:
            return True
        stop, last = max(stop, each.extent.stop) if same else each.extent.stop, each
    return False


def _one_block(one: _Box, other: _Box) -> bool:
    """Whether two boxes that share a byte do so as blocks of one id of two equal tables."""
    turns = [[each for each in box.turns if each.table] for box in (one, other)]
    return turns[0] == turns[1] and not one.single and not other.single


def _box(number: int, region: Region, split: int) -> _Box:
    """Return what *region* repeats; axes inside a block that lie end to end are one content."""
    length = region.chunk_bytes
    inner = [
        _Axis(region.unit_stride, region.units),
        _Axis(region.state_stride, region.states),
        _Axis(region.chunk_stride, region.chunks),
        _Axis(region.block_stride, min(split, region.num_blocks)),
    ]
    axes: list[_Axis] = []
    for axis in sorted(axis for axis in inner if axis.times > 1):
        if axis.stride == length:
            length *= axis.times
        else:
            axes.append(axis)
    if region.num_blocks // split > 1:
        axes.append(_Axis(region.block_stride * split, region.num_blocks // split, table=True))
    return _Box(region.base, length, tuple(sorted(axes, reverse=True)), (), number)


def _sharing(boxes: list[_Box]) -> Iterator[tuple[_Box, _Box]]:
    """Yield pairs of boxes that share a byte in one turn: the sweep drawn above."""
    for near in _meeting_extents(boxes):
        widest = max((box.axes[0].stride if box.axes else 0) for box in near)
        repeating = [box for box in near if box.axes and box.axes[0].stride == widest]
        if not widest:
            yield from _in_one_turn(near)
        elif len(repeating) == len(near):
            origin = min(box.start for box in near)
            yield from _sharing([part for box in near for part in _first_turn(box, origin)])
        elif sum(box.axes[0].times for box in repeating) > MOST_COPIES:
            yield near[0], near[1]
        else:
            others = [box for box in near if box not in repeating]
            copies = [copy for box in repeating for copy in _copies(box)]
            yield from _sharing(others + copies)


def _meeting_extents(boxes: list[_Box]) -> Iterator[list[_Box]]:
    """Yield the boxes whose extents meet, together; one that meets no other is left out."""
    near: list[_Box] = []
    reached = 0
    for box in sorted(boxes):
        if near and box.start >= reached:
            if len(near) > 1:
                yield near
            near = []
        near.append(box)
        reached = max(reached, box.stop) if len(near) > 1 else box.stop
    if len(near) > 1:
        yield near


def _first_turn(box: _Box, origin: int) -> Iterator[_Box]:
    """Yield *box* as it lies within one period of its widest axis, counted from *origin*.

    Where it runs over the end of the period, what is over lies at the beginning of the next turn.
    """
    (stride, times, table), *axes = box.axes
    first, start = divmod(box.start - origin, stride)
    inside = box._replace(
        start=start, axes=tuple(axes), turns=(*box.turns, _Turns(first, times, table))
    )
    yield inside
    if inside.stop > stride:
        later = (*box.turns, _Turns(first + 1, times, table))
        yield inside._replace(start=start - stride, turns=later)


def _copies(box: _Box) -> Iterator[_Box]:
    """Yield *box* without its widest axis, once for each of its repeats."""
    axis, *axes = box.axes
    for turn in range(axis.times):
        start, single = box.start + turn * axis.stride, box.single or axis.table
        yield box._replace(start=start, axes=tuple(axes), single=single)


def _in_one_turn(near: list[_Box]) -> Iterator[tuple[_Box, _Box]]:
    """Yield pairs of *near* contents that share a byte: each with the one that reaches farthest.

    Of contents in different turns all pairs are looked at, since that one may be in another turn.
    """
    if len({box.turns for box in near}) > 1:
        for one, other in combinations(near, 2):
            turns = zip(one.turns, other.turns, strict=True)
            if other.start < one.stop and all(a.meets(b) for a, b in turns):
                yield one, other
        return
    widest = near[0]
    for box in near[1:]:
        yield widest, box
        widest = max(widest, box, key=lambda each: each.stop)


def _nested(region: Region) -> bool:
    """Whether each stride of a region steps over all that the smaller ones reach."""
    reach = region.chunk_bytes
    axes = (
        (region.block_stride, region.num_blocks),
        (region.unit_stride, region.units),
        (region.state_stride, region.states),
        (region.chunk_stride, region.chunks),
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
