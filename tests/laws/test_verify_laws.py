"""Tests that `verify` accepts right transfers and names a wrong byte, as the oracle defines it."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import attrs
import builders
import numpy as np
import numpy.typing as npt
import pytest
import special_cases
from builders import engine, mla, request
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from judged import caches, law_1
from refused import refusal

import kvspec
from kvspec.check.checker import Checker
from kvspec.testing import oracle, strategies
from kvspec.testing.carve import stored_views
from kvspec.testing.laws.copies import own_bytes
from kvspec.testing.positions import rows_of
from kvspec.testing.world import World, described, world

VERIFY = sys.modules["kvspec.check.verify"]
CASES = strategies.cases()
HALF = settings(max_examples=settings.default.max_examples // 2)
Descriptors = dict[tuple[kvspec.RankId, kvspec.RankId], npt.NDArray[np.uint64]]


@HALF
@given(CASES)
def test_verify_accepts_the_descriptors_of_the_library(case: strategies.Case) -> None:
    """Both checkers accept them: the one that uses the library, and the independent one."""
    here = world(case)
    for independent in (False, True):
        assert None is kvspec.verify(
            here.plan, *caches(here), case.request, independent=independent
        )


@HALF
@given(strategies.sharing_cases() | special_cases.spanning_cases())
def test_verify_accepts_shared_memory_and_spanning_content(case: strategies.Case) -> None:
    """Groups share their memory, or content spans heads."""
    here = world(case)
    for independent in (False, True):
        assert None is kvspec.verify(
            here.plan, *caches(here), case.request, independent=independent
        )


@HALF
@given(CASES | strategies.sharing_cases())
def test_verify_accepts_the_same_layer_by_layer(case: strategies.Case) -> None:
    """`TOGETHER` is 1, so that each layer is verified alone."""
    here = world(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VERIFY, "TOGETHER", 1)
        assert None is kvspec.verify(here.plan, *caches(here), case.request)


@pytest.mark.parametrize("step", [0, 1, -1])
def test_verify_finds_writes_into_another_layer_layer_by_layer(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer is not written, or is written into the neighbouring layer."""
    side = engine(builders.gqa(2), layers=("l.0", "l.1", "l.2"))
    here = world(builders.case(side, side, request(20, [0, 1], [1, 0])))
    right = VERIFY._descriptors

    def wrong(table: kvspec.DescriptorTable, *arguments: Any) -> Any:
        rows = right(table, *arguments).copy()
        begins = [table.consumer.region(layer, "k").base for layer in ("l.0", "l.1")]
        planted = table.layers == frozenset(["l.2" if step < 0 else "l.1"])
        if planted:
            rows[:, 1] += step * (begins[1] - begins[0])
        return rows[: len(rows) * (step != 0)] if planted else rows

    monkeypatch.setattr(VERIFY, "TOGETHER", 1)
    monkeypatch.setattr(VERIFY, "_descriptors", wrong)
    monkeypatch.setattr(VERIFY.BlockSample, "of", lambda *_: None)
    example = kvspec.verify(here.plan, *caches(here), here.case.request)
    assert example is not None
    assert ("missing", "l.2" if step < 0 else "l.1") == (example.kind, example.layer)


def changed(rows: npt.NDArray[np.uint64], at: int, how: str) -> npt.NDArray[np.uint64]:
    """Return *rows* with row *at* removed, doubled, cut, or read or written one byte later."""
    if how == "removed":
        return np.delete(rows, at, axis=0)
    if how == "doubled":
        return np.concatenate([rows, rows[at : at + 1]])
    shifted = rows.copy()
    column, step = {"cut": (2, -1), "read elsewhere": (0, 1), "written elsewhere": (1, 1)}[how]
    shifted[at, column] = int(shifted[at, column]) + step
    return shifted


HOW = ("removed", "doubled", "cut", "read elsewhere", "written elsewhere")
Sources = dict[kvspec.RankId, dict[int, list[tuple[kvspec.RankId, int]]]]


def sources(here: World, descriptors: Descriptors) -> Sources:
    """Return the source of each byte that a consumer rank receives, by its address."""
    by_rank: Sources = {rank: {} for rank in here.consumers}
    for (source, rank), rows in descriptors.items():
        for start, place, length in rows.tolist():
            for i in range(length):
                by_rank[rank].setdefault(place + i, []).append((source, start + i))
    return by_rank


