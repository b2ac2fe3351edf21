"""Where two engines do not fit.

Law: layers pair by name, never by index. Everything that changes what a byte means is compared,
and every difference is reported at once, with both values and the reason it matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import Mismatch
from kvspec.inputs import instance
from kvspec.ownership.part import Part
from kvspec.specs import LayerSpec
from kvspec.specs.layer import LIVENESS_FIELDS, MEMORY_FIELDS, WHY, meaning


def mismatches(producer: EngineSpec, consumer: EngineSpec) -> tuple[Mismatch, ...]:
    """Return every field in which two engines do not hold the same model's cache.

    Parallel sizes, layouts, block sizes and padding may differ: they say where bytes lie, not what
    they mean. So may how long tokens are kept. Layers that either side excludes are not compared.
    """
    instance("producer", producer, EngineSpec)
    instance("consumer", consumer, EngineSpec)
    found: dict[object, tuple[Mismatch, list[str]]] = {}
    compared: dict[tuple[int, int], list[Mismatch]] = {}
    excluded = {*producer.excluded, *consumer.excluded}
    for layer in dict.fromkeys([*producer.homes, *consumer.homes]):
        if layer in excluded:
            continue
        homes = producer.homes.get(layer), consumer.homes.get(layer)
        if homes[0] is None or homes[1] is None:
            found[layer] = (_one_sided(*homes), [layer])
            continue
        specs = homes[0].spec.of_layer(layer), homes[1].spec.of_layer(layer)
        pair = id(specs[0]), id(specs[1])  # of a group's many layers, one comparison is enough
        if pair not in compared:
            compared[pair] = _layer_mismatches(*specs)
        for one in compared[pair]:
            key = (one.field, repr(one.producer), repr(one.consumer))
            found.setdefault(key, (one, []))[1].append(layer)
    return tuple(
        attrs.evolve(one, field=f"{_some(layers)}.{one.field}") for one, layers in found.values()
    )


def _some(layers: list[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"


def _one_sided(producer: KVCacheGroup | None, consumer: KVCacheGroup | None) -> Mismatch:
    here, there = (group and f"in group {group.name!r}" for group in (producer, consumer))
    return Mismatch("layer", here, there, "a layer on one side only has no source or no target")


def _layer_mismatches(producer: LayerSpec, consumer: LayerSpec) -> list[Mismatch]:
    kind = _common_kind(producer, consumer)
    if kind is None:
        why = "each kind keeps other tokens and other parts"
        return [Mismatch("kind", type(producer).__name__, type(consumer).__name__, why)]
    found: list[Mismatch] = []
    given = False
    for field in attrs.fields(kind):
        name = field.name
        if name == "state_parts":
            given = True
        elif name not in MEMORY_FIELDS and _differ(producer, consumer, name):
            why = WHY.get(name, "it changes what the bytes mean")
            found.append(Mismatch(name, getattr(producer, name), getattr(consumer, name), why))
    # Parts that are derived from the fields differ only where those do.
    if found and not given:
        return found
    named = {mismatch.field for mismatch in found}
    return found + [
        mismatch
        for mismatch in _part_mismatches(producer.parts, consumer.parts)
        if not (mismatch.field.endswith(".dtype") and named & DTYPES)
    ]


def _common_kind(producer: LayerSpec, consumer: LayerSpec) -> type[LayerSpec] | None:
    """Return the kind of which both are: their own, or the one that keeps more of the same tokens.

    An engine may keep a window's layer as full attention. What moves is what the consumer's kind
    still reads; what the producer has of it, its block tables say.
    """
    for one, other in ((producer, consumer), (consumer, producer)):
        kind = type(one)
        if type(other) is kind:
            return kind
        own = {field.name for field in attrs.fields(type(other))}
        fewer = own - {field.name for field in attrs.fields(kind)} <= LIVENESS_FIELDS
        if isinstance(other, kind) and fewer and one.counts_prompt == other.counts_prompt:
            return kind
    return None


def _differ(producer: LayerSpec, consumer: LayerSpec, field: str) -> bool:
    """Whether two specs differ in *field*; a default that one side says aloud is no difference."""
    if getattr(producer, field) == getattr(consumer, field):
        return False
    return meaning(producer, field) != meaning(consumer, field)


def _part_mismatches(producer: tuple[Part, ...], consumer: tuple[Part, ...]) -> list[Mismatch]:
    names = [tuple(part.name for part in parts) for parts in (producer, consumer)]
    if names[0] != names[1]:
        return [Mismatch("parts", names[0], names[1], "parts pair by name")]
    return [
        Mismatch(f"{one.name}.{field}", getattr(one, field), getattr(other, field), why)
        for one, other in zip(producer, consumer, strict=True)
        for field, why in PART_WHY.items()
        if getattr(one, field) != getattr(other, field)
        and not (field == "states" and one.per_token)
    ]


DTYPES = {"dtype", "ssm_dtype"}
"""Fields of a spec that are its parts' dtypes too."""

PART_WHY = {
    "units": "units pair by their global number",
    "content_bytes": "one unit's row has another length",
    "granularity": "units would be cut at other places",
    "tokens_per_state": "a row stands for other tokens",
    "dtype": "the same bytes mean other numbers",
    "states": "the states have different rows (speculative tokens?)",
}
"""Fields of a part that both sides must share, and why; rows of a block may differ for tokens."""


def differing(
    one: object, other: object, field: str, why: str, sides: tuple[str, str]
) -> Iterator[Mismatch]:
    """Yield the innermost fields in which two descriptions differ, each with its path."""
    kind: Any = type(one)
    inner: list[tuple[str, object, object]] = []
    if kind is type(other) and attrs.has(kind):
        names = [each.name for each in attrs.fields(kind) if each.eq]
        inner = [(f"{field}.{name}", getattr(one, name), getattr(other, name)) for name in names]
    elif isinstance(one, Mapping) and isinstance(other, Mapping) and set(one) == set(other):
        inner = [(f"{field}[{key!r}]", one[key], other[key]) for key in one]
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        both = enumerate(zip(one, other, strict=True))
        inner = [(f"{field}[{index}]", *pair) for index, pair in both]
    elif one != other:
        yield Mismatch(field, one, other, why, sides)
    for path, first, second in inner:
        yield from differing(first, second, path, why, sides)
