"""Draw two engines of one model, which share its specs and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.ownership.parallel import ParallelConfig
from kvspec.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvspec.testing.carve import rank_units
from kvspec.testing.engines import engines, groups
from kvspec.testing.kinds import KINDS
from kvspec.testing.parallels import explicit_shardings, sample, shapes


@st.composite
def _drafted(draw: st.DrawFn, model: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """Give one engine layers that it excludes: in a group, in a group of their own, or shared ones.

    Of a group's shared layers only the last is excluded, so that something is left.
    """
    sort = draw(sample(None, None, None, None, "layer", "group", "last"))
    if sort is None:
        return tuple(model)
    draft = f"draft.{draw(st.integers(0, 3))}"
    if sort == "group":
        spec = draw(KINDS[draw(sample("full", "MLA", "short conv"))])
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
def _kept(draw: st.DrawFn, model: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """Give one engine other tokens to keep: layers of a window as full attention, or some more."""
    found = []
    for group in model:
        spec: Any = group.spec
        sort = draw(sample(None, None, None, "all", "more"))
        if sort == "more" and hasattr(spec, "extra_retained_tokens"):
            spec = attrs.evolve(spec, extra_retained_tokens=draw(st.integers(0, 5)))
        elif sort == "all" and type(spec) in _KEPT:
            whole = _KEPT[type(spec)]
            names = [field.name for field in attrs.fields(whole) if field.init]
            spec = whole(**{name: getattr(spec, name) for name in names})
        found.append(attrs.evolve(group, spec=spec))
    return tuple(found)


_KEPT: dict[type[LayerSpec], type[LayerSpec]] = {
    SlidingWindowSpec: FullAttentionSpec,
    ChunkedLocalAttentionSpec: FullAttentionSpec,
    SlidingWindowMLASpec: MLAAttentionSpec,
}
"""The kind as which an engine keeps a layer of which it drops no token."""


@st.composite
def _regrouped(
    draw: st.DrawFn, model: Sequence[KVCacheGroup], side: str
) -> tuple[KVCacheGroup, ...]:
    """Give one engine groups of its own: in another order, under other names, or split in two."""
    found: list[KVCacheGroup] = []
    for group in model:
        sort = draw(sample(None, None, None, "name", "split", "split"))
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
    few = draw(sample(1, 1, 2, 3))
    return attrs.evolve(group, spec=attrs.evolve(spec, total_num_kv_heads=few))


@st.composite
def engine_pairs(
    draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS), largest: int = 6
) -> tuple[EngineSpec, EngineSpec]:
    """Draw a producer and a consumer of one model; everything else may differ."""
    model = draw(groups(kinds))
    largest *= draw(sample(1, 1, 1, 1, 2))
    of_producer, of_consumer = draw(shapes())
    if of_producer.sharded:
        model = tuple(draw(_few_heads(group)) for group in model)
    sides = [draw(_drafted(draw(_regrouped(draw(_kept(model)), side)))) for side in "PD"]
    producer = draw(engines(sides[0], largest, shape=of_producer))
    return producer, draw(engines(sides[1], largest, shape=of_consumer))


@st.composite
def spanning_pairs(draw: st.DrawFn, largest: int = 4) -> tuple[EngineSpec, EngineSpec]:
    """Draw engines with a group whose packed content, or opaque page, spans the heads of a rank.

    Both shard its heads alike: every range of one side is a range of the other.
    """
    drawn: Any = draw(KINDS["full, opaque"])
    row, block = drawn.tokens_per_state, drawn.block_size
    pages = [size for size in range(row, block, row) if block % size == 0]
    opaque = {"page_format": "opaque:drawn"}
    spans: Any = ({"spans_heads": True}, opaque, *({**opaque, "page_block_size": p} for p in pages))
    spec: LayerSpec = attrs.evolve(drawn, **draw(st.sampled_from(spans)))
    packed = KVCacheGroup(name="packed", layers=("packed.0", "packed.1"), spec=spec)
    model = draw(st.sampled_from(((), draw(groups(("MLA",))))))
    if not draw(st.integers(0, 2)):
        part = packed.spec.parts[0]
        sides = draw(_same_sharding(part.units, part.granularity, largest))
        first, second = (draw(engines((packed, *model), parallel=each)) for each in sides)
        return first, second
    producer = draw(engines((packed, *model), largest))
    consumer = draw(
        engines((packed, *model), largest).filter(lambda each: _same_ranges(producer, each, packed))
    )
    return producer, consumer


@st.composite
def _same_sharding(
    draw: st.DrawFn, units: int, granularity: int, largest: int
) -> tuple[ParallelConfig, ParallelConfig]:
    """Draw two explicit shardings of the same ranges, to as many ranks or to more."""
    sizes = [draw(st.integers(1, largest)) for _ in range(2)]
    ranges = draw(explicit_shardings(units, granularity, min(sizes)))
    owned = sorted({each for each in ranges if each}, key=lambda each: each.start)
    sides = []
    for size in sizes:
        more = [draw(st.sampled_from((*owned, range(0)))) for _ in range(size - len(owned))]
        sharded = tuple(draw(st.permutations([*owned, *more])))
        sides.append(ParallelConfig(tp_size=size, shardings={units: sharded}))
    return sides[0], sides[1]


@st.composite
def interleaved_pairs(draw: st.DrawFn) -> tuple[EngineSpec, EngineSpec]:
    """Draw engines that shard tokens alike, by interleaves that blocks in memory do not divide.

    Blocks of 12 or 24 tokens are four in memory, and the interleave is 6: cached prefixes and
    prompts begin and end inside a block in memory on one rank, and between two on the other.
    """
    drawn: Any = draw(KINDS[draw(sample("full", "sliding window", "MLA"))])
    heads = draw(st.integers(1, 3)) if hasattr(drawn, "total_num_kv_heads") else 0
    fields = {"total_num_kv_heads": heads} if heads else {}
    size = draw(st.integers(2, 3))
    sharded = {heads: (range(heads),) * size} if heads > 1 else {}
    parallel = ParallelConfig(tp_size=size, dcp_size=size, interleave_size=6, shardings=sharded)
    sides = []
    for _ in range(2):
        block = draw(sample(12, 24))
        spec: LayerSpec = attrs.evolve(drawn, block_size=block, tokens_per_state=1, **fields)
        group = KVCacheGroup(name="dealt", layers=("dealt.0", "dealt.1"), spec=spec)
        engine = draw(engines((group,), parallel=parallel))
        own = engine.groups[0]
        if own.spec.page_size_padded is None:
            own = attrs.evolve(own, kernel_block_size=draw(sample(4, 4, 4, 12)))
        sides.append(attrs.evolve(engine, groups=(own,)))
    return sides[0], sides[1]


def _same_ranges(one: EngineSpec, other: EngineSpec, group: KVCacheGroup) -> bool:
    hands = []
    for engine in (one, other):
        own = engine.group(group.name)  # the engine's: it may shard its heads by itself
        part = own.spec.parts[0]
        sharded = {tuple(rank_units(engine, rank, part, own)) for rank in engine.parallel.ranks}
        hands.append(sharded - {()})
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
