"""Encode and decode handshakes and messages: their heads, versions and limits.

Invariant: any bytes give a valid object, or a `WireError` with the path of the fault. An encoded
object is decoded to an equal one. Strangers choose the bytes, so sizes, counts and nesting are
bounded before anything large is built, and each value passes the constructor that a caller's value
passes.

How it works:
    A message is a head, the version, and the MessagePack array of its class in
    `kvspec.wire.messages`. A handshake is a head, the version, and one zlib stream. The stream
    contains a MessagePack map with the fields of `HandshakeFields`:

        engine             plain values, see `kvspec.wire.values`
        everything else    itself

    A cache has thousands of regions, and nearly all their attributes are equal. zlib shortens them
    to a few bytes each. `RankCache` checks the regions.
"""

from __future__ import annotations

import zlib
from typing import Annotated

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
from kvspec.wire.values import MAX_TEXT, Decoder, Plain, encode

VERSION = 10
"""The version of the format; any change to it, or to what is meant by it, takes the next."""
MAX_HANDSHAKE = (1 << 20) + MAX_TRANSPORT
"""Bytes of one handshake after decompression."""
MAX_MESSAGE = 16384
"""Bytes of one message about a request. The longest names fit, but not many parts of an extent."""

_MAGIC = b"kvspec-handshake\n"
_MESSAGE = b"kvspec-message\n"
_VERSION = VERSION.to_bytes(2, "big")
_SAME = ("library", "engine_id", "epoch", "model", "revision", "transport")
"""Fields that are equal in a `Handshake` and in its `HandshakeFields`."""

Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class HandshakeFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A handshake as it is sent."""

    library: Text
    engine_id: Text
    epoch: Count
    rank: RankId
    model: Text | None
    revision: Text | None
    engine: Plain
    replica_policy: Plain
    memory: tuple[Memory, ...]
    regions: tuple[Region, ...]
    transport: Annotated[bytes, Meta(max_length=MAX_TRANSPORT)]


_HANDSHAKES = decoder_of(HandshakeFields)
_MESSAGES: msgspec.msgpack.Decoder[AnyMessage] = decoder_of(AnyMessage)  # type: ignore[arg-type]


def encode_handshake(handshake: Handshake) -> bytes:
    """Return *handshake* as bytes.

    Raises:
        SpecError: If a peer could not decode it.
    """
    shake = instance("handshake", handshake, Handshake)
    try:
        fields = HandshakeFields(
            rank=shake.rank,
            engine=encode(shake.engine),
            replica_policy=encode(shake.replica_policy),
            memory=shake.cache.memory,
            # The receiver derives the segments from the engine.
            regions=tuple(attrs.evolve(each, segments=()) for each in shake.cache.regions),
            **{name: getattr(shake, name) for name in _SAME},
        )
        data = _MAGIC + _VERSION + zlib.compress(pack(fields))
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
        WireError: If *data* is not a handshake of this version.
    """
    fields = unpack("handshake", _HANDSHAKES, _decompressed(data))
    decoder = Decoder()
    engine = decoder.value("engine", fields.engine)
    replica_policy = decoder.value("replica_policy", fields.replica_policy)
    try:
        return Handshake(
            cache=RankCache(engine, fields.rank, fields.regions, fields.memory),
            replica_policy=replica_policy,
            **{name: getattr(fields, name) for name in _SAME},
        )
    except SpecError as error:
        refuse("handshake", error, "a handshake")


def _decompressed(data: bytes) -> bytes:
    """Return the fields in *data* as MessagePack, at most `MAX_HANDSHAKE` bytes."""
    body = _body("handshake", _MAGIC, data)
    stream = zlib.decompressobj()
    try:
        # A few bytes can describe gigabytes: never take more than the limit out of the stream.
        fields = stream.decompress(body, MAX_HANDSHAKE)
    except zlib.error as error:
        raise WireError("handshake", str(error), "a zlib stream") from None
    if not stream.eof or stream.unused_data:
        expected = f"one complete zlib stream of at most {MAX_HANDSHAKE} bytes"
        raise WireError("handshake", f"{len(data)} bytes", expected)
    return fields


def _body(path: str, magic: bytes, data: bytes) -> bytes:
    """Return what follows the head *magic* and the version in *data*."""
    end = len(magic) + len(_VERSION)
    if len(data) < end or not data.startswith(magic):
        raise WireError(path, data[:end], f"the complete bytes that encode_{path} returned")
    version = int.from_bytes(data[len(magic) : end], "big")
    if version != VERSION:
        raise WireError("version", version, f"{VERSION}: both engines need the same version")
    return data[end:]


def encode_message(message: Message) -> bytes:
    """Return *message* as bytes.

    A message whose fields keep their bounds has at most `MAX_MESSAGE` bytes. `extents_of` bounds
    the parts of an extent.
    """
    return _MESSAGE + _VERSION + pack(message)


def decode_message(data: bytes) -> AnyMessage:
    """Return the message in *data*.

    Raises:
        WireError: If *data* is not a message of this version.
    """
    body = _body("message", _MESSAGE, data)
    if len(data) > MAX_MESSAGE:
        raise WireError("message", f"{len(data)} bytes", f"at most {MAX_MESSAGE}")
    message = unpack("message", _MESSAGES, body)
    for side in ("by", "to"):
        rank = getattr(message, side).rank
        places = rank.pp, rank.pcp, rank.tp
        if min(places) < 0 or max(places) > MOST:
            raise WireError(f"message.{side}.rank", places, f"coordinates from 0 to {MOST}")
    return message
