"""Test the router of the examples: its clients leave, and its engines fail in every way."""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_servers import Answer, FakeServer, answers, closes, http_answer, servers, streams

ROUTER = Path(__file__).parents[2] / "examples" / "router.py"
TICKET = {"engine_id": "P", "remote_id": "never-to-a-client"}
COMPUTED = answers({"choices": [], "kv_transfer_params": TICKET})
ANSWERED = answers({"text": "yes", "kv_transfer_params": TICKET})
PROMPT = {"prompt": "x", "max_tokens": 5, "min_tokens": 2}
STREAM = "text/event-stream"


@functools.cache
def python() -> str | None:
    """Return a Python that has aiohttp, or None. That of vLLM has it."""
    if importlib.util.find_spec("aiohttp") is not None:
        return sys.executable
    return os.environ.get("KVSPEC_VLLM_PYTHON")


pytestmark = pytest.mark.skipif(python() is None, reason="aiohttp is not installed")


@contextlib.contextmanager
def routed(prefill: FakeServer, decode: FakeServer) -> Iterator[http.client.HTTPConnection]:
    """Start the router between two engines. Yield a connection to it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [python() or "", str(ROUTER), "--prefill", prefill.url, "--decode", decode.url]
    with subprocess.Popen(  # noqa: S603 - our own program
        [*command, "--port", str(port)], stderr=subprocess.PIPE
    ) as process:
        try:
            for _ in range(1200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            yield client
            client.close()
        finally:
            process.terminate()
            _, log = process.communicate(timeout=30)
    assert b"Traceback" not in log, log.decode()


def ask(client: http.client.HTTPConnection, body: object = PROMPT, **headers: str) -> Any:
    """Send a request, and return the status, the type and the text of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    client.request("POST", "/v1/completions?q=1", data, headers)
    answer = client.getresponse()
    return answer.status, answer.getheader("Content-Type", "").partition(";")[0], answer.read()


def result(prefill: tuple[Answer, ...], decode: tuple[Answer, ...]) -> tuple[Any, int, int]:
    """Return one answer of the router, and the number of requests that each engine received."""
    with servers(*prefill) as one, servers(*decode) as other, routed(one, other) as client:
        found = ask(client)
        assert b"never-to-a-client" not in found[2]
        for each in other.requests:
            assert {**PROMPT, "kv_transfer_params": TICKET} == each.body
        return found, len(one.requests), len(other.requests)


def test_both_halves_receive_query_and_key_and_only_their_fields() -> None:
    with servers(COMPUTED) as one, servers(ANSWERED) as other, routed(one, other) as client:
        found = ask(client, Authorization="Bearer k")
        assert (200, {"text": "yes"}) == (found[0], json.loads(found[2]))
        for engine in (one, other):
            (request,) = engine.requests
            assert ("/v1/completions?q=1", "Bearer k") == (request.path, request.key)
        assert "min_tokens" not in one.requests[0].body
        assert (1, False) == tuple(one.requests[0].body[name] for name in ("max_tokens", "stream"))
        # Its own ticket could name the prompt of another client.
        one.answers = (answers({"choices": []}),)
        assert 200 == ask(client, {"prompt": "x", "kv_transfer_params": TICKET})[0]
        assert {"prompt": "x"} == other.requests[1].body
        for wrong in (b"{", [1], None, "x"):
            assert 400 == ask(client, wrong)[0]
        assert (2, 2) == (len(one.requests), len(other.requests))


BROKEN = {
    "closes": closes,
    "500": answers({}, 500),
    "no JSON": answers(b"<html>"),
}
ENDED = streams(whole=False)
# vLLM's status is 200 before it has a token.
FAILED = streams(b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n')


@pytest.mark.parametrize("broken", [*BROKEN.values(), answers([1])], ids=[*BROKEN, "a list"])
def test_prefill_half_that_fails_is_tried_again(broken: Answer) -> None:
    assert (200, 2, 1) == _counts(result((broken, COMPUTED), (ANSWERED,)))


@pytest.mark.parametrize(
    "broken",
    [*BROKEN.values(), ENDED, FAILED],
    ids=[*BROKEN, "ends after its head", "begins with an error"],
)
def test_decode_half_that_fails_before_its_first_token_is_tried_again(broken: Answer) -> None:
    assert (200, 2, 2) == _counts(result((COMPUTED,), (broken, ANSWERED)))


def test_router_gives_up_after_two_attempts() -> None:
    assert (502, 2, 2) == _counts(result((COMPUTED,), (answers({}, 500),)))


def _counts(found: tuple[Any, int, int]) -> tuple[int, int, int]:
    return found[0][0], *found[1:]


def test_fault_of_the_client_is_passed_on_as_it_is() -> None:
    """Nothing is tried again. The status and the type stay."""
    for kind, text in (("text/plain", b"no"), (STREAM, b"data: no\n\n")):
        fault: Answer = functools.partial(_send, http_answer(text, 400, kind))
        assert ((400, kind, text), 1, 1) == result((COMPUTED,), (fault,))
    assert ((400, "text/plain", b"no"), 1, 0) == result(
        (functools.partial(_send, http_answer(b"no", 400, "text/plain")),), (ANSWERED,)
    )


def _send(data: bytes, peer: socket.socket) -> None:
    peer.sendall(data)


@pytest.mark.parametrize("space", [b"", b" "])
def test_stream_has_no_ticket(space: bytes) -> None:
    """However its lines are cut and written."""
    ticket = json.dumps({"kv_transfer_params": TICKET, "choices": [{"kv_transfer_params": TICKET}]})
    line = b"data:" + space + ticket.encode() + b"\n\n"
    sent = streams(b"data: a\n\n", line[:20], line[20:], b"data: [DONE]\n\n")
    found = result((COMPUTED,), (sent,))
    expected = b'data: a\n\ndata: {"choices": [{}]}\n\ndata: [DONE]\n\n'
    assert ((200, STREAM, expected), 1, 1) == found


def test_stream_that_breaks_off_ends_with_an_error() -> None:
    (status, _, text), *counts = result((COMPUTED,), (streams(b"data: a\n\n", whole=False),))
    assert (200, [1, 1]) == (status, counts)
    first, last = text.strip().split(b"\n\n")
    assert (b"data: a", ["error"]) == (first, [*json.loads(last.removeprefix(b"data: "))])


@pytest.mark.parametrize("half", ["prefill", "decode", "stream"])
def test_engine_is_left_when_the_client_leaves(half: str) -> None:
    with servers(COMPUTED) as one, servers(ANSWERED) as other, routed(one, other) as client:
        silent = one if half == "prefill" else other

        def begin(peer: socket.socket) -> None:
            if half == "stream":
                streams(b"data: a\n\n", whole=False)(peer)
            silent.silent(peer)

        silent.answers = (begin,)
        client.request("POST", "/v1/completions", json.dumps(PROMPT))
        end = time.monotonic() + 30
        while not silent.requests and time.monotonic() < end:
            time.sleep(0.01)
        client.close()
        assert silent.left.wait(30)
        time.sleep(0.2)
        assert 1 == len(silent.requests), "nothing is tried again for a client that has left"
