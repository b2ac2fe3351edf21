"""vLLM's configs become engines, or an error names what is not known."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import vllm_like as like
from builders import request as request_of
from moved import moved, moves
from refused import case, words
from vllm_like import HEADS, config, engine_spec, state

import kvspec
from kvspec.adapters import vllm
from kvspec.dtypes import ITEMSIZE

ONE = kvspec.RankId()

KEPT: list[Any] = []
"""A cache knows addresses only, so somebody has to keep the memory."""


def zeros(shape: Any, dtype: Any) -> Any:
    """Return an array that stays."""
    KEPT.append(np.zeros(shape, dtype))
    return KEPT[-1]


def one(spec: Any, **given: Any) -> kvspec.LayerSpec:
    """Return the spec read of the only layer."""
    engine = engine_spec(config((["layer.0"], spec)), **given)
    return engine.groups[0].spec


def tp(size: int) -> kvspec.ParallelConfig:
    """Return TP only."""
    return kvspec.ParallelConfig(tp_size=size)


NVFP4 = {
    "kv_quant_mode": like.KVQuantMode.NVFP4,
    "num_head_slots": 4,
    "state_content_bytes": 9,
    "head_size": 16,
    "dtype": "uint8",
}


KNOWN = "the full_cls_name() of a known attention backend"
MAMBA1 = state("MAMBA1", ((32, 3), (32, 4)))

KINDS = [
    (like.FullAttentionSpec(**HEADS), "FullAttentionSpec", {"total_num_kv_heads": 2}),
    (like.FullAttentionSpec(**HEADS, head_size_v=4), "FullAttentionSpec", {"head_size_v": 4}),
    (
        like.SlidingWindowSpec(**HEADS, sliding_window=9),
        "SlidingWindowSpec",
        {"sliding_window": 9},
    ),
    (
        like.ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=8),
        "ChunkedLocalAttentionSpec",
        {"attention_chunk_size": 8},
    ),
    (like.CrossAttentionSpec(**HEADS), "CrossAttentionSpec", {"dtype": "bfloat16"}),
    (
        like.MLAAttentionSpec(block_size=16, head_size=576, dtype="bfloat16"),
        "MLAAttentionSpec",
        {"head_size": 576, "state_content_bytes": None},
    ),
    (
        like.MLAAttentionSpec(
            block_size=16, head_size=512, dtype="uint8", state_content_bytes=584, tokens_per_state=4
        ),
        "MLAAttentionSpec",
        {"tokens_per_state": 4, "state_content_bytes": 584},
    ),
    (
        like.SlidingWindowMLASpec(block_size=16, head_size=8, dtype="uint8", sliding_window=9),
        "SlidingWindowMLASpec",
        {"sliding_window": 9},
    ),
    (
        like.FullAttentionSpec(**HEADS, state_content_bytes=40),
        "FullAttentionSpec",
        {"state_content_bytes": 40, "spans_heads": False},
    ),
    (
        like.FullAttentionSpec(**HEADS, page_size_padded=4096),
        "FullAttentionSpec",
        {"page_size_padded": 4096},
    ),
]


@pytest.mark.parametrize(("theirs", "kind", "fields"), KINDS)
def test_a_kind_is_known_by_the_name_of_its_class(
    theirs: Any, kind: str, fields: dict[str, Any]
) -> None:
    """What both have is the same."""
    spec = one(theirs)
    assert kind == type(spec).__name__
    assert fields == {name: getattr(spec, name) for name in fields}
    assert theirs.page_size_bytes == spec.page_size_bytes()


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (like.EncoderOnlyAttentionSpec, "it keeps nothing between steps"),
        (like.SinkFullAttentionSpec, "sink tokens stand in no request's block table"),
        (like.RSWASpec, "its table has a gap in the middle, which no window describes"),
        (like.HiddenStateCacheSpec, "hidden states are not keys and values"),
    ],
)
def test_what_is_no_cache_is_refused_or_excluded(cls: Any, why: str) -> None:
    """A class made from full attention or a latent too: an error says why, or it is left out."""
    both = config((["layer.0"], like.FullAttentionSpec(**HEADS)), (["layer.1"], cls(**HEADS)))
    with pytest.raises(kvspec.SpecError, match=f"{cls.__name__}.*FullAttentionSpec.*{why}"):
        engine_spec(both)
    assert ["layer.0"] == list(engine_spec(both, excluded=["layer.1"]).homes)


def test_an_unknown_class_is_refused_by_name() -> None:
    """Whatever it is made from: it may keep anything. The error lists the known classes."""
    for spec in (like.KVCacheSpec(block_size=16), like.TQFullAttentionSpec(**HEADS)):
        told = rf"kv_cache_spec='{type(spec).__name__}': expected.*Mamba"
        with pytest.raises(kvspec.SpecError, match=told):
            one(spec)


V1 = "vllm.v1.attention.backends."
SCALED = like.FullAttentionSpec(**{**HEADS, **NVFP4})
SLOTS = like.FullAttentionSpec(**HEADS, num_head_slots=2, state_content_bytes=32)
PLAIN = like.FullAttentionSpec(**HEADS)
INDEXER = like.changed(
    like.MLAAttentionSpec(block_size=64, head_size=132, dtype="uint8"), "cache_role", "INDEXER"
)
PACKED = like.MLAAttentionSpec(block_size=64, head_size=512, dtype="uint8", state_content_bytes=584)
AITER = V1 + "rocm_aiter_fa.AiterFlashAttentionBackend"
CPU = V1 + "cpu_attn.CPUAttentionBackend"
INDEX = V1 + "mla.indexer.DeepseekV32IndexerBackend"
DS4 = "vllm.models.deepseek_v4.sparse_mla.DeepseekV4FlashMLABackend"
TWO = "expected 2 head slots in kv_cache_groups[0].kv_cache_spec, keys and values, not None"
KEEPS = "a backend that keeps {}, as kv_cache_groups[0].kv_cache_spec requires"
NO_BACKEND = [
    (PLAIN, None, f"None: expected {KNOWN}: the order inside a page depends on it"),
    (PLAIN, {"layer.1": like.FLASH}, "the order inside a page depends on it"),
    (PLAIN, "FLASH_ATTN", f"'FLASH_ATTN': expected {KNOWN} (kvspec.adapters.vllm.FORMATS)"),
    (PLAIN, ("mine.attention", "Backend"),
     f"'mine.attention.Backend': expected {KNOWN} (kvspec.adapters.vllm.FORMATS)"),
    (PLAIN, V1 + "rocm_attn.RocmAttentionBackend", TWO),
    (replace(SCALED, num_head_slots=2), like.MSA,
     "two slots for each head in kv_cache_groups[0].kv_cache_spec, not 2"),
    (SCALED, like.FLASH, KEEPS.format("4 slots for 2 heads")),
    (replace(SCALED, num_head_slots=None), like.FLASH, KEEPS.format("NVFP4")),
    (replace(SLOTS, num_kv_heads=4), like.FLASH, KEEPS.format("2 slots for 4 heads")),
    (INDEXER, like.FLASH, KEEPS.format("an indexer's keys")),
    (PLAIN, like.B12X, TWO),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "backends", "told"), NO_BACKEND)
def test_a_backend_whose_pages_are_not_described_is_refused_by_name(
    spec: Any, backends: Any, told: str
) -> None:
    """Or one that is not said, that nobody knows, or that would not have made the spec."""
    error = words(lambda: one(spec, backends=backends))
    assert error.startswith("backends['layer.0']=")
    assert error.endswith(told)


ULTRAQUANT = V1 + "ultraquant_attn.UltraQuantAttentionBackend"
ULTRA = replace(PLAIN, dtype="uint8", state_content_bytes=20)

PAGES = [
    (PLAIN, CPU, "vec", "keys-transposed"),
    (PLAIN, CPU, "vec16", "keys-transposed"),
    (PLAIN, CPU, "amx", "opaque:amx"),
    (SLOTS, V1 + "rocm_attn.RocmAttentionBackend", None, "x-packed"),
    (SLOTS, AITER, None, "opaque:aiter"),
    (PLAIN, AITER, None, "plain"),
    (SCALED, like.MSA, None, "opaque:msa"),
    (ULTRA, ULTRAQUANT, None, "opaque:ultraquant"),
    (ULTRA, like.FLASH, None, "plain"),
    (INDEXER, INDEX, "rows", "opaque:indexer"),
    (INDEXER, INDEX, "shuffled", "opaque:indexer-shuffled"),
    (PACKED, DS4, None, "opaque:deepseek"),
    (replace(PACKED, state_content_bytes=None), DS4, None, "plain"),
]


@pytest.mark.parametrize(("spec", "backends", "variants", "page_format"), PAGES)
def test_a_page_s_format_follows_from_its_backend(
    spec: Any, backends: Any, variants: Any, page_format: str
) -> None:
    """And from what the name leaves open; pages have vLLM's bytes, whole ones move to their own."""
    given = {"backends": backends, "variants": variants}
    engine = engine_spec(config((["layer.0"], spec)), **given)
    found = engine.groups[0].spec
    assert page_format == found.page_format  # type: ignore[attr-defined]
    assert spec.page_size_bytes == found.page_size_bytes()
    if page_format.startswith("opaque"):
        assert [] == moves(engine, engine, 70)
        longer = like.changed(spec, "block_size", 2 * spec.block_size)
        other = engine_spec(config((["layer.0"], longer)), **given)
        with pytest.raises(kvspec.MismatchError):
            kvspec.plan_transfer(engine, other)


