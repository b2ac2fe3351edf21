"""Draw pairs of engines that serve one model.

The two engines of a pair have the same layers with the same content. All else may differ: groups,
ranks, shardings, blocks, layouts, the order of rotated elements, and draft layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import attrs
from hypothesis import strategies as st

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KeyContent,
    LayerSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvspec.testing.engines import engines, groups, sharing_engines, sharing_layouts
from kvspec.testing.kinds import KINDS, kinds_of
from kvspec.testing.parallels import Shape, sample, shapes
from kvspec.testing.rotary import may_rotate, reorders
from kvspec.testing.supports import EVERYTHING, Supports


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
        elif change == "all" and type(spec) in FULL_KIND_OF:
            whole = FULL_KIND_OF[type(spec)]
            names = [field.name for field in attrs.fields(whole) if field.init]
            spec = whole(**{name: getattr(spec, name) for name in names})
        kept.append(attrs.evolve(group, spec=spec))
    return tuple(kept)


@st.composite
def _meant(
    draw: st.DrawFn, model: Sequence[KVCacheGroup]
) -> tuple[tuple[KVCacheGroup, ...], tuple[KVCacheGroup, ...]]:
    """Draw what the keys of both engines mean, often in two orders of the rotated elements."""
    sides: tuple[list[KVCacheGroup], list[KVCacheGroup]] = [], []
    for group in model:
        layers = group.spec.layers
        drawn = {layer: draw(meant_spec(group.spec.of_layer(layer))) for layer in layers or ("",)}
        for side, number in zip(sides, (0, 1), strict=True):
            specs = {layer: pair[number] for layer, pair in drawn.items()}
            spec = UniformTypeKVCacheSpecs(specs=specs) if layers else specs[""]
            side.append(attrs.evolve(group, spec=spec))
    return tuple(sides[0]), tuple(sides[1])


@st.composite
def meant_spec(draw: st.DrawFn, spec: LayerSpec) -> tuple[LayerSpec, LayerSpec]:
    """Draw a key content for each side of a layer. Both are equal if no order can be changed."""
    if not may_rotate(spec) or draw(st.integers(0, 2)) == 0:
        return spec, spec
    # Most models rotate whole keys. A few rotated elements are rarely enough to tell orders apart.
    most = spec.head_size // 2
    size = 2 * draw(sample(most, most, most, *range(1, most + 1)))
    latent = isinstance(spec, MLAAttentionSpec)
    ends = (0, spec.head_size - size)
    start = draw(st.integers(*ends))
    normalized = draw(st.booleans())
    orders = [
        KeyContent(rotary=rotary, rotary_start=at, rotary_size=size, normalized=normalized)
        for rotary in ("halves", "pairs")
        for at in (ends if latent else (start,))
    ]
    both = list(product(orders, orders))
    contents = draw(sample(*both, *((one, other) for one, other in both if one != other)))
    if not reorders(spec):
        contents = contents[0], contents[0]
    first, second = (attrs.evolve(spec, key_content=content) for content in contents)
    return first, second


# The spec of an engine that keeps all tokens of a layer, by the spec of the model.
FULL_KIND_OF: dict[type[LayerSpec], type[LayerSpec]] = {
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
    draw: st.DrawFn,
    kinds: Sequence[str] = tuple(KINDS),
    largest: int = 6,
    *,
    supports: Supports = EVERYTHING,
) -> tuple[EngineSpec, EngineSpec]:
    """Draw a producer and a consumer of one model. All else may differ.

    Args:
        draw: Passed by Hypothesis.
        kinds: Keys of `KINDS`. The groups of the model are of these kinds.
        largest: The largest TP size of four in five pairs. The fifth pair may have twice as much.
            Pairs with pipeline stages or PCP ranks have smaller TP sizes, but more ranks.
        supports: What may be drawn. Nothing is drawn and thrown away.

    Returns:
        The producer and the consumer.

    >>> from hypothesis import given, settings
    >>> @settings(max_examples=2)
    ... @given(engine_pairs(["MLA"], largest=2))
    ... def test_engines_are_small(pair: tuple[EngineSpec, EngineSpec]) -> None:
    ...     assert pair[0].parallel.tp_size <= 4
    >>> test_engines_are_small()
    """
    allowed = kinds_of(supports)
    kinds = [kind for kind in kinds if kind in allowed]
    model = draw(groups(kinds, most=3 if supports.hybrid else 1))
    if not supports.compressed:
        model = tuple(map(_uncompressed, model))
    # Some errors need many ranks. Drawing them always would make each case slow.
    largest *= draw(sample(1, 1, 1, 1, 2))
    of_producer, of_consumer = draw(shapes(supports))
    if of_producer.sharded:
        model = tuple(draw(_few_heads(group)) for group in model)
    meanings = draw(_meant(model)) if supports.key_content else (model, model)
    sides = [
        draw(_own_groups(meant, side, supports)) for side, meant in zip("PD", meanings, strict=True)
    ]
    producer = draw(engines(sides[0], largest, shape=of_producer))
    of_consumer = _fitting(of_consumer, producer, min(largest, supports.max_tp))
    return producer, draw(engines(sides[1], largest, shape=of_consumer))


@st.composite
def _own_groups(
    draw: st.DrawFn, model: Sequence[KVCacheGroup], side: str, supports: Supports
) -> Sequence[KVCacheGroup]:
    """Draw the groups of one engine of a pair, as far as the engines may differ."""
    if supports.retention:
        model = draw(_kept(model))
    if supports.regrouped:
        model = draw(_regrouped(model, side))
    return draw(_drafted(model)) if supports.drafts else model


def _fitting(shape: Shape, producer: EngineSpec, largest: int) -> Shape:
    """Return the consumer's *shape*, limited to what must agree with the *producer*."""
    supports, size = shape.supports, producer.parallel.tp_size
    if supports.equal_tp:
        shape = attrs.evolve(shape, tp_sizes=(size,))
    elif supports.tp_multiples:
        fits = [n for n in range(1, largest + 1) if n % size == 0 or size % n == 0]
        shape = attrs.evolve(shape, tp_sizes=tuple(fits))
    if supports.equal_layouts:
        layouts = {
            group.name.partition(" on ")[0]: producer.layout_of(group) for group in producer.groups
        }
        shape = attrs.evolve(shape, layouts=layouts)
    return shape


