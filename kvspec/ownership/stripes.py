"""Stripes: which blocks of a request move over one pair of ranks.

Law: stripes are counted in virtual blocks of the consumer. Several that share a range of units are
right where each block is held by exactly one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import overload

import attrs
import numpy as np  # noqa: TC002 - attrs resolves annotations
import numpy.typing as npt  # noqa: TC002

from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.ownership.tokens import Ints


@attrs.frozen
class Stripe:
    """The virtual blocks b with ``b % step == first``; as it stands, all of them.

    >>> [block for block in range(7) if Stripe(1, 3).holds(block)]
    [1, 4]
    """

    first: int = 0
    step: int = 1

    def __attrs_post_init__(self) -> None:
        if positive_int("stripe.first", self.first, least=0) >= positive_int(
            "stripe.step", self.step
        ):
            raise SpecError("stripe.first", self.first, f"less than step={self.step}")

    @overload
    def holds(self, block: int) -> bool: ...
    @overload
    def holds(self, block: Ints) -> npt.NDArray[np.bool_]: ...
    def holds(self, block: int | Ints) -> bool | npt.NDArray[np.bool_]:
        """Return whether each *block*, a number or an array of them, is one of these."""
        return block % self.step == self.first

    @property
    def whole(self) -> bool:
        """Whether these are all blocks."""
        return self.step == 1

    def __str__(self) -> str:
        return "all" if self.whole else f"blocks b % {self.step} == {self.first}"


WHOLE = Stripe()
"""Every block."""


def times_held(stripes: Iterable[Stripe]) -> int:
    """Return how often *stripes* together hold each block: 1 if once, 0 if one never, else 2.

    Their steps are equal, but for 1.

    >>> halves = Stripe(0, 2), Stripe(1, 2)
    >>> times_held(halves), times_held(halves[:1]), times_held([WHOLE, *halves[1:]])
    (1, 0, 2)
    """
    ways = tuple(stripes)
    period = max((way.step for way in ways), default=1)
    held = [sum(way.holds(block) for way in ways) for block in range(period)]
    return min(held) if min(held) != 1 else min(max(held), 2)
