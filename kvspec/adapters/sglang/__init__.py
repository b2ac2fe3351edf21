"""SGLang: its token pools read as an engine and as a rank's cache, its token slots as block tables.

What is described is `python/sglang/srt/mem_cache/memory_pool.py` and `allocator/dcp.py` of SGLang's
main branch in the second half of 2026, read, not run. Nothing of it is imported.
"""

from kvspec.adapters.sglang.engine import engine_spec, parallel_config, worker_rank
from kvspec.adapters.sglang.tables import block_tables
from kvspec.adapters.sglang.tensors import rank_cache

__all__ = [
    "block_tables",
    "engine_spec",
    "parallel_config",
    "rank_cache",
    "worker_rank",
]
