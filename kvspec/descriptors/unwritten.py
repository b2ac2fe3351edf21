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


@attrs.frozen(eq=False)
class UnwrittenRows:
    """Parts of which a request leaves the same rows of the same blocks unwritten.

    Attributes:
        edge: The edge that moves the parts.
        tp_slice: The slice of the edge.
        region: The consumer's region of any of the parts.
        part: That part.
        runs: For each block stride and state stride, the runs of the first row of block 0: address
            twice and length, shape (3, n). Runs that touch are joined.
    """

    edge: Edge
    tp_slice: TPTransferSlice
    region: Region
    part: Part
    runs: dict[tuple[int, int], Ints]


def unwritten_rows(pair: CachePair) -> list[UnwrittenRows]:
    """Return the parts that move between two ranks. They depend on no request."""
    boundaries = (pair.consumer.boundaries,) * 2
    alike: dict[object, tuple[UnwrittenRows, dict[tuple[int, int], list[Ints]]]] = {}
    for edge, tp_slice, layer, part in _parts(pair):
        region = pair.consumer.region(layer, part.name)
        shape = part.tokens_per_state, part.states, region.states, region.num_blocks
        key = id(edge), id(tp_slice), shape
        _, rows = alike.setdefault(key, (UnwrittenRows(edge, tp_slice, region, part, {}), {}))
        local = tp_slice.local_range
        start = region.addresses()[local.start : local.stop, 0].ravel()
        run = np.column_stack([start, start, np.full(len(start), region.chunk_bytes)])
        rows.setdefault((region.block_stride, region.state_stride), []).append(run)
    for parts, rows in alike.values():
        parts.runs.update({strides: coalesce(runs, boundaries) for strides, runs in rows.items()})
    return [parts for parts, _ in alike.values()]


