"""The picture of a plan: who reads which units from whom.

Law: every rank is a box, every slice of every edge a curve from a producer's box to a consumer's,
and both ends say in words what the curve's colour says.

What the picture of a plan shows: a box for every rank, and in it a line for each range of units.

Law: every slice of every edge that is asked for is in exactly one line of its consumer, and every
unit that a producer rank holds is in exactly one line of it. Places are not decided here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import attrs

from kvspec.analysis.explanation import sizes
from kvspec.draw.canvas import (
    BAND,
    DASH,
    FAINT,
    HOLLOW,
    INK,
    LARGE,
    LINE,
    LONGEST,
    MARGIN,
    MEDIUM,
    PALETTE,
    PAPER,
    SHADE,
    SMALL,
    Canvas,
    colour,
    hatch,
    note_svg,
    shortened,
    width_of,
)
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError, counted
from kvspec.inputs import instance
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.stripes import Stripe
from kvspec.plan.plan import TransferPlan
from kvspec.plan.replica_groups import ReplicaGroup

_MOST_CELLS, _MOST_READERS = 8, 3


@attrs.frozen
class PartGroup:
    """Parts that are sharded alike.

    Their names, all their units, and in how many they are sharded.
    """

    name: str
    units: int
    granularity: int
    per_token: bool

    @staticmethod
    def of(parts: Sequence[Part]) -> PartGroup:
        """Return the group of *parts*."""
        name, one = "+".join(part.name for part in parts), parts[0]
        return PartGroup(name, one.units, one.granularity, one.per_token)

    def labels(self, units: range) -> list[str]:
        """Return the text of every cell: of each head or group of channels, or of many."""
        packs = range(units.start // self.granularity, units.stop // self.granularity)
        if len(packs) <= _MOST_CELLS:
            return [str(transfer_slice) for transfer_slice in packs]
        return [f"{packs.start}{DASH}{packs.stop - 1}"]


@attrs.frozen
class Read:
    """Units that *consumer* reads from *producer*, of *layers* of *groups* of the consumer's."""

    consumer: RankId
    producer: RankId
    part_group: PartGroup
    units: range
    stripe: Stripe
    groups: tuple[str, ...]
    layers: tuple[str, ...]


@attrs.frozen
class Line:
    """Units in the box of a rank, *words* about them, and the *reads* that begin or end here.

    *number*: of the producer rank among those that are read, or None where nobody reads.
    """

    part_group: PartGroup
    units: range
    words: str
    number: int | None
    reads: tuple[Read, ...]


@attrs.frozen(eq=False)
class Box:
    """One rank: its lines, and a note where it has nothing to do."""

    rank: RankId
    lines: list[Line]
    note: str = ""


@attrs.frozen
class EngineColumn:
    """One engine: what it is, and its boxes in captioned bands."""

    name: str
    caption: str
    bands: dict[str, list[Box]]

    @property
    def boxes(self) -> list[Box]:
        """All of them, from top to bottom."""
        return [box for boxes in self.bands.values() for box in boxes]


@attrs.frozen
class Scene:
    """All that is drawn of one plan."""

    part_groups: list[PartGroup]
    reads: list[Read]
    sides: tuple[EngineColumn, EngineColumn]


def scene(plan: TransferPlan, group: str | None) -> Scene:
    """Return what to draw of *plan*: all of it, or one group of the consumer's."""
    if group is not None:
        plan.consumer.group(group)
    replica_groups = [
        replica_group
        for replica_group in plan.replica_groups
        if group in (None, replica_group.pair.consumer.name)
    ]
    if not replica_groups:
        raise SpecError("group", group, "a group that the plan transfers")
    part_groups = list(
        dict.fromkeys(PartGroup.of(replica_group.parts) for replica_group in replica_groups)
    )
    reads = sorted(
        _reads(plan, group), key=lambda r: (part_groups.index(r.part_group), r.units.start)
    )
    numbers = {r: number for number, r in enumerate(sorted({read.producer for read in reads}))}
    groups = {name for read in reads for name in read.groups}
    homes = {pair.producer.name for pair in plan.pairs if pair.consumer.name in groups}
    consumers: dict[RankId, list[Line]] = {rank: [] for rank in plan.consumer.parallel.ranks}
    for read in reads:
        line = Line(
            read.part_group, read.units, _source(plan, read), numbers[read.producer], (read,)
        )
        consumers[read.consumer].append(line)
    targets = [Box(rank, own, "" if own else "reads nothing") for rank, own in consumers.items()]
    sides = (
        _side("Producer", plan.producer, homes, _producers(plan, replica_groups, reads, numbers)),
        _side("Consumer", plan.consumer, groups, targets),
    )
    return Scene(part_groups, reads, sides)


