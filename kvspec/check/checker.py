"""The check of one consumer rank, content by content.

Law: goes through what should be there. Every wanted content is looked for among the writes; only
then is asked what else was written, and what else was read.

A byte that is not right, told so that one can find it.

Law: names whose byte it is and who should have sent it, in the model's own numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import gcd
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.check.coverage import Coverage, Small
from kvspec.check.places import Contents, Places, covered
from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.memory.rank_cache import RankCache, Region
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Ints

Kind = Literal["missing", "double", "wrong source", "unwanted", "foreign"]


@attrs.frozen(kw_only=True)
class CounterExample:
    """One byte that is not right: whose, which, how, and who should have sent it.

    *unit* is the model's own number; *token* is None in a recurrent state, where *row* counts the
    rows of the state. Of an unwanted byte the *block* is told, *unit* then being the rank's own;
    outside every region *layer* is empty and *byte* the address. A foreign byte is one that is
    read though it is not the request's: block and unit, or the address, are the *producer*'s.
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
    producer: RankId | None = None

    def __str__(self) -> str:
        at = f"row {self.row}" if self.token is None else f"token {self.token}"
        if self.block is not None:
            at = f"block {self.block}, {at}"
        who = f"consumer {self.consumer}"
        if self.producer is not None:
            who += f" reads producer {self.producer}"
        if not self.layer:
            told = "written" if self.producer is None else "read"
            return f"{who}, address {self.byte:#x}: {told}, although no content lies there"
        senders = " or ".join(map(str, self.wanted_from))
        told = {
            "missing": f"missing; producer {senders} should have sent it",
            "double": f"written twice; producer {senders} should have sent it once",
            "wrong source": f"read from other bytes; producer {senders} holds the right ones",
            "unwanted": "written, although the request does not want it",
            "foreign": "another request's block",
        }[self.kind]
        return (
            f"{who}, layer {self.layer}, part {self.part}, unit {self.unit}, "
            f"{at}, byte {self.byte}: {told}"
        )


AT_ONCE = 2**18
"""Contents that are looked at together, about: what bounds the memory that a check takes."""

KINDS: tuple[Kind, ...] = ("missing", "wrong source", "double")
"""What is wrong with a wanted byte, if anything, that is written never, once, or more often."""


@attrs.frozen(eq=False)
class Moving:
    """One part of one layer that moves to a rank, of a state the rows that both sides have."""

    group: KVCacheGroup
    producer_group: KVCacheGroup
    layer: str
    part: Part
    wanted: range


@attrs.frozen(eq=False)
class Grid:
    """Contents that move together, rows x units, and where the consumer has each.

    *rows* are numbers of a state's rows, or the tokens with which rows begin. Unless they are
    *cached*, they have to be written, once; cached ones must not be. Of each content these are
    *size* bytes, from *byte* on: the longest chunk that lies together on all sides.
    """

    moving: Moving
    units: range
    rows: Ints
    cached: bool
    byte: int
    size: int
    address: Ints


