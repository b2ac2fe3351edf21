"""Test that the examples in the documentation print the shown output, and that links exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`((?:kvspec|tests|docs|fuzz|bench|scripts)/[\w./-]+\.\w+)`")


def _refresher() -> ModuleType:
    """Return docs/refresh_outputs.py as a module."""
    path = ROOT / "docs" / "refresh_outputs.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFRESHER = _refresher()


@pytest.mark.parametrize("page", REFRESHER.pages(), ids=lambda page: page.name)
def test_examples_of_page_print_the_shown_output(page: Path) -> None:
    """The examples run in a process of their own. `docs/refresh_outputs.py` updates the page."""
    assert REFRESHER.executed_alone(page) == page.read_text(encoding="utf-8")


def test_pages_with_examples_are_found() -> None:
    """The search finds the pages, so the other test is not empty."""
    names = {page.name for page in REFRESHER.pages()}
    assert {"README.md", "plan.md", "session.md"} <= names


GENERATED = REFRESHER.generated()


@pytest.mark.parametrize("path", sorted(GENERATED), ids=lambda path: path.name)
def test_generated_file_is_up_to_date(path: Path) -> None:
    """Tables and pictures equal those that the code generates. The script updates them, too."""
    assert GENERATED[path] == path.read_text(encoding="utf-8")


def test_refresh_replaces_inserts_and_removes_output(tmp_path: Path) -> None:
    """One step mends wrong, missing and needless output."""
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\nprint(x)\n```\n\n```text\n2\n```\n\n"
        "Text.\n\n```python\nprint(x + 1)\n```\n\n"
        "```python\nx\n```\n\n```text\n5\n```\n",
        encoding="utf-8",
    )
    refreshed = REFRESHER.executed(page)
    assert refreshed == (
        "```python\nx = 1\nprint(x)\n```\n\n```text\n1\n```\n\n"
        "Text.\n\n```python\nprint(x + 1)\n```\n\n```text\n2\n```\n\n"
        "```python\nx\n```\n"
    )


def test_refresh_reports_a_failing_example(tmp_path: Path) -> None:
    """The error contains the name of the exception and the line of the page."""
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\n1 / 0\n```\n", encoding="utf-8")
    with pytest.raises(RuntimeError) as raised:
        REFRESHER.executed_alone(page)
    assert "ZeroDivisionError" in str(raised.value)
    assert f'"{page}", line 4' in str(raised.value)


def _anchor(heading: str) -> str:
    """Return the anchor of a heading on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _anchors(page: Path) -> set[str]:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    return {_anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_page_exist(page: Path) -> None:
    """Each linked file is in the repository, and each linked section in its page."""
    missing = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if link.startswith("https://"):
            continue
        if not target.is_file() or (anchor and anchor not in _anchors(target)):
            missing.append(link)
    assert [] == missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_page_exist(page: Path) -> None:
    """A path in backticks names a file, so renaming a file must change the page."""
    paths = FILE.findall(page.read_text(encoding="utf-8"))
    assert [] == [path for path in paths if not (ROOT / path).is_file()]


def test_architecture_page_lists_every_layer() -> None:
    """The table has the rows of the picture in CONTRIBUTING.md. Another test checks the picture."""
    picture = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    layers = picture.partition("```text layers\n")[2].partition("```")[0].splitlines()
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Layers of folders")[2]
    rows = re.findall(r"^\| \d+ \| (.+?) \|", table, re.MULTILINE)
    folders = [" ".join(re.findall(r"`([^`]+)`", row)) for row in rows]
    assert [row.replace("kvspec/__init__.py", "kvspec") for row in folders] == layers


def test_two_processes_example_moves_a_request() -> None:
    """docs/two_processes.py runs as its docstring describes."""
    pytest.importorskip("nixl_cu13", reason="needs nixl")
    done = subprocess.run(  # noqa: S603 - our own interpreter and file
        [sys.executable, ROOT / "docs" / "two_processes.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        # Unbuffered output would write a line in pieces, between those of the other process.
        env={"UCX_NET_DEVICES": "lo", **os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert 0 == done.returncode, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert ["consumer: done", "producer, freed: done", "producer, freed: done"] == lines
