"""Connections of sessions: rejected introductions, restarts, and agents that two engines share."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
import msgspec
import pytest
from slotted import Slotted
from two_engines import (
    Side,
    ended,
    engine,
    four_to_two,
    land,
    let_nothing_land,
    quiet,
    request,
    until,
)

import kvspec
from kvspec.errors import MismatchError, SpecError, TransferError, WireError
from kvspec.nixl import NixlRank, merging, transfer
from kvspec.session import Load, Session, new_remote_id
from kvspec.session.mailbox import INTRODUCTION, open_introduction
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeFlight
from kvspec.wire.codec import encode_handshake


def changed(side: Side, **changes: Any) -> list[bytes]:
    """Return the introductions of a side with another handshake."""
    return [changed_of(session, **changes) for session in side.sessions.values()]


def changed_of(session: Session, **changes: Any) -> bytes:
    """Return the introduction of a session with another handshake."""
    own = open_introduction(session.introduction, session.nixl.secret)
    handshake = attrs.evolve(own.handshake, **changes)
    return attrs.evolve(own, handshake=handshake).seal(session.nixl.secret)


def handshake_of(session: Session) -> bytes:
    """Return the encoded handshake of a session."""
    return encode_handshake(open_introduction(session.introduction, session.nixl.secret).handshake)


def sealed(session: Session, *fields: object) -> bytes:
    """Return an introduction with any fields, sealed with the secret of a session."""
    return session.nixl.secret.seal(INTRODUCTION, msgspec.msgpack.encode(fields))


def place(error: SpecError | WireError | MismatchError) -> list[str]:
    """Return the fields that an error rejects."""
    if isinstance(error, MismatchError):
        return [mismatch.field for mismatch in error.mismatches]
    return [error.path if isinstance(error, WireError) else error.field]


def test_connect_rejects_introductions_that_do_not_fit(pair: tuple[Side, Side]) -> None:
    """No engine is connected, and the connected one stays."""
    producer, consumer = pair
    session, first = consumer.first, producer.first
    good, *others = producer.introductions
    peers, handshake = session.nixl.peers, handshake_of(first)
    other_version = handshake.replace(b"kvspec-handshake\n\0", b"kvspec-handshake\n\1")
    assert handshake != other_version
    with NixlRank("other", secret=b"another secret, long enough") as other:
        foreign = open_introduction(good, first.nixl.secret).seal(other.secret)
    salted = kvspec.ReplicaPolicy("spread", 3)
    for introductions, kind, field in (
        ([sealed(first, "h:1", 30.0, 5.0, other_version), *others], WireError, "version"),
        ([sealed(first, "h:1", 30.0, 5.0, handshake[:-1]), *others], WireError, "handshake"),
        ([sealed(first, "h" * 256, 30.0, 5.0, handshake), *others], WireError, "introduction[0]"),
        ([first.nixl.secret.seal(INTRODUCTION, b""), *others], WireError, "introduction"),
        ([foreign, *others], WireError, "introduction"),
        ([good[:-1], *others], WireError, "introduction"),
        ([b"rubbish", *others], WireError, "introduction"),
        (others, SpecError, "handshakes"),
        ([good, good, *others], SpecError, "handshakes"),
        ([], SpecError, "handshakes"),
        (good, SpecError, "introductions"),
        ([changed_of(first, epoch=2), *others], MismatchError, "epoch"),
        (changed(producer, epoch=0), SpecError, "epoch"),
        (changed(producer, model="m"), MismatchError, "model"),
        (changed(producer, replica_policy=salted), MismatchError, "replica_policy.salt"),
        (changed(producer, engine_id="D"), MismatchError, "engine_id"),
        (consumer.introductions, MismatchError, "engine_id"),
    ):
        with pytest.raises((WireError, SpecError, MismatchError)) as caught:
            session.connect(introductions)
        assert (kind, [field]) == (type(caught.value), place(caught.value))
        assert peers == session.nixl.peers
    session.connect([good, *others])
    assert peers == session.nixl.peers


def test_connect_rejects_an_older_incarnation(pair: tuple[Side, Side]) -> None:
    """Its ranks have ended, so they cannot answer."""
    producer, consumer = pair
    consumer.first.connect(changed(producer, epoch=9))
    with pytest.raises(SpecError) as caught:
        consumer.first.connect(producer.introductions)
    assert ("epoch", 1) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("address", ["", "h" * 256, "h\n:1", b"h:1", 7], ids=range(5))
def test_introduction_rejects_an_address_that_is_not_a_short_printable_text(
    pair: tuple[Side, Side], address: object
) -> None:
    """A peer that knows the secret may send it."""
    session = pair[0].first
    handshake, secret = handshake_of(session), session.nixl.secret
    for good in ("h:1", "h" * 255):
        assert (
            good == open_introduction(sealed(session, good, 30.0, 5.0, handshake), secret).address
        )
    with pytest.raises(WireError) as caught:
        open_introduction(sealed(session, address, 30.0, 5.0, handshake), secret)
    assert caught.value.path.startswith("introduction")


@pytest.mark.parametrize("kind", ["fake", "staged", pytest.param("real", marks=pytest.mark.nixl)])
def test_restarted_producer_is_connected_again(kind: str) -> None:
    """Loads from its last incarnation fail, and loads from the new one are right."""
    staging = Slotted(buffer=4096, slot_bytes=2048, always=True)
    if kind == "real":
        pytest.importorskip("nixl_cu13", reason="needs nixl")
    nixl = contextlib.nullcontext() if kind == "real" else FakeNixl()
    with nixl, four_to_two(staging if kind == "staged" else None) as (_, consumer):
        old = consumer.load(request("old"), new_remote_id("old"))
        with Side("P", engine(1), epoch=2, polled=False) as again:
            consumer.connect(again)
            assert ["failed"] * 2 == [load.state for load in old]
            assert all(load.error and "restarted" in load.error.message for load in old)
            asked, remote_id = request("new"), new_remote_id("new")
            again.fill(asked)
            consumer.spoil(asked)
            again.hold(remote_id)
            loads = consumer.load(asked, remote_id)
            assert ["done"] * 2 == ended(loads, again, consumer)
            assert [] == consumer.wrong(asked)
            quiet(again, consumer)
            for session in consumer.sessions.values():
                assert 1 == len(session.nixl.peers)
                assert (1, 0) == (session.stats().engines, session.stats().disconnecting)
                session.disconnect("P")
                assert () == session.nixl.peers
                with pytest.raises(SpecError) as caught:
                    session.decline(remote_id)
                assert "engine_id" == caught.value.field


def test_agent_of_two_engines_stays_connected_until_both_are_disconnected(net: FakeNixl) -> None:
    """A lost connection is lost for both engines, and both are connected again."""
    cache, storage = kvspec.allocate(engine(1), kvspec.RankId(), num_blocks=8)
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=False, heartbeat=0.05) as consumer,
        Session(producer.first.nixl, cache, engine_id="Q", owner=storage) as other,
    ):
        near, sessions = consumer.first, {"P": producer.first, "Q": other}

        def load(name: str) -> Load:
            remote_id = new_remote_id(name)
            sessions[name].hold(remote_id)
            return near.load(request(remote_id), remote_id=remote_id, timeout=9.0, engine_id=name)

        def state(load: Load) -> str:
            until(lambda: other.poll() or load.poll() != "moving", producer, consumer)
            return load.state

        for session in sessions.values():
            near.connect([session.introduction])
        near.disconnect("P")
        assert (1, "done") == (len(near.nixl.peers), state(load("Q")))
        near.connect([producer.first.introduction])
        let_nothing_land(net)
        lost = load("Q")
        net.moving[0].fail()
        assert "failed" == state(lost)
        net.fate = FakeFlight.land
        for name in ("Q", "P"):
            near.connect([sessions[name].introduction])
        assert (2, 0) == (near.stats().engines, near.stats().disconnecting)
        assert ["done", "done"] == [state(load(name)) for name in sessions]
        for name in sessions:
            near.disconnect(name)
        assert () == near.nixl.peers


def test_failed_connect_leaves_no_connection(net: FakeNixl) -> None:
    """The memory of the peer is not registered, or its agent has ended."""
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=True) as consumer,
    ):
        session = consumer.first
        ((name, agent),) = ((name, life) for name, life in net.agents.items() if name[0] == "P")
        registered = list(agent.memory)
        agent.memory[1:] = []
        with pytest.raises(TransferError) as caught:
            session.connect(producer.introductions)
        assert "not_registered" == caught.value.state
        assert ((), 0) == (session.nixl.peers, session.stats().engines)
        agent.memory[:] = registered
        session.connect(producer.introductions)
        session.disconnect("P")
        net.kill(name)
        with pytest.raises(TransferError):
            session.connect(producer.introductions)
        assert () == session.nixl.peers


def test_connect_that_is_refused_as_busy_leaves_the_engine_connected(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the lists would be released under a load that has not posted all of its batches."""
    monkeypatch.setattr(merging, "MAX_DESCRIPTORS", 2)
    monkeypatch.setattr(transfer, "IN_FLIGHT", 1)
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=False, heartbeat=0.05) as consumer,
    ):
        session, remote_id = consumer.first, new_remote_id("r")
        session.connect(producer.introductions)
        producer.fill(request())
        consumer.spoil(request())
        producer.hold(remote_id)
        let_nothing_land(net)
        load = session.load(request(), remote_id=remote_id, timeout=9.0)
        with pytest.raises(TransferError) as caught:
            session.connect(producer.other_introductions)
        assert "busy" == caught.value.state
        assert (1, 0) == (session.stats().engines, session.stats().disconnecting)
        net.fate = FakeFlight.land
        land(net)
        assert ["done"] == ended([load], producer, consumer)
        assert [] == consumer.wrong(request())
        session.connect(producer.other_introductions)
        assert (1, 0) == (session.stats().engines, session.stats().disconnecting)


