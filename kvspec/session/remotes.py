"""The engines that one rank reads from: check introductions, connect, find and release them.

A thread connects the producers of tickets when they are first needed.

Invariant: an engine is connected completely or not at all. Introductions, compatibility, plan and
tables are checked first, and errors name the fault. The connection is opened last. A NIXL agent
stays connected while an engine here uses it. An engine that is disconnected while it is being
connected does not become connected. Neither does the producer of a ticket if it was disconnected
while the thread fetched its introductions, or if another engine is at its addresses.

Invariant: no caller waits for the producer of a ticket. Beyond `max_producers` of them, the least
recently used are disconnected, so that producers that are gone for good use no memory. That
changes no load: a producer with an open or a waiting load stays connected, because it may be alive
and write the blocks of that load. If all have loads, more than `max_producers` stay connected until
one is free.

How it works:
    `remote_engine_of` returns a `RemoteEngine`: one incarnation of a producer, with the plan.
    `Remotes` keeps it in one of three places:

        place           contents                                 next
        `_coming`       engines that are being connected         `_connected` by `connect`
        `_connected`    one engine for each name                 `disconnecting` by `disconnect`
        `disconnecting` old engines whose lists still exist      removed by `disconnect_idle`

    Opening pairs of lists takes long, so `connect` does it without the lock. Engines of several
    names are connected at the same time: one whose network is cut delays no other, unless both
    names have the same of 64 locks. If `disconnect` is called meanwhile, it removes the engine from
    `_coming`. Then `connect` does not find it there and gives it up.

    If tickets have named more than `max_producers` engines, `disconnect_unused` looks at each:

        the producer                          `disconnect_unused`
        has an open or a waiting load         keeps it
        has a decline that waits              keeps it
        was connected by `Session.connect`    keeps it, and does not count it
        is not connected, or only by tickets  disconnects it as `Session.disconnect` does

    `disconnect_idle` closes the pairs of lists of old engines, but only if no bytes move over them.
    Otherwise the engine stays in `disconnecting`, and each poll tries again.

    One agent may serve two engines in these places, because two sessions of a *producer's* process
    can share their transport. So agents are counted by reference: `disconnect_idle` disconnects an
    agent with its last user. The count is computed from the three places each time. Two sessions
    that connect engines cannot share a transport (`check_alone`). For example, agent a belongs to
    the engines P and Q:

        event                              users of a   agents that `disconnect_idle` disconnects
        P is forgotten                     Q            none
        Q is forgotten too                 none         a

        P failed in flight, so that it     P, Q         a, and Q must be connected again too:
        must be connected again                         its lists used the same connection
        Q is connected again afterwards    Q            Q prepares new lists for a

    The agents of an engine that is being connected are known only when `connect_all` returns. Until
    then, `disconnect_idle` disconnects no agent of an old engine, unless that one has failed.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future

import attrs

from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.table import DescriptorTable, build_table
from kvspec.errors import Mismatch, MismatchError, SpecError, TransferError, TransferState
from kvspec.inputs import sequence
from kvspec.ownership.parallel import RankId
from kvspec.plan.plan import TransferPlan, plan_transfer
from kvspec.session.background import SessionLock
from kvspec.session.mailbox import Introduced, Messages, open_introduction
from kvspec.session.transport import PreparedRows, Sides, Transport
from kvspec.tickets.ticket import PrefillTicket
from kvspec.wire.handshake import disagreements, one_engine


@attrs.frozen(eq=False, slots=False)
class ListPair:
    """The rows between this rank and one producer rank, as the transport has prepared them.

    Attributes:
        table: The table of the rows.
        producer: The producer's rows.
        consumer: The rows of this rank.
    """

    table: DescriptorTable
    producer: PreparedRows
    consumer: PreparedRows

    @staticmethod
    def open(nixl: Transport, table: DescriptorTable, peer: str) -> ListPair:
        """Prepare the rows of both ranks. The transport checks them.

        After an error, the rows of this rank are released here. The others end with the connection.
        """
        local = nixl.prepare(table.consumer_rows, table.consumer_memory_type)
        try:
            remote = nixl.prepare(table.producer_rows, table.producer_memory_type, peer)
        except Exception:
            local.release()
            raise
        return ListPair(table, remote, local)

    def release(self) -> None:
        """Release both lists."""
        self.producer.release()
        self.consumer.release()

    def sides(self, request: TransferRequest) -> Sides:
        """Return what *request* moves, local and remote. Raises as `DescriptorTable.select`."""
        return self.consumer, self.table.select(request), self.producer, None


@attrs.define(eq=False)
class RemoteEngine:
    """One incarnation of a producer.

    Attributes:
        incarnation: The name of the engine, and its epoch.
        plan: The plan between the two engines.
        ranks: The introductions of its ranks.
        tables: The tables of those ranks that exchange data with this rank.
        readers: For each rank that receives this rank's messages, how many readers it must expect.
        list_pairs: The pairs of lists for these ranks.
        agents: Names of its ranks for the transport.
        must_reconnect: Whether a transfer has failed in a way that requires a new connection.
        by_ticket: Whether only tickets have connected the engine.
    """

    incarnation: tuple[str, int]
    plan: TransferPlan
    ranks: dict[RankId, Introduced]
    tables: dict[RankId, DescriptorTable]
    readers: dict[RankId, int] = attrs.field(factory=dict)
    list_pairs: dict[RankId, ListPair] = attrs.field(factory=dict)
    agents: set[str] = attrs.field(factory=set)
    must_reconnect: bool = False
    by_ticket: bool = False

    @property
    def engine_id(self) -> str:
        """The name of the engine."""
        return self.incarnation[0]

    def same(self, other: RemoteEngine) -> bool:
        """Whether *other* has the same introductions, and need not be connected again."""
        return self.ranks == other.ranks and not other.must_reconnect

    def disconnect(self, nixl: Transport, keep: Iterable[str] = ()) -> None:
        """Disconnect all agents except those to *keep*, and release the pairs of lists.

        Raises:
            TransferError: With state "busy" while bytes move.
        """
        for agent in self.agents.difference(keep):
            if agent in nixl.peers:
                nixl.disconnect(agent)
        for list_pair in self.list_pairs.values():
            with contextlib.suppress(TransferError):  # The NIXL rank may be closed.
                list_pair.release()
        self.list_pairs.clear()


def remote_engine_of(
    own: Introduced,
    nixl: Transport,
    introductions: Iterable[bytes],
    *,
    dead_tokens: bool = False,
) -> RemoteEngine:
    """Check the introductions of a producer, and return it without connecting it.

    Raises:
        WireError: If an introduction is damaged or was sealed with another secret.
        SpecError: If a rank is missing or occurs twice.
        MismatchError: If engines, models, replica policies, epochs or time limits do not fit.
    """
    wanted = "the introductions of all ranks of one engine"
    members = [
        open_introduction(sealed, nixl.secret)
        for sealed in sequence("introductions", introductions, wanted)
    ]
    ranks = one_engine(member.handshake for member in members)
    remote = next(iter(ranks.values()))
    delays = {mismatch for each in members if (mismatch := slow_heartbeat(each, own)) is not None}
    if found := (*disagreements(remote, own.handshake), *delays):
        raise MismatchError(found)
    plan = plan_transfer(remote.engine, own.handshake.engine, own.handshake.replica_policy)
    tables = {
        rank: build_table(plan, ranks[rank].cache, own.handshake.cache, dead_tokens=dead_tokens)
        for rank in plan.sources(own.rank)
    }
    readers = {rank: len(plan.notifiers(rank)) for rank in plan.notifies(own.rank)}
    by_rank = {member.rank: member for member in members}
    return RemoteEngine((remote.engine_id, remote.epoch), plan, by_rank, tables, readers)


def slow_heartbeat(producer: Introduced, consumer: Introduced) -> Mismatch | None:
    """Return why heartbeats of *consumer* come too late for *producer*, or None.

    A message may be lost. With less than two heartbeats in a lease, one lost message would end the
    lease of a request that is still read.
    """
    if 2 * consumer.heartbeat < producer.lease:
        return None
    why = "the consumer's heartbeat must be shorter than half of the producer's lease"
    return Mismatch("lease, heartbeat", producer.lease, consumer.heartbeat, why)


def _spread_loss(failed: RemoteEngine, users: Iterable[RemoteEngine]) -> None:
    """Let *users* of the agents of an engine that has failed be connected again, too.

    Their lists used the same connections. They are users no longer, so that the agents are
    disconnected now, and a new connect of a user connects them again.
    """
    for user in users:
        user.must_reconnect |= bool(user.agents & failed.agents)
        user.agents -= failed.agents


def _disconnected(engine_id: str) -> TransferError:
    message = f"{engine_id} was disconnected while it was being connected"
    return TransferError(message, rank=engine_id, state=TransferState.CANCELLED)


@attrs.define(eq=False)
class Connection:
    """The connection to the producer of a ticket.

    Attributes:
        engine_id: Name of the producer.
        addresses: Addresses of its ranks.
        future: The result of connecting.
        must_reconnect: Whether a load failed since because the producer may have ended. It may
            have restarted at the same addresses.
    """

    engine_id: str
    addresses: tuple[str, ...]
    future: Future[object]
    must_reconnect: bool = False

    @property
    def failed(self) -> bool:
        """Whether the attempt to connect has failed."""
        future = self.future
        return future.done() and future.exception() is not None


_CONNECTORS: weakref.WeakKeyDictionary[Transport, weakref.ref[Remotes]]
_CONNECTORS = weakref.WeakKeyDictionary()
"""The producers of the session that connects engines over a transport. It may be closed by now."""


class Remotes:
    """The producers of one rank, by name. See the module docstring.

    All methods but `connect` need the lock.

    Args:
        nixl: The transport.
        lock: The lock of the session.
        messages: Keeps the addresses of connected engines.
        connect: Connects the producer of a ticket. Returns when that is done. The thread calls it.
        disconnect: Disconnects an engine.
        poll: Callback after an attempt to connect: loads may wait for it.
        most: Number of producers of tickets that stay connected if no load needs more of them.

    Attributes:
        disconnecting: Old engines whose pairs of lists still exist, because bytes move over them.
    """

    def __init__(
        self,
        nixl: Transport,
        lock: SessionLock,
        messages: Messages,
        connect: Callable[[Connection], object],
        disconnect: Callable[[str], object],
        poll: Callable[[], None],
        most: int,
    ) -> None:
        self._nixl, self._lock, self._messages, self._most = nixl, lock, messages, most
        self._connect, self._disconnect, self._poll = connect, disconnect, poll
        self._attempts: dict[tuple[str, tuple[str, ...]], Connection] = {}  # that are under way
        self._connections: OrderedDict[str, Connection] = OrderedDict()
        self._connected: dict[str, RemoteEngine] = {}
        self._coming: dict[str, RemoteEngine] = {}  # by name
        self.disconnecting: list[RemoteEngine] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._connected)

    def known(self, remote: RemoteEngine) -> RemoteEngine | None:
        """Return the connected engine if *remote* has the same introductions, else None."""
        self.check_open()
        old = self._connected.get(remote.engine_id)
        if old is None or not remote.same(old):
            return None
        old.by_ticket &= remote.by_ticket
        return old

    def find(self, engine_id: str | None) -> RemoteEngine:
        """Return the connected producer. Without *engine_id*, it must be the only one."""
        self.check_open()
        names = sorted(self._connected)
        name = names[0] if engine_id is None and len(names) == 1 else engine_id
        if not isinstance(name, str) or name not in self._connected:
            wanted = f"one of the connected producers: {', '.join(names) or 'none yet'}"
            raise SpecError("engine_id", engine_id, wanted)
        return self._connected[name]

    def connection(self, ticket: PrefillTicket) -> Connection:
        """Return the connection to the producer of *ticket*. Begin a new one if necessary."""
        self.check_open()
        name, addresses = ticket.engine_id, ticket.addresses
        known = self._connections.get(name)
        if known is None or known.addresses != addresses or self._useless(known):
            known = self._attempt(name, addresses)
        self._connections[name] = known
        self._connections.move_to_end(name)
        return known

    def _attempt(self, name: str, addresses: tuple[str, ...]) -> Connection:
        """Return the attempt to connect a producer that is under way, or begin one.

        A producer that has moved may be named by old and new tickets in turn. Each set of addresses
        then has one thread.
        """
        self._attempts = {at: one for at, one in self._attempts.items() if not one.future.done()}
        if (known := self._attempts.get((name, addresses))) is not None:
            return known
        made = self._attempts[name, addresses] = Connection(name, addresses, Future())
        made.future.add_done_callback(lambda _: self._lock.inside or self._poll())
        # A thread for each producer: one that does not answer delays no other. It is a daemon, so
        # that a process can end while it waits. An executor would be awaited at the exit.
        thread = threading.Thread(
            target=self._open, args=(made,), name=f"kvspec-connect-{name}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # The system has no more threads for this process.
            why = f"{name} is not connected: {error}"
            made.future.set_exception(
                TransferError(why, rank=name, state=TransferState.UNAVAILABLE)
            )
        return made

    def _open(self, connection: Connection) -> None:
        """Connect a producer, and put the result into the future. Runs in a thread of its own."""
        try:
            self._connect(connection)
        except BaseException as error:  # noqa: BLE001 - each load that waits raises it
            connection.future.set_exception(error)
        else:
            connection.future.set_result(None)

    def _useless(self, connection: Connection) -> bool:
        """Whether the producer must be connected again for the next load.

        It may be missing although it was connected: a later connect forgets the engine before it
        opens the new pairs of lists, which may fail.
        """
        missing = connection.future.done() and self._missing(connection.engine_id)
        return missing or connection.must_reconnect or connection.failed

    def _missing(self, name: str) -> bool:
        remote = self._connected.get(name)
        return remote is None or remote.must_reconnect

    def newest(self, connection: Connection) -> Connection:
        """Return the attempt that decides whether the producer of *connection* is connected.

        That is a later one if the producer was lost since, and a load has begun to connect it.
        """
        name = connection.engine_id
        return self._connections.get(name, connection) if self._missing(name) else connection

    def check_wanted(self, connection: Connection) -> None:
        """Raise `TransferError` "cancelled" if the producer was disconnected since the attempt.

        Another ticket may name it at other addresses by now, so its name is not compared.
        """
        name = connection.engine_id
        if self._attempts.get((name, connection.addresses)) is not connection:
            raise _disconnected(name)

    def wants(self, name: str) -> bool:
        """Whether a ticket has named the producer *name*, and it was not disconnected since."""
        return name in self._connections

    @property
    def crowded(self) -> bool:
        """Whether `disconnect_unused` may find anything to do."""
        return len(self._connections) > self._most

    def disconnect_unused(self, used: Container[str]) -> None:
        """Disconnect producers of tickets that are too many, unless their names are in *used*.

        See the table in the module docstring. The least recently used are disconnected first.
        """
        tickets = [
            name
            for name in self._connections
            if (remote := self._connected.get(name)) is None or remote.by_ticket
        ]
        free = [name for name in tickets if name not in used and name not in self._coming]
        for name in free[: max(0, len(tickets) - self._most)]:
            self._disconnect(name)

    def connect(self, remote: RemoteEngine, timeout: float) -> None:
        """Prepare the lists for each rank that has a table, and connect *remote*. This is slow.

        The caller makes sure that only one engine of each name is connected at a time.

        If *remote* was disconnected meanwhile, or anything else fails, no pair of lists stays open.
        """
        metadata = {rank: remote.ranks[rank].handshake.transport for rank in remote.tables}
        try:
            names = self._nixl.connect_all(metadata.values(), timeout)
            agents = dict(zip(metadata, names, strict=True))
            remote.agents.update(names)
            for rank, table in remote.tables.items():
                remote.list_pairs[rank] = ListPair.open(self._nixl, table, agents[rank])
            with self._lock.held, self._lock:
                self._finish(remote)
        except Exception:
            with self._lock.held, self._lock:
                self._fail(remote)
            raise

    def _finish(self, remote: RemoteEngine) -> None:
        self.check_open()
        if self._coming.get(remote.engine_id) is not remote:
            raise _disconnected(remote.engine_id)
        self._connected[remote.engine_id] = remote
        del self._coming[remote.engine_id]
        self._messages.connect(remote.incarnation, remote.ranks.values())

    def _fail(self, remote: RemoteEngine) -> None:
        """Release the lists of *remote*."""
        if self._coming.get(remote.engine_id) is remote:
            del self._coming[remote.engine_id]
        self.disconnecting.append(remote)
        self.disconnect_idle()

    def replace(self, new: RemoteEngine) -> None:
        """Forget the engine of this name, because *new* is being connected in its place.

        Raises `TransferError` "busy", and forgets nothing, if *new* is an incarnation whose bytes
        still move.
        """
        old = self._connected.get(new.engine_id)
        self._check_idle(new, old)
        # The caller of `Session.connect` still wants the engine if a ticket connects it again.
        new.by_ticket &= old is None or old.by_ticket
        self._remove(new.engine_id)
        self._coming[new.engine_id] = new

    def disconnect(self, engine_id: str) -> None:
        """Disconnect an engine, and forget its addresses. No attempt to connect it goes on."""
        self._remove(engine_id)
        self._connections.pop(engine_id, None)
        self._attempts = {at: one for at, one in self._attempts.items() if at[0] != engine_id}

    def _remove(self, engine_id: str) -> None:
        self._coming.pop(engine_id, None)
        if (old := self._connected.get(engine_id)) is not None:
            self._messages.disconnect(old.incarnation)
            del self._connected[engine_id]
            self.disconnecting.append(old)
            self.disconnect_idle()

    def check_alone(self) -> None:
        """Raise `SpecError` if another open session connects engines over the transport.

        Neither would know the agents that the other uses.
        """
        owner = _CONNECTORS.get(self._nixl, lambda: None)()
        if owner is not None and owner is not self and not owner.closed:
            wanted = "a transport over which no other open session connects engines"
            raise SpecError("nixl", self._nixl, wanted)
        _CONNECTORS[self._nixl] = weakref.ref(self)

    def _check_idle(self, new: RemoteEngine, old: RemoteEngine | None) -> None:
        """Raise `TransferError` "busy" if bytes move over a connection that *new* replaces."""
        self.disconnect_idle()
        peers = {transfer.peer for transfer in self._nixl.transfers}
        before = (*self.disconnecting, *(() if old is None else (old,)))
        if any(each.incarnation == new.incarnation and each.agents & peers for each in before):
            message = f"bytes still move between this rank and {new.engine_id}: try again"
            raise TransferError(message, rank=new.engine_id, state=TransferState.BUSY)

    def check_open(self) -> None:
        """Raise `TransferError` "closed" if the session was closed."""
        if self._closed:
            raise TransferError("the session was closed", state=TransferState.CLOSED)

    @property
    def closed(self) -> bool:
        """Whether the session was closed."""
        return self._closed

    def close_interrupted(self) -> None:
        """Disconnect all peers, whatever an interrupt has left.

        A peer with which bytes move stays connected until the NIXL rank is closed.
        """
        self._closed = True
        for remote in (*self._connected.values(), *self._coming.values(), *self.disconnecting):
            for list_pair in remote.list_pairs.values():
                with contextlib.suppress(TransferError):  # The NIXL rank may be closed.
                    list_pair.release()
        for peer in self._nixl.peers:
            with contextlib.suppress(TransferError):
                self._nixl.disconnect(peer)
        for place in (self._connected, self._coming, self.disconnecting):
            place.clear()

    def close(self) -> None:
        """Disconnect all engines, and accept no others."""
        self._closed = True
        self._coming.clear()
        for engine_id in tuple(self._connected):
            self.disconnect(engine_id)

    def disconnect_idle(self) -> None:
        """Release the lists of old engines if no bytes move over them. See the module docstring."""
        waits = any(not coming.agents for coming in self._coming.values())
        for remote in tuple(self.disconnecting):
            if waits and not remote.must_reconnect:
                continue  # An engine that is being connected may use one of the agents.
            users = (*self._connected.values(), *self._coming.values())
            if remote.must_reconnect:
                _spread_loss(remote, users)
            used = set[str]().union(*(user.agents for user in users))
            with contextlib.suppress(TransferError):
                remote.disconnect(self._nixl, keep=used)
                self.disconnecting.remove(remote)
