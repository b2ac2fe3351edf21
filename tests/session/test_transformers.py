"""Tests the adapter for transformers: real models with random weights exchange prompts."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

import kvspec
from kvspec.adapters.transformers import Prompts
from kvspec.errors import SpecError, TransferError
from kvspec.nixl import NixlRank
from kvspec.session import Session
from kvspec.specs.key_content import without_rotation
from kvspec.stored import (
    LoadError,
    MemoryObjects,
    ModelIdentity,
    PageStore,
    RankPages,
    StoredSpec,
)
from kvspec.testing import FakeNixl
from kvspec.tickets import ContentIdentity, PrefillTicket

pytestmark = pytest.mark.adapters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

HEADS = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8, "pad_token_id": 0,
    "max_position_embeddings": 256,
}  # fmt: skip
LATENT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 1, "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
OLD = {"vocab_size": 64, "n_embd": 48, "n_head": 3, "n_layer": 2, "n_positions": 256}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", HEADS),
    "qwen3": ("Qwen3Config", HEADS),
    "gemma3": ("Gemma3TextConfig", HEADS | {"sliding_window": 5, "layer_types": KINDS}),
    "mistral": ("MistralConfig", HEADS | {"sliding_window": 7}),
    "deepseek_v2": ("DeepseekV2Config", LATENT | {"head_dim": 8}),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "glm4": ("Glm4Config", HEADS),
    "cohere": ("CohereConfig", HEADS | {"use_qk_norm": True}),
    "smollm3": ("SmolLM3Config", HEADS | {"num_hidden_layers": 4}),
    "gpt_oss": ("GptOssConfig", HEADS | EXPERTS | {"sliding_window": 6}),
    "gpt_neox": ("GPTNeoXConfig", {**HEADS, "num_attention_heads": 3, "head_dim": None}),
    "gptj": ("GPTJConfig", OLD | {"rotary_dim": 8}),
    "bloom": ("BloomConfig", {"vocab_size": 64, "hidden_size": 48, "n_layer": 2, "n_head": 3}),
    "gpt2": ("GPT2Config", OLD),
    "llama4": (
        "Llama4TextConfig",
        HEADS | EXPERTS | {"intermediate_size_mlp": 64, "attention_chunk_size": 8},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        HEADS | {"num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1},
    ),
}
SERVED = ["llama", "qwen3", "gemma3", "mistral", "deepseek_v2", "deepseek_v3", "glm4", "smollm3"]


def network_of(name: str, dtype: str = "float32", **changed: Any) -> Any:
    """Return a small model with random weights, the same at each call."""
    torch.manual_seed(1)
    kind, fields = MODELS[name]
    config = getattr(transformers, kind)(**fields | changed)
    config.eos_token_id = config.bos_token_id = None
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    made.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return made.eval()


def prompt_of(tokens: int) -> Any:
    """Return the tokens of a prompt, [1, tokens]."""
    return torch.randint(3, 64, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def generated(network: Any, prompt: Any, cache: Any = None) -> tuple[list[int], Any]:
    """Return 16 greedy tokens after *prompt*, and the log probabilities of each step."""
    output = network.generate(
        prompt, past_key_values=cache, max_new_tokens=16, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    tokens = output.sequences[0, prompt.shape[1] :].tolist()
    return tokens, torch.stack(output.logits).float().log_softmax(-1)


@contextmanager
def side(name: str, network: Any, **changed: Any) -> Iterator[tuple[Prompts, Session]]:
    """Yield the prompts and the session of an engine. Its buffer is NaN at first."""
    model = changed.pop("model", "m")
    prompts = Prompts(network, **{"num_blocks": 32, "block_size": 4} | changed)
    for array in prompts.cache.owner[0]:
        array[:] = 255
    own = {"engine_id": name, "model": model, "background": True}
    with NixlRank() as nixl, Session(nixl, prompts.cache, **own) as session:
        yield prompts, session


def caches_of(network: Any) -> Iterator[Any]:
    """Yield an empty cache of each kind that a consumer can load into."""
    yield transformers.DynamicCache(config=network.config)
    yield transformers.DynamicCache()
    yield transformers.StaticCache(config=network.config, max_cache_len=64)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [*((name, 29) for name in SERVED), ("llama", 2)]
    + [(name, tokens) for name in ("gemma3", "mistral") for tokens in (2, 5, 6, 7)],
)
def test_model_generates_the_same_after_a_load(name: str, tokens: int) -> None:
    """Windows of 5 and 7 tokens are shorter, as long, and longer than the prompts."""
    network, prompt = network_of(name), prompt_of(tokens)
    alone, expected = generated(network, prompt)
    with (
        FakeNixl(),
        side("p", network) as (held, producer),
        side("d", network_of(name), block_size=8) as (loading, consumer),
    ):
        for cache in caches_of(network):
            ticket = held.hold(producer, "r", prompt, top_logprobs=2)
            read = PrefillTicket.from_params(ticket.to_params())
            loading.load(consumer, read, prompt, cache)
            assert tokens - 1 == cache.get_seq_length()
            found, logprobs = generated(network, prompt, cache)
            assert alone == found
            assert (logprobs - expected).abs().max() < 1e-5
            assert alone[0] == read.sampled(prompt[0].tolist(), "greedy")
            best = expected[0, 0].topk(2)
            assert best.indices.tolist() == [token for token, _ in read.first_logprobs or ()]
            assert best.values.tolist() == pytest.approx(
                [value for _, value in read.first_logprobs or ()], abs=1e-5
            )


@pytest.mark.parametrize("known", [0, 5, 28, 29])
def test_hold_computes_only_the_tokens_that_a_cache_lacks(known: int) -> None:
    """A cache of all tokens leaves no token to sample from."""
    network, prompt, cache = network_of("gemma3"), prompt_of(29), transformers.DynamicCache()
    alone, _ = generated(network, prompt)
    if known:
        network(prompt[:, :known], past_key_values=cache)
    with FakeNixl(), side("p", network) as (held, producer):
        ticket = held.hold(producer, "r", prompt, cache)
        assert 29 == cache.get_seq_length()
        assert (None if known == 29 else alone[0]) == ticket.first_token
        loaded = transformers.DynamicCache(config=network.config)
        with side("d", network) as (loading, consumer):
            loading.load(consumer, ticket, prompt, loaded)
    assert alone == generated(network, prompt, loaded)[0]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_loaded_cache_is_held_again_unless_a_window_has_lost_tokens(name: str) -> None:
    """The cache of a model with windows has zeros at the place of old tokens."""
    network, prompt = network_of(name), prompt_of(29)
    alone, _ = generated(network, prompt)
    for cache in (transformers.DynamicCache(), transformers.StaticCache(network.config, 64)):
        with FakeNixl(), side("p", network) as (held, producer):
            ticket = held.hold(producer, "r", prompt)
            with side("d", network) as (loading, consumer):
                loading.load(consumer, ticket, prompt, cache)
                if name == "llama":
                    assert alone[0] == loading.hold(consumer, "s", prompt, cache).first_token
                    continue
                with pytest.raises(SpecError) as caught:
                    loading.hold(consumer, "s", prompt, cache)
                assert "cache" == caught.value.field


def test_cache_that_was_reset_has_no_zeros() -> None:
    """A server resets a static cache, and uses it for the next prompt."""
    network, prompt, short = network_of("gemma3"), prompt_of(29), prompt_of(4)
    alone, _ = generated(network, short)
    cache = transformers.StaticCache(network.config, 64)
    with (
        FakeNixl(),
        side("p", network) as (held, producer),
        side("d", network) as (loading, consumer),
    ):
        loading.load(consumer, held.hold(producer, "r", prompt), prompt, cache)
        cache.reset()
        assert alone[0] == loading.hold(consumer, "s", short, cache).first_token


def test_copy_of_a_loaded_cache_is_refused_as_the_cache_itself() -> None:
    """Transformers recommends a deep copy to use the prompt of a cache again."""
    network, prompt, cache = network_of("gemma3"), prompt_of(29), transformers.DynamicCache()
    with FakeNixl(), side("p", network) as (held, producer):
        ticket = held.hold(producer, "r", prompt)
        with side("d", network) as (loading, consumer):
            loading.load(consumer, ticket, prompt, cache)
            with pytest.raises(SpecError) as caught:
                loading.hold(consumer, "s", prompt, copy.deepcopy(cache))
    assert "cache" == caught.value.field


@pytest.mark.parametrize("kind", range(3))
def test_cache_is_empty_after_an_error_between_two_layers(
    kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is exhausted after the first layer. The model then computes the prompt."""
    network, prompt = network_of("gemma3"), prompt_of(29)
    cache = [*caches_of(network)][kind]
    update, alone = type(cache).update, generated(network, prompt)[0]

    def exhausted(self: Any, keys: Any, values: Any, number: int, *more: Any) -> Any:
        if number == 1:
            raise torch.OutOfMemoryError
        return update(self, keys, values, number, *more)

    with FakeNixl(), side("p", network) as (held, producer):
        ticket = held.hold(producer, "r", prompt)
        with side("d", network) as (loading, consumer), monkeypatch.context() as patched:
            patched.setattr(type(cache), "update", exhausted)
            with pytest.raises(torch.OutOfMemoryError):
                loading.load(consumer, ticket, prompt, cache)
            assert 0 == cache.get_seq_length()
            patched.undo()
            assert alone == generated(network, prompt, cache)[0]
            cache.reset()
            loading.load(consumer, held.hold(producer, "r", prompt), prompt, cache)
    assert alone == generated(network, prompt, cache)[0]