def test_rows_of_the_same_length_are_not_the_same_rows() -> None:
    """UltraQuant's scales and codes are as long as those of int4, and mean other numbers."""
    one, other = (
        engine_spec(config((["layer.0"], ULTRA)), backends=name)
        for name in (ULTRAQUANT, like.FLASH)
    )
    for pair in ((one, other), (other, one)):
        with pytest.raises(kvspec.MismatchError, match="page_format"):
            kvspec.plan_transfer(*pair)


def test_an_opaque_page_is_the_kernel_s_block() -> None:
    """AMX keeps 32 tokens in an order of its own: blocks of 64 have two such pages, and move."""
    given = {"backends": CPU, "variants": "amx"}
    longer = like.changed(PLAIN, "block_size", 64)
    engine = engine_spec(config((["layer.0"], longer)), kernel_block_size=32, **given)
    (group,) = engine.groups
    assert (32, 32) == (group.kernel_block_size, group.spec.parts[0].tokens_per_state)
    other = engine_spec(config((["layer.0"], like.changed(PLAIN, "block_size", 32))), **given)
    assert [] == moves(engine, other, 130)
    assert [] == moves(other, engine, 130)


def test_what_a_backend_s_name_leaves_open_is_asked_for() -> None:
    """The instructions of CPU attention, an indexer's shuffling: by layer or for all."""
    for variants in (None, "avx", {"layer.1": "vec"}, 5):
        told = "expected one of vec, vec16, amx, which CPUAttentionBackend leaves open"
        assert words(lambda v=variants: one(PLAIN, backends=CPU, variants=v)).endswith(told)
    assert one(PLAIN, backends=CPU, variants="vec") == one(
        PLAIN, backends=CPU, variants={"layer.0": "vec"}
    )
    told = "expected None or 32: a key and a value"
    odd = replace(PLAIN, state_content_bytes=40)
    assert words(lambda: one(odd, backends=CPU, variants="vec")).endswith(told)


