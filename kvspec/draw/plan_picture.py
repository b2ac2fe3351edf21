"""Draw a transfer plan: the ranks of both engines, and the units that move between them.

Invariant: each rank is one box, and each slice of each edge is one curve between two boxes. The
texts at both ends of a curve name its ranks, so the colour of the curve adds no fact.

How it works:
    `scene` selects the content of the picture: boxes, their lines, and the reads between them.
    `plan_svg` then computes the places and draws. For TP 4 to TP 3 and 8 heads, `scene` returns:

        producer box   line           consumer box   lines
        tp0            heads 0 1      tp0            heads 0 1  from tp0
        tp1            heads 2 3      tp1            heads 2 3  from tp1
        tp2            heads 4 5                     head  4    from tp2
        tp3            heads 6 7      tp2            head  5    from tp2
                                                     heads 6 7  from tp3

    A producer rank has one line for each range of units that it holds. A consumer rank has one
    line for each read. So the curves of heads 4 and 5 begin at the same line, and the producer's
    line has two consumers. Slices that differ only in their layers are one read.
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
    unit_noun,
    width_of,
)
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError, counted, nbytes
from kvspec.inputs import instance
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.stripes import Stripe
from kvspec.plan.plan import TransferPlan
from kvspec.plan.replica_groups import ReplicaGroup

# A line with more cells shows the range of its units as one cell. A line with more consumers
# shows the first, the last and the number of them.
_MOST_CELLS, _MOST_READERS = 8, 3


@attrs.frozen
class PartGroup:
    """Parts with the same sharding.

    Attributes:
        name: Names of the parts, joined by "+".
        units: Number of units in the model.
        granularity: Units are sharded in multiples of this number.
        per_token: Whether a row of the parts belongs to tokens, not to a recurrent state.
    """

    name: str
    units: int
    granularity: int
    per_token: bool

    @staticmethod
    def of(parts: Sequence[Part]) -> PartGroup:
        """Return the group of *parts*."""
        name, first = "+".join(part.name for part in parts), parts[0]
        return PartGroup(name, first.units, first.granularity, first.per_token)

    @property
    def noun(self) -> str:
        """The noun for one unit: "head" or "unit"."""
        heads = all(unit_noun(part) == "head" for part in self.name.split("+"))
        return "head" if heads else "unit"

    def labels(self, units: range) -> list[str]:
        """Return the text of each cell: one head or group of channels, or the range of all."""
        packs = range(units.start // self.granularity, units.stop // self.granularity)
        if len(packs) <= _MOST_CELLS:
            return [str(pack) for pack in packs]
        return [f"{packs.start}{DASH}{packs.stop - 1}"]


@attrs.frozen
class Read:
    """Units that one consumer rank reads from one producer rank.

    Attributes:
        stripe: The blocks that this read takes, if several producer ranks share the work.
        groups: Names of the consumer's groups.
        layers: Names of the layers of these groups.
        row_bytes: Bytes of the units in all layers: of one token, or of one recurrent state.
    """

    consumer: RankId
    producer: RankId
    part_group: PartGroup
    units: range
    stripe: Stripe
    groups: tuple[str, ...]
    layers: tuple[str, ...]
    row_bytes: float

    @property
    def size(self) -> str:
        """The bytes as a text, such as `32 KiB a token`."""
        return f"{nbytes(self.row_bytes)} a {'token' if self.part_group.per_token else 'state'}"


@attrs.frozen
class Line:
    """One line in the box of a rank.

    Attributes:
        words: Text behind the cells of the units.
        number: Number of the producer rank among all that are read. None if nothing is read.
        reads: The reads that begin or end at this line.
    """

    part_group: PartGroup
    units: range
    words: str
    number: int | None
    reads: tuple[Read, ...]


@attrs.frozen(eq=False)
class Box:
    """One rank: its lines, and a note if it has nothing to do."""

    rank: RankId
    lines: list[Line]
    note: str = ""


@attrs.frozen
class EngineColumn:
    """One engine: its name and description, and its boxes in bands with captions."""

    name: str
    caption: str
    bands: dict[str, list[Box]]

    @property
    def boxes(self) -> list[Box]:
        """All boxes, from top to bottom."""
        return [box for boxes in self.bands.values() for box in boxes]


@attrs.frozen
class Scene:
    """The content of the picture of one plan, without places."""

    part_groups: list[PartGroup]
    reads: list[Read]
    sides: tuple[EngineColumn, EngineColumn]


def scene(plan: TransferPlan, group: str | None) -> Scene:
    """Return the content of the picture of *plan*, or of one group of the consumer.

    Raises:
        SpecError: If the consumer has no *group*, or the plan moves nothing of it.
    """
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
    """Yield the reads of all consumer ranks. Slices that differ only in their layers are one."""
    places: dict[tuple[RankId, RankId, PartGroup, range, Stripe], list[tuple[str, str, float]]]
    places = {}
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
            for layer in transfer_slice.layers:
                own = [p for p in spec.of_layer(layer).parts if p.name in transfer_slice.parts]
                size = sum(map(_row_bytes, own)) * len(transfer_slice.global_range)
                places.setdefault(key, []).append((edge.group, layer, size))
    for key, place in places.items():
        groups, layers, layer_sizes = zip(*place, strict=True)
        yield Read(*key, tuple(dict.fromkeys(groups)), layers, sum(layer_sizes))


def _row_bytes(part: Part) -> float:
    """Return the bytes of one unit of *part*: of one token, or of a whole state."""
    rows = 1 / part.tokens_per_state if part.per_token else part.states
    return part.content_bytes * rows


def _producers(
    plan: TransferPlan,
    replica_groups: list[ReplicaGroup],
    reads: list[Read],
    numbers: dict[RankId, int],
) -> Iterator[Box]:
    """Yield the box of each producer rank: its units and their consumer ranks."""
    for index, rank in enumerate(plan.producer.parallel.ranks):
        held = dict.fromkeys(
            (PartGroup.of(s.parts), s.producer_sharding.ranges[index]) for s in replica_groups
        )
        rank_reads, lines = [read for read in reads if read.producer == rank], list[Line]()
        for part_group, units in held:
            line_reads = tuple(
                r for r in rank_reads if r.part_group == part_group and r.units.start in units
            )
            words = _readers(line_reads) if line_reads else "not read here" if rank_reads else ""
            number = numbers[rank] if line_reads else None
            if units:
                lines.append(Line(part_group, units, words, number, line_reads))
        yield Box(rank, lines, "" if rank_reads else _unread(plan, rank))


def _readers(reads: tuple[Read, ...]) -> str:
    names = [str(rank) for rank in sorted({read.consumer for read in reads})]
    if len(names) <= _MOST_READERS:
        return f"→ {', '.join(names)}"
    return f"→ {names[0]} … {names[-1]} ({len(names)})"


def _source(plan: TransferPlan, read: Read) -> str:
    """Return the text of *read*: its producer and size, and its blocks and layers if not all."""
    words = [f"← {read.producer}", read.size]
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
    """Return the note of a producer rank without reads: the consumer rank that releases it."""
    if plan.targets(rank):
        return "read for other groups only"
    notifiers = plan.notifiers(rank)
    by = "every consumer rank" if len(notifiers) > 1 else str(notifiers[0])
    return f"not read; released by {by}"


def _side(name: str, engine: EngineSpec, groups: set[str], boxes: Iterable[Box]) -> EngineColumn:
    """Return one engine, with a band for each pipeline stage and context rank."""
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
        # An engine with one stage and one context rank has one band without a caption.
        bands.setdefault(" · ".join(words), []).append(box)
    own = [group for group in engine.groups if group.name in groups]
    caption = [sizes(parallel), f"layout {'/'.join(dict.fromkeys(map(engine.layout_of, own)))}"]
    blocks = {g.spec.block_size for g in own if any(part.per_token for part in g.own_parts)}
    if blocks:
        caption.append(f"blocks of {'/'.join(map(str, sorted(blocks)))} tokens")
    return EngineColumn(name, " · ".join(caption), bands)


def excluded(plan: TransferPlan) -> list[str]:
    """Return a text for each engine that excludes layers from the transfer."""
    sides = (("producer", plan.producer), ("consumer", plan.consumer))
    return [
        f"excluded by the {side}: {_layers(engine.excluded)}"
        for side, engine in sides
        if engine.excluded
    ]


def _layers(names: Iterable[str]) -> str:
    """Return a short text for layers: their numbers if these are consecutive, else names."""
    layers = list(dict.fromkeys(names))
    if not layers:
        return "no layers"
    numbers = sorted({int(n.group()) for n in map(re.compile(r"\d+").search, layers) if n})
    if len(layers) == len(numbers) == numbers[-1] - numbers[0] + 1:
        first, last = numbers[0], numbers[-1]
        return f"layer {first}" if first == last else f"layers {first}{DASH}{last}"
    return f"{layers[0]} and {len(layers) - 1} more" if layers[1:] else layers[0]


# In pixels: the height of a line, the space around the lines of a box, the space between boxes,
# and the height of a caption.
_ROW, _PAD, _GAP, _CAPTION = 26.0, 5.0, 8.0, 22.0
# In pixels: the space for the curves, and the least width of a box.
_MIDDLE, _NARROWEST = 280.0, 180.0
# The palette repeats after six producers. Each repetition has other dashes.
_DASHES = ("", "7 3", "2 3", "10 3 2 3")
_COLOURS = "colour and dashes of a line: the producer rank"


def plan_svg(plan: TransferPlan, group: str | None = None) -> str:
    """Draw *plan* as SVG text: the ranks of both engines, and the units that move between them.

    Each rank is a box with its units. A line runs from a producer rank to each consumer rank that
    reads from it. The box of a producer rank without reads is grey and names the consumer rank
    that releases it. A plan that moves nothing becomes a picture with text only.

    Args:
        plan: The plan to draw.
        group: Draw only this group of the consumer. All groups by default.

    Returns:
        The text of an SVG file.

    Raises:
        SpecError: If *plan* is not a plan, the consumer has no *group*, or nothing of it moves.

    >>> import kvspec
    >>> layer = kvspec.FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=2, head_size=64, dtype="bfloat16"
    ... )
    >>> group = kvspec.KVCacheGroup(name="attention", layers=("layers.0",), spec=layer)
    >>> engine = kvspec.EngineSpec(groups=(group,))
    >>> picture = plan_svg(kvspec.plan_transfer(engine, engine))
    >>> "tp0 reads k+v heads 0..1 of attention from tp0" in picture
    True
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
    nouns = dict.fromkeys(_nouns(part_group) for part_group in shown.part_groups)
    y = canvas.words(end + 32, [f"numbers: {', '.join(nouns)} of the model", _COLOURS], width)
    if len(shown.part_groups) > 1:
        keys = (
            (HOLLOW, hatch(n), part_group.name) for n, part_group in enumerate(shown.part_groups)
        )
        y = canvas.keys(y - 8, keys, width)
    return canvas.svg(width, y + 8, f"kvspec plan: {title}")


