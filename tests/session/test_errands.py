"""Tests of kept and declined tickets: what a rank does for a prompt before it loads it."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from tickets_kept import ASKED, LEASE, connect_by_ticket, kept, ticket_of
from two_engines import Side, engine, freed, land, let_nothing_land, until

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.session import errands, session
from kvspec.session.loads import Loads
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeFlight


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """Yield two engines of two ranks that are not connected. Leases are short."""
    with (
        FakeNixl(),
        Side("P", engine(2), polled=False, lease=LEASE, background=True) as producer,
        Side("D", engine(2), polled=True, heartbeat=LEASE / 4, background=True) as consumer,
    ):
        yield producer, consumer


@pytest.fixture
def known(sides: tuple[Side, Side]) -> tuple[Side, Side]:
    """Return the two engines after the consumer has connected the producer."""
    connect_by_ticket(sides[1], sides[0])
    return sides


def test_kept_prompt_is_loadable_long_after_its_lease(known: tuple[Side, Side]) -> None:
    """The queue of the consumer takes four leases. Afterwards every byte arrives."""
    producer, consumer = known
    ticket = ticket_of(producer)
    producer.fill(ASKED)
    consumer.spoil(ASKED)
    kept(consumer, ticket)
    kept(consumer, ticket)
    time.sleep(4 * LEASE)
    assert all(one.held for one in producer.sessions.values())
    loads = [one.load(ASKED, ticket=ticket, timeout=9.0) for one in consumer.sessions.values()]
    until(lambda: all(load.poll() != "moving" for load in loads), producer)
    assert [None, None] == [load.error for load in loads]
    assert [] == consumer.wrong(ASKED)
    assert ["p", "p"] == freed(2, producer)
    assert [0, 0] == [one.stats().errands for one in consumer.sessions.values()]


def test_prompt_that_nobody_keeps_is_free_after_its_lease(sides: tuple[Side, Side]) -> None:
    producer, _ = sides
    ticket_of(producer)
    until(lambda: not any(one.held for one in producer.sessions.values()), producer)


def test_kept_prompt_that_is_declined_is_free_at_once(known: tuple[Side, Side]) -> None:
    """The first lease is longer than the test waits."""
    producer, consumer = known
    ticket, every = ticket_of(producer, lease=60.0), list(consumer.sessions.values())
    before = [one.stats().counters.messages_received for one in every]
    kept(consumer, ticket)
    until(lambda: all(one.stats().counters.messages_received > count
                      for one, count in zip(every, before, strict=True)))  # fmt: skip
    for one in consumer.sessions.values():
        one.decline(ticket=ticket)
    until(lambda: not any(one.held for one in producer.sessions.values()), producer)
    assert all("done" in repr(one.settled()) for one in producer.sessions.values())


def test_kept_prompt_is_declined_when_its_time_is_over(known: tuple[Side, Side]) -> None:
    producer, consumer = known
    ticket = ticket_of(producer)
    kept(consumer, ticket, timeout=2 * LEASE)
    until(lambda: not any(one.held for one in producer.sessions.values()), producer)
    until(lambda: not any(one.stats().errands for one in consumer.sessions.values()))
    assert all(ticket.remote_id in one.settled().done for one in producer.sessions.values())


def test_prompt_of_a_consumer_that_has_ended_is_free_after_one_lease(
    known: tuple[Side, Side],
) -> None:
    producer, consumer = known
    ticket = ticket_of(producer)
    kept(consumer, ticket)
    time.sleep(2 * LEASE)
    consumer.close()
    begun = time.monotonic()
    until(lambda: not any(one.held for one in producer.sessions.values()), producer)
    assert 2 * LEASE > time.monotonic() - begun


def test_load_after_an_abort_of_a_kept_prompt_fails_with_gone(known: tuple[Side, Side]) -> None:
    """The answer `gone` ends the heartbeats, and the load learns the reason."""
    producer, consumer = known
    ticket = ticket_of(producer)
    kept(consumer, ticket)
    time.sleep(LEASE)
    for one in producer.sessions.values():
        one.abort(ticket.remote_id)
    until(lambda: not any(one.stats().errands for one in consumer.sessions.values()), consumer)
    load = consumer.first.load(ASKED, ticket=ticket, timeout=9.0)
    until(lambda: load.poll() != "moving", producer)
    assert load.error is not None
    assert "gone" == load.error.state


def test_answer_to_a_decline_does_not_end_a_later_keep(net: FakeNixl) -> None:
    """It ends the decline, which would be repeated otherwise."""
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=True) as consumer,
    ):
        one = consumer.first
        ticket = ticket_of(producer, lease=60.0)
        one.decline(ticket=ticket)
        until(lambda: not one.stats().errands, producer, consumer)
        until(lambda: not one.stats().loads, producer, consumer)
        other = ticket_of(producer, "other", lease=60.0)
        producer.first.abort(other.remote_id)
        one.decline(ticket=other)
        consumer.poll()
        one.keep(other, timeout=60.0)
        consumer.poll()
        assert (1, 1) == (one.stats().loads, one.stats().errands)
        until(lambda: not one.stats().loads, producer, consumer, seconds=2.0)


def test_decline_is_tried_again_until_the_producer_can_be_reached(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempts find nobody at the address: the network was cut."""
    monkeypatch.setattr(session, "TICKET_ABSENT", 0.1)
    monkeypatch.setattr(errands, "FIRST_PAUSE", 0.05)
    producer, consumer = sides
    ticket = ticket_of(producer)
    one = consumer.first
    connect, failures = one._remotes._connect, []

    def cut(*given: object) -> object:
        if len(failures) < 2:
            failures.append(given)
            raise TransferError("the network is cut", state=TransferState.TIMEOUT)
        return connect(*given)

    monkeypatch.setattr(one._remotes, "_connect", cut)
    for each in producer.sessions.values():
        each.abort(ticket.remote_id)  # Held for the answers of its readers, not for the lease.
    for each in consumer.sessions.values():
        each.decline(ticket=ticket)
    until(lambda: one.stats().errands == 0, producer)
    assert 2 == len(failures)
    assert 0 == one.stats().counters.declines_lost


