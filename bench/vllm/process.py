"""Engines in processes of their own: asked over pipes, ended with their workers, and their logs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine

STARTING, ANSWERING, FREEING, ENDING = 600.0, 300.0, 20.0, 5.0
"""Seconds."""


class Failed(Exception):  # noqa: N818 - an outcome, not an error of this program
    """An engine that does not start, or does not answer, and what it said."""


_SAID = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception)\b(: .*)?)$")
_SHARED = re.compile(r"/dev/shm/[\w:\[\]-]+$", re.MULTILINE)  # noqa: S108 - what a process has mapped
_MET = re.compile(r"\bvllm_dist_\w+")  # what the ranks of an engine met by
_PLACES = Path("/dev/shm"), Path(tempfile.gettempdir())  # noqa: S108 - where vLLM puts it
_WHO = re.compile(r"^\(.*?\) \w+ [\d-]+ [\d:]+ \[.*?\] ")
"""What vLLM puts before a line."""


def reason(log: Path) -> str | None:
    """Return the first error that *log* tells of; of one without words, the line that raised it."""
    before = ""
    for line in log.read_text(errors="replace").splitlines():
        text = _WHO.sub("", line).strip()
        found = _SAID.search(text)
        if found and "Tokenizer not available" not in text:
            return found[1] if found[2] else f"{found[1]}: {before}"
        before = (text.strip("^~ ") and text) or before
    return None


class Process:
    """An engine in a process of its own, with its workers, and its log."""

    def __init__(
        self,
        log: Path,
        environment: dict[str, str],
        settings: dict[str, Any],
        connector: dict[str, Any] | None,
    ) -> None:
        self._pipe, other = engine.FORK.Pipe()
        self._log = log
        given = (other, log, environment, settings, connector)
        self._process = engine.FORK.Process(target=engine.run, args=given)
        self._process.start()
        other.close()

    def answer(self, timeout: float) -> Any:  # noqa: ANN401
        """Return the next answer."""
        try:
            if self._pipe.poll(timeout):
                return self._pipe.recv()
        except (EOFError, OSError):
            raise Failed("it ended") from None
        raise Failed(f"no answer in {timeout:.0f} s")

    def generate(self, *given: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return what `Engine.generate` does."""
        with contextlib.suppress(OSError):
            self._pipe.send(("generate", *given))
        found: dict[str, Any] = self.answer(ANSWERING)
        return found

    def held(self) -> int:
        """Return how many requests hold blocks, after some time in which they can be freed."""
        deadline = time.monotonic() + FREEING
        while True:
            self._pipe.send(("held",))
            held: int = self.answer(ANSWERING)
            if not held or time.monotonic() > deadline:
                return held
            time.sleep(0.1)

    def end(self) -> None:
        """End it and its workers, and remove what they shared, which vLLM leaves."""
        shared = self._shared()
        self._pipe.close()
        self._process.join(ENDING)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        for path in shared:
            path.unlink(missing_ok=True)

    def _shared(self) -> set[Path]:
        """Return the memory that its processes have mapped, and what its log names as shared."""
        names = set(_MET.findall(self._log.read_text(errors="replace")))
        found = {path for name in names for place in _PLACES for path in place.glob(f"{name}*")}
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(maps.parent.name)) == self._process.pid:
                    text = maps.read_text(encoding="utf-8", errors="replace")
                    found |= set(map(Path, _SHARED.findall(text)))
        return found


@contextlib.contextmanager
def started(*given: Any) -> Iterator[Process]:  # noqa: ANN401
    """Start an engine that is ready; it ends with the block."""
    process = Process(*given)
    try:
        process.answer(STARTING)
        yield process
    finally:
        process.end()
