"""The producer's side of pushing: what it writes into the blocks of which readers.

Law: a reader is told that all was written, or that nothing more will be, only when no byte can
move; who was told the latter is never written to, nor is anybody that gave a request up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import attrs

from kvspec.errors import KVSpecError, SpecError, TransferError, TransferState
from kvspec.inputs import positive_int
from kvspec.nixl import NixlRank, Transfer
from kvspec.protocol.messages import MAX_READERS, Key, Message, RankAddress
from kvspec.protocol.producer import ProducerLedger
from kvspec.protocol.pushed import Pushed
from kvspec.session.introduction import key_of
from kvspec.session.load import LOST, SessionPush
from kvspec.session.written import pushed_of

Reader = tuple[Key, int, int, RankAddress]
"""A request, attempt and sample, and the rank that reads it."""
MAX_FENCES = 1 << 16
"""Readers to whom nothing is pushed any more; more are not answered, so that they wait."""


@attrs.define(eq=False)
class Writing:
    """What is written for one reader; *told*: how it ended, as the reader was told."""

    push: SessionPush
    transfer: Transfer | None
    pushed: Pushed
    told: str = ""


@attrs.define(eq=False)
class Pushing:
    """What one producer rank writes: by reader, until the ledger holds the request no more."""

    book: ProducerLedger
    nixl: NixlRank
    now: Callable[[], float]
    tell: Callable[[Message], None]
    writing: dict[Reader, Writing] = attrs.field(factory=dict)
    fences: dict[Reader, float] = attrs.field(factory=dict)

    @property
    def moving(self) -> bool:
        """Whether anything is in flight."""
        return any(not each.told for each in self.writing.values())

    def begin(self, push: SessionPush, timeout: float, attempt: int, sample: int) -> None:
        """Start *push*: everything is checked before anything is posted.

        Where that refuses it, its readers are told: this attempt is never pushed.
        """
        key, remote, request = key_of(push.remote_id), push.remote, push.request
        positive_int("attempt", attempt, least=0)
        positive_int("sample", sample, least=0, most=MAX_READERS - 1)
        if not self.book.holds(key):
            raise SpecError("remote_id", push.remote_id, "a request that `ledger.hold` holds")
        readers = {
            rank: (key, attempt, sample, RankAddress(*remote.start, rank)) for rank in remote.lanes
        }
        if any(reader in self.writing for reader in readers.values()):
            raise SpecError("remote_id", push.remote_id, "an attempt that is not pushed already")
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
            why = "a reader gave it up, or it was refused before"
            push.fail(None, why, TransferState.STOPPED)
        self.move()
        self._conclude(push)

    def move(self) -> None:
        """Move what is in flight on, and tell who has it all; forget what is not held any more."""
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

    def deliver(self, message: Message) -> None:
        """Take a reader's heartbeat or stop: it has not heard how it ended, or wants no more."""
        reader = message.key, message.attempt, message.sample, message.by
        each = self.writing.get(reader)
        if each is None and (message.kind == "stop" or reader in self.fences):
            if message.kind != "done":
                self._fence(reader)
        elif each is not None and each.told:
            if message.kind == "heartbeat" and self.book.finished(*reader):
                each.told = "stopped"  # it was done: another load of this attempt gets nothing
            self._tell(reader, each.told, each)
        elif each is not None and message.kind == "stop" and each.transfer is not None:
            with contextlib.suppress(TransferError):
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

    def _conclude(self, push: SessionPush) -> None:
        """End a push of which nothing moves."""
        if all(each.told for each in self.writing.values() if each.push is push):
            push.state = "done" if push.error is None else "failed"

    def _tell(self, reader: Reader, kind: str, each: Writing | None = None) -> None:
        key, attempt, sample, to = reader
        self.tell(
            Message(
                kind=kind,
                key=key,
                by=self.book.me,
                to=to,
                attempt=attempt,
                sample=sample,
                pushed=each.pushed if each is not None and kind == "pushed" else None,
            )
        )
