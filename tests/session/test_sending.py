"""When a session sends its messages, and which of them it leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from two_engines import Direct, Side, engine, let_nothing_land, request

from kvspec.session import new_remote_id
from kvspec.testing import FakeNixl


class Recording(Direct):
    """A channel that records the calls of `send`."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.calls: list[tuple[bytes, ...]] = []

    def send(self, route: str, *messages: bytes) -> None:
        """Record a call, and send *messages*."""
        self.calls.append(messages)
        super().send(route, *messages)


@pytest.fixture
def sides(net: FakeNixl) -> Iterator[tuple[Side, Side]]:
    """Yield a producer and a connected consumer of one rank each."""
    more: dict[str, Any] = {"polled": False}
    with (
        Side("P", engine(1), channel=Recording("P"), **more) as producer,
        Side("D", engine(1), channel=Recording("D"), **more) as consumer,
    ):
        consumer.connect(producer)
        yield producer, consumer


def calls(side: Side) -> list[tuple[bytes, ...]]:
    """Return the recorded calls of `send` since the last time."""
    channel: Any = side.first.channel
    recorded, channel.calls = channel.calls, []
    return recorded


def test_messages_of_one_poll_are_sent_together(sides: tuple[Side, Side], net: FakeNixl) -> None:
    """The heartbeat of a load that has ended before the poll is left out."""
    producer, consumer = sides
    calls(consumer)
    for name, blocks in (("a", [0, 1, 2, 3]), ("b", [4, 5, 6, 7])):
        remote_id = new_remote_id(name)
        producer.hold(remote_id)
        tables = dict.fromkeys(("full", "window"), blocks)
        consumer.load(request(name, consumer_blocks=tables), remote_id)
    assert [] == calls(consumer)
    consumer.poll()
    (messages,) = calls(consumer)
    assert [True, True] == [b"done" in message for message in messages]
    producer.poll()
    (messages,) = calls(producer)
    assert [True, True] == [b"valid" in message for message in messages]


def test_disconnect_sends_the_messages_of_the_loads_that_it_ends(
    sides: tuple[Side, Side], net: FakeNixl
) -> None:
    """The producer learns that nothing is read any more, although no message has come from it."""
    producer, consumer = sides
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    let_nothing_land(net)
    (load,) = consumer.load(request(), remote_id)
    for flight in net.moving:
        flight.land()
    calls(consumer)
    consumer.first.disconnect("P")
    assert "failed" == load.state
    assert any(b"done" in message for messages in calls(consumer) for message in messages)
