"""Block-cyclic ownership of token positions, as context parallelism uses it.

Invariant: every position has exactly one owner. An owner counts its own positions without gaps.

How it works:
    Context parallelism (vLLM: DCP and PCP) divides tokens among C context ranks. A rank stores
    `interleave` tokens (I), then the next rank stores I tokens. With C = 2 and I = 4:

        position       0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15
        context rank   0  0  0  0    1  1  1  1    0  0  0  0    1  1  1  1
        local index    0  1  2  3    0  1  2  3    4  5  6  7    4  5  6  7

    This is the rule of vLLM's `BlockTable.compute_slot_mapping`. There, I is
    `cp_kv_cache_interleave_size` and C is `total_cp_world_size`. ScaLAPACK calls it block-cyclic.

        >>> owner = BlockCyclic(rank=1, size=2, interleave=4)
        >>> owner.position(np.arange(6)).tolist()
        [4, 5, 6, 7, 12, 13]
        >>> owner.local(12)
        4
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
    """The token positions of one context rank.

    The rank owns position p if `p // interleave % size == rank`. Its local index n is position
    `((n // interleave) * size + rank) * interleave + n % interleave`.

    Attributes:
        rank: Context rank, less than *size*.
        size: Number of context ranks. With 1, the rank owns all positions.
        interleave: Tokens that one rank stores before it is the turn of the next rank (vLLM:
            `cp_kv_cache_interleave_size`).

    >>> BlockCyclic(rank=0, size=2, interleave=2).owns(np.arange(6)).tolist()
    [True, True, False, False, True, True]
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1

    def owns(self, position: Ints) -> npt.NDArray[np.bool_]:
        """Return, for each position, whether the rank owns it."""
        return np.equal(position // self.interleave % self.size, self.rank)

    @overload
    def local(self, position: int) -> int: ...
    @overload
    def local(self, position: Ints) -> Ints: ...
    def local(self, position: int | Ints) -> int | Ints:
        """Return the number of owned positions before *position*.

        This is the local index of *position* if the rank owns it. Like vLLM's
        `get_dcp_local_seq_lens`, it is also the local length of a sequence of *position* tokens.

        >>> BlockCyclic(rank=1, size=3, interleave=2).local(np.arange(7)).tolist()
        [0, 0, 0, 1, 2, 2, 2]
        """
        if self.size == 1:
            return position
        rounds, rest = divmod(position, self.interleave * self.size)
        before = rest - self.rank * self.interleave
        if isinstance(before, int):
            return rounds * self.interleave + min(max(before, 0), self.interleave)
        return rounds * self.interleave + np.clip(before, 0, self.interleave)

    def position(self, local: Ints) -> Ints:
        """Return the positions of local indices. This is the inverse of `local`."""
        rounds, rest = np.divmod(local, self.interleave)
        return (rounds * self.size + self.rank) * self.interleave + rest

    def same_sharding(self, other: BlockCyclic) -> bool:
        """Whether both belong to equal shardings: as many ranks and the same interleave.

        >>> BlockCyclic(0, 2, 1).same_sharding(BlockCyclic(0, 2, 4))
        False
        """
        # With one rank the interleave has no effect.
        if self.size == other.size == 1:
            return True
        return (self.size, self.interleave) == (other.size, other.interleave)


@lru_cache(maxsize=4096)
def meet(a: BlockCyclic, b: BlockCyclic) -> bool:
    """Return whether *a* and *b* own a common position.

    *a* stores `a.interleave` tokens in each turn. Its turns begin at `a.rank * a.interleave`, and
    then repeat with the period `a.size * a.interleave`. The same holds for *b*.

    Take the distance d from the start of a turn of *b* to the start of a turn of *a*. The two turns
    overlap if `-a.interleave < d < b.interleave`. For the first turns, d is
    `a.rank * a.interleave - b.rank * b.interleave`. For other turns, d differs from this value by a
    multiple of the gcd of both periods, and each such multiple occurs.

    >>> meet(BlockCyclic(0, 2, 4), BlockCyclic(1, 4, 2))  # 0..3, 8..11 and 2..3, 10..11
    True
    >>> meet(BlockCyclic(0, 2, 4), BlockCyclic(2, 4, 2))  # 0..3, 8..11 and 4..5, 12..13
    False
    """
    if a.same_sharding(b):
        return a.size == 1 or a.rank == b.rank
    step = gcd(a.interleave * a.size, b.interleave * b.size)
    distance = a.rank * a.interleave - b.rank * b.interleave
    # The smallest distance that is congruent to the first one and greater than -a.interleave.
    least = 1 - a.interleave
    return least + (distance - least) % step < b.interleave
