"""What the layers that a vLLM worker has made say of their pages.

Law: a layer is asked, and its platform, and nobody else; of a layer that does not say it nothing is
said.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.config import Config

_E4M3 = 8, 9
"""The first of CUDA's devices on which TurboQuant keeps keys of 8 bits as e4m3."""


def constructed_layers(fields: FieldReader, configs: Sequence[Config]) -> dict[str, FieldReader]:
    """Return the layers that a worker has made, by name."""
    layers = fields.get("compilation_config").get("static_forward_context").value
    names = [layer for config in configs for layer in config.layers]
    known = layers if isinstance(layers, Mapping) else {}
    return {
        name: FieldReader(f"static_forward_context[{name!r}]", known[name])
        for name in names
        if name in known
    }


def backends_of(fields: FieldReader, configs: Sequence[Config]) -> dict[str, Any]:
    """Return the attention backend of every layer that a worker has made."""
    layers = constructed_layers(fields, configs)
    return {name: layer.call("get_attn_backend").value for name, layer in layers.items()}


def variants_of(fields: FieldReader, configs: Sequence[Config]) -> dict[str, Any]:
    """Return what the names of backends leave open, of every layer that says it."""
    found: dict[str, Any] = {}
    device = fields.get("device_config").get("device_type").value
    for name, layer in constructed_layers(fields, configs).items():
        shuffled = layer.get("uses_shuffled_layout").value
        separate_scales = layer.get("impl").get("_soa_store").value
        if isinstance(shuffled, bool):
            found[name] = "shuffled" if shuffled else "rows"
        elif layer.get("mamba_type").value is not None:
            found[name] = device
        elif isinstance(separate_scales, bool):
            found[name] = "scales apart" if separate_scales else _turboquant(layer)
        else:
            found[name] = layer.get("isa").value
    return found


def _platform() -> FieldReader:
    """Return vLLM's platform, None where none of it is loaded."""
    return FieldReader("vllm.platforms", sys.modules.get("vllm.platforms")).get("current_platform")


def _turboquant(layer: FieldReader) -> str | None:
    """Return how rows of TurboQuant are kept: keys of 8 bits by the device, e4b15 on older ones."""
    platform = _platform()
    if layer.get("kv_cache_dtype").value != "turboquant_k8v4":
        return "rows"
    if platform.value is None:
        return None
    if not platform.call("is_cuda_alike").value:
        return "rows"
    device = platform.call("get_device_capability")
    found = tuple(device.get(name).size(least=0) for name in ("major", "minor"))
    return "rows" if found >= _E4M3 else "e4b15"


def fp8_dtypes_of(fields: FieldReader, configs: Sequence[Config]) -> dict[str, str]:
    """Return the elements of every layer whose cache is fp8: its own choice, or its platform's.

    Where no platform of vLLM's is loaded, and of a choice that the platform has otherwise, nothing
    is said.
    """
    platform = _platform()
    if platform.value is None:
        return {}
    usual = platform.call("fp8_dtype").dtype()
    known = {"fp8": usual, "fp8_e4m3": usual, "fp8_ds_mla": usual, "fp8_per_token_head": usual}
    if usual == "float8_e4m3fn":
        known["fp8_e5m2"] = "float8_e5m2"
    chosen = {
        name: layer.get("kv_cache_dtype").value
        for name, layer in constructed_layers(fields, configs).items()
    }
    return {name: known[cache] for name, cache in chosen.items() if str(cache) in known}
