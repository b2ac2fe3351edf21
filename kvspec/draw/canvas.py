"""Shapes, letters and colours of all pictures.

Law: the only module that imports the SVG library. Every text goes through `Canvas.text`, so that
none is smaller than `SMALL`, unescaped, or wider than was reckoned with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

try:
    import svg
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "pictures need svg.py, which is not installed: pip install 'kvspec[draw]'", name=error.name
    ) from error

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's colours that the colour-blind can tell apart, without black and yellow."""
DASHES: tuple[tuple[int, ...], ...] = ((), (7, 3), (2, 3), (10, 3, 2, 3))
"""Lines of more producers than colours: each round of the palette is dashed otherwise."""
INK, FAINT, LINE, BAND, PAPER = "#1B1F24", "#57606A", "#8C959F", "#F3F5F7", "#FFFFFF"
SMALL, NORMAL, LARGE = 11.0, 12.0, 18.0
"""Sizes of letters, in pixels."""
SHADE, HOLLOW = "#ECEFF2", "#D5DADF"
"""Greys of a rank that nobody reads, and of cells that stand for no one unit."""
HATCHES = ("", "slope", "dots", "cross", "fall")
"""Patterns over a colour, so that kinds of parts can be told apart without it."""
DASH = "\N{EN DASH}"
"""Between the first and the last of several."""
_KIB = 1024
_FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
_NARROW, _WIDE = frozenset("iljtfrI.,:;|'!()[] /-·"), frozenset("mwMW→←%+=@…")

Anchor = Literal["start", "middle", "end"]


def width_of(text: str, size: float = NORMAL, *, bold: bool = False) -> float:
    """Return at least how many pixels wide *text* is in the widest of the fonts."""
    em = sum(0.42 if c in _NARROW else 1.01 if c in _WIDE else 0.66 for c in text)
    return em * size * (1.12 if bold else 1.0)


def escaped(text: str) -> str:
    """Return *text* as it may stand in an element or in an attribute."""
    for mark, told in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(mark, told)
    return "".join(c if c.isprintable() else "?" for c in text)


