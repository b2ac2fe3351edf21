"""Write SVG: the shapes and texts of a picture.

Invariant: no other module writes SVG. All texts pass through `Canvas.text`, which escapes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import attrs

from kvspec.draw import style

_FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"

Point = tuple[float, float]
LeftRight = tuple[float, float]
# An entry of a legend: colour, pattern and meaning.
LegendItem = tuple[str, str, str]
# The value of an SVG attribute. Attributes with the values None and "" are not written.
Look = str | float | None


def element(name: str, inside: str = "", /, **look: Look) -> str:
    """Return the SVG element *name*. The text *inside* must be escaped already."""
    attributes = "".join(
        f' {key.replace("_", "-")}="{_escaped(value)}"'
        for key, value in look.items()
        if value not in {None, ""}
    )
    return f"<{name}{attributes}>{inside}</{name}>" if inside else f"<{name}{attributes}/>"


def _escaped(value: object) -> str:
    # Two digits are enough for pixels.
    text = f"{round(value, 2):g}" if isinstance(value, float) else str(value)
    # XML has no form for control characters, not even escaped.
    return escape("".join(c if c.isprintable() else "?" for c in text))


@attrs.define
class Canvas:
    """A picture in progress. Each new shape lies in front of the earlier ones.

    *look* contains SVG attributes. The attributes ``data_…`` describe the shape for programs that
    read the picture.
    """

    elements: list[str] = attrs.field(factory=list)

    def text(
        self, x: float, y: float, text: str, size: float = style.NORMAL, **look: Look
    ) -> float:
        """Write *text* with its baseline at *y*. Return an upper bound of its width."""
        if text:
            place: dict[str, Look] = {"x": x, "y": y, "font_size": size, "fill": style.INK}
            self.elements.append(element("text", _escaped(text), **place | look))
        return style.width_of(text, size, bold="font_weight" in look)

    def words(self, y: float, words: Iterable[str], width: float) -> float:
        """Write *words* with dots between them. Start a new line if *width* is used up.

        Returns:
            The baseline of the next line.
        """
        line = ""
        for word in words:
            longer = f"{line} · {word}" if line else word
            if line and style.width_of(longer) > width - 2 * style.MARGIN:
                self.text(style.MARGIN, y, line, fill=style.FAINT)
                y, longer = y + 18, word
            line = longer
        self.text(style.MARGIN, y, line, fill=style.FAINT)
        return y + 18

    def keys(self, y: float, keys: Iterable[LegendItem], width: float) -> float:
        """Draw a legend: a rectangle and a meaning for each of *keys*.

        Returns:
            The top of the next line.
        """
        x = style.MARGIN
        for fill, pattern, meaning in keys:
            room = 52 + style.width_of(meaning, style.SMALL)
            if x > style.MARGIN and x + room > width - style.MARGIN:
                x, y = style.MARGIN, y + 20
            faded = style.FADED if fill in style.PALETTE else 1
            self.rectangle(
                (x, y), (26, 14), pattern, fill=fill, fill_opacity=faded, stroke=style.LINE, rx=2
            )
            self.text(x + 34, y + 11, meaning, style.SMALL)
            x += room
        return y + 20 if x > style.MARGIN else y

    def rectangle(self, corner: Point, size: Point, pattern: str = "", **look: Look) -> None:
        """Draw a rectangle. The *pattern* covers its colour."""
        (x, y), (width, height) = corner, size
        place: dict[str, Look] = {"x": x, "y": y, "width": width, "height": height}
        place["rx"] = look.get("rx")
        self.elements.append(element("rect", **place | look))
        if pattern:
            self.elements.append(element("rect", **place, fill=f"url(#{pattern})"))

    def curve(self, start: Point, stop: Point, stroke: str, **look: Look) -> None:
        """Draw an arrow whose two ends are horizontal."""
        (x0, y0), (x1, y1) = start, stop
        self._path(("M", x1 - 7, y1 - 4, "L", x1, y1, "L", x1 - 7, y1 + 4, "Z"), fill=stroke)
        half = (x0 + x1 - 6) / 2
        words = ("M", x0, y0, "C", half, y0, half, y1, x1 - 6, y1)
        self._path(words, fill="none", stroke=stroke, stroke_width=1.8, **look)

    def ribbon(
        self, upper: LeftRight, lower: LeftRight, rows: Point, colour: str, **look: Look
    ) -> None:
        """Fill the area between two horizontal lines (left, right) at the heights *rows*.

        Its left and right edges are S-shaped.
        """
        (a, b), (c, d), (y0, y1) = upper, lower, rows
        half = (y0 + y1) / 2
        there, back = ("C", a, half, c, half, c, y1), ("C", d, half, b, half, b, y0)
        words = ("M", a, y0, *there, "L", d, y1, *back, "Z")
        self._path(words, fill=colour, fill_opacity=0.38, stroke=colour, stroke_width=0.5, **look)

    def rule(self, start: Point, stop: Point) -> None:
        """Draw a thin straight line."""
        self._path(("M", *start, "L", *stop), stroke=style.LINE)

    def _path(self, words: Iterable[str | float], **look: Look) -> None:
        drawn = " ".join(
            drawn_word if isinstance(drawn_word, str) else f"{drawn_word:.1f}"
            for drawn_word in words
        )
        self.elements.append(element("path", d=drawn, **look))

    def svg(self, width: float, height: float, title: str) -> str:
        """Return the picture as the text of an SVG file."""
        size: dict[str, Look] = {"width": round(width), "height": round(height)}
        patterns = (_pattern(name, *mark) for name, mark in style.PATTERNS.items())
        inside = [
            element("title", _escaped(title)),
            element("defs", "".join(patterns)),
            element("rect", rx=8, fill=style.PAPER, **size),
            *self.elements,
        ]
        look = size | {"viewBox": f"0 0 {width:.0f} {height:.0f}", "role": "img"}
        look["xmlns"] = "http://www.w3.org/2000/svg"
        return element("svg", "".join(inside), font_family=_FONT, **look)


def note_svg(kind: str, title: str, words: Iterable[str]) -> str:
    """Return a small picture of texts, for a plan or table that moves nothing."""
    canvas, y = Canvas(), style.MARGIN + 14
    width = canvas.text(style.MARGIN, y, title, style.LARGE, font_weight="bold")
    for word in words:
        y += 22
        width = max(width, canvas.text(style.MARGIN, y, style.shortened(word), fill=style.FAINT))
    return canvas.svg(width + 2 * style.MARGIN, y + 24, f"kvspec {kind}: {title}")


def _pattern(name: str, size: int, drawn: str, thick: float) -> str:
    """Return the definition of a pattern: thin strokes over any colour."""
    mark = element("path", d=drawn, stroke=style.INK, stroke_opacity=0.3, stroke_width=thick)
    return element("pattern", mark, id=name, width=size, height=size, patternUnits="userSpaceOnUse")
