"""Serve prefill tickets by room, over HTTP, for SGLang and for any other engine.

SGLang has no parameters that travel with a request from a prefill engine to a decode engine. Its
router gives both engines a *room*: a number. So the prefill engine stores its `PrefillTicket` under
the room, at the bootstrap server, and the decode engine fetches it there.

Invariant: a room belongs to one request. The ticket of another request never replaces the first
one, and only one consumer gets it. A server stores only tickets and failures that are sealed with
its secret. An entry is deleted after `keep` seconds. The server keeps a bounded number of
connections, and of each of them at most `SMALL_BODY` bytes, unless the peer has proved that it has
the secret.

How it works:
    The interface is three methods:

        PUT /kvspec/tickets/ROOM           store the parameters of a ticket, or of a failure
        GET /kvspec/tickets/ROOM[,ROOM]    an object with the rooms that have an entry
        POST /kvspec/claims                the same, for one consumer that claims these rooms

    The body of PUT is `PrefillTicket.to_params()`, or `failure(room, why)` if the prompt will not
    be computed. A router can call both PUT and GET, so that one side is an engine of another maker.

    The body of POST is an object. For each room it has the name of the consumer's request, and the
    `remote_id` of the ticket that it knows, or "". The first name that claims a room has it. Others
    get a failure. A room can be claimed before its ticket exists. A known ticket is left out of the
    answer.

    The prefill engine may publish several tickets of one request: one for each chunk that was
    computed so far, without the first token, and then the whole one. Each replaces the one before.
    They have the same nonce in their `remote_id`, so the server knows that they are of the same
    request. Only POST returns those of chunks.

        state of a room     PUT of its own request    PUT of another request
        empty, or claimed   stored                    stored
        ticket, unclaimed   stored                    the room fails for both requests
        ticket, claimed     stored                    refused
        failed              refused                   refused

    If a body is larger than `SMALL_BODY`, the header `PROOF` must be `proof_of` its room and size.
    The same header of a POST is `proof_of_claims`.

    >>> secret = "a secret of all engines"
    >>> server = TicketServer("127.0.0.1", 0, secret=secret)
    >>> put(server.address, 7, failure(7, "aborted", secret=secret), secret)
    >>> list(get(server.address, [7, 8]))
    [7]
    >>> server.close()
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

from kvspec.errors import KVSpecError, SpecError
from kvspec.inputs import mapping, positive_int, sequence
from kvspec.tickets import PrefillTicket
from kvspec.wire.messages import Key, key_of
from kvspec.wire.seal import secret_of

log = logging.getLogger(__name__)

PATH = "/kvspec/tickets/"
CLAIMS = "/kvspec/claims"
ROOM_PURPOSE = b"kvspec-room-2\n"
SIZE_PURPOSE = b"kvspec-room-size-1\n"
CLAIM_PURPOSE = b"kvspec-room-claim-1\n"
PROOF = "Kvspec-Proof"

# The largest body of a PUT, and the largest one without a proof. A ticket of a million tokens in
# pages of one token has 7 MiB.
LARGEST, SMALL_BODY = 64 << 20, 1 << 20
# The most connections at once, and the most from one address. Each rank of a decode engine has one
# for each server, and each ticket that is stored has one for a moment.
MOST_CONNECTIONS, MOST_OF_ONE = 1024, 256
# Seconds until a body must be complete.
CLIENT_PATIENCE = 30.0
# The largest room.
MAX_ROOM = (1 << 63) - 1
# The most rooms in one request.
MOST_ROOMS = 256
# Seconds to wait for an answer of the server.
SERVER_TIMEOUT = 5.0
# The beginning of the name of a request of which only the first chunks are computed.
CHUNKS = "chunks"

Params = dict[str, Any]


def check_room(room: object) -> int:
    """Return *room* if it is a room: 0 < room < 2**63. SGLang uses 0 for a room that is unset.

    Raises:
        SpecError: If it is not.
    """
    return positive_int("bootstrap_room", room, most=MAX_ROOM)


def is_room(room: object) -> bool:
    """Return whether *room* is one, as `check_room` requires."""
    return type(room) is int and 0 < room <= MAX_ROOM


def room_of(text: str) -> int | None:
    """Return the room in *text*, or None if there is none."""
    # Python would take long to convert a number of many digits.
    if not text.isascii() or not text.isdecimal() or len(text) > 20:  # noqa: PLR2004
        return None
    return room if 0 < (room := int(text)) <= MAX_ROOM else None


def key_in(room: int, nonce: bytes, chunks: int | None = None) -> Key:
    """Return the name of a request in *room*. *chunks*: only so many of its chunks."""
    part = "" if chunks is None else f"{CHUNKS}-{chunks}-"
    return Key(f"{part}room-{room}", nonce)


def is_whole(ticket: PrefillTicket) -> bool:
    """Return whether *ticket* is of the whole prompt, not only of its first chunks."""
    return not key_of(ticket.remote_id).request_id.startswith(CHUNKS)


def failure(room: int, why: str, nonce: bytes = b"", secret: str | bytes | None = None) -> Params:
    """Return the parameters that state that the prompt of *room* will not be computed.

    Args:
        room: The room.
        why: The reason. If it is empty, the server deletes the entry: the prompt was read.
        nonce: The nonce of the request, if it has one.
        secret: As in `PrefillTicket.to_params`.
    """
    owner = nonce.hex()
    seal = secret_of(secret).mac(ROOM_PURPOSE, _failed(room, why, owner)).hex()
    return {"remote_failure": why, "remote_owner": owner, "remote_seal": seal}


def _failed(room: int, why: str, owner: str) -> bytes:
    """Return the bytes that the seal of a failure covers."""
    return json.dumps([room, why, owner]).encode()


def proof_of(room: int, size: int, secret: str | bytes | None = None) -> str:
    """Return the header `PROOF` for a PUT with a body of *size* bytes."""
    return secret_of(secret).mac(SIZE_PURPOSE, _proved(room, size)).hex()


def proof_of_claims(body: bytes, secret: str | bytes | None = None) -> str:
    """Return the header `PROOF` for a POST with *body*."""
    return secret_of(secret).mac(CLAIM_PURPOSE, body).hex()


def _proved(room: int, size: int) -> bytes:
    """Return the bytes that a proof covers."""
    return b"%d %d" % (room, size)


def failed(room: int, params: Mapping[str, Any], secret: str | bytes | None = None) -> str | None:
    """Return the reason in *params* if they are those of a sealed failure, or None.

    Raises:
        SpecError: If the seal is wrong.
    """
    why, owner = params.get("remote_failure"), params.get("remote_owner", "")
    if not isinstance(why, str):
        return None
    seal = params.get("remote_seal")
    sealed = isinstance(owner, str) and secret_of(secret).proves(
        seal, ROOM_PURPOSE, _failed(room, why, owner)
    )
    if not sealed:
        raise SpecError("remote_seal", seal, "the seal of unchanged parameters")
    return why


@attrs.define
class _Published:
    """What a server knows of one room.

    Attributes:
        stored: When it was stored.
        body: The parameters as JSON, or None.
        ticket: The `remote_id` of the ticket, or "".
        owner: The nonce of the request, in hexadecimal digits. "" if it is unknown.
        why: The reason if the room has failed.
        whole: Whether *body* is of the whole prompt, or of a failure.
        claim: The consumer's request that has the room.
    """

    stored: float
    body: bytes | None = None
    ticket: str = ""
    owner: str = ""
    why: str | None = None
    whole: bool = False
    claim: str | None = None


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
        self._name = uuid.uuid4().hex.encode()
        self._published: dict[int, _Published] = {}
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
        """Store the parameters in *body*.

        Raises:
            SpecError: If they are not sealed, or the room belongs to another request.
        """
        check_room(room)
        try:
            params = mapping("body", json.loads(body), "parameter names to values")
        except (ValueError, RecursionError) as error:  # `SpecError` is a ValueError.
            raise SpecError("body", f"{len(body)} bytes", "parameters as JSON") from error
        why, name, whole = failed(room, params, self._secret), "", True
        if why is None:
            ticket = PrefillTicket.from_params(params, self._secret)
            name, whole = ticket.remote_id, is_whole(ticket)
        owner = key_of(name).nonce.hex() if name else params.get("remote_owner", "")
        with self._lock:
            self._delete_old()
            old = self._published.get(room)
            stranger = old is not None and old.body is not None and old.owner != owner
            if why == "":
                if not stranger:
                    self._published.pop(room, None)
            elif old is not None and old.why is not None:
                if why is None:
                    rule = f"the room was given up: {old.why}"
                    raise SpecError("bootstrap_room", room, rule=rule)
            elif stranger and old is not None and old.claim is not None:
                rule = "the room belongs to another request, which is not yet over"
                raise SpecError("bootstrap_room", room, rule=rule)
            else:
                if stranger and why is None:
                    # Nobody can tell for which of both a consumer will ask.
                    why = "two requests have used this room"
                    body = json.dumps(failure(room, why, secret=self._secret)).encode()
                claim = None if old is None else old.claim
                # Entries are in the order of their times, so each is inserted last.
                self._published.pop(room, None)
                self._published[room] = _Published(
                    time.monotonic(), body, name, owner, why, whole, claim
                )
                if stranger:
                    raise SpecError("bootstrap_room", room, rule=f"{why}")

    def _delete_old(self) -> None:
        """Delete the entries that are too old. The lock is held."""
        old = time.monotonic() - self._keep
        while (
            self._published and self._published[first := next(iter(self._published))].stored < old
        ):
            del self._published[first]

    def allows(self, room: int, size: int, proof: str) -> bool:
        """Return whether to read a body of *size* bytes."""
        secret, body = secret_of(self._secret), _proved(room, size)
        return size <= SMALL_BODY or secret.proves(proof, SIZE_PURPOSE, body)

    def found(self, rooms: Iterable[int]) -> bytes:
        """Return the whole tickets and failures of *rooms* that exist, as JSON."""
        with self._lock:
            known = {room: self._published.get(room) for room in rooms}
        return _answer({room: each.body for room, each in known.items() if each and each.whole})

    def claimed(self, body: bytes, proof: str) -> bytes:
        """Claim rooms. Return the name of this server's start, and what it has, as JSON.

        Args:
            body: An object with a name and a known ticket for each room, as JSON.
            proof: `proof_of_claims` for *body*.

        Raises:
            SpecError: If the proof is wrong, or the body.
        """
        if not secret_of(self._secret).proves(proof, CLAIM_PURPOSE, body):
            raise SpecError(PROOF, proof[:100], "the proof of the claims")
        found: dict[int, bytes | None] = {}
        names = mapping("claims", json.loads(body), "rooms to names").items()
        valid = {room: name for text, name in names if (room := room_of(text)) is not None}
        with self._lock:
            self._delete_old()
            for room, pair in valid.items():
                name, known = (str(each) for each in sequence("claims", pair, "two names"))
                entry = self._published.setdefault(room, _Published(time.monotonic()))
                entry.claim = entry.claim or name
                if entry.claim != name:
                    why = "another request has claimed this room"
                    found[room] = json.dumps(failure(room, why, secret=self._secret)).encode()
                elif entry.ticket != known or entry.why is not None:
                    found[room] = entry.body
        return b'{"server": "%b", "rooms": %b}' % (self._name, _answer(found))

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._http.shutdown()
        self._http.server_close()
        self._http.disconnect()


def _answer(bodies: Mapping[int, bytes | None]) -> bytes:
    """Return the bodies that exist, as an object in JSON."""
    known = [b'"%d": %b' % (room, body) for room, body in bodies.items() if body is not None]
    return b"{" + b", ".join(known) + b"}"


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

    def disconnect(self) -> None:
        """End all connections: their threads would answer for a server that is closed."""
        with self._lock:
            requests = list(self._hosts)
        for request in requests:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

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
        rooms, length = self._rooms(), self._length(LARGEST)
        if rooms is None or len(rooms) != 1 or length is None:
            self._refuse(400)
        elif not self.tickets.allows(rooms[0], length, self.headers.get(PROOF, "")):
            self._refuse(401)
        else:
            body = self._body(length)
            try:
                self.tickets.store(rooms[0], body)
            except KVSpecError as error:
                self._answer(403, json.dumps({"error": str(error)[:1000]}).encode())
            else:
                self._answer(200, b"{}")

    def do_POST(self) -> None:
        length = self._length(SMALL_BODY)
        if self.path != CLAIMS or length is None:
            self._refuse(400)
            return
        body = self._body(length)
        try:
            answer = self.tickets.claimed(body, self.headers.get(PROOF, ""))
        except (ValueError, RecursionError) as error:  # `SpecError` is a ValueError.
            self._answer(403, json.dumps({"error": str(error)[:1000]}).encode())
        else:
            self._answer(200, answer)

    def _length(self, most: int) -> int | None:
        """Return the size of the body, or None if it is unknown or too large."""
        length = self.headers.get("Content-Length", "")
        # Python would take long to convert a number of many digits.
        known = length.isdecimal() and len(length) < 10 and int(length) <= most  # noqa: PLR2004
        return int(length) if known else None

    def _refuse(self, status: int) -> None:
        """Answer without reading the body. The connection cannot go on then."""
        self.close_connection = True
        self._answer(status, b"{}")

    def _body(self, size: int) -> bytes:
        """Return the body. Raise `TimeoutError`, which ends the connection, if it is too slow."""
        deadline, body = time.monotonic() + CLIENT_PATIENCE, bytearray()
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
        """Return the rooms in the path, or None if there are none. Others in it are left out."""
        texts = self.path.removeprefix(PATH).split(",")
        if not self.path.startswith(PATH) or len(texts) > MOST_ROOMS:
            return None
        # One wrong room does not fail the others, which may be of other requests.
        return [room for text in texts if (room := room_of(text)) is not None] or None

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
        SpecError: If the room is not valid, or the server refuses them.
        OSError: If it cannot be reached.
    """
    check_room(room)
    connection = http.client.HTTPConnection(address, timeout=SERVER_TIMEOUT)
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
    numbers = ",".join(str(check_room(room)) for room in rooms)
    connection = http.client.HTTPConnection(address, timeout=SERVER_TIMEOUT)
    try:
        answer = _ask(connection, "GET", PATH + numbers)
        return {int(room): params for room, params in answer.items()}
    finally:
        connection.close()


