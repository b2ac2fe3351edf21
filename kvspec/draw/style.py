"""Define what all pictures share: colours, patterns, sizes in pixels, and short texts.

Invariant: `width_of` returns at least the width of each text.
"""

from __future__ import annotations

from collections.abc import Iterable

# The colours of Okabe and Ito, which colour-blind readers can distinguish, without black and
# yellow.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
INK, FAINT, LINE, BAND, PAPER = "#1B1F24", "#57606A", "#8C959F", "#F3F5F7", "#FFFFFF"
# SHADE fills the panel of a rank without reads. HOLLOW fills a cell that contains several units.
SHADE, HOLLOW = "#ECEFF2", "#D5DADF"
# Sizes of letters, in pixels.
SMALL, NORMAL, MEDIUM, LARGE = 11.0, 12.0, 14.0, 18.0
# Pixels between the picture and its border.
MARGIN = 28.0
# Opacity of a colour below letters: the letters must stay readable.
FADED = 0.45
# Letters of a line whose width does not depend on the picture.
LONGEST = 90
# For each pattern: its size, its path, and the width of its stroke, all in pixels. Patterns
# distinguish the kinds of parts in a black and white print.
PATTERNS = {
    "slope": (6, "M0 6L6 0", 0.8),
    "dots": (6, "M2 3H4", 2.0),
    "cross": (6, "M0 0L6 6M0 6L6 0", 0.8),
    "fall": (6, "M0 0L6 6", 0.8),
}
_NARROW, _WIDE = frozenset("iljtfrI.,:;|'!()[] /-·"), frozenset("mwMW→←%+=@…")


def colour(index: int) -> str:
    """Return the colour of producer or unit *index*. Colours repeat after the palette."""
    return PALETTE[index % len(PALETTE)]


def hatch(index: int) -> str:
    """Return the pattern of part *index*. Patterns repeat after the last."""
    return ("", *PATTERNS)[index % (len(PATTERNS) + 1)]


def width_of(text: str, size: float = NORMAL, *, bold: bool = False) -> float:
    """Return an upper bound of the width of *text*, in pixels, in any of the fonts.

    >>> round(width_of("tp0", 10.0), 1)
    17.4
    """
    # The factors are shares of the letter size. They are those of the widest font of a canvas.
    em = sum(0.42 if c in _NARROW else 1.01 if c in _WIDE else 0.66 for c in text)
    return em * size * (1.12 if bold else 1.0)


def fitting(texts: Iterable[str], room: float) -> str:
    """Return the first of *texts* that fits into *room* pixels at size `SMALL`, or ""."""
    return next((text for text in texts if width_of(text, SMALL) <= room), "")


def shortened(text: str, longest: int = LONGEST) -> str:
    """Return *text* with at most *longest* letters: a long text loses its middle.

    >>> shortened("model.layers.27", 10)
    'model.….27'
    """
    if len(text) <= longest:
        return text
    head = (longest - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def range_text(numbers: range) -> str:
    r"""Return the only number of *numbers*, or the first and the last of several.

    >>> range_text(range(4, 5)), range_text(range(4, 8)) == "4\N{EN DASH}7"
    ('4', True)
    """
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first}\N{EN DASH}{last}"


def unit_noun(*parts: str) -> str:
    """Return the noun for the units of *parts*: "head" for keys and values, else "unit".

    A name may begin with its layer, and scales belong to the heads of their part.

    >>> unit_noun("k", "layers.0/v_scale"), unit_noun("k", "conv_x")
    ('head', 'unit')
    """
    kinds = {part.rpartition("/")[2].partition("_")[0] for part in parts}
    return "head" if kinds <= {"k", "v"} else "unit"
