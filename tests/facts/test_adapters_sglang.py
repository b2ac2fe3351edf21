"""SGLang's token pools become engines and caches, its slots tables, or an error names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sglang_like as like
import vllm_like
from builders import request as request_of
from moved import Caches, moved
from refused import case, words
from sglang_like import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool, pages_to_slots

import kvspec
from kvspec import RankId
from kvspec.adapters import sglang, vllm

KEPT: list[Any] = []
"""A cache knows addresses only, so somebody has to keep the pools."""


def kept(pool: Any) -> Any:
    """Return a pool that stays."""
    KEPT.append(pool)
    return pool


def caches(engine: kvspec.EngineSpec, make: Callable[[RankId], Any]) -> Caches:
    """Return the cache of every rank over the pool that *make* makes for it."""
    return {
        rank: sglang.rank_cache(engine, rank, kept(make(rank))) for rank in engine.parallel.ranks
    }


def tables(engine: kvspec.EngineSpec, pages: list[int], count: int) -> Any:
    """Return the block tables of *count* tokens on *pages*."""
    page = engine.virtual_block(engine.groups[0])
    return sglang.block_tables(engine, pages_to_slots(pages, page, count))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("tp", "other"), [(1, 2), (4, 1), (2, 3)])
def test_heads_move_between_unequal_tp_and_page_sizes(page: int, tp: int, other: int) -> None:
    """K and V buffers [slots, heads, size]: pages of one or 16 tokens into pages of 4."""
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
        ids = [int(each) + 1 for each in np.random.default_rng(size).permutation(64 // tokens)]
        sides.append((engine, caches(engine, make), tables(engine, ids[:needed], count)))
    request = request_of(count, sides[0][2], sides[1][2], cached_tokens=5)
    assert [] == moved(sides[0][0], sides[1][0], request, (sides[0][1], sides[1][1]))


@pytest.mark.parametrize(("dcp", "page"), [(1, 1), (2, 1), (2, 4), (4, 4)])
def test_a_latent_moves_out_of_context_parallel_ranks(dcp: int, page: int) -> None:
    """Slot s is on rank s % dcp, in its slot s // dcp; a page of the request spans all ranks."""
    count, parallel = 45, sglang.parallel_config(4, dcp_size=dcp)

    def make(_: RankId) -> Any:
        return MLATokenToKVPool(64, page_size=page)

    producer = sglang.engine_spec(make(RankId()), parallel=parallel)
    consumer = sglang.engine_spec(MLATokenToKVPool(64, page_size=16))
    virtual = page * dcp
    assert virtual == producer.virtual_block(producer.groups[0])
    ids = [each + 1 for each in range(-(-count // virtual))][::-1]
    request = request_of(count, tables(producer, ids, count), tables(consumer, [2, 1, 4], count))
    sides = caches(producer, make), caches(consumer, lambda _: MLATokenToKVPool(64, page_size=16))
    assert [] == moved(producer, consumer, request, sides)


def test_a_rank_s_slot_is_where_sglang_puts_it() -> None:
    """Token 5 of slots 8.. (page 2 of 4) under DCP 2: slot 13, rank 1, its own slot 6."""
    parallel = sglang.parallel_config(2, dcp_size=2)
    pool = kept(MLATokenToKVPool(16, page_size=2))
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


def test_windows_have_a_pool_and_slots_of_their_own() -> None:
    """Three layers, one of them full: what the window has passed is slot 0, and is not moved."""

    def make(_: RankId) -> Any:
        pools = (MHATokenToKVPool(64, 2, page_size=4, layer_num=n) for n in (1, 2))
        return SWAKVPool(*pools, windowed=[True, False, True])

    engine = sglang.engine_spec(make(RankId()), sliding_window=9)
    assert {"full": ("layers.1",), "swa": ("layers.0", "layers.2")} == {
        group.name: group.layers for group in engine.groups
    }
    sides = []
    for first in (1, 7):
        swa = pages_to_slots([first + page for page in range(5)], 4, 18)
        swa[:8] = 0  # the query at position 18 reads from 10 on
        slots = {"full": pages_to_slots([first + 6 - page for page in range(5)], 4, 18), "swa": swa}
        sides.append(sglang.block_tables(engine, slots))
    assert [0, 0] == sides[0]["swa"].block_ids[:2].tolist()
    request = request_of(18, *sides)
    assert [] == moved(engine, engine, request, (caches(engine, make), caches(engine, make)))
    with pytest.raises(kvspec.SpecError, match="slots by group: a window has its own"):
        sglang.block_tables(engine, range(18))
    assert words(lambda: sglang.engine_spec(make(RankId()))) == (
        "sliding_window=None: expected an int >= 1"
    )
    cut = {"full": range(24, 42), "swa": range(8, 20)}
    wanted = "18, a slot for each token as other groups have, 0 where it is gone"
    assert f"slots['swa']='12 slots': expected {wanted}" == words(
        lambda: sglang.block_tables(engine, cut)
    )


def test_a_draft_is_whole_on_every_context_rank() -> None:
    """A latent on 2 context ranks, its draft of 3 heads on each: both arrive at one rank."""
    parallel = sglang.parallel_config(2, dcp_size=2)
    sharded = [len(parallel.sharding(3).ranges[rank]) for rank in (0, 1)]
    pools = {
        rank: (
            kept(MLATokenToKVPool(32, page_size=4)),
            kept(MHATokenToKVPool(64, sharded[rank], page_size=4, layer_num=1)),
        )
        for rank in (0, 1)
    }
    producer = sglang.engine_spec(
        pools[0][0], draft_pool=pools[0][1], parallel=parallel, total_num_kv_heads=3
    )
    assert [True, False] == [group.context_sharded for group in producer.groups]
    one = kept(MLATokenToKVPool(32, page_size=4)), kept(MHATokenToKVPool(32, 3, page_size=4,
                                                                         layer_num=1))  # fmt: skip
    consumer = sglang.engine_spec(one[0], draft_pool=one[1])
    request = request_of(20, tables(producer, [3, 1, 2], 20), tables(consumer, [8, 3, 4, 1, 5], 20))
    assert [6, 7, 2, 3, 4] == request.producer_blocks["draft"].block_ids.tolist()
    sides = (
        {
            RankId(tp=rank): sglang.rank_cache(producer, RankId(tp=rank), *pools[rank])
            for rank in (0, 1)
        },
        {RankId(): sglang.rank_cache(consumer, RankId(), *one)},
    )
    assert [] == moved(producer, consumer, request, sides)


def test_vllm_s_blocks_move_into_sglang_s_pages() -> None:
    """vLLM, TP 2, blocks of 16; SGLang, TP 1, pages of one token: layers by vLLM's names."""
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
        views = {name: kept(np.zeros((6, 1, 16, 8), np.uint16)) for name in names}
        side[rank] = vllm.rank_cache(producer, rank, views)
    pool = kept(MHATokenToKVPool(40, 2))
    consumer = sglang.engine_spec(pool, layer_name="model.layers.{}.self_attn.attn")
    slots = np.random.default_rng(3).permutation(np.arange(1, 41))[:33]
    request = request_of(33, {"group0": [4, 1, 2]}, sglang.block_tables(consumer, slots))
    cache = {RankId(): sglang.rank_cache(consumer, RankId(), pool)}
    assert [] == moved(producer, consumer, request, (side, cache))


def test_stages_have_a_pool_each() -> None:
    """Layers are numbered on from the first of the stage; a draft is on the last."""
    pools = [kept(MLATokenToKVPool(8, layer_num=n, start_layer=start)) for n, start in ((3, 0),
             (2, 3))]  # fmt: skip
    parallel = sglang.parallel_config(1, 2)
    engine = sglang.engine_spec(pools, parallel=parallel, draft_pool=MHATokenToKVPool(8, 1))
    assert [0, 0, 0, 1, 1, 1, 1] == list(engine.stage_of.values())
    assert "draft.1" == list(engine.stage_of)[-1]
    cache = sglang.rank_cache(engine, RankId(pp=1), pools[1], kept(MHATokenToKVPool(8, 1)))
    assert {"layers.3", "layers.4", "draft.0", "draft.1"} == {r.layer for r in cache.regions}


def test_ranks_are_cut_into_engines_by_attention_dp() -> None:
    """TP 8 with attention DP 4: four engines of two ranks; ranks run on within one."""
    assert kvspec.ParallelConfig(tp_size=2) == sglang.parallel_config(8, attn_dp_size=4)
    found = [sglang.worker_rank(rank, tp_size=8, attn_dp_size=4) for rank in range(8)]
    assert [(rank // 2, RankId(tp=rank % 2)) for rank in range(8)] == found
    assert (0, RankId(pp=1, tp=3)) == sglang.worker_rank(3, 1, tp_size=4)


def test_torch_buffers_are_viewed() -> None:
    """float8 buffers are stored as bytes; slots that fill no page are not the cache's."""
    torch = pytest.importorskip("torch")
    pool = kept(MHATokenToKVPool(9, 2, page_size=4, dtype="float8_e4m3fn"))
    pool.k_buffer = [torch.from_numpy(buffer) for buffer in pool.k_buffer]
    engine = sglang.engine_spec(pool)
    cache = sglang.rank_cache(engine, RankId(), pool)
    assert {3} == {region.num_blocks for region in cache.regions}
    assert "float8_e4m3fn" == engine.groups[0].spec.parts[0].dtype


POOL = MHATokenToKVPool(16, 2, page_size=4)
LATENT = MLATokenToKVPool(16, page_size=4)


def changed(pool: Any, **fields: Any) -> Any:
    """Return a copy of *pool* with other fields."""
    found = object.__new__(type(pool))
    found.__dict__.update(vars(pool) | fields)
    return found


def read(pool: Any = POOL, **given: Any) -> kvspec.EngineSpec:
    """Read a pool."""
    return sglang.engine_spec(pool, **given)


def slots(*given: Any, pool: Any = POOL) -> Any:
    """Read the slots of a request."""
    return sglang.block_tables(read(pool), *given)


TP2 = sglang.parallel_config(2)
DCP = sglang.parallel_config(2, dcp_size=2)
KINDS = "one of MHATokenToKVPool, MLATokenToKVPool, SWAKVPool"
REFUSED = [
    case(lambda: read(like.NSATokenToKVPool(8)), f"pools='NSATokenToKVPool': expected {KINDS}; not "
         "yet: an indexer's keys lie page by page, their scales after them"),
    case(lambda: read(None), f"pools='NoneType': expected {KINDS}"),
    case(lambda: read([POOL, POOL]),
         "pools='2 pools': expected one pool for each of the 1 pipeline stages"),
    case(lambda: read(changed(POOL, kv_cache_layout="vectorized_5d")),
         "pools.kv_cache_layout='vectorized_5d': expected 'nhd'; not yet: heads in chunks of 16 "
         "bytes"),
    case(lambda: read(changed(POOL, k_buffer=None)),
         "pools.k_buffer=None: expected a sequence of buffers"),
    case(lambda: read(changed(POOL, k_buffer=[], v_buffer=[])),
         "pools='no buffers': expected at least one layer"),
    case(lambda: read(changed(POOL, v_buffer=POOL.v_buffer[:1])),
         "pools={'k': 2, 'v': 1}: expected as many buffers of keys as of values"),
    case(lambda: read(changed(POOL, v_buffer=[b[:, :1] for b in POOL.v_buffer])),
         "pools.v_buffer=(20, 1, 4): expected [20, 2, size]"),
    case(lambda: read(changed(POOL, k_buffer=[POOL.k_buffer[0], POOL.k_buffer[1][:8]])),
         "pools.k=[(20, 2, 4), (8, 2, 4)]: expected one shape in all layers"),
    case(lambda: read(changed(POOL, k_buffer=[POOL.k_buffer[0][0]] * 2)),
         "pools.k_buffer[0].shape=(2, 4): expected [slots, heads, size]"),
    case(lambda: read(changed(POOL, page_size=0)), "pools.page_size=0: expected an int >= 1"),
    case(lambda: read(changed(LATENT, kv_buffer=POOL.k_buffer)),
         "pools.kv_buffer=2: expected one latent for each slot"),
    case(lambda: read(SWAKVPool(POOL, LATENT, [False] * 2), sliding_window=4),  # type: ignore[arg-type]
         "pools.swa_kv_pool='MLATokenToKVPool': expected a MHATokenToKVPool"),
    case(lambda: read(SWAKVPool(POOL, POOL, [False] * 2), sliding_window=4),
         "pools.layers_mapping=[]: expected a layer for each of the 2 buffers of pools.swa_kv_pool"),
    case(lambda: read(parallel=TP2),
         "total_num_kv_heads=None: expected the model's KV heads in group 'full': a pool has those "
         "of a rank"),
    case(lambda: read(parallel=TP2, total_num_kv_heads={"full": 8}),
         "pools.head_num=2: expected 4: rank 0 of 2 has 4 of the model's 8"),
    case(lambda: read(parallel=TP2, tp_rank=2), "tp_rank=2: expected less than tp_size=2"),
    case(lambda: read(parallel=DCP, total_num_kv_heads=4),
         "dcp_size=2: expected 1 for layers with KV heads; not yet: heads on context "
         "ranks"),
    case(lambda: read(parallel="2"), "parallel='2': expected a ParallelConfig"),
    case(lambda: read(layer_name="layers"),
         "layer_name='layers': expected a name with {} for the layer's number"),
    case(lambda: sglang.parallel_config(8, attn_dp_size=3),
         "attn_dp_size=3: expected a divisor of tp_size=8"),
    case(lambda: sglang.worker_rank(8, tp_size=8), "tp_rank=8: expected less than tp_size=8"),
    case(lambda: slots([4, 5, 6, 8]),
         "slots['full'][3]=8: expected slot 7: pages of 4 tokens lie in consecutive slots"),
    case(lambda: slots([5, 6]),
         "slots['full'][0]=5: expected slot 4: pages of 4 tokens lie in consecutive slots"),
    case(lambda: slots([4, 5, 6, 0]),
         "slots['full'][3]=0: expected slot 7: pages of 4 tokens lie in consecutive slots"),
    case(lambda: slots([0, 5]),
         "slots['full'][1]=5: expected slot 1: pages of 4 tokens lie in consecutive slots"),
    case(lambda: slots([-4]), "slots['full']=-4: expected a slot for each token, ints >= 0"),
    case(lambda: slots("ab"), "slots['full']='ab': expected a slot for each token, ints >= 0"),
    case(lambda: slots({}), "slots['full']=None: expected a slot for each token, ints >= 0"),
    case(lambda: sglang.rank_cache(read(), RankId(), LATENT),
         "tensors['layers.0']='latent': expected one of k, v, kv"),
    case(lambda: sglang.rank_cache(read(), RankId(), changed(POOL, page_size=2)),
         "pool.page_size=2: expected 4, as group 'full' has"),
    case(lambda: sglang.rank_cache(read(), RankId(), MHATokenToKVPool(8, 2, layer_num=3)),
         "pool='3 layers': expected 2 layers: layers.0, layers.1"),
    case(lambda: sglang.rank_cache(None, RankId(), POOL),  # type: ignore[arg-type]
         "engine=None: expected an EngineSpec"),
    case(lambda: sglang.rank_cache(
        read(), RankId(), changed(POOL, k_buffer=[b[::-1] for b in POOL.k_buffer])),
         "tensors['layers.0']['k'].stride=(-64, -16, 8, 2): expected strides in the order of layout "
         "KBNHC, outermost first"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "wanted"), REFUSED)
def test_a_pool_of_unknown_shape_is_refused_in_words(
    call: Callable[[], object], wanted: str
) -> None:
    """The path to what is wrong, its value, and what was expected."""
    assert wanted == words(call)
