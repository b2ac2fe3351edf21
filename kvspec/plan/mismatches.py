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
from kvspec.specs.layer import MEMORY_FIELDS, UNLESS_GIVEN, WHY


def mismatches(ours: EngineSpec, theirs: EngineSpec) -> tuple[Mismatch, ...]:
    """Return every field in which two engines do not hold the same model's cache.

    Parallel sizes, layouts, block sizes and padding may differ: they say where bytes lie, not what
    they mean. Layers that either side excludes are not compared.
    """
    instance("ours", ours, EngineSpec)
    instance("theirs", theirs, EngineSpec)
    found: dict[object, tuple[Mismatch, list[str]]] = {}
    excluded = {*ours.excluded, *theirs.excluded}
    for layer in dict.fromkeys([*ours.homes, *theirs.homes]):
        if layer in excluded:
            continue
        mine, yours = ours.homes.get(layer), theirs.homes.get(layer)
        if mine is None or yours is None:
            found[layer] = (_one_sided(mine, yours), [layer])
            continue
        for each in _layer_mismatches(mine.spec.of_layer(layer), yours.spec.of_layer(layer)):
            key = (each.field, repr(each.ours), repr(each.theirs))
            found.setdefault(key, (each, []))[1].append(layer)
    return tuple(
        attrs.evolve(each, field=f"{_some(layers)}.{each.field}") for each, layers in found.values()
    )


def _some(layers: list[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"


def _one_sided(ours: KVCacheGroup | None, theirs: KVCacheGroup | None) -> Mismatch:
    mine, yours = (group and f"in group {group.name!r}" for group in (ours, theirs))
    return Mismatch("layer", mine, yours, "a layer on one side only has no source or no target")


def _layer_mismatches(a: LayerSpec, b: LayerSpec) -> list[Mismatch]:
    if type(a) is not type(b):
        why = "each kind keeps other tokens and other parts"
        return [Mismatch("kind", type(a).__name__, type(b).__name__, why)]
    found: list[Mismatch] = []
    given = False
    for field in attrs.fields(type(a)):
        name = field.name
        if name == "state_parts":
            given = True
        elif name not in MEMORY_FIELDS and _differ(a, b, name):
            why = WHY.get(name, "it changes what the bytes mean")
            found.append(Mismatch(name, getattr(a, name), getattr(b, name), why))
    # Parts that are derived from the fields differ only where those do.
    told = {each.field for each in found}
    if found and not given:
        return found
    parts = _part_mismatches(a.parts, b.parts)
    return found + [p for p in parts if not (p.field.endswith(".dtype") and told & DTYPES)]


def _differ(a: LayerSpec, b: LayerSpec, field: str) -> bool:
    """Whether two specs differ in *field*; a default that one side says aloud is no difference."""
    if getattr(a, field) == getattr(b, field):
        return False
    default = UNLESS_GIVEN.get(field, field)
    mine, yours = (
        getattr(each, default if getattr(each, field) is None else field) for each in (a, b)
    )
    return bool(mine != yours)


def _part_mismatches(a: tuple[Part, ...], b: tuple[Part, ...]) -> list[Mismatch]:
    names_a, names_b = tuple(p.name for p in a), tuple(p.name for p in b)
    if names_a != names_b:
        return [Mismatch("parts", names_a, names_b, "parts pair by name")]
    return [
        Mismatch(f"{mine.name}.{field}", getattr(mine, field), getattr(yours, field), why)
        for mine, yours in zip(a, b, strict=True)
        for field, why in PART_WHY.items()
        if getattr(mine, field) != getattr(yours, field)
        and not (field == "states" and mine.tokens_per_state)
    ]


DTYPES = {"dtype", "ssm_dtype"}
"""Fields of a spec that are its parts' dtypes too."""

PART_WHY = {
    "units": "units pair by their global number",
    "content_bytes": "one unit's row has another length",
    "deal_in": "units would be cut at other places",
    "tokens_per_state": "a row stands for other tokens",
    "dtype": "the same bytes mean other numbers",
    "states": "the states have different rows (speculative tokens?)",
}
"""Fields of a part that both sides must share, and why; rows of a block may differ for tokens."""


def differing(ours: object, theirs: object, field: str, why: str) -> Iterator[Mismatch]:
    """Yield the innermost fields in which two descriptions differ, each with its path."""
    kind: Any = type(ours)
    if kind is type(theirs) and attrs.has(kind):
        for each in attrs.fields(kind):
            if each.eq:
                mine, yours = getattr(ours, each.name), getattr(theirs, each.name)
                yield from differing(mine, yours, f"{field}.{each.name}", why)
    elif isinstance(ours, Mapping) and isinstance(theirs, Mapping) and set(ours) == set(theirs):
        for key in ours:
            yield from differing(ours[key], theirs[key], f"{field}[{key!r}]", why)
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for at, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
            yield from differing(mine, yours, f"{field}[{at}]", why)
    elif ours != theirs:
        yield Mismatch(field, ours, theirs, why)
