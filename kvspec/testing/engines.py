"""Draw engines: who holds which layers, units and tokens, in which blocks and layouts.

Two engines of one model share its specs and nothing else: stages, context ranks, deals, block
sizes, kernels' blocks, padding, layouts and draft layers are each engine's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import attrs
from hypothesis import strategies as st

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.ownership.parallel import ParallelConfig
from kvspec.specs import LayerSpec, MambaSpec, UniformTypeKVCacheSpecs
from kvspec.testing.carve import rank_units
from kvspec.testing.kinds import KINDS
from kvspec.testing.parallels import Shape, is_state, parallels, shapes

NAMED_LAYOUTS = tuple(
    "LBHNC LBNHC LHBNC BLHNC BLNHC BHLNC LKBNHC LBKNHC LBKHNC BLKHNC".split()  # noqa: SIM905
)
_ORDERS = ["".join(order) + "C" for letters in ("LBHN", "LBKHN") for order in permutations(letters)]
_ANY = st.sampled_from(NAMED_LAYOUTS) | st.sampled_from(_ORDERS)


def layouts(spec: LayerSpec) -> st.SearchStrategy[str]:
    """Draw a layout that *spec* can have: named or any permutation of the letters, C last.

    Layers with heads of their own have no common head axis outside of them: L stands before H.
    Parts with units or rows of their own are set apart before those are counted: as planes, or as
    tensors of a page, which lie inside L and B.
    """
    if is_state(spec):
        return _ANY
    parts = spec.of_layer(next(iter(spec.layers), "")).parts
    ragged = "H" * (len({part.units for part in parts}) > 1)
    ragged += "N" * (len({part.states for part in parts}) > 1)

    def fits(name: str) -> bool:
        apart = min(max(map(name.index, "LB")), name.find("K") % len(name))
        if spec.layers and name.index("L") > name.index("H"):
            return False
        return all(apart < name.index(letter) for letter in ragged)

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
    model = [draw(_blocks(group, shape)) for group in model] if parallel is None else model
    parallel = parallel or draw(parallels(model, largest, shape))
    layout = draw(layouts(model[0].spec))
    bare = EngineSpec(groups=tuple(model), parallel=parallel)
    own = []
    for group in model:
        name = draw(layouts(group.spec)) if group is not model[0] else layout
        spec = group.spec if group.spec.layers else attrs.evolve(group.spec, page_size_padded=None)
        if not spec.layers and (is_state(spec) or set(name[:2]) == {"L", "B"}):
            padded = _page(bare, group) + draw(st.integers(0, 5))
            spec = attrs.evolve(spec, page_size_padded=draw(st.sampled_from((None, padded))))
        override = None if name == layout else name
        kernel = draw(_kernel_blocks(spec)) if spec.page_size_padded is None else None
        own.append(attrs.evolve(group, spec=spec, layout=override, kernel_block_size=kernel))
    null = draw(st.sampled_from((None, None, 0, 2)))
    return EngineSpec(groups=tuple(own), parallel=parallel, layout=layout, null_block=null)


@st.composite
def sharing_engines(draw: st.DrawFn, model: Sequence[KVCacheGroup], largest: int = 4) -> EngineSpec:
    """Draw an engine whose groups can share one memory: equal pages, layers and blocks outermost.

    Of no uniform-type group. With blocks outermost, the groups have as many layers on each stage.
    """
    shape = draw(shapes())[0]
    model = [draw(_blocks(group, shape)) for group in model]
    bare = EngineSpec(groups=tuple(model), parallel=draw(parallels(model, largest, shape)))
    page = max(_page(bare, group) for group in model) + draw(st.integers(0, 5))
    counts = {
        stage: {len(bare.layers_at(group, stage)) for group in model} - {0}
        for stage in range(bare.parallel.pp_size)
    }
    outer = "BL" if all(len(each) < 2 for each in counts.values()) and draw(st.booleans()) else "LB"  # noqa: PLR2004
    names = st.sampled_from([f"{outer}{inner}C" for inner in ("HN", "NH", "KNH", "KHN", "HKN")])
    groups = tuple(
        attrs.evolve(
            group, spec=attrs.evolve(group.spec, page_size_padded=page), layout=draw(names)
        )
        for group in model
    )
    return attrs.evolve(bare, groups=groups)


@st.composite
def _blocks(draw: st.DrawFn, group: KVCacheGroup, shape: Shape) -> KVCacheGroup:
    """Draw this engine's own block size of a group, often the model's."""
    spec = group.spec
    if is_state(spec):
        size = draw(st.sampled_from((1, 1, 2, 4, 8)))
        return attrs.evolve(group, spec=attrs.evolve(spec, block_size=size))
    if shape.rows is None and draw(st.booleans()):
        return group
    row = max(part.tokens_per_state for part in spec.parts)
    size = row * draw(st.sampled_from(shape.rows or (1, 2, 3, 4, 6, 8)))
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
    return draw(st.sampled_from([d for d in range(row, size + 1, row) if size % d == 0]))


def _page(engine: EngineSpec, group: KVCacheGroup) -> int:
    """Return the bytes of one layer's block on the rank that holds most."""
    return max(
        sum(
            len(rank_units(engine, rank, p, group)) * p.states * p.content_bytes
            for p in group.spec.parts
        )
        for rank in engine.parallel.ranks
    )


