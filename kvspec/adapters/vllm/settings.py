"""vLLM's whole configuration, read so that nothing is asked that it knows.

Law: each size comes from the one place where vLLM itself takes it from, by vLLM's own rule; what
that place leaves open is asked for by name, never assumed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.config import Config, Group, read_configs
from kvspec.adapters.vllm.engine import engine_spec
from kvspec.adapters.vllm.heads import heads_of, number_of
from kvspec.adapters.vllm.layer_info import backends_of, fp8_dtypes_of, variants_of
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.ownership.parallel import ParallelConfig, RankId

PARTITION = "VLLM_PP_LAYER_PARTITION"
"""vLLM's environment variable for layers of each pipeline stage."""

_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
"""What models call the groups of their Mamba2 layers."""


def from_vllm(
    vllm_config: Any,  # noqa: ANN401 - vLLM's class, not imported
    kv_cache_config: Any,  # noqa: ANN401 - vLLM's class, not imported
    tensors: Mapping[str, Any] | None = None,
    *,
    backends: Any = None,  # noqa: ANN401 - vLLM's classes
    variants: str | Mapping[str, str] | None = None,
    fp8_dtype: str | Mapping[str, str] | None = None,
    total_num_kv_heads: int | Mapping[str, int] | None = None,
    excluded: Iterable[str] = (),
) -> EngineSpec:
    """Return the engine that a vLLM worker belongs to; see `engine_spec`.

    *kv_cache_config*: this rank's, or with pipeline stages one of each stage, in order. *tensors*:
    what `register_kv_caches` got; if given, the kernel's block sizes are read from them.
    *backends*: where there are no layers to ask, as in vLLM's scheduler, what a worker's
    ``get_attn_backend().full_cls_name()`` says; *variants*, *fp8_dtype* beside it, as in
    `engine_spec`.
    *total_num_kv_heads*: only where vLLM has one number for layers that differ. *excluded*: as in
    `engine_spec`.

    Interleaving is read as vLLM sets it once its caches are known, so that it does not matter
    whether that has happened yet.
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
        conv_layout=os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", "SD"),
        n_groups=_mamba_groups(fields),
        backends=backends_of(fields, configs) if backends is None else backends,
        variants=variants_of(fields, configs) if variants is None else variants,
        fp8_dtype=fp8_dtypes_of(fields, configs) if fp8_dtype is None else fp8_dtype,
        excluded=excluded,
    )


def worker_rank(vllm_config: Any) -> RankId:  # noqa: ANN401 - vLLM's class, not imported
    """Return which rank of its engine a vLLM worker is: TP ranks come first, then PCP, then PP."""
    sizes = FieldReader("vllm_config", vllm_config).get("parallel_config")
    rest, tp = divmod(sizes.get("rank").size(0, least=0), sizes.get("tensor_parallel_size").size())
    pp, pcp = divmod(rest, sizes.get("prefill_context_parallel_size").size(1))
    return RankId(pp=pp, pcp=pcp, tp=tp)


def stages(num_layers: int, pp_size: int, partition: str | None = None) -> tuple[range, ...]:
    """Return the layer numbers of each pipeline stage, by vLLM's rule.

    Layers that are left over go one each to the stages before the last, from the end. *partition*:
    the value of ``VLLM_PP_LAYER_PARTITION``, layers of each stage with commas between.

    >>> stages(7, 3)
    (range(0, 2), range(2, 5), range(5, 7))
    """
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
    """Return the parallel sizes; context ranks run over PCP first, then over TP."""
    tp = sizes.get("tensor_parallel_size").size()
    pcp = sizes.get("prefill_context_parallel_size").size(1)
    dcp = sizes.get("decode_context_parallel_size").size(1)
    ranks = [[(rank * pcp + row) % dcp for rank in range(tp)] for row in range(pcp)]
    return ParallelConfig(
        tp_size=tp,
        pp_size=sizes.get("pipeline_parallel_size").size(1),
        pcp_size=pcp,
        dcp_size=dcp,
        context_ranks=ranks if pcp > 1 else None,
    )


def _interleave(fields: FieldReader, configs: Sequence[Config]) -> int:
    """Return the tokens of one context rank before the next, as vLLM will have set them."""
    sizes, transfer = fields.get("parallel_config"), fields.get("kv_transfer_config")
    if sizes.get("decode_context_parallel_size").size(1) == 1:
        return 1
    configured = sizes.get("cp_kv_cache_interleave_size").size(1)
    if transfer.value is None:
        return configured
    older = sizes.get("dcp_kv_cache_interleave_size").size(1)
    configured = older if older > 1 else configured
    left_open = sizes.get("_allow_auto_resolve_cp_interleave_size").value
    if not left_open or "NixlConnector" not in _connectors(transfer):
        return configured
    groups = [group for config in configs for group in config.groups]
    return min(group.spec.get("block_size").size() for group in groups)


def _connectors(transfer: FieldReader) -> list[object]:
    """Return the names of the connectors, also of those inside a MultiConnector."""
    name = transfer.get("kv_connector").value
    if name != "MultiConnector":
        return [name]
    more = transfer.get("kv_connector_extra_config").value
    children = more.get("connectors", []) if isinstance(more, Mapping) else []
    return [child.get("kv_connector") for child in children if isinstance(child, Mapping)]


def _layout(fields: FieldReader, configs: Sequence[Config]) -> str:
    """Return the layout that the engine core resolved."""
    for place in (configs[0].fields, fields.get("cache_config")):
        field = place.get("kv_cache_layout")
        if field.value is not None:
            name = getattr(field.value, "name", field.value)
            return name if isinstance(name, str) else str(name)
    raise SpecError("kv_cache_layout", None, "the layout that vLLM's engine core has resolved")


def _kernel_blocks(configs: Sequence[Config], tensors: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of a block in memory, by layer of attention: one number in a group."""
    found: dict[str, int] = {}
    for groups in zip(*(config.groups for config in configs), strict=False):
        for config, group in zip(configs, groups, strict=True):
            here = [layer for layer in group.layers if layer in tensors]
            if here and type(group.spec_of(here[0]).value).__name__ != "MambaSpec":
                size = _kernel_block(config, group, here[0], tensors)
                group_layers = (layer for other in groups for layer in other.layers)
                found |= dict.fromkeys(group_layers, size)
    return found


