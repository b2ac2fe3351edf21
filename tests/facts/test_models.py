"""Tests that `models.from_config` builds the groups of an engine from a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import LLAMA
from refused import refusal

import kvspec
from kvspec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    models,
)
from kvspec.models import catalogue
from kvspec.models.architectures import ARCHITECTURES, NOT_YET
from kvspec.models.fields import FULL, window

GOLDENS = Path(__file__).parents[1] / "goldens"
FACTS: list[dict[str, Any]] = json.loads((GOLDENS / "arch_facts.json").read_text())["rows"]
WINDOWS: dict[str, Any] = json.loads((GOLDENS / "transformers_windows.json").read_text())
STATES: dict[str, Any] = json.loads((GOLDENS / "vllm_conv_split.json").read_text())["models"]


FULL_NAME = "full_attention"


def unclear(model_type: str, config: dict[str, Any]) -> bool:
    """Return whether only some engines apply the window or the chunk of *config* to the model."""
    (row,) = (row for row in ARCHITECTURES if model_type in row.names)
    names = {FULL: ("sliding_window", "attention_chunk_size"), window: ("attention_chunk_size",)}
    # vLLM gives every second layer a window, and none to the layers of Qwen2-MoE.
    if row.ruled and config.get("layer_types") not in (None, ["sliding_attention", FULL_NAME] * 3):
        return True
    if "use_sliding_window" in row.only and config.get("use_sliding_window"):
        return True
    unread = [name for name in names.get(row.kinds, ()) if name not in row.defaults]
    return any(config.get(name) is not None for name in unread)


def groups_of(config: Any, **options: Any) -> dict[str, KVCacheGroup]:
    """Return the groups by name. A *config* that is a str is a name in the catalogue."""
    mapping = catalogue.config(config) if isinstance(config, str) else config
    return {group.name: group for group in models.from_config(mapping, **options)}


def spec_of(config: Any, group: str = "full", **options: Any) -> Any:
    """Return the spec of one group."""
    return groups_of(config, **options)[group].spec


def indices(group: KVCacheGroup) -> list[int]:
    """Return the numbers in the names of the layers."""
    return [int(next(word for word in n.split(".") if word.isdigit())) for n in group.layers]


# Facts that vLLM computes for the same configs.


@pytest.mark.parametrize(
    "row", FACTS, ids=[f"{i}-{row['config']['model_type']}" for i, row in enumerate(FACTS)]
)
def test_heads_sizes_and_layers_equal_those_of_vllm(row: dict[str, Any]) -> None:
    """The groups together have all layers of the model."""
    facts = row["facts"]
    groups = groups_of(row["config"], dtype="bfloat16")
    layers = {index for group in groups.values() for index in indices(group)}
    assert set(range(facts["total_num_hidden_layers"])) == layers
    assert facts["is_deepseek_mla"] == ("mla" in groups)
    for group in groups.values():
        spec = group.spec.of_layer(group.layers[0])
        if isinstance(spec, MLAAttentionSpec):
            assert facts["head_size"] == spec.head_size
        elif isinstance(spec, FullAttentionSpec):
            assert facts["total_num_kv_heads"] == spec.total_num_kv_heads
            assert facts["head_size"] == spec.head_size


@pytest.mark.parametrize("model_type", WINDOWS["types"])
def test_layers_read_the_cached_tokens_that_transformers_attends_to(model_type: str) -> None:
    """The masks of transformers are recorded. A config that fails there is rejected."""
    for case in WINDOWS["types"][model_type]:
        for change in (WINDOWS["changes"][index] for index in case["changes"]):
            config = {**WINDOWS["config"], **change, "model_type": model_type}
            if "error" in case["answer"] or unclear(model_type, config):
                refusal(lambda: models.from_config(config, dtype="bfloat16"))  # noqa: B023
                continue
            reads: dict[int, tuple[int, int, int]] = {}
            for group in models.from_config(config, dtype="bfloat16"):
                spec: Any = group.spec
                live = len(spec.live_tokens(case["answer"]["cached"]))
                layer = live, spec.total_num_kv_heads, spec.head_size
                reads |= dict.fromkeys(indices(group), layer)
            sizes = case["answer"]["heads"], case["answer"]["head_size"]
            # vLLM and SGLang give the windows of this model one token more than transformers.
            cached, wider = case["answer"]["cached"], model_type == "cohere2"
            expected = [(tokens + (wider and tokens < cached), *sizes)
                        for tokens in case["answer"]["reads"]]  # fmt: skip
            assert expected == [reads[index] for index in range(len(expected))], change


def test_recorded_rows_have_groups_of_every_kind() -> None:
    """A new kind of group needs a recorded row."""
    kinds = {name for row in FACTS for name in groups_of(row["config"], dtype="bfloat16")}
    recorded = {"full", "mla", "sliding_window", "chunked_local", "mamba", "gated_delta_net"}
    assert recorded == kinds


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("Bamba-9B", "bamba-9b"),
        ("Nemotron-H-8B", "nemotron-h-8b"),
        ("Qwen3-Next-80B-A3B", "qwen3-next"),
        ("Jamba-v0.1", "jamba-mini"),
    ],
)
def test_states_have_sizes_recorded_from_vllm(name: str, recorded: str) -> None:
    """The recorded shapes of vLLM's states belong to these sizes."""
    sizes = dict(STATES[recorded])
    make = getattr(MambaSpec, sizes.pop("kind"))
    *_, group = models.from_config(catalogue.config(name))
    # The recording has sizes only. The class decides the type of the temporal state.
    assert make(**sizes, dtype="bfloat16", ssm_dtype=group.spec.ssm_dtype) == group.spec


