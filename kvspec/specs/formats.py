"""Page formats: in which order elements lie inside a block, where it is not row by row.

Law: a format says where bytes lie, not what they mean. One that is known cuts a row's content into
equal chunks, each of all the rows of the block; an opaque one is known by its name alone, so that
only whole pages of it move, and only to the same.
"""

from __future__ import annotations

from kvspec.dtypes import itemsize
from kvspec.errors import SpecError

PLAIN, OPAQUE = "plain", "opaque:"

X_BYTES = 16
"""Bytes of one chunk where the head dimension is split by x: 16 bytes, whatever the element."""

PIECES: dict[str, dict[str, int | None]] = {
    PLAIN: {},
    "keys-transposed": {"k": None},
    "x-packed": {"k": X_BYTES, "v": None},
}
"""The formats that are known: the bytes of one chunk of each part, None for one element.

``keys-transposed``: of each head ``[size, tokens]`` keys, ``[tokens, size]`` values (vLLM's CPU
attention). ``x-packed``: ``[size / x, tokens, x]`` keys, ``[size, tokens]`` values (paged attention
of vLLM on ROCm).
"""


def page_format(value: object) -> str:
    """Return *value* if it names a format; else raise `SpecError`."""
    named = isinstance(value, str) and value.startswith(OPAQUE) and value != OPAQUE
    if isinstance(value, str) and (named or value in PIECES):
        return value
    wanted = f"one of {', '.join(PIECES)}, or {OPAQUE} and a name"
    raise SpecError("page_format", value, wanted)


def is_opaque(name: str) -> bool:
    """Whether only whole pages of the format called *name* can move."""
    return name.startswith(OPAQUE)


def chunks_of(name: str, part: str, content: int, dtype: str | None) -> int:
    """Return in how many chunks the *content* bytes of a row of *part* lie."""
    sizes = PIECES.get(name, {})
    if part not in sizes:
        return 1
    size = sizes[part] or (1 if dtype is None else itemsize(dtype))
    if content % size:
        wanted = f"a format whose chunks of {size} bytes divide the {content} bytes of {part}"
        raise SpecError("page_format", name, wanted)
    return content // size