@attrs.define(eq=False)
class _Column:
    """The boxes of one engine with their places, in pixels.

    Attributes:
        x: Left edge of the boxes.
        parts: Distance from the left edge to the names of parts, in each box.
        cells: Distance to the cells of units.
        words: Distance to the texts behind the cells.
        width: Width of each box.
        tops: Top edge of each box.
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
        """Right edge of the widest box or text."""
        captions = [width_of(caption, SMALL) for caption in self.side.bands]
        return self.x + max(self.width, width_of(self.side.caption), *captions)

    def stack(self, y: float, gap: float = _GAP) -> float:
        """Place the boxes from *y* down with *gap* between them. Return the lower edge."""
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
        extra = (end - self.stack(y)) / len(self.side.boxes)
        self.stack(y + extra / 2, _GAP + extra)

    def frames(self, canvas: Canvas) -> None:
        """Draw the bands with their captions behind the boxes."""
        for caption, boxes in self.side.bands.items():
            if caption:
                top = self.tops[boxes[0]] - _CAPTION - _PAD
                end = self.tops[boxes[-1]] + _height(boxes[-1]) + _PAD
                size = self.width + 2 * _GAP, end - top
                canvas.box((self.x - _GAP, top), size, fill=BAND, rx=6)
                canvas.text(self.x, top + 16, caption, size=SMALL, fill=FAINT)

    def row(self, box: Box, at: int) -> float:
        """Return the vertical middle of line *at* of a box."""
        return self.tops[box] + _PAD + (at + 0.5) * _ROW


def _columns(shown: Scene) -> tuple[_Column, _Column]:
    """Return the columns of both engines. The texts determine their widths."""
    columns: list[_Column] = []
    for side in shown.sides:
        lines = [line for box in side.boxes for line in box.lines]
        texts = [*(line.words for line in lines), *(box.note for box in side.boxes)]
        parts = _PAD + 16 + max(width_of(str(box.rank), bold=True) for box in side.boxes)
        cells = parts
        if len(shown.part_groups) > 1:
            cells += max((width_of(line.part_group.name, SMALL) for line in lines), default=0) + 10
        words = cells + max((sum(map(_cell, _labels(line))) for line in lines), default=0) + 8
        width = words + max(width_of(text, SMALL) for text in texts) + 4 + _PAD
        x = MARGIN
        if columns:
            x += max(columns[0].width + _MIDDLE, width_of(columns[0].side.caption) + MARGIN)
        columns.append(_Column(side, x, parts, cells, words, max(width, _NARROWEST)))
    return columns[0], columns[1]


def _height(box: Box) -> float:
    return _ROW * max(len(box.lines), 1) + 2 * _PAD


def _labels(line: Line) -> list[str]:
    return line.part_group.labels(line.units)


def _cell(label: str) -> float:
    """Return the width of the cell of *label*."""
    return max(24.0, width_of(label) + 10)


def _nouns(part_group: PartGroup) -> str:
    """Return what the numbers of cells count, such as `heads` or `groups of 4 units`."""
    if part_group.granularity > 1:
        return f"groups of {part_group.granularity} {part_group.noun}s"
    return f"{part_group.noun}s"


def _facts(shown: Scene, plan: TransferPlan) -> list[str]:
    """Return the facts below the title: parts, layers, replica policy and pairs of ranks."""
    words = [
        f"{part_group.name}: {counted(part_group.units, part_group.noun)}"
        + (f" sharded {part_group.granularity} at a time" if part_group.granularity > 1 else "")
        for part_group in shown.part_groups
    ]
    layers = len({layer for read in shown.reads for layer in read.layers})
    names = dict.fromkeys(name for read in shown.reads for name in read.groups)
    pairs = len({(read.producer, read.consumer) for read in shown.reads})
    of_groups = f"{counted(layers, 'layer')} of {shortened(', '.join(names), LONGEST)}"
    policy = f"replicas by “{plan.policy_name}”"
    return [*words, of_groups, policy, f"{counted(pairs, 'pair')} of ranks"]


def _curves(canvas: Canvas, producer: _Column, consumer: _Column) -> None:
    """Draw a curve for each read. Curves that begin at the same line begin side by side."""
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
            # In the order of their ends, the curves of one line do not cross.
            for nth, read in enumerate(sorted(line.reads, key=ends.__getitem__)):
                start = producer.x + producer.width, y + nth * step
                _curve(canvas, read, line.number or 0, start, (consumer.x, ends[read]))


def _curve(
    canvas: Canvas, read: Read, number: int, start: tuple[float, float], stop: tuple[float, float]
) -> None:
    name, noun = read.part_group.name, read.part_group.noun
    units = f"{name} {noun}s {read.units.start}..{read.units.stop - 1} of {', '.join(read.groups)}"
    canvas.curve(
        start,
        stop,
        f"{read.consumer} reads {units} from {read.producer}: {read.size}",
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
    """Draw the box of a rank and its lines."""
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
    """Draw one line of a box: part names, cells of units, and the text behind them."""
    read, name, x = line.number is not None, line.part_group.name, column.x + column.cells
    ink, fill = (INK, colour(line.number or 0)) if read else (FAINT, HOLLOW)
    if len(shown.part_groups) > 1:
        canvas.text(column.x + column.parts, y + 4.2, name, size=SMALL, fill=FAINT)
    for label in _labels(line):
        width = _cell(label)
        canvas.box(
            (x + 1, y + 3 - _ROW / 2),
            (width - 2, _ROW - 6),
            hatch(shown.part_groups.index(line.part_group)),
            fill=fill,
            fill_opacity=0.32 if read else 0.6,
            stroke=fill if read else LINE,
            rx=2,
            data_cell=label,
            data_parts=name,
        )
        canvas.text(x + width / 2, y + 4.2, label, anchor="middle", fill=ink)
        x += width
    canvas.text(column.x + column.words, y + 4.2, line.words, size=SMALL, fill=ink)
