"""vLLM's connector: what moves between two engines by vLLM's own calls, and what fails alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
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
    Request,
    World,
    configs,
    installed,
    made,
    until,
)

import kvspec
from kvspec.adapters.vllm import engine_spec
from kvspec.adapters.vllm.scheduler_side import Scheduling, Served
from kvspec.session import PrefillTicket, new_remote_id

pytestmark = pytest.mark.nixl


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    """Let the connector find vLLM's base class."""
    with installed():
        yield


TABLES = [1, 2, 3, 4], [0, 5, 6, 7]
"""Of 14 tokens in blocks of 4: the first query reads the window of 8 from token 6 on."""
OTHERS = [9, 8, 7, 6], [0, 4, 3, 2]


def said(num_tokens: int = 7) -> dict[str, Any]:
    """Return what a producer says of a request."""
    prompt = PrefillTicket(
        engine_id="p",
        addresses=("127.0.0.1:9",),
        remote_id=new_remote_id("p-1"),
        computed_tokens=num_tokens,
        tables={"group0": kvspec.BlockTable([1, 2])},
    )
    return {"do_remote_prefill": True, **prompt.to_params()}


HELD = said()


def asked(num_tokens: int = 13, cached: int = 0, tables: Any = OTHERS) -> kvspec.TransferRequest:
    """Return what the library is asked for when a prompt of 14 tokens is decoded."""
    return kvspec.TransferRequest(
        request_id="d",
        num_tokens=num_tokens,
        cached_tokens=cached,
        producer_blocks=dict(zip(("group0", "group1"), TABLES, strict=True)),
        consumer_blocks=dict(zip(("group0", "group1"), tables, strict=True)),
    )


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
def test_a_prompt_arrives_but_for_its_last_token(
    tp: tuple[int, int], pp: tuple[int, int], cached: int
) -> None:
    """From so many ranks to so many, byte for byte; every rank says so once, and none holds it."""
    with Engine("p", tp[0], pp=pp[0]) as producer, Engine("d", tp[1], pp=pp[1]) as consumer:
        wanted = asked(cached=cached)
        producer.fill(wanted)
        consumer.spoil(wanted)
        params = producer.prefill(Request("p-1", 14), *TABLES)
        request = Request("d-1", 14, params)
        assert (13 - cached, True) == consumer.decode(request, *OTHERS, cached=cached)
        ended = {"p-1": tp[0] * pp[0]}, {"d-1": tp[1] * pp[1]}
        until(lambda: ended == (producer.sent, consumer.received), producer, consumer)
        assert {} == consumer.failed
        assert [] == consumer.wrong(wanted)


def test_engines_with_a_short_lease_load() -> None:
    """The heartbeat follows the lease, because a heartbeat of half of the lease is refused."""
    with Engine("p", lease=2.0) as producer, Engine("d", lease=2.0) as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        consumer.decode(Request("d-1", 14, params), *OTHERS)
        until(lambda: consumer.received, producer, consumer)
        assert {} == consumer.failed


@pytest.mark.parametrize("staging", [0, 4])
def test_blocks_may_differ(staging: int) -> None:
    """Blocks of 4 tokens are read into blocks of 8, also by a rank that may stage."""
    with Engine("p", 2, 4) as producer, Engine("d", 1, 8, staging=staging) as consumer:
        wanted = asked(tables=([3, 5], [0, 4]))
        wanted = kvspec.TransferRequest(
            request_id="d",
            num_tokens=13,
            producer_blocks=wanted.producer_blocks,
            consumer_blocks={"group0": [3, 5], "group1": [2, 4]},
        )
        producer.fill(wanted)
        consumer.spoil(wanted)
        params = producer.prefill(Request("p-1", 14), *TABLES)
        consumer.decode(Request("d-1", 14, params), [3, 5], [2, 4])
        until(lambda: consumer.received, producer, consumer)
        assert {} == consumer.failed
        assert [] == consumer.wrong(wanted)


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


def test_what_is_here_already_is_released() -> None:
    """Nothing moves and nothing is waited for; the producer's ranks are free at once."""
    with Engine("p", 2) as producer, Engine("d", 3) as consumer:
        params = producer.prefill(Request("p-1", 13), [1, 2, 3, 4], [0, 5, 6, 7])
        assert (0, False) == consumer.decode(Request("d-1", 13, params), *OTHERS, cached=12)
        until(lambda: {"p-1": 2} == producer.sent, producer, consumer)
        assert {} == consumer.received


