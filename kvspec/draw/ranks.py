"""The picture of a plan: who reads which units from whom.

Law: every rank is a box, every slice of every edge a line from a producer's box to a consumer's,
and both ends say in words what the line's colour says.
"""

from __future__ import annotations

from kvspec.draw.canvas import (
    BAND,
    DASHES,
    FAINT,
    HATCHES,
    HOLLOW,
    INK,
    LARGE,
    LINE,
    PALETTE,
    PAPER,
    SHADE,
    SMALL,
    Canvas,
    colour,
    counted,
    shortened,
    width_of,
)
from kvspec.draw.column import (
    CAPTION,
    GAP,
    LINE_HEIGHT,
    PAD,
    Column,
    Line,
    cell_width,
    columns,
    labels_of,
    words_of,
)
from kvspec.draw.scene import Read, Scene, excluded_text, scene
from kvspec.inputs import instance
from kvspec.ownership.parallel import RankId
from kvspec.plan.explain import sizes
from kvspec.plan.plan import TransferPlan

_MARGIN = 28.0
_MIDDLE = 280.0


def plan_svg(plan: TransferPlan, group: str | None = None) -> str:
    """Return a picture of *plan* as SVG text: who reads which units from whom.

    *group*: only this group of the consumer's; all of them unless given. Every rank is a box with
    the units that it holds, a line runs from the producer rank to each rank that reads it, and a
    rank that nobody reads is grey and says who tells it to release. A plan that moves nothing is
    words.
    """
    instance("plan", plan, TransferPlan)
    if group is None and not plan.shares:
        return note_svg("plan", _title_of(plan), ["nothing moves", *excluded_text(plan)])
    shown = scene(plan, group)
    read = {line.source for lines in shown.read.values() for line in lines}
    colours = {rank: at for at, rank in enumerate(sorted(read))}
    return _draw(shown, columns(shown, colours), colours)


def note_svg(kind: str, title: str, words: list[str]) -> str:
    """Return a small picture of words, where there is nothing to draw."""
    canvas = Canvas()
    y = _MARGIN + 14
    wide = canvas.text(_MARGIN, y, title, size=LARGE, bold=True)
    for word in words:
        y += 22
        wide = max(wide, canvas.text(_MARGIN, y, shortened(word, 90), fill=FAINT))
    return canvas.svg(wide + 2 * _MARGIN, y + _MARGIN - 4, f"kvspec {kind}: {title}")


def _title_of(plan: TransferPlan) -> str:
    return " → ".join(sizes(each.parallel) for each in (plan.producer, plan.consumer))


def _draw(shown: Scene, sides: tuple[Column, Column], colours: dict[RankId, int]) -> str:
    canvas = Canvas()
    ours, theirs = sides
    ours.x = _MARGIN
    theirs.x = _MARGIN + max(ours.width + _MIDDLE, ours.extent + _MARGIN)
    width = theirs.x + theirs.extent + _MARGIN
    title = _title_of(shown.plan)
    y = _MARGIN + 14
    canvas.text(_MARGIN, y, title, size=LARGE, bold=True)
    y = _facts(canvas, shown, y, width)
    for side in sides:
        canvas.text(side.x, y + 26, side.heading, size=14.0, bold=True)
        canvas.text(side.x, y + 43, shortened(side.caption, 90), fill=FAINT)
    top = y + 58
    height = max(side.height(GAP) for side in sides)
    places: list[dict[RankId, float]] = []
    for side in sides:
        count = sum(len(boxes) for _, boxes in side.bands)
        gap = GAP + max(0.0, (height - side.height(GAP)) / max(count, 1))
        banded = any(told for told, _ in side.bands)
        places.append(_place(canvas, side, top + (0 if banded else (gap - GAP) / 2), gap))
    _releases(canvas, shown, sides, places)
    ports = _edges(canvas, shown, sides, places, colours)
    for side, at in zip(sides, places, strict=True):
        _boxes(canvas, shown, side, at)
    for x, y_port, fill in ports:
        canvas.arrow(x, y_port, fill=fill)
    bottom = _legend(canvas, shown, top + height + 14, width)
    return canvas.svg(width, bottom + 14, f"kvspec plan: {title}")


