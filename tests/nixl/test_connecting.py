"""A rank connects many peers at the same time, and a silent one delays no other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
from nixl_world import keep

from kvspec.errors import SpecError, TransferError, WireError
from kvspec.nixl import NixlRank, rank
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeFlight

PEERS = 10


@pytest.fixture
def near(net: FakeNixl) -> Iterator[NixlRank]:
    """Return a rank that has to wait until its connections are established."""
    with NixlRank("near", secret=b"", polled=True) as rank:
        yield rank


@pytest.fixture
def far(net: FakeNixl) -> Iterator[list[NixlRank]]:
    """Return ten peers."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(NixlRank(f"far{number}", secret=b"")) for number in range(PEERS)]


def asked(net: FakeNixl) -> list[str]:
    """Return the names of the peers that have not answered a knock."""
    return [flight.between[1].name for flight in net.moving]


def test_all_peers_are_asked_before_the_first_one_has_answered(
    net: FakeNixl, near: NixlRank, far: list[NixlRank]
) -> None:
    """So ten peers with a delay of d each take d, not ten times d."""

    def answer(_: FakeFlight) -> None:
        if len(net.moving) == PEERS:
            for flight in net.moving:
                flight.land()

    net.fate = answer
    names = near.connect_all([peer.metadata() for peer in far], timeout=5.0)
    assert tuple(peer.name for peer in far) == names == near.peers
    assert PEERS == len(net.flights)


def test_time_limit_is_that_of_all_peers_together(
    net: FakeNixl, near: NixlRank, far: list[NixlRank]
) -> None:
    """The error names the first silent peer. The others have answered, and are forgotten too."""
    silent = {far[3].name, far[7].name}
    net.fate = lambda flight: None if flight.between[1].name in silent else flight.land()
    with pytest.raises(TransferError) as caught:
        near.connect_all([peer.metadata() for peer in far], timeout=0.2)
    assert ("timeout", "connect", far[3].name) == (
        caught.value.state, caught.value.request, caught.value.rank,
    )  # fmt: skip
    assert silent == {*asked(net)}
    assert silent == {*near.peers}, "they stay until their reads are over"
    assert 2 == len(near.transfers)
    for flight in net.moving:
        flight.land()
    net.fate = FakeFlight.land
    assert PEERS == len(near.connect_all([peer.metadata() for peer in far], timeout=0.2))
    assert () == near.transfers


def test_dead_peer_is_found_although_another_one_is_silent(
    net: FakeNixl, near: NixlRank, far: list[NixlRank]
) -> None:
    """The call waits for the silent one, because no read may be given up that can still land."""
    fates = {far[0].name: FakeFlight.fail, far[1].name: lambda _: None}
    net.fate = lambda flight: fates.get(flight.between[1].name, FakeFlight.land)(flight)
    with pytest.raises(TransferError) as caught:
        near.connect_all([peer.metadata() for peer in far], timeout=0.2)
    assert ("peer_lost", far[0].name) == (caught.value.state, caught.value.rank)
    assert (far[1].name,) == near.peers


def test_more_peers_than_bytes_to_read_into_are_asked_in_turn(
    net: FakeNixl, far: list[NixlRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two reads in flight may not write one byte."""
    monkeypatch.setattr(rank, "PROBES", 4)
    most = list[int]()

    def land(_: float) -> None:
        most.append(len(net.moving))
        for flight in net.moving:
            flight.land()

    monkeypatch.setattr(time, "sleep", land)
    net.fate = keep
    with NixlRank("near", secret=b"", polled=True) as near:
        assert PEERS == len(near.connect_all([peer.metadata() for peer in far], timeout=5.0))
        assert (3, ()) == (max(most), near.transfers)


def test_peer_that_was_connected_before_stays_after_an_error(
    net: FakeNixl, near: NixlRank, far: list[NixlRank]
) -> None:
    """It has answered, so it is not asked again."""
    near.connect(far[0].metadata())
    net.fate = lambda _: None
    with pytest.raises(TransferError):
        near.connect_all([peer.metadata() for peer in far[:2]], timeout=0.05)
    assert [far[1].name] == asked(net)
    assert (far[0].name, far[1].name) == near.peers
    net.kill(far[1].name)
    near.disconnect(far[1].name)
    assert (far[0].name,) == near.peers


def test_peer_that_is_given_twice_is_asked_once(
    net: FakeNixl, near: NixlRank, far: list[NixlRank]
) -> None:
    """Two ranks of an engine may share one NIXL rank."""
    names = near.connect_all([far[0].metadata()] * 2, timeout=5.0)
    assert (far[0].name,) * 2 == names
    assert (1, (far[0].name,)) == (len(net.flights), near.peers)


def test_nothing_is_connected_if_one_of_the_metadata_is_damaged(
    near: NixlRank, far: list[NixlRank]
) -> None:
    """All are checked first."""
    with pytest.raises(WireError):
        near.connect_all([far[0].metadata(), b"damaged"])
    assert () == near.peers


@pytest.mark.parametrize("metadata", [None, 7, b"one", {"a": b"one"}], ids=repr)
def test_metadata_must_be_a_sequence(near: NixlRank, metadata: object) -> None:
    """The bytes of one rank are no sequence of metadata."""
    with pytest.raises(SpecError) as caught:
        near.connect_all(metadata)  # type: ignore[arg-type]
    assert "metadata" == caught.value.field
