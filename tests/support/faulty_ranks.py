"""Ranks in processes, and engines of them, on which tests inject other faults than kills.

A process imports this module to create a `FaultyRank`, so the module must not be the main module.
"""

from __future__ import annotations

import os
import random
import signal
from unittest.mock import patch

from kvspec import EngineSpec
from kvspec.run.rank_client import EngineClient, RankClient, until
from kvspec.run.rank_server import Launch
from kvspec.run.request_rank import LoadOutcome, RequestRank
from kvspec.session import TcpChannel


class LossyChannel(TcpChannel):
    """A channel that loses one message in twenty, and sends one in twenty twice."""

    def send(self, route: str, data: bytes) -> None:
        """Send *data* once, twice or not at all."""
        for _ in range({0: 0, 1: 2}.get(random.randrange(20), 1)):
            super().send(route, data)


class FaultyRank(RequestRank):
    """A rank that can also abort, cancel and deregister."""

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
                    outcome: LoadOutcome = rank.ask("state", name)
                    if outcome.state != "moving":
                        outcomes[rank] = outcome
            return len(outcomes) == len(self.ranks)

        until(all_over)
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
