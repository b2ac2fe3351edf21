"""The router of the examples tries a request again while the client has read nothing.

Only aiohttp is imitated: the tests run without it.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import pytest

FILE = Path(__file__).parents[2] / "examples" / "router.py"
TICKET = {"remote_request_id": "p-1"}
FAILED = b'data: {"error": {"message": "Internal server error", "code": 500}}\n'
TOKEN = b'data: {"choices": [{"token_ids": [7]}], "kv_transfer_params": {}}\n'


class Answer:
    """The answer of an engine, and of the router."""

    def __init__(self, *lines: bytes, status: int = 200, headers: Any = None, **_: Any) -> None:
        self.lines, self.status, self.headers = [*lines], status, headers
        stream = bool(lines) and lines[0].startswith(b"data")
        self.content_type = "text/event-stream" if stream else "application/json"
        self.content = self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.lines:
            yield self.lines.pop(0)

    async def read(self) -> bytes:
        """Return the whole body."""
        return b"".join(self.lines)

    async def readline(self) -> bytes:
        """Return the next line, or nothing at the end."""
        return self.lines.pop(0) if self.lines else b""

    async def prepare(self, _: object) -> None:
        """Send the status."""

    async def write(self, line: bytes) -> None:
        """Send one line."""
        self.lines.append(line)

    async def write_eof(self) -> None:
        """End the answer."""


def answered(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> tuple[Any, list[str]]:
    """Return the router's answer to a streaming request, and the engines that it has asked."""
    web = ModuleType("aiohttp.web")
    response = lambda found, status=200: Answer(json.dumps(found).encode(), status=status)  # noqa: E731
    vars(web).update(StreamResponse=Answer, Response=Answer, Request=object, Application=object)
    vars(web).update(json_response=response)
    aiohttp = ModuleType("aiohttp")
    vars(aiohttp).update(web=web, ClientResponse=Answer, ClientError=OSError, ClientSession=object)
    vars(aiohttp).update(ClientConnectionResetError=ConnectionResetError)
    monkeypatch.setitem(sys.modules, "aiohttp", aiohttp)
    monkeypatch.setitem(sys.modules, "aiohttp.web", web)
    router = runpy.run_path(str(FILE))["Router"](["p"], ["d"])
    asked, left = list[str](), [*answers]

    def post(url: str, **_: Any) -> Answer:
        asked.append(url[0])
        if url[0] == "p":
            return Answer(json.dumps({"kv_transfer_params": TICKET}).encode())
        return left.pop(0)

    async def body() -> dict[str, Any]:
        return {"prompt": [5], "max_tokens": 8, "stream": True}

    router.client = SimpleNamespace(post=post)
    request = SimpleNamespace(json=body, path="/v1/completions")
    return asyncio.run(router.handle(request)), asked


def test_stream_that_begins_with_an_error_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM answers 200 before it has a token. The second half has a ticket of its own."""
    found, asked = answered(monkeypatch, Answer(FAILED), Answer(TOKEN, b"data: [DONE]\n"))
    assert [*"pdpd"] == asked
    assert [b'data: {"choices": [{"token_ids": [7]}]}\n', b"data: [DONE]\n"] == found.lines


def test_second_error_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = answered(monkeypatch, Answer(FAILED), Answer(FAILED))
    assert (502, [*"pdpd"]) == (found.status, asked)


def test_error_after_a_token_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has read a part of the answer, so it cannot begin again."""
    found, asked = answered(monkeypatch, Answer(TOKEN, FAILED))
    assert ([*"pd"], FAILED) == (asked, found.lines[-1])


def test_answer_of_400_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = answered(monkeypatch, Answer(b'{"error": "max_tokens"}', status=400))
    assert (400, [*"pd"]) == (found.status, asked)
