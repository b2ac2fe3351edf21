"""`verify` says what the oracle says: right of what is right, and of a fault which byte and why."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import attrs
import builders
import numpy as np
import numpy.typing as npt
import pytest
from builders import engine, mla, request
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kvspec
from kvspec.check.checker import Checker
from kvspec.testing import oracle, strategies
from kvspec.testing.carve import count_kernel_blocks, logical_views
from kvspec.testing.positions import rows_of
from kvspec.testing.world import World, described, world

CASES = strategies.cases()
HALF = settings(max_examples=settings.default.max_examples // 2)
Descriptors = dict[tuple[kvspec.RankId, kvspec.RankId], npt.NDArray[np.uint64]]


def caches(here: World) -> tuple[Any, Any]:
    """Return the caches of both sides by rank."""
    ours, theirs = (
        {rank: cache for rank, (cache, _) in side.items()}
        for side in (here.producers, here.consumers)
    )
    return ours, theirs


@HALF
@given(CASES)
def test_verify_accepts_what_the_library_does(case: strategies.Case) -> None:
    """Every byte of every transfer is right, also by the checker that users have."""
    here = world(case)
    for independent in (False, True):
        assert None is kvspec.verify(
            here.plan, *caches(here), case.request, independent=independent
        )


@HALF
@given(strategies.sharing_cases() | strategies.spanning_cases())
def test_verify_accepts_shared_memory_and_spanning_content(case: strategies.Case) -> None:
    """So it is where groups share their memory, and where content spans heads."""
    here = world(case)
    for independent in (False, True):
        assert None is kvspec.verify(
            here.plan, *caches(here), case.request, independent=independent
        )


@HALF
@given(CASES | strategies.sharing_cases())
def test_layer_by_layer_verify_accepts_the_same(case: strategies.Case) -> None:
    """Whatever the library moves, of shared memory too."""
    here = world(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["kvspec.check.verify"], "TOGETHER", 1)
        assert None is kvspec.verify(here.plan, *caches(here), case.request)


@pytest.mark.parametrize("step", [0, 1, -1])
def test_layer_by_layer_verify_finds_what_one_layer_does_to_another(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer's bytes go nowhere, or into the same place of the layer beside it."""
    one = engine(builders.gqa(2), layers=("l.0", "l.1", "l.2"))
    here = world(builders.case(one, one, request(20, [0, 1], [1, 0])))
    right = kvspec.DescriptorTable.descriptors

    def wrong(table: kvspec.DescriptorTable, *asked: Any, **more: Any) -> Any:
        rows = right(table, *asked, **more)
        begins = [table.consumer.region(layer, "k").base for layer in ("l.0", "l.1")]
        here_too = table.layers == frozenset(["l.2" if step < 0 else "l.1"])
        if here_too:
            rows[:, 1] = rows[:, 1].view(np.int64) + step * (begins[1] - begins[0])
        return rows[: len(rows) * (step != 0)] if here_too else rows

    monkeypatch.setattr(sys.modules["kvspec.check.verify"], "TOGETHER", 1)
    monkeypatch.setattr(kvspec.DescriptorTable, "descriptors", wrong)
    found = kvspec.verify(here.plan, *caches(here), here.case.request)
    assert found is not None
    assert ("missing", "l.2" if step < 0 else "l.1") == (found.kind, found.layer)


def changed(rows: npt.NDArray[np.uint64], at: int, how: str) -> npt.NDArray[np.uint64]:
    """Return *rows* with row *at* removed, twice, cut, or read or written a byte further on."""
    if how == "removed":
        return np.delete(rows, at, axis=0)
    if how == "doubled":
        return np.concatenate([rows, rows[at : at + 1]])
    found = rows.copy()
    column, step = {"cut": (2, -1), "read elsewhere": (0, 1), "written elsewhere": (1, 1)}[how]
    found[at, column] = int(found[at, column]) + step
    return found


HOW = ("removed", "doubled", "cut", "read elsewhere", "written elsewhere")
Sources = dict[kvspec.RankId, dict[int, list[tuple[kvspec.RankId, int]]]]


def sources(here: World, made: Descriptors) -> Sources:
    """Return where each byte that a consumer rank is sent comes from, by its address."""
    found: Sources = {rank: {} for rank in here.consumers}
    for (source, rank), rows in made.items():
        for start, place, length in rows.tolist():
            for i in range(length):
                found[rank].setdefault(place + i, []).append((source, start + i))
    return found


