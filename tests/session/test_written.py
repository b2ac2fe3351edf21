"""Blocks that a load writes and owns."""

from __future__ import annotations

from typing import Any

import attrs
import builders
import numpy as np
import pytest
from refused import refusal

import kvspec
from kvspec.session.written import BlockLocks, blocks_of

SIZES: dict[str, Any] = {"block_size": 4, "total_num_kv_heads": 2, "head_size": 8, "dtype": "int8"}
FULL = kvspec.FullAttentionSpec(**SIZES)
WINDOW = kvspec.SlidingWindowSpec(**SIZES, sliding_window=8)
STATE = kvspec.MambaSpec.short_conv(conv_dim=6, conv_kernel=3, dtype="int8", block_size=4)
RANK = kvspec.RankId()
Tables = dict[str, Any]


def asked(tokens: int, tables: Tables, **more: Any) -> kvspec.TransferRequest:
    """Return a request with the same *tables* on both sides."""
    return kvspec.TransferRequest(
        request_id="r", num_tokens=tokens, producer_blocks=tables, consumer_blocks=tables, **more
    )


def plan_of(engine: kvspec.EngineSpec) -> kvspec.TransferPlan:
    """Return the plan between two equal engines."""
    return kvspec.plan_transfer(engine, engine)


def test_blocks_of_a_load_are_the_blocks_that_it_writes() -> None:
    """Cached tokens, dead tokens, the null block and groups without a table are left out."""
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
    """A group whose layers are all excluded on either side moves nothing into its table."""
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
    """A group with other layers owns the blocks of those."""
    group = builders.group(FULL, "layers.0", "draft", excluded=("draft",))
    plan = plan_of(builders.engine(group))
    assert {"g": [1, 2]} == {
        g: [*ids] for g, ids in blocks_of(plan, asked(8, {"g": [1, 2]})).items()
    }


def test_block_of_two_groups_that_share_no_memory_belongs_to_two_loads() -> None:
    """Block 1 of g0 ends where that of g2 begins, and g1 lies on both."""
    engine = builders.engine(FULL, FULL, FULL)
    planned = kvspec.plan_memory(engine, RANK, 2)
    size = planned.regions[0].block_stride
    places = {"g0": 0, "g1": size // 2, "g2": size}
    regions = [
        attrs.evolve(r, base=r.base % (2 * size) + places[r.group], num_blocks=1, block_stride=0)
        for r in planned.regions
    ]
    memory = (kvspec.Memory(0, 4 * size),)
    locks = BlockLocks(kvspec.RankCache(engine, RANK, regions, memory))
    block = np.array([0])
    locks.acquire("a", {"g0": block})
    locks.acquire("c", {"g2": block})
    with pytest.raises(kvspec.TransferError) as caught:
        locks.acquire("b", {"g1": block})
    assert "busy" == caught.value.state


def test_block_belongs_to_one_load_until_it_is_released() -> None:
    """Groups that share a pool share its blocks."""
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
            with pytest.raises(kvspec.TransferError, match="'a'") as caught:
                locks.acquire("b", second)
            assert "busy" == caught.value.state
            locks.release("b")
            locks.release("a")
        locks.acquire("b", second)
        locks.release("b")
        if not conflicts:
            locks.release("a")
        locks.acquire("c", first)
    error = refusal(lambda: locks.acquire("d", {"g1": np.array([8])}))
    assert "7" in error.expected
