"""The tables of the ledgers are complete, and the documentation is drawn from them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kvspec.completion.states import CONSUMER, PRODUCER, PUBLIC

ROOT = Path(__file__).parents[2]


def drawer() -> Any:
    """Return the program that writes the page, as a module."""
    spec = importlib.util.spec_from_file_location("draw_ledgers", ROOT / "docs/draw_ledgers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_of_the_ledgers_is_drawn_from_their_tables() -> None:
    """The file docs/ledgers.md is up to date."""
    page = drawer()
    assert page.page() == page.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("table", "end"), [(PRODUCER, "forgotten"), (CONSUMER, "forgotten")])
def test_every_state_of_a_table_leads_to_the_last(
    table: dict[tuple[str, str], Any], end: str
) -> None:
    """No row leads out of the last state."""
    reach = {end}
    for _ in table:
        reach |= {state for (state, _), row in table.items() if row.state in reach}
    states = {state for state, _ in table} | {row.state for row in table.values()}
    assert states == reach
    assert end not in {state for state, _ in table}


def test_request_is_freed_exactly_when_it_stops_being_held() -> None:
    """It leaves the states *held* and *fenced* only for *freed*."""
    left = {
        (state, row.state)
        for (state, _), row in PRODUCER.items()
        if state in ("held", "fenced") and row.state not in ("held", "fenced")
    }
    freed = {(state, row.state) for (state, _), row in PRODUCER.items() if row.action == "free"}
    assert {("held", "freed"), ("fenced", "freed")} == left == freed


def test_public_state_changes_once_to_done_or_failed() -> None:
    """A load is done or has failed for good, and only its release follows a failure."""
    states = {state for key, row in CONSUMER.items() for state in (key[0], row.state)}
    assert states == PUBLIC.keys()
    changes = {
        (state, row.state)
        for (state, _), row in CONSUMER.items()
        if PUBLIC[state] != PUBLIC[row.state] and PUBLIC[row.state]
    }
    assert {("asking", "done"), ("draining", "failed")} == changes
