"""How the bench measures: interleaved repetitions, medians, and ratios from one run.

Invariant: two figures that are compared come from the same process or the same minute. Their
repetitions alternate, so that a slow moment of the machine affects both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import attrs

# Runs one repetition and returns its seconds.
Timer = Callable[[], float]


@attrs.frozen(kw_only=True)
class Row:
    """One line of the table: text, and whether the requirement is met (None without one)."""

    budget: str
    what: str
    ours: str
    other: str = ""
    ratio: str = ""
    required: str = ""
    met: bool | None = None


@attrs.frozen(kw_only=True)
class Options:
    """The options of the command line.

    *quick* runs fewer repetitions. *python* is the interpreter that has Mooncake.
    """

    quick: bool = False
    python: str | None = None

    def times(self, full: int) -> int:
        """Return how many repetitions to make instead of *full*."""
        # Three repetitions are the fewest whose median ignores one slow repetition.
        return max(3, full // 8) if self.quick else full


def interleaved(repetitions: int, *timers: Timer) -> list[float]:
    """Return the median seconds of each of *timers*, run in turn after one warm-up each."""
    taken: list[list[float]] = [[] for _ in timers]
    for timer in timers:
        timer()
    for _ in range(repetitions):
        for times, timer in zip(taken, timers, strict=True):
            times.append(timer())
    return [median(times) for times in taken]


def clock(work: Callable[[], object], loops: int = 1) -> Timer:
    """Return a timer of one call of *work*: the mean of *loops* calls in a row."""

    def run() -> float:
        started = time.perf_counter()
        for _ in range(loops):
            work()
        return (time.perf_counter() - started) / loops

    return run


def cpu(work: Callable[[], object]) -> Timer:
    """Return a timer of one call of *work* in CPU time, which other processes do not change."""

    def run() -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    return run


def forget() -> None:
    """Empty every function cache in kvspec, as in a process that plans for the first time."""
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] == "kvspec":
            for value in tuple(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def readable(seconds: float) -> str:
    """Return *seconds* as text, in the largest unit that is not above it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def times(slow: float, fast: float) -> str:
    """Return the text of the factor by which *fast* is faster than *slow*."""
    return f"{slow / fast:.3g} x"
