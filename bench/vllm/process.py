"""Engines in separate processes: commands over pipes, the end of all workers, and the logs."""

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

# Timeouts in seconds: until an engine is ready, until it answers, until it has freed its requests,
# and until it has ended by itself.
STARTING, ANSWERING, FREEING, ENDING = 600.0, 300.0, 20.0, 5.0


class Failed(Exception):  # noqa: N818 - an outcome, not an error of this program
    """An engine does not start or does not answer."""


_ERROR = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception)\b(: .*)?)$")
_SHARED = re.compile(r"/dev/shm/[\w:\[\]-]+$", re.MULTILINE)  # noqa: S108 - shared memory in a map
_RENDEZVOUS = re.compile(r"\bvllm_dist_\w+")  # The file by which the ranks of an engine connect.
_PLACES = Path("/dev/shm"), Path(tempfile.gettempdir())  # noqa: S108 - vLLM's own choice
# The prefix of each line in vLLM's log.
_PREFIX = re.compile(r"^\(.*?\) \w+ [\d-]+ [\d:]+ \[.*?\] ")


def reason(log: Path) -> str | None:
    """Return the first error in *log*, with the line that raised it if the error has no message."""
    before = ""
    for line in log.read_text(errors="replace").splitlines():
        text = _PREFIX.sub("", line).strip()
        found = _ERROR.search(text)
        if found and "Tokenizer not available" not in text:
            return found[1] if found[2] else f"{found[1]}: {before}"
        before = (text.strip("^~ ") and text) or before
    return None


class Process:
    """An engine in a separate process, with its workers and its log."""

    def __init__(
        self,
        log: Path,
        environment: dict[str, str],
        settings: dict[str, Any],
        connector: dict[str, Any] | None,
    ) -> None:
        self._pipe, other = engine.FORK.Pipe()
        self._log = log
        arguments = (other, log, environment, settings, connector)
        self._process = engine.FORK.Process(target=engine.run, args=arguments)
        self._process.start()
        other.close()

    def answer(self, timeout: float) -> Any:  # noqa: ANN401
        """Return the next answer, or raise `Failed` after *timeout* seconds."""
        try:
            if self._pipe.poll(timeout):
                return self._pipe.recv()
        except (EOFError, OSError):
            raise Failed("the process ended") from None
        raise Failed(f"no answer in {timeout:.0f} s")

    def call(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401
        """Return the result of a method of `Engine`."""
        with contextlib.suppress(OSError):
            self._pipe.send((name, *arguments))
        return self.answer(ANSWERING)

    def generate(self, *arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return the result of `Engine.generate`."""
        found: dict[str, Any] = self.call("generate", *arguments)
        return found

    def generate_all(self, *arguments: Any) -> list[dict[str, Any]]:  # noqa: ANN401
        """Return the result of `Engine.generate_all`."""
        found: list[dict[str, Any]] = self.call("generate_all", *arguments)
        return found

    def held(self) -> int:
        """Return how many requests still hold blocks after `FREEING` seconds."""
        deadline = time.monotonic() + FREEING
        while True:
            held: int = self.call("held")
            if not held or time.monotonic() > deadline:
                return held
            time.sleep(0.1)

    def end(self, rest: float = ENDING) -> None:
        """End the process and its workers, and remove the shared memory that vLLM leaves behind.

        After *rest* seconds, the processes are killed.
        """
        shared = self._shared()
        self._pipe.close()
        self._process.join(rest)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        for path in shared:
            path.unlink(missing_ok=True)

    def _shared(self) -> set[Path]:
        """Return the files of shared memory that its processes have mapped or its log names."""
        names = set(_RENDEZVOUS.findall(self._log.read_text(errors="replace")))
        found = {path for name in names for place in _PLACES for path in place.glob(f"{name}*")}
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(maps.parent.name)) == self._process.pid:
                    text = maps.read_text(encoding="utf-8", errors="replace")
                    found |= set(map(Path, _SHARED.findall(text)))
        return found


@contextlib.contextmanager
def started(*arguments: Any) -> Iterator[Process]:  # noqa: ANN401
    """Start an engine and wait until it is ready. It ends with the block."""
    process = Process(*arguments)
    try:
        process.answer(STARTING)
        yield process
    finally:
        process.end()
