"""The TCP channel delivers whole messages, bounds its memory, and disconnects peers that stall."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lines import between_lines, interrupted_at, interrupted_in

from kvspec.errors import SpecError, TransferError
from kvspec.session import TcpChannel, channel


@pytest.fixture
def pair() -> Iterator[tuple[TcpChannel, TcpChannel]]:
    """Return two channels."""
    near, far = TcpChannel(), TcpChannel()
    yield near, far
    near.close()
    far.close()


def until(true: Callable[[], object]) -> None:
    """Wait until something is true, at most 10 s."""
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(1e-4)


def received(near: TcpChannel, *others: TcpChannel, count: int) -> list[tuple[str, bytes]]:
    """Return the next *count* messages of *near*."""
    came: list[tuple[str, bytes]] = []

    def enough() -> bool:
        for other in others:
            other.receive()
        came.extend(near.receive())
        return len(came) >= count

    until(enough)
    return came


def raw(address: str) -> socket.socket:
    """Return a connection to *address* by hand."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_messages_arrive_whole_in_order_and_are_answered(
    pair: tuple[TcpChannel, TcpChannel],
) -> None:
    """Messages have any length. The answer returns over the same connection."""
    near, far = pair
    sent = [b"", b"x", bytes(60_000), b"last"]
    for data in sent:
        near.send(far.address, data)
    came = received(far, near, count=4)
    assert sent == [data for _, data in came]
    (route,) = {route for route, _ in came}
    assert route.startswith("#")
    answer = os.urandom(5 << 20)
    far.send(route, answer)
    assert [(far.address, answer)] == received(near, far, count=1)
    assert (1, 1) == (len(near), len(far))


def test_peer_is_reached_once_connection_is_established(
    pair: tuple[TcpChannel, TcpChannel],
) -> None:
    """The first `send` only begins to connect."""
    near, far = pair
    assert not near.reaches(far.address)
    near.send(far.address, b"x")
    assert not near.reaches(far.address)
    until(lambda: near.receive() or near.reaches(far.address))
    far.close()
    until(lambda: near.receive() or not near.reaches(far.address))


def test_address_is_refused_only_while_no_process_listens_there(
    pair: tuple[TcpChannel, TcpChannel],
) -> None:
    """The address is returned once for each refused attempt."""
    near, far = pair
    near.send(far.address, b"x")
    until(lambda: near.receive() or near.reaches(far.address))
    assert [] == near.refused()
    far.close()
    until(lambda: near.receive() or not near.reaches(far.address))
    assert [] == near.refused()
    near.send(far.address, b"x")
    found: list[str] = []
    until(lambda: near.receive() or found.extend(near.refused()) or found)
    assert [far.address] == found
    assert [] == near.refused()


