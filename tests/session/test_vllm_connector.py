"""The connector moves prompts between two engines of vLLM, and a failed request fails alone."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import vllm_like as like
from vllm_serving import (
    BLOCKS,
    CONNECTOR,
    SIZE,
    WORLDS,
    Engine,
    Factory,
    Request,
    World,
    configs,
    installed,
    made,
    until,
)

import kvspec
from kvspec.adapters.vllm import adapters, content, engine_spec, scheduler_side
from kvspec.adapters.vllm.content import content_of_request, sampling_of_request
from kvspec.adapters.vllm.metrics import _COUNTERS, WorkerNumbers
from kvspec.adapters.vllm.scheduler_side import Scheduling, Served
from kvspec.adapters.vllm.worker_side import Settings
from kvspec.session import new_remote_id
from kvspec.tickets import PrefillTicket

pytestmark = [pytest.mark.adapters, pytest.mark.usefixtures("simulated")]


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    """Provide the base class of vLLM for the connector."""
    with installed():
        yield


TABLES = [1, 2, 3, 4], [0, 5, 6, 7]
"""Blocks of 14 tokens, 4 in each. The first query reads the window of 8 from token 6 on."""
OTHERS = [9, 8, 7, 6], [0, 4, 3, 2]


def params_of(num_tokens: int = 7) -> dict[str, Any]:
    """Return the transfer parameters that a producer sends for a request."""
    prompt = PrefillTicket(
        engine_id="p",
        addresses=("127.0.0.1:9",),
        remote_id=new_remote_id("p-1"),
        computed_tokens=num_tokens,
        tables={"group0": kvspec.BlockTable([1, 2])},
        content=content_of_request(Request("p-1", num_tokens), num_tokens),
    )
    return {"do_remote_prefill": True, **prompt.to_params()}


HELD = params_of()


def asked(num_tokens: int = 13, cached: int = 0, tables: Any = OTHERS) -> kvspec.TransferRequest:
    """Return the request that decoding a prompt of 14 tokens makes."""
    return kvspec.TransferRequest(
        request_id="d",
        num_tokens=num_tokens,
        cached_tokens=cached,
        producer_blocks=dict(zip(("group0", "group1"), TABLES, strict=True)),
        consumer_blocks=dict(zip(("group0", "group1"), tables, strict=True)),
    )


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("tp", "pp", "cached"),
    [
        ((1, 1), (1, 1), 0),
        ((2, 3), (1, 1), 4),
        ((3, 2), (1, 1), 0),
        ((1, 1), (2, 1), 4),
        ((2, 1), (1, 2), 0),
        ((2, 3), (2, 2), 0),
    ],
)
def test_prompt_moves_without_its_last_token(
    tp: tuple[int, int], pp: tuple[int, int], cached: int
) -> None:
    """Each byte is right for any numbers of ranks. Every rank reports the end once."""
    # Ten ranks in one process need long to connect on a busy machine.
    patient = {"timeout": 60.0}
    with (
        Engine("p", tp[0], pp=pp[0], **patient) as producer,
        Engine("d", tp[1], pp=pp[1], **patient) as consumer,
    ):
        moved = asked(cached=cached)
        producer.fill(moved)
        consumer.spoil(moved)
        params = producer.prefill(Request("p-1", 14), *TABLES)
        request = Request("d-1", 14, params)
        assert (13 - cached, True) == consumer.decode(request, *OTHERS, cached=cached)
        ended = {"p-1": tp[0] * pp[0]}, {"d-1": tp[1] * pp[1]}
        until(lambda: ended == (producer.sent, consumer.received), producer, consumer, seconds=90.0)
        assert {} == consumer.failed
        assert [] == consumer.wrong(moved)


def test_engines_with_a_short_lease_load() -> None:
    """The heartbeat follows the lease, because a heartbeat of half of the lease is refused."""
    with Engine("p", lease=2.0) as producer, Engine("d", lease=2.0) as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        consumer.decode(Request("d-1", 14, params), *OTHERS)
        until(lambda: consumer.received, producer, consumer)
        assert {} == consumer.failed


@pytest.mark.nixl
@pytest.mark.parametrize("staging", [0, 4])
def test_prompt_moves_between_blocks_of_other_sizes(staging: int) -> None:
    """Blocks of 4 tokens are read into blocks of 8, with and without a staging area."""
    with Engine("p", 2, 4) as producer, Engine("d", 1, 8, staging=staging) as consumer:
        moved = asked(tables=([3, 5], [0, 4]))
        moved = kvspec.TransferRequest(
            request_id="d",
            num_tokens=13,
            producer_blocks=moved.producer_blocks,
            consumer_blocks={"group0": [3, 5], "group1": [2, 4]},
        )
        producer.fill(moved)
        consumer.spoil(moved)
        params = producer.prefill(Request("p-1", 14), *TABLES)
        consumer.decode(Request("d-1", 14, params), [3, 5], [2, 4])
        until(lambda: consumer.received, producer, consumer)
        assert {} == consumer.failed
        assert [] == consumer.wrong(moved)


@pytest.mark.parametrize(
    ("block", "tokens", "cached", "tables", "hashed"),
    [
        # The window of the last token begins at token 6, inside block 9.
        (8, 14, 0, ([3, 5], [9, 4]), [[3], []]),
        (4, 14, 0, OTHERS, [[9, 8, 7], [3]]),
        # Tokens 0 to 7 are cached, so block 9 is complete and was hashed before.
        (8, 14, 8, ([3, 5], [9, 4]), [[], []]),
        # The window begins at token 12, at the start of block 3.
        (4, 20, 0, ([9, 8, 7, 6, 5], [0, 0, 0, 3, 2]), [[9, 8, 7, 6], [3]]),
        # All tokens are in the window.
        (4, 8, 0, ([9, 8], [4, 3]), [[9], [4]]),
    ],
)
def test_block_in_which_a_window_begins_stays_out_of_the_prefix_cache(
    block: int, tokens: int, cached: int, tables: Any, hashed: list[list[int]]
) -> None:
    """A later, shorter prompt would read the tokens before the window, which did not move."""
    with Engine("p") as producer, Engine("d", block=block) as consumer:
        params = producer.prefill(Request("p-1", tokens), [1, 2, 3, 4, 8], [9, 5, 6, 7, 10])
        consumer.decode(Request("d-1", tokens, params), *tables, cached=cached)
        until(lambda: consumer.received, producer, consumer)
        assert {} == consumer.failed
        assert hashed == consumer.hashed("d-1", tokens - 1, *tables)


def test_prompt_that_is_cached_is_declined() -> None:
    """Nothing moves, and the producer frees the request at once."""
    with Engine("p", 2) as producer, Engine("d", 3) as consumer:
        params = producer.prefill(Request("p-1", 13), [1, 2, 3, 4], [0, 5, 6, 7])
        assert (0, False) == consumer.decode(Request("d-1", 13, params), *OTHERS, cached=12)
        until(lambda: {"p-1": 2} == producer.sent, producer, consumer)
        assert {} == consumer.received


def test_request_that_the_front_end_rejects_is_declined(caplog: pytest.LogCaptureFixture) -> None:
    """VLLM submits its ticket with the prompt [0], and aborts it at once."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        rejected = Request("d-1", 1, params, abort_immediately=True)
        consumer.scheduler.on_new_request(rejected)
        rejected.status.name = "FINISHED_ABORTED"
        assert (False, None) == consumer.scheduler.request_finished_all_groups(rejected, ([], []))
        until(lambda: producer.sent, producer, consumer, seconds=10.0)
        assert {"p-1": 1} == producer.sent
        assert not logged(caplog, "computed here")


