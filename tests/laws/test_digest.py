"""Tests that digests are equal for equal contents, and that unequal digests name the place."""

from __future__ import annotations

import functools
import math
from itertools import product
from typing import Any

import attrs
import builders
import numpy as np
import numpy.typing as npt
import pytest
import special_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspec import BlockTable, RankCache, RankId, allocate
from kvspec.check.differences import differing, differing_rows, row_digests
from kvspec.digests import digest, wanted
from kvspec.digests.ranks import Wanted
from kvspec.session.checksums import advance, computation_of, contents_of
from kvspec.testing import Case, strategies
from kvspec.testing.carve import logical_views
from kvspec.testing.positions import rows_of
from kvspec.testing.world import World, described, world
from tests.support.refused import refusal

SIGNS = {
    "float64": 1 << 63,
    "float32, or every odd bfloat16": 1 << 63 | 1 << 31,
    "every even bfloat16": 1 << 47 | 1 << 15,
    "bfloat16": 0x8000_8000_8000_8000,
    "float8": 0x8080_8080_8080_8080,
    "the fold": 1 << 63 | 1 << 16,
}
"""Masks that negate the elements of one 8-byte word of a content.

The last mask belongs to no type. The fold turns it into bit 63, where equal changes cancel.
"""
MASKS = st.sampled_from([*SIGNS.values()]) | st.integers(1, 2**64 - 1)


