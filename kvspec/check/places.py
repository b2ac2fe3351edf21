"""Where one rank keeps the contents of a request.

Law: a place follows from the rank's own block table and its regions alone. What no block of the
table holds is nowhere: address -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import starmap

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.check.counting import Owners
from kvspec.check.coverage import Coverage, merged
from kvspec.descriptors.request import BlockTable
from kvspec.engines.group import KVCacheGroup
from kvspec.memory.rank_cache import RankCache, Region
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Ints

Contents = tuple[Ints, Ints]
"""First addresses, and lengths in bytes."""


@attrs.frozen(eq=False, slots=False)
class Places:
    """Where the rank of *cache* keeps what the blocks of *tables*, by group, hold.

    *only*: the layers that are looked at; all unless given.
    """

    owners: Owners
    cache: RankCache
    tables: Mapping[str, BlockTable]
    only: frozenset[str] | None = None

    @property
    def rank(self) -> RankId:
        """Whose places these are."""
        return self.cache.rank

    @cached_property
    def layers(self) -> dict[str, KVCacheGroup]:
        """The layers that the rank holds and that are looked at, and the group of each."""
        groups, only = self.owners.engine.groups, self.only
        return {
            layer: group
            for group in groups
            for layer in self.owners.layers(group, self.rank)
            if only is None or layer in only
        }

    @cached_property
    def regions(self) -> dict[tuple[str, str], Region]:
        """The regions of its cache, by layer and part."""
        return {(each.layer, each.part): each for each in self.cache.regions}

    def unit_stride(self, layer: str, part: Part) -> int:
        """Return the bytes from one unit of *part* to the next; 0 where the rank has none."""
        region = self.regions.get((layer, part.name))
        return 0 if region is None else region.unit_stride

    def chunk_bytes(self, layer: str, part: Part) -> int:
        """Return the bytes of one chunk of *part*'s contents; 0 where the rank has none."""
        region = self.regions.get((layer, part.name))
        return 0 if region is None else region.chunk_bytes

    def chunk_offset(self, layer: str, part: Part, byte: int) -> int:
        """Return how far a *byte* lies from where its content begins; 0 where there is none."""
        region = self.regions.get((layer, part.name))
        return 0 if region is None else region.chunk_offset(byte)

    def units(self, group: KVCacheGroup, part: Part) -> range:
        """Return the model's units of *part* that the rank holds."""
        return self.owners.units(group, part, self.rank)

    def virtual_block(self, group: KVCacheGroup) -> int:
        """Return how many positions one block of the table stands for."""
        return self.owners.virtual_block(group)

    def positions(self, group: KVCacheGroup, block: Ints) -> Ints:
        """Return which positions each *block* of the table holds, [blocks, tokens of a block].

        They are counted from the table's first token: those of a table that begins late may need
        more than 64 bits otherwise.
        """
        stored = self.owners.stored(group, self.rank)
        return block[:, None] * self.virtual_block(group) + stored

    def stores(self, group: KVCacheGroup, token: int) -> bool:
        """Return whether the rank stores the position *token*, if any block does."""
        return token % self.virtual_block(group) in self.owners.stored(group, self.rank)

    def rows(self, group: KVCacheGroup, region: Region, part: Part, tokens: Ints) -> Ints:
        """Return where unit 0 lies of each row of *region* that begins with a token."""
        table, stored = self.tables[group.name], self.owners.stored(group, self.rank)
        block, place = np.divmod(tokens - table.first_token, self.virtual_block(group))
        token = np.minimum(np.searchsorted(stored, place), len(stored) - 1)
        inside = (stored[token] == place) & (block >= 0) & (block < len(table.block_ids))
        ids = np.append(table.block_ids, -1)[np.where(inside, block, -1)]
        inside = self._in_pool(group, region, ids)
        kernel_block, token = np.divmod(token, group.memory_block_size)
        blocks = np.where(inside, ids, 0) * group.kernel_blocks_per_block + kernel_block
        states = token // part.tokens_per_state * region.state_stride
        return np.where(inside, region.base + blocks * region.block_stride + states, -1)

    def states(self, group: KVCacheGroup, region: Region, token: int, rows: Ints) -> Ints:
        """Return where unit 0 lies of each of a state's *rows*, after the last *token*."""
        block = self._state_block(group, token)
        inside = self._in_pool(group, region, block)
        states = region.base + np.where(inside, block, 0) * region.block_stride
        return np.where(inside, states + rows * region.state_stride, -1)

    def written(self, group: KVCacheGroup, part: Part, wanted: range) -> Ints:
        """Return the ids of the blocks into which the *expected* positions of *part* go."""
        table = self.tables[group.name]
        if not part.per_token:
            return self._state_block(group, wanted.stop - 1)
        positions = self.positions(group, np.arange(len(table.block_ids)))
        low, high = (edge - table.first_token for edge in (wanted.start, wanted.stop))
        return table.block_ids[((positions >= low) & (positions < high)).any(1)]

    def contents(
        self, group: KVCacheGroup, regions: Iterable[tuple[Region, int]], ids: Ints
    ) -> Iterator[Contents]:
        """Yield what blocks *ids* of *group* hold of regions, of each its first so many rows.

        Blocks of one stride repeat what the first of them holds.
        """
        same_strides: dict[tuple[int, int], list[tuple[Region, int]]] = {}
        for region, rows in regions:
            same_strides.setdefault((region.block_stride, region.num_blocks), []).append(
                (region, rows)
            )
        for some in same_strides.values():
            start, length = merged(
                *map(np.concatenate, zip(*starmap(_first_block, some), strict=True))
            )
            known = np.unique(ids[self._in_pool(group, some[0][0], ids)])[:, None]
            block = (
                known * group.kernel_blocks_per_block + np.arange(group.kernel_blocks_per_block)
            ).ravel()
            first = block[:, None] * some[0][0].block_stride
            yield (start + first).ravel(), np.tile(length, len(block))

    @cached_property
    def own(self) -> Coverage:
        """Every byte of the request's own blocks, whatever token it is of."""
        found: list[Contents] = []
        for group in self.owners.engine.groups:
            if group.name in self.tables:
                regions = (each for each in self.cache.regions if each.group == group.name)
                ids = self.tables[group.name].block_ids
                found += self.contents(group, ((each, each.states) for each in regions), ids)
        return covered(found)

    def _in_pool(self, group: KVCacheGroup, region: Region, ids: Ints) -> npt.NDArray[np.bool_]:
        """Return which ids of a table are blocks of the pool; a null one is none."""
        inside = (ids >= 0) & (ids < region.num_blocks // group.kernel_blocks_per_block)
        null = self.owners.engine.null_block
        return inside if null is None else inside & (ids != null)

    def _state_block(self, group: KVCacheGroup, token: int) -> Ints:
        table = self.tables[group.name]
        at = table.state_block(f"blocks of {group.name}", group.spec.block_size, token)
        return table.block_ids[at : at + 1]


def covered(contents: list[Contents]) -> Coverage:
    """Return the coverage of *contents*, each byte once."""
    return Coverage(*_merged(contents))


def _merged(contents: list[Contents]) -> Contents:
    none = np.empty((2, 0), np.int64)
    start, length = (np.concatenate(column) for column in zip(none, *contents, strict=True))
    return merged(start, length)


def _first_block(region: Region, rows: int) -> Contents:
    """Return what block 0 of *region* holds, of each unit its first *rows*."""
    units = np.arange(region.units)[:, None] * region.unit_stride
    chunks = np.arange(region.chunks)[:, None, None] * region.chunk_stride
    start = (region.base + chunks + units + np.arange(rows) * region.state_stride).ravel()
    return start, np.full(len(start), region.chunk_bytes)
