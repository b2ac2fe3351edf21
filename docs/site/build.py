"""Build the documentation site in build/site/html and check it. `scripts/site` runs this file.

How it works:
    1. `assemble` copies every page of the repository to build/site/pages. Links between pages keep
       their meaning, because `moved` rewrites them. A linked file that is no page, such as an
       example, becomes a page with its source. `state_diagrams` draws the diagrams.
    2. `reference` writes one page for each public module, with every name of its `__all__`.
    3. Zensical builds the pages. Any warning is an error.
    4. `broken_links` reads the HTML and finds links, pictures and anchors that do not exist.
    5. `missing_names` finds public names that the reference does not describe.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import kvspec

sys.path.insert(0, str(Path(__file__).parent))  # A test loads this file from elsewhere.
import state_diagrams

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
PAGES, HTML = SITE / "pages", SITE / "html"

NAVIGATION = {
    "Home": ["README.md"],
    "Tutorials": ["docs/move-a-cache.md", "docs/test-your-connector.md"],
    "How-to guides": [
        "docs/replace-the-ratio.md",
        "docs/plan.md",
        "docs/session.md",
        "docs/recipes.md",
        "docs/adapters.md",
        "docs/staging.md",
        "docs/stored.md",
        "docs/files.md",
        "docs/foreign-pages.md",
        "examples/README.md",
        "docs/commands.md",
        "docs/view.md",
        "docs/launchers.md",
    ],
    "Engines": [
        "docs/vllm-pair.md",
        "docs/sglang.md",
        "docs/transformers.md",
        "docs/cross-engine.md",
    ],
    "Operate": [
        "docs/operate/start.md",
        "docs/operate/network.md",
        "docs/operate/secrets.md",
        "docs/operate/health.md",
        "docs/metrics.md",
        "docs/operate/sizing.md",
        "docs/operate/failures.md",
        "docs/operate/upgrade.md",
        "docs/operate/kubernetes.md",
        "docs/operate/stored-pages.md",
        "docs/operate/engine-limits.md",
        "docs/serve-pair.md",
    ],
    "Rules": [
        "docs/spec.md",
        "docs/wire.md",
        "docs/ledgers.md",
        "docs/faults.md",
        "docs/limits.md",
        "docs/security.md",
    ],
    "Evidence": [
        "conformance/README.md",
        "docs/museum.md",
        "vectors/README.md",
        "docs/kvbench.md",
        "docs/proof.md",
        "bench/README.md",
        "fuzz/README.md",
    ],
    "Reference": ["docs/public-names.md"],
    "Project": ["docs/architecture.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}
"""The pages of each section. A page that does not exist yet is left out.

