"""The exact-cover checker, with a readable counter-example.

Law: stated over the target. For every byte that a consumer rank should receive there is exactly
one descriptor that writes it, from the bytes of the same unit, token and layer; and no descriptor
writes anything but those bytes and dead tokens in the request's own blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvspec.check.checker import Checker
from kvspec.check.counterexample import CounterExample
from kvspec.descriptors.cells import check_producer_holds
from kvspec.descriptors.request import BlockTable, TransferRequest, check_no_null
from kvspec.descriptors.table import build_table, check_engine
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import MOST, instance, mapping
from kvspec.memory.regions import RankCache
from kvspec.ownership.election import Role
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.parallel import RankId
from kvspec.ownership.tokens import Ints
from kvspec.plan.plan import TransferPlan
from kvspec.plan.shares import GroupPair

Rows = npt.NDArray[np.uint64]


def verify(
    plan: TransferPlan,
    producers: Mapping[RankId, RankCache],
    consumers: Mapping[RankId, RankCache],
    request: TransferRequest,
    descriptors: Mapping[tuple[RankId, RankId], npt.ArrayLike] | None = None,
) -> CounterExample | None:
    """Return the first byte of *request* that would not be right, or None if every byte is.

    *descriptors*: what is to be copied, by (producer rank, consumer rank): uint64 rows (producer
    address, consumer address, length), of any connector; the library's own unless given.
    """
    _check_given(plan, producers, consumers, request)
    if descriptors is None:
        descriptors = {
            (source, rank): build_table(plan, producers[source], cache).descriptors(request)
            for rank, cache in consumers.items()
            for source in plan.sources(rank)
        }
    given = mapping("descriptors", descriptors, "(producer RankId, consumer RankId) to rows")
    moved = {pair: _rows(plan, pair, rows) for pair, rows in given.items()}
    for rank, cache in consumers.items():
        sources = tuple(source for source, target in moved if target == rank)
        writes = [moved[source, rank] for source in sources]
        numbers = np.repeat(np.arange(len(writes)), [len(each) for each in writes])
        table = np.concatenate([np.empty((0, 3), np.int64), *writes])
        order = np.argsort(table[:, 1], kind="stable")
        checker = Checker(plan, cache, request, producers, sources, table[order], numbers[order])
        found = checker.first()
        if found is not None:
            return found
    return None


def _rows(plan: TransferPlan, pair: tuple[RankId, RankId], rows: object) -> Ints:
    """Return descriptors as int64 rows of three, if they are between two ranks of the plan."""
    field = f"descriptors[{pair}]"
    if not isinstance(pair, tuple) or len(pair) != 2:  # noqa: PLR2004 - two ranks
        raise SpecError("descriptors", pair, "keys (producer RankId, consumer RankId)")
    plan.producer.parallel.check_rank(pair[0], field)
    plan.consumer.parallel.check_rank(pair[1], field)
    wanted = "integers of shape (n, 3): addresses and a length"
    try:
        found = np.asarray(rows)
    except (TypeError, ValueError):
        raise SpecError(field, rows, wanted) from None
    if found.size == 0:
        return np.empty((0, 3), np.int64)
    if found.ndim != 2 or found.shape[1] != 3 or found.dtype.kind not in "iu":  # noqa: PLR2004
        raise SpecError(field, f"{found.dtype} of shape {found.shape}", wanted)
    whole = found.astype(np.int64)  # what 63 bits do not hold becomes negative
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
) -> None:
    """Raise unless every cache and every table is there that the check reads."""
    instance("plan", plan, TransferPlan)
    _check_caches("producers", producers, plan.producer)
    _check_caches("consumers", consumers, plan.consumer)
    instance("request", request, TransferRequest)
    request.check_groups([group.name for group in plan.consumer.groups])
    for pair in plan.pairs:
        _check_tables(plan, pair, request)


def _check_tables(plan: TransferPlan, pair: GroupPair, request: TransferRequest) -> None:
    """Raise unless both tables of a pair of groups are there, and hold what is read of them."""
    theirs = request.table("consumer", pair.consumer.name)
    ours = request.table("producer", pair.producer.name)
    tokens = ours.tokens(plan.producer.virtual_block(pair.producer))
    sides: tuple[tuple[Role, EngineSpec, KVCacheGroup, BlockTable], ...] = (
        ("consumer", plan.consumer, pair.consumer, theirs),
        ("producer", plan.producer, pair.producer, ours),
    )
    for spec, _ in pair.alike:
        wanted = request.wanted(pair.consumer.name, spec)
        if wanted and all(part.per_token for part in spec.parts):
            check_producer_holds(pair.producer.name, tokens, wanted)
            for side, engine, group, table in sides:
                virtual, null = engine.virtual_block(group), engine.null_block
                held = table.tokens(virtual)
                inside = range(max(wanted.start, held.start), min(wanted.stop, held.stop))
                if inside:
                    missing = table.without_block(inside, virtual, null)
                    check_no_null(side, group.name, null, missing, wanted)
        elif wanted:
            for side, engine, group, table in sides:
                slot = _slot(f"{side}_blocks[{group.name!r}]", table, group, wanted.start)
                missing = wanted if slot == engine.null_block else EMPTY
                check_no_null(side, group.name, engine.null_block, missing, wanted)


def _slot(field: str, table: BlockTable, group: KVCacheGroup, token: int) -> int:
    """Return the id of *table*'s one slot, or of the block in which the state of *token* lies."""
    if len(table.block_ids) == 1 and not table.first_token:
        return int(table.block_ids[0])
    held = table.tokens(group.spec.block_size)
    if token not in held:
        told = f"one id, the state's slot, or a block for token {token}"
        raise SpecError(field, table.block_ids.tolist(), told)
    return int(table.block_ids[(token - held.start) // group.spec.block_size])
