"""Whole transfers in one process: numpy is the transport, every address is looked up.

An address that the library names must lie in the storage of the rank it belongs to; nothing else
of the library's arithmetic is used to move, to fill or to compare. Needs no torch, no hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.table import DescriptorTable, build_table
from kvspec.memory.allocation import allocate
from kvspec.memory.rank_cache import Memory, RankCache
from kvspec.ownership.parallel import RankId
from kvspec.plan.plan import TransferPlan, plan_transfer
from kvspec.testing import oracle
from kvspec.testing.carve import Bytes
from kvspec.testing.case import Case

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec

Storage = dict[str, Bytes]
Held = dict[RankId, tuple[RankCache, Storage]]
Pair = tuple[RankId, RankId]
Copy = tuple[int, int, int]  # producer address, consumer address, length
Copies = Callable[[DescriptorTable, TransferRequest], list[Copy]]
SEED = 5


@attrs.frozen
class PreparedLists:
    """Lists as NIXL prepares them, and what is picked of them: rows of 5, and int32 ids into them.

    A row is ``(address, length, device, stride, count)``; an id counts through the rows' counts.
    """

    producer_rows: npt.NDArray[np.uint64]
    consumer_rows: npt.NDArray[np.uint64]
    producer_ids: npt.NDArray[np.int32]
    consumer_ids: npt.NDArray[np.int32]

    def copies(self) -> list[Copy]:
        """Return the copies that the ids mean, in order."""
        sources, lengths = _picked(self.producer_rows, self.producer_ids)
        places, other = _picked(self.consumer_rows, self.consumer_ids)
        if lengths != other:
            raise AssertionError("the lengths of the two sides' descriptors differ")
        return list(zip(sources, places, lengths, strict=True))


def _picked(
    rows: npt.NDArray[np.uint64], ids: npt.NDArray[np.int32]
) -> tuple[list[int], list[int]]:
    """Return the address and the length of each of *ids*."""
    index = ids.astype(np.int64)
    address, length, _, stride, count = rows.astype(np.int64).T
    starts = np.concatenate([[0], np.cumsum(count)])
    if ids.dtype != np.int32 or (len(index) and not 0 <= index.min() <= index.max() < starts[-1]):
        raise AssertionError(f"ids {ids!r}: expected int32 from 0 to {starts[-1] - 1}")
    row = np.searchsorted(starts, index, side="right") - 1
    return (address[row] + (index - starts[row]) * stride[row]).tolist(), length[row].tolist()


def prepared(table: DescriptorTable, request: TransferRequest) -> PreparedLists:
    """Return a table's rows and the ids of `select`."""
    return PreparedLists(table.producer_rows, table.consumer_rows, *table.select(request))


def selected(table: DescriptorTable, request: TransferRequest) -> list[Copy]:
    """Return the copies that the ids of `select` mean, in order."""
    return prepared(table, request).copies()


def described(
    table: DescriptorTable, request: TransferRequest, tokens: range | None = None
) -> list[Copy]:
    """Return the copies that `descriptors` lists."""
    rows = table.descriptors(request, tokens=tokens)
    assert np.uint64 == rows.dtype
    return [(int(a), int(b), int(c)) for a, b, c in rows]


def inside(storage: Mapping[str, Bytes], address: int, length: int) -> tuple[str, int]:
    """Return the group and offset of *length* bytes at *address*, all in one group's storage."""
    for name, flat in storage.items():
        offset = address - flat.__array_interface__["data"][0]
        if offset >= 0 and offset + length <= flat.size:
            return name, offset
    raise AssertionError(f"{length} bytes at {address:#x} are not in any storage of this rank")


def finest(cache: RankCache) -> RankCache:
    """Return *cache* in as many memories as its regions allow; some of them touch."""
    memories: list[Memory] = []
    for region in sorted(cache.regions, key=lambda each: (each.extent.start, each.extent.stop)):
        start, stop = region.extent.start, region.extent.stop
        if memories and start < memories[-1].address + memories[-1].length:
            last = memories.pop()
            start, stop = last.address, max(stop, last.address + last.length)
        memories.append(Memory(start, stop - start, region.memory_type, region.device))
    return attrs.evolve(cache, memory=tuple(memories))


def held(engine: EngineSpec, pool: Mapping[str, int], *, shared: bool = False) -> Held:
    """Return the cache and storage of every rank of *engine*."""
    return {rank: allocate(engine, rank, pool, shared=shared) for rank in engine.parallel.ranks}


def snapshot(ranks: Held) -> dict[RankId, Storage]:
    """Return a copy of every rank's storage."""
    return {rank: oracle.each_array(storage, np.copy) for rank, (_, storage) in ranks.items()}


