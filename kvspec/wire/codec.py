"""Encode and decode handshakes and messages: their heads, versions and limits.

Invariant: any bytes give a valid object, or a `WireError` with the path of the fault. An encoded
object is decoded to an equal one. Strangers choose the bytes, so sizes, counts and nesting are
bounded before anything large is built, and each value passes the constructor that a caller's value
passes.

How it works:
    A message is a head, the version, the start of the sender's session, and the MessagePack array
    of its class in `kvspec.wire.messages`. A handshake is a head, the version, and one zlib stream.
    The stream contains a MessagePack map with the fields of `HandshakeFields`:

        engine             plain values, see `kvspec.wire.values`
        everything else    itself

    Versions 10 and 11 are written and read too. Their messages have the number of an attempt, which
    is always 0 here. The kinds in `PAST_KINDS` are refused by name. Messages of version 10 have no
    start, and its handshakes have neither `start` nor `versions`.

    A cache has thousands of regions, and nearly all their attributes are equal. zlib shortens them
    to a few bytes each. `RankCache` checks the regions.
"""

from __future__ import annotations

import zlib
from typing import Annotated, Any

import attrs
import msgspec
from msgspec import Meta

from kvspec.errors import SpecError, WireError
from kvspec.inputs import MOST, instance
from kvspec.memory.rank_cache import Memory, RankCache, Region
from kvspec.ownership.parallel import RankId
from kvspec.wire.handshake import MAX_TRANSPORT, Handshake
from kvspec.wire.messages import AnyMessage, Message
from kvspec.wire.packing import Count, decoder_of, pack, refuse, unpack
from kvspec.wire.values import MAX_TEXT, Decoder, PlainValue, encode
from kvspec.wire.versions import ATTEMPTLESS, NO_START, OWN, RANGED, START, VERSION, Versions

MAX_HANDSHAKE = (1 << 20) + MAX_TRANSPORT
"""Bytes of one handshake after decompression."""
MAX_MESSAGE = 16384
"""Bytes of one message about a request. The longest names fit, but not many parts."""