@pytest.mark.parametrize("loading", [False, True])
def test_rejected_copy_of_a_ticket_declines_nothing(*, loading: bool) -> None:
    """Another request that was admitted uses the ticket: it waits, or it loads."""
    with Engine("p") as producer, Engine("d") as consumer:
        moved = asked()
        producer.fill(moved)
        consumer.spoil(moved)
        params = producer.prefill(Request("p-1", 14), *TABLES)
        first, copy = Request("d-1", 14, params), Request("d-2", 1, params, abort_immediately=True)
        if loading:
            consumer.decode(first, *OTHERS)
        else:
            consumer.scheduler.on_new_request(first)
        consumer.scheduler.on_new_request(copy)
        copy.status.name = "FINISHED_ABORTED"
        consumer.scheduler.request_finished_all_groups(copy, ([], []))
        if not loading:
            for _ in range(20):
                consumer.step()
                producer.step()
            assert {} == producer.sent
            consumer.load(first, *OTHERS)
        until(lambda: consumer.received and producer.sent, producer, consumer)
        assert {} == consumer.failed
        assert [] == consumer.wrong(moved)


def test_prompt_is_held_while_its_request_waits_in_the_queue() -> None:
    """The queue takes three times as long as the producer holds a prompt that nobody wants."""
    with Engine("p", hold=1.5, lease=1.5) as producer, Engine("d", lease=1.5) as consumer:
        moved = asked()
        producer.fill(moved)
        consumer.spoil(moved)
        params = producer.prefill(Request("p-1", 14), *TABLES)
        request = Request("d-1", 14, params)
        consumer.scheduler.on_new_request(request)
        end = time.monotonic() + 5.0
        until(lambda: time.monotonic() > end, producer, consumer)
        assert {} == producer.sent
        consumer.load(request, *OTHERS)
        until(lambda: consumer.received and producer.sent, producer, consumer)
        assert {} == consumer.failed
        assert [] == consumer.wrong(moved)


def test_request_that_is_aborted_while_it_loads_frees_both_sides() -> None:
    """VLLM waits until the connector reports that nothing writes the blocks any more."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        request = Request("d-1", 14, params)
        consumer.decode(request, *OTHERS)
        request.status.name = "FINISHED_ABORTED"
        consumer.scheduler.request_finished_all_groups(request, OTHERS)
        until(lambda: consumer.received and producer.sent, producer, consumer)
        assert ({"d-1": 1}, {"p-1": 1}) == (consumer.received, producer.sent)


NUMBERED = "renderer0-mm-5-image-0"
"""VLLM's name of an image that it has not hashed."""


def image(identifier: str, offset: int = 2) -> Any:
    """Return the feature of an image of three tokens."""
    position = SimpleNamespace(offset=offset, length=3)
    return SimpleNamespace(identifier=identifier, mm_position=position)


