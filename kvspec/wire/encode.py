"""Write values of the library as plain lists, texts and numbers.

Invariant: equal values are written once, and default values are left out. `kvspec.wire.decode`
reads an equal value back. A class that a user added is written by its registered name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from kvspec import specs
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.part import Part
from kvspec.ownership.replicas import ReplicaPolicy, Topology
from kvspec.specs import LayerSpec

Kind = TypeVar("Kind", bound=type[Any])
Plain = Any
"""None, a bool, a number, a text, or a list that begins with the word for what it stands for."""

KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(
            kind
            for kind in (getattr(specs, name) for name in specs.__all__)
            if kind.parts is not LayerSpec.parts
        ),
        Part,
        KVCacheGroup,
        ParallelConfig,
        EngineSpec,
        Topology,
        ReplicaPolicy,
    )
}
"""What may stand in a message, by name."""


def register(kind: Kind) -> Kind:
    """Let values of the class *kind* be part of a handshake. Usable as a decorator.

    Both engines must register the class.

    Args:
        kind: A frozen attrs class.

    Returns:
        The class.

    Raises:
        SpecError: If *kind* is not an attrs class, or another class has its name.
    """
    given: object = kind
    if not isinstance(given, type) or not attrs.has(given):
        raise SpecError("kind", kind, "an attrs class")
    if KINDS.setdefault(kind.__name__, kind) is not kind:
        raise SpecError("kind", kind, f"a name other than that of {KINDS[kind.__name__]!r}")
    return kind


class Encoder:
    """Makes values plain; equal attrs values are written once, in *objects*, children first."""

    def __init__(self) -> None:
        self.objects: list[tuple[str, dict[str, Plain]]] = []
        self._numbers: dict[object, int] = {}

    def encode(self, value: object) -> Plain:  # noqa: PLR0911 - a line for each kind of value
        """Return *value* as plain data; `SpecError` for what cannot travel."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, RankId):
            return ["rank", value.pp, value.pcp, value.tp]
        if isinstance(value, range):
            return ["range", value.start, value.stop, value.step]
        if isinstance(value, tuple):
            if value and all(isinstance(inner, str) for inner in value):
                return ["names", *runs_of(value)]
            return ["tuple", *map(self.encode, value)]
        if isinstance(value, Mapping):
            return ["map", *(self.encode(inner) for item in value.items() for inner in item)]
        if KINDS.get(type(value).__name__) is type(value):
            return ["object", self._number(value)]
        wanted = "a plain value, or a class that was passed to kvspec.wire.register"
        raise SpecError("handshake", type(value).__name__, wanted)

    def _number(self, value: Any) -> int:  # noqa: ANN401
        number = self._numbers.get(value)
        if number is None:
            fields = {
                field.alias: self.encode(getattr(value, field.name))
                for field in attrs.fields(type(value))
                if field.init and not _is_default(field, getattr(value, field.name))
            }
            self.objects.append((type(value).__name__, fields))
            number = self._numbers[value] = len(self.objects) - 1
        return number


def _is_default(field: attrs.Attribute[Any], value: object) -> bool:
    """Return whether *value* is what the constructor takes when nothing is said."""
    default: Any = field.default
    made = getattr(default, "factory", None)
    if made is not None:
        return not getattr(default, "takes_self", True) and bool(value == made())
    return type(value) is type(default) and bool(value == default)


_COUNTED = re.compile(r"([^0-9]*)(0|[1-9][0-9]{0,8})(?![0-9])(.*)", re.DOTALL)


def runs_of(names: tuple[str, ...]) -> list[Plain]:
    """Return *names*, those that count up as one run: what stands before, first, count, step, rest.

    >>> runs_of(("layers.0.attn", "layers.1.attn", "layers.2.attn", "draft"))
    [['layers.', 0, 3, 1, '.attn'], 'draft']
    """
    runs: list[Plain] = []
    last: list[Any] = []
    for name in names:
        found = _COUNTED.fullmatch(name)
        if not found:
            runs.append(name)
            last = []
            continue
        before, number, rest = found[1], int(found[2]), found[3]
        if last and (last[0], last[4]) == (before, rest):
            if last[2] == 1 and number > last[1]:
                last[3] = number - last[1]
            if number == last[1] + last[2] * last[3]:
                last[2] += 1
                continue
        last = [before, number, 1, 1, rest]
        runs.append(last)
    return runs
