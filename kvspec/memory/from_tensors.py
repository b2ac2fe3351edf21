"""An engine's own tensors, read as regions.

Law: nothing is believed. Addresses, strides and extents come from the tensors; what the declared
layout says about them is checked, and every contradiction is an error that names the layer.

One tensor of an engine: address, shape, byte strides, and the memory behind it.

Law: what has no bytes of its own in a memory that can be registered is refused, whatever it looks
like; what has is read without importing the framework that made it.

Which axis each dimension of a tensor is, or which axes, where several lie in one dimension.

Law: a shape does not say what it means. Letters that are said are believed if every size fits them;
unless they are said, the shape has to have one reading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from inspect import ismethod
from itertools import combinations, pairwise
from math import prod
from typing import Any, NoReturn

import attrs
import numpy as np

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.engines.letters import NAMED_LAYOUTS
from kvspec.errors import SpecError
from kvspec.inputs import instance
from kvspec.memory.layout import axes_of
from kvspec.memory.region import Memory, Region
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part


@attrs.frozen
class Array:
    """What is read of one tensor; strides are bytes, *dtype* is the framework's own name."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    memory: Memory
    dtype: str


_DENSE = "a dense tensor on a CPU or a GPU"


def check_tensor(field: str, tensor: Any, name: str | None = None) -> None:  # noqa: ANN401
    """Raise `SpecError` naming *field* unless *tensor* is one, and *name* unless it has memory."""
    name = field if name is None else name
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject:
            raise SpecError(f"{name}.dtype", str(tensor.dtype), "plain bytes, such as bfloat16")
        if not tensor.dtype.isnative:
            raise SpecError(f"{name}.dtype", str(tensor.dtype), "this machine's order of bytes")
        return
    for needed in ("data_ptr", "stride", "element_size", "untyped_storage", "device", "layout"):
        if not hasattr(tensor, needed):
            raise SpecError(field, type(tensor).__name__, "a torch tensor or a numpy array")
    # A class with a dispatcher of its own stands for other tensors, or for none.
    if ismethod(getattr(type(tensor), "__torch_dispatch__", None)):
        raise SpecError(name, type(tensor).__name__, _DENSE)
    if tensor.device.type == "meta":
        raise SpecError(f"{name}.device", tensor.device.type, _DENSE)
    if str(tensor.layout) != "torch.strided" or getattr(tensor, "is_nested", False):
        told = "nested" if tensor.is_nested else str(tensor.layout)
        raise SpecError(f"{name}.layout", told, _DENSE)
    try:
        tensor.data_ptr(), tensor.untyped_storage()
    except (RuntimeError, NotImplementedError) as error:
        told = "one without a storage of its own (under vmap?)"
        raise SpecError(name, told, _DENSE) from error


def read_array(field: str, name: str, tensor: Any) -> Array:  # noqa: ANN401
    """Read a torch tensor or a numpy array, called *name*, and the storage behind it."""
    check_tensor(field, tensor, name)
    if isinstance(tensor, np.ndarray):
        address, strides = tensor.ctypes.data, tensor.strides
        dtype = str(tensor.dtype)
        return Array(address, tensor.shape, strides, tensor.itemsize, _root(tensor), dtype)
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
    return Array(tensor.data_ptr(), tuple(tensor.shape), strides, size, memory, dtype)


def _root(array: np.ndarray[Any, Any]) -> Memory:
    """Return the memory of the array that *array* is a view of, however it was made.

    The root may have strides of its own, over a buffer that is no array: what it spans is known.
    """
    root = array
    base = root.base
    while base is not None:
        if isinstance(base, np.ndarray):
            root = base
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    steps = [(n - 1) * stride for n, stride in zip(root.shape, root.strides, strict=True) if n]
    first = root.ctypes.data + sum(step for step in steps if step < 0)
    length = sum(map(abs, steps)) + root.itemsize
    return Memory(first, length if root.size else 0)


Dims = tuple[str, ...]
"""The letters of each dimension, outermost first."""

NOUNS = {"B": "block", "K": "plane", "H": "unit", "N": "row", "P": "chunk", "C": "byte"}

_ORDERS = (*(layout.replace("L", "") for layout in NAMED_LAYOUTS), "BNKHC", "BHKNC")
"""Orders that engines use; the last two have keys and values of a token, or a head, together."""


def dimensions(axes: object) -> Dims:
    """Return the letters of each dimension that *axes* names; raise `SpecError` unless they can be.

    >>> dimensions("BK(NHC)")
    ('B', 'K', 'NHC')
    """
    if isinstance(axes, str) and re.fullmatch(r"([A-Z]|\([A-Z]+\))*", axes):
        dims = tuple(either or one for either, one in re.findall(r"\(([A-Z]+)\)|([A-Z])", axes))
        letters = "".join(dims)
        before = letters.rstrip("C")
        once = set(before) <= set("BKHNP") and len(set(before)) == len(before)
        # Content in several dimensions has a size in each; beside other letters it has to be one.
        beside_others = any("C" in each and len(each) > 1 for each in dims)
        if once and (letters.count("C") < 2 or not beside_others):  # noqa: PLR2004 - several
            return dims
    wanted = (
        "the letters B, K, H, N, P, C of the dimensions, each once (C: the last ones), those of "
        "one dimension in brackets"
    )
    raise SpecError("axes", axes, wanted)


