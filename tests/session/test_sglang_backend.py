"""The backend moves prompts between two engines of SGLang, and a failed request fails alone."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import sglang_like as like
from fake_servers import answers, servers
from sglang_serving import (
    HEADS,
    LAYERS,
    SIZE,
    Engine,
    World,
    lowest,
    model,
    pages_of,
    pair,
    receivers,
    request,
    senders,
    settings,
    surroundings,
    until,
    wait,
)

import kvspec
from kvspec.adapters.sglang import plugin, tickets
from kvspec.adapters.sglang.backend import (
    BOOTSTRAPPING,
    FAILED,
    SUCCESS,
    TRANSFERRING,
    WAITING,
)
from kvspec.adapters.sglang.describing import (
    BackendSettings,
    check_supported,
    check_version,
    describe,
)
from kvspec.adapters.sglang.lookups import Lookups
from kvspec.adapters.sglang.request_identity import Weights, identity_of
from kvspec.adapters.sglang.sending import LOWEST
from kvspec.nixl.staging.choosing import Buffers
from kvspec.tickets import PrefillTicket

pytestmark = [pytest.mark.adapters, pytest.mark.usefixtures("simulated")]

TOKENS = list(range(100, 137))
ROOM = 77


def prefill(engine: Engine, server: Any, asked: Any, room: int = ROOM) -> Any:
    """Compute a prompt in two chunks on all ranks, and return the senders."""
    own, count = pages_of(engine, len(asked.origin_input_ids)), len(asked.origin_input_ids)
    engine.fill(own, count, seed=room)
    made = senders(engine, server.address, room, asked)
    assert WAITING == lowest(made)
    split = count // 2 // engine.page
    for sender in made:
        sender.init(len(own), 0)
        if split:
            sender.send(own[:split], None, split * engine.page)
        assert WAITING == sender.poll()
        sender.send(own[split:], None, count - split * engine.page)
    return made


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("producer", "consumer"), [((1, 16), (1, 16)), ((2, 1), (1, 16)), ((1, 4), (2, 1))]
)
def test_prompt_moves_between_unequal_tp_and_page_sizes(
    producer: tuple[int, int], consumer: tuple[int, int]
) -> None:
    with pair(producer, consumer) as (first, second, server):
        sent = prefill(first, server, request(TOKENS, top=3))
        got = receivers(second, server.address, ROOM, request(TOKENS, top=3))
        until(WAITING, got)
        assert TRANSFERRING == lowest(sent)
        own = pages_of(second, len(TOKENS))
        for receiver in got:
            receiver.send_metadata(own, 2, [], 0)
        until(SUCCESS, got)
        until(SUCCESS, sent)
        second.check(own, len(TOKENS), seed=ROOM)
        for manager in second.ranks:
            buffers = manager.around.buffers
            assert 5 == buffers.output_ids[2, 0]
            assert ROOM == buffers.bootstrap_room[2, 0]
            assert -0.5 == buffers.output_token_logprobs_val[2, 0]
            assert [5, 6, 7] == buffers.output_top_logprobs_idx[2, :3].tolist()


# The sizes of q, k and v of a gated delta net with 2 key heads and 4 value heads.
DELTA = [2 * 4, 2 * 4, 4 * 6]


def hybrid(tp: int, page: int) -> like.HybridLinearKVPool:
    """Return a pool of one of *tp* ranks, in which layer 1 attends, and layer 0 has a state."""
    attends = like.MHATokenToKVPool(
        64, HEADS // tp, SIZE, page_size=page, dtype="float32", layer_num=1
    )
    states = like.MambaPool(4, [0], (sum(DELTA) // tp, 3), (4 // tp, 6, 4), groups=DELTA)
    return like.HybridLinearKVPool(attends, [1], states)


def state_of(engine: Engine, slot: int) -> tuple[Any, Any]:
    """Return views of the state of the model: q, k and v of all ranks, and the temporal state."""
    caches = [rank.around.pool.mamba_pool.mamba_cache for rank in engine.ranks]
    stops = np.cumsum(DELTA)[:-1] // len(caches)
    parts = [np.split(cache.conv[0][0, slot], stops) for cache in caches]
    return list(zip(*parts, strict=True)), [cache.temporal[0, slot] for cache in caches]


@pytest.mark.parametrize(("producer", "consumer"), [((1, 16), (2, 4)), ((2, 1), (1, 16))])
def test_state_moves_from_the_slot_that_sglang_names(
    producer: tuple[int, int], consumer: tuple[int, int]
) -> None:
    """Its slot comes with the last chunk. Chunks before it have no ticket."""
    changes: dict[str, Any] = {"pool": hybrid, "state_types": ("mamba",)}
    with pair(producer, consumer, **changes) as (first, second, server):
        count = len(TOKENS)
        draw = np.random.default_rng(7)
        for each in (*state_of(first, 3)[0], state_of(first, 3)[1]):
            for view in each:
                view[:] = draw.random(view.shape)
        pages = pages_of(first, count)
        sent = senders(first, server.address, ROOM, request(TOKENS))
        split = count // 2 // first.page
        for sender in sent:
            sender.init(len(pages), 0)
            if split:
                sender.send(pages[:split], None, split * first.page)
                assert sender.newest is None
            rest = count - split * first.page
            sender.send(pages[split:], [[np.array(3)]], rest)
        got = receivers(second, server.address, ROOM, request(TOKENS))
        until(WAITING, got)
        for receiver in got:
            receiver.send_metadata(pages_of(second, count), 0, [[np.array(2)]], 0)
        until(SUCCESS, got)
        until(SUCCESS, sent)
        ends = state_of(first, 3), state_of(second, 2)
        for one, other in zip(*(conv for conv, _ in ends), strict=True):
            assert np.array_equal(np.concatenate(one), np.concatenate(other))
        assert np.array_equal(*(np.concatenate(temporal) for _, temporal in ends))
        assert not any(each[..., 0].any() for each in state_of(second, 1)[1])


def test_request_without_a_slot_fails_alone() -> None:
    changes: dict[str, Any] = {"pool": hybrid, "state_types": ("mamba",)}
    with pair((1, 16), (1, 16), **changes) as (first, _, server):
        (sender,) = senders(first, server.address, ROOM, request(TOKENS))
        sender.init(3, 0)
        sender.send(pages_of(first, len(TOKENS)), None, len(TOKENS))
        with pytest.raises(kvspec.SpecError) as caught:
            sender.failure_exception()
        assert "state_indices" == caught.value.field


def test_decode_engine_keeps_no_prefixes_if_layers_have_states() -> None:
    with pytest.raises(kvspec.SpecError) as caught:
        described(pool=hybrid, state_types=("mamba",), decode_radix_cache=True)
    assert "disaggregation_decode_enable_radix_cache" == caught.value.field


@pytest.mark.parametrize("staging", [0, 1])
def test_short_runs_move_through_the_staging_buffer_if_it_is_set(
    staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, each head of each token is a descriptor, and a long prompt takes seconds."""
    monkeypatch.setenv("KVSPEC_SGLANG", json.dumps({"staging": staging}))
    staged, choose = list[bool](), Buffers.choose

    def seen(*arguments: Any, **named: Any) -> Any:
        found = choose(*arguments, **named)
        staged.append(found[0] is not None)
        return found

    monkeypatch.setattr(Buffers, "choose", seen)
    tokens = list(range(60))
    with pair((1, 16), (2, 16)) as (first, second, server):
        prefill(first, server, request(tokens))
        got = receivers(second, server.address, ROOM, request(tokens))
        until(WAITING, got)
        for receiver in got:
            receiver.send_metadata(pages_of(second, 60), 0, [], 0)
        until(SUCCESS, got)
        second.check(pages_of(second, 60), 60, seed=ROOM)
    assert any(staged) == bool(staging)


