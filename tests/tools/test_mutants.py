"""What judges mutants does not rot: its tests exist, and what is called equivalent is there.

cosmic-ray is not needed here, so nothing is planted.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

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
def test_the_judges_are_there(package: str) -> None:
    """Every package of the core is judged by tests that exist."""
    judges = MUTANTS.JUDGES[package]
    assert judges
    assert [] == [path for path in judges if not (ROOT / path).is_file()]


def test_what_is_called_equivalent_has_its_line_and_a_reason() -> None:
    """The line before is a line, or several, of the file named; it changes, and it is said why."""
    for (path, before, after), reason in MUTANTS.equivalents().items():
        source = " ".join(line.strip() for line in (ROOT / path).read_text().splitlines())
        assert before in source, f"{path}: {before}"
        assert before != after
        assert reason


def test_a_change_of_annotations_is_no_fault() -> None:
    """Annotations and what does not compile are left out; any other change is where it says."""
    source = "def half(x: int | None) -> int:\n    return x // 2\n"
    assert None is MUTANTS.changed("a.py", source, source.replace("|", "&"))
    assert None is MUTANTS.changed("a.py", source, source.replace("//", "!"))
    fault = MUTANTS.changed("a.py", source, source.replace("//", "*"))
    assert "a.py:2\n- return x // 2\n+ return x * 2" == str(fault)


def test_equivalents_do_not_count() -> None:
    """The score is of those killed among the killed and the survivors."""
    faults = [MUTANTS.Mutant("kvspec/a.py", line, "x", "y", "y") for line in range(6)]
    verdicts = ["killed", "killed", "killed", "survived", "equivalent", "equivalent"]
    lines = MUTANTS.report(list(zip(faults, verdicts, strict=True))).splitlines()
    assert ["all", "6", "3", "1", "2", "75.0", "%"] == lines[2].split()
    assert ["kvspec/a.py:3", "- x", "+ y"] == lines[4:7]
