"""Read SGLang's token pools of one rank as the `EngineSpec` of the whole engine.

See `kvspec.adapters.sglang` for how this works, with an example.

Invariant: nothing is guessed. The sizes that a pool does not contain, such as the model's heads or
the window, come from the caller, and must agree with the pool.

How it works:
    A server with attention data parallelism is several engines. The TP ranks are divided into runs
    of consecutive ranks, and each run is one engine. With TP 8 and 4 engines:

        server's rank    0   1   2   3   4   5   6   7
        engine           0   0   1   1   2   2   3   3
        rank in it       0   1   0   1   0   1   0   1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from kvspec.adapters.field_reader import FieldReader, check_tp_rank, chosen, model_heads
from kvspec.adapters.sglang.compressed_pools import (
    COMPRESSED_GROUPS,
    COMPRESSED_POOL,
    CompressedPool,
    read_compressed,
)
from kvspec.adapters.sglang.pools import (
    DRAFT,
    FULL_GROUP,
    INDEXER,
    STATE,
    WINDOW,
    TokenPool,
    read_drafts,
    read_pools,
)
from kvspec.adapters.sglang.state_pools import StatePool, read_states
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance, mapping, positive_int
from kvspec.ownership.dtypes import dtype_name
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.specs import (
    FullAttentionSpec,
    KeyContent,
    LayerSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    scales_digest,
)
from kvspec.specs.attention import AttentionSpec
from kvspec.specs.formats import PLAIN

# Layers of one rank that have one spec.
LayerPool: TypeAlias = TokenPool | CompressedPool | StatePool

# The page of slot 0. SGLang writes dummy outputs to slot 0, and no request owns it.
NULL_PAGE = 0

# The orders of the keys in a page of an indexer.
INDEX_ORDERS = ("rows", "shuffled")

# Bytes of a key of an indexer: 128 elements of fp8, and a float32 scale.
_INDEX_KEY, _INDEX_SCALE = 128, 4


def parallel_config(
    tp_size: int, pp_size: int = 1, *, attn_dp_size: int = 1, dcp_size: int = 1
) -> ParallelConfig:
    """Return the parallel sizes of one engine of an SGLang server.

    Args:
        tp_size: The TP ranks of the server.
        pp_size: The pipeline stages of the server.
        attn_dp_size: The engines that share the TP ranks: SGLang's `dp_size` if
            `enable_dp_attention` is set, else 1.
        dcp_size: The decode context ranks. Consecutive tokens lie on consecutive ranks.

    Returns:
        The sizes of one engine.

    Raises:
        SpecError: If *attn_dp_size* does not divide *tp_size*, or *dcp_size* does not fit.

    >>> parallel_config(8, attn_dp_size=4).tp_size
    2
    """
    return ParallelConfig(
        tp_size=_attention_tp(tp_size, attn_dp_size), pp_size=pp_size, dcp_size=dcp_size
    )


def worker_rank(
    tp_rank: int, pp_rank: int = 0, *, tp_size: int, attn_dp_size: int = 1
) -> tuple[int, RankId]:
    """Return the engine that a server's rank belongs to, and its rank in that engine.

    Args:
        tp_rank: The TP rank in the server.
        pp_rank: The pipeline stage.
        tp_size: The TP ranks of the server.
        attn_dp_size: See `parallel_config`.

    Returns:
        The number of the engine, counted from 0, and the rank.

    Raises:
        SpecError: If *tp_rank* is not less than *tp_size*, or *attn_dp_size* does not divide it.

    >>> worker_rank(5, tp_size=8, attn_dp_size=4)
    (2, RankId(pp=0, pcp=0, tp=1))
    """
    size = _attention_tp(tp_size, attn_dp_size)
    check_tp_rank(tp_rank, tp_size)
    engine, own = divmod(tp_rank, size)
    return engine, RankId(pp=positive_int("pp_rank", pp_rank, least=0), tp=own)


def _attention_tp(tp_size: int, attn_dp_size: int) -> int:
    """Return the TP ranks of one engine."""
    size, rest = divmod(
        positive_int("tp_size", tp_size), positive_int("attn_dp_size", attn_dp_size)
    )
    if rest:
        raise SpecError("attn_dp_size", attn_dp_size, f"a divisor of tp_size={tp_size}")
    return size


def engine_spec(
    pools: Any,  # noqa: ANN401 - SGLang's class, not imported
    *,
    parallel: ParallelConfig | None = None,
    total_num_kv_heads: int | Mapping[str, int] | None = None,
    sliding_window: int | None = None,
    windows: Mapping[int, int] | None = None,
    key_content: KeyContent | Mapping[str, KeyContent] | None = None,
    scales: Mapping[str, tuple[Any, Any]] | None = None,
    tp_rank: int = 0,
    draft_pool: Any = None,  # noqa: ANN401 - SGLang's class, not imported
    n_groups: int | None = None,
    index_order: str | None = None,
    index_hadamard: bool | None = None,
    fp8_dtype: str = "float8_e4m3fn",
    layer_name: str = "layers.{}",
    index_name: str = "layers.{}.indexer",
    state_name: str = "layers.{}.state",
    draft_name: str = "draft.{}",
) -> EngineSpec:
    """Return the engine that the token pools belong to.

    The groups are called ``full``, ``swa`` (layers with a window), ``indexer`` (the keys by which
    layers choose tokens), ``state`` (recurrent states) and ``draft``. The blocks are the pages of a
    rank. The blocks of ``state`` are the slots of the `MambaPool`.

    Args:
        pools: The token pool of one rank. With pipeline stages, a sequence of one pool for each
            stage.
        parallel: The parallel sizes, from `parallel_config`. One rank by default.
        total_num_kv_heads: The KV heads of the model: one number, or one for each group. Required
            if TP is larger than 1 and a group has KV heads.
        sliding_window: The tokens that a query in a layer with a window reads, including its own.
            Required if there is such a layer in a `SWAKVPool`.
        windows: The same for layers with a window in a plain pool, by layer number. Such a pool
            keeps all tokens, but a peer may have only those in the window.
        key_content: The meaning of the keys: one for all layers, or one for each group.
        scales: The scale of keys and the scale of values of each layer of float8 or NVFP4, by the
            layer's name in the result: the `k_scale` and `v_scale` of its `RadixAttention`, or 1.0
            for None. Those of NVFP4 are the `k_scales_float` and `v_scales_float` of the pool's
            `quant_method`. Required for such layers. MXFP8 has no such scales.
        tp_rank: The attention rank that the pools belong to.
        draft_pool: The pool of the draft model. Each context rank holds the whole draft.
        n_groups: The groups of the model's Mamba 2 layers. Required for them: the pool does not
            distinguish them from gated delta nets. None for models without such layers.
        index_order: How the keys of a page of a `DSATokenToKVPool` lie: ``rows``, or ``shuffled``
            if SGLang's `aiter_can_use_preshuffle_paged_mqa` is true. Required for such a pool.
        index_hadamard: Whether SGLang's `Indexer` multiplies these keys by a Hadamard matrix before
            it stores them: unless one of its attributes `use_dsa_indexer_fusion` and
            `use_aiter_fused_fp8_writer` is true. Required for such a pool. vLLM never does it.
        fp8_dtype: SGLang's `fp8_dtype` (`layers.quantization.fp8_kernel`): the element type of what
            a pool keeps as bytes. It is ``float8_e4m3fnuz`` on older AMD GPUs.
        layer_name: The peer's name of a layer, with ``{}`` in place of its number, such as
            ``model.layers.{}.self_attn.attn``.
        index_name: The same for the keys of an indexer.
        state_name: The same for recurrent states.
        draft_name: The same for the layers of the draft.

    Returns:
        The engine. Its null block is page 0.

    Raises:
        SpecError: If a pool has an unknown class or shape, if a required argument is missing, or if
            the sizes of the rank contradict those of the model.

    >>> import numpy
    >>> class MLATokenToKVPool:
    ...     page_size, dtype = 16, "uint8"
    ...     kv_buffer = [numpy.zeros((64, 1, 576), numpy.uint8) for _ in range(2)]
    >>> engine = engine_spec(MLATokenToKVPool(), layer_name="model.layers.{}.self_attn.attn")
    >>> engine.group("full").layers
    ('model.layers.0.self_attn.attn', 'model.layers.1.self_attn.attn')
    """
    parallel = instance("parallel", ParallelConfig() if parallel is None else parallel,
                        ParallelConfig)  # fmt: skip
    check_tp_rank(tp_rank, parallel.tp_size)
    sizes = set(mapping("windows", windows or {}, "layer numbers to tokens").values())
    stages = _stages(pools, parallel.pp_size, windows or {})
    drafts = () if draft_pool is None else read_drafts("draft_pool", draft_pool)
    window = sizes.pop() if sizes else sliding_window
    names = {
        "layer_name": layer_name,
        "index_name": index_name,
        "state_name": state_name,
        "draft_name": draft_name,
    }
    reader = _PoolReader(
        parallel,
        total_num_kv_heads,
        window,
        key_content,
        mapping("scales", scales or {}, "layer names to pairs of scales"),
        tp_rank,
        n_groups,
        index_order,
        index_hadamard,
        dtype_name(fp8_dtype, "fp8_dtype"),
        names,
    )
    groups = [
        reader.group(name, [[p for p in stage if p.group == name] for stage in stages])
        for name in dict.fromkeys((FULL_GROUP, WINDOW, INDEXER, STATE, *COMPRESSED_GROUPS))
        if any(pool.group == name for stage in stages for pool in stage)
    ]
    if drafts:
        groups.append(reader.group(DRAFT, [drafts]))
    staged = reader.staged(stages, drafts)
    return EngineSpec(groups=groups, parallel=staged, layout="LKBNHC", null_block=NULL_PAGE)


def _stages(
    pools: Any,  # noqa: ANN401
    count: int,
    windows: Mapping[int, int],
) -> tuple[tuple[LayerPool, ...], ...]:
    """Return the token pools and states of each of *count* pipeline stages."""
    if len(set(windows.values())) > 1:
        raise SpecError("windows", windows, "one size for all layers with a window")
    stages: tuple[tuple[LayerPool, ...], ...] = stages_of(
        "pools", pools, lambda path, pool: layers_of(path, pool, windows)
    )
    if len(stages) != count:
        wanted = f"one pool for each of the {count} pipeline stages"
        raise SpecError("pools", f"{len(stages)} pools", wanted)
    numbers = {number for stage in stages for pool in stage for number in pool.layers}
    if unknown := sorted(set(windows) - numbers, key=repr):
        raise SpecError("windows", unknown, "numbers of layers that the pools have")
    return stages


def layers_of(
    path: str, fields: object, windows: Mapping[int, int] | None = None
) -> tuple[LayerPool, ...]:
    """Return the token pools of *fields*, one of SGLang's pools, and then its states."""
    if type(fields).__name__ == COMPRESSED_POOL:
        if windows:
            wanted = "none for a pool that knows its window"
            raise SpecError("windows", windows, wanted)
        return read_compressed(path, fields)
    pools = read_pools(path, fields, FULL_GROUP, windows)
    return (*pools, *filter(None, [read_states(path, fields)]))


