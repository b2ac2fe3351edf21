"""Cut a rank's storage into arrays, by the definitions alone.

Half of the byte oracle: no stride, no slice and no address is computed here, so what these arrays
show is what the layout letters mean, whatever the library believes. Of kvspec it reads only values.

In which order a head's page has its bytes, counted out element by element.

Part of the byte oracle: no stride and no chunk of the library is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvspec.check.counting import rank_layers, rank_units, shard_units

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec
    from kvspec.engines.group import KVCacheGroup
    from kvspec.ownership.parallel import RankId
    from kvspec.ownership.part import Part

__all__ = [
    "Blocks",
    "Bytes",
    "Storage",
    "Views",
    "count_kernel_blocks",
    "logical_views",
    "rank_layers",
    "rank_units",
    "shard_units",
]

Bytes = NDArray[np.uint8]

X_BYTES = 16
"""Bytes that lie together where keys are packed by x."""


class Ordered:
    """An array [B, H, N, C] over pages in whose heads the bytes of rows lie in another *order*.

    *pages*: [B, H, bytes of a head's page]; *order*: for each row and byte its place in the page;
    *together*: bytes of a row that lie together.
    Indexed and assigned to like the array that it stands for.
    """

    def __init__(self, pages: Bytes, order: NDArray[np.int64], together: int) -> None:
        self.pages, self.order, self.together = pages, order, together
        self.shape = (*pages.shape[:2], *order.shape)

    def _at(self, key: Any) -> tuple[NDArray[np.intp], ...]:  # noqa: ANN401
        numbers = np.arange(self.pages.size).reshape(self.pages.shape)[:, :, self.order]
        return np.unravel_index(numbers[key], self.pages.shape)

    def __getitem__(self, key: Any) -> Bytes:  # noqa: ANN401
        return self.pages[self._at(key)]

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401
        self.pages[self._at(key)] = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Bytes:  # noqa: ANN401, FBT001
        del copy
        return np.asarray(self.pages[:, :, self.order], dtype)

    def __len__(self) -> int:
        return len(self.pages)

    def transpose(self, *order: Any) -> Bytes:  # noqa: ANN401
        """Return the array transposed, as a copy."""
        return np.asarray(self).transpose(*order)

    def tolist(self) -> list[Any]:
        """Return the array as lists."""
        found: list[Any] = np.asarray(self).tolist()
        return found


def bytes_together(page_format: str, part: Part) -> int | None:
    """Return how many bytes of a row lie together, or None where all of them do."""
    element = _element_bytes(part.dtype)
    return {
        ("keys-transposed", "k"): element, ("x-packed", "v"): element, ("x-packed", "k"): X_BYTES
    }.get((page_format, part.name))  # fmt: skip


def page_order(part: Part, rows: int, together: int) -> NDArray[np.int64]:
    """Return where each row's bytes lie in a head's page.

    Counted out element by element: transposed, a page has the first element of all its rows, then
    the second; packed by x, the first 16 bytes of all its rows.
    """
    order = np.empty((rows, part.content_bytes), np.int64)
    place = 0
    for first in range(0, part.content_bytes, together):
        for row in range(rows):
            for byte in range(first, first + together):
                order[row, byte] = place
                place += 1
    return order


def _element_bytes(dtype: str | None) -> int:
    """Return the bytes of one element, by the bits in its type's name: ``float8_e4m3fn`` has 8."""
    bits = "".join(char if char.isdigit() else " " for char in dtype or "").split()
    return int(bits[0]) // 8 if bits else 1


Storage = Mapping[str, Bytes]
Views = dict[tuple[str, str, str], Any]
"""Arrays, or what is indexed like them, by group, layer and part."""
Blocks = int | Mapping[str, int]
_ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}


@dataclass(frozen=True)
class _Plane:
    """One part of one layer on one rank: how often each letter counts."""

    layer: str
    part: Part
    counts: Mapping[str, int]

    def size(self, letters: str) -> int:
        total = 1
        for letter in letters:
            total *= self.counts.get(letter, 1)
        return total


def count_kernel_blocks(group: KVCacheGroup) -> int:
    """Return how many blocks in memory one block of a table is."""
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
        yield [plane for plane, own in zip(planes, names, strict=True) if own == name]


def _carve(
    flat: Bytes, letters: str, planes: Sequence[_Plane], seen: str = ""
) -> Iterator[tuple[_Plane, Bytes]]:
    """Split the last axis of *flat* letter by letter; yield each plane's [B, H, N, C] array.

    *seen* names the axes before the last one. Layers, tensors and parts lie one after the other
    ("L", "T", "K"; without "K" the parts share "C"); blocks, units and states are counted, so they
    must agree.
    """
    letter, rest = letters[0], letters[1:]
    if letter in "LTKC":
        inner = "C" if letter == "C" else rest
        for some in _separate(planes, letter):
            size = sum(plane.size(inner) for plane in some)
            part_array, flat = flat[..., :size], flat[..., size:]
            if letter == "C":
                yield some[0], part_array.transpose([*map(seen.index, "BHN"), 3])
            else:
                yield from _carve(part_array, rest, some, seen)
        return
    counts = {plane.counts[letter] for plane in planes}
    if len(counts) != 1:
        raise ValueError(f"axis {letter} before L or K counts {sorted(counts)}: planes are ragged")
    shape = (*flat.shape[:-1], counts.pop(), sum(plane.size(rest) for plane in planes))
    yield from _carve(flat.reshape(shape), rest, planes, seen + letter)


