"""Cut the descriptors of a transfer into batches, one for each NIXL handle.

Invariant: a cut lies between two runs of touching bytes, because NIXL never joins descriptors of
two handles. Only a run that is too long for one handle is cut inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvspec.nixl.rows import Ints

MAX_DESCRIPTORS = 4096  # posted descriptors of one handle: about 13 ms that nothing can interrupt
MAX_BYTES = 64 << 20


class Posted(Protocol):
    """Runs of touching bytes, in order, each of one id or several of one length."""

    def __len__(self) -> int: ...
    def first(self, run: int) -> int:
        """Return the place of its first id; of one more than there are, the number of ids."""

    def reached(self, run: int) -> int:
        """Return the bytes of all before it."""

    def within(self, nbytes: int) -> int:
        """Return how many, from the first on, take no more than *nbytes* together."""

    def length(self, run: int) -> int:
        """Return the bytes of one of its ids."""


class Each:
    """Runs one by one: the first id, what all up to it take, and the length of every id."""

    def __init__(self, first: Ints, reached: Ints, length: Ints) -> None:
        self._first, self._reached, self._length = first, reached, length

    def __len__(self) -> int:
        return len(self._first)

    def first(self, run: int) -> int:
        """Return its first id's place; of one more than there are, the number of ids."""
        return int(self._first[run]) if run < len(self) else len(self._length)

    def reached(self, run: int) -> int:
        """Return the bytes of all before it."""
        return int(self._reached[run - 1]) if run else 0

    def within(self, nbytes: int) -> int:
        """Return how many, from the first on, take no more than *nbytes* together."""
        return int(self._reached.searchsorted(nbytes, side="right"))

    def length(self, run: int) -> int:
        """Return the bytes of one of its ids."""
        return int(self._length[self._first[run]])


def fits(posted: int, nbytes: int) -> bool:
    """Whether one handle takes so many descriptors and bytes."""
    return posted <= MAX_DESCRIPTORS and nbytes <= MAX_BYTES


def how_many_fit(posted: int, nbytes: int) -> int:
    """Return how often one handle takes so many descriptors and bytes."""
    return min(MAX_DESCRIPTORS // posted, MAX_BYTES // nbytes)


def cut(runs: Posted) -> Iterator[slice]:
    """Yield slices of the ids of *runs* that fit one handle each."""
    run = 0
    while run < len(runs):
        stop = min(runs.within(runs.reached(run) + MAX_BYTES), run + MAX_DESCRIPTORS)
        if stop > run:
            yield slice(runs.first(run), runs.first(stop))
        else:  # one run that is too long for a handle: its parts are long enough to be cheap
            stop = run + 1
            step, end = max(1, MAX_BYTES // runs.length(run)), runs.first(stop)
            for begin in range(runs.first(run), end, step):
                yield slice(begin, min(begin + step, end))
        run = stop
