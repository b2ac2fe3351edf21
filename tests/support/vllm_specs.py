"""Compare KV cache groups with the specs that vLLM makes for the same config.

`bench/vllm_specs.py` makes the models of vLLM, and records a fact for each layer. It is a dict with
these keys:

    class           the name of vLLM's class
    block, page     the tokens of a block, and its bytes on one rank, without padding
    heads, k        the KV heads, and the elements of a key
    tokens          the tokens of a row
    window          the tokens of a window or of a chunk
    dtype           the type of the elements
    dtypes          the types of a state's tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvspec import MambaSpec, SpecError, models

# Classes whose blocks do not follow from the option of vLLM.
_OWN_BLOCKS = ("MambaSpec", "SlidingWindowMLASpec", "CircularBufferSpec")
_DTYPES = {"deepseek_v4": {"dtype": "uint8"}, "deepseek_v41": {"dtype": "float8_e4m3fn"}}
# Bytes of a packed latent in the record, and of the 512 elements of a plain one.
_PACKED, _PLAIN = 584, 512

# The types of vLLM's packed rows and its keys of an indexer. In both, only the bytes count.
_BYTES = "uint8"


def answer(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of each layer that kvspec gives for a recorded config."""
    layers = recorded["layers"].values()
    blocks = [each["block"] for each in layers if each["class"] not in _OWN_BLOCKS]
    options: dict[str, Any] = {"block_size": max(blocks, default=16)}
    # The rows of DeepSeek-V4.1 depend on the GPU, so kvspec has only its plain rows.
    options |= _DTYPES.get(recorded["config"]["model_type"], {})
    groups = models.from_config(recorded["config"], **options)
    return {name: group.spec.of_layer(name) for group in groups for name in group.layers}


def differences(recorded: Mapping[str, Any]) -> list[str]:
    """Return what differs between the answer of kvspec and the specs of vLLM."""
    own, theirs = answer(recorded), recorded["layers"]
    if set(own) != set(theirs):
        return [f"layers {sorted(set(own) ^ set(theirs))[:4]} are only in one answer"]
    return [
        f"{layer}: {text}" for layer, spec in own.items() for text in _of_layer(spec, theirs[layer])
    ]


def _of_layer(spec: Any, facts: Mapping[str, Any]) -> list[str]:
    answer = {"class": type(spec).__name__, "page": spec.page_size_bytes(0, 1)}
    if isinstance(spec, MambaSpec):
        answer["dtypes"] = list(dict.fromkeys(part.dtype for part in spec.parts))
        facts = {**facts, "dtypes": list(dict.fromkeys(facts["dtypes"]))}
    else:
        window = getattr(spec, "sliding_window", getattr(spec, "attention_chunk_size", None))
        tokens = getattr(spec, "tokens_per_state", 1)
        answer |= {"tokens": tokens, "window": window, "block": spec.block_size}
        answer["heads"] = max(getattr(part, "units", 1) for part in spec.parts)
        if facts["k"] == _PLAIN and getattr(spec, "dtype", None) == "float8_e4m3fn":
            facts = {**facts, "page": facts["page"] // _PACKED * _PLAIN}
        if facts["dtype"] != _BYTES:
            answer |= {"k": spec.head_size, "dtype": spec.dtype}
    return [
        f"{name} {value}, not {facts[name]}"
        for name, value in answer.items()
        if value != facts[name]
    ]


def verdict(recorded: Mapping[str, Any]) -> tuple[str, str]:
    """Return ``right``, ``refused`` or ``WRONG``, and why."""
    try:
        wrong = differences(recorded)
    except SpecError as error:
        return "refused", str(error).partition("known architectures")[0]
    return ("WRONG", "; ".join(wrong)) if wrong else ("right", "")