def _reads(plan: TransferPlan, group: str | None) -> Iterator[Read]:
    """Yield what every consumer rank reads; slices that differ only in their layers are one."""
    places: dict[tuple[RankId, RankId, PartGroup, range, Stripe], list[tuple[str, str]]] = {}
    for edge in plan.edges:
        spec = plan.consumer.group(edge.group).spec
        for transfer_slice in edge.slices if group in (None, edge.group) else ():
            parts = spec.of_layer(transfer_slice.layers[0]).parts
            part_group = PartGroup.of([part for part in parts if part.name in transfer_slice.parts])
            key = (
                edge.consumer,
                edge.producer,
                part_group,
                transfer_slice.global_range,
                transfer_slice.stripe,
            )
            places.setdefault(key, []).extend(
                (edge.group, layer) for layer in transfer_slice.layers
            )
    for key, found in places.items():
        groups, layers = zip(*found, strict=True)
        yield Read(*key, tuple(dict.fromkeys(groups)), layers)


def _producers(
    plan: TransferPlan,
    replica_groups: list[ReplicaGroup],
    reads: list[Read],
    numbers: dict[RankId, int],
) -> Iterator[Box]:
    """Yield the box of every producer rank: the units that it holds, and who reads them."""
    for index, rank in enumerate(plan.producer.parallel.ranks):
        held = dict.fromkeys(
            (PartGroup.of(s.parts), s.producer_sharding.ranges[index]) for s in replica_groups
        )
        here, lines = [read for read in reads if read.producer == rank], list[Line]()
        for part_group, units in held:
            own = tuple(r for r in here if r.part_group == part_group and r.units.start in units)
            words = _readers(own) if own else "not read here" if here else ""
            if units:
                lines.append(Line(part_group, units, words, numbers[rank] if own else None, own))
        yield Box(rank, lines, "" if here else _unread(plan, rank))


def _readers(reads: tuple[Read, ...]) -> str:
    names = [str(rank) for rank in sorted({read.consumer for read in reads})]
    if len(names) <= _MOST_READERS:
        return f"→ {', '.join(names)}"
    return f"→ {names[0]} … {names[-1]} ({len(names)})"


def _source(plan: TransferPlan, read: Read) -> str:
    """Say from whom *read* is, and which blocks, positions and layers, if not all."""
    words = [f"← {read.producer}"]
    if not read.stripe.whole:
        words.append(str(read.stripe))
    producer, consumer = plan.producer, plan.consumer
    home = producer.homes[read.layers[0]]
    if producer.context_size(home) > 1 and read.part_group.per_token:
        words.append(f"context {producer.context(home, read.producer).rank}")
    groups = map(consumer.group, read.groups)
    own = {layer for group in groups for layer in consumer.layers_at(group, read.consumer.pp)}
    if not own.issubset(read.layers):
        words.append(_layers(read.layers))
    return ", ".join(words)


def _unread(plan: TransferPlan, rank: RankId) -> str:
    """Say of a producer rank that nobody reads here who tells it to release."""
    if plan.targets(rank):
        return "read for other groups only"
    notifiers = plan.notifiers(rank)
    by = "every consumer rank" if len(notifiers) > 1 else str(notifiers[0])
    return f"not read; {by} tells it to release"


