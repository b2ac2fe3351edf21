"""Tiny models with random weights, on disk as vLLM loads them.

Weights are drawn wide, so that what a token says hangs on the keys and values that it attends to:
one wrong head, and the next token is another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 576
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

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-6": ("Llama", {**_LLAMA, "num_key_value_heads": 6}),
    "llama-2": ("Llama", {**_LLAMA, "num_key_value_heads": 2}),
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
        },
    ),
    "deepseek": (
        "DeepseekV2",
        {
            **_COMMON,
            "num_hidden_layers": 1,  # of two, vLLM's MLA on CPUs says other things at each TP
            "num_key_value_heads": 12,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
"""Of each: transformers' name of the architecture, and its config."""

_CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}


def make(name: str, folder: Path) -> Path:
    """Return the folder of model *name* below *folder*; it is made if it is not there."""
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
    return path
