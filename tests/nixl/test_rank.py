"""Test ranks with real NIXL agents in one process: moving, merging and refusing."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvspec
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.memory.rank_cache import Memory
from kvspec.nixl import NixlRank, merging
from kvspec.nixl import agent as nixl_agent
from kvspec.nixl.memory import check_inside
from kvspec.nixl.peers import HELLO
from kvspec.nixl.rank import PROBES
from kvspec.nixl.rows import checked_rows
from kvspec.nixl.transfer_spec import Prepared

os.environ.setdefault("UCX_NET_DEVICES", "lo")
pytest.importorskip("nixl_cu13", reason="needs nixl")

from nixl_pair import SIZE, Pair, memory, table

pytestmark = pytest.mark.nixl


def offsets(rows: list[tuple[int, ...]]) -> list[int]:
    """Return the offset of each id, counted one by one."""
    return [at + k * stride for at, _, stride, count in rows for k in range(count)]


def open_files() -> int:
    """Return how many file descriptors this process holds."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def ranks() -> Iterator[Pair]:
    """Two connected ranks; the first is polled and has telemetry."""
    with NixlRank(polled=True, telemetry=True) as near, NixlRank() as far:
        yield Pair(near, far)


LOCAL = [(0, 512, 1024, 100), (200_000, 512, 512, 60), (300_000, 64, 64, 16)]
REMOTE = [(4096, 512, 512, 70), (500_000, 512, 4096, 90), (900_000, 64, 640, 16)]
ALL = np.arange(160)  # the ids of 512 bytes; 160 to 176 are of 64


@pytest.mark.parametrize("strided", [True, False], ids=["Nx5", "Nx3"])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_exact_bytes_move_over_strided_rows(ranks: Pair, operation: str, *, strided: bool) -> None:
    """Each pair of ids moves its bytes, no other byte changes; also without strided lists."""
    ranks.near._agent.strided = strided
    local, remote = ranks.lists(LOCAL, REMOTE)
    random = np.random.default_rng(5)
    near = np.concatenate([random.permutation(ALL)[:50], [170, 171, 160]])
    far = np.concatenate([random.permutation(ALL)[:50], [165, 166, 175]])
    ranks.local[:] = random.integers(0, 256, SIZE, dtype=np.uint8)
    wanted = {"read": ranks.local.copy(), "write": ranks.remote.copy()}[operation]
    for one, other in zip(near.tolist(), far.tolist(), strict=True):
        size = 512 if one < 160 else 64
        here, there = offsets(LOCAL)[one], offsets(REMOTE)[other]
        if operation == "read":
            wanted[here : here + size] = ranks.remote[there : there + size]
        else:
            wanted[there : there + size] = ranks.local[here : here + size]
    move = getattr(ranks.near, operation)
    transfer = move(local, near, remote, far, request="r", timeout=10)
    transfer.wait()
    assert ("DONE", 53, 50 * 512 + 3 * 64) == (
        transfer.state,
        transfer.descriptors,
        transfer.nbytes,
    )
    result = ranks.local if operation == "read" else ranks.remote
    assert np.array_equal(wanted, result)
    assert (0, ()) == (ranks.near.stats().handles, ranks.near.transfers)


def received(rank: NixlRank, count: int) -> list[tuple[str, bytes]]:
    """Return the next *count* notifications of *rank*, which arrive within 20 s."""
    found: list[tuple[str, bytes]] = []
    end = time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < end
        found += rank.notifications()
    return found


def posted(ranks: Pair, near: np.ndarray, far: np.ndarray, lists: list[Prepared]) -> int:
    """Return how many descriptors NIXL posts for a read, which must equal `runs`."""
    transfer = ranks.near.read(lists[0], near, lists[1], far, request="r", timeout=10)
    transfer.wait()
    assert transfer.runs == transfer.posted
    return transfer.runs


