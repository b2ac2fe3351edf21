"""vLLM: a `KVCacheConfig` read as an engine, and its tensors as a rank's cache."""

from kvspec.adapters.vllm.engine import engine_spec
from kvspec.adapters.vllm.tensors import rank_cache

__all__ = ["engine_spec", "rank_cache"]
