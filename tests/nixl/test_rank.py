"""Test how ranks with real NIXL agents in one process move, merge and reject ids."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvspec
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.memory.rank_cache import Memory
from kvspec.nixl import NixlRank, merging
from kvspec.nixl import agent as nixl_agent
from kvspec.nixl.agent import Prepared
from kvspec.nixl.rank import PROBES
from kvspec.testing.fake_nixl import FakeNixl
from kvspec.testing.posted import counted_posts

os.environ.setdefault("UCX_NET_DEVICES", "lo")
pytest.importorskip("nixl_cu13", reason="needs nixl")

from nixl_pair import SIZE, Pair, memory, table

pytestmark = pytest.mark.nixl


def offsets(rows: list[tuple[int, ...]]) -> list[int]:
    """Return the offset of each id, computed one by one."""
    return [first + k * stride for first, _, stride, count in rows for k in range(count)]


def open_files() -> int:
    """Return the number of open file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def ranks() -> Iterator[Pair]:
    """Return two connected ranks. The first one is polled."""
    with counted_posts() as posted, NixlRank(polled=True) as near, NixlRank() as far:
        yield Pair(near, far, posted)


LOCAL = [(0, 512, 1024, 100), (200_000, 512, 512, 60), (300_000, 64, 64, 16)]
REMOTE = [(4096, 512, 512, 70), (500_000, 512, 4096, 90), (900_000, 64, 640, 16)]
ALL = np.arange(160)  # The ids of 512 bytes. The ids 160 to 175 have 64 bytes.


@pytest.mark.parametrize("operation", ["read", "write"])
def test_move_over_strided_rows_writes_exact_bytes(ranks: Pair, operation: str) -> None:
    """Each pair of ids moves its bytes, and no other byte changes."""
    local, remote = ranks.lists(LOCAL, REMOTE)
    random = np.random.default_rng(5)
    near = np.concatenate([random.permutation(ALL)[:50], [170, 171, 160]])
    far = np.concatenate([random.permutation(ALL)[:50], [165, 166, 175]])
    ranks.local[:] = random.integers(0, 256, SIZE, dtype=np.uint8)
    expected = {"read": ranks.local.copy(), "write": ranks.remote.copy()}[operation]
    for near_id, far_id in zip(near.tolist(), far.tolist(), strict=True):
        size = 512 if near_id < 160 else 64
        here, there = offsets(LOCAL)[near_id], offsets(REMOTE)[far_id]
        if operation == "read":
            expected[here : here + size] = ranks.remote[there : there + size]
        else:
            expected[there : there + size] = ranks.local[here : here + size]
    move = getattr(ranks.near, operation)
    transfer = move(local, near, remote, far, request="r", timeout=10)
    transfer.wait()
    assert ("DONE", 53, 50 * 512 + 3 * 64) == (
        transfer.state,
        transfer.descriptors,
        transfer.nbytes,
    )
    result = ranks.local if operation == "read" else ranks.remote
    assert np.array_equal(expected, result)
    assert (0, ()) == (ranks.near.stats().handles, ranks.near.transfers)


def posted(ranks: Pair, near: np.ndarray, far: np.ndarray, lists: list[Prepared]) -> int:
    """Return the number of descriptors that NIXL posts for a read. `runs` must be equal."""
    transfer = ranks.near.read(lists[0], near, lists[1], far, request="r", timeout=10)
    transfer.wait()
    assert transfer.runs == ranks.posted[transfer]
    return transfer.runs


def test_ids_adjacent_on_both_sides_are_posted_as_one(ranks: Pair) -> None:
    """Ids of a dense row are merged if they are adjacent on both sides, in any order."""
    lists = ranks.lists([(0, 1024, 1024, 512)], [(1024, 1024, 1024, 512)])
    ids = np.arange(512)
    shuffled = np.arange(32)[::-1]
    runs = (shuffled[:, None] * 16 + np.arange(16)).ravel()
    assert posted(ranks, ids, ids, lists) == 1
    assert posted(ranks, runs, ids, lists) == 32
    assert posted(ranks, ids, runs, lists) == 32
    assert posted(ranks, ids[::-1], ids[::-1], lists) == 1
    assert posted(ranks, ids[::-1], ids, lists) == 512