def test_decline_that_is_never_delivered_is_logged_and_counted(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "TICKET_ABSENT", 0.1)
    monkeypatch.setattr(errands, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(errands, "LONGEST_DECLINE", 0.5)
    producer, consumer = sides
    ticket = attrs.evolve(ticket_of(producer), engine_id="nobody", addresses=("127.0.0.1:9",))
    with caplog.at_level(logging.WARNING):
        consumer.first.decline(ticket=ticket)
        until(lambda: consumer.first.stats().errands == 0, producer)
    assert 1 == consumer.first.stats().counters.declines_lost
    (record,) = [each for each in caplog.records if "not declined" in each.message]
    assert "nobody at 127.0.0.1:9" in record.message


def test_silent_producer_delays_no_other(sides: tuple[Side, Side]) -> None:
    """It accepts connections and never answers, as a stopped process does."""
    producer, consumer = sides
    ticket = ticket_of(producer, lease=30.0)
    producer.fill(ASKED)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        stuck = attrs.evolve(ticket_of(producer, "q"), engine_id="stuck", addresses=(address,))
        kept(consumer, stuck)
        until(lambda: consumer.first.channel.reaches(address))  # type: ignore[attr-defined]
        begun = time.monotonic()
        loads = [one.load(ASKED, ticket=ticket, timeout=9.0) for one in consumer.sessions.values()]
        until(lambda: all(load.poll() != "moving" for load in loads), producer)
        assert [None, None] == [load.error for load in loads]
        assert 5.0 > time.monotonic() - begun


def test_load_of_a_kept_prompt_that_is_cancelled_frees_it_at_once(
    sides: tuple[Side, Side],
) -> None:
    producer, consumer = sides
    ticket = ticket_of(producer, lease=30.0)
    kept(consumer, ticket)
    loads = [one.load(ASKED, ticket=ticket, timeout=9.0) for one in consumer.sessions.values()]
    for load in loads:
        load.cancel()
    until(lambda: not any(one.held for one in producer.sessions.values()), producer)
    assert [0, 0] == [one.stats().errands for one in consumer.sessions.values()]


def test_prompt_that_one_rank_keeps_is_free_after_a_lease(known: tuple[Side, Side]) -> None:
    """The other rank neither reads nor declines. The first one stops to keep it."""
    producer, consumer = known
    ticket = ticket_of(producer)
    consumer.first.keep(ticket, timeout=3 * LEASE)
    time.sleep(2 * LEASE)
    assert ticket.remote_id in producer.first.held
    until(lambda: not any(one.held for one in producer.sessions.values()), producer)


@pytest.mark.parametrize("call", ["decline", "keep"])
def test_call_beside_a_load_of_the_ticket_does_not_end_the_load(
    call: str,
) -> None:
    """The scheduler calls twice, or too late. The reads take two leases."""
    with (
        FakeNixl() as net,
        Side("P", engine(1), polled=False, lease=LEASE, background=True) as producer,
        Side("D", engine(1), polled=True, heartbeat=LEASE / 4, background=True) as consumer,
    ):
        producer.fill(ASKED)
        consumer.spoil(ASKED)
        connect_by_ticket(consumer, producer)
        ticket, one = ticket_of(producer), consumer.first
        one.keep(ticket, timeout=LEASE)
        let_nothing_land(net)
        load = one.load(ASKED, ticket=ticket, timeout=9.0)
        until(lambda: net.moving)
        if call == "decline":
            one.decline(ticket=ticket)
        else:
            one.keep(ticket, timeout=LEASE / 2)
        time.sleep(2 * LEASE)
        assert "moving" == load.poll()
        assert ticket.remote_id in producer.first.held
        net.fate = FakeFlight.land
        land(net)
        assert load.wait(9.0)
        assert [] == consumer.wrong(ASKED)
        assert 0 == one.stats().errands


def test_prompt_stays_kept_while_its_load_waits(
    known: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of `keep` ends before the data is selected. The load has a time of its own."""
    producer, consumer = known
    one, waits = consumer.first, threading.Event()
    prepare = Loads.prepare

    def slow(loads: Loads, *given: Any) -> Any:
        waits.wait(20.0)
        return prepare(loads, *given)

    monkeypatch.setattr(Loads, "prepare", slow)
    ticket = ticket_of(producer)
    kept(consumer, ticket, timeout=LEASE)
    loads = [one.load(ASKED, ticket=ticket, timeout=9.0) for one in consumer.sessions.values()]
    time.sleep(3 * LEASE)
    assert all(one.held for one in producer.sessions.values())
    waits.set()
    assert all(load.wait(9.0) for load in loads)
    assert 0 == one.stats().errands


def test_heartbeat_that_waits_while_its_producer_is_stopped_extends_the_lease() -> None:
    """Another process had the CPU. The blocks are not free yet when the producer continues."""
    now = [0.0]
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False, lease=2.0, clock=lambda: now[0]) as producer,
        Side("D", engine(1), polled=True, heartbeat=0.05, background=True) as consumer,
    ):
        ticket, counters = ticket_of(producer, lease=2.0), consumer.first.stats
        kept(consumer, ticket)
        until(lambda: counters().counters.messages_received, producer)
        sent = counters().counters.messages_sent
        until(lambda: counters().counters.messages_sent > sent + 3)
        time.sleep(0.2)
        now[0] = 3.0
        producer.poll()
        assert ticket.remote_id in producer.first.held
        now[0] = 4.0
        producer.poll()
        assert ticket.remote_id in producer.first.held


def test_tickets_of_one_request_at_two_engines_are_two_errands(known: tuple[Side, Side]) -> None:
    """Declining one of them does not end the other."""
    producer, consumer = known
    ticket = ticket_of(producer)
    stranger = attrs.evolve(ticket, engine_id="nobody", addresses=("127.0.0.1:9",))
    kept(consumer, ticket)
    for one in consumer.sessions.values():
        one.decline(ticket=stranger)
    time.sleep(3 * LEASE)
    assert all(one.held for one in producer.sessions.values())
    loads = [one.load(ASKED, ticket=ticket, timeout=9.0) for one in consumer.sessions.values()]
    assert all(load.wait(9.0) for load in loads)


def test_producer_that_was_restarted_after_keep_fails_the_load_and_serves_the_next() -> None:
    """The blocks are gone. The load says so soon, and a ticket of the new start connects it."""
    with (
        FakeNixl(),
        Side("D", engine(1), polled=True, heartbeat=LEASE / 4, background=True) as consumer,
    ):
        one = consumer.first
        with Side("P", engine(1), polled=False, lease=LEASE, background=True) as producer:
            old = ticket_of(producer, lease=30.0)
            one.keep(old, timeout=30.0)
            until(lambda: one.stats().counters.messages_received)
        more: Any = {"epoch": 2, "polled": False, "lease": LEASE, "background": True}
        with Side("P", engine(1), **more) as producer:
            producer.fill(ASKED)
            consumer.spoil(ASKED)
            load = one.load(ASKED, ticket=old, timeout=3.0)
            until(lambda: load.poll() == "failed")
            assert load.error is not None
            assert load.error.state in ("peer_lost", "stale_peer", "gone", "timeout")
            new = ticket_of(producer, "new", lease=30.0)
            one.keep(new, timeout=30.0)
            load = one.load(attrs.evolve(ASKED, request_id="s"), ticket=new, timeout=9.0)
            assert load.wait(9.0)
            assert [] == consumer.wrong(ASKED)


def test_wait_ends_after_its_time_and_after_close(sides: tuple[Side, Side]) -> None:
    producer, consumer = sides
    ticket = attrs.evolve(ticket_of(producer), engine_id="nobody", addresses=("127.0.0.1:9",))
    load = consumer.first.load(ASKED, ticket=ticket, timeout=60.0)
    begun = time.monotonic()
    assert load.wait(0.2) is False
    assert 1.5 > time.monotonic() - begun
    with pytest.raises(SpecError):
        load.wait(-1.0)
    consumer.close()
    with pytest.raises(TransferError) as caught:
        load.wait()
    assert caught.value.state in ("closed", "timeout")


PROCESS = """
import kvspec, socket, sys, time
from kvspec.session import Session, new_remote_id
from kvspec.testing import FakeNixl
from kvspec.nixl import NixlRank
from kvspec.tickets import PrefillTicket

spec = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=1, head_size=4, dtype="uint8")
group = kvspec.KVCacheGroup(name="full", layers=["l"], spec=spec)
engine = kvspec.EngineSpec(groups=[group])
silent = socket.create_server(("127.0.0.1", 0))
address = f"127.0.0.1:{silent.getsockname()[1]}"
with FakeNixl():
    cache, storage = kvspec.allocate(engine, kvspec.RankId(), num_blocks=4)
    session = Session(NixlRank(), cache, engine_id="D", owner=storage, background=True)
    ticket = PrefillTicket(engine_id="P", addresses=[address], remote_id=new_remote_id("p"),
                           computed_tokens=4, tables={"full": [1]})
    session.keep(ticket, timeout=60.0)
    while not session.channel.reaches(address):
        time.sleep(0.01)
    print("ends now", flush=True)
"""


def test_process_ends_while_a_connection_is_pending() -> None:
    """It did not close its session. A thread that connects must not keep it alive."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(  # noqa: S603 - our own code
        [sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        assert "ends now\n" == process.stdout.readline()
        begun = time.monotonic()
        try:
            process.wait(15.0)
        finally:
            process.kill()
    assert 10.0 > time.monotonic() - begun
