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
from kvspec.draw.bars import BAR, Side, units_colour
from kvspec.draw.block import Axis, Window
from kvspec.draw.canvas import (
    FAINT,
    HOLLOW,
    LARGE,
    LINE,
    MARGIN,
    SMALL,
    Canvas,
    Key,
    colour,
    fitting,
    hatch,
    note_svg,
)
from kvspec.errors import SpecError, counted, nbytes
from kvspec.inputs import instance
from kvspec.ownership.tokens import BlockCyclic, Ints
from kvspec.plan.edges import Edge

_WIDTH, _BETWEEN = 960.0, 170.0
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
    own = attrs.evolve(table, entries=tuple(e for e in table.entries if e.edge is edge))
    asked = _first_blocks(own, edge) if request is None else iter((request,))
    moved = (own.descriptors(asks).astype(np.int64) for asks in asked)
    runs = next((rows for rows in moved if len(rows)), np.empty((0, 3), np.int64))
    windows, layers, by_unit = _fit(edge, _windows(own, edge, runs))
    axes = [Axis.of(w.stretches(layers, by_unit=by_unit), MARGIN, _WIDTH) for w in windows]
    producer = Side("Producer", windows[0], edge.producer_group, axes[0])
    consumer = Side("Consumer", windows[1], edge.group, axes[1])
    what = "one block" if request is None else "the whole request"
    facts = f"{_lengths(runs)}, {nbytes(int(runs[:, 2].sum()))} in all"
    if request is None and not len(runs):
        facts = "nothing of it moves"
    facts = f"{what} of {counted(len(edge.layers), 'layer')}: {facts}"
    return _draw(edge, (producer, consumer), layers, runs, facts)


def _edge(table: DescriptorTable, group: str | None) -> Edge:
    edges = [entry.edge for entry in table.entries if group in (None, entry.edge.group)]
    if not edges:
        moved = sorted({entry.edge.group for entry in table.entries}) or "nothing"
        raise SpecError("group", group, f"a group that these two ranks exchange: {moved}")
    return edges[0]


def _has_tokens(table: DescriptorTable, edge: Edge) -> bool:
    parts = table.consumer.engine.group(edge.group).spec.of_layer(edge.layers[0]).parts
    return any(part.per_token for part in parts)


