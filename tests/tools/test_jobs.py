"""Test that each test file belongs to exactly one job of `.ci/run`."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("tests/*/test_*.py"))
# Each job of a folder, such as: `pages) quick tests/tools "pages" ;;`
JOB = re.compile(
    r'^ +(\w+)\) (?:\w+=\w+ )?(?:quick|measured) tests/(\w+)(?: "(.*)")? ;;$', re.MULTILINE
)
AGAIN = "covered"
"""The job that runs files of another job a second time."""
JOBS = [found for found in JOB.findall((ROOT / ".ci" / "run").read_text()) if found[0] != AGAIN]
MARKERS = {word for *_, markers in JOBS for word in markers.split()} - {"", "and", "not"}


def markers_of(file: Path) -> Counter[str]:
    """Return how often each marker of a job occurs in `pytestmark`, and elsewhere in *file*."""
    found: Counter[str] = Counter()
    for node in ast.parse(file.read_text()).body:
        names = [target.id for target in getattr(node, "targets", []) if hasattr(target, "id")]
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and part.attr in MARKERS:
                of_marks = ast.unparse(part.value) == "pytest.mark"
                found[part.attr if names == ["pytestmark"] else "elsewhere"] += of_marks
    return +found


def selected(markers: str, own: Counter[str]) -> bool:
    """Return whether a job selects a file with its *own* markers."""
    words = [word.removeprefix("not ") for word in markers.split(" and ") if word]
    return all((own[word] > 0) != (f"not {word}" in markers) for word in words)


def test_jobs_are_found() -> None:
    names = {name for name, *_ in JOBS}
    assert {"adapters", "commands", "faults", "laws", "pages", "session", "tools"} == names
    assert {"adapters", "commands", "faults", "pages"} == MARKERS


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_file_belongs_to_one_job(file: Path) -> None:
    """A folder without a job of its own is the job of its name. All of it is one job then."""
    own, folder = markers_of(file), file.parent.name
    assert "elsewhere" not in own
    jobs = [name for name, where, markers in JOBS if where == folder and selected(markers, own)]
    if folder in {where for _, where, _ in JOBS}:
        assert 1 == len(jobs)
    else:
        assert not own
