"""What one request moves of rows that are cut alike.

Law: a request is cut once. Tables of other ranks, whose rows are cut as those of the first, take
what was found of it; so all sources of one consumer rank do, as a rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import attrs
import numpy as np

from kvspec.descriptors.entries import Entry
from kvspec.descriptors.paging import RowKind, TokenSplit
from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.tiles import Begins, Positions, Tables, Tiles, begins, tiles
from kvspec.errors import SpecError
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan
from kvspec.specs import LayerSpec


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
