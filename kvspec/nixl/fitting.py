"""Fit the seven figures of `Costs` to measured transfers by least squares. No figure is negative.

Invariant: errors are relative, so short transfers count as much as long ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvspec.nixl.costs import Costs

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST = 1e-15
"""Seconds: what a figure is at least, so that a quotient of two is a number."""


@attrs.frozen(kw_only=True)
class Sample:
    """*seconds* of one transfer: *descriptors* of *nbytes* that were posted in *handles*.

    Where it was staged, *runs* of *permuted* bytes were put in place afterwards, else none.
    """

    seconds: float
    descriptors: int
    nbytes: int
    handles: int
    runs: int = 0
    permuted: int = 0

    def expected(self, costs: Costs) -> float:
        """Return the seconds that *costs* say."""
        if not self.runs:
            return costs.direct(self.descriptors, self.nbytes, self.handles)
        numbers = self.descriptors, self.nbytes, self.runs, self.permuted
        return costs.staged(*numbers, batches=self.handles)


def fit(samples: Iterable[Sample], origin: str = "fitted") -> Costs:
    """Return what fits *samples* best: first those that went directly, then the staged ones.

    >>> known = Costs(handle=1e-5, descriptor=2e-6, byte=1e-10, order=1e-4, batch=2e-5, run=3e-8)
    >>> direct = [(1, 10**7, 1), (1000, 10**7, 1), (4000, 10**6, 2), (10, 10**5, 1), (1, 10, 1)]
    >>> staged = [(1, n * size, batches, n, n * size) for n, size, batches in (
    ...     (1000, 1000, 1), (10, 10**6, 9), (50000, 100, 2), (20, 500, 1), (1, 10**6, 1))]
    >>> every = [Sample(seconds=1, descriptors=d, nbytes=b, handles=h) for d, b, h in direct]
    >>> every += [Sample(seconds=1, descriptors=d, nbytes=b, handles=h, runs=r, permuted=p)
    ...     for d, b, h, r, p in staged]
    >>> found = fit(attrs.evolve(one, seconds=one.expected(known)) for one in every)
    >>> all(np.isclose(getattr(found, name), getattr(known, name)) for name in ("run", "order"))
    True
    """
    every = tuple(samples)
    plain = [one for one in every if not one.runs]
    staged = [one for one in every if one.runs]
    columns = [(one.handles, one.descriptors, one.nbytes) for one in plain]
    handle, descriptor, byte = _least(columns, [one.seconds for one in plain])
    direct = Costs(handle=handle, descriptor=descriptor, byte=byte)
    rest = [one.seconds - direct.direct(one.descriptors, one.nbytes, one.handles) for one in staged]
    more = [(1, one.handles, one.runs, one.permuted) for one in staged]
    order, batch, run, run_byte = _least(more, rest, [one.seconds for one in staged])
    return attrs.evolve(direct, order=order, batch=batch, run=run, run_byte=run_byte, origin=origin)


def _least(
    columns: Sequence[tuple[int, ...]], seconds: Sequence[float], scale: Sequence[float] = ()
) -> NDArray[np.float64]:
    """Return the figures, none negative, of which *columns* count how many make *seconds*."""
    weight = 1 / np.array(scale or seconds)
    counts = np.array(columns, np.float64) * weight[:, None]
    wanted = np.array(seconds) * weight
    kept = list(range(counts.shape[1]))
    found = np.full(counts.shape[1], LEAST)
    while kept:
        figures = np.linalg.lstsq(counts[:, kept], wanted, rcond=None)[0]
        if (figures > 0).all():
            found[kept] = np.maximum(figures, LEAST)
            break
        kept.pop(int(figures.argmin()))
    return found
