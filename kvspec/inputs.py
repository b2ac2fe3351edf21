"""Checks of arguments and fields that users write by hand.

Invariant: a check returns the value if it is valid, and raises `SpecError` with the name of the
field otherwise. A bool is not accepted as an int.
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

# Addresses and byte counts are signed 64-bit numbers in numpy.
MOST = 2**63 - 1

# The end of the block that holds the last position must still be a signed 64-bit number.
MAX_TOKENS = 2**62

# More members than any sequence of a description has. Each member is checked, so a longer sequence
# such as `range(10**20)` would never end.
MOST_MEMBERS = 2**20


def positive_int(field: str, value: object, *, least: int = 1, most: int = MOST) -> int:
    """Return *value* if it is an int from *least* to *most*.

    Args:
        field: Name of the argument for the error.
        value: The value to check.
        least: The smallest valid value.
        most: The largest valid value.

    Raises:
        SpecError: If the value is not an int, or out of the bounds. A bool is not an int here.

    >>> positive_int("tp_size", 4)
    4
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(field, value, f"an int >= {least}")
    if value > most:
        reason = "an int that a signed 64-bit number holds, " if most == MOST else ""
        raise SpecError(field, value, f"{reason}at most {most}")
    return value


def instance(field: str, value: object, kind: type[T]) -> T:
    """Return *value* if it is a *kind*. Raise `SpecError` otherwise."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise SpecError(field, value, f"{article} {kind.__name__}")
    return value


def sequence(field: str, value: object, members: str) -> tuple[Any, ...]:
    """Return the members of *value* in order.

    Args:
        field: Name of the argument for the error.
        value: Any iterable but text, a mapping or a set. The order of a set is not defined, and a
            text would silently become its letters.
        members: Description of the members for the error, such as "layer names".

    Raises:
        SpecError: If the value is of another kind, or has more than `MOST_MEMBERS` members.

    >>> sequence("layers", ["l.0", "l.1"], "layer names")
    ('l.0', 'l.1')
    """
    unordered_or_text = (str, bytes, Mapping, set, frozenset)
    if isinstance(value, unordered_or_text) or not isinstance(value, Iterable):
        raise SpecError(field, value, f"a sequence of {members}")
    try:
        if isinstance(value, Sized) and len(value) > MOST_MEMBERS:
            raise SpecError(field, value, f"at most {MOST_MEMBERS} {members}")
        return tuple(value)
    # A numpy array without dimensions raises TypeError, `len(range(10**20))` raises OverflowError.
    except (TypeError, OverflowError) as error:
        raise SpecError(field, value, f"a sequence of at most {MOST_MEMBERS} {members}") from error


def texts(field: str, value: object, members: str) -> tuple[str, ...]:
    """Return the members of *value*, which must be a sequence or a set of `str`."""
    items = sequence(field, tuple(value) if isinstance(value, AbstractSet) else value, members)
    for item in items:
        if not isinstance(item, str):
            raise SpecError(field, item, f"a sequence or a set of {members}")
    return items


def mapping(field: str, value: object, what: str) -> Mapping[Any, Any]:
    """Return *value* if it is a mapping. *what* completes the error "a mapping from ..."."""
    if not isinstance(value, Mapping):
        raise SpecError(field, value, f"a mapping from {what}")
    return value


def flag(field: str, value: object) -> bool:
    """Return *value* if it is a bool. Raise `SpecError` otherwise."""
    if not isinstance(value, bool):
        raise SpecError(field, value, "True or False")
    return value


def seconds(field: str, value: object, least: float = 0) -> float:
    """Return *value* as a float if it is a finite number of seconds, and *least* or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SpecError(field, value, "seconds, a number")
    # Each comparison with nan is false, so this refuses nan too.
    if not least <= value <= sys.float_info.max:
        raise SpecError(field, value, f"finite seconds >= {least:g}")
    return float(value)


class Frozen(Mapping[K, V_co], Generic[K, V_co]):
    """An immutable copy of a mapping, which can be hashed and pickled.

    Descriptions of engines are hashed and sent to other processes. A `dict` cannot be hashed, and a
    `types.MappingProxyType` cannot be pickled.

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
