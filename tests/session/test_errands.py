"""Tests of kept and declined tickets: what a rank does for a prompt before it loads it."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import attrs
import pytest

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from tickets_kept import ASKED, LEASE, kept, ticket_of
from two_engines import Side, engine, freed, until

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.session import errands, session
from kvspec.testing import FakeNixl


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """Yield two engines of two ranks that are not connected. Leases are short."""
    with (
        FakeNixl(),
        Side("P", engine(2), polled=False, lease=LEASE, background=True) as producer,
        Side("D", engine(2), polled=True, heartbeat=LEASE / 4, background=True) as consumer,
    ):
        yield producer, consumer


def test_kept_prompt_is_loadable_long_after_its_lease(sides: tuple[Side, Side]) -> None:
    """The queue of the consumer takes four leases. Afterwards every byte arrives."""
    producer, consumer = sides
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


def test_kept_prompt_that_is_declined_is_free_at_once(sides: tuple[Side, Side]) -> None:
    producer, consumer = sides
    ticket = ticket_of(producer)
    kept(consumer, ticket)
    time.sleep(2 * LEASE)
    begun = time.monotonic()
    for one in consumer.sessions.values():
        one.decline(ticket=ticket)
    until(lambda: not any(one.held for one in producer.sessions.values()), producer)
    assert LEASE / 2 > time.monotonic() - begun
    assert all("done" in repr(one.settled()) for one in producer.sessions.values())


def test_kept_prompt_is_declined_when_its_time_is_over(sides: tuple[Side, Side]) -> None:
    producer, consumer = sides
    ticket = ticket_of(producer)
    kept(consumer, ticket, timeout=2 * LEASE)
    until(lambda: not any(one.held for one in producer.sessions.values()), producer)
    assert [0, 0] == [one.stats().errands for one in consumer.sessions.values()]
    assert all(ticket.remote_id in one.settled().done for one in producer.sessions.values())


def test_prompt_of_a_consumer_that_has_ended_is_free_after_one_lease(
    sides: tuple[Side, Side],
) -> None:
    producer, consumer = sides
    ticket = ticket_of(producer)
    kept(consumer, ticket)
    time.sleep(2 * LEASE)
    consumer.close()
    begun = time.monotonic()
    until(lambda: not any(one.held for one in producer.sessions.values()), producer)
    assert 2 * LEASE > time.monotonic() - begun


def test_load_after_an_abort_of_a_kept_prompt_fails_with_gone(sides: tuple[Side, Side]) -> None:
    """The answer `gone` ends the heartbeats, and the load learns the reason."""
    producer, consumer = sides
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


def test_decline_is_tried_again_until_the_producer_can_be_reached(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempts find nobody at the address: the network was cut."""
    monkeypatch.setattr(session, "ABSENT", 0.1)
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
    assert 0 == one.stats().counters.refusals_lost


def test_decline_that_is_never_delivered_is_logged_and_counted(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "ABSENT", 0.1)
    monkeypatch.setattr(errands, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(errands, "LONGEST_REFUSAL", 0.5)
    producer, consumer = sides
    ticket = attrs.evolve(ticket_of(producer), engine_id="nobody", addresses=("127.0.0.1:9",))
    with caplog.at_level(logging.WARNING):
        consumer.first.decline(ticket=ticket)
        until(lambda: consumer.first.stats().errands == 0, producer)
    assert 1 == consumer.first.stats().counters.refusals_lost
    (record,) = [each for each in caplog.records if "not declined" in each.message]
    assert "nobody at 127.0.0.1:9" in record.message


def test_silent_producer_delays_no_other(sides: tuple[Side, Side]) -> None:
    """It accepts connections and never answers, as a stopped process does."""
    producer, consumer = sides
    ticket = ticket_of(producer)
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
