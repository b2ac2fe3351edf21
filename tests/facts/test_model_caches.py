"""Tests that `models.from_config` gives each layer the cache that transformers and vLLM make.

`python bench/architectures.py --record` and `python bench/vllm_specs.py --record` recorded the
caches: see there.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import vllm_specs
from model_caches import verdict_of
from refused import refusal

from kvspec import models
from kvspec.models import catalogue
from kvspec.models.architectures import ARCHITECTURES, Architecture

GOLDENS = Path(__file__).parents[1] / "goldens"
RECORDED: dict[str, Any] = json.loads(
    gzip.decompress((GOLDENS / "transformers_caches.json.gz").read_bytes())
)
TYPES: dict[str, dict[str, Any]] = RECORDED["types"]
SPECS: dict[str, dict[str, Any]] = json.loads(
    gzip.decompress((GOLDENS / "vllm_specs.json.gz").read_bytes())
)["models"]
KNOWN = {name for row in ARCHITECTURES for name in row.names}

# Types whose config transformers saves without fields that vLLM and published files need.
ONLY_VLLM = {"mimo_v2_flash", "kimi_linear"}

# Rows without a record, and where their facts come from.
OTHERWISE = {"ernie4_5_vl_moe_text": "the attention of Ernie4_5_MoeForCausalLM"}


def names_of(config: dict[str, Any], *classes: str) -> set[str]:
    """Return the names by which the table may know a recorded config."""
    text = config.get("text_config", {})
    found = {*classes, *config.get("architectures", ())}
    types = (text.get("model_type"), None if found else config["model_type"])
    return found | {name for name in types if name is not None}


@pytest.mark.parametrize("model_type", TYPES)
def test_groups_equal_the_cache_of_a_tiny_model_or_are_refused(model_type: str) -> None:
    """A class that the table has is never refused. Each field is left out in turn."""
    recorded = TYPES[model_type]
    verdict, why = verdict_of(recorded)
    known = not KNOWN.isdisjoint(names_of(recorded["config"], recorded["class"]))
    expected = "right" if known and model_type not in ONLY_VLLM else "refused"
    assert expected == verdict, why


@pytest.mark.parametrize("name", catalogue.names())
def test_groups_of_the_catalogue_equal_the_cache_of_the_model(name: str) -> None:
    """The models have their real sizes."""
    verdict, why = verdict_of(RECORDED["catalogue"][name])
    assert "right" == verdict, why


@pytest.mark.parametrize("name", SPECS)
def test_groups_equal_the_specs_of_vllm_or_are_refused(name: str) -> None:
    """The names of the layers are vLLM's too."""
    verdict, why = vllm_specs.verdict(SPECS[name])
    known = not KNOWN.isdisjoint(names_of(SPECS[name]["config"]))
    assert ("right" if known else "refused") == verdict, why


def config_of(name: str, change: Mapping[str, object]) -> dict[str, Any]:
    """Return the recorded config of a model type or class with other fields."""
    recorded = SPECS.get(name) or TYPES[name]
    config = dict(recorded["config"])
    config["architectures"] = config.get("architectures") or [recorded["class"]]
    if "text_config" in config:
        return config | {"text_config": config["text_config"] | dict(change)}
    return config | dict(change)


# Fields that a class of transformers computes from others if a config has these instead.
COMPUTED: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("falcon_h1", {}, {"mamba_d_head": "auto"}),
    ("falcon_h1", {}, {"mamba_d_head": None}),
    ("falcon_h1", {"mamba_d_ssm": None}, {"mamba_d_head": "auto"}),
    ("longcat_flash", {"num_hidden_layers": 16}, {"num_layers": None}),
]


@pytest.mark.parametrize(("name", "both", "change"), COMPUTED)
def test_from_config_computes_fields_as_the_class_does(
    name: str, both: dict[str, object], change: dict[str, object]
) -> None:
    """The config of a class has the field, which transformers has computed."""
    own = {key: value for key, value in change.items() if value is not None}
    config = config_of(name, both)
    short = {key: value for key, value in config.items() if key not in change} | own
    assert config != short
    assert models.from_config(config, dtype="bfloat16") == models.from_config(
        short, dtype="bfloat16"
    )


