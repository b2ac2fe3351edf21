"""Run sessions between two engines, kill ranks, restart them, and check that all requests recover.

Invariant: an impossible run is refused before a process starts. No process is left after the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.memory.allocation import plan_memory
from kvspec.run.job import SIDES, Job
from kvspec.run.limits import check_memory
from kvspec.run.local import exits
from kvspec.run.report import Figures
from kvspec.run.soak import KILLS, Soak, pools_of


def check_kills(job: Job, kills: int) -> list[Job]:
    """Return the requests of *job* as jobs with one request each.

    The numbers of tokens are random, from 1 to those of the job.

    Raises:
        SpecError: If the job cannot run with so many *kills*.
    """
    if positive_int("kill", kills, least=0) > job.requests:
        raise SpecError("kill", kills, f"at most requests={job.requests}, one kill for each")
    if job.staging:
        raise SpecError("kill", kills, rule="kill cannot be combined with staging")
    if job.tamper:
        raise SpecError("kill", kills, rule="kill cannot be combined with tamper")
    if job.device != "cpu":
        raise SpecError("kill", kills, rule=f"kill needs device=cpu, not {job.device}")
    _ = job.plan  # planning is a check
    drawn, jobs = random.Random(job.seed), list[Job]()  # noqa: S311 - no secret
    for _ in range(job.requests):
        tokens = drawn.randint(1, job.tokens)
        jobs.append(attrs.evolve(job, tokens=tokens, cached=min(job.cached, tokens), requests=1))
    pools = {side: pools_of(jobs, side) for side in SIDES}
    laid = [plan_memory(job.engine(side), rank, pools[side]).memory for side, rank in job.ranks()]
    check_memory([sum(memory.length for memory in memories) for memories in laid])
    return jobs


def run_recovery(
    job: Job,
    kills: int,
    progress: Callable[[int], None] | None = None,
) -> Figures:
    """Run *job* over sessions, and kill a random rank *kills* times.

    The engine of a killed rank is restarted. The requests have random lengths, up to the tokens of
    the job.

    Args:
        job: The job.
        kills: Number of kills, at most the number of requests.
        progress: Function that receives the number of requests sent so far, or None.

    Returns:
        The figures of the run.

    Raises:
        SpecError: If the job cannot run. Then nothing has started.
        MismatchError: If the engines do not fit. Then nothing has started.
    """
    drawn = random.Random(job.seed)  # noqa: S311 - no secret
    faults = [drawn.choice(KILLS) for _ in range(kills)]
    with exits():
        return recover(job, check_kills(job, kills), faults, progress=progress)


def recover(
    job: Job,
    jobs: Sequence[Job],
    faults: Sequence[str],
    *,
    tls: str = "",
    one_in: int = 0,
    timeout: float = 30.0,
    progress: Callable[[int], None] | None = None,
) -> Figures:
    """Send the requests of *jobs* with some of `FAULTS` among them; return the figures.

    *tls*: ``UCX_TLS`` of the processes. *one_in*: of so many messages one is lost, one doubled.
    *timeout*: seconds that a load or a push may take.
    """
    made = Soak(job, jobs, tls, one_in, timeout)
    try:
        return made.run(faults, progress or (lambda _: None))
    finally:
        made.close()
