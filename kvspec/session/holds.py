"""The producer's half of a session: the requests that this rank holds, and its pushes.

Invariant: each held request is reported once, when its blocks are free. Until then its blocks are
reserved for it. The producer sends `pushed` or `stopped` only when no byte of the write can move.

How it works:
    A held request is one record of the ledger, a `HeldRequest` of `kvspec.completion.producer`. Its
    remote id is its only name. The ledger decides, and this module carries out what the ledger
    returns. The life of a held request (docs/ledgers.md contains the whole table):

        unknown   A reader asked before `hold`. Its messages wait for a lease, then it gets `gone`.
        held      `hold` was called. Heartbeats extend the lease, at most until `longest` seconds
                  after `hold`. A reader that sends `done` receives `valid`. `record_progress`
                  informs the readers that follow. `push` writes to readers. Checksum requests are
                  answered.
        fenced    `abort` was called. Readers receive `gone`, but they may still read, so the blocks
                  stay reserved. A `done` that was answered `valid` is answered so again when it is
                  repeated. An abort only changes the answers.
        freed     As many readers as expected have come and are done, or the lease is over, even
                  during a push. `settled` reports the request, and the blocks can be reused. Its
                  answers are remembered for one more lease, and while a push is in flight.
        forgotten The record is gone. The message of a later reader makes the request unknown again,
                  and after a lease that reader receives `gone`.

    A *reader* is one consumer rank that reads one sample of a request. The push to a reader in one
    attempt has its own life inside the record:

        new       Nothing was written. If the reader sends `stop`, it is stopped at once.
        writing   The write may be in flight. If the reader sends `stop`, the push is stopping.
        stopping  The session stops the write. The outcome is pushed or stopped.
        pushed    The last byte is written, and the reader was informed. A heartbeat of another load
                  of the attempt is answered `stopped`: it may wait for other blocks.
        stopped   The write failed and nothing is in flight, or there was no write. This rank never
                  writes to the reader in this attempt again.

    In the last two states, the reader receives the outcome again for each heartbeat or `stop`.

    A push skips each reader that has stopped or is done with the attempt. It writes to the others
    and then fails, because some reader did not receive the request.

    An interrupt between any two lines loses no action. A call of the ledger and the recording of
    its actions are one line, and the actions are carried out from the record. A push is known to
    `move` before anything is posted, so an interrupted push ends like one that has failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import attrs

from kvspec.completion.ledger import Free, HoldAction
from kvspec.completion.producer import ProducerLedger, Target
from kvspec.descriptors.request import Tables, tables_of
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import positive_int, sequence
from kvspec.nixl import NixlRank, Transfer
from kvspec.ownership.parallel import RankId
from kvspec.session.checksums import ChecksumAnswers
from kvspec.session.load import LOST, Push, stop, unstored
from kvspec.session.mailbox import Messages
from kvspec.session.stats import Counters
from kvspec.session.written import pushed_of
from kvspec.wire.messages import (
    MAX_READERS,
    ChecksumRequest,
    Key,
    Message,
    Pushed,
    RankAddress,
    RemoteId,
    key_of,
)


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

    @staticmethod
    def of(freed: Mapping[RemoteId, str], foreign: Iterable[str]) -> Settled:
        """Return requests by the reason why each was freed."""
        ended: dict[str, list[RemoteId]] = {"sent": [], "expired": [], "aborted": []}
        for name, why in freed.items():
            ended[why].append(name)
        done, expired, aborted = map(tuple, ended.values())
        return Settled(done, expired, aborted, tuple(foreign))

    @property
    def freed(self) -> tuple[RemoteId, ...]:
        """All requests whose blocks can be reused now."""
        return (*self.done, *self.expired, *self.aborted)


@attrs.define(eq=False)
class Writes:
    """The writes of one push that have not ended.

    Attributes:
        push: The push.
        key: The request.
        left: For each reader, its transfers and the data that they write. None if the write is
            known to fail.
    """

    push: Push
    key: Key
    left: dict[Target, tuple[tuple[Transfer, ...], Pushed | None]] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Holds:
    """The requests that one rank holds, and the writes of its pushes.

    Attributes:
        ledger: The records.
        engine: The engine of this rank.
        nixl: The NIXL rank, which writes pushes.
        now: The clock.
        messages: Sends messages to readers.
        answers: The checksums that readers request.
        counters: The counters of the session.
        freed: The requests that have ended and were not reported yet, each with the reason.
    """

    ledger: ProducerLedger
    engine: EngineSpec
    nixl: NixlRank
    now: Callable[[], float]
    messages: Messages
    answers: ChecksumAnswers
    counters: Counters
    freed: dict[RemoteId, str] = attrs.field(factory=dict)
    _recorded: deque[HoldAction] = attrs.field(factory=deque)
    _writes: list[Writes] = attrs.field(factory=list)

    @property
    def held(self) -> tuple[RemoteId, ...]:
        """The requests whose blocks are not free."""
        return tuple(key.remote_id for key in self.ledger.held)

    @property
    def moving(self) -> bool:
        """Whether a write is in flight, or a reader waits for a checksum."""
        return bool(self._writes) or self.answers.waiting > 0

    def hold(
        self, remote_id: str, *, lease: float | None, readers: int | None, blocks: Tables | None
    ) -> None:
        """Hold a request. See `Session.hold`."""
        key, tables = key_of(remote_id), tables_of("blocks", {} if blocks is None else blocks)
        if readers is not None:
            positive_int("readers", readers, most=MAX_READERS)
        if strange := sorted(tables.keys() - {group.name for group in self.engine.groups}):
            raise SpecError("blocks", strange[:3], "block tables of the engine's groups")
        admit = partial(self.ledger.admit, key, expected=readers, lease=lease, blocks=tables)
        # One line: an interrupt must not come between the call and its record.
        self._recorded.extend(admit(self.now()))
        self.act()

    def record_progress(self, remote_id: str, upto: int, layers: Iterable[str] | None) -> None:
        """Record that layers are written. See `Session.record_progress`."""
        key, homes = key_of(remote_id), self.engine.homes
        named = sequence("layers", tuple(homes) if layers is None else layers, "names of layers")
        if strange := [layer for layer in named if layer not in homes]:
            raise SpecError("layers", strange[:3], f"layers of the engine, such as {[*homes][:3]}")
        positive_int("upto", upto, least=0)
        places = [(homes[layer].name, layer) for layer in named]
        self._recorded.extend(self.ledger.record_progress(key, places, upto, self.now()))
        self.act()

    def abort(self, remote_id: str) -> None:
        """Give up a request. See `Session.abort`."""
        self._recorded.extend(self.ledger.abort(key_of(remote_id), self.now()))
        self.act()

    def push(self, push: Push, timeout: float, attempt: int, sample: int) -> None:
        """Start *push*. Everything is checked before anything is posted.

        If it is refused, its readers receive `stopped`, and this attempt can never be pushed.
        """
        positive_int("attempt", attempt, least=0)
        positive_int("sample", sample, least=0, most=MAX_READERS - 1)
        remote, request = push.remote, push.request
        ranks: dict[Target, RankId] = {
            (attempt, sample, RankAddress(*remote.start, rank)): rank for rank in remote.lanes
        }
        if not ranks:
            # This rank writes nothing. Its readers may be done by now, and the request be free.
            push.state = "done"
            return
        writes = Writes(push, push.key)
        self._writes.append(writes)
        try:
            # One line, as in `hold`. The writes fail unless something is posted.
            writes.left = dict.fromkeys(self.ledger.begin_push(writes.key, ranks), ((), None))
            targets = {ranks[target]: target for target in writes.left}
            sides = remote.sides(request, targets)
            pushed = {rank: pushed_of(remote.lanes[rank].table, request) for rank in targets}
            name = request.request_id
            transfers = self.nixl.move("WRITE", sides.values(), request=name, timeout=timeout)
            posted = dict(zip(sides, ((transfer,) for transfer in transfers), strict=True))
            writes.left = {to: (posted.get(r, ()), pushed[r]) for r, to in targets.items()}
        except BaseException:
            self._fail(writes)
            raise
        if len(targets) < len(ranks):
            why = "a reader gave the request up, or an earlier push of it was refused"
            push.fail(None, why, TransferState.STOPPED)
        self._settle(writes)

    def _fail(self, writes: Writes) -> None:
        """Let a push fail that was refused or interrupted. Stop what it has posted."""
        stored = {t for other in self._writes for each, _ in other.left.values() for t in each}
        name = writes.push.request.request_id
        strays = tuple(unstored(self.nixl, "WRITE", name, stored))
        # It is not known which reader a transfer writes to, so each reader waits for all of them.
        writes.left = {to: (each or strays, None) for to, (each, _) in writes.left.items()}
        for transfers, _ in writes.left.values():
            stop(transfers, "its push was interrupted")
        self._settle(writes)

    def move(self) -> None:
        """Make progress on all writes and checksums, and send their outcomes."""
        for writes in list(self._writes):
            self._settle(writes)
        self.answers.move()

    def _settle(self, writes: Writes) -> None:
        """Send each reader the outcome of its write, once nothing of it can move."""
        push = writes.push
        for target, (transfers, pushed) in list(writes.left.items()):
            if self.ledger.stopping(writes.key, target):
                stop(transfers, f"{target[-1]} gave it up")
            outcome = pushed
            try:
                if any(transfer.poll() == "PROC" for transfer in transfers):
                    continue
                self.counters.bytes_written += sum(transfer.nbytes for transfer in transfers)
            except TransferError as error:
                push.fail(target[-1].rank, error.message, error.state)
                push.remote.lost |= error.state in LOST
                if not all(transfer.over for transfer in transfers):
                    continue
                outcome = None
            now = self.now()
            self._recorded.extend(self.ledger.end_push(writes.key, target, outcome, now))
            del writes.left[target]
        if not writes.left:
            push.state = "done" if push.error is None else "failed"
            self._writes.remove(writes)
        self.act()

    def receive(self, message: Message) -> None:
        """Process a message of a reader."""
        if isinstance(message, ChecksumRequest):
            self.answers.receive(message)
        else:
            self._recorded.extend(self.ledger.receive(message, self.now()))
            self.act()

    def tick(self) -> None:
        """Process the time. After the rank is closed, no request is confirmed as valid.

        Peers on the same machine can still read the memory, and it may contain other data by then.
        """
        if self.ledger.holding and self.nixl.closed:
            self.answers.close()
            for key in self.ledger.held:
                self._recorded.extend(self.ledger.abort(key, self.now()))
        self._recorded.extend(self.ledger.tick(self.now()))
        self.act()

    def act(self) -> None:
        """Carry out the recorded actions."""
        if self._recorded:
            self.messages.act(self._recorded, self._free)

    def _free(self, action: HoldAction) -> None:
        """Record that a request has ended."""
        if isinstance(action, Free):
            self.freed[action.key.remote_id] = action.why

    def close(self) -> None:
        """Forget all held requests. Their readers receive no answers from now on."""
        self.answers.close()
        self.ledger.clear()
