"""The stages of a transfer between two engines, and how all ranks go through them together.

Invariant: no rank begins a stage before all ranks have ended the stage before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvspec.errors import KVSpecError
from kvspec.run.job import SIDES, Job, Side, other_side
from kvspec.run.report import Failure, Report

STAGES = ("start", "fill", "connect", "transfer", "compare")
"""The stages of a run, in order. Each is a method of `TransferRank`."""

Progress = Callable[[str, int, int], None]
"""Function that receives what is going on, how much of it is done, and how much there is."""

Arguments = Mapping[Side, tuple[Any, ...]]
Through = Callable[[str, Arguments], list[Any]]
"""Function that lets all ranks do one stage, with the arguments of their side.

Returns what each rank returned, in the order of `Job.ranks`. Raises `StageError` if a rank failed.
"""


class StageError(KVSpecError):
    """A stage that some ranks did not end. *failures* contains these ranks and their reasons."""

    def __init__(self, failures: tuple[Failure, ...]) -> None:
        super().__init__("; ".join(map(str, failures)))
        self.failures = failures


def lead(job: Job, through: Through) -> Report:
    """Lead all ranks through all stages, and return the report of the run."""
    seconds: dict[str, float] = {}
    answers: list[Any] = []
    cards: dict[Side, list[bytes]] = {}  # the introductions of each side
    for stage in STAGES:
        began = time.perf_counter()
        arguments: Arguments = {
            side: (cards[other_side(side)],) if stage == "connect" else () for side in SIDES
        }
        try:
            answers = through(stage, arguments)
        except StageError as error:
            return Report.of(job, (), error.failures, seconds)
        if stage == "start":
            ranks = list(zip(job.ranks(), answers, strict=True))
            cards = {side: [card for (of, _), card in ranks if of == side] for side in SIDES}
        seconds[stage] = time.perf_counter() - began
    return Report.of(job, answers, (), seconds)
