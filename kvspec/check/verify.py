"""Verify that descriptors fill the memory of every consumer rank exactly.

Invariant: exactly one descriptor writes each byte that a consumer rank should receive. It reads
that byte from the same unit, token and layer of a producer rank. No descriptor writes other bytes,
except dead tokens in the request's own blocks, and these at most once. No descriptor reads outside
the request's own blocks. A block before the first live token is not the request's own, because it
may be another request's by now. A block after the last token is. No byte is both read and written,
because the order of the descriptors would decide what arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.check.checker import Checker, CounterExample
from kvspec.check.coverage import Coverage, Small, check_ranks_separate, merged, overlapping_sides
from kvspec.check.ownership import Counted, Owners
from kvspec.check.places import Places
from kvspec.check.sample import BlockSample
from kvspec.descriptors.request import BlockTable, Ids, TransferRequest, check_no_null
from kvspec.descriptors.table import (
    DescriptorTable,
    build_table,
    check_engine,
    check_read_once,
    sharing,
)
from kvspec.descriptors.tiles import (
    check_once,
    check_producer_holds,
    check_ring_tokens,
    check_state_tokens,
)
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import MAX_TOKENS, MOST, flag, instance, mapping
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import Role
from kvspec.ownership.tokens import Ints
from kvspec.plan.plan import TransferPlan

Rows = npt.NDArray[np.uint64]
# Contents of one rank that are verified together. If each has a descriptor of its own, they need
# about 100 MB. A request of 128k tokens in 32 layers of unequal layouts once needed 2.9 GB.
TOGETHER = 2**22
# Blocks that a sample usually has at most. More need more memory.
SAMPLED_BLOCKS = 4


def verify(
    plan: TransferPlan,
    producers: Mapping[RankId, RankCache],
    consumers: Mapping[RankId, RankCache],
    request: TransferRequest,
    descriptors: Mapping[tuple[RankId, RankId], npt.ArrayLike] | None = None,
    *,
    independent: bool = False,
    separate_processes: bool = False,
) -> CounterExample | None:
    """Return the first byte of *request* that descriptors would transfer wrongly.

    Only the two engines of the *plan* decide which bytes are right. The edges, runs and rows are
    not used for this, because they are verified. No memory is read or written.

    The library's own descriptors are products: each run of a table moves in each tile of the
    request. All runs and all tiles are verified, and bytes are compared in one block of each kind.
    See `kvspec.check.sample`. Descriptors of the caller are verified one by one.

    Args:
        plan: The transfer plan of the two engines.
        producers: The cache of every producer rank.
        consumers: The cache of every consumer rank.
        request: The request.
        descriptors: The rows of any connector, by (producer rank, consumer rank). Each row is
            (producer address, consumer address, length in bytes). The library's own by default.
        independent: Whether to count which units, layers and positions a rank owns, and which
            tokens are live. By default the library's own functions return them, so a fault in
            these functions is not found. At most 2**24 tokens can be counted.
        separate_processes: Whether each rank is a process with its own addresses. By default two
            consumer ranks must not share memory, and no byte may be both read and written.

    Returns:
        The first wrong byte, or None if all bytes are right.

    Raises:
        SpecError: If a cache or block table is missing, if an argument is not valid, or if a byte
            of a memory that both sides share is both read and written.
        MismatchError: If a producer's table lacks a wanted token, if its states have seen other
            tokens, or if a cache belongs to another engine.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig
    >>> from kvspec import plan_memory, plan_transfer
    >>> spec = MLAAttentionSpec(block_size=2, head_size=8, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["l"], spec=spec)
    >>> engine = EngineSpec(groups=[group], parallel=ParallelConfig())
    >>> caches = {RankId(): plan_memory(engine, RankId(), num_blocks=4)}
    >>> request = TransferRequest(request_id="r", num_tokens=2, producer_blocks={"full": [1]},
    ...     consumer_blocks={"full": [3]})
    >>> plan = plan_transfer(engine, engine)
    >>> print(verify(plan, caches, caches, request))
    None
    >>> short = {(RankId(), RankId()): [(16, 48, 15)]}
    >>> print(verify(plan, caches, caches, request, short))
    consumer tp0, layer l, part latent, unit 0, token 1, byte 7: missing; producer tp0 should \
    have sent it
    """
    instance("plan", plan, TransferPlan)
    kind = Counted if flag("independent", independent) else Owners
    owners: dict[Role, Owners] = {
        "producer": kind(plan.producer),
        "consumer": kind(plan.consumer),
    }
    _check_arguments(plan, producers, consumers, request, owners)
    overlap = list[tuple[RankId, RankId]]()
    if not flag("separate_processes", separate_processes):
        check_ranks_separate("consumers", consumers)
        overlap = overlapping_sides(producers, consumers)
    given = None if descriptors is None else _checked_descriptors(plan, descriptors)
    excluded = frozenset([*plan.producer.excluded, *plan.consumer.excluded])
    senders = {
        rank: Places(
            owners["producer"],
            producers[rank],
            plan.consumer,
            request,
            excluded,
            request.producer_blocks,
        )
        for rank in plan.producer.parallel.ranks
    }
    if overlap and given is None:
        given = {
            (source, rank): _descriptors(build_table(plan, producers[source], cache), request)
            for rank, cache in consumers.items()
            for source in plan.sources(rank)
        }
    for source, rank in overlap:
        _check_not_read(source, consumers[rank], given or {})
    for rank, cache in consumers.items():
        own = owners["consumer"], cache, plan.consumer
        places = Places(*own, request, excluded, request.consumer_blocks)
        if given is None:
            checkers = _checkers(plan, senders, places)
        else:
            moved = {source: rows for (source, to), rows in given.items() if to == rank}
            checkers = iter([Checker(plan.producer, senders, places, *_writes(moved))])
        for checker in checkers:
            fault = checker.first()
            if fault is not None:
                return fault
    return None


def _checkers(
    plan: TransferPlan, senders: Mapping[RankId, Places], places: Places
) -> Iterator[Checker]:
    """Yield the checks that together decide about the library's own descriptors of one rank."""
    request = places.request
    for some in _some_layers(places, SAMPLED_BLOCKS):
        tables = _tables(plan, senders, some)
        picked = {rank: table.tiles(request) for rank, table in tables.items()}
        sample = BlockSample.of(some, senders, picked)
        if sample is None:
            del tables, picked
            for few in _some_layers(some, None):
                own = _tables(plan, senders, few)
                moved = {rank: _descriptors(table, request) for rank, table in own.items()}
                yield Checker(plan.producer, senders, few, *_writes(moved))
            continue
        moved = {
            rank: sample.descriptors(
                picked[rank], (table.producer.boundaries, table.consumer.boundaries)
            )
            for rank, table in tables.items()
        }
        sources = {**senders, **sample.sources}
        yield Checker(plan.producer, sources, sample.places, *_writes(moved))