@attrs.frozen
class World:
    """One case with its memory: producers hold true bytes, consumers none."""

    case: Case
    producers: Held
    consumers: Held
    before: dict[RankId, Storage]
    _made: dict[tuple[Pair, frozenset[str] | None], DescriptorTable] = attrs.field(
        factory=dict, repr=False, eq=False
    )

    _right: dict[RankId, tuple[Storage, Storage]] = attrs.field(
        factory=dict, init=False, repr=False, eq=False
    )

    @cached_property
    def plan(self) -> TransferPlan:
        """The library's plan of the case."""
        return plan_of(self.case)

    def asking(self, request: TransferRequest) -> World:
        """Return the world of another *request* over the very memory, and tables, of this one."""
        case = attrs.evolve(self.case, request=request)
        return World(case, self.producers, self.consumers, self.before, self._made)

    def table(
        self, producer: RankId, consumer: RankId, layers: frozenset[str] | None = None
    ) -> DescriptorTable:
        """Return the library's descriptor table of one pair of ranks, of all *layers* or some."""
        key = (producer, consumer), layers
        if key not in self._made:
            caches = self.producers[producer][0], self.consumers[consumer][0]
            self._made[key] = build_table(self.plan, *caches, layers=layers)
        return self._made[key]

    def tables(self) -> Iterator[tuple[RankId, RankId, DescriptorTable]]:
        """Yield the descriptor table of each pair of ranks that exchange anything."""
        for p, c in sorted({(edge.producer, edge.consumer) for edge in self.plan.edges}):
            yield p, c, self.table(p, c)

    def restore(self) -> None:
        """Give every consumer rank the bytes that it had before."""
        for rank, storage in self.before.items():
            for name, flat in storage.items():
                self.consumers[rank][1][name][:] = flat

    def copy(self, pair: Pair, copies: Iterable[Copy]) -> None:
        """Do what *copies* say, from the producer to the consumer of *pair*."""
        sent, kept = self.producers[pair[0]][1], self.consumers[pair[1]][1]
        for source, place, length in copies:
            name, start = inside(sent, source, length)
            target, offset = inside(kept, place, length)
            kept[target][offset : offset + length] = sent[name][start : start + length]

    def execute(self, copies: Copies) -> None:
        """Do what *copies* says, for every pair of ranks."""
        for p, c, table in self.tables():
            self.copy((p, c), copies(table, self.case.request))

    def rest(self) -> tuple[Any, ...]:
        """Return the oracle's arguments about the consumer."""
        return self.case.consumer_pool, self.case.request.consumer_blocks, self.case.request

    def differences(self) -> list[str]:
        """Return what is wrong on any consumer rank."""
        source = self.case.producer
        return [
            line
            for rank, (_, after) in self.consumers.items()
            for line in oracle.compare(
                self.case.consumer, rank, self.right(rank), after, *self.rest(), source=source
            )
        ]

    def right(self, rank: RankId) -> tuple[Storage, Storage]:
        """Return what a consumer must hold, and where anything is allowed; not to be changed."""
        if rank not in self._right:
            self._right[rank] = oracle.expected(
                self.case.consumer,
                rank,
                self.before[rank],
                *self.rest(),
                seed=SEED,
                source=self.case.producer,
            )
        return self._right[rank]

    def live(self, rank: RankId) -> tuple[Storage, Storage, dict[str, npt.NDArray[np.bool_]]]:
        """Return what a consumer must hold, where anything is allowed, and which bytes arrive.

        Bytes that arrive are those that must change: `spoil` left none of them right.
        """
        (must, may), before = self.right(rank), self.before[rank]
        return must, may, {name: must[name] != before[name] for name in must}


def plan_of(case: Case) -> TransferPlan:
    """Return the library's plan of *case*."""
    return plan_transfer(
        case.producer,
        case.consumer,
        replica_policy=case.replica_policy,
        common_states=case.common_states,
    )


def world(case: Case, producers: Held | None = None) -> World:
    """Allocate both sides of *case*, fill the producers and spoil the consumers."""
    request = case.request
    if producers is None:
        producers = held(case.producer, case.producer_pool, shared=case.shared)
        for rank, (_, storage) in producers.items():
            pool, tables = case.producer_pool, request.producer_blocks
            oracle.fill(case.producer, rank, storage, pool, tables, request, seed=SEED)
    consumers = held(case.consumer, case.consumer_pool, shared=case.shared)
    for rank, (_, storage) in consumers.items():
        pool, tables = case.consumer_pool, request.consumer_blocks
        oracle.spoil(case.consumer, rank, storage, pool, tables, request, seed=SEED)
    return World(case, producers, consumers, snapshot(consumers))
