"""Any bytes are a handshake that can be written again, or a `WireError`, and never anything else.

Inputs are valid handshakes with values changed, removed or moved at every depth, handshakes with
bytes changed before or after compression, streams that grow a thousand times, and random bytes.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec.wire.codec import decode_handshake, encode_handshake
from kvspec.wire.handshake import Handshake

DRAWN = st.randoms(use_true_random=False)
# Numbers at the edges of the limits and of 64 bits, then values of other types, names of wire
# kinds, and a text that is one character longer than the limit of 1,024.
SCALARS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 255, 2**16, 2**22, 2**31, 2**40, 2**62, 2**63 - 1, 2**64 - 1, -(2**63),
    None, True, False, 0.5, float("nan"), "", "x", "0", "k", "v", "uint8", "LBHNC", b"", b"x",
    "map", "range", "rank", "Part", "x" * 1025,
)  # fmt: skip


def engines() -> list[kvspec.EngineSpec]:
    """Return engines that together use every field of an engine."""
    heads = {"block_size": 8, "total_num_kv_heads": 4, "head_size": 2, "dtype": "uint8"}
    full = kvspec.FullAttentionSpec(**heads, scale_dtype="float32")
    window = kvspec.SlidingWindowSpec(**heads, sliding_window=5)
    uniform = kvspec.UniformTypeKVCacheSpecs(
        specs={"u.0": kvspec.FullAttentionSpec(**heads), "u.1": full}
    )
    latent = kvspec.MLAAttentionSpec(block_size=4, head_size=6, dtype="bfloat16")
    state = kvspec.MambaSpec.mamba2(
        num_heads=4, head_dim=2, n_groups=2, state_size=2, conv_kernel=3, dtype="float16"
    )
    sharding = [range(3), range(3, 4)]
    several = (
        kvspec.KVCacheGroup(name="a", layers=["l.0", "l.2", "l.4", "draft"], spec=full,
                            excluded=["draft"], shardings=dict.fromkeys(
                                ("k", "k_scale", "v", "v_scale"), sharding)),
        kvspec.KVCacheGroup(name="b", layers=["l.1", "l.3"], spec=window, kernel_block_size=4),
        kvspec.KVCacheGroup(name="c", layers=["u.0", "u.1"], spec=uniform, layout="LBNHC"),
        kvspec.KVCacheGroup(name="d", layers=["m.0"], spec=state),
    )  # fmt: skip
    names = ["u.0", "u.1", "m.0"]
    shared = kvspec.KVCacheGroup(name="e", layers=["l.0", "l.1"], spec=latent)
    contexts = kvspec.ParallelConfig(tp_size=2, dcp_size=2, pcp_size=2, interleave_size=2)
    return [
        kvspec.EngineSpec(groups=several, parallel=kvspec.ParallelConfig(tp_size=2)),
        kvspec.EngineSpec(groups=several, layout="LBNHC", parallel=kvspec.ParallelConfig(
            tp_size=2, pp_size=2, stages=[["l.0", "l.1", "l.2", *names], ["l.3", "l.4", "draft"]])),
        kvspec.EngineSpec(groups=[shared], layout="BLHNC", parallel=contexts),
        kvspec.EngineSpec(groups=[shared], parallel=kvspec.ParallelConfig(
            tp_size=2, context_ranks=[[1, 0]], dcp_size=2)),
    ]  # fmt: skip


def messages() -> list[bytes]:
    """Return the encoded handshakes of all ranks of those engines."""
    encoded = []
    for engine in engines():
        nodes = {rank: rank.tp for rank in engine.parallel.ranks}
        topology = kvspec.Topology(producer=nodes, consumer=nodes)
        replica_policies = (
            kvspec.ReplicaPolicy(),
            kvspec.ReplicaPolicy("nearest", topology=topology),
        )
        for rank in engine.parallel.ranks:
            cache = kvspec.plan_memory(engine, rank, 6, address=4096)
            replica_policy = replica_policies[len(encoded) % 2]
            shake = Handshake(
                engine_id="prefill",
                epoch=1,
                cache=cache,
                replica_policy=replica_policy,
                transport=b"agent",
            )
            encoded.append(encode_handshake(shake))
    return encoded


MESSAGES = messages()
# The magic string and two bytes of the wire version. Every handshake begins with them.
HEAD = MESSAGES[0][: len(b"kvspec-handshake\n") + 2]
FIELDS = [zlib.decompress(data[len(HEAD) :]) for data in MESSAGES]


def packed(fields: bytes) -> bytes:
    """Return *fields* as a handshake. The fastest level, because this takes most of the time."""
    return HEAD + zlib.compress(fields, 1)


def place(rng: random.Random, node: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return a list or map inside a message and a key in it; every depth is equally likely."""
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = rng.choice(list(keys))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:  # noqa: PLR2004
            return node, key
        node = inner


