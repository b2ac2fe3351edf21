"""Draw who owns what: pipeline stages, shardings of units, and context ranks of one engine.

Everything drawn is legal: every layer has a stage, every unit an owner, and every token of it too.
"""

from __future__ import annotations

from collections.abc import Sequence
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

T = TypeVar("T")


@attrs.frozen
class Shape:
    """What is decided of an engine first, for a pair at once, so that pairs differ as they should.

    *sharded*: wherever they can, context ranks share the tokens. *rows*: block sizes to choose
    from, in rows; None is any, the model's own too.
    """

    pp_size: int = 1
    pcp_size: int = 1
    sharded: bool = False
    rows: tuple[int, ...] | None = None


_SIZES = (
    *[((1, 1), (1, 1))] * 8,
    *(((2, 1), (1, 1)), ((1, 1), (2, 1)), ((3, 1), (2, 1)), ((2, 1), (3, 1))),
    *(((3, 1), (1, 1)), ((1, 1), (3, 1)), ((2, 1), (2, 1)), ((2, 1), (1, 2))),
    *(((1, 2), (1, 1)), ((1, 1), (1, 2)), ((1, 2), (1, 3)), ((1, 3), (1, 2))),
)
"""PP and PCP sizes of both sides; they are small, since their product counts."""

_ROWS = (
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


def _pair(sizes: Any, rows: Any, sharded: Any) -> tuple[Shape, Shape]:  # noqa: ANN401
    producer, consumer = (Shape(sizes[i][0], sizes[i][1], sharded[i], rows[i]) for i in range(2))
    return producer, consumer


_SHAPES = st.builds(
    _pair,
    st.sampled_from(_SIZES),
    st.sampled_from(_ROWS),
    st.sampled_from(((False, False), (False, False), (True, True), (True, False))),
)


def shapes() -> st.SearchStrategy[tuple[Shape, Shape]]:
    """Draw the shapes of a producer and a consumer."""
    return _SHAPES


def sample(*values: T) -> st.SearchStrategy[T]:
    """Draw one of *values*: a strategy made once, since making one costs more than drawing."""
    return _sample(*values)


@lru_cache(maxsize=4096, typed=True)
def _sample(*values: object) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def tp_sizes(largest: int = 16) -> st.SearchStrategy[int]:
    """Draw a TP size; powers of two and their neighbours alike."""
    return st.integers(1, largest)


def is_state(spec: LayerSpec) -> bool:
    """Return whether a block of *spec* is one state and not rows of tokens."""
    return not spec.parts[0].per_token


@st.composite
def explicit_shardings(
    draw: st.DrawFn, units: int, granularity: int, tp_size: int
) -> tuple[range, ...]:
    """Draw who owns which of *units*: uneven ranges, replicas anywhere, ranks in any order.

    Where there are replicas, one of them may hold nothing instead.
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
    """Return the parts of every layer of *groups*."""
    return [p for group in groups for each in group.layers for p in group.spec.of_layer(each).parts]


@st.composite
def parallels(
    draw: st.DrawFn, groups: Sequence[KVCacheGroup], largest: int, shape: Shape | None = None
) -> ParallelConfig:
    """Draw the parallel sizes of an engine, and sometimes how it shards the units of *groups*.

    Pipeline stages and context ranks, given or by default; context ranks only where every token of
    every unit has an owner.
    """
    shape = shape or draw(shapes())[0]
    pp_size, pcp_size, sharded = shape.pp_size, shape.pcp_size, shape.sharded
    most = largest if pp_size * pcp_size == 1 else max(1, largest // 2)
    heads = {part.units for part in parts_of(groups) if part.per_token}
    shared = [size for size in range(2, most + 1) if all(size % each == 0 for each in heads)]
    tp_size = draw(sample(*(shared or [1])) if sharded else tp_sizes(most))
    shardings: dict[int, tuple[range, ...]] = {}
    if draw(st.integers(0, 3)) == 0:
        granularity: dict[int, int] = {}
        for part in parts_of(groups):
            granularity[part.units] = lcm(granularity.get(part.units, 1), part.granularity)
        for units, multiple in granularity.items():
            if draw(st.booleans()):
                shardings[units] = draw(explicit_shardings(units, multiple, tp_size))
    bare = ParallelConfig(tp_size=tp_size, pp_size=pp_size, shardings=shardings)
    bare = attrs.evolve(bare, stages=draw(_stages(groups, pp_size)))
    return draw(_with_contexts(groups, bare, pcp_size, sharded=sharded))


@st.composite
def _stages(
    draw: st.DrawFn, groups: Sequence[KVCacheGroup], pp_size: int
) -> tuple[tuple[str, ...], ...] | None:
    """Draw any sharding of layers to stages, also none to a stage; or None for the even one."""
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
    *,
    sharded: bool,
) -> ParallelConfig:
    """Draw who shares tokens with whom: DCP, PCP that shares or replicates, explicit ranks."""
    tokens = [p.tokens_per_state for p in parts_of(groups) if p.per_token]
    sizes = [g.spec.block_size for g in groups if not is_state(g.spec)]
    fits = [
        size
        for size in range(1, 17)
        if all(block % size == 0 for block in sizes) and all(size % row == 0 for row in tokens)
    ]
    if not fits:
        return bare
    replicated = tuple((0,) * bare.tp_size for _ in range(pcp_size))
    found: list[ParallelConfig] = [
        attrs.evolve(bare, pcp_size=pcp_size, context_ranks=replicated) if pcp_size > 1 else bare
    ]
    for dcp_size in range(1 if pcp_size > 1 else 2, bare.tp_size + 1):
        for shift in (0, 1):
            rows = tuple(
                tuple(p * dcp_size + (t + shift) % dcp_size for t in range(bare.tp_size))
                for p in range(pcp_size)
            )
            try:
                each = attrs.evolve(
                    bare,
                    pcp_size=pcp_size,
                    dcp_size=1 if shift else dcp_size,
                    interleave_size=draw(sample(*fits[-3:])),
                    context_ranks=rows if shift else None,
                )
                EngineSpec(groups=tuple(groups), parallel=each)
            except SpecError:
                continue
            found += [each] * (4 if min(pcp_size, each.dcp_size) > 1 else 1)  # rarely legal
    return draw(st.sampled_from(found[sharded:] or found))