def test_cached_prefix_is_not_loaded() -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        prefill(first, server, request(TOKENS))
        (receiver,) = receivers(second, server.address, ROOM, request(TOKENS))
        until(WAITING, [receiver])
        receiver.send_metadata([3, 2], 0, [], 16)
        until(SUCCESS, [receiver])
        second.check([1, 3, 2], len(TOKENS), seed=ROOM, first=16)
        assert not second.ranks[0].around.pool.k_buffer[0][16:32].any()


def test_infinite_log_probability_reaches_the_buffers_as_lowest_number() -> None:
    """A grammar excludes tokens, which SGLang reports with minus infinity."""
    asked = request(TOKENS, top=2)
    asked.logprob.output_top_logprobs_val[0][1] = float("-inf")
    asked.logprob.output_top_logprobs_val[0][0] = 1e-7  # Rounded up from probability 1.
    with pair((1, 16), (1, 16)) as (first, second, server):
        prefill(first, server, asked)
        (receiver,) = receivers(second, server.address, ROOM, request(TOKENS, top=2))
        until(WAITING, [receiver])
        receiver.send_metadata(pages_of(second, 37), 0, [], 0)
        until(SUCCESS, [receiver])
        values = second.ranks[0].around.buffers.output_top_logprobs_val[0, :2].tolist()
        assert [0.0, LOWEST] == values


def test_sender_fails_if_tokens_and_pages_do_not_fit() -> None:
    """SGLang has sent all pages of the prompt, but not all of its tokens."""
    with pair((1, 16), (1, 16)) as (first, second, server):
        (sent,) = senders(first, server.address, ROOM, request(TOKENS))
        got = receivers(second, server.address, ROOM, request(TOKENS))
        sent.init(3, 0)
        sent.send([1, 2, 3], None, 36)
        assert FAILED == sent.poll()
        with pytest.raises(kvspec.SpecError) as caught:
            sent.failure_exception()
        assert "num_kv_tokens" == caught.value.field
        until(FAILED, got)


