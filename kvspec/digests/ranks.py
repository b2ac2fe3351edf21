"""Digest the rows of a request that one rank holds.

Invariant: a digest covers the rows that a request moves, each once, at the places that the rank's
own block table gives them. `kvspec.digests.definition` defines the sums.

How it works:
    If two context ranks share the tokens, a block of the table is a *virtual block*: each of the
    two ranks stores half of its tokens in its own block. With an interleave of 2 tokens and blocks
    of 4 tokens, the virtual block has 8 tokens:

        token of the virtual block       0  1  2  3  4  5  6  7
        context rank 0 stores it as      0  1        2  3
        context rank 1 stores it as            0  1        2  3

    A block may consist of several kernel blocks. With kernel blocks of 2 tokens, the tokens 2 and 3
    of a block are the tokens 0 and 1 of its second kernel block. `token_places` returns the block
    of the table, the kernel block in it, and the token in the kernel block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import numpy as np

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.digests.regions import RegionRows, unit_sums
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance, mapping
from kvspec.memory.rank_cache import RankCache
from kvspec.memory.region import Region
from kvspec.ownership.part import Part
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.tokens import BlockCyclic, Ints
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan

__all__ = [
    "digest",
    "wanted",
]


@attrs.frozen
class Wanted:
    """The rows of one part of one layer that a digest covers.

    Attributes:
        tokens: Token positions.
        rows: Number of rows of a state, from its first row on. 0 if the rows are tokens.

    >>> Wanted(range(0, 100))
    Wanted(tokens=range(0, 100), rows=0)
    """

    tokens: range
    rows: int = 0


def wanted(plan: TransferPlan, request: TransferRequest) -> dict[tuple[str, str], Wanted]:
    """Return the rows that *request* moves, by layer and part. Both sides digest these rows.

    Args:
        plan: The transfer plan of the two engines.
        request: The request.

    Returns:
        The rows of each layer and part that moves.

    Raises:
        SpecError: If the request moves states at several positions: one digest covers one state.
    """
    instance("plan", plan, TransferPlan)
    if len(instance("request", request, TransferRequest).state_positions) > 1:
        expected = "one position (not yet: digests of several states)"
        raise SpecError("state_positions", request.state_positions, expected)
    return {
        (layer, part.name): want
        for edge in plan.edges
        for slice_ in edge.slices
        for layer, part, want in wanted_of(plan, request, edge, slice_)
    }


def wanted_of(
    plan: TransferPlan, request: TransferRequest, edge: Edge, one: TPTransferSlice
) -> Iterator[tuple[str, Part, Wanted]]:
    """Yield the layers, parts and rows that *request* moves by the slice *one* of *edge*."""
    specs, held = plan.pair_of(edge).specs, plan.producer.group(edge.producer_group).spec
    for layer in one.layers:
        states = {part.name: part.states for part in held.of_layer(layer).parts}
        for tokens in request.moves(edge.group, specs[layer]):
            for part in specs[layer].parts:
                if part.name in one.parts:
                    rows = 0 if part.per_token else min(part.states, states[part.name])
                    yield layer, part, Wanted(tokens, rows)


def digest(
    cache: RankCache,
    tables: Mapping[str, BlockTable],
    asked: Mapping[tuple[str, str], Wanted],
) -> dict[tuple[str, str, int, int], int]:
    """Return the digest of the rows of a request that one rank holds.

    The function reads host memory at the addresses of the *cache*. The caller must keep that
    memory allocated.

    Args:
        cache: The rank's cache.
        tables: The request's block table of each of the engine's groups.
        asked: The rows, as `wanted` returned them.

    Returns:
        One sum for each layer, part, unit of the model and context rank.

    Raises:
        SpecError: If a region is not in host memory, or a table lacks a block.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig, RankId
    >>> from kvspec import allocate
    >>> from kvspec.check.differences import differing
    >>> spec = MLAAttentionSpec(block_size=2, head_size=8, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["l"], spec=spec)
    >>> engine = EngineSpec(groups=[group], parallel=ParallelConfig())
    >>> cache, storage = allocate(engine, RankId(), num_blocks=4)
    >>> storage["full"][:16], storage["full"][48:] = 7, 7  # block 0 and block 3 become equal
    >>> asked = {("l", "latent"): Wanted(range(0, 2))}
    >>> sums = [digest(cache, {"full": BlockTable([block])}, asked) for block in (0, 3, 1)]
    >>> differing([sums[0]], [sums[1]]), differing([sums[0]], [sums[2]])
    ([], [('l', 'latent', 0)])
    """
    sums: dict[tuple[str, str, int, int], int] = {}
    for region, units, rows in wanted_rows(cache, tables, asked):
        group = cache.engine.group(region.group)
        per_token = cache.part_of(region)[0].per_token
        context = cache.engine.context(group, cache.rank).rank if per_token else 0
        total = np.zeros(len(units), np.uint64)
        for some in unit_sums(region, range(len(units)), units.start, rows):
            total += some
        for unit, number in zip(units, total.tolist(), strict=True):
            sums[region.layer, region.part, unit, context] = number
    return sums


def wanted_rows(
    cache: RankCache,
    tables: Mapping[str, BlockTable],
    asked: Mapping[tuple[str, str], Wanted],
) -> Iterator[tuple[Region, range, RegionRows]]:
    """Yield each region of the rank that *asked* contains, with its units and wanted rows.

    The arguments and errors are those of `digest`.
    """
    for region in instance("cache", cache, RankCache).regions:
        want = mapping("asked", asked, "(layer, part) to Wanted").get((region.layer, region.part))
        if want is not None:
            part, units = readable(cache, region)
            yield region, units, rows_of(cache, region, part, tables, want)


def readable(cache: RankCache, region: Region) -> tuple[Part, range]:
    """Return the part and the model's units of a *region*. It must be in host memory."""
    if region.memory_type != "DRAM":
        raise SpecError("memory_type", region.memory_type, "DRAM: copy the blocks to it first")
    return cache.part_of(region)


