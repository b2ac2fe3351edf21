"""What else is true of whole transfers: the reference, stripes, drafts, counts, and no memory."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import attrs
import builders
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings

import kvspec
from kvspec.testing import laws, strategies
from kvspec.testing.carve import block_split, logical_views
from kvspec.testing.laws import KVSPEC
from kvspec.testing.positions import context_of, excluded_layers
from kvspec.testing.world import described, inside, selected, world

CASES = strategies.cases()
STRIPED = ("full", "sliding window", "MLA", "uniform")


def half_cached(cached: int, **fields: int) -> strategies.Case:
    """Return a sliding window that ends a block of eight tokens whose beginning is cached."""
    spec = kvspec.SlidingWindowSpec(
        block_size=8, total_num_kv_heads=1, head_size=1, dtype="uint8", **fields
    )
    side = builders.engine(spec)
    return builders.case(side, side, builders.request(8, [0], [1], cached_tokens=cached))


TORN_ROW = half_cached(4, sliding_window=2, tokens_per_state=4)
"""The window begins inside a row of four tokens, none of which is cached."""
TORN_PIECE = half_cached(1, sliding_window=4)
"""The window [5, 8) is the end of one piece [4, 8) that may be written whole."""


@pytest.mark.parametrize("case", [TORN_ROW, TORN_PIECE])
def test_what_is_torn_keeps_every_law(case: strategies.Case) -> None:
    """Found once by search: kept for good."""
    assert [] == laws.broken(KVSPEC, case, case)


@given(CASES)
@example(TORN_ROW)
@settings(max_examples=settings.default.max_examples // 2)
def test_exact_cover_by_the_reference(case: strategies.Case) -> None:
    """Law 1: so does the reference, which copies by torch."""
    pytest.importorskip("torch")
    from kvspec import reference  # noqa: PLC0415 - torch

    here = world(case)
    reference.copy(here.plan, here.producers, here.consumers, case.request)
    assert [] == here.differences()


@given(strategies.cases(STRIPED))
@settings(max_examples=2 * settings.default.max_examples)
def test_each_edge_moves_its_own(case: strategies.Case) -> None:
    """Law 6: a pair of ranks exchanges its slices' units of its stripes' virtual blocks alone."""
    case = attrs.evolve(case, replicas="stripe")
    here = world(case)
    for p, c, table in here.tables():
        own: Any = {name: np.zeros(flat.size, bool) for name, flat in here.before[c].items()}
        views = logical_views(case.consumer, c, own, case.consumer_pool)
        for edge in here.plan.between(p, c):
            group = case.consumer.group(edge.group)
            held, split = case.request.consumer_blocks[edge.group], block_split(group)
            virtual = group.spec.block_size * context_of(case.consumer, c, group)[1]
            number = np.arange(len(held.block_ids)) + held.first_token // virtual
            for each, layer in product(edge.slices, edge.layers):
                blocks = held.block_ids[each.stripe.holds(number)]
                blocks = (blocks[:, None] * split + np.arange(split)).ravel()
                for part in each.parts if layer in each.layers else ():
                    units = slice(each.local_range.start, each.local_range.stop)
                    views[edge.group, layer, part][blocks, units] = True
        for _, place, length in selected(table, case.request):
            name, offset = inside(here.consumers[c][1], place, length)
            assert own[name][offset : offset + length].all()


@given(CASES | strategies.sharing_cases())
def test_a_cache_on_paper(case: strategies.Case) -> None:
    """`lay_out` has the regions of `allocate`, each as far into its memory, and no bytes."""
    for side, pool in (
        (case.producer, case.producer_pool),
        (case.consumer, case.consumer_pool),
    ):
        for rank in side.parallel.ranks:
            cache, _ = kvspec.allocate(side, rank, pool, shared=case.shared)
            paper = kvspec.lay_out(side, rank, pool, 4096, shared=case.shared)
            assert [m.length for m in cache.memory] == [m.length for m in paper.memory]
            assert 4096 == paper.memory[0].address if paper.memory else True
            ends = [m.address + m.length for m in paper.memory]
            assert ends[:-1] == [m.address for m in paper.memory[1:]]
            moved = {m.address: n.address for m, n in zip(cache.memory, paper.memory, strict=True)}
            wanted = []
            for region in cache.regions:
                home = max(at for at in moved if at <= region.base)
                wanted.append(attrs.evolve(region, base=region.base - home + moved[home]))
            assert wanted == list(paper.regions)


def test_a_draft_is_not_moved() -> None:
    """A consumer's excluded layer of the same group keeps every byte of the request's blocks."""
    spec = builders.mla(block_size=2, head_size=3, dtype="uint8")
    sides = (
        builders.engine(builders.group(spec, *layers, excluded=excluded))
        for layers, excluded in ((("a",), ()), (("draft", "a"), ("draft",)))
    )
    here = world(builders.case(*sides, builders.request(3, [0, 1], [1, 0])))
    here.execute(described)
    (_, after), (before,) = here.consumers[kvspec.RankId()], here.before.values()
    assert before["g"][:12].tolist() == after["g"][:12].tolist()
    assert not (before["g"][12:] == after["g"][12:])[:6].any()
    assert [] == here.differences()


@settings(max_examples=settings.default.max_examples // 2)
@given(CASES)
def test_excluded_layers_are_in_no_edge(case: strategies.Case) -> None:
    """Each layer that both sides have and neither excludes is in an edge, and no other is."""
    here = world(case)
    ours, theirs = (
        {layer for group in engine.groups for layer in group.layers} - excluded_layers(engine)
        for engine in (case.producer, case.consumer)
    )
    assert ours & theirs == {layer for edge in here.plan.edges for layer in edge.layers}


def test_few_descriptors_are_posted() -> None:
    """Over all cases, `select` posts at most 1.15 of the fewest copies; never fewer than those."""
    posted, fewest = Counter[str](), Counter[str]()

    @settings(phases=[Phase.generate])
    @given(CASES)
    def count(case: strategies.Case) -> None:
        for _, _, table in world(case).tables():
            got, least = table.counts(case.request)
            assert least == len(table.descriptors(case.request)) <= got
            posted["all"] += got
            fewest["all"] += least

    count()
    assert 0 < fewest["all"]
    assert posted["all"] <= 1.15 * fewest["all"]
