"""An engine's own tensors, read as regions.

Law: nothing is believed. Addresses, strides and extents come from the tensors; what the declared
layout says about them is checked, and every contradiction is an error that names the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from kvspec.cache import Memory, RankCache, Region
from kvspec.engine import EngineSpec, KVCacheGroup
from kvspec.errors import SpecError
from kvspec.parallel import RankId
from kvspec.slices import Part


@attrs.frozen
class _Array:
    """What is read of one tensor: address, shape, byte strides, and the memory behind it."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    memory: Memory


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
    tensor that holds both k and v has them along ``K``, or packed in ``C``.
    """
    engine.parallel.check_rank(rank)
    regions: list[Region] = []
    memory: dict[Memory, None] = {}
    for group in engine.groups:
        own: list[Region] = []
        for layer in group.layers:
            if layer not in tensors:
                raise SpecError("tensors", sorted(tensors), f"a tensor for layer {layer!r}")
            for array, region in _layer(engine, group, rank, layer, tensors[layer], axes):
                memory[array.memory] = None
                own.append(region)
        _check_apart(own)
        regions += own
    return RankCache(engine, rank, tuple(regions), tuple(memory))


def _layer(
    engine: EngineSpec,
    group: KVCacheGroup,
    rank: RankId,
    layer: str,
    given: Any,  # noqa: ANN401
    axes: str | Mapping[str, str] | None,
) -> Iterator[tuple[_Array, Region]]:
    parts = group.spec.of_layer(layer).parts
    letters = engine.layout_of(group).replace("L", "")
    named = given if isinstance(given, Mapping) else {parts[0].tensor: given}
    for name, tensor in named.items():
        held = [part for part in parts if name in (part.name, part.tensor)]
        if not held:
            known = ", ".join(dict.fromkeys([*(p.name for p in parts), *(p.tensor for p in parts)]))
            raise SpecError(f"tensors[{layer!r}]", name, f"one of {known}")
        order = axes.get(name) if isinstance(axes, Mapping) else axes
        if order is None:
            order = letters if len(held) > 1 else letters.replace("K", "")
        reader = _Reader(f"tensors[{layer!r}][{name!r}]", group, letters, order, _array(tensor))
        units = [
            len(engine.parallel.deal(part.units, part.deal_in).ranges[rank.tp]) for part in held
        ]
        for part, count, offset in reader.apart(held, units):
            if count:
                yield reader.array, reader.region(layer, part, count, offset)
    missing = [p.name for p in parts if not {p.name, p.tensor} & set(named)]
    if missing:
        raise SpecError(f"tensors[{layer!r}]", sorted(named), f"a tensor for {', '.join(missing)}")


@attrs.frozen
class _Reader:
    """One tensor with its letters."""

    field: str
    group: KVCacheGroup
    layout: str
    axes: str
    array: _Array

    def __attrs_post_init__(self) -> None:
        if len(self.axes) != len(self.array.shape) or not set(self.axes) <= set("BKHNC"):
            wanted = f"{len(self.axes)} dimensions, {self.axes}"
            raise SpecError(f"{self.field}.shape", self.array.shape, wanted)
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

    def apart(self, parts: list[Part], units: list[int]) -> Iterator[tuple[Part, int, int]]:
        """Yield each part of the tensor with its local units and its first byte."""
        stacked = not parts[0].tokens_per_state
        planes = "K" in self.axes and len(parts) > 1
        if planes and self.extent("K") != len(parts):
            raise SpecError(f"{self.field}.shape", self.array.shape, f"{len(parts)} planes along K")
        axis, sizes = "C", [part.content_bytes for part in parts]
        if stacked and "H" in self.axes:
            axis, sizes = "H", units
        if not planes and self.extent(axis) < sum(sizes):
            wanted = f"at least {sum(sizes)} {'bytes' if axis == 'C' else 'units'} along {axis}"
            raise SpecError(f"{self.field}.shape", self.array.shape, wanted)
        step = self.stride("K") if planes else self.stride("H") if axis == "H" else 1
        at = 0
        for part, count, size in zip(parts, units, sizes, strict=True):
            yield part, count, at * step
            at += 1 if planes else size

    def region(self, layer: str, part: Part, units: int, offset: int) -> Region:
        """Return the region of *part*, checked against the tensor's extents."""
        wanted = {"H": units, "N": part.states, "C": part.content_bytes}
        for letter, least in wanted.items():
            if self.extent(letter) < least:
                unit = "bytes" if letter == "C" else "entries"
                told = f"at least {least} {unit} along {letter} for part {part.name}"
                raise SpecError(f"{self.field}.shape", self.array.shape, told)
        if part.tokens_per_state and self.extent("N") != part.states:
            told = f"{part.states} rows of a block along N"
            raise SpecError(f"{self.field}.shape", self.array.shape, told)
        return Region(
            group=self.group.name,
            layer=layer,
            part=part.name,
            base=self.array.address + offset,
            num_blocks=self.extent("B"),
            block_stride=self.stride("B"),
            unit_stride=self.stride("H"),
            state_stride=self.stride("N"),
            content_bytes=part.content_bytes,
            units=units,
            states=part.states,
            memory_type=self.array.memory.memory_type,
            device=self.array.memory.device,
        )


