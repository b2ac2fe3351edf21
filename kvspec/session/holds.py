"""The producer's half of a session: the requests that this rank holds, and its pushes.

Invariant: each held request is reported once, when its blocks are free, unless the session closes
first. Until then its blocks are reserved for it. The producer sends `pushed` or `stopped` only when
no byte of the write can move.

How it works:
    A held request is one record of the ledger, a `HeldRequest` of `kvspec.completion.producer`. Its
    remote id is its only name. The ledger decides, and this module carries out what the ledger
    returns. The life of a held request (docs/ledgers.md contains the whole table):

        unknown   A reader asked before `hold`. Its messages wait. One lease after the first
                  message it receives `gone`. If it sent `stop`, it receives `stopped` at once, and
                  the record stays for `longest` seconds.
        held      `hold` was called. Heartbeats extend the lease, at most until `longest` seconds
                  after `hold`. A reader that sends `done` receives `valid`. `record_progress`
                  informs the readers that follow. `push` writes to readers. Checksum requests are
                  answered, as in *fenced*. In other states the reader asks again.
        fenced    `abort` was called, or the NIXL rank was closed. Readers receive `gone`, but they
                  may still read, so the blocks stay reserved. A `done` that was answered `valid` is
                  answered so again when it is repeated. An abort only changes the answers to
                  `heartbeat` and `done`: pushes, progress and checksums go on.
        freed     As many readers as expected have come and are done, or the lease is over, even
                  during a push. `settled` reports the request, and the blocks can be reused. Its
                  answers are remembered for one more lease, and while a push is in flight.
        forgotten The record is gone. A later message creates a new record in *unknown*, and after a
                  lease its reader receives `gone`.

    A *reader* is one consumer rank that reads a request. The push to a reader in one attempt has
    its own life inside the record:

        new       Nothing was written. If the reader sends `stop`, it is stopped at once.
        writing   The write may be in flight. If the reader sends `stop`, the push is stopping.
        stopping  The session stops the write. The outcome is pushed or stopped.
        pushed    The last byte is written, and the reader was informed. A heartbeat of another load
                  of the attempt stops the push: that load may wait for other blocks.
        stopped   The write failed and nothing is in flight, there was no write, or another load of
                  the attempt has asked. This rank never writes to the reader in this attempt again.

    In the last two states, the reader receives the outcome again for each heartbeat or `stop`.

    A push skips each reader that has stopped or is done with the attempt. It writes to the others
    and then fails, because some reader did not receive the request.

    An interrupt between any two lines loses no action, because the ledger keeps each action until
    it was carried out. `_pushes` contains a push before anything is posted, so `move` finishes an
    interrupted push like one that has failed.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from kvspec.completion.producer import ProducerLedger, Target
from kvspec.errors import TransferError, TransferState
from kvspec.inputs import positive_int
from kvspec.nixl import NixlRank
from kvspec.ownership.parallel import RankId
from kvspec.session.checksums import ChecksumAnswers
from kvspec.session.load import LOST, Push, stop
from kvspec.session.mailbox import Messages
from kvspec.session.written import pushed_of
from kvspec.wire.messages import RankAddress, RemoteId


@attrs.frozen
class Settled:
    """The held requests whose blocks are free again. `Session.settled` returns each of them once.

    Each request is in exactly one of the first three fields.

    Attributes:
        done: All readers have finished: each has read the request, or cancelled or declined it.
        expired: The lease ended first. A later reader receives `gone`.
        aborted: `abort` was called, and then all readers stopped or the lease ended.
        foreign: The last few messages that changed nothing, each with the reason.
    """

    done: tuple[RemoteId, ...] = ()
    expired: tuple[RemoteId, ...] = ()
    aborted: tuple[RemoteId, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def freed(self) -> tuple[RemoteId, ...]:
        """All requests whose blocks can be reused now."""
        return (*self.done, *self.expired, *self.aborted)


@attrs.define(eq=False)
class Holds:
    """The requests that one rank holds, and the writes of its pushes.

    Attributes:
        ledger: The records.
        nixl: The NIXL rank, which writes pushes.
        now: The clock.
        messages: Sends messages to readers.
        answers: The checksums that readers request.
    """

    ledger: ProducerLedger
    nixl: NixlRank
    now: Callable[[], float]
    messages: Messages
    answers: ChecksumAnswers
    _pushes: list[Push] = attrs.field(factory=list)

    @property
    def moving(self) -> bool:
        """Whether a write is in flight, or a reader waits for a checksum."""
        return bool(self._pushes or self.answers.asked)

    def push(self, push: Push, timeout: float, attempt: int) -> None:
        """Start *push*. Everything is checked before anything is posted.

        If the request does not fit or the writes cannot be posted, its readers receive `stopped`,
        and this attempt can never be pushed. If the ledger or an earlier check refuses the push, no
        reader is informed.
        """
        positive_int("attempt", attempt, least=0)
        remote, request = push.remote, push.request
        ranks: dict[Target, RankId] = {
            (attempt, RankAddress(*remote.incarnation, rank)): rank for rank in remote.lanes
        }
        if not ranks:
            # This rank writes nothing. Its readers may be done by now, and the request be free.
            push.state = "done"
            return
        self._pushes.append(push)
        try:
            # Fill `left` before the ledger begins the writes. If an interrupt separates the two,
            # `end_push` ignores the targets, because they are not in flight. Leave out targets that
            # are not new: an earlier push may write to them, and only that push may end them.
            # Without data, a write fails unless it is posted.
            held = self.ledger.find(push.key)
            new = (to for to in ranks if held is not None and held.push(to).state == "new")
            push.left = dict.fromkeys(new, (None, None))
            opened = self.ledger.begin_push(push.key, ranks)
            targets = {ranks[target]: target for target in opened}
            sides = remote.sides(request, targets)
            pushed = {rank: pushed_of(remote.lanes[rank].table, request) for rank in targets}
            pairs = {(push, targets[rank]): each for rank, each in sides.items()}
            name = request.request_id
            posted = self.nixl.move("WRITE", pairs, request=name, timeout=timeout)
            push.left = {to: (posted.get((push, to)), pushed[r]) for r, to in targets.items()}
        except BaseException:
            self._fail(push)
            raise
        if len(targets) < len(ranks):
            why = "a reader gave the request up, or an earlier push of it was refused"
            push.fail(None, why, TransferState.STOPPED)
        self._settle(push)

    def _fail(self, push: Push) -> None:
        """Let a push fail that was refused or interrupted. Stop what it has posted."""
        posted = {transfer.key: transfer for transfer in self.nixl.transfers}
        push.left = {to: (posted.get((push, to)), None) for to in push.left}
        for transfer, _ in push.left.values():
            stop(transfer, "its push was interrupted")
        self._settle(push)

    def move(self) -> None:
        """Make progress on all writes and checksums, and send their outcomes."""
        for push in list(self._pushes):
            self._settle(push)
        if self.answers.asked:
            self.answers.move()

    def _settle(self, push: Push) -> None:
        """Send each reader the outcome of its write, once nothing of it can move."""
        for target, (transfer, pushed) in list(push.left.items()):
            if self.ledger.stopping(push.key, target):
                stop(transfer, f"{target[-1]} gave it up")
            outcome = pushed
            if transfer is not None:
                try:
                    if transfer.poll() == "PROC":
                        continue
                    self.messages.counters.bytes_written += transfer.nbytes
                except TransferError as error:
                    push.fail(target[-1].rank, error.message, error.state)
                    push.remote.lost |= error.state in LOST
                    if not transfer.over:
                        continue
                    outcome = None
            now = self.now()
            self.ledger.end_push(push.key, target, outcome, now)
            del push.left[target]
        if not push.left:
            push.state = "done" if push.error is None else "failed"
            self._pushes.remove(push)

    def tick(self) -> None:
        """Process the time. If the `NixlRank` is closed, abort all held requests.

        Peers on the same machine can still read the memory, and it may contain other data by then.
        So no request may be confirmed as valid.
        """
        if self.ledger.counts["held"] and self.nixl.closed:
            self.answers.close()
            for key in self.ledger.held:
                self.ledger.abort(key, self.now())
        self.ledger.tick(self.now())

    def close(self) -> None:
        """Forget all held requests. Their readers receive no answers from now on."""
        self.answers.close()
        self.ledger.clear()
