"""Read properties of pages from the layer objects that a vLLM worker has constructed.

Some properties are in neither the spec nor the name of the attention backend: the instruction set
of CPU attention, a shuffled page, or the type behind ``fp8``. Only the layer and its platform know
them.

Invariant: only the layer, its platform and its device are read. If they do not determine a
property, the result lacks the layer or has None for it. Then `engine_spec` requires the property
from the caller.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.config import Config

# The first compute capability on which TurboQuant keeps keys of 8 bits as e4m3. Older devices keep
# e4b15, under the same name and spec.
_E4M3 = 8, 9


def constructed_layers(fields: FieldReader, configs: Sequence[Config]) -> dict[str, FieldReader]:
    """Return the layer objects of the worker, by name. vLLM's scheduler has none."""
    layers = fields.get("compilation_config").get("static_forward_context").value
    names = [layer for config in configs for layer in config.layers]
    known = layers if isinstance(layers, Mapping) else {}
    return {
        name: FieldReader(f"static_forward_context[{name!r}]", known[name])
        for name in names
        if name in known
    }


def backends_of(fields: FieldReader, configs: Sequence[Config]) -> dict[str, Any]:
    """Return the attention backend of each layer that the worker has constructed."""
    layers = constructed_layers(fields, configs)
    return {name: layer.call("get_attn_backend").value for name, layer in layers.items()}


def variants_of(fields: FieldReader, configs: Sequence[Config]) -> dict[str, Any]:
    """Return the variant of each layer that the worker has constructed (see `engine_spec`).

    It is None for a layer without a variant.
    """
    variants: dict[str, Any] = {}
    device = fields.get("device_config").get("device_type").value
    groups = [group for config in configs for group in config.groups]
    specs = {name: group.spec_of(name) for group in groups for name in group.layers}
    for name, layer in constructed_layers(fields, configs).items():
        shuffled = layer.get("uses_shuffled_layout").value
        # TurboQuant on gfx950 keeps the scales after all rows, under the same backend and spec.
        separate_scales = layer.get("impl").get("_soa_store").value
        if type(specs[name].value).__name__ == "CircularBufferSpec":
            # GLM-5.3's ring has the one, Qwen4's the other. DeepSeek-V4.1's has neither.
            ratios = (layer.get(field).value for field in ("_index_kpool", "compress_ratio"))
            variants[name] = next((ratio for ratio in ratios if ratio is not None), None)
        elif isinstance(shuffled, bool):
            variants[name] = "shuffled" if shuffled else _index_pages(layer)
        elif layer.get("mamba_type").value is not None:
            variants[name] = device
        elif isinstance(separate_scales, bool):
            variants[name] = "scales apart" if separate_scales else _turboquant(layer)
        else:
            variants[name] = layer.get("isa").value
    return variants


def _index_pages(layer: FieldReader) -> str | None:
    """Return the variant of an indexer whose pages are not shuffled, or None if it is unknown."""
    platform = _platform()
    # On AMD GPUs, other classes shuffle the pages than those that say so, such as GLM-5.3's.
    if platform.get("is_rocm").value is not None and platform.call("is_rocm").value:
        return "rows" if "uses_shuffled_layout" in vars(type(layer.value)) else None
    # vLLM 0.32 has no such function, and only scales of float32.
    deep_gemm = FieldReader("vllm.utils.deep_gemm", sys.modules.get("vllm.utils.deep_gemm"))
    if deep_gemm.get("mqa_logits_use_mx_scales").value is None:
        return "rows"
    return "mx" if deep_gemm.call("mqa_logits_use_mx_scales").value else "rows"


def _platform() -> FieldReader:
    """Return vLLM's platform. Its value is None if vLLM is not loaded."""
    return FieldReader("vllm.platforms", sys.modules.get("vllm.platforms")).get("current_platform")


def _turboquant(layer: FieldReader) -> str | None:
    """Return the variant of TurboQuant without separate scales, or None if it is unknown."""
    platform = _platform()
    # Only this cache type has keys of 8 bits, whose element type depends on the device.
    if layer.get("kv_cache_dtype").value != "turboquant_k8v4":
        return "rows"
    if platform.value is None:
        return None
    if not platform.call("is_cuda_alike").value:
        return "rows"
    device = platform.call("get_device_capability")
    capability = tuple(device.get(name).size(least=0) for name in ("major", "minor"))
    return "rows" if capability >= _E4M3 else "e4b15"


def fp8_dtypes_of(fields: FieldReader, configs: Sequence[Config]) -> dict[str, str]:
    """Return the fp8 type of each layer with an fp8 cache.

    The result is empty if vLLM's platform is not loaded. It lacks each layer whose fp8 type is not
    known on the platform, such as ``fp8_e5m2`` on older AMD GPUs.
    """
    platform = _platform()
    if platform.value is None:
        return {}
    usual = platform.call("fp8_dtype").dtype()
    known = {"fp8": usual, "fp8_e4m3": usual, "fp8_ds_mla": usual, "fp8_per_token_head": usual}
    # A platform with e4m3fnuz (older AMD GPUs) has another e5m2, too.
    if usual == "float8_e4m3fn":
        known["fp8_e5m2"] = "float8_e5m2"
    chosen = {
        name: layer.get("kv_cache_dtype").value
        for name, layer in constructed_layers(fields, configs).items()
    }
    found = {name: known[cache] for name, cache in chosen.items() if str(cache) in known}
    # Index keys are of fp8 whatever the type of the cache is.
    indexers = {
        name: usual
        for name, layer in constructed_layers(fields, configs).items()
        if isinstance(layer.get("uses_shuffled_layout").value, bool)
    }
    return indexers | found