def test_a_backend_is_named_by_its_class() -> None:
    """The class itself, what its `full_cls_name` returns, or both joined by a dot."""

    class Backend:
        @classmethod
        def full_cls_name(cls) -> tuple[str, str]:
            return "vllm.v1.attention.backends.rocm_aiter_fa", "AiterFlashAttentionBackend"

    name = Backend.full_cls_name()
    for given in (Backend, name, ".".join(name), {"layer.0": Backend}):
        assert 2 == one(PLAIN, backends=given).total_num_kv_heads  # type: ignore[attr-defined]
    assert one(MAMBA1) == one(MAMBA1, backends=None), "a state's pages follow from its shapes"
    both = config((["layer.0"], PLAIN), (["draft.0"], PLAIN))
    left_out = engine_spec(both, backends={"layer.0": Backend}, excluded=["draft.0"])
    assert ["layer.0"] == list(left_out.homes)


def test_a_draft_may_run_whole_beside_a_sharded_target() -> None:
    """`dcp_sharded=False`: every context rank holds every token of the draft, and all arrives.

    MLA and a draft of one head, TP 1 to TP 2 / DCP 2, 64 tokens: read as sharded, each rank would
    get half of the draft's tokens, in the wrong blocks.
    """
    latent = like.MLAAttentionSpec(block_size=16, head_size=8, dtype="bfloat16")
    draft = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": 1}, dcp_sharded=False)
    both = config((["layer.0"], latent), (["draft.0"], draft))
    producer = engine_spec(both, total_num_kv_heads=1)
    sizes = kvspec.ParallelConfig(tp_size=2, dcp_size=2, interleave_size=16)
    consumer = engine_spec(both, parallel=sizes, total_num_kv_heads=1)
    assert [True, False] == [group.context_sharded for group in consumer.groups]
    assert [32, 16] == [consumer.virtual_block(group) for group in consumer.groups]
    assert [] == moves(producer, consumer, 64)
    with pytest.raises(kvspec.SpecError, match="dcp_sharded='no': expected True or False"):
        one(like.changed(draft, "dcp_sharded", "no"))
    mixed = like.UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"a.0": draft, "a.1": replace(draft, dcp_sharded=True)}
    )
    with pytest.raises(
        kvspec.SpecError, match=r"group0\['a.1'\].context_sharded=True: expected False"
    ):
        engine_spec(config((["a.0", "a.1"], mixed)))


def test_a_rank_s_heads_are_multiplied_back() -> None:
    """Of 8 heads, rank 1 of 3 holds 3; of 2 heads each of 4 ranks holds one."""
    spec = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": 3})
    found = one(spec, parallel=tp(3), total_num_kv_heads={"layer.0": 8}, tp_rank=1)
    assert 8 == found.total_num_kv_heads  # type: ignore[attr-defined]
    spec = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": 1})
    assert one(spec, parallel=tp(4), total_num_kv_heads=2).page_size_bytes(3, 4)
    with pytest.raises(kvspec.SpecError, match="num_kv_heads=1: expected 4: rank 0 of 2 has 4 of"):
        one(spec, parallel=tp(2), total_num_kv_heads=8)
    with pytest.raises(kvspec.SpecError, match="total_num_kv_heads=None: expected the KV heads"):
        one(spec, parallel=tp(2))
    with pytest.raises(kvspec.SpecError, match="tp_rank=2: expected less than tp_size=2"):
        one(spec, parallel=tp(2), tp_rank=2, total_num_kv_heads=2)


