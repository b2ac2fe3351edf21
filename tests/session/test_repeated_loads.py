"""A rank loads a request again in the same attempt: answers to the first load do not count."""

from __future__ import annotations

import os
from collections.abc import Iterator

import attrs
import pytest

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from two_engines import Side, engine, request, until

import kvspec
from kvspec.errors import SpecError
from kvspec.session import Load, loads, new_remote_id
from kvspec.testing import FakeNixl

ASKED = request()
AGAIN = attrs.evolve(ASKED, request_id="again")


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """Yield a producer of one rank and a consumer of two, connected with each other."""
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False, lease=5.0) as producer,
        Side("D", engine(2), polled=False, heartbeat=0.05) as consumer,
    ):
        consumer.connect(producer)
        producer.connect(consumer, "consumer")
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


@pytest.mark.parametrize("again", [False, True])
def test_attempt_is_loaded_with_pushed_once(sides: tuple[Side, Side], again: bool) -> None:
    """The outcome of the push is repeated. By now the blocks may contain other data."""
    producer, consumer = sides
    remote_id = new_remote_id("r")
    producer.fill(ASKED)
    consumer.spoil(ASKED)
    producer.hold(remote_id)
    first, last = consumer.sessions.values()
    load = first.load(ASKED, remote_id=remote_id, timeout=9.0, pushed=True, again=again)
    consumer.poll()
    producer.push(ASKED, remote_id)
    if again:  # Then the producer learns nothing of the end of the load.
        load.cancel()
    assert ["failed" if again else "done"] == ended([load], *sides)
    with pytest.raises(SpecError) as caught:
        first.load(AGAIN, remote_id=remote_id, timeout=9.0, pushed=True)
    assert ("attempt", 0) == (caught.value.field, caught.value.value)
    assert 0 == first.stats().loads
    # Another attempt and another rank have pushes of their own.
    loads = [
        first.load(AGAIN, remote_id=remote_id, timeout=9.0, pushed=True, attempt=1),
        last.load(AGAIN, remote_id=remote_id, timeout=9.0, pushed=True, attempt=1),
    ]
    consumer.spoil(AGAIN)
    for session in producer.sessions.values():
        session.push(AGAIN, remote_id=remote_id, timeout=9.0, epoch=1, attempt=1)
    assert ["done"] * 2 == ended(loads, *sides)
    assert [] == consumer.wrong(AGAIN)


def test_names_of_pushed_loads_are_bounded(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest name is forgotten."""
    monkeypatch.setattr(loads, "MAX_PUSHED", 2)
    producer, consumer = sides
    first = next(iter(consumer.sessions.values()))
    names = [new_remote_id(name) for name in "abc"]

    def begin(remote_id: str) -> None:
        asked = attrs.evolve(ASKED, request_id=new_remote_id("d"))
        load = first.load(asked, remote_id=remote_id, timeout=9.0, pushed=True)
        load.cancel()
        assert ["failed"] == ended([load], *sides)

    for remote_id in names:
        producer.hold(remote_id)
        begin(remote_id)
    for remote_id in names[1:]:
        with pytest.raises(SpecError):
            begin(remote_id)
    begin(names[0])


@pytest.mark.parametrize("pushed", [False, True])
def test_rank_declines_each_attempt(sides: tuple[Side, Side], pushed: bool) -> None:
    """The other rank tries twice. The request is freed, and no declined block is written."""
    producer, consumer = sides
    remote_id = new_remote_id("r")
    producer.fill(ASKED)
    consumer.spoil(ASKED)
    producer.hold(remote_id)
    reads, declines = consumer.sessions.values()
    declines.decline(remote_id)
    load = reads.load(ASKED, remote_id=remote_id, timeout=9.0, pushed=pushed, again=True)
    load.cancel()
    assert ["failed"] == ended([load], *sides)
    declines.decline(remote_id, attempt=1)
    load = reads.load(AGAIN, remote_id=remote_id, timeout=9.0, pushed=pushed, attempt=1)
    for _ in range(9):
        consumer.poll()
        producer.poll()
    if pushed:
        for session in producer.sessions.values():
            session.push(AGAIN, remote_id=remote_id, timeout=9.0, epoch=1, attempt=1)
    assert ["done"] == ended([load], *sides)
    assert {"tp1"} == {line.split()[0].rstrip(":,") for line in consumer.wrong(AGAIN)}
    own = kvspec.RankId(tp=1)
    for name, flat in consumer.storage[own].items():
        assert (flat == consumer.before[own][name]).all(), "written after it declined"
    freed: list[str] = []
    until(lambda: freed.extend(producer.settled()[0]) or freed, *sides)
