"""Pushes of sessions: the load is done if its own request was pushed, and fails otherwise."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from two_engines import (
    Direct,
    Side,
    ended,
    engine,
    freed,
    land,
    let_nothing_land,
    pushing,
    quiet,
    request,
    until,
)

import kvspec
from kvspec.errors import MismatchError, SpecError, TransferError
from kvspec.session import new_remote_id
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeFlight


@pytest.fixture
def sides(net: FakeNixl) -> Iterator[tuple[Side, Side]]:
    """Yield a producer of two ranks and a consumer of one."""
    with pushing() as both:
        yield both


def blocks(*ids: int) -> dict[str, list[int]]:
    """Return the table of every group."""
    return {group: [*ids] for group in ("full", "window", "state")}


BASE: dict[str, Any] = {
    "tokens": 14, "cached": 3, "producer_blocks": blocks(1, 2, 3, 4),
    "consumer_blocks": blocks(4, 3, 2, 1),
}  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    {"tokens": 8},
    {"tokens": 15},
    {"cached": 2},
    {"cached": 14},
    {"cached": {"full": 4, "window": 3, "state": 3}},
    {"consumer_blocks": blocks(4, 3, 2, 5)},
    {"consumer_blocks": blocks(3, 4, 2, 1)},
    {"consumer_blocks": blocks(4, 3, 2, 1) | {"state": [7]}},
]


def check_pushed(
    producer: Side, consumer: Side, asked: kvspec.TransferRequest, pushed: kvspec.TransferRequest
) -> None:
    """Check that a load of *asked* is done with the right bytes after a push of *pushed*."""
    remote_id = new_remote_id("r")
    producer.fill(pushed)
    consumer.spoil(asked)
    producer.hold(remote_id)
    loads = consumer.load(asked, remote_id, pushed=True)
    producer.push(pushed, remote_id)
    assert ["done"] == ended(loads, producer, consumer)
    assert [] == consumer.wrong(asked)


@pytest.mark.parametrize("first", ["load", "push"])
@pytest.mark.parametrize("other", OTHERS, ids=range(len(OTHERS)))
def test_load_fails_when_another_request_is_pushed(
    net: FakeNixl, other: dict[str, Any], first: str
) -> None:
    """The numbers of tokens, the cached tokens, the blocks or their order differ."""
    with pushing(state=True) as (producer, consumer):
        asked, pushed = request(**BASE), request(**BASE | other)
        remote_id = new_remote_id("r")
        producer.fill(asked)
        producer.hold(remote_id)
        pushes = producer.push(pushed, remote_id) if first == "push" else []
        loads = consumer.load(asked, remote_id, pushed=True)
        pushes = pushes or producer.push(pushed, remote_id)
        assert ["failed"] == ended(loads, producer, consumer)
        assert "differs" == loads[0].error.state  # type: ignore[union-attr]
        assert "P tp0" == loads[0].error.rank  # type: ignore[union-attr]
        assert {"full", "window", "state"} == set(loads[0].undefined_blocks)
        assert ["done"] * 2 == [push.poll() for push in pushes]


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"cached": {"full": 3, "window": 0, "state": 13}},  # The window begins at token 7.
        {"consumer_blocks": blocks(4, 3, 2, 1, 6)},
        {"producer_blocks": blocks(4, 1, 3, 2)},
        {"state_tokens": 14, "encoder_tokens": 5},
    ],
    ids=repr,
)
def test_load_is_done_when_an_equivalent_request_is_pushed(
    net: FakeNixl, same: dict[str, Any]
) -> None:
    """Two requests are equivalent if they write the same tokens into the same blocks."""
    with pushing(state=True) as (producer, consumer):
        check_pushed(producer, consumer, request(**BASE), request(**BASE | same))


def test_pushed_load_of_a_full_hit_waits_for_an_empty_push(net: FakeNixl) -> None:
    """It fails if the producer pushes tokens."""
    with pushing() as (producer, consumer):
        for pushed, state in ((20, "done"), (0, "failed")):
            remote_id = new_remote_id("r")
            producer.hold(remote_id)
            (load,) = consumer.load(request(cached=14), remote_id, pushed=True)
            assert "moving" == load.poll()
            producer.push(request(cached=pushed), remote_id)
            assert [state] == ended([load], producer, consumer)
            assert {} == load.undefined_blocks
            until(lambda: not producer.settled()[0], producer, consumer)


def test_push_does_not_write_to_a_reader_that_declined(net: FakeNixl) -> None:
    """Its blocks may belong to another request by then. The other reader receives its part."""
    with pushing(producers=1, consumers=2) as (producer, consumer):
        remote_id, asked = new_remote_id("r"), request()
        producer.hold(remote_id)
        producer.fill(asked)
        consumer.spoil(asked)
        declines, reads = consumer.sessions.values()
        declines.decline(remote_id)
        for _ in range(9):
            producer.poll()
            consumer.poll()
        load = reads.load(asked, remote_id=remote_id, timeout=9.0, pushed=True)
        (pushed,) = producer.push(asked, remote_id)
        assert ["done"] == ended([load], producer, consumer)
        assert "failed" == pushed.poll()
        assert ("stopped", "D") == (pushed.error.state, pushed.error.rank)
        wrong = consumer.wrong(asked)
        assert wrong
        assert all(line.startswith("tp0") for line in wrong)
        first = kvspec.RankId()
        for name, flat in consumer.storage[first].items():
            assert (flat == consumer.before[first][name]).all(), "written after it declined"


@pytest.mark.parametrize("second", ["pull", "push", "follow"])
@pytest.mark.parametrize("first", ["pull", "push", "follow"])
def test_blocks_belong_to_one_load_in_every_mode(net: FakeNixl, first: str, second: str) -> None:
    """A load into blocks of an open load is rejected. The message names the open load."""
    with pushing() as (producer, consumer):
        let_nothing_land(net)
        names = [new_remote_id(name) for name in "ab"]
        for name in names:
            producer.hold(name)
        modes = {"pull": {}, "push": {"pushed": True}, "follow": {"follow": True}}
        (open_,) = consumer.load(request("a"), names[0], **modes[first])
        land(net)  # No poll has noticed it yet.
        elsewhere = request("b", tokens=4, consumer_blocks=blocks(5))
        shares = request("b", tokens=8, consumer_blocks=blocks(5, 2))
        for wrong in (request("b"), shares):
            with pytest.raises(TransferError, match="'a'") as caught:
                consumer.load(wrong, names[1], **modes[second])
            assert "busy" == caught.value.state
        assert 1 == consumer.first.stats().loads
        net.fate = FakeFlight.land
        consumer.load(elsewhere, names[1], **modes[second])
        open_.cancel()
        if first == "push":
            producer.push(request("a"), names[0])
        assert ["failed"] == ended([open_], producer, consumer)
        free = attrs.evolve(shares, consumer_blocks=blocks(2, 1), request_id="c")
        consumer.load(free, names[0], attempt=1, **modes[second])


def test_rejected_load_keeps_no_blocks_in_any_mode(net: FakeNixl) -> None:
    """The same request can be loaded with right arguments."""
    with pushing() as (producer, consumer):
        for mode in ({}, {"pushed": True}, {"follow": True}):
            name = f"r{mode}"
            for wrong in (8, -1):
                bad = request(name, consumer_blocks=blocks(1, 2, 3, wrong))
                with pytest.raises(SpecError, match="7") as caught:
                    consumer.load(bad, new_remote_id("r"), **mode)
                assert "consumer_blocks['full']" == caught.value.field
            with pytest.raises(SpecError) as caught:
                consumer.load(request(name), new_remote_id("r"), timeout=None, **mode)
            assert ("timeout", None) == (caught.value.field, caught.value.value)
            (load,) = consumer.load(request(name), new_remote_id("r"), **mode)
            load.cancel()
            for session in consumer.sessions.values():
                session.disconnect("P")
            assert "failed" == load.poll()
            consumer.connect(producer)


def test_heartbeats_of_a_waiting_reader_do_not_stop_a_push(net: FakeNixl) -> None:
    """They arrive before the push starts, and while it moves."""
    with pushing(producers=1) as (producer, consumer):
        remote_id, asked = new_remote_id("r"), request()
        producer.fill(asked)
        consumer.spoil(asked)
        producer.hold(remote_id)
        counters = lambda: producer.first.stats().counters  # noqa: E731
        (load,) = consumer.load(asked, remote_id, pushed=True)
        until(lambda: counters().messages_received, producer, consumer)
        assert (0, 1) == (producer.first.stats().pushes, consumer.first.stats().steps)
        let_nothing_land(net)
        (push,) = producer.push(asked, remote_id)
        before = counters().messages_received
        until(lambda: counters().messages_received > before, producer, consumer)
        assert (1, "moving") == (producer.first.nixl.stats().transfers, push.poll())
        land(net)
        assert ["done"] == ended([load], producer, consumer)
        assert ("done", []) == (push.poll(), consumer.wrong(asked))
        assert 0 == producer.first.nixl.stats().transfers


def test_reader_is_sent_the_outcome_of_a_push_at_once(net: FakeNixl) -> None:
    """Its next heartbeat would come in minutes."""
    with (
        Side("P", engine(1), polled=True, lease=2000.0) as producer,
        Side("D", engine(1), polled=False, heartbeat=600.0) as consumer,
    ):
        consumer.connect(producer)
        producer.connect(consumer, "consumer")
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        loads = consumer.load(request(), remote_id, pushed=True)
        # The first message that the consumer receives answers its first heartbeat.
        until(lambda: consumer.first.stats().counters.messages_received, producer, consumer)
        producer.push(request(), remote_id)
        assert ["done"] == ended(loads, producer, consumer)


def test_other_connections_do_not_end_a_pushed_load(net: FakeNixl) -> None:
    """The consumer connects another engine, or the same incarnation of the producer again."""
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
            session.connect(producer.other_introductions)
            session.disconnect("Q")
        assert ("moving", None) == (load.poll(), load.error)
        producer.push(asked, remote_id)
        assert ["done"] == ended([load], producer, consumer)
        assert [] == consumer.wrong(asked)


def test_reader_sends_stop_once_in_each_heartbeat_until_it_is_answered(net: FakeNixl) -> None:
    """The first `stop` is sent as soon as the load has failed."""
    now = 0.0
    with (
        Side("P", engine(1), polled=True, channel=Direct("P")) as producer,
        Side(
            "D", engine(1), polled=False, channel=Direct("D"), heartbeat=1.0, clock=lambda: now
        ) as consumer,
    ):
        consumer.connect(producer)
        producer.connect(consumer, "consumer")
        (load,) = consumer.load(request(), new_remote_id("r"), pushed=True)
        load.cancel()
        counts = []
        for later in (0.0, 0.0, 0.9, 1.0, 1.0, 2.5, 3.0, 3.5):
            now = later
            consumer.poll()
            counts.append(sum(b"stop" in data for _, data in Direct.channels["P"].arrived))
        assert [1, 1, 1, 2, 2, 3, 3, 4] == counts
        assert ["failed"] == ended([load], producer, consumer)


def test_reader_that_gave_up_is_remembered_while_its_request_is_held(net: FakeNixl) -> None:
    """The lease may be longer than `longest`, for which readers are remembered otherwise."""
    now = 0.0
    with (
        Side("P", engine(1), polled=True, longest=60.0, clock=lambda: now) as producer,
        Side("D", engine(1), polled=False, heartbeat=0.05) as consumer,
    ):
        consumer.connect(producer)
        producer.connect(consumer, "consumer")
        session = producer.first
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
        (pushed,) = producer.push(request("a", tokens=4), held)
        assert ("failed", 0) == (pushed.poll(), len(net.moving))
        now = 101.0
        session.poll()
        assert (0, 1) == (session.stats().held, session.stats().pushes)
        now = 132.0  # The answers are remembered for one more lease.
        session.poll()
        assert (0, 0) == (session.stats().remembered, session.stats().pushes)


@pytest.mark.parametrize("lost", [True, False])
def test_connect_opens_a_connection_that_was_lost_in_a_push(net: FakeNixl, lost: bool) -> None:
    """A connection that was only late stays."""
    with pushing(producers=1) as (producer, consumer):
        session = producer.first
        known = session.connect(consumer.introductions, role="consumer")
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        let_nothing_land(net)
        (push,) = producer.push(request(), remote_id, timeout=0.05)
        if lost:
            net.moving[0].fail()
        until(lambda: push.error, producer)
        assert push.error is not None
        assert ("peer_lost" if lost else "timeout") == push.error.state
        land(net)
        until(lambda: push.poll() == "failed", producer)
        assert (0, 0) == (session.nixl.stats().transfers, session.nixl.stats().handles)
        net.fate = FakeFlight.land
        assert lost is (session.connect(consumer.introductions, role="consumer") is not known)
        producer.poll()
        again, asked = new_remote_id("again"), request()
        producer.fill(asked)
        consumer.spoil(asked)
        producer.hold(again)
        loads = consumer.load(asked, again, pushed=True)
        producer.push(asked, again)
        assert ["done"] == ended(loads, producer, consumer)
        assert [] == consumer.wrong(asked)


@pytest.mark.parametrize("kind", ["fake", pytest.param("real", marks=pytest.mark.nixl)])
def test_pushed_load_is_done_when_all_ranks_have_written(kind: str) -> None:
    """Each of four ranks writes its part into both readers, whose blocks have half the size."""
    if kind == "real":
        pytest.importorskip("nixl_cu13", reason="needs nixl")
    with (
        FakeNixl() if kind == "fake" else contextlib.nullcontext(),
        Side("P", engine(4), polled=False) as producer,
        Side("D", engine(2, block=2), polled=False) as consumer,
    ):
        consumer.connect(producer)
        producer.connect(consumer, "consumer")
        asked = request(tokens=7, consumer_blocks={"full": [1, 3, 5, 7], "window": [1, 3, 5, 7]})
        remote_id = new_remote_id("r")
        producer.fill(asked)
        consumer.spoil(asked)
        producer.hold(remote_id)
        loads = consumer.load(asked, remote_id, pushed=True)
        pushes = producer.push(asked, remote_id)
        assert ["done"] * 2 == ended(loads, producer, consumer)
        assert ["done"] * 4 == [push.poll() for push in pushes]
        assert [] == consumer.wrong(asked)
        assert ["r"] * 4 == freed(4, producer, consumer)
        quiet(producer, consumer)


def test_cancelled_load_stops_the_push_and_ends_after_its_bytes(
    net: FakeNixl, sides: tuple[Side, Side]
) -> None:
    """The rank that writes stops. The rank that has not begun must not begin."""
    producer, consumer = sides
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    let_nothing_land(net)
    first, second = producer.sessions.values()
    push = first.push(request(), remote_id=remote_id, timeout=9.0, epoch=1)
    (load,) = consumer.load(request(), remote_id, pushed=True)
    load.cancel()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        for side in sides:
            side.poll()
    assert ("moving", "moving") == (load.state, push.state)
    land(net)
    assert ["failed"] == ended([load], producer, consumer)
    assert {"full", "window"} == set(load.undefined_blocks)
    assert "failed" == push.poll()
    assert push.error is not None
    assert "stopped" == push.error.state
    quiet(producer, consumer)
    with pytest.raises(SpecError) as caught:
        second.push(request(), remote_id=remote_id, timeout=9.0, epoch=1)
    assert ("remote_id", remote_id) == (caught.value.field, caught.value.value)


def test_load_fails_when_one_push_fails(net: FakeNixl, sides: tuple[Side, Side]) -> None:
    """The errors on both sides name the other rank. A request is pushed once to an incarnation."""
    producer, consumer = sides
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    let_nothing_land(net)
    (load,) = consumer.load(request(), remote_id, pushed=True)
    pushes = producer.push(request(), remote_id)
    with pytest.raises(SpecError) as caught:
        producer.push(request(), remote_id, epoch=0)
    assert ("epoch", 0) == (caught.value.field, caught.value.value)
    with pytest.raises(SpecError) as caught:
        producer.push(request(), remote_id)
    assert ("remote_id", remote_id) == (caught.value.field, caught.value.value)
    bad, good = net.moving
    bad.fail(0.5)
    good.land()
    assert ["failed"] == ended([load], producer, consumer)
    assert ["failed", "done"] == [push.poll() for push in pushes]
    assert pushes[0].error is not None
    assert load.error is not None
    assert ("D tp0", "P tp0") == (pushes[0].error.rank, load.error.rank)
    assert all("full" in error.message for error in (pushes[0].error, load.error))
    quiet(producer, consumer)


def test_second_push_of_an_attempt_does_not_end_the_first(net: FakeNixl) -> None:
    """The second is refused. The reader is sent no outcome while the first can write."""
    with pushing(producers=1) as (producer, consumer):
        remote_id, asked = new_remote_id("r"), request()
        producer.fill(asked)
        consumer.spoil(asked)
        producer.hold(remote_id)
        let_nothing_land(net)
        (load,) = consumer.load(asked, remote_id, pushed=True)
        producer.push(asked, remote_id)
        with pytest.raises(SpecError) as caught:
            producer.push(asked, remote_id)
        assert ("remote_id", remote_id) == (caught.value.field, caught.value.value)
        for _ in range(9):
            producer.poll()
            consumer.poll()
        assert ("moving", None) == (load.state, load.error)
        land(net)
        assert ["done"] == ended([load], producer, consumer)
        assert [] == consumer.wrong(asked)
        quiet(producer, consumer)


@pytest.mark.parametrize("first", ["load", "push"])
def test_load_fails_when_a_push_is_rejected(sides: tuple[Side, Side], first: str) -> None:
    """It fails at once, or at its first heartbeat. The next attempt is done."""
    producer, consumer = sides
    remote_id, asked = new_remote_id("r"), request()
    producer.hold(remote_id)
    loads = consumer.load(asked, remote_id, pushed=True) if first == "load" else []
    short = request(producer_blocks={"full": [1], "window": [1]})
    options: dict[str, Any] = {"remote_id": remote_id, "timeout": 9.0, "epoch": 1}
    session, *others = producer.sessions.values()
    with pytest.raises(MismatchError) as caught:
        session.push(short, **options)
    assert any("producer_blocks" in each.field for each in caught.value.mismatches)
    assert "failed" == session.push(asked, **options).poll()
    loads = loads or consumer.load(asked, remote_id, pushed=True)
    for other in others:
        other.push(asked, **options)
    assert ["failed"] == ended(loads, producer, consumer)
    assert loads[0].error is not None
    assert "P tp0" == loads[0].error.rank
    quiet(producer, consumer)
    check_pushed(producer, consumer, asked, asked)
    quiet(producer, consumer)


def test_pushed_load_needs_blocks_for_all_tokens(sides: tuple[Side, Side]) -> None:
    """A table that is too short is rejected."""
    short = {"full": [1, 2, 3], "window": [1, 2, 3, 4]}
    with pytest.raises(SpecError) as caught:
        sides[1].load(request(consumer_blocks=short), new_remote_id("r"), pushed=True)
    assert "consumer_blocks['full']" == caught.value.field
    assert 0 == sides[1].first.stats().loads


def test_disconnect_ends_a_cancelled_load_of_a_producer_that_pushed_nothing(
    sides: tuple[Side, Side],
) -> None:
    """Before, the producer could still begin to write."""
    consumer = sides[1]
    (load,) = consumer.load(request(), new_remote_id("r"), pushed=True)
    load.cancel()
    assert "moving" == load.poll()
    consumer.first.disconnect("P")
    assert "failed" == load.poll()


def test_push_of_a_rank_that_writes_nothing_is_done_after_the_request_was_freed(
    net: FakeNixl,
) -> None:
    """Two producer ranks hold one head, and the first writes it. The second pushes late."""
    asked, remote_id = request(), new_remote_id("r")
    first = kvspec.ReplicaPolicy("first")
    with (
        Side("P", engine(2, heads=1), polled=True, replica_policy=first) as producer,
        Side("D", engine(1, heads=1), polled=False, heartbeat=0.05, replica_policy=first) as reader,
    ):
        reader.connect(producer)
        producer.connect(reader, "consumer")
        producer.fill(asked)
        reader.spoil(asked)
        producer.hold(remote_id)
        (load,) = reader.load(asked, remote_id, pushed=True)
        writer, late = producer.sessions.values()
        writer.push(asked, remote_id=remote_id, timeout=9.0, epoch=1)
        until(lambda: load.poll() == "done" and not late.held, producer, reader)
        push = late.push(asked, remote_id=remote_id, timeout=9.0, epoch=1)
        assert push.poll() == "done"
        assert reader.wrong(asked) == []


def test_refused_pushed_load_leaves_its_attempt_to_the_next_one(net: FakeNixl) -> None:
    """It is refused because a load that reads is open for the same attempt."""
    with pushing() as (producer, consumer):
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        first, second = (
            request(name, 4, consumer_blocks={"full": [block], "window": [block]})
            for name, block in (("a", 1), ("b", 2))
        )
        net.fate = lambda _: None
        (read,) = consumer.load(first, remote_id, again=True)
        with pytest.raises(SpecError):
            consumer.load(second, remote_id, pushed=True)
        read.cancel()
        land(net)
        assert ["failed"] == ended([read], producer, consumer)
        consumer.load(second, remote_id, pushed=True)


def test_pushed_load_needs_a_rank_that_others_can_write(net: FakeNixl) -> None:
    """Without its thread, NIXL makes no progress there, so the push would never end."""
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=True) as consumer,
    ):
        consumer.connect(producer)
        with pytest.raises(SpecError) as caught:
            consumer.load(request(), new_remote_id("r"), pushed=True)
        assert "pushed" == caught.value.field
