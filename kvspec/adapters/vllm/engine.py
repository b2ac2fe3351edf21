"""vLLM's description of a rank's cache, read as an engine.

Law: nothing of vLLM is imported and nothing is guessed. Kinds are known by class name, a rank's
sizes are multiplied back to the model's and held against what the rank would be sharded, and every
page comes out with as many bytes as vLLM's own; whatever does not is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from kvspec.specs import UniformTypeKVCacheSpecs

T = TypeVar("T")

NULL_BLOCK = 0
"""The id that stands in vLLM's block tables where no block is."""


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
    variants: str | Mapping[str, str] | None = None,
    fp8_dtype: str | Mapping[str, str] | None = None,
) -> EngineSpec:
    """Return the engine that vLLM's `KVCacheConfig` of one rank belongs to.

    *config*: its `kv_cache_groups` and `kv_cache_tensors` are read; with pipeline stages, a
    sequence of one config for each stage. What it does not know: *parallel*, the engine's sizes;
    *total_num_kv_heads* of the model, for all layers or by layer (may be left out at TP 1);
    *layout*, the name of vLLM's layout, or with planes for older caches (``LKBNHC``); *tp_rank*,
    the rank that the config is of; *kernel_block_size*, tokens of a block in memory where the
    attention kernel's blocks are finer than the table's, for all layers or by layer; *conv_layout*,
    ``DS`` if conv states lie dimension first, ``SD`` if row first, needed where their shapes allow
    both; *n_groups* of Mamba2, needed where a rank holds one group.
    Layers of *excluded*, and of groups that vLLM does not transfer, are in no plan. *backends*: of
    each layer of attention what its ``get_attn_backend()`` returns, or the ``full_cls_name()`` of
    that as a tuple or a dotted name; by layer, or one for all. Where a layer has none it is
    refused: the backend alone knows the order inside a page (`FORMATS`). *variants*: what a
    backend's name leaves open, for all layers or by layer: of CPU attention the layer's ``isa``, of
    an indexer ``shuffled`` where `uses_shuffled_layout`, else ``rows``, of TurboQuant ``scales
    apart`` where its `_soa_store`, else ``rows``, or ``e4b15`` if keys are. By layer alone: of a
    state, the type of device whose kernels write it, ``cuda`` unless given. *fp8_dtype*: the
    elements of a cache that a spec calls fp8 and ``uint8``, as ``float8_e4m3fn``; for all layers or
    by layer.

    The groups are called ``group0``, ``group1``, ... in vLLM's order.
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
    )
    groups = _groups(configs, specs, excluded_layers(excluded, configs))
    return EngineSpec(
        groups=groups,
        parallel=_staged(parallel, configs),
        layout=layout,
        null_block=NULL_BLOCK,
    )


def _staged(parallel: ParallelConfig, configs: Sequence[Config]) -> ParallelConfig:
    """Return *parallel* with the stages that the configs show, unless it names its own."""
    if parallel.pp_size == 1 or parallel.stages is not None:
        return parallel
    return attrs.evolve(parallel, stages=tuple(each.layers for each in configs))


def _groups(
    configs: Sequence[Config], specs: RankSpecs, excluded: frozenset[str]
) -> tuple[KVCacheGroup, ...]:
    found: list[KVCacheGroup] = []
    for index in range(max(len(each.groups) for each in configs)):
        members = [each.groups[index] for each in configs if index < len(each.groups)]
        group = _group(f"group{index}", members, specs, excluded)
        found += [group] if group is not None else []
    return tuple(found)


def _group(
    name: str, members: Sequence[Group], specs: RankSpecs, excluded: frozenset[str]
) -> KVCacheGroup | None:
    """Return the group whose parts on each stage are *members*; None if it holds no cache."""
    found: dict[str, RankLayer] = {}
    out: list[str] = []
    for member in members:
        for layer in member.layers:
            given = member.spec_of(layer)
            left_out = layer in excluded or not member.transferred
            if left_out and not specs.knows(layer, given):
                continue
            found[layer] = specs.read(layer, given)
            out += [layer] if left_out else []
    if not found:
        return None

    def common(field: str) -> Any:  # noqa: ANN401 - of the field's type
        return _one(name, field, {layer: getattr(read, field) for layer, read in found.items()})

    uniform = any(member.uniform for member in members)
    return KVCacheGroup(
        name=name,
        layers=tuple(found),
        spec=_uniform(found) if uniform else common("spec"),
        layout=common("layout"),
        kernel_block_size=common("kernel_block_size"),
        context_sharded=common("context_sharded"),
        excluded=tuple(out),
    )


def _uniform(found: Mapping[str, RankLayer]) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(specs={layer: read.spec for layer, read in found.items()})


def _one(name: str, field: str, found: Mapping[str, T]) -> T:
    first_layer, first = next(iter(found.items()))
    for layer, each in found.items():
        if each != first:
            wanted = f"{first!r}, as {first_layer} has: one {field} in a group"
            raise SpecError(f"{name}[{layer!r}].{field}", each, wanted)
    return first
