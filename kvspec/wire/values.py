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

Plain = Any
"""None, a bool, a number, a text, a list, or a map with one entry."""

MAX_WORK = 1 << 22
"""Steps that the plain values of one handshake may take.

Steps are `VALUE` for each value, the units of ranges, and the parts on ranks. The regions of a
handshake do not count: its limit of 2 MiB (`MAX_HANDSHAKE`) bounds them.
"""
VALUE = 16
"""Steps of one value. Two million empty lists are 2 KiB when compressed, and took 12 s."""
MAX_DEPTH = 32
"""Lists and maps within each other."""
MAX_TEXT = 1024
"""Characters of one text."""

KINDS: dict[str, type] = {
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


def encode(value: object) -> Plain:
    """Return *value* as plain data.

    Raises:
        SpecError: If its class is not in `KINDS`.
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
    if KINDS.get(kind.__name__) is not kind:
        raise SpecError("handshake", kind.__name__, f"a plain value, or one of {', '.join(KINDS)}")
    fields = [field for field in attrs.fields(kind) if field.init]
    return {kind.__name__: {field.alias: encode(getattr(value, field.name)) for field in fields}}


class Decoder:
    """Decodes the plain values of one message, and counts their work together."""

    def __init__(self) -> None:
        self._work = 0

    def value(self, path: str, plain: Plain, depth: int = 0) -> Any:  # noqa: ANN401
        """Return the value that *plain* stands for."""
        self._charge(path, VALUE)
        if _is_scalar(plain):
            return plain
        if isinstance(plain, list) and depth < MAX_DEPTH:
            return self._tuple(path, plain, depth + 1)
        if isinstance(plain, dict) and depth < MAX_DEPTH and len(plain) == 1:
            ((word, content),) = plain.items()
            if word in ("range", "rank"):
                return self._numbers(path, word, content)
            if word == "map":
                return self._map(path, content, depth + 1)
            if isinstance(word, str) and word in KINDS:
                return self._object(f"{path}.{word}", KINDS[word], content, depth + 1)
            known = f"map, range, rank or one of {', '.join(KINDS)}"
            raise WireError(path, word if isinstance(word, str) else "another key", known)
        # A container may be nested so deeply that its `repr` fails. Its type is enough.
        value = type(plain).__name__ if isinstance(plain, (list, dict, tuple)) else plain
        raise WireError(
            path,
            value,
            f"nil, a bool, a finite number of at most 63 bits, a text of at most {MAX_TEXT}"
            f" characters, a list, or a map with one entry, at most {MAX_DEPTH} deep",
        )

    def _tuple(self, path: str, plain: list[Plain], depth: int) -> tuple[Any, ...]:
        return tuple(self.value(f"{path}[{n}]", one, depth) for n, one in enumerate(plain))

    def _numbers(self, path: str, word: str, plain: Plain) -> range | RankId:
        numbers = self._tuple(path, plain, MAX_DEPTH) if isinstance(plain, list) else ()
        if [int, int, int] != [*map(type, numbers)]:
            raise WireError(path, f"{numbers}", f"the three ints of a {word}")
        if word == "rank":
            return RankId(*numbers)
        if not numbers[2]:
            raise WireError(path, f"{numbers}", "start, stop and step of a range; step is not 0")
        self._charge(path, abs(numbers[1] - numbers[0]))
        return range(*numbers)

    def _map(self, path: str, plain: Plain, depth: int) -> Frozen[Any, Any]:
        pairs = self.value(path, plain, depth)
        if not isinstance(pairs, tuple) or any(
            not isinstance(pair, tuple)
            or len(pair) != 2  # noqa: PLR2004 - a key and a value
            or not isinstance(pair[0], str | int | RankId)
            for pair in pairs
        ):
            raise WireError(path, type(plain).__name__, "pairs of a key and a value")
        if len(dict(pairs)) < len(pairs):
            raise WireError(path, f"{len(pairs)} pairs", "each key once")
        return Frozen(dict(pairs))

    def _object(self, path: str, kind: type[Any], plain: Plain, depth: int) -> Any:  # noqa: ANN401
        known = {field.alias for field in attrs.fields(kind) if field.init}
        if not isinstance(plain, dict) or plain.keys() != known:
            strange = known.symmetric_difference(plain if isinstance(plain, dict) else ())
            names = sorted(name for name in strange if isinstance(name, str))
            raise WireError(path, names, f"exactly the fields {', '.join(sorted(known))}")
        fields = {name: self.value(f"{path}.{name}", one, depth) for name, one in plain.items()}
        try:
            self._charge(path, _work(kind, fields))
            return kind(**fields)
        except WireError:
            raise
        except Exception as error:  # noqa: BLE001 - a constructor may fail in any way on wrong types
            refuse(path, error, kind.__name__)

    def _charge(self, path: str, steps: int) -> None:
        """Count *steps* of work. Raise `WireError` if the message asks for too much."""
        self._work += steps
        if self._work > MAX_WORK:
            raise WireError(path, self._work, f"at most {MAX_WORK} steps of work in one message")


def _is_scalar(plain: Plain) -> bool:
    """Return whether *plain* stands for itself and is within the bounds."""
    if isinstance(plain, str):
        return len(plain) <= MAX_TEXT
    if isinstance(plain, int):
        return -MOST <= plain <= MOST
    return plain is None or (isinstance(plain, float) and math.isfinite(plain))


def _work(kind: type[Any], fields: Mapping[str, Any]) -> int:
    """Return how many parts and layers the constructor of a group or an engine visits."""
    steps = 0
    # The constructor refuses fields of wrong types before it does any of this work.
    with contextlib.suppress(AttributeError, TypeError):
        if kind is KVCacheGroup:
            spec = fields["spec"]
            parts = 1 if spec.layers else len(spec.parts)
            steps = len(fields["layers"]) * (parts + len(fields["excluded"]))
        elif kind is EngineSpec:
            parallel = fields["parallel"]
            # Shardings are checked for each TP rank, and contexts for each pair of ranks.
            pairs = parallel.tp_size * parallel.pcp_size if parallel.context_size > 1 else 1
            stages = [1 if isinstance(each, range) else len(each) for each in parallel.stages or ()]
            for group in fields["groups"]:
                parts = sum(len(spec.parts) for spec, _ in group.layers_by_spec)
                steps += len(group.layers) * (parts + parallel.pp_size + sum(stages))
                steps += parts * parallel.tp_size * pairs
    return steps
