"""One held request of a producer rank: its lease, its readers, and the pushes to them.

Invariant: a request is complete when all expected readers have come and are done. If readers
disagree about how many will come, the request never completes. Then only its lease frees it.

How it works:
    A *reader* is a rank with one sample. Readers of one incarnation of an engine share an
    `Incarnation`. A reader may make several attempts, and each of its messages contains how many
    readers this producer rank must expect in the attempt. `HeldRequest.refusal` compares a message
    with the readers so far. The first row that matches decides:

        message                                          result
        -----------------------------------------------  ----------------------------------
        `expected` differs from what this engine knows   refuse
        first of its incarnation, 16 are known           refuse, and dispute the request
        first of its incarnation                         accept
        a later attempt than the incarnation's last      accept
        older than this reader's last message            refuse: it was delayed
        first of its reader, of an earlier attempt       refuse: it was delayed
        a heartbeat with the number of that message      refuse: it was repeated
        same attempt, another `expected`                 refuse, and dispute the request
        same attempt, a new reader, all have come        refuse, and dispute the request
        anything else                                    accept

    An attempt is later, earlier or the same compared with the incarnation's last attempt.

    For example, ranks A, B and C of one engine read, and each sends `expected=2`:

        A  heartbeat  attempt 0, number 1    accept: a new incarnation, attempt 0, 2 readers
        A  heartbeat  attempt 0, number 1    refuse: a copy must not extend the lease
        B  done       attempt 0, number 1    accept
        C  heartbeat  attempt 0, number 1    refuse and dispute: a third reader of two
        A  done       attempt 0, number 2    accept: but disputed, so never complete

    Without C's message, the request is complete after A's `done`.

    Each heartbeat has a new number, so a repeated one is a copy that the network or an attacker
    made. A repeated `done` has the number of the first, because its answer may be lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kvspec.completion.ledger import Record
from kvspec.descriptors.request import BlockTable
from kvspec.wire.messages import Done, Extent, Key, Message, Pushed, RankAddress, ReaderStatus

# A rank that reads, and its sample.
Reader = tuple[RankAddress, int]
# Attempt and sample of a reader, and its rank: the receiver of one push.
Target = tuple[int, int, RankAddress]
# Incarnations of engines that may read one request. The limit bounds the memory.
MAX_INCARNATIONS = 16


class HeldReader(NamedTuple):
    """The last message of one reader, and the kind of the answer."""

    message: ReaderStatus
    answer: type[Message]

    @property
    def done(self) -> bool:
        """Whether the reader has stopped reading."""
        return isinstance(self.message, Done)


class PushState(NamedTuple):
    """A push to one reader: a state of `kvspec.completion.states.PUSH`, and the written data."""

    state: str = "new"
    pushed: Pushed | None = None

    @property
    def in_flight(self) -> bool:
        """Whether bytes of the push may still move."""
        return self.state in ("writing", "stopping")


NEW_PUSH = PushState()


class Incarnation(msgspec.Struct, eq=False):
    """One incarnation of a reading engine.

    Attributes:
        attempt: Its last attempt.
        expected: Number of readers in that attempt.
        come: Number of readers that have come in that attempt.
        reading: Number of readers that are not done, in any attempt.
        readers: All readers.
    """

    attempt: int = -1
    expected: int = 0
    come: int = 0
    reading: int = 0
    readers: dict[Reader, HeldReader] = msgspec.field(default_factory=dict)


class HeldRequest(Record, eq=False):
    """One request, until it is forgotten.

    Attributes:
        key: Its name.
        expires: When its lease ends. When it is forgotten, if it is not held.
        latest: The latest possible end of its lease.
        state: State of `kvspec.completion.states.PRODUCER`.
        fenced_until: Until when it must be remembered although it is unknown, because a reader
            gave up a push of it.
        expected: Number of readers of each incarnation, if the engine passed it.
        disputed: Whether readers disagreed.
        incarnations: Incarnations of reading engines, by name and epoch.
        early: Last message of each reader that came before the request was admitted.
        progress: Written tokens by group and layer.
        pushes: The push to each reader of each attempt.
        blocks: Block tables by group, if the engine passed them and the request is held.
        checksums: Checksums of its contents that were computed.
    """

    key: Key
    expires: float
    latest: float
    state: str = "unknown"
    fenced_until: float = 0.0
    expected: int | None = None
    disputed: bool = False
    incarnations: dict[tuple[str, int], Incarnation] = msgspec.field(default_factory=dict)
    early: dict[Reader, ReaderStatus] = msgspec.field(default_factory=dict)
    progress: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    pushes: dict[Target, PushState] = msgspec.field(default_factory=dict)
    blocks: Mapping[str, BlockTable] = msgspec.field(default_factory=dict)
    checksums: dict[Extent, bytes] = msgspec.field(default_factory=dict)

    @property
    def due(self) -> float:
        """When its lease ends, or when it is forgotten."""
        return self.expires if self.state != "forgotten" else math.inf

    @property
    def held(self) -> bool:
        """Whether its blocks are not free."""
        return self.state in ("held", "fenced")

    @property
    def complete(self) -> bool:
        """Whether no reader reads, and none will come."""
        if self.disputed or not self.incarnations:
            return False
        # Each incarnation: all readers of its last attempt have come, and all readers are done.
        each = self.incarnations.values()
        return all(one.come == one.expected and one.reading == 0 for one in each)

    def pinned(self, now: float) -> bool:
        """Return whether a push requires that the request is remembered."""
        return self.fenced_until > now or any(push.in_flight for push in self.pushes.values())

    def push(self, target: Target) -> PushState:
        """Return the push to a reader. Its state is "new" if there was none."""
        return self.pushes.get(target, NEW_PUSH)

    def reader(self, by: RankAddress, sample: int) -> HeldReader | None:
        """Return a reader that has come, or None."""
        incarnation = self.incarnations.get((by.engine_id, by.epoch))
        return incarnation.readers.get((by, sample)) if incarnation else None

    def finished(self, target: Target) -> bool:
        """Return whether a reader is done with an attempt, or has begun a later one."""
        attempt, sample, by = target
        reader = self.reader(by, sample)
        last = reader.message.attempt if reader else -1
        return last > attempt or (last == attempt and reader is not None and reader.done)

    def reading(self) -> list[ReaderStatus]:
        """Return the last message of each reader that is not done."""
        readers = (each for one in self.incarnations.values() for each in one.readers.values())
        return [reader.message for reader in readers if not reader.done]

    def repeats(self, message: ReaderStatus) -> bool:
        """Return whether *message* is a `done` that was answered before.

        After that, the reader's messages are about another load: the data that was valid for the
        first load may be gone.
        """
        reader = self.reader(message.by, message.sample)
        if reader is None or not reader.done or not isinstance(message, Done):
            return False
        return reader.message.attempt == message.attempt and message.number <= reader.message.number

    def refusal(self, message: ReaderStatus) -> tuple[str, bool]:
        """Return why *message* is refused, or "", and whether it disputes the request.

        See the module docstring for the cases.
        """
        if self.expected is not None and message.expected != self.expected:
            return f"it expects {message.expected} readers, this engine {self.expected}", False
        incarnation = self.incarnations.get((message.by.engine_id, message.by.epoch))
        if incarnation is None and len(self.incarnations) == MAX_INCARNATIONS:
            return f"{MAX_INCARNATIONS} incarnations of engines read it already", True
        if incarnation is None or message.attempt > incarnation.attempt:
            return "", False
        reader = incarnation.readers.get((message.by, message.sample))
        return _refusal_in_attempt(message, incarnation, reader.message if reader else None)


def _refusal_in_attempt(
    message: ReaderStatus, incarnation: Incarnation, before: ReaderStatus | None
) -> tuple[str, bool]:
    """Return `HeldRequest.refusal` of a known attempt, after the reader's message *before*."""
    now = message.attempt, message.number
    last = (before.attempt, before.number) if before else (incarnation.attempt, 0)
    if now < last:
        return "it is older than the reader's last message", False
    if before and now == last and not isinstance(message, Done):
        return "it is a repetition of the reader's last message", False
    if message.attempt == incarnation.attempt and message.expected != incarnation.expected:
        return f"it expects {message.expected} readers, others {incarnation.expected}", True
    if before is None and incarnation.come == incarnation.expected:
        return f"all {incarnation.expected} expected readers have come already", True
    return "", False
