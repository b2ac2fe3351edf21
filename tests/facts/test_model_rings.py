"""Tests of the models that compress tokens and keep the open ones in a ring.

`test_model_caches` compares their layers with vLLM's. These are the facts that its record lacks.
"""

from __future__ import annotations

from typing import Any

import pytest
from builders import LLAMA
from refused import refusal

import kvspec
from kvspec import models

V41 = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "num_hidden_layers": 5,
    "head_dim": 512,
    "sliding_window": 128,
    "index_head_dim": 128,
    "compress_ratios": [0, 1, 2, 2, 1, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "dtype": "bfloat16",
}
GLM = {
    **LLAMA,
    "architectures": ["Glm5NextForCausalLM"],
    "num_hidden_layers": 4,
    "kv_lora_rank": 512,
    "linear_num_heads": 4,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
QWEN = {
    **LLAMA,
    "architectures": ["Qwen4ExpForCausalLM"],
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "indexer_n_heads": 4,
    "indexer_head_dim": 128,
    "indexer_compress_ratio": 4,
    "rope_parameters": {"mrope_section": [11, 11, 10]},
}


def groups_of(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the groups by name."""
    options = {"dtype": "bfloat16", "block_size": 128, **options}
    return {group.name: group for group in models.from_config(config, **options)}


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (V41, {0: 8, 3: 8, 6: 8, 7: 16}),
        (GLM, {0: 16, 1: 32, 16: 32, 17: 64}),
        ({**GLM, "index_kpool": 4}, {0: 4, 3: 8, 5: 16}),
        (QWEN, {0: 4, 3: 8, 5: 12}),
    ],
)
def test_ring_has_a_row_for_each_token_of_a_speculative_step(
    config: dict[str, Any], rows: dict[int, int]
) -> None:
    """The numbers are worked out by hand from vLLM's classes."""
    found = {
        drafts: groups_of(config, num_speculative_tokens=drafts)["ring"].spec.block_size
        for drafts in rows
    }
    assert rows == found


def test_only_sources_keep_compressed_latents() -> None:
    """Layers 3 and 4 read the latents of layer 2. Layer 3 chooses tokens by the keys of layer 2."""
    groups = groups_of(V41)
    own = {name.removeprefix("model.layers."): group for group in groups.values()
           for name in group.layers if not name.endswith("swa_cache")}  # fmt: skip
    sizes = {name: group.spec.of_layer(f"model.layers.{name}").page_size_bytes()
             for name, group in own.items()}  # fmt: skip
    assert {
        "1.attn": 128 * 1024,
        "1.attn.indexer.k_cache": 128 * 132,
        "2.attn": 64 * 1024,
        "2.attn.indexer.k_cache": 64 * 132,
        "2.attn.compressor.state_cache": 8 * 4096,
    } == sizes
    assert 5 == len(groups["sliding_window"].layers)


@pytest.mark.parametrize(("tokens", "open_tokens"), [(7, 1), (8, 0)])
def test_open_token_moves_between_engines_with_other_drafts(tokens: int, open_tokens: int) -> None:
    """A token has five windows and rows of layer 1. A pair, also an open one, has rows of 2."""
    producer, consumer = (
        kvspec.EngineSpec(
            groups=models.from_config(
                V41, dtype="bfloat16", block_size=128, num_speculative_tokens=drafts
            ),
            parallel=kvspec.ParallelConfig(tp_size=size),
        )
        for size, drafts in ((4, 0), (2, 7))
    )
    traffic = kvspec.traffic(kvspec.plan_transfer(producer, consumer), num_tokens=tokens)
    rows = tokens * (5 * 1024 + 1024 + 132) + -(-tokens // 2) * (1024 + 132) + open_tokens * 4096
    assert 2 * rows == traffic.total.nbytes


def test_rows_contain_positions_only_in_models_with_images() -> None:
    """Twelve elements of two bytes are three positions of eight bytes."""
    text = {key: value for key, value in QWEN.items() if key != "architectures"}
    nested = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "text_config": {**text, "model_type": "qwen4_exp_text"},
    }
    assert [128, 140] == [groups_of(each)["ring"].spec.head_size for each in (QWEN, nested)]
    plain = {**nested, "text_config": {**nested["text_config"], "rope_parameters": {}}}  # type: ignore[dict-item]
    assert 128 == groups_of(plain)["ring"].spec.head_size


def test_model_without_an_indexer_has_no_ring() -> None:
    assert {"full", "gated_delta_net"} == set(groups_of({**QWEN, "indexer_n_heads": None}))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**V41, "compress_ratios": [0, 1, 2, 4, 1, 0]}, "compress_ratios"),
        ({**V41, "compress_ratios": [0, 1]}, "compress_ratios"),
        ({**V41, "kv_source_layer_ids": [2]}, "kv_source_layer_ids"),
        ({**V41, "kv_source_layer_ids": [0, 1]}, "kv_source_layer_ids"),
        ({**V41, "kv_source_layer_ids": [1, 9]}, "kv_source_layer_ids"),
        ({**V41, "kv_source_layer_ids": ["1"]}, "kv_source_layer_ids"),
        ({**V41, "index_source_layer_ids": None}, "index_source_layer_ids"),
        ({**GLM, "index_topk_freq": 4, "num_hidden_layers": 12}, "indexer_types"),
        ({**GLM, "index_kpool": 1}, "compress_ratio"),
        ({**QWEN, "ple_layer_ids": [1]}, "ple_layer_ids"),
    ],
)
def test_from_config_rejects_invalid_models_with_rings(config: dict[str, Any], field: str) -> None:
    assert field == refusal(lambda: groups_of(config)).field


def test_from_config_rejects_rows_that_depend_on_the_gpu() -> None:
    """A packed row of vLLM has 528 bytes for GPUs of one family and 584 for others."""
    error = refusal(lambda: groups_of(V41, dtype="uint8"))
    assert ("dtype", "uint8") == (error.field, error.value)