def faults(
    here: World, descriptors: Descriptors, right: Sources
) -> set[tuple[kvspec.RankId, int, str]]:
    """Return (rank, address, kind) of every wrong byte. The oracle defines live and dead bytes.

    A byte is wrong if its source differs from its source in *right*, where all bytes are right.
    """
    wrong = set()
    for rank, sent in sources(here, descriptors).items():
        _, may, live = here.live(rank)
        free: set[int] = set()
        dead: set[int] = set()
        for name, flat in here.consumers[rank][1].items():
            base = flat.ctypes.data
            dead |= set((base + np.flatnonzero(may[name])).tolist())
            for address in (base + np.flatnonzero(live[name])).tolist():
                free.add(address)
                byte_sources = sent.get(address, [])
                if not byte_sources:
                    wrong.add((rank, address, "missing"))
                if len(byte_sources) > 1:
                    wrong.add((rank, address, "double"))
                if byte_sources != right[rank][address]:
                    wrong.add((rank, address, "wrong source"))
        wrong |= {(rank, address, "unwanted") for address in sent if address not in free | dead}
        wrong |= {(rank, address, "double") for address in dead if len(sent.get(address, [])) > 1}
    return wrong


def address_of(here: World, example: kvspec.CounterExample) -> int:
    """Return the address of the byte of a counter-example, computed by the oracle."""
    case, rank = here.case, example.consumer
    if not example.layer:
        return example.byte
    if example.producer is None:
        engine, storage, pool = case.consumer, here.consumers[rank][1], case.consumer_pool
    else:
        rank, storage = example.producer, here.producers[example.producer][1]
        engine, pool = case.producer, case.producer_pool
    marked = oracle.each_array(storage, np.zeros_like)
    views = stored_views(engine, rank, marked, pool)
    (key,) = (each for each in views if each[1:] == (example.layer, example.part))

    def address(block: int, unit: int, row: int) -> int:
        views[key][[block], [unit], [row], [example.byte]] = 1
        return next(
            storage[name].ctypes.data + int(np.flatnonzero(flat)[0])
            for name, flat in marked.items()
            if flat.any()
        )

    if example.block is not None:
        return address(example.block, example.unit, example.row)
    for rows in rows_of(engine, rank, case.request.consumer_blocks, case.request):
        if rows.key == key:
            named = (
                rows.row == example.row if example.token is None else rows.token == example.token
            )
            (at,) = named.nonzero()[0].tolist()
            unit = rows.units.index(example.unit)
            return address(int(rows.block[at]), unit, int(rows.row[at]))
    raise AssertionError(f"the oracle does not know {example}")


@given(CASES, st.sampled_from(HOW), st.integers(0, 2**16))
def test_verify_names_a_wrong_byte_and_its_kind(case: strategies.Case, how: str, pick: int) -> None:
    """A row is removed, doubled, cut or shifted. A row of dead tokens alone may be changed."""
    here = world(case)
    descriptors: Descriptors = {(p, c): t.descriptors(case.request) for p, c, t in here.tables()}
    before = sources(here, descriptors)
    filled = [pair for pair in sorted(descriptors) if len(descriptors[pair])]
    assume(filled)
    pair = filled[pick % len(filled)]
    descriptors[pair] = changed(descriptors[pair], pick % len(descriptors[pair]), how)
    wrong = faults(here, descriptors, before)
    example = kvspec.verify(here.plan, *caches(here), case.request, descriptors)
    if example is None:
        assert set() == wrong
    else:
        assert (example.consumer, address_of(here, example), example.kind) in wrong


@pytest.mark.uncovered
@given(CASES | strategies.sharing_cases(), st.sampled_from(HOW), st.integers(0, 2**16))
def test_suspects_are_the_contents_that_judge_finds_wrong(
    case: strategies.Case, how: str, pick: int
) -> None:
    """The vectors of the checker and the definition for one byte agree."""
    here = world(case)
    descriptors: Descriptors = {(p, c): t.descriptors(case.request) for p, c, t in here.tables()}
    filled = [pair for pair in sorted(descriptors) if len(descriptors[pair])]
    assume(filled)
    pair = filled[pick % len(filled)]
    descriptors[pair] = changed(descriptors[pair], pick % len(descriptors[pair]), how)
    checkers: list[Checker] = []

    def record(checker: Checker) -> None:
        checkers.append(checker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checker, "first", record)
        kvspec.verify(here.plan, *caches(here), case.request, descriptors)
    for checker in checkers:
        for grid in checker.checked_contents():
            bytes_ = product(range(len(grid.address)), range(grid.size))
            wrong = [at for at in bytes_ if checker.judge(grid, *at) is not None]
            suspects = [
                (int(content), int(byte))
                for content, byte in zip(*checker.suspects(grid), strict=True)
            ]
            assert wrong[:1] == suspects[:1]
            assert set(suspects) <= set(wrong)
            assert {content for content, _ in wrong} == {content for content, _ in suspects}


