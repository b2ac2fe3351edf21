"""Descriptor rows of one pair of ranks, and the ids of one request.

Law: rows are made once and do not know a request; a request only picks ids. Every live, uncached
byte lies in exactly one selected descriptor, and a cached byte in none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.cells import Cells, Pieces, cells, pieces
from kvspec.descriptors.paging import Geometry
from kvspec.descriptors.pool import Pool
from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.runs import RowSet, merge, row_sets
from kvspec.descriptors.shared import check_shared, sharing
from kvspec.engines.engine import EngineSpec
from kvspec.errors import Mismatch, MismatchError
from kvspec.inputs import instance
from kvspec.memory.regions import RankCache
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.plan.mismatches import differing
from kvspec.plan.plan import TransferPlan

Rows = npt.NDArray[np.uint64]
RowIds = npt.NDArray[np.int32]
MAX_IDS = 2**31
"""Ids are int32: NIXL truncates wider ones without a word."""


@attrs.frozen(eq=False)
class Entry:
    """A set of rows of one edge, and the first id of each side's."""

    edge: Edge
    rows: RowSet
    producer_first: int
    consumer_first: int

    def ids(self, cells: Cells) -> tuple[RowIds, RowIds]:
        """Return the ids of *cells* on both sides, row by row."""
        found = []
        for pool, first, block, cell in (
            (self.rows.producer, self.producer_first, cells.producer_block, cells.producer_cell),
            (self.rows.consumer, self.consumer_first, cells.consumer_block, cells.consumer_cell),
        ):
            per_run = pool.ids_per_run
            starts = first + np.arange(len(self.rows), dtype=np.int64) * per_run
            steps = pool.steps(block, cell).astype(np.int32)
            found.append((starts.astype(np.int32)[:, None] + steps).ravel())
        return found[0], found[1]

    def addresses(self, cells: Cells) -> npt.NDArray[np.int64]:
        """Return (producer address, consumer address, length) of *cells*, row by row."""
        rows = self.rows
        found = np.empty((len(rows) * len(cells), 3), np.int64)
        ours = rows.producer.offsets(cells.producer_block, cells.producer_cell)
        theirs = rows.consumer.offsets(cells.consumer_block, cells.consumer_cell)
        found[:, 0] = (rows.producer_address[:, None] + ours).ravel()
        found[:, 1] = (rows.consumer_address[:, None] + theirs).ravel()
        found[:, 2] = np.repeat(rows.length, len(cells))
        return found


@attrs.frozen(eq=False)
class DescriptorTable:
    """Strided rows of both sides of one pair of ranks; see `build_table`.

    *producer_rows*, *consumer_rows*: uint64 of shape (rows, 5), one row ``(address, length,
    device, stride, count)``. A descriptor's id counts through the rows' counts in order. All rows
    of a side lie in one type of memory.
    """

    plan: TransferPlan
    producer: RankCache
    consumer: RankCache
    entries: tuple[Entry, ...]
    producer_rows: Rows
    consumer_rows: Rows
    producer_memory_type: str
    consumer_memory_type: str

    def select(self, request: TransferRequest) -> tuple[RowIds, RowIds]:
        """Return the ids of the descriptors that *request* moves: producer's, consumer's.

        Both are int32 and of equal length; descriptor i of one side pairs with descriptor i of the
        other. Ids adjacent on both sides stand together. Raises `SpecError` or `MismatchError` for
        any fault of the block tables, before anything is posted.
        """
        found = [entry.ids(chosen) for entry, chosen in self._cells(request)]
        if not found:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        ours, theirs = zip(*found, strict=True)
        return np.concatenate(ours), np.concatenate(theirs)

    def descriptors(self, request: TransferRequest) -> Rows:
        """Return (producer address, consumer address, length) of what *request* moves.

        A uint64 array of shape (n, 3), ordered by producer address: no two rows could be one, each
        inside one memory of either cache.
        """
        found = [entry.addresses(chosen) for entry, chosen in self._cells(request)]
        if not found:
            return np.empty((0, 3), np.uint64)
        seams = self.producer.seams, self.consumer.seams
        return np.stack(merge(found, seams), axis=1).astype(np.uint64)

    def counts(self, request: TransferRequest) -> tuple[int, int]:
        """Return how many descriptors NIXL posts for `select`, and the fewest there could be.

        NIXL joins neighbours of the list whose ids follow each other in one dense row.
        """
        posted = 0
        for entry, chosen in self._cells(request):
            rows = entry.rows
            joined = np.full(max(len(chosen) - 1, 0), rows.touching)
            for pool, block, cell in (
                (rows.producer, chosen.producer_block, chosen.producer_cell),
                (rows.consumer, chosen.consumer_block, chosen.consumer_cell),
            ):
                joined &= np.diff(pool.steps(block, cell)) == 1
                joined &= np.diff(pool.row(block, cell)) == 0
            posted += len(rows) * (len(chosen) - int(joined.sum()))
        return posted, len(self.descriptors(request))

    def explain(
        self, consumer_id: int | None = None, request: TransferRequest | None = None
    ) -> str:
        """Return, in words, what one descriptor moves: layer, part, units, tokens, both ranks.

        Without an id: the rows of both sides, and how many descriptors *request* takes.
        """
        from kvspec.descriptors.explain import describe, summary  # noqa: PLC0415 - it reads this class

        if consumer_id is None:
            return summary(self, request)
        return describe(self, consumer_id, request)

    @cached_property
    def _pools(self) -> tuple[frozenset[str], ...]:
        return sharing(self.consumer)

    def _cells(self, request: TransferRequest) -> Iterator[tuple[Entry, Cells]]:
        instance("request", request, TransferRequest)
        request.check_groups([group.name for group in self.plan.consumer.groups])
        check_shared(self.plan, request, self._pools)
        cut: dict[tuple[int, Geometry], Pieces] = {}
        known: dict[tuple[object, ...], Cells] = {}
        for entry in self.entries:
            rows = entry.rows
            family = (id(entry.edge), rows.geometry)
            if family not in cut:
                cut[family] = pieces(request, entry.edge, rows.geometry)
            # Cells stand in the producer's order, and ids are checked against both pools.
            pools = (rows.producer.num_blocks, rows.producer.folded, rows.consumer.num_blocks)
            key = (*family, rows.unit, rows.skip, rows.tokens, *pools)
            if key not in known:
                known[key] = cells(cut[family], entry.edge, rows)
            if len(known[key]):
                yield entry, known[key]

    def to_svg(self, request: TransferRequest | None = None, group: str | None = None) -> str:
        """Return a picture of one block; needs ``kvspec[draw]``; see `kvspec.draw.table_svg`."""
        from kvspec.draw import table_svg  # noqa: PLC0415 - an extra draws

        return table_svg(self, request, group)

    def _repr_svg_(self) -> str:
        return self.to_svg()


