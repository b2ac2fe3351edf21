"""Turn the storage of a rank into tensors like those of a serving engine.

Invariant: the place of each byte comes from `carve.stored_views`, never from the library.

How it works:
    Engines store the same bytes in different tensors: one for keys and values or two, typed or
    untyped, with axes folded into one. A function *choose* decides each variant, so a strategy can
    draw it. "Whole" is one tensor of all parts, "folded" joins
    dimensions. Example: a layer with keys and values in the layout LBKHNC, 6 blocks, 2 heads, 4
    rows of 16 bytes:

        whole     folded    tensors and axes
        no        no        k, v: BHNC (6, 2, 4, 16)
        yes       no        kv: KBHNC (2, 6, 2, 4, 16), with the strides of the storage
        no        yes       k, v: B(HNC) (6, 128)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.testing.carve import Blocks, Bytes, Ordered, StoredBytes, stored_views

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec
    from kvspec.ownership.parallel import RankId
    from kvspec.ownership.part import Part

# The tensors of each layer by name, and the letters of their dimensions by name or group.
TensorsAndAxes = tuple[dict[str, dict[str, Any]], dict[str, str]]

# Called with a variant, returns whether to use it: "whole" (all parts in one tensor), "torch",
# "typed", "folded" (two axes in one dimension), "by group" (letters by group, not by tensor).
Choose = Callable[[str], bool]

# Name of a tensor, its letters, its bytes and its dtype.
_Array = tuple[str, str, Bytes, str | None]

_NUMPY = {1: np.uint8, 2: np.uint16, 4: np.float32, 8: np.float64}


def typed_tensors(
    engine: EngineSpec, rank: RankId, storage: StoredBytes, num_blocks: Blocks, choose: Choose
) -> TensorsAndAxes:
    """Return views of *storage* as tensors, for all layers of which *rank* holds a unit.

    The dimensions are block, unit, row and content. A tensor of several parts has another first
    dimension for the parts. A tensor of a state has the units of all its parts in one dimension.
    """
    views = stored_views(engine, rank, storage, num_blocks)
    tensors: dict[str, dict[str, Any]] = {}
    cut = {part for (_, _, part), view in views.items() if isinstance(view, Ordered)}
    names = {part.name: part.tensor for group in engine.groups for part in group.own_parts}
    tensors_cut = {names[part] for part in cut}
    # A page format may cut the bytes of a row into chunks. They are one more axis: P.
    axes = {name: "BHPNC" if tensor in tensors_cut else "BHNC" for name, tensor in names.items()}
    by_layer: dict[str, list[_Array]] = {}
    for group in engine.groups:
        for layer in group.layers:
            parts = {
                part: views[group.name, layer, part.name]
                for part in group.spec.of_layer(layer).parts
                if np.prod(views.get((group.name, layer, part.name), np.empty(0)).shape)
            }
            by_layer[layer] = _of_layer(parts, axes, choose)
            axes |= {name: letters for name, letters, _, _ in by_layer[layer]}
    folds = {name: _folds(name, by_layer, choose) for name in axes}
    for layer, arrays in by_layer.items():
        for name, _, array, dtype in arrays:
            for at in folds[name]:
                array = _fold(array, at)  # noqa: PLW2901 - folded step by step
            tensors.setdefault(layer, {})[name] = _typed(array, dtype, choose)
    used = {name: letters for arrays in by_layer.values() for name, letters, _, _ in arrays}
    folded = {name: _letters(letters, folds[name]) for name, letters in used.items()}
    return tensors, _by_group(engine, tensors, folded, choose)


def raw_pages(
    engine: EngineSpec, rank: RankId, storage: StoredBytes, num_blocks: Blocks
) -> dict[str, Bytes]:
    """Return the pages of each layer of states as vLLM passes them: shape (blocks, 1, 1, bytes).

    Layers of which *rank* holds no unit are missing. The padding of a page is not included.
    """
    views = stored_views(engine, rank, storage, num_blocks)
    pages: dict[str, Bytes] = {}
    for group in engine.groups:
        for layer in group.layers:
            held = [
                view
                for part in group.spec.of_layer(layer).parts
                for view in [views.get((group.name, layer, part.name))]
                if not part.per_token and view is not None and view.size
            ]
            if held:
                first = min(held, key=lambda view: view.ctypes.data)
                size = sum(view[0].size for view in held)
                shape, strides = (len(first), 1, 1, size), (first.strides[0], size, size, 1)
                pages[layer] = _strided(first, shape, strides)
    return pages


def _folds(name: str, by_layer: Mapping[str, list[_Array]], choose: Choose) -> list[int]:
    """Return the folds of the tensors *name*: each joins a dimension with the next one.

    All tensors of one name have the same axes, so a fold must be possible in each layer.
    """
    arrays = [array for layer in by_layer.values() for own, _, array, _ in layer if own == name]
    folds: list[int] = []
    at = 0
    while arrays and at + 1 < arrays[0].ndim:
        dense = all(a.strides[at] == a.shape[at + 1] * a.strides[at + 1] for a in arrays)
        if dense and choose("folded"):
            arrays = [_fold(array, at) for array in arrays]
            folds.append(at)
        else:
            at += 1
    return folds


def _fold(array: Bytes, at: int) -> Bytes:
    """Return *array* with dimension *at* and the next one joined."""
    both = array.shape[at] * array.shape[at + 1]
    shape = (*array.shape[:at], both, *array.shape[at + 2 :])
    return _strided(array, shape, (*array.strides[:at], *array.strides[at + 1 :]))


def _letters(letters: str, folds: Sequence[int]) -> str:
    """Return *letters* after *folds*: "BHNC" with the folds 1 and 1 is "B(HNC)"."""
    dims = list(letters)
    for at in folds:
        dims[at : at + 2] = ["".join(dims[at : at + 2])]
    return "".join(dim if len(dim) == 1 else f"({dim})" for dim in dims)


def _by_group(
    engine: EngineSpec,
    tensors: Mapping[str, Mapping[str, Any]],
    letters: dict[str, str],
    choose: Choose,
) -> dict[str, str]:
    """Return *letters* by tensor, or by group if all tensors of a group have the same letters."""
    axes: dict[str, str] = {}
    for group in engine.groups:
        names = {name for layer in group.layers for name in tensors.get(layer, ())}
        group_letters = {letters[name] for name in names}
        if len(group_letters) == 1 and choose("by group"):
            axes[group.name] = group_letters.pop()
        else:
            axes |= {name: letters[name] for name in names}
    return axes


def _of_layer(parts: Mapping[Part, Bytes], axes: Mapping[str, str], choose: Choose) -> list[_Array]:
    """Return the tensors of one layer."""
    tensors: list[_Array] = []
    by_tensor: dict[str, list[Part]] = {}
    for part in parts:
        by_tensor.setdefault(part.tensor, []).append(part)
    for tensor, members in by_tensor.items():
        arrays: list[Any] = [parts[part] for part in members]
        if any(axes[part.name] == "BHPNC" for part in members):
            tensors += [_in_chunks(p, a) for p, a in zip(members, arrays, strict=True)]
            continue
        whole = _whole(members, arrays) if len(members) > 1 else None
        # Tensors of one name must have the same axes in all layers.
        known_axes = axes.get(tensor)
        if whole is not None and known_axes in (None, whole[0]) and choose("whole"):
            dtypes = {part.dtype for part in members}
            tensors.append((tensor, *whole, dtypes.pop() if len(dtypes) == 1 else None))
            continue
        for part, array in zip(members, arrays, strict=True):
            tensors.append((part.name, "BHNC", array, part.dtype))
    return tensors


def _in_chunks(part: Part, array: Any) -> _Array:
    """Return a part of shape (block, unit, chunk, row, bytes). Uncut rows have one chunk."""
    if not isinstance(array, Ordered):
        return part.name, "BHPNC", array[:, :, None], part.dtype
    pages, (rows, content) = array.memory, array.shape[2:]
    size = array.together
    shape = (*pages.shape[:2], content // size, rows, size)
    strides = (*pages.strides[:2], rows * size, size, 1)
    return part.name, "BHPNC", _strided(pages, shape, strides), part.dtype


def _whole(parts: Sequence[Part], arrays: Sequence[Bytes]) -> tuple[str, Bytes] | None:
    """Return the letters and bytes of one tensor of all *parts*, or None if none is possible."""
    first = arrays[0]
    starts = [array.ctypes.data - first.ctypes.data for array in arrays]
    if any(array.strides != first.strides for array in arrays):
        return None
    if not parts[0].per_token:
        ends = np.cumsum([0, *(array.shape[1] for array in arrays)])
        rows = [first.strides[1] * int(end) for end in ends[:-1]]
        shape = (first.shape[0], int(ends[-1]), *first.shape[2:])
        return ("BHNC", _strided(first, shape, first.strides)) if rows == starts else None
    ends = np.cumsum([0, *(array.shape[3] for array in arrays)])
    if starts == ends[:-1].tolist():
        shape = (*first.shape[:3], int(ends[-1]))
        return "BHNC", _strided(first, shape, (*first.strides[:3], 1))
    step = starts[1]
    even = starts == [step * number for number in range(len(arrays))] and step > 0
    if not even or any(array.shape != first.shape for array in arrays):
        return None
    return "KBHNC", _strided(first, (len(arrays), *first.shape), (step, *first.strides))


def _strided(first: Bytes, shape: Sequence[int], strides: Sequence[int]) -> Bytes:
    array: Bytes = np.lib.stride_tricks.as_strided(first, tuple(shape), tuple(strides))
    return array


def _typed(array: Bytes, dtype: str | None, choose: Choose) -> Any:
    """Return the bytes as an array or tensor. It has elements of *dtype* if they are aligned."""
    size = 1 if dtype is None else _itemsize(dtype)
    aligned = all(step % size == 0 for step in (array.ctypes.data, *array.strides[:-1]))
    typed = aligned and array.shape[-1] % size == 0 and choose("typed")
    if choose("torch"):
        import torch  # noqa: PLC0415 - torch is optional

        tensor = torch.from_numpy(array)
        if typed and dtype is not None:
            tensor = tensor.view(getattr(torch, dtype))
        return tensor
    # numpy has no bfloat16 and no float8, so their bytes stay untyped.
    return array.view(_NUMPY[size]) if typed and dtype in ("float32", "float64") else array


def _itemsize(dtype: str) -> int:
    digits = "".join(char if char.isdigit() else " " for char in dtype).split()
    return max(1, int(digits[0]) // 8) if digits else 1
