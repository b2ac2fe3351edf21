"""Test that the ranges of a staged transfer contain every run exactly once.

A run is whole and in one batch. Only the bytes of runs are written.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvspec.nixl import Staging
from kvspec.nixl.ranges import Ints, Ranges, Repeated, ranges_of

NEAR = 1 << 20


def ints(values: object) -> Ints:
    """Return *values* as addresses."""
    return np.array(values, np.int64)


@st.composite
def repeated_sets(draw: st.DrawFn) -> list[Repeated]:
    """Draw runs of two separate memories.

    No two runs share a far byte. Tiles are adjacent, or each is in the gaps of another.
    """
    runs_drawn, base = [], 0
    for _ in range(draw(st.integers(1, 3))):
        runs, tiles = draw(st.integers(1, 5)), draw(st.integers(0, 5))
        lengths = draw(st.lists(st.integers(1, 9), min_size=runs, max_size=runs))
        gaps = draw(st.lists(st.integers(0, 4), min_size=runs, max_size=runs))
        steps = np.cumsum([0, *(a + b for a, b in zip(lengths, gaps, strict=True))])
        inside = draw(st.booleans())  # tiles in each other's gaps, or one after the other
        stride = 40 if inside else int(steps[-1])
        far = (steps[:-1] * (6 * 40 if inside else 1)) + base
        order = draw(st.permutations(range(runs)))
        tile = draw(st.permutations(range(tiles)))
        area = draw(st.integers(0, 1))
        runs_drawn.append(
            Repeated(
                far=ints(far)[order],
                near=NEAR + ints(far)[order] * 2,
                length=ints(lengths)[order],
                area=np.full(runs, 2 * len(runs_drawn) + area),
                far_tile=ints(tile) * stride,
                near_tile=ints(tile) * 2 * stride,
            )
        )
        base = int(far[-1]) + 10 * stride + draw(st.integers(0, 3))
    return runs_drawn


def runs_of(repeated: list[Repeated]) -> Counter[tuple[int, int, int]]:
    """Return (far, near, length) of every run."""
    return Counter(
        (int(far + far_tile), int(near + near_tile), int(length))
        for runs in repeated
        for far_tile, near_tile in zip(runs.far_tile, runs.near_tile, strict=True)
        for far, near, length in zip(runs.far, runs.near, runs.length, strict=True)
    )


def moved_by(ranges: Ranges) -> Counter[tuple[int, int, int]]:
    """Return (far, near, length) of every move from a batch."""
    runs: Counter[tuple[int, int, int]] = Counter()
    for batch in ranges.batches:
        far = np.concatenate(
            [
                np.arange(address, address + length)
                for address, length in zip(batch.address, batch.length, strict=True)
            ]
        )
        assert len(far) == batch.nbytes
        assert batch.offset.tolist() == [0, *np.cumsum(batch.length)[:-1].tolist()]
        for moves in ranges.moves(batch):
            assert len(moves.offset)
            for offset, near in zip(moves.offset, moves.near, strict=True):
                moved = far[offset : offset + moves.length]
                assert np.array_equal(moved, np.arange(moved[0], moved[0] + moves.length))
                runs[int(moved[0]), int(near), moves.length] += 1
    return runs


@given(repeated_sets(), st.integers(9, 400), st.sampled_from([0, 1, 3, 50, 10_000]))
def test_ranges_contain_every_run_once(repeated: list[Repeated], longest: int, gap: int) -> None:
    """No batch is longer than *longest*. Without gaps only the bytes of runs are read."""
    ranges = ranges_of(repeated, longest, gap)
    assert ranges is not None
    runs = runs_of(repeated)
    assert runs == moved_by(ranges)
    assert all(batch.nbytes <= longest for batch in ranges.batches)
    assert ranges.runs == sum(runs.values())
    if not gap:
        assert ranges.read == ranges.nbytes == sum(length for _, _, length in runs)


@given(repeated_sets(), st.integers(9, 400), st.sampled_from([0, 3, 10_000]))
def test_range_has_runs_of_one_memory_only(
    repeated: list[Repeated], longest: int, gap: int
) -> None:
    """The area of a run is the number of its memory."""
    ranges = ranges_of(repeated, longest, gap)
    assert ranges is not None
    area_at = {
        int(far + tile): int(area)
        for runs in repeated
        for tile in runs.far_tile
        for far, area in zip(runs.far, runs.area, strict=True)
    }
    for batch in ranges.batches:
        for address, length in zip(batch.address.tolist(), batch.length.tolist(), strict=True):
            areas = {area for far, area in area_at.items() if address <= far < address + length}
            assert 1 == len(areas)


def spaced_runs(runs: int, length: int, *, distance: int = 0) -> Repeated:
    """Return runs with *distance* bytes between two runs on the far side."""
    place = np.arange(runs, dtype=np.int64)
    return Repeated(
        far=place * (length + distance),
        near=NEAR + place * 4 * length,
        length=np.full(runs, length),
        area=np.zeros(runs, np.int64),
        far_tile=ints([0]),
        near_tile=ints([0]),
    )


def test_range_includes_gap_if_that_is_cheaper() -> None:
    """Reading 100 bytes takes as long as a descriptor, so gaps of up to 100 bytes are read."""
    gap = Staging(stage_below=25).gap
    assert 100 == gap
    counts = []
    for distance in (0, 99, 100, 101):
        ranges = ranges_of([spaced_runs(8, 64, distance=distance)], 1 << 20, gap)
        assert ranges is not None
        counts.append((ranges.ranges, ranges.read))
    assert [(1, 512), (1, 512 + 7 * 99), (1, 512 + 7 * 100), (8, 512)] == counts


def test_run_longer_than_batch_has_no_ranges() -> None:
    """Runs are never divided."""
    assert ranges_of([spaced_runs(3, 64)], 63, 0) is None
    whole = ranges_of([spaced_runs(3, 64)], 64, 0)
    assert whole is not None
    assert [64] * 3 == [batch.nbytes for batch in whole.batches]


def test_ranges_of_no_runs_are_empty() -> None:
    """There are zero batches and zero bytes to read."""
    ranges = ranges_of([], 64, 0)
    assert ranges is not None
    assert (0, 0, 0, ()) == (ranges.ranges, ranges.read, ranges.runs, ranges.batches)