def test_receiver_waits_until_ticket_is_published() -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        got = receivers(second, server.address, ROOM, request(TOKENS))
        assert BOOTSTRAPPING == lowest(got)
        prefill(first, server, request(TOKENS))
        until(WAITING, got)


def test_receiver_fails_when_sender_is_aborted() -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        (sent,) = senders(first, server.address, ROOM, request(TOKENS))
        got = receivers(second, server.address, ROOM, request(TOKENS))
        sent.abort()
        assert FAILED == sent.poll()
        until(FAILED, got)
        with pytest.raises(kvspec.SpecError) as caught:
            got[0].failure_exception()
        assert "remote_failure" == caught.value.field
        with pytest.raises(kvspec.TransferError):
            sent.failure_exception()


def test_load_fails_when_sender_is_aborted_after_publishing() -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        (sent,) = prefill(first, server, request(TOKENS))
        got = receivers(second, server.address, ROOM, request(TOKENS))
        wait(lambda: got[0]._lookup is not None and got[0]._lookup.ended)
        until(WAITING, got)
        sent.abort()
        got[0].send_metadata(pages_of(second, 37), 0, [], 0)
        until(FAILED, got)
        with pytest.raises(kvspec.TransferError) as caught:
            got[0].failure_exception()
        assert "gone" == caught.value.state


@pytest.mark.parametrize("early", [True, False])
def test_sender_succeeds_when_aborted_receiver_declines(early: bool) -> None:
    """An aborted request need not wait for the lease, also if its ticket comes after the abort."""
    with pair((1, 16), (2, 16)) as (first, second, server):
        got = receivers(second, server.address, ROOM, request(TOKENS))
        if early:
            for receiver in got:
                receiver.abort()
        sent = prefill(first, server, request(TOKENS))
        if not early:
            until(WAITING, got)
            for receiver in got:
                receiver.abort()
        assert FAILED == lowest(got)
        until(SUCCESS, sent)


def test_closed_session_fails_requests_and_raises_nothing_else() -> None:
    """An error in a method other than `failure_exception` would end SGLang's scheduler."""
    with pair((1, 16), (1, 16)) as (first, second, server):
        (sent,) = prefill(first, server, request(TOKENS))
        (late,) = senders(first, server.address, 5, request(TOKENS))
        late.init(3, 0)
        got = receivers(second, server.address, ROOM, request(TOKENS))
        prefill(first, server, request(TOKENS), ROOM + 1)
        got += receivers(second, server.address, ROOM + 1, request(TOKENS))
        until(WAITING, got)
        for engine in (first, second):
            engine.ranks[0].session.close()
        got[0].send_metadata(pages_of(second, 37), 0, [], 0)
        late.send([1, 2, 3], None, 37)
        for each in (sent, late, *got):
            each.abort()
            assert FAILED == each.poll()
            each.clear()


def ticket_of(params: dict[str, Any]) -> PrefillTicket:
    """Return the ticket in *params*."""
    return PrefillTicket.from_params(params)


@pytest.mark.parametrize(
    ("changes", "asked", "field"),
    [
        ({"first_token": None, "first_logprobs": None}, request(TOKENS), "remote_first_token"),
        ({}, request(TOKENS[::-1]), "remote_content.tokens"),
        ({}, request(TOKENS[:-1]), "remote_num_tokens"),
        ({}, request([*TOKENS, 7]), "remote_num_tokens"),
        ({"consumer": "another"}, request(TOKENS), "remote_consumer"),
        ({"first_logprobs": None}, request(TOKENS, top=1), "remote_first_logprobs"),
        ({}, request(TOKENS, top=9), "remote_first_logprobs"),
    ],
)
def test_receiver_fails_if_sglang_cannot_go_on_from_ticket(
    changes: dict[str, Any], asked: Any, field: str
) -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        prefill(first, server, request(TOKENS, top=2))
        wait(lambda: bool(tickets.get(server.address, [ROOM])))
        ticket = ticket_of(tickets.get(server.address, [ROOM])[ROOM])
        tickets.put(server.address, 5, attrs.evolve(ticket, **changes).to_params())
        (receiver,) = receivers(second, server.address, 5, asked)
        until(FAILED, [receiver])
        with pytest.raises(kvspec.SpecError) as caught:
            receiver.failure_exception()
        assert field == caught.value.field
        receiver.clear()  # The ticket is declined, so the producer does not wait for the lease.


