"""Loads that fail: when they end, what their errors contain, and what they leave behind."""

from __future__ import annotations

from typing import Any

import pytest
from two_engines import (
    Side,
    ended,
    engine,
    freed,
    land,
    let_nothing_land,
    quiet,
    request,
    start_of,
    until,
)

from kvspec.errors import SpecError, TransferError
from kvspec.nixl import Staging, Transfer
from kvspec.session import Session, TcpChannel, new_remote_id
from kvspec.session.mailbox import MESSAGE
from kvspec.session.stats import SessionStats
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeFlight
from kvspec.wire.codec import encode_message
from kvspec.wire.messages import MESSAGES, ChecksumUnavailable, Message, key_of


def test_load_fails_when_the_producer_has_freed_the_request(pair: tuple[Side, Side]) -> None:
    """It came after the lease, or after an abort."""
    producer, consumer = pair
    late, aborted = new_remote_id("late"), new_remote_id("aborted")
    producer.hold(late, lease=0.01)
    producer.hold(aborted)
    for session in producer.sessions.values():
        session.abort(aborted)
    expired: list[str] = []
    until(lambda: expired.extend(producer.settled()[1]) or len(expired) == 4, producer)
    assert ["late"] * 4 == expired
    loads = []
    for name, remote_id in (("a", late), ("b", aborted)):
        loads += consumer.load(request(name), remote_id)
        assert ["failed"] * 2 == ended(loads[-2:], producer, consumer)
    for load in loads:
        assert load.error is not None
        assert "gone" == load.error.state
        assert load.error.rank in ("P tp0", "P tp1", "P tp2", "P tp3")
        # The window needs tokens 7 to 13, which are in its first three blocks.
        assert {"full": (1, 2, 3, 4), "window": (1, 2, 3)} == load.undefined_blocks


def test_load_fails_at_its_timeout_when_no_producer_answers(pair: tuple[Side, Side]) -> None:
    """All bytes are there, but without an answer they may be another request's."""
    loads = pair[1].load(request(), new_remote_id("r"), timeout=0.3)
    assert ["failed"] * 2 == ended(loads, pair[1])
    with pytest.raises(TransferError) as caught:
        loads[0].wait()
    assert ("timeout", "r") == (caught.value.state, caught.value.request)
    assert ["timeout"] * 2 == [load.error.state for load in loads if load.error]


def test_cancelled_load_fails_and_frees_the_request(pair: tuple[Side, Side]) -> None:
    """The producer frees the blocks as soon as it learns of it."""
    producer, consumer = pair
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    loads = consumer.load(request(), remote_id)
    for load in loads:
        load.cancel()
    assert ["failed"] * 2 == ended(loads, consumer)
    assert ["r"] * 4 == freed(4, producer, consumer)


def test_load_of_a_closed_rank_fails_although_its_bytes_have_arrived(
    pair: tuple[Side, Side],
) -> None:
    """The session of the rank still answers that the request is gone."""
    producer, consumer = pair
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    loads = consumer.load(request(), remote_id)
    producer.first.nixl.close()
    assert ["failed", "done"] == ended(loads, producer, consumer)
    assert loads[0].error is not None
    assert ("gone", True) == (loads[0].error.state, "tp0" in loads[0].error.message)
    done, other = list[str](), list[str]()

    def settled() -> bool:
        for names, new in zip((done, other), producer.settled(), strict=True):
            names.extend(new)
        return len(done + other) == 4

    until(settled, consumer)
    assert (["r"] * 3, ["r"]) == (done, other)
    quiet(producer, consumer)


def test_load_fails_when_its_producer_ends_after_all_bytes_have_arrived(
    pair: tuple[Side, Side],
) -> None:
    """No transfer reports the loss, but nobody listens at the address of the rank any more."""
    producer, consumer = pair
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    loads = consumer.load(request(), remote_id)
    until(lambda: not any(s.stats().steps for s in consumer.sessions.values()), consumer)
    assert ["moving"] * 2 == [load.state for load in loads]
    (lost, *_) = producer.sessions.values()
    lost.channel.close()
    until(lambda: loads[0].state == "failed", consumer)
    assert loads[0].error is not None
    assert ("peer_lost", "P tp0") == (loads[0].error.state, loads[0].error.rank)
    assert loads[0].undefined_blocks
    assert "moving" == loads[1].state


