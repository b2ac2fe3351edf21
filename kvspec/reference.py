"""The same plan, executed by torch copies in one process.

Law: tensor views and index tensors only. It shares neither runs, rows nor ids with the descriptor
table, so that the two can be held against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.cache import RankCache, Region
from kvspec.engine import KVCacheGroup
from kvspec.errors import Mismatch, MismatchError
from kvspec.parallel import RankId
from kvspec.plan import TransferPlan
from kvspec.ranges import Cyclic
from kvspec.request import BlockTable, Ids, TransferRequest
from kvspec.slices import Part, TPTransferSlice
from kvspec.specs import LayerSpec

if TYPE_CHECKING:
    import torch

Held = Mapping[RankId, tuple[RankCache, Mapping[str, Any]]]


def copy(plan: TransferPlan, producers: Held, consumers: Held, request: TransferRequest) -> None:
    """Copy what *request* moves from the producers' storage to the consumers'.

    *producers*, *consumers*: for each rank its cache and storage, as `kvspec.allocate` returns
    them. Exactly the live, uncached rows are written.
    """
    for edge in plan.edges:
        sides = (
            (plan.producer.group(edge.producer_group), plan.producer.parallel, edge.producer),
            (plan.consumer.group(edge.group), plan.consumer.parallel, edge.consumer),
        )
        groups = [(group, parallel.context(rank)) for group, parallel, rank in sides]
        for each in edge.slices:
            for layer in each.layers or edge.layers:
                spec = plan.pair_of(edge).specs[layer]
                for part in (part for part in spec.parts if part.name in each.parts):
                    rows = _rows(request, each, spec, part, groups)
                    source = _view(producers[edge.producer], layer, part)
                    target = _view(consumers[edge.consumer], layer, part)
                    _copy_rows(source, target, each, rows)


def _copy_rows(
    source: torch.Tensor, target: torch.Tensor, each: TPTransferSlice, rows: list[torch.Tensor]
) -> None:
    ours, our_state, theirs, their_state = rows
    remote, local = each.remote_range, each.local_range
    moved = source[ours, remote.start : remote.stop, our_state]
    target[theirs, local.start : local.stop, their_state] = moved


def _view(held: tuple[RankCache, Mapping[str, Any]], layer: str, part: Part) -> torch.Tensor:
    """Return the bytes of one part of one layer as [blocks, units, states, content]."""
    import torch  # noqa: PLC0415 - a library user who never executes a plan does not need it

    cache, storage = held
    region: Region = cache.region(layer, part.name)
    flat = storage[region.group]
    if isinstance(flat, np.ndarray):
        flat = torch.from_numpy(flat)
    return flat.as_strided(
        (region.num_blocks, region.units, region.states, region.content_bytes),
        (region.block_stride, region.unit_stride, region.state_stride, 1),
        region.base - flat.data_ptr(),
    )


def _rows(
    request: TransferRequest,
    each: TPTransferSlice,
    spec: LayerSpec,
    part: Part,
    groups: list[tuple[KVCacheGroup, Cyclic]],
) -> list[torch.Tensor]:
    """Return producer block, row, consumer block, row of every row that moves, as index tensors."""
    import torch  # noqa: PLC0415

    (ours, our_context), (theirs, their_context) = groups
    wanted = request.wanted(theirs.name, spec)
    tables = request.producer_blocks[ours.name], request.consumer_blocks[theirs.name]
    first, step = each.stripe
    virtual = spec.block_size * their_context.size
    if part.tokens_per_state == 0:
        moves = len(wanted) and wanted.start // virtual % step == first
        rows = np.arange(part.states if moves else 0)
        slots = [
            table.block_ids[0 if len(table.block_ids) == 1 else at]
            for table, group in zip(tables, (ours, theirs), strict=True)
            for at in [(wanted.start - table.first_token) // group.spec.block_size if wanted else 0]
        ]
        found = [np.full(len(rows), slots[0]), rows, np.full(len(rows), slots[1]), rows]
    else:
        tokens = np.arange(wanted.start, wanted.stop)
        tokens = tokens[tokens // virtual % step == first]
        tokens = np.unique(tokens // part.tokens_per_state) * part.tokens_per_state
        tokens = tokens[our_context.owns(tokens) & their_context.owns(tokens)]
        found = [
            *_place(tables[0], tokens, ours, our_context, part),
            *_place(tables[1], tokens, theirs, their_context, part),
        ]
    return [torch.from_numpy(np.ascontiguousarray(column)) for column in found]


def _place(
    table: BlockTable, tokens: Ids, group: KVCacheGroup, context: Cyclic, part: Part
) -> tuple[Ids, Ids]:
    """Return the block in memory and the row in it of every row that begins with a token."""
    size = group.spec.block_size
    held = table.tokens(size * context.size)
    if len(tokens) and not (held.start <= tokens[0] and tokens[-1] < held.stop):
        why = "the table does not hold every token that is wanted"
        wanted = range(int(tokens[0]), int(tokens[-1]) + 1)
        raise MismatchError([Mismatch(f"blocks of {group.name}", held, wanted, why)])
    block, token = np.divmod(tokens - table.first_token, size * context.size)
    rounds, rest = np.divmod(token, context.interleave * context.size)
    token = rounds * context.interleave + rest % context.interleave
    part_of, token = np.divmod(token, group.memory_block_size)
    return table.block_ids[block] * group.split + part_of, token // part.tokens_per_state