A page of `docs` that is not listed here appears at the end of the section "Project".
"""

FIRST = ("kvspec.session", "kvspec", "kvspec.tickets", "kvspec.nixl", "kvspec.models")
"""The modules that begin the reference, most used first. The others follow by name."""

BEGINNING = {"kvspec.session": ("Session", "Load", "TcpChannel", "Channel")}
"""The names that begin the page of a module. The others follow in the order of its `__all__`."""

SHOWN = {"", ".cpp", ".json", ".py", ".rs", ".sh", ".toml", ".txt", ".yml"}
"""Linked files with these suffixes become pages with their source. Others are copied."""

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WORDS = re.compile(r"^(```\w+) .+$", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
HEADING = re.compile(r"^# (.+)$", re.MULTILINE)
NAMES = re.compile(r"^\| `(kvspec[\w.]*)` \| (.*) \|$", re.MULTILINE)


def sections() -> dict[str, list[Path]]:
    """Return the files of the pages that exist, by section."""
    found = {
        section: [ROOT / page for page in pages if (ROOT / page).is_file()]
        for section, pages in NAVIGATION.items()
    }
    listed = {page for pages in found.values() for page in pages}
    found["Project"] += [page for page in sorted(ROOT.glob("docs/**/*.md")) if page not in listed]
    return found


def address(file: Path) -> str:
    """Return the path of a file of the repository on the site.

    >>> address(ROOT / "README.md"), address(ROOT / "docs" / "session.md")
    ('index.md', 'session.md')
    >>> address(ROOT / "bench" / "README.md"), address(ROOT / "docs" / "two_processes.py")
    ('bench.md', 'source/docs/two_processes.py.md')
    """
    path = file.relative_to(ROOT)
    if path == Path("README.md"):
        return "index.md"
    if path.suffix == ".md":
        parent = Path(*path.parts[1:-1]) if path.parts[0] == "docs" else path.parent
        return str(
            parent.with_suffix(".md") if path.stem == "README" else parent / path.name.lower()
        )
    return f"source/{path}.md" if path.suffix in SHOWN else str(path)


def title(file: Path) -> str:
    """Return the first heading of a page, without the marks of code."""
    heading = HEADING.search(file.read_text(encoding="utf-8"))
    return heading[1].replace("`", "") if heading else file.stem


def relative(target: str, page: str) -> str:
    """Return the link from a *page* of the site to *target*."""
    return os.path.relpath(target, Path(page).parent)


def rewritten(file: Path, linked: set[Path]) -> str:
    """Return the text of a page with the links of the site. Add the linked files to *linked*."""

    def moved(link: re.Match[str]) -> str:
        name, mark, anchor = link[0].partition("#")
        if "://" in name or not name:
            return link[0]
        target = (file.parent / name).resolve()
        if target.is_file():  # The pages of the reference are in no folder.
            linked.add(target)
        return relative(address(target), address(file)) + mark + anchor

    text = file.read_text(encoding="utf-8")
    if file == ROOT / "docs" / "public-names.md":
        text = NAMES.sub(_linked_names, text)
    # Zensical takes a fence with more words than the language for a paragraph.
    text = WORDS.sub(r"\1", text)
    # Code contains brackets that look like links.
    rest = FENCED.split(text)
    blocks = [*map(_picture, FENCED.findall(text)), ""]
    return "".join(LINK.sub(moved, part) + block for part, block in zip(rest, blocks, strict=True))


def _picture(fence: str) -> str:
    """Return a fence as it is, or as SVG if it is a diagram."""
    return state_diagrams.drawn(fence) if fence.startswith("```mermaid") else fence


def _linked_names(row: re.Match[str]) -> str:
    """Return a row of the table of public names, whose names are links to the reference."""
    page = f"reference/{row[1]}.md"
    names = re.sub(r"`(\w+)`", lambda name: f"[`{name[1]}`](../{page}#{row[1]}.{name[1]})", row[2])
    return f"| [`{row[1]}`](../{page}) | {names} |"


def reference(module_name: str) -> str:
    """Return the page of a public module: every name of its `__all__`."""
    module = import_module(module_name)
    beginning = BEGINNING.get(module_name, ())
    ordered = dict.fromkeys((*beginning, *module.__all__))
    names = [name for name in ordered if not inspect.ismodule(getattr(module, name))]
    summary = (module.__doc__ or "").partition("\n")[0]
    # Each name is an identifier of its own, so that its anchor is its public path.
    return f"# `{module_name}`\n\n{summary}\n\n" + "".join(
        f"::: {module_name}.{name}\n    options:\n"
        f"      inherited_members: {_inherits_unseen(getattr(module, name))}\n\n"
        for name in names
    )


def _inherits_unseen(value: object) -> bool:
    """Return whether a class inherits from classes of the package that are not public."""
    own = (each for each in getattr(value, "__mro__", ())[1:] if "kvspec." in each.__module__)
    return inspect.isclass(value) and not any(each.__name__ in kvspec.__all__ for each in own)


def reference_pages() -> dict[str, str]:
    """Return the text of each page of the reference, by its path on the site."""
    rest = sorted({f"kvspec.{name}" for name in kvspec.ON_DEMAND} - set(FIRST))
    return {f"reference/{module}.md": reference(module) for module in (*FIRST, *rest)}


def assemble() -> None:
    """Write all pages, and the configuration with the navigation."""
    shutil.rmtree(SITE, ignore_errors=True)
    found = sections()
    waiting = [page for pages in found.values() for page in pages]
    seen = set(waiting)
    while waiting:
        file = waiting.pop()
        target = PAGES / address(file)
        if file.suffix == ".md":
            linked: set[Path] = set()
            _write(target, rewritten(file, linked))
            waiting += linked - seen
            seen |= linked
        elif file.suffix in SHOWN:
            language = file.suffix.removeprefix(".") or "sh"
            source = file.read_text(encoding="utf-8")
            _write(target, f"# {file.relative_to(ROOT)}\n\n````{language}\n{source}````\n")
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    api = reference_pages()
    for name, text in api.items():
        _write(PAGES / name, text)
    shutil.copy(Path(__file__).with_name("style.css"), PAGES)
    navigation = [
        {name: [{title(page): address(page)} for page in pages]}
        for name, pages in found.items()
        if pages
    ]
    navigation[0] = {"Home": "index.md"}
    public = next(section["Reference"] for section in navigation if "Reference" in section)
    public += [{Path(name).stem: name} for name in api]
    configuration = Path(__file__).with_name("zensical.toml").read_text(encoding="utf-8")
    nav = f"[project]\nnav = {_toml(navigation)}\n"
    _write(SITE / "zensical.toml", configuration.replace("[project]\n", nav, 1))


def _toml(value: object) -> str:
    """Return lists, mappings and texts as TOML, whose texts are those of JSON.

    >>> _toml([{"Home": "index.md"}])
    '[{"Home" = "index.md"}]'
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(k)} = {_toml(v)}' for k, v in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


