"""Draw pairs of engines that serve one model.

The two engines of a pair have the same layers with the same content. All else may differ: groups,
ranks, shardings, blocks, layouts and draft layers. The module also draws pairs for special cases:
content that spans heads, context ranks whose turns begin inside of a block in memory, and conv
states of unequal length.
"""

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
from kvspec.testing.engines import engines, groups, laid_out
from kvspec.testing.kinds import KINDS
from kvspec.testing.parallels import explicit_shardings, sample, shapes

# Pairs are filtered for equal ranges of heads. Larger engines rarely agree.
_SPANNING_RANKS = 4


@st.composite
def _drafted(draw: st.DrawFn, model: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """Draw the layers that one engine excludes from the transfer, as vLLM does with draft layers.

    "layer" adds a draft layer to a group, "group" adds a group with a draft layer, and "last"
    excludes the last layer of a group. The other layers of that group still move.
    """
    change = draw(sample(None, None, None, None, "layer", "group", "last"))
    if change is None:
        return tuple(model)
    draft = f"draft.{draw(st.integers(0, 3))}"
    if change == "group":
        spec = draw(KINDS[draw(sample("full", "MLA", "short conv"))])
        group = KVCacheGroup(name="draft", layers=(draft,), spec=spec, excluded=(draft,))
        return tuple(draw(st.permutations((*model, group))))
    at = draw(st.integers(0, len(model) - 1))
    group = model[at]
    if change == "last" and len(group.layers) > 1:
        group = attrs.evolve(group, excluded=group.layers[-1:])
    elif not group.spec.layers:
        layers = draw(st.sampled_from(((draft, *group.layers), (*group.layers, draft))))
        group = attrs.evolve(group, layers=layers, excluded=(draft,))
    return (*model[:at], group, *model[at + 1 :])


@st.composite
def _kept(draw: st.DrawFn, model: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """Draw which tokens one engine keeps: those of the model, "all" of the prompt, or some "more".

    vLLM keeps all tokens of a window layer if its hybrid cache manager is off.
    """
    kept = []
    for group in model:
        spec: Any = group.spec
        change = draw(sample(None, None, None, "all", "more"))
        if change == "more" and hasattr(spec, "extra_retained_tokens"):
            spec = attrs.evolve(spec, extra_retained_tokens=draw(st.integers(0, 5)))
        elif change == "all" and type(spec) in _KEPT:
            whole = _KEPT[type(spec)]
            names = [field.name for field in attrs.fields(whole) if field.init]
            spec = whole(**{name: getattr(spec, name) for name in names})
        kept.append(attrs.evolve(group, spec=spec))
    return tuple(kept)


# The spec of an engine that keeps all tokens of a layer, by the spec of the model.
_KEPT: dict[type[LayerSpec], type[LayerSpec]] = {
    SlidingWindowSpec: FullAttentionSpec,
    ChunkedLocalAttentionSpec: FullAttentionSpec,
    SlidingWindowMLASpec: MLAAttentionSpec,
}


@st.composite
def _regrouped(
    draw: st.DrawFn, model: Sequence[KVCacheGroup], side: str
) -> tuple[KVCacheGroup, ...]:
    """Draw the groups of one engine: in another order, with other names, or split in two."""
    regrouped: list[KVCacheGroup] = []
    for group in model:
        change = draw(sample(None, None, None, "name", "split", "split"))
        if change is None:
            regrouped.append(group)
        elif change == "split" and len(group.layers) > 1 and not group.spec.layers:
            layers, at = draw(st.permutations(group.layers)), draw(st.integers(1, 2))
            halves = (tuple(layers[:at]), tuple(layers[at:]))
            regrouped += [
                attrs.evolve(group, name=f"{group.name} on {side} {number}", layers=half)
                for number, half in enumerate(halves)
                if half
            ]
        else:
            regrouped.append(attrs.evolve(group, name=f"{group.name} on {side}"))
    return tuple(draw(st.permutations(regrouped)))


@st.composite
def _few_heads(draw: st.DrawFn, group: KVCacheGroup) -> KVCacheGroup:
    """Draw a small number of heads. Then several ranks hold one head and can divide its tokens."""
    spec: Any = group.spec
    if isinstance(spec, UniformTypeKVCacheSpecs) or not hasattr(spec, "total_num_kv_heads"):
        return group
    few = draw(sample(1, 1, 2, 3))
    return attrs.evolve(group, spec=attrs.evolve(spec, total_num_kv_heads=few))


@st.composite
def engine_pairs(
    draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS), largest: int = 6
) -> tuple[EngineSpec, EngineSpec]:
    """Draw a producer and a consumer of one model. All else may differ.

    Args:
        draw: Passed by Hypothesis.
        kinds: Keys of `KINDS`. The groups of the model are of these kinds.
        largest: The largest TP size of four in five pairs. The fifth pair may have twice as much.
            Pairs with pipeline stages or PCP ranks have smaller TP sizes, but more ranks.

    Returns:
        The producer and the consumer.

    >>> from hypothesis import given, settings
    >>> @settings(max_examples=2)
    ... @given(engine_pairs(["MLA"], largest=2))
    ... def test_engines_are_small(pair: tuple[EngineSpec, EngineSpec]) -> None:
    ...     assert pair[0].parallel.tp_size <= 4
    >>> test_engines_are_small()
    """
    model = draw(groups(kinds))
    # Some errors need many ranks. Drawing them always would make each case slow.
    largest *= draw(sample(1, 1, 1, 1, 2))
    of_producer, of_consumer = draw(shapes())
    if of_producer.sharded:
        model = tuple(draw(_few_heads(group)) for group in model)
    sides = [draw(_drafted(draw(_regrouped(draw(_kept(model)), side)))) for side in "PD"]
    producer = draw(engines(sides[0], largest, shape=of_producer))
    return producer, draw(engines(sides[1], largest, shape=of_consumer))


@st.composite
def spanning_pairs(draw: st.DrawFn) -> tuple[EngineSpec, EngineSpec]:
    """Draw engines with a group whose packed content or opaque page spans the heads of a rank.

    Such content cannot be divided by head, so each range of heads exists on both sides.
    """
    drawn: Any = draw(KINDS["full, opaque"])
    row, block = drawn.tokens_per_state, drawn.block_size
    pages = [size for size in range(row, block, row) if block % size == 0]
    opaque = {"page_format": "opaque:drawn"}
    spans: Any = ({"spans_heads": True}, opaque, *({**opaque, "page_block_size": p} for p in pages))
    explicit = draw(st.sampled_from((True, False, False)))
    # Explicit shardings of packed content are the rarest case, so they are drawn more often.
    choices = (spans[0],) * 4 + spans if explicit else spans
    spec: LayerSpec = attrs.evolve(drawn, **draw(st.sampled_from(choices)))
    packed = KVCacheGroup(name="packed", layers=("packed.0", "packed.1"), spec=spec)
    model = draw(st.sampled_from(((), draw(groups(("MLA",))))))
    if explicit:
        part = packed.spec.parts[0]
        sides = draw(_same_sharding(part.units, part.granularity, _SPANNING_RANKS))
        producer, consumer = (
            draw(laid_out(EngineSpec(groups=(packed, *model), parallel=parallel)))
            for parallel in sides
        )
        return producer, consumer
    any_engine = engines((packed, *model), _SPANNING_RANKS)
    producer = draw(any_engine)
    return producer, draw(any_engine.filter(lambda engine: _same_ranges(producer, engine, packed)))


@st.composite
def _same_sharding(
    draw: st.DrawFn, units: int, granularity: int, largest: int
) -> tuple[ParallelConfig, ParallelConfig]:
    """Draw two explicit shardings with the same ranges of units, for equal or unequal TP sizes."""
    # With one rank there is only one range, so two ranks are the smallest size if they can differ.
    least = min(2, units // granularity)
    sizes = [draw(st.integers(least, largest)) for _ in range(2)]
    ranges = draw(explicit_shardings(units, granularity, min(sizes)))
    owned = sorted({units for units in ranges if units}, key=lambda units: units.start)
    sides = []
    for size in sizes:
        more = [draw(st.sampled_from((*owned, range(0)))) for _ in range(size - len(owned))]
        sharded = tuple(draw(st.permutations([*owned, *more])))
        sides.append(ParallelConfig(tp_size=size, shardings={units: sharded}))
    return sides[0], sides[1]


@st.composite
def interleaved_pairs(draw: st.DrawFn) -> tuple[EngineSpec, EngineSpec]:
    """Draw engines with equal context ranks, whose turns may begin inside of a block in memory.

    A block has 12 or 24 tokens, a block in memory has 4 or 12, and a turn has 6. So a prefix or a
    prompt may end inside of a block in memory on one rank, and between two on another.
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
        engine = draw(laid_out(EngineSpec(groups=(group,), parallel=parallel)))
        group = engine.groups[0]
        # Padded pages cannot be cut into smaller blocks.
        if group.spec.page_size_padded is None:
            group = attrs.evolve(group, kernel_block_size=draw(sample(4, 4, 4, 12)))
        sides.append(attrs.evolve(engine, groups=(group,)))
    return sides[0], sides[1]


def _same_ranges(producer: EngineSpec, consumer: EngineSpec, group: KVCacheGroup) -> bool:
    """Return whether the ranks of both engines hold the same ranges of the units of *group*."""
    ranges = []
    for engine in (producer, consumer):
        own = engine.group(group.name)  # The group of this engine: it may have its own shardings.
        part = own.spec.parts[0]
        sharded = {tuple(rank_units(engine, rank, part, own)) for rank in engine.parallel.ranks}
        ranges.append(sharded - {()})
    return ranges[0] == ranges[1]


@st.composite
def with_own_rows(draw: st.DrawFn, model: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """Draw the speculative tokens of one engine. Each adds a row to the conv states of *model*."""
    own_groups = []
    for group in model:
        spec, more = group.spec, draw(st.integers(0, 2))
        if isinstance(spec, MambaSpec):
            parts = tuple(
                attrs.evolve(part, states=part.states + more) if part.tensor == "conv" else part
                for part in spec.parts
            )
            spec = attrs.evolve(spec, state_parts=parts)
        own_groups.append(attrs.evolve(group, spec=spec))
    return tuple(own_groups)
