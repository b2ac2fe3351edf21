"""Count the notifications of one rank, and compare them with the expected ones.

Invariant: a request is finished after each of its notifiers has sent exactly one notification. An
unknown or repeated notification is reported as foreign, and finishes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import attrs

from kvspec.nixl import NixlRank

REST = 1e-3
"""Seconds between two looks into the inbox."""


@attrs.define(eq=False)
class Notices:
    """What one rank waits for: one from each of *senders* for each of *requests*.

    A sender is the beginning of an agent's name, such as ``consumer-tp3-``.
    """

    requests: Collection[str]
    senders: Collection[str]
    foreign: list[str] = attrs.field(init=False, factory=list)
    finished: list[str] = attrs.field(init=False, factory=list)
    _missing: set[tuple[str, str]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._missing = {(request, sender) for request in self.requests for sender in self.senders}

    @property
    def awaited(self) -> int:
        """How many notifications must come."""
        return len(self.requests) * len(self.senders)

    @property
    def notified(self) -> int:
        """How many of the awaited notifications came."""
        return self.awaited - len(self._missing)

    def collect(self, agent: NixlRank, deadline: float, finish: Callable[[str], None]) -> None:
        """Wait until every request is finished, or until *deadline* (of the monotonic clock).

        *finish* is called with each request once it is finished.
        """
        while True:
            self.drain(agent)
            unfinished = {request for request, _ in self._missing}
            for request in self.requests:
                if request not in unfinished and request not in self.finished:
                    self.finished.append(request)
                    finish(request)
            if not unfinished or time.monotonic() >= deadline:
                return
            time.sleep(REST)

    def drain(self, agent: NixlRank) -> None:
        """Take in what has come so far."""
        for sender, payload in agent.notifications():
            request = payload.decode(errors="replace")
            own = {(r, s) for r, s in self._missing if r == request and sender.startswith(s)}
            if not own:
                self.foreign.append(f"{request!r} from {sender!r}")
            self._missing -= own
