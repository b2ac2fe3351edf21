"""Read an engine from vLLM's whole configuration, so that the caller passes almost nothing.

Invariant: each size comes from the place from which vLLM itself reads it, by the rule of vLLM. If
that place leaves a size open, the caller must pass the size. It is never assumed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.config import Config, Group, read_configs
from kvspec.adapters.vllm.drafts import is_of_draft, number_of
from kvspec.adapters.vllm.engine import engine_spec
from kvspec.adapters.vllm.heads import heads_of
from kvspec.adapters.vllm.key_contents import scales_of
from kvspec.adapters.vllm.layer_info import backends_of, fp8_dtypes_of, variants_of
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.specs import KeyContent

# vLLM's environment variable for the number of layers of each pipeline stage.
PARTITION = "VLLM_PP_LAYER_PARTITION"

# The names that models give to the number of groups of their Mamba2 layers.
_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")


def from_vllm(
    vllm_config: Any,  # noqa: ANN401 - vLLM's class, not imported
    kv_cache_config: Any,  # noqa: ANN401 - vLLM's class, not imported
    tensors: Mapping[str, Any] | None = None,
    *,
    backends: Any = None,  # noqa: ANN401 - vLLM's classes
    variants: str | Mapping[str, str | int] | None = None,
    fp8_dtype: str | Mapping[str, str] | None = None,
    total_num_kv_heads: int | Mapping[str, int] | None = None,
    key_content: KeyContent | Mapping[str, KeyContent] | None = None,
    scales: Mapping[str, tuple[float, float]] | None = None,
) -> EngineSpec:
    """Return the engine that a vLLM worker belongs to.

    vLLM may change its interleave size after the caches are known. This function applies the same
    rule, so it returns the same engine before and after that change.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: The `KVCacheConfig` of this rank. With pipeline stages, one for each stage,
            in order.
        tensors: The tensors that `register_kv_caches` received. If passed, the block sizes of the
            attention kernels are read from them.
        backends: See `engine_spec`. By default they are read from the layers in *vllm_config*.
            vLLM's scheduler has no layers, so there the caller passes the names from a worker.
        variants: See `engine_spec`. Read from the layers by default.
        fp8_dtype: See `engine_spec`. Read from the layers and the platform by default.
        total_num_kv_heads: See `engine_spec`. Required only if vLLM has one number of KV heads for
            layers that may differ.
        key_content: See `engine_spec`. Not stated by default. A worker reads it from its modules
            with `WorkerInfo`.
        scales: See `engine_spec`. Read from the layers by default.

    Returns:
        The engine, as `engine_spec` returns it.

    Raises:
        SpecError: If a field is missing or unexpected, or a layer cannot be described exactly.
    """
    fields = FieldReader("vllm_config", vllm_config)
    sizes = fields.get("parallel_config")
    parallel = _parallel(sizes)
    configs = read_configs(kv_cache_config, parallel)
    _check_stages(fields, configs)
    heads = total_num_kv_heads
    return engine_spec(
        kv_cache_config,
        parallel=attrs.evolve(parallel, interleave_size=_interleave(fields, configs)),
        total_num_kv_heads=heads_of(fields, configs, parallel) if heads is None else heads,
        layout=_layout(fields, configs),
        tp_rank=sizes.get("rank").size(0, least=0) % parallel.tp_size,
        kernel_block_size=None if tensors is None else _kernel_blocks(configs, tensors),
        # vLLM reads the order of conv states from this variable, too. It has no field for it.
        conv_layout=os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", "SD"),
        n_groups=_mamba_groups(fields),
        backends=backends_of(fields, configs) if backends is None else backends,
        variants=variants_of(fields, configs) if variants is None else variants,
        fp8_dtype=fp8_dtypes_of(fields, configs) if fp8_dtype is None else fp8_dtype,
        key_content=key_content,
        scales=scales_of(fields, configs) if scales is None else scales,
    )


def worker_rank(vllm_config: Any) -> RankId:  # noqa: ANN401 - vLLM's class, not imported
    """Return the rank of a vLLM worker in its engine.

    vLLM numbers the workers over TP first, then over PCP, then over PP.

    Args:
        vllm_config: vLLM's `VllmConfig` of the worker.

    Returns:
        The rank.

    Raises:
        SpecError: If a parallel size is missing or unexpected.

    >>> from types import SimpleNamespace
    >>> sizes = SimpleNamespace(rank=5, tensor_parallel_size=4)
    >>> worker_rank(SimpleNamespace(parallel_config=sizes))
    RankId(pp=1, pcp=0, tp=1)
    """
    sizes = FieldReader("vllm_config", vllm_config).get("parallel_config")
    rest, tp = divmod(sizes.get("rank").size(0, least=0), sizes.get("tensor_parallel_size").size())
    pp, pcp = divmod(rest, sizes.get("prefill_context_parallel_size").size(1))
    return RankId(pp=pp, pcp=pcp, tp=tp)


def stages(num_layers: int, pp_size: int, partition: str | None = None) -> tuple[range, ...]:
    """Return the layer numbers of each pipeline stage, by vLLM's rule.

    If the layers do not divide evenly, some stages get one more layer: the second last stage, then
    the one before it, and so on. The last stage gets none.

    Args:
        num_layers: The layers of the model.
        pp_size: The pipeline stages.
        partition: The value of ``VLLM_PP_LAYER_PARTITION``: the layers of each stage, separated by
            commas.

    Returns:
        The layer numbers of each stage.

    Raises:
        SpecError: If *partition* has another number of stages, or another sum.

    >>> stages(7, 3)
    (range(0, 2), range(2, 5), range(5, 7))
    """
    # vLLM gives the last stage no extra layer, because that stage often has the final norm.
    least, rest = divmod(positive_int("num_layers", num_layers), positive_int("pp_size", pp_size))
    counts = [least + (pp_size - 1 - rest <= stage < pp_size - 1) for stage in range(pp_size)]
    if partition is not None:
        stage_sizes = partition.split(",")
        counts = [int(size) if size.strip().isdecimal() else -1 for size in stage_sizes]
        if len(counts) != pp_size or min(counts) < 0 or sum(counts) != num_layers:
            wanted = f"{pp_size} numbers of layers with the sum {num_layers}"
            raise SpecError(PARTITION, partition, wanted)
    starts = [sum(counts[:stage]) for stage in range(pp_size + 1)]
    return tuple(range(starts[stage], starts[stage + 1]) for stage in range(pp_size))


def _parallel(sizes: FieldReader) -> ParallelConfig:
    """Return the parallel sizes of the engine."""
    tp = sizes.get("tensor_parallel_size").size()
    pcp = sizes.get("prefill_context_parallel_size").size(1)
    dcp = sizes.get("decode_context_parallel_size").size(1)
    # vLLM numbers context ranks over PCP first, then over TP. kvspec's default is TP only.
    ranks = [[(rank * pcp + row) % dcp for rank in range(tp)] for row in range(pcp)]
    return ParallelConfig(
        tp_size=tp,
        pp_size=sizes.get("pipeline_parallel_size").size(1),
        pcp_size=pcp,
        dcp_size=dcp,
        context_ranks=ranks if pcp > 1 else None,
    )


def _interleave(fields: FieldReader, configs: Sequence[Config]) -> int:
    """Return the interleave size: tokens of one context rank before those of the next."""
    sizes, transfer = fields.get("parallel_config"), fields.get("kv_transfer_config")
    if sizes.get("decode_context_parallel_size").size(1) == 1:
        return 1
    configured = sizes.get("cp_kv_cache_interleave_size").size(1)
    if transfer.value is None:
        return configured
    # The older name of the field wins if it is set.
    older = sizes.get("dcp_kv_cache_interleave_size").size(1)
    configured = older if older > 1 else configured
    # For its NIXL connector, vLLM replaces a size that the user left open by the block size. This
    # code repeats the rule, because vLLM does so only after the caches are known. vLLM 0.33 tests
    # for the name "NixlConnector" alone, so "NixlPullConnector" keeps the configured size.
    left_open = sizes.get("_allow_auto_resolve_cp_interleave_size").value
    if not left_open or "NixlConnector" not in _connectors(transfer):
        return configured
    groups = [group for config in configs for group in config.groups]
    return min(group.spec.get("block_size").size() for group in groups)


def _connectors(transfer: FieldReader) -> list[object]:
    """Return the name of the connector, or the names inside a MultiConnector."""
    name = transfer.get("kv_connector").value
    if name != "MultiConnector":
        return [name]
    more = transfer.get("kv_connector_extra_config").value
    children = more.get("connectors", []) if isinstance(more, Mapping) else []
    return [child.get("kv_connector") for child in children if isinstance(child, Mapping)]


def _layout(fields: FieldReader, configs: Sequence[Config]) -> str:
    """Return the layout that vLLM's engine core has resolved."""
    # Versions of vLLM keep it in the cache config of the rank, or in that of the engine.
    for place in (configs[0].fields, fields.get("cache_config")):
        field = place.get("kv_cache_layout")
        if field.value is not None:
            name = getattr(field.value, "name", field.value)
            return name if isinstance(name, str) else str(name)
    raise SpecError("kv_cache_layout", None, "the layout that vLLM's engine core has resolved")


