"""The smallest cases in which the connector of vLLM 0.33 moves wrong bytes without an error.

The numbers are those of a list of suspected bugs. 6, 12 and 15 are about its completion protocol
and 17 is about an enum, so they have no case here. Each case is moved and compared byte by byte, or
it is rejected if no result is right.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import builders
import moved
import numpy as np
import pytest
from builders import request as request_of
from moved import moves
from refused import check_rejected
from vllm_like import (
    B12X,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    buffer_of,
    engine_spec,
    tensors_of,
)

import kvspec
from kvspec.adapters import vllm


def full(heads: int = 2, block_size: int = 16, **more: Any) -> kvspec.FullAttentionSpec:
    """Return full attention with small heads."""
    return builders.gqa(heads, block_size=block_size, **more)


def latent(block_size: int = 16, size: int = 12, **more: Any) -> kvspec.MLAAttentionSpec:
    """Return a latent spec."""
    return builders.mla(block_size=block_size, head_size=size, **more)


def mamba2(n_groups: int, num_heads: int = 8, **more: Any) -> kvspec.MambaSpec:
    """Return a Mamba2 state."""
    return builders.mamba2(num_heads=num_heads, head_dim=4, n_groups=n_groups, **more)


def engine(*specs: kvspec.LayerSpec, **sizes: Any) -> kvspec.EngineSpec:
    """Return an engine with a group of two layers for each spec."""
    groups = []
    for at, spec in enumerate(specs):
        layers = spec.layers or (f"layer.{2 * at}", f"layer.{2 * at + 1}")
        groups.append(builders.group(spec, *layers, name=f"group{at}"))
    return builders.engine(*groups, **sizes)


def test_moves_reports_one_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is one byte too short, or starts or ends one byte too early."""
    honest = moved.described

    def tampered(change: Any) -> Any:
        def copies(table: Any, request: Any) -> list[Any]:
            *rest, last = honest(table, request)
            return [*rest, change(*last)]

        return copies

    for change in (
        lambda a, b, n: (a, b, n - 1),
        lambda a, b, n: (a - 1, b, n),
        lambda a, b, n: (a, b - 1, n),
    ):
        monkeypatch.setattr(moved, "described", tampered(change))
        assert moves(engine(full()), engine(full(block_size=32)), 64)
    monkeypatch.setattr(moved, "described", honest)
    assert [] == moves(engine(full()), engine(full(block_size=32)), 64)


def test_bug_1_cached_prefix_with_unequal_block_sizes_is_moved() -> None:
    """Blocks have 16 and 32 tokens, and one block of a prompt of 33 tokens is cached.

    vLLM writes the producer's tokens 16..47 into the consumer's tokens 32..63. Lengths up to 80
    tokens are tried with cached prefixes, in both directions.
    """
    assert [] == moves(engine(full()), engine(full(block_size=32)), 33, cached_tokens=32)
    for tokens in range(1, 81, 11):
        for cached in range(0, tokens + 1, 6):
            for ours, theirs in ((16, 32), (32, 16)):
                sides = engine(full(block_size=ours)), engine(full(block_size=theirs))
                assert [] == moves(*sides, tokens, cached_tokens=cached)


