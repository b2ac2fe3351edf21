"""A run whose processes are started by torchrun, Slurm or Open MPI, on any number of machines.

Invariant: each process is one rank and runs the same code as in a local run. A store replaces the
parent: it keeps the answers of all ranks for each stage. A rank that fails writes that to the
store. A rank without an answer is named by the others. No rank waits longer than the job allows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import attrs

from kvspec.errors import KVSpecError, SpecError, WireError
from kvspec.ownership.parallel import RankId
from kvspec.run.job import Job
from kvspec.run.limits import check_device
from kvspec.run.report import Compared, Failure, Moved, RankReport, Report
from kvspec.run.worker import STAGES, Introduction, RankRun, let_through, words_of
from kvspec.wire.codec import decode_handshake, encode_handshake
from kvspec.wire.handshake import Handshake

Progress = Callable[[str, int, int], None]
"""Called with a stage, how many ranks are through it, and how many there are."""

REST = 0.02  # seconds between two looks at the store
LEAVE = 5.0  # seconds that the others may take until the first rank, who keeps the store, leaves
MARGIN = 0.1  # share of the job's time in which a rank that fails still tells the others, to 1 s
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
}
"""By launcher, the variables that tell a process its number, how many there are, and its number on
its own machine. All need ``MASTER_ADDR`` and ``MASTER_PORT``, which torchrun sets itself."""


@attrs.frozen(kw_only=True)
class Place:
    """The place of this process in the launch.

    Attributes:
        number: Number of this process.
        size: Number of all processes.
        local: Number of this process on its machine.
        address: Host of the store.
        port: Port of the store.
    """

    number: int
    size: int
    local: int
    address: str
    port: int

    @staticmethod
    def of(launcher: str, job: Job, environ: Mapping[str, str] = os.environ) -> Place:
        """Read the place from the environment variables that *launcher* sets.

        Raises:
            SpecError: If a variable is missing, or the number of processes is not that of *job*.
        """
        if launcher not in LAUNCHERS:
            raise SpecError("launcher", launcher, f"one of {', '.join(LAUNCHERS)}")
        number, size, local = (_number(environ, name) for name in LAUNCHERS[launcher])
        wanted = len(list(job.ranks()))
        if size != wanted:
            name = LAUNCHERS[launcher][1]
            raise SpecError(name, size, f"{wanted}, one process for each rank of both engines")
        if number >= size:
            raise SpecError(LAUNCHERS[launcher][0], number, f"a number below {size}")
        address, port = environ.get("MASTER_ADDR", ""), _number(environ, "MASTER_PORT")
        if not address:
            raise SpecError("MASTER_ADDR", None, "the host of the first process")
        return Place(number=number, size=size, local=local, address=address, port=port)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None or not (text.isascii() and text.isdecimal()):
        raise SpecError(name, text, "a number from the launcher")
    return int(text)


class GoneError(KVSpecError):
    """A run that cannot continue. *failures* contains the ranks, their stages and reasons."""

    def __init__(self, failures: tuple[Failure, ...]) -> None:
        super().__init__("; ".join(map(str, failures)))
        self.failures = failures


def run_launched(job: Job, place: Place, progress: Progress | None = None) -> Report | None:
    """Run this process's rank of *job*.

    Args:
        job: The job, the same on all processes.
        place: The place of this process.
        progress: Function that receives the progress, or None.

    Returns:
        The report on the first process, None on all others.

    Raises:
        GoneError: If the run failed, on all processes but the first.
    """
    began = time.monotonic()
    _ = job.plan  # planning is a check
    device = _device(job, place)
    let_through(device, lo=place.address in LOOPBACK)
    seconds = dict[str, float]()
    try:
        board = _Board(job, place, began + job.timeout, progress or (lambda *_: None))
        answers: tuple[RankReport | Failure, ...] = board.through(device, seconds)
    except GoneError as error:
        if place.number:
            raise
        answers = error.failures
    return Report.of(job, answers, seconds) if place.number == 0 else None


def _device(job: Job, place: Place) -> str:
    devices = check_device(job.device)
    return f"cuda:{place.local % devices}" if job.device == "cuda" else job.device


class _Board:
    """The store, as the ranks of one run use it: what each said of each stage."""

    def __init__(self, job: Job, place: Place, deadline: float, progress: Progress) -> None:
        self.job = job
        self.ranks = list(job.ranks())
        self.place = place
        self.deadline = deadline
        self.progress = progress
        self.store = self._asked(STAGES[0], self._open)

    def _open(self) -> Any:  # noqa: ANN401 - torch's store
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # it would print its own stack
        from torch.distributed import PrefixStore, TCPStore  # noqa: PLC0415 - else no torch

        # torchrun keeps a store for its workers, who may be started again.
        kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(
            self.place.address,
            self.place.port,
            is_master=not kept and self.place.number == 0,
            timeout=timedelta(seconds=max(1.0, self.deadline - time.monotonic())),
            wait_for_workers=False,
            multi_tenant=True,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"kvspec/{attempt}", store)

    def through(self, device: str, seconds: dict[str, float]) -> tuple[RankReport | Failure, ...]:
        """Run this process's rank; return every rank's report on the first process."""
        side, rank = self.ranks[self.place.number]
        margin = min(1.0, self.job.timeout * MARGIN)
        secret = os.environ.get("KVSPEC_SECRET", "").encode()
        run = RankRun(self.job, side, rank, device, self.deadline - margin, secret)
        stage, said = STAGES[0], list[bytes]()
        try:
            with closing(run.stages()) as stages:
                answer: Any = None
                for stage in STAGES:
                    began = time.perf_counter()
                    self._say(stage, _encoded(stages.send(answer)))
                    said = self._gather(stage)
                    answer = self._introductions(said) if stage == STAGES[0] else None
                    seconds[stage] = time.perf_counter() - began
                self._leave()
        except GoneError:
            raise
        except Exception as error:
            failure = Failure(side=side, rank=rank, stage=stage, why=words_of(error))
            with suppress(Exception):
                self.store.set("failed", _failure_text(failure))
            raise GoneError((failure,)) from error
        return tuple(map(_report, said)) if self.place.number == 0 else ()

    def _say(self, stage: str, what: bytes) -> None:
        self._asked(stage, lambda: self.store.set(f"{stage}/{self.place.number}", what))

    def _gather(self, stage: str) -> list[bytes]:
        """Return what every rank says of *stage*; raise naming who fails, or is silent too long."""
        waiting = {number: f"{stage}/{number}" for number in range(self.place.size)}
        while waiting:
            if self._has(stage, "failed"):
                raise GoneError((_failure(self._get(stage, "failed")),))
            if self._has(stage, *waiting.values()):
                break
            if self.place.number == 0 or time.monotonic() >= self.deadline:
                waiting = {n: key for n, key in waiting.items() if not self._has(stage, key)}
                self.progress(stage, self.place.size - len(waiting), self.place.size)
            if waiting and time.monotonic() >= self.deadline:
                why = f"no answer within {self.job.timeout:g} s"
                raise GoneError(tuple(self._failure_of(n, stage, why) for n in waiting))
            time.sleep(REST)
        last, first = stage == STAGES[-1], stage == STAGES[0]
        wanted = range(self.place.size) if first or (last and self.place.number == 0) else ()
        return [self._get(stage, f"{stage}/{number}") for number in wanted]

    def _introductions(self, said: list[bytes]) -> list[Introduction]:
        """Return the introductions of whom this rank reaches and of who notifies it."""
        who = self.ranks[self.place.number]
        wanted = {*self.job.notifies(*who), *self.job.notifiers(*who)}
        found = []
        for (side, rank), data in zip(self.ranks, said, strict=True):
            if side != who[0] and rank in wanted:
                shake = decode_handshake(data)
                if shake.rank != rank or shake.engine != self.job.engine(side):
                    raise WireError(
                        "start", str(shake.rank), f"{side} {rank}, of this job's engine"
                    )
                found.append(Introduction(side, rank, shake.transport, shake.cache))
        return found

    def _leave(self) -> None:
        """Leave the store, the first rank last: it may be who keeps it."""
        with suppress(Exception):
            self.store.set(f"left/{self.place.number}", b"")
            end = time.monotonic() + LEAVE
            left = [f"left/{number}" for number in range(self.place.size)]
            while self.place.number == 0 and time.monotonic() < end and not self.store.check(left):
                time.sleep(REST)

    def _has(self, stage: str, *keys: str) -> bool:
        return bool(self._asked(stage, lambda: self.store.check(list(keys))))

    def _get(self, stage: str, key: str) -> bytes:
        return bytes(self._asked(stage, lambda: self.store.get(key)))

    def _asked(self, stage: str, question: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return what the store answers; raise naming where it is, if it does not."""
        try:
            return question()
        except Exception as error:
            where = f"{self.place.address}:{self.place.port}"
            words = str(error).partition("\n")[0]
            why = f"no store at {where} (MASTER_ADDR, MASTER_PORT), or not any more: {words}"
            raise GoneError((self._failure_of(self.place.number, stage, why),)) from error

    def _failure_of(self, number: int, stage: str, why: str) -> Failure:
        side, rank = self.ranks[number]
        return Failure(side=side, rank=rank, stage=stage, why=why)


def _encoded(answer: object) -> bytes:
    """Return what a rank says of a stage, for the store."""
    if isinstance(answer, Introduction):
        shake = Handshake(
            engine_id=answer.side, epoch=0, cache=answer.cache, transport=answer.metadata
        )
        return encode_handshake(shake)
    return json.dumps(attrs.asdict(answer)).encode() if isinstance(answer, RankReport) else b""


def _report(data: bytes) -> RankReport:
    """Return the report that a rank encoded."""
    fields = json.loads(data)
    moved = tuple(
        Moved(**pair | {side: RankId(**pair[side]) for side in ("producer", "consumer")})
        for pair in fields["moved"]
    )
    lines = tuple(fields["compared"].pop("lines"))
    compared = Compared(**fields["compared"], lines=lines)
    rank, foreign = RankId(**fields["rank"]), tuple(fields["foreign"])
    more = {"rank": rank, "moved": moved, "compared": compared, "foreign": foreign}
    return RankReport(**fields | more)


def _failure_text(failure: Failure) -> bytes:
    return json.dumps(attrs.asdict(failure)).encode()


def _failure(data: bytes) -> Failure:
    fields = json.loads(data)
    return Failure(**fields | {"rank": RankId(**fields["rank"])})
