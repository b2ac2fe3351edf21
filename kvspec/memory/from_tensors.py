"""Read the tensors of an engine as regions, without copying them.

Invariant: addresses, strides and sizes come from the tensors. Everything that the engine declares
about them is checked, and each contradiction is an error that names the layer. A framework such as
torch is never imported.

How it works:
    `read` reads each tensor in four steps:

    1. `read_array` returns the address, shape and strides of the tensor, and the memory that its
       storage occupies. It refuses tensors without bytes of their own, such as meta tensors.
    2. The dimensions get their letters from the caller's *axes*.
    3. `unfolded` splits each dimension that has several letters. A tensor of shape (24, 16) with
       the axes ``(BN)(HC)``, blocks of 4 tokens and 2 heads of 8 bytes becomes (6, 4, 2, 8).
    4. `_TensorReader` checks the sizes and strides, and returns one region for each part.

    A shape does not identify its axes, so the caller has to pass them. We tried to guess them: with
    as many heads as tokens, a wrong guess fits too, and the bytes of two axes are swapped silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from inspect import ismethod
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
    """The description of one tensor.

    Attributes:
        address: Address of the first element.
        shape: Size of each dimension.
        strides: Stride of each dimension, in bytes.
        itemsize: Bytes of one element.
        memory: The memory that the tensor's storage occupies.
        dtype: The framework's name of the element type.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    memory: Memory
    dtype: str


_DENSE = "a dense tensor on a CPU or a GPU"


def check_tensor(field: str, tensor: Any, name: str | None = None) -> None:  # noqa: ANN401
    """Check that *tensor* is a dense torch tensor or numpy array with memory of its own.

    Args:
        field: Field of the error if *tensor* is not a tensor.
        tensor: The value to check.
        name: Field of the error if the tensor has no usable memory. *field* by default.

    Raises:
        SpecError: If a check fails.

    >>> check_tensor("cache", np.zeros(4, np.uint8))
    """
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
    # A class with its own dispatcher, such as a FakeTensor or DTensor, wraps other tensors or none.
    # Its address would not be the address of its data.
    if ismethod(getattr(type(tensor), "__torch_dispatch__", None)):
        raise SpecError(name, type(tensor).__name__, _DENSE)
    if tensor.device.type == "meta":
        raise SpecError(f"{name}.device", tensor.device.type, _DENSE)
    if str(tensor.layout) != "torch.strided" or getattr(tensor, "is_nested", False):
        layout = "nested" if tensor.is_nested else str(tensor.layout)
        raise SpecError(f"{name}.layout", layout, _DENSE)
    # Inside torch.vmap a tensor looks dense, but access to its storage fails.
    try:
        tensor.data_ptr(), tensor.untyped_storage()
    except (RuntimeError, NotImplementedError) as error:
        value = "one without a storage of its own (under vmap?)"
        raise SpecError(name, value, _DENSE) from error


def read_array(field: str, name: str, tensor: Any) -> Array:  # noqa: ANN401
    """Return the description of a torch tensor or numpy array.

    *field* and *name* are the fields of errors, as for `check_tensor`.

    >>> array = read_array("cache", "cache", np.zeros((6, 4), np.uint16)[:, 1:])
    >>> array.shape, array.strides, array.memory.length
    ((6, 3), (8, 2), 48)
    """
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
    strides = tuple(stride * size for stride in tensor.stride())  # torch counts elements
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Array(tensor.data_ptr(), tuple(tensor.shape), strides, size, memory, dtype)


def _root(array: np.ndarray[Any, Any]) -> Memory:
    """Return the memory of the array that *array* is a view of.

    The whole array must be registered once, however many views of it are layers.
    """
    # The chain of bases may contain memoryviews and objects that are not arrays. The last array in
    # it may have any strides over a foreign buffer, so its memory is the range that it spans.
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


# The letters of each dimension, outermost first. A dimension with several axes has several letters.
Dims = tuple[str, ...]

NOUNS = {"B": "block", "K": "plane", "H": "unit", "N": "row", "P": "chunk", "C": "byte"}


