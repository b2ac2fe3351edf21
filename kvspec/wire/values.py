"""Encode the descriptions of an engine as plain values, and decode them from untrusted bytes.

Invariant: each decoded value passes the constructor that a caller's value passes, or raises
`WireError` with the path of the fault. Decoding the plain values of a handshake takes at most
`MAX_WORK` steps, whatever numbers they contain.

How it works:
    None, bools, numbers and texts stand for themselves, and a list stands for a tuple. Everything
    else is a map with one entry, whose key is the word for its kind:

        >>> encode({"k": (range(3), 1)})
        {'map': [['k', [{'range': [0, 3, 1]}, 1]]]}
        >>> encode(RankId(tp=3))
        {'rank': [0, 0, 3]}

    A few bytes can describe much work: a range of a billion units, or a layer with a thousand parts
    on each of 65,536 ranks. So the decoder counts the steps before a constructor runs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import attrs

from kvspec import specs
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError, WireError
from kvspec.inputs import MOST, Frozen
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.part import Part
from kvspec.ownership.replicas import ReplicaPolicy, Topology
from kvspec.specs import KeyContent, LayerSpec
from kvspec.wire.packing import refuse

PlainValue = Any
"""None, a bool, a number, a text, a list, or a map with one entry."""

MAX_WORK = 1 << 22
"""Steps that the plain values of one handshake may take.

