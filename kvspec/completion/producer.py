"""The producer's ledger: the requests that a producer rank holds, and when their blocks are free.

Invariant: each request is freed exactly once, when all its readers are done or its lease is over.
An abort frees no blocks. It only changes the answers: later readers receive `gone`. If readers
disagree about how many will come, the request never completes: only its lease frees it. The ledger
has no clock and no socket: time is an argument. Its memory is bounded.

How it works:
    Each request is one record, a `HeldRequest`. The table `PRODUCER` of `kvspec.completion.states`
    decides when its blocks are free. `ACTIONS` has the method that carries a row out.

    Only `tick` ends a lease that a heartbeat can still extend. The session calls it after it has
    read all messages that wait. No block is free before, so a heartbeat extends a lease that is
    over. We tried to end leases at the beginning of each call. Then a producer that had no CPU for
    a lease ended it, although heartbeats had arrived meanwhile.

    A heartbeat extends a lease, but does not change the heap of `Ledger`. When the old time comes,
    the record is scheduled again.

    A *reader* is a rank that reads. Readers of one incarnation of an engine share an
    `Incarnation`. Each message contains how many readers of the incarnation this producer rank must
    expect. The first row that matches decides what happens to a message. The first row is checked
    when it arrives. `HeldRequest.refusal` has the others, which compare it with the readers so far.
    So they are checked again when an early message is replayed:

        message                                          result
        -----------------------------------------------  ----------------------------------
        a new reader, and 4096 have come already         refuse
        first message of its incarnation, 16 are known   refuse, and dispute the request
        first message of its incarnation                 accept
        older than this reader's last message            refuse: it was delayed
        a heartbeat with the number of the last message  refuse: it was repeated
        another `expected` than the first message        refuse, and dispute the request
        a new reader, and all have come                  refuse, and dispute the request
        anything else                                    accept

    The limit of 16 is `MAX_INCARNATIONS`, and 4096 is `MAX_KEPT_READERS`. A new reader has sent no
    message before. A freed request refuses nothing: it keeps no new reader, and answers `gone`.
    A producer does not know the plans of its readers: it connects to none of them.

    For example, ranks A, B and C of one engine read, and each sends `expected=2`:

        A  heartbeat  number 1    accept: a new incarnation, 2 readers
        A  heartbeat  number 1    refuse: a copy must not extend the lease
        B  done       number 1    accept
        C  heartbeat  number 1    refuse and dispute: 2 have come already
        A  done       number 2    accept: but disputed, so never complete

    Without C's message, the request is complete after A's `done`.

    Each heartbeat has a new number, so a repeated one is a copy that the network or an attacker
    made. A repeated `done` keeps its number. It is answered again, because the first answer may be
    lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import msgspec

from kvspec.completion.ledger import (
    LEAST_INTERVAL,
    HoldAction,
    Ledger,
    Record,
    Refused,
    Tell,
    recorded,
)
from kvspec.completion.states import PRODUCER, row_of
from kvspec.descriptors.request import BlockTable
from kvspec.errors import SpecError
from kvspec.inputs import seconds
from kvspec.wire.messages import (
    ChecksumContents,
    Done,
    Gone,
    Heartbeat,
    Key,
    Lease,
    Message,
    RankAddress,
    ReaderStatus,
    RemoteId,
    Valid,
)

# Incarnations of engines that may read one request. The limit bounds the memory.
MAX_INCARNATIONS = 16
# Readers to keep of one request, and of all requests. Each takes about 1 KiB.
MAX_KEPT_READERS, MAX_ALL_READERS = 1 << 12, 1 << 16
# Readers of freed requests to remember, so that their last message can be answered again. They must
# not count as above: a busy producer frees more requests in a lease, and would refuse new readers.
MAX_PAST_READERS = 1 << 16


class HeldReader(NamedTuple):
    """The last message of one reader, and the kind of the answer."""

    message: ReaderStatus
    answer: type[Message]

    @property
    def done(self) -> bool:
        """Whether the reader has stopped reading."""
        return isinstance(self.message, Done)


class Incarnation(msgspec.Struct, eq=False):
    """One incarnation of a reading engine.

    Attributes:
        expected: Number of its readers.
        come: Number of readers that have come.
        reading: Number of readers that are not done.
    """

    expected: int
    come: int = 0
    reading: int = 0


class HeldRequest(Record, eq=False):
    """One request, until it is forgotten.

    Attributes:
        key: Its name.
        expires: End of the lease. If the request is not held: when it is forgotten.
        latest: The latest possible end of its lease.
        state: State of `kvspec.completion.states.PRODUCER`.
        disputed: Whether readers disagreed.
        incarnations: Incarnations of reading engines, by name and epoch.
        readers: The readers that have come.
        early: Last message of each reader that came before the request was held.
        blocks: Block tables by group, if the engine passed them and the request is held.
        checksums: Checksums of its contents that were computed.
    """

    key: Key
    expires: float
    latest: float
    state: str = "unknown"
    disputed: bool = False
    incarnations: dict[tuple[str, int], Incarnation] = msgspec.field(default_factory=dict)
    readers: dict[RankAddress, HeldReader] = msgspec.field(default_factory=dict)
    early: dict[RankAddress, ReaderStatus] = msgspec.field(default_factory=dict)
    blocks: Mapping[str, BlockTable] = msgspec.field(default_factory=dict)
    checksums: dict[ChecksumContents, bytes] = msgspec.field(default_factory=dict)

    @property
    def due(self) -> float:
        """When its lease ends, or when it is forgotten."""
        return self.expires if self.state != "forgotten" else math.inf

    @property
    def held(self) -> bool:
        """Whether its blocks are not free."""
        return self.state in ("held", "fenced")

    @property
    def num_blocks(self) -> int:
        """Number of blocks that its tables contain."""
        return sum(len(table.block_ids) for table in self.blocks.values())

    @property
    def complete(self) -> bool:
        """Whether all expected readers have come, and all readers are done."""
        if self.disputed or not self.incarnations:
            return False
        engines = self.incarnations.values()
        return all(each.come == each.expected and each.reading == 0 for each in engines)

    def repeats(self, message: ReaderStatus) -> bool:
        """Return whether *message* is a `done` that was answered before.

        Another number means another load, perhaps of a second session with the same name and epoch.
        The first load's answer does not hold for it: the data that was valid may be gone.
        """
        reader = self.readers.get(message.by)
        if reader is None or not reader.done or not isinstance(message, Done):
            return False
        return reader.message.number == message.number

    def refusal(self, message: ReaderStatus) -> tuple[str, bool]:
        """Return why *message* is refused, or "", and whether it disputes the request.

        See the module docstring for the cases.
        """
        incarnation = self.incarnations.get((message.by.engine_id, message.by.epoch))
        if incarnation is None and len(self.incarnations) == MAX_INCARNATIONS:
            return f"{MAX_INCARNATIONS} incarnations of engines read it already", True
        if incarnation is None:
            return "", False
        reader = self.readers.get(message.by)
        before = -1 if reader is None else reader.message.number
        why, disputes = "", True
        if message.number < before:
            why, disputes = "it is older than the reader's last message", False
        elif message.number == before and isinstance(message, Heartbeat):
            why, disputes = "it is a repetition of the reader's last message", False
        elif message.expected != incarnation.expected:
            why = f"it expects {message.expected} readers, others {incarnation.expected}"
        elif reader is None and incarnation.come == incarnation.expected:
            why = f"all {incarnation.expected} expected readers have come already"
        return why, disputes and why != ""


class ProducerLedger(Ledger[Key, HeldRequest, HoldAction]):
    """The requests that one producer rank holds. Methods receive events, and append to `actions`.

    Args:
        me: Address of this rank.
        lease: Seconds that a request is held after `hold`, or after the last heartbeat of a
            reader. A freed or unknown request is remembered as long.
        longest: Seconds after which heartbeats no longer extend the lease.

    Attributes:
        counts: "held": requests whose blocks are not free. "early": messages for requests that are
            not held yet. "blocks": blocks of the held requests, as far as `hold` was passed
            them. "readers": readers of held requests. "past": readers of freed requests that are
            remembered.
        freed: By remote id, how each request has ended that was freed: `done`, `expired` or
            `aborted`. The session takes them out.
        ended: Number of requests that were freed, by how they have ended.
        most_early: Number of messages to keep for requests that are not held yet.
    """

    most_early = 4096

    def __init__(self, me: RankAddress, *, lease: float = 30.0, longest: float = 3600.0) -> None:
        super().__init__(me)
        self.lease = seconds("lease", lease, LEAST_INTERVAL)
        self.longest = seconds("longest", longest)
        self.freed: dict[RemoteId, str] = {}
        self.ended = Counter[str]()

    @property
    def held(self) -> tuple[Key, ...]:
        """The requests whose blocks are not free."""
        return tuple(key for key, request in list(self.records.items()) if request.held)

    def find(self, key: Key) -> HeldRequest | None:
        """Return the record of a request whose blocks are not free, or None."""
        request = self.records.get(key)
        return request if request is not None and request.held else None

    @recorded
    def hold(
        self,
        key: Key,
        now: float,
        *,
        lease: float | None = None,
        blocks: Mapping[str, BlockTable] | None = None,
    ) -> list[HoldAction]:
        """Hold a request, and return actions.

        Args:
            key: Name of the request. Its nonce must be new.
            now: Time in seconds.
            lease: Seconds to wait for the first reader. By default, the lease of the ledger.
            blocks: Block tables of the request, by group. The record keeps them until it is freed.

        Raises:
            SpecError: If the request is held already, or was held before.
        """
        first = self.lease if lease is None else seconds("lease", lease)
        self._set_time(now)
        request = self.records.get(key) or HeldRequest(key, 0.0, 0.0)
        if request.state != "unknown":
            raise SpecError("remote_id", key.remote_id, "a new name, which was not held before")
        request.expires = self._now + first
        request.latest = self._now + max(self.longest, self.lease, first)
        request.blocks = blocks or {}
        self._count("held", 1)
        self._count("blocks", request.num_blocks)
        actions = self._take_row(request, "hold")
        self._save(key, request)
        return actions

    @recorded
    def receive(self, message: Message, now: float) -> list[HoldAction]:
        """Process a message of a reader. Return actions."""
        self._set_time(now)
        if message.to != self.me or not isinstance(message, Heartbeat | Done):
            return [Refused(message, f"it is not a reader's message to {self.me}")]
        if self.epochs.get(message.by.engine_id, message.by.epoch) != message.by.epoch:
            return [Refused(message, "it is from another incarnation of that engine")]
        if why := self._crowded(message):
            return [Refused(message, why)]
        known, actions = self.records.get(message.key), list[HoldAction]()
        if known is not None and known.latest <= self._now:  # No heartbeat can extend it.
            actions += self._wake(known)
            known = self.records.get(message.key)
        request = known or HeldRequest(message.key, self._now + self.lease, self._now)
        actions += self._deliver(request, message) + self._complete(request)
        if known or request.early:
            self._save(request.key, request)
        return actions

    @recorded
    def abort(self, key: Key, now: float) -> list[HoldAction]:
        """Abort a request. Its readers receive `gone`, but nothing is freed yet."""
        self._set_time(now)
        request = self.find(key)
        return self._take_row(request, "abort") if request is not None else []

    def connect(self, engine_id: str, epoch: int) -> None:
        """Record the current incarnation of an engine. Messages of others are refused.

        Requests that an earlier incarnation reads are held until their lease is over, because that
        incarnation may still read.

        Raises:
            SpecError: If *epoch* is less than before.
        """
        self._connect(engine_id, epoch)

    def _crowded(self, message: ReaderStatus) -> str:
        """Return why the bounds of readers refuse *message*, or "".

        A freed request keeps no new reader: it answers `gone`.
        """
        request = self.records.get(message.key)
        if request is None or request.state == "freed":
            return ""
        if message.by in request.readers or message.by in request.early:
            return ""
        if len(request.readers) + len(request.early) >= MAX_KEPT_READERS:
            return f"{MAX_KEPT_READERS} readers read it already"
        if self.counts["readers"] >= MAX_ALL_READERS:
            return f"{MAX_ALL_READERS} readers of all requests are known already"
        return ""

    def _wake(self, request: HeldRequest, /) -> list[HoldAction]:
        """End the lease of a request, or forget the request, unless a heartbeat extended it."""
        if request.expires > self._now:
            return []
        return self._take_row(request, "time")

    def _deliver(self, request: HeldRequest, message: ReaderStatus) -> list[HoldAction]:
        """Count a reader's message and answer it, or refuse it."""
        event = "repeated" if request.repeats(message) else message.kind
        if not request.held:
            return self._take_row(request, event, message)
        why, disputes = request.refusal(message)
        request.disputed |= disputes
        if why:
            return [Refused(message, why)]
        return self._take_row(request, event, message)

    def _complete(self, request: HeldRequest) -> list[HoldAction]:
        """Free the request if it is held and all its readers are done."""
        return self._take_row(request, "complete") if request.held and request.complete else []

    def _take_row(
        self, request: HeldRequest, event: str, message: ReaderStatus | None = None
    ) -> list[HoldAction]:
        """Take the row of the table for *event*, and carry it out."""
        row = row_of("producer", PRODUCER, request.state, event)
        before, request.state = request.state, row.state
        actions = self.ACTIONS[row.action](self, request, message, before) if row.action else []
        if row.state == "forgotten":
            self._count("past", -len(request.readers))
            self.records.pop(request.key, None)
        return actions

    def _note(self, request: HeldRequest, message: ReaderStatus, answer: type[Message]) -> None:
        """Record an accepted message of a reader, and the kind of its answer."""
        name = message.by.engine_id, message.by.epoch
        engine = request.incarnations.setdefault(name, Incarnation(message.expected))
        before, after = request.readers.get(message.by), HeldReader(message, answer)
        engine.come += before is None
        self._count("readers", before is None)
        engine.reading += (not after.done) - (before is not None and not before.done)
        request.readers[message.by] = after

    def _keep(self, request: HeldRequest, message: ReaderStatus, _: str) -> list[HoldAction]:
        """Keep the latest early message of each reader."""
        old = request.early.get(message.by)
        if old is None and self.counts["early"] == self.most_early:
            why = f"the request is unknown, and {self.most_early} messages wait already"
            return [Refused(message, why)]
        self._count("early", old is None)
        if old is None or message.number > old.number:
            request.early[message.by] = message
        return []

    def _early(self, request: HeldRequest) -> list[ReaderStatus]:
        """Return the early messages, and keep them no longer."""
        early, request.early = [*request.early.values()], dict[RankAddress, ReaderStatus]()
        self._count("early", -len(early))
        return early

    def _replay(self, request: HeldRequest, _: None, __: str) -> list[HoldAction]:
        """Process the early messages of a request that is held now.

        Only all of them together show which readers have come.
        """
        messages = self._early(request)
        actions = [action for message in messages for action in self._deliver(request, message)]
        return actions + self._complete(request)

    def _lease(self, request: HeldRequest, message: ReaderStatus, _: str) -> list[HoldAction]:
        """Extend the lease, and inform the reader of it."""
        self._note(request, message, Lease)
        request.expires = max(request.expires, min(self._now + self.lease, request.latest))
        return [Tell(message.answer(Lease, lease=request.expires - self._now))]

    def _valid(self, request: HeldRequest, message: ReaderStatus, _: str) -> list[HoldAction]:
        self._note(request, message, Valid)
        return [Tell(message.answer(Valid))]

    def _gone(
        self, request: HeldRequest, message: ReaderStatus | None, before: str
    ) -> list[HoldAction]:
        """Answer that nothing is held. Without *message*, answer all early messages."""
        if message is None:
            return [Tell(early.answer(Gone)) for early in self._early(request)]
        if before == "fenced":
            self._note(request, message, Gone)
        return [Tell(message.answer(Gone))]

    def _repeat(self, request: HeldRequest, message: ReaderStatus, _: str) -> list[HoldAction]:
        reader = request.readers.get(message.by)
        return [Tell(message.answer(reader.answer if reader else Gone))]

    def _free(self, request: HeldRequest, _: None, before: str) -> list[HoldAction]:
        """Free a request. Remember its readers for a lease, because they may ask again.

        If too many are remembered, a reader that did not receive its answer receives `gone`.
        """
        self._count("held", -1)
        self._count("readers", -len(request.readers))
        if self.counts["past"] + len(request.readers) > MAX_PAST_READERS:
            request.readers = dict[RankAddress, HeldReader]()
        self._count("past", len(request.readers))
        self._count("blocks", -request.num_blocks)
        request.expires = self._now + self.lease
        request.blocks, request.checksums = dict[str, BlockTable](), dict[ChecksumContents, bytes]()
        how = "done" if request.complete else "expired"
        how = "aborted" if before == "fenced" else how
        self.freed[request.key.remote_id] = how
        self.ended[how] += 1
        return []

    # The column `action` of `PRODUCER`. Arguments: ledger, request, message, and the state before.
    ACTIONS: ClassVar[dict[str, Callable[..., list[HoldAction]]]] = {
        "keep": _keep,
        "replay": _replay,
        "gone": _gone,
        "lease": _lease,
        "valid": _valid,
        "repeat": _repeat,
        "free": _free,
    }