def test_server_refuses_tickets_that_are_not_sealed() -> None:
    server = tickets.TicketServer("127.0.0.1", 0)
    params = tickets.failure(1, "why")
    tickets.put(server.address, 1, params)
    for room, wrong in ((2, params), (1, {**params, "remote_failure": "x"}), (1, {}), (1, 7)):
        with pytest.raises(kvspec.SpecError):
            tickets.put(server.address, room, wrong)  # type: ignore[arg-type]
    assert {1: params} == tickets.get(server.address, [1, 2])
    with pytest.raises(kvspec.SpecError):
        tickets.get(server.address, [-1])
    server.close()


def test_ticket_is_deleted_when_its_prompt_was_read() -> None:
    """A later request may use the same room, and must not find the old ticket."""
    with pair((1, 16), (1, 16)) as (first, second, server):
        (sent,) = prefill(first, server, request(TOKENS))
        (receiver,) = receivers(second, server.address, ROOM, request(TOKENS))
        until(WAITING, [receiver])
        receiver.send_metadata(pages_of(second, 37), 0, [], 0)
        until(SUCCESS, [receiver])
        until(SUCCESS, [sent])
        sent.clear()
        wait(lambda: not tickets.get(server.address, [ROOM]))


def test_server_forgets_old_tickets() -> None:
    server = tickets.TicketServer("127.0.0.1", 0, keep=0.0)
    for room in (1, 2):
        tickets.put(server.address, room, tickets.failure(room, "why"))
    assert [2] == list(tickets.get(server.address, [1, 2]))
    server.close()


@pytest.mark.parametrize("limits", [(0.1, 60.0), (60.0, 0.1)])
def test_lookup_fails_without_ticket_or_server(limits: tuple[float, float]) -> None:
    server = tickets.TicketServer("127.0.0.1", 0)
    if limits[1] < 1:
        server.close()
    lookups = Lookups(limits[0], lambda _: None, absent=limits[1])
    lookup = lookups.add(server.address, 3, "own")
    wait(lambda: lookup.ended)
    assert isinstance(lookup.error, kvspec.TransferError)
    assert ("timeout" if limits[1] > 1 else "peer_lost") == lookup.error.state
    if limits[1] > 1:
        server.close()


UNSUPPORTED = {
    "speculative_algorithm": "EAGLE",
    "pp_size": 2,
    "enable_dp_attention": True,
    "dcp_size": 2,
    "enable_hierarchical_cache": True,
    "enable_hisparse": True,
    "disaggregation_decode_allocation_policy": "prefill_complete",
    "disaggregation_enable_kv_checksum": True,
    "enable_unified_memory": True,
    "disaggregation_decode_enable_offload_kvcache": True,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_setting_is_refused_by_name(name: str) -> None:
    around = surroundings(World(1), 0, 1, 16)
    check_supported(settings(), around)
    with pytest.raises(kvspec.SpecError) as caught:
        check_supported(settings(**{name: UNSUPPORTED[name]}), around)
    assert f"server_args.{name}" == caught.value.field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"draft_pool": object()}, "draft_token_to_kv_pool"),
        ({"pool": hybrid(1, 16), "state_types": ("mamba", "swa")}, "state_types"),
        # The states lie beside a pool that has none.
        ({"state_types": ("mamba",)}, "state_types"),
        ({"pool": like.SWAKVPool.__new__(like.SWAKVPool)}, "token_to_kv_pool"),
        ({"pool": like.MLATokenToKVPool(16, page_size=16)}, "token_to_kv_pool"),
    ],
)
def test_unsupported_pool_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(kvspec.SpecError) as caught:
        check_supported(settings(), surroundings(World(1), 0, 1, 16, **changes))
    assert field == caught.value.field


def test_missing_setting_is_refused() -> None:
    """A setting that SGLang has renamed cannot be checked any more."""
    changed = settings()
    del changed.pp_size
    with pytest.raises(kvspec.SpecError):
        check_supported(changed, surroundings(World(1), 0, 1, 16))


def test_other_version_is_refused() -> None:
    check_version("0.5.23")
    with pytest.raises(kvspec.SpecError) as caught:
        check_version("0.5.24")
    assert "0.5.24" == caught.value.value


def described(settings: Any = None, **changes: Any) -> kvspec.RankCache:
    """Return the cache of one rank with *changes* to its objects."""
    own = settings or BackendSettings(model="m")
    return describe(surroundings(World(1), 0, 1, 16, **changes), own)


@pytest.mark.parametrize(("neox", "rotary"), [(True, "halves"), (False, "pairs")])
def test_key_content_comes_from_the_modules(neox: bool, rotary: str) -> None:
    spec = described(model=model(neox=neox)).engine.group("full").spec
    assert kvspec.KeyContent(rotary=rotary, rotary_size=8) == spec.key_content
    assert "model.layers.1.self_attn.attn" in described().engine.group("full").layers


