"""All transfers of a rank: none is lost, none moves another's bytes, everything is counted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvspec.errors import SpecError, TransferError

os.environ.setdefault("UCX_NET_DEVICES", "lo")
pytest.importorskip("nixl_cu13", reason="needs nixl")

from nixl_pair import Pair

from kvspec.nixl import NixlRank, Transfer, batches, notifications
from kvspec.nixl.in_flight import Event, NixlStats

pytestmark = pytest.mark.nixl


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two ranks over sockets of which the far one answers only when it is polled."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with NixlRank() as near, NixlRank(polled=True) as far:
        ranks = Pair(near, far)
        warm = ranks.read(1000, 1)
        until(lambda: warm.poll() == "DONE", far)
        near.pump()
        yield ranks
        until(lambda: not near.stats().transfers, far, near)


def until(true: Callable[[], Any], *polled: NixlRank) -> None:
    """Pump the ranks *polled* until something is *true*, at most 20 s."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        for rank in polled:
            rank.pump()
        time.sleep(1e-3)


def pumped(rank: NixlRank, *polled: NixlRank, count: int = 1) -> list[Event]:
    """Return the next *count* events of *rank*."""
    events: list[Event] = []
    end = time.monotonic() + 20
    while len(events) < count:
        assert time.monotonic() < end
        for other in polled:
            other.pump()
        events += rank.pump(1e-3)
    return events


def refused(start: Callable[[], object], by: str) -> None:
    """Check that the transfer *by* is named as the reason not to *start*."""
    with pytest.raises(TransferError, match=f"READ '{by}'") as caught:
        start()
    assert "busy" == caught.value.state


def written(ranks: Pair, first: int, count: int) -> Callable[[], object]:
    """Return what writes from as many blocks as `Pair.read` reads into."""
    rows = [(first * 1024, 512, 1024, count)]
    ids = np.arange(count)
    local, remote = ranks.lists(rows, [(500_000 + first * 1024, 512, 1024, count)])
    return lambda: ranks.near.write(local, ids, remote, ids, request="w", timeout=9)


def test_bytes_in_flight_are_nobody_elses(slow: Pair) -> None:
    """Neither read into nor written from while a read is under way; beside them all is free."""
    first = slow.read(10, 10)
    for start, count in ((10, 10), (0, 11), (19, 5), (14, 1)):
        refused(lambda start=start, count=count: slow.read(start, count), "10")
        refused(written(slow, start, count), "10")
    beside = [slow.read(0, 10), slow.read(20, 5), written(slow, 40, 5)()]
    refused(lambda: slow.read(24, 2), "20")
    until(lambda: all(each.poll() == "DONE" for each in (first, *beside)), slow.far)
    slow.read(10, 10)


def test_bytes_in_quarantine_are_nobody_elses(slow: Pair) -> None:
    """A read that was late still writes: its blocks are refused until `reap` gives them back."""
    late = slow.read(10, 10, timeout=0.05)
    with pytest.raises(TransferError, match="quarantine"):
        late.wait()
    refused(lambda: slow.read(12, 1), "10")
    assert 1 == slow.near.stats().transfers == slow.near.stats().handles
    freed: list[object] = []
    until(lambda: freed or freed.extend(slow.near.reap()), slow.far)
    assert [late] == freed
    slow.read(12, 1)


def test_a_source_in_flight_is_not_written(slow: Pair) -> None:
    """What a write under way still reads is refused to a read."""
    write = written(slow, 10, 10)()
    with pytest.raises(TransferError, match="WRITE 'w'") as caught:
        slow.read(15, 1)
    assert "busy" == caught.value.state
    with pytest.raises(TransferError, match="WRITE 'w'") as caught:
        written(slow, 19, 3)()  # the same bytes of the peer
    assert "busy" == caught.value.state
    until(lambda: write.poll() == "DONE", slow.far)
    slow.read(15, 1)