def _first_blocks(table: DescriptorTable, edge: Edge) -> Iterator[TransferRequest]:
    """Yield requests of as many tokens as the larger side's first block holds, then of fewer.

    Fewer, since of a whole block nothing may be live, or nothing that both ranks own; then a token
    is live, if it ever is, in the request that it ends.
    """
    sizes: list[int] = []
    free: list[range] = []
    contexts: list[BlockCyclic] = []
    for cache, name in ((table.producer, edge.producer_group), (table.consumer, edge.group)):
        group = cache.engine.group(name)
        region = next(region for region in cache.regions if region.group == name)
        sizes.append(cache.engine.virtual_block(group))
        count, null = region.num_blocks // group.kernel_blocks_per_block, cache.engine.null_block
        around = (range(count),) if null is None else (range(null), range(null + 1, count))
        free.append(max(around, key=len))
        contexts.append(cache.engine.context(group, cache.rank))
    stripe = edge.slices[0].stripe
    start, tokens = stripe.first * sizes[1], _has_tokens(table, edge)
    rooms = (size * len(blocks) for size, blocks in zip(sizes, free, strict=True))
    counts = [min(start + max(sizes), *rooms) if tokens else start + 1]
    if not all(free):
        return  # a pool of the null block alone
    if tokens:
        token = np.arange(max(start, counts[0] - _MOST_TOKENS), counts[0])
        own = contexts[0].owns(token) & contexts[1].owns(token) & stripe.holds(token // sizes[1])
        counts += (token[own][: -_MOST_TRIED - 1 : -1] + 1).tolist()
    for count in counts:
        producer, consumer = (
            BlockTable(blocks[: -(-count // size) if tokens else 1])
            for size, blocks in zip(sizes, free, strict=True)
        )
        yield TransferRequest(
            request_id="first block",
            num_tokens=count,
            encoder_tokens=count,
            producer_blocks={edge.producer_group: producer},
            consumer_blocks={edge.group: consumer},
        )


def _windows(table: DescriptorTable, edge: Edge, runs: Ints) -> list[Window]:
    """Return the blocks of both sides that the first run lies in, from its first token on."""
    moved = {name for transfer_slice in edge.slices for name in transfer_slice.parts}
    windows: list[Window] = []
    for column, cache in enumerate((table.producer, table.consumer)):
        window = Window(cache, 0, range(0))
        for region in cache.regions:
            place = region.locate(int(runs[0, column])) if len(runs) else None
            if place and region.layer in edge.layers and region.part in moved:
                first = place[2] * window.part(region)[0].tokens_per_state
                window = Window(cache, place[0], range(first, first))
                break
        windows.append(window)
    if not _has_tokens(table, edge):
        return windows
    groups = edge.producer_group, edge.group
    count = min(
        window.cache.engine.group(name).memory_block_size - window.tokens.start
        for window, name in zip(windows, groups, strict=True)
    )
    return [_of_tokens(window, count) for window in windows]


def _of_tokens(window: Window, count: int) -> Window:
    """Return *window* with only its first *count* tokens."""
    start = window.tokens.start
    return attrs.evolve(window, tokens=range(start, start + count))


def _fit(edge: Edge, windows: list[Window]) -> tuple[list[Window], tuple[str, ...], bool]:
    """Show fewer tokens, then fewer layers, until the stretches can be told apart."""

    def fits(count: int, *, by_unit: bool) -> bool:
        layers = edge.layers[:count]
        most = max(len(window.stretches(layers, by_unit=by_unit)) for window in windows)
        return most <= _MOST_STRETCHES

    while not (by_unit := fits(1, by_unit=True)) and len(windows[0].tokens) > 2:  # noqa: PLR2004 - two tokens show the order
        half = -(-len(windows[0].tokens) // 2)
        windows = [_of_tokens(window, half) for window in windows]
    count = min(_MOST_LAYERS, len(edge.layers))
    while count > 1 and not fits(count, by_unit=by_unit):
        count -= 1
    return windows, edge.layers[:count], by_unit


def _draw(
    edge: Edge, sides: tuple[Side, Side], layers: Sequence[str], runs: Ints, facts: str
) -> str:
    canvas, title = Canvas(), f"One block of {edge.group}: {edge.producer} → {edge.consumer}"
    canvas.text(MARGIN, MARGIN + 14, title, size=LARGE, bold=True)
    canvas.text(MARGIN, MARGIN + 36, facts, fill=FAINT)
    hidden = len(edge.layers) - len(layers)
    if hidden:
        drawn = f"{counted(len(layers), 'layer')} drawn, … and {hidden} more"
        canvas.text(MARGIN + _WIDTH, MARGIN + 36, drawn, fill=FAINT, anchor="end")
    top = MARGIN + 120
    bottom = top + BAR + _BETWEEN
    drawn = _ribbons(canvas, sides, runs, (top + BAR, bottom))
    parts = list(dict.fromkeys(own.part for side in sides for own in side.axis.stretches))
    for side, y, (heading, distances, names) in (
        (sides[0], top, (-54, -26, -9)),
        (sides[1], bottom, (BAR + 58, BAR + 32, BAR + 15)),
    ):
        side.heading(canvas, y + heading)
        side.distances(canvas, y + distances)
        side.layers(canvas, y + names)
        side.bar(canvas, y, parts)
    y, width = bottom + BAR + 86, _WIDTH + 2 * MARGIN
    canvas.text(MARGIN, y, f"{drawn}; colours and numbers are units of the model", fill=FAINT)
    y = canvas.keys(y + 12, _keys(sides, parts), width)
    return canvas.svg(width, y + 12, f"kvspec table: {title}")


def _lengths(runs: Ints) -> str:
    if not len(runs):
        return "0 runs"
    least, most = int(runs[:, 2].min()), int(runs[:, 2].max())
    size = nbytes(least) if least == most else f"{nbytes(least)} to {nbytes(most)}"
    return f"{counted(len(runs), 'run')} of {size}"


def _ribbons(
    canvas: Canvas, sides: tuple[Side, Side], runs: Ints, rows: tuple[float, float]
) -> str:
    """Draw the runs between the blocks; return in words how many, and of what lengths."""
    source, target = (side.axis for side in sides)
    seen = np.column_stack([runs, np.arange(len(runs))])
    for column, axis in enumerate((source, target)):
        seen = axis.cut(seen, column)
    numbers = np.unique(seen[:, 3])
    step = -(-len(numbers) // _MOST_RIBBONS) or 1
    labels: list[tuple[float, str]] = []
    for start, place, length, number in seen[np.isin(seen[:, 3], numbers[::step])].tolist():
        size, units = int(runs[number, 2]), target.units(place, length)
        fill = colour(units.pop()) if len(units) == 1 else LINE
        upper, lower = source.span(start, length), target.span(place, length)
        canvas.ribbon(
            upper,
            lower,
            rows,
            f"a run of {nbytes(size)}",
            fill=fill,
            fill_opacity=0.38,
            stroke=fill,
            stroke_width=0.5,
            data_length=size,
        )
        room = min(upper[1] - upper[0], lower[1] - lower[0])
        labels.append((sum((*upper, *lower)) / 4, fitting([nbytes(size)], room - 4)))
    for x, label in labels if len(numbers) <= _MOST_LABELS else ():
        canvas.text(x, sum(rows) / 2 + 4, label, size=SMALL, anchor="middle")
    every = f", one of every {step} drawn" if step > 1 else ""
    return f"{_lengths(runs[numbers])} between what is drawn{every}"


def _keys(sides: tuple[Side, Side], parts: Sequence[str]) -> Iterator[Key]:
    """Yield what hatches and colours mean: parts, and units of the model."""
    for number, part in enumerate(parts):
        yield HOLLOW, hatch(number), part
    drawn = [stretch.units for side in sides for stretch in side.axis.stretches]
    units = sorted({own.start for own in drawn if len(own) == 1})
    if len(units) <= _MOST_KEYS:
        for unit in units:
            yield units_colour(range(unit, unit + 1)), "", f"unit {unit}"
