"""Counts and sizes in words, the same in reports, refusals and pictures.

Law: a size is exact where it is told in bytes, or whole in its unit; a tenth is told otherwise.
"""

from __future__ import annotations

_KIB = 1024


def counted(count: int, noun: str) -> str:
    """Return a count in words, such as ``1 layer`` or ``80 layers``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def nbytes(size: float) -> str:
    """Return a size in bytes or, where it is whole or large, in KiB, MiB, GiB or TiB.

    >>> nbytes(1280), nbytes(4096), nbytes(1_234_567)
    ('1,280 B', '4 KiB', '1.2 MiB')
    """
    count, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < _KIB or (unit == "B" and count % _KIB and count < 10 * _KIB):
            break
        count, unit = count / _KIB, larger
    return f"{count:,.0f} {unit}" if unit == "B" or count == int(count) else f"{count:,.1f} {unit}"
