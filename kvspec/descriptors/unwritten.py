"""Unwritten ranges: the bytes of a request's own blocks that a transfer leaves as they were.

Invariant: each byte that one producer rank could write on one consumer rank is either written,
cached or unwritten. An engine can zero the unwritten bytes, so that a later query never reads what
an earlier request left there.

How it works:
    The consumer's blocks have 4 tokens. A request of 10 tokens has blocks 7, 2 and 5, and 4 tokens
    are cached. The last block moves only up to token 9:

        token      0  1  2  3 |  4  5  6  7 |  8  9 10 11
        block      7          |  2          |  5
                   cached     |  written    |  written, then unwritten: 10 and 11
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.descriptors.runs import coalesce
from kvspec.descriptors.selection import Picked
from kvspec.memory.rank_cache import RankCache
from kvspec.memory.region import Region
from kvspec.ownership.part import Part
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan


@attrs.frozen(eq=False)
class CachePair:
    """Two ranks of a plan with their memory, and the layers to include (None: all)."""

    plan: TransferPlan
    producer: RankCache
    consumer: RankCache
    layers: frozenset[str] | None


def unwritten_ranges(
    pair: CachePair, request: TransferRequest, picked: Iterable[Picked]
) -> npt.NDArray[np.uint64]:
    """Return the bytes of the consumer's blocks that no descriptor writes.

    Args:
        pair: The two ranks.
        request: The request.
        picked: The numbered rows of the two ranks, each with the tiles that move.

    Returns:
        Address and length of each range, ascending by address, uint64 of shape (m, 2).
    """
    contents = list(_not_required(pair, request))
    # Few blocks have bytes that need not move. The others may have millions of descriptors.
    blocks = np.unique(np.concatenate([np.empty(0, np.int64), *(found[0] for found in contents)]))
    written = [np.empty((0, 3), np.int64)]
    for numbered, tiles in picked:
        kernel_blocks = numbered.split_rows.token_split.consumer.kernel_blocks_per_block
        inside = np.isin(tiles.block[1] // kernel_blocks, blocks)
        written.append(numbered.addresses(tiles.take(np.flatnonzero(inside))))
    _, start, length = np.concatenate(written).T
    order = np.argsort(start)
    start, stop = start[order], (start + length)[order]
    ranges = [np.empty((0, 3), np.int64)]
    for _, address, content in contents:
        # A whole tile also writes its dead tokens. Leave out the contents that were written.
        before = np.searchsorted(start, address, "right") - 1
        was_written = before >= 0
        was_written[was_written] = address[was_written] < stop[before[was_written]]
        unwritten = address[~was_written]
        ranges.append(np.column_stack([unwritten, unwritten, np.full(len(unwritten), content)]))
    # `coalesce` joins what touches on two sides. Here the consumer is both.
    boundaries = pair.consumer.boundaries
    return coalesce(ranges, (boundaries, boundaries))[1:].T.view(np.uint64)


def _not_required(pair: CachePair, request: TransferRequest) -> Iterator[tuple[Ints, Ints, int]]:
    """Yield contents that neither must move nor are cached: blocks of the table, addresses, length.

    Some of them move nevertheless: the dead tokens of a tile that moves whole.
    """
    known: dict[object, tuple[Ints, Ints]] = {}
    for edge, tp_slice, layer, part in _parts(pair):
        region = pair.consumer.region(layer, part.name)
        # Most layers have the same rows.
        shape = part.tokens_per_state, part.states, region.states, region.num_blocks
        key = id(edge), id(tp_slice), shape
        if key not in known:
            rows = _token_rows if part.per_token else _state_rows
            known[key] = rows(pair, request, edge, tp_slice, region, part)
        block, row = known[key]
        local = tp_slice.local_range
        first_rows = region.addresses()[local.start : local.stop, 0]
        moved = block * region.block_stride + row * region.state_stride
        kernel_blocks = pair.consumer.engine.group(edge.group).kernel_blocks_per_block
        addresses = (moved[:, None, None] + first_rows).ravel()
        yield block // kernel_blocks, addresses, region.chunk_bytes


def _parts(pair: CachePair) -> Iterator[tuple[Edge, TPTransferSlice, str, Part]]:
    """Yield the parts that move between the two ranks, with their edge, slice and layer."""
    for edge in pair.plan.between(pair.producer.rank, pair.consumer.rank):
        specs = pair.plan.pair_of(edge).specs
        for tp_slice in edge.slices:
            for layer in tp_slice.layers:
                if pair.layers is None or layer in pair.layers:
                    for part in specs[layer].parts:
                        if part.name in tp_slice.parts:
                            yield edge, tp_slice, layer, part


def _token_rows(
    pair: CachePair,
    request: TransferRequest,
    edge: Edge,
    tp_slice: TPTransferSlice,
    region: Region,
    part: Part,
) -> tuple[Ints, Ints]:
    """Return block and row of each state that neither must move nor is cached, in *region*."""
    positions = _positions_not_required(pair, request, edge, tp_slice, part.tokens_per_state)
    engine, tokens_per_state = pair.consumer.engine, part.tokens_per_state
    group, table = engine.group(edge.group), request.table("consumer", edge.group)
    context = engine.context(group, pair.consumer.rank)
    local = context.local(positions) - table.first_token // context.size
    index, token = np.divmod(local, group.spec.block_size)
    kernel_block, token = np.divmod(token, group.memory_block_size)
    ids = table.block_ids[index]
    own = _own_blocks(ids, table, engine.null_block, region, group.kernel_blocks_per_block)
    return ids[own] * group.kernel_blocks_per_block + kernel_block[own], token[
        own
    ] // tokens_per_state


def _positions_not_required(
    pair: CachePair,
    request: TransferRequest,
    edge: Edge,
    tp_slice: TPTransferSlice,
    tokens_per_state: int,
) -> Ints:
    """Return the first positions of states that both ranks own and that need not move.

    The positions begin in the block of the first live token. Earlier blocks may belong to another
    request by now.
    """
    engine, table = pair.consumer.engine, request.table("consumer", edge.group)
    group, spec = engine.group(edge.group), pair.plan.pair_of(edge).specs[tp_slice.layers[0]]
    virtual_block = engine.virtual_block(group)
    wanted, tokens = request.wanted(group.name, spec), table.tokens(virtual_block)
    live_block = spec.live_tokens(request.total(spec)).start // virtual_block * virtual_block
    # A state with any cached token counts as cached, so round up.
    cached = -(-request.cached(group.name, spec) // tokens_per_state) * tokens_per_state
    first = max(live_block, tokens.start, cached)
    positions = np.arange(first, max(tokens.stop, first), tokens_per_state, dtype=np.int64)
    keep = tp_slice.stripe.holds(positions // virtual_block)
    for cache, name in ((pair.producer, edge.producer_group), (pair.consumer, edge.group)):
        keep &= cache.engine.context(cache.engine.group(name), cache.rank).owns(positions)
    keep &= (positions + tokens_per_state <= wanted.start) | (positions >= wanted.stop)
    return positions[keep]


def _own_blocks(
    ids: Ints, table: BlockTable, null_block: int | None, region: Region, kernel_blocks: int
) -> npt.NDArray[np.bool_]:
    """Return which of *ids* are blocks of this request alone.

    A repeated id, the null block and an id outside the memory are placeholders. A table may contain
    placeholders where nothing moves, because `Tables.check` validates only the blocks that move.
    """
    different, times = np.unique(table.block_ids, return_counts=True)
    own = (ids >= 0) & (ids < region.num_blocks // kernel_blocks)
    own &= np.isin(ids, different[times == 1])
    if null_block is not None:
        own &= ids != null_block
    return own


def _state_rows(
    pair: CachePair,
    request: TransferRequest,
    edge: Edge,
    tp_slice: TPTransferSlice,
    region: Region,
    part: Part,
) -> tuple[Ints, Ints]:
    """Return block and row of each row of a recurrent state that neither moves nor is cached.

    In the block of the state, these are the rows that only the consumer has. Blocks that begin
    behind all tokens have no state yet, so these are all of their rows.
    """
    engine, table = pair.consumer.engine, request.table("consumer", edge.group)
    group, ids = engine.group(edge.group), table.block_ids
    size, wanted = group.spec.block_size, request.wanted(group.name, group.spec)
    tokens = max(request.num_tokens, request.cached(group.name, group.spec))
    first_token = table.first_token
    if len(ids) == 1 and not first_token:  # The only block has the state after any token.
        first_token = max(tokens - 1, 0) // size * size
    starts = first_token + np.arange(len(ids)) * size
    first_row = np.where(starts < tokens, region.states, 0)
    if wanted:
        first_row[starts // size == wanted.start // size] = part.states
    own = _own_blocks(ids, table, engine.null_block, region, group.kernel_blocks_per_block)
    own &= tp_slice.stripe.holds(starts // engine.virtual_block(group))
    index, row = np.nonzero(own[:, None] & (np.arange(region.states) >= first_row[:, None]))
    return ids[index], row
