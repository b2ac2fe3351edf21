"""Record the KV cache specs that vLLM makes for tiny models, for the tests of `kvspec.models`.

```sh
python bench/vllm_specs.py               # print how many layers each model has, or why it fails
python bench/vllm_specs.py kimi_k3       # only some models
python bench/vllm_specs.py --record      # write tests/goldens/vllm_specs.json.gz
```

Run it with an environment that has vLLM; a GPU is not needed. The configs are those that
`bench/architectures.py` recorded, and `CONFIGS` for classes that transformers does not have. vLLM
makes each model without memory, and each of its layers returns a spec.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import importlib
import importlib.abc
import importlib.machinery
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
from transformers import AutoConfig, PretrainedConfig
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.workspace import init_workspace_manager

GOLDENS = Path(__file__).resolve().parents[1] / "tests" / "goldens"
GOLDEN = GOLDENS / "vllm_specs.json.gz"
CLASSES = GOLDENS / "transformers_caches.json.gz"

_BASE: dict[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
_EXPERTS = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_LATENTS = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_BAILING = {
    **_BASE,
    **_EXPERTS,
    **_LATENTS,
    "layer_group_size": 4,
    "first_k_dense_replace": 8,
    "use_qkv_bias": False,
    "use_bias": False,
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
}
_V4 = {
    **_BASE,
    **_EXPERTS,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 64,
    "n_shared_experts": 1,
    "num_hash_layers": 1,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
    "hc_eps": 1e-6,
    "compress_rope_theta": 160000,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
_GLM5_NEXT = {
    **_BASE,
    **_EXPERTS,
    **_LATENTS,
    "num_key_value_heads": 4,
    "head_dim": 0,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 0,
    "index_topk": 64,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_kpool": 16,
    "n_shared_experts": 1,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "hc_mult": 4,
    "index_kpool_always_select_tail": True,
    "mhc": True,
    "mla_use_nope": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "indexer_rope_interleave": True,
}
_QWEN4_EXP = {
    **_BASE,
    **_EXPERTS,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 16,
    "hc_count": 4,
    "hc_lowrank": 16,
    "output_gate_type": "silu",
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_KIMI = {
    "model_type": "kimi_linear",
    **_BASE,
    **_EXPERTS,
    **_LATENTS,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 8],
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
}

CONFIGS: dict[str, dict[str, Any]] = {
    "bailing_moe_linear": {
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "model_type": "bailing_moe_linear",
        **_BAILING,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "moe_router_enable_expert_bias": True,
        "group_norm_size": 4,
    },
    "bailing_hybrid": {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        **_BAILING,
        "q_lora_rank": 32,
        "short_conv_kernel_size": 4,
        "no_kda_lora": True,
    },
    "kimi_linear": {"architectures": ["KimiLinearForCausalLM"], **_KIMI},
    "deepseek_v4": {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", **_V4},
    "kimi_k3": {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": _KIMI,
    },
    "deepseek_v41": {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": {
            **_V4,
            "model_type": "deepseek_v41_text",
            "num_hidden_layers": 8,
            "compress_ratios": [0, 0, 1, 2, 2, 1, 2, 0, 0],
            "kv_source_layer_ids": [2, 3, 6],
            "index_source_layer_ids": [2, 3, 4, 6],
        },
    },
    "glm5_next": {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next_text",
        **_GLM5_NEXT,
    },
    "qwen4_exp": {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        **_QWEN4_EXP,
    },
    "mimo_v2_flash": {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        **_BASE,
        **_EXPERTS,
        "head_dim": 48,
        "v_head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 64,
        "swa_v_head_dim": 32,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "hybrid_layer_pattern": [0, 1, 1, 1, 0, 1, 1, 0],
        "moe_layer_freq": [0] * 8,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334,
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "nemotron_h, published": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        **_BASE,
        "hybrid_override_pattern": "M-*-MM*-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "chunk_size": 16,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
    },
    "zamba2": {
        "architectures": ["Zamba2ForCausalLM"],
        "model_type": "zamba2",
        **_BASE,
        "num_key_value_heads": 4,
        "attention_head_dim": 64,
        "hidden_act": "gelu",
        "layers_block_type": [*["mamba"] * 3, "hybrid"] * 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 32,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_mem_blocks": 2,
        "adapter_rank": 8,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 128,
        "decoder_layers": 3,
        "encoder_layers": 2,
        "num_hidden_layers": 2,
        "decoder_attention_heads": 4,
        "encoder_attention_heads": 2,
        "decoder_ffn_dim": 64,
        "encoder_ffn_dim": 64,
        "vocab_size": 64,
        "num_mel_bins": 80,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "is_encoder_decoder": True,
        "torch_dtype": "bfloat16",
    },
}
"""Configs, as published files have them, of classes that transformers lacks or has otherwise."""

MORE: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 32},
    "hy_v3": {"first_k_dense_replace": 8},
    "lfm2": {
        "block_dim": 128,
        "conv_dim": 128,
        "block_ff_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid"},
    "minimax_m3_vl_text": {"architectures": ["MiniMaxM3SparseForCausalLM"]},
    "minimax_m3_vl_text, nested": {"architectures": ["MiniMaxM3SparseForCausalLM"]},
}
"""Fields of published files that transformers leaves out, by the recorded name."""


_SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"


class _Nothing:
    """A stand-in for an event or a stream of CUDA, which some classes make for every device."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take and ignore all arguments."""


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for each package that only models on GPUs or with images need."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a module of cutlass or of torchvision."""
        if name.partition(".")[0] not in ("cutlass", "cuda", "torchvision"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:  # noqa: ANN401
        """Return a module that has every name."""
        module = MagicMock()
        module.__spec__, module.__path__ = spec, []
        return module

    def exec_module(self, module: Any) -> None:  # noqa: ANN401
        """Do nothing."""


def start() -> None:
    """Make vLLM import and make its models on a machine without a GPU."""
    torch.cuda.Event = torch.cuda.Stream = _Nothing  # type: ignore[misc, assignment]
    torch.accelerator.empty_cache = lambda: None  # type: ignore[attr-defined]
    sys.meta_path.append(_Kernels())
    importlib.import_module("vllm.models.qwen4_exp.nvidia.model")
    qsa = sys.modules["vllm.models.qwen4_exp.nvidia.qsa"]
    qsa.is_flash_attn_varlen_func_available = lambda: True  # type: ignore[attr-defined]
    # The rows of DeepSeek-V4.1 depend on the GPU.
    platform, capability = type(current_platform), DeviceCapability(9, 0)
    platform.get_device_capability = classmethod(lambda *_, **__: capability)
    chosen = platform.get_attn_backend_cls

    def backend(*positional: Any, **options: Any) -> str:  # noqa: ANN401
        # No backend of a CPU reads chosen tokens. The specs of its layers need only a name.
        sparse = options["attn_selector_config"].use_sparse
        return _SPARSE if sparse else chosen(*positional, **options)

    platform.get_attn_backend_cls = staticmethod(backend)
    # vLLM inspects a model in a process of its own, which does not have these changes.
    registry._LazyRegisteredModel.inspect_model_cls = lambda each: (  # noqa: SLF001
        registry._ModelInfo.from_model_cls(each.load_model_cls())  # noqa: SLF001
    )
    for name in {config["model_type"] for config in CONFIGS.values()}:
        own = type(name, (PretrainedConfig,), {"model_type": name})
        try:
            AutoConfig.register(name, own)
        except ValueError:
            continue  # Transformers knows the type.


@functools.cache
def _one_rank() -> None:
    """Make the groups of one rank. It needs the config of a first model."""
    init_distributed_environment(1, 0, "file://" + tempfile.mktemp(), 0, "gloo")  # noqa: S306
    initialize_model_parallel(1, 1)
    init_workspace_manager(torch.device("cpu"))


def specs_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of each layer of vLLM's model for *config*."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        options = {"max_model_len": 256, "dtype": "bfloat16", "enforce_eager": True}
        engine = EngineArgs(model=folder, skip_tokenizer_init=True, load_format="dummy", **options)
        try:
            made = engine.create_engine_config()
        except ValueError:  # Some classes cannot cache prefixes on this device.
            engine.enable_prefix_caching = False
            made = engine.create_engine_config()
        with set_current_vllm_config(made):
            _one_rank()
            torch.set_default_dtype(torch.bfloat16)
            model, _ = get_model_architecture(made.model_config)
            if ".models.transformers." in model.__module__:
                raise LookupError("vLLM runs the class of transformers, which judges nothing new")
            with torch.device("meta"):
                model(vllm_config=made, prefix="")
            return get_kv_cache_spec(made)


def facts(spec: Any) -> dict[str, Any]:  # noqa: ANN401 - a spec of vLLM
    """Return what the tests compare about a spec."""
    found = {"class": type(spec).__name__, "block": spec.block_size}
    if found["class"] == "MambaSpec":
        size = sum(math.prod(s) * d.itemsize for s, d in zip(spec.shapes, spec.dtypes, strict=True))
        types = [str(each).removeprefix("torch.") for each in spec.dtypes]
        return {**found, "page": size, "dtypes": types, "type": spec.mamba_type.name}
    row = spec.state_content_bytes
    if row is None:
        row = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    heads, tokens = spec.num_kv_heads, spec.tokens_per_state
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return {
        **found,
        "page": heads * spec.block_size // tokens * row,
        "heads": heads,
        "k": spec.head_size,
        "tokens": tokens,
        "window": window,
        "dtype": str(spec.dtype).removeprefix("torch."),
    }


def save(found: Mapping[str, Any]) -> None:
    """Replace these records in the file that the tests read."""
    golden: dict[str, Any] = {"models": {}}
    if GOLDEN.exists():
        golden = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    golden["vllm"] = vllm.__version__
    golden["models"] |= found
    text = json.dumps(golden, sort_keys=True, separators=(",", ":"))
    GOLDEN.write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> int:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="names of models")
    parser.add_argument("--record", action="store_true", help="write the file for the tests")
    options = parser.parse_args()
    types = json.loads(gzip.decompress(CLASSES.read_bytes()))["types"]
    # A multimodal class also needs a processor. Its language model is in the list as well.
    configs = {
        name: {**each["config"], "architectures": [each["class"]]}
        for name, each in types.items()
        if "text_config" not in each["config"]
    }
    for name, fields in MORE.items():
        configs[name] |= fields
    configs |= CONFIGS
    kept: dict[str, Any] = {}
    start()
    for name in options.name or configs:
        config = {"torch_dtype": "bfloat16", **configs[name]}
        config.pop("dtype", None)
        try:
            layers = {layer: facts(spec) for layer, spec in specs_of(config).items()}
        except BaseException as error:  # noqa: BLE001 - vLLM may fail in any way
            why = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"{name}: {why[:160]}", flush=True)
            continue
        print(f"{name}: {len(layers)} layers", flush=True)
        if layers:
            kept[name] = {"config": config, "layers": layers}
        if options.record:
            save(kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
