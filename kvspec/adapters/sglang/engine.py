"""SGLang's pools of one rank of each stage, read as an engine.

Law: nothing is guessed. Sizes come from the pools; what a rank's pool cannot know (the model's
heads, how far a window looks back) is asked for, and held against the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvspec.adapters.sglang.pools import DRAFT, FULL, WINDOW, TokenPool, read_pools, stages_of
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int
from kvspec.ownership.parallel import ParallelConfig
from kvspec.specs import FullAttentionSpec, LayerSpec, MLAAttentionSpec, SlidingWindowSpec

NULL_PAGE = 0
"""The page of slot 0, which SGLang writes dummy outputs to; no request owns it."""


def engine_spec(
    pools: Any,  # noqa: ANN401 - SGLang's class, not imported
    *,
    parallel: ParallelConfig | None = None,
    total_num_kv_heads: int | Mapping[str, int] | None = None,
    sliding_window: int | None = None,
    tp_rank: int = 0,
    draft_pool: Any = None,  # noqa: ANN401 - SGLang's class, not imported
    layer_name: str = "layers.{}",
    draft_name: str = "draft.{}",
) -> EngineSpec:
    """Return the engine that a rank's token pool belongs to; a pool of each stage with PP.

    *parallel*: from `parallel_config`. *total_num_kv_heads*: the model's, one number or by group
    (``full``, ``swa``, ``draft``); may be left out at TP 1. *sliding_window*: tokens that a query
    of a window's layer reads, its own included. *tp_rank*: the attention rank that the pool is of.
    *draft_pool*: the draft model's, which every context rank holds whole; it is in group ``draft``.
    *layer_name*, *draft_name*: how the peer calls a layer, with ``{}`` for its number, such as
    ``model.layers.{}.self_attn.attn``. Blocks are pages of a rank.
    """
    parallel = instance("parallel", ParallelConfig() if parallel is None else parallel,
                        ParallelConfig)  # fmt: skip
    if positive_int("tp_rank", tp_rank, least=0) >= parallel.tp_size:
        raise SpecError("tp_rank", tp_rank, f"less than tp_size={parallel.tp_size}")
    stages = stages_of("pools", pools, lambda path, pool: read_pools(path, pool, FULL))
    if len(stages) != parallel.pp_size:
        wanted = f"one pool for each of the {parallel.pp_size} pipeline stages"
        raise SpecError("pools", f"{len(stages)} of them", wanted)
    drafts = () if draft_pool is None else read_pools("draft_pool", draft_pool, DRAFT)
    reader = _Reader(parallel, total_num_kv_heads, sliding_window, tp_rank, layer_name, draft_name)
    groups = [
        reader.group(name, [[p for p in stage if p.group == name] for stage in stages])
        for name in (FULL, WINDOW)
        if any(pool.group == name for stage in stages for pool in stage)
    ]
    if drafts:
        groups.append(reader.group(DRAFT, [drafts]))
    staged = reader.staged(stages, drafts)
    return EngineSpec(groups=groups, parallel=staged, layout="LKBNHC", null_block=NULL_PAGE)


@attrs.frozen
class _Reader:
    """What the caller says beside the pools: see `engine_spec`."""

    parallel: ParallelConfig
    heads: int | Mapping[str, int] | None
    window: int | None
    tp_rank: int
    layer_name: str
    draft_name: str

    def __attrs_post_init__(self) -> None:
        for field, name in (("layer_name", self.layer_name), ("draft_name", self.draft_name)):
            if not isinstance(name, str) or name.count("{}") != 1:
                raise SpecError(field, name, "a name with {} for the layer's number")

    def names(self, pools: Sequence[TokenPool]) -> tuple[str, ...]:
        """Return the names of the layers of *pools*."""
        return tuple(
            (self.draft_name if pool.group == DRAFT else self.layer_name).replace("{}", str(number))
            for pool in pools
            for number in pool.layers
        )

    def group(self, name: str, stages: Sequence[Sequence[TokenPool]]) -> KVCacheGroup:
        """Return the group called *name*, whose pools on each stage are *stages*."""
        pools = [pool for stage in stages for pool in stage]
        specs = [self._spec(pool) for pool in pools]
        for pool, spec in zip(pools, specs, strict=True):
            if spec != specs[0]:
                raise SpecError(pool.path, spec, f"{specs[0]}, as {pools[0].path} has")
        return KVCacheGroup(
            name=name,
            layers=self.names(pools),
            spec=specs[0],
            layout="LBNHC" if pools[0].latent else None,
            context_sharded=name != DRAFT,
        )

    def staged(
        self, stages: Sequence[Sequence[TokenPool]], drafts: Sequence[TokenPool]
    ) -> ParallelConfig:
        """Return the parallel sizes with the layers of each stage; a draft is on the last."""
        if self.parallel.pp_size == 1:
            return self.parallel
        names = [self.names(stage) for stage in stages]
        names[-1] += self.names(drafts)
        return attrs.evolve(self.parallel, stages=names)

    def _spec(self, pool: TokenPool) -> LayerSpec:
        if pool.latent:
            _, heads, size = pool.shape("latent")
            if heads != 1:
                raise SpecError(f"{pool.path}.kv_buffer", heads, "one latent for each slot")
            return MLAAttentionSpec(block_size=pool.page_size, head_size=size, dtype=pool.dtype)
        if self.parallel.dcp_size > 1 and pool.group != DRAFT:
            wanted = "1 where keys and values of heads are kept; not yet: heads on context ranks"
            raise SpecError("dcp_size", self.parallel.dcp_size, wanted)
        slots, heads, size = pool.shape("k")
        if (slots, heads) != pool.shape("v")[:2]:
            raise SpecError(f"{pool.path}.v_buffer", pool.shape("v"), f"[{slots}, {heads}, size]")
        sizes: dict[str, Any] = {
            "block_size": pool.page_size,
            "total_num_kv_heads": self._total(pool, heads),
            "head_size": size,
            "head_size_v": pool.shape("v")[2],
            "dtype": pool.dtype,
        }
        if pool.group != WINDOW:
            return FullAttentionSpec(**sizes)
        return SlidingWindowSpec(
            **sizes, sliding_window=positive_int("sliding_window", self.window)
        )

    def _total(self, pool: TokenPool, local: int) -> int:
        """Return the model's heads, of which the pool's rank has a part."""
        heads = self.heads.get(pool.group) if isinstance(self.heads, Mapping) else self.heads
        if heads is None and self.parallel.tp_size == 1:
            heads = local
        if heads is None:
            wanted = f"the KV heads of the model in group {pool.group!r}: a pool has a rank's"
            raise SpecError("total_num_kv_heads", self.heads, wanted)
        total = positive_int("total_num_kv_heads", heads)
        own_units = len(self.parallel.sharding(total).ranges[self.tp_rank])
        if own_units != local:
            wanted = (
                f"{own_units}: rank {self.tp_rank} of {self.parallel.tp_size} has "
                f"{own_units} of the "
            )
            raise SpecError(f"{pool.path}.head_num", local, f"{wanted}model's {total}")
        return total