def _array(tensor: Any) -> _Array:  # noqa: ANN401
    """Read a torch tensor or a numpy array, and the storage behind it."""
    if isinstance(tensor, np.ndarray):
        root = tensor
        while isinstance(root.base, np.ndarray):
            root = root.base
        memory = Memory(root.ctypes.data, root.nbytes)
        return _Array(tensor.ctypes.data, tensor.shape, tensor.strides, tensor.itemsize, memory)
    for name in ("data_ptr", "stride", "element_size", "untyped_storage", "device", "shape"):
        if not hasattr(tensor, name):
            raise SpecError("tensor", type(tensor).__name__, "a torch tensor or a numpy array")
    storage, size = tensor.untyped_storage(), tensor.element_size()
    on_cpu = tensor.device.type == "cpu"
    memory = Memory(
        storage.data_ptr(),
        storage.nbytes(),
        "DRAM" if on_cpu else "VRAM",
        0 if on_cpu else tensor.device.index or 0,
    )
    strides = tuple(each * size for each in tensor.stride())
    return _Array(tensor.data_ptr(), tuple(tensor.shape), strides, size, memory)


def _check_apart(regions: list[Region]) -> None:
    """Raise `SpecError` if two parts of one group share a byte.

    Regions whose extents meet are taken to repeat with the blocks: then their contents, counted
    within a block stride, must be apart.
    """
    ordered = sorted(regions, key=lambda each: each.extent.start)
    meeting: list[Region] = []
    stop = 0
    for each in [*ordered, None]:
        if each is not None and each.extent.start < stop:
            meeting.append(each)
            stop = max(stop, each.extent.stop)
            continue
        if len(meeting) > 1:
            _check_interleaved(meeting)
        if each is not None:
            meeting, stop = [each], each.extent.stop


def _check_interleaved(regions: list[Region]) -> None:
    blocks = {(each.block_stride, each.num_blocks) for each in regions}
    contents: list[tuple[int, int, Region]] = []
    for each in regions:
        units = np.arange(each.units)[:, None] * each.unit_stride
        rows = np.arange(each.states) * each.state_stride
        first = (each.base + units + rows).ravel() - regions[0].base
        if len(blocks) == 1 and each.num_blocks > 1:
            first %= each.block_stride
        contents += [(int(at), int(at) + each.content_bytes, each) for at in first]
    contents.sort(key=lambda content: content[:2])
    for (_, stop, one), (start, _, other) in pairwise(contents):
        if start < stop or len(blocks) > 1:
            pair = f"{one.layer}.{one.part} and {other.layer}.{other.part}"
            raise SpecError("tensors", pair, "regions of one group that do not overlap")
