"""Any bytes are a handshake that can be written again, or a `WireError`, and never anything else.

The bytes are a true message with values changed, taken away or put elsewhere, at every depth; one
with bytes flipped; or no message at all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec.protocol.handshake import Handshake
from kvspec.protocol.wire import decode_handshake, encode_handshake

DRAWN = st.randoms(use_true_random=False)
SCALARS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 255, 2**16, 2**22, 2**31, 2**40, 2**62, 2**63 - 1, 2**64 - 1, -(2**63),
    None, True, False, 0.5, float("nan"), "", "x", "0", "k", "v", "uint8", "LBHNC", b"", b"x",
    "object", "names", "tuple", "map", "range", "rank", "x" * 1025,
)  # fmt: skip


def engines() -> list[kvspec.EngineSpec]:
    """Return engines that between them say all that an engine can."""
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
    """Return the messages of all ranks of those engines."""
    found = []
    for engine in engines():
        nodes = {rank: rank.tp for rank in engine.parallel.ranks}
        topology = kvspec.Topology(producer=nodes, consumer=nodes)
        replica_policies = (
            kvspec.ReplicaPolicy(),
            kvspec.ReplicaPolicy("nearest", topology=topology),
        )
        for rank in engine.parallel.ranks:
            cache = kvspec.plan_memory(engine, rank, 6, address=4096)
            replica_policy = replica_policies[len(found) % 2]
            shake = Handshake(
                engine_id="prefill",
                epoch=1,
                cache=cache,
                replica_policy=replica_policy,
                transport=b"agent",
            )
            found.append(encode_handshake(shake))
    return found


MESSAGES = messages()
HEAD = MESSAGES[0][: len(b"kvspec-handshake\n") + 2]


def place(drawn: random.Random, node: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return a list or map of a message, and a place in it: any depth is as likely."""
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = drawn.choice(list(keys))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or drawn.random() < 0.2:  # noqa: PLR2004
            return node, key
        node = inner


def changed(drawn: random.Random) -> bytes:
    """Return a message of which one to four values are others."""
    message = msgspec.msgpack.decode(drawn.choice(MESSAGES)[len(HEAD) :])
    other = msgspec.msgpack.decode(drawn.choice(MESSAGES)[len(HEAD) :])
    for _ in range(drawn.choice((1, 1, 1, 2, 3, 4))):
        holder, key = place(drawn, message)
        source, place_of = place(drawn, other)
        sort = drawn.choice(("number", "near", "near", "value", "other", "without", "twice"))
        value = holder[key]
        if sort == "without":
            del holder[key]
        elif sort == "twice" and isinstance(holder, list):
            holder.insert(key, deepcopy(value))
        elif sort == "near" and type(value) is int:
            holder[key] = value + drawn.choice((1, -1, 2, 16, value, -value))
        elif sort == "value":
            holder[key] = drawn.choice((*SCALARS, [], {}, [drawn.choice(SCALARS)]))
        elif sort == "number":
            holder[key] = drawn.choice(SCALARS[:15])
        else:
            holder[key] = deepcopy(source[place_of])
        if not message:
            break
    try:
        return HEAD + msgspec.msgpack.encode(message)
    except OverflowError:
        return HEAD


def flipped(drawn: random.Random) -> bytes:
    """Return a message with bytes changed, cut off or added."""
    data = bytearray(drawn.choice(MESSAGES))
    for _ in range(drawn.choice((1, 1, 2, 4))):
        at = drawn.randrange(len(HEAD), len(data))
        sort = drawn.choice(("byte", "byte", "byte", "bit", "cut", "more"))
        if sort == "cut":
            del data[at : at + drawn.randrange(4)]
        elif sort == "more":
            data.insert(at, drawn.randrange(256))
        else:
            data[at] = (
                data[at] ^ (1 << drawn.randrange(8)) if sort == "bit" else drawn.randrange(256)
            )
        if len(data) <= len(HEAD):
            break
    return bytes(data)


def any_bytes(drawn: random.Random) -> bytes:
    """Return bytes that nobody wrote, behind a true head or none."""
    data = bytes(drawn.randrange(256) for _ in range(drawn.randrange(60)))
    return HEAD + data if drawn.random() < 0.7 else data  # noqa: PLR2004


def check(data: bytes) -> bool:
    """Decode *data*: what comes back can be sent on, and is then the same; say if it did."""
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
def test_a_changed_message(drawn: random.Random) -> None:
    """Values that are wrong, strange or elsewhere."""
    check(changed(drawn))


@given(DRAWN)
def test_flipped_bytes(drawn: random.Random) -> None:
    """Bytes that are wrong."""
    check(flipped(drawn))


@given(DRAWN)
def test_any_bytes(drawn: random.Random) -> None:
    """Bytes that nobody wrote."""
    check(any_bytes(drawn))


def flood(drawn: random.Random) -> Iterator[tuple[bytes]]:
    """Yield inputs of all kinds."""
    while True:
        yield (drawn.choice((changed, changed, flipped, flipped, any_bytes))(drawn),)


FLOODS = {"any": flood}
