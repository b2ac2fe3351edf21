"""SGLang's server process refuses what would end a scheduler or would be held for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

import kvspec
from kvspec.adapters.sglang import frontend_hooks, plugin, tickets

pytestmark = pytest.mark.adapters

WORKS = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 5}


def served(role: str, port: int = 1, **fields: Any) -> list[str]:
    """Return the responses of an engine's server to a request with *fields*.

    *port* is that of its ticket server.
    """

    async def original(*_: Any) -> AsyncGenerator[str, None]:
        yield "answer"

    async def responses() -> list[str]:
        settings = SimpleNamespace(
            disaggregation_mode=role,
            disaggregation_transfer_backend="kvspec",
            disaggregation_bootstrap_port=port,
            host="127.0.0.1",
        )
        manager = SimpleNamespace(server_args=settings)
        asked = SimpleNamespace(**WORKS | fields)
        return [each async for each in frontend_hooks.generate(original, manager, asked)]

    return asyncio.run(responses())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"bootstrap_host": None}, "bootstrap_host"),
        ({"bootstrap_host": 7}, "bootstrap_host"),
        ({"bootstrap_host": ""}, "bootstrap_host"),
        ({"bootstrap_host": [frontend_hooks.FAKE, None]}, "bootstrap_host"),
        ({"bootstrap_port": "x"}, "bootstrap_port"),
        ({"bootstrap_port": 10**20}, "bootstrap_port"),
        ({"bootstrap_port": [1, 0]}, "bootstrap_port"),
        ({"bootstrap_room": "5"}, "bootstrap_room"),
        ({"bootstrap_room": [5, None]}, "bootstrap_room"),
        ({"bootstrap_room": 0, "bootstrap_host": ["127.0.0.1"]}, "bootstrap_room"),
        ({"bootstrap_host": frontend_hooks.FAKE, "top_logprobs_num": 129}, "top_logprobs_num"),
        ({"sampling_params": [{"n": 1}, {"n": 2}]}, "n"),
        ({"bootstrap_room": [5], "text": "a"}, "bootstrap_room"),
        ({"bootstrap_room": [5], "input_ids": [1, 2]}, "bootstrap_room"),
        ({"bootstrap_room": [5], "text": ["a", "b"]}, "bootstrap_room"),
        ({"bootstrap_host": ["127.0.0.1"], "input_embeds": [[0.5], [0.5]]}, "bootstrap_host"),
        ({"bootstrap_port": [1, 2, 3], "input_ids": [[1], [2]]}, "bootstrap_port"),
        ({"bootstrap_room": tickets.MAX_ROOM, "text": ["a", "b"]}, "bootstrap_room"),
    ],
)
def test_request_that_would_end_the_scheduler_is_refused(fields: Any, field: str) -> None:
    """SGLang's scheduler reads the host as a str, and stores log probabilities in fixed buffers."""
    with pytest.raises(kvspec.SpecError) as caught:
        served("decode", **fields)
    assert field == caught.value.field


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bootstrap_room": [5, 6], "bootstrap_host": ["127.0.0.1", "::1"]},
        {"bootstrap_port": None},
        {"text": "a"},
        {"bootstrap_room": [5, 6], "text": ["a", "b"]},
        {"bootstrap_room": [5], "input_ids": [[1, 2]]},
        {"bootstrap_room": [5, 6], "input_embeds": [[[0.5]], [[0.5]]]},
        {"bootstrap_host": frontend_hooks.FAKE, "bootstrap_room": 0},
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_request_that_can_be_served_is_passed_on(role: str, fields: Any) -> None:
    assert ["answer"] == served(role, **fields)


def test_other_half_learns_that_all_prompts_of_a_batch_were_refused() -> None:
    """SGLang gives the prompts of a batch one room after the other, from a single one on."""
    server = tickets.TicketServer("127.0.0.1", 0)
    try:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(kvspec.SpecError):
            served("prefill", port, text=["a", "b", "c"], top_logprobs_num=129)
        assert {5, 6, 7} == {*tickets.get(server.address, range(4, 9))}
    finally:
        server.close()


def test_prefill_half_needs_no_host() -> None:
    """It publishes its ticket at its own server."""
    assert ["answer"] == served("prefill", bootstrap_host=None)


def test_passes_that_are_launched_until_now_are_those_of_the_forward_stream() -> None:
    """The event is recorded at once: later passes do not write the memory of this request."""
    recorded: list[object] = []

    class Event:
        def record(self, stream: object) -> None:
            recorded.append(stream)

        def query(self) -> bool:
            return False

    scheduler = SimpleNamespace(
        device="cuda",
        enable_overlap=True,
        forward_stream="forward",
        device_module=SimpleNamespace(Event=Event),
    )
    ended = plugin._forwards(scheduler)
    assert ["forward"] == recorded
    assert not ended()
    for without in ({"device": "cpu"}, {"enable_overlap": False}):
        assert plugin._forwards(SimpleNamespace(**vars(scheduler) | without))()
    assert ["forward"] == recorded


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_memory_is_not_released_while_other_engines_use_it(role: str) -> None:
    async def original(*_: Any) -> None:
        raise AssertionError("it was released")

    settings = SimpleNamespace(disaggregation_mode=role, disaggregation_transfer_backend="kvspec")
    manager = SimpleNamespace(server_args=settings)
    with pytest.raises(kvspec.SpecError) as caught:
        asyncio.run(frontend_hooks.release_memory(original, manager, None))
    assert "release_memory_occupation" == caught.value.field


def test_several_answers_to_one_prompt_are_refused() -> None:
    """SGLang may have given all of them the same room by then."""

    async def original(*_: Any) -> AsyncGenerator[str, None]:
        yield "answer"

    async def responses() -> list[str]:
        settings = SimpleNamespace(
            disaggregation_mode="decode", disaggregation_transfer_backend="kvspec"
        )
        asked = SimpleNamespace(parallel_sample_num=2)
        manager = SimpleNamespace(server_args=settings)
        return [each async for each in frontend_hooks.handle_batch(original, manager, asked)]

    with pytest.raises(kvspec.SpecError) as caught:
        asyncio.run(responses())
    assert "n" == caught.value.field
