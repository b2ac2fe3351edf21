"""The process of one rank. It opens a session and executes the commands that its parent sends.

Invariant: a process ends with its parent. Only the parent's pipe is read as pickles. Messages
of other ranks are read by the session alone.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.errors import KVSpecError
from kvspec.memory.allocation import allocate
from kvspec.nixl import NixlRank
from kvspec.ownership.parallel import RankId
from kvspec.session import Session, TcpChannel


@attrs.frozen(kw_only=True)
class Launch:
    """One start of an engine. All of its ranks receive the same values.

    Attributes:
        name: Name of the engine.
        epoch: Number of this start.
        blocks: Number of blocks, for every group or by group.
        device: Memory that holds the cache.
        host: Address that the session's channel listens on.
        nixl: More arguments of `NixlRank`. By default, each agent gets a new name.
        session: More arguments of `Session`.
    """

    name: str
    epoch: int
    blocks: int | dict[str, int]
    device: str = "cpu"
    host: str = "127.0.0.1"
    nixl: dict[str, Any]
    session: dict[str, Any]


class RankServer:
    """One rank: its memory, its NIXL agent, and its session, which a thread polls.

    The public methods of a subclass are the commands that a parent may send.
    """

    agent_type = NixlRank
    channel_type = TcpChannel

    def __init__(self, engine: EngineSpec, rank: RankId, launch: Launch) -> None:
        quiet_ucx(launch.device, loopback=launch.host == "127.0.0.1")
        self.engine, self.rank = engine, rank
        cache, self.storage = allocate(engine, rank, launch.blocks, launch.device)
        agent: dict[str, Any] = {"prefix": f"{launch.name}-{rank}-"} | launch.nixl
        self.nixl = self.agent_type(**agent)
        self.session = Session(
            self.nixl,
            cache,
            engine_id=launch.name,
            epoch=launch.epoch,
            owner=self.storage,
            channel=self.channel_type(launch.host),
            background=True,
            **launch.session,
        )

    def introduce(self) -> bytes:
        """Return the introduction of this rank."""
        return self.session.introduction

    def close(self, drain: float = 1.0) -> None:
        """Close the session, then the NIXL agent."""
        self.session.close(drain=drain)
        self.nixl.close(drain=drain)


def request_of(remote_id: str) -> str:
    """Return the request id in *remote_id*."""
    return remote_id.rpartition("#")[0]


def quiet_ucx(device: str, *, loopback: bool) -> None:
    """Silence UCX. Keep ranks that are on one machine off the network. The user's settings win."""
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    if device == "cpu" and loopback:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def words_of(error: Exception) -> str:
    """Return the line of a report that describes *error*."""
    if isinstance(error, KVSpecError):
        return str(error)
    *_, frame = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} at {frame.filename}:{frame.lineno}"


def main() -> None:
    """Serve the parent until it is gone. The command line has the number of its pipe.

    The parent first sends a class and its arguments, then commands, which are methods of the class.
    """
    parent = Connection(int(sys.argv[1]))
    # After the parent has died, the process ends. After another error the rank cannot continue.
    with suppress(EOFError, BrokenPipeError):
        try:
            server_type, arguments = parent.recv()
            server = server_type(*arguments)
            while True:
                parent.send(_answer(server, *parent.recv()))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - the parent reports any error
            parent.send(ConnectionAbortedError(words_of(error)))


def _answer(server: object, command: str, arguments: Any, options: Any) -> Any:  # noqa: ANN401
    """Return the result of a command, or the error by which it was refused."""
    try:
        return getattr(server, command)(*arguments, **options)
    except KVSpecError as error:
        return error