def test_ids_adjacent_on_both_sides_are_posted_as_one(ranks: Pair) -> None:
    """Ids are merged within dense rows, on both sides at once, whatever their order."""
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
    """Rows that share memory are joined where their runs touch; the bytes are right, none else."""
    monkeypatch.setattr(merging, "MAX_BYTES", 9 * 512)
    rows = [(0, 512, 512, 64), (0, 64, 64, 512)]  # whole tiles, and their eighths
    lists = ranks.lists(rows, [(at + 512, *rest) for at, *rest in rows])
    ids = np.array([*range(64 + 8 * 3 - 5, 64 + 8 * 3), *range(3, 20), 40, 41, 30])
    ranks.local[:] = np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)
    wanted = {"read": ranks.local.copy(), "write": ranks.remote.copy()}[operation]
    for start, stop in ((3 * 512 - 320, 20 * 512), (40 * 512, 42 * 512), (30 * 512, 31 * 512)):
        there = slice(start + 512, stop + 512)
        if operation == "read":
            wanted[start:stop] = ranks.remote[there]
        else:
            wanted[there] = ranks.local[start:stop]
    move = getattr(ranks.near, operation)
    transfer = move(lists[0], ids, lists[1], ids, request="r", timeout=10)
    transfer.wait()
    # 17.6 tiles as 9 and 8.6 of them, each a handle; then two runs in one handle.
    assert (4, 4, 3) == (transfer.runs, transfer.posted, transfer.handles)
    assert len(ids) == transfer.descriptors
    assert 20 * 512 + 320 == transfer.nbytes
    assert np.array_equal(wanted, ranks.local if operation == "read" else ranks.remote)


def test_a_row_lies_in_one_registered_memory() -> None:
    """Neither side takes a row over two memories that touch: so rows that share bytes share one."""
    array = np.zeros(8192, np.uint8)
    with NixlRank(polled=True) as near, NixlRank() as far:
        for rank in (near, far):
            rank.register([memory(array[:4096]), memory(array[4096:])], owner=array)
        peer = near.connect(far.metadata())
        over = table(array.ctypes.data, [(0, 512, 512, 16)])
        for who in (None, peer):
            with pytest.raises(TransferError) as caught:
                near.prepare(over, peer=who)
            assert caught.value.state == "not_registered"


def test_neither_gaps_nor_rows_are_merged_over(ranks: Pair) -> None:
    """Rows that touch stay apart, so one row should hold whatever is to be merged."""
    gaps = ranks.lists([(0, 512, 1024, 64)], [(0, 512, 512, 64)])
    assert posted(ranks, np.arange(64), np.arange(64), gaps) == 64
    touching = [(k * 4096, 512, 512, 8) for k in range(8)]
    assert posted(ranks, np.arange(64), np.arange(64), ranks.lists(touching, touching)) == 8


def test_long_transfers_are_cut_between_runs(ranks: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """No handle passes the bounds, no run is cut unless it alone is too long, nothing is lost."""
    monkeypatch.setattr(merging, "MAX_DESCRIPTORS", 3)
    monkeypatch.setattr(merging, "MAX_BYTES", 40 * 512)
    lists = ranks.lists([(0, 512, 512, 1000)], [(0, 512, 512, 1000)])
    lengths = [10, 10, 10, 10, 39, 1, 2, 100, 5]  # batches: 10+10+10, 10, 39+1, 2, 40, 40, 20, 5
    ids = np.concatenate([np.arange(n) + 101 * k for k, n in enumerate(lengths)])
    transfer = ranks.near.read(lists[0], ids, lists[1], ids, request="r", timeout=10)
    transfer.wait()
    assert (9, 11, 8) == (transfer.runs, transfer.posted, transfer.handles)
    for at in ids.tolist():
        here = slice(at * 512, (at + 1) * 512)
        assert np.array_equal(ranks.remote[here], ranks.local[here])
    assert 187 * 512 == transfer.nbytes
    assert not ranks.local[512_000:].any()


def test_poll_posts_batch_after_batch(ranks: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """`poll` never waits: a long transfer is "PROC" in between and "DONE" at the end."""
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
    assert 100 == transfer.handles == transfer.posted
    assert "DONE" == transfer.poll()


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint64])
def test_ids_may_be_any_integers(ranks: Pair, dtype: type) -> None:
    """Integer arrays of any width, also with strides of their own, name the same descriptors."""
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
    "behind a mask": (np.ma.array([1, 9], mask=[False, True]), "local_ids", "int64(2,)"),
    "a square": (np.array([[1]]), "local_ids", "int64(1, 1)"),
    "a list": ([1], "local_ids", "list"),
    "another number": (np.array([0, 1]), "local_ids", 2),
    "twice": (np.array([1, 1]), "local_ids", "runs from 1 and 1"),
    "the other row's bytes": (np.array([0, 3]), "local_ids", "runs from 0 and 3"),
    "another length": (np.array([2]), "local_ids[0]", "2 (64 B)"),
}


