"""Test that the benchmarks run and print their tables. These tests measure no time."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.commands

BENCH = Path(__file__).parents[2] / "bench"


def bench(*arguments: str) -> list[str]:
    """Return the lines that the bench prints."""
    command = [sys.executable, str(BENCH / "run.py"), *arguments]
    done = subprocess.run(  # noqa: S603 - our own program
        command, check=True, capture_output=True, text=True, timeout=300
    )
    return done.stdout.splitlines()


BUDGETS = ("B1", "B2", "B3", "B4", "B6", "B8", "B11", "B12", "B13", "DIGEST", "POLL")


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """Return the lines of one short run of the budgets that other tests read."""
    return short_run("B3", "B4")


@pytest.fixture(scope="module")
def whole() -> list[str]:
    """Return the lines of a short run of many budgets, which takes a minute."""
    return short_run(*BUDGETS)


def short_run(*budgets: str) -> list[str]:
    """Return the lines of one short run, in an interpreter without Mooncake."""
    other = ("--mooncake-python", "/nonexistent/python")
    return bench("--quick", "--only", ",".join(budgets), *other)


@pytest.mark.slow
def test_bench_prints_rows_for_each_budget(whole: list[str]) -> None:
    """The first line describes the machine, and the second line has the columns."""
    machine, columns, rule, *rows, load = whole
    assert machine.startswith("machine: ")
    for word in ("cores", "Python", "numpy", "torch", "nixl"):
        assert word in machine
    assert ["budget", "what", "ours", "other", "ratio", "required", "met"] == columns.split()
    assert {"-"} == set(rule.replace(" ", ""))
    assert load.startswith("load at the end: ")
    named = {row.split()[0] for row in rows}
    assert {*BUDGETS} - named <= ({"B8"} if find_spec("nixl_cu13") is None else set())


def test_readme_of_bench_explains_every_budget() -> None:
    """The page has a row for each budget, in the order of the program."""
    page = (BENCH / "README.md").read_text("utf-8")
    source = (BENCH / "run.py").read_text("utf-8")
    assert re.findall(r'^    "(\w+)": ', source, re.MULTILINE) == re.findall(
        r"^\| ([A-Z]\w+) \|", page, re.MULTILINE
    )


def test_number_of_rows_does_not_depend_on_pool_size(printed: list[str]) -> None:
    """B4 compares each pool with a pool of a sixteenth of its size."""
    rows = [row.split() for row in printed if "  rows, pools" in row]
    assert ["yes"] * 5 == [row[-1] for row in rows]


@pytest.mark.slow
def test_counts_equal_the_posted_descriptors(whole: list[str]) -> None:
    """B6 counts the posted descriptors itself and compares them with `counts`."""
    rows = [row for row in whole if row.startswith("B6 ")]
    for kind in ("equal blocks", "unequal blocks", "kernel blocks", "context ranks"):
        assert 2 == sum(f", {kind}: " in row for row in rows)
    [differing] = [row.split() for row in rows if "counts()" in row]
    assert ["0", "0", "yes"] == differing[-3:]


@pytest.mark.slow
def test_bench_compares_the_chosen_way_with_the_other(whole: list[str]) -> None:
    """B8 stages short runs and moves long runs directly."""
    pytest.importorskip("nixl_cu13", reason="needs nixl")
    rows = [row for row in whole if row.startswith("B8 ")]
    assert "runs of 128 B" in rows[0]
    assert "runs of 64 KiB" in rows[-1]
    for row, way in ((rows[0], "staged (other"), (rows[-1], "direct (other")):
        assert way in row


def test_bench_rejects_an_unknown_budget() -> None:
    """The error names the unknown budget and the known budgets."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        bench("--only", "B99")
    assert "B99" in caught.value.stderr
    assert "B10" in caught.value.stderr


def test_bench_without_mooncake_prints_a_note(printed: list[str]) -> None:
    """An interpreter without Mooncake is not an error."""
    assert any("not installed" in row for row in printed if row.startswith("B3 "))


def compare(*arguments: str) -> list[str]:
    """Return the lines that the comparison of two checkouts prints."""
    command = [sys.executable, str(BENCH / "compare.py"), *arguments]
    done = subprocess.run(  # noqa: S603 - our own program
        command, check=True, capture_output=True, text=True, timeout=300
    )
    return done.stdout.splitlines()


def test_compare_measures_the_other_checkout(tmp_path: Path) -> None:
    """A checkout that the test makes slow is slower in every row."""
    shutil.copytree(BENCH.parent / "kvspec", tmp_path / "kvspec")
    slow = "import time\nimport kvspec.plan.plan\n_fast = plan_transfer\n"
    slow += (
        "def plan_transfer(*arguments):\n    list(range(2 * 10**6))\n    return _fast(*arguments)\n"
    )
    with (tmp_path / "kvspec" / "__init__.py").open("a") as module:
        module.write(slow)
    head, *rows = compare(str(tmp_path), "--rounds", "1", "--only", "plan_transfer, W1")
    assert ["this", "other", "ratio"] == head.split()[-3:]
    assert ["faster"] * 3 == [row.split()[-1] for row in rows]


def test_compare_prints_the_error_of_a_checkout(tmp_path: Path) -> None:
    """An older kvspec may lack a function that a row calls."""
    shutil.copytree(BENCH.parent / "kvspec", tmp_path / "kvspec")
    with (tmp_path / "kvspec" / "__init__.py").open("a") as module:
        module.write("def plan_transfer(*arguments):\n    raise TypeError('no such argument')\n")
    _, row = compare(str(tmp_path), "--rounds", "1", "--only", "plan_transfer, W1,")
    assert row.endswith("TypeError: no such argument")


def test_compare_rejects_a_folder_without_kvspec(tmp_path: Path) -> None:
    """The folder must be another checkout."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        compare(str(tmp_path))
    assert "checkout" in caught.value.stderr


def test_compare_runs_a_checkout_that_has_the_old_name_of_plan_memory(tmp_path: Path) -> None:
    """Checkouts before 0.1.0 have `lay_out` instead."""
    shutil.copytree(BENCH.parent / "kvspec", tmp_path / "kvspec")
    with (tmp_path / "kvspec" / "__init__.py").open("a") as module:
        module.write("lay_out = plan_memory\ndel plan_memory\n")
    _, *rows = compare(str(tmp_path), "--rounds", "1", "--only", ", W3")
    assert len(rows) == 4
    assert not [row for row in rows if "cannot" in row]
