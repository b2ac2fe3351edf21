"""One side of the picture of a table: a bar of bytes, its layers and its axis.

Law: bytes are to scale; a label is written where it has room, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import attrs

from kvspec.draw.block import Axis, Stretch, Window
from kvspec.draw.canvas import (
    DASH,
    FADED,
    FAINT,
    GAP,
    HOLLOW,
    INK,
    MARGIN,
    MEDIUM,
    SMALL,
    Canvas,
    colour,
    fitting,
    hatch,
    shortened,
    width_of,
)
from kvspec.errors import nbytes

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
