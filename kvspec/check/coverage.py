"""Count how often each address is touched, and check that ranks do not share memory.

Invariant: the count of a byte does not depend on the order, the overlaps or the cuts of the counted
ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.errors import SpecError
from kvspec.memory.aliasing import meetings
from kvspec.memory.rank_cache import Memory, RankCache, Region
from kvspec.ownership.parallel import RankId
from kvspec.ownership.tokens import Ints

Small = npt.NDArray[np.int32]
K = TypeVar("K", RankId, tuple[int, RankId])
# Counted ranges that one step of `first_outside` looks up. More counted ranges need more memory for
# the results.
RANGES_AT_ONCE = 2**20


class Coverage:
    """The number of counted ranges that touch each address.

    The starts and ends of all counted ranges are cuts. All bytes from one cut to the next are
    touched by the same counted ranges. In this example 0..8 is written, then 4..6 again, and 8..12:

    >>> writes = Coverage(np.array([0, 4, 8]), np.array([8, 2, 4]))
    >>> writes.cuts.tolist(), writes.times.tolist()
    ([-1, 0, 4, 6, 8, 12], [0, 1, 2, 1, 1, 0])
    >>> writes.range_index[3:5].tolist()
    [0, 2]
    >>> writes.first_outside(np.array([6]), np.array([8]))  # addresses 6..14
    (0, 12)

    Attributes:
        cuts: The addresses at which the count changes. The first cut is -1, before all addresses.
        times: Number of counted ranges that touch the bytes behind each cut.
        range_index: Index of the counted range that touches them. It has no meaning unless *times*
            is 1.
    """

    def __init__(self, start: Ints, length: Ints) -> None:
        """Count the counted ranges, which have first addresses and lengths in bytes."""
        nonempty = np.flatnonzero(length > 0)
        if len(nonempty) < len(start):
            start, length = start[nonempty], length[nonempty]
        ends = np.concatenate([[-1], start, start + length])
        order = np.argsort(ends, kind="stable")
        ends = ends[order]
        last = np.append(ends[1:] != ends[:-1], [True])
        self.cuts: Ints = ends[last]
        del ends  # There may be millions: free the array before the sums.
        self.times = _running(np.ones(len(nonempty), np.int32), order)[last]
        # This is the sum of the indices of all counted ranges that touch the bytes. If only one
        # counted range touches it, the sum is the index of that counted range.
        self.range_index = _running(nonempty.astype(np.int32), order)[last]

    def cuts_in(self, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """Return each pair of a range and a cut that concerns it, in order.

        Args:
            start: First address of each range.
            stop: End of each range. No range is empty.

        Returns:
            The index of the range and the index of the cut, for each pair.

        >>> writes = Coverage(np.array([0, 4, 8]), np.array([8, 2, 4]))
        >>> [found.tolist() for found in writes.cuts_in(np.array([0, 5]), np.array([4, 9]))]
        [[0, 1, 1, 1], [1, 2, 3, 4]]
        """
        first = np.searchsorted(self.cuts, start, "right") - 1
        count = np.searchsorted(self.cuts, stop, "left") - first
        index = np.repeat(np.arange(len(start)), count)
        before = np.cumsum(count) - count
        return index, np.arange(len(index)) + (first - before)[index]

    def first_outside(self, start: Ints, length: Ints) -> tuple[int, int] | None:
        """Return where the ranges first have a byte that no counted range touches, or None.

        Args:
            start: First address of each range.
            length: Bytes of each range.

        Returns:
            The index of the range, and the address of the byte.
        """
        for at in range(0, len(start), RANGES_AT_ONCE):
            begins, lengths = start[at : at + RANGES_AT_ONCE], length[at : at + RANGES_AT_ONCE]
            outside = self._untouched_before(begins + lengths) > self._untouched_before(begins)
            if outside.any():
                index = int(np.argmax(outside))
                begin = begins[index : index + 1]
                _, cut = self.cuts_in(begin, begin + lengths[index])
                untouched = cut[self.times[cut] == 0][0]
                return at + index, max(int(begin[0]), int(self.cuts[untouched]))
        return None

    def touches(self, start: Ints, length: Ints) -> npt.NDArray[np.bool_]:
        """Return whether any counted range touches a byte of each range.

        >>> writes = Coverage(np.array([0, 4, 8]), np.array([8, 2, 4]))
        >>> writes.touches(np.array([10, 12]), np.array([4, 4])).tolist()
        [True, False]
        """
        untouched = self._untouched_before(start + length) - self._untouched_before(start)
        return np.asarray(untouched < length)

    def _untouched_before(self, address: Ints) -> Ints:
        """Return the number of bytes from 0 to each address that no counted range touches."""
        cut = np.searchsorted(self.cuts, address, "right") - 1
        rest = (address - self._begins[cut]) * (self.times[cut] == 0)
        return np.asarray(self._untouched[cut] + rest, np.int64)

    @cached_property
    def _begins(self) -> Ints:
        """The cuts, but 0 for the first one: a count from -1 would not fit into 63 bits."""
        return np.maximum(self.cuts, 0)

    @cached_property
    def _untouched(self) -> Ints:
        """The number of bytes before each cut that no counted range touches."""
        untouched = np.diff(self._begins) * (self.times[:-1] == 0)
        return np.concatenate([[0], np.cumsum(untouched)])


def _running(value: Small, order: Ints) -> Small:
    """Return the sum of *value* over all ranges that are open, at each start and end in *order*."""
    return np.cumsum(np.concatenate([np.zeros(1, np.int32), value, -value])[order], dtype=np.int32)


def merged(start: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Return counted ranges that touch the same bytes, sorted, with a gap between any two of them.

    >>> [found.tolist() for found in merged(np.array([8, 0, 2]), np.array([4, 4, 6]))]
    [[0], [12]]
    """
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate((start + length)[order])
    new = np.append(True, start[1:] > stop[:-1]) if len(start) else np.empty(0, np.bool_)
    last = np.append(new[1:], True) if len(start) else new
    return start[new], stop[last] - start[new]


