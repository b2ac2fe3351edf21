"""Make of a rank's storage the tensors that an engine would have: typed, strided, by part or whole.

Where bytes lie is taken from the oracle's arrays, never from the library's regions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.testing.carve import Blocks, Bytes, Ordered, Storage, logical_views

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec
    from kvspec.ownership.parallel import RankId
    from kvspec.ownership.part import Part

Made = tuple[dict[str, dict[str, Any]], dict[str, str]]
"""The tensors of each layer by name, and the letters of their dimensions by name."""

Choose = Callable[[str], bool]
"""Answers a question about one tensor: ``whole`` (all parts of a tensor), ``torch``, ``typed``,
``folded`` (several axes in one dimension), ``by group`` (its letters are said for the group)."""

_Array = tuple[str, str, Bytes, str | None]
"""The name of a tensor, its letters, its bytes and the type of its elements."""

_NUMPY = {1: np.uint8, 2: np.uint16, 4: np.float32, 8: np.float64}


def typed_tensors(
    engine: EngineSpec, rank: RankId, storage: Storage, num_blocks: Blocks, choose: Choose
) -> Made:
    """Return views of *storage* as tensors, of all layers that *rank* has any units of.

    Dimensions stand as block, unit, row, content; a tensor of several parts has planes outside of
    them, or, in a state, all its parts' units.
    """
    views = logical_views(engine, rank, storage, num_blocks)
    tensors: dict[str, dict[str, Any]] = {}
    cut = {part for (_, _, part), view in views.items() if isinstance(view, Ordered)}
    names = {part.name: part.tensor for group in engine.groups for part in group.own_parts}
    tensors_cut = {names[part] for part in cut}
    axes = {name: "BHPNC" if tensor in tensors_cut else "BHNC" for name, tensor in names.items()}
    found: dict[str, list[_Array]] = {}
    for group in engine.groups:
        for layer in group.layers:
            parts = {
                part: views[group.name, layer, part.name]
                for part in group.spec.of_layer(layer).parts
                if np.prod(views.get((group.name, layer, part.name), np.empty(0)).shape)
            }
            found[layer] = _of_layer(parts, axes, choose)
            axes |= {name: letters for name, letters, _, _ in found[layer]}
    folds = {name: _folds(name, found, choose) for name in axes}
    for layer, arrays in found.items():
        for name, _, array, dtype in arrays:
            for at in folds[name]:
                array = _fold(array, at)  # noqa: PLW2901 - what is folded so far
            tensors.setdefault(layer, {})[name] = _typed(array, dtype, choose)
    used = {name: letters for arrays in found.values() for name, letters, _, _ in arrays}
    said = {name: _letters(letters, folds[name]) for name, letters in used.items()}
    return tensors, _by_group(engine, tensors, said, choose)


def raw_pages(
    engine: EngineSpec, rank: RankId, storage: Storage, num_blocks: Blocks
) -> dict[str, Bytes]:
    """Return the pages of each layer of states as vLLM hands them over: ``[blocks, 1, 1, bytes]``.

    Of layers that *rank* has any units of; a page's padding is left out.
    """
    views = logical_views(engine, rank, storage, num_blocks)
    found: dict[str, Bytes] = {}
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
                found[layer] = _strided(first, shape, strides)
    return found


def _folds(name: str, found: Mapping[str, list[_Array]], choose: Choose) -> list[int]:
    """Return, one after the other, which dimension of the tensors called *name* takes in the next.

    Where each of these tensors allows it.
    """
    arrays = [array for some in found.values() for own, _, array, _ in some if own == name]
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
    """Return *array* with dimension *at* and the next one in one."""
    both = array.shape[at] * array.shape[at + 1]
    shape = (*array.shape[:at], both, *array.shape[at + 2 :])
    return _strided(array, shape, (*array.strides[:at], *array.strides[at + 1 :]))


def _letters(letters: str, folds: Sequence[int]) -> str:
    """Return what is said of the axes *letters*, folded."""
    dims = list(letters)
    for at in folds:
        dims[at : at + 2] = ["".join(dims[at : at + 2])]
    return "".join(each if len(each) == 1 else f"({each})" for each in dims)


def _by_group(
    engine: EngineSpec,
    tensors: Mapping[str, Mapping[str, Any]],
    said: dict[str, str],
    choose: Choose,
) -> dict[str, str]:
    """Return what is *said* by name, or for a group of whose tensors the same is said."""
    found: dict[str, str] = {}
    for group in engine.groups:
        names = {name for layer in group.layers for name in tensors.get(layer, ())}
        same_answers = {said[name] for name in names}
        if len(same_answers) == 1 and choose("by group"):
            found[group.name] = same_answers.pop()
        else:
            found |= {name: said[name] for name in names}
    return found


def _of_layer(
    parts: Mapping[Part, Bytes], axes: Mapping[str, str], choose: Choose
) -> list[tuple[str, str, Bytes, str | None]]:
    """Return (name, letters, bytes, dtype) of one layer's tensors."""
    found: list[tuple[str, str, Bytes, str | None]] = []
    by_tensor: dict[str, list[Part]] = {}
    for part in parts:
        by_tensor.setdefault(part.tensor, []).append(part)
    for tensor, members in by_tensor.items():
        arrays: list[Any] = [parts[part] for part in members]
        if any(axes[part.name] == "BHPNC" for part in members):
            found += [_in_chunks(p, a) for p, a in zip(members, arrays, strict=True)]
            continue
        whole = _whole(members, arrays) if len(members) > 1 else None
        told = axes.get(tensor)
        if whole is not None and told in (None, whole[0]) and choose("whole"):
            dtypes = {part.dtype for part in members}
            found.append((tensor, *whole, dtypes.pop() if len(dtypes) == 1 else None))
            continue
        for part, array in zip(members, arrays, strict=True):
            found.append((part.name, "BHNC", array, part.dtype))
    return found


