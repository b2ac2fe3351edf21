"""A load is done only if exactly its request was pushed. Else its error names the field."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import kvspec
from kvspec.errors import SpecError, TransferError

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from two_engines import Direct, Side, engine, request, until

from kvspec.session import Load, new_remote_id
from kvspec.session.holds import Holds
from kvspec.session.load import Push
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeFlight
from kvspec.wire.messages import Message


@contextlib.contextmanager
def pushing(producers: int = 2, consumers: int = 1, **more: Any) -> Iterator[tuple[Side, Side]]:
    """Yield a producer and a consumer that are connected in both directions."""
    with (
        Side("P", engine(producers, **more), polled=True) as producer,
        Side("D", engine(consumers, **more), polled=False, heartbeat=0.05) as consumer,
    ):
        consumer.connect(producer)
        for session in producer.sessions.values():
            session.connect(consumer.introductions, role="consumer")
        yield producer, consumer


@pytest.fixture
def net() -> Iterator[FakeNixl]:
    """Replace nixl."""
    with FakeNixl() as fake:
        yield fake


def push(side: Side, asked: kvspec.TransferRequest, remote_id: str) -> list[Push]:
    """Push a request from every rank."""
    given: dict[str, Any] = {"remote_id": remote_id, "timeout": 9.0, "epoch": 1}
    return [session.push(asked, **given) for session in side.sessions.values()]


def ended(loads: list[Load], *sides: Side) -> list[str]:
    """Wait until all of *loads* ended, and return how."""
    until(lambda: all(load.state != "moving" for load in loads), *sides)
    return [load.state for load in loads]


def blocks(*ids: int) -> dict[str, list[int]]:
    """Return the table of every group."""
    return {group: [*ids] for group in ("full", "window", "state")}


BASE: dict[str, Any] = {
    "tokens": 14, "cached": 3, "producer_blocks": blocks(1, 2, 3, 4),
    "consumer_blocks": blocks(4, 3, 2, 1),
}  # fmt: skip
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"tokens": 8}, "state_tokens=8"),
    ({"tokens": 15}, "num_tokens=15"),
    ({"cached": 2}, "cached_tokens"),
    ({"cached": 14}, "cached_tokens"),
    ({"cached": {"full": 4, "window": 3, "state": 3}}, "cached_tokens"),
    ({"consumer_blocks": blocks(4, 3, 2, 5)}, "consumer_blocks"),
    ({"consumer_blocks": blocks(3, 4, 2, 1)}, "consumer_blocks"),
    ({"consumer_blocks": blocks(4, 3, 2, 1) | {"state": [7]}}, "consumer_blocks"),
]


@pytest.mark.parametrize("first", ["load", "push"])
@pytest.mark.parametrize(("other", "field"), OTHERS, ids=range(len(OTHERS)))
def test_load_fails_when_another_request_is_pushed(
    net: FakeNixl, other: dict[str, Any], field: str, first: str
) -> None:
    """Fewer or more tokens, other cached tokens, other blocks, or another order of blocks."""
    with pushing(state=True) as (producer, consumer):
        wanted, pushed = request(**BASE), request(**BASE | other)
        remote_id = new_remote_id("r")
        producer.fill(wanted)
        producer.hold(remote_id)
        pushes = push(producer, pushed, remote_id) if first == "push" else []
        loads = consumer.load(wanted, remote_id, pushed=True)
        pushes = pushes or push(producer, pushed, remote_id)
        assert ["failed"] == ended(loads, producer, consumer)
        assert "differs" == loads[0].error.state  # type: ignore[union-attr]
        # The message has the producer rank and the field that differs.
        assert all(fact in str(loads[0].error) for fact in ("P tp0", field))
        assert {"full", "window", "state"} == set(loads[0].undefined_blocks)
        assert ["done"] * 2 == [one.poll() for one in pushes]


@pytest.mark.parametrize(
    "same",
    [
        {},
        {
            "cached": {"full": 3, "window": 0, "state": 13}
        },  # The first tokens of the window are live in any case.
        {"consumer_blocks": blocks(4, 3, 2, 1, 6)},
        {"producer_blocks": blocks(4, 1, 3, 2)},
        {"state_tokens": 14, "encoder_tokens": 5},
    ],
    ids=repr,
)
def test_load_is_done_when_an_equal_request_is_pushed(net: FakeNixl, same: dict[str, Any]) -> None:
    """Two requests are equal if they write the same tokens into the same blocks."""
    with pushing(state=True) as (producer, consumer):
        wanted, pushed = request(**BASE), request(**BASE | same)
        remote_id = new_remote_id("r")
        producer.fill(pushed)
        consumer.spoil(wanted)
        producer.hold(remote_id)
        loads = consumer.load(wanted, remote_id, pushed=True)
        push(producer, pushed, remote_id)
        assert ["done"] == ended(loads, producer, consumer)
        assert [] == consumer.wrong(wanted)


def test_cached_load_waits_for_the_push(net: FakeNixl) -> None:
    """The load wants no data. It fails if the push contains some."""
    with pushing() as (producer, consumer):
        for pushed, state in ((20, "done"), (0, "failed")):
            remote_id = new_remote_id("r")
            producer.hold(remote_id)
            (load,) = consumer.load(request(cached=14), remote_id, pushed=True)
            assert "moving" == load.poll()
            push(producer, request(cached=pushed), remote_id)
            assert [state] == ended([load], producer, consumer)
            assert {} == load.undefined_blocks
            until(lambda: not producer.settled()[0], producer, consumer)


def test_push_skips_a_reader_that_declined(net: FakeNixl) -> None:
    """Its blocks may belong to another request by then. The other readers receive their data."""
    with pushing(producers=1, consumers=2) as (producer, consumer):
        remote_id, asked = new_remote_id("r"), request()
        producer.hold(remote_id)
        producer.fill(asked)
        consumer.spoil(asked)
        gone, reads = consumer.sessions.values()
        gone.decline(remote_id)
        for _ in range(9):
            producer.poll()
            consumer.poll()
        load = reads.load(asked, remote_id=remote_id, timeout=9.0, pushed=True)
        (pushed,) = push(producer, asked, remote_id)
        assert ["done"] == ended([load], producer, consumer)
        assert "failed" == pushed.poll()
        assert ("stopped", "D") == (pushed.error.state, pushed.error.rank)
        wrong = consumer.wrong(asked)
        assert wrong
        assert all(line.startswith("tp0") for line in wrong)
        first = kvspec.RankId()
        for name, flat in consumer.storage[first].items():
            assert (flat == consumer.before[first][name]).all(), "written after its release"


@pytest.mark.parametrize("second", ["pull", "push", "follow"])
@pytest.mark.parametrize("first", ["pull", "push", "follow"])
def test_load_of_blocks_of_another_load_is_refused(net: FakeNixl, first: str, second: str) -> None:
    """The error names the block and the load that waits for it, in every mode of both loads."""
    with pushing() as (producer, consumer):
        net.fate = lambda _: None
        names = [new_remote_id(name) for name in "ab"]
        for name in names:
            producer.hold(name)
        modes = {"pull": {}, "push": {"pushed": True}, "follow": {"follow": True}}
        (open_,) = consumer.load(request("a"), names[0], **modes[first])
        for flight in net.moving:
            flight.land()  # No session was polled since.
        (session,) = consumer.sessions.values()
        elsewhere = request("b", tokens=4, consumer_blocks=blocks(5))
        one = request("b", tokens=8, consumer_blocks=blocks(5, 2))
        for wrong in (request("b"), one):
            with pytest.raises(TransferError, match=r"block \d of group full belongs to 'a'.*busy"):
                consumer.load(wrong, names[1], **modes[second])
        assert 1 == session.stats().loads
        net.fate = FakeFlight.land
        consumer.load(elsewhere, names[1], **modes[second])
        open_.cancel()
        for name in names[:1] if first == "push" else ():
            push(producer, request("a"), name)
        assert ["failed"] == ended([open_], producer, consumer)
        consumer.load(attrs.evolve(one, consumer_blocks=blocks(2, 1), request_id="c"), names[0],
                      attempt=1, **modes[second])  # fmt: skip


def test_refused_load_owns_no_blocks(net: FakeNixl) -> None:
    """The error names the field in every mode, and the same request can be loaded later."""
    with pushing() as (producer, consumer):
        for mode in ({}, {"pushed": True}, {"follow": True}):
            name = f"r{mode}"
            for wrong in (8, -1):
                bad = request(name, consumer_blocks=blocks(1, 2, 3, wrong))
                with pytest.raises(SpecError, match=r"consumer_blocks\['full'\].*0 to 7"):
                    consumer.load(bad, new_remote_id("r"), **mode)
            with pytest.raises(SpecError, match="timeout="):
                consumer.load(request(name), new_remote_id("r"), timeout=None, **mode)
            (load,) = consumer.load(request(name), new_remote_id("r"), **mode)
            load.cancel()
            for session in consumer.sessions.values():
                session.disconnect("P")
            assert "failed" == load.poll()
            consumer.connect(producer)


def test_heartbeats_do_not_disturb_a_push(net: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader sends heartbeats before the push and during the push."""
    with pushing(producers=1) as (producer, consumer):
        remote_id, asked = new_remote_id("r"), request()
        producer.fill(asked)
        consumer.spoil(asked)
        producer.hold(remote_id)
        (session,), (reader,) = producer.sessions.values(), consumer.sessions.values()
        heartbeats, receive = list[Message](), Holds.receive

        def count(self: Holds, message: Message) -> None:
            receive(self, message)
            heartbeats.append(message)

        monkeypatch.setattr(Holds, "receive", count)
        (load,) = consumer.load(asked, remote_id, pushed=True)
        until(lambda: heartbeats, producer, consumer)
        assert (False, True) == (session._moving(), reader._moving())
        net.fate = lambda _: None
        (pushed,) = push(producer, asked, remote_id)
        heartbeats.clear()
        until(lambda: heartbeats, producer, consumer)
        assert (True, "moving") == (session._moving(), pushed.poll())
        for flight in net.moving:
            flight.land()
        assert ["done"] == ended([load], producer, consumer)
        assert ("done", [], False) == (pushed.poll(), consumer.wrong(asked), session._moving())