@pytest.mark.parametrize("operation", ["read", "write"])
def test_runs_of_several_rows_are_posted_as_one(
    ranks: Pair, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Runs of different rows are joined if they touch. Exactly the bytes of the ids move."""
    monkeypatch.setattr(merging, "MAX_BYTES", 9 * 512)
    rows = [(0, 512, 512, 64), (0, 64, 64, 512)]  # Whole tiles, and eighths of the same tiles.
    lists = ranks.lists(rows, [(at + 512, *rest) for at, *rest in rows])
    ids = np.array([*range(64 + 8 * 3 - 5, 64 + 8 * 3), *range(3, 20), 40, 41, 30])
    ranks.local[:] = np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)
    expected = {"read": ranks.local.copy(), "write": ranks.remote.copy()}[operation]
    for start, stop in ((3 * 512 - 320, 20 * 512), (40 * 512, 42 * 512), (30 * 512, 31 * 512)):
        there = slice(start + 512, stop + 512)
        if operation == "read":
            expected[start:stop] = ranks.remote[there]
        else:
            expected[there] = ranks.local[start:stop]
    move = getattr(ranks.near, operation)
    transfer = move(lists[0], ids, lists[1], ids, request="r", timeout=10)
    transfer.wait()
    # The first run has 17.6 tiles: one handle moves 9 of them, and one 8.6. The two other runs
    # share a handle.
    assert (4, 4, 3) == (transfer.runs, ranks.posted[transfer], transfer.handles)
    assert len(ids) == transfer.descriptors
    assert 20 * 512 + 320 == transfer.nbytes
    assert np.array_equal(expected, ranks.local if operation == "read" else ranks.remote)


def test_prepare_rejects_row_over_two_adjacent_memories() -> None:
    """Both sides reject such a row. So rows that share bytes are in one memory."""
    array = np.zeros(8192, np.uint8)
    with NixlRank(polled=True) as near, NixlRank() as far:
        for rank in (near, far):
            rank.register([memory(array[:4096]), memory(array[4096:])], owner=array)
        peer = near.connect(far.metadata())
        rows = table(array.ctypes.data, [(0, 512, 512, 16)])
        for owner in (None, peer):
            with pytest.raises(TransferError) as caught:
                near.prepare(rows, peer=owner)
            assert caught.value.state == "not_registered"


def test_ids_of_separate_rows_or_with_gaps_are_not_merged(ranks: Pair) -> None:
    """Rows that only touch stay separate. A caller that wants a merge needs one row."""
    gaps = ranks.lists([(0, 512, 1024, 64)], [(0, 512, 512, 64)])
    assert posted(ranks, np.arange(64), np.arange(64), gaps) == 64
    touching = [(k * 4096, 512, 512, 8) for k in range(8)]
    assert posted(ranks, np.arange(64), np.arange(64), ranks.lists(touching, touching)) == 8


def test_long_transfer_is_divided_between_runs(
    ranks: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each handle keeps its limits. A run is cut only if it is too long for one handle."""
    monkeypatch.setattr(merging, "MAX_DESCRIPTORS", 3)
    monkeypatch.setattr(merging, "MAX_BYTES", 40 * 512)
    lists = ranks.lists([(0, 512, 512, 1000)], [(0, 512, 512, 1000)])
    lengths = [10, 10, 10, 10, 39, 1, 2, 100, 5]
    # The batches are 10 + 10 + 10, 10, 39 + 1, 2, 40, 40, 20, 5.
    ids = np.concatenate([np.arange(n) + 101 * k for k, n in enumerate(lengths)])
    transfer = ranks.near.read(lists[0], ids, lists[1], ids, request="r", timeout=10)
    transfer.wait()
    assert (9, 11, 8) == (transfer.runs, ranks.posted[transfer], transfer.handles)
    for at in ids.tolist():
        here = slice(at * 512, (at + 1) * 512)
        assert np.array_equal(ranks.remote[here], ranks.local[here])
    assert 187 * 512 == transfer.nbytes
    assert not ranks.local[512_000:].any()


def test_poll_posts_batch_after_batch(ranks: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """`poll` never waits. The state is "PROC" until the last batch has ended, and then "DONE"."""
    monkeypatch.setattr(merging, "MAX_DESCRIPTORS", 1)
    lists = ranks.lists([(0, 512, 1024, 100)], [(0, 512, 1024, 100)])
    ids = np.arange(100)
    transfer = ranks.near.read(lists[0], ids, lists[1], ids, request="r", timeout=10)
    assert "READ 'r'" in repr(transfer)
    assert ranks.near.name in repr(ranks.near)
    states = [transfer.state]
    while states[-1] != "DONE":
        states.append(transfer.poll())
        time.sleep(0.0001)
    assert "PROC" == states[0]
    assert 100 == transfer.handles == ranks.posted[transfer]
    assert "DONE" == transfer.poll()


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint64])
def test_ids_of_any_integer_type_are_accepted(ranks: Pair, dtype: type) -> None:
    """Arrays of any width and stride select the same descriptors."""
    lists = ranks.lists([(0, 512, 512, 100)], [(0, 512, 512, 100)])
    ids = np.arange(100).astype(dtype)[::2]
    ranks.near.read(lists[0], ids, lists[1], ids, request="r", timeout=10).wait()
    assert np.array_equal(ranks.remote[1024:1536], ranks.local[1024:1536])
    assert not ranks.local[512:1024].any()


