"""Run a job with local processes: start one for each rank, lead them through the stages, end them.

Invariant: no process outlives its run, and no wait is longer than the job allows. A rank that dies,
fails or gives no answer is named with its stage and reason, and ends the run. Processes are always
spawned, because NIXL does not work in a forked child.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from kvspec.run.report import DIED, Failure, Report
from kvspec.run.worker import ENDING, FAILED, STAGES, Introduction, run_rank

Progress = Callable[[str, int, int], None]
"""Called with a stage, how many ranks are through it, and how many there are."""

GRACE = 0.3  # seconds in which others that fail at the same time are still heard
LEAVE = 5.0  # seconds that a rank may take to close its agent
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
        names = {-number.value: number.name for number in signal.Signals}
        how = names.get(code or 0, f"exit status {code}")
        log = self.log.read_text(errors="replace") if self.log and self.log.exists() else ""
        words = [line.strip() for line in log.splitlines() if line.strip()][-LOG_TAIL:]
        said = f"; its last words: {' | '.join(words)}" if words else ""
        return self.failure(stage, f"{DIED} ({how}){said}")

    def answer(self, stage: str) -> Any:  # noqa: ANN401 - what a rank sends
        """Return what the rank says of *stage*, or its failure."""
        try:
            said, payload = self.pipe.recv()
        except (EOFError, OSError):
            return self.died(stage)
        return self.failure(*payload) if said == FAILED else payload


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

    A signal that ends this process ends all ranks first.

    Args:
        job: The job.
        progress: Function that receives the progress, or None.

    Returns:
        The report: what was moved, counted and compared, and which ranks failed.

    Raises:
        SpecError: If the job cannot run. Then nothing has started.
        MismatchError: If the engines do not fit. Then nothing has started.
    """
    devices = check_job(job)
    deadline, seconds = time.monotonic() + job.timeout, dict[str, float]()
    with (
        exits(),
        TemporaryDirectory(prefix="kvspec-") as folder,
        _crew(job, devices, deadline, folder) as members,
    ):
        lead = _Lead(job, members, deadline, progress or (lambda *_: None))
        answers = lead.through(seconds)
    return Report.of(job, answers, seconds)


@attrs.frozen
class _Lead:
    """Leads the *members* of a run through its stages, until *deadline*."""

    job: Job
    members: list[_Member]
    deadline: float
    progress: Progress

    def through(self, seconds: dict[str, float]) -> list[object]:
        """Return the report of every rank, or the failures of the stage that some did not pass.

        Puts the seconds of each stage that all passed into *seconds*.
        """
        answers: dict[_Member, object] = {}
        for stage in STAGES:
            began = time.perf_counter()
            self.progress(stage, 0, len(self.members))
            if stage != STAGES[0]:
                self._go_on(list(answers.values()))
            answers = self._gather(stage)
            failures = [each for each in answers.values() if isinstance(each, Failure)]
            if failures:
                return [*failures]
            seconds[stage] = time.perf_counter() - began
        self._go_on([])
        for each in self.members:
            each.process.join(LEAVE)
        return [answers[each] for each in self.members]

    def _go_on(self, answers: list[object]) -> None:
        """Let each rank go on, with the introductions of whom it reaches and who notifies it."""
        cards = [each for each in answers if isinstance(each, Introduction)]
        for member in self.members:
            who = member.side, member.rank
            wanted = {*self.job.notifies(*who), *self.job.notifiers(*who)}
            with suppress(OSError):  # it is dead, as gathering its answer will tell
                member.pipe.send([e for e in cards if e.side != member.side and e.rank in wanted])

    def _gather(self, stage: str) -> dict[_Member, object]:
        """Return what every rank says of *stage*, or of some that they failed."""
        answers: dict[_Member, object] = {}
        waiting, deadline, failed = {each.pipe: each for each in self.members}, self.deadline, False
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for member in [waiting.pop(pipe) for pipe in [*waiting] if pipe in ready]:
                answers[member] = member.answer(stage)
                self.progress(stage, len(answers), len(self.members))
                if isinstance(answers[member], Failure):
                    deadline, failed = min(deadline, time.monotonic() + GRACE), True
        if not failed:
            why = f"no answer within {self.job.timeout:g} s"
            answers |= {each: each.failure(stage, why) for each in waiting.values()}
        return answers


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
            pipe, other = context.Pipe()
            process = context.Process(
                target=run_rank,
                args=(other, job, side, rank, device, deadline, log),
                name=f"{side} {rank}",
                daemon=True,
            )
            members.append(_Member(side, rank, process, pipe, log))
            with _uninterrupted(), other:
                process.start()
        yield members
    finally:
        _end(members)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold signals back while a process starts; it inherits that, and lets all but SIGINT in."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


@contextmanager
def exits() -> Iterator[None]:
    """Turn the first signal that would end this process into `SystemExit`."""
    main = threading.current_thread() is threading.main_thread()
    heard = [each for each in ENDING if main and signal.getsignal(each) == signal.SIG_DFL]

    def leave(number: int, frame: object) -> None:
        del frame
        for each in heard:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in heard:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in heard:
            signal.signal(each, signal.SIG_DFL)


def _end(members: list[_Member]) -> None:
    for each in members:
        if each.process.pid is not None and each.process.is_alive():
            each.process.kill()
    for each in members:
        if each.process.pid is not None:
            each.process.join()
            each.process.close()
        each.pipe.close()
