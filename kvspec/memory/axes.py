"""Which axis each dimension of a tensor is, or which axes, where several lie in one dimension.

Law: a shape does not say what it means. Letters that are said are believed if every size fits them;
unless they are said, the shape has to have one reading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, pairwise
from math import prod

import attrs

from kvspec.engines.letters import NAMED_LAYOUTS
from kvspec.errors import SpecError
from kvspec.memory.arrays import Array
from kvspec.ownership.part import Part

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
