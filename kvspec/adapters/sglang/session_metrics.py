"""Numbers of a rank's session in the registry of SGLang's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvspec.session import Load
from kvspec.session.stats import Counters

# The counters of a session that are exported, and what they count.
COUNTERS = {
    "bytes_read": "Bytes of prompts that this rank has read.",
    "load_seconds": "Seconds of the loads that are done.",
    "messages_refused": "Messages that changed nothing.",
}


class Metrics:
    """The numbers of one rank.

    Without *labels*, nothing is exported: SGLang was started without `--enable-metrics`.

    Args:
        labels: The labels that all of SGLang's metrics have, with their values.

    Attributes:
        declined: Tickets that this rank has declined.
        held: Prompts that wait for their readers.
        holds: Prompts that are held no more, by their outcome.
        loads: Loads that have ended, by their state: "done", or that of the error.
    """

    def __init__(self, labels: Mapping[str, str] | None) -> None:
        self.declined = self.held = 0
        self.holds: Counter[str] = Counter()
        self.loads: Counter[str] = Counter()
        self._labels = dict(labels or {})
        self._seen: Counter[tuple[str, str]] = Counter()
        self._exported: dict[str, Any] = {}
        if labels is None:
            return
        # SGLang has set the folder of all processes in the environment before.
        from prometheus_client import Counter as Exported  # noqa: PLC0415
        from prometheus_client import Gauge  # noqa: PLC0415

        names = [*self._labels]
        documents = {f"kvspec_{name}": (text, names) for name, text in COUNTERS.items()}
        documents["kvspec_loads"] = ("Loads that have ended.", [*names, "state"])
        documents["kvspec_holds"] = ("Prompts that are held no more.", [*names, "outcome"])
        documents["kvspec_declined"] = ("Prompts that were declined, not read.", names)
        for name, (text, columns) in documents.items():
            self._exported[name] = Exported(f"sglang:{name}", text, columns)
        self._held = Gauge(
            "sglang:kvspec_held",
            "Prompts that wait for their readers.",
            names,
            multiprocess_mode="mostrecent",
        )

    def ended(self, load: Load) -> None:
        """Count a load that has ended."""
        self.loads["done" if load.error is None else str(load.error.state)] += 1

    def observe(self, counters: Counters) -> None:
        """Export all numbers."""
        if not self._exported:
            return
        for name in COUNTERS:
            self._raise(f"kvspec_{name}", "", getattr(counters, name))
        self._raise("kvspec_declined", "", self.declined)
        for state, number in list(self.loads.items()):
            self._raise("kvspec_loads", state, number)
        for outcome, number in list(self.holds.items()):
            self._raise("kvspec_holds", outcome, number)
        self._held.labels(**self._labels).set(self.held)

    def _raise(self, name: str, last: str, number: float) -> None:
        """Raise a counter to *number*. *last*: the value of its last label, if it has its own."""
        more = number - self._seen[name, last]
        self._seen[name, last] = number  # type: ignore[assignment] # Seconds are no ints.
        values = [*self._labels.values(), *([last] if last else [])]
        self._exported[name].labels(*values).inc(more)
