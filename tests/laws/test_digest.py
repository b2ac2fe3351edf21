"""Digests of equal contents are equal, however they lie; of others they differ, and say where."""

from __future__ import annotations

from typing import Any

import attrs
import builders
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspec import BlockTable, RankCache, SpecError
from kvspec.digest import Wanted, differing, digest, first_difference, wanted
from kvspec.session.extents import extents_of, sums_of
from kvspec.testing import Case, strategies
from kvspec.testing.carve import logical_views
from kvspec.testing.positions import rows_of
from kvspec.testing.world import World, described, world


def sides(here: World, asked: Any) -> tuple[list[Any], list[Any]]:
    """Return the digests of all producer ranks and of all consumer ranks."""
    request = here.case.request
    return tuple(  # type: ignore[return-value]
        [digest(cache, tables, asked) for cache, _ in ranks.values()]
        for ranks, tables in (
            (here.producers, request.producer_blocks),
            (here.consumers, request.consumer_blocks),
        )
    )


@given(strategies.cases() | strategies.common_cases() | strategies.sharing_cases())
def test_what_arrived_has_the_digest_of_what_was_sent(case: Case) -> None:
    """Of any two engines; and before anything arrived, of every unit that has to, another."""
    here = world(case)
    asked = wanted(here.plan, case.request)
    moves = {(*key, unit) for sums in sides(here, asked)[1] for *key, unit, _ in sums}
    assert sorted(moves) == sorted(differing(*sides(here, asked)))
    here.execute(described)
    assert [] == differing(*sides(here, asked))


