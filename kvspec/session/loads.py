"""The loads of one rank: start them, move their data, and carry out what the ledger decides.

Invariant: the ledger decides when a load is done or has failed. It learns that a step is finished
when the last byte has arrived, and that a step has failed for good when no byte can arrive any
more.

How it works:
    `kvspec.session.load` describes the life of a load. These methods lead from state to state of
    the ledger. `Load.state` is "moving" in connecting, moving, asking and draining:

        open      -> connecting   the ledger and `loads` know the load; nothing else has happened
        prepare   -> connecting   check everything and select the data, without the lock
        begin     -> moving       claim the blocks, start the steps, queue the reads, then let the
                                  ledger send the first heartbeats
        fail_start -> draining    the start failed
        move                      poll the transfers
        receive                   give messages to the ledger; it may answer with actions
        act       -> done, failed carry the actions out: send messages, free blocks, set states

    A *step* in the ledger is the read of one producer rank. `Load.in_flight` has the transfers. If
    the data must be compared, the ledger waits for that after the last step.

    A load whose producer is named by a ticket waits in `waiting` until the producer is connected. A
    load that fails while it waits leaves a decline in `errands`, which informs the producer.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import attrs

from kvspec.completion.consumer import FREE_ID, ConsumerLedger, LoadPlan, Step
from kvspec.completion.ledger import Action, Closed, Ended, Failed, Refused, Tell
from kvspec.descriptors.request import TransferRequest
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.session.checksums import Audit
from kvspec.session.errands import Errands
from kvspec.session.load import LOST, Load
from kvspec.session.mailbox import Messages
from kvspec.session.remotes import Connection, RemoteEngine, Remotes
from kvspec.session.transport import ReadInFlight, Transport
from kvspec.session.written import BlockLocks, LoadBlocks, blocks_of
from kvspec.tickets.ticket import PrefillTicket
from kvspec.wire.messages import Checksum, ChecksumUnavailable, Key, Message, key_of

log = logging.getLogger(__name__)
MAX_LINE = 250  # Characters of the log line of a failed load.
POLL_TURN = 0.02  # Seconds that one poll spends on small transfers, and again on large ones.
# A read is large if it has several batches. While a load without a large transfer moves, each
# poll posts only one batch of one large transfer. A small load needs about three polls, so it waits
# for about three such batches. Small loads come in groups. So the rule lasts `QUIET` seconds longer
# than the load.
QUIET = 0.1


class Waiting(NamedTuple):
    """A load whose producer is being connected, or whose data is being selected."""

    connection: Connection
    load: Load


@attrs.frozen(eq=False)
class PreparedLoad:
    """The part of the start of a load that takes long. No lock is held while it is computed.

    Attributes:
        remote: The producer.
        request: The request, with the blocks of the producer.
        plan: The plan in the ledger.
        blocks: By group, the blocks that are written.
        reads: The read from each producer rank. Nothing of it is posted.
        audit: The comparison of checksums, or None.
    """

    remote: RemoteEngine
    request: TransferRequest
    plan: LoadPlan
    blocks: LoadBlocks
    reads: Mapping[RankId, ReadInFlight]
    audit: Audit | None

    @property
    def usable(self) -> PreparedLoad:
        """This object."""
        return self


@attrs.frozen(eq=False)
class UnpreparedLoad:
    """A load that could not be prepared, with the error."""

    remote: RemoteEngine
    error: Exception

    @property
    def usable(self) -> PreparedLoad:
        """Raises the error."""
        raise self.error


@attrs.define(eq=False)
class Loads:
    """The loads of one rank, by request id.

    Attributes:
        ledger: The ledger.
        remotes: The connected engines.
        waiting: Loads whose producer is being connected.
        interrupted_loads: Loads of an interrupted session, of which bytes may move.
        interrupted_reads: Their reads. A new session may use the transport and the ids meanwhile.
        errands: Tickets that are kept or declined.
        closing: Whether the session is being closed, so that no load may begin.
        select: Passes a load whose producer is connected to a thread, which calls `serve`. If it is
            None, `serve_waiting` calls `serve` at once.
    """

    ledger: ConsumerLedger
    nixl: Transport
    cache: RankCache
    now: Callable[[], float]
    messages: Messages
    remotes: Remotes
    loads: dict[str, Load] = attrs.field(factory=dict)
    waiting: list[Waiting] = attrs.field(factory=list)
    interrupted_loads: dict[str, Load] = attrs.field(factory=dict)
    interrupted_reads: list[ReadInFlight] = attrs.field(factory=list)
    _small: int = 0  # Index of the next small flight to poll.
    _large: int = 0  # The same for large flights.
    _quiet: float = 0.0  # When large loads may take a whole turn.
    _locks: BlockLocks = attrs.Factory(lambda self: BlockLocks(self.cache), takes_self=True)
    errands: Errands = attrs.field(init=False)
    select: Callable[[Waiting], None] | None = None
    closing: bool = False

    def __attrs_post_init__(self) -> None:
        self.errands = Errands(
            self.ledger, self.remotes, self.messages, self.now, self.send_decline
        )

    @property
    def moving(self) -> bool:
        """Whether anything is in flight, or is compared."""
        return any(load.in_flight or self.ledger.uncompared(n) for n, load in self.loads.items())

    def of(self, ticket: PrefillTicket) -> list[Load]:
        """Return the loads of *ticket* that wait or move."""
        name = ticket.engine_id, key_of(ticket.remote_id)
        return [
            load for load in self.loads.values() if name == (load.engine_id, load.key) and load.open
        ]

    def decline_ticket(self, ticket: PrefillTicket) -> None:
        """Decline *ticket*, unless a load of it informs the producer by itself when it ends."""
        if not self.of(ticket):
            self.errands.decline(ticket)

    def check_free(self, name: str) -> None:
        """Raise `SpecError` if a load of the id *name* is open.

        Raise `TransferError` if the session is being closed.
        """
        if self.closing:
            raise TransferError("the session is being closed", state=TransferState.CLOSED)
        # An earlier load with this id may have ended in the ledger, but its actions are not carried
        # out yet.
        self.act()
        if name in self.loads:
            raise SpecError("request_id", name, FREE_ID)

    def open(self, load: Load) -> None:
        """Add *load* in the state *connecting*. It fails at its deadline.

        Call `fail_start` if `begin` raises.
        """
        name, now = load.request.request_id, self.now()
        self.check_free(name)
        self.ledger.begin(name, now, max(0.0, load.deadline - now))
        self.loads[name] = load
        self.messages.counters.loads_started += 1

    def prepare(self, load: Load, remote: RemoteEngine) -> PreparedLoad:
        """Check a load whose producer is connected, select its data and pair the descriptors.

        It changes nothing, and needs no lock. If *remote* is disconnected meanwhile, the result is
        useless, or this raises.
        """
        request, name = load.request, load.request.request_id
        if load.ticket is not None:
            request = load.ticket.check_held(request)
        audit = None
        if load.checksum:
            audit = Audit(remote, request, self.ledger.me, self.nixl, self.cache, self.messages)
        list_pairs = dict(remote.list_pairs)  # A disconnect in another thread clears it.
        sides = {rank: list_pair.sides(request) for rank, list_pair in list_pairs.items()}
        moved = {rank: each for rank, each in sides.items() if len(each[1])}
        plan = self._plan(remote, load.key, name, moved, checksum=load.checksum)
        blocks = blocks_of(remote.plan, request)
        reads = self.nixl.pair(moved, request=name)
        return PreparedLoad(remote, request, plan, blocks, reads, audit)

    def begin(self, load: Load, prepared: PreparedLoad) -> None:
        """Start an open load. Everything is checked before the first read can be posted.

        The reads are queued. Later polls post those that are not posted here, perhaps after the
        first heartbeats.
        """
        name = load.request.request_id
        load.request, load.plan, load.blocks = prepared.request, prepared.plan, prepared.blocks
        load.audit = prepared.audit
        load.remote = prepared.remote  # Last: `has_remote` means that all the others are set.
        self._locks.acquire(name, load.blocks)
        self.ledger.assign(load.plan)
        left = max(load.deadline - self.now(), 1e-3)
        reads = self.nixl.move(prepared.reads, request=name, timeout=left)
        load.nbytes = sum(read.nbytes for read in reads.values())
        load.in_flight |= {self.ledger.start(name, rank): read for rank, read in reads.items()}
        if self.select is None:  # Otherwise a thread polls soon.
            for read in reads.values():
                with contextlib.suppress(TransferError):  # The next poll raises it again.
                    read.poll()
        self.ledger.queued(name, self.now())
        self.errands.end(load.engine_id, load.key)

    def _plan(
        self,
        remote: RemoteEngine,
        key: Key,
        name: str,
        sources: Iterable[RankId] = (),
        *,
        checksum: bool = False,
    ) -> LoadPlan:
        engine_id, epoch = remote.incarnation
        return LoadPlan(
            request_id=name,
            key=key,
            engine_id=engine_id,
            epoch=epoch,
            expected=remote.readers,
            sources=tuple(sources),
            checksum=checksum,
        )

    def send_decline(self, remote: RemoteEngine, key: Key) -> None:
        """Inform the producer that this rank will not load a request."""
        # A name that no load has.
        name, now = f"decline {secrets.token_hex(8)}", self.now()
        plan = self._plan(remote, key, name)
        self.ledger.begin(name, now, 0.0)
        try:
            self.ledger.assign(plan)
        except SpecError:  # A load has this name in messages.
            self.ledger.cancel(name, now)
            raise
        self.ledger.queued(name, now)
        self.messages.counters.declines += 1

    def cancel(
        self, load: Load, why: str = "cancelled", state: TransferState = TransferState.CANCELLED
    ) -> None:
        """Cancel a load, unless it has ended."""
        name = load.request.request_id
        if self.loads.get(name) is load:
            self.ledger.cancel(name, self.now(), why, state)
            self.act()

    def fail_start(self, load: Load, error: Exception) -> None:
        """End a load whose start raised *error*."""
        why, state = _reason(error, TransferState.REFUSED)
        load.fail(None, why, state, error)
        self.cancel(load, why, state)

    def wait_for(self, waiting: Waiting) -> None:
        """Begin a load when its producer is connected.

        Until then, its ticket stays kept if it was kept before.
        """
        self.errands.extend(waiting.load)
        self.waiting.append(waiting)
        self.serve_waiting()

    def serve_waiting(self) -> None:
        """Begin the loads that waited for a producer that is connected by now."""
        for waiting in list(self.waiting):
            if waiting.connection.future.done():
                if self.select is not None:
                    self.select(waiting)
                elif (remote := self.serve(waiting)) is not None:
                    self.serve(waiting, self.prepared(waiting.load, remote))
                self.waiting.remove(waiting)

    def prepared(self, load: Load, remote: RemoteEngine) -> PreparedLoad | UnpreparedLoad:
        """Return the result of `prepare`, or its error. Needs no lock."""
        try:
            return self.prepare(load, remote)
        except Exception as error:  # noqa: BLE001 - it is raised again where the load ends
            return UnpreparedLoad(remote, error)

    def serve(
        self, waiting: Waiting, result: PreparedLoad | UnpreparedLoad | None = None
    ) -> RemoteEngine | None:
        """Begin a load whose attempt to connect the producer has ended, or end the load.

        Called twice for a load: first without a result, to learn for which engine to prepare. If
        the producer is connected again meanwhile, the load is prepared once more, or waits again.

        Args:
            waiting: The load.
            result: The result of `prepared`. None in the first call.

        Returns:
            The engine for which to prepare the load before the next call, or None after the last.
        """
        self.act()  # The deadline of the load may be over.
        load = waiting.load
        if load.has_remote and load.error is None:
            return None  # It has begun.
        try:
            if load.open and load.error is None:
                remote = self._producer_of(waiting)
                if remote is None or result is None or result.remote is not remote:
                    return remote
                self.begin(load, result.usable)
                return None
        except Exception as error:  # noqa: BLE001 - it fails this load alone
            self.fail_start(load, error)
        self._decline_failed(load)
        return None

    def _producer_of(self, waiting: Waiting) -> RemoteEngine | None:
        """Return the connected producer. Raise the error of the attempt to connect it.

        If it was lost and is connected once more, the load waits for that. Then the result is None.
        """
        self.remotes.check_open()  # Otherwise the attempt to connect has a less clear error.
        waiting.connection.future.result()
        newest = self.remotes.newest(waiting.connection)
        if not newest.future.done():
            waiting.load.connection = newest
            self.waiting.append(Waiting(newest, waiting.load))
            return None
        newest.future.result()
        return self.remotes.find(newest.engine_id)

    def _decline_failed(self, load: Load) -> None:
        """Decline the ticket of a load that has failed before it began, unless that does harm.

        Another load of the ticket may have begun meanwhile, and needs the prompt. And a producer
        that was disconnected must not be connected again.
        """
        ticket = load.ticket
        wanted = not self.remotes.closed and self.remotes.wants(load.engine_id)
        if ticket is not None and wanted and self.of(ticket) in ([], [load]):
            self.errands.decline(ticket)

    @property
    def _used(self) -> set[str]:
        """Names of the producers of open and waiting loads, and of errands.

        A decline that was sent needs no producer: if the message is lost, the lease expires.
        """
        names = {load.engine_id for load in self.loads.values()} | self.errands.names
        return names | {waiting.connection.engine_id for waiting in self.waiting}

    def receive(self, message: Message) -> None:
        """Process a message of a producer."""
        # The ledger knows the requests that were declined too.
        if self.ledger.find(message) is None and self.errands.answers(message):
            return
        if isinstance(message, Checksum | ChecksumUnavailable):
            load = self._find(message)
            if load is None or load.audit is None or not load.audit.deliver(message):
                self.messages.note(f"{message}: no question is open for it")
        else:
            self.ledger.receive(message, self.now())

    def _find(self, message: Message) -> Load | None:
        return self.loads.get(self.ledger.find(message) or "")

    def move(self) -> None:
        """Make progress on all loads, in turns."""
        self.act()
        self.serve_waiting()
        if self.errands:
            self.errands.move()
        if self.remotes.crowded:
            self.remotes.disconnect_unused(self._used)
        end = time.monotonic() + POLL_TURN
        for name, load in list(self.loads.items()):
            if load.audit is not None and self.ledger.uncompared(name):
                self._compare(load, load.audit, end)
        self._poll_reads(end)

    def _poll_reads(self, end: float) -> None:
        """Poll the small reads until *end*, and then large ones. See `QUIET`."""
        small, large = list[tuple[Load, Step]](), list[tuple[Load, Step]]()
        for load in self.loads.values():
            for step, flight in load.in_flight.items():
                (large if flight.large else small).append((load, step))
        self._small = self._poll(small, self._small, end)
        # A load whose reads are all small extends the quiet time while data of it is to come. While
        # it waits for the answer of its producer, it has no reads, so it does not: the answer may
        # never come.
        now, slow = time.monotonic(), {load for load, _ in large}
        if any(load.moves and load not in slow for load, _ in small):
            self._quiet = now + QUIET
        share = 0.0 if now < self._quiet else POLL_TURN
        self._large = self._poll(large, self._large, now + share)

    def _poll(self, steps: list[tuple[Load, Step]], first: int, end: float) -> int:
        """Poll at least one flight, until *end*. Return the index of the next one."""
        for place in range(first, first + len(steps)):
            load, step = steps[place % len(steps)]
            if (flight := load.in_flight.get(step)) is not None:
                self._settle(load, step, flight, end)
            if time.monotonic() >= end:
                return place + 1
        return first

    def close_interrupted(self, why: str) -> None:
        """Let all loads fail with "closed", whatever an interrupt has left. See `drain`."""
        self.closing = True
        for name, load in self.loads.items():
            if load.open:
                load.written |= load.has_remote  # Any byte may have been written.
                load.fail(None, why, TransferState.CLOSED)
                self.interrupted_loads[name] = load
        self.interrupted_reads = [
            read for read in self.nixl.transfers if read.request in self.interrupted_loads
        ]
        self.loads.clear()
        self.waiting.clear()
        self.errands.clear()
        self.ledger.clear()

    def drain(self) -> None:
        """End the interrupted loads of which no byte can move."""
        for read in self.interrupted_reads:
            with contextlib.suppress(TransferError):  # The NIXL rank may be closed.
                read.cancel("the session was interrupted", TransferState.CLOSED)
        self.interrupted_reads = [read for read in self.interrupted_reads if not read.over]
        moving = {read.request for read in self.interrupted_reads}
        for name in self.interrupted_loads.keys() - moving:
            load = self.interrupted_loads.pop(name)
            self.messages.counters.count_failed(TransferState.CLOSED)
            load.state = "failed"

    def connect(self, engine_id: str, epoch: int) -> None:
        """Record the current incarnation of an engine. Loads from another one fail."""
        self.ledger.connect(engine_id, epoch, self.now())
        self._settle_old(engine_id, epoch)

    def disconnect(self, engine_id: str) -> None:
        """Disconnect an engine that has ended. Loads from it fail, also those that wait for it."""
        for load in list(self.loads.values()):
            if load.engine_id == engine_id:
                self.cancel(load, f"{engine_id} was disconnected", TransferState.GONE)
        self.errands.clear(engine_id)
        self._settle_old(engine_id)
        self.ledger.disconnect(engine_id)  # Last: the loads that have ended here send `done` once.
        self.act()

    def _settle_old(self, engine_id: str, epoch: int | None = None) -> None:
        """Report reads that are over from all incarnations of an engine except *epoch*.

        The others wait for `move`.
        """
        for load in list(self.loads.values()):
            concerned = load.has_remote and load.engine_id == engine_id
            if concerned and load.remote.incarnation[1] != epoch:
                for step, flight in list(load.in_flight.items()):
                    self._settle(load, step, flight, 0.0)
        self.act()

    def _settle(self, load: Load, step: Step, transfer: ReadInFlight, end: float) -> None:
        """Poll a transfer. Report its end to the ledger when nothing of it can move."""
        try:
            if transfer.poll(max(0.0, end - time.monotonic())) == "PROC":
                return
        except Exception as error:  # noqa: BLE001 - it fails this load alone
            self._fail_read(load, step, transfer, error)
            return
        counters = self.messages.counters
        load.bytes_moved += transfer.nbytes
        counters.bytes_read += transfer.nbytes
        counters.descriptors_read += transfer.descriptors
        load.written |= transfer.begun
        load.in_flight.pop(step, None)
        self.ledger.finish(step, self.now())

    def _fail_read(self, load: Load, step: Step, transfer: ReadInFlight, error: Exception) -> None:
        """Report to the ledger that a transfer has failed. Its bytes may still move."""
        why, state = _reason(error, TransferState.BUG)
        load.fail(step.rank, why, state, error)
        load.remote.must_reconnect |= state in LOST
        over = transfer.over
        if over:
            load.written |= transfer.begun
            load.in_flight.pop(step, None)
        self.ledger.fail(step, why, self.now(), quiet=over, state=state)

    def _compare(self, load: Load, audit: Audit, end: float) -> None:
        """Compare checksums with the producers, after everything has arrived."""
        why = audit.move(load.plan, self.now(), self.ledger.heartbeat, end)
        if why is None:
            return
        if why:
            load.fail(audit.source, why, audit.verdict)
            self.cancel(load, why, audit.verdict)
        else:
            self.ledger.compared(load.request.request_id, self.now())
        audit.cancel()

    def act(self) -> None:
        """Carry out the actions of the ledger."""
        if self.ledger.actions:
            self.messages.act(self.ledger.actions, self._change)

    def _change(self, action: Action) -> None:
        """Carry out an action that concerns one load."""
        name = "" if isinstance(action, Tell | Refused) else action.request_id
        load = self.loads.get(name)
        if load is None:
            return
        if isinstance(action, Failed):
            self._fail(load, action)
        elif isinstance(action, Ended) and load.open:
            self._finish(load, done=action.state == "done")
        elif isinstance(action, Closed):
            self.loads.pop(name, None)

    def _fail(self, load: Load, failed: Failed) -> None:
        """Store and log the error of a load, and stop its reads. Bytes may still move."""
        why = failed.why
        if load.connection is not None and not load.has_remote:
            why += f", at {', '.join(load.connection.addresses)}"
        load.fail(failed.rank, why, failed.state)
        # The whole message names layers and heads, which are too many for a line of a log.
        line = f"load {failed.request_id} from {load.engine_id} failed ({failed.state}): {why}"
        log.info("%s", textwrap.shorten(line, MAX_LINE, placeholder="..."))
        # A load of a ticket that has failed decides whether the next one connects its producer
        # again, which may wait behind other producers for half a minute:
        #
        #   state                         again  because
        #   peer_lost, stale_peer         yes    the producer has ended, or was restarted
        #   timeout                       yes    it may have restarted at the same addresses
        #   gone                          no     it answered, or was disconnected on purpose
        #   cancelled, differs,            no     it answered, or this rank cancelled the load
        #     uncompared
        #   refused, busy                 no     the request is wrong or early
        #   closed, and all others        no     the fault is in this rank
        #
        # A load that fails before the producer is connected decides nothing. The attempt to
        # connect goes on, and the next load waits for it too.
        if load.connection is not None and load.has_remote:
            load.connection.must_reconnect |= failed.state in (*LOST, TransferState.TIMEOUT)
        if load.audit is not None:
            load.audit.cancel()
        for read in load.in_flight.values():
            with contextlib.suppress(TransferError):  # The NIXL rank may be closed.
                read.cancel("its load has failed", TransferState.CANCELLED)

    def _finish(self, load: Load, *, done: bool) -> None:
        """Free the blocks of a load that is done or has failed, and count it."""
        self._locks.release(load.request.request_id)
        if done:
            load.seconds = self.now() - load.began
            self.messages.counters.count_done(load.seconds)
        else:
            fault = TransferState.CANCELLED if load.error is None else load.error.state
            self.messages.counters.count_failed(fault)
        load.state = "done" if done else "failed"  # Last: the caller may see it at once.


def _reason(error: Exception, otherwise: TransferState) -> tuple[str, TransferState]:
    """Return why a load failed by *error*, and its state: *otherwise* for a wrong argument."""
    if isinstance(error, TransferError):
        return error.message or repr(error), error.state
    return str(error) or repr(error), otherwise  # A `MemoryError()` has no text.