def test_outcome_of_a_push_is_sent_at_once(net: FakeNixl) -> None:
    """The reader does not have to send its next heartbeat, which is minutes later."""
    with (
        Side("P", engine(1), polled=True, lease=2000.0) as producer,
        Side("D", engine(1), polled=False, heartbeat=600.0) as consumer,
    ):
        consumer.connect(producer)
        (session,) = producer.sessions.values()
        session.connect(consumer.introductions, role="consumer")
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        loads = consumer.load(request(), remote_id, pushed=True)
        (reader,) = consumer.sessions.values()
        asked = reader._loads.book._loads["r"].asked[kvspec.RankId()]
        until(lambda: not asked, producer, consumer)  # Its first heartbeat is answered.
        push(producer, request(), remote_id)
        assert ["done"] == ended(loads, producer, consumer)


def test_push_continues_when_engines_connect(net: FakeNixl) -> None:
    """Another engine connects, or the same incarnation connects again."""
    with (
        pushing(producers=1) as (producer, consumer),
        Side("Q", engine(1), polled=True, epoch=9) as before,
        Side("Q", engine(1), polled=True, epoch=10) as after,
    ):
        remote_id, asked = new_remote_id("r"), request()
        producer.fill(asked)
        consumer.spoil(asked)
        producer.hold(remote_id)
        (load,) = consumer.load(asked, remote_id, pushed=True)
        for other in (before, producer, after):
            consumer.connect(other)
            assert ("moving", None) == (load.poll(), load.error)
        for session in consumer.sessions.values():
            session.connect(producer.introductions, prefix_multiple=4)
            session.disconnect("Q")
        assert ("moving", None) == (load.poll(), load.error)
        push(producer, asked, remote_id)
        assert ["done"] == ended([load], producer, consumer)
        assert [] == consumer.wrong(asked)


