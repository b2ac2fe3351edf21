"""Test claims of busy ranges against sets of all numbers in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvspec.memory.busy import BusyRanges

if TYPE_CHECKING:
    from numpy.typing import NDArray

OWNERS, PLACES = st.sampled_from("abcd"), st.sampled_from(("pool", 7))
RANGES = st.lists(
    st.builds(
        lambda start, size: range(start, start + size), st.integers(0, 30), st.integers(1, 5)
    ),
    max_size=4,
)


@attrs.frozen
class Claim:
    """One claim to try, or the release of its owner if *ranges* is None."""

    owner: str
    place: object
    ranges: list[range] | None
    shared: bool


STEPS = st.lists(st.builds(Claim, OWNERS, PLACES, st.none() | RANGES, st.booleans()), max_size=24)


def bounds(ranges: list[range]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the starts and the ends of *ranges*."""
    return (
        np.array([one_range.start for one_range in ranges], np.int64),
        np.array([one_range.stop for one_range in ranges], np.int64),
    )


def numbers(claim: Claim) -> set[int]:
    """Return all numbers of *claim*."""
    return {number for one_range in claim.ranges or () for number in one_range}


@given(STEPS)
def test_claims_conflict_only_if_numbers_are_busy(steps: list[Claim]) -> None:
    """The reference keeps the numbers of all claims and compares them one by one."""
    busy: BusyRanges[str] = BusyRanges()
    kept: list[Claim] = []
    for step in steps:
        if step.ranges is None:
            busy.release(step.owner)
            kept = [claim for claim in kept if claim.owner != step.owner]
            continue
        rivals = [
            claim
            for claim in kept
            if claim.place == step.place
            and not (claim.shared and step.shared)
            and numbers(claim) & numbers(step)
        ]
        conflict = busy.claim(step.owner, step.place, *bounds(step.ranges), shared=step.shared)
        if conflict is None:
            assert not rivals
            kept.append(step)
        else:
            named = [claim for claim in rivals if claim.owner == conflict.owner]
            assert conflict.start in numbers(step)
            assert any(conflict.start in numbers(claim) for claim in named)
    for owner in "abcd":
        busy.release(owner)
    for place in ("pool", 7):
        assert busy.claim("e", place, *bounds([range(40)])) is None


def test_release_of_unknown_owner_does_nothing() -> None:
    """A second release is harmless, so a caller may repeat it after an interrupt."""
    busy: BusyRanges[str] = BusyRanges()
    assert busy.claim("a", "pool", *bounds([range(3)])) is None
    busy.release("b")
    assert busy.claim("b", "pool", *bounds([range(2, 4)])) == ("a", 2)


def test_claims_of_500_owners_conflict_until_they_are_released() -> None:
    """500 owners claim 400 ranges each. A new claim conflicts until the owner releases its own."""
    busy: BusyRanges[int] = BusyRanges()
    blocks = np.random.default_rng(0).permutation(500 * 400).reshape(500, 400) * 2
    for owner, starts in enumerate(blocks):
        assert busy.claim(owner, "pool", starts, starts + 1) is None
    for owner, starts in enumerate(blocks[:50]):
        assert (owner, int(starts[7])) == busy.claim(-1, "pool", starts[7:8], starts[7:8] + 1)
        busy.release(owner)
        assert busy.claim(-1, "pool", starts[7:8], starts[7:8] + 2) is None
