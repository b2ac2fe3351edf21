"""Encode and decode handshakes and messages. No other module knows their format.

Invariant: any bytes give a valid object, or a `WireError` with the path of the fault. An encoded
object is decoded to an equal one. A message is not trusted: sizes, counts and nesting are bounded,
and each value passes the constructor that a caller's value passes.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import attrs
import msgspec
from msgspec import Meta

from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError, WireError
from kvspec.inputs import instance
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.ownership.stripes import Stripe
from kvspec.ownership.tokens import BlockCyclic
from kvspec.wire.compatibility import SIZE
from kvspec.wire.decode import MAX_TEXT, Decoder, refuse
from kvspec.wire.encode import Encoder
from kvspec.wire.extent import MAX_NAMES, Extent
from kvspec.wire.handshake import MAX_TRANSPORT, Handshake
from kvspec.wire.messages import SUM, Key, Message, RankAddress
from kvspec.wire.pushed import SUM as PUSHED_SUM
from kvspec.wire.pushed import Pushed
from kvspec.wire.regions import read_cache, read_memory, written_memory, written_regions

VERSION = 6
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


Who = tuple[Text, Count, tuple[Index, Index, Index]]


Range = tuple[Count, Count]
Asked = tuple[
    Annotated[list[Text], Meta(max_length=MAX_NAMES)],
    Annotated[list[Text], Meta(max_length=MAX_NAMES)],
    Range, Range, Range,
    tuple[Count, Count, Count], tuple[Count, Count, Count],
    tuple[Count, Count], Count,
]  # fmt: skip


Sum = Annotated[bytes, Meta(max_length=PUSHED_SUM)]
Written = tuple[Count, Count, Count, Sum, Sum]


class MessageFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, array_like=True):
    """A message as it is sent."""

    kind: Text
    request_id: Text
    nonce: Annotated[bytes, Meta(max_length=64)]
    by: Who
    to: Who
    attempt: Count
    number: Count
    sample: Count
    expected: Count
    lease: float
    group: Text
    layer: Text
    upto: Count
    extent: Asked | None
    total: Annotated[bytes, Meta(max_length=SUM)]
    pushed: Written | None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(HandshakeFields)
_MESSAGES = msgspec.msgpack.Decoder(MessageFields)
_SAME = (
    "kind", "attempt", "number", "sample", "expected", "lease", "group", "layer", "upto", "total",
)  # fmt: skip


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
    instance("message", message, Message)
    fields = MessageFields(
        request_id=message.key.request_id,
        nonce=message.key.nonce,
        by=_who(message.by),
        to=_who(message.to),
        extent=None if message.extent is None else _asked(message.extent),
        pushed=None if message.pushed is None else attrs.astuple(message.pushed),
        **{name: getattr(message, name) for name in _SAME},
    )
    return _MESSAGE + _ENCODER.encode(fields)


def decode_message(data: bytes) -> Message:
    """Return the message in *data*.

    Raises:
        WireError: If *data* is not a message of this version.
    """
    if not isinstance(data, bytes) or len(data) > MAX_MESSAGE or not data.startswith(_MESSAGE):
        shown = data[: len(_MESSAGE)] if isinstance(data, bytes) else type(data).__name__
        raise WireError(
            "message", shown, f"bytes that encode_message of version {VERSION} returned"
        )
    fields = _typed(_MESSAGES, data[len(_MESSAGE) :])
    try:
        return Message(
            key=Key(fields.request_id, fields.nonce),
            by=_address(fields.by),
            to=_address(fields.to),
            extent=None if fields.extent is None else _extent(*fields.extent),
            pushed=None if fields.pushed is None else Pushed(*fields.pushed),
            **{name: getattr(fields, name) for name in _SAME},
        )
    except SpecError as error:
        refuse("message", error, "a message")


def _who(address: RankAddress) -> Who:
    return address.engine_id, address.epoch, (address.rank.pp, address.rank.pcp, address.rank.tp)


def _address(who: Who) -> RankAddress:
    engine_id, epoch, rank = who
    return RankAddress(engine_id, epoch, RankId(*rank))


def _asked(extent: Extent) -> Asked:
    spans = extent.units, extent.tokens, extent.rows
    units, tokens, rows = ((span.start, span.stop) for span in spans)
    stripe = extent.stripe.first, extent.stripe.step
    contexts = attrs.astuple(extent.producer), attrs.astuple(extent.consumer)
    names = [*extent.layers], [*extent.parts]
    return (*names, units, tokens, rows, *contexts, stripe, extent.block)


def _extent(
    layers: list[str], parts: list[str], units: Range, tokens: Range, rows: Range,
    producer: tuple[int, int, int], consumer: tuple[int, int, int], stripe: Range, block: int,
) -> Extent:  # fmt: skip
    return Extent(
        layers=tuple(layers),
        parts=tuple(parts),
        units=range(*units),
        tokens=range(*tokens),
        rows=range(*rows),
        producer=BlockCyclic(*producer),
        consumer=BlockCyclic(*consumer),
        stripe=Stripe(*stripe),
        block=block,
    )