def _side(name: str, engine: EngineSpec, groups: set[str], boxes: Iterable[Box]) -> EngineColumn:
    """Return one side, its *boxes* in bands: pipeline stages, and context ranks within them."""
    bands: dict[str, list[Box]] = {}
    parallel, layers = engine.parallel, engine.by_stage(engine.stage_of)
    for box in sorted(boxes, key=lambda box: (box.rank.pp, parallel.context(box.rank).rank)):
        words: list[str] = []
        context = parallel.context(box.rank)
        if parallel.pp_size > 1:
            words.append(f"stage {box.rank.pp}: {_layers(layers.get(box.rank.pp, ()))}")
        if context.size > 1:
            tokens = counted(context.interleave, "token")
            words.append(f"context {context.rank} of {context.size}, {tokens} at a time")
        bands.setdefault(" · ".join(words), []).append(box)
    own = [group for group in engine.groups if group.name in groups]
    caption = [sizes(parallel), f"layout {'/'.join(dict.fromkeys(map(engine.layout_of, own)))}"]
    blocks = {g.spec.block_size for g in own if any(part.per_token for part in g.own_parts)}
    if blocks:
        caption.append(f"blocks of {'/'.join(map(str, sorted(blocks)))} tokens")
    return EngineColumn(name, " · ".join(caption), bands)


def excluded(plan: TransferPlan) -> list[str]:
    """Say, for each side, which layers it does not transfer."""
    sides = (("producer", plan.producer), ("consumer", plan.consumer))
    return [
        f"excluded by the {side}: {_layers(engine.excluded)}"
        for side, engine in sides
        if engine.excluded
    ]


def _layers(names: Iterable[str]) -> str:
    """Return layers in few words: by number where each has one and none is left out."""
    layers = list(dict.fromkeys(names))
    if not layers:
        return "no layers"
    numbers = sorted({int(n.group()) for n in map(re.compile(r"\d+").search, layers) if n})
    if len(layers) == len(numbers) == numbers[-1] - numbers[0] + 1:
        first, last = numbers[0], numbers[-1]
        return f"layer {first}" if first == last else f"layers {first}{DASH}{last}"
    return f"{layers[0]} and {len(layers) - 1} more" if layers[1:] else layers[0]


_ROW, _PAD, _GAP, _CAPTION = 26.0, 5.0, 8.0, 22.0
"""Pixels: a line of a box, around its lines, between boxes, and the caption of a band."""
_MIDDLE, _NARROWEST = 280.0, 180.0
_DASHES = ("", "7 3", "2 3", "10 3 2 3")
"""Lines of more producers than colours: each round of the palette is dashed otherwise."""
_MEANINGS = (
    "numbers are units of the model: KV heads, state heads or groups of channels",
    "a line's colour and dashes are the producer rank read",
)


def plan_svg(plan: TransferPlan, group: str | None = None) -> str:
    """Return a picture of *plan* as SVG text: who reads which units from whom.

    *group*: only this group of the consumer's; all of them unless given. Every rank is a box with
    the units that it holds, a line runs from the producer rank to each rank that reads it, and a
    rank that nobody reads is grey and says who tells it to release. A plan that moves nothing is
    words.
    """
    instance("plan", plan, TransferPlan)
    title = " → ".join(sizes(engine.parallel) for engine in (plan.producer, plan.consumer))
    if group is None and not plan.replica_groups:
        return note_svg("plan", title, ["nothing moves", *excluded(plan)])
    shown = scene(plan, group)
    columns = _columns(shown)
    canvas, width = Canvas(), columns[1].right + MARGIN
    canvas.text(MARGIN, MARGIN + 14, title, size=LARGE, bold=True)
    y = canvas.words(MARGIN + 36, _facts(shown, plan), width)
    end = max(column.stack(y + 40) for column in columns)
    for column in columns:
        canvas.text(column.x, y + 8, column.side.name, size=MEDIUM, bold=True)
        canvas.text(column.x, y + 25, shortened(column.side.caption, LONGEST), fill=FAINT)
        column.spread(y + 40, end)
        column.frames(canvas)
    _curves(canvas, *columns)
    for column in columns:
        for box in column.side.boxes:
            _box(canvas, shown, column, box)
    y = canvas.words(end + 32, _MEANINGS, width)
    if len(shown.part_groups) > 1:
        keys = (
            (HOLLOW, hatch(n), part_group.name) for n, part_group in enumerate(shown.part_groups)
        )
        y = canvas.keys(y - 8, keys, width)
    return canvas.svg(width, y + 8, f"kvspec plan: {title}")


