"""Calls about one ticket that come at the same time as other calls about it, or out of order."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from tickets_kept import ASKED, LEASE, ticket_of
from two_engines import Side, engine, land, until

from kvspec.errors import TransferError
from kvspec.session.loads import Loads
from kvspec.testing import FakeNixl


@pytest.fixture
def sides(net: FakeNixl) -> Iterator[tuple[Side, Side]]:
    """Yield two engines of one rank that are not connected. Leases of tickets are long."""
    with (
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True, background=True) as consumer,
    ):
        yield producer, consumer


def delayed(side: Side, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the thread that connects wait for the event."""
    goes_on, known = threading.Event(), side.first._remotes
    connect = known._connect

    def later(*given: Any) -> Any:
        goes_on.wait(20.0)
        return connect(*given)

    monkeypatch.setattr(known, "_connect", later)
    return goes_on


def renamed(name: str) -> Any:
    return attrs.evolve(ASKED, request_id=name)


def test_load_that_was_cancelled_does_not_decline_the_ticket_of_the_next(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted request is admitted again, while its producer is still being connected."""
    producer, consumer = sides
    goes_on = delayed(consumer, monkeypatch)
    ticket = ticket_of(producer, lease=30.0)
    producer.fill(ASKED)
    consumer.spoil(ASKED)
    first = consumer.first.load(renamed("r1"), ticket=ticket, timeout=20.0)
    first.cancel()
    second = consumer.first.load(renamed("r2"), ticket=ticket, timeout=20.0)
    goes_on.set()
    until(lambda: second.poll() != "moving")
    assert second.error is None
    assert [] == consumer.wrong(ASKED)
    until(lambda: not producer.first.held)
    assert 0 == consumer.first.stats().counters.declines


def test_two_cancelled_loads_decline_their_ticket(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = sides
    goes_on = delayed(consumer, monkeypatch)
    ticket = ticket_of(producer, lease=60.0)
    for name in ("r1", "r2"):
        consumer.first.load(renamed(name), ticket=ticket, timeout=20.0).cancel()
    goes_on.set()
    until(lambda: not producer.first.held)
    until(lambda: not consumer.first.stats().errands)


def test_decline_beside_a_load_whose_bytes_still_move_is_sent_once(
    net: FakeNixl, sides: tuple[Side, Side]
) -> None:
    """The load informs the producer when it ends."""
    producer, consumer = sides
    # The byte that proves a connection lands.
    net.fate = lambda flight: flight.land() if len(flight.copies) == 1 else None
    ticket = ticket_of(producer, lease=60.0)
    load = consumer.first.load(ASKED, ticket=ticket, timeout=9.0)
    until(lambda: load.in_flight and net.moving)
    load.cancel()
    consumer.first.decline(ticket=ticket)
    assert 0 == consumer.first.stats().errands
    land(net)
    until(lambda: not producer.first.held)


def test_tickets_of_a_producer_that_has_moved_share_a_thread_for_each_address(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads of old and new tickets come in turns, while neither address answers."""
    producer, consumer = sides
    goes_on = delayed(consumer, monkeypatch)
    new = ticket_of(producer, lease=60.0)
    old, before = attrs.evolve(new, addresses=("127.0.0.1:9",)), {*threading.enumerate()}
    for number in range(3):
        for ticket in (old, new):
            asked = renamed(f"r{number} {ticket.addresses}")
            consumer.first.load(asked, ticket=ticket, timeout=20.0)
    threads = {*threading.enumerate()} - before
    goes_on.set()
    assert ["kvspec-connect-P"] * 2 == [thread.name for thread in threads]


def test_unexpected_error_of_connecting_breaks_no_poll(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = sides
    known, connect, calls = consumer.first._remotes, consumer.first._remotes._connect, []

    def fails(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise OSError("too many open files")
        return connect(*given)

    monkeypatch.setattr(known, "_connect", fails)
    ticket = ticket_of(producer, lease=60.0)
    consumer.first.decline(ticket=ticket)
    until(lambda: not producer.first.held)
    assert 2 == len(calls)
    assert [] == [record for record in caplog.records if record.exc_info]


def test_process_without_threads_fails_its_load_and_tries_again(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = sides
    ticket = ticket_of(producer, lease=60.0)

    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("kvspec-connect"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        load = consumer.first.load(ASKED, ticket=ticket, timeout=9.0)
        until(lambda: load.poll() != "moving")
        assert isinstance(load.error, TransferError)
        assert "unavailable" == load.error.state
    until(lambda: not producer.first.held)


def test_load_that_begins_while_its_session_closes_has_ended_after_close(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler's thread calls `load` between two polls of `close`."""
    producer, consumer = sides
    ticket, one = ticket_of(producer, lease=60.0), consumer.first
    move, late = Loads.move, list[Any]()
    closing = threading.Event()

    def slow(loads: Loads) -> None:
        move(loads)
        if loads is one._loads and closing.is_set() and not late:
            late.append(None)
            threading.Thread(target=begin).start()

    def begin() -> None:
        try:
            late[0] = one.load(ASKED, ticket=ticket, timeout=60.0)
        except TransferError as error:
            late[0] = error

    monkeypatch.setattr(Loads, "move", slow)
    delayed(consumer, monkeypatch)
    blocked = one.load(renamed("r0"), ticket=ticket, timeout=60.0)
    closing.set()
    one.close(drain=LEASE)
    until(lambda: late and late[0] is not None)
    assert "failed" == blocked.state
    if not isinstance(late[0], TransferError):
        assert "failed" == late[0].state
    else:
        assert "closed" == late[0].state
    assert 0 == one.stats().loads


def test_poll_looks_at_no_errand_before_one_is_due(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer that is gone leaves thousands of them, and polls are frequent."""
    producer, consumer = sides
    goes_on, one = delayed(consumer, monkeypatch), consumer.first
    looks = []

    class Counted(dict[Any, Any]):
        def items(self) -> Any:
            looks.append(len(self))
            return super().items()

    one._loads.errands._errands = Counted()
    tickets = [ticket_of(producer, f"p{number}", lease=60.0) for number in range(9)]
    for ticket in tickets:
        one.keep(ticket, timeout=60.0)
    one._poll_now()
    looks.clear()
    for _ in range(99):
        one._poll_now()
    assert [] == looks
    for ticket in tickets:
        one.decline(ticket=ticket)
    goes_on.set()
    until(lambda: not producer.first.held)
    until(lambda: not one.stats().errands)


def test_load_waits_while_its_producer_is_connected_again(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data was being selected for the connection before, which is lost."""
    producer, consumer = sides
    one, prepare, begun = consumer.first, Loads.prepare, threading.Event()
    goes_on, connecting, connects = threading.Event(), threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        begun.set()
        goes_on.wait(20.0)
        return prepare(*given)

    monkeypatch.setattr(Loads, "prepare", slow)
    ticket = ticket_of(producer, lease=60.0)
    producer.fill(ASKED)
    consumer.spoil(ASKED)
    load = one.load(ASKED, ticket=ticket, timeout=20.0)
    assert begun.wait(20.0)
    connect_all = one.nixl.connect_all

    def later(*given: Any) -> Any:
        connecting.set()
        connects.wait(20.0)
        return connect_all(*given)

    monkeypatch.setattr(one.nixl, "connect_all", later)
    one._remotes.find("P").must_reconnect = True
    one.keep(ticket_of(producer, "other", lease=60.0), timeout=60.0)
    assert connecting.wait(20.0)
    goes_on.set()
    until(lambda: load.error or one._loads.waiting)
    connects.set()
    until(lambda: load.poll() != "moving")
    assert load.error is None
    assert [] == consumer.wrong(ASKED)


def test_old_attempt_ends_although_a_ticket_names_the_producer_at_other_addresses(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer was disconnected in between."""
    producer, consumer = sides
    goes_on, one, ticket = delayed(consumer, monkeypatch), consumer.first, ticket_of(producer)
    before = one.load(renamed("r1"), ticket=ticket, timeout=20.0)
    assert before.connection is not None
    attempt = before.connection.future
    one.disconnect("P")
    moved = attrs.evolve(ticket, addresses=("127.0.0.1:9",))
    after = one.load(renamed("r2"), ticket=moved, timeout=20.0)
    goes_on.set()
    until(attempt.done)
    error = attempt.exception()
    assert isinstance(error, TransferError)
    assert ("cancelled", 0) == (error.state, one.stats().engines)
    after.cancel()


def test_load_that_waited_too_long_ends_with_timeout_when_another_load_begins(
    net: FakeNixl,
) -> None:
    """No poll came between its deadline and the call."""
    now = 0.0
    with (
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True, clock=lambda: now) as consumer,
    ):
        one, ticket = consumer.first, ticket_of(producer, lease=60.0)
        one._remotes._poll = lambda: None
        load = one.load(renamed("r1"), ticket=ticket, timeout=5.0)
        assert load.connection is not None
        load.connection.future.result(20.0)
        now = 9.0
        one.load(renamed("r2"), ticket=ticket, timeout=5.0)
        assert load.error is not None
        assert "timeout" == load.error.state
    assert not net.moving
