"""Ports and public hosts of channels, as operators write them."""

import socket
from contextlib import ExitStack, closing
from typing import Any

import pytest

from kvspec.errors import SpecError, TransferError
from kvspec.session import TcpChannel
from kvspec.session.ports import port_range, public_host


def free_ports(count: int) -> tuple[int, int]:
    """Return the first and the last of some consecutive ports that are free now."""
    for first in range(20000, 30000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first, first + count - 1
    raise RuntimeError("no free ports")


def port_of(channel: TcpChannel) -> int:
    return int(channel.address.rpartition(":")[2])


def test_channel_takes_the_first_free_port_of_a_range() -> None:
    """Ranks of one machine share the setting, so each takes the next port."""
    first, last = free_ports(3)
    with ExitStack() as stack:
        for expected in range(first, last + 1):
            channel = TcpChannel(port=(first, last))
            stack.enter_context(closing(channel))
            assert expected == port_of(channel)
        with pytest.raises(TransferError, match=f"ports {first} to {last}.*in use") as caught:
            TcpChannel(port=(first, last))
        assert "unavailable" == caught.value.state


def test_channel_uses_a_port_again_when_it_is_free() -> None:
    first, last = free_ports(2)
    TcpChannel(port=(first, last)).close()
    with closing(TcpChannel(port=f"{first}-{last}")) as channel:
        assert first == port_of(channel)


def test_channel_on_a_foreign_host_tries_no_other_port() -> None:
    """The fault is the host's, so the message does not blame the ports."""
    with pytest.raises(TransferError, match=r"192.0.2.1.*assign") as caught:
        TcpChannel("192.0.2.1", (20000, 20010))
    assert "unavailable" == caught.value.state


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, range(1)),
        (9000, range(9000, 9001)),
        ("0", range(1)),
        (" 9000 - 9001 ", range(9000, 9002)),
        ((9000, 9000), range(9000, 9001)),
        ([9000, 9001], range(9000, 9002)),
        (range(9000, 9002), range(9000, 9002)),
        ("65535", range(65535, 65536)),
    ],
)
def test_port_range_accepts_what_operators_write(value: Any, expected: range) -> None:
    assert expected == port_range(value)


@pytest.mark.parametrize(
    "wrong",
    [
        *(-1, 65536, True, None, 1.5, b"9000"),
        *("", "-", "9000-", "-9000", "9000-8999", "0-10", "9000:9010", "9_0", "٩", "9" * 5000),
        *((), (9000,), (9001, 9000), (0, 5), (9000, "9001"), (9000, 70000)),
        *(range(0), range(9000, 9010, 2), {9000, 9001}),
    ],
)
def test_port_range_names_the_setting_that_is_wrong(wrong: Any) -> None:
    with pytest.raises(SpecError) as caught:
        port_range(wrong, "settings['port']")
    assert "settings['port']" == caught.value.field


@pytest.mark.parametrize("wrong", ["10.0.0.1:9000", "[::1]", "http://host", "a b", "host:", "u@h"])
def test_public_is_a_host_without_a_port(wrong: str) -> None:
    """A port in it would become part of the name, and no peer could look that up."""
    with pytest.raises(SpecError) as caught:
        TcpChannel(public=wrong)
    assert ("public", wrong) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("host", ["10.0.0.5", "prefill-0.prefill.svc", "fd00::5", "fe80::1%eth0"])
def test_public_is_a_name_or_an_address(host: str) -> None:
    assert host == public_host(host)
    with closing(TcpChannel(public=host)) as channel:
        assert host == channel.address.rpartition(":")[0]


def test_channels_reach_each_other_over_ipv6() -> None:
    try:
        near = TcpChannel("::1")
    except TransferError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with closing(near), closing(TcpChannel("::1")) as far:
        near.send(far.address, b"hello")
        received: list[bytes] = []
        for _ in range(100):
            near.wait(0.01)
            near.receive()
            received += [data for _, data in far.receive()]
            if received:
                break
        assert [b"hello"] == received
