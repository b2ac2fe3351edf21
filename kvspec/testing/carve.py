"""Cut the storage of a rank into arrays, by the meaning of the layout letters alone.

Invariant: no stride and no address of the library is used. So the arrays show what a layout means,
even if the library is wrong. The module reads only values of kvspec.

How it works:
    The letters of a layout name the axes of the storage, from the outermost to the innermost: L
    layers, B blocks, H units (heads), N rows of a block, K parts, C bytes of a row. This module
    adds T for the tensors of a page. Blocks, units and rows are counted, so they become an axis.
    Layers, tensors and parts lie one after the other, so they become separate arrays. Example: 2
    blocks of 2 rows, 2 heads, and keys and values of 1 byte. The layout LBNHC means "for each
    block, row and head: key, then value".

        byte     0  1    2  3    4  5    6  7      8 ...
                 k  v    k  v    k  v    k  v      block 1
        head       0       1       0       1
        row        0       0       1       1

    >>> import kvspec
    >>> spec = kvspec.FullAttentionSpec(
    ...     block_size=2, total_num_kv_heads=2, head_size=1, dtype="uint8"
    ... )
    >>> group = kvspec.KVCacheGroup(name="g", layers=["l"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group], layout="LBNHC")
    >>> views = logical_views(engine, kvspec.RankId(), {"g": np.arange(16, dtype=np.uint8)}, 2)
    >>> views["g", "l", "k"][0].tolist()  # [head][row][byte] of block 0
    [[[0], [4]], [[2], [6]]]

    `page_format` changes the order of bytes inside the page of a head, and `key_content` the order
    of elements inside a row. `Ordered` hides both orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvspec.check.counting import rank_layers, rank_units

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec
    from kvspec.engines.group import KVCacheGroup
    from kvspec.ownership.parallel import RankId
    from kvspec.ownership.part import Part
    from kvspec.specs import KeyContent

Bytes = NDArray[np.uint8]

# Adjacent bytes of a row if keys are packed by x, as in vLLM's (head_size / x, block_size, x).
X_BYTES = 16


class Ordered:
    """An array of shape (B, H, N, C), whose bytes lie in another order in memory.

    It supports the indexing and assignment of an array. No strides of numpy can express the order.

    Attributes:
        memory: Any array that contains the bytes.
        places: Array of shape (B, H, N, C): the place of each byte in the flattened *memory*.
        together: Number of adjacent bytes of a row in a page, or 0 if the page has whole rows.
        shape: (B, H, N, C).
    """

    def __init__(self, memory: Bytes, places: NDArray[np.int64], together: int = 0) -> None:
        self.memory, self.places, self.together = memory, places, together
        self.shape = places.shape

    def _at(self, key: Any) -> tuple[NDArray[np.intp], ...]:  # noqa: ANN401
        return np.unravel_index(self.places[key], self.memory.shape)

    def __getitem__(self, key: Any) -> Bytes:  # noqa: ANN401
        return self.memory[self._at(key)]

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401
        self.memory[self._at(key)] = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Bytes:  # noqa: ANN401, FBT001
        del copy
        return np.asarray(self[:], dtype)

    def __len__(self) -> int:
        return len(self.places)

    def transpose(self, *order: Any) -> Bytes:  # noqa: ANN401
        """Return the array transposed, as a copy."""
        return np.asarray(self).transpose(*order)

    def tolist(self) -> list[Any]:
        """Return the array as nested lists."""
        nested: list[Any] = np.asarray(self).tolist()
        return nested


def bytes_together(page_format: str, part: Part) -> int | None:
    """Return the number of adjacent bytes of a row, or None if all bytes of a row are adjacent."""
    element = _element_bytes(part.dtype)
    return {
        ("keys-transposed", "k"): element, ("x-packed", "v"): element, ("x-packed", "k"): X_BYTES
    }.get((page_format, part.name))  # fmt: skip


def page_order(part: Part, rows: int, together: int) -> NDArray[np.int64]:
    """Return the place of each byte of each row in the page of a head.

    The page has the first *together* bytes of all rows, then the next *together* bytes, and so on.
    Two rows of 4 bytes, of which 2 are adjacent:

    >>> import kvspec
    >>> spec = kvspec.MLAAttentionSpec(block_size=2, head_size=4, dtype="uint8")
    >>> page_order(spec.parts[0], 2, 2).tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    places = np.arange(rows * part.content_bytes).reshape(-1, rows, together)
    return places.swapaxes(0, 1).reshape(rows, part.content_bytes)