def _facts(canvas: Canvas, shown: Scene, y: float, width: float) -> float:
    """Write under the title what moves and how replicas are elected; return the last baseline."""
    told = [
        f"{each.name}: {counted(each.units, 'unit')}"
        + (f" dealt {each.deal_in} at a time" if each.deal_in > 1 else "")
        for each in shown.families
    ]
    layers = len({x for lines in shown.read.values() for each in lines for x in each.layers})
    pairs = len({(r, e.source) for r, lines in shown.read.items() for e in lines})
    words = [*told, counted(layers, "layer"), f"replicas by “{shown.plan.replicas}”"]
    words.append(f"{counted(pairs, 'pair')} of ranks")
    return _flow(canvas, words, y + 4, width, 18)


def _flow(canvas: Canvas, words: list[str], y: float, width: float, step: float) -> float:
    line = ""
    for word in words:
        longer = f"{line} · {word}" if line else word
        if line and width_of(longer) > width - 2 * _MARGIN:
            y += step
            canvas.text(_MARGIN, y, line, fill=FAINT)
            longer = word
        line = longer
    canvas.text(_MARGIN, y + step, line, fill=FAINT)
    return y + step


def _place(canvas: Canvas, side: Column, top: float, gap: float) -> dict[RankId, float]:
    """Draw the bands of one side; return the top of every box."""
    found: dict[RankId, float] = {}
    y = top
    for caption, boxes in side.bands:
        high = sum(box.height + gap for box in boxes) - gap
        if caption:
            wide = side.width + 2 * GAP
            canvas.box(side.x - GAP, y, wide, high + CAPTION + 2 * PAD, fill=BAND, radius=6)
            canvas.text(side.x, y + 16, caption, size=SMALL, fill=FAINT)
            y += CAPTION + PAD
        for box in boxes:
            found[box.rank] = y
            y += box.height + gap
        y += GAP + PAD if caption else 0
    return found