def unwritten_ranges(
    pair: CachePair,
    parts: Iterable[UnwrittenRows],
    request: TransferRequest,
    picked: Iterable[Picked],
) -> npt.NDArray[np.uint64]:
    """Return the bytes of the consumer's blocks that no descriptor writes.

    Args:
        pair: The two ranks.
        parts: The parts that move between them.
        request: The request.
        picked: The numbered rows that may write dead tokens, each with the tiles that move.

    Returns:
        Address and length of each range, ascending by address, uint64 of shape (m, 2).
    """
    contents, blocks = [np.empty((0, 3), np.int64)], [np.empty(0, np.int64)]
    for each in parts:
        rows = _token_rows if each.part.per_token else _state_rows
        block, row = rows(pair, request, each)
        if len(block):
            kernel_blocks = pair.consumer.engine.group(each.edge.group).kernel_blocks_per_block
            blocks.append(block // kernel_blocks)
            contents += (_contents(*run, block, row) for run in each.runs.items())
    # `coalesce` joins what touches on two sides. Here the consumer is both.
    boundaries = (pair.consumer.boundaries,) * 2
    ranges = coalesce(contents, boundaries)[1:]
    written = [
        numbered.addresses(tiles.take(np.flatnonzero(inside)))[:, 1:]
        for numbered, tiles in picked
        for kernel_blocks in (numbered.split_rows.token_split.consumer.kernel_blocks_per_block,)
        # Few blocks have bytes that need not move. The others may have millions of descriptors.
        for inside in (np.isin(tiles.block[1] // kernel_blocks, np.concatenate(blocks)),)
    ]
    return _without(ranges, written).view(np.uint64)


def _contents(strides: tuple[int, int], runs: Ints, block: Ints, row: Ints) -> Ints:
    """Return the contents of each *row* of each *block*: address twice and length, shape (n, 3)."""
    count = np.ones(1, np.int64)
    if (runs[2] == strides[1]).all():
        # A run touches that of the next row, so rows in sequence are one content.
        first = (block[1:] != block[:-1]) | (row[1:] != row[:-1] + 1)
        first = np.concatenate([[0], np.flatnonzero(first) + 1])
        count = np.diff(first, append=len(row))
        block, row = block[first], row[first]
    start = runs[0] + (block * strides[0] + row * strides[1])[:, None]
    length = np.broadcast_to(runs[2] * count[:, None], start.shape)
    return np.column_stack([start.ravel(), start.ravel(), length.ravel()])


def _without(ranges: Ints, written: list[Ints]) -> Ints:
    """Return *ranges* without the bytes of *written*: address and length of each, shape (n, 2)."""
    start, length = ranges
    taken = np.concatenate([np.empty((0, 2), np.int64), *written])
    if not len(taken) or not len(start):
        return np.ascontiguousarray(ranges.T)
    taken = taken[np.argsort(taken[:, 0])].T
    sides = [(start, start + length), (taken[0], taken[0] + taken[1])]
    cuts = np.unique(np.concatenate([end for side in sides for end in side]))
    inside = []
    for begin, end in sides:
        index = np.searchsorted(begin, cuts[:-1], "right") - 1
        inside.append((index >= 0) & (cuts[:-1] < end[index]))
    kept = np.flatnonzero(inside[0] & ~inside[1])
    return np.column_stack([cuts[kept], cuts[kept + 1] - cuts[kept]])


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
    pair: CachePair, request: TransferRequest, parts: UnwrittenRows
) -> tuple[Ints, Ints]:
    """Return block and row of each state that neither must move nor is cached."""
    edge, region, tokens_per_state = parts.edge, parts.region, parts.part.tokens_per_state
    positions = _positions_not_required(pair, request, edge, parts.tp_slice, tokens_per_state)
    engine = pair.consumer.engine
    group, table = engine.group(edge.group), request.table("consumer", edge.group)
    context = engine.context(group, pair.consumer.rank)
    local = context.local(positions) - table.first_token // context.size
    index, token = np.divmod(local, group.spec.block_size)
    if group.spec.is_ring:
        index = np.zeros_like(index)  # The one block has all positions.
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
    first, stop = max(live_block, tokens.start, cached), tokens.stop
    if spec.is_ring:
        # The rows of the next positions, which begin at the first live one, are all of its rows.
        first = spec.live_tokens(request.total(spec)).start
        stop = first + group.spec.block_size * bool(len(table.block_ids))
    if wanted.start <= first < wanted.stop:  # The tokens that move are most of them.
        first += (wanted.stop - first) // tokens_per_state * tokens_per_state
    positions = np.arange(first, max(stop, first), tokens_per_state, dtype=np.int64)
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
    own = (ids >= 0) & (ids < region.num_blocks // kernel_blocks)
    repeated = table.ordered[1:][table.ordered[1:] == table.ordered[:-1]]
    if len(repeated):
        own &= ~np.isin(ids, repeated)
    if null_block is not None:
        own &= ids != null_block
    return own


def _state_rows(
    pair: CachePair, request: TransferRequest, parts: UnwrittenRows
) -> tuple[Ints, Ints]:
    """Return block and row of each row of a recurrent state that neither moves nor is cached.

    In the block of the state, these are the rows that only the consumer has. Blocks that begin
    behind all tokens have no state yet, so these are all of their rows.
    """
    edge, region, part = parts.edge, parts.region, parts.part
    engine, table = pair.consumer.engine, request.table("consumer", edge.group)
    group, ids = engine.group(edge.group), table.block_ids
    size = group.spec.block_size
    tokens = max(request.num_tokens, request.cached(group.name, group.spec))
    first_token = table.first_token
    if len(ids) == 1 and not first_token:  # The only block has the state after any token.
        first_token = max(tokens - 1, 0) // size * size
    starts = first_token + np.arange(len(ids)) * size
    first_row = np.where(starts < tokens, region.states, 0)
    for moves in request.moves(group.name, group.spec):
        first_row[starts // size == moves.start // size] = part.states
    own = _own_blocks(ids, table, engine.null_block, region, group.kernel_blocks_per_block)
    own &= parts.tp_slice.stripe.holds(starts // engine.virtual_block(group))
    index, row = np.nonzero(own[:, None] & (np.arange(region.states) >= first_row[:, None]))
    return ids[index], row
