"""A config.json gives the groups that engines build from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import LLAMA

from kvspec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SpecError,
    UniformTypeKVCacheSpecs,
    models,
)
from kvspec.models import catalogue

GOLDENS = Path(__file__).parents[1] / "goldens"
FACTS: list[dict[str, Any]] = json.loads((GOLDENS / "arch_facts.json").read_text())["rows"]
STATES: dict[str, Any] = json.loads((GOLDENS / "vllm_conv_split.json").read_text())["models"]


def groups_of(config: Any, **options: Any) -> dict[str, KVCacheGroup]:
    """Return the groups of *config* by name; of a catalogue's name, the catalogue's config."""
    given = catalogue.config(config) if isinstance(config, str) else config
    return {group.name: group for group in models.from_config(given, **options)}


def spec_of(config: Any, group: str = "full", **options: Any) -> Any:
    """Return the spec of one group."""
    return groups_of(config, **options)[group].spec


def indices(group: KVCacheGroup) -> list[int]:
    """Return the layers' numbers, read from their names."""
    return [int(next(word for word in n.split(".") if word.isdigit())) for n in group.layers]


# What vLLM says of the same configs


@pytest.mark.parametrize(
    "row", FACTS, ids=[f"{i}-{row['config']['model_type']}" for i, row in enumerate(FACTS)]
)
def test_heads_sizes_and_layers_are_those_that_vllm_finds(row: dict[str, Any]) -> None:
    """Every group has vLLM's KV heads and head size, and together they have all the layers."""
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


def test_the_recorded_rows_reach_every_kind() -> None:
    """No kind of group goes without a recorded row."""
    reached = {name for row in FACTS for name in groups_of(row["config"], dtype="bfloat16")}
    recorded = {"full", "mla", "sliding_window", "chunked_local", "mamba", "gated_delta_net"}
    assert recorded == reached


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("Bamba-9B", "bamba-9b"),
        ("Nemotron-H-8B", "nemotron-h-8b"),
        ("Qwen3-Next-80B-A3B", "qwen3-next"),
        ("Jamba-v0.1", "jamba-mini"),
    ],
)
def test_states_are_those_that_vllm_shaped(name: str, recorded: str) -> None:
    """The catalogue's configs lead to the sizes from which vLLM's state shapes were recorded."""
    sizes = dict(STATES[recorded])
    make = getattr(MambaSpec, sizes.pop("kind"))
    *_, group = models.from_config(catalogue.config(name))
    assert make(**sizes, dtype="bfloat16") == group.spec


# Kinds of models


def test_a_llama_is_one_group_of_full_attention() -> None:
    """Layers are named as vLLM names them; head size is hidden size over attention heads."""
    (group,) = models.from_config(LLAMA, block_size=32)
    assert "full" == group.name
    assert ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn") == group.layers
    wanted = FullAttentionSpec(block_size=32, total_num_kv_heads=2, head_size=64, dtype="bfloat16")
    assert wanted == group.spec


def test_without_kv_heads_every_attention_head_has_its_own() -> None:
    """Multi-head attention needs no num_key_value_heads."""
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert 4 == spec_of(config).total_num_kv_heads


def test_a_given_head_dim_wins_over_the_quotient() -> None:
    """Qwen3-0.6B has 16 heads of 128 in a hidden size of 1024."""
    spec = spec_of("Qwen3-0.6B")
    assert (8, 128) == (spec.total_num_kv_heads, spec.head_size)


@pytest.mark.parametrize(("window", "name"), [(4096, "sliding_window"), (None, "full")])
def test_mistral_slides_only_with_a_window(window: int | None, name: str) -> None:
    """Mistral 7B v0.1 has a window, v0.2 names it null."""
    (group,) = models.from_config(catalogue.config("Mistral-7B-v0.1") | {"sliding_window": window})
    assert name == group.name
    assert window == getattr(group.spec, "sliding_window", None)


def test_qwens_window_is_off_unless_turned_on_and_then_starts_late() -> None:
    """`sliding_window` alone means nothing; max_window_layers is the first layer that slides."""
    off = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
    assert ["full"] == list(groups_of(off))
    on = groups_of({**off, "use_sliding_window": True, "max_window_layers": 1})
    assert {"full": [0], "sliding_window": [1]} == {n: indices(g) for n, g in on.items()}


def test_gemma_3_has_a_full_layer_after_five_that_slide() -> None:
    """Its config names only some sizes; the class supplies the others, and the period 6."""
    groups = groups_of("gemma-3-4b")
    assert ["full", "sliding_window"] == list(groups)
    assert [5, 11, 17, 23, 29] == indices(groups["full"])
    assert "language_model.model.layers.5.self_attn.attn" == groups["full"].layers[0]
    wanted = SlidingWindowSpec(
        block_size=16, total_num_kv_heads=4, head_size=256, dtype="bfloat16", sliding_window=1024
    )
    assert wanted == groups["sliding_window"].spec


def test_gpt_oss_alternates_by_its_layer_types_and_without_them() -> None:
    """The class's own default is the order that the published file lists."""
    listed = catalogue.config("gpt-oss-20b")
    unlisted = {key: value for key, value in listed.items() if key != "layer_types"}
    assert models.from_config(listed) == models.from_config(unlisted)
    groups = groups_of(listed)
    assert list(range(1, 24, 2)) == indices(groups["full"])
    assert list(range(0, 24, 2)) == indices(groups["sliding_window"])
    assert 128 == groups["sliding_window"].spec.sliding_window  # type: ignore[attr-defined]


def test_llama_4_attends_in_chunks_where_it_has_rotary_positions() -> None:
    """Each fourth layer sees everything; a list of flags says the same, no chunk size ends it."""
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


