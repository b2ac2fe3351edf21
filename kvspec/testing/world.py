"""Execute whole transfers in one process: numpy copies the bytes, and each address is looked up.

Invariant: a copy reads and writes only inside the storage of its two ranks. An address outside
raises `AssertionError`. The copies before it have already moved their bytes.

How it works:
    `world` allocates a storage for each rank of a case, fills the producers with true bytes and the
    consumers with wrong ones. Example: a prompt of 2 tokens of 2 bytes moves from block 0 to
    block 1, so 4 bytes move.

    >>> import kvspec
    >>> spec = kvspec.MLAAttentionSpec(block_size=4, head_size=2, dtype="uint8")
    >>> engine = kvspec.EngineSpec(groups=[kvspec.KVCacheGroup(name="g", layers=["l"], spec=spec)])
    >>> request = kvspec.TransferRequest(
    ...     request_id="r", num_tokens=2, producer_blocks={"g": [0]}, consumer_blocks={"g": [1]}
    ... )
    >>> case = Case(
    ...     producer=engine, consumer=engine, producer_pool={"g": 2}, consumer_pool={"g": 2},
    ...     request=request,
    ... )
    >>> here = world(case)
    >>> len(here.differences())
    4
    >>> here.execute(described)
    >>> here.differences()
    []
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
from kvspec.memory.allocation import allocate, plan_memory
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
ByteCopy = tuple[int, int, int]  # producer address, consumer address, length
CopiesOf = Callable[[DescriptorTable, TransferRequest], list[ByteCopy]]
# The seed of all contents of all worlds, so that one world can continue another (law 4).
SEED = 5
GUARD_BYTE = 0xA5


class WrongFormError(AssertionError):
    """An answer of a system has a wrong form. The law that asked reports it as a fault."""


def _of_form(dtype: type, *shape: int) -> Callable[[object, Any, Any], None]:
    """Return a validator of arrays of *dtype*, whose axes after the first one have *shape*."""

    def check(lists: object, field: Any, value: Any) -> None:  # noqa: ANN401
        del lists
        is_array = isinstance(value, np.ndarray) and value.ndim == 1 + len(shape)
        if not is_array or value.dtype != dtype or value.shape[1:] != shape:
            expected = f"an array of {np.dtype(dtype)} of shape {('n', *shape)}".replace("'", "")
            raise WrongFormError(f"{field.name}: expected {expected}, got {value!r}")

    return check


@attrs.frozen
class PreparedLists:
    """Prepared rows of both sides, and the ids that pick descriptors from them, as in NIXL.

    A row is `(address, length, device, stride, count)` and stands for *count* descriptors. An id is
    the number of a descriptor, counted through all rows.

    Attributes:
        producer_rows: uint64 array of shape (rows, 5).
        consumer_rows: The same for the consumer.
        producer_ids: int32 array. The descriptors to read, in order.
        consumer_ids: int32 array of equal length. The descriptors to write.

    Raises:
        WrongFormError: If a field is not such an array.

    Example: two descriptors of 8 bytes on each side. The ids copy descriptor 1 of the producer to
    descriptor 0 of the consumer.

    >>> producer_rows = np.array([[1000, 8, 0, 100, 2]], np.uint64)
    >>> consumer_rows = np.array([[5000, 8, 0, 100, 2]], np.uint64)
    >>> ids = np.array([1], np.int32), np.array([0], np.int32)
    >>> PreparedLists(producer_rows, consumer_rows, *ids).copies()
    [(1100, 5000, 8)]
    """

    producer_rows: npt.NDArray[np.uint64] = attrs.field(validator=_of_form(np.uint64, 5))
    consumer_rows: npt.NDArray[np.uint64] = attrs.field(validator=_of_form(np.uint64, 5))
    producer_ids: npt.NDArray[np.int32] = attrs.field(validator=_of_form(np.int32))
    consumer_ids: npt.NDArray[np.int32] = attrs.field(validator=_of_form(np.int32))

    def copies(self) -> list[ByteCopy]:
        """Return the copies that the ids describe, in order.

        Raises:
            AssertionError: If an id is not in any row, or two lengths differ.
        """
        sources, lengths = _picked(self.producer_rows, self.producer_ids)
        targets, consumer_lengths = _picked(self.consumer_rows, self.consumer_ids)
        if lengths != consumer_lengths:
            raise AssertionError(
                "producer and consumer: expected ids of descriptors with equal lengths, got "
                f"{lengths} and {consumer_lengths} bytes"
            )
        return list(zip(sources, targets, lengths, strict=True))


def _picked(
    rows: npt.NDArray[np.uint64], ids: npt.NDArray[np.int32]
) -> tuple[list[int], list[int]]:
    """Return the addresses and the lengths of the descriptors *ids*."""
    index = ids.astype(np.int64)
    address, length, _, stride, count = rows.astype(np.int64).T
    starts = np.concatenate([[0], np.cumsum(count)])
    if len(index) and not 0 <= index.min() <= index.max() < starts[-1]:
        raise AssertionError(f"ids {ids!r}: expected ids from 0 to {starts[-1] - 1}")
    row = np.searchsorted(starts, index, side="right") - 1
    return (address[row] + (index - starts[row]) * stride[row]).tolist(), length[row].tolist()


def prepared(table: DescriptorTable, request: TransferRequest) -> PreparedLists:
    """Return the rows of *table*, one row for each end, and the ids that `select` returns.

    The table has no rows for the ends of a request, so their ids follow those of the table.
    """
    selection = table.select(request)
    lengths, lists = selection.ends[:, 2], list[Any]()
    for side, rows in enumerate((table.producer_rows, table.consumer_rows)):
        ends = np.zeros((len(lengths), 5), np.uint64)
        ends[:, 0], ends[:, 4] = selection.ends[:, side], 1
        ends[:, 1] = ends[:, 3] = lengths
        first = int(rows[:, 4].sum())
        ids = np.append(selection.ids[side], np.arange(first, first + len(ends)))
        lists += [np.concatenate([rows, ends]), ids.astype(np.int32)]
    return PreparedLists(lists[0], lists[2], lists[1], lists[3])


def selected(table: DescriptorTable, request: TransferRequest) -> list[ByteCopy]:
    """Return the copies that the ids of `select` describe, in order."""
    return prepared(table, request).copies()


def described(
    table: DescriptorTable, request: TransferRequest, tokens: range | None = None
) -> list[ByteCopy]:
    """Return the copies that `descriptors` returns."""
    rows = table.descriptors(request, tokens=tokens)
    assert np.uint64 == rows.dtype
    return [(int(source), int(target), int(length)) for source, target, length in rows]


def inside(storage: Mapping[str, Bytes], address: int, length: int) -> tuple[str, int]:
    """Return the group whose storage contains *length* bytes at *address*, and their offset.

    Raises:
        AssertionError: If the bytes do not lie in the storage of one group.
    """
    for name, flat in storage.items():
        offset = address - flat.__array_interface__["data"][0]
        if offset >= 0 and offset + length <= flat.size:
            return name, offset
    raise AssertionError(
        f"address {address:#x}: expected {length} bytes inside the storage of this rank"
    )


def finest(cache: RankCache) -> RankCache:
    """Return *cache* with its memory cut into as many memories as possible.

    Only regions that overlap stay in one memory. So a copy that leaves its region is found, even if
    the next memory is adjacent.
    """
    memories: list[Memory] = []
    for region in sorted(
        cache.regions, key=lambda r: (r.address_range.start, r.address_range.stop)
    ):
        start, stop = region.address_range.start, region.address_range.stop
        if memories and start < memories[-1].address + memories[-1].length:
            last = memories.pop()
            start, stop = last.address, max(stop, last.address + last.length)
        memories.append(Memory(start, stop - start, region.memory_type, region.device))
    return attrs.evolve(cache, memory=tuple(memories))


def held(
    engine: EngineSpec, pool: Mapping[str, int], *, shared: bool = False, guard: int = 0
) -> Held:
    """Return the cache and the storage of each rank of *engine*.

    If *guard* is not 0, so many bytes with the value `GUARD_BYTE` lie before and after the memory
    of a rank. The owner of the cache is the array of all these bytes.
    """
    return {
        rank: _between_guards(engine, rank, pool, guard, shared=shared)
        if guard
        else allocate(engine, rank, pool, shared=shared)
        for rank in engine.parallel.ranks
    }


def _between_guards(
    engine: EngineSpec, rank: RankId, pool: Mapping[str, int], guard: int, *, shared: bool
) -> tuple[RankCache, Storage]:
    """Return a cache and its storage, with *guard* bytes before and after its memory."""
    on_paper = plan_memory(engine, rank, pool, shared=shared).memory
    size = sum(memory.length for memory in on_paper)
    whole = np.full(size + 2 * guard, GUARD_BYTE, np.uint8)
    start = whole.__array_interface__["data"][0] + guard
    cache = plan_memory(engine, rank, pool, start, shared=shared)
    arrays = [whole[memory.address - start + guard :][: memory.length] for memory in cache.memory]
    names = [group.name for group in engine.groups if engine.layers_at(group, rank.pp)]
    group_arrays = arrays * len(names) if shared else arrays
    return attrs.evolve(cache, owner=whole), dict(zip(names, group_arrays, strict=True))


def snapshot(ranks: Held) -> dict[RankId, Storage]:
    """Return a copy of the storage of each rank."""
    return {rank: oracle.each_array(storage, np.copy) for rank, (_, storage) in ranks.items()}


@attrs.frozen
class World:
    """One case with its memory. The producers hold true bytes, the consumers wrong ones.

    Attributes:
        case: The case.
        producers: Cache and storage of each producer rank.
        consumers: Cache and storage of each consumer rank.
        before: A copy of the consumers' storage before the transfer.
    """

    case: Case
    producers: Held
    consumers: Held
    before: dict[RankId, Storage]
    # Building a table is the slow part of a case, so worlds of one memory share them.
    _tables: dict[tuple[Pair, frozenset[str] | None], DescriptorTable] = attrs.field(
        factory=dict, repr=False, eq=False
    )
    _right: dict[RankId, tuple[Storage, Storage]] = attrs.field(
        factory=dict, init=False, repr=False, eq=False
    )

    @cached_property
    def plan(self) -> TransferPlan:
        """The plan of the library for the case."""
        return plan_of(self.case)

    def asking(self, request: TransferRequest) -> World:
        """Return a world of another *request* that uses the memory and tables of this world."""
        case = attrs.evolve(self.case, request=request)
        return World(case, self.producers, self.consumers, self.before, self._tables)

    def table(
        self, producer: RankId, consumer: RankId, layers: frozenset[str] | None = None
    ) -> DescriptorTable:
        """Return the library's descriptor table of two ranks, for *layers* or for all."""
        key = (producer, consumer), layers
        if key not in self._tables:
            caches = self.producers[producer][0], self.consumers[consumer][0]
            self._tables[key] = build_table(self.plan, *caches, layers=layers)
        return self._tables[key]

    def tables(self) -> Iterator[tuple[RankId, RankId, DescriptorTable]]:
        """Yield the descriptor table of each pair of ranks that exchange bytes."""
        for p, c in sorted({(edge.producer, edge.consumer) for edge in self.plan.edges}):
            yield p, c, self.table(p, c)

    def restore(self) -> None:
        """Write the bytes from before the transfer to all consumer ranks."""
        for rank, storage in self.before.items():
            for name, flat in storage.items():
                self.consumers[rank][1][name][:] = flat

    def changed(self) -> bool:
        """Return whether any byte of a consumer rank differs from before the transfer."""
        return any(
            not np.array_equal(flat, self.before[rank][name])
            for rank, (_, storage) in self.consumers.items()
            for name, flat in storage.items()
        )

    def copy(self, pair: Pair, copies: Iterable[ByteCopy]) -> None:
        """Execute *copies* from the producer rank to the consumer rank of *pair*."""
        sources, targets = self.producers[pair[0]][1], self.consumers[pair[1]][1]
        for source, target, length in copies:
            side = "producer", pair[0]
            try:
                group, start = inside(sources, source, length)
                side = "consumer", pair[1]
                target_group, offset = inside(targets, target, length)
            except AssertionError as error:
                copy = f"({source:#x}, {target:#x}, {length})"
                raise AssertionError(f"{side[0]} {side[1]}, copy {copy}, {error}") from None
            new = sources[group][start : start + length]
            targets[target_group][offset : offset + length] = new

    def execute(self, copies: CopiesOf) -> None:
        """Execute the copies that the function *copies* returns, for each pair of ranks."""
        for p, c, table in self.tables():
            self.copy((p, c), copies(table, self.case.request))

    def _consumer(self) -> tuple[Any, ...]:
        """Return the arguments of the oracle that describe the consumer's blocks."""
        return self.case.consumer_pool, self.case.request.consumer_blocks, self.case.request

    def differences(self) -> list[str]:
        """Return a line for each wrong byte of each consumer rank. See `oracle.check`."""
        return [
            line
            for rank, (_, after) in self.consumers.items()
            for line in oracle.check(
                self.case.consumer,
                rank,
                self.before[rank],
                after,
                *self._consumer(),
                source=self.case.producer,
                right=self.right(rank),
            )
        ]

    def right(self, rank: RankId) -> tuple[Storage, Storage]:
        """Return the result of `oracle.expected` for a consumer rank. Do not modify it."""
        if rank not in self._right:
            self._right[rank] = oracle.expected(
                self.case.consumer,
                rank,
                self.before[rank],
                *self._consumer(),
                seed=SEED,
                source=self.case.producer,
            )
        return self._right[rank]

    def live(self, rank: RankId) -> tuple[Storage, Storage, dict[str, npt.NDArray[np.bool_]]]:
        """Return the right bytes of a consumer rank, a mask of dead bytes, and one of live bytes.

        Live bytes are the bytes that must change: `spoil` has made each of them wrong.
        """
        (must, may), before = self.right(rank), self.before[rank]
        return must, may, {name: must[name] != before[name] for name in must}


