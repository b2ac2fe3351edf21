"""Ranks in processes, and engines of them, on which tests inject other faults than kills.

A process imports this module to create a `FaultyRank`, so the module must not be the main module.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import NamedTuple
from unittest.mock import patch

from kvspec import EngineSpec
from kvspec.errors import TransferError
from kvspec.run.rank_client import EngineClient, RankClient, until
from kvspec.run.rank_server import Launch
from kvspec.run.request_rank import RequestRank
from kvspec.session import TcpChannel
from kvspec.session.load import LoadState


class LossyChannel(TcpChannel):
    """A channel that loses, doubles or delays one message in twenty each.

    A delayed message is sent after the next one, to whichever peer that goes.
    """

    delayed: tuple[str, bytes] | None = None

    def send(self, route: str, *messages: bytes) -> None:
        """Send each message once, twice, after the next message, or not at all."""
        for data in messages:
            drawn = random.randrange(20)
            if drawn == 2 and self.delayed is None:
                self.delayed = route, data
                continue
            for _ in range({0: 0, 1: 2}.get(drawn, 1)):
                super().send(route, data)
            if self.delayed is not None:
                delayed, self.delayed = self.delayed, None
                super().send(*delayed)


class LoadOutcome(NamedTuple):
    """The state of a load. *wrong* is the number of wrong bytes of a load that is done."""

    state: LoadState
    error: str
    undefined_blocks: dict[str, tuple[int, ...]]
    wrong: int


class FaultyRank(RequestRank):
    """A rank that can also abort, cancel, deregister, fork and be interrupted."""

    def outcome(self, name: str) -> LoadOutcome:
        """Return the state of a load with its error, and forget the load if it is over."""
        load, _ = self.loads[name]
        state, wrong = self.state(name)
        return LoadOutcome(state, str(load.error or ""), load.undefined_blocks, wrong)

    def abort(self, remote_id: str) -> None:
        """Abort a request."""
        self.session.abort(remote_id)

    def cancel(self, name: str) -> None:
        """Cancel a load, unless it is over."""
        if name in self.loads:
            self.loads[name][0].cancel()

    def shut(self) -> None:
        """Close the NIXL agent, which deregisters the memory. The session continues."""
        self.nixl.close(drain=0.0)

    def address(self) -> str:
        """Return the address of the session's channel."""
        return self.session.channel.address

    def fork(self) -> tuple[str, int]:
        """Use the session in a forked child that ends as a program does.

        Returns:
            The state of the error that the child received, and its exit status.
        """
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                self.session.stats()
            except TransferError as error:
                os.write(write, str(error.state).encode())
            # `sys.exit`, not `os._exit`: the destructors must run, as at the end of any program.
            sys.exit(7)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            state = pipe.read().decode()
        return state, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def interrupt(self, seconds: float, command: str, *given: object) -> bool:
        """Execute a command, and raise a KeyboardInterrupt in it after so many seconds.

        Returns:
            Whether the interrupt left the command.
        """

        def ring(*_: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                getattr(self, command)(*given)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            return True
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return False


class LossyRank(FaultyRank):
    """A rank that also loses and repeats messages."""

    channel_type = LossyChannel


class FaultyEngine(EngineClient):
    """An engine of `FaultyRank`. *tls* is the `UCX_TLS` of its processes, if given."""

    rank_type = FaultyRank

    def __init__(self, engine: EngineSpec, launch: Launch, tls: str = "") -> None:
        with patch.dict(os.environ, {"UCX_TLS": tls} if tls else {}):
            super().__init__(engine, launch)

    def ended(self, name: str) -> list[LoadOutcome]:
        """Wait until every rank's load is over, and return their outcomes."""
        outcomes: dict[RankClient, LoadOutcome] = {}

        def all_over() -> bool:
            for rank in self.ranks:
                if rank not in outcomes:
                    outcome: LoadOutcome = rank.ask("outcome", name)
                    if outcome.state != "moving":
                        outcomes[rank] = outcome
            return len(outcomes) == len(self.ranks)

        until(all_over, 40.0)
        return [outcomes[rank] for rank in self.ranks]

    def settled(self, *names: str, seconds: float = 20.0) -> list[set[str]]:
        """Wait until every rank has freed the requests. Return the outcomes of each request."""
        outcomes: dict[str, list[str]] = {name: [] for name in names}

        def freed() -> bool:
            for done, expired in self.ask("settled"):
                for outcome, settled in (("done", done), ("expired", expired)):
                    for name in settled:
                        outcomes[name].append(outcome)
            return all(len(found) == len(self.ranks) for found in outcomes.values())

        until(freed, seconds)
        return [set(found) for found in outcomes.values()]


def stop(rank: RankClient) -> None:
    """Stop the process of a rank, and wait until its last thread has stopped."""
    os.kill(rank.process.pid, signal.SIGSTOP)
    os.waitpid(rank.process.pid, os.WUNTRACED)


def go_on(rank: RankClient) -> None:
    """Continue a stopped process."""
    os.kill(rank.process.pid, signal.SIGCONT)
