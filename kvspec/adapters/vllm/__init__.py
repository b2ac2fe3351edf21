"""Describe a vLLM engine: its specs, its memory and its block tables.

How it works:
    vLLM describes the cache of each rank by a `KVCacheConfig`: groups of layers, each with a spec.
    A transfer needs three things, and each has its function:

        `engine_spec`     the specs of the engine, with the sizes of the model
        `rank_cache`      the addresses and strides of the tensors of one rank
        `block_tables`    the block ids of one request

    This is rank 1 of an engine with TP 2. Its model has one layer with 4 KV heads, 2 on each rank.
    vLLM's classes are recognised by their names, so any class of that name will do here:

    >>> from types import SimpleNamespace
    >>> class FullAttentionSpec:
    ...     block_size, num_kv_heads, head_size, dtype = 16, 2, 64, "float16"
    >>> layer = "model.layers.0.self_attn.attn"
    >>> group = SimpleNamespace(layer_names=[layer], kv_cache_spec=FullAttentionSpec())
    >>> config = SimpleNamespace(num_blocks=10, kv_cache_groups=[group])

    A rank with 2 heads may belong to a model with 2 heads or with 4. And the order of the elements
    inside a page depends on the attention backend. So the caller passes the heads and the backend:

    >>> import kvspec
    >>> engine = engine_spec(
    ...     config,
    ...     parallel=kvspec.ParallelConfig(tp_size=2),
    ...     tp_rank=1,
    ...     total_num_kv_heads=4,
    ...     backends="vllm.v1.attention.backends.flash_attn.FlashAttentionBackend",
    ... )
    >>> spec = engine.group("group0").spec
    >>> spec.total_num_kv_heads, spec.head_size, spec.block_size
    (4, 64, 16)

    In a worker, use `from_vllm` instead: it reads the heads and the backend from vLLM. The tensor
    of the layer has the shape [blocks, heads, tokens, content]. The content is a key and its value:

    >>> import numpy
    >>> tensor = numpy.zeros((10, 2, 16, 128), numpy.float16)
    >>> cache = rank_cache(engine, kvspec.RankId(tp=1), {layer: tensor}, config=config)
    >>> for region in cache.regions:
    ...     print(region.part, region.base - tensor.ctypes.data, region.block_stride)
    k 0 8192
    v 128 8192

    A request with 20 tokens has two blocks:

    >>> block_tables(engine, config, [[7, 3]], num_tokens=20)["group0"].block_ids.tolist()
    [7, 3]
"""

from kvspec.adapters.vllm.engine import engine_spec
from kvspec.adapters.vllm.lmcache_chunks import LMCacheChunks
from kvspec.adapters.vllm.mooncake_pages import MooncakeShards
from kvspec.adapters.vllm.settings import from_vllm, stages, worker_rank
from kvspec.adapters.vllm.stored_pages import CanonicalPages
from kvspec.adapters.vllm.tables import block_tables, loses_a_token
from kvspec.adapters.vllm.tensors import rank_cache
from kvspec.adapters.vllm.worker_info import WorkerInfo, whole_engine

__all__ = [
    "CanonicalPages",
    "LMCacheChunks",
    "MooncakeShards",
    "WorkerInfo",
    "block_tables",
    "engine_spec",
    "from_vllm",
    "loses_a_token",
    "rank_cache",
    "stages",
    "whole_engine",
    "worker_rank",
]
