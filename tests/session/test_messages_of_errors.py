"""The messages of failed loads: short, and right for tickets."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from two_engines import Side, engine, land, request, until

from kvspec.errors import SpecError, TransferState
from kvspec.session import new_remote_id
from kvspec.testing import FakeNixl
from kvspec.tickets import PrefillTicket

BLOCKS = {"full": [1, 2, 3, 4], "window": [4, 3, 2, 1]}


@pytest.fixture
def sides(net: FakeNixl) -> Iterator[tuple[Side, Side]]:
    """A producer of two ranks, and a consumer of one. They are not connected."""
    with (
        Side("P", engine(2), polled=False, lease=5.0, background=True) as producer,
        Side("D", engine(1), polled=True, heartbeat=0.2, background=True) as consumer,
    ):
        yield producer, consumer


@pytest.mark.parametrize("call", ["load", "decline"])
def test_load_without_remote_id_and_ticket_says_what_to_pass(
    sides: tuple[Side, Side], call: str
) -> None:
    """Both arguments have a default, so the error has to name both."""
    one = sides[1].first
    with pytest.raises(SpecError) as caught:
        one.load(request(), timeout=5.0) if call == "load" else one.decline()
    assert "remote_id" == caught.value.field
    assert "pass remote_id or ticket" in str(caught.value)


def test_advice_for_a_lost_peer_is_short_and_right_for_tickets() -> None:
    """A ticket connects the producer by itself, so disconnect must not be the only advice."""
    advice = TransferState.PEER_LOST.advice
    assert "ticket" in advice
    assert 2 >= advice.count(";") + 1
    assert len(advice) < 160


def test_error_of_a_killed_producer_is_two_sentences(
    sides: tuple[Side, Side], net: FakeNixl, caplog: pytest.LogCaptureFixture
) -> None:
    """The log line is one of them, and has at most 250 characters."""
    producer, consumer = sides
    remote_id = new_remote_id("p-1")
    producer.hold(remote_id)
    ticket = PrefillTicket(
        engine_id="P",
        addresses=tuple(producer.addresses),
        remote_id=remote_id,
        computed_tokens=14,
        tables=BLOCKS,
    )
    # The byte that proves a connection lands.
    net.fate = lambda flight: flight.land() if len(flight.copies) == 1 else None
    one = consumer.first
    with caplog.at_level("INFO", logger="kvspec.session"):
        load = one.load(ticket.request("unlucky", 14, BLOCKS), ticket=ticket, timeout=9.0)
        until(lambda: load.in_flight and net.moving)
        net.kill(next(iter(producer.sessions.values())).nixl.name)
        land(net)  # The read from the other rank.
        until(lambda: load.poll() == "failed")
    assert load.error is not None
    assert TransferState.PEER_LOST == load.error.state
    assert 2 >= load.error.message.count(". ") + 1
    (line,) = [
        r.getMessage()
        for r in caplog.records
        if "unlucky failed" in r.getMessage() or "unlucky from" in r.getMessage()
    ]
    assert "peer_lost" in line
    assert len(line) <= 250
