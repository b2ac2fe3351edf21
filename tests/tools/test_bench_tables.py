"""The programs that compare real engines print their rows, and write them into a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench" / "vllm"))
import tables

COLUMNS = ("model", "outcome")


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the handlers of signals and the secret of this process."""
    monkeypatch.setattr(tables.signal, "signal", lambda *_: None)
    monkeypatch.setenv("KVSPEC_SECRET", "a secret of this test")


def run(monkeypatch: pytest.MonkeyPatch, rows: Callable[..., Any], *arguments: str) -> object:
    """Return the exit status of a program with *rows*."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as caught:
        tables.run(parser, COLUMNS, rows)
    return caught.value.code


def rows_of(*outcomes: str) -> Callable[[argparse.Namespace, Path], tables.Rows]:
    """Return a generator of rows that should have the outcome *same*."""

    def rows(_: argparse.Namespace, folder: Path) -> tables.Rows:
        assert folder.is_absolute()
        for outcome in outcomes:
            yield outcome == "same", ("llama", outcome)
        return "engine 1.0"

    return rows


def test_program_prints_its_rows_and_replaces_the_table_of_a_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n\n| model | outcome |\n|---|---|\n| old | same |\n\nold\n\nafter\n")
    assert not run(monkeypatch, rows_of("same", "same"), "--page", str(page))
    expected = "| model | outcome |\n|---|---|\n| llama | same |\n| llama | same |\n\nengine 1.0; "
    assert capsys.readouterr().out.startswith(expected)
    text = page.read_text()
    assert text.startswith(f"before\n\n{expected}")
    assert text.endswith("minutes.\n\nafter\n")
    assert "old" not in text


def test_program_fails_if_a_row_has_another_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, rows_of("same", "different"))


@pytest.mark.parametrize("more", [("--only", "llama"), ()])
def test_page_needs_a_whole_run_and_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: tuple[str, ...]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("| model | outcome |\n|---|---|\n\nold\n" if more else "no table\n")
    before = page.read_text()
    assert 2 == run(monkeypatch, rows_of("same"), "--page", str(page), *more)
    assert before == page.read_text()
