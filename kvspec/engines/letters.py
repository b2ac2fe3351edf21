"""The names of layouts.

Law: a layout is an order of the letters L B K H N C, outermost first, C last.
"""

from __future__ import annotations

from kvspec.errors import SpecError

LETTERS = {
    "L": "layers",
    "B": "blocks",
    "K": "K/V planes",
    "H": "heads (units)",
    "N": "states (tokens of a block)",
    "C": "content bytes",
}
"""What each letter of a layout name stands for, K being optional."""


NAMED_LAYOUTS = (
    "LBHNC",
    "LBNHC",
    "LHBNC",
    "BLHNC",
    "BLNHC",
    "BHLNC",
    "LKBNHC",
    "LBKNHC",
    "LBKHNC",
    "BLKHNC",
)
"""The layouts that engines are known to use; any other order with C last is legal too."""


_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}


def without_alias(layout: object) -> object:
    """Return the letters that an alias (``NHD``, ``HND``) stands for; anything else as it is."""
    return _ALIASES.get(layout, layout) if isinstance(layout, str) else layout


def layout_letters(layout: object, field: str = "layout") -> str:
    """Return the letters of *layout*, outermost first; raise `SpecError` unless it is legal."""
    name = without_alias(layout)
    wanted = "the letters L, B, H, N, C, optionally K, each once, outermost first, C last"
    if not isinstance(name, str) or sorted(name.replace("K", "", 1)) != sorted("LBHNC"):
        raise SpecError(field, layout, f"{wanted}, such as {', '.join(NAMED_LAYOUTS)}")
    if not name.endswith("C"):
        raise SpecError(field, layout, f"{wanted}: content is contiguous in every layout")
    return name
