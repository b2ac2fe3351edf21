"""Draw a transfer plan: the ranks of both engines, and the units that move between them.

Invariant: each rank is one panel, and each slice of each edge is one curve between two panels. The
texts at both ends of a curve name its ranks, so the colour of the curve adds no fact.

How it works:
    `_scene` selects the content of the picture: panels, their lines, and the reads between them.
    `Column` computes the places, and `plan_svg` draws. For TP 4 to TP 3 and 8 heads, a scene has:

        producer panel   line           consumer panel   lines
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
from kvspec.draw import style
from kvspec.draw.canvas import Canvas, note_svg
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError, counted, nbytes
from kvspec.inputs import instance
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.stripes import Stripe
from kvspec.plan.plan import TransferPlan

# A line with more cells shows the range of its units as one cell. A line with more consumers
# shows the first, the last and the number of them.
_MOST_CELLS, _MOST_READERS = 8, 3
# In pixels: the height of a line, the space around the lines of a panel, the space between panels,
# and the height of a caption.
_ROW, _PAD, _PANEL_GAP, _CAPTION = 26.0, 5.0, 8.0, 22.0
# In pixels: the space for the curves, and the least width of a panel.
_MIDDLE, _NARROWEST = 280.0, 180.0
# The palette repeats after six producers. Each repetition has other dashes.
_DASHES = ("", "7 3", "2 3", "10 3 2 3")


@attrs.frozen
class PartGroup:
    """Parts with the same sharding.

    Attributes:
        name: Names of the parts, joined by "+".
        noun: The noun for one unit: "head" or "unit".
        units: Number of units in the model.
        granularity: Units are sharded in multiples of this number.
        per_token: Whether a row of the parts belongs to tokens, not to a recurrent state.
    """

    name: str
    noun: str
    units: int
    granularity: int
    per_token: bool

    @staticmethod
    def of(parts: Sequence[Part]) -> PartGroup:
        """Return the group of *parts*."""
        names, first = [part.name for part in parts], parts[0]
        noun = style.unit_noun(*names)
        return PartGroup("+".join(names), noun, first.units, first.granularity, first.per_token)


@attrs.frozen
class Read:
    """Units that one consumer rank reads from one producer rank.

    Attributes:
        stripe: The blocks that this read takes, if several producer ranks share the work.
        groups: Names of the consumer's groups.
        layers: Names of the layers of these groups.
        row_bytes: Bytes of the units in all layers: of one token, or of one recurrent state.
        number: Number of the producer rank, among those that are read. Each number has a colour
            and dashes.
    """

    consumer: RankId
    producer: RankId
    part_group: PartGroup
    units: range
    stripe: Stripe
    groups: tuple[str, ...]
    layers: tuple[str, ...]
    row_bytes: float
    number: int


@attrs.frozen
class Line:
    """One line in the panel of a rank.

    Attributes:
        words: Text behind the cells of the units.
        reads: The reads that begin or end at this line. All of them have the same producer.
    """

    part_group: PartGroup
    units: range
    words: str
    reads: tuple[Read, ...]

    @property
    def labels(self) -> list[str]:
        """The text of each cell: one head or group of channels, or the range of all."""
        size = self.part_group.granularity
        packs = range(self.units.start // size, self.units.stop // size)
        return list(map(str, packs)) if len(packs) <= _MOST_CELLS else [style.range_text(packs)]


@attrs.define(eq=False)
class RankPanel:
    """One rank: its lines, a note if it has nothing to do, and its upper edge in the picture."""

    rank: RankId
    lines: list[Line]
    note: str = ""
    top: float = 0.0

    @property
    def height(self) -> float:
        """Height in pixels."""
        return _ROW * max(len(self.lines), 1) + 2 * _PAD

    @property
    def rows(self) -> list[tuple[Line, float]]:
        """Each line with the height of its middle."""
        return [(line, self.top + _PAD + (at + 0.5) * _ROW) for at, line in enumerate(self.lines)]


@attrs.define(eq=False)
class Column:
    """One engine: its panels, and their places in pixels. Its texts determine the widths.

    Attributes:
        caption: Description of the engine.
        bands: The panels of each pipeline stage and context rank, by the caption of the band.
        cells: Distance from the left edge of a panel to the cells of units.
        words: Distance to the texts behind the cells.
        width: Width of each panel.
        left: Left edge of the panels.
    """

    name: str
    caption: str
    bands: dict[str, list[RankPanel]]
    cells: float
    words: float
    width: float
    left: float = style.MARGIN

    @property
    def panels(self) -> list[RankPanel]:
        """All panels, from top to bottom."""
        return [panel for panels in self.bands.values() for panel in panels]

    @property
    def right(self) -> float:
        """Right edge of the widest panel or text."""
        captions = (style.width_of(caption, style.SMALL) for caption in self.bands)
        return self.left + max(self.width, style.width_of(self.caption), *captions)

    def stack(self, y: float, gap: float = _PANEL_GAP) -> float:
        """Place the panels from *y* down with *gap* between them. Return the lower edge."""
        for caption, panels in self.bands.items():
            y += _CAPTION + _PAD if caption else 0
            for panel in panels:
                panel.top = y
                y += panel.height + gap
            y += _PAD + _PANEL_GAP if caption else 0
        return y - gap - (_PANEL_GAP if caption else 0)

    def spread(self, y: float, end: float) -> None:
        """Place the panels evenly from *y* to *end*."""
        extra = (end - self.stack(y)) / len(self.panels)
        self.stack(y + extra / 2, _PANEL_GAP + extra)

    def frames(self, canvas: Canvas) -> None:
        """Draw the bands with their captions behind the panels."""
        for caption, panels in self.bands.items():
            if caption:
                top = panels[0].top - _CAPTION - _PAD
                height = panels[-1].top + panels[-1].height + _PAD - top
                size = self.width + 2 * _PANEL_GAP, height
                canvas.rectangle((self.left - _PANEL_GAP, top), size, fill=style.BAND, rx=6)
                canvas.text(self.left, top + 16, caption, style.SMALL, fill=style.FAINT)


def _scene(
    plan: TransferPlan, group: str | None
) -> tuple[list[PartGroup], list[Read], tuple[Column, Column]]:
    """Return the content of the picture of *plan*, or of one group of the consumer.

    Returns:
        All kinds of parts, each of which has a pattern. Then the reads, and both engines.

    Raises:
        SpecError: If the consumer has no *group*, or the plan moves nothing of it.
    """
    if group is not None:
        plan.consumer.group(group)
    drawn = [own for own in plan.replica_groups if group in (None, own.pair.consumer.name)]
    held = [(PartGroup.of(own.parts), own.producer_sharding.ranges) for own in drawn]
    if not held:
        raise SpecError("group", group, "a group that the plan transfers")
    part_groups = list(dict.fromkeys(part_group for part_group, _ in held))
    reads = list(_reads(plan, group))
    reads.sort(key=lambda read: (part_groups.index(read.part_group), read.units.start))
    sources = [
        _source(plan, rank, reads, dict.fromkeys((own, ranges[at]) for own, ranges in held))
        for at, rank in enumerate(plan.producer.parallel.ranks)
    ]
    targets = [_target(plan, rank, reads) for rank in plan.consumer.parallel.ranks]
    left = _column("Producer", plan.producer, [own.pair.producer for own in drawn], sources)
    right = _column("Consumer", plan.consumer, [own.pair.consumer for own in drawn], targets)
    right.left += max(left.width + _MIDDLE, style.width_of(left.caption) + style.MARGIN)
    return part_groups, reads, (left, right)


def _reads(plan: TransferPlan, group: str | None) -> Iterator[Read]:
    """Yield the reads of all consumer ranks. Slices that differ only in their layers are one."""
    # The bytes of each layer, by the read that they belong to.
    reads: dict[tuple[RankId, RankId, PartGroup, range, Stripe], dict[str, float]] = {}
    homes = plan.consumer.homes
    for edge in plan.edges:
        # A state of these specs has only the rows that both sides have.
        specs = plan.pair_of(edge).specs
        for tp_slice in edge.slices if group in (None, edge.group) else ():
            units = tp_slice.global_range
            for layer in tp_slice.layers:
                parts = [part for part in specs[layer].parts if part.name in tp_slice.parts]
                key = (edge.consumer, edge.producer, PartGroup.of(parts), units, tp_slice.stripe)
                reads.setdefault(key, {})[layer] = sum(map(_row_bytes, parts)) * len(units)
    numbers = {rank: number for number, rank in enumerate(sorted({key[1] for key in reads}))}
    for key, layers in reads.items():
        groups = dict.fromkeys(homes[layer].name for layer in layers)
        yield Read(*key, tuple(groups), tuple(layers), sum(layers.values()), numbers[key[1]])


def _row_bytes(part: Part) -> float:
    """Return the bytes of one unit of *part*: of one token, or of a whole state."""
    rows = 1 / part.tokens_per_state if part.per_token else part.states
    return part.content_bytes * rows


def _source(
    plan: TransferPlan, rank: RankId, reads: list[Read], held: Iterable[tuple[PartGroup, range]]
) -> RankPanel:
    """Return the panel of a producer rank: the units that it holds, and their consumer ranks."""
    lines, note = list[Line](), ""
    reads = [read for read in reads if read.producer == rank]
    if not reads:
        first, *more = plan.notifiers(rank)
        by = "every consumer rank" if more else first
        note = "read for other groups only" if plan.targets(rank) else f"not read; released by {by}"
    for part_group, units in held:
        own = tuple(r for r in reads if r.part_group == part_group and r.units.start in units)
        names = [str(consumer) for consumer in sorted({read.consumer for read in own})]
        if len(names) > _MOST_READERS:
            names = [f"{names[0]} … {names[-1]} ({len(names)})"]
        words = f" → {', '.join(names)}" if own else ", not read here"
        if units:
            # The note of a rank takes the place of the words.
            lines.append(Line(part_group, units, "" if note else part_group.name + words, own))
    return RankPanel(rank, lines, note)


def _target(plan: TransferPlan, rank: RankId, reads: list[Read]) -> RankPanel:
    """Return the panel of a consumer rank: its reads."""
    lines = [_arrival(plan, read) for read in reads if read.consumer == rank]
    return RankPanel(rank, lines, "" if lines else "reads nothing")


def _arrival(plan: TransferPlan, read: Read) -> Line:
    """Return the line of *read*: its producer and size, and its blocks and layers if not all."""
    row = "token" if read.part_group.per_token else "state"
    words = [f"{read.part_group.name} ← {read.producer}", f"{nbytes(read.row_bytes)} a {row}"]
    if not read.stripe.whole:
        words.append(str(read.stripe))
    context = plan.producer.context(plan.producer.homes[read.layers[0]], read.producer)
    if context.size > 1 and read.part_group.per_token:
        words.append(f"context {context.rank}")
    groups, stage = map(plan.consumer.group, read.groups), read.consumer.pp
    if any(set(plan.consumer.layers_at(own, stage)).difference(read.layers) for own in groups):
        words.append(_layers(read.layers))
    return Line(read.part_group, read.units, ", ".join(words), (read,))


def _column(
    name: str, engine: EngineSpec, groups: list[KVCacheGroup], panels: list[RankPanel]
) -> Column:
    """Return one engine, with a band for each pipeline stage and context rank."""
    bands: dict[str, list[RankPanel]] = {}
    parallel, layers = engine.parallel, engine.by_stage(engine.stage_of)
    for panel in sorted(
        panels, key=lambda panel: (panel.rank.pp, parallel.context(panel.rank).rank)
    ):
        words: list[str] = []
        context = parallel.context(panel.rank)
        if parallel.pp_size > 1:
            words.append(f"stage {panel.rank.pp}: {_layers(layers.get(panel.rank.pp, ()))}")
        if context.size > 1:
            tokens = counted(context.interleave, "token")
            words.append(f"context {context.rank} of {context.size}, {tokens} at a time")
        # An engine with one stage and one context rank has one band without a caption.
        bands.setdefault(" · ".join(words), []).append(panel)
    caption = [sizes(parallel), f"layout {'/'.join(dict.fromkeys(map(engine.layout_of, groups)))}"]
    grows = (g for g in groups if not g.spec.is_ring)
    blocks = {g.spec.block_size for g in grows if any(part.per_token for part in g.own_parts)}
    if blocks:
        caption.append(f"blocks of {'/'.join(map(str, sorted(blocks)))} tokens")
    lines = [line for panel in panels for line in panel.lines]
    texts = [*(line.words for line in lines), *(panel.note for panel in panels)]
    cells = _PAD + 16 + max(style.width_of(str(panel.rank), bold=True) for panel in panels)
    behind = cells + 8 + max((sum(map(_cell, line.labels)) for line in lines), default=0)
    width = behind + max(style.width_of(text, style.SMALL) for text in texts) + 4 + _PAD
    short = style.shortened(" · ".join(caption))
    return Column(name, short, bands, cells, behind, max(width, _NARROWEST))


def _layers(names: Iterable[str]) -> str:
    """Return a short text for layers: their numbers if these are consecutive, else names."""
    layers = list(dict.fromkeys(names))
    if not layers:
        return "no layers"
    numbers = sorted({int(n.group()) for n in map(re.compile(r"\d+").search, layers) if n})
    if len(layers) == len(numbers) == numbers[-1] - numbers[0] + 1:
        noun = "layers" if layers[1:] else "layer"
        return f"{noun} {style.range_text(range(numbers[0], numbers[-1] + 1))}"
    return f"{layers[0]} and {len(layers) - 1} more" if layers[1:] else layers[0]


def plan_svg(plan: TransferPlan, group: str | None = None, *, model: str = "") -> str:
    r"""Draw *plan* as SVG text: the ranks of both engines, and the units that move between them.

    Each rank is a panel with its units. A line runs from a producer rank to each consumer rank that
    reads from it. The panel of a producer rank without reads is grey and names the consumer rank
    that releases it. A plan that moves nothing becomes a picture with text only.

    Args:
        plan: The plan to draw.
        group: Draw only this group of the consumer. All groups by default.
        model: Name of the model for the title. An engine does not have it.

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
    >>> "k+v \N{LEFTWARDS ARROW} tp0, 512 B a token" in picture
    True
    """
    instance("plan", plan, TransferPlan)
    title = " → ".join(sizes(engine.parallel) for engine in (plan.producer, plan.consumer))
    title = f"{style.shortened(model)}: {title}" if model else title
    if group is None and not plan.replica_groups:
        excluded = [
            f"excluded by the {side}: {_layers(engine.excluded)}"
            for side, engine in (("producer", plan.producer), ("consumer", plan.consumer))
            if engine.excluded
        ]
        return note_svg("plan", title, ["nothing moves", *excluded])
    canvas, (part_groups, reads, columns) = Canvas(), _scene(plan, group)
    width = columns[1].right + style.MARGIN
    canvas.text(style.MARGIN, style.MARGIN + 14, title, style.LARGE, font_weight="bold")
    top = canvas.words(style.MARGIN + 36, _facts(plan, part_groups, reads), width) + 40
    end = max(column.stack(top) for column in columns)
    for column in columns:
        canvas.text(column.left, top - 32, column.name, style.MEDIUM, font_weight="bold")
        canvas.text(column.left, top - 15, column.caption, fill=style.FAINT)
        column.spread(top, end)
        column.frames(canvas)
    _curves(canvas, *columns)
    for column in columns:
        for panel in column.panels:
            _draw_panel(canvas, part_groups, column, panel)
    nouns = dict.fromkeys(f"{part_group.noun}s" for part_group in part_groups)
    keys = f"numbers: {', '.join(nouns)} of the model", "colours and dashes: producer ranks"
    y = canvas.words(end + 32, keys, width)
    return canvas.svg(width, y + 8, f"kvspec plan: {title}")


def _cell(label: str) -> float:
    """Return the width of the cell of *label*."""
    return max(24.0, style.width_of(label) + 10)


def _facts(plan: TransferPlan, part_groups: list[PartGroup], reads: list[Read]) -> Iterator[str]:
    """Yield the facts below the title: parts, layers, replica policy and pairs of ranks."""
    for part_group in part_groups:
        size, units = part_group.granularity, counted(part_group.units, part_group.noun)
        yield f"{part_group.name}: {units}" + (f" in groups of {size}" if size > 1 else "")
    layers = {layer for read in reads for layer in read.layers}
    names = dict.fromkeys(name for read in reads for name in read.groups)
    yield f"{counted(len(layers), 'layer')} of {style.shortened(', '.join(names))}"
    yield f"replicas by “{plan.policy_name}”"
    yield f"{counted(len({(r.producer, r.consumer) for r in reads}), 'pair')} of ranks"


def _curves(canvas: Canvas, producer: Column, consumer: Column) -> None:
    """Draw a curve for each read. Curves that begin at the same line begin side by side."""
    ends = {read: y for panel in consumer.panels for line, y in panel.rows for read in line.reads}
    for line, middle in (row for panel in producer.panels for row in panel.rows):
        step = min(5.0, (_ROW - 6) / max(len(line.reads), 1))
        y = middle - (len(line.reads) - 1) / 2 * step
        # In the order of their ends, the curves of one line do not cross.
        for nth, read in enumerate(sorted(line.reads, key=ends.__getitem__)):
            canvas.curve(
                (producer.left + producer.width, y + nth * step),
                (consumer.left, ends[read]),
                style.colour(read.number),
                stroke_dasharray=_DASHES[read.number // len(style.PALETTE) % len(_DASHES)],
                data_producer=str(read.producer),
                data_consumer=str(read.consumer),
                data_parts=read.part_group.name,
                data_units=f"{read.units.start}-{read.units.stop}",
                data_groups=" ".join(read.groups),
            )


def _draw_panel(
    canvas: Canvas, part_groups: list[PartGroup], column: Column, panel: RankPanel
) -> None:
    """Draw the panel of a rank and its lines."""
    canvas.rectangle(
        (column.left, panel.top),
        (column.width, panel.height),
        fill=style.SHADE if panel.note else style.PAPER,
        stroke=style.LINE,
        rx=5,
        data_side=column.name.lower(),
        data_rank=str(panel.rank),
    )
    base, ink = panel.top + panel.height / 2 + 4.5, style.FAINT if panel.note else style.INK
    words = column.left + column.words
    canvas.text(column.left + _PAD + 4, base, str(panel.rank), fill=ink, font_weight="bold")
    canvas.text(words, base, panel.note, style.SMALL, fill=style.FAINT)
    for line, y in panel.rows:
        name, x = line.part_group.name, column.left + column.cells
        ink, fill, stroke, opacity = style.FAINT, style.HOLLOW, style.LINE, 0.6
        if line.reads:
            fill = stroke = style.colour(line.reads[0].number)
            ink, opacity = style.INK, 0.32
        for label in line.labels:
            width = _cell(label)
            canvas.rectangle(
                (x + 1, y + 3 - _ROW / 2),
                (width - 2, _ROW - 6),
                style.hatch(part_groups.index(line.part_group)),
                fill=fill,
                fill_opacity=opacity,
                stroke=stroke,
                rx=2,
                data_cell=label,
                data_parts=name,
            )
            canvas.text(x + width / 2, y + 4, label, text_anchor="middle", fill=ink)
            x += width
        canvas.text(words, y + 4, line.words, style.SMALL, fill=ink)