def test_bug_2_sliding_window_with_unequal_block_sizes_is_moved() -> None:
    """Blocks have 16 and 32 tokens, the window has 64 of 81 tokens, and nothing is cached.

    Both sides keep their last blocks only: 1..5 of the producer, 0..2 of the consumer. vLLM pairs
    the last blocks and is off by one. The tables of kvspec contain their first token.
    """
    for tokens in range(66, 161, 3):
        sides, tables = [], []
        for block_size in (16, 32):
            spec = builders.window(64, 2, block_size=block_size)
            count = -(-tokens // block_size)
            kept = min(count, 64 // block_size + 1)
            ids = [(7 * at + 3) % 13 for at in range(kept)]
            sides.append(engine(spec))
            tables.append({"group0": kvspec.BlockTable(ids, (count - kept) * block_size)})
        assert [] == moved.moved(*sides, request_of(tokens, *tables))


@pytest.mark.parametrize("n_groups", [1, 2, 4])
def test_bug_3_mamba2_with_fewer_groups_than_ranks_is_moved(n_groups: int) -> None:
    """From 1 rank to 2, vLLM reads C as B and the temporal state as C.

    All pairs of TP sizes up to 8 are tried, also if only some ranks share a group.
    """
    for producer in (1, 2, 4, 8):
        for consumer in (1, 2, 4, 8):
            sides = (engine(mamba2(n_groups), tp=size) for size in (producer, consumer))
            assert [] == moves(*sides, 5)


def packed(heads: int, layout: str) -> tuple[KVCacheConfig, Any]:
    """Return a rank of two layers whose backend has a head slot for K and one for V."""
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=heads,
        head_size=4,
        dtype="bfloat16",
        num_head_slots=2,
        state_content_bytes=heads * 8,
    )
    page, blocks = spec.page_size_bytes, 4
    inner, outer = (2 * page, page) if layout.startswith("B") else (page, page * blocks)
    tensor = KVCacheTensor(2 * page * blocks, ["layer.0", "layer.1"], 0, outer, inner)
    config = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(tensor.shared_by, spec)])
    flat = buffer_of(config)
    return config, (flat, tensors_of(config, layout, flat))


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_bug_4_keys_and_values_as_two_head_slots_are_moved(
    layout: str, sizes: tuple[int, int]
) -> None:
    """From 1 rank to 2, vLLM moves all keys to one rank and all values to the other.

    The adapter reads the two slots as planes, so each rank receives its head of both. The test uses
    the recorded shape [blocks, 2, tokens, heads x size], not the regions of kvspec.
    """
    engines, caches, views, kept = [], [], [], []
    for size in sizes:
        config, _ = packed(2 // size, layout)
        spec = engine_spec(
            config,
            parallel=kvspec.ParallelConfig(tp_size=size),
            total_num_kv_heads=2,
            layout=layout,
            backends=B12X,
        )
        engines.append(spec)
        caches.append({})
        views.append({})
        for rank in spec.parallel.ranks:
            flat, tensors = packed(2 // size, layout)[1]
            kept.append(flat)
            caches[-1][rank] = vllm.rank_cache(spec, rank, tensors)
            views[-1][rank] = tensors
    ids, others = [2, 3], [1, 3]
    _paint(views[0], ids, 2 // sizes[0], check=False)
    plan = kvspec.plan_transfer(*engines)
    request = request_of(32, {"group0": ids}, {"group0": others})
    for rank, cache in caches[1].items():
        for source in plan.sources(rank):
            table = kvspec.build_table(plan, caches[0][source], cache)
            for a, b, length in moved.described(table, request):
                ctypes.memmove(b, a, length)
    _paint(views[1], others, 2 // sizes[1], check=True)


def _paint(views: Any, ids: list[int], heads: int, *, check: bool) -> None:
    for rank, tensors in views.items():
        for layer, tensor in tensors.items():
            for at, block in enumerate(ids):
                for plane in (0, 1):
                    tokens = np.arange(16 * at, 16 * at + 16)
                    own = range(rank.tp * heads % 2, rank.tp * heads % 2 + heads)
                    true = moved.oracle.content(layer, "kv"[plane], own, tokens, 8)
                    true = true.swapaxes(0, 1).reshape(16, -1)
                    if check:
                        assert true.tolist() == tensor[block, plane].tolist()
                    tensor[block, plane] = true


@pytest.mark.parametrize(("heads", "producer", "consumer"), [(1, 1, 2), (2, 1, 4), (2, 2, 4)])
def test_bug_5_every_replica_is_written(heads: int, producer: int, consumer: int) -> None:
    """A hybrid of full attention and Mamba has more consumer ranks than heads.

    When vLLM pushes, it omits replicas: ranks 1 and 3 complete without any bytes. A plan of kvspec
    has the same edges for pushes and pulls.
    """
    sides = [engine(full(heads), mamba2(1), tp=size) for size in (producer, consumer)]
    plan = kvspec.plan_transfer(*sides)
    for rank in plan.consumer.parallel.ranks:
        assert {"group0", "group1"} == {e.group for e in plan.edges if e.consumer == rank}
    pushed = {(p, c) for p in plan.producer.parallel.ranks for c in plan.targets(p)}
    pulled = {(p, c) for c in plan.consumer.parallel.ranks for p in plan.sources(c)}
    assert pushed == pulled
    assert [] == moves(*sides, 40)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_bug_7_larger_blocks_of_the_producer_are_moved(layout: str) -> None:
    """Blocks of 32 are pushed into blocks of 16, and vLLM fails an assertion at the end.

    With a cached prefix it sends the wrong end. Half of a block of heads is not half of its tokens.
    """
    sides = [engine(full(block_size=size), layout=layout) for size in (32, 16)]
    for cached in (0, 16, 33, 64):
        assert [] == moves(*sides, 70, cached_tokens=cached)


def test_bug_8_lookahead_block_of_unequal_layers_is_moved() -> None:
    """A latent and indexer keys are in one group, and the producer has one block more.

    vLLM does not shorten the list of such a group and pairs it from the end, so each block is off
    by one.
    """
    spec = kvspec.UniformTypeKVCacheSpecs(
        specs={"layer.0.attn": latent(64), "layer.0.indexer": latent(64, 4)}
    )
    side = engine(spec)
    for tokens in (64, 127, 128):
        blocks = [5, 2, 7, 1][: -(-tokens // 64)]
        request = request_of(tokens, {"group0": [*blocks, 0]}, {"group0": blocks[::-1]})
        assert [] == moved.moved(side, side, request)


@pytest.mark.parametrize("tokens", [64, 65, 128, 129, 300])
def test_bug_9_context_ranks_with_unequal_block_sizes_are_moved(tokens: int) -> None:
    """A latent moves from blocks of 64 on 1 rank to blocks of 128 on 2 context ranks.

    vLLM pairs blocks by their number, so tokens from 64 on are lost or arrive at another rank.
    """
    one = engine(latent(64))
    two = engine(latent(128), tp=2, dcp_size=2, interleave_size=128)
    assert [] == moves(one, two, tokens)
    assert [] == moves(two, one, tokens)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 16), (16, 1), (4, 8), (1, 1)])
def test_bug_10_interleaves_smaller_than_a_block_are_moved(ours: int, theirs: int) -> None:
    """The 2 context ranks of a latent alternate every few tokens, but vLLM copies whole blocks.

    The interleave is part of an engine's description, and two interleaves are compared by token.
    """
    sides = [engine(latent(), tp=2, dcp_size=2, interleave_size=size) for size in (ours, theirs)]
    assert [] == moves(*sides, 75)
    assert [] == moves(sides[0], engine(latent()), 75)


def test_bug_11_unequal_speculative_rows_are_a_mismatch() -> None:
    """One side speculates 2 tokens and the other none, so their conv states have 5 and 3 rows.

    vLLM computes the remote offsets from the local rows. With `common_states`, kvspec moves the 3
    common rows.
    """
    sides = engine(mamba2(1, num_speculative_tokens=2)), engine(mamba2(1))
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec.plan_transfer(*sides)
    assert {(5, 3)} == {(m.producer, m.consumer) for m in caught.value.mismatches}
    assert all(m.field.endswith(".states") for m in caught.value.mismatches)
    assert any(m.field.endswith(".conv_x.states") for m in caught.value.mismatches)
    assert [] == moves(*sides, 9, common_states=True)


def test_bug_13_empty_table_of_a_cached_group_moves_nothing() -> None:
    """A group is fully cached and its table is empty, so vLLM's ``[-0:]`` takes the whole list.

    If the request needs tokens of the group, the empty table is an error.
    """
    sides = engine(full(), full(1)), engine(full(), full(1))
    ours = {"group0": [3, 1, 2], "group1": [0, 4, 2]}
    theirs = {"group0": [1, 2, 0], "group1": []}
    cached = {"group1": 40}
    assert [] == moved.moved(*sides, request_of(40, ours, theirs, cached_tokens=cached))
    call = partial(moved.moved, *sides, request_of(40, ours, theirs))
    check_rejected(call, "consumer_blocks['group1']", range(0), "0..39")


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC", "BLNHC"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2)])
def test_bug_14_padded_pages_with_divided_heads_are_moved(
    layout: str, sizes: tuple[int, int]
) -> None:
    """Attention pages are padded to 600 bytes, and the TP sizes differ.

    vLLM divides the padded page by heads, which includes the padding.
    """
    sides = [engine(full(2, page_size_padded=600), tp=size, layout=layout) for size in sizes]
    assert [] == moves(*sides, 50)


@pytest.mark.parametrize("spec", [latent(), full(2)], ids=["latent", "two heads on 4 ranks"])
def test_bug_16_identical_bytes_are_moved_once(spec: kvspec.LayerSpec) -> None:
    """From 4 ranks to 2, each producer rank of vLLM writes the same bytes of a latent or 2 heads.

    In kvspec each consumer rank has one source, so the traffic is the bytes of the consumer.
    """
    sides = [engine(spec, tp=size) for size in (4, 2)]
    plan = kvspec.plan_transfer(*sides)
    pages = sum(2 * spec.page_size_bytes(rank, 2) for rank in (0, 1))
    assert pages == kvspec.traffic(plan, 16).total.nbytes
    assert [] == moves(*sides, 40)