@pytest.mark.parametrize("case", BAD_IDS)
def test_bad_ids_are_refused_before_anything_is_posted(ranks: Pair, case: str) -> None:
    """What nixl would truncate, wrap or overwrite in any order is a `SpecError` with the value."""
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


@pytest.mark.parametrize("operation", ["read", "Write", "COPY", "", None, 3])
def test_move_rejects_unknown_operations(ranks: Pair, operation: Any) -> None:
    """By name: it is not guessed which way the bytes shall go."""
    sides = ranks.lists([(0, 512, 512, 4)], [(0, 512, 512, 4)])
    local, remote = ranks.local.copy(), ranks.remote.copy()
    pair = sides[0], np.arange(4), sides[1], np.arange(4)
    for pairs in ([pair], []):
        with pytest.raises(SpecError) as caught:
            ranks.near.move(operation, pairs, request="r", timeout=5)
        assert ("operation", operation) == (caught.value.field, caught.value.value)
    assert (local.tobytes(), remote.tobytes()) == (ranks.local.tobytes(), ranks.remote.tobytes())


@pytest.mark.parametrize("pairs", [None, 3, [3], [()], ["four"], [(1, 2, 3)]])
def test_move_rejects_wrong_pairs(ranks: Pair, pairs: Any) -> None:
    """Of each, all four."""
    with pytest.raises(SpecError) as caught:
        ranks.near.move("READ", pairs, request="r", timeout=5)
    assert "pairs" == caught.value.field


def test_a_source_may_be_named_twice(ranks: Pair) -> None:
    """Only destinations must differ: the remote side of a write, the local side of a read."""
    local, remote = ranks.lists([(0, 512, 512, 4)], [(0, 512, 512, 4)])
    one, other = np.array([1, 1]), np.array([2, 3])
    ranks.near.write(local, one, remote, other, request="w", timeout=5).wait()
    ranks.near.read(local, other, remote, one, request="r", timeout=5).wait()
    with pytest.raises(SpecError) as caught:
        ranks.near.write(local, other, remote, one, request="w", timeout=5)
    assert ("remote_ids", "runs from 1 and 1") == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("rows", [[(0, 512, 512, 4)], []])
def test_no_ids_are_done_at_once(ranks: Pair, rows: list[tuple[int, ...]]) -> None:
    """An empty transfer, even over empty lists, is complete without a handle."""
    lists = [
        ranks.near.prepare(table(ranks.local.ctypes.data, rows).reshape(-1, 5)),
        ranks.near.prepare(table(ranks.remote.ctypes.data, rows).reshape(-1, 5), peer=ranks.peer),
    ]
    none = np.array([], np.int32)
    transfer = ranks.near.read(lists[0], none, lists[1], none, request="r", timeout=0)
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
def test_bad_rows_are_refused_by_name(ranks: Pair, case: str, side: str) -> None:
    """Each wrong number of a row is found on either side, wherever the row stands."""
    row, word = BAD_ROWS[case]
    good = (ranks.local.ctypes.data, 8, 0, 8, 1)
    with pytest.raises(SpecError, match=re.escape(word)) as caught:
        ranks.near.prepare(
            np.array([good, row], np.uint64), peer=ranks.peer if side == "remote" else None
        )
    assert caught.value.field == "rows[1]"