def test_stop_is_sent_again_after_each_heartbeat(net: FakeNixl) -> None:
    """The first is sent when the load fails. They end when the producer answers."""
    now = 0.0
    with (
        Side("P", engine(1), polled=True, channel=Direct("P")) as producer,
        Side(
            "D", engine(1), polled=False, channel=Direct("D"), heartbeat=1.0, clock=lambda: now
        ) as consumer,
    ):
        consumer.connect(producer)
        (session,) = producer.sessions.values()
        session.connect(consumer.introductions, role="consumer")
        (load,) = consumer.load(request(), new_remote_id("r"), pushed=True)
        load.cancel()
        asked = []
        for later in (0.0, 0.0, 0.9, 1.0, 1.0, 2.5, 3.0, 3.5):
            now = later
            consumer.poll()
            asked.append(sum(b"stop" in data for _, data in Direct.channels["P"].arrived))
        assert [1, 1, 1, 2, 2, 3, 3, 4] == asked
        assert ["failed"] == ended([load], producer, consumer)


def test_reader_that_gave_up_is_skipped_while_the_request_is_held(net: FakeNixl) -> None:
    """The lease is longer than the time for which readers of unknown requests are remembered."""
    now = 0.0
    with (
        Side("P", engine(1), polled=True, longest=60.0, clock=lambda: now) as producer,
        Side("D", engine(1), polled=False, heartbeat=0.05) as consumer,
    ):
        consumer.connect(producer)
        (session,) = producer.sessions.values()
        session.connect(consumer.introductions, role="consumer")
        held, unknown = new_remote_id("held"), new_remote_id("unknown")
        producer.hold(held, lease=100.0)
        loads = [
            *consumer.load(request("a", tokens=4), held, pushed=True, again=True),
            *consumer.load(request("b", tokens=4, consumer_blocks=blocks(5)), unknown,
                           pushed=True, again=True),
        ]  # fmt: skip
        for load in loads:
            load.cancel()
        assert ["failed"] * 2 == ended(loads, producer, consumer)
        assert 2 == session.stats().pushes
        now = 61.0
        session.poll()
        assert 1 == session.stats().pushes
        (pushed,) = push(producer, request("a", tokens=4), held)
        assert ("failed", 0) == (pushed.poll(), len(net.moving))
        now = 101.0
        session.poll()
        assert (0, 1) == (session.stats().held, session.stats().pushes)
        now = 132.0  # The answers are remembered for one more lease.
        session.poll()
        assert (0, 0) == (session.stats().remembered, session.stats().pushes)