def test_key_content_of_layers_that_do_not_rotate_is_none() -> None:
    """They have a rotary embedding, but do not apply it."""
    found = described(model=model(rope=False)).engine.group("full").spec
    assert kvspec.KeyContent(rotary="none") == found.key_content


def test_configured_key_content_that_contradicts_the_modules_is_refused() -> None:
    wrong = {"rotary": "pairs", "rotary_size": 8}
    with pytest.raises(kvspec.SpecError) as caught:
        described(settings=BackendSettings(model="m", key_content=wrong))
    assert "KVSPEC_SGLANG['key_content']" == caught.value.field


@pytest.mark.parametrize("unknown", [{"is_neox_style": None}, {"head_size": 16}])
def test_unknown_key_content_is_refused(unknown: dict[str, Any]) -> None:
    with pytest.raises(kvspec.SpecError):
        described(model=model(**unknown))


def test_layer_with_window_in_plain_pool_has_a_group_of_its_own() -> None:
    engine = described(model=model(window=15)).engine
    assert 16 == engine.group("swa").spec.sliding_window
    assert ("model.layers.1.self_attn.attn",) == engine.group("swa").layers
    with pytest.raises(kvspec.SpecError) as caught:
        described(model=model(window=15), decode_radix_cache=True)
    assert "disaggregation_decode_enable_radix_cache" == caught.value.field


@pytest.mark.parametrize(("fused", "form"), [(True, "plain"), (False, "opaque:indexer-hadamard")])
def test_flags_of_the_indexers_show_whether_keys_have_a_hadamard_product(
    fused: bool, form: str
) -> None:
    pool = like.DSATokenToKVPool(16, page_size=4, kv_cache_dim=8)
    own = {"pool": pool, "index_order": "rows"}
    cache = described(model=model(fused=[fused]), **own)
    assert form == cache.engine.group("indexer").spec.page_format  # type: ignore[attr-defined]
    with pytest.raises(kvspec.SpecError) as caught:
        described(model=model(fused=[True, False]), **own)
    assert "model" == caught.value.field
    with pytest.raises(kvspec.SpecError) as caught:
        described(model=model(), **own)
    assert "index_hadamard" == caught.value.field


def test_model_without_attention_layer_of_the_pool_is_refused() -> None:
    with pytest.raises(kvspec.SpecError):
        described(model=model(layers=1))


def test_model_whose_layers_have_states_alone_is_refused() -> None:
    """SGLang then has no buffers of keys."""

    def states(tp: int, page: int) -> Any:
        pool = hybrid(tp, page)
        pool.full_kv_pool.k_buffer = pool.full_kv_pool.v_buffer = []
        pool.full_attention_layer_id_mapping = {}
        return pool

    with pytest.raises(kvspec.SpecError) as caught:
        described(pool=states, state_types=("mamba",))
    assert ("token_to_kv_pool", "HybridLinearKVPool") == (caught.value.field, caught.value.value)


def test_layer_with_other_kv_heads_than_the_model_is_refused() -> None:
    """If each rank holds one head, the pool does not show which. MiMo-V2 has such layers."""
    other = model()
    modules = [module for _, module in other.named_modules() if hasattr(module, "attn")]
    modules[0].total_num_kv_heads = HEADS
    assert described(model=other)
    modules[1].total_num_kv_heads = 2 * HEADS
    with pytest.raises(kvspec.SpecError) as caught:
        described(model=other)
    assert 2 * HEADS == caught.value.value
    assert caught.value.field.endswith("1.self_attn.total_num_kv_heads")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"port": "9-7"}',
        '{"public": "a:1"}',
        '{"overlap": 1}',
        '{"unknown": 1}',
        '{"hold": -1}',
        '{"staging": -1}',
        '{"staging": 1.5}',
        '{"host": 7}',
    ],
)
def test_wrong_settings_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSPEC_SGLANG", text)
    with pytest.raises(kvspec.SpecError):
        BackendSettings.of(settings())


def test_each_rank_listens_on_a_port_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSPEC_SGLANG", '{"port": "21700-21890"}')
    engine = Engine(2, 16, 1)
    ports = [int(address.rpartition(":")[2]) for address in engine.ranks[0].addresses]
    engine.close()
    assert all(21700 <= port <= 21890 for port in ports)
    assert 2 == len(set(ports))


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSPEC_SGLANG", '{"hold": 9, "key_content": {"rotary": "none"}}')
    found = BackendSettings.of(settings())
    assert (9, "m", kvspec.KeyContent(rotary="none")) == (
        found.hold,
        found.model,
        found.key_content,
    )


