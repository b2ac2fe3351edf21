"""One engine's description, and where two of them do not fit.

Law: layers pair by name, never by index. Everything that changes what a byte means is compared,
and every difference is reported at once, with both values and the reason it matters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import attrs

from kvspec.errors import Mismatch, SpecError
from kvspec.layout import layout_letters
from kvspec.parallel import ParallelConfig
from kvspec.slices import Part
from kvspec.specs import LayerSpec
from kvspec.specs.layer import MEMORY_FIELDS, WHY


def _layers(value: Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise SpecError("layers", value, "a sequence of layer names")
    return tuple(value)


@attrs.frozen(kw_only=True)
class KVCacheGroup:
    """Layers that share one block table.

    *layers*: their names, the same on both engines. *spec*: one for all, or a uniform-type group.
    *layout*: this group's own, or None for the engine's. For state layers H before N means that
    the conv state lies dimension first, N before H that it lies row first.
    """

    name: str
    layers: tuple[str, ...] = attrs.field(converter=_layers)
    spec: LayerSpec
    layout: str | None = None

    def __attrs_post_init__(self) -> None:
        field = f"groups[{self.name!r}]"
        if not isinstance(self.name, str) or not self.name:
            raise SpecError("name", self.name, "a group name")
        if not self.layers or not all(isinstance(each, str) and each for each in self.layers):
            raise SpecError(f"{field}.layers", self.layers, "at least one layer name")
        if len(set(self.layers)) < len(self.layers):
            raise SpecError(f"{field}.layers", self.layers, "each layer once")
        if not isinstance(self.spec, LayerSpec):
            raise SpecError(f"{field}.spec", self.spec, "a spec of a kind of layer")
        if self.spec.layers and set(self.spec.layers) != set(self.layers):
            raise SpecError(f"{field}.layers", self.layers, f"the spec's {self.spec.layers}")
        if self.layout is not None:
            layout_letters(self.layout, f"{field}.layout")

    @cached_property
    def alike(self) -> tuple[tuple[LayerSpec, tuple[str, ...]], ...]:
        """The layers by their own spec: one entry, unless this is a uniform-type group."""
        found: dict[tuple[Part, ...], tuple[LayerSpec, list[str]]] = {}
        for layer in self.layers:
            spec = self.spec.of_layer(layer)
            found.setdefault(spec.parts, (spec, []))[1].append(layer)
        return tuple((spec, tuple(layers)) for spec, layers in found.values())


def _groups(value: Iterable[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    return tuple(value)


@attrs.frozen(kw_only=True)
class EngineSpec:
    """One engine: its groups of layers, its parallel sizes, and the layout of its cache."""

    groups: tuple[KVCacheGroup, ...] = attrs.field(converter=_groups)
    parallel: ParallelConfig = attrs.field(factory=ParallelConfig)
    layout: str = "LBHNC"

    def __attrs_post_init__(self) -> None:
        layout_letters(self.layout)
        if not self.groups:
            raise SpecError("groups", self.groups, "at least one group")
        homes: dict[str, str] = {}
        for group in self.groups:
            if not isinstance(group, KVCacheGroup):
                raise SpecError("groups", group, "a KVCacheGroup")
            if group.name in (each.name for each in self.groups if each is not group):
                raise SpecError("groups", group.name, "group names that differ")
            for layer in group.layers:
                if layer in homes:
                    wanted = f"each layer in one group; it is in {homes[layer]!r} too"
                    raise SpecError(f"groups[{group.name!r}].layers", layer, wanted)
                homes[layer] = group.name

    def group(self, name: str) -> KVCacheGroup:
        """Return the group called *name*."""
        for group in self.groups:
            if group.name == name:
                return group
        raise SpecError("group", name, f"one of {', '.join(each.name for each in self.groups)}")

    def layout_of(self, group: KVCacheGroup) -> str:
        """Return the letters of the layout of *group*'s cache."""
        return layout_letters(group.layout or self.layout)

    @cached_property
    def homes(self) -> dict[str, KVCacheGroup]:
        """The group of each layer, by layer name."""
        return {layer: group for group in self.groups for layer in group.layers}


def mismatches(ours: EngineSpec, theirs: EngineSpec) -> tuple[Mismatch, ...]:
    """Return every field in which two engines do not hold the same model's cache.

    Parallel sizes, layouts, block sizes and padding may differ: they say where bytes lie, not what
    they mean.
    """
    found: dict[tuple[str, object, object], tuple[Mismatch, list[str]]] = {}
    for layer in dict.fromkeys([*ours.homes, *theirs.homes]):
        for each in _layer_mismatches(layer, ours.homes.get(layer), theirs.homes.get(layer)):
            key = (each.field, repr(each.ours), repr(each.theirs))
            found.setdefault(key, (each, []))[1].append(layer)
    return tuple(
        attrs.evolve(each, field=f"{_some(layers)}.{each.field}") for each, layers in found.values()
    )


def _some(layers: list[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"


def _layer_mismatches(
    layer: str, ours: KVCacheGroup | None, theirs: KVCacheGroup | None
) -> list[Mismatch]:
    if ours is None or theirs is None:
        mine, yours = (group and f"in group {group.name!r}" for group in (ours, theirs))
        why = "a layer on one side only has no source or no target"
        return [Mismatch("layer", mine, yours, why)]
    a, b = ours.spec.of_layer(layer), theirs.spec.of_layer(layer)
    if type(a) is not type(b):
        why = "each kind keeps other tokens and other parts"
        return [Mismatch("kind", type(a).__name__, type(b).__name__, why)]
    return _spec_mismatches(a, b) or _part_mismatches(a.parts, b.parts)


def _spec_mismatches(a: LayerSpec, b: LayerSpec) -> list[Mismatch]:
    return [
        Mismatch(field.name, mine, yours, WHY.get(field.name, "it changes what the bytes mean"))
        for field in attrs.fields(type(a))
        if field.name not in MEMORY_FIELDS and field.name != "state_parts"
        for mine, yours in [(getattr(a, field.name), getattr(b, field.name))]
        if mine != yours
    ]


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


PART_WHY = {
    "units": "units pair by their global number",
    "content_bytes": "one unit's row has another length",
    "deal_in": "units would be cut at other places",
    "tokens_per_state": "a row stands for other tokens",
    "states": "the states have different rows (speculative tokens?)",
}
"""Fields of a part that both sides must share, and why; rows of a block may differ for tokens."""
