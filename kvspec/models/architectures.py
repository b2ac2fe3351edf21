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

from kvspec.models.compressed import (
    HEAVY_RATIO,
    NO_RATIO,
    SPARSE_RATIO,
    GroupRule,
    compressed_groups,
    ratios,
)
from kvspec.models.fields import (
    FULL,
    MLA,
    SPARSE,
    FillRule,
    KindRule,
    LayerRule,
    SparseRule,
    alike,
    all_layers,
    as_given,
    chunked_layers,
    counted_letters,
    delta_attention,
    dense_first,
    divided_heads,
    every,
    first_of,
    global_sizes,
    grouped,
    half_of_caches,
    indexed_layers,
    letters,
    listed,
    listed_window,
    offset,
    other_setting,
    patterned,
    sparse_layers,
    switched,
    unlisted,
    unrotated_window,
    upper_window,
    window,
    window_sizes,
)
from kvspec.models.rings import RingRule, key_tail, pooled_tail, shared_groups, shared_ratios


@attrs.frozen
class State:
    """The recurrent layers of a row.

    Attributes:
        group: Name of the KV cache group.
        layer: Name of a layer, with ``{}`` for its index.
        kind: Name of the constructor of `MambaSpec`, such as ``mamba2``.
        fields: The arguments of the constructor. Each is a config key, or a product of keys such as
            ``mamba_expand*hidden_size``.
        ssm_field: The field from which vLLM takes the type of the temporal state, or empty.
        ssm_dtype: The type of the temporal state without that field. By default that of the cache.
    """

    group: str
    layer: str
    kind: str
    fields: Mapping[str, str]
    ssm_field: str = attrs.field(default="", kw_only=True)
    ssm_dtype: str | None = attrs.field(default=None, kw_only=True)


def _split(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(names.split()) if isinstance(names, str) else names


@attrs.frozen
class Architecture:
    """One row of the table.

    Attributes:
        names: Class names and model types that lead to this row.
        kinds: The rule for the kinds of the layers. It applies if the config has no
            ``layer_types``.
        attention: Name of an attention layer, with ``{}`` for its index. Two names, separated by a
            space, mean that the layer has two caches.
        state: The recurrent layers, or None.
        latents: Whether the layers with full attention keep latents.
        indexer: Name of the layer that keeps the indexer keys of an MLA layer, or empty.
        keys: The field with the elements of a key.
        values: The field with the elements of a value, or empty if a value is as long as a key.
        cross: Name of the layer with keys of the encoder, or empty.
        index_keys: Name of the layer that keeps the indexer keys of a sparse layer, or empty. They
            are plain keys of one head, in a group of their own.
        filled: The rule for fields that the class computes from others.
        types: Names in ``layer_types`` that only this row knows, with their kinds.
        by_layer: The rule for the fields of single layers. It applies if the config has no
            ``per_layer_config``.
        counted: The field with the number of layers.
        sparse: The rule for the layers with *index_keys*.
        ring: Name of the layer with the tokens that the indexer has not compressed yet, or empty.
            The field ``index_kpool`` then has the number of tokens of one indexer key.
        ring_rule: The rule for the ring.
        compressed: The rule for all groups, if the kinds are ratios of compression, or None. See
            `kvspec.models.compressed`.
        wider: Tokens by which a window is longer than ``sliding_window``.
        shared: Whether transformers saves models of other types with the class of this row. Such a
            config must have all sizes, because each type has its own defaults.
        required: Sizes that a config must have. If it omits them, the classes of transformers 5.19
            supply a constant, which may be another one for each class and version. For other rows,
            the class supplies ``num_attention_heads`` for the KV heads, and ``hidden_size`` divided
            by it for the head size.
        ruled: Whether some engines follow the rule even if the config has ``layer_types``. If it is
            a field, they do so only if the config has the field.
        products: Products of fields that must be equal if the config has all of them, because
            engines read different ones, such as ``2*num_layers``.
        only: The only value of a field besides null on which engines agree, and what they do with
            others.
        ints: Fields that must be an int if the config has them: null is invalid for the class.
        float16: Whether vLLM runs the model with float16.
        reads: Keys for a size that only some classes read, such as ``num_kv_heads``.
        defaults: Values that the model class supplies if the config omits them.
    """

    names: tuple[str, ...] = attrs.field(converter=_split)
    kinds: KindRule = FULL
    attention: str = attrs.field(default="model.layers.{}.self_attn.attn", kw_only=True)
    state: State | None = attrs.field(default=None, kw_only=True)
    latents: bool = attrs.field(default=False, kw_only=True)
    indexer: str = attrs.field(default="", kw_only=True)
    keys: str = attrs.field(default="head_dim", kw_only=True)
    values: str = attrs.field(default="", kw_only=True)
    cross: str = attrs.field(default="", kw_only=True)
    index_keys: str = attrs.field(default="", kw_only=True)
    filled: FillRule = attrs.field(default=as_given, kw_only=True)
    types: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)
    by_layer: LayerRule = attrs.field(default=alike, kw_only=True)
    counted: str = attrs.field(default="num_hidden_layers", kw_only=True)
    sparse: SparseRule = attrs.field(default=sparse_layers, kw_only=True)
    ring: str = attrs.field(default="", kw_only=True)
    ring_rule: RingRule = attrs.field(default=pooled_tail, kw_only=True)
    compressed: GroupRule | None = attrs.field(default=None, kw_only=True)
    wider: int = attrs.field(default=0, kw_only=True)
    shared: bool = attrs.field(default=False, kw_only=True)
    required: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    ruled: bool | str = attrs.field(default=False, kw_only=True)
    products: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)
    only: Mapping[str, tuple[object, str]] = attrs.field(factory=dict, kw_only=True)
    ints: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    float16: bool = attrs.field(default=True, kw_only=True)
    reads: tuple[str, ...] = attrs.field(default="", converter=_split, kw_only=True)
    defaults: Mapping[str, object] = attrs.field(factory=dict, kw_only=True)