Steps are `VALUE` for each value, the units of ranges, and the parts on ranks. The regions of a
handshake do not count: its limit of 2 MiB (`MAX_HANDSHAKE`) bounds them.
"""
VALUE = 32
"""Steps of one value. Two million empty lists are 9 KiB when compressed, and would take 4 s."""
MAX_DEPTH = 32
"""Lists and maps within each other."""
MAX_TEXT = 1024
"""Characters of one text."""

KNOWN: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Part,
        KeyContent,
        KVCacheGroup,
        ParallelConfig,
        EngineSpec,
        Topology,
        ReplicaPolicy,
    )
} | {
    name: getattr(specs, name)
    for name in specs.__all__
    # A base class has no parts of its own.
    if getattr(getattr(specs, name), "parts", LayerSpec.parts) is not LayerSpec.parts
}
"""Classes that a message may contain, by name."""


LATER: dict[str, frozenset[str]] = dict.fromkeys(
    ("MLAAttentionSpec", "SlidingWindowMLASpec"),
    frozenset({"scale_dtype", "elements_per_scale", "tokens_per_scale"}),
)
"""Fields that versions 10 and 11 do not know. They are missing if they have their default."""


def encode(value: object) -> PlainValue:
    """Return *value* as plain data.

    Raises:
        SpecError: If its class is not in `KNOWN`.
    """
    kind: type[Any] = type(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [encode(member) for member in value]
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, RankId):
        return {"rank": [value.pp, value.pcp, value.tp]}
    if isinstance(value, Mapping):
        return {"map": [[encode(key), encode(member)] for key, member in value.items()]}
    if KNOWN.get(kind.__name__) is not kind:
        raise SpecError("handshake", kind.__name__, f"a plain value, or one of {', '.join(KNOWN)}")
    later = LATER.get(kind.__name__, ())
    fields = {
        field.alias: encode(getattr(value, field.name))
        for field in attrs.fields(kind)
        if field.init and not (field.name in later and getattr(value, field.name) == field.default)
    }
    return {kind.__name__: fields}


class Decoder:
    """Decodes the plain values of one handshake, and counts their work together."""

    def __init__(self) -> None:
        self._work = 0

    def value(self, path: str, plain: PlainValue, depth: int = 0) -> Any:  # noqa: ANN401
        """Return the value that *plain* stands for."""
        self._charge(path, VALUE)
        if _is_scalar(plain):
            return plain
        if isinstance(plain, list) and depth < MAX_DEPTH:
            return tuple(self.value(f"{path}[{n}]", one, depth + 1) for n, one in enumerate(plain))
        if isinstance(plain, dict) and depth < MAX_DEPTH and len(plain) == 1:
            ((word, content),) = plain.items()
            kind = KNOWN.get(word)
            place = f"{path}.{word}" if kind else path
            try:
                if kind:
                    return self._object(place, kind, content, depth + 1)
                return self._other(path, word, content, depth + 1)
            except WireError:
                raise
            except Exception as error:  # noqa: BLE001 - wrong types may fail in any way
                refuse(place, error, word if isinstance(word, str) else "a kind")
        # A container may be nested so deeply that its `repr` fails. Its type is enough.
        value = type(plain).__name__ if isinstance(plain, (list, dict, tuple)) else plain
        raise WireError(
            path,
            value,
            f"nil, a bool, a finite number of at most 63 bits, a text of at most {MAX_TEXT}"
            f" characters, a list, or a map with one entry, at most {MAX_DEPTH} deep",
        )

    def _object(self, path: str, kind: type[Any], content: PlainValue, depth: int) -> object:
        known = {field.alias for field in attrs.fields(kind) if field.init}
        if strange := known.symmetric_difference(content) - LATER.get(kind.__name__, frozenset()):
            expected = f"exactly the fields {', '.join(sorted(known))}"
            raise WireError(path, sorted(map(str, strange)), expected)
        fields = {name: self.value(f"{path}.{name}", one, depth) for name, one in content.items()}
        self._charge(path, _work(kind, fields))
        return kind(**fields)

    def _other(self, path: str, word: object, plain: PlainValue, depth: int) -> object:
        if word not in ("map", "range", "rank"):
            known = f"map, range, rank or one of {', '.join(KNOWN)}"
            raise WireError(path, word if isinstance(word, str) else "another key", known)
        content = self.value(path, plain, depth)
        if word == "map":
            if isinstance(content, tuple) and all(map(_is_pair, content)):
                entries = Frozen(dict(content))
                if len(entries) == len(content):
                    return entries
        elif isinstance(content, tuple) and [int, int, int] == [*map(type, content)]:
            if word == "rank":
                return RankId(*content)
            self._charge(path, abs(content[1] - content[0]))
            return range(*content)
        expected = (
            "the pairs of a map, each key once" if word == "map" else f"the three ints of a {word}"
        )
        raise WireError(path, content, expected)

    def _charge(self, path: str, work: int) -> None:
        """Count *work*. Raise `WireError` if the message asks for too much."""
        self._work += work
        if self._work > MAX_WORK:
            raise WireError(path, self._work, f"at most {MAX_WORK} steps of work in one message")


def _is_scalar(plain: PlainValue) -> bool:
    """Return whether *plain* stands for itself and is within the bounds."""
    if isinstance(plain, str):
        return len(plain) <= MAX_TEXT
    if isinstance(plain, int):
        return -MOST <= plain <= MOST
    return plain is None or (isinstance(plain, float) and math.isfinite(plain))


def _is_pair(pair: PlainValue) -> bool:
    """Return whether *pair* is a key and a value of a map."""
    # The types are compared exactly, because True is an int in Python, but no key.
    is_pair = isinstance(pair, tuple) and len(pair) == 2  # noqa: PLR2004 - key and value
    return is_pair and type(pair[0]) in (str, int, RankId)


def _work(kind: type[Any], fields: Mapping[str, Any]) -> int:
    """Return how many steps the constructor of a group or an engine takes."""
    # The constructor refuses fields of wrong types before it does any of this work.
    with contextlib.suppress(AttributeError, TypeError):
        if kind is KVCacheGroup:
            spec: LayerSpec = fields["spec"]
            parts = 1 if spec.layers else len(spec.parts)
            return len(fields["layers"]) * (parts + len(fields["excluded"]))
        if kind is EngineSpec:
            groups: tuple[KVCacheGroup, ...] = fields["groups"]
            parallel: ParallelConfig = fields["parallel"]
            layers = sum(len(group.layers) for group in groups)
            parts = sum(len(group.own_parts) for group in groups)
            staged = parallel.pp_size + sum(map(len, parallel.stages or ()))
            # Shardings are checked for each TP rank, and contexts for each pair of ranks.
            pairs = parallel.tp_size * parallel.pcp_size if parallel.context_size > 1 else 1
            return layers * (parts + staged) + parts * parallel.tp_size * pairs
    return 0