def said(dims: Dims) -> str:
    """Return how *dims* are said: ``B(NHC)``."""
    return "".join(each if len(each) == 1 else f"({each})" for each in dims)


def sizes(part: Part, units: int) -> dict[str, int]:
    """Return how long each axis of *part* is, of which a rank has so many *units*; C in bytes."""
    content = part.content_bytes // part.chunks
    return {"K": 1, "H": units, "N": part.states, "P": part.chunks, "C": content}


def beside(letters: str, parts: Iterable[Part]) -> str:
    """Return the axis along which *parts* of one tensor lie side by side."""
    if not all(part.per_token for part in parts):
        return "H"
    return "K" if "K" in letters else "C"


def _lengths(letters: str, parts: Mapping[Part, int]) -> dict[str, int]:
    """Return how long each axis of a tensor of *parts* is; of blocks that is not known."""
    axis, own = beside(letters, parts), [sizes(part, units) for part, units in parts.items()]
    return own[0] | {axis: sum(size[axis] for size in own)}


def _blocks(letters: str, bytes_: int, lengths: Mapping[str, int]) -> int | None:
    """Return how many blocks a dimension of *letters* has; 1 without B; None if it does not fit."""
    blocks, rest = divmod(bytes_, prod(lengths[each] for each in letters if each != "B"))
    fits = not rest and (blocks > 0 if "B" in letters else blocks == 1)
    return blocks if fits else None


def unfolded(field: str, array: Array, dims: Dims, parts: Mapping[Part, int]) -> Array:
    """Return *array* with a dimension of its own for each letter of *dims*.

    Where one has several, the sizes of *parts* say how it is cut; *field* is named if they do not
    fit.
    """
    if len(dims) != len(array.shape):
        raise SpecError(f"{field}.shape", array.shape, f"{len(dims)} dimensions, {said(dims)}")
    if all(len(each) == 1 for each in dims):
        return array
    lengths, item = _lengths("".join(dims), parts), array.itemsize
    shape: list[int] = []
    strides: list[int] = []
    for letters, count, stride in zip(dims, array.shape, array.strides, strict=True):
        if len(letters) == 1:
            shape.append(count)
            strides.append(stride)
            continue
        step = item if "C" in letters else 1
        blocks = _blocks(letters, count * step, lengths)
        if blocks is None or lengths["C"] % step:
            raise SpecError(f"{field}.shape", array.shape, _wanted(letters, lengths))
        own = [blocks if x == "B" else lengths[x] // (step if x == "C" else 1) for x in letters]
        shape += own
        strides += [stride * prod(own[place + 1 :]) for place in range(len(own))]
    return attrs.evolve(array, shape=tuple(shape), strides=tuple(strides))


def _wanted(letters: str, lengths: Mapping[str, int]) -> str:
    """Return what a dimension of *letters* has to be: ``4 units x 32 bytes along (HC)``."""
    counted = [
        f"{lengths[each]} {NOUNS[each]}{'s' if lengths[each] > 1 else ''}"
        for each in letters
        if each != "B"
    ]
    whole = "whole blocks of " if "B" in letters else ""
    return f"{whole}{' x '.join(counted)} along ({letters})"


def folded_readings(order: str, array: Array, parts: Mapping[Part, int]) -> Iterator[str]:
    """Yield what may be said of an *array* of fewer dimensions than *order* has letters, once each.

    Axes of one element are no letters: whatever stands in their place is the same bytes.
    """
    seen: dict[str, None] = {}
    for letters in (order, *_ORDERS):
        if set(letters) - {"K"} != set(order) - {"K"}:
            continue
        lengths, axis = _lengths(letters, parts), beside(letters, parts)
        shown = "".join(x for x in letters if x == "B" or lengths[x] > 1)
        own = [sizes(part, units) | {axis: 0} for part, units in parts.items()]
        if any(size != own[0] for size in own):
            continue
        for cuts in combinations(range(1, len(shown)), max(len(array.shape) - 1, 0)):
            dims = tuple(shown[a:b] for a, b in pairwise((0, *cuts, len(shown))))
            fits = len(dims) == len(array.shape) and all(
                _blocks(own, count * (array.itemsize if "C" in own else 1), lengths)
                for own, count in zip(dims, array.shape, strict=True)
            )
            if fits:
                seen.setdefault(said(dims))
    yield from seen


def check_one_reading(field: str, axes: str, shape: tuple[int, ...]) -> None:
    """Refuse a shape that another order of axes, one that engines use, fits as well as *axes*.

    Strides cannot tell: whatever the order, a dense tensor's stand in it.
    """
    if "P" in axes and shape[axes.index("P")] == shape[axes.index("N")] > 1:
        wanted = f"{axes!r} said: rows in chunks or chunks in rows, both fit {field}.shape={shape}"
        raise SpecError("axes", None, wanted)
    for layout in NAMED_LAYOUTS:
        other = layout.replace("L", "")
        if sorted(other) == sorted(axes) and other != axes:
            moved = [letter for letter in axes if axes.index(letter) != other.index(letter)]
            fits = all(shape[axes.index(x)] == shape[other.index(x)] for x in moved if x != "B")
            if fits and any(shape[axes.index(x)] > 1 for x in moved):
                wanted = f"{axes!r} or {other!r}: both fit {field}.shape={shape}"
                raise SpecError("axes", None, wanted)


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
