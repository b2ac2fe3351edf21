"""Names of cache layouts.

Invariant: a layout is an order of the letters L B H N C and optionally K. The first letter is the
outermost axis, and C is the last letter.

How it works:
    A layout is the order of the axes in memory. In `LBNHC`, each layer has its own memory (L), with
    one block after the other (B). A block contains its tokens (N), a token its heads (H), and a
    head its content (C): one key and one value. vLLM's names `NHD` and `HND` describe the inner
    axes only:

    vLLM     letters    memory of one layer
    -------  ---------  ----------------------------------
    `NHD`    `LBNHC`    blocks, tokens, heads, elements
    `HND`    `LBHNC`    blocks, heads, tokens, elements

    The letter K separates keys and values into planes: `LKBNHC` has all keys of a layer before all
    values. Without K, the value of a head follows its key.

        >>> layout_letters("NHD"), layout_letters("LKBNHC")
        ('LBNHC', 'LKBNHC')
"""

from __future__ import annotations

from kvspec.errors import SpecError

# The axis of each letter. K is optional.
LETTERS = {
    "L": "layers",
    "B": "blocks",
    "K": "K/V planes",
    "H": "heads (units)",
    "N": "states (tokens of a block)",
    "C": "content bytes",
}

# The layouts that known engines use. Any other order with C as its last letter is valid too.
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

# Values of vLLM's `VLLM_KV_CACHE_LAYOUT`.
_LAYOUT_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}


def without_alias(layout: object) -> object:
    """Return the letters of an alias (`NHD`, `HND`). Return any other value unchanged."""
    return _LAYOUT_ALIASES.get(layout, layout) if isinstance(layout, str) else layout


def layout_letters(layout: object, field: str = "layout") -> str:
    """Return the letters of a layout, the outermost first.

    Args:
        layout: The letters, or an alias.
        field: Name of the argument for the error.

    Raises:
        SpecError: If a letter is missing, unknown or repeated, or C is not the last one.

    >>> layout_letters("HND")
    'LBHNC'
    """
    name = without_alias(layout)
    requirement = "the letters L, B, H, N, C, optionally K, each once, outermost first, C last"
    if not isinstance(name, str) or sorted(name.replace("K", "", 1)) != sorted("LBHNC"):
        raise SpecError(field, layout, f"{requirement}, such as {', '.join(NAMED_LAYOUTS)}")
    # The content of one head and token is the smallest unit that moves, so it must be contiguous.
    if not name.endswith("C"):
        raise SpecError(field, layout, f"{requirement}: content is contiguous in every layout")
    return name
