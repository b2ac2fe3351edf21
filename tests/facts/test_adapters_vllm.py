"""Tests how the vLLM adapter reads engines from a `KVCacheConfig`."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABCMeta
from collections.abc import Callable, Hashable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import vllm_like as like
from builders import request as request_of
from moved import moved, moves
from refused import refusal
from vllm_like import HEADS, config, engine_spec, state

import kvspec
from kvspec.adapters import vllm
from kvspec.adapters.vllm.backends import full_name
from kvspec.wire.codec import decode_handshake, encode_handshake
from kvspec.wire.handshake import Handshake

ONE = kvspec.RankId()

# A cache contains only addresses, so the arrays must stay alive.
KEPT: list[Any] = []


def zeros(shape: Any, dtype: Any) -> Any:
    """Return an array of zeros, and keep it alive until the tests end."""
    KEPT.append(np.zeros(shape, dtype))
    return KEPT[-1]


def layer_spec(spec: Any, **options: Any) -> kvspec.LayerSpec:
    """Return the layer spec that the adapter reads from *spec* of vLLM."""
    engine = engine_spec(config((["layer.0"], spec)), **options)
    return engine.groups[0].spec


def tp(size: int) -> kvspec.ParallelConfig:
    """Return a parallel config that has only TP."""
    return kvspec.ParallelConfig(tp_size=size)


NVFP4 = {
    "kv_quant_mode": like.KVQuantMode.NVFP4,
    "num_head_slots": 4,
    "state_content_bytes": 9,
    "head_size": 16,
    "dtype": "uint8",
}


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
def test_engine_spec_reads_kind_from_class_name(
    theirs: Any, kind: str, fields: dict[str, Any]
) -> None:
    """Both specs have the same fields and the same page size."""
    spec = layer_spec(theirs)
    assert kind == type(spec).__name__
    assert fields == {name: getattr(spec, name) for name in fields}
    assert theirs.page_size_bytes == spec.page_size_bytes()


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (like.EncoderOnlyAttentionSpec, "steps"),
        (like.SinkFullAttentionSpec, "sink"),
        (like.RSWASpec, "gap"),
        (like.HiddenStateCacheSpec, "hidden"),
    ],
)
def test_engine_spec_rejects_class_without_movable_cache_unless_excluded(
    cls: Any, reason: str
) -> None:
    """This holds although the class inherits from the spec of full attention or of a latent."""
    both = config((["layer.0"], like.FullAttentionSpec(**HEADS)), (["layer.1"], cls(**HEADS)))
    error = refusal(lambda: engine_spec(both))
    assert ("kv_cache_groups[1].kv_cache_spec", cls.__name__) == (error.field, error.value)
    assert reason in error.expected
    assert ["layer.0"] == list(engine_spec(both, excluded=["layer.1"]).homes)


def test_engine_spec_does_not_invite_to_exclude_a_ring() -> None:
    """Without the rows of the open group, the consumer computes other compressed keys."""
    error = refusal(lambda: engine_spec(config((["layer.0"], like.CircularBufferSpec(**HEADS)))))
    assert ("backends['layer.0']", like.FLASH) == (error.field, error.value)
    assert "not moved" not in error.expected


@pytest.mark.parametrize(
    "spec", [like.KVCacheSpec(block_size=16), like.TQFullAttentionSpec(**HEADS)]
)
def test_engine_spec_rejects_unknown_class(spec: Any) -> None:
    """A subclass of a known class may have any content. The error lists the known classes."""
    error = refusal(lambda: layer_spec(spec))
    assert (SPEC, type(spec).__name__) == (error.field, error.value)
    assert "MambaSpec" in error.expected


INDEX_CACHE = like.changed(
    like.MLAAttentionSpec(block_size=16, head_size=8, dtype="bfloat16"), "cache_role", "INDEXER"
)
M3 = "vllm.models.minimax_m3."
# Layers of MiniMax-M3 that attend to some blocks have a key-only cache beside keys and values.
M3_BACKENDS = {
    "layer.0.attn": like.FLASH,
    "layer.1.attn": M3 + "common.sparse_attention.MiniMaxM3SparseBackend",
    "layer.1.index_cache": M3 + "common.indexer.MiniMaxM3IndexerBackend",
}


def minimax(size: int, block: int, **heads: Any) -> tuple[Any, kvspec.EngineSpec]:
    """Return the config of a rank of MiniMax-M3 as vLLM groups it, and the engine."""
    own = {**HEADS, "num_kv_heads": 4 // size, "block_size": block}
    specs = {
        "layer.0.attn": like.FullAttentionSpec(**own, **heads),
        "layer.1.attn": like.FullAttentionSpec(**own),
        "layer.1.index_cache": like.changed(INDEX_CACHE, "block_size", block),
    }
    uniform = like.UniformTypeKVCacheSpecs(block_size=block, kv_cache_specs=specs)
    own_config = config((list(specs), uniform), num_blocks=9)
    engine = engine_spec(own_config, parallel=tp(size), total_num_kv_heads=4, backends=M3_BACKENDS)
    return own_config, engine


@pytest.mark.parametrize(("size", "block"), [(2, 16), (1, 32), (4, 32)])
def test_group_of_several_classes_moves_with_one_block_table(size: int, block: int) -> None:
    """Keys and values are divided among TP ranks. The index keys are on each of them."""
    sides = []
    for ranks, tokens in ((1, 16), (size, block)):
        own_config, engine = minimax(ranks, tokens)
        caches = {}
        for rank in engine.parallel.ranks:
            pages = {
                name: zeros((9, 1 if "index" in name else 4 // ranks, tokens, width), np.uint16)
                for name, width in zip(M3_BACKENDS, (16, 16, 8), strict=True)
            }
            caches[rank] = vllm.rank_cache(engine, rank, pages, config=own_config)
        tables = vllm.block_tables(engine, own_config, [range(8, 8 - 96 // tokens, -1)], 77)
        sides.append((engine, caches, tables))
    assert ["group0", "group0.MLAAttentionSpec"] == list(sides[0][2])
    assert ["layer.1.index_cache"] == list(sides[0][0].groups[1].layers)
    request = request_of(77, sides[0][2], sides[1][2])
    assert [] == moved(sides[0][0], sides[1][0], request, (sides[0][1], sides[1][1]))


def test_layers_of_one_class_in_a_split_group_may_have_other_sizes() -> None:
    """A layer of other head sizes is beside the others, as in MiMo-V2 and Gemma 4."""
    _, engine = minimax(1, 16, head_size_v=4)
    assert [4, 8] == [
        engine.groups[0].spec.of_layer(f"layer.{at}.attn").parts[1].content_bytes // 2  # type: ignore[attr-defined]
        for at in (0, 1)
    ]


def test_second_class_of_a_group_may_be_excluded() -> None:
    """A group has only the classes of layers that are in the engine."""
    own_config, _ = minimax(1, 16)
    engine = engine_spec(own_config, backends=M3_BACKENDS, excluded=["layer.1.index_cache"])
    assert [(), ("layer.1.index_cache",)] == [group.excluded for group in engine.groups]


INKLING = "vllm.models.inkling.nvidia.sconv_swa_attn.InklingSconvBackend"
SUMMARY = "vllm.models.step5.nvidia.sparse_summary_cache.Step5SparseSummaryBackend"


@pytest.mark.parametrize("size", [1, 2])
def test_rows_without_values_move(size: int) -> None:
    """Inkling's rows are divided by heads. Step-5's summary of eight tokens is on each rank."""
    sides = []
    for ranks in (4, size):
        own = {**HEADS, "num_kv_heads": 4 // ranks, "head_size_v": 0}
        conv = like.SlidingWindowSpec(**own, sliding_window=4)
        one = {**HEADS, "num_kv_heads": 1, "head_size_v": 0, "tokens_per_state": 8}
        both = config((["layer.0"], conv), (["layer.1"], like.FullAttentionSpec(**one)))
        backends = {"layer.0": INKLING, "layer.1": SUMMARY}
        engine = engine_spec(both, parallel=tp(ranks), total_num_kv_heads=4, backends=backends)
        assert [16, 16] == [group.spec.parts[0].content_bytes for group in engine.groups]
        assert [4, 1] == [group.spec.parts[0].units for group in engine.groups]
        sides.append(engine)
    assert [] == moves(*sides, 70)


def test_rows_without_values_are_refused_in_other_pages() -> None:
    """Attention on a CPU transposes keys, and knows no page without values."""
    rows = replace(PLAIN, head_size_v=0)
    error = refusal(lambda: layer_spec(rows, backends=CPU, variants="vec"))
    assert (f"{SPEC}.head_size_v", 0) == (error.field, error.value)
    assert "rows" in error.expected


def test_several_rows_for_each_token_are_refused_by_name() -> None:
    """Whisper with a causal encoder keeps four rows for each token."""
    spec = replace(PLAIN, tokens_per_state=Fraction(1, 4))
    error = refusal(lambda: layer_spec(spec))
    assert (f"{SPEC}.tokens_per_state", Fraction(1, 4)) == (error.field, error.value)
    assert "several rows" in error.expected


SPEC = "kv_cache_groups[0].kv_cache_spec"
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
ROCM = V1 + "rocm_attn.RocmAttentionBackend"

# Spec, backends, value of the error, and an identifier or word in its requirement.
INVALID_BACKENDS = [
    (PLAIN, None, None, "full_cls_name()"),
    (PLAIN, {"layer.1": like.FLASH}, None, "full_cls_name()"),
    (PLAIN, "FLASH_ATTN", "FLASH_ATTN", "kvspec.adapters.vllm.FORMATS"),
    (PLAIN, ("mine.attention", "Backend"), "mine.attention.Backend",
     "kvspec.adapters.vllm.FORMATS"),
    (PLAIN, ROCM, ROCM, "2 head slots"),
    (replace(SCALED, num_head_slots=2), like.MSA, like.MSA, "two slots"),
    (SCALED, like.FLASH, like.FLASH, "4 slots"),
    (replace(SCALED, num_head_slots=None), like.FLASH, like.FLASH, "NVFP4"),
    (replace(SLOTS, num_kv_heads=4), like.FLASH, like.FLASH, "2 slots"),
    (INDEXER, like.FLASH, like.FLASH, "indexer"),
    (PLAIN, like.B12X, like.B12X, "2 head slots"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "backends", "value", "requirement"), INVALID_BACKENDS)
def test_engine_spec_rejects_missing_unknown_or_unsuitable_backend(
    spec: Any, backends: Any, value: str | None, requirement: str
) -> None:
    """A backend is unsuitable if it would have produced another spec."""
    error = refusal(lambda: layer_spec(spec, backends=backends))
    assert ("backends['layer.0']", value) == (error.field, error.value)
    assert requirement in error.expected


ULTRAQUANT = V1 + "ultraquant_attn.UltraQuantAttentionBackend"
ULTRA = replace(PLAIN, dtype="uint8", state_content_bytes=20)

OCTAVES = V1 + "rocm_octave_attn.RocmOctaveAttentionBackend"
OCTAVE = replace(ULTRA, kv_quant_mode="OCTAVE_K3V4")

PAGES = [
    (PLAIN, CPU, "vec", "keys-transposed"),
    (PLAIN, CPU, "vec16", "keys-transposed"),
    (PLAIN, CPU, "amx", "opaque:amx"),
    (SLOTS, ROCM, None, "x-packed"),
    (SLOTS, AITER, None, "opaque:aiter"),
    (PLAIN, AITER, None, "plain"),
    (SCALED, like.MSA, None, "opaque:msa"),
    (ULTRA, ULTRAQUANT, None, "opaque:ultraquant"),
    (ULTRA, like.FLASH, None, "plain"),
    (OCTAVE, OCTAVES, None, "opaque:octave-octave_k3v4"),
    (INDEXER, INDEX, "rows", "plain"),
    (INDEXER, INDEX, "mx", "plain"),
    (INDEXER, INDEX.replace("DeepseekV32", "Glm5Next"), "rows", "plain"),
    (like.changed(INDEXER, "head_size", 68), INDEX, "rows", "opaque:indexer"),
    (INDEXER, INDEX, "shuffled", "opaque:indexer-shuffled"),
    (PACKED, DS4, None, "opaque:deepseek"),
    (replace(PACKED, state_content_bytes=None), DS4, None, "plain"),
]


@pytest.mark.parametrize(("spec", "backends", "variants", "page_format"), PAGES)
def test_page_format_follows_from_backend_and_variant(
    spec: Any, backends: Any, variants: Any, page_format: str
) -> None:
    """Pages have the size that vLLM computes. Opaque pages move only to pages of the same size."""
    options = {"backends": backends, "variants": variants}
    engine = engine_spec(config((["layer.0"], spec)), **options)
    own_spec = engine.groups[0].spec
    assert page_format == own_spec.page_format  # type: ignore[attr-defined]
    assert spec.page_size_bytes == own_spec.page_size_bytes()
    if page_format.startswith("opaque"):
        assert [] == moves(engine, engine, 70)
        longer = like.changed(spec, "block_size", 2 * spec.block_size)
        other = engine_spec(config((["layer.0"], longer)), **options)
        error = refusal(lambda: kvspec.plan_transfer(engine, other), kvspec.MismatchError)
        assert {"layer.0.page.content_bytes", "layer.0.page.tokens_per_state"} == {
            mismatch.field for mismatch in error.mismatches
        }


def test_plan_transfer_rejects_page_formats_with_equal_row_lengths() -> None:
    """Rows of UltraQuant and Octave are as long as rows of int4, but mean other numbers."""
    packed, int4, octave = (
        engine_spec(config((["layer.0"], spec)), backends=name)
        for spec, name in ((ULTRA, ULTRAQUANT), (ULTRA, like.FLASH), (OCTAVE, OCTAVES))
    )
    for pair in itertools.permutations((packed, int4, octave), 2):
        error = refusal(lambda pair=pair: kvspec.plan_transfer(*pair), kvspec.MismatchError)
        assert ["layer.0.page_format"] == [mismatch.field for mismatch in error.mismatches]


def test_opaque_page_has_kernel_block_size() -> None:
    """AMX arranges 32 tokens in its own order, so a block of 64 tokens has two pages."""
    options = {"backends": CPU, "variants": "amx"}
    longer = like.changed(PLAIN, "block_size", 64)
    engine = engine_spec(config((["layer.0"], longer)), kernel_block_size=32, **options)
    (group,) = engine.groups
    assert (32, 32) == (group.kernel_block_size, group.spec.parts[0].tokens_per_state)
    other = engine_spec(config((["layer.0"], like.changed(PLAIN, "block_size", 32))), **options)
    assert [] == moves(engine, other, 130)
    assert [] == moves(other, engine, 130)


@pytest.mark.parametrize(
    ("variants", "value"), [(None, None), ("avx", "avx"), ({"layer.1": "vec"}, None), (5, 5)]
)
def test_engine_spec_rejects_missing_or_unknown_variant(variants: Any, value: Any) -> None:
    """The page format of CPU attention also depends on its instruction set."""
    error = refusal(lambda: layer_spec(PLAIN, backends=CPU, variants=variants))
    assert ("variants['layer.0']", value) == (error.field, error.value)
    assert "vec, vec16, amx" in error.expected


def test_variant_applies_to_all_layers_or_one_layer() -> None:
    """A mapping contains the variant of each layer."""
    assert layer_spec(PLAIN, backends=CPU, variants="vec") == layer_spec(
        PLAIN, backends=CPU, variants={"layer.0": "vec"}
    )


def test_cpu_attention_rejects_content_other_than_key_and_value() -> None:
    """A key and a value of 8 elements of bfloat16 have 32 bytes."""
    odd = replace(PLAIN, state_content_bytes=40)
    error = refusal(lambda: layer_spec(odd, backends=CPU, variants="vec"))
    assert (f"{SPEC}.state_content_bytes", 40) == (error.field, error.value)
    assert "32" in error.expected


def test_backend_is_given_as_class_or_name() -> None:
    """The name is the pair that `full_cls_name` returns, or both parts joined by a dot."""

    class Backend:
        @classmethod
        def full_cls_name(cls) -> tuple[str, str]:
            return "vllm.v1.attention.backends.rocm_aiter_fa", "AiterFlashAttentionBackend"

    name = Backend.full_cls_name()
    for backends in (Backend, name, ".".join(name), {"layer.0": Backend}):
        spec = layer_spec(PLAIN, backends=backends)
        assert 2 == spec.total_num_kv_heads  # type: ignore[attr-defined]
    # The pages of a state follow from its shapes, so a state needs no backend.
    assert layer_spec(MAMBA1) == layer_spec(MAMBA1, backends=None)
    both = config((["layer.0"], PLAIN), (["draft.0"], PLAIN))
    left_out = engine_spec(both, backends={"layer.0": Backend}, excluded=["draft.0"])
    assert ["layer.0"] == list(left_out.homes)


class FlashAttentionBackend(metaclass=ABCMeta):  # noqa: B024 - vLLM's have abstract methods
    """A backend, whose class is an abstract one as in vLLM."""

    __module__ = "vllm.v1.attention.backends.flash_attn"

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Return the module and the class."""
        return cls.__module__, cls.__qualname__


