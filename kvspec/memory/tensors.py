"""An engine's own tensors, read as regions.

Law: nothing is believed. Addresses, strides and extents come from the tensors; what the declared
layout says about them is checked, and every contradiction is an error that names the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import attrs
import numpy as np

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance
from kvspec.memory.regions import Memory, RankCache, Region
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part

_NOUNS = {"B": "block", "K": "plane", "H": "unit", "N": "row", "C": "byte"}


@attrs.frozen
class _Array:
    """What is read of one tensor: address, shape, byte strides, and the memory behind it."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    memory: Memory
    dtype: str


def read(
    engine: EngineSpec,
    rank: RankId,
    tensors: Mapping[str, Any],
    axes: str | Mapping[str, str] | None = None,
) -> RankCache:
    """Return the cache that *tensors* hold.

    *tensors*: for each layer a torch tensor or numpy array, or a mapping from a part's or tensor's
    name (``"k"``, ``"v"``, ``"conv"``, ``"ssm"``) to one. *axes*: the letters of a tensor's
    dimensions in order, for all tensors or by part or tensor name; unless given, the layout's
    without L. A letter that is not there has extent 1; the last dimensions may all be ``C``. A
    tensor that holds both k and v has them along ``K``, or packed in ``C``. Extents are those of
    the engine's parts exactly: of a larger tensor, give the view that is the cache.
    """
    instance("engine", engine, EngineSpec).parallel.check_rank(rank)
    check_layers(engine, rank, tensors)
    regions: list[Region] = []
    memory: dict[Memory, None] = {}
    names: dict[str, None] = {}
    for group in engine.groups:
        for layer in engine.layers_at(group, rank.pp):
            if layer not in tensors:
                continue
            named = _named(group, layer, tensors[layer])
            names |= dict.fromkeys(named)
            for array, region in _layer(engine, group, rank, layer, named, axes):
                memory[array.memory] = None
                regions.append(region)
    for name in axes if isinstance(axes, Mapping) else ():
        if name not in names:
            raise SpecError("axes", name, f"names of the tensors given: {', '.join(names)}")
    return RankCache(engine, rank, tuple(regions), tuple(memory))


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


def _named(group: KVCacheGroup, layer: str, given: Any) -> dict[str, _Array]:  # noqa: ANN401
    """Read the tensors of one layer by the name of a part or of a tensor of parts."""
    field, parts = f"tensors[{layer!r}]", group.spec.of_layer(layer).parts
    if not isinstance(given, Mapping):
        name = parts[0].tensor
        return {name: _array(field, f"{field}[{name!r}]", given)}
    known = dict.fromkeys([*(p.name for p in parts), *(p.tensor for p in parts)])
    for name in given:
        if name not in known:
            raise SpecError(field, name, f"one of {', '.join(known)}")
    for part in parts:
        if part.name != part.tensor and {part.name, part.tensor} <= set(given):
            raise SpecError(field, sorted(given), "each part once")
    return {
        name: _array(f"{field}[{name!r}]", f"{field}[{name!r}]", tensor)
        for name, tensor in given.items()
    }


def _check_dtype(field: str, parts: Iterable[Part], array: _Array) -> None:
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
    named: Mapping[str, _Array],
    axes: str | Mapping[str, str] | None,
) -> Iterator[tuple[_Array, Region]]:
    parts = {part: len(engine.units(group, part, rank)) for part in group.in_memory(layer).parts}
    letters = engine.layout_of(group).replace("L", "")
    for name, array in named.items():
        held = {p: units for p, units in parts.items() if units and name in (p.name, p.tensor)}
        if held:
            order = axes.get(name) if isinstance(axes, Mapping) else axes
            if order is None:
                planes = len(held) > 1 and all(part.per_token for part in held)
                order = letters if planes else letters.replace("K", "")
            field = f"tensors[{layer!r}][{name!r}]"
            reader = _Reader(field, group.name, letters, _letters(order), array)
            regions = list(reader.regions(layer, held))
            _check_dtype(field, held, array)
            yield from ((array, region) for region in regions)
    missing = [
        p.name for p, units in parts.items() if units and not {p.name, p.tensor} & set(named)
    ]
    if missing:
        raise SpecError(f"tensors[{layer!r}]", sorted(named), f"a tensor for {', '.join(missing)}")


def _letters(axes: object) -> str:
    """Return *axes* if each of its letters stands once, but for C, which is last."""
    once = axes.rstrip("C") if isinstance(axes, str) else "?"
    if not isinstance(axes, str) or not set(once) <= set("BKHN") or len(set(once)) < len(once):
        wanted = "the letters B, K, H, N, C of the dimensions, each once (C: the last ones)"
        raise SpecError("axes", axes, wanted)
    return axes


