"""Messages of any kind are encoded and decoded equal, and malformed bytes are rejected."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from refused import refusal

import kvspec
from kvspec.ownership.stripes import Stripe
from kvspec.ownership.tokens import BlockCyclic
from kvspec.wire.codec import MAX_MESSAGE, decode_message, encode_message
from kvspec.wire.messages import (
    MESSAGES,
    ChecksumContents,
    ChecksumRequest,
    Key,
    Message,
    RankAddress,
    key_of,
    new_remote_id,
)
from kvspec.wire.versions import START

P = [RankAddress("prefill", 1, kvspec.RankId(tp=tp)) for tp in range(2)]
D = [RankAddress("decode", 1, kvspec.RankId(tp=tp)) for tp in range(3)]
KEY = Key("cmpl-1", b"8 bytes!")
HEAD = len(b"kvspec-message\n") + 2 + START
WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
COUNTS = st.integers(0, 2**20 - 1)
# A letter of three bytes. Limits of names in messages count letters.
WIDE = "\N{CJK UNIFIED IDEOGRAPH-5C64}"
PARTIES = st.builds(
    RankAddress, WORDS, st.integers(0, 2**63 - 1), st.builds(kvspec.RankId, COUNTS, COUNTS, COUNTS)
)


def message_of(kind: str, by: int = 0, **more: Any) -> Message:
    """Return a message of one of two readers to a producer, or of a producer to a reader."""
    reader = kind in ("heartbeat", "done")
    fields: dict[str, Any] = {"expected": 2, "by": D[by], "to": P[0]} if reader else {}
    fields = fields or {"by": P[by], "to": D[0]}
    return MESSAGES[kind](**{"key": KEY, **fields, **more})


@st.composite
def extents(draw: st.DrawFn) -> ChecksumContents:
    """Draw any contents."""

    def span(least: int) -> range:
        start = draw(COUNTS)
        return range(start, start + draw(st.integers(least, 99)))

    names = st.lists(WORDS, min_size=1, max_size=4, unique=True)
    contexts = st.builds(BlockCyclic, COUNTS, st.integers(1, 9), st.just(4))
    return ChecksumContents(
        layer=draw(WORDS),
        parts=tuple(draw(names)),
        units=span(1),
        tokens=span(1),
        rows=span(0),
        producer=draw(contexts),
        consumer=draw(contexts),
        stripe=draw(st.integers(1, 9).map(lambda step: Stripe(step - 1, step))),
        block=draw(st.integers(1, 99)),
    )


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Draw any message."""
    kind = draw(st.sampled_from(sorted(MESSAGES)))
    more: dict[str, Any] = {}
    if kind in ("heartbeat", "done"):
        more["expected"] = draw(st.integers(1, 2**20))
    if kind == "lease":
        more["lease"] = draw(st.floats(0, 1e6))
    if kind == "checksum_request":
        more["contents"] = draw(extents())
    if kind == "checksum":
        more["total"] = draw(st.binary(min_size=8, max_size=8))
    return MESSAGES[kind](
        key=Key(draw(WORDS), draw(st.binary(min_size=8, max_size=64))),
        by=draw(PARTIES),
        to=draw(PARTIES),
        number=draw(COUNTS),
        **more,
    )


@given(messages())
def test_message_of_any_kind_decodes_equal(given: Message) -> None:
    """Every message arrives equal, in few bytes."""
    data = encode_message(given)
    assert given == decode_message(data)
    assert len(data) < 400


HEARTBEAT = encode_message(message_of("heartbeat"))


def changed(at: int, value: Any) -> bytes:
    """Return the bytes of a heartbeat with another element."""
    data = encode_message(message_of("heartbeat"))
    fields = msgspec.msgpack.decode(data[HEAD:])
    fields[at] = value
    return data[:HEAD] + msgspec.msgpack.encode(fields)


KIND, KEYED, BY, TO, NUMBER, OWN = range(6)
ASKED = ChecksumContents(layer="l.0", parts=("k",), units=range(2), tokens=range(9))


