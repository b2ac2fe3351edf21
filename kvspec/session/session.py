"""The session of one rank: its connections, its loads, and the requests that it holds.

Invariant: everything is checked before anything moves, and each error names the fault. A load that
is done has complete and valid data, and nothing writes its blocks any more. A method waits only if
its docstring states it.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Self

import attrs

from kvspec.completion.consumer import ConsumerLedger
from kvspec.completion.producer import ProducerLedger
from kvspec.descriptors.request import Tables, TransferRequest, tables_of
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import flag, instance, positive_int, seconds
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.replicas import ReplicaPolicy
from kvspec.plan.plan import TransferPlan
from kvspec.session.background import (
    BUSY,
    Background,
    SessionLock,
    Worker,
    closes_if_interrupted,
    since_boot,
)
from kvspec.session.channel import Channel, TcpChannel, check_channel
from kvspec.session.checksums import ChecksumAnswers
from kvspec.session.holds import Holds, Settled
from kvspec.session.load import Load
from kvspec.session.loads import Loads, PreparedLoad, UnpreparedLoad, Waiting
from kvspec.session.mailbox import Introduced, Messages, epoch_of
from kvspec.session.remotes import Connection, RemoteEngine, Remotes, remote_engine_of
from kvspec.session.stats import SessionStats
from kvspec.session.transport import Transport, check_transport
from kvspec.tickets.ticket import PrefillTicket
from kvspec.wire.handshake import Handshake
from kvspec.wire.messages import (
    ChecksumRequest,
    Key,
    Message,
    RankAddress,
    ReaderStatus,
    RemoteId,
    key_of,
)
from kvspec.wire.versions import START

CONNECTING = 64  # Locks for connecting, so that different engines rarely wait for each other.
DISCONNECTING = 0.02  # Seconds between checks of old engines for bytes in flight.
FIRST_NUMBER = 1 << 48  # The first number of a question is drawn below this.
TICKET_ANSWER, TICKET_ABSENT = 30.0, 2.0
"""Time limits in seconds for the producer of a ticket.

