"""Faults of a session's producer and of its checksums. The chaos of sessions must find each one.

Each function plants one fault with a `MonkeyPatch`, which removes the fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvspec.completion.held import HeldRequest
from kvspec.completion.producer import ProducerLedger
from kvspec.completion.states import PUSH, Row
from kvspec.session.checksums import Audit, extents_of
from kvspec.session.holds import Holds
from kvspec.wire.messages import PushDone

if TYPE_CHECKING:
    import pytest


def earlier_load_answers_for_the_next(patch: pytest.MonkeyPatch) -> None:
    """Repeat the first answer to a reader, whatever it asks about another load."""

    def repeats(self: HeldRequest, message: Any) -> bool:
        reader = self.reader(message.by, message.sample)
        return reader is not None and reader.done and reader.message.attempt == message.attempt

    patch.setattr(HeldRequest, "repeats", repeats)


def first_push_answers_for_the_next(patch: pytest.MonkeyPatch) -> None:
    """Send every load of an attempt the outcome that was true for the first."""
    patch.setitem(PUSH, ("pushed", "anew"), Row("pushed", "tell", "a fault"))


def free_request_is_reported_twice(patch: pytest.MonkeyPatch) -> None:
    """Report the first of the free requests again."""
    settled = Holds.settled

    def again(self: Any) -> Any:
        freed = [*self._freed.items()][:1]
        result = settled(self)
        self._freed = dict(freed)
        return result

    patch.setattr(Holds, "settled", again)


def outcome_is_sent_before_the_end(patch: pytest.MonkeyPatch) -> None:
    """Send `pushed` as soon as the write is posted."""
    settle = Holds._settle

    def hasty(self: Any, writes: Any) -> None:
        settle(self, writes)
        for (attempt, sample, to), (_, pushed) in writes.left.items():
            name = writes.key, self.ledger.me, to, attempt, 0, sample
            if pushed is not None:
                self.tell(PushDone(*name, pushed=pushed))

    patch.setattr(Holds, "_settle", hasty)


def reader_that_gave_up_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Forget each reader that was sent `stopped`."""
    receive = ProducerLedger._push_message

    def forget(self: Any, request: Any, message: Any) -> Any:
        actions = receive(self, request, message)
        target = message.attempt, message.sample, message.by
        if request.push(target).state == "stopped":
            del request.pushes[target]
            self.pushes -= 1
        return actions

    patch.setattr(ProducerLedger, "_push_message", forget)


def differences_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """Take different checksums for equal ones."""
    patch.setattr(Audit, "_narrow", lambda *_: None)


def only_the_first_source_is_compared(patch: pytest.MonkeyPatch) -> None:
    """Compare only the data of the first rank that is read."""
    ask = Audit._ask

    def first(self: Any, rank: Any, extent: Any) -> None:
        if rank == next(iter(self.remote.tables)):
            ask(self, rank, extent)

    patch.setattr(Audit, "_ask", first)


def only_the_last_token_is_compared(patch: pytest.MonkeyPatch) -> None:
    """Compute the checksums of the last token alone."""
    patch.setattr(
        "kvspec.session.checksums.extents_of",
        lambda *given: (
            replace(extent, tokens=extent.tokens[-1:]) for extent in extents_of(*given)
        ),
    )