def within(message: Message, field: int, at: int, value: Any) -> bytes:
    """Return the bytes of a message with another value inside one of its elements."""
    data = encode_message(message)
    fields = msgspec.msgpack.decode(data[HEAD:])
    fields[field][at] = value
    return data[:HEAD] + msgspec.msgpack.encode(fields)


def asked(at: int, value: Any) -> bytes:
    """Return the bytes of a checksum request with another element of its contents."""
    return within(message_of("checksum_request", by=0, contents=ASKED), OWN, at, value)


def own(kind: str, at: int, value: Any, **more: Any) -> bytes:
    """Return the bytes of a message of *kind* with another element."""
    data = encode_message(message_of(kind, **more))
    fields = msgspec.msgpack.decode(data[HEAD:])
    fields[at] = value
    return data[:HEAD] + msgspec.msgpack.encode(fields)


AT = {"pp": 0, "pcp": 0, "tp": 0}


@pytest.mark.parametrize(
    ("data", "path", "value"),
    [
        (b"", "message", b""),
        (HEARTBEAT[:-1], "message", ...),
        (HEARTBEAT + b"x", "message", ...),
        (HEARTBEAT + bytes(17000), "message", f"{len(HEARTBEAT) + 17000} bytes"),
        (b"kvspec-message\n\0\2" + HEARTBEAT[HEAD - START :], "version", 2),
        (b"kvspec-answer_\n\0\7" + HEARTBEAT[HEAD - START :], "message", b"kvspec-answer_\n\0\7"),
        (HEARTBEAT[: HEAD - START - 1], "message", HEARTBEAT[: HEAD - START - 1]),
        (HEARTBEAT[: HEAD - 1], "message", ...),
        (HEARTBEAT[:HEAD] + b"\x91" * 5000, "message[0]", ...),
        (HEARTBEAT[:HEAD] + b"\xdd\xff\xff\xff\xff", "message", ...),
        (changed(BY, ["decode", 1, [[[0]], 0, 0]]), "message[2][2]", ...),
        (changed(BY, ["decode", 1, AT | {"tp": "0"}]), "message[2][2].tp", ...),
        (changed(BY, ["decode", 1, AT, 0]), "message[2]", ...),
        (changed(BY, ["decode", 1, AT | {"tp": -1}]), "message.by.rank", (0, 0, -1)),
        (changed(TO, ["prefill", 1, AT | {"pp": 2**63}]), "message.to.rank", (2**63, 0, 0)),
        (changed(KIND, "shout"), "message[0]", ...),
        (changed(KIND, "checksum_request"), "message[5]", ...),
        (changed(KIND, "valid"), "message", ...),
        (changed(KEYED, ["", b"8 bytes!"]), "message[1][0]", ...),
        (changed(KEYED, ["x" * 1025, b"8 bytes!"]), "message[1][0]", ...),
        (changed(KEYED, [b"x", b"8 bytes!"]), "message[1][0]", ...),
        (changed(KEYED, ["x", b"short"]), "message[1][1]", ...),
        (changed(KEYED, ["x", bytes(65)]), "message[1][1]", ...),
        (changed(BY, ["decode", -1, AT]), "message[2][1]", ...),
        (changed(TO, ["", 1, AT]), "message[3][0]", ...),
        (changed(TO, ["x" * 256, 1, AT]), "message[3][0]", ...),
        (changed(NUMBER, -1), "message[4]", ...),
        (changed(NUMBER, 2**64 - 1), "message[4]", ...),
        (changed(OWN, 0), "message[5]", ...),
        (changed(OWN, 2**20 + 1), "message[5]", ...),
        (own("heartbeat", slice(6, 6), [1]), "message", ...),
        (own("heartbeat", slice(5, 6), []), "message", ...),
        (own("lease", 5, float("nan"), lease=1.0), "message[5]", ...),
        (own("lease", 5, float("inf"), lease=1.0), "message[5]", ...),
        (own("lease", 5, -1.0, lease=1.0), "message[5]", ...),
        (own("checksum", 5, bytes(9), total=bytes(8)), "message[5]", ...),
        (own("checksum", 5, bytes(7), total=bytes(8)), "message[5]", ...),
        (asked(0, ""), "message[5][0]", ...),
        (asked(0, []), "message[5][0]", ...),
        (asked(0, WIDE * 1025), "message[5][0]", ...),
        (asked(1, []), "message[5].parts", ()),
        (asked(1, ["k", "k"]), "message[5].parts", ("k", "k")),
        (asked(1, [""] * 5000), "message[5][1][0]", ...),
        (asked(1, ["k", WIDE * 1025]), "message[5][1][1]", ...),
        (asked(2, [2, 2]), "message[5].units", range(2, 2)),
        (asked(2, 7), ..., ...),
        (asked(2, [1]), ..., ...),
        (asked(3, [0, 2**63 - 1]), "message[5].tokens", range(2**63 - 1)),
        (asked(3, [9, 0]), "message[5].tokens", range(9, 0)),
        (asked(3, [2**62, 2**62 + 1]), "message[5].tokens", range(2**62, 2**62 + 1)),
        (asked(4, [1, 0]), "message[5].rows", range(1, 0)),
        (asked(5, {"rank": 0, "size": 0, "interleave": 1}), "message[5].producer.size", 0),
        (asked(6, {"rank": 0, "size": 1, "interleave": 0}), "message[5].consumer.interleave", 0),
        (asked(7, {"first": 1, "step": 1}), "message[5][7].stripe.first", 1),
        (asked(8, 0), "message[5][8]", ...),
        (asked(8, -1), "message[5][8]", ...),
    ],
)
def test_decode_message_rejects_malformed_bytes(data: Any, path: str, value: Any) -> None:
    """Cut, too long, of other types, out of bounds, or with elements of another kind.

    A value or path of `...` is not compared: msgspec does not report it.
    """
    error = refusal(lambda: decode_message(data), kvspec.WireError)
    assert error.path
    assert path in (error.path, ...)
    assert value is ... or (type(value), value) == (type(error.value), error.value)


