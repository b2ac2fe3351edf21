"""A table that was promised where cached prefixes end moves the same bytes, with fewer rows."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import attrs
import builders
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspec import RankId, SpecError, allocate, build_table, plan_transfer
from kvspec.testing import Case, strategies
from kvspec.testing.world import selected, world


@given(st.data(), strategies.cases() | strategies.common_cases() | strategies.sharing_cases())
@settings(max_examples=settings.default.max_examples // 2)
def test_the_same_bytes_move(data: st.DataObject, case: Case) -> None:
    """Of any request that keeps the promise, whether or not tiles are whole multiples of it."""
    here, cached = world(case), case.request.cached_tokens
    counts = [*cached.values()] if isinstance(cached, Mapping) else [cached]
    unit = gcd(*counts) or data.draw(st.sampled_from((1, 4, 16, 96)))
    unit = data.draw(st.sampled_from([n for n in range(1, unit + 1) if unit % n == 0]))
    for producer, consumer, table in here.tables():
        caches = here.producers[producer][0], here.consumers[consumer][0]
        promised = build_table(here.plan, *caches, prefix_multiple=unit)
        assert len(promised.consumer_rows) <= len(table.consumer_rows)
        assert np.array_equal(table.descriptors(case.request), promised.descriptors(case.request))
        assert sorted(selected(table, case.request)) == sorted(selected(promised, case.request))
        assert table.counts(case.request) == promised.counts(case.request)


@pytest.mark.parametrize(
    ("prefix_multiple", "rows"),
    [
        (1, 1 + 15 * 2),  # a whole block; the last 1 to 15 tokens of one, of K and of V
        (8, 1 + 15 * 2),  # a block may begin with cached tokens still
        (16, 1),
        (48, 1),
    ],
)
def test_rows_of_parts_of_blocks_are_left_out(prefix_multiple: int, rows: int) -> None:
    """Where a whole block of each side is one run, and prefixes end on blocks, no row is more."""
    spec = builders.gqa(4, block_size=16)
    engines = [builders.engine(spec, tp=2, layout="LBKNHC") for _ in range(2)]
    plan = plan_transfer(*engines)
    caches = [allocate(engine, RankId(), 4)[0] for engine in engines]
    table = build_table(plan, *caches, prefix_multiple=prefix_multiple)
    assert rows == len(table.consumer_rows)


def test_a_broken_promise_is_refused() -> None:
    """By name, before anything is selected; what is cached whole breaks nothing."""
    spec = builders.gqa(2, block_size=16)
    engines = [builders.engine(spec), builders.engine(spec)]
    caches = [allocate(engine, RankId(), 4)[0] for engine in engines]
    table = build_table(plan_transfer(*engines), *caches, prefix_multiple=16)
    request = builders.request(40, [1, 2, 3], [3, 2, 1])
    for cached in (0, 16, 32, 40):
        table.select(attrs.evolve(request, cached_tokens=cached))
    for cached in (1, 15, 33):
        with pytest.raises(SpecError, match=f"cached_tokens={cached}: expected a multiple of"):
            table.select(attrs.evolve(request, cached_tokens=cached))
    for wrong in (0, -16, 1.5, True):
        with pytest.raises(SpecError, match="prefix_multiple="):
            build_table(plan_transfer(*engines), *caches, prefix_multiple=wrong)  # type: ignore[arg-type]
