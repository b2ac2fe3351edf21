"""Tests that transfers through the staging buffer write the same bytes as direct transfers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import case, engine, gqa, request
from hypothesis import given, settings
from hypothesis import strategies as st
from nixl_world import moving
from slotted import Slotted

from kvspec import DescriptorTable, RankId, TransferRequest
from kvspec.nixl import Staging
from kvspec.nixl.merging import pair_selection
from kvspec.nixl.rows import checked_rows
from kvspec.nixl.staging import choosing
from kvspec.nixl.staging.ranges import ranges_of
from kvspec.ownership.replicas import Role
from kvspec.testing import Case, laws, strategies
from kvspec.testing.fake_nixl import FakeNixl
from kvspec.testing.laws import LAWS, System
from kvspec.testing.posted import counted_posts
from kvspec.testing.world import ByteCopy, World, described, world

pytestmark = pytest.mark.uncovered

GAPS = (0, 7, 300, 1 << 16)
OPERATIONS = st.sampled_from(["READ", "WRITE"])


@st.composite
def stagings(draw: st.DrawFn) -> Staging:
    """Draw buffers of one slot or many, and thresholds with which no gaps or all gaps are read."""
    area = draw(st.sampled_from([4096, 1 << 14, 1 << 20]))
    batch = draw(st.sampled_from([1 << 20, 4096, 1024, 256]))
    below = draw(st.sampled_from([0, 6, 60, 6 << 10]))
    return Slotted(buffer=area, slot_bytes=batch, stage_below=below, always=True)


@given(strategies.cases() | strategies.sharing_cases(), stagings(), OPERATIONS, st.booleans())
def test_staged_transfers_keep_law_1(
    drawn: Case, staging: Staging, operation: Any, plain: bool
) -> None:
    """Transfers pull or push through the buffer, by selections or by plain ids."""
    here = world(drawn)
    with FakeNixl(), counted_posts() as posted, moving(here, operation, staging=staging) as both:
        for transfer in both.start_all(plain=plain):
            transfer.wait()
            assert (
                not transfer.descriptors or transfer.staged or _longest(transfer) > staging.longest
            )
            assert not transfer.staged or posted[transfer] == transfer.runs
    assert [] == here.differences()


def _longest(transfer: Any) -> int:
    return int(transfer.pairs.moved_runs().nbytes.max())


def through_ranges(far: Role, longest: int, gap: int) -> System:
    """Return kvspec with the copies of batches: from a range to the buffer, and on from there."""

    def copies(
        table: DescriptorTable, moved: TransferRequest, tokens: Any = None
    ) -> list[ByteCopy]:
        selection = table.select(moved, tokens=tokens)
        own = int(far == "producer")
        rows = checked_rows(selection.producer_rows), checked_rows(selection.consumer_rows)
        remote = rows[1 - own]
        pairs = pair_selection(selection, rows[own], remote, own, "local")
        begins = remote.memory_begins if len(selection) else np.empty(0, np.int64)
        batches = ranges_of(pairs.moved_runs(), begins, longest=longest, gap=gap)
        if batches is None:  # A run is longer than a batch, so nothing is staged.
            return described(table, moved, tokens)
        copied = []
        for batch in batches:
            place = np.concatenate(
                [np.arange(a, a + n) for a, n in zip(batch.address, batch.length, strict=True)]
            )
            for moves in batch.moves():
                for offset, near in zip(moves.offset.tolist(), moves.near.tolist(), strict=True):
                    sides = int(place[offset]), near
                    copied.append((*sides[:: 1 if far == "producer" else -1], moves.length))
        return copied

    def whole(here: World, p: RankId, c: RankId) -> list[ByteCopy]:
        exchanged = here.plan.between(p, c)
        return copies(here.table(p, c), here.case.request) if exchanged else []

    def step(
        here: World, p: RankId, c: RankId, layers: frozenset[str], tokens: range
    ) -> list[ByteCopy]:
        exchanged = here.plan.between(p, c)
        return copies(here.table(p, c, layers), here.case.request, tokens) if exchanged else []

    return System(name="staged", descriptors=whole, steps=step)


OF_BYTES = [law for law in LAWS if law.number in {1, 4, 9, 10, 11, 13}]


@settings(max_examples=settings.default.max_examples // 2)
@given(
    strategies.twins(),
    st.sampled_from(["producer", "consumer"]),
    st.sampled_from([200, 1000, 1 << 20]),
    st.sampled_from(GAPS),
)
def test_staged_transfers_keep_the_laws_of_bytes(
    twins: tuple[Case, Case], far: Any, longest: int, gap: int
) -> None:
    """Batches have any size. Law 8 does not apply, because it is about long runs."""
    system = through_ranges(far, longest, gap if far == "producer" else 0)
    assert [] == laws.broken(system, *twins, of=OF_BYTES)


@pytest.mark.parametrize("gap", [0, 1 << 16])
def test_oracle_finds_a_gap_that_is_written(gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's blocks have other blocks between them, and a write of a gap changes those."""
    sides = [engine(gqa(4), tp=tp, layout=layout) for tp, layout in ((2, "LBNHC"), (1, "LBHNC"))]
    here = world(case(*sides, request(48, [0, 2, 4], [1, 3, 5])))
    monkeypatch.setattr(
        choosing, "ranges_of", lambda *runs, **more: ranges_of(*runs, **more | {"gap": gap})
    )
    with FakeNixl(), moving(here, "WRITE", staging=Staging(always=True)) as both:
        for transfer in both.start_all():
            transfer.wait()
    assert (gap == 0) == (here.differences() == [])
