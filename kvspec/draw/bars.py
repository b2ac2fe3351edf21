"""One side of the picture of a table: a bar of bytes, its layers and its axis.

Law: bytes are to scale; a label is written where it has room, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import attrs

from kvspec.draw.block import Break, Placed, Window, chunks
from kvspec.draw.canvas import (
    DASH,
    FAINT,
    HATCHES,
    HOLLOW,
    INK,
    SMALL,
    Canvas,
    colour,
    nbytes,
    shortened,
    width_of,
)

BAR = 34.0
"""Height of a bar, in pixels."""
_OUTLINED, _APART = 12.0, 92.0


@attrs.frozen
class Side:
    """One side of the picture: which block, what of it, and where."""

    name: str
    window: Window
    placed: list[Placed]
    breaks: list[Break]


def heading(canvas: Canvas, side: Side, group: str, x: float, y: float) -> None:
    """Write which block of whose cache a bar is, and how it is laid out."""
    cache = side.window.cache
    own = cache.engine.group(group)
    wide = canvas.text(x, y, f"{side.name} {cache.rank}", size=14.0, bold=True)
    words = [f"block {side.window.block}", f"layout {cache.engine.layout_of(own)}"]
    tokens = [each for each in own.spec.of_layer(own.layers[0]).parts if each.tokens_per_state]
    if tokens:
        words.append(f"{own.memory_block_size} tokens a block")
        first, count = side.window.first_state, side.window.states
        if count < own.memory_block_size // tokens[0].tokens_per_state:
            words.append(f"rows {first} to {first + count - 1} drawn")
    canvas.text(x + wide + 10, y, " · ".join(words), fill=FAINT)


def bar(canvas: Canvas, side: Side, y: float, parts: Sequence[str]) -> None:
    """Draw the stretches of a side, hatched by part, with their units."""
    for gap in side.breaks:
        if gap.true:
            canvas.box(gap.left, y + 6, gap.right - gap.left, BAR - 12, fill="url(#gap)")
        else:
            canvas.text((gap.left + gap.right) / 2, y + BAR / 2 + 3, "…", anchor="middle")
    for each in side.placed:
        own, wide = each.stretch, each.right - each.left
        units = units_text(own.units)
        canvas.box(
            each.left,
            y,
            wide,
            BAR,
            fill=units_colour(own.units),
            opacity=0.45,
            stroke=INK if wide > _OUTLINED else None,
            stroke_width=0.5,
            hatch=HATCHES[parts.index(own.part) % len(HATCHES)],
            data={"side": side.name.lower(), "layer": own.layer, "part": own.part, "units": units},
            title=f"{own.layer} {own.part}, units {units}: {nbytes(len(own))}",
        )
    for left, right, words in _labels(side.placed):
        label = next((each for each in words if width_of(each, SMALL) + 3 <= right - left), None)
        if label is not None:
            canvas.text((left + right) / 2, y + BAR / 2 + 4, label, size=SMALL, anchor="middle")


def units_text(units: range) -> str:
    """Return one unit's number, or the first and the last."""
    return str(units.start) if len(units) == 1 else f"{units.start}{DASH}{units.stop - 1}"


def units_colour(units: range) -> str:
    """Return the colour of one unit, or grey for several."""
    return colour(units.start) if len(units) == 1 else HOLLOW


def _labels(placed: Sequence[Placed]) -> Iterator[tuple[float, float, tuple[str, ...]]]:
    """Yield what may be written where: on each stretch, or on neighbours of the same unit."""
    for units, same in groupby(placed, key=lambda each: each.stretch.units):
        held, text = list(same), units_text(units)
        if all(each.right - each.left > width_of(text, SMALL) + 3 for each in held):
            for each in held:
                yield each.left, each.right, (f"{each.stretch.part} {text}", text)
            continue
        start = 0
        for at in range(1, len(held) + 1):
            if at == len(held) or held[at].left != held[at - 1].right:
                yield held[start].left, held[at - 1].right, (f"unit {text}", text)
                start = at


def layers(canvas: Canvas, side: Side, y: float) -> None:
    """Write over or under the stretches of one layer its name."""
    for layer, same in groupby(side.placed, key=lambda each: each.stretch.layer):
        held = list(same)
        left, right = held[0].left, held[-1].right
        names = (shortened(layer, most) for most in (len(layer), 24, 16, 10, 6))
        name = next((each for each in names if width_of(each, SMALL) + 8 <= right - left), None)
        if name is None:
            canvas.rule(left, y - 4, right, y - 4)
            continue
        half, middle = width_of(name, SMALL) / 2 + 4, (left + right) / 2
        canvas.rule(left, y - 4, middle - half, y - 4)
        canvas.rule(middle + half, y - 4, right, y - 4)
        canvas.text(middle, y, name, size=SMALL, fill=FAINT, anchor="middle")


def axis(canvas: Canvas, side: Side, y: float) -> None:
    """Write distances in bytes from the first byte drawn, each where it has room."""
    free, end = 0.0, max(each.right for each in side.placed)
    for x, label in sorted(_ticks(side)):
        wide = width_of(label, SMALL)
        if x >= free and x + wide <= end:
            canvas.rule(x, y - 9, x, y + 1)
            canvas.text(x + 3, y, label, size=SMALL, fill=FAINT)
            free = x + wide + 11


def _ticks(side: Side) -> Iterator[tuple[float, str]]:
    """Yield where each chunk begins in its memory, and round distances inside it."""
    memory = {each.stretch.start: each.stretch.memory for each in side.placed}
    origin: dict[object, int] = {}
    for chunk in sorted(chunks(side.placed), key=lambda each: each.left):
        own = memory[chunk.bytes.start]
        start = chunk.bytes.start - origin.setdefault(own, chunk.bytes.start)
        if start:
            yield chunk.left, f"+{nbytes(start)}"
        else:
            yield chunk.left, f"memory {len(origin)}" if len(origin) > 1 else "0 B"
        step = 64
        scale = (chunk.right - chunk.left) / len(chunk.bytes)
        while step * scale < _APART:
            step *= 2
        for at in range(start // step * step + step, start + len(chunk.bytes), step):
            yield chunk.left + (at - start) * scale, f"+{nbytes(at)}"
