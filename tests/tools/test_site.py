"""Test what scripts/site assembles and checks. The script itself builds the site."""

from __future__ import annotations

import doctest
import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[2]


def _site() -> ModuleType:
    """Return docs/site/build.py as a module."""
    path = ROOT / "docs" / "site" / "build.py"
    spec = importlib.util.spec_from_file_location("build_site", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = _site()


@pytest.fixture
def assembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Assemble the pages of the site in a folder of the test."""
    monkeypatch.setattr(SITE, "SITE", tmp_path)
    monkeypatch.setattr(SITE, "PAGES", tmp_path / "pages")
    SITE.assemble()
    return tmp_path


def test_diagrams_are_pictures_that_need_no_script(assembled: Path) -> None:
    page = (assembled / "pages" / "ledgers.md").read_text("utf-8")
    source = (ROOT / "docs" / "ledgers.md").read_text("utf-8")
    assert "mermaid" not in page
    assert source.count("```mermaid") == page.count('<svg class="states"') > 0


def test_other_diagrams_are_refused_by_the_build() -> None:
    with pytest.raises(ValueError, match="pie"):
        SITE.state_diagrams.drawn("```mermaid\npie\n```")


def test_reference_has_every_public_name() -> None:
    """Each name of docs/public-names.md is in the reference page of its module, and no other."""
    listed = (ROOT / "docs" / "public-names.md").read_text(encoding="utf-8")
    expected = {
        f"{module}.{name}"
        for module, names in SITE.NAMES.findall(listed)
        for name in re.findall(r"`(\w+)`", names)
    }
    pages = SITE.reference_pages().values()
    described = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    assert sorted(expected) == sorted(described)


def test_navigation_has_every_page(assembled: Path) -> None:
    """Each page of the repository that is documentation can be reached from the navigation."""
    config = tomllib.loads((assembled / "zensical.toml").read_text(encoding="utf-8"))
    listed = [
        page
        for section in config["project"]["nav"]
        for entries in section.values()
        for entry in ([{"": entries}] if isinstance(entries, str) else entries)
        for page in entry.values()
    ]
    written = {str(page.relative_to(assembled / "pages")) for page in assembled.rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert {SITE.address(page) for page in ROOT.glob("docs/*.md")} <= set(listed)
    assert set(listed) <= written


def test_links_between_pages_exist_on_the_site(assembled: Path) -> None:
    missing = [
        f"{page.name}: {link}"
        for page in assembled.rglob("*.md")
        for link in SITE.LINK.findall(SITE.FENCED.sub("", page.read_text(encoding="utf-8")))
        if "://" not in link and not link.startswith("#")
        if not (page.parent / link.partition("#")[0]).is_file()
    ]
    assert [] == missing


def test_check_finds_broken_links_and_anchors(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="top"></h1><a href="b.html#one"></a>')
    (tmp_path / "b.html").write_text(
        '<h1 id="one"></h1><a href="a.html#top"></a><a href="https://example.org/x"></a>'
        '<a href="a.html#two"></a><img src="c.svg">'
    )
    assert ["b.html: a.html#two", "b.html: c.svg"] == sorted(SITE.broken_links(tmp_path))


def test_check_finds_public_names_without_an_anchor(tmp_path: Path) -> None:
    """A reference with one page and one name lacks all others."""
    (tmp_path / "reference").mkdir()
    page = tmp_path / "reference" / "kvspec.wire.html"
    page.write_text('<h2 id="kvspec.wire.VERSION"></h2>')
    missing = list(SITE.missing_names(tmp_path))
    assert "kvspec.wire.VERSION" not in missing
    assert {"kvspec.session.Session", "kvspec.explain"} <= set(missing)


def test_examples_of_the_builder_print_the_shown_output() -> None:
    failed, tried = doctest.testmod(SITE)
    assert (0, True) == (failed, tried > 2)
