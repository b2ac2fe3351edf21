"""Boxes, curves and letters of all pictures, and how wide words are.

Law: the only module that writes SVG. Every text goes through `Canvas.text`, so that none is smaller
than `SMALL`, unescaped, or wider than was reckoned with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Literal

import attrs

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's colours that the colour-blind can tell apart, without black and yellow."""
INK, FAINT, LINE, BAND, PAPER = "#1B1F24", "#57606A", "#8C959F", "#F3F5F7", "#FFFFFF"
SHADE, HOLLOW = "#ECEFF2", "#D5DADF"
"""Greys of a rank that nobody reads, and of cells that stand for no one unit."""
SMALL, NORMAL, MEDIUM, LARGE = 11.0, 12.0, 14.0, 18.0
"""Sizes of letters, in pixels."""
MARGIN = 28.0
"""Pixels around every picture."""
FADED = 0.45
"""How much of a unit's colour is seen where letters stand on it."""
LONGEST = 90
"""Letters of one line that nobody has measured."""
HATCHES = ("", "slope", "dots", "cross", "fall")
"""Patterns over a colour, so that kinds of parts can be told apart without it."""
GAP = "gap"
"""The pattern of bytes that hold nothing."""
DASH = "\N{EN DASH}"
"""Between the first and the last of several."""
_FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
_NARROW, _WIDE = frozenset("iljtfrI.,:;|'!()[] /-·"), frozenset("mwMW→←%+=@…")
_MARKS = {
    "slope": (6, "M0 6L6 0", 0.8),
    "dots": (6, "M2 3H4", 2.0),
    "cross": (6, "M0 0L6 6M0 6L6 0", 0.8),
    "fall": (6, "M0 0L6 6", 0.8),
    GAP: (4, "M0 4L4 0", 0.8),
}
"""The size of each pattern, its path, and how thick it is."""

Point = tuple[float, float]
Span = tuple[float, float]
Key = tuple[str, str, str]
"""A box of a legend: its colour, its hatch, and its meaning."""
Look = str | float | None
"""An attribute of SVG; None and nothing are left out."""


def width_of(text: str, size: float = NORMAL, *, bold: bool = False) -> float:
    """Return at least how many pixels wide *text* is in the widest of the fonts."""
    em = sum(0.42 if c in _NARROW else 1.01 if c in _WIDE else 0.66 for c in text)
    return em * size * (1.12 if bold else 1.0)


def fitting(words: Iterable[str], room: float) -> str:
    """Return the first of *words* that fits small into *room* pixels, or nothing."""
    return next((text for text in words if width_of(text, SMALL) <= room), "")


def colour(index: int) -> str:
    """Return the colour of producer or unit *index*."""
    return PALETTE[index % len(PALETTE)]


def hatch(index: int) -> str:
    """Return the pattern of part *index*."""
    return HATCHES[index % len(HATCHES)]


