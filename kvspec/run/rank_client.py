"""The parent's side: start ranks as processes, send commands to them, and kill them.

Invariant: no rank outlives its parent or its `Ranks`. A rank that dies is named with its last
words. No wait is longer than `SILENT`.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from tempfile import TemporaryFile
from typing import Any, Self

from kvspec.engines.engine import EngineSpec
from kvspec.run.rank_server import Launch
from kvspec.run.request_rank import RequestRank

SILENT = 120.0  # seconds in which a rank has to answer
DYING = 5.0  # seconds that a process may take to end after it has closed its pipe
LOG_TAIL = 3  # lines of a dead rank's output that an error contains
# The process ends with its parent. It sees to that before its imports, which take a second or more.
# 1 is PR_SET_PDEATHSIG: the signal that a process receives when its parent dies. The parent may
# have died before that call.
BODY = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[2]):
    sys.exit()
from kvspec.run.rank_server import main
main()
"""


class RankClient:
    """The process of one rank, and the parent's end of its pipe.

    Args:
        name: Name of the rank, in errors and in the list of processes.
        server_type: The class that the process creates and serves.
        arguments: The arguments of this class.

    What its libraries print goes to a file without a name, for the error when it dies. They print
    to standard error if the environment has a log level for UCX or NIXL.

    `answer` waits until *deadline*, a time of the monotonic clock, and never longer than `SILENT`.
    """

    deadline = math.inf

    def __init__(self, name: str, server_type: type[object], arguments: tuple[object, ...]) -> None:
        # The file has no name, so nothing is left of it even if this process is killed.
        self.name, self.log = name, TemporaryFile()  # noqa: SIM115 - `kill` closes it
        self.pipe, child_end = Pipe()
        path = os.pathsep.join(filter(None, sys.path))
        loud = {"UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"} & set(os.environ)
        target = sys.stderr.fileno() if loud else self.log.fileno()
        with child_end:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
                [sys.executable, "-P", "-c", BODY, str(child_end.fileno()), str(os.getpid()), name],
                pass_fds=[child_end.fileno()],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=target,
            )
        self.pipe.send((server_type, arguments))

    def ask(self, command: str, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        """Send a command and return the answer. Raise the error by which it was refused."""
        self.send(command, *arguments, **options)
        return self.answer()

    def send(self, command: str, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Send a command, which is a method of the rank's class. `answer` returns its answer."""
        self.pipe.send((command, arguments, options))

    def answer(self) -> Any:  # noqa: ANN401
        """Return the next answer.

        Raises:
            KVSpecError: If the rank refused the command.
            ConnectionAbortedError: If the rank failed.
            ConnectionResetError: If its process died.
            TimeoutError: If it did not answer in time.
        """
        left = max(0.0, min(SILENT, self.deadline - time.monotonic()))
        if not self.pipe.poll(left):
            raise TimeoutError(f"{self.name} did not answer within {left:.0f} s")
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise ConnectionResetError(f"{self.name}: {self.death()}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        """Kill the process and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self.log.close()

    def death(self) -> str:
        """Describe how the process ended, with the last lines that it printed."""
        try:
            code = self.process.wait(DYING)
        except subprocess.TimeoutExpired:
            return "its process closed its pipe"
        signals = {-number.value: number.name for number in signal.Signals}
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()][-LOG_TAIL:]
        words = f"; its last words: {' | '.join(lines)}" if lines else ""
        return f"its process died ({signals.get(code, f'exit status {code}')}){words}"


class Ranks:
    """Processes of ranks. All are killed when the `with` block ends."""

    def __init__(self) -> None:
        self.ranks: list[RankClient] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def add(self, name: str, server_type: type[object], arguments: tuple[object, ...]) -> None:
        """Start one more rank. If that fails, kill all."""
        try:
            with _uninterrupted():
                self.ranks.append(RankClient(name, server_type, arguments))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill every rank."""
        for rank in self.ranks:
            rank.process.kill()  # all of them first, because each takes a while to end
        for rank in self.ranks:
            rank.kill()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block SIGINT while a process starts, so that an interrupt loses no process.

    The process inherits the blocked signal: Ctrl-C reaches the whole process group, and only the
    parent handles it.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class EngineClient(Ranks):
    """All ranks of one start of an engine, each a process with a `RequestRank`."""

    rank_type = RequestRank

    def __init__(self, engine: EngineSpec, launch: Launch) -> None:
        super().__init__()
        for rank in engine.parallel.ranks:
            self.add(f"{launch.name} {rank}", self.rank_type, (engine, rank, launch))

    def ask(self, command: str, *arguments: Any, **options: Any) -> list[Any]:  # noqa: ANN401
        """Send a command to all ranks at once, and return their answers."""
        for rank in self.ranks:
            rank.send(command, *arguments, **options)
        return [rank.answer() for rank in self.ranks]

    def connect(self, producer: EngineClient) -> None:
        """Connect the producer."""
        self.ask("connect", producer.ask("introduce"))

    def quiet(self) -> None:
        """Wait until no rank sends, holds, moves or disconnects anything."""
        until(lambda: not any(stats.active for stats in self.ask("left")))


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until *true* returns a true value. Raise `TimeoutError` if it does not in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() >= end:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(2e-3)
