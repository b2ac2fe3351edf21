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
from kvspec.request import TransferRequest
from kvspec.table import build_table

__all__ = ["CounterExample", "Proof", "prove", "verify"]

Rows = npt.NDArray[np.uint64]


def verify(
    plan: TransferPlan,
    producers: Mapping[RankId, RankCache],
    consumers: Mapping[RankId, RankCache],
    request: TransferRequest,
    descriptors: Mapping[tuple[RankId, RankId], Rows] | None = None,
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
    for rank, cache in consumers.items():
        sources = tuple(source for source, target in descriptors if target == rank)
        writes = [descriptors[source, rank].astype(np.int64) for source in sources]
        numbers = np.repeat(np.arange(len(writes)), [len(each) for each in writes])
        table = np.concatenate([np.empty((0, 3), np.int64), *writes])
        order = np.argsort(table[:, 1], kind="stable")
        checker = Checker(plan, cache, request, producers, sources, table[order], numbers[order])
        found = checker.first()
        if found is not None:
            return found
    return None


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
    for pair in plan.pairs:
        for field, tables, group in (
            ("consumer_blocks", request.consumer_blocks, pair.consumer),
            ("producer_blocks", request.producer_blocks, pair.producer),
        ):
            if group.name not in tables:
                raise SpecError(field, sorted(tables), f"a block table for group {group.name!r}")
        virtual = pair.producer.spec.block_size * plan.producer.parallel.context_size
        held = request.producer_blocks[pair.producer.name].tokens(virtual)
        for spec, _ in pair.alike:
            wanted = request.wanted(pair.consumer.name, spec)
            if wanted and all(part.tokens_per_state for part in spec.parts):
                check_producer_holds(pair.producer.name, held, wanted)
