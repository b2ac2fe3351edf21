"""Write into the documentation what the code prints, draws and lists.

```sh
python docs/refresh_outputs.py           # rewrite all that is out of date, and print its name
python docs/refresh_outputs.py --check   # rewrite nothing; exit with 1 if anything is out of date
```

Three kinds of text come from the code:

- Output blocks. The blocks marked `python` of a page run one after the other, in one process for
  each page. The output of a block is in the block marked `text` that follows it. If a block prints
  and no such block follows, one is inserted.
- Lists: the states of a `TransferError` in limits.md, the laws in CONTRIBUTING.md, and ledgers.md.
- Pictures: the files `*.svg`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
BLOCK = re.compile(r"^```python\n(.*?)^```\n(\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
TIMEOUT = 120  # Seconds for the examples of one page. The slowest page takes a few.


def pages() -> list[Path]:
    """Return the pages with examples: README.md and those in docs."""
    candidates = (ROOT / "README.md", *sorted(DOCS.glob("**/*.md")))
    return [page for page in candidates if BLOCK.search(page.read_text(encoding="utf-8"))]


def executed(page: Path) -> str:
    """Run the examples of *page* in this process and return its text with their output."""
    names: dict[str, object] = {"__name__": "__page__"}

    def run(block: re.Match[str]) -> str:
        source, printed = block[1], io.StringIO()
        line = block.string.count("\n", 0, block.start(1))
        # Empty lines before the source give tracebacks the line numbers of the page.
        code = compile("\n" * line + source, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)  # noqa: S102 - the documentation's own examples
        # A line that begins with ``` would end the block. No example prints one.
        output = f"\n```text\n{printed.getvalue()}```\n" if printed.getvalue() else ""
        return f"```python\n{source}```\n{output}"

    return BLOCK.sub(run, page.read_text(encoding="utf-8"))


def executed_alone(page: Path) -> str:
    """Run the examples of *page* in a process of their own and return its text."""
    with tempfile.TemporaryDirectory() as folder:
        # The result comes through a file, because NIXL and UCX may print to stdout.
        result = Path(folder) / "page.md"
        command = [sys.executable, __file__, "--execute", str(page), str(result)]
        done = subprocess.run(  # noqa: S603 - this file
            command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=TIMEOUT
        )
        if done.returncode:
            raise RuntimeError(f"the examples of {page.name} failed:\n{done.stderr}")
        return result.read_text(encoding="utf-8")


def _execute(page: Path, result: Path) -> None:
    """Run the examples of *page* in this process, with the environment variables that they need."""
    os.environ.setdefault("KVSPEC_SECRET", "the secret of the documentation")
    # UCX must not try a network device that reaches no peer.
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    from kvspec.testing import FakeNixl  # noqa: PLC0415 - only this process needs it

    # Without NIXL the examples run over a replacement in memory.
    nixl = contextlib.nullcontext() if importlib.util.find_spec("nixl_cu13") else FakeNixl()
    with nixl:
        result.write_text(executed(page), encoding="utf-8")


def limits_page(text: str) -> str:
    """Return limits.md with the present states of a `TransferError`."""
    from kvspec import TransferState  # noqa: PLC0415 - see `_execute`

    rows = [
        f"| `{state}` | {state.side} | {state.meaning} | {state.remedy} |"
        for state in TransferState
    ]
    return _with_rows(text, "## States of a `TransferError`", rows)


def laws_page(text: str) -> str:
    """Return CONTRIBUTING.md with the present laws."""
    from kvspec.testing.laws import LAWS  # noqa: PLC0415 - see `_execute`

    rows = [f"| {law.number} | {law.name} | {law.sentence} |" for law in LAWS]
    return _with_rows(text, "## The laws", rows)


def _with_rows(text: str, heading: str, rows: list[str]) -> str:
    """Replace the rows of the first table after *heading*."""
    before, found, after = text.partition(f"\n{heading}\n")
    rule = re.search(r"^\|( ?-+ ?\|)+\n", after, re.MULTILINE)
    if not found or rule is None:
        raise ValueError(f"no table after {heading!r}")
    rest = re.sub(r"\A(\|.*\n)*", "", after[rule.end() :])
    return before + found + after[: rule.end()] + "".join(f"{row}\n" for row in rows) + rest


def generated() -> dict[Path, str]:
    """Return the present text of every file that the code determines, apart from the examples."""
    files = {
        DOCS / "ledgers.md": _script("draw_ledgers").page(),
        DOCS / "idea.svg": _script("draw_idea").draw(),
    }
    pictures = _script("draw_pictures").pictures()
    files |= {DOCS / name: f"{picture}\n" for name, picture in pictures.items()}
    edits: dict[Path, Callable[[str], str]] = {
        DOCS / "limits.md": limits_page,
        ROOT / "CONTRIBUTING.md": laws_page,
    }
    return files | {path: edit(path.read_text(encoding="utf-8")) for path, edit in edits.items()}


def _script(name: str):  # noqa: ANN202 - a module, whose functions no type checker knows
    """Return a script of this folder as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Rewrite what is out of date, or with ``--check`` only name it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="rewrite nothing")
    parser.add_argument("--execute", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.execute:
        _execute(*options.execute)
        return 0
    files = {page: executed_alone(page) for page in pages()} | generated()
    stale = [path for path, text in files.items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(path.relative_to(ROOT))
        if not options.check:
            path.write_text(files[path], encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