def build_table(
    plan: TransferPlan, producer_cache: RankCache, consumer_cache: RankCache
) -> DescriptorTable:
    """Make the descriptor rows of one pair of ranks.

    The number of rows does not depend on the number of blocks. Raises `MismatchError` if a cache is
    not one of the plan's, or if the ids of one side would not fit an int32.
    """
    instance("plan", plan, TransferPlan)
    instance("producer_cache", producer_cache, RankCache)
    instance("consumer_cache", consumer_cache, RankCache)
    check_engine("producer_cache.engine", plan.producer, producer_cache.engine)
    check_engine("consumer_cache.engine", plan.consumer, consumer_cache.engine)
    entries: list[Entry] = []
    at = (0, 0)
    for edge in plan.between(producer_cache.rank, consumer_cache.rank):
        groups = plan.producer.group(edge.producer_group), plan.consumer.group(edge.group)
        for rows in row_sets(edge, groups, producer_cache, consumer_cache):
            entries.append(Entry(edge, rows, *at))
            used = rows.ids_used()
            at = at[0] + used[0], at[1] + used[1]
    why = "descriptor ids are int32; give fewer blocks, or groups of fewer layers"
    many = [
        Mismatch(f"{side} descriptors", count, MAX_IDS, why, ("needed", "limit"))
        for side, count in zip(("producer", "consumer"), at, strict=True)
        if count > MAX_IDS
    ]
    if many:
        raise MismatchError(many)
    producer_rows, producer_type = _side(
        "producer", [(e.rows.producer, e.rows.producer_address, e.rows.length) for e in entries]
    )
    consumer_rows, consumer_type = _side(
        "consumer", [(e.rows.consumer, e.rows.consumer_address, e.rows.length) for e in entries]
    )
    return DescriptorTable(
        plan=plan,
        producer=producer_cache,
        consumer=consumer_cache,
        entries=tuple(entries),
        producer_rows=producer_rows,
        consumer_rows=consumer_rows,
        producer_memory_type=producer_type,
        consumer_memory_type=consumer_type,
    )


def _side(side: str, runs: list[tuple[Pool, Ints, Ints]]) -> tuple[Rows, str]:
    """Return all rows of one side, and the type of memory they lie in."""
    types = sorted({pool.memory_type for pool, _, _ in runs}) or ["DRAM"]
    if len(types) > 1:
        why = "not yet: one type of memory on each side of a pair of ranks"
        raise MismatchError(
            [Mismatch(f"{side} memory_type", types[0], types[1], why, ("one", "other"))]
        )
    rows = [pool.rows(address, length) for pool, address, length in runs]
    return np.concatenate([np.empty((0, 5), np.uint64), *rows]), types[0]


def check_engine(field: str, planned: EngineSpec, given: EngineSpec) -> None:
    """Raise `MismatchError` naming what of a cache's engine is not as the plan's."""
    if given is not planned and given != planned:
        why = "the cache was laid out for another engine than the plan's"
        raise MismatchError(differing(planned, given, field, why, ("plan", "cache")))