def rows_of(
    cache: RankCache,
    region: Region,
    part: Part,
    tables: Mapping[str, BlockTable],
    want: Wanted,
) -> RegionRows:
    """Return each wanted row of *region*."""
    group = cache.engine.group(region.group)
    table = _table(tables, group.name)
    if part.per_token:
        rows = _token_rows(cache, group, part, table, want)
    else:
        rows = _state_rows(group, part, table, want)
    if len(rows) and not 0 <= rows.block.min() <= rows.block.max() < region.num_blocks:
        num_blocks = region.num_blocks // group.kernel_blocks_per_block
        expected = f"ids of a pool of {num_blocks} blocks"
        raise SpecError(f"tables[{group.name!r}]", table.block_ids.tolist(), expected)
    return rows


def _table(tables: Mapping[str, BlockTable], group: str) -> BlockTable:
    table = mapping("tables", tables, "group names to block tables").get(group)
    if not isinstance(table, BlockTable):
        raise SpecError("tables", sorted(tables, key=repr), f"a block table for group {group!r}")
    return table


def token_places(
    group: KVCacheGroup, context: BlockCyclic, table: BlockTable, positions: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return where a rank keeps *positions*, all of which it owns and the *table* holds.

    Args:
        group: The group of the table.
        context: The rank's share of the tokens.
        table: The rank's block table of the request.
        positions: Token positions.

    Returns:
        For each position the index of its block in the table, the kernel block in that block, and
        the token in the kernel block.

    >>> from kvspec import MLAAttentionSpec
    >>> spec = MLAAttentionSpec(block_size=4, head_size=8, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["l"], spec=spec, kernel_block_size=2)
    >>> context = BlockCyclic(rank=1, size=2, interleave=2)
    >>> positions = np.array([2, 3, 6, 7, 10])
    >>> places = token_places(group, context, BlockTable([5, 9]), positions)
    >>> [column.tolist() for column in places]
    [[0, 0, 0, 0, 1], [0, 0, 1, 1, 0], [0, 1, 0, 1, 0]]
    """
    local = positions
    # This repeats `BlockCyclic.local` on purpose: the descriptor rows are made with that method.
    if context.size > 1:
        rounds, rest = np.divmod(positions, context.interleave * context.size)
        local = rounds * context.interleave + rest % context.interleave
    local = local - table.first_token // context.size
    if group.spec.is_ring:
        return np.zeros_like(local), np.zeros_like(local), local % group.spec.block_size
    index, token = np.divmod(local, group.spec.block_size)
    kernel_block, token = np.divmod(token, group.memory_block_size)
    return index, kernel_block, token


def _token_rows(
    cache: RankCache, group: KVCacheGroup, part: Part, table: BlockTable, want: Wanted
) -> RegionRows:
    """Return the rows of wanted tokens that the rank holds."""
    row_tokens, context = part.tokens_per_state, cache.engine.context(group, cache.rank)
    first = want.tokens.start // row_tokens * row_tokens
    size = cache.engine.virtual_block(group)
    table.check_start(f"tables[{group.name!r}]", size)
    held = table.tokens(size)
    if want.tokens and not held.start <= first < want.tokens.stop <= held.stop:
        tokens = f"{want.tokens.start}..{want.tokens.stop - 1}"
        raise SpecError(f"tables[{group.name!r}]", held, f"blocks for tokens {tokens}")
    positions = np.arange(first, want.tokens.stop, row_tokens, dtype=np.int64)
    positions = positions[context.owns(positions)]
    index, kernel_block, token = token_places(group, context, table, positions)
    block = table.block_ids[index] * group.kernel_blocks_per_block + kernel_block
    return RegionRows(block, token // row_tokens, positions)


def _state_rows(group: KVCacheGroup, part: Part, table: BlockTable, want: Wanted) -> RegionRows:
    """Return the first rows of a state."""
    field = f"tables[{group.name!r}]"
    slot = table.state_block(field, group.spec.block_size, want.tokens.start)
    row = np.arange(min(part.states, want.rows))
    return RegionRows(np.full(len(row), table.block_ids[slot]), row, row)
