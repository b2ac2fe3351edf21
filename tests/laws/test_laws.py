"""Tests that kvspec keeps every law, and that each law finds the faults that break it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import special_cases
from builders import case, engine, gqa, request
from hypothesis import given, settings

import kvspec
from kvspec import RankId
from kvspec.testing import Case, laws, strategies
from kvspec.testing.laws import KVSPEC, LAWS, System
from kvspec.testing.world import ByteCopy, PreparedLists, World

pytestmark = pytest.mark.uncovered

OF_PLANS = [law for law in LAWS if law.number in {1, 3, 5, 6, 7}]
OF_BYTES = [law for law in LAWS if law.number in {1, 4, 8, 9, 10, 11, 13}]
PLANNER = attrs.evolve(KVSPEC, descriptors=None, prepared=None)
MOVER = attrs.evolve(KVSPEC, moves=None, tells=None)
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


@settings(max_examples=2 * settings.default.max_examples)
@given(strategies.plans())
def test_plans_keep_the_laws(case: Case) -> None:
    """The laws are about which ranks read and notify which, for engines of any model."""
    assert [] == laws.broken(PLANNER, case, of=OF_PLANS)


@given(strategies.twins())
def test_bytes_keep_the_laws(twins: tuple[Case, Case]) -> None:
    """The laws are about whole requests, moved by ids and by descriptors."""
    assert [] == laws.broken(MOVER, *twins, of=OF_BYTES)


@settings(max_examples=2 * settings.default.max_examples)
@given(
    strategies.sharing_cases()
    | special_cases.spanning_cases()
    | special_cases.common_cases()
    | special_cases.interleaved_cases()
)
def test_special_memories_keep_law_1(case: Case) -> None:
    """Groups share memory, content spans heads, or the sides have states of different rows."""
    LAWS[0].check(KVSPEC, case)


@given(strategies.sharing_cases())
def test_requests_of_shared_memory_keep_law_11(case: Case) -> None:
    """If groups share memory, a block moves for only one group."""
    LAWS[10].check(KVSPEC, case)


@pytest.mark.parametrize(
    ("check", "field"),
    [("check_shared_sources", "producer_blocks"), ("check_shared", "consumer_blocks")],
)
def test_law_finds_block_that_moves_for_two_groups(
    monkeypatch: pytest.MonkeyPatch, check: str, field: str
) -> None:
    """A system that does not compare the tables of groups breaks law 11, on either side."""
    side = engine(gqa(1), gqa(2, head_size=2))
    tables = {"g0": [1, 2], "g1": [3, 4]}
    pool = dict.fromkeys(tables, 6)
    shared = attrs.evolve(
        case(side, side, request(20, tables, tables)),
        producer_pool=pool,
        consumer_pool=pool,
        shared=True,
    )
    LAWS[10].check(MOVER, shared)
    monkeypatch.setattr(f"kvspec.descriptors.table.{check}", lambda *_: None)
    with pytest.raises(laws.BrokenLawError, match=field):
        LAWS[10].check(MOVER, shared)


def test_contributing_contains_the_table_of_laws() -> None:
    """The number of a law is its place in the table."""
    rows = re.findall(
        r"^\| (\d+) \| (.+?) \| (.+) \|$", CONTRIBUTING.read_text("utf-8"), re.MULTILINE
    )
    assert [(str(law.number), law.name, law.sentence) for law in LAWS] == rows
    assert list(range(1, len(LAWS) + 1)) == [law.number for law in LAWS]


def small(tp: int, layout: str = "LBHNC", block_size: int = 4) -> kvspec.EngineSpec:
    """Return an engine of one layer of two heads of two bytes."""
    return engine(gqa(2, block_size=block_size, head_size=2, dtype="uint8"), tp=tp, layout=layout)


def small_case(producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec) -> Case:
    """Return a request of ten tokens, of which the consumer has cached six."""
    tables = [range(1, 2 + 9 // side.groups[0].spec.block_size) for side in (producer, consumer)]
    return case(producer, consumer, request(10, *tables, cached_tokens=6))


TWIN = small_case(small(4), small(2, "LBNHC")), small_case(small(2), small(1, "BLNHC", 2))
"""A producer with two ranks for each head, and the same request between other engines."""
ALONE = small_case(small(2), small(2)), small_case(small(1), small(2))
"""A producer without replicas."""
CROWD = small_case(small(4), small(4)), small_case(small(2), small(2))
"""Two replicas of each head, and two readers of each."""


def test_broken_lists_no_law_for_kvspec() -> None:
    """All laws are checked together."""
    for pair in (TWIN, ALONE, CROWD):
        assert [] == laws.broken(KVSPEC, *pair)


@pytest.mark.parametrize(
    "system",
    [
        System(name="silent"),
        System(name="only tells", tells=KVSPEC.tells),
        System(name="only steps", steps=KVSPEC.steps),
        System(name="only moves", moves=KVSPEC.moves),
    ],
)
def test_broken_lists_no_law_about_questions_without_answer(system: System) -> None:
    """A question that a system does not answer is not judged."""
    for pair in (TWIN, ALONE, CROWD):
        assert [] == laws.broken(system, *pair)


def test_law_6_counts_readers_of_long_interleaves() -> None:
    """The shardings repeat after 56 and 96 positions, so each pair of contexts meets within 672."""
    contexts = (*range(1, 7), *range(6))
    producer = engine(gqa(1), tp=12, interleave_size=8, context_ranks=(contexts,))
    consumer = engine(gqa(1), tp=6, dcp_size=6, interleave_size=16)
    striped = attrs.evolve(
        case(producer, consumer, request(1, [0], [0])),
        replica_policy=kvspec.ReplicaPolicy("stripe", 1),
    )
    LAWS[5].check(KVSPEC, striped)


Moves = Iterable[laws.Move]


def moving(change: Callable[[Case, Any, list[laws.Move]], Moves]) -> System:
    """Return a system with the moves of kvspec, changed by *change*(case, role, moves)."""
    right: Any = KVSPEC.moves
    return System(name="planted", moves=lambda c, role: change(c, role, list(right(c, role))))


def copying(change: Callable[[World, list[ByteCopy]], Iterable[ByteCopy]]) -> System:
    """Return a system with the copies of kvspec, changed by *change*(world, copies)."""
    right: Any = KVSPEC.descriptors
    return System(name="planted", descriptors=lambda w, p, c: change(w, list(right(w, p, c))))


def preparing(change: Callable[[PreparedLists], PreparedLists]) -> System:
    """Return a system with the lists of kvspec, changed by *change*."""
    right: Any = KVSPEC.prepared

    def lists(here: World, p: RankId, c: RankId) -> PreparedLists | None:
        unchanged = right(here, p, c)
        return None if unchanged is None else change(unchanged)

    return System(name="planted", prepared=lists)


def notifying(change: Callable[[Any, list[Any]], Iterable[Any]]) -> System:
    """Return a system with the notifications of kvspec, changed by *change*(role, pairs)."""
    right: Any = KVSPEC.tells
    tells = lambda c, role: change(role, list(right(c, role)))  # noqa: E731
    return attrs.evolve(KVSPEC, name="planted", tells=tells, descriptors=None, prepared=None)


def to_first(here: Case, role: str, moves: list[laws.Move]) -> Moves:
    """Let all readers read the first replica."""
    return [attrs.evolve(m, producer=RankId(tp=m.producer.tp // 2 * 2)) for m in moves]


def stepping(change: Callable[[World, frozenset[str], range], tuple[Any, Any]]) -> System:
    """Return a system with the steps of kvspec, with changed layers or positions."""
    right: Any = KVSPEC.steps
    steps = lambda w, p, c, layers, tokens: right(w, p, c, *change(w, layers, tokens))  # noqa: E731
    return System(name="planted", steps=steps)


def in_two(copies: list[ByteCopy]) -> Iterator[ByteCopy]:
    """Divide each copy into its first byte and the rest."""
    for a, b, length in copies:
        yield from ((a, b, 1), (a + 1, b + 1, length - 1))


def never_refusing(here: World, p: RankId, c: RankId) -> Iterable[ByteCopy]:
    """Copy nothing instead of raising an error."""
    right: Any = KVSPEC.descriptors
    try:
        return list(right(here, p, c))
    except kvspec.KVSpecError:
        return []


def halved(lists: PreparedLists) -> PreparedLists:
    """Replace each descriptor by its two halves. The rows of the halves are added."""

    def cut(rows: Any, ids: Any) -> tuple[Any, Any]:
        first, second, total = rows.copy(), rows.copy(), int(rows[:, 4].sum())
        first[:, 1] //= 2
        second[:, 0] += first[:, 1]
        second[:, 1] -= first[:, 1]
        picked = np.concatenate([ids + total, ids + 2 * total])
        return np.concatenate([rows, first, second]), picked.astype(np.int32)

    (sources, source_ids), (places, place_ids) = (
        cut(lists.producer_rows, lists.producer_ids),
        cut(lists.consumer_rows, lists.consumer_ids),
    )
    return PreparedLists(sources, places, source_ids, place_ids)


def one_more(lists: PreparedLists) -> PreparedLists:
    """Also move a block of the same row that does not belong to the request."""
    (free, *_) = sorted({*range(int(lists.consumer_rows[0, 4]))} - {*lists.consumer_ids.tolist()})
    ids = np.append(lists.consumer_ids, np.int32(free))
    return attrs.evolve(
        lists, producer_ids=np.append(lists.producer_ids, np.int32(0)), consumer_ids=ids
    )


def longer_rows(lists: PreparedLists) -> PreparedLists:
    """Describe a pool of three times as many blocks."""
    rows = lists.consumer_rows.copy()
    rows[:, 4] *= 3
    return attrs.evolve(lists, consumer_rows=rows)


PLANTED: list[tuple[int, System]] = [
    (1, System(name="idle", moves=lambda *_: ())),
    (1, System(name="idle", descriptors=lambda *_: ())),
    (1, moving(lambda _c, _r, moves: moves[1:])),
    (1, moving(lambda _c, _r, moves: moves + moves[:1])),
    (1, moving(lambda _c, _r, ms: [attrs.evolve(m, layer="draft") for m in ms])),
    (1, copying(lambda _w, copies: copies[1:])),
    (1, copying(lambda _w, copies: copies + copies[:1])),
    (1, copying(lambda _w, copies: [(a, b - 8, n + 8) for a, b, n in copies])),
    (1, copying(lambda _w, copies: [(a + 1, b, n) for a, b, n in copies])),
    (1, attrs.evolve(KVSPEC, descriptors=copying(lambda _w, copies: copies[:-1]).descriptors)),
    (3, moving(lambda _c, role, moves: moves[role == "producer" :])),
    (4, copying(lambda w, cs: cs if w.case.producer.layout == "LBHNC" else cs[1:])),
    (5, moving(lambda _c, _r, ms: [attrs.evolve(m, units=range(7, 8)) for m in ms])),
    (5, moving(lambda _c, _r, ms: [attrs.evolve(m, consumer_units=range(9, 10)) for m in ms])),
    (6, moving(to_first)),
    (7, notifying(lambda role, pairs: pairs[role == "consumer" :])),
    (7, notifying(lambda _r, pairs: [each for each in pairs if each[0] != RankId(tp=1)])),
    (7, notifying(lambda _r, pairs: [(p, RankId(tp=0)) for p, _ in pairs])),
    (8, copying(lambda _w, copies: in_two(copies))),
    (8, preparing(halved)),
    (8, preparing(one_more)),
    (9, copying(lambda w, cs: cs if w.case.consumer.layout == "LBNHC" else cs[1:])),
    (10, copying(lambda _w, copies: [(a, b + 2**20, n) for a, b, n in copies])),
    (10, preparing(longer_rows)),
    (11, System(name="deaf", descriptors=never_refusing)),
    (13, System(name="idle", steps=lambda *_: ())),
    (13, stepping(lambda w, layers, _: (layers, range(w.case.request.num_tokens)))),
    (13, stepping(lambda _w, layers, tokens: (layers, range(tokens.stop)))),
    (13, stepping(lambda _w, layers, tokens: (layers, range(tokens.start, tokens.stop + 1)))),
    (13, stepping(lambda _w, layers, tokens: (layers, range(tokens.start + 1, tokens.stop)))),
]


TWO_READERS = small_case(small(1), small(2))


def one_reader(case: Case, role: Any) -> Iterable[Any]:
    """Let each producer rank wait for one of its readers. All consumer ranks know which one."""
    right: Any = KVSPEC.tells
    return dict(right(case, role)).items()


@pytest.mark.parametrize("question", ["moves", "descriptors", "prepared"])
def test_law_7_finds_a_reader_that_is_not_awaited_by_each_way_to_read(question: str) -> None:
    ask = {question: getattr(KVSPEC, question)}
    system = System(name="one reader", tells=one_reader, **ask)
    with pytest.raises(laws.BrokenLawError, match="does not wait for it"):
        LAWS[6].check(system, TWO_READERS)
    assert "law 7, counts" not in laws.broken(system, TWO_READERS, of=[LAWS[6]]).not_judged


def test_law_7_is_half_judged_if_it_is_not_known_who_reads() -> None:
    found = laws.broken(System(name="tells", tells=one_reader), TWO_READERS, of=[LAWS[6]])
    assert [] == found
    assert "half" in found.not_judged["law 7, counts"]


@pytest.mark.parametrize(("number", "system"), PLANTED)
def test_law_finds_each_planted_fault(number: int, system: System) -> None:
    """The fault is found by the law that it breaks."""
    (law,) = (each for each in LAWS if each.number == number)
    pair = CROWD if number == 6 else TWIN
    with pytest.raises(laws.BrokenLawError, match=rf"\b{number}\b") as caught:
        law.check(system, *pair)
    assert system.name in str(caught.value)
    assert number in {each.number for each, _ in laws.broken(system, *pair)}