# Each case: the local ids, and the field and the value of the error.
BAD_IDS: dict[str, tuple[Any, str, object]] = {
    "wraps to 1 in 32 bits": (np.array([2**32 + 1]), "local_ids[0]", 2**32 + 1),
    "wraps to 1 in 64 bits": (np.array([2**64 - 1], np.uint64), "local_ids[0]", 2**64 - 1),
    "one too many": (np.array([0, 4]), "local_ids[1]", 4),
    "negative": (np.array([1, 2, -1]), "local_ids[2]", -1),
    "floats": (np.array([1.7]), "local_ids", "float64(1,)"),
    "bools": (np.array([True]), "local_ids", "bool(1,)"),
    "behind a mask": (np.ma.array([1, 9], mask=[False, True]), "local_ids", "MaskedArray"),
    "a square": (np.array([[1]]), "local_ids", "int64(1, 1)"),
    "a list": ([1], "local_ids", "list"),
    "another number": (np.array([0, 1]), "local_ids", 2),
    "twice": (np.array([1, 1]), "local_ids", "runs from 1 and 1"),
    "bytes of the other row": (np.array([0, 3]), "local_ids", "runs from 0 and 3"),
    "another length": (np.array([2]), "local_ids[0]", "2 (64 B)"),
}


@pytest.mark.parametrize("case", BAD_IDS)
def test_wrong_ids_are_refused_before_anything_is_posted(ranks: Pair, case: str) -> None:
    """NIXL would truncate these ids, wrap them, or overwrite bytes in any order."""
    ids, field, value = BAD_IDS[case]
    local, remote = ranks.lists(
        [(0, 512, 512, 2), (8192, 64, 64, 1), (256, 512, 512, 1)], [(0, 512, 512, 9)]
    )
    count = 1 if case == "another number" else len(ids)
    with pytest.raises(SpecError) as caught:
        ranks.near.read(local, ids, remote, np.arange(count), request="r", timeout=1)
    assert (field, value) == (caught.value.field, caught.value.value)
    assert not ranks.local.any()
    assert ranks.near.stats().handles == 0


@pytest.mark.parametrize("pairs", [None, 3, [()], {0: 3}, {0: ()}, {0: "four"}, {0: (1, 2, 3)}])
def test_move_rejects_wrong_pairs(ranks: Pair, pairs: Any) -> None:
    """Each pair needs two lists and their ids."""
    with pytest.raises(SpecError) as caught:
        ranks.near.move(pairs, request="r", timeout=5)
    assert "pairs" == caught.value.field


def test_source_may_be_selected_twice(ranks: Pair) -> None:
    """Only destinations must differ: the remote ids of a write, and the local ids of a read."""
    local, remote = ranks.lists([(0, 512, 512, 4)], [(0, 512, 512, 4)])
    twice, distinct = np.array([1, 1]), np.array([2, 3])
    ranks.near.write(local, twice, remote, distinct, request="w", timeout=5).wait()
    ranks.near.read(local, distinct, remote, twice, request="r", timeout=5).wait()
    with pytest.raises(SpecError) as caught:
        ranks.near.write(local, distinct, remote, twice, request="w", timeout=5)
    assert ("remote_ids", "runs from 1 and 1") == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("rows", [[(0, 512, 512, 4)], []])
