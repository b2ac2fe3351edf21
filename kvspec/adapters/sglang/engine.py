"""Read SGLang's token pools of one rank as the `EngineSpec` of the whole engine.

See `kvspec.adapters.sglang` for how this works, with an example.

Invariant: nothing is guessed. A pool is recognised by its exact class. Each buffer must have a slot
for each token, with the shape ``[slots, heads, size]``, and its pages must follow one another from
slot 0 on. The sizes that a pool does not contain (the model's heads, the window) come from the
caller, and must agree with the pool.

How it works:
    A server with attention data parallelism is several engines. The TP ranks are divided into runs
    of consecutive ranks, and each run is one engine. With TP 8 and 4 engines:

        server's rank    0   1   2   3   4   5   6   7
        engine           0   0   1   1   2   2   3   3
        rank in it       0   1   0   1   0   1   0   1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader, check_tp_rank, chosen, model_heads
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance, mapping, positive_int
from kvspec.memory.from_tensors import check_tensor
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

# The page of slot 0. SGLang writes dummy outputs to slot 0, and no request owns it.
NULL_PAGE = 0

# The names of the groups: layers that keep all tokens, layers with a window, layers of a draft.
FULL_GROUP, WINDOW, DRAFT = "full", "swa", "draft"

# The classes of SGLang that are read, by exact name. A subclass may keep another order.
POOL_KINDS = ("MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool")

# Classes of SGLang that are not read yet, and why.
POOLS_NOT_YET = {
    "MHATokenToKVPoolFP4": "scales of two elements each lie in buffers of their own",
    "MLATokenToKVPoolFP4": "scales of two elements each lie in buffers of their own",
    "NSATokenToKVPool": "an indexer's keys lie page by page, their scales after them",
    "DSATokenToKVPool": "an indexer's keys lie page by page, their scales after them",
    "DoubleSparseTokenToKVPool": "labels lie beside keys and values",
    "HybridLinearKVPool": "recurrent states lie in a pool of their own",
    "DeepSeekV4TokenToKVPool": "compressed tokens lie in pools of their own",
}

# The attributes of pools with scales for small groups of elements. Their type may be called uint8.
SCALE_BUFFERS = ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")

# A buffer has the axes slots, heads and size.
_CONV_AXES = 3


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
    layer_name: str = "layers.{}",
    draft_name: str = "draft.{}",
) -> EngineSpec:
    """Return the engine that the token pools belong to.

    The groups are called ``full``, ``swa`` (layers with a window) and ``draft``. The blocks are the
    pages of a rank.

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
        scales: The scale of keys and the scale of values of each layer of float8, by the layer's
            name in the result: the `k_scale` and `v_scale` of its `RadixAttention`, or 1.0 for
            None. Required for such layers: the pools do not contain the scales.
        tp_rank: The attention rank that the pools belong to.
        draft_pool: The pool of the draft model. Each context rank holds the whole draft.
        layer_name: The peer's name of a layer, with ``{}`` in place of its number, such as
            ``model.layers.{}.self_attn.attn``.
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
    if len(sizes) > 1:
        raise SpecError("windows", windows, "one size for all layers with a window")
    stages = stages_of(
        "pools", pools, lambda path, pool: read_pools(path, pool, FULL_GROUP, windows)
    )
    if len(stages) != parallel.pp_size:
        wanted = f"one pool for each of the {parallel.pp_size} pipeline stages"
        raise SpecError("pools", f"{len(stages)} pools", wanted)
    drafts = () if draft_pool is None else read_pools("draft_pool", draft_pool, DRAFT)
    window = sizes.pop() if sizes else sliding_window
    reader = _PoolReader(
        parallel,
        total_num_kv_heads,
        window,
        key_content,
        mapping("scales", scales or {}, "layer names to pairs of scales"),
        tp_rank,
        layer_name,
        draft_name,
    )
    groups = [
        reader.group(name, [[p for p in stage if p.group == name] for stage in stages])
        for name in (FULL_GROUP, WINDOW)
        if any(pool.group == name for stage in stages for pool in stage)
    ]
    if drafts:
        groups.append(reader.group(DRAFT, [drafts]))
    staged = reader.staged(stages, drafts)
    return EngineSpec(groups=groups, parallel=staged, layout="LKBNHC", null_block=NULL_PAGE)


