"""An engine's own tensors, read as regions.

Law: nothing is believed. Addresses, strides and extents come from the tensors; what the declared
layout says about them is checked, and every contradiction is an error that names the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from math import prod
from typing import Any, NoReturn

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance
from kvspec.memory.arrays import Array, read_array
from kvspec.memory.axes import (
    NOUNS,
    Dims,
    beside,
    check_one_reading,
    dimensions,
    folded_readings,
    sizes,
    unfolded,
)
from kvspec.memory.layout import axes_of
from kvspec.memory.region import Memory, Region
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part

Given = dict[KVCacheGroup, dict[str, dict[str, Array]]]
"""What was given, read: of each group by layer, and by the name of a part or tensor."""


def read(
    engine: EngineSpec,
    rank: RankId,
    tensors: Mapping[str, Any],
    axes: str | Mapping[str, str] | None = None,
) -> tuple[tuple[Region, ...], tuple[Memory, ...]]:
    """Return the regions and the memory of *tensors*; see `RankCache.from_tensors`."""
    instance("engine", engine, EngineSpec).parallel.check_rank(rank)
    check_layers(engine, rank, tensors)
    given: Given = {}
    for group in engine.groups:
        own = [layer for layer in engine.layers_at(group, rank.pp) if layer in tensors]
        given[group] = {layer: _named(group, layer, tensors[layer]) for layer in own}
    regions: list[Region] = []
    memory: dict[Memory, None] = {}
    for group, layers in given.items():
        for layer, named in layers.items():
            for array, region in _layer(engine, group, rank, layer, named, axes):
                memory[array.memory] = None
                regions.append(region)
    if isinstance(axes, Mapping):
        _check_names(axes, given)
    return tuple(regions), _joined(memory)


def _check_names(axes: Mapping[str, str], given: Given) -> None:
    """Raise `SpecError` unless each key of *axes* names tensors, and it is plain which.

    Of a group without layers on this rank, each name that a tensor could have is one.
    """
    tensors = [
        (group.name, name)
        for group, layers in given.items()
        for name in dict.fromkeys(name for named in layers.values() for name in named)
    ]
    absent = [part for group, layers in given.items() if not layers for part in group.own_parts]
    known = [*(name for _, name in tensors), *(group.name for group in given)]
    names = dict.fromkeys([*known, *(x for part in absent for x in (part.name, part.tensor))])
    for key in axes:
        if key not in names:
            told = f"names of the tensors given, or of groups: {', '.join(names)}"
            raise SpecError("axes", key, told)
        by_group = any(group == key and name not in axes for group, name in tensors)
        if by_group and any(name == key for _, name in tensors):
            raise SpecError("axes", key, "a name of a group or of tensors, and it is of both")


def _joined(memory: Iterable[Memory]) -> tuple[Memory, ...]:
    """Return memories of which none shares a byte with another: views of one buffer are one."""
    found: list[Memory] = []
    for each in memory:
        place = each.memory_type, each.device
        for other in [old for old in found if (old.memory_type, old.device) == place]:
            if each.address < other.end and other.address < each.end:
                found.remove(other)
                start, end = min(each.address, other.address), max(each.end, other.end)
                each = Memory(start, end - start, *place)  # noqa: PLW2901 - what is joined so far
        found.append(each)
    return tuple(found)


def check_layers(engine: EngineSpec, rank: RankId, tensors: object) -> None:
    """Check that there is something for each layer that moves, and nothing for other ranks'."""
    if not isinstance(tensors, Mapping):
        wanted = "a mapping from layer names to tensors"
        raise SpecError("tensors", type(tensors).__name__, wanted)
    excluded = set(engine.excluded)
    for layer, _ in engine.held(rank):
        if layer not in tensors and layer not in excluded:
            raise SpecError("tensors", sorted(tensors, key=repr), f"a tensor for layer {layer!r}")
    for layer in tensors:
        if engine.stage_of.get(layer) != rank.pp:
            raise SpecError("tensors", layer, f"layers that {rank} has")


def _named(group: KVCacheGroup, layer: str, given: Any) -> dict[str, Array]:  # noqa: ANN401
    """Read the tensors of one layer by the name of a part or of a tensor of parts."""
    field, parts = f"tensors[{layer!r}]", group.spec.of_layer(layer).parts
    if not isinstance(given, Mapping):
        name = parts[0].tensor
        return {name: read_array(field, f"{field}[{name!r}]", given)}
    known = dict.fromkeys([*(p.name for p in parts), *(p.tensor for p in parts)])
    for name in given:
        if name not in known:
            raise SpecError(field, name, f"one of {', '.join(known)}")
    for part in parts:
        if part.name != part.tensor and {part.name, part.tensor} <= set(given):
            raise SpecError(field, sorted(given), "each part once")
    return {
        name: read_array(f"{field}[{name!r}]", f"{field}[{name!r}]", tensor)
        for name, tensor in given.items()
    }


def _check_dtype(field: str, parts: Iterable[Part], array: Array) -> None:
    """Refuse elements of another float type than the part's; plain bytes and ints may be any."""
    if "float" not in array.dtype:
        return
    for part in parts:
        wanted = part.dtype
        if wanted is not None and "float" in wanted and wanted != array.dtype:
            raise SpecError(
                f"{field}.dtype", array.dtype, f"{wanted}, as the part has, or plain bytes"
            )