# Models with attention.


def test_llama_has_one_group_of_full_attention() -> None:
    """Layers have the names of vLLM. The head size is the hidden size divided by the heads."""
    (group,) = models.from_config(LLAMA, block_size=32)
    assert "full" == group.name
    assert ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn") == group.layers
    expected = FullAttentionSpec(
        block_size=32, total_num_kv_heads=2, head_size=64, dtype="bfloat16"
    )
    assert expected == group.spec


def test_config_without_kv_heads_has_multi_head_attention() -> None:
    """Without `num_key_value_heads` each attention head has its own keys and values."""
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert 4 == spec_of(config).total_num_kv_heads


def test_head_dim_takes_precedence_over_hidden_size() -> None:
    """Qwen3-0.6B has 16 heads of 128 in a hidden size of 1024."""
    spec = spec_of("Qwen3-0.6B")
    assert (8, 128) == (spec.total_num_kv_heads, spec.head_size)


@pytest.mark.parametrize(("window", "name"), [(4096, "sliding_window"), (None, "full")])
def test_mistral_window_determines_its_group(window: int | None, name: str) -> None:
    """Mistral 7B v0.1 has a window. In v0.2 the window is null."""
    (group,) = models.from_config(catalogue.config("Mistral-7B-v0.1") | {"sliding_window": window})
    assert name == group.name
    assert window == getattr(group.spec, "sliding_window", None)


def test_mistral_without_a_window_key_has_the_window_of_its_class() -> None:
    """Only an explicit null turns the window off."""
    config = catalogue.config("Mistral-7B-v0.1")
    (group,) = models.from_config({k: config[k] for k in config if k != "sliding_window"})
    assert 4096 == getattr(group.spec, "sliding_window", None)


def test_qwen_window_needs_flag_and_starts_at_max_window_layers() -> None:
    """Without `use_sliding_window` the value of `sliding_window` has no effect."""
    off = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
    assert ["full"] == list(groups_of(off))
    on = groups_of({**off, "use_sliding_window": True, "max_window_layers": 1})
    assert {"full": [0], "sliding_window": [1]} == {n: indices(g) for n, g in on.items()}


def test_gemma_3_has_one_full_layer_after_five_with_window() -> None:
    """The config has only some sizes. The model class has the defaults, and the period 6."""
    groups = groups_of("gemma-3-4b")
    assert ["full", "sliding_window"] == list(groups)
    assert [5, 11, 17, 23, 29] == indices(groups["full"])
    assert "language_model.model.layers.5.self_attn.attn" == groups["full"].layers[0]
    expected = SlidingWindowSpec(
        block_size=16, total_num_kv_heads=4, head_size=256, dtype="bfloat16", sliding_window=1024
    )
    assert expected == groups["sliding_window"].spec


def test_gpt_oss_layers_alternate_with_and_without_layer_types() -> None:
    """The default of the model class is the order in the published config."""
    listed = catalogue.config("gpt-oss-20b")
    unlisted = {key: value for key, value in listed.items() if key != "layer_types"}
    assert models.from_config(listed) == models.from_config(unlisted)
    groups = groups_of(listed)
    assert list(range(1, 24, 2)) == indices(groups["full"])
    assert list(range(0, 24, 2)) == indices(groups["sliding_window"])
    assert 128 == groups["sliding_window"].spec.sliding_window  # type: ignore[attr-defined]


def test_llama_4_layers_with_rotary_positions_have_chunked_attention() -> None:
    """Every fourth layer is full. A list of flags may describe this. A chunk size is required."""
    config = catalogue.config("Llama-4-Scout-17B-16E")
    text: Any = config["text_config"]
    groups = groups_of(config)
    assert list(range(3, 48, 4)) == indices(groups["full"])
    assert isinstance(groups["chunked_local"].spec, ChunkedLocalAttentionSpec)
    assert 8192 == groups["chunked_local"].spec.attention_chunk_size
    flags = [int((i + 1) % 4 != 0) for i in range(48)]
    assert groups == groups_of({**config, "text_config": {**text, "no_rope_layers": flags}})
    unchunked = {**text, "attention_chunk_size": None}
    assert ["full"] == list(groups_of({**config, "text_config": unchunked}))


