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
from kvspec.run.limits import check_memory, devices_of
from kvspec.run.rank_client import RankClient, Ranks
from kvspec.run.report import Failure, Report
from kvspec.run.transfer_rank import Arguments, StageError, TransferRank, lead

GRACE = 0.3  # seconds after a failure in which failures of other ranks are collected


def check_job(job: Job) -> list[str]:
    """Check that this machine can run *job*.

    Returns:
        The devices that the ranks use in turn.

    Raises:
        SpecError: If the job needs more than the machine has.
        MismatchError: If the engines do not fit.
    """
    _ = job.plan  # planning is a check
    movers = len(job.consumer.parallel.ranks)
    check_memory(job.cache_bytes(), movers * job.staging << 20)
    return devices_of(job.device)


def run_transfer(job: Job) -> Report:
    """Run *job* with one process for each rank.

    A signal that ends this process ends all ranks, too.

    Args:
        job: The job.

    Returns:
        The report of moved bytes, requests, compared bytes and failed ranks.

    Raises:
        SpecError: If the job cannot run. Then nothing has started.
        MismatchError: If the engines do not fit. Then nothing has started.
    """
    with LocalRanks(job, check_job(job)) as ranks:
        return lead(job, ranks.through)


class LocalRanks(Ranks):
    """The ranks of one job, each a process of this machine with a `TransferRank`."""

    def __init__(self, job: Job, devices: list[str]) -> None:
        super().__init__()
        self.job, self.deadline = job, time.monotonic() + job.timeout
        secret = secrets.token_bytes(16)
        for number, (side, rank) in enumerate(job.ranks()):
            arguments = job, side, rank, devices[number % len(devices)], self.deadline, secret
            self.add(f"{side} {rank}", TransferRank, arguments)

    def through(self, stage: str, arguments: Arguments) -> list[Any]:
        """Let all ranks do one stage, and return their answers. See `Through`."""
        members = zip(self.ranks, self.job.ranks(), strict=True)
        waiting = {client.pipe: (client, member) for client, member in members}
        for client, (side, _) in waiting.values():
            with suppress(OSError):  # It is dead, and has no answer.
                client.send(stage, *arguments[side])
        answers: dict[RankClient, Any] = {}
        failures: list[Failure] = []
        deadline = self.deadline
        while waiting and (ready := wait(waiting, max(0.0, deadline - time.monotonic()))):
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                client, member = waiting.pop(pipe)
                try:
                    answers[client] = client.answer()
                except (ConnectionError, KVSpecError) as error:
                    died = isinstance(error, ConnectionResetError)
                    why = client.death() if died else str(error)
                    failures.append(Failure(*member, stage, why, died=died))
                    deadline = min(deadline, time.monotonic() + GRACE)
        if not failures:
            why = f"no answer within {self.job.timeout:g} s"
            failures = [Failure(*member, stage, why) for _, member in waiting.values()]
        if failures:
            raise StageError(tuple(failures))
        return [answers[client] for client in self.ranks]
