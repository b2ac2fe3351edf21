"""A rank that loads a request again, as the same attempt: of the first load nothing is believed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import attrs
import pytest

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from two_engines import Side, engine, request, until

from kvspec.session import Load, new_remote_id
from kvspec.testing import FakeNixl

ASKED = request()
AGAIN = attrs.evolve(ASKED, request_id="again")


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """Return a producer of one rank and a consumer of two, that met in both roles."""
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False, lease=5.0) as producer,
        Side("D", engine(2), polled=True, heartbeat=0.05) as consumer,
    ):
        consumer.connect(producer)
        for session in producer.sessions.values():
            session.connect(consumer.introductions, role="consumer")
        yield producer, consumer


def ended(loads: list[Load], *sides: Side) -> list[str]:
    """Wait until all of *loads* are over and their producers told, and return how."""
    until(lambda: all(load.state != "moving" for load in loads), *sides)
    sessions = sides[1].sessions.values()
    until(lambda: not any(session.stats().loads for session in sessions), *sides)
    return [load.state for load in loads]


def test_what_was_freed_since_is_not_done(sides: tuple[Side, Side]) -> None:
    """Its blocks are another request's by then, and the producer says so, not what it said."""
    producer, consumer = sides
    remote_id = new_remote_id("r")
    producer.fill(ASKED)
    consumer.spoil(ASKED)
    producer.hold(remote_id)
    assert ["done"] * 2 == ended(consumer.load(ASKED, remote_id), *sides)
    assert [] == consumer.wrong(ASKED)
    freed: list[str] = []
    until(lambda: freed.extend(producer.settled()[0]) or freed, *sides)
    producer.fill(attrs.evolve(ASKED, request_id="another"), seed=7)
    loads = consumer.load(AGAIN, remote_id)
    assert ["failed"] * 2 == ended(loads, *sides)
    assert {"gone"} == {load.error.state for load in loads if load.error}


def test_what_is_held_still_is_read_and_waited_for(sides: tuple[Side, Side]) -> None:
    """Since another rank reads it: each byte is right, and it is freed after the last of all."""
    producer, consumer = sides
    remote_id = new_remote_id("r")
    producer.fill(ASKED)
    producer.hold(remote_id)
    first, last = consumer.sessions.values()
    for asked in (ASKED, AGAIN):
        consumer.spoil(asked)
        load = first.load(asked, remote_id=remote_id, timeout=9.0)
        assert ["done"] == ended([load], *sides)
        wrong = [line for line in consumer.wrong(asked) if line.startswith("tp0")]
        assert ([], ([], [])) == (wrong, producer.settled())
    load = last.load(ASKED, remote_id=remote_id, timeout=9.0)
    assert ["done"] == ended([load], *sides)
    freed: list[str] = []
    until(lambda: freed.extend(producer.settled()[0]) or freed, *sides)


def test_what_was_pushed_before_is_not_done(sides: tuple[Side, Side]) -> None:
    """It was written for the first load; what its blocks have by now is another's."""
    producer, consumer = sides
    remote_id = new_remote_id("r")
    producer.fill(ASKED)
    consumer.spoil(ASKED)
    producer.hold(remote_id)
    first = next(iter(consumer.sessions.values()))
    load = first.load(ASKED, remote_id=remote_id, timeout=9.0, pushed=True)
    for session in producer.sessions.values():
        session.push(ASKED, remote_id=remote_id, timeout=9.0, epoch=1)
    assert ["done"] == ended([load], *sides)
    consumer.spoil(ASKED)
    load = first.load(AGAIN, remote_id=remote_id, timeout=9.0, pushed=True)
    assert ["failed"] == ended([load], *sides)
    assert "stopped writing" in str(load.error)
