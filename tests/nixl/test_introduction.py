"""Test that a rank accepts only complete, authentic metadata of the agent that it names."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from kvspec.errors import SpecError, TransferError, WireError
from kvspec.nixl.peers import Envelope, open_metadata
from kvspec.wire.seal import Secret

os.environ.setdefault("UCX_NET_DEVICES", "lo")
pytest.importorskip("nixl_cu13", reason="needs nixl")

from nixl_pair import Pair
from notified import notifications

from kvspec.nixl import NixlRank

pytestmark = pytest.mark.nixl
SECRET = b"sixteen bytes or more"
OTHER = b"another secret of 25 bytes"


def nixl_bytes(name: bytes, rest: bytes = b"|rest") -> bytes:
    """Return bytes that begin like NIXL's metadata of the agent *name*."""
    return b"nixlSerDes|Agent" + struct.pack("<Q", len(name)) + name + rest


def test_envelope_is_equal_after_seal_and_open() -> None:
    """Sealing and opening preserves an envelope, with a secret and without one."""
    envelope = Envelope(name="näme", metadata=nixl_bytes("näme".encode()), probe=4096)
    for secret in (Secret(SECRET), Secret(b"")):
        assert envelope == open_metadata(envelope.seal(secret), secret)


def test_metadata_of_nixl_begins_with_its_agent_name() -> None:
    """NIXL's own bytes contain the agent's name at the place where `open_metadata` reads it."""
    with NixlRank("here", polled=True, secret=SECRET) as rank:
        metadata = open_metadata(rank.metadata(), Secret(SECRET)).metadata
    assert metadata.startswith(nixl_bytes(b"here", b"|"))


def test_changed_metadata_is_refused() -> None:
    """Damaged metadata raises `WireError`. The rank then still accepts the intact metadata."""
    with NixlRank(polled=True) as near, NixlRank() as far:
        metadata = far.metadata()
        for damaged in (
            b"",
            b"rubbish" * 99,
            "text",
            metadata + b"\0",
            *(metadata[:n] for n in range(0, len(metadata), 7)),
            *(
                metadata[:n] + bytes([metadata[n] ^ 1]) + metadata[n + 1 :]
                for n in range(len(metadata))
            ),
        ):
            with pytest.raises(WireError) as caught:
                near.connect(damaged)
            assert caught.value.path.startswith("metadata")
        assert () == near.peers
        assert far.name == near.connect(metadata)


def test_metadata_with_another_secret_is_refused() -> None:
    """Both sides need the same secret. Metadata under another secret never reaches NIXL."""
    with (
        NixlRank(polled=True, secret=SECRET) as near,
        NixlRank(polled=True, secret=OTHER) as other,
        NixlRank(secret=b"") as open_rank,
    ):
        for one, two in ((near, other), (other, near), (near, open_rank), (open_rank, other)):
            with pytest.raises(WireError, match="secret"):
                one.connect(two.metadata())
            assert () == one.peers


def test_rank_without_argument_uses_secret_of_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text in `KVSPEC_SECRET` equals a secret that is passed as bytes."""
    monkeypatch.setenv("KVSPEC_SECRET", SECRET.decode())
    with NixlRank(polled=True) as near, NixlRank(secret=SECRET) as far:
        assert far.name == near.connect(far.metadata())


def test_rank_without_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names both ways to continue. Tickets are sealed by the same rule."""
    monkeypatch.delenv("KVSPEC_SECRET")
    with pytest.raises(SpecError, match="KVSPEC_SECRET") as caught:
        NixlRank()
    assert ("secret", None) == (caught.value.field, caught.value.value)
    assert "secret=b''" in caught.value.rule
    with NixlRank(polled=True, secret=b"") as near, NixlRank(secret=b"") as far:
        assert far.name == near.connect(far.metadata())


@pytest.mark.parametrize("secret", ["", "short", b"fifteen bytes..", 7, ["x"]])
def test_short_secret_is_refused_and_not_shown(secret: object) -> None:
    """The message does not contain the secret."""
    with pytest.raises(SpecError) as caught:
        NixlRank(secret=secret)
    assert "secret" == caught.value.field
    assert "short" not in str(caught.value)
    assert "fifteen" not in str(caught.value)


