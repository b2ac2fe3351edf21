"""The thread of a session rests while nothing happens, and wakes when something does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
from two_engines import Direct, Side, engine, request

from kvspec.session import Load, background, new_remote_id
from kvspec.testing import FakeNixl


def happens(true: Callable[[], object], seconds: float = 5.0) -> bool:
    """Whether a condition becomes true, without a call that makes progress."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(1e-3)
    return bool(true())


def begun(producer: Side, consumer: Side, name: str = "r", **options: Any) -> Load:
    """Hold a request, and return the load of it."""
    remote_id = new_remote_id(name)
    producer.hold(remote_id)
    (load,) = consumer.load(request(name), remote_id, **options)
    return load


def polls(side: Side, seconds: float) -> int:
    """Return how often the thread of a side polls."""
    (session,) = side.sessions.values()
    count, receive = [0], session.channel.receive

    def counted() -> list[tuple[str, bytes]]:
        count[0] += 1
        return receive()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.channel, "receive", counted)
        time.sleep(seconds)
    return count[0]


def test_idle_session_polls_once_a_second(net: FakeNixl) -> None:
    """Also if it holds requests, and is connected."""
    with (
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True, background=True) as consumer,
    ):
        consumer.connect(producer)
        producer.hold(new_remote_id("held"))
        time.sleep(0.1)
        assert max(polls(producer, 1.0), polls(consumer, 1.0)) <= 3


def test_load_of_other_thread_wakes_session(net: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load is done long before the thread would poll by itself."""
    monkeypatch.setattr(background, "IDLE", 60.0)
    monkeypatch.setattr("kvspec.session.channel.STALL", 480.0)
    with (
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True, background=True) as consumer,
    ):
        consumer.connect(producer)
        time.sleep(0.1)  # Both threads rest.
        load = begun(producer, consumer)
        assert happens(lambda: load.state == "done")


def test_lease_ends_on_time_while_session_rests(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread rests until the next timer of a ledger, and a call may set an earlier one."""
    monkeypatch.setattr(background, "IDLE", 60.0)
    monkeypatch.setattr("kvspec.session.channel.STALL", 480.0)
    with Side("P", engine(1), polled=False, background=True) as producer:
        (session,) = producer.sessions.values()
        time.sleep(0.1)
        session.hold(new_remote_id("r"), lease=0.2)
        assert 1 == len(session.held)
        assert happens(lambda: not session.held)


def test_closed_session_ends_its_rest(net: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` does not wait until the thread would poll by itself."""
    monkeypatch.setattr(background, "IDLE", 60.0)
    monkeypatch.setattr("kvspec.session.channel.STALL", 480.0)
    side = Side("P", engine(1), polled=False, background=True)
    time.sleep(0.1)
    start = time.monotonic()
    side.close()
    assert time.monotonic() - start < 5.0


class Plain(Direct):
    """A channel without `wake` that waits for the whole timeout."""

    def wait(self, timeout: float) -> None:
        """Sleep."""
        time.sleep(timeout)


def test_channel_without_wake_is_polled_more_often(net: FakeNixl) -> None:
    """So that a call of another thread does not wait for a second."""
    more: dict[str, Any] = {"background": True, "polled": False}
    with (
        Side("P", engine(1), channel=Plain("P"), **more) as producer,
        Side("D", engine(1), channel=Plain("D"), **more) as consumer,
    ):
        consumer.connect(producer)
        assert 5 <= polls(producer, 0.5) <= 26
        load = begun(producer, consumer)
        assert happens(lambda: load.state == "done")


def test_thread_goes_on_with_what_another_poll_has_begun(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other poll takes the message and the wake-up that the thread waits for."""
    monkeypatch.setattr(background, "IDLE", 60.0)
    monkeypatch.setattr("kvspec.session.channel.STALL", 480.0)
    with (
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True, background=True) as consumer,
    ):
        consumer.connect(producer)
        for number in range(20):
            load = begun(producer, consumer, f"r{number}")
            consumer.poll()
            assert happens(lambda load=load: load.state == "done")


@pytest.mark.parametrize("method", ["receive", "wait"])
def test_thread_logs_an_unexpected_error_and_polls_again(
    net: FakeNixl,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    """An error that stays is logged once in each rest. When it is gone, loads are done."""
    monkeypatch.setattr(background, "IDLE", 0.2)
    with (
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True) as consumer,
    ):
        consumer.connect(producer)

        def fail(*_: object) -> None:
            raise KeyError(method)

        thread = producer.first._background  # `wait` is looked up only once.
        target, name = (thread, "_wait") if method == "wait" else (producer.first.channel, method)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target, name, fail)
            assert happens(lambda: caplog.records)
            time.sleep(0.3)
        assert 1 <= len(caplog.records) <= 4
        record = caplog.records[0]
        assert ("kvspec.session", logging.ERROR) == (record.name, record.levelno)
        assert record.exc_info is not None
        assert record.exc_info[0] is KeyError
        load = begun(producer, consumer)
        assert happens(lambda: load.poll() == "done")


def test_closed_session_does_not_wait_for_the_rest_after_an_error(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest ends when the session is closed."""
    monkeypatch.setattr(background, "IDLE", 60.0)
    with Side("P", engine(1), polled=False, background=True) as producer:
        session = producer.first
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session.channel, "receive", None)
            session.hold(new_remote_id("r"), lease=0.1)  # The thread polls.
            assert happens(lambda: caplog.records)
        start = time.monotonic()
    assert time.monotonic() - start < 5.0