def test_prepare_rejects_rows_that_are_not_n_by_5_uint64(ranks: Pair) -> None:
    """Other dtypes, shapes and types, unknown memory types and 2**31 ids are refused."""
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


def test_prepared_rows_do_not_follow_the_callers_array(ranks: Pair) -> None:
    """Rows are copied: changing them afterwards changes nothing."""
    rows = table(ranks.local.ctypes.data, [(0, 512, 512, 4)])
    prepared = ranks.near.prepare(rows)
    rows[:] = 0
    assert 512 == int(prepared.rows.length[0])


def test_the_nearest_memory_is_the_one_with_the_smallest_gap() -> None:
    """A row that begins in one memory and ends outside it, just before another begins."""
    rows = checked_rows(np.array([(0x1FF8, 16, 0, 16, 1)], np.uint64))
    memories = [Memory(0x1000, 0x1000), Memory(0x2010, 0x1000)]
    with pytest.raises(TransferError, match=r"\[0x1000, 0x2000\)"):
        check_inside(rows, "DRAM", memories[::-1])


@pytest.mark.parametrize(
    ("address", "length", "inside"),
    [
        (0x1000, 0x1000, True), (0x1000, 0x1001, False), (0x0FFF, 0x1000, False),
        (0x0FFF, 0x1001, False), (0x1FFF, 1, True), (0x1FFF, 2, False), (0x2000, 1, False),
    ],
)  # fmt: skip
def test_row_one_byte_beyond_a_memory_is_refused(address: int, length: int, inside: bool) -> None:
    """The first and the last byte of a registered memory are its border."""
    rows = checked_rows(np.array([(address, length, 0, length, 1)], np.uint64))
    if inside:
        check_inside(rows, "DRAM", [Memory(0x1000, 0x1000)])
        return
    with pytest.raises(TransferError) as caught:
        check_inside(rows, "DRAM", [Memory(0x1000, 0x1000)])
    assert "not_registered" == caught.value.state


@pytest.mark.parametrize(
    "row", [(-8, 16, 16, 1), (SIZE - 8, 16, 16, 1), (0, 8, SIZE, 2)], ids=["before", "past", "last"]
)
def test_rows_outside_registered_memory_are_refused(ranks: Pair, row: tuple[int, ...]) -> None:
    """Of this rank's rows the row and the nearest region are named, of a peer's what to do."""
    base = ranks.local.ctypes.data
    with pytest.raises(TransferError) as caught:
        ranks.near.prepare(table(base, [(0, 8, 8, 1), row]))
    assert caught.value.state == "not_registered"
    # The message has the number and the address of the row, and the nearest registered memory.
    for fact in ("rows[1]", f"{base + row[0]:#x}", f"[{base:#x}"):
        assert fact in caught.value.message
    with pytest.raises(TransferError, match="NotFound") as caught:
        ranks.near.prepare(table(ranks.remote.ctypes.data, [row]), peer=ranks.peer)
    assert ("not_registered", ranks.peer) == (caught.value.state, caught.value.rank)
    with pytest.raises(TransferError, match="VRAM") as caught:
        ranks.near.prepare(table(base, [(0, 8, 8, 1)]), "VRAM")
    assert caught.value.state == "not_registered"


def test_each_byte_is_registered_once() -> None:
    """Repeated and contained memories are covered; any other overlap is refused with both."""
    array = np.zeros(8192, np.uint8)
    at = array.ctypes.data
    with NixlRank(polled=True) as rank:
        rank.register([Memory(at + 64, 64), Memory(at, 4096), Memory(at, 4096)], array)
        rank.register([memory(array[:4096]), Memory(at + 4000, 96)])
        assert [4096, PROBES] == sorted(
            (each.end - each.address for each in rank._held.memories), reverse=True
        )
        rank.register([Memory(at + 4096, 64)])
        assert 3 == len(rank._held.memories) == len(rank._registered)  # one is the probe
        for start, length in ((4000, 97), (0, 8192), (-8, 16), (4100, 64)):
            with pytest.raises(SpecError, match="overlap") as caught:
                rank.register([Memory(at + start, length)])
            assert "memories" == caught.value.field
        assert 3 == len(rank._held.memories)


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
    """Addresses, lengths, types and devices are checked before nixl sees them."""
    with pytest.raises(SpecError) as caught:
        ranks.near.register([Memory(*bad)])
    assert (field, value) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("wrong", [None, 3, Memory(4096, 4096)])
