"""The profile "ci" finds the mistake with which the README opens, at every largest TP size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import kvspec
from kvspec import RankId
from kvspec.testing.kit import Supports, System, Verdict, judge
from kvspec.testing.kit.axes import AXES, CLASSES
from kvspec.testing.kit.guard import Guard
from kvspec.testing.kit.judging import look
from kvspec.testing.kit.must_cases import moves_nothing, must_cases
from kvspec.testing.laws import KVSPEC, LAWS, Move


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
    report = judge(system, profile="ci", axes=["tp"], laws=LAWS[:1])
    assert "producer with more ranks than heads" in {each.value for each in report.wrong}


def test_must_cases_have_all_classes_and_move_tokens() -> None:
    """Each has at least two heads, so that a head can be confused with another one."""
    cases = [*must_cases(Supports.only(kinds=["full"], max_tp=8, equal_tp=False,
                                       tp_multiples=False, even_heads=False))]  # fmt: skip
    (axis,) = [each for each in AXES if each.name == "tp"]
    assert set(CLASSES) == {value for case in cases for value in axis.values(case)}
    assert all(case.producer.groups[0].spec.parts[0].units >= 2 for case in cases)
    assert not any(map(moves_nothing, cases))


def test_case_in_which_nothing_moves_is_not_exact() -> None:
    """A system that moves nothing would be right in it."""
    (case, *_) = must_cases(Supports.only(kinds=["full"], max_tp=2))
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
