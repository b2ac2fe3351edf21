"""Move the request of a case in every possible way. The oracle compares the bytes."""

from __future__ import annotations

import kvspec
from kvspec.testing import Case
from kvspec.testing.world import described, selected, world


def check_every_way(case: Case) -> None:
    """Check the bytes moved by ids, and by descriptors, and `verify`."""
    here = world(case)
    producers, consumers = (
        {rank: cache for rank, (cache, _) in side.items()}
        for side in (here.producers, here.consumers)
    )
    assert None is kvspec.verify(here.plan, producers, consumers, case.request)
    for rows in (selected, described):
        here.restore()
        here.execute(rows)
        assert [] == here.differences()
