"""Run the commands of ``kvspec``: `transfer`, `plan`, `verify`, `calibrate`, `vectors` and `view`.

Invariant: importing this package does not import typer or rich. Each rank of `kvspec transfer` is a
process that imports the main module of its parent, and must start fast.
"""

from __future__ import annotations

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
    app(prog_name="kvspec")
