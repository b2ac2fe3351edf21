"""The exact-cover checker, with a readable counter-example.

Law: stated over the target. For every byte that a consumer rank should receive there is exactly
one descriptor that writes it, from the bytes of the same unit, token and layer; and no descriptor
writes anything but those bytes and dead tokens in the request's own blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvspec.cache import RankCache
from kvspec.checker import Checker
from kvspec.counterexample import CounterExample
from kvspec.errors import SpecError
from kvspec.parallel import RankId
from kvspec.pieces import check_producer_holds
from kvspec.plan import TransferPlan
from kvspec.proof import Proof, prove
from kvspec.ranges import Ints
from kvspec.request import TransferRequest
from kvspec.table import build_table

__all__ = ["CounterExample", "Proof", "prove", "verify"]

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
    moved = {pair: _rows(plan, pair, rows) for pair, rows in descriptors.items()}
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
    found = np.asarray(rows)
    if found.size == 0:
        return np.empty((0, 3), np.int64)
    if found.ndim != 2 or found.shape[1] != 3 or found.dtype.kind not in "iu":  # noqa: PLR2004
        told = f"{found.dtype} of shape {found.shape}"
        raise SpecError(field, told, "integers of shape (n, 3): addresses and a length")
    return found.astype(np.int64)


def _check_given(
    plan: TransferPlan,
    producers: Mapping[RankId, RankCache],
    consumers: Mapping[RankId, RankCache],
    request: TransferRequest,
) -> None:
    """Raise unless every cache and every table is there that the check reads."""
    for field, given, engine in (
        ("producers", producers, plan.producer),
        ("consumers", consumers, plan.consumer),
    ):
        missing = [str(rank) for rank in engine.parallel.ranks if rank not in given]
        if missing:
            told = f"the cache of {', '.join(missing)}"
            raise SpecError(field, [str(rank) for rank in given], told)
        for rank, cache in given.items():
            if not isinstance(cache, RankCache) or cache.rank != rank:
                found = cache.rank if isinstance(cache, RankCache) else type(cache).__name__
                raise SpecError(f"{field}[{rank}]", str(found), "the cache of that rank")
    request.check_groups([group.name for group in plan.consumer.groups])
    for pair in plan.pairs:
        for field, tables, group in (
            ("consumer_blocks", request.consumer_blocks, pair.consumer),
            ("producer_blocks", request.producer_blocks, pair.producer),
        ):
            if group.name not in tables:
                raise SpecError(field, sorted(tables), f"a block table for group {group.name!r}")
        virtual = pair.producer.spec.block_size * plan.producer.parallel.context_size
        tokens = request.producer_blocks[pair.producer.name].tokens(virtual)
        for spec, _ in pair.alike:
            wanted = request.wanted(pair.consumer.name, spec)
            if wanted and all(part.tokens_per_state for part in spec.parts):
                check_producer_holds(pair.producer.name, tokens, wanted)
