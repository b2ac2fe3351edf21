"""One rank of a recovery run. It holds, loads and pushes single requests, and checks each load.

Invariant: blocks that the session frees are overwritten at once, as an engine does for the next
request. A load that is done is compared at once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.nixl.rank import NixlStats
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import Role
from kvspec.run.contents import RUBBISH, in_memory, truth
from kvspec.run.rank_server import Launch, RankServer, request_of
from kvspec.session import Load
from kvspec.session.load import LoadState
from kvspec.session.stats import SessionStats
from kvspec.testing import logical_views


class LoadOutcome(NamedTuple):
    """The state of a load. *wrong* is the number of wrong bytes of a load that is done."""

    state: LoadState
    error: str
    undefined_blocks: dict[str, tuple[int, ...]]
    wrong: int


class RankStats(NamedTuple):
    """Numbers of the objects that exist in a process."""

    session: SessionStats
    nixl: NixlStats
    threads: int


class RequestRank(RankServer):
    """A rank with the requests that it holds, and the loads that are not over."""

    def __init__(self, engine: EngineSpec, rank: RankId, launch: Launch) -> None:
        super().__init__(engine, rank, launch)
        for flat in self.storage.values():
            flat[:] = RUBBISH
        blocks = launch.blocks
        views = logical_views(engine, rank, self.storage, blocks)
        # Each view, and in how many kernel blocks it cuts a block.
        self.views = {
            key: (view, len(view) // (blocks if isinstance(blocks, int) else blocks[key[0]]))
            for key, view in views.items()
        }
        self.held: dict[str, TransferRequest] = {}
        self.loads: dict[str, tuple[Load, int]] = {}

    def connect(self, introductions: list[bytes], role: Role = "producer") -> None:
        """Connect an engine."""
        self.session.connect(introductions, role=role)

    def hold(
        self, remote_id: str, request: TransferRequest, seed: int, lease: float | None = None
    ) -> None:
        """Write the true bytes of a request into its blocks, and hold it."""
        tables = request.producer_blocks
        for key, ids, right, _ in truth(
            self.engine, self.rank, tables, request, seed, producer=True
        ):
            self.views[key][0][ids] = right
        self.session.hold(remote_id, lease=lease, blocks=tables)
        self.held[request_of(remote_id)] = request

    def settled(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Overwrite the blocks of requests that ended. Return their ids: done, and others."""
        settled = self.session.settled()
        for name in map(request_of, settled.freed):
            self._spoil(self.held.pop(name).producer_blocks)
        others = (*settled.expired, *settled.aborted)
        return tuple(map(request_of, settled.done)), tuple(map(request_of, others))

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
            request, remote_id=remote_id, timeout=timeout, pushed=pushed, verify=digest
        )
        self.loads[request.request_id] = load, seed

    def push(self, request: TransferRequest, remote_id: str, timeout: float, epoch: int) -> None:
        """Start to push a request."""
        self.session.push(request, remote_id=remote_id, timeout=timeout, epoch=epoch)

    def state(self, name: str) -> LoadOutcome:
        """Return the state of a load, and forget the load if it is over."""
        load, seed = self.loads[name]
        request, wrong = load.request, 0
        if load.poll() == "done":
            for key, ids, right, counts in truth(
                self.engine, self.rank, request.consumer_blocks, request, seed, producer=False
            ):
                wrong += int(np.count_nonzero((self.views[key][0][ids] != right) & counts))
        if load.state != "moving":
            del self.loads[name]
        return LoadOutcome(load.state, str(load.error or ""), load.undefined_blocks, wrong)

    def left(self) -> RankStats:
        """Return the numbers of the objects that exist."""
        return RankStats(self.session.stats(), self.nixl.stats(), threading.active_count())

    def _spoil(self, tables: Mapping[str, BlockTable]) -> None:
        """Write rubbish into all blocks of a request."""
        for key, (view, kernel_blocks_per_block) in self.views.items():
            ids: npt.NDArray[np.int64] = tables[key[0]].block_ids
            view[in_memory(ids, kernel_blocks_per_block)] = RUBBISH
