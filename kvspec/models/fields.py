"""What a ``config.json`` says, and which layers of a model keep which kind of cache.

Law: a field is read by name and refused by name. A rule turns a config into one kind a layer:
``full``, ``mla``, ``sliding_window``, ``chunked_local``, ``state``, or ``none`` for no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import positive_int

_ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "hidden_size": ("n_embd", "d_model"),
    "head_dim": ("attention_head_dim",),
    "layer_types": ("layers_block_type",),
    "sliding_window_pattern": ("_sliding_window_pattern",),
    "mamba_ssm_dtype": ("mamba_ssm_cache_dtype",),
}
"""Other keys under which published configs keep the same fact."""


@attrs.frozen
class ModelConfig:
    """The text model's config, with what its class supplies where the file is silent."""

    values: Mapping[str, object]
    defaults: Mapping[str, object]

    def get(self, name: str) -> object:
        """Return the field, else the class's default, else None."""
        return self._find(name)[1]

    def number(self, name: str) -> int:
        """Return the field as an int of at least 1; else raise `SpecError` naming its key."""
        return positive_int(*self._find(name))

    def product(self, names: str) -> int:
        """Return the product of the fields in *names*, separated by ``*``."""
        total = 1
        for name in names.split("*"):
            total *= self.number(name)
        return total

    def _find(self, name: str) -> tuple[str, object]:
        for key in (name, *_ALIASES.get(name, ())):
            if self.values.get(key) is not None:
                return key, self.values[key]
        # A null is the file's own word: it switches a window or a chunk off, default or not.
        return name, None if name in self.values else self.defaults.get(name)


KindRule: TypeAlias = Callable[[ModelConfig, int], list[str]]
"""From a config and its number of layers to the kind of cache of each layer."""


def all_layers(kind: str) -> KindRule:
    """Return the rule under which every layer is *kind*."""
    return lambda _, layers: [kind] * layers


FULL: KindRule = all_layers("full")
"""Full attention in every layer."""

MLA: KindRule = all_layers("mla")
"""Latents in every layer; ``layer_types`` of such models tells other things apart."""


def window(read: ModelConfig, layers: int) -> list[str]:
    """Let every layer slide if the config has a window."""
    return ["full" if read.get("sliding_window") is None else "sliding_window"] * layers


def late_window(read: ModelConfig, layers: int) -> list[str]:
    """Let layers from ``max_window_layers`` on slide, if the config turns the window on."""
    if read.get("use_sliding_window") is not True or read.get("sliding_window") is None:
        return ["full"] * layers
    first = positive_int("max_window_layers", read.get("max_window_layers"), least=0)
    return ["full" if i < first else "sliding_window" for i in range(layers)]


def every(key: str, other: str) -> KindRule:
    """Return the rule: each *key*-th layer is full, all the others are *other*."""

    def kinds(read: ModelConfig, layers: int) -> list[str]:
        period = read.number(key)
        return [other if (i + 1) % period else "full" for i in range(layers)]

    return kinds


def offset(read: ModelConfig, layers: int) -> list[str]:
    """Put one attention layer into each ``attn_layer_period``, at ``attn_layer_offset``."""
    period = read.number("attn_layer_period")
    offset = positive_int("attn_layer_offset", read.get("attn_layer_offset"), least=0)
    return ["full" if i % period == offset else "state" for i in range(layers)]


def listed(key: str) -> KindRule:
    """Return the rule: layers whose indices *key* lists are full, the others hold a state."""

    def kinds(read: ModelConfig, layers: int) -> list[str]:
        value = read.get(key)
        wanted = f"layer indices below num_hidden_layers={layers}"
        if not isinstance(value, list):
            raise SpecError(key, value, wanted)
        full = {positive_int(key, index, least=0) for index in value}
        if not full <= set(range(layers)):
            raise SpecError(key, value, wanted)
        return ["full" if i in full else "state" for i in range(layers)]

    return kinds


def letters(read: ModelConfig, layers: int) -> list[str]:
    """Read one letter a layer: M a state, ``*`` attention, ``-`` and E a feed-forward layer."""
    pattern = read.get("hybrid_override_pattern")
    meaning = {"M": "state", "*": "full", "-": "none", "E": "none"}
    if not isinstance(pattern, str) or set(pattern) - set(meaning) or len(pattern) != layers:
        wanted = f"num_hidden_layers={layers} letters out of {''.join(meaning)}"
        raise SpecError("hybrid_override_pattern", pattern, wanted)
    return [meaning[letter] for letter in pattern]


def chunks(read: ModelConfig, layers: int) -> list[str]:
    """Let layers with rotary positions attend in chunks; those without see everything."""
    if read.get("attention_chunk_size") is None:
        return ["full"] * layers
    rotary = read.get("no_rope_layers")  # despite its name, 1 for a layer with rotary positions
    if not rotary:
        return every("no_rope_layer_interval", "chunked_local")(read, layers)
    if not isinstance(rotary, list) or len(rotary) != layers:
        raise SpecError("no_rope_layers", rotary, f"num_hidden_layers={layers} flags")
    return ["chunked_local" if flag else "full" for flag in rotary]


MAX_LAYERS = 10_000
"""More layers than any model has: a config that asks for more is refused, not listed."""

_LAYER_TYPES = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding_window",
    "chunked_attention": "chunked_local",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
    "mlp": "none",
    "moe": "none",
}


def kinds_of(read: ModelConfig, rule: KindRule) -> list[str]:
    """Return the kind of cache of each layer, from ``layer_types``, else from *rule*."""
    layers = read.number("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise SpecError("num_hidden_layers", layers, f"at most {MAX_LAYERS}")
    types = read.get("layer_types")
    if types is None or rule is MLA:
        return rule(read, layers)
    if not isinstance(types, list) or len(types) != layers:
        raise SpecError("layer_types", types, f"num_hidden_layers={layers} names")
    for name in types:
        if not isinstance(name, str) or name not in _LAYER_TYPES:
            raise SpecError("layer_types", name, f"names out of {', '.join(_LAYER_TYPES)}")
    return [_LAYER_TYPES[name] for name in types]
