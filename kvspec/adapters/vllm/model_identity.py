"""State the weights and the settings of a vLLM engine on which the values of its cache depend.

Invariant: two engines that compute other values, besides rounding, have other identities. A setting
whose value has no text, or that names no content, leaves its field unstated.

How it works:
    `tests/support/vllm_fields.py` lists each field of vLLM's configuration, and where it is stated:

        here           it changes values: the quantization, the overrides of the model's config
        the placement  it changes bytes of a page: types of the cache, windows, rotation of keys
        the request    it changes the prompt: media, adapters, tokens
        nowhere        it changes neither, or only how results are rounded: kernels, parallel sizes

    A checkpoint that is quantised already states no quantization here. vLLM then chooses a method
    for the device, such as "gptq_marlin" in place of "gptq", and uses the same weights.
"""

# ruff: noqa: ANN401 - configs are of vLLM's classes, which are not imported
from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvspec.adapters.vllm.drafts import draft_of
from kvspec.ownership.dtypes import dtype_name
from kvspec.stored.names import ModelIdentity

# The formats that vLLM loads from the files of the model itself.
OWN_FILES = (
    "", "auto", "hf", "pt", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache",
    "bitsandbytes", "gguf", "runai_streamer", "runai_streamer_sharded", "sharded_state",
)  # fmt: skip
# Settings of `ModelConfig` that change values.
_OF_MODEL = ("hf_overrides", "model_class_overrides", "code_revision", "quantization_config")
# Settings of `AttentionConfig` that do so, but for the kernels.
_OF_ATTENTION = (
    "use_non_causal", "use_prefill_query_quantization", "disable_flashinfer_q_quantization",
)  # fmt: skip


def model_identity(vllm_config: Any, weights: str) -> ModelIdentity:
    """Return what the values of a cache depend on. Fields that vLLM does not show are not stated.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        weights: Version of the weights. "" if they are those of the revision.
    """
    model = vllm_config.model_config
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    own_files = _has_own_files(getattr(vllm_config, "load_config", None))
    return ModelIdentity(
        model=extra.get("model", model.model),
        revision=extra.get("revision") or _revision(model),
        weights=weights or ("" if own_files else None),
        quantization=_quantization(model),
        overrides=_overrides(vllm_config),
    )


def _has_own_files(load: Any) -> bool:
    """Return whether weights are loaded from the files of the model, and not made at random."""
    return str(getattr(load, "load_format", "")).lower() in OWN_FILES


def _quantization(model: Any) -> str | None:
    """Return the method by which vLLM quantises weights that it loads, or "" if it does not."""
    method = getattr(model, "quantization", ...)
    if method is ...:
        return None
    stored = getattr(getattr(model, "hf_config", None), "quantization_config", None)
    return "" if stored else method or ""


def _revision(model: Any) -> str | None:
    """Return the commit of a model from a hub, or the revision that the user has named."""
    commit = None if _config_path(model) else _commit(model)
    revision = commit or getattr(model, "revision", None)
    return revision if isinstance(revision, str) else None


def _commit(model: Any) -> str | None:
    """Return the commit of the repository that contains the configuration of a model."""
    return getattr(getattr(model, "hf_config", None), "_commit_hash", None)


def _config_path(model: Any) -> str | None:
    """Return where the configuration of a model is, if it is not with its weights."""
    path = getattr(model, "hf_config_path", None)
    return None if path == model.model else path


def _overrides(vllm_config: Any) -> str | None:
    """Return the settings on which values depend, besides the files of the model, or None."""
    model = vllm_config.model_config
    facts = _set(model, _OF_MODEL)
    facts |= _media_settings(getattr(model, "multimodal_config", None))
    attention = getattr(vllm_config, "attention_config", None)
    facts |= {f"attention.{name}": value for name, value in _set(attention, _OF_ATTENTION).items()}
    if (computed := _computed_as(vllm_config)) is not None:
        facts["dtype"] = computed
    if path := _config_path(model):
        facts["config"] = [path, _commit(model)]
    if draft_of(vllm_config) is not None:
        facts |= _draft(vllm_config.speculative_config, draft_of(vllm_config))
    if None in (*facts.values(), *facts.get("config", ()), *facts.get("draft", ())):
        return None
    try:
        return json.dumps(_plain(facts), sort_keys=True) if facts else ""
    except (TypeError, ValueError):  # For example, a function that changes the config.
        return None


def _set(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of *config* that are set."""
    return {name: value for name in names if (value := getattr(config, name, None))}


def _computed_as(vllm_config: Any) -> str | None:
    """Return the type of the computation, or None if the placement contains it.

    The type of a cache is that of the computation, unless another one is configured.
    """
    cache = vllm_config.cache_config
    name = "mamba_cache_dtype" if getattr(cache, "is_attention_free", False) else "cache_dtype"
    stored = getattr(cache, name, "auto")
    if stored == "auto":
        return None
    computed = dtype_name(vllm_config.model_config.dtype, "model_config.dtype")
    return None if stored == computed else computed


def _draft(speculative: Any, draft: Any) -> dict[str, Any]:
    """Return what the keys of a draft depend on. None is not known."""
    config = speculative.draft_model_config
    facts: dict[str, Any] = {"draft": [draft.method, draft.model, _revision(config)]}
    if _quantization(config):
        facts["draft"].append(config.quantization)
    facts |= {f"draft.{name}": value for name, value in _set(config, _OF_MODEL[2:]).items()}
    load = getattr(speculative, "draft_load_config", None)
    if load is not None and not _has_own_files(load):
        facts["draft.weights"] = None
    return facts


def _media_settings(media: Any) -> dict[str, Any]:
    """Return the settings of an engine on which the embeddings of its media depend.

    The identifier that vLLM makes of an image contains the settings of the request, not these.
    """
    names = ["mm_encoder_attn_dtype", "video_pruning_rate"]
    if getattr(media, "video_pruning_rate", None):
        names.append("video_pruning_method")
    facts = _set(media, tuple(names))
    if path := getattr(media, "mm_encoder_fp8_scale_path", None):
        facts["mm_encoder_fp8_scales"] = _digest_of(path)
    processor = dict(getattr(media, "mm_processor_kwargs", None) or {})
    processor.pop("device", None)  # Where it runs.
    return facts | ({"mm_processor_kwargs": processor} if processor else {})


def _digest_of(path: str) -> str | None:
    """Return a digest of a file, or None if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return None


def _plain(value: Any) -> Any:
    """Return *value* as JSON can represent it. Raise `TypeError` if it has no text.

    vLLM keeps some settings in data classes, with types of torch and classes of its own in them.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(own) for name, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(own) for own in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    # A type of torch has no fields, and one text.
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    raise TypeError(type(value).__name__)
