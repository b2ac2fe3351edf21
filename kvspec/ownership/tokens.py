"""Block-cyclic ownership of token positions.

Law: every position has one owner; an owner counts its own positions without gaps.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import overload

import attrs
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@attrs.frozen
class BlockCyclic:
    """Block-cyclic ownership: of every *size* runs of *interleave* positions, the *rank*-th.

    The owner counts its own positions without gaps: its ``local`` index n stands for position
    ``((n // I) * C + rank) * I + n % I``, with I the interleave and C the size.
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1

    def owns(self, position: Ints) -> npt.NDArray[np.bool_]:
        """Return which of the positions are owned."""
        return np.equal(position // self.interleave % self.size, self.rank)

    @overload
    def local(self, position: int) -> int: ...
    @overload
    def local(self, position: Ints) -> Ints: ...
    def local(self, position: int | Ints) -> int | Ints:
        """Return how many owned positions lie before *position*: its own index, if it is owned."""
        if self.size == 1:
            return position
        rounds, rest = divmod(position, self.interleave * self.size)
        before = rest - self.rank * self.interleave
        if isinstance(before, int):
            return rounds * self.interleave + min(max(before, 0), self.interleave)
        return rounds * self.interleave + np.clip(before, 0, self.interleave)

    def position(self, local: Ints) -> Ints:
        """Return the positions of own indices."""
        rounds, rest = np.divmod(local, self.interleave)
        return (rounds * self.size + self.rank) * self.interleave + rest

    def same_sharding(self, other: BlockCyclic) -> bool:
        """Whether both shard positions to as many ranks, in the same way."""
        if self.size == other.size == 1:
            return True
        return (self.size, self.interleave) == (other.size, other.interleave)


@lru_cache(maxsize=4096)
def meet(a: BlockCyclic, b: BlockCyclic) -> bool:
    """Return whether any position is owned by both."""
    if a.same_sharding(b):
        return a.size == 1 or a.rank == b.rank
    # Runs begin at every multiple of a's and of b's round, and so, to each other, at each of their
    # gcd: they meet if one of those distances is shorter than the run that comes first.
    step = gcd(a.interleave * a.size, b.interleave * b.size)
    distance = a.rank * a.interleave - b.rank * b.interleave
    least = 1 - a.interleave
    return least + (distance - least) % step < b.interleave