def faults(here: World, made: Descriptors, right: Sources) -> set[tuple[kvspec.RankId, int, str]]:
    """Return (rank, address, kind) of every byte that is wrong; live and dead as the oracle says.

    A byte that is read from elsewhere than in *right*, where all bytes are right, is wrong.
    """
    found = set()
    for rank, sent in sources(here, made).items():
        _, may, live = here.live(rank)
        free: set[int] = set()
        for name, flat in here.consumers[rank][1].items():
            base = flat.ctypes.data
            free |= set((base + np.flatnonzero(may[name])).tolist())
            for address in (base + np.flatnonzero(live[name])).tolist():
                free.add(address)
                got = sent.get(address, [])
                if not got:
                    found.add((rank, address, "missing"))
                if len(got) > 1:
                    found.add((rank, address, "double"))
                if got != right[rank][address]:
                    found.add((rank, address, "wrong source"))
        found |= {(rank, address, "unwanted") for address in sent if address not in free}
    return found


def address_of(here: World, found: kvspec.CounterExample) -> int:
    """Return the address of the byte that a counter-example names, looked up by the oracle."""
    case, rank = here.case, found.consumer
    if not found.layer:
        return found.byte
    if found.producer is None:
        engine, storage, pool = case.consumer, here.consumers[rank][1], case.consumer_pool
    else:
        rank, storage = found.producer, here.producers[found.producer][1]
        engine, pool = case.producer, case.producer_pool
    marked = oracle.each_array(storage, np.zeros_like)
    views = logical_views(engine, rank, marked, pool)
    (key,) = (each for each in views if each[1:] == (found.layer, found.part))

    def address(block: int, unit: int, row: int) -> int:
        views[key][[block], [unit], [row], [found.byte]] = 1
        return next(
            storage[name].ctypes.data + int(np.flatnonzero(flat)[0])
            for name, flat in marked.items()
            if flat.any()
        )

    if found.block is not None:
        return address(found.block, found.unit, found.row)
    for rows in rows_of(engine, rank, case.request.consumer_blocks, case.request):
        if rows.key == key:
            named = rows.row == found.row if found.token is None else rows.token == found.token
            (at,) = named.nonzero()[0].tolist()
            unit = rows.units.index(found.unit)
            return address(int(rows.block[at]), unit, int(rows.row[at]))
    raise AssertionError(f"the oracle knows no byte such as {found}")


@given(CASES, st.sampled_from(HOW), st.integers(0, 2**16))
def test_verify_names_a_byte_that_is_wrong(case: strategies.Case, how: str, pick: int) -> None:
    """One row removed, doubled, cut or shifted is found, and the byte named is wrong in that way.

    Unless nothing is wrong: the row held nothing but dead tokens.
    """
    here = world(case)
    made: Descriptors = {(p, c): t.descriptors(case.request) for p, c, t in here.tables()}
    before = sources(here, made)
    filled = [pair for pair in sorted(made) if len(made[pair])]
    assume(filled)
    pair = filled[pick % len(filled)]
    made[pair] = changed(made[pair], pick % len(made[pair]), how)
    wrong = faults(here, made, before)
    found = kvspec.verify(here.plan, *caches(here), case.request, made)
    if found is None:
        assert set() == wrong
    else:
        assert (found.consumer, address_of(here, found), found.kind) in wrong


@given(CASES | strategies.sharing_cases(), st.sampled_from(HOW), st.integers(0, 2**16))
def test_suspects_are_the_bytes_that_the_definition_calls_wrong(
    case: strategies.Case, how: str, pick: int
) -> None:
    """The vectors of the checker select exactly the contents that `judge` finds wrong."""
    here = world(case)
    made: Descriptors = {(p, c): t.descriptors(case.request) for p, c, t in here.tables()}
    filled = [pair for pair in sorted(made) if len(made[pair])]
    assume(filled)
    pair = filled[pick % len(filled)]
    made[pair] = changed(made[pair], pick % len(made[pair]), how)
    checkers: list[Checker] = []

    def record(checker: Checker) -> None:
        checkers.append(checker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checker, "first", record)
        kvspec.verify(here.plan, *caches(here), case.request, made)
    for checker in checkers:
        for grid in checker.grids():
            bytes_ = product(range(len(grid.address)), range(grid.size))
            wrong = [at for at in bytes_ if checker.judge(grid, *at) is not None]
            suspects = [
                (int(content), int(byte))
                for content, byte in zip(*checker.suspects(grid), strict=True)
            ]
            assert wrong[:1] == suspects[:1]
            assert set(suspects) <= set(wrong)
            assert {content for content, _ in wrong} == {content for content, _ in suspects}


