"""Held requests of a session: their names, how they end, and messages that are repeated."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from two_engines import Direct, Side, engine, land, let_nothing_land, request, until

from kvspec.errors import SpecError, TransferError
from kvspec.session import Session, new_remote_id
from kvspec.session.holds import Settled
from kvspec.session.stats import SessionStats
from kvspec.testing import FakeNixl


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """Return the clock of both sides."""
    return Clock()


@pytest.fixture
def pair(net: FakeNixl, clock: Clock) -> Iterator[tuple[Side, Side]]:
    """Yield a producer and a consumer of one rank each, which are connected."""
    with (
        Side(
            "P", engine(1), polled=False, channel=Direct("P"), lease=10.0, clock=clock
        ) as producer,
        Side("D", engine(1), polled=True, channel=Direct("D"), heartbeat=3.0, clock=clock) as other,
    ):
        other.connect(producer)
        yield producer, other


def only(side: Side) -> Session:
    """Return the only session of a side."""
    (session,) = side.sessions.values()
    return session


def test_settled_returns_each_remote_id_once_by_its_end(
    pair: tuple[Side, Side], clock: Clock
) -> None:
    """Requests of one id have different names, and each has its own end."""
    session, names = only(pair[0]), [new_remote_id("r") for _ in range(4)]
    for name in names:
        session.hold(name)
    assert tuple(names) == session.held
    read, cancelled, aborted, expired = names
    for at, name in enumerate((read, cancelled)):
        (load,) = pair[1].load(request(f"{at}"), name)
        if name == cancelled:
            load.cancel()
        until(lambda name=name: name not in session.held, *pair)
        assert ["done", "failed"][at] == load.state
    session.abort(aborted)
    clock.now = 10.0
    settled = session.settled()
    assert ((), Settled()) == (session.held, session.settled())
    # A reader that cancelled its load has finished, too.
    assert {read, cancelled} == set(settled.done)
    assert ((expired,), (aborted,)) == (settled.expired, settled.aborted)
    assert set(names) == set(settled.freed)


def test_aborted_request_that_all_readers_acknowledged_is_not_done(
    pair: tuple[Side, Side], net: FakeNixl
) -> None:
    """So the engine of the producer knows that the request was not read."""
    session, remote_id = only(pair[0]), new_remote_id("r")
    session.hold(remote_id)
    let_nothing_land(net)
    (load,) = pair[1].load(request(), remote_id)
    until(lambda: session.stats().remembered, *pair)
    session.abort(remote_id)
    load.cancel()
    land(net)
    until(lambda: not session.held, *pair)
    settled = session.settled()
    assert ((), (), (remote_id,)) == (settled.done, settled.expired, settled.aborted)


def test_aborted_request_is_free_when_its_readers_have_failed(pair: tuple[Side, Side]) -> None:
    """Its reader learns of the abort while it waits. It sends `done`, before the lease ends."""
    session, remote_id = only(pair[0]), new_remote_id("r")
    session.hold(remote_id)
    session.abort(remote_id)
    (load,) = pair[1].load(request(), remote_id)
    until(lambda: load.state == "failed" and not session.held, *pair)
    assert load.error is not None
    assert "gone" == load.error.state
    assert (remote_id,) == session.settled().aborted


def test_request_can_be_retried_under_the_same_id(pair: tuple[Side, Side]) -> None:
    """A client aborts and retries: both holds exist until the first has ended."""
    session, first, again = only(pair[0]), new_remote_id("r"), new_remote_id("r")
    session.hold(first)
    session.abort(first)
    session.hold(again)
    assert (first, again) == session.held
    pair[0].fill(request())
    pair[1].spoil(request())
    (load,) = pair[1].load(request(), again)
    until(lambda: load.state != "moving", *pair)
    assert ("done", []) == (load.state, pair[1].wrong(request()))
    until(lambda: again not in session.held, *pair)
    assert (again,) == session.settled().done


@pytest.mark.parametrize("name", ["r", "r#", "r#zz", "r#0011", 7, "upper"])
def test_name_that_is_no_remote_id_is_refused(pair: tuple[Side, Side], name: object) -> None:
    """A request has one name, so capitals are refused, too."""
    if name == "upper":
        request_id, _, nonce = new_remote_id("r").rpartition("#")
        name = f"{request_id}#{nonce[:-1]}A".upper()
    for call in (only(pair[0]).hold, only(pair[0]).abort):
        with pytest.raises(SpecError) as caught:
            call(name)  # type: ignore[arg-type]
        assert ("remote_id", name) == (caught.value.field, caught.value.value)


def test_recorded_heartbeat_of_a_dead_reader_extends_no_lease(
    pair: tuple[Side, Side], clock: Clock, net: FakeNixl
) -> None:
    """The blocks are free after the lease, though the sealed message is sent again and again."""
    (producer, consumer), remote_id = pair, new_remote_id("r")
    session = only(producer)
    session.hold(remote_id)
    let_nothing_land(net)
    consumer.load(request(), remote_id)
    consumer.poll()
    recorded = [data for _, data in Direct.channels["P"].arrived if b"heartbeat" in data]
    assert recorded
    producer.poll()
    while session.held:
        clock.now += 1.0
        for data in recorded:
            Direct.channels["D"].send("P", data)
        producer.poll()
        assert clock.now <= 10.0
    settled = session.settled()
    assert (remote_id,) == settled.expired
    assert any("repetition" in why for why in settled.refused)
    assert session.stats().counters.messages_refused >= len(settled.refused)


def test_reader_that_asks_after_the_nixl_rank_was_closed_receives_gone(
    pair: tuple[Side, Side], net: FakeNixl
) -> None:
    """The memory may contain other data by then. The session learns both in one poll."""
    producer, consumer = pair
    remote_id = new_remote_id("r")
    producer.fill(request())
    producer.hold(remote_id)
    (load,) = consumer.load(request(), remote_id)
    receive = producer.first.channel.receive

    def close_first() -> list[tuple[str, bytes]]:
        """Close the rank when the session looks for messages, and let the reader ask then."""
        producer.first.nixl.close()
        for _ in range(9):
            consumer.poll()
        return receive()

    producer.first.channel.receive = close_first  # type: ignore[method-assign]
    producer.first.poll()
    producer.first.channel.receive = receive  # type: ignore[method-assign]
    until(lambda: load.poll() != "moving", producer, consumer)
    assert load.error is not None
    assert "gone" == load.error.state


def test_stats_are_zero_after_close(pair: tuple[Side, Side]) -> None:
    """Also of requests that are held, or were freed lately, or wait for their engine."""
    session, other = only(pair[0]), only(pair[1])
    freed, held = new_remote_id("freed"), new_remote_id("held")
    session.hold(freed)
    session.hold(held)
    (load,) = pair[1].load(request(), freed)
    until(lambda: load.state != "moving" and freed not in session.held, *pair)
    pair[1].load(request("early"), new_remote_id("early"))
    for side in reversed(pair):
        side.poll()
    assert 3 == session.stats().remembered
    session.close()
    assert SessionStats() == session.stats()
    assert () == session.held
    other.close()
    session.poll()
    assert SessionStats() == session.stats()


@pytest.mark.parametrize("closed", ["session", "nixl"])
def test_closed_rank_holds_nothing(pair: tuple[Side, Side], closed: str) -> None:
    """No reader could load the request, and no poll would free it."""
    producer, _ = pair
    session = only(producer)
    (session if closed == "session" else session.nixl).close()
    with pytest.raises(TransferError) as caught:
        session.hold(new_remote_id("r"))
    assert "closed" == caught.value.state
    assert () == session.held
