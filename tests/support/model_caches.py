"""Compare KV cache groups with facts about the cache of a model of transformers.

`bench/architectures.py` makes the models and records the facts. A fact is a dict, one for each
layer of the cache. It may have these keys:

    heads, k, v     the KV heads, and the elements of a key and of a value
    window          the tokens of a sliding window, together with the query
    conv            for each conv state, its channels and columns
    recurrent       for each recurrent state, its shape
    latent          the elements of the latent that an MLA module computes for a token
    indexer         the elements of an indexer key
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvspec import CircularBufferSpec, MambaSpec, MLAAttentionSpec, SpecError, models
from kvspec.engines.group import KVCacheGroup

Facts = Mapping[str, Any]

# Transformers gives their windows one token less than engines do.
SHORTER = ("Cohere2", "AyaVision")


def cache_index(layer: str) -> int:
    """Return the index of *layer* in the cache of transformers.

    The decoder layers of LongCat have two attention layers each: ``layers.3.self_attn.1.attn`` has
    the index 7.
    """
    first, *second = [int(word) for word in layer.split(".") if word.isdigit()]
    return 2 * first + second[0] if second else first


def differences(groups: Iterable[KVCacheGroup], layers: Sequence[Facts]) -> list[str]:
    """Return what differs between the answer of kvspec and the facts of a cache."""
    roles: dict[str, dict[str, Any]] = {}
    for group in groups:
        for name in group.layers:
            spec: Any = group.spec.of_layer(name)
            roles.setdefault(_role(name, spec), {})[name] = spec
    own: dict[int, dict[str, list[Any]]] = {}
    roles.pop("compressed", None)
    roles.pop("ring", None)
    for role, specs in roles.items():
        for name, index in _indices(role, roles, layers).items():
            own.setdefault(index, {}).setdefault(role, []).append(specs[name])
    found = []
    for index, facts in enumerate(layers):
        found += [f"layer {index}: {text}" for text in _of_layer(own.pop(index, {}), facts)]
    if own:
        found.append(f"layers {sorted(own)} have no cache in transformers")
    return found


def answer(config: Mapping[str, Any]) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a config, with types and blocks that all kinds accept."""
    return models.from_config(config, block_size=128, dtype="float32", ssm_dtype="float32")


def verdict_of(recorded: Mapping[str, Any]) -> tuple[str, str]:
    """Return ``right``, ``refused`` or ``WRONG`` about a recorded model, and why."""
    given = {**recorded["config"], "architectures": [recorded["class"]]}
    try:
        groups = answer(given)
    except SpecError as error:
        return "refused", str(error).partition("known architectures")[0][:200]
    if recorded["class"].startswith(SHORTER):
        layers = [
            {**facts, "window": facts["window"] + 1} if "window" in facts else facts
            for facts in recorded["layers"]
        ]
        recorded = {**recorded, "layers": layers}
    wrong = [*differences(groups, recorded["layers"]), *_of_short_configs(given, recorded)]
    kinds = ", ".join(f"{group.name} {len(group.layers)}" for group in groups)
    return ("WRONG", "; ".join(wrong)[:400]) if wrong else ("right", kinds)