def colour(index: int) -> str:
    """Return the colour of producer, unit or layer *index*."""
    return PALETTE[index % len(PALETTE)]


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
    found, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if found < _KIB or (found % _KIB and found < 10 * _KIB):
            break
        found, unit = found / _KIB, larger
    return f"{found:,.0f} {unit}" if found == int(found) else f"{found:,.1f} {unit}"


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
        anchor: Anchor = "start",
        bold: bool = False,
    ) -> float:
        """Write *text* with its baseline at *y*; return how wide it is at most."""
        if not text:
            return 0.0
        self.elements.append(
            svg.Text(
                x=round(x, 1),
                y=round(y, 1),
                text=escaped(text),
                font_size=max(size, SMALL),
                font_weight="bold" if bold else None,
                text_anchor=None if anchor == "start" else anchor,
                fill=fill,
            )
        )
        return width_of(text, size, bold=bold)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        opacity: float | None = None,
        stroke: str | None = None,
        stroke_width: float = 1,
        radius: float | None = None,
        dash: Sequence[int] = (),
        hatch: str = "",
        data: Mapping[str, str] | None = None,
        title: str = "",
    ) -> None:
        """Draw a rectangle, *hatch* over its colour; *title* shows when it is pointed at."""
        place = (round(x, 1), round(y, 1), round(width, 1), round(height, 1))
        self.elements.append(
            svg.Rect(
                x=place[0],
                y=place[1],
                width=place[2],
                height=place[3],
                rx=radius,
                fill=fill,
                fill_opacity=opacity,
                stroke=stroke,
                stroke_width=stroke_width if stroke else None,
                stroke_dasharray=[*dash] or None,
                data=_data(data),
                elements=_titled(title),
            )
        )
        if hatch:
            self.elements.append(
                svg.Rect(
                    x=place[0],
                    y=place[1],
                    width=place[2],
                    height=place[3],
                    rx=radius,
                    fill=f"url(#{hatch})",
                )
            )

    def curve(
        self,
        start: tuple[float, float],
        stop: tuple[float, float],
        *,
        stroke: str,
        width: float = 1.8,
        dash: Sequence[int] = (),
        opacity: float = 0.9,
        data: Mapping[str, str] | None = None,
        title: str = "",
    ) -> None:
        """Draw a line that leaves and arrives horizontally."""
        half = (start[0] + stop[0]) / 2
        points = (*start, half, start[1], half, stop[1], *stop)
        x0, y0, x1, y1, x2, y2, x3, y3 = (round(each, 1) for each in points)
        self.elements.append(
            svg.Path(
                d=[svg.M(x0, y0), svg.C(x1, y1, x2, y2, x3, y3)],
                fill="none",
                stroke=stroke,
                stroke_width=width,
                stroke_opacity=opacity,
                stroke_dasharray=[*dash] or None,
                data=_data(data),
                elements=_titled(title),
            )
        )

    def ribbon(
        self,
        top: tuple[float, float, float],
        bottom: tuple[float, float, float],
        *,
        fill: str,
        data: Mapping[str, str] | None = None,
        title: str = "",
    ) -> None:
        """Fill between two level spans, each (left, right, y), with an S-shaped edge."""
        (a, b, y0), (c, d, y1) = (tuple(round(each, 1) for each in side) for side in (top, bottom))
        half = round((y0 + y1) / 2, 1)
        path: list[svg.PathData] = [
            svg.M(a, y0),
            svg.C(a, half, c, half, c, y1),
            svg.L(d, y1),
            svg.C(d, half, b, half, b, y0),
            svg.Z(),
        ]
        self.elements.append(
            svg.Path(
                d=path,
                fill=fill,
                fill_opacity=0.38,
                stroke=fill,
                stroke_width=0.5,
                data=_data(data),
                elements=_titled(title),
            )
        )

    def rule(self, x0: float, y0: float, x1: float, y1: float, *, stroke: str = LINE) -> None:
        """Draw a straight hairline."""
        self.elements.append(
            svg.Line(
                x1=round(x0, 1),
                y1=round(y0, 1),
                x2=round(x1, 1),
                y2=round(y1, 1),
                stroke=stroke,
                stroke_width=1,
            )
        )

    def arrow(self, x: float, y: float, *, fill: str) -> None:
        """Draw the head of an arrow that points right to (x, y)."""
        path: list[svg.PathData] = [svg.M(x - 7, y - 4), svg.L(x, y), svg.L(x - 7, y + 4), svg.Z()]
        self.elements.append(svg.Path(d=path, fill=fill))

    def svg(self, width: float, height: float, title: str) -> str:
        """Return the whole picture as the text of an SVG file."""
        wide, high = round(width), round(height)
        return svg.SVG(
            width=wide,
            height=high,
            viewBox=svg.ViewBoxSpec(0, 0, wide, high),
            extra={"role": "img", "font-family": _FONT},
            elements=[
                svg.Title(text=escaped(title)),
                svg.Defs(elements=_patterns()),
                svg.Rect(width=wide, height=high, rx=8, fill=PAPER),
                *self.elements,
            ],
        ).as_str()


def _data(data: Mapping[str, str] | None) -> dict[str, str] | None:
    return {name: escaped(value) for name, value in data.items()} if data else None


def _titled(title: str) -> list[svg.Element] | None:
    return [svg.Title(text=escaped(title))] if title else None


def _patterns() -> list[svg.Element]:
    """Return the hatches: thin marks of ink over whatever colour lies below."""
    paths = {
        "slope": "M0 6L6 0",
        "fall": "M0 0L6 6",
        "cross": "M0 0L6 6M0 6L6 0",
        "gap": "M0 4L4 0",
    }
    made: list[svg.Element] = [
        svg.Pattern(
            id=name,
            width=6 if name != "gap" else 4,
            height=6 if name != "gap" else 4,
            patternUnits="userSpaceOnUse",
            elements=[
                svg.Path(
                    extra={"d": path}, fill="none", stroke=INK, stroke_opacity=0.3, stroke_width=0.8
                )
            ],
        )
        for name, path in paths.items()
    ]
    dot = svg.Circle(cx=2.5, cy=2.5, r=0.9, fill=INK, fill_opacity=0.35)
    made.append(
        svg.Pattern(id="dots", width=5, height=5, patternUnits="userSpaceOnUse", elements=[dot])
    )
    return made