def made_by_vllm(prefix: str, *bases: type, **overrides: Any) -> type:
    """Return a backend made as vLLM makes those of layers that change another backend."""
    overrides = {"get_builder_cls": lambda: None, **overrides}
    # `type` is called like a function, so the module of the class is not that of the backend.
    return type(f"{prefix}{FlashAttentionBackend.__name__}", bases, overrides)


def test_backend_of_layers_with_chunks_has_the_pages_of_its_base() -> None:
    backend = made_by_vllm("ChunkedLocalAttention_64_", FlashAttentionBackend)
    assert "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend" == full_name("", backend)
    assert layer_spec(PLAIN, backends=backend) == layer_spec(PLAIN, backends=FlashAttentionBackend)


@pytest.mark.parametrize(
    ("prefix", "bases", "overrides"),
    [
        # It writes sink tokens into the pages.
        ("StaticSink_", (FlashAttentionBackend,), {}),
        ("ChunkedLocalAttention_64_", (FlashAttentionBackend, Hashable), {}),
        ("ChunkedLocalAttention_64_", (FlashAttentionBackend,), {"get_kv_cache_shape": None}),
    ],
)
def test_backend_that_changes_another_one_is_refused_by_name(
    prefix: str, bases: tuple[type, ...], overrides: dict[str, Any]
) -> None:
    backend = made_by_vllm(prefix, *bases, **overrides)
    error = refusal(lambda: layer_spec(PLAIN, backends=backend))
    assert f"abc.{prefix}FlashAttentionBackend" == error.value