def _of_short_configs(given: Mapping[str, Any], recorded: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs if the config omits what its class derives, or one field."""
    short = {key: value for key, value in given.items() if key not in recorded.get("derived", ())}
    with suppress(SpecError):
        for text in differences(answer(short), recorded["layers"]):
            yield f"{text} in a short config"
    for field, completed in recorded["omitted"]:
        try:
            groups = answer({key: value for key, value in given.items() if key != field})
        except SpecError:
            continue
        if answer({**given, **completed}) != groups:
            yield f"another answer without {field}"


def _role(name: str, spec: Any) -> str:
    if isinstance(spec, MambaSpec):
        return "state"
    # Transformers keeps the tokens of a ring beside the indexer keys.
    if isinstance(spec, CircularBufferSpec):
        return "ring"
    # Transformers keeps the compressed latents of DeepSeek-V4 in another form.
    if isinstance(spec, MLAAttentionSpec) and re.search(r"layers\.\d+\.attn(?!\.swa_cache)", name):
        return "compressed"
    return "indexer" if "index" in name.rpartition("self_attn")[2] else "attention"


def _indices(role: str, roles: Mapping[str, Iterable[str]], layers: Sequence[Facts]) -> Any:
    """Return the index in the cache of each layer with this role.

    It is the number in the name. Some models of vLLM count the states after the attention layers,
    so that the first number is no index. Then the layers are in order.
    """
    every = [name for names in roles.values() for name in names]
    names = list(roles[role])
    if len({re.split(r"\d", name)[0] for name in every}) == 1:
        return {name: cache_index(name) for name in names}
    key = {"attention": "heads", "state": "recurrent"}[role]
    places = [index for index, facts in enumerate(layers) if key in facts]
    beyond = range(len(layers), len(layers) + len(names))
    return dict(zip(names, [*places, *beyond], strict=False))


def _of_layer(own: Mapping[str, list[Any]], facts: Facts) -> list[str]:
    wanted = {
        "attention": "heads" in facts,
        "state": "conv" in facts or "recurrent" in facts,
        "indexer": "indexer" in facts,
    }
    if any(len(own.get(role, [])) != number for role, number in wanted.items()):
        answer = {role: len(specs) for role, specs in own.items()}
        return [f"{answer} for {dict(facts)}"]
    found = []
    for role, judge in (("attention", _attention), ("state", _state), ("indexer", _indexer)):
        for spec in own.get(role, []):
            found += judge(spec, facts)
    return found


def _attention(spec: Any, facts: Facts) -> list[str]:
    answer = {"window": getattr(spec, "sliding_window", None)}
    expected = {"window": facts.get("window")}
    # The chunks of Llama 4 are a window for the cache of transformers.
    if hasattr(spec, "attention_chunk_size"):
        answer["window"] = spec.attention_chunk_size
    if isinstance(spec, MLAAttentionSpec):
        answer["latent"], expected["latent"] = spec.head_size, facts.get("latent", facts["k"])
    else:
        value = spec.head_size if spec.head_size_v is None else spec.head_size_v
        answer |= {"heads": spec.total_num_kv_heads, "k": spec.head_size, "v": value}
        expected |= {name: facts[name] for name in ("heads", "k", "v")}
    return [
        f"{name} {answer[name]}, not {expected[name]}"
        for name in answer
        if answer[name] != expected[name]
    ]


def _state(spec: MambaSpec, facts: Facts) -> list[str]:
    found = []
    parts = [part for part in spec.parts if part.tensor == "conv"]
    # Transformers keeps one column more than the engines: the input of the current token.
    rows = {part.states + 1 for part in parts}
    channels = sum(part.units for part in parts)
    shapes = facts.get("conv", [])
    if not parts and not shapes:
        pass
    elif (channels, rows) != (sum(shape[0] for shape in shapes), {shape[-1] for shape in shapes}):
        found.append(f"{channels} channels and {rows} columns for {shapes}")
    temporal = [part for part in spec.parts if part.tensor == "ssm"]
    elements = sum(part.units * part.content_bytes for part in temporal) // 4
    real = sum(math.prod(shape) for shape in facts.get("recurrent", []))
    if elements != real:
        found.append(f"{elements} elements for {facts.get('recurrent')}")
    heads = {part.units for part in temporal}
    if temporal and heads != {shape[0] for shape in facts["recurrent"]}:
        found.append(f"{heads} heads for {facts['recurrent']}")
    return found


def _indexer(spec: Any, facts: Facts) -> list[str]:
    sizes = {spec.head_size}
    if spec.tokens_per_state > 1:
        # For GLM-5.3, transformers keeps each token: its key, its gate, and whether it counts.
        sizes.add(2 * spec.head_size + 1)
    same = facts["indexer"] in sizes
    return [] if same else [f"indexer keys of {spec.head_size}, not {facts['indexer']}"]
