"""The command line: `kvspec transfer`, `slices`, `verify` and `simulate`.

Law: importing this package imports neither typer nor rich, since each rank of `kvspec transfer` is
a process that imports what started its parent.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def main() -> None:
    """Run the command line; the entry point ``kvspec``."""
    try:
        from kvspec.cli.app import app  # noqa: PLC0415 - see the law above
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"click", "rich", "typer"}:
            raise
        sys.stderr.write(f"kvspec: {error.name} is not installed: pip install 'kvspec[cli]'\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    app(prog_name="kvspec")
