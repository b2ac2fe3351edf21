"""Exhibits that free a request too early, twice or never."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
from exhibit import Exhibit
from hypothesis import strategies as st

from kvspec.testing.laws import System
from kvspec.testing.laws.release import Script

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Events = list[tuple[str, Any]]


@attrs.define
class Held:
    """One request that is held: its number, the readers that are missing, and the lease."""

    number: int
    missing: set[str]
    until: float


class Holder:
    """A release protocol that is right: each reader tells once, by the number of the hold."""

    lease = 10.0

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.numbers: dict[str, int] = {}

    def hold(self, request: str, readers: Sequence[str], now: float) -> Events:
        """Hold a request. An id that comes again gets another number."""
        self.numbers[request] = self.numbers.get(request, 0) + 1
        self.held[request] = Held(self.numbers[request], set(readers), now + self.lease)
        return []

    def read_by(self, request: str, reader: str, now: float) -> Events:
        """Tell the producer which reader has read which hold."""
        return [("notify", (request, self.numbers[request], reader))]

    def notification(self, notice: Any, now: float) -> Events:
        """Free the request after its last reader."""
        request, number, reader = notice
        held = self.held.get(request)
        if held is None or held.number != number:
            return []
        held.missing.discard(reader)
        return [] if held.missing else self.free(request)

    def time(self, now: float) -> Events:
        """Free each request whose lease is over."""
        over = [request for request, held in self.held.items() if held.until <= now]
        return [event for request in over for event in self.free(request)]

    def abort(self, request: str, now: float) -> Events:
        """Wait for the readers, or for the lease: a reader may be reading."""
        return []

    def free(self, request: str) -> Events:
        """Forget a request."""
        del self.held[request]
        return [("freed", request)]

    @classmethod
    def system(cls) -> System:
        """Return the system that the law judges."""
        return System(name=cls.__name__, release=cls)


class ForeignId(Holder):
    """Notify the producer with the id that the consumer gave to the request."""

    def read_by(self, request: str, reader: str, now: float) -> Events:
        """Send an id that the producer does not know."""
        return [("notify", (f"{reader}:{request}", self.numbers[request], reader))]


class OneKeyForAllRanks(Holder):
    """Name a reader by its pipeline rank, which is 0 for all of them."""

    def notification(self, notice: Any, now: float) -> Events:
        """Count one reader, whoever tells."""
        request, number, _ = notice
        held = self.held.get(request)
        first = min(held.missing, default="") if held is not None and len(held.missing) < 2 else ""
        return super().notification((request, number, first), now)


class CountsNotifications(Holder):
    """Count notifications instead of readers."""

    def notification(self, notice: Any, now: float) -> Events:
        """Take each notification for one of another reader."""
        request, number, _ = notice
        held = self.held.get(request)
        return super().notification((request, number, min(held.missing) if held else ""), now)


class FreesOnAbort(Holder):
    """Free an aborted request at once."""

    def abort(self, request: str, now: float) -> Events:
        """Do not wait for a write that is under way."""
        return self.free(request)


class IgnoresTheNumber(Holder):
    """Know a request by its id alone."""

    def notification(self, notice: Any, now: float) -> Events:
        """Take a late notification for one of the present hold."""
        request, _, reader = notice
        held = self.held.get(request)
        return super().notification((request, held.number if held else 0, reader), now)


class WaitsForEver(Holder):
    """Wait for each notification without a time limit."""

    def time(self, now: float) -> Events:
        """Do nothing."""
        return []


def scripts(*steps: tuple[str, float]) -> SearchStrategy[Script]:
    """Draw scripts that hold one request, and then perform some of *steps*."""
    first = st.sampled_from((("hold", 1), ("hold", 2)))
    rest = st.lists(st.sampled_from(steps), max_size=6)
    return st.builds(lambda hold, then: Script((hold, *then)), first, rest)


def some_of(*steps: tuple[str, float]) -> SearchStrategy[Script]:
    """Draw scripts that hold one request, and then perform some of *steps* in this order."""
    kept = st.tuples(*(st.sampled_from(((), (step,))) for step in steps))
    return kept.map(lambda each: Script((("hold", 1), *(step for some in each for step in some))))


READ, DELIVER, ABORT, LOSE, REPEAT, AGAIN = (
    ("read", 0), ("deliver", 0), ("abort", 0), ("lose", 0), ("repeat", 0), ("again", 1)
)  # fmt: skip

EXHIBITS = [
    Exhibit(
        reference="vllm#36958",
        bug="A reader notifies the producer with the consumer's request id.",
        law=12,
        system=ForeignId.system(),
        cases=scripts(READ, DELIVER, ABORT),
        minimal="hold 1",
    ),
    Exhibit(
        reference="sglang#22145",
        bug="Notifications are stored by pipeline rank, so those of all TP ranks are one.",
        law=12,
        system=OneKeyForAllRanks.system(),
        cases=scripts(READ, DELIVER, ABORT),
        minimal="hold 2",
    ),
    Exhibit(
        reference="vLLM 0.33, number of notifications",
        bug="The producer counts notifications, so one that arrives twice frees the request early.",
        law=12,
        system=CountsNotifications.system(),
        cases=scripts(READ, DELIVER, REPEAT),
        minimal="hold 2, read 0, repeat 0, deliver 0, deliver 0",
    ),
    Exhibit(
        reference="sglang#35049",
        bug="An aborted request is freed at once, although a rank may still read or write it.",
        law=12,
        system=FreesOnAbort.system(),
        cases=scripts(READ, DELIVER, ABORT),
        minimal="hold 1, abort 0",
    ),
    Exhibit(
        reference="vllm#52234",
        bug="A request is known by its id alone, so a late message of an earlier one counts.",
        law=12,
        system=IgnoresTheNumber.system(),
        cases=some_of(READ, REPEAT, DELIVER, DELIVER, AGAIN, DELIVER),
        minimal="hold 1, read 0, repeat 0, deliver 0, again 1, deliver 0",
    ),
    Exhibit(
        reference="TensorRT-LLM#17665",
        bug="A notification that is lost is waited for without a time limit.",
        law=12,
        system=WaitsForEver.system(),
        cases=scripts(READ, DELIVER, LOSE),
        minimal="hold 1, read 0, lose 0",
    ),
]
