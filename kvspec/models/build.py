"""Build KV cache groups from a config and its row of the table of architectures.

Invariant: every size comes from the config or from the defaults of the row. All layers of one kind
are one group, and no group mixes windows.

How it works:
    A config goes through four steps:

        step                                   Qwen3-Next-80B-A3B
        1. find the row by class or type       Qwen3NextForCausalLM
        2. find the kind of each layer         state, state, state, full, state, ...
        3. collect the layers of each kind     full: 3, 7, 11, ...; state: 0, 1, 2, 4, ...
        4. read the sizes of each group        full: 2 KV heads of 256; state: 32 value heads of 128

    A multimodal config has the sizes of its language model in ``text_config``. Only these count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import attrs

from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.models.architectures import ARCHITECTURES, NOT_YET, Architecture, State
from kvspec.models.compressed import group_of, indexer_keys
from kvspec.models.fields import (
    MLA,
    ModelConfig,
    check_agreement,
    check_keys,
    check_windows,
    fields_by_layer,
    indexer_layers,
    kinds_of,
    quantised_cache,
    resolved_dtype,
)
from kvspec.ownership.dtypes import dtype_name, itemsize
from kvspec.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

# A parsed ``config.json``, its path, or the path of the folder that holds it.
ConfigSource: TypeAlias = Mapping[str, object] | str | os.PathLike[str]

_BY_NAME: dict[str, Architecture] = {name: row for row in ARCHITECTURES for name in row.names}
_SSM_FIELDS = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
_KINDS = ("full", "mla", "sliding_window", "chunked_local", "state", "cross")


def architectures() -> tuple[str, ...]:
    """Return the known values of ``architectures`` in a ``config.json``, sorted.

    >>> "LlamaForCausalLM" in architectures()
    True
    """
    # Class names have capitals. The lower-case names of the table are values of ``model_type``.
    return tuple(sorted(name for name in _BY_NAME if not name.islower()))


def from_config(
    config: ConfigSource,
    *,
    block_size: int = 16,
    dtype: object = None,
    ssm_dtype: object = None,
    num_speculative_tokens: int = 0,
) -> tuple[KVCacheGroup, ...]:
    """Return the KV cache groups of the model that *config* describes.

    The layers have the names that vLLM gives them. If the text model is nested, the names begin
    with ``language_model.``. Layers pair by name, so both engines need the same names. Draft (MTP)
    layers are not included. Windows are vLLM's too. SGLang gives MiMo-V2, Step-3.5, EXAONE-MoE and,
    with FlashAttention, Gemma 3n one token more, and transformers gives Cohere 2 one token less.

    Args:
        config: A parsed ``config.json``, its path, or the path of its folder. For a multimodal
            model, the nested ``text_config`` is used.
        block_size: Tokens of one attention block. DeepSeek-V4 needs a multiple of 128. Its windows,
            compressors and rings have blocks of their own, as in vLLM.
        dtype: Element type of the attention cache. By default the dtype of the config, or
            float8_e4m3fn if a checkpoint of ModelOpt or compressed-tensors declares an fp8 cache.
            DeepSeek-V4 and V4.1 have no default. If engines choose different types, as for float32,
            pass this argument. A latent has this type too, so the rows of ``fp8_ds_mla``, which
            contain scales, need specs of your own.
            On GPUs of compute capability 10 (SGLang: 10 or later), engines keep 8-bit latents for
            some models with an indexer (vLLM: GLM-5, SGLang: all without attention sinks) unless
            you choose the type: choose it there.
            Recurrent states have the same type, unless it is an 8-bit type. Engines use 8-bit types
            only for attention, so the states then have the dtype of the config. It must have one.
        ssm_dtype: Element type of the temporal state. By default that of vLLM: for Qwen3.5 the
            config's ``mamba_ssm_dtype``, for Nemotron-H ``mamba_ssm_cache_dtype`` or float32, for
            delta attention float32, or else the dtype of the conv state. SGLang's default is
            float32. If the config has another type in one of these fields, pass this argument.
        num_speculative_tokens: Additional rows of a conv state, and of a ring.

    Returns:
        The groups in this order: full or mla, sliding_window, chunked_local, the state group
        (mamba, gated_delta_net, delta_attention, linear_attention or short_conv), cross_attention,
        indexer, and ring. DeepSeek-V4 has mla, sliding_window, compressor_4 and compressor_128
        instead, and DeepSeek-V4.1 has mla, sliding_window and ring.
        Its indexer keys are vLLM's 8-bit ones. SGLang keeps 4-bit ones.
        Layers of one kind with different heads are one group of
        `UniformTypeKVCacheSpecs`.

    Raises:
        SpecError: If the architecture is unknown, or a field is missing or impossible.

    >>> llama = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 256,
    ...     "num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16"}
    >>> (group,) = from_config(llama)
    >>> group.name, group.layers[0], group.spec.page_size_bytes()
    ('full', 'model.layers.0.self_attn.attn', 8192)
    """
    outer = _load(config)
    row, text, prefix = _resolve(outer)
    latents = row.latents or row.kinds is MLA
    quantised = quantised_cache(outer, text, latents=latents) if dtype is None else None
    if quantised is not None and row.indexer:
        # Some backends store 576 bytes a token, others add scales: 656 bytes.
        rule = "8-bit latents of this model depend on the engine: pass the dtype of the cache"
        raise SpecError("quantization_config", quantised, rule=rule)
    if dtype is None and row.compressed is not None:
        rule = "engines choose how to store these latents: pass bfloat16, float8_e4m3fn, or uint8"
        raise SpecError("dtype", None, rule=f"{rule} for the packed pages of fp8_ds_mla")
    declared = None
    if dtype is None or itemsize(dtype_name(dtype)) == 1:
        declared = resolved_dtype(outer, text, row.defaults, float16=row.float16)
    wanted = (quantised or declared) if dtype is None else dtype
    if wanted is None:
        rule = "the config has no dtype or torch_dtype, so pass dtype"
        raise SpecError("dtype", None, rule=rule)
    cache = dtype_name(wanted)
    states = cache if itemsize(cache) > 1 else declared
    read = ModelConfig(text, row.defaults)
    read = attrs.evolve(read, values={**text, **row.filled(read)})
    check_agreement(read, row.products, row.only, row.ints)
    check_keys(read, row.reads, row.names[0])
    closed = row.compressed is not None
    ruled = row.ruled if isinstance(row.ruled, bool) else text.get(row.ruled) is not None
    kinds = kinds_of(read, row.kinds, row.counted, row.types, ruled=ruled, closed=closed)
    if not row.indexer and not row.index_keys:
        check_windows(read, row.kinds, kinds)
    if row.latents:
        kinds = [kind.replace("full", "mla") for kind in kinds]
    read = attrs.evolve(read, by_layer=fields_by_layer(read, row.by_layer, kinds))
    if ssm_dtype is None and row.state is not None:
        ssm_dtype = _ssm_dtype(read, row.state, states)
    model = _Model(
        row=row,
        read=read,
        kinds=kinds,
        prefix=prefix,
        block_size=positive_int("block_size", block_size),
        dtype=cache,
        state_dtype=None if states is None else dtype_name(states),
        ssm_dtype=None if ssm_dtype is None else dtype_name(ssm_dtype, "ssm_dtype"),
        num_speculative_tokens=num_speculative_tokens,
    )
    return model.groups()


@attrs.frozen(kw_only=True)
class _Model:
    """The config of one model, its row of the table, and the arguments of `from_config`."""

    row: Architecture
    read: ModelConfig
    kinds: list[str]
    prefix: str
    block_size: int
    dtype: str
    state_dtype: str | None
    ssm_dtype: str | None
    num_speculative_tokens: int

    def groups(self) -> tuple[KVCacheGroup, ...]:
        kinds = self.kinds
        drafts = positive_int("num_speculative_tokens", self.num_speculative_tokens, least=0)
        if self.row.compressed is not None:
            sizes = (self.block_size, self.dtype, drafts)
            return self.row.compressed(self.read, kinds, self._name, *sizes)
        indices = {
            kind: [index for index, own in enumerate(kinds) if kind in own.split()]
            for kind in _KINDS
        }
        groups = [self._group(kind, own) for kind, own in indices.items() if own]
        indexed = indices["mla"] if self.row.indexer else []
        if self.row.index_keys:
            indexed = self.row.sparse(self.read, kinds)
            groups += [self._index_keys(indexed)] if indexed else []
        if indexed and self.row.ring:
            spec = self.row.ring_rule(self.read, drafts, nested=bool(self.prefix))
            layers = tuple(self._name(self.row.ring, index) for index in indexed)
            groups.append(KVCacheGroup(name="ring", layers=layers, spec=spec))
        return tuple(groups)

    def _index_keys(self, indices: list[int]) -> KVCacheGroup:
        """Return the plain keys of an indexer, which engines keep in bfloat16."""
        layers = [name for index in indices for name in self._named(self.row.index_keys, index)]
        spec = MLAAttentionSpec(
            block_size=self.block_size,
            head_size=self.read.number("index_head_dim"),
            dtype="bfloat16",
            tokens_per_state=self._pool(),
        )
        return KVCacheGroup(name="indexer", layers=layers, spec=spec)

    def _pool(self) -> int:
        """Return the tokens of one indexer key."""
        return self.read.number("index_kpool") if self.row.ring else 1

    def _group(self, kind: str, indices: list[int]) -> KVCacheGroup:
        if kind == "state":
            return self._state_group(indices)
        specs: dict[str, LayerSpec] = {}
        alike: LayerSpec | None = None
        for index in indices:
            if index in self.read.by_layer:
                spec = attrs.evolve(self, read=self.read.of_layer(index)).spec(kind)
            else:
                spec = alike = alike or self.spec(kind)
            pattern = self.row.cross if kind == "cross" else self.row.attention
            specs |= dict.fromkeys(self._named(pattern, index), spec)
        if kind == "mla" and self.row.indexer:
            return self._with_indexers(specs, indices)
        return group_of("cross_attention" if kind == "cross" else kind, specs)

    def spec(self, kind: str) -> LayerSpec:
        """Return the spec of an attention layer."""
        match kind:
            case "mla":
                return self._latent()
            case "sliding_window":
                return self._attention(SlidingWindowSpec, "sliding_window")
            case "chunked_local":
                return self._attention(ChunkedLocalAttentionSpec, "attention_chunk_size")
            case "cross":
                return self._attention(CrossAttentionSpec)
            case _:
                return self._attention(FullAttentionSpec)

    @cached_property
    def _attention_before(self) -> list[int]:
        """For each layer, the layers with attention before it. The last number counts all."""
        return [*accumulate((kind != "state" for kind in self.kinds), initial=0)]

    def _name(self, pattern: str, index: int) -> str:
        return self._named(pattern, index)[0]

    def _named(self, patterns: str, index: int) -> tuple[str, ...]:
        """Return the names of the caches of layer *index*, one for each of the *patterns*.

        A pattern has ``{}`` for the index. vLLM names some layers after another number: ``{nth}``
        counts the layers with attention, ``{past}`` begins after all layers, and ``{behind}``
        begins after as many layers as have attention.
        """
        before = self._attention_before
        # Zamba2 has blocks of weights in turn. vLLM counts the layers block by block.
        nth, block, blocks = before[index], 0, 1
        if self.read.get("num_mem_blocks") is not None:
            blocks = self.read.number("num_mem_blocks")
            nth, block = divmod(nth, blocks)
        numbers = {
            "nth": nth + block * (before[-1] + blocks - 1) // blocks,
            "past": len(self.kinds) + index,
            "behind": before[-1] + index,
        }
        return tuple(self.prefix + pattern.format(index, **numbers) for pattern in patterns.split())

    def _attention(self, kind: type[FullAttentionSpec], *extra: str) -> LayerSpec:
        for name in self.row.required:
            if self.read.omits(name):
                rule = f"{self.row.names[0]} has a default of its own, so the config must have it"
                raise SpecError(name, None, rule=rule)
        return kind(
            block_size=self.block_size,
            total_num_kv_heads=self._kv_heads(),
            head_size=self._head_size(),
            head_size_v=self.read.number(self.row.values) if self.row.values else None,
            dtype=self.dtype,
            **{  # type: ignore[arg-type]
                name: self.read.number(name) + self.row.wider for name in extra
            },
        )

    def _kv_heads(self) -> int:
        own = self.read.get("num_key_value_heads") is not None
        heads = self.read.number("num_key_value_heads" if own else "num_attention_heads")
        # `multi_query` means one shared KV head. Falcon's new decoder keeps the flag in its
        # config, but ignores it and uses `num_kv_heads`.
        flagged = "multi_query" in self.row.defaults
        queries = self.read.get("num_attention_heads")
        if isinstance(queries, int) and queries % heads:
            raise SpecError("num_key_value_heads", heads, f"a divisor of the {queries} heads")
        if not flagged or self.read.flag("new_decoder_architecture"):
            return heads
        if self.read.flag("multi_query"):
            return 1
        if heads != self.read.number("num_attention_heads"):
            rule = f"without multi_query, {self.row.names[0]} has num_attention_heads KV heads"
            raise SpecError("num_key_value_heads", heads, rule=rule)
        return heads

    def _head_size(self) -> int:
        if self.read.get(self.row.keys) is not None:
            return self.read.number(self.row.keys)
        hidden, heads = self.read.number("hidden_size"), self.read.number("num_attention_heads")
        if hidden % heads:
            rule = (
                f"must be a multiple of num_attention_heads={heads}, or the config needs head_dim"
            )
            raise SpecError("hidden_size", hidden, rule=rule)
        return hidden // heads

    def _latent(self) -> MLAAttentionSpec:
        # If a config has this, vLLM's class of DeepSeek-V3 makes the indexers of DeepSeek-V3.2.
        if not self.row.indexer and self.read.get("index_topk") is not None:
            rule = f"not yet: indexers of {self.row.names[0]}. DeepSeek-V3.2 has its own class"
            raise SpecError("index_topk", self.read.get("index_topk"), rule=rule)
        # The latent of a token is the compressed key and value, followed by the rotary key.
        # GLM-5.3-Flash has no rotary key.
        least = 0 if self.row.defaults.get("qk_rope_head_dim") == 0 else 1
        rotary = positive_int("qk_rope_head_dim", self.read.get("qk_rope_head_dim"), least=least)
        size = self.read.number("kv_lora_rank") + rotary
        return MLAAttentionSpec(block_size=self.block_size, head_size=size, dtype=self.dtype)

    def _with_indexers(self, latents: Mapping[str, LayerSpec], indices: list[int]) -> KVCacheGroup:
        """Return latents and indexer keys as one group, because they share block tables."""
        size = self.read.number("index_head_dim")
        keys = indexer_keys(size, self.block_size, tokens_per_state=self._pool())
        owners = set(indexer_layers(self.read, indices))
        if self.row.ring and len(owners) < len(indices):
            rule = "not yet: layers that share an indexer. vLLM gives each of them its own"
            raise SpecError("indexer_types", self.read.get("indexer_types"), rule=rule)
        specs: dict[str, LayerSpec] = {}
        for index, (layer, latent) in zip(indices, latents.items(), strict=True):
            specs[layer] = latent
            if index in owners:
                specs |= dict.fromkeys(self._named(self.row.indexer, index), keys)
        spec = UniformTypeKVCacheSpecs(specs=specs)
        return KVCacheGroup(name="mla", layers=spec.layers, spec=spec)

    def _state_group(self, indices: list[int]) -> KVCacheGroup:
        state = self.row.state
        if state is None:
            expected = f"attention layers only, because {self.row.names[0]} has no other layers"
            raise SpecError("layer_types", self.read.get("layer_types"), expected)
        if self.state_dtype is None:
            rule = "the config has no dtype, and states do not have the 8-bit type of the attention"
            raise SpecError("dtype", None, rule=rule)
        keys = {word for key in state.fields.values() for word in key.split("*")}
        for index in indices:
            for name in keys & set(self.read.by_layer.get(index, ())):
                rule = "not yet: recurrent layers that differ"
                raise SpecError(f"per_layer_config.{index}.{name}", None, rule=rule)
        sizes = {name: self.read.product(key) for name, key in state.fields.items()}
        build: Callable[..., MambaSpec] = getattr(MambaSpec, state.kind)
        options: dict[str, object] = {"dtype": self.state_dtype}
        # Linear attention has no convolution, and a short convolution no temporal state. vLLM's
        # Mamba1 has no rows for speculative tokens (`MambaStateShapeCalculator`).
        if state.kind not in ("linear_attention", "mamba1"):
            options["num_speculative_tokens"] = self.num_speculative_tokens
        if state.kind != "short_conv":
            options["ssm_dtype"] = self.ssm_dtype
        spec = build(**options, **sizes)
        layers = tuple(name for index in indices for name in self._named(state.layer, index))
        return KVCacheGroup(name=state.group, layers=layers, spec=spec)


def _ssm_dtype(read: ModelConfig, state: State, states: object) -> object:
    """Return the type of the temporal state in vLLM, or None for that of the conv state."""
    own = read.get(state.ssm_field) if state.ssm_field else None
    chosen = state.ssm_dtype if own is None else own
    expected = states if chosen is None else chosen
    for name in () if state.kind == "short_conv" else _SSM_FIELDS:
        given = read.get(name)
        if given is not None and dtype_name(given, name) != (expected and dtype_name(expected)):
            rule = f"SGLang reads mamba_ssm_dtype, and vLLM takes {expected}: pass ssm_dtype"
            raise SpecError(name, given, rule=rule)
    return chosen


def _load(source: ConfigSource) -> Mapping[str, object]:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise SpecError("config", source, "a dict or the path of a config.json")
    path = Path(source)
    # `Path.is_dir` raises for a name that is too long. Reading it then raises the right error.
    path = path / "config.json" if os.path.isdir(path) else path  # noqa: PTH112 - see above
    loaded = _read(path)
    # Older versions of ModelOpt write the quantization into a file of its own, which vLLM reads.
    beside = path.with_name("hf_quant_config.json")
    if loaded.get("quantization_config") is None and beside.is_file():
        loaded["quantization_config"] = _read(beside)
    return loaded


def _read(path: Path) -> dict[str, object]:
    """Return the JSON object in *path*."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError("config", str(path), f"a readable JSON file ({error})") from error
    if not isinstance(loaded, dict):
        raise SpecError("config", str(path), "a JSON object")
    return loaded


