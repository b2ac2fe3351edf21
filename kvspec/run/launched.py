"""A run whose processes are started by torchrun, Slurm or Open MPI, on any number of machines.

Invariant: each process is one rank and does the same stages as in a local run. A store replaces the
parent: it contains the answers of all ranks for each stage. A rank that fails writes its failure to
the store. The others name a rank that does not answer. No rank waits longer than the job allows.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import attrs
import msgspec

from kvspec.errors import SpecError
from kvspec.run.job import Job
from kvspec.run.limits import devices_of
from kvspec.run.rank_server import words_of
from kvspec.run.report import Failure, RankReport, Report
from kvspec.run.transfer_rank import STAGES, Arguments, StageError, TransferRank, lead
from kvspec.wire.seal import MIN_SECRET

STORE_REST = 0.02  # seconds between two looks at the store
STORE_WAIT = 5.0  # seconds for which the first rank, which may keep the store, waits for the others
ANSWERS: dict[str, type] = {"start": bytes, "compare": RankReport}
"""The types of the answers that other processes read, by stage."""
OPTIONS = ("tokens", "cached", "requests", "seed", "staging", "tamper")
"""The fields of a job that all processes must agree on, besides the engines."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# An address of the documentation range (RFC 5737). No packet is sent to it.
ELSEWHERE = "192.0.2.1"
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
}
"""For each launcher, the variables with the number of a process, the number of all processes, and
the number of the process on its machine. All launchers need `MASTER_ADDR` and `MASTER_PORT`, which
only torchrun sets itself."""