def test_unsharded_draft_moves_whole_to_every_context_rank() -> None:
    """With `dcp_sharded=False` every context rank has every token of the draft.

    MLA and a draft of one head move 64 tokens from TP 1 to TP 2 with DCP 2. If the draft were
    treated as sharded, each rank would receive half of its tokens, in the wrong blocks.
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
    error = refusal(lambda: layer_spec(like.changed(draft, "dcp_sharded", "no")))
    assert (f"{SPEC}.dcp_sharded", "no") == (error.field, error.value)
    mixed = like.UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"a.0": draft, "a.1": replace(draft, dcp_sharded=True)}
    )
    error = refusal(lambda: engine_spec(config((["a.0", "a.1"], mixed))))
    assert ("group0['a.1'].context_sharded", True) == (error.field, error.value)
    assert "a.0" in error.expected


def test_engine_spec_reads_model_heads_from_heads_of_a_rank() -> None:
    """Rank 1 of 3 has 3 of 8 heads. Each of 4 ranks has one of 2 heads."""
    spec = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": 3})
    own_spec = layer_spec(spec, parallel=tp(3), total_num_kv_heads={"layer.0": 8}, tp_rank=1)
    assert 8 == own_spec.total_num_kv_heads  # type: ignore[attr-defined]
    spec = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": 1})
    assert layer_spec(spec, parallel=tp(4), total_num_kv_heads=2).page_size_bytes(3, 4)


def test_layers_of_one_group_may_have_other_heads_in_the_model() -> None:
    """Each of 8 ranks has one head of both layers. The model has 1 head in one, and 8 in the other.

    vLLM has equal specs for both layers, so it puts them into one group with one spec.
    """
    spec = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": 1})
    heads = {"layer.0": 1, "layer.1": 8}
    engine = engine_spec(config((list(heads), spec)), parallel=tp(8), total_num_kv_heads=heads)
    (group,) = engine.groups
    for layer, count in heads.items():
        owned = [
            engine.units(group, part, kvspec.RankId(tp=5)) for part in group.in_memory(layer).parts
        ]
        assert [range(5 * count // 8, 5 * count // 8 + 1)] * 2 == owned


@pytest.mark.parametrize(
    ("options", "field", "value", "requirement"),
    [
        ({"total_num_kv_heads": 8}, f"{SPEC}.num_kv_heads", 1, "4"),
        ({}, "total_num_kv_heads", None, "'layer.0'"),
        ({"tp_rank": 2, "total_num_kv_heads": 2}, "tp_rank", 2, "tp_size=2"),
    ],
)
def test_engine_spec_rejects_missing_or_contradictory_heads(
    options: dict[str, Any], field: str, value: object, requirement: str
) -> None:
    """The rank has one head. With TP 2 the model may have one or two."""
    spec = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": 1})
    error = refusal(lambda: layer_spec(spec, parallel=tp(2), **options))
    assert (field, value) == (error.field, error.value)
    assert requirement in error.expected


def test_engine_spec_rejects_page_size_other_than_sum_of_parts() -> None:
    """Keys and values of 2 heads and 16 tokens have 1024 bytes."""

    class FullAttentionSpec(like.FullAttentionSpec):
        unpadded_page_size_bytes = 1152

    padded = like.FullAttentionSpec(**HEADS, page_size_padded=100)
    for spec, value in ((FullAttentionSpec(**HEADS), 1152), (padded, 100)):
        error = refusal(lambda spec=spec: layer_spec(spec))
        assert (f"{SPEC}.page_size_bytes", value) == (error.field, error.value)
        assert "1024" in error.expected


def test_older_latent_content_follows_from_page_size() -> None:
    """Older specs have no `state_content_bytes`. Here a token has 656 bytes."""

    class MLAAttentionSpec(like.MLAAttentionSpec):
        real_page_size_bytes = page_size_bytes = 16 * 656
        unpadded_page_size_bytes = None

    spec = layer_spec(MLAAttentionSpec(block_size=16, head_size=576, dtype="uint8"))
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
def test_parts_of_state_follow_from_shapes_of_rank(
    kind: str, shapes: Any, more: Any, units: dict[str, int], conv_layout: str
) -> None:
    """The conv channels on one of 2 ranks become x, B and C, or q, k and v, of the model."""
    if conv_layout == "SD" and "linear" not in kind:
        shapes = (shapes[0][::-1], *shapes[1:])
    spec = layer_spec(state(kind, shapes), parallel=tp(2), conv_layout=conv_layout, **more)
    assert units == {p.name: p.units for p in spec.parts if p.name in units}
    assert state(kind, shapes).page_size_bytes == spec.page_size_bytes(1, 2)


# Kind, shapes, options, field and value of the error, and a number or name in its requirement.
INVALID_STATES: list[tuple[str, Any, dict[str, Any], str, Any, str]] = [
    ("rwkv", ((4, 3), (4, 4)), {}, f"{SPEC}.mamba_type", "rwkv", "MAMBA2"),
    ("mamba1", ((32, 3), (16, 4)), {}, f"{SPEC}.shapes[0]", (32, 3), "16"),
    ("mamba2", ((41, 3), (4, 8, 4)), {}, f"{SPEC}.shapes[0]", (41, 3), "32"),
    ("mamba2", ((40, 3), (4, 8)), {}, f"{SPEC}.shapes", ((40, 3), (4, 8)), "num_heads"),
    ("mamba2", ((40, 3), (4, 8, 4)), {"parallel": tp(2)}, "n_groups", None, ""),
    ("mamba2", ((48, 3), (4, 8, 4)), {"parallel": tp(2), "n_groups": 2}, "n_groups", 2, "2"),
    ("gdn_attn", ((63, 3), (8, 4, 4)), {}, f"{SPEC}.shapes[0]", (63, 3), "32"),
    ("short_conv", ((32, 3), (8, 4)), {}, f"{SPEC}.shapes", ((32, 3), (8, 4)), "2"),
    ("mamba1", ((32,), (32, 4)), {}, f"{SPEC}.shapes", ((32,), (32, 4)), "2"),
    ("linear", ((4, 8), (2, 2)), {}, f"{SPEC}.shapes", ((4, 8), (2, 2)), "heads"),
    ("mamba1", ((32, 3), (32, 4)), {"conv_layout": "XY"}, "conv_layout", "XY", "'DS'"),
]


@pytest.mark.parametrize(
    ("kind", "shapes", "options", "field", "value", "requirement"), INVALID_STATES
)
def test_engine_spec_rejects_invalid_state(
    kind: str, shapes: Any, options: dict[str, Any], field: str, value: object, requirement: str
) -> None:
    """The shapes must give a whole number of channels of each part."""
    error = refusal(lambda: layer_spec(state(kind, shapes), **options))
    assert (field, value) == (error.field, error.value)
    assert requirement in error.expected


def test_conv_state_layout_follows_from_its_shape() -> None:
    """Only one order gives a whole number of channels. A shape that fits both is an error."""
    for shape, letters in (((40, 3), "LBHNC"), ((3, 40), "LBNHC")):
        engine = engine_spec(config((["l.0"], state("mamba2", (shape, (4, 8, 4))))))
        assert letters == engine.layout_of(engine.groups[0])
    for kind, shapes in (("short_conv", ((32, 2),)), ("mamba2", ((40, 48), (4, 8, 4)))):
        error = refusal(lambda kind=kind, shapes=shapes: layer_spec(state(kind, shapes)))
        assert ("conv_layout", None) == (error.field, error.value)
        assert str(shapes[0]) in error.expected
    assert 3 == len(layer_spec(state("gdn_attn", ((3, 64), (8, 4, 4)))).parts) - 1


SQUARES = [
    ("short_conv", ((4, 4),)),
    ("mamba1", ((4, 4), (4, 16))),
    ("mamba2", ((12, 12), (2, 2, 4))),
    ("gdn_attn", ((12, 12), (2, 2, 4))),
]


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize(("kind", "shapes"), SQUARES)
def test_engine_spec_requires_conv_layout_for_square_conv_state(
    kind: str, shapes: Any, *, replicated: bool
) -> None:
    """Both orders give the same spec, but the channels lie at other addresses."""
    theirs = config((["l.0"], state(kind, shapes, tp_replicated=replicated)))
    error = refusal(lambda: engine_spec(theirs))
    assert ("conv_layout", None) == (error.field, error.value)
    assert str(shapes[0]) in error.expected
    tensors = {"l.0": [zeros((6, *shape), np.uint8) for shape in shapes]}
    specs, steps = [], []
    for order in ("DS", "SD"):
        engine = engine_spec(theirs, conv_layout=order)
        specs.append(engine.groups[0].spec)
        steps.append(vllm.rank_cache(engine, ONE, tensors).regions[0].unit_stride)
    assert specs[0] == specs[1]
    assert [shapes[0][1], 1] == steps


def test_linear_state_needs_no_conv_layout() -> None:
    """A linear state has no conv state, so its shape may be square."""
    assert 4 == layer_spec(state("linear", ((4, 4),))).parts[0].units


def test_engine_spec_requires_conv_layout_if_other_order_lacks_only_n_groups() -> None:
    """With 40 channels a rank has one group. With 48 channels it has two."""
    theirs = state("mamba2", ((40, 48), (4, 8, 4)))
    error = refusal(lambda: layer_spec(theirs, parallel=tp(2)))
    assert ("conv_layout", None) == (error.field, error.value)
    for order, groups, channels in (("DS", 1, 4), ("DS", 2, 8), ("SD", None, 16)):
        spec = layer_spec(theirs, parallel=tp(2), conv_layout=order, n_groups=groups)
        assert channels == spec.parts[1].units


def test_replicated_state_moves_whole_to_every_rank() -> None:
    """With `tp_replicated` the shapes are those of the model."""
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
def test_nvfp4_moves_by_head_between_unequal_tp_and_block_sizes(tp: int, block: int) -> None:
    """FlashInfer's page has four parts: data and scales of the keys, then of the values.

    The registered shape [blocks, 2 x heads, tokens, 9] does not show these parts. FlashInfer
    permutes the scales of four tokens of a head. They can only move together, so the number of
    cached tokens must be a multiple of four.
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
    error = refusal(lambda: table.select(request_of(77, *tables, cached_tokens=17)))
    assert ("cached_tokens", 17) == (error.field, error.value)
    assert "tokens_per_state=4" in error.expected


