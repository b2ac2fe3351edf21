"""The states of a `TransferError`, and the page that prints them."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

import kvspec
from kvspec import LocalTransferError, RemoteTransferError, TransferState
from kvspec.nixl import agent

PACKAGE = Path(kvspec.__file__).parent
PAGE = PACKAGE.parent / "docs" / "limits.md"


def test_limits_page_lists_every_transfer_state() -> None:
    """The table has each state, its meaning and what the caller does, in order."""
    section = PAGE.read_text(encoding="utf-8").partition("## States of a `TransferError`")[2]
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    printed = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]
    assert printed == [
        (f"`{state}`", state.side, state.meaning, state.remedy) for state in TransferState
    ]


@pytest.mark.parametrize("state", TransferState)
def test_transfer_state_equals_and_prints_as_its_plain_string(state: TransferState) -> None:
    """Comparisons with strings are true, and messages show the bare word."""
    plain = state.value
    assert (plain, plain, plain) == (state, str(state), f"{state}")
    assert state is TransferState(plain)  # type: ignore[call-arg]
    assert state is pickle.loads(pickle.dumps(state))  # noqa: S301 - our own bytes


def test_transfer_error_converts_a_plain_string_to_its_state() -> None:
    """A caller may pass the string instead of the member."""
    error = kvspec.TransferError("late", state="timeout")  # type: ignore[arg-type]
    assert error.state is TransferState.TIMEOUT


@pytest.mark.parametrize("state", TransferState)
def test_class_of_a_transfer_error_shows_the_side_to_blame(state: TransferState) -> None:
    """A plain string and a pickle give the same class."""
    kind = {"local": LocalTransferError, "remote": RemoteTransferError}[state.side]
    errors = [kvspec.TransferError("x", state=each) for each in (state, state.value)]  # type: ignore[arg-type]
    for error in (*errors, pickle.loads(pickle.dumps(errors[0]))):  # noqa: S301 - our own bytes
        assert type(error) is kind


def test_transfer_error_rejects_an_unknown_state() -> None:
    """The string must be the value of a member."""
    with pytest.raises(kvspec.SpecError) as caught:
        kvspec.TransferError("late", state="posted")  # type: ignore[arg-type]
    assert ("state", "posted") == (caught.value.field, caught.value.value)


def test_nixl_errors_map_only_to_transfer_states() -> None:
    """Every kind and step of NIXL's errors has a member."""
    states = [*agent.STATE_OF_KIND.values(), *agent.STATE_OF_PURPOSE.values()]
    assert all(isinstance(state, TransferState) for state in states)
    assert agent.state_of("post", "NoSuchKind") is TransferState.BUG


def test_package_passes_no_state_as_a_plain_string() -> None:
    """Each `state=` of the package's errors is a member of the enumeration."""
    wrong = [
        (path.name, node.lineno)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "TransferError"
        for state in ([word.value for word in node.keywords if word.arg == "state"] or [None])
        if state is None or isinstance(state, ast.Constant)
    ]
    assert [] == wrong
