"""SGLang's pools of one rank of each stage, read as an engine.

Law: nothing is guessed. Sizes come from the pools; what a rank's pool cannot know (the model's
heads, how far a window looks back) is asked for, and held against the pool.

SGLang's ranks.

Law: one engine is one group of attention ranks. With attention data parallelism the TP ranks are
cut into that many engines, each a run of consecutive ranks.

SGLang's token pools of one rank, read field by field.

Law: a pool is known by its exact class, and its buffers by their shape: a slot for each token,
``[slots, heads, size]``, page by page from slot 0 on. Any other order is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance, mapping, positive_int
from kvspec.memory.from_tensors import check_tensor
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.specs import FullAttentionSpec, LayerSpec, MLAAttentionSpec, SlidingWindowSpec


def parallel_config(
    tp_size: int, pp_size: int = 1, *, attn_dp_size: int = 1, dcp_size: int = 1
) -> ParallelConfig:
    """Return the parallel sizes of one engine of an SGLang server.

    *tp_size*: the server's; *attn_dp_size*: engines that share its ranks (`dp_size`, if
    `enable_dp_attention`). Tokens lie on decode-context ranks one by one.
    """
    return ParallelConfig(
        tp_size=_attention_tp(tp_size, attn_dp_size), pp_size=pp_size, dcp_size=dcp_size
    )


def worker_rank(
    tp_rank: int, pp_rank: int = 0, *, tp_size: int, attn_dp_size: int = 1
) -> tuple[int, RankId]:
    """Return which engine a server's rank is of, counted from 0, and which rank of that.

    >>> worker_rank(5, tp_size=8, attn_dp_size=4)
    (2, RankId(pp=0, pcp=0, tp=1))
    """
    size = _attention_tp(tp_size, attn_dp_size)
    if positive_int("tp_rank", tp_rank, least=0) >= tp_size:
        raise SpecError("tp_rank", tp_rank, f"less than tp_size={tp_size}")
    engine, own = divmod(tp_rank, size)
    return engine, RankId(pp=positive_int("pp_rank", pp_rank, least=0), tp=own)


def _attention_tp(tp_size: int, attn_dp_size: int) -> int:
    size, rest = divmod(
        positive_int("tp_size", tp_size), positive_int("attn_dp_size", attn_dp_size)
    )
    if rest:
        raise SpecError("attn_dp_size", attn_dp_size, f"a divisor of tp_size={tp_size}")
    return size


FULL, WINDOW, DRAFT = "full", "swa", "draft"
"""The groups: layers that keep every token, layers of a window, layers of a draft model."""

KINDS = ("MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool")
"""SGLang's classes that are read, by name; one made from them may keep anything."""

NOT_YET = {
    "MHATokenToKVPoolFP4": "scales of two elements each lie in buffers of their own",
    "MLATokenToKVPoolFP4": "scales of two elements each lie in buffers of their own",
    "NSATokenToKVPool": "an indexer's keys lie page by page, their scales after them",
    "DSATokenToKVPool": "an indexer's keys lie page by page, their scales after them",
    "DoubleSparseTokenToKVPool": "labels lie beside keys and values",
    "HybridLinearKVPool": "recurrent states lie in a pool of their own",
    "DeepSeekV4TokenToKVPool": "compressed tokens lie in pools of their own",
}
"""SGLang's classes that are not read yet, and why."""

_AXES = 3


@attrs.frozen
class TokenPool:
    """Layers of one rank that share slots; *layers*: the model's numbers, in order of *buffers*.

    *buffers*: for each layer the tensors by the name of the part that they hold.
    """

    path: str
    group: str
    page_size: int
    dtype: str
    layers: tuple[int, ...]
    buffers: tuple[dict[str, Any], ...]

    @property
    def latent(self) -> bool:
        """Whether a layer keeps one latent, not keys and values of heads."""
        return "latent" in self.buffers[0]

    def shape(self, part: str) -> tuple[int, int, int]:
        """Return slots, heads and elements of *part*'s buffers, alike in all layers."""
        shapes = [tuple(buffer[part].shape) for buffer in self.buffers]
        if len(set(shapes)) > 1:
            raise SpecError(f"{self.path}.{part}", shapes, "one shape in all layers")
        slots, heads, size = shapes[0]
        return slots, heads, size


