"""The kinds of layer, each reduced to its parts.

Most classes have the names and the fields of vLLM's `vllm/v1/kv_cache_interface.py`. One thing
differs: all sizes are those of the whole model, before tensor parallelism. vLLM's specs describe
one rank.
"""

from kvspec.specs.attention import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvspec.specs.key_content import KeyContent, scales_digest
from kvspec.specs.layer import LayerSpec
from kvspec.specs.ring import CircularBufferSpec
from kvspec.specs.state import MambaSpec
from kvspec.specs.uniform import UniformTypeKVCacheSpecs

__all__ = [
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "KeyContent",
    "LayerSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
    "scales_digest",
]
