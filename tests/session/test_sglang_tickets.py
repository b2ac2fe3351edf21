"""The ticket server limits what a stranger without the secret can make it do."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sglang_serving import wait

import kvspec
from kvspec.adapters.sglang import tickets
from kvspec.adapters.sglang.lookups import Lookups
from kvspec.session import new_remote_id
from kvspec.tickets import PrefillTicket

pytestmark = pytest.mark.adapters


@contextlib.contextmanager
def ticket_server() -> Iterator[tuple[tickets.TicketServer, tuple[str, int]]]:
    """Yield a server, and its host and port."""
    server = tickets.TicketServer("127.0.0.1", 0)
    host, _, port = server.address.partition(":")
    try:
        yield server, (host, int(port))
    finally:
        server.close()


def test_ticket_server_closes_connections_above_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """One address has a part of them only. A connection that is closed makes room for another."""
    monkeypatch.setattr(tickets, "MOST_OF_ONE", 3)
    with ticket_server() as (server, address), contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        for one in opened:  # Each is served, and stays open.
            one.sendall(b"GET /kvspec/tickets/1 HTTP/1.1\r\n\r\n")
            assert one.recv(12) == b"HTTP/1.1 200"
        with socket.create_connection(address) as another:
            another.settimeout(5)
            assert another.recv(1) == b""
        assert not reachable(server.address)
        opened[0].close()
        wait(lambda: reachable(server.address))


def reachable(address: str) -> bool:
    """Return whether a server answers."""
    with contextlib.suppress(OSError):
        return tickets.get(address, [1]) == {}
    return False


@pytest.mark.parametrize("proof", ["", "0" * 64, "size"])
def test_large_body_without_the_secret_is_refused_unread(proof: str) -> None:
    """A proof of the secret for one size is none for another."""
    size = tickets.SMALL_BODY + 1
    if proof == "size":
        proof = tickets.proof_of(7, size + 1)
    with ticket_server() as (_, address), socket.create_connection(address) as stranger:
        stranger.settimeout(5)
        head = f"PUT /kvspec/tickets/7 HTTP/1.1\r\nContent-Length: {size}\r\n"
        stranger.sendall(f"{head}{tickets.PROOF}: {proof}\r\n\r\n".encode())
        assert stranger.recv(12) == b"HTTP/1.1 401"


def test_large_ticket_is_stored() -> None:
    with ticket_server() as (server, _):
        table = kvspec.BlockTable(list(range(300_000)))
        held = PrefillTicket(
            engine_id="p",
            addresses=("127.0.0.1:9",),
            remote_id=new_remote_id("p-1"),
            computed_tokens=300_000,
            tables={"full": table},
        )
        tickets.put(server.address, 7, held.to_params())
        assert held == PrefillTicket.from_params(tickets.get(server.address, [7])[7])


def test_body_that_comes_too_slowly_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "CLIENT_PATIENCE", 0.2)
    with ticket_server() as (_, address), socket.create_connection(address) as slow:
        slow.settimeout(5)
        slow.sendall(b"PUT /kvspec/tickets/7 HTTP/1.1\r\nContent-Length: 900\r\n\r\n")
        received = b"."
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                slow.sendall(b" ")
                time.sleep(0.05)
            received = slow.recv(12)
        assert received in (b".", b"", b"HTTP/1.1 408")


def test_deep_body_is_refused() -> None:
    """JSON of a hundred thousand brackets is deeper than Python's stack."""
    with ticket_server() as (server, _), pytest.raises(kvspec.SpecError) as caught:
        server.store(7, b"[" * 100_000)
    assert "body" == caught.value.field


