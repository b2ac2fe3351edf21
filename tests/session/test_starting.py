"""A load starts without the lock of its session, and without work in the caller's thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from tickets_kept import ASKED, LEASE, kept, ticket_of
from two_engines import Side, engine, freed, request, until

from kvspec.errors import MismatchError, SpecError, TransferError
from kvspec.session import Load, Session, new_remote_id
from kvspec.session.loads import Loads
from kvspec.testing import FakeNixl

OTHER = request("other", tokens=4, producer_blocks={"full": [5], "window": [5]},
                consumer_blocks={"full": [6], "window": [6]})  # fmt: skip


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """Yield two engines of one rank that are connected. Leases are short."""
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False, lease=LEASE, background=True) as producer,
        Side("D", engine(1), polled=True, heartbeat=LEASE / 4, background=True) as consumer,
    ):
        consumer.connect(producer)
        yield producer, consumer


class Slow:
    """Stops each selection until it is told to go on. Records the threads that select."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str = "r") -> None:
        self.reached, self.goes_on = threading.Event(), threading.Event()
        self.threads: list[str] = []
        prepare = Loads.prepare

        def slow(loads: Loads, load: Load, remote: Any) -> Any:
            if load.request.request_id == name:
                self.threads.append(threading.current_thread().name)
                self.reached.set()
                assert self.goes_on.wait(20.0)
            return prepare(loads, load, remote)

        patch.setattr(Loads, "prepare", slow)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """Yield the control of selections of the request "r"."""
    control = Slow(monkeypatch)
    yield control
    control.goes_on.set()


def loaded(load: Load) -> bool:
    """Whether *load* has ended, without an error."""
    if load.error is not None:
        raise load.error
    return load.state == "done"


def test_load_of_a_ticket_returns_before_its_data_is_selected(
    sides: tuple[Side, Side], slow: Slow
) -> None:
    producer, consumer = sides
    producer.fill(ASKED)
    consumer.spoil(ASKED)
    load = consumer.first.load(ASKED, ticket=ticket_of(producer), timeout=20.0)
    assert slow.reached.wait(5.0)
    assert "moving" == load.poll()
    slow.goes_on.set()
    until(lambda: loaded(load))
    assert ["kvspec-loads"] == slow.threads
    assert [] == consumer.wrong(ASKED)


@pytest.mark.parametrize("by_ticket", [True, False])
def test_selection_of_a_load_delays_nothing_else(
    sides: tuple[Side, Side], slow: Slow, by_ticket: bool
) -> None:
    """Other loads are done meanwhile, and heartbeats keep a prompt for many leases."""
    producer, consumer = sides
    queued, held = ticket_of(producer, "queued"), new_remote_id("r")
    producer.hold(held, lease=30.0)
    kept(consumer, queued)
    ticket = ticket_of(producer)
    given: dict[str, Any] = {"ticket": ticket} if by_ticket else {"remote_id": held}
    if by_ticket:
        kept(consumer, ticket)
    found: list[Load] = []
    starts = threading.Thread(
        target=lambda: found.append(consumer.first.load(ASKED, timeout=20.0, **given))
    )
    starts.start()
    assert slow.reached.wait(5.0)
    other = new_remote_id("other")
    producer.hold(other)
    small = consumer.first.load(OTHER, remote_id=other, timeout=5.0)
    until(lambda: loaded(small))
    done = threading.Event()
    done.wait(3 * LEASE)
    assert queued.remote_id in producer.first.held
    slow.goes_on.set()
    starts.join(5.0)
    until(lambda: loaded(found[0]))


def test_wrong_request_is_refused_by_the_call_of_load(sides: tuple[Side, Side]) -> None:
    """The producer is connected, so the caller learns it at once. Nothing is posted or open."""
    producer, consumer = sides
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    wrong = request(consumer_blocks={"full": [1], "window": [1]})
    with pytest.raises((SpecError, MismatchError)):
        consumer.first.load(wrong, remote_id=remote_id, timeout=5.0)
    assert 0 == consumer.first.stats().loads
    load = consumer.first.load(ASKED, remote_id=remote_id, timeout=5.0)
    until(lambda: loaded(load))