def test_session_of_another_buffer_is_refused() -> None:
    """A notebook makes `Prompts` again, and passes the old session."""
    network, prompt, cache = network_of("llama"), prompt_of(29), transformers.DynamicCache()
    with (
        FakeNixl(),
        side("p", network) as (held, producer),
        side("d", network) as (loading, consumer),
    ):
        ticket = held.hold(producer, "r", prompt)
        assert "session" == refusal(loading, producer, ticket, prompt, cache).field
        with pytest.raises(SpecError) as caught:
            held.hold(consumer, "r", prompt)
        assert "session" == caught.value.field


def content(rotary: str, size: int = 8, start: int = 0, **changed: Any) -> kvspec.KeyContent:
    """Return a meaning of keys."""
    return kvspec.KeyContent(rotary=rotary, rotary_start=start, rotary_size=size, **changed)


MEANINGS = {
    "llama": [content("halves")] * 3,
    "qwen3": [content("halves", normalized=True)] * 3,
    "gemma3": [content("halves", normalized=True)] * 3,
    "deepseek_v2": [content("pairs", start=16, normalized=True)] * 2,
    "deepseek_v3": [content("halves", start=16, normalized=True)] * 2,
    "glm4": [content("pairs", 4)] * 3,
    "cohere": [content("pairs", normalized=True)] * 3,
    "smollm3": [content("halves")] * 3 + [content("none", 0)],
    "gpt_oss": [content("halves")] * 3,
    "gpt_neox": [content("halves", 4)] * 3,
    "gptj": [content("pairs")] * 2,
    "bloom": [content("none", 0)] * 2,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [*MEANINGS])