def adapter(folder: Path, name: str, content: bytes) -> Any:
    """Return the request for a LoRA adapter whose weights are *content*."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "adapter_model.safetensors").write_bytes(content)
    return SimpleNamespace(lora_name=name, lora_path=str(folder / name), lora_int_id=1)


def test_ticket_of_another_content_is_declined_by_the_name_of_the_field(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The tokens are equal. The image, the adapter, its weights or the tenant differ."""
    one, two = adapter(tmp_path, "sql", b"1"), adapter(tmp_path, "chat", b"2")
    hub = SimpleNamespace(lora_name="sql", lora_path="someone/sql", lora_int_id=1)
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("media", {"mm_features": [image("cat")]}, {"mm_features": [image("dog")]}),
        ("media", {"mm_features": [image("cat")]}, {"mm_features": [image("cat", 3)]}),
        ("media", {"mm_features": [image("cat")]}, {}),
        ("media", {"mm_features": [SimpleNamespace()]}, {"mm_features": [SimpleNamespace()]}),
        # vLLM numbers items if it has no cache that needs their hashes. The images differ.
        ("media", {"mm_features": [image(NUMBERED)]}, {"mm_features": [image(NUMBERED)]}),
        (
            "media",
            {"mm_features": [image(f"sql:{NUMBERED}")]},
            {"mm_features": [image(f"sql:{NUMBERED}")]},
        ),
        ("adapter", {"lora_request": one}, {}),
        ("adapter", {}, {"lora_request": one}),
        ("adapter", {"lora_request": one}, {"lora_request": two}),
        ("adapter", {"lora_request": hub}, {"lora_request": hub}),
        ("embeddings", {"prompt_embeds": object()}, {}),
        ("salt", {"cache_salt": "a"}, {"cache_salt": "b"}),
        ("salt", {"cache_salt": "a"}, {}),
    ]
    with Engine("p") as producer, Engine("d") as consumer:
        for number, (field, held, wanted) in enumerate(cases):
            params = producer.prefill(Request(f"p-{number}", 14, **held), *TABLES)
            request = Request(f"d-{number}", 14, params, **wanted)
            assert (0, False) == consumer.decode(request, [1], [1])
            assert logged(caplog, f"d-{number}", f"remote_content.{field}")
        until(lambda: len(cases) == len(producer.sent), producer, consumer)
        assert {} == consumer.received


def test_ticket_of_an_equal_content_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same image, adapter and tenant. The adapter was loaded from two copies of its folder."""
    loaded = dict[int, str | None]()
    monkeypatch.setattr(adapters, "_loaded", loaded)
    (tmp_path / "copy").mkdir()
    held, wanted = (
        {
            "lora_request": adapter(folder, "sql", b"weights"),
            "mm_features": [image("cat")],
            "cache_salt": "tenant",
        }
        for folder in (tmp_path, tmp_path / "copy")
    )
    loaded[1] = adapters.digest_at(held["lora_request"].lora_path)
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14, **held), *TABLES)
        assert (13, True) == consumer.decode(Request("d-1", 14, params, **wanted), *OTHERS)
        until(lambda: consumer.received, producer, consumer)
        assert {} == consumer.failed
        wanted["lora_request"] = adapter(tmp_path / "copy", "sql", b"new weights")
        params = producer.prefill(Request("p-2", 14, **held), *TABLES)
        assert (0, False) == consumer.decode(Request("d-2", 14, params, **wanted), [1], [1])


@pytest.mark.parametrize("where", ["producer", "consumer"])
def test_ticket_of_an_adapter_whose_files_a_worker_has_not_loaded_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """The workers have loaded other files than the scheduler has read later."""
    lora = adapter(tmp_path, "sql", b"weights")
    right = adapters.digest_at(lora.lora_path)
    loaded: dict[int, str | None] = {1: right if where == "consumer" else "of other files"}
    monkeypatch.setattr(adapters, "_loaded", loaded)
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14, lora_request=lora), *TABLES)
        producer.step()
        loaded[1] = right if where == "producer" else "of other files"
        assert (13, True) == consumer.decode(Request("d-1", 14, params, lora_request=lora), *OTHERS)
        until(lambda: consumer.failed, producer, consumer)
        until(lambda: producer.sent, producer, consumer)
    name = {"producer": "p-1 is not held", "consumer": "d-1 is not read"}[where]
    assert f"{name}: adapters[1]='of other files'" in caplog.text


def test_request_that_is_aborted_before_it_is_scheduled_is_declined() -> None:
    """The producer frees it at once."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        request = Request("d-1", 14, params)
        consumer.scheduler.on_new_request(request)
        request.status.name = "FINISHED_ABORTED"
        aborted = consumer.scheduler.request_finished_all_groups(request, ([], []))
        assert (False, None) == aborted
        until(lambda: producer.sent, producer, consumer)
        assert {"p-1": 1} == producer.sent


