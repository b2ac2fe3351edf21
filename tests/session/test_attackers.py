"""Attackers without the secret that reach the channel stop no load and no new reader."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "attacked.py"
GRACE = 3.0  # seconds by which a busy machine may be late


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the script of `tests/support`. It ends with its input."""
    command = [sys.executable, str(SCRIPT), *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:  # type: ignore[call-overload] # noqa: S603
        late = threading.Timer(120.0, child.kill)
        late.start()
        try:
            yield child
        finally:
            child.stdin.close()
            child.wait()
            late.cancel()


def asked(child: subprocess.Popen[str], command: str = "") -> Any:
    """Return the answer of the child to *command*."""
    assert child.stdin is not None
    assert child.stdout is not None
    if command:
        child.stdin.write(f"{command}\n")
        child.stdin.flush()
    line = child.stdout.readline()
    assert line, f"the process ended during {command!r}"
    return json.loads(line)


@pytest.mark.parametrize(
    ("kind", "count"), [("idle", 1100), ("empty", 200), ("unsealed", 8), ("unsealed", 200)]
)
def test_healthy_load_and_new_reader_survive_attack(kind: str, count: int) -> None:
    """The victim may open 1,024 descriptors. A load takes at most twice its time alone.

    It is the second of three: on a busy machine, one load may wait for the CPU.
    """
    with ExitStack() as stack:
        victim = stack.enter_context(process("victim"))
        address = asked(victim)
        alone = min(asked(victim, "load") for _ in range(2))
        with process(kind, address, str(count)) as attacker:
            assert "ready" == asked(attacker)
            during = sorted(asked(victim, "load") for _ in range(3))[1]
            asked(victim, "new")
        after = asked(victim, "new")
        assert during <= 2 * alone + GRACE
        assert after <= 2 * GRACE
        assert 0 == asked(victim, "stats")["lost"]
