"""The profile "ci" judges listed cases, so it finds mistakes that one class of cases shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import attrs
import pytest

import kvspec
from kvspec import RankId
from kvspec.check.counting import cached_tokens_of
from kvspec.testing import Case
from kvspec.testing.kinds import KINDS, kinds_of
from kvspec.testing.kit import Supports, System, Verdict, judge
from kvspec.testing.kit.axes import AXES, CLASSES
from kvspec.testing.kit.guard import Guard
from kvspec.testing.kit.judging import PROFILES, look
from kvspec.testing.kit.must_cases import moves_nothing, must_cases
from kvspec.testing.laws import KVSPEC, LAWS, Move

# The cases of the profile "ci". These tests do not show a failing case, so it is not made smaller.
CI = attrs.evolve(PROFILES["ci"], shrinking=0.0)


def by_count(case: Any, role: Any) -> Iterator[Move]:
    """Yield the right moves, but read the k-th head from rank c + k if heads have replicas."""
    right: Any = KVSPEC.moves
    size = case.producer.parallel.tp_size
    for move in right(case, role):
        heads = case.producer.groups[0].spec.parts[0].units
        if heads >= size:
            yield move
            continue
        for k, unit in enumerate(move.units, start=move.consumer_units.start):
            wrong = RankId(tp=min(move.consumer.tp + k, size - 1))
            first = move.consumer_units.start + unit - move.units.start
            yield attrs.evolve(
                move, producer=wrong, units=range(unit, unit + 1), producer_units=range(1),
                consumer_units=range(first, first + 1),
            )  # fmt: skip


@pytest.mark.parametrize("max_tp", [3, 4, 5, 6, 8, 12])
def test_ci_finds_a_connector_that_pairs_replicas_by_count(max_tp: int) -> None:
    supports = Supports.only(kinds=["full"], max_tp=max_tp, equal_tp=False, tp_multiples=False,
                             even_heads=False)  # fmt: skip
    system = System(name="by count", moves=by_count, supports=supports)
    report = judge(system, profile=CI, axes=["tp"], laws=LAWS[:1])
    assert "producer with more ranks than heads" in {each.value for each in report.wrong}


@lru_cache
def listed(axis: str) -> tuple[Case, ...]:
    """Return the listed cases of *axis* for a system that supports everything."""
    (chosen,) = [each for each in AXES if each.name == axis]
    supports = Supports()
    narrowed = chosen.narrowed(supports, kinds_of(supports))
    return tuple(case for narrow in narrowed for case in must_cases(axis, narrow))


def test_listed_cases_have_all_classes_of_tp_pairs() -> None:
    """Each has at least two heads, so that a head can be confused with another one."""
    (axis,) = [each for each in AXES if each.name == "tp"]
    cases = listed("tp")
    assert set(CLASSES) == {value for case in cases for value in axis.values(case)}
    assert all(case.producer.groups[0].spec.parts[0].units >= 2 for case in cases)
    for engines in ([c.producer for c in cases], [c.consumer for c in cases]):
        assert set(range(1, 13)) == {engine.parallel.tp_size for engine in engines}


@pytest.mark.parametrize("axis", [each.name for each in AXES if each.values is not None])
def test_each_listed_case_moves_tokens_of_blocks_in_another_order(axis: str) -> None:
    for case in listed(axis):
        assert not moves_nothing(case)
        for group in case.consumer.groups:
            ids = case.request.consumer_blocks[group.name].block_ids.tolist()
            assert len(ids) < 3 or ids != sorted(ids)


def kind_of(case: Case) -> str:
    """Return the kind of the first group."""
    return case.producer.groups[0].name


def cached(case: Case) -> int:
    """Return the cached tokens of the first group."""
    return cached_tokens_of(case.request, case.consumer.groups[0])


def blocks(case: Case) -> tuple[int, int]:
    """Return the block sizes of the first group."""
    return case.producer.groups[0].spec.block_size, case.consumer.groups[0].spec.block_size


def sizes(case: Case, name: str) -> tuple[int, int]:
    """Return one parallel size of both engines."""
    return getattr(case.producer.parallel, name), getattr(case.consumer.parallel, name)


def contexts(case: Case) -> bool:
    """Return whether context ranks divide the tokens of the producer."""
    return case.producer.parallel.context_size > 1


def formats(case: Case) -> set[str]:
    """Return the page formats of both sides."""
    specs: list[Any] = [side.groups[0].spec for side in (case.producer, case.consumer)]
    return {getattr(spec, "page_format", "plain") for spec in specs}


# A connector that is wrong in one class was passed by the profile "ci" if it drew no such case.
CLASSES_OF_AXES: dict[str, tuple[str, Callable[[Case], bool]]] = {
    "producer TP 7": ("tp", lambda c: sizes(c, "tp_size")[0] == 7),
    "consumer TP 7": ("tp", lambda c: sizes(c, "tp_size")[1] == 7),
    "PP 2 to 3": ("pp", lambda c: sizes(c, "pp_size") == (2, 3)),
    "stages of every other layer": ("pp", lambda c: c.producer.parallel.stages is not None),
    "DCP 3": ("cp", lambda c: 3 in sizes(c, "dcp_size")),
    "DCP with PCP": ("cp", lambda c: c.producer.parallel.dcp_size > 1 < sizes(c, "pcp_size")[0]),
    "interleave of 1 and 2": (
        "cp", lambda c: contexts(c) and sizes(c, "interleave_size") == (1, 2)
    ),
    "blocks of 3 to 2": ("blocks", lambda c: blocks(c) == (3, 2)),
    "two sizes of kernel blocks": (
        "blocks",
        lambda c: 1 < c.producer.groups[0].kernel_blocks_per_block
        != c.consumer.groups[0].kernel_blocks_per_block > 1,
    ),
    "one full block": ("blocks", lambda c: c.request.num_tokens % blocks(c)[0] == 0),
    "one token": ("blocks", lambda c: c.request.num_tokens == 1),
    "layout LKBNHC": ("layouts", lambda c: c.consumer.layout == "LKBNHC"),
    "all but the last token cached": (
        "prefixes", lambda c: cached(c) == c.request.num_tokens - 1
    ),
    "prefix inside a block": ("prefixes", lambda c: cached(c) % blocks(c)[1] != 0),
    "prefix with unequal blocks": (
        "prefixes", lambda c: cached(c) > 0 and blocks(c)[0] != blocks(c)[1]
    ),
    "window, null blocks": ("windows", lambda c: c.consumer.null_block is not None),
    "prefix of context ranks": ("everything", lambda c: contexts(c) and cached(c) > 0),
    "PP with unequal TP": (
        "everything",
        lambda c: sizes(c, "pp_size") != (1, 1) and len(set(sizes(c, "tp_size"))) > 1,
    ),
    "x-packed with unequal blocks": (
        "everything", lambda c: formats(c) == {"x-packed"} and blocks(c)[0] != blocks(c)[1]
    ),
    "nearest": ("tp", lambda c: c.replica_policy.name == "nearest"),
    **{
        f"{kind}, TP {word}": (
            "kinds",
            lambda c, kind=kind, sign=sign: kind_of(c) == kind
            and sign * (sizes(c, "tp_size")[0] - sizes(c, "tp_size")[1]) > 0,
        )
        for kind in KINDS
        for word, sign in (("falls", 1), ("grows", -1))
    },
    **{
        f"{kind}, prefix": (
            "everything", lambda c, kind=kind: kind_of(c) == kind and cached(c) > 0
        )
        for kind in KINDS
        if kind != "ring"  # No cached prefix replaces a ring.
    },
    **{
        f"{kind}, PP": (
            "everything", lambda c, kind=kind: kind_of(c) == kind and sizes(c, "pp_size") != (1, 1)
        )
        for kind in KINDS
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES_OF_AXES)
def test_each_class_has_a_listed_case(name: str) -> None:
    axis, reached = CLASSES_OF_AXES[name]
    assert any(map(reached, listed(axis)))


def forgetting(reached: Callable[[Case], bool]) -> Callable[..., Any]:
    """Return the copies of kvspec without the last one, in the cases that *reached* accepts."""

    def copies(here: Any, producer: RankId, consumer: RankId) -> list[Any]:
        right: Any = KVSPEC.descriptors
        every = list(right(here, producer, consumer))
        return every[:-1] if reached(here.case) else every

    return copies


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("consumer TP 7", {"max_tp": 7, "equal_tp": False}),
        ("DCP 3", {"max_tp": 3, "dcp": True}),
        ("blocks of 3 to 2", {"equal_blocks": False}),
        ("prefix inside a block", {"prefixes": "any"}),
        ("MLA, TP grows", {"kinds": ["full", "MLA"], "max_tp": 4, "equal_tp": False}),
    ],
)
def test_ci_finds_a_connector_that_is_wrong_in_one_class(name: str, fields: Any) -> None:
    axis, reached = CLASSES_OF_AXES[name]
    supports = Supports.only(**{"kinds": ["full"]} | fields)
    system = System(name=name, descriptors=forgetting(reached), supports=supports)
    assert judge(system, profile=CI, axes=[axis], laws=LAWS[:1]).wrong


def test_case_in_which_nothing_moves_is_not_exact() -> None:
    """A system that moves nothing would be right in it."""
    (case, *_) = must_cases("tp", Supports.only(kinds=["full"], max_tp=2))
    empty = attrs.evolve(
        case,
        request=kvspec.TransferRequest(
            request_id="empty", num_tokens=0, producer_blocks={"full": []},
            consumer_blocks={"full": []},
        ),
    )  # fmt: skip
    idle = System(name="idle", descriptors=lambda *_: [])
    for system in (idle, KVSPEC):
        (verdict, words) = look(Guard(system, 5.0), LAWS[:1], empty)[1]
        assert (Verdict.NOT_JUDGED, "no token moves in this case") == (verdict, words)
    assert Verdict.WRONG is look(Guard(idle, 5.0), LAWS[:1], case)[1][0]
    assert Verdict.EXACT is look(Guard(KVSPEC, 5.0), LAWS[:1], case)[1][0]


def test_report_names_classes_that_were_not_drawn() -> None:
    """A system of equal sizes has no pair that differs."""
    supports = Supports.only(kinds=["full"], max_tp=4, equal_tp=False, tp_multiples=True,
                             even_heads=True)  # fmt: skip
    report = judge(attrs.evolve(KVSPEC, supports=supports), axes=["tp"], laws=LAWS[:1])
    missing = {each.value for each in report.judgements if each.words == "not drawn"}
    assert {"other, producer larger", "other, consumer larger"} <= missing
    assert "multiple, producer larger" not in missing