def test_what_ends_before_it_is_scheduled_is_released() -> None:
    """A request that is aborted while it waits tells its producer."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        request = Request("d-1", 14, params)
        consumer.scheduler.on_new_request(request)
        request.status.name = "FINISHED_ABORTED"
        aborted = consumer.scheduler.request_finished_all_groups(request, ([], []))
        assert (False, None) == aborted
        until(lambda: producer.sent, producer, consumer)
        assert {"p-1": 1} == producer.sent


def test_nobody_there_fails_the_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A producer that does not answer fails the requests of it; the next producer serves on."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        assert params is not None
        lost = attrs.evolve(
            PrefillTicket.from_params(params), addresses=("127.0.0.1:9",)
        ).to_params()
        consumer.decode(Request("d-1", 14, {**params, **lost}), *OTHERS)
        until(lambda: consumer.failed, consumer)
        assert "d-1: TransferError: no introduction from 127.0.0.1:9" in caplog.text
        consumer.decode(Request("d-2", 14, params), *OTHERS)
        until(lambda: len(consumer.received) > 1, producer, consumer)
        assert ({"d-1": 1, "d-2": 1}, {"d-1": 1}) == (consumer.received, consumer.failed)


def test_what_is_no_longer_held_fails(caplog: pytest.LogCaptureFixture) -> None:
    """A request whose lease is over is free on the producer, and not to be read."""
    with Engine("p", hold=0.2) as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        until(lambda: producer.sent, producer)
        assert "p-1 was not read within its lease" in caplog.text
        consumer.decode(Request("d-1", 14, params), *OTHERS)
        until(lambda: consumer.received, producer, consumer)
        assert {"d-1": 1} == consumer.failed == consumer.received
        assert "before it was read" in caplog.text


def test_what_does_not_fit_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """Tables too short, blocks that are none: the request fails with the reason, and is let go."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        consumer.decode(Request("d-1", 14, params), [9, 8], [0, 4, 3, 2])
        params = producer.prefill(Request("p-2", 14), *TABLES)
        consumer.decode(Request("d-2", 14, params), [BLOCKS, 8, 7, 6], [0, 4, 3, 2])
        until(lambda: len(consumer.failed) > 1, producer, consumer)
        assert {"d-1": 1, "d-2": 1} == consumer.failed == consumer.received
        assert "d-1: block_ids['group0']=[9, 8]: expected 4 ids" in caplog.text
        assert "d-2: SpecError: consumer_blocks['group0']" in caplog.text
        until(lambda: len(producer.sent) > 1, producer, consumer)


def test_the_null_block_is_nobody_s(caplog: pytest.LogCaptureFixture) -> None:
    """Id 0 holds no token: a request that has it where the first query looks is not moved."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), [1, 2, 3, 4], [0, 0, 6, 7])
        consumer.decode(Request("d-1", 14, params), *OTHERS)
        params = producer.prefill(Request("p-2", 14), *TABLES)
        consumer.decode(Request("d-2", 14, params), [9, 8, 7, 6], [0, 0, 3, 2])
        until(lambda: len(consumer.failed) > 1, producer, consumer)
        assert "d-1: MismatchError" in caplog.text
        assert "the producer's table has the null block for tokens 6..7" in caplog.text
        assert "d-2: SpecError: consumer_blocks['group1']=0" in caplog.text


def test_pages_of_unknown_order_are_not_moved() -> None:
    """An engine whose attention orders pages in a way that is not known does not start."""
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


def test_another_model_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Engines of other weights do not exchange, however alike their caches are."""
    with Engine("p", model="one") as producer, Engine("d", model="other") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        consumer.decode(Request("d-1", 14, params), *OTHERS)
        until(lambda: consumer.failed, producer, consumer)
        assert "d-1: MismatchError" in caplog.text
        assert "model" in caplog.text


def scheduling(spec: Any = None, *, ready: bool = True) -> Scheduling:
    """Return a scheduler's part, of an engine with one layer, whose workers are *ready*."""
    spec = spec or like.FullAttentionSpec(**like.HEADS)
    config = like.config((["l"], spec))
    made = Scheduling(config)
    if ready:
        engine = engine_spec(config, backends=like.FLASH)
        rank = Served(engine=engine, engine_id="p", address="127.0.0.1:9")
        made.set_xfer_handshake_metadata_pp_aware({(0, 0): rank})
    return made


@pytest.mark.parametrize(
    ("params", "count"),
    [
        (HELD, 7),
        (said(14), 13),  # all but the last, which vLLM computes
        (said(20), 13),
        ({**HELD, "remote_num_tokens": 14}, 0),
        ({**HELD, "remote_block_ids": {"group0": [0, [3, 4]]}}, 0),
        ({**HELD, "remote_request_id": said()["remote_request_id"]}, 0),
        ({**HELD, "remote_num_tokens": -1}, 0),
        ({**HELD, "remote_addresses": None}, 0),
        ({**HELD, "do_remote_prefill": False}, 0),
        ({"do_remote_prefill": True}, 0),
        (None, 0),
    ],
)
def test_how_many_tokens_are_fetched(params: dict[str, Any] | None, count: int) -> None:
    """A router's nonsense, or true words changed, end no engine and make no request wait."""
    one, request = scheduling(), Request("d-1", 14, params)
    one.on_new_request(request)
    assert (count, count > 0) == one.get_num_new_matched_tokens(request, 0)