W, F = "sliding_attention", "full_attention"
DIFFERENT: list[tuple[str, dict[str, object], str]] = [
    # vLLM takes the window of a layer from the list, others from sliding_window.
    ("exaone_moe", {"sliding_windows": [128] * 8}, "sliding_windows"),
    # vLLM applies it to all layers, SGLang one token more, and transformers ignores it.
    ("nemotron_h", {"sliding_window": 4096}, "sliding_window"),
    # vLLM and transformers apply the window to all layers of any class. SGLang does not.
    ("llama", {"sliding_window": 64}, "sliding_window"),
    ("llama", {"sliding_window": 64, "use_sliding_window": False}, "sliding_window"),
    ("granite", {"sliding_window": 64}, "sliding_window"),
    ("minimax_m2", {"sliding_window": 64}, "sliding_window"),
    ("llama", {"attention_chunk_size": 64}, "attention_chunk_size"),
    ("mixtral", {"attention_chunk_size": 64}, "attention_chunk_size"),
    ("llama", {"layer_types": [W] * 8, "sliding_window": 64}, "layer_types"),
    # vLLM reads mamba_ssm_dtype only for Qwen3.5, and mamba_ssm_cache_dtype only for Nemotron-H.
    ("nemotron_h", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
    ("falcon_h1", {"mamba_ssm_dtype": "float32"}, "mamba_ssm_dtype"),
    ("qwen3_next", {"mamba_ssm_dtype": "float32"}, "mamba_ssm_dtype"),
    ("qwen3_5_text", {"mamba_ssm_cache_dtype": "float32"}, "mamba_ssm_cache_dtype"),
    # transformers makes the last layer full.
    ("gemma4_text", {"layer_types": [F] + [W] * 7, "num_kv_shared_layers": 0,
                     "per_layer_config": {"0": {"head_dim": 512}}}, "layer_types"),
    ("gemma4_text", {"per_layer_config": None}, "per_layer_config"),
    # VLLM gives every second layer of gpt-oss a window, and SGLang does so for Gemma 2.
    ("gpt_oss", {"layer_types": [F, W] * 4}, "layer_types"),
    ("gemma2", {"layer_types": [F, W] * 4}, "layer_types"),
    ("llama4_text", {"layer_types": [F] * 8}, "layer_types"),
    # vLLM and SGLang make all layers full, and transformers does not.
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4,
                   "layer_types": None}, "use_sliding_window"),
    ("whisper", {"sliding_window": 8}, "sliding_window"),
    # vLLM reads the pattern, and transformers layer_types.
    ("mimo_v2_flash", {"layer_types": [F] * 8}, "layer_types"),
    ("mimo_v2_flash", {"sliding_window": 8, "sliding_window_size": 9}, "sliding_window_size"),
    ("longcat_flash", {"num_hidden_layers": 3}, "num_hidden_layers"),
    ("longcat_flash", {"num_hidden_layers": 3, "num_layers": None}, "num_hidden_layers"),
    ("falcon_h1", {"mamba_d_head": "auto", "mamba_n_heads": 7}, "mamba_n_heads"),
    # vLLM turns the window off, and transformers fails.
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("nemotron_h", {"mamba_n_groups": 1}, "mamba_n_groups"),
    ("nemotron_h", {"mamba_d_conv": 3}, "mamba_d_conv"),
    # The plain names are those of the encoder.
    ("whisper", {"num_attention_heads": 1}, "decoder_attention_heads"),
    ("whisper", {"num_key_value_heads": 1}, "num_key_value_heads"),
    ("lfm2_moe", {"head_dim": 8}, "num_attention_heads"),
    ("zamba2", {"mamba_headdim": 8}, "n_mamba_heads"),
    ("zamba2", {"num_key_value_heads": 1}, "num_key_value_heads"),
    # Zamba2's name of a layer without attention is another one.
    ("zamba2", {"layers_block_type": ["attention"] * 8}, "layer_types"),
    ("lfm2_moe", {"layer_types": ["hybrid"] * 8}, "layer_types"),
    ("falcon_h1", {"layer_types": [F] * 8}, "layer_types"),
    ("falcon_h1", {"mamba_d_ssm": 8}, "mamba_d_ssm"),
    ("kimi_linear", {"layer_types": [F] * 8}, "layer_types"),
    ("kimi_linear", {"linear_attn_config": None, "layer_types": [F] * 8}, "linear_attn_config"),
    ("kimi_linear", {"linear_head_dim": 8}, "linear_attn_config.head_dim"),
    ("bailing_hybrid", {"linear_head_dim": 8}, "head_dim"),
    # The window layers have no earlier layer whose cache they could read.
    ("gemma3n_text", {"layer_types": [F] * 4 + [W] * 4, "num_kv_shared_layers": 4},
     "num_kv_shared_layers"),
    ("gemma3n_text", {"head_dim": None}, "head_dim"),
    ("gemma4_text", {"per_layer_config": None, "global_head_dim": None}, "global_head_dim"),
    ("glm_moe_dsa", {"index_topk_freq": None}, "index_topk_freq"),
    ("step3p7", {"att_impl_type": "MFA"}, "att_impl_type"),
    # SGLang and vLLM 0.32 take the KV heads of windows from the dict. vLLM 0.33 and transformers
    # do not.
    ("step3p7", {"attention_other_setting": {"attention_type": W, "num_attention_groups": 4}},
     "attention_other_setting.num_attention_groups"),
    ("step3p7", {"attention_other_setting": {"attention_type": W, "head_dim": 8}},
     "attention_other_setting.head_dim"),
    # SGLang follows the interval, and the others layer_types.
    ("qwen3_next", {"full_attention_interval": 2}, "layer_types"),
    ("qwen3_5_text", {"full_attention_interval": 2}, "layer_types"),
    ("qwen3_5", {"full_attention_interval": 2}, "layer_types"),
    # vLLM and SGLang follow the flags, and transformers layer_types.
    ("minimax_m3_vl_text, nested", {"layer_types": [F] * 8}, "layer_types"),
    # SGLang also keeps values for the indexers of these layers.
    ("minimax_m3_vl_text, nested", {"sparse_attention_config": {
        "sparse_attention_freq": [0] * 7 + [1], "sparse_disable_index_value": [1] * 7 + [0],
        "sparse_index_dim": 64}}, "sparse_attention_config.sparse_disable_index_value"),
    # Only SGLang shares indexers by this field.
    ("glm_moe_dsa", {"cli_factor": 2}, "cli_factor"),
    # vLLM has no kernel for these rates, and transformers uses them.
    ("deepseek_v4", {"compress_rate_csa": 8}, "compress_rate_csa"),
    ("deepseek_v4", {"compress_rate_hca": 64}, "compress_rate_hca"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "field"), DIFFERENT)
def test_from_config_refuses_fields_that_engines_read_in_different_ways(
    name: str, change: dict[str, object], field: str
) -> None:
    """The config without the change has an answer."""
    sizes = {"dtype": "bfloat16", "block_size": 128}
    models.from_config(config_of(name, {}), **sizes)
    error = refusal(lambda: models.from_config(config_of(name, change), **sizes))
    assert field == error.field


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.names[0])
def test_every_row_is_compared_with_a_model(row: Architecture) -> None:
    """A new row needs a record, or a test with facts of another origin."""
    recorded = {TYPES[name]["class"] for name in TYPES} | set(TYPES)
    for each in (*TYPES.values(), *SPECS.values()):
        recorded |= names_of(each["config"])
    assert recorded & set(row.names) or row.names[0] in OTHERWISE
