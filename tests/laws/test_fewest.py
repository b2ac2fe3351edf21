"""Tests that requests are counted as if their descriptors were listed."""

from __future__ import annotations

import re
from typing import Any

import attrs
import builders
import numpy as np
import pytest
import special_cases
from hypothesis import given, settings

import kvspec
from kvspec.analysis import counts
from kvspec.analysis.fewest import descriptor_counts
from kvspec.descriptors.selection import NumberedRows
from kvspec.descriptors.tiles import Tiles
from kvspec.testing import strategies
from kvspec.testing.world import world

QUARTER = settings(max_examples=max(8, settings.default.max_examples // 4))


@QUARTER
@given(strategies.cases() | strategies.sharing_cases() | special_cases.spanning_cases())
def test_counts_are_those_of_the_listed_descriptors(case: strategies.Case) -> None:
    """Blocks are adjacent, scattered, cut by kernels and shared by groups."""
    here = world(case, blank=True)
    for _, _, table in here.tables():
        listed = table.descriptors(case.request)
        assert len(listed) == descriptor_counts(table, case.request)[1]
        text = kvspec.explain(table, request=case.request)
        found = re.search(r": ([\d,]+) bytes in ([\d,]+) descriptors", text)
        assert found is not None
        moved, ids = found.groups()
        assert int(listed[:, 2].sum()) == int(moved.replace(",", ""))
        assert len(table.select(case.request)) == int(ids.replace(",", ""))


@QUARTER
@given(strategies.cases())
def test_traffic_is_that_of_listed_descriptors(case: strategies.Case) -> None:
    """`traffic` counts a request whose blocks are not adjacent."""
    plan, tokens = world(case, blank=True).plan, case.request.num_tokens
    counter = counts._DescriptorCounter(plan, tokens)
    for pair, amount in kvspec.traffic(plan, tokens).pairs.items():
        caches = [
            kvspec.plan_memory(engine, rank, pool)
            for engine, rank, pool in zip(
                (plan.producer, plan.consumer), pair, counter.pools, strict=True
            )
        ]
        table = kvspec.build_table(plan, *caches)
        assert len(table.descriptors(counter.request)) == amount.descriptors


@pytest.mark.parametrize(
    ("layout", "page_format"),
    [("LKBNHC", "plain"), ("BLHNC", "plain"), ("LBKHNC", "keys-transposed")],
)
def test_a_long_request_is_counted_without_listing_its_descriptors(
    layout: str, page_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer's tokens are outermost, so that each token or element is a descriptor."""
    spec, tokens = builders.gqa(8, head_size=128), 16_000
    sides = [
        builders.engine(each, layers=["l.0", "l.1"], tp=tp, layout=letters)
        for each, tp, letters in (
            (spec, 8, "LKBNHC"),
            (attrs.evolve(spec, page_format=page_format), 4, layout),
        )
    ]
    plan, blocks = kvspec.plan_transfer(*sides), np.arange(tokens // 16)
    caches = [
        kvspec.plan_memory(each, each.parallel.ranks[0], len(blocks), at << 40)
        for at, each in enumerate(sides, 1)
    ]
    table = kvspec.build_table(plan, *caches)
    request = builders.request(tokens - 3, blocks[::-1], np.roll(blocks, 5))
    listed, right = list[int](), NumberedRows.addresses

    def record(numbered: NumberedRows, tiles: Tiles) -> Any:
        listed.append(len(numbered.rows) * len(tiles))
        return right(numbered, tiles)

    monkeypatch.setattr(NumberedRows, "addresses", record)
    traffic = kvspec.traffic(plan, tokens)
    text = kvspec.explain(table, request=request)
    left = table.unwritten_ranges(request)
    assert traffic.total.descriptors > 8 * len(blocks)
    assert f"{(tokens - 3) * 2 * 2 * 256:,} bytes" in text
    assert 3 * 2 * 2 * 256 == left[:, 1].sum()
    assert (
        0
        < 20 * sum(listed)
        < sum(len(numbered.rows) * len(t) for numbered, t in table.tiles(request))
    )
