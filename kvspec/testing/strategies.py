"""Draw what the laws are about: specs of every kind, engine pairs that differ, requests, deals.

The one place where cases are drawn. Everything is small (a few KiB a rank), everything is legal,
and a new kind of layer is one line of `KINDS`. Tests prove that the hard cases are reached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from math import lcm
from typing import Any

import attrs
from hypothesis import strategies as st

from kvspec.engine import EngineSpec, KVCacheGroup
from kvspec.parallel import ParallelConfig
from kvspec.request import BlockTable, TransferRequest
from kvspec.slices import Part, Replicas
from kvspec.specs import CrossAttentionSpec, LayerSpec, UniformTypeKVCacheSpecs
from kvspec.testing.carve import rank_units
from kvspec.testing.kinds import KINDS, specs
from kvspec.testing.oracle import live_positions

NAMED_LAYOUTS = tuple(
    "LBHNC LBNHC LHBNC BLHNC BLNHC BHLNC LKBNHC LBKNHC LBKHNC BLKHNC".split()  # noqa: SIM905
)
__all__ = [
    "KINDS",
    "NAMED_LAYOUTS",
    "POLICIES",
    "Case",
    "cases",
    "engine_pairs",
    "engines",
    "explicit_deals",
    "groups",
    "is_state",
    "layouts",
    "length_of",
    "needed",
    "parallels",
    "parts_of",
    "requests",
    "specs",
    "tables",
    "tp_sizes",
]

POLICIES: tuple[Replicas, ...] = ("spread", "first", "stripe")


def tp_sizes(largest: int = 16) -> st.SearchStrategy[int]:
    """Draw a TP size; powers of two and their neighbours alike."""
    return st.integers(1, largest)


def is_state(spec: LayerSpec) -> bool:
    """Return whether a block of *spec* is one state and not rows of tokens."""
    return not spec.parts[0].tokens_per_state


def layouts(spec: LayerSpec) -> st.SearchStrategy[str]:
    """Draw a layout that *spec* can have: named or any permutation of the letters, C last.

    Layers with heads of their own have no common head axis outside of them: L stands before H.
    """
    ragged = isinstance(spec, UniformTypeKVCacheSpecs) and not is_state(spec)
    order = st.sampled_from(("LBHN", "LBKHN")).flatmap(st.permutations)
    drawn = st.sampled_from(NAMED_LAYOUTS) | order.map(lambda letters: "".join(letters) + "C")
    return drawn.filter(lambda name: not ragged or name.index("L") < name.index("H"))


@st.composite
def explicit_deals(draw: st.DrawFn, units: int, deal_in: int, tp_size: int) -> tuple[range, ...]:
    """Draw who owns which of *units*: uneven ranges, replicas anywhere, ranks in any order.

    Where there are replicas, one of them may hold nothing instead.
    """
    packs = units // deal_in
    pieces = draw(st.integers(1, min(packs, tp_size)))
    inner = st.sampled_from(range(1, packs)) if packs > 1 else st.nothing()
    cuts = draw(st.lists(inner, min_size=pieces - 1, max_size=pieces - 1, unique=True))
    bounds = [0, *sorted(cuts), packs]
    owned = [range(a * deal_in, b * deal_in) for a, b in pairwise(bounds)]
    more = draw(
        st.lists(st.sampled_from(owned), min_size=tp_size - pieces, max_size=tp_size - pieces)
    )
    if more and draw(st.integers(0, 3)) == 0:
        more[0] = range(0)
    return tuple(draw(st.permutations([*owned, *more])))


def parts_of(groups: Sequence[KVCacheGroup]) -> list[Part]:
    """Return the parts of every layer of *groups*."""
    return [p for group in groups for each in group.layers for p in group.spec.of_layer(each).parts]


@st.composite
def parallels(draw: st.DrawFn, groups: Sequence[KVCacheGroup], largest: int) -> ParallelConfig:
    """Draw the parallel sizes of an engine, and sometimes how it deals the units of *groups*."""
    tp_size = draw(tp_sizes(largest))
    deals: dict[int, tuple[range, ...]] = {}
    if draw(st.integers(0, 3)) == 0:
        deal_in: dict[int, int] = {}
        for part in parts_of(groups):
            deal_in[part.units] = lcm(deal_in.get(part.units, 1), part.deal_in)
        for units, multiple in deal_in.items():
            if draw(st.booleans()):
                deals[units] = draw(explicit_deals(units, multiple, tp_size))
    return ParallelConfig(tp_size=tp_size, unit_deals=deals)


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
) -> EngineSpec:
    """Draw an engine that serves *model*: its layouts, padding, and sizes unless *parallel*."""
    parallel = parallel or draw(parallels(model, largest))
    layout = draw(layouts(model[0].spec))
    bare = EngineSpec(groups=tuple(model), parallel=parallel)
    own = []
    for group in model:
        name = draw(layouts(group.spec)) if group is not model[0] else layout
        spec = group.spec if group.spec.layers else attrs.evolve(group.spec, page_size_padded=None)
        if not spec.layers and (is_state(spec) or set(name[:2]) == {"L", "B"}):
            page = max(_page(bare, rank, spec) for rank in parallel.ranks)
            padded = page + draw(st.integers(0, 5))
            spec = attrs.evolve(spec, page_size_padded=draw(st.sampled_from((None, padded))))
        override = None if name == layout else name
        own.append(attrs.evolve(group, spec=spec, layout=override))
    return EngineSpec(groups=tuple(own), parallel=parallel, layout=layout)


def _page(engine: EngineSpec, rank: Any, spec: LayerSpec) -> int:  # noqa: ANN401
    return sum(len(rank_units(engine, rank, p)) * p.states * p.content_bytes for p in spec.parts)


@st.composite
def engine_pairs(
    draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS), largest: int = 6
) -> tuple[EngineSpec, EngineSpec]:
    """Draw a producer and a consumer of one model; everything else may differ."""
    model = draw(groups(kinds))
    return draw(engines(model, largest)), draw(engines(model, largest))


@attrs.frozen(kw_only=True)
class Case:
    """One transfer: both engines, their block pools by group, the request and the election."""

    producer: EngineSpec
    consumer: EngineSpec
    producer_pool: dict[str, int]
    consumer_pool: dict[str, int]
    request: TransferRequest
    replicas: Replicas = "spread"
    salt: int = 0


def length_of(group: KVCacheGroup, request: TransferRequest) -> int:
    """Return how many positions the request has in *group*: the prompt's, or the encoder's."""
    cross = isinstance(group.spec, CrossAttentionSpec) and request.encoder_tokens is not None
    return int(request.encoder_tokens or 0) if cross else request.num_tokens


def needed(group: KVCacheGroup, request: TransferRequest) -> range:
    """Return the span of token positions of *group* that have to move; empty: none."""
    cached = request.cached_tokens
    cached = cached if isinstance(cached, int) else cached.get(group.name, 0)
    tokens = [
        int(token)
        for layer in group.layers
        for token in live_positions(group.spec.of_layer(layer), request).nonzero()[0]
        if token >= cached
    ]
    return range(min(tokens), max(tokens) + 1) if tokens else range(0)


@st.composite
def _table(
    draw: st.DrawFn, group: KVCacheGroup, request: TransferRequest
) -> tuple[BlockTable, int]:
    """Draw a table of at least what is needed, lookahead blocks after it, and a pool around it."""
    size, length, wanted = group.spec.block_size, length_of(group, request), needed(group, request)
    if is_state(group.spec):
        first, count = 0, 1
    else:
        latest = (wanted.start if wanted else length) // size
        first = draw(st.sampled_from((0, latest)) | st.integers(0, latest))
        end = -(-length // size) if wanted or draw(st.booleans()) else first
        count = max(end - first, 0) + draw(st.sampled_from((0, 0, 1, 2)))
    pool = count + draw(st.integers(1, 4))
    order = draw(st.sampled_from(("ascending", "shuffled", "descending")))
    start = draw(st.integers(0, pool - count))
    ids = list(range(start, start + count))
    if order == "shuffled":
        ids = random.Random(draw(st.integers(0, 2**16))).sample(range(pool), count)  # noqa: S311
    elif order == "descending":
        ids.reverse()
    return BlockTable(ids, first * size), pool


@st.composite
def tables(
    draw: st.DrawFn, model: Sequence[KVCacheGroup], request: TransferRequest
) -> tuple[dict[str, BlockTable], dict[str, int]]:
    """Draw one side's block tables that hold what *request* needs, and its pools, by group."""
    drawn = {group.name: draw(_table(group, request)) for group in model}
    found = {name: table for name, (table, _) in drawn.items()}
    return found, {name: pool for name, (_, pool) in drawn.items()}


