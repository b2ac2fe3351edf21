"""One rank of a transfer, and the stages through which all ranks are led. Each is a method.

Invariant: no rank begins a stage before all ranks have ended the stage before it. A rank knows only
its job and the introductions of the other engine, and plans for itself. It does not import torch
for a cache in host memory.

How it works:
    stage     producer                              consumer
    --------  ------------------------------------  ------------------------------------
    start     opens its session                     opens its session
    fill      writes the true bytes, holds          writes bytes that differ from them
              each request
    connect   does nothing                          connects the producer
    transfer  serves reads; waits until each        loads each request until it is done
              request is freed
    compare   checks that no byte has changed       compares all bytes with the byte oracle
    close     closes its session and its agent      closes its session and its agent
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvspec.errors import KVSpecError, SpecError
from kvspec.nixl import NixlRank, Staging, Transfer
from kvspec.nixl.merging import PreparedSides
from kvspec.nixl.transfer import K
from kvspec.ownership.parallel import RankId
from kvspec.run.contents import Bytes, Contents
from kvspec.run.job import SIDES, Job, Side, other_side
from kvspec.run.rank_server import Launch, RankServer, request_of
from kvspec.run.report import Failure, Moved, RankReport, Report
from kvspec.session import Load

STAGES = ("start", "fill", "connect", "transfer", "compare", "close")
"""The stages of a run, in order. Each is a method of `TransferRank`."""

Arguments = Mapping[Side, tuple[Any, ...]]
Through = Callable[[str, Arguments], list[Any]]
"""Function that lets all ranks do one stage, with the arguments of their side.