def test_falcon_has_one_kv_head_except_in_newer_decoder() -> None:
    """The newer decoder ignores `multi_query` and has `num_kv_heads`."""
    falcon = catalogue.config("falcon-7b")
    assert 1 == spec_of(falcon).total_num_kv_heads
    newer = falcon | {"new_decoder_architecture": True, "num_kv_heads": 8}
    newer |= {"num_attention_heads": 128, "hidden_size": 8192}
    assert 8 == spec_of(newer).total_num_kv_heads


@pytest.mark.parametrize("name", ["DeepSeek-V3", "DeepSeek-R1", "Kimi-K2"])
def test_mla_has_one_latent_of_576_elements(name: str) -> None:
    """The latent has kv_lora_rank + qk_rope_head_dim elements, for any number of heads."""
    (group,) = models.from_config(catalogue.config(name))
    assert ("mla", 61) == (group.name, len(group.layers))
    assert MLAAttentionSpec(block_size=16, head_size=576, dtype="bfloat16") == group.spec


def test_deepseek_v32_has_indexer_keys_and_latents_in_one_group() -> None:
    """For each token and layer the latent has 1152 bytes and the key 128 + 4 bytes."""
    (group,) = models.from_config(catalogue.config("DeepSeek-V3.2"), block_size=64)
    assert isinstance(group.spec, UniformTypeKVCacheSpecs)
    assert ("mla", 2 * 61) == (group.name, len(group.layers))
    assert "model.layers.0.self_attn.indexer.k_cache" == group.layers[1]
    pages = [group.spec.of_layer(layer).page_size_bytes() for layer in group.layers[:2]]
    assert [64 * 1152, 64 * 132] == pages


def test_deepseek_v32_indexer_pages_have_keys_and_then_scales() -> None:
    """So they move between unequal block sizes: each token has a latent, a key and a scale."""
    config = catalogue.config("DeepSeek-V3.2") | {"num_hidden_layers": 1}
    (group,) = models.from_config(config, block_size=64)
    parts = {part.tensor: part.content_bytes for part in group.spec.of_layer(group.layers[1]).parts}
    assert {"latent": 128, "latent_scale": 4} == parts
    sides = [
        kvspec.EngineSpec(groups=models.from_config(config, block_size=size)) for size in (64, 128)
    ]
    traffic = kvspec.traffic(kvspec.plan_transfer(*sides), num_tokens=33)
    assert 33 * (1152 + 128 + 4) == traffic.total.nbytes


def test_slices_of_a_uniform_group_are_those_of_its_layers() -> None:
    """Latents, keys and scales have one unit each, which each rank reads from one replica."""
    (group,) = models.from_config(
        catalogue.config("DeepSeek-V3.2") | {"num_hidden_layers": 2}, block_size=64
    )
    slices = group.spec.get_tp_transfer_slices(1, 2, 4)
    assert {("latent",), ("latent", "latent_scale")} == {each.parts for each in slices}
    assert set(group.layers) == {layer for each in slices for layer in each.layers}
    assert {range(1)} == {each.global_range for each in slices}


INDEX_CACHES = [
    ({}, [*range(10)]),
    ({"index_topk_freq": 4}, [0, 1, 5, 9]),
    ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, [0, 4, 8]),
    ({"index_topk_pattern": "FSSFSSSSSF"}, [0, 3, 9]),
]


@pytest.mark.parametrize(("fields", "expected"), INDEX_CACHES)
def test_index_cache_gives_only_some_layers_an_indexer(
    fields: dict[str, Any], expected: list[int]
) -> None:
    """The numbers follow from vLLM's rule in models/deepseek_v32/attention.py."""
    config = catalogue.config("DeepSeek-V3.2") | {"num_hidden_layers": 10} | fields
    (group,) = models.from_config(config, block_size=64)
    layers = [layer for layer in group.layers if layer.endswith("indexer.k_cache")]
    assert expected == [int(layer.split(".")[2]) for layer in layers]
    assert 10 + len(expected) == len(group.layers)


@pytest.mark.parametrize("pattern", ["FS", "FSSFSSSSSX", 5, ["F"] * 3])
def test_from_config_rejects_pattern_of_indexers_that_it_cannot_read(pattern: object) -> None:
    config = catalogue.config("DeepSeek-V3.2") | {"num_hidden_layers": 10}
    error = refusal(lambda: models.from_config(config | {"index_topk_pattern": pattern}))
    assert ("index_topk_pattern", pattern) == (error.field, error.value)


MODELOPT: list[dict[str, Any]] = [
    {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    {"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "fp8"}},
    {
        "quant_method": "modelopt",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    },
    {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    },
]
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
TENSORS = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}


@pytest.mark.parametrize("quantisation", [*MODELOPT, TENSORS])
def test_checkpoint_with_fp8_cache_has_8_bit_keys(quantisation: dict[str, Any]) -> None:
    """Engines take the type of the cache from the checkpoint if the caller passes none."""
    config = LLAMA | {"quantization_config": quantisation}
    assert "float8_e4m3fn" == spec_of(config).dtype
    assert "bfloat16" == spec_of(config, dtype="bfloat16").dtype


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "fp8"},
        {"quant_method": "awq", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": None},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "int8"},
        {"quant_method": "modelopt", "kv_cache_quant_algo": None},
        {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "dynamic": True}},
        # vLLM derives the method of an older file from the algorithm of the weights.
        {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}},
    ],
)
def test_other_quantisation_keeps_the_type_of_the_config(quantisation: dict[str, Any]) -> None:
    assert spec_of(LLAMA).dtype == spec_of(LLAMA | {"quantization_config": quantisation}).dtype


