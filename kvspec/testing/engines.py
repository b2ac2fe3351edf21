"""Draw engines: who holds which layers, units and tokens, in which blocks and layouts.

Two engines of one model share its specs and nothing else: stages, context ranks, shardings, block
sizes, kernels' blocks, padding, layouts and draft layers are each engine's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations

import attrs
from hypothesis import strategies as st

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.ownership.parallel import ParallelConfig
from kvspec.specs import AttentionSpec, LayerSpec, UniformTypeKVCacheSpecs
from kvspec.testing.carve import X_BYTES, rank_units
from kvspec.testing.kinds import KINDS
from kvspec.testing.parallels import Shape, explicit_shardings, is_state, parallels, sample, shapes

NAMED_LAYOUTS = tuple(
    "LBHNC LBNHC LHBNC BLHNC BLNHC BHLNC LKBNHC LBKNHC LBKHNC BLKHNC".split()  # noqa: SIM905
)
_ORDERS = ["".join(order) + "C" for letters in ("LBHN", "LBKHN") for order in permutations(letters)]
_PAGES = ("LBHKNC", "LBKHNC", "LKBHNC", "BLHKNC")
"""Layouts in which a head's keys are a page, so that formats may order it."""
_ANY = st.sampled_from(NAMED_LAYOUTS) | st.sampled_from(_ORDERS) | st.sampled_from(_PAGES)

_NULLS = st.sampled_from((None, None, 0, 2))
"""The null block of an engine, or none."""


def layouts(spec: LayerSpec) -> st.SearchStrategy[str]:
    """Draw a layout that *spec* can have: named or any permutation of the letters, C last.

    Layers with heads of their own have no common head axis outside of them: L stands before H.
    Parts with units or rows of their own are set apart before those are counted: as planes, or as
    tensors of a page, which lie inside L and B.
    """
    if is_state(spec):
        return _ANY
    pages = [spec.of_layer(layer).parts for layer in spec.layers] or [spec.parts]
    ragged = "H" * any(len({part.units for part in parts}) > 1 for parts in pages)
    ragged += "N" * any(len({part.states for part in parts}) > 1 for parts in pages)
    rows = {part.states for part in spec.parts}
    return _fitting(ragged, ("H" + "N" * (len(rows) > 1)) * bool(spec.layers))


@lru_cache
def _fitting(ragged: str, inner: str) -> st.SearchStrategy[str]:
    """Draw a layout: *ragged* letters stand inside of its parts, *inner* ones of its layers."""

    def fits(name: str) -> bool:
        separate = min(max(map(name.index, "LB")), name.find("K") % len(name))
        inside = all(separate < name.index(letter) for letter in ragged)
        return inside and all(name.index("L") < name.index(letter) for letter in inner)

    return _ANY.filter(fits)


@st.composite
def groups(draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS)) -> tuple[KVCacheGroup, ...]:
    """Draw one to three groups of different *kinds*, each of one to three layers."""
    names = draw(st.lists(st.sampled_from(tuple(kinds)), min_size=1, max_size=3, unique=True))
    found = []
    for name in names:
        spec = draw(KINDS[name])
        layers = spec.layers or [f"{name}.{i}" for i in range(draw(st.integers(1, 3)))]
        found.append(KVCacheGroup(name=name, layers=tuple(layers), spec=spec))
    return tuple(found)


@st.composite
def engines(
    draw: st.DrawFn,
    model: Sequence[KVCacheGroup],
    largest: int = 6,
    parallel: ParallelConfig | None = None,
    shape: Shape | None = None,
) -> EngineSpec:
    """Draw an engine that serves *model*: its blocks, layouts, padding, and sizes unless given."""
    model = [attrs.evolve(group, kernel_block_size=None) for group in model]
    shape = shape or (draw(shapes())[0] if parallel is None else Shape())
    if parallel is None:
        model = [draw(_blocks(_owning_as_all(group), shape)) for group in model]
        parallel = draw(parallels(model, largest, shape))
        model = [draw(_own_way(group, parallel)) for group in model]
    layout = draw(layouts(model[0].spec))
    bare = EngineSpec(groups=tuple(model), parallel=parallel)
    own = []
    for group in model:
        name = draw(layouts(group.spec)) if group is not model[0] else layout
        may_pad = is_state(group.spec) or set(name[:2]) == {"L", "B"}
        pad = draw(sample(None, *range(6))) if may_pad and draw(st.booleans()) else None
        spec = _padded(bare, group, pad)
        spec = _formatted(spec, draw(sample(*_formats(spec, name))))
        override = None if name == layout else name
        kernel = draw(_kernel_blocks(spec)) if pad is None else None
        own.append(attrs.evolve(group, spec=spec, layout=override, kernel_block_size=kernel))
    null = draw(_NULLS)
    return EngineSpec(groups=tuple(own), parallel=parallel, layout=layout, null_block=null)


def _formats(spec: LayerSpec, layout: str) -> list[str]:
    """Return the page formats that *spec* can have in *layout*: those of keys and of values.

    An opaque one is what the model has, and stays.
    """
    layers = [spec.of_layer(layer) for layer in spec.layers or ("",)]
    names = {part.name for own in layers for part in own.parts}
    if names == {"page"}:
        return [getattr(own, "page_format", "plain") for own in layers]
    if names != {"k", "v"} or "K" not in layout or layout[-2:] != "NC":
        return ["plain"]
    packed = all(own.parts[0].content_bytes % X_BYTES == 0 for own in layers)
    return ["plain", "keys-transposed", *["x-packed"] * 2 * packed]