_KV_HEADS_FIELD = ("num_key_value_heads",)
_BOTH = (*_KV_HEADS_FIELD, "head_dim")
# Some engines divide the hidden size by the heads, even if the config has another head size.
_DIVIDED = {"num_attention_heads*head_dim": "hidden_size"}
# Each attention head of these classes has keys, even if the config has fewer KV heads.
_PLAIN_HEADS = {**_DIVIDED, "num_key_value_heads": "num_attention_heads"}
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
_DELTA_NET = ("gated_delta_net", "model.layers.{}.linear_attn", "gated_delta_net", _GATED_DELTA_NET)
_QWEN_NEXT = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_DELTA_ATTENTION = {
    "num_k_heads": "linear_num_heads",
    "num_v_heads": "linear_num_heads",
    "head_k_dim": "linear_head_dim",
    "head_v_dim": "linear_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
}
_DELTA_ATTENTION_OF_BAILING = {
    "num_k_heads": "num_attention_heads",
    "num_v_heads": "num_attention_heads",
    "head_k_dim": "bailing_head_dim",
    "head_v_dim": "bailing_head_dim",
    "conv_kernel": "short_conv_kernel_size",
}
_LINEAR_ATTENTION = {"num_heads": "num_attention_heads", "head_dim": "head_dim"}
_CONV_FIELDS = {"conv_kernel": "conv_kernel"}
_INDEXER = "model.layers.{}.self_attn.indexer.k_cache"
# Names in ``layer_types`` of older configs.
_MAMBA_TYPES = {"attention": "full", "mamba": "state"}
_CONV_TYPES = {"conv": "state"}
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GPT = "transformer.h.{}.attn.attn"
_BLOOM = "transformer.h.{}.self_attention.attn"

