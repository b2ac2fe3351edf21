"""The facts that the workers of one vLLM engine exchange, so that each can describe the engine.

A worker has constructed only the layers of its own pipeline stage. But each worker needs the same
`EngineSpec` of the whole engine.

Invariant: the facts about a layer come from a worker of the layer's own stage. So all workers of an
engine build equal specs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvspec.adapters.attention_modules import agreed_key_content
from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.backends import full_name
from kvspec.adapters.vllm.config import read_config
from kvspec.adapters.vllm.key_contents import key_contents_of, scales_of
from kvspec.adapters.vllm.layer_info import backends_of, fp8_dtypes_of, variants_of
from kvspec.adapters.vllm.settings import from_vllm, worker_rank
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import sequence
from kvspec.specs import KeyContent


@attrs.frozen(kw_only=True)
class WorkerInfo:
    """One worker's `KVCacheConfig` and the facts about its layers.

    Workers send it to each other pickled.

    Attributes:
        config: The worker's `KVCacheConfig`.
        backends: The name of the attention backend, by layer (see `full_name`).
        variants: The variants, by layer (see `engine_spec`).
        fp8_dtypes: The fp8 types, by layer (see `engine_spec`).
        key_contents: The meanings of the keys, by layer (see `engine_spec`).
        scales: The scales of keys and values, by layer (see `engine_spec`).
    """

    config: Any
    backends: Mapping[str, str]
    variants: Mapping[str, Any]
    fp8_dtypes: Mapping[str, str]
    key_contents: Mapping[str, KeyContent]
    scales: Mapping[str, tuple[float, float]]

    @staticmethod
    def of(vllm_config: Any, kv_cache_config: Any) -> WorkerInfo:  # noqa: ANN401 - vLLM's classes
        """Return the facts of the worker with these configs."""
        fields, config = (
            FieldReader("vllm_config", vllm_config),
            read_config(FieldReader("", kv_cache_config)),
        )
        return WorkerInfo(
            config=kv_cache_config,
            # Names, not classes: the receiving worker may lack the module of a class.
            backends={
                name: full_name(f"backends[{name!r}]", backend)
                for name, backend in backends_of(fields, [config]).items()
            },
            variants=variants_of(fields, [config]),
            fp8_dtypes=fp8_dtypes_of(fields, [config]),
            key_contents=key_contents_of(fields, [config]),
            scales=scales_of(fields, [config]),
        )


def whole_engine(
    vllm_config: Any,  # noqa: ANN401 - vLLM's class, not imported
    workers: Sequence[WorkerInfo],
    tensors: Mapping[str, Any],
    key_content: KeyContent | None = None,
) -> EngineSpec:
    """Return the engine of a worker, from the facts of all its workers.

    Args:
        vllm_config: vLLM's `VllmConfig` of this worker.
        workers: The facts of all workers of the engine, in order of rank.
        tensors: The tensors that this worker's `register_kv_caches` received.
        key_content: The meaning of the keys of all layers. By default it is that of each layer in
            *workers*, and each layer with keys must have one. It must not contradict them.

    Returns:
        The engine. The layers of each stage come from the stage's first worker with this worker's
        TP rank.

    Raises:
        SpecError: If *workers* has another length than the engine has workers, if *key_content*
            contradicts the modules of a layer, or for the reasons of `from_vllm`.
    """
    sizes, rank = (
        FieldReader("vllm_config", vllm_config).get("parallel_config"),
        worker_rank(vllm_config),
    )
    # vLLM numbers workers over TP, then PCP, then PP. So the stages are this many ranks apart.
    column = sizes.get("tensor_parallel_size").size()
    column *= sizes.get("prefill_context_parallel_size").size(1)
    count = column * sizes.get("pipeline_parallel_size").size(1)
    all_workers = sequence("workers", workers, "WorkerInfo objects")
    if len(all_workers) != count:
        raise SpecError("workers", f"{len(all_workers)} workers", f"all {count} of the engine")
    stages: Sequence[WorkerInfo] = all_workers[rank.tp :: column]
    contents = {name: value for stage in stages for name, value in stage.key_contents.items()}
    for name, content in contents.items():
        agreed = agreed_key_content(f"key_content[{name!r}]", key_content, content)
        contents[name] = agreed or content
    backends = {name: value for stage in stages for name, value in stage.backends.items()}
    if key_content is not None:
        # The modules of some layers have determined more, such as the angles of the rotation.
        contents = dict.fromkeys(backends, key_content) | contents
    return from_vllm(
        vllm_config,
        [stage.config for stage in stages],
        tensors,
        backends=backends,
        variants={name: value for stage in stages for name, value in stage.variants.items()},
        fp8_dtype={name: value for stage in stages for name, value in stage.fp8_dtypes.items()},
        key_content=contents,
        scales={name: value for stage in stages for name, value in stage.scales.items()},
    )
