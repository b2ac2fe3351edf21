"""Pools that SGLang's own classes build on a CPU. SGLang's own code writes and reads them.

A nightly workflow installs SGLang. Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import ast
import ctypes
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_serving as serving
import vllm_like
from builders import request as request_of

import kvspec
from kvspec import RankId
from kvspec.adapters import sglang as adapter
from kvspec.adapters import vllm
from kvspec.adapters.sglang import plugin
from kvspec.adapters.sglang.backend import SUCCESS, WAITING
from kvspec.adapters.sglang.compressed_pools import COMPRESSED_POOL
from kvspec.adapters.sglang.describing import INDEXER_FLAGS
from kvspec.adapters.sglang.pools import POOL_KINDS, POOLS_NOT_YET
from kvspec.errors import SpecError
from kvspec.testing.world import described

pytestmark = pytest.mark.adapters

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it defines a kernel.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns of each kernel that a CPU does not have.
    pytest.importorskip("sglang", reason="SGLang is not installed")
    import torch
    from sglang.kernels.ops.kvcache import mla_buffer
    from sglang.srt.configs import mamba_utils
    from sglang.srt.disaggregation import prefill, utils
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.layers.quantization import fp4_kv_cache_quant_method
    from sglang.srt.mem_cache import (
        deepseek_v4_memory_pool,
        dsa_cache_layer_split,
        hisparse_memory_pool,
        memory_pool,
        minimax_m3_nvfp4_pool,
        page_interleave_pool,
        qsa_kv_pool,
        swa_memory_pool,
        unified_draft_pool,
        unified_memory_pool,
    )

TOKENS, SLOT = 70, 3
K_HEADS, V_HEADS, K_SIZE, V_SIZE, ROWS = 4, 8, 8, 12, 3
HEADS, SIZE = 4, 8
CPU: dict[str, Any] = {"device": "cpu"}
Pools = dict[RankId, Any]


def random(*shape: int, dtype: Any = None) -> Any:
    """Return a tensor of random numbers."""
    return torch.randn(shape).to(dtype or torch.bfloat16)


class Model:
    """What a model with layers of each kind writes for one prompt, before TP divides it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.kv = {part: random(TOKENS, HEADS, SIZE) for part in "kv"}
        sizes = (K_HEADS * K_SIZE, K_HEADS * K_SIZE, V_HEADS * V_SIZE)
        self.conv = [random(2, size, ROWS) for size in sizes]
        self.temporal = random(2, V_HEADS, V_SIZE, K_SIZE, dtype=torch.float32)
        self.latent = random(2, TOKENS, 1, 48)
        self.index = torch.randint(0, 100, (TOKENS, 128), dtype=torch.uint8)

    def state(self, rank: int, size: int, *, rows_first: bool) -> tuple[list[Any], Any]:
        """Return the state of a rank as SGLang copies it: [layers, slots, ...]."""
        conv = torch.cat([each.chunk(size, 1)[rank] for each in self.conv], 1)
        conv = conv.transpose(1, 2) if rows_first else conv
        return [conv[:, None].contiguous()], self.temporal.chunk(size, 1)[rank][:, None]


@pytest.fixture(scope="module")
def model() -> Model:
    """Return the truth."""
    return Model()


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Let pools find the parallel sizes that SGLang's processes set at their start."""
    patch = pytest.MonkeyPatch()
    single = SimpleNamespace(attn_dcp_size=1, dcp_enabled=False)
    patch.setattr(memory_pool, "get_parallel", lambda: single)
    yield
    patch.undo()


def hybrid(tp: int, page: int, *, kda: bool) -> Any:
    """Return the pool of one of *tp* ranks: layers 1 and 2 have states, layer 3 attends."""
    if kda:
        shape = mamba_utils.KimiLinearStateShape.create(
            tp_world_size=tp, num_heads=V_HEADS, head_dim=K_SIZE, conv_kernel_size=ROWS + 1
        )
        params = mamba_utils.KimiLinearCacheParams(shape=shape, layers=[1, 2])
    else:
        key, value = K_HEADS * K_SIZE, V_HEADS * V_SIZE
        shape = mamba_utils.Mamba2StateShape.create(
            tp_world_size=tp, intermediate_size=value, n_groups=K_HEADS, num_heads=V_HEADS,
            head_dim=V_SIZE, state_size=K_SIZE, conv_kernel=ROWS + 1,
            conv_shard_groups=[key, key, value],
        )  # fmt: skip
        params = mamba_utils.Mamba2CacheParams(shape=shape, layers=[1, 2])
    states = memory_pool.MambaPool(
        size=5, spec_state_size=5, cache_params=params, mamba_layer_ids=[1, 2], **CPU
    )
    return memory_pool.HybridLinearKVPool(
        size=128, dtype=torch.bfloat16, page_size=page, head_num=HEADS // tp, head_dim=SIZE,
        full_attention_layer_ids=[3], mamba_pool=states, **CPU,
    )  # fmt: skip


