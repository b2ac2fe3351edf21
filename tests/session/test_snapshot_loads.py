"""Loads of states at several positions: sessions move them, compare checksums, and name blocks."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from builders import engine, mamba2, mla, request
from two_engines import Side, ended

import kvspec
from kvspec.session import new_remote_id
from kvspec.testing import FakeNixl

TABLES: Any = {"g0": [3, 1, 2], "g1": [4, 5, 6]}, {"g0": [2, 3, 1], "g1": [6, 4, 5]}


@pytest.mark.parametrize(
    ("positions", "cached", "blocks", "complete"),
    [
        # The states after 16, 32 and 40 tokens. The last one is inside its block.
        ((16, 32, 40), 0, (4, 5, 6), (4, 6)),
        ((16, 40), 16, (5,), ()),
        ((24, 40), 0, (4, 5), ()),
    ],
)
def test_load_moves_each_state_and_compares_its_checksum(
    positions: Any, cached: int, blocks: tuple[int, ...], complete: tuple[int, ...]
) -> None:
    sides = [engine(mla(), mamba2(block_size=16), tp=tp) for tp in (2, 3)]
    asked = request(40, *TABLES, cached_tokens=cached, state_positions=positions)
    with (
        FakeNixl(),
        Side("P", sides[0], polled=False) as producer,
        Side("D", sides[1], polled=False) as consumer,
    ):
        consumer.connect(producer)
        producer.fill(asked)
        consumer.spoil(asked)
        remote_id = new_remote_id("r")
        producer.hold(remote_id, blocks=TABLES[0])
        loads = consumer.load(asked, remote_id, checksum=True)
        assert {"done"} == {*ended(loads, producer, consumer)}
        assert [] == consumer.wrong(asked)
        for load in loads:
            assert sorted(blocks) == sorted(load.written_blocks["g1"])
            assert sorted(complete) == sorted(load.complete_blocks["g1"])


def test_load_without_a_block_for_an_earlier_state_is_refused() -> None:
    """No byte moves, so no group is restored at another position than the others."""
    asked = request(40, *TABLES, state_positions=(16, 40))
    slot = attrs.evolve(asked, consumer_blocks={**TABLES[1], "g1": [6]})
    sides = [engine(mla(), mamba2(block_size=16)) for _ in (0, 1)]
    with (
        FakeNixl(),
        Side("P", sides[0], polled=False) as producer,
        Side("D", sides[1], polled=False) as consumer,
    ):
        consumer.connect(producer)
        consumer.spoil(asked)
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        with pytest.raises(kvspec.SpecError) as error:
            consumer.load(slot, remote_id)
        assert "consumer_blocks['g1']" == error.value.field
