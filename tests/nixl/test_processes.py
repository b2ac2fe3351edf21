"""Test ranks in different processes that are killed, stopped or forked during transfers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvspec
from kvspec.errors import TransferError

os.environ.setdefault("UCX_NET_DEVICES", "lo")
pytest.importorskip("nixl_cu13", reason="needs nixl")

import nixl_worker
from nixl_pair import memory
from nixl_worker import BLOCK, BLOCKS, SIZE, pattern, rows
from notified import notifications, notify
from slotted import Slotted

from kvspec.nixl import NixlRank, Staging, Transfer
from kvspec.nixl.agent import Prepared
from kvspec.nixl.rank import NixlStats

pytestmark = pytest.mark.nixl
WORKER = Path(nixl_worker.__file__)
REPO = Path(kvspec.__file__).parents[1]


class Worker:
    """A child process with one rank whose storage holds `pattern(seed)`."""

    def __init__(self, seed: int, name: tuple[str, ...], tls: str) -> None:
        self.pipe, child_end = Pipe()
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and file
            [sys.executable, str(WORKER), str(child_end.fileno()), str(seed), *name],
            pass_fds=[child_end.fileno()],
            env={**os.environ, "PYTHONPATH": str(REPO), "UCX_TLS": tls},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        child_end.close()

    def introduce(self) -> tuple[bytes, int]:
        """Return the metadata of its rank and the address of its storage."""
        metadata, address = self.receive()
        return metadata, address

    def call(self, *command: object) -> Any:
        """Return the result of *command*."""
        self.pipe.send(command)
        return self.receive()

    def receive(self) -> Any:
        """Return the next message of the process, which arrives within 20 s."""
        assert self.pipe.poll(20), "the worker sent nothing"
        return self.pipe.recv()

    def stop(self) -> None:
        """Stop the process, and wait until all its threads have stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self) -> None:
        """Continue the stopped process."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.process.kill()
        self.process.wait()

    def leave(self) -> int:
        """Let the process close its rank and exit. Return its exit status."""
        self.pipe.close()
        return self.process.wait(20)


@contextlib.contextmanager
def worker(seed: int = 1, *name: str, tls: str = "all") -> Iterator[Worker]:
    """Run a `Worker`, and end it in every case."""
    made = Worker(seed, name, tls)
    try:
        yield made
    finally:
        made.kill()
        made.pipe.close()


class Side:
    """The rank and the storage of the test process, and lists for one worker."""

    def __init__(self, rank: NixlRank, metadata: bytes, address: int) -> None:
        self.rank = rank
        self.storage = np.zeros(SIZE, np.uint8)
        rank.register([memory(self.storage)], owner=self.storage)
        self.peer = rank.connect(metadata)
        self.local = rank.prepare(rows(self.storage.ctypes.data))
        self.remote: Prepared = rank.prepare(rows(address), peer=self.peer)

    def read(self, timeout: float = 10.0, request: str = "r") -> Transfer:
        """Start reading every block."""
        ids = np.arange(BLOCKS)
        return self.rank.read(self.local, ids, self.remote, ids, request=request, timeout=timeout)

    def read_blocks(self, first: int, count: int, request: str) -> Transfer:
        """Start reading *count* blocks, beginning with block *first*."""
        ids = np.arange(first, first + count)
        return self.rank.read(self.local, ids, self.remote, ids, request=request, timeout=10.0)

    def blocks(self) -> np.ndarray:
        """Return the bytes of the blocks, without the gaps."""
        return blocks(self.storage)


def blocks(storage: np.ndarray) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return the bytes of the blocks of *storage*, without the gaps."""
    return storage.reshape(BLOCKS, 2, BLOCK)[:, 0]


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> str:
    """Let agents move data over sockets, so that a stopped peer sends and receives nothing."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    return "tcp"


def transfers_end(rank: NixlRank, seconds: float = 10.0) -> bool:
    """Return whether all transfers of *rank* are over in time."""
    deadline = time.monotonic() + seconds
    while rank.transfers and time.monotonic() < deadline:
        time.sleep(0.01)
    return not rank.transfers


STAGED = Slotted(buffer=1 << 16, slot_bytes=1 << 15, always=True)
"""The buffer has two slots. Each takes 15 blocks of 4 KiB."""


@pytest.mark.parametrize("staging", [None, STAGED], ids=["direct", "staged"])
def test_two_processes_move_exact_bytes(staging: Staging | None) -> None:
    """A read and a write over strided rows move only the blocks, without the gaps."""
    with worker() as child, NixlRank(polled=True, staging=staging) as rank:
        side = Side(rank, *child.introduce())
        read = side.read()
        read.wait()
        assert (staging is not None) == read.staged
        expected = np.zeros(SIZE, np.uint8)
        blocks(expected)[:] = blocks(pattern(1))
        assert expected.tobytes() == side.storage.tobytes()
        side.storage[:] = pattern(2)
        ids = np.array([5, 6, 7, 20])
        rank.write(side.local, ids, side.remote, ids[::-1], request="w", timeout=5).wait()
        expected = pattern(1)
        blocks(expected)[ids[::-1]] = blocks(pattern(2))[ids]
        assert expected.tobytes() == child.call("storage")
        assert 0 == child.leave()


def test_read_from_a_stopped_peer_is_quarantined_until_it_continues() -> None:
    """The wait ends at its deadline. A handle in flight is not released."""
    with worker() as child, NixlRank() as rank:
        side = Side(rank, *child.introduce())
        side.read().wait()
        child.stop()
        # Reads after a notification wait until the peer makes progress.
        notify(rank, side.peer, b"x")
        began = time.monotonic()
        transfer = side.read(0.5, "late")
        with pytest.raises(TransferError, match="quarantine") as caught:
            transfer.wait()
        assert 0.4 < time.monotonic() - began < 5
        error = caught.value
        assert (side.peer, "late", "timeout") == (error.rank, error.request, error.state)
        assert (transfer,) == rank.transfers
        assert (1, 1) == (rank.stats().handles, transfer.live_handles)
        with pytest.raises(TransferError) as caught:
            transfer.poll()
        assert ("late", "timeout") == (caught.value.request, caught.value.state)
        with pytest.raises(TransferError, match="late") as caught:
            rank.disconnect(side.peer)
        assert "busy" == caught.value.state
        child.go_on()
        assert transfers_end(rank)
        assert transfer.over
        assert ((), 0, "timeout") == (rank.transfers, rank.stats().handles, transfer.state)
        side.storage[:] = 0
        side.read().wait()
        assert np.array_equal(blocks(pattern(1)), side.blocks())


def test_staged_transfers_share_the_buffer_over_sockets(tcp: str) -> None:
    """Four transfers of slow handles share two slots, and every byte is right."""
    with worker(tls=tcp) as child, NixlRank(staging=STAGED) as rank:
        side = Side(rank, *child.introduce())
        reads = [side.read_blocks(16 * part, 16, f"{part}") for part in range(4)]
        for read in reversed(reads):
            read.wait()
        assert all(read.staged for read in reads)
        assert np.array_equal(blocks(pattern(1)), side.blocks())
        gaps = side.storage.reshape(BLOCKS, 2, BLOCK)[:, 1]
        assert not gaps.any()


def test_late_bytes_of_a_stopped_peer_never_reach_a_staged_cache(tcp: str) -> None:
    """The late bytes arrive in the buffer. The blocks keep their bytes."""
    with worker(tls=tcp) as child, NixlRank(staging=STAGED) as rank:
        side = Side(rank, *child.introduce())
        side.read_blocks(0, 1, "warm").wait()
        child.stop()
        late = side.read(0.3, "late")
        with pytest.raises(TransferError) as caught:
            late.wait()
        assert "timeout" == caught.value.state
        before = side.storage.copy()
        assert late.live_handles
        child.go_on()
        assert transfers_end(rank)
        assert late.over
        assert before.tobytes() == side.storage.tobytes()
        side.read().wait()
        assert np.array_equal(blocks(pattern(1)), side.blocks())


def test_connect_to_a_stopped_peer_raises_at_the_deadline() -> None:
    """The attempt stays in quarantine until the peer continues. The connection then works."""
    with worker() as child, NixlRank(polled=True) as rank:
        metadata, _ = child.introduce()
        child.stop()
        with pytest.raises(TransferError) as caught:
            rank.connect(metadata, timeout=0.3)
        peer = caught.value.rank
        assert ("connect", "timeout") == (caught.value.request, caught.value.state)
        assert ["connect"] == [transfer.request for transfer in rank.transfers]
        child.go_on()
        assert transfers_end(rank)
        assert peer == rank.connect(metadata)


def test_close_stops_transfers_in_quarantine(tcp: str) -> None:
    """After `close`, no byte of a read in quarantine arrives, although the peer continues."""
    with worker(tls=tcp) as child:
        metadata, address = child.introduce()
        rank = NixlRank()
        side = Side(rank, metadata, address)
        child.stop()
        transfer = side.read(0.3)
        with pytest.raises(TransferError, match="quarantine"):
            transfer.wait()
        before = side.storage.copy()
        assert not np.array_equal(blocks(pattern(1)), side.blocks())
        rank.close()
        assert 0 == transfer.live_handles == rank.stats().handles
        child.go_on()
        time.sleep(0.5)
        assert np.array_equal(before, side.storage)


def test_close_during_reads_leaves_the_peer_alive(tcp: str) -> None:
    """`close` waits for reads over sockets. An aborted read may kill the process of the peer."""
    with worker(tls=tcp) as child:
        metadata, address = child.introduce()
        for turn in range(20):
            rank = NixlRank()
            side = Side(rank, metadata, address)
            transfers = [side.read_blocks(first, 16, f"{turn}") for first in range(0, BLOCKS, 16)]
            rank.close()
            assert {"closed", "DONE"} >= {transfer.state for transfer in transfers}
            assert NixlStats() == rank.stats()
        assert pattern(1).tobytes() == child.call("storage")
        assert 0 == child.leave()


def test_killed_peer_is_lost_at_once_and_a_new_one_takes_its_place() -> None:
    """Each use of a dead peer raises "peer_lost" long before the deadline."""
    with NixlRank() as rank:
        with worker() as child:
            side = Side(rank, *child.introduce())
            side.read().wait()
            child.kill()
            began = time.monotonic()
            with pytest.raises(TransferError, match="RemoteDisconnect") as caught:
                side.read(20.0, "dead").wait()
            assert time.monotonic() - began < 5
            error = caught.value
            assert (side.peer, "dead", "peer_lost") == (error.rank, error.request, error.state)
            assert ((), 0) == (rank.transfers, rank.stats().handles)
            with pytest.raises(TransferError, match="notify") as caught:
                notify(rank, side.peer, b"greeting")
            assert "peer_lost" == caught.value.state
            rank.disconnect(side.peer)
            assert () == rank.peers
        with worker(seed=3) as child:
            side = Side(rank, *child.introduce())
            side.read().wait()
            assert np.array_equal(blocks(pattern(3)), side.blocks())


def test_peer_killed_during_a_read_leaves_nothing_in_flight(tcp: str) -> None:
    """The handles of a dead peer end without help, so the quarantine stays empty."""
    with worker(tls=tcp) as child, NixlRank() as rank:
        side = Side(rank, *child.introduce())
        child.stop()
        transfer = side.read(20.0)
        assert "PROC" == transfer.poll()
        child.kill()
        with pytest.raises(TransferError) as caught:
            transfer.wait()
        assert "peer_lost" == caught.value.state
        assert ((), 0) == (rank.transfers, rank.stats().handles)


def test_peer_with_the_name_of_a_connected_peer_is_stale() -> None:
    """The second peer can connect after the first one is disconnected."""
    with worker(1, "twin") as old, worker(2, "twin") as new, NixlRank() as rank:
        first, second = old.introduce(), new.introduce()
        side = Side(rank, *first)
        with pytest.raises(TransferError, match="NotAllowed") as caught:
            rank.connect(second[0])
        assert "stale_peer" == caught.value.state
        side.read().wait()
        assert np.array_equal(blocks(pattern(1)), side.blocks())
        rank.disconnect("twin")
        side = Side(rank, *second)
        side.read().wait()
        assert np.array_equal(blocks(pattern(2)), side.blocks())


def test_forked_child_cannot_use_the_rank_and_its_parent_continues() -> None:
    """A call in the child raises "forked". Its normal exit does not damage the parent."""
    with worker() as child, NixlRank() as rank:
        side = Side(rank, *child.introduce())
        assert "forked 7" == child.call("fork")
        side.read().wait()
        assert np.array_equal(blocks(pattern(1)), side.blocks())
        assert 0 == child.leave()


class Lane:
    """Reads from a worker that is stopped and killed at random, and then replaced."""

    def __init__(
        self, rank: NixlRank, tls: str, chance: random.Random, children: contextlib.ExitStack
    ) -> None:
        self.rank, self.tls, self.chance, self.children = rank, tls, chance, children
        self.seed = 0
        self.kills = self.stops = 0
        self.reads: dict[Transfer, np.ndarray] = {}
        self.start()

    def start(self) -> None:
        """Start a worker with new bytes, and connect to it."""
        self.seed += 1
        self.worker = self.children.enter_context(worker(self.seed, tls=self.tls))
        self.side = Side(self.rank, *self.worker.introduce())
        self.expected = blocks(pattern(self.seed))
        self.dead = False
        self.stopped_until = 0.0

    def disturb(self) -> None:
        """Rarely kill, stop or continue the worker. Replace a dead one when all reads are over."""
        now = time.monotonic()
        if self.stopped_until and now > self.stopped_until:
            self.worker.go_on()
            self.stopped_until = 0.0
        if self.dead:
            if not self.reads:
                self.rank.disconnect(self.side.peer)
                self.start()
        elif self.chance.random() < 0.004:
            self.worker.kill()
            self.dead, self.stopped_until = True, 0.0
            self.kills += 1
        elif not self.stopped_until and self.chance.random() < 0.008:
            self.worker.stop()
            self.stops += 1
            self.stopped_until = now + self.chance.uniform(0.05, 0.5)

    def read(self, request: str) -> bool:
        """Start reading some blocks. Return False if another read uses one of them."""
        ids = np.array(self.chance.sample(range(BLOCKS), self.chance.choice((1, 4, 20))))
        timeout = self.chance.choice((0.02, 0.3, 5.0))
        lists = self.side.local, self.side.remote
        with contextlib.suppress(TransferError):
            transfer = self.rank.read(
                lists[0], ids, lists[1], ids, request=request, timeout=timeout
            )
            self.reads[transfer] = ids
            return True
        return False

    def right(self, transfer: Transfer) -> bool:
        """Return whether a finished read moved the bytes of the worker."""
        ids = self.reads[transfer]
        return np.array_equal(self.expected[ids], self.side.blocks()[ids])


@pytest.mark.parametrize("tls", ["all", pytest.param("tcp", marks=pytest.mark.slow)])
def test_reads_from_failing_peers_end_without_wrong_bytes(
    tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers are killed and stopped during reads. Each read ends, and nothing stays in flight."""
    monkeypatch.setenv("UCX_TLS", tls)
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as children, NixlRank() as rank:
        lanes = [Lane(rank, tls, random.Random(seed), children) for seed in range(3)]
        end = time.monotonic() + 6
        # On a slow machine the first 6 s may contain too few kills and stops.
        while (
            (going := time.monotonic() < end or sum(lane.kills + lane.stops for lane in lanes) < 4)
            or any(lane.reads for lane in lanes)
        ):  # fmt: skip
            for lane in lanes:
                lane.disturb()
                if going and len(lane.reads) < 8 and not lane.dead:
                    counts["started"] += lane.read(f"{counts['started']}")
            for lane in lanes:
                for transfer in tuple(lane.reads):
                    with contextlib.suppress(TransferError):
                        transfer.poll()
                    assert transfer.state != "DONE" or lane.right(transfer)
                    if transfer.over:
                        counts["done" if transfer.error is None else "failed"] += 1
                        del lane.reads[transfer]
            notifications(rank)
            assert time.monotonic() < end + 30
        assert counts["started"] == counts["done"] + counts["failed"]
        assert (0, 0) == (rank.stats().transfers, rank.stats().handles)
    assert NixlStats() == rank.stats()
    assert sum(lane.kills + lane.stops for lane in lanes) > 3, counts