def _carve_page(
    page: Bytes, letters: str, planes: Sequence[_Plane]
) -> Iterator[tuple[_Plane, Bytes]]:
    """Cut one layer's pages [B, bytes]; the page's padding is what remains at its end."""
    if planes[0].part.per_token:
        inner = "".join(letter for letter in letters if letter not in "LB")
        size = sum(plane.size("HNC") for plane in planes)
        yield from _carve(page[:, :size], f"T{inner}", planes, "B")
        return
    for some in _separate(planes, "T"):
        size = sum(plane.size("HNC") for plane in some)
        order = "".join(letter for letter in letters if letter in "HN")
        yield from _carve(page[:, :size], order.replace("H", "KH") + "C", some, "B")
        page = page[:, size:]


def _lone(planes: Sequence[_Plane], letter: str) -> bool:
    """Return whether *letter* counts one thing, so that it may stand anywhere."""
    if letter == "K":
        return len({plane.part.name for plane in planes}) == 1
    return all(plane.counts[letter] == 1 for plane in planes)


def _pages(group: KVCacheGroup, planes: Sequence[_Plane]) -> list[int]:
    """Return the bytes of one block of each layer, its padding included."""
    return [
        group.spec.of_layer(some[0].layer).page_size_padded
        or sum(plane.size("HNC") for plane in some)
        for some in _separate(planes, "L")
    ]


def _group_bytes(group: KVCacheGroup, planes: Sequence[_Plane]) -> int:
    return planes[0].counts["B"] * sum(_pages(group, planes))


def _carve_group(
    flat: Bytes, letters: str, group: KVCacheGroup, planes: Sequence[_Plane]
) -> Iterator[tuple[_Plane, Bytes]]:
    """Cut the storage of one group, layers and blocks first where pages lie in one chunk."""
    layers = list(_separate(planes, "L"))
    pages = _pages(group, planes)
    blocks = planes[0].counts["B"]
    size = _group_bytes(group, planes)
    if flat.ndim != 1 or (flat.size != size and size):  # a rank that holds nothing has what it has
        raise ValueError(f"group {group.name}: storage {flat.shape} bytes, wanted ({size},)")
    flat = flat[:size]
    outside = letters[: 1 + max(letters.index("L"), letters.index("B"))]
    if all(_lone(planes, letter) for letter in outside if letter not in "LB"):
        letters = "".join(sorted(letters, key=lambda letter: letter not in "LB"))
    if planes[0].part.per_token and letters[:2] not in {"LB", "BL"}:
        if any(group.spec.of_layer(some[0].layer).page_size_padded for some in layers):
            raise ValueError(f"group {group.name}: {letters} has no page whose end could be padded")
        inner = letters[len(outside) :]
        yield from _carve(flat, f"{outside}T{inner}", planes)
        return
    rows = flat.reshape(blocks, sum(pages)) if letters.index("B") < letters.index("L") else None
    start = 0
    for page, some in zip(pages, layers, strict=True):
        if rows is not None:
            yield from _carve_page(rows[:, start : start + page], letters, some)
        else:
            whole = flat[start * blocks : (start + page) * blocks]
            yield from _carve_page(whole.reshape(blocks, page), letters, some)
        start += page


def _in_format(group: KVCacheGroup, plane: _Plane, view: Bytes) -> Bytes | Ordered:
    """Return *view* as the format of the layer's pages has it."""
    page_format = getattr(group.spec.of_layer(plane.layer), "page_format", "plain")
    together = bytes_together(page_format, plane.part)
    if together is None:
        return view
    order = page_order(plane.part, plane.counts["N"], together)
    if view.shape[2] > 1 and view.strides[2] != view.shape[3] * view.itemsize:
        raise ValueError(f"{plane.layer}: a head's rows of {plane.part.name} do not lie together")
    shape = (*view.shape[:2], order.size)
    strides = (*view.strides[:2], view.itemsize)
    return Ordered(np.lib.stride_tricks.as_strided(view, shape, strides), order, together)


def logical_views(engine: EngineSpec, rank: RankId, storage: Storage, num_blocks: Blocks) -> Views:
    """Return {(group, layer, part): array [B, H local, N, C bytes]}, writable views on *storage*.

    *storage* is one flat uint8 array a group, or one that all groups share from its first byte. Cut
    only from the layout letters, outermost first. B and N count blocks in memory and their rows:
    the kernel's, where tables' blocks are cut finer.
    """
    views: Views = {}
    shared = len({id(flat) for flat in storage.values()}) < len(storage)
    for group in engine.groups:
        blocks = num_blocks if isinstance(num_blocks, int) else num_blocks[group.name]
        planes = _planes(engine, rank, group, blocks)
        name = group.layout or engine.layout
        letters = _ALIASES.get(name, name)
        if not planes:
            continue  # no layer of the group is on this rank's stage
        flat = storage[group.name]
        flat = flat[: _group_bytes(group, planes)] if shared else flat
        for plane, view in _carve_group(flat, letters, group, planes):
            views[group.name, plane.layer, plane.part.name] = _in_format(group, plane, view)
    return views
