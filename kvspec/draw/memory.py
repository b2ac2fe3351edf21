"""The picture of a table: how one block lies on both sides, and which runs move between them.

Law: ribbons are the table's own descriptors, cut to what is shown; the bytes are to scale on each
side, and what is left out says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.descriptors.table import DescriptorTable
from kvspec.draw.bars import BAR, Side, axis, bar, heading, units_colour
from kvspec.draw.bars import layers as layer_names
from kvspec.draw.block import (
    Window,
    chunks,
    clipped,
    meeting,
    place,
)
from kvspec.draw.canvas import (
    FAINT,
    HATCHES,
    HOLLOW,
    LARGE,
    LINE,
    SMALL,
    Canvas,
    colour,
    counted,
    nbytes,
    width_of,
)
from kvspec.draw.ranks import note_svg
from kvspec.errors import SpecError
from kvspec.inputs import instance
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Cyclic, Ints
from kvspec.plan.edges import Edge

_MARGIN, _WIDTH, _BETWEEN, _MARK = 28.0, 960.0, 170.0, 30.0
_MOST_TOKENS, _MOST_TRIED = 2**16, 8
_MOST_STRETCHES, _MOST_LAYERS, _MOST_RIBBONS, _MOST_LABELS, _MOST_KEYS = 200, 3, 256, 16, 12


def table_svg(
    table: DescriptorTable, request: TransferRequest | None = None, group: str | None = None
) -> str:
    """Return a picture of one block on both sides of *table* as SVG text.

    The first blocks that share tokens of *request*, or the first block of either cache, drawn byte
    by byte with the runs that move between them. *group*: a group of the consumer's; the first
    that the two ranks exchange unless given. As many layers and tokens are drawn as fit; of ranks
    that exchange nothing, words.
    """
    instance("table", table, DescriptorTable)
    if request is not None:
        instance("request", request, TransferRequest)
    if group is None and not table.entries:
        title = f"{table.producer.rank} → {table.consumer.rank}"
        return note_svg("table", title, ["these two ranks exchange nothing"])
    edge = _edge(table, group)
    own = tuple(entry for entry in table.entries if entry.edge is edge)
    rows = _rows(attrs.evolve(table, entries=own), edge, request)
    windows = _windows(table, edge, rows)
    layers, by_unit = _fit(edge, windows)
    sides = []
    for name, window in zip(("Producer", "Consumer"), windows, strict=True):
        found = window.stretches(layers, by_unit=by_unit)
        sides.append(Side(name, window, *place(found, _MARGIN, _WIDTH, _MARK)))
    return _draw(edge, (sides[0], sides[1]), layers, rows, request)


def _edge(table: DescriptorTable, group: str | None) -> Edge:
    edges = [entry.edge for entry in table.entries if group in (None, entry.edge.group)]
    if not edges:
        moved = sorted({entry.edge.group for entry in table.entries}) or "nothing"
        raise SpecError("group", group, f"a group that these two ranks exchange: {moved}")
    return edges[0]


def _parts(table: DescriptorTable, edge: Edge) -> tuple[Part, ...]:
    return table.consumer.engine.group(edge.group).spec.of_layer(edge.layers[0]).parts


def _rows(table: DescriptorTable, edge: Edge, request: TransferRequest | None) -> Ints:
    """Return what *request* moves, or else of first blocks the first of which anything moves."""
    asked = _first_blocks(table, edge) if request is None else iter((request,))
    found = (table.descriptors(each).astype(np.int64) for each in asked)
    return next((rows for rows in found if len(rows)), np.empty((0, 3), np.int64))


def _first_blocks(table: DescriptorTable, edge: Edge) -> Iterator[TransferRequest]:
    """Yield requests of as many tokens as the larger side's first block holds, then of fewer.

    Fewer, since of a whole block nothing may be live, or nothing that both ranks own; then a token
    is live, if it ever is, in the request that it ends.
    """
    tokens: list[int] = []
    room: list[int] = []
    contexts: list[Cyclic] = []
    for cache, name in ((table.producer, edge.producer_group), (table.consumer, edge.group)):
        group = cache.engine.group(name)
        region = next(each for each in cache.regions if each.group == name)
        tokens.append(cache.engine.virtual_block(group))
        room.append(tokens[-1] * (region.num_blocks // group.split))
        contexts.append(cache.engine.context(group, cache.rank))
    first, step = edge.slices[0].stripe
    start = first * tokens[1]
    states = not any(part.per_token for part in _parts(table, edge))
    counts = [start + 1] if states else [min(start + max(tokens), *room)]
    if not states:
        at = np.arange(max(start, counts[0] - _MOST_TOKENS), counts[0])
        own = contexts[0].owns(at) & contexts[1].owns(at) & (at // tokens[1] % step == first)
        counts += (at[own][: -_MOST_TRIED - 1 : -1] + 1).tolist()
    for count in counts:
        ours, theirs = (BlockTable(range(1 if states else -(-count // size))) for size in tokens)
        yield TransferRequest(
            request_id="first block",
            num_tokens=count,
            encoder_tokens=count,
            producer_blocks={edge.producer_group: ours},
            consumer_blocks={edge.group: theirs},
        )


def _windows(table: DescriptorTable, edge: Edge, rows: Ints) -> tuple[Window, Window]:
    """Return the blocks of both sides that the first run lies in, and from which row."""
    moved = {name for each in edge.slices for name in each.parts}
    windows = []
    for column, cache in enumerate((table.producer, table.consumer)):
        regions = [e for e in cache.regions if e.layer in edge.layers and e.part in moved]
        places = (each.locate(int(row[column])) for row in rows[:1] for each in regions)
        block, _, state, _ = next((each for each in places if each is not None), (0, 0, 0, 0))
        windows.append(Window(cache, block, state, max(each.states for each in regions) - state))
    both = min(window.states for window in windows)
    if any(part.per_token for part in _parts(table, edge)):
        for window in windows:
            window.states = both
    return windows[0], windows[1]


def _fit(edge: Edge, windows: tuple[Window, Window]) -> tuple[tuple[str, ...], bool]:
    """Show fewer rows, then fewer layers, until the stretches can be told apart."""

    def most(layers: Sequence[str], *, by_unit: bool) -> int:
        return max(len(each.stretches(layers, by_unit=by_unit)) for each in windows)

    one = edge.layers[:1]
    by_unit = most(one, by_unit=True) <= _MOST_STRETCHES
    while not by_unit and windows[0].states > 2:  # noqa: PLR2004 - two rows show the order
        for window in windows:
            window.states = -(-window.states // 2)
        by_unit = most(one, by_unit=True) <= _MOST_STRETCHES
    count = min(_MOST_LAYERS, len(edge.layers))
    while count > 1 and most(edge.layers[:count], by_unit=by_unit) > _MOST_STRETCHES:
        count -= 1
    return edge.layers[:count], by_unit


def _draw(
    edge: Edge,
    sides: tuple[Side, Side],
    layers: Sequence[str],
    rows: Ints,
    request: TransferRequest | None,
) -> str:
    canvas = Canvas()
    title = f"One block of {edge.group}: {edge.producer} → {edge.consumer}"
    y = _MARGIN + 14
    canvas.text(_MARGIN, y, title, size=LARGE, bold=True)
    asked = "the whole request" if request else "one block"
    told = f"{_lengths(rows)}, {nbytes(int(rows[:, 2].sum()))} in all"
    if request is None and not len(rows):
        told = "nothing of it moves"
    told = f"{asked} of {counted(len(edge.layers), 'layer')}: {told}"
    canvas.text(_MARGIN, y + 22, told, fill=FAINT)
    hidden = len(edge.layers) - len(layers)
    if hidden:
        told = f"{counted(len(layers), 'layer')} drawn, … and {hidden} more"
        canvas.text(_MARGIN + _WIDTH, y + 22, told, fill=FAINT, anchor="end")
    y += 52
    heading(canvas, sides[0], edge.producer_group, _MARGIN, y)
    top = y + 54
    bottom = top + BAR + _BETWEEN
    drawn = _ribbons(canvas, sides, rows, top + BAR, bottom)
    parts = _part_names(sides)
    for side, at, above in ((sides[0], top, True), (sides[1], bottom, False)):
        bar(canvas, side, at, parts)
        layer_names(canvas, side, at - 9 if above else at + BAR + 15)
        axis(canvas, side, at - 26 if above else at + BAR + 32)
    heading(canvas, sides[1], edge.group, _MARGIN, bottom + BAR + 58)
    y = _legend(canvas, sides, drawn, bottom + BAR + 86)
    return canvas.svg(_WIDTH + 2 * _MARGIN, y + 18, f"kvspec table: {title}")


def _lengths(rows: Ints) -> str:
    if not len(rows):
        return "0 runs"
    least, most = int(rows[:, 2].min()), int(rows[:, 2].max())
    size = nbytes(least) if least == most else f"{nbytes(least)} to {nbytes(most)}"
    return f"{counted(len(rows), 'run')} of {size}"


def _ribbons(
    canvas: Canvas, sides: tuple[Side, Side], rows: Ints, top: float, bottom: float
) -> str:
    """Draw the runs between the blocks; return in words how many, and of what lengths."""
    shown = chunks(sides[0].placed), chunks(sides[1].placed)
    seen = meeting(meeting(rows, 0, shown[0]), 1, shown[1])
    step = -(-len(seen) // _MOST_RIBBONS) or 1
    labels: list[tuple[float, float, str]] = []
    for row in seen[::step].tolist():
        for ours, theirs, part in clipped((row[0], row[1], row[2]), shown):
            fill = _fill(sides[1], row[1] + part.start, row[1] + part.stop)
            canvas.ribbon(
                (*ours, top),
                (*theirs, bottom),
                fill=fill,
                data={"length": str(row[2])},
                title=f"a run of {nbytes(row[2])}",
            )
            room = min(ours[1] - ours[0], theirs[1] - theirs[0])
            label = nbytes(row[2])
            if len(seen) <= _MOST_LABELS and width_of(label, SMALL) + 4 <= room:
                middle = (ours[0] + ours[1] + theirs[0] + theirs[1]) / 4
                labels.append((middle, (top + bottom) / 2 + 4, label))
    for x, y, label in labels:
        canvas.text(x, y, label, size=SMALL, anchor="middle")
    every = f", one of every {step} drawn" if step > 1 else ""
    return f"{_lengths(seen)} between what is drawn{every}"


def _fill(side: Side, start: int, stop: int) -> str:
    """Return the colour of the one unit in some bytes, or grey if there are several."""
    units = {
        unit
        for each in side.placed
        if each.stretch.start < stop and start < each.stretch.stop
        for unit in each.stretch.units
    }
    return colour(units.pop()) if len(units) == 1 else LINE


def _legend(canvas: Canvas, sides: tuple[Side, Side], drawn: str, y: float) -> float:
    """Say what hatches and colours mean: parts, and units of the model."""
    canvas.text(_MARGIN, y, f"{drawn}; colours and numbers are units of the model", fill=FAINT)
    placed = [each.stretch for side in sides for each in side.placed]
    keys = [
        (HOLLOW, hatch, part) for part, hatch in zip(_part_names(sides), HATCHES * 9, strict=False)
    ]
    units = sorted({each.units.start for each in placed if len(each.units) == 1})
    if len(units) <= _MOST_KEYS:
        keys += [(units_colour(range(unit, unit + 1)), "", f"unit {unit}") for unit in units]
    x = _MARGIN
    for fill, hatch, words in keys:
        wide = 32 + width_of(words, SMALL)
        if x + wide > _MARGIN + _WIDTH:
            x, y = _MARGIN, y + 22
        opacity = 0.45 if words.startswith("unit ") else None
        canvas.box(
            x, y + 12, 26, 14, fill=fill, opacity=opacity, stroke=LINE, radius=2, hatch=hatch
        )
        canvas.text(x + 32, y + 23, words, size=SMALL)
        x += wide + 16
    return y + 26


def _part_names(sides: tuple[Side, Side]) -> list[str]:
    return list(dict.fromkeys(each.stretch.part for side in sides for each in side.placed))
