"""Compute where one rank keeps the contents of a request.

Invariant: a place follows from the rank's own block table and its regions alone. A content that no
block of the table holds has no place, and its address is -1.

How it works:
    `Places` computes a place from `Owners.stored`, which can be counted independently of the
    library (`kvspec.check.ownership`). The descriptor table and the digest (`kvspec.digests.ranks`)
    compute places themselves. A fault in one of them is found, because the others differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.check.coverage import Coverage, merged
from kvspec.check.ownership import Owners
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.descriptors.table import sharing
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.memory.rank_cache import RankCache, Region
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Ints
from kvspec.specs import LayerSpec

# First addresses, and lengths in bytes.
AddressRanges = tuple[Ints, Ints]


@attrs.frozen(eq=False, slots=False)
class Places:
    """The places of one rank's contents.

    Attributes:
        owners: Source of the rank's layers, units and positions.
        cache: The rank's cache.
        reader: The consumer engine. Its layers decide which positions are live.
        request: The request.
        excluded: Names of the layers that do not move.
        tables: The request's block table of each group.
        only: Names of the layers to look at. All layers by default.
        chosen: Places in the table of each group to look at. All by default.
    """

    owners: Owners
    cache: RankCache
    reader: EngineSpec
    request: TransferRequest
    excluded: frozenset[str]
    tables: Mapping[str, BlockTable]
    only: frozenset[str] | None = None
    chosen: Mapping[str, Ints] | None = None

    @property
    def rank(self) -> RankId:
        """The rank."""
        return self.cache.rank

    @cached_property
    def layers(self) -> dict[str, KVCacheGroup]:
        """The group of each layer that the rank holds and that the check looks at."""
        groups, only = self.owners.engine.groups, self.only
        return {
            layer: group
            for group in groups
            for layer in self.owners.layers(group, self.rank)
            if only is None or layer in only
        }

    @cached_property
    def regions(self) -> dict[tuple[str, str], Region]:
        """The regions of the cache, by layer and part."""
        return {(region.layer, region.part): region for region in self.cache.regions}

    def blocks(self, group: str) -> Ints:
        """Return the places in the table of *group* to look at."""
        if self.chosen is not None:
            return self.chosen[group]
        return np.arange(len(self.tables[group].block_ids))

    def unit_stride(self, layer: str, part: Part) -> int:
        """Return the bytes from one unit of *part* to the next, or 0 if the rank has no region."""
        region = self.regions.get((layer, part.name))
        return 0 if region is None else region.unit_stride

    def shape(self, layer: str, part: Part) -> tuple[object, ...]:
        """Return all that decides where the rank keeps *part* of *layer*, except its address."""
        region = self.regions.get((layer, part.name))
        if region is None:
            return (layer in self.layers,)
        strides = region.block_stride, region.unit_stride, region.state_stride
        counts = region.num_blocks, region.units, region.states
        return (layer in self.layers, *strides, *counts, region.shape)

    def chunks(self, layer: str, part: Part) -> int:
        """Return the number of chunks of a content of *part*, or 1 if the rank has no region."""
        region = self.regions.get((layer, part.name))
        return 1 if region is None else region.chunks

    def units(self, group: KVCacheGroup, part: Part) -> range:
        """Return the numbers of the model's units of *part* that the rank holds."""
        return self.owners.units(group, part, self.rank)

    def stored_units(self, group: KVCacheGroup, layer: str, part: Part) -> range:
        """Return the units of *part* that have memory: all that the rank holds, or the first ones.

        If `Counted` counts more units than the library planned memory for, the others have no
        address. Other contents lie behind the memory of the last unit.
        """
        region = self.regions.get((layer, part.name))
        return self.units(group, part)[: 0 if region is None else region.units]

    def virtual_block(self, group: KVCacheGroup) -> int:
        """Return the number of positions of one block of the table."""
        return self.owners.virtual_block(group)

    def positions(self, group: KVCacheGroup, block: Ints) -> Ints:
        """Return the positions in each *block* of the table, of shape (blocks, tokens of a block).

        They count from the table's first token. Absolute positions might need more than 64 bits.
        """
        stored = self.owners.stored(group, self.rank)
        return block[:, None] * self.virtual_block(group) + stored

    def stores(self, group: KVCacheGroup, token: int) -> bool:
        """Return whether the rank stores the position *token*."""
        return token % self.virtual_block(group) in self.owners.stored(group, self.rank)

    def rows(self, group: KVCacheGroup, region: Region, part: Part, tokens: Ints) -> Ints:
        """Return the address of unit 0 of each row of *region*, by the first token of the row."""
        table, stored = self.tables[group.name], self.owners.stored(group, self.rank)
        block, offset = np.divmod(tokens - table.first_token, self.virtual_block(group))
        if group.spec.is_ring:
            block = np.zeros_like(block)  # A request has one block.
        token = np.minimum(np.searchsorted(stored, offset), len(stored) - 1)
        # `searchsorted` returns a neighbour if the rank does not store the token.
        inside = (stored[token] == offset) & (block >= 0) & (block < len(table.block_ids))
        # The last id, -1, is in no pool.
        ids = np.append(table.block_ids, -1)[np.where(inside, block, -1)]
        inside = self._in_pool(group, region, ids)
        kernel_block, token = np.divmod(token, group.memory_block_size)
        blocks = np.where(inside, ids, 0) * group.kernel_blocks_per_block + kernel_block
        states = token // part.tokens_per_state * region.state_stride
        return np.where(inside, region.base + blocks * region.block_stride + states, -1)

    def states(self, group: KVCacheGroup, region: Region, token: int, rows: Ints) -> Ints:
        """Return the address of unit 0 of each of the *rows* of the state after *token*."""
        block = self._state_block(group, token)
        inside = self._in_pool(group, region, block)
        states = region.base + np.where(inside, block, 0) * region.block_stride
        return np.where(inside, states + rows * region.state_stride, -1)

    def usable(self, group: KVCacheGroup, part: Part, wanted: range, first_live: int) -> Ints:
        """Return the ids of the blocks of *part* that are the request's own.

        A state has one block, if it is *wanted*, and a ring has the first one. Tokens have the
        block of the *first live* one and all later ones, also after the last token. Earlier blocks
        may be another request's by now.
        """
        table = self.tables[group.name]
        if not part.per_token:
            return self._state_block(group, wanted.stop - 1) if wanted else table.block_ids[:0]
        if group.spec.is_ring:
            return table.block_ids[:1]
        blocks = self.blocks(group.name)
        first = (first_live - table.first_token) // self.virtual_block(group)
        ids = table.block_ids[blocks[blocks >= first]]
        if self.owners.engine.null_block is None:
            # An id that occurs twice stands for no block.
            once, times = np.unique(table.block_ids, return_counts=True)
            ids = ids[np.isin(ids, once[times == 1])]
        return ids

    def contents(
        self, group: KVCacheGroup, regions: Iterable[tuple[Region, int]], ids: Ints
    ) -> Iterator[AddressRanges]:
        """Yield the address ranges of all contents in the blocks *ids* of *group*.

        *regions* are pairs of a region and a number of rows. Only so many rows of each unit are
        included, from the first on. Adjacent contents are merged into one range.
        """
        # Regions with equal block strides repeat together. So the contents of their first block
        # are merged once, and shifted to each block.
        same_strides: dict[tuple[int, int], list[tuple[Region, int]]] = {}
        for region, rows in regions:
            key = region.block_stride, region.num_blocks
            same_strides.setdefault(key, []).append((region, rows))
        for members in same_strides.values():
            region = members[0][0]
            start, length = _first_blocks(members)
            pool_ids = np.unique(ids[self._in_pool(group, region, ids)])[:, None]
            split = group.kernel_blocks_per_block
            blocks = (pool_ids * split + np.arange(split)).ravel()
            yield (
                (start + blocks[:, None] * region.block_stride).ravel(),
                np.tile(length, len(blocks)),
            )

    @cached_property
    def sharing(self) -> tuple[frozenset[str], ...]:
        """The sets of groups whose blocks share memory on the rank."""
        return sharing(self.cache)

    def first_block(self, group: KVCacheGroup, block_stride: int) -> Coverage:
        """Return the bytes of block 0 of a group's table, of regions with this *block_stride*."""
        key = group.name, block_stride
        if key not in self._first_block:
            split, contents = group.kernel_blocks_per_block, list[AddressRanges]()
            regions = self._regions(group, block_stride)
            if regions:
                start, length = _first_blocks([(region, region.states) for region in regions])
                steps = np.arange(split)[:, None] * (block_stride // split)
                contents.append(((start + steps).ravel(), np.tile(length, split)))
            self._first_block[key] = covered(contents)
        return self._first_block[key]

    def in_pool(self, group: KVCacheGroup, block_stride: int, ids: Ints) -> npt.NDArray[np.bool_]:
        """Return which *ids* are blocks of each region with this *block_stride*."""
        regions = self._regions(group, block_stride)
        smallest = min(regions, key=lambda region: region.num_blocks, default=None)
        return ids < 0 if smallest is None else self._in_pool(group, smallest, ids)

    def _regions(self, group: KVCacheGroup, block_stride: int) -> list[Region]:
        """Return the regions of *group* whose table blocks are *block_stride* bytes apart."""
        split = group.kernel_blocks_per_block
        return [
            region
            for region in self.cache.regions
            if region.group == group.name
            and region.layer in self.layers
            and region.block_stride * split == block_stride
        ]

    def first_own(self, group: KVCacheGroup, spec: LayerSpec) -> int:
        """Return the first token of the block of the first token that layers of *spec* read."""
        first = self.owners.first_live(self.request, spec)
        virtual = self.virtual_block(group)
        return first // virtual * virtual

    @cached_property
    def _first_block(self) -> dict[tuple[str, int], Coverage]:
        return {}

    @cached_property
    def own(self) -> Coverage:
        """The bytes that may be read: all contents in the request's own blocks, or those chosen.

        The consumer's layers decide which blocks of a producer are own.
        """
        own: list[AddressRanges] = []
        for group in self.owners.engine.groups:
            layers = self.layers.keys() & set(group.layers) - self.excluded
            if group.name not in self.tables:
                continue
            by_spec: dict[int, tuple[LayerSpec, KVCacheGroup, set[str]]] = {}
            for layer in layers & self.reader.homes.keys():
                home = self.reader.homes[layer]
                spec = home.spec.of_layer(layer)
                by_spec.setdefault(id(spec), (spec, home, set()))[2].add(layer)
            for spec, home, some in by_spec.values():
                first = self.owners.first_live(self.request, spec)
                every: tuple[range, ...] = (range(first, self.request.total(spec)),)
                if not spec.parts[0].per_token:
                    every = self.owners.moves(self.request, home, spec)
                regions = [region for region in self.cache.regions if region.layer in some]
                for last in every:
                    ids = self.usable(group, spec.parts[0], last, first)
                    rows = ((region, region.states) for region in regions)
                    own += self.contents(group, rows, ids)
        return covered(own)

    def _in_pool(self, group: KVCacheGroup, region: Region, ids: Ints) -> npt.NDArray[np.bool_]:
        """Return which *ids* are blocks of the pool. The null block is not one of them."""
        inside = (ids >= 0) & (ids < region.num_blocks // group.kernel_blocks_per_block)
        null = self.owners.engine.null_block
        return inside if null is None else inside & (ids != null)

    def _state_block(self, group: KVCacheGroup, token: int) -> Ints:
        table = self.tables[group.name]
        # This repeats `BlockTable.state_block` on purpose: the rows of states are made with it.
        slot = len(table.block_ids) == 1 and table.first_token == 0
        at = 0 if slot else (token - table.first_token) // group.spec.block_size
        return table.block_ids[at : at + 1]


def covered(contents: list[AddressRanges]) -> Coverage:
    """Return the coverage of *contents*. Each byte counts once, even if contents overlap."""
    none = np.empty((2, 0), np.int64)  # `concatenate` needs at least one array
    start, length = (np.concatenate(column) for column in zip(none, *contents, strict=True))
    return Coverage(*merged(start, length))


def _first_blocks(regions: Sequence[tuple[Region, int]]) -> AddressRanges:
    """Return the merged contents of block 0 of each region: the first rows of each unit."""
    same_shapes: dict[tuple[int, ...], list[int]] = {}
    examples: dict[tuple[int, ...], tuple[Region, int]] = {}
    for region, rows in regions:
        counts = region.units, region.states, region.chunks, region.chunk_bytes, rows
        key = (*counts, region.unit_stride, region.state_stride, region.chunk_stride)
        examples.setdefault(key, (region, rows))
        same_shapes.setdefault(key, []).append(region.base)
    starts, lengths = list[Ints](), list[Ints]()
    for shape, bases in same_shapes.items():
        region, rows = examples[shape]
        offsets = region.addresses()[:, :rows].ravel() - region.base
        starts.append((np.array(bases)[:, None] + offsets).ravel())
        lengths.append(np.full(starts[-1].shape, region.chunk_bytes))
    return merged(np.concatenate(starts), np.concatenate(lengths))
