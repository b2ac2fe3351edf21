"""Encode and decode handshakes and messages. No other module knows their format.

Invariant: any bytes give a valid object, or a `WireError` with the path of the fault. An encoded
object is decoded to an equal one. A message is not trusted: sizes, counts and nesting are bounded,
and each value passes the constructor that a caller's value passes.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError, WireError
from kvspec.inputs import instance
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.wire.compatibility import SIZE
from kvspec.wire.decode import MAX_TEXT, Decoder, refuse
from kvspec.wire.encode import Encoder
from kvspec.wire.handshake import MAX_TRANSPORT, Handshake
from kvspec.wire.messages import AnyMessage, Message
from kvspec.wire.regions import read_cache, read_memory, written_memory, written_regions

VERSION = 7
"""The version of the format; any change to it, or to what is meant by it, takes the next."""
MAX_HANDSHAKE = (4 << 20) + MAX_TRANSPORT
"""Bytes of one handshake."""

MAX_MESSAGE = 8192
"""Bytes of one message; the longest names fit."""

_MAGIC = b"kvspec-handshake\n"
_MESSAGE = b"kvspec-message\n" + VERSION.to_bytes(2, "big")
_HEAD = len(_MAGIC) + 2  # and the version

S = TypeVar("S")
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Index = Annotated[int, Meta(ge=0, le=2**24)]
Step = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MemoryRuns = tuple[
    list[tuple[Count, Text, Index]], list[tuple[Index, Index]], tuple[Count, tuple[Step, ...]]
]
Places = tuple[
    list[tuple[Count, Count, Count, Count, Count]],
    list[tuple[tuple[Text, Index, Step], ...]],
    list[tuple[Step, ...]],
    Count,
    list[tuple[Index, Index, Index]],
]


class HandshakeFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A handshake as it is sent; *memory*, *regions* as `kvspec.wire.regions` writes them."""

    library: Text
    engine_id: Text
    epoch: Count
    rank: tuple[Index, Index, Index]
    model: Text | None
    revision: Text | None
    compatibility_hash: Annotated[bytes, Meta(min_length=SIZE, max_length=SIZE)]
    objects: list[tuple[Text, dict[Text, Any]]]
    engine: Index
    replica_policy: Index
    memory: MemoryRuns
    regions: Places
    transport: Annotated[bytes, Meta(max_length=MAX_TRANSPORT)]


def _plain(value: object) -> object:
    """Return *value* as lists and numbers. `msgspec` calls this for types that it does not know."""
    if isinstance(value, range):
        return value.start, value.stop
    raise NotImplementedError


def _typed_value(kind: type, plain: object) -> object:
    """Return the value of *kind* that `_plain` wrote."""
    if kind is range:
        return range(*msgspec.convert(plain, tuple[Count, Count]))
    raise NotImplementedError


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgspec.msgpack.Decoder(HandshakeFields)
_MESSAGES: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(
    AnyMessage, dec_hook=_typed_value
)


def encode_handshake(handshake: Handshake) -> bytes:
    """Return *handshake* as bytes.

    Raises:
        SpecError: If a peer could not decode it.
    """
    shake = instance("handshake", handshake, Handshake)
    encoder = Encoder()
    engine, replica_policy = (
        encoder.encode(value)[1] for value in (shake.engine, shake.replica_policy)
    )
    rank = shake.rank
    fields = HandshakeFields(
        library=shake.library,
        engine_id=shake.engine_id,
        epoch=shake.epoch,
        rank=(rank.pp, rank.pcp, rank.tp),
        model=shake.model,
        revision=shake.revision,
        compatibility_hash=bytes.fromhex(shake.compatibility_hash),
        objects=encoder.objects,
        engine=engine,
        replica_policy=replica_policy,
        memory=written_memory(shake.cache.memory),
        regions=written_regions(shake.cache),
        transport=shake.transport,
    )
    try:
        data = _MAGIC + VERSION.to_bytes(2, "big") + _ENCODER.encode(fields)
    except (OverflowError, UnicodeEncodeError) as error:
        raise SpecError(
            "handshake", str(error), "64-bit numbers and texts that UTF-8 can encode"
        ) from None
    try:
        read = decode_handshake(data)
    except WireError as error:
        wanted = f"a value that a peer can decode: {error}"
        raise SpecError("handshake", error.value, wanted) from None
    if read != shake:
        raise SpecError("handshake", shake, "values that are equal after encoding and decoding")
    return data


