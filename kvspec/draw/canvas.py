"""Write SVG: the shapes, texts, colours and patterns that all pictures share.

Invariant: no other module writes SVG. All texts pass through `Canvas.text`, which escapes them and
never makes them smaller than `SMALL`. `width_of` returns at least the width of each text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Literal

import attrs

# The colours of Okabe and Ito, which colour-blind readers can distinguish, without black and
# yellow.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
INK, FAINT, LINE, BAND, PAPER = "#1B1F24", "#57606A", "#8C959F", "#F3F5F7", "#FFFFFF"
# SHADE fills the box of a rank without reads. HOLLOW fills a box that contains several units.
SHADE, HOLLOW = "#ECEFF2", "#D5DADF"
# Sizes of letters, in pixels.
SMALL, NORMAL, MEDIUM, LARGE = 11.0, 12.0, 14.0, 18.0
# Pixels between the picture and its border.
MARGIN = 28.0
# Opacity of a colour below letters: the letters must stay readable.
FADED = 0.45
# Letters of a line whose width does not depend on the picture.
LONGEST = 90
# Patterns distinguish the kinds of parts in a black and white print.
HATCHES = ("", "slope", "dots", "cross", "fall")
# The pattern of bytes between two stretches that belong to neither of them.
GAP = "gap"
# Joins the first and the last number of a range.
DASH = "\N{EN DASH}"
_FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
_NARROW, _WIDE = frozenset("iljtfrI.,:;|'!()[] /-·"), frozenset("mwMW→←%+=@…")
# For each pattern: its size, its path, and the width of its stroke, all in pixels.
_MARKS = {
    "slope": (6, "M0 6L6 0", 0.8),
    "dots": (6, "M2 3H4", 2.0),
    "cross": (6, "M0 0L6 6M0 6L6 0", 0.8),
    "fall": (6, "M0 0L6 6", 0.8),
    GAP: (4, "M0 4L4 0", 0.8),
}

Point = tuple[float, float]
Span = tuple[float, float]
# An entry of a legend: colour, pattern and meaning.
Key = tuple[str, str, str]
# The value of an SVG attribute. Attributes with the values None and "" are not written.
Look = str | float | None


def width_of(text: str, size: float = NORMAL, *, bold: bool = False) -> float:
    """Return an upper bound of the width of *text*, in pixels, in any of the fonts.

    >>> round(width_of("tp0", 10.0), 1)
    17.4
    """
    # The factors are shares of the letter size. They are those of the widest font in `_FONT`.
    em = sum(0.42 if c in _NARROW else 1.01 if c in _WIDE else 0.66 for c in text)
    return em * size * (1.12 if bold else 1.0)


def fitting(texts: Iterable[str], room: float) -> str:
    """Return the first of *texts* that fits into *room* pixels at size `SMALL`, or ""."""
    return next((text for text in texts if width_of(text, SMALL) <= room), "")


def colour(index: int) -> str:
    """Return the colour of producer or unit *index*. Colours repeat after the palette."""
    return PALETTE[index % len(PALETTE)]


def hatch(index: int) -> str:
    """Return the pattern of part *index*. Patterns repeat after the last."""
    return HATCHES[index % len(HATCHES)]


def unit_noun(part: str) -> str:
    """Return the noun for the units of *part*: "head" for keys and values, else "unit".

    A name may begin with its layer, and scales belong to the heads of their part.

    >>> unit_noun("k"), unit_noun("layers.0/v_scale"), unit_noun("conv_x")
    ('head', 'head', 'unit')
    """
    return "head" if part.rpartition("/")[2].partition("_")[0] in {"k", "v"} else "unit"


def shortened(text: str, longest: int) -> str:
    """Return *text* with at most *longest* letters: a long text loses its middle.

    >>> shortened("model.layers.27", 10)
    'model.….27'
    """
    if len(text) <= longest:
        return text
    head = (longest - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def element(name: str, look: Mapping[str, Look], inside: str = "") -> str:
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

    A viewer shows the *title* of a shape when the mouse points at it. *look* contains SVG
    attributes. The attributes ``data_…`` describe the shape for programs that read the picture.
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
        """Write *text* with its baseline at *y*. Return an upper bound of its width."""
        if text:
            look: dict[str, Look] = {"x": x, "y": y, "font_size": max(size, SMALL), "fill": fill}
            look["font_weight"] = "bold" if bold else None
            look["text_anchor"] = None if anchor == "start" else anchor
            self.elements.append(element("text", look, _escaped(text)))
        return width_of(text, size, bold=bold)

    def words(self, y: float, words: Iterable[str], width: float) -> float:
        """Write *words* with dots between them. Start a new line if *width* is used up.

        Returns:
            The baseline of the next line.
        """
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
        """Draw a legend: a box and a meaning for each of *keys*.

        Returns:
            The top of the next line.
        """
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
        """Draw a rectangle. The *pattern* covers its colour."""
        (x, y), (width, height) = corner, size
        place: dict[str, Look] = {"x": x, "y": y, "width": width, "height": height}
        self._add("rect", place | look, title)
        if pattern:
            self._add("rect", place | {"fill": f"url(#{pattern})", "rx": look.get("rx")})

    def curve(self, start: Point, stop: Point, title: str, stroke: str, **look: Look) -> None:
        """Draw an arrow whose two ends are horizontal."""
        (x0, y0), (x1, y1) = start, stop
        self._path(("M", x1 - 7, y1 - 4, "L", x1, y1, "L", x1 - 7, y1 + 4, "Z"), fill=stroke)
        half = (x0 + x1 - 6) / 2
        steps = ("M", x0, y0, "C", half, y0, half, y1, x1 - 6, y1)
        self._path(steps, title, fill="none", stroke=stroke, **look)

    def ribbon(self, upper: Span, lower: Span, rows: Point, title: str, **look: Look) -> None:
        """Fill the area between two horizontal spans (left, right) at the heights *rows*.

        Its left and right edges are S-shaped.
        """
        (a, b), (c, d), (y0, y1) = upper, lower, rows
        half = (y0 + y1) / 2
        there, back = ("C", a, half, c, half, c, y1), ("C", d, half, b, half, b, y0)
        self._path(("M", a, y0, *there, "L", d, y1, *back, "Z"), title, **look)

    def rule(self, start: Point, stop: Point) -> None:
        """Draw a thin straight line."""
        self._path(("M", *start, "L", *stop), stroke=LINE)

    def _path(self, steps: Iterable[str | float], title: str = "", **look: Look) -> None:
        drawn = " ".join(step if isinstance(step, str) else f"{step:.1f}" for step in steps)
        self._add("path", {"d": drawn, **look}, title)

    def svg(self, width: float, height: float, title: str) -> str:
        """Return the picture as the text of an SVG file."""
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
    """Return a small picture of texts, for a plan or table that moves nothing."""
    canvas, y = Canvas(), MARGIN + 14
    width = canvas.text(MARGIN, y, title, size=LARGE, bold=True)
    for word in words:
        y += 22
        width = max(width, canvas.text(MARGIN, y, shortened(word, LONGEST), fill=FAINT))
    return canvas.svg(width + 2 * MARGIN, y + MARGIN - 4, f"kvspec {kind}: {title}")


def _pattern(name: str, size: int, drawn: str, thick: float) -> str:
    """Return the definition of a pattern: thin strokes over any colour."""
    line: dict[str, Look] = {"fill": "none", "stroke": INK, "stroke_opacity": 0.3}
    mark = element("path", {"d": drawn, **line, "stroke_width": thick})
    space: dict[str, Look] = {"id": name, "width": size, "height": size}
    return element("pattern", {**space, "patternUnits": "userSpaceOnUse"}, mark)