ANSWERS = [
    b"[]",
    b"7",
    b'{"x": {}}',
    b'{"1": []}',
    b'{"1": {"remote_failure": "no", "remote_seal": "\\ud800"}}',
    b'{"1": {"remote_engine_id": "P", "remote_seal": "\\ud800"}}',
    b"[" * 100_000,
    b"\xff",
]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_lookup_ends_whatever_the_server_answers(answer: bytes) -> None:
    """The next look-up at the same address ends, too."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer)

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = listener.accept()
                with stream, contextlib.suppress(OSError):
                    while stream.recv(4096):
                        stream.sendall(head + answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        lookups = Lookups(0.1, lambda _: None)
        for _ in range(2):
            lookup = lookups.add(f"127.0.0.1:{listener.getsockname()[1]}", 1, "own")
            wait(lambda lookup=lookup: lookup.ended)
            assert lookup.error is not None


def test_lookup_at_an_address_without_a_port_number_ends() -> None:
    """The address comes from a router."""
    lookup = Lookups(0.1, lambda _: None).add("host:port", 1, "own")
    wait(lambda: lookup.ended)
    assert lookup.error is not None


def ticket(room: int, nonce: bytes = b"n" * 16, chunks: int | None = None) -> PrefillTicket:
    """Return a ticket of the request *nonce* in *room*."""
    return PrefillTicket(
        engine_id="p",
        addresses=("127.0.0.1:9",),
        remote_id=tickets.key_in(room, nonce, chunks).remote_id,
        computed_tokens=3,
        tables={"full": kvspec.BlockTable([1])},
    )


def claimed(server: tickets.TicketServer, room: int, name: str, known: str = "") -> Any:
    """Claim *room* for the request *name*, and return the parameters that it gets, or None."""
    connection = http.client.HTTPConnection(server.address)
    with contextlib.closing(connection):
        return tickets.claim(connection, {room: (name, known)})[1].get(room)


def test_room_is_claimed_once() -> None:
    with ticket_server() as (server, _):
        assert claimed(server, 7, "first") is None
        tickets.put(server.address, 7, ticket(7).to_params())
        assert "another request" in str(tickets.failed(7, claimed(server, 7, "second")))
        assert ticket(7) == PrefillTicket.from_params(claimed(server, 7, "first"))
        assert claimed(server, 7, "first", ticket(7).remote_id) is None  # It is known.


def test_claim_without_the_secret_is_refused() -> None:
    with ticket_server() as (server, _), pytest.raises(kvspec.SpecError) as caught:
        server.claimed(b'{"7": ["stranger", ""]}', tickets.proof_of_claims(b"{}"))
    assert tickets.PROOF == caught.value.field


def test_claimed_ticket_is_not_replaced_by_that_of_another_request() -> None:
    other = ticket(7, b"m" * 16)
    with ticket_server() as (server, _):
        claimed(server, 7, "first")
        tickets.put(server.address, 7, ticket(7).to_params())
        for strange in (other.to_params(), tickets.failure(7, "why", b"m" * 16)):
            with pytest.raises(kvspec.SpecError):
                tickets.put(server.address, 7, strange)
        tickets.put(server.address, 7, tickets.failure(7, "", b"m" * 16))  # Deletes nothing.
        assert ticket(7) == PrefillTicket.from_params(claimed(server, 7, "first"))
        tickets.put(server.address, 7, tickets.failure(7, "", b"n" * 16))
        assert {} == tickets.get(server.address, [7])


def test_room_that_two_requests_use_fails_for_both_if_nobody_has_claimed_it() -> None:
    with ticket_server() as (server, _):
        tickets.put(server.address, 7, ticket(7).to_params())
        with pytest.raises(kvspec.SpecError):
            tickets.put(server.address, 7, ticket(7, b"m" * 16).to_params())
        assert "two requests" in str(tickets.failed(7, claimed(server, 7, "first")))


def test_refused_ticket_names_the_reason_of_the_server_once() -> None:
    """The log of the prefill engine shows it, so it must not be an answer in raw bytes."""
    with ticket_server() as (server, _):
        tickets.put(server.address, 7, tickets.failure(7, "the client has left"))
        with pytest.raises(kvspec.SpecError) as refused:
            tickets.put(server.address, 7, ticket(7).to_params())
    assert (refused.value.field, refused.value.value) == ("ticket", 403)
    assert "the room was given up: the client has left" in str(refused.value)
    assert "{" not in str(refused.value)


def test_tickets_of_chunks_reach_the_consumer_only() -> None:
    with ticket_server() as (server, _):
        tickets.put(server.address, 7, ticket(7, chunks=0).to_params())
        assert {} == tickets.get(server.address, [7])
        got = PrefillTicket.from_params(claimed(server, 7, "first"))
        assert not tickets.is_whole(got)
        tickets.put(server.address, 7, ticket(7).to_params())
        assert tickets.is_whole(PrefillTicket.from_params(tickets.get(server.address, [7])[7]))


@pytest.mark.parametrize("room", [0, -1, 10**20, None, True, "7"])
def test_number_that_is_no_room_is_refused(room: Any) -> None:
    with ticket_server() as (server, _):
        for use in (
            lambda: tickets.put(server.address, room, {}),
            lambda: tickets.get(server.address, [7, room]),
            lambda: Lookups(1.0, lambda _: None).add(server.address, room, "own"),
        ):
            with pytest.raises(kvspec.SpecError) as caught:
                use()
            assert "bootstrap_room" == caught.value.field


@pytest.mark.parametrize("room", ["0", "-1", "1" * 20, "x", "1" * 5000, ""])
def test_wrong_room_fails_no_other_room_of_the_same_question(room: str) -> None:
    with ticket_server() as (server, _):
        tickets.put(server.address, 7, tickets.failure(7, "why"))
        connection = http.client.HTTPConnection(server.address)
        with contextlib.closing(connection):
            connection.request("GET", f"{tickets.PATH}{room},7")
            assert ["7"] == list(json.loads(connection.getresponse().read()))
            body = json.dumps({room: ["a", ""], "7": ["b", ""]}).encode()
            proof = {tickets.PROOF: tickets.proof_of_claims(body)}
            connection.request("POST", tickets.CLAIMS, body, proof)
            assert ["7"] == list(json.loads(connection.getresponse().read())["rooms"])


def test_lookup_fails_at_once_if_its_prefill_engine_was_restarted() -> None:
    with ticket_server() as (server, address):
        lookup = Lookups(60.0, lambda _: None).add(server.address, 7, "own")
        wait(lambda: lookup.server != "")
    again = tickets.TicketServer(*address)
    wait(lambda: lookup.ended)
    again.close()
    assert isinstance(lookup.error, kvspec.TransferError)
    assert "stale_peer" == lookup.error.state


def test_lookup_with_another_secret_fails_at_once() -> None:
    with ticket_server() as (server, _):
        lookup = Lookups(60.0, lambda _: None, secret="x" * 20).add(server.address, 7, "own")
        wait(lambda: lookup.ended)
        assert isinstance(lookup.error, kvspec.SpecError)