def test_of_several_none_starts_unless_all_can(slow: Pair) -> None:
    """One of which the bytes are busy, or the ids wrong, keeps the others from being posted."""
    rows = [(0, 512, 1024, 40)]
    local, remote = slow.lists(rows, rows)
    first = slow.read(10, 10)
    free, busy, wrong = np.arange(5), np.arange(19, 21), np.array([40])
    for bad, error in ((busy, TransferError), (wrong, SpecError), (np.arange(4, 6), TransferError)):
        pairs = [(local, free, remote, free), (local, bad, remote, bad)]
        with pytest.raises(error):
            slow.near.move("READ", pairs, request="both", timeout=9)
        assert 1 == slow.near.stats().transfers
    pairs = [(local, ids, remote, ids) for ids in (free, np.arange(30, 40))]
    both = slow.near.move("READ", pairs, request="both", timeout=9)
    until(lambda: all(each.poll() == "DONE" for each in (first, *both)), slow.far)
    assert slow.right(0, 5)
    assert slow.right(30, 10)


def test_what_is_done_is_free_before_anybody_asks() -> None:
    """Blocks are free once a transfer is over, whether or not somebody was told."""
    with NixlRank(polled=True) as near, NixlRank() as far:
        ranks = Pair(near, far)
        ranks.read(0, 1).wait()
        for _ in range(3):
            transfer = ranks.read(0, 10)
            while transfer.state == "PROC":
                transfer.step()  # as the pump does, which would tell
        assert 3 == near.stats().transfers
        assert ["done"] * 3 == [event.kind for event in pumped(near, count=3)]
        assert 0 == near.stats().transfers


def test_a_transfer_that_nobody_holds_is_late_and_freed(slow: Pair) -> None:
    """Its deadline holds, it is counted, and each of its ends is told once."""
    slow.read(0, 10, timeout=0.05)
    assert 1 == slow.near.stats().transfers
    (failed,) = pumped(slow.near)
    assert failed.transfer is not None
    assert failed.transfer.error is not None
    assert ("failed", slow.peer, "timeout") == (
        failed.kind,
        failed.peer,
        failed.transfer.error.state,
    )
    assert 1 == slow.near.stats().handles == failed.transfer.live_handles
    (freed,) = pumped(slow.near, slow.far)
    assert ("freed", failed.transfer) == (freed.kind, freed.transfer)
    assert (0, 0) == (slow.near.stats().transfers, slow.near.stats().handles)
    assert () == slow.near.pump()


def test_an_end_is_told_once() -> None:
    """By whoever saw it first: the transfer's own `wait`, or the pump."""
    with NixlRank(polled=True) as near, NixlRank() as far:
        ranks = Pair(near, far)
        ranks.read(0, 10).wait()
        assert () == near.pump()
        transfer = ranks.read(0, 10)
        assert [Event("done", ranks.peer, transfer)] == pumped(near)
        assert ("DONE", ()) == (transfer.poll(), near.pump())