def refusal(transfer: Any) -> kvspec.SpecError:
    """Return the error of a transfer that has failed."""
    until(FAILED, [transfer])
    with pytest.raises(kvspec.SpecError) as caught:
        transfer.failure_exception()
    return caught.value


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 1 << 30},
        {"top_k": 1 << 30, "temperature": 0.5},
        {"logit_bias": {"7": 2.0}},
        {"repetition_penalty": 1.1},
        {"min_new_tokens": 3},
        {"json_schema": "{}"},
        {"regex": "a+"},
        {"custom_params": {"thinking_budget": 3}},
    ],
)
def test_first_token_of_other_sampling_settings_is_refused(changes: dict[str, Any]) -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        prefill(first, server, request(TOKENS))
        (receiver,) = receivers(second, server.address, ROOM, request(TOKENS, **changes))
        assert "remote_sampling" == refusal(receiver).field


def test_settings_of_greedy_sampling_that_change_nothing_are_equal() -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        prefill(first, server, request(TOKENS, top_p=0.5))
        got = receivers(second, server.address, ROOM, request(TOKENS, temperature=0.7))
        until(WAITING, got)


@pytest.mark.parametrize("name", ["extra_key", "cache_salt", "input_embeds", "lora_id", "session"])
def test_prompt_of_other_content_is_refused(name: str) -> None:
    asked = request(TOKENS)
    setattr(asked, name, [[1.0]] if name == "input_embeds" else "other")
    with pair((1, 16), (1, 16)) as (first, second, server):
        prefill(first, server, request(TOKENS))
        (receiver,) = receivers(second, server.address, ROOM, asked)
        field = {"input_embeds": "embeddings", "lora_id": "", "session": ""}.get(name, "salt")
        assert (f"remote_content.{field}" if field else name) == refusal(receiver).field


@pytest.mark.parametrize("image", [2, None])
def test_prompt_with_another_image_is_refused(image: int | None) -> None:
    """An image without a hash is unknown, so it is equal to none."""

    def asked(number: int | None) -> Any:
        found = request(TOKENS)
        item = SimpleNamespace(hash=number, offsets=[(3, 5)], modality="IMAGE")
        found.multimodal_inputs = SimpleNamespace(mm_items=[item])
        return found

    with pair((1, 16), (1, 16)) as (first, second, server):
        prefill(first, server, asked(1))
        (receiver,) = receivers(second, server.address, ROOM, asked(image))
        assert "remote_content.media" == refusal(receiver).field
        prefill(first, server, asked(1), 5)
        until(WAITING, receivers(second, server.address, 5, asked(1)))


def test_room_in_use_is_refused_at_both_ends_until_its_request_is_over() -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        (sent,) = prefill(first, server, request(TOKENS))
        (again,) = senders(first, server.address, ROOM, request(TOKENS))
        assert "bootstrap_room" == refusal(again).field
        (receiver,) = receivers(second, server.address, ROOM, request(TOKENS))
        (late,) = receivers(second, server.address, ROOM, request(TOKENS))
        assert "bootstrap_room" == refusal(late).field
        late.clear()
        receiver.clear()
        sent.abort()
        (free,) = senders(first, server.address, ROOM, request(TOKENS))
        assert WAITING == free.poll()


@pytest.mark.parametrize("room", [0, -1, 10**20, None, "5", [5], {}])
def test_number_that_is_no_room_fails_both_halves(room: Any) -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        (sent,) = senders(first, server.address, room, request(TOKENS))
        (got,) = receivers(second, server.address, room, request(TOKENS))
        for half in (sent, got):
            assert "bootstrap_room" == refusal(half).field


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1])
def test_log_probability_that_is_no_number_fails_its_request(value: float, place: int) -> None:
    asked = request(TOKENS, top=2)
    asked.logprob.output_top_logprobs_val[0][place] = value
    with pair((1, 16), (1, 16)) as (first, _, server):
        (sent,) = prefill(first, server, asked)
        assert "output_token_logprobs" == refusal(sent).field


@pytest.mark.parametrize("token", [1000, 1 << 31, 1 << 40])
def test_first_token_outside_of_the_vocabulary_is_refused(token: int) -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        prefill(first, server, request(TOKENS, first=token))
        (receiver,) = receivers(second, server.address, ROOM, request(TOKENS))
        assert "remote_first_token" == refusal(receiver).field


def test_more_log_probabilities_than_the_buffers_hold_are_refused() -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        prefill(first, server, request(TOKENS, top=130))
        (receiver,) = receivers(second, server.address, ROOM, request(TOKENS, top=2))
        assert "remote_first_logprobs" == refusal(receiver).field


def test_prompt_is_kept_while_its_decode_engine_has_no_memory() -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        first.ranks[0].settings = attrs.evolve(first.ranks[0].settings, hold=1.0)
        (sent,) = prefill(first, server, request(TOKENS))
        (receiver,) = receivers(second, server.address, ROOM, request(TOKENS))
        wait(lambda: receiver._lookup is not None and receiver._lookup.ended)
        until(WAITING, [receiver])
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            assert (TRANSFERRING, WAITING) == (sent.poll(), receiver.poll())
            time.sleep(0.05)
        receiver.send_metadata(pages_of(second, 37), 0, [], 0)
        until(SUCCESS, [receiver])
        second.check(pages_of(second, 37), len(TOKENS), seed=ROOM)


