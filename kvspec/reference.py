"""The same plan, executed by torch copies in one process.

Law: tensor views and index tensors only. It shares neither runs, rows nor ids with the descriptor
table, so that the two can be held against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.cache import RankCache, Region
from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.parallel import RankId
from kvspec.plan import Edge, TransferPlan
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
        group = plan.producer.group(edge.producer_group)
        for each in edge.slices:
            for layer in each.layers or edge.layers:
                spec = plan.consumer.group(edge.group).spec.of_layer(layer)
                size = group.spec.of_layer(layer).block_size
                for part in (part for part in spec.parts if part.name in each.parts):
                    rows = _rows(request, edge, each, spec, part, size)
                    source = _view(producers[edge.producer], layer, part)
                    target = _view(consumers[edge.consumer], layer, part)
                    _copy_rows(source, target, each, rows)


def _copy_rows(
    source: torch.Tensor, target: torch.Tensor, each: TPTransferSlice, rows: list[Any]
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
    edge: Edge,
    each: TPTransferSlice,
    spec: LayerSpec,
    part: Part,
    producer_block_size: int,
) -> list[Any]:
    """Return producer block, row, consumer block, row of every row that moves, as index tensors."""
    import torch  # noqa: PLC0415

    wanted = request.wanted(edge.group, spec)
    ours = request.producer_blocks[edge.producer_group]
    theirs = request.consumer_blocks[edge.group]
    first, step = each.stripe
    if part.tokens_per_state == 0:
        moves = len(wanted) and wanted.start // spec.block_size % step == first
        rows = np.arange(part.states if moves else 0)
        columns = [np.repeat(t.block_ids[:1], len(rows)) for t in (ours, theirs)]
        found = [columns[0], rows, columns[1], rows]
    else:
        rows = np.unique(np.arange(wanted.start, wanted.stop) // part.tokens_per_state)
        tokens = rows * part.tokens_per_state
        tokens = tokens[tokens // spec.block_size % step == first]
        found = [
            *_place(ours, tokens, producer_block_size, part, "producer_blocks"),
            *_place(theirs, tokens, spec.block_size, part, "consumer_blocks"),
        ]
    return [torch.from_numpy(np.ascontiguousarray(column)) for column in found]


def _place(
    table: BlockTable,
    tokens: Ids,
    block_size: int,
    part: Part,
    field: str,
) -> tuple[Ids, Ids]:
    block, token = np.divmod(tokens - table.first_token, block_size)
    if len(block) and not 0 <= block[0] <= block[-1] < len(table.block_ids):
        held = table.tokens(block_size)
        if field == "consumer_blocks":
            raise SpecError(field, held, f"blocks for tokens {tokens[0]}..{tokens[-1]}")
        why = "the producer's table does not hold every token that is wanted"
        raise MismatchError([Mismatch(field, held, range(tokens[0], tokens[-1] + 1), why)])
    return table.block_ids[block], token // part.tokens_per_state