def slots(page: int, seed: int) -> Any:
    """Return the slots of the prompt on scattered pages."""
    pages = 1 + np.random.default_rng(seed).permutation(-(-TOKENS // page))
    return torch.from_numpy((pages[:, None] * page + np.arange(page)).ravel()[:TOKENS])


class Side:
    """One engine, with the pool of each rank."""

    def __init__(self, tp: int, page: int, seed: int, make: Callable[[int, int], Any],
                 **options: Any) -> None:  # fmt: skip
        parallel = adapter.parallel_config(tp)
        self.pools: Pools = {rank: make(tp, page) for rank in parallel.ranks}
        self.slots, self.slot = slots(page, seed), SLOT + seed
        self.engine = adapter.engine_spec(
            self.pools[RankId()], parallel=parallel, total_num_kv_heads=HEADS, **options
        )
        self.caches = {
            rank: adapter.rank_cache(self.engine, rank, pool) for rank, pool in self.pools.items()
        }
        own = {"full": self.slots, "state": self.slot}
        self.tables = adapter.block_tables(self.engine, own)


def move(producer: Side, consumer: Side, cached: int = 0) -> None:
    """Copy the prompt from the pools of one side to those of the other."""
    plan = kvspec.plan_transfer(producer.engine, consumer.engine)
    request = request_of(TOKENS, producer.tables, consumer.tables, cached_tokens=cached)
    for rank, cache in consumer.caches.items():
        for source in plan.sources(rank):
            table = kvspec.build_table(plan, producer.caches[source], cache)
            for start, stop, length in described(table, request):
                ctypes.memmove(stop, start, length)


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize(
    ("tp", "other"), [((1, 16), (1, 4)), ((2, 16), (1, 32)), ((1, 1), (2, 16))]
)
def test_hybrid_of_sglang_reads_what_another_one_wrote(
    tp: tuple[int, int], other: tuple[int, int], kda: bool, model: Model
) -> None:
    """The conv state is q, k and v: each is divided among the ranks by itself."""
    if kda:
        model = Model()
        model.conv = [random(2, V_HEADS * K_SIZE, ROWS) for _ in range(3)]
        model.temporal = random(2, V_HEADS, K_SIZE, K_SIZE, dtype=torch.float32)
    make = lambda size, page: hybrid(size, page, kda=kda)  # noqa: E731
    producer, consumer = Side(*tp, 0, make), Side(*other, 1, make)
    layer = SimpleNamespace(layer_id=3)
    for rank, pool in producer.pools.items():
        own = [model.kv[part].chunk(tp[0], 1)[rank.tp] for part in "kv"]
        pool.set_kv_buffer(layer, producer.slots, *own)
        state = model.state(rank.tp, tp[0], rows_first=kda)
        pool.mamba_pool.load_cpu_copy(state, torch.tensor([producer.slot]))
    move(producer, consumer)
    for rank, pool in consumer.pools.items():
        for part, buffer in zip("kv", pool.get_kv_buffer(3), strict=True):
            assert torch.equal(model.kv[part].chunk(other[0], 1)[rank.tp], buffer[consumer.slots])
        (conv,), temporal = pool.mamba_pool.get_cpu_copy(torch.tensor([consumer.slot]))
        (wanted,), state = model.state(rank.tp, other[0], rows_first=kda)
        assert torch.equal(wanted, conv)
        assert torch.equal(state, temporal)
        # Slot 0, and those of other requests, stay as they were.
        whole = pool.mamba_pool.mamba_cache.temporal
        assert int((whole != 0).any(-1).any(-1).any(-1).any(0).sum()) == 1


def test_sglang_divides_the_channels_of_mamba2_as_one_piece() -> None:
    """Rank 0 of 2 needs channels of x, of B and of C. SGLang's backends give it channels of x."""
    one, two = (
        mamba_utils.Mamba2StateShape.create(
            tp_world_size=size, intermediate_size=32, n_groups=2, num_heads=8, head_dim=4,
            state_size=4, conv_kernel=4,
        )
        for size in (1, 2)
    )  # fmt: skip
    assert (48, 24) == (one.conv[0][0], two.conv[0][0])
    assert one.conv_shard_groups is None
    asked = {"src_dim": 48, "dst_dim": 24, "src_attn_tp_size": 1, "dst_attn_tp_size": 2,
             "dst_tp_rank_in_group": 0, "local_tp_rank_in_group": 0}  # fmt: skip
    assert [(0, 0, 24)] == utils.compute_mamba_state_slice_blocks(**asked)
    named = utils.compute_mamba_state_slice_blocks(**asked, conv_shard_groups=[32, 8, 8])
    assert [(0, 0, 16), (32, 16, 4), (40, 20, 4)] == named
    spec = kvspec.MambaSpec.mamba2(
        num_heads=8, head_dim=4, n_groups=2, state_size=4, conv_kernel=4, dtype="bfloat16"
    )
    found = spec.get_tp_transfer_slices(local_tp_rank=0, local_tp_size=2, remote_tp_size=1)
    sizes = {part: len(each.global_range) for each in found for part in each.parts}
    assert [16, 4, 4] == [size for part, size in sizes.items() if part.startswith("conv")]


def test_draft_of_eagle_moves_with_the_slots_of_its_model(model: Model) -> None:
    """The draft has a pool of its own, with one layer and other heads."""

    def pool(heads: int, page: int, layers: int) -> Any:
        return memory_pool.MHATokenToKVPool(
            size=128, page_size=page, dtype=torch.bfloat16, head_num=heads, head_dim=SIZE,
            layer_num=layers, enable_memory_saver=False, **CPU,
        )  # fmt: skip

    heads = {"full": HEADS, "draft": 2 * HEADS}
    truth = {part: random(TOKENS, 2 * HEADS, SIZE) for part in "kv"}
    sides = []
    for tp, page, seed in ((2, 16, 0), (1, 4, 1)):
        parallel, own = adapter.parallel_config(tp), slots(page, seed)
        pools = {rank: (pool(HEADS // tp, page, 2), pool(2 * HEADS // tp, page, 1))
                 for rank in parallel.ranks}  # fmt: skip
        first, draft = pools[RankId()]
        engine = adapter.engine_spec(
            first, draft_pool=draft, parallel=parallel, total_num_kv_heads=heads
        )
        caches = {rank: adapter.rank_cache(engine, rank, *both) for rank, both in pools.items()}
        tables = adapter.block_tables(engine, own)
        sides.append(SimpleNamespace(
            engine=engine, caches=caches, tables=tables, pools=pools, slots=own
        ))  # fmt: skip
    producer, consumer = sides
    for rank, (target, draft) in producer.pools.items():
        for into, whole in ((target, model.kv), (draft, truth)):
            own = [whole[part].chunk(2, 1)[rank.tp] for part in "kv"]
            into.set_kv_buffer(SimpleNamespace(layer_id=0), producer.slots, *own)
    move(producer, consumer)  # type: ignore[arg-type]
    ((target, draft),) = consumer.pools.values()
    for found, whole in ((target, model.kv), (draft, truth)):
        for part, buffer in zip("kv", found.get_kv_buffer(0), strict=True):
            assert torch.equal(whole[part], buffer[consumer.slots])


def latents_of(side: SimpleNamespace, rank: RankId, latents: Any, patch: pytest.MonkeyPatch) -> Any:
    """Return the pool of a context rank. SGLang stores *latents* in it, if there are any."""
    own = SimpleNamespace(
        attn_dcp_size=side.dcp, dcp_enabled=side.dcp > 1, attn_dcp_rank=rank.tp % side.dcp
    )
    for module in (memory_pool, mla_buffer):
        patch.setattr(module, "get_parallel", lambda: own)
    pool = memory_pool.MLATokenToKVPool(
        256, side.page, torch.bfloat16, kv_lora_rank=32, qk_rope_head_dim=16, layer_num=1,
        enable_memory_saver=False, **CPU,
    )  # fmt: skip
    if latents is not None:
        parts = (part.contiguous() for part in latents.split((32, 16), -1))
        pool.set_mla_kv_buffer(SimpleNamespace(layer_id=0), side.slots, *parts)
    return pool


@pytest.mark.parametrize(
    ("first", "second"), [((4, 2, 4), (1, 1, 16)), ((1, 1, 1), (2, 2, 16)), ((4, 4, 2), (4, 2, 8))]
)
def test_context_ranks_have_the_latents_that_sglang_would_store(
    first: tuple[int, int, int], second: tuple[int, int, int], model: Model,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A side has (TP ranks, context ranks, page). Consecutive tokens lie on consecutive ranks."""
    sides = []
    for seed, (tp, dcp, page) in enumerate((first, second)):
        side = SimpleNamespace(dcp=dcp, page=page, slots=slots(page * dcp, seed))
        parallel = adapter.parallel_config(tp, dcp_size=dcp)
        wanted = {rank: latents_of(side, rank, model.latent[0], monkeypatch)
                  for rank in parallel.ranks}  # fmt: skip
        empty = {rank: latents_of(side, rank, None, monkeypatch) for rank in parallel.ranks}
        side.pools, side.wanted = (wanted, {}) if seed == 0 else (empty, wanted)
        side.engine = adapter.engine_spec(side.pools[RankId()], parallel=parallel)
        side.caches = {rank: adapter.rank_cache(side.engine, rank, pool)
                       for rank, pool in side.pools.items()}  # fmt: skip
        side.tables = adapter.block_tables(side.engine, side.slots)
        sides.append(side)
    producer, consumer = sides
    move(producer, consumer)  # type: ignore[arg-type]
    for rank, pool in consumer.wanted.items():
        (stored,), (found,) = pool.kv_buffer, consumer.pools[rank].kv_buffer
        own = (stored != 0).any(-1).any(-1)
        assert own.sum() >= TOKENS // second[1]
        assert torch.equal(stored[own], found[own])


WINDOW = 20


@pytest.mark.parametrize(("first", "second"), [((1, 16), (2, 4)), ((2, 1), (1, 16))])
def test_sglang_finds_keys_and_values_in_windows_with_slots_of_their_own(
    first: tuple[int, int], second: tuple[int, int], model: Model
) -> None:
    """Layer 0 has a window. SGLang has freed the pages of the window that no query reads."""
    sides = []
    for seed, (tp, page) in enumerate((first, second)):
        parallel, own = adapter.parallel_config(tp), slots(page, seed)
        pools = {
            rank: swa_memory_pool.SWAKVPool(
                size=128, size_swa=128, page_size=page, dtype=torch.bfloat16,
                head_num=HEADS // tp, head_dim=SIZE, swa_attention_layer_ids=[0],
                full_attention_layer_ids=[1], **CPU,
            )
            for rank in parallel.ranks
        }  # fmt: skip
        first_live = (TOKENS - WINDOW + 1) // page * page
        table = torch.zeros(256, dtype=torch.int64)
        table[own[first_live:]] = slots(page, seed + 7)[first_live:]
        for pool in pools.values():
            pool.register_mapping(table)
        window = pools[RankId()].translate_loc_from_full_to_swa(own)
        engine = adapter.engine_spec(
            pools[RankId()], parallel=parallel, total_num_kv_heads=HEADS, sliding_window=WINDOW
        )
        caches = {rank: adapter.rank_cache(engine, rank, pool) for rank, pool in pools.items()}
        tables = adapter.block_tables(engine, {"full": own, "swa": window})
        sides.append(SimpleNamespace(
            engine=engine, caches=caches, tables=tables, pools=pools, slots=own, window=window,
            tp=tp,
        ))  # fmt: skip
    producer, consumer = sides
    for rank, pool in producer.pools.items():
        own = [model.kv[part].chunk(producer.tp, 1)[rank.tp] for part in "kv"]
        for layer in range(2):
            where = memory_pool.KVWriteLoc(producer.slots, producer.window)
            pool.set_kv_buffer(SimpleNamespace(layer_id=layer), where, *own)
    move(producer, consumer)  # type: ignore[arg-type]
    for rank, pool in consumer.pools.items():
        for layer, live in ((0, TOKENS - WINDOW + 1), (1, 0)):
            places = consumer.slots if layer else consumer.window
            for part, buffer in zip("kv", pool.get_kv_buffer(layer), strict=True):
                wanted = model.kv[part].chunk(consumer.tp, 1)[rank.tp]
                assert torch.equal(wanted[live:], buffer[places[live:]])
        # Page 0 takes the tokens of which no query reads a window.
        assert not pool.get_key_buffer(0)[: pool.page_size].any()


def sparse(tp: int, page: int) -> Any:
    """Return a pool of latents, whose layer 1 takes the tokens that layer 0 has chosen."""
    return memory_pool.DSATokenToKVPool(
        size=256, page_size=page, kv_lora_rank=32, dtype=torch.bfloat16, qk_rope_head_dim=16,
        layer_num=2, index_head_dim=128, enable_memory_saver=False, kv_cache_dim=48,
        skip_topk_layers=[False, True], **CPU,
    )  # fmt: skip


DSA: dict[str, Any] = {"index_order": "rows", "index_hadamard": False}


def test_sglang_finds_the_latents_and_index_keys_of_another_engine(model: Model) -> None:
    """A page has the keys of all its tokens, and then their scales."""
    producer, consumer = (Side(tp, 64, seed, sparse, **DSA) for tp, seed in ((1, 0), (2, 3)))
    assert ("layers.0.indexer",) == producer.engine.group("indexer").layers
    (pool,) = producer.pools.values()
    for layer in range(2):
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), producer.slots, model.latent[layer],
                           None)  # fmt: skip
    keys, scales = write_index(pool, producer.slots, model)
    move(producer, consumer)
    pages = (consumer.slots[::64] // 64)[None]
    for own in consumer.pools.values():
        for layer in range(2):
            latents = own.get_key_buffer(layer)[consumer.slots]
            assert torch.equal(model.latent[layer], latents)
        count = torch.tensor([TOKENS])
        found = own.get_index_k_scale_buffer(0, count, pages, TOKENS, TOKENS)
        assert torch.equal(keys.view(torch.uint8), found[0])
        assert torch.equal(scales, found[1].view(torch.float32)[:, 0])


def write_index(pool: Any, targets: Any, model: Model) -> tuple[Any, Any]:
    """Let SGLang store keys and scales of layer 0. Return both."""
    keys, scales = model.index.view(torch.float8_e4m3fn), torch.rand(TOKENS)
    pool.set_index_k_scale_buffer(0, targets, keys, scales)
    return keys, scales


def indexer_of_vllm(block: int) -> tuple[kvspec.EngineSpec, kvspec.RankCache, Any]:
    """Return vLLM's engine with the indexer of layer 0, its cache and its tensor."""
    spec = vllm_like.changed(
        vllm_like.MLAAttentionSpec(block_size=block, head_size=132, dtype="uint8"),
        "cache_role", "INDEXER",
    )  # fmt: skip
    backend = "vllm.v1.attention.backends.mla.indexer.DeepseekV32IndexerBackend"
    engine = vllm_like.engine_spec(
        vllm_like.config((["layers.0.indexer"], spec)), backends=backend, variants="rows"
    )
    tensor = torch.zeros((40, block, 132), dtype=torch.uint8)
    tensors = {"layers.0.indexer": tensor}
    return engine, vllm.rank_cache(engine, RankId(), tensors), tensor


@pytest.mark.parametrize("block", [16, 64, 128])
def test_vllm_finds_the_index_keys_that_sglang_wrote(block: int, model: Model) -> None:
    """The kernel of vLLM writes a key at `token * 128`, and the scales after all keys."""
    own = Side(1, 64, 0, sparse, **DSA)
    (pool,) = own.pools.values()
    keys, scales = write_index(pool, own.slots, model)
    producer = kvspec.EngineSpec(groups=[own.engine.group("indexer")], null_block=0)
    (whole,) = own.caches.values()
    regions = [region for region in whole.regions if region.group == "indexer"]
    cache = kvspec.RankCache(producer, RankId(), regions, whole.memory)
    consumer, target, tensor = indexer_of_vllm(block)
    ids = [3, 9, 7, 1, 5][: -(-TOKENS // block)]
    request = request_of(TOKENS, {"indexer": own.tables["indexer"]}, {"group0": ids})
    plan = kvspec.plan_transfer(producer, consumer)
    for start, stop, length in described(kvspec.build_table(plan, cache, target), request):
        ctypes.memmove(stop, start, length)
    for token in range(TOKENS):
        page, at = tensor[ids[token // block]].flatten(), token % block
        assert torch.equal(keys[token].view(torch.uint8), page[at * 128 : at * 128 + 128])
        scale = page[block * 128 + at * 4 :][:4]
        assert torch.equal(scales[token : token + 1], scale.view(torch.float32))


@pytest.mark.parametrize("fused", INDEXER_FLAGS)
def test_indexer_of_sglang_leaves_out_the_hadamard_product_if_a_flag_is_set(fused: str) -> None:
    """The indexer of vLLM always leaves it out. The adapter reads the same flags."""
    own = dict.fromkeys(INDEXER_FLAGS, False)
    keys = torch.rand(4, 128)
    rotate = dsa_indexer.Indexer._maybe_rotate
    assert keys is rotate(SimpleNamespace(**own | {fused: True}), keys)
    with pytest.raises(NotImplementedError, match="hadamard"):  # Its kernel is for CUDA only.
        rotate(SimpleNamespace(**own), keys)


def fp4(tp: int, page: int) -> Any:
    """Return a pool of keys and values of FP4, as SGLang builds it for `fp4_mx_block16`."""
    return memory_pool.MHATokenToKVPool(
        size=256, page_size=page, dtype=torch.float4_e2m1fn_x2, head_num=HEADS // tp,
        head_dim=WIDE, layer_num=1, enable_memory_saver=False,
        quant_method=fp4_kv_cache_quant_method.FP4MXBlock16KVCacheMethod(), **CPU,
    )  # fmt: skip


def latents_of_fp4(tp: int, page: int) -> Any:
    """Return a pool of latents of FP4. Each rank has all of them."""
    return memory_pool.MLATokenToKVPoolFP4(
        256, page_size=page, dtype=torch.float4_e2m1fn_x2, kv_lora_rank=96, qk_rope_head_dim=32,
        layer_num=1, enable_memory_saver=False, **CPU,
    )  # fmt: skip


def mxfp8(tp: int, page: int) -> Any:
    """Return a pool of keys and values of MXFP8."""
    return memory_pool.MHATokenToKVPoolMXFP8(
        size=256, page_size=page, dtype=torch.float8_e4m3fn, head_num=HEADS // tp,
        head_dim=WIDE, layer_num=1, enable_memory_saver=False, **CPU,
    )  # fmt: skip


WIDE = 128


@pytest.mark.parametrize("make", [fp4, latents_of_fp4])
def test_sglang_finds_the_fp4_that_another_engine_wrote(make: Any) -> None:
    """SGLang's own code quantises what it stores, and returns the numbers that it reads."""
    producer, consumer = Side(2, 16, 0, make), Side(1, 32, 1, make)
    heads = HEADS if make is fp4 else 1
    model = {part: random(TOKENS, heads, WIDE) for part in "kv"}
    found: dict[str, list[Any]] = {"k": [], "v": []}
    for rank, pool in producer.pools.items():
        own = [model[p].chunk(2, 1)[rank.tp] if heads > 1 else model[p] for p in "kv"]
        pool.set_kv_buffer(SimpleNamespace(layer_id=0), producer.slots, *own)
        for part, buffer in zip("kv", raw(pool), strict=True):
            found[part].append(buffer[producer.slots])
    move(producer, consumer)
    (pool,) = consumer.pools.values()
    for part, buffer in zip("kv", raw(pool), strict=True):
        wanted = torch.cat(found[part], 1) if heads > 1 else found[part][0]
        assert torch.equal(wanted, buffer[consumer.slots])
        assert wanted.abs().max() > 1


def raw(pool: Any) -> tuple[Any, Any]:
    """Return the keys and values of layer 0 as SGLang computes them from FP4 and scales."""
    if isinstance(pool, memory_pool.MLATokenToKVPoolFP4):
        return (pool.get_key_buffer(0),) * 2
    method = pool.quant_method
    return (method.dequantize_kv_tensor(pool.k_buffer[0], pool.k_scale_buffer[0], 0),
            method.dequantize_kv_tensor(pool.v_buffer[0], pool.v_scale_buffer[0], 0))  # fmt: skip


@pytest.mark.parametrize(("page", "other"), [(16, 64), (128, 128)])
def test_sglang_finds_the_scales_of_mxfp8_that_another_engine_wrote(page: int, other: int) -> None:
    """The kernel that writes scales orders those of a page of 128 tokens."""
    producer, consumer = Side(2, page, 0, mxfp8), Side(1, other, 1, mxfp8)
    bytes_of = {part: torch.randint(0, 100, (TOKENS, HEADS, WIDE)).byte() for part in "kv"}
    scales = {part: torch.randint(1, 250, (TOKENS, HEADS, WIDE // 32)).byte() for part in "kv"}
    for rank, pool in producer.pools.items():
        own = [scales[part].chunk(2, 1)[rank.tp].contiguous() for part in "kv"]
        if pool.mxfp8_sf_interleaved:
            pool._write_scales(0, producer.slots, *(s.view(torch.float8_e8m0fnu) for s in own))
        else:  # torch cannot write elements of this type on a CPU.
            for buffer, values in zip(scales_of(pool), own, strict=True):
                buffer[producer.slots] = values
        for part, buffer in zip("kv", (pool.k_buffer, pool.v_buffer), strict=True):
            data = bytes_of[part].chunk(2, 1)[rank.tp]
            buffer[0].view(torch.uint8)[producer.slots] = data
    move(producer, consumer)
    (pool,) = consumer.pools.values()
    found = (
        [buffer[consumer.slots] for buffer in scales_of(pool)]
        if other != 128
        else [each.view(torch.uint8) for each in pool._read_scales(0, consumer.slots)]
    )
    for part, own in zip("kv", found, strict=True):
        assert torch.equal(scales[part], own)
    for part, buffer in zip("kv", (pool.k_buffer, pool.v_buffer), strict=True):
        assert torch.equal(bytes_of[part], buffer[0].view(torch.uint8)[consumer.slots])


def scales_of(pool: Any) -> tuple[Any, Any]:
    """Return the bytes of the scales of layer 0."""
    return tuple(each.view(torch.uint8) for each in pool.get_kv_scale_buffer(0))  # type: ignore[return-value]


def minimax(tp: int, page: int) -> Any:
    """Return a pool with a dense layer 0 and a sparse layer 1."""
    return memory_pool.MiniMaxSparseKVPool(
        size=128, page_size=page, dtype=torch.bfloat16, head_num=HEADS // tp, head_dim=SIZE,
        idx_head_dim=16, dense_layer_ids=[0], sparse_layer_ids=[1],
        disable_value_sparse_layer_ids=[1], start_layer=0, end_layer=2, **CPU,
    )  # fmt: skip


@pytest.mark.parametrize(("tp", "other"), [((2, 16), (1, 4)), ((1, 1), (2, 16))])
def test_sglang_finds_the_index_keys_of_sparse_layers(
    tp: tuple[int, int], other: tuple[int, int], model: Model
) -> None:
    """Heads are divided among ranks. Each rank has the index keys of all tokens."""
    producer, consumer = Side(*tp, 0, minimax), Side(*other, 1, minimax)
    keys = model.latent[0]
    for rank, pool in producer.pools.items():
        own = [model.kv[part].chunk(tp[0], 1)[rank.tp] for part in "kv"]
        for layer in range(2):
            pool.set_kv_buffer(SimpleNamespace(layer_id=layer), producer.slots, *own)
        pool.set_index_k_buffer(SimpleNamespace(layer_id=1), producer.slots, keys[..., :16])
    move(producer, consumer)
    for rank, pool in consumer.pools.items():
        for layer in range(2):
            for part, buffer in zip("kv", pool.get_kv_buffer(layer), strict=True):
                wanted = model.kv[part].chunk(other[0], 1)[rank.tp]
                assert torch.equal(wanted, buffer[consumer.slots])
        assert torch.equal(keys[..., :16], pool.get_index_k_buffer(1)[consumer.slots])


# Classes of SGLang with the name of a pool that are no pool of an engine's tokens.
NO_POOLS: dict[str, str] = {
    "abstract": "KVCache BaseSWAKVPool PageInterleaveKVPoolMixin SubPoolSpec MHASubPoolSpec"
    " MLASubPoolSpec MambaSubPoolSpec",
    "states, which belong to a pool": "MambaPool CompressStatePool NPUCompressStatePool"
    " UnifiedMambaPool UnifiedDraftMambaPool MambaCheckpointPool ShortConvPool NGramPool",
    "memory that other pools share": "UnifiedKVPool DeepSeekV4UnifiedKVPool",
    "Apple's devices": "ContiguousAttentionKVCache WindowedAttentionKVCache"
    " PoolBackedAttentionKVCache MlxAttentionKVPool MlxAuxiliaryStatePool"
    " MlxAuxiliaryStateReqToTokenPool _DummyKVCache",
    "requests": "ReqToTokenPool HybridReqToTokenPool UnifiedHybridReqToTokenPool"
    " DSV4NPUReqToTokenPool DSV4NPUDecodeReqToTokenPool",
    "embeddings": "EmbeddingPool",
    "allocators": "NPUPagedTokenToKVPoolAllocator DSV4NPUTokenToKVPoolAllocator"
    " BaseTokenToKVPoolAllocator HiSparseTokenToKVPoolAllocator"
    " DeepSeekV4HiSparseTokenToKVPoolAllocator PageInterleavePoolAllocator"
    " PagedTokenToKVPoolAllocator SWATokenToKVPoolAllocator PureSWATokenToKVPoolAllocator"
    " TokenToKVPoolAllocator UnifiedSWATokenToKVPoolAllocator"
    " UnifiedMambaSWATokenToKVPoolAllocator UnifiedMambaTokenToKVPoolAllocator",
    "memory of the host": "HostKVCache LogicalHostPool DeepSeekV4PagedHostPool"
    " DeepSeekV4StateHostPool DSAIndexerHostPoolBuilder DSAIndexerPoolHost PoolEntry HostPoolGroup"
    " HiSparseHostPoolMixin HostPoolStorageInfo HostPoolBuilder HostPoolDecl MambaPoolHost"
    " MHATokenToKVPoolHost MHATokenToKOnlyPoolHost HiSparseMHATokenToKVPoolHost"
    " AsymmetricMHATokenToKVPoolHost MHATokenToKVPoolMXFP8Host MiniMaxM3Nvfp4IndexKPoolHost"
    " MiniMaxM3Nvfp4MainKVPoolHost MLATokenToKVPoolHost PageInterleaveHostPool QSAIndexerPoolHost"
    " UnifiedPageEnvelopeHostPool HostPoolConfig HostPoolGroupConfig SparseKVCacheManager",
    "stores": "PoolExistenceBeliefs PoolBeliefPolicy KVCacheNamespace PoolName PoolHitPolicy"
    " PoolTransfer SidecarPoolSpec PoolTransferResult PPPrefetchPoolSpec AibrixKVCacheStorage"
    " AIBrixKVCacheStorageTest FlexibleKVCacheMemoryPool _PoolStorageCtx MockHostKVCache"
    " _HybridPoolContext _PoolFamily _RegisteredPool UnknownMhaPool _PoolRangePlan",
    "descriptions": "_CompressedPoolConfig DevicePoolInfo DevicePoolEntry DevicePoolGroup"
    " KVCacheBuildResult KVCacheConfigResult _InitializedPools _PoolSizes KVCacheConfigurator"
    " UnifiedPoolBundle UnifiedSWAPoolBundle KVCacheEventRecorder _RustKVCacheEventRecorder",
}
READ = {*POOL_KINDS, COMPRESSED_POOL}


def classes_of_sglang() -> dict[str, set[str]]:
    """Return the base classes of each class in SGLang's files, by name, without an import."""
    bases: dict[str, set[str]] = {}
    for file in Path(memory_pool.__file__).parents[1].rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"class \w*(KV|Pool)\w*", text) else ():
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                own = bases.setdefault(node.name, set())
                own |= names
                if {"mem_cache", "hardware_backend"} & {*file.parts}:
                    own.add("memory")
    return bases


def test_each_pool_of_sglang_is_read_or_refused_with_a_reason() -> None:
    """A class that a later SGLang adds belongs to one of these tables."""
    bases = classes_of_sglang()
    found = {"KVCache"}
    while new := {name for name, own in bases.items() if own & found} - found:
        found |= new
    others = {name for names in NO_POOLS.values() for name in names.split()}
    assert found - others == READ | {*POOLS_NOT_YET}
    assert not READ & {*POOLS_NOT_YET}
    named = {name for name, own in bases.items()
             if "memory" in own and re.search("Pool|KVCache", name)}  # fmt: skip
    assert named | found == READ | {*POOLS_NOT_YET} | others


def real_classes() -> list[Any]:
    """Return the classes of SGLang's pools whose modules a CPU can load."""
    modules = (
        memory_pool, swa_memory_pool, deepseek_v4_memory_pool, qsa_kv_pool, unified_memory_pool,
        unified_draft_pool, hisparse_memory_pool, dsa_cache_layer_split, page_interleave_pool,
        minimax_m3_nvfp4_pool,
    )  # fmt: skip
    found = {
        value for module in modules for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, memory_pool.KVCache)
    }  # fmt: skip
    return sorted(found, key=lambda kind: kind.__name__)


def extended(name: str, kind: Any) -> Any:
    """Return an object of a class called *name* that extends *kind*."""
    made: Any = type(name, (kind,), {})
    made.__abstractmethods__ = frozenset()
    return made.__new__(made)


def refused(pool: Any) -> SpecError:
    """Return the error of a pool that is refused for its class."""
    with pytest.raises(SpecError) as caught:
        adapter.engine_spec(pool)
    assert "pools" == caught.value.field
    return caught.value


@pytest.mark.parametrize("kind", real_classes())
def test_class_that_extends_one_of_sglang_is_refused(kind: Any) -> None:
    """It may keep another order, also if it has the same name."""
    name = kind.__name__
    for other in (f"My{name}", name):
        assert "expected" in str(refused(extended(other, kind)))
    if name not in READ:
        own = type(name, (), {})
        assert POOLS_NOT_YET.get(name, "one of") in str(refused(own()))


def test_pool_of_another_package_with_a_known_name_is_refused() -> None:
    """A platform's plug-in may extend the abstract class alone."""
    made = extended("MHATokenToKVPool", memory_pool.KVCache)
    assert type(made).__module__ in str(refused(made).value)


def test_recipe_that_extends_one_of_sglang_is_refused() -> None:
    """It has the name of the recipe that it extends."""
    pool = fp4(1, 16)
    made = type("Other", (type(pool.quant_method),), {})
    assert pool.quant_method.name == made.name
    pool.quant_method = made()
    with pytest.raises(SpecError) as caught:
        adapter.engine_spec(pool)
    assert "pools.quant_method" == caught.value.field


def test_state_pool_that_extends_sglangs_is_refused() -> None:
    pool = hybrid(1, 16, kda=False)
    pool.mamba_pool.__class__ = type("MambaPool", (memory_pool.MambaPool,), {})
    with pytest.raises(SpecError) as caught:
        adapter.engine_spec(pool)
    assert "pools.mamba_pool" == caught.value.field


def row(pool: Any, side: Side, slot: int) -> Any:
    """Return SGLang's table of requests. Request 1 has the slots of *side*, and a state."""
    table = torch.zeros(4, 256, dtype=torch.int32)
    table[1, :TOKENS] = side.slots
    own = memory_pool.HybridReqToTokenPool.__new__(memory_pool.HybridReqToTokenPool)
    own.req_to_token, own.mamba_pool = table, getattr(pool, "mamba_pool", None)
    own.req_index_to_mamba_index_mapping = torch.tensor([0, slot, 0, 0])
    return own


class Allocator:
    """SGLang's allocator, of which a sender uses the translation of slots."""

    def __init__(self, page: int) -> None:
        self.page_size = page

    def translate_kv_indices_for_transfer(self, slots: Any) -> Any:
        """Return *slots*: they are those of the pool."""
        return slots


def send(sender: Any, pool: Any, side: Side, page: int) -> None:
    """Let SGLang's scheduler send a prompt with *sender*."""
    kv_args = sender.kv_mgr.kv_args
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=Allocator(page),
        req_to_token_pool=row(pool, side, side.slot),
        disagg_metadata_buffers=SimpleNamespace(set_buf=lambda _: None),
        disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=SimpleNamespace(kv_args=kv_args)),
        disagg_prefill_pending_chunk_rids=set(),
        enable_staging=False,
    )
    asked = sender.request
    asked.kv = SimpleNamespace(req_pool_idx=1)
    asked.disagg_kv_sender, asked.rid = sender, "one"
    asked.start_send_idx = asked.disagg_decode_prefix_len = 0
    asked.extend_end = TOKENS
    prefill.SchedulerDisaggregationPrefillMixin._send_kv_chunk(scheduler, asked, last_chunk=True)


@pytest.mark.nixl
@pytest.mark.parametrize("kind", ["hybrid", "sparse"])
def test_scheduler_of_sglang_sends_states_through_the_backend(
    kind: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang names its kinds of states, and the slots and pages of a request."""
    monkeypatch.setenv("KVSPEC_SECRET", "0123456789abcdef")
    page, options = (16, {}) if kind == "hybrid" else (64, DSA)
    make = (lambda tp, page: hybrid(tp, page, kda=False)) if kind == "hybrid" else sparse
    first, second = (Side(1, page, seed, make, **options) for seed in (0, 1))
    pools = [side.pools[RankId()] for side in (first, second)]
    args = SimpleNamespace()
    utils.setup_state_kv_args(args, pools[0])
    own = iter(pools)
    changes = {"pool": lambda *_: next(own), "state_types": args.state_types, "kv_heads": HEADS,
               "model": serving.model(layers=4, fused=[True]),
               "index_order": options.get("index_order")}  # fmt: skip
    with serving.pair((1, page), (1, page), **changes) as (one, other, server):
        (manager,), (consumer,) = one.ranks, other.ranks
        manager.kv_args = args
        sender = plugin._classes()["SENDER"](manager, server.address, 7)
        sender.request = serving.request([*range(TOKENS)])
        sender.init(-(-TOKENS // page), 0)
        if kind == "hybrid":
            state = model.state(0, 1, rows_first=False)
            pools[0].mamba_pool.load_cpu_copy(state, torch.tensor([first.slot]))
        else:
            pools[0].index_k_with_scale_buffer[0].copy_(
                torch.randint(0, 256, pools[0].index_k_with_scale_buffer[0].shape)
            )
        send(sender, pools[0], first, page)
        assert sender.error is None, sender.error
        (receiver,) = serving.receivers(other, server.address, 7, sender.request)
        serving.until(WAITING, [receiver])
        pages = (second.slots[::page] // page).numpy()
        slots = row(pools[1], second, second.slot).req_index_to_mamba_index_mapping[1]
        receiver.send_metadata(pages, 0, [[slots.numpy()]], 0)
        serving.until(SUCCESS, [receiver])
        assert consumer.session.stats().counters.bytes_read > 0
    if kind == "hybrid":
        (conv,), temporal = pools[1].mamba_pool.get_cpu_copy(torch.tensor([second.slot]))
        assert torch.equal(state[0][0], conv)
        assert torch.equal(state[1], temporal)
    else:
        found = [pool.index_k_with_scale_buffer[0] for pool in pools]
        sources = (first.slots[::page] // page)[:1]
        assert torch.equal(found[0][sources], found[1][torch.from_numpy(pages[:1])])
