"""Introductions that a session fetches from other processes, which may be absent or silent."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from two_engines import Side

from kvspec.errors import SpecError, TransferError
from kvspec.session.background import SessionLock


def refused(side: Side, address: str, **seconds: float) -> tuple[TransferError, float]:
    """Return the error of a fetch from *address*, and the seconds that it took."""
    start = time.monotonic()
    with pytest.raises(TransferError) as caught:
        side.first.fetch([address], **seconds)
    assert (address, "timeout") == (caught.value.rank, caught.value.state)
    return caught.value, time.monotonic() - start


def test_fetch_returns_the_introductions_of_all_addresses(pair: tuple[Side, Side]) -> None:
    """The addresses of the channels are enough. An address without an answer is in the error."""
    producer, consumer = pair
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            producer.poll()
            time.sleep(1e-3)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert producer.introductions == consumer.first.fetch(producer.addresses)
    finally:
        stop.set()
        thread.join()
    # The time in the message is `timeout`, or `absent` if no process accepts connections.
    for address, seconds in (("127.0.0.1:9", {"timeout": 0.1}), ("nowhere", {"absent": 0.1})):
        error, _ = refused(consumer, address, **{"timeout": 5.0, **seconds})
        assert "0.1" in error.message
    wrong: Any = "127.0.0.1:9"
    with pytest.raises(SpecError) as caught:
        consumer.first.fetch(wrong)
    assert ("addresses", wrong) == (caught.value.field, caught.value.value)


def test_fetch_waits_its_whole_timeout_for_a_silent_process(pair: tuple[Side, Side]) -> None:
    """The process accepts connections, so *absent* does not count."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        error, seconds = refused(pair[1], address, timeout=0.5, absent=0.1)
        assert "silent" in error.message
        assert seconds >= 0.5


def test_fetch_fails_early_when_the_process_closes_each_connection(
    pair: tuple[Side, Side],
) -> None:
    """So it does when the process has ended meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert refused(pair[1], address, timeout=1.0, absent=1.0)[1] < 5.0
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    error, seconds = refused(pair[1], address, timeout=60.0, absent=0.2)
    assert "accepts" in error.message
    assert seconds < 5.0


def test_fetch_that_begins_in_another_thread_does_not_disturb_a_message(
    pair: tuple[Side, Side],
) -> None:
    """Each producer of a ticket has a thread, which begins and ends its own questions."""
    messages = pair[1].first._messages

    class Begins(dict[str, Any]):
        """Answers that another thread looks at just when a message has come."""

        def get(self, *_: object) -> bytes:
            messages._asked[object()] = {}
            return b""

    messages._asked[object()] = Begins()
    challenge = messages._secret.seal(b"kvspec-challenge-1\n", b"c" * 16)
    assert messages._open("nowhere", challenge) is None
    messages._asked.clear()


def test_introduction_that_another_thread_takes_is_kept(pair: tuple[Side, Side]) -> None:
    """It takes it before this thread looks at the time limits."""
    messages, (sealed, *_) = pair[1].first._messages, pair[0].introductions

    class TakenBefore(SessionLock):
        """Another thread has the lock first, and receives the answer."""

        @property
        def held(self) -> threading.RLock:
            for answers in messages._asked.values():
                answers["nowhere"] = sealed
            return super().held

    assert [sealed] == messages.fetch(["nowhere"], 0.0, 0.0, lambda: None, TakenBefore())


def test_wait_for_the_own_lock_is_not_charged_to_the_peer(pair: tuple[Side, Side]) -> None:
    """Another call of the session holds the lock for longer than the peer has time."""
    producer, consumer = pair
    session, stop = consumer.first, threading.Event()
    held = threading.Event()

    def call() -> None:
        with session._lock.held:
            held.set()
            time.sleep(1.0)

    def serve() -> None:
        while not stop.is_set():
            producer.poll()
            time.sleep(1e-3)

    threads = [threading.Thread(target=each) for each in (call, serve)]
    try:
        for thread in threads:
            thread.start()
        assert held.wait(5.0)
        found = session.fetch(producer.addresses, timeout=9.0, absent=0.8)
        assert producer.introductions == found
    finally:
        stop.set()
        for thread in threads:
            thread.join()
