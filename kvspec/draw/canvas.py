"""Boxes, curves and letters of all pictures, and how wide words are.

Law: the only module that imports the SVG library. Every text goes through `Canvas.text`, so that
none is smaller than `SMALL`, unescaped, or wider than was reckoned with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypedDict, Unpack

import attrs

try:
    import svg
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "pictures need svg.py, which is not installed: pip install 'kvspec[draw]'", name=error.name
    ) from error

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's colours that the colour-blind can tell apart, without black and yellow."""
DASHES = ((), (7, 3), (2, 3), (10, 3, 2, 3))
"""Lines of more producers than colours: each round of the palette is dashed otherwise."""
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
_KIB = 1024
_FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
_NARROW, _WIDE = frozenset("iljtfrI.,:;|'!()[] /-·"), frozenset("mwMW→←%+=@…")
_MARKS = {
    "slope": ("M0 6L6 0", 0.8),
    "dots": ("M2 3H4", 2.0),
    "cross": ("M0 0L6 6M0 6L6 0", 0.8),
    "fall": ("M0 0L6 6", 0.8),
    GAP: ("M0 4L4 0", 0.8),
}
"""The path of each pattern, and how thick it is."""
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})

Point = tuple[float, float]
Span = tuple[float, float]
Key = tuple[str, str, str]
"""A box of a legend: its colour, its hatch, and its meaning."""


class Style(TypedDict, total=False):
    """How a shape looks, in the words of SVG; *data*: attributes that name what it shows."""

    fill: str
    fill_opacity: float
    stroke: str
    stroke_width: float
    stroke_opacity: float
    stroke_dasharray: list[float] | None
    rx: float
    data: dict[str, str]


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


def counted(count: int, noun: str) -> str:
    """Return a count in words, such as ``1 layer`` or ``80 layers``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def nbytes(size: int) -> str:
    """Return a size in bytes or, where it is whole or large, in KiB, MiB or GiB."""
    count, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < _KIB or (count % _KIB and count < 10 * _KIB):
            break
        count, unit = count / _KIB, larger
    return f"{count:,.0f} {unit}" if count == int(count) else f"{count:,.1f} {unit}"


@attrs.define
class Canvas:
    """A picture that is being drawn, from back to front."""

    elements: list[svg.Element] = attrs.field(factory=list)

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
            self.elements.append(
                svg.Text(
                    x=round(x, 1),
                    y=round(y, 1),
                    text=_escaped(text),
                    font_size=max(size, SMALL),
                    font_weight="bold" if bold else None,
                    text_anchor=None if anchor == "start" else anchor,
                    fill=fill,
                )
            )
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
        for fill, hatch, meaning in keys:
            room = 34 + width_of(meaning, SMALL) + 18
            if x > MARGIN and x + room > width - MARGIN:
                x, y = MARGIN, y + 20
            faded = FADED if fill in PALETTE else 1
            self.box(
                (x, y), (26, 14), hatch=hatch, fill=fill, fill_opacity=faded, stroke=LINE, rx=2
            )
            self.text(x + 34, y + 11, meaning, size=SMALL)
            x += room
        return y + 20 if x > MARGIN else y

    def box(
        self,
        corner: Point,
        size: Point,
        *,
        hatch: str = "",
        title: str = "",
        **style: Unpack[Style],
    ) -> None:
        """Draw a rectangle, *hatch* over its colour; *title* shows when it is pointed at."""
        (x, y), (width, height) = (
            tuple(round(number, 1) for number in pair) for pair in (corner, size)
        )
        looks = [_clean(style, title)]
        if hatch:
            looks.append({"fill": f"url(#{hatch})", "rx": style.get("rx")})
        self.elements += [svg.Rect(x=x, y=y, width=width, height=height, **look) for look in looks]

    def curve(
        self,
        start: Point,
        stop: Point,
        *,
        head: bool = False,
        title: str = "",
        **style: Unpack[Style],
    ) -> None:
        """Draw a line that leaves and arrives horizontally, perhaps with an arrow's *head*."""
        (x0, y0), (x1, y1) = start, stop
        if head:
            tip = ("M", x1 - 7, y1 - 4, "L", x1, y1, "L", x1 - 7, y1 + 4, "Z")
            self._path(tip, {"fill": style["stroke"]})
            x1 -= 6
        half = (x0 + x1) / 2
        look = _clean({"fill": "none", **style}, title)
        self._path(("M", x0, y0, "C", half, y0, half, y1, x1, y1), look)

    def ribbon(
        self, upper: Span, lower: Span, rows: Point, *, title: str = "", **style: Unpack[Style]
    ) -> None:
        """Fill between two level spans (left, right) at the heights *rows*, with S-shaped edges."""
        (a, b), (c, d), (y0, y1) = upper, lower, rows
        half = (y0 + y1) / 2
        there, back = ("C", a, half, c, half, c, y1), ("C", d, half, b, half, b, y0)
        self._path(("M", a, y0, *there, "L", d, y1, *back, "Z"), _clean(style, title))

    def rule(self, start: Point, stop: Point) -> None:
        """Draw a straight hairline."""
        self._path(("M", *start, "L", *stop), {"stroke": LINE, "stroke_width": 1})

    def _path(self, steps: Iterable[str | float], look: dict[str, Any]) -> None:
        drawn = " ".join(step if isinstance(step, str) else f"{step:.1f}" for step in steps)
        self.elements.append(svg.Path(extra={"d": drawn}, **look))

    def svg(self, width: float, height: float, title: str) -> str:
        """Return the whole picture as the text of an SVG file."""
        wide, high = round(width), round(height)
        return svg.SVG(
            width=wide,
            height=high,
            viewBox=svg.ViewBoxSpec(0, 0, wide, high),
            extra={"role": "img", "font-family": _FONT},
            elements=[
                svg.Title(text=_escaped(title)),
                svg.Defs(elements=[_pattern(name) for name in _MARKS]),
                svg.Rect(width=wide, height=high, rx=8, fill=PAPER),
                *self.elements,
            ],
        ).as_str()


def note_svg(kind: str, title: str, words: list[str]) -> str:
    """Return a small picture of words, where there is nothing to draw."""
    canvas, y = Canvas(), MARGIN + 14
    wide = canvas.text(MARGIN, y, title, size=LARGE, bold=True)
    for word in words:
        y += 22
        wide = max(wide, canvas.text(MARGIN, y, shortened(word, LONGEST), fill=FAINT))
    return canvas.svg(wide + 2 * MARGIN, y + MARGIN - 4, f"kvspec {kind}: {title}")


def _escaped(text: str) -> str:
    """Return *text* as it may stand in an element or in an attribute."""
    return "".join(c if c.isprintable() else "?" for c in text).translate(_ESCAPES)


def _clean(style: Style, title: str) -> dict[str, Any]:
    """Return *style* as svg.py takes it, names and *title* escaped."""
    look: dict[str, Any] = {**style}
    look["data"] = {name: _escaped(text) for name, text in style.get("data", {}).items()}
    look["elements"] = [svg.Title(text=_escaped(title))] if title else None
    return look


def _pattern(name: str) -> svg.Element:
    """Return a hatch: thin marks of ink over whatever colour lies below."""
    size = 4 if name == GAP else 6
    drawn, thick = _MARKS[name]
    mark = svg.Path(
        extra={"d": drawn}, fill="none", stroke=INK, stroke_opacity=0.3, stroke_width=thick
    )
    return svg.Pattern(
        id=name, width=size, height=size, patternUnits="userSpaceOnUse", elements=[mark]
    )
