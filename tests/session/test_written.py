"""Which blocks a load writes and owns, and when two requests write the same."""

from __future__ import annotations

from typing import Any

import attrs
import builders
import numpy as np
import pytest
from refused import refusal

import kvspec
from kvspec.descriptors.table import DescriptorTable
from kvspec.session.written import BlockLocks, blocks_of, pushed_of

SIZES: dict[str, Any] = {"block_size": 4, "total_num_kv_heads": 2, "head_size": 8, "dtype": "int8"}
FULL = kvspec.FullAttentionSpec(**SIZES)
WINDOW = kvspec.SlidingWindowSpec(**SIZES, sliding_window=8)
CROSS = kvspec.CrossAttentionSpec(**SIZES)
STATE = kvspec.MambaSpec.short_conv(conv_dim=6, conv_kernel=3, dtype="int8", block_size=4)
RANK = kvspec.RankId()
Tables = dict[str, Any]


def asked(tokens: int, tables: Tables, **more: Any) -> kvspec.TransferRequest:
    """Return a request of which both sides have the same *tables*."""
    return kvspec.TransferRequest(
        request_id="r", num_tokens=tokens, producer_blocks=tables, consumer_blocks=tables, **more
    )


def table_of(*specs: kvspec.LayerSpec) -> DescriptorTable:
    """Return the rows between two ranks of groups "g0", "g1" and so on, or "g" alone."""
    engine = builders.engine(*specs)
    cache = kvspec.plan_memory(engine, RANK, 16)
    return kvspec.build_table(kvspec.plan_transfer(engine, engine), cache, cache)


def plan_of(engine: kvspec.EngineSpec) -> kvspec.TransferPlan:
    """Return the plan between two equal engines."""
    return kvspec.plan_transfer(engine, engine)


def differs(table: DescriptorTable, one: kvspec.TransferRequest, **changes: Any) -> str:
    """Return what two requests write differently."""
    return pushed_of(table, attrs.evolve(one, **changes)).differs(pushed_of(table, one))


def test_counts_are_those_of_what_is_written() -> None:
    """An encoder's tokens matter to cross attention alone, a state's to states alone."""
    plain = asked(8, {"g": [1, 2]})
    assert "" == differs(table_of(FULL), plain, encoder_tokens=3, state_tokens=9)
    cross = asked(8, {"g0": [1, 2], "g1": [3]}, encoder_tokens=4)
    one = table_of(FULL, CROSS)
    assert "encoder_tokens=3, expected 4" == differs(one, cross, encoder_tokens=3)
    assert "" == differs(one, cross, state_tokens=9)
    states = asked(8, {"g0": [1, 2], "g1": [3]})
    one = table_of(FULL, STATE)
    assert "state_tokens=9, expected 8" == differs(one, states, state_tokens=9)
    assert "" == differs(one, states, state_tokens=8, encoder_tokens=1)
    assert "num_tokens=7, expected 8, state_tokens=7, expected 8" == differs(
        one, states, num_tokens=7
    )


def test_tables_may_begin_elsewhere() -> None:
    """A table that has only what is live writes what a longer one does; a shifted one is none."""
    one, long = table_of(WINDOW), asked(16, {"g": [1, 2, 3, 4]})
    short = {"g": kvspec.BlockTable([3, 4], first_token=8)}
    assert "" == differs(one, long, consumer_blocks=short)
    shifted = {"g": kvspec.BlockTable([2, 3, 4], first_token=6)}
    error = refusal(lambda: differs(one, long, consumer_blocks=shifted))
    assert ("consumer_blocks['g'].first_token", 6) == (error.field, error.value)


