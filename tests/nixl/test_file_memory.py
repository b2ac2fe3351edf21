"""Test NIXL's plug-in for files: memory of the type FILE."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import numpy as np
import pytest

import kvspec
from kvspec.errors import SpecError, TransferError
from kvspec.memory.rank_cache import Memory
from kvspec.nixl import NixlRank
from kvspec.nixl.file_memory import FILE_HANDLES

os.environ.setdefault("UCX_NET_DEVICES", "lo")
pytest.importorskip("nixl_cu13", reason="needs nixl")

pytestmark = pytest.mark.nixl
SIZE = 1 << 16
ONE = np.zeros(1, np.int32)


class Files:
    """A rank that has only files, some memory of it, and open files."""

    def __init__(self, rank: NixlRank, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.opened: list[BinaryIO] = []
        self.array = np.zeros(SIZE, np.uint8)
        self.near = Memory(self.array.ctypes.data, SIZE)
        rank.register([self.near], owner=self.array)

    def open(self, content: bytes, mode: str = "r+b") -> BinaryIO:
        """Return a new file with *content*."""
        path = self.folder / f"{len([*self.folder.iterdir()])}"
        path.write_bytes(content)
        self.opened.append(path.open(mode, buffering=0))  # type: ignore[arg-type]
        return self.opened[-1]

    def register(self, file: BinaryIO, length: int) -> Memory:
        """Register the first *length* bytes of *file*."""
        memory = Memory.of_file(file.fileno(), length)
        self.rank.register([memory], owner=file)
        return memory

    def lists(self, length: int, far: list[tuple[Memory, int]]) -> tuple[Any, Any]:
        """Prepare *length* bytes for each (file, offset), and as many pieces of the memory."""
        near = [(self.near.address, length, 0, length, len(far))]
        there = [(m.address + offset, length, m.device, length, 1) for m, offset in far]
        return (
            self.rank.prepare(np.array(near, np.uint64)),
            self.rank.prepare(np.array(there, np.uint64), "FILE"),
        )


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    """Return a rank that has no peers."""
    with NixlRank(backends=["POSIX"], polled=True) as rank:
        made = Files(rank, tmp_path)
        yield made
    for file in made.opened:
        file.close()


def test_read_and_write_of_many_files_move_exact_bytes(files: Files) -> None:
    """The offsets in all files are equal, and only the descriptors differ."""
    random = np.random.default_rng(3)
    contents = [random.integers(0, 256, 4096, dtype=np.uint8) for _ in range(40)]
    opened = [files.open(content.tobytes()) for content in contents]
    known = [files.register(file, 4096) for file in opened]
    near, far = files.lists(100, [(memory, 300) for memory in known])
    ids = np.arange(40, dtype=np.int32)
    files.rank.read(near, ids, far, ids[::-1].copy(), request="r", timeout=10).wait()
    expected = np.concatenate([content[300:400] for content in contents[::-1]])
    assert np.array_equal(expected, files.array[:4000])
    assert not files.array[4000:].any()

    files.rank.write(near, ids, far, ids, request="w", timeout=10).wait()
    for place, (file, content) in enumerate(zip(opened, contents, strict=True)):
        content[300:400] = expected[100 * place :][:100]
        assert content.tobytes() == Path(file.name).read_bytes()
    assert (0, ()) == (files.rank.stats().handles, files.rank.transfers)


def test_more_descriptors_than_the_plugin_holds_are_moved(files: Files) -> None:
    """100,000 pieces with gaps, in six transfers at once: the plug-in has 65,536 places."""
    content = np.arange(100_000 * 2, dtype=np.uint16).view(np.uint8)
    memory = files.register(files.open(content.tobytes()), content.nbytes)
    target = np.zeros(100_000, np.uint16)
    files.rank.register([Memory(target.ctypes.data, target.nbytes)], owner=target)
    ids = np.arange(100_000, dtype=np.int32)
    near = np.array([(target.ctypes.data, 2, 0, 2, 100_000)], np.uint64)
    far = np.array([(memory.address, 2, memory.device, 4, 100_000)], np.uint64)
    sides = files.rank.prepare(near), files.rank.prepare(far, "FILE")
    pairs = {
        part: (sides[0], ids[part::6].copy(), sides[1], ids[part::6].copy()) for part in range(6)
    }
    moves = files.rank.move(pairs, request="many", timeout=60)
    most = 0
    while "PROC" in [move.poll() for move in moves.values()]:
        most = max(most, files.rank.stats().handles)
    assert most == FILE_HANDLES
    assert np.array_equal(content.view(np.uint16)[::2], target)


def test_plan_moves_blocks_into_a_slab_file_and_back(files: Files) -> None:
    """Rows of `build_table` need no change: TP 2 with 4 heads writes what TP 1 and TP 4 read."""
    spec = kvspec.FullAttentionSpec(
        block_size=4, total_num_kv_heads=4, head_size=8, dtype="float16"
    )
    group = kvspec.KVCacheGroup(name="g", layers=["l.0", "l.1"], spec=spec)

    def engine(tp: int, layout: str) -> kvspec.EngineSpec:
        return kvspec.EngineSpec(
            groups=[group], parallel=kvspec.ParallelConfig(tp_size=tp), layout=layout
        )

    stored = engine(1, "BLKNHC")
    size = 3 * spec.page_size_bytes(tp_rank=0, tp_size=1) * 2
    slab = files.register(files.open(bytes(size)), size)
    on_paper = kvspec.plan_memory(stored, kvspec.RankId(), 3, address=slab.address)
    pages = attrs.evolve(
        on_paper,
        regions=[
            attrs.evolve(region, memory_type="FILE", device=slab.device)
            for region in on_paper.regions
        ],
        memory=[slab],
    )
    tables = {"producer_blocks": {"g": [2, 0]}, "consumer_blocks": {"g": [2, 0]}}
    request = kvspec.TransferRequest(request_id="r", num_tokens=8, **tables)

    def transfer(source: Any, target: Any, ids: tuple[Any, Any], *, save: bool) -> None:
        plan = kvspec.plan_transfer(source, target)
        table = kvspec.build_table(plan, *ids)
        rows = table.producer_rows, table.consumer_rows
        near, far = rows if save else rows[::-1]
        sides = files.rank.prepare(near), files.rank.prepare(far, "FILE")
        move = files.rank.write if save else files.rank.read
        move(sides[0], table.select(request), sides[1], request="r", timeout=10).wait()

    random = np.random.default_rng(5)
    written = []
    writer = engine(2, "LBHNC")
    for rank in writer.parallel.ranks:
        cache, arrays = kvspec.allocate(writer, rank, 3)
        arrays["g"][:] = random.integers(0, 256, arrays["g"].size)
        files.rank.register(cache.memory, owner=arrays)
        written.append(arrays["g"].view(np.uint16).reshape(2, 3, 2, 4, 2, 8))  # L B H N K C
        transfer(writer, stored, (cache, pages), save=True)
    whole = np.concatenate(written, axis=2)
    found = np.frombuffer(Path(files.folder / "0").read_bytes(), np.uint16)
    found = found.reshape(3, 2, 2, 4, 4, 8)  # B L K N H C
    assert np.array_equal(whole[:, [2, 0]].transpose(1, 0, 4, 3, 2, 5), found[[2, 0]])
    assert not found[1].any()

    reader = engine(4, "LBNHC")
    for rank in reader.parallel.ranks:
        cache, arrays = kvspec.allocate(reader, rank, 3)
        files.rank.register(cache.memory, owner=arrays)
        transfer(stored, reader, (pages, cache), save=False)
        read = arrays["g"].view(np.uint16).reshape(2, 3, 4, 2, 8)  # L B N K C
        assert np.array_equal(whole[:, [2, 0], rank.tp], read[:, [2, 0]])


def test_register_refuses_files_that_cannot_hold_the_bytes(files: Files) -> None:
    short = files.open(bytes(100))
    read, write = os.pipe()
    for descriptor, word in ((short.fileno(), "100 bytes"), (read, "regular"), (write, "regular")):
        with pytest.raises(TransferError, match=word) as caught:
            files.rank.register([Memory.of_file(descriptor, 101)])
        assert "file_failed" == caught.value.state
    os.close(read)
    os.close(write)
    with pytest.raises(TransferError, match="Bad file descriptor"):
        files.rank.register([Memory.of_file(read, 10)])
    assert 0 == sum(memory.memory_type == "FILE" for memory in files.rank.memory)


def test_row_outside_registered_files_is_refused(files: Files) -> None:
    one, other = files.open(bytes(8192)), files.open(bytes(8192))
    memory = files.register(one, 4096)
    outside = [(memory, 4090), (Memory.of_file(other.fileno(), 8192), 0)]
    for place, offset in outside:
        with pytest.raises(TransferError, match=r"rows\[1\]") as caught:
            files.lists(16, [(memory, 0), (place, offset)])
        assert "not_registered" == caught.value.state


def test_file_that_changed_after_register_is_refused(files: Files) -> None:
    truncated, replaced = files.open(bytes(4096)), files.open(bytes(4096))
    known = files.register(truncated, 4096), files.register(replaced, 4096)
    os.ftruncate(truncated.fileno(), 4095)
    foreign = files.open(bytes(4096))
    os.dup2(foreign.fileno(), replaced.fileno())
    for memory, word in zip(known, ("4095 bytes", "another file"), strict=True):
        with pytest.raises(TransferError, match=word) as caught:
            files.lists(16, [(memory, 0)])
        assert "file_failed" == caught.value.state


@pytest.mark.parametrize("fault", ["truncated", "read only"])
def test_transfer_that_the_file_does_not_allow_fails_by_name(files: Files, fault: str) -> None:
    file = files.open(bytes(4096), "rb" if fault == "read only" else "r+b")
    near, far = files.lists(4096, [(files.register(file, 4096), 0)])
    move = files.rank.write
    if fault == "truncated":
        os.ftruncate(file.fileno(), 100)
        move = files.rank.read
    with pytest.raises(TransferError) as caught:
        move(near, ONE, far, ONE, request="r", timeout=10).wait()
    assert ("file_failed", files.rank.name) == (caught.value.state, caught.value.rank)
    assert () == files.rank.transfers


def test_file_that_fails_fails_no_other_transfer(files: Files) -> None:
    """All transfers of a rank share one queue of the plug-in. The right one is polled first."""
    content = np.random.default_rng(1).bytes(4096)
    good, bad = files.open(content), files.open(bytes(4096))
    near, far = files.lists(4096, [(files.register(good, 4096), 0), (files.register(bad, 4096), 0)])
    os.ftruncate(bad.fileno(), 100)
    ids = [np.array([place], np.int32) for place in range(2)]
    moves = files.rank.move(
        {place: (near, ids[place], far, ids[place]) for place in range(2)}, request="r", timeout=10
    )
    moves[0].wait()
    with pytest.raises(TransferError) as caught:
        moves[1].wait()
    assert "file_failed" == caught.value.state
    assert content == files.array[:4096].tobytes()
    # And the queue works afterwards.
    files.array[:] = 0
    files.rank.read(near, ids[0], far, ids[0], request="again", timeout=10).wait()
    assert content == files.array[:4096].tobytes()


def test_deregistered_file_can_be_closed_and_its_lists_are_released(files: Files) -> None:
    file, stays = files.open(bytes(4096)), files.open(bytes(4096))
    memory, other = files.register(file, 4096), files.register(stays, 4096)
    before = files.rank.stats()
    near, far = files.lists(16, [(memory, 0), (other, 0)])
    _, kept = files.lists(16, [(other, 0)])
    released = weakref.ref(file)
    files.rank.deregister_files([memory])
    file.close()
    files.opened.remove(file)
    del file
    assert released() is None
    assert (True, False, False) == (far.released, near.released, kept.released)
    assert before.registrations - 1 == files.rank.stats().registrations
    with pytest.raises(TransferError, match="registered"):
        files.lists(16, [(memory, 0)])
    with pytest.raises(SpecError) as caught:
        files.rank.deregister_files([memory])
    assert "memories[0]" == caught.value.field
    files.rank.read(near, ONE, kept, ONE, request="r", timeout=10).wait()


def test_transfers_of_one_file_are_busy_and_those_of_two_are_not(files: Files) -> None:
    one, other = (files.register(files.open(bytes(4096)), 4096) for _ in range(2))
    near, far = files.lists(64, [(one, 0), (other, 0), (one, 32)])
    ids = [np.array([place], np.int32) for place in range(3)]
    first = files.rank.write(near, ids[0], far, ids[0], request="a", timeout=10)
    second = files.rank.write(near, ids[0], far, ids[1], request="b", timeout=10)
    if first.state == "PROC":
        with pytest.raises(TransferError) as caught:
            files.rank.write(near, ids[0], far, ids[2], request="c", timeout=10)
        assert "busy" == caught.value.state
        with pytest.raises(TransferError) as caught:
            files.rank.deregister_files([one])
        assert "busy" == caught.value.state
    first.wait()
    second.wait()
    files.rank.deregister_files([one, other])


@pytest.mark.skipif(bool(find_library("cufile")), reason="the plug-in may load here")
@pytest.mark.parametrize("name", ["GDS", "GDS_MT"])
def test_plugin_that_does_not_load_is_named(name: str) -> None:
    with pytest.raises(TransferError) as caught:
        NixlRank(backends=["UCX", name])
    assert "unavailable" == caught.value.state
    assert f"create {name} " in caught.value.message
    assert "UCX_NET_DEVICES" not in caught.value.message


@pytest.mark.parametrize(
    "backends", [["OBJ"], ["UCX", "S3"], [], ["POSIX", "POSIX"], ["POSIX", "GDS"], "POSIX", [None]]
)
def test_backends_that_do_not_fit_are_refused(backends: Any) -> None:
    with pytest.raises(SpecError) as caught:
        NixlRank(backends=backends)
    assert "backends" == caught.value.field


def test_rank_that_has_only_files_has_no_peers_and_needs_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with NixlRank() as peer:
        introduction = peer.metadata()
        monkeypatch.delenv("KVSPEC_SECRET", raising=False)
        monkeypatch.delenv("KVSPEC_SECRET_FILE", raising=False)
        with NixlRank(backends=["POSIX"]) as rank:
            for call in (rank.metadata, lambda: rank.connect(introduction)):
                with pytest.raises(SpecError) as caught:
                    call()
                assert "backends" == caught.value.field


def test_rank_without_plugin_for_files_refuses_them(files: Files) -> None:
    memory = files.register(files.open(bytes(64)), 64)
    rows = np.array([(memory.address, 64, memory.device, 64, 1)], np.uint64)
    with NixlRank() as rank, NixlRank(backends=["UCX", "POSIX"]) as both:
        with pytest.raises(SpecError) as caught:
            rank.register([memory])
        assert "backends" == caught.value.field
        peer = both.connect(rank.metadata())
        with pytest.raises(SpecError) as caught:
            both.prepare(rows, "FILE", peer)
        assert "peer" == caught.value.field
    with pytest.raises(SpecError) as caught:
        Memory(4096, 10, "FILE", 7)
    assert "address" == caught.value.field
