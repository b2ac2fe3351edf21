"""Which notifications must come to one rank, and which came.

Law: a request is finished when each of its notifiers has told so exactly once. A notification that
is unknown, or comes twice, is foreign: it is counted, told, and finishes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from kvspec.descriptors.request import TransferRequest
from kvspec.nixl import NixlRank
from kvspec.ownership.parallel import RankId

REST = 1e-3
"""Seconds between two looks into the inbox."""


class Notices:
    """What one rank waits for: a notification from each of *senders* for each of *requests*.

    A sender is the beginning of an agent's name, such as ``consumer-tp3-``.
    """

    def __init__(self, requests: Iterable[str], senders: Sequence[str]) -> None:
        self._missing = {request: set(senders) for request in requests}
        self.awaited = len(self._missing) * len(senders)
        self.foreign: tuple[str, ...] = ()
        self.finished: list[str] = []

    @classmethod
    def of(cls, requests: Sequence[TransferRequest], side: str, ranks: Sequence[RankId]) -> Notices:
        """Return what is to come from *ranks* of *side*."""
        return cls([each.request_id for each in requests], [f"{side}-{rank}-" for rank in ranks])

    @property
    def notified(self) -> int:
        """How many of the awaited notifications came."""
        return self.awaited - sum(len(missing) for missing in self._missing.values())

    def collect(
        self, agent: NixlRank, deadline: float, on_finish: Callable[[str], None] | None = None
    ) -> None:
        """Wait until every request is finished, or until *deadline* (of the monotonic clock).

        *on_finish* is called with each request once it is finished.
        """
        while True:
            self.drain(agent)
            for request, missing in self._missing.items():
                if not missing and request not in self.finished:
                    self.finished.append(request)
                    if on_finish is not None:
                        on_finish(request)
            if len(self.finished) == len(self._missing) or time.monotonic() >= deadline:
                return
            time.sleep(REST)

    def drain(self, agent: NixlRank) -> None:
        """Take in what has come so far."""
        for sender, payload in agent.notifications():
            request = payload.decode(errors="replace")
            missing = self._missing.get(request, set())
            found = next((each for each in missing if sender.startswith(each)), None)
            if found is None:
                self.foreign += (f"{request!r} from {sender!r}",)
            else:
                missing.remove(found)