def _uncompressed(group: KVCacheGroup) -> KVCacheGroup:
    """Return *group* with one token in each row, also in each row of scales."""

    def changed(spec: Any) -> Any:  # noqa: ANN401
        names = ("tokens_per_state", "tokens_per_scale")
        fields = {name: 1 for name in names if hasattr(spec, name)}
        return attrs.evolve(spec, **fields)

    layers = group.spec.layers
    specs = {layer: changed(group.spec.of_layer(layer)) for layer in layers or ("",)}
    spec = UniformTypeKVCacheSpecs(specs=specs) if layers else specs[""]
    return attrs.evolve(group, spec=spec)


def sharing_kinds(kinds: Sequence[str], supports: Supports) -> list[str]:
    """Return those of *kinds* whose groups can share one memory. Empty if no two of them can.

    >>> sharing_kinds(["full", "MLA", "uniform"], EVERYTHING)
    ['full', 'MLA']
    >>> sharing_kinds(["full", "MLA"], Supports(hybrid=False))
    []
    """
    # The layers of a uniform-type group have pages of different sizes. Shared pages are equal.
    allowed = [kind for kind in kinds_of(supports) if not kind.startswith("uniform")]
    found = [kind for kind in kinds if kind in allowed]
    several = supports.hybrid and len(found) > 1
    return found if supports.shared and several and sharing_layouts(supports) else []


@st.composite
def sharing_pairs(
    draw: st.DrawFn, kinds: Sequence[str], supports: Supports
) -> tuple[EngineSpec, EngineSpec]:
    """Draw two engines whose groups can share one memory. *kinds* are those of `sharing_kinds`.

    >>> from hypothesis import given, settings
    >>> @settings(max_examples=2)
    ... @given(sharing_pairs(["full", "MLA"], EVERYTHING))
    ... def test_both_have_two_groups(pair: tuple[EngineSpec, EngineSpec]) -> None:
    ...     assert [len(engine.groups) for engine in pair] == [2, 2]
    >>> test_both_have_two_groups()
    """
    model = draw(groups(kinds, least=2))
    if not supports.compressed:
        model = tuple(map(_uncompressed, model))
    bare = EngineSpec(groups=model)
    largest = min(4, supports.max_tp)
    return draw(other_engines((bare, bare), largest, supports, shared=True))


@st.composite
def other_engines(
    draw: st.DrawFn,
    pair: tuple[EngineSpec, EngineSpec],
    largest: int,
    supports: Supports,
    *,
    shared: bool = False,
) -> tuple[EngineSpec, EngineSpec]:
    """Draw two other engines with the groups of *pair*, which may share one memory.

    Laws that compare two cases need them.

    >>> from hypothesis import given, settings
    >>> @settings(max_examples=2)
    ... @given(engine_pairs(["MLA"]).flatmap(lambda pair: other_engines(pair, 2, EVERYTHING)))
    ... def test_other_engines_are_small(pair: tuple[EngineSpec, EngineSpec]) -> None:
    ...     assert max(engine.parallel.tp_size for engine in pair) <= 4
    >>> test_other_engines_are_small()
    """
    make = sharing_engines if shared else engines
    of_producer, of_consumer = draw(shapes(supports))
    producer = draw(make(pair[0].groups, largest, of_producer))
    return producer, draw(make(pair[1].groups, largest, _fitting(of_consumer, producer, largest)))