def test_request_fails_when_its_producer_is_absent(caplog: pytest.LogCaptureFixture) -> None:
    """A request of another producer is done."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        assert params is not None
        lost = attrs.evolve(
            PrefillTicket.from_params(params), addresses=("127.0.0.1:9",)
        ).to_params()
        consumer.decode(Request("d-1", 14, {**params, **lost}), *OTHERS)
        until(lambda: consumer.failed, consumer)
        assert logged(caplog, "d-1", "127.0.0.1:9")
        consumer.decode(Request("d-2", 14, params), *OTHERS)
        until(lambda: len(consumer.received) > 1, producer, consumer)
        assert ({"d-1": 1, "d-2": 1}, {"d-1": 1}) == (consumer.received, consumer.failed)


def test_request_fails_after_its_lease(caplog: pytest.LogCaptureFixture) -> None:
    """The producer has freed it. Both sides log it."""
    with Engine("p", hold=0.2) as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        until(lambda: producer.sent, producer)
        assert logged(caplog, "p-1", "lease")
        consumer.decode(Request("d-1", 14, params), *OTHERS)
        until(lambda: consumer.received, producer, consumer)
        assert {"d-1": 1} == consumer.failed == consumer.received
        assert logged(caplog, "d-1", "gone")


def test_request_with_wrong_tables_fails_and_is_declined(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A table is too short, or a block is outside the pool. The log names the field."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        consumer.decode(Request("d-1", 14, params), [9, 8], [0, 4, 3, 2])
        params = producer.prefill(Request("p-2", 14), *TABLES)
        consumer.decode(Request("d-2", 14, params), [BLOCKS, 8, 7, 6], [0, 4, 3, 2])
        until(lambda: len(consumer.failed) > 1, producer, consumer)
        assert {"d-1": 1, "d-2": 1} == consumer.failed == consumer.received
        assert logged(caplog, "d-1", "block_ids['group0']")
        assert logged(caplog, "d-2", "consumer_blocks['group0']")
        until(lambda: len(producer.sent) > 1, producer, consumer)


def test_request_fails_when_a_needed_token_is_in_the_null_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Block 0 contains no tokens, on either side."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), [1, 2, 3, 4], [0, 0, 6, 7])
        consumer.decode(Request("d-1", 14, params), *OTHERS)
        params = producer.prefill(Request("p-2", 14), *TABLES)
        consumer.decode(Request("d-2", 14, params), [9, 8, 7, 6], [0, 0, 3, 2])
        until(lambda: len(consumer.failed) > 1, producer, consumer)
        assert logged(caplog, "d-1", "6..7")
        assert logged(caplog, "d-2", "consumer_blocks['group1']")


def test_worker_rejects_an_unknown_attention_backend() -> None:
    """The order of its pages is unknown."""
    vllm_config, config = configs("p", 0, 1, 4, {})
    unknown = SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(full_cls_name=lambda: ("other", "Backend"))
    )
    layers = vllm_config.compilation_config.static_forward_context
    vllm_config.compilation_config.static_forward_context = dict.fromkeys(layers, unknown)
    worker = made(vllm_config, "WORKER", config)
    WORLDS.append(World(1))
    with pytest.raises(kvspec.SpecError, match=r"other\.Backend"):
        WORLDS[-1].run([lambda: worker.register_kv_caches({})])


def test_request_fails_when_models_differ(caplog: pytest.LogCaptureFixture) -> None:
    """The caches of the engines have the same layout, but other weights."""
    with Engine("p", model="one") as producer, Engine("d", model="other") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        consumer.decode(Request("d-1", 14, params), *OTHERS)
        until(lambda: consumer.failed, producer, consumer)
        assert logged(caplog, "d-1", "model")


def logged(caplog: pytest.LogCaptureFixture, *facts: str) -> bool:
    """Return whether a line of the log contains all *facts*."""
    lines = [record.getMessage() for record in caplog.records]
    return any(all(fact in line for fact in facts) for line in lines)


def scheduling(spec: Any = None, *, ready: bool = True, name: str = "d") -> Scheduling:
    """Return the scheduler's side of an engine with one layer. Its workers may be *ready*."""
    spec = spec or like.FullAttentionSpec(**like.HEADS)
    config = like.config((["l"], spec))
    vllm_config, _ = configs(name, 0, 1, 4, {})
    side = Scheduling(vllm_config, config)
    if ready:
        engine = engine_spec(config, backends=like.FLASH)
        rank = Served(engine=engine, engine_id=name, address="127.0.0.1:9")
        side.set_xfer_handshake_metadata_pp_aware({(0, 0): rank})
    return side


@pytest.mark.parametrize(
    ("params", "count"),
    [
        (HELD, 7),
        (params_of(14), 13),  # vLLM computes the last token.
        (params_of(20), 0),  # The prompt of the request is shorter.
        ({**HELD, "remote_num_tokens": 14}, 0),
        ({**HELD, "remote_block_ids": {"group0": [0, [3, 4]]}}, 0),
        ({**HELD, "remote_request_id": params_of()["remote_request_id"]}, 0),
        ({**HELD, "remote_num_tokens": -1}, 0),
        ({**HELD, "remote_addresses": None}, 0),
        ({**HELD, "do_remote_prefill": False}, 0),
        ({"do_remote_prefill": True}, 0),
        (None, 0),
    ],
)
def test_scheduler_fetches_tokens_only_for_valid_parameters(
    params: dict[str, Any] | None, count: int
) -> None:
    """A router may pass on changed or senseless parameters. Then no request waits."""
    one, request = scheduling(), Request("d-1", 14, params)
    one.on_new_request(request)
    assert (count, count > 0) == one.get_num_new_matched_tokens(request, 0)


