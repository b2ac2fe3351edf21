"""Test which blocks of a load the connector lets vLLM put into its prefix cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import builders
import pytest
from vllm_serving import Manager

import kvspec
from kvspec.adapters.vllm.prefix_cache import hashed_of, withhold
from kvspec.descriptors.complete import complete_blocks

BLOCK = 16


def plan_of(*specs: kvspec.LayerSpec) -> kvspec.TransferPlan:
    """Return the plan between two equal engines with one group for each spec."""
    groups = [
        builders.group(spec, f"layers.{at}", name=f"group{at}") for at, spec in enumerate(specs)
    ]
    engine = builders.engine(*groups, null_block=0)
    return kvspec.plan_transfer(engine, engine)


def heads() -> dict[str, Any]:
    """Return the fields of small attention layers."""
    return {"block_size": BLOCK, "total_num_kv_heads": 2, "head_size": 4, "dtype": "float16"}


def window(size: int, **more: int) -> kvspec.SlidingWindowSpec:
    """Return a spec with a window of *size* tokens."""
    return kvspec.SlidingWindowSpec(**heads(), sliding_window=size, **more)


def request(plan: kvspec.TransferPlan, num_tokens: int, cached: int = 0) -> kvspec.TransferRequest:
    """Return a load into the blocks that vLLM allocates. It has null blocks before the window."""
    tables = {}
    for number, group in enumerate(plan.consumer.groups):
        start = group.spec.live_tokens(num_tokens).start // BLOCK
        count = -(-num_tokens // BLOCK)
        tables[group.name] = [
            100 * number + place + 1 if place >= start else 0 for place in range(count)
        ]
    return kvspec.TransferRequest(
        request_id="d",
        num_tokens=num_tokens,
        cached_tokens=cached,
        producer_blocks=tables,
        consumer_blocks=tables,
    )


def hashed_after(
    plan: kvspec.TransferPlan, load: kvspec.TransferRequest, cached: int
) -> dict[str, list[int]]:
    """Return the blocks that vLLM hashes after *load*, by group."""
    managers = [Manager(BLOCK) for _ in plan.consumer.groups]
    coordinator = SimpleNamespace(single_type_managers=managers)
    hashed = hashed_of(SimpleNamespace(enable_caching=True, coordinator=coordinator))
    tables = {name: table.block_ids.tolist() for name, table in load.consumer_blocks.items()}
    for manager, ids in zip(managers, tables.values(), strict=True):
        manager.allocate("d", ids, cached)
    withhold(plan.consumer, load, hashed)
    return {
        name: manager.cache_blocks("d", ids, load.num_tokens)
        for manager, (name, ids) in zip(managers, tables.items(), strict=True)
    }


@pytest.mark.parametrize("cached", [0, 16, 32])
@pytest.mark.parametrize("size", [1, 2, 16, 17, 18, 33, 40])
def test_only_complete_blocks_are_hashed(size: int, cached: int) -> None:
    """For each length, vLLM hashes exactly the complete blocks that were not cached before."""
    chunk = kvspec.ChunkedLocalAttentionSpec(**heads(), attention_chunk_size=size)
    specs = kvspec.FullAttentionSpec(**heads()), window(size), chunk
    plan = plan_of(*specs, window(size, extra_retained_tokens=3))
    for num_tokens in range(cached + 1, 100):
        load = request(plan, num_tokens, cached)
        complete = complete_blocks(plan, load)
        for name, ids in hashed_after(plan, load, cached).items():
            places = load.consumer_blocks[name].block_ids.tolist()[cached // BLOCK :]
            assert [block for block in complete[name].tolist() if block in places] == ids


def test_block_in_which_the_window_begins_is_not_hashed() -> None:
    """After 39 tokens, a window of 17 begins at token 23, and block 2 holds tokens 16 to 31."""
    plan = plan_of(kvspec.FullAttentionSpec(**heads()), window(17))
    hashed = hashed_after(plan, request(plan, 39), 0)
    assert {"group0": [1, 2], "group1": []} == hashed


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32])
def test_block_of_a_state_is_hashed_if_the_state_ends_it(num_tokens: int) -> None:
    """VLLM has null blocks before the state, so only the last block may be hashed."""
    state = builders.mamba2(num_heads=4, head_dim=4, n_groups=1, block_size=BLOCK)
    plan = plan_of(state)
    load = request(plan, num_tokens)
    complete = complete_blocks(plan, load)["group0"].tolist()
    assert complete == hashed_after(plan, load, 0)["group0"]


def test_load_without_dead_tokens_needs_no_manager() -> None:
    """A version of vLLM that does not bind its manager serves models without windows."""
    plan = plan_of(kvspec.FullAttentionSpec(**heads()), window(50))
    withhold(plan.consumer, request(plan, 49), None)


def test_load_with_dead_tokens_is_refused_without_a_manager() -> None:
    """Without the manager, vLLM would hash an incomplete block."""
    plan = plan_of(window(17))
    with pytest.raises(kvspec.SpecError) as refused:
        withhold(plan.consumer, request(plan, 39), None)
    assert "bind_kv_cache_manager" == refused.value.field


def test_engine_without_a_prefix_cache_needs_no_counts() -> None:
    """The managers of such an engine are not read."""
    assert {} == hashed_of(SimpleNamespace(enable_caching=False))
    plan = plan_of(window(17))
    withhold(plan.consumer, request(plan, 39), {})


@pytest.mark.parametrize(
    "coordinator",
    [
        SimpleNamespace(),
        SimpleNamespace(single_type_managers=[Manager(BLOCK), SimpleNamespace(block_size=BLOCK)]),
        SimpleNamespace(single_type_managers=[SimpleNamespace(num_cached_block={})]),
    ],
)
def test_manager_with_other_fields_is_refused(coordinator: Any) -> None:
    """The engine does not start, and the error names the setting to change."""
    with pytest.raises(kvspec.SpecError) as refused:
        hashed_of(SimpleNamespace(enable_caching=True, coordinator=coordinator))
    assert ("enable_prefix_caching", True) == (refused.value.field, refused.value.value)
