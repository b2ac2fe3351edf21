"""One rank of a recovery run. It holds and loads single requests, and checks each load.

Invariant: blocks that the session frees are overwritten at once, as an engine does for the next
request. A load that is done is compared at once.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.nixl.rank import NixlStats
from kvspec.ownership.parallel import RankId
from kvspec.run.contents import true_rows
from kvspec.run.job import SPARE_BLOCKS
from kvspec.run.rank_server import Launch, RankServer, request_of
from kvspec.session import Load
from kvspec.session.load import LoadState
from kvspec.session.stats import SessionStats
from kvspec.testing import logical_views

RUBBISH = 0xEE
"""The byte in blocks that no request has filled."""


class RankStats(NamedTuple):
    """Numbers of the objects that exist in a process, and of changed bytes in its spare blocks."""

    session: SessionStats
    nixl: NixlStats
    threads: int
    spilled: int

    @property
    def active(self) -> int:
        """Number of the objects that still send, hold, move or disconnect something."""
        session, nixl = self.session, self.nixl
        of_session = session.loads + session.steps + session.held + session.disconnecting
        return of_session + nixl.transfers + nixl.handles


class RequestRank(RankServer):
    """A rank with the requests that it holds, and the loads that are not over."""

    def __init__(self, engine: EngineSpec, rank: RankId, launch: Launch) -> None:
        super().__init__(engine, rank, launch)
        for flat in self.storage.values():
            flat[:] = RUBBISH
        self.views = logical_views(engine, rank, self.storage, launch.blocks)
        self.held: dict[str, TransferRequest] = {}
        self.loads: dict[str, tuple[Load, int]] = {}

    def connect(self, introductions: list[bytes]) -> None:
        """Connect a producer."""
        self.session.connect(introductions)

    def hold(
        self, remote_id: str, request: TransferRequest, seed: int, lease: float | None = None
    ) -> None:
        """Write the true bytes of a request into its blocks, and hold it."""
        for rows, true in true_rows(self.engine, self.rank, request, seed, producer=True):
            known = rows.known
            self.views[rows.key][rows.block[known], :, rows.row[known]] = true[known]
        self.session.hold(remote_id, lease=lease, blocks=request.producer_blocks)
        self.held[request_of(remote_id)] = request

    def settled(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Overwrite the blocks of requests that ended. Return their ids: done, and others."""
        settled = self.session.settled()
        for name in map(request_of, settled.freed):
            self._spoil(self.held.pop(name), producer=True)
        others = (*settled.expired, *settled.aborted)
        return tuple(map(request_of, settled.done)), tuple(map(request_of, others))

    def load(
        self,
        request: TransferRequest,
        remote_id: str,
        seed: int,
        timeout: float,
        *,
        digest: bool = False,
    ) -> None:
        """Start to load a request."""
        self._spoil(request, producer=False)
        load = self.session.load(request, remote_id=remote_id, timeout=timeout, checksum=digest)
        self.loads[request.request_id] = load, seed

    def state(self, name: str) -> tuple[LoadState, int]:
        """Return the state of a load and its wrong bytes. Forget the load if it is over.

        The bytes are compared if the load is done.
        """
        load, seed = self.loads[name]
        state, request, wrong = load.poll(), load.request, 0
        if state == "done":
            for rows, true in true_rows(self.engine, self.rank, request, seed, producer=False):
                right = np.where(rows.live[:, None, None], true, RUBBISH)
                differs = self.views[rows.key][rows.block, :, rows.row] != right
                wrong += int(np.count_nonzero(differs[~rows.dead]))
        if state != "moving":
            del self.loads[name]
        return state, wrong

    def left(self) -> RankStats:
        """Return the numbers of the objects that exist."""
        spares = (view[-SPARE_BLOCKS:] for view in self.views.values())
        spilled = sum(int(np.count_nonzero(spare != RUBBISH)) for spare in spares)
        objects = self.session.stats(), self.nixl.stats(), threading.active_count()
        return RankStats(*objects, spilled)

    def _spoil(self, request: TransferRequest, *, producer: bool) -> None:
        """Write rubbish into all blocks of a request."""
        for rows, _ in true_rows(self.engine, self.rank, request, 0, producer=producer):
            self.views[rows.key][rows.block, :, rows.row] = RUBBISH