def test_what_cannot_be_is_refused() -> None:
    """Groups that there are not, tables that are missing or short; of nothing none is needed."""
    one, good = table_of(FULL, STATE), asked(8, {"g0": [1, 2], "g1": [3]})
    for changes, field, word in (
        ({"cached_tokens": {"g9": 1}}, "cached_tokens", "g9"),
        ({"consumer_blocks": {"g0": [1, 2]}}, "consumer_blocks", "g1"),
        ({"consumer_blocks": {"g0": [1], "g1": [3]}}, "consumer_blocks['g0']", "7"),
        ({"consumer_blocks": {"g0": [1, 2], "g1": []}}, "consumer_blocks['g1']", "[]"),
    ):
        error = refusal(lambda changes=changes: differs(one, good, **changes))
        assert field == error.field
        assert word in str(error)
    hit = {"cached_tokens": 8, "consumer_blocks": dict[str, Any]()}
    assert "cached_tokens" in differs(one, good, **hit)


def test_blocks_are_those_that_are_written() -> None:
    """Not what is cached, nor dead, nor the null block, nor of groups that have no table."""
    engine = plan_of(builders.engine(FULL, WINDOW, STATE, null_block=0))
    tables = {"g0": [5, 6, 7, 8], "g1": [0, 0, 1, 2], "g2": [3]}
    found = blocks_of(engine, asked(16, tables, cached_tokens={"g0": 7}))
    assert {"g0": [6, 7, 8], "g1": [1, 2], "g2": [3]} == {g: [*ids] for g, ids in found.items()}
    del tables["g1"]
    assert ["g2"] == [*blocks_of(engine, asked(16, tables, cached_tokens={"g0": 16}))]
    none = asked(16, {"g1": [0, 0, 0, 0]})
    assert {} == blocks_of(engine, none)
    plain = plan_of(builders.engine(FULL, WINDOW))
    assert {"g1": [0, 0]} == {g: [*ids] for g, ids in blocks_of(plain, none).items()}


@pytest.mark.parametrize("excluding", ["producer", "consumer", "both"])
def test_excluded_group_needs_no_blocks(excluding: str) -> None:
    """A group of which every layer is excluded, on either side, moves nothing into its table."""
    group = builders.group(FULL, "layers.0", name="g0")
    draft = builders.group(WINDOW, "draft", name="g1")
    without = attrs.evolve(draft, excluded=("draft",))
    sides = [
        builders.engine(group, without if excluding in (side, "both") else draft)
        for side in ("producer", "consumer")
    ]
    plan = kvspec.plan_transfer(*sides)
    for table in ([], [5], [5, 6], kvspec.BlockTable([6], first_token=3)):
        request = asked(8, {"g0": [1, 2], "g1": table})
        found = blocks_of(plan, request)
        assert {"g0": [1, 2]} == {name: [*ids] for name, ids in found.items()}


def test_excluded_layer_of_group_needs_no_blocks() -> None:
    """A group that keeps other layers claims what those need."""
    group = builders.group(FULL, "layers.0", "draft", excluded=("draft",))
    plan = plan_of(builders.engine(group))
    assert {"g": [1, 2]} == {
        g: [*ids] for g, ids in blocks_of(plan, asked(8, {"g": [1, 2]})).items()
    }


def test_block_locks_end() -> None:
    """Blocks belong to one load until it is over; groups of one pool have the same ones."""
    engine = builders.engine(FULL, WINDOW)
    separate = kvspec.plan_memory(engine, RANK, 8)
    bases = {region.part: region.base for region in separate.regions if region.group == "g0"}
    pooled = kvspec.RankCache(
        engine,
        RANK,
        [attrs.evolve(r, base=bases[r.part]) for r in separate.regions],
        separate.memory,
    )
    for cache, conflicts in ((separate, False), (pooled, True)):
        locks = BlockLocks(cache)
        first, second = (
            blocks_of(plan_of(engine), asked(8, tables))
            for tables in ({"g0": [1, 2]}, {"g1": [2, 3]})
        )
        locks.acquire("a", first)
        if conflicts:
            with pytest.raises(kvspec.TransferError, match=r"block 2 of group g1 belongs to 'a'"):
                locks.acquire("b", second)
            locks.release("b")
            locks.release("a")
        locks.acquire("b", second)
        locks.release("b")
        if not conflicts:
            locks.release("a")
        locks.acquire("c", first)
    error = refusal(lambda: locks.acquire("d", {"g1": np.array([8])}))
    assert "7" in error.expected
