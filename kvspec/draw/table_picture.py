"""Draw a descriptor table: the bytes of one block on both sides, and the runs between them.

Invariant: the ribbons are descriptors of the table, cut to the drawn bytes. Each side has one
scale. A text or a mark shows each omission. Labels appear only if they have enough room.

How it works:
    1. Without a request, `_first_blocks` finds a short request whose bytes move.
    2. `_moved` finds the block of the first descriptor on each side, and its token in it.
    3. `Window.side_runs` cuts each block into *runs*: contiguous bytes of one part of one
       layer. `_fit` reduces tokens and layers until there are few enough runs.
    4. `_axis` joins adjacent runs to ranges and places the ranges side by side. A gap in
       memory becomes a gap of fixed width.
    5. `_cut` cuts the descriptors to the drawn bytes of each side. Each rest is a ribbon.

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

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import attrs
import numpy as np

from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.table import DescriptorTable
from kvspec.draw import style
from kvspec.draw.canvas import Canvas, LeftRight, LegendItem, note_svg
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError, counted, nbytes
from kvspec.inputs import instance
from kvspec.memory.rank_cache import Memory, RankCache, Region
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge

# In pixels: the width and height of both bars, and the distance between them.
_WIDTH, _BAR, _BETWEEN = 960.0, 34.0, 170.0
_RIGHT = style.MARGIN + _WIDTH
# In pixels: the width of a gap. All gaps together use at most half of the bar.
_GAP = 30.0
# `_first_blocks` searches at most so many tokens, and tries at most so many shorter requests.
_MOST_TOKENS, _MOST_TRIED = 2**16, 8
# More would be too narrow to distinguish, or too many for a browser.
_MOST_RUNS, _MOST_UNITS, _MOST_LAYERS = 200, 64, 3
_MOST_RIBBONS, _MOST_KEYS = 256, 12


DrawnAxis = list["DrawnRange"]
"""The drawn bytes of one side, from left to right."""


@attrs.frozen
class SideRun:
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
    """A block of one side of the table, from its first token that is drawn.

    Attributes:
        name: Name of the side.
        cache: The cache of the side.
        group: The group of the cache.
        block: Number of the block in memory.
        first: The first token of the block that is drawn. A recurrent state is drawn whole.
    """

    name: str
    cache: RankCache
    group: KVCacheGroup
    block: int = 0
    first: int = 0

    @property
    def table_tokens(self) -> int:
        """Tokens of one block of the request's block table, or rows of its ring."""
        spec = self.group.spec
        return spec.block_size if spec.is_ring else self.cache.engine.virtual_block(self.group)

    def usable_blocks(self) -> range:
        """Return the longest range of ids of the block table without the null block."""
        region = next(own for own in self.cache.regions if own.group == self.group.name)
        count = region.num_blocks // self.group.kernel_blocks_per_block
        null = self.cache.engine.null_block
        return range(count) if null is None else max(range(null), range(null + 1, count), key=len)

    def side_runs(self, layers: Sequence[str], count: int) -> list[SideRun]:
        """Return the runs of *layers* and *count* tokens, by memory and address."""
        side_runs, memories = list[SideRun](), dict[Memory, int]()
        for region in (region for region in self.cache.regions if region.layer in layers):
            home = next(m for m in self.cache.memory if 0 <= region.base - m.address < m.length)
            side_runs += self._of(region, memories.setdefault(home, len(memories)), count)
        return sorted(side_runs, key=lambda side_run: (side_run.memory, side_run.start))

    def _of(self, region: Region, memory: int, count: int) -> Iterator[SideRun]:
        """Yield the runs of one region: its chunks of content, joined if they touch.

        A run has one unit, unless the region has many.
        """
        part, units = self.cache.part_of(region)
        addresses = region.addresses()
        if part.per_token:
            size = part.tokens_per_state
            addresses = addresses[:, self.first // size : -(-(self.first + count) // size)]
        address = addresses.ravel() + self.block * region.block_stride
        packs = np.repeat(np.array(units) // part.granularity, addresses[0].size)
        order = np.argsort(address, kind="stable")
        separate = np.diff(address[order]) != region.chunk_bytes
        if region.units <= _MOST_UNITS:
            separate |= np.diff(packs[order]) != 0
        for own in np.split(order, np.flatnonzero(separate) + 1):
            start, stop = int(address[own[0]]), int(address[own[-1]]) + region.chunk_bytes
            own_packs = range(int(packs[own].min()), int(packs[own].max()) + 1)
            yield SideRun(memory, start, stop, region.layer, region.part, own_packs)


@attrs.frozen
class DrawnRange:
    """Contiguous bytes in the picture.

    Attributes:
        side_runs: Adjacent runs.
        start: Address of the first byte.
        stop: Address behind the last byte.
        left: Left edge in pixels.
        scale: Pixels a byte.
    """

    side_runs: list[SideRun]
    start: int
    stop: int
    left: float
    scale: float

    def pixels(self, start: int, stop: int) -> LeftRight:
        """Return the left and right edges of the bytes from *start* to *stop*."""
        left, right = ((at - self.start) * self.scale + self.left for at in (start, stop))
        return left, right


def _axis(side_runs: list[SideRun]) -> DrawnAxis:
    """Join adjacent *side_runs* to ranges, and place these side by side with one scale."""
    joined = [side_runs[:1]]
    for before, side_run in pairwise(side_runs):
        if (before.memory, before.stop) == (side_run.memory, side_run.start):
            joined[-1].append(side_run)
        else:
            joined.append([side_run])
    sizes = [own[-1].stop - own[0].start for own in joined]
    gap = min(_GAP, _WIDTH / 2 / len(joined))
    scale = (_WIDTH - gap * (len(joined) - 1)) / sum(sizes)
    drawn_ranges, left = list[DrawnRange](), style.MARGIN
    for own, size in zip(joined, sizes, strict=True):
        drawn_ranges.append(DrawnRange(own, own[0].start, own[-1].stop, left, scale))
        left += size * scale + gap
    return drawn_ranges


def _cut(runs: Ints, axis: DrawnAxis, column: int) -> Ints:
    """Return *runs* cut to the bytes of *axis*, with the number of their range as a new column.

    Args:
        runs: Rows that begin with (producer address, consumer address, length).
        axis: The drawn bytes of one side.
        column: The column with the addresses of this side.
    """
    rests = list[Ints]()
    for number, drawn_range in enumerate(axis):
        rest = np.insert(runs, runs.shape[1], number, axis=1)
        skip = np.maximum(drawn_range.start - runs[:, column], 0)
        rest[:, :2] += skip[:, np.newaxis]
        rest[:, 2] = np.minimum(runs[:, 2] - skip, drawn_range.stop - rest[:, column])
        rests.append(rest[rest[:, 2] > 0])
    return np.concatenate(rests)


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
    if group is None and not table.numbered_rows:
        title = f"{table.producer.rank} → {table.consumer.rank}"
        return note_svg("table", title, ["these two ranks exchange nothing"])
    edge = next((e.edge for e in table.numbered_rows if group in (None, e.edge.group)), None)
    if edge is None:
        moved = sorted({numbered.edge.group for numbered in table.numbered_rows}) or "nothing"
        raise SpecError("group", group, f"a group that these two ranks exchange: {moved}")
    of_edge = attrs.evolve(
        table, numbered_rows=tuple(e for e in table.numbered_rows if e.edge is edge)
    )
    windows = [
        Window("Producer", table.producer, table.producer.engine.group(edge.producer_group)),
        Window("Consumer", table.consumer, table.consumer.engine.group(edge.group)),
    ]
    requests = _first_blocks(edge, *windows) if request is None else iter((request,))
    attempts = (of_edge.descriptors(attempt).astype(np.int64) for attempt in requests)
    runs = next((rows for rows in attempts if len(rows)), np.empty((0, 3), np.int64))
    subject = "one block" if request is None else "the whole request"
    facts = f"{_lengths(runs)}, {nbytes(int(runs[:, 2].sum()))} in all"
    if request is None and not len(runs):
        facts = "nothing of it moves"
    facts = f"{subject} of {counted(len(edge.layers), 'layer')}: {facts}"
    return _draw(edge, [_moved(edge, own, runs, at) for at, own in enumerate(windows)], runs, facts)


def _per_token(edge: Edge, group: KVCacheGroup) -> bool:
    return any(part.per_token for part in group.spec.of_layer(edge.layers[0]).parts)


def _first_blocks(edge: Edge, producer: Window, consumer: Window) -> Iterator[TransferRequest]:
    """Yield the requests to try, from the longest to the shortest. See the module docstring."""
    stripe, sides = edge.slices[0].stripe, (producer, consumer)
    if not all(side.usable_blocks() for side in sides):
        return  # One pool contains only the null block.
    first = stripe.first * consumer.table_tokens
    if per_token := _per_token(edge, consumer.group):
        longest = first + max(side.table_tokens for side in sides)
        longest = min(longest, *(len(own.usable_blocks()) * own.table_tokens for own in sides))
        tokens = np.arange(max(first, longest - _MOST_TOKENS), longest)
        owned = stripe.holds(tokens // consumer.table_tokens)
        for side in sides:
            owned &= side.cache.engine.context(side.group, side.cache.rank).owns(tokens)
        counts = [longest, *(tokens[owned][::-1][:_MOST_TRIED] + 1).tolist()]
    else:
        counts = [first + 1]  # A recurrent state has one block for all tokens.
    for count in counts:
        grows = per_token and not consumer.group.spec.is_ring
        needed = [-(-count // side.table_tokens) if grows else 1 for side in sides]
        yield TransferRequest(
            request_id="first block",
            num_tokens=count,
            encoder_tokens=count,
            producer_blocks={producer.group.name: producer.usable_blocks()[: needed[0]]},
            consumer_blocks={consumer.group.name: consumer.usable_blocks()[: needed[1]]},
        )


def _moved(edge: Edge, window: Window, runs: Ints, column: int) -> Window:
    """Return *window* at the block and token of the first run, whose address is in *column*."""
    parts = {name for tp_slice in edge.slices for name in tp_slice.parts}
    for region in window.cache.regions if len(runs) else ():
        place = region.locate(int(runs[0, column]))
        if place and region.layer in edge.layers and region.part in parts:
            first = place[2] * window.cache.part_of(region)[0].tokens_per_state
            return attrs.evolve(window, block=place[0], first=first)
    return window


def _fit(edge: Edge, windows: list[Window]) -> tuple[int, tuple[str, ...]]:
    """Return the number of tokens and the layers to draw.

    Their runs are few enough to distinguish. The number of tokens is 0 if no part has any.
    """

    def too_many(layers: int) -> bool:
        counts = (len(own.side_runs(edge.layers[:layers], count)) for own in windows)
        return max(counts) > _MOST_RUNS

    count = 0
    if _per_token(edge, windows[1].group):
        count = min(window.group.memory_block_size - window.first for window in windows)
    # Two tokens are enough to show the order of tokens and units.
    while too_many(1) and count > 2:  # noqa: PLR2004
        count = -(-count // 2)
    layers = min(_MOST_LAYERS, len(edge.layers))
    while layers > 1 and too_many(layers):
        layers -= 1
    return count, edge.layers[:layers]


def _draw(edge: Edge, windows: list[Window], runs: Ints, facts: str) -> str:
    count, layers = _fit(edge, windows)
    axes = [_axis(window.side_runs(layers, count)) for window in windows]
    side_runs = [
        side_run for axis in axes for drawn_range in axis for side_run in drawn_range.side_runs
    ]
    parts = list(dict.fromkeys(side_run.part for side_run in side_runs))
    canvas, title = Canvas(), f"One block of {edge.group}: {edge.producer} → {edge.consumer}"
    canvas.text(style.MARGIN, style.MARGIN + 14, title, style.LARGE, font_weight="bold")
    canvas.text(style.MARGIN, style.MARGIN + 36, facts, fill=style.FAINT)
    if hidden := len(edge.layers) - len(layers):
        drawn = f"{counted(len(layers), 'layer')} drawn, … and {hidden} more"
        canvas.text(_RIGHT, style.MARGIN + 36, drawn, fill=style.FAINT, text_anchor="end")
    top = style.MARGIN + 120
    bottom = top + _BAR + _BETWEEN
    drawn = _ribbons(canvas, axes, runs, (top + _BAR, bottom))
    # Distances from the bar: of the heading, the ticks and the names of the layers.
    rows = (-54, -26, -9), (_BAR + 58, _BAR + 32, _BAR + 15)
    sides = zip(windows, axes, (top, bottom), rows, strict=True)
    for window, axis, y, (heading, ticks, names) in sides:
        _heading(canvas, window, count, y + heading)
        _ticks(canvas, axis, y + ticks)
        _layers(canvas, axis, y + names)
        _bar(canvas, window.name, axis, y, parts)
    noun = style.unit_noun(*parts)
    y, meaning = bottom + _BAR + 86, f"colours and numbers: {noun}s of the model"
    canvas.text(style.MARGIN, y, f"{drawn} · {meaning}", fill=style.FAINT)
    keys: list[LegendItem] = [
        (style.HOLLOW, style.hatch(at), part) for at, part in enumerate(parts)
    ]
    units = sorted({own.units.start for own in side_runs if len(own.units) == 1})
    if len(units) <= _MOST_KEYS:
        keys += [(style.colour(unit), "", f"{noun} {unit}") for unit in units]
    y = canvas.keys(y + 12, keys, _RIGHT + style.MARGIN)
    return canvas.svg(_RIGHT + style.MARGIN, y + 12, f"kvspec table: {title}")


def _heading(canvas: Canvas, window: Window, count: int, y: float) -> None:
    """Write the rank, the block and its layout, and which *count* tokens are drawn."""
    cache, group = window.cache, window.group
    name = f"{window.name} {cache.rank}"
    width = canvas.text(style.MARGIN, y, name, style.MEDIUM, font_weight="bold")
    words = [f"block {window.block}", f"layout {cache.engine.layout_of(group)}"]
    noun = "rows" if group.spec.is_ring else "tokens"
    if count:
        words.append(f"{group.memory_block_size} {noun} a block")
    if 0 < count < group.memory_block_size:
        words.append(f"{noun} {window.first} to {window.first + count - 1} drawn")
    canvas.text(style.MARGIN + width + 10, y, " · ".join(words), fill=style.FAINT)


def _bar(canvas: Canvas, side: str, axis: DrawnAxis, y: float, parts: Sequence[str]) -> None:
    """Draw the runs with a pattern for each part, and their units."""
    for drawn_range in axis:
        for side_run in drawn_range.side_runs:
            (left, right), units = drawn_range.pixels(side_run.start, side_run.stop), side_run.units
            canvas.rectangle(
                (left, y),
                (right - left, _BAR),
                style.hatch(parts.index(side_run.part)),
                fill=style.colour(units.start) if len(units) == 1 else style.HOLLOW,
                fill_opacity=style.FADED,
                data_side=side.lower(),
                data_layer=side_run.layer,
                data_part=side_run.part,
                data_units=style.range_text(units),
            )
    # Runs of the same unit share a label if they touch.
    for drawn_range in axis:
        for units, same_units in groupby(drawn_range.side_runs, key=lambda own: own.units):
            side_runs, text = list(same_units), style.range_text(units)
            left, right = drawn_range.pixels(side_runs[0].start, side_runs[-1].stop)
            texts = f"{style.unit_noun(side_runs[0].part)} {text}", text
            label, middle = style.fitting(texts, right - left - 3), (left + right) / 2
            canvas.text(middle, y + _BAR / 2 + 4, label, style.SMALL, text_anchor="middle")


def _layers(canvas: Canvas, axis: DrawnAxis, y: float) -> None:
    """Write the name of each layer over or under its runs."""
    placed = ((drawn_range, own) for drawn_range in axis for own in drawn_range.side_runs)
    for layer, same_layer in groupby(placed, key=lambda pair: pair[1].layer):
        pixels = [drawn_range.pixels(own.start, own.stop) for drawn_range, own in same_layer]
        left, right = pixels[0][0], pixels[-1][1]
        middle = (left + right) / 2
        names = (style.shortened(layer, most) for most in (len(layer), 24, 16, 10, 6))
        name = style.fitting(names, right - left - 8)
        half = canvas.text(middle, y, name, style.SMALL, fill=style.FAINT, text_anchor="middle") / 2
        half += 4 if name else 0
        canvas.rule((left, y - 4), (middle - half, y - 4))
        canvas.rule((middle + half, y - 4), (right, y - 4))


def _ticks(canvas: Canvas, axis: DrawnAxis, y: float) -> None:
    """Write the distance of each range from the first drawn byte of its memory, if it fits.

    Addresses would be different in each process.
    """
    origin, free = dict[int, int](), 0.0
    for drawn_range in axis:
        distance = drawn_range.start - origin.setdefault(
            drawn_range.side_runs[0].memory, drawn_range.start
        )
        label = f"+{nbytes(distance)}" if distance else "0 B"
        if not distance and len(origin) > 1:
            label = f"memory {len(origin)}"
        width = style.width_of(label, style.SMALL)
        if free <= drawn_range.left <= _RIGHT - width:
            canvas.rule((drawn_range.left, y - 9), (drawn_range.left, y + 1))
            canvas.text(drawn_range.left + 3, y, label, style.SMALL, fill=style.FAINT)
            free = drawn_range.left + width + 11


def _lengths(runs: Ints) -> str:
    """Return the number and the lengths of *runs* as a text."""
    if not len(runs):
        return "0 runs"
    least, most = int(runs[:, 2].min()), int(runs[:, 2].max())
    size = nbytes(least) if least == most else f"{nbytes(least)} to {nbytes(most)}"
    return f"{counted(len(runs), 'run')} of {size}"


def _ribbons(
    canvas: Canvas, axes: Sequence[DrawnAxis], runs: Ints, rows: tuple[float, float]
) -> str:
    """Draw the runs between the blocks. Return a text with their number and lengths."""
    # The number of its run stays with each ribbon: a run may be cut into several.
    drawn = np.column_stack([runs, np.arange(len(runs))])
    for column, axis in enumerate(axes):
        drawn = _cut(drawn, axis, column)
    numbers = np.unique(drawn[:, 3])
    step = -(-len(numbers) // _MOST_RIBBONS) or 1
    for source, target, length, number, *ends in drawn[
        np.isin(drawn[:, 3], numbers[::step])
    ].tolist():
        upper, lower = (axis[drawn_range] for axis, drawn_range in zip(axes, ends, strict=True))
        end = target + length
        touched = (own for own in lower.side_runs if own.start < end and target < own.stop)
        units = {unit for own in touched for unit in own.units}
        fill = style.colour(units.pop()) if len(units) == 1 else style.LINE
        pixels = upper.pixels(source, source + length), lower.pixels(target, end)
        canvas.ribbon(*pixels, rows, fill, data_length=int(runs[number, 2]))
    every = f", 1 of {step} drawn" if step > 1 else ""
    return f"{_lengths(runs[numbers])} between the drawn bytes{every}"