@attrs.define(eq=False)
class _Column:
    """The boxes of one side: how wide what stands in them is, from *x* on, and where each begins.

    *parts*, *cells* and *words*: where these begin in every box.
    """

    side: EngineColumn
    x: float
    parts: float
    cells: float
    words: float
    width: float
    tops: dict[Box, float] = attrs.field(factory=dict)

    @property
    def right(self) -> float:
        """Where the widest of it ends."""
        captions = [width_of(caption, SMALL) for caption in self.side.bands]
        return self.x + max(self.width, width_of(self.side.caption), *captions)

    def stack(self, y: float, gap: float = _GAP) -> float:
        """Place the boxes from *y* down, *gap* apart; return where the last ends."""
        end = y
        for caption, boxes in self.side.bands.items():
            y += _CAPTION + _PAD if caption else 0
            for box in boxes:
                self.tops[box] = y
                y += _height(box) + gap
            end = y - gap + (_PAD if caption else 0)
            y += _PAD + _GAP if caption else 0
        return end

    def spread(self, y: float, end: float) -> None:
        """Place the boxes evenly from *y* to *end*."""
        more = (end - self.stack(y)) / len(self.side.boxes)
        self.stack(y + more / 2, _GAP + more)

    def frames(self, canvas: Canvas) -> None:
        """Draw the captioned bands behind the boxes."""
        for caption, boxes in self.side.bands.items():
            if caption:
                top = self.tops[boxes[0]] - _CAPTION - _PAD
                end = self.tops[boxes[-1]] + _height(boxes[-1]) + _PAD
                size = self.width + 2 * _GAP, end - top
                canvas.box((self.x - _GAP, top), size, fill=BAND, rx=6)
                canvas.text(self.x, top + 16, caption, size=SMALL, fill=FAINT)

    def row(self, box: Box, at: int) -> float:
        """Return the height of the middle of a box's line."""
        return self.tops[box] + _PAD + (at + 0.5) * _ROW


def _columns(shown: Scene) -> tuple[_Column, _Column]:
    """Return both sides, each as wide as its words need."""
    found: list[_Column] = []
    for side in shown.sides:
        lines = [line for box in side.boxes for line in box.lines]
        said = [*(line.words for line in lines), *(box.note for box in side.boxes)]
        parts = _PAD + 16 + max(width_of(str(box.rank), bold=True) for box in side.boxes)
        cells = parts
        if len(shown.part_groups) > 1:
            cells += max((width_of(line.part_group.name, SMALL) for line in lines), default=0) + 10
        words = cells + max((sum(map(_cell, _labels(line))) for line in lines), default=0) + 8
        width = words + max(width_of(text, SMALL) for text in said) + 4 + _PAD
        x = MARGIN
        if found:
            x += max(found[0].width + _MIDDLE, width_of(found[0].side.caption) + MARGIN)
        found.append(_Column(side, x, parts, cells, words, max(width, _NARROWEST)))
    return found[0], found[1]


def _height(box: Box) -> float:
    return _ROW * max(len(box.lines), 1) + 2 * _PAD


def _labels(line: Line) -> list[str]:
    return line.part_group.labels(line.units)


def _cell(label: str) -> float:
    """Return how wide the cell of *label* is."""
    return max(24.0, width_of(label) + 10)


