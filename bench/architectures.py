"""Compare `models.from_config` with the caches that models of transformers really make.

```sh
python bench/architectures.py            # print the table: architecture, right or refused, and why
python bench/architectures.py gemma3n    # only some model types
python bench/architectures.py --check    # exit with 1 if any answer is wrong
```

Run it with an environment that has transformers and torch. For each class of a causal language
model, it makes a tiny model with random weights, runs one prompt, and reads the cache.

How it works:
    The answer of kvspec is compared with the cache in these facts, for each layer:

        a layer of the cache has            kvspec must give the layer
        keys and values [1, H, tokens, C]   H KV heads, keys and values of C elements each
        fewer tokens than the prompt        a window that keeps this many tokens
        a conv state [1, channels, K]       K - 1 rows of as many channels: engines keep one less
        a recurrent state [1, ...]          as many elements
        nothing                             no cache

    Transformers caches MLA with expanded keys, and engines cache latents. So for MLA only the
    number of layers is compared, and the table says "mla". Tests compare the size of latents with
    vLLM's.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import warnings
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvspec import MambaSpec, MLAAttentionSpec, SpecError, models
from kvspec.engines.group import KVCacheGroup

LAYERS, TOKENS = 8, 40
MOST_PARAMETERS = 20_000_000
SIZES: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 32,
    "vocab_size_per_layer_input": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 64,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_num_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_ssm": 256,
    "n_groups": 2,
    "ssm_state_size": 16,
    "max_position_embeddings": 512,
}
"""Small sizes for the fields that a class has. Each differs from the others where it can."""


def tiny(model_type: str) -> Any:  # noqa: ANN401 - a config of transformers
    """Return a config of the class with small sizes."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    given = default.to_dict()
    changes = {name: value for name, value in SIZES.items() if given.get(name) is not None}
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        listed = given.get(name)
        if isinstance(listed, list) and listed:
            changes[name] = _one_of_each(listed)
    changes |= CHANGES.get(model_type, {})
    return kind(**changes)


def _one_of_each(types: list[str]) -> list[str]:
    """Return `LAYERS` types that begin as *types* does, and contain all of its kinds."""
    first = types[:LAYERS] + types[:1] * (LAYERS - len(types))
    for place, missing in enumerate(sorted(set(types) - set(first))):
        first[place] = missing
    return first


CHANGES: dict[str, dict[str, Any]] = {}
"""More fields, by model type."""


def cache_of(config: Any) -> tuple[str, list[dict[str, Any]]]:  # noqa: ANN401
    """Return the class of a model of *config*, and the facts about each layer of its cache."""
    torch.manual_seed(0)
    with torch.device("meta"):
        count = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters: the sizes of this class have other names")
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 30, (1, TOKENS))
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    return type(model).__name__, [_facts(layer) for layer in cache.layers]


def _facts(layer: Any) -> dict[str, Any]:  # noqa: ANN401 - a layer of a cache
    facts: dict[str, Any] = {"class": type(layer).__name__}
    keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
    if torch.is_tensor(keys) and keys.numel():
        facts |= {"heads": keys.shape[1], "k": keys.shape[3], "tokens": keys.shape[2]}
        facts["v"] = values.shape[3]
    for name in ("conv_states", "recurrent_states"):
        state = getattr(layer, name, None)
        states = list(state.values()) if isinstance(state, dict) else [state]
        shapes = [tuple(each.shape[1:]) for each in states if torch.is_tensor(each)]
        if shapes:
            facts[name] = shapes
    return facts