def test_prompt_with_parameters_of_another_is_computed_locally(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The held prompt is not read. It is declined at once, so its blocks are not lost."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        other = Request("d-1", 14, params)
        other.prompt_token_ids[3] = 99
        consumer.scheduler.on_new_request(other)
        assert (0, False) == consumer.scheduler.get_num_new_matched_tokens(other, 0)
        assert logged(caplog, "d-1", "remote_content")
        until(lambda: producer.sent, producer, consumer, seconds=10.0)


def test_samples_of_one_prompt_read_it_once_and_compute_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For n samples, vLLM makes n requests with the same parameters. The ticket is not declined."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        assert (13, True) == consumer.decode(Request("0_d-1", 14, params), *OTHERS)
        assert (0, False) == consumer.decode(Request("1_d-1", 14, params), [1], [1])
        until(lambda: consumer.received and producer.sent, producer, consumer)
        # It was read before. A third sample that arrives late is computed, too.
        assert (0, False) == consumer.decode(Request("2_d-1", 14, params), [1], [1])
        until(lambda: True, producer, consumer)
        assert ({"0_d-1": 1}, {}) == (consumer.received, consumer.failed)
        assert {"p-1": 1} == producer.sent
        assert all(logged(caplog, name, "remote_request_id") for name in ("1_d-1", "2_d-1"))


def test_samples_that_go_to_several_engines_read_their_prompt_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With data parallelism, vLLM passes the samples to engines that do not know each other."""
    with Engine("p") as producer, Engine("d_dp0") as first, Engine("d_dp1") as second:
        moved = asked()
        producer.fill(moved)
        first.spoil(moved)
        params = producer.prefill(Request("p-1", 14), *TABLES)
        assert (0, False) == second.decode(Request("1_d-1", 14, params), [1], [1])
        assert logged(caplog, "1_d-1", "remote_request_id")
        until(lambda: True, producer, second)
        assert (13, True) == first.decode(Request("0_d-1", 14, params), *OTHERS)
        until(lambda: first.received and producer.sent, producer, first, second)
        assert ({}, {}) == (first.failed, second.failed)
        assert [] == first.wrong(moved)


def test_ticket_of_the_engine_itself_is_not_fetched(caplog: pytest.LogCaptureFixture) -> None:
    """A router that has one engine sends both halves of a request to it."""
    with Engine("p", hold=1.0) as engine:
        params = engine.prefill(Request("p-1", 14), *TABLES)
        for request in (
            Request("d-1", 14, params),
            Request("d-2", 1, dict(params or {}), abort_immediately=True),
        ):
            assert (0, False) == engine.decode(request, *OTHERS)
            engine.scheduler.request_finished_all_groups(request, OTHERS)
        assert logged(caplog, "d-1", "computed here")
        assert not logged(caplog, "d-2", "computed here")
        until(lambda: engine.sent, engine)
        (worker,) = engine.workers
        assert 0 == worker._session.stats().counters.declines_lost
        assert ({"p-1": 1}, {}, {}) == (engine.sent, engine.received, engine.failed)


def test_fewer_tokens_than_offered_are_fetched_from_the_front() -> None:
    """VLLM rounds the number down for some models. Then it computes the last tokens itself."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        request = Request("d-1", 14, params)
        consumer.scheduler.on_new_request(request)
        assert (9, True) == consumer.scheduler.get_num_new_matched_tokens(request, 4)
        blocks = SimpleNamespace(get_block_ids=lambda: OTHERS)
        consumer.scheduler.update_state_after_alloc(request, blocks, 4)
        ((_, transfer),) = consumer.scheduler.build_connector_meta(None).fetched
        assert (4, 8) == (transfer.cached_tokens, transfer.num_tokens)


def test_ranks_of_another_connector_are_refused() -> None:
    """A `MultiConnector` passes the metadata of its first connector to all of them."""
    with pytest.raises(kvspec.SpecError, match="connectors"):
        scheduling().set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace()})


def test_scheduler_forgets_old_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its memory would grow with each request."""
    monkeypatch.setattr(scheduler_side, "_REMEMBERED", 4)
    one = scheduling()
    for params, count in ((HELD, 7), (HELD, 0), *((params_of(), 7) for _ in range(4)), (HELD, 7)):
        request = Request("d-1", 14, params)
        one.on_new_request(request)
        assert (count, count > 0) == one.get_num_new_matched_tokens(request, 0)
        one.request_finished_all_groups(request, ([1],))
        one.build_connector_meta(None)


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
def test_request_that_did_not_finish_is_not_held(status: str) -> None:
    """It has no transfer parameters."""
    request = Request("p-1", 14, {"do_remote_decode": True})
    request.status.name = status
    assert (False, None) == scheduling().request_finished_all_groups(request, ([1],))


def test_request_that_ends_before_workers_register_is_not_held(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log contains the reason."""
    request = Request("p", 4, {"do_remote_decode": True})
    none = scheduling(ready=False)
    assert (False, None) == none.request_finished_all_groups(request, ([1],))
    assert logged(caplog, "p is", "kv_caches")


HEADS = {**like.HEADS, "block_size": 32}


@pytest.mark.parametrize(
    ("spec", "tokens", "computed"),
    [
        (like.FullAttentionSpec(**HEADS), 96, 96),
        (like.SlidingWindowSpec(**HEADS, sliding_window=64), 94, 94),
        (like.SlidingWindowSpec(**HEADS, sliding_window=64), 95, 94),
        (like.ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=32), 96, 95),
        (like.state("mamba1", ((3, 4), (4, 2))), 50, 49),
        (like.state("mamba1", ((3, 4), (4, 2))), 1, 1),
    ],
    ids=["full", "window", "window at a block", "chunk", "state", "one token"],
)
def test_producer_omits_the_last_token_when_vllm_frees_what_it_reads(
    spec: Any, tokens: int, computed: int
) -> None:
    """It then samples one token. A prompt that the engine decodes itself stays complete."""
    one, request = scheduling(spec), Request("p-1", tokens, {"do_remote_decode": True})
    here = Request("l-1", tokens)
    one.on_new_request(request)
    one.on_new_request(here)
    assert (computed, computed, computed) == (
        len(request.prompt_token_ids),
        request.num_tokens,
        request.num_prompt_tokens,
    )
    assert (1 if computed < tokens else 16) == request.max_tokens
    assert (tokens, 16) == (here.num_tokens, here.max_tokens)
    # The token that is sampled after a part of the prompt is not the first new one.
    request.num_computed_tokens = computed
    _, params = one.request_finished_all_groups(request, [list(range(1, 8))])
    assert params is not None
    first = PrefillTicket.from_params(params).first_token
    assert (5 if computed == tokens else None) == first


@pytest.mark.parametrize("mixed", [False, True])
def test_producer_omits_the_last_token_of_embeddings(*, mixed: bool) -> None:
    """VLLM's workers end if tokens and embeddings of a prompt have different lengths."""
    one = scheduling(like.state("mamba1", ((3, 4), (4, 2))))
    request: Any = Request("p-1", 6, {"do_remote_decode": True}, prompt_embeds=[[0.5]] * 6)
    request.prompt_is_token_ids = [True] * 6 if mixed else None
    if not mixed:
        request.prompt_token_ids = None
    one.on_new_request(request)
    assert (5, 5, 5) == (request.num_prompt_tokens, request.num_tokens, len(request.prompt_embeds))
    if mixed:
        assert (5, 5) == (len(request.prompt_token_ids), len(request.prompt_is_token_ids))
    assert 1 == request.max_tokens


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"host": 5}, "host"),
        ({"lease": -1}, "lease"),
        ({"hold": "long"}, "hold"),
        ({"ports": 1}, "ports"),
        ({"staging": -1}, "staging"),
        ({"staging": 1.5}, "staging"),
        ({"model": ""}, "model"),
    ],
)
def test_connector_rejects_invalid_settings(extra: dict[str, Any], name: str) -> None:
    """They are settings of `kv_connector_extra_config`."""
    with pytest.raises(kvspec.SpecError, match=name):
        Engine("p", **extra)