def changed(rng: random.Random) -> bytes:
    """Return a message in which one to four values are changed."""
    message = msgspec.msgpack.decode(rng.choice(FIELDS))
    other = msgspec.msgpack.decode(rng.choice(FIELDS))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        holder, key = place(rng, message)
        source, place_of = place(rng, other)
        sort = rng.choice(
            ("number", "near", "near", "value", "other", "without", "twice", "wrapped")
        )
        value = holder[key]
        if sort == "without":
            del holder[key]
        elif sort == "twice" and isinstance(holder, list):
            holder.insert(key, deepcopy(value))
        elif sort == "near" and type(value) is int:
            holder[key] = value + rng.choice((1, -1, 2, 16, value, -value))
        elif sort == "value":
            holder[key] = rng.choice((*SCALARS, [], {}, [rng.choice(SCALARS)]))
        elif sort == "wrapped":
            word = rng.choice(("map", "range", "rank", "Part", "ParallelConfig", "Nothing"))
            holder[key] = rng.choice(({word: value}, [value], [[value, value]]))
        elif sort == "number":
            holder[key] = rng.choice(SCALARS[:15])  # The first 15 are the integers.
        else:
            holder[key] = deepcopy(source[place_of])
        if not message:
            break
    try:
        return packed(msgspec.msgpack.encode(message))
    except OverflowError:
        return HEAD


def flipped(rng: random.Random) -> bytes:
    """Return a message with bytes changed, cut off or added."""
    inside = rng.random() < 0.7  # noqa: PLR2004 - zlib finds nearly all changes of its own bytes
    start = 0 if inside else len(HEAD)
    data = bytearray(rng.choice(FIELDS if inside else MESSAGES))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(start, len(data))
        sort = rng.choice(("byte", "byte", "byte", "bit", "cut", "more"))
        if sort == "cut":
            del data[at : at + rng.randrange(4)]
        elif sort == "more":
            data.insert(at, rng.randrange(256))
        else:
            data[at] = data[at] ^ (1 << rng.randrange(8)) if sort == "bit" else rng.randrange(256)
        if len(data) <= start:
            break
    return packed(bytes(data)) if inside else bytes(data)


def grown(rng: random.Random) -> bytes:
    """Return few bytes that are many after decompression, or that nest or count without end."""
    part = rng.choice(
        (b"\0", b"\x91", b"\x81", b"\x81\xa1x", b"\xc0", b"\x90", b"\xdd\xff\xff\xff\xff")
    )
    size = rng.choice((10, 1000, 100_000, 3_000_000))
    head = rng.choice((b"", b"\x8b\xa6engine", rng.choice(FIELDS)[: rng.randrange(300)]))
    return packed(head + part * (size // len(part)))


def any_bytes(rng: random.Random) -> bytes:
    """Return random bytes, with or without a valid head."""
    data = bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
    return rng.choice((packed(data), packed(data), HEAD + data, data))


def check(data: bytes) -> bool:
    """Decode *data* and return whether it is a handshake; encoding it again must preserve it."""
    try:
        read = decode_handshake(data)
    except kvspec.WireError as error:
        if not error.path:
            raise AssertionError("an error without a path") from error
        return False
    again = encode_handshake(read)
    assert read == decode_handshake(again)
    return True


@given(DRAWN)
def test_changed_message_is_refused_or_stable(rng: random.Random) -> None:
    """Values are wrong, have another type, or are at another place."""
    check(changed(rng))


@given(DRAWN)
def test_flipped_bytes_are_refused_or_stable(rng: random.Random) -> None:
    """Some bytes are wrong."""
    check(flipped(rng))


@given(DRAWN)
def test_grown_message_is_refused_or_stable(rng: random.Random) -> None:
    """The message is a decompression bomb, or has deep nesting or huge counts."""
    check(grown(rng))


@given(DRAWN)
def test_random_bytes_are_refused_or_stable(rng: random.Random) -> None:
    """Random bytes decode to an error, or to an introduction that encodes to itself."""
    check(any_bytes(rng))


def flood(rng: random.Random) -> Iterator[tuple[bytes]]:
    """Yield inputs of all kinds."""
    while True:
        # Growing takes milliseconds, the others take microseconds.
        kind = grown if rng.random() < 0.01 else rng.choice((changed, changed, flipped, any_bytes))  # noqa: PLR2004
        yield (kind(rng),)


FLOODS = {"any": flood}
