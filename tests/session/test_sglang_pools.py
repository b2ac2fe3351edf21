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
from kvspec.adapters.sglang.describing import INDEXER_FLAGS
from kvspec.adapters.sglang.pools import POOL_KINDS, POOLS_NOT_YET
from kvspec.testing.world import described

pytestmark = pytest.mark.adapters

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it defines a kernel.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns of each kernel that a CPU does not have.
    pytest.importorskip("sglang", reason="SGLang is not installed")
    import torch
    from sglang.srt.configs import mamba_utils
    from sglang.srt.disaggregation import prefill, utils
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.mem_cache import memory_pool

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
    """The indexer of vLLM always leaves it out. The adapter reads the same flags as this method."""
    own = dict.fromkeys(INDEXER_FLAGS, False)
    keys = torch.rand(4, 128)
    rotate = dsa_indexer.Indexer._maybe_rotate
    assert keys is rotate(SimpleNamespace(**own | {fused: True}), keys)
    with pytest.raises(NotImplementedError, match="hadamard"):  # Its kernel is for CUDA only.
        rotate(SimpleNamespace(**own), keys)


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


def test_each_pool_of_sglang_is_read_or_refused_with_a_reason() -> None:
    """A class is found by its base classes in SGLang's files, without an import."""
    bases: dict[str, set[str]] = {}
    for file in Path(memory_pool.__file__).parents[1].rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"class \w*KV\w*", text) else ():
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                bases.setdefault(node.name, set()).update(names)
    found = {"KVCache"}
    while new := {name for name, own in bases.items() if own & found} - found:
        found |= new
    # The first two are abstract, and the third stands for a pool on Apple's devices.
    others = {"KVCache", "BaseSWAKVPool", "_DummyKVCache"}
    assert found - others == {*POOL_KINDS, *POOLS_NOT_YET}
    assert not set(POOL_KINDS) & set(POOLS_NOT_YET)


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