def test_zero_clears_ranges_of_tensors_by_address() -> None:
    """Some models of vLLM read whole blocks, so unwritten ranges must be zero."""
    torch = pytest.importorskip("torch")
    from kvspec.adapters.vllm.tensors import zero  # noqa: PLC0415

    memory = torch.ones(64, dtype=torch.uint8)
    other = torch.ones(4, dtype=torch.int32)
    places = [[memory.data_ptr() + 3, 2], [memory.data_ptr() + 60, 4], [other.data_ptr(), 4]]
    import numpy as np  # noqa: PLC0415

    zero([memory[8:].view(7, 8), other], np.array(places, np.uint64))
    zeros = [at for at, byte in enumerate(memory.tolist()) if not byte]
    assert [3, 4, 60, 61, 62, 63] == zeros
    assert [0, 1, 1, 1] == other.tolist()


def test_worker_clears_the_unwritten_ranges_of_a_load() -> None:
    """Blocks of 4 end at token 12, and those of 8 at token 16. The last tokens become zero."""
    torch = pytest.importorskip("torch")
    with Engine("p") as producer, Engine("d", block=8, torch=torch, zeroing=True) as consumer:
        storage = consumer.storage[kvspec.RankId()]
        for flat in storage.values():
            flat[:] = 1
        params = producer.prefill(Request("p-1", 10), [1, 2, 3], [5, 6, 7])
        consumer.decode(Request("d-1", 10, params), [3, 5], [2, 4])
        until(lambda: consumer.received, producer, consumer)
        assert {} == consumer.failed
        full = storage["group0"].reshape(2, BLOCKS, 6, 8, 2 * SIZE)
        assert not full[:, (3, 5)].any()  # The memory of the new producer is zero.
        assert full[:, (2, 4)].all()
        assert (0, 1) == consumer.scheduler.get_loaded_kv_cache_group_ids(None)


def test_each_rank_logs_the_address_at_which_it_listens(caplog: pytest.LogCaptureFixture) -> None:
    """With a range of ports, an operator cannot know it, and `kvspec check` needs it."""
    caplog.set_level("INFO", "kvspec")
    with Engine("p", 2) as engine:
        for rank, worker in zip(("tp0", "tp1"), engine.workers, strict=True):
            assert logged(
                caplog, f"rank {rank} of p listens at {worker.get_handshake_metadata().address}"
            )


def test_worker_without_caches_has_no_handshake_metadata() -> None:
    """Its session is opened by `register_kv_caches`."""
    vllm_config, config = configs("p", 0, 1, 4, {})
    worker = made(vllm_config, "WORKER", config)
    assert None is worker.get_handshake_metadata()
    worker.shutdown()


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({}, "127.0.0.1"),
        ({"host": "127.0.0.2"}, "127.0.0.2"),
        ({"public": "localhost"}, "localhost"),
    ],
)
def test_metadata_of_a_worker_contains_its_public_host(settings: dict[str, str], host: str) -> None:
    """By default it is the host on which the worker listens."""
    with Engine("p", **settings) as engine:
        metadata = engine.workers[0].get_handshake_metadata()
        assert host == metadata.address.rpartition(":")[0]


def test_connector_refuses_an_engine_that_receives_weights() -> None:
    """No connector learns when vLLM's workers load other weights (vLLM 0.32)."""
    vllm_config, config = configs("p", 0, 1, 4, {})
    vllm_config.weight_transfer_config = SimpleNamespace(backend="nccl")
    for role in ("SCHEDULER", "WORKER"):
        with pytest.raises(kvspec.SpecError, match="weight_transfer_config"):
            made(vllm_config, role, config)


def test_connector_does_not_support_sleep_mode() -> None:
    """A sleeping engine releases memory whose addresses its peers know.

    VLLM 0.33 asks the connector, and vLLM 0.32 does not.
    """
    connector = importlib.import_module(CONNECTOR).KvspecConnector
    assert not connector.supports_sleep_mode(None)
    vllm_config, config = configs("p", 0, 1, 4, {})
    vllm_config.model_config.enable_sleep_mode = True
    calls = [lambda role=role: made(vllm_config, role, config) for role in ("SCHEDULER", "WORKER")]
    for call in (*calls, lambda: connector.get_required_kvcache_layout(vllm_config)):
        with pytest.raises(kvspec.SpecError, match="enable_sleep_mode"):
            call()


