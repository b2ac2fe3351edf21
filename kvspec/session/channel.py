"""Send and receive messages between sessions: the interface of a channel, and one over TCP.

Invariant: a message arrives whole or not at all. It may be lost, and then its sender sends it
again. No method but `resolve` and `wait` blocks, and all memory is bounded. A peer that stalls or
violates the format is disconnected. The channel does not read messages: a `Session` seals all that
it sends, and reports to the channel whose seals are right.

How it works:
    Anybody who reaches the port can connect. `TcpChannel` has three kinds of connections:

    =========  ==================================  ===========  ==================================
    kind       how a connection becomes one        at most      which one is closed for a new one
    =========  ==================================  ===========  ==================================
    stranger   it was accepted                     128          the oldest
    trusted    `trust`, after a message or answer  1,024        the one that was silent longest
               with a right seal
    dialled    `send` to an address                no limit     none
    =========  ==================================  ===========  ==================================

    The limits are lower if the process may open few descriptors. So strangers never take the
    descriptors that the process needs, and never take the place of a peer that knows the secret.

    A connection is closed at its first message with a wrong seal (`reject`). Until then it can cost
    little time: one poll returns few messages of each connection, and a bounded number in all. The
    connections take turns, so that each of them is read. With at most 2 messages of a connection
    and 4 in all:

        poll   arrived                     returned         left, in the order of turns
        1      a: 3 messages, b: 1, c: 3   a1, a2, b1, c1   a3, c2, c3
        2      b: 1                        a3, c2, c3, b2   nothing

    Connecting is slowed down too: after `ACCEPTS` connections the listener rests for `CHANNEL_REST`
    seconds. At 16 connections in 0.025 s, 128 strangers need 0.2 s. So a stranger has at least
    0.2 s to show that it knows the secret.

    A signal may interrupt any line, and then its handler raises. `_links` contains each connection
    from before it is registered until after it is closed. So no socket is lost, and an interrupted
    `_keep` or `_disconnect` leaves a connection that is not registered. `_disconnect_stalled` drops
    it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import resource
import selectors
import socket
import time
from collections import OrderedDict
from typing import Protocol

import attrs

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import instance
from kvspec.session.ports import Ports, port_range, public_host

MAX_FRAME = 8 << 20
"""Bytes of one message. An introduction is the longest."""
MAX_QUESTION = 64 << 10
"""Bytes of one message from a peer that dialled, since anybody can dial."""
MAX_UNSENT = 2 * MAX_FRAME
"""Bytes that wait for a peer that was dialled. A message that does not fit is lost."""
MAX_UNREAD = 1 << 20
"""Bytes that may wait for a peer that dialled. If more wait, it is disconnected."""
MAX_STRANGERS = 128
"""Accepted connections that have shown no right seal. At most 1/8 of the process's descriptors."""
MAX_ACCEPTED = 1024
"""Trusted connections: they have shown a right seal. At most half of the process's descriptors."""
ACCEPTS = 16
"""Connections that one poll accepts."""
FRAMES = 256
"""Messages of trusted and dialled peers that one poll returns. Strangers get a quarter."""
FRAMES_PER_PEER = 32
"""Messages of one trusted or dialled peer that one poll returns. A stranger gets an eighth."""
RESOLVED = 1 << 16
"""Addresses that `resolve` has looked up, or that `ended` knows. The oldest is forgotten."""
CHANNEL_REST = 0.025
"""Seconds for which the listener rests after `ACCEPTS` connections, or without descriptors."""
STALL = 10.0
"""Seconds in which a connection is established, and a message that has begun makes progress."""
EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 - hosts to listen on that are no address for peers
_READ_AT_ONCE = 256 << 10
_SIZE = 4  # bytes of a message's length