def _edges(
    canvas: Canvas,
    shown: Scene,
    sides: tuple[Column, Column],
    places: list[dict[RankId, float]],
    colours: dict[RankId, int],
) -> list[tuple[float, float, str]]:
    """Draw a curve for every line of every consumer; return where their arrowheads stand."""
    left, right = sides[0].x + sides[0].width, sides[1].x
    heads: list[tuple[float, float, str]] = []
    leaving: dict[tuple[RankId, int], list[tuple[float, RankId, Read]]] = {}
    for rank, lines in shown.read.items():
        for at, line in enumerate(lines):
            y = places[1][rank] + PAD + (at + 0.5) * LINE_HEIGHT
            leaving.setdefault((line.source, _home(shown, line)), []).append((y, rank, line))
    for (source, at), ends in leaving.items():
        ends.sort(key=lambda each: each[0])
        step = min(5.0, (LINE_HEIGHT - 6) / len(ends))
        first = places[0][source] + PAD + (at + 0.5) * LINE_HEIGHT - (len(ends) - 1) / 2 * step
        stroke = colour(colours[source])
        dash = DASHES[colours[source] // len(PALETTE) % len(DASHES)]
        for n, (y, rank, line) in enumerate(ends):
            start, stop = (left, first + n * step), (right - 6, y)
            data, title = _data(rank, line), _title(rank, line)
            canvas.curve(start, stop, stroke=stroke, dash=dash, data=data, title=title)
            heads.append((right, y, stroke))
    return heads


def _releases(
    canvas: Canvas, shown: Scene, sides: tuple[Column, Column], places: list[dict[RankId, float]]
) -> None:
    """Draw a dotted line from each rank that nobody reads to the one that tells it to release."""
    for rank, y in places[0].items():
        told = shown.plan.notifiers(rank)
        if shown.plan.targets(rank) or len(told) > 1:
            continue
        start = (sides[0].x + sides[0].width, y + PAD + LINE_HEIGHT / 2)
        stop = (sides[1].x, places[1][told[0]] + PAD)
        data = {"releases": str(rank), "releaser": str(told[0])}
        canvas.curve(start, stop, stroke=LINE, width=1.1, dash=(1, 4), opacity=1.0, data=data)


def _home(shown: Scene, line: Read) -> int:
    """Return which line of the producer's box holds what a consumer's line reads."""
    held = shown.held[line.source]
    same = (
        n for n, e in enumerate(held) if e.family == line.family and line.units.start in e.units
    )
    return next(same)


def _data(rank: RankId, line: Read) -> dict[str, str]:
    return {
        "producer": str(line.source),
        "consumer": str(rank),
        "parts": line.family.name,
        "units": f"{line.units.start}-{line.units.stop}",
        "groups": " ".join(line.groups),
    }


def _title(rank: RankId, line: Read) -> str:
    units = f"{line.units.start}..{line.units.stop - 1}"
    extra = f", {line.extra}" if line.extra else ""
    groups = f"of {', '.join(line.groups)}"
    return f"{rank} reads {line.family.name} units {units} {groups} from {line.source}{extra}"


def _boxes(canvas: Canvas, shown: Scene, side: Column, places: dict[RankId, float]) -> None:
    """Draw the boxes of one side with their lines."""
    for box in (box for _, boxes in side.bands for box in boxes):
        y, ink = places[box.rank], FAINT if box.grey else INK
        canvas.box(
            side.x,
            y,
            side.width,
            box.height,
            fill=SHADE if box.grey else PAPER,
            stroke=LINE,
            radius=5,
            data={"side": side.heading.lower(), "rank": str(box.rank)},
        )
        canvas.text(side.x + PAD + 4, y + box.height / 2 + 4.5, str(box.rank), fill=ink, bold=True)
        for at, line in enumerate(box.lines):
            _line(canvas, shown, side, line, y + PAD + at * LINE_HEIGHT)
        if box.note:
            x = side.x + PAD + 4 + side.names + side.parts + side.cells
            canvas.text(x, y + box.height / 2 + 4.5, box.note, size=SMALL, fill=FAINT)


def _line(canvas: Canvas, shown: Scene, side: Column, line: Line, y: float) -> None:
    """Draw one line of a box: part names, cells of units, and who reads or is read."""
    x, base = side.x + PAD + 4 + side.names, y + LINE_HEIGHT / 2 + 4.2
    if side.named:
        canvas.text(x, base, line.family.name, size=SMALL, fill=FAINT)
    x += side.parts
    hatch = HATCHES[shown.families.index(line.family) % len(HATCHES)]
    for label in labels_of(line.family, line.units):
        wide = cell_width(label)
        canvas.box(
            x + 1,
            y + 3,
            wide - 2,
            LINE_HEIGHT - 6,
            fill=line.fill or HOLLOW,
            opacity=0.32 if line.fill else 0.6,
            stroke=line.fill or LINE,
            radius=2,
            hatch=hatch,
            data={"cell": label, "parts": line.family.name},
        )
        canvas.text(x + wide / 2, base, label, anchor="middle", fill=INK if line.fill else FAINT)
        x += wide
    x = side.x + PAD + 4 + side.names + side.parts + side.cells
    canvas.text(x, base, words_of(line), size=SMALL, fill=INK if line.fill else FAINT)


def _legend(canvas: Canvas, shown: Scene, y: float, width: float) -> float:
    """Say what numbers, patterns and dotted lines mean; return the lowest line drawn."""
    words = ["numbers are units of the model: KV heads, state heads or groups of channels"]
    words.append("a line's colour and dashes are the producer rank read")
    if any(not shown.plan.targets(rank) for rank in shown.held):
        words.append("dotted grey: only tells the rank to release its blocks")
    y = _flow(canvas, words, y - 4, width, 18)
    if len(shown.families) < 2:  # noqa: PLR2004 - one family needs no key
        return y
    x = _MARGIN
    for at, family in enumerate(shown.families):
        wide = 34 + width_of(family.name, SMALL) + 18
        if x + wide > width - _MARGIN and x > _MARGIN:
            x, y = _MARGIN, y + 20
        hatch = HATCHES[at % len(HATCHES)]
        canvas.box(x, y + 10, 26, 14, fill=HOLLOW, stroke=LINE, radius=2, hatch=hatch)
        canvas.text(x + 34, y + 21, family.name, size=SMALL)
        x += wide
    return y + 24
