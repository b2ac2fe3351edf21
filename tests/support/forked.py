"""Commands of kvspec in processes that are forked from one that has imported torch.

An import of torch takes two seconds of a CPU. A test that starts many commands would spend most of
its time on it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch.distributed", "kvspec.run.launched", __name__])


def run(arguments: list[str], environment: dict[str, str], folder: Path) -> None:
    """Run ``kvspec`` with *arguments* as a program, which prints into files of *folder*."""
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.argv = ["kvspec", *arguments]
    runpy.run_module("kvspec.cli", run_name="__main__")


class Forked:
    """A command in a process of its own, as a `subprocess.Popen` of text that one can wait for."""

    def __init__(self, arguments: list[str], environment: dict[str, str], folder: Path) -> None:
        self._folder = folder
        self._process = FORKS.Process(target=run, args=(arguments, environment, folder))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus the number of the signal that ended the process, or None."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status, or None."""
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end of the process, and return what it has printed.

        Raises:
            TimeoutError: If it does not end in time.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} did not end in {timeout} s")
        output, errors = ((self._folder / name).read_text() for name in ("output", "errors"))
        return output, errors

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process."""
        self.send_signal(signal.SIGKILL)