def test_register_rejects_a_single_memory(ranks: Pair, wrong: Any) -> None:
    """One is a list of one."""
    with pytest.raises(SpecError) as caught:
        ranks.near.register(wrong)
    assert ("memories", wrong) == (caught.value.field, caught.value.value)


def test_register_rejects_other_types(ranks: Pair) -> None:
    """Only a `Memory`, whose numbers were checked, is registered."""
    with pytest.raises(SpecError) as caught:
        ranks.near.register([(8, 8)])
    assert ("memories[0]", (8, 8)) == (caught.value.field, caught.value.value)


def test_the_owner_of_memory_lives_until_the_rank_is_closed() -> None:
    """Registered bytes cannot be freed under nixl, and are freed after it."""

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


def test_metadata_registered_later_is_added_by_connecting_again(ranks: Pair) -> None:
    """The same peer's newer metadata makes its newer memory reachable."""
    more = np.ones(4096, np.uint8)
    ranks.far.register([memory(more)], more)
    rows = table(more.ctypes.data, [(0, 4096, 4096, 1)])
    with pytest.raises(TransferError, match="NotFound"):
        ranks.near.prepare(rows, peer=ranks.peer)
    assert ranks.peer == ranks.near.connect(ranks.far.metadata())
    remote = ranks.near.prepare(rows, peer=ranks.peer)
    local = ranks.near.prepare(table(ranks.local.ctypes.data, [(0, 4096, 4096, 1)]))
    one = np.array([0])
    ranks.near.read(local, one, remote, one, request="r", timeout=5).wait()
    assert ranks.local[:4096].all()


def test_a_rank_does_not_connect_to_itself(ranks: Pair) -> None:
    """The metadata of the rank itself is refused."""
    with pytest.raises(TransferError, match="own") as caught:
        ranks.near.connect(ranks.near.metadata())
    assert caught.value.state == "stale_peer"


def test_names_are_unique_while_they_live() -> None:
    """A name is free again after `close`; default names never meet."""
    with NixlRank("one", polled=True), NixlRank(prefix="p-", polled=True) as other:
        assert other.name.startswith("p-")
        with pytest.raises(SpecError, match="live") as caught:
            NixlRank("one", polled=True)
        assert ("name", "one") == (caught.value.field, caught.value.value)
        for bad, field, word in (
            ({"name": ""}, "name", "255"),
            ({"name": "x" * 256}, "name", "255"),
            ({"prefix": "y" * 256}, "name", "255"),
            ({"name": "\ud800"}, "name", "255"),
            ({"name": 7}, "name", "str"),
            ({"name": "x", "prefix": "y"}, "name", "prefix"),
            ({"prefix": 3}, "prefix", "str"),
            ({"polled": 1}, "polled", "True"),
            ({"telemetry": "no"}, "telemetry", "True"),
        ):
            with pytest.raises(SpecError, match=word) as caught:
                NixlRank(**bad)
            assert field == caught.value.field
    NixlRank("one", polled=True).close()


