"""SGLang's buffers, read as one rank's regions.

Law: a buffer is only viewed, page by page; slots that fill no page are not the cache's.
"""

from __future__ import annotations

from typing import Any

from kvspec.adapters.sglang.engine import DRAFT, FULL, TokenPool, read_pools
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import instance
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId


def rank_cache(
    engine: EngineSpec,
    rank: RankId,
    pool: Any,  # noqa: ANN401 - SGLang's class, not imported
    draft_pool: Any = None,  # noqa: ANN401 - SGLang's class, not imported
) -> RankCache:
    """Return where the buffers of one rank's *pool*, and of its *draft_pool*, lie.

    *engine*: from `engine_spec`. The slots of each buffer ``[slots, heads, size]`` are pages and
    their tokens; page 0 is SGLang's own and never moved.
    """
    instance("engine", engine, EngineSpec).parallel.check_rank(rank)
    pools = list(read_pools("pool", pool, FULL))
    if draft_pool is not None:
        pools += read_pools("draft_pool", draft_pool, DRAFT)
    tensors: dict[str, dict[str, Any]] = {}
    for found in pools:
        group = engine.group(found.group)
        names = engine.layers_at(group, rank.pp)
        if len(names) != len(found.layers):
            wanted = f"{len(names)} layers: {', '.join(names)}"
            raise SpecError(found.path, f"{len(found.layers)} layers", wanted)
        if found.page_size != group.spec.block_size:
            wanted = f"{group.spec.block_size}, as group {group.name!r} has"
            raise SpecError(f"{found.path}.page_size", found.page_size, wanted)
        for name, buffers in zip(names, found.buffers, strict=True):
            tensors[name] = {part: _whole_pages(found, buffers[part]) for part in buffers}
    return RankCache.from_tensors(engine, rank, tensors, "(BN)HC")


def _whole_pages(pool: TokenPool, buffer: Any) -> Any:  # noqa: ANN401
    """Return the slots [slots, heads, size] of a buffer that fill pages."""
    return buffer[: len(buffer) // pool.page_size * pool.page_size]