def test_probe_finds_the_meaning_of_keys(name: str, dtype: str) -> None:
    """The elements that turn together are found in each element type."""
    engine = Prompts(network_of(name, dtype), num_blocks=1).engine
    specs = {layer: group.spec for group in engine.groups for layer in group.layers}
    contents = [specs[f"layers.{n}"].key_content for n in range(len(specs))]
    assert MEANINGS[name] == [without_rotation(each) for each in contents]
    rotated = [each for each in contents if each.rotary != "none"]
    # GPT-J computes its angles in a function that keeps no buffer.
    assert all((each.frequencies is None) == (name == "gptj") for each in rotated)
    assert {dtype} == {spec.dtype for spec in specs.values()}


LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        (LONG, "cache.layers[0].keys"),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "rope_type"),
    ],
)
def test_rotation_that_depends_on_the_length_of_a_prompt_is_refused(
    rope: dict[str, Any], field: str
) -> None:
    """The model uses the long factors only in prompts of more than 32 tokens."""
    with pytest.raises(SpecError) as caught:
        Prompts(network_of("llama", rope_parameters=rope), num_blocks=1)
    assert caught.value.field.endswith(field)


def test_longrope_is_stated_if_no_prompt_is_long() -> None:
    """The last position of the model still has the short factors."""
    network = network_of("llama", rope_parameters=LONG, max_position_embeddings=32)
    content = Prompts(network, num_blocks=1).engine.groups[0].spec.key_content
    assert content.frequencies == pytest.approx((1, 0.1, 0.01, 0.001))


def test_models_with_another_rotary_base_do_not_fit() -> None:
    """One of them was started with another `rope_theta`."""
    other = {"rope_type": "default", "rope_theta": 5e5}
    engines = [
        Prompts(network_of("llama", **changed), num_blocks=1).engine
        for changed in ({}, {"rope_parameters": other})
    ]
    (mismatch,) = kvspec.mismatches(*engines)
    assert mismatch.field.endswith("key_content.frequencies[1]")
    assert (mismatch.producer, mismatch.consumer) == pytest.approx((0.1, 5e5**-0.25))
    assert not kvspec.mismatches(engines[0], engines[0])


