"""The picture of a plan: who reads which units from whom.

Law: every rank is a box, every slice of every edge a curve from a producer's box to a consumer's,
and both ends say in words what the curve's colour says.
"""

from __future__ import annotations

import attrs

from kvspec.draw.canvas import (
    BAND,
    DASHES,
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
    counted,
    hatch,
    note_svg,
    shortened,
    width_of,
)
from kvspec.draw.lines import Box, EngineColumn, Line, Read, Scene, excluded, scene
from kvspec.inputs import instance
from kvspec.ownership.parallel import RankId
from kvspec.plan.explain import sizes
from kvspec.plan.plan import TransferPlan

_ROW, _PAD, _GAP, _CAPTION = 26.0, 5.0, 8.0, 22.0
"""Pixels: a line of a box, around its lines, between boxes, and the caption of a band."""
_MIDDLE, _NARROWEST = 280.0, 180.0
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
    if group is None and not plan.shares:
        return note_svg("plan", title, ["nothing moves", *excluded(plan)])
    shown, canvas = scene(plan, group), Canvas()
    many = len(shown.families) > 1
    producer, consumer = (_Column.of(side, named=many) for side in shown.sides)
    producer.x = MARGIN
    consumer.x = MARGIN + max(producer.width + _MIDDLE, width_of(producer.side.caption) + MARGIN)
    captions = [width_of(caption, SMALL) for caption, _ in consumer.side.bands]
    width = consumer.x + max(consumer.width, width_of(consumer.side.caption), *captions) + MARGIN
    canvas.text(MARGIN, MARGIN + 14, title, size=LARGE, bold=True)
    y = canvas.words(MARGIN + 36, _facts(shown, plan), width)
    end = max(column.stack(y + 40, _GAP) for column in (producer, consumer))
    for column in (producer, consumer):
        canvas.text(column.x, y + 8, column.side.name, size=MEDIUM, bold=True)
        canvas.text(column.x, y + 25, shortened(column.side.caption, LONGEST), fill=FAINT)
        column.spread(y + 40, end)
        _frames(canvas, column)
    _curves(canvas, producer, consumer)
    for column in (producer, consumer):
        _boxes(canvas, shown, column)
    y = canvas.words(end + 32, _MEANINGS, width)
    if many:
        keys = ((HOLLOW, hatch(n), family.name) for n, family in enumerate(shown.families))
        y = canvas.keys(y - 8, keys, width)
    return canvas.svg(width, y + 8, f"kvspec plan: {title}")


@attrs.define
class _Column:
    """The boxes of one side and where they stand; *lefts*: of names, parts, cells and words."""

    side: EngineColumn
    lefts: tuple[float, float, float, float]
    width: float
    x: float = MARGIN
    tops: dict[RankId, float] = attrs.field(factory=dict)
    frames: list[tuple[str, float, float]] = attrs.field(factory=list)

    @classmethod
    def of(cls, side: EngineColumn, *, named: bool) -> _Column:
        """Return a column as wide as its words need; *named*: with the names of parts."""
        lines = [line for box in side.boxes for line in box.lines]
        words = [*(line.words for line in lines), *(box.note for box in side.boxes)]
        parts = _PAD + 16 + max(width_of(str(box.rank), bold=True) for box in side.boxes)
        cells = parts
        if named:
            cells += max((width_of(line.family.name, SMALL) for line in lines), default=0) + 10
        said = cells + max(map(_cells, lines), default=0) + 8
        width = said + max(width_of(text, SMALL) for text in words) + 4 + _PAD
        return cls(side, (_PAD + 4, parts, cells, said), max(width, _NARROWEST))

    def stack(self, y: float, gap: float) -> float:
        """Place the boxes from *y* down, *gap* apart; return where the last ends."""
        end = y
        self.frames.clear()
        for caption, boxes in self.side.bands:
            top = y
            y += _CAPTION + _PAD if caption else 0
            for box in boxes:
                self.tops[box.rank] = y
                y += _height(box) + gap
            end = y - gap
            if caption:
                end += _PAD
                self.frames.append((caption, top, end))
                y += _PAD + _GAP
        return end

    def spread(self, y: float, end: float) -> None:
        """Place the boxes evenly from *y* to *end*."""
        more = (end - self.stack(y, _GAP)) / len(self.side.boxes)
        self.stack(y + more / 2, _GAP + more)

    def row(self, box: Box, at: int) -> float:
        """Return the height of the middle of a box's line."""
        return self.tops[box.rank] + _PAD + (at + 0.5) * _ROW


