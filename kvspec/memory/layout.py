"""Turn the letters of a memory layout into offsets and strides.

Invariant: a layout is only an order of axes. It changes the offset and the strides of each part of
each layer, and nothing else.

How it works:
    A layout is a nest of levels, one for each letter, outermost first. The level of a repeating
    letter (B blocks, H heads, P chunks, N tokens) contains the next level several times. The level
    of a letter that separates (L layers, T tensors of a page, K parts of a tensor) contains one
    level for each member, side by side. The innermost level C is the content of one state of one
    unit.

    `_Nest.lay` walks from the outermost level inwards. On the way back it adds up sizes: a
    repeating level sets the stride of its letter to the size of the level inside, and a separating
    level adds to the offsets of its members.

    For example, one layer has keys and values of 2 heads, 4 tokens a block and 8 bytes of content.
    There are 3 blocks. In LKBNHC, all blocks of keys precede all blocks of values. In LBNKHC, the
    keys of a token are just before its values:

        layout    order of levels   block    token    head    offset of v    bytes
        LKBNHC    L K B T N H C     64       16       8       192            384
        LBNKHC    L B T N K H C     128      32       8       16             384
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
    """The place of one part of one layer in the memory of its group.

    Attributes:
        layer: Name of the layer.
        part: The part.
        units: Number of units of the part that the rank holds.
        padded: Bytes of a page with its padding, or None if pages are not padded.
        offset: Bytes from the first byte of the group's memory to the first content.
        block_stride: Bytes from one kernel block to the next.
        unit_stride: Bytes from one unit to the next.
        state_stride: Bytes from one state of a block to the next.
        chunk_stride: Bytes from one chunk of a content to the next.
    """

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
    """Place all parts of the layers of one group.

    Args:
        layout: Letters or name of the layout.
        layers: Name and spec of each layer, as it lies in memory.
        local_units: Returns the number of units of a part that the rank holds.
        num_blocks: Number of kernel blocks.

    Returns:
        The placement of each part of each layer, and the bytes of the group.

    Raises:
        SpecError: If the layers do not fit into one nest of levels, or cannot be padded.

    >>> from kvspec import FullAttentionSpec
    >>> spec = FullAttentionSpec(block_size=4, total_num_kv_heads=2, head_size=8, dtype="uint8")
    >>> for layout in ("LKBNHC", "LBNKHC"):
    ...     placed, size = place(layout, [("l", spec)], lambda part: part.units, num_blocks=3)
    ...     k, v = placed
    ...     print(k.block_stride, k.state_stride, k.unit_stride, v.offset, size)
    64 16 8 192 384
    128 32 8 16 384
    """
    members = [
        Placement(layer, part, local_units(part), spec.page_size_padded)
        for layer, spec in layers
        for part in spec.parts
    ]
    axes = axes_of(layout_letters(layout), [member.part for member in members])
    levels = _Nest(layout, axes, 1 + max(axes.index("L"), axes.index("B")), num_blocks)
    padded = next((member.padded for member in members if member.padded), None)
    # Padding follows each page, so a page must be one contiguous range.
    if padded and not levels.whole_pages(members):
        expected = f"no padding in layout {layout}, or L and B outermost"
        raise SpecError("page_size_padded", padded, expected)
    return members, levels.lay(0, members)


def axes_of(letters: str, parts: Iterable[Part]) -> str:
    """Return the order of axes: the layout's letters with T, K and P inserted.

    T separates the tensors of a page, K the parts of a tensor, P the chunks of a content.

    | rows   | letters with K   | letters without K | reason                                   |
    |--------|------------------|-------------------|------------------------------------------|
    | tokens | LKBNHC: LKBTNHC  | LBNHC: LBTNHKC    | T is just inside L and B. Without K, the |
    |        |                  |                   | parts are packed in the content.         |
    | states | LKBNHC: LBTNKHC  | LBHNC: LBTKHNC    | L and B are outermost, because a page of |
    |        |                  |                   | states is contiguous. Parts are side by  |
    |        |                  |                   | side along H.                            |
    """
    parts = tuple(parts)
    if any(part.chunks > 1 for part in parts):
        letters = _with_chunks(letters)
    if all(part.per_token for part in parts):
        planes = letters if "K" in letters else letters[:-1] + "KC"
        inside = 1 + max(planes.index("L"), planes.index("B"))
        return f"{planes[:inside]}T{planes[inside:]}"
    outer = "".join(letter for letter in letters if letter in "LB")
    inner = "".join(letter for letter in letters if letter in "HN")
    return outer + "T" + inner.replace("H", "KH") + "C"


def _with_chunks(letters: str) -> str:
    """Return *letters* with P inserted: a block has the first chunk of all rows, then the second.

    Keys of 4 tokens a, b, c and d with 3 elements each lie as ``abcd`` ``abcd`` ``abcd`` in chunks
    of one element. Without chunks they lie as ``aaa`` ``bbb`` ``ccc`` ``ddd``.
    """
    if not letters.endswith("NC") or "K" not in letters:
        # Rows and content must be the innermost axes, and keys must be separate from values.
        expected = (
            "K, and N just before C, such as LBHKNC, for a format that cuts content in chunks"
        )
        raise SpecError("layout", letters, expected)
    return letters[:-2] + "PNC"


@attrs.frozen
class _Nest:
    """The nest of levels along *axes*. `How it works` above describes it.

    *page_depth* is the depth of the level that is one block of one layer, just inside L and B.
    """

    layout: str
    axes: str
    page_depth: int
    num_blocks: int

    def whole_pages(self, members: Sequence[Placement]) -> bool:
        """Return whether a page is contiguous: no axis around L or B has more than one member."""
        outside = (axis for axis in self.axes[: self.page_depth] if axis not in "LB")
        return all(self._single(axis, members) for axis in outside)

    def _single(self, axis: str, members: Sequence[Placement]) -> bool:
        """Return whether the level of *axis* contains only one level."""
        if axis == "K":
            return len({member.part.name for member in members}) == 1
        return all(self._count(axis, member) == 1 for member in members)

    def lay(self, depth: int, members: Sequence[Placement]) -> int:
        """Place *members* in the level at *depth* and return the bytes of that level."""
        axis = self.axes[depth]
        if axis == "C":
            return members[0].part.content_bytes // members[0].part.chunks
        size = self._beside(axis, depth, members) if axis in "LTK" else self._repeat(depth, members)
        return padded_page(size, members[0].padded) if depth == self.page_depth else size

    def _beside(self, axis: str, depth: int, members: Sequence[Placement]) -> int:
        levels: dict[str, list[Placement]] = {}
        for member in members:
            key = {"L": member.layer, "T": member.part.tensor, "K": member.part.name}[axis]
            levels.setdefault(key, []).append(member)
        offset = 0
        for level in levels.values():
            size = self.lay(depth + 1, level)
            for member in level:
                member.offset += offset
            offset += size
        return offset

    def _repeat(self, depth: int, members: Sequence[Placement]) -> int:
        axis, size = self.axes[depth], self.lay(depth + 1, members)
        counts = {self._count(axis, member) for member in members}
        if len(counts) > 1:
            inside = "".join(letter for letter in self.axes[depth + 1 :] if letter in "LK")
            expected = f"{axis} inside {inside}, since {LETTERS[axis]} differ: {sorted(counts)}"
            raise SpecError("layout", self.layout, expected)
        for member in members:
            if axis == "B":
                member.block_stride = size
            elif axis == "H":
                member.unit_stride = size
            elif axis == "P":
                member.chunk_stride = size
            else:
                member.state_stride = size
        return counts.pop() * size

    def _count(self, axis: str, member: Placement) -> int:
        part = member.part
        return {"B": self.num_blocks, "H": member.units, "N": part.states, "P": part.chunks}[axis]
