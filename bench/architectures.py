"""Compare `models.from_config` with the caches that models of transformers really make.

```sh
python bench/architectures.py                 # the table: architecture, right or refused, and why
python bench/architectures.py gemma3n         # only some model types
python bench/architectures.py --check         # exit with 1 if any answer is wrong
python bench/architectures.py --record        # write the facts that the tests compare
```

Run it with an environment that has transformers and torch. Each class of a language model and each
entry of the catalogue becomes a model. It runs one prompt, and the table compares its cache with
the answer of kvspec. A class is tiny and has random weights. A model of the catalogue has its real
sizes, but no memory: its tensors are on the device ``meta``.

How it works:
    An answer is right if each layer has the cache that transformers makes for it, in this sense:

        a layer of the cache has        kvspec must give the layer
        keys and values [1, H, N, C]    H KV heads, keys and values of C elements each
        a sliding window                the same window
        a conv state [1, channels, K]   K - 1 rows of as many channels: engines keep one less
        a recurrent state [1, ...]      as many heads and elements
        indexer keys [1, N, C]          indexer keys of C elements
        nothing                         no cache

    Transformers caches MLA with expanded keys, and engines cache latents. The output size of the
    projection ``kv_a_proj_with_mqa`` is the size of the latent.

    A config may omit a size, because its class supplies one. So each size is left out in turn. The
    answer must then be the one for the value that the class supplies, or a refusal.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import importlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from kvspec.models import catalogue
from kvspec.models.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from model_caches import verdict_of  # noqa: E402

GOLDEN = ROOT / "tests" / "goldens" / "transformers_caches.json.gz"
LAYERS, TOKENS = 8, 40
MOST_PARAMETERS = 20_000_000
SIZES: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "hidden_size": 128,
    "n_embd": 128,
    "d_model": 128,
    "word_embed_proj_dim": 128,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 32,
    "vocab_size_per_layer_input": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
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
    "linear_num_heads": 2,
    "linear_head_dim": 16,
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
    "index_topk": 8,
    "num_kv_shared_layers": 2,
    "attention_head_dim": 32,
    "moe_k": 2,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2,
    "n_mamba_heads": 8,
    "mamba_headdim": 32,
    "mamba_ngroups": 2,
    "mamba_dt_rank": 8,
    "adapter_rank": 8,
}
"""Small sizes for the fields that a class has. Each differs from the others where it can."""

_SOME = {"num_key_value_heads": 2, "head_dim": 32}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_PLANES = {"rope_parameters": {**_ROTARY, "mrope_section": [4, 6, 6]}}
_HALF = {**_ROTARY, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "layer_group_size": 4,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "bamba": {"attn_layer_indices": [2, 5]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "head_dim": 32,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], "moe_num_experts": 4, "moe_k": 2},
    "falcon_h1": {"mamba_d_ssm": 256},
    "glm4v_text": _PLANES,
    "glm5_next_text": {"index_topk": 32, "qk_rope_head_dim": 0},
    "glm4v_moe_text": {"rope_parameters": _HALF},
    "granitemoehybrid": {"layer_types": [*["mamba"] * 3, "attention"] * 2},
    "hunyuan_v1_dense": _SOME,
    "hunyuan_v1_moe": _SOME,
    "lfm2_moe": {"layer_types": [*["conv"] * 3, "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "minimax": _SOME,
    "ministral": _SOME,
    "mistral4": {"head_dim": 32},
    "nemotron": _SOME,
    "glm_ocr_text": _PLANES,
    "paddleocr_vl_text": _PLANES,
    "qwen2_5_omni_text": _PLANES,
    "qwen2_vl_text": _PLANES,
    "qwen2_5_vl_text": _PLANES,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "step3p5": {
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
        "sliding_window": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {
        "layers_block_type": [*["mamba"] * 3, "hybrid"] * 2,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
    },
}
"""More fields, by model type."""

_WINDOWS = ["sliding_attention", "full_attention"] * 4
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text, other global heads": (
        "gemma4_text",
        {"layer_types": _WINDOWS, "global_head_dim": 64, "attention_k_eq_v": True,
         "num_global_key_value_heads": 1},
    ),
    "gemma4_text, unused global heads": (
        "gemma4_text", {"global_head_dim": 64, "num_global_key_value_heads": 1}
    ),
    "kimi_linear, lists": (
        "kimi_linear",
        {"linear_attn_config": {
            "full_attn_layers": [2, 8], "kda_layers": [1, 3, 4, 5, 6, 7], "head_dim": 16,
            "num_heads": 2, "short_conv_kernel_size": 3}},
    ),
    "nemotron_h, letters": (
        "nemotron_h",
        {"hybrid_override_pattern": "M-*EM-ME", "num_hidden_layers": 8, "conv_kernel": 4},
    ),
    "glm_moe_dsa, shared indexers": ("glm_moe_dsa", {"index_topk_freq": 3}),
    "glm_moe_dsa, a pattern": ("glm_moe_dsa", {"index_topk_pattern": "FSSFSSFS"}),
    "minimax_m3_vl_text, nested": (
        "minimax_m3_vl_text",
        {"sparse_attention_config": {
            "sparse_attention_freq": [0, 1, 1, 0, 1, 1, 1, 1], "sparse_index_dim": 64,
            "sparse_disable_index_value": [0, 1, 1, 0, 1, 1, 1, 1]}},
    ),
    "cohere2_moe, dense layers": ("cohere2_moe", {"first_k_dense_replace": 3}),
    "lfm2, attention layers": ("lfm2", {"full_attn_idxs": [2, 5], "conv_L_cache": 3}),
}  # fmt: skip
"""More configs of some types, as published files have them: the type, and more fields."""

_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types")

EXPERTS = {
    "vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_group": 1,
    "topk_group": 1, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip
"""Fields on which no cache depends. Small values make a model of the catalogue fast."""


def tiny(model_type: str, kind: Any = None) -> dict[str, Any]:  # noqa: ANN401
    """Return small sizes for the config of the class."""
    given = (kind or CONFIG_MAPPING[model_type])().to_dict()
    changes = {name: value for name, value in SIZES.items() if given.get(name) is not None}
    for name in _LISTS:
        listed = given.get(name)
        if isinstance(listed, list) and listed:
            changes[name] = _one_of_each(listed)
    # Transformers expands latents to a key for each head, so these classes have no groups of heads.
    if "kv_lora_rank" in changes:
        own = {"num_key_value_heads": SIZES["num_attention_heads"], "head_dim": 16}
        changes |= {name: value for name, value in own.items() if name in changes}
    return changes | CHANGES.get(model_type, {})


def _one_of_each(types: list[str]) -> list[str]:
    """Return `LAYERS` types that begin as *types* does, and contain all of its kinds."""
    first = types[:LAYERS] + types[:1] * (LAYERS - len(types))
    for place, missing in enumerate(sorted(set(types) - set(first))):
        first[place] = missing
    return first


def cache_of(config: Any, device: str = "cpu") -> tuple[str, list[dict[str, Any]]]:  # noqa: ANN401
    """Return the class of a model of *config*, and the facts about each layer of its cache."""
    make = _maker(config)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = make(config).eval()
    if device == "cpu":
        count = sum(each.numel() for each in model.parameters())
        if count > MOST_PARAMETERS:
            raise ValueError(f"{count} parameters: the sizes of this class have other names")
        model = make(config).eval()
    ids = torch.randint(3, 30, (1, TOKENS), device=device)
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=True)
    cache = output.get("past_key_values") or output.get("cache_params")
    facts = [_facts(layer) for layer in cache.layers]
    for index, state in enumerate(getattr(cache, "linear_cache", ())):
        facts += [{}] * (index >= len(facts))
        if torch.is_tensor(state):
            facts[index]["recurrent"] = [list(state.shape[1:])]
    for module in model.modules():
        if hasattr(module, "kv_a_proj_with_mqa"):
            facts[module.layer_idx]["latent"] = module.kv_a_proj_with_mqa.out_features
    return type(model).__name__, facts


def _maker(config: Any) -> Callable[[Any], Any]:  # noqa: ANN401
    """Return the function that makes the model of a config."""
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM.from_config
    if type(config) in AutoModel._model_mapping:  # noqa: SLF001
        return AutoModel.from_config
    # The language models of some multimodal classes are not registered.
    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    return next(
        own for name, own in vars(module).items()
        if name.endswith("TextModel") and getattr(own, "config_class", 0) is type(config)
    )  # fmt: skip


def _facts(layer: Any) -> dict[str, Any]:  # noqa: ANN401 - a layer of a cache
    facts: dict[str, Any] = {}
    keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
    if torch.is_tensor(keys) and keys.numel():
        facts |= {"heads": keys.shape[1], "k": keys.shape[3], "v": values.shape[3]}
        window = getattr(layer, "sliding_window", None)
        if window is not None:
            # A short prompt leaves a large window uncut.
            if min(window - 1, TOKENS) != keys.shape[2]:
                raise ValueError(f"{keys.shape[2]} tokens of a window of {window}")
            facts["window"] = window
        elif keys.shape[2] != TOKENS:
            raise ValueError(f"{keys.shape[2]} tokens without a window")
    for name in ("indexer_keys", "idx_keys"):
        if torch.is_tensor(indexer := getattr(layer, name, None)):
            facts["indexer"] = indexer.shape[-1]
    for name, states in (("conv", "conv_states"), ("recurrent", "recurrent_states")):
        state = getattr(layer, states, None)
        every = list(state.values()) if isinstance(state, dict) else [state]
        shapes = [list(each.shape[1:]) for each in every if torch.is_tensor(each)]
        if shapes:
            facts[name] = shapes
    return facts


def variant(name: str) -> dict[str, Any]:
    """Return the record of one of `VARIANTS`. Its config has only what a file would have."""
    model_type, more = VARIANTS[name]
    kind = CONFIG_MAPPING[model_type]
    changes = {key: value for key, value in tiny(model_type).items() if key not in _LISTS} | more
    class_name, layers = cache_of(kind(**copy.deepcopy(changes)))
    given = {"model_type": model_type, **changes}
    return {"class": class_name, "config": given, "layers": layers, "omitted": []}


def record(model_type: str, kind: Any = None) -> dict[str, Any]:  # noqa: ANN401
    """Return what the tests need about one model type: its class, config, cache and defaults."""
    kind = kind or CONFIG_MAPPING[model_type]
    changes = tiny(model_type, kind)
    config = kind(**changes)
    given = _plain(config)
    name, layers = cache_of(copy.deepcopy(config))
    omitted = []
    for field in changes:
        if field in given and not field.endswith("token_id"):
            try:
                whole = _plain(kind(**{key: changes[key] for key in changes if key != field}))
            except Exception:  # noqa: BLE001, S112 - the class needs the field
                continue
            other = {key: value for key, value in whole.items() if given.get(key) != value}
            omitted.append([field, other])
    # A short file has none of the fields that the class derives.
    derived = [key for key in given if key not in changes and key not in ("model_type", "dtype")]
    return {
        "class": name,
        "config": given,
        "derived": derived,
        "layers": layers,
        "omitted": omitted,
    }


def _plain(config: Any) -> dict[str, Any]:  # noqa: ANN401 - a config of transformers
    """Return the config as it stands in a file."""
    plain: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    noise = ("transformers_version", "id2label", "label2id", "_name_or_path")
    return {key: value for key, value in plain.items() if key not in noise and value is not None}


def nested(model_type: str) -> dict[str, Any]:
    """Return the record of a multimodal class. Its language model alone has the cache."""
    default = CONFIG_MAPPING[model_type]()
    text = default.get_text_config()
    if text is default:
        found = record(model_type)
        # A language model without a class of its own has the class of the multimodal model.
        return {**found, "class": found["class"].replace("Model", "ForCausalLM")}
    found = record(text.model_type, type(text))
    classes = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    name = next(names[model_type] for names in classes if model_type in names)
    outer = {"model_type": model_type, "text_config": found["config"]}
    return {**found, "class": name, "config": outer, "omitted": []}


def of_catalogue(name: str) -> dict[str, Any]:
    """Return the facts about a model of the catalogue, with all its real sizes."""
    given = catalogue.config(name)
    inner: Mapping[str, Any] = given.get("text_config", given)  # type: ignore[assignment]
    kind = CONFIG_MAPPING[str(inner["model_type"]).replace("kimi_k2", "deepseek_v3")]
    known = kind().to_dict()
    small = {key: value for key, value in EXPERTS.items() if key in known}
    names = ("model_type", "architectures", "torch_dtype", "dtype")
    config = kind(**{key: value for key, value in inner.items() if key not in names}, **small)
    # Experts of a model without memory need the type of a real one.
    config.dtype = torch.bfloat16
    _, layers = cache_of(config, "meta")
    return {"class": given["architectures"][0], "config": given, "layers": layers, "omitted": []}  # type: ignore[index]


def made(name: str) -> dict[str, Any]:
    """Return the record of a model type, of one of `VARIANTS`, or of a model of the catalogue."""
    if name in catalogue.names():
        return of_catalogue(name)
    if name in VARIANTS:
        return variant(name)
    return nested(name)


def row(name: str) -> tuple[str, str, str, dict[str, Any] | None]:
    """Return the class, the verdict, its reason and the record of one row of the table."""
    try:
        found = made(name)
    except Exception as error:  # noqa: BLE001 - transformers may fail in any way
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return "", "not made", why[:150], None
    try:
        verdict, why = verdict_of(found)
    except Exception as error:  # noqa: BLE001 - a fault of kvspec is a row of the table
        verdict, why = "WRONG", f"{type(error).__name__}: {error}"
    return found["class"], verdict, why, found


def names() -> list[str]:
    """Return all rows of the table. Those that kvspec knows come first."""
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    types = sorted(causal | set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
    known = {name for row in ARCHITECTURES for name in row.names}
    first = [name for name in types if name in known]
    others = [name for name in types if name not in known]
    return [*first, *VARIANTS, *catalogue.names(), *others]


def save(found: Mapping[str, dict[str, Any]]) -> None:
    """Replace these records in the file that the tests read."""
    golden: dict[str, Any] = {"types": {}, "catalogue": {}}
    if GOLDEN.exists():
        golden = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    golden["transformers"] = transformers.__version__
    for name, each in found.items():
        golden["catalogue" if name in catalogue.names() else "types"][name] = each
    text = json.dumps(golden, sort_keys=True, separators=(",", ":"))
    GOLDEN.write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="model types, or models of the catalogue")
    parser.add_argument("--check", action="store_true", help="exit with 1 if an answer is wrong")
    parser.add_argument("--record", action="store_true", help="write the file for the tests")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    counts: dict[str, int] = {}
    kept: dict[str, dict[str, Any]] = {}
    unknown: list[str] = []
    print(f"transformers {transformers.__version__}")
    print("| model | class | verdict | groups or reason |\n|---|---|---|---|")
    try:
        for name in options.name or names():
            kind, verdict, why, found = row(name)
            counts[verdict] = counts.get(verdict, 0) + 1
            print(f"| {name} | {kind} | {verdict} | {why} |", flush=True)
            if found is not None:
                kept[name] = found
            if verdict == "refused" and "expected one of the" in why:
                unknown.append(kind)
    finally:
        if options.record:
            save(kept)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    print(f"kvspec does not know: {', '.join(unknown) or 'none'}")
    return int(options.check and "WRONG" in counts)


if __name__ == "__main__":
    sys.exit(main())
