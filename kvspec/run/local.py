"""Run a job on this machine: start a process for each rank, and lead all through the stages.

Invariant: no process outlives its run, and no wait is longer than the job allows. A rank that dies,
fails or gives no answer is named with its stage and reason, and ends the run.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from kvspec.errors import KVSpecError
from kvspec.run.job import Job
from kvspec.run.limits import check_device, check_memory
from kvspec.run.rank_client import Ranks
from kvspec.run.report import Failure, Report
from kvspec.run.run_stages import Arguments, Progress, StageError, lead
from kvspec.run.transfer_rank import TransferRank

GRACE = 0.3  # seconds after a failure in which failures of other ranks are collected
LEAVE = 5.0  # seconds that a rank may take to close its session
MARGIN = 1.0  # seconds before the deadline at which ranks stop to wait and report what is missing


def check_job(job: Job) -> int:
    """Check that this machine can run *job*.

    Returns:
        The number of GPUs for the job.

    Raises:
        SpecError: If the job needs more than the machine has.
        MismatchError: If the engines do not fit.
    """
    _ = job.plan  # planning is a check
    check_memory(job.cache_bytes())
    return check_device(job.device)


def run_transfer(job: Job, progress: Progress | None = None) -> Report:
    """Run *job* with one process for each rank.

    A signal that ends this process ends all ranks, too.

    Args:
        job: The job.
        progress: Function that receives the progress, or None.

    Returns:
        The report of moved bytes, requests, compared bytes and failed ranks.

    Raises:
        SpecError: If the job cannot run. Then nothing has started.
        MismatchError: If the engines do not fit. Then nothing has started.
    """
    devices = check_job(job)
    with LocalRanks(job, progress or (lambda *_: None)) as ranks:
        ranks.start(devices)
        report = lead(job, ranks.through)
        if not report.failures:
            ranks.close()
    return report


class LocalRanks(Ranks):
    """The ranks of one job, each a process of this machine with a `TransferRank`."""

    def __init__(self, job: Job, progress: Progress) -> None:
        super().__init__()
        self.job, self.progress = job, progress
        self.deadline = time.monotonic() + job.timeout

    def start(self, devices: int) -> None:
        """Start all processes."""
        secret = secrets.token_bytes(16)
        deadline = self.deadline - min(MARGIN, self.job.timeout / 10)
        for number, (side, rank) in enumerate(self.job.ranks()):
            device = f"cuda:{number % devices}" if self.job.device == "cuda" else self.job.device
            arguments = self.job, side, rank, device, deadline, secret
            self.add(f"{side} {rank}", TransferRank, arguments)

    def through(self, stage: str, arguments: Arguments) -> list[Any]:
        """Let all ranks do one stage, and return their answers. See `Through`."""
        self.progress(stage, 0, len(self.ranks))
        for client, (side, _) in zip(self.ranks, self.job.ranks(), strict=True):
            with suppress(OSError):  # It is dead, and has no answer.
                client.tell(stage, *arguments[side])
        return self._gather(stage)

    def _gather(self, stage: str) -> list[Any]:
        """Return the answer of each rank. Raise `StageError` if one fails or does not answer."""
        members = list(zip(self.ranks, self.job.ranks(), strict=True))
        waiting = {client.pipe: number for number, (client, _) in enumerate(members)}
        answers: dict[int, Any] = {}
        failures: list[Failure] = []
        deadline = self.deadline
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                number = waiting.pop(pipe)
                client, (side, rank) = members[number]
                try:
                    answers[number] = client.answer()
                except ConnectionResetError:
                    failures.append(Failure(side, rank, stage, client.death(), died=True))
                except (ConnectionError, KVSpecError) as error:
                    failures.append(Failure(side, rank, stage, str(error)))
                if failures:
                    deadline = min(deadline, time.monotonic() + GRACE)
                self.progress(stage, len(answers) + len(failures), len(members))
        if not failures:
            why = f"no answer within {self.job.timeout:g} s"
            failures = [Failure(*members[number][1], stage, why) for number in waiting.values()]
        if failures:
            raise StageError(tuple(failures))
        return [answers[number] for number in range(len(members))]

    def close(self) -> None:
        """Let all ranks close their sessions."""
        for client in self.ranks:
            with suppress(OSError):
                client.tell("close")
        end = time.monotonic() + LEAVE
        for client in self.ranks:
            wait([client.pipe], max(0.0, end - time.monotonic()))