def others(here: World, rank: kvspec.RankId) -> list[int]:
    """Return where a producer rank has bytes of no block of the request, and where it has none."""
    case, storage = here.case, here.producers[rank][1]
    own = oracle.each_array(storage, np.zeros_like)
    for (group, *_), view in logical_views(case.producer, rank, own, case.producer_pool).items():
        table = case.request.producer_blocks.get(group)
        kernel_blocks_per_block = count_kernel_blocks(case.producer.group(group))
        for block in () if table is None else table.block_ids.tolist():
            if (
                block != case.producer.null_block
                and 0 <= block < len(view) // kernel_blocks_per_block
            ):
                view[block * kernel_blocks_per_block : (block + 1) * kernel_blocks_per_block] = 1
    found = set()
    for name, flat in own.items():
        base = storage[name].ctypes.data
        found |= {base + at for at in np.flatnonzero(flat == 0).tolist()} | {base + flat.size}
    return sorted(found)


@HALF
@given(CASES, st.integers(0, 2**16))
def test_verify_names_a_byte_that_is_read_of_others(case: strategies.Case, pick: int) -> None:
    """A dead byte that moves along, but from another request's block or from beyond the memory."""
    here = world(case)
    made: Descriptors = {(p, c): t.descriptors(case.request) for p, c, t in here.tables()}
    assume(made)
    source, rank = sorted(made)[pick % len(made)]
    live = {
        here.consumers[rank][1][name].ctypes.data + at
        for name, arrives in here.live(rank)[2].items()
        for at in np.flatnonzero(arrives).tolist()
    }
    dead = sorted(set(sources(here, made)[rank]) - live)
    if not dead:
        return  # nothing moves along
    foreign = others(here, source)
    row = [foreign[pick % len(foreign)], dead[pick % len(dead)], 1]
    made[source, rank] = np.concatenate([made[source, rank], np.array([row], np.uint64)])
    found = kvspec.verify(here.plan, *caches(here), case.request, made)
    assert found is not None
    assert ("foreign", rank, source) == (found.kind, found.consumer, found.producer)
    assert row[0] == address_of(here, found)


def short(rows: int) -> kvspec.EngineSpec:
    """Return an engine of one short convolution whose state has *rows* rows of one byte."""
    spec = kvspec.MambaSpec.short_conv(conv_dim=1, conv_kernel=rows + 1, dtype="uint8")
    return engine(spec)


def one_block(producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, **more: Any) -> World:
    """Return the world of a request of one block and two tokens."""
    return world(builders.case(producer, consumer, request(2, [0], [0]), **more))


def test_verify_names_the_very_byte() -> None:
    """Of a content that is cut short, the byte that is missing is named."""
    latent = engine(mla(block_size=2, head_size=3, dtype="uint8"))
    here = one_block(latent, latent)
    ((p, c, table),) = here.tables()
    made = {(p, c): changed(table.descriptors(here.case.request), 0, "cut")}
    found = kvspec.verify(here.plan, *caches(here), here.case.request, made)
    assert found is not None
    assert ("missing", 1, 2) == (found.kind, found.token, found.byte)


@pytest.mark.parametrize("rows", [(1, 2), (2, 1)])
def test_common_rows_by_hand(rows: tuple[int, int]) -> None:
    """One row and two: the first row moves, the second keeps its byte."""
    here = one_block(*map(short, rows), common_states=True)
    here.execute(described)
    assert [] == here.differences()
    ((before,), (_, after)) = here.before.values(), here.consumers[kvspec.RankId()]
    changes = (before["g"] != after["g"]).tolist()
    assert [True, False][: rows[1]] == changes


@pytest.mark.parametrize("rows", [(1, 2), (2, 1)])
def test_verify_knows_common_rows(rows: tuple[int, int]) -> None:
    """A row that the producer lacks is not missing, where the plan is for common rows."""
    here = one_block(*map(short, rows), common_states=True)
    assert None is kvspec.verify(here.plan, *caches(here), here.case.request)


@pytest.mark.parametrize("rows", [(1, 2), (2, 1)])
def test_traffic_of_common_rows(rows: tuple[int, int]) -> None:
    """One row of one byte moves, whichever side has two."""
    here = one_block(*map(short, rows), common_states=True)
    assert (1, 1) == attrs.astuple(kvspec.traffic(here.plan, 2).total)


@pytest.mark.parametrize("rows", [(1, 2), (2, 1)])
def test_the_reference_copies_common_rows(rows: tuple[int, int]) -> None:
    """The torch reference moves the rows that both sides have."""
    pytest.importorskip("torch")
    from kvspec.check import reference  # noqa: PLC0415 - torch

    here = one_block(*map(short, rows), common_states=True)
    reference.copy(here.plan, here.producers, here.consumers, here.case.request)
    assert [] == here.differences()
