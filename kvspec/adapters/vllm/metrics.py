"""Numbers of the connector for vLLM's ``/metrics`` and its periodic line in the log.

Invariant: each number is counted once, in the worker where it happened. vLLM adds the numbers of
all workers, and sends them to its front end. The numbers of a step are those since the last one.
`held` is a difference, too. In most steps only some workers have numbers, and a sum of the prompts
that these hold now would leave out those of the others.

    name                            type        what it counts
    ------------------------------  ----------  ---------------------------------------------------
    vllm:kvspec_load_seconds        histogram   loads that are done: from their start to their end
    vllm:kvspec_bytes_read          counter     bytes that this engine has read
    vllm:kvspec_descriptors_read    counter     descriptors of these reads
    vllm:kvspec_failed_loads        counter     loads that have failed, by the state of the error
    vllm:kvspec_done_holds          counter     prompts that were read or declined
    vllm:kvspec_expired_holds       counter     prompts that nobody has read within their lease
    vllm:kvspec_lost_declines       counter     declined tickets whose producer was not reached
    vllm:kvspec_held_prompts        gauge       prompts whose blocks are held, over all workers
"""

# ruff: noqa: ANN401 - classes of vLLM, and numbers in plain containers
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvspec.session.stats import SessionStats

_COUNTERS = {
    "bytes_read": "kvspec_bytes_read",
    "descriptors_read": "kvspec_descriptors_read",
    "holds_done": "kvspec_done_holds",
    "holds_expired": "kvspec_expired_holds",
    "declines_lost": "kvspec_lost_declines",
}
_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)

Numbers = dict[str, Any]
"""Plain values: `seconds` of loads, `failed` by state, the change of `held`, and the counters."""


def no_numbers() -> Numbers:
    """Return the numbers of a step in which nothing happened."""
    return {"seconds": [], "failed": {}, "held": 0, **dict.fromkeys(_COUNTERS, 0)}


@attrs.define
class WorkerNumbers:
    """The numbers of one worker since they were last taken."""

    _seconds: list[float] = attrs.field(factory=list)
    _before: Mapping[str, Any] = attrs.field(factory=no_numbers)

    def load_is_done(self, seconds: float) -> None:
        """Count a load that is done."""
        self._seconds.append(seconds)

    def take(self, stats: SessionStats) -> Numbers | None:
        """Return the numbers since the last call, or None if they are the same."""
        counters = stats.counters
        now: Numbers = {name: getattr(counters, name) for name in _COUNTERS}
        now |= {"failed": {str(k): v for k, v in counters.failed_by_state.items() if v}}
        now |= {"held": stats.held}
        before, seconds = self._before, self._seconds
        if not seconds and now == {name: before[name] for name in now}:
            return None
        self._before, self._seconds = now, list[float]()
        failed = {
            state: more
            for state, count in now["failed"].items()
            if (more := count - before["failed"].get(state, 0))
        }
        differences = {name: now[name] - before[name] for name in (*_COUNTERS, "held")}
        return {"seconds": seconds, "failed": failed, **differences}


def added(first: Numbers, second: Numbers) -> Numbers:
    """Return the sum of two numbers, of two workers or of two steps.

    >>> added(no_numbers() | {"held": 1, "failed": {"gone": 1}}, no_numbers() | {"held": 2})["held"]
    3
    """
    states = first["failed"].keys() | second["failed"].keys()
    failed = {s: first["failed"].get(s, 0) + second["failed"].get(s, 0) for s in sorted(states)}
    sums = {name: first[name] + second[name] for name in (*_COUNTERS, "held")}
    return {"seconds": [*first["seconds"], *second["seconds"]], "failed": failed, **sums}


def summary(numbers: Numbers) -> dict[str, int | float]:
    """Return the numbers for one line of the log."""
    seconds = sorted(numbers["seconds"])
    middle = seconds[len(seconds) // 2] if seconds else 0.0
    return {
        "Loads done": len(seconds),
        "Median load time (ms)": round(middle * 1e3, 3),
        "MB read": round(numbers["bytes_read"] / 2**20, 3),
        "Loads failed": sum(numbers["failed"].values()),
        "Holds expired": numbers["holds_expired"],
    }


class PromMetrics:
    """The metrics of one front end. *base* is vLLM's object with its classes and labels."""

    def __init__(self, base: Any, labelnames: list[str], labels: dict[int, list[Any]]) -> None:
        self._labels = labels
        self._holds = dict.fromkeys(labels, 0)
        self._seconds = base._histogram_cls(  # noqa: SLF001 - vLLM's own subclasses read it
            name="vllm:kvspec_load_seconds",
            documentation="Seconds of loads of prompts that are done.",
            buckets=_BUCKETS,
            labelnames=labelnames,
        )
        self._failed = base._counter_cls(  # noqa: SLF001
            name="vllm:kvspec_failed_loads",
            documentation="Loads of prompts that have failed, by the state of the error.",
            labelnames=[*labelnames, "state"],
        )
        self._held = base._gauge_cls(  # noqa: SLF001
            name="vllm:kvspec_held_prompts",
            documentation="Prompts whose blocks are held for other engines, over all workers.",
            # Each process of the front end has received a part of the changes.
            multiprocess_mode="sum",
            labelnames=labelnames,
        )
        self._counters = {
            name: base._counter_cls(  # noqa: SLF001
                name=f"vllm:{metric}",
                documentation=f"Sum of {name.replace('_', ' ')} over all workers.",
                labelnames=labelnames,
            )
            for name, metric in _COUNTERS.items()
        }
        # A metric without a value would be missing until something happens.
        for values in labels.values():
            for metric in (self._seconds, self._held, *self._counters.values()):
                metric.labels(*values)

    def observe(self, numbers: Numbers, engine: int) -> None:
        """Record the numbers of one step of an engine."""
        values = self._labels[engine]
        for seconds in numbers["seconds"]:
            self._seconds.labels(*values).observe(seconds)
        for state, count in numbers["failed"].items():
            self._failed.labels(*values, state).inc(count)
        for name, counter in self._counters.items():
            counter.labels(*values).inc(numbers[name])
        # vLLM's gauge for Ray has no `inc`.
        self._holds[engine] += numbers["held"]
        self._held.labels(*values).set(self._holds[engine])