class _Page(HTMLParser):
    """Collects the anchors of a page, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the attributes of one tag."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag != "base":
            self.targets += [values[name] for name in ("href", "src") if name in values]


def broken_links(folder: Path) -> Iterator[str]:
    """Yield the links of all pages in *folder* to files or anchors that do not exist."""
    pages = {
        file.resolve(): _Page(file.read_text(encoding="utf-8")) for file in folder.rglob("*.html")
    }
    for file, page in pages.items():
        # The page for wrong addresses has absolute links, because it has no address of its own.
        base = folder if file.name == "404.html" else file.parent
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = unquote(parts.path).removeprefix("/" if base == folder else "")
            other = (base / path).resolve() if path else file
            if other.is_dir():
                other /= "index.html"
            anchors = pages[other].anchors if other in pages else {parts.fragment}
            if not other.is_file() or unquote(parts.fragment) not in anchors:
                yield f"{file.relative_to(folder.resolve())}: {target}"


def missing_names(folder: Path) -> Iterator[str]:
    """Yield the public names without an anchor in the reference of the site in *folder*."""
    listed = (ROOT / "docs" / "public-names.md").read_text(encoding="utf-8")
    for module, names in NAMES.findall(listed):
        file = folder / "reference" / f"{module}.html"
        anchors = _Page(file.read_text(encoding="utf-8")).anchors if file.is_file() else set()
        whole = {f"{module}.{name}" for name in re.findall(r"`(\w+)`", names)}
        yield from sorted(whole - anchors)


def main() -> int:
    """Build the site, check it, and print where it is."""
    assemble()
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run([*command, "-f", SITE / "zensical.toml"], check=False, cwd=SITE)  # noqa: S603
    if done.returncode:
        return done.returncode
    faults = [f"broken link: {link}" for link in broken_links(HTML)]
    faults += [f"not in the reference: {name}" for name in missing_names(HTML)]
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    pages = len(list(HTML.rglob("*.html")))
    if not faults:
        print(f"{pages} pages, all links and anchors exist: {HTML / 'index.html'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