def test_failed_load_stays_moving_until_its_bytes_have_landed(
    net: FakeNixl, pair: tuple[Side, Side]
) -> None:
    """It has its error at once, and keeps its blocks."""
    producer, consumer = pair
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    let_nothing_land(net)
    (load,) = consumer.load(request(), remote_id, timeout=0.05)[:1]
    until(lambda: load.error, producer, consumer)
    assert load.error is not None
    assert ("timeout", "moving") == (load.error.state, load.poll())
    assert {"full", "window"} == set(load.undefined_blocks)
    session = consumer.first
    with pytest.raises(TransferError) as caught:
        session.load(request("another"), remote_id=new_remote_id("another"), timeout=9.0)
    assert "busy" == caught.value.state
    assert ([], []) == producer.settled()
    land(net)
    assert ["failed"] == ended([load], producer, consumer)
    quiet(producer, consumer)
    assert 0 == session.nixl.stats().transfers


def test_load_that_nixl_refuses_gives_its_blocks_back(
    net: FakeNixl, pair: tuple[Side, Side]
) -> None:
    """NIXL refuses bytes that a transfer of the caller writes. Later the load can start."""
    producer, consumer = pair
    session, remote_id = consumer.first, new_remote_id("r")
    producer.fill(request())
    producer.hold(remote_id)
    consumer.spoil(request())
    cached = new_remote_id("cached")
    producer.hold(cached)
    hit = session.load(request("cached", cached=14), remote_id=cached, timeout=9.0)
    sides = next(iter(hit.remote.list_pairs.values())).sides(request())
    until(lambda: not session.stats().loads, producer, consumer)
    let_nothing_land(net)
    own = session.nixl.move({0: sides}, request="own", timeout=9.0)[0]
    with pytest.raises(TransferError) as caught:
        session.load(request(), remote_id=remote_id, timeout=9.0)
    assert "busy" == caught.value.state
    assert SessionStats(engines=1) == session.stats()
    land(net)
    own.wait()
    net.fate = FakeFlight.land
    load = session.load(request(), remote_id=remote_id, timeout=9.0)  # Its blocks are free.
    assert ["done"] == ended([load], producer, consumer)


