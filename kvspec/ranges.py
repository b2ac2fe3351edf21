"""Intervals, block-cyclic ownership, the exact-cover check, and the checks of plain input.

Law: does not know who is producer and who is consumer. There is one empty interval,
``range(0, 0)``; operations on intervals are total.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import lcm
from typing import Any, Literal, TypeVar, overload

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.errors import SpecError

T = TypeVar("T")
EMPTY = range(0)
"""The one empty interval."""


def shift(a: range, by: int) -> range:
    """Return the interval moved by *by*."""
    return range(a.start + by, a.stop + by)


Ints = npt.NDArray[np.int64]


@attrs.frozen
class Cyclic:
    """Block-cyclic ownership: of every *size* runs of *interleave* positions, the *rank*-th.

    The owner counts its own positions without gaps: its ``local`` index n stands for position
    ``((n // I) * C + rank) * I + n % I``, with I the interleave and C the size.
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1

    def owns(self, position: Ints) -> npt.NDArray[np.bool_]:
        """Return which of the positions are owned."""
        return np.equal(position // self.interleave % self.size, self.rank)

    @overload
    def local(self, position: int) -> int: ...
    @overload
    def local(self, position: Ints) -> Ints: ...
    def local(self, position: int | Ints) -> int | Ints:
        """Return how many owned positions lie before *position*: its own index, if it is owned."""
        rounds, rest = divmod(position, self.interleave * self.size)
        before = np.clip(rest - self.rank * self.interleave, 0, self.interleave)
        found = rounds * self.interleave + before
        return int(found) if isinstance(position, int) else found

    def position(self, local: Ints) -> Ints:
        """Return the positions of own indices."""
        rounds, rest = np.divmod(local, self.interleave)
        return (rounds * self.size + self.rank) * self.interleave + rest

    def alike(self, other: Cyclic) -> bool:
        """Whether both deal positions to as many ranks, in the same way."""
        if self.size == other.size == 1:
            return True
        return (self.size, self.interleave) == (other.size, other.interleave)


@lru_cache(maxsize=4096)
def meet(a: Cyclic, b: Cyclic) -> bool:
    """Return whether any position is owned by both."""
    if a.alike(b):
        return a.size == 1 or a.rank == b.rank
    period = np.arange(lcm(a.interleave * a.size, b.interleave * b.size), dtype=np.int64)
    return bool((a.owns(period) & b.owns(period)).any())


@attrs.frozen
class CoverFault:
    """The first place where pieces fail to tile a target exactly once."""

    kind: Literal["missing", "double", "outside"]
    where: range


def cover_fault(pieces: Iterable[range], target: range) -> CoverFault | None:
    """Return the first fault of *pieces* as an exact tiling of *target*, or None.

    Pieces come in any order. Every integer of *target* must lie in exactly one piece, and no
    piece may reach outside.

    >>> cover_fault([range(2, 4), range(0, 2)], range(4))
    >>> cover_fault([range(0, 2), range(3, 4)], range(4))
    CoverFault(kind='missing', where=range(2, 3))
    """
    reached = target.start
    for piece in sorted(pieces, key=lambda r: (r.start, r.stop)):
        if not piece:
            continue
        if piece.start < target.start or piece.stop > target.stop:
            return CoverFault("outside", piece)
        if piece.start > reached:
            return CoverFault("missing", range(reached, piece.start))
        if piece.start < reached:
            return CoverFault("double", range(piece.start, min(reached, piece.stop)))
        reached = piece.stop
    if reached < target.stop:
        return CoverFault("missing", range(reached, target.stop))
    return None


MOST = 2**63 - 1
"""The greatest size: addresses and byte counts are signed 64-bit numbers in numpy."""


def positive_int(field: str, value: object, *, least: int = 1, most: int = MOST) -> int:
    """Return *value* if it is an int from *least* to *most* and no bool; else raise `SpecError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(field, value, f"an int >= {least}")
    if value > most:
        why = "an int that a signed 64-bit number holds, " if most == MOST else ""
        raise SpecError(field, value, f"{why}at most {most}")
    return value


def instance(field: str, value: object, kind: type[T]) -> T:
    """Return *value* if it is a *kind*; else raise `SpecError`."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise SpecError(field, value, f"{article} {kind.__name__}")
    return value


def sequence(field: str, value: object, wanted: str) -> tuple[Any, ...]:
    """Return the members of *value* in order; text, mappings and sets are no sequences."""
    refused = (str, bytes, Mapping, set, frozenset)
    if isinstance(value, refused) or not isinstance(value, Iterable):
        raise SpecError(field, value, f"a sequence of {wanted}")
    return tuple(value)


def mapping(field: str, value: object, wanted: str) -> Mapping[Any, Any]:
    """Return *value* if it is a mapping; else raise `SpecError`."""
    if not isinstance(value, Mapping):
        raise SpecError(field, value, f"a mapping from {wanted}")
    return value


def flag(field: str, value: object) -> bool:
    """Return *value* if it is a bool; else raise `SpecError`."""
    if not isinstance(value, bool):
        raise SpecError(field, value, "True or False")
    return value


def plain_range(field: str, value: object) -> range:
    """Return *value* if it is a ``range`` of step 1 that starts at 0 or later."""
    if not isinstance(value, range) or value.step != 1 or value.start < 0:
        raise SpecError(field, value, "a range of step 1 with start >= 0")
    return value or EMPTY
