"""Draw engines: how the ranks of one engine hold the layers of a model.

How it works:
    A model is a list of groups with specs. `engines` adds what belongs to an engine, in two steps:

    1. `_bare_engines` draws block sizes, stages, shardings and context ranks. Now it is known which
       rank holds what, and so how many bytes a page has.
    2. `laid_out` draws layouts, page formats, padding and blocks in memory. Padding depends on the
       page of the fullest rank, so it must come last.

    Not every layout fits every group. Example: a layer with 2 heads of keys, and 1 unit of scales.
    The letter H counts units, so keys and scales must be separated (L and B, or K) before H:

        LBHNC    fits: L and B come first. One page holds first all keys, then all scales
        LKHBNC   fits: K separates keys from scales
        LHBNC    does not fit: H counts 2 for the keys and 1 for the scales
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations

import attrs
from hypothesis import strategies as st

from kvspec.check.counting import rank_units
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.engines.letters import NAMED_LAYOUTS
from kvspec.errors import SpecError
from kvspec.ownership.parallel import ParallelConfig
from kvspec.specs import AttentionSpec, CircularBufferSpec, LayerSpec, UniformTypeKVCacheSpecs
from kvspec.testing.carve import ALIASES, X_BYTES
from kvspec.testing.kinds import KINDS
from kvspec.testing.parallels import (
    Shape,
    explicit_shardings,
    has_one_block,
    is_state,
    parallels,
    sample,
    shapes,
)
from kvspec.testing.supports import Supports

_ORDERS = ["".join(order) + "C" for letters in ("LBHN", "LBKHN") for order in permutations(letters)]
# Here the keys of a head are adjacent in memory, as the page formats of keys require.
_PAGES = ("LBHKNC", "LBKHNC", "LKBHNC", "BLHKNC")

# vLLM's null block is 0. Block 2 shows code that assumes 0.
_NULLS = st.sampled_from((None, None, 0, 2))


def layouts(spec: LayerSpec, allowed: tuple[str, ...] | None = None) -> st.SearchStrategy[str]:
    """Draw a layout that is legal for *spec*: a named one, or any permutation with C last.

    If the layers have different numbers of heads, L comes before H. If the parts have different
    numbers of units or rows, the parts are separated before H or N: by K, or by L and B.

    Args:
        spec: The spec of a group.
        allowed: The layouts to draw from. All by default.

    Returns:
        A strategy of layouts, such as "LBHNC".

    Raises:
        SpecError: If no allowed layout is legal for *spec*.

    >>> import kvspec
    >>> from hypothesis import find
    >>> spec = kvspec.MLAAttentionSpec(block_size=4, head_size=2, dtype="uint8")
    >>> find(layouts(spec), lambda layout: layout.startswith("B"))[-1]
    'C'
    """
    # The named layouts, which serving engines use, are drawn more often than the others.
    sets = (NAMED_LAYOUTS, _ORDERS, _PAGES) if allowed is None else (allowed,)
    legal = [names for names in (layouts_of(spec, each) for each in sets) if names]
    if not legal:
        raise SpecError("layouts", allowed, "a layout that is legal for each kind of layers")
    return st.one_of([sample(*names) for names in legal])


def layouts_of(spec: LayerSpec, names: Sequence[str]) -> list[str]:
    """Return those of the layouts *names* that are legal for *spec*."""
    if is_state(spec):
        return _legal_layouts("", "", tuple(names))
    pages = [spec.of_layer(layer).parts for layer in spec.layers] or [spec.parts]
    after_parts = "H" * any(len({part.units for part in parts}) > 1 for parts in pages)
    after_parts += "N" * any(len({part.states for part in parts}) > 1 for parts in pages)
    rows = {part.states for part in spec.parts}
    after_layers = ("H" + "N" * (len(rows) > 1)) * bool(spec.layers)
    return _legal_layouts(after_parts, after_layers, tuple(names))


@lru_cache
def _legal_layouts(after_parts: str, after_layers: str, names: tuple[str, ...]) -> list[str]:
    """Return the layouts that separate parts and layers early enough.

    The axes *after_parts* have other lengths in other parts, so the parts are separated before
    them. The axes *after_layers* have other lengths in other layers, so L comes before them.
    """

    def is_legal(name: str) -> bool:
        name = ALIASES.get(name, name)
        if not set(name) >= set("LBHNC"):
            return False
        # The parts are separated after K, or after L and B, whichever comes first. Without K,
        # `find` returns -1, and -1 modulo the length is the last place.
        separated = min(max(map(name.index, "LB")), name.find("K") % len(name))
        return all(separated < name.index(letter) for letter in after_parts) and all(
            name.index("L") < name.index(letter) for letter in after_layers
        )

    return [*filter(is_legal, names)]


@st.composite
def groups(
    draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS), least: int = 1, most: int = 3
) -> tuple[KVCacheGroup, ...]:
    """Draw the groups of a model: one to three groups of one to three layers each.

    Args:
        draw: Passed by Hypothesis.
        kinds: Keys of `KINDS`. Each group is of another kind.
        least: The smallest number of groups.
        most: The largest number of groups.

    Returns:
        The groups, named after their kinds.

    >>> from hypothesis import find
    >>> [group.layers for group in find(groups(["MLA"]), lambda _: True)]
    [('MLA.0',)]
    """
    names = draw(
        st.lists(st.sampled_from(tuple(kinds)), min_size=least, max_size=most, unique=True)
    )
    model = []
    for name in names:
        spec = draw(KINDS[name])
        layers = spec.layers or [f"{name}.{i}" for i in range(draw(st.integers(1, 3)))]
        model.append(KVCacheGroup(name=name, layers=tuple(layers), spec=spec))
    return tuple(model)


@st.composite
def engines(
    draw: st.DrawFn,
    model: Sequence[KVCacheGroup],
    largest: int = 6,
    shape: Shape | None = None,
) -> EngineSpec:
    """Draw an engine that serves *model*.

    Args:
        draw: Passed by Hypothesis.
        model: The groups, with any block sizes. The engine draws its own.
        largest: The largest TP size of an engine without pipeline stages and PCP ranks. Other
            engines have at most half of it.
        shape: Pipeline, context and block sizes. Drawn by default.

    Returns:
        The engine.

    >>> from hypothesis import given, settings
    >>> @settings(max_examples=2)
    ... @given(groups(["MLA"]).flatmap(engines))
    ... def test_group_is_that_of_the_model(engine: EngineSpec) -> None:
    ...     assert ["MLA"] == [group.name for group in engine.groups]
    >>> test_group_is_that_of_the_model()
    """
    model = [attrs.evolve(group, kernel_block_size=None) for group in model]
    shape = shape or draw(shapes())[0]
    return draw(laid_out(draw(_bare_engines(model, largest, shape)), shape))


@st.composite
def _bare_engines(
    draw: st.DrawFn, model: Sequence[KVCacheGroup], largest: int, shape: Shape
) -> EngineSpec:
    """Draw an engine without layouts, padding and blocks in memory."""
    model = [draw(_blocks(_without_own_ownership(group), shape)) for group in model]
    parallel = draw(parallels(model, largest, shape))
    if shape.supports.shardings:
        model = [draw(_own_ownership(group, parallel)) for group in model]
    return EngineSpec(groups=tuple(model), parallel=parallel)


@st.composite
def laid_out(draw: st.DrawFn, bare: EngineSpec, shape: Shape = Shape()) -> EngineSpec:  # noqa: B008
    """Draw the layouts, page formats, padding, blocks in memory and null block of *bare*."""
    model, supports = bare.groups, shape.supports
    # If layouts must be equal, parts of a group of the model have one layout, on both sides.
    drawn = dict(shape.layouts)
    names = []
    for group in model:
        same = group.name.partition(" on ")[0] if supports.equal_layouts else group.name
        if same not in drawn:
            drawn[same] = draw(layouts(group.spec, supports.layouts))
        names.append(drawn[same])
    laid_out_groups = []
    for group, name in zip(model, names, strict=True):
        # Padding is at the end of a page, so the bytes of a page must be adjacent.
        letters = ALIASES.get(name, name)
        may_pad = is_state(group.spec) or set(letters[:2]) == {"L", "B"}
        may_pad = may_pad and supports.padding
        pad = draw(sample(None, *range(6))) if may_pad and draw(st.booleans()) else None
        spec = _padded(bare, group, pad)
        formats = _formats(spec, letters)
        spec = _formatted(spec, draw(sample(*(formats if supports.transposed else formats[:1]))))
        override = None if name == names[0] else name
        kernel = draw(_kernel_blocks(spec)) if pad is None and supports.kernel_blocks else None
        laid_out_groups.append(
            attrs.evolve(group, spec=spec, layout=override, kernel_block_size=kernel)
        )
    null = draw(_NULLS) if supports.null_blocks else None
    return EngineSpec(
        groups=tuple(laid_out_groups), parallel=bare.parallel, layout=names[0], null_block=null
    )


def _formats(spec: LayerSpec, layout: str) -> list[str]:
    """Return the page formats that are legal for *spec* in *layout*.

    An opaque page has one format, that of the model.
    """
    layer_specs = [spec.of_layer(layer) for layer in spec.layers or ("",)]
    names = {part.name for layer_spec in layer_specs for part in layer_spec.parts}
    if names == {"page"}:
        return [getattr(layer_spec, "page_format", "plain") for layer_spec in layer_specs]
    if names != {"k", "v"} or "K" not in layout or layout[-2:] != "NC":
        return ["plain"]
    packed = all(spec.parts[0].content_bytes % X_BYTES == 0 for spec in layer_specs)
    # Few specs can be packed, so those that can are packed often.
    return ["plain", "keys-transposed", *["x-packed"] * 2 * packed]


def _formatted(spec: LayerSpec, page_format: str) -> LayerSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        formatted = {name: _formatted(layer, page_format) for name, layer in spec.specs.items()}
        return UniformTypeKVCacheSpecs(specs=formatted)
    if isinstance(spec, AttentionSpec):
        return attrs.evolve(spec, page_format=page_format)
    return spec


def sharing_layouts(supports: Supports, outer: str = "LB") -> list[str]:
    """Return the supported layouts in which groups can share one memory, with *outer* axes first.

    >>> sharing_layouts(Supports(layouts=["LBNHC", "BLNHC", "LHBNC"]))
    ['LBNHC']
    """
    every = [f"{outer}{inner}C" for inner in ("HN", "NH", "KNH", "KHN", "HKN")]
    allowed = every if supports.layouts is None else supports.layouts
    return [name for name in allowed if ALIASES.get(name, name).startswith(outer)]


@st.composite
def sharing_engines(
    draw: st.DrawFn, model: Sequence[KVCacheGroup], largest: int, shape: Shape
) -> EngineSpec:
    """Draw an engine whose groups can share one memory. *model* has no uniform-type group.

    All pages have equal bytes, and layers and blocks are the outer axes. If blocks come first, the
    groups must have equal numbers of layers on each stage, because their blocks must be equal.
    """
    supports = shape.supports
    bare = draw(_bare_engines(model, largest, shape))
    model = bare.groups
    page = max(page_bytes(bare, group, group.layers[0]) for group in model)
    page += draw(st.integers(0, 5)) if supports.padding else 0
    layer_counts = [
        {len(bare.layers_at(group, stage)) for group in model} - {0}
        for stage in range(bare.parallel.pp_size)
    ]
    # With equal layouts, the stages of the other engine would have to be equal too.
    free = not supports.equal_layouts and all(len(counts) < 2 for counts in layer_counts)  # noqa: PLR2004
    names = sharing_layouts(supports)
    if draw(st.booleans()) and free:
        names = sharing_layouts(supports, "BL") or names
    groups = []
    for group in model:
        layout = shape.layouts.get(group.name) or draw(sample(*names))
        spec = attrs.evolve(group.spec, page_size_padded=page)
        formats = _formats(spec, ALIASES.get(layout, layout))
        spec = _formatted(spec, draw(sample(*(formats if supports.transposed else formats[:1]))))
        groups.append(attrs.evolve(group, spec=spec, layout=layout))
    null = draw(_NULLS) if supports.null_blocks else None
    return attrs.evolve(bare, groups=tuple(groups), null_block=null)


@st.composite
def _blocks(draw: st.DrawFn, group: KVCacheGroup, shape: Shape) -> KVCacheGroup:
    """Draw the block size of a group, which is often that of the model."""
    spec = group.spec
    # An opaque page is one block, so its size cannot change.
    is_page = any(part.name == "page" and part.states == 1 for part in spec.parts)
    if is_page or shape.supports.equal_blocks:
        return group
    if isinstance(spec, CircularBufferSpec):
        # Speculative tokens need more rows, so the rings of two engines rarely have equal sizes.
        most = spec.compress_ratio * (1 + spec.overlap) - 1
        size = draw(sample(spec.block_size, most, most + 1, 2 * most, 8, 16))
        return attrs.evolve(group, spec=attrs.evolve(spec, block_size=max(size, most)))
    if is_state(spec):
        size = draw(sample(1, 1, 2, 4, 8))
        return attrs.evolve(group, spec=attrs.evolve(spec, block_size=size))
    if shape.rows is None and draw(st.booleans()):
        return group
    row = max(part.tokens_per_state for part in spec.parts)
    size = row * draw(sample(*(shape.rows or (1, 2, 3, 4, 6, 8))))
    if isinstance(spec, UniformTypeKVCacheSpecs):
        sized = {name: attrs.evolve(layer, block_size=size) for name, layer in spec.specs.items()}
        return attrs.evolve(group, spec=UniformTypeKVCacheSpecs(specs=sized))
    return attrs.evolve(group, spec=attrs.evolve(spec, block_size=size))


@st.composite
def _kernel_blocks(draw: st.DrawFn, spec: LayerSpec) -> int | None:
    """Draw the size of a block in memory, a divisor of the table's block size. Mostly None."""
    if has_one_block(spec) or draw(st.integers(0, 2)):
        return None
    row, size = max(part.tokens_per_state for part in spec.parts), spec.block_size
    fits = [d for d in range(row, size + 1, row) if size % d == 0]
    return draw(sample(*fits))