def foreign_addresses(here: World, rank: kvspec.RankId) -> list[int]:
    """Return a producer rank's addresses outside of the request's own blocks."""
    storage, own = here.producers[rank][1], own_bytes(here, rank)
    addresses = set()
    for name, flat in own.items():
        base = storage[name].ctypes.data
        addresses |= {base + at for at in np.flatnonzero(flat == 0).tolist()} | {base + flat.size}
    return sorted(addresses)


@HALF
@given(CASES, st.integers(0, 2**16))
def test_verify_names_a_dead_byte_that_is_read_from_another_request(
    case: strategies.Case, pick: int
) -> None:
    """The byte lies in another request's block, or after the memory."""
    here = world(case)
    descriptors: Descriptors = {(p, c): t.descriptors(case.request) for p, c, t in here.tables()}
    assume(descriptors)
    source, rank = sorted(descriptors)[pick % len(descriptors)]
    live = {
        here.consumers[rank][1][name].ctypes.data + at
        for name, arrives in here.live(rank)[2].items()
        for at in np.flatnonzero(arrives).tolist()
    }
    dead = sorted(set(sources(here, descriptors)[rank]) - live)
    if not dead:
        return  # The table moves no dead byte.
    foreign = foreign_addresses(here, source)
    row = [foreign[pick % len(foreign)], dead[pick % len(dead)], 1]
    descriptors[source, rank] = np.concatenate(
        [descriptors[source, rank], np.array([row], np.uint64)]
    )
    example = kvspec.verify(here.plan, *caches(here), case.request, descriptors)
    assert example is not None
    assert ("foreign", rank, source) == (example.kind, example.consumer, example.producer)
    assert row[0] == address_of(here, example)


# A short window and blocks of 4 tokens. After 10 tokens, the first block of a table holds nothing
# that is read. A fourth block lies after the last token.
EXPIRED = builders.engine(
    kvspec.SlidingWindowSpec(
        block_size=4, total_num_kv_heads=1, head_size=2, dtype="uint8", sliding_window=4
    )
)


@HALF
@given(CASES | strategies.sharing_cases(), st.integers(0, 2**16))
@example(builders.case(EXPIRED, EXPIRED, request(10, [0, 1, 2], [3, 1, 2, 0])), 0)
@example(builders.case(EXPIRED, EXPIRED, request(10, [0, 1, 2], [3, 1, 2, 0])), 2)
@example(builders.case(EXPIRED, EXPIRED, request(9, [0, 1, 2], [3, 1, 2, 0], cached_tokens=9)), 0)
def test_verify_and_the_oracle_allow_writes_of_the_same_dead_bytes(
    case: strategies.Case, pick: int
) -> None:
    """More copies of all dead bytes are right, and a copy of any other byte is wrong."""
    here = world(case)
    descriptors: Descriptors = {(p, c): t.descriptors(case.request) for p, c, t in here.tables()}
    (source, _), rank = (
        next(iter(here.producers.items())),
        [*here.consumers][pick % len(here.consumers)],
    )
    memory = [
        flat.ctypes.data + at
        for flat in here.producers[source][1].values()
        for at in range(flat.size)
    ]
    own = next(iter(sorted({*memory} - {*foreign_addresses(here, source)})), None)
    assume(own is not None)
    written = sources(here, descriptors)[rank]
    dead, fixed = list[int](), list[int]()
    for name, may in here.right(rank)[1].items():
        start = here.consumers[rank][1][name].ctypes.data
        dead += [start + at for at in np.flatnonzero(may).tolist() if start + at not in written]
        fixed += [start + at for at in np.flatnonzero(may == 0).tolist()]

    def verified(addresses: list[int]) -> kvspec.CounterExample | None:
        rows = [descriptors.get((source, rank), np.empty((0, 3), np.uint64))]
        rows += [np.array([[own, address, 1]], np.uint64) for address in addresses]
        wider = descriptors | {(source, rank): np.concatenate(rows)}
        return kvspec.verify(here.plan, *caches(here), case.request, wider)

    assert None is verified(sorted(set(dead)))
    if fixed:
        assert None is not verified([fixed[pick % len(fixed)]])


# No row is read elsewhere: the byte there may have the right value by chance.
DEAD = ("removed", "doubled", "cut", "written elsewhere", "a dead byte", "a dead byte twice")