@pytest.mark.parametrize(
    ("change", "layout", "field", "value", "requirement"),
    [
        ({}, "LBNHC", "layout", "LBNHC", "H outside N"),
        ({}, "LHBNC", "layout", "LHBNC", "outermost"),
        ({"state_content_bytes": 8}, "LBHNC", f"{SPEC}.state_content_bytes", 8, "9"),
        ({"num_head_slots": 2}, "LBHNC", f"{SPEC}.num_head_slots", 2, "4"),
        ({"block_size": 18}, "LBHNC", f"{SPEC}.block_size", 18, "4"),
    ],
)
def test_engine_spec_rejects_nvfp4_pages_unlike_flashinfer(
    change: Any, layout: str, field: str, value: object, requirement: str
) -> None:
    """A row of scales must not be divided by a block or by the layout."""
    spec = like.FullAttentionSpec(**{**HEADS, **NVFP4, **change})
    error = refusal(lambda: layer_spec(spec, layout=layout, backends=like.FLASHINFER))
    assert (field, value) == (error.field, error.value)
    assert requirement in error.expected


def test_rank_cache_rejects_nvfp4_tensor_unlike_flashinfer() -> None:
    """The pages must be contiguous and have 576 bytes: 4 slots of 16 tokens with 9 bytes."""
    spec = like.FullAttentionSpec(**{**HEADS, **NVFP4})
    engine = engine_spec(config((["layer.0"], spec)), backends=like.FLASHINFER)
    with_gaps = zeros((4, 4, 16, 12), np.uint8)[..., :9]
    for tensor, field, value, requirement in (
        (with_gaps, "stride", 12, "9"),
        (zeros((4, 4, 16, 8), np.uint8), "shape", (4, 4, 16, 8), "576"),
    ):
        error = refusal(lambda t=tensor: vllm.rank_cache(engine, ONE, {"layer.0": t}))
        assert (f"tensors['layer.0'].{field}", value) == (error.field, error.value)
        assert requirement in error.expected


