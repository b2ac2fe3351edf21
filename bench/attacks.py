"""Print the cost of attackers and of idle time for a session, compared with another checkout.

`python bench/attacks.py [CHECKOUT] [--quick]`. The processes are those of the tests in
`tests/session/test_attackers.py`: a victim with 1,024 descriptors, and attackers without the
secret. Both checkouts run the same attacks in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "support" / "attacked.py"
ATTACKS = ("idle", 1100), ("empty", 200), ("unsealed", 8), ("unsealed", 200)
PATIENCE = 60.0
"""Seconds after which a victim that does not answer is killed."""
LOST = "no answer"
WIDTHS = 15, 44, 22, 22


@contextmanager
def process(checkout: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the script with the package of *checkout*. It ends with its input."""
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    try:
        yield child
    finally:
        with contextlib.suppress(OSError):
            child.stdin.close()  # type: ignore[union-attr]
        late = threading.Timer(5.0, child.kill)
        late.start()
        child.wait()
        late.cancel()
        child.stdout.close()  # type: ignore[union-attr]


def answer_of(child: subprocess.Popen[str], command: str = "") -> Any:  # noqa: ANN401 - JSON
    """Return the answer of *child* to *command*, or None if it dies or is too slow."""
    late = threading.Timer(PATIENCE, child.kill)
    late.start()
    try:
        if command:
            child.stdin.write(f"{command}\n")  # type: ignore[union-attr]
            child.stdin.flush()  # type: ignore[union-attr]
        line = child.stdout.readline()  # type: ignore[union-attr]
        return json.loads(line) if line else None
    except OSError:
        return None
    finally:
        late.cancel()


def attack(checkout: Path, kind: str, count: int) -> dict[str, str]:
    """Return the figures of one attack: seconds, and the number of lost requests."""
    with ExitStack() as stack:
        victim = stack.enter_context(process(checkout, "victim"))
        address = answer_of(victim)
        alone = answer_of(victim, "load")
        answer_of(victim, "stats")
        with process(ROOT, kind, address, str(count)) as attacker:
            answer_of(attacker)
            during = answer_of(victim, "load")
            poll = answer_of(victim, "stats")
            new = answer_of(victim, "new")
        after = answer_of(victim, "new")
    return {
        "50 loads alone": seconds(alone),
        "50 loads during the attack": seconds(during),
        "longest poll": seconds(poll and poll["poll"]),
        "requests lost": LOST if poll is None else str(poll["lost"]),
        "new reader during the attack": seconds(new),
        "new reader after it": seconds(after),
    }


def idle(checkout: Path, *, quick: bool) -> dict[str, str]:
    """Return the share of a core that an idle background session uses."""
    with process(checkout, "quiet", "3" if quick else "10") as child:
        share = answer_of(child)
    return {"CPU of an idle session": LOST if share is None else f"{share:.3%} of a core"}


def serving(checkout: Path) -> dict[str, str]:
    """Return how many requests a second are served, and how long `load` takes."""
    with process(checkout, "serve") as child:
        found = answer_of(child)
    return {
        "loads done in a second, 64 in flight": f"{found['rate']:.0f}" if found else LOST,
        "load(), 99th percentile": f"{found['p99'] * 1e3:.2f} ms" if found else LOST,
    }


def seconds(value: float | None) -> str:
    """Return *value* as text."""
    return LOST if value is None else f"{value:.3f} s"


def line(cells: list[str]) -> str:
    """Return *cells* as one line of the table."""
    return "".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False))


def main() -> int:
    """Run all attacks against both checkouts, and print a table."""
    parser = argparse.ArgumentParser(description="Measure what strangers cost a session.")
    parser.add_argument("checkout", nargs="?", type=Path, help="another checkout of kvspec")
    parser.add_argument("--quick", action="store_true", help="shorter measurements")
    chosen = parser.parse_args()
    checkouts = [ROOT] if chosen.checkout is None else [ROOT, chosen.checkout.resolve()]
    rows: list[tuple[str, Callable[[Path], dict[str, str]]]] = [
        ("idle", lambda checkout: idle(checkout, quick=chosen.quick)),
    ]
    rows.append(("serving", serving))
    rows += [
        (f"{count} {kind}", lambda checkout, k=kind, n=count: attack(checkout, k, n))  # type: ignore[misc]
        for kind, count in ATTACKS
    ]
    print(f"load: {os.getloadavg()[0]:.2f}")
    print(line(["", "", *map(str, checkouts)]))
    for name, measure in rows:
        found = [measure(checkout) for checkout in checkouts]
        for what in found[0]:
            print(line([name, what, *(figures[what] for figures in found)]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
