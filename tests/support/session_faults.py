"""Faults of sessions. The chaos of sessions must find each one.

Each function plants one fault with a `MonkeyPatch`, which removes the fault. Faults of the ledgers
alone are in `ledger_faults`, and those of plans and proofs in `faults`.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import attrs
from msgspec.structs import replace

from kvspec import RankCache
from kvspec.completion.consumer import _CONDITIONS, ConsumerLedger
from kvspec.completion.producer import HeldRequest
from kvspec.nixl import Transfer
from kvspec.session import Load, Session
from kvspec.session.checksums import Audit, contents_of
from kvspec.session.loads import Loads
from kvspec.session.remotes import Connection
from kvspec.wire.messages import Done, Gone, Message, Valid
from kvspec.wire.seal import MAC, Secret

if TYPE_CHECKING:
    import threading

    import pytest


def earlier_load_answers_for_the_next(patch: pytest.MonkeyPatch) -> None:
    """Repeat the first answer to a reader that loads the request again."""

    def repeats(self: HeldRequest, message: Any) -> bool:
        reader = self.readers.get(message.by)
        return reader is not None and reader.done and isinstance(message, Done)

    patch.setattr(HeldRequest, "repeats", repeats)


def free_request_is_reported_twice(patch: pytest.MonkeyPatch) -> None:
    """Report the first of the free requests again."""
    settled = Session.settled

    def again(self: Any) -> Any:
        self.poll()
        freed = [*self._holds.ledger.freed.items()][:1]
        result = settled(self)
        self._holds.ledger.freed = dict(freed)
        return result

    patch.setattr(Session, "settled", again)


def differences_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """Take different checksums for equal ones."""
    patch.setattr(Audit, "_differs", lambda *_: "")


def only_the_first_source_is_compared(patch: pytest.MonkeyPatch) -> None:
    """Compare only the data of the first rank that is read."""
    questions = Audit._questions

    def first(self: Any) -> Any:
        source = next(iter(self.remote.tables))
        return (question for question in questions(self) if question.rank == source)

    patch.setattr(Audit, "_questions", first)


def only_the_last_token_is_compared(patch: pytest.MonkeyPatch) -> None:
    """Compute the checksums of the last token alone."""
    patch.setattr(
        "kvspec.session.checksums.contents_of",
        lambda *given: (
            replace(extent, tokens=extent.tokens[-1:]) for extent in contents_of(*given)
        ),
    )


def answers_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """End a load as done when its data is there, whether or not the producer still held it."""
    finish = ConsumerLedger.finish

    def trust(self: Any, step: Any, now: float) -> Any:
        for source in self.records[step.request_id].sources.values():
            source.valid = True
        return finish(self, step, now)

    patch.setattr(ConsumerLedger, "finish", trust)


def failed_load_ends_at_once(patch: pytest.MonkeyPatch) -> None:
    """Set the state "failed" while bytes may still be written."""
    fail = Load.fail

    def end(self: Any, *why: Any) -> None:
        fail(self, *why)
        self.state = "failed"

    patch.setattr(Load, "fail", end)


def only_the_first_source_is_read(patch: pytest.MonkeyPatch) -> None:
    """Read one of the producer ranks, and no other."""
    prepare = Loads.prepare

    def first(self: Any, load: Any, remote: Any) -> Any:
        list_pairs, remote.list_pairs = remote.list_pairs, dict([*remote.list_pairs.items()][:1])
        try:
            return prepare(self, load, remote)
        finally:
            remote.list_pairs = list_pairs

    patch.setattr(Loads, "prepare", first)


def seals_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Open any bytes that have the form of a message."""
    patch.setattr(Secret, "unseal", lambda _, __, purpose, data, ___: data[len(purpose) + MAC :])


def late_reader_is_sent_valid(patch: pytest.MonkeyPatch) -> None:
    """Send `valid` instead of `gone`."""
    answer = Message.answer

    def deceive(self: Any, kind: Any, **more: Any) -> Any:
        return answer(self, Valid if kind is Gone else kind, **more)

    patch.setattr("kvspec.wire.messages.Message.answer", deceive)


def handles_are_not_released(patch: pytest.MonkeyPatch) -> None:
    """Keep the handles of a transfer that failed, though they have ended."""
    patch.setattr(Transfer, "reap", lambda self: not self.live_handles)


def load_ends_before_it_is_compared(patch: pytest.MonkeyPatch) -> None:
    """Take a load for whole before its checksums are compared."""
    patch.setitem(_CONDITIONS, "moving", ("whole", lambda load: load.arrived))


def connection_waits(
    session: Session, engine_id: str, addresses: tuple[str, ...]
) -> Future[object]:
    """Let loads from an engine wait for its connection until the returned future is completed."""
    attempt = Future[object]()
    session._remotes._connections[engine_id] = Connection(engine_id, addresses, attempt)
    return attempt


def connecting_stops(session: Session, go_on: threading.Event) -> None:
    """Let *session* connect no producer of a ticket until *go_on* is set, at most 20 seconds."""
    connect = session._remotes._connect

    def later(*given: Any) -> object:
        go_on.wait(20.0)
        return connect(*given)

    session._remotes._connect = later


def cache_is_on_a_device(session: Session) -> None:
    """Let *session* take its cache for memory of a GPU."""
    cache = session._loads.cache
    regions = [attrs.evolve(region, memory_type="VRAM") for region in cache.regions]
    memory = [attrs.evolve(part, memory_type="VRAM") for part in cache.memory]
    session._loads.cache = RankCache(cache.engine, cache.rank, regions, memory)