@pytest.mark.parametrize(
    "remote_id",
    ["id", "x#", "#" + "00" * 8, "x#" + "00" * 7, "x#" + "00" * 65, "x#" + "0g" * 8,
     "x#" + "AA" * 8, "x#" + "00 " * 8, "x" * 1025 + "#" + "00" * 8, "\ud800#" + "00" * 8, b"x", 7],
)  # fmt: skip
def test_key_of_rejects_names_that_new_remote_id_cannot_return(remote_id: Any) -> None:
    """Each request has exactly one name."""
    error = refusal(lambda: key_of(remote_id))
    assert ("remote_id", remote_id) == (error.field, error.value)


def test_new_remote_id_rejects_invalid_ids() -> None:
    """An id is a text of 1 to 1,024 bytes."""
    for name in ("", "x" * 1025, b"x", 7):
        error = refusal(lambda name=name: new_remote_id(name))
        assert ("request_id", name) == (error.field, error.value)
        assert "1024" in error.expected


def test_longest_names_that_a_handshake_accepts_fit_into_messages() -> None:
    """A handshake limits the names of groups, layers and parts to 1,024 letters of any length."""
    wide = "\N{GRINNING FACE}"
    far = [
        replace(
            address, engine_id=wide * 255, epoch=2**63 - 1, rank=kvspec.RankId(*[2**63 - 1] * 3)
        )
        for address in (P[0], D[0])
    ]
    more: dict[str, Any] = {"key": Key(wide * 1024, bytes(64)), "by": far[0], "to": far[1]}
    more["number"] = 2**63 - 1
    name = wide * 1024
    most = BlockCyclic(2**62, 2**62, 2**62)
    contents = ChecksumContents(
        layer=name,
        parts=(name,),
        units=range(2**62 - 1, 2**62),
        tokens=range(2**62 - 1, 2**62),
        rows=range(2**62 - 1, 2**62),
        producer=most,
        consumer=most,
        stripe=Stripe(2**63 - 2, 2**63 - 1),
        block=2**62,
    )
    message = ChecksumRequest(**more, contents=contents)
    data = encode_message(message)
    assert 12 << 10 < len(data) <= MAX_MESSAGE
    assert message == decode_message(data)