def _element_bytes(dtype: str | None) -> int:
    """Return the bytes of one element, from the bits in its name: `float8_e4m3fn` has 8."""
    bits = "".join(char if char.isdigit() else " " for char in dtype or "").split()
    return int(bits[0]) // 8 if bits else 1


StoredBytes = Mapping[str, Bytes]
# Arrays or `Ordered`, by (group, layer, part).
Views = dict[tuple[str, str, str], Any]
Blocks = int | Mapping[str, int]
ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}


@dataclass(frozen=True)
class _Plane:
    """One part of one layer on one rank, with the length of each counted axis."""

    layer: str
    part: Part
    counts: Mapping[str, int]

    def size(self, letters: str) -> int:
        return prod(self.counts.get(letter, 1) for letter in letters)


def count_kernel_blocks(group: KVCacheGroup) -> int:
    """Return the number of blocks in memory that one block of a table consists of."""
    kernel = group.kernel_block_size
    return 1 if kernel is None else group.spec.block_size // kernel


def _planes(engine: EngineSpec, rank: RankId, group: KVCacheGroup, blocks: int) -> list[_Plane]:
    kernel_blocks_per_block = count_kernel_blocks(group)
    return [
        _Plane(
            layer,
            part,
            {
                "B": blocks * kernel_blocks_per_block,
                "H": len(rank_units(engine, rank, part, group)),
                "N": part.states // kernel_blocks_per_block,
                "C": part.content_bytes,
            },
        )
        for layer in rank_layers(engine, rank, group)
        for part in group.spec.of_layer(layer).parts
    ]


def _separate(planes: Sequence[_Plane], letter: str) -> Iterator[list[_Plane]]:
    """Yield *planes* layer by layer ("L"), tensor by tensor ("T") or part by part ("K")."""
    names = [
        {"L": p.layer, "T": p.part.tensor, "K": p.part.name, "C": p.part.name}[letter]
        for p in planes
    ]
    for name in dict.fromkeys(names):
        yield [plane for plane, its_name in zip(planes, names, strict=True) if its_name == name]


def _carve(
    flat: Bytes, letters: str, planes: Sequence[_Plane], outer: str = ""
) -> Iterator[tuple[_Plane, Bytes]]:
    """Split the last axis of *flat*, letter by letter. Yield an array (B, H, N, C) for each plane.

    The letter T stands for the tensors of a page. Without K, the last axis holds one row of each
    part, one after the other. *outer* contains the letters of the axes before the last one.
    """
    letter, rest = letters[0], letters[1:]
    if letter in "LTKC":
        inner = "C" if letter == "C" else rest
        for members in _separate(planes, letter):
            size = sum(plane.size(inner) for plane in members)
            part_array, flat = flat[..., :size], flat[..., size:]
            if letter == "C":
                yield members[0], part_array.transpose([*map(outer.index, "BHN"), 3])
            else:
                yield from _carve(part_array, rest, members, outer)
        return
    counts = {plane.counts[letter] for plane in planes}
    if len(counts) != 1:
        raise ValueError(
            f"axis {letter} before L or K counts {sorted(counts)}: all layers and parts must have "
            "one length"
        )
    shape = (*flat.shape[:-1], counts.pop(), sum(plane.size(rest) for plane in planes))
    yield from _carve(flat.reshape(shape), rest, planes, outer + letter)