def _facts(shown: Scene, plan: TransferPlan) -> list[str]:
    """Return what moves, and how replicas are chosen."""
    words = [
        f"{each.name}: {counted(each.units, 'unit')}"
        + (f" sharded {each.granularity} at a time" if each.granularity > 1 else "")
        for each in shown.part_groups
    ]
    layers = len({layer for read in shown.reads for layer in read.layers})
    pairs = len({(read.producer, read.consumer) for read in shown.reads})
    policy = f"replicas by “{plan.policy_name}”"
    return [*words, counted(layers, "layer"), policy, f"{counted(pairs, 'pair')} of ranks"]


def _curves(canvas: Canvas, producer: _Column, consumer: _Column) -> None:
    """Draw a curve for every read, those of one producer's line beside each other."""
    ends = {
        read: consumer.row(box, at)
        for box in consumer.side.boxes
        for at, line in enumerate(box.lines)
        for read in line.reads
    }
    for box in producer.side.boxes:
        for at, line in enumerate(box.lines):
            step = min(5.0, (_ROW - 6) / max(len(line.reads), 1))
            y = producer.row(box, at) - (len(line.reads) - 1) / 2 * step
            for nth, read in enumerate(sorted(line.reads, key=ends.__getitem__)):
                start = producer.x + producer.width, y + nth * step
                _curve(canvas, read, line.number or 0, start, (consumer.x, ends[read]))


def _curve(
    canvas: Canvas, read: Read, number: int, start: tuple[float, float], stop: tuple[float, float]
) -> None:
    units = f"{read.part_group.name} units {read.units.start}..{read.units.stop - 1}"
    canvas.curve(
        start,
        stop,
        f"{read.consumer} reads {units} of {', '.join(read.groups)} from {read.producer}",
        colour(number),
        stroke_width=1.8,
        stroke_opacity=0.9,
        stroke_dasharray=_DASHES[number // len(PALETTE) % len(_DASHES)],
        data_producer=str(read.producer),
        data_consumer=str(read.consumer),
        data_parts=read.part_group.name,
        data_units=f"{read.units.start}-{read.units.stop}",
        data_groups=" ".join(read.groups),
    )


def _box(canvas: Canvas, shown: Scene, column: _Column, box: Box) -> None:
    """Draw the box of a rank with its lines."""
    y, height, rank = column.tops[box], _height(box), str(box.rank)
    canvas.box(
        (column.x, y),
        (column.width, height),
        fill=SHADE if box.note else PAPER,
        stroke=LINE,
        rx=5,
        data_side=column.side.name.lower(),
        data_rank=rank,
    )
    base, ink = y + height / 2 + 4.5, FAINT if box.note else INK
    canvas.text(column.x + _PAD + 4, base, rank, fill=ink, bold=True)
    canvas.text(column.x + column.words, base, box.note, size=SMALL, fill=FAINT)
    for at, line in enumerate(box.lines):
        _line(canvas, shown, column, line, column.row(box, at))


def _line(canvas: Canvas, shown: Scene, column: _Column, line: Line, y: float) -> None:
    """Draw one line of a box: part names, cells of units, and who reads or is read."""
    read, name, x = line.number is not None, line.part_group.name, column.x + column.cells
    ink, fill = (INK, colour(line.number or 0)) if read else (FAINT, HOLLOW)
    if len(shown.part_groups) > 1:
        canvas.text(column.x + column.parts, y + 4.2, name, size=SMALL, fill=FAINT)
    for label in _labels(line):
        wide = _cell(label)
        canvas.box(
            (x + 1, y + 3 - _ROW / 2),
            (wide - 2, _ROW - 6),
            hatch(shown.part_groups.index(line.part_group)),
            fill=fill,
            fill_opacity=0.32 if read else 0.6,
            stroke=fill if read else LINE,
            rx=2,
            data_cell=label,
            data_parts=name,
        )
        canvas.text(x + wide / 2, y + 4.2, label, anchor="middle", fill=ink)
        x += wide
    canvas.text(column.x + column.words, y + 4.2, line.words, size=SMALL, fill=ink)