def test_connect_asks_all_ranks_of_an_engine_at_the_same_time(net: FakeNixl) -> None:
    """A rank that is silent for a time delays only the call, and not the other ranks."""

    def answer(_: FakeFlight) -> None:
        if len(net.moving) == 4:
            land(net)

    net.fate = answer
    with (
        Side("P", engine(4, 4), polled=False) as producer,
        Side("D", engine(1, 4), polled=True, heartbeat=0.05) as consumer,
    ):
        session = consumer.first
        session.connect(producer.introductions, timeout=5.0)
        assert (4, 1) == (len(session.nixl.peers), session.stats().engines)


def test_connect_to_an_engine_with_a_silent_rank_leaves_nothing(net: FakeNixl) -> None:
    """The error names the rank. The engine can be connected when that rank answers again."""
    with (
        Side("P", engine(4, 4), polled=False) as producer,
        Side("D", engine(1, 4), polled=True, heartbeat=0.05) as consumer,
    ):
        session, silent = consumer.first, [*producer.sessions.values()][2].nixl.name
        net.fate = lambda flight: None if flight.between[1].name == silent else flight.land()
        with pytest.raises(TransferError) as caught:
            session.connect(producer.introductions, timeout=0.1)
        assert ("timeout", silent) == (caught.value.state, caught.value.rank)
        assert (0, 0) == (session.stats().engines, session.stats().disconnecting)
        land(net)
        net.fate = FakeFlight.land
        session.connect(producer.introductions, timeout=5.0)
        assert 1 == session.stats().engines
        session.disconnect("P")
        assert (0, 0) == (session.nixl.stats().peers, session.nixl.stats().lists)


