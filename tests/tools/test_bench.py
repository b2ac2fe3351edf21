"""The bench runs and prints its table. Nothing here is timed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def bench(*arguments: str) -> list[str]:
    """Return the lines that the bench prints."""
    command = [sys.executable, str(BENCH / "run.py"), *arguments]
    done = subprocess.run(  # noqa: S603 - our own program
        command, check=True, capture_output=True, text=True, timeout=300
    )
    return done.stdout.splitlines()


def test_the_table_has_a_row_for_each_budget() -> None:
    """One line names the machine, one the columns; each budget asked for has its rows."""
    asked = ("B1", "B2", "B4", "B11", "B12", "B13", "DIGEST")
    machine, columns, rule, *rows, load = bench("--quick", "--only", ",".join(asked))
    assert machine.startswith("machine: ")
    for word in ("cores", "Python", "numpy", "torch", "nixl"):
        assert word in machine
    assert ["budget", "what", "ours", "other", "ratio", "required", "met"] == columns.split()
    assert {"-"} == set(rule.replace(" ", ""))
    assert load.startswith("load at the end: ")
    assert set(asked) == {row.split()[0] for row in rows}


def test_every_budget_is_explained() -> None:
    """The page has a row for each that there is, in their order."""
    page = (BENCH / "README.md").read_text("utf-8")
    source = (BENCH / "run.py").read_text("utf-8")
    assert re.findall(r'^    "(\w+)": ', source, re.MULTILINE) == re.findall(
        r"^\| ([A-Z]\w+) \|", page, re.MULTILINE
    )


def test_what_must_not_depend_on_blocks_does_not() -> None:
    """B4's rows of stages, unequal blocks and context ranks are as many in a sixteenth's pools."""
    rows = [row.split() for row in bench("--quick", "--only", "B4") if "  rows, pools" in row]
    assert ["yes"] * 5 == [row[-1] for row in rows]


def test_our_count_is_nixls_rule() -> None:
    """B6 counts what is posted by itself, and `counts` agrees in every case of every kind."""
    rows = bench("--quick", "--only", "B6")
    for kind in ("equal blocks", "unequal blocks", "kernel blocks", "context ranks"):
        assert 2 == sum(f", {kind}: " in row for row in rows)
    [agreed] = [row.split() for row in rows if "counts() differs" in row]
    assert ["0", "0", "yes"] == agreed[-3:]


def test_the_choice_is_beside_both_ways() -> None:
    """B8 calibrates, and moves short runs through the area and long ones directly."""
    pytest.importorskip("nixl_cu13", reason="needs nixl")
    rows = [row for row in bench("--quick", "--only", "B8") if row.startswith("B8")]
    assert "runs of 128 B" in rows[0]
    assert "runs of 64 KiB" in rows[-1]
    for row, way in ((rows[0], "staged (other"), (rows[-1], "direct (other")):
        assert way in row


def test_an_unknown_budget_is_refused() -> None:
    """A budget that does not exist is named, with those that do."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        bench("--only", "B99")
    assert "B99" in caught.value.stderr
    assert "B10" in caught.value.stderr


def test_without_mooncake_the_row_says_how() -> None:
    """An interpreter without Mooncake is no error: the row says that it is not installed."""
    rows = bench("--quick", "--only", "B3", "--mooncake-python", "/nonexistent/python")
    assert any("not installed" in row for row in rows)


def compare(*arguments: str) -> list[str]:
    """Return the lines that the comparison of two checkouts prints."""
    command = [sys.executable, str(BENCH / "compare.py"), *arguments]
    done = subprocess.run(  # noqa: S603 - our own program
        command, check=True, capture_output=True, text=True, timeout=300
    )
    return done.stdout.splitlines()


def test_two_checkouts_are_compared(tmp_path: Path) -> None:
    """The other's kvspec is what is compared with: one that is made slow shows, row by row."""
    shutil.copytree(BENCH.parent / "kvspec", tmp_path / "kvspec")
    slow = "import time\nimport kvspec.plan.plan\n_fast = plan_transfer\n"
    slow += "def plan_transfer(*given):\n    list(range(2 * 10**6))\n    return _fast(*given)\n"
    with (tmp_path / "kvspec" / "__init__.py").open("a") as module:
        module.write(slow)
    head, *rows = compare(str(tmp_path), "--rounds", "3", "--only", "plan_transfer, W1")
    assert ["this", "other", "ratio"] == head.split()[-3:]
    assert ["faster"] * 3 == [row.split()[-1] for row in rows]


def test_a_row_that_a_checkout_lacks_says_so(tmp_path: Path) -> None:
    """An older kvspec may not know what a row calls."""
    shutil.copytree(BENCH.parent / "kvspec", tmp_path / "kvspec")
    with (tmp_path / "kvspec" / "__init__.py").open("a") as module:
        module.write("def plan_transfer(*given):\n    raise TypeError('of other things')\n")
    _, row = compare(str(tmp_path), "--rounds", "1", "--only", "plan_transfer, W1,")
    assert row.endswith("the other cannot: TypeError: of other things")


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    """A folder without kvspec is named as what was wanted."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        compare(str(tmp_path))
    assert "expected the folder of another checkout" in caught.value.stderr


def test_compare_runs_a_checkout_that_has_the_old_name_of_plan_memory(tmp_path: Path) -> None:
    """Checkouts before 0.1.0 call it `lay_out`."""
    shutil.copytree(BENCH.parent / "kvspec", tmp_path / "kvspec")
    with (tmp_path / "kvspec" / "__init__.py").open("a") as module:
        module.write("lay_out = plan_memory\ndel plan_memory\n")
    _, *rows = compare(str(tmp_path), "--rounds", "1", "--only", ", W3")
    assert len(rows) == 4
    assert not [row for row in rows if "cannot" in row]