def test_second_request_of_a_held_id_is_freed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The log contains the reason. The first request stays held."""
    with Engine("p") as producer, Engine("d") as consumer:
        first = producer.prefill(Request("p-1", 14), *TABLES)
        producer.step()
        producer.prefill(Request("p-1", 14), *TABLES)
        producer.step()
        assert {"p-1": 1} == producer.sent
        assert logged(caplog, "p-1", "request_id")
        consumer.decode(Request("d-1", 14, first), *OTHERS)
        until(lambda: consumer.received, producer, consumer)
        assert {} == consumer.failed


def test_numbers_count_what_happened_since_the_last_call() -> None:
    """VLLM asks each worker in each step, and adds the answers."""
    with Engine("p", 2) as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        consumer.decode(Request("d-1", 14, params), *OTHERS)
        until(lambda: consumer.received and len(producer.sent) == 1, producer, consumer)
        until(lambda: {"p-1": 2} == producer.sent, producer, consumer)
        (worker,) = consumer.workers
        found = worker.get_kv_connector_stats().data
        assert (1, {}, 0) == (len(found["seconds"]), found["failed"], found["held"])
        assert found["bytes_read"] > 0
        assert worker.get_kv_connector_stats() is None
        held = [each.get_kv_connector_stats() for each in producer.workers]
        both = held[0].aggregate(held[1])
        assert (2, 0) == (both.data["holds_done"], both.data["held"])
        assert {"Loads done": 0, "Holds expired": 0}.items() <= both.reduce().items()
        late = consumer.decode(
            Request("d-2", 14, attrs.evolve(PrefillTicket.from_params(params or {}),
                                           addresses=("127.0.0.1:9",)).to_params()
                    | {"do_remote_prefill": True}), *OTHERS)  # fmt: skip
        assert (13, True) == late
        until(lambda: consumer.failed, consumer)
        assert 1 == sum(worker.get_kv_connector_stats().data["failed"].values())


def test_connector_without_a_secret_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM 0.32 imports the module with its settings, and calls it after it loads the weights."""
    monkeypatch.delenv("KVSPEC_SECRET")
    with pytest.raises(kvspec.SpecError) as caught:
        importlib.import_module(CONNECTOR)
    assert "KVSPEC_SECRET" == caught.value.field


def test_worker_refuses_to_load_other_weights() -> None:
    """VLLM informs no connector. Old prompts would be read by an engine with new weights."""
    worker = sys.modules["vllm.v1.worker.gpu_worker"].Worker
    with Engine("p"), pytest.raises(kvspec.SpecError, match="reload_weights"):
        worker().reload_weights(weights_path="new")


def test_prompt_that_nobody_asks_for_is_held_as_long_as_by_vllm() -> None:
    """VLLM's own connector holds it for 30 s (`kv_lease_duration`)."""
    assert (30.0, 30.0) == (Settings(model="m").hold, Settings(model="m").lease)


def test_tokens_of_a_prompt_count_as_those_of_a_peer() -> None:
    connector = importlib.import_module(CONNECTOR).KvspecConnector
    assert "p2p" == connector._cache_hit_source.value


def test_lines_of_kvspec_have_the_place_of_those_of_vllm() -> None:
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvspec")
    handler = logging.StreamHandler()
    before = ours.handlers, ours.level, ours.propagate
    theirs.addHandler(handler)
    try:
        importlib.import_module(CONNECTOR)._log_as_vllm_does()
        assert handler in ours.handlers
        assert not ours.propagate
    finally:
        theirs.removeHandler(handler)
        ours.handlers, ours.level, ours.propagate = [], before[1], True


def test_metrics_of_a_front_end_have_the_numbers_of_all_steps() -> None:
    """They are read as Prometheus reads them."""
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    types = [
        functools.partial(getattr(client, name), registry=registry)
        for name in ("Gauge", "Counter", "Histogram")
    ]
    connector = importlib.import_module(CONNECTOR).KvspecConnector
    metrics = connector.build_prom_metrics(None, types, ["model"], {0: ["tiny"]})
    empty = connector.build_kv_connector_stats()
    assert empty.is_empty()
    step = dict(empty.data) | {"seconds": [0.002, 0.2], "failed": {"gone": 2}, "bytes_read": 7}
    step |= {"held": 2, "holds_expired": 1}
    stats = connector.build_kv_connector_stats(step)
    assert not stats.is_empty()
    assert {
        "Loads done": 2,
        "Loads failed": 2,
        "Holds expired": 1,
    }.items() <= stats.reduce().items()
    for _ in range(2):
        metrics.observe(stats.data, 0)
    text = client.generate_latest(registry).decode()
    for line in (
        'vllm:kvspec_load_seconds_count{model="tiny"} 4.0',
        'vllm:kvspec_failed_loads_total{model="tiny",state="gone"} 4.0',
        'vllm:kvspec_bytes_read_total{model="tiny"} 14.0',
        'vllm:kvspec_expired_holds_total{model="tiny"} 2.0',
        'vllm:kvspec_held_prompts{model="tiny"} 4.0',
    ):
        assert line in text
    stats.reset()
    assert stats.is_empty()


def test_request_beside_a_connector_of_one_group_is_held_and_cancelled() -> None:
    """MultiConnector calls another method if one of its connectors knows one group only."""
    prefill, decode = scheduling(name="p"), scheduling()
    producer = Request("p-1", 14, {"do_remote_decode": True}, num_computed_tokens=14)
    held, params = prefill.request_finished(producer, [1, 2, 3, 4])
    assert (True, 14) == (held, PrefillTicket.from_params(params or {}).computed_tokens)
    assert ["p-1"] == [name for name, _ in prefill.build_connector_meta(None).held]
    consumer = Request("d-1", 14, params)
    decode.on_new_request(consumer)
    assert (False, None) == decode.request_finished(consumer, [])
    assert 1 == len(decode.build_connector_meta(None).declined)


def test_vllm_finds_the_connector_by_its_name() -> None:
    """A `MultiConnector` reads the numbers of its connectors by name. Importing twice is right."""
    for _ in range(2):
        sys.modules.pop(CONNECTOR, None)
        importlib.import_module(CONNECTOR)
        assert f"{CONNECTOR}.KvspecConnector" == Factory.registry["KvspecConnector"]


