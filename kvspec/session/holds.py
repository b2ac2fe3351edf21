"""The producer's half of a session: the requests that this rank holds.

Invariant: each held request is reported once, when its blocks are free, unless the session closes
first. Until then its blocks are reserved for it.

How it works:
    A held request is one record of the ledger, a `HeldRequest` of `kvspec.completion.producer`. Its
    remote id is its only name. The ledger decides, and this module carries out what the ledger
    returns. The life of a held request (docs/ledgers.md contains the whole table):

        unknown   A reader asked before `hold`. Its messages wait. One lease after the first
                  message it receives `gone`.
        held      `hold` was called. Heartbeats extend the lease, at most until `longest` seconds
                  after `hold`. A reader that sends `done` receives `valid`. Checksum requests are
                  answered, as in *fenced*. In other states the reader asks again.
        fenced    `abort` was called, or the NIXL rank was closed. Readers receive `gone`, but they
                  may still read, so the blocks stay reserved. A `done` that was answered `valid` is
                  answered so again when it is repeated. An abort only changes the answers to
                  `heartbeat` and `done`: checksums go on.
        freed     As many readers as expected have come and are done, or the lease is over.
                  `settled` reports the request, and the blocks can be reused. Its answers are
                  remembered for one more lease.
        forgotten The record is gone. A later message creates a new record in *unknown*, and after a
                  lease its reader receives `gone`.

    A *reader* is one consumer rank that reads a request.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from kvspec.completion.producer import ProducerLedger
from kvspec.session.checksums import ChecksumAnswers
from kvspec.session.transport import Transport
from kvspec.wire.messages import RemoteId


@attrs.frozen
class Settled:
    """The held requests whose blocks are free again. `Session.settled` returns each of them once.

    Each request is in exactly one of the first three fields.

    Attributes:
        done: All readers have finished: each has read the request, or cancelled or declined it.
        expired: The lease ended first. A later reader receives `gone`.
        aborted: `abort` was called, and then all readers stopped or the lease ended.
        refused: The last few messages that changed nothing, each with the reason.
    """

    done: tuple[RemoteId, ...] = ()
    expired: tuple[RemoteId, ...] = ()
    aborted: tuple[RemoteId, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def freed(self) -> tuple[RemoteId, ...]:
        """All requests whose blocks can be reused now."""
        return (*self.done, *self.expired, *self.aborted)


@attrs.define(eq=False)
class Holds:
    """The requests that one rank holds.

    Attributes:
        ledger: The records.
        nixl: The transport, through which readers read the memory.
        now: The clock.
        answers: The checksums that readers request.
    """

    ledger: ProducerLedger
    nixl: Transport
    now: Callable[[], float]
    answers: ChecksumAnswers

    @property
    def moving(self) -> bool:
        """Whether a reader waits for a checksum."""
        return bool(self.answers.asked)

    def move(self) -> None:
        """Compute checksums that readers request, and answer."""
        if self.answers.asked:
            self.answers.move()

    def check_memory(self) -> None:
        """Abort all held requests if the `NixlRank` is closed.

        Peers on the same machine can still read the memory, and it may contain other data by then.
        So no request may be confirmed as valid.
        """
        if self.ledger.counts["held"] and self.nixl.closed:
            self.answers.close()
            for key in self.ledger.held:
                self.ledger.abort(key, self.now())

    def close(self) -> None:
        """Forget all held requests. Their readers receive no answers from now on."""
        self.answers.close()
        self.ledger.clear()
