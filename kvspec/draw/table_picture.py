"""The picture of a table: how one block lies on both sides, and which runs move between them.

Law: ribbons are the table's own descriptors, cut to what is shown; the bytes are to scale on each
side, and what is left out says so.

What one block of one rank looks like in memory: stretches of bytes, and where they are drawn.

Law: a stretch is contiguous and holds one part of one layer; where it lies comes from the regions
alone. All of a side is drawn to one scale.

One side of the picture of a table: a bar of bytes, its layers and its axis.

Law: bytes are to scale; a label is written where it has room, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import groupby, islice

import attrs
import numpy as np

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.descriptors.table import DescriptorTable
from kvspec.draw.canvas import (
    DASH,
    FADED,
    FAINT,
    GAP,
    HOLLOW,
    INK,
    LARGE,
    LINE,
    MARGIN,
    MEDIUM,
    SMALL,
    Canvas,
    Key,
    colour,
    fitting,
    hatch,
    note_svg,
    shortened,
    width_of,
)
from kvspec.errors import SpecError, counted, nbytes
from kvspec.inputs import instance
from kvspec.memory.rank_cache import Memory, RankCache, Region
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import BlockCyclic, Ints
from kvspec.plan.edges import Edge

_OMITTED = 30.0
"""Pixels of a gap that is left out, or fewer where there are many."""


@attrs.frozen
class Stretch:
    """Contiguous bytes of one part of one layer: *units* of the model, counted as sharded."""

    memory: int
    start: int
    stop: int
    layer: str
    part: str
    units: range


@attrs.frozen
class Window:
    """A block of a cache, and which of its tokens are shown; of a state, all of it."""

    cache: RankCache
    block: int
    tokens: range

    def stretches(self, layers: Collection[str], *, by_unit: bool) -> list[Stretch]:
        """Return the stretches of *layers* as they lie; those of one unit apart if *by_unit*."""
        memories: dict[Memory, int] = {}
        found: list[Stretch] = []
        for region in (each for each in self.cache.regions if each.layer in layers):
            home = next(m for m in self.cache.memory if 0 <= region.base - m.address < m.length)
            number = memories.setdefault(home, len(memories))
            found += self._of(region, number, by_unit=by_unit)
        return sorted(found, key=lambda each: (each.memory, each.start))

    def _of(self, region: Region, memory: int, *, by_unit: bool) -> list[Stretch]:
        part, first = self.part(region)
        size = part.tokens_per_state
        rows = np.arange(region.states)
        if part.per_token:
            rows = rows[self.tokens.start // size : -(-self.tokens.stop // size)]
        units = np.arange(region.units)
        grid = units[:, None] * region.unit_stride + rows * region.state_stride
        address = grid[..., None] + np.arange(region.chunks) * region.chunk_stride
        address = (address + region.address(self.block, 0, 0)).ravel()
        packs = np.repeat((units + first) // part.granularity, len(rows) * region.chunks)
        order = np.argsort(address, kind="stable")
        separate = np.diff(address[order]) != region.chunk_bytes
        if by_unit:
            separate |= np.diff(packs[order]) != 0
        return [
            Stretch(
                memory,
                int(address[own[0]]),
                int(address[own[-1]]) + region.chunk_bytes,
                region.layer,
                region.part,
                range(int(packs[own].min()), int(packs[own].max()) + 1),
            )
            for own in np.split(order, np.flatnonzero(separate) + 1)
        ]

    def part(self, region: Region) -> tuple[Part, int]:
        """Return the part that lies in *region*, and the first unit of the model that does."""
        engine = self.cache.engine
        group = engine.group(region.group)
        parts = group.spec.of_layer(region.layer).parts
        part = next(part for part in parts if part.name == region.part)
        return part, engine.units(group, part, self.cache.rank).start


@attrs.frozen(slots=False)
class Axis:
    """Stretches side by side, *lefts* in pixels, at *scale* pixels a byte.

    *omitted*: which of the gaps between them, each before a stretch but the first, are left out.
    """

    stretches: list[Stretch]
    lefts: list[float]
    scale: float
    omitted: list[bool]

    @staticmethod
    def of(stretches: list[Stretch], left: float, width: float) -> Axis:
        """Lay *stretches* out on *width* pixels from *left*; long gaps are left out."""
        starts, stops = np.array([(each.start, each.stop) for each in stretches], np.int64).T
        sizes, gaps = stops - starts, starts[1:] - stops[:-1]
        omitted = np.diff([each.memory for each in stretches]) != 0
        omitted |= gaps > sizes.sum() // 8
        out = int(omitted.sum())
        mark = min(_OMITTED, width / 2 / max(out, 1))
        scale = float((width - mark * out) / (sizes.sum() + gaps[~omitted].sum()))
        steps = sizes[:-1] * scale + np.where(omitted, mark, gaps * scale)
        lefts = left + np.concatenate([[0.0], np.cumsum(steps)])
        return Axis(stretches, lefts.tolist(), scale, omitted.tolist())

    def __iter__(self) -> Iterator[tuple[Stretch, float, float]]:
        """Yield every stretch, and where it begins and ends in pixels."""
        for stretch, left in zip(self.stretches, self.lefts, strict=True):
            yield stretch, left, left + (stretch.stop - stretch.start) * self.scale

    def gaps(self) -> Iterator[tuple[float, float, bool]]:
        """Yield where each gap begins and ends in pixels, and whether it is left out."""
        for (_, _, end), (_, begin, _), omitted in zip(
            self, islice(self, 1, None), self.omitted, strict=False
        ):
            if omitted or begin - end > self.scale / 2:
                yield end, begin, omitted

    @cached_property
    def chunks(self) -> list[tuple[Stretch, float]]:
        """The stretches that touch as one, as they are drawn, each with where it begins."""
        chunks: list[tuple[Stretch, float]] = []
        for own, left, _ in self:
            last, begin = chunks[-1] if chunks else (own, left)
            if (last.memory, last.stop) == (own.memory, own.start):
                chunks[-1] = attrs.evolve(last, stop=own.stop), begin
            else:
                chunks.append((own, left))
        return chunks

    def cut(self, runs: Ints, column: int) -> Ints:
        """Return *runs* cut to what is drawn here.

        Each is (producer address, consumer address, length, number); *column* has the addresses.
        """
        chunks = np.array(sorted((each.start, each.stop) for each, _ in self.chunks), np.int64)
        begin, end = runs[:, column], runs[:, column] + runs[:, 2]
        first = np.searchsorted(chunks[:, 1], begin, side="right")
        count = np.searchsorted(chunks[:, 0], end, side="left") - first
        row = np.repeat(np.arange(len(runs)), count)
        chunk = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first, count)
        start = np.maximum(begin[row], chunks[chunk, 0])
        length = np.minimum(end[row], chunks[chunk, 1]) - start
        skip = start - begin[row]
        return np.stack([runs[row, 0] + skip, runs[row, 1] + skip, length, runs[row, 3]], axis=1)

    def span(self, start: int, length: int) -> tuple[float, float]:
        """Return the pixels of some bytes of one chunk."""
        own, begin = next(each for each in self.chunks if each[0].start <= start < each[0].stop)
        left = begin + (start - own.start) * self.scale
        return left, left + length * self.scale

    def units(self, start: int, length: int) -> set[int]:
        """Return the units that lie in some bytes."""
        inside = (e for e in self.stretches if e.start < start + length and start < e.stop)
        return {unit for stretch in inside for unit in stretch.units}


BAR = 34.0
"""Height of a bar, in pixels."""
_OUTLINED, _APART = 12.0, 92.0

Placed = tuple[Stretch, float, float]
"""A stretch, and where it begins and ends in pixels."""


@attrs.frozen
class Side:
    """One side of the picture: which block of whose cache, of which group, and where."""

    name: str
    window: Window
    group: str
    axis: Axis

    def heading(self, canvas: Canvas, y: float) -> None:
        """Write which block of whose cache a bar is, and how it is laid out."""
        cache, tokens = self.window.cache, self.window.tokens
        group = cache.engine.group(self.group)
        wide = canvas.text(MARGIN, y, f"{self.name} {cache.rank}", size=MEDIUM, bold=True)
        words = [f"block {self.window.block}", f"layout {cache.engine.layout_of(group)}"]
        if tokens:
            words.append(f"{group.memory_block_size} tokens a block")
            if len(tokens) < group.memory_block_size:
                words.append(f"tokens {tokens.start} to {tokens.stop - 1} drawn")
        canvas.text(MARGIN + wide + 10, y, " · ".join(words), fill=FAINT)

    def bar(self, canvas: Canvas, y: float, parts: Sequence[str]) -> None:
        """Draw the stretches, hatched by part, with their units."""
        side = self.name.lower()
        for left, right, omitted in self.axis.gaps():
            if not omitted:
                canvas.box((left, y + 6), (right - left, BAR - 12), GAP, fill="none")
            elif right - left > width_of("…", SMALL):
                canvas.text((left + right) / 2, y + BAR / 2 + 3, "…", anchor="middle")
        for own, left, right in self.axis:
            units, size = units_text(own.units), nbytes(own.stop - own.start)
            canvas.box(
                (left, y),
                (right - left, BAR),
                hatch(parts.index(own.part)),
                f"{own.layer} {own.part}, units {units}: {size}",
                fill=units_colour(own.units),
                fill_opacity=FADED,
                stroke=INK if right - left > _OUTLINED else "none",
                stroke_width=0.5,
                data_side=side,
                data_layer=own.layer,
                data_part=own.part,
                data_units=units,
            )
        for left, right, words in _labels(list(self.axis)):
            label = fitting(words, right - left - 3)
            canvas.text((left + right) / 2, y + BAR / 2 + 4, label, size=SMALL, anchor="middle")

    def layers(self, canvas: Canvas, y: float) -> None:
        """Write over or under the stretches of one layer its name."""
        for layer, same in groupby(self.axis, key=lambda placed: placed[0].layer):
            placed = list(same)
            left, right = placed[0][1], placed[-1][2]
            middle = (left + right) / 2
            names = (shortened(layer, most) for most in (len(layer), 24, 16, 10, 6))
            name = fitting(names, right - left - 8)
            half = canvas.text(middle, y, name, size=SMALL, fill=FAINT, anchor="middle") / 2
            half += 4 if name else 0
            canvas.rule((left, y - 4), (middle - half, y - 4))
            canvas.rule((middle + half, y - 4), (right, y - 4))

    def distances(self, canvas: Canvas, y: float) -> None:
        """Write bytes from the first one drawn of each memory, each where it has room."""
        free, end = 0.0, max(right for _, _, right in self.axis)
        for x, label in sorted(self._ticks()):
            wide = width_of(label, SMALL)
            if free <= x <= end - wide:
                canvas.rule((x, y - 9), (x, y + 1))
                canvas.text(x + 3, y, label, size=SMALL, fill=FAINT)
                free = x + wide + 11

    def _ticks(self) -> Iterator[tuple[float, str]]:
        """Yield where each chunk begins in its memory, and round distances inside it."""
        origin: dict[int, int] = {}
        step = 64
        while step * self.axis.scale < _APART:
            step *= 2
        for chunk, left in self.axis.chunks:
            first = origin.setdefault(chunk.memory, chunk.start)
            start, stop = chunk.start - first, chunk.stop - first
            name = f"memory {len(origin)}" if len(origin) > 1 else "0 B"
            yield left, f"+{nbytes(start)}" if start else name
            for place in range(start // step * step + step, stop, step):
                yield left + (place - start) * self.axis.scale, f"+{nbytes(place)}"


def units_text(units: range) -> str:
    """Return one unit's number, or the first and the last."""
    return str(units.start) if len(units) == 1 else f"{units.start}{DASH}{units.stop - 1}"


def units_colour(units: range) -> str:
    """Return the colour of one unit, or grey for several."""
    return colour(units.start) if len(units) == 1 else HOLLOW


def _labels(placed: Sequence[Placed]) -> Iterator[tuple[float, float, tuple[str, ...]]]:
    """Yield what may be written where: on each stretch, or on neighbours of the same unit."""
    for units, same in groupby(placed, key=lambda each: each[0].units):
        group, text = list(same), units_text(units)
        if all(right - left > width_of(text, SMALL) + 3 for _, left, right in group):
            for stretch, left, right in group:
                yield left, right, (f"{stretch.part} {text}", text)
            continue
        begin = group[0][1]
        for (_, _, end), after in zip(group, [*group[1:], None], strict=True):
            if after is None or after[1] > end:
                yield begin, end, (f"unit {text}", text)
                begin = after[1] if after else end


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