def test_agent_of_an_engine_that_is_being_connected_stays_connected(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine with the same agent is disconnected meanwhile. Its last read ends then."""
    cache, storage = kvspec.allocate(engine(1), kvspec.RankId(), num_blocks=8)
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=False, heartbeat=0.05) as consumer,
        Session(producer.first.nixl, cache, engine_id="Q", owner=storage) as other,
    ):
        near, connect_all = consumer.first, consumer.first.nixl.connect_all
        near.connect([producer.first.introduction])
        let_nothing_land(net)
        load = near.load(request(), remote_id=new_remote_id("r"), timeout=9.0)
        near.disconnect("P")

        def ends_first(*given: Any) -> Any:
            names = connect_all(*given)
            land(net)
            until(lambda: load.poll() == "failed", consumer)
            assert 1 == near.stats().disconnecting
            return names

        monkeypatch.setattr(near.nixl, "connect_all", ends_first)
        near.connect([other.introduction])
        consumer.poll()
        assert (1, 0) == (near.stats().engines, near.stats().disconnecting)
        net.fate = FakeFlight.land
        remote_id = new_remote_id("of Q")
        other.hold(remote_id)
        again = near.load(request("of Q"), remote_id=remote_id, timeout=9.0)
        until(lambda: other.poll() or again.poll() != "moving", consumer)
        assert "done" == again.state


def test_second_session_that_connects_over_a_transport_is_refused(net: FakeNixl) -> None:
    """A disconnect of one of them would release the lists of the other."""
    cache, storage = kvspec.allocate(engine(1), kvspec.RankId(), num_blocks=8)
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=False) as consumer,
        Session(consumer.first.nixl, cache, engine_id="E", owner=storage) as other,
    ):
        consumer.connect(producer)
        with pytest.raises(SpecError) as caught:
            other.connect(producer.introductions)
        assert "nixl" == caught.value.field
        assert (1, 0) == (consumer.first.stats().engines, other.stats().engines)
        consumer.first.close()
        other.connect(producer.introductions)
        assert 1 == other.stats().engines
    assert not net.moving
