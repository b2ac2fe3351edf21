"""Describe an SGLang engine: its specs, its memory and its block tables.

The adapter describes `python/sglang/srt/mem_cache/memory_pool.py` and `swa_memory_pool.py` of
SGLang 0.5.23. Its engines ran on a CPU with plain pools. Its other pools were built on a CPU, and
written and read by SGLang's own code. Nothing of SGLang is imported, except by `plugin`, which
SGLang loads as its transfer backend.

How it works:
    SGLang has no block tables. A rank has a token pool: for each layer, a buffer with one slot for
    each token. A page is a run of consecutive slots. Three functions read the three things that a
    transfer needs:

        `engine_spec`     the layers and sizes of the pool; a page becomes a block
        `rank_cache`      the addresses and strides of the buffers of one rank
        `block_tables`    the slots of one request, as pages, and the slot of its states

    This is a rank with 2 KV heads and pages of 4 tokens. SGLang's classes are recognised by their
    names, so any class of that name will do here:

    >>> import kvspec, numpy
    >>> class MHATokenToKVPool:
    ...     page_size, dtype, start_layer = 4, "float16", 0
    ...     k_buffer = [numpy.zeros((32, 2, 8), numpy.float16)]  # slots, heads, size
    ...     v_buffer = [numpy.zeros((32, 2, 8), numpy.float16)]
    >>> pool = MHATokenToKVPool()
    >>> engine = engine_spec(pool)
    >>> spec = engine.group("full").spec
    >>> spec.total_num_kv_heads, spec.block_size
    (2, 4)

    The blocks of the cache are the pages of 4 slots. Each slot has 2 · 8 · 2 = 32 bytes:

    >>> cache = rank_cache(engine, kvspec.RankId(), pool)
    >>> [(region.part, region.num_blocks, region.block_stride) for region in cache.regions]
    [('k', 8, 128), ('v', 8, 128)]

    A request with 6 tokens has page 5 (slots 20 to 23) and the first half of page 2:

    >>> block_tables(engine, [20, 21, 22, 23, 8, 9])["full"].block_ids.tolist()
    [5, 2]
"""

from kvspec.adapters.sglang.engine import engine_spec, parallel_config, worker_rank
from kvspec.adapters.sglang.stored_pages import UnifiedPages
from kvspec.adapters.sglang.tables import block_tables
from kvspec.adapters.sglang.tensors import rank_cache

__all__ = [
    "UnifiedPages",
    "block_tables",
    "engine_spec",
    "parallel_config",
    "rank_cache",
    "worker_rank",
]