def test_engine_has_the_windows_and_sizes_of_the_model() -> None:
    """Layers 0 and 2 have a window of 5 tokens."""
    prompts = Prompts(network_of("gemma3"), num_blocks=1, layer_name="model.layers.{}.attn")
    window, full = prompts.engine.groups
    assert ("model.layers.0.attn", "model.layers.2.attn") == window.layers
    assert (5, 6, 8) == (
        window.spec.sliding_window,
        window.spec.total_num_kv_heads,
        full.spec.head_size,
    )
    assert 24 == Prompts(network_of("deepseek_v3"), num_blocks=1).engine.groups[0].spec.head_size


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gpt2", "cache.layers[0].keys"),
        ("llama4", "cache.layers[0]"),
        ("qwen3_next", "network.past_key_values.layers[0]"),
    ],
)
def test_models_that_are_not_known_are_refused_by_name(name: str, field: str) -> None:
    """Learned positions, chunked attention and recurrent states."""
    with pytest.raises(SpecError) as caught:
        Prompts(network_of(name), num_blocks=1)
    assert field == caught.value.field


def test_model_with_an_unknown_normalisation_or_in_training_is_refused() -> None:
    network = network_of("llama")
    network.model.layers[1].self_attn.other_norm = torch.nn.LayerNorm(8).eval()
    with pytest.raises(SpecError) as caught:
        Prompts(network, num_blocks=1)
    assert ("cache.layers[1].attention", ["other_norm"]) == (
        caught.value.field,
        caught.value.value,
    )
    with pytest.raises(SpecError) as caught:
        Prompts(network_of("llama").train(), num_blocks=1)
    assert ("network.training", True) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("part", ["network", "a dropout"])
def test_hold_rejects_a_model_that_was_set_to_training(part: str) -> None:
    """Dropout would change the keys."""
    network = network_of("llama")
    with FakeNixl(), side("p", network) as (held, producer):
        if part == "network":
            network.train()
        else:
            network.model.layers[0].self_attn.add_module("dropout", torch.nn.Dropout())
        with pytest.raises(SpecError) as caught:
            held.hold(producer, "r", prompt_of(9))
    assert ("network.training", True) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize(
    ("name", "changed"),
    [("llama", {"is_causal": False}), ("gemma3", {"use_bidirectional_attention": True})],
)
def test_model_whose_keys_depend_on_later_tokens_is_refused(
    name: str, changed: dict[str, Any]
) -> None:
    """A consumer computes the last token after the others."""
    with pytest.raises(SpecError) as caught:
        Prompts(network_of(name, **changed), num_blocks=1)
    assert "cache.layers[1].keys" == caught.value.field


def test_model_that_ignores_positions_is_refused() -> None:
    """It counts tokens, so the keys of the probe would look as if they were not rotated."""
    network = network_of("llama")
    forward = network.model.forward

    def counting(**arguments: Any) -> Any:
        return forward(**arguments | {"position_ids": None})

    network.model.forward = counting
    with pytest.raises(SpecError) as caught:
        Prompts(network, num_blocks=1)
    assert "cache.layers[0].keys" == caught.value.field


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_deep_model_with_attention_sinks_and_experts_is_recognised(dtype: str) -> None:
    """At each position the attention to the sink is rounded differently."""
    network = network_of(
        "gpt_oss", dtype, num_hidden_layers=12, num_local_experts=16, num_experts_per_tok=4,
        hidden_size=96, max_position_embeddings=131072, initializer_range=0.1,
    )  # fmt: skip
    for layer in network.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    engine = Prompts(network, num_blocks=1).engine
    assert all(8 == group.spec.key_content.rotary_size for group in engine.groups)


POSITIONS = {
    "DynamicLayer": lambda n: (n, range(n)),
    "DynamicSlidingWindowLayer": lambda n: (min(n, 4), range(max(n - 4, 0), n)),
    "StaticLayer": lambda n: (64, range(n)),
    "StaticSlidingWindowLayer": lambda n: (5, range(max(n - 5, 0), n)),
}


