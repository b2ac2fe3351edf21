"""How messages travel: bytes out, bytes in. A small TCP channel, and the face of an engine's own.

Law: a message arrives whole or not at all; it may be lost, which who sends it must expect. Nothing
here waits, blocks, or grows without bound, and whoever stalls or says nonsense is cut off. What a
message says is not looked at: a `Session` seals all that it sends.
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
    """What a `Session` sends by: implement it over what an engine has already.

    *address*: what others send to; it travels in the introduction. A route is an address, or the
    channel's own word for where a message came from. Each connection keeps one route, and no other
    connection gets it: an introduction is sent only to the route that was challenged. A channel
    that can tell whether somebody is at a route may have `reaches(route) -> bool`, so that who is
    not there is not waited for.
    """

    @property
    def address(self) -> str:
        """Where others reach this channel."""

    def send(self, route: str, data: bytes) -> None:
        """Send *data*; never wait, never raise because a peer is gone: then it is lost."""

    def receive(self) -> list[tuple[str, bytes]]:
        """Return (route to answer by, data) of all that came; never wait."""

    def wait(self, timeout: float) -> None:
        """Wait until something may have come, at most *timeout* seconds."""

    def close(self) -> None:
        """Let go of everything; what comes afterwards is lost."""


def check_channel(channel: object) -> None:
    """Raise `SpecError` for what is no `Channel`, nor None."""
    names = ("address", "send", "receive", "wait", "close")
    missing = [name for name in names if not hasattr(channel, name)]
    if channel is not None and missing:
        raise SpecError("channel", channel, f"a Channel, which has {', '.join(missing)}")


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
    """Messages over TCP: listens on *host* and *port* (0: any), dials whom it sends to.

    *public*: the host by which others reach this one, *host* unless given; it has to be where that
    is everywhere. IP addresses are best: a name is looked up at every dial. Answers go back over
    the connection on which the question came. No thread: it works inside its methods, one at a
    time; a `Session` sees to that.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, public: str = "") -> None:
        positive_int("port", port, least=0, most=65535)
        instance("public", public, str)
        if not public and instance("host", host, str) in EVERYWHERE:
            raise SpecError("public", public, f"where others reach what listens on {host!r}")
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
        """Where others reach this channel, as host:port."""
        return self._address

    def send(self, route: str, data: bytes) -> None:
        """Send *data* to an address, or back to where a message came from.

        Cuts off a peer that dialled if it leaves more than `MAX_UNREAD` bytes unread.
        """
        if len(data) > MAX_MESSAGE:
            raise SpecError("data", f"{len(data)} bytes", f"at most {MAX_MESSAGE}")
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
        """Whether a connection stands."""
        link = self._links.get(route)
        return link is not None and not link.connecting

    def receive(self) -> list[tuple[str, bytes]]:
        """Return (route, data) of what came; send what could not be sent; cut off who stalls."""
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
        """Wait until something came or can be sent, at most *timeout* seconds."""
        try:
            if not self._closed:
                self._selector.select(timeout)
        except (OSError, ValueError):  # whoever waits may be one whom `close` does not wait for
            if not self._closed:
                raise

    def close(self) -> None:
        """Close every connection."""
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
