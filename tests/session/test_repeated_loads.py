"""A rank loads a request again: answers to the first load do not count."""

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
    """Yield a producer of one rank and a consumer of two, which is connected."""
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False, lease=5.0) as producer,
        Side("D", engine(2), polled=False, heartbeat=0.05) as consumer,
    ):
        consumer.connect(producer)
        yield producer, consumer


def ended(loads: list[Load], *sides: Side) -> list[str]:
    """Wait until *loads* have ended and their producers know it, and return the states."""
    until(lambda: all(load.state != "moving" for load in loads), *sides)
    sessions = sides[1].sessions.values()
    until(lambda: not any(session.stats().loads for session in sessions), *sides)
    return [load.state for load in loads]


def test_second_load_fails_when_the_request_was_freed_between(sides: tuple[Side, Side]) -> None:
    """The blocks belong to another request by then. The first answer is not repeated."""
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


def test_second_load_is_done_while_another_rank_still_reads(sides: tuple[Side, Side]) -> None:
    """Each byte is right. The request is freed after the last load."""
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