@pytest.mark.parametrize("tokens", [3, 4, 5, 6, 12])
def test_transformers_keeps_these_positions_after_a_prefill_and_a_step(tokens: int) -> None:
    """The keys of each position are compared with those of a cache that forgets nothing."""
    network, prompt, whole = (
        network_of("gemma3"),
        prompt_of(tokens + 1),
        transformers.DynamicCache(),
    )
    with torch.no_grad():
        network(prompt, past_key_values=whole)
        for cache in caches_of(network):
            for count, part in ((tokens, prompt[:, :-1]), (tokens + 1, prompt[:, -1:])):
                network(part, past_key_values=cache)
                for layer, kept in zip(cache.layers, whole.layers, strict=True):
                    rows, held = POSITIONS[type(layer).__name__](count)
                    assert (rows, count) == (layer.keys.shape[-2], layer.get_seq_length())
                    for name in ("keys", "values"):
                        found = getattr(layer, name)[:, :, : len(held)]
                        expected = getattr(kept, name)[:, :, held.start : held.stop]
                        assert torch.allclose(expected, found, atol=1e-5)


def refusal(loading: Prompts, *arguments: Any) -> SpecError:
    """Return the error of a load."""
    with pytest.raises(SpecError) as caught:
        loading.load(*arguments)
    return caught.value


def test_load_rejects_caches_and_tickets_that_do_not_fit() -> None:
    """Each error names the field, and nothing was loaded. No block is lost."""
    network, prompt = network_of("gemma3"), prompt_of(29)
    config, mistral = network.config, network_of("mistral").config
    narrow = network_of("gemma3", sliding_window=4).config
    offloading = transformers.DynamicCache()
    offloading.offloading = True  # Its constructor needs a GPU.
    half = transformers.StaticCache(config=config, max_cache_len=64)
    half.early_initialization(1, 6, 8, torch.float16, "cpu")
    full = transformers.DynamicCache(config=config)
    network(prompt, past_key_values=full)
    empty = transformers.DynamicCache(config=config)
    with (
        FakeNixl(),
        side("p", network) as (held, producer),
        side("d", network) as (loading, consumer),
    ):
        ticket = held.hold(producer, "r", prompt, consumer="d")
        for cache, field in (
            (None, "cache"),
            (transformers.DynamicCache(config=mistral), "cache.layers"),
            (full, "cache"),
            (transformers.StaticCache(config=config, max_cache_len=9), "max_cache_len"),
            (transformers.DynamicCache(config=narrow), "sliding_window"),
            (offloading, "cache.offloading"),
            (half, "keys"),
        ):
            error = refusal(loading, consumer, ticket, prompt, cache)
            assert error.field.endswith(field)
        for changed, field in (
            (
                {"content": ContentIdentity.of_text([1] * ticket.computed_tokens)},
                "remote_content.tokens",
            ),
            ({"content": None}, "remote_content"),
            ({"consumer": "e"}, "remote_consumer"),
        ):
            poisoned = attrs.evolve(ticket, **changed)
            assert field == refusal(loading, consumer, poisoned, prompt, empty).field
        padded = torch.nn.functional.pad(prompt, (2, 0))
        for tokens in (prompt[:, :1], prompt.repeat(2, 1), "text", [], padded):
            assert "input_ids" == refusal(loading, consumer, ticket, tokens, empty).field
        assert 0 == empty.get_seq_length()
        loading.load(consumer, ticket, prompt, empty)
        assert all(32 == len(free) for free in loading._buffer._free.values())
        assert "cache" == refusal(loading, consumer, ticket, prompt, empty).field