def test_unexpected_error_of_a_read_fails_its_load_alone(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poll goes on, and the other load is done."""
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=True) as consumer,
    ):
        consumer.connect(producer)
        let_nothing_land(net)
        loads = []
        for name, block in (("bad", 1), ("good", 5)):
            remote_id, blocks = new_remote_id(name), {"full": [block], "window": [block]}
            producer.hold(remote_id)
            asked = request(name, 4, consumer_blocks=blocks)
            loads += consumer.load(asked, remote_id)
        consumer.poll()
        bad, good = loads
        poll = Transfer.poll

        def fails(transfer: Transfer, *given: float) -> str:
            if transfer.request == "bad":
                raise RuntimeError
            return poll(transfer, *given)

        with monkeypatch.context() as patch:
            patch.setattr(Transfer, "poll", fails)
            land(net)
            until(lambda: good.state == "done", producer, consumer)
            assert bad.error is not None
            assert "bug" == bad.error.state
            assert "RuntimeError" in bad.error.message
        assert ["failed"] == ended([bad], consumer)


def test_load_is_not_done_when_its_clock_stood_still_beyond_the_lease() -> None:
    """The producer's answer decides, not the lease that the consumer measured."""
    now = {"P": 0.0, "D": 0.0}
    with (
        FakeNixl() as net,
        Side("P", engine(1), polled=False, lease=5.0, clock=lambda: now["P"]) as producer,
        Side("D", engine(1), polled=True, heartbeat=1.0, clock=lambda: now["D"]) as consumer,
    ):
        consumer.connect(producer)
        remote_id = new_remote_id("r")
        producer.fill(request())
        consumer.spoil(request())
        producer.hold(remote_id)
        let_nothing_land(net)
        (load,) = consumer.load(request(), remote_id)
        # The first message that the consumer receives is the lease.
        until(lambda: consumer.first.stats().counters.messages_received, producer, consumer)
        now["P"] += 60.0  # The clock of a paused machine stands still.
        assert ["r"] == producer.settled()[1]
        producer.fill(request(), seed=7)  # By now the blocks belong to another request.
        land(net)
        assert ["failed"] == ended([load], producer, consumer)
        assert load.error is not None
        assert "gone" == load.error.state


def test_error_of_a_load_names_what_was_lost(net: FakeNixl, pair: tuple[Side, Side]) -> None:
    """It names the rank, the request, layers, heads and tokens, and the failure of NIXL."""
    producer, consumer = pair
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    let_nothing_land(net)
    load = consumer.load(request("mine"), remote_id)[1]
    for flight in net.moving:
        flight.fail(0.5)
    assert ["failed"] == ended([load], producer, consumer)
    assert load.error is not None
    error = load.error
    assert ("P tp2", "mine", "peer_lost") == (error.rank, error.request, error.state)
    for fact in ("RemoteDisconnect", "l.0", "l.1", "unit 1", "0..13", "w.0", "7..13"):
        assert fact in error.message
    quiet(producer, consumer)
    net.fate = FakeFlight.land
    session = list(consumer.sessions.values())[1]
    # The connection was lost, so the same introductions are connected again.
    assert load.remote.plan is not session.connect(producer.introductions)
    asked, again = request("again"), new_remote_id("again")
    producer.fill(asked)
    producer.hold(again)
    load = session.load(asked, remote_id=again, timeout=9.0)
    assert ["done"] == ended([load], producer, consumer)


def test_load_that_was_never_posted_leaves_no_undefined_blocks(net: FakeNixl) -> None:
    """It waits for a slot of the staging area until it is cancelled."""
    staging = Staging(buffer=4096, always=True)
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=True, staging=staging) as consumer,
    ):
        consumer.connect(producer)
        let_nothing_land(net)
        posted, waiting = (
            consumer.first.load(
                request(name, 4, consumer_blocks={"full": [block], "window": [block]}),
                remote_id=new_remote_id(name), timeout=9.0,
            )
            for name, block in (("a", 1), ("b", 2))
        )  # fmt: skip
        for load in (posted, waiting):
            load.cancel()
        blocks = {"full": (1,), "window": (1,)}
        assert {} == waiting.undefined_blocks
        # On a busy machine, the turn of one poll may end before it comes to this load.
        until(lambda: waiting.poll() == "failed")
        assert ({}, blocks) == (waiting.undefined_blocks, posted.undefined_blocks)
        land(net)
        assert ["failed"] == ended([posted], producer, consumer)
        assert blocks == posted.undefined_blocks
        # Only the error of the load that wrote blocks advises to compute them again.
        advised = ["undefined_blocks" in str(load.error) for load in (posted, waiting)]
        assert [True, False] == advised


def test_load_fails_when_one_of_its_sources_fails(net: FakeNixl) -> None:
    """It ends when the bytes of the other source have landed."""
    with (
        Side("P", engine(2), polled=False) as producer,
        Side("D", engine(1), polled=True) as consumer,
    ):
        consumer.connect(producer)
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        let_nothing_land(net)
        (load,) = consumer.load(request(), remote_id)
        first, second = net.moving
        first.fail()
        until(lambda: load.error, producer, consumer)
        assert "moving" == load.poll()
        second.land()
        assert ["failed"] == ended([load], producer, consumer)
        quiet(producer, consumer)


