"""One side of the picture of a plan: boxes of ranks in bands, and how much room they take.

Law: words and colours of a box are decided here, places are not.
"""

from __future__ import annotations

import attrs

from kvspec.draw.canvas import DASH, SMALL, colour, width_of
from kvspec.draw.scene import Family, Held, Scene, bands, side_text
from kvspec.ownership.parallel import RankId

LINE_HEIGHT, PAD, GAP, CAPTION = 26.0, 5.0, 8.0, 22.0
"""Pixels: a line of a box, around its lines, between boxes, and the caption of a band."""
_MOST_CELLS, _MOST_READERS, _NARROWEST = 8, 3, 180.0


@attrs.frozen
class Line:
    """One line of a box, ready to be written."""

    family: Family
    units: range
    fill: str
    told: str
    extra: str = ""


@attrs.frozen
class Box:
    """One rank: its lines, and a note where it has nothing to do."""

    rank: RankId
    lines: tuple[Line, ...]
    grey: bool
    note: str = ""

    @property
    def height(self) -> float:
        """How high the box is."""
        return LINE_HEIGHT * max(len(self.lines), 1) + 2 * PAD


@attrs.define
class Column:
    """The boxes of one side, in bands, and how wide what they hold is."""

    heading: str
    caption: str
    bands: list[tuple[str, list[Box]]]
    named: bool
    names: float = 0.0
    parts: float = 0.0
    cells: float = 0.0
    told: float = 0.0
    x: float = 0.0

    def __attrs_post_init__(self) -> None:
        boxes = [box for _, held in self.bands for box in held]
        lines = [line for box in boxes for line in box.lines]
        self.names = max(width_of(str(box.rank), bold=True) for box in boxes) + 12
        if self.named:
            self.parts = max((width_of(e.family.name, SMALL) for e in lines), default=0) + 10
        self.cells = max((_cells_width(e.family, e.units) for e in lines), default=0) + 8
        words = [width_of(words_of(line), SMALL) for line in lines]
        self.told = max([*words, *(width_of(box.note, SMALL) for box in boxes)], default=0) + 4

    @property
    def width(self) -> float:
        """How wide the boxes are."""
        return max(PAD * 2 + 4 + self.names + self.parts + self.cells + self.told, _NARROWEST)

    @property
    def extent(self) -> float:
        """How wide the side is with the words above it."""
        return max(self.width, width_of(self.caption))

    def height(self, gap: float) -> float:
        """Return how high the column is with *gap* pixels between boxes."""
        found = 0.0
        for caption, boxes in self.bands:
            found += (CAPTION + 2 * PAD + GAP if caption else 0) - (0 if found else GAP)
            found += sum(box.height + gap for box in boxes)
        return found


def columns(shown: Scene, colours: dict[RankId, int]) -> tuple[Column, Column]:
    """Return the producer's and the consumer's side; *colours* numbers the ranks that are read."""
    plan, many = shown.plan, len(shown.families) > 1
    groups = {name for lines in shown.read.values() for each in lines for name in each.groups}
    homes = {p.producer.name for p in plan.pairs if p.consumer.name in groups}
    ours = [
        (told, [_producer(shown, rank, colours) for rank in ranks])
        for told, ranks in bands(plan.producer)
    ]
    theirs = [
        (told, [_consumer(shown, rank, colours) for rank in ranks])
        for told, ranks in bands(plan.consumer)
    ]
    return (
        Column("Producer", side_text(plan.producer, homes), ours, many),
        Column("Consumer", side_text(plan.consumer, groups), theirs, many),
    )


def _producer(shown: Scene, rank: RankId, colours: dict[RankId, int]) -> Box:
    grey = not any(each.readers for each in shown.held[rank])
    fill = colour(colours.get(rank, 0))
    lines = tuple(
        Line(each.family, each.units, fill if each.readers else "", _readers(each, grey=grey))
        for each in shown.held[rank]
    )
    if not grey:
        return Box(rank, lines, grey=False)
    readers = shown.plan.targets(rank)
    told = shown.plan.notifiers(rank)
    by = "every consumer rank" if len(told) > 1 else str(told[0])
    note = "read for other groups only" if readers else f"not read; {by} tells it to release"
    return Box(rank, lines, grey=True, note=note)


def _readers(held: Held, *, grey: bool) -> str:
    if not held.readers:
        return "" if grey else "not read here"
    names = [str(each) for each in sorted(held.readers)]
    if len(names) <= _MOST_READERS:
        return f"→ {', '.join(names)}"
    return f"→ {names[0]} … {names[-1]} ({len(names)})"


def _consumer(shown: Scene, rank: RankId, colours: dict[RankId, int]) -> Box:
    lines = tuple(
        Line(e.family, e.units, colour(colours[e.source]), f"← {e.source}", e.extra)
        for e in shown.read[rank]
    )
    return Box(rank, lines, grey=not lines, note="" if lines else "reads nothing")


def words_of(line: Line) -> str:
    """Return what stands behind the cells of a line."""
    return f"{line.told}, {line.extra}" if line.extra else line.told


def labels_of(family: Family, units: range) -> list[str]:
    """Return the text of every cell: one for each unit, or one for many."""
    pieces = family.pieces(units)
    if len(pieces) <= _MOST_CELLS:
        return [str(piece) for piece in pieces]
    return [f"{pieces.start}{DASH}{pieces.stop - 1}"]


def _cells_width(family: Family, units: range) -> float:
    return sum(cell_width(label) for label in labels_of(family, units))


def cell_width(label: str) -> float:
    """Return how wide the cell of *label* is."""
    return max(24.0, width_of(label) + 10)