def claim(
    connection: http.client.HTTPConnection,
    names: Mapping[int, tuple[str, str]],
    secret: str | bytes | None = None,
) -> tuple[str, dict[int, Params]]:
    """Claim rooms at a server. Waits.

    Args:
        connection: A connection to the server.
        names: For each room the name of the consumer's request, and the `remote_id` of the ticket
            that it knows, or "".
        secret: As in `PrefillTicket.to_params`.

    Returns:
        The name of the server's start, and the parameters of the rooms that have an entry.

    Raises:
        SpecError: If the server refuses the request.
        OSError: If it cannot be reached.
    """
    body = json.dumps({str(room): pair for room, pair in names.items()}).encode()
    answer = _ask(connection, "POST", CLAIMS, body, {PROOF: proof_of_claims(body, secret)})
    return answer["server"], {int(room): params for room, params in answer["rooms"].items()}


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
    if response.status == http.client.FORBIDDEN:
        raise SpecError("ticket", response.status, rule=_why(content))
    if response.status != http.client.OK:
        raise SpecError("ticket", f"{response.status} {content[:1000]!r}", "an answer of 200")
    try:
        return dict(mapping("ticket", json.loads(content), "names to values"))
    except (ValueError, RecursionError) as error:  # `SpecError` is a ValueError.
        raise SpecError("ticket", content[:1000], "an object in JSON") from error


def _why(content: bytes) -> str:
    """Return the reason in the answer with which a server refuses a request."""
    try:
        why = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        why = repr(content[:1000])
    return f"the ticket server has refused it: {why}"


def own_address(server_args: Any) -> str:  # noqa: ANN401
    """Return the address of this engine's server, which runs on the same machine."""
    host = server_args.host
    if host in ("0.0.0.0", "::", "", None):  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return f"{host}:{server_args.disaggregation_bootstrap_port}"
