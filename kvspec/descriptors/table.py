"""Descriptor tables: all descriptor rows of one pair of ranks, and the selection of a request.

Invariant: rows are made once and depend on no request. A request only selects ids. Each live,
uncached byte lies in exactly one selected descriptor, and no cached byte lies in any.

If groups share one memory, a block belongs to one group. On the consumer, a block that is written
for one group is not in the table of another group, except before that group's first live token. On
the producer, no block is read for two groups.

How it works:
    NIXL accepts *strided rows*: (address, length, device, stride, count). A row is `count`
    descriptors of `length` bytes that lie `stride` bytes apart. The ids of descriptors count
    through the counts of all rows. For example, two rows with 10 blocks each have these ids:

        row                               ids
        (1000, 256, 0, 512, 10)           0 to 9
        (1256, 256, 0, 512, 10)           10 to 19

    A request whose blocks are 3 and 4 selects the ids 3, 4, 13 and 14. So NIXL prepares a table
    once, and a request costs one array of ids for each side. A part of a tile, at the beginning or
    the end of a request, has no rows: its descriptors are made for the request. Half a block of
    several tiles may have ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib import import_module
from itertools import combinations, permutations

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.complete import complete_blocks, resume_positions
from kvspec.descriptors.paging import BlockLayout
from kvspec.descriptors.request import BlockTable, Ids, TransferRequest
from kvspec.descriptors.runs import coalesce, split_rows_of
from kvspec.descriptors.selection import NumberedRows, Picked, Selection, SplitGroup
from kvspec.descriptors.tiles import Positions, check_tokens
from kvspec.descriptors.unwritten import CachePair, UnwrittenRows, unwritten_ranges, unwritten_rows
from kvspec.engines.engine import EngineSpec
from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.inputs import MOST, flag, instance, texts
from kvspec.memory.aliasing import groups_that_share
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.plan.mismatches import differing
from kvspec.plan.plan import TransferPlan

Rows = npt.NDArray[np.uint64]

# NIXL takes int32 ids and truncates wider ones without an error. `NixlRank.prepare` has this limit.
MAX_IDS = 2**31 - 1


def sharing(cache: RankCache) -> tuple[frozenset[str], ...]:
    """Return the sets of groups whose blocks of equal id share memory on the rank of *cache*."""
    kernel_blocks_per_block = {
        group.name: group.kernel_blocks_per_block for group in cache.engine.groups
    }
    return groups_that_share(cache.regions, kernel_blocks_per_block)


def check_shared(
    plan: TransferPlan, request: TransferRequest, shared: Iterable[frozenset[str]]
) -> None:
    """Raise `SpecError` if a block is written for one group and in the table of another.

    Args:
        plan: The transfer plan of the two engines.
        request: The request. Blocks before the first live token are not compared, because the
            request may have given them back.
        shared: Sets of groups of the consumer that share memory.
    """
    pairs = {pair.consumer.name: pair.layers_by_spec[0][0] for pair in plan.pairs}
    for groups in shared:
        for name, other in permutations(sorted(groups & set(request.consumer_blocks)), 2):
            if name not in pairs:
                continue  # No layer of this group moves.
            tables = request.consumer_blocks
            moves = request.moves(name, pairs[name])
            written = _blocks(plan.consumer, name, tables[name], moves)
            group = plan.consumer.group(other)
            spec = group.spec.of_layer(group.layers[0])
            live = spec.live_tokens(request.total(spec))
            # The other group may have blocks beyond the request, such as lookahead slots.
            held = _blocks(plan.consumer, other, tables[other], [range(live.start, MOST)])
            repeated = np.intersect1d(written, held)
            if len(repeated):
                rule = f"group {other!r} shares this memory, so it must have other blocks"
                raise SpecError(f"consumer_blocks[{name!r}]", int(repeated[0]), rule=rule)


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
            moves = request.moves(pair.consumer.name, spec)
            read.setdefault(name, []).append(_blocks(plan.producer, name, table, moves))
    check_read_once(read, shared)


def check_read_once(read: Mapping[str, list[Ids]], shared: Iterable[frozenset[str]]) -> None:
    """Raise `SpecError` if two groups of one memory read the same block.

    Args:
        read: Ids of the blocks that move, by group of the producer.
        shared: Sets of groups of the producer that share memory.
    """
    for groups in shared:
        for name, other in combinations(sorted(groups & read.keys()), 2):
            repeated = np.intersect1d(np.concatenate(read[name]), np.concatenate(read[other]))
            if len(repeated):
                rule = (
                    f"groups that share memory read different blocks, but group {other!r} reads it"
                )
                raise SpecError(f"producer_blocks[{name!r}]", int(repeated[0]), rule=rule)


def _blocks(engine: EngineSpec, name: str, table: BlockTable, positions: Iterable[range]) -> Ids:
    """Return the block ids that *table* has for *positions*, without the null block.

    Positions that the table does not contain are ignored.
    """
    found = [_blocks_of(engine, name, table, tokens) for tokens in positions]
    return np.concatenate([table.block_ids[:0], *found])


def _blocks_of(engine: EngineSpec, name: str, table: BlockTable, tokens: range) -> Ids:
    """Return the same for one range of positions."""
    group = engine.group(name)
    size = engine.virtual_block(group)
    if not all(part.per_token for part in group.own_parts):
        size = group.spec.block_size
        if len(table.block_ids) == 1 and not table.first_token:
            return table.block_ids[: len(tokens)]  # One id, the slot, or none if nothing moves.
    held = table.tokens(size)
    inside = range(max(tokens.start, held.start), min(tokens.stop, held.stop))
    ids = table.blocks_of(inside, size) if inside else table.block_ids[:0]
    null = engine.null_block
    return ids if null is None else ids[ids != null]


@attrs.frozen(eq=False)
class DescriptorTable:
    """The descriptor rows of one producer rank and one consumer rank. `build_table` makes tables.

    A row is ``(address, length, device, stride, count)`` in bytes: `count` descriptors of `length`
    bytes, `stride` bytes apart. Ids count through the counts of all rows of one side in order. All
    rows of one side lie in one type of memory.

    Attributes:
        plan: The transfer plan of the two engines.
        producer: Memory of the producer rank.
        consumer: Memory of the consumer rank.
        numbered_rows: The row sets, each with its first ids.
        producer_rows: All rows of the producer, uint64, shape (rows, 5), read-only.
        consumer_rows: All rows of the consumer, uint64, shape (rows, 5), read-only.
        producer_memory_type: NIXL memory type of the producer's rows, "DRAM" or "VRAM".
        consumer_memory_type: NIXL memory type of the consumer's rows, "DRAM" or "VRAM".
        layers: Names of the layers in the table, or None for all.
        dead_tokens: Whether the table may move dead tokens, see `build_table`.

    >>> import kvspec
    >>> spec = kvspec.FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=2, head_size=4, dtype="bfloat16")
    >>> group = kvspec.KVCacheGroup(name="full", layers=["layer"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group], layout="LBNHC")
    >>> caches = [kvspec.plan_memory(engine, kvspec.RankId(), 10, at) for at in (10000, 20000)]
    >>> table = kvspec.build_table(kvspec.plan_transfer(engine, engine), *caches)

    A block has 512 bytes. The consumer has cached the first block, and its last block (9) is for
    later tokens. Half of the third block is dead, so that only its live half moves:

    >>> request = kvspec.TransferRequest(
    ...     request_id="r", num_tokens=40, cached_tokens=16,
    ...     producer_blocks={"full": [3, 4, 5]}, consumer_blocks={"full": [7, 8, 2, 9]})
    >>> table.descriptors(request).tolist()
    [[12048, 24096, 512], [12560, 21024, 256]]
    >>> table.dead_bytes(request)
    0
    >>> table.unwritten_ranges(request).tolist()
    [[21280, 256], [24608, 512]]
    """

    plan: TransferPlan
    producer: RankCache
    consumer: RankCache
    numbered_rows: tuple[NumberedRows, ...]
    producer_rows: Rows
    consumer_rows: Rows
    producer_memory_type: str
    consumer_memory_type: str
    layers: frozenset[str] | None = None
    dead_tokens: bool = False

    def _repr_svg_(self) -> str:
        """Return the picture of the table, which notebooks display. `kvspec.draw` imports it."""
        svg: str = import_module("kvspec.draw").table_svg(self)
        return svg

    def select(self, request: TransferRequest, *, tokens: Positions | None = None) -> Selection:
        """Return the descriptors that *request* moves: ids of rows, and ends with addresses.

        Ids that are adjacent on both sides stand next to each other, because NIXL joins only
        neighbours in a list.

        A request may also move in steps while the producer still writes it. A step passes
        ``tokens=range(moved, written)``. Consecutive steps up to `num_tokens` move the whole
        request, and nothing twice. Each step moves the tiles that end in it, so that a block that
        *written* cuts may move with the next step. Recurrent states and groups that do not count
        the tokens of the prompt move with the last step. The producer's table only needs to reach
        *written*.

        Args:
            request: The request.
            tokens: Positions of one step, or ranges by group of the consumer. All by default.

        Returns:
            The selection, which `NixlRank.read` accepts. `producer_ids` and `consumer_ids` are two
            int32 arrays of shape (n,), and descriptor i of the producer pairs with descriptor i of
            the consumer. `ends` are the parts of a tile, which have no ids.

        Raises:
            SpecError: If a block table, a cached prefix or *tokens* is impossible.
            MismatchError: If the producer does not have the tokens or the state that must move.

        >>> import kvspec
        >>> spec = kvspec.FullAttentionSpec(
        ...     block_size=16, total_num_kv_heads=2, head_size=4, dtype="bfloat16")
        >>> group = kvspec.KVCacheGroup(name="full", layers=["layer"], spec=spec)
        >>> engine = kvspec.EngineSpec(groups=[group], layout="LBNHC")
        >>> caches = [
        ...     kvspec.plan_memory(engine, kvspec.RankId(), 10, at) for at in (1 << 20, 1 << 30)]
        >>> table = kvspec.build_table(kvspec.plan_transfer(engine, engine), *caches)
        >>> request = kvspec.TransferRequest(
        ...     request_id="r", num_tokens=48, cached_tokens=16,
        ...     producer_blocks={"full": [3, 4, 5]}, consumer_blocks={"full": [7, 8, 2]})
        >>> table.select(request).producer_ids.tolist(), table.select(request).consumer_ids.tolist()
        ([4, 5], [8, 2])
        >>> table.select(request, tokens=range(0, 40)).consumer_ids.tolist()
        [8]
        """
        return Selection.of(self.tiles(request, tokens), self.producer_rows, self.consumer_rows)

    def descriptors(self, request: TransferRequest, *, tokens: Positions | None = None) -> Rows:
        """Return the fewest descriptors that move *request*, as addresses.

        Descriptors that touch on both sides are joined, unless one memory ends between them.

        Args:
            request: The request.
            tokens: Positions of one step, as in `select`. All by default.

        Returns:
            Producer address, consumer address and length in bytes, ascending by producer address:
            uint64, shape (n, 3).

        Raises:
            SpecError: As `select`.
            MismatchError: As `select`.
        """
        addresses = [numbered.addresses(chosen) for numbered, chosen in self.tiles(request, tokens)]
        if not addresses:
            return np.empty((0, 3), np.uint64)
        return coalesce(addresses, (self.producer.boundaries, self.consumer.boundaries)).T.view(
            np.uint64
        )

    def dead_bytes(self, request: TransferRequest) -> int:
        """Return how many bytes of dead tokens *request* moves. Dead tokens are not read later.

        Dead tokens lie after the last token of the request, or before the first live token of a
        window. It is 0 unless the table was built with ``dead_tokens=True``. The one exception are
        opaque pages: kvspec does not know their order, so a page moves whole. A producer of opaque
        pages must therefore keep them finite.

        Args:
            request: The request.

        Returns:
            The number of bytes.
        """
        instance("request", request, TransferRequest)
        return sum(split_group.dead_bytes(request) for split_group in self._split_groups)

    def unwritten_ranges(self, request: TransferRequest) -> Rows:
        """Return the bytes of the consumer's blocks that *request* does not write.

        Cached bytes do not count, and neither do blocks before the first live token, which may
        belong to another request by now. The ranges belong to the units and tokens that this pair
        of ranks exchanges. The descriptor tables of all producer ranks of a consumer rank together
        have all ranges.

        Args:
            request: The request.

        Returns:
            Address and length in bytes of each range, ascending by address: uint64, shape (n, 2).
        """
        instance("request", request, TransferRequest)
        # A table by default writes no dead token.
        picked = self.tiles(request) if self.dead_tokens else []
        return unwritten_ranges(self._pair, self._unwritten_rows, request, picked)

    def complete_blocks(self, request: TransferRequest) -> dict[str, Ids]:
        """Return the consumer's blocks that a prefix cache may contain after *request* was loaded.

        They depend on the plan and the request alone, so each table of the plan returns the same
        blocks. They are valid only after the loads of all ranks are done. Keep all other blocks of
        the request out of a prefix cache, even if they are full: they may contain tokens that were
        never moved, such as those before a sliding window.

        Args:
            request: The request.

        Returns:
            By group of the consumer: block ids in token order, int64. They include blocks whose
            tokens were all cached before. Blocks before the first live token are not included,
            because they may belong to another request by now. Layers that either engine excludes
            do not count. Rings and groups that do not move have no entry.

        Raises:
            SpecError: If the request lacks a table or encoder tokens, or names an unknown group.
        """
        return complete_blocks(self.plan, request)

    def resume_positions(self, request: TransferRequest) -> tuple[int, ...]:
        """Return after how many tokens the consumer can go on, once *request* was loaded.

        At such a position all groups are complete: each has the tokens that the next query reads,
        and the states after exactly these tokens. So a prefix cache restores all groups there, or
        none. Like `complete_blocks`, they are valid only after the loads of all ranks are done.

        Args:
            request: The request.

        Returns:
            Those of `TransferRequest.state_positions` at which all groups are complete, ascending.
            The last is `num_tokens`.

        Raises:
            SpecError: If the request lacks encoder tokens, or names an unknown group.
        """
        return resume_positions(self.plan, request)

    @cached_property
    def _pair(self) -> CachePair:
        return CachePair(self.plan, self.producer, self.consumer, self.layers)

    @cached_property
    def _unwritten_rows(self) -> list[UnwrittenRows]:
        return unwritten_rows(self._pair)

    @cached_property
    def _groups(self) -> tuple[str, ...]:
        return tuple(group.name for group in self.plan.consumer.groups)

    @cached_property
    def _shared_groups(self) -> tuple[frozenset[str], ...]:
        """Groups of the consumer that share memory."""
        return sharing(self.consumer)

    @cached_property
    def _shared_sources(self) -> tuple[frozenset[str], ...]:
        """Groups of the producer that share memory."""
        return sharing(self.producer)

    def tiles(self, request: TransferRequest, tokens: Positions | None = None) -> list[Picked]:
        """Return the tiles that *request*, or one step of it, moves of each row set.

        Args:
            request: The request.
            tokens: Positions of one step, as in `select`. All by default.

        Returns:
            The numbered rows that move anything, each with its tiles.

        Raises:
            SpecError: As `select`.
            MismatchError: As `select`.
        """
        instance("request", request, TransferRequest)
        groups = self._groups
        request.check_groups(groups)
        if tokens is not None:
            check_tokens(tokens, groups)
        if self._shared_groups:
            check_shared(self.plan, request, self._shared_groups)
        if self._shared_sources:
            check_shared_sources(self.plan, request, self._shared_sources)
        return [
            picked
            for split_group in self._split_groups
            for picked in split_group.picked(request, tokens)
        ]

    @cached_property
    def _split_groups(self) -> list[SplitGroup]:
        return SplitGroup.of(self.plan, self.numbered_rows, dead_tokens=self.dead_tokens)


def build_table(
    plan: TransferPlan,
    producer_cache: RankCache,
    consumer_cache: RankCache,
    *,
    layers: Iterable[str] | None = None,
    dead_tokens: bool = False,
) -> DescriptorTable:
    """Build the descriptor rows that connect one producer rank to one consumer rank.

    The number of rows does not depend on the number of blocks.

    Args:
        plan: The transfer plan of the two engines.
        producer_cache: Memory of the producer rank.
        consumer_cache: Memory of the consumer rank.
        layers: Names of the layers to include. All layers by default. Several tables with
            different layers move the same bytes as one table of all layers.
        dead_tokens: Whether blocks may move whole, with tokens after the last token or before the
            first live token of a window, if that takes less time. The consumer then
            receives whatever the producer's memory holds there. Many attention kernels return NaN
            if a masked token is NaN. So set it only if the producer's memory is finite everywhere,
            or if the consumer's kernel never reads dead tokens.

    Returns:
        The table. `producer_rows` and `consumer_rows` are uint64 arrays of shape (rows, 5).

    Raises:
        MismatchError: If a cache belongs to another engine, if the ids do not fit into int32, or
            if one side has several types of memory.
        SpecError: If a layer name is unknown.

    >>> import kvspec
    >>> spec = kvspec.FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=2, head_size=4, dtype="bfloat16")
    >>> group = kvspec.KVCacheGroup(name="full", layers=["layer"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group], layout="LBNHC")
    >>> caches = [kvspec.plan_memory(engine, kvspec.RankId(), 10, at) for at in (1 << 20, 1 << 30)]
    >>> table = kvspec.build_table(kvspec.plan_transfer(engine, engine), *caches)
    >>> table.producer_rows.tolist()  # Ten blocks of 512 bytes.
    [[1048576, 512, 0, 512, 10]]
    """
    instance("plan", plan, TransferPlan)
    instance("producer_cache", producer_cache, RankCache)
    instance("consumer_cache", consumer_cache, RankCache)
    flag("dead_tokens", dead_tokens)
    check_engine("producer_cache.engine", plan.producer, producer_cache.engine)
    check_engine("consumer_cache.engine", plan.consumer, consumer_cache.engine)
    only = None if layers is None else _layer_names(plan, layers)
    edges = plan.between(producer_cache.rank, consumer_cache.rank)
    numbered_rows = numbered_rows_of(plan, edges, (producer_cache, consumer_cache), only)
    counts = [sum(numbered.rows.ids_used[side] for numbered in numbered_rows) for side in (0, 1)]
    why = "descriptor ids are int32: use fewer blocks, or groups of fewer layers"
    too_many = [
        Mismatch(f"{side} descriptors", count, MAX_IDS, why, ("needed", "limit"))
        for side, count in zip(("producer", "consumer"), counts, strict=True)
        if count > MAX_IDS
    ]
    if too_many:
        raise MismatchError(too_many)
    producer_rows, producer_type = _side(
        "producer",
        [(e.rows.producer, e.rows.producer_address, e.rows.length) for e in numbered_rows],
    )
    consumer_rows, consumer_type = _side(
        "consumer",
        [(e.rows.consumer, e.rows.consumer_address, e.rows.length) for e in numbered_rows],
    )
    return DescriptorTable(
        plan=plan,
        producer=producer_cache,
        consumer=consumer_cache,
        numbered_rows=tuple(numbered_rows),
        producer_rows=producer_rows,
        consumer_rows=consumer_rows,
        producer_memory_type=producer_type,
        consumer_memory_type=consumer_type,
        layers=only,
        dead_tokens=dead_tokens,
    )


def numbered_rows_of(
    plan: TransferPlan,
    edges: Iterable[Edge],
    caches: tuple[RankCache, RankCache],
    layers: frozenset[str] | None = None,
) -> list[NumberedRows]:
    """Return the numbered rows of *edges* between two ranks, in the order of their ids.

    The other arguments are those of `build_table`. There may be more ids than a table can have.
    """
    numbered_rows: list[NumberedRows] = []
    next_ids = (0, 0)
    for edge in edges:
        groups = plan.producer.group(edge.producer_group), plan.consumer.group(edge.group)
        for split_rows in split_rows_of(edge, groups, *caches, layers):
            for rows in split_rows.rows(split_rows.token_split.whole_kind):
                numbered_rows.append(NumberedRows(edge, split_rows, rows, *next_ids))
                used = rows.ids_used
                next_ids = next_ids[0] + used[0], next_ids[1] + used[1]
    return numbered_rows


def _layer_names(plan: TransferPlan, layers: Iterable[str]) -> frozenset[str]:
    """Return *layers* as a set. Raise `SpecError` for names that the consumer does not have."""
    names = texts("layers", layers, "names of layers")
    known = dict.fromkeys(layer for group in plan.consumer.groups for layer in group.layers)
    if unknown := [name for name in names if name not in known]:
        raise SpecError("layers", unknown[:3], f"layers of the consumer, such as {[*known][:3]}")
    return frozenset(names)


def _side(side: str, runs: list[tuple[BlockLayout, Ints, Ints]]) -> tuple[Rows, str]:
    """Return all rows of one side, and their type of memory."""
    types = sorted({block_layout.memory_type for block_layout, _, _ in runs}) or ["DRAM"]
    if len(types) > 1:
        # A list of descriptors in NIXL has one type of memory.
        why = "the rows of one side must lie in one type of memory"
        raise MismatchError(
            [Mismatch(f"{side} memory_type", types[0], types[1], why, ("one", "other"))]
        )
    rows = [block_layout.rows(address, length) for block_layout, address, length in runs]
    # Concatenating with an empty array gives a side without rows its shape and dtype.
    table = np.concatenate([np.empty((0, 5), np.uint64), *rows])
    table.flags.writeable = False
    return table, types[0]


def check_engine(field: str, planned: EngineSpec, given: EngineSpec) -> None:
    """Raise `MismatchError` with all differences if *given* is not the engine of the plan.

    Args:
        field: Name of the cache's engine for errors.
        planned: The engine in the plan.
        given: The engine of the cache.
    """
    if given is not planned and given != planned:
        why = "the cache was laid out for another engine than the plan's"
        raise MismatchError(differing(planned, given, field, why, ("plan", "cache")))
