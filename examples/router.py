"""Route requests to a prefill and a decode engine of vLLM, with aiohttp: examples/README.md.

    python examples/router.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

A router that serves real clients has to do five things, and each is a few lines here:

- The prefill engine answers a token and a ticket for the decode engine. Clients send no tickets.
- If the client leaves, both halves end: a cancelled request closes its connection, and vLLM aborts.
- If an engine fails or is silent before its first token, all is tried again, with a new ticket.
- An answer of 4xx is the client's fault, so it is passed on, and nothing is tried again.
- The answer streams through, without the ticket.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from typing import Any

import aiohttp
from aiohttp import web

PATHS = ("/v1/completions", "/v1/chat/completions")
ATTEMPTS, SILENCE = 2, 600.0  # An engine that sends no byte for so many seconds has failed.
TICKET = "kv_transfer_params"
ASK = {"do_remote_decode": True, "do_remote_prefill": False}


class EngineError(Exception):
    """An engine answered 5xx, or not what it must."""


class Router:
    """The engines, in turns."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self.prefill, self.decode = itertools.cycle(prefill), itertools.cycle(decode)
        self.client: aiohttp.ClientSession

    async def run(self, _: web.Application) -> Any:
        """Open the connections to the engines while the server runs."""
        limits = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)  # The engines' is 5 s.
        patience = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=SILENCE)
        async with aiohttp.ClientSession(connector=limits, timeout=patience) as self.client:
            yield

    async def healthy(self, _: web.Request) -> web.Response:
        """Answer that the router runs."""
        return web.Response(text="ok")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one client. aiohttp cancels this if the client leaves."""
        try:
            body = parsed(await request.read(), dict)
        except EngineError:
            return web.json_response({"error": "the body must be a JSON object"}, status=400)
        body.pop(TICKET, None)
        why = ""
        for _ in range(ATTEMPTS):
            try:
                return await self.attempt(request, body)
            except (aiohttp.ClientError, EngineError) as error:
                why = str(error)
        return web.json_response({"error": why}, status=502)

    async def attempt(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Send both halves once."""
        half = {**prefill_half(body), TICKET: ASK}
        path, key = request.path_qs, request.headers.get("Authorization")
        more: dict[str, Any] = {"headers": {"Authorization": key} if key else {}}
        async with self.client.post(next(self.prefill) + path, json=half, **more) as answer:
            if answer.status != 200:  # noqa: PLR2004
                return await copied(answer)
            ticket = parsed(await answer.read(), dict).get(TICKET)
        full = {**body, TICKET: ticket} if ticket else body  # Without: it computes the prompt.
        async with self.client.post(next(self.decode) + path, json=full, **more) as answer:
            return await self.forward(request, answer)

    async def forward(self, request: web.Request, answer: Any) -> web.StreamResponse:
        """Pass the answer of the decode engine on."""
        if answer.content_type != "text/event-stream" or answer.status >= 500:  # noqa: PLR2004
            return await copied(answer)
        kind = {"Content-Type": "text/event-stream"}
        response = web.StreamResponse(status=answer.status, headers=kind)
        line = await answer.content.readline()  # Until here, all can be tried again.
        if line.startswith(b'data: {"error"'):  # vLLM's status is 200 before it has a token.
            raise EngineError(line.decode(errors="replace").strip())
        try:
            await response.prepare(request)
            while line:
                if TICKET.encode() in line:
                    event = without_ticket(parsed(line.removeprefix(b"data:")))
                    line = f"data: {json.dumps(event)}\n".encode()
                await response.write(line)
                line = await answer.content.readline()
        except aiohttp.ClientConnectionResetError:
            return response  # The client has left.
        except (aiohttp.ClientError, EngineError) as error:  # The client has read a part.
            await response.write(f"data: {json.dumps({'error': str(error)})}\n\n".encode())
        await response.write_eof()
        return response


def prefill_half(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request of a client for one token, without a stream."""
    of_decode = ("stream", "stream_options", "min_tokens")
    half = {name: value for name, value in body.items() if name not in of_decode}
    one = {name: 1 for name in ("max_tokens", "max_completion_tokens") if name in body}
    return {**half, **(one or {"max_tokens": 1}), "stream": False}


async def copied(answer: aiohttp.ClientResponse) -> web.Response:
    """Return an answer that does not stream, without any ticket in it."""
    if answer.status >= 500:  # noqa: PLR2004 - an error of the engine
        raise EngineError(f"an engine answered {answer.status}")
    if answer.content_type == "application/json":
        return web.json_response(without_ticket(parsed(await answer.read())), status=answer.status)
    more = {"status": answer.status, "content_type": answer.content_type}
    return web.Response(body=await answer.read(), **more)


def parsed(text: bytes, kind: type = object) -> Any:
    """Return the JSON value of *text*, or raise `EngineError`."""
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), kind):
            return value
    raise EngineError(f"{text[:40]!r} is no JSON {kind.__name__}")


def without_ticket(value: Any) -> Any:
    """Return a JSON value without any ticket in it."""
    if isinstance(value, dict):
        return {name: without_ticket(part) for name, part in value.items() if name != TICKET}
    return [without_ticket(part) for part in value] if isinstance(value, list) else value


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
    app.add_routes(
        [web.get("/health", router.healthy), *(web.post(at, router.handle) for at in PATHS)]
    )
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()