def test_two_head_slots_become_planes_of_keys_and_values() -> None:
    """The layout of vLLM has no K. The adapter adds K outside the tokens."""
    spec = like.FullAttentionSpec(**HEADS, num_head_slots=2, state_content_bytes=32)
    engine = engine_spec(config((["layer.0"], spec)), layout="LBNHC", backends=like.B12X)
    assert "LBNKHC" == engine.layout_of(engine.groups[0])
    assert ("k", "v") == tuple(part.name for part in engine.groups[0].spec.parts)
    error = refusal(lambda: layer_spec(spec, layout="LKBNHC", backends=like.B12X))
    assert ("layout", "LKBNHC") == (error.field, error.value)
    odd = replace(spec, state_content_bytes=24)
    error = refusal(lambda: layer_spec(odd, backends=like.B12X))
    assert (f"{SPEC}.state_content_bytes", 24) == (error.field, error.value)
    assert "32" in error.expected


def test_engine_spec_reads_one_config_for_each_stage() -> None:
    """The layers of a group on both stages become one group."""
    spec = like.FullAttentionSpec(**HEADS)
    stages = [config(([f"layer.{2 * at}", f"layer.{2 * at + 1}"], spec)) for at in (0, 1)]
    engine = engine_spec(stages, parallel=kvspec.ParallelConfig(pp_size=2))
    assert {"layer.0": 0, "layer.1": 0, "layer.2": 1, "layer.3": 1} == engine.stage_of
    later = kvspec.RankId(pp=1)
    tensors = {f"layer.{at}": zeros((3, 2, 16, 16), np.uint16) for at in (2, 3)}
    cache = vllm.rank_cache(engine, later, tensors)
    assert {"layer.2", "layer.3"} == {region.layer for region in cache.regions}
    two_stages = kvspec.ParallelConfig(pp_size=2)
    error = refusal(lambda: engine_spec(stages[0], parallel=two_stages))
    assert ("config", "1 configs") == (error.field, error.value)
    assert "2" in error.expected
    other = config((["layer.2"], like.FullAttentionSpec(**{**HEADS, "head_size": 4})))
    error = refusal(lambda: engine_spec([stages[0], other], parallel=two_stages))
    assert ("group0['layer.2'].spec", 4) == (error.field, error.value.head_size)
    assert "layer.0" in error.expected