def test_chunks_are_loaded_before_the_whole_prompt_is_computed() -> None:
    """Pages of 4 and 16 tokens: a load begins inside of a page of the consumer."""
    with pair((1, 4), (2, 16)) as (first, second, server):
        own, taken = pages_of(first, 37), pages_of(second, 37)
        first.fill(own, 37, seed=ROOM)
        (sent,) = senders(first, server.address, ROOM, request(TOKENS))
        sent.init(len(own), 0)
        sent.send(own[:3], None, 12)
        got = receivers(second, server.address, ROOM, request(TOKENS))
        until(WAITING, got)
        for receiver in got:
            receiver.send_metadata(taken, 0, [], 0)

        def arrived(count: int) -> bool:
            assert TRANSFERRING == lowest(got)
            return all(receiver._arrived == count for receiver in got)

        wait(lambda: arrived(12))
        sent.send(own[3:7], None, 16)
        wait(lambda: arrived(28))
        assert WAITING == sent.poll()
        sent.send(own[7:], None, 9)
        until(SUCCESS, got)
        until(SUCCESS, [sent])
        second.check(taken, 37, seed=ROOM)
        whole = 37 * LAYERS * 2 * SIZE * 4
        assert [whole] * 2 == [each.session.stats().counters.bytes_read for each in second.ranks]


def test_load_of_chunks_that_fails_is_made_good_by_the_whole_prompt() -> None:
    with pair((1, 4), (1, 4)) as (first, second, server):
        own = pages_of(first, 37)
        first.fill(own, 37, seed=ROOM)
        (sent,) = senders(first, server.address, ROOM, request(TOKENS))
        sent.init(len(own), 0)
        sent.send(own[:3], None, 12)
        (receiver,) = receivers(second, server.address, ROOM, request(TOKENS))
        until(WAITING, [receiver])
        first.ranks[0].session.abort(sent._offered[0])
        receiver.send_metadata(own, 0, [], 0)
        wait(lambda: receiver.poll() == TRANSFERRING and receiver._load is None)
        sent.send(own[3:], None, 25)
        until(SUCCESS, [receiver])
        second.check(own, 37, seed=ROOM)


def test_update_of_weights_fails_all_requests_by_name() -> None:
    with pair((1, 16), (1, 16)) as (first, second, server):
        (sent,) = prefill(first, server, request(TOKENS))
        (receiver,) = receivers(second, server.address, ROOM, request(TOKENS))
        for half, engine in ((sent, first), (receiver, second)):
            engine.ranks[0].weights_changing()
            assert "weight_version" == refusal(half).field
            half.clear()
        (late,) = senders(first, server.address, 5, request(TOKENS))
        assert "weight_version" == refusal(late).field


def test_load_begins_after_the_forward_passes_that_may_write_its_memory() -> None:
    """With an overlap schedule, a pass of the memory's last owner may still run on the GPU."""
    ended: list[bool] = []
    with pair((1, 16), (1, 16), forwards=lambda: lambda: bool(ended)) as (first, second, server):
        prefill(first, server, request(TOKENS))
        (receiver,) = receivers(second, server.address, ROOM, request(TOKENS))
        until(WAITING, [receiver])
        own = pages_of(second, 37)
        receiver.send_metadata(own, 0, [], 0)
        for _ in range(100):
            assert TRANSFERRING == receiver.poll()
            time.sleep(0.005)
        second.fill(own, 37, seed=1)  # The pass writes.
        ended.append(True)
        until(SUCCESS, [receiver])
        second.check(own, 37, seed=ROOM)


def test_prompt_is_kept_while_sglang_polls_no_request() -> None:
    """SGLang polls none while it is paused, or while retracted requests wait for memory."""
    with pair((1, 16), (1, 16)) as (first, second, server):
        first.ranks[0].settings = attrs.evolve(first.ranks[0].settings, hold=1.0)
        (receiver,) = receivers(second, server.address, ROOM, request(TOKENS))
        (sent,) = prefill(first, server, request(TOKENS))
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            assert TRANSFERRING == sent.poll()
            time.sleep(0.05)
        until(WAITING, [receiver])
        receiver.send_metadata(pages_of(second, 37), 0, [], 0)
        until(SUCCESS, [receiver])
        second.check(pages_of(second, 37), len(TOKENS), seed=ROOM)


def test_prompt_of_a_receiver_that_is_refused_is_declined() -> None:
    with pair((1, 16), (2, 16)) as (first, second, server):
        for manager in second.ranks:
            manager.weights_changing()
        sent = prefill(first, server, request(TOKENS))
        for receiver in receivers(second, server.address, ROOM, request(TOKENS)):
            assert "weight_version" == refusal(receiver).field
        until(SUCCESS, sent)