def test_disconnecting_ends_the_peers_lists(ranks: Pair) -> None:
    """Old lists are released. A new connection moves bytes again."""
    ids = np.arange(4)
    local, remote = ranks.lists([(0, 512, 512, 4)], [(0, 512, 512, 4)])
    ranks.near.disconnect(ranks.peer)
    with pytest.raises(TransferError, match="released") as caught:
        ranks.near.read(local, ids, remote, ids, request="r", timeout=1)
    assert caught.value.state == "closed"
    for use in (
        lambda: ranks.near.disconnect(ranks.peer),
        lambda: ranks.near.notify(ranks.peer, b"x"),
        lambda: ranks.near.prepare(table(8, [(0, 8, 8, 1)]), peer=ranks.peer),
    ):
        with pytest.raises(TransferError, match="connected") as caught:
            use()
        assert caught.value.state == "stale_peer"
    ranks.near.connect(ranks.far.metadata())
    local, remote = ranks.lists([(0, 512, 512, 4)], [(0, 512, 512, 4)])
    ranks.near.read(local, ids, remote, ids, request="r", timeout=5).wait()
    assert np.array_equal(ranks.remote[:2048], ranks.local[:2048])


def test_lists_keep_to_their_side_and_rank(ranks: Pair) -> None:
    """Swapped sides, lists of other ranks and other types are refused."""
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
def test_a_timeout_is_finite_seconds(ranks: Pair, timeout: object) -> None:
    """No wait is for ever."""
    ids = np.arange(4)
    local, remote = ranks.lists([(0, 512, 512, 4)], [(0, 512, 512, 4)])
    for call, field in (
        (lambda: ranks.near.read(local, ids, remote, ids, request="r", timeout=timeout), "timeout"),
        (lambda: ranks.near.read(local, ids, remote, ids, request=7, timeout=1), "request"),
        (lambda: ranks.near.close(timeout), "drain"),
    ):
        with pytest.raises(SpecError) as caught:
            call()
        assert field == caught.value.field


