"""Check the writes of one consumer rank, byte by byte, and describe the first wrong byte.

Invariant: the check goes through the bytes that should arrive. It looks for each of them among the
writes. Only then it looks for bytes that were written or read without need.

How it works:
    A *content* is one row of one unit of one part. A `CheckedContents` is a matrix of contents,
    rows x units. `Checker.judge` is the definition of the check, for one byte of one content:

        byte     writes       source of the write                verdict
        ------   ----------   --------------------------------   --------------
        wanted   none                                            missing
        wanted   one          the same byte of a producer rank   right
        wanted   one          any other byte                     wrong source
        wanted   two or more                                     double
        cached   none                                            right
        cached   one or more                                     unwanted

    A request of 128k tokens has billions of bytes, so `Checker.suspects` looks at all
    contents of a matrix at once. The starts and ends of the writes cut the addresses. All bytes of
    one content from one cut to the next have the same verdict. For example, one content of 8
    bytes at address 100 is written in two rows, and the second row is 2 bytes short:

        row             reads        writes     length
        0               producer 0   100        4
        1               producer 0   104        2

        from..to        writes       verdict
        100..104        1            right, if row 0 reads from the first byte of the content
        104..106        1            right, if row 1 reads from byte 4 of the content
        106..108        0            missing: the counter-example is byte 6

    `first_fault` passes the first byte of each suspect cut to `judge`. So `suspects` only
    selects bytes, and `judge` decides. `tests/laws/test_verify_laws.py` compares the two methods.

    Afterwards, `_unwanted` finds bytes that were written outside the request's own blocks,
    `_foreign` finds bytes that were read outside of them, and `_twice` finds dead bytes that were
    written twice. Law 1 in `kvspec.testing.laws` has the same definition of a wrong byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal

import attrs
import numpy as np

from kvspec.check.coverage import Coverage, Small
from kvspec.check.places import AddressRanges, Places, covered
from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.memory.rank_cache import RankCache, Region
from kvspec.memory.region import common_runs
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Ints

FaultKind = Literal["missing", "double", "wrong source", "unwanted", "foreign"]


@attrs.frozen(kw_only=True)
class CounterExample:
    """One wrong byte of a transfer.

    Attributes:
        kind: The fault. A `foreign` byte was read although it does not belong to the request.
        consumer: The consumer rank.
        layer: Name of the layer, or empty if the byte lies outside every region.
        part: Name of the part.
        unit: Number of the unit in the model. If *block* is set, it counts the rank's own units.
        token: Position of the token, or None for the state of a recurrent layer.
        row: Number of the row in its block or state.
        byte: Number of the byte in the content as the consumer stores it. If the byte is foreign,
            as the producer does. If *layer* is empty, it is the address of the byte.
        block: Block of an unwanted or foreign byte, otherwise None.
        wanted_from: The producer ranks that hold the right byte.
        producer: The producer rank that a foreign byte was read from, otherwise None.

    >>> print(CounterExample(
    ...     kind="missing", consumer=RankId(), layer="layers.0", part="k", unit=3, token=17,
    ...     byte=6, wanted_from=(RankId(tp=1),)))
    consumer tp0, layer layers.0, part k, unit 3, token 17, byte 6: missing; producer tp1 should \
    have sent it
    """

    kind: FaultKind
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
            access = "written" if self.producer is None else "read"
            return f"{who}, address {self.byte:#x}: {access}, although no content lies there"
        senders = " or ".join(map(str, self.wanted_from))
        once = f"; producer {senders} should have sent it once" if senders else ""
        fault = {
            "missing": f"missing; producer {senders} should have sent it",
            "double": f"written more than once{once}",
            "wrong source": f"read from other bytes; producer {senders} holds the right ones",
            "unwanted": "written, although the request does not want it",
            "foreign": "read, although the block is not the request's, or not any more",
        }[self.kind]
        return (
            f"{who}, layer {self.layer}, part {self.part}, unit {self.unit}, "
            f"{at}, byte {self.byte}: {fault}"
        )


# A matrix has about this many contents. Larger ones need more memory, smaller ones more time.
CONTENTS_AT_ONCE = 2**18


@attrs.frozen(eq=False)
class Moving:
    """One part of some layers that moves to the rank.

    All ranks store it in all *layers* alike, but at other addresses. If the part is a state, *part*
    counts only the rows that both engines have.
    """

    group: KVCacheGroup
    producer_group: KVCacheGroup
    layers: list[str]
    part: Part
    wanted: range

    @property
    def layer(self) -> str:
        """The first layer."""
        return self.layers[0]


@attrs.frozen(eq=False)
class CheckedContents:
    """Contents of one part, layers x rows x units, and where the consumer keeps one run of each.

    All contents of the matrix have the same run: *size* bytes from *byte* on.

    Attributes:
        moving: The part.
        layers: Indices of the layers.
        units: Numbers of the units in the model.
        rows: Numbers of a state's rows, or the first token of each row.
        cached: Whether the consumer already has the contents. Then nothing may write them.
        byte: First byte of the run in its content.
        size: Bytes of the run, which is contiguous in the memory of all ranks.
        address: Address of the run of each content, flat, layer by layer and row by row. -1 if
            the consumer's block table has no block for the row.
        offsets: Distance of the run from the address of its content, by producer rank.
    """

    moving: Moving
    layers: range
    units: range
    rows: Ints
    cached: bool
    byte: int
    size: int
    address: Ints
    offsets: Mapping[RankId, int]


@attrs.frozen(eq=False, slots=False)
class Checker:
    """The check of one consumer rank.

    Attributes:
        producer: The producer engine.
        producers: Places of every producer rank.
        consumer: Places of the consumer rank.
        sources: The producer ranks that the transfer rows read from.
        table: The transfer rows, of shape (rows, 3): producer address, consumer address, length.
        numbers: For each transfer row, the index of its producer rank in *sources*.
    """

    producer: EngineSpec
    producers: Mapping[RankId, Places]
    consumer: Places
    sources: tuple[RankId, ...]
    table: Ints
    numbers: Small

    def first(self) -> CounterExample | None:
        """Return the first fault, or None if the rank receives exactly the right bytes."""
        faults = map(self.first_fault, self.checked_contents())
        fault = next((fault for fault in faults if fault is not None), None)
        return fault or self._unwanted() or self._foreign() or self._twice()

    @property
    def request(self) -> TransferRequest:
        """The request."""
        return self.consumer.request

    @cached_property
    def writes(self) -> Coverage:
        """The number of writes of each byte of the rank."""
        return Coverage(self.table[:, 1], self.table[:, 2])

    @cached_property
    def _moving(self) -> list[Moving]:
        """The parts that move to the rank, also those of which nothing is wanted now."""
        owners, alike = self.consumer.owners, dict[object, Moving]()
        sides = (self.consumer, *self.producers.values())
        parts: dict[tuple[int, int], tuple[tuple[range, ...], list[Part]]] = {}
        for layer, group in self.consumer.layers.items():
            spec, producer_group = group.spec.of_layer(layer), self.producer.homes.get(layer)
            if layer in self.consumer.excluded or producer_group is None:
                continue
            source = producer_group.spec.of_layer(layer)
            kinds = id(spec), id(source)
            if kinds not in parts:
                moves = owners.moves(self.request, group, spec)
                states = {part.name: part.states for part in source.parts}
                parts[kinds] = (
                    moves or (owners.wanted(self.request, group, spec),),
                    [
                        part
                        if part.per_token
                        else attrs.evolve(part, states=min(part.states, states[part.name]))
                        for part in spec.parts
                        if self.consumer.units(group, part)
                    ],
                )
            every, own = parts[kinds]
            for part, wanted in itertools.product(own, every):
                shapes = tuple(side.shape(layer, part) for side in sides)
                key = group.name, producer_group.name, *kinds, part.name, shapes, wanted
                if key not in alike:
                    alike[key] = Moving(group, producer_group, [], part, wanted)
                alike[key].layers.append(layer)
        return list(alike.values())

    def checked_contents(self) -> Iterator[CheckedContents]:
        """Yield wanted and cached contents of all parts, about `CONTENTS_AT_ONCE` at a time."""
        for moving in self._moving:
            wanted, cached = self._rows(moving)
            units = self.consumer.units(moving.group, moving.part)
            places = np.arange(len(units))
            strides = places * self.consumer.unit_stride(moving.layer, moving.part)
            stored = self.consumer.stored_units(moving.group, moving.layer, moving.part)
            lacking = places >= len(stored)
            bases = self._bases(self.consumer, moving)[:, None]
            runs = self._runs(moving)
            for all_rows in (wanted, cached):
                for layers, rows in _matrices(len(bases), all_rows, len(units)):
                    first = self._row_addresses(self.consumer, moving.group, moving, rows)[:, None]
                    begins = np.where((first < 0) | lacking, -1, first + strides).ravel()
                    own_bases = bases[layers.start : layers.stop]
                    begins = np.where(begins < 0, -1, begins + own_bases).ravel()
                    for byte, size, offset, offsets in runs:
                        address = np.where(begins < 0, -1, begins + offset)
                        is_cached = all_rows is cached
                        yield CheckedContents(
                            moving, layers, units, rows, is_cached, byte, size, address, offsets
                        )

    def _bases(self, side: Places, moving: Moving) -> Ints:
        """Return the bytes from the first layer's memory on one *side* to that of each layer."""
        key = id(side), id(moving)
        if key not in self._known_bases:
            regions = (side.regions.get((layer, moving.part.name)) for layer in moving.layers)
            bases = np.array([0 if region is None else region.base for region in regions])
            self._known_bases[key] = bases - bases[0]
        return self._known_bases[key]

    @cached_property
    def _known_bases(self) -> dict[tuple[int, int], Ints]:
        return {}

    def _runs(self, moving: Moving) -> list[tuple[int, int, int, dict[RankId, int]]]:
        """Return the runs of a content that are contiguous in the memory of all ranks.

        Each has its first byte, its length, and its distance from the address of the content on
        the consumer and on each producer rank.
        """
        key = moving.layer, moving.part.name
        # A rank whose cache lacks the part has no addresses for its contents.
        target = [own] if (own := self.consumer.regions.get(key)) else []
        regions = {
            rank: own for rank, side in self.producers.items() if (own := side.regions.get(key))
        }
        return [
            (
                byte,
                size,
                sum(offsets[: len(target)]),
                dict(zip(regions, offsets[len(target) :], strict=True)),
            )
            for byte, size, offsets in common_runs(*target, *regions.values())
        ]

    def _rows(self, moving: Moving) -> tuple[Ints, Ints]:
        """Return the wanted and the cached rows of a part. All rows of a state are wanted.

        A row is the number of its first token. If wanted tokens lie before or after the blocks of
        the table, the rows of one block there are included. They will be missing. If the group
        shares memory, cached rows are included from the block of the first live token on. Earlier
        blocks are left to `_unwanted`.
        """
        if not moving.part.per_token:
            states = moving.part.states if moving.wanted else 0
            return np.arange(states), np.empty(0, np.int64)
        table, row_tokens = self.consumer.tables[moving.group.name], moving.part.tokens_per_state
        virtual, count = self.consumer.virtual_block(moving.group), len(table.block_ids)
        wanted, first = moving.wanted, table.first_token
        if moving.group.spec.is_ring:
            # Each row that is not wanted must not change: it counts as cached, as a later position.
            rows = np.arange(wanted.start, wanted.start + virtual)
            return rows[: len(wanted)], rows[len(wanted) :]
        start, stop = wanted.start - first, wanted.stop - first
        before = [start // virtual] if moving.wanted and start < 0 else []
        after = [max(count, start // virtual)] if stop > count * virtual else []
        inside = self.consumer.blocks(moving.group.name).tolist()
        blocks = np.array([*before, *inside, *after], np.int64)
        rows = self.consumer.positions(moving.group, blocks)[:, ::row_tokens].ravel()
        # A row is wanted if any of its tokens is.
        moves = (rows + row_tokens > start) & (rows < stop)
        spec = moving.group.spec.of_layer(moving.layer)
        cached = self.consumer.owners.cached(self.request, moving.group, spec)
        held = ~moves & (rows < cached - first)
        if any(moving.group.name in groups for groups in self.consumer.sharing):
            # A block before the first live one may belong to another group by now.
            live = self.consumer.owners.first_live(self.request, spec) // virtual * virtual
            held &= rows >= live - first
        return rows[moves] + first, rows[held] + first

    def _row_addresses(self, side: Places, group: KVCacheGroup, moving: Moving, rows: Ints) -> Ints:
        """Return the address of unit 0 of each row on one *side*, or -1 if it lacks the row."""
        region = side.regions.get((moving.layer, moving.part.name))
        if region is None:
            return np.full(len(rows), -1, np.int64)
        if moving.part.per_token:
            return side.rows(group, region, moving.part, rows)
        return side.states(group, region, moving.wanted.stop - 1, rows)

    def first_fault(self, checked: CheckedContents) -> CounterExample | None:
        """Return the first wrong byte of *checked*."""
        for content, byte in zip(*self.suspects(checked), strict=True):
            kind = self.judge(checked, int(content), int(byte))
            if kind is not None:
                return self._counter_example(checked, kind, int(content), int(byte))
        return None

    def judge(self, checked: CheckedContents, content: int, byte: int) -> FaultKind | None:
        """Return the fault of one byte of one content of *checked*, or None if the byte is right.

        This is the definition of the check. *byte* counts from the first byte of the matrix's run.
        """
        start, stop = self.table[:, 1], self.table[:, 1] + self.table[:, 2]
        run = int(checked.address[content])
        address = run + byte
        # The consumer has no memory for a content without an address, so no row writes it.
        writers = np.flatnonzero((run >= 0) & (start <= address) & (address < stop))
        if checked.cached:
            return "unwanted" if len(writers) else None
        if len(writers) != 1:
            return "double" if len(writers) else "missing"
        ((reads, writes, _),) = self.table[writers].tolist()
        read = reads + address - writes
        source = self._source(checked, np.array([content]), self.numbers[writers]).item()
        return None if source >= 0 and source + byte == read else "wrong source"

    def suspects(self, checked: CheckedContents) -> tuple[Ints, Ints]:
        """Return the content and the byte in it of the first byte of each wrong segment."""
        content, cut = self.writes.cuts_in(checked.address, checked.address + checked.size)
        address = checked.address[content]
        times = np.where(address < 0, 0, self.writes.times[cut])
        wrong = times > 0 if checked.cached else times != 1
        if not checked.cached:
            once = np.flatnonzero(~wrong)
            write = self.writes.range_index[cut[once]]
            source = self._source(checked, content[once], self.numbers[write])
            # The distance from reads to writes is the same for all bytes of a row.
            distance = self.table[write, 0] - self.table[write, 1]
            wrong[once] = (source < 0) | (source - address[once] != distance)
        content, address, begin = content[wrong], address[wrong], self.writes.cuts[cut[wrong]]
        return content, np.maximum(begin - address, 0)

    def _source(self, checked: CheckedContents, content: Ints, number: Small) -> Ints:
        """Return the address of each content's run at its source, or -1 if the source lacks it.

        *number* is the index of each content's producer rank in `sources`.
        """
        moving = checked.moving
        row, unit = np.divmod(content, len(checked.units))
        layer, row = np.divmod(row, len(checked.rows))
        unit += checked.units.start
        address = np.full(len(content), -1, np.int64)
        for index, rank in enumerate(self.sources):
            side, group = self.producers[rank], moving.producer_group
            held = EMPTY
            if moving.layer in side.layers:
                held = side.stored_units(group, moving.layer, moving.part)
            if held.stop <= checked.units.start or checked.units.stop <= held.start:
                continue
            here = np.flatnonzero((number == index) & (unit >= held.start) & (unit < held.stop))
            first = self._row_addresses(side, group, moving, checked.rows)[row[here]]
            begin = first + self._bases(side, moving)[checked.layers.start + layer[here]]
            begin += (unit[here] - held.start) * side.unit_stride(moving.layer, moving.part)
            # A rank without the part has no address either.
            offset = checked.offsets.get(rank, 0)
            address[here] = np.where(first < 0, -1, begin + offset)
        return address

    def _twice(self) -> CounterExample | None:
        """Return a dead byte that is written twice. `judge` checks the others."""
        twice = np.flatnonzero(self.writes.times > 1)
        if not len(twice):
            return None
        return self._at("double", self.consumer.cache, int(self.writes.cuts[twice[0]]))

    def _unwanted(self) -> CounterExample | None:
        """Return a byte that is written outside the blocks that may be written.

        Inside these blocks, `judge` checks the cached contents, and all other bytes may be written.
        """
        by_group: dict[tuple[str, range], tuple[Moving, list[tuple[Region, int]]]] = {}
        for moving in self._moving:
            # The states of a group have different blocks.
            key = moving.group.name, EMPTY if moving.part.per_token else moving.wanted
            for layer in moving.layers:
                region = self.consumer.regions.get((layer, moving.part.name))
                if region is not None:
                    rows = min(moving.part.states, region.states)
                    by_group.setdefault(key, (moving, []))[1].append((region, rows))
        allowed: list[AddressRanges] = []
        for moving, regions in by_group.values():
            spec = moving.group.spec.of_layer(moving.layer)
            first_live = self.consumer.owners.first_live(self.request, spec)
            ids = self.consumer.usable(moving.group, moving.part, moving.wanted, first_live)
            allowed += self.consumer.contents(moving.group, regions, ids)
        outside = covered(allowed).first_outside(self.table[:, 1], self.table[:, 2])
        return None if outside is None else self._at("unwanted", self.consumer.cache, outside[1])

    def _foreign(self) -> CounterExample | None:
        """Return a byte that is read outside the request's own blocks on its producer rank."""
        for number, rank in enumerate(self.sources):
            reads, side = self.table[self.numbers == number], self.producers[rank]
            outside = side.own.first_outside(reads[:, 0], reads[:, 2])
            if outside is not None:
                return self._at("foreign", side.cache, outside[1], rank)
        return None

    def _at(
        self, kind: FaultKind, cache: RankCache, address: int, producer: RankId | None = None
    ) -> CounterExample:
        """Return the counter-example of the byte at *address*, named by its region."""
        consumer = self.consumer.cache.rank
        for region in cache.regions:
            place = region.locate(address)
            if place is not None:
                block, unit, state, byte = place
                return CounterExample(
                    kind=kind, consumer=consumer, layer=region.layer, part=region.part,
                    unit=unit, row=state, byte=byte, block=block, producer=producer,
                )  # fmt: skip
        return CounterExample(
            kind=kind, consumer=consumer, layer="", part="", byte=address, producer=producer
        )

    def _counter_example(
        self, checked: CheckedContents, kind: FaultKind, content: int, byte: int
    ) -> CounterExample:
        """Return the counter-example of one byte of one content of *checked*.

        *byte* counts from the first byte of the matrix's run.
        """
        moving, (row, unit) = checked.moving, divmod(content, len(checked.units))
        index, row = divmod(row, len(checked.rows))
        layer = moving.layers[checked.layers[index]]
        stored, address = checked.byte + byte, int(checked.address[content])
        # A consumer without memory for the content has no order of its own.
        if address >= 0:
            region = self.consumer.regions[layer, moving.part.name]
            place = region.locate(address + byte)
            stored = stored if place is None else place[-1]
        unit, number = checked.units[unit], int(checked.rows[row])
        token = number if moving.part.per_token else None
        senders = (
            rank
            for rank, side in self.producers.items()
            if layer in side.layers
            and unit in side.units(moving.producer_group, moving.part)
            and (token is None or side.stores(moving.producer_group, token))
        )
        return CounterExample(
            kind=kind,
            consumer=self.consumer.cache.rank,
            layer=layer,
            part=moving.part.name,
            unit=unit,
            token=token,
            row=number if token is None else token // moving.part.tokens_per_state,
            byte=stored,
            wanted_from=tuple(senders),
        )


def _matrices(layers: int, rows: Ints, units: int) -> Iterator[tuple[range, Ints]]:
    """Yield indices of *layers* and some of *rows*, of about `CONTENTS_AT_ONCE` contents each."""
    some_rows = -(-CONTENTS_AT_ONCE // units)
    for at in range(0, len(rows), some_rows):
        part = rows[at : at + some_rows]
        some = max(1, CONTENTS_AT_ONCE // (len(part) * units))
        for first in range(0, layers, some):
            yield range(first, min(first + some, layers)), part
