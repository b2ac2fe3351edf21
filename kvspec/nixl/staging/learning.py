"""Learn from the first transfers of a rank which of them are faster through a staging buffer."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

import attrs

from kvspec.nixl.staging.rule import Staging
from kvspec.nixl.staging.stage import StagedRanges

LOG = logging.getLogger("kvspec.nixl")
# A rank learns from transfers whose runs have so many bytes on average. Shorter ones were faster
# staged on each machine that was measured, and longer ones direct.
LEARN_FROM = range(2 << 10, 32 << 10)
# It learns only from transfers that are long enough for the clock, and of so many runs.
LEARN_BYTES, LEARN_RUNS = 1 << 20, 256
# Transfers of each way to learn from. The first staged one is slow: it touches the buffer first.
LESSONS = 3
# The least and the most that a rank may learn, whatever the clock shows.
LEARNED = range(512, 128 << 10)


@attrs.define(eq=False)
class Lesson:
    """One transfer from which a rank learns.

    Attributes:
        runs: Number of its runs.
        nbytes: Bytes of its runs.
        stage: How it is staged, or None.
        seconds: Its time so far: CPU time of the thread that polls it, or wall time if the
            transport moves bytes by itself.
    """

    runs: int
    nbytes: int
    stage: StagedRanges | None = None
    seconds: float = 0.0
    _begun: float = 0.0
    _waited: bool = False

    def take(self, work: Callable[[], bool], waits: Callable[[], bool]) -> bool:
        """Call *work* and add its time. *waits*: whether bytes are in flight after it."""
        begun = time.perf_counter(), time.thread_time()
        self._begun = self._begun or begun[0]
        result = work()
        # CPU time, because the machine may be busy. But a network moves bytes between two steps.
        self._waited |= waits()
        if self._waited:
            self.seconds = time.perf_counter() - self._begun
        else:
            self.seconds += time.thread_time() - begun[1]
        return result


class Learner:
    """Learns the threshold of one rank from its first transfers.

    Attributes:
        staging: The settings, with the threshold that was learned.
        learns: Whether the threshold is not known yet.
    """

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self.learns = staging.stage_below is None and not staging.always
        self._turns = itertools.count()
        self._done: dict[bool, list[Lesson]] = {False: [], True: []}  # by whether they are staged

    def teaches(self, runs: int, nbytes: int) -> bool:
        """Whether a transfer of *runs* runs shows the threshold."""
        long = nbytes >= LEARN_BYTES and runs >= LEARN_RUNS
        return self.learns and long and nbytes // runs in LEARN_FROM

    def stages_next(self) -> bool:
        """Return whether the next transfer to learn from is staged. The two ways take turns."""
        return next(self._turns) % 2 == 0

    def add(self, lesson: Lesson) -> None:
        """Learn from a transfer that is done. The caller holds the lock of the agent."""
        if len(done := self._done[lesson.stage is not None]) < LESSONS:
            done.append(lesson)
        if self.learns and min(map(len, self._done.values())) >= LESSONS:
            below = threshold_of(self._done[False], self._done[True])
            self.staging, self.learns = attrs.evolve(self.staging, stage_below=below), False
            self._done = {False: [], True: []}
            LOG.info("transfers of runs shorter than %d bytes are staged from now on", below)


def threshold_of(direct: list[Lesson], staged: list[Lesson]) -> int:
    """Return the bytes that are permuted in the time of one descriptor.

    The least times count: other programs disturb each measurement, and none makes it shorter.
    """
    stages = [(each, each.stage) for each in staged if each.stage is not None]
    permuting = min(stage.copying / each.nbytes for each, stage in stages)
    reading = min((each.seconds - stage.copying) / stage.nbytes for each, stage in stages)
    posting = min((each.seconds - reading * each.nbytes) / each.runs for each in direct)
    learned = round(posting / permuting) if permuting > 0 else LEARNED[-1]
    return min(max(learned, LEARNED[0]), LEARNED[-1])
