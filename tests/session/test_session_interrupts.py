"""An interrupt between any two lines loses nothing: each load ends and its blocks are free."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from lines import between_lines, interrupted_at
from session_faults import connection_waits
from two_engines import Direct, Side, engine, request, until

from kvspec import KVSpecError, TransferError
from kvspec.completion import consumer, ledger, producer
from kvspec.nixl import rank, transfer
from kvspec.session import (
    channel,
    checksums,
    holds,
    load,
    loads,
    mailbox,
    new_remote_id,
    remotes,
    session,
    written,
)
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeFlight
from kvspec.tickets import PrefillTicket

LINES = (
    ledger, consumer, producer, session, loads, load, remotes, holds,
    written, mailbox, checksums, rank, transfer,
)  # fmt: skip
ENOUGH = 20_000
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Pair:
    """A producer and a consumer of one rank each, over memory, and loads of one request."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.net = stack.enter_context(FakeNixl())
        more: dict[str, Any] = {"polled": False, "clock": self.clock}
        self.now = 0.0
        self.producer = stack.enter_context(
            Side("P", engine(1), channel=Direct("P"), lease=50.0, **more)
        )
        self.consumer = stack.enter_context(
            Side("D", engine(1), channel=Direct("D"), heartbeat=2.0, **more)
        )
        self.consumer.connect(self.producer)
        (self.session,) = self.consumer.sessions.values()
        (self.other,) = self.producer.sessions.values()
        self.asked = request()
        self.producer.fill(self.asked)
        self.count = 0

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def begin(self, **more: Any) -> Callable[[], Any]:
        """Hold the request again, and return a function that loads it."""
        self.count += 1
        remote_id = new_remote_id(f"r{self.count}")
        self.remote_id = remote_id
        blocks = self.asked.producer_blocks if more.get("verify") else None
        self.producer.hold(remote_id, blocks=blocks)
        if more.get("follow"):
            self.other.record_progress(remote_id, 14)
        self.consumer.spoil(self.asked)
        return lambda: self.session.load(self.asked, remote_id=remote_id, timeout=30.0, **more)

    def end(self, load: Any, place: int) -> bool:
        """Poll both engines until a load has ended, with an interrupt before line *place*.

        Returns:
            Whether the polls have that many lines.
        """

        def polls() -> None:
            for _ in range(4):
                self.session.poll()
                self.producer.poll()

        reached, _ = interrupted_at(place, polls, *LINES)
        self.settle()
        assert load.state in ("done", "failed")
        assert ("failed" == load.state) == (load.error is not None)
        assert load.error is None or "differs" != load.error.state
        assert "failed" == load.state or [] == self.consumer.wrong(self.asked)
        return reached

    def settle(self) -> list[str]:
        """Poll until no load is left on either side; return the names of freed requests."""
        freed: list[str] = []

        def over() -> bool:
            self.now += 0.5
            for names in self.producer.settled():
                freed.extend(names)
            left = self.session.stats()
            return not (
                left.loads
                or left.steps
                or self.session.nixl.stats().transfers
                or self.other.stats().held
            )

        until(over, self.consumer, self.producer, seconds=10.0)
        return freed


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Yield two connected engines. In the end the same blocks can be loaded once more."""
    with contextlib.ExitStack() as stack:
        both = Pair(stack)
        yield both
        load = both.begin()()
        both.settle()
        assert ("done", []) == (load.state, both.consumer.wrong(both.asked))


def everywhere(stride: int, act: Callable[[int], bool]) -> None:
    """Call *act* with each number of a line until it returns that the call has fewer lines."""
    for place in range(0, ENOUGH, stride):
        if not act(place):
            assert place > 100
            return
    raise AssertionError("the call never ends")


@pytest.mark.parametrize("more", [{}, {"follow": True}, {"verify": True}])
def test_interrupted_start_of_a_load_leaves_nothing(pair: Pair, more: dict[str, Any]) -> None:
    """Its blocks are free as soon as nothing can write them, and every transfer ends."""

    def once(place: int) -> bool:
        reached, _ = interrupted_at(place, pair.begin(**more), *LINES)
        pair.settle()
        return reached

    everywhere(7, once)


@pytest.mark.parametrize("more", [{}, {"follow": True}, {"verify": True}])
def test_load_ends_when_polls_are_interrupted(pair: Pair, more: dict[str, Any]) -> None:
    """It is done with the right bytes, or has failed with an error."""
    states: set[str] = set()

    def once(place: int) -> bool:
        moved = pair.begin(**more)()

        reached = pair.end(moved, place)
        states.add(moved.state)
        return reached

    everywhere(7, once)
    assert "done" in states


def test_load_of_a_ticket_ends_when_polls_are_interrupted(pair: Pair) -> None:
    """Its start may be interrupted anywhere. The producer frees the request in any case."""
    states: set[str] = set()

    def once(place: int) -> bool:
        pair.begin()
        asked = pair.asked
        ticket = PrefillTicket(
            engine_id="P",
            addresses=["P"],
            remote_id=pair.remote_id,
            computed_tokens=asked.num_tokens,
            tables=asked.producer_blocks,
        )
        attempt = connection_waits(pair.session, "P", ("P",))
        load = pair.session.load(asked, ticket=ticket, timeout=30.0)
        attempt.set_result(None)

        reached = pair.end(load, place)
        states.add(load.state)
        return reached

    everywhere(7, once)
    assert {"done", "failed"} == states


@pytest.mark.parametrize("raises", [False, True])
def test_call_of_a_signal_handler_inside_of_a_load_is_refused(pair: Pair, raises: bool) -> None:
    """Otherwise the load would be done without its bytes. The handler may ignore the refusal."""
    refused, place, reached = 0, 0, True
    while reached:
        reached = False

        def act(line: int, place: int = place) -> None:
            nonlocal reached, refused
            if line != place:
                return
            reached = True
            try:
                pair.session.disconnect("P")
            except TransferError as error:
                refused += error.state == "busy"
                if raises:
                    raise

        loads_it = pair.begin()
        moved: Any = None
        with between_lines(act, *LINES), contextlib.suppress(KVSpecError):
            moved = loads_it()
        pair.settle()
        if moved is not None:
            assert moved.state in ("done", "failed")
            assert "failed" == moved.state or [] == pair.consumer.wrong(pair.asked)
        pair.consumer.connect(pair.producer)
        place += 7
    assert refused > 20


def test_failed_load_gives_its_blocks_back_when_polls_are_interrupted(pair: Pair) -> None:
    """The load is cancelled while its bytes are in flight."""

    def once(place: int) -> bool:
        pair.net.fate = lambda _: None
        moved = pair.begin()()
        pair.net.fate = FakeFlight.land

        def polls() -> None:
            moved.cancel()
            for flight in pair.net.moving:
                flight.land()
            for _ in range(3):
                pair.session.poll()

        reached, _ = interrupted_at(place, polls, *LINES)
        for flight in pair.net.moving:
            flight.land()
        moved.cancel()
        pair.settle()
        assert "failed" == moved.state
        return reached

    everywhere(3, once)


def test_request_is_freed_once_when_the_producer_is_interrupted(pair: Pair) -> None:
    """The engine learns that blocks are free, although the poll that freed them was interrupted."""

    def once(place: int) -> bool:
        pair.begin()()

        def polls() -> None:
            for _ in range(4):
                pair.session.poll()
                pair.other.poll()

        reached, _ = interrupted_at(place, polls, holds, producer)
        assert [f"r{pair.count}"] == pair.settle()
        return reached

    for place in range(ENOUGH):
        if not once(place):
            break
    assert place > 20


def test_settled_returns_each_request_once_when_it_is_interrupted(pair: Pair) -> None:
    """The next call returns what an interrupted call did not."""

    def once(place: int) -> bool:
        pair.begin()()
        until(lambda: not pair.other.held, pair.producer, pair.consumer)
        returned: list[holds.Settled] = []
        reached, _ = interrupted_at(
            place, lambda: returned.append(pair.other.settled()), session, holds, mailbox
        )
        returned.append(pair.other.settled())
        assert [pair.remote_id] == [name for settled in returned for name in settled.freed]
        pair.settle()
        return reached

    for place in range(ENOUGH):
        if not once(place):
            break
    assert place > 20


def test_load_over_tcp_is_done_when_the_channel_is_interrupted(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt loses messages and connections at most, and the sessions repeat messages."""
    monkeypatch.setattr(channel, "STALL", 0.1)
    with (
        Side("P", engine(1), polled=False, lease=9.0) as producer,
        Side("D", engine(1), polled=False, heartbeat=0.02) as consumer,
    ):
        consumer.connect(producer)
        asked = request()
        producer.fill(asked)

        def once(place: int) -> bool:
            remote_id = new_remote_id(f"r{place}")
            producer.hold(remote_id)
            consumer.spoil(asked)
            consumer.first.channel.reject(producer.addresses[0])  # The first message dials again.
            (load,) = consumer.load(asked, remote_id, timeout=9.0)

            def polls() -> None:
                for _ in range(4):
                    consumer.poll()
                    producer.poll()

            reached, _ = interrupted_at(place, polls, channel)
            freed: list[str] = []
            until(lambda: freed.extend(producer.first.settled().done) or freed, producer, consumer)
            until(lambda: not consumer.first.stats().loads, producer, consumer)
            assert ("done", []) == (load.state, consumer.wrong(asked)), f"before line {place}"
            assert [remote_id] == freed
            return reached

        everywhere(2, once)
