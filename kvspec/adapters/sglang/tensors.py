"""Read SGLang's buffers of one rank as a `RankCache`.

Invariant: buffers are only viewed, never copied, page by page. Slots after the last whole page
belong to no block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvspec.adapters.sglang.engine import LayerPool, layers_of
from kvspec.adapters.sglang.pools import read_drafts
from kvspec.adapters.sglang.state_pools import StatePool
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
    *,
    windows: Mapping[int, int] | None = None,
) -> RankCache:
    """Return the memory of the buffers of one rank.

    The slots of each buffer ``[slots, heads, size]`` are divided into pages. Page 0 belongs to
    SGLang and never moves. The caller must keep the pools: the result contains only addresses.

    Args:
        engine: The engine, from `engine_spec`.
        rank: The rank that the pools belong to.
        pool: The token pool of the rank.
        draft_pool: The pool of the draft model, if the rank has one.
        windows: As in `engine_spec`.

    Returns:
        The cache of the rank.

    Raises:
        SpecError: If a pool has other layers, pages or shapes than *engine*.

    >>> import numpy
    >>> from kvspec.adapters.sglang import engine_spec
    >>> class MLATokenToKVPool:
    ...     page_size, dtype = 16, "uint8"
    ...     kv_buffer = [numpy.zeros((64, 1, 576), numpy.uint8)]
    >>> pool = MLATokenToKVPool()
    >>> cache = rank_cache(engine_spec(pool), RankId(), pool)
    >>> [(region.part, region.num_blocks, region.block_stride) for region in cache.regions]
    [('latent', 4, 9216)]
    """
    instance("engine", engine, EngineSpec).parallel.check_rank(rank)
    pools: list[LayerPool] = list(layers_of("pool", pool, windows))
    if draft_pool is not None:
        pools += read_drafts("draft_pool", draft_pool)
    tensors: dict[str, dict[str, Any]] = {}
    axes: dict[str, str] = {}
    for own in pools:
        group = engine.group(own.group)
        names = engine.layers_at(group, rank.pp)
        if len(names) != len(own.layers):
            wanted = f"{len(names)} layers: {', '.join(names)}"
            raise SpecError(own.path, f"{len(own.layers)} layers", wanted)
        if not _of_one_pattern(names, own.layers):
            wanted = f"the layers {', '.join(names)}"
            raise SpecError(f"{own.path}.layers", own.layers, wanted)
        if not isinstance(own, StatePool) and own.page_size != group.spec.block_size:
            wanted = f"{group.spec.block_size}, as group {group.name!r} has"
            raise SpecError(f"{own.path}.page_size", own.page_size, wanted)
        for place, name in enumerate(names):
            tensors[name] = own.tensors(place, group.spec)
        axes |= own.axes(group.spec)
    return RankCache.from_tensors(engine, rank, tensors, axes)


def _of_one_pattern(names: Sequence[str], numbers: Sequence[int]) -> bool:
    """Return whether one text with a gap gives all *names*, if the gap has their *numbers*.

    A pool of another stage, or with other windows, may have as many layers as the right one.

    >>> _of_one_pattern(["l.3.attn", "l.10.attn"], [3, 10]), _of_one_pattern(["l.3"], [4])
    (True, False)
    """
    if not names:
        return True
    name, number = names[0], str(numbers[0])
    return any(
        all(
            f"{name[:at]}{other}{name[at + len(number) :]}" == found
            for found, other in zip(names, numbers, strict=True)
        )
        for at in range(len(name))
        if name.startswith(number, at)
    )