def test_transfer_without_ids_is_done_at_once(ranks: Pair, rows: list[tuple[int, ...]]) -> None:
    """An empty transfer needs no handle. Its lists may be empty as well."""
    lists = [
        ranks.near.prepare(table(ranks.local.ctypes.data, rows).reshape(-1, 5)),
        ranks.near.prepare(table(ranks.remote.ctypes.data, rows).reshape(-1, 5), peer=ranks.peer),
    ]
    no_ids = np.array([], np.int32)
    transfer = ranks.near.read(lists[0], no_ids, lists[1], no_ids, request="r", timeout=0)
    assert ("DONE", 0, 0) == (transfer.state, transfer.handles, transfer.nbytes)
    transfer.wait()
    assert transfer.poll() == "DONE"


HIGH = 2**63
BAD_ROWS = {
    "no length": ((8, 0, 0, 8, 1), "length"),
    "no count": ((8, 8, 0, 8, 0), "count"),
    "count of 2**31": ((8, 8, 0, 8, 2**31), "count"),
    "stride under length": ((8, 8, 0, 7, 2), "stride"),
    "device": ((8, 8, 2**31, 8, 1), "device"),
    "end at 2**63": ((HIGH - 8, 8, 0, 8, 1), "2**63"),
    "end wraps at 2**64": ((2**64 - 8, 16, 0, 16, 1), "2**63"),
    "length wraps at 2**64": ((4096, 2**64 - 8, 0, 2**64 - 8, 1), "2**63"),
    "strides wrap at 2**64": ((4096, 8, 0, 2**33, 2**31 - 1), "0x1000"),
    "one stride wraps": ((4096, 8, 0, 2**64 - 4096, 2), "2**63"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
@pytest.mark.parametrize("side", ["local", "remote"])
def test_prepare_rejects_row_with_a_wrong_number(ranks: Pair, case: str, side: str) -> None:
    """The error names the row, for rows of this rank and of a peer."""
    row, word = BAD_ROWS[case]
    good = (ranks.local.ctypes.data, 8, 0, 8, 1)
    with pytest.raises(SpecError, match=re.escape(word)) as caught:
        ranks.near.prepare(
            np.array([good, row], np.uint64), peer=ranks.peer if side == "remote" else None
        )
    assert caught.value.field == "rows[1]"


def test_prepare_rejects_rows_that_are_not_n_by_5_uint64(ranks: Pair) -> None:
    """The rows may have at most 2**31 - 1 ids. The memory type must be known."""
    good = table(ranks.local.ctypes.data, [(0, 8, 8, 1)])
    for bad, value in (
        (good.astype(np.int64), "int64"),
        (good[:, :3], (1, 3)),
        (good[0], (5,)),
        (good.tolist(), "list"),
        (np.array([(8, 1, 0, 1, 2**30)] * 2, np.uint64), "2147483648 ids"),
    ):
        with pytest.raises(SpecError) as caught:
            ranks.near.prepare(bad)
        assert ("rows", value) == (caught.value.field, caught.value.value)
    with pytest.raises(SpecError) as caught:
        ranks.near.prepare(good, "HBM")
    assert ("memory_type", "HBM") == (caught.value.field, caught.value.value)


def test_prepared_rows_are_a_copy(ranks: Pair) -> None:
    """A later change of the array of the caller has no effect."""
    rows = table(ranks.local.ctypes.data, [(0, 512, 512, 4)])
    prepared = ranks.near.prepare(rows)
    rows[:] = 0
    assert 512 == int(prepared.rows.length[0])


ROWS_INSIDE = [(0, 4096, 4096, 1), (4095, 1, 1, 1), (0, 1024, 1024, 4), (4096, 1024, 1024, 4)]
ROWS_OUTSIDE = [
    (0, 4097, 4097, 1), (-1, 4096, 4096, 1), (-1, 4097, 4097, 1), (4095, 2, 2, 1), (-1, 1, 1, 1),
    (8192, 1, 1, 1),
    # Two memories touch, and no row has ids in both.
    (0, 1024, 1024, 5), (0, 1024, 1024, 8), (0, 1024, 4096, 2),
    # The first and the last id lie in two memories, and the gap between them in none.
    (4096, 1024, 8192, 2),
]  # fmt: skip


@pytest.mark.parametrize("bindings", [contextlib.nullcontext, FakeNixl], ids=["nixl", "fake"])
def test_row_lies_whole_in_one_registered_memory(bindings: Callable[[], Any]) -> None:
    """A row may begin at the first byte of a memory and end at its last byte."""
    array = np.zeros(20_480, np.uint8)
    base = array.ctypes.data + 4096
    with bindings(), NixlRank(polled=True) as near, NixlRank() as far:
        for rank in (near, far):
            rank.register([Memory(base + at, 4096) for at in (0, 4096, 12288)], array)
        for peer in (None, near.connect(far.metadata())):
            near.prepare(table(base, ROWS_INSIDE), peer=peer)
            lists = near.stats().lists
            for row in ROWS_OUTSIDE:
                with pytest.raises(TransferError) as caught:
                    near.prepare(table(base, [(0, 8, 8, 1), row, (-9, 1, 1, 1)]), peer=peer)
                assert ("not_registered", peer or near.name) == (
                    caught.value.state,
                    caught.value.rank,
                )
                # The message has the number and the address of the first row that is refused.
                for fact in ("rows[1]", f"{base + row[0]:#x}"):
                    assert fact in caught.value.message
            assert lists == near.stats().lists


@pytest.mark.parametrize(
    "row", [(-8, 16, 16, 1), (SIZE - 8, 16, 16, 1), (0, 8, SIZE, 2)], ids=["before", "past", "last"]
)
def test_rows_outside_registered_memory_are_refused(ranks: Pair, row: tuple[int, ...]) -> None:
    """The error names the row. NIXL itself checks the rows of this rank and of a peer."""
    for array, peer in ((ranks.local, None), (ranks.remote, ranks.peer)):
        base = array.ctypes.data
        with pytest.raises(TransferError, match="NotFound") as caught:
            ranks.near.prepare(table(base, [(0, 8, 8, 1), row]), peer=peer)
        error = caught.value
        assert ("not_registered", peer or ranks.near.name) == (error.state, error.rank)
        # The message has the number and the address of the row.
        for fact in ("rows[1]", f"{base + row[0]:#x}"):
            assert fact in error.message
    with pytest.raises(TransferError, match="VRAM") as caught:
        ranks.near.prepare(table(ranks.local.ctypes.data, [(0, 8, 8, 1)]), "VRAM")
    assert caught.value.state == "not_registered"


def test_register_covers_each_byte_once() -> None:
    """A memory may repeat or contain another one. Any other overlap is refused."""
    array = np.zeros(8192, np.uint8)
    at = array.ctypes.data
    with NixlRank(polled=True) as rank:
        rank.register([Memory(at + 64, 64), Memory(at, 4096), Memory(at, 4096)], array)
        rank.register([memory(array[:4096]), Memory(at + 4000, 96)])
        assert [4096, PROBES] == sorted(
            (held.end - held.address for held in rank.memory), reverse=True
        )
        rank.register([Memory(at + 4096, 64)])
        # The third memory contains the probe that peers read to connect.
        assert 3 == len(rank.memory) == rank.stats().registrations
        for start, length in ((4000, 97), (0, 8192), (-8, 16), (4100, 64)):
            with pytest.raises(SpecError, match="overlap") as caught:
                rank.register([Memory(at + start, length)])
            # The error names the new memory, wherever the registered one begins.
            assert "memories[0]" == caught.value.field
            assert f"[{at + start:#x}, " in caught.value.value
        with pytest.raises(SpecError, match="overlap") as caught:
            rank.register([Memory(at + 5000, 8), Memory(at + 6004, 8), Memory(at + 6000, 8)])
        assert "memories[1]" == caught.value.field
        assert 3 == len(rank.memory)


@pytest.mark.parametrize(
    ("bad", "field", "value"),
    [
        ((0, 8), "memories[0].address", 0),
        ((8, 0), "memories[0].length", 0),
        ((2**63 - 8, 8), "length", 8),
        ((8, np.True_), "length", np.True_),
        ((8, 8, "HBM"), "memory_type", "HBM"),
        ((8, 8, "DRAM", -1), "device", -1),
        ((8, 8, "VRAM", 2**31), "memories[0].device", 2**31),
    ],
)
def test_register_rejects_impossible_memory(
    ranks: Pair, bad: tuple[Any, ...], field: str, value: object
) -> None:
    """Addresses, lengths, types and devices are checked before NIXL receives them."""
    with pytest.raises(SpecError) as caught:
        ranks.near.register([Memory(*bad)])
    assert (field, value) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("wrong", [None, 3, Memory(4096, 4096)])
def test_register_rejects_a_single_memory(ranks: Pair, wrong: Any) -> None:
    """The argument must be a sequence of memories."""
    with pytest.raises(SpecError) as caught:
        ranks.near.register(wrong)
    assert ("memories", wrong) == (caught.value.field, caught.value.value)


def test_register_rejects_other_types(ranks: Pair) -> None:
    """Each item must be a `Memory`."""
    with pytest.raises(SpecError) as caught:
        ranks.near.register([(8, 8)])
    assert ("memories[0]", (8, 8)) == (caught.value.field, caught.value.value)


def test_owner_of_memory_lives_until_the_rank_is_closed() -> None:
    """Registered bytes are freed only after NIXL has released them."""

    class Storage:
        bytes = np.zeros(64, np.uint8)

    owner = Storage()
    alive = weakref.ref(owner)
    with NixlRank(polled=True) as rank:
        rank.register([memory(owner.bytes)], owner)
        del owner
        gc.collect()
        assert alive() is not None
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("wrong", ["type", "overlap", "refused"])
def test_register_keeps_no_owner_of_memory_that_it_refuses(net: FakeNixl, wrong: str) -> None:
    """A caller that tries again would otherwise add an owner each time."""

    class Storage:
        bytes = np.zeros(64, np.uint8)

    owner = Storage()
    alive = weakref.ref(owner)
    with NixlRank(secret=b"") as rank:
        rank.register([memory(owner.bytes[:32])])
        more: Any = {"type": 3, "overlap": memory(owner.bytes[16:48])}.get(wrong)
        if wrong == "refused":
            more = memory(owner.bytes[32:])
            rank._agent._native.registerMem = refusing(net)
        with pytest.raises((SpecError, TransferError)):
            rank.register([more], owner)
        del owner
        gc.collect()
        assert alive() is None


def refusing(net: FakeNixl) -> Callable[..., None]:
    """Return a function that raises an error of NIXL."""

    def refuse(*_: object) -> None:
        raise net.error("Backend")

    return refuse


def test_second_connect_adds_memory_that_was_registered_later(ranks: Pair) -> None:
    """The newer metadata of a peer makes its newer memory reachable."""
    more = np.ones(4096, np.uint8)
    ranks.far.register([memory(more)], more)
    rows = table(more.ctypes.data, [(0, 4096, 4096, 1)])
    with pytest.raises(TransferError, match="NotFound"):
        ranks.near.prepare(rows, peer=ranks.peer)
    assert ranks.peer == ranks.near.connect(ranks.far.metadata())
    remote = ranks.near.prepare(rows, peer=ranks.peer)
    local = ranks.near.prepare(table(ranks.local.ctypes.data, [(0, 4096, 4096, 1)]))
    ids = np.array([0])
    ranks.near.read(local, ids, remote, ids, request="r", timeout=5).wait()
    assert ranks.local[:4096].all()


def test_rank_does_not_connect_to_itself(ranks: Pair) -> None:
    """The metadata of the rank itself is refused."""
    with pytest.raises(TransferError, match="own") as caught:
        ranks.near.connect(ranks.near.metadata())
    assert caught.value.state == "stale_peer"


def test_second_live_rank_of_a_name_is_refused_by_its_peers() -> None:
    """Its peers stay connected to the first one, and to the second one after a `disconnect`."""
    with NixlRank("one") as first, NixlRank("one") as second, NixlRank() as peer:
        assert "one" == peer.connect(first.metadata())
        with pytest.raises(TransferError) as caught:
            peer.connect(second.metadata())
        assert ("stale_peer", "one") == (caught.value.state, caught.value.rank)
        with pytest.raises(TransferError, match="own") as caught:
            first.connect(second.metadata())
        assert "stale_peer" == caught.value.state
        assert ("one",) == peer.peers
        peer.disconnect("one")
        assert "one" == peer.connect(second.metadata())


def test_wrong_arguments_of_a_rank_are_refused() -> None:
    """The default name begins with the prefix."""
    with NixlRank(prefix="p-", polled=True) as rank:
        assert rank.name.startswith("p-")
    for bad, field, word in (
        ({"name": ""}, "name", "255"),
        ({"name": "x" * 256}, "name", "255"),
        ({"prefix": "y" * 256}, "name", "255"),
        ({"name": "\ud800"}, "name", "255"),
        ({"name": 7}, "name", "text"),
        ({"name": "x", "prefix": "y"}, "name", "prefix"),
        ({"prefix": 3}, "prefix", "str"),
        ({"polled": 1}, "polled", "True"),
    ):
        with pytest.raises(SpecError, match=word) as caught:
            NixlRank(**bad)
        assert field == caught.value.field


def test_disconnect_releases_the_lists_of_the_peer(ranks: Pair) -> None:
    """Lists that are prepared after a new connection move bytes again."""
    ids = np.arange(4)
    local, remote = ranks.lists([(0, 512, 512, 4)], [(0, 512, 512, 4)])
    ranks.near.disconnect(ranks.peer)
    with pytest.raises(TransferError, match="released") as caught:
        ranks.near.read(local, ids, remote, ids, request="r", timeout=1)
    assert caught.value.state == "closed"
    for use in (
        lambda: ranks.near.disconnect(ranks.peer),
        lambda: ranks.near.prepare(table(8, [(0, 8, 8, 1)]), peer=ranks.peer),
    ):
        with pytest.raises(TransferError, match="connected") as caught:
            use()
        assert caught.value.state == "stale_peer"
    ranks.near.connect(ranks.far.metadata())
    local, remote = ranks.lists([(0, 512, 512, 4)], [(0, 512, 512, 4)])
    ranks.near.read(local, ids, remote, ids, request="r", timeout=5).wait()
    assert np.array_equal(ranks.remote[:2048], ranks.local[:2048])


def test_read_rejects_lists_of_another_side_or_rank(ranks: Pair) -> None:
    """Values that are not prepared lists are rejected as well."""
    ids = np.arange(4)
    local, remote = ranks.lists([(0, 512, 512, 4)], [(0, 512, 512, 4)])
    foreign = ranks.far.prepare(table(ranks.remote.ctypes.data, [(0, 512, 512, 4)]))
    for sides, field in (
        ((remote, local), "local"),
        ((local, local), "remote"),
        ((local, None), "remote"),
        ((foreign, remote), "local"),
    ):
        with pytest.raises(SpecError) as caught:
            ranks.near.read(sides[0], ids, sides[1], ids, request="r", timeout=1)
        assert field == caught.value.field


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), True, "1", None])
def test_timeout_must_be_a_finite_number(ranks: Pair, timeout: object) -> None:
    """Each wait ends."""
    ids = np.arange(4)
    local, remote = ranks.lists([(0, 512, 512, 4)], [(0, 512, 512, 4)])
    for call, field in (
        (lambda: ranks.near.read(local, ids, remote, ids, request="r", timeout=timeout), "timeout"),
        (lambda: ranks.near.read(local, ids, remote, ids, request=7, timeout=1), "request"),
        (lambda: ranks.near.connect(ranks.far.metadata(), timeout), "timeout"),
        (lambda: ranks.near.close(timeout), "drain"),
    ):
        with pytest.raises(SpecError) as caught:
            call()
        assert field == caught.value.field


