"""Whole transfers in one process: numpy is the transport, every address is looked up.

An address that the library names must lie in the storage of the rank it belongs to; nothing else
of the library's arithmetic is used to move, to fill or to compare. Needs no torch, no hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.table import DescriptorTable, build_table
from kvspec.memory.allocation import allocate
from kvspec.memory.regions import Memory, RankCache
from kvspec.ownership.parallel import RankId
from kvspec.plan.plan import TransferPlan, plan_transfer
from kvspec.testing import oracle
from kvspec.testing.carve import Bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvspec.engines.engine import EngineSpec
    from kvspec.testing.strategies import Case

Storage = dict[str, Bytes]
Held = dict[RankId, tuple[RankCache, Storage]]
Copy = tuple[int, int, int]  # producer address, consumer address, length
Copies = Callable[[DescriptorTable, TransferRequest], list[Copy]]
SEED = 5


def selected(table: DescriptorTable, request: TransferRequest) -> list[Copy]:
    """Return the copies that the ids of `select` mean, in order."""
    sides = []
    for rows, ids in zip(
        (table.producer_rows, table.consumer_rows), table.select(request), strict=True
    ):
        assert np.int32 == ids.dtype
        index = ids.astype(np.int64)
        address, length, _, stride, count = rows.astype(np.int64).T
        starts = np.concatenate([[0], np.cumsum(count)])
        assert not len(index) or 0 <= index.min() <= index.max() < starts[-1]
        at = np.searchsorted(starts, index, side="right") - 1
        sides.append((address[at] + (index - starts[at]) * stride[at], length[at]))
    (sources, lengths), (places, other) = sides
    assert lengths.tolist() == other.tolist()
    return list(zip(sources.tolist(), places.tolist(), lengths.tolist(), strict=True))


def described(table: DescriptorTable, request: TransferRequest) -> list[Copy]:
    """Return the copies that `descriptors` lists."""
    rows = table.descriptors(request)
    assert np.uint64 == rows.dtype
    return [(int(a), int(b), int(c)) for a, b, c in rows]


def inside(storage: Mapping[str, Bytes], address: int, length: int) -> tuple[str, int]:
    """Return the group and offset of *length* bytes at *address*, all in one group's storage."""
    for name, flat in storage.items():
        offset = address - flat.ctypes.data
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


def held(engine: EngineSpec, pool: dict[str, int], *, shared: bool = False) -> Held:
    """Return the cache and storage of every rank of *engine*."""
    return {rank: allocate(engine, rank, pool, shared=shared) for rank in engine.parallel.ranks}


def snapshot(ranks: Held) -> dict[RankId, Storage]:
    """Return a copy of every rank's storage."""
    return {rank: oracle.each_array(storage, np.copy) for rank, (_, storage) in ranks.items()}


@attrs.frozen
class World:
    """One case with its memory: producers hold true bytes, consumers none."""

    case: Case
    plan: TransferPlan
    producers: Held
    consumers: Held
    before: dict[RankId, Storage]

    def tables(
        self,
    ) -> Iterator[tuple[RankId, RankId, DescriptorTable]]:
        """Yield the descriptor table of each pair of ranks that exchange anything."""
        for p, c in sorted({(edge.producer, edge.consumer) for edge in self.plan.edges}):
            yield p, c, build_table(self.plan, self.producers[p][0], self.consumers[c][0])

    def execute(self, copies: Copies) -> None:
        """Do what *copies* says, for every pair of ranks."""
        for p, c, table in self.tables():
            for source, place, length in copies(table, self.case.request):
                name, start = inside(self.producers[p][1], source, length)
                target, offset = inside(self.consumers[c][1], place, length)
                moved = self.producers[p][1][name][start : start + length]
                self.consumers[c][1][target][offset : offset + length] = moved

    def rest(self) -> tuple[Any, ...]:
        """Return the oracle's arguments about the consumer."""
        return self.case.consumer_pool, self.case.request.consumer_blocks, self.case.request

    def differences(self) -> list[str]:
        """Return what is wrong on any consumer rank."""
        return [
            line
            for rank, (_, after) in self.consumers.items()
            for line in oracle.check(
                self.case.consumer,
                rank,
                self.before[rank],
                after,
                *self.rest(),
                seed=SEED,
                source=self.case.producer,
            )
        ]

    def live(self, rank: RankId) -> tuple[Storage, Storage, dict[str, npt.NDArray[np.bool_]]]:
        """Return what a consumer must hold, where anything is allowed, and which bytes arrive.

        Bytes that arrive are those that must change: `spoil` left none of them right.
        """
        before = self.before[rank]
        must, may = oracle.expected(
            self.case.consumer, rank, before, *self.rest(), seed=SEED, source=self.case.producer
        )
        return must, may, {name: must[name] != before[name] for name in must}


def world(case: Case, producers: Held | None = None) -> World:
    """Plan *case*, allocate both sides, fill the producers and spoil the consumers."""
    plan = plan_transfer(
        case.producer,
        case.consumer,
        replicas=case.replicas,
        salt=case.salt,
        common_states=case.common_states,
    )
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
    return World(case, plan, producers, consumers, snapshot(consumers))
