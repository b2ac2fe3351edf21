"""Checks of plain input: what is refused, and in which words.

Law: a check returns the value that it was given, or raises `SpecError` naming field, value and what
was wanted. A bool is no int.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from collections.abc import Set as AbstractSet
from typing import Any, Generic, TypeVar

from kvspec.errors import SpecError

T = TypeVar("T")
K = TypeVar("K")
V_co = TypeVar("V_co", covariant=True)


MOST = 2**63 - 1
"""The greatest size: addresses and byte counts are signed 64-bit numbers in numpy."""


MOST_MEMBERS = 2**20
"""More members than any sequence of a description has: each of them is looked at."""


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
    try:
        if isinstance(value, Sized) and len(value) > MOST_MEMBERS:
            raise SpecError(field, value, f"at most {MOST_MEMBERS} {wanted}")
        return tuple(value)
    except (TypeError, OverflowError) as error:  # an array of no dimension; a range without a len
        raise SpecError(field, value, f"a sequence of at most {MOST_MEMBERS} {wanted}") from error


def texts(field: str, value: object, wanted: str) -> tuple[str, ...]:
    """Return the members of *value*, a sequence or a set of texts; else raise `SpecError`."""
    members = sequence(field, tuple(value) if isinstance(value, AbstractSet) else value, wanted)
    for member in members:
        if not isinstance(member, str):
            raise SpecError(field, member, f"a sequence or a set of {wanted}")
    return members


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


def seconds(field: str, value: object) -> float:
    """Return *value* if it is a finite number of seconds, at least 0; else raise `SpecError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SpecError(field, value, "seconds, a number")
    if not 0 <= value <= sys.float_info.max:  # neither for nan
        raise SpecError(field, value, "finite seconds >= 0")
    return float(value)


class Frozen(Mapping[K, V_co], Generic[K, V_co]):
    """A mapping that is a copy of what it was given, and never changes: it hashes and pickles.

    >>> Frozen({"k": 1, "v": 2}) == {"v": 2, "k": 1}
    True
    >>> hash(Frozen({"k": 1, "v": 2})) == hash(Frozen({"v": 2, "k": 1}))
    True
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[K, V_co]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: K) -> V_co:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)