def check_ranks_separate(field: str, caches: Mapping[RankId, RankCache]) -> None:
    """Check that caches of different ranks share no bytes: one would overwrite the other.

    Raises:
        SpecError: If the regions of two ranks share a byte.
    """
    # A planned cache has no bytes. Its memory begins at address 0 by default.
    real = {rank: cache for rank, cache in caches.items() if all(m.address for m in cache.memory)}
    for one, other in overlapping_ranks(real):
        regions, kernel_blocks_per_block = list[Region](), dict[str, int]()
        for rank in (one, other):
            for group in real[rank].engine.groups:
                kernel_blocks_per_block[f"{rank} {group.name}"] = group.kernel_blocks_per_block
            # `meetings` looks up the kernel blocks by group name, and both ranks may use the same
            # names. So the rank becomes part of the name.
            regions += (
                attrs.evolve(region, group=f"{rank} {region.group}")
                for region in real[rank].regions
            )
        of_one = f"{one} "
        for first, second, _ in meetings(regions, kernel_blocks_per_block):
            if first.group.startswith(of_one) != second.group.startswith(of_one):
                value = f"{second.layer}.{second.part} where {one} has {first.layer}.{first.part}"
                expected = "bytes of its own (or separate_processes=True: ranks are processes)"
                raise SpecError(f"{field}[{other}]", value, expected)


def overlapping_sides(
    producers: Mapping[RankId, RankCache], consumers: Mapping[RankId, RankCache]
) -> list[tuple[RankId, RankId]]:
    """Return each producer rank and consumer rank whose memories share a byte."""
    # A planned cache has no bytes. Its memory begins at address 0 by default.
    real = {
        (side, rank): cache
        for side, caches in enumerate((producers, consumers))
        for rank, cache in caches.items()
        if all(memory.address for memory in cache.memory)
    }
    pairs = (sorted(pair) for pair in overlapping_ranks(real))
    return [(one[1], other[1]) for one, other in pairs if one[0] != other[0]]


def overlapping_ranks(caches: Mapping[K, RankCache]) -> Iterator[tuple[K, K]]:
    """Yield each pair of ranks whose memories share a byte, once."""
    by_device: dict[tuple[str, int], list[tuple[Memory, K]]] = {}
    for rank, cache in caches.items():
        for memory in cache.memory:
            device = memory.memory_type, memory.device
            by_device.setdefault(device, []).append((memory, rank))
    pairs: dict[tuple[K, K], None] = {}
    for members in by_device.values():
        # Sweep by address. The open memories are those that end after the current one begins.
        open_: list[tuple[Memory, K]] = []
        for memory, rank in sorted(members, key=lambda member: member[0].address):
            open_ = [member for member in open_ if member[0].end > memory.address]
            pairs |= {(other, rank): None for _, other in open_ if other != rank}
            open_.append((memory, rank))
    yield from {min(pair, pair[::-1]): None for pair in pairs}