def test_message_that_is_too_long_is_refused(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender raises. A peer that announces such a message is disconnected at once."""
    monkeypatch.setattr(channel, "STALL", 1e9)
    near, far = pair
    with pytest.raises(SpecError, match="at most"):
        near.send(far.address, bytes(channel.MAX_FRAME + 1))
    near.send(far.address, bytes(channel.MAX_QUESTION + 1))
    near.receive()
    until(lambda: len(far) or far.receive())
    until(lambda: far.receive() or not len(far))
    liar = raw(far.address)
    liar.sendall(b"\xff\xff\xff\xff")
    until(lambda: len(far) or far.receive())
    until(lambda: far.receive() or not len(far))
    assert b"" == liar.recv(1)
    liar.close()


def test_message_to_unreachable_peer_is_lost(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost messages are counted, and memory does not grow for a peer that does not read."""
    near, far = pair
    far.close()
    for route in (far.address, "nowhere", "host:port", "#7", "no such host.invalid:1", "h:99999"):
        near.send(route, b"lost")
    until(lambda: near.receive() or near.messages_lost == 6)
    assert 0 == len(near)
    monkeypatch.setattr(channel, "MAX_UNSENT", 1 << 20)
    deaf = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{deaf.getsockname()[1]}"
    before = near.messages_lost
    for _ in range(400):
        near.send(address, bytes(1 << 18))
    assert near.messages_lost - before > 300
    deaf.close()


def test_peer_that_stalls_is_disconnected(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a message that has begun must make progress. A silent peer may stay."""
    _, far = pair
    silent, slow = raw(far.address), raw(far.address)
    slow.sendall(b"\0\0\0\x09half")
    until(lambda: far.receive() or len(far) == 2)
    monkeypatch.setattr(channel, "STALL", 0.05)
    until(lambda: far.receive() or len(far) == 1)
    slow.settimeout(10)
    assert b"" == slow.recv(1)
    silent.sendall(b"\0\0\0\x02hi")
    assert [b"hi"] == [data for _, data in received(far, count=1)]
    silent.close()
    slow.close()
    until(lambda: far.receive() or not len(far))


def test_peer_that_reads_nothing_is_disconnected(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More messages to it do not extend its time, which begins with the first unread byte."""
    near, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        near.send(address, b"")
        until(lambda: near.receive() or near.reaches(address))
        monkeypatch.setattr(channel, "STALL", 0.2)
        monkeypatch.setattr(channel, "MAX_UNREAD", 1 << 30)
        for _ in range(300):  # 19 MiB, which the buffers of the system cannot take.
            near.send(address, bytes(1 << 16))
        near.receive()
        assert 1 == len(near)
        start = time.monotonic()
        while len(near):
            assert time.monotonic() - start < 5.0
            near.send(address, bytes(1000))
            near.receive()
            time.sleep(0.01)
        assert time.monotonic() - start > 0.1


def test_peer_that_does_not_read_its_answers_is_disconnected(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer that dialled is disconnected when too many bytes wait for it, and not before."""
    monkeypatch.setattr(channel, "MAX_UNREAD", 1 << 18)
    _, far = pair
    deaf = raw(far.address)
    deaf.sendall(b"\0\0\0\x01x")
    ((route, _),) = received(far, count=1)
    sent = arrived = 0
    while len(far) and sent < 1000 << 16:
        far.send(route, bytes(1 << 16))
        sent += 4 + (1 << 16)
    assert 0 == len(far)
    while part := deaf.recv(1 << 20):  # Bytes that the buffers of the system have taken.
        arrived += len(part)
    assert 1 << 18 < sent - arrived < (1 << 18) + (1 << 17)
    before = far.messages_lost
    far.send(route, b"x")
    assert before + 1 == far.messages_lost
    deaf.close()


def test_peer_that_writes_but_does_not_read_is_disconnected(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that come from the peer do not extend the time in which it has to read."""
    _, far = pair
    deaf = raw(far.address)
    deaf.sendall(b"\0\0\0\x01x")
    ((route, _),) = received(far, count=1)
    far.send(route, bytes(channel.MAX_FRAME))
    monkeypatch.setattr(channel, "STALL", 0.2)
    end = time.monotonic() + 5.0
    with contextlib.suppress(OSError):
        while len(far):
            assert time.monotonic() < end
            deaf.sendall(b"\0\0\0\x01x")
            far.receive()
            time.sleep(0.01)
    assert 0 == len(far)
    deaf.close()


def test_peer_that_reset_connection_is_dropped_at_next_send(
    pair: tuple[TcpChannel, TcpChannel],
) -> None:
    """The message is lost without an error. The next message dials the peer again."""
    near, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        near.send(address, b"")
        until(lambda: near.receive() or near.reaches(address))
        gone = server.accept()[0]
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        until(lambda: near.send(address, b"x") or near.messages_lost)
        assert 0 == len(near)
        near.send(address, b"again")
        until(lambda: near.receive() or near.reaches(address))


def link(far: TcpChannel, opened: list[socket.socket], *, trusted: bool = False) -> str:
    """Open a connection by hand, send a message over it, and return its route."""
    opened.append(raw(far.address))
    opened[-1].sendall(b"\0\0\0\x01x")
    ((route, _),) = received(far, count=1)
    if trusted:
        far.trust(route)
    return route


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    """Return a list whose sockets are closed at the end."""
    made: list[socket.socket] = []
    yield made
    for each in made:
        each.close()


def test_oldest_stranger_makes_room_for_next_one(
    pair: tuple[TcpChannel, TcpChannel],
    opened: list[socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trusted connections and connections that this side dialled stay open.

    A stranger that keeps sending stays no longer than a silent one.
    """
    monkeypatch.setattr(channel, "MAX_STRANGERS", 2)
    near, far = pair
    far.send(near.address, b"x")
    link(far, opened, trusted=True)
    for count in range(3):
        link(far, opened)
        if count < 2:
            opened[1].sendall(b"\0\0\0\x01x")
            received(far, count=1)
    assert 1 + 1 + 2 == len(far)
    assert b"" == opened[1].recv(1)
    opened[0].sendall(b"\0\0\0\x02hi")
    assert [b"hi"] == [data for _, data in received(far, count=1)]


def test_trusted_peer_that_was_silent_longest_makes_room(
    pair: tuple[TcpChannel, TcpChannel],
    opened: list[socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It connects again when it has something to send."""
    monkeypatch.setattr(channel, "MAX_ACCEPTED", 2)
    _, far = pair
    first = link(far, opened, trusted=True)
    link(far, opened, trusted=True)
    opened[0].sendall(b"\0\0\0\x01x")
    assert [(first, b"x")] == received(far, count=1)
    link(far, opened, trusted=True)
    assert b"" == opened[1].recv(1)
    assert 2 == len(far)


def test_connections_take_turns(
    pair: tuple[TcpChannel, TcpChannel],
    opened: list[socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most two messages of each in a poll, and four in all, as in the module's example."""
    _, far = pair
    for _ in "abc":
        link(far, opened, trusted=True)
    monkeypatch.setattr(channel, "FRAMES_PER_PEER", 2)
    monkeypatch.setattr(channel, "FRAMES", 4)
    for sender, count in zip(opened, (3, 1, 3), strict=True):
        for number in range(count):
            sender.sendall(b"\0\0\0\x01%d" % number)
    time.sleep(0.1)
    polls = [far.receive() for _ in range(3)]
    assert [4, 3, 0] == [len(came) for came in polls]
    for came in polls:
        assert all(count <= 2 for count in Counter(route for route, _ in came).values())
    # A connection that had no turn in the first poll is the first one in the second.
    served = [{route for route, _ in came} for came in polls]
    assert polls[1][0][0] not in served[0] or len(served[0]) == 3
    every = sorted((int(route[1:]), data) for came in polls for route, data in came)
    assert [(0, b"0"), (0, b"1"), (0, b"2"), (1, b"0"), (2, b"0"), (2, b"1"), (2, b"2")] == every


def test_poll_is_bounded_however_much_arrives(
    pair: tuple[TcpChannel, TcpChannel], opened: list[socket.socket]
) -> None:
    """Strangers get a quarter of it, and what is left is not forgotten."""
    _, far = pair
    for _ in range(40):
        opened.append(raw(far.address))
        opened[-1].sendall(bytes(4) * 100)
    came: list[int] = []

    def all_came() -> bool:
        came.append(len(far.receive()))
        return sum(came) == 4000

    until(all_came)
    assert max(came) == channel.FRAMES // 4


def test_rejected_connection_is_closed_and_dialled_again(
    pair: tuple[TcpChannel, TcpChannel],
) -> None:
    """Both a connection of a peer that dialled and one to a peer that was dialled."""
    near, far = pair
    near.send(far.address, b"x")
    ((route, _),) = received(far, near, count=1)
    far.reject(route)
    assert 0 == len(far)
    until(lambda: near.receive() or not len(near))
    near.send(far.address, b"y")
    assert [b"y"] == [data for _, data in received(far, near, count=1)]
    near.reject(far.address)
    near.send(far.address, b"z")
    assert [b"z"] == [data for _, data in received(far, near, count=1)]
    near.reject("nobody")


@pytest.mark.parametrize("trusted", [False, True])
def test_channel_without_descriptors_refuses_connections_and_rests(
    pair: tuple[TcpChannel, TcpChannel], opened: list[socket.socket], *, trusted: bool
) -> None:
    """A connection that cannot be accepted does not end `wait` again and again.

    A stranger gives its descriptor to the process, and a trusted peer keeps its connection.
    """
    _, far = pair
    route = link(far, opened, trusted=trusted)
    opened += [raw(far.address) for _ in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        start, turns = time.monotonic(), 0
        while time.monotonic() - start < 0.5:
            far.receive()
            far.wait(0.1)
            turns += 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert turns < 100
    assert trusted == far.reaches(route)
    opened[1].settimeout(5.0)
    assert b"" == opened[1].recv(1)
    link(far, opened)


def test_names_are_looked_up_by_resolve_alone(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`send` waits for no name server."""
    near, far = pair
    look_up, names = socket.getaddrinfo, list[Any]()

    def watched(host: Any, *rest: Any, **more: Any) -> Any:
        if not more.get("flags"):
            names.append(host)
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", watched)
    name = f"localhost:{far.address.rpartition(':')[2]}"
    near.send(name, b"lost")
    assert ([], 1) == (names, near.messages_lost)
    near.resolve(name)
    near.resolve("no address")
    for data in (b"x", b"y"):
        near.send(name, data)
    assert [b"x", b"y"] == [data for _, data in received(far, near, count=2)]
    assert ["localhost"] == names
    monkeypatch.setattr(channel, "RESOLVED", 1)
    near.resolve(far.address)
    near.reject(name)
    near.send(name, b"forgotten")
    assert 2 == near.messages_lost


def test_wake_ends_wait(pair: tuple[TcpChannel, TcpChannel]) -> None:
    """It works from any thread, and before `wait`. `receive` takes it back."""
    near, _ = pair
    start = time.monotonic()
    waker = threading.Timer(0.1, near.wake)
    waker.start()
    near.wait(1.0)
    for _ in range(1000):  # more than the buffer takes
        near.wake()
    near.wait(1.0)
    assert 0.05 < time.monotonic() - start < 0.9
    waker.join()
    until(lambda: near.receive() or took(near) > 0.04)


def took(near: TcpChannel) -> float:
    """Return how long the channel waits, at most 0.05 s."""
    start = time.monotonic()
    near.wait(0.05)
    return time.monotonic() - start


def test_port_in_use_is_named() -> None:
    """A foreign host and an impossible port are named too."""
    one = TcpChannel()
    with pytest.raises(TransferError, match=r"cannot listen on 127.0.0.1:.*in use") as caught:
        TcpChannel(port=int(one.address.rpartition(":")[2]))
    assert "unavailable" == caught.value.state
    with pytest.raises(TransferError, match=r"cannot listen on 192.0.2.1:0"):
        TcpChannel("192.0.2.1")
    for port in (-1, 65536, True):
        with pytest.raises(SpecError, match="port="):
            TcpChannel(port=port)
    one.close()


def test_channel_can_be_closed_while_a_thread_waits() -> None:
    """A thread waits for a producer, and another closes the session between any two lines."""
    place, reached = 0, True
    while reached:
        near, lines = TcpChannel(), list[int]()

        def act(line: int, near: TcpChannel = near, lines: list[int] = lines) -> None:
            lines.append(line)
            if line == place:  # noqa: B023 - it is called at once
                near.close()

        with between_lines(act, channel):
            near.wait(0.01)
        assert [] == near.receive()
        near.close()
        reached, place = place < len(lines), place + 1
    assert place > 3


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])  # noqa: S104 - that is refused
def test_channel_on_all_hosts_requires_public_address(host: str) -> None:
    """A peer that dials 0.0.0.0 reaches itself."""
    with pytest.raises(SpecError, match=repr(host)) as caught:
        TcpChannel(host)
    assert ("public", "") == (caught.value.field, caught.value.value)
    if host != "::":
        reached = TcpChannel(host, public="127.0.0.1")
        assert reached.address.startswith("127.0.0.1:")
        reached.close()


@pytest.mark.parametrize("wrong", [3, None, b"127.0.0.1"])
def test_host_must_be_text(wrong: Any) -> None:
    """Both the host to listen on and the public one."""
    with pytest.raises(SpecError, match="host="):
        TcpChannel(wrong)
    with pytest.raises(SpecError, match="public="):
        TcpChannel(public=wrong)


def test_closed_channel_leaves_no_descriptor() -> None:
    """Later calls have no effect and raise no error."""
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        near, far = TcpChannel(), TcpChannel(public="127.0.0.1")
        near.send(far.address, b"x")
        received(far, near, count=1)
        near.close()
        far.close()
        near.close()
        near.send(far.address, b"x")
        near.wait(0.0)
        assert [] == near.receive()
    assert before == len(list(Path("/proc/self/fd").iterdir()))
    assert "0 connections" in repr(near)


# Python closes a socket that was interrupted before the channel stored it, with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_channel_goes_on_after_an_interrupt_before_any_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New and old peers are answered, `wait` rests, and no descriptor is left."""
    monkeypatch.setattr(channel, "STALL", 0.04)
    monkeypatch.setattr(channel, "CHANNEL_REST", 0.002)
    monkeypatch.setattr(channel, "ACCEPTS", 1)
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    place, reached = -1, True
    while reached:
        place += 1
        near, far, new = TcpChannel(), TcpChannel(), TcpChannel()

        def act(near: TcpChannel = near, far: TcpChannel = far) -> None:
            near.send(far.address, b"question")
            for _ in range(4):
                time.sleep(1e-3)  # The listener rests in between.
                near.receive()
                for route, _ in far.receive():
                    far.trust(route)
                    far.send(route, b"answer")
            near.reject(far.address)
            far.receive()

        reached, _ = interrupted_at(place, act, channel)
        for peer in (near, new):
            assert answers(peer, far), f"interrupted before line {place}"
        until(lambda far=far: far.receive() or took(far) > 0.003)  # type: ignore[misc]
        for each in (near, far, new):
            each.close()
    assert place > 150
    gc.collect()
    assert before == len(list(Path("/proc/self/fd").iterdir()))


# If bytes are lost, the reader takes four others for a length. Then it waits for nearly 8 MiB.
LONG = b"\x00\x7f\xff\x00" * (1 << 20)


@pytest.mark.parametrize("function", [TcpChannel._flush, TcpChannel._read])
def test_no_byte_is_lost_or_doubled_by_an_interrupt_inside_a_statement(
    function: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next byte would not begin a message. So the connection is closed."""
    monkeypatch.setattr(channel, "MAX_UNREAD", 2 * len(LONG))
    place, reached = 0, True
    while reached and place < 150:
        near, far = TcpChannel(), TcpChannel()
        near.send(far.address, b"question")
        ((route, _),) = received(far, near, count=1)

        def act(near: TcpChannel = near, far: TcpChannel = far, route: str = route) -> None:
            far.send(route, LONG)  # It does not fit into the buffers of the sockets.
            for _ in range(3):
                near.receive()
                far.receive()

        reached = interrupted_in(place, function, act)
        assert answers(near, far), f"interrupted before instruction {place}"
        place += 1
        near.close()
        far.close()
    assert place > 50


def answers(near: TcpChannel, far: TcpChannel) -> bool:
    """Whether a question reaches *far* and its reply comes back. Lost messages are repeated."""
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        near.send(far.address, b"question")
        for _ in range(5):
            time.sleep(5e-4)
            for route, data in far.receive():
                if data == b"question":
                    far.send(route, b"reply")
            came = {data for _, data in near.receive()}
            assert came <= {b"answer", b"reply", LONG}, "a message is not whole"
            if b"reply" in came:
                return True
    return False


def test_dial_that_fails_at_once_leaves_no_connection(pair: tuple[TcpChannel, TcpChannel]) -> None:
    """The system refuses TCP to a multicast address. Nothing was established, so nothing ended."""
    near, _ = pair
    near.send("224.0.0.1:7", b"x")
    assert (0, 1) == (len(near), near.messages_lost)
    assert (0, []) == (near.ended("224.0.0.1:7"), near.refused())