def test_polls_of_the_caller_move_nothing(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background thread does it, whatever the caller calls."""
    producer, consumer = sides
    threads = set[str]()
    polled = Session._poll

    def recorded(session: Session) -> None:
        threads.add(threading.current_thread().name)
        polled(session)

    monkeypatch.setattr(Session, "_poll", recorded)
    loads = []
    for number in range(5):
        load = consumer.first.load(ASKED, ticket=ticket_of(producer, f"p{number}"), timeout=9.0)
        until(lambda load=load: (load.poll(), consumer.first.settled())[0] == "done", consumer)
        loads.append(load)
    assert loads[-1].wait(1.0)
    assert ["p0", "p1", "p2", "p3", "p4"] == freed(5, producer)
    assert threading.current_thread().name not in threads


def test_load_that_is_cancelled_while_it_is_selected_is_declined(
    sides: tuple[Side, Side], slow: Slow
) -> None:
    """Its blocks are free at once, and the producer learns it before the lease is over."""
    producer, consumer = sides
    remote_id = new_remote_id("p")
    producer.hold(remote_id, lease=30.0)
    ticket = ticket_of(producer)
    for one in consumer.sessions.values():
        one.keep(ticket, timeout=30.0)
    load = consumer.first.load(ASKED, ticket=ticket, timeout=20.0)
    assert slow.reached.wait(5.0)
    load.cancel()
    assert "failed" == load.state
    other = consumer.first.load(request("again"), remote_id=remote_id, timeout=5.0)
    until(lambda: loaded(other))
    assert ticket.remote_id in producer.first.held  # It is kept until the selection ends.
    slow.goes_on.set()
    until(lambda: ticket.remote_id not in producer.first.held)
    assert {} == load.undefined_blocks


def test_engine_that_is_connected_again_while_a_load_is_selected_is_read_anew(
    sides: tuple[Side, Side], slow: Slow
) -> None:
    """The first selection names lists that are released by then."""
    producer, consumer = sides
    producer.fill(ASKED)
    consumer.spoil(ASKED)
    remote_id = new_remote_id("r")
    producer.hold(remote_id, lease=30.0)
    found: list[Load] = []
    starts = threading.Thread(
        target=lambda: found.append(consumer.first.load(ASKED, remote_id=remote_id, timeout=20.0))
    )
    starts.start()
    assert slow.reached.wait(5.0)
    consumer.first.connect(producer.other_introductions)
    slow.goes_on.set()
    starts.join(5.0)
    until(lambda: loaded(found[0]))
    assert 2 == len(slow.threads)
    assert [] == consumer.wrong(ASKED)


def test_engine_that_is_disconnected_while_a_load_is_selected_fails_the_load(
    sides: tuple[Side, Side], slow: Slow
) -> None:
    producer, consumer = sides
    load = consumer.first.load(ASKED, ticket=ticket_of(producer), timeout=20.0)
    assert slow.reached.wait(5.0)
    consumer.first.disconnect("P")
    slow.goes_on.set()
    with pytest.raises(TransferError) as caught:
        load.wait(5.0)
    assert "gone" == caught.value.state


def test_session_that_is_closed_while_a_load_is_selected_ends(
    sides: tuple[Side, Side], slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    """`close` waits for the selection only as long as for bytes."""
    producer, consumer = sides
    load = consumer.first.load(ASKED, ticket=ticket_of(producer), timeout=20.0)
    assert slow.reached.wait(5.0)
    consumer.first.close(drain=0.1)
    with pytest.raises(TransferError) as caught:
        load.wait(5.0)
    assert "closed" == caught.value.state
    slow.goes_on.set()
    consumer.first._starting.close(5.0)
    assert [] == [each for each in caplog.records if each.exc_info is not None]


def test_second_load_of_one_id_is_refused_while_the_first_is_selected(
    sides: tuple[Side, Side], slow: Slow
) -> None:
    producer, consumer = sides
    load = consumer.first.load(ASKED, ticket=ticket_of(producer), timeout=20.0)
    assert slow.reached.wait(5.0)
    with pytest.raises(SpecError) as caught:
        consumer.first.load(ASKED, ticket=ticket_of(producer, "q"), timeout=20.0)
    assert "request_id" == caught.value.field
    slow.goes_on.set()
    until(lambda: loaded(load))


def test_loads_of_one_block_conflict_also_if_both_are_selected(
    sides: tuple[Side, Side], slow: Slow
) -> None:
    """The one that starts first has the blocks. The other one fails with "busy"."""
    producer, consumer = sides
    first = consumer.first.load(ASKED, ticket=ticket_of(producer), timeout=20.0)
    assert slow.reached.wait(5.0)
    other = attrs.evolve(ASKED, request_id="s")
    second = consumer.first.load(other, ticket=ticket_of(producer, "q"), timeout=20.0)
    slow.goes_on.set()
    until(lambda: "moving" not in (first.state, second.state))
    states = [None if load.error is None else load.error.state for load in (first, second)]
    assert states in ([None, None], [None, "busy"])