@pytest.mark.parametrize("lost", [True, False])
def test_consumer_is_connected_again_after_a_lost_push(net: FakeNixl, lost: bool) -> None:
    """A connection that only was late stays as it is."""
    with pushing(producers=1) as (producer, consumer):
        (session,) = producer.sessions.values()
        known = session.connect(consumer.introductions, role="consumer")
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        net.fate = lambda _: None
        push_ = session.push(request(), remote_id=remote_id, timeout=0.05, epoch=1)
        if lost:
            net.moving[0].fail()
        until(lambda: push_.error, producer)
        assert push_.error is not None
        assert ("peer_lost" if lost else "timeout") == push_.error.state
        for flight in net.moving:
            flight.land()
        until(lambda: push_.poll() == "failed", producer)
        assert (0, 0) == (session.nixl.stats().transfers, session.nixl.stats().handles)
        net.fate = FakeFlight.land
        assert lost is (session.connect(consumer.introductions, role="consumer") is not known)
        producer.poll()
        again, asked = new_remote_id("again"), request()
        producer.fill(asked)
        consumer.spoil(asked)
        producer.hold(again)
        loads = consumer.load(asked, again, pushed=True)
        push(producer, asked, again)
        assert ["done"] == ended(loads, producer, consumer)
        assert [] == consumer.wrong(asked)