Returns what each rank returned, in the order of `Job.ranks`. Raises `StageError` if a rank failed.
"""

LOG = logging.getLogger(__name__)
EPOCH = 1  # number of the only start of each engine
LEASE = 30.0  # seconds for which a request is held at least
# A rank stops to wait before the end of the run, and reports what is missing: so many seconds, or
# this share of the job's time if that is shorter.
TIME_MARGIN, MARGIN_SHARE = 1.0, 0.1
POLL_REST = 1e-3  # seconds between two looks at the session


class StageError(KVSpecError):
    """A stage that some ranks did not end. *failures* contains these ranks and their reasons."""

    def __init__(self, failures: tuple[Failure, ...]) -> None:
        super().__init__("; ".join(map(str, failures)))
        self.failures = failures


def lead(job: Job, through: Through) -> Report:
    """Lead all ranks through all stages, and return the report of the run."""
    seconds: dict[str, float] = {}
    reports: list[RankReport] = []
    nothing: Arguments = dict.fromkeys(SIDES, ())
    introductions = nothing
    for stage in STAGES:
        began = time.perf_counter()
        LOG.info("%s", stage)
        try:
            answers = through(stage, introductions if stage == "connect" else nothing)
        except StageError as error:
            return Report.of(job, reports, error.failures, seconds)
        if stage == "start":
            ranks = list(zip(job.ranks(), answers, strict=True))
            introductions = {
                side: ([own for (of, _), own in ranks if of == other_side(side)],) for side in SIDES
            }
        elif stage == "compare":
            reports = answers
        seconds[stage] = time.perf_counter() - began
    return Report.of(job, reports, (), seconds)


class TimedRank(NixlRank):
    """A NIXL agent that records when its transfers begin and end."""

    began: dict[Transfer, float]
    ended: dict[Transfer, float]

    def move(
        self, pairs: Mapping[K, PreparedSides | Transfer], *, request: str, timeout: float
    ) -> dict[K, Transfer]:
        """Start transfers, as `NixlRank` does, and record the time."""
        now = time.perf_counter()
        transfers = super().move(pairs, request=request, timeout=timeout)
        self.began |= dict.fromkeys(transfers.values(), now)
        # A transport that copies while it posts may have ended them already.
        self.look()
        return transfers

    def look(self) -> None:
        """Record the time for each transfer that has ended since the last look."""
        now = time.perf_counter()
        self.ended |= {t: now for t in list(self.began) if t.over and t not in self.ended}


class TransferRank(RankServer):
    """One rank of *job*. Every wait ends before *deadline*, a time of the monotonic clock."""

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
        reads = side == "consumer"
        buffer = Staging(buffer=job.staging << 20, always=True) if reads and job.staging else None
        # A lease runs from `fill`, and another rank may need most of the time to fill.
        lease = max(LEASE, job.timeout)
        launch = Launch(
            name=side,
            epoch=EPOCH,
            blocks=job.num_blocks(side),
            device=device,
            host=host,
            nixl={"secret": secret, "polled": reads, "staging": buffer},
            session={"replica_policy": job.replica_policy, "lease": lease},
        )
        super().__init__(job.engine(side), rank, launch)
        self.nixl.began = dict[Transfer, float]()
        self.nixl.ended = dict[Transfer, float]()
        self.job, self.side, self.other = job, side, other_side(side)
        self.deadline = deadline - min(TIME_MARGIN, job.timeout * MARGIN_SHARE)
        self.contents = Contents(job, side, rank)
        self.finished: list[str] = []
        self.expired: list[str] = []

    start = RankServer.introduce  # The first stage of a job calls it by this name.

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
        """Connect the producer, if this is a consumer rank."""
        if self.side == "producer":
            return
        plan = self.session.connect(introductions, timeout=self._left())
        if (plan.producer, plan.consumer) != (self.job.producer, self.job.consumer):
            rule = "is another engine than that of this rank's job: use the same options everywhere"
            raise SpecError("producer", introductions[0][:16], rule=rule)

    def transfer(self) -> None:
        """Move all requests, one after the other. A producer waits until all are freed."""
        self.nixl.began.clear()  # without the reads that opened the connections
        for number, request in enumerate(self.job.moves):
            remote_id, left = self.job.remote_id(number), self._left()
            if self.side == "consumer":
                self._wait(self.session.load(request, remote_id=remote_id, timeout=left))
                self.finished.append(request.request_id)
        while self.side == "producer" and len(self.finished) < self.job.requests and self._left():
            settled = self.session.settled()
            self.finished += map(request_of, settled.done)
            self.expired += map(request_of, settled.expired)
            time.sleep(POLL_REST)

    def compare(self) -> RankReport:
        """Compare the cache with what it must contain, and return the report of this rank."""
        after = {name: _to_host(flat) for name, flat in self.storage.items()}
        first = "consumer", self.job.consumer.parallel.ranks[0]
        if self.job.tamper and (self.side, self.rank) == first:
            self.contents.tamper(after)
        return RankReport(
            side=self.side,
            rank=self.rank,
            moved=tuple(map(self._moved, self._partners())),
            finished=len(self.finished),
            expired=tuple(self.expired),
            compared=self.contents.judge(self.before, after),
            torch="torch" in sys.modules,
        )

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _wait(self, load: Load) -> None:
        """Wait for a load, and measure its transfers. Raise its error if it failed."""
        while load.poll() == "moving":
            self.nixl.look()
            time.sleep(POLL_REST)
        self.nixl.look()
        load.wait()

    def _partners(self) -> tuple[RankId, ...]:
        """Return the ranks from which this rank reads."""
        return self.job.plan.sources(self.rank) if self.side == "consumer" else ()

    def _moved(self, partner: RankId) -> Moved:
        """Add up the reads from one rank of the producer."""
        name = f"{self.other}-{partner}-"  # the beginning of its agent's name
        transfers = [moved for moved in self.nixl.began if moved.peer.startswith(name)]
        return Moved(
            producer=partner,
            consumer=self.rank,
            nbytes=sum(transfer.nbytes for transfer in transfers),
            staged=sum(transfer.nbytes for transfer in transfers if transfer.staged),
            runs=sum(transfer.runs for transfer in transfers),
            seconds=sum(self.nixl.ended[moved] - self.nixl.began[moved] for moved in transfers),
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