def _kernel_blocks(configs: Sequence[Config], tensors: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of a block in memory, for each layer with attention."""
    sizes: dict[str, int] = {}
    for groups in zip(*(config.groups for config in configs), strict=False):
        for config, group in zip(configs, groups, strict=True):
            here = [layer for layer in group.layers if layer in tensors]
            if here and type(group.spec_of(here[0]).value).__name__ != "MambaSpec":
                size = _kernel_block(config, group, here[0], tensors)
                # A worker has only the tensors of its own stage. The layers of one group have the
                # same kernel blocks on all stages.
                group_layers = (layer for member in groups for layer in member.layers)
                sizes |= dict.fromkeys(group_layers, size)
    return sizes


def _kernel_block(config: Config, group: Group, layer: str, tensors: Mapping[str, Any]) -> int:
    """Return the tokens of a block of *layer*'s tensor.

    A tensor of 40 blocks, for 10 blocks of 64 tokens in the config, has blocks of 16 tokens.
    """
    blocks, size = config.fields.get("num_blocks").size(), group.spec.get("block_size").size()
    shape = FieldReader(f"tensors[{layer!r}]", tensors[layer]).get("shape").value
    kernel_blocks_per_block, rest = divmod(shape[0], blocks) if shape else (0, 1)
    if rest or not kernel_blocks_per_block or size % kernel_blocks_per_block:
        wanted = f"a multiple of the {blocks} blocks of {size} tokens in the config"
        raise SpecError(f"tensors[{layer!r}].shape", shape, wanted)
    return size // kernel_blocks_per_block


def _mamba_groups(fields: FieldReader) -> int | None:
    """Return the groups of the model's Mamba2 layers, or None."""
    text = fields.get("model_config").get("hf_text_config")
    return next((n for n in (text.get(name).size_or_none() for name in _GROUPS) if n), None)


def _check_stages(fields: FieldReader, configs: Sequence[Config]) -> None:
    """Raise `SpecError` if a config has a layer that vLLM's rule gives to another stage."""
    if len(configs) == 1:
        return
    count = fields.get("model_config").call("get_total_num_hidden_layers").size()
    expected = stages(count, len(configs), os.environ.get(PARTITION))
    for stage, (config, numbers) in enumerate(zip(configs, expected, strict=True)):
        for layer in config.layers:
            number = number_of(layer)
            # The rule does not cover the layers of a draft, which are all on the last stage.
            if number is not None and not is_of_draft(layer, count) and number not in numbers:
                wanted = f"layers {numbers.start}..{numbers.stop - 1}: those of stage {stage}"
                raise SpecError(f"kv_cache_config[{stage}]", layer, wanted)