@pytest.mark.parametrize(
    ("quantisation", "field"),
    [
        # vLLM keeps an 8-bit cache, and SGLang one of the type of the model.
        (TENSORS | {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}, "kv_cache_scheme"),
        (TENSORS | {"kv_cache_scheme": SCHEME | {"dynamic": True}}, "kv_cache_scheme"),
        # SGLang keeps an 8-bit cache, and vLLM one of the type of the model.
        ({"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo"),
    ],
)
def test_from_config_refuses_cache_that_only_one_engine_quantises(
    quantisation: dict[str, Any], field: str
) -> None:
    config = LLAMA | {"quantization_config": quantisation}
    error = refusal(lambda: models.from_config(config))
    assert (f"quantization_config.{field}", quantisation[field]) == (error.field, error.value)
    assert "bfloat16" == spec_of(config, dtype="bfloat16").dtype


def test_from_config_refuses_scheme_of_latents_that_only_sglang_applies() -> None:
    """The latent attention of vLLM does not read the scheme."""
    config = catalogue.config("DeepSeek-V3") | {"quantization_config": TENSORS}
    error = refusal(lambda: models.from_config(config))
    assert ("quantization_config.kv_cache_scheme", SCHEME) == (error.field, error.value)


def test_from_config_refuses_quantised_cache_of_the_nested_config() -> None:
    """Engines take the type of the cache only from the outer config."""
    nested = {"model_type": "llava", "text_config": LLAMA | {"quantization_config": MODELOPT[0]}}
    error = refusal(lambda: models.from_config(nested))
    assert "text_config.quantization_config" == error.field


def test_from_config_refuses_checkpoint_with_nvfp4_cache() -> None:
    config = LLAMA | {
        "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}
    }
    error = refusal(lambda: models.from_config(config))
    assert ("quantization_config", "NVFP4") == (error.field, error.value)


def test_from_config_refuses_8_bit_latents_that_depend_on_the_engine() -> None:
    """FlashMLA stores a token of DeepSeek-V3.2 in 656 bytes with scales, others in 576 bytes."""
    config = catalogue.config("DeepSeek-V3.2")
    error = refusal(lambda: models.from_config(config | {"quantization_config": MODELOPT[0]}))
    assert ("quantization_config", "float8_e4m3fn") == (error.field, error.value)
    declared = models.from_config(config | {"quantization_config": MODELOPT[0]}, dtype="bfloat16")
    assert models.from_config(config) == declared


def test_quantisation_beside_the_config_counts(tmp_path: Path) -> None:
    """Older versions of ModelOpt write hf_quant_config.json."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    beside = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    (group,) = models.from_config(tmp_path)
    assert "float8_e4m3fn" == group.spec.dtype  # type: ignore[attr-defined]


def test_from_config_rejects_indexer_key_with_partial_scale_block() -> None:
    """A scale belongs to 128 elements of the key."""
    config = catalogue.config("DeepSeek-V3.2") | {"index_head_dim": 96}
    error = refusal(lambda: models.from_config(config))
    assert error.field.endswith("index_head_dim")
    assert 96 == error.value
    assert "128" in error.expected


# Models with recurrent layers.


def test_qwen3_next_has_one_attention_after_three_gated_delta_nets() -> None:
    """The config has 16 key heads and 32 value heads of 128 elements."""
    groups = groups_of("Qwen3-Next-80B-A3B")
    assert list(range(3, 48, 4)) == indices(groups["full"])
    assert "model.layers.0.linear_attn" == groups["gated_delta_net"].layers[0]
    expected = MambaSpec.gated_delta_net(
        num_k_heads=16,
        num_v_heads=32,
        head_k_dim=128,
        head_v_dim=128,
        conv_kernel=4,
        dtype="bfloat16",
    )
    assert expected == groups["gated_delta_net"].spec


def test_nemotron_h_config_has_one_letter_for_each_layer() -> None:
    """The model has 24 Mamba2 layers, 4 attention layers and 24 layers without a cache."""
    groups = groups_of("Nemotron-H-8B")
    assert [7, 18, 29, 40] == indices(groups["full"])
    assert 24 == len(groups["mamba"].layers)
    assert "model.layers.7.mixer.attn" == groups["full"].layers[0]
    expected = MambaSpec.mamba2(
        num_heads=128, head_dim=64, n_groups=8, state_size=128, conv_kernel=4, dtype="bfloat16",
        ssm_dtype="float32",  # The default of all engines for this class.
    )  # fmt: skip
    assert expected == groups["mamba"].spec


def test_nemotron_h_config_counts_its_letters_if_it_has_no_number() -> None:
    """The class of transformers does so. A number must equal the count."""
    config = catalogue.config("Nemotron-H-8B")
    short = {key: value for key, value in config.items() if key != "num_hidden_layers"}
    assert config != short
    assert models.from_config(config) == models.from_config(short)


def test_granite_4_config_lists_type_of_each_layer() -> None:
    """The model has 36 Mamba2 layers of one group, and 4 attention layers."""
    groups = groups_of("granite-4.0-h-tiny")
    assert [5, 15, 25, 35] == indices(groups["full"])
    expected = MambaSpec.mamba2(
        num_heads=48, head_dim=64, n_groups=1, state_size=128, conv_kernel=4, dtype="bfloat16"
    )
    assert expected == groups["mamba"].spec


def test_bamba_config_lists_attention_layers() -> None:
    """All layers that are not in `attn_layer_indices` are Mamba2."""
    groups = groups_of("Bamba-9B")
    assert [9, 18, 27] == indices(groups["full"])
    assert 29 == len(groups["mamba"].layers)


def test_jamba_has_attention_at_offset_of_each_period() -> None:
    """The offset is 4 and the period 8. A Mamba1 state has mamba_expand * hidden_size channels."""
    groups = groups_of("Jamba-v0.1")
    assert [4, 12, 20, 28] == indices(groups["full"])
    expected = MambaSpec.mamba1(
        intermediate_size=8192, state_size=16, conv_kernel=4, dtype="bfloat16"
    )
    assert expected == groups["mamba"].spec


def test_model_without_attention_has_only_group_of_states() -> None:
    """Falcon Mamba has no cache that grows with the tokens."""
    assert ["mamba"] == list(groups_of("falcon-mamba-7b"))


def test_short_convolutions_and_attention_are_two_groups() -> None:
    """The conv state of LFM2 has conv_L_cache - 1 rows of conv_dim channels."""
    config = {
        **LLAMA,
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention"],
        "conv_dim": 256,
        "conv_L_cache": 3,
    }
    groups = groups_of(config)
    assert [[1], [0]] == [indices(groups[name]) for name in ("full", "short_conv")]
    expected = MambaSpec.short_conv(conv_dim=256, conv_kernel=3, dtype="bfloat16")
    assert expected == groups["short_conv"].spec


def test_speculative_tokens_lengthen_only_conv_states() -> None:
    """Each speculative token adds one row to the conv parts."""
    plain, longer = (
        {part.name: part.states for part in spec_of("Nemotron-H-8B", "mamba", **more).parts}
        for more in ({}, {"num_speculative_tokens": 2})
    )
    expected = {name: rows + (0 if name == "ssm" else 2) for name, rows in plain.items()}
    assert expected == longer


@pytest.mark.parametrize("field", ["num_key_value_heads", "head_dim"])
def test_size_with_a_default_of_the_class_is_required(field: str) -> None:
    """GPT-OSS has 8 KV heads of 64 elements by default, whatever the other sizes are."""
    sizes: dict[str, object] = {
        "model_type": "gpt_oss", "num_hidden_layers": 2, "hidden_size": 64, "sliding_window": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    assert {2} == {group.spec.total_num_kv_heads for group in models.from_config(sizes)}
    error = refusal(lambda: models.from_config({key: sizes[key] for key in sizes if key != field}))
    assert (field, None) == (error.field, error.value)


# Layers that differ, and models that are refused.


def test_layers_that_differ_have_their_own_sizes() -> None:
    """Transformers reads `per_layer_config` for every class."""
    own = {"1": {"num_key_value_heads": 1, "head_dim": 16}}
    (group,) = models.from_config({**LLAMA, "per_layer_config": own})
    specs: Any = [group.spec.of_layer(layer) for layer in group.layers]
    assert [(2, 64), (1, 16)] == [(spec.total_num_kv_heads, spec.head_size) for spec in specs]
    same = {"0": {"num_key_value_heads": 2}, "1": {"intermediate_size": 7, "skip": []}}
    assert models.from_config(LLAMA) == models.from_config({**LLAMA, "per_layer_config": same})


@pytest.mark.parametrize(
    ("own", "field", "value"),
    [
        ([], "per_layer_config", []),
        ({"2": {}}, "per_layer_config.2", "2"),
        ({"x": {}}, "per_layer_config.x", "x"),
        ({"1": 3}, "per_layer_config.1", 3),
        ({"1": {"skip": ["attention"]}}, "per_layer_config.1.skip", ["attention"]),
        ({"1": {"sliding_window": 8}}, "per_layer_config.1.sliding_window", 8),
        ({"1": {"num_key_value_heads": 0}}, "num_key_value_heads", 0),
    ],
)
def test_from_config_rejects_layers_that_differ_in_another_way(
    own: object, field: str, value: object
) -> None:
    error = refusal(lambda: models.from_config({**LLAMA, "per_layer_config": own}))
    assert (field, value) == (error.field, error.value)


def test_from_config_rejects_states_that_differ_by_layer() -> None:
    own = {"per_layer_config": {"0": {"linear_num_value_heads": 8}}}
    error = refusal(lambda: models.from_config(catalogue.config("Qwen3-Next-80B-A3B") | own))
    assert "per_layer_config.0.linear_num_value_heads" == error.field


def test_from_config_refuses_indexers_of_a_class_without_them() -> None:
    """VLLM's class of DeepSeek-V3 makes indexers if the config has `index_topk`."""
    config = catalogue.config("DeepSeek-V3") | {"index_topk": 2048}
    error = refusal(lambda: models.from_config(config))
    assert ("index_topk", 2048) == (error.field, error.value)


def test_from_config_rejects_contradicting_indexers() -> None:
    """Transformers follows the list, and vLLM the frequency."""
    config = catalogue.config("DeepSeek-V3.2") | {"num_hidden_layers": 4, "index_topk_freq": 3}
    listed = ["full", "full", "shared", "shared"]
    assert models.from_config(config) == models.from_config(config | {"indexer_types": listed})
    error = refusal(lambda: models.from_config(config | {"indexer_types": ["full"] * 4}))
    assert ("indexer_types", ["full"] * 4) == (error.field, error.value)


@pytest.mark.parametrize(("name", "reason"), NOT_YET.items())
def test_refusal_of_a_known_model_names_what_is_missing(name: str, reason: str) -> None:
    key = "model_type" if name.islower() else "architectures"
    value = name if name.islower() else [name]
    error = refusal(lambda: models.from_config({**LLAMA, "architectures": None, key: value}))
    assert (key, value, f"not yet: {reason}") == (error.field, error.value, error.rule)
    assert name not in {row_name for row in ARCHITECTURES for row_name in row.names}


FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_ssm": 256,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "dtype": "bfloat16",
}


