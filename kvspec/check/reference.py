"""The same plan, executed by torch copies in one process.

Law: tensor views and index tensors only. It shares neither runs, rows nor ids with the descriptor
table, so that the two can be held against each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvspec.descriptors.request import BlockTable, Ids, TransferRequest, check_ids, check_no_null
from kvspec.descriptors.table import check_shared, check_shared_sources, sharing
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.inputs import instance, mapping
from kvspec.memory.rank_cache import RankCache
from kvspec.memory.region import Region, common_chunks
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

Held = Mapping[RankId, tuple[RankCache, Mapping[str, Any]]]
Move = tuple["torch.Tensor", "torch.Tensor", TPTransferSlice, list["torch.Tensor"]]
"""From and to: [blocks, units, states, bytes]; which units; producer's and consumer's rows.

The bytes are those of a content, or of a chunk of it, that lie together on both sides.
"""


def copy(plan: TransferPlan, producers: Held, consumers: Held, request: TransferRequest) -> None:
    """Copy what *request* moves from the producers' storage to the consumers'.

    *producers*, *consumers*: for each rank its cache and storage, as `kvspec.allocate` returns
    them. Exactly the live, uncached rows are written; of a request that is refused, none.
    """
    instance("plan", plan, TransferPlan)
    instance("request", request, TransferRequest)
    _check_held("producers", producers, {edge.producer for edge in plan.edges})
    _check_held("consumers", consumers, {edge.consumer for edge in plan.edges})
    _check_tables(plan, request)
    for cache, _ in consumers.values():
        check_shared(plan, request, sharing(cache))
    for cache, _ in producers.values():
        check_shared_sources(plan, request, sharing(cache))
    for source, target, each, (source_block, source_state, target_block, target_state) in list(
        _moves(plan, producers, consumers, request)
    ):
        remote, local = each.remote_range, each.local_range
        moved = source[source_block, remote.start : remote.stop, source_state]
        target[target_block, local.start : local.stop, target_state] = moved


def _check_held(field: str, held: Held, ranks: Iterable[RankId]) -> None:
    given = mapping(field, held, "RankId to (RankCache, storage)")
    for rank in sorted(ranks):
        match given.get(rank):
            case (RankCache(rank=found), Mapping()) if found == rank:
                continue
            case other:
                wanted = "(RankCache, storage) of that rank"
                raise SpecError(f"{field}[{rank}]", other, wanted)


def _check_tables(plan: TransferPlan, request: TransferRequest) -> None:
    request.check_groups([group.name for group in plan.consumer.groups])
    for pair in plan.pairs:
        request.table("producer", pair.producer.name)
        request.table("consumer", pair.consumer.name)


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
        for each in edge.slices:
            for layer in each.layers:
                spec = plan.pair_of(edge).specs[layer]
                for part in (part for part in spec.parts if part.name in each.parts):
                    held = producers[edge.producer], consumers[edge.consumer]
                    regions = [cache.region(layer, part.name) for cache, _ in held]
                    places = [
                        _Place(side, group, context, null, region.num_blocks)
                        for side, (group, context, null), region in zip(
                            _SIDES, groups, regions, strict=True
                        )
                    ]
                    rows = _rows(request, each, spec, part, places)
                    size, chunks = common_chunks(*regions)
                    for byte in chunks:
                        source, target = (
                            _view(f"{side}s", own, region, byte, size)
                            for side, own, region in zip(_SIDES, held, regions, strict=True)
                        )
                        yield source, target, each, rows


_SIDES: tuple[Role, Role] = ("producer", "consumer")


@attrs.frozen
class _Place:
    """Where one side keeps its tokens: its group, context and null block, and its pool."""

    side: Role
    group: KVCacheGroup
    context: BlockCyclic
    null_block: int | None
    num_blocks: int

    def check_ids(self, ids: Ids, tokens: Ids, wanted: range) -> None:
        """Raise naming the first id that is the null block, or that the pool does not have."""
        null = tokens[ids == self.null_block]
        if len(null):
            missing = range(int(null[0]), int(null[0]) + 1)
            check_no_null(self.side, self.group.name, self.null_block, missing, wanted)
        check_ids(
            self.side, self.group.name, ids, self.num_blocks // self.group.kernel_blocks_per_block
        )


def _view(
    side: str, held: tuple[RankCache, Mapping[str, Any]], region: Region, byte: int, size: int
) -> torch.Tensor:
    """Return *size* bytes of each content, from *byte* on, as [blocks, units, states, bytes]."""
    import torch  # noqa: PLC0415 - a library user who never executes a plan does not need it

    cache, storage = held
    flat = storage.get(region.group)
    if isinstance(flat, np.ndarray) and flat.dtype in (np.uint8, np.int8):
        flat = torch.from_numpy(flat)
    if not isinstance(flat, torch.Tensor) or not _holds(flat, region):
        told = f"the bytes of group {region.group!r} that the cache lies in"
        raise SpecError(f"{side}[{cache.rank}]", [*storage], told)
    return flat.as_strided(
        (region.num_blocks, region.units, region.states, size),
        (region.block_stride, region.unit_stride, region.state_stride, 1),
        # Counted from where the tensor's storage begins, which may be before the tensor does.
        region.base + region.chunk_offset(byte) - flat.data_ptr() + flat.storage_offset(),
    )


def _holds(flat: torch.Tensor, region: Region) -> bool:
    """Return whether *flat* is bytes side by side, all those of *region* among them."""
    try:
        first, size = region.base - flat.data_ptr(), flat.nelement()
        dense = flat.element_size() == 1 and flat.is_contiguous()
    except RuntimeError:  # a sparse or a fake one, which has no address
        return False
    return bool(dense and 0 <= first <= size - len(region.extent))


def _rows(
    request: TransferRequest,
    each: TPTransferSlice,
    spec: LayerSpec,
    part: Part,
    places: list[_Place],
) -> list[torch.Tensor]:
    """Return producer block, row, consumer block, row of every row that moves, as index tensors."""
    import torch  # noqa: PLC0415

    producer, consumer = places
    wanted = request.wanted(consumer.group.name, spec)
    tables = [request.table(place.side, place.group.name) for place in places]
    virtual = spec.block_size * consumer.context.size
    if not part.per_token:
        if not wanted or not each.stripe.holds(wanted.start // virtual):
            return [torch.zeros(0, dtype=torch.int64)] * 4
        rows = np.arange(part.states)
        slots = [
            np.full(len(rows), _slot(table, place, wanted))
            for table, place in zip(tables, places, strict=True)
        ]
        found = [slots[0], rows, slots[1], rows]
    else:
        tokens = np.arange(wanted.start, wanted.stop)
        tokens = tokens[each.stripe.holds(tokens // virtual)]
        tokens = np.unique(tokens // part.tokens_per_state) * part.tokens_per_state
        tokens = tokens[producer.context.owns(tokens) & consumer.context.owns(tokens)]
        found = [
            column
            for table, place in zip(tables, places, strict=True)
            for column in _placed(table, tokens, place, part, wanted)
        ]
    return [torch.from_numpy(np.ascontiguousarray(column)) for column in found]


def _slot(table: BlockTable, place: _Place, wanted: range) -> int:
    """Return the block that holds the state: the only one, or that of the *expected* token."""
    field, size = f"{place.side}_blocks[{place.group.name!r}]", place.group.spec.block_size
    at = table.state_block(field, size, wanted.start)
    ids = table.block_ids[at : at + 1]
    place.check_ids(ids, np.array(wanted[:1]), wanted)
    return int(ids[0])


def _placed(
    table: BlockTable, tokens: Ids, place: _Place, part: Part, wanted: range
) -> tuple[Ids, Ids]:
    """Return the block in memory and the row in it of every row that begins with a token."""
    group, context = place.group, place.context
    size = group.spec.block_size
    held = table.tokens(size * context.size)
    if len(tokens) and not (held.start <= tokens[0] and tokens[-1] < held.stop):
        why = "the table does not hold every token that is wanted"
        wanted = range(int(tokens[0]), int(tokens[-1]) + 1)
        raise MismatchError(
            [Mismatch(f"blocks of {group.name}", held, wanted, why, ("held", "expected"))]
        )
    block, token = np.divmod(tokens - table.first_token, size * context.size)
    rounds, rest = np.divmod(token, context.interleave * context.size)
    token = rounds * context.interleave + rest % context.interleave
    part_of, token = np.divmod(token, group.memory_block_size)
    ids = table.block_ids[block]
    place.check_ids(ids, tokens, wanted)
    return ids * group.kernel_blocks_per_block + part_of, token // part.tokens_per_state