def test_one_shared_head_of_a_falcon() -> None:
    """multi_query means one KV head, except in the newer decoder, which counts its own."""
    falcon = catalogue.config("falcon-7b")
    assert 1 == spec_of(falcon).total_num_kv_heads
    newer = falcon | {"new_decoder_architecture": True, "num_kv_heads": 8}
    assert 8 == spec_of(newer).total_num_kv_heads


@pytest.mark.parametrize("name", ["DeepSeek-V3", "DeepSeek-R1", "Kimi-K2"])
def test_mla_keeps_one_latent_of_576_elements(name: str) -> None:
    """The latent is kv_lora_rank + qk_rope_head_dim, whatever the number of attention heads."""
    (group,) = models.from_config(catalogue.config(name))
    assert ("mla", 61) == (group.name, len(group.layers))
    assert MLAAttentionSpec(block_size=16, head_size=576, dtype="bfloat16") == group.spec


def test_deepseek_v32_keeps_indexer_keys_beside_the_latent() -> None:
    """One uniform-type group: 1152 bytes of latent and 128 + 4 bytes of key a token and layer."""
    (group,) = models.from_config(catalogue.config("DeepSeek-V3.2"), block_size=64)
    assert isinstance(group.spec, UniformTypeKVCacheSpecs)
    assert ("mla", 2 * 61) == (group.name, len(group.layers))
    assert "model.layers.0.self_attn.indexer.k_cache" == group.layers[1]
    pages = [group.spec.of_layer(layer).page_size_bytes() for layer in group.layers[:2]]
    assert [64 * 1152, 64 * 132] == pages


def test_an_indexer_key_is_whole_blocks_of_128() -> None:
    """A key size that its scales do not divide is refused."""
    config = catalogue.config("DeepSeek-V3.2") | {"index_head_dim": 96}
    with pytest.raises(SpecError, match="index_head_dim=96: expected a multiple of 128"):
        models.from_config(config)


# Recurrent layers


def test_qwen3_next_is_three_gated_delta_nets_to_one_attention() -> None:
    """Heads are those of the config: 16 key heads and 32 value heads of 128."""
    groups = groups_of("Qwen3-Next-80B-A3B")
    assert list(range(3, 48, 4)) == indices(groups["full"])
    assert "model.layers.0.linear_attn" == groups["gated_delta_net"].layers[0]
    wanted = MambaSpec.gated_delta_net(
        num_k_heads=16,
        num_v_heads=32,
        head_k_dim=128,
        head_v_dim=128,
        conv_kernel=4,
        dtype="bfloat16",
    )
    assert wanted == groups["gated_delta_net"].spec


def test_nemotron_h_reads_one_letter_a_layer() -> None:
    """24 Mamba2 layers, 4 of attention, and 24 feed-forward layers without a cache."""
    groups = groups_of("Nemotron-H-8B")
    assert [7, 18, 29, 40] == indices(groups["full"])
    assert 24 == len(groups["mamba"].layers)
    assert "model.layers.7.mixer.attn" == groups["full"].layers[0]
    wanted = MambaSpec.mamba2(
        num_heads=128, head_dim=64, n_groups=8, state_size=128, conv_kernel=4, dtype="bfloat16"
    )
    assert wanted == groups["mamba"].spec


def test_granite_4_lists_its_layers() -> None:
    """36 Mamba2 layers of one group each, 4 of attention."""
    groups = groups_of("granite-4.0-h-tiny")
    assert [5, 15, 25, 35] == indices(groups["full"])
    wanted = MambaSpec.mamba2(
        num_heads=48, head_dim=64, n_groups=1, state_size=128, conv_kernel=4, dtype="bfloat16"
    )
    assert wanted == groups["mamba"].spec


def test_bamba_lists_the_layers_that_attend() -> None:
    """attn_layer_indices names them, all the others are Mamba2."""
    groups = groups_of("Bamba-9B")
    assert [9, 18, 27] == indices(groups["full"])
    assert 29 == len(groups["mamba"].layers)


def test_jamba_attends_at_an_offset_of_each_period() -> None:
    """Layer 4 of each 8; the Mamba1 width is mamba_expand * hidden_size."""
    groups = groups_of("Jamba-v0.1")
    assert [4, 12, 20, 28] == indices(groups["full"])
    wanted = MambaSpec.mamba1(
        intermediate_size=8192, state_size=16, conv_kernel=4, dtype="bfloat16"
    )
    assert wanted == groups["mamba"].spec


def test_a_model_without_attention_has_a_state_group_only() -> None:
    """Falcon Mamba keeps nothing for a token."""
    assert ["mamba"] == list(groups_of("falcon-mamba-7b"))


def test_short_convolutions_stand_beside_attention() -> None:
    """LFM2's conv state has conv_L_cache - 1 rows of conv_dim channels."""
    config = {
        **LLAMA,
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention"],
        "conv_dim": 256,
        "conv_L_cache": 3,
    }
    groups = groups_of(config)
    assert [[1], [0]] == [indices(groups[name]) for name in ("full", "short_conv")]
    wanted = MambaSpec.short_conv(conv_dim=256, conv_kernel=3, dtype="bfloat16")
    assert wanted == groups["short_conv"].spec


def test_speculative_tokens_lengthen_conv_states_only() -> None:
    """Each adds one row to the conv parts."""
    plain, longer = (
        {part.name: part.states for part in spec_of("Nemotron-H-8B", "mamba", **more).parts}
        for more in ({}, {"num_speculative_tokens": 2})
    )
    wanted = {name: rows + (0 if name == "ssm" else 2) for name, rows in plain.items()}
    assert wanted == longer
