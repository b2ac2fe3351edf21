"""What one request picks of a table: ids, and how they repeat.

Law: ids and parts say the same. Whoever only wants ids unpacks them; who checks or joins them does
that by run and by tile, not by run times tile.

A set of rows in its table: where its ids begin, and what picked tiles are as ids or addresses.

Law: ids count through the rows of a side in order; the same tiles mean the same bytes either way.

What one request moves of rows that are cut alike.

Law: a request is cut once. Tables of other ranks, whose rows are cut as those of the first, take
what was found of it; so all sources of one consumer rank do, as a rule.
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
from kvspec.descriptors.tiles import Begins, Positions, Tables, Tiles, begins, tiles
from kvspec.errors import SpecError
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan
from kvspec.specs import LayerSpec

RowIds = npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class Entry:
    """A set of rows of one edge, and the first id of each side's."""

    edge: Edge
    rows: RowSet
    producer_first: int
    consumer_first: int

    @cached_property
    def starts(self) -> RowIds:
        """The first id of each run: int32 of shape (2, runs, 1), producer and consumer."""
        block_layouts = self.rows.producer, self.rows.consumer
        step = np.array([block_layout.ids_per_run for block_layout in block_layouts])
        starts = np.array([self.producer_first, self.consumer_first])[:, None]
        return (starts + step[:, None] * np.arange(len(self.rows))).astype(np.int32)[:, :, None]

    def write_ids(self, tiles: Tiles, ids: RowIds) -> None:
        """Write the ids of *tiles*, of both sides, row by row, into *ids* of shape (2, n)."""
        own = tiles.ids.astype(np.int32)[:, None]
        np.add(self.starts, own, out=ids.reshape(2, len(self.rows), len(tiles)))

    @cached_property
    def bunch(self) -> int:
        """How many runs lie among each other, all of whose tiles lie before the next run's."""
        rows, block_layout = self.rows, self.rows.producer
        extent = (
            block_layout.num_blocks - 1
        ) * block_layout.block_stride + block_layout.tiles * block_layout.tile_stride
        starts = rows.producer_address
        separate = np.flatnonzero(starts[1:] - starts[:-1] >= extent)
        many = int(separate[0]) + 1 if len(separate) else len(rows)
        return len(rows) if len(rows) % many else many

    def addresses(self, tiles: Tiles) -> npt.NDArray[np.int64]:
        """Return (producer address, consumer address, length) of *tiles* of all rows, in any order.

        Of shape (n, 3): bunch by bunch, of these tile by tile, so that many are in order.
        """
        rows, bunch = self.rows, self.bunch
        found = np.empty((3, len(rows) // bunch, len(tiles), bunch), np.int64)
        starts = rows.producer_address, rows.consumer_address
        for column, start, offsets in zip(found, starts, rows.offsets(tiles), strict=False):
            np.add(start.reshape(-1, 1, bunch), offsets[:, None], out=column)
        found[2] = rows.length.reshape(-1, 1, bunch)
        return found.reshape(3, -1).T


Picked = tuple[Entry, Tiles]
"""A set of rows and the tiles of it that move: an id is its run's first id and its tile's."""


class Selection(tuple[RowIds, RowIds]):  # noqa: SLOT001 - it has more than a tuple
    """The ids of the producer's rows and of the consumer's, as `DescriptorTable.select` picks them.

    Two int32 arrays of equal length, read-only. *producer_rows*, *consumer_rows*: the table's own,
    which the ids count through: lists that were prepared from these two take a selection as it is.
    *parts*: how the ids repeat, in their order.
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
        """Return *parts* with their ids."""
        sizes = [len(entry.rows) * len(picked) for entry, picked in parts]
        ids = np.empty((2, sum(sizes)), np.int32)
        start = 0
        for (entry, picked), size in zip(parts, sizes, strict=True):
            entry.write_ids(picked, ids[:, start : start + size])
            start += size
        ids.setflags(write=False)  # whoever takes the parts for the ids looks at no id again
        found = Selection((ids[0], ids[1]))
        found.producer_rows, found.consumer_rows = producer_rows, consumer_rows
        found.parts = parts
        return found


@attrs.frozen(eq=False)
class _Cut:
    """What was found of a request: its tables, and what begins in them, by token split."""

    tables: Tables
    begins: list[Begins]
    tiles: dict[object, Tiles] = attrs.field(init=False, factory=dict)


@attrs.frozen(eq=False)
class SplitGroup:
    """The entries of one edge, by how they are cut and by kind of row.

    *likeness*: one thing for all split groups that cut any request alike, whosever they are.
    """

    edge: Edge
    spec: LayerSpec
    entries: tuple[tuple[TokenSplit, dict[RowKind, list[Entry]]], ...]
    likeness: object

    @staticmethod
    def of(plan: TransferPlan, entries: Iterable[Entry]) -> list[SplitGroup]:
        """Return the split groups of a table's *entries*."""
        edges: dict[int, tuple[Edge, dict[int, tuple[TokenSplit, dict[RowKind, list[Entry]]]]]] = {}
        for entry in entries:
            token_split = entry.rows.token_split
            _, cuts = edges.setdefault(id(entry.edge), (entry.edge, {}))
            _, kinds = cuts.setdefault(id(token_split), (token_split, {}))
            kinds.setdefault(entry.rows.kind, []).append(entry)
        found = []
        for edge, cuts in edges.values():
            spec = plan.pair_of(edge).specs[edge.layers[0]]
            numbers = tuple(
                attrs.astuple(token_split, recurse=False) for token_split, _ in cuts.values()
            )
            likeness = _likeness((edge.producer_group, edge.group, spec, numbers))
            found.append(SplitGroup(edge, spec, tuple(cuts.values()), likeness))
        return found

    def picked(
        self, request: TransferRequest, tokens: Positions | None
    ) -> list[tuple[Entry, Tiles]]:
        """Return what *request* moves of each entry, or one step of it; raise as `select`."""
        cut, picked = self._cut(request, tokens), list[tuple[Entry, Tiles]]()
        if cut is None:
            return picked
        for place, (token_split, kinds) in enumerate(self.entries):
            for kind, taken in cut.begins[place].items():
                for entry in kinds[kind]:
                    rows = entry.rows
                    key = place, kind, rows.id_key
                    found = cut.tiles.get(key)
                    if found is None:
                        block_layouts = rows.producer, rows.consumer
                        found = tiles(cut.tables, token_split, kind, taken, block_layouts)
                        cut.tiles[key] = found
                    if len(found):
                        picked.append((entry, found))
        return picked

    def dead_bytes(self, request: TransferRequest) -> int:
        """Return how many bytes *request* moves of tokens behind its last."""
        cut, total = self._cut(request, None), 0
        for place, (token_split, kinds) in enumerate(self.entries):
            if cut is None or not token_split.tile:
                continue
            context, grain = token_split.consumer.context, token_split.grain
            stop = -(-context.local(cut.tables.wanted.stop) // grain) * grain
            stop -= cut.tables.consumer.first_token // context.size
            for kind, (_, begin) in cut.begins[place].items():
                tokens = int(np.clip(begin + kind.tokens - stop, 0, kind.tokens).sum())
                lengths = sum(int(entry.rows.length.sum()) for entry in kinds[kind])
                total += tokens * lengths // kind.tokens
        return total

    def _cut(self, request: TransferRequest, tokens: Positions | None) -> _Cut | None:
        """Return *request* cut, or one step of it; None where it moves nothing."""
        if tokens is None and self.likeness in request.known:
            known: _Cut | None = request.known[self.likeness]
            return known
        first = self.entries[0][0]
        tables = Tables.of(request, self.edge, self.spec, tokens, whole=not first.tile)
        cut = None
        if tables.reached:
            if tables.cached % first.prefix_multiple:
                told = (
                    f"a multiple of prefix_multiple={first.prefix_multiple}, as the table "
                    f"was promised"
                )
                raise SpecError("cached_tokens", tables.cached, told)
            tables.check(first)
            cut = _Cut(tables, [begins(request, tables, each) for each, _ in self.entries])
        if tokens is None:
            request.known[self.likeness] = cut
        return cut


@lru_cache(maxsize=4096)
def _likeness(numbers: tuple[object, ...]) -> object:  # noqa: ARG001 - equal ones are one object
    return object()
