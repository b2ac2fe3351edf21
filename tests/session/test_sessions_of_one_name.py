"""Two live sessions with one engine, epoch and rank: the second one is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from two_engines import Direct, Side, engine, land, let_nothing_land, request

from kvspec.errors import SpecError
from kvspec.session import Load, new_remote_id
from kvspec.session.mailbox import ANSWER, CHALLENGE, MAX_WARNED, MESSAGE, QUESTION
from kvspec.testing import FakeNixl
from kvspec.wire.versions import OWN

LEASE, HEARTBEAT, PATIENCE = 10.0, 2.0, 15.0


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def side(name: str, clock: Clock, channel: str, epoch: int = 1) -> Side:
    """Return an engine of one rank whose channel has its own address."""
    times = {"lease": LEASE, "heartbeat": HEARTBEAT, "patience": PATIENCE}
    polled = name == "D"
    return Side(
        name, engine(1), epoch=epoch, polled=polled, channel=Direct(channel), clock=clock, **times
    )


@contextmanager
def three() -> Iterator[tuple[FakeNixl, Clock, Side, Side, Side]]:
    """Yield a producer and two consumers of one name that are connected with it."""
    clock = Clock()
    with (
        FakeNixl() as net,
        side("P", clock, "P") as producer,
        side("D", clock, "D1") as first,
        side("D", clock, "D2") as second,
    ):
        first.connect(producer)
        second.connect(producer)
        yield net, clock, producer, first, second


def run(clock: Clock, seconds: float, *sides: Side) -> None:
    """Poll the *sides* for some seconds. The others stand still."""
    for _ in range(int(seconds * 2)):
        for each in sides:
            each.poll()
        clock.now += 0.5


@pytest.mark.parametrize("stopped", ["first", "second"])
@pytest.mark.parametrize("later", [0, 3])
def test_load_of_second_session_with_one_name_is_never_done_with_wrong_bytes(
    stopped: str, later: int
) -> None:
    """One stands still, the other finishes, and the producer reuses the blocks.

    *later* loads of other requests come before, so that the numbers of the messages differ.
    """
    with three() as (net, clock, producer, first, second):
        for number in range(later):
            name = new_remote_id(f"before-{number}")
            producer.hold(name)
            first.load(request(f"before-{number}"), name, timeout=60.0)
            run(clock, 3.0, producer, first)
        wanted, name = request(), new_remote_id("r")
        producer.fill(wanted)
        producer.hold(name)
        let_nothing_land(net)
        loads: dict[str, list[Load]] = {}
        for who, consumer in (("first", first), ("second", second)):
            consumer.spoil(wanted)
            loads[who] = consumer.load(wanted, name, timeout=60.0)
            run(clock, 0.5, consumer, producer)
        moves = {"first": first, "second": second}
        asleep = moves.pop(stopped)
        (awake,) = moves.values()
        net.fate = lambda flight: flight.land()
        land_of(net, awake)
        run(clock, LEASE / 4, producer, awake)
        if {*producer.first.held} == set():
            producer.fill(wanted, seed=7)  # The blocks hold another request now.
        land(net)
        run(clock, 4 * PATIENCE, producer, first, second)
        for who, consumer in (("first", first), ("second", second)):
            (load,) = loads[who]
            assert load.state in ("done", "failed")
            if load.state == "done":
                assert [] == consumer.wrong(wanted), who
            else:
                assert load.error is not None
        assert "failed" == loads["second"][0].state, "its name belongs to the first session"
        assert any(
            "another session is known as D" in why for why in producer.first.settled().refused
        )
        assert asleep is not awake


def land_of(net: FakeNixl, consumer: Side) -> None:
    """Land the reads of one consumer."""
    for flight in net.moving:
        if consumer.first.nixl.name in str(flight.between[0]):
            flight.land()


def test_producer_logs_a_second_session_with_one_name_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The operator learns which engine needs a larger epoch."""
    with three() as (_, clock, producer, first, second), caplog.at_level(logging.WARNING):
        name = new_remote_id("r")
        producer.hold(name)
        for consumer in (first, second):
            consumer.load(request(), name, timeout=60.0)
            run(clock, 0.5, consumer, producer)
        run(clock, 10.0, second, producer)
        lines = [record.getMessage() for record in caplog.records if "larger epoch" in record.msg
                 or "larger epoch" in record.getMessage()]  # fmt: skip
        assert 1 == len(lines)
        assert "D " in lines[0]


