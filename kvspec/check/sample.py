"""Choose few blocks of a request whose check decides about all others.

Invariant: if the chosen blocks of the consumer are right, so are all blocks of the request.

How it works:
    The library's descriptors are sums of a run, which is an address in block 0, and a tile, which
    is an offset in some block. This is checked for all runs and all tiles, whatever the tokens:

    1. Each tile is in one block of the request's table, on both sides, and its offset is that
       block times a stride, plus an offset inside the block.
    2. Each run is inside block 0 of contents that have the same stride. So the run of a tile is
       inside the tile's own block, at the same place as in any other block.

    Contents of different blocks share no byte. So two blocks of the consumer are right or wrong
    together if they look alike: the same tiles move into them, from producer blocks at the same
    distance, and the same of their tokens are wanted, cached and live. One block of each look is
    checked byte by byte. For example, blocks have 4 tokens, 1 token is cached, and the request has
    18 tokens:

        block     0      1      2      3      4
        wanted    1-3    4-7    8-11   12-15  16-17
        look      a      b      b      b      c
        chosen    yes    yes    no     no     yes

    If one of the two checks fails, `of` returns None, and all blocks are checked byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from kvspec.check.places import Places
from kvspec.descriptors.request import BlockTable, Ids
from kvspec.descriptors.runs import Boundaries, coalesce
from kvspec.descriptors.selection import NumberedRows, Picked
from kvspec.descriptors.tiles import Tiles
from kvspec.engines.group import KVCacheGroup
from kvspec.ownership.parallel import RankId
from kvspec.ownership.tokens import Ints

# The place of each tile in the consumer's table, and the number of its look.
_Looks = tuple[Ints, Ints]


@attrs.frozen(eq=False)
class BlockSample:
    """Blocks of one consumer rank that stand for all blocks of the request.

    Attributes:
        places: The consumer rank. `Places.chosen` has the blocks.
        sources: The producer ranks. Their tables have only blocks that are read for these blocks.
    """

    places: Places
    sources: Mapping[RankId, Places]

    @staticmethod
    def of(
        places: Places, sources: Mapping[RankId, Places], picked: Mapping[RankId, Sequence[Picked]]
    ) -> BlockSample | None:
        """Return a sample of what is *picked*, or None if a tile or a run is not in its block.

        Args:
            places: The consumer rank.
            sources: The producer ranks that the consumer rank reads.
            picked: The numbered rows of each of them, with the tiles that move.
        """
        looks: dict[str, list[_Looks]] = {name: [] for name in places.tables}
        numbers = 0
        for rank, moves in picked.items():
            for numbered, tiles in moves:
                found = _looks(sources[rank], places, numbered, tiles)
                if found is None:
                    return None
                looks[numbered.edge.group].append((found[0], found[1] + numbers))
                numbers += len(tiles)
        chosen = {
            group.name: _chosen(places, group, looks[group.name])
            for group in places.owners.engine.groups
            if group.name in places.tables
        }
        sampled = attrs.evolve(places, chosen=chosen)
        own_sources = dict[RankId, Places]()
        for rank, moves in picked.items():
            tables = sources[rank].tables
            ids = {name: [table.block_ids[:0]] for name, table in tables.items()}
            for numbered, tiles in moves:
                blocks = _table_blocks(numbered, tiles)[0][0, _inside(sampled, numbered, tiles)]
                ids[numbered.edge.producer_group].append(blocks)
            kept = {name: _only(tables[name], np.concatenate(found)) for name, found in ids.items()}
            own_sources[rank] = attrs.evolve(sources[rank], tables=kept)
        return BlockSample(sampled, own_sources)

    def descriptors(self, picked: Sequence[Picked], boundaries: Boundaries) -> Ints:
        """Return the descriptors of *picked* that write into the chosen blocks, shape (n, 3)."""
        rows = [
            numbered.addresses(tiles.take(_inside(self.places, numbered, tiles)))
            for numbered, tiles in picked
        ]
        return coalesce([np.empty((0, 3), np.int64), *rows], boundaries).T


def _table_blocks(numbered: NumberedRows, tiles: Tiles) -> tuple[Ints, Ints]:
    """Return the blocks of both tables, and the kernel block in each, of shape (2, tiles)."""
    split = numbered.split_rows.token_split
    kernel_blocks = [
        [paging.kernel_blocks_per_block] for paging in (split.producer, split.consumer)
    ]
    return np.divmod(tiles.block, kernel_blocks)


def _inside(places: Places, numbered: NumberedRows, tiles: Tiles) -> Ints:
    """Return the indices of the *tiles* in chosen blocks."""
    group = numbered.edge.group
    ids = places.tables[group].block_ids[places.blocks(group)]
    return np.flatnonzero(np.isin(_table_blocks(numbered, tiles)[0][1], ids))


def _only(table: BlockTable, ids: Ids) -> BlockTable:
    """Return *table* without the blocks that are not among *ids*."""
    kept = np.where(np.isin(table.block_ids, ids), table.block_ids, -1)
    return BlockTable(kept, table.first_token)


def _looks(source: Places, places: Places, numbered: NumberedRows, tiles: Tiles) -> _Looks | None:
    """Return the place of each tile in the consumer's table, and a number below `len(tiles)`.

    None if a tile or a run is not in its block, or if a block has several places.
    """
    rows, split, edge = numbered.rows, numbered.split_rows.token_split, numbered.edge
    blocks, kernel_block = _table_blocks(numbered, tiles)
    begins, at = list[Ints](), blocks[1]
    for number, (side, name, layout, address, paging) in enumerate(
        (
            (source, edge.producer_group, rows.producer, rows.producer_address, split.producer),
            (places, edge.group, rows.consumer, rows.consumer_address, split.consumer),
        )
    ):
        group = side.owners.engine.group(name)
        block_stride = layout.block_stride * paging.kernel_blocks_per_block
        found = _places(side, name, blocks[number], alone=side is places)
        if found is None or not side.in_pool(group, block_stride, blocks[number]).all():
            return None
        # The library's own offsets are compared with those of the table's blocks.
        inner = kernel_block[number] * layout.block_stride + tiles.tile[number] * layout.tile_stride
        if (rows.offsets(tiles)[number] != blocks[number] * block_stride + inner).any():
            return None
        starts = (address[:, None] + np.unique(inner)).ravel()
        lengths = np.repeat(rows.length, len(starts) // len(address))
        if side.first_block(group, block_stride).first_outside(starts, lengths) is not None:
            return None
        at = found
        begins.append(side.tables[name].first_token + at * side.virtual_block(group))
    # All layers of a group have the same window.
    group = places.owners.engine.group(edge.group)
    spec = group.spec.of_layer(group.layers[0])
    first_own = source.first_own(source.owners.engine.group(edge.producer_group), spec)
    own = (begins[0] >= first_own).astype(np.int64)
    return at, _numbers([*kernel_block, *tiles.tile, own, begins[0] - begins[1]])


def _places(side: Places, name: str, ids: Ids, *, alone: bool) -> Ints | None:
    """Return the place of each of the block *ids* in its table, or None if one has no single place.

    If *alone*, no block may be in the table of another group that shares the memory.
    """
    table = side.tables[name]
    low, high = (table.ordered.searchsorted(ids, end) for end in ("left", "right"))
    shared = (group for groups in side.sharing if name in groups for group in groups - {name})
    others = (side.tables[group].block_ids for group in shared if group in side.tables)
    if (high - low != 1).any() or (alone and any(np.isin(ids, other).any() for other in others)):
        return None
    return table.block_ids.argsort(kind="stable")[low]


def _numbers(columns: Sequence[Ints]) -> Ints:
    """Return equal numbers for equal rows of *columns*, below the number of rows."""
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, index = np.unique(column, return_inverse=True)
        if len(values) > 1:
            # At most as many numbers as rows, so the product fits into 64 bits.
            number = np.unique(number * len(values) + index, return_inverse=True)[1]
    return number


def _chosen(places: Places, group: KVCacheGroup, looks: Sequence[_Looks]) -> Ints:
    """Return one place in the table of *group* for each look of its blocks."""
    count = len(places.tables[group.name].block_ids)
    if group.spec.is_ring or not all(part.per_token for part in group.own_parts):
        return np.arange(count)  # Few tiles move. Which ones depends on the last token.
    none = np.empty(0, np.int64)
    at, number = (
        np.concatenate([none, *columns]) for columns in zip((none, none), *looks, strict=True)
    )
    order = np.lexsort((number, at))
    at, number = at[order], number[order]
    tiles = np.bincount(at, minlength=count)
    limits = np.array(list(_limits(places, group)), np.int64).T
    chosen = [none]
    for size in np.unique(tiles).tolist():
        own = np.flatnonzero(tiles == size)
        look = number[tiles[at] == size].reshape(len(own), size)
        _, first = np.unique(np.column_stack([look, limits[own]]), axis=0, return_index=True)
        chosen.append(own[first])
    return np.sort(np.concatenate(chosen))


def _limits(places: Places, group: KVCacheGroup) -> Iterator[Ints]:
    """Yield arrays of one number for each block: which of its tokens are wanted, cached, live."""
    table, virtual = places.tables[group.name], places.virtual_block(group)
    start = table.first_token + np.arange(len(table.block_ids)) * virtual
    owners, request = places.owners, places.request
    specs = {id(spec): spec for spec in map(group.spec.of_layer, group.layers)}
    for spec in specs.values():
        wanted, first = owners.wanted(request, group, spec), owners.first_live(request, spec)
        for end in (wanted.start, wanted.stop, owners.cached(request, group, spec)):
            yield np.clip(end - start, 0, virtual)
        yield (start >= first // virtual * virtual).astype(np.int64)