def test_disconnect_fails_the_loads_of_that_engine_alone(
    net: FakeNixl, pair: tuple[Side, Side]
) -> None:
    """A load ends when its last byte has landed."""
    consumer = pair[1]
    session = consumer.first
    with Side("Q", engine(4), polled=False) as other:
        session.connect(other.introductions)
        let_nothing_land(net)
        options: dict[str, Any] = {"timeout": 9.0}
        lost = session.load(request("a"), remote_id=new_remote_id("a"), engine_id="P", **options)
        asked = request("b", 4, consumer_blocks={"full": [7], "window": [7]})
        stays = session.load(asked, remote_id=new_remote_id("b"), engine_id="Q", **options)
        moving = [flight for flight in net.moving if flight.copies[0][2]]
        session.disconnect("P")
        assert lost.error is not None
        assert "disconnected" in str(lost.error)
        assert (None, "moving") == (stays.error, stays.poll())
        assert "moving" == lost.poll()
        for flight in moving:
            flight.land()
        assert ["failed"] == ended([lost], consumer)
        with pytest.raises(SpecError) as caught:
            session.load(request("c"), remote_id=new_remote_id("c"), engine_id="P", **options)
        assert "engine_id" == caught.value.field


def test_loads_fail_when_their_producer_is_killed(net: FakeNixl, pair: tuple[Side, Side]) -> None:
    """The bytes never land."""
    producer, consumer = pair
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    let_nothing_land(net)
    loads = consumer.load(request(), remote_id, timeout=0.2)
    for name in list(net.agents):
        if name.startswith("P"):
            net.kill(name)
    assert ["failed"] * 2 == ended(loads, consumer)
    assert ["peer_lost"] * 2 == [load.error.state for load in loads if load.error]


def send(sender: Session, message: Message, to: Session) -> list[str]:
    """Send a sealed *message*, and return what the receiver recorded about it."""
    sealed = sender.nixl.secret.seal(MESSAGE, encode_message(message, start_of(sender)))
    sender.channel.send(to.channel.address, sealed)
    recorded: list[str] = []
    until(lambda: sender.poll() or recorded.extend(to.settled().refused) or recorded)
    return recorded


def test_message_that_is_not_expected_is_recorded_once(pair: tuple[Side, Side]) -> None:
    """The record contains the kind and the reason."""
    (by, session) = pair[0].first, pair[1].first
    for kind, why in (("valid", "load"), ("checksum_unavailable", "question")):
        key = key_of(new_remote_id("r"))
        (line,) = send(by, MESSAGES[kind](key=key, by=by.me, to=session.me), session)
        assert kind == line.split()[0]
        assert why in line
    load = session.load(request(), remote_id=new_remote_id("r"), timeout=9.0)
    message = ChecksumUnavailable(key=key_of(load.remote_id), by=by.me, to=session.me)
    assert "question" in send(by, message, session)[-1]


def test_messages_with_a_wrong_seal_change_nothing(pair: tuple[Side, Side]) -> None:
    """Each is recorded, and none is answered."""
    session = pair[0].first
    wrong = b"", b"rubbish", b"kvspec-message-1\n" + bytes(99), b"kvspec-question-2\n"
    strangers = [TcpChannel() for _ in wrong]
    for stranger, data in zip(strangers, wrong, strict=True):
        stranger.send(session.channel.address, data)
    recorded: list[str] = []

    def all_recorded() -> bool:
        assert [] == [answer for stranger in strangers for answer in stranger.receive()]
        recorded.extend(session.settled().refused)
        return len(recorded) >= 4 and not any(map(len, strangers))

    until(all_recorded, pair[1])
    assert 4 == len(recorded)
    assert "secret" in " ".join(recorded)
    for stranger in strangers:
        stranger.close()


def test_read_that_fails_without_a_reason_fails_its_load(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message of the error is empty."""
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=True) as consumer,
    ):
        consumer.connect(producer)
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        let_nothing_land(net)
        (load,) = consumer.load(request(), remote_id)
        (read,) = load.in_flight.values()
        poll = read.poll

        def fails(turn: float | None = None) -> str:
            poll(turn)
            raise TransferError("", state="gone")

        land(net)
        monkeypatch.setattr(read, "poll", fails)
        assert ["failed"] == ended([load], producer, consumer)
        quiet(producer, consumer)
