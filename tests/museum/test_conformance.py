"""The judge of other connectors finds kvspec exact, and the pages are those of the reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import judging
import naming
import pytest
from toy import Toy, gqa, transfer

from kvspec.testing.laws import KVSPEC
from kvspec.testing.world import described

HOME = Path(judging.__file__).parent
REPORTS = sorted(HOME.glob("*/report.json"))


def cases() -> list[Any]:
    """Return a grid of four cases."""
    return [transfer(gqa(2), tp=tp, tokens=5) for tp in ((1, 1), (1, 2), (2, 1), (2, 2))]


def moved(here: Any) -> None:
    """Move the request of *here* with the library."""
    here.execute(described)


def axis(**fields: Any) -> Any:
    """Return an axis of the four cases."""
    system = attrs.evolve(KVSPEC, moves=None, tells=None, connector=fields.pop("connector", None))
    return judging.Axis(name="four", cases=cases, system=system, **fields)


def test_judge_counts_exact_cases_of_kvspec() -> None:
    row = judging.judge(axis(connector=moved))
    assert (4, 0, 0) == (row["exact"], row["refused"], row["wrong"])


def test_judge_counts_refusals_with_equal_words_together() -> None:
    def refuse(here: Any) -> None:
        raise judging.RefusedError(f"no TP {here.case.producer.parallel.tp_size}")

    row = judging.judge(axis(connector=refuse))
    assert 4 == row["refused"]
    assert {"no TP N": 4} == row["refusals"]


def test_judge_calls_a_connector_wrong_that_moves_bytes_and_then_refuses() -> None:
    def half(here: Any) -> None:
        moved(here)
        raise judging.RefusedError("the second rank is not supported")

    row = judging.judge(axis(connector=half))
    assert (0, 0, 4) == (row["exact"], row["refused"], row["wrong"])
    assert 11 == row["smallest wrong case"]["law"]


def test_judge_calls_a_connector_wrong_that_changes_the_producers() -> None:
    def erase(here: Any) -> None:
        moved(here)
        for _, storage in here.producers.values():
            for flat in storage.values():
                flat[-1] ^= 1

    row = judging.judge(axis(connector=erase))
    assert (0, 4) == (row["exact"], row["wrong"])
    assert "producer tp0" in row["smallest wrong case"]["fault"]


@pytest.mark.parametrize("error", [ValueError("no"), AssertionError("no"), SystemExit(0)])
def test_judge_takes_a_crash_for_wrong(error: BaseException) -> None:
    def crash(here: Any) -> None:
        raise error

    row = judging.judge(axis(connector=crash))
    assert 4 == row["wrong"]
    assert "2 heads, blocks of 4, 5 tokens" == row["smallest wrong case"]["case"]


def test_judge_ignores_padding_that_is_overwritten() -> None:
    def with_padding(here: Any) -> None:
        moved(here)
        for _, storage in here.consumers.values():
            for flat in storage.values():
                flat[32:40] = 0  # The page has 32 bytes, and 8 bytes of padding.

    case = transfer(gqa(2, page_size_padded=40), tokens=4)
    assert ("exact", 0, "") == judging.outcome(axis(connector=with_padding), case)


def test_judge_reports_an_axis_without_a_finding() -> None:
    made = {"axes": [{"axis": "four", "wrong": 1}], "findings": [{"axis": "five"}]}
    assert 2 == len(judging.surprises(made))


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name)
def test_pages_of_a_connector_are_those_of_its_report(path: Path) -> None:
    """`conformance/run` writes all of them."""
    made = json.loads(path.read_text("utf-8"))
    page = path.with_name("report.md").read_text("utf-8")
    assert judging.to_markdown(made, path.parent.name) == page
    assert [] == judging.surprises(made)
    overview = (HOME / "README.md").read_text("utf-8")
    assert all(line in overview for line in judging.matrix(made))


def test_page_of_names_is_that_of_its_results() -> None:
    """`conformance/run naming` writes both. Each fact has an outcome in each column."""
    made = json.loads(naming.RESULTS.read_text("utf-8"))
    assert naming.page(made) == naming.PAGE.read_text("utf-8")
    assert set(naming.NAMINGS) == set(made)
    assert all(list(naming.CHANGES) == list(column["facts"]) for column in made.values())


def test_toy_that_is_right_is_exact() -> None:
    system = Toy().system()
    row = judging.judge(judging.Axis(name="four", cases=cases, system=system))
    assert 4 == row["exact"]