def shortened(text: str, longest: int) -> str:
    """Return *text*, its middle left out if it is longer than *longest* letters."""
    if len(text) <= longest:
        return text
    head = (longest - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def element(name: str, look: Mapping[str, Look], inside: str = "") -> str:
    """Return one element of SVG around what is *inside*, which is escaped already."""
    told = "".join(
        f' {key.replace("_", "-")}="{_escaped(value)}"'
        for key, value in look.items()
        if value not in {None, ""}
    )
    return f"<{name}{told}>{inside}</{name}>" if inside else f"<{name}{told}/>"


def _escaped(value: object) -> str:
    text = f"{round(value, 2):g}" if isinstance(value, float) else str(value)
    return escape("".join(c if c.isprintable() else "?" for c in text))


@attrs.define
class Canvas:
    """A picture that is being drawn, from back to front.

    A shape's *title* shows when it is pointed at; *look* are attributes of SVG, ``data_…`` those
    that name what it shows.
    """

    elements: list[str] = attrs.field(factory=list)

    def _add(self, name: str, look: Mapping[str, Look], title: str = "") -> None:
        inside = f"<title>{_escaped(title)}</title>" if title else ""
        self.elements.append(element(name, look, inside))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = NORMAL,
        fill: str = INK,
        anchor: Literal["start", "middle", "end"] = "start",
        bold: bool = False,
    ) -> float:
        """Write *text* with its baseline at *y*; return how wide it is at most."""
        if text:
            look: dict[str, Look] = {"x": x, "y": y, "font_size": max(size, SMALL), "fill": fill}
            look["font_weight"] = "bold" if bold else None
            look["text_anchor"] = None if anchor == "start" else anchor
            self.elements.append(element("text", look, _escaped(text)))
        return width_of(text, size, bold=bold)

    def words(self, y: float, words: Iterable[str], width: float) -> float:
        """Write *words* between dots, in as many lines as *width* needs; return the next line."""
        line = ""
        for word in words:
            longer = f"{line} · {word}" if line else word
            if line and width_of(longer) > width - 2 * MARGIN:
                self.text(MARGIN, y, line, fill=FAINT)
                y, longer = y + 18, word
            line = longer
        self.text(MARGIN, y, line, fill=FAINT)
        return y + 18

    def keys(self, y: float, keys: Iterable[Key], width: float) -> float:
        """Draw a box with its meaning for each of *keys*; return where the next line begins."""
        x = MARGIN
        for fill, pattern, meaning in keys:
            room = 34 + width_of(meaning, SMALL) + 18
            if x > MARGIN and x + room > width - MARGIN:
                x, y = MARGIN, y + 20
            faded = FADED if fill in PALETTE else 1
            self.box((x, y), (26, 14), pattern, fill=fill, fill_opacity=faded, stroke=LINE, rx=2)
            self.text(x + 34, y + 11, meaning, size=SMALL)
            x += room
        return y + 20 if x > MARGIN else y

    def box(
        self, corner: Point, size: Point, pattern: str = "", title: str = "", **look: Look
    ) -> None:
        """Draw a rectangle, a *pattern* over its colour."""
        (x, y), (width, height) = corner, size
        place: dict[str, Look] = {"x": x, "y": y, "width": width, "height": height}
        self._add("rect", place | look, title)
        if pattern:
            self._add("rect", place | {"fill": f"url(#{pattern})", "rx": look.get("rx")})

    def curve(self, start: Point, stop: Point, title: str, stroke: str, **look: Look) -> None:
        """Draw an arrow that leaves and arrives horizontally."""
        (x0, y0), (x1, y1) = start, stop
        self._path(("M", x1 - 7, y1 - 4, "L", x1, y1, "L", x1 - 7, y1 + 4, "Z"), fill=stroke)
        half = (x0 + x1 - 6) / 2
        steps = ("M", x0, y0, "C", half, y0, half, y1, x1 - 6, y1)
        self._path(steps, title, fill="none", stroke=stroke, **look)

    def ribbon(self, upper: Span, lower: Span, rows: Point, title: str, **look: Look) -> None:
        """Fill between two level spans (left, right) at the heights *rows*, with S-shaped edges."""
        (a, b), (c, d), (y0, y1) = upper, lower, rows
        half = (y0 + y1) / 2
        there, back = ("C", a, half, c, half, c, y1), ("C", d, half, b, half, b, y0)
        self._path(("M", a, y0, *there, "L", d, y1, *back, "Z"), title, **look)

    def rule(self, start: Point, stop: Point) -> None:
        """Draw a straight hairline."""
        self._path(("M", *start, "L", *stop), stroke=LINE)

    def _path(self, steps: Iterable[str | float], title: str = "", **look: Look) -> None:
        drawn = " ".join(step if isinstance(step, str) else f"{step:.1f}" for step in steps)
        self._add("path", {"d": drawn, **look}, title)

    def svg(self, width: float, height: float, title: str) -> str:
        """Return the whole picture as the text of an SVG file."""
        size: dict[str, Look] = {"width": round(width), "height": round(height)}
        look: dict[str, Look] = {"xmlns": "http://www.w3.org/2000/svg", **size}
        look |= {"viewBox": "0 0 {width} {height}".format(**size), "role": "img"}
        inside = [
            f"<title>{_escaped(title)}</title>",
            element("defs", {}, "".join(_pattern(name, *mark) for name, mark in _MARKS.items())),
            element("rect", {**size, "rx": 8, "fill": PAPER}),
            *self.elements,
        ]
        return element("svg", {**look, "font_family": _FONT}, "".join(inside))


def note_svg(kind: str, title: str, words: list[str]) -> str:
    """Return a small picture of words, where there is nothing to draw."""
    canvas, y = Canvas(), MARGIN + 14
    wide = canvas.text(MARGIN, y, title, size=LARGE, bold=True)
    for word in words:
        y += 22
        wide = max(wide, canvas.text(MARGIN, y, shortened(word, LONGEST), fill=FAINT))
    return canvas.svg(wide + 2 * MARGIN, y + MARGIN - 4, f"kvspec {kind}: {title}")


def _pattern(name: str, size: int, drawn: str, thick: float) -> str:
    """Return a hatch: thin marks of ink over whatever colour lies below."""
    line: dict[str, Look] = {"fill": "none", "stroke": INK, "stroke_opacity": 0.3}
    mark = element("path", {"d": drawn, **line, "stroke_width": thick})
    space: dict[str, Look] = {"id": name, "width": size, "height": size}
    return element("pattern", {**space, "patternUnits": "userSpaceOnUse"}, mark)
