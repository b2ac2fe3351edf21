"""Send and receive messages between sessions: the interface of a channel, and one over TCP.

Invariant: a message arrives whole or not at all. It may be lost, and then its sender sends it
again. No method blocks, and all memory is bounded. A peer that stalls or violates the format is
disconnected. The channel does not read messages: a `Session` seals all that it sends.
"""

from __future__ import annotations

import itertools
import selectors
import socket
import time
from typing import Protocol

import attrs

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import instance, positive_int

MAX_MESSAGE = 8 << 20  # bytes of one message: an introduction is the longest
MAX_QUESTION = 64 << 10  # of one that comes from who dialled: anybody can
MAX_UNSENT = 2 * MAX_MESSAGE  # that wait for a peer that was dialled; what does not fit is lost
MAX_UNREAD = 1 << 20  # that may wait for a peer that dialled before it is sent to again
MAX_ACCEPTED = 1024  # connections of others; the one that was silent longest makes room
STALL = 10.0  # seconds in which a connection stands, and a message that has begun goes on
EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 - hosts to listen on, and none to be reached by
_CHUNK = 256 << 10
_SIZE = 4  # bytes that tell a message's length


class Channel(Protocol):
    """The channel of a session. Implement it over the messages that your engine already has.

    A route is an address, or the channel's own name for the origin of a message. Each connection
    keeps one route, and no other connection may get it: a session sends its introduction only to
    the route that it has challenged. A channel may also have a method `reaches(route) -> bool`. If
    it returns False, the session does not wait for that peer.
    """

    @property
    def address(self) -> str:
        """The address that others send to. It is part of the introduction."""

    def send(self, route: str, data: bytes) -> None:
        """Send *data* to *route* without waiting. If the peer is gone, lose it without an error."""

    def receive(self) -> list[tuple[str, bytes]]:
        """Return (route of the answer, data) of all messages that arrived, without waiting."""

    def wait(self, timeout: float) -> None:
        """Wait until a message may have arrived, for at most *timeout* seconds."""

    def close(self) -> None:
        """Release everything. Later messages are lost."""


def check_channel(channel: object) -> None:
    """Raise `SpecError` for what is no `Channel`, nor None."""
    names = ("address", "send", "receive", "wait", "close")
    missing = [name for name in names if not hasattr(channel, name)]
    if channel is not None and missing:
        raise SpecError("channel", channel, f"a Channel with {', '.join(missing)}")


@attrs.define(eq=False)
class _Link:
    """One connection: what came so far, and what is still to be sent.

    *moved*: when bytes last came or went. *taken*: when the peer last took bytes, or when the first
    byte began to wait for it.
    """

    socket: socket.socket
    route: str
    most: int
    moved: float
    taken: float
    connecting: bool = False
    came: bytearray = attrs.field(factory=bytearray)
    unsent: bytearray = attrs.field(factory=bytearray)

    @property
    def events(self) -> int:
        writes = selectors.EVENT_WRITE if self.unsent or self.connecting else 0
        return selectors.EVENT_READ | writes