def test_late_transfer_posts_no_further_batch(ranks: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its deadline a transfer fails, although the next batch would be quick."""
    monkeypatch.setattr(merging, "MAX_DESCRIPTORS", 1)
    ids = np.arange(100)
    lists = ranks.lists([(0, 512, 1024, 100)], [(0, 512, 1024, 100)])
    transfer = ranks.near.read(lists[0], ids, lists[1], ids, request="late", timeout=0)
    with pytest.raises(TransferError, match="100 batches") as caught:
        transfer.wait()
    assert ("late", "overdue") == (caught.value.request, caught.value.state)
    assert not ranks.local[-1024 * 50 :].any()


def test_closed_rank_raises_closed_in_every_method(
    ranks: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second `close` does nothing."""
    monkeypatch.setattr(merging, "MAX_DESCRIPTORS", 1)
    ids = np.arange(100)
    local, remote = ranks.lists([(0, 512, 1024, 100)], [(0, 512, 1024, 100)])
    rank = ranks.near
    going = rank.read(local, ids, remote, ids, request="going", timeout=5)
    assert going.state == "PROC"
    rank.close()
    for use in (
        rank.metadata,
        rank.tick,
        going.poll,
        going.wait,
        local.release,
        lambda: rank.register([memory(ranks.local)]),
        lambda: rank.connect(ranks.far.metadata()),
        lambda: rank.disconnect(ranks.peer),
        lambda: rank.prepare(table(8, [(0, 8, 8, 1)])),
        lambda: rank.read(local, ids, remote, ids, request="r", timeout=1),
    ):
        with pytest.raises(TransferError, match="closed") as caught:
            use()
        assert caught.value.state == "closed"
    assert ("closed", 0, ()) == (going.state, rank.stats().handles, rank.transfers)
    rank.close()


def test_transfers_release_handles_and_file_descriptors(ranks: Pair) -> None:
    """Twenty transfers do not change the number of handles and of open files."""
    ids = np.arange(160)
    lists = ranks.lists(LOCAL, REMOTE)
    for turn in range(22):
        if turn == 2:
            before = open_files()
        ranks.near.read(lists[0], ids, lists[1], ids, request="r", timeout=5).wait()
    assert before == open_files()
    assert (0, 0) == (ranks.near.stats().handles, ranks.near.stats().transfers)


def test_close_releases_all_file_descriptors() -> None:
    """The second and the third pair of ranks leave equal numbers of open files."""
    counts = []
    for _ in range(3):
        with NixlRank(polled=True) as near, NixlRank() as far:
            Pair(near, far)
        counts.append(open_files())
    assert counts[1] == counts[2]


def test_idle_rank_uses_little_processor_time() -> None:
    """The progress thread uses less than half a core."""
    with NixlRank():
        time.sleep(0.1)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.25


def test_threads_use_one_rank_together(ranks: Pair) -> None:
    """Four threads read, register and connect at the same time without errors or wrong bytes."""
    lists = ranks.lists([(0, 512, 512, 1600)], [(0, 512, 512, 1600)])
    failures: list[BaseException] = []

    def run(thread: int) -> None:
        try:
            ids = np.arange(400) + 400 * thread
            for _ in range(10):
                move = ranks.near.read(lists[0], ids, lists[1], ids, request="r", timeout=20)
                extra = np.zeros(64, np.uint8)
                ranks.near.register([memory(extra)], extra)
                ranks.near.connect(ranks.far.metadata())
                move.wait()
        except BaseException as error:  # noqa: BLE001 - the test checks all errors
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert np.array_equal(ranks.remote[: 1600 * 512], ranks.local[: 1600 * 512])


def test_every_exception_of_nixl_has_a_state() -> None:
    """The table contains each exception of NIXL, except those that only a bug can raise."""
    kinds = {*nixl_agent.STATE_OF_KIND.values(), *nixl_agent.STATE_OF_PURPOSE.values()}
    assert kinds <= set(TransferState)
    nb = nixl_agent.bindings()
    exceptions = {
        nixl_agent.kind_of(kind()) for name, kind in vars(nb).items() if name.endswith("Error")
    }
    bugs = {"InvalidParam", "Mismatch", "RepostActive", "NotPosted", "NotAllowed", "NotSupported"}
    assert exceptions == {*nixl_agent.STATE_OF_KIND, *bugs, "NoTelemetry"}


def test_package_of_nixl_is_chosen_by_environment_and_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order is `KVSPEC_NIXL_PACKAGE`, a loaded package, the CUDA of torch, the newest."""
    monkeypatch.delenv("KVSPEC_NIXL_PACKAGE", raising=False)
    assert nixl_agent.package_names() == ("nixl_cu13",)  # Other tests have loaded it.
    for name in nixl_agent.PACKAGES:
        monkeypatch.delitem(sys.modules, f"{name}._bindings", raising=False)
    for cuda, names in (("12.8", ("nixl_cu12",)), (None, ("nixl_cu13", "nixl_cu12"))):
        version = type("version", (), {"cuda": cuda})
        monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"version": version}))
        assert names == nixl_agent.package_names()
    monkeypatch.setenv("KVSPEC_NIXL_PACKAGE", "nixl_nowhere")
    with pytest.raises(TransferError, match="nixl_nowhere") as caught:
        NixlRank("never made")
    assert caught.value.state == "unavailable"
    monkeypatch.delenv("KVSPEC_NIXL_PACKAGE")


def test_nixl_is_imported_by_the_first_rank_and_torch_never() -> None:
    """Importing `kvspec.nixl` loads no bindings. Creating a rank loads NIXL, but not torch."""
    code = (
        "import sys, kvspec.nixl as n\n"
        "loaded = lambda: sorted({'nixl', 'nixl_cu13', 'torch'} & set(sys.modules))\n"
        "first = loaded(); n.NixlRank(polled=True).close(); print(first, loaded())"
    )
    done = subprocess.run(  # noqa: S603 - our own interpreter and code
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(kvspec.__file__).parents[1])},
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.endswith("[] ['nixl_cu13']\n")
