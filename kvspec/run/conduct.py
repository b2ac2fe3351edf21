"""The parent: starts every rank as a process of its own, leads them through the stages, ends them.

Law: no process outlives its run, and none is waited for longer than the job allows. A rank that
dies, fails or is silent is named, with the stage and the reason, and ends the run. Always spawned:
nixl does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from kvspec.ownership.parallel import RankId
from kvspec.run.job import Job, Side
from kvspec.run.limits import check_device, check_memory
from kvspec.run.report import Failure, RankReport, Report
from kvspec.run.worker import FAILED, Introduction, run_rank

STAGES = ("start", "fill", "connect", "transfer", "compare")
"""What a run does, in order."""

Progress = Callable[[str, int, int], None]
"""Called with a stage, how many ranks are through it, and how many there are."""

GRACE = 0.3  # seconds in which others that fail at the same time are still heard
LEAVE = 5.0  # seconds that a rank may take to close its agent
DIED = "its process died"
LOG_TAIL = 3  # lines of a dead rank's output that are told


@attrs.frozen(eq=False)
class _Member:
    """One rank's process, and the parent's end of its pipe."""

    side: Side
    rank: RankId
    process: BaseProcess
    pipe: Connection
    log: Path | None

    def failure(self, stage: str, why: str) -> Failure:
        return Failure(side=self.side, rank=self.rank, stage=stage, why=why)

    def died(self, stage: str) -> Failure:
        """Say how the process ended, with its last words."""
        self.process.join(LEAVE)
        code = self.process.exitcode
        how = f"exit status {code}" if code is None or code >= 0 else _signal_name(-code)
        words = _tail(self.log)
        said = f"; its last words: {' | '.join(words)}" if words else ""
        return self.failure(stage, f"{DIED} ({how}){said}")


class _Stopped(Exception):  # noqa: N818 - it never leaves this module
    """Some ranks did not get through."""

    def __init__(self, failures: Iterable[Failure]) -> None:
        super().__init__()
        self.failures = tuple(failures)


def check_job(job: Job) -> int:
    """Return how many GPUs *job* has; raise `SpecError` or `MismatchError` if it cannot be run."""
    _ = job.plan  # planning is a check
    check_memory(job.cache_bytes())
    return check_device(job.device)


def run_transfer(job: Job, progress: Progress | None = None) -> Report:
    """Run *job*, each rank in its own process, and return what was moved, counted and compared.

    Raises `SpecError` or `MismatchError` before anything starts if the job cannot be run; what
    fails later is in the report. On an interrupt every process is ended.
    """
    plan, devices = job.plan, check_job(job)
    deadline = time.monotonic() + job.timeout
    seconds: dict[str, float] = {}
    ranks: tuple[RankReport, ...] = ()
    failures: tuple[Failure, ...] = ()
    with TemporaryDirectory(prefix="kvspec-") as folder:
        try:
            with _crew(job, devices, deadline, folder) as members:
                ranks = _lead(job, members, deadline, progress or _silent, seconds)
        except _Stopped as stopped:
            failures = stopped.failures
    done = {"producer": 0, "consumer": 0}
    for each in ranks:
        done[each.side] += each.finished
    return Report(
        ranks=ranks,
        failures=failures,
        stages=seconds,
        sending=(done["producer"], plan.finished_sending_count * job.requests),
        receiving=(done["consumer"], plan.finished_recving_count * job.requests),
    )


def _silent(stage: str, done: int, total: int) -> None:
    del stage, done, total


def _lead(
    job: Job,
    members: list[_Member],
    deadline: float,
    progress: Progress,
    seconds: dict[str, float],
) -> tuple[RankReport, ...]:
    """Lead the ranks through `STAGES`; put the seconds of each into *seconds*."""
    answers: dict[_Member, Any] = {}
    cards: list[Introduction] = []
    for stage in STAGES:
        began = time.perf_counter()
        progress(stage, 0, len(members))
        if stage == "connect":
            _introduce(job, members, cards)
        elif stage in {"transfer", "compare"}:
            _send(members, stage)
        answers = _gather(members, stage, deadline, job.timeout, progress)
        if stage == "start":
            cards = list(answers.values())
        seconds[stage] = time.perf_counter() - began
    _send(members, "end")
    for each in members:
        each.process.join(LEAVE)
    return tuple(answers[each] for each in members)


def _send(members: Iterable[_Member], word: object) -> None:
    for each in members:
        _send_to(each, word)


def _send_to(member: _Member, word: object) -> None:
    try:
        member.pipe.send(word)
    except OSError:
        return  # it is dead, as gathering its answer will tell


def _introduce(job: Job, members: list[_Member], cards: list[Introduction]) -> None:
    """Send each rank the introductions of those whom it reads, writes or notifies."""
    plan = job.plan
    for member in members:
        if member.side == "consumer":
            wanted = set(plan.notifies(member.rank))
            wanted |= set(plan.sources(member.rank) if job.mode == "pull" else ())
        else:
            wanted = set(plan.targets(member.rank) if job.mode == "push" else ())
        told = tuple(e for e in cards if e.side != member.side and e.rank in wanted)
        _send_to(member, told)


def _gather(
    members: list[_Member], stage: str, deadline: float, timeout: float, progress: Progress
) -> dict[_Member, Any]:
    """Return the answer of every rank to *stage*; raise `_Stopped` if one has none."""
    answers: dict[_Member, Any] = {}
    failures: list[Failure] = []
    waiting = {each.pipe: each for each in members}
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        for pipe in [each for each in waiting if each in ready]:
            member = waiting.pop(pipe)
            answer = _answer(member, stage)
            if isinstance(answer, Failure):
                failures.append(answer)
                deadline = min(deadline, time.monotonic() + GRACE)
            else:
                answers[member] = answer
                progress(stage, len(answers), len(members))
        if not ready:
            break
    if waiting and not failures:
        why = f"no answer within {timeout:g} s"
        failures = [each.failure(stage, why) for each in waiting.values()]
    if failures:
        raise _Stopped(sorted(failures, key=lambda each: DIED not in each.why))
    return answers


def _answer(member: _Member, stage: str) -> Any:  # noqa: ANN401 - what a rank sends
    try:
        said, payload = member.pipe.recv()
    except (EOFError, OSError):
        return member.died(stage)
    return member.failure(*payload) if said == FAILED else payload


@contextmanager
def _crew(job: Job, devices: int, deadline: float, folder: str) -> Iterator[list[_Member]]:
    """Start every rank's process; whatever happens, none is left."""
    context = multiprocessing.get_context("spawn")
    loud = {"UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"} & set(os.environ)
    members: list[_Member] = []
    resource_tracker.ensure_running()
    try:
        for at, (side, rank) in enumerate(job.ranks()):
            device = f"cuda:{at % devices}" if job.device == "cuda" else job.device
            log = None if loud else Path(folder, f"{side}-{rank}.log")
            pipe, theirs = context.Pipe()
            process = context.Process(
                target=run_rank,
                args=(theirs, job, side, rank, device, deadline, log),
                name=f"{side} {rank}",
                daemon=True,
            )
            members.append(_Member(side, rank, process, pipe, log))
            with _uninterrupted(), theirs:
                process.start()
        yield members
    finally:
        _end(members)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold the interrupt back while a process starts: it inherits that, so only we are stopped."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _end(members: list[_Member]) -> None:
    for each in members:
        if each.process.pid is not None and each.process.is_alive():
            each.process.kill()
    for each in members:
        if each.process.pid is not None:
            each.process.join()
            each.process.close()
        each.pipe.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(log: Path | None) -> list[str]:
    if log is None or not log.exists():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()][-LOG_TAIL:]