def read_pools(path: str, fields: object, group: str) -> tuple[TokenPool, ...]:
    """Return the pools that *fields*, one of SGLang's, is made of; its layers are of *group*."""
    pool = FieldReader(path, fields)
    name = type(fields).__name__
    if name not in KINDS:
        why = f"; not yet: {NOT_YET[name]}" if name in NOT_YET else ""
        raise SpecError(path, name, f"one of {', '.join(KINDS)}{why}")
    if name == "SWAKVPool":
        return tuple(_halves(pool))
    _check_layout(pool)
    start = pool.get("start_layer").size(0, least=0)
    found = tuple(_buffers(pool, latent=name.startswith("MLA")))
    return (_pool(pool, group, tuple(range(start, start + len(found))), found),)


def _halves(pool: FieldReader) -> Iterator[TokenPool]:
    """Yield the two pools of a model with windows; its layers are named by number."""
    field = pool.get("layers_mapping")
    places = mapping(field.path, field.value, "layer numbers to places")
    for attribute, group, windowed in (
        ("full_kv_pool", FULL, False),
        ("swa_kv_pool", WINDOW, True),
    ):
        half = pool.get(attribute)
        if type(half.value).__name__ != "MHATokenToKVPool":
            raise SpecError(half.path, type(half.value).__name__, "a MHATokenToKVPool")
        _check_layout(half)
        numbers = {place: layer for layer, (place, of_window) in places.items()
                   if of_window is windowed}  # fmt: skip
        found = tuple(_buffers(half, latent=False))
        if sorted(numbers) != list(range(len(found))):
            wanted = f"a layer for each of the {len(found)} buffers of {half.path}"
            raise SpecError(field.path, sorted(numbers), wanted)
        if found:
            layers = tuple(numbers[place] for place in range(len(found)))
            yield _pool(half, group, layers, found)


def _pool(
    pool: FieldReader, group: str, layers: tuple[int, ...], buffers: tuple[dict[str, Any], ...]
) -> TokenPool:
    if not buffers:
        raise SpecError(pool.path, "no buffers", "at least one layer")
    size, dtype = pool.get("page_size").size(), pool.get("dtype").dtype()
    return TokenPool(pool.path, group, size, dtype, layers, buffers)


def _check_layout(pool: FieldReader) -> None:
    """Refuse keys and values in chunks, as ROCm's kernels may have them."""
    layout = pool.get("kv_cache_layout")
    if layout.value not in (None, "nhd"):
        wanted = "'nhd'; not yet: heads in chunks of 16 bytes"
        raise SpecError(layout.path, layout.value, wanted)


def _buffers(pool: FieldReader, *, latent: bool) -> Iterator[dict[str, Any]]:
    """Yield each layer's buffers by part, checked to have three axes."""
    names = {"latent": "kv_buffer"} if latent else {"k": "k_buffer", "v": "v_buffer"}
    columns: dict[str, tuple[FieldReader, ...]] = {
        part: pool.get(name).members("buffers") for part, name in names.items()
    }
    counts = {part: len(column) for part, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise SpecError(pool.path, counts, "as many buffers of keys as of values")
    for row in zip(*columns.values(), strict=True):
        for buffer in row:
            check_tensor(buffer.path, buffer.value)
            if len(buffer.value.shape) != _AXES:
                wanted = "[slots, heads, size]"
                raise SpecError(f"{buffer.path}.shape", tuple(buffer.value.shape), wanted)
        yield dict(zip(columns, (buffer.value for buffer in row), strict=True))


def stages_of(path: str, fields: object, read: Callable[[str, object], Any]) -> tuple[Any, ...]:
    """Return what *read* makes of one pool, or of one of each pipeline stage."""
    if isinstance(fields, Sequence):
        return tuple(read(f"{path}[{at}]", pool) for at, pool in enumerate(fields))
    return (read(path, fields),)


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