def test_states_and_attention_of_one_layer_are_on_one_stage() -> None:
    """VLLM gives the state of layer 0 the number 4. The default stages would part the two."""
    groups = models.from_config(FALCON_H1)
    error = refusal(
        lambda: kvspec.EngineSpec(groups=groups, parallel=kvspec.ParallelConfig(pp_size=2))
    )
    assert ("stages", None) == (error.field, error.value)
    named = [
        [name for group in groups for name in group.layers[first : first + 2]] for first in (0, 2)
    ]
    parallel = kvspec.ParallelConfig(pp_size=2, stages=named)
    engine = kvspec.EngineSpec(groups=groups, parallel=parallel)
    assert {"model.layers.1.attn": 0, "model.5.mixer": 0, "model.6.mixer": 1}.items() <= (
        engine.stage_of.items()
    )


V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 3,
    "head_dim": 512,
    "sliding_window": 128,
    "index_head_dim": 128,
    "compress_ratios": [0, 4, 128],
}


@pytest.mark.parametrize(
    ("change", "options", "field", "value"),
    [
        ({"dtype": "bfloat16"}, {"dtype": None}, "dtype", None),
        ({}, {"block_size": 64}, "block_size", 64),
        ({"head_dim": 256}, {"dtype": "uint8"}, "head_dim", 256),
        ({"compress_ratios": [0, 2, 128]}, {}, "compress_ratios", [0, 2, 128]),
        ({"compress_ratios": [0]}, {}, "compress_ratios", [0]),
        ({"index_head_dim": 96}, {}, "index_head_dim", 96),
        ({"compress_rates": {}}, {}, "compress_rates", {}),
    ],
)
def test_from_config_rejects_invalid_compressed_latents(
    change: dict[str, Any], options: dict[str, Any], field: str, value: object
) -> None:
    given = {"block_size": 256, "dtype": "bfloat16", **options}
    error = refusal(lambda: models.from_config({**V4, **change}, **given))
    assert (field, value) == (error.field, error.value)