def _formatted(spec: LayerSpec, page_format: str) -> LayerSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        own = {layer: _formatted(each, page_format) for layer, each in spec.specs.items()}
        return UniformTypeKVCacheSpecs(specs=own)
    if isinstance(spec, AttentionSpec):
        return attrs.evolve(spec, page_format=page_format)
    return spec


@st.composite
def sharing_engines(draw: st.DrawFn, model: Sequence[KVCacheGroup], largest: int = 4) -> EngineSpec:
    """Draw an engine whose groups can share one memory: equal pages, layers and blocks outermost.

    Of no uniform-type group. With blocks outermost, the groups have as many layers on each stage.
    """
    shape = draw(shapes())[0]
    model = [draw(_blocks(_owning_as_all(group), shape)) for group in model]
    parallel = draw(parallels(model, largest, shape))
    model = [draw(_own_way(group, parallel)) for group in model]
    bare = EngineSpec(groups=tuple(model), parallel=parallel)
    page = max(_page(bare, group, group.layers[0]) for group in model) + draw(st.integers(0, 5))
    counts = {
        stage: {len(bare.layers_at(group, stage)) for group in model} - {0}
        for stage in range(bare.parallel.pp_size)
    }
    outer = "BL" if all(len(each) < 2 for each in counts.values()) and draw(st.booleans()) else "LB"  # noqa: PLR2004
    names = st.sampled_from([f"{outer}{inner}C" for inner in ("HN", "NH", "KNH", "KHN", "HKN")])
    groups = []
    for group in model:
        layout = draw(names)
        spec = attrs.evolve(group.spec, page_size_padded=page)
        spec = _formatted(spec, draw(sample(*_formats(spec, layout))))
        groups.append(attrs.evolve(group, spec=spec, layout=layout))
    return attrs.evolve(bare, groups=tuple(groups), null_block=draw(_NULLS))


@st.composite
def _blocks(draw: st.DrawFn, group: KVCacheGroup, shape: Shape) -> KVCacheGroup:
    """Draw this engine's own block size of a group, often the model's."""
    spec = group.spec
    if any(part.name == "page" and part.states == 1 for part in spec.parts):
        return group
    if is_state(spec):
        size = draw(sample(1, 1, 2, 4, 8))
        return attrs.evolve(group, spec=attrs.evolve(spec, block_size=size))
    if shape.rows is None and draw(st.booleans()):
        return group
    row = max(part.tokens_per_state for part in spec.parts)
    size = row * draw(sample(*(shape.rows or (1, 2, 3, 4, 6, 8))))
    if isinstance(spec, UniformTypeKVCacheSpecs):
        each = {name: attrs.evolve(own, block_size=size) for name, own in spec.specs.items()}
        return attrs.evolve(group, spec=UniformTypeKVCacheSpecs(specs=each))
    return attrs.evolve(group, spec=attrs.evolve(spec, block_size=size))


@st.composite
def _kernel_blocks(draw: st.DrawFn, spec: LayerSpec) -> int | None:
    """Draw a finer block in memory, or none."""
    if is_state(spec) or draw(st.integers(0, 2)):
        return None
    row, size = max(part.tokens_per_state for part in spec.parts), spec.block_size
    fits = [d for d in range(row, size + 1, row) if size % d == 0]
    return draw(sample(*fits))


def _padded(engine: EngineSpec, group: KVCacheGroup, pad: int | None) -> LayerSpec:
    """Return the spec of *group*: *pad* bytes more in each page of the fullest rank, or none."""
    layers = group.spec.layers or group.layers[:1]
    own = {
        layer: attrs.evolve(
            group.spec.of_layer(layer),
            page_size_padded=None if pad is None else _page(engine, group, layer) + pad,
        )
        for layer in layers
    }
    return UniformTypeKVCacheSpecs(specs=own) if group.spec.layers else own[layers[0]]


def _page(engine: EngineSpec, group: KVCacheGroup, layer: str) -> int:
    """Return the bytes of one block of *layer* on the rank that holds most."""
    return max(
        sum(
            len(rank_units(engine, rank, p, group)) * p.states * p.content_bytes
            for p in group.spec.of_layer(layer).parts
        )
        for rank in engine.parallel.ranks
    )


def _owning_as_all(group: KVCacheGroup) -> KVCacheGroup:
    """Return *group* without a way of its own to own units or tokens."""
    return attrs.evolve(group, shardings={}, context_sharded=True)


@st.composite
def _own_way(draw: st.DrawFn, group: KVCacheGroup, parallel: ParallelConfig) -> KVCacheGroup:
    """Draw whether a group owns its units, or its tokens, otherwise than its engine's others."""
    if draw(st.sampled_from((True, True, True, True, False))):
        return group
    if parallel.context_size > 1:
        return attrs.evolve(group, context_sharded=is_state(group.spec))
    if group.spec.layers:
        return group
    by_size = {(part.units, part.granularity): part for part in group.spec.parts}
    sharded = {size: draw(explicit_shardings(*size, parallel.tp_size)) for size in by_size}
    shardings = {part.name: sharded[part.units, part.granularity] for part in group.spec.parts}
    return attrs.evolve(group, shardings=shardings)
