"""Write Llama and Qwen3 of transformers as files of llama.cpp, in float32.

llama.cpp rotates a Llama's elements in pairs, 2i with 2i + 1, and transformers in halves, i with
i + n/2. So the rows of its query and key weights change places, as llama.cpp's own converter does
it. Qwen3 is rotated in halves by both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Names of a layer's weights in transformers, and in a file of llama.cpp.
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write(folder: Path) -> Path:
    """Return the file of llama.cpp for the model in *folder*, and create it if it is missing."""
    path = folder.with_suffix(".gguf")
    if path.is_file():
        return path
    import gguf  # noqa: PLC0415 - only the environment of llama.cpp has it
    from safetensors.numpy import load_file  # noqa: PLC0415

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"a model of type {kind!r} is not converted")
    # A file with its final name is complete, even if two programs write it.
    partial = folder.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, kind)
    _add_config(writer, config)
    for name, values in load_file(folder / "model.safetensors").items():
        module, _, suffix = name.rpartition(".")
        if module in _OTHERS:
            writer.add_tensor(f"{_OTHERS[module]}.{suffix}", values)
            continue
        number, _, part = module.removeprefix("model.layers.").partition(".")
        if kind == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            values = _in_pairs(values, config["head_dim"])  # noqa: PLW2901 - the same weights
        writer.add_tensor(f"blk.{number}.{_LAYER[part]}.{suffix}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(path)


def _add_config(writer: Any, config: dict[str, Any]) -> None:  # noqa: ANN401 - a `GGUFWriter`
    """Write the sizes of a model."""
    size = config["head_dim"]
    rotation = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rotation["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _in_pairs(weights: Any, size: int) -> Any:  # noqa: ANN401 - arrays of numpy
    """Move row i of each head to 2i, and row i + size/2 to 2i + 1."""
    heads = weights.reshape(-1, 2, size // 2, weights.shape[1])
    return heads.swapaxes(1, 2).reshape(weights.shape).copy()
