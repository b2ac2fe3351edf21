"""Test transfers that are paired first and moved later: each starts once, and loses no claim."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lines import Other, between_lines, interrupted_at
from nixl_pair import Pair
from nixl_world import keep

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.nixl import NixlRank, Transfer, transfer
from kvspec.nixl.agent import _ForkedLock
from kvspec.nixl.rank import NixlStats
from kvspec.testing.fake_nixl import FakeFlight, FakeNixl


@pytest.fixture
def pair(net: FakeNixl) -> Iterator[Pair]:
    """Yield two connected ranks. Posted handles stay in flight."""
    net.fate = keep
    with NixlRank(secret=b"") as near, NixlRank(secret=b"") as far:
        yield Pair(near, far)


def paired(pair: Pair, first: int, count: int = 4, name: str = "x") -> dict[int, Transfer]:
    """Pair the read of *count* blocks of 512 bytes. See `Pair.read`."""
    rows = [(first * 1024, 512, 1024, count)]
    local, remote = pair.lists(rows, rows)
    ids = np.arange(count)
    return pair.near.pair({0: (local, ids, remote, ids)}, request=name)


def started(pair: Pair, made: dict[int, Transfer], timeout: float = 10.0) -> Transfer:
    """Start what `paired` returned."""
    return pair.near.move(made, request="moved", timeout=timeout)[0]


def land(net: FakeNixl) -> None:
    """Let all handles in flight end."""
    for flight in net.moving:
        flight.land()


def owners(rank: NixlRank) -> int:
    """Return the number of transfers whose bytes are busy."""
    places = rank._in_flight._busy._places.values()
    return len({owner for place in places for owner in place.claims})


def test_paired_transfer_moves_once(net: FakeNixl, pair: Pair) -> None:
    """A second start would return "DONE" without moving anything."""
    made = paired(pair, 0)
    moved = started(pair, made)
    moved.poll()
    for _ in range(2):
        with pytest.raises(SpecError) as caught:
            started(pair, made)
        assert "pairs" == caught.value.field
        assert (moved,) == pair.near.transfers or not net.moving
        land(net)
    moved.wait()
    assert pair.right(0, 4)
    plain = pair.read(8, 4)
    with pytest.raises(SpecError):
        started(pair, {0: plain})


def test_paired_transfer_under_two_keys_is_refused(pair: Pair) -> None:
    made = paired(pair, 0)[0]
    with pytest.raises(SpecError):
        pair.near.move({1: made, 2: made}, request="x", timeout=5.0)
    assert () == pair.near.transfers
    assert 4 == len(started(pair, {0: made}).pairs.local_ids)


def test_move_refuses_transfers_of_another_rank(pair: Pair) -> None:
    made = paired(pair, 0)
    with NixlRank(secret=b"") as third, pytest.raises(SpecError):
        third.move(made, request="x", timeout=5.0)
    assert "PROC" == started(pair, made).poll()


def test_paired_transfer_posts_nothing_before_it_is_moved(net: FakeNixl, pair: Pair) -> None:
    """Its bytes are not busy, so another transfer could write them at the same time."""
    made = paired(pair, 0)
    for call in (made[0].poll, made[0].wait):
        with pytest.raises(SpecError) as caught:
            call()
        assert "transfer" == caught.value.field
    assert [] == net.moving
    assert 0 == pair.near.stats().transfers


@pytest.mark.parametrize(
    ("pairs", "request_id", "field"),
    [(3, "x", "pairs"), ({0: 3}, "x", "pairs"), ({}, 5, "request")],
)
def test_pair_checks_its_arguments(pair: Pair, pairs: Any, request_id: Any, field: str) -> None:
    with pytest.raises(SpecError) as caught:
        pair.near.pair(pairs, request=request_id)
    assert field == caught.value.field
    with pytest.raises(SpecError):
        pair.near.pair(paired(pair, 0), request="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2])
def test_pair_in_a_forked_child_raises_forked(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Another thread may have held the lock of the claims when the process was forked."""
    rows = [(0, 512, 1024, 4)]
    local, remote = pair.lists(rows, rows)
    agent, claims, some = pair.near._agent, pair.near._in_flight._claiming, np.arange(count)
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with claims:
            locked.set()
            done.wait(10)

    other = threading.Thread(target=hold)
    other.start()
    locked.wait(10)
    with monkeypatch.context() as patch:
        patch.setattr(agent, "lock", _ForkedLock(agent.name))
        sides = {key: (local, some[key:][:1], remote, some[key:][:1]) for key in range(count)}
        try:
            with pytest.raises(TransferError) as caught:
                pair.near.pair(sides, request="x")
        finally:
            done.set()
            other.join()
    assert "forked" == caught.value.state