@attrs.frozen
class _PoolReader:
    """The facts that the pools do not contain: see `engine_spec`."""

    parallel: ParallelConfig
    heads: int | Mapping[str, int] | None
    window: int | None
    content: KeyContent | Mapping[str, KeyContent] | None
    scales: Mapping[str, tuple[Any, Any]]
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
            spec=self._scaled(specs[0], layers),
            # A latent has no planes of keys and values, as the engine's layout has.
            layout="LBNHC" if pools[0].latent else None,
            # Each context rank runs the whole draft.
            context_sharded=name != DRAFT,
        )

    def _scaled(self, spec: AttentionSpec, layers: Sequence[str]) -> LayerSpec:
        """Return *spec* with the identity of the scales of *layers*, if its type has scales."""
        if "float8" not in spec.dtype:
            return spec
        specs: dict[str, LayerSpec] = {}
        for layer in layers:
            if layer not in self.scales:
                wanted = "the scale of its keys and the scale of its values: its pool has float8"
                raise SpecError(f"scales[{layer!r}]", None, wanted)
            # The digest leaves out the name, so that layers with equal scales have equal specs.
            digest = scales_digest({"layer": self.scales[layer]})
            specs[layer] = attrs.evolve(spec, scales_digest=digest)
        first = specs[layers[0]]
        one_for_all = all(other == first for other in specs.values())
        return first if one_for_all else UniformTypeKVCacheSpecs(specs=specs)

    def staged(
        self, stages: Sequence[Sequence[TokenPool]], drafts: Sequence[TokenPool]
    ) -> ParallelConfig:
        """Return the parallel sizes with the layers of each stage. A draft is on the last one."""
        if self.parallel.pp_size == 1:
            return self.parallel
        names = [self.names(stage) for stage in stages]
        names[-1] += self.names(drafts)
        return attrs.evolve(self.parallel, stages=names)

    def _spec(self, pool: TokenPool) -> AttentionSpec:
        """Return the spec of a pool's layers in the model."""
        content = chosen(self.content, pool.group)
        if pool.latent:
            _, heads, size = pool.shape("latent")
            if heads != 1:
                raise SpecError(f"{pool.path}.kv_buffer", heads, "one latent for each slot")
            if pool.replicated and self.parallel.dcp_size > 1 and pool.group != DRAFT:
                wanted = "False; not yet: context ranks that each hold all tokens"
                raise SpecError(f"{pool.path}.dcp_replicated", pool.replicated, wanted)
            return MLAAttentionSpec(
                block_size=pool.page_size, head_size=size, dtype=pool.dtype, key_content=content
            )
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
            "key_content": content,
        }
        if pool.group != WINDOW:
            return FullAttentionSpec(**sizes)
        return SlidingWindowSpec(
            **sizes, sliding_window=positive_int("sliding_window", self.window)
        )


@attrs.frozen
class TokenPool:
    """Layers of one rank that share slots.

    Attributes:
        path: The path to the pool, for error messages.
        group: The group of the layers.
        page_size: Tokens of a page.
        dtype: The type of the elements.
        layers: The numbers of the layers in the model.
        buffers: For each layer, in the same order, the tensors by the name of their part.
        replicated: Whether each context rank holds all tokens.
    """

    path: str
    group: str
    page_size: int
    dtype: str
    layers: tuple[int, ...]
    buffers: tuple[dict[str, Any], ...]
    replicated: bool = False

    @property
    def latent(self) -> bool:
        """Whether a layer keeps one latent for each token."""
        return "latent" in self.buffers[0]

    def shape(self, part: str) -> tuple[int, int, int]:
        """Return the slots, heads and elements of *part*. All layers must have the same."""
        shapes = [tuple(buffer[part].shape) for buffer in self.buffers]
        if len(set(shapes)) > 1:
            raise SpecError(f"{self.path}.{part}", shapes, "one shape in all layers")
        slots, heads, size = shapes[0]
        return slots, heads, size


