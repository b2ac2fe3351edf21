"""Read vLLM's description of one rank's cache as the `EngineSpec` of the whole engine.

See `kvspec.adapters.vllm` for how this works, with an example.

Invariant: nothing is guessed. vLLM's classes are recognised by name. The sizes of the model are
computed from those of a rank. Then kvspec computes the rank's share of the model, which must equal
the sizes that vLLM reports. Each page must have as many bytes as vLLM reports. Otherwise
`SpecError` names the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from kvspec.adapters.vllm.backends import Backends
from kvspec.adapters.vllm.config import (
    Config,
    Group,
    excluded_layers,
    given_heads,
    read_configs,
)
from kvspec.adapters.vllm.specs import RankLayer, RankSpecs
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.engines.letters import layout_letters
from kvspec.errors import SpecError
from kvspec.inputs import instance
from kvspec.ownership.parallel import ParallelConfig
from kvspec.specs import KeyContent, LayerSpec, UniformTypeKVCacheSpecs

T = TypeVar("T")

# vLLM's block tables contain this id at places without a block, such as before a window.
NULL_BLOCK = 0


def engine_spec(
    config: Any,  # noqa: ANN401 - vLLM's class, not imported
    *,
    parallel: ParallelConfig | None = None,
    total_num_kv_heads: int | Mapping[str, int] | None = None,
    layout: str = "LBHNC",
    tp_rank: int = 0,
    kernel_block_size: int | Mapping[str, int] | None = None,
    conv_layout: str | None = None,
    n_groups: int | None = None,
    excluded: Iterable[str] = (),
    backends: Any = None,  # noqa: ANN401 - vLLM's classes
    variants: str | Mapping[str, str | int] | None = None,
    fp8_dtype: str | Mapping[str, str] | None = None,
    key_content: KeyContent | Mapping[str, KeyContent] | None = None,
    scales: Mapping[str, tuple[float, float]] | None = None,
) -> EngineSpec:
    """Return the engine that owns vLLM's `KVCacheConfig` of one rank.

    The groups are called ``group0``, ``group1``, ... in vLLM's order. If the layers of vLLM's group
    have specs of several classes, each further class is a group of its own with the same block
    table, such as ``group0.MLAAttentionSpec``. In a vLLM worker, use `from_vllm`, which reads the
    arguments from vLLM's configuration.

    Args:
        config: The `KVCacheConfig` of the rank. With pipeline stages, a sequence of one config for
            each stage. Only `kv_cache_groups` and `kv_cache_tensors` are read.
        parallel: The parallel sizes of the engine. One rank by default.
        total_num_kv_heads: The KV heads of the model: one number, or one for each layer. Required
            if TP is larger than 1 and a layer has KV heads.
        layout: The name of vLLM's layout. For older caches with separate planes of keys and
            values, letters with a K, such as ``LKBNHC``.
        tp_rank: The TP rank that *config* belongs to.
        kernel_block_size: Tokens of a block in memory, if the blocks of the attention kernel are
            smaller than those of the block table. One number, or one for each layer.
        conv_layout: The order of conv states: ``DS`` (dimension first) or ``SD`` (row first).
            Required if the shapes allow both.
        n_groups: The groups of the model's Mamba2 layers. Required if a rank holds one group.
        excluded: Names of layers that do not move. Layers of groups that vLLM does not transfer
            are excluded, too.
        backends: The attention backend of each layer, by layer name, or one backend for all layers.
            A backend is the result of vLLM's ``get_attn_backend()``, or the ``full_cls_name()`` of
            that as a tuple or a dotted name. For layers that attend to chunks, vLLM makes a class
            of its own, whose name is unknown: pass the class. Required for each layer with
            attention, because only the backend determines the order inside a page (see `FORMATS`).
        variants: The property that a backend's name leaves open, by layer name, or one for all
            layers. CPU attention: the layer's ``isa``. Indexers: ``shuffled`` if
            `uses_shuffled_layout` is True, ``mx`` if `mqa_logits_use_mx_scales()` is True, else
            ``rows``. TurboQuant: ``scales apart`` if
            `_soa_store` is True. If not, ``e4b15`` if the keys have that type, else ``rows``. Rings
            of GLM-5.3 and Qwen4: the number of tokens that the layer compresses together.
            Recurrent states, only by layer name: the type of device whose kernels write the
            state, ``cuda`` by default.
        fp8_dtype: The element type of caches that a spec describes as fp8 and ``uint8``, such as
            ``float8_e4m3fn``. One name, or one for each layer. Latents and index keys of ``uint8``
            are those of e4m3fn unless it is ``float8_e4m3fnuz``, as on older AMD GPUs.
        key_content: The meaning of the keys, by layer name, or one for all layers. None if it is
            not stated: then the other engine must not state it either. If it is a mapping, each
            layer with keys must be in it.
        scales: The scale of keys and the scale of values of quantised caches, by layer name.

    Returns:
        The engine, with the names of vLLM's layers.

    Raises:
        SpecError: If a spec class or a backend is unknown, if a required argument is missing, or
            if the sizes of the rank contradict those of the model.

    >>> class Spec:
    ...     block_size, head_size, dtype = 16, 512, "bfloat16"
    >>> class Group:
    ...     layer_names = ["model.layers.0.self_attn.attn"]
    ...     kv_cache_spec = type("MLAAttentionSpec", (Spec,), {})()
    >>> class KVCacheConfig:
    ...     kv_cache_groups = [Group()]
    >>> backend = "vllm.v1.attention.backends.mla.flashmla.FlashMLABackend"
    >>> engine = engine_spec(KVCacheConfig(), backends=backend)
    >>> [(part.name, part.content_bytes) for part in engine.group("group0").spec.parts]
    [('latent', 1024)]
    """
    parallel = ParallelConfig() if parallel is None else parallel
    configs = read_configs(config, instance("parallel", parallel, ParallelConfig))
    specs = RankSpecs(
        parallel=parallel,
        tp_rank=tp_rank,
        heads=given_heads(total_num_kv_heads, configs),
        layout=layout_letters(layout),
        kernel_block_size=kernel_block_size,
        conv_layout=conv_layout,
        n_groups=n_groups,
        backends=Backends(backends, variants),
        fp8_dtype=fp8_dtype,
        key_content=key_content,
        scales={} if scales is None else scales,
    )
    groups = _groups(configs, specs, excluded_layers(excluded, configs))
    return EngineSpec(
        groups=groups,
        parallel=_staged(parallel, configs),
        layout=layout,
        null_block=NULL_BLOCK,
    )


def _staged(parallel: ParallelConfig, configs: Sequence[Config]) -> ParallelConfig:
    """Return *parallel* with the stages of the configs, unless it defines its own."""
    if parallel.pp_size == 1 or parallel.stages is not None:
        return parallel
    return attrs.evolve(parallel, stages=tuple(config.layers for config in configs))


def _groups(
    configs: Sequence[Config], specs: RankSpecs, excluded: frozenset[str]
) -> tuple[KVCacheGroup, ...]:
    groups: list[KVCacheGroup] = []
    # The stages have the same groups in the same order, but a stage may lack the last ones.
    for index in range(max(len(config.groups) for config in configs)):
        members = [config.groups[index] for config in configs if index < len(config.groups)]
        # A group without a cache is left out, and no other group gets its number.
        groups.extend(_split(f"group{index}", members, specs, excluded))
    return tuple(groups)


def _split(
    name: str, members: Sequence[Group], specs: RankSpecs, excluded: frozenset[str]
) -> Iterator[KVCacheGroup]:
    """Yield the groups that one group of vLLM becomes: one for each class of its layers' specs.

    It yields nothing if the cache of every layer is unknown. *members* has the group's member on
    each stage.
    """
    layers: dict[str, RankLayer] = {}
    excluded_here: list[str] = []
    for member in members:
        for layer in member.layers:
            spec = member.spec_of(layer)
            left_out = layer in excluded or not member.transferred
            # A layer that does not move may be of any kind. If its kind is known, it stays in
            # the engine as an excluded layer.
            if left_out and not specs.knows(layer, spec):
                continue
            layers[layer] = specs.read(layer, spec)
            if left_out:
                excluded_here.append(layer)
    # vLLM puts layers into one group if their classes have a base in common: layers with heads, and
    # layers with one key for each token. Their parts have nothing in common but the block table.
    classes = dict.fromkeys(type(read.spec) for read in layers.values())
    uniform = any(member.uniform for member in members)
    for number, cls in enumerate(classes):
        of_class = {layer: read for layer, read in layers.items() if type(read.spec) is cls}
        here = tuple(layer for layer in excluded_here if layer in of_class)
        part = f"{name}.{cls.__name__}" if number else name
        yield _group(part, of_class, here, uniform=uniform)


def _group(
    name: str, layers: Mapping[str, RankLayer], excluded: tuple[str, ...], *, uniform: bool
) -> KVCacheGroup:
    """Return the group of *layers*, whose specs have one class."""

    def common(field: str) -> Any:  # noqa: ANN401 - of the field's type
        return _same(name, field, {layer: getattr(read, field) for layer, read in layers.items()})

    # Layers with equal specs on a rank may differ in the model: in their heads, if each rank has
    # one head, or in the meaning of their keys, if some have no positions.
    uniform |= len({_of_layer(read.spec) for read in layers.values()}) > 1
    return KVCacheGroup(
        name=name,
        layers=tuple(layers),
        spec=_uniform(layers) if uniform else common("spec"),
        layout=common("layout"),
        kernel_block_size=common("kernel_block_size"),
        context_sharded=common("context_sharded"),
        excluded=excluded,
    )


def vllm_group(name: str) -> str:
    """Return the name of vLLM's group that the group called *name* is, or is a class of.

    >>> vllm_group("group0.MLAAttentionSpec")
    'group0'
    """
    return name.partition(".")[0]


def _of_layer(spec: LayerSpec) -> tuple[object, ...]:
    """Return the fields of *spec* that do not follow from vLLM's spec of a rank."""
    names = ("key_content", "scales_digest", "total_num_kv_heads")
    return tuple(getattr(spec, name, None) for name in names)


def _uniform(layers: Mapping[str, RankLayer]) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(specs={layer: read.spec for layer, read in layers.items()})


def _same(name: str, field: str, values: Mapping[str, T]) -> T:
    """Return the value that all layers of group *name* have in common."""
    first_layer, first = next(iter(values.items()))
    for layer, value in values.items():
        if value != first:
            wanted = f"{first!r}, as {first_layer} has in the same group"
            raise SpecError(f"{name}[{layer!r}].{field}", value, wanted)
    return first
