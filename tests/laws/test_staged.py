"""What goes through the area is what would go directly: the same bytes, by the same oracle."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from nixl_world import moving

from kvspec.nixl import Costs, Staging
from kvspec.testing import Case, strategies
from kvspec.testing.fake_nixl import FakeNixl
from kvspec.testing.world import world

OPERATIONS = st.sampled_from(["READ", "WRITE"])


@st.composite
def stagings(draw: st.DrawFn) -> Staging:
    """Draw areas of one piece to many, and gaps that are read from none to all."""
    area = draw(st.sampled_from([4096, 1 << 14, 1 << 20]))
    piece = draw(st.sampled_from([1 << 20, 4096, 1024, 256]))
    costs = Costs(descriptor=draw(st.sampled_from([0.0, 3e-9, 3e-8, 3e-6])))
    return Staging(area=area, piece=piece, costs=costs, always=True)


@given(strategies.cases() | strategies.sharing_cases(), stagings(), OPERATIONS, st.booleans())
def test_staged_bytes_are_right(case: Case, staging: Staging, operation: Any, plain: bool) -> None:
    """Law 1 over what is pulled and pushed through the area, by selections and by plain ids."""
    here = world(case)
    with FakeNixl(), moving(here, operation, staging=staging, telemetry=True) as both:
        for transfer in both.start_all(plain=plain):
            transfer.wait()
            assert (
                not transfer.descriptors or transfer.staged or _longest(transfer) > staging.longest
            )
            assert transfer.posted == transfer.runs
    assert [] == here.differences()


def _longest(transfer: Any) -> int:
    rows = transfer.order.local.rows
    return int(rows.length[rows.row_of(transfer.order.pairs.local_ids)].max())
