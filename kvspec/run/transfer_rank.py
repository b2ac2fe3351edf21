"""One rank of a transfer. Each stage is a method: start, fill, connect, transfer, compare.

Invariant: a rank knows only its job and the introductions of the other engine, and plans for
itself. It does not import torch for a cache in host memory.

How it works:
    stage     producer                              consumer
    --------  ------------------------------------  ------------------------------------
    start     opens its session                     opens its session
    fill      writes the true bytes, holds          writes bytes that differ from them
              each request
    connect   connects the consumer, to push        connects the producer
    transfer  pushes, or only serves reads; waits   loads each request until it is done
              until each request is freed
    compare   checks that no byte has changed       compares all bytes with the byte oracle
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.nixl import NixlRank, Transfer
from kvspec.nixl.transfer_spec import Operation, Sides
from kvspec.ownership.parallel import RankId
from kvspec.run.contents import Bytes, Contents
from kvspec.run.job import Job, Side, other_side
from kvspec.run.rank_server import Launch, RankServer, request_of
from kvspec.run.report import Compared, Moved, RankReport
from kvspec.session.load import Progress

EPOCH = 1  # number of the only start of each engine
LEASE = 30.0  # seconds for which a request is held at least
REST = 1e-3  # seconds between two looks at the session


@attrs.define
class Timed:
    """A transfer, and when its request began and its last byte was seen, in seconds."""

    transfer: Transfer
    began: float
    ended: float = 0.0


class TimedRank(NixlRank):
    """A NIXL agent that measures its transfers."""

    timed: list[Timed]

    def move(
        self, operation: Operation, pairs: Iterable[Sides], *, request: str, timeout: float
    ) -> tuple[Transfer, ...]:
        """Start transfers, as `NixlRank` does, and measure them."""
        began = time.perf_counter()
        transfers = super().move(operation, pairs, request=request, timeout=timeout)
        self.timed += [Timed(transfer, began) for transfer in transfers]
        # A transport that copies while it posts may have ended them already.
        self.look()
        return transfers

    def look(self) -> None:
        """Store the time in each transfer that has ended since the last look."""
        now = time.perf_counter()
        for each in self.timed:
            if not each.ended and each.transfer.over:
                each.ended = now


class TransferRank(RankServer):
    """One rank of *job*. Every wait ends at *deadline*, a time of the monotonic clock."""

    agent_type = TimedRank
    nixl: TimedRank  # pyrefly: ignore[bad-override-mutable-attribute] - of `agent_type`

    def __init__(
        self,
        job: Job,
        side: Side,
        rank: RankId,
        device: str,
        deadline: float,
        secret: bytes,
        host: str = "127.0.0.1",
    ) -> None:
        active = side == job.active
        launch = Launch(
            name=side,
            epoch=EPOCH,
            blocks=job.num_blocks(side),
            polled=active,
            replica_policy=job.replica_policy,
            # A lease runs from `fill`, and another rank may need most of the time to fill.
            lease=max(LEASE, job.timeout),
            secret=secret,
            device=device,
            staging=job.staging << 20 if active else 0,
            host=host,
        )
        super().__init__(job.engine(side), rank, launch)
        self.nixl.timed = []
        self.job, self.side, self.other, self.deadline = job, side, other_side(side), deadline
        self.active = active
        self.contents = Contents(job, side, rank)
        self.finished: list[str] = []
        self.expired: list[str] = []

    def start(self) -> bytes:
        """Return the introduction of this rank."""
        return self.introduce()

    def fill(self) -> None:
        """Write what the cache contains before the run. A producer holds the requests."""
        sizes = {name: len(flat) for name, flat in self.storage.items()}
        self.before = self.contents.before(sizes)
        for name, flat in self.before.items():
            _put(flat, self.storage[name])
        if self.side == "producer":
            for number in range(self.job.requests):
                self.session.hold(self.job.remote_id(number))

    def connect(self, introductions: list[bytes]) -> None:
        """Connect the other engine, if this rank sends to it or loads from it."""
        if self.side == "producer" and not self.active:
            return
        plan = self.session.connect(introductions, role=self.other, timeout=self._left())
        if (plan.producer, plan.consumer) != (self.job.producer, self.job.consumer):
            rule = "is another engine than that of this rank's job: use the same options everywhere"
            raise SpecError(self.other, introductions[0][:16], rule=rule)

    def transfer(self) -> None:
        """Move all requests, one after the other. A producer waits until all are freed."""
        self.nixl.timed.clear()  # without the reads that opened the connections
        for number, request in enumerate(self.job.moves):
            remote_id = self.job.remote_id(number)
            if self.side == "consumer":
                pushed, left = not self.active, self._left()
                self._wait(
                    self.session.load(request, remote_id=remote_id, timeout=left, pushed=pushed)
                )
                self.finished.append(request.request_id)
            elif self.active:
                left = self._left()
                self._wait(
                    self.session.push(request, remote_id=remote_id, timeout=left, epoch=EPOCH)
                )
        while self.side == "producer" and len(self.finished) < self.job.requests and self._left():
            settled = self.session.settled()
            self.finished += map(request_of, settled.done)
            self.expired += map(request_of, settled.expired)
            time.sleep(REST)

    def compare(self) -> RankReport:
        """Compare the cache with what it must contain, and return the report of this rank."""
        after = {name: _to_host(flat) for name, flat in self.storage.items()}
        if self.side == "consumer":
            if self.job.tamper and self.rank == self.job.consumer.parallel.ranks[0]:
                self.contents.tamper(after)
            compared = self.contents.judge(self.before, after)
        else:
            changed = sum(np.count_nonzero(after[n] != flat) for n, flat in self.before.items())
            lines = (f"producer {self.rank}: its own cache has changed",) if changed else ()
            judged = sum(map(len, after.values()))
            compared = Compared(judged=judged, wrong=int(changed), lines=lines)
        return RankReport(
            side=self.side,
            rank=self.rank,
            moved=tuple(map(self._moved, self._partners())),
            finished=len(self.finished),
            expired=tuple(self.expired),
            compared=compared,
            torch="torch" in sys.modules,
        )

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _wait(self, progress: Progress) -> None:
        """Wait for a load or a push, and measure its transfers. Raise its error if it failed."""
        while progress.poll() == "moving":
            self.nixl.look()
            time.sleep(REST)
        self.nixl.look()
        progress.wait()

    def _partners(self) -> tuple[RankId, ...]:
        """Return the ranks with which this rank starts transfers."""
        if not self.active:
            return ()
        plan = self.job.plan
        return plan.sources(self.rank) if self.side == "consumer" else plan.targets(self.rank)

    def _moved(self, partner: RankId) -> Moved:
        """Add up the transfers with one rank of the other engine."""
        name = f"{self.other}-{partner}-"  # the beginning of its agent's name
        own = [each for each in self.nixl.timed if each.transfer.peer.startswith(name)]
        transfers = [each.transfer for each in own]
        ranks = (partner, self.rank) if self.side == "consumer" else (self.rank, partner)
        return Moved(
            producer=ranks[0],
            consumer=ranks[1],
            nbytes=sum(transfer.nbytes for transfer in transfers),
            staged=sum(transfer.nbytes for transfer in transfers if transfer.staged),
            runs=sum(transfer.runs for transfer in transfers),
            seconds=sum(each.ended - each.began for each in own),
        )


def _put(flat: Bytes, target: Any) -> None:  # noqa: ANN401 - a numpy array or a torch tensor
    if isinstance(target, np.ndarray):
        target[:] = flat
        return
    import torch  # noqa: PLC0415 - only a GPU needs it

    target.copy_(torch.from_numpy(flat))
    torch.cuda.synchronize()


def _to_host(flat: Any) -> Bytes:  # noqa: ANN401 - a numpy array or a torch tensor
    bytes_: Bytes = flat if isinstance(flat, np.ndarray) else flat.cpu().numpy()
    return bytes_
