"""The life of a session: its arguments, its thread, other threads, its end, and forks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from lines import Other, between_lines
from two_engines import Side, engine, let_nothing_land, quiet, request, until

import kvspec
from kvspec.errors import SpecError, TransferError
from kvspec.nixl import NixlRank
from kvspec.session import Session, TcpChannel, loads, new_remote_id
from kvspec.session.stats import SessionStats
from kvspec.testing import FakeNixl


def test_session_of_several_ranks_needs_an_epoch(net: FakeNixl) -> None:
    """All ranks of an incarnation share it. By default one rank takes the time."""
    cache, storage = kvspec.allocate(engine(2), kvspec.RankId(), num_blocks=2)
    wrong: Any = storage
    with NixlRank("r", polled=True) as nixl:
        with pytest.raises(SpecError) as caught:
            Session(nixl, cache, engine_id="D")
        assert ("epoch", None) == (caught.value.field, caught.value.value)
        with pytest.raises(SpecError) as caught:
            Session(nixl, cache, engine_id="", epoch=1)
        assert ("engine_id", "") == (caught.value.field, caught.value.value)
        with pytest.raises(SpecError) as caught:
            Session(nixl, wrong, engine_id="D")
        assert "cache" == caught.value.field
        cache, storage = kvspec.allocate(engine(1), kvspec.RankId(), num_blocks=2)
        before = time.time_ns()
        with Session(nixl, cache, engine_id="D", owner=storage) as session:
            assert session.me.epoch >= before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lease", -1.0),
        ("longest", float("nan")),
        ("heartbeat", "1"),
        ("patience", None),
        ("model", ""),
        ("replica_policy", "spread"),
        ("epoch", -1),
        ("engine_id", ""),
    ],
)
def test_rejected_session_registers_no_memory(net: FakeNixl, field: str, value: Any) -> None:
    """Another session can then have the rank and its memory."""
    cache, storage = kvspec.allocate(engine(1), kvspec.RankId(), num_blocks=2)
    with NixlRank("r", polled=True) as nixl:
        before = nixl.stats()
        with pytest.raises(SpecError) as caught:
            Session(nixl, cache, **{"engine_id": "D", "owner": storage} | {field: value})
        assert (field, repr(value)) == (caught.value.field, repr(caught.value.value))
        assert before == nixl.stats()


def test_session_rejects_a_channel_whose_address_is_too_long(net: FakeNixl) -> None:
    """It closes the channel, because no session exists that could."""
    cache, storage = kvspec.allocate(engine(1), kvspec.RankId(), num_blocks=2)
    channel = TcpChannel(public="h" * 300)
    with NixlRank("r", polled=True) as nixl, pytest.raises(SpecError) as caught:
        Session(nixl, cache, engine_id="D", owner=storage, channel=channel)
    assert "address" == caught.value.field
    channel.send(channel.address, b"x")
    assert 1 == channel.messages_lost


def test_background_session_needs_no_polls(net: FakeNixl) -> None:
    """Its thread answers questions and ends loads. It ends with the session."""
    before = threading.active_count()
    with (
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(2), polled=True, background=True) as consumer,
    ):
        for session in consumer.sessions.values():
            session.connect(session.fetch(producer.addresses))
        asked, remote_id = request(), new_remote_id("r")
        producer.fill(asked)
        consumer.spoil(asked)
        producer.hold(remote_id)
        begun = consumer.load(asked, remote_id)
        until(lambda: all(load.state == "done" for load in begun))
        assert [] == consumer.wrong(asked)
        until(lambda: not producer.first.held)
        assert before + 3 == threading.active_count()
    assert before == threading.active_count()


def test_many_threads_can_load_at_once(net: FakeNixl) -> None:
    """The thread of the session runs beside them. Every request is freed."""
    with (
        Side("P", engine(2), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True, background=True) as consumer,
    ):
        consumer.connect(producer)
        session, states = consumer.first, list[str]()

        def work(number: int) -> None:
            blocks = {"full": [number], "window": [number]}
            for turn in range(20):
                name = f"{number}.{turn}"
                asked = request(name, 4, producer_blocks=blocks, consumer_blocks=blocks)
                remote_id = new_remote_id(name)
                producer.hold(remote_id)
                load = session.load(asked, remote_id=remote_id, timeout=20.0)
                load.wait()
                states.append(load.state)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 6)]
        for thread in threads:
            thread.start()
        done: list[str] = []
        until(lambda: done.extend(producer.settled()[0]) or len(done) == 200)
        for thread in threads:
            thread.join()
        assert ["done"] * 100 == states
        quiet(producer, consumer)
        assert 0 == session.nixl.stats().transfers


def test_closed_session_fails_its_loads_and_disconnects(pair: tuple[Side, Side]) -> None:
    """It can be closed again. Its states stay as they are."""
    session = pair[1].first
    load = session.load(request(), remote_id=new_remote_id("r"), timeout=9.0)
    session.close()
    session.close()
    assert "failed" == load.poll()
    assert load.error is not None
    assert "closed" == load.error.state
    assert (0, 0) == (len(session.nixl.peers), session.nixl.stats().transfers)
    assert 0 == len(session.channel)  # type: ignore[arg-type]
    session.nixl.close()
    assert "failed" == load.poll()
    assert SessionStats(loads=session.stats().loads) == session.stats()


def test_session_closes_at_once_when_nothing_moves(pair: tuple[Side, Side]) -> None:
    """It does not wait for the readers of the requests that it holds."""
    pair[0].hold(new_remote_id("r"))
    start = time.monotonic()
    for side in pair:
        for session in side.sessions.values():
            session.close(drain=5.0)
    assert time.monotonic() - start < 5.0


@pytest.mark.parametrize("moving", [None, 0, 1])
def test_session_waits_for_one_load_that_moves_when_it_closes(
    net: FakeNixl, pair: tuple[Side, Side], moving: int | None
) -> None:
    """It does not matter whether a load that moves nothing was started before or after."""
    session = pair[1].first
    let_nothing_land(net)
    for number in range(2):
        asked = request(f"{number}", cached=0 if number == moving else 14)
        session.load(asked, remote_id=new_remote_id(f"{number}"), timeout=9.0)
    start = time.monotonic()
    session.close(drain=0.3)
    assert (time.monotonic() - start >= 0.3) == (moving is not None)
    for flight in net.moving:
        flight.land()


def test_session_closes_while_other_threads_load(net: FakeNixl) -> None:
    """Another thread starts a load before any line of `close` that goes through the loads.

    Without the lock, the loads would change while `close` iterates over them.
    """

    def close_at(line: int) -> bool:
        """Close a session with open loads, and load before *line*. Return whether it exists."""
        with Side("D", engine(1), polled=True) as side, Side("P", engine(1), polled=True) as other:
            side.connect(other)
            side.load(request("a", cached=14), new_remote_id("a"))

            def work() -> None:
                with contextlib.suppress(TransferError):  # The session may be closed by then.
                    side.load(request("b", cached=14), new_remote_id("b"))

            thread, lines = Other(work), list[int]()
            begin = thread.at(line)

            def act(now: int) -> None:
                lines.append(now)
                begin(now)

            with between_lines(act, loads):
                side.first.close(drain=0.0)
            thread.join()
            return line < len(lines)

    line = 0
    while close_at(line):
        line += 1
    assert line > 10


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_does_nothing_with_a_session(net: FakeNixl) -> None:
    """Its calls are refused, and its `close` leaves the sockets of the parent open."""
    with (
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True, background=True) as consumer,
    ):
        consumer.connect(producer)
        session = consumer.first
        for name in "abc":
            remote_id = new_remote_id(name)
            producer.hold(remote_id)
            (load,) = consumer.load(request(name), remote_id)
            load.wait()
            child = os.fork()
            if not child:
                code = 1
                with contextlib.suppress(BaseException):
                    session.close()
                    calls = (load.poll, session.poll, session.stats, session.settled)
                    code = len({state_of(call) for call in calls} - {"forked"})
                os._exit(code)
            assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def state_of(call: Callable[[], object]) -> str | None:
    """Return the state of the error of *call*, or None if it raises none."""
    try:
        call()
    except TransferError as error:
        return error.state
    return None
