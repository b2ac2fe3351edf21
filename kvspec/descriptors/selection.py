"""Selections: the ids of the rows that one request moves.

Invariant: the ids and the parts of a selection describe the same descriptors. A caller that only
needs ids unpacks two arrays. A caller that joins or checks descriptors uses the parts, because
there are far fewer runs and tiles than ids.

How it works:
    A table is a list of entries. Each `Entry` is one row set with the first id of its runs on each
    side. The id of a descriptor is the first id of its run plus the id of its tile. For example, an
    entry has two runs with 100 ids each, and a request moves the tiles 3 and 7:

        run    first id    ids
        0      0           3, 7
        1      100         103, 107

    `SplitGroup` contains all entries of one edge. It cuts a request once and stores the result in
    `TransferRequest.known`. The descriptor tables of other producer ranks usually split tokens
    alike (an equal `cut_key`). So the producer ranks of one consumer rank share that result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.paging import RowKind, TokenSplit
from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.runs import RowSet
from kvspec.descriptors.tiles import (
    Positions,
    RowStarts,
    Tables,
    Tiles,
    check_cached,
    row_starts,
    tiles,
)
from kvspec.errors import SpecError
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan
from kvspec.specs import LayerSpec

# NIXL takes int32 ids, and `table.MAX_IDS` limits them. `kvspec.nixl` and `kvspec.testing.world`
# expect int32 as well.
RowIds = npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class Entry:
    """One row set of one edge.

    Attributes:
        edge: The edge.
        rows: The row set.
        producer_first: First id of the row set on the producer.
        consumer_first: First id of the row set on the consumer.
    """

    edge: Edge
    rows: RowSet
    producer_first: int
    consumer_first: int

    @cached_property
    def starts(self) -> RowIds:
        """The first id of each run: int32, shape (2, runs, 1), producer and consumer."""
        block_layouts = self.rows.producer, self.rows.consumer
        step = np.array([block_layout.ids_per_run for block_layout in block_layouts])
        starts = np.array([self.producer_first, self.consumer_first])[:, None]
        return (starts + step[:, None] * np.arange(len(self.rows))).astype(np.int32)[:, :, None]

    def write_ids(self, tiles: Tiles, ids: RowIds) -> None:
        """Write the ids of *tiles* of all runs, run by run, into *ids* of shape (2, n)."""
        # Convert the few tile ids first, so that numpy adds int32 numbers directly into *ids*.
        tile_ids = tiles.ids.astype(np.int32)[:, None]
        np.add(self.starts, tile_ids, out=ids.reshape(2, len(self.rows), len(tiles)))

    @cached_property
    def bunch(self) -> int:
        """The number of runs in a bunch.

        The runs of a bunch interleave in the producer's memory. All tiles of a bunch lie before
        those of the next bunch.
        """
        rows, layout = self.rows, self.rows.producer
        extent = (layout.num_blocks - 1) * layout.block_stride + layout.tiles * layout.tile_stride
        starts = rows.producer_address
        separate = np.flatnonzero(starts[1:] - starts[:-1] >= extent)
        many = int(separate[0]) + 1 if len(separate) else len(rows)
        # Bunches of unequal size do not fit into one array. One bunch of all runs is correct, too.
        return len(rows) if len(rows) % many else many

    def addresses(self, tiles: Tiles) -> npt.NDArray[np.int64]:
        """Return the addresses of *tiles* of all runs.

        The order is bunch by bunch and then tile by tile: nearly ascending, so that sorting is
        cheap.

        Returns:
            Producer address, consumer address and length, shape (n, 3).
        """
        rows, bunch = self.rows, self.bunch
        columns = np.empty((3, len(rows) // bunch, len(tiles), bunch), np.int64)
        starts = rows.producer_address, rows.consumer_address
        for column, start, offsets in zip(columns, starts, rows.offsets(tiles), strict=False):
            np.add(start.reshape(-1, 1, bunch), offsets[:, None], out=column)
        columns[2] = rows.length.reshape(-1, 1, bunch)
        return columns.reshape(3, -1).T


# A row set and its tiles that move.
Picked = tuple[Entry, Tiles]


class Selection(tuple[RowIds, RowIds]):  # noqa: SLOT001 - It has attributes besides its members.
    """The ids of one request: the producer's and the consumer's, as two arrays.

    Both arrays are int32, read-only and of equal length n. Descriptor i of the producer pairs with
    descriptor i of the consumer. `DescriptorTable.select` returns selections.

    Attributes:
        producer_rows: Strided rows of the descriptor table that the producer's ids number.
        consumer_rows: Strided rows that the consumer's ids number. NIXL lists prepared from these
            two arrays accept the selection without checking each id.
        parts: The entries that move and their tiles, in the order of the ids. A part of a block,
            such as `k`, is another thing.

    >>> import kvspec
    >>> spec = kvspec.FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=2, head_size=4, dtype="bfloat16")
    >>> group = kvspec.KVCacheGroup(name="full", layers=["layer"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group], layout="LBNHC")
    >>> caches = [kvspec.plan_memory(engine, kvspec.RankId(), 10, at) for at in (1 << 20, 1 << 30)]
    >>> table = kvspec.build_table(kvspec.plan_transfer(engine, engine), *caches)
    >>> producer_ids, consumer_ids = table.select(kvspec.TransferRequest(
    ...     request_id="r", num_tokens=32, producer_blocks={"full": [3, 4]},
    ...     consumer_blocks={"full": [7, 5]}))
    >>> producer_ids.tolist(), consumer_ids.tolist()
    ([3, 4], [7, 5])
    """

    producer_rows: npt.NDArray[np.uint64]
    consumer_rows: npt.NDArray[np.uint64]
    parts: Sequence[Picked]

    @staticmethod
    def of(
        parts: Sequence[Picked],
        producer_rows: npt.NDArray[np.uint64],
        consumer_rows: npt.NDArray[np.uint64],
    ) -> Selection:
        """Return the selection of *parts*, with all ids.

        Args:
            parts: The row sets and their tiles.
            producer_rows: All rows of the producer in the table.
            consumer_rows: All rows of the consumer in the table.
        """
        sizes = [len(entry.rows) * len(picked) for entry, picked in parts]
        ids = np.empty((2, sum(sizes)), np.int32)
        start = 0
        for (entry, picked), size in zip(parts, sizes, strict=True):
            entry.write_ids(picked, ids[:, start : start + size])
            start += size
        # Code that uses the parts does not read the ids again, so the ids must never change.
        ids.setflags(write=False)
        selection = Selection((ids[0], ids[1]))
        selection.producer_rows, selection.consumer_rows = producer_rows, consumer_rows
        selection.parts = parts
        return selection


@attrs.frozen(eq=False)
class _Cut:
    """One request, cut for one edge.

    Attributes:
        tables: Its block tables.
        row_starts: Where its rows begin, for each token split of the group.
        tiles: Its tiles by token split, row kind and `RowSet.id_key`, filled on demand.
    """

    tables: Tables
    row_starts: list[RowStarts]
    tiles: dict[object, Tiles] = attrs.field(init=False, factory=dict)


@attrs.frozen(eq=False)
class SplitGroup:
    """The entries of one edge, by token split and by kind of row.

    Attributes:
        edge: The edge.
        spec: Spec of the first layer of the edge.
        entries: Token splits and their entries by row kind.
        grains: Tokens of a row of each layer of the consumer's group that moves, on any rank.
        cut_key: An object that is the same for every `SplitGroup` that cuts each request alike.
    """

    edge: Edge
    spec: LayerSpec
    entries: tuple[tuple[TokenSplit, dict[RowKind, list[Entry]]], ...]
    grains: frozenset[int]
    cut_key: object

    @staticmethod
    def of(plan: TransferPlan, entries: Iterable[Entry]) -> list[SplitGroup]:
        """Return the groups of the *entries* of a table, one for each edge."""
        # Edges and token splits are compared by identity: hashing their fields is slow.
        edges: dict[int, tuple[Edge, dict[int, tuple[TokenSplit, dict[RowKind, list[Entry]]]]]] = {}
        for entry in entries:
            token_split = entry.rows.token_split
            _, splits = edges.setdefault(id(entry.edge), (entry.edge, {}))
            _, kinds = splits.setdefault(id(token_split), (token_split, {}))
            kinds.setdefault(entry.rows.kind, []).append(entry)
        grains = _grains(plan)
        groups = []
        for edge, splits in edges.values():
            spec = plan.pair_of(edge).specs[edge.layers[0]]
            numbers = tuple(
                attrs.astuple(token_split, recurse=False) for token_split, _ in splits.values()
            )
            own = grains[edge.group]
            cut_key = _cut_key((edge.producer_group, edge.group, spec, numbers, own))
            groups.append(SplitGroup(edge, spec, tuple(splits.values()), own, cut_key))
        return groups

    def picked(
        self, request: TransferRequest, tokens: Positions | None
    ) -> list[tuple[Entry, Tiles]]:
        """Return the tiles that *request*, or one step of it, moves in each entry.

        Raises the errors of `DescriptorTable.select`.
        """
        cut, picked = self._cut(request, tokens), list[tuple[Entry, Tiles]]()
        if cut is None:
            return picked
        for number, (token_split, kinds) in enumerate(self.entries):
            for kind, starts in cut.row_starts[number].items():
                for entry in kinds[kind]:
                    rows = entry.rows
                    key = number, kind, rows.id_key
                    moving = cut.tiles.get(key)
                    if moving is None:
                        block_layouts = rows.producer, rows.consumer
                        moving = tiles(cut.tables, token_split, kind, starts, block_layouts)
                        cut.tiles[key] = moving
                    if len(moving):
                        picked.append((entry, moving))
        return picked

    def dead_bytes(self, request: TransferRequest) -> int:
        """Return the number of bytes that *request* moves for dead tokens."""
        cut, total = self._cut(request, None), 0
        for number, (token_split, kinds) in enumerate(self.entries):
            if cut is None or not token_split.tile:
                continue
            context, wanted = token_split.consumer.context, cut.tables.wanted
            # A state with a live token is live. But a page holds the bytes of each of its tokens.
            grain = 1 if token_split.opaque else token_split.grain
            before = cut.tables.consumer.first_token // context.size
            live_start = context.local(wanted.start) // grain * grain - before
            live_stop = -(-context.local(wanted.stop) // grain) * grain - before
            for kind, (_, starts) in cut.row_starts[number].items():
                dead = int(np.clip(starts + kind.tokens - live_stop, 0, kind.tokens).sum())
                dead += int(np.clip(live_start - starts, 0, kind.tokens).sum())
                row_bytes = sum(int(entry.rows.length.sum()) for entry in kinds[kind])
                total += dead * row_bytes // kind.tokens
        return total

    def _cut(self, request: TransferRequest, tokens: Positions | None) -> _Cut | None:
        """Return *request*, or one step of it, cut for the edge. None if nothing moves."""
        if tokens is None and self.cut_key in request.known:
            known: _Cut | None = request.known[self.cut_key]
            return known
        first = self.entries[0][0]
        tables = Tables.of(request, self.edge, self.spec, tokens, whole=not first.tile)
        cut = None
        if tables.reached:
            if tables.cached % first.prefix_multiple:
                expected = f"a multiple of the table's prefix_multiple={first.prefix_multiple}"
                raise SpecError("cached_tokens", tables.cached, expected)
            tables.check(first)
            for grain in self.grains:
                check_cached(tables, grain)
            cut = _Cut(tables, [row_starts(request, tables, split) for split, _ in self.entries])
        if tokens is None:
            request.known[self.cut_key] = cut
        return cut


def _grains(plan: TransferPlan) -> dict[str, frozenset[int]]:
    """Return how many tokens the rows describe that move, by group of the consumer."""
    grains: dict[str, set[int]] = {}
    for pair in plan.pairs:
        parts = (part for spec, _ in pair.layers_by_spec for part in spec.parts if part.per_token)
        grains.setdefault(pair.consumer.name, set()).update(part.tokens_per_state for part in parts)
    return {group: frozenset(tokens) for group, tokens in grains.items()}


@lru_cache(maxsize=4096)
def _cut_key(numbers: tuple[object, ...]) -> object:  # noqa: ARG001 - The cache compares them.
    """Return one object for equal *numbers*. It is hashed faster than the numbers."""
    return object()
