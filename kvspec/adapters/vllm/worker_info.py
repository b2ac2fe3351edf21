"""What the workers of one engine tell each other, so that each can describe all of it.

Law: a worker knows the layers of its own pipeline stage and asks nobody about them; all of an
engine describe it alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.config import read_config
from kvspec.adapters.vllm.layer_info import constructed_layers, fp8_dtypes_of, variants_of
from kvspec.adapters.vllm.settings import from_vllm, worker_rank
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import sequence


@attrs.frozen(kw_only=True)
class WorkerInfo:
    """One worker's `KVCacheConfig`, and what its layers say of their pages, as `engine_spec` does.

    It pickles, as vLLM's own config does.
    """

    config: Any
    backends: Mapping[str, tuple[str, ...]]
    variants: Mapping[str, Any]
    fp8_dtypes: Mapping[str, str]

    @staticmethod
    def of(vllm_config: Any, kv_cache_config: Any) -> WorkerInfo:  # noqa: ANN401 - vLLM's classes
        """Return what a worker with these configs tells."""
        fields, config = (
            FieldReader("vllm_config", vllm_config),
            read_config(FieldReader("", kv_cache_config)),
        )
        return WorkerInfo(
            config=kv_cache_config,
            backends={
                name: tuple(layer.call("get_attn_backend").call("full_cls_name").value)
                for name, layer in constructed_layers(fields, [config]).items()
            },
            variants=variants_of(fields, [config]),
            fp8_dtypes=fp8_dtypes_of(fields, [config]),
        )


def whole_engine(
    vllm_config: Any,  # noqa: ANN401 - vLLM's class, not imported
    workers: Sequence[WorkerInfo],
    tensors: Mapping[str, Any],
) -> EngineSpec:
    """Return the engine of a worker, from what all of its workers have *workers*, in order of rank.

    *tensors*: the worker's own, as `register_kv_caches` got them. The layers of each stage are as
    its first worker with the same TP rank tells.
    """
    sizes, rank = (
        FieldReader("vllm_config", vllm_config).get("parallel_config"),
        worker_rank(vllm_config),
    )
    column = sizes.get("tensor_parallel_size").size()
    column *= sizes.get("prefill_context_parallel_size").size(1)
    count = column * sizes.get("pipeline_parallel_size").size(1)
    everybody = sequence("workers", workers, "what workers tell")
    if len(everybody) != count:
        raise SpecError("workers", f"{len(everybody)} workers", f"all {count} of the engine")
    stages: Sequence[WorkerInfo] = everybody[rank.tp :: column]
    return from_vllm(
        vllm_config,
        [each.config for each in stages],
        tensors,
        backends={name: found for each in stages for name, found in each.backends.items()},
        variants={name: found for each in stages for name, found in each.variants.items()},
        fp8_dtype={name: found for each in stages for name, found in each.fp8_dtypes.items()},
    )