def _carve_page(
    page: Bytes, letters: str, planes: Sequence[_Plane]
) -> Iterator[tuple[_Plane, Bytes]]:
    """Cut the pages of one layer, of shape (B, bytes). The rest of a page is its padding."""
    if planes[0].part.per_token:
        inner = "".join(letter for letter in letters if letter not in "LB")
        size = sum(plane.size("HNC") for plane in planes)
        yield from _carve(page[:, :size], f"T{inner}", planes, "B")
        return
    # The tensors of a state lie one after the other, and so do the parts of a tensor.
    for members in _separate(planes, "T"):
        size = sum(plane.size("HNC") for plane in members)
        order = "".join(letter for letter in letters if letter in "HN")
        yield from _carve(page[:, :size], order.replace("H", "KH") + "C", members, "B")
        page = page[:, size:]


def _has_length_1(planes: Sequence[_Plane], letter: str) -> bool:
    """Return whether the axis *letter* has length 1. Its place in the layout has no effect then."""
    if letter == "K":
        return len({plane.part.name for plane in planes}) == 1
    return all(plane.counts[letter] == 1 for plane in planes)


def _pages(group: KVCacheGroup, planes: Sequence[_Plane]) -> list[int]:
    """Return the bytes of one block of each layer, with its padding."""
    return [
        group.spec.of_layer(members[0].layer).page_size_padded
        or sum(plane.size("HNC") for plane in members)
        for members in _separate(planes, "L")
    ]


def _group_bytes(group: KVCacheGroup, planes: Sequence[_Plane]) -> int:
    return planes[0].counts["B"] * sum(_pages(group, planes))


def _carve_group(
    flat: Bytes, letters: str, group: KVCacheGroup, planes: Sequence[_Plane]
) -> Iterator[tuple[_Plane, Bytes]]:
    """Cut the storage of one group. If the pages are contiguous, cut it into pages first."""
    layers = list(_separate(planes, "L"))
    pages = _pages(group, planes)
    blocks = planes[0].counts["B"]
    size = _group_bytes(group, planes)
    # A rank without units of the group may have a storage of any size.
    if flat.ndim != 1 or (flat.size != size and size):
        raise ValueError(f"group {group.name}: storage {flat.shape} bytes, expected ({size},)")
    flat = flat[:size]
    # If all axes before the last of L and B have length 1, the pages are contiguous. Then L and B
    # may be moved to the front.
    outside = letters[: 1 + max(letters.index("L"), letters.index("B"))]
    if all(_has_length_1(planes, letter) for letter in outside if letter not in "LB"):
        letters = "".join(sorted(letters, key=lambda letter: letter not in "LB"))
    if planes[0].part.per_token and letters[:2] not in {"LB", "BL"}:
        if any(group.spec.of_layer(members[0].layer).page_size_padded for members in layers):
            raise ValueError(f"group {group.name}: {letters} has no page that can be padded")
        inner = letters[len(outside) :]
        yield from _carve(flat, f"{outside}T{inner}", planes)
        return
    rows = flat.reshape(blocks, sum(pages)) if letters.index("B") < letters.index("L") else None
    start = 0
    for page, members in zip(pages, layers, strict=True):
        if rows is not None:
            yield from _carve_page(rows[:, start : start + page], letters, members)
        else:
            whole = flat[start * blocks : (start + page) * blocks]
            yield from _carve_page(whole.reshape(blocks, page), letters, members)
        start += page


def _in_format(group: KVCacheGroup, plane: _Plane, view: Bytes) -> Bytes | Ordered:
    """Return *view* in the order of the layer's page format."""
    page_format = getattr(group.spec.of_layer(plane.layer), "page_format", "plain")
    together = bytes_together(page_format, plane.part)
    if together is None:
        return view
    order = page_order(plane.part, plane.counts["N"], together)
    if view.shape[2] > 1 and view.strides[2] != view.shape[3] * view.itemsize:
        raise ValueError(
            f"layer {plane.layer}, part {plane.part.name}: the rows of a head must be adjacent"
        )
    shape = (*view.shape[:2], order.size)
    strides = (*view.strides[:2], view.itemsize)
    pages = np.lib.stride_tricks.as_strided(view, shape, strides)
    return Ordered(pages, _places(pages)[:, :, order], together)


def _places(array: Bytes) -> NDArray[np.int64]:
    return np.arange(array.size).reshape(array.shape)


