"""Read the meaning of stored keys from the modules of a model that a vLLM worker has constructed.

A spec and an attention layer do not show whether and how keys are rotated. The module around the
attention layer does: it owns the rotary embedding and the norm of the keys.

Invariant: only modules are read. The result lacks a layer whose modules do not determine the
meaning. Then `whole_engine` requires it from the caller.

How it works:
    vLLM gives a connector the attention layers, but not the model. So `_parents` looks among the
    objects that refer to these layers for the modules that contain them:

        Qwen3Attention                   rotary_emb: is_neox_style=True, rotary_dim=128
          attn (the attention layer)     k_norm: a module

    This is the meaning: halves of 128 elements, normalised. In vLLM, every model rotates and
    normalises keys before it passes them to the attention layer, which stores them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvspec.adapters.attention_modules import key_content_of
from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.config import Config
from kvspec.adapters.vllm.heads import WITHOUT_HEADS
from kvspec.adapters.vllm.layer_info import constructed_layers
from kvspec.errors import SpecError
from kvspec.specs import KeyContent


def key_contents_of(fields: FieldReader, configs: Sequence[Config]) -> dict[str, KeyContent]:
    """Return the meaning of the keys of each layer that the worker has constructed.

    The result lacks layers whose modules do not determine it, such as indexers. It also lacks
    layers without keys: those with a recurrent state, and rings.
    """
    layers = constructed_layers(fields, configs)
    groups = [group for config in configs for group in config.groups]
    specs = {name: group.spec_of(name) for group in groups for name in group.layers}
    # The spec of a recurrent state has no `head_size`. The rows of a ring are of one model.
    keyed = [name for name in layers if type(specs[name].value).__name__ not in WITHOUT_HEADS]
    parents = _parents({name: layers[name].value for name in keyed})
    found = {
        name: key_content_of(
            FieldReader(f"the module of {name}", parent),
            specs[name].get("head_size").size(),
            latent="MLA" in type(specs[name].value).__name__,
        )
        for name, parent in parents.items()
    }
    return {name: content for name, content in found.items() if content is not None}


def scales_of(fields: FieldReader, configs: Sequence[Config]) -> dict[str, tuple[float, float]]:
    """Return the scale of keys and of values of each layer whose quantised cache has one for all.

    NVFP4 has such scales beside those in its pages, and both change the stored elements.

    Raises:
        SpecError: If a scale is not one number, or vLLM computes the scales only from the first
            batch.
    """
    scales: dict[str, tuple[float, float]] = {}
    for name, layer in constructed_layers(fields, configs).items():
        dtype = str(layer.get("kv_cache_dtype").value)
        # Rows of DeepSeek's types contain all their scales.
        if not dtype.startswith(("fp8", "nvfp4")) or dtype.endswith("_ds_mla"):
            continue
        if layer.get("calculate_kv_scales").value:
            field = layer.get("calculate_kv_scales")
            rule = "scales must be known before the caches are described"
            raise SpecError(field.path, True, rule=rule)  # noqa: FBT003
        scales[name] = _scale(layer.get("_k_scale")), _scale(layer.get("_v_scale"))
    return scales


def _scale(field: FieldReader) -> float:
    values = field.value.tolist() if hasattr(field.value, "tolist") else field.value
    while isinstance(values, list) and len(values) == 1:
        values = values[0]
    if not isinstance(values, (int, float)):
        raise SpecError(field.path, values, "one number for all heads")
    return float(values)


def _parents(layers: Mapping[str, object]) -> dict[str, Any]:
    """Return the module that contains each layer, by the name of the layer.

    It lacks layers without such a module, or with several.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not layers:
        return {}
    names = {id(layer): name for name, layer in layers.items()}
    modules, known = dict[int, Any](), [*layers.values()]
    # A layer is in the dict `_modules` of its parent, which is in the `__dict__` of the parent.
    # Python may leave that one out. `gc.get_objects` would be faster, but it also returns tuples
    # that other threads are filling: their threads then fail.
    for _ in range(3):
        known = gc.get_referrers(*known)
        # `type` and not `isinstance`: the latter runs code of any lazy object in the process.
        modules |= {id(each): each for each in known if issubclass(type(each), torch.nn.Module)}
        known = [each for each in known if issubclass(type(each), dict)]
    parents: dict[str, list[Any]] = {}
    for candidate in modules.values():
        # A module that nobody initialised has no children.
        for child in vars(candidate).get("_modules", {}).values():
            if id(child) in names:
                parents.setdefault(names[id(child)], []).append(candidate)
    return {name: found[0] for name, found in parents.items() if len(found) == 1}
