"""Test one rank that several threads use, with a switch of threads between any two lines."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
from lines import Other, between_lines
from nixl_pair import Pair
from nixl_world import keep

from kvspec.errors import TransferError, TransferState
from kvspec.nixl import NixlRank, Staging, Transfer, merging, rank, transfer
from kvspec.nixl.rank import NixlStats
from kvspec.nixl.staging import choosing, stage
from kvspec.testing.fake_nixl import FakeFlight, FakeNixl

ROWS = [(0, 512, 1024, 40)]
IDS = np.arange(40)


def test_stats_work_while_peers_connect_and_disconnect(net: FakeNixl) -> None:
    """The thread of a session reads the statistics, so an error there would end it."""
    with NixlRank() as near, NixlRank() as far, NixlRank() as third:
        Pair(near, far).lists(ROWS, ROWS)
        for read_stats in (near.stats, lambda: near.peers):
            for place in range(1, 10):
                other = Other(lambda: near.connect(third.metadata()))
                with between_lines(other.at(place), rank):
                    read_stats()
                other.join()
                near.disconnect(third.name)


def test_ranks_are_closed_at_exit_while_other_threads_create_some(net: FakeNixl) -> None:
    """The ranks that exist are closed, whatever another thread creates or closes meanwhile."""
    for place in range(12):
        ranks, made = [NixlRank(), NixlRank()], list[NixlRank]()
        for other in (
            Other(lambda made=made: made.append(NixlRank())),
            Other(ranks[1].close),
        ):
            with between_lines(other.at(place), rank, weakref):
                rank.close_all()
            other.join()
        assert [True, True] == [each.closed for each in ranks]
        rank.close_all()
        assert made[0].closed


def test_rank_that_is_dropped_disappears_with_its_agent(net: FakeNixl) -> None:
    """Nothing else refers to a rank, so its agent ends without `close`."""
    dropped = NixlRank()
    name = dropped.name
    del dropped
    gc.collect()
    assert name not in net.agents


def test_peer_that_cannot_be_notified_is_not_connected(net: FakeNixl) -> None:
    """Another thread disconnects the peer at the same time. The error is a `TransferError`."""
    with NixlRank() as near, NixlRank() as far:
        metadata = far.metadata()
        net.agents[far.name].alive = False

        def disconnect() -> None:
            with contextlib.suppress(TransferError):
                near.disconnect(far.name)

        for place in range(16):
            other = Other(disconnect)
            with pytest.raises(TransferError), between_lines(other.at(place), rank):
                near.connect(metadata)
            other.join()
            assert () == near.peers


def test_connect_after_a_late_connection_waits_again(net: FakeNixl) -> None:
    """While the first test read is in quarantine, the peer stays, but is not taken as connected."""
    with NixlRank(polled=True) as near, NixlRank() as far:
        metadata = far.metadata()
        net.fate = keep
        for late in (1, 2):
            with pytest.raises(TransferError) as caught:
                near.connect(metadata, timeout=0.01)
            assert ("connect", "timeout") == (caught.value.request, caught.value.state)
            assert late == len(near.transfers)
        assert (far.name,) == near.peers
        net.fate = FakeFlight.land
        assert far.name == near.connect(metadata, timeout=5)
        net.fate = keep
        assert far.name == near.connect(metadata, timeout=0.01), "newer metadata need no test read"
        assert 2 == len(near.transfers)


def test_read_that_waits_for_close_raises_closed(net: FakeNixl) -> None:
    """No transfer begins after `close` has ended the others and before the agent ends."""
    refused: list[str | None] = []
    with NixlRank() as near, NixlRank() as far:
        pair = Pair(near, far)
        lists = pair.lists(ROWS, ROWS)
        net.fate = keep

        def begin() -> None:
            try:
                near.read(lists[0], IDS, lists[1], IDS, request="late", timeout=9)
            except TransferError as error:
                refused.append(error.state)

        other = threading.Thread(target=begin)

        def slowly(line: int) -> None:
            if line == 4:  # By now, `close` holds the lock.
                other.start()
            time.sleep(0.01)

        with between_lines(slowly, rank):
            near.close()
        other.join(10)
        assert (["closed"], NixlStats()) == (refused, near.stats())


def test_transfer_may_be_stopped_while_it_posts(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread stops the transfer at any moment. Only posted handles stay in flight."""
    monkeypatch.setattr(merging, "MAX_DESCRIPTORS", 1)
    monkeypatch.setattr(transfer, "IN_FLIGHT", 2)
    net.fate = keep
    with NixlRank() as near, NixlRank() as far:
        pair = Pair(near, far)
        for place in range(0, 60, 3):
            moved = pair.read(0, 40)
            net.moving[0].land()
            other = Other(partial(moved.cancel, "the test stops it", TransferState.CLOSED))
            with contextlib.suppress(TransferError), between_lines(other.at(place), transfer):
                moved.poll()
            other.join()
            assert ("closed", len(net.moving)) == (moved.state, moved.live_handles)
            for flight in net.moving:
                flight.land()
            assert () == near.transfers


class AlarmError(Exception):
    """The error that a signal handler raises."""


def transfers_with(peer: str) -> list[Transfer]:
    """Return all transfers with *peer* that exist, also those that their rank has forgotten."""
    every = (each for each in gc.get_objects() if type(each) is Transfer)
    # A transfer has no state yet if its constructor was interrupted.
    return [each for each in every if getattr(each, "state", None) and each.peer == peer]


def test_failed_transfer_is_never_done(net: FakeNixl) -> None:
    """An interrupt at any line of the failure does not change the outcome."""
    with NixlRank() as near, NixlRank() as far:
        pair = Pair(near, far)
        for place in range(80):

            def ring(line: int, place: int = place) -> None:
                if line == place:
                    raise AlarmError

            with contextlib.suppress(AlarmError), between_lines(ring, transfer):
                pair.read(0, 40, timeout=0.0)
            # `read` was interrupted, so it returned no transfer. Those of the rank are found by gc.
            for moved in (found := transfers_with(far.name)):
                assert "DONE" != moved.state
                with pytest.raises(TransferError):
                    moved.wait()
            assert () == near.transfers
            assert not pair.local.any()
        assert found


def test_buffer_is_created_once(net: FakeNixl) -> None:
    """Two threads need the buffer at the same time."""
    with NixlRank() as far:
        for place in range(0, 30, 3):
            with NixlRank(staging=Staging(buffer=1 << 16, always=True)) as near:
                pair = Pair(near, far)
                before = near.stats().registrations
                other = Other(lambda pair=pair: pair.read(40, 40))
                with between_lines(other.at(place), choosing, stage):
                    assert pair.read(0, 40).staged
                other.join()
                assert before + 1 == near.stats().registrations