@attrs.frozen
class _Reader:
    """One tensor with its letters."""

    field: str
    group: str
    layout: str
    axes: str
    array: _Array

    def __attrs_post_init__(self) -> None:
        if len(self.axes) != len(self.array.shape):
            self._refuse(f"{len(self.axes)} dimensions, {self.axes}")
        for letter, count, _ in self._dims():
            if not count:
                self._refuse(f"at least 1 {_NOUNS[letter]} along {letter}")
        step = self.array.itemsize
        for letter, count, stride in reversed(self._dims()):
            if letter != "C":
                break
            if count > 1 and stride != step:
                raise SpecError(f"{self.field}.stride", stride, f"contiguous content, {step} bytes")
            step *= count
        order = [each for each in self._dims() if each[1] > 1]
        by_stride = sorted(order, key=lambda each: -each[2])
        said = [letter for letter in self.layout if letter in self.axes]
        seen = [each[0] for each in by_stride if each[0] in said]
        if list(dict.fromkeys(seen)) != [each for each in said if each in seen]:
            wanted = f"strides in the order of layout {self.layout}, outermost first"
            raise SpecError(f"{self.field}.stride", self.array.strides, wanted)

    def _dims(self) -> list[tuple[str, int, int]]:
        return list(zip(self.axes, self.array.shape, self.array.strides, strict=True))

    def extent(self, letter: str) -> int:
        """Return how long the tensor is along *letter*; content in bytes."""
        found = [count for axis, count, _ in self._dims() if axis == letter]
        return int(np.prod(found)) * (self.array.itemsize if letter == "C" else 1)

    def stride(self, letter: str) -> int:
        """Return the bytes from one index of *letter* to the next."""
        return next((stride for axis, _, stride in self._dims() if axis == letter), 0)

    def regions(self, layer: str, parts: Mapping[Part, int]) -> Iterator[Region]:
        """Yield the regions of the tensor's *parts*, of which the rank has so many units each.

        Parts are planes along K, or lie side by side: along H in a state, otherwise in the content.
        """
        state = not all(part.per_token for part in parts)
        axis = "H" if state else "K" if "K" in self.axes else "C"
        sizes = [
            {"K": 1, "H": units, "N": part.states, "C": part.content_bytes}
            for part, units in parts.items()
        ]
        self._check(axis, sum(size[axis] for size in sizes))
        at = 0
        for part, size in zip(parts, sizes, strict=True):
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
                memory_type=self.array.memory.memory_type,
                device=self.array.memory.device,
            )
            at += size[axis]

    def _check(self, letter: str, wanted: int) -> None:
        """Check that the tensor has exactly so much along *letter*."""
        found = self.extent(letter)
        if found != wanted:
            told = f"{wanted} {_NOUNS[letter]}{'s' if wanted > 1 else ''} along {letter}"
            self._refuse(told if letter != "C" else f"content of {wanted} bytes, not {found}")

    def _refuse(self, wanted: str) -> NoReturn:
        raise SpecError(f"{self.field}.shape", self.array.shape, wanted)


def check_tensor(field: str, tensor: Any, name: str | None = None) -> None:  # noqa: ANN401
    """Raise `SpecError` naming *field* unless *tensor* is one, and *name* unless it has memory."""
    name = field if name is None else name
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject:
            raise SpecError(f"{name}.dtype", str(tensor.dtype), "plain bytes, such as bfloat16")
        return
    for needed in ("data_ptr", "stride", "element_size", "untyped_storage", "device", "layout"):
        if not hasattr(tensor, needed):
            raise SpecError(field, type(tensor).__name__, "a torch tensor or a numpy array")
    dense = "a dense tensor on a CPU or a GPU"
    if tensor.device.type == "meta":
        raise SpecError(f"{name}.device", tensor.device.type, dense)
    if str(tensor.layout) != "torch.strided":
        raise SpecError(f"{name}.layout", str(tensor.layout), dense)


def _array(field: str, name: str, tensor: Any) -> _Array:  # noqa: ANN401
    """Read a torch tensor or a numpy array, called *name*, and the storage behind it."""
    check_tensor(field, tensor, name)
    if isinstance(tensor, np.ndarray):
        address, strides = tensor.ctypes.data, tensor.strides
        dtype = str(tensor.dtype)
        return _Array(address, tensor.shape, strides, tensor.itemsize, _root(tensor), dtype)
    storage, size = tensor.untyped_storage(), tensor.element_size()
    on_cpu = tensor.device.type == "cpu"
    memory = Memory(
        storage.data_ptr(),
        storage.nbytes(),
        "DRAM" if on_cpu else "VRAM",
        0 if on_cpu else tensor.device.index or 0,
    )
    strides = tuple(each * size for each in tensor.stride())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Array(tensor.data_ptr(), tuple(tensor.shape), strides, size, memory, dtype)


def _root(array: np.ndarray[Any, Any]) -> Memory:
    """Return the memory of the array that *array* is a view of, however it was made."""
    root = array
    base = root.base
    while base is not None:
        if isinstance(base, np.ndarray):
            root = base
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return Memory(root.ctypes.data, root.nbytes)
