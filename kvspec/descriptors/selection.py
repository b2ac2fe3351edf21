"""Selections: the ids of the rows that one request moves.

Invariant: the ids, the ends and the parts of a selection describe the same descriptors. A caller
that joins or checks descriptors uses the parts, because there are far fewer runs and tiles than
ids.

How it works:
    A table is a list of `NumberedRows`. Each is one row set with the first id of its runs on each
    side. The id of a descriptor is the first id of its run plus the id of its tile. For example, a
    row set has two runs with 100 ids each, and a request moves the tiles 3 and 7:

        run    first id    ids
        0      0           3, 7
        1      100         103, 107

    `SplitGroup` contains all numbered rows of one edge. It cuts a request once and stores the
    result in `TransferRequest.known`. The descriptor tables of other producer ranks usually split
    tokens alike (an equal `cut_key`). So the producer ranks of one consumer rank share that result.

    The first and the last tile of a request may move in part. A table has no rows for parts of a
    tile. These *ends* are descriptors with addresses, which are made for the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.runs import RowSet, SplitRows
from kvspec.descriptors.tiles import (
    EdgeTables,
    Positions,
    RowStarts,
    Tiles,
    check_cached,
    row_starts,
    tiles,
)
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan
from kvspec.specs import LayerSpec

# NIXL takes int32 ids, and `table.MAX_IDS` limits them. `kvspec.nixl` and `kvspec.testing.world`
# expect int32 as well.
RowIds = npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class NumberedRows:
    """One row set of one edge.

    Attributes:
        edge: The edge.
        split_rows: The parts of the edge that are cut alike, to which the row set belongs.
        rows: The row set.
        producer_first: First id of the row set on the producer. 0 for an end, which has no ids.
        consumer_first: First id of the row set on the consumer.
    """

    edge: Edge
    split_rows: SplitRows
    rows: RowSet
    producer_first: int = 0
    consumer_first: int = 0

    @property
    def is_end(self) -> bool:
        """Whether the rows move a part of a tile, so that they have no ids."""
        return self.rows.kind != self.split_rows.token_split.whole_kind

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

    def addresses(self, tiles: Tiles) -> npt.NDArray[np.int64]:
        """Return the addresses of *tiles* of all runs.

        The order is by interleaved sets and then tile by tile: nearly ascending, so that sorting is
        cheap.

        Returns:
            Producer address, consumer address and length, shape (n, 3).
        """
        rows, runs = self.rows, self.rows.interleaved_runs
        columns = np.empty((3, len(rows) // runs, len(tiles), runs), np.int64)
        starts = rows.producer_address, rows.consumer_address
        for column, start, offsets in zip(columns, starts, rows.offsets(tiles), strict=False):
            np.add(start.reshape(-1, 1, runs), offsets[:, None], out=column)
        columns[2] = rows.length.reshape(-1, 1, runs)
        return columns.reshape(3, -1).T


# A row set and its tiles that move.
Picked = tuple[NumberedRows, Tiles]


@attrs.frozen(eq=False, slots=False)
class Selection:
    """The descriptors that move one request. `DescriptorTable.select` returns selections.

    Whole tiles are ids of the table's rows. Descriptor i of the producer pairs with descriptor i of
    the consumer. Parts of a tile, at the beginning and the end of the request, are addresses.

    Attributes:
        producer_ids: Ids of the producer's rows: int32, shape (n,), read-only.
        consumer_ids: As many ids of the consumer's rows.
        producer_rows: Strided rows of the descriptor table that the producer's ids number.
        consumer_rows: Strided rows that the consumer's ids number. NIXL lists prepared from these
            two arrays accept the selection without checking each id.
        parts: The numbered rows that move and their tiles, in the order of the ids. A part of a
            block, such as `k`, is another thing.
        end_parts: The same for the ends.

    >>> import kvspec
    >>> spec = kvspec.FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=2, head_size=4, dtype="bfloat16")
    >>> group = kvspec.KVCacheGroup(name="full", layers=["layer"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group], layout="LBNHC")
    >>> caches = [kvspec.plan_memory(engine, kvspec.RankId(), 10, at) for at in (1 << 20, 1 << 30)]
    >>> table = kvspec.build_table(kvspec.plan_transfer(engine, engine), *caches)
    >>> selection = table.select(kvspec.TransferRequest(
    ...     request_id="r", num_tokens=35, producer_blocks={"full": [3, 4, 9]},
    ...     consumer_blocks={"full": [7, 5, 0]}))
    >>> selection.producer_ids.tolist(), selection.consumer_ids.tolist()
    ([3, 4], [7, 5])
    >>> selection.ends.tolist()  # Three tokens of 32 bytes, from the blocks 9 to 0.
    [[1053184, 1073741824, 96]]
    """

    producer_ids: RowIds
    consumer_ids: RowIds
    producer_rows: npt.NDArray[np.uint64]
    consumer_rows: npt.NDArray[np.uint64]
    parts: Sequence[Picked]
    end_parts: Sequence[Picked]

    @staticmethod
    def of(
        picked: Iterable[Picked],
        producer_rows: npt.NDArray[np.uint64],
        consumer_rows: npt.NDArray[np.uint64],
    ) -> Selection:
        """Return the selection of all *picked*.

        Args:
            picked: The row sets and their tiles.
            producer_rows: All rows of the producer in the table.
            consumer_rows: All rows of the consumer in the table.
        """
        parts, end_parts = list[Picked](), list[Picked]()
        for each in picked:
            (end_parts if each[0].is_end else parts).append(each)
        sizes = [len(numbered.rows) * len(chosen) for numbered, chosen in parts]
        ids = np.empty((2, sum(sizes)), np.int32)
        start = 0
        for (numbered, chosen), size in zip(parts, sizes, strict=True):
            numbered.write_ids(chosen, ids[:, start : start + size])
            start += size
        # Code that uses the parts does not read the ids again, so the ids must never change.
        ids.setflags(write=False)
        return Selection(ids[0], ids[1], producer_rows, consumer_rows, parts, end_parts)

    @property
    def ids(self) -> tuple[RowIds, RowIds]:
        """The ids of both sides."""
        return self.producer_ids, self.consumer_ids

    def __len__(self) -> int:
        return len(self.producer_ids) + sum(len(numbered.rows) for numbered, _ in self.end_parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all descriptors."""
        every = *self.parts, *self.end_parts
        return sum(numbered.rows.nbytes * len(tiles) for numbered, tiles in every)

    @property
    def ends(self) -> npt.NDArray[np.uint64]:
        """Producer address, consumer address and length of each end: uint64, shape (n, 3)."""
        found = [numbered.addresses(tiles) for numbered, tiles in self.end_parts]
        return np.concatenate([np.empty((0, 3), np.int64), *found]).astype(np.uint64)