def _tables(
    plan: TransferPlan, senders: Mapping[RankId, Places], places: Places
) -> dict[RankId, DescriptorTable]:
    """Return the library's own descriptor tables of one consumer rank, by producer rank."""
    return {
        rank: build_table(plan, senders[rank].cache, places.cache, layers=places.only)
        for rank in plan.sources(places.rank)
    }


def _descriptors(table: DescriptorTable, request: TransferRequest) -> Ints:
    return table.descriptors(request).view(np.int64)


def _check_not_read(
    source: RankId, cache: RankCache, given: Mapping[tuple[RankId, RankId], Ints]
) -> None:
    """Raise `SpecError` if a byte of *cache* is written that is read from the rank *source*."""
    none = np.empty((0, 3), np.int64)
    reads, writes = (
        np.concatenate([none, *(rows for pair, rows in given.items() if pair[side] == rank)])
        for side, rank in enumerate((source, cache.rank))
    )
    read = Coverage(*merged(reads[:, 0], reads[:, 2])).touches(writes[:, 1], writes[:, 2])
    for _, start, length in writes[read][:1].tolist():
        places = ((region, region.locate(start)) for region in cache.regions)
        names = (f"{each.layer}.{each.part}, block {at[0]}" for each, at in places if at)
        value = next(names, f"addresses {start:#x}..{start + length - 1:#x}")
        expected = (
            f"bytes that are not read from producer {source} (or separate_processes=True: ranks "
            "are processes)"
        )
        raise SpecError(f"consumers[{cache.rank}]", value, expected)