def test_compressed_latents_have_the_pages_of_vllm() -> None:
    """The bytes are those of the table in vLLM's models/deepseek_v4, without padding."""
    groups = groups_of(V4, dtype="uint8", block_size=256)
    pages = {
        layer: group.spec.of_layer(layer).page_size_bytes()
        for group in groups.values()
        for layer in group.layers
    }
    assert 64 * 584 == pages["model.layers.0.attn.swa_cache"] == pages["model.layers.1.attn"]
    assert 2 * 584 == pages["model.layers.2.attn"]
    assert 64 * 132 == pages["model.layers.1.attn.indexer.k_cache"]
    assert 4 * 2048 * 4 == pages["model.layers.1.attn.compressor.state_cache"]
    assert 4 * 512 * 4 == pages["model.layers.1.attn.indexer.compressor.state_cache"]
    assert 8 * 1024 * 4 == pages["model.layers.2.attn.compressor.state_cache"]


def test_compressed_latents_move_between_engines_of_other_sizes() -> None:
    groups = models.from_config(V4, dtype="bfloat16", block_size=256)
    producer, consumer = (
        kvspec.EngineSpec(groups=groups, parallel=kvspec.ParallelConfig(tp_size=size))
        for size in (4, 2)
    )
    plan = kvspec.plan_transfer(producer, consumer)
    traffic = kvspec.traffic(plan, num_tokens=256)
    # 127 rows of each window, 64 and 2 latents, 64 keys, and the sums of 7 and of 127 tokens.
    rows = 3 * 127 * 1024 + (64 + 2) * 1024 + 64 * 132 + 7 * (8192 + 2048) + 127 * 4096
    assert 2 * rows == traffic.total.nbytes


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (
            {"architectures": ["BailingMoeV3ForCausalLM"], "layer_group_size": 4,
             "num_hidden_layers": 6},
            "num_hidden_layers", 6,
        ),
        (
            {"architectures": ["MiMoV2FlashForCausalLM"], "hybrid_layer_pattern": [0, 2]},
            "hybrid_layer_pattern", [0, 2],
        ),
        (
            {"architectures": ["Dots1ForCausalLM"], "sliding_window": 8},
            "layer_types", None,
        ),
        ({"model_type": "internlm3", "num_key_value_heads": 2}, "head_dim", None),
    ],
)  # fmt: skip
def test_from_config_rejects_layers_about_which_engines_differ(
    config: dict[str, Any], field: str, value: object
) -> None:
    error = refusal(lambda: models.from_config({**LLAMA, **config}))
    assert (field, value) == (error.field, error.value)