`TICKET_ANSWER` is the time to answer, and `TICKET_ABSENT` the time to accept a connection.
"""


class Session:
    """Exchange requests between one rank and other engines, as a consumer and as a producer.

    Call any `poll` several times in each heartbeat interval, or set *background*. A poll also sends
    the messages that other methods have caused since the last one. Methods may be called from any
    thread. In a forked child they raise `TransferError` "forked". In a signal handler that runs
    inside of another call of the session, they raise `TransferError` "busy". An interrupt such as
    `KeyboardInterrupt` inside of a call closes the session: its loads fail with "closed".

    Args:
        nixl: The `NixlRank` of the rank, or another `Transport`. The caller closes it after the
            session. Of the open sessions that share it, only one may connect producers.
        cache: The KV cache of the rank. The session registers its memory with *nixl*.
        engine_id: Name of the engine, the same at each start.
        epoch: Number of this start, the same on all ranks of the engine, and larger at each start.
            An engine with one rank may omit it: the default is the time in ns.
        owner: Owner of the cache's memory. *nixl* keeps a reference to it.
        replica_policy: How replicas share the work. Both engines must have the same.
        model: Name of the weights. Both engines must have the same.
        revision: Revision of the weights. Both engines must have the same.
        channel: The channel for messages. By default, a `TcpChannel` on this machine. The session
            closes it.
        lease: As in `ProducerLedger`, in seconds.
        longest: As in `ProducerLedger`, in seconds.
        heartbeat: As in `ConsumerLedger`, in seconds.
        patience: As in `ConsumerLedger`, in seconds.
        background: Start a thread that polls the session.
        max_producers: Number of producers of tickets that stay connected. The least recently used
            are disconnected. A producer stays while it has an open load, or if `connect` was called
            for it. So more of them may be connected for a time.
        dead_tokens: As in `build_table`, for all engines that this session connects.

    Attributes:
        nixl: The transport of the rank.
        cache: The KV cache of the rank.

    Raises:
        SpecError: If an argument is wrong.
        TransferError: If *nixl* is closed, or the default channel cannot listen.
    """

    _background: Background | None = None
    _interrupted = False
    _drains = False  # Whether everything is closed after an interrupt, and only bytes may move.

    def __init__(
        self,
        nixl: Transport,
        cache: RankCache,
        *,
        engine_id: str,
        epoch: int | None = None,
        replica_policy: ReplicaPolicy | None = None,
        model: str | None = None,
        revision: str | None = None,
        channel: Channel | None = None,
        owner: object = None,
        lease: float = 30.0,
        longest: float = 3600.0,
        heartbeat: float = 5.0,
        patience: float = 60.0,
        background: bool = False,
        max_producers: int = 256,
        dead_tokens: bool = False,
        clock: Callable[[], float] = since_boot,
    ) -> None:
        self.nixl, self.cache = check_transport(nixl), cache
        in_background = flag("background", background)
        self._dead_tokens = flag("dead_tokens", dead_tokens)
        most = positive_int("max_producers", max_producers)
        check_channel(channel)
        shake = Handshake(
            engine_id=engine_id,
            epoch=epoch_of(epoch, cache),
            cache=cache,
            replica_policy=ReplicaPolicy() if replica_policy is None else replica_policy,
            model=model,
            revision=revision,
        )
        self.me = RankAddress(shake.engine_id, shake.epoch, shake.rank)
        held_ledger = ProducerLedger(self.me, lease=lease, longest=longest)
        load_ledger = ConsumerLedger(self.me, heartbeat=heartbeat, patience=patience)
        # If two sessions have one name and epoch by mistake, their numbers differ all the same. So
        # an answer to one of them is never taken for an answer to the other.
        load_ledger.counts["numbers"] = secrets.randbelow(FIRST_NUMBER)
        nixl.register(cache.memory, owner=(owner, cache.owner))
        shake = attrs.evolve(shake, transport=nixl.metadata(), start=secrets.token_bytes(START))
        self.channel: Channel = TcpChannel() if channel is None else channel
        self._own = Introduced(
            handshake=shake,
            address=self.channel.address,
            lease=held_ledger.lease,
            heartbeat=load_ledger.heartbeat,
        )
        self._lock, self._clock = SessionLock(self._close_interrupted), clock
        self._connecting = tuple(SessionLock() for _ in range(CONNECTING))
        messages = self._messages = Messages(self.channel, nixl.secret, self._own)
        answers = ChecksumAnswers(held_ledger, cache, owner, messages)
        calls = self._connect_ranks, self._disconnect, self._poll_now
        self._remotes = Remotes(nixl, self._lock, messages, *calls, most)
        self._holds = Holds(held_ledger, nixl, clock, answers)
        self._loads = Loads(load_ledger, nixl, cache, clock, messages, self._remotes)
        if in_background:
            self._open_threads()

    def _open_threads(self) -> None:
        self._starting = Worker(self._start)
        self._loads.select = self._starting.put
        self._background = Background(self._poll, self._rest, self.channel, self._lock)

    def __repr__(self) -> str:
        return f"<Session {self.me} at {self.channel.address}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def introduction(self) -> bytes:
        """The sealed introduction of this rank. Others pass it to `connect`. It is not secret."""
        return self._messages.introduction

    @closes_if_interrupted
    def fetch(
        self, addresses: Iterable[str], timeout: float = 10.0, *, absent: float | None = None
    ) -> list[bytes]:
        """Fetch the introductions of the sessions at *addresses*. Waits.

        Args:
            addresses: Addresses of channels.
            timeout: Seconds to wait for the answer of a reachable peer. The look-up of a host name
                comes before, and takes what the system's resolver takes.
            absent: Seconds to wait until a peer accepts the connection. By default, *timeout*.

        Returns:
            The introductions, in the order of *addresses*.

        Raises:
            TransferError: With state "timeout". Its `rank` is the address that did not answer.
        """
        answer = seconds("timeout", timeout)
        absent = answer if absent is None else seconds("absent", absent)
        return self._messages.fetch(addresses, answer, absent, self._poll_now, self._lock)

    @closes_if_interrupted
    def connect(self, introductions: Iterable[bytes], *, timeout: float = 10.0) -> TransferPlan:
        """Connect a producer, and return the plan between it and this rank's engine. Waits.

        The engine stays connected until `disconnect`, or until a newer incarnation is connected.
        Then loads from the old one fail. Everything is checked before a connection is opened.

        Args:
            introductions: Introductions of all ranks of the engine.
            timeout: Seconds to wait for the connections. The call may first wait for another
                `connect`: of the same engine, or of one whose name has the same of 64 locks.

        Returns:
            The plan.

        Raises:
            WireError: If an introduction is damaged or was sealed with another secret.
            SpecError: If a rank is missing or occurs twice, or the incarnation is older than the
                connected one, or another open session connects producers over the same transport.
            MismatchError: If engines, models, replica policies or epochs do not fit.
            TransferError: If a connection fails, or the session is closed. With state "busy" if
                this incarnation is connected in another way, and bytes move. Then it stays so.
        """
        most = seconds("timeout", timeout)
        remote = remote_engine_of(
            self._own, self.nixl, introductions, dead_tokens=self._dead_tokens
        )
        return self._join(remote, most)

    def _join(
        self, remote: RemoteEngine, timeout: float, attempt: Connection | None = None
    ) -> TransferPlan:
        """Connect an engine that fits. *attempt*: the attempt of a ticket, or None."""
        name, epoch = remote.incarnation
        with self._connecting[hash(name) % CONNECTING].held:
            remote.by_ticket = attempt is not None
            if attempt is not None and attempt.engine_id != name:
                expected = f"{name}, the engine at these addresses"
                raise SpecError("engine_id", attempt.engine_id, expected)
            self._messages.resolve(each.address for each in remote.ranks.values())
            # `held` takes the lock, and the second one marks that something changes. They are two,
            # because an interrupt may come between any two lines: see `SessionLock`.
            with self._lock.held, self._lock:
                if attempt is not None:
                    self._remotes.check_wanted(attempt)
                if (known := self._remotes.known(remote)) is not None:
                    return known.plan
                self._remotes.check_alone()
                self._messages.check_starts(remote.incarnation, remote.ranks.values())
                self._loads.connect(name, epoch)
                self._holds.ledger.connect(name, epoch)
                self._remotes.replace(remote)
            self._remotes.connect(remote, timeout)
            return remote.plan

    @closes_if_interrupted
    def disconnect(self, engine_id: str) -> None:
        """Disconnect an engine that has ended. Loads from it fail, also those that wait for it.

        Reads in flight keep the blocks of their loads until they have ended.
        """
        instance("engine_id", engine_id, str)
        with self._lock.held, self._lock:
            self._disconnect(engine_id)
            self._wake()

    def _disconnect(self, engine_id: str) -> None:
        """Disconnect an engine. Needs the lock."""
        self._loads.disconnect(engine_id)
        self._holds.ledger.disconnect(engine_id)
        self._remotes.disconnect(engine_id)
        self._messages.clear_starts(engine_id)

    @closes_if_interrupted
    def load(
        self,
        request: TransferRequest,
        *,
        remote_id: str | None = None,
        ticket: PrefillTicket | None = None,
        timeout: float,
        engine_id: str | None = None,
        checksum: bool = False,
    ) -> Load:
        """Start reading *request* from all ranks that hold it.

        Pass the *remote_id* of a request that a connected producer holds. Nothing is posted if the
        call raises. Later errors are in the `error` of the load.

        Or pass the *ticket* of the producer. If this engine is not connected, or was lost, a thread
        connects it first. Each error of the producer and of the request is then in the `error` of
        the load. If such a load fails, the session informs the producer if it can. If not, the
        lease of the request expires. With *background*, a thread selects the data and posts the
        reads, so the call never waits for that.

        Args:
            request: Tokens and blocks to move. `request_id` is the consumer's own. It must differ
                from that of each load that is moving or still exchanges its last messages.
            remote_id: Name of the request, which the producer made by `new_remote_id`.
            ticket: The ticket of the producer. *request* is one that `PrefillTicket.request`
                returned, or one with fewer tokens.
            timeout: Seconds from now until the load fails.
            engine_id: The producer, if several are connected. Not with a ticket.
            checksum: Compare checksums with the producer before the load is done. The producer must
                call `hold` with `blocks`.

        Returns:
            The load.

        Raises:
            SpecError: As `DescriptorTable.select`, or for wrong arguments, or if another load still
                has the `request_id`.
            MismatchError: As `DescriptorTable.select`.
            TransferError: With state "busy" if an unfinished load writes the same blocks, or
                "closed" if the session is closed.
        """
        flag("checksum", checksum)
        most = seconds("timeout", timeout)
        began = self._clock()
        with self._lock.held, self._lock:
            key, producer = self._producer(remote_id, ticket, engine_id)
            session = self.poll, self._lock, self._is_closed, self._cancel
            load = Load(request, key, producer, *session, ticket, checksum=checksum)
            load.began, load.deadline = began, began + most
            if isinstance(producer, Connection):
                self._loads.open(load)
                self._loads.wait_for(Waiting(producer, load))
                self._wake()
                return load
            self._loads.check_free(load.request.request_id)
        return self._begin(load, producer)

    def _begin(self, load: Load, remote: RemoteEngine) -> Load:
        """Begin a load from *remote*, and return it. The lock is not held while data is selected.

        If the producer is connected again meanwhile, the data is selected again.
        """
        while True:
            result = self._loads.prepared(load, remote)
            with self._lock.held, self._lock:
                remote = self._remotes.find(load.engine_id)
                if remote is not result.remote:
                    continue
                prepared = result.usable
                self._loads.open(load)
                try:
                    self._loads.begin(load, prepared)
                except Exception as error:
                    self._loads.fail_start(load, error)
                    raise
                self._wake()
                return load

    @closes_if_interrupted
    def _start(self, waiting: Waiting) -> None:
        """Begin a load of a ticket. Runs in a thread of its own."""
        result: PreparedLoad | UnpreparedLoad | None = None
        while True:
            with self._lock.held, self._lock:
                remote = self._loads.serve(waiting, result)
                if remote is None:
                    if not self._remotes.closed:
                        self._wake()
                    return
            result = self._loads.prepared(waiting.load, remote)

    @closes_if_interrupted
    def decline(
        self,
        remote_id: str | None = None,
        *,
        ticket: PrefillTicket | None = None,
        engine_id: str | None = None,
    ) -> None:
        """Inform the producer that this rank will not load a request.

        While this rank has a load of the *ticket*, the load informs the producer when it ends.

        Args:
            remote_id: Name of a request that a connected producer holds.
            ticket: Or the ticket of the producer, which a thread connects first if necessary. If
                that fails, the thread tries again for ten minutes. After that, the log and the
                counter `declines_lost` show it, and the lease of the request expires.
            engine_id: As in `load`.

        Raises:
            SpecError: If an argument is wrong.
            TransferError: With state "closed" if the session is closed.
        """
        with self._lock.held, self._lock:
            if ticket is None:
                key = _named(remote_id)
                self._loads.send_decline(self._remotes.find(engine_id), key)
            else:
                self._remotes.check_open()
                self._loads.decline_ticket(_ticket(ticket, remote_id, engine_id))
            self._wake()

    @closes_if_interrupted
    def keep(self, ticket: PrefillTicket, *, timeout: float) -> None:
        """Ask the producer of *ticket* to hold the prompt until this rank loads or declines it.

        Call it on all ranks when a scheduler receives a ticket that it cannot load yet. So the
        producer may hold prompts for a short time, and a prompt in a long queue is not lost. Never
        waits: a thread connects the producer if necessary.

        Args:
            ticket: The ticket of the producer.
            timeout: Seconds after which this rank declines the ticket. A repeated call sets a new
                time.

        Raises:
            SpecError: If an argument is wrong.
            TransferError: With state "closed" if the session is closed.
        """
        most = seconds("timeout", timeout)
        with self._lock.held, self._lock:
            self._remotes.check_open()
            kept = _ticket(ticket, None, None)
            if not self._loads.of(kept):  # A load sends heartbeats by itself.
                self._loads.errands.keep(kept, most)
            self._wake()

    def _producer(
        self, remote_id: object, ticket: object, engine_id: str | None
    ) -> tuple[Key, RemoteEngine | Connection]:
        """Return a request and its producer. That of a ticket may not be connected yet."""
        if ticket is None:
            return _named(remote_id), self._remotes.find(engine_id)
        held = _ticket(ticket, remote_id, engine_id)
        return key_of(held.remote_id), self._remotes.connection(held)

    @property
    def held(self) -> tuple[RemoteId, ...]:
        """The held requests, whose blocks are not free."""
        with self._lock.held, self._lock:
            return tuple(key.remote_id for key in self._holds.ledger.held)

    @closes_if_interrupted
    def hold(
        self,
        remote_id: str,
        *,
        lease: float | None = None,
        blocks: Tables | None = None,
    ) -> None:
        """Hold a request until all its readers are done.

        Call it when the data is computed: the lease runs from this call, and loads read at once.

        Args:
            remote_id: Name from `new_remote_id`, the same on all ranks. A client that retries a
                request gets a new name, so both can be held at the same time.
            lease: Seconds in which the first reader must send a heartbeat. Each heartbeat extends
                it, until `longest` seconds after this call. By default, the lease of the session.
            blocks: The block tables of the request, by group. Loads with `checksum` need them. The
                checksums are of the bytes that are there: blocks that were never written pass.

        Raises:
            SpecError: If *remote_id* was held before, or *blocks* do not fit the engine.
            TransferError: With state "closed" if the session or its `NixlRank` is closed.
        """
        key, tables = key_of(remote_id), tables_of("blocks", {} if blocks is None else blocks)
        engine = self._own.handshake.engine
        if strange := sorted(tables.keys() - {group.name for group in engine.groups}):
            raise SpecError("blocks", strange[:3], "block tables of the engine's groups")
        for group in engine.groups:
            if group.name in tables and all(part.per_token for part in group.own_parts):
                field = f"blocks[{group.name!r}]"
                tables[group.name].check_start(field, engine.virtual_block(group))
        with self._lock.held, self._lock:
            self._remotes.check_open()
            if self.nixl.closed:
                raise TransferError("the NIXL rank was closed", state=TransferState.CLOSED)
            now = self._clock()
            self._holds.ledger.hold(key, now, lease=lease, blocks=tables)
            self._messages.counters.holds_started += 1
            self._wake()

    @closes_if_interrupted
    def abort(self, remote_id: str) -> None:
        """Abort a held request. Its readers receive `gone`.

        Its blocks are free when the readers have stopped, or the lease is over. Then `settled`
        returns the request as aborted. If the request is not held any more, nothing happens.

        Raises:
            SpecError: If *remote_id* is not from `new_remote_id`.
        """
        with self._lock.held, self._lock:
            self._holds.ledger.abort(key_of(remote_id), self._clock())
            self._wake()

    @closes_if_interrupted
    def settled(self) -> Settled:
        """Make progress on the session. Return the held requests that ended since the last call."""
        self.poll()
        ledger = self._holds.ledger
        if not ledger.freed and not self._messages.refused:
            return Settled()  # Without the lock, for which a scheduler might wait.
        with self._lock.held, self._lock:
            freed, refused = dict(ledger.freed), tuple(self._messages.refused)
            ledger.freed.clear()
            self._messages.refused.clear()
        ended = {
            end: tuple(name for name, how in freed.items() if how == end)
            for end in ("done", "expired", "aborted")
        }
        return Settled(**ended, refused=refused)

    @closes_if_interrupted
    def poll(self) -> None:
        """Make progress on everything: messages, transfers and deadlines. Never waits.

        With *background*, the thread does that, and this does nothing.
        """
        if self._background is not None and self._background.works:
            self._lock.check()
        else:
            self._poll_now()

    def _poll_now(self) -> None:
        """Poll in this thread."""
        with self._lock.held, self._lock:
            self._poll()
            if self._background is not None:
                self._background.wake()

    def _poll(self) -> None:
        if self._interrupted:
            self._loads.drain()
            return
        # The messages come first: only a reader that asked before the NIXL rank was closed has
        # valid data.
        messages = [*self._messages.receive()]
        self._holds.check_memory()
        for message in messages:
            self._deliver(message)
        self._holds.ledger.tick(self._clock())  # Heartbeats that waited have extended their leases.
        for rank in self._messages.ended_ranks():
            self._loads.ledger.lose(rank, self._clock())
        self._loads.move()
        self._holds.move()
        self._loads.ledger.tick(self._clock())  # Heartbeats are due, or a load is late.
        self._act()
        if self._remotes.disconnecting:
            self._remotes.disconnect_idle()
        self._messages.flush()
        if not self.nixl.closed:
            self.nixl.tick()

    def _close_interrupted(self) -> None:
        """Close the session after an interrupt, which may have left everything half changed.

        Call it with the lock. If an interrupt comes during this call, the next call does it again.
        A later one must not: a new session may have connected the same peers by then.
        """
        if self._drains:
            return
        why = "the session was closed, because one of its calls was interrupted"
        self._interrupted = True
        self._loads.close_interrupted(why)
        self._holds.close()
        self._messages.close()
        self._loads.drain()
        self._remotes.close_interrupted()
        if self._background is not None:
            self._background.end()
        self._drains = True

    def stats(self) -> SessionStats:
        """Return the numbers of unfinished things, and counters.

        It takes no lock, so that an exporter of metrics never waits for a poll.
        """
        self._lock.check_process()
        held, loads = self._holds.ledger, self._loads.ledger
        return SessionStats(
            loads=len({*loads.open, *self._loads.loads}),
            steps=loads.steps,
            errands=len(self._loads.errands),
            held=held.counts["held"],
            held_blocks=held.counts["blocks"],
            remembered=len(held.records),
            engines=len(self._remotes),
            disconnecting=len(self._remotes.disconnecting),
            sums=len(self._holds.answers.asked),
            counters=attrs.evolve(
                self._messages.counters,
                holds_done=held.ended["done"],
                holds_expired=held.ended["expired"],
                holds_aborted=held.ended["aborted"],
            ),
        )

    @closes_if_interrupted
    def close(self, drain: float = 1.0) -> None:
        """Let all loads fail with "closed", wait until nothing moves, and disconnect all engines.

        Waits at most *drain* seconds. After that, bytes in flight stop only when the caller closes
        the NIXL rank. Held requests are forgotten. Consumers that still read one fail, because this
        rank no longer answers. In a forked child nothing happens.
        """
        end = time.monotonic() + seconds("drain", drain)
        if self._lock.forked:
            return
        with self._lock.held, self._lock:
            self._loads.closing = True  # No load begins between the next polls.
            for load in list(self._loads.loads.values()):
                where = "" if load.has_remote else " before its producer was connected"
                why = f"the session was closed{where}"
                self._loads.cancel(load, why, TransferState.CLOSED)
        while True:
            with self._lock.held, self._lock:
                self._poll()
                moving = self._moving
            if not moving or time.monotonic() >= end:
                break
            time.sleep(BUSY)
        if self._background is not None:
            self._starting.close(max(0.0, end - time.monotonic()))
            self._background.close()
        with self._lock.held, self._lock:
            self._loads.errands.clear()
            self._remotes.close()
            self._holds.close()
            self._messages.close()

    def _deliver(self, message: Message) -> None:
        """Give a message to the part of the session that it concerns."""
        if message.to != self.me:
            self._messages.note(f"{message}: it is for {message.to}")
        elif isinstance(message, ChecksumRequest):
            self._holds.answers.receive(message)
        elif isinstance(message, ReaderStatus):
            self._holds.ledger.receive(message, self._clock())
        else:
            self._loads.receive(message)

    @property
    def _moving(self) -> bool:
        """Whether anything is in flight on either side. Needs the lock."""
        return bool(self._loads.moving or self._holds.moving or self._loads.interrupted_loads)

    def _rest(self) -> float:
        """Return how many seconds the next poll may be away, if nothing happens before.

        Needs the lock.
        """
        if self._moving or self._messages.unsent:
            return BUSY
        if self._remotes.disconnecting:
            return DISCONNECTING
        ledgers = self._holds.ledger.due, self._loads.ledger.due
        due = [at for at in (*ledgers, self._loads.errands.due) if at is not None]
        return max(BUSY, min(due, default=math.inf) - self._clock())

    def _act(self) -> None:
        """Carry out what both ledgers have decided."""
        if actions := self._holds.ledger.actions:
            self._messages.act(actions)
        self._loads.act()

    def _wake(self) -> None:
        """Carry out what a call has begun, and let the background thread see it. Needs the lock."""
        self._act()
        if self._background is not None:
            self._background.wake()

    def _cancel(self, load: Load) -> None:
        with self._lock.held, self._lock:
            self._loads.cancel(load)
            self._wake()

    def _is_closed(self) -> bool:
        return self._remotes.closed

    def _connect_ranks(self, attempt: Connection) -> None:
        """Connect the producer of a ticket. Runs in the thread of `Remotes`."""
        with self._lock.held, self._lock:
            self._remotes.check_wanted(attempt)
        found = self.fetch(attempt.addresses, TICKET_ANSWER, absent=TICKET_ABSENT)
        remote = remote_engine_of(self._own, self.nixl, found, dead_tokens=self._dead_tokens)
        self._join(remote, TICKET_ANSWER, attempt)


def _named(remote_id: object) -> Key:
    """Return the request *remote_id*, which a caller without a ticket must pass."""
    if remote_id is None:
        rule = "pass remote_id or ticket: they name the producer's request"
        raise SpecError("remote_id", None, rule=rule)
    return key_of(remote_id)


def _ticket(ticket: object, remote_id: object, engine_id: object) -> PrefillTicket:
    """Return *ticket*, which contains the names of the request and of the engine."""
    held = instance("ticket", ticket, PrefillTicket)
    if remote_id is not None or engine_id is not None:
        rule = "a ticket contains the remote_id and the engine_id"
        raise SpecError("ticket", ticket, rule=rule)
    return held
