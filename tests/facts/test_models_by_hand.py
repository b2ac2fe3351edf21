"""Test `models.from_config` with caches that a reader worked out from vLLM's sources by hand.

The other judges of `kvspec.models` are records of what code makes. Here, a person read the classes
of vLLM 0.33 named in each entry, and compared them with SGLang 0.5.23 and transformers 5.19. The
sizes are those of published files or of the classes of transformers.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvspec import models

BF16, FLOAT = 2, 4
LATENT, INDEX_KEY = 576 * BF16, 128 + 4  # A DeepSeek latent, and an 8-bit key with its scale.
FULL, WINDOW = "full_attention", "sliding_attention"
MLA = {"hidden_size": 6144, "num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
INDEXED = MLA | {"index_topk": 2048, "index_head_dim": 128}
V4 = {
    "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 512, "sliding_window": 128,
    "index_head_dim": 128,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 8, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
# Three rows of the channels of q and k, with 16 heads each, and of v, with 32.
DELTA_CONV = 3 * (2 * 16 * 128 + 32 * 128) * BF16
ATTN = "model.layers.{}.self_attn.attn"
INDEXER = "model.layers.{}.self_attn.indexer.k_cache"
DELTA_ATTN = (ATTN, "3 7", None, 16 * 2 * 2 * 256 * BF16)

# The class, its fields and the tokens of a block. Then the caches: the name of a layer, the
# layers, the window and the bytes of a page.
Cache = tuple[str, str, int | None, int]
READ: list[tuple[str, dict[str, Any], int, list[Cache]]] = [
    # models/deepseek_v32/attention.py:167, model_executor/models/deepseek_v2.py:658
    ("DeepseekV32", INDEXED | {"num_hidden_layers": 61}, 64, [
        (ATTN, "0-60", None, 64 * LATENT),
        (INDEXER, "0-60", None, 64 * INDEX_KEY),
    ]),
    # The same. Three of four layers share an indexer.
    ("GlmMoeDsa", INDEXED | {"num_hidden_layers": 78, "index_topk_freq": 4}, 64, [
        (ATTN, "0-77", None, 64 * LATENT),
        (INDEXER, "0-1 5 9 13 17 21 25 29 33 37 41 45 49 53 57 61 65 69 73 77", None,
         64 * INDEX_KEY),
    ]),
    # models/deepseek_v4/attention.py:860 and 911, compressor.py:179,
    # v1/attention/backends/mla/sparse_swa.py:120
    ("DeepseekV4", V4 | {"num_hidden_layers": 5, "compress_ratios": [0, 0, 4, 128, 4, 0]}, 256, [
        ("model.layers.{}.attn", "2 4", None, 64 * 512 * BF16),
        ("model.layers.{}.attn", "3", None, 2 * 512 * BF16),
        ("model.layers.{}.attn.indexer.k_cache", "2 4", None, 64 * INDEX_KEY),
        ("model.layers.{}.attn.swa_cache", "0-4", 128, 64 * 512 * BF16),
        ("model.layers.{}.attn.compressor.state_cache", "2 4", 8, 4 * 2 * 2 * 512 * FLOAT),
        ("model.layers.{}.attn.compressor.state_cache", "3", 128, 8 * 2 * 512 * FLOAT),
        ("model.layers.{}.attn.indexer.compressor.state_cache", "2 4", 8, 4 * 2 * 2 * 128 * FLOAT),
    ]),
    # models/deepseek_v41/attention.py:305 and 1206, compressor.py:229
    ("DeepseekV41", V4 | {
        "num_hidden_layers": 6, "compress_ratios": [0, 1, 1, 2, 2, 0, 0],
        "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 2, 3]}, 256, [
        ("model.layers.{}.attn", "1", None, 256 * 512 * BF16),
        ("model.layers.{}.attn", "3", None, 128 * 512 * BF16),
        ("model.layers.{}.attn.indexer.k_cache", "1", None, 256 * INDEX_KEY),
        ("model.layers.{}.attn.indexer.k_cache", "3", None, 128 * INDEX_KEY),
        ("model.layers.{}.attn.swa_cache", "0-5", 128, 32 * 512 * BF16),
        ("model.layers.{}.attn.compressor.state_cache", "3", None, 8 * 2 * 512 * FLOAT),
    ]),
    # models/kimi_k3/nvidia/mla.py:421 and kda.py:582
    ("KimiLinear", MLA | {"num_hidden_layers": 4, "linear_attn_config": {
        "full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 32, "head_dim": 128,
        "short_conv_kernel_size": 4}}, 16, [
        ("model.layers.{}.self_attn", "3", None, 16 * LATENT),
        ("model.layers.{}.self_attn", "0-2", None,
         3 * 3 * 32 * 128 * BF16 + 32 * 128 * 128 * FLOAT),
    ]),
    # model_executor/layers/mamba/mamba_utils.py:272. vLLM reads no type of states here.
    ("Qwen3Next", DELTA, 16, [
        DELTA_ATTN,
        ("model.layers.{}.linear_attn", "0-2 4-6", None, DELTA_CONV + 32 * 128 * 128 * BF16),
    ]),
    # The same, and model_executor/models/config.py:963
    ("Qwen3_5", DELTA | {"mamba_ssm_dtype": "float32"}, 16, [
        DELTA_ATTN,
        ("model.layers.{}.linear_attn", "0-2 4-6", None, DELTA_CONV + 32 * 128 * 128 * FLOAT),
    ]),
    # models/minimax_m3/nvidia/model.py:98 and 562, common/indexer.py:145
    ("MiniMaxM3Sparse", {
        "num_hidden_layers": 60, "hidden_size": 6144, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "sparse_attention_config": {
            "sparse_index_dim": 128, "sparse_attention_freq": [0] * 3 + [1] * 57,
            "sparse_disable_index_value": [0] * 3 + [1] * 57}}, 128, [
        (ATTN, "0-59", None, 128 * 2 * 4 * 128 * BF16),
        (ATTN + ".index_cache", "3-59", None, 128 * 128 * BF16),
    ]),
    # model_executor/models/gemma3n.py:311: the last 15 layers read the caches of others.
    ("Gemma3n", {
        "num_hidden_layers": 35, "hidden_size": 2048, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256}, 16, [
        (ATTN, "4 9 14 19", None, 16 * 2 * 2 * 256 * BF16),
        (ATTN, "0-3 5-8 10-13 15-18", 512, 16 * 2 * 2 * 256 * BF16),
    ]),
    # model_executor/models/gemma4.py:403 and 578
    ("Gemma4", {
        "num_hidden_layers": 12, "hidden_size": 5376, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4, "head_dim": 256,
        "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024,
        "layer_types": ([WINDOW] * 5 + [FULL]) * 2}, 16, [
        (ATTN, "5 11", None, 16 * 2 * 4 * 512 * BF16),
        (ATTN, "0-4 6-10", 1024, 16 * 2 * 16 * 256 * BF16),
    ]),
    # model_executor/models/falcon_h1.py:344 and 538
    ("FalconH1", {
        "num_hidden_layers": 3, "hidden_size": 2048, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "mamba_d_ssm": 3072, "mamba_n_heads": 48,
        "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}, 16, [
        ("model.layers.{}.attn", "0-2", None, 16 * 2 * 2 * 256 * BF16),
        ("model.{}.mixer", "3-5", None, 3 * (3072 + 2 * 256) * BF16 + 48 * 64 * 256 * BF16),
    ]),
    # model_executor/models/zamba2.py:182 and 869. Three layers with attention use two blocks.
    ("Zamba2", {
        "num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3, "num_mem_blocks": 2,
        "hidden_size": 2048, "num_attention_heads": 32, "attention_head_dim": 128,
        "n_mamba_heads": 64, "mamba_headdim": 64, "mamba_ngroups": 1, "mamba_d_state": 128,
        "mamba_d_conv": 4}, 16, [
        ("model.attn.{}", "0-2", None, 16 * 2 * 32 * 128 * BF16),
        ("{}.mixer", "3-8", None, 3 * (4096 + 2 * 128) * BF16 + 64 * 64 * 128 * BF16),
    ]),
    # model_executor/models/mimo_v2.py:411. Values are shorter than keys.
    ("MiMoV2Flash", {
        "num_hidden_layers": 6, "hidden_size": 4096, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
        "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
        "swa_v_head_dim": 128, "sliding_window_size": 128,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0]}, 16, [
        (ATTN, "0 5", None, 16 * 4 * (192 + 128) * BF16),
        (ATTN, "1-4", 128, 16 * 8 * (192 + 128) * BF16),
    ]),
    # model_executor/models/step3p5.py:71 and 443. Draft layers end the list.
    ("Step3p5", {
        "num_hidden_layers": 5, "num_nextn_predict_layers": 3, "hidden_size": 4096,
        "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128,
        "sliding_window": 512, "layer_types": [FULL, *[WINDOW] * 3] * 2,
        "attention_other_setting": {"attention_type": WINDOW, "num_attention_heads": 96,
                                    "num_attention_groups": 8, "head_dim": 128}}, 16, [
        (ATTN, "0 4", None, 16 * 2 * 8 * 128 * BF16),
        (ATTN, "1-3", 512, 16 * 2 * 8 * 128 * BF16),
    ]),
    # model_executor/models/longcat_flash.py:267
    ("LongcatFlash", MLA | {"num_layers": 28}, 16, [
        ("model.layers.{}.self_attn.0.attn", "0-27", None, 16 * LATENT),
        ("model.layers.{}.self_attn.1.attn", "0-27", None, 16 * LATENT),
    ]),
]  # fmt: skip


def numbers(text: str) -> set[int]:
    """Return the numbers of a text such as ``0-2 5``."""
    ends = [[int(end) for end in each.split("-")] for each in text.split()]
    return {number for each in ends for number in range(each[0], each[-1] + 1)}


@pytest.mark.parametrize(("name", "fields", "block", "caches"), READ, ids=[row[0] for row in READ])
def test_from_config_gives_the_caches_that_a_reader_found(
    name: str, fields: dict[str, Any], block: int, caches: list[Cache]
) -> None:
    """No layer has another cache, and none has fewer."""
    config = {"architectures": [f"{name}ForCausalLM"], "num_key_value_heads": None, **fields}
    found: dict[tuple[str, int | None, int], set[int]] = {}
    for group in models.from_config(config, block_size=block, dtype="bfloat16"):
        for layer in group.layers:
            spec = group.spec.of_layer(layer)
            pattern = re.sub(r"\d+", "{}", layer, count=1)
            key = pattern, getattr(spec, "sliding_window", None), spec.page_size_bytes()
            number = re.search(r"\d+", layer)
            found.setdefault(key, set()).add(int(number[0] if number else -1))
    assert {(layer, *rest): numbers(text) for layer, text, *rest in caches} == found
