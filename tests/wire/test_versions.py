"""Sessions of two versions of the wire format: what is recorded is read, and ranges are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from refused import refusal
from shakes import closed, opened

import kvspec
from kvspec.wire.codec import (
    decode_handshake,
    decode_message,
    encode_handshake,
    encode_message,
    sender_of,
)
from kvspec.wire.handshake import Handshake
from kvspec.wire.messages import MESSAGES
from kvspec.wire.packing import decoder_of, pack, unpack
from kvspec.wire.versions import NO_START, OWN, START, VERSION, Versions

RECORDED = {
    version: dict(
        line.split()
        for line in Path(__file__)
        .with_name(f"messages_{version}.txt")
        .read_text(encoding="ascii")
        .splitlines()
    )
    for version in (10, 11)
}
STARTED = bytes(range(START))
BEFORE = Versions(10, 10)


def golden() -> Handshake:
    """Return a handshake with a start."""
    spec = kvspec.FullAttentionSpec(
        block_size=16, total_num_kv_heads=2, head_size=8, dtype="float16"
    )
    group = kvspec.KVCacheGroup(name="full", layers=["a"], spec=spec)
    cache = kvspec.plan_memory(kvspec.EngineSpec(groups=[group]), kvspec.RankId(), 4, address=4096)
    return Handshake(engine_id="P", epoch=1, cache=cache, start=bytes(range(START)))


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.parametrize("kind", sorted(MESSAGES))
def test_recorded_message_of_an_older_version_decodes_and_encodes_equal(
    kind: str, version: int
) -> None:
    """Sessions of earlier releases wrote these bytes."""
    data = bytes.fromhex(RECORDED[version][kind])
    message = decode_message(data)
    assert kind == message.kind
    assert (NO_START if version == 10 else STARTED, version) == sender_of(data)
    assert data == encode_message(message, STARTED, version)
    newer = encode_message(message, STARTED)
    assert message == decode_message(newer)
    assert (STARTED, VERSION) == sender_of(newer)
    assert len(newer) < len(data) + START


@pytest.mark.parametrize(
    ("at", "value", "path"),
    [(0, "stop", "message[0]"), (0, "stopped", "message[0]"),
     (0, "progress", "message[0]"), (4, 1, "message.attempt"),
     (4, None, "message.attempt"), (4, "0", "message.attempt")],
)  # fmt: skip
def test_older_message_that_nothing_sends_any_more_is_refused(
    at: int, value: Any, path: str
) -> None:
    """The kinds of pushes and of progress, and another attempt than the first."""
    data = bytes.fromhex(RECORDED[11]["valid"])
    head = len(b"kvspec-message\n") + 2 + START
    fields = msgspec.msgpack.decode(data[head:])
    fields[at] = value
    wrong = data[:head] + msgspec.msgpack.encode(fields)
    assert path == refusal(lambda: decode_message(wrong), kvspec.WireError).path


@pytest.mark.parametrize("body", [b"", b"\xc0", b"\x90", b"\x81\x90\x90", b"\x91\x81\x80\x01"])
def test_older_message_that_is_no_array_of_fields_is_refused(body: bytes) -> None:
    """Nil, an empty array, and maps with keys that are arrays and maps."""
    data = b"kvspec-message\n\0\x0b" + STARTED + body
    assert refusal(lambda: decode_message(data), kvspec.WireError).path.startswith("message")


def test_handshake_in_version_10_loses_only_start_and_versions() -> None:
    """An older session reads the rest."""
    read = decode_handshake(encode_handshake(golden(), 10))
    assert (NO_START, BEFORE) == (read.start, read.versions)
    assert golden().cache.regions == read.cache.regions
    assert {"start", "versions"} == {*opened(encode_handshake(golden()))} - {
        *opened(encode_handshake(golden(), 10))
    }


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ((10, 11), (10, 11), 11),
        ((10, 11), (10, 10), 10),
        ((10, 11), (11, 900), 11),
        ((10, 11), (12, 13), None),
        ((10, 11), (1, 9), None),
        ((10, 11), (1, 65535), 11),
    ],
)
def test_common_version_is_the_newest_of_both(one: Any, other: Any, common: int | None) -> None:
    """It does not depend on who asks."""
    assert (
        common == Versions(*one).common(Versions(*other)) == Versions(*other).common(Versions(*one))
    )


@pytest.mark.parametrize(
    "versions", [[11, 10], [0, 12], [10, 65536], [10, 2**64 - 1], [-1, 12], [10], [10, 11, 12], 12,
                 [10.0, 12.0], ["10", "12"], None, [13, 14], [10, 10]],
)  # fmt: skip
def test_handshake_with_a_bad_range_is_refused(versions: Any) -> None:
    """Inverted, out of bounds, of another type, or without the version of the handshake."""
    data = encode_handshake(golden())
    fields = opened(data) | {"versions": versions}
    error = refusal(lambda: decode_handshake(closed(data, fields)), kvspec.WireError)
    assert error.path.startswith(("versions", "handshake.versions"))


@pytest.mark.parametrize("start", [b"", bytes(15), bytes(17), "x" * 16, None, 7])
def test_handshake_with_a_bad_start_is_refused(start: Any) -> None:
    """It has exactly 16 bytes."""
    data = encode_handshake(golden())
    fields = opened(data) | {"start": start}
    error = refusal(lambda: decode_handshake(closed(data, fields)), kvspec.WireError)
    assert "start" == error.path


@pytest.mark.parametrize("version", [0, 9, 13, 65535])
def test_other_version_is_refused_with_both_versions(version: int) -> None:
    """The error states what to do."""
    head = version.to_bytes(2, "big")
    shake, message = encode_handshake(golden()), bytes.fromhex(RECORDED[10]["heartbeat"])
    for decode, data, at in ((decode_handshake, shake, 17), (decode_message, message, 15)):
        wrong = data[:at] + head + data[at + 2 :]
        error = refusal(lambda decode=decode, wrong=wrong: decode(wrong), kvspec.WireError)
        assert ("version", version) == (error.path, error.value)
        assert str(OWN) in error.expected
        assert "upgrade" in error.expected


def test_message_of_version_11_without_a_whole_start_is_refused() -> None:
    """A message of version 10 under another head is one of them."""
    message = bytes.fromhex(RECORDED[10]["heartbeat"])
    wrong = message[:15] + b"\0\x0b" + message[17:]
    for data in (wrong, wrong[:17], wrong[:20]):
        error = refusal(lambda data=data: decode_message(data), kvspec.WireError)
        assert error.path.startswith("message")


def test_versions_of_question_are_packed_as_an_array() -> None:
    """The page describes these three bytes."""
    assert b"\x92\x0a\x0c" == pack(OWN)
    assert OWN == unpack("question", decoder_of(Versions), msgspec.msgpack.encode([10, 12]))
