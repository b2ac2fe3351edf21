"""One rank's process: allocates, fills, connects, moves its own rows, and compares.

Law: a process knows its job, its rank and what other ranks sent; it plans for itself. It never
imports torch for a cache in host memory, and whatever goes wrong is told to the parent.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvspec.descriptors.table import DescriptorTable, build_table
from kvspec.errors import KVSpecError
from kvspec.memory.allocation import allocate
from kvspec.memory.regions import RankCache
from kvspec.nixl import NixlRank, Prepared
from kvspec.ownership.parallel import RankId
from kvspec.run import contents
from kvspec.run.job import Job, Side
from kvspec.run.notices import Notices
from kvspec.run.report import Compared, Moved, RankReport

FAILED = "failed"


@attrs.frozen
class Introduction:
    """What a rank tells the other side: who it is, how to reach it, where its cache lies."""

    side: Side
    rank: RankId
    metadata: bytes
    cache: RankCache


def run_rank(
    parent: Connection,
    job: Job,
    side: Side,
    rank: RankId,
    device: str,
    deadline: float,
    log: Path | None,
) -> None:
    """Run one rank of *job*, told and telling over *parent*; the body of a spawned process.

    *deadline*: of the system's monotonic clock. *log*: the file that takes what libraries print,
    or None to let it through to standard error.
    """
    _prepare(device, log)
    ours: _Rank | None = None
    try:
        ours = _Rank(parent, job, side, rank, device, deadline)
        ours.run()
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except Exception as error:  # noqa: BLE001 - the parent reports it, whatever it is
        with suppress(OSError):
            parent.send((FAILED, (ours.stage if ours else "start", _words(error))))


def _prepare(device: str, log: Path | None) -> None:
    """Make libraries quiet, and UCX stay on this machine, unless the user said otherwise."""
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    if device == "cpu":
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if log is None:
        os.dup2(2, 1)
        return
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)


def _words(error: Exception) -> str:
    if isinstance(error, KVSpecError):
        return str(error)
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = f" at {at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at else ""
    return f"{type(error).__name__}: {error}{where}"


class _Rank:
    """The stages of one rank, in order; each ends with a word to the parent."""

    def __init__(
        self,
        parent: Connection,
        job: Job,
        side: Side,
        rank: RankId,
        device: str,
        deadline: float,
    ) -> None:
        self.parent, self.job, self.side, self.rank = parent, job, side, rank
        self.device = device
        self.stage = "start"
        # In time to tell the parent what is missing, before it gives up.
        self.deadline = deadline - min(1.0, job.timeout / 10)
        self.active = side == job.active
        self.storage: dict[str, Any] = {}
        self.before: contents.Storage = {}
        self.digest = b""
        self.names: dict[RankId, str] = {}
        self.lists: dict[RankId, tuple[DescriptorTable, Prepared, Prepared]] = {}
        self.moved: dict[RankId, Moved] = {}
        self.notices = Notices.of(job.moves, *self._notifiers())

    def _notifiers(self) -> tuple[Side, tuple[RankId, ...]]:
        """Return who notifies this rank of each request: a consumer that reads needs nobody."""
        if self.side == "producer":
            return "consumer", self.job.plan.notifiers(self.rank)
        return "producer", () if self.active else self.job.plan.sources(self.rank)

    def run(self) -> None:
        """Go through every stage."""
        engine, blocks = self.job.engine(self.side), self.job.num_blocks(self.side)
        cache, self.storage = allocate(engine, self.rank, blocks, self.device)
        with NixlRank(prefix=f"{self.side}-{self.rank}-", polled=self.active) as agent:
            agent.register(cache.memory, owner=self.storage)
            card = Introduction(self.side, self.rank, agent.metadata(), cache)
            self._tell("start", card)
            self.stage = "fill"
            self._fill()
            self._tell("fill", None)
            self._connect(agent, cache, self._await("connect"))
            self._tell("connect", None)
            self._await("transfer")
            self._transfer(agent)
            self._tell("transfer", None)
            self._await("compare")
            compared = self._compare()
            self.notices.drain(agent)
            self._tell("compare", self._report(compared))
            self._await("end")

    def _await(self, stage: str) -> Any:  # noqa: ANN401 - what the parent sends
        self.stage = stage
        return self.parent.recv()

    def _tell(self, stage: str, payload: object) -> None:
        self.parent.send((stage, payload))

    def _fill(self) -> None:
        sizes = {name: len(flat) for name, flat in self.storage.items()}
        filled = contents.before(self.job, self.side, self.rank, sizes)
        for name, flat in filled.items():
            _put(flat, self.storage[name])
        self.before = filled if self.side == "consumer" else {}
        self.digest = _digest(filled)

    def _connect(
        self, agent: NixlRank, cache: RankCache, introductions: tuple[Introduction, ...]
    ) -> None:
        for each in introductions:
            self.names[each.rank] = agent.connect(each.metadata)
            ours, theirs = (cache, each.cache)[:: 1 if self.side == "producer" else -1]
            if not self.active or not self.job.plan.between(ours.rank, theirs.rank):
                continue
            table = build_table(self.job.plan, ours, theirs)
            sides = [
                (table.producer_rows, table.producer_memory_type),
                (table.consumer_rows, table.consumer_memory_type),
            ]
            mine, other = sides[:: 1 if self.side == "producer" else -1]
            remote = agent.prepare(*other, peer=self.names[each.rank])
            self.lists[each.rank] = (table, agent.prepare(*mine), remote)
            self.moved[each.rank] = Moved(producer=ours.rank, consumer=theirs.rank)

    def _transfer(self, agent: NixlRank) -> None:
        """Move every request; notify once all of one is done; wait for what is to come."""
        plan = self.job.plan
        consumes = self.side == "consumer"
        told = plan.notifies(self.rank) if consumes else plan.targets(self.rank)
        if self.active:
            for at, request in enumerate(self.job.moves):
                for peer in self.lists:
                    self._move(agent, peer, at)
                self._notify(agent, told, request.request_id)

        def release(request: str) -> None:
            if consumes and not self.active:  # pushed to: the producers may let go of it now
                self._notify(agent, told, request)

        self.notices.collect(agent, self.deadline, release)

    def _notify(self, agent: NixlRank, ranks: tuple[RankId, ...], request: str) -> None:
        for each in ranks:
            agent.notify(self.names[each], request.encode())

    def _move(self, agent: NixlRank, peer: RankId, at: int) -> None:
        table, local, remote = self.lists[peer]
        request = self.job.moves[at]
        began = time.perf_counter()
        ours, theirs = table.select(request)
        name, left = request.request_id, max(0.0, self.deadline - time.monotonic())
        transfer = (
            agent.read(local, theirs, remote, ours, request=name, timeout=left)
            if self.side == "consumer"
            else agent.write(local, ours, remote, theirs, request=name, timeout=left)
        )
        transfer.wait()
        self.moved[peer] = self.moved[peer].plus(
            nbytes=transfer.nbytes,
            ids=transfer.descriptors,
            runs=transfer.runs,
            seconds=time.perf_counter() - began,
        )

    def _compare(self) -> Compared:
        after = {name: _to_host(flat) for name, flat in self.storage.items()}
        if self.side == "consumer":
            if self.job.tamper and self.rank == self.job.consumer.parallel.ranks[0]:
                contents.tamper(self.job, self.rank, after)
            return contents.judge(self.job, self.rank, self.before, after)
        total = sum(len(flat) for flat in after.values())
        if _digest(after) == self.digest:
            return Compared(judged=total)
        line = f"producer {self.rank}: its own cache has changed"
        return Compared(judged=total, wrong=total, lines=(line,))

    def _report(self, compared: Compared) -> RankReport:
        return RankReport(
            side=self.side,
            rank=self.rank,
            moved=tuple(self.moved.values()),
            awaited=self.notices.awaited,
            notified=self.notices.notified,
            foreign=self.notices.foreign,
            finished=len(self.notices.finished),
            compared=compared,
            torch="torch" in sys.modules,
        )


def _digest(storage: contents.Storage) -> bytes:
    found = hashlib.blake2b()
    for flat in storage.values():
        found.update(flat.data)
    return found.digest()


def _put(flat: contents.Bytes, into: Any) -> None:  # noqa: ANN401 - a numpy array, a torch tensor
    if isinstance(into, np.ndarray):
        into[:] = flat
        return
    import torch  # noqa: PLC0415 - only a GPU needs it

    into.copy_(torch.from_numpy(flat))
    torch.cuda.synchronize()


def _to_host(flat: Any) -> contents.Bytes:  # noqa: ANN401 - a numpy array or a torch tensor
    found: contents.Bytes = flat if isinstance(flat, np.ndarray) else flat.cpu().numpy()
    return found
