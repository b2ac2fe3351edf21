"""Tests the SGLang adapter: engines and caches from token pools, and block tables from slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sglang_like as like
import vllm_like
from builders import request as request_of
from moved import Caches, moved
from refused import refusal
from sglang_like import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool, pages_to_slots

import kvspec
from kvspec import RankId
from kvspec.adapters import sglang, vllm
from kvspec.stored import StoredSpec

# A cache contains only addresses, so the pools must stay alive.
KEPT: list[Any] = []


def keep(pool: Any) -> Any:
    """Return *pool*, and keep it alive until the tests end."""
    KEPT.append(pool)
    return pool


def caches(engine: kvspec.EngineSpec, make: Callable[[RankId], Any]) -> Caches:
    """Return the cache of every rank. *make* creates the pool of a rank."""
    return {
        rank: sglang.rank_cache(engine, rank, keep(make(rank))) for rank in engine.parallel.ranks
    }


def tables(engine: kvspec.EngineSpec, pages: list[int], count: int) -> Any:
    """Return the block tables of *count* tokens on *pages*."""
    page = engine.virtual_block(engine.groups[0])
    return sglang.block_tables(engine, pages_to_slots(pages, page, count))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("tp", "other"), [(1, 2), (4, 1), (2, 3)])
def test_heads_move_between_unequal_tp_and_page_sizes(page: int, tp: int, other: int) -> None:
    """Keys and values in buffers [slots, heads, size] move from pages of 1 or 16 tokens to 4."""
    count = 37
    sides = []
    for size, tokens in ((tp, page), (other, 4)):
        parallel = sglang.parallel_config(size)
        local = [len(parallel.sharding(3).ranges[rank]) for rank in range(size)]

        def make(rank: RankId, local: Any = local, tokens: int = tokens) -> Any:
            return MHATokenToKVPool(64, local[rank.tp], 8, 6, page_size=tokens)

        pool = make(RankId())
        engine = sglang.engine_spec(pool, parallel=parallel, total_num_kv_heads=3)
        needed = -(-count // tokens)
        ids = [int(page) + 1 for page in np.random.default_rng(size).permutation(64 // tokens)]
        sides.append((engine, caches(engine, make), tables(engine, ids[:needed], count)))
    request = request_of(count, sides[0][2], sides[1][2], cached_tokens=5)
    assert [] == moved(sides[0][0], sides[1][0], request, (sides[0][1], sides[1][1]))


@pytest.mark.parametrize(("dcp", "page"), [(1, 1), (2, 1), (2, 4), (4, 4)])
def test_latent_moves_from_context_parallel_ranks(dcp: int, page: int) -> None:
    """Slot s is slot s // dcp of rank s % dcp, so a page of the request spans all ranks."""
    count, parallel = 45, sglang.parallel_config(4, dcp_size=dcp)

    def make(_: RankId) -> Any:
        return MLATokenToKVPool(64, page_size=page)

    producer = sglang.engine_spec(make(RankId()), parallel=parallel)
    consumer = sglang.engine_spec(MLATokenToKVPool(64, page_size=16))
    virtual = page * dcp
    assert virtual == producer.virtual_block(producer.groups[0])
    ids = [page + 1 for page in range(-(-count // virtual))][::-1]
    request = request_of(count, tables(producer, ids, count), tables(consumer, [2, 1, 4], count))
    sides = caches(producer, make), caches(consumer, lambda _: MLATokenToKVPool(64, page_size=16))
    assert [] == moved(producer, consumer, request, sides)


def test_region_address_matches_slot_of_context_rank() -> None:
    """With DCP 2, token 5 of a request whose slots begin at 8 is in slot 13: slot 6 of rank 1."""
    parallel = sglang.parallel_config(2, dcp_size=2)
    pool = keep(MLATokenToKVPool(16, page_size=2))
    engine = sglang.engine_spec(pool, parallel=parallel)
    table = sglang.block_tables(engine, range(8, 16))["full"]
    assert [2, 3] == table.block_ids.tolist()
    context = engine.context(engine.groups[0], RankId(tp=1))
    assert context.owns(np.array([5]))[0]
    local = context.local(5)
    assert 2 == local
    cache = sglang.rank_cache(engine, RankId(tp=1), pool)
    address = cache.region("layers.0", "latent").address(3, 0, local % 2)
    assert pool.kv_buffer[0][6].ctypes.data == address


def window_pool(_: RankId | None = None) -> SWAKVPool:
    """Return a pool of one full layer, between two with a sliding window."""
    pools = (MHATokenToKVPool(64, 2, page_size=4, layer_num=layers) for layers in (1, 2))
    return SWAKVPool(*pools, windowed=[True, False, True])


def test_layers_with_window_in_plain_pool_have_their_own_group() -> None:
    """The pool keeps all tokens, but only those inside the window move."""
    keys = {"swa": kvspec.KeyContent(rotary="halves", rotary_size=4)}
    pool, windows = MHATokenToKVPool(64, 2, page_size=4, layer_num=3), {0: 9, 2: 9}
    engine = sglang.engine_spec(pool, windows=windows, key_content=keys)
    assert {"full": ("layers.1",), "swa": ("layers.0", "layers.2")} == {
        group.name: group.layers for group in engine.groups
    }
    assert [None, keys["swa"]] == [group.spec.key_content for group in engine.groups]
    sides = []
    for first in (1, 7):
        slots = pages_to_slots([first + page for page in range(5)], 4, 18)
        sides.append(sglang.block_tables(engine, {"full": slots, "swa": slots}))

    def cache(rank: RankId) -> Any:
        own = keep(MHATokenToKVPool(64, 2, page_size=4, layer_num=3))
        return sglang.rank_cache(engine, rank, own, windows=windows)

    both = [{rank: cache(rank) for rank in engine.parallel.ranks} for _ in range(2)]
    assert [] == moved(engine, engine, request_of(18, *sides), (both[0], both[1]))
    alone = sglang.engine_spec(pool, windows=dict.fromkeys(range(3), 9))
    assert ["swa"] == [group.name for group in alone.groups]


def test_window_layers_move_with_pool_and_slots_of_their_own() -> None:
    """Tokens before the window have slot 0 and do not move. One layer of three is full."""
    engine = sglang.engine_spec(window_pool(), sliding_window=9)
    assert {"full": ("layers.1",), "swa": ("layers.0", "layers.2")} == {
        group.name: group.layers for group in engine.groups
    }
    sides = []
    for first in (1, 7):
        swa = pages_to_slots([first + page for page in range(5)], 4, 18)
        swa[:8] = 0  # The query at position 18 reads tokens from 10 on, in the third page.
        slots = {"full": pages_to_slots([first + 6 - page for page in range(5)], 4, 18), "swa": swa}
        sides.append(sglang.block_tables(engine, slots))
    assert [0, 0] == sides[0]["swa"].block_ids[:2].tolist()
    request = request_of(18, *sides)
    both = caches(engine, window_pool), caches(engine, window_pool)
    assert [] == moved(engine, engine, request, both)


def test_window_pool_rejects_missing_window_and_slots() -> None:
    """A window needs its size, slots of its own, and as many slots as the other groups."""
    engine = sglang.engine_spec(window_pool(), sliding_window=9)
    error = refusal(lambda: sglang.engine_spec(window_pool()))
    assert ("sliding_window", None) == (error.field, error.value)
    error = refusal(lambda: sglang.block_tables(engine, range(18)))
    assert ("slots", "range") == (error.field, error.value)
    shorter = {"full": range(24, 42), "swa": range(8, 20)}
    error = refusal(lambda: sglang.block_tables(engine, shorter))
    assert ("slots['swa']", "12 slots") == (error.field, error.value)
    assert "18" in error.expected


def test_draft_moves_whole_from_every_context_rank() -> None:
    """The latent is sharded over 2 context ranks. Each of them has all tokens of the draft."""
    parallel = sglang.parallel_config(2, dcp_size=2)
    sharded = [len(parallel.sharding(3).ranges[rank]) for rank in (0, 1)]
    pools = {
        rank: (
            keep(MLATokenToKVPool(32, page_size=4)),
            keep(MHATokenToKVPool(64, sharded[rank], page_size=4, layer_num=1)),
        )
        for rank in (0, 1)
    }
    producer = sglang.engine_spec(
        pools[0][0], draft_pool=pools[0][1], parallel=parallel, total_num_kv_heads=3
    )
    assert [True, False] == [group.context_sharded for group in producer.groups]
    latent_pool = keep(MLATokenToKVPool(32, page_size=4))
    draft_pool = keep(MHATokenToKVPool(32, 3, page_size=4, layer_num=1))
    consumer = sglang.engine_spec(latent_pool, draft_pool=draft_pool)
    request = request_of(20, tables(producer, [3, 1, 2], 20), tables(consumer, [8, 3, 4, 1, 5], 20))
    assert [6, 7, 2, 3, 4] == request.producer_blocks["draft"].block_ids.tolist()
    sides = (
        {
            RankId(tp=rank): sglang.rank_cache(producer, RankId(tp=rank), *pools[rank])
            for rank in (0, 1)
        },
        {RankId(): sglang.rank_cache(consumer, RankId(), latent_pool, draft_pool)},
    )
    assert [] == moved(producer, consumer, request, sides)


def test_vllm_blocks_move_into_sglang_pages() -> None:
    """The sides have TP 2 and TP 1, and blocks of 16 tokens and 1 token."""
    heads = vllm_like.FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=4, dtype="bfloat16"
    )
    names = [f"model.layers.{number}.self_attn.attn" for number in (0, 1)]
    producer = vllm_like.engine_spec(
        vllm_like.config((names, heads)),
        parallel=kvspec.ParallelConfig(tp_size=2),
        total_num_kv_heads=2,
    )
    side = {}
    for rank in producer.parallel.ranks:
        views = {name: keep(np.zeros((6, 1, 16, 8), np.uint16)) for name in names}
        side[rank] = vllm.rank_cache(producer, rank, views)
    pool = keep(MHATokenToKVPool(40, 2))
    consumer = sglang.engine_spec(pool, layer_name="model.layers.{}.self_attn.attn")
    slots = np.random.default_rng(3).permutation(np.arange(1, 41))[:33]
    request = request_of(33, {"group0": [4, 1, 2]}, sglang.block_tables(consumer, slots))
    cache = {RankId(): sglang.rank_cache(consumer, RankId(), pool)}
    assert [] == moved(producer, consumer, request, (side, cache))


def test_engine_has_one_pool_for_each_stage() -> None:
    """Layers have consecutive numbers over all stages. The last stage has the draft."""
    pools = [
        keep(MLATokenToKVPool(8, layer_num=layers, start_layer=start))
        for layers, start in ((3, 0), (2, 3))
    ]
    parallel = sglang.parallel_config(1, 2)
    engine = sglang.engine_spec(pools, parallel=parallel, draft_pool=MHATokenToKVPool(8, 1))
    assert [0, 0, 0, 1, 1, 1, 1] == list(engine.stage_of.values())
    assert "draft.1" == list(engine.stage_of)[-1]
    cache = sglang.rank_cache(engine, RankId(pp=1), pools[1], keep(MHATokenToKVPool(8, 1)))
    assert {"layers.3", "layers.4", "draft.0", "draft.1"} == {
        region.layer for region in cache.regions
    }


def test_pool_of_another_stage_or_with_other_windows_is_refused() -> None:
    """It has as many layers, so its buffers would get the names of other layers."""
    stages = [keep(MHATokenToKVPool(8, 2, start_layer=start)) for start in (0, 2)]
    engine = sglang.engine_spec(stages, parallel=sglang.parallel_config(1, 2))
    assert sglang.rank_cache(engine, RankId(pp=1), stages[1])
    error = refusal(lambda: sglang.rank_cache(engine, RankId(pp=0), stages[1]))
    assert ("pool.layers", (2, 3)) == (error.field, error.value)
    pool = keep(MHATokenToKVPool(8, 2, layer_num=3))
    engine = sglang.engine_spec(pool, windows={0: 4, 2: 4})
    assert sglang.rank_cache(engine, RankId(), pool, windows={0: 4, 2: 4})
    error = refusal(lambda: sglang.rank_cache(engine, RankId(), pool, windows={0: 4, 1: 4}))
    assert ("pool.layers", (2,)) == (error.field, error.value)


def test_pools_with_equal_layers_or_names_are_refused() -> None:
    """Two stages with the same layers, or two groups with the same names, would share them."""
    parallel = sglang.parallel_config(1, 2)
    with pytest.raises(kvspec.SpecError):
        sglang.engine_spec([POOL, POOL], parallel=parallel)
    with pytest.raises(kvspec.SpecError):
        sglang.engine_spec(POOL, draft_pool=POOL, draft_name="layers.{}")


def test_attention_dp_divides_ranks_into_engines() -> None:
    """TP 8 with attention DP 4 is four engines of two consecutive ranks."""
    assert kvspec.ParallelConfig(tp_size=2) == sglang.parallel_config(8, attn_dp_size=4)
    ranks = [sglang.worker_rank(rank, tp_size=8, attn_dp_size=4) for rank in range(8)]
    assert [(rank // 2, RankId(tp=rank % 2)) for rank in range(8)] == ranks
    assert (0, RankId(pp=1, tp=3)) == sglang.worker_rank(3, 1, tp_size=4)


SCALES = dict.fromkeys(("layers.0", "layers.1"), (1.0, 1.0))


def test_layers_of_float8_have_the_identity_of_their_scales() -> None:
    """SGLang divides keys and values by the scales of the layer, which are not in the pool."""
    pool = keep(MHATokenToKVPool(16, 2, page_size=4, dtype="float8_e4m3fn"))
    other = {**SCALES, "layers.1": (0.5, 1.0)}
    one, two = (sglang.engine_spec(pool, scales=scales) for scales in (SCALES, other))
    (found,) = kvspec.mismatches(one, two)
    assert "layers.1.scales_digest" == found.field
    request = request_of(6, tables(two, [2, 1], 6), tables(two, [3, 4], 6))

    def make(_: RankId) -> Any:
        return MHATokenToKVPool(16, 2, page_size=4, dtype="float8_e4m3fn")

    assert [] == moved(two, two, request, (caches(two, make), caches(two, make)))


# A class or a recipe, its heads in the model, and whether the scales of all heads have one axis.
SCALED = {
    "fp4_mx_block16": (4, True),
    "nvfp4": (4, False),
    "MHATokenToKVPoolFP4": (4, True),
    "MHATokenToKVPoolMXFP8": (4, False),
    "MLATokenToKVPoolFP4": (1, True),
}


def scaled(cls: str, tp: int, page: int, **options: Any) -> Any:
    """Return an engine with a pool with scales, its caches and its tables."""
    heads, flat = SCALED[cls]
    parallel, count = sglang.parallel_config(tp), 150
    make = lambda _: like.with_scales(cls, max(heads // tp, 1), page, flat=flat)  # noqa: E731
    own = {"scales": SCALES} if cls in ("nvfp4", "MHATokenToKVPoolFP4") else {}
    engine = sglang.engine_spec(
        make(RankId()), parallel=parallel, total_num_kv_heads=heads, **own | options
    )
    ids = [*range(1, 2 + count // page)][::-1]
    return engine, caches(engine, make), tables(engine, ids, count)


@pytest.mark.parametrize(("page", "other"), [(32, 64), (128, 128)])
@pytest.mark.parametrize("cls", SCALED)
def test_elements_move_with_their_scales(cls: str, page: int, other: int) -> None:
    """The scales of a head move with the head, those of a latent with the latent."""
    sides = scaled(cls, 2, page), scaled(cls, 1, other)
    request = request_of(150, sides[0][2], sides[1][2])
    assert [] == moved(sides[0][0], sides[1][0], request, (sides[0][1], sides[1][1]))


def test_scales_of_other_recipes_and_layers_are_refused() -> None:
    """A page of 128 tokens of MXFP8 has its scales in the order of one kernel."""
    fields = {}
    for name, own, other in (
        ("recipe", "fp4_mx_block16", "nvfp4"),
        ("order", "MHATokenToKVPoolMXFP8", "MHATokenToKVPoolMXFP8"),
        ("type", "fp4_mx_block16", "MHATokenToKVPoolMXFP8"),
    ):
        found = kvspec.mismatches(scaled(own, 1, 32)[0], scaled(other, 1, 128)[0])
        fields[name] = {each.field.rpartition(".")[2] for each in found}
    assert "scale_dtype" in fields["recipe"]
    assert {"tokens_per_scale"} == fields["order"]
    assert "elements_per_scale" in fields["type"]
    outside = {**SCALES, "layers.1": (0.5, 1.0)}
    (found,) = kvspec.mismatches(scaled("nvfp4", 1, 4)[0], scaled("nvfp4", 1, 4, scales=outside)[0])
    assert "layers.1.scales_digest" == found.field


HALVES, PAIRS = (  # All 64 elements of a head.
    kvspec.KeyContent(rotary=order, rotary_size=64) for order in ("halves", "pairs")
)
# Pools whose pages hold 64 elements of 4 heads in formats of their own. Some are equal in bytes.
FORMATS: dict[str, Callable[[Any], kvspec.EngineSpec]] = {
    "bfloat16": lambda content: plain_of("bfloat16", content),
    "float8_e4m3fn": lambda content: plain_of("float8_e4m3fn", content, scales=SCALES),
    "float8_e5m2": lambda content: plain_of("float8_e5m2", content, scales=SCALES),
    "uint8": lambda content: plain_of("uint8", content),
    "fp4_mx_block16": lambda content: scaled("fp4_mx_block16", 1, 128, **content)[0],
    "nvfp4": lambda content: scaled("nvfp4", 1, 128, **content)[0],
    "nvfp4, other scales": lambda content: scaled("nvfp4", 1, 128, scales=TWICE, **content)[0],
    "FP4": lambda content: scaled("MHATokenToKVPoolFP4", 1, 128, **content)[0],
    "MXFP8": lambda content: scaled("MHATokenToKVPoolMXFP8", 1, 64, **content)[0],
    "MXFP8, ordered": lambda content: scaled("MHATokenToKVPoolMXFP8", 1, 128, **content)[0],
}
TWICE = {layer: (2 * key, 2 * value) for layer, (key, value) in SCALES.items()}


def plain_of(dtype: str, content: Any, **options: Any) -> kvspec.EngineSpec:
    """Return the engine of a pool without scales of its own."""
    pool = MHATokenToKVPool(40, 4, 64, page_size=4, dtype=dtype)
    return sglang.engine_spec(pool, **content, **options)


def test_pages_of_two_formats_never_look_equal() -> None:
    """Neither a plan nor the name of a stored page takes one for the other."""
    found = {name: make({}) for name, make in FORMATS.items()}
    digests = {StoredSpec.of(each, page_tokens=128).digest for each in found.values()}
    assert len(found) == len(digests)
    for one, other in itertools.permutations(found.values(), 2):
        assert kvspec.mismatches(one, other)


@pytest.mark.parametrize("name", FORMATS)
def test_order_of_keys_is_part_of_a_format_that_binds_elements(name: str) -> None:
    """A byte of FP4 has two elements, and a scale of MXFP8 belongs to 32 adjacent ones."""
    one, other = (FORMATS[name]({"key_content": content}) for content in (HALVES, PAIRS))
    digests = {StoredSpec.of(each, page_tokens=128).digest for each in (one, other)}
    fields = {each.field.rpartition(".")[2] for each in kvspec.mismatches(one, other)}
    bound = "FP" in name.upper() and "FLOAT" not in name.upper()
    assert (2 if bound else 1) == len(digests)
    assert fields == ({"key_content"} if bound else set())
    # Keys that are rotated by other angles, or not at all, differ in each format.
    for content in (None, kvspec.KeyContent(rotary="none"),
                    kvspec.KeyContent(rotary="halves", rotary_size=32)):  # fmt: skip
        changed = FORMATS[name]({"key_content": content})
        assert kvspec.mismatches(one, changed)
        assert StoredSpec.of(changed, page_tokens=128).digest not in digests


def test_unified_pages_have_no_scales(tmp_path: Path) -> None:
    """SGLang never writes the scales of a pool under these keys."""
    for name in ("fp4_mx_block16", "nvfp4", "FP4", "MXFP8", "MXFP8, ordered"):
        with pytest.raises(kvspec.SpecError) as caught:
            sglang.UnifiedPages(
                tmp_path, FORMATS[name]({}).group("full"), model_id="m", page_size=128,
                head_group=1, accept_unverified=True,
            )  # fmt: skip
        assert caught.value.field.startswith("groups")


def test_rank_cache_reads_torch_buffers() -> None:
    """SGLang stores float8 as bytes. Of 13 slots only 12 fill pages, so the cache has 3 blocks."""
    torch = pytest.importorskip("torch")
    pool = keep(MHATokenToKVPool(9, 2, page_size=4, dtype="float8_e4m3fn"))
    pool.k_buffer = [torch.from_numpy(buffer) for buffer in pool.k_buffer]
    engine = sglang.engine_spec(pool, scales=SCALES)
    cache = sglang.rank_cache(engine, RankId(), pool)
    assert {3} == {region.num_blocks for region in cache.regions}
    assert "float8_e4m3fn" == engine.groups[0].spec.parts[0].dtype


POOL = MHATokenToKVPool(16, 2, page_size=4)
LATENT = MLATokenToKVPool(16, page_size=4)


def changed(pool: Any, **fields: Any) -> Any:
    """Return a copy of *pool* with other fields."""
    copy = object.__new__(type(pool))
    copy.__dict__.update(vars(pool) | fields)
    return copy


def read(pool: Any = POOL, **options: Any) -> kvspec.EngineSpec:
    """Return the engine of a pool."""
    return sglang.engine_spec(pool, **options)


def slots(request_slots: Any) -> Any:
    """Return the block tables of a request with these slots."""
    return sglang.block_tables(read(), request_slots)


TP2 = sglang.parallel_config(2)
DCP = sglang.parallel_config(2, dcp_size=2)
# Call, field and value of the error, and an identifier or number in its requirement.
REFUSED: list[tuple[Callable[[], object], str, Any, str]] = [
    (lambda: read(like.MHATokenToKOnlyPool(8, 4)), "pools", "MHATokenToKOnlyPool", "a part"),
    (lambda: read(None), "pools", "NoneType", "SWAKVPool"),
    (lambda: read([POOL, POOL]), "pools", "2 pools", "1"),
    (lambda: read(changed(POOL, kv_cache_layout="vectorized_5d")),
     "pools.kv_cache_layout", "vectorized_5d", "'nhd'"),
    (lambda: read(changed(POOL, post_capture_active=True)),
     "pools.post_capture_active", True, "not yet"),
    (lambda: read(changed(POOL, k_buffer=None)), "pools.k_buffer", None, ""),
    (lambda: read(changed(POOL, k_buffer=[], v_buffer=[])), "pools", "no buffers", ""),
    (lambda: read(changed(POOL, v_buffer=POOL.v_buffer[:1])), "pools", {"k": 2, "v": 1}, ""),
    (lambda: read(changed(POOL, v_buffer=[b[:, :1] for b in POOL.v_buffer])),
     "pools.v_buffer", (20, 1, 4), "20"),
    (lambda: read(changed(POOL, k_buffer=[POOL.k_buffer[0], POOL.k_buffer[1][:8]])),
     "pools.k", [(20, 2, 4), (8, 2, 4)], ""),
    (lambda: read(changed(POOL, k_buffer=[POOL.k_buffer[0][0]] * 2)),
     "pools.k_buffer[0].shape", (2, 4), ""),
    (lambda: read(changed(POOL, page_size=0)), "pools.page_size", 0, ""),
    (lambda: read(changed(LATENT, kv_buffer=POOL.k_buffer)), "pools.kv_buffer", 2, "latent"),
    (lambda: read(SWAKVPool(POOL, LATENT, [False] * 2), sliding_window=4),  # type: ignore[arg-type]
     "pools.swa_kv_pool", "MLATokenToKVPool", "MHATokenToKVPool"),
    (lambda: read(SWAKVPool(POOL, POOL, [False] * 2), sliding_window=4),
     "pools.swa_kv_pool", "2 buffers", "0"),
    (lambda: read(parallel=TP2), "total_num_kv_heads", None, "'full'"),
    (lambda: read(parallel=TP2, total_num_kv_heads={"full": 8}), "pools.head_num", 2, "4"),
    (lambda: read(parallel=TP2, tp_rank=2), "tp_rank", 2, "tp_size=2"),
    (lambda: read(parallel=DCP, total_num_kv_heads=4), "dcp_size", 2, "1"),
    (lambda: read(parallel="2"), "parallel", "2", "ParallelConfig"),
    (lambda: read(layer_name="layers"), "layer_name", "layers", "{}"),
    (lambda: read(changed(POOL, k_scale_buffer=[])), "pools.k_scale_buffer", "list", "None"),
    (lambda: read(changed(POOL, quant_method=like.recipe("FP3"))), "pools.quant_method",
     "FP3", "NVFP4KVCacheMethod"),
    (lambda: read(like.with_scales("nvfp4", 2, 4)), "scales['layers.0']", None, "values"),
    (lambda: read(changed(like.with_scales("nvfp4", 2, 4), native_k_scale_buffer=[])),
     "pools.native_k_scale_buffer", "list", "not yet"),
    (lambda: read(changed(like.with_scales("nvfp4", 2, 4), k_scale_buffer=[])),
     "pools.k_scale_buffer", "0 buffers", "2"),
    (lambda: read(changed(like.with_scales("nvfp4", 2, 4), k_scale_buffer=POOL.k_buffer)),
     "pools.k_scale_buffer[0].shape", (20, 2, 4), "[40, 2, 4]"),
    (lambda: read(changed(POOL, native_k_scale_buffer=[])),
     "pools.native_k_scale_buffer", "list", "None"),
    (lambda: read(changed(LATENT, kv_scale_buffer=[])), "pools.kv_scale_buffer", "list", "None"),
    (lambda: read(changed(LATENT, dcp_replicated=True), parallel=DCP),
     "pools.dcp_replicated", True, "False"),
    (lambda: read(changed(POOL, dtype="float8_e5m2")), "scales['layers.0']", None, "divide"),
    (lambda: read(changed(LATENT, dtype="float8_e4m3fn"), scales={"layers.0": (1.0, 1.0)}),
     "scales['layers.1']", None, "divide"),
    (lambda: read(scales=[1.0]), "scales", [1.0], "layer names"),
    (lambda: read(windows=[1]), "windows", [1], "layer numbers"),
    (lambda: read(windows={0: 4, 1: 5}), "windows", {0: 4, 1: 5}, "one size"),
    (lambda: read(window_pool(), windows={1: 9}), "windows", {1: 9}, "sliding_window"),
    (lambda: read(windows={1: 4, 7: 4}), "windows", [7], "the pools have"),
    (lambda: read(windows={1: 0}), "sliding_window", 0, ""),
    (lambda: read(key_content="halves"), "key_content", "halves", "KeyContent"),
    (lambda: sglang.parallel_config(8, attn_dp_size=3), "attn_dp_size", 3, "tp_size=8"),
    (lambda: sglang.worker_rank(8, tp_size=8), "tp_rank", 8, "tp_size=8"),
    (lambda: slots([4, 5, 6, 8]), "slots['full'][3]", 8, "7"),
    (lambda: slots([5, 6]), "slots['full'][0]", 5, "4"),
    (lambda: slots([4, 5, 6, 0]), "slots['full'][3]", 0, "7"),
    (lambda: slots([0, 5]), "slots['full'][1]", 5, "1"),
    (lambda: slots([-4]), "slots['full']", -4, ""),
    (lambda: slots("ab"), "slots['full']", "ab", ""),
    (lambda: slots({}), "slots['full']", None, ""),
    (lambda: sglang.rank_cache(read(), RankId(), LATENT), "tensors['layers.0']", "latent", "kv"),
    (lambda: sglang.rank_cache(read(), RankId(), changed(POOL, page_size=2)),
     "pool.page_size", 2, "4"),
    (lambda: sglang.rank_cache(read(), RankId(), MHATokenToKVPool(8, 2, layer_num=3)),
     "pool", "3 layers", "layers.1"),
    (lambda: sglang.rank_cache(None, RankId(), POOL),  # type: ignore[arg-type]
     "engine", None, "EngineSpec"),
    (lambda: sglang.rank_cache(
        read(), RankId(), changed(POOL, k_buffer=[b[::-1] for b in POOL.k_buffer])),
     "tensors['layers.0']['k'].stride", (-64, -16, 8, 2), "KBNHC"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "field", "value", "requirement"), REFUSED)
def test_adapter_rejects_invalid_input(
    call: Callable[[], object], field: str, value: object, requirement: str
) -> None:
    """The error contains the path of the invalid field, and its value."""
    error = refusal(call)
    assert (field, value) == (error.field, error.value)
    assert requirement in error.expected
