"""Read values from untrusted plain data.

Invariant: each value passes the constructor that a caller's value passes, or is refused with the
path of the fault. Reading takes at most `MAX_WORK` steps, whatever numbers the message contains.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any, NoReturn

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError, WireError
from kvspec.inputs import MOST, Frozen
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.specs import LayerSpec
from kvspec.wire.encode import KINDS, Plain

MAX_WORK = 1 << 22
"""Steps that reading one message may take: names, units, and parts of layers that it spells out."""
PART = 16
"""Steps that one part costs, roughly."""
MAX_PARTS = 1024
"""Parts of one layer."""
MAX_DEPTH = 16
"""Lists within lists."""
MAX_TEXT = 1024
"""Characters of one text."""


class Decoder:
    """Reads plain data; *objects* are those read so far. Raises `WireError` and nothing else."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._work = 0

    def charge(self, path: str, steps: int) -> None:
        """Count *steps* of work that a message asks for; raise `WireError` where it is too much."""
        self._work += steps
        if self._work > MAX_WORK:
            raise WireError(path, self._work, f"at most {MAX_WORK} steps of work in one message")

    def table(self, path: str, rows: list[tuple[str, dict[str, Plain]]]) -> None:
        """Read the *rows* of objects, each a name and fields; one knows those before it."""
        for number, (name, fields) in enumerate(rows):
            where = f"{path}[{number}].{name[:64]}"
            kind = KINDS.get(name)
            if kind is None:
                raise WireError(
                    where, name, "a known kind, or one that was passed to kvspec.wire.register"
                )
            values = {key: self.value(f"{where}.{key[:64]}", one) for key, one in fields.items()}
            self.objects.append(self.build(where, kind, values))

    def build(self, path: str, kind: type[Any], fields: dict[str, Any]) -> Any:  # noqa: ANN401
        """Return the *kind* with these *fields*, as its own constructor allows."""
        known = {field.alias: field for field in attrs.fields(kind) if field.init}
        for name in fields:
            if name not in known:
                raise WireError(f"{path}.{name[:64]}", name, f"a field of {kind.__name__}")
        for name, field in known.items():
            if field.default is attrs.NOTHING and name not in fields:
                raise WireError(path, sorted(fields), f"the field {name!r} too")
        if kind is KVCacheGroup:
            self._charge_group(path, fields)
        if kind is EngineSpec:
            self._charge_engine(path, fields)
        try:
            value = kind(**fields)
            if isinstance(value, LayerSpec):
                self._charge_spec(path, value)
        except WireError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a kind makes of fields of other types
            refuse(path, error, kind.__name__)
        return value

    def _charge_spec(self, path: str, spec: LayerSpec) -> None:
        parts = _parts(spec)
        self.charge(path, PART * parts)
        if not spec.layers and parts > MAX_PARTS:
            raise WireError(path, parts, f"at most {MAX_PARTS} parts of a layer")

    def _charge_group(self, path: str, fields: dict[str, Any]) -> None:
        """Count the parts of all layers, over which a group's checks go."""
        spec, layers, excluded = (fields.get(name) for name in ("spec", "layers", "excluded"))
        if isinstance(layers, Sized) and isinstance(spec, LayerSpec):
            each = 1 if spec.layers else _parts(spec)
            without = len(excluded) if isinstance(excluded, Sized) else 0
            self.charge(path, len(layers) * (each + without))

    def _charge_engine(self, path: str, fields: dict[str, Any]) -> None:
        """Count what an engine's checks go over: parts by rank, layers by stage."""
        groups = fields.get("groups")
        parallel = fields.get("parallel", ParallelConfig())
        if not isinstance(groups, tuple) or not isinstance(parallel, ParallelConfig):
            return
        wide = parallel.tp_size
        if parallel.context_size > 1:
            wide *= parallel.tp_size * parallel.pcp_size
        stages = sum(1 if isinstance(s, range) else len(s) for s in parallel.stages or ())
        for group in groups:
            if isinstance(group, KVCacheGroup):
                parts = _parts(group.spec)
                held = parts if group.spec.layers else parts * len(group.layers)
                self.charge(path, held + parts * wide)
                self.charge(path, len(group.layers) * (parallel.pp_size + stages))

    def value(self, path: str, plain: Plain, depth: int = 0) -> Any:  # noqa: ANN401
        """Return what *plain* stands for."""
        if plain is None or isinstance(plain, bool):
            return plain
        if isinstance(plain, int):
            return self._number(path, plain)
        if isinstance(plain, str):
            return self._text(path, plain)
        if isinstance(plain, float) and math.isfinite(plain):
            return plain
        if not isinstance(plain, list) or not plain or not isinstance(plain[0], str):
            raise WireError(path, plain, "a number, a text, or a list that begins with a word")
        read = _READ.get(plain[0])
        if read is None or depth == MAX_DEPTH:
            raise WireError(path, plain[0], f"one of {', '.join(_READ)}, at most {MAX_DEPTH} deep")
        return read(self, path, plain[1:], depth + 1)

    def _number(self, path: str, plain: Plain) -> int:
        if type(plain) is not int or not -MOST <= plain <= MOST:
            raise WireError(path, plain, f"a whole number of at most {MOST}")
        return plain

    def _text(self, path: str, plain: Plain) -> str:
        if not isinstance(plain, str) or len(plain) > MAX_TEXT:
            raise WireError(path, plain, f"a text of at most {MAX_TEXT} characters")
        return plain

    def object(self, path: str, plain: list[Plain], depth: int = 0) -> Any:  # noqa: ANN401, ARG002
        """Return the object of a number."""
        if len(plain) != 1 or type(plain[0]) is not int or not 0 <= plain[0] < len(self.objects):
            raise WireError(path, plain, "the number of an earlier object")
        return self.objects[plain[0]]

    def _tuple(self, path: str, plain: list[Plain], depth: int) -> tuple[Any, ...]:
        return tuple(self.value(f"{path}[{n}]", one, depth) for n, one in enumerate(plain))

    def _range(self, path: str, plain: list[Plain], depth: int) -> range:  # noqa: ARG002
        if len(plain) != 3 or not plain[2]:  # noqa: PLR2004 - start, stop, step
            raise WireError(path, plain, "start, stop and step of a range")
        start, stop, step = (self._number(path, one) for one in plain)
        self.charge(path, abs(stop - start))
        return range(start, stop, step)

    def _rank(self, path: str, plain: list[Plain], depth: int) -> RankId:  # noqa: ARG002
        if len(plain) != 3:  # noqa: PLR2004 - pp, pcp, tp
            raise WireError(path, plain, "pp, pcp and tp of a rank")
        return RankId(*(self._number(path, one) for one in plain))

    def _map(self, path: str, plain: list[Plain], depth: int) -> Frozen[Any, Any]:
        keys = [self.value(f"{path}.key", key, depth) for key in plain[::2]]
        if len(plain) % 2 or not all(isinstance(key, str | int | RankId) for key in keys):
            raise WireError(path, keys, "pairs of a key (a text, a number or a rank) and a value")
        if len(set(keys)) < len(keys):
            raise WireError(path, keys, "each key once")
        places = (f"{path}[{key!r:.64}]" for key in keys)
        inner = [self.value(p, one, depth) for p, one in zip(places, plain[1::2], strict=True)]
        return Frozen(dict(zip(keys, inner, strict=True)))

    def _names(self, path: str, plain: list[Plain], depth: int) -> tuple[str, ...]:  # noqa: ARG002
        names: list[str] = []
        for number, run in enumerate(plain):
            where = f"{path}[{number}]"
            if isinstance(run, str):
                names.append(self._text(where, run))
                continue
            if not isinstance(run, list) or len(run) != 5:  # noqa: PLR2004 - as `runs_of` says
                raise WireError(where, run, "a name, or a run of names that count up")
            before, rest = self._text(where, run[0]), self._text(where, run[4])
            first, count, step = (self._number(where, one) for one in run[1:4])
            if first < 0 or count < 1 or step < 1:
                raise WireError(where, run[1:4], "first >= 0, count and step >= 1")
            self.charge(where, count * (4 + (len(before) + len(rest)) // 8))
            names += (f"{before}{first + step * at}{rest}" for at in range(count))
        return tuple(names)


def _parts(spec: LayerSpec) -> int:
    """Return how many parts the layers of *spec* have, those of layers that are not named once."""
    if spec.layers:
        return sum(len(spec.of_layer(layer).parts) for layer in spec.layers)
    return len(spec.parts)


def refuse(path: str, error: Exception, what: str) -> NoReturn:
    """Raise the error of a constructor as a `WireError` with the path of the value."""
    if isinstance(error, SpecError):
        where = f"{path}.{error.field[:MAX_TEXT]}"
        expected, rule = error.expected[:MAX_TEXT], error.rule[:MAX_TEXT]
        raise WireError(where, error.value, expected, rule=rule) from None
    raise WireError(path, f"{error}"[:MAX_TEXT], f"fields that {what} accepts") from None


_READ = {
    "object": Decoder.object,
    "tuple": Decoder._tuple,  # noqa: SLF001
    "names": Decoder._names,  # noqa: SLF001
    "map": Decoder._map,  # noqa: SLF001
    "range": Decoder._range,  # noqa: SLF001
    "rank": Decoder._rank,  # noqa: SLF001
}
