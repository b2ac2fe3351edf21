"""Draw a descriptor table: the bytes of one block on both sides, and the runs between them.

Invariant: the ribbons are descriptors of the table, cut to the drawn bytes. Each side has one
scale. A text or a mark shows each omission. Labels appear only if they have enough room.

How it works:
    1. Without a request, `_first_blocks` finds a short request whose bytes move.
    2. `_windows` finds the two blocks of the first descriptor, and the drawn tokens in them.
    3. `Window.stretches` cuts each block into *stretches*: contiguous bytes of one part of one
       layer. `_fit` reduces tokens and layers until there are few enough stretches.
    4. `Axis.of` places the stretches side by side. It replaces long gaps by a short mark.
    5. `Axis.cut` cuts the descriptors to the drawn bytes of each side. Each rest is a ribbon.

    Step 1 needs several attempts, because a full block may contain no live token. In this example
    both engines have blocks of 16 tokens and chunked attention with chunks of 16:

        tokens    live tokens    descriptors
        16        none           0              the next token begins a new chunk
        15        0 to 14        1              this request is drawn

    So the first attempt has as many tokens as the larger block of the two sides. Each further
    attempt ends with a token that both ranks own: the last one first. If a token is live in any
    request, it is live in the request that it ends.
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
    unit_noun,
    width_of,
)
from kvspec.errors import SpecError, counted, nbytes
from kvspec.inputs import instance
from kvspec.memory.rank_cache import Memory, RankCache, Region
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import BlockCyclic, Ints
from kvspec.plan.edges import Edge

# Width of an omitted gap, in pixels. Many omitted gaps are narrower: all of them together use at
# most half of the axis.
_OMITTED = 30.0


@attrs.frozen
class Stretch:
    """Contiguous bytes of one part of one layer.

    Attributes:
        memory: Number of the memory in the picture.
        start: Address of the first byte.
        stop: Address behind the last byte.
        layer: Name of the layer.
        part: Name of the part.
        units: Units of the model, in multiples of the granularity of their sharding.
    """

    memory: int
    start: int
    stop: int
    layer: str
    part: str
    units: range


@attrs.frozen
class Window:
    """A block of a cache, and the tokens of it that are drawn. A state is drawn whole."""

    cache: RankCache
    block: int
    tokens: range

    def stretches(self, layers: Collection[str], *, by_unit: bool) -> list[Stretch]:
        """Return the stretches of *layers*, by memory and address.

        If *by_unit* is true, a stretch contains the bytes of one unit only.
        """
        memories: dict[Memory, int] = {}
        stretches: list[Stretch] = []
        for region in (region for region in self.cache.regions if region.layer in layers):
            home = next(m for m in self.cache.memory if 0 <= region.base - m.address < m.length)
            number = memories.setdefault(home, len(memories))
            stretches += self._of(region, number, by_unit=by_unit)
        return sorted(stretches, key=lambda stretch: (stretch.memory, stretch.start))

    def _of(self, region: Region, memory: int, *, by_unit: bool) -> list[Stretch]:
        """Return the stretches of one region: its chunks of content, joined if they touch."""
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
        """Return the part that *region* contains, and the first unit of the model in it."""
        engine = self.cache.engine
        group = engine.group(region.group)
        parts = group.spec.of_layer(region.layer).parts
        part = next(part for part in parts if part.name == region.part)
        return part, engine.units(group, part, self.cache.rank).start


@attrs.frozen(slots=False)
class Axis:
    """Stretches side by side.

    Attributes:
        lefts: Left edge of each stretch, in pixels.
        scale: Pixels a byte.
        omitted: For each stretch but the first, whether the gap before it is omitted.
    """

    stretches: list[Stretch]
    lefts: list[float]
    scale: float
    omitted: list[bool]

    @staticmethod
    def of(stretches: list[Stretch], left: float, width: float) -> Axis:
        """Place *stretches* on *width* pixels from *left*. Long gaps are omitted."""
        starts, stops = np.array([(s.start, s.stop) for s in stretches], np.int64).T
        sizes, gaps = stops - starts, starts[1:] - stops[:-1]
        # The distance of two memories means nothing, so the gap between them is omitted as well.
        omitted = np.diff([stretch.memory for stretch in stretches]) != 0
        omitted |= gaps > sizes.sum() // 8
        count = int(omitted.sum())
        mark = min(_OMITTED, width / 2 / max(count, 1))
        scale = float((width - mark * count) / (sizes.sum() + gaps[~omitted].sum()))
        steps = sizes[:-1] * scale + np.where(omitted, mark, gaps * scale)
        lefts = left + np.concatenate([[0.0], np.cumsum(steps)])
        return Axis(stretches, lefts.tolist(), scale, omitted.tolist())

    def __iter__(self) -> Iterator[tuple[Stretch, float, float]]:
        """Yield each stretch with its left and right edges in pixels."""
        for stretch, left in zip(self.stretches, self.lefts, strict=True):
            yield stretch, left, left + (stretch.stop - stretch.start) * self.scale

    def gaps(self) -> Iterator[tuple[float, float, bool]]:
        """Yield the left and right edges of each gap in pixels, and whether it is omitted."""
        for (_, _, end), (_, begin, _), omitted in zip(
            self, islice(self, 1, None), self.omitted, strict=False
        ):
            if omitted or begin - end > self.scale / 2:
                yield end, begin, omitted

    @cached_property
    def chunks(self) -> list[tuple[Stretch, float]]:
        """Contiguous bytes: adjacent stretches joined, each with its left edge in pixels."""
        chunks: list[tuple[Stretch, float]] = []
        for stretch, left, _ in self:
            last, begin = chunks[-1] if chunks else (stretch, left)
            if (last.memory, last.stop) == (stretch.memory, stretch.start):
                chunks[-1] = attrs.evolve(last, stop=stretch.stop), begin
            else:
                chunks.append((stretch, left))
        return chunks

    def cut(self, runs: Ints, column: int) -> Ints:
        """Return *runs* cut to the drawn bytes of this side.

        Args:
            runs: Rows of (producer address, consumer address, length, number).
            column: The column with the addresses of this side.
        """
        chunks = np.array(sorted((chunk.start, chunk.stop) for chunk, _ in self.chunks), np.int64)
        begin, end = runs[:, column], runs[:, column] + runs[:, 2]
        # Run i overlaps the chunks first[i], first[i] + 1, ... first[i] + count[i] - 1.
        first = np.searchsorted(chunks[:, 1], begin, side="right")
        count = np.searchsorted(chunks[:, 0], end, side="left") - first
        row = np.repeat(np.arange(len(runs)), count)
        chunk = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first, count)
        start = np.maximum(begin[row], chunks[chunk, 0])
        length = np.minimum(end[row], chunks[chunk, 1]) - start
        skip = start - begin[row]
        return np.stack([runs[row, 0] + skip, runs[row, 1] + skip, length, runs[row, 3]], axis=1)

    def span(self, start: int, length: int) -> tuple[float, float]:
        """Return the left and right edges of *length* bytes, which lie in one chunk."""
        chunk, begin = next(
            (chunk, begin) for chunk, begin in self.chunks if chunk.start <= start < chunk.stop
        )
        left = begin + (start - chunk.start) * self.scale
        return left, left + length * self.scale

    def units(self, start: int, length: int) -> set[int]:
        """Return the units of *length* bytes from address *start* on."""
        inside = (s for s in self.stretches if s.start < start + length and start < s.stop)
        return {unit for stretch in inside for unit in stretch.units}


# Height of a bar, in pixels.
BAR = 34.0
# In pixels: the least width of a stretch with an outline, and of the distance between two ticks.
_OUTLINED, _APART = 12.0, 92.0

# A stretch with its left and right edges in pixels.
Placed = tuple[Stretch, float, float]


@attrs.frozen
class Side:
    """One side of the picture: a block of one group of a cache, and its places."""

    name: str
    window: Window
    group: str
    axis: Axis

    def heading(self, canvas: Canvas, y: float) -> None:
        """Write the rank, the block and its layout."""
        cache, tokens = self.window.cache, self.window.tokens
        group = cache.engine.group(self.group)
        width = canvas.text(MARGIN, y, f"{self.name} {cache.rank}", size=MEDIUM, bold=True)
        words = [f"block {self.window.block}", f"layout {cache.engine.layout_of(group)}"]
        if tokens:
            words.append(f"{group.memory_block_size} tokens a block")
            if len(tokens) < group.memory_block_size:
                words.append(f"tokens {tokens.start} to {tokens.stop - 1} drawn")
        canvas.text(MARGIN + width + 10, y, " · ".join(words), fill=FAINT)

    def bar(self, canvas: Canvas, y: float, parts: Sequence[str]) -> None:
        """Draw the stretches with a pattern for each part, and their units."""
        side = self.name.lower()
        for left, right, omitted in self.axis.gaps():
            if not omitted:
                canvas.box((left, y + 6), (right - left, BAR - 12), GAP, fill="none")
            elif right - left > width_of("…", SMALL):
                canvas.text((left + right) / 2, y + BAR / 2 + 3, "…", anchor="middle")
        for stretch, left, right in self.axis:
            units, size = units_text(stretch.units), nbytes(stretch.stop - stretch.start)
            canvas.box(
                (left, y),
                (right - left, BAR),
                hatch(parts.index(stretch.part)),
                f"{stretch.layer} {stretch.part}, {unit_noun(stretch.part)} {units}: {size}",
                fill=units_colour(stretch.units),
                fill_opacity=FADED,
                stroke=INK if right - left > _OUTLINED else "none",
                stroke_width=0.5,
                data_side=side,
                data_layer=stretch.layer,
                data_part=stretch.part,
                data_units=units,
            )
        for left, right, texts in _labels(list(self.axis)):
            label = fitting(texts, right - left - 3)
            canvas.text((left + right) / 2, y + BAR / 2 + 4, label, size=SMALL, anchor="middle")

    def layers(self, canvas: Canvas, y: float) -> None:
        """Write the name of each layer over or under its stretches."""
        for layer, same_layer in groupby(self.axis, key=lambda placed: placed[0].layer):
            placed = list(same_layer)
            left, right = placed[0][1], placed[-1][2]
            middle = (left + right) / 2
            names = (shortened(layer, most) for most in (len(layer), 24, 16, 10, 6))
            name = fitting(names, right - left - 8)
            half = canvas.text(middle, y, name, size=SMALL, fill=FAINT, anchor="middle") / 2
            half += 4 if name else 0
            canvas.rule((left, y - 4), (middle - half, y - 4))
            canvas.rule((middle + half, y - 4), (right, y - 4))

    def distances(self, canvas: Canvas, y: float) -> None:
        """Write the distance from the first drawn byte of each memory, if there is room."""
        free, end = 0.0, max(right for _, _, right in self.axis)
        for x, label in sorted(self._ticks()):
            width = width_of(label, SMALL)
            if free <= x <= end - width:
                canvas.rule((x, y - 9), (x, y + 1))
                canvas.text(x + 3, y, label, size=SMALL, fill=FAINT)
                free = x + width + 11

    def _ticks(self) -> Iterator[tuple[float, str]]:
        """Yield a tick for the beginning of each chunk, and for round distances inside it."""
        # Distances, not addresses: the same cache must give the same picture in each process.
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
    """Return the number of one unit, or the first and the last number of several."""
    return str(units.start) if len(units) == 1 else f"{units.start}{DASH}{units.stop - 1}"


def units_colour(units: range) -> str:
    """Return the colour of one unit, or grey for several."""
    return colour(units.start) if len(units) == 1 else HOLLOW


def _labels(placed: Sequence[Placed]) -> Iterator[tuple[float, float, tuple[str, ...]]]:
    """Yield labels: left edge, right edge, and texts from the longest to the shortest.

    Narrow stretches of the same unit share a label if they touch.
    """
    for units, same_units in groupby(placed, key=lambda own: own[0].units):
        group, text = list(same_units), units_text(units)
        if all(right - left > width_of(text, SMALL) + 3 for _, left, right in group):
            for stretch, left, right in group:
                yield left, right, (f"{stretch.part} {text}", text)
            continue
        begin = group[0][1]
        for (stretch, _, end), after in zip(group, [*group[1:], None], strict=True):
            if after is None or after[1] > end:
                yield begin, end, (f"{unit_noun(stretch.part)} {text}", text)
                begin = after[1] if after else end


# In pixels: the width of both bars, and the distance between them.
_WIDTH, _BETWEEN = 960.0, 170.0
# `_first_blocks` searches at most so many tokens, and tries at most so many shorter requests.
_MOST_TOKENS, _MOST_TRIED = 2**16, 8
# More would be too narrow to distinguish, or too many for a browser.
_MOST_STRETCHES, _MOST_LAYERS, _MOST_RIBBONS, _MOST_LABELS, _MOST_KEYS = 200, 3, 256, 16, 12


def table_svg(
    table: DescriptorTable, request: TransferRequest | None = None, group: str | None = None
) -> str:
    """Draw one block of both caches of *table*, and the runs between them, as SVG text.

    The picture shows as many layers and tokens as fit. If the two ranks exchange nothing, it
    contains text only.

    Args:
        table: The descriptor table of two ranks.
        request: Draw the first blocks that share tokens of this request. By default, the first
            block of each cache.
        group: The group of the consumer to draw. By default, the first that the ranks exchange.

    Returns:
        The text of an SVG file.

    Raises:
        SpecError: If *table* is not a table, the ranks do not exchange *group*, or *request* does
            not fit the table.

    >>> import kvspec
    >>> layer = kvspec.FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=2, head_size=64, dtype="bfloat16"
    ... )
    >>> group = kvspec.KVCacheGroup(name="attention", layers=("layers.0",), spec=layer)
    >>> engine = kvspec.EngineSpec(groups=(group,))
    >>> cache, _storage = kvspec.allocate(engine, kvspec.RankId(), num_blocks=2)
    >>> table = kvspec.build_table(kvspec.plan_transfer(engine, engine), cache, cache)
    >>> "one block of 1 layer: 1 run of 8 KiB, 8 KiB in all" in table_svg(table)
    True
    """
    instance("table", table, DescriptorTable)
    if request is not None:
        instance("request", request, TransferRequest)
    if group is None and not table.entries:
        title = f"{table.producer.rank} → {table.consumer.rank}"
        return note_svg("table", title, ["these two ranks exchange nothing"])
    edge = _edge(table, group)
    of_edge = attrs.evolve(table, entries=tuple(e for e in table.entries if e.edge is edge))
    requests = _first_blocks(of_edge, edge) if request is None else iter((request,))
    attempts = (of_edge.descriptors(attempt).astype(np.int64) for attempt in requests)
    runs = next((rows for rows in attempts if len(rows)), np.empty((0, 3), np.int64))
    windows, layers, by_unit = _fit(edge, _windows(of_edge, edge, runs))
    axes = [Axis.of(w.stretches(layers, by_unit=by_unit), MARGIN, _WIDTH) for w in windows]
    producer = Side("Producer", windows[0], edge.producer_group, axes[0])
    consumer = Side("Consumer", windows[1], edge.group, axes[1])
    subject = "one block" if request is None else "the whole request"
    facts = f"{_lengths(runs)}, {nbytes(int(runs[:, 2].sum()))} in all"
    if request is None and not len(runs):
        facts = "nothing of it moves"
    facts = f"{subject} of {counted(len(edge.layers), 'layer')}: {facts}"
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


@attrs.frozen
class _Pool:
    """The blocks of one group of one rank that a request may use.

    Attributes:
        block_size: Tokens of one block of the request's table.
        blocks: The longest range of block ids without the null block.
        context: The tokens that the rank owns.
    """

    block_size: int
    blocks: range
    context: BlockCyclic

    @staticmethod
    def of(cache: RankCache, name: str) -> _Pool:
        """Return the pool of group *name*."""
        engine, group = cache.engine, cache.engine.group(name)
        region = next(region for region in cache.regions if region.group == name)
        count, null = region.num_blocks // group.kernel_blocks_per_block, engine.null_block
        usable = (range(count),) if null is None else (range(null), range(null + 1, count))
        context = engine.context(group, cache.rank)
        return _Pool(engine.virtual_block(group), max(usable, key=len), context)


def _first_blocks(table: DescriptorTable, edge: Edge) -> Iterator[TransferRequest]:
    """Yield the requests to try, from the longest to the shortest. See the module docstring."""
    pools = _Pool.of(table.producer, edge.producer_group), _Pool.of(table.consumer, edge.group)
    if not all(pool.blocks for pool in pools):
        return  # One pool contains only the null block.
    per_token = _has_tokens(table, edge)
    # A recurrent state has one block for all tokens, so one token is enough.
    counts = _token_counts(edge, *pools) if per_token else [_first_token(edge, pools[1]) + 1]
    for count in counts:
        producer, consumer = (
            BlockTable(pool.blocks[: -(-count // pool.block_size) if per_token else 1])
            for pool in pools
        )
        yield TransferRequest(
            request_id="first block",
            num_tokens=count,
            encoder_tokens=count,
            producer_blocks={edge.producer_group: producer},
            consumer_blocks={edge.group: consumer},
        )


def _first_token(edge: Edge, consumer: _Pool) -> int:
    """Return the first token of the first block that this producer rank serves."""
    return edge.slices[0].stripe.first * consumer.block_size


def _token_counts(edge: Edge, producer: _Pool, consumer: _Pool) -> Iterator[int]:
    """Yield numbers of tokens: the larger block, then requests that end with an owned token."""
    first, pools = _first_token(edge, consumer), (producer, consumer)
    longest = first + max(pool.block_size for pool in pools)
    longest = min(longest, *(pool.block_size * len(pool.blocks) for pool in pools))
    yield longest
    tokens = np.arange(max(first, longest - _MOST_TOKENS), longest)
    owned = producer.context.owns(tokens) & consumer.context.owns(tokens)
    owned &= edge.slices[0].stripe.holds(tokens // consumer.block_size)
    yield from (tokens[owned][::-1][:_MOST_TRIED] + 1).tolist()


def _windows(table: DescriptorTable, edge: Edge, runs: Ints) -> list[Window]:
    """Return the blocks of both sides that contain the first run, from its first token on."""
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
    """Return *window* reduced to its first *count* tokens."""
    start = window.tokens.start
    return attrs.evolve(window, tokens=range(start, start + count))


def _fit(edge: Edge, windows: list[Window]) -> tuple[list[Window], tuple[str, ...], bool]:
    """Reduce tokens, then layers, until the stretches are wide enough to distinguish.

    Returns:
        The windows, the drawn layers, and whether each stretch shows one unit only.
    """

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
    parts = list(dict.fromkeys(s.part for side in sides for s in side.axis.stretches))
    for side, y, (heading, distances, names) in (
        (sides[0], top, (-54, -26, -9)),
        (sides[1], bottom, (BAR + 58, BAR + 32, BAR + 15)),
    ):
        side.heading(canvas, y + heading)
        side.distances(canvas, y + distances)
        side.layers(canvas, y + names)
        side.bar(canvas, y, parts)
    y, width = bottom + BAR + 86, _WIDTH + 2 * MARGIN
    nouns = f"{_noun(parts)}s of the model"
    canvas.text(MARGIN, y, f"{drawn} · colours and numbers: {nouns}", fill=FAINT)
    y = canvas.keys(y + 12, _keys(sides, parts), width)
    return canvas.svg(width, y + 12, f"kvspec table: {title}")


def _lengths(runs: Ints) -> str:
    """Return the number and the lengths of *runs* as a text."""
    if not len(runs):
        return "0 runs"
    least, most = int(runs[:, 2].min()), int(runs[:, 2].max())
    size = nbytes(least) if least == most else f"{nbytes(least)} to {nbytes(most)}"
    return f"{counted(len(runs), 'run')} of {size}"


def _ribbons(
    canvas: Canvas, sides: tuple[Side, Side], runs: Ints, rows: tuple[float, float]
) -> str:
    """Draw the runs between the blocks. Return a text with their number and lengths."""
    source, target = (side.axis for side in sides)
    # The number of its run stays with each ribbon: a run may be cut into several.
    drawn = np.column_stack([runs, np.arange(len(runs))])
    for column, axis in enumerate((source, target)):
        drawn = axis.cut(drawn, column)
    numbers = np.unique(drawn[:, 3])
    step = -(-len(numbers) // _MOST_RIBBONS) or 1
    labels: list[tuple[float, str]] = []
    for upper_start, lower_start, length, number in drawn[
        np.isin(drawn[:, 3], numbers[::step])
    ].tolist():
        size, units = int(runs[number, 2]), target.units(lower_start, length)
        fill = colour(units.pop()) if len(units) == 1 else LINE
        upper, lower = source.span(upper_start, length), target.span(lower_start, length)
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
    every = f", 1 of {step} drawn" if step > 1 else ""
    return f"{_lengths(runs[numbers])} between the drawn bytes{every}"


def _noun(parts: Sequence[str]) -> str:
    """Return "head" if the units of all *parts* are heads, else "unit"."""
    return "head" if all(unit_noun(part) == "head" for part in parts) else "unit"


def _keys(sides: tuple[Side, Side], parts: Sequence[str]) -> Iterator[Key]:
    """Yield the legend: a pattern for each part, and a colour for each unit."""
    for number, part in enumerate(parts):
        yield HOLLOW, hatch(number), part
    drawn = [stretch.units for side in sides for stretch in side.axis.stretches]
    units = sorted({own.start for own in drawn if len(own) == 1})
    if len(units) <= _MOST_KEYS:
        for unit in units:
            yield units_colour(range(unit, unit + 1)), "", f"{_noun(parts)} {unit}"
