"""Draw requests: how many tokens, how many are cached, and block tables that hold what is needed.

Tables hold more than is needed, begin late, and name null blocks where nothing is needed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache

import attrs
import numpy as np
from hypothesis import strategies as st

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.ownership.parallel import RankId
from kvspec.specs import CrossAttentionSpec, LayerSpec
from kvspec.testing.parallels import is_state, parts_of, sample
from kvspec.testing.positions import cached_tokens_of, context_of, excluded_layers, live_positions


def length_of(group: KVCacheGroup, request: TransferRequest) -> int:
    """Return how many positions the request has in *group*: the prompt's, or the encoder's."""
    cross = isinstance(group.spec, CrossAttentionSpec) and request.encoder_tokens is not None
    return int(request.encoder_tokens or 0) if cross else request.num_tokens


def needed(
    group: KVCacheGroup, request: TransferRequest, reader: EngineSpec | None = None
) -> range:
    """Return the span of token positions of *group* that have to move; empty: none.

    *reader*: the consumer, if it keeps other tokens of the layers than *group* says.
    """
    cached = cached_tokens_of(request, group)
    tokens = [
        int(token)
        for layer in group.layers
        for token in live_positions(_read(group, layer, reader), request).nonzero()[0]
        if token >= cached
    ]
    return range(min(tokens), max(tokens) + 1) if tokens else range(0)


def _read(group: KVCacheGroup, layer: str, reader: EngineSpec | None) -> LayerSpec:
    """Return what *layer* is to its *reader*: to its own engine, unless that is given."""
    for other in () if reader is None else reader.groups:
        if layer in other.layers:
            return other.spec.of_layer(layer)
    return group.spec.of_layer(layer)


@lru_cache(maxsize=4096)
def _around(*values: int, most: int, least: int = 0) -> st.SearchStrategy[int]:
    """Draw one of *values*, or any number from *least* to *most*."""
    return sample(*values) | st.integers(least, most)


@st.composite
def _table(
    draw: st.DrawFn,
    engine: EngineSpec,
    group: KVCacheGroup,
    request: TransferRequest,
    reader: EngineSpec | None,
) -> tuple[BlockTable, int]:
    """Draw a table of at least what is needed, lookahead blocks after it, and a pool around it.

    Blocks that are not needed may be null: the engine's null block, or where it has none a number
    that is no block, or one block for all of them.
    """
    size = group.spec.block_size * context_of(engine, RankId(), group)[1]
    length, wanted = length_of(group, request), needed(group, request, reader)
    if is_state(group.spec):  # its slot, or blocks of which one has the last token
        size, last = group.spec.block_size, max(length - 1, 0) // group.spec.block_size
        first = draw(sample(0, 0, last // 2, last))
        several = (last - first + 1, last - first + 2)
        count = draw(sample(*((1, 1, *several) if first in (0, last) else several)))
    else:
        latest = (wanted.start if wanted else length) // size
        first = draw(_around(0, latest, most=latest))
        end = -(-length // size) if wanted or draw(st.booleans()) else first
        count = max(end - first, 0) + draw(sample(0, 0, 1, 2))
    pool = max(1, count + draw(st.integers(0, 4)))
    order = draw(sample("ascending", "shuffled", "descending"))
    start = draw(st.integers(0, pool - count))
    ids = list(range(start, start + count))
    if order == "shuffled":
        ids = random.Random(draw(st.integers(0, 2**16))).sample(range(pool), count)  # noqa: S311
    elif order == "descending":
        ids.reverse()
    null = engine.null_block
    if null is None:
        null = draw(sample(None, None, -1, 0))
        ids, pool = [each + (null == 0) for each in ids], pool + (null == 0)
    else:
        ids, pool = [each + (each >= null) for each in ids], max(pool, null) + 1
    if null is None or not draw(st.integers(0, 3)):
        return BlockTable(ids, first * size), pool
    if is_state(group.spec):
        wanted = range(length - 1, length) if count > 1 else range(first * size, first * size + 1)
    starts = range(first * size, (first + count) * size, size)
    kept = [bool(range(max(at, wanted.start), min(at + size, wanted.stop))) for at in starts]
    table = [each if keep else null for each, keep in zip(ids, kept, strict=True)]
    return BlockTable(table, first * size), pool


@st.composite
def tables(
    draw: st.DrawFn,
    engine: EngineSpec,
    request: TransferRequest,
    reader: EngineSpec | None = None,
) -> tuple[dict[str, BlockTable], dict[str, int]]:
    """Draw one side's block tables that hold what *request* needs, and its pools, by group.

    *reader*: the consumer, where *engine* is not.
    """
    drawn = {group.name: draw(_table(engine, group, request, reader)) for group in engine.groups}
    still = {group.name for group in engine.groups if set(group.layers) == set(group.excluded)}
    told = not still or draw(st.booleans())
    found = {name: table for name, (table, _) in drawn.items() if told or name not in still}
    return found, {name: pool for name, (_, pool) in drawn.items()}


@st.composite
def of_one_pool(
    draw: st.DrawFn, found: Mapping[str, BlockTable], null: int | None
) -> tuple[dict[str, BlockTable], dict[str, int]]:
    """Draw other ids for the tables *found*: each block of one pool belongs to one group.

    But the *null* block, which stays where it is.
    """
    total = sum(len(table.block_ids) for table in found.values())
    pool = max(1, total + draw(st.integers(0, 4)), 0 if null is None else total + null + 1)
    free = [each for each in range(pool) if each != null]
    ids = random.Random(draw(st.integers(0, 2**16))).sample(free, total)  # noqa: S311
    own = {}
    for name, table in found.items():
        count = len(table.block_ids)
        kept = np.full(count, null is not None) & (table.block_ids == null)
        own[name] = attrs.evolve(table, block_ids=np.where(kept, table.block_ids, ids[:count]))
        ids = ids[count:]
    return own, dict.fromkeys(found, pool)


@st.composite
def _lengths(draw: st.DrawFn, model: Sequence[KVCacheGroup]) -> int:
    """Draw a prompt length: none, one token, whole blocks, one more or less, or anything."""
    size = draw(sample(*(group.spec.block_size for group in model)))
    blocks, offset = (
        draw(sample(2, 1, 3, 4, 0)),
        draw(_around(0, 1, -1, least=1, most=16)),
    )
    return min(max(0, blocks * size + offset), 56)


@st.composite
def _cached(
    draw: st.DrawFn, model: Sequence[KVCacheGroup], bare: TransferRequest
) -> TransferRequest:
    """Draw how much the consumer has: nothing, everything, more, or some; one count or one a group.

    Where a row stands for several tokens, a part of one cannot be cached.
    """
    tokens = bare.num_tokens
    if draw(st.booleans()) and all(p.tokens_per_state <= 1 for p in parts_of(model)):
        amount = draw(_around(0, 0, 1, tokens, tokens + 3, most=tokens))
        return attrs.evolve(bare, cached_tokens=amount)
    found = {}
    for group in model:
        length = length_of(group, bare)
        row = max(1, *(part.tokens_per_state for part in parts_of([group])))
        some = draw(_around(0, 0, 1, length, length + 3, most=length))
        found[group.name] = some if some >= length else some // row * row
    return attrs.evolve(bare, cached_tokens=found)


@st.composite
def requests(
    draw: st.DrawFn, producer: EngineSpec, consumer: EngineSpec
) -> tuple[TransferRequest, dict[str, int], dict[str, int]]:
    """Draw a request between two engines, and the pools of both that its tables fit in."""
    still = excluded_layers(producer) | excluded_layers(consumer)
    moving = [group for group in consumer.groups if not still.issuperset(group.layers)]
    model = moving or list(consumer.groups)
    tokens = draw(_lengths(model))
    cross = any(isinstance(group.spec, CrossAttentionSpec) for group in model)
    bare = TransferRequest(
        request_id="request",
        num_tokens=tokens,
        encoder_tokens=draw(sample(0, 1, 5, 17, tokens)) if cross else None,
        state_tokens=draw(sample(None, tokens)),
        producer_blocks={},
        consumer_blocks={},
    )
    request = draw(_cached(model, bare))
    (producer_blocks, producer_pool), (consumer_blocks, consumer_pool) = (
        draw(tables(engine, request, consumer)) for engine in (producer, consumer)
    )
    request = attrs.evolve(
        request, producer_blocks=producer_blocks, consumer_blocks=consumer_blocks
    )
    return request, producer_pool, consumer_pool
