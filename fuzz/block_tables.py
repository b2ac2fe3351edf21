"""Any request, however wrong its tables and counts, is refused by name or moved byte for byte.

A request is refused if a `SpecError` or a `MismatchError` is raised before a byte moves. Otherwise
each live, uncached byte of every consumer rank must be right, both by ids and by descriptors, and
no cached byte may change. The oracle judges the bytes. Three kinds of request can only be refused:
a token that no block holds, a block that stands for two live places, and a cached count inside a
row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec.check.counting import context_of, live_positions, own_positions
from kvspec.testing import Case, oracle
from kvspec.testing.carve import count_kernel_blocks, logical_views
from kvspec.testing.parallels import is_state
from kvspec.testing.positions import excluded_layers
from kvspec.testing.strategies import cases

REFUSED = (kvspec.SpecError, kvspec.MismatchError)
# Integers that are negative, valid, or beyond the pool of a small case.
SOME = st.integers(-3, 40)
SOME_IDS = st.lists(SOME, max_size=3)
# Values of other types, which a caller can pass as block ids by mistake.
WRONG_IDS = st.one_of(
    st.lists(SOME | st.integers() | st.floats() | st.none() | st.text(max_size=2), max_size=6),
    st.none(),
    st.lists(SOME_IDS, max_size=3),  # nested, and mostly ragged
    st.lists(SOME | SOME_IDS, max_size=4),
    SOME,
    st.text(max_size=2),
    st.dictionaries(SOME, SOME, max_size=2),
)
Fields = dict[str, Any]
Held = dict[kvspec.RankId, tuple[kvspec.RankCache, dict[str, Any]]]


@st.composite
def requests(draw: st.DrawFn, case: Case) -> Fields:
    """Draw the fields of a valid request after one to three changes."""
    fields = attrs.asdict(case.request, recurse=False, filter=lambda field, _: field.init)
    for _ in range(draw(st.integers(1, 3))):
        # Tables have the most ways to be wrong, so they are drawn twice as often.
        change = draw(st.sampled_from(("table", "table", "cached", "tokens", "state", "encoder")))
        if change == "table":
            side = draw(st.sampled_from(("producer_blocks", "consumer_blocks")))
            name = draw(st.sampled_from(sorted(fields[side]) or ["none"]))
            fields[side] = {**fields[side], name: draw(table(fields[side].get(name)))}
        elif change == "cached":
            names = [group.name for group in (*case.producer.groups, *case.consumer.groups)]
            counts = st.dictionaries(st.sampled_from([*names, "unknown"]), SOME, max_size=3)
            fields["cached_tokens"] = draw(SOME | counts | st.none())
        else:
            name = {"tokens": "num_tokens", "state": "state_tokens", "encoder": "encoder_tokens"}
            fields[name[change]] = draw(SOME | st.none())
    return fields


@st.composite
def table(draw: st.DrawFn, right: object) -> object:
    """Draw a table: *right* with ids changed, repeated, added or removed, or any other value."""
    change = draw(st.sampled_from(("id", "twice", "first", "more", "less", "anything")))
    if not isinstance(right, kvspec.BlockTable) or change == "anything":
        return draw(WRONG_IDS)
    ids, first = right.block_ids.tolist(), right.first_token
    at = draw(st.integers(0, max(0, len(ids) - 1)))
    if change == "id" and ids:
        ids[at] = draw(SOME)
    elif change == "twice" and ids:
        ids[at] = draw(st.sampled_from(ids))
    elif change == "more":
        ids += draw(st.lists(SOME, max_size=3))
    elif change == "less":
        del ids[at:]
    elif change == "first":
        first = draw(SOME)
        if first < 0:
            return ids[::-1]
    return kvspec.BlockTable(ids, first)


def copies(
    plan: kvspec.TransferPlan, producers: Held, consumers: Held, request: kvspec.TransferRequest
) -> Iterator[tuple[kvspec.RankId, kvspec.RankId, list[list[list[int]]]]]:
    """Yield each pair of ranks with its copies by ids and by descriptors.

    Each item is (producer, consumer, [copies by ids, copies by descriptors]).
    """
    for source, target in sorted({(edge.producer, edge.consumer) for edge in plan.edges}):
        table = kvspec.build_table(plan, producers[source][0], consumers[target][0])
        sides, selection = [], table.select(request)
        rows_of_both = table.producer_rows, table.consumer_rows
        for rows, ids in zip(rows_of_both, selection.ids, strict=True):
            address, length, _, stride, count = rows.astype(np.int64).T
            starts = np.cumsum(count) - count
            row = np.searchsorted(starts, ids, side="right") - 1
            sides += [address[row] + (ids - starts[row]) * stride[row], length[row]]
        assert sides[1].tolist() == sides[3].tolist()
        by_ids = np.stack(sides[:3:2] + sides[1:2], axis=1)
        copied = [*by_ids.tolist(), *selection.ends.tolist()]
        yield source, target, [copied, table.descriptors(request).tolist()]


def moving_span(case: Case, group: kvspec.KVCacheGroup, request: kvspec.TransferRequest) -> range:
    """Return the span of positions of *group* that must move in any of its layers.

    The kind of the consumer's layer decides it for both sides.
    """
    excluded = excluded_layers(case.producer) | excluded_layers(case.consumer)
    homes = {layer: home for home in case.consumer.groups for layer in home.layers}
    tokens = [
        token
        for layer in group.layers
        if layer not in excluded
        for home in (homes[layer],)
        for token in live_positions(home.spec.of_layer(layer), request).nonzero()[0].tolist()
        if token >= request.cached(home.name, home.spec)
    ]
    return range(min(tokens), max(tokens) + 1) if tokens else range(0)


def sound(table: kvspec.BlockTable, pool: int, span: range, virtual: int) -> kvspec.BlockTable:
    """Return *table* reduced to the blocks of the tokens of *span*, which the oracle reads.

    *virtual* is the number of tokens of one block on all context ranks together.
    """
    if not span:
        return kvspec.BlockTable([], 0)
    assert table.first_token % virtual == 0
    first, last = ((t - table.first_token) // virtual for t in (span.start, span.stop - 1))
    assert first >= 0
    ids = table.block_ids[first : last + 1]
    assert len(ids) == last - first + 1
    assert ((ids >= 0) & (ids < pool)).all()
    return kvspec.BlockTable(ids, table.first_token + first * virtual)


def slot(table: kvspec.BlockTable, pool: int, span: range, block_size: int) -> kvspec.BlockTable:
    """Return *table* reduced to the block that holds the state.

    If the table has several blocks, the state is in the block of the last token. If the state does
    not move, any block will do, because it must stay unchanged.
    """
    if not span:
        return kvspec.BlockTable([0])
    at = 0 if len(table.block_ids) == 1 else (span.stop - 1 - table.first_token) // block_size
    assert 0 <= at < len(table.block_ids)
    assert 0 <= table.block_ids[at] < pool
    return kvspec.BlockTable(table.block_ids[at : at + 1])


def spans(case: Case, request: kvspec.TransferRequest, side: str) -> dict[str, Any]:
    """Return the tables of *side*, reduced to the blocks of the tokens that must move."""
    engine, pool = (
        (case.producer, case.producer_pool)
        if side == "producer_blocks"
        else (case.consumer, case.consumer_pool)
    )
    tables = {}
    for group in engine.groups:
        own = getattr(request, side).get(group.name, kvspec.BlockTable([]))
        needed, size = moving_span(case, group, request), group.spec.block_size
        if is_state(group.spec):
            tables[group.name] = slot(own, pool[group.name], needed, size)
        else:
            virtual = size * context_of(engine, kvspec.RankId(), group)[1]
            tables[group.name] = sound(own, pool[group.name], needed, virtual)
    return tables


def never_twice(tables: Mapping[str, kvspec.BlockTable]) -> bool:
    """Return whether every table names each block at most once."""
    return all(len(set(t.block_ids.tolist())) == len(t.block_ids) for t in tables.values())


@given(cases(largest=3), st.data())
def test_changed_request_is_refused_or_exact(case: Case, data: st.DataObject) -> None:
    """After the changes, the request is refused, or its bytes are exact."""
    plan = kvspec.plan_transfer(case.producer, case.consumer, case.replica_policy)
    producers, consumers = (
        {rank: kvspec.allocate(engine, rank, pool) for rank in engine.parallel.ranks}
        for engine, pool in (
            (case.producer, case.producer_pool),
            (case.consumer, case.consumer_pool),
        )
    )
    try:
        request = kvspec.TransferRequest(**data.draw(requests(case)))
        pairs = list(copies(plan, producers, consumers, request))
    except REFUSED:
        return
    exact(case, request, (producers, consumers), pairs)


def exact(
    case: Case,
    request: kvspec.TransferRequest,
    held: tuple[Held, Held],
    pairs: list[tuple[kvspec.RankId, kvspec.RankId, list[list[list[int]]]]],
) -> None:
    """Fill the caches, execute *pairs* by ids and by descriptors, and judge both by the oracle."""
    producers, consumers = held
    sources, targets = (spans(case, request, f"{side}_blocks") for side in ("producer", "consumer"))
    assert never_twice(sources)
    assert never_twice(targets)
    for rank, (_, storage) in producers.items():
        oracle.fill(case.producer, rank, storage, case.producer_pool, sources, request)
    rest = case.consumer_pool, targets, request
    for way in range(2):
        before = {}
        for rank, (_, storage) in consumers.items():
            oracle.spoil(case.consumer, rank, storage, *rest)
            before[rank] = {name: flat.copy() for name, flat in storage.items()}
        for source, target, lists in pairs:
            for producer_address, consumer_address, length in lists[way]:
                data = within(producers[source][1], producer_address, length)
                within(consumers[target][1], consumer_address, length)[:] = data
        for rank, (_, after) in consumers.items():
            wrong = oracle.check(
                case.consumer, rank, before[rank], after, *rest, source=case.producer
            )
            assert not wrong, wrong[0]
            change = before[rank], after
            cached_untouched(case.consumer, rank, change, case.consumer_pool, request)


def within(storage: Mapping[str, Any], address: int, length: int) -> Any:  # noqa: ANN401
    """Return the bytes at *address*, which must lie in the storage of one group."""
    for flat in storage.values():
        at = address - flat.ctypes.data
        if at >= 0 and at + length <= flat.size:
            return flat[at : at + length]
    raise AssertionError(f"{length} bytes at {address:#x} are in no storage of this rank")


def cached_untouched(
    engine: kvspec.EngineSpec,
    rank: kvspec.RankId,
    change: tuple[Mapping[str, Any], Mapping[str, Any]],
    pool: Mapping[str, int],
    request: kvspec.TransferRequest,
) -> None:
    """Check that no byte of a cached token in the request's own table has changed."""
    before, after = change
    changed = {name: (before[name] != after[name]).view(np.uint8) for name in before}
    for (name, layer, part), view in logical_views(engine, rank, changed, pool).items():
        group, own = engine.group(name), request.consumer_blocks.get(name)
        if own is None or is_state(group.spec) or not len(own.block_ids):
            continue
        size, kernel_blocks_per_block = group.spec.block_size, count_kernel_blocks(group)
        parts = {part.name: part for part in group.spec.of_layer(layer).parts}
        tokens = own_positions(engine, rank, own.first_token, len(own.block_ids) * size, group)
        has = np.flatnonzero(tokens < request.cached(name, group.spec))
        at, row = has // size, has % size // parts[part].tokens_per_state
        block = own.block_ids[at]
        known = (block >= 0) & (block < len(view) // kernel_blocks_per_block)
        kernel_block, row = np.divmod(row[known], parts[part].states // kernel_blocks_per_block)
        assert not view[block[known] * kernel_blocks_per_block + kernel_block, :, row].any()
