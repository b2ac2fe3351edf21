"""Draw who owns what: pipeline stages, shardings of units, and context ranks of one engine.

Invariant: each layer is on a stage, and each token of each unit has at least one owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import Any, TypeVar

import attrs
from hypothesis import strategies as st

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.ownership.parallel import ParallelConfig
from kvspec.ownership.part import Part
from kvspec.specs import LayerSpec
from kvspec.testing.supports import EVERYTHING, Supports

T = TypeVar("T")


@attrs.frozen
class Shape:
    """The properties of an engine that are drawn for both engines of a pair together.

    If each engine drew them alone, the interesting combinations would be rare.

    Attributes:
        pp_size: Number of pipeline stages.
        pcp_size: Prefill context-parallel size.
        sharded: Whether context ranks divide the tokens among them, if the model allows it.
        rows: The block sizes to draw from, in rows. None allows any size, also that of the model.
        supports: What may be drawn.
        tp_sizes: The TP sizes to draw from. None allows any size.
        layouts: The layout of each group of the model. Other groups draw their own.
    """

    pp_size: int = 1
    pcp_size: int = 1
    sharded: bool = False
    rows: tuple[int, ...] | None = None
    supports: Supports = EVERYTHING
    tp_sizes: tuple[int, ...] | None = None
    layouts: Mapping[str, str] = attrs.field(factory=dict)


# (PP, PCP) of the producer and of the consumer. They are small, because an engine has PP * PCP * TP
# ranks. 8 of 20 pairs have neither pipeline stages nor PCP ranks, so many cases stay small.
_CONTEXT_SIZES = (
    *[((1, 1), (1, 1))] * 8,
    *(((2, 1), (1, 1)), ((1, 1), (2, 1)), ((3, 1), (2, 1)), ((2, 1), (3, 1))),
    *(((3, 1), (1, 1)), ((1, 1), (3, 1)), ((2, 1), (2, 1)), ((2, 1), (1, 2))),
    *(((1, 2), (1, 1)), ((1, 1), (1, 2)), ((1, 2), (1, 3)), ((1, 3), (1, 2))),
)

# Block sizes of the producer and of the consumer, in rows. Many pairs do not divide each other.
_PP_CONTEXTS = (
    *[(None, None)] * 5,
    *(
        ((4, 8), (6, 12)),
        ((6, 12), (4, 8)),
        ((2, 4), (8,)),
        ((12,), (3, 6)),
        ((16,), (16, 8)),
        ((12,), (16,)),
    ),
)


_SHARDED = ((False, False), (False, False), (True, True), (True, False))


@lru_cache
def shapes(supports: Supports = EVERYTHING) -> st.SearchStrategy[tuple[Shape, Shape]]:
    """Draw the shapes of a producer and a consumer that are supported.

    >>> from hypothesis import find
    >>> find(shapes(), lambda pair: pair[1].pp_size > 1)[1].pp_size
    2
    """
    sizes = [
        pair
        for pair in _CONTEXT_SIZES
        if all(pp <= supports.max_pp and (pcp == 1 or supports.pcp) for pp, pcp in pair)
        and (pair[0][0] == pair[1][0] or not supports.equal_pp)
    ]
    rows = _PP_CONTEXTS[:1] if supports.equal_blocks else _PP_CONTEXTS
    sharded = _SHARDED if supports.dcp or supports.pcp else _SHARDED[:1]

    def pair_of(sizes: Any, rows: Any, sharded: Any) -> tuple[Shape, Shape]:  # noqa: ANN401
        producer, consumer = (
            Shape(sizes[i][0], sizes[i][1], sharded[i], rows[i], supports) for i in range(2)
        )
        return producer, consumer

    return st.builds(
        pair_of, st.sampled_from(sizes), st.sampled_from(rows), st.sampled_from(sharded)
    )


def sample(*values: T) -> st.SearchStrategy[T]:
    """Draw one of *values*. The strategy is cached, since making one costs more than drawing."""
    return _sample(*values)


@lru_cache(maxsize=4096, typed=True)
def _sample(*values: object) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def is_state(spec: LayerSpec) -> bool:
    """Return whether a block of *spec* is one state, not rows of tokens.

    >>> import kvspec
    >>> is_state(kvspec.MambaSpec.replicated_state(state_bytes=4))
    True
    """
    return not spec.parts[0].per_token


def has_one_block(spec: LayerSpec) -> bool:
    """Return whether a request may have only one block, as a state or a ring.

    >>> import kvspec
    >>> has_one_block(kvspec.MambaSpec.replicated_state(state_bytes=4))
    True
    """
    return is_state(spec) or spec.is_ring


@st.composite
def explicit_shardings(
    draw: st.DrawFn, units: int, granularity: int, tp_size: int
) -> tuple[range, ...]:
    """Draw an explicit sharding: uneven ranges, with replicas, in any order of the ranks.

    Args:
        draw: Passed by Hypothesis.
        units: Number of units, such as heads.
        granularity: A range begins and ends at multiples of this number.
        tp_size: Number of ranks.

    Returns:
        The range of units of each rank. Each unit is in at least one range. One range may be empty.

    >>> from hypothesis import find
    >>> find(explicit_shardings(4, 1, 2), lambda ranges: len(ranges[0]) == 1)
    (range(0, 1), range(1, 4))
    """
    packs = units // granularity
    count = draw(st.integers(1, min(packs, tp_size)))
    inner = st.sampled_from(range(1, packs)) if packs > 1 else st.nothing()
    cuts = draw(st.lists(inner, min_size=count - 1, max_size=count - 1, unique=True))
    bounds = [0, *sorted(cuts), packs]
    owned = [range(a * granularity, b * granularity) for a, b in pairwise(bounds)]
    more = draw(
        st.lists(st.sampled_from(owned), min_size=tp_size - count, max_size=tp_size - count)
    )
    if more and draw(st.integers(0, 3)) == 0:
        more[0] = range(0)
    return tuple(draw(st.permutations([*owned, *more])))


def parts_of(groups: Sequence[KVCacheGroup]) -> list[Part]:
    """Return the parts of all layers of *groups*.

    >>> import kvspec
    >>> spec = kvspec.MLAAttentionSpec(block_size=4, head_size=2, dtype="uint8")
    >>> group = KVCacheGroup(name="g", layers=["a", "b"], spec=spec)
    >>> [part.name for part in parts_of([group])]
    ['latent', 'latent']
    """
    return [
        part
        for group in groups
        for layer in group.layers
        for part in group.spec.of_layer(layer).parts
    ]


@st.composite
def parallels(
    draw: st.DrawFn, groups: Sequence[KVCacheGroup], largest: int, shape: Shape | None = None
) -> ParallelConfig:
    """Draw the parallel sizes of an engine, and sometimes explicit shardings, stages and ranks.

    Args:
        draw: Passed by Hypothesis.
        groups: The groups that the engine serves.
        largest: The largest TP size of an engine without pipeline stages and PCP ranks. Other
            engines have at most half of it.
        shape: Pipeline, context and block sizes. Drawn by default.

    Returns:
        The sizes. Context ranks divide the tokens only if each token of each unit has an owner.

    >>> import kvspec
    >>> from hypothesis import find
    >>> spec = kvspec.MLAAttentionSpec(block_size=4, head_size=2, dtype="uint8")
    >>> group = KVCacheGroup(name="g", layers=["l"], spec=spec)
    >>> find(parallels([group], largest=4), lambda drawn: drawn.dcp_size > 1).tp_size
    2
    """
    shape = shape or draw(shapes())[0]
    pp_size, pcp_size, sharded = shape.pp_size, shape.pcp_size, shape.sharded
    most = largest if pp_size * pcp_size == 1 else max(1, largest // 2)
    sizes = _tp_sizes(groups, most, shape)
    head_counts = {part.units for part in parts_of(groups) if part.per_token}
    # With these sizes, each head is held by equally many ranks, which can divide its tokens.
    even_sizes = [n for n in sizes if n > 1 and all(n % count == 0 for count in head_counts)]
    tp_size = draw(sample(*(even_sizes or sizes[:1])) if sharded else sample(*sizes))
    shardings: dict[int, tuple[range, ...]] = {}
    if shape.supports.shardings and draw(st.integers(0, 3)) == 0:
        granularity: dict[int, int] = {}
        for part in parts_of(groups):
            granularity[part.units] = lcm(granularity.get(part.units, 1), part.granularity)
        for units, multiple in granularity.items():
            if draw(st.booleans()):
                shardings[units] = draw(explicit_shardings(units, multiple, tp_size))
    bare = ParallelConfig(tp_size=tp_size, pp_size=pp_size, shardings=shardings)
    if not shape.supports.equal_pp:
        bare = attrs.evolve(bare, stages=draw(_stages(groups, pp_size)))
    return draw(_with_contexts(groups, bare, pcp_size, shape.supports, sharded=sharded))


def _tp_sizes(groups: Sequence[KVCacheGroup], most: int, shape: Shape) -> list[int]:
    """Return the TP sizes that are supported, of which 1 or those of *shape* always are."""
    sizes = shape.tp_sizes or range(1, min(most, shape.supports.max_tp) + 1)
    if not shape.supports.even_heads:
        return list(sizes)
    packs = {part.units // part.granularity for part in parts_of(groups)}
    even = [n for n in sizes if all(n % count == 0 or count % n == 0 for count in packs)]
    return even or [1]


@st.composite
def _stages(
    draw: st.DrawFn, groups: Sequence[KVCacheGroup], pp_size: int
) -> tuple[tuple[str, ...], ...] | None:
    """Draw the layers of each stage, or None for even stages. A stage may have no layer."""
    if pp_size == 1 or draw(st.booleans()):
        return None
    stages: list[list[str]] = [[] for _ in range(pp_size)]
    for group in groups:
        for layer in group.layers:
            stages[draw(st.integers(0, pp_size - 1))].append(layer)
    return tuple(tuple(stage) for stage in stages)


@st.composite
def _with_contexts(
    draw: st.DrawFn,
    groups: Sequence[KVCacheGroup],
    bare: ParallelConfig,
    pcp_size: int,
    supports: Supports,
    *,
    sharded: bool,
) -> ParallelConfig:
    """Draw the context ranks: DCP, PCP that divides or replicates the tokens, or explicit ranks."""
    tokens = [p.tokens_per_state for p in parts_of(groups) if p.per_token]
    sizes = [g.spec.block_size for g in groups if not has_one_block(g.spec)]
    fits = [
        size
        for size in range(1, 17)
        if all(block % size == 0 for block in sizes) and all(size % row == 0 for row in tokens)
    ]
    if not fits:
        return bare
    replicated = tuple((0,) * bare.tp_size for _ in range(pcp_size))
    legal: list[ParallelConfig] = [
        attrs.evolve(bare, pcp_size=pcp_size, context_ranks=replicated) if pcp_size > 1 else bare
    ]
    for dcp_size in range(1 if pcp_size > 1 else 2, (bare.tp_size if supports.dcp else 1) + 1):
        for shift in (0, 1) if supports.shardings else (0,):
            context_ranks = tuple(
                tuple(p * dcp_size + (t + shift) % dcp_size for t in range(bare.tp_size))
                for p in range(pcp_size)
            )
            # With a shift, the same turns are in another order. Only explicit ranks can express it.
            # Ranks that divide tokens must hold the same units, which `EngineSpec` checks.
            try:
                config = attrs.evolve(
                    bare,
                    pcp_size=pcp_size,
                    dcp_size=1 if shift else dcp_size,
                    # The smallest is the default of vLLM. Large ones are cut by blocks.
                    interleave_size=draw(sample(fits[0], *fits[-3:])),
                    context_ranks=context_ranks if shift else None,
                )
                EngineSpec(groups=tuple(groups), parallel=config)
            except SpecError:
                continue
            # PCP together with DCP is rarely legal, so it counts four times.
            legal += [config] * (4 if min(pcp_size, config.dcp_size) > 1 else 1)
    # The first configuration does not divide tokens.
    return draw(st.sampled_from((legal[1:] if sharded else legal) or legal))