def _kernel_block(config: Config, group: Group, layer: str, tensors: Mapping[str, Any]) -> int:
    """Return the tokens of a block of *layer*'s tensor."""
    blocks, size = config.fields.get("num_blocks").size(), group.spec.get("block_size").size()
    shape = FieldReader(f"tensors[{layer!r}]", tensors[layer]).get("shape").value
    kernel_blocks_per_block, rest = divmod(shape[0], blocks) if shape else (0, 1)
    if rest or not kernel_blocks_per_block or size % kernel_blocks_per_block:
        wanted = f"a multiple of the {blocks} blocks of {size} tokens that the config has"
        raise SpecError(f"tensors[{layer!r}].shape", shape, wanted)
    return size // kernel_blocks_per_block


def _mamba_groups(fields: FieldReader) -> int | None:
    """Return the groups of the model's Mamba2 layers, whatever the model calls them."""
    text = fields.get("model_config").get("hf_text_config")
    return next((n for n in (text.get(name).size_or_none() for name in _GROUPS) if n), None)


def _check_stages(fields: FieldReader, configs: Sequence[Config]) -> None:
    """Check that each stage's config has the layers that vLLM's rule gives the stage."""
    if len(configs) == 1:
        return
    count = fields.get("model_config").call("get_total_num_hidden_layers").size()
    expected = stages(count, len(configs), os.environ.get(PARTITION))
    for stage, (config, numbers) in enumerate(zip(configs, expected, strict=True)):
        for layer in config.layers:
            number = number_of(layer)
            if number is not None and number < count and number not in numbers:
                wanted = f"layers {numbers.start}..{numbers.stop - 1}: those of stage {stage}"
                raise SpecError(f"kv_cache_config[{stage}]", layer, wanted)