def test_name_of_the_first_weights_names_no_others() -> None:
    """An engine that has started with the same name would accept their prompts."""
    version = "default"
    weights = Weights(lambda: version)
    assert "" == weights.stated
    weights.named = False
    weights.name(version)
    assert weights.stated is None
    with pytest.raises(kvspec.SpecError) as caught:
        weights.check()
    assert "weight_version" == caught.value.field
    version = "two"
    weights.name(version)
    assert "two" == weights.stated


def rejected(engine: Engine, address: str) -> None:
    """Let the schedulers of a decode engine reject a request, as too long ones."""
    host, _, port = address.partition(":")
    asked = SimpleNamespace(
        rid="r",
        bootstrap_host=host,
        bootstrap_port=int(port),
        bootstrap_room=ROOM,
        finished_reason=SimpleNamespace(message="too long"),
        to_finish=None,
        disagg_kv_sender=None,
    )
    for manager in engine.ranks:
        scheduler = SimpleNamespace(
            disagg_prefill_bootstrap_queue=None,
            disagg_decode_prealloc_queue=SimpleNamespace(kv_manager=manager),
            grammar_manager=SimpleNamespace(grammar_queue=[]),
        )
        plugin._request_added(None, scheduler, asked)
        plugin._request_handled(None, scheduler, asked)


@pytest.mark.parametrize("early", [True, False])
def test_prompt_that_the_decode_engine_rejects_is_declined_once(early: bool) -> None:
    with pair((1, 16), (2, 16)) as (first, second, server):
        if early:
            rejected(second, server.address)
        sent = prefill(first, server, request(TOKENS))
        if not early:
            rejected(second, server.address)
        until(SUCCESS, sent)
        wait(lambda: [1, 1] == [manager.metrics.declined for manager in second.ranks])


def test_ticket_is_published_again_if_its_server_does_not_answer_at_once() -> None:
    """On a busy machine, the server needs more time than one attempt has."""
    with pair((1, 16), (1, 16)) as (first, second, server):
        host, _, port = server.address.partition(":")
        server.close()
        (sent,) = prefill(first, server, request(TOKENS))
        for _ in range(50):
            assert TRANSFERRING == sent.poll()
            time.sleep(0.01)
        again = tickets.TicketServer(host, int(port))
        until(WAITING, receivers(second, again.address, ROOM, request(TOKENS)))
        again.close()


def test_prompts_fail_at_once_if_another_program_answers_in_place_of_the_server() -> None:
    """Each of them fails: the thread that publishes tickets goes on."""
    with servers(answers(b"hello")) as other:
        address = other.url.removeprefix("http://")
        engine = Engine(1, 16, int(address.rpartition(":")[2]))
        try:
            for room in (ROOM, ROOM + 1):
                (sent,) = prefill(engine, SimpleNamespace(address=address), request(TOKENS), room)
                until(FAILED, [sent])
                assert isinstance(sent.error, kvspec.SpecError)
                assert "ticket" == sent.error.field
        finally:
            engine.close()


def test_weights_have_no_name_before_their_last_part_is_loaded() -> None:
    """SGLang records the new version with each part."""
    with pair((1, 16), (1, 16)) as (first, _, server):
        own = first.ranks[0]
        queue = SimpleNamespace(kv_manager=own)
        updater = SimpleNamespace(scheduler=SimpleNamespace(disagg_prefill_bootstrap_queue=queue))

        def part(*_: Any) -> Any:
            plugin._weights_named(None, updater.scheduler, "two")
            return SimpleNamespace(success=True, message="")

        plugin._update_begins(updater)
        plugin._weights_updated(part, updater, SimpleNamespace(flush_cache=True))
        assert own.weights.stated is None
        (sent,) = senders(first, server.address, ROOM, request(TOKENS))
        assert "weight_version" == refusal(sent).field
        sent.clear()
        plugin._update_ended(None, updater)
        assert own.weights.stated is not None
        (sent,) = senders(first, server.address, ROOM, request(TOKENS))
        assert WAITING == sent.poll()


def test_keys_that_separate_callers_are_joined_with_a_border() -> None:
    """A caller chooses its salt, so it must not equal what another one has as its key."""
    keys = ((None, "a\nb"), ("a", "b"), ("a\nb", None), ("a", "b\nc"), ("a\nb", "c"),
            (None, '["a", "b"]'), ("a", None), (None, "a"))  # fmt: skip
    salts = set()
    for extra, salt in keys:
        asked = request(TOKENS)
        asked.extra_key, asked.cache_salt = extra, salt
        salts.add(identity_of(asked, "", 2).salt)
    assert len(keys) == len(salts)