@st.composite
def _lengths(draw: st.DrawFn, model: Sequence[KVCacheGroup]) -> int:
    """Draw a prompt length: one token, whole blocks, one more or less, or anything."""
    size = draw(st.sampled_from([group.spec.block_size for group in model]))
    blocks, offset = (
        draw(st.sampled_from((2, 1, 3, 0))),
        draw(st.sampled_from((0, 1, -1)) | st.integers(1, 16)),
    )
    return min(max(1, blocks * size + offset), 56)


@st.composite
def _cached(
    draw: st.DrawFn, model: Sequence[KVCacheGroup], bare: TransferRequest
) -> TransferRequest:
    """Draw how much the consumer has: nothing, everything, or some; one count or one a group.

    Where a row stands for several tokens, a part of one cannot be cached.
    """
    tokens = bare.num_tokens
    if draw(st.booleans()) and all(p.tokens_per_state <= 1 for p in parts_of(model)):
        amount = draw(st.sampled_from((0, 0, 0, tokens)) | st.integers(0, tokens))
        return attrs.evolve(bare, cached_tokens=amount)
    found = {}
    for group in model:
        length, row = length_of(group, bare), max(1, parts_of([group])[0].tokens_per_state)
        some = draw(st.sampled_from((0, 0, 0, length)) | st.integers(0, length))
        found[group.name] = some if some == length else some // row * row
    return attrs.evolve(bare, cached_tokens=found)