def masked(size: int, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """Return the bytes of *words*, cut to *size* bytes."""
    return words.astype("<u8").view(np.uint8)[:size]


@st.composite
def changes(draw: st.DrawFn, size: int) -> npt.NDArray[np.uint8]:
    """Draw bytes to XOR to a content of *size* bytes: one byte, or one mask in several words."""
    words = np.zeros(-(-size // 8), np.uint64)
    kinds = ["one byte", "two words", "every word"] if size >= 16 else ["one byte"]
    kind = draw(st.sampled_from(kinds))
    if kind == "one byte":
        change = np.zeros(size, np.uint8)
        change[draw(st.integers(0, size - 1))] = draw(st.integers(1, 255))
        return change
    if kind == "two words":
        places = st.integers(0, size // 8 - 1)
        words[draw(st.lists(places, min_size=2, max_size=2, unique=True))] = draw(MASKS)
    else:
        words[:] = draw(MASKS)
    return masked(size, words)


def sides(here: World, selection: Any) -> tuple[list[Any], list[Any]]:
    """Return the digests of all producer ranks and of all consumer ranks."""
    request = here.case.request
    return tuple(  # type: ignore[return-value]
        [digest(cache, tables, selection) for cache, _ in ranks.values()]
        for ranks, tables in (
            (here.producers, request.producer_blocks),
            (here.consumers, request.consumer_blocks),
        )
    )


@given(strategies.cases() | special_cases.common_cases() | strategies.sharing_cases())
def test_digests_of_both_sides_are_equal_only_after_the_transfer(case: Case) -> None:
    """Before the transfer, the digests of all units that move differ."""
    here = world(case)
    selection = wanted(here.plan, case.request)
    moves = {(*key, unit) for sums in sides(here, selection)[1] for *key, unit, _ in sums}
    assert sorted(moves) == sorted(differing(*sides(here, selection)))
    here.execute(described)
    assert [] == differing(*sides(here, selection))


@given(st.data(), strategies.cases())
@settings(max_examples=settings.default.max_examples // 2)
def test_digest_of_changed_content_names_its_place(data: st.DataObject, case: Case) -> None:
    """The digest names layer, part and unit. The digests of rows name the row."""
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
    view[rows.block[at], unit, rows.row[at]] ^= data.draw(changes(rows.part.content_bytes))
    _, layer, part = rows.key
    selection = wanted(here.plan, case.request)
    assert [(layer, part, rows.units[unit])] == differing(*sides(here, selection))
    only = {(layer, part): selection[layer, part]}
    sent, received = (
        [row_digests(cache, tables, only) for cache, _ in ranks.values()]
        for ranks, tables in (
            (here.producers, case.request.producer_blocks),
            (here.consumers, case.request.consumer_blocks),
        )
    )
    row = (
        int(rows.token[at]) // rows.part.tokens_per_state * rows.part.tokens_per_state
        if (rows.part.per_token)
        else int(rows.row[at])
    )
    assert [(layer, part, rows.units[unit], row)] == differing_rows(sent, received)


def equal(here: World, source: Any, consumer: Any, contents: Any) -> bool:
    """Return whether a consumer rank and one of its sources have the same sum of an contents."""
    request = here.case.request
    own, other = (
        advance(computation_of(cache, tables, contents), math.inf)
        for cache, tables in (
            (here.consumers[consumer][0], request.consumer_blocks),
            (here.producers[source][0], request.producer_blocks),
        )
    )
    return own == other


def unequal(here: World, consumer: Any) -> list[tuple[Any, Any]]:
    """Return the sources and extents of which a consumer rank's sums differ."""
    return [
        (source, contents)
        for source in here.plan.sources(consumer)
        for contents in contents_of(here.plan, here.case.request, source, consumer)
        if not equal(here, source, consumer, contents)
    ]


@given(st.data(), strategies.cases() | special_cases.common_cases() | strategies.sharing_cases())
@settings(max_examples=settings.default.max_examples // 2)
def test_extents_of_changed_content_differ_for_one_source_and_layer(
    data: st.DataObject, case: Case
) -> None:
    """The sums of a consumer and each source are equal, until a byte changes."""
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
    view[rows.block[at], unit, rows.row[at]] ^= data.draw(changes(rows.part.content_bytes))
    ((_, contents),) = unequal(here, rank)
    _, layer, part = rows.key
    assert layer == contents.layer
    assert part in contents.parts
    assert rows.units[unit] in contents.units


def digest_of(words: npt.NDArray[np.uint64]) -> int:
    """Return the digest of one token of one head that contains *words*."""
    spec = builders.gqa(1, block_size=1, head_size=8 * len(words), dtype="uint8")
    engine = builders.engine(spec)
    cache, storage = allocate(engine, RankId(), 2)
    for view in logical_views(engine, RankId(), storage, 2).values():
        view[1, 0, 0] = masked(8 * len(words), words)
    (total,) = digest(cache, {"g": BlockTable([1])}, {("l", "k"): Wanted(range(1))}).values()
    return total


def contents(count: int) -> tuple[npt.NDArray[np.uint64], ...]:
    """Return contents of *count* words: all zero, all equal, and random."""
    drawn = np.random.default_rng(count).integers(0, 2**64, count, np.uint64)
    return np.zeros(count, np.uint64), np.full(count, 0x3F80_3F80_3F80_3F80, np.uint64), drawn


@pytest.mark.parametrize("count", [2, 3, 4, 32, 72])
@pytest.mark.parametrize("mask", SIGNS.values(), ids=SIGNS)
def test_digest_of_flipped_signs_differs(mask: int, count: int) -> None:
    """Equal flips of two words, or of all words, must not cancel in the sum of a content."""
    for words in contents(count):
        before = digest_of(words)
        assert before != digest_of(words ^ np.uint64(mask))
        for places in ([0, 1], [0, count - 1], [count - 2, count - 1]):
            changed = words.copy()
            changed[places] ^= np.uint64(mask)
            assert before != digest_of(changed)


def test_digest_of_one_flipped_bit_differs_in_every_word() -> None:
    """The mix of each place loses no bit of its word, the highest bit included."""
    words = contents(64)[-1]
    before = digest_of(words)
    for place, bit in product(range(64), (0, 15, 31, 32, 47, 63)):
        changed = words.copy()
        changed[place] ^= np.uint64(1 << bit)
        assert before != digest_of(changed)


@given(st.data(), st.integers(2, 12))
def test_digest_of_two_changed_words_differs(data: st.DataObject, count: int) -> None:
    """Equal changes of two words, opposite changes and swapped words must not cancel."""
    word = st.integers(0, 2**64 - 1)
    words = np.array(data.draw(st.lists(word, min_size=count, max_size=count)), np.uint64)
    places = st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True)
    first, second = data.draw(places)
    kind, mask = data.draw(st.sampled_from(["flip", "move", "swap"])), np.uint64(data.draw(MASKS))
    changed = words.copy()
    if kind == "flip":
        changed[[first, second]] ^= mask
    elif kind == "move":
        changed[[first]] += mask
        changed[[second]] -= mask
    else:
        changed[[first, second]] = words[[second, first]]
    assert (digest_of(words) == digest_of(changed)) == np.array_equal(words, changed)


def test_digest_of_kept_content_is_unchanged() -> None:
    """Engines compare digests, so another value needs another `VERSION` of the wire format."""
    kept = [np.full(3, 0x3F80_3F80_3F80_3F80, np.uint64), np.arange(40, dtype=np.uint64)]
    assert [8513109158507671472, 16710176579636292432] == [digest_of(words) for words in kept]


def test_digest_of_swapped_contents_differs() -> None:
    """Two tokens, heads or layers exchange their contents. The digest depends on the place."""
    spec = builders.gqa(2, block_size=4, head_size=8, dtype="uint8")
    engines = [builders.engine(spec, layers=("l.0", "l.1")) for _ in range(2)]
    case = builders.case(*engines, builders.request(4, [1], [2]))
    here = world(case)
    here.execute(described)
    ((rank, (_, storage)),) = here.consumers.items()
    views = logical_views(case.consumer, rank, storage, case.consumer_pool)
    selection = wanted(here.plan, case.request)
    for layer, swapped in (
        ("l.0", np.s_[2, :, [1, 0]]),
        ("l.1", np.s_[2, [1, 0]]),
    ):
        view = next(view for key, view in views.items() if key[1:] == (layer, "k"))
        right = np.s_[2, :, [0, 1]] if layer == "l.0" else np.s_[2, [0, 1]]
        view[right] = view[swapped].copy()
    places = differing(*sides(here, selection))
    assert {("l.0", "k", 0), ("l.0", "k", 1), ("l.1", "k", 0), ("l.1", "k", 1)} == set(places)


def test_differing_names_a_head_whose_replicas_differ() -> None:
    """Two ranks hold the same head, and the test changes the head of one rank."""
    spec = builders.gqa(1, block_size=4, head_size=8, dtype="uint8")
    engines = [builders.engine(spec, tp=tp) for tp in (1, 2)]
    here = world(builders.case(*engines, builders.request(4, [1], [2])))
    here.execute(described)
    selection = wanted(here.plan, here.case.request)
    assert [] == differing(*sides(here, selection))
    rank = max(here.consumers)
    views = logical_views(
        here.case.consumer, rank, here.consumers[rank][1], here.case.consumer_pool
    )
    next(iter(views.values()))[2, 0, 3, 0] ^= 1
    assert 1 == len(differing(*sides(here, selection)))


HOME = "l", "k", 0


def test_differing_names_replicas_of_many_contexts() -> None:
    """The work is linear in the contexts: 2**64 combinations of replicas would never end."""
    ranks = [{(*HOME, context): total for context in range(64)} for total in (1, 2)]
    assert [HOME] == differing(ranks, ranks)
    assert [HOME] == differing(ranks, ranks[:1])
    assert [HOME] == differing(ranks[1:], ranks)
    assert [] == differing(ranks[:1], ranks[:1])


SUMS = st.dictionaries(
    st.tuples(st.sampled_from("lm"), st.just("k"), st.integers(0, 1), st.integers(0, 2)),
    st.sampled_from([0, 1, 2, 2**63, 2**64 - 1]),
)


def combinations(ranks: list[dict[Any, int]], home: Any) -> set[int]:
    """Return each total of *home* over all contexts that some choice of replicas adds up to."""
    contexts: dict[int, set[int]] = {}
    for sums in ranks:
        for (*own, context), total in sums.items():
            if tuple(own) == home:
                contexts.setdefault(context, set()).add(total)
    return {sum(totals) % 2**64 for totals in product(*contexts.values())} if contexts else set()


@given(st.lists(SUMS, max_size=4), st.lists(SUMS, max_size=4))
def test_differing_names_homes_without_one_common_total(
    producers: list[dict[Any, int]], consumers: list[dict[Any, int]]
) -> None:
    """A layer, part and unit is equal only if all choices of replicas have one total."""
    homes = {key[:3] for sums in (*producers, *consumers) for key in sums}
    wrong = [
        home
        for home in sorted(homes)
        if combinations(producers, home) != combinations(consumers, home)
        or len(combinations(producers, home)) > 1
    ]
    assert wrong == differing(producers, consumers)


def selection_of(cache: RankCache) -> dict[tuple[str, str], Wanted]:
    """Return a request for the digests of four tokens of every layer."""
    return {(each.layer, each.part): Wanted(range(4)) for each in cache.regions}


def test_digest_and_differing_reject_invalid_arguments() -> None:
    """A table is missing or lacks blocks, the memory is on a device, or the sums are malformed."""
    spec = builders.gqa(1, block_size=4, head_size=8, dtype="uint8")
    engine = builders.engine(spec)
    here = world(builders.case(engine, engine, builders.request(4, [1], [2])))
    ((cache, _),) = here.producers.values()
    (group,) = (each.name for each in engine.groups)
    selection = selection_of(cache)
    tables: list[dict[str, BlockTable]] = [
        {}, {group: BlockTable([])}, {group: BlockTable([99])}
    ]  # fmt: skip
    for table in tables:
        assert refusal(functools.partial(digest, cache, table, selection)).field.startswith(
            "tables"
        )
    regions = tuple(attrs.evolve(each, memory_type="VRAM") for each in cache.regions)
    memory = tuple(attrs.evolve(each, memory_type="VRAM") for each in cache.memory)
    on_device = attrs.evolve(cache, regions=regions, memory=memory)
    assert "DRAM" in str(refusal(lambda: digest(on_device, {}, selection)))
    for wrong in (None, 7, "l.0", [7], ["l.0"], [{"l.0": 1}], {"l.0": 1}):
        sums: Any = wrong
        assert refusal(functools.partial(differing, sums, [])).field.startswith("producers")
        assert refusal(functools.partial(differing, [], sums)).field.startswith("consumers")