@attrs.frozen(eq=False)
class _Cut:
    """One request, cut for one edge.

    Attributes:
        tables: Its block tables.
        row_starts: Where its rows begin, for each token split of the group.
        tiles: Its tiles by token split, row kind and `RowSet.id_key`, filled on demand.
    """

    tables: EdgeTables
    row_starts: list[RowStarts]
    tiles: dict[object, Tiles] = attrs.field(init=False, factory=dict)


@attrs.frozen(eq=False)
class SplitGroup:
    """The numbered rows of one edge of one table, by the way in which requests cut them.

    Tables whose edges have equal names of groups, specs, all_tokens_per_state and token splits find
    the same result in `TransferRequest.known`. If dead tokens may move, the cut depends on the runs
    of the pair of ranks, so that each `SplitGroup` has a key of its own.

    Attributes:
        edge: The edge.
        spec: Spec of the first layer of the edge.
        splits: The parts that are cut alike, and the numbered rows of their whole tiles.
        all_tokens_per_state: Tokens of a state of each layer of the consumer's group that moves, on
            any rank.
        dead_tokens: Whether dead tokens may move if that takes less time.
        cut_key: An object that is the same for every `SplitGroup` that cuts each request alike.
    """

    edge: Edge
    spec: LayerSpec
    splits: tuple[tuple[SplitRows, list[NumberedRows]], ...]
    all_tokens_per_state: frozenset[int]
    dead_tokens: bool
    cut_key: object

    @staticmethod
    def of(
        plan: TransferPlan, numbered_rows: Iterable[NumberedRows], *, dead_tokens: bool
    ) -> list[SplitGroup]:
        """Return the groups of the *numbered_rows* of a table, one for each edge."""
        # Edges and rows are compared by identity: hashing their fields is slow.
        edges: dict[int, tuple[Edge, dict[int, tuple[SplitRows, list[NumberedRows]]]]] = {}
        for numbered in numbered_rows:
            _, splits = edges.setdefault(id(numbered.edge), (numbered.edge, {}))
            splits.setdefault(id(numbered.split_rows), (numbered.split_rows, []))[1].append(
                numbered
            )
        all_tokens_per_state = _all_tokens_per_state(plan)
        groups = []
        for edge, splits in edges.values():
            spec = plan.pair_of(edge).specs[edge.layers[0]]
            numbers = tuple(
                attrs.astuple(split_rows.token_split, recurse=False)
                for split_rows, _ in splits.values()
            )
            own = all_tokens_per_state[edge.group]
            # If dead tokens may move, the cut depends on the rows of the pair of ranks as well.
            key: object = object()
            if not dead_tokens:
                key = _cut_key((edge.producer_group, edge.group, spec, numbers, own))
            groups.append(SplitGroup(edge, spec, tuple(splits.values()), own, dead_tokens, key))
        return groups

    def picked(self, request: TransferRequest, tokens: Positions | None) -> list[Picked]:
        """Return the tiles that *request*, or one step of it, moves.

        Raises the errors of `DescriptorTable.select`.
        """
        cut, picked = self._cut(request, tokens), list[Picked]()
        if cut is None:
            return picked
        for number, (split_rows, numbered_rows) in enumerate(self.splits):
            for kind, starts in cut.row_starts[number].items():
                moving = numbered_rows
                if kind != split_rows.token_split.whole_kind:
                    moving = [
                        NumberedRows(self.edge, split_rows, rows) for rows in split_rows.rows(kind)
                    ]
                for numbered in moving:
                    layouts = numbered.rows.producer, numbered.rows.consumer
                    key = number, kind, numbered.rows.id_key
                    found = cut.tiles.get(key)
                    if found is None:
                        found = tiles(cut.tables, split_rows.token_split, starts, layouts)
                        cut.tiles[key] = found
                    if len(found):
                        picked.append((numbered, found))
        return picked

    def dead_bytes(self, request: TransferRequest) -> int:
        """Return the number of bytes that *request* moves for dead tokens."""
        cut, total = self._cut(request, None), 0
        for number, (split_rows, _) in enumerate(self.splits):
            token_split = split_rows.token_split
            if cut is None or not token_split.tile:
                continue
            context, wanted = token_split.consumer.context, cut.tables.wanted
            # A state with a live token is live. But a page holds the bytes of each of its tokens.
            tokens_per_state = 1 if token_split.opaque else token_split.tokens_per_state
            before = cut.tables.consumer.first_token // context.size
            live_start = context.local(wanted.start) // tokens_per_state * tokens_per_state - before
            live_stop = (
                -(-context.local(wanted.stop) // tokens_per_state) * tokens_per_state - before
            )
            for kind, (_, starts) in cut.row_starts[number].items():
                dead = int(np.clip(starts + kind.tokens - live_stop, 0, kind.tokens).sum())
                dead += int(np.clip(live_start - starts, 0, kind.tokens).sum())
                row_bytes = sum(rows.nbytes for rows in split_rows.rows(kind))
                total += dead * row_bytes // kind.tokens
        return total

    def _cut(self, request: TransferRequest, tokens: Positions | None) -> _Cut | None:
        """Return *request*, or one step of it, cut for the edge. None if nothing moves."""
        if tokens is None and self.cut_key in request.known:
            known: _Cut | None = request.known[self.cut_key]
            return known
        first = self.splits[0][0].token_split
        tables = EdgeTables.of(request, self.edge, self.spec, tokens, recurrent=not first.tile)
        cut = None
        if tables.reached:
            tables.check(first)
            for tokens_per_state in self.all_tokens_per_state:
                check_cached(tables, tokens_per_state)
            # In a ring, the row of a dead token may be the row of a live one.
            may_move_dead = self.dead_tokens and not self.spec.is_ring
            starts = [
                row_starts(
                    request,
                    tables,
                    split_rows.token_split,
                    split_rows.dead_cost_less if may_move_dead else None,
                )
                for split_rows, _ in self.splits
            ]
            cut = _Cut(tables, starts)
        if tokens is None:
            request.known[self.cut_key] = cut
        return cut


def _all_tokens_per_state(plan: TransferPlan) -> dict[str, frozenset[int]]:
    """Return how many tokens a state describes in the layers that move, by consumer's group."""
    all_tokens_per_state: dict[str, set[int]] = {}
    for pair in plan.pairs:
        parts = (part for spec, _ in pair.layers_by_spec for part in spec.parts if part.per_token)
        all_tokens_per_state.setdefault(pair.consumer.name, set()).update(
            part.tokens_per_state for part in parts
        )
    return {group: frozenset(tokens) for group, tokens in all_tokens_per_state.items()}


@lru_cache(maxsize=4096)
def _cut_key(numbers: tuple[object, ...]) -> object:  # noqa: ARG001 - The cache compares them.
    """Return one object for equal *numbers*. It is hashed faster than the numbers."""
    return object()