def _some_layers(places: Places, most_blocks: int | None) -> Iterator[Places]:
    """Yield *places* with some layers each, to verify together: at most *most_blocks* of them.

    If groups share memory, layers may write the same bytes, so all layers are verified at once.
    """
    contents = {
        layer: sum(
            len(places.units(group, part))
            * part.states
            * places.chunks(layer, part)
            * (len(places.tables[group.name].block_ids[:most_blocks]) if part.per_token else 1)
            for part in spec.parts
        )
        for layer, group in places.layers.items()
        if group.name in places.tables
        for spec in (group.spec.of_layer(layer),)
    }
    if sum(contents.values()) <= TOGETHER or places.sharing:
        yield places
        return
    layers, total = set[str](), 0
    for layer, count in contents.items():
        if layers and total + count > TOGETHER:
            yield attrs.evolve(places, only=frozenset(layers))
            layers, total = set(), 0
        layers.add(layer)
        total += count
    yield attrs.evolve(places, only=frozenset(layers))


def _writes(moved: dict[RankId, Ints]) -> tuple[tuple[RankId, ...], Ints, Small]:
    """Return the producer ranks, the rows sorted by consumer address, and the rank of each row.

    The rank is an index into the producer ranks.
    """
    sources, counts = tuple(moved), [len(rows) for rows in moved.values()]
    table = np.concatenate([np.empty((0, 3), np.int64), *moved.values()])
    # The rows may need gigabytes, so drop the copy that the caller passed.
    moved.clear()
    numbers = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    order = np.argsort(table[:, 1], kind="stable")
    return sources, table[order], numbers[order]


def _checked_descriptors(
    plan: TransferPlan, descriptors: object
) -> dict[tuple[RankId, RankId], Ints]:
    """Return the checked descriptors of the caller, by pair of ranks of the plan."""
    expected = "(producer RankId, consumer RankId) to rows"
    given = mapping("descriptors", descriptors, expected)
    for pair in given:
        if not isinstance(pair, tuple) or len(pair) != 2:  # noqa: PLR2004 - two ranks
            raise SpecError("descriptors", pair, "keys (producer RankId, consumer RankId)")
        plan.producer.parallel.check_rank(pair[0], f"descriptors[{pair}]")
        plan.consumer.parallel.check_rank(pair[1], f"descriptors[{pair}]")
    return {pair: _rows(f"descriptors[{pair}]", rows) for pair, rows in given.items()}


def _rows(field: str, rows: object) -> Ints:
    """Return descriptors as an int64 array of shape (rows, 3). Every end fits into 63 bits."""
    expected = "integers of shape (n, 3): addresses and a length"
    if hasattr(rows, "mask"):  # `asarray` drops the mask, so the masked rows would count.
        raise SpecError(field, "a masked array", expected)
    try:
        array = np.asarray(rows)
    except (TypeError, ValueError):
        raise SpecError(field, rows, expected) from None
    if array.size == 0:
        return np.empty((0, 3), np.int64)
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu":  # noqa: PLR2004
        raise SpecError(field, f"{array.dtype} of shape {array.shape}", expected)
    # A value that exceeds 63 bits becomes negative.
    signed = array.astype(np.int64)
    wrong = (signed < 0).any(1)
    wrong |= signed[:, :2].max(1) > MOST - np.maximum(signed[:, 2], 0)
    if wrong.any():
        expected = f"an address and a length >= 0, and an end of at most {MOST}"
        raise SpecError(field, array[int(np.argmax(wrong))].tolist(), expected)
    return signed