def test_uniform_group_has_sizes_of_each_layer() -> None:
    """The group has a latent and the keys of an indexer."""
    specs = {
        "layer.0.attn": like.MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16"),
        "layer.0.indexer": like.MLAAttentionSpec(block_size=64, head_size=132, dtype="uint8"),
    }
    group = like.UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs)
    spec = engine_spec(config((list(specs), group))).groups[0].spec
    assert {64 * 1152, 64 * 132} == {spec.of_layer(x).page_size_bytes() for x in specs}
    error = refusal(lambda: engine_spec(config((["layer.9"], group))))
    assert (f"{SPEC}.kv_cache_specs", list(specs)) == (error.field, error.value)
    assert "'layer.9'" in error.expected


def test_engine_lists_excluded_layers_and_untransferred_groups() -> None:
    """A group is not transferred if its `enable_kv_transfer` is False."""
    spec = like.FullAttentionSpec(**HEADS)
    theirs = config((["layer.0", "draft.1"], spec), (["draft.2"], spec))
    theirs.kv_cache_groups[1].enable_kv_transfer = False
    engine = engine_spec(theirs, excluded=["draft.1"])
    assert ("draft.1", "draft.2") == engine.excluded
    right = {"layer.0": zeros((3, 2, 16, 16), np.uint16)}
    assert 2 == len(vllm.rank_cache(engine, ONE, right).regions)


def test_engine_spec_rejects_layer_without_tensor_and_config_without_groups() -> None:
    """The error lists the layers that have a tensor."""
    spec = like.FullAttentionSpec(**HEADS)
    tensors = [like.KVCacheTensor(1024 * 6, ["layer.0"])]
    theirs = config((["layer.0", "layer.1"], spec), tensors=tensors)
    error = refusal(lambda: engine_spec(theirs))
    assert ("kv_cache_tensors", ["layer.0"]) == (error.field, error.value)
    assert "'layer.1'" in error.expected
    error = refusal(lambda: engine_spec(config()))
    assert ("kv_cache_groups", []) == (error.field, error.value)


FULL = like.FullAttentionSpec(**HEADS)
WINDOW = like.SlidingWindowSpec(**HEADS, sliding_window=9)
LATENT = like.MLAAttentionSpec(block_size=16, head_size=8, dtype="bfloat16")
MAMBA = state("mamba2", ((40, 3), (4, 8, 4)))
MIXED = [
    ("DeepSeek-V3.2", like.MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16"),
     V1 + "mla.flashmla_sparse.FlashMLASparseBackend", "plain"),
    ("DeepSeek-V4", PACKED, DS4, "opaque:deepseek"),
]  # fmt: skip


@pytest.mark.parametrize(("latent", "backend", "expected"), [row[1:] for row in MIXED],
                         ids=[row[0] for row in MIXED])  # fmt: skip
def test_uniform_group_has_latents_and_indexer_pages(
    latent: Any, backend: str, expected: str
) -> None:
    """VLLM puts both into one group. Each layer keeps the format of its own backend."""
    names = ["layer.0.attn", "layer.0.indexer.k_cache"]
    specs = dict(zip(names, (latent, INDEXER), strict=True))
    group = like.UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs)
    options = {
        "backends": dict(zip(names, (backend, INDEX), strict=True)),
        "variants": {names[1]: "rows"},
    }
    engines = [
        engine_spec(config((names, group)), parallel=kvspec.ParallelConfig(tp_size=size), **options)
        for size in (2, 1)
    ]
    own = engines[0].groups[0].spec
    assert [expected, "plain"] == [own.of_layer(name).page_format for name in names]
    assert [latent.page_size_bytes, INDEXER.page_size_bytes] == [
        own.of_layer(name).page_size_bytes() for name in names
    ]
    assert [("latent", 128), ("latent_scale", 4)] == [
        (part.name, part.content_bytes) for part in own.of_layer(names[1]).parts
    ]
    assert [] == moves(*engines, 150)


@pytest.mark.parametrize("shape", [(3, 64, 132), (3, 1, 64, 132)])
def test_cache_of_an_indexer_has_all_keys_before_all_scales(shape: tuple[int, ...]) -> None:
    """The kernels write key i at byte 128 i of a page, and its scale at 64 x 128 + 4 i."""
    engine = engine_spec(config((["layer.0"], INDEXER)), backends=INDEX, variants="rows")
    tensor = zeros(shape, np.uint8)
    cache = vllm.rank_cache(engine, ONE, {"layer.0": tensor})
    start = cache.region("layer.0", "latent").base
    assert [(0, 132 * 64, 128), (64 * 128, 132 * 64, 4)] == [
        (region.base - start, region.block_stride, region.state_stride) for region in cache.regions
    ]


def index_engine(variant: str = "rows", fp8_dtype: str | None = None) -> kvspec.EngineSpec:
    """Return an engine with the pages of an indexer."""
    options = {"backends": INDEX, "variants": variant, "fp8_dtype": fp8_dtype}
    return engine_spec(config((["layer.0"], INDEXER)), **options)


@pytest.mark.parametrize("tokens", [1, 16])
def test_page_of_an_indexer_with_mx_scales_has_four_bytes_for_each_key(tokens: int) -> None:
    """The bytes of a float32 and four of UE8M0 are as many, and other numbers."""
    spec = like.changed(INDEXER, "tokens_per_state", tokens)
    rows = 64 // tokens
    engine = engine_spec(config((["layer.0"], spec)), backends=INDEX, variants="mx")
    cache = vllm.rank_cache(engine, ONE, {"layer.0": zeros((3, rows, 132), np.uint8)})
    start = cache.region("layer.0", "latent").base
    assert [(0, 132 * rows, 128), (rows * 128, 132 * rows, 4)] == [
        (region.base - start, region.block_stride, region.state_stride) for region in cache.regions
    ]
    assert [] == moves(index_engine("mx"), index_engine("mx"), 150)


def over_the_wire(engine: kvspec.EngineSpec) -> kvspec.EngineSpec:
    """Return an engine as its peer decodes it."""
    cache, _ = kvspec.allocate(engine, ONE, 2)
    made = Handshake(engine_id="e", epoch=1, cache=cache, library="0.1.0")
    return decode_handshake(encode_handshake(made)).cache.engine


INDEX_KINDS = [
    index_engine(),
    index_engine("mx"),
    index_engine("shuffled"),
    index_engine(fp8_dtype="float8_e4m3fnuz"),
    index_engine("shuffled", "float8_e4m3fnuz"),
]


def test_index_pages_of_equal_size_and_other_numbers_do_not_move() -> None:
    """Keys of e4m3fnuz are half of those of e4m3fn. The wire preserves the difference."""
    assert index_engine() == index_engine(fp8_dtype="float8_e4m3fn")
    for producer, consumer in itertools.permutations(INDEX_KINDS, 2):
        read_again = over_the_wire(consumer)
        error = refusal(
            lambda a=producer, b=read_again: kvspec.plan_transfer(a, b), kvspec.MismatchError
        )
        fields = {mismatch.field.rpartition(".")[2] for mismatch in error.mismatches}
        assert fields & {"dtype", "scale_dtype", "page_format"}


