"""In which order a head's page has its bytes, counted out element by element.

Part of the byte oracle: no stride and no chunk of the library is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvspec.ownership.part import Part

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
