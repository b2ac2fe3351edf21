"""Whether the caches of several ranks keep anything in the same bytes.

Law: what two ranks write is two things, even where it is equal: one would overwrite the other. A
cache on paper, which begins at address 0, has no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from kvspec.errors import SpecError
from kvspec.memory.aliasing import meetings
from kvspec.memory.rank_cache import Memory, RankCache, Region
from kvspec.ownership.parallel import RankId


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
