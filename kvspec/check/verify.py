"""The exact-cover checker, with a readable counter-example.

Law: stated over the target. For every byte that a consumer rank should receive there is exactly
one descriptor that writes it, from the bytes of the same unit, token and layer; no descriptor
writes anything but those bytes and dead tokens in the request's own blocks, and none reads
anything but the request's own blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.check.checker import Checker, CounterExample
from kvspec.check.counting import Counted, Owners
from kvspec.check.coverage import Small, check_ranks_separate
from kvspec.check.places import Places
from kvspec.descriptors.request import BlockTable, Ids, TransferRequest, check_no_null
from kvspec.descriptors.table import build_table, check_engine, check_read_once, sharing
from kvspec.descriptors.tiles import check_producer_holds
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import MOST, flag, instance, mapping
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import Role
from kvspec.ownership.tokens import Ints
from kvspec.plan.plan import TransferPlan

Rows = npt.NDArray[np.uint64]
TOGETHER = 2**22
"""Contents of one rank whose descriptors are made together: about 100 MB, if each has its own."""


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
    """Return the first byte of *request* that would not be right, or None if every byte is.

    *descriptors*: what is to be copied, by (producer rank, consumer rank): uint64 rows (producer
    address, consumer address, length), of any connector; the library's own unless given.

    What is read of the plan are its two engines alone: neither edges nor runs, rows or ids. Which
    units, layers and positions a rank owns, and which tokens are live, is what the library says,
    the planner too: a fault in that is not found. If *independent*, they are counted out one by one
    instead, at most 2**24 tokens, for the kinds of layers that this library has.

    Two consumer ranks that keep anything in the same bytes are refused, unless ranks have their
    *separate_processes*, as processes have, so that equal ones are different bytes.
    """
    instance("plan", plan, TransferPlan)
    kind = Counted if flag("independent", independent) else Owners
    owners: dict[Role, Owners] = {
        "producer": kind(plan.producer),
        "consumer": kind(plan.consumer),
    }
    _check_given(plan, producers, consumers, request, owners)
    if not flag("separate_processes", separate_processes):
        check_ranks_separate("consumers", consumers)
    given = None if descriptors is None else _given(plan, descriptors)
    excluded = frozenset([*plan.producer.excluded, *plan.consumer.excluded])
    senders = {
        rank: Places(owners["producer"], producers[rank], request.producer_blocks)
        for rank in plan.producer.parallel.ranks
    }
    for rank, cache in consumers.items():
        own = Places(owners["consumer"], cache, request.consumer_blocks)
        for only in (None,) if given is not None else _some_layers(own, request):
            if given is None:
                writes = _writes(_own(plan, producers, cache, request, only))
            else:
                moved = {source: rows for (source, to), rows in given.items() if to == rank}
                writes = _writes(moved)
            consumer = attrs.evolve(own, only=only)
            checker = Checker(request, plan.producer, senders, consumer, excluded, *writes)
            found = checker.first()
            if found is not None:
                return found
    return None


def _some_layers(places: Places, request: TransferRequest) -> Iterator[frozenset[str] | None]:
    """Yield layers whose own descriptors are looked at together: what bounds the memory it takes.

    Where groups share memory, layers may write the same bytes: then all are, None.
    """
    contents = {
        layer: sum(
            len(places.units(group, part))
            * (len(places.owners.wanted(request, group, spec)) if part.per_token else part.states)
            for part in spec.parts
        )
        for layer, group in places.layers.items()
        for spec in (group.spec.of_layer(layer),)
    }
    if sum(contents.values()) <= TOGETHER or sharing(places.cache):
        yield None
        return
    some, many = set[str](), 0
    for layer, count in contents.items():
        if some and many + count > TOGETHER:
            yield frozenset(some)
            some, many = set(), 0
        some.add(layer)
        many += count
    yield frozenset(some)


def _own(
    plan: TransferPlan,
    producers: Mapping[RankId, RankCache],
    consumer: RankCache,
    request: TransferRequest,
    layers: frozenset[str] | None,
) -> dict[RankId, Ints]:
    """Return the library's own descriptors of one consumer rank, by producer rank."""
    tables = {
        rank: build_table(plan, producers[rank], consumer, layers=layers)
        for rank in plan.sources(consumer.rank)
    }
    return {rank: table.descriptors(request).view(np.int64) for rank, table in tables.items()}


def _writes(moved: dict[RankId, Ints]) -> tuple[tuple[RankId, ...], Ints, Small]:
    """Return who is read, the rows by consumer address, and which of the former each row reads.

    *moved* is emptied: rows may be many, and are held once.
    """
    sources, counts = tuple(moved), [len(rows) for rows in moved.values()]
    table = np.concatenate([np.empty((0, 3), np.int64), *moved.values()])
    moved.clear()
    numbers = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    order = np.argsort(table[:, 1], kind="stable")
    return sources, table[order], numbers[order]


