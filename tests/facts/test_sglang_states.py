"""Tests the SGLang adapter on pools of several kinds: recurrent states, indexers, sparse layers.

Between engines of two makers, equal bytes of a state may have another meaning. Each such difference
is bridged, or refused by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sglang_like as like
import vllm_like
from builders import request as request_of
from moved import Caches, moved
from refused import refusal
from sglang_like import HybridLinearKVPool, MambaPool, MHATokenToKVPool, pages_to_slots

import kvspec
from kvspec import RankId
from kvspec.adapters import sglang, vllm
from kvspec.testing.world import described

# A cache contains only addresses, so the pools must stay alive.
KEPT: list[Any] = []
TOKENS, PAGE = 21, 4

# Sizes of a gated delta net: 2 key heads of 4, and 4 value heads of 6. K - 1 is 3.
KEY, VALUE = 2 * 4, 4 * 6
GROUPS = [KEY, KEY, VALUE]


def delta_net(tp: int = 1, *, rows_first: bool = False, rows: int = 3, **more: Any) -> MambaPool:
    """Return the states of a gated delta net on one of *tp* ranks."""
    conv = (sum(GROUPS) // tp, rows)
    conv = conv[::-1] if rows_first else conv
    temporal = (4 // tp, 6, 4)
    return MambaPool(4, [0, 2], conv, temporal, groups=GROUPS, rows_first=rows_first, **more)


def hybrid(states: MambaPool, heads: int = 2) -> HybridLinearKVPool:
    """Return a pool whose layer 1 attends."""
    attends = MHATokenToKVPool(40, heads, page_size=PAGE, layer_num=1)
    KEPT.append(HybridLinearKVPool(attends, [1], states))
    return KEPT[-1]  # type: ignore[no-any-return]


def side(
    make: Callable[[int], Any], tp: int = 1, slot: int = 2, **options: Any
) -> tuple[kvspec.EngineSpec, Caches, Any]:
    """Return an engine whose ranks have the pools of *make*, its caches and its tables."""
    parallel = sglang.parallel_config(tp)
    pools = {rank: make(tp) for rank in parallel.ranks}
    KEPT.append(pools)
    own = {"parallel": parallel, "total_num_kv_heads": 2, "layer_name": "model.layers.{}.attn"}
    engine = sglang.engine_spec(pools[RankId()], **own | options)
    caches = {rank: sglang.rank_cache(engine, rank, pool) for rank, pool in pools.items()}
    pages = [slot + page for page in range(-(-TOKENS // PAGE))]
    slots = {"full": pages_to_slots(pages, PAGE, TOKENS), "state": slot}
    return engine, caches, sglang.block_tables(engine, slots)


def faults(producer: Any, consumer: Any) -> list[str]:
    """Move the request between two sides, and return the oracle's faults."""
    request = request_of(TOKENS, producer[2], consumer[2])
    return moved(producer[0], consumer[0], request, (producer[1], consumer[1]))


def mismatch(producer: Any, consumer: Any) -> str:
    """Return the field in which a transfer is refused."""
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec.plan_transfer(producer[0], consumer[0])
    return caught.value.mismatches[0].field.rpartition(" and ")[2]


def mismatch_fields(producer: Any, consumer: Any) -> set[str]:
    """Return the last words of all fields in which two engines differ."""
    found = kvspec.mismatches(producer[0], consumer[0])
    return {each.field.rpartition(".")[2] for each in found}