def _padded(engine: EngineSpec, group: KVCacheGroup, pad: int | None) -> LayerSpec:
    """Return the spec of *group* with *pad* bytes after each page of the fullest rank.

    If *pad* is None, the spec has no padding.
    """
    layers = group.spec.layers or group.layers[:1]
    padded = {
        layer: attrs.evolve(
            group.spec.of_layer(layer),
            page_size_padded=None if pad is None else page_bytes(engine, group, layer) + pad,
        )
        for layer in layers
    }
    return UniformTypeKVCacheSpecs(specs=padded) if group.spec.layers else padded[layers[0]]


def page_bytes(engine: EngineSpec, group: KVCacheGroup, layer: str) -> int:
    """Return the bytes of one block of *layer* on the rank that holds the most units."""
    return max(
        sum(
            len(rank_units(engine, rank, p, group)) * p.states * p.content_bytes
            for p in group.spec.of_layer(layer).parts
        )
        for rank in engine.parallel.ranks
    )


def _without_own_ownership(group: KVCacheGroup) -> KVCacheGroup:
    """Return *group* without its own shardings of units and tokens."""
    return attrs.evolve(group, shardings={}, context_sharded=True)


@st.composite
def _own_ownership(draw: st.DrawFn, group: KVCacheGroup, parallel: ParallelConfig) -> KVCacheGroup:
    """Draw whether a group shards its units or tokens differently from its engine."""
    if draw(st.sampled_from((True, True, True, False))):
        return group
    if parallel.context_size > 1:
        # An attention group that does not follow its engine holds all tokens on each context rank.
        # A state group always holds whole states, so it keeps the default.
        return attrs.evolve(group, context_sharded=is_state(group.spec))
    if group.spec.layers:
        return group
    by_size = {(part.units, part.granularity): part for part in group.spec.parts}
    sharded = {size: draw(explicit_shardings(*size, parallel.tp_size)) for size in by_size}
    shardings = {part.name: sharded[part.units, part.granularity] for part in group.spec.parts}
    return attrs.evolve(group, shardings=shardings)
