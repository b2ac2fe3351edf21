"""Test that the lists of judges and of equivalent mutants match the package.

These tests make no mutants, so they do not need cosmic-ray.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    """Return the command as a module."""
    spec = importlib.util.spec_from_file_location("fuzz_mutants", ROOT / "fuzz" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MUTANTS = load()


@pytest.mark.parametrize("package", ["first", *MUTANTS.CORE])
def test_judges_of_a_package_exist(package: str) -> None:
    """The judges of each package of the core are test files."""
    judges = MUTANTS.JUDGES[package]
    assert judges
    assert [] == [path for path in judges if not (ROOT / path).is_file()]


def test_equivalent_mutants_have_their_line_and_a_reason() -> None:
    """The source still contains the line before the change."""
    for (path, before, after), reason in MUTANTS.equivalents().items():
        source = " ".join(line.strip() for line in (ROOT / path).read_text().splitlines())
        assert before in source, f"{path}: {before}"
        assert before != after
        assert reason


def test_change_of_an_annotation_is_not_a_mutant() -> None:
    """A change that does not compile is not a mutant either."""
    source = "def half(x: int | None) -> int:\n    return x // 2\n"
    assert None is MUTANTS.changed("a.py", source, source.replace("|", "&"))
    assert None is MUTANTS.changed("a.py", source, source.replace("//", "!"))
    fault = MUTANTS.changed("a.py", source, source.replace("//", "*"))
    assert "a.py:2\n- return x // 2\n+ return x * 2" == str(fault)


def test_score_excludes_equivalent_mutants() -> None:
    """The score is the share of killed mutants among killed and surviving ones."""
    faults = [MUTANTS.Mutant("kvspec/a.py", line, "x", "y", "y") for line in range(6)]
    verdicts = ["killed", "killed", "killed", "survived", "equivalent", "equivalent"]
    lines = MUTANTS.report(list(zip(faults, verdicts, strict=True))).splitlines()
    assert ["all", "6", "3", "1", "2", "75.0", "%"] == lines[2].split()
    assert ["kvspec/a.py:3", "- x", "+ y"] == lines[4:7]


def test_record_keeps_only_killed_mutants(tmp_path: Path) -> None:
    """Survivors are judged again, because a new test may kill them."""
    file = tmp_path / "record.jsonl"
    dead, alive = (MUTANTS.Mutant("kvspec/a.py", line, "x", "y", "y") for line in (1, 2))
    record = MUTANTS.Record(file)
    record.add(dead, "killed")
    record.add(alive, "survived")
    assert {str(dead)} == MUTANTS.Record(file).killed
    assert set() == MUTANTS.Record(None).killed
