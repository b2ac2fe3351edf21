"""Tests that tables with a larger `prefix_multiple` move the same bytes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import gcd
from typing import Any

import attrs
import builders
import numpy as np
import pytest
import special_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspec import RankId, allocate, build_table, plan_transfer
from kvspec.testing import Case, strategies
from kvspec.testing.world import selected, world
from tests.support.refused import refusal

pytestmark = pytest.mark.uncovered


@given(st.data(), strategies.cases() | special_cases.common_cases() | strategies.sharing_cases())
@settings(max_examples=settings.default.max_examples // 2)
def test_table_with_prefix_multiple_moves_the_same_bytes(data: st.DataObject, case: Case) -> None:
    """The cached prefixes of the request are multiples of it. Tiles need not be."""
    here, cached = world(case), case.request.cached_tokens
    counts = [*cached.values()] if isinstance(cached, Mapping) else [cached]
    unit = gcd(*counts) or data.draw(st.sampled_from((1, 4, 16, 96)))
    unit = data.draw(st.sampled_from([n for n in range(1, unit + 1) if unit % n == 0]))
    for producer, consumer, table in here.tables():
        caches = here.producers[producer][0], here.consumers[consumer][0]
        smaller = build_table(here.plan, *caches, prefix_multiple=unit)
        assert np.array_equal(table.descriptors(case.request), smaller.descriptors(case.request))
        assert sorted(selected(table, case.request)) == sorted(selected(smaller, case.request))
        assert table.counts(case.request) == smaller.counts(case.request)


def test_select_rejects_prefixes_that_are_no_multiple() -> None:
    """A request that is cached as a whole may have any length."""
    spec = builders.gqa(2, block_size=16)
    engines = [builders.engine(spec), builders.engine(spec)]
    caches = [allocate(engine, RankId(), 4)[0] for engine in engines]
    table = build_table(plan_transfer(*engines), *caches, prefix_multiple=16)
    request = builders.request(40, [1, 2, 3], [3, 2, 1])
    for cached in (0, 16, 32, 40):
        table.select(attrs.evolve(request, cached_tokens=cached))
    for cached in (1, 15, 33):
        changed = attrs.evolve(request, cached_tokens=cached)
        error = refusal(functools.partial(table.select, changed))
        assert ("cached_tokens", cached) == (error.field, error.value)
    for wrong in (0, -16, 1.5, True):
        build: Any = functools.partial(build_table, plan_transfer(*engines), *caches)
        error = refusal(functools.partial(build, prefix_multiple=wrong))
        assert ("prefix_multiple", wrong) == (error.field, error.value)