@settings(max_examples=max(8, settings.default.max_examples // 4))
@given(CASES | strategies.sharing_cases(), st.sampled_from(DEAD), st.integers(0, 2**16))
@example(builders.case(EXPIRED, EXPIRED, request(10, [0, 1, 2], [3, 1, 2, 0])), "a dead byte", 0)
@example(builders.case(EXPIRED, EXPIRED, request(10, [0, 1, 2], [3, 1, 2, 0])), "a dead byte", 9)
@example(
    builders.case(EXPIRED, EXPIRED, request(10, [0, 1, 2], [3, 1, 2, 0])), "a dead byte twice", 9
)
def test_verify_and_law_1_find_the_same_copies_wrong(
    case: strategies.Case, how: str, pick: int
) -> None:
    """A row of live bytes is changed, or one dead byte is written from anywhere on a producer."""
    here = world(case)
    descriptors: Descriptors = {(p, c): t.descriptors(case.request) for p, c, t in here.tables()}
    assert [] == law_1(here, descriptors)
    pairs = [pair for pair in sorted(descriptors) if how in DEAD[4:] or len(descriptors[pair])]
    assume(pairs)
    pair = pairs[pick % len(pairs)]
    if how in DEAD[4:]:
        written, storages = sources(here, descriptors)[pair[1]], here.consumers[pair[1]][1]
        dead = {
            storages[name].ctypes.data + at
            for name, may in here.right(pair[1])[1].items()
            for at in np.flatnonzero(may).tolist()
        }
        places = sorted(dead - written.keys())
        assume(places)
        flats = [*here.producers[pair[0]][1].values()]
        flat = flats[pick % len(flats)]
        row = [flat.ctypes.data + pick % flat.size, places[pick % len(places)], 1]
        rows = np.array([row] * (1 + ("twice" in how)), np.uint64)
        descriptors[pair] = np.concatenate([descriptors[pair], rows])
    else:
        descriptors[pair] = changed(descriptors[pair], pick % len(descriptors[pair]), how)
    example = kvspec.verify(here.plan, *caches(here), case.request, descriptors)
    assert (example is None) == ([] == law_1(here, descriptors))


def in_one_pool(producer_blocks: list[int], consumer_blocks: list[int], **options: Any) -> Any:
    """Return what `verify` finds of a request between blocks of one pool."""
    side = engine(mla(block_size=4))
    pool = {kvspec.RankId(): kvspec.plan_memory(side, kvspec.RankId(), 4, 4096)}
    asked = request(8, producer_blocks, consumer_blocks)
    return kvspec.verify(kvspec.plan_transfer(side, side), pool, pool, asked, **options)


def test_verify_rejects_a_block_of_one_pool_that_is_read_and_written() -> None:
    """Copies in order would read the second block after it was overwritten."""
    error = refusal(lambda: in_one_pool([0, 1], [1, 2]))
    assert ("consumers[tp0]", "l.latent, block 1") == (error.field, error.value)
    assert None is in_one_pool([0, 1], [2, 3])
    assert None is in_one_pool([0, 1], [1, 2], separate_processes=True)


def convolution(rows: int) -> kvspec.EngineSpec:
    """Return an engine of one short convolution with a state of *rows* rows of one byte."""
    spec = kvspec.MambaSpec.short_conv(conv_dim=1, conv_kernel=rows + 1, dtype="uint8")
    return engine(spec)


def one_block(producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, **more: Any) -> World:
    """Return the world of a request of one block and two tokens."""
    return world(builders.case(producer, consumer, request(2, [0], [0]), **more))


def test_verify_names_the_last_byte_of_a_content_cut_short() -> None:
    """Byte 2 of token 1 is the last byte of the block."""
    latent = engine(mla(block_size=2, head_size=3, dtype="uint8"))
    here = one_block(latent, latent)
    ((p, c, table),) = here.tables()
    descriptors = {(p, c): changed(table.descriptors(here.case.request), 0, "cut")}
    example = kvspec.verify(here.plan, *caches(here), here.case.request, descriptors)
    assert example is not None
    assert ("missing", 1, 2) == (example.kind, example.token, example.byte)


@pytest.mark.parametrize("rows", [(1, 2), (2, 1)])
def test_transfer_of_common_rows_keeps_the_second_row(rows: tuple[int, int]) -> None:
    """One side has one row and the other has two, so only the first row moves."""
    here = one_block(*map(convolution, rows), common_states=True)
    here.execute(described)
    assert [] == here.differences()
    ((before,), (_, after)) = here.before.values(), here.consumers[kvspec.RankId()]
    changes = (before["g"] != after["g"]).tolist()
    assert [True, False][: rows[1]] == changes


@pytest.mark.parametrize("rows", [(1, 2), (2, 1)])
def test_verify_accepts_a_plan_for_common_rows(rows: tuple[int, int]) -> None:
    """A row that only the consumer has is not missing."""
    here = one_block(*map(convolution, rows), common_states=True)
    assert None is kvspec.verify(here.plan, *caches(here), here.case.request)


@pytest.mark.parametrize("rows", [(1, 2), (2, 1)])
def test_traffic_counts_common_rows_once(rows: tuple[int, int]) -> None:
    """One row of one byte moves, whichever side has two rows."""
    here = one_block(*map(convolution, rows), common_states=True)
    assert (1, 1) == attrs.astuple(kvspec.traffic(here.plan, 2).total)