@st.composite
def _drafted(draw: st.DrawFn, model: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """Give one engine layers that it excludes: in a group, in a group of their own, or shared ones.

    Of a group's shared layers only the last is excluded, so that something is left.
    """
    sort = draw(st.sampled_from((None, None, None, None, "layer", "group", "last")))
    if sort is None:
        return tuple(model)
    draft = f"draft.{draw(st.integers(0, 3))}"
    if sort == "group":
        spec = draw(KINDS[draw(st.sampled_from(("full", "MLA", "short conv")))])
        group = KVCacheGroup(name="draft", layers=(draft,), spec=spec, excluded=(draft,))
        return tuple(draw(st.permutations((*model, group))))
    at = draw(st.integers(0, len(model) - 1))
    group = model[at]
    if sort == "last" and len(group.layers) > 1:
        group = attrs.evolve(group, excluded=group.layers[-1:])
    elif not group.spec.layers:
        layers = draw(st.sampled_from(((draft, *group.layers), (*group.layers, draft))))
        group = attrs.evolve(group, layers=layers, excluded=(draft,))
    return (*model[:at], group, *model[at + 1 :])


@st.composite
def _regrouped(
    draw: st.DrawFn, model: Sequence[KVCacheGroup], side: str
) -> tuple[KVCacheGroup, ...]:
    """Give one engine groups of its own: in another order, under other names, or split in two."""
    found: list[KVCacheGroup] = []
    for group in model:
        sort = draw(st.sampled_from((None, None, None, None, "name", "split")))
        if sort is None:
            found.append(group)
        elif sort == "split" and len(group.layers) > 1 and not group.spec.layers:
            layers, at = draw(st.permutations(group.layers)), draw(st.integers(1, 2))
            halves = (tuple(layers[:at]), tuple(layers[at:]))
            found += [
                attrs.evolve(group, name=f"{group.name} on {side} {number}", layers=half)
                for number, half in enumerate(halves)
                if half
            ]
        else:
            found.append(attrs.evolve(group, name=f"{group.name} on {side}"))
    return tuple(draw(st.permutations(found)))


@st.composite
def _few_heads(draw: st.DrawFn, group: KVCacheGroup) -> KVCacheGroup:
    """Draw so few heads that ranks have replicas, which can share the tokens."""
    spec: Any = group.spec
    if isinstance(spec, UniformTypeKVCacheSpecs) or not hasattr(spec, "total_num_kv_heads"):
        return group
    few = draw(st.sampled_from((1, 1, 2, 3)))
    return attrs.evolve(group, spec=attrs.evolve(spec, total_num_kv_heads=few))


@st.composite
def engine_pairs(
    draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS), largest: int = 6
) -> tuple[EngineSpec, EngineSpec]:
    """Draw a producer and a consumer of one model; everything else may differ."""
    model = draw(groups(kinds))
    ours, theirs = draw(shapes())
    if ours.dealt:
        model = tuple(draw(_few_heads(group)) for group in model)
    sides = [draw(_drafted(draw(_regrouped(model, side)))) for side in "PD"]
    producer = draw(engines(sides[0], largest, shape=ours))
    return producer, draw(engines(sides[1], largest, shape=theirs))


@st.composite
def spanning_pairs(draw: st.DrawFn, largest: int = 4) -> tuple[EngineSpec, EngineSpec]:
    """Draw engines with a group whose packed content spans the heads of a rank.

    Both deal its heads alike: every range of one side is a range of the other.
    """
    drawn: Any = draw(KINDS["full, opaque"])
    spec: LayerSpec = attrs.evolve(drawn, spans_heads=True)
    packed = KVCacheGroup(name="packed", layers=("packed.0", "packed.1"), spec=spec)
    model = draw(st.sampled_from(((), draw(groups(("MLA",))))))
    ours = draw(engines((packed, *model), largest))
    theirs = draw(
        engines((packed, *model), largest).filter(lambda each: _alike(ours, each, packed))
    )
    return ours, theirs


def _alike(one: EngineSpec, other: EngineSpec, group: KVCacheGroup) -> bool:
    hands = [
        {tuple(rank_units(each, rank, group.spec.parts[0], group)) for rank in each.parallel.ranks}
        - {()}
        for each in (one, other)
    ]
    return hands[0] == hands[1]


@st.composite
def with_own_rows(draw: st.DrawFn, model: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """Draw an engine's own rows of the conv states of *model*: its speculative tokens."""
    found = []
    for group in model:
        spec, more = group.spec, draw(st.integers(0, 2))
        if isinstance(spec, MambaSpec):
            parts = tuple(
                attrs.evolve(part, states=part.states + more) if part.tensor == "conv" else part
                for part in spec.parts
            )
            spec = attrs.evolve(spec, state_parts=parts)
        found.append(attrs.evolve(group, spec=spec))
    return tuple(found)
