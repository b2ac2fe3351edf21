"""Tests that `models.from_config` answers as the code of the vLLM that is installed does.

These are the facts that no cache of transformers shows: types, states on ranks, and what a
checkpoint declares. The nightly run of vLLM has them.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import LLAMA
from refused import refusal

from kvspec import MambaSpec, models
from kvspec.ownership.dtypes import dtype_name

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")

GOLDEN = Path(__file__).parents[1] / "goldens" / "transformers_caches.json.gz"
TYPES: dict[str, dict[str, Any]] = json.loads(gzip.decompress(GOLDEN.read_bytes()))["types"]

# The model types with recurrent layers that vLLM serves, and the modules and classes that do it.
STATES = {
    "falcon_mamba": "model_executor.models.mamba.MambaForCausalLM",
    "falcon_h1": "model_executor.models.falcon_h1.FalconH1ForCausalLM",
    "granitemoehybrid": "model_executor.models.granitemoehybrid.GraniteMoeHybridForCausalLM",
    "jamba": "model_executor.models.jamba.JambaForCausalLM",
    "kimi_linear, lists": "models.kimi_k3.nvidia.model.KimiLinearForCausalLM",
    "lfm2_moe": "model_executor.models.lfm2_moe.Lfm2MoeForCausalLM",
    "mamba": "model_executor.models.mamba.MambaForCausalLM",
    "mamba2": "model_executor.models.mamba2.Mamba2ForCausalLM",
    "nemotron_h": "model_executor.models.nemotron_h.NemotronHForCausalLM",
    "olmo_hybrid": "model_executor.models.olmo_hybrid.OlmoHybridForCausalLM",
    "qwen3_5_text": "model_executor.models.qwen3_5.Qwen3_5ForCausalLM",
    "qwen3_next": "model_executor.models.qwen3_next.Qwen3NextForCausalLM",
    "zamba2": "model_executor.models.zamba2.Zamba2ForCausalLM",
}


def class_of(place: str) -> Any:
    """Return vLLM's class at *place*."""
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(f"vllm.{module}"), name)


def engine(config: dict[str, Any], tp_size: int, drafts: int) -> Any:
    """Return the part of vLLM's config that the classes of models read."""
    read = SimpleNamespace(**config)
    auto = {"mamba_cache_dtype": "auto", "mamba_ssm_cache_dtype": "auto"}
    flags = {"use_replayssm": False, "use_kda_recoverssm": False}
    model = SimpleNamespace(hf_config=read, hf_text_config=read, dtype=torch.bfloat16)
    found = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        model_config=model,
        cache_config=SimpleNamespace(**auto, **flags),
        num_speculative_tokens=drafts,
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
    )
    # vLLM changes the config so before it asks the class.
    changes = importlib.import_module("vllm.model_executor.models.config").MODELS_CONFIG_MAP
    name = config["architectures"][0]
    if name == "NemotronHForCausalLM":
        changes[name].verify_and_update_config(found)
    return found


@pytest.mark.parametrize(("tp_size", "drafts"), [(1, 0), (2, 0), (1, 3)])
@pytest.mark.parametrize("model_type", STATES)
def test_states_have_the_shapes_and_types_of_vllm(
    model_type: str, tp_size: int, drafts: int
) -> None:
    """A conv state may have its channels or its rows first."""
    recorded = TYPES[model_type]
    config = {**recorded["config"], "architectures": [recorded["class"]]}
    if "lfm2" in model_type:
        drafts = 0  # vLLM 0.32 has no rows for them, and vLLM 0.33 has.
    model, own = class_of(STATES[model_type]), engine(config, tp_size, drafts)
    shapes = model.get_mamba_state_shape_from_config(own)
    types = model.get_mamba_state_dtype_from_config(own)
    config.pop("dtype", None)
    *_, group = (
        group
        for group in models.from_config(config, dtype="bfloat16", num_speculative_tokens=drafts)
        if isinstance(group.spec, MambaSpec)
    )
    parts = group.spec.parts
    conv = [part for part in parts if part.tensor == "conv"]
    sizes = [
        torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, types, strict=True)
    ]
    assert sum(sizes) == group.spec.page_size_bytes(0, tp_size)
    assert {part.states for part in conv} <= set(shapes[0])
    assert [dtype_name(kind) for kind in types] == [
        conv[0].dtype,
        *[part.dtype for part in parts if part.tensor == "ssm"],
    ]


SCHEMES: list[Any] = [
    *("FP8", "fp8", "NVFP4", "INT8", None),
    {"num_bits": 8, "type": "float", "dynamic": False},
    {"num_bits": 8, "type": "float", "dynamic": True},
    {"num_bits": 4, "type": "float"},
]
INNER = [
    {name: scheme} for name in ("kv_cache_quant_algo", "kv_cache_scheme") for scheme in SCHEMES
]
WHERE = [
    *({"quant_method": method, **inner} for method in ("modelopt", "ModelOpt_FP4", "fp8", "awq")
      for inner in INNER),
    *({"quant_method": "modelopt", "quantization": inner} for inner in INNER),
    *({"producer": {"name": "modelopt"}, "quantization": {**inner, **algorithm}}
      for inner in INNER for algorithm in ({}, {"quant_algo": "FP8"}, {"quant_algo": "NVFP4"})),
    *({"quantization": {"modelopt_quant_config": {}, "quant_algo": "FP8", **inner}}
      for inner in INNER),
    {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8",
     "quantization": {"kv_cache_quant_algo": "NVFP4"}},
]  # fmt: skip
READ_BY_SGLANG_ONLY = [
    {"quant_method": "fp8", "kv_cache_quant_algo": algorithm} for algorithm in ("FP8", "fp8")
]


@pytest.mark.parametrize("given", WHERE, ids=json.dumps)
def test_declared_cache_has_the_type_of_vllm(given: dict[str, Any]) -> None:
    """NVFP4 and what only SGLang reads are refused, because the pages depend on the engine."""
    convertor = class_of(
        "transformers_utils.model_arch_config_convertor.ModelArchConfigConvertorBase"
    )
    algorithm = class_of("utils.torch_utils.get_kv_cache_quant_algo_string")
    read = SimpleNamespace(quantization_config=json.loads(json.dumps(given)))
    convertor._normalize_quantization_config(None, read)
    expected = {None: "bfloat16", "auto": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}.get(
        algorithm(read.quantization_config)
    )
    config = {**LLAMA, "quantization_config": given}
    if expected is None:
        assert "quantization_config" == refusal(lambda: models.from_config(config)).field
        return
    if given in READ_BY_SGLANG_ONLY:
        assert "bfloat16" == expected
        field = refusal(lambda: models.from_config(config)).field
        assert "quantization_config.kv_cache_quant_algo" == field
        return
    (group,) = models.from_config(config)
    assert expected == group.spec.dtype
