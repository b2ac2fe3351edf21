"""Pools that SGLang's own classes build on a CPU. SGLang's own code writes and reads them.

A nightly workflow installs SGLang.
"""

from __future__ import annotations

import ast
import ctypes
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders import request as request_of

import kvspec
from kvspec import RankId
from kvspec.adapters import sglang as adapter
from kvspec.adapters.sglang.pools import POOL_KINDS, POOLS_NOT_YET
from kvspec.testing.world import described

pytestmark = pytest.mark.adapters

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns of each kernel that a CPU does not have.
    pytest.importorskip("sglang", reason="SGLang is not installed")
    import torch
    from sglang.srt import runtime_context
    from sglang.srt.configs import mamba_utils
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
        self.index = torch.randint(0, 256, (2, TOKENS, 132), dtype=torch.uint8)

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
    assert hasattr(runtime_context, "get_parallel")
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


def test_sglang_finds_the_latents_and_index_keys_of_another_engine(model: Model) -> None:
    """A page has the keys of all its tokens, and then their scales."""
    producer, consumer = (
        Side(tp, 64, seed, sparse, index_order="rows") for tp, seed in ((1, 0), (2, 3))
    )
    assert ("layers.0.indexer",) == producer.engine.group("indexer").layers
    (pool,) = producer.pools.values()
    for layer in range(2):
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), producer.slots, model.latent[layer],
                           None)  # fmt: skip
    # SGLang moves tokens between slots of one pool, so a page of known bytes lies at the end.
    scratch = torch.arange(256, 256 + 64)
    pages = pool.index_k_with_scale_buffer[0]
    for first in (0, 64):
        own = model.index[0, first : first + 64]
        own = torch.cat([own, torch.zeros(64 - len(own), 132, dtype=torch.uint8)])
        pages[4] = torch.cat([own[:, :128].flatten(), own[:, 128:].flatten()])
        targets = producer.slots[first : first + 64]
        pool.index_key_cache.move(targets, scratch[: len(targets)])
    move(producer, consumer)
    for own in consumer.pools.values():
        for layer in range(2):
            latents = own.get_key_buffer(layer)[consumer.slots]
            assert torch.equal(model.latent[layer], latents)
        for first in (0, 64):
            sources = consumer.slots[first : first + 64]
            own.index_key_cache.move(scratch[: len(sources)], sources)
            page = own.get_index_k_with_scale_buffer(0)[4]
            keys, scales = page[: 64 * 128].view(64, 128), page[64 * 128 :].view(64, 4)
            found = torch.cat([keys, scales], 1)[: len(sources)]
            assert torch.equal(model.index[0, first : first + 64], found)


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
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
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