def _height(box: Box) -> float:
    return _ROW * max(len(box.lines), 1) + 2 * _PAD


def _cells(line: Line) -> float:
    """Return how wide the cells of a line are."""
    return sum(map(_cell, line.family.labels(line.units)))


def _cell(label: str) -> float:
    """Return how wide the cell of *label* is."""
    return max(24.0, width_of(label) + 10)


def _facts(shown: Scene, plan: TransferPlan) -> list[str]:
    """Return what moves, and how replicas are elected."""
    words = [
        f"{each.name}: {counted(each.units, 'unit')}"
        + (f" dealt {each.deal_in} at a time" if each.deal_in > 1 else "")
        for each in shown.families
    ]
    layers = len({layer for read in shown.reads for layer in read.layers})
    pairs = len({(read.producer, read.consumer) for read in shown.reads})
    policy = f"replicas by “{plan.replicas}”"
    return [*words, counted(layers, "layer"), policy, f"{counted(pairs, 'pair')} of ranks"]


def _frames(canvas: Canvas, column: _Column) -> None:
    """Draw the bands of one side behind its boxes."""
    for caption, top, end in column.frames:
        size = column.width + 2 * _GAP, end - top
        canvas.box((column.x - _GAP, top), size, fill=BAND, rx=6)
        canvas.text(column.x, top + 16, caption, size=SMALL, fill=FAINT)


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
            number = line.number or 0
            for nth, read in enumerate(sorted(line.reads, key=ends.__getitem__)):
                canvas.curve(
                    (producer.x + producer.width, y + nth * step),
                    (consumer.x, ends[read]),
                    head=True,
                    title=_title(read),
                    stroke=line.fill,
                    stroke_width=1.8,
                    stroke_opacity=0.9,
                    stroke_dasharray=[*DASHES[number // len(PALETTE) % len(DASHES)]] or None,
                    data=_data(read),
                )


def _data(read: Read) -> dict[str, str]:
    return {
        "producer": str(read.producer),
        "consumer": str(read.consumer),
        "parts": read.family.name,
        "units": f"{read.units.start}-{read.units.stop}",
        "groups": " ".join(read.groups),
    }


def _title(read: Read) -> str:
    units = f"{read.family.name} units {read.units.start}..{read.units.stop - 1}"
    return f"{read.consumer} reads {units} of {', '.join(read.groups)} from {read.producer}"


def _boxes(canvas: Canvas, shown: Scene, column: _Column) -> None:
    """Draw the boxes of one side with their lines."""
    for box in column.side.boxes:
        y, height = column.tops[box.rank], _height(box)
        canvas.box(
            (column.x, y),
            (column.width, height),
            fill=SHADE if box.note else PAPER,
            stroke=LINE,
            rx=5,
            data={"side": column.side.name.lower(), "rank": str(box.rank)},
        )
        base, (name, _, _, said) = y + height / 2 + 4.5, column.lefts
        ink = FAINT if box.note else INK
        canvas.text(column.x + name, base, str(box.rank), fill=ink, bold=True)
        canvas.text(column.x + said, base, box.note, size=SMALL, fill=FAINT)
        for at, line in enumerate(box.lines):
            _line(canvas, shown, column, line, column.row(box, at))


def _line(canvas: Canvas, shown: Scene, column: _Column, line: Line, y: float) -> None:
    """Draw one line of a box: part names, cells of units, and who reads or is read."""
    _, parts, cells, said = (column.x + left for left in column.lefts)
    ink, name = INK if line.fill else FAINT, line.family.name
    if len(shown.families) > 1:
        canvas.text(parts, y + 4.2, name, size=SMALL, fill=FAINT)
    for label in line.family.labels(line.units):
        wide = _cell(label)
        canvas.box(
            (cells + 1, y + 3 - _ROW / 2),
            (wide - 2, _ROW - 6),
            fill=line.fill or HOLLOW,
            fill_opacity=0.32 if line.fill else 0.6,
            stroke=line.fill or LINE,
            rx=2,
            hatch=hatch(shown.families.index(line.family)),
            data={"cell": label, "parts": name},
        )
        canvas.text(cells + wide / 2, y + 4.2, label, anchor="middle", fill=ink)
        cells += wide
    canvas.text(said, y + 4.2, line.words, size=SMALL, fill=ink)
