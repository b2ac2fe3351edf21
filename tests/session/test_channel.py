"""The TCP channel: whole messages or none, bounded, and nobody who stalls or lies is waited for."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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


def test_messages_come_whole_in_order_and_are_answered(pair: tuple[TcpChannel, TcpChannel]) -> None:
    """Of any length, and the answer goes back over the same connection."""
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


def test_who_is_reached_is_known(pair: tuple[TcpChannel, TcpChannel]) -> None:
    """When a connection stands: not before anything was sent, nor as soon as it was."""
    near, far = pair
    assert not near.reaches(far.address)
    near.send(far.address, b"x")
    assert not near.reaches(far.address)
    until(lambda: near.receive() or near.reaches(far.address))
    far.close()
    until(lambda: near.receive() or not near.reaches(far.address))


def test_what_is_too_long_is_refused(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sender, and who sends it all the same is cut off, not only when it stalls."""
    monkeypatch.setattr(channel, "STALL", 1e9)
    near, far = pair
    with pytest.raises(SpecError, match="at most"):
        near.send(far.address, bytes(channel.MAX_MESSAGE + 1))
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


def test_what_nobody_takes_is_lost(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody there, no address, a peer that reads nothing: counted, and no memory grows."""
    near, far = pair
    far.close()
    for route in (far.address, "nowhere", "host:port", "#7", "no such host.invalid:1", "h:99999"):
        near.send(route, b"lost")
    until(lambda: near.receive() or near.lost == 6)
    assert 0 == len(near)
    monkeypatch.setattr(channel, "MAX_UNSENT", 1 << 20)
    deaf = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{deaf.getsockname()[1]}"
    before = near.lost
    for _ in range(400):
        near.send(address, bytes(1 << 18))
    assert near.lost - before > 300
    deaf.close()


def test_who_stalls_is_cut_off(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that has begun goes on, or its connection goes; who says nothing may stay."""
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


def test_who_takes_nothing_is_cut_off(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is sent to; but its time begins with what it does not take, not before."""
    near, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        near.send(address, b"")
        until(lambda: near.receive() or near.reaches(address))
        link = near._links[address].socket
        monkeypatch.setattr(channel, "STALL", 0.2)
        for _ in range(3):  # until nothing more is taken, nor a while later
            time.sleep(0.1)
            with contextlib.suppress(BlockingIOError):
                while link.send(bytes(1 << 16)):
                    pass
        near.send(address, b"x")
        near.receive()
        assert 1 == len(near)
        start = time.monotonic()
        while len(near):
            assert time.monotonic() - start < 5.0
            near.send(address, bytes(1000))
            near.receive()
            time.sleep(0.01)
        assert time.monotonic() - start > 0.1


def test_channel_cuts_off_peer_that_does_not_read_its_answers(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer that dialled is cut off as soon as too many bytes wait for it, and not before."""
    monkeypatch.setattr(channel, "MAX_UNREAD", 1 << 18)
    _, far = pair
    deaf = raw(far.address)
    deaf.sendall(b"\0\0\0\x01x")
    ((route, _),) = received(far, count=1)
    most = sent = 0
    while len(far) and sent < 1000:
        far.send(route, bytes(1 << 16))
        sent += 1
        most = max([most, *(len(link.unsent) for link in far._links.values())])
    assert 0 == len(far)
    assert 1 << 18 < most < (1 << 18) + (1 << 17)
    before = far.lost
    far.send(route, b"x")
    assert before + 1 == far.lost
    deaf.close()


def test_channel_cuts_off_peer_that_writes_but_does_not_read(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that come from the peer do not extend the time in which it has to read."""
    _, far = pair
    deaf = raw(far.address)
    deaf.sendall(b"\0\0\0\x01x")
    ((route, _),) = received(far, count=1)
    far.send(route, bytes(channel.MAX_MESSAGE))
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


def test_who_broke_off_is_dropped_when_it_is_sent_to(pair: tuple[TcpChannel, TcpChannel]) -> None:
    """What it does not take is lost, and nothing raises; it is dialled again for the next."""
    near, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        near.send(address, b"")
        until(lambda: near.receive() or near.reaches(address))
        gone = server.accept()[0]
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        until(lambda: near.send(address, b"x") or near.lost)
        assert 0 == len(near)
        near.send(address, b"again")
        until(lambda: near.receive() or near.reaches(address))


def test_connections_are_bounded(
    pair: tuple[TcpChannel, TcpChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was silent longest makes room."""
    monkeypatch.setattr(channel, "MAX_ACCEPTED", 3)
    near, far = pair
    far.send(near.address, b"dialled, so it does not count")
    opened: list[socket.socket] = []

    def speak(at: int) -> None:
        """Let a connection say something, a new one perhaps."""
        if at == len(opened):
            opened.append(raw(far.address))
        opened[at].sendall(b"\0\0\0\x01x")
        received(far, count=1)

    for at in (0, 1, 2, 0, 3):
        speak(at)
    assert 1 + 3 == len(far)
    with opened.pop(1) as silent:
        assert b"" == silent.recv(1)
    for at in (0, 1, 2, 3):
        speak(at)
    assert b"" == opened[0].recv(1)
    for each in opened:
        each.close()


def test_a_port_in_use_is_named() -> None:
    """And so is a host that is not ours, and a port that is none."""
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


def test_a_channel_may_be_closed_while_it_is_waited_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by who closes a session whose producer is just being met: there is nothing to wait for."""
    near = TcpChannel()
    select = near._selector.select

    def closed(timeout: float) -> Any:
        near.close()
        return select(timeout)

    monkeypatch.setattr(near._selector, "select", closed)
    near.wait(0.1)
    assert [] == near.receive()


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])  # noqa: S104 - that is refused
def test_who_listens_everywhere_says_where_it_is_reached(host: str) -> None:
    """Nobody else reaches 0.0.0.0: who dials it reaches itself."""
    with pytest.raises(SpecError, match=repr(host)) as caught:
        TcpChannel(host)
    assert ("public", "") == (caught.value.field, caught.value.value)
    if host != "::":
        reached = TcpChannel(host, public="127.0.0.1")
        assert reached.address.startswith("127.0.0.1:")
        reached.close()


@pytest.mark.parametrize("wrong", [3, None, b"127.0.0.1"])
def test_a_host_is_a_name(wrong: Any) -> None:
    """To listen on, and to be reached by."""
    with pytest.raises(SpecError, match="host="):
        TcpChannel(wrong)
    with pytest.raises(SpecError, match="public="):
        TcpChannel(public=wrong)


def test_a_closed_channel_leaves_nothing() -> None:
    """Neither a file descriptor nor an error in whoever uses it still."""
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