def test_connect_refuses_a_second_session_with_one_name_until_disconnect() -> None:
    """A consumer knows the producer by its introduction. A new epoch is always accepted."""
    clock = Clock()
    with (
        FakeNixl(),
        side("D", clock, "D") as consumer,
        side("P", clock, "P1") as first,
        side("P", clock, "P2") as second,
        side("P", clock, "P3", epoch=2) as newer,
    ):
        consumer.connect(first)
        with pytest.raises(SpecError, match="larger epoch") as caught:
            consumer.connect(second)
        assert ("introductions", "P tp0") == (caught.value.field, caught.value.value)
        consumer.connect(first)
        consumer.connect(newer)
        consumer.first.disconnect("P")
        consumer.connect(newer)


def test_answer_of_a_second_session_with_one_name_is_refused() -> None:
    """A producer without a larger epoch took the address of the first one."""
    clock = Clock()
    with FakeNixl(), side("D", clock, "D") as consumer, side("P", clock, "P") as producer:
        wanted, name = request(), new_remote_id("r")
        producer.fill(wanted)
        consumer.spoil(wanted)
        consumer.connect(producer)
        producer.hold(name)
        (load,) = consumer.load(wanted, name, timeout=60.0)
        with side("P", clock, "P") as again:
            again.hold(name)  # The request of the same name, with other bytes.
            run(clock, 5 * PATIENCE, again, consumer)
            assert "failed" == load.state
            refused = consumer.first.settled().refused
            assert any("another session is known as P" in why for why in refused)


def test_producer_with_a_lower_epoch_is_refused_with_what_to_do() -> None:
    """Its clock was set back. `disconnect` accepts it."""
    clock = Clock()
    with (
        FakeNixl(),
        side("D", clock, "D") as consumer,
        side("P", clock, "P1", epoch=9) as first,
        side("P", clock, "P2", epoch=3) as lower,
    ):
        consumer.connect(first)
        with pytest.raises(SpecError, match="clock") as caught:
            consumer.connect(lower)
        assert ("epoch", 3) == (caught.value.field, caught.value.value)
        assert "disconnect('P')" in caught.value.rule
        consumer.first.disconnect("P")
        consumer.connect(lower)


@pytest.mark.parametrize("body", [b"\x92\x0d\x0e", b"\x92\x01\x09"])
def test_question_of_another_version_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    """The warning has both ranges. The asker gets an introduction that it refuses by name."""
    clock = Clock()
    with FakeNixl(), side("P", clock, "P") as producer, caplog.at_level(logging.WARNING):
        secret, asker = producer.first.nixl.secret, Direct("asker")
        for _ in range(3):
            asker.send("P", secret.seal(QUESTION, body))
            producer.poll()
            ((_, sealed),) = asker.receive()
            answer = secret.unseal("challenge", CHALLENGE, sealed, "a challenge")
            asker.send("P", secret.seal(ANSWER, answer))
            producer.poll()
            assert producer.introductions == [data for _, data in asker.receive()]
        (line,) = [record.getMessage() for record in caplog.records]
        assert str(OWN) in line
        assert "upgrade" in line


@pytest.mark.parametrize(
    "body",
    [b"\x92\x0b\x0a", b"\x92\x00\x0b", b"\x91\x0a", b"\x93\x0a\x0b\x0c", b"rubbish", b"\xc0",
     b"\x92\x0a\xcf" + b"\xff" * 8, b"\x92\x0a\xcd\xff\xff" * 99],
)  # fmt: skip
def test_question_with_bad_versions_is_refused(body: bytes) -> None:
    """Inverted, out of bounds, or no array of two numbers. Nothing is sent."""
    clock = Clock()
    with FakeNixl(), side("P", clock, "P") as producer:
        asker = Direct("asker")
        asker.send("P", producer.first.nixl.secret.seal(QUESTION, body))
        assert 1 == len(producer.first.settled().refused)
        assert [] == asker.receive()


def test_message_of_another_version_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only a peer with the secret can cause the line, and many versions cause few."""
    clock = Clock()
    with FakeNixl(), side("P", clock, "P") as producer, caplog.at_level(logging.WARNING):
        for version in [9, 9, 9, *range(12, 90)]:
            body = b"kvspec-message\n" + version.to_bytes(2, "big") + bytes(40)
            Direct("D").send("P", producer.first.nixl.secret.seal(MESSAGE, body))
            producer.poll()
        assert MAX_WARNED == len(caplog.records)
        assert 1 == sum("version 9 " in record.getMessage() for record in caplog.records)
