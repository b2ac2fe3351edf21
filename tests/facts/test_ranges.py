"""Ranges hold every run once, whole, in one batch; what is written is the runs and nothing else."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvspec.nixl import Costs
from kvspec.nixl.ranges import Ints, Ranges, Repeated, ranges_of

NEAR = 1 << 20


def ints(values: object) -> Ints:
    """Return *values* as addresses."""
    return np.array(values, np.int64)


@st.composite
def repeated_sets(draw: st.DrawFn) -> list[Repeated]:
    """Draw runs of two memories that lie apart: no far byte twice, tiles side by side or apart."""
    found, base = [], 0
    for _ in range(draw(st.integers(1, 3))):
        runs, tiles = draw(st.integers(1, 5)), draw(st.integers(0, 5))
        lengths = draw(st.lists(st.integers(1, 9), min_size=runs, max_size=runs))
        gaps = draw(st.lists(st.integers(0, 4), min_size=runs, max_size=runs))
        steps = np.cumsum([0, *(a + b for a, b in zip(lengths, gaps, strict=True))])
        inside = draw(st.booleans())  # tiles inside one another's gaps, or one after the other
        stride = 40 if inside else int(steps[-1])
        far = (steps[:-1] * (6 * 40 if inside else 1)) + base
        order = draw(st.permutations(range(runs)))
        tile = draw(st.permutations(range(tiles)))
        area = draw(st.integers(0, 1))
        found.append(
            Repeated(
                far=ints(far)[order],
                near=NEAR + ints(far)[order] * 2,
                length=ints(lengths)[order],
                area=np.full(runs, 2 * len(found) + area),
                far_tile=ints(tile) * stride,
                near_tile=ints(tile) * 2 * stride,
            )
        )
        base = int(far[-1]) + 10 * stride + draw(st.integers(0, 3))
    return found


def wanted(runs: list[Repeated]) -> Counter[tuple[int, int, int]]:
    """Return (far, near, length) of every run."""
    return Counter(
        (int(far + tile), int(near + other), int(length))
        for each in runs
        for tile, other in zip(each.far_tile, each.near_tile, strict=True)
        for far, near, length in zip(each.far, each.near, each.length, strict=True)
    )


def found(ranges: Ranges) -> Counter[tuple[int, int, int]]:
    """Return the same of what batches permute, by where their ranges lie."""
    runs: Counter[tuple[int, int, int]] = Counter()
    for batch in ranges.batches:
        far = np.concatenate(
            [np.arange(a, a + n) for a, n in zip(batch.address, batch.length, strict=True)]
        )
        assert len(far) == batch.nbytes
        assert batch.offset.tolist() == [0, *np.cumsum(batch.length)[:-1].tolist()]
        for moves in ranges.moves(batch):
            assert len(moves.offset)
            for offset, near in zip(moves.offset, moves.near, strict=True):
                bytes_ = far[offset : offset + moves.length]
                assert np.array_equal(bytes_, np.arange(bytes_[0], bytes_[0] + moves.length))
                runs[int(bytes_[0]), int(near), moves.length] += 1
    return runs


@given(repeated_sets(), st.integers(9, 400), st.sampled_from([0, 1, 3, 50, 10_000]))
def test_every_run_lies_in_one_range_of_one_chunk(
    runs: list[Repeated], longest: int, gap: int
) -> None:
    """Where its bytes are; batches are no longer than wanted, and what is read is counted."""
    ranges = ranges_of(runs, longest, gap)
    assert ranges is not None
    assert wanted(runs) == found(ranges)
    assert all(batch.nbytes <= longest for batch in ranges.batches)
    assert ranges.runs == sum(wanted(runs).values())
    if not gap:
        assert ranges.read == ranges.nbytes == sum(each[2] for each in wanted(runs))


@given(repeated_sets(), st.integers(9, 400), st.sampled_from([0, 3, 10_000]))
def test_no_range_lies_in_two_memories(runs: list[Repeated], longest: int, gap: int) -> None:
    """A range's runs are of one area."""
    ranges = ranges_of(runs, longest, gap)
    assert ranges is not None
    area = {
        int(far + tile): int(of)
        for each in runs
        for tile in each.far_tile
        for far, of in zip(each.far, each.area, strict=True)
    }
    for batch in ranges.batches:
        for address, length in zip(batch.address.tolist(), batch.length.tolist(), strict=True):
            held = {of for far, of in area.items() if address <= far < address + length}
            assert 1 == len(held)


def side_by_side(runs: int, length: int, *, distance: int = 0) -> Repeated:
    """Return runs that follow each other far away, *distance* bytes from one to the next."""
    place = np.arange(runs, dtype=np.int64)
    return Repeated(
        far=place * (length + distance),
        near=NEAR + place * 4 * length,
        length=np.full(runs, length),
        area=np.zeros(runs, np.int64),
        far_tile=ints([0]),
        near_tile=ints([0]),
    )


def test_a_gap_is_read_where_that_is_cheaper() -> None:
    """A descriptor that costs as much as 100 bytes spans gaps of 100 bytes."""
    gap = Costs(descriptor=1e-6, byte=1e-8).gap
    assert 100 == gap
    counts = []
    for distance in (0, 99, 100, 101):
        ranges = ranges_of([side_by_side(8, 64, distance=distance)], 1 << 20, gap)
        assert ranges is not None
        counts.append((ranges.ranges, ranges.read))
    assert [(1, 512), (1, 512 + 7 * 99), (1, 512 + 7 * 100), (8, 512)] == counts


def test_what_is_longer_than_a_batch_has_no_ranges() -> None:
    """Nothing is cut inside a run."""
    assert None is ranges_of([side_by_side(3, 64)], 63, 0)
    whole = ranges_of([side_by_side(3, 64)], 64, 0)
    assert whole is not None
    assert [64] * 3 == [batch.nbytes for batch in whole.batches]


def test_nothing_has_no_batches() -> None:
    """No runs, no ranges."""
    nothing = ranges_of([], 64, 0)
    assert nothing is not None
    assert (0, 0, 0, ()) == (nothing.ranges, nothing.read, nothing.runs, nothing.batches)