def test_records_of_older_amd_gpus_do_not_move_to_others() -> None:
    """A row of `fp8_ds_mla` has 656 bytes on both, and vLLM describes it in the same way."""
    spec = replace(PACKED, head_size=576, state_content_bytes=656)
    backend = V1 + "mla.flashmla_sparse.FlashMLASparseBackend"
    engines = [
        engine_spec(config((["layer.0"], spec)), backends=backend, fp8_dtype=name)
        for name in (None, "float8_e4m3fn", "float8_e4m3fnuz")
    ]
    assert engines[0] == engines[1]
    error = refusal(lambda: kvspec.plan_transfer(*engines[1:]), kvspec.MismatchError)
    assert [("layer.0.dtype", "uint8", "float8_e4m3fnuz")] == [
        (mismatch.field, mismatch.producer, mismatch.consumer) for mismatch in error.mismatches
    ]


BOTH = like.UniformTypeKVCacheSpecs(
    block_size=16, kv_cache_specs={"l.0": FULL, "l.1": replace(FULL, head_size=16)}
)


def read(spec: Any = FULL, **options: Any) -> kvspec.EngineSpec:
    """Return the engine of one layer, or of a uniform group of two layers."""
    layers = ["l.0", "l.1"] if isinstance(spec, like.UniformTypeKVCacheSpecs) else ["l.0"]
    return engine_spec(config((layers, spec)), **options)


def changed_spec(spec: Any, name: str, value: object = "gone") -> kvspec.EngineSpec:
    """Read a spec of which one attribute is missing or has another *value*."""
    return read(like.changed(spec, name, value))


def changed_group(name: str, value: object = "gone") -> kvspec.EngineSpec:
    """Read a config whose second group lacks an attribute or has another *value* of it."""
    theirs = config((["l.0"], FULL), (["l.1"], FULL))
    theirs.kv_cache_groups[1] = like.changed(theirs.kv_cache_groups[1], name, value)
    return engine_spec(theirs)


def tensors(*layers_of_tensors: Any) -> kvspec.EngineSpec:
    """Read a config of layers l.0 and l.1 whose tensors contain *layers_of_tensors*."""
    placed = [like.KVCacheTensor(6144, layers) for layers in layers_of_tensors]
    return engine_spec(config((["l.0", "l.1"], FULL), tensors=placed))


# Call, field and value of the error, and an identifier or number in its requirement.
REFUSED: list[tuple[Callable[[], object], str, Any, str]] = [
    (lambda: engine_spec(None), "config", "NoneType", "KVCacheConfig"),
    (lambda: engine_spec("abc"), "config", "str", "KVCacheConfig"),
    (lambda: engine_spec([]), "config", "0 configs", "1"),
    (lambda: engine_spec([5]), "config[0]", "int", "KVCacheConfig"),
    (lambda: engine_spec(like.changed(config((["l.0"], FULL)), "kv_cache_groups", 5)),
     "kv_cache_groups", 5, "KVCacheGroupSpecs"),
    (lambda: engine_spec(like.changed(config((["l.0"], FULL)), "kv_cache_tensors", 5)),
     "kv_cache_tensors", 5, "KVCacheTensors"),
    (lambda: engine_spec([config((["l.0"], FULL)), config(([0], FULL))],
                              parallel=kvspec.ParallelConfig(pp_size=2)),
     "config[1].kv_cache_groups[0].layer_names", 0, ""),
    (lambda: changed_group("layer_names"), "kv_cache_groups[1].layer_names", None, ""),
    (lambda: changed_group("layer_names", "l.1"), "kv_cache_groups[1].layer_names", "l.1", ""),
    (lambda: changed_group("enable_kv_transfer", "no"),
     "kv_cache_groups[1].enable_kv_transfer", "no", ""),
    (lambda: changed_group("kv_cache_spec"),
     "kv_cache_groups[1].kv_cache_spec", "NoneType", "MambaSpec"),
    (lambda: changed_spec(FULL, "head_size"), f"{SPEC}.head_size", None, ""),
    (lambda: changed_spec(FULL, "num_kv_heads"), f"{SPEC}.num_kv_heads", None, ""),
    (lambda: changed_spec(FULL, "num_head_slots", -1), f"{SPEC}.num_head_slots", -1, ""),
    (lambda: changed_spec(FULL, "tokens_per_state", 3),
     f"{SPEC}.block_size", 16, "tokens_per_state=3"),
    (lambda: changed_spec(FULL, "page_size_bytes", "x"), f"{SPEC}.page_size_bytes", "x", ""),
    (lambda: changed_spec(WINDOW, "sliding_window"), f"{SPEC}.sliding_window", None, ""),
    (lambda: changed_spec(LATENT, "block_size", 0), f"{SPEC}.block_size", 0, ""),
    (lambda: changed_spec(MAMBA, "shapes"), f"{SPEC}.shapes", None, ""),
    (lambda: changed_spec(MAMBA, "shapes", 5), f"{SPEC}.shapes", 5, ""),
    (lambda: changed_spec(MAMBA, "shapes", (5,)), f"{SPEC}.shapes[0]", 5, ""),
    (lambda: changed_spec(MAMBA, "shapes", ((40, 3), (2, 4, 0))),
     f"{SPEC}.shapes[1]", (2, 4, 0), ""),
    (lambda: changed_spec(MAMBA, "dtypes", ()), f"{SPEC}.dtypes", (), "2"),
    (lambda: changed_spec(MAMBA, "dtypes", ("uint8", 8)), f"{SPEC}.dtypes[1]", 8, "bfloat16"),
    (lambda: changed_spec(BOTH, "kv_cache_specs"), f"{SPEC}.kv_cache_specs", None, ""),
    (lambda: changed_spec(BOTH, "kv_cache_specs", {"l.0": FULL}),
     f"{SPEC}.kv_cache_specs", ["l.0"], "'l.1'"),
    (lambda: changed_spec(BOTH, "kv_cache_specs",
                      {"l.0": FULL, "l.1": like.changed(FULL, "dtype", "x")}),
     f"{SPEC}.kv_cache_specs['l.1'].dtype", "x", "bfloat16"),
    (lambda: tensors(["l.0"]), "kv_cache_tensors", ["l.0"], "'l.1'"),
    (lambda: tensors(["l.0", "l.1"], ["l.2"]),
     "kv_cache_tensors[1].shared_by", "l.2", "kv_cache_groups"),
    (lambda: tensors(["l.0"], None), "kv_cache_tensors[1].shared_by", None, ""),
    (lambda: read(parallel="2"), "parallel", "2", "ParallelConfig"),
    (lambda: read(kernel_block_size="a"), "kernel_block_size", "a", ""),
    (lambda: read(n_groups="a"), "n_groups", "a", ""),
    (lambda: read(excluded=None), "excluded", None, ""),
    (lambda: read(excluded="l.0"), "excluded", "l.0", ""),
    (lambda: read(excluded=[["l.0"]]), "excluded", ["l.0"], ""),
    (lambda: read(excluded=["l.9"]), "excluded", "l.9", "kv_cache_groups"),
    (lambda: read(total_num_kv_heads={"l.9": 2}), "total_num_kv_heads", "l.9", "kv_cache_groups"),
    (lambda: read(total_num_kv_heads={"l.0": "2"}), "total_num_kv_heads['l.0']", "2", ""),
    (lambda: read(MAMBA, total_num_kv_heads="2"), "total_num_kv_heads", "2", ""),
]  # fmt: skip