def _resolve(outer: Mapping[str, object]) -> tuple[Architecture, Mapping[str, object], str]:
    """Return the row of the table, the config of the text model, and the prefix of layer names."""
    text = outer.get("text_config")
    if not isinstance(text, Mapping):
        # An unknown class may share its model_type with a known one, but name its layers
        # differently. So model_type counts only if the config names no class.
        types = _names(outer, "model_type")
        row = _row(_names(outer, "architectures") or types, outer)
        if row.shared and types and types[0] not in row.names:
            sizes = ("num_key_value_heads", "head_dim")
            row = attrs.evolve(row, required=sizes)
        elif types and _BY_NAME.get(types[0], row) is not row:
            rule = f"not a type of {row.names[0]}: vLLM reads architectures, transformers this"
            raise SpecError("model_type", types[0], rule=rule)
        return row, outer, ""
    inner = [*_names(text, "model_type"), *_names(text, "architectures")]
    row = _row([*inner, *_names(outer, "architectures"), *_names(outer, "model_type")], outer)
    for name in _names(outer, "architectures"):
        if _BY_NAME.get(name, row) is not row:
            rule = f"the class has a language model of its own, no {row.names[0]}"
            raise SpecError("architectures", outer.get("architectures"), rule=rule)
    return row, text, "" if row.attention.startswith("language_model.") else "language_model."


def _names(config: Mapping[str, object], key: str) -> list[str]:
    value = config.get(key)
    names = value if isinstance(value, list) else [value]
    return [name for name in names if isinstance(name, str)]


def _row(names: list[str], outer: Mapping[str, object]) -> Architecture:
    for name in names:
        if name in _BY_NAME:
            return _BY_NAME[name]
    field = "architectures" if outer.get("architectures") else "model_type"
    for name in names:
        if name in NOT_YET:
            raise SpecError(field, outer.get(field), rule=f"not yet: {NOT_YET[name]}")
    known = ", ".join(architectures())
    raise SpecError(field, outer.get(field), f"one of the known architectures: {known}")
