"""A child process that owns one rank's session and does what its parent says over a pipe.

Started by path, with the number of an inherited pipe end and what its rank is. What its ledger
frees it overwrites at once, as an engine does that gives the blocks to another request.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from sessions import truth

import kvspec
from kvspec.errors import KVSpecError
from kvspec.nixl import NixlRank
from kvspec.session import Session, SessionLoad, TcpChannel
from kvspec.testing import logical_views

RUBBISH = 0xEE


class Lossy(TcpChannel):
    """A channel that loses one in so many messages, and sends as many twice."""

    one_in = 0

    def send(self, route: str, data: bytes) -> None:
        """Send *data*, perhaps."""
        chance = random.randrange(self.one_in) if self.one_in else 2
        for _ in range((0, 2)[chance] if chance < 2 else 1):
            super().send(route, data)


class Worker:
    """One rank: its session, its memory, and the requests that it holds or loads."""

    def __init__(self, spec: kvspec.EngineSpec, rank: kvspec.RankId, given: dict[str, Any]) -> None:
        self.spec, self.rank, self.blocks = spec, rank, given["blocks"]
        cache, storage = kvspec.allocate(spec, rank, num_blocks=self.blocks)
        self.views = logical_views(spec, rank, storage, self.blocks)
        for flat in storage.values():
            flat[:] = RUBBISH
        self.nixl = NixlRank(given.get("nixl"), prefix="" if given.get("nixl") else "worker-",
                             polled=given["polled"])  # fmt: skip
        self.channel = Lossy()
        self.channel.one_in = given.get("one_in", 0)
        self.session = Session(
            self.nixl, cache, engine_id=given["name"], epoch=given["epoch"], owner=storage,
            channel=self.channel, background=True, **given["times"],
        )  # fmt: skip
        self.held: dict[str, kvspec.TransferRequest] = {}
        self.loads: dict[str, tuple[SessionLoad, int]] = {}

    def do_introduce(self) -> Any:
        """Return what others meet this rank by, and where it is."""
        return self.session.introduction, self.channel.address

    def do_meet(self, introductions: list[bytes], **more: Any) -> None:
        """Meet an engine."""
        self.session.meet(introductions, **more)

    def do_hold(
        self, remote_id: str, asked: kvspec.TransferRequest, seed: int, **more: Any
    ) -> None:
        """Compute a request, and hold it."""
        given = (self.spec, self.rank, self.blocks, asked.producer_blocks, asked, seed)
        for key, ids, right, _ in truth(*given, producer=True):
            self.views[key][ids] = right
        self.session.ledger.expect(remote_id, **more)
        self.held[remote_id.rpartition("#")[0]] = asked

    def do_drop(self, remote_id: str) -> None:
        """Abort a request."""
        self.session.ledger.drop(remote_id)

    def do_settled(self) -> Any:
        """Return what is free, and put rubbish there."""
        settled = self.session.ledger.poll()
        for name in (*settled.done, *settled.expired):
            tables = self.held.pop(name).producer_blocks
            for key, view in self.views.items():
                view[tables[key[0]].block_ids] = RUBBISH
        return settled.done, settled.expired

    def do_load(
        self, asked: kvspec.TransferRequest, remote_id: str, seed: int, timeout: float, **more: Any
    ) -> None:
        """Start to load a request."""
        for key, view in self.views.items():
            view[asked.consumer_blocks[key[0]].block_ids] = RUBBISH
        load = self.session.load(asked, remote_id=remote_id, timeout=timeout, **more)
        self.loads[asked.request_id] = load, seed

    def do_push(
        self, asked: kvspec.TransferRequest, remote_id: str, timeout: float, epoch: int
    ) -> None:
        """Start to push a request."""
        self.session.push(asked, remote_id=remote_id, timeout=timeout, epoch=epoch)

    def do_release(self, remote_id: str) -> None:
        """Give a request up."""
        self.session.release(remote_id)

    def do_cancel(self, name: str) -> None:
        """Cancel a load."""
        if name in self.loads:
            self.loads[name][0].cancel()

    def do_state(self, name: str) -> Any:
        """Return how a load stands: of one that is done, how many bytes are wrong."""
        load, seed = self.loads[name]
        wrong = 0
        if load.poll() == "done":
            tables = load.request.consumer_blocks
            given = (self.spec, self.rank, self.blocks, tables, load.request, seed)
            for key, ids, right, counts in truth(*given, producer=False):
                wrong += int(np.count_nonzero((self.views[key][ids] != right) & counts))
        if load.state != "moving":
            del self.loads[name]
        return load.state, str(load.error or ""), load.undefined, wrong

    def do_left(self) -> Any:
        """Return what is left over: of the session, of NIXL, threads, file descriptors."""
        left, nixl = self.session.leftovers(), self.nixl.leftovers()
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        return left, nixl, threading.active_count(), descriptors

    def do_part(self, engine_id: str) -> None:
        """Forget an engine."""
        self.session.part(engine_id)


def main(parent: Connection) -> None:
    """Answer commands until the pipe is closed."""
    worker = Worker(*pickle.loads(bytes.fromhex(sys.argv[2])))  # noqa: S301 - our parent's
    while True:
        try:
            command, arguments, more = parent.recv()
        except EOFError:
            break
        try:
            answer = getattr(worker, f"do_{command}")(*arguments, **more)
        except KVSpecError as error:
            answer = error
        parent.send(answer)
    worker.session.close()
    worker.nixl.close()


if __name__ == "__main__":
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    main(Connection(int(sys.argv[1])))
