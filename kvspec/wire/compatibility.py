"""Compute one hash of everything that two engines must agree on to give bytes the same meaning.

Invariant: two engines without `kvspec.mismatches` have the same hash. Two engines with the same
hash give bytes the same meaning. They may differ in what a plan bridges, and in the tokens that
they keep.

The hash covers kinds, dtypes, heads, sizes, key contents, scales and layer names. It does not cover
the differences that a plan bridges: parallel sizes, blocks, layouts, padding, order and grouping.
Fields with their default value are left out, so that later versions can add fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import instance, texts
from kvspec.ownership.part import Part
from kvspec.plan.mismatches import PART_WHY
from kvspec.specs import LayerSpec
from kvspec.specs.layer import LIVENESS_FIELDS, MEMORY_FIELDS, meaning

SIZE = 16  # bytes


def compatibility_hash(engine: EngineSpec, excluded: Iterable[str] = ()) -> str:
    """Return 32 hexadecimal digits that identify the meaning of the engine's bytes.

    The angles of rotated keys do not count (`KeyContent.frequencies` and `magnitude`): an engine
    may not state them, and two makers compute them with other roundings. `mismatches` compares
    them.

    Args:
        engine: The engine. Layers that it excludes do not count.
        excluded: More layers that do not count. For two engines that exclude different draft
            layers, hash each engine without the layers of the other.

    Returns:
        The digits.

    >>> from kvspec import EngineSpec, FullAttentionSpec, KVCacheGroup, ParallelConfig
    >>> def engine(block_size, tp_size, head_size=128):
    ...     spec = FullAttentionSpec(block_size=block_size, total_num_kv_heads=8,
    ...                              head_size=head_size, dtype="bfloat16")
    ...     group = KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    ...     return EngineSpec(groups=[group], parallel=ParallelConfig(tp_size=tp_size))
    >>> compatibility_hash(engine(16, 4)) == compatibility_hash(engine(64, 1))
    True
    >>> compatibility_hash(engine(16, 4)) == compatibility_hash(engine(16, 4, head_size=64))
    False
    """
    instance("engine", engine, EngineSpec)
    excluded_layers = {*engine.excluded, *texts("excluded", excluded, "layer names")}
    digests: dict[LayerSpec, bytes] = {}
    whole = hashlib.blake2b(digest_size=SIZE)
    for layer in sorted(set(engine.homes) - excluded_layers):
        spec = engine.homes[layer].spec.of_layer(layer)
        if spec not in digests:
            digests[spec] = _digest(_meaning(spec))
        whole.update(_digest(layer) + digests[spec])
    return whole.hexdigest()


def _digest(value: object) -> bytes:
    return hashlib.blake2b(_text(value).encode(), digest_size=SIZE).digest()


def _meaning(spec: LayerSpec) -> tuple[object, ...]:
    """Return what changes the meaning of a layer's bytes: its kind, fields and parts."""
    meaningless = MEMORY_FIELDS | LIVENESS_FIELDS | {"state_parts"}
    fields = {
        field.name: meant
        for field in attrs.fields(type(spec))
        if field.name not in meaningless and (meant := meaning(spec, field.name)) != field.default
    }
    return _kind(type(spec)), fields, tuple(_part(part) for part in spec.parts)


def _kind(kind: type[Any]) -> str:
    """Return the name of *kind*, or of the one that keeps all tokens of the same cache."""
    bases: tuple[Any, ...] = kind.__mro__[1:]
    for base in bases:
        if getattr(base, "parts", LayerSpec.parts) is LayerSpec.parts:
            break
        more = {field.name for field in attrs.fields(kind)} - {f.name for f in attrs.fields(base)}
        if not more <= LIVENESS_FIELDS or base.counts_prompt is not kind.counts_prompt:
            break
        kind = base
    return kind.__name__


def _part(part: Part) -> dict[str, object]:
    fields = {
        field.name: meant
        for field in attrs.fields(Part)
        if field.name in PART_WHY and (meant := getattr(part, field.name)) != field.default
    }
    if part.per_token:
        del fields["states"]  # the rows of a block, in which engines may differ
    return {"name": part.name, **fields}


def _text(value: Any) -> str:  # noqa: ANN401
    """Return a text that two values share only if they are equal.

    >>> _text({"b": (1, None), "a": "x"})
    "{'a':'x','b':(1,None,),}"
    """
    if isinstance(value, Mapping):
        items = sorted((_text(key), _text(inner)) for key, inner in value.items())
        return "{" + "".join(f"{key}:{inner}," for key, inner in items) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_text(inner)}," for inner in value) + ")"
    if attrs.has(type(value)):
        inner = {
            field.name: getattr(value, field.name)
            for field in attrs.fields(type(value))
            if field.eq and field.metadata.get("hashed", True)
        }
        return type(value).__name__ + _text(inner)
    if value is None or isinstance(value, str | bool | int | float | range):
        return repr(value)
    raise SpecError(
        "spec", value, "a spec with fields of plain values: texts, numbers, tuples, attrs classes"
    )