def read_pools(
    path: str, fields: object, group: str, windows: Mapping[int, int] | None = None
) -> tuple[TokenPool, ...]:
    """Return the token pools of *fields*, one of SGLang's pools. Its layers belong to *group*.

    Layers of a plain pool that are in *windows* belong to the group of layers with a window.
    """
    pool = FieldReader(path, fields)
    name = type(fields).__name__
    if name not in POOL_KINDS:
        why = f"; not yet: {POOLS_NOT_YET[name]}" if name in POOLS_NOT_YET else ""
        raise SpecError(path, name, f"one of {', '.join(POOL_KINDS)}{why}")
    if name == "SWAKVPool":
        return tuple(_halves(pool))
    _check_layout(pool)
    # A pipeline stage has the layers from `start_layer` on.
    start = pool.get("start_layer").size(0, least=0)
    buffers = tuple(_buffers(pool, latent=name.startswith("MLA")))
    whole = _pool(pool, group, tuple(range(start, start + len(buffers))), buffers)
    return tuple(_divided(whole, windows or {}))


def _divided(pool: TokenPool, windows: Mapping[int, int]) -> Iterator[TokenPool]:
    """Yield the layers of *pool* without a window, and then those with one."""
    for group, windowed in ((pool.group, False), (WINDOW, True)):
        rows = [row for row in zip(pool.layers, pool.buffers, strict=True)
                if (row[0] in windows) is windowed]  # fmt: skip
        if rows:
            layers, buffers = zip(*rows, strict=True)
            yield attrs.evolve(pool, group=group, layers=layers, buffers=buffers)


def _halves(pool: FieldReader) -> Iterator[TokenPool]:
    """Yield the two pools of a model with windows.

    `layers_mapping` has the place of each layer: {0: (0, False), 1: (0, True)} puts layer 0 at
    place 0 of the full pool, and layer 1 at place 0 of the pool with windows.
    """
    field = pool.get("layers_mapping")
    places = mapping(field.path, field.value, "layer numbers to places")
    for attribute, group, windowed in (
        ("full_kv_pool", FULL_GROUP, False),
        ("swa_kv_pool", WINDOW, True),
    ):
        half = pool.get(attribute)
        if type(half.value).__name__ != "MHATokenToKVPool":
            raise SpecError(half.path, type(half.value).__name__, "a MHATokenToKVPool")
        _check_layout(half)
        numbers = {place: layer for layer, (place, of_window) in places.items()
                   if of_window is windowed}  # fmt: skip
        buffers = tuple(_buffers(half, latent=False))
        if sorted(numbers) != list(range(len(buffers))):
            wanted = f"a layer for each of the {len(buffers)} buffers of {half.path}"
            raise SpecError(field.path, sorted(numbers), wanted)
        # A pipeline stage may have layers of one kind only.
        if buffers:
            layers = tuple(numbers[place] for place in range(len(buffers)))
            yield _pool(half, group, layers, buffers)


def _pool(
    pool: FieldReader, group: str, layers: tuple[int, ...], buffers: tuple[dict[str, Any], ...]
) -> TokenPool:
    if not buffers:
        raise SpecError(pool.path, "no buffers", "at least one layer")
    size, dtype = pool.get("page_size").size(), pool.get("dtype").dtype()
    replicated = pool.get("dcp_replicated").flag(default=False)
    return TokenPool(pool.path, group, size, dtype, layers, buffers, replicated)


def _check_layout(pool: FieldReader) -> None:
    """Raise `SpecError` unless keys and values are whole rows, and lie in their buffers alone."""
    layout = pool.get("kv_cache_layout")
    # Some ROCm kernels split them into chunks.
    if layout.value not in (None, "nhd"):
        wanted = "'nhd'; not yet: heads in chunks of 16 bytes"
        raise SpecError(layout.path, layout.value, wanted)
    for name in SCALE_BUFFERS:
        scales = pool.get(name)
        if scales.value is not None:
            wanted = "None; not yet: scales of elements in buffers of their own"
            raise SpecError(scales.path, type(scales.value).__name__, wanted)


def _buffers(pool: FieldReader, *, latent: bool) -> Iterator[dict[str, Any]]:
    """Yield the buffers of each layer by part. Each must have three axes."""
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
            if len(buffer.value.shape) != _CONV_AXES:
                wanted = "[slots, heads, size]"
                raise SpecError(f"{buffer.path}.shape", tuple(buffer.value.shape), wanted)
        yield dict(zip(columns, (buffer.value for buffer in row), strict=True))


def stages_of(path: str, fields: object, read: Callable[[str, object], Any]) -> tuple[Any, ...]:
    """Return the results of *read* for one pool, or for the pool of each pipeline stage."""
    if isinstance(fields, Sequence):
        return tuple(read(f"{path}[{at}]", pool) for at, pool in enumerate(fields))
    return (read(path, fields),)
