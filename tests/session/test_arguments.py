"""Sessions reject wrong arguments before anything moves and before a message is sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from strange import STRANGE
from two_engines import Side, engine, request, until

import kvspec
from kvspec.errors import KVSpecError, SpecError, TransferError
from kvspec.nixl import NixlRank
from kvspec.session import Load, Session, TcpChannel, new_remote_id
from kvspec.testing import FakeNixl


@pytest.fixture
def pair() -> Iterator[tuple[Side, Side]]:
    """Yield two engines that are connected."""
    with (
        FakeNixl(),
        Side("P", engine(2), polled=False) as producer,
        Side("D", engine(1), polled=False) as consumer,
    ):
        consumer.connect(producer)
        yield producer, consumer


def check_rejected(call: Callable[..., object], field: str, options: dict[str, Any]) -> None:
    """Check that *call* rejects the value of *field* in *options*."""
    with pytest.raises(SpecError) as caught:
        call(**options)
    assert (field, repr(options[field])) == (caught.value.field, repr(caught.value.value))


@pytest.mark.parametrize(
    ("field", "value", "more"),
    [
        ("request", None, {}),
        ("checksum", None, {}),
    ],
)
def test_load_rejects_invalid_arguments(
    pair: tuple[Side, Side], field: str, value: Any, more: dict[str, Any]
) -> None:
    """Nothing is posted, and the next load can have the blocks."""
    remote_id = new_remote_id("r")
    pair[0].hold(remote_id)
    options = {"request": request(), "remote_id": remote_id, "timeout": 5.0}
    check_rejected(pair[1].first.load, field, options | more | {field: value})
    assert 0 == pair[1].first.stats().loads
    (load,) = pair[1].load(request(), remote_id)
    until(lambda: load.poll() == "done", *pair)


def test_session_rejects_a_background_that_is_not_a_bool() -> None:
    """A text is rejected, although it is true."""
    wrong: Any = "no"
    with FakeNixl(), pytest.raises(SpecError) as caught:
        Side("P", engine(1), polled=False, background=wrong)
    assert ("background", "no") == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("argument", ["heartbeat", "lease"])
@pytest.mark.parametrize("interval", [0, 1e-13])
def test_session_rejects_an_interval_that_is_always_over(argument: str, interval: float) -> None:
    """A poll would never come to the end of the messages that are due."""
    with FakeNixl(), pytest.raises(SpecError) as caught:
        Side("P", engine(1), polled=False, **{argument: interval})
    assert (argument, interval) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("argument", ["nixl", "cache", "replica_policy", "channel"])
def test_session_rejects_arguments_of_other_types(argument: str) -> None:
    """No memory is registered then."""
    with FakeNixl(), NixlRank(secret=b"") as nixl:
        cache, _ = kvspec.allocate(engine(1), kvspec.RankId(), num_blocks=2)
        before = nixl.stats()
        options = {"nixl": nixl, "cache": cache, "engine_id": "P"}
        for value in STRANGE:
            if value is not None:
                with pytest.raises(SpecError) as caught:
                    Session(**options | {argument: value})
                assert argument == caught.value.field
        assert before == nixl.stats()


class Converting:
    """A channel whose `receive` converts the bytes of messages."""

    def __init__(self, kind: Any) -> None:
        self.inner, self.kind = TcpChannel(), kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def receive(self) -> list[tuple[str, Any]]:
        """Return the messages, converted."""
        return [(route, self.kind(data)) for route, data in self.inner.receive()]


@pytest.mark.parametrize("kind", [bytearray, memoryview, bytes.hex, len])
def test_channel_may_return_bytes_of_any_buffer_type(kind: Any) -> None:
    """A session records values of other types and drops them."""
    converting: Any = Converting(kind)
    with (
        FakeNixl(),
        Side("P", engine(2), polled=False) as producer,
        Side("D", engine(1), polled=False, channel=converting) as consumer,
    ):
        consumer.connect(producer)
        remote_id, asked = new_remote_id("r"), request()
        producer.hold(remote_id)
        (load,) = consumer.load(asked, remote_id, timeout=1.0)
        until(lambda: load.poll() != "moving", producer)
        foreign = " ".join(consumer.first.settled().refused)
        right = kind in (bytearray, memoryview)
        assert ("done" if right else "failed") == load.state
        assert right != ("receive" in foreign)


def test_fetch_rejects_addresses_that_are_repeated_or_not_texts(pair: tuple[Side, Side]) -> None:
    """A rank answers a question once, so it must be asked once."""
    address = pair[0].addresses[0]
    for wrong, value in ((pair[0].addresses * 2, address), (address, address), ([3], 3)):
        with pytest.raises(SpecError) as caught:
            pair[1].first.fetch(wrong)
        assert ("addresses", value) == (caught.value.field, caught.value.value)


def test_connect_rejects_a_timeout_that_is_not_a_number_of_seconds(
    pair: tuple[Side, Side],
) -> None:
    """So it does if the engine is connected already and nothing would wait."""
    for wrong in (-1, None, float("nan")):
        options = {"introductions": pair[0].introductions, "timeout": wrong}
        check_rejected(pair[1].first.connect, "timeout", options)


def test_closed_session_refuses_every_call(pair: tuple[Side, Side]) -> None:
    """It connects no engine, and can be polled and closed again."""
    session, remote_id = pair[1].first, new_remote_id("r")
    session.close()
    for act in (
        lambda: session.load(request(), remote_id=remote_id, timeout=1.0),
        lambda: session.decline(remote_id),
        lambda: session.connect(pair[0].introductions),
        lambda: session.fetch(pair[0].addresses),
    ):
        with pytest.raises(TransferError) as caught:
            act()
        assert "closed" == caught.value.state
    assert () == session.nixl.peers
    session.poll()
    session.close()


class Calls:
    """The public calls of two sessions. Each method returns a call and valid arguments for it."""

    def __init__(self, pair: tuple[Side, Side]) -> None:
        self.pair, self.producer, self.consumer = pair, pair[0].first, pair[1].first
        self.names = map("r{}".format, itertools.count())

    def held(self) -> str:
        """Return a request that the ranks of the producer hold."""
        remote_id = new_remote_id(next(self.names))
        self.pair[0].hold(remote_id, lease=2.0)
        return remote_id

    def load(self) -> tuple[Any, dict[str, Any]]:
        """Return a call of the consumer."""
        flags = {"checksum": False}
        options = {"request": request(next(self.names)), "remote_id": self.held(), "timeout": 5.0}
        return self.consumer.load, options | {"engine_id": "P"} | flags

    def decline(self) -> tuple[Any, dict[str, Any]]:
        """Return a call of the consumer."""
        options = {"remote_id": self.held(), "engine_id": "P"}
        return self.consumer.decline, options

    def connect(self) -> tuple[Any, dict[str, Any]]:
        """Return a call of the consumer."""
        options = {"introductions": self.pair[0].introductions}
        return self.consumer.connect, options | {"timeout": 1.0}

    def fetch(self) -> tuple[Any, dict[str, Any]]:
        """Return a call of the consumer, which fetches from an absent process."""
        return self.consumer.fetch, {"addresses": [], "timeout": 0.01, "absent": 0.01}

    def disconnect(self) -> tuple[Any, dict[str, Any]]:
        """Return a call of the consumer."""
        return self.consumer.disconnect, {"engine_id": "Q"}

    def hold(self) -> tuple[Any, dict[str, Any]]:
        """Return a call of the producer."""
        options = {
            "remote_id": new_remote_id(next(self.names)),
            "lease": 0.01,
            "blocks": {},
        }
        return self.producer.hold, options

    def abort(self) -> tuple[Any, dict[str, Any]]:
        """Return a call of the producer."""
        return self.producer.abort, {"remote_id": self.held()}


CALLS = (
    "load",
    "decline",
    "connect",
    "fetch",
    "disconnect",
    "hold",
    "abort",
)


@pytest.mark.parametrize("name", CALLS)
def test_call_accepts_a_strange_argument_or_raises_an_error_of_the_library(
    pair: tuple[Side, Side], name: str
) -> None:
    """Afterwards the sessions can load a request."""
    calls = Calls(pair)
    for argument in getattr(calls, name)()[1]:
        for value in STRANGE:
            call, options = getattr(calls, name)()
            try:
                result = call(**options | {argument: value})
            except KVSpecError:
                continue
            if isinstance(result, Load):
                result.cancel()
                until(lambda result=result: result.poll() != "moving", *pair)
    asked, remote_id = request("last"), calls.held()
    pair[0].fill(asked)
    pair[1].spoil(asked)
    (load,) = pair[1].load(asked, remote_id)
    until(lambda: load.poll() == "done", *pair)
    assert [] == pair[1].wrong(asked)
