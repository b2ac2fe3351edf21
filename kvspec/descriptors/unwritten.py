"""Which bytes of a request's own blocks stay as they were.

Law: of what one producer rank would write on one consumer rank, a byte is written, or cached, or
unwritten. An engine that must not read what other requests left zeroes the last.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.runs import coalesce
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.part import Part
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan


@attrs.frozen(eq=False)
class Pair:
    """Two ranks of a plan, by their caches; all *layers* or some."""

    plan: TransferPlan
    producer: RankCache
    consumer: RankCache
    layers: frozenset[str] | None


def unwritten_ranges(
    pair: Pair, request: TransferRequest, written: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Return (address, length) of what the descriptors *written* leave of the consumer's blocks."""
    _, start, length = written.astype(np.int64).T
    order = np.argsort(start)
    start, stop = start[order], (start + length)[order]
    found = [np.empty((0, 3), np.int64)]
    for address, content in _unmoved(pair, request):
        before = np.searchsorted(start, address, "right") - 1
        moved = before >= 0
        moved[moved] = address[moved] < stop[before[moved]]
        left = address[~moved]
        found.append(np.column_stack([left, left, np.full(len(left), content)]))
    boundaries = pair.consumer.boundaries  # coalesce joins on two sides: here both are the consumer
    return coalesce(found, (boundaries, boundaries))[1:].T.view(np.uint64)


def _unmoved(pair: Pair, request: TransferRequest) -> Iterator[tuple[Ints, int]]:
    """Yield addresses of contents that need not move, and how long each is."""
    for edge in pair.plan.between(pair.producer.rank, pair.consumer.rank):
        specs = pair.plan.pair_of(edge).specs
        for one in edge.slices:
            for layer in one.layers:
                moves = pair.layers is None or layer in pair.layers
                for part in specs[layer].parts if moves else ():
                    if part.name in one.parts:
                        region = pair.consumer.region(layer, part.name)
                        rows = _token_rows if part.per_token else _state_rows
                        block, row = rows(pair, request, edge, one, part)
                        first = region.address(0, one.local_range.start, 0)
                        units = np.arange(len(one.local_range)) * region.unit_stride
                        at = first + block * region.block_stride + row * region.state_stride
                        chunks = np.arange(region.chunks) * region.chunk_stride
                        yield (
                            (at[:, None, None] + units[:, None] + chunks).ravel(),
                            region.chunk_bytes,
                        )


def _token_rows(
    pair: Pair, request: TransferRequest, edge: Edge, one: TPTransferSlice, part: Part
) -> tuple[Ints, Ints]:
    """Return block in memory and row of what is neither wanted nor cached.

    From the block of the first live token on: what stands before it may be another request's. What
    stands twice in a table is no block of anybody.
    """
    engine, rank, grain = pair.consumer.engine, pair.consumer.rank, part.tokens_per_state
    group, held = engine.group(edge.group), request.table("consumer", edge.group)
    spec, virtual = pair.plan.pair_of(edge).specs[one.layers[0]], engine.virtual_block(group)
    wanted, tokens = request.wanted(group.name, spec), held.tokens(virtual)
    live = spec.live_tokens(request.total(spec)).start // virtual * virtual
    first = max(live, tokens.start, -(-request.cached(group.name, spec) // grain) * grain)
    position = np.arange(first, max(tokens.stop, first), grain, dtype=np.int64)
    owners = [
        side.engine.context(side.engine.group(name), side.rank)
        for side, name in ((pair.producer, edge.producer_group), (pair.consumer, edge.group))
    ]
    keep = owners[0].owns(position) & owners[1].owns(position)
    keep &= one.stripe.holds(position // virtual)
    keep &= (position + grain <= wanted.start) | (position >= wanted.stop)
    context = engine.context(group, rank)
    local = context.local(position[keep]) - held.first_token // context.size
    place, token = np.divmod(local, group.spec.block_size)
    kernel_block, token = np.divmod(token, group.memory_block_size)
    ids = held.block_ids[place]
    count = (
        pair.consumer.region(one.layers[0], part.name).num_blocks // group.kernel_blocks_per_block
    )
    different, times = np.unique(held.block_ids, return_counts=True)
    own = (ids >= 0) & (ids < count) & np.isin(ids, different[times == 1])
    if engine.null_block is not None:
        own &= ids != engine.null_block
    return ids[own] * group.kernel_blocks_per_block + kernel_block[own], token[own] // grain


def _state_rows(
    pair: Pair, request: TransferRequest, edge: Edge, one: TPTransferSlice, part: Part
) -> tuple[Ints, Ints]:
    """Return block and row of what the producer's state lacks."""
    group, held = pair.consumer.engine.group(edge.group), request.table("consumer", edge.group)
    wanted = request.wanted(group.name, group.spec)
    rows = np.arange(part.states, pair.consumer.region(one.layers[0], part.name).states)
    virtual = pair.consumer.engine.virtual_block(group)
    if not wanted or not one.stripe.holds(wanted.start // virtual):
        rows = rows[:0]
    slot = held.state_block(edge.group, group.spec.block_size, wanted.start) if len(rows) else 0
    return np.full(len(rows), held.block_ids[slot]), rows