@attrs.frozen(eq=False, slots=False)
class Checker:
    """The check of one consumer rank.

    *table* is (producer address, address, length); *numbers* says from which of *sources* each row
    is read. *producers*: the places of every producer rank. *excluded*: layers that do not move.
    """

    request: TransferRequest
    producer: EngineSpec
    producers: Mapping[RankId, Places]
    consumer: Places
    excluded: frozenset[str]
    sources: tuple[RankId, ...]
    table: Ints
    numbers: Small

    def first(self) -> CounterExample | None:
        """Return the first fault: of wanted and cached contents, then what is too much."""
        faults = (self._fault(grid) for each in self._moving for grid in self._grids(each))
        found = next((fault for fault in faults if fault is not None), None)
        return found or self._unwanted() or self._foreign()

    @cached_property
    def writes(self) -> Coverage:
        """How often each of the rank's bytes is written."""
        return Coverage(self.table[:, 1], self.table[:, 2])

    @cached_property
    def _moving(self) -> list[Moving]:
        """What moves to the rank."""
        owners, found = self.consumer.owners, list[Moving]()
        for layer, group in self.consumer.layers.items():
            spec, other = group.spec.of_layer(layer), self.producer.homes.get(layer)
            wanted = owners.wanted(self.request, group, spec) if layer not in self.excluded else ()
            if not wanted or other is None:
                continue
            states = {part.name: part.states for part in other.spec.of_layer(layer).parts}
            for part in spec.parts:
                least = part.states if part.per_token else min(part.states, states[part.name])
                if self.consumer.units(group, part):
                    common = attrs.evolve(part, states=least)
                    found.append(Moving(group, other, layer, common, wanted))
        return found

    def _grids(self, moving: Moving) -> Iterator[Grid]:
        """Yield the wanted and the cached contents of one part, some at a time."""
        wanted, cached = self._rows(moving)
        units = self.consumer.units(moving.group, moving.part)
        strides = np.arange(len(units)) * self.consumer.unit_stride(moving.layer, moving.part)
        step = -(-AT_ONCE // len(units))
        sides = (self.consumer, *self.producers.values())
        sizes = [side.chunk_bytes(moving.layer, moving.part) for side in sides]
        size = gcd(*sizes)
        for every in (wanted, cached):
            for at in range(0, len(every), step):
                rows = every[at : at + step]
                first = self._first(self.consumer, moving.group, moving, rows)[:, None]
                begins = np.where(first < 0, -1, first + strides).ravel()
                for byte in range(0, moving.part.content_bytes, size):
                    offset = self.consumer.chunk_offset(moving.layer, moving.part, byte)
                    address = np.where(begins < 0, -1, begins + offset)
                    yield Grid(moving, units, rows, every is cached, byte, size, address)

    def _rows(self, moving: Moving) -> tuple[Ints, Ints]:
        """Return the wanted rows of a part and the cached ones, each by its first token.

        Of a state, all are wanted. Wanted tokens before and after the table's blocks are in it too,
        the first of them at least: they are missing.
        """
        if not moving.part.per_token:
            return np.arange(moving.part.states), np.empty(0, np.int64)
        table, grain = self.consumer.tables[moving.group.name], moving.part.tokens_per_state
        virtual, count = self.consumer.virtual_block(moving.group), len(table.block_ids)
        wanted, first = moving.wanted, table.first_token
        start, stop = wanted.start - first, wanted.stop - first
        before = [start // virtual] if start < 0 else []
        after = [max(count, start // virtual)] if stop > count * virtual else []
        blocks = np.array([*before, *range(count), *after], np.int64)
        rows = self.consumer.positions(moving.group, blocks)[:, ::grain].ravel()
        moves = (rows + grain > start) & (rows < stop)
        spec = moving.group.spec.of_layer(moving.layer)
        cached = self.consumer.owners.cached(self.request, moving.group, spec)
        held = ~moves & (rows < cached - first)
        return rows[moves] + first, rows[held] + first

    def _first(self, side: Places, group: KVCacheGroup, moving: Moving, rows: Ints) -> Ints:
        """Return where one *side* has unit 0 of each row; -1 where it has none."""
        region = side.regions.get((moving.layer, moving.part.name))
        if region is None:
            return np.full(len(rows), -1, np.int64)
        if moving.part.per_token:
            return side.rows(group, region, moving.part, rows)
        return side.states(group, region, moving.wanted.stop - 1, rows)

    def _fault(self, grid: Grid) -> CounterExample | None:
        """Return the first byte of wanted or cached contents that is wrong."""
        stop = grid.address + grid.size
        content, segment = self.writes.segments(grid.address, stop)
        times = np.where(grid.address[content] < 0, 0, self.writes.times[segment])
        if grid.cached:
            wrong = times > 0
        else:
            wrong = times != 1
            wrong[~wrong] = self._elsewhere(grid, content[~wrong], segment[~wrong])
        if not wrong.any():
            return None
        at = int(np.argmax(wrong))
        kind: Kind = "unwanted" if grid.cached else KINDS[min(int(times[at]), 2)]
        byte = self.writes.cuts[segment[at]] - grid.address[content[at]]
        return self._told(grid, kind, int(content[at]), grid.byte + max(int(byte), 0))

    def _elsewhere(self, grid: Grid, content: Ints, segment: Ints) -> npt.NDArray[np.bool_]:
        """Return which of these, each written once, are read from other bytes than their own."""
        write = self.writes.span[segment]
        right = self._right(grid, content, self.numbers[write])
        distance = self.table[write, 0] - self.table[write, 1]
        return np.asarray((right < 0) | (right - grid.address[content] != distance))

    def _right(self, grid: Grid, content: Ints, number: Small) -> Ints:
        """Return where the source of each *number* has each content; -1 where it has none of it."""
        moving = grid.moving
        group, shape = moving.producer_group, (len(self.sources), len(grid.rows))
        first = np.full(shape, -1, np.int64)
        start, stop, stride, offset = np.zeros((4, len(self.sources)), np.int64)
        for source, rank in enumerate(self.sources):
            side = self.producers[rank]
            units = side.units(group, moving.part) if moving.layer in side.layers else range(0)
            if max(units.start, grid.units.start) < min(units.stop, grid.units.stop):
                first[source] = self._first(side, group, moving, grid.rows)
                start[source], stop[source] = units.start, units.stop
                stride[source] = side.unit_stride(moving.layer, moving.part)
                offset[source] = side.chunk_offset(moving.layer, moving.part, grid.byte)
        row, unit = np.divmod(content, len(grid.units))
        unit += grid.units.start
        begins = first[number, row]
        has = (begins >= 0) & (unit >= start[number]) & (unit < stop[number])
        found = begins + (unit - start[number]) * stride[number] + offset[number]
        return np.where(has, found, -1)

    def _unwanted(self) -> CounterExample | None:
        """Return a byte that is written outside the blocks into which wanted contents go.

        Inside them, cached contents are looked at one by one, and all others may be written.
        """
        by_group: dict[str, tuple[Moving, list[tuple[Region, int]]]] = {}
        for each in self._moving:
            region = self.consumer.regions[each.layer, each.part.name]
            rows = min(each.part.states, region.states)
            by_group.setdefault(each.group.name, (each, []))[1].append((region, rows))
        found: list[Contents] = []
        for each, regions in by_group.values():
            ids = self.consumer.written(each.group, each.part, each.wanted)
            found += self.consumer.contents(each.group, regions, ids)
        outside = covered(found).first_outside(self.table[:, 1], self.table[:, 2])
        return None if outside is None else self._named("unwanted", self.consumer.cache, outside[1])

    def _foreign(self) -> CounterExample | None:
        """Return a byte that is read outside the request's own blocks of its source."""
        for number, rank in enumerate(self.sources):
            reads, side = self.table[self.numbers == number], self.producers[rank]
            outside = side.own.first_outside(reads[:, 0], reads[:, 2])
            if outside is not None:
                return self._named("foreign", side.cache, outside[1], rank)
        return None

    def _named(
        self, kind: Kind, cache: RankCache, address: int, producer: RankId | None = None
    ) -> CounterExample:
        """Return the byte at *address* as a counter-example, by the region that holds it."""
        consumer = self.consumer.cache.rank
        for region in cache.regions:
            found = region.locate(address)
            if found is not None:
                block, unit, state, byte = found
                return CounterExample(
                    kind=kind, consumer=consumer, layer=region.layer, part=region.part,
                    unit=unit, row=state, byte=byte, block=block, producer=producer,
                )  # fmt: skip
        return CounterExample(
            kind=kind, consumer=consumer, layer="", part="", byte=address, producer=producer
        )

    def _told(self, grid: Grid, kind: Kind, content: int, byte: int) -> CounterExample:
        """Return a byte of one of the contents as a counter-example."""
        moving, (row, unit) = grid.moving, divmod(content, len(grid.units))
        unit, number = grid.units[unit], int(grid.rows[row])
        token = number if moving.part.per_token else None
        senders = (
            rank
            for rank, side in self.producers.items()
            if moving.layer in side.layers
            and unit in side.units(moving.producer_group, moving.part)
            and (token is None or side.stores(moving.producer_group, token))
        )
        return CounterExample(
            kind=kind,
            consumer=self.consumer.cache.rank,
            layer=moving.layer,
            part=moving.part.name,
            unit=unit,
            token=token,
            row=number if token is None else token // moving.part.tokens_per_state,
            byte=byte,
            wanted_from=tuple(senders),
        )
