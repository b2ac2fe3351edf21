"""A session takes each transport that has the methods of the protocol, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from copying_transport import CopyTransport, copying
from two_engines import Side, engine

from kvspec.errors import SpecError
from kvspec.nixl import NixlRank
from kvspec.session.transport import Transport, check_transport

METHODS = [name for name in vars(Transport) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_transport_without_a_method_is_refused(name: str) -> None:
    """The error names the method."""
    transport: Any = SimpleNamespace(**dict.fromkeys(METHODS))
    check_transport(transport)
    delattr(transport, name)
    with pytest.raises(SpecError, match=name) as caught:
        check_transport(transport)
    assert ("nixl", transport) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("transport", [None, "nixl", NixlRank, CopyTransport])
def test_only_an_object_is_a_transport(transport: Any) -> None:
    """A class has the methods. Only its objects are transports."""
    with pytest.raises(SpecError) as caught:
        check_transport(transport)
    assert "nixl" == caught.value.field


def test_poll_ticks_the_transport_until_it_is_closed() -> None:
    """A producer calls nothing else of its transport while it serves."""
    with copying(), Side("P", engine(1), polled=False) as producer:
        transport = producer.first.nixl
        assert isinstance(transport, CopyTransport)
        for _ in range(3):
            producer.poll()
        assert 3 == transport.ticks
        transport.close()
        producer.poll()
        assert 3 == transport.ticks