_HANDSHAKE_MAGIC = b"kvspec-handshake\n"
_MESSAGE = b"kvspec-message\n"
_VERSION = 2  # Bytes of the version.
_ATTEMPT = 4  # Place of the attempt in the array of a message before `ATTEMPTLESS`.
PAST_KINDS = ("progress", "pushed", "stop", "stopped")
"""Kinds of messages that only versions before `ATTEMPTLESS` have."""
_SAME = ("library", "engine_id", "epoch", "model", "revision", "transport")
"""Fields that are equal in a `Handshake` and in its `HandshakeFields`."""

Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class HandshakeFields10(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A handshake as version 10 sends it."""

    library: Text
    engine_id: Text
    epoch: Count
    rank: RankId
    model: Text | None
    revision: Text | None
    engine: PlainValue
    replica_policy: PlainValue
    memory: tuple[Memory, ...]
    regions: tuple[Region, ...]
    transport: Annotated[bytes, Meta(max_length=MAX_TRANSPORT)]


class HandshakeFields(HandshakeFields10, frozen=True, forbid_unknown_fields=True):
    """A handshake as it is sent."""

    start: Annotated[bytes, Meta(min_length=START, max_length=START)]
    versions: Versions


_HANDSHAKES_10 = decoder_of(HandshakeFields10)
_HANDSHAKES = decoder_of(HandshakeFields)
_ARRAYS = decoder_of(list[Any])
_MESSAGES: msgspec.msgpack.Decoder[AnyMessage] = decoder_of(AnyMessage)  # type: ignore[arg-type]


def encode_handshake(handshake: Handshake, version: int = VERSION) -> bytes:
    """Return *handshake* as bytes, in a *version* of `OWN`.

    Raises:
        SpecError: If a peer could not decode it.
    """
    shake = instance("handshake", handshake, Handshake)
    kind: type[HandshakeFields10] = HandshakeFields
    more: dict[str, Any] = {"start": shake.start, "versions": shake.versions}
    if version < RANGED:
        kind, more = HandshakeFields10, dict[str, Any]()
        shake = attrs.evolve(shake, start=NO_START, versions=Versions(version, version))
    try:
        fields = kind(
            rank=shake.rank,
            engine=encode(shake.engine),
            replica_policy=encode(shake.replica_policy),
            memory=shake.cache.memory,
            # The receiver derives the segments from the engine.
            regions=tuple(attrs.evolve(each, segments=()) for each in shake.cache.regions),
            **{name: getattr(shake, name) for name in _SAME},
            **more,
        )
        data = _HANDSHAKE_MAGIC + version.to_bytes(_VERSION, "big") + zlib.compress(pack(fields))
        read = decode_handshake(data)
    # A number of more than 64 bits, a text that UTF-8 cannot encode, or what a peer would refuse.
    except (OverflowError, UnicodeEncodeError, WireError) as error:
        raise SpecError("handshake", str(error), "a value that a peer can decode") from None
    if read != shake:
        raise SpecError("handshake", shake, "values that are equal after encoding and decoding")
    return data


def decode_handshake(data: bytes) -> Handshake:
    """Return the handshake in *data*.

    Raises:
        WireError: If *data* is not a handshake of a version of `OWN`.
    """
    version, body = _split_header("handshake", _HANDSHAKE_MAGIC, data)
    more: dict[str, Any] = {"versions": Versions(version, version)}
    if version < RANGED:
        fields = unpack("handshake", _HANDSHAKES_10, _decompressed(body))
    else:
        fields = newer = unpack("handshake", _HANDSHAKES, _decompressed(body))
        more = {"start": newer.start, "versions": newer.versions}
        if version not in newer.versions:
            expected = f"a range with {version}, the version of the handshake"
            raise WireError("handshake.versions", str(newer.versions), expected)
    decoder = Decoder()
    engine = decoder.value("engine", fields.engine)
    replica_policy = decoder.value("replica_policy", fields.replica_policy)
    try:
        return Handshake(
            cache=RankCache(engine, fields.rank, fields.regions, fields.memory),
            replica_policy=replica_policy,
            **{name: getattr(fields, name) for name in _SAME},
            **more,
        )
    except SpecError as error:
        refuse("handshake", error, "a handshake")


def _decompressed(body: bytes) -> bytes:
    """Return the fields in *body* as MessagePack, at most `MAX_HANDSHAKE` bytes."""
    stream = zlib.decompressobj()
    try:
        # A few bytes can describe gigabytes: never take more than the limit out of the stream.
        fields = stream.decompress(body, MAX_HANDSHAKE)
    except zlib.error as error:
        raise WireError("handshake", str(error), "a zlib stream") from None
    if not stream.eof or stream.unused_data:
        expected = f"one complete zlib stream of at most {MAX_HANDSHAKE} bytes"
        raise WireError("handshake", f"{len(body)} bytes", expected)
    return fields


def _split_header(path: str, magic: bytes, data: bytes) -> tuple[int, bytes]:
    """Return the version in *data*, and what follows it and the head *magic*."""
    end = len(magic) + _VERSION
    if len(data) < end or not data.startswith(magic):
        raise WireError(path, data[:end], f"the complete bytes that encode_{path} returned")
    version = int.from_bytes(data[len(magic) : end], "big")
    if version not in OWN:
        raise WireError("version", version, f"{OWN}: upgrade the engine with the older release")
    return version, data[end:]


def encode_message(message: Message, start: bytes = NO_START, version: int = VERSION) -> bytes:
    """Return *message* as bytes, in a *version* of `OWN`. *start* is that of the sender's session.

    A message whose fields keep their bounds has at most `MAX_MESSAGE` bytes. `contents_of` bounds
    the parts of a checksum.
    """
    head = _MESSAGE + version.to_bytes(_VERSION, "big") + (start if version >= RANGED else b"")
    body = pack(message)
    if version < ATTEMPTLESS:
        fields = _ARRAYS.decode(body)
        fields.insert(_ATTEMPT, 0)
        body = pack(fields)
    return head + body


def decode_message(data: bytes) -> AnyMessage:
    """Return the message in *data*. `sender_of` returns the rest.

    Raises:
        WireError: If *data* is not a message of a version of `OWN`.
    """
    version, body = _split_header("message", _MESSAGE, data)
    if len(data) > MAX_MESSAGE:
        raise WireError("message", f"{len(data)} bytes", f"at most {MAX_MESSAGE}")
    body = body[START:] if version >= RANGED else body
    message = unpack("message", _MESSAGES, _upgraded(body) if version < ATTEMPTLESS else body)
    for side in ("by", "to"):
        rank = getattr(message, side).rank
        places = rank.pp, rank.pcp, rank.tp
        if min(places) < 0 or max(places) > MOST:
            raise WireError(f"message.{side}.rank", places, f"coordinates from 0 to {MOST}")
    return message


def _upgraded(body: bytes) -> bytes:
    """Return the array of an older message as the newest version writes it.

    Raises:
        WireError: If the body is not an array, the kind is past, or the attempt is not 0.
    """
    fields = unpack("message", _ARRAYS, body)
    if fields and fields[0] in PAST_KINDS:
        raise WireError("message.kind", fields[0], f"a kind of version {VERSION}")
    if len(fields) > _ATTEMPT and (attempt := fields.pop(_ATTEMPT)) != 0:
        raise WireError("message.attempt", repr(attempt)[:MAX_TEXT], "0, the only attempt")
    return pack(fields)


def sender_of(data: bytes) -> tuple[bytes, int]:
    """Return the start of the session that sent the message in *data*, and the version of *data*.

    Raises:
        WireError: If *data* is not a message of a version of `OWN`.
    """
    version, body = _split_header("message", _MESSAGE, data)
    return (body[:START] if version >= RANGED else NO_START), version