def test_a_page_has_vllm_s_bytes() -> None:
    """What the config says of a page is held against its parts."""

    class FullAttentionSpec(like.FullAttentionSpec):
        unpadded_page_size_bytes = 1152

    told = "page_size_bytes=1152: expected 1024, the bytes of k, v in a block"
    with pytest.raises(kvspec.SpecError, match=told):
        one(FullAttentionSpec(**HEADS))
    with pytest.raises(kvspec.SpecError, match="page_size_bytes=100: expected at least 1024"):
        one(like.FullAttentionSpec(**HEADS, page_size_padded=100))


def test_an_older_latent_says_its_bytes_by_its_page() -> None:
    """Before `state_content_bytes`, only the page told of 656 bytes a token."""

    class MLAAttentionSpec(like.MLAAttentionSpec):
        real_page_size_bytes = page_size_bytes = 16 * 656
        unpadded_page_size_bytes = None

    spec = one(MLAAttentionSpec(block_size=16, head_size=576, dtype="uint8"))
    assert 656 == spec.state_content_bytes  # type: ignore[attr-defined]


STATES = [
    ("MAMBA1", ((32, 3), (32, 4)), {}, {"conv_x": 64, "ssm": 64}),
    ("mamba2", ((40, 3), (4, 8, 4)), {"n_groups": 1}, {"conv_x": 64, "conv_b": 4, "conv_c": 4}),
    ("mamba2", ((64, 3), (4, 8, 4)), {}, {"conv_x": 64, "conv_b": 32, "ssm": 8}),
    (
        "GDN_ATTN",
        ((64, 3), (8, 4, 4)),
        {},
        {"conv_q": 32, "conv_k": 32, "conv_v": 64, "ssm": 16},
    ),
    ("short_conv", ((32, 2),), {}, {"conv_x": 64}),
    ("linear_attention", ((4, 8, 8),), {}, {"ssm": 8}),
]


@pytest.mark.parametrize(("kind", "shapes", "more", "units"), STATES)
@pytest.mark.parametrize("conv_layout", ["DS", "SD"])
def test_a_state_s_parts_follow_from_its_shapes(
    kind: str, shapes: Any, more: Any, units: dict[str, int], conv_layout: str
) -> None:
    """On one of 2 ranks: conv channels become the model's x, B and C or q, k and v."""
    if conv_layout == "SD" and "linear" not in kind:
        shapes = (shapes[0][::-1], *shapes[1:])
    spec = one(state(kind, shapes), parallel=tp(2), conv_layout=conv_layout, **more)
    assert units == {p.name: p.units for p in spec.parts if p.name in units}
    assert state(kind, shapes).page_size_bytes == spec.page_size_bytes(1, 2)


@pytest.mark.parametrize(
    ("theirs", "given", "told"),
    [
        (state("rwkv", ((4, 3), (4, 4))), {}, "mamba_type='rwkv': expected one of MAMBA1, MAMBA2"),
        (
            state("mamba1", ((32, 3), (16, 4))),
            {},
            r"shapes\[0\]=\(32, 3\): expected 16, the tempor",
        ),
        (state("mamba2", ((41, 3), (4, 8, 4))), {}, r"expected 32 \(x\) and whole pairs of 4"),
        (state("mamba2", ((40, 3), (4, 8))), {}, r"temporal state \(num_heads, head_dim"),
        (state("mamba2", ((40, 3), (4, 8, 4))), {"parallel": tp(2)}, "n_groups=None: expected the"),
        (
            state("mamba2", ((48, 3), (4, 8, 4))),
            {"parallel": tp(2), "n_groups": 2},
            "n_groups=2: expected a number of which rank 0 of 2 has 2",
        ),
        (state("gdn_attn", ((63, 3), (8, 4, 4))), {}, "two times whole heads of 4"),
        (state("short_conv", ((32, 3), (8, 4))), {}, "one conv state of 2 axes"),
        (state("mamba1", ((32,), (32, 4))), {}, r"a conv state of 2 axes \(DS\) first"),
        (state("linear", ((4, 8), (2, 2))), {}, "one state of heads and their content"),
        (state("mamba1", ((32, 3), (32, 4))), {"conv_layout": "XY"}, "conv_layout='XY': expected"),
    ],
)
def test_a_state_that_does_not_come_out_whole_is_refused(
    theirs: Any, given: Any, told: str
) -> None:
    """The error names the shape and what it would have to be."""
    with pytest.raises(kvspec.SpecError, match=told):
        one(theirs, **given)


def test_the_order_of_a_conv_state_follows_from_its_shape() -> None:
    """Dimension first or row first, whichever comes out whole; what may be both has to be said."""
    for shape, letters in (((40, 3), "LBHNC"), ((3, 40), "LBNHC")):
        engine = engine_spec(config((["l.0"], state("mamba2", (shape, (4, 8, 4))))))
        assert letters == engine.layout_of(engine.groups[0])
    both = "may be dimension first or row first"
    for kind, shapes in (("short_conv", ((32, 2),)), ("mamba2", ((40, 48), (4, 8, 4)))):
        told = f"conv_layout=None: expected 'DS' or 'SD': {shapes[0]} {both}"
        assert told == words(lambda kind=kind, shapes=shapes: one(state(kind, shapes)))
    assert 3 == len(one(state("gdn_attn", ((3, 64), (8, 4, 4)))).parts) - 1


