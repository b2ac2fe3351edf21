"""Test that a transfer cannot use bytes of another one in flight, and that stats are right."""

from __future__ import annotations

import contextlib
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
from notified import notifications

from kvspec.nixl import NixlRank
from kvspec.nixl.rank import NixlStats

pytestmark = pytest.mark.nixl


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Return two ranks over sockets. The far rank makes progress only when it is polled."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with NixlRank() as near, NixlRank(polled=True) as far:
        ranks = Pair(near, far)
        first = ranks.read(1000, 1)
        until(lambda: first.poll() == "DONE", far)
        yield ranks
        until(lambda: not near.stats().transfers, far, near)


def until(condition: Callable[[], Any], *polled: NixlRank) -> None:
    """Poll all transfers of the ranks *polled* until *condition* is true, at most 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        for rank in polled:
            for transfer in rank.transfers:
                with contextlib.suppress(TransferError):
                    transfer.poll()
            notifications(rank)
        time.sleep(1e-3)


def check_busy(start: Callable[[], object], owner: str) -> None:
    """Check that *start* fails, and that the error names the transfer *owner*."""
    with pytest.raises(TransferError, match=f"READ '{owner}'") as caught:
        start()
    assert "busy" == caught.value.state


def writer(ranks: Pair, first: int, count: int) -> Callable[[], object]:
    """Return a call that writes from the blocks into which `Pair.read` reads."""
    rows = [(first * 1024, 512, 1024, count)]
    ids = np.arange(count)
    local, remote = ranks.lists(rows, [(500_000 + first * 1024, 512, 1024, count)])
    return lambda: ranks.near.write(local, ids, remote, ids, request="w", timeout=9)


def test_bytes_in_flight_are_refused_to_other_transfers(slow: Pair) -> None:
    """No transfer may read into or write from these blocks. Other blocks are free."""
    first = slow.read(10, 10)
    for start, count in ((10, 10), (0, 11), (19, 5), (14, 1)):
        check_busy(lambda start=start, count=count: slow.read(start, count), "10")
        check_busy(writer(slow, start, count), "10")
    others = [slow.read(0, 10), slow.read(20, 5), writer(slow, 40, 5)()]
    check_busy(lambda: slow.read(24, 2), "20")
    until(lambda: all(transfer.poll() == "DONE" for transfer in (first, *others)), slow.far)
    slow.read(10, 10)


def test_bytes_in_quarantine_are_refused_to_other_transfers(slow: Pair) -> None:
    """A late read may still write. Its blocks are busy until the read is over."""
    late = slow.read(10, 10, timeout=0.05)
    with pytest.raises(TransferError, match="quarantine"):
        late.wait()
    check_busy(lambda: slow.read(12, 1), "10")
    assert 1 == slow.near.stats().transfers == slow.near.stats().handles
    until(lambda: not slow.near.transfers, slow.far)
    assert late.over
    slow.read(12, 1)


def test_source_in_flight_is_refused_as_a_destination(slow: Pair) -> None:
    """The source of a write in flight cannot be the destination of a read."""
    write = writer(slow, 10, 10)()
    with pytest.raises(TransferError, match="WRITE 'w'") as caught:
        slow.read(15, 1)
    assert "busy" == caught.value.state
    with pytest.raises(TransferError, match="WRITE 'w'") as caught:
        writer(slow, 19, 3)()  # Both writes have the same destination.
    assert "busy" == caught.value.state
    until(lambda: write.poll() == "DONE", slow.far)
    slow.read(15, 1)


def test_move_starts_all_transfers_or_none(slow: Pair) -> None:
    """If one transfer has busy bytes or wrong ids, no other one is posted."""
    rows = [(0, 512, 1024, 40)]
    local, remote = slow.lists(rows, rows)
    first = slow.read(10, 10)
    free, busy, wrong = np.arange(5), np.arange(19, 21), np.array([40])
    for bad, error in ((busy, TransferError), (wrong, SpecError), (np.arange(4, 6), TransferError)):
        pairs = {"a": (local, free, remote, free), "b": (local, bad, remote, bad)}
        with pytest.raises(error):
            slow.near.move(pairs, request="both", timeout=9)
        assert 1 == slow.near.stats().transfers
    several = zip("abc", (free, np.arange(30, 40), np.arange(4, 6)), strict=True)
    pairs = {key: (local, ids, remote, ids) for key, ids in several}
    with pytest.raises(TransferError, match=r"pairs\['a'\] and pairs\['c'\]") as caught:
        slow.near.move(pairs, request="both", timeout=9)
    assert "busy" == caught.value.state
    del pairs["c"]
    both = slow.near.move(pairs, request="both", timeout=9)
    assert {"a": "a", "b": "b"} == {key: transfer.key for key, transfer in both.items()}
    every = first, *both.values()
    until(lambda: all(transfer.poll() == "DONE" for transfer in every), slow.far)
    assert slow.right(0, 5)
    assert slow.right(30, 10)


def test_stats_count_all_objects_of_a_rank(slow: Pair) -> None:
    """After `close`, all counts are 0."""
    near = slow.near
    before = near.stats()
    transfer = slow.read(0, 10, timeout=60)

    def wait() -> None:
        with pytest.raises(TransferError, match="closed"):
            transfer.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    assert (
        NixlStats(
            transfers=1,
            handles=1,
            lists=before.lists + 2,
            registrations=2,
            peers=1,
        )
        == near.stats()
    )
    near.close(drain=0)
    thread.join(20)
    assert NixlStats() == near.stats()
    assert "closed" == transfer.state


def test_close_waits_for_transfers_in_flight(slow: Pair) -> None:
    """Bytes in flight arrive before the rank is closed. The transfer then is "closed"."""
    transfer = slow.read(0, 10)
    stop = threading.Event()

    def poll_far() -> None:
        while not stop.is_set():
            notifications(slow.far)
            time.sleep(1e-3)

    thread = threading.Thread(target=poll_far)
    thread.start()
    try:
        slow.near.close(drain=20)
    finally:
        stop.set()
        thread.join()
    assert slow.right(0, 10)
    assert "closed" == transfer.state
