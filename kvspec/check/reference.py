"""Execute a transfer plan by torch copies in one process.

Invariant: the reference uses only tensor views and index tensors. It shares no runs, rows or ids
with the descriptor table, so that a test can compare the two.

How it works:
    `_moves` yields one move for each slice of each edge, each layer and each part. A move has a
    view of the producer's storage and one of the consumer's storage, both of shape (blocks, units,
    rows, bytes). It also has four index tensors: the producer's blocks and rows, and the consumer's
    blocks and rows. `copy` executes all moves:

        moved = producer[producer_block, producer_units, producer_row]
        consumer[consumer_block, consumer_units, consumer_row] = moved

    All moves are prepared before the first copy. So a request that is refused writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvspec.check.places import token_places
from kvspec.descriptors.request import BlockTable, Ids, TransferRequest, check_ids, check_no_null
from kvspec.descriptors.table import check_shared, check_shared_sources, sharing
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.inputs import instance, mapping
from kvspec.memory.rank_cache import RankCache
from kvspec.memory.region import Region, common_pieces
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.replicas import Role
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.tokens import BlockCyclic
from kvspec.plan.plan import TransferPlan
from kvspec.specs import LayerSpec

__all__ = [
    "copy",
]

if TYPE_CHECKING:
    import torch

# For each rank its cache and storage, as `kvspec.allocate` returns them.
Held = Mapping[RankId, tuple[RankCache, Mapping[str, Any]]]
# The views of producer and consumer, the slice, and the four index tensors. The bytes of the views
# are one content, or one piece of it that is contiguous on both sides.
Move = tuple["torch.Tensor", "torch.Tensor", TPTransferSlice, list["torch.Tensor"]]


def copy(plan: TransferPlan, producers: Held, consumers: Held, request: TransferRequest) -> None:
    """Copy the rows that *request* moves from the producers' storage to the consumers' storage.

    Only live rows that are not cached are written.

    Args:
        plan: The transfer plan.
        producers: For each producer rank its cache and storage, as `kvspec.allocate` returns them.
        consumers: The same for each consumer rank.
        request: The request.

    Raises:
        SpecError: If a cache, storage or block table is missing or has the wrong sizes.
        MismatchError: If a table lacks a token that moves. Nothing is copied after any error.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig
    >>> from kvspec import allocate, plan_transfer
    >>> spec = MLAAttentionSpec(block_size=2, head_size=8, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["l"], spec=spec)
    >>> engine = EngineSpec(groups=[group], parallel=ParallelConfig())
    >>> producers, consumers = ({RankId(): allocate(engine, RankId(), 2)} for _ in range(2))
    >>> producers[RankId()][1]["full"][16:] = 7  # block 1
    >>> request = TransferRequest(request_id="r", num_tokens=2, producer_blocks={"full": [1]},
    ...     consumer_blocks={"full": [0]})
    >>> copy(plan_transfer(engine, engine), producers, consumers, request)  # doctest: +SKIP
    >>> bool((consumers[RankId()][1]["full"][:16] == 7).all())  # doctest: +SKIP
    True
    """
    instance("plan", plan, TransferPlan)
    instance("request", request, TransferRequest)
    _check_held("producers", producers, {edge.producer for edge in plan.edges})
    _check_held("consumers", consumers, {edge.consumer for edge in plan.edges})
    request.check_groups([group.name for group in plan.consumer.groups])
    for cache, _ in consumers.values():
        check_shared(plan, request, sharing(cache))
    for cache, _ in producers.values():
        check_shared_sources(plan, request, sharing(cache))
    # `list` prepares every move, with all checks, before the first byte is written.
    for source, target, slice_, (source_block, source_state, target_block, target_state) in list(
        _moves(plan, producers, consumers, request)
    ):
        remote, local = slice_.remote_range, slice_.local_range
        moved = source[source_block, remote.start : remote.stop, source_state]
        target[target_block, local.start : local.stop, target_state] = moved


def _check_held(field: str, held: Held, ranks: Iterable[RankId]) -> None:
    given = mapping(field, held, "RankId to (RankCache, storage)")
    for rank in sorted(ranks):
        match given.get(rank):
            case (RankCache(rank=cache_rank), Mapping()) if cache_rank == rank:
                continue
            case value:
                raise SpecError(f"{field}[{rank}]", value, "(RankCache, storage) of that rank")


def _moves(
    plan: TransferPlan, producers: Held, consumers: Held, request: TransferRequest
) -> Iterator[Move]:
    for edge in plan.edges:
        sides = (
            (plan.producer, plan.producer.group(edge.producer_group), edge.producer),
            (plan.consumer, plan.consumer.group(edge.group), edge.consumer),
        )
        groups = [
            (group, engine.context(group, rank), engine.null_block) for engine, group, rank in sides
        ]
        for slice_ in edge.slices:
            for layer in slice_.layers:
                spec = plan.pair_of(edge).specs[layer]
                for part in (part for part in spec.parts if part.name in slice_.parts):
                    held = producers[edge.producer], consumers[edge.consumer]
                    regions = [cache.region(layer, part.name) for cache, _ in held]
                    move_sides = [
                        _MoveSide(side, group, context, null, region.num_blocks)
                        for side, (group, context, null), region in zip(
                            _SIDES, groups, regions, strict=True
                        )
                    ]
                    rows = _rows(request, slice_, spec, part, move_sides)
                    for _, size, offsets in common_pieces(*regions):
                        source, target = (
                            _view(f"{side}s", own, region, offset, size)
                            for side, own, region, offset in zip(
                                _SIDES, held, regions, offsets, strict=True
                            )
                        )
                        yield source, target, slice_, rows


_SIDES: tuple[Role, Role] = ("producer", "consumer")


@attrs.frozen
class _MoveSide:
    """One side of a move: its group, context, null block and number of kernel blocks."""

    side: Role
    group: KVCacheGroup
    context: BlockCyclic
    null_block: int | None
    num_blocks: int

    def check_ids(self, ids: Ids, tokens: Ids, wanted: range) -> None:
        """Check that no id is the null block, and that all ids are in the pool."""
        null = tokens[ids == self.null_block]
        if len(null):
            missing = range(int(null[0]), int(null[0]) + 1)
            check_no_null(self.side, self.group.name, self.null_block, missing, wanted)
        check_ids(
            self.side, self.group.name, ids, self.num_blocks // self.group.kernel_blocks_per_block
        )


def _view(
    side: str, held: tuple[RankCache, Mapping[str, Any]], region: Region, offset: int, size: int
) -> torch.Tensor:
    """Return a view of *size* bytes at *offset* of each content: (blocks, units, rows, bytes)."""
    import torch  # noqa: PLC0415 - only users of the reference need torch

    cache, storage = held
    flat = storage.get(region.group)
    if isinstance(flat, np.ndarray) and flat.dtype in (np.uint8, np.int8):
        flat = torch.from_numpy(flat)
    if not isinstance(flat, torch.Tensor) or not _holds(flat, region):
        expected = f"the bytes of group {region.group!r} that the cache lies in"
        raise SpecError(f"{side}[{cache.rank}]", [*storage], expected)
    return flat.as_strided(
        (region.num_blocks, region.units, region.states, size),
        (region.block_stride, region.unit_stride, region.state_stride, 1),
        # `as_strided` counts from the start of the storage, which may lie before the tensor.
        region.base + offset - flat.data_ptr() + flat.storage_offset(),
    )


def _holds(flat: torch.Tensor, region: Region) -> bool:
    """Return whether *flat* is a contiguous tensor of bytes that contains *region*."""
    try:
        first, size = region.base - flat.data_ptr(), flat.nelement()
        dense = flat.element_size() == 1 and flat.is_contiguous()
    except RuntimeError:  # Sparse and fake tensors have no address.
        return False
    return bool(dense and 0 <= first <= size - len(region.extent))


def _rows(
    request: TransferRequest,
    slice_: TPTransferSlice,
    spec: LayerSpec,
    part: Part,
    move_sides: list[_MoveSide],
) -> list[torch.Tensor]:
    """Return the index tensors of all rows that move. See `How it works` above."""
    import torch  # noqa: PLC0415

    producer, consumer = move_sides
    wanted = request.wanted(consumer.group.name, spec)
    tables = [request.table(move_side.side, move_side.group.name) for move_side in move_sides]
    virtual = spec.block_size * consumer.context.size
    if not part.per_token:
        if not wanted or not slice_.stripe.holds(wanted.start // virtual):
            return [torch.zeros(0, dtype=torch.int64)] * 4
        rows = np.arange(part.states)
        blocks = [
            np.full(len(rows), _state_block(table, move_side, wanted))
            for table, move_side in zip(tables, move_sides, strict=True)
        ]
        columns = [blocks[0], rows, blocks[1], rows]
    else:
        tokens = np.arange(wanted.start, wanted.stop)
        tokens = tokens[slice_.stripe.holds(tokens // virtual)]
        # A row moves if any of its tokens is wanted.
        tokens = np.unique(tokens // part.tokens_per_state) * part.tokens_per_state
        tokens = tokens[producer.context.owns(tokens) & consumer.context.owns(tokens)]
        columns = [
            column
            for table, move_side in zip(tables, move_sides, strict=True)
            for column in _token_rows(table, tokens, move_side, part, wanted)
        ]
    return [torch.from_numpy(np.ascontiguousarray(column)) for column in columns]


def _state_block(table: BlockTable, move_side: _MoveSide, wanted: range) -> int:
    """Return the id of the block that holds the state after the only *wanted* token."""
    group = move_side.group
    field = f"{move_side.side}_blocks[{group.name!r}]"
    at = table.state_block(field, group.spec.block_size, wanted.start)
    ids = table.block_ids[at : at + 1]
    move_side.check_ids(ids, np.array(wanted[:1]), wanted)
    return int(ids[0])


def _token_rows(
    table: BlockTable, tokens: Ids, move_side: _MoveSide, part: Part, wanted: range
) -> tuple[Ids, Ids]:
    """Return the kernel block of each row and the row in it. *tokens* are the first of each row."""
    group, context = move_side.group, move_side.context
    held = table.tokens(group.spec.block_size * context.size)
    if len(tokens) and not (held.start <= tokens[0] and tokens[-1] < held.stop):
        why = "the table does not hold every token that is wanted"
        expected = range(int(tokens[0]), int(tokens[-1]) + 1)
        raise MismatchError(
            [Mismatch(f"blocks of {group.name}", held, expected, why, ("held", "expected"))]
        )
    index, kernel_block, token = token_places(group, context, table, tokens)
    ids = table.block_ids[index]
    move_side.check_ids(ids, tokens, wanted)
    return ids * group.kernel_blocks_per_block + kernel_block, token // part.tokens_per_state