# Each case: a change of the metadata, and the path and the value of the error. A value of `...` is
# not compared, because it is an excerpt.
BAD: dict[str, tuple[Callable[[Envelope], Envelope], str, Any]] = {
    "bytes of another agent": (
        lambda good: msgspec.structs.replace(good, name="somebody"),
        "metadata.agent",
        b"far",
    ),
    "an agent of a longer name": (
        lambda good: msgspec.structs.replace(good, metadata=nixl_bytes(b"far away")),
        "metadata.agent",
        b"far away",
    ),
    "not the bytes of nixl": (
        lambda good: msgspec.structs.replace(good, metadata=b"not nixl's"),
        "metadata.agent",
        ...,
    ),
    "empty": (lambda good: msgspec.structs.replace(good, metadata=b""), "metadata.agent", ...),
    "a name past the end": (
        lambda good: msgspec.structs.replace(good, metadata=nixl_bytes(b"far", b"")[:-1]),
        "metadata.agent",
        ...,
    ),
    "no name": (lambda good: msgspec.structs.replace(good, name=""), "metadata.name", ...),
    "a long name": (
        lambda good: msgspec.structs.replace(good, name="x" * 10**6),
        "metadata.name",
        "1000000 bytes",
    ),
    "bytes of a long name": (
        lambda good: msgspec.structs.replace(good, metadata=nixl_bytes(b"x" * 10**6)),
        "metadata.agent",
        ...,
    ),
    "no probe": (lambda good: msgspec.structs.replace(good, probe=0), "metadata.probe", 0),
    "a probe that ends at 2**63": (
        lambda good: msgspec.structs.replace(good, probe=2**63 - 1),
        "metadata.probe",
        2**63 - 1,
    ),
    "a probe of 64 bits": (
        lambda good: msgspec.structs.replace(good, probe=2**64 - 1),
        "metadata.probe",
        2**64 - 1,
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_contradictory_metadata_is_refused_and_changes_nothing(case: str) -> None:
    """Wrong metadata is refused even with a valid seal. The connected peer stays usable."""
    change, path, value = BAD[case]
    with (
        NixlRank("near", polled=True, secret=SECRET) as near,
        NixlRank("far", secret=SECRET) as far,
    ):
        ranks = Pair(near, far)
        bad = change(open_metadata(far.metadata(), Secret(SECRET))).seal(Secret(SECRET))
        with pytest.raises(WireError) as caught:
            near.connect(bad)
        assert path == caught.value.path
        assert value is ... or value == caught.value.value
        assert len(str(caught.value)) < 600
        assert ("far",) == near.peers
        ranks.read(0, 9).wait()
        assert ranks.right(0, 9)


def test_metadata_with_a_name_that_is_not_utf8_is_refused() -> None:
    """The envelope is built by hand: `Envelope.seal` cannot encode such a name."""
    head = b"\x93\xa1\xff"  # An array of 3 members. The first is a text of one byte.
    body = head + msgspec.msgpack.encode(nixl_bytes(b"\xff")) + b"\x08"  # The probe is at 8.
    with pytest.raises(WireError) as caught:
        open_metadata(Secret(SECRET).seal(b"kvspec-nixl-3\n", body), Secret(SECRET))
    assert "metadata" == caught.value.path


def test_metadata_with_an_unknown_member_is_refused() -> None:
    """As in every other array of fields."""
    body = msgspec.msgpack.encode(("far", nixl_bytes(b"far"), 8, 0))
    with pytest.raises(WireError) as caught:
        open_metadata(Secret(SECRET).seal(b"kvspec-nixl-3\n", body), Secret(SECRET))
    assert "metadata" == caught.value.path


def test_metadata_with_invalid_bytes_after_the_name_is_refused_by_nixl() -> None:
    """Only NIXL can check these bytes. The rank then still accepts the intact metadata."""
    with NixlRank("near", polled=True) as near, NixlRank("far") as far:
        good = open_metadata(far.metadata(), near.secret)
        bad = msgspec.structs.replace(good, metadata=nixl_bytes(b"far"))
        with pytest.raises(TransferError, match="Mismatch") as caught:
            near.connect(bad.seal(near.secret))
        assert "stale_peer" == caught.value.state
        assert () == near.peers
        ranks = Pair(near, far)
        ranks.read(0, 9).wait()
        assert np.array_equal(ranks.remote[:512], ranks.local[:512])


def test_session_keeps_no_hello_of_a_peer_that_connects_often() -> None:
    """NIXL would keep one for each `connect`, until the rank is closed."""
    with NixlRank(secret=SECRET) as near, NixlRank(secret=SECRET) as far:
        near.connect(far.metadata())
        for _ in range(20):
            far.connect(near.metadata())
        time.sleep(0.2)
        near.tick()
        assert {} == notifications(near)
