"""Route requests between engines of two makers, vLLM and SGLang: examples/README.md.

    python examples/makers_router.py --prefill VLLM --decode SGLANG --rooms
    python examples/makers_router.py --prefill SGLANG --bootstrap HOST:PORT --decode VLLM

It extends `router.py`. vLLM answers the prefill half with the ticket, and takes it with the decode
half. SGLang stores it at its bootstrap server under the room of the request, and fetches it from
such a server, which here is one of this router.

vLLM's tickets have no log probabilities. SGLang needs the one of the first token, so this router
adds it. A changed ticket needs a new seal, so the router needs the engines' `KVSPEC_SECRET`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
from typing import Any

import aiohttp
import attrs
from aiohttp import web
from router import ASK, EngineError, Router, prefill_half, serve

from kvspec.adapters.sglang.tickets import MAX_ROOM, PATH, TicketServer
from kvspec.tickets import PrefillTicket

ROOMS = random.SystemRandom()
# Seconds between two looks for the ticket of a prompt that SGLang computes.
REST = 0.005
OK, ERROR = 200, 500


class MakersRouter(Router):
    """The engines of both makers. *bootstrap* is "" if vLLM prefills. *rooms*: SGLang decodes."""

    def __init__(
        self, prefill: list[str], decode: list[str], bootstrap: str, *, rooms: bool
    ) -> None:
        super().__init__(prefill, decode)
        self.bootstrap, self.tickets = bootstrap, TicketServer("127.0.0.1", 0) if rooms else None

    async def attempt(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Send both halves once."""
        url, half = next(self.prefill) + request.path, prefill_half(body)
        if not self.bootstrap:
            half |= {"kv_transfer_params": ASK, "return_tokens_as_token_ids": True}
            status, text = await self.ask(url, half)
            ticket = ticket_of(json.loads(text)) if status == OK else None
            return await self.decoded(request, body, ticket or refused(status, text))
        room = ROOMS.randint(1, MAX_ROOM)
        half |= address(self.bootstrap, room)
        # The prefill half ends when the decode half has read the prompt, or has declined it.
        asked = asyncio.ensure_future(self.ask(url, half))
        try:
            return await self.decoded(request, body, await self.found(room, asked))
        finally:
            asked.cancel()  # If it has not ended, SGLang frees the prompt.
            with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
                await asked

    async def ask(self, url: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Return the status and the text of an answer."""
        async with self.client.post(url, json=body) as answer:
            return answer.status, await answer.read()

    async def found(self, room: int, asked: asyncio.Future[Any]) -> PrefillTicket | web.Response:
        """Return the ticket of a room, or the answer with which SGLang refuses the prompt."""
        while True:
            async with self.client.get(f"http://{self.bootstrap}{PATH}{room}") as answer:
                params = (await answer.json(content_type=None)).get(str(room))
            if params is not None and "remote_failure" not in params:
                return PrefillTicket.from_params(params)
            if params is not None or asked.done():
                return refused(*await asked)
            await asyncio.sleep(REST)

    async def decoded(
        self, request: web.Request, body: dict[str, Any], ticket: PrefillTicket | web.Response
    ) -> web.StreamResponse:
        """Send the decode half with *ticket*, unless it is the answer."""
        if isinstance(ticket, web.Response):
            return ticket
        params = ticket.to_params()
        if self.tickets is None:
            body = {**body, "kv_transfer_params": {"do_remote_prefill": True, **params}}
        else:
            room = ROOMS.randint(1, MAX_ROOM)
            self.tickets.store(room, json.dumps(params).encode())
            body = body | address(self.tickets.address, room)
        async with self.client.post(next(self.decode) + request.path, json=body) as answer:
            if answer.status >= ERROR:
                raise EngineError(f"decode: {answer.status} {(await answer.text())[:500]}")
            return await self.forward(request, answer)


def address(server: str, room: int) -> dict[str, Any]:
    """Return the fields with which SGLang finds the ticket server of a request."""
    host, _, port = server.rpartition(":")
    return {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": room}


def refused(status: int, text: bytes) -> web.Response:
    """Return the answer for the client if the fault is its own. Raise otherwise."""
    if status == OK or status >= ERROR:
        raise EngineError(f"prefill: {status} {text[:500]!r}")
    return web.Response(status=status, body=text, content_type="application/json")


def ticket_of(answer: dict[str, Any]) -> PrefillTicket | None:
    """Return the ticket in vLLM's answer, with the log probabilities of the first token."""
    if not (params := answer.get("kv_transfer_params")):
        return None
    ticket = PrefillTicket.from_params(params)
    if not (found := answer["choices"][0].get("logprobs")):
        return ticket
    if (content := found.get("content")) is not None:  # Of a chat.
        pairs = {
            each["token"]: each["logprob"] for each in [content[0], *content[0]["top_logprobs"]]
        }
    else:
        pairs = {found["tokens"][0]: found["token_logprobs"][0], **found["top_logprobs"][0]}
    tokens = {int(name.removeprefix("token_id:")): min(0.0, pairs[name]) for name in pairs}
    return attrs.evolve(ticket, first_logprobs=sorted(tokens.items(), key=lambda pair: -pair[1]))


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", nargs="+", required=True)
    parser.add_argument("--decode", nargs="+", required=True)
    parser.add_argument("--bootstrap", default="", help="SGLang prefills: its bootstrap server")
    parser.add_argument("--rooms", action="store_true", help="SGLang decodes")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    given = options.prefill, options.decode, options.bootstrap
    serve(MakersRouter(*given, rooms=options.rooms), options)


if __name__ == "__main__":
    main()
