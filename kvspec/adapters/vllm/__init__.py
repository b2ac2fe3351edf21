"""vLLM: a `KVCacheConfig` read as an engine, its tensors as a rank's cache, its ids as tables."""

from kvspec.adapters.vllm.engine import engine_spec
from kvspec.adapters.vllm.settings import from_vllm, stages, worker_rank
from kvspec.adapters.vllm.tables import block_tables, loses_a_token
from kvspec.adapters.vllm.tensors import rank_cache
from kvspec.adapters.vllm.worker_info import WorkerInfo, whole_engine

__all__ = [
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
