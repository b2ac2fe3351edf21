"""The parent's side of an engine whose ranks are processes: send calls to them, stop and kill them.

Invariant: a rank that is dead or gives no answer is named. No wait is longer than `SILENT`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, Self

from kvspec.engines.engine import EngineSpec
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import Role
from kvspec.run.rank_server import Launch, Left, Stand

SILENT = 120.0
"""Seconds in which a rank has to answer."""
BODY = "from kvspec.run.rank_server import main; main()"


class RankClient:
    """One process with one rank's session. *tls*: its ``UCX_TLS``, if not the environment's."""

    def __init__(self, engine: EngineSpec, rank: RankId, start: Launch, tls: str = "") -> None:
        self.name = f"{start.name} {rank}"
        self.pipe, child_end = Pipe()
        path = os.pathsep.join(filter(None, sys.path))
        with child_end:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
                [sys.executable, "-P", "-c", BODY, str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                env={**os.environ, "PYTHONPATH": path} | ({"UCX_TLS": tls} if tls else {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self.pipe.send((engine, rank, start))

    def ask(self, command: str, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401
        """Return its answer to one of `COMMANDS`; raise what it refused."""
        self.tell(command, *arguments, **more)
        return self.answer()

    def tell(self, command: str, *arguments: Any, **more: Any) -> None:  # noqa: ANN401
        """Give it a command that is answered later."""
        self.pipe.send((command, arguments, more))

    def answer(self) -> Any:  # noqa: ANN401
        """Return its next answer; raise `TimeoutError` or `ConnectionError` if none comes."""
        if not wait([self.pipe], SILENT):
            raise TimeoutError(f"{self.name} did not answer within {SILENT:g} s")
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise ConnectionResetError(f"{self.name}: its process died by itself") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        """Stop it, and wait until its last thread stands."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        """Let it go on."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class EngineClient:
    """All ranks of one start of an engine, each a process."""

    def __init__(self, engine: EngineSpec, start: Launch, tls: str = "") -> None:
        self.ranks: list[RankClient] = []
        try:
            for rank in engine.parallel.ranks:
                self.ranks.append(RankClient(engine, rank, start, tls))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def ask(self, command: str, *arguments: Any, **more: Any) -> list[Any]:  # noqa: ANN401
        """Ask every rank at once."""
        for rank in self.ranks:
            rank.tell(command, *arguments, **more)
        return [rank.answer() for rank in self.ranks]

    def connect(self, other: EngineClient, role: Role = "producer") -> None:
        """Meet a producer, or whoever has another *role*."""
        self.ask("connect", other.ask("introduce"), role=role)

    def ended(self, name: str) -> list[Stand]:
        """Wait until every rank's load is over; return how each stands."""
        over: dict[int, Stand] = {}

        def all_over() -> bool:
            for number, rank in enumerate(self.ranks):
                if number not in over:
                    stand: Stand = rank.ask("state", name)
                    if stand.state != "moving":
                        over[number] = stand
            return len(over) == len(self.ranks)

        until(all_over)
        return [over[number] for number in sorted(over)]

    def settled(self, *names: str, seconds: float = 20.0) -> list[set[str]]:
        """Wait until every rank freed the requests of *names*; return how, name by name."""
        how: dict[str, list[str]] = {name: [] for name in names}

        def freed() -> bool:
            for done, expired in self.ask("settled"):
                for outcome, settled in (("done", done), ("expired", expired)):
                    for name in settled:
                        how[name].append(outcome)
            return all(len(outcomes) == len(self.ranks) for outcomes in how.values())

        until(freed, seconds)
        return [set(outcomes) for outcomes in how.values()]

    def quiet(self) -> None:
        """Wait until nothing is said, held, moving or leaving on any rank."""

        def nothing() -> bool:
            left: list[Left] = self.ask("left")
            return not any(
                one.session.loads + one.session.steps + one.session.held + one.session.leaving
                + one.nixl.transfers + one.nixl.handles
                for one in left
            )  # fmt: skip

        until(nothing)

    def kill(self) -> None:
        """Kill every rank."""
        for rank in self.ranks:
            rank.kill()


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until something is true; raise `TimeoutError` if it does not become so."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() >= end:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(2e-3)
