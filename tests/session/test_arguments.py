"""What a session is asked for wrongly is refused by name, before anything moves or is told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from strange import STRANGE
from two_engines import Side, engine, request, until

import kvspec
from kvspec.errors import KVSpecError, SpecError, TransferError
from kvspec.nixl import NixlRank
from kvspec.session import Load, Session, TcpChannel, new_remote_id
from kvspec.session.load import Push
from kvspec.testing import FakeNixl


@pytest.fixture
def pair() -> Iterator[tuple[Side, Side]]:
    """Return two engines over memory, each a producer and a consumer of the other."""
    with (
        FakeNixl(),
        Side("P", engine(2), polled=False) as producer,
        Side("D", engine(1), polled=False) as consumer,
    ):
        consumer.connect(producer)
        for session in producer.sessions.values():
            session.connect(consumer.introductions, role="consumer")
        yield producer, consumer


def first(side: Side) -> Session:
    """Return the session of a side's first rank."""
    return next(iter(side.sessions.values()))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"request": None}, "request=None: expected a TransferRequest"),
        ({"pushed": 1}, "pushed=1: expected True or False"),
        ({"follow": "no"}, "follow='no': expected True or False"),
        ({"verify": None}, "verify=None: expected True or False"),
        ({"samples": 0}, "samples=0: expected an int >= 1"),
        ({"samples": 2.0}, "samples=2.0: expected an int >= 1"),
        ({"sample": 1}, "sample=1: expected at most 0"),
        ({"sample": 2, "samples": 2}, "sample=2: expected at most 1"),
        ({"attempt": "1"}, "attempt='1': expected an int >= 0"),
    ],
)
def test_a_load_that_is_no_load_is_refused(
    pair: tuple[Side, Side], more: dict[str, Any], words: str
) -> None:
    """Nothing is posted, and the next one has its blocks."""
    remote_id = new_remote_id("r")
    pair[0].hold(remote_id)
    given = {"request": request(), "remote_id": remote_id, "timeout": 5.0}
    with pytest.raises(SpecError, match=words):
        first(pair[1]).load(**given | more)
    assert 0 == first(pair[1]).stats().loads
    (load,) = pair[1].load(request(), remote_id)
    until(lambda: load.poll() == "done", *pair)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"request": None}, "request=None: expected a TransferRequest"),
        ({"epoch": None}, "epoch=None: expected an int >= 0"),
        ({"epoch": True}, "epoch=True: expected an int >= 0"),
        ({"epoch": 2}, "epoch=2: expected 1, the connected incarnation"),
        ({"attempt": "1"}, "attempt='1': expected an int >= 0"),
        ({"sample": None}, "sample=None: expected an int >= 0"),
    ],
)
def test_a_push_that_is_no_push_is_refused(
    pair: tuple[Side, Side], more: dict[str, Any], words: str
) -> None:
    """One that does not say of which start the blocks are, too: they could be written anew."""
    remote_id = new_remote_id("r")
    pair[0].hold(remote_id)
    given = {"request": request(), "remote_id": remote_id, "timeout": 5.0, "epoch": 1}
    with pytest.raises(SpecError, match=words):
        first(pair[0]).push(**given | more)
    assert 0 == first(pair[0]).stats().pushes


def test_a_thread_is_wanted_or_not() -> None:
    """A word is neither."""
    wrong: Any = "no"
    with (
        FakeNixl(),
        pytest.raises(SpecError, match="background='no': expected True or False"),
    ):
        Side("P", engine(1), polled=False, background=wrong)


@pytest.mark.parametrize("argument", ["nixl", "cache", "replica_policy", "channel"])
def test_what_a_session_is_made_of_is_right_or_refused(argument: str) -> None:
    """By name, before its memory is registered."""
    with FakeNixl(), NixlRank(secret=b"") as nixl:
        cache, _ = kvspec.allocate(engine(1), kvspec.RankId(), num_blocks=2)
        before = nixl.stats()
        given = {"nixl": nixl, "cache": cache, "engine_id": "P"}
        for value in STRANGE:
            if value is not None:
                with pytest.raises(SpecError, match=f"^{argument}="):
                    Session(**given | {argument: value})
        assert before == nixl.stats()


class Handing:
    """A channel that hands on what came as some other type."""

    def __init__(self, kind: Any) -> None:
        self.inner, self.kind = TcpChannel(), kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def receive(self) -> list[tuple[str, Any]]:
        """Return what came."""
        return [(route, self.kind(data)) for route, data in self.inner.receive()]


@pytest.mark.parametrize("kind", [bytearray, memoryview, bytes.hex, len])
def test_a_channel_hands_on_bytes(kind: Any) -> None:
    """Of any type that is some; anything else is noted, and breaks nothing."""
    handing: Any = Handing(kind)
    with (
        FakeNixl(),
        Side("P", engine(2), polled=False) as producer,
        Side("D", engine(1), polled=False, channel=handing) as consumer,
    ):
        consumer.connect(producer)
        remote_id, asked = new_remote_id("r"), request()
        producer.hold(remote_id)
        (load,) = consumer.load(asked, remote_id, timeout=1.0)
        until(lambda: load.poll() != "moving", producer)
        foreign = " ".join(first(consumer).settled().foreign)
        right = kind in (bytearray, memoryview)
        assert ("done" if right else "failed") == load.state
        assert right != ("expected bytes from the channel's" in foreign)


