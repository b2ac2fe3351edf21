"""Draw requests: prompt lengths, cached tokens, block tables and block pools.

Invariant: each drawn table holds the blocks of all tokens that must move, so that a correct system
can serve the request.

How it works:
    `requests` draws the prompt length first, then the tokens that the consumer has cached, then one
    block table for each group and side. `_table` draws a table in four steps, one for each way in
    which tables of real engines differ. Example: a window of 6 tokens, blocks of 4 tokens, and a
    prompt of 14 tokens. The query at position 14 needs the tokens 9 to 13.

        step              decides                                       example
        _covered_blocks   the first block and the number of blocks      blocks 1 to 4, tokens 4-19
        _block_ids        the pool, and the ids with their order        pool of 6, ids [5, 0, 3, 1]
        _null_blocks      the id of the null block, which no one owns   0: ids [6, 1, 4, 2], pool 7
        _kept_blocks      the blocks that hold a needed token           block 2 and block 3

    The table begins at token 4, although only block 2 and block 3 are needed: engines may keep
    older blocks. It ends after the prompt: engines allocate lookahead blocks. In three of four
    tables with a null block, the null block replaces all blocks that are not needed:
    `BlockTable([0, 1, 4, 0], first_token=4)`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import lcm

import attrs
import numpy as np
from hypothesis import strategies as st

from kvspec.check.counting import (
    cached_tokens_of,
    context_of,
    counts_encoder,
    length_in,
    live_positions,
)
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.ownership.parallel import RankId
from kvspec.specs import LayerSpec
from kvspec.testing.parallels import has_one_block, is_state, parts_of, sample
from kvspec.testing.positions import excluded_layers
from kvspec.testing.supports import EVERYTHING, Supports

# The oracle visits each byte of each block, so the time of a case grows with its prompt.
_MAX_TOKENS = 56


def needed(
    group: KVCacheGroup, request: TransferRequest, reader: EngineSpec | None = None
) -> range:
    """Return the range of token positions of *group* that must move.

    Args:
        group: A group of the engine that holds the table.
        request: The request. Its cached tokens do not move.
        reader: The consumer. Pass it if the consumer may keep other tokens of these layers than
            *group* does, for example all tokens of a sliding window.

    Returns:
        The positions from the first to the last one that moves. Empty if none moves.

    >>> import kvspec
    >>> spec = kvspec.SlidingWindowSpec(
    ...     block_size=4, total_num_kv_heads=1, head_size=2, dtype="uint8", sliding_window=6
    ... )
    >>> group = KVCacheGroup(name="g", layers=["l"], spec=spec)
    >>> request = TransferRequest(
    ...     request_id="r", num_tokens=14, producer_blocks={}, consumer_blocks={}
    ... )
    >>> needed(group, request)
    range(9, 14)
    """
    cached = cached_tokens_of(request, group)
    tokens = [
        int(token)
        for layer in group.layers
        for token in live_positions(_reader_spec(group, layer, reader), request).nonzero()[0]
        if token >= cached
    ]
    return range(min(tokens), max(tokens) + 1) if tokens else range(0)


def _reader_spec(group: KVCacheGroup, layer: str, reader: EngineSpec | None) -> LayerSpec:
    """Return the spec of *layer* in the engine *reader*, or in *group* if *reader* lacks it."""
    for reader_group in () if reader is None else reader.groups:
        if layer in reader_group.layers:
            return reader_group.spec.of_layer(layer)
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
    supports: Supports,
) -> tuple[BlockTable, int]:
    """Draw a block table of *group*, and the size of the pool that its ids belong to."""
    # Context ranks share the tokens of a block table, but each of them holds whole states.
    ranks = 1 if is_state(group.spec) else context_of(engine, RankId(), group)[1]
    size = group.spec.block_size * ranks
    if group.spec.is_ring:
        size = 2**62  # The one block has all positions.
    needed_tokens = needed(group, request, reader)
    length = length_in(group.spec, request)
    # A table that is neither late nor long covers the whole prompt, or holds one state.
    blocks = range(1 if is_state(group.spec) else -(-length // size))
    if supports.late_tables and not group.spec.is_ring:
        blocks = draw(_covered_blocks(group, length, needed_tokens, size))
    ids, pool = draw(_block_ids(len(blocks)))
    null = None
    if supports.null_blocks:
        null, ids, pool = draw(_null_blocks(engine.null_block, ids, pool))
    if null is not None and draw(st.integers(0, 3)):
        kept = _kept_blocks(group, length, needed_tokens, blocks, size)
        ids = [
            block_id if block in kept else null for block, block_id in zip(blocks, ids, strict=True)
        ]
    return BlockTable(ids, blocks.start * size), pool


@st.composite
def _covered_blocks(
    draw: st.DrawFn, group: KVCacheGroup, length: int, needed_tokens: range, size: int
) -> range:
    """Draw the blocks that a table covers, as numbers along the prompt. Each has *size* tokens."""
    if is_state(group.spec):
        # If the table has one block, that block holds the state. If it has several, the state is in
        # the block of the last token. Engines that keep a state for each block have such tables.
        last = max(length - 1, 0) // size
        first = draw(sample(0, 0, last // 2, last))
        several = (last - first + 1, last - first + 2)
        count = draw(sample(*((1, 1, *several) if first in (0, last) else several)))
        return range(first, first + count)
    latest = (needed_tokens.start if needed_tokens else length) // size
    first = draw(_around(0, latest, latest, most=latest))
    # A table of a request that needs nothing may be empty.
    end = -(-length // size) if needed_tokens or draw(st.booleans()) else first
    count = max(end - first, 0) + draw(sample(0, 0, 1, 2))
    return range(first, first + count)


@st.composite
def _block_ids(draw: st.DrawFn, count: int) -> tuple[list[int], int]:
    """Draw a pool size, and *count* different block ids of it: ascending, descending or mixed."""
    pool = max(1, count + draw(st.integers(0, 4)))
    order = draw(sample("ascending", "shuffled", "descending"))
    start = draw(st.integers(0, pool - count))
    ids = list(range(start, start + count))
    if order == "shuffled":
        # One seed shrinks and draws faster than a permutation of all ids.
        ids = random.Random(draw(st.integers(0, 2**16))).sample(range(pool), count)  # noqa: S311
    elif order == "descending":
        ids.reverse()
    return ids, pool


@st.composite
def _null_blocks(
    draw: st.DrawFn, null_block: int | None, ids: list[int], pool: int
) -> tuple[int | None, list[int], int]:
    """Draw the id that stands for "no block", or None. Return it with new *ids* and *pool*.

    The new ids do not contain it. An engine without a null block may use -1, which is not a block,
    or name one block several times.
    """
    if null_block is not None:
        ids = [block_id + (block_id >= null_block) for block_id in ids]
        return null_block, ids, max(pool, null_block) + 1
    null = draw(sample(None, None, -1, 0))
    shift = int(null == 0)
    return null, [block_id + shift for block_id in ids], pool + shift


def _kept_blocks(
    group: KVCacheGroup, length: int, needed_tokens: range, blocks: range, size: int
) -> set[int]:
    """Return the *blocks* that hold a needed token, or the state if it is needed."""
    if is_state(group.spec) and needed_tokens:
        state_token = length - 1 if len(blocks) > 1 else blocks.start * size
        needed_tokens = range(state_token, state_token + 1)
    return {
        block
        for block in blocks
        if max(block * size, needed_tokens.start) < min((block + 1) * size, needed_tokens.stop)
    }


@st.composite
def tables(
    draw: st.DrawFn,
    engine: EngineSpec,
    request: TransferRequest,
    reader: EngineSpec | None = None,
    supports: Supports = EVERYTHING,
) -> tuple[dict[str, BlockTable], dict[str, int]]:
    """Draw the block tables of one side, and its pools.

    Args:
        draw: Passed by Hypothesis.
        engine: The engine that owns the tables.
        request: The request, with or without tables.
        reader: The consumer, if *engine* is the producer.
        supports: What may be drawn.

    Returns:
        The tables and the pool sizes in blocks, both by the name of the group. A group with only
        excluded layers has a pool, but may have no table.

    >>> import kvspec
    >>> from hypothesis import find
    >>> spec = kvspec.MLAAttentionSpec(block_size=4, head_size=2, dtype="uint8")
    >>> engine = EngineSpec(groups=[KVCacheGroup(name="g", layers=["l"], spec=spec)])
    >>> request = TransferRequest(
    ...     request_id="r", num_tokens=7, producer_blocks={}, consumer_blocks={}
    ... )
    >>> drawn, pools = find(tables(engine, request), lambda _: True)
    >>> drawn["g"].block_ids, pools
    (array([0, 1]), {'g': 2})
    """
    drawn = {
        group.name: draw(_table(engine, group, request, reader, supports))
        for group in engine.groups
    }
    excluded = {group.name for group in engine.groups if set(group.layers) == set(group.excluded)}
    keep_excluded = not excluded or draw(st.booleans())
    block_tables = {
        name: table for name, (table, _) in drawn.items() if keep_excluded or name not in excluded
    }
    return block_tables, {name: pool for name, (_, pool) in drawn.items()}


@st.composite
def of_one_pool(
    draw: st.DrawFn, separate_tables: Mapping[str, BlockTable], null: int | None
) -> tuple[dict[str, BlockTable], dict[str, int]]:
    """Draw new ids for the tables of one side, so that no two groups have a common block.

    The *null* block keeps its id, and all groups may name it.
    """
    total = sum(len(table.block_ids) for table in separate_tables.values())
    pool = max(1, total + draw(st.integers(0, 4)), 0 if null is None else total + null + 1)
    free = [block for block in range(pool) if block != null]
    ids = random.Random(draw(st.integers(0, 2**16))).sample(free, total)  # noqa: S311
    new_tables = {}
    for name, table in separate_tables.items():
        count = len(table.block_ids)
        kept = np.full(count, null is not None) & (table.block_ids == null)
        new_ids = np.where(kept, table.block_ids, ids[:count])
        new_tables[name] = attrs.evolve(table, block_ids=new_ids)
        ids = ids[count:]
    return new_tables, dict.fromkeys(separate_tables, pool)


@st.composite
def given_back(
    draw: st.DrawFn, engine: EngineSpec, request: TransferRequest
) -> dict[str, BlockTable]:
    """Draw the consumer's tables, whose groups share memory, after blocks were given back.

    A window has passed the blocks before the first live position. Another group of the request may
    have them by now, and the table may still name them.
    """
    old_tables = request.consumer_blocks
    new_tables = dict(old_tables)
    for group in engine.groups:
        table = old_tables.get(group.name)
        if table is None or has_one_block(group.spec):
            continue
        size = group.spec.block_size * context_of(engine, RankId(), group)[1]
        live = live_positions(group.spec.of_layer(group.layers[0]), request)
        first = int(live.argmax()) if live.any() else len(live)
        # A table may begin after the first live position, or end before it.
        count = min(max(0, first // size - table.first_token // size), len(table.block_ids))
        others = np.concatenate(
            [
                np.empty(0, np.int64),
                *(other.block_ids for name, other in old_tables.items() if name != group.name),
            ]
        )
        others = np.setdiff1d(others, [-1 if engine.null_block is None else engine.null_block, -1])
        # Each id once: a repeated id would be a placeholder.
        count = min(count, len(others))
        if count and draw(st.booleans()):
            ids = table.block_ids.copy()
            start = draw(st.integers(0, len(others) - count))
            ids[:count] = others[start : start + count]
            new_tables[group.name] = attrs.evolve(table, block_ids=ids)
    return new_tables


@st.composite
def _lengths(draw: st.DrawFn, model: Sequence[KVCacheGroup]) -> int:
    """Draw a prompt length: 0, 1, whole blocks, one token more or less, or any number."""
    size = draw(sample(*(group.spec.block_size for group in model)))
    blocks, offset = (
        draw(sample(2, 1, 3, 4, 0)),
        draw(_around(0, 1, -1, least=1, most=16)),
    )
    return min(max(0, blocks * size + offset), _MAX_TOKENS)


def _cached_of(length: int) -> st.SearchStrategy[int]:
    """Draw the cached tokens of a prompt of *length* tokens, which may be more than these."""
    # After half of a prompt, and before its last token, some tables begin late.
    last = max(0, length - 1)
    return _around(0, 0, 1, length // 2, last, last, length, length + 3, most=length)


def _row_tokens(model: Sequence[KVCacheGroup]) -> int:
    """Return the number of tokens that divides each legal cached prefix."""
    rows = [max(1, part.tokens_per_state) for part in parts_of(model)]
    groups = [getattr(group.spec.of_layer(group.layers[0]), "compress_ratio", 1) for group in model]
    return lcm(*rows, *groups)


@st.composite
def _cached(
    draw: st.DrawFn,
    model: Sequence[KVCacheGroup],
    bare: TransferRequest,
    whole: int,
    supports: Supports,
) -> TransferRequest:
    """Draw the cached tokens: none, some, all or more, as one number or as one for each group.

    If only whole blocks may be cached, *whole* is the number of tokens that divides all of them.
    """
    tokens = bare.num_tokens
    if supports.prefixes != "any":
        most = tokens // whole if supports.prefixes == "blocks" else 0
        return attrs.evolve(bare, cached_tokens=whole * draw(st.integers(0, most)))
    # Part of a row cannot be cached, so one number for all groups needs rows of one token.
    if draw(st.booleans()) and all(_row_tokens([group]) == 1 for group in model):
        amount = draw(_cached_of(tokens))
        return attrs.evolve(bare, cached_tokens=amount)
    cached = {}
    for group in model:
        length = length_in(group.spec, bare)
        row, amount = _row_tokens([group]), draw(_cached_of(length))
        all_cached = amount >= length and not group.spec.is_ring
        cached[group.name] = amount if all_cached else amount // row * row
    return attrs.evolve(bare, cached_tokens=cached)


@st.composite
def requests(
    draw: st.DrawFn,
    producer: EngineSpec,
    consumer: EngineSpec,
    supports: Supports = EVERYTHING,
    others: Sequence[EngineSpec] = (),
) -> tuple[TransferRequest, dict[str, int], dict[str, int]]:
    """Draw a request between two engines of one model.

    Args:
        draw: Passed by Hypothesis.
        producer: The engine that holds the tokens.
        consumer: The engine that reads them.
        supports: What may be drawn.
        others: Engines that serve the same request in another case. If only whole blocks may be
            cached, the prefix ends on their blocks too.

    Returns:
        The request, the producer's pools and the consumer's pools. A pool is a number of blocks, by
        the name of the group.

    >>> import kvspec
    >>> from hypothesis import find
    >>> spec = kvspec.MLAAttentionSpec(block_size=4, head_size=2, dtype="uint8")
    >>> engine = EngineSpec(groups=[KVCacheGroup(name="g", layers=["l"], spec=spec)])
    >>> request, _, _ = find(requests(engine, engine), lambda drawn: drawn[0].num_tokens > 4)
    >>> len(request.producer_blocks["g"].block_ids)
    2
    """
    excluded = excluded_layers(producer) | excluded_layers(consumer)
    moving = [group for group in consumer.groups if not excluded.issuperset(group.layers)]
    model = moving or list(consumer.groups)
    whole = lcm(
        _row_tokens(model),
        *(
            group.spec.block_size * context_of(engine, RankId(), group)[1]
            for engine in (producer, consumer, *others)
            for group in engine.groups
        ),
    )
    tokens = draw(_lengths(model))
    if supports.prefixes == "blocks" and tokens < whole < _MAX_TOKENS:
        # Without whole blocks, the prompt could have no prefix.
        tokens = draw(sample(tokens, whole, whole + 1, whole + 1))
    cross = any(counts_encoder(group.spec) for group in model)
    bare = TransferRequest(
        request_id="request",
        num_tokens=tokens,
        encoder_tokens=draw(sample(0, 1, 5, 17, tokens)) if cross else None,
        state_tokens=draw(sample(None, tokens)),
        producer_blocks={},
        consumer_blocks={},
    )
    request = draw(_cached(model, bare, whole, supports))
    (producer_blocks, producer_pool), (consumer_blocks, consumer_pool) = (
        draw(tables(engine, request, consumer, supports)) for engine in (producer, consumer)
    )
    request = attrs.evolve(
        request, producer_blocks=producer_blocks, consumer_blocks=consumer_blocks
    )
    return request, producer_pool, consumer_pool
