"""Commands and ranks of kvspec in processes that are forked from one that has imported torch.

An import of torch takes two seconds of a CPU, and one of kvspec half a second. A test that starts
many commands or ranks would spend most of its time on it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvspec.run import rank_client
from kvspec.run.rank_server import main

if TYPE_CHECKING:
    import pytest

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


class Descriptor:
    """A file descriptor. The process that receives it has a number of its own for it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[..., int], tuple[Any]]:
        return _received, (DupFd(self._number),)


def _received(duplicate: Any) -> int:
    return int(duplicate.detach())


def serve(pipe: int, output: int, environment: dict[str, str]) -> None:
    """Be a rank that its parent leads over *pipe*."""
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(output, number)
    sys.argv = ["rank", str(pipe)]
    main()


class ForkedRank:
    """The process of a rank, as the `subprocess.Popen` that `RankClient` starts."""

    def __init__(
        self, command: list[str], *, pass_fds: Sequence[int], env: dict[str, str], stdout: int,
        **_: object,
    ) -> None:  # fmt: skip
        self._command = command
        given = Descriptor(*pass_fds), Descriptor(stdout), env
        self._process = FORKS.Process(target=serve, args=given, daemon=True)
        self._process.start()

    def kill(self) -> None:
        """End the process."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its exit status."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        return self._process.exitcode


def fork_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks be forked until the end of a test. They are processes of their own all the same."""

    class Forking:
        Popen, DEVNULL = ForkedRank, subprocess.DEVNULL
        TimeoutExpired = subprocess.TimeoutExpired

    monkeypatch.setattr(rank_client, "subprocess", Forking)
