"""One held request of a producer rank, and the readers that are known so far.

Invariant: a request is complete when all expected readers have come and are done. If readers
disagree about how many will come, the request never completes. Then only its lease frees it.

How it works:
    A *reader* is a rank with one sample. Readers of one incarnation of an engine share a `Start`. A
    reader may make several attempts, and each of its messages contains how many readers this
    producer rank must expect in the attempt. `Request.contradicts` compares a message with the
    readers so far. The first row that matches decides:

        message                                          result
        -----------------------------------------------  ----------------------------------
        `expected` differs from what this engine knows   refuse
        first of its incarnation, 16 are known           refuse, and dispute the request
        first of its incarnation                         accept: record attempt and `expected`
        a later attempt than the incarnation's last      accept: record attempt and `expected`
        an earlier attempt, or an earlier question       refuse: it was delayed
        same attempt, another `expected`                 refuse, and dispute the request
        same attempt, a new reader, all have come        refuse, and dispute the request
        anything else                                    accept

    For example, ranks A and B read, and each sends `expected=2`:

        A  heartbeat  attempt 0, number 1    accept: a new start, attempt 0, 2 readers
        B  done       attempt 0, number 1    accept
        A  done       attempt 0, number 2    accept: both are done, the request is complete
        A  heartbeat  attempt 0, number 1    refuse: an earlier question of A
        C  heartbeat  attempt 0, number 1    refuse and dispute: a third reader of two

    The method changes the request: it records attempts and disputes. The caller then records the
    message itself with `Request.note`.
"""

from __future__ import annotations

import attrs

from kvspec.wire.messages import Done, Gone, Key, Message, RankAddress, ReaderStatus

# A rank that reads, and its sample.
Reader = tuple[RankAddress, int]
# Incarnations of engines that may read one request. The limit bounds the memory.
MAX_STARTS = 16


@attrs.define(eq=False)
class Seen:
    """The last message of one reader, whether the reader is done, and the kind of the answer."""

    message: ReaderStatus
    done: bool = False
    answer: type[Message] = Gone

    @property
    def said(self) -> tuple[int, int]:
        """Attempt and number of the last message."""
        return self.message.attempt, self.message.number


@attrs.define(eq=False)
class Start:
    """One incarnation of a reading engine: its last attempt, and the number of readers in it."""

    attempt: int
    expected: int
    readers: dict[Reader, Seen] = attrs.field(factory=dict)

    @property
    def last(self) -> list[Seen]:
        """The readers of the last attempt that have come."""
        return [seen for seen in self.readers.values() if seen.message.attempt == self.attempt]

    @property
    def complete(self) -> bool:
        """Whether all readers of the last attempt have come, and all readers are done."""
        done = all(seen.done for seen in self.readers.values())
        return done and len(self.last) == self.expected


@attrs.define(eq=False)
class Request:
    """One request, until it is forgotten.

    Attributes:
        key: Its name.
        expires: When its lease ends.
        latest: The latest possible end of its lease.
        state: State of `kvspec.completion.states.PRODUCER`.
        expected: Number of readers of each incarnation, if the engine passed it.
        disputed: Whether readers disagreed.
        starts: Incarnations of reading engines.
        early: Messages that came before the request was admitted.
        written: Written tokens by group and layer.
    """

    key: Key
    expires: float
    latest: float
    state: str = "unknown"
    expected: int | None = None
    disputed: bool = False
    starts: dict[tuple[str, int], Start] = attrs.field(factory=dict)
    early: dict[Reader, ReaderStatus] = attrs.field(factory=dict)
    written: dict[tuple[str, str], int] = attrs.field(factory=dict)

    @property
    def complete(self) -> bool:
        """Whether no reader reads, and none will come."""
        known = bool(self.starts) and not self.disputed
        return known and all(start.complete for start in self.starts.values())

    def seen(self, message: ReaderStatus) -> Seen | None:
        """Return the earlier message of the same sender, or None."""
        start = self.starts.get((message.by.engine_id, message.by.epoch))
        return start.readers.get((message.by, message.sample)) if start else None

    def reading(self) -> list[ReaderStatus]:
        """Return the last message of each reader that is not done."""
        starts = self.starts.values()
        return [s.message for start in starts for s in start.readers.values() if not s.done]

    def note(self, message: ReaderStatus, answer: type[Message]) -> None:
        """Record the message of a reader, and the answer."""
        start = self.starts[message.by.engine_id, message.by.epoch]
        start.readers[message.by, message.sample] = Seen(message, isinstance(message, Done), answer)

    def contradicts(self, message: ReaderStatus) -> str | None:
        """Return why *message* is refused, or None. Records attempts and disputes.

        See the module docstring for the cases.
        """
        name = (message.by.engine_id, message.by.epoch)
        if self.expected is not None and message.expected != self.expected:
            return f"it expects {message.expected} readers, this engine {self.expected}"
        start = self.starts.get(name)
        seen = self.seen(message)
        if start is None:
            if len(self.starts) == MAX_STARTS:
                return self._dispute(f"{MAX_STARTS} incarnations of engines read it already")
            self.starts[name] = Start(message.attempt, message.expected)
        elif message.attempt > start.attempt:
            start.attempt, start.expected = message.attempt, message.expected
        elif (message.attempt, message.number) < (seen.said if seen else (start.attempt, 0)):
            return "it is older than the reader's last message"
        elif message.attempt == start.attempt and message.expected != start.expected:
            return self._dispute(f"it expects {message.expected} readers, others {start.expected}")
        elif seen is None and len(start.last) == start.expected:
            return self._dispute(f"all {start.expected} expected readers have come already")
        return None

    def _dispute(self, why: str) -> str:
        self.disputed = True
        return why
