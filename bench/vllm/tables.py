"""Run the rows of a comparison, print them as a table, and write the table into a page."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

# Whether a row has the outcome that it should have, and its cells. The generator returns the
# versions of packages.
Rows = Generator[tuple[bool, Sequence[str]], None, str]


def run(
    parser: argparse.ArgumentParser,
    columns: Sequence[str],
    rows: Callable[[argparse.Namespace, Path], Rows],
) -> None:
    """Parse the arguments and run the rows. Exit with 1 unless all have the outcome they should.

    Args:
        parser: Has the arguments that choose among the rows. They may not be used with ``--page``.
        columns: The names of the columns.
        rows: Runs the rows, with the arguments and the folder for models and logs.
    """
    narrowing = [action.dest for action in parser._actions if action.dest != "help"]  # noqa: SLF001
    parser.add_argument(
        "--folder", type=Path, help="folder for models and logs; a temporary one by default"
    )
    parser.add_argument(
        "--page", type=Path, help="a page whose table is replaced by the table of this run"
    )
    chosen = parser.parse_args()
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    # The table on a page, and the line below it.
    table = re.compile(re.escape(head) + r"\n(\|.*\n)*\n.*\n")
    if chosen.page and any(getattr(chosen, name) for name in narrowing):
        parser.error(f"a page shows a whole run: without --{' and --'.join(narrowing)}")
    if chosen.page and not table.search(chosen.page.read_text(encoding="utf-8")):
        parser.error(f"{chosen.page} has no such table")
    os.environ.setdefault("KVSPEC_SECRET", secrets.token_hex())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    start, lines, failed = time.monotonic(), [head], False
    print(head, flush=True)
    with contextlib.ExitStack() as stack:
        folder = chosen.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # vLLM takes a relative path for the name of a model.
        found = rows(chosen, folder.resolve())
        stack.callback(found.close)
        while True:
            try:
                right, row = next(found)
            except StopIteration as end:
                versions = end.value
                break
            failed |= not right
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
    minutes = (time.monotonic() - start) / 60
    lines += ["", f"{versions}; {os.cpu_count()} cores, {minutes:.0f} minutes."]
    print(*lines[-2:], sep="\n")
    if chosen.page:
        text, new = chosen.page.read_text(encoding="utf-8"), "\n".join([*lines, ""])
        chosen.page.write_text(table.sub(lambda _: new, text), encoding="utf-8")
    sys.exit(failed)