@attrs.frozen
class _PoolReader:
    """The facts that the pools do not contain: see `engine_spec`."""

    parallel: ParallelConfig
    heads: int | Mapping[str, int] | None
    window: int | None
    content: KeyContent | Mapping[str, KeyContent] | None
    scales: Mapping[str, tuple[Any, Any]]
    tp_rank: int
    n_groups: int | None
    index_order: str | None
    index_hadamard: bool | None
    fp8_dtype: str
    patterns: Mapping[str, str]

    def __attrs_post_init__(self) -> None:
        for field, name in self.patterns.items():
            if not isinstance(name, str) or name.count("{}") != 1:
                raise SpecError(field, name, "a name with {} for the layer's number")

    def names(self, pools: Sequence[LayerPool]) -> tuple[str, ...]:
        """Return the names of the layers of *pools*."""
        own = {INDEXER: "index_name", STATE: "state_name", DRAFT: "draft_name"}
        return tuple(
            self._pattern(pool, own.get(pool.group, "layer_name")).replace("{}", str(number))
            for pool in pools
            for number in pool.layers
        )

    def _pattern(self, pool: LayerPool, name: str) -> str:
        """Return the name of the layers of *pool* in the model, with ``{}`` for the number."""
        if not isinstance(pool, CompressedPool):
            return self.patterns[name]
        kept = self.patterns["index_name" if pool.has_keys else "layer_name"]
        return f"{kept}{pool.suffix}"

    def group(self, name: str, stages: Sequence[Sequence[LayerPool]]) -> KVCacheGroup:
        """Return the group called *name*. *stages* has its pools on each pipeline stage."""
        pools = [pool for stage in stages for pool in stage]
        specs = [self._spec(pool) for pool in pools]
        for pool, spec in zip(pools, specs, strict=True):
            if spec != specs[0]:
                raise SpecError(pool.path, spec, f"{specs[0]}, as {pools[0].path} has")
        layers = self.names(pools)
        return KVCacheGroup(
            name=name,
            layers=layers,
            spec=self._scaled(specs[0], layers, pools[0]),
            layout=pools[0].layout,
            # Each context rank runs the whole draft.
            context_sharded=name != DRAFT,
        )

    def _scaled(self, spec: LayerSpec, layers: Sequence[str], pool: LayerPool) -> LayerSpec:
        """Return *spec* with the identity of the scales of *layers* that the pool does not have."""
        if not isinstance(spec, AttentionSpec) or not isinstance(pool, TokenPool):
            return spec
        if not pool.has_global_scales:
            return spec
        specs: dict[str, LayerSpec] = {}
        for layer in layers:
            if layer not in self.scales:
                wanted = "the scale of its keys and the scale of its values, which divide elements"
                raise SpecError(f"scales[{layer!r}]", None, wanted)
            # The digest leaves out the name, so that layers with equal scales have equal specs.
            digest = scales_digest({"layer": self.scales[layer]})
            specs[layer] = attrs.evolve(spec, scales_digest=digest)
        first = specs[layers[0]]
        one_for_all = all(other == first for other in specs.values())
        return first if one_for_all else UniformTypeKVCacheSpecs(specs=specs)

    def staged(
        self, stages: Sequence[Sequence[LayerPool]], drafts: Sequence[TokenPool]
    ) -> ParallelConfig:
        """Return the parallel sizes with the layers of each stage. A draft is on the last one."""
        if self.parallel.pp_size == 1:
            return self.parallel
        names = [self.names(stage) for stage in stages]
        names[-1] += self.names(drafts)
        return attrs.evolve(self.parallel, stages=names)

    def _spec(self, pool: LayerPool) -> LayerSpec:
        """Return the spec of a pool's layers in the model."""
        if isinstance(pool, StatePool):
            return pool.spec(self.parallel, self.tp_rank, self.n_groups)
        if isinstance(pool, CompressedPool):
            return self._compressed(pool)
        if "page" in pool.buffers[0]:
            return self._index_pages(pool)
        if not pool.has_heads:
            return self._latents(pool)
        if self.parallel.dcp_size > 1 and pool.group != DRAFT:
            wanted = "1 for layers with KV heads; not yet: heads on context ranks"
            raise SpecError("dcp_size", self.parallel.dcp_size, wanted)
        slots, heads, size = pool.shape("k")
        if (slots, heads) != pool.shape("v")[:2]:
            raise SpecError(f"{pool.path}.v_buffer", pool.shape("v"), f"[{slots}, {heads}, size]")
        local = FieldReader(f"{pool.path}.head_num", heads)
        sizes: dict[str, Any] = {
            "block_size": pool.page_size,
            "total_num_kv_heads": model_heads(
                self.heads, pool.group, local, self.parallel, self.tp_rank
            ),
            "head_size": size,
            "head_size_v": pool.shape("v")[2],
            "dtype": pool.dtype,
            "key_content": chosen(self.content, pool.group),
            **_scale_fields(pool),
        }
        if pool.group != WINDOW:
            return FullAttentionSpec(**sizes)
        return SlidingWindowSpec(
            **sizes, sliding_window=positive_int("sliding_window", self.window)
        )

    @property
    def _bytes(self) -> str:
        """The type of elements that a pool keeps as bytes.

        It is uint8 for e4m3fn. The bytes of e4m3fnuz are other numbers.
        """
        return self.fp8_dtype if self.fp8_dtype.endswith("fnuz") else "uint8"

    def _latents(self, pool: TokenPool) -> MLAAttentionSpec:
        """Return the spec of layers that keep one row for each token."""
        part, *_ = pool.buffers[0]
        _, heads, size = pool.shape(part)
        if heads != 1:
            raise SpecError(f"{pool.path}.kv_buffer", heads, "one latent for each slot")
        if pool.replicated and self.parallel.dcp_size > 1 and pool.group != DRAFT:
            wanted = "False; not yet: context ranks that each hold all tokens"
            raise SpecError(f"{pool.path}.dcp_replicated", pool.replicated, wanted)
        return MLAAttentionSpec(
            block_size=pool.page_size,
            head_size=pool.latent_size or size,
            dtype=self._bytes if pool.latent_size else pool.dtype,
            state_content_bytes=size if pool.latent_size else None,
            # The meaning of an indexer's keys is that of their model.
            key_content=None if pool.group == INDEXER else chosen(self.content, pool.group),
            **_scale_fields(pool),
        )

    def _compressed(self, pool: CompressedPool) -> LayerSpec:
        """Return the spec of layers of a pool with compressed latents."""
        if self.parallel.dcp_size > 1:
            wanted = "1 for compressed latents; not yet: their pages on context ranks"
            raise SpecError("dcp_size", self.parallel.dcp_size, wanted)
        if self._bytes != "uint8":
            wanted = "one without 'fnuz' for compressed latents; not yet: AMD's numbers"
            raise SpecError("fp8_dtype", self.fp8_dtype, wanted)
        if not pool.has_keys:
            return pool.latents_of(chosen(self.content, pool.group))
        order, hadamard = self._index_facts(pool.path)
        return pool.keys_of(shuffled=order == "shuffled", hadamard=hadamard)

    def _index_facts(self, path: str) -> tuple[str, bool]:
        """Return the order of an indexer's keys, and whether a matrix multiplies them."""
        if self.index_order not in INDEX_ORDERS:
            wanted = f"{' or '.join(map(repr, INDEX_ORDERS))}, the order of keys in {path}"
            raise SpecError("index_order", self.index_order, wanted)
        if not isinstance(self.index_hadamard, bool):
            wanted = f"whether the keys in {path} are multiplied by a Hadamard matrix"
            raise SpecError("index_hadamard", self.index_hadamard, wanted)
        return self.index_order, self.index_hadamard

    def _index_pages(self, pool: TokenPool) -> MLAAttentionSpec:
        """Return the spec of an indexer's pages. A page has all keys, and then their scales."""
        if self.parallel.dcp_size > 1:
            wanted = "1 for layers with an indexer; not yet: index pages on context ranks"
            raise SpecError("dcp_size", self.parallel.dcp_size, wanted)
        order, hadamard = self._index_facts(pool.path)
        row, page = _INDEX_KEY + _INDEX_SCALE, pool.shape("page")[1]
        if page != pool.page_size * row:
            wanted = f"{_INDEX_KEY} + {_INDEX_SCALE} bytes for each of {pool.page_size} tokens"
            raise SpecError(f"{pool.path}.index_k_with_scale_buffer", page, wanted)
        sizes: dict[str, Any] = {"block_size": pool.page_size, "dtype": self._bytes}
        shuffled = "-shuffled" if order == "shuffled" else ""
        if not hadamard and shuffled:
            return MLAAttentionSpec(**sizes, head_size=row, page_format=f"opaque:indexer{shuffled}")
        # If only one of two engines multiplies its keys and queries, the other one chooses other
        # tokens. The bytes do not show it, so the name of the format does. Such pages move whole.
        own = f"opaque:indexer{shuffled}-hadamard" if hadamard else PLAIN
        return MLAAttentionSpec(
            **sizes, head_size=_INDEX_KEY, scale_dtype="float32", page_format=own
        )


def _scale_fields(pool: TokenPool) -> dict[str, Any]:
    """Return the fields of a spec whose elements have scales in buffers of their own."""
    if pool.scales is None:
        return {}
    return {
        "scale_dtype": pool.scales.dtype,
        "elements_per_scale": pool.scales.elements,
        "tokens_per_scale": pool.scales.tokens,
    }


def stages_of(path: str, fields: object, read: Callable[[str, object], Any]) -> tuple[Any, ...]:
    """Return the results of *read* for one pool, or for the pool of each pipeline stage."""
    if isinstance(fields, Sequence):
        return tuple(read(f"{path}[{at}]", pool) for at, pool in enumerate(fields))
    return (read(path, fields),)