def differences(groups: tuple[KVCacheGroup, ...], layers: list[dict[str, Any]]) -> list[str]:
    """Return what differs between the answer of kvspec and the facts of a cache."""
    own: dict[int, list[Any]] = {}
    for group in groups:
        for name in group.layers:
            if "indexer" not in name:
                index = int(next(word for word in name.split(".") if word.isdigit()))
                own.setdefault(index, []).append(group.spec.of_layer(name))
    found = []
    for index, facts in enumerate(layers):
        specs = own.pop(index, [])
        has_keys, has_state = "k" in facts, "conv_states" in facts or "recurrent_states" in facts
        states = [spec for spec in specs if isinstance(spec, MambaSpec)]
        attention = [spec for spec in specs if not isinstance(spec, MambaSpec)]
        if (has_keys, has_state) != (bool(attention), bool(states)):
            names = [type(spec).__name__ for spec in specs]
            found.append(f"layer {index}: {names or 'nothing'} for {facts}")
            continue
        found += [
            f"layer {index}: {text}" for spec in attention for text in _attention(spec, facts)
        ]
    if own:
        found.append(f"layers {sorted(own)} have no cache in transformers")
    return found


def _attention(spec: Any, facts: dict[str, Any]) -> list[str]:  # noqa: ANN401
    if isinstance(spec, MLAAttentionSpec):
        return []
    value = spec.head_size if spec.head_size_v is None else spec.head_size_v
    answer = {"heads": spec.total_num_kv_heads, "k": spec.head_size, "v": value}
    wrong = [f"{name} {answer[name]}, not {facts[name]}" for name in answer
             if answer[name] != facts[name]]  # fmt: skip
    # A cache with a window keeps one token less than the window. The chunked cache is not cut.
    window = getattr(spec, "sliding_window", None)
    if window is not None and facts["tokens"] not in (window - 1, TOKENS):
        wrong.append(f"window {window}, but {facts['tokens']} tokens")
    if window is None and facts["tokens"] != TOKENS and not hasattr(spec, "attention_chunk_size"):
        wrong.append(f"no window, but {facts['tokens']} tokens")
    if window is not None and "Sliding" not in facts["class"]:
        wrong.append(f"window {window}, but a {facts['class']}")
    return wrong


def _state(spec: MambaSpec, facts: dict[str, Any]) -> list[str]:
    wrong = []
    rows = [part for part in spec.parts if part.tensor == "conv"]
    temporal = [part for part in spec.parts if part.tensor == "ssm"]
    shapes = facts.get("conv_states", [])
    columns = {shape[-1] for shape in shapes}
    channels = sum(shape[0] for shape in shapes)
    if rows and (sum(part.units for part in rows), {rows[0].states + 1}) != (channels, columns):
        text = f"{sum(part.units for part in rows)} channels and {rows[0].states} rows"
        wrong.append(f"{text} for {shapes}")
    elements = sum(part.units * part.content_bytes for part in temporal) // 4
    shapes = facts.get("recurrent_states", [])
    real = sum(torch.Size(shape).numel() for shape in shapes)
    if elements != real:
        wrong.append(f"{elements} elements for {shapes}")
    return wrong


def judged(model_type: str) -> tuple[str, str, str]:
    """Return the class, the verdict and the reason of one model type."""
    try:
        config = tiny(model_type)
        name, layers = cache_of(copy.deepcopy(config))
    except Exception as error:  # noqa: BLE001 - transformers may fail in any way
        return model_type, "not made", f"{type(error).__name__}: {str(error)[:150]}"
    given = config.to_dict() | {"architectures": [name]}
    try:
        groups = models.from_config(given, dtype="float32", ssm_dtype="float32")
    except SpecError as error:
        return name, "refused", str(error)[:200]
    except Exception as error:  # noqa: BLE001 - a fault of kvspec is a row of the table
        return name, "WRONG", f"{type(error).__name__}: {error}"
    wrong = differences(groups, layers)
    kinds = ", ".join(f"{group.name} {len(group.layers)}" for group in groups)
    return name, "WRONG" if wrong else "right", "; ".join(wrong)[:400] or kinds


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_type", nargs="*")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    counts: dict[str, int] = {}
    types = options.model_type or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    print(f"transformers {transformers.__version__}")
    for model_type in types:
        name, verdict, why = judged(model_type)
        counts[verdict] = counts.get(verdict, 0) + 1
        print(f"| {model_type} | {name} | {verdict} | {why} |", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return int(options.check and "WRONG" in counts)


if __name__ == "__main__":
    sys.exit(main())