def dimensions(axes: object) -> Dims:
    """Return the letters of each dimension of *axes*.

    Raises:
        SpecError: If *axes* is not a valid string of letters.

    >>> dimensions("BK(NHC)")
    ('B', 'K', 'NHC')
    """
    if isinstance(axes, str) and re.fullmatch(r"([A-Z]|\([A-Z]+\))*", axes):
        dims = tuple(
            several or single for several, single in re.findall(r"\(([A-Z]+)\)|([A-Z])", axes)
        )
        letters = "".join(dims)
        before = letters.rstrip("C")
        once = set(before) <= set("BKHNP") and len(set(before)) == len(before)
        # If several dimensions are C, no C may share a dimension with another letter. Only the
        # product of all C is known, so it is not known how to divide the shared dimension.
        shares_dimension = any("C" in dim and len(dim) > 1 for dim in dims)
        if once and (letters.count("C") < 2 or not shares_dimension):  # noqa: PLR2004 - several
            return dims
    expected = (
        "each of B, K, H, N, P at most once, then C once or repeated, with brackets around the "
        "letters of one dimension"
    )
    raise SpecError("axes", axes, expected)


def said(dims: Dims) -> str:
    """Return the string of *dims*, such as ``B(NHC)``."""
    return "".join(letters if len(letters) == 1 else f"({letters})" for letters in dims)


def sizes(part: Part, units: int) -> dict[str, int]:
    """Return the size of each axis of *part* on a rank that holds *units* units. C is in bytes."""
    content = part.content_bytes // part.chunks
    return {"K": 1, "H": units, "N": part.states, "P": part.chunks, "C": content}


def beside(letters: str, parts: Iterable[Part]) -> str:
    """Return the axis along which the parts of one tensor are side by side."""
    if not all(part.per_token for part in parts):
        return "H"
    return "K" if "K" in letters else "C"


def _lengths(letters: str, parts: Mapping[Part, int]) -> dict[str, int]:
    """Return the size of each axis of a tensor of *parts*, except B, which is not known."""
    axis, own = beside(letters, parts), [sizes(part, units) for part, units in parts.items()]
    return own[0] | {axis: sum(size[axis] for size in own)}


def _blocks(letters: str, bytes_: int, lengths: Mapping[str, int]) -> int | None:
    """Return the number of blocks of a dimension: 1 without B, None if the size does not fit.

    >>> lengths = {"N": 4, "H": 2, "C": 8}
    >>> _blocks("BN", 24, lengths), _blocks("HC", 16, lengths), _blocks("HC", 24, lengths)
    (6, 1, None)
    """
    blocks, rest = divmod(bytes_, prod(lengths[letter] for letter in letters if letter != "B"))
    fits = not rest and (blocks > 0 if "B" in letters else blocks == 1)
    return blocks if fits else None


