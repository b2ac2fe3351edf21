"""Layout letters to strides.

Law: a layout is only an order of axes. Nested boxes give every part of every layer an offset and
three strides; whether a block is contiguous, a page padded or a layer interleaved with others
changes those numbers and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from kvspec.engines.letters import LETTERS, layout_letters
from kvspec.errors import SpecError
from kvspec.ownership.part import Part
from kvspec.specs import LayerSpec
from kvspec.specs.layer import padded_page


@attrs.define
class Placement:
    """Where one part of one layer lies: byte *offset*, byte strides, and how many units."""

    layer: str
    part: Part
    units: int
    padded: int | None
    offset: int = 0
    block_stride: int = 0
    unit_stride: int = 0
    state_stride: int = 0
    chunk_stride: int = 0


def place(
    layout: str,
    layers: Iterable[tuple[str, LayerSpec]],
    local_units: Callable[[Part], int],
    num_blocks: int,
) -> tuple[list[Placement], int]:
    """Lay out the *layers* of one group on one rank.

    *local_units*: how many units of a part the rank holds. Returns the placement of every part of
    every layer, offsets counted from the group's first byte, and the group's bytes in all.
    """
    members = [
        Placement(layer, part, local_units(part), spec.page_size_padded)
        for layer, spec in layers
        for part in spec.parts
    ]
    axes = axes_of(layout_letters(layout), [each.part for each in members])
    boxes = _Boxes(layout, axes, 1 + max(axes.index("L"), axes.index("B")), num_blocks)
    padded = next((each.padded for each in members if each.padded), None)
    if padded and not boxes.whole_pages(members):
        wanted = f"no padding in layout {layout}, or L and B outermost"
        raise SpecError("page_size_padded", padded, wanted)
    return members, boxes.lay(0, members)


def axes_of(letters: str, parts: Iterable[Part]) -> str:
    """Return the order of axes, with T (tensors of a page) and K (parts of a tensor) put in.

    | rows   | letters with K   | letters without K | why                                      |
    |--------|------------------|-------------------|------------------------------------------|
    | tokens | LKBNHC: LKBTNHC  | LBNHC: LBTNHKC    | T just inside L and B; K as the letters  |
    |        |                  |                   | say, else parts packed in the content    |
    | states | LKBNHC: LBTNKHC  | LBHNC: LBTKHNC    | L and B outermost, so that a page lies   |
    |        |                  |                   | in one chunk; parts side by side along H |
    """
    parts = tuple(parts)
    if any(part.chunks > 1 for part in parts):
        letters = _with_chunks(letters)
    if all(part.per_token for part in parts):
        planes = letters if "K" in letters else letters[:-1] + "KC"
        inside = 1 + max(planes.index("L"), planes.index("B"))
        return f"{planes[:inside]}T{planes[inside:]}"
    outer = "".join(each for each in letters if each in "LB")
    inner = "".join(each for each in letters if each in "HN")
    return outer + "T" + inner.replace("H", "KH") + "C"


def _with_chunks(letters: str) -> str:
    """Return *letters* with P (chunks of a row's content) put in: all rows of each chunk.

    Keys of 4 tokens, 3 elements each, in chunks of one: ``abcd`` ``abcd`` ``abcd``, not ``aaa``
    ``bbb`` ``ccc`` ``ddd``. So rows and content are the innermost axes, and keys apart from values.
    """
    if not letters.endswith("NC") or "K" not in letters:
        wanted = "K, and N just before C, such as LBHKNC, for a format that cuts content in chunks"
        raise SpecError("layout", letters, wanted)
    return letters[:-2] + "PNC"


@attrs.frozen
class _Boxes:
    """Nested boxes along *axes*: B, H, P and N repeat what is inside; L, T and K set side by side.

    *page_depth*: the depth at which one layer's one block begins, just inside L and B.
    """

    layout: str
    axes: str
    page_depth: int
    num_blocks: int

    def whole_pages(self, members: Sequence[Placement]) -> bool:
        """Whether a page lies in one chunk: no axis outside it, but L and B, repeats anything."""
        outside = (axis for axis in self.axes[: self.page_depth] if axis not in "LB")
        return all(self._single(axis, members) for axis in outside)

    def _single(self, axis: str, members: Sequence[Placement]) -> bool:
        if axis == "K":
            return len({each.part.name for each in members}) == 1
        return all(self._count(axis, each) == 1 for each in members)

    def lay(self, depth: int, members: Sequence[Placement]) -> int:
        """Place *members* in the box at *depth*; return the bytes of that box."""
        axis = self.axes[depth]
        if axis == "C":
            return members[0].part.content_bytes // members[0].part.chunks
        size = self._beside(axis, depth, members) if axis in "LTK" else self._repeat(depth, members)
        return padded_page(size, members[0].padded) if depth == self.page_depth else size

    def _beside(self, axis: str, depth: int, members: Sequence[Placement]) -> int:
        boxes: dict[str, list[Placement]] = {}
        for each in members:
            key = {"L": each.layer, "T": each.part.tensor, "K": each.part.name}[axis]
            boxes.setdefault(key, []).append(each)
        at = 0
        for box in boxes.values():
            size = self.lay(depth + 1, box)
            for each in box:
                each.offset += at
            at += size
        return at

    def _repeat(self, depth: int, members: Sequence[Placement]) -> int:
        axis, size = self.axes[depth], self.lay(depth + 1, members)
        counts = {self._count(axis, each) for each in members}
        if len(counts) > 1:
            inside = "".join(each for each in self.axes[depth + 1 :] if each in "LK")
            wanted = f"{axis} inside {inside}, since {LETTERS[axis]} differ: {sorted(counts)}"
            raise SpecError("layout", self.layout, wanted)
        for each in members:
            if axis == "B":
                each.block_stride = size
            elif axis == "H":
                each.unit_stride = size
            elif axis == "P":
                each.chunk_stride = size
            else:
                each.state_stride = size
        return counts.pop() * size

    def _count(self, axis: str, member: Placement) -> int:
        part = member.part
        return {"B": self.num_blocks, "H": member.units, "N": part.states, "P": part.chunks}[axis]
