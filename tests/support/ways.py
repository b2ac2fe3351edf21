"""Move the request of a case in every possible way. The oracle compares the bytes."""

from __future__ import annotations

import pytest

import kvspec
from kvspec.testing import Case
from kvspec.testing.world import described, selected, world


def check_every_way(case: Case) -> None:
    """Check the bytes moved by ids, by descriptors and by the reference, and `verify`."""
    pytest.importorskip("torch")
    from kvspec.check import reference  # noqa: PLC0415 - torch

    here = world(case)
    producers, consumers = (
        {rank: cache for rank, (cache, _) in side.items()}
        for side in (here.producers, here.consumers)
    )
    assert None is kvspec.verify(here.plan, producers, consumers, case.request)
    for move in (
        lambda: here.execute(selected),
        lambda: here.execute(described),
        lambda: reference.copy(here.plan, here.producers, here.consumers, case.request),
    ):
        here.restore()
        move()
        assert [] == here.differences()