def test_values_and_windows_of_mimo_have_sizes_of_their_own() -> None:
    config = {
        **LLAMA,
        "architectures": ["MiMoV2FlashForCausalLM"],
        "hybrid_layer_pattern": [0, 1],
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "sliding_window_size": 128,
    }
    full, window = (spec_of(config, name) for name in ("full", "sliding_window"))
    assert (2, 192, 128) == (full.total_num_kv_heads, full.head_size, full.head_size_v)
    assert (8, 192, 192, 128) == (
        window.total_num_kv_heads,
        window.head_size,
        window.head_size_v,
        window.sliding_window,
    )


def test_shared_blocks_of_zamba_have_the_numbers_of_vllm() -> None:
    """VLLM counts the layers of the first block of weights, then those of the second."""
    config: dict[str, object] = {
        **LLAMA,
        "architectures": ["Zamba2ForCausalLM"],
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "layers_block_type": ["hybrid"] * 5,
        "attention_head_dim": 64,
        "n_mamba_heads": 8,
        "mamba_headdim": 64,
        "mamba_ngroups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    }
    assert [0, 1, 2, 3, 4] == indices(groups_of(config)["full"])
    assert [0, 3, 1, 4, 2] == indices(groups_of({**config, "num_mem_blocks": 2})["full"])


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("Nemotron-H-8B", {}, "float32"),
        ("Nemotron-H-8B", {"mamba_ssm_cache_dtype": "bfloat16"}, "bfloat16"),
        ("Qwen3-Next-80B-A3B", {}, "bfloat16"),
        ("Qwen3-Next-80B-A3B",
         {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
          "mamba_ssm_dtype": "float32"}, "float32"),
        ("Bamba-9B", {"mamba_ssm_dtype": "bfloat16"}, "bfloat16"),
    ],
)  # fmt: skip
def test_temporal_state_has_the_type_that_vllm_reads(
    name: str, change: dict[str, object], expected: str
) -> None:
    *_, group = models.from_config(catalogue.config(name) | change)
    assert isinstance(group.spec, MambaSpec)
    assert expected == group.spec.ssm_dtype


def test_window_layers_of_step_have_a_head_size_of_their_own() -> None:
    """Without a head size, it is the hidden size divided by the heads of the layer."""
    config = {
        **LLAMA,
        "architectures": ["Step3p5ForCausalLM"],
        "head_dim": None,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 8,
            "num_attention_groups": 2,
        },
    }
    sizes = [spec_of(config, name).head_size for name in ("full", "sliding_window")]
    assert [64, 32] == sizes


DIVIDED = [row for row in ARCHITECTURES if "num_attention_heads*head_dim" in row.products]


@pytest.mark.parametrize("name", [row.names[0] for row in DIVIDED])
def test_from_config_refuses_head_size_that_only_some_engines_read(name: str) -> None:
    """The class of vLLM, SGLang or transformers divides the hidden size by the heads."""
    (row,) = (row for row in DIVIDED if name in row.names)
    config = LLAMA | {"architectures": [name], "layer_types": None, "head_dim": 80}
    error = refusal(lambda: models.from_config(config))
    assert ("num_attention_heads", 4) == (error.field, error.value), row


@pytest.mark.parametrize(
    "name", ["qwen2", "stablelm", "granitemoe", "granitemoehybrid", "jamba", "lfm2", "mixtral"]
)
def test_classes_that_divide_the_hidden_size_are_known(name: str) -> None:
    """These are vLLM's qwen2.py, stablelm.py and so on, and SGLang's mixtral.py."""
    assert any(name in row.names for row in DIVIDED)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "OPTForCausalLM", "GPTNeoXForCausalLM"])
