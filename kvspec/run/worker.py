"""The process of one rank: it allocates, fills, connects, moves its own rows, and compares.

Invariant: a process knows only its job, its rank and the messages of other ranks, and plans for
itself. It never imports torch for a cache in host memory. It reports each error to its parent.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Generator, Iterable
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.table import DescriptorTable, build_table
from kvspec.errors import KVSpecError
from kvspec.memory.allocation import allocate
from kvspec.memory.rank_cache import RankCache
from kvspec.nixl import NixlRank, Staging, Transfer
from kvspec.nixl.transfer_spec import Prepared
from kvspec.ownership.parallel import RankId
from kvspec.run.contents import Bytes, Contents, Storage
from kvspec.run.job import Job, Side
from kvspec.run.notices import Notices
from kvspec.run.report import Compared, Moved, RankReport

STAGES = ("start", "fill", "connect", "transfer", "compare")
"""What a run does, in order."""
FAILED = "failed"
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process."""
_WITH_PARENT = 1  # of prctl: the signal that a process gets when its parent dies


@attrs.frozen
class Introduction:
    """What a rank tells the other side: who it is, how to reach it, where its cache lies."""

    side: Side
    rank: RankId
    metadata: bytes
    cache: RankCache


@attrs.frozen
class _Lane:
    """The rows between this rank and one of the other side, and what was moved over them."""

    table: DescriptorTable
    producer: Prepared
    consumer: Prepared
    moved: list[tuple[Transfer, float]] = attrs.field(factory=list)


def run_rank(
    parent: Connection,
    job: Job,
    side: Side,
    rank: RankId,
    device: str,
    deadline: float,
    log: Path | None,
) -> None:
    """Run one rank of *job*, led by *parent* at the other end; the body of a spawned process.

    After each stage it sends what came of it and waits for a word, which the next stage may need.
    *deadline*: of the system's monotonic clock. *log*: the file that takes what libraries print,
    or None to let it through to standard error.
    """
    prepare(device, log)
    stage = STAGES[0]
    try:
        # The deadline: in time to tell the parent what is missing, before it gives up.
        own = RankRun(job, side, rank, device, deadline - min(1.0, job.timeout / 10))
        with closing(own.stages()) as stages:
            answer: Any = None
            for stage in STAGES:
                parent.send((stage, stages.send(answer)))
                answer = parent.recv()
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except Exception as error:  # noqa: BLE001 - the parent reports it, whatever it is
        with suppress(OSError):
            parent.send((FAILED, (stage, words_of(error))))


def prepare(device: str, log: Path | None) -> None:
    """End with the parent; libraries quiet, and UCX on this machine, unless the user said else."""
    ctypes.CDLL(None).prctl(_WITH_PARENT, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    let_through(device, lo=True)
    if log is None:
        os.dup2(2, 1)
        return
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)


def let_through(device: str, *, lo: bool) -> None:
    """Keep UCX quiet, and, of ranks on one machine (*lo*), off the network."""
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    if device == "cpu" and lo:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def words_of(error: Exception) -> str:
    """Return an error as a report tells it."""
    if isinstance(error, KVSpecError):
        return str(error)
    *_, frame = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} at {frame.filename}:{frame.lineno}"