def _in_chunks(part: Part, array: Any) -> tuple[str, str, Bytes, str | None]:  # noqa: ANN401
    """Return a part as [block, unit, chunk, row, bytes]; one chunk, where rows are not cut."""
    if not isinstance(array, Ordered):
        return part.name, "BHPNC", array[:, :, None], part.dtype
    pages, (rows, content) = array.pages, array.order.shape
    size = array.together
    shape = (*pages.shape[:2], content // size, rows, size)
    strides = (*pages.strides[:2], rows * size, size, 1)
    return part.name, "BHPNC", _strided(pages, shape, strides), part.dtype


def _whole(parts: Sequence[Part], arrays: Sequence[Bytes]) -> tuple[str, Bytes] | None:
    """Return the letters and the bytes of a tensor of several parts, or None if it has none."""
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
    found: Bytes = np.lib.stride_tricks.as_strided(first, tuple(shape), tuple(strides))
    return found


def _typed(array: Bytes, dtype: str | None, choose: Choose) -> Any:  # noqa: ANN401
    """Return the bytes as elements of *dtype*, where they are whole and aligned; numpy or torch."""
    size = 1 if dtype is None else _itemsize(dtype)
    aligned = all(step % size == 0 for step in (array.ctypes.data, *array.strides[:-1]))
    told = aligned and array.shape[-1] % size == 0 and choose("typed")
    if choose("torch"):
        import torch  # noqa: PLC0415 - only who draws tensors of torch needs it

        tensor = torch.from_numpy(array)
        if told and dtype is not None:
            tensor = tensor.view(getattr(torch, dtype))
        return tensor
    return array.view(_NUMPY[size]) if told and dtype in ("float32", "float64") else array


def _itemsize(dtype: str) -> int:
    digits = "".join(char if char.isdigit() else " " for char in dtype).split()
    return max(1, int(digits[0]) // 8) if digits else 1