def test_from_config_refuses_kv_heads_of_class_without_them(name: str) -> None:
    config = LLAMA | {"architectures": [name]}
    error = refusal(lambda: models.from_config(config))
    assert ("num_key_value_heads", 2) == (error.field, error.value)
    assert 4 == spec_of(config | {"num_key_value_heads": 4}).total_num_kv_heads


def test_shared_kv_head_is_a_field_of_some_classes_only() -> None:
    """Other classes ignore `multi_query`. Falcon's older decoder has no groups of heads."""
    assert 2 == spec_of(LLAMA | {"multi_query": True}).total_num_kv_heads
    falcon = catalogue.config("falcon-7b") | {"multi_query": False}
    assert 71 == spec_of(falcon).total_num_kv_heads
    error = refusal(lambda: models.from_config(falcon | {"num_kv_heads": 8}))
    assert ("num_key_value_heads", 8) == (error.field, error.value)


@pytest.mark.parametrize(
    ("architecture", "flag"),
    [("Qwen2ForCausalLM", "use_sliding_window"), ("FalconForCausalLM", "multi_query")],
)
@pytest.mark.parametrize("value", [1, "true"])
def test_from_config_refuses_flag_that_is_no_bool(
    architecture: str, flag: str, value: object
) -> None:
    """Python takes 1 for true, and JSON does not."""
    config = LLAMA | {"architectures": [architecture], flag: value}
    error = refusal(lambda: models.from_config(config))
    assert (flag, value) == (error.field, error.value)


def test_from_config_refuses_types_on_which_engines_differ() -> None:
    """VLLM reads the outer type, SGLang the inner one. Both run float32 with another type."""
    nested = {"model_type": "llava", "torch_dtype": "float16", "text_config": LLAMA}
    error = refusal(lambda: models.from_config(nested))
    assert ("text_config.dtype", "bfloat16") == (error.field, error.value)
    assert "float16" == spec_of(nested, dtype="float16").dtype
    assert "bfloat16" == spec_of({**nested, "torch_dtype": "bfloat16"}).dtype
    error = refusal(lambda: models.from_config(LLAMA | {"torch_dtype": "float32"}))
    assert ("dtype", "float32") == (error.field, error.value)


@pytest.mark.parametrize("name", ["gemma-2-9b", "gemma-3-1b", "GLM-4-9B-0414"])
def test_from_config_refuses_float16_for_classes_that_vllm_runs_with_bfloat16(name: str) -> None:
    config = catalogue.config(name) | {"torch_dtype": "float16"}
    error = refusal(lambda: models.from_config(config))
    assert ("dtype", "float16") == (error.field, error.value)


@pytest.mark.parametrize(
    ("architecture", "key", "field"),
    [
        ("LlamaForCausalLM", "attention_head_dim", "head_dim"),
        ("LlamaForCausalLM", "num_kv_heads", "num_key_value_heads"),
        ("PhiMoEForCausalLM", "sliding_window_size", "sliding_window"),
    ],
)
def test_from_config_refuses_key_that_the_class_ignores(
    architecture: str, key: str, field: str
) -> None:
    """The config omits the usual field. The other key does not replace it."""
    config = {**LLAMA, "architectures": [architecture], "head_dim": 64, field: None, key: 6}
    error = refusal(lambda: models.from_config(config))
    assert (key, 6) == (error.field, error.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"compress_ratios": [4, 128]}, "compress_ratios"),
    ],
)
def test_from_config_refuses_other_layers_of_deepseek_v4(
    change: dict[str, Any], field: str
) -> None:
    """VLLM follows the ratios, and transformers the types."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "compressed_sparse_attention"],
    }
    options: dict[str, Any] = {"block_size": 256, "dtype": "bfloat16"}
    assert models.from_config(config, **options) == models.from_config(
        {**config, "compress_ratios": [0, 4]}, **options
    )
    error = refusal(lambda: models.from_config({**config, **change}, **options))
    assert field == error.field


def test_from_config_refuses_kv_heads_that_do_not_divide_the_heads() -> None:
    """No engine runs such a model."""
    for heads in (3, 8):
        error = refusal(lambda: models.from_config(LLAMA | {"num_key_value_heads": heads}))  # noqa: B023
        assert ("num_key_value_heads", heads) == (error.field, error.value)


def test_from_config_refuses_type_of_another_class() -> None:
    """VLLM makes the class that `architectures` names, and transformers that of `model_type`."""
    config = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 64}
    assert models.from_config(config | {"model_type": "gemma2"})
    error = refusal(lambda: models.from_config(config | {"model_type": "llama"}))
    assert ("model_type", "llama") == (error.field, error.value)


def test_from_config_refuses_language_model_that_its_class_does_not_have() -> None:
    """Gemma 3 has a language model of its own, whatever the type of the nested config is."""
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": LLAMA}
    error = refusal(lambda: models.from_config(nested | {"model_type": "gemma3"}))
    assert ("architectures", nested["architectures"]) == (error.field, error.value)
