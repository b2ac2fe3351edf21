"""Test that `ProductSpans` counts the same spans as a list of all spans."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from kvspec.nixl.selected import Offsets, RepeatedRuns, _joined, _Part

Spans = list[tuple[int, int, int, int, int]]
"""Begin, end, begins_at, memory of the destination, memory of the source."""


@st.composite
def strides(draw: st.DrawFn, sizes: tuple[int, ...], nbytes: int, inner: list[int]) -> list[int]:
    """Draw dense or padded strides of axes of *sizes*. *inner* lists the innermost axis first."""
    found, reached = [0] * len(sizes), nbytes
    for axis in inner:
        found[axis] = reached
        reached = reached * sizes[axis] + draw(st.sampled_from([0, 0, 1, nbytes]))
    return found


@st.composite
def parts(draw: st.DrawFn) -> list[_Part]:
    """Draw a part of whole tiles, or also a second part of the heads of other tiles."""
    sizes = tuple(draw(st.integers(1, 4)) for _ in range(3))
    nbytes = draw(st.sampled_from([2, 4]))
    order = draw(st.permutations(range(3)))
    min_gap = [
        draw(strides(sizes, nbytes, inner))
        for inner in (order, order if draw(st.booleans()) else draw(st.permutations(range(3))))
    ]
    repeated = [
        np.add.outer(np.arange(sizes[1]) * a[1], np.arange(sizes[2]) * a[2]) for a in min_gap
    ]
    areas = [np.full(repeated[0].size, draw(st.integers(0, 1))) for _ in range(2)]
    if draw(st.booleans()):
        areas[draw(st.integers(0, 1))] = np.repeat(np.arange(sizes[1]), sizes[2])
    runs = Offsets.of(*(each.reshape(-1) for each in repeated), *areas)
    which = [draw(st.sampled_from([0, 0, 0, 1])) for _ in range(sizes[0])]
    found = []
    for part, size in enumerate((nbytes, nbytes // draw(st.sampled_from([1, 2])))):
        tiles = np.array([tile for tile, one in enumerate(which) if one == part], np.int64)
        if len(tiles):
            offsets = Offsets.of(*(tiles * each[0] for each in min_gap))
            skip = np.array([draw(st.integers(0, 9)), draw(st.integers(0, 9)), 0, 0])[:, None]
            starts, offsets = Offsets(runs.columns - skip), Offsets(offsets.columns + skip)
            found.append(_joined_part(starts, draw(st.sampled_from([2, 8, 16, 64])), offsets, size))
    return found


def _joined_part(runs: Offsets, min_gap: int, tiles: Offsets, size: int) -> _Part:
    """Return the part of *tiles* in *runs*. Tiles that touch are joined."""
    tiles, _ = tiles.ascending()
    first = np.flatnonzero(np.append(True, ~tiles.follows(size, size)))
    nbytes = np.diff(first, append=len(tiles)) * size
    return _Part(RepeatedRuns.of(runs, min_gap), tiles.take(first), nbytes, first, len(tiles), size)


def one_by_one(some: list[_Part]) -> Spans:
    """Return the spans of all parts in order of the destination."""
    found = []
    for part in some:
        for run in part.runs.every.columns.T.tolist():
            for tile, nbytes in zip(
                part.joined.columns.T.tolist(), part.nbytes.tolist(), strict=True
            ):
                begin, begins_at, destination, source = (
                    a + b for a, b in zip(run, tile, strict=True)
                )
                found.append((begin, begin + nbytes, begins_at, destination, source))
    return sorted(found)


def joined(spans: Spans) -> int:
    """Return the number of spans after joining those that touch on both sides in one memory."""
    return len(spans) - sum(
        a[1] == b[0] and a[2] + a[1] - a[0] == b[2] and a[3:] == b[3:] for a, b in pairwise(spans)
    )


@given(parts())
@settings(max_examples=500)
def test_product_spans_count_the_joined_spans(some: list[_Part]) -> None:
    """The spans share no byte, like the spans of any selection."""
    spans = one_by_one(some)
    assume(all(a[1] <= b[0] for a, b in pairwise(spans)))
    left = _joined(some)
    event(f"{len(some)} parts, {'no product' if left is None else 'a product'}")
    assert left in (None, joined(spans))