def stored_elements(content: KeyContent, elements: int, *, latent: bool) -> list[int]:
    """Return where a row stores each element, by its number in the common order.

    The common order has halves. If the rotated part of a latent row is first, it moves to the end.

    >>> import kvspec
    >>> pairs = kvspec.KeyContent(rotary="pairs", rotary_size=4)
    >>> stored_elements(pairs, 5, latent=False), stored_elements(pairs, 5, latent=True)
    ([0, 2, 1, 3, 4], [4, 0, 2, 1, 3])
    """
    half = content.rotary_size // 2
    rotated = range(content.rotary_start, content.rotary_start + content.rotary_size)

    def half_and_pair(stored: int) -> tuple[int, int]:
        place = stored - rotated.start
        return divmod(place, half) if content.rotary == "halves" else (place % 2, place // 2)

    ordered = sorted(rotated, key=half_and_pair)
    others = [place for place in range(elements) if place not in rotated]
    at = len(others) if latent and not rotated.start else rotated.start
    return others[:at] + ordered + others[at:]


def in_common_order(engine: EngineSpec, views: Views) -> Views:
    """Return *views* with the bytes of each row in the common order of `stored_elements`.

    Rows that are opaque bytes keep their order.
    """
    ordered = dict(views)
    for (name, layer, part), view in views.items():
        spec: Any = engine.group(name).spec.of_layer(layer)
        content, latent = getattr(spec, "key_content", None), part == "latent"
        if content is None or part not in ("k", "latent") or content.rotary == "none":
            continue
        order = stored_elements(content, spec.head_size, latent=latent)
        size = view.shape[3] // spec.head_size
        stored = (np.array(order)[:, None] * size + np.arange(size)).ravel()
        if isinstance(view, Ordered):
            ordered[name, layer, part] = Ordered(view.memory, view.places[..., stored])
        elif order != sorted(order):
            ordered[name, layer, part] = Ordered(view, _places(view)[..., stored])
    return ordered


def logical_views(
    engine: EngineSpec, rank: RankId, storage: StoredBytes, num_blocks: Blocks
) -> Views:
    """Return the arrays of all parts of all layers that a rank holds.

    Args:
        engine: The engine.
        rank: Its rank.
        storage: One flat uint8 array for each group, or one array that all groups share.
        num_blocks: Blocks of the pool, for all groups or by group.

    Returns:
        Arrays by (group, layer, part). They are writable views of *storage* with the shape (blocks
        in memory, units of the rank, rows of a block in memory, bytes of a row). The bytes of a
        row are in the common order, so that rows of two engines with equal content are equal.

    Raises:
        ValueError: If the storage has another size, or the layout is impossible for the group.

    >>> import kvspec
    >>> spec = kvspec.FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=8, head_size=64, dtype="bfloat16"
    ... )
    >>> group = kvspec.KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group])
    >>> cache, storage = kvspec.allocate(engine, kvspec.RankId(), 4)
    >>> views = logical_views(engine, kvspec.RankId(), storage, {"full": 4})
    >>> sorted(views), views["full", "layers.0", "k"].shape
    ([('full', 'layers.0', 'k'), ('full', 'layers.0', 'v')], (4, 8, 16, 128))
    """
    return in_common_order(engine, stored_views(engine, rank, storage, num_blocks))


def stored_views(
    engine: EngineSpec, rank: RankId, storage: StoredBytes, num_blocks: Blocks
) -> Views:
    """Return what `logical_views` returns, with the bytes of each row in the order in memory."""
    views: Views = {}
    shared = len({id(flat) for flat in storage.values()}) < len(storage)
    for group in engine.groups:
        blocks = num_blocks if isinstance(num_blocks, int) else num_blocks[group.name]
        planes = _planes(engine, rank, group, blocks)
        name = group.layout or engine.layout
        letters = ALIASES.get(name, name)
        if not planes:
            continue  # No layer of the group is on the stage of this rank.
        flat = storage[group.name]
        flat = flat[: _group_bytes(group, planes)] if shared else flat
        for plane, view in _carve_group(flat, letters, group, planes):
            views[group.name, plane.layer, plane.part.name] = _in_format(group, plane, view)
    return views