def test_readers_are_counted(pair: tuple[Side, Side]) -> None:
    """By the name that they were given by."""
    for wrong in (0, True, 1.0):
        with pytest.raises(SpecError, match=f"readers={wrong}: expected an int >= 1"):
            first(pair[0]).hold(new_remote_id("r"), readers=wrong)


def test_an_address_is_a_rank_s(pair: tuple[Side, Side]) -> None:
    """Asked once: who is asked twice at once would answer once."""
    address = pair[0].addresses[0]
    for wrong, value in ((pair[0].addresses * 2, address), (address, address), ([3], 3)):
        with pytest.raises(SpecError) as caught:
            first(pair[1]).fetch(wrong)
        assert ("addresses", value) == (caught.value.field, caught.value.value)


def test_meeting_takes_seconds(pair: tuple[Side, Side]) -> None:
    """Also where it would not have waited."""
    for wrong in (-1, None, float("nan")):
        with pytest.raises(SpecError) as caught:
            first(pair[1]).connect(pair[0].introductions, timeout=wrong)
        assert "timeout" == caught.value.field


def test_a_closed_session_does_nothing_any_more(pair: tuple[Side, Side]) -> None:
    """It says so, connects to nobody, and can be closed again."""
    session, remote_id = first(pair[1]), new_remote_id("r")
    session.close()
    for act in (
        lambda: session.load(request(), remote_id=remote_id, timeout=1.0),
        lambda: session.push(request(), remote_id=remote_id, timeout=1.0, epoch=1),
        lambda: session.decline(remote_id),
        lambda: session.connect(pair[0].introductions),
        lambda: session.fetch(pair[0].addresses),
    ):
        with pytest.raises(TransferError, match=r"the session was closed \(state=closed\)"):
            act()
    assert () == session.nixl.peers
    session.poll()
    session.close()


class Asking:
    """What two sessions can be asked, and all that is right to say with it; each time anew."""

    def __init__(self, pair: tuple[Side, Side]) -> None:
        self.pair, self.producer, self.consumer = pair, first(pair[0]), first(pair[1])
        self.names = map("r{}".format, itertools.count())

    def held(self) -> str:
        """Return a request that the producer's ranks hold."""
        remote_id = new_remote_id(next(self.names))
        self.pair[0].hold(remote_id, lease=2.0)
        return remote_id

    def load(self) -> tuple[Any, dict[str, Any]]:
        """Of a consumer."""
        flags = {"pushed": False, "follow": False, "verify": False, "again": False, "samples": 1}
        return self.consumer.load, self.asked("P") | flags

    def push(self) -> tuple[Any, dict[str, Any]]:
        """Of a producer."""
        return self.producer.push, self.asked("D") | {"epoch": 1}

    def asked(self, engine_id: str) -> dict[str, Any]:
        """Return what both have."""
        given = {"request": request(next(self.names)), "remote_id": self.held(), "timeout": 5.0}
        return given | {"engine_id": engine_id, "attempt": 0, "sample": 0}

    def decline(self) -> tuple[Any, dict[str, Any]]:
        """Of a consumer."""
        given = {"held": self.held(), "engine_id": "P", "sample": 0, "samples": 1}
        return self.consumer.decline, given

    def connect(self) -> tuple[Any, dict[str, Any]]:
        """Of a consumer."""
        given = {"introductions": self.pair[0].introductions, "role": "producer"}
        return self.consumer.connect, given | {"prefix_multiple": 1, "timeout": 1.0}

    def fetch(self) -> tuple[Any, dict[str, Any]]:
        """Of a consumer; nobody is there."""
        return self.consumer.fetch, {"addresses": [], "timeout": 0.01, "absent": 0.01}

    def disconnect(self) -> tuple[Any, dict[str, Any]]:
        """Of a consumer."""
        return self.consumer.disconnect, {"engine_id": "Q"}

    def hold(self) -> tuple[Any, dict[str, Any]]:
        """Of a producer."""
        given = {
            "remote_id": new_remote_id(next(self.names)),
            "lease": 0.01,
            "readers": 1,
            "blocks": {},
        }
        return self.producer.hold, given

    def record_progress(self) -> tuple[Any, dict[str, Any]]:
        """Of a producer."""
        given = {"remote_id": self.held(), "upto": 3, "layers": ["l.0"]}
        return self.producer.record_progress, given

    def abort(self) -> tuple[Any, dict[str, Any]]:
        """Of a producer."""
        return self.producer.abort, {"remote_id": self.held()}


CALLS = (
    "load",
    "push",
    "decline",
    "connect",
    "fetch",
    "disconnect",
    "hold",
    "record_progress",
    "abort",
)


@pytest.mark.parametrize("name", CALLS)
def test_whatever_is_given_is_taken_or_refused(pair: tuple[Side, Side], name: str) -> None:
    """By an error of the library, whatever it is; and the session serves on."""
    asking = Asking(pair)
    for argument in getattr(asking, name)()[1]:
        for value in STRANGE:
            call, given = getattr(asking, name)()
            try:
                made = call(**given | {argument: value})
            except KVSpecError:
                continue
            if isinstance(made, Load | Push):
                if isinstance(made, Load):
                    made.cancel()
                until(lambda made=made: made.poll() != "moving", *pair)
    asked, remote_id = request("last"), asking.held()
    pair[0].fill(asked)
    pair[1].spoil(asked)
    (load,) = pair[1].load(asked, remote_id)
    until(lambda: load.poll() == "done", *pair)
    assert [] == pair[1].wrong(asked)