def test_a_replicated_state_is_whole_on_every_rank() -> None:
    """`tp_replicated`: shapes are the model's, and each consumer rank gets all of them."""
    spec = state("short_conv", ((32, 2),), tp_replicated=True)
    theirs = config((["l.0"], spec))
    one_rank, three = (
        engine_spec(theirs, parallel=tp(size), conv_layout=order)
        for size, order in ((1, "DS"), (3, "DS"))
    )
    assert [64] * 3 == [three.page_size_bytes("l.0", rank) for rank in three.parallel.ranks]
    assert [] == moves(one_rank, three, 5)
    assert [] == moves(three, one_rank, 5)
    sharded = engine_spec(config((["l.0"], state("short_conv", ((32, 2),)))), conv_layout="DS")
    assert 1 == sharded.groups[0].spec.parts[0].granularity


@pytest.mark.parametrize(("tp", "block"), [(1, 32), (2, 16), (4, 64)])
def test_nvfp4_moves_head_by_head(tp: int, block: int) -> None:
    """Data and scales of keys and values lie apart in FlashInfer's page: four parts, each cut.

    The registered shape [blocks, 2 x heads, tokens, 9] says nothing of that. Scales of four tokens
    of a head lie in an order of their own, so they move together, and a cached count that cuts
    them is refused.
    """
    sides = []
    for size, tokens in ((1, 16), (tp, block)):
        local = 4 // size
        more = {"num_kv_heads": local, "num_head_slots": 2 * local, "block_size": tokens}
        spec = like.FullAttentionSpec(**{**HEADS, **NVFP4, **more})
        engine = engine_spec(
            config((["layer.0"], spec)),
            parallel=kvspec.ParallelConfig(tp_size=size),
            total_num_kv_heads=4,
            backends=like.FLASHINFER,
        )
        shape = (9, 2 * local, tokens, 9)
        arrays = {rank: zeros(shape, np.uint8) for rank in engine.parallel.ranks}
        caches = {rank: vllm.rank_cache(engine, rank, {"layer.0": arrays[rank]})
                  for rank in arrays}  # fmt: skip
        sides.append((engine, caches, arrays[ONE]))
    engine, caches, array = sides[0]
    data, scales = 4 * 16 * 8, 4 * 16
    assert [0, data, data + scales, 2 * data + scales] == [
        region.base - array.ctypes.data for region in caches[ONE].regions
    ]
    assert [(16, 8), (4, 4), (16, 8), (4, 4)] == [
        (region.states, region.content_bytes) for region in caches[ONE].regions
    ]
    tables = [{"group0": [8 - at for at in range(-(-77 // size))]} for size in (16, block)]
    for cached in (0, 16, 20):
        request = request_of(77, *tables, cached_tokens=cached)
        assert [] == moved(engine, sides[1][0], request, (caches, sides[1][1]))
    table = kvspec.build_table(
        kvspec.plan_transfer(engine, sides[1][0]), caches[ONE], sides[1][1][ONE]
    )
    told = "cached_tokens=17: expected a multiple of tokens_per_state=4"
    assert told == words(lambda: table.select(request_of(77, *tables, cached_tokens=17)))


@pytest.mark.parametrize(
    ("change", "layout", "told"),
    [
        ({}, "LBNHC", "layout='LBNHC': expected H outside N: scales of four tokens of a head lie"),
        ({}, "LHBNC", "layout='LHBNC': expected L and B outermost"),
        (
            {"state_content_bytes": 8},
            "LBHNC",
            "state_content_bytes=8: expected 9: the data and sca",
        ),
        ({"num_head_slots": 2}, "LBHNC", "num_head_slots=2: expected 4: a key and a value of each"),
        ({"block_size": 18}, "LBHNC", "block_size=18: expected a multiple of 4, a row of scales"),
    ],
)
def test_nvfp4_that_is_not_flashinfer_s_is_refused(change: Any, layout: str, told: str) -> None:
    """Other sizes, other slots, rows of scales that a block or a layout cuts."""
    spec = like.FullAttentionSpec(**{**HEADS, **NVFP4, **change})
    assert told in words(lambda: one(spec, layout=layout, backends=like.FLASHINFER))
    engine = engine_spec(config((["layer.0"], like.FullAttentionSpec(**{**HEADS, **NVFP4}))),
                         backends=like.FLASHINFER)  # fmt: skip
    torn = zeros((4, 4, 16, 12), np.uint8)[..., :9]
    for tensor, wanted in (
        (torn, "stride=12: expected 9: contiguous inside a block"),
        (zeros((4, 4, 16, 8), np.uint8), "expected pages of 576 bytes: k, k_scale, v, v_scale"),
    ):
        assert wanted in words(lambda t=tensor: vllm.rank_cache(engine, ONE, {"layer.0": t}))


def test_two_head_slots_are_planes_of_all_heads() -> None:
    """Their own layout has no K; ours puts it outside the tokens and the heads inside."""
    spec = like.FullAttentionSpec(**HEADS, num_head_slots=2, state_content_bytes=32)
    engine = engine_spec(config((["layer.0"], spec)), layout="LBNHC", backends=like.B12X)
    assert "LBNKHC" == engine.layout_of(engine.groups[0])
    assert ("k", "v") == tuple(part.name for part in engine.groups[0].spec.parts)
    with pytest.raises(kvspec.SpecError, match="layout='LKBNHC': expected letters without K"):
        one(spec, layout="LKBNHC", backends=like.B12X)
    odd = replace(spec, state_content_bytes=24)
    with pytest.raises(
        kvspec.SpecError, match="state_content_bytes=24: expected 32: the keys or values"
    ):
        one(odd, backends=like.B12X)


def test_pipeline_stages_have_a_config_each() -> None:
    """Layers of a group on both stages are one group; stages are named by what they hold."""
    spec = like.FullAttentionSpec(**HEADS)
    stages = [config(([f"layer.{2 * at}", f"layer.{2 * at + 1}"], spec)) for at in (0, 1)]
    engine = engine_spec(stages, parallel=kvspec.ParallelConfig(pp_size=2))
    assert {"layer.0": 0, "layer.1": 0, "layer.2": 1, "layer.3": 1} == engine.stage_of
    later = kvspec.RankId(pp=1)
    tensors = {f"layer.{at}": zeros((3, 2, 16, 16), np.uint16) for at in (2, 3)}
    cache = vllm.rank_cache(engine, later, tensors)
    assert {"layer.2", "layer.3"} == {region.layer for region in cache.regions}
    with pytest.raises(kvspec.SpecError, match="one KVCacheConfig for each of the 2 pipeline"):
        engine_spec(stages[0], parallel=kvspec.ParallelConfig(pp_size=2))
    other = config((["layer.2"], like.FullAttentionSpec(**{**HEADS, "head_size": 4})))
    with pytest.raises(kvspec.SpecError, match=r"group0\['layer.2'\].spec=.*as layer.0 has"):
        engine_spec([stages[0], other], parallel=kvspec.ParallelConfig(pp_size=2))


def test_a_uniform_group_keeps_each_layer_s_sizes() -> None:
    """A latent and indexer keys: no layer stands for the others."""
    specs = {
        "layer.0.attn": like.MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16"),
        "layer.0.indexer": like.MLAAttentionSpec(block_size=64, head_size=132, dtype="uint8"),
    }
    group = like.UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs)
    spec = engine_spec(config((list(specs), group))).groups[0].spec
    assert {64 * 1152, 64 * 132} == {spec.of_layer(x).page_size_bytes() for x in specs}
    with pytest.raises(kvspec.SpecError, match=r"kv_cache_specs=.*a spec for 'layer.9'"):
        engine_spec(config((["layer.9"], group)))


def test_what_is_not_transferred_is_excluded() -> None:
    """Layers named by the caller, and groups that vLLM keeps to itself, are listed, not lost."""
    spec = like.FullAttentionSpec(**HEADS)
    theirs = config((["layer.0", "draft.1"], spec), (["draft.2"], spec))
    theirs.kv_cache_groups[1].enable_kv_transfer = False
    engine = engine_spec(theirs, excluded=["draft.1"])
    assert ("draft.1", "draft.2") == engine.excluded
    right = {"layer.0": zeros((3, 2, 16, 16), np.uint16)}
    assert 2 == len(vllm.rank_cache(engine, ONE, right).regions)


def test_a_config_has_groups_and_a_tensor_for_every_layer() -> None:
    """A layer that no tensor holds, or a config without groups: refused."""
    spec = like.FullAttentionSpec(**HEADS)
    tensors = [like.KVCacheTensor(1024 * 6, ["layer.0"])]
    with pytest.raises(kvspec.SpecError, match=r"kv_cache_tensors=.*a tensor that holds 'layer.1'"):
        engine_spec(config((["layer.0", "layer.1"], spec), tensors=tensors))
    with pytest.raises(
        kvspec.SpecError, match=r"kv_cache_groups=\[\]: expected at least one group"
    ):
        engine_spec(config())


FULL = like.FullAttentionSpec(**HEADS)
WINDOW = like.SlidingWindowSpec(**HEADS, sliding_window=9)
LATENT = like.MLAAttentionSpec(block_size=16, head_size=8, dtype="bfloat16")
MAMBA = state("mamba2", ((40, 3), (4, 8, 4)))
BOTH = like.UniformTypeKVCacheSpecs(
    block_size=16, kv_cache_specs={"l.0": FULL, "l.1": replace(FULL, head_size=16)}
)
SPEC = "kv_cache_groups[0].kv_cache_spec"


def read(spec: Any = FULL, **given: Any) -> kvspec.EngineSpec:
    """Read the config of one layer, or of a uniform group of two."""
    layers = ["l.0", "l.1"] if isinstance(spec, like.UniformTypeKVCacheSpecs) else ["l.0"]
    return engine_spec(config((layers, spec)), **given)


def less(spec: Any, name: str, value: object = "gone") -> kvspec.EngineSpec:
    """Read a spec one of whose attributes is missing, or another *value*."""
    return read(like.changed(spec, name, value))


def grouped(name: str, value: object = "gone") -> kvspec.EngineSpec:
    """Read a config one of whose groups has an attribute missing, or another *value*."""
    theirs = config((["l.0"], FULL), (["l.1"], FULL))
    theirs.kv_cache_groups[1] = like.changed(theirs.kv_cache_groups[1], name, value)
    return engine_spec(theirs)


def tensors(*held: Any) -> kvspec.EngineSpec:
    """Read a config of layers l.0 and l.1 in tensors that hold the layers *held*."""
    placed = [like.KVCacheTensor(6144, layers) for layers in held]
    return engine_spec(config((["l.0", "l.1"], FULL), tensors=placed))


REFUSED = [
    case(lambda: engine_spec(None),
         "config='NoneType': expected a KVCacheConfig, with kv_cache_groups"),
    case(lambda: engine_spec("abc"),
         "config='str': expected a KVCacheConfig, with kv_cache_groups"),
    case(lambda: engine_spec([]),
         "config='0 configs': expected one KVCacheConfig for each of the 1 pipeline stages"),
    case(lambda: engine_spec([5]),
         "config[0]='int': expected a KVCacheConfig, with kv_cache_groups"),
    case(lambda: engine_spec(like.changed(config((["l.0"], FULL)), "kv_cache_groups", 5)),
         "kv_cache_groups=5: expected a sequence of KVCacheGroupSpecs"),
    case(lambda: engine_spec(like.changed(config((["l.0"], FULL)), "kv_cache_tensors", 5)),
         "kv_cache_tensors=5: expected a sequence of KVCacheTensors"),
    case(lambda: engine_spec([config((["l.0"], FULL)), config(([0], FULL))],
                              parallel=kvspec.ParallelConfig(pp_size=2)),
         "config[1].kv_cache_groups[0].layer_names=0: expected layer names, each a non-empty str"),
    case(lambda: grouped("layer_names"),
         "kv_cache_groups[1].layer_names=None: expected a sequence of layer names"),
    case(lambda: grouped("layer_names", "l.1"),
         "kv_cache_groups[1].layer_names='l.1': expected a sequence of layer names"),
    case(lambda: grouped("enable_kv_transfer", "no"),
         "kv_cache_groups[1].enable_kv_transfer='no': expected True or False"),
    case(lambda: grouped("kv_cache_spec"),
         "kv_cache_groups[1].kv_cache_spec='NoneType': expected one of FullAttentionSpec, "
         "SlidingWindowSpec, ChunkedLocalAttentionSpec, CrossAttentionSpec, MLAAttentionSpec, "
         "SlidingWindowMLASpec, MambaSpec"),
    case(lambda: less(FULL, "head_size"), f"{SPEC}.head_size=None: expected an int >= 1"),
    case(lambda: less(FULL, "num_kv_heads"), f"{SPEC}.num_kv_heads=None: expected an int >= 1"),
    case(lambda: less(FULL, "num_head_slots", -1), f"{SPEC}.num_head_slots=-1: expected an int >= 1"),
    case(lambda: less(FULL, "tokens_per_state", 3),
         f"{SPEC}.block_size=16: expected a multiple of tokens_per_state=3"),
    case(lambda: less(FULL, "page_size_bytes", "x"),
         f"{SPEC}.page_size_bytes='x': expected an int >= 1"),
    case(lambda: less(WINDOW, "sliding_window"), f"{SPEC}.sliding_window=None: expected an int >= 1"),
    case(lambda: less(LATENT, "block_size", 0), f"{SPEC}.block_size=0: expected an int >= 1"),
    case(lambda: less(MAMBA, "shapes"), f"{SPEC}.shapes=None: expected a sequence of shapes"),
    case(lambda: less(MAMBA, "shapes", 5), f"{SPEC}.shapes=5: expected a sequence of shapes"),
    case(lambda: less(MAMBA, "shapes", (5,)),
         f"{SPEC}.shapes[0]=5: expected a sequence of ints >= 1"),
    case(lambda: less(MAMBA, "shapes", ((40, 3), (2, 4, 0))),
         f"{SPEC}.shapes[1]=(2, 4, 0): expected a sequence of ints >= 1"),
    case(lambda: less(MAMBA, "dtypes", ()),
         f"{SPEC}.dtypes=(): expected one for each of the 2 shapes"),
    case(lambda: less(MAMBA, "dtypes", ("uint8", 8)),
         f"{SPEC}.dtypes[1]=8: expected one of {', '.join(ITEMSIZE)}"),
    case(lambda: less(BOTH, "kv_cache_specs"),
         f"{SPEC}.kv_cache_specs=None: expected a mapping from layer names to specs"),
    case(lambda: less(BOTH, "kv_cache_specs", {"l.0": FULL}),
         f"{SPEC}.kv_cache_specs=['l.0']: expected a spec for 'l.1'"),

    case(lambda: less(BOTH, "kv_cache_specs",
                      {"l.0": FULL, "l.1": like.changed(FULL, "dtype", "x")}),
         f"{SPEC}.kv_cache_specs['l.1'].dtype='x': expected one of {', '.join(ITEMSIZE)}"),
    case(lambda: tensors(["l.0"]), "kv_cache_tensors=['l.0']: expected a tensor that holds 'l.1'"),
    case(lambda: tensors(["l.0", "l.1"], ["l.2"]),
         "kv_cache_tensors[1].shared_by='l.2': expected layers of kv_cache_groups"),
    case(lambda: tensors(["l.0"], None),
         "kv_cache_tensors[1].shared_by=None: expected a sequence of layer names"),
    case(lambda: read(parallel="2"), "parallel='2': expected a ParallelConfig"),
    case(lambda: read(kernel_block_size="a"), "kernel_block_size='a': expected an int >= 1"),
    case(lambda: read(n_groups="a"), "n_groups='a': expected an int >= 1"),
    case(lambda: read(excluded=None), "excluded=None: expected a sequence of layer names"),
    case(lambda: read(excluded="l.0"), "excluded='l.0': expected a sequence of layer names"),
    case(lambda: read(excluded=[["l.0"]]),
         "excluded=['l.0']: expected layer names, each a non-empty str"),
    case(lambda: read(excluded=["l.9"]), "excluded='l.9': expected layers of kv_cache_groups"),
    case(lambda: read(total_num_kv_heads={"l.9": 2}),
         "total_num_kv_heads='l.9': expected layers of kv_cache_groups"),
    case(lambda: read(total_num_kv_heads={"l.0": "2"}),
         "total_num_kv_heads['l.0']='2': expected an int >= 1"),
    case(lambda: read(MAMBA, total_num_kv_heads="2"), "total_num_kv_heads='2': expected an int >= 1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "wanted"), REFUSED)
def test_a_config_of_unknown_shape_is_refused_in_words(
    call: Callable[[], object], wanted: str
) -> None:
    """The path to what is wrong, its value, and what was expected."""
    with pytest.raises(kvspec.SpecError) as caught:
        call()
    assert wanted == str(caught.value)


def test_a_property_that_raises_is_refused_by_name() -> None:
    """Whatever reading an attribute of theirs does, it is told of that attribute."""

    class FullAttentionSpec(like.FullAttentionSpec):
        @property
        def page_size_bytes(self) -> int:
            raise NotImplementedError("which backend?")

    told = f"{SPEC}.page_size_bytes='NotImplementedError: which backend?': expected a value"
    with pytest.raises(kvspec.SpecError, match=re.escape(told)):
        read(FullAttentionSpec(**HEADS))


def test_excluded_layers_come_in_any_order() -> None:
    """A set of names is as good as a list."""
    theirs = config((["l.0", "l.1", "l.2"], FULL))
    assert ("l.1", "l.2") == engine_spec(theirs, excluded={"l.2", "l.1"}).excluded


@pytest.mark.parametrize(
    "spec", [FULL, WINDOW, LATENT, MAMBA, BOTH], ids=lambda spec: type(spec).__name__
)
@pytest.mark.parametrize("sizes", [1, 2])
def test_a_config_with_one_thing_wrong_is_read_or_refused(spec: Any, sizes: int) -> None:
    """Any one attribute missing or replaced, of the config or what it holds: no other error."""
    layers = ["l.0", "l.1"] if spec is BOTH else ["l.0"]
    page = 6 * spec.page_size_bytes if spec is not BOTH else 6144
    placed = [like.KVCacheTensor(page, [layer]) for layer in layers]
    right = config((layers, spec), tensors=placed)
    given = {"parallel": tp(sizes), "total_num_kv_heads": 2 * sizes, "n_groups": sizes}
    engine_spec(right, **given)
    refused = 0
    for where, theirs in like.broken(right):
        try:
            engine_spec(theirs, **given)
        except (kvspec.SpecError, kvspec.MismatchError):
            refused += 1
        except Exception as error:
            raise AssertionError(where) from error
    assert refused > 50


def test_an_argument_of_another_type_is_read_or_refused() -> None:
    """Each argument of the caller's replaced: no other error."""
    names = ("parallel", "total_num_kv_heads", "layout", "tp_rank", "kernel_block_size",
             "conv_layout", "n_groups", "excluded", "backends", "variants")  # fmt: skip
    theirs = config((["l.0"], FULL), (["l.1"], MAMBA))
    for name, value in itertools.product(names, (None, 5, "x", (), -1, 1.5, [["l.0"]], {})):
        with contextlib.suppress(kvspec.SpecError):
            engine_spec(theirs, **{name: value})
