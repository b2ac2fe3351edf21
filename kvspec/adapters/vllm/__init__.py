"""vLLM: a `KVCacheConfig` read as an engine, and its tensors as a rank's cache."""

from kvspec.adapters.vllm.backends import FORMATS
from kvspec.adapters.vllm.engine import engine_spec
from kvspec.adapters.vllm.tensors import rank_cache

__all__ = ["FORMATS", "engine_spec", "rank_cache"]