class TcpChannel:
    """Messages over TCP connections. It listens on one address and connects to the others.

    It has no thread: it works inside its methods, which a `Session` calls one at a time. An answer
    uses the connection of its question.

    Args:
        host: Host to listen on.
        port: Port to listen on. 0 selects a free one.
        public: Host by which others reach this channel. By default, *host*. An IP address is best:
            a name is resolved for each new connection.

    Raises:
        SpecError: If others cannot reach the address of *host*, and *public* is not given.
        TransferError: With state "unavailable" if the channel cannot listen there.

    >>> from contextlib import closing
    >>> with closing(TcpChannel("127.0.0.1")) as channel:
    ...     channel.address.startswith("127.0.0.1:")
    True
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, public: str = "") -> None:
        positive_int("port", port, least=0, most=65535)
        instance("public", public, str)
        if not public and instance("host", host, str) in EVERYWHERE:
            raise SpecError("public", public, f"the host by which others reach {host!r}")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except (OSError, UnicodeError) as error:
            message = f"cannot listen on {host}:{port}: {error}; give another host or port"
            raise TransferError(message, rank=host, state=TransferState.UNAVAILABLE) from error
        self._listener.settimeout(0)
        self._address = f"{public or host}:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._links: dict[str, _Link] = {}  # by route
        self._numbers = itertools.count()
        self._closed = False
        self.lost = 0

    def __len__(self) -> int:
        """Return how many connections are open."""
        return len(self._links)

    def __repr__(self) -> str:
        return f"<TcpChannel {self._address}: {len(self)} connections, {self.lost} messages lost>"

    @property
    def address(self) -> str:
        """Host and port by which others reach this channel."""
        return self._address

    def send(self, route: str, data: bytes) -> None:
        """Send *data* to an address, or back on the route of a received message.

        A peer that connected to this channel is disconnected if it leaves more than `MAX_UNREAD`
        bytes unread.
        """
        if len(data) > MAX_MESSAGE:
            raise SpecError("data", f"{len(data)} bytes", f"at most {MAX_MESSAGE} bytes")
        link = None if self._closed else self._links.get(route) or self._dial(route)
        if link is not None and link.most == MAX_QUESTION and len(link.unsent) > MAX_UNREAD:
            # Anybody can dial, and can make this side answer: nothing piles up for such a peer.
            # Only the bytes that wait already are counted, so that any single message fits.
            self._drop(link)
            link = None
        if link is None or len(link.unsent) + len(data) > MAX_UNSENT:
            self.lost += 1
            return
        if not link.unsent:
            link.taken = time.monotonic()
        link.unsent += len(data).to_bytes(_SIZE, "big") + data
        if not link.connecting:
            self._flush(link)

    def reaches(self, route: str) -> bool:
        """Whether a connection to *route* is established."""
        link = self._links.get(route)
        return link is not None and not link.connecting

    def receive(self) -> list[tuple[str, bytes]]:
        """Return (route, data) of all messages that arrived, and send waiting ones.

        Peers that stall are disconnected.
        """
        came: list[tuple[str, bytes]] = []
        if self._closed:
            return came
        for key, events in self._selector.select(0):
            if key.data is None:
                self._accept()
                continue
            link: _Link = key.data
            if events & selectors.EVENT_WRITE:
                self._flush(link)
            if events & selectors.EVENT_READ and link.route in self._links:
                came += ((link.route, data) for data in self._read(link))
        now = time.monotonic()
        for link in tuple(self._links.values()):
            # A peer that writes but does not read stalls too: what it writes is no progress here.
            stalls = (link.connecting or link.came) and now - link.moved > STALL
            if stalls or (link.unsent and now - link.taken > STALL):
                self._drop(link)
        return came

    def wait(self, timeout: float) -> None:
        """Wait until data arrives or can be sent, for at most *timeout* seconds."""
        try:
            if not self._closed:
                self._selector.select(timeout)
        except (OSError, ValueError):  # whoever waits may be one whom `close` does not wait for
            if not self._closed:
                raise

    def close(self) -> None:
        """Close all connections."""
        if not self._closed:
            self._closed = True
            for link in tuple(self._links.values()):
                self._drop(link)
            self._listener.close()
            self._selector.close()

    def _dial(self, route: str) -> _Link | None:
        """Begin to connect to an address; None where it is none, or nobody is there."""
        host, _, port = route.rpartition(":")
        if not host or not port.isdecimal():
            return None
        try:
            family, kind, _, _, where = socket.getaddrinfo(
                host, int(port), type=socket.SOCK_STREAM
            )[0]
            made = socket.socket(family, kind)
        except (OSError, UnicodeError, OverflowError):
            return None
        made.settimeout(0)
        now = time.monotonic()
        link = _Link(made, route, MAX_MESSAGE, now, now, connecting=True)
        made.connect_ex(where)  # whatever comes of it shows when it can be written
        self._keep(link)
        return link

    def _accept(self) -> None:
        try:
            made, _ = self._listener.accept()
        except OSError:
            return
        made.settimeout(0)
        accepted = [link for link in self._links.values() if link.most == MAX_QUESTION]
        if len(accepted) >= MAX_ACCEPTED:
            self._drop(min(accepted, key=lambda link: link.moved))
        now = time.monotonic()
        self._keep(_Link(made, f"#{next(self._numbers)}", MAX_QUESTION, now, now))

    def _keep(self, link: _Link) -> None:
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links[link.route] = link
        self._selector.register(link.socket, link.events, link)

    def _drop(self, link: _Link) -> None:
        if self._links.pop(link.route, None) is not None:
            self.lost += bool(link.unsent)
            self._selector.unregister(link.socket)
            link.socket.close()

    def _flush(self, link: _Link) -> None:
        """Send what can be sent now."""
        if link.connecting and link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._drop(link)
            return
        link.connecting = False
        try:
            if link.unsent:
                del link.unsent[: link.socket.send(link.unsent)]
                link.moved = link.taken = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:
            self._drop(link)
            return
        self._selector.modify(link.socket, link.events, link)

    def _read(self, link: _Link) -> list[bytes]:
        """Return the messages that are whole now."""
        try:
            chunk = link.socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        if not chunk:
            self._drop(link)
            return []
        link.came += chunk
        link.moved = time.monotonic()
        whole = []
        while len(link.came) >= _SIZE:
            size = int.from_bytes(link.came[:_SIZE], "big")
            if size > link.most:
                self._drop(link)
                break
            if len(link.came) < _SIZE + size:
                break
            whole.append(bytes(link.came[_SIZE : _SIZE + size]))
            del link.came[: _SIZE + size]
        return whole