@given(st.data(), strategies.cases())
@settings(max_examples=settings.default.max_examples // 2)
def test_one_wrong_byte_is_found_where_it_lies(data: st.DataObject, case: Case) -> None:
    """By layer, part and unit; and its token by asking for half of them again and again."""
    here = world(case)
    here.execute(described)
    places = []
    for rank, (_, storage) in here.consumers.items():
        views = logical_views(case.consumer, rank, storage, case.consumer_pool)
        tables = case.request.consumer_blocks
        for rows in rows_of(case.consumer, rank, tables, case.request, source=case.producer):
            places += [(views[rows.key], rows, at) for at in rows.live.nonzero()[0] if rows.units]
    if not places:
        return
    view, rows, at = data.draw(st.sampled_from(places))
    unit = data.draw(st.integers(0, len(rows.units) - 1))
    byte = data.draw(st.integers(0, rows.part.content_bytes - 1))
    view[rows.block[at], unit, rows.row[at], byte] ^= data.draw(st.integers(1, 255))
    _, layer, part = rows.key
    asked = wanted(here.plan, case.request)
    assert [(layer, part, rows.units[unit])] == differing(*sides(here, asked))
    if rows.part.per_token:
        grain = rows.part.tokens_per_state

        def equal(tokens: range) -> bool:
            some = {(layer, part): Wanted(tokens)}
            return not differing(*sides(here, some))

        first = first_difference(equal, asked[layer, part].tokens)
        assert first is not None
        assert int(rows.token[at]) == first // grain * grain


def equal(here: World, source: Any, consumer: Any, extent: Any) -> bool:
    """Return whether a consumer rank and one of its sources have the same sum of an extent."""
    request = here.case.request
    own, other = (
        sum(sums_of(cache, tables, extent)) % 2**64
        for cache, tables in (
            (here.consumers[consumer][0], request.consumer_blocks),
            (here.producers[source][0], request.producer_blocks),
        )
    )
    return own == other


def unequal(here: World, consumer: Any) -> list[tuple[Any, Any]]:
    """Return of which sources and extents a consumer rank's sums differ."""
    return [
        (source, extent)
        for source in here.plan.sources(consumer)
        for extent in extents_of(here.plan, here.case.request, source, consumer)
        if not equal(here, source, consumer, extent)
    ]


@given(st.data(), strategies.cases() | strategies.common_cases() | strategies.sharing_cases())
@settings(max_examples=settings.default.max_examples // 2)
def test_pairs_of_ranks_find_it_by_halves(data: st.DataObject, case: Case) -> None:
    """Each source's extents are equal when all has arrived; one wrong byte is found by halves."""
    here = world(case)
    here.execute(described)
    for rank in here.consumers:
        assert [] == unequal(here, rank)
    places = []
    for rank, (_, storage) in here.consumers.items():
        views = logical_views(case.consumer, rank, storage, case.consumer_pool)
        tables = case.request.consumer_blocks
        for rows in rows_of(case.consumer, rank, tables, case.request, source=case.producer):
            places += [
                (rank, views[rows.key], rows, at) for at in rows.live.nonzero()[0] if rows.units
            ]
    if not places:
        return
    rank, view, rows, at = data.draw(st.sampled_from(places))
    unit = data.draw(st.integers(0, len(rows.units) - 1))
    view[rows.block[at], unit, rows.row[at], 0] ^= 1
    ((source, extent),) = unequal(here, rank)
    while extent.halves is not None:
        extent = next(half for half in extent.halves if not equal(here, source, rank, half))
    _, layer, part = rows.key
    asked = (layer,), (part,), range(rows.units[unit], rows.units[unit] + 1)
    assert asked == (extent.layers, extent.parts, extent.units)
    if not rows.part.per_token:
        assert int(rows.row[at]) == extent.rows.start
    else:
        grain = rows.part.tokens_per_state
        assert int(rows.token[at]) == extent.tokens.start // grain * grain


def test_content_that_changes_places_differs() -> None:
    """Two tokens, heads or layers that swapped their contents: the sum names who held what."""
    spec = builders.gqa(2, block_size=4, head_size=8, dtype="uint8")
    engines = [builders.engine(spec, layers=("l.0", "l.1")) for _ in range(2)]
    case = builders.case(*engines, builders.request(4, [1], [2]))
    here = world(case)
    here.execute(described)
    ((rank, (_, storage)),) = here.consumers.items()
    views = logical_views(case.consumer, rank, storage, case.consumer_pool)
    asked = wanted(here.plan, case.request)
    for layer, swapped in (
        ("l.0", np.s_[2, :, [1, 0]]),
        ("l.1", np.s_[2, [1, 0]]),
    ):
        view = next(view for key, view in views.items() if key[1:] == (layer, "k"))
        right = np.s_[2, :, [0, 1]] if layer == "l.0" else np.s_[2, [0, 1]]
        view[right] = view[swapped].copy()
    found = differing(*sides(here, asked))
    assert {("l.0", "k", 0), ("l.0", "k", 1), ("l.1", "k", 0), ("l.1", "k", 1)} == set(found)


def test_replicas_that_differ_are_named() -> None:
    """One of two ranks that hold the same head was overwritten."""
    spec = builders.gqa(1, block_size=4, head_size=8, dtype="uint8")
    engines = [builders.engine(spec, tp=tp) for tp in (1, 2)]
    here = world(builders.case(*engines, builders.request(4, [1], [2])))
    here.execute(described)
    asked = wanted(here.plan, here.case.request)
    assert [] == differing(*sides(here, asked))
    rank = max(here.consumers)
    views = logical_views(
        here.case.consumer, rank, here.consumers[rank][1], here.case.consumer_pool
    )
    next(iter(views.values()))[2, 0, 3, 0] ^= 1
    assert 1 == len(differing(*sides(here, asked)))


def asked_of(cache: RankCache) -> dict[tuple[str, str], Wanted]:
    """Return four tokens of every layer."""
    return {(each.layer, each.part): Wanted(range(4)) for each in cache.regions}


def test_wrong_questions_are_refused() -> None:
    """A group without a table, tokens and blocks that are not there, memory of a device."""
    spec = builders.gqa(1, block_size=4, head_size=8, dtype="uint8")
    engine = builders.engine(spec)
    here = world(builders.case(engine, engine, builders.request(4, [1], [2])))
    ((cache, _),) = here.producers.values()
    (group,) = (each.name for each in engine.groups)
    asked = asked_of(cache)
    with pytest.raises(SpecError, match=f"a block table for group '{group}'"):
        digest(cache, {}, asked)
    with pytest.raises(SpecError, match=r"blocks for tokens 0\.\.3"):
        digest(cache, {group: BlockTable([])}, asked)
    with pytest.raises(SpecError, match="ids of a pool of"):
        digest(cache, {group: BlockTable([99])}, asked)
    regions = tuple(attrs.evolve(each, memory_type="VRAM") for each in cache.regions)
    memory = tuple(attrs.evolve(each, memory_type="VRAM") for each in cache.memory)
    with pytest.raises(SpecError, match="DRAM: copy the blocks"):
        digest(attrs.evolve(cache, regions=regions, memory=memory), {}, asked)
    for wrong in (None, 7, "l.0", [7], ["l.0"], [{"l.0": 1}], {"l.0": 1}):
        with pytest.raises(SpecError, match="producers="):
            differing(wrong, [])  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="consumers="):
            differing([], wrong)  # type: ignore[arg-type]
    assert first_difference(lambda _: True, range(9)) is None
    assert first_difference(lambda _: False, range(0)) is None
