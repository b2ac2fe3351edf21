"""Calls of a rank that are interrupted, arrays that change, and runs with the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nixl_world import keep

from kvspec.errors import TransferError, TransferState
from kvspec.memory.busy import BusyRanges
from kvspec.memory.rank_cache import Memory
from kvspec.nixl import NixlRank, Staging, Transfer, merging
from kvspec.nixl.rank import NixlStats
from kvspec.nixl.transfer import InFlightTransfers
from kvspec.testing.fake_nixl import FakeFlight, FakeNixl

RUN, RUNS = 64, 256


class Ranks:
    """Two ranks. The near one has a gap of one run behind each run."""

    def __init__(self, **options: Any) -> None:
        self.near, self.far = NixlRank(secret=b"", **options), NixlRank(secret=b"")
        drawn = np.random.default_rng(0)
        self.source = drawn.integers(1, 256, (RUNS, RUN), dtype=np.uint8)
        self.target = np.zeros((RUNS, 2 * RUN), np.uint8)
        for rank, array in ((self.near, self.target), (self.far, self.source)):
            rank.register([Memory(array.ctypes.data, array.nbytes)], owner=array)
        peer = self.near.connect(self.far.metadata())
        rows = [
            np.array([(array.ctypes.data, RUN, 0, array.shape[1], RUNS)], np.uint64)
            for array in (self.target, self.source)
        ]
        self.lists = self.near.prepare(rows[0]), self.near.prepare(rows[1], peer=peer)

    def read(self, near: Any, far: Any, name: str = "r") -> Transfer:
        """Start to read runs *far* into runs *near*."""
        return self.near.read(self.lists[0], near, self.lists[1], far, request=name, timeout=9)

    def right(self, near: Any, far: Any) -> bool:
        """Whether the runs *near* contain the runs *far*."""
        return bool((self.target[near, :RUN] == self.source[far]).all())


def interrupting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return *method* with an interrupt after its first call."""
    left = [KeyboardInterrupt]

    def call(*arguments: Any, **more: Any) -> Any:
        result = method(*arguments, **more)
        if left:
            raise left.pop()
        return result

    return call


@pytest.mark.parametrize("staged", [False, True])
def test_read_writes_each_destination_of_repeated_bytes(net: FakeNixl, staged: bool) -> None:
    """The source of two runs may be the same."""
    ranks = Ranks(staging=Staging(always=True) if staged else None)
    far = np.array([0, 0, 2, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15])
    near = np.arange(len(far)) * 3
    transfer = ranks.read(near, far)
    transfer.wait()
    assert staged == transfer.staged
    assert ranks.right(near, far)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_array_of_ids_may_be_changed_after_the_call(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch, dtype: type
) -> None:
    """Later batches use the ids that were passed, and so does the check of busy bytes."""
    monkeypatch.setattr(merging, "MAX_DESCRIPTORS", 4)
    ranks, ids = Ranks(), np.arange(16, dtype=dtype)
    far = ids.copy()
    transfer = ranks.read(ids, far)
    far[:] = 100
    transfer.wait()
    assert ranks.right(ids, ids)


def test_interrupted_start_leaves_no_bytes_busy(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier transfer was alone. Its bytes are claimed when the second one starts."""
    ranks, net.fate = Ranks(), keep
    first = ranks.read(np.arange(8), np.arange(8))
    with monkeypatch.context() as patch:
        patch.setattr(BusyRanges, "claim", interrupting(BusyRanges.claim))
        with pytest.raises(KeyboardInterrupt):
            ranks.read(np.arange(20, 28), np.arange(20, 28))
    net.moving[0].land()
    first.wait()
    ranks.read(np.arange(40, 48), np.arange(40, 48))
    ranks.read(np.arange(8), np.arange(8))
    assert 2 == ranks.near.stats().transfers


def test_interrupted_connect_leaves_nothing_in_flight(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read that shows whether the peer answers was posted, and its caller has no object."""
    far, near = NixlRank(secret=b""), NixlRank(secret=b"", polled=True)
    net.fate = keep
    with monkeypatch.context() as patch:
        patch.setattr(InFlightTransfers, "start", interrupting(InFlightTransfers.start))
        with pytest.raises(KeyboardInterrupt):
            near.connect(far.metadata())
    (probe,) = net.moving
    probe.land()
    assert (0, 0) == (len(near.transfers), near.stats().lists)
    near.disconnect(far.name)


def test_rank_disconnects_a_peer_that_has_died(net: FakeNixl) -> None:
    """NIXL has forgotten the peer, and raises if it must forget it again."""
    ranks = Ranks()
    (peer,) = ranks.near.peers
    net.kill(peer)
    ranks.near._agent.call("disconnect", "invalidateRemoteMD", peer)
    ranks.near.disconnect(peer)
    assert () == ranks.near.peers


def test_interrupted_close_stops_the_bytes(net: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer is over only when no byte of it can move."""
    ranks, net.fate = Ranks(), keep
    transfer = ranks.read(np.arange(8), np.arange(8))
    with monkeypatch.context() as patch:
        patch.setattr(InFlightTransfers, "release_now", interrupting(InFlightTransfers.release_now))
        with pytest.raises(KeyboardInterrupt):
            ranks.near.close(drain=0)
    assert (True, True, []) == (transfer.over, ranks.near.closed, net.moving)
    ranks.near.close()


def test_rank_is_closed_although_nixl_refuses_to_release_a_handle(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handle has ended. It goes with the agent."""
    ranks, net.fate = Ranks(), keep
    transfer = ranks.read(np.arange(8), np.arange(8))
    net.moving[0].land()

    def refuse(_: int) -> None:
        message = "refused"
        raise TransferError(message, state=TransferState.BUG)

    monkeypatch.setattr(ranks.near._agent, "release", refuse)
    ranks.near.close(drain=0)
    assert ("closed", True, NixlStats()) == (transfer.state, transfer.over, ranks.near.stats())
    assert ranks.near.closed


def test_interrupted_connect_of_a_polled_rank_can_be_undone(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The byte that it reads may land later."""
    net.fate = keep
    near, far = NixlRank(secret=b"", polled=True), NixlRank(secret=b"")
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", interrupting(lambda _: None))
        with pytest.raises(KeyboardInterrupt):
            near.connect(far.metadata())
    for flight in net.moving:
        flight.land()
    near.disconnect(far.name)
    net.fate = FakeFlight.land
    assert far.name == near.connect(far.metadata())
    near.disconnect(far.name)


def test_buffer_that_is_not_registered_is_freed(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All transfers are direct then. One warning contains the reason."""
    ranks = Ranks(staging=Staging(always=True))
    agent = ranks.near._agent
    owners = len(agent.owners)

    def refuse(*_: object) -> None:
        raise net.error("Backend")

    monkeypatch.setattr(agent._native, "registerMem", refuse)
    for _ in range(3):
        transfer = ranks.read(np.arange(8) * 2, np.arange(8))
        transfer.wait()
        assert not transfer.staged
    assert ranks.right(np.arange(8) * 2, np.arange(8))
    assert (owners, 1) == (len(agent.owners), len(caplog.records))