def decode_handshake(data: bytes) -> Handshake:
    """Return the handshake in *data*.

    Raises:
        WireError: If *data* is not a handshake of this version.
    """
    fields = _fields(data)
    decoder = Decoder()
    decoder.table("objects", fields.objects)
    engine, replica_policy = (
        decoder.object(path, [number])
        for path, number in (("engine", fields.engine), ("replica_policy", fields.replica_policy))
    )
    cache = _cache(decoder, engine, fields)
    try:
        shake = Handshake(
            engine_id=fields.engine_id,
            epoch=fields.epoch,
            cache=cache,
            replica_policy=replica_policy,
            transport=fields.transport,
            model=fields.model,
            revision=fields.revision,
            library=fields.library,
        )
        meaning = shake.compatibility_hash
    except SpecError as error:
        refuse("handshake", error, "a handshake")
    if meaning != fields.compatibility_hash.hex():
        wanted = f"{meaning}, the hash of the decoded engine here; kvspec {fields.library} sent it"
        raise WireError("compatibility_hash", fields.compatibility_hash.hex(), wanted)
    return shake


def _fields(data: object) -> HandshakeFields:
    """Return the message in *data*, of the right types, within the bounds of each field."""
    if not isinstance(data, bytes):
        raise WireError("handshake", type(data).__name__, "bytes")
    if len(data) > MAX_HANDSHAKE:
        raise WireError("handshake", f"{len(data)} bytes", f"at most {MAX_HANDSHAKE}")
    if len(data) < _HEAD or not data.startswith(_MAGIC):
        raise WireError(
            "handshake", data[:_HEAD], "the complete bytes that encode_handshake returned"
        )
    version = int.from_bytes(data[len(_MAGIC) : _HEAD], "big")
    if version != VERSION:
        raise WireError("version", version, f"{VERSION}: both engines need the same version")
    return _typed(_DECODER, data[_HEAD:])


def _typed(decoder: msgspec.msgpack.Decoder[S], data: bytes) -> S:
    """Return what *decoder* makes of *data*; `WireError` with the path where it is another type."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        # A value that checks itself raised SpecError, which has the field and its value.
        if isinstance(error.__cause__, SpecError):
            refuse("message", error.__cause__, "a message")
        problem, _, path = str(error).partition(" - at `")
        requirement, _, value = problem.partition(", got ")
        where = path.rstrip("`").removeprefix("$.") or "message"
        # msgspec writes either "Expected <what>" or a sentence, such as "Object contains ...".
        expected = requirement.removeprefix("Expected ")
        if expected == requirement:
            raise WireError(where, "another object", rule=requirement) from None
        raise WireError(where, value or "another value", expected) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError("message", str(error), "complete MessagePack") from None


def _cache(decoder: Decoder, engine: Any, fields: HandshakeFields) -> RankCache:  # noqa: ANN401
    try:
        instance("engine", engine, EngineSpec)
    except SpecError as error:
        refuse("message", error, "a handshake")
    memory = read_memory("memory", decoder, fields.memory)
    return read_cache("regions", engine, RankId(*fields.rank), memory, fields.regions)


def encode_message(message: Message) -> bytes:
    """Return *message* as bytes, at most `MAX_MESSAGE`."""
    return _MESSAGE + _ENCODER.encode(message)


def decode_message(data: bytes) -> AnyMessage:
    """Return the message in *data*.

    Raises:
        WireError: If *data* is not a message of this version.
    """
    if not isinstance(data, bytes) or len(data) > MAX_MESSAGE or not data.startswith(_MESSAGE):
        shown = data[: len(_MESSAGE)] if isinstance(data, bytes) else type(data).__name__
        raise WireError(
            "message", shown, f"bytes that encode_message of version {VERSION} returned"
        )
    return _typed(_MESSAGES, data[len(_MESSAGE) :])