VISION: dict[str, Any] = {
    "text_config": {
        **HEADS, "head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
    "vision_config": {
        "depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "intermediate_size": 32,
        "out_hidden_size": 48,
    },
    "image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62,
    "vision_end_token_id": 63,
}  # fmt: skip


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_shift_of_an_earlier_image_is_refused(name: str) -> None:
    """It would shift all positions of a prompt whose cache is not empty."""
    torch.manual_seed(1)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    network = kind(getattr(transformers, f"{name}Config")(**VISION)).eval()
    network.generation_config = transformers.GenerationConfig(pad_token_id=0)
    prompt = torch.randint(3, 50, (1, 20))
    alone, _ = generated(network, prompt)
    with (
        FakeNixl(),
        side("p", network) as (held, producer),
        side("d", network) as (loading, consumer),
    ):
        ticket = held.hold(producer, "r", prompt)
        network.model.rope_deltas = torch.tensor([[-5]])
        cache = transformers.DynamicCache(config=network.config.text_config)
        for call in (
            lambda: held.hold(producer, "r", prompt),
            lambda: loading.load(consumer, ticket, prompt, cache),
        ):
            with pytest.raises(SpecError) as caught:
                call()
            assert ("network.rope_deltas", [[-5]]) == (caught.value.field, caught.value.value)
        network.model.rope_deltas = None
        loading.load(consumer, ticket, prompt, cache)
        assert alone == generated(network, prompt, cache)[0]


def test_hold_rejects_caches_that_do_not_fit() -> None:
    """A window has forgotten a token. A cache has more tokens, or two prompts. Blocks are few."""
    network, prompt = network_of("gemma3"), prompt_of(29)
    window = transformers.DynamicCache(config=network.config)
    longer, two = transformers.DynamicCache(), transformers.DynamicCache()
    with torch.no_grad():
        network(prompt[:, :28], past_key_values=window)
        network(prompt_of(30), past_key_values=longer)
        network(prompt[:, :9].repeat(2, 1), past_key_values=two)
    with FakeNixl(), side("p", network) as (held, producer):
        for cache, field in (
            (window, "cache of 'layers.0'"),
            (longer, "cache"),
            (two, "cache.batch_size"),
        ):
            with pytest.raises(SpecError) as caught:
                held.hold(producer, "r", prompt, cache)
            assert field == caught.value.field
        for tokens, options, field in (
            (200, {}, "num_blocks"),
            (9, {"top_logprobs": -1}, "top_logprobs"),
        ):
            with pytest.raises(SpecError) as caught:
                held.hold(producer, "r", prompt_of(tokens), **options)
            assert field == caught.value.field
        assert () == producer.held
        assert all(32 == len(free) for free in held._buffer._free.values())


def filled(network: Any, tokens: int = 29) -> Any:
    """Return a cache of all tokens of a prompt, which forgets nothing."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        network(prompt_of(tokens), past_key_values=cache)
    return cache


def interrupted(network: Any) -> Any:
    """Return a cache whose last layer has fewer tokens, after an interrupt of the model."""
    cache = transformers.StaticCache(config=network.config, max_cache_len=64)
    with torch.no_grad():
        network(prompt_of(29), past_key_values=cache)
    cache.layers[-1].reset()
    return cache


@pytest.mark.parametrize(
    ("cache", "field"),
    [
        (lambda: filled(network_of("llama")), "cache of 'layers.0'.keys"),
        (lambda: filled(network_of("llama", "float16")), "cache of 'layers.0'.keys"),
        (lambda: filled(network_of("llama", "bfloat16", head_dim=16)), "cache of 'layers.0'.keys"),
        (
            lambda: filled(network_of("llama", "bfloat16", num_key_value_heads=1)),
            "cache of 'layers.0'.keys",
        ),
        (lambda: interrupted(network_of("llama", "bfloat16")), "cache.layers"),
    ],
    ids=["wider dtype", "other dtype", "head size", "heads", "lengths"],
)
def test_hold_rejects_a_full_cache_of_another_model(cache: Any, field: str) -> None:
    """The model computes nothing, so it does not notice."""
    with FakeNixl(), side("p", network_of("llama", "bfloat16")) as (held, producer):
        with pytest.raises(SpecError) as caught:
            held.hold(producer, "r", prompt_of(29), cache())
        assert field == caught.value.field


def test_hold_rejects_tokens_that_the_model_has_added() -> None:
    """Prompt tuning computes virtual tokens before those of the caller."""
    network = network_of("llama")
    forward = network.forward

    def tuned(input_ids: Any, **more: Any) -> Any:
        return forward(torch.cat([input_ids[:, :1], input_ids], dim=1), **more)

    network.forward = tuned
    with FakeNixl(), side("p", network) as (held, producer):
        with pytest.raises(SpecError) as caught:
            held.hold(producer, "r", prompt_of(29))
        assert ("cache", "30 tokens") == (caught.value.field, caught.value.value)


def test_hold_rejects_padding_unless_it_is_the_end_token() -> None:
    """`generate` masks the padding of a prompt. It does not mask an end token."""
    network, padded = network_of("llama"), torch.nn.functional.pad(prompt_of(9), (2, 0))
    with FakeNixl(), side("p", network) as (held, producer):
        with pytest.raises(SpecError) as caught:
            held.hold(producer, "r", padded)
        assert "input_ids" == caught.value.field
        network.generation_config.eos_token_id = [7, 0]
        assert generated(network, padded)[0][0] == held.hold(producer, "r", padded).first_token


@pytest.mark.parametrize("top_logprobs", [0, 1, 5, 20])
def test_first_token_of_equal_logits_is_that_of_the_model(top_logprobs: int) -> None:
    """The best two logits are often equal in bfloat16."""
    network, prompt = network_of("llama", "bfloat16", tie_word_embeddings=False), prompt_of(9)
    torch.nn.init.zeros_(network.lm_head.weight)
    alone, _ = generated(network, prompt)
    with FakeNixl(), side("p", network) as (held, producer):
        ticket = held.hold(producer, "r", prompt, top_logprobs=top_logprobs)
    assert alone[0] == ticket.first_token
    assert top_logprobs == len(ticket.first_logprobs or ())


def test_hold_rejects_the_place_of_an_image() -> None:
    """The tokens of two images are equal."""
    network, prompt = network_of("llama"), prompt_of(9)
    network.config.image_token_id = int(prompt[0, 4])
    with FakeNixl(), side("p", network) as (held, producer):
        with pytest.raises(SpecError) as caught:
            held.hold(producer, "r", prompt)
        assert "input_ids" == caught.value.field


def test_hold_rejects_a_prompt_beyond_the_positions_of_the_model() -> None:
    """LongRoPE turns its keys by other angles than those that were probed."""
    network = network_of("llama", rope_parameters=LONG, max_position_embeddings=32)
    with FakeNixl(), side("p", network) as (held, producer):
        held.hold(producer, "r", prompt_of(32))
        with pytest.raises(SpecError) as caught:
            held.hold(producer, "r", prompt_of(33))
        assert "input_ids" == caught.value.field


@pytest.mark.parametrize(
    ("consumer", "fields"),
    [
        (lambda: side("d", network_of("llama"), model="other"), {"model"}),
        (lambda: side("d", network_of("llama", "float16")), {"dtype"}),
        (lambda: side("d", network_of("qwen3")), {"key_content"}),
        (lambda: side("d", network_of("glm4")), {"key_content"}),
        (lambda: side("d", network_of("llama"), layer_name="h.{}"), {"layers"}),
    ],
    ids=["model", "dtype", "normalized", "rotary range", "names"],
)
def test_load_from_another_model_is_refused_by_name(consumer: Any, fields: set[str]) -> None:
    """The cache is still empty, so the caller can compute the prompt."""
    prompt = prompt_of(29)
    with (
        FakeNixl(),
        side("p", network_of("llama")) as (held, producer),
        consumer() as (loading, session),
    ):
        ticket = held.hold(producer, "r", prompt)
        cache = transformers.DynamicCache(config=loading._network.config)
        with pytest.raises(TransferError) as caught:
            loading.load(session, ticket, prompt, cache)
        assert isinstance(caught.value.__cause__, kvspec.MismatchError)
        found = {mismatch.field for mismatch in caught.value.__cause__.mismatches}
        assert any(field in name for field in fields for name in found), found
        assert 0 == cache.get_seq_length()
        assert all(32 == len(free) for free in loading._buffer._free.values())


def turned_in_pairs(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
    """Return *q* and *k* with elements 2i and 2i + 1 rotated together."""
    cos, sin = (x[..., : x.shape[-1] // 2].unsqueeze(unsqueeze_dim) for x in (cos, sin))

    def turned(x: Any) -> Any:
        one, other = x[..., ::2], x[..., 1::2]
        return torch.stack((one * cos - other * sin, other * cos + one * sin), -1).flatten(-2)

    return turned(q), turned(k)


def test_keys_in_pairs_are_equal_to_keys_in_halves_after_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two models compute the same function. Their stored keys differ by a permutation."""
    halves, pairs, prompt = network_of("llama"), network_of("llama"), prompt_of(29)
    alone, expected = generated(halves, prompt)
    with torch.no_grad():
        for layer in pairs.model.layers:
            for weight in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
                own = weight.view(-1, 2, 4, weight.shape[1])
                weight.copy_(own.transpose(1, 2).reshape(weight.shape))
    cache = transformers.DynamicCache(config=halves.config)
    with FakeNixl(), side("d", halves, block_size=8) as (loading, consumer):
        with monkeypatch.context() as patched:
            module = transformers.models.llama.modeling_llama
            patched.setattr(module, "apply_rotary_pos_emb", turned_in_pairs)
            with side("p", pairs) as (held, producer):
                assert "pairs" == held.engine.groups[0].spec.key_content.rotary
                ticket = held.hold(producer, "r", prompt)
                loading.load(consumer, ticket, prompt, cache)
        found, logprobs = generated(halves, prompt, cache)
    assert alone == found
    assert (logprobs - expected).abs().max() < 1e-5


@pytest.mark.nixl
def test_example_of_the_page_loads_and_generates() -> None:
    """It runs over real NIXL. The tokens are those of the model alone."""
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    (code,) = re.findall(
        r"^```python notebook\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    )
    here: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), here)  # noqa: S102 - our own page
    alone = here["network"].generate(here["input_ids"], max_new_tokens=16, do_sample=False)
    assert 39 == here["loaded"]
    assert torch.equal(alone, here["output"])
    lines = [line for line in code.splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 35


MODEL = ModelIdentity(model="m", revision="1", weights="", quantization="", overrides="")


def store_of(prompts: Prompts, objects: MemoryObjects, **changed: str) -> RankPages:
    """Return the pages of an engine. A page has 8 tokens."""
    placement = StoredSpec.of(prompts.engine, page_tokens=8, head_groups=1)
    model = attrs.evolve(MODEL, **changed)
    return PageStore(placement, model, objects).rank_pages(prompts.cache)


@pytest.mark.parametrize("name", SERVED)
def test_model_continues_from_saved_pages(name: str) -> None:
    """Of 29 tokens, 3 pages are whole."""
    network, prompt, objects = network_of(name), prompt_of(29), MemoryObjects()
    alone, expected = generated(network, prompt)
    first = Prompts(network, num_blocks=32, block_size=4)
    assert first.save(store_of(first, objects), prompt).written
    second = Prompts(network_of(name), num_blocks=32, block_size=8)
    for array in second.cache.owner[0]:
        array[:] = 255
    for cache in caches_of(network):
        assert second.load_saved(store_of(second, objects), prompt, cache) == 24
        assert cache.get_seq_length() == 24
        found, logprobs = generated(network, prompt, cache)
        assert alone == found
        assert (logprobs - expected).abs().max() < 1e-5


def test_next_turn_continues_from_the_pages_of_an_answer() -> None:
    network, prompt, objects = network_of("llama"), prompt_of(29), MemoryObjects()
    cache = transformers.DynamicCache()
    answer, _ = generated(network, prompt, cache)
    history = torch.cat([prompt, torch.tensor([answer])], dim=1)
    side = Prompts(network, num_blocks=32, block_size=4)
    # The last token was sampled, but not computed.
    side.save(store_of(side, objects), history[:, :-1], cache)
    turn = torch.cat([history, prompt_of(9)], dim=1)
    loaded = transformers.DynamicCache()
    assert side.load_saved(store_of(side, objects), turn, loaded) == 40
    assert generated(network, turn)[0] == generated(network, turn, loaded)[0]


@pytest.mark.parametrize("what", ["salt", "adapter", "revision"])
def test_pages_under_another_name_are_not_loaded(what: str) -> None:
    network, prompt, objects = network_of("llama"), prompt_of(29), MemoryObjects()
    side = Prompts(network, num_blocks=32, block_size=4)
    side.save(store_of(side, objects), prompt)
    pages = store_of(side, objects, **({what: "2"} if what == "revision" else {}))
    asked = {} if what == "revision" else {what: "other@2"}
    cache = transformers.DynamicCache()
    assert side.load_saved(pages, prompt, cache, **asked) == 0
    assert not cache.get_seq_length()
    assert side.load_saved(store_of(side, objects), prompt, cache) == 24


def test_damaged_page_leaves_the_cache_empty() -> None:
    network, prompt, objects = network_of("llama"), prompt_of(29), MemoryObjects()
    side = Prompts(network, num_blocks=32, block_size=4)
    key = side.save(store_of(side, objects), prompt).written[-1]
    payload, checksum = objects._pages[key[:2]][key]
    objects._pages[key[:2]][key] = bytes([payload[0] ^ 1, *payload[1:]]), checksum
    cache = transformers.DynamicCache()
    with pytest.raises(LoadError, match="checksum"):
        side.load_saved(store_of(side, objects), prompt, cache)
    assert not cache.get_seq_length()


def test_pages_of_an_adapter_need_its_name() -> None:
    network = network_of("llama")
    network.peft_config = {}
    side = Prompts(network, num_blocks=32, block_size=4)
    pages = store_of(side, MemoryObjects())
    for adapter in (None, ""):
        with pytest.raises(SpecError, match="adapter"):
            side.save(pages, prompt_of(29), adapter=adapter)
    assert side.save(pages, prompt_of(29), adapter="sql@1f3a").written


def test_pages_of_another_cache_are_refused() -> None:
    network = network_of("llama")
    first, second = (Prompts(network, num_blocks=32, block_size=4) for _ in range(2))
    with pytest.raises(SpecError, match="pages"):
        first.save(store_of(second, MemoryObjects()), prompt_of(29))