def _given(plan: TransferPlan, descriptors: object) -> dict[tuple[RankId, RankId], Ints]:
    """Return descriptors that a caller made, by pair of ranks of the plan."""
    wanted = "(producer RankId, consumer RankId) to rows"
    given = mapping("descriptors", descriptors, wanted)
    for pair in given:
        if not isinstance(pair, tuple) or len(pair) != 2:  # noqa: PLR2004 - two ranks
            raise SpecError("descriptors", pair, "keys (producer RankId, consumer RankId)")
        plan.producer.parallel.check_rank(pair[0], f"descriptors[{pair}]")
        plan.consumer.parallel.check_rank(pair[1], f"descriptors[{pair}]")
    return {pair: _rows(f"descriptors[{pair}]", rows) for pair, rows in given.items()}


def _rows(field: str, rows: object) -> Ints:
    """Return descriptors as int64 rows of three, each with an end that 63 bits hold."""
    wanted = "integers of shape (n, 3): addresses and a length"
    try:
        found = np.asarray(rows)
    except (TypeError, ValueError):
        raise SpecError(field, rows, wanted) from None
    if found.size == 0:
        return np.empty((0, 3), np.int64)
    if found.ndim != 2 or found.shape[1] != 3 or found.dtype.kind not in "iu":  # noqa: PLR2004
        raise SpecError(field, f"{found.dtype} of shape {found.shape}", wanted)
    # What 63 bits do not hold becomes negative.
    whole = found.view(np.int64) if found.dtype == np.uint64 else found.astype(np.int64)
    wrong = (whole < 0).any(1)
    wrong |= whole[:, :2].max(1) > MOST - np.maximum(whole[:, 2], 0)
    if wrong.any():
        told = f"an address and a length >= 0, and an end of at most {MOST}"
        raise SpecError(field, found[int(np.argmax(wrong))].tolist(), told)
    return whole


def _check_caches(field: str, given: Mapping[RankId, RankCache], engine: EngineSpec) -> None:
    """Raise unless every rank of *engine* has its cache, and no other rank any."""
    mapping(field, given, "RankId to RankCache")
    missing = [str(rank) for rank in engine.parallel.ranks if rank not in given]
    if missing:
        told = f"the cache of {', '.join(missing)}"
        raise SpecError(field, [str(rank) for rank in given], told)
    for rank, cache in given.items():
        name = f"{field}[{rank}]"
        engine.parallel.check_rank(rank, name)
        if not isinstance(cache, RankCache) or cache.rank != rank:
            found = cache.rank if isinstance(cache, RankCache) else type(cache).__name__
            raise SpecError(name, str(found), "the cache of that rank")
        check_engine(f"{name}.engine", engine, cache.engine)


def _check_given(
    plan: TransferPlan,
    producers: Mapping[RankId, RankCache],
    consumers: Mapping[RankId, RankCache],
    request: TransferRequest,
    owners: Mapping[Role, Owners],
) -> None:
    """Raise unless every cache and every table is there that the check reads.

    A block of the producer that moves for two groups of one memory is refused here. The checker
    would accept it: each group's bytes are read from that group's block.
    """
    _check_caches("producers", producers, plan.producer)
    _check_caches("consumers", consumers, plan.consumer)
    instance("request", request, TransferRequest)
    request.check_groups([group.name for group in plan.consumer.groups])
    read: dict[str, list[Ids]] = {}
    for pair in plan.pairs:
        groups: dict[Role, KVCacheGroup] = {"consumer": pair.consumer, "producer": pair.producer}
        tables = {side: request.table(side, group.name) for side, group in groups.items()}
        for spec, _ in pair.layers_by_spec:
            wanted = owners["consumer"].wanted(request, pair.consumer, spec)
            for side, group in groups.items() if wanted else ():
                per_token = all(part.per_token for part in spec.parts)
                check = _check_tokens if per_token else _check_state
                ids = check(owners[side], side, group, tables[side], wanted)
                if side == "producer":
                    read.setdefault(group.name, []).append(ids)
    for cache in producers.values():
        check_read_once(read, sharing(cache))


def _check_tokens(
    owners: Owners, side: Role, group: KVCacheGroup, table: BlockTable, wanted: range
) -> Ids:
    """Return the ids of the blocks of *expected* tokens that a table has.

    Raises unless the table begins with a block, and no such token is in the null block.
    """
    virtual, null = owners.virtual_block(group), owners.engine.null_block
    table.check_start(f"{side}_blocks[{group.name!r}]", virtual)
    held = table.tokens(virtual)
    if side == "producer":
        check_producer_holds(group.name, held, wanted)
    inside = range(max(wanted.start, held.start), min(wanted.stop, held.stop))
    missing = table.without_block(inside, virtual, null) if inside else EMPTY
    check_no_null(side, group.name, null, missing, wanted)
    return table.blocks_of(inside, virtual) if inside else table.block_ids[:0]


def _check_state(
    owners: Owners, side: Role, group: KVCacheGroup, table: BlockTable, wanted: range
) -> Ids:
    """Return the id of the block in which the state after the *expected* token lies.

    Raises unless the table has that block, and it is not the null block.
    """
    field, null = f"{side}_blocks[{group.name!r}]", owners.engine.null_block
    at = table.state_block(field, group.spec.block_size, wanted.stop - 1)
    check_no_null(side, group.name, null, wanted if table.block_ids[at] == null else EMPTY, wanted)
    return table.block_ids[at : at + 1]
