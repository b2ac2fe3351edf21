"""The check of one consumer rank, content by content.

Law: goes through what should be there. Every wanted content is looked for among the writes; only
then is asked what else was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import get_args

import attrs
import numpy as np

from kvspec.check.counterexample import CounterExample, Grid, Kind, State
from kvspec.check.coverage import Coverage
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.group import KVCacheGroup
from kvspec.memory.regions import RankCache, Region
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Ints
from kvspec.plan.plan import TransferPlan
from kvspec.plan.shares import GroupPair
from kvspec.specs import LayerSpec


@attrs.frozen(eq=False)
class Checker:
    """The check of one consumer rank.

    *table* is (producer address, address, length), ascending in the address; *numbers* says which
    of *sources* each row is read from.
    """

    plan: TransferPlan
    cache: RankCache
    request: TransferRequest
    producers: Mapping[RankId, RankCache]
    sources: tuple[RankId, ...]
    table: Ints
    numbers: Ints

    @cached_property
    def coverage(self) -> Coverage:
        """How often each of the rank's bytes is written."""
        return Coverage(self.table[:, 1], self.table[:, 2])

    def first(self) -> CounterExample | None:
        """Return the first fault: missing, double and wrong sources, then what is too much."""
        stage_of, stage = self.plan.consumer.stage_of, self.cache.rank.pp
        grids = [
            grid
            for pair in self.plan.pairs
            for spec, layers in pair.alike
            if self.request.wanted(pair.consumer.name, spec)
            for layer in layers
            if stage_of[layer] == stage
            for part in spec.parts
            for grid in self._grids(pair, spec, layer, part)
        ]
        faults = (self._fault(grid) for grid in grids)
        return next((each for each in faults if each is not None), None) or self._unwanted(grids)

    def _grids(self, pair: GroupPair, spec: LayerSpec, layer: str, part: Part) -> Iterator[Grid]:
        """Yield the contents of the request's own blocks: wanted, cached and dead ones."""
        engine = self.plan.consumer
        units = engine.units(pair.consumer, part, self.cache.rank)
        if not units:
            return
        region = self.cache.region(layer, part.name)
        table = self.request.consumer_blocks[pair.consumer.name]
        rows = tokens = np.arange(part.states)
        states: Ints = np.zeros(len(rows), np.int64)
        if part.per_token:
            rows, tokens, states = self._row_states(pair, spec, part, table)
        address = self._addresses(self.cache, pair.consumer, table, part, region, tokens)
        strides = np.arange(region.units) * region.unit_stride
        for number, state in enumerate(get_args(State)):
            chosen = states == number
            first = address[chosen][:, None]
            yield Grid(
                layer=layer,
                part=part,
                units=units,
                producer_group=pair.producer,
                rows=rows[chosen],
                tokens=tokens[chosen] if part.per_token else None,
                state=state,
                address=np.where(first < 0, -1, first + strides).ravel(),
            )

    def _row_states(
        self, pair: GroupPair, spec: LayerSpec, part: Part, table: BlockTable
    ) -> tuple[Ints, Ints, Ints]:
        """Return rows, their first tokens, and whether each is wanted, dead, cached or none.

        All rows of the table are there, and those of wanted tokens that it has no block for.
        """
        grain, name = part.tokens_per_state, pair.consumer.name
        context = self.plan.consumer.context(pair.consumer, self.cache.rank)
        wanted, cached = self.request.wanted(name, spec), self.request.cached(name, spec)
        first = table.first_token // context.size
        start = min(first, context.local(wanted.start)) // grain
        stop = max(first + len(table.block_ids) * spec.block_size, context.local(wanted.stop))
        rows = np.arange(start, -(-stop // grain))
        tokens = context.position(rows * grain)
        keep = (tokens + grain > wanted.start) & (tokens < wanted.stop)
        block = (rows * grain - first) // spec.block_size
        dead = np.isin(block, block[keep]) & (tokens >= cached)
        states = np.select([keep, tokens < cached, dead], [0, 2, 1], default=3)
        return rows, tokens, states

    def _addresses(
        self,
        cache: RankCache,
        group: KVCacheGroup,
        table: BlockTable,
        part: Part,
        region: Region,
        tokens: Ints,
    ) -> Ints:
        """Return where unit 0 of each row lies that begins with a token; -1 where none does.

        Of a state, *tokens* are its rows.
        """
        if not part.per_token:
            at = 0
            if len(table.block_ids) > 1:
                at = (self.request.num_tokens - 1 - table.first_token) // group.spec.block_size
            slot = int(table.block_ids[at])
            if not 0 <= slot < region.num_blocks:
                return np.full(len(tokens), -1, np.int64)
            return region.base + slot * region.block_stride + tokens * region.state_stride
        context = cache.engine.context(group, cache.rank)
        local = context.local(tokens) - table.first_token // context.size
        block, token = np.divmod(local, group.spec.block_size)
        split, token = np.divmod(token, group.memory_block_size)
        inside = context.owns(tokens) & (block >= 0) & (block < len(table.block_ids))
        ids = table.block_ids[np.where(inside, block, 0)]
        inside &= (ids >= 0) & (ids < region.num_blocks // group.split)
        inside &= ids != cache.engine.null_block  # a null block is nowhere
        ids = np.where(inside, ids, 0) * group.split + split
        row = token // part.tokens_per_state
        found = region.base + ids * region.block_stride + row * region.state_stride
        return np.where(inside, found, -1).astype(np.int64)

    def _fault(self, grid: Grid) -> CounterExample | None:
        """Return what is wrong with wanted or cached contents."""
        if not len(grid.address):
            return None
        size = grid.part.content_bytes
        missing = self.coverage.missing(grid.address, size)
        if grid.state == "cached":
            held = (grid.address >= 0) & (missing < size)
            return self._told(grid, "unwanted", int(np.argmax(held))) if held.any() else None
        if grid.state == "dead":
            return None
        if missing.any():
            return self._told(grid, "missing", int(np.argmax(missing > 0)))
        doubled = self.coverage.doubled(grid.address, size)
        if doubled.any():
            return self._told(grid, "double", int(np.argmax(doubled > 0)))
        return self._wrong_source(grid)

    def _wrong_source(self, grid: Grid) -> CounterExample | None:
        """Return a content that is read from other bytes than its own, of any write's cut."""
        source, start, length = self.table.T
        stop = grid.address + grid.part.content_bytes
        right = np.stack([self._right(grid, rank) for rank in self.sources])
        at = np.searchsorted(start, stop, "left") - 1
        left = np.full(len(stop), grid.part.content_bytes)
        columns = np.arange(len(stop))
        while len(columns):
            write = at[columns]
            first = np.maximum(start[write], grid.address[columns])
            shared = np.minimum(start[write] + length[write], stop[columns]) - first
            wanted = right[self.numbers[write], columns]
            differs = source[write] - start[write] != wanted - grid.address[columns]
            wrong = (shared > 0) & (differs | (wanted < 0))
            if wrong.any():
                which = int(np.argmax(wrong))
                byte = int(first[which] - grid.address[columns[which]])
                return self._told(grid, "wrong source", int(columns[which]), byte)
            left[columns] -= np.maximum(shared, 0)
            at[columns] -= 1
            columns = columns[left[columns] > 0]
        return None

    def _right(self, grid: Grid, rank: RankId) -> Ints:
        """Return where producer *rank* holds each content of *grid*; -1 where it does not."""
        part, engine = grid.part, self.plan.producer
        own = engine.units(grid.producer_group, part, rank)
        units = np.arange(grid.units.start, grid.units.stop)
        has = (units >= own.start) & (units < own.stop)
        if not has.any() or engine.stage_of[grid.layer] != rank.pp:
            return np.full(len(grid.address), -1, np.int64)
        cache, group = self.producers[rank], grid.producer_group
        region, table = (
            cache.region(grid.layer, part.name),
            self.request.producer_blocks[group.name],
        )
        tokens = grid.rows if grid.tokens is None else grid.tokens
        first = self._addresses(cache, group, table, part, region, tokens)[:, None]
        address = first + (units - own.start) * region.unit_stride
        return np.where(has & (first >= 0), address, -1).ravel()

    def _unwanted(self, grids: list[Grid]) -> CounterExample | None:
        """Return a fault if anything is written besides wanted contents and dead rows."""
        left, allowed = self.coverage.written, [np.empty((0, 2), np.int64)]
        for grid in (each for each in grids if each.state != "cached"):
            size = grid.part.content_bytes
            held = grid.address[grid.address >= 0]
            left -= int((size - self.coverage.missing(held, size)).sum())
            allowed.append(np.column_stack([held, held + size]))
        if not left:
            return None
        starts, stops = np.unique(np.concatenate(allowed), axis=0).T
        for _, start, length in self.table.tolist():
            at = start
            while at < start + length:
                index = int(np.searchsorted(starts, at, "right")) - 1
                if index < 0 or stops[index] <= at:
                    return self._named(at)
                at = int(stops[index])
        return None

    def _named(self, address: int) -> CounterExample | None:
        """Return the byte at *address* as a counter-example, by the region that holds it."""
        for region in self.cache.regions:
            found = region.locate(address)
            if found is not None:
                block, unit, state, byte = found
                return CounterExample(
                    kind="unwanted",
                    consumer=self.cache.rank,
                    layer=region.layer,
                    part=region.part,
                    unit=unit,
                    token=None,
                    row=state,
                    byte=byte,
                    block=block,
                )
        return CounterExample(
            kind="unwanted", consumer=self.cache.rank, layer="", part="", byte=address
        )

    def _byte(self, grid: Grid, kind: Kind, at: int) -> int:
        """Return the first byte of a content that is missing, doubled, or written at all."""
        each = grid.address[at] + np.arange(grid.part.content_bytes)
        if grid.address[at] < 0:
            return 0
        if kind == "double":
            return int(np.argmax(self.coverage.doubled(each, 1) > 0))
        missing = self.coverage.missing(each, 1) > 0
        return int(np.argmax(missing if kind == "missing" else ~missing))

    def _told(self, grid: Grid, kind: Kind, at: int, byte: int | None = None) -> CounterExample:
        if byte is None:
            byte = self._byte(grid, kind, at)
        row, unit = divmod(at, len(grid.units))
        unit = grid.units[unit]
        producer, part = self.plan.producer, grid.part
        holders = producer.deal(grid.producer_group, part).ranks_of(range(unit, unit + 1))
        token = None if grid.tokens is None else grid.tokens[row : row + 1]
        senders = (
            rank
            for rank in producer.parallel.ranks
            if rank.tp in holders
            and rank.pp == producer.stage_of[grid.layer]
            and (token is None or producer.context(grid.producer_group, rank).owns(token).all())
        )
        return CounterExample(
            kind=kind,
            consumer=self.cache.rank,
            layer=grid.layer,
            part=part.name,
            unit=unit,
            token=None if token is None else int(token[0]),
            row=int(grid.rows[row]),
            byte=byte,
            wanted_from=tuple(senders),
        )
