"""Run the commands of ``kvspec``: see `kvspec.cli.app`.

Invariant: importing this package does not import typer or rich. Each rank of `kvspec transfer` is a
process that imports the main module of its parent, and must start fast.
"""

from __future__ import annotations

import io
import os
import sys

# Exit status after Ctrl-C.
INTERRUPTED = 130


def main() -> None:
    """Run the command line. This is the entry point of the command ``kvspec``."""
    try:
        from kvspec.cli.app import app  # noqa: PLC0415 - see the invariant
    except ModuleNotFoundError as error:
        # Any other missing module is a defect, so show its traceback.
        if (error.name or "").partition(".")[0] not in {"click", "rich", "typer"}:
            raise
        sys.stderr.write(f"kvspec: {error.name} is not installed: pip install 'kvspec[cli]'\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    # A terminal of another encoding shows "?" for a character that it lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        app(prog_name="kvspec")
    except OSError as error:  # Standard output is full, or the machine has no more processes.
        sys.stderr.write(f"kvspec: {error}\n")
        # Python writes the rest of the output when it ends, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(2)
