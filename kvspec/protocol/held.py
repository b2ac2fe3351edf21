"""Who reads a request that a producer rank holds, as far as was heard.

Law: a request is complete when every reader that will come is done and none reads. Readers that
contradict each other leave nobody to be believed: then it is never complete.
"""

from __future__ import annotations

import attrs

from kvspec.protocol.messages import Key, Message, RankAddress

Reader = tuple[RankAddress, int]
"""A rank that reads, and which of its samples."""
MAX_STARTS = 16
"""Starts of engines that read one request."""


@attrs.define(eq=False)
class Seen:
    """What one reader said last, whether it is done, and how it was answered."""

    message: Message
    done: bool = False
    answer: str = "gone"

    @property
    def said(self) -> tuple[int, int]:
        """Which attempt that was of, and which of the reader's questions."""
        return self.message.attempt, self.message.number


@attrs.define(eq=False)
class Start:
    """One start of an engine that reads: its last attempt, in which so many readers will come."""

    attempt: int
    expected: int
    readers: dict[Reader, Seen] = attrs.field(factory=dict)

    @property
    def last(self) -> list[Seen]:
        """The readers of the last attempt, as far as they came."""
        return [seen for seen in self.readers.values() if seen.message.attempt == self.attempt]

    @property
    def complete(self) -> bool:
        """Whether all that will come came, and are done, those of earlier attempts too."""
        done = all(seen.done for seen in self.readers.values())
        return done and len(self.last) == self.expected


@attrs.define(eq=False)
class Request:
    """One request: until when it is held or remembered, and who reads it.

    *expected*: how many readers of each start will come, where the engine knows. *disputed*:
    readers contradict each other. *early*: what came before the request was admitted.
    """

    key: Key
    expires: float
    latest: float
    state: str = "unknown"
    expected: int | None = None
    disputed: bool = False
    starts: dict[tuple[str, int], Start] = attrs.field(factory=dict)
    early: dict[Reader, Message] = attrs.field(factory=dict)
    written: dict[tuple[str, str], int] = attrs.field(factory=dict)

    @property
    def complete(self) -> bool:
        """Whether nobody reads it, and nobody will."""
        known = bool(self.starts) and not self.disputed
        return known and all(start.complete for start in self.starts.values())

    def seen(self, message: Message) -> Seen | None:
        """Return what the sender of *message* said before."""
        start = self.starts.get((message.by.engine_id, message.by.epoch))
        return start.readers.get((message.by, message.sample)) if start else None

    def reading(self) -> list[Message]:
        """Return the last message of each reader that is not done."""
        starts = self.starts.values()
        return [s.message for start in starts for s in start.readers.values() if not s.done]

    def note(self, message: Message, answer: str) -> None:
        """Note what a reader said, and the answer."""
        start = self.starts[message.by.engine_id, message.by.epoch]
        start.readers[message.by, message.sample] = Seen(message, message.kind == "done", answer)

    def contradicts(self, message: Message) -> str | None:
        """Return why *message* cannot be, beside what was heard; None and count on it if it can."""
        name = (message.by.engine_id, message.by.epoch)
        if self.expected is not None and message.expected != self.expected:
            return f"it expects {message.expected} readers, this engine {self.expected}"
        start = self.starts.get(name)
        seen = self.seen(message)
        if start is None:
            if len(self.starts) == MAX_STARTS:
                return self._dispute(f"{MAX_STARTS} starts of engines read it already")
            self.starts[name] = Start(message.attempt, message.expected)
        elif message.attempt > start.attempt:
            start.attempt, start.expected = message.attempt, message.expected
        elif (message.attempt, message.number) < (seen.said if seen else (start.attempt, 0)):
            return "of an earlier attempt, or of before what it said last"
        elif message.attempt == start.attempt and message.expected != start.expected:
            return self._dispute(f"it expects {message.expected} readers, others {start.expected}")
        elif seen is None and len(start.last) == start.expected:
            return self._dispute(f"one reader more than the {start.expected} that were to come")
        return None

    def _dispute(self, why: str) -> str:
        self.disputed = True
        return why
