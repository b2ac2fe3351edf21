"""Draw introductions of ranks, and decode and encode the fields of a message."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
from hypothesis import strategies as st

import kvspec
from kvspec.testing import strategies
from kvspec.wire.handshake import Handshake

# The length of the magic string and of two bytes of the wire version.
HEAD = len(b"kvspec-handshake\n") + 2
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@st.composite
def replica_policies(draw: st.DrawFn, engine: kvspec.EngineSpec) -> kvspec.ReplicaPolicy:
    """Draw a replica policy. Some have a topology with the nodes of the ranks of both sides."""
    salt = draw(st.integers(0, 3))
    if draw(st.booleans()):
        return kvspec.ReplicaPolicy(draw(st.sampled_from(strategies.KNOWN_POLICIES)), salt)
    nodes = st.integers(0, 3) | st.sampled_from(("a", "b"))
    sides = [{rank: draw(nodes) for rank in engine.parallel.ranks} for _ in range(2)]
    topology = kvspec.Topology(producer=sides[0], consumer=sides[1])
    return kvspec.ReplicaPolicy("nearest", salt, topology)


@st.composite
def caches(draw: st.DrawFn, engine: kvspec.EngineSpec) -> kvspec.RankCache:
    """Draw the cache of one rank at invented addresses, with any number of blocks."""
    rank = draw(st.sampled_from(engine.parallel.ranks))
    least = 1 + (engine.null_block or 0)
    blocks = {group.name: draw(st.integers(least, 40)) for group in engine.groups}
    return kvspec.plan_memory(engine, rank, blocks, address=draw(st.integers(0, 2**48)))


@st.composite
def handshakes(draw: st.DrawFn, largest: int = 4) -> Handshake:
    """Draw the introduction of one rank of any engine."""
    producer, consumer = draw(strategies.engine_pairs(largest=largest))
    engine = draw(st.sampled_from((producer, consumer)))
    return Handshake(
        engine_id=draw(NAMES),
        epoch=draw(st.integers(0, 2**63 - 1)),
        cache=draw(caches(engine)),
        replica_policy=draw(replica_policies(engine)),
        transport=draw(st.binary(max_size=20)),
        model=draw(st.none() | NAMES),
        revision=draw(st.none() | NAMES),
    )


def opened(data: bytes) -> dict[str, Any]:
    """Return the fields of a message as they are sent."""
    message: dict[str, Any] = msgspec.msgpack.decode(zlib.decompress(data[HEAD:]))
    return message


def closed(data: bytes, message: object) -> bytes:
    """Return a message with other fields, under the head of *data*."""
    return data[:HEAD] + zlib.compress(msgspec.msgpack.encode(message))
