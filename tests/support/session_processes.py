"""Engines whose ranks are processes: started, told what to do, stopped, killed, started again."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import kvspec
from kvspec.errors import KVSpecError

if TYPE_CHECKING:
    from collections.abc import Callable

WORKER = Path(__file__).parent / "session_worker.py"
REPO = Path(kvspec.__file__).parents[1]


class Rank:
    """One process with one rank's session."""

    def __init__(self, spec: kvspec.EngineSpec, rank: kvspec.RankId, given: dict[str, Any],
                 tls: str) -> None:  # fmt: skip
        self.rank = rank
        self.pipe, child_end = Pipe()
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and file
            [sys.executable, str(WORKER), str(child_end.fileno()),
             pickle.dumps((spec, rank, given)).hex()],
            pass_fds=[child_end.fileno()],
            env={"UCX_NET_DEVICES": "lo", **os.environ, "PYTHONPATH": str(REPO), "UCX_TLS": tls},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        child_end.close()

    def ask(self, command: str, *arguments: Any, **more: Any) -> Any:
        """Return its answer to a command; raise what it refused."""
        self.tell(command, *arguments, **more)
        return self.answer()

    def tell(self, command: str, *arguments: Any, **more: Any) -> None:
        """Give it a command that is answered later."""
        self.pipe.send((command, arguments, more))

    def answer(self) -> Any:
        """Return its next answer, within 30 s."""
        assert wait([self.pipe], 30), "the worker is silent"
        answer = self.pipe.recv()
        if isinstance(answer, KVSpecError):
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


class Engine:
    """All ranks of one start of an engine, each a process."""

    def __init__(self, name: str, spec: kvspec.EngineSpec, epoch: int, *, blocks: int = 12,
                 tls: str = "all", **more: Any) -> None:  # fmt: skip
        self.name, self.spec = name, spec
        self.ranks = []
        for rank in spec.parallel.ranks:
            given = {"name": name, "epoch": epoch, "blocks": blocks, "polled": name == "D",
                     "times": {}, **more}  # fmt: skip
            self.ranks.append(Rank(spec, rank, given, tls))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def ask(self, command: str, *arguments: Any, **more: Any) -> list[Any]:
        """Ask every rank at once."""
        for rank in self.ranks:
            rank.tell(command, *arguments, **more)
        return [rank.answer() for rank in self.ranks]

    def meet(self, other: Engine, role: str = "producer") -> None:
        """Meet a producer, or whoever has another *role*."""
        self.ask("meet", [sealed for sealed, _ in other.ask("introduce")], role=role)

    def ended(self, name: str) -> list[Any]:
        """Wait until every rank's load is over; return how each stands."""
        found: dict[int, Any] = {}

        def over() -> bool:
            for at, rank in enumerate(self.ranks):
                if at not in found and (state := rank.ask("state", name))[0] != "moving":
                    found[at] = state
            return len(found) == len(self.ranks)

        until(over)
        return [found[at] for at in sorted(found)]

    def settled(self, *names: str, seconds: float = 20.0) -> list[set[str]]:
        """Wait until every rank freed the requests of *names*; return how, name by name."""
        how: dict[str, list[str]] = {name: [] for name in names}

        def freed() -> bool:
            for done, expired in self.ask("settled"):
                for outcome, told in (("done", done), ("expired", expired)):
                    for name in told:
                        how[name].append(outcome)
            return all(len(told) == len(self.ranks) for told in how.values())

        until(freed, seconds)
        return [set(told) for told in how.values()]

    def quiet(self) -> None:
        """Wait until nothing is said, held, moving or leaving on any rank."""

        def nothing() -> bool:
            left = self.ask("left")
            return not any(
                each.loads + each.steps + each.held + each.leaving + nixl.transfers + nixl.handles
                for each, nixl, _, _ in left
            )

        until(nothing)

    def kill(self) -> None:
        """Kill every rank."""
        for rank in self.ranks:
            rank.kill()


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(2e-3)
