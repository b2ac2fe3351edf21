"""Test that the ranges of a staged transfer contain every run exactly once.

A run is whole and in one batch. Only the bytes of runs are written.
"""

from __future__ import annotations

from collections import Counter

import attrs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvspec.nixl import Staging
from kvspec.nixl.merging import Runs
from kvspec.nixl.staging.ranges import Batch, ranges_of
from kvspec.ownership.tokens import Ints

NEAR = 1 << 20


def ints(values: object) -> Ints:
    """Return *values* as addresses."""
    return np.array(values, np.int64)


@attrs.frozen
class Drawn:
    """Runs, and the addresses at which the memories of the far side begin."""

    far: Ints
    near: Ints
    nbytes: Ints
    begins: Ints

    def ranges(self, longest: int, gap: int) -> tuple[Batch, ...] | None:
        """Return the batches of the runs."""
        runs = Runs(self.near, self.far, self.nbytes)
        return ranges_of(runs, self.begins, longest=longest, gap=gap)

    def runs(self) -> Counter[tuple[int, int, int]]:
        """Return (far, near, length) of every run."""
        columns = (each.tolist() for each in (self.far, self.near, self.nbytes))
        return Counter(zip(*columns, strict=True))


@st.composite
def drawn_runs(draw: st.DrawFn) -> Drawn:
    """Draw runs of up to three memories, which may touch. Each memory has tiles with equal runs.

    No two runs share a far byte. Tiles are adjacent, or each is in the gaps of another.
    """
    columns, begins, base = [np.empty((3, 0), np.int64)], [], 0
    for _ in range(draw(st.integers(1, 3))):
        runs, tiles = draw(st.integers(1, 5)), draw(st.integers(0, 5))
        lengths = draw(st.lists(st.integers(1, 9), min_size=runs, max_size=runs))
        gaps = draw(st.lists(st.integers(0, 4), min_size=runs, max_size=runs))
        steps = np.cumsum([0, *(a + b for a, b in zip(lengths, gaps, strict=True))])
        inside = draw(st.booleans())  # tiles in each other's gaps, or one after the other
        stride = 40 if inside else int(steps[-1])
        far = (steps[:-1] * (6 * 40 if inside else 1)) + base
        order = draw(st.permutations(range(runs)))
        tile = ints(draw(st.permutations(range(tiles))))[:, None]
        spans = np.empty((3, tiles, runs), np.int64)
        spans[0] = far[order] + tile * stride
        spans[1] = NEAR + far[order] * 2 + tile * 2 * stride
        spans[2] = ints(lengths)[order]
        columns.append(spans.reshape(3, -1))
        begins.append(base)
        end = max([base, *(columns[-1][0] + columns[-1][2]).tolist()])
        base = end + draw(st.integers(0, 3))
    return Drawn(*np.concatenate(columns, axis=1), ints(begins))


def moved_by(batches: tuple[Batch, ...]) -> Counter[tuple[int, int, int]]:
    """Return (far, near, length) of every move from a batch."""
    runs: Counter[tuple[int, int, int]] = Counter()
    for batch in batches:
        far = np.concatenate(
            [
                np.arange(address, address + length)
                for address, length in zip(batch.address, batch.length, strict=True)
            ]
        )
        assert len(far) == batch.nbytes
        assert batch.offset.tolist() == [0, *np.cumsum(batch.length)[:-1].tolist()]
        for moves in batch.moves():
            assert len(moves.offset)
            for offset, near in zip(moves.offset, moves.near, strict=True):
                moved = far[offset : offset + moves.length]
                assert np.array_equal(moved, np.arange(moved[0], moved[0] + moves.length))
                runs[int(moved[0]), int(near), moves.length] += 1
    return runs


@given(drawn_runs(), st.integers(9, 400), st.sampled_from([0, 1, 3, 50, 10_000]))
def test_ranges_contain_every_run_once(drawn: Drawn, longest: int, gap: int) -> None:
    """No batch is longer than *longest*. Without gaps only the bytes of runs are read."""
    batches = drawn.ranges(longest, gap)
    assert batches is not None
    assert drawn.runs() == moved_by(batches)
    assert all(batch.nbytes <= longest for batch in batches)
    if not gap:
        assert int(drawn.nbytes.sum()) == sum(batch.nbytes for batch in batches)


@given(drawn_runs(), st.integers(9, 400), st.sampled_from([0, 3, 10_000]))
def test_range_has_runs_of_one_memory_only(drawn: Drawn, longest: int, gap: int) -> None:
    """No range contains a byte before and a byte behind the begin of a memory."""
    batches = drawn.ranges(longest, gap)
    assert batches is not None
    for batch in batches:
        for address, length in zip(batch.address.tolist(), batch.length.tolist(), strict=True):
            last = address + length - 1
            begins = drawn.begins.searchsorted([address, last], side="right")
            assert begins[0] == begins[1]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=12),
    st.integers(9, 40),
    st.integers(0, 5),
)
def test_runs_that_share_far_bytes_are_each_moved(
    runs: list[tuple[int, int]], longest: int, gap: int
) -> None:
    """One far byte may be read to several places."""
    far, nbytes = (ints([run[side] for run in runs]) for side in (0, 1))
    drawn = Drawn(far, NEAR + np.arange(len(runs)), nbytes, ints([0]))
    batches = drawn.ranges(longest, gap)
    assert batches is not None
    assert drawn.runs() == moved_by(batches)
    assert all(batch.nbytes <= longest for batch in batches)


def spaced_runs(runs: int, length: int, *, distance: int = 0) -> Drawn:
    """Return runs with *distance* bytes between two runs on the far side."""
    place = np.arange(runs, dtype=np.int64)
    far, near = place * (length + distance), NEAR + place * 4 * length
    return Drawn(far, near, np.full(runs, length), ints([0]))


def test_range_includes_gap_if_that_is_cheaper() -> None:
    """Reading 100 bytes takes as long as a descriptor, so gaps of up to 100 bytes are read."""
    gap = Staging(stage_below=25).gap
    assert 100 == gap
    counts = []
    for distance in (0, 99, 100, 101):
        batches = spaced_runs(8, 64, distance=distance).ranges(1 << 20, gap)
        assert batches is not None
        [batch] = batches
        counts.append((len(batch.address), batch.nbytes))
    assert [(1, 512), (1, 512 + 7 * 99), (1, 512 + 7 * 100), (8, 512)] == counts


def test_run_longer_than_batch_has_no_ranges() -> None:
    """Runs are never divided."""
    assert spaced_runs(3, 64).ranges(63, 0) is None
    whole = spaced_runs(3, 64).ranges(64, 0)
    assert whole is not None
    assert [64] * 3 == [batch.nbytes for batch in whole]


def test_ranges_of_no_runs_are_empty() -> None:
    """There is no batch."""
    assert () == spaced_runs(0, 1).ranges(64, 0)