def test_transfer_that_has_ended_stays_so_after_close(net: FakeNixl, pair: Pair) -> None:
    done, late = pair.read(0, 4), pair.read(4, 4)
    net.moving[0].land()
    assert "DONE" == done.poll()
    late.cancel("the test stops it", TransferState.CANCELLED)
    pair.near.close(drain=0)
    done.wait()
    assert "DONE" == done.poll() == done.state
    with pytest.raises(TransferError) as caught:
        late.wait()
    assert "cancelled" == caught.value.state == late.state


def test_move_names_a_paired_transfer_and_sets_its_deadline(pair: Pair) -> None:
    moved = started(pair, paired(pair, 0), timeout=0.0)
    with pytest.raises(TransferError) as caught:
        moved.poll()
    assert ("overdue", "moved", 0) == (caught.value.state, caught.value.request, moved.handles)


def test_move_blames_the_transfer_that_starts(pair: Pair) -> None:
    """The other one moves already. It started alone, so its bytes are claimed only now."""
    rows = [(0, 512, 1024, 4)]
    (local, remote), ids = pair.lists(rows, rows), np.arange(2)
    both = {n: (local, ids + 2 * n, remote, ids + 2 * n) for n in range(2)}
    made = pair.near.pair(both, request="late")
    first = pair.read(0, 4)
    with pytest.raises(TransferError) as caught:
        pair.near.move(made, request="late", timeout=5.0)
    assert ("busy", "late") == (caught.value.state, caught.value.request)
    assert (first,) == pair.near.transfers


def test_transfer_that_ends_while_another_is_paired_leaves_no_claim(
    net: FakeNixl, pair: Pair
) -> None:
    """`pair` claims the bytes of a transfer in flight. At any line, another thread ends it."""
    for place in range(0, 130, 3):
        first = pair.read(0, 40)  # Alone, so it is not claimed yet.

        def end(first: Transfer = first) -> None:
            land(net)
            first.poll()

        other = Other(end)
        with between_lines(other.at(place), transfer):
            paired(pair, 50)
        other.join()
        assert "DONE" == first.poll()
        del first, other, end
        last = [pair.read(100, 4), pair.read(200, 4)]
        assert (2, 2) == (owners(pair.near), len(pair.near.transfers))
        land(net)
        for moved in last:
            moved.wait()
        assert () == pair.near.transfers


@pytest.mark.parametrize("by_pair", [False, True])
def test_one_of_two_threads_moves_the_same_bytes(net: FakeNixl, pair: Pair, by_pair: bool) -> None:
    """At any line of `pair` and `move`, another thread starts a transfer of the same bytes."""
    for place in range(0, 130, 3):
        begun = [pair.read(0, 40)]

        def begin(begun: list[Transfer] = begun) -> None:
            with contextlib.suppress(TransferError):
                begun.append(started(pair, paired(pair, 48)) if by_pair else pair.read(48, 4))

        other = Other(begin)
        with contextlib.suppress(TransferError), between_lines(other.at(place), transfer):
            begun.append(started(pair, paired(pair, 50)))
        other.join()
        assert 2 == len(begun)
        with pytest.raises(TransferError):  # Both would write blocks 50 and 51.
            pair.read(50, 2)
        land(net)
        net.fate = FakeFlight.land
        for moved in begun:
            moved.wait()
        net.fate = keep
        assert () == pair.near.transfers


def test_paired_transfers_that_never_start_leave_nothing(net: FakeNixl, pair: Pair) -> None:
    moving = pair.read(0, 4)
    rows = [(100 * 1024, 512, 1024, 40)]
    (local, remote), ids = pair.lists(rows, rows), np.arange(40)
    for _ in range(1000):
        pair.near.pair({0: (local, ids, remote, ids)}, request="dropped")
    assert owners(pair.near) <= 2
    assert (moving,) == pair.near.transfers
    assert 1 == pair.near.stats().transfers


def test_interrupt_of_move_leaves_bytes_busy_only_while_they_move(
    net: FakeNixl, pair: Pair
) -> None:
    moving = pair.read(0, 4)
    place, reached = 0, True
    while reached:
        made = paired(pair, 50)
        reached, _ = interrupted_at(place, lambda made=made: started(pair, made), transfer)
        known = [each for each in pair.near.transfers if each is not moving]
        assert [made[0]] * made[0].started == known
        if known:
            made[0].poll()
            with pytest.raises(TransferError):
                pair.read(50, 4)
            net.moving[-1].land()
            made[0].wait()
        else:
            moved = started(pair, made)
            moved.poll()
            net.moving[-1].land()
            moved.wait()
        place += 1
    assert place > 20
    land(net)
    moving.wait()
    assert NixlStats(lists=pair.near.stats().lists, registrations=2, peers=1) == pair.near.stats()