@pytest.mark.parametrize(("call", "field", "value", "requirement"), REFUSED)
def test_engine_spec_rejects_invalid_config(
    call: Callable[[], object], field: str, value: object, requirement: str
) -> None:
    """The error contains the path of the invalid field, and its value."""
    error = refusal(call)
    assert (field, value) == (error.field, error.value)
    assert requirement in error.expected


def test_engine_spec_rejects_property_that_raises() -> None:
    """The error has the path of the property and the exception that the property raised."""

    class FullAttentionSpec(like.FullAttentionSpec):
        @property
        def page_size_bytes(self) -> int:
            raise NotImplementedError("which backend?")

    error = refusal(lambda: read(FullAttentionSpec(**HEADS)))
    assert f"{SPEC}.page_size_bytes" == error.field
    assert "NotImplementedError: which backend?" == error.value


def test_excluded_layers_are_given_in_any_order() -> None:
    """A set has no order, so the engine lists the layers in the order of the config."""
    theirs = config((["l.0", "l.1", "l.2"], FULL))
    assert ("l.1", "l.2") == engine_spec(theirs, excluded={"l.2", "l.1"}).excluded


@pytest.mark.parametrize(
    "spec", [FULL, WINDOW, LATENT, MAMBA, BOTH], ids=lambda spec: type(spec).__name__
)
@pytest.mark.parametrize("sizes", [1, 2])
def test_engine_spec_reads_or_rejects_config_with_one_changed_attribute(
    spec: Any, sizes: int
) -> None:
    """No other error is raised if any attribute is missing or has another value."""
    layers = ["l.0", "l.1"] if spec is BOTH else ["l.0"]
    page = 6 * spec.page_size_bytes if spec is not BOTH else 6144
    placed = [like.KVCacheTensor(page, [layer]) for layer in layers]
    right = config((layers, spec), tensors=placed)
    options = {"parallel": tp(sizes), "total_num_kv_heads": 2 * sizes, "n_groups": sizes}
    engine_spec(right, **options)
    refused = 0
    for where, theirs in like.broken(right):
        try:
            engine_spec(theirs, **options)
        except (kvspec.SpecError, kvspec.MismatchError):
            refused += 1
        except Exception as error:
            raise AssertionError(where) from error
    # Fewer errors would mean that the changes do not reach the fields that the adapter reads.
    assert refused > 50


def test_engine_spec_reads_or_rejects_arguments_of_other_types() -> None:
    """No other error is raised."""
    names = ("parallel", "total_num_kv_heads", "layout", "tp_rank", "kernel_block_size",
             "conv_layout", "n_groups", "excluded", "backends", "variants")  # fmt: skip
    theirs = config((["l.0"], FULL), (["l.1"], MAMBA))
    for name, value in itertools.product(names, (None, 5, "x", (), -1, 1.5, [["l.0"]], {})):
        with contextlib.suppress(kvspec.SpecError):
            engine_spec(theirs, **{name: value})


def trapped(first: Any, second: Any) -> list[str]:
    """Return the fields in which the engines of two specs of vLLM do not fit."""
    engines = [
        engine_spec(config((["layer.0"], spec)), conv_layout="SD") for spec in (first, second)
    ]
    error = refusal(lambda: kvspec.plan_transfer(*engines), kvspec.MismatchError)
    return [mismatch.field for mismatch in error.mismatches]


def test_window_of_one_token_more_is_refused() -> None:
    """MiMo-V2's 128 means 128 tokens in vLLM, and 129 in other engines."""
    windows = [like.SlidingWindowSpec(**HEADS, sliding_window=size) for size in (128, 129)]
    assert ["layer.0.sliding_window"] == trapped(*windows)


def test_column_of_the_current_input_is_refused() -> None:
    """A kernel of four columns keeps three inputs in vLLM, and four in transformers."""
    states = [state("SHORT_CONV", ((rows, 8),)) for rows in (3, 4)]
    assert ["layer.0.conv_x.states"] == trapped(*states)


def test_states_of_another_type_are_refused() -> None:
    """SGLang keeps temporal states as float32. vLLM keeps them like the model by default."""
    shapes = ((3, 32), (32, 4))
    types = ("bfloat16", "bfloat16"), ("bfloat16", "float32")
    states = [replace(state("MAMBA1", shapes), dtypes=each) for each in types]
    assert any("ssm" in field for field in trapped(*states))


def test_state_of_transposed_heads_is_refused() -> None:
    """Heads of 8 values and 4 keys are [8, 4] in vLLM. [4, 8] describes another model."""
    states = [state("GDN_ATTN", ((3, 40), (2, *head))) for head in ((8, 4), (4, 8))]
    assert trapped(*states)


def test_rows_of_an_encoder_item_move_like_a_request() -> None:
    """The encoder cache of vLLM has a tensor [rows, size] for each image."""
    spec = kvspec.MLAAttentionSpec(block_size=1, head_size=6, dtype="bfloat16")
    group = kvspec.KVCacheGroup(name="item", layers=["encoder"], spec=spec)
    engine = kvspec.EngineSpec(groups=[group], layout="LBNHC")
    rows, given = np.arange(30, dtype=np.uint16).reshape(5, 6), zeros((5, 6), np.uint16)
    source, target = (
        kvspec.RankCache.from_tensors(engine, ONE, {"encoder": item}, "(BN)C")
        for item in (rows, given)
    )
    plan = kvspec.plan_transfer(engine, engine)
    request = request_of(5, *({"item": range(5)} for _ in range(2)))
    assert [[rows.ctypes.data, given.ctypes.data, rows.nbytes]] == kvspec.build_table(
        plan, source, target
    ).descriptors(request).tolist()
    assert kvspec.verify(plan, {ONE: source}, {ONE: target}, request) is None
