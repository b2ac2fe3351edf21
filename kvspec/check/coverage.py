"""How often each address is touched.

Law: counts bytes, whatever the order, the overlaps and the cuts of the spans.

Whether the caches of several ranks keep anything in the same bytes.

Law: what two ranks write is two things, even where it is equal: one would overwrite the other. A
cache on paper, which begins at address 0, has no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.errors import SpecError
from kvspec.memory.aliasing import meetings
from kvspec.memory.rank_cache import Memory, RankCache, Region
from kvspec.ownership.parallel import RankId
from kvspec.ownership.tokens import Ints

Small = npt.NDArray[np.int32]
AT_ONCE = 2**20
"""Spans that are asked about together: what bounds the memory that it takes."""


class Coverage:
    """Spans of addresses, and how many of them touch each byte.

    The address line is cut where a span begins or ends; every segment between two cuts is touched
    by the same spans. Here 0..8 is written, then 4..6 once more, and 8..12:

    >>> writes = Coverage(np.array([0, 4, 8]), np.array([8, 2, 4]))
    >>> writes.cuts.tolist(), writes.times.tolist()
    ([-1, 0, 4, 6, 8, 12], [0, 1, 2, 1, 1, 0])
    >>> writes.span[3:5].tolist()
    [0, 2]
    >>> writes.first_outside(np.array([6]), np.array([8]))
    (0, 12)

    *cuts* are where segments begin, the first before every address, the last without an end;
    *times* says how often each is touched, and *span* by which, where that is once.
    """

    def __init__(self, start: Ints, length: Ints) -> None:
        """Take the spans' first addresses and their lengths in bytes."""
        full = np.flatnonzero(length > 0)
        if len(full) < len(start):
            start, length = start[full], length[full]
        ends = np.concatenate([[-1], start, start + length])
        order = np.argsort(ends, kind="stable")
        ends = ends[order]
        last = np.append(ends[1:] != ends[:-1], [True])
        self.cuts: Ints = ends[last]
        del ends  # spans are many: what is not needed any more makes room
        self.times = _running(np.ones(len(full), np.int32), order)[last]
        # The sum of the numbers of all spans here: of one span alone, its number.
        self.span = _running(full.astype(np.int32), order)[last]

    def segments(self, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """Return every (question, segment) for which [start, stop) meets the segment, in order.

        No question is empty.

        >>> writes = Coverage(np.array([0, 4, 8]), np.array([8, 2, 4]))
        >>> [found.tolist() for found in writes.segments(np.array([0, 5]), np.array([4, 9]))]
        [[0, 1, 1, 1], [1, 2, 3, 4]]
        """
        first = np.searchsorted(self.cuts, start, "right") - 1
        count = np.searchsorted(self.cuts, stop, "left") - first
        question = np.repeat(np.arange(len(start)), count)
        before = np.cumsum(count) - count
        return question, np.arange(len(question)) + (first - before)[question]

    def first_outside(self, start: Ints, length: Ints) -> tuple[int, int] | None:
        """Return (question, address) of the first byte asked about that no span touches."""
        for at in range(0, len(start), AT_ONCE):
            some, end = start[at : at + AT_ONCE], length[at : at + AT_ONCE]
            outside = self._untouched_before(some + end) > self._untouched_before(some)
            if outside.any():
                which = int(np.argmax(outside))
                asked = some[which : which + 1]
                _, segment = self.segments(asked, asked + end[which])
                bare = segment[self.times[segment] == 0][0]
                return at + which, max(int(asked[0]), int(self.cuts[bare]))
        return None

    def _untouched_before(self, address: Ints) -> Ints:
        """Return how many bytes before each address no span touches."""
        segment = np.searchsorted(self.cuts, address, "right") - 1
        rest = (address - self.cuts[segment]) * (self.times[segment] == 0)
        return np.asarray(self._untouched[segment] + rest, np.int64)

    @cached_property
    def _untouched(self) -> Ints:
        """How many bytes no span touches, before each cut."""
        bare = np.diff(self.cuts) * (self.times[:-1] == 0)
        return np.concatenate([[0], np.cumsum(bare)])


def _running(value: Small, order: Ints) -> Small:
    """Return the sum over all spans that have begun and not ended, at each end in *order*."""
    return np.cumsum(np.concatenate([np.zeros(1, np.int32), value, -value])[order], dtype=np.int32)


def merged(start: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Return the spans that touch the same bytes and neither overlap nor follow each other.

    >>> [found.tolist() for found in merged(np.array([8, 0, 2]), np.array([4, 4, 6]))]
    [[0], [12]]
    """
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate((start + length)[order])
    new = np.append(True, start[1:] > stop[:-1]) if len(start) else np.empty(0, np.bool_)
    last = np.append(new[1:], True) if len(start) else new
    return start[new], stop[last] - start[new]


def check_ranks_separate(field: str, caches: Mapping[RankId, RankCache]) -> None:
    """Raise `SpecError` naming two ranks of *caches* whose regions share a byte."""
    real = {rank: cache for rank, cache in caches.items() if all(m.address for m in cache.memory)}
    for one, other in _neighbours(real):
        regions, kernel_blocks_per_block = list[Region](), dict[str, int]()
        for rank in (one, other):
            for group in real[rank].engine.groups:
                kernel_blocks_per_block[f"{rank} {group.name}"] = group.kernel_blocks_per_block
            regions += (
                attrs.evolve(region, group=f"{rank} {region.group}")
                for region in real[rank].regions
            )
        of_one = f"{one} "
        for first, second, _ in meetings(regions, kernel_blocks_per_block):
            if first.group.startswith(of_one) != second.group.startswith(of_one):
                told = f"{second.layer}.{second.part} where {one} has {first.layer}.{first.part}"
                wanted = "bytes of its own (or separate_processes=True: ranks are processes)"
                raise SpecError(f"{field}[{other}]", told, wanted)


def _neighbours(caches: Mapping[RankId, RankCache]) -> Iterator[tuple[RankId, RankId]]:
    """Yield the pairs of ranks of which two memories share a byte, each pair once."""
    places: dict[tuple[str, int], list[tuple[Memory, RankId]]] = {}
    for rank, cache in caches.items():
        for memory in cache.memory:
            home = places.setdefault((memory.memory_type, memory.device), [])
            home.append((memory, rank))
    found: dict[tuple[RankId, RankId], None] = {}
    for held in places.values():
        open_: list[tuple[Memory, RankId]] = []
        for memory, rank in sorted(held, key=lambda each: each[0].address):
            open_ = [each for each in open_ if each[0].end > memory.address]
            found |= {(other, rank): None for _, other in open_ if other != rank}
            open_.append((memory, rank))
    yield from {min(pair, pair[::-1]): None for pair in found}
