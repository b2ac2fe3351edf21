"""List the known architectures, one row for each.

Invariant: no code compares the name of an architecture. A new architecture is a new row of
`ARCHITECTURES`. It needs a new rule in `kvspec.models.fields` only if its layers alternate in a new
way.

How it works:
    A row has the kinds of the layers, their names, and the values that the model class supplies if
    ``config.json`` omits them. For example, the row of Gemma 2 is:

        Architecture(
            "Gemma2ForCausalLM gemma2",
            every(2, "sliding_window"),
            defaults={"head_dim": 256, "sliding_window": 4096},
        )

    The first line has the names under which a config may ask for the row: the class and the
    ``model_type``. The second line is the rule for the kinds: every second layer is full attention,
    and all others have a sliding window. A config with ``layer_types`` overrides the rule. The
    defaults apply to the keys that the config omits.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvspec.models.fields import (
    FULL,
    MLA,
    KindRule,
    all_layers,
    chunked_layers,
    even_window,
    every,
    letters,
    listed,
    offset,
    switched,
    unrotated_window,
    upper_window,
    window,
)


@attrs.frozen
class State:
    """The recurrent layers of a row.

    Attributes:
        group: Name of the KV cache group.
        layer: Name of a layer, with ``{}`` for its index.
        kind: Name of the constructor of `MambaSpec`, such as ``mamba2``.
        fields: The arguments of the constructor. Each is a config key, or a product of keys such as
            ``mamba_expand*hidden_size``.
    """

    group: str
    layer: str
    kind: str
    fields: Mapping[str, str]


def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split())


@attrs.frozen
class Architecture:
    """One row of the table.

    Attributes:
        names: Class names and model types that lead to this row.
        kinds: The rule for the kinds of the layers. It applies if the config has no
            ``layer_types``.
        attention: Name of an attention layer, with ``{}`` for its index.
        state: The recurrent layers, or None.
        indexer: Name of the layer that keeps the indexer keys of an MLA layer, or empty.
        required: Sizes that a config must have. If it omits them, the classes of transformers 5.19
            supply a constant, which may be another one for each class and version. For other rows,
            the class supplies ``num_attention_heads`` for the KV heads, and ``hidden_size`` divided
            by it for the head size.
        defaults: Values that the model class supplies if the config omits them.
    """

    names: tuple[str, ...] = attrs.field(converter=_split)
    kinds: KindRule = FULL
    attention: str = attrs.field(default="model.layers.{}.self_attn.attn", kw_only=True)
    state: State | None = attrs.field(default=None, kw_only=True)
    indexer: str = attrs.field(default="", kw_only=True)
    required: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    defaults: Mapping[str, object] = attrs.field(factory=dict, kw_only=True)


_KV_HEADS_FIELD = ("num_key_value_heads",)
_BOTH = (*_KV_HEADS_FIELD, "head_dim")
_MIXER = "model.layers.{}.mixer"
_MAMBA1 = {"intermediate_size": "intermediate_size", "state_size": "state_size"}
_MAMBA2 = {
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
}
_GATED_DELTA_NET = {
    "num_k_heads": "linear_num_key_heads",
    "num_v_heads": "linear_num_value_heads",
    "head_k_dim": "linear_key_head_dim",
    "head_v_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
}
_CONV_FIELDS = {"conv_kernel": "conv_kernel"}
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GPT = "transformer.h.{}.attn.attn"
_BLOOM = "transformer.h.{}.self_attention.attn"

# Every known architecture. Layer names follow the module names in vLLM.
ARCHITECTURES: tuple[Architecture, ...] = (
    # Every layer is full attention.
    Architecture("LlamaForCausalLM llama"),
    Architecture("ArceeForCausalLM arcee"),
    Architecture("ApertusForCausalLM apertus"),
    Architecture("CohereForCausalLM cohere"),
    Architecture("Ernie4_5ForCausalLM Ernie4_5_ForCausalLM ernie4_5", required=_BOTH),
    Architecture("Ernie4_5_MoeForCausalLM ernie4_5_moe", required=_KV_HEADS_FIELD),
    Architecture("GemmaForCausalLM gemma", required=_KV_HEADS_FIELD, defaults={"head_dim": 256}),
    Architecture("GlmForCausalLM glm", required=_KV_HEADS_FIELD, defaults={"head_dim": 128}),
    Architecture("Glm4ForCausalLM glm4", required=_KV_HEADS_FIELD, defaults={"head_dim": 128}),
    Architecture("Glm4MoeForCausalLM glm4_moe", required=_KV_HEADS_FIELD),
    Architecture("GraniteForCausalLM granite"),
    Architecture("GraniteMoeForCausalLM granitemoe"),
    Architecture("GraniteMoeSharedForCausalLM granitemoeshared"),
    Architecture("HunYuanDenseV1ForCausalLM hunyuan_v1_dense"),
    Architecture("MiniMaxM2ForCausalLM minimax_m2", required=_BOTH),
    Architecture("NemotronForCausalLM nemotron"),
    Architecture("OlmoForCausalLM olmo"),
    Architecture("Olmo2ForCausalLM olmo2"),
    Architecture("OlmoeForCausalLM olmoe"),
    Architecture("PhiForCausalLM phi"),
    Architecture("qwen3_vl_text", required=_BOTH),
    Architecture("qwen3_vl_moe_text", required=_KV_HEADS_FIELD),
    Architecture("SeedOssForCausalLM seed_oss", required=_BOTH),
    Architecture("StableLmForCausalLM stablelm", required=_KV_HEADS_FIELD),
    Architecture("FalconForCausalLM falcon", attention=_BLOOM, defaults={"multi_query": True}),
    Architecture("BloomForCausalLM bloom", attention=_BLOOM),
    Architecture("GPT2LMHeadModel gpt2", attention=_GPT),
    Architecture(
        "GPTBigCodeForCausalLM gpt_bigcode", attention=_GPT, defaults={"multi_query": True}
    ),
    Architecture("GPTNeoXForCausalLM gpt_neox", attention="gpt_neox.layers.{}.attention.attn"),
    Architecture("OPTForCausalLM opt", attention="model.decoder.layers.{}.self_attn.attn"),
    # Every layer has a sliding window if the config has one.
    Architecture(
        "MistralForCausalLM mistral",
        window,
        required=_KV_HEADS_FIELD,
        # Only an explicit null turns the window off.
        defaults={"sliding_window": 4096},
    ),
    Architecture("Ministral3ForCausalLM ministral3", window, required=_BOTH),
    Architecture("MixtralForCausalLM mixtral", window, required=_KV_HEADS_FIELD),
    Architecture("Phi3ForCausalLM phi3", window),
    Architecture("Starcoder2ForCausalLM starcoder2", window, required=_KV_HEADS_FIELD),
    # Most published configs have a window, but turn it off with ``use_sliding_window``.
    Architecture("Qwen2ForCausalLM qwen2", upper_window, required=_KV_HEADS_FIELD, defaults=_QWEN),
    Architecture(
        "Qwen2MoeForCausalLM qwen2_moe", even_window, required=_KV_HEADS_FIELD, defaults=_QWEN
    ),
    Architecture("Qwen3ForCausalLM qwen3", upper_window, required=_BOTH, defaults=_QWEN),
    Architecture(
        "Qwen3MoeForCausalLM qwen3_moe", switched(window), required=_KV_HEADS_FIELD, defaults=_QWEN
    ),
    Architecture(
        "SmolLM3ForCausalLM smollm3",
        unrotated_window,
        required=_KV_HEADS_FIELD,
        defaults={"use_sliding_window": False, "no_rope_layer_interval": 4},
    ),
    Architecture(
        "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration"
        " qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
        upper_window,
        required=_KV_HEADS_FIELD,
        defaults={**_QWEN, "max_window_layers": 80},
        attention="language_model.model.layers.{}.self_attn.attn",
    ),
    # Sliding windows or chunks alternate with full attention.
    Architecture(
        "Gemma2ForCausalLM gemma2",
        every(2, "sliding_window"),
        required=_KV_HEADS_FIELD,
        defaults={"head_dim": 256, "sliding_window": 4096},
    ),
    Architecture(
        "Gemma3ForCausalLM Gemma3ForConditionalGeneration gemma3_text gemma3",
        every("sliding_window_pattern", "sliding_window"),
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
    ),
    Architecture(
        "Cohere2ForCausalLM cohere2",
        every("sliding_window_pattern", "sliding_window"),
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    Architecture(
        "Olmo3ForCausalLM olmo3",
        every(4, "sliding_window"),
        defaults={"sliding_window": 4096},
    ),
    Architecture(
        "Exaone4ForCausalLM exaone4",
        every("sliding_window_pattern", "sliding_window"),
        required=_KV_HEADS_FIELD,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    Architecture(
        "GptOssForCausalLM gpt_oss",
        every(2, "sliding_window"),
        required=_BOTH,
        # The published configs name no dtype. Their unquantised tensors are bfloat16.
        defaults={"sliding_window": 128, "dtype": "bfloat16"},
    ),
    Architecture(
        "Llama4ForCausalLM Llama4ForConditionalGeneration llama4_text llama4",
        chunked_layers,
        required=_KV_HEADS_FIELD,
        defaults={"head_dim": 128, "attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    ),
    # Multi-head latent attention.
    Architecture("DeepseekV2ForCausalLM deepseek_v2", MLA),
    Architecture("DeepseekV3ForCausalLM deepseek_v3 kimi_k2", MLA),
    Architecture("Glm4MoeLiteForCausalLM glm4_moe_lite", MLA),
    Architecture(
        "DeepseekV32ForCausalLM deepseek_v32",
        MLA,
        indexer="model.layers.{}.self_attn.indexer.k_cache",
        defaults={"index_head_dim": 128},
    ),
    # Recurrent layers, with or without attention layers.
    Architecture(
        "Qwen3NextForCausalLM qwen3_next"
        " Qwen3_5ForConditionalGeneration qwen3_5 qwen3_5_text"
        " Qwen3_5MoeForConditionalGeneration qwen3_5_moe qwen3_5_moe_text",
        every("full_attention_interval", "state"),
        required=_BOTH,
        state=State(
            "gated_delta_net", "model.layers.{}.linear_attn", "gated_delta_net", _GATED_DELTA_NET
        ),
        defaults={
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    Architecture(
        "NemotronHForCausalLM nemotron_h",
        letters,
        required=_BOTH,
        attention="model.layers.{}.mixer.attn",
        state=State(
            "mamba",
            _MIXER,
            "mamba2",
            _CONV_FIELDS
            | {
                "num_heads": "mamba_num_heads",
                "head_dim": "mamba_head_dim",
                "n_groups": "n_groups",
                "state_size": "ssm_state_size",
            },
        ),
        # vLLM, SGLang and transformers all keep its temporal state in float32.
        defaults={"mamba_ssm_dtype": "float32"},
    ),
    Architecture(
        "GraniteMoeHybridForCausalLM granitemoehybrid",
        all_layers("state"),
        state=State("mamba", _MIXER, "mamba2", _MAMBA2),
    ),
    Architecture(
        "BambaForCausalLM bamba",
        listed("attn_layer_indices"),
        required=_KV_HEADS_FIELD,
        attention="model.layers.{}.attn",
        state=State("mamba", _MIXER, "mamba2", _MAMBA2),
    ),
    Architecture(
        "JambaForCausalLM jamba",
        offset,
        required=_KV_HEADS_FIELD,
        attention="model.layers.{}.attn",
        state=State(
            "mamba",
            _MIXER,
            "mamba1",
            {
                "intermediate_size": "mamba_expand*hidden_size",
                "state_size": "mamba_d_state",
                "conv_kernel": "mamba_d_conv",
            },
        ),
    ),
    Architecture(
        "Lfm2ForCausalLM lfm2",
        listed("full_attn_idxs"),
        required=_KV_HEADS_FIELD,
        state=State(
            "short_conv",
            "model.layers.{}.short_conv",
            "short_conv",
            {"conv_dim": "conv_dim", "conv_kernel": "conv_L_cache"},
        ),
    ),
    Architecture(
        "MambaForCausalLM FalconMambaForCausalLM mamba falcon_mamba",
        all_layers("state"),
        state=State("mamba", "backbone.layers.{}.mixer", "mamba1", _CONV_FIELDS | _MAMBA1),
    ),
    Architecture(
        "Mamba2ForCausalLM mamba2",
        all_layers("state"),
        state=State(
            "mamba",
            "backbone.layers.{}.mixer",
            "mamba2",
            _CONV_FIELDS
            | {name: name for name in ("num_heads", "head_dim", "n_groups", "state_size")},
        ),
    ),
)

_RING = "its rings of rows by position"
_TWO_CACHES = "its layers that have both attention and a recurrent state"
_ENCODER = "its encoder, whose keys belong to the input and not to tokens"

# Architectures that engines serve and kvspec does not describe, and what is missing.
NOT_YET: Mapping[str, str] = {
    name: reason
    for names, reason in (
        ("DeepseekV4ForCausalLM deepseek_v4", "its compressed latents and compressor states"),
        ("DeepseekV41ForCausalLM deepseek_v41", _RING),
        ("Glm5NextForCausalLM Glm5NextForConditionalGeneration glm5_next glm5_next_text", _RING),
        ("Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration qwen4_exp qwen4_exp_text", _RING),
        ("FalconH1ForCausalLM falcon_h1", _TWO_CACHES),
        ("Zamba2ForCausalLM zamba2 ZambaForCausalLM zamba", _TWO_CACHES),
        ("ZayaForCausalLM zaya", _TWO_CACHES),
        (
            "InklingForCausalLM InklingForConditionalGeneration inkling_text inkling_mm_model",
            _TWO_CACHES,
        ),
        (
            "MiMoV2FlashForCausalLM MiMoV2ForCausalLM mimo_v2_flash mimo_v2",
            "its window, which is one token longer in SGLang than in vLLM",
        ),
        ("MiniMaxForCausalLM MiniMaxText01ForCausalLM minimax", "its linear attention"),
        ("BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM", "its linear attention"),
        ("WhisperForConditionalGeneration WhisperForCausalLM whisper", _ENCODER),
    )
    for name in names.split()
}
