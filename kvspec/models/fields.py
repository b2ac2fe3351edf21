"""Read the fields of a ``config.json``, and find the kind of cache of each layer.

Invariant: an error names the key under which the config has the value, even if that is an alias.

How it works:
    A rule returns one kind for each layer. The kinds are ``full``, ``mla``, ``sliding_window``,
    ``chunked_local`` and ``state``. A layer without a cache has the kind ``none``. For example,
    ``every("full_attention_interval", "state")`` with an interval of 4 and 6 layers returns:

        layer    0       1       2       3      4       5
        kind     state   state   state   full   state   state

    If the config lists ``layer_types``, these replace the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeAlias

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.ownership.dtypes import dtype_name

# Other keys that published configs use for the same field. A key with a dot is in a nested dict.
_FIELD_ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads", "decoder_attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "num_attention_groups"),
    "hidden_size": ("n_embd", "d_model"),
    "head_dim": ("attention_head_dim",),
    "layer_types": ("layers_block_type",),
    "sliding_window_pattern": ("_sliding_window_pattern",),
    "conv_dim": ("hidden_size",),
    # Each key of a Bailing model, and its name in configs that transformers saved.
    "bailing_head_dim": ("linear_head_dim", "head_dim"),
    "short_conv_kernel_size": ("linear_conv_kernel_dim",),
    "n_mamba_heads": ("mamba_num_heads",),
    "n_groups": ("mamba_n_groups",),
    "conv_kernel": ("mamba_d_conv",),
    "sliding_window": ("sliding_window_size",),
    "linear_num_heads": ("linear_attn_config.num_heads",),
    "linear_head_dim": ("linear_attn_config.head_dim",),
    "linear_conv_kernel_dim": ("linear_attn_config.short_conv_kernel_size",),
    "index_head_dim": ("sparse_attention_config.sparse_index_dim", "indexer_head_dim"),
    "index_kpool": ("indexer_compress_ratio",),
}


@attrs.frozen
class ModelConfig:
    """The config of a text model, with the defaults of its class.

    Attributes:
        values: The parsed config.
        defaults: Values that the class supplies if the config omits them.
        by_layer: Fields of single layers, by the index of the layer.
    """

    values: Mapping[str, object]
    defaults: Mapping[str, object]
    by_layer: Mapping[int, Mapping[str, object]] = attrs.field(factory=dict)

    def of_layer(self, index: int) -> ModelConfig:
        """Return the config of one layer.

        >>> config = ModelConfig({"head_dim": 64}, {}, {1: {"head_dim": 128}})
        >>> [config.of_layer(index).get("head_dim") for index in range(2)]
        [64, 128]
        """
        own = self.by_layer.get(index)
        if own is None:
            return self
        replaced = {key for name in own for key in _FIELD_ALIASES.get(name, ())}
        kept = {key: value for key, value in self.values.items() if key not in replaced}
        return ModelConfig({**kept, **own}, self.defaults)

    def get(self, name: str) -> object:
        """Return the field, or else the default of the class, or else None."""
        return self._find(name)[1]

    def omits(self, name: str) -> bool:
        """Return whether neither the config nor the class has the field, not even as null."""
        names = (name, *_FIELD_ALIASES.get(name, ()))
        return name not in self.defaults and not any(_holds(self.values, key) for key in names)

    def number(self, name: str) -> int:
        """Return the field, an int of at least 1. A `SpecError` names the key in the config."""
        return positive_int(*self._find(name))

    def flag(self, name: str) -> bool:
        """Return the field, true or false. Without it, it is false.

        Raises:
            SpecError: If it is another value. Engines differ about 1 and ``"true"``.
        """
        key, value = self._find(name)
        if not isinstance(value, (bool, type(None))):
            raise SpecError(key, value, "true, false or null")
        return value is True

    def product(self, names: str) -> int:
        """Return the product of the fields and numbers in *names*, separated by ``*``."""
        return prod(int(n) if n.isdigit() else self.number(n) for n in names.split("*"))

    def _find(self, name: str) -> tuple[str, object]:
        keys = (name, *_FIELD_ALIASES.get(name, ()))
        found = [(key, own) for key in keys if (own := _nested(self.values, key)) is not None]
        for key, value in found[1:]:
            if isinstance(value, int) and value != found[0][1]:
                rule = f"must equal {found[0][0]}={found[0][1]}: engines read different ones"
                raise SpecError(key, value, rule=rule)
        if found:
            return found[0]
        # An explicit null turns a window or a chunk off, so it overrides the default.
        return name, None if name in self.values else self.defaults.get(name)


def _nested(values: Mapping[str, object], key: str) -> object:
    """Return the value of *key*, or None. A key with a dot is in a nested dict."""
    outer, dot, inner = key.partition(".")
    value = values.get(outer)
    if not dot:
        return value
    return value.get(inner) if isinstance(value, Mapping) else None


def _holds(values: Mapping[str, object], key: str) -> bool:
    return _nested(values, key) is not None if "." in key else key in values


# A rule takes a config, and returns fields that the class computes from others.
FillRule: TypeAlias = Callable[[ModelConfig], Mapping[str, object]]


def as_given(_: ModelConfig) -> Mapping[str, object]:
    """Return no field."""
    return {}


def counted_letters(read: ModelConfig) -> Mapping[str, object]:
    """Count the letters of ``hybrid_override_pattern`` if the config does not count its layers.

    >>> counted_letters(ModelConfig({"hybrid_override_pattern": "M-*"}, {}))
    {'num_hidden_layers': 3}
    """
    pattern = read.get("hybrid_override_pattern")
    counts = isinstance(pattern, str) and read.get("num_hidden_layers") is None
    return {"num_hidden_layers": len(str(pattern))} if counts else {}


def half_of_caches(read: ModelConfig) -> Mapping[str, object]:
    """Halve ``num_hidden_layers``, which counts caches, if the config does not count its layers.

    >>> half_of_caches(ModelConfig({"num_hidden_layers": 4}, {}))
    {'num_layers': 2}
    """
    if read.get("num_layers") is not None or read.get("num_hidden_layers") is None:
        return {}
    caches = read.number("num_hidden_layers")
    if caches % 2:
        raise SpecError("num_hidden_layers", caches, "an even number: a layer has two caches")
    return {"num_layers": caches // 2}


def divided_heads(read: ModelConfig) -> Mapping[str, object]:
    """Divide the channels of Falcon-H1's states by their heads if ``mamba_d_head`` is ``auto``.

    >>> sizes = {"mamba_d_ssm": None, "hidden_size": 64, "mamba_n_heads": 8}
    >>> divided_heads(ModelConfig({"mamba_d_head": "auto", **sizes}, {"mamba_expand": 2}))
    {'mamba_d_head': 16}
    """
    if read.get("mamba_d_head") != "auto":
        return {}
    name = "mamba_expand*hidden_size" if read.get("mamba_d_ssm") is None else "mamba_d_ssm"
    channels, heads = read.product(name), read.number("mamba_n_heads")
    if channels % heads:
        raise SpecError("mamba_n_heads", heads, f"a divisor of {name}={channels}")
    return {"mamba_d_head": channels // heads}


# A rule takes a config and its number of layers, and returns the kind of each layer.
KindRule: TypeAlias = Callable[[ModelConfig, int], list[str]]


def all_layers(kind: str) -> KindRule:
    """Return the rule that gives every layer the kind *kind*."""
    return lambda _, layers: [kind] * layers


FULL: KindRule = all_layers("full")

# Every layer of an MLA model has a latent. Its ``layer_types``, if any, describe something else,
# so `kinds_of` ignores them.
MLA: KindRule = all_layers("mla")


def window(read: ModelConfig, layers: int) -> list[str]:
    """Give every layer a sliding window if the config has one."""
    return ["full" if read.get("sliding_window") is None else "sliding_window"] * layers


def switched(rule: KindRule) -> KindRule:
    """Return a rule: all layers are full unless ``use_sliding_window`` is true."""
    return lambda read, layers: (
        rule(read, layers) if read.flag("use_sliding_window") else ["full"] * layers
    )


@switched
def upper_window(read: ModelConfig, layers: int) -> list[str]:
    """Give layers from ``max_window_layers`` on a window if the config has one."""
    first = positive_int("max_window_layers", read.get("max_window_layers"), least=0)
    return ["full"] * min(first, layers) + window(read, max(0, layers - first))


@switched
def unrotated_window(read: ModelConfig, layers: int) -> list[str]:
    """Give layers without rotary positions a window if the config has one."""
    windows = window(read, layers)
    return [
        "full" if flag else kind for flag, kind in zip(_rotary(read, layers), windows, strict=True)
    ]


def every(key: str | int, other: str) -> KindRule:
    """Return a rule: the last layer of each period is full, and the others are *other*.

    The period is *key* if that is a number, or else the field *key* of the config.

    >>> every("period", "state")(ModelConfig({"period": 3}, {}), 6)
    ['state', 'state', 'full', 'state', 'state', 'full']
    """

    def kinds(read: ModelConfig, layers: int) -> list[str]:
        period = key if isinstance(key, int) else read.number(key)
        return [other if (i + 1) % period else "full" for i in range(layers)]

    return kinds


def first_of(period: int, other: str) -> KindRule:
    """Return a rule: the first layer of each period is full, and the others are *other*.

    >>> first_of(3, "sliding_window")(ModelConfig({}, {}), 4)
    ['full', 'sliding_window', 'sliding_window', 'full']
    """
    return lambda _, layers: [other if i % period else "full" for i in range(layers)]


def unlisted(_read: ModelConfig, layers: int) -> list[str]:
    """Raise `SpecError`: without ``layer_types``, engines differ about the layers."""
    raise SpecError("layer_types", None, f"num_hidden_layers={layers} names")


def listed_window(read: ModelConfig, layers: int) -> list[str]:
    """Make all layers full if the config has no window. Otherwise it needs ``layer_types``."""
    return ["full"] * layers if read.get("sliding_window") is None else unlisted(read, layers)


def dense_first(read: ModelConfig, layers: int) -> list[str]:
    """Give the dense layers and the layers after them a window, in patterns of their own."""
    dense = positive_int("first_k_dense_replace", read.get("first_k_dense_replace") or 0, least=0)
    dense = min(dense, layers)
    first = every("prefix_dense_sliding_window_pattern", "sliding_window")(read, dense)
    return first + every("sliding_window_pattern", "sliding_window")(read, layers - dense)


def delta_attention(read: ModelConfig, layers: int) -> list[str]:
    """Read the layers of Kimi Delta Attention, which ``linear_attn_config`` counts from 1.

    >>> lists = {"full_attn_layers": [3], "kda_layers": [1, 2]}
    >>> delta_attention(ModelConfig({"linear_attn_config": lists}, {}), 3)
    ['state', 'state', 'full']
    """
    lists = read.get("linear_attn_config")
    names = ("full_attn_layers", "kda_layers")
    if not isinstance(lists, Mapping) or not all(isinstance(lists.get(n), list) for n in names):
        raise SpecError("linear_attn_config", lists, f"a dict with {' and '.join(names)}")
    full, states = (
        {positive_int(f"linear_attn_config.{name}", number) for number in lists[name]}
        for name in names
    )
    if full & states or full | states != set(range(1, layers + 1)):
        expected = f"each number from 1 to num_hidden_layers={layers}, in one of the two lists"
        raise SpecError("linear_attn_config", lists, expected)
    return ["full" if i + 1 in full else "state" for i in range(layers)]


def grouped(read: ModelConfig, layers: int) -> list[str]:
    """Make the last layer of each ``layer_group_size`` full, and the others linear.

    vLLM and transformers differ about layers after the last whole group.
    """
    period = read.number("layer_group_size")
    if layers % period:
        raise SpecError("num_hidden_layers", layers, f"a multiple of layer_group_size={period}")
    return ["full" if (i + 1) % period == 0 else "state" for i in range(layers)]


def patterned(read: ModelConfig, layers: int) -> list[str]:
    """Read ``hybrid_layer_pattern``, which has a 1 for each layer with a window."""
    pattern = read.get("hybrid_layer_pattern")
    if not isinstance(pattern, list) or len(pattern) != layers or set(pattern) - {0, 1}:
        raise SpecError("hybrid_layer_pattern", pattern, f"num_hidden_layers={layers} flags")
    return ["sliding_window" if flag else "full" for flag in pattern]


def offset(read: ModelConfig, layers: int) -> list[str]:
    """Make one layer of each ``attn_layer_period`` full, at ``attn_layer_offset``."""
    period = read.number("attn_layer_period")
    offset = positive_int("attn_layer_offset", read.get("attn_layer_offset"), least=0)
    if offset >= period:
        raise SpecError("attn_layer_offset", offset, f"an int below attn_layer_period={period}")
    return ["full" if i % period == offset else "state" for i in range(layers)]


def listed(key: str) -> KindRule:
    """Return a rule: the layers whose indices *key* lists are full, the others have a state."""

    def kinds(read: ModelConfig, layers: int) -> list[str]:
        value = read.get(key)
        expected = f"a list of layer indices below num_hidden_layers={layers}"
        if not isinstance(value, list):
            raise SpecError(key, value, expected)
        full = {positive_int(key, index, least=0) for index in value}
        if not full <= set(range(layers)):
            raise SpecError(key, value, expected)
        return ["full" if i in full else "state" for i in range(layers)]

    return kinds


def letters(read: ModelConfig, layers: int) -> list[str]:
    """Read one letter for each layer: M is a state, ``*`` attention, ``-`` and E feed-forward."""
    pattern = read.get("hybrid_override_pattern")
    meaning = {"M": "state", "*": "full", "-": "none", "E": "none"}
    if not isinstance(pattern, str) or set(pattern) - set(meaning) or len(pattern) != layers:
        expected = f"num_hidden_layers={layers} letters, each one of {''.join(meaning)}"
        raise SpecError("hybrid_override_pattern", pattern, expected)
    return [meaning[letter] for letter in pattern]


def chunked_layers(read: ModelConfig, layers: int) -> list[str]:
    """Make layers with rotary positions chunked, and layers without them full."""
    if read.get("attention_chunk_size") is None:
        return ["full"] * layers
    return ["chunked_local" if rotary else "full" for rotary in _rotary(read, layers)]


def _rotary(read: ModelConfig, layers: int) -> list[bool]:
    """Return whether each layer has rotary positions."""
    # Despite its name, the list has a 1 for each layer that has rotary positions.
    rotary = read.get("no_rope_layers")
    if not rotary:
        period = read.number("no_rope_layer_interval")
        return [(i + 1) % period > 0 for i in range(layers)]
    if not isinstance(rotary, list) or len(rotary) != layers:
        raise SpecError("no_rope_layers", rotary, f"num_hidden_layers={layers} flags")
    return [bool(flag) for flag in rotary]


# No model has more layers. A larger number in a config is an error, and listing the layers would
# take all memory.
MAX_LAYERS = 10_000

_LAYER_TYPES = {
    "full_attention": "full",
    "sliding_attention": "sliding_window",
    "chunked_attention": "chunked_local",
    "linear_attention": "state",
}


# The name in ``layer_types`` of a layer with keys for an indexer.
SPARSE = "minimax_m3_sparse"


def kinds_of(
    read: ModelConfig,
    rule: KindRule,
    counted: str = "num_hidden_layers",
    more_types: Mapping[str, str] | None = None,
    *,
    ruled: bool = False,
    closed: bool = False,
) -> list[str]:
    """Return the kind of each layer, from ``layer_types`` if the config has it, or from *rule*.

    Args:
        read: The config.
        rule: The rule of the architecture.
        counted: The field with the number of layers. If it is ``layer_types``, their list counts.
        more_types: Names in ``layer_types`` that only this architecture knows, with their kinds.
        ruled: Whether some engines follow the rule even if the config has ``layer_types``.
        closed: Whether ``layer_types`` may have only the names in *more_types*.
    """
    if read.get("use_bidirectional_attention") in (True, "all"):
        raise SpecError(
            "use_bidirectional_attention",
            read.get("use_bidirectional_attention"),
            rule="not yet: attention to later tokens, for which transformers changes the window",
        )
    known = ({} if closed else _LAYER_TYPES) | dict(more_types or {})
    types = read.get("layer_types")
    if counted == "layer_types" and isinstance(types, list):
        layers = len(types)
    else:
        layers = read.number("num_hidden_layers" if counted == "layer_types" else counted)
    if layers > MAX_LAYERS:
        raise SpecError(counted, layers, f"at most {MAX_LAYERS}")
    listed = types is not None and rule is not MLA
    kinds = _listed_kinds(read, types, layers, known) if listed else rule(read, layers)
    if ruled and kinds != rule(read, layers):
        text = "the other fields describe other layers, and engines follow different fields"
        raise SpecError("layer_types", types, rule=text)
    if "num_kv_shared_layers" in read.defaults:
        number = read.get("num_kv_shared_layers")
        shared = positive_int("num_kv_shared_layers", number, least=0)
        if shared >= layers:
            expected = f"an int below num_hidden_layers={layers}"
            raise SpecError("num_kv_shared_layers", shared, expected)
        # These layers read the cache of an earlier layer of their kind.
        if not set(kinds[layers - shared :]) <= set(kinds[: layers - shared]):
            text = "each layer that shares a cache needs an earlier layer of its kind"
            raise SpecError("num_kv_shared_layers", shared, rule=text)
        kinds[layers - shared :] = ["none"] * shared
    return kinds


def _listed_kinds(
    read: ModelConfig, types: object, layers: int, known: Mapping[str, str]
) -> list[str]:
    """Return the kinds that the list *types* names."""
    # Some configs also list the draft layers, after the others.
    drafts = read.get("num_nextn_predict_layers")
    if isinstance(types, list) and isinstance(drafts, int) and len(types) == layers + drafts:
        types = types[:layers]
    if not isinstance(types, list) or len(types) != layers:
        raise SpecError("layer_types", types, f"num_hidden_layers={layers} names")
    for name in types:
        if not isinstance(name, str) or name not in known:
            raise SpecError("layer_types", name, f"one of {', '.join(known)}")
    # Without the flag, these classes have no size of the window that the list requires.
    flag = read.get("use_sliding_window")
    if "use_sliding_window" in read.defaults and flag is not True and "sliding_attention" in types:
        raise SpecError("use_sliding_window", flag, "True, because of layer_types")
    return [known[name] for name in types]


# A rule takes a config and the kinds of its layers, and returns the fields of single layers.
LayerRule: TypeAlias = Callable[[ModelConfig, list[str]], Mapping[int, Mapping[str, object]]]


def alike(_read: ModelConfig, _kinds: list[str]) -> Mapping[int, Mapping[str, object]]:
    """Return no fields: all layers of a kind are alike."""
    return {}


def global_sizes(read: ModelConfig, kinds: list[str]) -> Mapping[int, Mapping[str, object]]:
    """Give the full layers of Gemma 4 their own head size and KV heads.

    >>> read = ModelConfig({"global_head_dim": 512, "num_global_key_value_heads": 1}, {})
    >>> global_sizes(read, ["sliding_window", "full"])
    {1: {'head_dim': 512}}
    """
    if kinds[-1] == "sliding_window":
        rule = "the last layer must be full: transformers changes another last layer"
        raise SpecError("layer_types", read.get("layer_types"), rule=rule)
    own: dict[str, object] = {"head_dim": read.get("global_head_dim")}
    if read.flag("attention_k_eq_v") and read.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = read.get("num_global_key_value_heads")
    return {index: own for index, kind in enumerate(kinds) if kind == "full"}


def window_sizes(read: ModelConfig, kinds: list[str]) -> Mapping[int, Mapping[str, object]]:
    """Give the layers with a window the heads and sizes of MiMo-V2's ``swa_`` fields.

    >>> sizes = {"swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128}
    >>> window_sizes(ModelConfig(sizes, {}), ["full", "sliding_window"])
    {1: {'num_key_value_heads': 8, 'head_dim': 192, 'v_head_dim': 128}}
    """
    own = {name: read.number(f"swa_{name}") for name in ("num_key_value_heads", "head_dim")}
    own["v_head_dim"] = own["head_dim"]
    if read.get("swa_num_attention_heads") is not None:
        own["num_attention_heads"] = read.number("swa_num_attention_heads")
    if read.get("swa_v_head_dim") is not None:
        own["v_head_dim"] = read.number("swa_v_head_dim")
    return {index: own for index, kind in enumerate(kinds) if kind == "sliding_window"}


def other_setting(read: ModelConfig, kinds: list[str]) -> Mapping[int, Mapping[str, object]]:
    """Give the layers with a window the query heads of ``attention_other_setting``.

    vLLM 0.32 and SGLang also read the KV heads of the dict. vLLM 0.33 and transformers do not.
    """
    setting = read.get("attention_other_setting")
    if setting is None:
        return {}
    if not isinstance(setting, Mapping) or setting.get("attention_type") != "sliding_attention":
        expected = "a dict with attention_type 'sliding_attention'"
        raise SpecError("attention_other_setting", setting, expected)
    for name, key in (("num_key_value_heads", "num_attention_groups"), ("head_dim", "head_dim")):
        if setting.get(key) not in (None, read.get(name)):
            rule = f"must equal {name}={read.get(name)}, because only some engines read it"
            raise SpecError(f"attention_other_setting.{key}", setting[key], rule=rule)
    # Without a head size, it is the hidden size divided by the heads of the layer.
    heads = setting.get("num_attention_heads")
    own = {"num_attention_heads": heads} if heads else {}
    return {index: own for index, kind in enumerate(kinds) if kind == "sliding_window"}


# Fields of `per_layer_config` that would change the kind of a layer.
_OF_KINDS = ("sliding_window", "attention_chunk_size", "layer_types", "num_kv_shared_layers")


def fields_by_layer(
    read: ModelConfig, rule: LayerRule, kinds: list[str]
) -> Mapping[int, Mapping[str, object]]:
    """Return the fields of single layers, from ``per_layer_config`` or from *rule*.

    The key is one of transformers.
    """
    given, ruled = read.get("per_layer_config"), rule(read, kinds)
    if given is None:
        if ruled and "per_layer_config" in read.values:
            text = "transformers ignores the sizes of single layers because of this null: remove it"
            raise SpecError("per_layer_config", None, rule=text)
        return ruled
    if not isinstance(given, Mapping):
        raise SpecError("per_layer_config", given, "a dict of the fields of each layer")
    found: dict[int, Mapping[str, object]] = {}
    for key, own in given.items():
        field = f"per_layer_config.{key}"
        # No index has more digits, and `int` refuses thousands of them.
        if (
            not str(key).isdecimal()
            or len(str(key)) > len(str(MAX_LAYERS))
            or (int(key) >= len(kinds))
        ):
            raise SpecError(field, key, f"an index below num_hidden_layers={len(kinds)}")
        if not isinstance(own, Mapping):
            raise SpecError(field, own, "a dict")
        for name in own:
            if name == "skip" and own[name]:
                raise SpecError(f"{field}.skip", own[name], rule="not yet: layers without a part")
            if name in _OF_KINDS and own[name] != read.get(name):
                rule_text = f"not yet: layers that differ in their {name}"
                raise SpecError(f"{field}.{name}", own[name], rule=rule_text)
        found[int(key)] = own
    return found


# Sizes that each model has. If a config omits one, its class has a default.
_OF_ALL = {"hidden_size", "num_attention_heads"}


def check_agreement(
    read: ModelConfig,
    products: Mapping[str, str],
    only: Mapping[str, tuple[object, str]],
    ints: Sequence[str],
) -> None:
    """Raise `SpecError` for fields that engines read in different ways, see `Architecture`.

    >>> check_agreement(ModelConfig({"num_layers": 2}, {}), {"num_hidden_layers": "2*num_layers"},
    ...     {"sliding_window": (None, "only vLLM reads it")}, ["num_layers"])
    """
    for left, right in products.items():
        fields = [name for name in f"{left}*{right}".split("*") if not name.isdigit()]
        missing = [name for name in fields if not isinstance(read.get(name), int)]
        if missing and _OF_ALL.issuperset(missing):
            rule = f"{left} must equal {right}, so the config must have it"
            raise SpecError(missing[0], read.get(missing[0]), rule=rule)
        if not missing and read.product(left) != read.product(right):
            rule = f"engines read different fields, so {left} must equal {right}"
            raise SpecError(fields[0], read.get(fields[0]), rule=rule)
    for name, (value, why) in only.items():
        if read.get(name) not in (None, value):
            raise SpecError(name, read.get(name), rule=f"must be {value!r} or absent: {why}")
    for name in ints:
        if name in read.values:
            read.number(name)


# Keys that only the classes of some rows read, see `Architecture.reads`.
_OF_SOME = {
    "attention_head_dim": "head_dim",
    "sliding_window_size": "sliding_window",
    "num_attention_groups": "num_key_value_heads",
    "num_kv_heads": "num_key_value_heads",
    "n_head_kv": "num_key_value_heads",
    "decoder_attention_heads": "num_attention_heads",
}


def check_keys(read: ModelConfig, reads: Sequence[str], architecture: str) -> None:
    """Raise `SpecError` if a key that the class ignores would replace a missing field.

    >>> check_keys(ModelConfig({"head_dim": 8, "attention_head_dim": 8}, {}), (), "Llama")
    """
    for key, name in _OF_SOME.items():
        value = read.values.get(key)
        if isinstance(value, int) and read.values.get(name) is None and key not in reads:
            rule = f"{architecture} does not read it, so the config must have {name}, or not this"
            raise SpecError(key, value, rule=rule)


# Windows that some engines apply to models without windows, the kinds of layers, and the engines.
_UNCLEAR = (
    ("sliding_window", "sliding_window", "vLLM and transformers apply it, and SGLang does not"),
    ("attention_chunk_size", "chunked_local", "transformers applies it, vLLM and SGLang do not"),
)


def check_windows(read: ModelConfig, rule: KindRule, kinds: Sequence[str]) -> None:
    """Raise `SpecError` if a model without windows has a window that only some engines apply."""
    if rule not in (FULL, MLA, window):
        return
    for name, kind, who in _UNCLEAR:
        unlisted = read.get(name) is not None and read.get("layer_types") is None
        if name in read.defaults or (rule is window and kind == "sliding_window"):
            continue
        if kind in kinds or unlisted:
            field = name if unlisted else "layer_types"
            text = f"the model must have no {name}, since engines differ: {who}"
            raise SpecError(field, read.get(field), rule=text)


_INDEXERS = ["full", "shared"]


def indexer_layers(read: ModelConfig, indices: Sequence[int]) -> list[int]:
    """Return those of *indices* whose layers keep indexer keys. The others share earlier choices.

    The source is vLLM's `DeepseekV32Attention` (models/deepseek_v32/attention.py).

    >>> indexer_layers(ModelConfig({"index_topk_freq": 4}, {}), range(10))
    [0, 1, 5, 9]
    >>> indexer_layers(ModelConfig({"index_topk_pattern": "FSSF"}, {}), range(4))
    [0, 3]
    """
    types = read.get("indexer_types")
    if types is None:
        return _scheduled_indexers(read, indices)
    valid = isinstance(types, list) and all(each in _INDEXERS for each in types)
    if not isinstance(types, list) or not valid or len(types) < len(indices):
        expected = f"{' or '.join(_INDEXERS)} for each of {len(indices)} layers"
        raise SpecError("indexer_types", types, expected)
    owners = [index for index in indices if types[index] == "full"]
    # For most classes, vLLM follows the other fields, and transformers this list.
    if "indexer_types" not in read.defaults and owners != _scheduled_indexers(read, indices):
        rule = "the other fields describe other layers, and engines follow different fields"
        raise SpecError("indexer_types", types, rule=rule)
    return owners


def _scheduled_indexers(read: ModelConfig, indices: Sequence[int]) -> list[int]:
    pattern = read.get("index_topk_pattern")
    if pattern is not None:
        # The engines accept one letter for each layer, as a text or a list. S shares.
        letters: list[object] = [*pattern] if isinstance(pattern, (str, list)) else []
        if len(letters) < len(indices) or not all(letter in ("F", "S") for letter in letters):
            expected = f"F or S for each of {len(indices)} layers"
            raise SpecError("index_topk_pattern", pattern, expected)
        return [index for index in indices if letters[index] == "F"]
    every_n, skipped = read.get("index_topk_freq"), read.get("index_skip_topk_offset")
    period = 1 if every_n is None else positive_int("index_topk_freq", every_n)
    first = 2 if skipped is None else positive_int("index_skip_topk_offset", skipped, least=0)
    return [index for index in indices if max(index - first + 1, 0) % period == 0]


# A rule takes a config and the kinds of its layers, and returns the layers with indexer keys.
SparseRule: TypeAlias = Callable[[ModelConfig, list[str]], list[int]]


def indexed_layers(read: ModelConfig, kinds: list[str]) -> list[int]:
    """Return all layers with attention, or none if the config has no indexer.

    >>> indexed_layers(ModelConfig({"indexer_n_heads": 4}, {}), ["state", "full"])
    [1]
    """
    if read.get("ple_layer_ids"):
        rule = "not yet: convolutions of embeddings, which all ranks hold"
        raise SpecError("ple_layer_ids", read.get("ple_layer_ids"), rule=rule)
    if read.get("indexer_n_heads") is None:
        return []
    return [index for index, kind in enumerate(kinds) if kind == "full"]


def sparse_layers(read: ModelConfig, kinds: list[str]) -> list[int]:
    """Return the layers with keys for an indexer, of a model whose other layers are dense.

    >>> flags = {"sparse_attention_freq": [0, 1], "sparse_disable_index_value": [0, 1]}
    >>> sparse_layers(ModelConfig({"sparse_attention_config": flags}, {}), ["full", "full"])
    [1]
    """
    layers, types = len(kinds), read.get("layer_types")
    listed = None
    if isinstance(types, list):
        listed = [index for index in range(layers) if types[index] == SPARSE]
        if read.get("sparse_attention_config") is None:
            return listed
    flagged = _flagged_layers(read, "sparse_attention_freq", layers)
    if listed not in (None, flagged):
        rule = "sparse_attention_config describes other layers, and engines follow different fields"
        raise SpecError("layer_types", types, rule=rule)
    without_values = "sparse_disable_index_value"
    if flagged and not set(flagged) <= set(_flagged_layers(read, without_values, layers)):
        field = f"sparse_attention_config.{without_values}"
        rule = "each sparse layer needs a flag: without it, only SGLang keeps values of the indexer"
        raise SpecError(field, _nested(read.values, field), rule=rule)
    return flagged


def _flagged_layers(read: ModelConfig, name: str, layers: int) -> list[int]:
    """Return the layers for which the list *name* of ``sparse_attention_config`` has a flag."""
    field = f"sparse_attention_config.{name}"
    flags = _nested(read.values, field)
    if not isinstance(flags, list) or len(flags) != layers:
        raise SpecError(field, flags, f"num_hidden_layers={layers} flags")
    return [index for index, flag in enumerate(flags) if flag]


def declared_dtype(*configs: Mapping[str, object]) -> object:
    """Return the type that the first of *configs* with a type declares, or None."""
    values = (config.get(key) for config in configs for key in ("dtype", "torch_dtype"))
    return next((value for value in values if value is not None), None)


def resolved_dtype(
    outer: Mapping[str, object],
    text: Mapping[str, object],
    defaults: Mapping[str, object],
    *,
    float16: bool,
) -> object:
    """Return the type with which engines run the model, or None if the config has none.

    The sources are vLLM's `_get_and_verify_dtype` and SGLang's function of the same name.

    Args:
        outer: The config of the model.
        text: The config of its language model. It may be the same.
        defaults: The defaults of the class.
        float16: Whether vLLM runs the class with float16.

    Raises:
        SpecError: If engines choose different types.
    """
    inner, own = declared_dtype(text), declared_dtype(outer)
    if inner is not None and own is not None and dtype_name(inner) != dtype_name(own):
        rule = f"vLLM runs the model with the outer {own}, and SGLang with this: pass the dtype"
        raise SpecError("text_config.dtype", inner, rule=rule)
    declared = declared_dtype(text, outer, defaults)
    name = None if declared is None else dtype_name(declared)
    if name == "float32":
        rule = "vLLM runs the model with bfloat16, SGLang with float16: pass the dtype"
        raise SpecError("dtype", declared, rule=rule)
    if name == "float16" and not float16:
        rule = "vLLM runs this class with bfloat16, SGLang with float16: pass the dtype"
        raise SpecError("dtype", declared, rule=rule)
    return declared


def quantised_cache(
    outer: Mapping[str, object], text: Mapping[str, object], *, latents: bool = False
) -> str | None:
    """Return the type of the attention cache that a checkpoint declares, or None.

    The sources are vLLM's `get_kv_cache_quant_algo_string` and `Attention`, and SGLang's
    `configure_kv_cache_dtype`. A checkpoint of ModelOpt or of compressed-tensors can declare one.

    Args:
        outer: The config of the model.
        text: The config of its language model. It may be the same.
        latents: Whether the model keeps latents.

    Raises:
        SpecError: If the checkpoint declares NVFP4, whose page depends on the engine, or a type
            that only some engines use.

    >>> quantised_cache({"quantization_config": {
    ...     "quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, {})
    'float8_e4m3fn'
    """
    for config in (outer, text):
        for key in ("quantization_config", "compression_config"):
            given = config.get(key)
            if not isinstance(given, Mapping):
                continue
            found = _declared_cache(key, given, latents=latents)
            if found is not None and config is not outer:
                rule = "engines read only that of the outer config: pass the dtype of the cache"
                raise SpecError(f"text_config.{key}", found, rule=rule)
            return found
    return None


def _declared_cache(field: str, given: Mapping[str, object], *, latents: bool) -> str | None:
    """Return the type that the quantisation *given* declares, or None."""
    inner = given.get("quantization", given)
    inner = inner if isinstance(inner, Mapping) else given
    method = str(given.get("quant_method", "")).lower().replace("_", "-")
    if method == "compressed-tensors":
        return _scheme_of_tensors(field, given.get("kv_cache_scheme"), latents=latents)
    if not _is_modelopt(given, inner):
        algorithm = given.get("kv_cache_quant_algo")
        if method in ("fp8", "mxfp8") and str(algorithm).lower() == "fp8":
            rule = "SGLang quantises the cache of this method, vLLM does not: pass the dtype"
            raise SpecError(f"{field}.kv_cache_quant_algo", algorithm, rule=rule)
        return None
    names = ("kv_cache_scheme", "kv_cache_quant_algo")
    declared = next((value for name in names for place in (inner, given)
                     if (value := place.get(name))), None)  # fmt: skip
    if isinstance(declared, Mapping):
        bits, is_float = declared.get("num_bits"), declared.get("type") == "float"
        eight = bits == 8 and is_float and declared.get("dynamic") is False  # noqa: PLR2004
        declared = "fp8" if eight else "nvfp4" if bits == 4 and is_float else None  # noqa: PLR2004
    algorithm = declared.lower() if isinstance(declared, str) else None
    if algorithm == "nvfp4":
        rule = "the pages of an NVFP4 cache depend on the engine: pass the dtype of the cache"
        raise SpecError(field, declared, rule=rule)
    return _EIGHT_BITS if algorithm == "fp8" else None


_EIGHT_BITS = "float8_e4m3fn"
# The scheme of compressed-tensors for which SGLang keeps an 8-bit cache.
_STATIC = {
    "type": "float",
    "num_bits": 8,
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
_OMITTED = {"symmetric": True, "dynamic": False}


def _scheme_of_tensors(field: str, scheme: object, *, latents: bool) -> str | None:
    """Return the type for the ``kv_cache_scheme`` of compressed-tensors.

    VLLM keeps an 8-bit cache for each scheme, but not for latents.
    """
    if scheme is None:
        return None
    own = _OMITTED | dict(scheme) if isinstance(scheme, Mapping) else {}
    if latents or {name: own.get(name) for name in _STATIC} != _STATIC:
        which = "latents" if latents else "this scheme"
        rule = f"vLLM and SGLang keep caches of different types for {which}: pass the dtype"
        raise SpecError(f"{field}.kv_cache_scheme", scheme, rule=rule)
    return _EIGHT_BITS


def _is_modelopt(given: Mapping[str, object], inner: Mapping[str, object]) -> bool:
    """Return whether vLLM takes the quantisation for one of ModelOpt.

    Older files name a producer and no method. vLLM's `_normalize_quantization_config` then derives
    the method from the algorithm of the weights, and ignores a file without one.
    """
    if str(given.get("quant_method", "")).lower().startswith("modelopt"):
        return True
    producer = given.get("producer")
    named = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return (named or "modelopt_quant_config" in inner) and inner.get("quant_algo") is not None
