"""Test that the page of limits lists the defaults of time limits and the right versions."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvspec.nixl import NixlRank
from kvspec.session import Session

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
CLASSES: dict[str, Any] = {"Session": Session, "NixlRank": NixlRank}
TIMES = {"float", "float | None"}


def rows(heading: str, columns: int) -> list[list[str]]:
    """Return the cells of the first table after *heading*, without backticks."""
    section = PAGE.partition(f"\n{heading}\n")[2].partition("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip(" `") for cell in line.split("|")[1 : columns + 1]] for line in lines]


def function(call: str) -> Callable[..., Any]:
    """Return the function of a cell, such as `Session.load`."""
    name, _, method = call.partition(".")
    callee: Callable[..., Any] = getattr(CLASSES[name], method or "__init__")
    return callee


LIMITS = [(call, name, default) for call, name, default in rows("## All time limits", 3)]


@pytest.mark.parametrize(("call", "name", "default"), LIMITS)
def test_limit_has_the_default_of_its_parameter(call: str, name: str, default: str) -> None:
    """A parameter without a default is required."""
    own = inspect.signature(function(call)).parameters[name].default
    assert default == (
        "required" if own is inspect.Parameter.empty else f"{own}".removesuffix(".0")
    )


def test_page_lists_every_time_limit_of_a_session() -> None:
    """A time is a parameter of type float."""
    calls = ["Session", *(f"Session.{name}" for name in vars(Session) if not name.startswith("_"))]
    times = {
        (call, parameter.name)
        for call in calls
        if callable(function(call))
        for parameter in inspect.signature(function(call)).parameters.values()
        if parameter.annotation in TIMES
    }
    assert times == {(call, name) for call, name, _ in LIMITS if call.startswith("Session")}


def test_page_shows_the_least_and_the_tested_versions() -> None:
    """The least versions are in `pyproject.toml`, and the tested ones in `constraints.txt`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["nixl"]]
    least = dict(requirement.split(">=") for requirement in needed) | {
        "Python": project["requires-python"].removeprefix(">=")
    }
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    tested = dict(re.findall(r"^([\w-]+)==(\S+)$", pins, re.MULTILINE))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    tested["Python"] = ", ".join(re.findall(r'"(3\.\d+)"', workflow))
    table = {cells[0].partition(" ")[0]: tuple(cells[1:]) for cells in rows("## Versions", 3)}
    assert table == {name: (version, tested[name]) for name, version in least.items()}