@attrs.frozen(kw_only=True)
class Place:
    """The place of this process in the launch.

    Attributes:
        number: Number of this process.
        size: Number of all processes.
        local: Number of this process on its machine.
        address: Host of the store.
        port: Port of the store.
        secret: Secret that authenticates the ranks to each other.
    """

    number: int
    size: int
    local: int
    address: str
    port: int
    secret: bytes = attrs.field(repr=False)

    @staticmethod
    def of(launcher: str, job: Job, environ: Mapping[str, str] = os.environ) -> Place:
        """Read the place from the environment variables that *launcher* sets.

        Raises:
            SpecError: If a variable is missing or wrong, or the number of processes is not that of
                *job*.
        """
        if launcher not in LAUNCHERS:
            raise SpecError("launcher", launcher, f"one of {', '.join(LAUNCHERS)}")
        names = LAUNCHERS[launcher]
        number, size, local, port = (_number(environ, name) for name in (*names, "MASTER_PORT"))
        if size != (ranks := len(list(job.ranks()))):
            raise SpecError(names[1], size, f"{ranks}, one process for each rank of both engines")
        if number >= size:
            raise SpecError(names[0], number, f"a number below {size}")
        if not (address := environ.get("MASTER_ADDR")):
            raise SpecError("MASTER_ADDR", None, "the host of the first process")
        # The error has the length of a short secret, not its text.
        secret = os.fsencode(environ.get("KVSPEC_SECRET", ""))
        if len(secret) < MIN_SECRET:
            value = f"{len(secret)} bytes" if "KVSPEC_SECRET" in environ else None
            expected = f"the same random text for all processes, at least {MIN_SECRET} bytes"
            raise SpecError("KVSPEC_SECRET", value, expected)
        return Place(
            number=number, size=size, local=local, address=address, port=port, secret=secret
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None or not (text.isascii() and text.isdecimal()):
        raise SpecError(name, text, "a number from the launcher")
    return int(text)


def run_launched(job: Job, place: Place) -> Report:
    """Run this process's rank of *job*.

    Args:
        job: The job, the same on all processes.
        place: The place of this process.

    Returns:
        The report of all ranks. If the run failed, it has the failures that this process knows.

    Raises:
        SpecError: If the machine has no such device. Then nothing has started.
        MismatchError: If the engines do not fit. Then nothing has started.
    """
    deadline = time.monotonic() + job.timeout
    _ = job.plan  # planning is a check
    devices = devices_of(job.device)
    rank = LaunchedRank(job, place, devices[place.local % len(devices)], deadline)
    reports: SimpleQueue[Report] = SimpleQueue()
    # torch waits without end for a store whose process hangs, so another thread waits for torch.
    # The thread cannot be ended, but it does not keep the process.
    Thread(target=rank.run, args=(reports.put,), daemon=True).start()
    try:
        return reports.get(timeout=job.timeout + 2 * STORE_WAIT)
    except Empty:
        where = f"the store at {place.address}:{place.port}"
        why = f"neither {where} nor this rank answers within {job.timeout:g} s"
        return Report.of(job, (), (rank.failure(place.number, why),), {})


class LaunchedRank:
    """This process's rank, and the store that contains the answers of all ranks."""

    def __init__(self, job: Job, place: Place, device: str, deadline: float) -> None:
        self.job, self.place, self.device, self.deadline = job, place, device, deadline
        self.ranks = list(job.ranks())
        self.store: Any = None  # torch's store
        self.server: TransferRank | None = None
        self.stage = STAGES[0]

    def run(self, put: Callable[[Report], None]) -> None:
        """Do all stages, leave the store, and *put* the report."""
        report = lead(self.job, self.through)
        self.close_store()
        put(report)

    def through(self, stage: str, arguments: Arguments) -> list[Any]:
        """Do one stage, and return the answers of all ranks. See `Through`."""
        self.stage = stage
        try:
            self.store = self.store or self._open()
            self.store.check([])  # A rank without a store need not start.
            answer = self._answer(stage, arguments)
            self.store.set(f"{stage}/{self.place.number}", msgspec.json.encode(answer))
            self._wait()
            if stage not in ANSWERS:
                return []
            answers = (self.store.get(f"{stage}/{number}") for number in range(self.place.size))
            return [msgspec.json.decode(data, type=ANSWERS[stage]) for data in answers]
        except StageError:
            raise
        except Exception as error:  # only of the store
            where = f"{self.place.address}:{self.place.port}"
            words = str(error).partition("\n")[0]
            why = f"no store at {where} (MASTER_ADDR, MASTER_PORT), or not any more: {words}"
            raise StageError((self.failure(self.place.number, why),)) from error

    def close_store(self) -> None:
        """Leave the store, the first rank last, since its process may keep the store."""
        with suppress(Exception):
            if self.server is not None:
                self.server.close()  # It did not, if the run has failed.
            self.store.set(f"left/{self.place.number}", b"")
            end = time.monotonic() + STORE_WAIT
            left = [f"left/{number}" for number in range(self.place.size)]
            while self.place.number == 0 and time.monotonic() < end and not self.store.check(left):
                time.sleep(STORE_REST)

    def _open(self) -> Any:  # noqa: ANN401 - torch's store
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # Otherwise it prints its own stack.
        from torch.distributed import PrefixStore, TCPStore  # noqa: PLC0415 - only launchers need it

        # torchrun keeps a store for its workers, and may start the workers again.
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

    def _answer(self, stage: str, arguments: Arguments) -> object:
        """Do one stage of this process's rank. Store its failure for the other processes."""
        place, (side, rank) = self.place, self.ranks[self.place.number]
        try:
            if self.server is None:
                self._check_options()
                of_rank = self.job, side, rank, self.device, self.deadline, place.secret
                self.server = TransferRank(*of_rank, own_host(place.address))
            return getattr(self.server, stage)(*arguments[side])
        except Exception as error:
            failure = self.failure(place.number, words_of(error))
            with suppress(Exception):
                self.store.set("failed", msgspec.json.encode(failure))
            raise StageError((failure,)) from error

    def _check_options(self) -> None:
        """Refuse another job than that of the first process that reached the store.

        Otherwise a rank could compare less than the first process prints. `connect` compares the
        engines.
        """
        own = {name: getattr(self.job, name) for name in OPTIONS}
        first = self.store.compare_set("options", "", repr(own)).decode()
        if first != repr(own):
            raise SpecError("options", own, rule=f"differ from those of another process: {first}")

    def _wait(self) -> None:
        """Wait for the answers of all ranks. Raise `StageError` if one fails or does not answer."""
        keys = [f"{self.stage}/{number}" for number in range(self.place.size)]
        while not self.store.check(keys):
            if self.store.check(["failed"]):
                failed = self.store.get("failed")
                raise StageError((msgspec.json.decode(failed, type=Failure),))
            if time.monotonic() >= self.deadline:
                why = f"no answer within {self.job.timeout:g} s"
                late = [n for n, key in enumerate(keys) if not self.store.check([key])]
                if late:
                    raise StageError(tuple(self.failure(n, why) for n in late))
            time.sleep(STORE_REST)

    def failure(self, number: int, why: str) -> Failure:
        """Return the failure of a rank in the present stage."""
        return Failure(*self.ranks[number], self.stage, why)


def own_host(store: str) -> str:
    """Return an address of this machine that the ranks on other machines reach.

    It is the one from which this machine reaches the host of the *store*, or everything else. A
    machine's own name may stand for its loopback, which others cannot reach.
    """
    for target in () if store in LOOPBACK else (store, ELSEWHERE):
        with suppress(OSError):
            family, kind, *_, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # It sends nothing: UDP has no connections.
                host = str(probe.getsockname()[0])
            if not host.startswith("127.") and host != "::1":
                return host
    return "127.0.0.1"