class Channel(Protocol):
    """The channel of a session. Implement it over the messages that your engine already has.

    A route is an address, or the channel's own name for the origin of a message. Each connection
    keeps one route. No other connection may get it, except a new one to the same address: a session
    sends its introduction only to the route that it has challenged. A channel may also have these
    methods:

    - `reaches(route) -> bool`: whether a connection is established, for addresses and for routes of
      received messages. If it returns False, the session does not wait for that peer, and the next
      message of a rank on another route takes the answers to it. Without it, each message does.
    - `refused() -> list[str]`: addresses where no process listens, as attempts to connect have
      shown since the last call. Loads that read from such a rank fail. Without it, they fail at
      their timeouts if all bytes have arrived before the process of the producer ends.
    - `ended(address) -> int`: how many established connections to an address have ended. Without
      it, an error cannot distinguish a process that closes each connection from a silent one.
    - `resolve(address)`: look up the host of an address. It may wait. The session calls it before
      it connects, and holds no lock meanwhile.
    - `trust(route)`: a message from *route* has shown that its sender knows the secret.
    - `reject(route)`: a message from *route* has a wrong seal or no meaning. Disconnect it.
    - `wake()`: let `wait` return at once, in any thread. Without it, a background thread of the
      session polls more often.
    """

    @property
    def address(self) -> str:
        """The address that others send to. It is part of the introduction."""

    def send(self, route: str, *messages: bytes) -> None:
        """Send *messages* to *route* without waiting. If the peer is gone, they are lost silently.

        The session passes all messages to one peer that a poll has caused in one call.
        """

    def receive(self) -> list[tuple[str, bytes]]:
        """Return (route of the answer, data) of messages that arrived, without waiting.

        Return a bounded number. `wait` returns at once if more have arrived.
        """

    def wait(self, timeout: float) -> None:
        """Wait until a message may have arrived, for at most *timeout* seconds."""

    def close(self) -> None:
        """Release everything. Later messages are lost."""


def check_channel(channel: object) -> None:
    """Raise `SpecError` unless *channel* is a `Channel` or None."""
    names = ("address", "send", "receive", "wait", "close")
    missing = [name for name in names if not hasattr(channel, name)]
    if channel is not None and missing:
        raise SpecError("channel", channel, f"a Channel with {', '.join(missing)}")


@attrs.define(eq=False)
class _Link:
    """One connection.

    Attributes:
        dialled: Whether this side has dialled the peer. Otherwise the peer may be anybody.
        moved: When bytes last came or went.
        taken: When the peer last accepted bytes, or when the first unsent byte began to wait.
        received: Bytes that arrived and were not returned yet.
        unsent: Bytes that the peer has not taken yet.
    """

    socket: socket.socket
    route: str
    dialled: bool
    moved: float
    taken: float
    connecting: bool = False
    received: bytearray = attrs.field(factory=bytearray)
    unsent: bytearray = attrs.field(factory=bytearray)

    @property
    def most(self) -> int:
        """Bytes of the longest message that the peer may send."""
        return MAX_FRAME if self.dialled else MAX_QUESTION

    @property
    def events(self) -> int:
        writes = selectors.EVENT_WRITE if self.unsent or self.connecting else 0
        return selectors.EVENT_READ | writes

    @property
    def size(self) -> int:
        """Bytes of the next message without its length. -1 until the length has arrived."""
        return int.from_bytes(self.received[:_SIZE], "big") if len(self.received) >= _SIZE else -1

    @property
    def whole(self) -> bool:
        """Whether the next message has arrived."""
        return 0 <= self.size <= min(self.most, len(self.received) - _SIZE)


