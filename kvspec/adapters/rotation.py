"""Find out which elements of a key a rotary embedding turns together, from computed keys.

Invariant: nothing is read from the name of a model. Keys that do not fit a known order are refused.

How it works:
    A single token attends only to itself, so its keys before rotary embedding do not depend on its
    position, in any layer. Each element of a key that differs between two positions is therefore
    rotated.

    Two elements a and b that are rotated together are one complex number a + ib. Between position
    0 and position p it turns by one angle, the same for all keys. In the order *halves* elements i
    and i + n/2 must do so, in the order *pairs* elements 2i and 2i + 1. For a key of 4 elements and
    the angles 1.0 and 0.1, these are the keys of one token:

        position    stored as halves              stored as pairs
        0           1.0   0.0 | 0.0   1.0         1.0  0.0  | 0.0   1.0
        1           0.54 -0.10 | 0.84 1.0         0.54 0.84 | -0.10 1.0

    Only one order fits eight different keys.

    `turns_by` compares the angles with those that a rotary module contains. The computed keys alone
    are too coarse to find the angles of slow pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvspec.errors import SpecError
from kvspec.specs import KeyContent

FloatRows = npt.NDArray[np.float64]

# Products of rounded sines and cosines differ from a rotation by this many roundings at most. In
# the wrong order, the fastest elements differ by the size of the key.
ROUNDINGS = 8


def rotation_of(field: str, rows: list[FloatRows], resolution: float) -> KeyContent:
    """Return the rotation between *rows* of equal keys at several positions, the last one at 0.

    >>> turn = lambda z, angle: np.stack([(z * np.exp(1j * angle)).real,
    ...                                   (z * np.exp(1j * angle)).imag], -1).reshape(len(z), -1)
    >>> keys = np.array([[1, 2j], [1j, 1 + 1j], [3, 1j]])
    >>> rows = [turn(keys, np.array([3.0, 0.3]) * p) for p in (1, 0)]
    >>> rotation_of("keys", rows, 1e-12).rotary
    'pairs'
    >>> rotation_of("keys", [row[:, [0, 2, 1, 3]] for row in rows], 1e-12).rotary
    'halves'
    """
    *others, base = rows
    changed = np.flatnonzero(np.any([(row != base).any(axis=0) for row in others], axis=0))
    if not changed.size:
        return KeyContent(rotary="none")
    start, size, orders = int(changed[0]), len(changed), list[str]()
    if not size % 2 and changed[-1] == start + size - 1:
        turned = slice(start, start + size)
        for order in ("halves", "pairs"):
            if all(_turns(order, base[:, turned], row[:, turned], resolution) for row in others):
                orders.append(order)
    # With two elements, both orders are the same.
    if len(orders) == 1 or (orders and size == 2):  # noqa: PLR2004 - a pair
        return KeyContent(rotary=orders[0], rotary_start=start, rotary_size=size)
    wanted = "one range of elements that are rotated together as halves or as pairs"
    raise SpecError(field, f"elements {changed.tolist()} change with the position", wanted)


def turns_by(
    content: KeyContent,
    frequencies: Sequence[float],
    base: FloatRows,
    row: FloatRows,
    position: int,
    resolution: float,
) -> bool:
    """Return whether each pair of *row* is turned from *base* by its frequency times *position*.

    >>> near, far = np.array([[1.0, 0.0]]), np.array([[np.cos(3 * 0.2), np.sin(3 * 0.2)]])
    >>> content = KeyContent(rotary="halves", rotary_size=2)
    >>> [turns_by(content, [angle], near, far, 3, 1e-7) for angle in (0.2, 0.3)]
    [True, False]
    """
    turned = slice(content.rotary_start, content.rotary_stop)
    old, new = (_complex(content.rotary, rows[:, turned]) for rows in (base, row))
    angles = np.array(frequencies) * position
    error = abs(new - old * np.exp(1j * angles)).max(axis=0)
    # The model computes the angle in float32, so it is coarse at a late position.
    most = ROUNDINGS * resolution + angles * float(np.finfo(np.float32).eps)
    return bool((error <= most * abs(old).max(axis=0)).all())


def _complex(order: str, rows: FloatRows) -> npt.NDArray[np.complex128]:
    """Return each pair of elements as one complex number."""
    half = rows.shape[1] // 2
    one, other = (np.s_[:half], np.s_[half:]) if order == "halves" else (np.s_[::2], np.s_[1::2])
    numbers: npt.NDArray[np.complex128] = rows[:, one] + 1j * rows[:, other]
    return numbers


def _turns(order: str, near: FloatRows, far: FloatRows, resolution: float) -> bool:
    """Return whether each couple of elements turns by one angle in all rows."""
    most = ROUNDINGS * resolution
    old, new = (_complex(order, rows) for rows in (near, far))
    # The factor that turns all rows best. A couple that is zero in all rows gives no number.
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = (old.conj() * new).sum(axis=0) / (abs(old) ** 2).sum(axis=0)
        error = abs(new - factor * old).max(axis=0) / abs(old).max(axis=0)
    return bool((error < most).all() and (abs(abs(factor) - 1) < most).all())