def test_a_transfer_that_is_late_posts_no_more(
    ranks: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past its deadline a transfer fails, even when the next batch would be quick."""
    monkeypatch.setattr(merging, "MAX_DESCRIPTORS", 1)
    ids = np.arange(100)
    lists = ranks.lists([(0, 512, 1024, 100)], [(0, 512, 1024, 100)])
    transfer = ranks.near.read(lists[0], ids, lists[1], ids, request="late", timeout=0)
    with pytest.raises(TransferError, match="100 batches") as caught:
        transfer.wait()
    assert ("late", "timeout") == (caught.value.request, caught.value.state)
    assert not ranks.local[-1024 * 50 :].any()


def test_notifications_are_exact_and_none_is_lost(ranks: Pair) -> None:
    """Each payload arrives as it was sent, in order for each sender, without the hello."""
    with NixlRank(polled=True) as third:
        third.connect(ranks.far.metadata())
        for rank in (third, ranks.near):
            ranks.far.connect(rank.metadata())
        sent = [b"plan 1", b"plan 10", b"plan", b"", b"plan 1", bytes(range(256)) * 256]
        for payload in sent:
            ranks.near.notify(ranks.peer, payload)
        third.notify(ranks.far.name, b"plan 1")
        near, far = ranks.near.name, ranks.far
        arrived = received(far, len(sent) + 1)
        assert sent == [payload for peer, payload in arrived if peer == near]
        assert [b"plan 1"] == [payload for peer, payload in arrived if peer == third.name]
        assert far.notifications() == []


def test_a_notification_is_a_few_bytes(ranks: Pair) -> None:
    """Text, too many bytes and the greeting's own bytes are refused."""
    for bad, word in (("text", "bytes"), (bytes(65537), "65537"), (HELLO, "kvspec")):
        with pytest.raises(SpecError, match=word) as caught:
            ranks.near.notify(ranks.peer, bad)
        assert "payload" == caught.value.field


def test_every_use_of_a_closed_rank_raises_closed(
    ranks: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing crashes after `close`: each use is an error, closing again is not."""
    monkeypatch.setattr(merging, "MAX_DESCRIPTORS", 1)
    ids = np.arange(100)
    local, remote = ranks.lists([(0, 512, 1024, 100)], [(0, 512, 1024, 100)])
    rank = ranks.near
    going = rank.read(local, ids, remote, ids, request="going", timeout=5)
    assert going.state == "PROC"
    rank.close()
    for use in (
        rank.metadata,
        rank.notifications,
        going.poll,
        going.wait,
        local.release,
        lambda: rank.register([memory(ranks.local)]),
        lambda: rank.connect(ranks.far.metadata()),
        lambda: rank.disconnect(ranks.peer),
        lambda: rank.notify(ranks.peer, b"x"),
        lambda: rank.prepare(table(8, [(0, 8, 8, 1)])),
        lambda: rank.read(local, ids, remote, ids, request="r", timeout=1),
    ):
        with pytest.raises(TransferError, match="closed") as caught:
            use()
        assert caught.value.state == "closed"
    assert ("closed", 0, ()) == (going.state, rank.stats().handles, rank.transfers)
    rank.close()


def test_transfers_leave_nothing_behind(ranks: Pair) -> None:
    """Handles and file descriptors are where they were after twenty transfers."""
    ids = np.arange(160)
    lists = ranks.lists(LOCAL, REMOTE)
    for turn in range(22):
        if turn == 2:
            before = open_files()
        ranks.near.read(lists[0], ids, lists[1], ids, request="r", timeout=5).wait()
        ranks.near.notify(ranks.peer, b"done")
    assert before == open_files()
    assert (0, 0) == (ranks.near.stats().handles, ranks.near.stats().transfers)


def test_closing_gives_every_descriptor_of_the_process_back() -> None:
    """Making and closing ranks does not grow the process."""
    counts = []
    for _ in range(3):
        with NixlRank(polled=True) as near, NixlRank() as far:
            Pair(near, far)
        counts.append(open_files())
    assert counts[1] == counts[2]


def test_an_idle_rank_does_not_spin() -> None:
    """The progress thread of a rank that waits takes a small part of a core."""
    with NixlRank():
        time.sleep(0.1)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.25


def test_threads_share_a_rank(ranks: Pair) -> None:
    """Threads read, register and notify at once without failures and without mixed bytes."""
    lists = ranks.lists([(0, 512, 512, 1600)], [(0, 512, 512, 1600)])
    failures: list[BaseException] = []

    def run(work: int) -> None:
        try:
            ids = np.arange(400) + 400 * work
            for turn in range(10):
                move = ranks.near.read(lists[0], ids, lists[1], ids, request="r", timeout=20)
                extra = np.zeros(64, np.uint8)
                ranks.near.register([memory(extra)], extra)
                ranks.near.notify(ranks.peer, b"%d %d" % (work, turn))
                move.wait()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test must see it
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert np.array_equal(ranks.remote[: 1600 * 512], ranks.local[: 1600 * 512])
    ranks.far.connect(ranks.near.metadata())
    payloads = {payload for _, payload in received(ranks.far, 40)}
    assert {b"%d %d" % (work, turn) for work in range(4) for turn in range(10)} == payloads


def test_every_error_of_nixl_has_a_state() -> None:
    """Every exception of NIXL is mapped to a state, and every state has advice."""
    kinds = {*nixl_agent.STATE_OF_KIND.values(), *nixl_agent.STATE_OF_STEP.values()}
    assert kinds <= set(TransferState)
    nb = nixl_agent.bindings()
    words = {
        nixl_agent.kind_of(each()) for name, each in vars(nb).items() if name.endswith("Error")
    }
    bugs = {"InvalidParam", "Mismatch", "RepostActive", "NotPosted", "NotAllowed", "NotSupported"}
    assert words == {*nixl_agent.STATE_OF_KIND, *bugs, "NoTelemetry"}


def test_the_package_follows_the_environment_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`KVSPEC_NIXL_PACKAGE` wins, then what is loaded, then torch's CUDA, then the newest."""
    monkeypatch.delenv("KVSPEC_NIXL_PACKAGE", raising=False)
    assert nixl_agent.package_names() == ("nixl_cu13",)  # the other tests have loaded it
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


def test_neither_nixl_nor_torch_is_imported_early() -> None:
    """Importing the module loads nothing; making a rank loads the bindings and no torch."""
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
