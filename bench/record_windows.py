"""Record which cached tokens the models of transformers attend to, in each layer.

Run this with an environment that has transformers and torch. It writes
`tests/goldens/transformers_windows.json`, which `tests/facts/test_windows.py` compares with
`kvspec.models`. For each model type, one key of a small config is varied at a time. Each model runs
once with random weights, and the attention function records the mask of the last query.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    masking_utils,
)

GOLDEN = Path(__file__).parents[1] / "tests" / "goldens" / "transformers_windows.json"
TYPES = (
    "apertus arcee cohere cohere2 ernie4_5 ernie4_5_moe exaone4 gemma gemma2 gemma3_text glm glm4"
    " glm4_moe gpt_oss granite granitemoe hunyuan_v1_dense llama llama4_text minimax_m2 ministral3"
    " mistral mixtral nemotron olmo olmo2 olmo3 olmoe phi phi3 qwen2 qwen2_5_vl_text qwen2_moe"
    " qwen2_vl_text qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 stablelm"
    " starcoder2"
)
LAYERS = 6
CONFIG: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
ON = {"sliding_window": 5, "use_sliding_window": True}
TURNS = ["full_attention", "sliding_attention"] * (LAYERS // 2)
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"sliding_window": 5},
    {"sliding_window": None},
    {"use_sliding_window": True},
    {"sliding_window": None, "use_sliding_window": True},
    ON,
    {**ON, "max_window_layers": 0},
    {**ON, "max_window_layers": 4},
    {**ON, "no_rope_layers": [1, 0, 0, 1, 1, 0]},
    {**ON, "no_rope_layer_interval": 3},
    {"sliding_window": 5, "sliding_window_pattern": 3},
    {"sliding_window": 5, "layer_types": TURNS},
    {"sliding_window": 5, "layer_types": TURNS, "use_sliding_window": False},
    {**ON, "layer_types": TURNS},
    {"attention_chunk_size": 5},
    {"attention_chunk_size": 5, "no_rope_layers": [1, 0, 0, 1, 1, 0]},
)
# Sizes that no cache depends on. Small ones make the models fast.
SMALL = {
    "vocab_size": 16,
    "intermediate_size": 16,
    "intermediate_size_mlp": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_num_experts": 2,
    "moe_k": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 16384,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# The positions of these models have three axes: time, height and width.
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}

_seen: dict[int, dict[str, int]] = {}


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    # Without a mask, every query attends to all tokens before it.
    reads = key.shape[2] if mask is None else int(mask[0, 0, -1].sum())
    # Flash attention takes its window from the option, and other functions from the mask.
    unlimited = "sliding_window" in options and options["sliding_window"] is None
    if reads == 0 or (unlimited and reads < key.shape[2]):
        raise ValueError(reads)
    layer: Any = module.layer_idx
    _seen[layer] = {"reads": reads, "heads": key.shape[1], "head_size": key.shape[3]}
    batch, heads, tokens, _ = query.shape
    return query.new_zeros(batch, tokens, heads, value.shape[3]), None


def answer(model_type: str, change: dict[str, Any]) -> dict[str, Any]:
    """Return what a model reads with the changed config, or the error of transformers."""
    axes = AXES if "_vl_" in model_type else {}
    try:
        config = CONFIG_MAPPING[model_type](**{**SMALL, **CONFIG, **axes, **change})
        names = ("sliding_window", "attention_chunk_size")
        # The prompt is longer than each window, so that the first tokens are out of all windows.
        tokens = 8 + max(getattr(config, name, None) or 0 for name in names)
        _seen.clear()
        model = AutoModel.from_config(config, attn_implementation="record")
        with torch.no_grad():
            model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    except Exception as error:  # noqa: BLE001
        return {"error": type(error).__name__}
    seen = [_seen[index] for index in range(LAYERS)]
    sizes = {(layer["heads"], layer["head_size"]) for layer in seen}
    ((heads, head_size),) = sizes
    # The query itself is the last token. The cache has the tokens before it.
    reads = [layer["reads"] - 1 for layer in seen]
    return {"cached": tokens - 1, "reads": reads, "heads": heads, "head_size": head_size}


def main() -> None:
    """Record all types. Equal answers of one type are one entry."""
    logging.disable(logging.WARNING)
    AttentionInterface.register("record", _record)
    AttentionMaskInterface.register("record", masking_utils.sdpa_mask)
    types: dict[str, list[Any]] = {}
    for name in TYPES.split():
        answers: list[Any] = []
        types[name] = answers
        fields = CONFIG_MAPPING[name].__dataclass_fields__
        for index, change in enumerate(CHANGES):
            # vLLM reads this list also for models whose class in transformers ignores it.
            if "layer_types" in change and not {"layer_types", "sliding_window"} <= set(fields):
                continue
            found = answer(name, change)
            print(name, change, found)
            same = next((each for each in answers if each["answer"] == found), None)
            if same is None:
                answers.append({"answer": found, "changes": [index]})
            else:
                same["changes"].append(index)
    lines = [f'  "{name}": {json.dumps(answers)}' for name, answers in types.items()]
    head = {"transformers": transformers.__version__, "config": CONFIG}
    changes = ",\n  ".join(map(json.dumps, CHANGES))
    GOLDEN.write_text(
        f'{json.dumps(head)[:-1]},\n"changes": [\n  {changes}\n],\n"types": {{\n'
        + ",\n".join(lines)
        + "\n}}\n"
    )


if __name__ == "__main__":
    main()
