"""Export the numbers of sessions to Prometheus.

Invariant: a scrape takes no lock of a session, so it never waits for a poll, and no poll for it.

How it works:
    `METRICS` is the list of all metrics. Each takes its number from `Session.stats()`. The labels
    `engine_id` and `rank` name the session. Counters are sums since the session was opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from kvspec.errors import SpecError
from kvspec.inputs import instance
from kvspec.session.session import Session
from kvspec.session.stats import SECONDS, Counters, SessionStats


class Metric(NamedTuple):
    """One metric of all sessions.

    Attributes:
        name: Name in Prometheus. The exposition adds ``_total`` to counters.
        kind: Type of the metric.
        help: The description.
        values: Returns the numbers of one session, by the values of `labels`.
        labels: Labels besides `engine_id` and `rank`.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    values: Callable[[SessionStats], dict[tuple[str, ...], float]]
    labels: tuple[str, ...] = ()


def _sum(name: str, help_: str, field: str) -> Metric:
    """Return the metric of one field of the counters."""

    def read(stats: SessionStats) -> dict[tuple[str, ...], float]:
        return {(): getattr(stats.counters, field)}

    return Metric(name, "counter", help_, read)


def _now(name: str, help_: str, field: str) -> Metric:
    """Return the metric of one number of the present."""

    def read(stats: SessionStats) -> dict[tuple[str, ...], float]:
        return {(): getattr(stats, field)}

    return Metric(name, "gauge", help_, read)


def _failed(stats: SessionStats) -> dict[tuple[str, ...], float]:
    return {(state.value,): count for state, count in stats.counters.failed_by_state.items()}


def _ended(stats: SessionStats) -> dict[tuple[str, ...], float]:
    ends = ("done", "expired", "aborted")
    return {(end,): getattr(stats.counters, f"holds_{end}") for end in ends}


METRICS = (
    _sum("kvspec_loads_started", "Loads that were begun.", "loads_started"),
    _sum("kvspec_loads_done", "Loads that are done.", "loads_done"),
    Metric(
        "kvspec_loads_failed",
        "counter",
        "Loads that have failed, by the state of their errors.",
        _failed,
        ("state",),
    ),
    _now("kvspec_loads_open", "Loads that move or exchange their last messages.", "loads"),
    _sum("kvspec_read_bytes", "Bytes that loads have read.", "bytes_read"),
    _sum("kvspec_read_descriptors", "Descriptors that loads have read.", "descriptors_read"),
    _sum("kvspec_holds_started", "Requests that were held for readers.", "holds_started"),
    Metric(
        "kvspec_holds_ended",
        "counter",
        "Held requests that were freed: read or declined (done), expired, or aborted.",
        _ended,
        ("outcome",),
    ),
    _now("kvspec_holds_open", "Requests that are held now. Their blocks are not free.", "held"),
    _now("kvspec_held_blocks", "Blocks of held requests, if known.", "held_blocks"),
    _now("kvspec_tickets_pending", "Tickets that are kept, or whose decline is due.", "errands"),
    _sum("kvspec_declines", "Requests that this rank has declined.", "declines"),
    _sum("kvspec_declines_lost", "Declines that reached no producer.", "declines_lost"),
    _now("kvspec_connected_engines", "Engines that are connected.", "engines"),
    _sum("kvspec_messages_sent", "Messages that were sent.", "messages_sent"),
    _sum("kvspec_messages_received", "Messages with a right seal.", "messages_received"),
    _sum("kvspec_messages_refused", "Messages that changed nothing.", "messages_refused"),
)
"""All metrics but `kvspec_load_seconds`, the histogram of the times of loads that are done."""


class SessionCollector:
    """A collector of `prometheus_client` over sessions of this process.

    Each scrape reads `Session.stats()` of all sessions. A session that was closed keeps its
    counters. `pip install 'kvspec[metrics]'` installs `prometheus_client`.

    Args:
        sessions: The sessions, one for each rank of this process.

    Raises:
        SpecError: If two sessions have the same engine and rank, or `prometheus_client` is missing.
    """

    def __init__(self, *sessions: Session) -> None:
        try:
            from prometheus_client import core  # noqa: PLC0415 - an optional package
        except ModuleNotFoundError as error:
            rule = "is not installed: run pip install 'kvspec[metrics]'"
            raise SpecError("metrics", error.name, rule=rule) from None
        self._core = core
        self._sessions: dict[tuple[str, ...], Session] = {}
        for session in sessions:
            me = instance("sessions", session, Session).me
            if self._sessions.setdefault((me.engine_id, str(me.rank)), session) is not session:
                rule = "two sessions of one rank would have the same labels"
                raise SpecError("sessions", str(me), rule=rule)

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of all sessions. Prometheus calls it at each scrape."""
        numbers = {labels: each.stats() for labels, each in self._sessions.items()}
        names = ("engine_id", "rank")
        kinds = {
            "counter": self._core.CounterMetricFamily,
            "gauge": self._core.GaugeMetricFamily,
        }
        for metric in METRICS:
            family = kinds[metric.kind](metric.name, metric.help, labels=(*names, *metric.labels))
            for labels, stats in numbers.items():
                for more, value in metric.values(stats).items():
                    family.add_metric((*labels, *more), value)
            yield family
        help_ = "Seconds from the call of `load` until the load was done."
        times = self._core.HistogramMetricFamily("kvspec_load_seconds", help_, labels=names)
        for labels, stats in numbers.items():
            times.add_metric(labels, _buckets(stats.counters), stats.counters.load_seconds)
        yield times


def _buckets(counters: Counters) -> list[tuple[str, float]]:
    """Return the bounds of the histogram, each with the number of loads up to it."""
    bounds, total = [*map(str, SECONDS), "+Inf"], 0
    buckets = list[tuple[str, float]]()
    for bound, count in zip(bounds, counters.seconds_histogram, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
