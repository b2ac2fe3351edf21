"""A session connects an engine completely or not at all, also from several threads."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from lines import Other, between_lines
from tickets_kept import ASKED, ticket_of
from two_engines import Side, engine, land, let_nothing_land, request, until

from kvspec.errors import MismatchError, SpecError, TransferError
from kvspec.session import Session, new_remote_id, remotes
from kvspec.session.stats import SessionStats
from kvspec.testing import FakeNixl


@pytest.fixture
def pair(net: FakeNixl) -> Iterator[tuple[Side, Side]]:
    """Return a producer of two ranks, and a consumer of one rank that is connected to it."""
    with (
        Side("P", engine(2), polled=False) as producer,
        Side("D", engine(1), polled=False) as consumer,
    ):
        consumer.connect(producer)
        yield producer, consumer


def loads(producer: Side, session: Session, name: str) -> bool:
    """Whether a request is loaded. False if its producer is not connected."""
    remote_id = new_remote_id(name)
    producer.hold(remote_id)
    try:
        load = session.load(request(name), remote_id=remote_id, timeout=9.0)
    except SpecError:
        return False
    until(lambda: load.poll() != "moving", producer)
    assert "done" == load.state, load.error
    return True


def test_failed_connect_breaks_no_other_connection(net: FakeNixl, pair: tuple[Side, Side]) -> None:
    """Ranks of another engine stay connected."""
    producer, consumer = pair
    (session,) = consumer.sessions.values()
    with Side("Q", engine(2), polled=False) as other:
        net.agents[[*other.sessions.values()][1].nixl.name].alive = False
        with pytest.raises(TransferError, match="Q-tp1"):
            session.connect(other.introductions)
        assert (2, 1) == (len(session.nixl.peers), session.stats().engines)
        assert loads(producer, session, "r")


def test_disconnect_while_connecting_leaves_all_or_nothing(pair: tuple[Side, Side]) -> None:
    """Another thread disconnects between any two lines. The engine can be connected again."""
    producer, consumer = pair
    (session,) = consumer.sessions.values()
    failed = 0
    for place in range(0, 240, 7):
        other = Other(lambda: session.disconnect("P"))
        with contextlib.suppress(TransferError), between_lines(other.at(place), remotes):
            failed += 1
            session.connect(producer.other_introductions)
            failed -= 1
        other.join()
        met = session.stats().engines
        assert bool(met) == bool(session.nixl.peers)
        assert loads(producer, session, f"a{place}") == bool(met)
        session.connect(producer.introductions)
        assert loads(producer, session, f"b{place}")
        session.disconnect("P")
        assert (0, ()) == (session.nixl.stats().lists, session.nixl.peers)
        session.connect(producer.introductions)
    assert failed


def test_rank_can_be_closed_before_its_session(pair: tuple[Side, Side]) -> None:
    """NIXL has released the lists with the rank, so the session has nothing to release."""
    (session,) = pair[1].sessions.values()
    session.nixl.close()
    session.close()
    assert SessionStats() == session.stats()


def test_wait_raises_when_session_is_closed(net: FakeNixl, pair: tuple[Side, Side]) -> None:
    """The session no longer polls the read in flight, so the load stays moving."""
    (session,) = pair[1].sessions.values()
    let_nothing_land(net)
    load = session.load(request(), remote_id=new_remote_id("r"), timeout=9.0)
    states: list[str | None] = []

    def wait() -> None:
        try:
            load.wait()
        except TransferError as error:
            states.append(error.state)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    session.close(drain=0.01)
    waiter.join(5.0)
    assert (["closed"], "moving", "closed") == (states, load.poll(), load.error.state)


def test_wait_ends_after_its_time_although_bytes_are_in_flight(
    net: FakeNixl, pair: tuple[Side, Side]
) -> None:
    """The load stays moving after its timeout. Its error is known."""
    let_nothing_land(net)
    load = pair[1].first.load(request(), remote_id=new_remote_id("r"), timeout=0.1)
    begun = time.monotonic()
    assert load.wait(0.5) is False
    assert time.monotonic() - begun < 5.0
    assert load.error is not None


@pytest.mark.usefixtures("net")
def test_heartbeat_must_be_shorter_than_half_of_lease() -> None:
    """The limits of both sides are compared when they connect."""
    with (
        Side("P", engine(2), polled=False, lease=4.0) as producer,
        Side("D", engine(1), polled=False, heartbeat=2.0) as slow,
        Side("E", engine(1), polled=False, heartbeat=1.9) as quick,
    ):
        for consumer, fits in ((slow, False), (quick, True)):
            session = consumer.first
            if fits:
                session.connect(producer.introductions)
                continue
            with pytest.raises(MismatchError) as caught:
                session.connect(producer.introductions)
            (found,) = caught.value.mismatches
            assert ("lease, heartbeat", 4.0, 2.0) == (
                found.field, found.producer, found.consumer,
            )  # fmt: skip
            assert () == session.nixl.peers


def test_slow_name_server_does_not_stop_session(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`poll` goes on while another thread looks up a name, to fetch from it or to connect."""
    (session,) = pair[1].sessions.values()
    look_up, asked = socket.getaddrinfo, threading.Event()

    def slow(host: Any, *rest: Any, **more: Any) -> Any:
        if host == "slow.invalid":
            asked.set()
            time.sleep(1.0)
            raise socket.gaierror
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    def fetch() -> None:
        with contextlib.suppress(TransferError):
            session.fetch(["slow.invalid:7"], timeout=0.05)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert asked.wait(5.0)
    polls = 0
    while thread.is_alive():
        session.poll()
        polls += 1
        time.sleep(1e-3)
    assert polls > 100


def test_engine_that_cannot_be_reached_over_nixl_delays_no_other() -> None:
    """It answers messages, but a firewall closes the ports of its NIXL agent."""
    with (
        FakeNixl() as net,
        Side("P", engine(1), polled=False, background=True) as cut,
        Side("Q", engine(1), polled=False, background=True) as healthy,
        Side("D", engine(1), polled=True, background=True) as consumer,
    ):
        agent, one = cut.first.nixl.name, consumer.first
        net.fate = lambda flight: (
            None if agent in {life.name for life in flight.between} else flight.land()
        )
        one.keep(ticket_of(cut), timeout=60.0)
        until(lambda: net.moving)
        healthy.fill(ASKED)
        consumer.spoil(ASKED)
        load = one.load(ASKED, ticket=ticket_of(healthy), timeout=5.0)
        assert load.wait(10.0)
        assert [] == consumer.wrong(ASKED)
        land(net)
