"""What vLLM 0.33's connector gets wrong without a word, in its smallest case, byte by byte.

Numbers are those of a list of its suspected bugs. 6, 12 and 15 are of its completion protocol, 17
of an enum: nothing of them is mapping. Each case is moved here and every byte compared, or it is
refused where there is nothing right to do.
"""

from __future__ import annotations

import ctypes
from typing import Any

import builders
import moved
import numpy as np
import pytest
from builders import request as request_of
from moved import moves
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
    """Return a latent."""
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


def test_the_executor_sees_one_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte too few, from elsewhere, to elsewhere: each is told."""
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


def test_bug_1_a_hit_with_blocks_of_two_sizes() -> None:
    """Producer blocks of 16, consumer's of 32, 33 tokens of which one block is cached.

    vLLM gives the consumer's tokens 32..63 the producer's 16..47; here, 32 gets 32. Lengths up to
    80 tokens, with any cached prefix, both ways, are right.
    """
    assert [] == moves(engine(full()), engine(full(block_size=32)), 33, cached_tokens=32)
    for tokens in range(1, 81, 11):
        for cached in range(0, tokens + 1, 6):
            for ours, theirs in ((16, 32), (32, 16)):
                sides = engine(full(block_size=ours)), engine(full(block_size=theirs))
                assert [] == moves(*sides, tokens, cached_tokens=cached)


def test_bug_2_a_sliding_window_with_blocks_of_two_sizes() -> None:
    """Producer blocks of 16, consumer's of 32, window 64, 81 tokens, no hit.

    Both sides keep their last blocks only: 1..5 of the producer, 0..2 of the consumer. vLLM pairs
    the tails and is off by one block; here the tables say which tokens they hold.
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
def test_bug_3_mamba2_with_fewer_groups_than_ranks(n_groups: int) -> None:
    """One group, from 1 rank to 2: vLLM's B is C, and its C the temporal state.

    All pairs of TP sizes up to 8 are right, also where some ranks share a group and others do not.
    """
    for producer in (1, 2, 4, 8):
        for consumer in (1, 2, 4, 8):
            sides = (engine(mamba2(n_groups), tp=size) for size in (producer, consumer))
            assert [] == moves(*sides, 5)


def packed(heads: int, layout: str) -> tuple[KVCacheConfig, Any]:
    """Return a rank of two layers whose backend gives K and V a head slot each, and its tensors."""
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
def test_bug_4_keys_and_values_as_two_head_slots(layout: str, sizes: tuple[int, int]) -> None:
    """Two heads, from 1 rank to 2: vLLM gives one rank all keys and the other all values.

    The adapter reads two slots of all heads as planes, so each rank gets its head of both. Checked
    through the recorded shape [blocks, 2, tokens, heads x size], not through our own regions.
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
            caches[-1][rank] = vllm.rank_cache(spec, rank, tensors, config.num_blocks)
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
    """A hybrid of full attention and Mamba, more consumer ranks than heads.

    Pushing, vLLM drops the replicas that it would not read: ranks 1 and 3 complete with nothing.
    Pulled or pushed, our plan is one set of edges, and every consumer rank has its bytes.
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
def test_bug_7_larger_blocks_on_the_producer(layout: str) -> None:
    """Producer blocks of 32, consumer's of 16, pushed: vLLM asserts when all is written.

    With a hit it had sent the wrong end, and half a block of heads is no half of its tokens.
    """
    sides = [engine(full(block_size=size), layout=layout) for size in (32, 16)]
    for cached in (0, 16, 33, 64):
        assert [] == moves(*sides, 70, cached_tokens=cached)


def test_bug_8_a_lookahead_block_of_layers_of_own_sizes() -> None:
    """A latent and indexer keys in one group, blocks of 64, and a block ahead on the producer.

    vLLM does not clip such a group's list and pairs from the end, so every block is off by one.
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
def test_bug_9_context_parallel_with_blocks_of_two_sizes(tokens: int) -> None:
    """A latent, 65 tokens, from blocks of 64 on 1 rank to blocks of 128 on 2 context ranks.

    vLLM matches blocks by number, whatever they hold: tokens 64.. are lost or on another rank.
    """
    one = engine(latent(64))
    two = engine(latent(128), tp=2, dcp_size=2, interleave_size=128)
    assert [] == moves(one, two, tokens)
    assert [] == moves(two, one, tokens)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 16), (16, 1), (4, 8), (1, 1)])
def test_bug_10_an_interleave_that_is_not_the_block_size(ours: int, theirs: int) -> None:
    """A latent on 2 context ranks that take turns every few tokens: vLLM copies such blocks whole.

    The interleave is part of the description here, and two different ones are met token by token.
    """
    sides = [engine(latent(), tp=2, dcp_size=2, interleave_size=size) for size in (ours, theirs)]
    assert [] == moves(*sides, 75)
    assert [] == moves(sides[0], engine(latent()), 75)


def test_bug_11_speculative_rows_of_a_conv_state() -> None:
    """One side speculates 2 tokens and the other none: their conv states have 5 and 3 rows.

    vLLM takes the remote offsets from the local rows. It is refused here, with both numbers; the
    3 rows that both have can be asked for.
    """
    sides = engine(mamba2(1, num_speculative_tokens=2)), engine(mamba2(1))
    with pytest.raises(
        kvspec.MismatchError, match=r"conv_x\.states: producer 5, consumer 3 .*rows"
    ):
        kvspec.plan_transfer(*sides)
    assert [] == moves(*sides, 9, common_states=True)


def test_bug_13_a_group_that_is_empty_on_the_consumer() -> None:
    """All of one group is cached, and its table is empty: vLLM's ``[-0:]`` takes the whole list.

    Nothing of it moves. Where tokens of it are wanted, the empty table is refused.
    """
    sides = engine(full(), full(1)), engine(full(), full(1))
    ours = {"group0": [3, 1, 2], "group1": [0, 4, 2]}
    theirs = {"group0": [1, 2, 0], "group1": []}
    cached = {"group1": 40}
    assert [] == moved.moved(*sides, request_of(40, ours, theirs, cached_tokens=cached))
    with pytest.raises(kvspec.SpecError, match=r"expected blocks for tokens 0\.\.39"):
        moved.moved(*sides, request_of(40, ours, theirs))


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC", "BLNHC"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2)])
def test_bug_14_padded_pages_cut_by_heads(layout: str, sizes: tuple[int, int]) -> None:
    """Attention pages padded from 256 or 512 bytes to 600, blocks outermost, TP of two sizes.

    vLLM slices the padded row by heads; strides know nothing of a page's end.
    """
    sides = [engine(full(2, page_size_padded=600), tp=size, layout=layout) for size in sizes]
    assert [] == moves(*sides, 50)


@pytest.mark.parametrize("spec", [latent(), full(2)], ids=["latent", "two heads on 4 ranks"])
def test_bug_16_identical_bytes_are_moved_once(spec: kvspec.LayerSpec) -> None:
    """From 4 ranks to 2, a latent or 2 heads: vLLM's producer ranks all write the same bytes.

    Each consumer rank has one source, so the traffic is the consumer's bytes.
    """
    sides = [engine(spec, tp=size) for size in (4, 2)]
    plan = kvspec.plan_transfer(*sides)
    pages = sum(2 * spec.page_size_bytes(rank, 2) for rank in (0, 1))
    assert pages == kvspec.traffic(plan, 16).total.nbytes
    assert [] == moves(*sides, 40)