@st.composite
def requests(
    draw: st.DrawFn, model: Sequence[KVCacheGroup]
) -> tuple[TransferRequest, dict[str, int], dict[str, int]]:
    """Draw a request for *model* and the pools of producer and consumer that its tables fit in."""
    tokens = draw(_lengths(model))
    cross = any(isinstance(group.spec, CrossAttentionSpec) for group in model)
    bare = TransferRequest(
        request_id="request",
        num_tokens=tokens,
        encoder_tokens=draw(st.sampled_from((None, 1, 5, 17))) if cross else None,
        state_tokens=draw(st.sampled_from((None, tokens))),
        producer_blocks={},
        consumer_blocks={},
    )
    request = draw(_cached(model, bare))
    (producer, producer_pool), (consumer, consumer_pool) = (
        draw(tables(model, request)) for _ in range(2)
    )
    request = attrs.evolve(request, producer_blocks=producer, consumer_blocks=consumer)
    return request, producer_pool, consumer_pool


@st.composite
def cases(draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS), largest: int = 6) -> Case:
    """Draw a whole transfer between engines of at most *largest* ranks."""
    producer, consumer = draw(engine_pairs(kinds, largest))
    request, producer_pool, consumer_pool = draw(requests(producer.groups))
    return Case(
        producer=producer,
        consumer=consumer,
        producer_pool=producer_pool,
        consumer_pool=consumer_pool,
        request=request,
        replicas=draw(st.sampled_from(POLICIES)),
        salt=draw(st.integers(0, 3)),
    )
