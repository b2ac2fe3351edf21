"""The exact-cover checker, with a readable counter-example.

Law: stated over the target. For every byte that a consumer rank should receive there is exactly
one descriptor that writes it, from the bytes of the same unit, token and layer; and no descriptor
writes anything but those bytes and dead tokens in the request's own blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.cache import RankCache
from kvspec.parallel import RankId
from kvspec.plan import GroupPair, TransferPlan
from kvspec.proof import Proof, prove
from kvspec.request import TransferRequest
from kvspec.runs import merge
from kvspec.slices import Part
from kvspec.specs import LayerSpec
from kvspec.table import build_table

__all__ = ["CounterExample", "Proof", "prove", "verify"]

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint64]
Kind = Literal["missing", "double", "wrong source", "unwanted"]


@attrs.frozen(kw_only=True)
class CounterExample:
    """One byte that is not right: whose, which, how, and who should have sent it.

    *unit* is the model's own number; *token* is None in a recurrent state, where *row* counts the
    rows of the state. Of an unwanted byte the *block* is told, *unit* then being the rank's own;
    outside every region *layer* is empty and *byte* the address.
    """

    kind: Kind
    consumer: RankId
    layer: str
    part: str
    unit: int = 0
    token: int | None = None
    row: int = 0
    byte: int = 0
    block: int | None = None
    wanted_from: tuple[RankId, ...] = ()

    def __str__(self) -> str:
        at = f"row {self.row}" if self.token is None else f"token {self.token}"
        if self.block is not None:
            at = f"block {self.block}, {at}"
        if not self.layer:
            where = f"consumer {self.consumer}, address {self.byte:#x}"
            return f"{where}: written, although no content lies there"
        senders = " or ".join(map(str, self.wanted_from))
        told = {
            "missing": f"missing; producer {senders} should have sent it",
            "double": f"written twice; producer {senders} should have sent it once",
            "wrong source": f"read from other bytes; producer {senders} holds the right ones",
            "unwanted": "written, although the request does not want it",
        }[self.kind]
        return (
            f"consumer {self.consumer}, layer {self.layer}, part {self.part}, unit {self.unit}, "
            f"{at}, byte {self.byte}: {told}"
        )


@attrs.frozen(eq=False, kw_only=True)
class _Grid:
    """Contents of one part of one layer, rows x units: where they lie and what they stand for."""

    layer: str
    part: Part
    units: range
    producer_group: str
    rows: Ints
    tokens: Ints | None
    wanted: bool
    address: Ints


def verify(
    plan: TransferPlan,
    producers: Mapping[RankId, RankCache],
    consumers: Mapping[RankId, RankCache],
    request: TransferRequest,
    descriptors: Mapping[tuple[RankId, RankId], Rows] | None = None,
) -> CounterExample | None:
    """Return the first byte of *request* that would not be right, or None if every byte is.

    *descriptors*: what is to be copied, by (producer rank, consumer rank): uint64 rows (producer
    address, consumer address, length), of any connector; the library's own unless given.
    """
    if descriptors is None:
        descriptors = {
            (source, rank): build_table(plan, producers[source], consumers[rank]).descriptors(
                request
            )
            for rank in consumers
            for source in plan.sources(rank)
        }
    for rank, cache in consumers.items():
        sources = tuple(source for source, target in descriptors if target == rank)
        joined = [_joined(descriptors[source, rank], at) for at, source in enumerate(sources)]
        table = np.concatenate([np.empty((0, 4), np.int64), *joined])
        table = table[np.argsort(table[:, 1], kind="stable")]
        found = _Checker(plan, cache, request, producers, sources, table).first()
        if found is not None:
            return found
    return None


@attrs.frozen(eq=False)
class _Checker:
    """The check of one consumer rank: *table* is (producer address, address, length, source)."""

    plan: TransferPlan
    cache: RankCache
    request: TransferRequest
    producers: Mapping[RankId, RankCache]
    sources: tuple[RankId, ...]
    table: Ints

    def first(self) -> CounterExample | None:
        """Return the first fault: missing, then wrong sources, then too much."""
        grids = [
            grid
            for pair in self.plan.pairs
            for spec, layers in pair.alike
            if self.request.wanted(pair.consumer.name, spec)
            for layer in layers
            for part in spec.parts
            for grid in self._grid(pair, spec, layer, part)
        ]
        faults = (self._wrong(grid) for grid in grids)
        return next((each for each in faults if each is not None), None) or self._unwanted(grids)

    def _grid(self, pair: GroupPair, spec: LayerSpec, layer: str, part: Part) -> Iterator[_Grid]:
        """Yield every row of the request's own blocks, wanted or not, if the rank has *part*."""
        units = self.plan.consumer.parallel.deal(part.units, part.deal_in).ranges[
            self.cache.rank.tp
        ]
        if not units:
            return
        region = self.cache.region(layer, part.name)
        table = self.request.consumer_blocks[pair.consumer.name]
        wanted = self.request.wanted(pair.consumer.name, spec)
        rows = np.arange(len(table.block_ids) * region.states)
        block, state = np.divmod(rows, region.states)
        tokens = None
        keep = dead = np.ones(len(rows), np.bool_)
        if part.tokens_per_state:
            tokens = table.first_token + rows * part.tokens_per_state
            ends = tokens + part.tokens_per_state
            keep = (ends > wanted.start) & (tokens < wanted.stop)
            dead = tokens >= self.request.cached(pair.consumer.name)
            blocks = np.unique(block[keep])
            dead &= np.isin(block, blocks) & ~keep
        address = region.base + table.block_ids[block] * region.block_stride
        address = address + state * region.state_stride
        strides = np.arange(region.units) * region.unit_stride
        for chosen, is_wanted in ((keep, True), (dead & ~keep, False)):
            yield _Grid(
                layer=layer,
                part=part,
                units=units,
                producer_group=pair.producer.name,
                rows=state[chosen] if tokens is None else rows[chosen],
                tokens=None if tokens is None else tokens[chosen],
                wanted=is_wanted,
                address=(address[chosen][:, None] + strides).ravel(),
            )

    def _holding(self, grid: _Grid) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return which row of the table holds each content of *grid* whole, and if any does."""
        if not len(self.table):
            return np.zeros(len(grid.address), np.int64), np.zeros(len(grid.address), np.bool_)
        _, start, length, _ = self.table.T
        at = np.searchsorted(start, grid.address, "right") - 1
        inside = grid.address + grid.part.content_bytes <= start[at] + length[at]
        return at, (at >= 0) & inside

    def _wrong(self, grid: _Grid) -> CounterExample | None:
        if not grid.wanted:
            return None
        at, held = self._holding(grid)
        if not held.all():
            return self._told(grid, "missing", int(np.argmin(held)))
        start, length = self.table[:, 1], self.table[:, 2]
        twice = np.flatnonzero(start[:-1] + length[:-1] > start[1:]) + 1
        if len(twice):
            doubled = (grid.address < start[twice[0]] + length[twice[0]]) & (
                grid.address + grid.part.content_bytes > start[twice[0]]
            )
            if doubled.any():
                return self._told(grid, "double", int(np.argmax(doubled)))
        source = self.table[at, 0] + grid.address - start[at]
        for number, rank in enumerate(self.sources):
            mine = self.table[at, 3] == number
            differs = mine & (source != self._right(grid, rank))
            if differs.any():
                return self._told(grid, "wrong source", int(np.argmax(differs)))
        return None

    def _right(self, grid: _Grid, rank: RankId) -> Ints:
        """Return where producer *rank* holds each content of *grid*; -1 where it does not."""
        part, engine = grid.part, self.plan.producer
        own = engine.parallel.deal(part.units, part.deal_in).ranges[rank.tp]
        units = np.arange(grid.units.start, grid.units.stop)
        has = (units >= own.start) & (units < own.stop)
        if not has.any():
            return np.full(len(grid.address), -1, np.int64)
        region = self.producers[rank].region(grid.layer, part.name)
        table = self.request.producer_blocks[grid.producer_group]
        rows = grid.rows
        if grid.tokens is not None:
            rows = (grid.tokens - table.first_token) // part.tokens_per_state
        block, state = np.divmod(rows, region.states)
        inside = (block >= 0) & (block < len(table.block_ids))
        first = region.base + table.block_ids[np.where(inside, block, 0)] * region.block_stride
        address = (first + state * region.state_stride)[:, None]
        address = address + (units - own.start) * region.unit_stride
        return np.where(has & inside[:, None], address, -1).ravel()

    def _unwanted(self, grids: list[_Grid]) -> CounterExample | None:
        """Return a fault if more is written than wanted contents and whole dead rows."""
        left = int(self.table[:, 2].sum())
        for grid in grids:
            left -= int(self._holding(grid)[1].sum()) * grid.part.content_bytes
        if not left:
            return None
        allowed = [(a, a + g.part.content_bytes) for g in grids for a in g.address.tolist()]
        allowed.sort()
        stops = np.array([stop for _, stop in allowed], np.int64)
        starts = np.array([start for start, _ in allowed], np.int64)
        for _, start, length, _ in self.table.tolist():
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

    def _told(self, grid: _Grid, kind: Kind, at: int) -> CounterExample:
        row, unit = divmod(at, len(grid.units))
        engine, part = self.plan.producer, grid.part
        holders = engine.parallel.deal(part.units, part.deal_in).ranks_of(
            range(grid.units[unit], grid.units[unit] + 1)
        )
        return CounterExample(
            kind=kind,
            consumer=self.cache.rank,
            layer=grid.layer,
            part=part.name,
            unit=grid.units[unit],
            token=None if grid.tokens is None else int(grid.tokens[row]),
            row=int(grid.rows[row]),
            wanted_from=tuple(RankId(tp=each) for each in holders),
        )


def _joined(rows: Rows, source: int) -> Ints:
    """Return rows (producer address, address, length, source), touching ones joined."""
    if not len(rows):
        return np.empty((0, 4), np.int64)
    columns = merge([rows.astype(np.int64)])
    return np.column_stack([*columns, np.full(len(columns[0]), source)])
