"""Route requests to a prefill and a decode engine of vLLM: examples/README.md.

    python examples/router.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

A router that serves real clients has to do five things, and each is a few lines here:

- The prefill engine answers one token and a ticket. The ticket goes to the decode engine alone.
- If the client leaves, both halves end: a cancelled request closes its connection, and vLLM aborts.
- If the decode engine fails before its first token, the request is tried again, with a new ticket.
- An answer of 4xx is the client's fault, so it is passed on, and nothing is tried again.
- The answer streams through, without the ticket.

It needs aiohttp, which vLLM and SGLang install.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import aiohttp
from aiohttp import web

PATHS = ("/v1/completions", "/v1/chat/completions")
ATTEMPTS, JSON = 2, "application/json"
# Fields that the prefill half must not have: it computes the prompt and one token.
_OF_DECODE = ("stream", "stream_options", "min_tokens")
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
_ONE_TOKEN = ("max_tokens", "max_completion_tokens")


class Router:
    """The engines, in turns."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self.prefill, self.decode = itertools.cycle(prefill), itertools.cycle(decode)
        self.client: aiohttp.ClientSession

    async def run(self, _: web.Application) -> Any:
        """Open the connections to the engines while the server runs."""
        limits = aiohttp.TCPConnector(limit=0)
        patience = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(connector=limits, timeout=patience) as self.client:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one client. aiohttp cancels this if the client leaves."""
        body = await request.json()
        for attempt in range(ATTEMPTS):
            try:
                return await self.attempt(request, body)
            except (aiohttp.ClientError, EngineError) as error:
                # After the first token the answer cannot begin again: see `forward`.
                if attempt + 1 == ATTEMPTS:
                    return web.json_response({"error": str(error)}, status=502)
        raise AssertionError

    async def attempt(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Send both halves once."""
        asked = {**prefill_half(body), "kv_transfer_params": ASK}
        async with self.client.post(next(self.prefill) + request.path, json=asked) as answer:
            found = await answer.read()
            if answer.status >= 500:  # noqa: PLR2004 - an error of the engine
                raise EngineError(f"prefill: {answer.status}")
            if answer.status != 200:  # noqa: PLR2004
                return web.Response(status=answer.status, body=found, content_type=JSON)
        ticket = json.loads(found).get("kv_transfer_params")
        # Without a ticket, the decode engine computes the prompt itself.
        full = {**body, "kv_transfer_params": ticket} if ticket else body
        async with self.client.post(next(self.decode) + request.path, json=full) as answer:
            if answer.status >= 500:  # noqa: PLR2004
                raise EngineError(f"decode: {answer.status}")
            return await self.forward(request, answer)

    async def forward(
        self, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Pass the answer of the decode engine on, without the ticket."""
        if answer.content_type != "text/event-stream":
            text = await answer.read()
            if answer.content_type != JSON:
                return web.Response(body=text, status=answer.status)
            found = json.loads(text)
            if isinstance(found, dict):
                found.pop("kv_transfer_params", None)
            return web.json_response(found, status=answer.status)
        first = await answer.content.readline()
        if first.startswith(b'data: {"error"'):  # vLLM's status is 200, and no token has come.
            raise EngineError(f"decode: {first.decode().strip()}")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await response.write(without_ticket(first))
            async for line in answer.content:
                await response.write(without_ticket(line))
        except aiohttp.ClientConnectionResetError:
            return response  # The client has left.
        except aiohttp.ClientError as error:
            # The client has read a part of the answer. It sees the end of the stream as an error.
            await response.write(f"data: {json.dumps({'error': str(error)})}\n\n".encode())
        await response.write_eof()
        return response


class EngineError(Exception):
    """An engine answered 5xx."""


def prefill_half(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request of a client for one token, without a stream."""
    half = {name: value for name, value in body.items() if name not in _OF_DECODE}
    one = {name: 1 for name in _ONE_TOKEN if name in body} or {"max_tokens": 1}
    return {**half, **one, "stream": False}


def without_ticket(line: bytes) -> bytes:
    """Return one line of a stream without the ticket."""
    if b'"kv_transfer_params"' not in line:
        return line
    event = json.loads(line.removeprefix(b"data: "))
    event.pop("kv_transfer_params", None)
    return b"data: " + json.dumps(event).encode() + b"\n"


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", nargs="+", required=True)
    parser.add_argument("--decode", nargs="+", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    serve(Router(options.prefill, options.decode), options)


def serve(router: Router, options: argparse.Namespace) -> None:
    """Serve with *router* until interrupted."""
    app = web.Application(client_max_size=1 << 26)
    app.cleanup_ctx.append(router.run)
    for path in PATHS:
        app.router.add_post(path, router.handle)
    app.router.add_get("/health", lambda _: _healthy())
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True, print=None)


async def _healthy() -> web.Response:
    return web.Response(text="ok")


if __name__ == "__main__":
    main()