@attrs.define(eq=False, slots=False)
class RankRun:
    """One rank, from its memory to its report."""

    job: Job
    side: Side
    rank: RankId
    device: str
    deadline: float
    secret: bytes = b""

    def __attrs_post_init__(self) -> None:
        other = "producer" if self.side == "consumer" else "consumer"
        senders = [f"{other}-{rank}-" for rank in self.job.notifiers(self.side, self.rank)]
        self.notices = Notices([request.request_id for request in self.job.moves], senders)
        self.active = self.side == self.job.active
        self.contents = Contents(self.job, self.side, self.rank)
        self.names: dict[RankId, str] = {}
        self.lanes: dict[RankId, _Lane] = {}

    def stages(self) -> Generator[object, Any, None]:
        """Go through every stage; yield what comes of it, and take what the parent answers."""
        engine, blocks = self.job.engine(self.side), self.job.num_blocks(self.side)
        cache, storage = allocate(engine, self.rank, blocks, self.device)
        name = f"{self.side}-{self.rank}-"  # no secret where the parent's pipes introduce ranks
        area = self.active and self.job.staging << 20
        staging = Staging(buffer=area, always=True) if area else None
        with NixlRank(
            prefix=name, secret=self.secret, polled=self.active, staging=staging
        ) as agent:
            agent.register(cache.memory, owner=storage)
            introductions = yield Introduction(self.side, self.rank, agent.metadata(), cache)
            before = self.contents.before({name: len(flat) for name, flat in storage.items()})
            for name, flat in before.items():
                _put(flat, storage[name])
            digest = _digest(before)
            yield None
            self._connect(agent, cache, introductions)
            yield None
            self._transfer(agent)
            yield None
            compared = self._compare(before, digest, storage)
            self.notices.drain(agent)
            yield self._report(compared)

    def _connect(
        self, agent: NixlRank, cache: RankCache, introductions: Iterable[Introduction]
    ) -> None:
        for each in introductions:
            if each.rank not in self.job.notifies(self.side, self.rank):
                agent.introduce(each.metadata)  # who only notifies this rank
                continue
            name = self.names[each.rank] = agent.connect(each.metadata)
            own = self.side == "producer"
            producer, consumer = (cache, each.cache) if own else (each.cache, cache)
            if not self.active or not self.job.plan.between(producer.rank, consumer.rank):
                continue
            table = build_table(self.job.plan, producer, consumer)
            self.lanes[each.rank] = _Lane(
                table,
                agent.prepare(
                    table.producer_rows, table.producer_memory_type, peer=None if own else name
                ),
                agent.prepare(
                    table.consumer_rows, table.consumer_memory_type, peer=name if own else None
                ),
            )

    def _transfer(self, agent: NixlRank) -> None:
        """Move every request; notify once all of one is done; wait for what is to come."""

        def notify(request: str) -> None:
            for rank in self.job.notifies(self.side, self.rank):
                agent.notify(self.names[rank], request.encode())

        def release(request: str) -> None:
            if not self.active and self.side == "consumer":
                notify(request)  # pushed to: the producers may let go of it now

        if self.active:
            for request in self.job.moves:
                for lane in self.lanes.values():
                    self._move(agent, lane, request)
                notify(request.request_id)
        self.notices.collect(agent, self.deadline, release)

    def _move(self, agent: NixlRank, lane: _Lane, request: TransferRequest) -> None:
        began = time.perf_counter()
        ids = lane.table.select(request)
        producer, consumer = zip((lane.producer, lane.consumer), ids, strict=True)
        left = max(0.0, self.deadline - time.monotonic())
        transfer = (
            agent.read(*consumer, *producer, request=request.request_id, timeout=left)
            if self.side == "consumer"
            else agent.write(*producer, *consumer, request=request.request_id, timeout=left)
        )
        transfer.wait()
        lane.moved.append((transfer, time.perf_counter() - began))

    def _compare(self, before: Storage, digest: bytes, storage: dict[str, Any]) -> Compared:
        after = {name: _to_host(flat) for name, flat in storage.items()}
        if self.side == "consumer":
            if self.job.tamper and self.rank == self.job.consumer.parallel.ranks[0]:
                self.contents.tamper(after)
            return self.contents.judge(before, after)
        total = sum(len(flat) for flat in after.values())
        if _digest(after) == digest:
            return Compared(judged=total)
        line = f"producer {self.rank}: its own cache has changed"
        return Compared(judged=total, wrong=total, lines=(line,))

    def _report(self, compared: Compared) -> RankReport:
        moved = (
            Moved(
                producer=lane.table.producer.rank,
                consumer=lane.table.consumer.rank,
                nbytes=sum(transfer.nbytes for transfer, _ in lane.moved),
                ids=sum(transfer.descriptors for transfer, _ in lane.moved),
                runs=sum(transfer.runs for transfer, _ in lane.moved),
                seconds=sum(seconds for _, seconds in lane.moved),
            )
            for lane in self.lanes.values()
        )
        return RankReport(
            side=self.side,
            rank=self.rank,
            moved=tuple(moved),
            awaited=self.notices.awaited,
            notified=self.notices.notified,
            foreign=tuple(self.notices.foreign),
            finished=len(self.notices.finished),
            compared=compared,
            torch="torch" in sys.modules,
        )


def _digest(storage: Storage) -> bytes:
    digest = hashlib.blake2b()
    for flat in storage.values():
        digest.update(flat.data)
    return digest.digest()


def _put(flat: Bytes, into: Any) -> None:  # noqa: ANN401 - a numpy array, a torch tensor
    if isinstance(into, np.ndarray):
        into[:] = flat
        return
    import torch  # noqa: PLC0415 - only a GPU needs it

    into.copy_(torch.from_numpy(flat))
    torch.cuda.synchronize()


def _to_host(flat: Any) -> Bytes:  # noqa: ANN401 - a numpy array or a torch tensor
    bytes_: Bytes = flat if isinstance(flat, np.ndarray) else flat.cpu().numpy()
    return bytes_