def plan_of(case: Case) -> TransferPlan:
    """Return the plan of the library for *case*."""
    return plan_transfer(
        case.producer,
        case.consumer,
        replica_policy=case.replica_policy,
        common_states=case.common_states,
    )


def world(
    case: Case, producers: Held | None = None, guard: int = 0, *, blank: bool = False
) -> World:
    """Allocate both sides of *case*, fill the producers and spoil the consumers.

    Args:
        case: The case.
        producers: Producer ranks that are filled already, for example by an earlier transfer.
        guard: Bytes before and after the memory of each rank. See `held`.
        blank: Whether to leave out the contents, which take most of the time.

    Returns:
        The world.
    """
    request = case.request
    if producers is None:
        producers = held(case.producer, case.producer_pool, shared=case.shared, guard=guard)
        for rank, (_, storage) in () if blank else producers.items():
            pool, tables = case.producer_pool, request.producer_blocks
            oracle.fill(case.producer, rank, storage, pool, tables, request, seed=SEED)
    consumers = held(case.consumer, case.consumer_pool, shared=case.shared, guard=guard)
    for rank, (_, storage) in () if blank else consumers.items():
        pool, tables = case.consumer_pool, request.consumer_blocks
        oracle.spoil(case.consumer, rank, storage, pool, tables, request, seed=SEED)
    return World(case, producers, consumers, snapshot(consumers))