# Every known architecture. Layer names follow the module names in vLLM.
ARCHITECTURES: tuple[Architecture, ...] = (
    # Every layer is full attention.
    Architecture("LlamaForCausalLM llama", shared=True),
    Architecture("ArceeForCausalLM arcee"),
    Architecture("AriaForConditionalGeneration AriaTextForCausalLM aria_text", required=_BOTH),
    Architecture("ApertusForCausalLM apertus"),
    Architecture("BitNetForCausalLM bitnet", required=_KV_HEADS_FIELD),
    Architecture("CohereForCausalLM cohere", products=_DIVIDED),
    Architecture("Ernie4_5ForCausalLM Ernie4_5_ForCausalLM ernie4_5", required=_BOTH),
    Architecture("Ernie4_5_MoeForCausalLM ernie4_5_moe", required=_KV_HEADS_FIELD),
    Architecture("ernie4_5_vl_moe_text", required=_KV_HEADS_FIELD),
    Architecture("FlexOlmoForCausalLM flex_olmo"),
    Architecture("GemmaForCausalLM gemma", required=_KV_HEADS_FIELD, defaults={"head_dim": 256}),
    Architecture("GlmForCausalLM glm", required=_KV_HEADS_FIELD, defaults={"head_dim": 128}),
    Architecture(
        "Glm4ForCausalLM glm4",
        required=_KV_HEADS_FIELD,
        float16=False,
        defaults={"head_dim": 128},
    ),
    Architecture("Glm4MoeForCausalLM glm4_moe", required=_KV_HEADS_FIELD),
    Architecture("glm4v_text", required=_KV_HEADS_FIELD),
    Architecture("glm4v_moe_text", required=_KV_HEADS_FIELD),
    Architecture("GlmOcrForConditionalGeneration glm_ocr_text", required=_KV_HEADS_FIELD),
    Architecture("GraniteForCausalLM granite"),
    Architecture("GraniteMoeForCausalLM granitemoe", products=_DIVIDED),
    Architecture("GraniteMoeSharedForCausalLM granitemoeshared", products=_DIVIDED),
    Architecture("HunYuanDenseV1ForCausalLM hunyuan_v1_dense"),
    Architecture("HunYuanMoEV1ForCausalLM hunyuan_v1_moe"),
    Architecture("HYV3ForCausalLM hy_v3", required=_BOTH),
    Architecture("HyperCLOVAXForCausalLM hyperclovax"),
    Architecture("Jais2ForCausalLM jais2"),
    Architecture("MiniMaxM2ForCausalLM minimax_m2", required=_BOTH),
    Architecture("NemotronForCausalLM nemotron", required=_KV_HEADS_FIELD),
    Architecture("OlmoForCausalLM olmo", products=_DIVIDED),
    Architecture("Olmo2ForCausalLM olmo2", products=_DIVIDED),
    Architecture("OlmoeForCausalLM olmoe", products=_DIVIDED),
    Architecture("molmo2_text", required=_BOTH),
    Architecture(
        "MptForCausalLM mpt", attention="transformer.blocks.{}.attn.attn", products=_PLAIN_HEADS
    ),
    Architecture("paddleocr_vl_text", required=_BOTH),
    Architecture("PersimmonForCausalLM persimmon", products=_PLAIN_HEADS),
    Architecture("PhiForCausalLM phi", products=_DIVIDED),
    Architecture("qwen3_omni_moe_text", required=_KV_HEADS_FIELD),
    Architecture("qwen3_vl_text", required=_BOTH),
    Architecture("qwen3_vl_moe_text", required=_KV_HEADS_FIELD),
    Architecture("SeedOssForCausalLM seed_oss", required=_BOTH),
    Architecture("SolarOpenForCausalLM solar_open", required=_BOTH),
    Architecture("StableLmForCausalLM stablelm", required=_KV_HEADS_FIELD, products=_DIVIDED),
    Architecture(
        "FalconForCausalLM falcon",
        reads="num_kv_heads n_head_kv",
        attention=_BLOOM,
        defaults={"multi_query": True},
        products=_DIVIDED,
    ),
    Architecture("BloomForCausalLM bloom", attention=_BLOOM, products=_PLAIN_HEADS),
    Architecture("GPT2LMHeadModel gpt2", attention=_GPT, products=_PLAIN_HEADS),
    Architecture(
        "GPTBigCodeForCausalLM gpt_bigcode",
        attention="model.h.{}.attn.attn",
        defaults={"multi_query": True},
        products=_DIVIDED,
    ),
    Architecture(
        "GPTNeoXForCausalLM gpt_neox",
        attention="model.layers.{}.attention.attn",
        products=_PLAIN_HEADS,
    ),
    Architecture(
        "OPTForCausalLM opt",
        attention="model.decoder.layers.{}.self_attn.attn",
        products=_PLAIN_HEADS,
    ),
    # Every layer has a sliding window if the config has one.
    Architecture(
        "MistralForCausalLM mistral",
        window,
        required=_KV_HEADS_FIELD,
        # Only an explicit null turns the window off.
        defaults={"sliding_window": 4096},
    ),
    Architecture(
        "MinistralForCausalLM ministral",
        window,
        required=_KV_HEADS_FIELD,
        defaults={"sliding_window": 4096},
    ),
    Architecture("Ministral3ForCausalLM ministral3", window, required=_BOTH),
    Architecture("MixtralForCausalLM mixtral", window, required=_KV_HEADS_FIELD, products=_DIVIDED),
    Architecture("Phi3ForCausalLM phi3", window),
    Architecture("PhiMoEForCausalLM PhimoeForCausalLM phimoe", window, required=_KV_HEADS_FIELD),
    Architecture(
        "Starcoder2ForCausalLM starcoder2", window, required=_KV_HEADS_FIELD, products=_DIVIDED
    ),
    # Most published configs have a window, but turn it off with ``use_sliding_window``.
    Architecture(
        "Qwen2ForCausalLM qwen2",
        upper_window,
        required=_KV_HEADS_FIELD,
        defaults=_QWEN,
        products=_DIVIDED,
    ),
    Architecture(
        "Qwen2MoeForCausalLM qwen2_moe",
        required=_KV_HEADS_FIELD,
        only={"use_sliding_window": (False, "only transformers has windows for some layers")},
        defaults=_QWEN,
        products=_DIVIDED,
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
        " qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni_text",
        upper_window,
        products=_DIVIDED,
        required=_KV_HEADS_FIELD,
        defaults={**_QWEN, "max_window_layers": 80},
        attention="language_model.model.layers.{}.self_attn.attn",
    ),
    # Sliding windows or chunked_layers alternate with full attention.
    Architecture(
        "Gemma2ForCausalLM gemma2",
        every(2, "sliding_window"),
        ruled=True,
        required=_KV_HEADS_FIELD,
        float16=False,
        defaults={"head_dim": 256, "sliding_window": 4096},
    ),
    Architecture(
        "Gemma3ForCausalLM Gemma3ForConditionalGeneration gemma3_text gemma3",
        every("sliding_window_pattern", "sliding_window"),
        float16=False,
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
        # vLLM and SGLang read one token more than transformers, as the training did.
        wider=1,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
        products=_DIVIDED,
    ),
    Architecture(
        "Cohere2MoeForCausalLM cohere2_moe",
        dense_first,
        wider=1,
        defaults={
            "head_dim": 128,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "prefix_dense_sliding_window_pattern": 1,
        },
    ),
    Architecture(
        "CwmForCausalLM cwm",
        first_of(4, "sliding_window"),
        required=_BOTH,
        defaults={"sliding_window": 8192},
    ),
    Architecture(
        "AfmoeForCausalLM afmoe",
        every("global_attn_every_n_layers", "sliding_window"),
        defaults={"head_dim": 128, "sliding_window": 1024, "global_attn_every_n_layers": 4},
    ),
    Architecture(
        "GraniteSWAForCausalLM granite_swa",
        first_of(4, "sliding_window"),
        required=_KV_HEADS_FIELD,
        defaults={"sliding_window": 128},
    ),
    Architecture(
        "GraniteMoeSWAForCausalLM granitemoe_swa",
        first_of(4, "sliding_window"),
        defaults={"sliding_window": 128},
    ),
    Architecture("Dots1ForCausalLM dots1", listed_window, required=_KV_HEADS_FIELD),
    Architecture("muse_glimmer_text", unlisted, required=_BOTH),
    Architecture("LagunaForCausalLM laguna", required=_BOTH, defaults={"sliding_window": 512}),
    Architecture("MellumForCausalLM mellum", required=_BOTH, defaults={"sliding_window": 1024}),
    Architecture(
        "VaultGemmaForCausalLM vaultgemma",
        every(2, "sliding_window"),
        required=_BOTH,
        defaults={"sliding_window": 4096},
    ),
    Architecture(
        "Gemma3nForCausalLM Gemma3nForConditionalGeneration gemma3n_text gemma3n",
        every(5, "sliding_window"),
        required=_BOTH,
        ints=("head_dim",),
        defaults={"sliding_window": 512, "num_kv_shared_layers": 15},
    ),
    Architecture(
        "Gemma4ForCausalLM Gemma4ForConditionalGeneration gemma4_text gemma4",
        every(6, "sliding_window"),
        required=_BOTH,
        by_layer=global_sizes,
        ints=("head_dim", "global_head_dim"),
        defaults={"sliding_window": 512, "num_kv_shared_layers": 0, "global_head_dim": 512},
    ),
    Architecture(
        "Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration gemma4_unified_text",
        every(6, "sliding_window"),
        required=_BOTH,
        by_layer=global_sizes,
        ints=("head_dim", "global_head_dim"),
        defaults={"sliding_window": 1024, "num_kv_shared_layers": 0, "global_head_dim": 512},
    ),
    Architecture(
        "Step3p5ForCausalLM step3p5 Step3p7ForConditionalGeneration step3p7",
        unlisted,
        required=_BOTH,
        by_layer=other_setting,
        reads="num_attention_groups",
        only={"att_impl_type": ("GQA", "vLLM refuses another attention")},
    ),
    Architecture(
        "Olmo3ForCausalLM olmo3",
        every(4, "sliding_window"),
        defaults={"sliding_window": 4096},
        products=_DIVIDED,
    ),
    Architecture(
        "ExaoneMoeForCausalLM ExaoneMoEForCausalLM exaone_moe",
        every("sliding_window_pattern", "sliding_window"),
        required=_KV_HEADS_FIELD,
        only={"sliding_windows": (None, "vLLM gives each layer its own, and others ignore it")},
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
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
        ruled=True,
        attention="model.layers.{}.attn.attn",
        required=_BOTH,
        # The published configs name no dtype. Their unquantised tensors are bfloat16.
        defaults={"sliding_window": 128, "dtype": "bfloat16"},
    ),
    Architecture(
        "Llama4ForCausalLM Llama4ForConditionalGeneration llama4_text llama4",
        chunked_layers,
        ruled=True,
        required=_KV_HEADS_FIELD,
        defaults={"head_dim": 128, "attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    ),
    # Keys and values of different sizes. The window is vLLM's.
    Architecture(
        "MiMoV2FlashForCausalLM MiMoV2ForCausalLM mimo_v2_flash mimo_v2",
        patterned,
        ruled=True,
        required=_BOTH,
        values="v_head_dim",
        reads="sliding_window_size",
        by_layer=window_sizes,
    ),
    # Keys of an encoder.
    Architecture(
        "WhisperForConditionalGeneration whisper",
        all_layers("full cross"),
        counted="decoder_layers",
        reads="decoder_attention_heads",
        only={"sliding_window": (None, "vLLM applies it, and others do not")},
        # The plain names of these fields belong to the encoder.
        required=("decoder_attention_heads",),
        products={
            "num_key_value_heads": "decoder_attention_heads",
            "decoder_attention_heads*head_dim": "hidden_size",
        },
        attention=".decoder.layers.{}.layers.self_attn.attn",
        cross=".decoder.layers.{}.layers.encoder_attn.attn",
    ),
    # Sparse attention: some layers also have keys by which an indexer chooses blocks.
    Architecture(
        "MiniMaxM3SparseForCausalLM MiniMaxM3VLForCausalLM minimax_m3_vl_text"
        " MiniMaxM3SparseForConditionalGeneration minimax_m3_vl",
        required=_BOTH,
        index_keys="model.layers.{}.self_attn.attn.index_cache",
        types={SPARSE: "full"},
    ),
    # Multi-head latent attention.
    Architecture("DeepseekV2ForCausalLM deepseek_v2", MLA),
    Architecture("DeepseekV3ForCausalLM deepseek_v3 kimi_k2", MLA),
    Architecture("Glm4MoeLiteForCausalLM glm4_moe_lite", MLA),
    Architecture("AXK1ForCausalLM axk1", MLA),
    Architecture("Mistral4ForCausalLM mistral4", MLA),
    Architecture("YoutuForCausalLM youtu", MLA),
    Architecture(
        "LongcatFlashForCausalLM longcat_flash",
        MLA,
        attention="model.layers.{0}.self_attn.0.attn model.layers.{0}.self_attn.1.attn",
        counted="num_layers",
        filled=half_of_caches,
        products={"num_hidden_layers": "2*num_layers"},
    ),
    Architecture(
        "DeepseekV32ForCausalLM deepseek_v32 GlmMoeDsaForCausalLM glm_moe_dsa",
        MLA,
        indexer=_INDEXER,
        ints=("index_topk_freq",),
        only={"cli_factor": (1, "SGLang shares indexers by it, and vLLM does not")},
        defaults={"index_head_dim": 128},
    ),
    Architecture("AXK2ForCausalLM axk2", MLA, indexer=_INDEXER, defaults={"index_head_dim": 128}),
    Architecture(
        "HYV4ForCausalLM hy_v4",
        MLA,
        indexer=_INDEXER,
        defaults={"index_head_dim": 128, "indexer_types": None, "index_topk_freq": 4},
    ),
    Architecture(
        "DeepseekV4ForCausalLM deepseek_v4",
        ratios,
        compressed=compressed_groups,
        types={
            "sliding_attention": NO_RATIO,
            "compressed_sparse_attention": SPARSE_RATIO,
            "heavily_compressed_attention": HEAVY_RATIO,
        },
        only={
            "compress_rate_csa": (4, "vLLM has no other rate"),
            "compress_rate_hca": (128, "vLLM has no other rate"),
        },
        defaults={"head_dim": 512, "sliding_window": 128, "index_head_dim": 128},
    ),
    Architecture(
        "DeepseekV41ForCausalLM deepseek_v41 deepseek_v41_text",
        shared_ratios,
        compressed=shared_groups,
        only={"layer_types": (None, "compress_ratios lists the layers")},
        defaults={"head_dim": 512, "sliding_window": 128, "index_head_dim": 128},
    ),
    # Recurrent layers, with or without attention layers.
    Architecture(
        "Qwen3NextForCausalLM qwen3_next",
        every("full_attention_interval", "state"),
        ruled="full_attention_interval",
        required=_BOTH,
        state=State(*_DELTA_NET),
        defaults=_QWEN_NEXT,
    ),
    Architecture(
        "Qwen3_5ForConditionalGeneration Qwen3_5ForCausalLM qwen3_5 qwen3_5_text"
        " Qwen3_5MoeForConditionalGeneration Qwen3_5MoeForCausalLM qwen3_5_moe qwen3_5_moe_text",
        every("full_attention_interval", "state"),
        ruled="full_attention_interval",
        required=_BOTH,
        state=State(*_DELTA_NET, ssm_field="mamba_ssm_dtype"),
        defaults=_QWEN_NEXT,
    ),
    Architecture(
        "OlmoHybridForCausalLM olmo_hybrid",
        every(4, "state"),
        state=State(*_DELTA_NET),
        defaults={"linear_conv_kernel_dim": 4},
        products=_DIVIDED,
    ),
    Architecture(
        "KimiLinearForCausalLM kimi_linear",
        delta_attention,
        ruled=True,
        # vLLM's latent attention and delta attention both register the module of the layer.
        attention="model.layers.{}.self_attn",
        latents=True,
        state=State(
            "delta_attention",
            "model.layers.{}.self_attn",
            "gated_delta_net",
            _DELTA_ATTENTION,
            ssm_dtype="float32",
        ),
    ),
    Architecture(
        "Glm5NextForCausalLM Glm5NextForConditionalGeneration Glm5NextTextForCausalLM"
        " glm5_next glm5_next_text",
        every(4, "state"),
        latents=True,
        indexer=_INDEXER,
        ring="model.layers.{}.self_attn.indexer.tail_cache",
        types={"indexed_attention": "full"},
        state=State(
            "delta_attention",
            "model.layers.{}.self_attn",
            "gated_delta_net",
            _DELTA_ATTENTION,
            ssm_dtype="float32",
        ),
        defaults={
            "qk_rope_head_dim": 0,
            "index_head_dim": 128,
            "index_kpool": 16,
        },
    ),
    Architecture(
        "Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration qwen4_exp qwen4_exp_text",
        every("full_attention_interval", "state"),
        required=_BOTH,
        index_keys="model.layers.{}.self_attn.indexer.compressed_key_cache",
        sparse=indexed_layers,
        ring="model.layers.{}.self_attn.indexer.raw_key_cache",
        ring_rule=key_tail,
        types={"indexed_attention": "full", "qwen_sparse_attention": "full"},
        state=State(
            "gated_delta_net", "model.layers.{}.linear_attn", "gated_delta_net", _GATED_DELTA_NET
        ),
        defaults={"full_attention_interval": 4, "linear_conv_kernel_dim": 4},
    ),
    Architecture(
        "NemotronHForCausalLM nemotron_h",
        letters,
        # Newer configs list the layers, and do not count them.
        counted="layer_types",
        filled=counted_letters,
        reads="attention_head_dim",
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
            ssm_field="mamba_ssm_cache_dtype",
            ssm_dtype="float32",
        ),
        types=_MAMBA_TYPES | {"mlp": "none", "moe": "none"},
        only={"sliding_window": (None, "vLLM applies it, SGLang adds one, others ignore it")},
    ),
    Architecture(
        "GraniteMoeHybridForCausalLM granitemoehybrid",
        all_layers("state"),
        types=_MAMBA_TYPES,
        state=State("mamba", _MIXER, "mamba2", _MAMBA2),
        products=_DIVIDED,
    ),
    Architecture(
        "BambaForCausalLM bamba",
        listed("attn_layer_indices"),
        required=_KV_HEADS_FIELD,
        attention="model.layers.{}.attn",
        types=_MAMBA_TYPES,
        state=State("mamba", _MIXER, "mamba2", _MAMBA2),
    ),
    Architecture(
        "JambaForCausalLM jamba",
        offset,
        required=_KV_HEADS_FIELD,
        attention="model.layers.{}.attn",
        types=_MAMBA_TYPES,
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
        products=_DIVIDED,
    ),
    Architecture(
        "Lfm2ForCausalLM lfm2",
        listed("full_attn_idxs"),
        types=_CONV_TYPES,
        required=_KV_HEADS_FIELD,
        state=State(
            "short_conv",
            "model.layers.{}.short_conv",
            "short_conv",
            {"conv_dim": "conv_dim", "conv_kernel": "conv_L_cache"},
        ),
        products=_DIVIDED,
    ),
    Architecture(
        "Lfm2MoeForCausalLM lfm2_moe",
        unlisted,
        types=_CONV_TYPES,
        products=_DIVIDED,
        required=_KV_HEADS_FIELD,
        state=State(
            "short_conv",
            "model.layers.{}.short_conv",
            "short_conv",
            {"conv_dim": "hidden_size", "conv_kernel": "conv_L_cache"},
        ),
    ),
    Architecture(
        "FalconH1ForCausalLM falcon_h1",
        all_layers("full state"),
        required=_KV_HEADS_FIELD,
        attention="model.layers.{}.attn",
        filled=divided_heads,
        defaults={"mamba_d_head": "auto", "mamba_d_ssm": 1024, "mamba_expand": 2},
        products={"mamba_d_ssm": "mamba_n_heads*mamba_d_head"},
        only={"layer_types": (None, "all layers of the class have both caches")},
        state=State("mamba", "model.{past}.mixer", "mamba2", _MAMBA2),
    ),
    Architecture(
        "Zamba2ForCausalLM zamba2",
        unlisted,
        # The class derives the head size of a state from the hidden size.
        required=("attention_head_dim", "hidden_size", "num_attention_heads"),
        defaults={"mamba_expand": 2},
        keys="attention_head_dim",
        reads="attention_head_dim",
        attention="model.attn.{nth}",
        types={"mamba": "state", "hybrid": "full state"},
        products={
            "n_mamba_heads*mamba_headdim": "mamba_expand*hidden_size",
            "num_key_value_heads": "num_attention_heads",
        },
        state=State(
            "mamba",
            "{behind}.mixer",
            "mamba2",
            {
                "num_heads": "n_mamba_heads",
                "head_dim": "mamba_headdim",
                "n_groups": "mamba_ngroups",
                "state_size": "mamba_d_state",
                "conv_kernel": "mamba_d_conv",
            },
        ),
    ),
    Architecture(
        "MiniMaxForCausalLM MiniMaxText01ForCausalLM minimax",
        unlisted,
        required=_KV_HEADS_FIELD,
        state=State(
            "linear_attention", "model.layers.{}.self_attn", "linear_attention", _LINEAR_ATTENTION
        ),
    ),
    Architecture(
        "BailingMoeV2_5ForCausalLM",
        grouped,
        latents=True,
        state=State(
            "linear_attention", "model.layers.{}.self_attn", "linear_attention", _LINEAR_ATTENTION
        ),
    ),
    Architecture(
        "BailingMoeV3ForCausalLM BailingHybridForCausalLM bailing_hybrid"
        " BailingMoeV3VLForConditionalGeneration",
        grouped,
        latents=True,
        state=State(
            "delta_attention",
            "model.layers.{}.self_attn",
            "gated_delta_net",
            _DELTA_ATTENTION_OF_BAILING,
            ssm_dtype="float32",
        ),
    ),
    Architecture(
        "Lfm3ForCausalLM lfm3",
        unlisted,
        types=_CONV_TYPES,
        required=_BOTH,
        state=State(
            "short_conv",
            "model.layers.{}.short_conv",
            "short_conv",
            {"conv_dim": "hidden_size", "conv_kernel": "conv_L_cache"},
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

_CONVOLVED = "its convolutions, whose inputs vLLM keeps as a window and SGLang as a state"
_ENCODER = "its encoder, whose keys belong to the input and not to tokens"

# Architectures that engines serve and kvspec does not describe, and what is missing.
NOT_YET: Mapping[str, str] = {
    name: reason
    for names, reason in (
        ("ZambaForCausalLM zamba", "names of its layers, since vLLM and SGLang have no such class"),
        ("ZayaForCausalLM zaya", "its state of convolved queries and keys"),
        (
            "InklingForCausalLM InklingForConditionalGeneration inkling_text inkling_mm_model",
            _CONVOLVED,
        ),
        (
            "Inkling2ForCausalLM Inkling2ForConditionalGeneration inkling2 inkling2_text",
            _CONVOLVED,
        ),
        (
            "Step5ForCausalLM Step5ForConditionalGeneration step5",
            "its rings, which have as many rows as fit into the pages of other layers",
        ),
        (
            "MistralLarge4ForConditionalGeneration mistral_large4 mistral_large4_text",
            "its indexer on layers with expanded keys",
        ),
        ("MllamaForConditionalGeneration mllama mllama_text_model", _ENCODER),
        ("MiniCPM3ForCausalLM minicpm3", "its latents, which engines expand in different ways"),
        ("Dots3NoteForCausalLM dots3_note dots3_note_text", "its latents of two widths"),
        ("WhisperForCausalLM", _ENCODER),
        (
            "VoxtralRealtimeForConditionalGeneration voxtral_realtime",
            "its tokens with four rows each",
        ),
    )
    for name in names.split()
}
