"""Stripes: the blocks of a request that move over one pair of ranks.

Invariant: stripes count virtual blocks of the consumer. Several stripes may carry the same range of
units. They are correct if each block is in exactly one of them.

How it works:
    Under the policy `stripe`, a consumer rank reads several replicas at once. Each replica sends
    every n-th block. With two replicas:

        virtual block          0    1    2    3    4
        replica 0  b % 2 == 0  x         x         x
        replica 1  b % 2 == 1       x         x
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
    """The virtual blocks b with `b % step == first`. By default, these are all blocks.

    Attributes:
        first: The first block.
        step: Distance between two blocks of the stripe.

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
        """Return whether *block* is in the stripe. For an array, return one bool for each block."""
        return block % self.step == self.first

    @property
    def whole(self) -> bool:
        """Whether the stripe contains all blocks."""
        return self.step == 1

    def __str__(self) -> str:
        return "all" if self.whole else f"blocks b % {self.step} == {self.first}"


# All blocks of a request.
WHOLE = Stripe()


def times_held(stripes: Iterable[Stripe]) -> int:
    """Return whether *stripes* hold each block never, once or several times.

    Args:
        stripes: Stripes of one common step. Stripes of step 1 may be among them.

    Returns:
        1 if each block is in exactly one stripe. 0 if at least one block is in no stripe. 2
        otherwise.

    >>> halves = Stripe(0, 2), Stripe(1, 2)
    >>> times_held(halves), times_held(halves[:1]), times_held([WHOLE, *halves[1:]])
    (1, 0, 2)
    >>> times_held([WHOLE] * 3)
    2
    """
    all_stripes = tuple(stripes)
    period = max((stripe.step for stripe in all_stripes), default=1)
    counts = [sum(stripe.holds(block) for stripe in all_stripes) for block in range(period)]
    return min(*counts, 1) * min(max(counts), 2)