class TcpChannel:
    """Messages over TCP connections. It listens on one address and connects to the others.

    It has no thread: it works inside its methods, which a `Session` calls one at a time. Only
    `wait` and `wake` may be called at any time. An answer uses the connection of its question.

    Args:
        host: Host to listen on.
        port: Port to listen on, or a range of ports, of which the first free one is used. A range
            is a pair of the first and the last port, a `range`, or a text such as "9000-9015". Give
            a range if several ranks of one machine share the setting. 0 selects any free port.
        public: Host name or IP address by which peers reach this machine, without a port. By
            default, *host*. Peers look a name up only when they connect.

    Attributes:
        address: Host and port by which others reach this channel.
        messages_lost: Number of messages that could not be sent. Those that wait for a peer when
            its connection ends count as one.

    Raises:
        SpecError: If an argument is wrong, or peers cannot reach the address of *host* and *public*
            is not given.
        TransferError: With state "unavailable" if the channel cannot listen there, for example
            because all ports are in use.

    >>> from contextlib import closing
    >>> with closing(TcpChannel("127.0.0.1")) as channel:
    ...     channel.address.startswith("127.0.0.1:")
    True
    """

    def __init__(self, host: str = "127.0.0.1", port: Ports = 0, *, public: str = "") -> None:
        ports, reached = port_range(port), public_host(public)
        if not reached and instance("host", host, str) in EVERYWHERE:
            raise SpecError("public", public, f"the host by which others reach {host!r}")
        self._listener = _listen(host, ports)
        self.address = f"{reached or host}:{self._listener.getsockname()[1]}"
        self._waker, self._woken = socket.socketpair()
        # A spare descriptor. `_refuse` closes it when the process has no other.
        self._reserve = socket.socket()
        # `_selector` watches all but the listener, and `_all` watches `_selector` and the listener.
        # While the listener rests, `wait` uses `_selector`. So the listener is always registered,
        # and no interrupt can leave it unregistered.
        self._selector, self._all = selectors.DefaultSelector(), selectors.DefaultSelector()
        for each in (self._listener, self._woken, self._waker):
            each.settimeout(0)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._all.register(self._listener, selectors.EVENT_READ)
        self._all.register(self._selector, selectors.EVENT_READ)
        self._links: dict[str, _Link] = {}  # all, by route
        self._strangers: dict[str, _Link] = {}  # the oldest first
        self._trusted = OrderedDict[str, _Link]()  # the one that was silent longest first
        # Those that may have a message, in the order of turns.
        self._turns = OrderedDict[str, _Link]()
        self._resolved: dict[str, tuple[int, tuple[object, ...]]] = {}
        self._numbers = itertools.count()
        self._refused = set[str]()
        self._ended: dict[str, int] = {}
        self._rests_until = 0.0  # when the listener's rest ends
        self._next_check = 0.0
        self._closed = False
        self.messages_lost = 0

    def __len__(self) -> int:
        """Return how many connections are open."""
        return len(self._links)

    def __repr__(self) -> str:
        lost = self.messages_lost
        return f"<TcpChannel {self.address}: {len(self)} connections, {lost} messages lost>"

    def resolve(self, address: str) -> None:
        """Look up the host of *address*, so that `send` can use its name. Waits.

        `send` itself looks up nothing, because a name server that does not answer would stop the
        whole session.
        """
        if (found := _look_up(address)) is not None:
            self._resolved[address] = found
            if len(self._resolved) > RESOLVED:
                self._resolved.pop(next(iter(self._resolved)), None)

    def send(self, route: str, *messages: bytes) -> None:
        """Send *messages* to an address, or back on the route of a received message.

        An address with a host name must have been passed to `resolve`. A peer that connected to
        this channel is disconnected if it leaves more than `MAX_UNREAD` bytes unread.
        """
        if (longest := max(map(len, messages))) > MAX_FRAME:
            raise SpecError("messages", f"{longest} bytes", f"at most {MAX_FRAME} bytes each")
        link = None if self._closed else self._links.get(route) or self._dial(route)
        if link is not None and not link.dialled and len(link.unsent) > MAX_UNREAD:
            # Anybody can dial, and can make this side answer: nothing piles up for such a peer.
            # Only the bytes that wait already are counted, so that any single message fits.
            self._disconnect(link)
            link = None
        if link is None:
            self.messages_lost += len(messages)
            return
        if not link.unsent:
            link.taken = time.monotonic()
        for data in messages:
            if len(link.unsent) + len(data) > MAX_UNSENT:
                self.messages_lost += 1
            else:
                link.unsent += len(data).to_bytes(_SIZE, "big") + data
        if not link.connecting:
            self._flush(link)

    def reaches(self, route: str) -> bool:
        """Whether a connection to *route* is established."""
        link = self._links.get(route)
        return link is not None and not link.connecting

    def refused(self) -> list[str]:
        """Return the addresses that have refused a connection since the last call.

        A process that is busy or stopped refuses none: its kernel accepts connections.
        """
        refused, self._refused = [*self._refused], set[str]()
        return refused

    def ended(self, address: str) -> int:
        """Return how many established connections to *address* have ended, on either side."""
        return self._ended.get(address, 0)

    def trust(self, route: str) -> None:
        """Keep the connection of *route* when strangers connect: it has shown a right seal."""
        if (link := self._strangers.get(route)) is not None:
            self._trusted[route] = link
            del self._strangers[route]
            if len(self._trusted) > _share(MAX_ACCEPTED, 2):
                self._disconnect(next(iter(self._trusted.values())))

    def reject(self, route: str) -> None:
        """Close the connection of *route*. The next message to an address dials it again."""
        if (link := self._links.get(route)) is not None:
            self._disconnect(link)

    def receive(self) -> list[tuple[str, bytes]]:
        """Return (route, data) of messages that arrived, and send waiting ones.

        Peers that stall are disconnected. The work of one call is bounded.
        """
        if self._closed:
            return []
        ready = [key.fileobj for key, _ in self._all.select(0)]
        for key, events in self._selector.select(0) if self._selector in ready else ():
            link: _Link | None = key.data
            if link is None:
                self._woken.recv(_READ_AT_ONCE)
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(link)
            # `_flush` may have closed the connection, and a new one may have its route.
            if events & selectors.EVENT_READ and self._links.get(link.route) is link:
                self._turns.setdefault(link.route, link)
        if self._listener in ready and time.monotonic() >= self._rests_until:
            self._accept()
        messages = self._take_turns()
        # Last: after a long time without a call, the bytes that arrived meanwhile are progress.
        self._disconnect_stalled(time.monotonic())
        return messages

    def wait(self, timeout: float) -> None:
        """Wait until data arrives or can be sent, or `wake`, for at most *timeout* seconds."""
        try:
            if not self._closed and not self._turns:
                # The end of a rest, and peers that stall, cause no event.
                rests = time.monotonic() < self._rests_until
                selector = self._selector if rests else self._all
                selector.select(min(timeout, CHANNEL_REST if rests else STALL / 8))
        except (OSError, ValueError):  # `close` does not wait for threads that wait here
            if not self._closed:
                raise

    def wake(self) -> None:
        """Let `wait` return at once. The next `receive` takes the signal back."""
        with contextlib.suppress(OSError):  # full, so that `wait` returns already, or closed
            self._waker.send(b"\0")

    def close(self) -> None:
        """Close all connections. If this is interrupted, the next call closes the rest."""
        self._closed = True
        for link in tuple(self._links.values()):
            self._disconnect(link)
        sockets = self._listener, self._waker, self._woken, self._reserve
        for each in (self._all, self._selector, *sockets):
            each.close()

    def _dial(self, route: str) -> _Link | None:
        """Begin to connect to an address. Return None if it is not one, or not reachable."""
        with contextlib.suppress(OSError):  # the process may have no free descriptor
            if found := self._resolved.get(route) or _look_up(route, socket.AI_NUMERICHOST):
                made = socket.socket(found[0], socket.SOCK_STREAM)
                made.settimeout(0)
                error = made.connect_ex(found[1])
                if error in (0, errno.EINPROGRESS):  # a later error makes the socket writable
                    return self._keep(made, route, dialled=True)
                made.close()
                if error == errno.ECONNREFUSED:
                    self._refused.add(route)
        return None

    def _accept(self) -> None:
        """Accept some connections, then let the listener rest. See the module docstring."""
        for _ in range(ACCEPTS):
            try:
                made, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return  # the queue is empty
                self._refuse()
                break
            made.settimeout(0)
            route = f"#{next(self._numbers)}"
            self._keep(made, route, dialled=False)
            if len(self._strangers) > _share(MAX_STRANGERS, 8):
                self._disconnect(next(iter(self._strangers.values())))
        self._rests_until = time.monotonic() + CHANNEL_REST

    def _refuse(self) -> None:
        """Close one connection that waits, though the process has no free descriptor.

        A connection that is never accepted keeps the listener readable. Then every `wait` returns
        at once, and the session spins. The reserve is given up for a moment to accept it.
        """
        if self._strangers:
            # The process needs the descriptor.
            self._disconnect(next(iter(self._strangers.values())))
        self._reserve.close()
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        with contextlib.suppress(OSError):  # another thread took it: the next call tries again
            self._reserve = socket.socket()

    def _keep(self, made: socket.socket, route: str, *, dialled: bool) -> _Link:
        """Keep a connection. A connection that this side did not dial is a stranger."""
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        now = time.monotonic()
        link = _Link(made, route, dialled, now, now, connecting=dialled)
        self._links[route] = link
        if not dialled:
            self._strangers[route] = link
        # Last: an interrupt before leaves a connection that `_disconnect_stalled` can recognize.
        self._selector.register(made, link.events, link)
        return link

    def _disconnect(self, link: _Link) -> None:
        """Close a connection. An interrupted call can be repeated."""
        if self._links.get(link.route) is link:
            # Unregister before closing: a new socket may get the number of a closed one.
            with contextlib.suppress(KeyError, ValueError):  # an interrupted call did it already
                self._selector.unregister(link.socket)
            link.socket.close()
            if link.dialled and not link.connecting:
                self._ended[link.route] = self._ended.pop(link.route, 0) + 1
                if len(self._ended) > RESOLVED:
                    del self._ended[next(iter(self._ended))]
            for links in (self._strangers, self._trusted, self._turns):
                links.pop(link.route, None)
            self.messages_lost += bool(link.unsent)
            del self._links[link.route]

    def _disconnect_stalled(self, now: float) -> None:
        """Drop peers that stall, and connections that an interrupt has left unregistered."""
        if now < self._next_check:
            return
        self._next_check = now + STALL / 8
        registered = {key.fileobj for key in self._selector.get_map().values()}
        for link in tuple(self._links.values()):
            if link.socket not in registered or self._stalls(link, now):
                self._disconnect(link)

    def _stalls(self, link: _Link, now: float) -> bool:
        """Whether a peer has stopped in the middle of connecting, of its message or of ours."""
        # A peer that waits for its turn does not stall.
        begun = link.connecting or (link.received and link.route not in self._turns)
        if begun and now - link.moved > STALL:
            return True
        # A peer that writes but does not read stalls: its own bytes are not progress here.
        return bool(link.unsent) and now - link.taken > STALL

    def _flush(self, link: _Link) -> None:
        """Send what can be sent now."""
        if link.connecting:
            error = link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error == errno.ECONNREFUSED:
                self._refused.add(link.route)
            if error:
                self._disconnect(link)
                return
        link.connecting = False
        try:
            with contextlib.suppress(BlockingIOError):
                if link.unsent:
                    del link.unsent[: link.socket.send(link.unsent)]
                    link.moved = link.taken = time.monotonic()
            self._selector.modify(link.socket, link.events, link)
        except (OSError, KeyError):  # KeyError: an interrupt has left it unregistered
            self._disconnect(link)
        except BaseException:
            # The socket may have taken bytes that are still in `unsent`. The peer would receive
            # them twice, and take them for the length of a message.
            self._disconnect(link)
            raise

    def _take_turns(self) -> list[tuple[str, bytes]]:
        """Return messages of the peers whose turn it is. The others keep their places."""
        messages: list[tuple[str, bytes]] = []
        allowed = {False: FRAMES, True: FRAMES // 4}  # by whether it is a stranger
        for route, link in tuple(self._turns.items()):
            strange = route in self._strangers
            if not allowed[strange]:
                continue
            self._read(link)
            most = min(allowed[strange], FRAMES_PER_PEER // 8 if strange else FRAMES_PER_PEER)
            taken = 0
            while link.whole and taken < most:
                stop, taken = _SIZE + link.size, taken + 1
                messages.append((route, bytes(link.received[_SIZE:stop])))
                del link.received[:stop]
            allowed[strange] -= taken
            if link.size > link.most:
                self._disconnect(link)
            elif link.whole:
                self._turns.move_to_end(route)
            else:
                self._turns.pop(route, None)
        return messages

    def _read(self, link: _Link) -> None:
        """Read some bytes, unless a whole message waits already.

        A connection is not read while one of its messages waits. So a peer that sends faster than
        this side reads uses its own buffers, not the memory of this process.
        """
        if link.whole:
            return
        try:
            chunk = link.socket.recv(_READ_AT_ONCE if link.dialled else _READ_AT_ONCE // 16)
            link.received += chunk
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        except BaseException:
            # Bytes may be lost, and then the next ones would be taken for the length of a message.
            self._disconnect(link)
            raise
        if not chunk:
            self._disconnect(link)
        if link.route in self._trusted:
            self._trusted.move_to_end(link.route)
        link.moved = time.monotonic()


def _listen(host: str, ports: range) -> socket.socket:
    """Listen on the first of *ports* that is free.

    Raises:
        TransferError: With state "unavailable" if none is free, or the host cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    where = f"{host}:{ports[0]}" if len(ports) == 1 else f"{host}, ports {ports[0]} to {ports[-1]}"
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=128)
        except (OSError, UnicodeError) as error:
            fault, in_use = error, getattr(error, "errno", None) == errno.EADDRINUSE
        if not in_use:
            break  # Another port would have the same fault.
    why = "all these ports are in use" if in_use and len(ports) > 1 else fault
    message = f"cannot listen on {where}: {why}; give another host or port"
    raise TransferError(message, rank=host, state=TransferState.UNAVAILABLE) from fault


def _share(most: int, part: int) -> int:
    """Return the smaller of *most* and the process's limit of descriptors divided by *part*.

    It is read each time, because a process can change its limit.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // part))


def _look_up(address: str, flags: int = 0) -> tuple[int, tuple[object, ...]] | None:
    """Return family and socket address of a host and port. None for an unknown host."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return None
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError, OverflowError):
        return None
    return found[0][0], found[0][4]