def _layer(
    engine: EngineSpec,
    group: KVCacheGroup,
    rank: RankId,
    layer: str,
    named: Mapping[str, Array],
    axes: str | Mapping[str, str] | None,
) -> Iterator[tuple[Array, Region]]:
    parts = {part: len(engine.units(group, part, rank)) for part in group.in_memory(layer).parts}
    order = _order(engine.layout_of(group), parts)
    for name, array in named.items():
        held = {p: units for p, units in parts.items() if units and name in (p.name, p.tensor)}
        if held:
            field = f"tensors[{layer!r}][{name!r}]"
            told = axes.get(name, axes.get(group.name)) if isinstance(axes, Mapping) else axes
            dims = _unsaid(field, order, array, held) if told is None else dimensions(told)
            letters, one_each = "".join(dims), unfolded(field, array, dims, held)
            reader = _Reader(field, group.name, order, letters, one_each)
            regions = list(reader.regions(layer, held))
            _check_dtype(field, held, array)
            if told is None:
                check_one_reading(field, letters, array.shape)
            yield from ((array, region) for region in regions)
    missing = [
        p.name for p, units in parts.items() if units and not {p.name, p.tensor} & set(named)
    ]
    if missing:
        raise SpecError(f"tensors[{layer!r}]", sorted(named), f"a tensor for {', '.join(missing)}")


def _order(layout: str, parts: Iterable[Part]) -> str:
    """Return the letters of *layout* as they lie in one layer's tensors, outermost first.

    K is one of them where the parts are planes; packed in the content, or in a state's units, they
    are no axis.
    """
    parts = list(parts)
    planes = "K" if all(part.per_token for part in parts) and "K" in layout else ""
    return "".join(axis for axis in axes_of(layout, parts) if axis in f"BHPNC{planes}")


def _unsaid(field: str, order: str, array: Array, parts: Mapping[Part, int]) -> Dims:
    """Return the letters of dimensions of which nothing is said: the layout's, one each.

    Of fewer dimensions it has to be said which axes lie in one.
    """
    letters = order if len(parts) > 1 else order.replace("K", "")
    if all(part.chunks == 1 for part in parts):
        letters = letters.replace("P", "")
    readings = (
        list(folded_readings(letters, array, parts)) if len(array.shape) < len(letters) else []
    )
    if readings:
        fits = {1: "it fits", 2: "both fit"}.get(len(readings), "all fit")
        told = " or ".join(map(repr, readings))
        raise SpecError("axes", None, f"{told} said: {fits} {field}.shape={array.shape}")
    return tuple(letters)


@attrs.frozen
class _Reader:
    """One tensor with its letters."""

    field: str
    group: str
    layout: str
    axes: str
    array: Array

    def __attrs_post_init__(self) -> None:
        for letter, count, _ in self._dims:
            if not count:
                self._refuse(f"at least 1 {NOUNS[letter]} along {letter}")
        step = self.array.itemsize
        for letter, count, stride in reversed(self._dims):
            if letter != "C":
                break
            if count > 1 and stride != step:
                raise SpecError(f"{self.field}.stride", stride, f"contiguous content, {step} bytes")
            step *= count
        order = [each for each in self._dims if each[1] > 1]
        by_stride = sorted(order, key=lambda each: -each[2])
        said = [letter for letter in self.layout if letter in self.axes]
        seen = [each[0] for each in by_stride if each[0] in said]
        if list(dict.fromkeys(seen)) != [each for each in said if each in seen]:
            wanted = f"strides in the order of layout {self.layout}, outermost first"
            raise SpecError(f"{self.field}.stride", self.array.strides, wanted)

    @cached_property
    def _dims(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(zip(self.axes, self.array.shape, self.array.strides, strict=True))

    def extent(self, letter: str) -> int:
        """Return how long the tensor is along *letter*; content in bytes."""
        found = [count for axis, count, _ in self._dims if axis == letter]
        return prod(found) * (self.array.itemsize if letter == "C" else 1)

    def stride(self, letter: str) -> int:
        """Return the bytes from one index of *letter* to the next."""
        return next((stride for axis, _, stride in self._dims if axis == letter), 0)

    def regions(self, layer: str, parts: Mapping[Part, int]) -> Iterator[Region]:
        """Yield the regions of the tensor's *parts*, of which the rank has so many units each.

        Parts are planes along K, or lie side by side: along H in a state, otherwise in the content.
        """
        axis = beside(self.axes, parts)
        own = [sizes(part, units) for part, units in parts.items()]
        self._check(axis, sum(size[axis] for size in own))
        at = 0
        for part, size in zip(parts, own, strict=True):
            for letter in size.keys() - axis:
                self._check(letter, size[letter])
            yield Region(
                group=self.group,
                layer=layer,
                part=part.name,
                base=self.array.address + at * (1 if axis == "C" else self.stride(axis)),
                num_blocks=self.extent("B"),
                block_stride=self.stride("B"),
                unit_stride=self.stride("H"),
                state_stride=self.stride("N"),
                content_bytes=part.content_bytes,
                units=size["H"],
                states=part.states,
                chunks=part.chunks,
                chunk_stride=self.stride("P") if part.chunks > 1 else 0,
                memory_type=self.array.memory.memory_type,
                device=self.array.memory.device,
            )
            at += size[axis]

    def _check(self, letter: str, wanted: int) -> None:
        """Check that the tensor has exactly so much along *letter*."""
        found = self.extent(letter)
        if found != wanted:
            told = f"{wanted} {NOUNS[letter]}{'s' if wanted > 1 else ''} along {letter}"
            self._refuse(told if letter != "C" else f"content of {wanted} bytes, not {found}")

    def _refuse(self, wanted: str) -> NoReturn:
        raise SpecError(f"{self.field}.shape", self.array.shape, wanted)