def test_a_pump_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several long transfers and the inbox get on together, whatever the budget."""
    monkeypatch.setattr(batches, "MAX_DESCRIPTORS", 1)
    with NixlRank(polled=True) as near, NixlRank() as far:
        ranks = Pair(near, far)
        far.connect(near.metadata())
        ranks.read(0, 1).wait()
        transfers = [ranks.read(100 * turn, 50) for turn in range(4)]
        far.notify(near.name, b"hear me")
        near.notify(far.name, b"x")  # and back: what was sent before is here then
        far.wait_notification(b"x", 5)
        step, turns = Transfer.step, []
        monkeypatch.setattr(Transfer, "step", lambda self: (turns.append(self), step(self))[1])
        events = list(near.pump(0))
        assert [("notified", far.name, b"hear me")] == [
            (event.kind, event.peer, event.payload) for event in events
        ]
        while len(events) < 5:
            events += near.pump(0)
        assert transfers * 3 == turns[:12]  # in which no 50 batches end
        assert all(ranks.right(100 * turn, 50) for turn in range(4))


@pytest.mark.parametrize("budget", [-1, float("nan"), None])
def test_a_budget_is_seconds(budget: float) -> None:
    """The budget of a pump and the drain of a close are finite."""
    with NixlRank(polled=True) as rank:
        for call, field in ((rank.pump, "budget"), (rank.close, "drain")):
            with pytest.raises(SpecError) as caught:
                call(budget)
            assert field == caught.value.field


def test_a_pump_waits_no_longer_than_its_budget() -> None:
    """Without events it ends with the budget; with one it ends at once."""
    with NixlRank(polled=True) as near, NixlRank() as far:
        ranks = Pair(near, far)
        began = time.monotonic()
        assert () == near.pump(0.05)
        assert 0.04 < time.monotonic() - began < 2
        ranks.read(0, 10)
        began = time.monotonic()
        assert 1 == len(near.pump(20))
        assert time.monotonic() - began < 10


def test_stats_count_everything(slow: Pair) -> None:
    """What a rank holds is counted; a closed one holds nothing."""
    near, far = slow.near, slow.far
    before = near.stats()
    far.connect(near.metadata())
    far.notify(near.name, b"kept")
    transfer = slow.read(0, 10)

    def wait() -> None:
        with pytest.raises(TransferError, match="closed"):
            near.wait_notification(b"never", 60)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: near.stats().notifications, far)
    assert (
        NixlStats(
            transfers=1,
            handles=1,
            lists=before.lists + 2,
            registrations=2,
            peers=1,
            notifications=1,
            threads=1,
        )
        == near.stats()
    )
    near.close(drain=0)
    thread.join(20)
    assert NixlStats() == near.stats()
    assert "closed" == transfer.state


def test_a_close_drains(slow: Pair) -> None:
    """What is in flight arrives before the rank is gone; what was not posted does not."""
    transfer = slow.read(0, 10)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            slow.far.pump(1e-3)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        slow.near.close(drain=20)
    finally:
        stop.set()
        thread.join()
    assert slow.right(0, 10)
    assert "closed" == transfer.state


def test_no_peer_fills_the_inbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer has its own room, in notifications and in bytes; what did not fit is counted."""
    monkeypatch.setattr(notifications, "MAX_KEPT", 50)
    monkeypatch.setattr(notifications, "MAX_KEPT_BYTES", 10_000)
    with NixlRank() as far, NixlRank(polled=True) as one, NixlRank(polled=True) as other:
        for rank in (one, other):
            rank.connect(far.metadata())
            far.introduce(rank.metadata())
        for _ in range(80):
            one.notify(far.name, b"x")
        other.notify(far.name, bytes(9_999))
        other.notify(far.name, b"yy")
        other.notify(far.name, b"z")
        for rank in (one, other):
            rank.notify(far.name, b"last" * 9)
        until(lambda: far.refused == {one.name: 31, other.name: 2} or hears(far))
        kept = far.notifications()
        assert [b"x"] * 50 == [payload for peer, payload in kept if peer == one.name]
        assert [bytes(9_999), b"z"] == [payload for peer, payload in kept if peer == other.name]


def hears(rank: NixlRank) -> bool:
    """Let *rank* receive what came, and take none of it."""
    with pytest.raises(TransferError, match="never") as caught:
        rank.wait_notification(b"never", 0.01)
    assert "timeout" == caught.value.state
    return False


def test_strangers_are_heard_once_they_are_introduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they sent before waits, in one room for all of them."""
    monkeypatch.setattr(notifications, "MAX_KEPT", 6)
    with NixlRank() as far, NixlRank(polled=True) as one, NixlRank(polled=True) as other:
        for rank in (one, other):
            rank.connect(far.metadata())
            for number in range(4):
                rank.notify(far.name, b"%d" % number)
        until(lambda: (far.stats().notifications, far.refused) == (6, {"": 2}) or hears(far))
        assert [] == far.notifications()
        assert one.name == far.introduce(one.metadata())
        first = far.notifications()
        assert [(one.name, b"%d" % number) for number in range(len(first))] == first
        far.introduce(other.metadata())
        assert 6 == len(first) + len(far.notifications())
        one.notify(far.name, b"heard")
        assert one.name == far.wait_notification(b"heard", 5)
        far.disconnect(one.name)
        one.notify(far.name, b"not any more")
        until(lambda: far.stats().notifications or hears(far))
        assert [] == far.notifications()
        with pytest.raises(TransferError, match="connected") as caught:
            far.disconnect(one.name)
        assert "stale_peer" == caught.value.state
