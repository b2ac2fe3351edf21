"""Find the regions of one cache that share bytes.

Invariant: two contents of one group never share a byte, whatever their layer, part or block. Two
groups may share memory, as hybrid allocators do, because a block id belongs to one group at a time.
Then block i of one group may share bytes with block i of the other group, and with no other block.

How it works:
    A content is repeated along axes: blocks, units, rows. With two axes it has the bytes
    ``start + i * stride1 + j * stride2 + byte``, for all indices and all bytes of one content.
    Comparing all copies would cost time for each block, so repeated contents are folded instead.

    Theorem: let several contents repeat along their widest axis with the same stride S. Write each
    address as ``period * S + rest``. Two addresses are equal exactly if their periods are equal and
    their rests are equal. So two contents share a byte exactly if their *period indices* overlap
    and the contents that remain inside one period share a byte. The remaining contents have one
    axis fewer.

    Worked example: keys of 4 bytes and values of 2 bytes, 2 rows a block, 3 blocks.

        address    0    4  6    10 12   16 18   22 24   28 30   34
        content    kkkk vv kkkk vv kkkk vv kkkk vv kkkk vv kkkk vv

        step                 keys                        values
        ------------------   -------------------------   -------------------------
        the contents         0..4, axes 3 x 12, 2 x 6    4..6, axes 3 x 12, 2 x 6
        fold by 12           0..4, axis 2 x 6            4..6, axis 2 x 6
                             period indices 0..2         period indices 0..2
        fold by 6            0..4                        4..6
                             period indices 0..2, 0..1   period indices 0..2, 0..1
        compare              0..4 and 4..6 do not overlap: no byte is shared

    Before each fold, `_sharing` sorts the contents by address. It separates contents whose ranges
    do not overlap, because they cannot share a byte. Two cases need more work:

    - A content may run over the end of the period. Then its overhang is added as a second content,
      one period index later (`_within_one_period`).
    - Some contents may repeat with a smaller stride, or not at all. Then each content with the
      widest stride is replaced by its copies, one for each repeat (`_copies`). More than
      `MOST_COPIES` copies are not compared. They are assumed to share bytes.

    Here *keys* and *later_keys* lie at the same rest, but in different periods. The values overlap
    the keys only if they begin at 3:

    >>> keys = _Repeated(0, 4, (_Axis(stride=10, times=3),), (), region=0)
    >>> later_keys = _Repeated(30, 4, (_Axis(stride=10, times=3),), (), region=1)
    >>> values = _Repeated(5, 2, (_Axis(stride=10, times=6),), (), region=2)
    >>> list(_sharing([keys, later_keys, values]))
    []
    >>> pairs = _sharing([keys, later_keys, values._replace(start=3)])
    >>> [(first.region, second.region) for first, second in pairs]
    [(0, 2), (1, 2)]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, pairwise
from typing import NamedTuple

from kvspec.errors import SpecError
from kvspec.memory.region import Region

# Two regions that share a byte, and whether only blocks with the same id share bytes.
Meeting = tuple[Region, Region, bool]

# The time of a comparison grows with the number of copies. Real engines need no copies: the
# contents that overlap have equal strides.
MOST_COPIES = 2**16


class _Axis(NamedTuple):
    """One axis of a content. *table*: whether it counts the blocks of a block table."""

    stride: int
    times: int
    table: bool = False


class _Periods(NamedTuple):
    """The period indices of a content after one fold: *times* indices from *first* on."""

    first: int
    times: int
    table: bool

    def overlap(self, other: _Periods) -> bool:
        return self.first < other.first + other.times and other.first < self.first + self.times


class _Repeated(NamedTuple):
    """A content of *length* bytes at *start*, repeated along *axes*, widest stride first.

    *periods* has one member for each fold so far. *region* is the number of the region that the
    content belongs to. *block*: the block of the table of which it is a copy, if it is a copy of
    one block.
    """

    start: int
    length: int
    axes: tuple[_Axis, ...]
    periods: tuple[_Periods, ...]
    region: int
    block: int | None = None

    @property
    def stop(self) -> int:
        """The end of the last content."""
        return self.start + self.length + sum(axis.stride * (axis.times - 1) for axis in self.axes)


def check_separate(regions: Iterable[Region], split: Mapping[str, int]) -> None:
    """Check that regions share bytes only between blocks with the same id of different groups.

    Args:
        regions: The regions of one cache.
        split: Kernel blocks for each block of the block table, by group.

    Raises:
        SpecError: If two contents of one group share a byte, or two different blocks of two groups.
    """
    regions = list(regions)
    for region in regions:
        if not _nested(region):
            raise _overlap(region, region)
    groups: dict[str, list[Region]] = {}
    for region in regions:
        groups.setdefault(region.group, []).append(region)
    # Compare each group alone first, so that the error names a pair of one group if there is any.
    for group_regions in groups.values():
        for first, second, _ in meetings(group_regions, split):
            raise _overlap(first, second)
    for first, second, same_blocks in meetings(regions, split) if len(groups) > 1 else ():
        if not same_blocks:
            raise _overlap(first, second)


def meetings(regions: Iterable[Region], split: Mapping[str, int]) -> Iterator[Meeting]:
    """Yield pairs of regions that share a byte.

    If many regions share the same byte, not every pair is yielded: each region occurs in a pair
    with one that begins before it.

    Args:
        regions: Regions of one cache or of several caches. Each region must be nested: each stride
            covers everything that the smaller strides reach.
        split: Kernel blocks for each block of the block table, by group.

    Yields:
        The two regions in the order of *regions*, and whether only blocks with the same id share
        bytes.
    """
    regions = list(regions)
    contents_by_device: dict[tuple[str, int], list[_Repeated]] = {}
    for number, region in enumerate(regions):
        contents = contents_by_device.setdefault((region.memory_type, region.device), [])
        contents.append(_repeated_content(number, region, split[region.group]))
    seen: set[tuple[int, int, bool]] = set()
    for contents in contents_by_device.values():
        for content, other_content in _sharing(contents):
            first, second = sorted((content.region, other_content.region))
            meeting = first, second, _same_blocks(content, other_content)
            if meeting not in seen:
                seen.add(meeting)
                yield regions[first], regions[second], meeting[2]


def groups_that_share(
    regions: Iterable[Region], split: Mapping[str, int]
) -> tuple[frozenset[str], ...]:
    """Return the sets of groups of which each two share memory, in blocks with the same id.

    Sorted by the names of the groups. No set is part of another, and none has one group only. If
    group a shares memory with b, and b with c, but a not with c, the sets are a, b and b, c.
    """
    regions = list(regions)
    group_names = {region.group for region in regions}
    if len(group_names) < 2 or not _mixed(regions):  # noqa: PLR2004 - a pair
        return ()
    pairs = {
        frozenset((first.group, second.group)) for first, second, _ in meetings(regions, split)
    }
    names = sorted(frozenset().union(*pairs))
    for pair in map(frozenset, combinations(names, 2)):
        # `meetings` may leave out a pair if a third group has the same bytes.
        if pair not in pairs and any(meetings([r for r in regions if r.group in pair], split)):
            pairs.add(pair)
    sets: set[frozenset[str]] = set()
    for name in names:
        others = frozenset(other for other in names if {name, other} in pairs)
        sets |= {(found & others) | {name} for found in sets} | {frozenset((name,))}
        sets = {found for found in sets if not any(found < other for other in sets)}
    # Sets have no order of their own, and those of texts differ from process to process.
    return tuple(sorted((found for found in sets if len(found) > 1), key=sorted))


def _mixed(regions: list[Region]) -> bool:
    """Return whether memory of one group begins before memory of another group ends.

    Most caches have separate groups. This cheap test saves the comparison of their contents.
    """
    ordered = sorted(regions, key=lambda r: (r.memory_type, r.device, r.address_range.start))
    stop, last = 0, ordered[0]
    for region in ordered:
        same_device = (region.memory_type, region.device) == (last.memory_type, last.device)
        if same_device and region.group != last.group and region.address_range.start < stop:
            return True
        stop, last = (
            max(stop, region.address_range.stop) if same_device else region.address_range.stop,
            region,
        )
    return False


def _same_blocks(content: _Repeated, other_content: _Repeated) -> bool:
    """Return whether two contents that share bytes do so only in blocks with the same id.

    A period index is a block id only in the fold by the table axis. So both contents must have that
    axis at the same fold. Groups with their blocks outermost in one and innermost in the other have
    equal numbers of blocks, but block 0 of one may share bytes with block 1 of the other. Copies
    of single blocks have no table axis any more, but the number of their block.
    """
    tables = [
        [periods if periods.table else None for periods in member.periods]
        for member in (content, other_content)
    ]
    return tables[0] == tables[1] and content.block == other_content.block


def _repeated_content(number: int, region: Region, split: int) -> _Repeated:
    """Return the content of *region*, with its axes. Axes without a gap become part of it."""
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
    # The table axis stays an axis even without a gap: its period indices identify the blocks.
    if region.num_blocks // split > 1:
        axes.append(_Axis(region.block_stride * split, region.num_blocks // split, table=True))
    return _Repeated(region.base, length, tuple(sorted(axes, reverse=True)), (), number)


def _sharing(contents: list[_Repeated]) -> Iterator[tuple[_Repeated, _Repeated]]:
    """Yield pairs of contents that share a byte. `How it works` above has the theorem."""
    for near in _overlapping(contents):
        widest = max((content.axes[0].stride if content.axes else 0) for content in near)
        repeating = [
            content for content in near if content.axes and content.axes[0].stride == widest
        ]
        if not widest:
            yield from _plain_sharing(near)
        elif len(repeating) == len(near):
            origin = min(content.start for content in near)
            yield from _sharing(
                [part for content in near for part in _within_one_period(content, origin)]
            )
        elif sum(content.axes[0].times for content in repeating) > MOST_COPIES:
            # Every neighbour, because a caller may ignore pairs of one region or of one rank.
            # No block is number -1: it is unknown which blocks share bytes, so groups are refused.
            yield from ((content._replace(block=-1), later) for content, later in pairwise(near))
        else:
            others = [content for content in near if content not in repeating]
            copies = [copy for content in repeating for copy in _copies(content)]
            yield from _sharing(others + copies)


def _overlapping(contents: list[_Repeated]) -> Iterator[list[_Repeated]]:
    """Yield sets of contents that overlap, by ascending start. A lone content is in none."""
    near: list[_Repeated] = []
    reached = 0
    for content in sorted(contents):
        if near and content.start >= reached:
            if len(near) > 1:
                yield near
            near = []
        near.append(content)
        reached = max(reached, content.stop)
    if len(near) > 1:
        yield near


def _within_one_period(content: _Repeated, origin: int) -> Iterator[_Repeated]:
    """Fold *content* by its widest axis. Periods are counted from *origin*.

    The second content is the overhang, if the first content runs over the end of its period:

    >>> content = _Repeated(28, 5, (_Axis(10, 3),), (), region=0)
    >>> for part in _within_one_period(content, origin=0):
    ...     print(part.start, part.stop, *part.periods)
    8 13 _Periods(first=2, times=3, table=False)
    -2 3 _Periods(first=3, times=3, table=False)
    """
    (stride, times, table), *axes = content.axes
    first, start = divmod(content.start - origin, stride)
    inside = content._replace(
        start=start, axes=tuple(axes), periods=(*content.periods, _Periods(first, times, table))
    )
    yield inside
    if inside.stop > stride:
        later = (*content.periods, _Periods(first + 1, times, table))
        yield inside._replace(start=start - stride, periods=later)


def _copies(content: _Repeated) -> Iterator[_Repeated]:
    """Yield *content* without its widest axis, once for each repeat along that axis."""
    axis, *axes = content.axes
    for index in range(axis.times):
        start, block = content.start + index * axis.stride, index if axis.table else content.block
        yield content._replace(start=start, axes=tuple(axes), block=block)


def _plain_sharing(near: list[_Repeated]) -> Iterator[tuple[_Repeated, _Repeated]]:
    """Yield pairs of contents without axes that share a byte. *near* is sorted by start.

    Contents with equal period indices are compared only with the content that reaches farthest.
    """
    if len({content.periods for content in near}) > 1:
        # The content that reaches farthest may be in another period, so compare all pairs.
        for content, later in combinations(near, 2):
            folds = zip(content.periods, later.periods, strict=True)
            if later.start < content.stop and all(
                periods.overlap(other) for periods, other in folds
            ):
                yield content, later
        return
    farthest = near[0]
    for content in near[1:]:
        yield farthest, content
        farthest = max(farthest, content, key=lambda member: member.stop)


def _nested(region: Region) -> bool:
    """Return whether each stride of a region covers everything that the smaller strides reach."""
    reach = region.chunk_bytes
    axes = (
        (region.block_stride, region.num_blocks),
        (region.unit_stride, region.units),
        (region.state_stride, region.states),
        (region.chunk_stride, region.chunks),
    )
    for stride, count in sorted(axis for axis in axes if axis[1] > 1):
        if stride < reach:
            return False
        reach += stride * (count - 1)
    return True


def _overlap(first: Region, second: Region) -> SpecError:
    pair = f"{first.layer}.{first.part} and {second.layer}.{second.part}"
    if first.group == second.group:
        return SpecError("tensors", pair, "regions of one group that do not overlap")
    return SpecError("tensors", pair, "blocks of different groups that coincide or lie apart")
