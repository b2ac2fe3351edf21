"""Descriptor rows of one pair of ranks, and the ids of one request.

Law: rows are made once and do not know a request; a request only picks ids. Every live, uncached
byte lies in exactly one selected descriptor, and a cached byte in none.

Block ids of groups that share one memory.

Invariant: a block of a shared memory holds the bytes of one group. On the consumer, a block that
is written for one group is in no other group's table. On the producer, no block is read for two
groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import combinations, permutations

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.paging import BlockLayout
from kvspec.descriptors.request import BlockTable, Ids, TransferRequest
from kvspec.descriptors.runs import coalesce, row_sets
from kvspec.descriptors.selection import Entry, Selection, SplitGroup
from kvspec.descriptors.tiles import Positions, Tiles, check_tokens
from kvspec.descriptors.unwritten import Pair, unwritten_ranges
from kvspec.engines.engine import EngineSpec
from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.inputs import MOST, instance, positive_int, texts
from kvspec.memory.aliasing import groups_that_share
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.tokens import Ints
from kvspec.plan.mismatches import differing
from kvspec.plan.plan import TransferPlan


def sharing(cache: RankCache) -> tuple[frozenset[str], ...]:
    """Return the sets of groups whose blocks of one id share memory on the rank of *cache*."""
    kernel_blocks_per_block = {
        group.name: group.kernel_blocks_per_block for group in cache.engine.groups
    }
    return groups_that_share(cache.regions, kernel_blocks_per_block)


def check_shared(
    plan: TransferPlan, request: TransferRequest, shared: Iterable[frozenset[str]]
) -> None:
    """Raise `SpecError` if a block of *request* is written for one group and held by another.

    *shared*: groups of the consumer that share memory. Blocks before the first live token are not
    asked: the request may have given them back.
    """
    pairs = {pair.consumer.name: pair.layers_by_spec[0][0] for pair in plan.pairs}
    for groups in shared:
        for name, other in permutations(sorted(groups & set(request.consumer_blocks)), 2):
            if name not in pairs:
                continue  # nothing of it moves
            tables = request.consumer_blocks
            wanted = request.wanted(name, pairs[name])
            written = _blocks(plan.consumer, name, tables[name], wanted)
            group = plan.consumer.group(other)
            spec = group.spec.of_layer(group.layers[0])
            live = spec.live_tokens(request.total(spec))
            held = _blocks(plan.consumer, other, tables[other], range(live.start, MOST))
            twice = np.intersect1d(written, held)
            if len(twice):
                told = f"each block once; group {other!r}, in the same memory, has it too"
                raise SpecError(f"consumer_blocks[{name!r}]", int(twice[0]), told)


def check_shared_sources(
    plan: TransferPlan, request: TransferRequest, shared: Iterable[frozenset[str]]
) -> None:
    """Raise `SpecError` if *request* reads one block of the producer for two groups.

    A block may still stand in two tables, if at most one of the groups moves it. The other group
    may have given the block back, or the consumer may have cached its tokens.

    Args:
        plan: The transfer plan of the two engines.
        request: The request. Tables that end early are compared as far as they reach.
        shared: Sets of groups of the producer that share memory.

    """
    if not shared:
        return
    read: dict[str, list[Ids]] = {}
    for pair in plan.pairs:
        name = pair.producer.name
        table = request.producer_blocks.get(name)
        if table is None:
            continue  # `TransferRequest.table` raises if the request needs it.
        for spec, _ in pair.layers_by_spec:
            wanted = request.wanted(pair.consumer.name, spec)
            read.setdefault(name, []).append(_blocks(plan.producer, name, table, wanted))
    check_read_once(read, shared)


def check_read_once(read: Mapping[str, list[Ids]], shared: Iterable[frozenset[str]]) -> None:
    """Raise `SpecError` if two groups of one memory read the same block.

    Args:
        read: Ids of the blocks that move, by group of the producer.
        shared: Sets of groups of the producer that share memory.

    """
    for groups in shared:
        for name, other in combinations(sorted(groups & read.keys()), 2):
            twice = np.intersect1d(np.concatenate(read[name]), np.concatenate(read[other]))
            if len(twice):
                told = f"a block of one group; group {other!r}, in the same memory, reads it too"
                raise SpecError(f"producer_blocks[{name!r}]", int(twice[0]), told)


def _blocks(engine: EngineSpec, name: str, table: BlockTable, tokens: range) -> Ids:
    """Return the ids of the blocks of *table* that hold *tokens* of group *name*; no null block."""
    group = engine.group(name)
    size = engine.virtual_block(group)
    if not all(part.per_token for part in group.own_parts):
        size = group.spec.block_size
        if len(table.block_ids) == 1 and not table.first_token:
            return table.block_ids[: len(tokens)]
    held = table.tokens(size)
    inside = range(max(tokens.start, held.start), min(tokens.stop, held.stop))
    ids = table.blocks_of(inside, size) if inside else table.block_ids[:0]
    null = engine.null_block
    return ids if null is None else ids[ids != null]


Rows = npt.NDArray[np.uint64]
MAX_IDS = 2**31
"""Ids are int32: NIXL truncates wider ones without a word."""


@attrs.frozen(eq=False)
class DescriptorTable:
    """Strided rows of both sides of one pair of ranks; see `build_table`.

    *producer_rows*, *consumer_rows*: uint64 of shape (rows, 5), one row ``(address, length,
    device, stride, count)``. A descriptor's id counts through the rows' counts in order. All rows
    of a side lie in one type of memory. *layers*: the only ones whose rows these are.
    *prefix_multiple*: tokens of which the cached prefixes of its requests are multiples.
    """

    plan: TransferPlan
    producer: RankCache
    consumer: RankCache
    entries: tuple[Entry, ...]
    producer_rows: Rows
    consumer_rows: Rows
    producer_memory_type: str
    consumer_memory_type: str
    layers: frozenset[str] | None = None
    prefix_multiple: int = 1

    def select(self, request: TransferRequest, *, tokens: Positions | None = None) -> Selection:
        """Return the ids of the descriptors that *request* moves: producer's, consumer's.

        Both are int32 and of equal length; descriptor i of one side pairs with descriptor i of the
        other. Ids adjacent on both sides stand together. `NixlRank.read` takes them, or, faster,
        the `Selection` that the two are unpacked from. Raises `SpecError` or `MismatchError` for
        any fault of the block tables, before anything is posted.

        *tokens*: one step of a request that moves while it is written: ``range(moved, written)``,
        or one by consumer group. Steps that follow each other up to `num_tokens` are the whole
        request, nothing twice; each moves what ends before *written*, so a block that is cut may
        wait for the next step. States, and what counts other tokens than the prompt's, move with
        the last. Of each step the producer's table need only reach *written*.
        """
        picked = tuple(self.tiles(request, tokens))
        return Selection.of(picked, self.producer_rows, self.consumer_rows)

    def descriptors(self, request: TransferRequest, *, tokens: Positions | None = None) -> Rows:
        """Return (producer address, consumer address, length) of what *request* moves.

        A uint64 array of shape (n, 3), ordered by producer address: no two rows could be one, each
        inside one memory of either cache. *tokens*: one step of it, as `select` has it.
        """
        found = [entry.addresses(chosen) for entry, chosen in self.tiles(request, tokens)]
        if not found:
            return np.empty((0, 3), np.uint64)
        return coalesce(found, (self.producer.boundaries, self.consumer.boundaries)).T.view(
            np.uint64
        )

    def counts(self, request: TransferRequest) -> tuple[int, int]:
        """Return how many descriptors NIXL posts for `select`, and the fewest there could be.

        NIXL joins neighbours of the list whose ids follow each other in one dense row.
        """
        posted = sum(entry.rows.posted(chosen) for entry, chosen in self.tiles(request))
        return posted, len(self.descriptors(request))

    def dead_bytes(self, request: TransferRequest) -> int:
        """Return how many of the bytes that *request* moves are of tokens behind its last.

        The last block is cut where that takes no more descriptors, or fewer seconds.
        """
        instance("request", request, TransferRequest)
        return sum(split_group.dead_bytes(request) for split_group in self._split_groups)

    def unwritten_ranges(self, request: TransferRequest) -> Rows:
        """Return (address, length) of the consumer's bytes that *request* leaves in its own blocks.

        A uint64 array of shape (n, 2), by address. Of the units and tokens that this pair of ranks
        exchanges: those of the tables of all sources of a consumer rank are all there are. What is
        cached does not count, nor do blocks before the first live token, which may be another
        request's by now.
        """
        pair = Pair(self.plan, self.producer, self.consumer, self.layers)
        return unwritten_ranges(pair, request, self.descriptors(request))

    @cached_property
    def _groups(self) -> tuple[str, ...]:
        return tuple(group.name for group in self.plan.consumer.groups)

    @cached_property
    def _shared_groups(self) -> tuple[frozenset[str], ...]:
        return sharing(self.consumer)

    @cached_property
    def _source_pools(self) -> tuple[frozenset[str], ...]:
        return sharing(self.producer)

    def tiles(
        self, request: TransferRequest, tokens: Positions | None = None
    ) -> list[tuple[Entry, Tiles]]:
        """Return what of each set of rows *request* moves, or one step of it; raise as `select`."""
        instance("request", request, TransferRequest)
        groups = self._groups
        request.check_groups(groups)
        if tokens is not None:
            check_tokens(tokens, groups)
        if self._shared_groups:
            check_shared(self.plan, request, self._shared_groups)
        if self._source_pools:
            check_shared_sources(self.plan, request, self._source_pools)
        return [
            one for split_group in self._split_groups for one in split_group.picked(request, tokens)
        ]

    @cached_property
    def _split_groups(self) -> list[SplitGroup]:
        return SplitGroup.of(self.plan, self.entries)


def build_table(
    plan: TransferPlan,
    producer_cache: RankCache,
    consumer_cache: RankCache,
    *,
    layers: Iterable[str] | None = None,
    prefix_multiple: int = 1,
) -> DescriptorTable:
    """Make the descriptor rows of one pair of ranks, of all *layers* unless given.

    *prefix_multiple*: a promise that cached prefixes are multiples of so many tokens, as where an
    engine caches whole blocks. There are far fewer rows then; `select` refuses what breaks it.

    The number of rows does not depend on the number of blocks. Raises `MismatchError` if a cache is
    not one of the plan's, or if the ids of one side would not fit an int32; `SpecError` for a layer
    that is none of the consumer's. Tables of layers apart together move what one table of all does.
    """
    instance("plan", plan, TransferPlan)
    instance("producer_cache", producer_cache, RankCache)
    instance("consumer_cache", consumer_cache, RankCache)
    positive_int("prefix_multiple", prefix_multiple)
    check_engine("producer_cache.engine", plan.producer, producer_cache.engine)
    check_engine("consumer_cache.engine", plan.consumer, consumer_cache.engine)
    only = None if layers is None else _known(plan, layers)
    entries: list[Entry] = []
    at = (0, 0)
    for edge in plan.between(producer_cache.rank, consumer_cache.rank):
        groups = plan.producer.group(edge.producer_group), plan.consumer.group(edge.group)
        for rows in row_sets(edge, groups, producer_cache, consumer_cache, only, prefix_multiple):
            entries.append(Entry(edge, rows, *at))
            used = rows.ids_used
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
        layers=only,
        prefix_multiple=prefix_multiple,
    )


def _known(plan: TransferPlan, layers: Iterable[str]) -> frozenset[str]:
    names = texts("layers", layers, "names of layers")
    known = [layer for group in plan.consumer.groups for layer in group.layers]
    if strange := [name for name in names if name not in known]:
        raise SpecError("layers", strange[:3], f"layers of the consumer, as {known[:3]}")
    return frozenset(names)


def _side(side: str, runs: list[tuple[BlockLayout, Ints, Ints]]) -> tuple[Rows, str]:
    """Return all rows of one side, and the type of memory they lie in."""
    types = sorted({block_layout.memory_type for block_layout, _, _ in runs}) or ["DRAM"]
    if len(types) > 1:
        why = "not yet: one type of memory on each side of a pair of ranks"
        raise MismatchError(
            [Mismatch(f"{side} memory_type", types[0], types[1], why, ("one", "other"))]
        )
    rows = [block_layout.rows(address, length) for block_layout, address, length in runs]
    table = np.concatenate([np.empty((0, 5), np.uint64), *rows])
    table.flags.writeable = False
    return table, types[0]


def check_engine(field: str, planned: EngineSpec, given: EngineSpec) -> None:
    """Raise `MismatchError` naming what of a cache's engine is not as the plan's."""
    if given is not planned and given != planned:
        why = "the cache was laid out for another engine than the plan's"
        raise MismatchError(differing(planned, given, field, why, ("plan", "cache")))