def test_another_prompt_is_computed_here(caplog: pytest.LogCaptureFixture) -> None:
    """A router that gives a request the answer of another: it is not read, nor released."""
    with Engine("p") as producer, Engine("d") as consumer:
        params = producer.prefill(Request("p-1", 14), *TABLES)
        other = Request("d-1", 14, params)
        other.prompt_token_ids[3] = 99
        consumer.scheduler.on_new_request(other)
        assert (0, False) == consumer.scheduler.get_num_new_matched_tokens(other, 0)
        assert "d-1 is computed here: remote_content=" in caplog.text


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
def test_only_a_whole_prompt_is_held(status: str) -> None:
    """Of a request that was aborted nobody is told."""
    request = Request("p-1", 14, {"do_remote_decode": True})
    request.status.name = status
    assert (False, None) == scheduling().request_finished_all_groups(request, ([1],))


def test_before_the_caches_are_there_nothing_is_held(caplog: pytest.LogCaptureFixture) -> None:
    """A request that ends before any worker has registered is not held."""
    request = Request("p", 4, {"do_remote_decode": True})
    none = scheduling(ready=False)
    assert (False, None) == none.request_finished_all_groups(request, ([1],))
    assert "p is not held: kv_caches" in caplog.text


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
def test_a_prompt_stops_one_token_early(spec: Any, tokens: int, computed: int) -> None:
    """Where vLLM would have freed what the last token reads, the producer computes all before it.

    And samples once; what this engine decodes itself stays whole.
    """
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


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"host": 5}, "host"),
        ({"lease": -1}, "lease"),
        ({"hold": "long"}, "hold"),
        ({"port": 1}, "port"),
        ({"staging": -1}, "staging"),
        ({"staging": 1.5}, "staging"),
        ({"model": ""}, "model"),
    ],
)
def test_settings_are_refused_by_name(extra: dict[str, Any], name: str) -> None:
    """What `kv_connector_extra_config` may not have is named."""
    with pytest.raises(kvspec.SpecError, match=name):
        Engine("p", **extra)


def test_the_rest_of_a_block_is_zeroed_where_vllm_wants_it() -> None:
    """VLLM reads whole blocks of some models: what a load leaves of them is zero."""
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


def test_what_a_load_leaves_of_its_blocks_is_zeroed_where_vllm_says_so() -> None:
    """Blocks of 4 end at token 12, those of 8 at 16: what the last tokens held is gone."""
    torch = pytest.importorskip("torch")
    with Engine("p") as producer, Engine("d", block=8, zeroing=True) as consumer:
        storage = consumer.storage[kvspec.RankId()]
        tensors = {name: torch.from_numpy(flat) for name, flat in storage.items()}
        consumer.workers[0]._tensors = tuple(tensors.values())
        for flat in storage.values():
            flat[:] = 1
        params = producer.prefill(Request("p-1", 10), [1, 2, 3], [5, 6, 7])
        consumer.decode(Request("d-1", 10, params), [3, 5], [2, 4])
        until(lambda: consumer.received, producer, consumer)
        assert {} == consumer.failed
        full = storage["group0"].reshape(2, BLOCKS, 6, 8, 2 * SIZE)
        assert not full[:, (3, 5)].any()  # the producer's bytes are zeros, as it is new
        assert full[:, (2, 4)].all()
        assert (0, 1) == consumer.scheduler.get_loaded_kv_cache_group_ids(None)


def test_a_worker_without_caches_has_nothing_to_tell() -> None:
    """Before `register_kv_caches` there is nobody to be met."""
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
def test_peers_are_told_where_a_rank_is(settings: dict[str, str], host: str) -> None:
    """Where it listens, unless it says by which name others reach that."""
    with Engine("p", **settings) as engine:
        told = engine.workers[0].get_handshake_metadata()
        assert host == told.address.rpartition(":")[0]


def test_an_engine_whose_memory_is_read_does_not_sleep() -> None:
    """VLLM 0.33 asks: peers know addresses that an engine gives back when it sleeps."""
    connector = importlib.import_module(CONNECTOR).KvspecConnector
    assert not connector.supports_sleep_mode(None)


def test_one_id_at_a_time_is_held(caplog: pytest.LogCaptureFixture) -> None:
    """A second request of an id that is held is let go at once, and said so; the first stays."""
    with Engine("p") as producer, Engine("d") as consumer:
        first = producer.prefill(Request("p-1", 14), *TABLES)
        producer.step()
        producer.prefill(Request("p-1", 14), *TABLES)
        producer.step()
        assert {"p-1": 1} == producer.sent
        assert "p-1 is not held: request_id" in caplog.text
        consumer.decode(Request("d-1", 14, first), *OTHERS)
        until(lambda: consumer.received, producer, consumer)
        assert {} == consumer.failed