KINDS: dict[str, tuple[Callable[[int], MambaPool], dict[str, Any]]] = {
    "gated delta net": (delta_net, {}),
    "rows first": (lambda tp: delta_net(tp, rows_first=True), {}),
    "CPU": (lambda tp: delta_net(tp, device="cpu"), {}),
    "mamba 1": (lambda tp: MambaPool(4, [0, 2], (8 // tp, 3), (8 // tp, 1, 5)), {}),
    "mamba 2": (lambda tp: MambaPool(4, [0, 2], (40 // tp, 3), (4 // tp, 6, 4)), {"n_groups": 2}),
    "short conv": (lambda tp: MambaPool(4, [0, 2], (16 // tp, 2), (1, 16, 0)), {}),
    "linear": (lambda tp: MambaPool(4, [0, 2], (0, 0), (4 // tp, 6, 6)), {}),
}


@pytest.mark.parametrize(("tp", "other"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_states_move_between_unequal_tp(kind: str, tp: int, other: int) -> None:
    """A slot is a block of the group of states. The attention of the model moves with them."""
    states, options = KINDS[kind]
    make = lambda size: hybrid(states(size), 2 // size)  # noqa: E731
    producer, consumer = side(make, tp, 3, **options), side(make, other, 1, **options)
    assert ["full", "state"] == [group.name for group in producer[0].groups]
    assert ("layers.0.state", "layers.2.state") == producer[0].group("state").layers
    assert [] == faults(producer, consumer)


def test_parts_of_states_are_those_of_other_makers() -> None:
    """The parts are those of vLLM, so a state moves between both, also between unequal TP."""
    shapes, dtypes = ((40, 3), (4, 6, 4)), ("float16", "float32")
    state = vllm_like.MambaSpec(block_size=8, shapes=shapes, dtypes=dtypes, mamba_type="GDN_ATTN")
    names = ["model.layers.0.linear_attn", "model.layers.2.linear_attn"]
    for order in ("DS", "SD"):
        own = shapes if order == "DS" else (shapes[0][::-1], shapes[1])
        state = vllm_like.MambaSpec(block_size=8, shapes=own, dtypes=dtypes, mamba_type="GDN_ATTN")
        engine = vllm_like.engine_spec(
            vllm_like.config((names, state)), layout="LBHNC", conv_layout=order
        )
        tensors = {
            name: [np.zeros((5, *shape), dtype) for shape, dtype in zip(own, dtypes, strict=True)]
            for name in names
        }
        KEPT.append(tensors)
        cache = {RankId(): vllm.rank_cache(engine, RankId(), tensors)}
        # The peer has no other layers.
        consumer = side(lambda tp: hybrid(delta_net(tp), 2 // tp), 2,
                        state_name="model.layers.{}.linear_attn")  # fmt: skip
        own, caches, tables = alone(consumer, "state")
        request = request_of(TOKENS, {"group0": [3]}, tables)
        assert [] == moved(engine, own, request, (cache, caches))


def test_conv_state_with_rows_first_is_transposed() -> None:
    """GDN keeps [channels, rows], and KDA [rows, channels]: equal bytes would be other inputs."""
    pools = [hybrid(delta_net(rows_first=order)) for order in (False, True)]
    first, second = (side(lambda _, pool=pool: pool) for pool in pools)
    conv, other = (pool.mamba_pool.mamba_cache.conv[0] for pool in pools)
    conv[:, 2] = np.arange(2 * 120).reshape(2, 40, 3)
    plan = kvspec.plan_transfer(first[0], second[0])
    table = kvspec.build_table(plan, first[1][RankId()], second[1][RankId()])
    for start, stop, length in described(table, request_of(TOKENS, first[2], second[2])):
        ctypes.memmove(stop, start, length)
    assert np.array_equal(conv[:, 2].swapaxes(1, 2), other[:, 2])
    assert conv[:, 2].tobytes() != other[:, 2].tobytes()


def test_layout_of_kernels_for_cpus_is_read_from_the_strides() -> None:
    """With AMX, a tensor has the shape [channels, rows], and rows are outside in memory."""
    states = delta_net()
    conv = states.mamba_cache.conv
    conv[0] = np.zeros((2, 5, 3, 40), np.float16).swapaxes(2, 3)
    engine, caches, tables = side(lambda _: hybrid(states))
    assert "LBNHC" == engine.group("state").layout
    assert "LBHNC" == side(lambda tp: hybrid(delta_net(tp)))[0].group("state").layout
    other = side(lambda tp: hybrid(delta_net(tp), 2 // tp), 2)
    assert [] == faults((engine, caches, tables), other)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("1 more.ssm_dtype", {"dtypes": ("float16", "float16")}),
        ("1 more.dtype", {"dtypes": ("float32", "float32")}),
        ("1 more.conv_q.states", {"rows": 4}),
        # SGLang's kernels for CPUs perhaps write keys before values.
        ("1 more.parts", {"device": "cpu"}),
    ],
)
def test_states_with_other_meaning_are_refused_by_name(field: str, changes: Any) -> None:
    """Engines keep K - 1 columns, and transformers K. Some keep states in the type of the model."""
    own = side(lambda _: hybrid(delta_net()))
    assert field == mismatch(own, side(lambda _: hybrid(delta_net(**changes))))


def test_state_of_keys_first_is_refused_if_its_sizes_differ() -> None:
    """A state of transformers has [heads, keys, values]. Equal sizes would hide that."""
    swapped = MambaPool(4, [0, 2], (40, 3), (4, 4, 6), groups=GROUPS)
    error = refusal(lambda: side(lambda _: hybrid(swapped)))
    assert "pools.mamba_pool.conv_shard_groups" == error.field


def test_window_of_one_token_more_is_refused() -> None:
    """SGLang's 128 earlier tokens and the query are a window of 129."""
    pool = MHATokenToKVPool(40, 2, page_size=PAGE, layer_num=1)
    engines = [sglang.engine_spec(pool, windows={0: window}) for window in (128, 129)]
    (found,) = kvspec.mismatches(*engines)
    assert "layers.0.sliding_window" == found.field


def test_latents_and_states_move_together() -> None:
    """Kimi-Linear attends with latents. Both are in the model, and each has slots of its own."""

    def make(tp: int) -> Any:
        latents = like.MLATokenToKVPool(40, page_size=PAGE, layer_num=1)
        return HybridLinearKVPool(latents, [1], delta_net(tp, rows_first=True))

    assert [] == faults(side(make, 2, 1), side(make, 1, 3))


def sparse(
    page: int = PAGE, *, skipped: tuple[bool, ...] = (False, True, False), **more: Any
) -> Any:
    """Return a pool of latents, of which layer 1 takes the tokens of another layer."""
    return like.DSATokenToKVPool(page * 10, skipped, page_size=page, layer_num=len(skipped), **more)


DSA: dict[str, Any] = {"index_order": "rows", "index_hadamard": False}


def test_pages_of_an_indexer_move_with_the_latents() -> None:
    """They have the slots of the latents. Only layers that choose tokens have them."""
    producer, consumer = (
        side(lambda _: sparse(), tp, slot, **DSA) for tp, slot in ((1, 1), (2, 4))
    )
    groups = {group.name: group.layers for group in producer[0].groups}
    assert ("layers.0.indexer", "layers.2.indexer") == groups["indexer"]
    assert 3 == len(groups["full"])
    assert [] == faults(producer, consumer)


@pytest.mark.parametrize("block", [2, 4, 12])
def test_index_keys_move_to_blocks_of_vllm(block: int) -> None:
    """Both makers keep all keys of a page, and then their scales."""
    names = ["layers.0.indexer", "layers.2.indexer"]
    spec = vllm_like.changed(
        vllm_like.MLAAttentionSpec(block_size=block, head_size=132, dtype="uint8"),
        "cache_role", "INDEXER",
    )  # fmt: skip
    backend = "vllm.v1.attention.backends.mla.indexer.DeepseekV32IndexerBackend"
    peer = vllm_like.engine_spec(vllm_like.config((names, spec)), backends=backend, variants="rows")
    tensors = {name: np.zeros((14, block, 132), np.uint8) for name in names}
    KEPT.append(tensors)
    caches = {RankId(): vllm.rank_cache(peer, RankId(), tensors)}
    blocks = {"group0": [*range(1, 2 - -TOKENS // block)][::-1]}
    own = alone(side(lambda _: sparse(), 2, **DSA), "indexer")
    there = request_of(TOKENS, own[2], blocks), (own[1], caches)
    assert [] == moved(own[0], peer, *there)
    back = request_of(TOKENS, blocks, own[2], cached_tokens=5), (caches, own[1])
    assert [] == moved(peer, own[0], *back)


def alone(whole: Any, name: str) -> Any:
    """Return a side that has one group of the side *whole*."""
    engine, caches, tables = whole
    own = kvspec.EngineSpec(groups=[engine.group(name)], parallel=engine.parallel, null_block=0)
    found = {}
    for rank, cache in caches.items():
        regions = [region for region in cache.regions if region.group == name]
        found[rank] = kvspec.RankCache(own, rank, regions, cache.memory)
    return own, found, {name: tables[name]}


@pytest.mark.parametrize("more", [{}, {"index_order": "shuffled"}, {"index_hadamard": True}])
def test_index_keys_of_older_amd_gpus_do_not_move_to_others(more: dict[str, Any]) -> None:
    """A byte of e4m3fnuz is half of the number that it is as e4m3fn."""
    options = DSA | more
    plain, other = (
        side(lambda _: sparse(), fp8_dtype=name, **options)
        for name in ("float8_e4m3fn", "float8_e4m3fnuz")
    )
    assert {"dtype"} == set(mismatch_fields(plain, other))
    assert [] == faults(
        other, side(lambda _: sparse(), 1, 4, fp8_dtype="float8_e4m3fnuz", **options)
    )


@pytest.mark.parametrize("option", [{"index_order": "shuffled"}, {"index_hadamard": True}])
def test_index_keys_of_another_order_or_meaning_are_refused(option: dict[str, Any]) -> None:
    """They move whole to keys of the same order and meaning."""
    plain, other = (side(lambda _: sparse(), **DSA | more) for more in ({}, option))
    assert "page_format" in mismatch_fields(plain, other)
    assert [] == faults(other, side(lambda _: sparse(), 1, 4, **DSA | option))
    both = side(lambda _: sparse(), index_order="shuffled", index_hadamard=True)
    assert "page_format" in mismatch_fields(other, both)


def test_packed_latents_of_eight_bits_have_no_scales_elsewhere() -> None:
    """A row has 512 elements of 8 bits, their scales, and 64 rotated elements of 16 bits."""

    def make(_: int) -> Any:
        pool = sparse(kv_cache_dim=656, dtype="uint8")
        pool.dtype, pool.dsa_kv_cache_store_fp8 = "float8_e4m3fn", True
        pool.kv_lora_rank, pool.qk_rope_head_dim = 512, 64
        return pool

    producer, consumer = (side(make, slot=slot, **DSA) for slot in (1, 3))
    spec = producer[0].group("full").spec
    assert (576, 656) == (spec.head_size, spec.state_content_bytes)  # type: ignore[attr-defined]
    assert [] == faults(producer, consumer)


def test_index_keys_of_sparse_layers_are_on_every_rank() -> None:
    """MiniMax divides keys and values among ranks. Each rank has the index key of each token."""

    def make(tp: int) -> Any:
        main = MHATokenToKVPool(40, 2 // tp, page_size=PAGE, layer_num=3)
        return like.MiniMaxSparseKVPool(main, like.MHATokenToKOnlyPool(
            40, 6, page_size=PAGE, layer_num=2), [0, 2])  # fmt: skip

    producer, consumer = side(make, 2, 1), side(make, 1, 3)
    assert ("layers.0.indexer", "layers.2.indexer") == producer[0].group("indexer").layers
    assert [] == faults(producer, consumer)


def changed(pool: Any, **fields: Any) -> Any:
    """Return *pool* with other fields."""
    vars(pool).update(fields)
    return pool


def states(**fields: Any) -> Any:
    """Return a hybrid pool whose `MambaPool` has other fields."""
    return hybrid(changed(delta_net(), **fields))


def cache(**fields: Any) -> Any:
    """Return a hybrid pool whose states have other fields."""
    return states(mamba_cache=changed(delta_net().mamba_cache, **fields))


# A pool, options, field and value of the error, and a word of its requirement.
REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str, Any, str]] = [
    (lambda: changed(hybrid(delta_net()), mamba_pool=None), {}, "mamba_pool", "NoneType",
     "MambaPool"),
    (lambda: states(_slot_siblings=[1]), {}, "mamba_pool._slot_siblings", 1, "empty"),
    (lambda: states(conv_slice_axis=2), {}, "mamba_pool.conv_slice_axis", 2, "channels"),
    (lambda: states(mamba_layer_ids=[0]), {}, "mamba_pool.mamba_cache.conv[0].shape",
     (2, 5, 40, 3), "1 layers"),
    (lambda: states(conv_shard_groups=[8, 8, 48]), {}, "mamba_pool.conv_shard_groups",
     (8, 8, 48), "not yet"),
    (lambda: states(conv_shard_groups=None), {}, "n_groups", None, "gated delta nets"),
    (lambda: cache(replayssm_d=np.zeros(1)), {}, "mamba_pool.mamba_cache.replayssm_d",
     "a tensor", "None"),
    (lambda: cache(conv=[np.zeros((2, 5, 4, 3))] * 2), {}, "mamba_pool.mamba_cache.conv",
     "2 tensors", "one"),
    (lambda: cache(temporal=np.zeros((2, 5, 4, 3))), {}, "mamba_pool.mamba_cache.temporal.shape",
     (2, 5, 4, 3), "5 axes"),
    (lambda: changed(hybrid(delta_net()), full_kv_pool=like.MHATokenToKOnlyPool(8, 4)), {},
     "full_kv_pool", "MHATokenToKOnlyPool", "DSATokenToKVPool"),
    (lambda: changed(hybrid(delta_net()), full_attention_layer_id_mapping={1: 1}), {},
     "full_attention_layer_id_mapping", [1], "a layer"),
    (sparse, {}, "index_order", None, "'rows'"),
    (lambda: changed(sparse(), index_kpool=2), DSA, "index_kpool", 2, "ring"),
    (lambda: changed(sparse(), index_page_size=2), DSA, "index_page_size", 2, "4"),
    (lambda: changed(sparse(), index_k_with_scale_buffer=[np.zeros((9, 80))] * 3), DSA,
     "index_k_with_scale_buffer", 80, "128 + 4"),
    (sparse, {"index_order": "rows"}, "index_hadamard", None, "Hadamard"),
    (lambda: changed(sparse(), skip_topk_layers=[False]), DSA,
     "skip_topk_layers", 1, "3"),
    (sparse, {**DSA, "parallel": sglang.parallel_config(2, dcp_size=2)},
     "dcp_size", 2, "indexer"),
    (sparse, {**DSA, "index_name": "l"}, "index_name", "l", "{}"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options", "field", "value", "requirement"), REFUSED)
def test_unknown_states_and_indexers_are_refused(
    make: Callable[[], Any], options: dict[str, Any], field: str, value: object, requirement: str
) -> None:
    error = refusal(lambda: sglang.engine_spec(make(), **options))
    assert field == error.field.removeprefix("pools.")
    assert value == error.value
    assert requirement in error.expected


DRAFTS: dict[str, Callable[[], Any]] = {
    "indexer": sparse,
    "states": lambda: hybrid(delta_net()),
    "windows": lambda: like.SWAKVPool(
        MHATokenToKVPool(8, 2, layer_num=0), MHATokenToKVPool(8, 2, layer_num=1), [True]
    ),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_draft_with_windows_indexers_or_states_is_refused(kind: str) -> None:
    """Its layers would get the names and the slots of the model's own layers."""
    pool, draft = MHATokenToKVPool(8, 2), DRAFTS[kind]()
    error = refusal(lambda: sglang.engine_spec(
        pool, draft_pool=draft, sliding_window=4, **DSA))  # fmt: skip
    assert ("draft_pool", type(draft).__name__) == (error.field, error.value)
    assert "not yet: drafts" in error.expected
    error = refusal(lambda: sglang.rank_cache(sglang.engine_spec(pool), RankId(), pool, draft))
    assert "draft_pool" == error.field


def test_state_needs_one_slot_that_is_not_null() -> None:
    engine = side(lambda _: hybrid(delta_net()))[0]
    for slot in (0, [1, 2], None):
        error = refusal(lambda slot=slot: sglang.block_tables(
            engine, {"full": range(4, 8), "state": slot}))  # fmt: skip
        assert "slots['state']" == error.field
    error = refusal(lambda: sglang.block_tables(engine, range(4, 8)))
    assert "slots" == error.field