def _check_caches(field: str, given: Mapping[RankId, RankCache], engine: EngineSpec) -> None:
    """Check that every rank of *engine*, and no other rank, has its cache."""
    mapping(field, given, "RankId to RankCache")
    missing = [str(rank) for rank in engine.parallel.ranks if rank not in given]
    if missing:
        expected = f"the cache of {', '.join(missing)}"
        raise SpecError(field, [str(rank) for rank in given], expected)
    for rank, cache in given.items():
        name = f"{field}[{rank}]"
        engine.parallel.check_rank(rank, name)
        if not isinstance(cache, RankCache) or cache.rank != rank:
            value = cache.rank if isinstance(cache, RankCache) else type(cache).__name__
            raise SpecError(name, str(value), "the cache of that rank")
        check_engine(f"{name}.engine", engine, cache.engine)


def _check_arguments(
    plan: TransferPlan,
    producers: Mapping[RankId, RankCache],
    consumers: Mapping[RankId, RankCache],
    request: TransferRequest,
    owners: Mapping[Role, Owners],
) -> None:
    """Check that every cache and every block table that the check needs is present."""
    _check_caches("producers", producers, plan.producer)
    _check_caches("consumers", consumers, plan.consumer)
    instance("request", request, TransferRequest)
    request.check_groups([group.name for group in plan.consumer.groups])
    read: dict[str, list[Ids]] = {}
    for pair in plan.pairs:
        groups: dict[Role, KVCacheGroup] = {"consumer": pair.consumer, "producer": pair.producer}
        tables = {side: request.table(side, group.name) for side, group in groups.items()}
        for spec, _ in pair.layers_by_spec:
            moves = owners["consumer"].moves(request, pair.consumer, spec)
            for side, group in groups.items():
                slots = list[int]()
                for wanted in moves:
                    if not all(part.per_token for part in spec.parts):
                        check_state_tokens(request)
                        ids = _check_state(owners[side], side, group, tables[side], wanted, slots)
                    else:
                        if group.spec.is_ring and side == "producer":
                            check_ring_tokens(request, wanted, group.spec.block_size)
                        ids = _check_tokens(owners[side], side, group, tables[side], wanted)
                    if side == "producer":
                        read.setdefault(group.name, []).append(ids)
    # If two groups share memory, a block of the producer holds the contents of one group only. The
    # checker does not notice if both groups read the same block, because each group reads from its
    # own block of the table.
    for cache in producers.values():
        check_read_once(read, sharing(cache))


def _check_tokens(
    owners: Owners, side: Role, group: KVCacheGroup, table: BlockTable, wanted: range
) -> Ids:
    """Return the ids of the blocks of *wanted* tokens in a table.

    The table must begin with a whole block, and no wanted token may be in the null block. The
    producer's table must not have one block for two wanted places. If the consumer's table has one,
    the checker finds bytes that are missing or wrong.
    """
    virtual, null = owners.virtual_block(group), owners.engine.null_block
    if group.spec.is_ring:
        table.check_ring(f"{side}_blocks[{group.name!r}]")
        virtual = MAX_TOKENS
    table.check_start(f"{side}_blocks[{group.name!r}]", virtual)
    held = table.tokens(virtual)
    if side == "producer":
        check_producer_holds(group.name, held, wanted)
    inside = range(max(wanted.start, held.start), min(wanted.stop, held.stop))
    missing = table.without_block(inside, virtual, null) if inside else EMPTY
    check_no_null(side, group.name, null, missing, wanted)
    ids = table.blocks_of(inside, virtual) if inside else table.block_ids[:0]
    if side == "producer":
        check_once(side, group.name, table, ids)
    return ids


def _check_state(
    owners: Owners,
    side: Role,
    group: KVCacheGroup,
    table: BlockTable,
    wanted: range,
    slots: list[int],
) -> Ids:
    """Return the id of the block of the state after the last *wanted* token.

    The table must have that block, and it must not be the null block. It is appended to *slots*,
    which has those of earlier states. No two may be the same.
    """
    field, null = f"{side}_blocks[{group.name!r}]", owners.engine.null_block
    at = table.state_block(field, group.spec.block_size, wanted.stop - 1)
    if at in slots:
        raise SpecError(field, table.block_ids.tolist(), "a block for each state")
    slots.append(at)
    check_no_null(side, group.name, null, wanted if table.block_ids[at] == null else EMPTY, wanted)
    return table.block_ids[at : at + 1]
