"""Write the museum's page: each bug, the law that catches it, its smallest case and the seconds.

Run it as `python tests/museum/table.py`. It judges all exhibits and writes `docs/museum.md`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import exhibits_of_blocks
import exhibits_of_layouts
import exhibits_of_ranks
import exhibits_of_releases

if TYPE_CHECKING:
    from exhibit import Exhibit

EXHIBITS: list[Exhibit] = [
    *exhibits_of_ranks.EXHIBITS,
    *exhibits_of_blocks.EXHIBITS,
    *exhibits_of_layouts.EXHIBITS,
    *exhibits_of_releases.EXHIBITS,
]
PAGE = Path(__file__).parents[2] / "docs/museum.md"
HEAD = """\
# The museum of bugs

Connectors of several projects had these bugs. Each one is rebuilt as a small system of our own code
that makes the same mistake, in `tests/museum/`. No code of others is copied. Hypothesis draws small
transfers, the law in the table refutes the system, and the transfer is shrunk to the smallest one
that still fails. kvspec itself is judged on the same transfers by the same law, and passes. The
profile `ci` of the [kit](test-your-connector.md) finds each bug, too: `tests/museum/test_ci.py`.

The laws are those of [CONTRIBUTING](../CONTRIBUTING.md). Each one catches a bug here, except law 2,
which is about the other laws. The seconds are the time from the first drawn transfer to the
smallest one, on one core. A reference without a link has no issue that we know. vLLM 0.32 was run
as a [pair of engines](vllm-pair.md), and the functions of vLLM 0.33 were executed
([conformance](../conformance/README.md)).

`python tests/museum/table.py` writes this page.

| bug | reference | caught by | smallest case | seconds |
|---|---|---|---|---|
"""


def row(exhibit: Exhibit) -> str:
    """Return the row of *exhibit*, without the seconds."""
    return f"| {exhibit.bug} | {exhibit.link} | {exhibit.judge} | {exhibit.minimal} |"


def main() -> int:
    """Judge all exhibits, write the page and return 1 if one is not caught as it says."""
    lines, missed = [], 0
    for exhibit in EXHIBITS:
        began = time.process_time()
        found = exhibit.describe(exhibit.smallest())
        seconds = time.process_time() - began
        if found != exhibit.minimal:
            missed += 1
            sys.stderr.write(f"{exhibit.reference}: expected {exhibit.minimal}, got {found}\n")
        lines.append(f"{row(exhibit)} {seconds:.1f} |\n")
    PAGE.write_text(f"{HEAD}{''.join(lines)}\n{len(lines)} bugs, all caught.\n", "utf-8")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
