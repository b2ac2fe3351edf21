"""Serve prefill tickets by room, over HTTP, for SGLang and for any other engine.

SGLang has no parameters that travel with a request from a prefill engine to a decode engine. Its
router gives both engines a *room*: a number. So the prefill engine stores its `PrefillTicket` under
the room, at the bootstrap server, and the decode engine fetches it there.

Invariant: a server stores only tickets and failures that are sealed with its secret. An entry is
deleted after `keep` seconds. It keeps a bounded number of connections, and of each of them at most
`SMALL` bytes, unless the peer has proved that it has the secret.

How it works:
    The interface is two methods on one path:

        PUT /kvspec/tickets/ROOM           store the parameters of a ticket, or of a failure
        GET /kvspec/tickets/ROOM[,ROOM]    an object with the rooms that have an entry

    The body of PUT is `PrefillTicket.to_params()`, or `failure(room, why)` if the prompt will not
    be computed. A later PUT replaces the entry. So a router uses a new room for each attempt. It
    can call both methods, so that one side is an engine of another maker. If the body is larger
    than `SMALL`, the header `PROOF` must be `proof_of` its room and size.

    >>> secret = "a secret of all engines"
    >>> server = TicketServer("127.0.0.1", 0, secret=secret)
    >>> put(server.address, 7, failure(7, "aborted", secret), secret)
    >>> list(get(server.address, [7, 8]))
    [7]
    >>> server.close()
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

from kvspec.errors import KVSpecError, SpecError
from kvspec.inputs import mapping
from kvspec.tickets import PrefillTicket
from kvspec.wire.seal import secret_of

log = logging.getLogger(__name__)

PATH = "/kvspec/tickets/"
PURPOSE = b"kvspec-room-1\n"
SIZE_PURPOSE = b"kvspec-room-size-1\n"
PROOF = "Kvspec-Proof"

# The largest body of a PUT, and the largest one without a proof. A ticket of a million tokens in
# pages of one token has 7 MiB.
LARGEST, SMALL = 64 << 20, 1 << 20
# The most connections at once, and the most from one address. Each rank of a decode engine has one
# for each server, and each ticket that is stored has one for a moment.
MOST_CONNECTIONS, MOST_OF_ONE = 1024, 256
# Seconds until a body must be complete.
PATIENCE = 30.0
# The most rooms in one GET.
MOST_ROOMS = 256
# Seconds to wait for an answer of the server.
ANSWER = 5.0
# Seconds between two looks for the tickets of waiting requests.
REST = 0.01
# Seconds after which a server that cannot be reached is taken for dead.
ABSENT = 15.0

Params = dict[str, Any]


def failure(room: int, why: str, secret: str | bytes | None = None) -> Params:
    """Return the parameters that state that the prompt of *room* will not be computed.

    If *why* is empty, the server deletes the entry instead: the prompt was read.
    """
    seal = secret_of(secret).mac(PURPOSE, json.dumps([room, why]).encode()).hex()
    return {"remote_failure": why, "remote_seal": seal}


def proof_of(room: int, size: int, secret: str | bytes | None = None) -> str:
    """Return the header `PROOF` for a body of *size* bytes."""
    return secret_of(secret).mac(SIZE_PURPOSE, _proved(room, size)).hex()


def _proved(room: int, size: int) -> bytes:
    """Return the bytes that a proof covers."""
    return b"%d %d" % (room, size)


def failed(room: int, params: Mapping[str, Any], secret: str | bytes | None = None) -> str | None:
    """Return the reason in *params* if they are those of a sealed failure, or None.

    Raises:
        SpecError: If the seal is wrong.
    """
    why = params.get("remote_failure")
    if not isinstance(why, str):
        return None
    seal = params.get("remote_seal")
    if not secret_of(secret).proves(seal, PURPOSE, json.dumps([room, why]).encode()):
        raise SpecError("remote_seal", seal, "the seal of unchanged parameters")
    return why


class TicketServer:
    """Keep tickets by room, in a thread.

    Args:
        host: The address to listen on.
        port: The port, or 0 for any free one.
        keep: Seconds after which an entry is deleted.
        secret: As in `PrefillTicket.from_params`.

    Attributes:
        address: The host and the port, as `put` and `get` take them.
    """

    def __init__(
        self, host: str, port: int, *, keep: float = 600.0, secret: str | bytes | None = None
    ) -> None:
        secret_of(secret)  # Raises if there is none.
        self._secret, self._keep = secret, keep
        self._entries: dict[int, tuple[float, bytes]] = {}
        self._lock = threading.Lock()
        owner = self

        class Handler(_Handler):
            tickets = owner

        self._http = _Bounded((host, port), Handler)
        self.address = f"{host}:{self._http.server_port}"
        name = "kvspec-tickets"
        self._thread = threading.Thread(target=self._http.serve_forever, name=name, daemon=True)
        self._thread.start()

    def store(self, room: int, body: bytes) -> None:
        """Store the parameters in *body*. Raise `SpecError` unless they are sealed."""
        try:
            params = mapping("body", json.loads(body), "parameter names to values")
        except (ValueError, RecursionError) as error:  # `SpecError` is a ValueError.
            raise SpecError("body", f"{len(body)} bytes", "parameters as JSON") from error
        why = failed(room, params, self._secret)
        if why is None:
            PrefillTicket.from_params(params, self._secret)
        now = time.monotonic()
        old = now - self._keep
        with self._lock:
            self._entries.pop(room, None)
            # The entries are in the order of their times, because each is inserted last.
            while self._entries and self._entries[first := next(iter(self._entries))][0] < old:
                del self._entries[first]
            if why != "":
                self._entries[room] = now, body

    def allows(self, room: int, size: int, proof: str) -> bool:
        """Return whether to read a body of *size* bytes."""
        secret, body = secret_of(self._secret), _proved(room, size)
        return size <= SMALL or secret.proves(proof, SIZE_PURPOSE, body)

    def found(self, rooms: Iterable[int]) -> bytes:
        """Return the entries of *rooms* that exist, as JSON."""
        with self._lock:
            known = [(room, self._entries[room][1]) for room in rooms if room in self._entries]
        return b"{" + b", ".join(b'"%d": %b' % entry for entry in known) + b"}"

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()


class _Bounded(ThreadingHTTPServer):
    """A server that closes connections above its bounds. Each connection has a thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401
        self._lock, self._hosts = threading.Lock(), dict[Any, str]()
        super().__init__(*arguments)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ANN401
        """Return whether a new connection is served. The others are closed."""
        host = client_address[0]
        with self._lock:
            same = sum(other == host for other in self._hosts.values())
            if same >= MOST_OF_ONE or len(self._hosts) >= MOST_CONNECTIONS:
                return False
            self._hosts[request] = host
        return True

    def close_request(self, request: Any) -> None:  # noqa: ANN401
        """Close a connection, served or not."""
        with self._lock:
            self._hosts.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002
        """Log nothing on the standard error: a stranger can break a connection at any time."""
        log.debug("a connection of %s has failed", client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answer one connection."""

    protocol_version = "HTTP/1.1"  # Connections stay open between requests.
    tickets: TicketServer
    timeout = 60.0

    def do_GET(self) -> None:
        rooms = self._rooms()
        if rooms is None:
            self._answer(404, b"{}")
        else:
            self._answer(200, self.tickets.found(rooms))

    def do_PUT(self) -> None:
        rooms, length = self._rooms(), self.headers.get("Content-Length", "")
        # Python would take long to convert a number of many digits.
        known = length.isdecimal() and len(length) < 10 and int(length) <= LARGEST  # noqa: PLR2004
        if rooms is None or len(rooms) != 1 or not known:
            self._refuse(400)
        elif not self.tickets.allows(rooms[0], int(length), self.headers.get(PROOF, "")):
            self._refuse(401)
        else:
            body = self._body(int(length))
            try:
                self.tickets.store(rooms[0], body)
            except KVSpecError as error:
                self._answer(403, json.dumps({"error": str(error)[:1000]}).encode())
            else:
                self._answer(200, b"{}")

    def _refuse(self, status: int) -> None:
        """Answer without reading the body. The connection cannot go on then."""
        self.close_connection = True
        self._answer(status, b"{}")

    def _body(self, size: int) -> bytes:
        """Return the body. Raise `TimeoutError`, which ends the connection, if it is too slow."""
        deadline, body = time.monotonic() + PATIENCE, bytearray()
        while len(body) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.connection.settimeout(left)
            part = self.rfile.read1(size - len(body))
            if not part:
                raise TimeoutError
            body += part
        self.connection.settimeout(self.timeout)
        return bytes(body)

    def _rooms(self) -> list[int] | None:
        """Return the rooms in the path, or None if there are none."""
        numbers = self.path.removeprefix(PATH).split(",")
        valid = self.path.startswith(PATH) and len(numbers) <= MOST_ROOMS
        # A room has 64 bits.
        if not valid or not all(n.isascii() and n.isdecimal() and len(n) <= 20 for n in numbers):  # noqa: PLR2004
            return None
        return [int(number) for number in numbers]

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: a decode engine asks a hundred times in a second."""


def put(address: str, room: int, params: Params, secret: str | bytes | None = None) -> None:
    """Store *params* under *room*. Waits.

    Args:
        address: The `address` of the server.
        room: The room.
        params: `PrefillTicket.to_params()`, or a `failure`.
        secret: As in `PrefillTicket.to_params`.

    Raises:
        SpecError: If the server refuses them.
        OSError: If it cannot be reached.
    """
    connection = http.client.HTTPConnection(address, timeout=ANSWER)
    try:
        body = json.dumps(params).encode()
        headers = {PROOF: proof_of(room, len(body), secret)}
        _ask(connection, "PUT", f"{PATH}{room}", body, headers)
    finally:
        connection.close()


def get(address: str, rooms: Iterable[int]) -> dict[int, Params]:
    """Return the parameters of those *rooms* that have an entry. Waits.

    Raises:
        SpecError: If the server refuses the request.
        OSError: If it cannot be reached.
    """
    connection = http.client.HTTPConnection(address, timeout=ANSWER)
    try:
        return _get(connection, rooms)
    finally:
        connection.close()


def _get(connection: http.client.HTTPConnection, rooms: Iterable[int]) -> dict[int, Params]:
    answer = _ask(connection, "GET", PATH + ",".join(map(str, rooms)))
    return {int(room): params for room, params in answer.items()}


def _ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the answer to one request."""
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        content = response.read()
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    if response.status != http.client.OK:
        raise SpecError("ticket", f"{response.status} {content[:1000]!r}", "an answer of 200")
    answer: dict[str, Any] = json.loads(content)
    return answer


@attrs.define(eq=False)
class Lookup:
    """A request that waits for its ticket.

    Attributes:
        room: The room of the request.
        deadline: When the look-up fails.
        ticket: The ticket, when it was found.
        error: The reason why no ticket will come.
        given_up: Whether the request has ended, so that its ticket is declined.
    """

    room: int
    deadline: float
    ticket: PrefillTicket | None = None
    error: Exception | None = None
    given_up: bool = False

    @property
    def ended(self) -> bool:
        """Whether there is a ticket or an error."""
        return self.ticket is not None or self.error is not None

    def result(self) -> PrefillTicket | None:
        """Return the ticket, or None if it is not there yet. Raise if no ticket will come."""
        if self.error is not None:
            raise self.error
        return self.ticket


class Lookups:
    """Fetch tickets in a thread for each server, so that no step of an engine waits for a server.

    Args:
        timeout: Seconds after which a look-up fails.
        decline: A function that declines a ticket of a request that has ended.
        absent: Seconds after which a look-up fails if the server cannot be reached.
        secret: As in `PrefillTicket.from_params`.
    """

    def __init__(
        self,
        timeout: float,
        decline: Callable[[PrefillTicket], None],
        *,
        absent: float = ABSENT,
        secret: str | bytes | None = None,
    ) -> None:
        self._timeout, self._absent = timeout, absent
        self._decline, self._secret = decline, secret
        self._waiting: dict[str, list[Lookup]] = {}
        self._lock = threading.Lock()

    def add(self, address: str, room: int) -> Lookup:
        """Begin to look for the ticket of *room*."""
        lookup = Lookup(room, time.monotonic() + self._timeout)
        with self._lock:
            if address in self._waiting:
                self._waiting[address].append(lookup)
                return lookup
            self._waiting[address] = [lookup]
        name = f"kvspec-tickets-{address}"
        threading.Thread(target=self._run, args=(address,), name=name, daemon=True).start()
        return lookup

    def give_up(self, lookup: Lookup) -> None:
        """Decline the ticket of *lookup*, now or when it is found. A second call does nothing."""
        with self._lock:
            ticket = None if lookup.given_up else lookup.ticket
            lookup.given_up = True
        if ticket is not None:
            self._decline(ticket)

    def _run(self, address: str) -> None:
        """Look for tickets at *address* until no request waits for one."""
        connection: http.client.HTTPConnection | None = None
        reached = time.monotonic()
        while True:
            with self._lock:
                waiting = [each for each in self._waiting[address] if not each.ended]
                self._waiting[address] = waiting
                if not waiting:
                    del self._waiting[address]
                    if connection is not None:
                        connection.close()
                    return
            error: Exception = TimeoutError("the prefill engine has published no ticket")
            found: dict[int, Params] = {}
            try:
                connection = connection or http.client.HTTPConnection(address, timeout=ANSWER)
                for start in range(0, len(waiting), MOST_ROOMS):
                    rooms = [lookup.room for lookup in waiting[start : start + MOST_ROOMS]]
                    found |= _get(connection, rooms)
                reached = time.monotonic()
            except Exception as failure_:  # noqa: BLE001 - the address and the answer may be anything
                if connection is not None:
                    connection.close()  # The next request opens it again.
                error = failure_
            now = time.monotonic()
            for lookup in waiting:
                if lookup.room in found:
                    self._end(lookup, found[lookup.room])
                elif now > lookup.deadline or now - reached > self._absent:
                    lookup.error = error
            time.sleep(REST)

    def _end(self, lookup: Lookup, params: Params) -> None:
        """Take the ticket or the failure that was found."""
        try:
            why = failed(lookup.room, params, self._secret)
            if why is not None:
                rule = f"the prefill engine failed: {why}"
                raise SpecError("remote_failure", lookup.room, rule=rule)  # noqa: TRY301
            ticket = PrefillTicket.from_params(params, self._secret)
        except Exception as error:  # noqa: BLE001 - the parameters may be anything
            lookup.error = error
            return
        with self._lock:
            lookup.ticket, given_up = ticket, lookup.given_up
        if given_up:
            self._decline(ticket)
