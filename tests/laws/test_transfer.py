"""The laws of bytes: whole transfers in one process, executed by numpy, judged by the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvspec
from kvspec.testing import strategies
from kvspec.testing.carve import block_split, logical_views
from kvspec.testing.positions import context_of, excluded_layers, rows_of
from kvspec.testing.world import Copy, World, described, finest, inside, selected, snapshot, world

CASES = strategies.cases()
STRIPED = ("full", "sliding window", "MLA", "uniform")


def half_cached(cached: int, **fields: int) -> strategies.Case:
    """Return a sliding window that ends a block of eight tokens whose beginning is cached."""
    spec = kvspec.SlidingWindowSpec(
        block_size=8, total_num_kv_heads=1, head_size=1, dtype="uint8", **fields
    )
    engine = kvspec.EngineSpec(groups=(kvspec.KVCacheGroup(name="g", layers=("l",), spec=spec),))
    request = kvspec.TransferRequest(
        request_id="r", num_tokens=8, cached_tokens=cached,
        producer_blocks={"g": [0]}, consumer_blocks={"g": [1]},
    )  # fmt: skip
    return strategies.Case(
        producer=engine, consumer=engine, producer_pool={"g": 1}, consumer_pool={"g": 2},
        request=request,
    )  # fmt: skip


TORN_ROW = half_cached(4, sliding_window=2, tokens_per_state=4)
"""The window begins inside a row of four tokens, none of which is cached."""
TORN_PIECE = half_cached(1, sliding_window=4)
"""The window [5, 8) is the end of one piece [4, 8) that may be written whole."""


@given(CASES)
@example(TORN_ROW)
def test_exact_cover_by_ids(case: strategies.Case) -> None:
    """Law 1: the ids of `select` move each live, uncached byte, and touch nothing else but dead."""
    here = world(case)
    sources = snapshot(here.producers)
    here.execute(selected)
    assert [] == here.differences()
    for rank, (_, storage) in here.producers.items():
        assert all(np.array_equal(sources[rank][name], storage[name]) for name in storage)


@given(CASES)
@example(TORN_ROW)
def test_exact_cover_by_descriptors(case: strategies.Case) -> None:
    """Law 1: so do the runs of `descriptors`."""
    here = world(case)
    here.execute(described)
    assert [] == here.differences()


@given(CASES)
@example(TORN_ROW)
@settings(max_examples=settings.default.max_examples // 2)
def test_exact_cover_by_the_reference(case: strategies.Case) -> None:
    """Law 1: so does the reference, which copies by torch."""
    pytest.importorskip("torch")
    from kvspec import reference  # noqa: PLC0415 - torch

    here = world(case)
    reference.copy(here.plan, here.producers, here.consumers, case.request)
    assert [] == here.differences()


@given(CASES)
def test_once(case: strategies.Case) -> None:
    """Law 1: no byte of a consumer is written twice; ids and descriptors move the same bytes."""
    here = world(case)
    written: dict[kvspec.RankId, list[tuple[int, int]]] = {}
    for _, c, table in here.tables():
        ways = [way(table, case.request) for way in (selected, described)]
        pairs = [
            sorted((a + i, b + i) for a, b, length in copies for i in range(length))
            for copies in ways
        ]
        assert pairs[0] == pairs[1]
        written.setdefault(c, []).extend((b, b + length) for _, b, length in ways[0])
    for spans in written.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


@given(strategies.cases(STRIPED))
@settings(max_examples=2 * settings.default.max_examples)
def test_each_edge_moves_its_own(case: strategies.Case) -> None:
    """Law 6: a pair of ranks exchanges its slices' units of its stripes' virtual blocks alone."""
    case = attrs.evolve(case, replicas="stripe")
    here = world(case)
    for p, c, table in here.tables():
        own: Any = {name: np.zeros(flat.size, bool) for name, flat in here.before[c].items()}
        views = logical_views(case.consumer, c, own, case.consumer_pool)
        for edge in here.plan.between(p, c):
            group = case.consumer.group(edge.group)
            held, split = case.request.consumer_blocks[edge.group], block_split(group)
            virtual = group.spec.block_size * context_of(case.consumer, c)[1]
            number = np.arange(len(held.block_ids)) + held.first_token // virtual
            for each, layer in product(edge.slices, edge.layers):
                blocks = held.block_ids[each.stripe.holds(number)]
                blocks = (blocks[:, None] * split + np.arange(split)).ravel()
                for part in each.parts if layer in each.layers else ():
                    units = slice(each.local_range.start, each.local_range.stop)
                    views[edge.group, layer, part][blocks, units] = True
        for _, place, length in selected(table, case.request):
            name, offset = inside(here.consumers[c][1], place, length)
            assert own[name][offset : offset + length].all()


@given(CASES)
def test_maximal(case: strategies.Case) -> None:
    """Law 8: no two descriptors of one group touch on both sides, so none could be one."""
    here = world(case)
    for p, c, table in here.tables():
        found: dict[str, set[tuple[int, int]]] = {}
        copies = described(table, case.request)
        for source, place, length in copies:
            name, _ = inside(here.consumers[c][1], place, length)
            inside(here.producers[p][1], source, length)
            found.setdefault(name, set()).add((source, place))
        for source, place, length in copies:
            name, _ = inside(here.consumers[c][1], place, length)
            assert length > 0
            assert (source + length, place + length) not in found[name]


@given(CASES)
@example(TORN_PIECE)
def test_minimal(case: strategies.Case) -> None:
    """Law 8: `select` moves only blocks with a live byte; no copy of its rows could be two."""
    here = world(case)
    for p, c, table in here.tables():
        must, may, live = here.live(c)
        block = blocks_of(here, c)
        copies = selected(table, case.request)
        for _, place, length in copies:
            name, offset = inside(here.consumers[c][1], place, length)
            moved = set(block[name][offset : offset + length].tolist())
            assert moved <= set(block[name][live[name]].tolist())
        for wide in set(wider(table, copies)):
            covered = [copy for copy in copies if within(copy, wide)]
            source, place, length = wide
            group, start = inside(here.producers[p][1], source, length)
            name, offset = inside(here.consumers[c][1], place, length)
            here_bytes = slice(offset, offset + length)
            right = here.producers[p][1][group][start : start + length] == must[name][here_bytes]
            legal = (right & live[name][here_bytes]) | (may[name][here_bytes] == 1)
            if len(covered) > 1 and legal.all():
                mine = names_of(here, "producer", p)[group][start : start + length]
                assert (mine != names_of(here, "consumer", c)[name][here_bytes]).any()


def blocks_of(here: World, rank: kvspec.RankId) -> dict[str, npt.NDArray[np.int64]]:
    """Return the block that each byte of a consumer rank's storage belongs to."""
    found: Any = {name: np.full(flat.size, -1) for name, flat in here.consumers[rank][1].items()}
    views = logical_views(here.case.consumer, rank, found, here.case.consumer_pool)
    for key, view in views.items():
        split = block_split(here.case.consumer.group(key[0]))
        view[:] = (np.arange(len(view)) // split)[:, None, None, None]
    return dict(found)


def names_of(here: World, side: str, rank: kvspec.RankId) -> dict[str, npt.NDArray[np.int64]]:
    """Return a number for each byte of the request's blocks, of equal layer, part, unit and row.

    Bytes of one side with the same name are the same content, dead or alive; 0: not the request's.
    """
    case = here.case
    engine, storage = getattr(case, side), getattr(here, f"{side}s")[rank][1]
    tables = getattr(case.request, f"{side}_blocks")
    found: Any = {name: np.zeros(flat.size, np.int64) for name, flat in storage.items()}
    views = logical_views(engine, rank, found, getattr(case, f"{side}_pool"))
    for rows in rows_of(engine, rank, tables, case.request):
        numbers = rows.token if rows.part.tokens_per_state else rows.row
        for unit, own in enumerate(rows.units):
            for number, block, row in zip(numbers, rows.block, rows.row, strict=True):
                for byte in range(rows.part.content_bytes):
                    name = (rows.key[1:], own, int(number), byte)
                    views[rows.key][block, unit, row, byte] = hash(name)
    return dict(found)


def within(copy: Copy, wide: Copy) -> bool:
    """Return whether *copy* is part of the copy *wide*."""
    (a, b, length), (x, y, total) = copy, wide
    return a - x == b - y and 0 <= a - x and a - x + length <= total


def wider(table: kvspec.DescriptorTable, copies: list[Copy]) -> Iterator[Copy]:
    """Yield the longer copies that a pair of rows of *table* could make around each of *copies*."""
    for place_row, copy in product(table.consumer_rows.tolist(), copies):
        at, total, _, stride, count = place_row
        source, place, length = copy
        block = (place - at) // stride if stride else 0
        start = at + block * stride
        if length < total and 0 <= block < count and place + length <= start + total:
            origin = source - (place - start)
            for base, size, _, step, many in table.producer_rows.tolist():
                index, rest = divmod(origin - base, step) if step else (0, origin - base)
                if size == total and rest == 0 and 0 <= index < many:
                    yield origin, start, total


def in_one(cache: kvspec.RankCache, address: int, end: int) -> bool:
    """Return whether the bytes from *address* to *end* lie in one memory of *cache*."""
    return any(m.address <= address and end <= m.address + m.length for m in cache.memory)


@given(CASES)
def test_bounds(case: strategies.Case) -> None:
    """Law 10: rows, from first to last copy, and descriptors lie in one memory of their side."""
    here = world(case)
    for edge in here.plan.edges:
        caches = [
            finest(side[rank][0])
            for side, rank in ((here.producers, edge.producer), (here.consumers, edge.consumer))
        ]
        table = kvspec.build_table(here.plan, *caches)
        for rows, cache in zip((table.producer_rows, table.consumer_rows), caches, strict=True):
            assert (np.uint64, 2, 5) == (rows.dtype, rows.ndim, rows.shape[1])
            for address, length, device, stride, count in rows.tolist():
                assert device == cache.memory[0].device
                assert count > 0
                assert length > 0
                assert in_one(cache, address, address + (count - 1) * stride + length)
        for source, place, length in described(table, case.request):
            assert in_one(caches[0], source, source + length)
            assert in_one(caches[1], place, place + length)


@given(CASES | strategies.sharing_cases())
def test_a_cache_on_paper(case: strategies.Case) -> None:
    """`lay_out` has the regions of `allocate`, each as far into its memory, and no bytes."""
    for engine, pool in (
        (case.producer, case.producer_pool),
        (case.consumer, case.consumer_pool),
    ):
        for rank in engine.parallel.ranks:
            cache, _ = kvspec.allocate(engine, rank, pool, shared=case.shared)
            paper = kvspec.lay_out(engine, rank, pool, 4096, shared=case.shared)
            assert [m.length for m in cache.memory] == [m.length for m in paper.memory]
            assert 4096 == paper.memory[0].address if paper.memory else True
            ends = [m.address + m.length for m in paper.memory]
            assert ends[:-1] == [m.address for m in paper.memory[1:]]
            moved = {m.address: n.address for m, n in zip(cache.memory, paper.memory, strict=True)}
            wanted = []
            for region in cache.regions:
                home = max(at for at in moved if at <= region.base)
                wanted.append(attrs.evolve(region, base=region.base - home + moved[home]))
            assert wanted == list(paper.regions)


@given(CASES, st.data())
def test_layout_invariance(case: strategies.Case, data: st.DataObject) -> None:
    """Law 9: what arrives does not depend on either side's layouts and padding."""
    producer, consumer = (
        data.draw(strategies.engines(engine.groups, parallel=engine.parallel))
        for engine in (case.producer, case.consumer)
    )
    arrived = []
    for each in (case, attrs.evolve(case, producer=producer, consumer=consumer)):
        here = world(each)
        here.execute(described)
        arrived.append([content_of(here, rank) for rank in here.consumers])
    assert arrived[0] == arrived[1]


def content_of(here: World, rank: kvspec.RankId) -> list[tuple[Any, list[int]]]:
    """Return the live bytes of a consumer rank in logical order."""
    _, _, live = here.live(rank)
    engine, pool = here.case.consumer, here.case.consumer_pool
    views = logical_views(engine, rank, here.consumers[rank][1], pool)
    marks: Any = logical_views(engine, rank, {n: m.view(np.uint8) for n, m in live.items()}, pool)
    order = (0, 2, 1, 3)  # rows before heads: so kernels' blocks of a table's block stand in order
    return [
        (key, views[key].transpose(order)[marks[key].transpose(order) == 1].tolist())
        for key in sorted(views)
    ]


@given(CASES, st.data())
def test_two_hops_are_one_hop(case: strategies.Case, data: st.DataObject) -> None:
    """Law 4: over any third engine that holds what is needed, the same bytes arrive."""
    still = excluded_layers(case.producer) | excluded_layers(case.consumer)
    model = [
        attrs.evolve(group, excluded=tuple(each for each in group.layers if each in still))
        for group in case.consumer.groups
    ]
    between = data.draw(strategies.engines(model, 4))
    tables, pool = data.draw(strategies.tables(between, case.request))
    first = world(
        attrs.evolve(
            case, consumer=between, consumer_pool=pool,
            request=attrs.evolve(case.request, consumer_blocks=tables),
        )
    )  # fmt: skip
    first.execute(selected)
    assert [] == first.differences()
    second = world(
        attrs.evolve(
            case, producer=between, producer_pool=pool,
            request=attrs.evolve(case.request, producer_blocks=tables),
        ),
        first.consumers,
    )  # fmt: skip
    second.execute(selected)
    assert [] == second.differences()
