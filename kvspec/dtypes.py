"""Element types by name, with their sizes in bytes.

Law: a dtype is a name. Frameworks' own dtype objects are read by their text, so that neither torch
nor anything else is imported to learn that an element has two bytes.
"""

from __future__ import annotations

from kvspec.errors import SpecError

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by dtype name."""

_ALIASES = {"half": "float16", "float": "float32", "fp8": "float8_e4m3fn"}


def dtype_name(dtype: object, field: str = "dtype") -> str:
    """Return the canonical name of *dtype*: a name, a ``torch.dtype`` or a numpy dtype.

    Raises `SpecError` naming *field* if it is not known.
    """
    text = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(text, text)
    if isinstance(dtype, (bool, int, float)) or name not in ITEMSIZE:
        raise SpecError(field, dtype, f"one of {', '.join(ITEMSIZE)}")
    return name


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of *dtype*, a canonical name."""
    return ITEMSIZE[dtype]
