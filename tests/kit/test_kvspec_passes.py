"""kvspec keeps all laws of its own kit at all four levels, through the same public protocol."""

from __future__ import annotations

import attrs
import pytest
from kvspec_system import SYSTEM

from kvspec.testing.kit import judge
from kvspec.testing.kit.axes import AXES
from kvspec.testing.kit.judging import Profile

SMALL = Profile("small", examples=2, each=1, everything=2, seconds=120.0, shrinking=5.0)


def test_system_answers_on_all_levels() -> None:
    questions = ("moves", "tells", "descriptors", "prepared", "steps", "release", "connector")
    assert all(getattr(SYSTEM, question) is not None for question in questions)


@pytest.mark.parametrize("axis", [axis.name for axis in AXES if axis.name != "kinds"])
def test_kvspec_keeps_all_laws_on_each_axis(axis: str) -> None:
    report = judge(SYSTEM, profile=SMALL, axes=[axis])
    assert not report.wrong
    assert not any(judgement.refused for judgement in report.judgements)


def test_axis_of_steps_shows_each_way_to_cut_a_request_for_law_13_alone() -> None:
    report = judge(SYSTEM, axes=["steps"])
    assert {13} == {judgement.law.number for judgement in report.judgements if judgement.axis}
    values = {judgement.value: judgement.exact for judgement in report.judgements}
    assert values.keys() >= {"by layer", "by layer and by token", "by token"}
    assert not report.wrong


def test_axis_of_steps_needs_a_system_that_answers_steps() -> None:
    report = judge(attrs.evolve(SYSTEM, steps=None), profile=SMALL, axes=["steps"])
    assert not any(judgement.axis for judgement in report.judgements)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [axis.name for axis in AXES])
def test_kvspec_keeps_all_laws_in_many_cases(axis: str) -> None:
    report = judge(SYSTEM, profile="dev", axes=[axis], seed=1)
    assert not report.wrong
