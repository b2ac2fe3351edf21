"""Refuse in SGLang's server process what its two engines cannot exchange.

The server process tokenizes requests. What it refuses reaches no scheduler, so nothing is held.

Invariant: a refusal is a `ValueError`, which SGLang answers with status 400.
"""

# ruff: noqa: ANN401 - requests and managers are of SGLang's classes, which are not imported
from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from kvspec.adapters.sglang import tickets
from kvspec.errors import SpecError
from kvspec.inputs import positive_int

log = logging.getLogger(__name__)

NAME = "kvspec"
# The host with which SGLang's own test requests say that they need no other engine.
FAKE = "2.2.2.2"
# The most log probabilities that SGLang's metadata buffers can hold for a token.
MOST_LOGPROBS = 128
# The largest port.
MOST_PORT = 65535


def role(server_args: Any) -> str:
    """Return "prefill" or "decode" for an engine with this backend, or ""."""
    mode = getattr(server_args, "disaggregation_mode", "null")
    own = getattr(server_args, "disaggregation_transfer_backend", "") == NAME
    return mode if own and mode in ("prefill", "decode") else ""


def _each(value: Any) -> list[Any]:
    """Return the values for all prompts of a request. SGLang takes a list, or one for all."""
    return [*value] if isinstance(value, (list, tuple)) else [value]


def _places(obj: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the room of each prompt of *obj*, with the host and the port of its ticket server."""
    rooms, hosts, ports = (
        _each(getattr(obj, f"bootstrap_{name}", None)) for name in ("room", "host", "port")
    )
    if type(room := getattr(obj, "bootstrap_room", None)) is int:
        # SGLang counts the rooms of a batch from a single one on.
        rooms = [room + place for place in range(_prompts(obj) or 1)]
    # Without a room or a host there is no prompt, or SGLang refuses the request.
    for place in range(max(len(rooms), len(hosts), len(ports))):
        yield tuple(each[place % len(each)] if each else None for each in (rooms, hosts, ports))  # type: ignore[misc]


def _prompts(obj: Any) -> int | None:
    """Return the number of prompts in a batch. 0 for a prompt that is no batch, None if unknown."""
    for name, depth in (("text", 1), ("input_ids", 2), ("input_embeds", 3)):
        value = whole = getattr(obj, name, None)
        if whole is None:
            continue
        for _ in range(depth):
            if not isinstance(value, list):
                return 0
            value = value[0] if value else None
        return len(whole)
    return None


def _check_lists(obj: Any) -> None:
    """Raise `SpecError` if a list has not one value for each prompt: SGLang would end, or wait."""
    prompts = _prompts(obj)
    for name in ("bootstrap_room", "bootstrap_host", "bootstrap_port"):
        values = getattr(obj, name, None)
        if isinstance(values, list) and prompts not in (None, len(values)):
            wanted = f"{prompts} values, one for each prompt" if prompts else "no list: one prompt"
            raise SpecError(name, values[:3], wanted)


def check(side: str, obj: Any) -> None:
    """Raise `SpecError` if no pair of engines can serve the request *obj*.

    Args:
        side: The role of this engine.
        obj: The request. Its rooms, hosts and ports are one for all prompts, or a list.
    """
    _check_lists(obj)
    for room, host, port in _places(obj):
        if host == FAKE:  # SGLang's own test requests. They use the buffers, but no other engine.
            continue
        tickets.check_room(room)
        # SGLang's scheduler would end if it cannot read them.
        if side == "decode" and not (isinstance(host, str) and host):
            wanted = "the host name or IP address of the prefill engine's bootstrap server"
            raise SpecError("bootstrap_host", host, wanted)
        if port is not None:
            positive_int("bootstrap_port", port, most=MOST_PORT)
    for count in _each(getattr(obj, "top_logprobs_num", None)):
        if count is not None and count > MOST_LOGPROBS:
            wanted = f"at most {MOST_LOGPROBS}, as SGLang's buffers between engines hold"
            raise SpecError("top_logprobs_num", count, wanted)
    for own in _each(getattr(obj, "sampling_params", None)):
        copies = own.get("n") if isinstance(own, dict) else getattr(own, "n", None)
        if copies not in (None, 1):
            raise SpecError("n", copies, "1: each answer needs a room of its own")


async def generate(
    original: Callable[..., AsyncGenerator[Any, None]], manager: Any, obj: Any, request: Any = None
) -> AsyncGenerator[Any, None]:
    """Refuse a request, or pass it on. Let the other half learn of a refusal."""
    own = role(manager.server_args)
    try:
        if own:
            check(own, obj)
        # Close the original at once if the caller closes this generator: the client has left.
        async with contextlib.aclosing(original(manager, obj, request)) as responses:
            async for response in responses:
                yield response
    except ValueError as error:
        if own:
            await asyncio.to_thread(_refused, own, manager.server_args, obj, error)
        raise


async def handle_batch(
    original: Callable[..., AsyncGenerator[Any, None]], manager: Any, obj: Any, *more: Any
) -> AsyncGenerator[Any, None]:
    """Refuse several answers to one prompt, which would share a room."""
    copies = getattr(obj, "parallel_sample_num", 1)
    if role(manager.server_args) and copies != 1:
        raise SpecError("n", copies, "1: each answer needs a room of its own")
    async with contextlib.aclosing(original(manager, obj, *more)) as responses:
        async for response in responses:
            yield response


async def release_memory(
    original: Callable[..., Any], manager: Any, obj: Any, *more: Any, **named: Any
) -> Any:
    """Refuse to give up memory that NIXL has registered."""
    if role(manager.server_args):
        rule = "not with kvspec: other engines may read and write this memory"
        raise SpecError("release_memory_occupation", True, rule=rule)  # noqa: FBT003
    return await original(manager, obj, *more, **named)


def _refused(own: str, server_args: Any, obj: Any, error: Exception) -> None:
    """Publish the refusal of all rooms of *obj*. Waits."""
    for room, address in _servers(own, server_args, obj):
        try:
            why = f"the {own} engine has rejected the request: {error}"[:1000]
            tickets.put(address, room, tickets.failure(room, why))
        except Exception as late:  # noqa: BLE001 - the client names the address
            # The other half waits until its own limit, or the room has a ticket.
            log.debug("The refusal of room %d is not published: %s", room, late)


def _servers(own: str, server_args: Any, obj: Any) -> Iterator[tuple[int, str]]:
    """Yield the valid rooms of *obj*, each with the address of its ticket server."""
    for room, host, port in _places(obj):
        if not tickets.is_room(room) or host == FAKE:
            continue
        if own == "prefill":
            yield room, tickets.own_address(server_args)
        elif isinstance(host, str) and host:
            yield room, f"{host}:{port or server_args.disaggregation_bootstrap_port}"
