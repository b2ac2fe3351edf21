"""The states of a `TransferError`: one enumeration, and a page that prints it."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

import kvspec
from kvspec import TransferState
from kvspec.nixl import nixl_errors

PACKAGE = Path(kvspec.__file__).parent
PAGE = PACKAGE.parent / "docs" / "faults.md"


def test_faults_page_lists_every_transfer_state() -> None:
    """The table has each state, its meaning and what the caller does, in order."""
    section = PAGE.read_text(encoding="utf-8").partition("## States of a `TransferError`")[2]
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    printed = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]
    assert [(f"`{state}`", state.meaning, state.remedy) for state in TransferState] == printed


@pytest.mark.parametrize("state", TransferState)
def test_transfer_state_equals_and_prints_as_its_plain_string(state: TransferState) -> None:
    """Comparisons with strings hold, and messages show the bare word."""
    plain = state.value
    assert (plain, plain, plain) == (state, str(state), f"{state}")
    assert state is TransferState(plain)  # type: ignore[call-arg]
    assert state is pickle.loads(pickle.dumps(state))  # noqa: S301 - our own bytes


def test_transfer_error_converts_a_plain_string_to_its_state() -> None:
    """A caller that has only the word gets the member."""
    error = kvspec.TransferError("late", state="timeout")  # type: ignore[arg-type]
    assert error.state is TransferState.TIMEOUT


def test_transfer_error_refuses_an_unknown_state() -> None:
    """A word that is not listed is refused by name."""
    with pytest.raises(kvspec.SpecError) as caught:
        kvspec.TransferError("late", state="posted")  # type: ignore[arg-type]
    assert ("state", "posted") == (caught.value.field, caught.value.value)


def test_nixl_errors_map_only_to_transfer_states() -> None:
    """Every kind and step of NIXL's errors has a member."""
    found = [*nixl_errors._OF_KIND.values(), *nixl_errors._OF_STEP.values()]
    assert all(isinstance(state, TransferState) for state in found)
    assert nixl_errors.state_of("post", "NoSuchKind") is TransferState.BUG


def test_package_passes_no_state_as_a_plain_string() -> None:
    """Each `state=` of the package's errors names a member of the enumeration."""
    found = [
        (path.name, node.lineno)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "TransferError"
        for state in ([each.value for each in node.keywords if each.arg == "state"] or [None])
        if state is None or isinstance(state, ast.Constant)
    ]
    assert [] == found