def unfolded(field: str, array: Array, dims: Dims, parts: Mapping[Part, int]) -> Array:
    """Return *array* with one dimension for each letter of *dims*.

    The sizes of *parts*, with the units that the rank holds, decide how a dimension with several
    letters is divided. *field* is the field of the error if they do not fit.
    """
    if len(dims) != len(array.shape):
        raise SpecError(f"{field}.shape", array.shape, f"{len(dims)} dimensions, {said(dims)}")
    if all(len(letters) == 1 for letters in dims):
        return array
    lengths, itemsize = _lengths("".join(dims), parts), array.itemsize
    shape: list[int] = []
    strides: list[int] = []
    for letters, count, stride in zip(dims, array.shape, array.strides, strict=True):
        if len(letters) == 1:
            shape.append(count)
            strides.append(stride)
            continue
        # The part's content is in bytes, the tensor's in elements.
        step = itemsize if "C" in letters else 1
        blocks = _blocks(letters, count * step, lengths)
        if blocks is None or lengths["C"] % step:
            raise SpecError(f"{field}.shape", array.shape, _product(letters, lengths))
        inner = [blocks if x == "B" else lengths[x] // (step if x == "C" else 1) for x in letters]
        shape += inner
        strides += [stride * prod(inner[index + 1 :]) for index in range(len(inner))]
    return attrs.evolve(array, shape=tuple(shape), strides=tuple(strides))


def _product(letters: str, lengths: Mapping[str, int]) -> str:
    """Return the expected size of a dimension, such as ``4 units x 32 bytes along (HC)``."""
    counted = [
        f"{lengths[letter]} {NOUNS[letter]}{'s' if lengths[letter] > 1 else ''}"
        for letter in letters
        if letter != "B"
    ]
    whole = "whole blocks of " if "B" in letters else ""
    return f"{whole}{' x '.join(counted)} along ({letters})"


# The arrays of each group, by layer and then by the name of a part or tensor.
Given = dict[KVCacheGroup, dict[str, dict[str, Array]]]


def read(
    engine: EngineSpec,
    rank: RankId,
    tensors: Mapping[str, Any],
    axes: str | Mapping[str, str],
) -> tuple[tuple[Region, ...], tuple[Memory, ...]]:
    """Return the regions and the memory of *tensors*. See `RankCache.from_tensors`."""
    instance("engine", engine, EngineSpec).parallel.check_rank(rank)
    check_layers(engine, rank, tensors)
    given: Given = {}
    for group in engine.groups:
        layers = [layer for layer in engine.layers_at(group, rank.pp) if layer in tensors]
        given[group] = {layer: _arrays(group, layer, tensors[layer]) for layer in layers}
    # An unknown key explains why a tensor has no letters, so its error comes first.
    if isinstance(axes, Mapping) and not _all_named(axes, given):
        _check_names(axes, given)
    regions: list[Region] = []
    memory: dict[Memory, None] = {}
    for group, arrays_by_layer in given.items():
        for layer, arrays in arrays_by_layer.items():
            for array, region in _layer(engine, group, rank, layer, arrays, axes):
                memory[array.memory] = None
                regions.append(region)
    if isinstance(axes, Mapping):
        _check_names(axes, given)
    return tuple(regions), _joined(memory)


def _all_named(axes: Mapping[str, str], given: Given) -> bool:
    """Return whether *axes* has letters for each tensor, by its name or by its group."""
    return all(
        group.name in axes or name in axes
        for group, layers in given.items()
        for arrays in layers.values()
        for name in arrays
    )


def _check_names(axes: Mapping[str, str], given: Given) -> None:
    """Check that each key of *axes* is the name of a group or of tensors, and not of both."""
    tensors = [
        (group.name, name)
        for group, layers in given.items()
        for name in dict.fromkeys(name for arrays in layers.values() for name in arrays)
    ]
    # All ranks may pass the same axes. So the parts of a group without layers on this rank are
    # known too, under each name that a tensor of them could have.
    absent = [part for group, layers in given.items() if not layers for part in group.own_parts]
    known = [*(name for _, name in tensors), *(group.name for group in given)]
    names = dict.fromkeys([*known, *(x for part in absent for x in (part.name, part.tensor))])
    for key in axes:
        if key not in names:
            expected = f"names of the tensors given, or of groups: {', '.join(names)}"
            raise SpecError("axes", key, expected)
        by_group = any(group == key and name not in axes for group, name in tensors)
        if by_group and any(name == key for _, name in tensors):
            raise SpecError("axes", key, "a name that only a group or only tensors have")


def _joined(memory: Iterable[Memory]) -> tuple[Memory, ...]:
    """Return *memory* with overlapping ranges joined, such as views of one buffer.

    >>> _joined([Memory(0, 10), Memory(20, 10), Memory(5, 10)])
    (Memory(address=20, length=10, memory_type='DRAM', device=0),
     Memory(address=0, length=15, memory_type='DRAM', device=0))

    Ranges that only touch stay apart, because they may be two registrations:

    >>> len(_joined([Memory(0, 10), Memory(10, 10)]))
    2
    """
    joined: list[Memory] = []
    for member in memory:
        device, start, end = (member.memory_type, member.device), member.address, member.end
        for known in [old for old in joined if (old.memory_type, old.device) == device]:
            if start < known.end and known.address < end:
                joined.remove(known)
                start, end = min(start, known.address), max(end, known.end)
        joined.append(Memory(start, end - start, *device))
    return tuple(joined)


def check_layers(engine: EngineSpec, rank: RankId, tensors: object) -> None:
    """Check that *tensors* has each layer of the rank that moves, and no layer of other ranks.

    Raises:
        SpecError: If a layer is missing or belongs to another rank.
    """
    if not isinstance(tensors, Mapping):
        expected = "a mapping from layer names to tensors"
        raise SpecError("tensors", type(tensors).__name__, expected)
    excluded = set(engine.excluded)
    for layer, _ in engine.held(rank):
        if layer not in tensors and layer not in excluded:
            raise SpecError("tensors", sorted(tensors, key=repr), f"a tensor for layer {layer!r}")
    for layer in tensors:
        if engine.stage_of.get(layer) != rank.pp:
            raise SpecError("tensors", layer, f"layers that {rank} has")


def _arrays(group: KVCacheGroup, layer: str, tensors: Any) -> dict[str, Array]:  # noqa: ANN401
    """Read the tensors of one layer, by the name of a part or of a tensor of parts."""
    field, parts = f"tensors[{layer!r}]", group.spec.of_layer(layer).parts
    if not isinstance(tensors, Mapping):
        name = parts[0].tensor
        return {name: read_array(field, f"{field}[{name!r}]", tensors)}
    known = dict.fromkeys([*(p.name for p in parts), *(p.tensor for p in parts)])
    for name in tensors:
        if name not in known:
            raise SpecError(field, name, f"one of {', '.join(known)}")
    for part in parts:
        if part.name != part.tensor and {part.name, part.tensor} <= set(tensors):
            raise SpecError(field, sorted(tensors), "each part once")
    return {
        name: read_array(f"{field}[{name!r}]", f"{field}[{name!r}]", tensor)
        for name, tensor in tensors.items()
    }


def _check_dtype(field: str, parts: Iterable[Part], array: Array) -> None:
    """Check that float elements have the part's float type."""
    # Engines keep packed and quantized caches as plain bytes or ints, so those types are accepted.
    if "float" not in array.dtype:
        return
    for part in parts:
        dtype = part.dtype
        if dtype is not None and "float" in dtype and dtype != array.dtype:
            raise SpecError(
                f"{field}.dtype", array.dtype, f"{dtype}, as the part has, or plain bytes"
            )


def _layer(
    engine: EngineSpec,
    group: KVCacheGroup,
    rank: RankId,
    layer: str,
    arrays: Mapping[str, Array],
    axes: str | Mapping[str, str],
) -> Iterator[tuple[Array, Region]]:
    """Yield each region of one layer, and the array that contains it."""
    parts = {part: len(engine.units(group, part, rank)) for part in group.in_memory(layer).parts}
    order = _order(engine.layout_of(group), parts)
    for name, array in arrays.items():
        held = {p: units for p, units in parts.items() if units and name in (p.name, p.tensor)}
        if held:
            field = f"tensors[{layer!r}][{name!r}]"
            passed = axes.get(name, axes.get(group.name)) if isinstance(axes, Mapping) else axes
            if passed is None:
                raise SpecError("axes", axes, rule=_choices(field, array, order))
            dims = dimensions(passed)
            letters, single_axes = "".join(dims), unfolded(field, array, dims, held)
            reader = _TensorReader(field, group.name, order, letters, single_axes)
            regions = list(reader.regions(layer, held))
            _check_dtype(field, held, array)
            yield from ((array, region) for region in regions)
    missing = [
        p.name for p, units in parts.items() if units and not {p.name, p.tensor} & set(arrays)
    ]
    if missing:
        raise SpecError(f"tensors[{layer!r}]", sorted(arrays), f"a tensor for {', '.join(missing)}")


def _order(layout: str, parts: Iterable[Part]) -> str:
    """Return the letters of *layout* that are axes of one layer's tensors, outermost first.

    K is an axis only if the parts are planes. Parts that are packed in the content or in the units
    of a state have no axis of their own.
    """
    parts = list(parts)
    planes = "K" if all(part.per_token for part in parts) and "K" in layout else ""
    return "".join(axis for axis in axes_of(layout, parts) if axis in f"BHPNC{planes}")


def _choices(field: str, array: Array, order: str) -> str:
    """Return the sentence of the error if the caller passed no axes for a tensor."""
    orders = dict.fromkeys([order, *(layout.replace("L", "") for layout in NAMED_LAYOUTS)])
    return (
        f"pass the letter of each dimension of {field}.shape={array.shape}, outermost first, such "
        f"as {' or '.join(map(repr, orders))}, with brackets around the letters of one dimension"
    )


@attrs.frozen
class _TensorReader:
    """One tensor with one letter for each dimension."""

    field: str
    group: str
    layout: str
    axes: str
    array: Array

    def __attrs_post_init__(self) -> None:
        for letter, count, _ in self._dims:
            if not count:
                self._refuse(f"at least 1 {NOUNS[letter]} along {letter}")
        self._check_contiguous_content()
        self._check_order()

    def _check_contiguous_content(self) -> None:
        step = self.array.itemsize
        for letter, count, stride in reversed(self._dims):
            if letter != "C":
                break
            # The stride of a dimension of size 1 is arbitrary.
            if count > 1 and stride != step:
                raise SpecError(
                    f"{self.field}.stride", stride, f"{step}, because content is contiguous"
                )
            step *= count

    def _check_order(self) -> None:
        """Check that the strides descend in the order of the layout."""
        visible = [dim for dim in self._dims if dim[1] > 1]
        layout_letters = [letter for letter in self.layout if letter in self.axes]
        by_stride = [letter for letter, *_ in sorted(visible, key=lambda dim: -dim[2])]
        # Several dimensions may be C, and they count once.
        actual = list(dict.fromkeys(letter for letter in by_stride if letter in layout_letters))
        if actual != [letter for letter in layout_letters if letter in actual]:
            expected = f"strides in the order of layout {self.layout}: a group may have its own"
            raise SpecError(f"{self.field}.stride", self.array.strides, expected)

    @cached_property
    def _dims(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(zip(self.axes, self.array.shape, self.array.strides, strict=True))

    def size_of(self, letter: str) -> int:
        """Return the size of the tensor along *letter*. C is in bytes."""
        counts = [count for axis, count, _ in self._dims if axis == letter]
        return prod(counts) * (self.array.itemsize if letter == "C" else 1)

    def stride(self, letter: str) -> int:
        """Return the bytes from one index of *letter* to the next, or 0 without that axis."""
        return next((stride for axis, _, stride in self._dims if axis == letter), 0)

    def regions(self, layer: str, parts: Mapping[Part, int]) -> Iterator[Region]:
        """Yield the region of each of the tensor's *parts*, which map to the rank's units.

        The parts are side by side along K, H or C. `beside` returns that axis.
        """
        axis = beside(self.axes, parts)
        part_sizes = [sizes(part, units) for part, units in parts.items()]
        self._check(axis, sum(size[axis] for size in part_sizes))
        offset = 0  # along the axis; bytes if the axis is C
        for part, size in zip(parts, part_sizes, strict=True):
            for letter in size.keys() - axis:
                self._check(letter, size[letter])
            yield Region(
                group=self.group,
                layer=layer,
                part=part.name,
                base=self.array.address + offset * (1 if axis == "C" else self.stride(axis)),
                num_blocks=self.size_of("B"),
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
            offset += size[axis]

    def _check(self, letter: str, expected: int) -> None:
        """Check the size of the tensor along *letter*."""
        actual = self.size_of(letter)
        if actual != expected:
            count = f"{expected} {NOUNS[letter]}{'s' if expected > 1 else ''} along {letter}"
            content = f"content of {expected} bytes, not {actual}"
            self._refuse(content if letter == "C" else count)

    def _refuse(self, expected: str) -> NoReturn:
        wanted = f"{expected}, in the axes {self.axes}"
        raise SpecError(f"{self.field}.shape", self.array.shape, wanted)
