"""The process of one rank with a session. It executes the calls that its parent sends over a pipe.

Invariant: blocks that the ledger frees are overwritten at once, as an engine does for the next
request. A load that is done is compared at once. Only the parent's pipe is read as pickles.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.errors import KVSpecError
from kvspec.memory.allocation import allocate
from kvspec.nixl import NixlRank
from kvspec.nixl.rank import NixlStats
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import ReplicaPolicy, Role
from kvspec.run.contents import RUBBISH, in_memory, truth
from kvspec.run.worker import prepare, words_of
from kvspec.session import Load, Session, TcpChannel
from kvspec.session.load import LoadState
from kvspec.session.stats import SessionStats
from kvspec.testing import logical_views


@attrs.frozen(kw_only=True)
class Launch:
    """One start of an engine, as each of its ranks gets it.

    *blocks*: of every group, or of each by name. *polled*: this side starts the transfers. *lease*,
    *heartbeat*, *patience*: of its sessions, in seconds. *nixl*: the agent's name, if it needs one.
    *one_in*: of so many messages one is lost, and one doubled. *secret*: None as the environment
    has it.
    """

    name: str
    epoch: int
    blocks: int | dict[str, int]
    polled: bool
    replica_policy: ReplicaPolicy = attrs.field(factory=ReplicaPolicy)
    lease: float = 30.0
    heartbeat: float = 5.0
    patience: float = 60.0
    nixl: str | None = None
    one_in: int = 0
    secret: str | None = None


class Stand(NamedTuple):
    """How a load stands; of one that is done, how many bytes are *wrong*."""

    state: LoadState
    error: str
    undefined_blocks: dict[str, tuple[int, ...]]
    wrong: int


class Left(NamedTuple):
    """What is left over in a process."""

    session: SessionStats
    nixl: NixlStats
    threads: int


class Lossy(TcpChannel):
    """A channel that loses one in so many messages, and sends as many twice."""

    def __init__(self, one_in: int) -> None:
        super().__init__()
        self.one_in = one_in

    def send(self, route: str, data: bytes) -> None:
        """Send *data*, perhaps."""
        chance = random.randrange(self.one_in) if self.one_in else -1  # noqa: S311 - no secret
        for _ in range({0: 0, 1: 2}.get(chance, 1)):
            super().send(route, data)


class RankServer:
    """One rank: its session, its memory, and the requests that it holds or loads."""

    def __init__(self, engine: EngineSpec, rank: RankId, start: Launch) -> None:
        self.engine, self.rank = engine, rank
        cache, storage = allocate(engine, rank, start.blocks)
        views = logical_views(engine, rank, storage, start.blocks)
        blocks = {
            group.name: start.blocks if isinstance(start.blocks, int) else start.blocks[group.name]
            for group in engine.groups
        }
        self.views = {key: (view, len(view) // blocks[key[0]]) for key, view in views.items()}
        for flat in storage.values():
            flat[:] = RUBBISH
        prefix = "" if start.nixl else f"{start.name}-{rank}-"
        self.nixl = NixlRank(start.nixl, prefix=prefix, secret=start.secret, polled=start.polled)
        self.session = Session(
            self.nixl,
            cache,
            engine_id=start.name,
            epoch=start.epoch,
            replica_policy=start.replica_policy,
            owner=storage,
            channel=Lossy(start.one_in),
            background=True,
            lease=start.lease,
            heartbeat=start.heartbeat,
            patience=start.patience,
        )
        self.held: dict[str, TransferRequest] = {}
        self.loads: dict[str, tuple[Load, int]] = {}

    def introduce(self) -> bytes:
        """Return what others meet this rank by."""
        return self.session.introduction

    def connect(self, introductions: list[bytes], role: Role = "producer") -> None:
        """Meet an engine."""
        self.session.connect(introductions, role=role)

    def hold(
        self, remote_id: str, request: TransferRequest, seed: int, lease: float | None = None
    ) -> None:
        """Compute a request, and hold it."""
        given = self.engine, self.rank, request.producer_blocks, request, seed
        for key, ids, right, _ in truth(*given, producer=True):
            self.views[key][0][ids] = right
        self.session.hold(remote_id, lease=lease, blocks=request.producer_blocks)
        self.held[remote_id.rpartition("#")[0]] = request

    def abort(self, remote_id: str) -> None:
        """Abort a request."""
        self.session.abort(remote_id)

    def settled(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what is free, as done and as expired, and put rubbish there."""
        settled = self.session.settled()
        for name in (*settled.done, *settled.expired):
            self._spoil(self.held.pop(name).producer_blocks)
        return settled.done, settled.expired

    def load(
        self,
        request: TransferRequest,
        remote_id: str,
        seed: int,
        timeout: float,
        *,
        pushed: bool = False,
        digest: bool = False,
    ) -> None:
        """Start to load a request."""
        self._spoil(request.consumer_blocks)
        load = self.session.load(
            request, remote_id=remote_id, timeout=timeout, pushed=pushed, digest=digest
        )
        self.loads[request.request_id] = load, seed

    def push(self, request: TransferRequest, remote_id: str, timeout: float, epoch: int) -> None:
        """Start to push a request."""
        self.session.push(request, remote_id=remote_id, timeout=timeout, epoch=epoch)

    def cancel(self, name: str) -> None:
        """Cancel a load."""
        if name in self.loads:
            self.loads[name][0].cancel()

    def state(self, name: str) -> Stand:
        """Return how a load stands; forget one that is over."""
        load, seed = self.loads[name]
        wrong = 0
        if load.poll() == "done":
            given = self.engine, self.rank, load.request.consumer_blocks, load.request, seed
            for key, ids, right, counts in truth(*given, producer=False):
                wrong += int(np.count_nonzero((self.views[key][0][ids] != right) & counts))
        if load.state != "moving":
            del self.loads[name]
        return Stand(load.state, str(load.error or ""), load.undefined_blocks, wrong)

    def shut(self) -> None:
        """Close the rank, and with it what it registered; the session goes on."""
        self.nixl.close(drain=0.0)

    def close(self, drain: float) -> None:
        """Close the session and the rank."""
        self.session.close(drain=drain)
        self.nixl.close(drain=drain)

    def left(self) -> Left:
        """Return what is left over."""
        return Left(self.session.stats(), self.nixl.stats(), threading.active_count())

    def _spoil(self, tables: Mapping[str, BlockTable]) -> None:
        """Put rubbish into all of a request's blocks."""
        for key, (view, kernel_blocks_per_block) in self.views.items():
            ids: npt.NDArray[np.int64] = tables[key[0]].block_ids
            view[in_memory(ids, kernel_blocks_per_block)] = RUBBISH


COMMANDS = {
    command.__name__: command
    for command in (
        RankServer.introduce,
        RankServer.connect,
        RankServer.hold,
        RankServer.abort,
        RankServer.settled,
        RankServer.load,
        RankServer.push,
        RankServer.cancel,
        RankServer.state,
        RankServer.shut,
        RankServer.close,
        RankServer.left,
    )
}
"""What a parent may say, by name."""


def main() -> None:
    """Serve the parent whose pipe's number the command line has, until one of both is gone."""
    prepare("cpu", Path(os.devnull))
    parent = Connection(int(sys.argv[1]))
    with suppress(EOFError, BrokenPipeError):
        try:
            server = RankServer(*parent.recv())
            while True:
                parent.send(_answer(server, *parent.recv()))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - the parent is told, whatever it is
            parent.send(ConnectionAbortedError(words_of(error)))


def _answer(server: RankServer, command: str, arguments: Any, more: Any) -> Any:  # noqa: ANN401
    """Return what comes of a command, or the error that refuses it."""
    try:
        return COMMANDS[command](server, *arguments, **more)
    except KVSpecError as error:
        return error