def test_held_prompts_are_those_of_all_workers_if_only_one_has_news() -> None:
    """VLLM adds the numbers of the workers that have some. The others hold what they held."""
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    types = [
        functools.partial(getattr(client, name), registry=registry)
        for name in ("Gauge", "Counter", "Histogram")
    ]
    connector = importlib.import_module(CONNECTOR).KvspecConnector
    front = connector.build_prom_metrics(None, types, ["model"], {0: ["tiny"]})
    counters = SimpleNamespace(**dict.fromkeys(_COUNTERS, 0), failed_by_state={})
    workers, seen = (WorkerNumbers(), WorkerNumbers()), []
    for held in ((1, 1), (2, 2), (1, 2), (1, 1), (1, 0), (0, 0)):
        numbers = [
            worker.take(SimpleNamespace(counters=counters, held=count))
            for worker, count in zip(workers, held, strict=True)
        ]
        for each in numbers:
            if each is not None:
                front.observe(connector.build_kv_connector_stats(each).data, 0)
        seen.append(registry.get_sample_value("vllm:kvspec_held_prompts", {"model": "tiny"}))
    assert [2, 4, 3, 2, 1, 0] == seen


def test_embeddings_and_sampling_of_a_request_are_stated() -> None:
    """The rows of the first tokens count, and which positions they replace."""
    torch = pytest.importorskip("torch")
    rows = torch.arange(12.0).reshape(4, 3)
    cases = [rows, rows.clone(), rows + 1, rows.to(torch.float64), rows[:, :2]]
    found = [
        content_of_request(Request("r", 4, prompt_embeds=each), 3).embeddings for each in cases
    ]
    assert found[0] == found[1]
    assert 4 == len({*found})
    later = rows.clone()
    later[3] = 9
    request = Request("r", 4, prompt_embeds=later)
    assert found[0] == content_of_request(request, 3).embeddings
    request.prompt_token_ids = None  # type: ignore[assignment]
    assert 3 == content_of_request(request, 3).num_tokens
    names = (*content._SETTINGS, *content._OTHERS)
    neutral = SimpleNamespace(**dict.fromkeys(names), temperature=0.0)
    asked = SimpleNamespace(sampling_params=neutral)
    assert "greedy" == sampling_of_request(asked)
    neutral.structured_outputs = {"json": "{}"}
    assert sampling_of_request(asked) not in (None, "greedy")
    neutral.top_p = "high"
    assert sampling_of_request(asked) is None
    assert sampling_of_request(SimpleNamespace()) is None


def drafted(method: str, model: str = "draft") -> Any:
    """Return vLLM's config of a draft."""
    return SimpleNamespace(
        method=method, draft_model_config=SimpleNamespace(model=model, revision=None)
    )


@pytest.mark.parametrize(("method", "fetched"), [("eagle3", 6), ("draft_model", 7)])
def test_keys_of_a_draft_that_depend_on_the_next_token_are_not_fetched(
    method: str, fetched: int
) -> None:
    """The prompt goes on behind the producer's. Its seven tokens fill no window of eight."""
    with Engine("d", speculative=drafted(method)) as consumer:
        request = Request("d-1", 14, params_of(7))
        assert (fetched, True) == consumer.decode(request, *OTHERS)
        # The last key depends on the last token, which is the same in both prompts.
        same = Request("d-2", 7, params_of(7))
        assert (6, True) == consumer.decode(same, *OTHERS)


def test_tokens_that_a_window_has_passed_are_not_computed_again() -> None:
    """A producer may have freed blocks that the token before the last one reads."""
    with Engine("d", speculative=drafted("eagle")) as consumer:
        request = Request("d-1", 14, params_of(12))
        assert (12, True) == consumer.decode(request, *OTHERS)


@pytest.mark.nixl
def test_request_is_held_after_the_kernels_of_its_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of the prompt arrive only while the worker waits for its GPU."""
    moved = asked()
    waited: list[int | None] = []
    with (
        Engine("p", speculative=drafted("draft_model")) as producer,
        Engine("d", speculative=drafted("draft_model")) as consumer,
    ):
        monkeypatch.setattr(producer.workers[0], "_draft_gpu", 3)

        def submitted(gpu: int | None) -> Any:
            waited.append(gpu)
            return lambda: producer.fill(moved)

        monkeypatch.setattr("kvspec.adapters.vllm.worker_side.submitted_work", submitted)
        consumer.spoil(moved)
        params = producer.prefill(Request("p-1", 14), *TABLES)
        consumer.decode(Request("d-1", 14, params), *OTHERS)
        for _ in range(10):  # The consumer asks first.
            consumer.step()
        until(lambda: consumer.received == {"d-1": 1}, producer, consumer)
        assert [3] == waited
        assert {} == consumer.failed
        assert [] == consumer.wrong(moved)


@pytest.mark.nixl
def test_engines_with_other_drafts_do_not_connect() -> None:
    """The layers of both drafts have the same names and sizes."""
    with (
        Engine("p", speculative=drafted("eagle3", "one")) as producer,
        Engine("d", speculative=drafted("eagle3", "two")) as consumer,
    ):
        params = producer.prefill(Request("p-1", 14), *TABLES)
        consumer.decode(Request("d-1", 14, params), *OTHERS)
        until(lambda: consumer.failed == {"d-1": 1}, producer, consumer)


def test_setting_draft_replaces_the_name_of_a_draft() -> None:
    vllm_config, _ = configs("p", 0, 1, 4, {"draft": "ours", "speculative": drafted("mtp")})
    assert "tiny with draft ours" == Settings.of(vllm_config).weights
    for extra, field in (
        ({"draft": "ours"}, "kv_connector_extra_config['draft']"),
        ({"speculative": drafted("custom_class")}, "speculative_config.method"),
    ):
        vllm_config, config = configs("p", 0, 1, 4, dict(extra))
        with pytest.raises(kvspec.SpecError) as caught:
            made(vllm_config, "WORKER", config)
        assert field == caught.value.field
