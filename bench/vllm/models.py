"""Tiny models with random weights, on disk as vLLM loads them.

The weights have a large deviation, so that each token depends strongly on the keys and values that
it attends to. A single wrong head then changes the next token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 576
# Tokens of the sliding window, and of a chunk. It is two blocks of 32 tokens, so that a window can
# begin at a block boundary and inside a block.
WINDOW = 64

_COMMON: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 12,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA = {**_COMMON, "num_hidden_layers": 2, "head_dim": 32}

# For each model: the name of the architecture in transformers, and its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-6": ("Llama", {**_LLAMA, "num_key_value_heads": 6}),
    "llama-2": ("Llama", {**_LLAMA, "num_key_value_heads": 2}),
    "qwen3-6": ("Qwen3", {**_LLAMA, "num_key_value_heads": 6}),
    "gemma-2": (
        "Gemma3Text",
        {
            **_COMMON,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "num_key_value_heads": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
            # As all models of this kind: SGLang does not load another head.
            "tie_word_embeddings": True,
        },
    ),
    # Its full layers do not rotate keys, although they have a rotary embedding.
    "exaone-2": (
        "Exaone4",
        {
            **_COMMON,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "num_key_value_heads": 2,
            "sliding_window": WINDOW,
            "sliding_window_pattern": "LLG",
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
    # Layers with a recurrent state beside layers with attention.
    "lfm2-2": (
        "Lfm2",
        {
            **_COMMON,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
            # transformers has no such fields, but vLLM reads them.
            "block_dim": 128,
            "conv_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    # Attention and Mamba2 in each layer. All TP ranks hold the one group of B and C.
    "falcon-h1-2": (
        "FalconH1",
        {
            **_COMMON,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 32,
        },
    ),
    # Each second layer reads all tokens and has no positions. The others read only their own chunk.
    "llama4-2": (
        "Llama4Text",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "attention_chunk_size": WINDOW,
            "no_rope_layer_interval": 2,
            "intermediate_size_mlp": 192,
            # No layer has experts. transformers reads the list, and vLLM reads the step.
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
        },
    ),
    "deepseek": (
        "DeepseekV2",
        {
            **_COMMON,
            "num_hidden_layers": 3,
            "num_key_value_heads": 12,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 48,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}

_DEEPSEEK = MODELS["deepseek"][1]
# The third version has other experts. transformers rotates its keys as halves, vLLM as pairs.
_ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
MODELS["deepseek-3"] = ("DeepseekV3", {**_DEEPSEEK, **_ROUTING, "rope_interleave": True})

# A square image of 140 pixels is 100 tokens. Each of them has the number IMAGE in a prompt.
IMAGE = 3
PIXELS = 140
_PATCH = 14
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": PIXELS,
    "patch_size": _PATCH,
    "projection_dim": 32,
}


def _with_images(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return a model for images whose language model is of *kind*, with the sizes of *text*."""
    fields = {
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
        "text_config": {"model_type": kind, **MODELS[text][1]},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "initializer_range": _COMMON["initializer_range"],
        "tie_word_embeddings": MODELS[text][1]["tie_word_embeddings"],
    }
    return "Llava", fields


MODELS["llava-2"] = _with_images("llama", "llama-2")
MODELS["llava-window-2"] = _with_images("gemma3_text", "gemma-2")

_CLASSES = {
    "Gemma3Text": "Gemma3ForCausalLM",
    "Llama4Text": "Llama4ForCausalLM",
    "Llava": "LlavaForConditionalGeneration",
}


def make(name: str, folder: Path) -> Path:
    """Return the folder of model *name* below *folder*, and create the model if it is missing."""
    import torch  # noqa: PLC0415 - only the processes that make a model need it
    import transformers  # noqa: PLC0415

    path = folder / name
    if (path / "config.json").is_file():
        return path
    transformers.utils.logging.disable_progress_bar()
    architecture, fields = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**fields)
    kind = _CLASSES.get(architecture, f"{architecture}ForCausalLM")
    model = getattr(transformers, kind)(config).to(torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=fields["initializer_range"])
    model.save_pretrained(path)
    if architecture == "Llava":
        _make_processor(path)
        _rename_encoder(path / "model.safetensors")
    return path


def _rename_encoder(path: Path) -> None:
    """Give the weights of an image encoder the names that vLLM 0.32 knows, as published models."""
    import safetensors.torch  # noqa: PLC0415 - as above

    weights = safetensors.torch.load_file(path)
    tower = "vision_tower."
    names = {name: name.replace(tower, f"{tower}vision_model.") for name in weights}
    safetensors.torch.save_file({names[name]: weights[name] for name in weights}, path)


def _make_processor(path: Path) -> None:
    """Write the processor of a model for images. Its tokenizer has a word for each token."""
    import tokenizers  # noqa: PLC0415 - as above
    import transformers  # noqa: PLC0415

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": IMAGE}
    words |= {f"w{number}": number for number in range(IMAGE + 1, VOCABULARY)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))  # noqa: S106
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        unk_token="<unk>",  # noqa: S106
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        additional_special_tokens=["<image>"],
    )
    # This class needs no torchvision.
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}
    )
    transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(path)


# The rank of an adapter, and its modules: all that decide queries, keys and values.
RANK = 8
_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of *model* with random weights into *folder*, as PEFT stores it."""
    import safetensors.torch  # noqa: PLC0415 - only the processes that make a model need it
    import torch  # noqa: PLC0415

    torch.manual_seed(seed)
    weights = {}
    for name, weight in safetensors.torch.load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(_ADAPTED):
            # Both are large, so that answers with and without the adapter differ.
            rows, columns = torch.randn(RANK, weight.shape[1]), torch.randn(weight.shape[0], RANK)
            weights[f"base_model.model.{module}.lora_A.weight"] = rows * 0.2
            weights[f"base_model.model.{module}.lora_B.weight"] = columns * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")
    fields = {"r": RANK, "lora_alpha": RANK, "target_modules": _ADAPTED, "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder
