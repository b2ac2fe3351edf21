"""Servers that speak as little HTTP as a router needs, and do wrong what a test wants."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Answer = Callable[[socket.socket], None]


def http_answer(body: bytes, status: int = 200, kind: str = "application/json") -> bytes:
    """Return a whole answer."""
    head = f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def answers(value: object, status: int = 200) -> Answer:
    """Return a server's answer *value* as JSON."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda peer: peer.sendall(http_answer(body, status))


def streams(*parts: bytes, whole: bool = True) -> Answer:
    """Return a server's answer as a stream of *parts*. It breaks off if it is not *whole*."""

    def send(peer: socket.socket) -> None:
        peer.sendall(b"HTTP/1.1 200 x\r\nContent-Type: text/event-stream\r\n")
        peer.sendall(b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        for part in parts:
            peer.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        if whole:
            peer.sendall(b"0\r\n\r\n")

    return send


def closes(_: socket.socket) -> None:
    """Close the connection without an answer."""


class Request(NamedTuple):
    """A request: its path with the query, its key, and the value of its JSON."""

    path: str
    key: str | None
    body: Any


class FakeServer:
    """Records requests, and gives each of them the next of the *answers*, or the last again."""

    def __init__(self, *given: Answer) -> None:
        self.answers = given
        self.requests: list[Request] = []
        self.left = threading.Event()  # A client has closed its connection before the answer.
        self._listens = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listens.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Accept no more requests."""
        self._listens.close()

    def silent(self, peer: socket.socket) -> None:
        """Answer nothing until the client leaves."""
        with contextlib.suppress(OSError):
            if not peer.recv(1):
                self.left.set()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listens.accept()
                threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as lines, contextlib.suppress(OSError):
            first = lines.readline().decode()
            headers = dict[str, str]()
            while line := lines.readline().decode().strip():
                name, _, value = line.partition(": ")
                headers[name.lower()] = value
            body = lines.read(int(headers.get("content-length", 0)))
            request = Request(first.split()[1], headers.get("authorization"), json.loads(body))
            self.requests.append(request)
            number = min(len(self.requests), len(self.answers)) - 1
            self.answers[number](peer)


@contextlib.contextmanager
def servers(*given: Answer) -> Iterator[FakeServer]:
    """Yield a server, and close it."""
    server = FakeServer(*given)
    try:
        yield server
    finally:
        server.close()
