"""Loads of rings: sessions move positions between rings of unequal sizes, and compare checksums."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
import pytest
from builders import engine, mla, request
from two_engines import Side, ended

import kvspec
from kvspec.session import new_remote_id
from kvspec.testing import FakeNixl
from kvspec.tickets import ContentIdentity, PrefillTicket

TEXT: dict[str, Any] = {"weights": "", "adapter": "", "media": (), "embeddings": "", "salt": ""}
RATIO = {"compress_ratio": 4, "overlap": True, "head_size": 64, "dtype": "bfloat16"}


def side(rows: int, tp: int) -> kvspec.EngineSpec:
    """Return an engine with compressed rows of 4 tokens, and the ring of the open group."""
    ring: Any = kvspec.CircularBufferSpec(block_size=rows, **RATIO)
    return engine(mla(tokens_per_state=4, head_size=64), ring, tp=tp)


@pytest.mark.parametrize("kind", ["fake", pytest.param("real", marks=pytest.mark.nixl)])
@pytest.mark.parametrize(("rows", "tokens"), [((8, 16), 30), ((16, 8), 30), ((8, 16), 32)])
def test_load_moves_a_ring_by_position(kind: str, rows: tuple[int, int], tokens: int) -> None:
    """The ring is in the ticket and in the handshake, and its rows are compared."""
    if kind == "real":
        pytest.importorskip("nixl_cu13", reason="needs nixl")
    tables: Any = {"g0": [3, 1], "g1": [2]}, {"g0": [5, 4], "g1": [6]}
    asked = request(tokens, *tables, cached_tokens=16)
    with (
        contextlib.nullcontext() if kind == "real" else FakeNixl(),
        Side("P", side(rows[0], 2), polled=False) as producer,
        Side("D", side(rows[1], 3 if kind == "fake" else 1), polled=False) as consumer,
    ):
        consumer.connect(producer)
        producer.fill(asked)
        consumer.spoil(asked)
        remote_id = new_remote_id("r")
        producer.hold(remote_id, blocks=tables[0])
        ticket = PrefillTicket(
            engine_id="P",
            addresses=("127.0.0.1:9",),
            remote_id=remote_id,
            computed_tokens=tokens,
            tables=asked.producer_blocks,
            content=ContentIdentity.of(range(tokens), None, **TEXT),
        )
        read = PrefillTicket.from_params(ticket.to_params())
        mine = read.request("r", tokens, tables[1], cached=16)
        assert attrs.evolve(mine, state_tokens=None) == asked
        loads = consumer.load(mine, remote_id, checksum=True)
        assert {"done"} == {*ended(loads, producer, consumer)}
        assert [] == consumer.wrong(asked)
