"""Pushing: a producer rank writes its part of held requests into the blocks of its readers.

Invariant: the producer sends `pushed` or `stopped` only when no byte of the write can move any
more. It posts nothing for a reader that has received `stopped` or has given the request up.

How it works:
    A *reader* is one consumer rank that reads one sample of a request in one attempt. Each reader
    is in one of four states. `Pushing.writing` contains the readers that are writing or ended,
    `Pushing.fences` those that are fenced. All other readers are new.

    state    event                                      next     sent to the reader
    -------  -----------------------------------------  -------  ------------------
    new      `begin` posts the write                    writing
    new      `begin` cannot post the write              fenced   stopped
    new      the reader sends `stop`                    fenced   stopped
    writing  the last byte is written                   ended    pushed
    writing  the write failed and nothing is in flight  ended    stopped
    writing  the reader sends `stop`: make it fail      writing
    ended    the reader sends `heartbeat` after `done`  ended    stopped
    ended    the reader sends any other message         ended    the outcome again
    ended    the ledger freed the request               new
    fenced   the reader sends `heartbeat` or `stop`     fenced   stopped
    fenced   the ledger freed the request long ago      new

    A push skips each reader that is fenced or already done with the attempt. It writes to the
    others and then fails, because some reader did not receive the request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import attrs

from kvspec.completion.producer import ProducerLedger
from kvspec.errors import KVSpecError, SpecError, TransferError, TransferState
from kvspec.inputs import positive_int
from kvspec.nixl import NixlRank, Transfer
from kvspec.session.load import LOST, Push
from kvspec.session.written import pushed_of
from kvspec.wire.messages import (
    MAX_READERS,
    Done,
    Heartbeat,
    Key,
    Message,
    PushDone,
    Pushed,
    PushStopped,
    RankAddress,
    ReaderStatus,
    StopWriting,
    key_of,
)

# A request, attempt and sample, and the rank that reads it.
Reader = tuple[Key, int, int, RankAddress]
# A reader beyond the limit receives no answer, so it keeps its blocks and sends again. It must not
# receive `stopped`: it would reuse its blocks, and a later push could write into them.
MAX_FENCES = 1 << 16


@attrs.define(eq=False)
class Writing:
    """One write to one reader. *told*: the outcome that was sent to the reader, or ""."""

    push: Push
    transfer: Transfer | None
    pushed: Pushed
    told: str = ""


@attrs.define(eq=False)
class Pushing:
    """The writes of one producer rank, by reader, until the ledger frees the request."""

    book: ProducerLedger
    nixl: NixlRank
    now: Callable[[], float]
    tell: Callable[[Message], None]
    writing: dict[Reader, Writing] = attrs.field(factory=dict)
    fences: dict[Reader, float] = attrs.field(factory=dict)

    @property
    def moving(self) -> bool:
        """Whether a write is in flight."""
        return any(not each.told for each in self.writing.values())

    def begin(self, push: Push, timeout: float, attempt: int, sample: int) -> None:
        """Start *push*. Everything is checked before anything is posted.

        If it is refused, its readers receive `stopped`, and this attempt can never be pushed.
        """
        key, remote, request = key_of(push.remote_id), push.remote, push.request
        positive_int("attempt", attempt, least=0)
        positive_int("sample", sample, least=0, most=MAX_READERS - 1)
        if not self.book.holds(key):
            raise SpecError("remote_id", push.remote_id, "a request that `hold` has registered")
        readers = {
            rank: (key, attempt, sample, RankAddress(*remote.start, rank)) for rank in remote.lanes
        }
        if any(reader in self.writing for reader in readers.values()):
            raise SpecError("remote_id", push.remote_id, "an attempt that was not pushed before")
        open_ = {rank: one for rank, one in readers.items() if not self._gave_up(one)}
        try:
            moved = remote.sides(request, open_)
            pushed = {rank: pushed_of(remote.lanes[rank].table, request) for rank in open_}
            name = request.request_id
            transfers = self.nixl.move("WRITE", moved.values(), request=name, timeout=timeout)
        except KVSpecError:
            for reader in open_.values():
                self._fence(reader)
            raise
        started = dict(zip(moved, transfers, strict=True))
        for rank, reader in open_.items():
            self.writing[reader] = Writing(push, started.get(rank), pushed[rank])
        if len(open_) < len(readers):
            why = "a reader gave the request up, or an earlier push of it was refused"
            push.fail(None, why, TransferState.STOPPED)
        self.move()
        self._conclude(push)

    def move(self) -> None:
        """Make progress on all writes, send outcomes, and forget freed requests."""
        now = self.now()
        for reader, each in list(self.writing.items()):
            if not each.told:
                self._settle(reader, each)
            elif not self.book.holds(reader[0]):
                del self.writing[reader]
        late = [reader for reader, until in self.fences.items() if until <= now]
        for reader in late:
            if not self.book.holds(reader[0]):
                del self.fences[reader]

    def deliver(self, message: ReaderStatus | StopWriting) -> None:
        """Handle a `heartbeat`, `done` or `stop` that a reader sent.

        Call this before the ledger receives the same message: `ProducerLedger.finished` must
        describe the reader as it was before.
        """
        reader = message.key, message.attempt, message.sample, message.by
        each = self.writing.get(reader)
        stops = isinstance(message, StopWriting)
        if each is None and (stops or reader in self.fences):
            if not isinstance(message, Done):
                self._fence(reader)
        elif each is not None and each.told:
            if isinstance(message, Heartbeat) and self.book.finished(*reader):
                # The reader was done, so this heartbeat comes from another load of the same
                # attempt. That load may wait for other blocks, which were not written.
                each.told = "stopped"
            # Answer every message: the outcome that was sent before may be lost.
            self._tell(reader, each.told, each)
        elif each is not None and stops and each.transfer is not None:
            with contextlib.suppress(TransferError):  # The NIXL rank may be closed.
                each.transfer.stop(f"{message.by} gave it up", TransferState.STOPPED)

    def _gave_up(self, reader: Reader) -> bool:
        """Whether nothing may be written to a reader, by what it said."""
        return reader in self.fences or self.book.finished(*reader)

    def _fence(self, reader: Reader) -> None:
        """Never write to a reader, and tell it so."""
        if reader in self.fences or len(self.fences) < MAX_FENCES:
            self.fences[reader] = self.now() + self.book.longest
            self._tell(reader, "stopped")

    def _settle(self, reader: Reader, each: Writing) -> None:
        """Tell a reader, once nothing moves to it, whether it has all."""
        transfer, push = each.transfer, each.push
        try:
            if transfer is not None and transfer.poll() == "PROC":
                return
            each.told = "pushed"
        except TransferError as error:
            push.fail(reader[3].rank, error.message, error.state)
            push.remote.lost |= error.state in LOST
            if transfer is not None and not transfer.over:
                return
            with contextlib.suppress(TransferError):
                if transfer is not None:
                    transfer.free()
            each.told = "stopped"
        self._tell(reader, each.told, each)
        self._conclude(push)

    def _conclude(self, push: Push) -> None:
        """End a push of which nothing moves."""
        if all(each.told for each in self.writing.values() if each.push is push):
            push.state = "done" if push.error is None else "failed"

    def _tell(self, reader: Reader, kind: str, each: Writing | None = None) -> None:
        key, attempt, sample, to = reader
        fields = key, self.book.me, to, attempt, 0, sample
        if each is not None and kind == "pushed":
            self.tell(PushDone(*fields, pushed=each.pushed))
        else:
            self.tell(PushStopped(*fields))
