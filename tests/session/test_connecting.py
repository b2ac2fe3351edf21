"""What a session meets, in both roles and by several threads: met whole, or not at all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from lines import Other, between_lines
from sessions import Side, engine, new_remote_id, request, until

from kvspec.errors import SpecError, TransferError
from kvspec.session import Session, remote, remotes
from kvspec.session.stats import SessionStats
from kvspec.testing import FakeNixl


@pytest.fixture
def net() -> Iterator[FakeNixl]:
    """Replace nixl."""
    with FakeNixl() as fake:
        yield fake


@pytest.fixture
def pair(net: FakeNixl) -> Iterator[tuple[Side, Side]]:
    """Return a producer of two ranks and a consumer of one that met it."""
    with (
        Side("P", engine(2), polled=False) as producer,
        Side("D", engine(1), polled=False) as consumer,
    ):
        consumer.connect(producer)
        yield producer, consumer


def loads(producer: Side, session: Session, name: str) -> bool:
    """Whether a request is loaded; False where its producer is not met."""
    remote_id = new_remote_id(name)
    producer.hold(remote_id)
    try:
        load = session.load(request(name), remote_id=remote_id, timeout=9.0)
    except SpecError:
        return False
    until(lambda: load.poll() != "moving", producer)
    assert "done" == load.state, load.error
    return True


def test_a_meeting_that_fails_breaks_no_other(net: FakeNixl, pair: tuple[Side, Side]) -> None:
    """Ranks that are met in the other role stay connected."""
    producer, consumer = pair
    (session,) = consumer.sessions.values()
    last = net.agents[max(session.nixl.peers)]
    last.alive = False
    with pytest.raises(TransferError, match="P-tp1"):
        session.connect(producer.introductions, role="consumer")
    last.alive = True
    assert (2, 1) == (len(session.nixl.peers), session.stats().engines)
    assert loads(producer, session, "r")


def test_who_is_parted_from_while_it_is_met(pair: tuple[Side, Side]) -> None:
    """Is met whole, or not at all; whenever another thread parts, it can be met again."""
    producer, consumer = pair
    (session,) = consumer.sessions.values()
    failed = 0
    for place in range(0, 80, 4):
        other = Other(lambda: session.disconnect("P"))
        with contextlib.suppress(TransferError), between_lines(other.at(place), remote, remotes):
            failed += 1
            session.connect(producer.introductions, role="consumer")
            failed -= 1
        other.join()
        met = session.stats().engines
        assert bool(met) == bool(session.nixl.peers)
        assert loads(producer, session, f"a{place}") in (False, met > 1)
        for role in ("consumer", "producer"):
            session.connect(producer.introductions, role=role)
        assert loads(producer, session, f"b{place}")
        session.disconnect("P")
        assert (0, ()) == (session.nixl.stats().lists, session.nixl.peers)
        session.connect(producer.introductions)
    assert failed


def test_a_rank_may_be_closed_before_its_session(pair: tuple[Side, Side]) -> None:
    """Its lists are gone with it: nobody is left to be parted from."""
    (session,) = pair[1].sessions.values()
    session.nixl.close()
    session.close()
    assert SessionStats() == session.stats()


def test_nobody_waits_for_a_session_that_is_closed(pair: tuple[Side, Side]) -> None:
    """Who is to push is not heard any more: what it may write still is moving, without an end."""
    (session,) = pair[1].sessions.values()
    load = session.load(request(), remote_id=new_remote_id("r"), timeout=9.0, pushed=True)
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
    assert (["closed"], "moving", "stopped") == (states, load.poll(), load.error.state)
