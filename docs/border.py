"""Print which page formats move exactly, and which meanings of keys an adapter knows.

Invariant: each cell of the table is tried when this script runs, over arrays of the shapes that the
engine itself allocates. A cell is *exact* if `verify` finds no wrong byte. Otherwise it is
*refused*, and shows the field that the error names. There is no third verdict.

How it works:
    A row of the table is a `Row`. Its function *make* builds one side of a transfer: an engine and
    the caches of all its ranks. The producer always has TP 1 and blocks of 16 tokens. Each column
    is a trial with another consumer:

        column          consumer
        as it is        TP 1, blocks of 16 tokens
        other blocks    TP 1, blocks of 32 tokens
        other TP        TP 2, blocks of 16 tokens

    For each trial, a request of 70 tokens is planned and verified.

    A second table has a row for each meaning of equal pages: what is stored, and how the adapter
    knows. Its function *read* calls the adapter. An adapter that does not know raises, and the cell
    *stored* shows the field. The other columns are trials with a consumer whose keys have another
    meaning. The oracle permutes them by definition, so *permuted* means that each byte is at its
    place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np

import kvspec
from kvspec import KeyContent, RankId
from kvspec.adapters import sglang, vllm
from kvspec.adapters.attention_modules import key_content_of
from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.rotation import rotation_of
from kvspec.adapters.sglang.describing import BackendSettings, Surroundings, describe
from kvspec.adapters.vllm import backends as vllm_backends
from kvspec.adapters.vllm.key_contents import scales_of

HEADS, SIZE, TOKENS = 4, 16, 70
V1, MODELS = "vllm.v1.attention.backends.", "vllm.models."
FLASH = V1 + "flash_attn.FlashAttentionBackend"
# The TP size and the block size of the consumer. The producer has TP 1 and blocks of 16 tokens.
TRIALS = {"as it is": (1, 16), "other blocks": (1, 32), "other TP": (2, 16)}


@attrs.frozen
class Side:
    """One engine with the caches of all its ranks."""

    engine: kvspec.EngineSpec
    caches: dict[RankId, kvspec.RankCache]


@attrs.frozen
class Row:
    """One line of the table. *make* builds a side from a TP size and a block size."""

    engine: str
    page: str
    kind: str
    make: Callable[[int, int], Side]


# A cache contains only addresses, so this list keeps the arrays alive.
KEPT: list[Any] = []


def array(shape: tuple[int, ...], dtype: Any = np.uint8) -> Any:
    """Return an array that is kept alive."""
    KEPT.append(np.zeros(shape, dtype))
    return KEPT[-1]


def engine_object(name: str, **fields: Any) -> Any:
    """Return an object of a class called *name*, like an object of the engine."""
    return type(name, (), fields)()


def on_vllm(
    cls: str,
    backend: str | None,
    fields: Callable[[int, int], dict[str, Any]],
    variants: str | int | None = None,
    fp8_dtype: str | None = None,
) -> Callable[[int, int], Side]:
    """Return the function that builds a side of vLLM with one layer."""

    def make(tp: int, block: int) -> Side:
        local = HEADS // tp
        sizes = {"block_size": block, "head_size": SIZE, "dtype": "uint8", "num_kv_heads": local}
        spec = engine_object(cls, **{**sizes, **fields(local, block)})
        group = engine_object("KVCacheGroupSpec", layer_names=["layers.0"], kv_cache_spec=spec)
        config = engine_object("KVCacheConfig", kv_cache_groups=[group])
        parallel = kvspec.ParallelConfig(tp_size=tp)
        engine = vllm.engine_spec(
            config,
            parallel=parallel,
            total_num_kv_heads=HEADS,
            backends=backend,
            # A number belongs to one layer.
            variants={"layers.0": variants} if isinstance(variants, int) else variants,
            fp8_dtype=fp8_dtype,
            n_groups=1,
            conv_layout="DS",
        )
        caches = {}
        for rank in parallel.ranks:
            # vLLM registers a state layer as one tensor of raw bytes.
            if cls == "MambaSpec":
                size = sum(int(np.prod(shape)) for shape in spec.shapes)
                tensor = array((9, 1, 1, size), np.int8)
            else:
                heads = 1 if "MLA" in cls else getattr(spec, "num_head_slots", None)
                heads = heads or spec.num_kv_heads
                width = 2 if spec.dtype.endswith("float16") else 1
                content = getattr(spec, "state_content_bytes", None) or width * spec.head_size * (
                    1 if "MLA" in cls else 2
                )
                tensor = array((9, heads, block, content))
            caches[rank] = vllm.rank_cache(engine, rank, {"layers.0": tensor})
        return Side(engine, caches)

    return make


def sglang_pool(name: str, heads: int, page: int, **fields: Any) -> Any:
    """Return a pool of SGLang with one layer. A rank has so many *heads*."""
    shape = (9 * page, heads if "MHA" in name else 1, SIZE)
    buffers: dict[str, Any] = {"page_size": page, "dtype": "uint8", "start_layer": 0}
    if "MHA" in name:
        buffers |= {"k_buffer": [array(shape)], "v_buffer": [array(shape)]}
    else:
        buffers["kv_buffer"] = [array(shape)]
    if name == "DSATokenToKVPool":
        pages = {"index_k_with_scale_buffer": [array((9, page * (128 + 4)))]}
        buffers |= {"index_page_size": page, "skip_topk_layers": [False], **pages}
    return engine_object(name, **buffers, **fields)


def scaled_pool(cls: str, recipe: str | None = None, flat: bool = False) -> Any:  # noqa: FBT001, FBT002
    """Return the function that builds a pool of elements with scales: FP4, or MXFP8.

    *flat* is whether the scales of all heads of a token have one axis.
    """
    wide = "MXFP8" in cls

    def make(heads: int, page: int) -> Any:
        heads, ordered = 1 if "MLA" in cls else heads, wide and recipe == "one kernel"
        width, count = (64, 2) if wide else (64, 8)
        page = 128 if ordered else page
        shape: tuple[int, ...] = (9 * page, heads * count) if flat else (9 * page, heads, count)
        shape = (9, heads, 32, 4, count) if ordered else shape
        own: dict[str, Any] = {"page_size": page, "dtype": "float8_e4m3fn", "start_layer": 0}
        for part in ["kv"] if "MLA" in cls else ["k", "v"]:
            own[f"{part}_buffer"] = [array((9 * page, heads, width))]
            own[f"{part}_scale_buffer"] = [array(shape)]
        if recipe is not None and not wide:
            own["quant_method"] = engine_object(recipe)
        return engine_object(cls, mxfp8_sf_interleaved=ordered, **own)

    return make


def with_fields(made: Any, **fields: Any) -> Any:
    """Return *made* with more fields."""
    vars(made).update(fields)
    return made


def swa_pool(heads: int, page: int) -> Any:
    """Return a pool of SGLang with a layer that keeps all tokens, and one with a window."""
    halves = [sglang_pool("MHATokenToKVPool", heads, page) for _ in "fw"]
    places = {0: (0, False), 1: (0, True)}
    return engine_object(
        "SWAKVPool", full_kv_pool=halves[0], swa_kv_pool=halves[1], layers_mapping=places
    )


def minimax_pool(heads: int, page: int) -> Any:
    """Return a pool of SGLang with one layer that keeps keys, values and an index key."""
    index = {"k_buffer": [array((9 * page, 1, SIZE))], "page_size": page, "dtype": "uint8"}
    return engine_object(
        "MiniMaxSparseKVPool",
        main_pool=sglang_pool("MHATokenToKVPool", heads, page),
        index_k_pool=engine_object("MHATokenToKOnlyPool", **index),
        index_k_layer_id_mapping={0: 0},
    )


def compressed_pool(_: int, page: int) -> Any:
    """Return a pool of SGLang with compressed latents. Its pages are 16 times as large.

    Layer 0 has a latent for 4 tokens, and layer 1 one for 128.
    """
    size, window = 16 * page, 256
    latents = {
        rows: engine_object(
            "DeepSeekV4SingleKVPool", page_size=rows, kv_layout="v4",
            kv_buffer=[array((9, -(-rows * 584 // 576) * 576)) for _ in range(count)],
        )
        for rows, count in ((window, 2), (size // 4, 1), (size // 128, 1))
    }  # fmt: skip
    keys = engine_object(
        "DeepSeekV4IndexerPool", page_size=size // 4,
        index_k_with_scale_buffer=[array((9, size // 4 * (128 + 4)))],
    )  # fmt: skip

    def state(ratio: int, ring: int, elements: int) -> Any:
        rows = array((9 * ring + 1, elements), np.float32)
        return engine_object(
            "CompressStatePool", ratio=ratio, ring_size=ring, request_scoped=ring == ratio,
            swa_page_size=window, kv_score_buffer=engine_object("KVAndScore", kv_score=rows),
        )  # fmt: skip

    return engine_object(
        "DeepSeekV4TokenToKVPool", page_size=size, sliding_window=128, _stage_start=0,
        _stage_end=2, swa_kv_pool=latents[window], sources_by_ratio={4: [0], 128: [1]},
        kv_pools={4: latents[size // 4], 128: latents[size // 128]}, index_pools={4: keys},
        compress_state_pools=[state(4, 8, 2048), state(128, 128, 1024)],
        indexer_compress_state_pools=[state(4, 8, 512), None],
    )  # fmt: skip


def hybrid_pool(
    conv: Callable[[int], tuple[int, ...]],
    temporal: Callable[[int], tuple[int, ...]],
    inner: str = "MHATokenToKVPool",
    **fields: Any,
) -> Callable[[int, int], Any]:
    """Return the function that builds a pool with one layer of states.

    *conv* and *temporal* return the shapes of one slot, for a rank with so many heads.
    """

    def make(heads: int, page: int) -> Any:
        cache = engine_object(
            "State",
            conv=[array((1, 9, *conv(heads)), np.float16)],
            temporal=array((1, 9, *temporal(heads)), np.float32),
        )
        own = {"mamba_layer_ids": [0], "conv_slice_axis": 0, "device": "cuda", **fields}
        return engine_object(
            "HybridLinearKVPool",
            full_kv_pool=sglang_pool(inner, heads, page),
            full_attention_layer_id_mapping={1: 0},
            mamba_pool=engine_object("MambaPool", mamba_cache=cache, **own),
        )

    return make


def on_sglang(
    cls: str | Callable[[int, int], Any],
    dcp: int = 1,
    keys: tuple[str, bool] = ("rows", False),
    **fields: Any,
) -> Callable[[int, int], Side]:
    """Return the function that builds a side of SGLang with one pool, whose pages are blocks.

    *keys* are the order of the keys of an indexer, and whether they have a Hadamard product.
    """

    def make(tp: int, block: int) -> Side:
        # SGLang's context ranks are TP ranks, and a block spans all of them.
        parallel = sglang.parallel_config(tp * dcp, dcp_size=dcp)
        caches, page, pools = {}, block // dcp, {}
        for rank in parallel.ranks:
            heads = HEADS // parallel.tp_size
            pools[rank] = (
                sglang_pool(cls, heads, page, **fields)
                if isinstance(cls, str)
                else cls(heads, page)
            )
        engine = sglang.engine_spec(
            pools[RankId()],
            parallel=parallel,
            total_num_kv_heads=HEADS,
            sliding_window=24,
            scales={"layers.0": (1.0, 1.0)},
            index_order=keys[0],
            index_hadamard=keys[1],
            n_groups=2,
        )
        for rank in parallel.ranks:
            caches[rank] = sglang.rank_cache(engine, rank, pools[rank])
        return Side(engine, caches)

    return make


# The sizes of q, k and v in a model with 4 heads.
DELTA = [4 * HEADS, 4 * HEADS, 6 * HEADS]
NAMES = ("layers.0", "layers.1")
C = SIZE

# Memory of engines without an adapter, read as docs/adapters.md describes.
MEMORIES: tuple[tuple[str, str, str, str, str | None, Any, Any], ...] = (
    # engine, page, kind, layout, axes, shape by heads of a rank and block, one layer's view
    ("TensorRT-LLM", "pool, HND", "full", "BLKHNC", "BK(HNC)",
     lambda h, n: (9, 2, 2, h * n * C), lambda a, i: a[:, i]),
    ("TensorRT-LLM", "pool, NHD", "full", "BLKNHC", "BK(NHC)",
     lambda h, n: (9, 2, 2, h * n * C), lambda a, i: a[:, i]),
    ("TensorRT-LLM", "pool", "MLA", "BLKNHC", "BK(NC)",
     lambda _, n: (9, 2, 1, n * C), lambda a, i: a[:, i]),
    ("LMCache", "chunks", "full", "BKLNHC", "BKN(HC)",
     lambda h, n: (9, 2, 2, n, h * C), lambda a, i: a[:, :, i]),
    ("LMCache", "chunk, packed by head", "full", "LBNHC", "(BN)(HC)",
     lambda h, n: (1, 2, 9 * n, 2 * h * C), lambda a, i: a[0, i]),
    ("LMCache", "chunk, packed by kind", "full", "LBNKHC", "(BN)(KHC)",
     lambda h, n: (1, 2, 9 * n, 2 * h * C), lambda a, i: a[0, i]),
    ("SGLang HiCache", "page_first_direct", "full", "KBLNHC", "KBNHC",
     lambda h, n: (2, 9, 2, n, h, C), lambda a, i: a[:, :, i]),
    ("SGLang HiCache", "page_first", "full", "KBNLHC", "K(BN)HC",
     lambda h, n: (2, 9 * n, 2, h, C), lambda a, i: a[:, :, i]),
    ("SGLang HiCache", "page_head", "full", "KBHNLC", "KBHNC",
     lambda h, n: (2, 9, h, n, 2, C), lambda a, i: a[..., i, :]),
    ("Hugging Face", "row of a batch", "full", "LHBNC", "H(BN)C",
     lambda h, n: (2, 2, 1, h, 9 * n, C), lambda a, i: dict(zip("kv", a[i, :, 0], strict=True))),
)  # fmt: skip


def read(kind: str, layout: str, axes: str, shape: Any, view: Any) -> Any:
    """Return the function that builds a side from one array with two layers."""

    def make(tp: int, block: int) -> Side:
        sizes: Any = {"block_size": block, "head_size": SIZE, "dtype": "uint8"}
        spec: Any = kvspec.MLAAttentionSpec(**sizes)
        if kind == "full":
            spec = kvspec.FullAttentionSpec(**sizes, total_num_kv_heads=HEADS)
        group = kvspec.KVCacheGroup(name="g", layers=NAMES, spec=spec)
        parallel = kvspec.ParallelConfig(tp_size=tp)
        engine = kvspec.EngineSpec(groups=[group], parallel=parallel, layout=layout)
        caches = {}
        for rank in parallel.ranks:
            whole = array(shape(HEADS // tp, block))
            views = {name: view(whole, number) for number, name in enumerate(NAMES)}
            caches[rank] = kvspec.RankCache.from_tensors(engine, rank, views, axes)
        return Side(engine, caches)

    return make


def heads(**more: Any) -> Callable[[int, int], dict[str, Any]]:
    """Return the function of spec fields that depend neither on TP nor on the block size."""
    return lambda _local, _block: more


def state(kind: str, shapes: Callable[[int], Any], **more: Any) -> Row:
    """Return the line of a recurrent state. *shapes* returns the shapes on one of so many ranks."""

    def fields(local: int, _: int) -> dict[str, Any]:
        own = shapes(local)
        return {"mamba_type": kind, "shapes": own, "dtypes": ("uint8",) * len(own), **more}

    name = kind + (" replicated" if more else "")
    return Row("vLLM", "raw state page", name, on_vllm("MambaSpec", None, fields))


ATTENTION = {
    "full": ("FullAttentionSpec", {}),
    "window": ("SlidingWindowSpec", {"sliding_window": 24}),
    "chunk": ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 32}),
    "cross": ("CrossAttentionSpec", {}),
    "MLA": ("MLAAttentionSpec", {}),
    "MLA window": ("SlidingWindowMLASpec", {"sliding_window": 24}),
}
PLANES = {"full": ATTENTION["full"], "window": ATTENTION["window"]}


def slots_of_all(local: int, _: int) -> dict[str, Any]:
    """Return the fields of two head slots: all keys and all values of a rank."""
    return {"num_head_slots": 2, "state_content_bytes": local * SIZE}


def nvfp4(local: int, _: int) -> dict[str, Any]:
    """Return the fields of NVFP4: half a byte per element, and a scale of one byte for 16."""
    return {
        "kv_quant_mode": "NVFP4",
        "num_head_slots": 2 * local,
        "state_content_bytes": SIZE // 2 + SIZE // 16,
    }


def packed_as(mode: str, size: int = 2 * SIZE + 8, **more: Any) -> Any:
    """Return the function of the fields of packed bytes in a mode of quantisation."""
    return heads(kv_quant_mode=mode, state_content_bytes=size, **more)


# The fields and the variant of a layer, by the format of its backend in `FORMATS`.
BY_FORMAT: dict[str, tuple[Any, str | int | None]] = {
    "rows": (heads(), None),
    "FlashInfer's": (heads(), None),
    "planes": (slots_of_all, None),
    "x-packed": (slots_of_all, None),
    "AITER's": (heads(), None),
    "QSA's": (heads(), None),
    "CPU's": (heads(), "vec"),
    "TurboQuant's": (packed_as("TURBOQUANT_K8V4"), "rows"),
    "Octave's": (packed_as("OCTAVE_K3V4"), None),
    "opaque:ultraquant": (packed_as("ULTRAQUANT_4BIT"), None),
    "opaque:msa": (nvfp4, None),
    "indexer's": (heads(cache_role="INDEXER"), "rows"),
    "keys": (heads(cache_role="INDEXER"), None),
    "DeepSeek's": (heads(), None),
    "ring": (heads(head_size_v=0, state_content_bytes=SIZE, num_kv_heads=1), 2),
}

# Words in the names of backends whose layers keep one row for each token.
LATENT = ("mla", "indexer", "deepseek", "dots3", "hy_v4", "qsa_cache")


SUMMARIES = MODELS + vllm_backends.SUMMARIES


def backend_rows() -> Iterator[Row]:
    """Yield a line for each backend class of vLLM, with the plain pages of its layers."""
    fields: Any
    for name, form in vllm_backends.FORMATS.items():
        fields, variant = BY_FORMAT[form]
        cls = "FullAttentionSpec"
        if any(word in name.lower() for word in LATENT):
            cls = "MLAAttentionSpec"
        cls = "CircularBufferSpec" if form == vllm_backends.RING else cls
        # Rows that are no key and value. Summaries have one head, whatever the model has.
        if "sconv" in name or name == SUMMARIES:
            one = {"num_kv_heads": 1} if name == SUMMARIES else {}
            fields = heads(head_size_v=0, state_content_bytes=SIZE, **one)
        yield Row("vLLM class", short_name(name), cls, on_vllm(cls, name, fields, variant))
    for name in vllm_backends.BACKENDS_REFUSED:
        made = on_vllm("FullAttentionSpec", name, heads())
        yield Row("vLLM class", short_name(name), "refused", made)


def short_name(name: str) -> str:
    """Return the name of a backend class without the package of most of them."""
    return name.removeprefix(V1).removeprefix("vllm.")


MLA_V4 = "DeepseekV4FlashMLABackend"
MLA_SPARSE = V1 + "mla.flashmla_sparse.FlashMLASparseBackend"
TRITON = V1 + "triton_attn.TritonAttentionBackend"
# A backend, the kind of its layers, their fields and, for elements of 8 bits, their type, for each
# `CacheDType` of vLLM 0.33. A type with several records has a line for each.
CACHE_TYPES: tuple[tuple[str, str, str, Any, str | None], ...] = (
    ("auto", FLASH, "full", heads(), None),
    ("float16", FLASH, "full", heads(dtype="float16"), None),
    ("bfloat16", FLASH, "full", heads(dtype="bfloat16"), None),
    *(
        (name, FLASH, "full", heads(kv_quant_mode="FP8_PER_TENSOR"), dtype)
        for name, dtype in (
            ("fp8", "float8_e4m3fn"),
            ("fp8_e4m3", "float8_e4m3fn"),
            ("fp8_e5m2", "float8_e5m2"),
            ("fp8_inc", None),
        )
    ),
    *(
        (name, backend, "MLA", packed_as(mode, size), None)
        for name, size, mode, backend in (
            ("fp8_ds_mla", 656, "NONE", MLA_SPARSE),
            ("fp8_ds_mla", 584, "NONE", MODELS + "deepseek_v4.sparse_mla." + MLA_V4),
            ("fp8_ds_mla", 528, "NONE", MODELS + "deepseek_v41.sparse_mla." + MLA_V4),
            ("nvfp4_ds_mla", 352, "NVFP4_DS_MLA", MLA_SPARSE),
            ("nvfp4_ds_mla", 288, "NVFP4_DS_MLA", MODELS + "deepseek_v41.sparse_mla." + MLA_V4),
        )
    ),
    *(
        (f"turboquant_{name}", V1 + "turboquant_attn.TurboQuantAttentionBackend", "full",
         packed_as(f"TURBOQUANT_{name.upper()}"), None)
        for name in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
    ),
    *(
        (f"octave_{name}", V1 + "rocm_octave_attn.RocmOctaveAttentionBackend", "full",
         packed_as(f"OCTAVE_{name.upper()}"), None)
        for name in ("k3v4", "k3v3", "k3v3_compact")
    ),
    ("ultraquant_4bit", V1 + "ultraquant_attn.UltraQuantAttentionBackend", "full",
     packed_as("ULTRAQUANT_4BIT"), None),
    ("int4_per_token_head", TRITON, "full", packed_as("INT4_PER_TOKEN_HEAD"), None),
    ("int8_per_token_head", TRITON, "full", packed_as("INT8_PER_TOKEN_HEAD", dtype="int8"), None),
    ("fp8_per_token_head", TRITON, "full", packed_as("FP8_PER_TOKEN_HEAD"), "float8_e4m3fn"),
    ("nvfp4", V1 + "flashinfer.FlashInferBackend", "full", nvfp4, None),
    ("nvfp4_4over6", V1 + "flashinfer.FlashInferBackend", "full", nvfp4, None),
)  # fmt: skip


def cache_type_rows() -> Iterator[Row]:
    """Yield the lines of the `CacheDType` values."""
    for name, backend, kind, fields, dtype in CACHE_TYPES:
        cls = ATTENTION[kind][0]
        size = fields(1, 16).get("state_content_bytes")
        page = f"{name}, {size} bytes" if kind == "MLA" else name
        variant = "rows" if "turboquant" in name else None
        yield Row("vLLM type", page, kind, on_vllm(cls, backend, fields, variant, dtype))


def sglang_rows() -> Iterator[Row]:
    """Yield the lines of all pools of SGLang 0.5.23."""
    yield Row("SGLang", "slots", "full", on_sglang("MHATokenToKVPool"))
    yield Row("SGLang", "slots", "full and window", on_sglang(swa_pool))
    yield Row("SGLang", "slots", "MLA", on_sglang("MLATokenToKVPool"))
    yield Row("SGLang", "slots, DCP 2", "MLA", on_sglang("MLATokenToKVPool", 2))
    yield Row("SGLang", "slots, DCP 2", "full", on_sglang("MHATokenToKVPool", 2))
    yield Row("SGLang", "vectorized_5d", "full",
              on_sglang("MHATokenToKVPool", kv_cache_layout="vectorized_5d"))  # fmt: skip
    for page, *own in (
        ("keys", "rows", False),
        ("keys shuffled", "shuffled", False),
        ("keys with Hadamard", "rows", True),
        ("keys shuffled, Hadamard", "shuffled", True),
    ):
        made = on_sglang("DSATokenToKVPool", keys=tuple(own))
        yield Row("SGLang", f"slots and index pages, {page}", "DSA", made)
    yield Row("SGLang", "slots and index keys", "MiniMax", on_sglang(minimax_pool))
    yield Row("SGLang", "pages and rings", "DeepSeek-V4", on_sglang(compressed_pool))
    for page, kind, pool in (
        (
            "fp4_mx_block16",
            "full",
            scaled_pool("MHATokenToKVPool", "FP4MXBlock16KVCacheMethod", flat=True),
        ),
        ("nvfp4, linear scales", "full", scaled_pool("MHATokenToKVPool", "NVFP4KVCacheMethod")),
        ("FP4", "full", scaled_pool("MHATokenToKVPoolFP4", flat=True)),
        ("FP4", "MLA", scaled_pool("MLATokenToKVPoolFP4", flat=True)),
        ("MXFP8", "full", scaled_pool("MHATokenToKVPoolMXFP8")),
        ("MXFP8, pages of 128", "full", scaled_pool("MHATokenToKVPoolMXFP8", "one kernel")),
    ):
        yield Row("SGLang", f"slots and scales, {page}", kind, on_sglang(pool))
    native = scaled_pool("MHATokenToKVPool", "NVFP4KVCacheMethod")
    yield Row("SGLang", "nvfp4, native scales", "full", on_sglang(
        lambda heads, page: with_fields(native(heads, page), native_k_scale_buffer=[])
    ))  # fmt: skip
    for kind, conv, temporal, more in (
        ("gated delta net", lambda h: (14 * h, 3), lambda h: (h, 6, 4),
         {"conv_shard_groups": DELTA}),
        ("KDA", lambda h: (3, 12 * h), lambda h: (h, 4, 4),
         {"conv_shard_groups": [4 * HEADS] * 3, "conv_slice_axis": 1, "inner": "MLATokenToKVPool"}),
        ("mamba 1", lambda h: (h, 3), lambda h: (h, 1, 4), {}),
        ("mamba 2", lambda h: (8 * h, 3), lambda h: (h, 4, 4), {}),
        ("short convolution", lambda h: (8 * h, 2), lambda h: (h, 8, 0), {}),
        ("linear attention", lambda _: (0, 0), lambda h: (h, 4, 4), {}),
    ):  # fmt: skip
        pool = on_sglang(hybrid_pool(conv, temporal, **more))
        yield Row("SGLang", "slots and states", kind, pool)
    for cls in sorted(sglang.pools.POOLS_NOT_YET):
        yield Row("SGLang", "other pools", cls, on_sglang(cls))


def rows() -> Iterator[Row]:
    """Yield all lines."""
    for kind, (cls, more) in ATTENTION.items():
        yield Row("vLLM", "rows", kind, on_vllm(cls, FLASH, heads(**more)))
    packed = heads(state_content_bytes=2 * SIZE + 8)
    triton = V1 + "triton_attn.TritonAttentionBackend"
    yield Row("vLLM", "rows, scales inline", "full", on_vllm("FullAttentionSpec", triton, packed))
    for kind, (cls, more) in PLANES.items():
        fields = lambda local, block, more=more: {**slots_of_all(local, block), **more}  # noqa: E731
        b12x = on_vllm(cls, V1 + "b12x.B12xPagedAttentionBackend", fields)
        yield Row("vLLM", "planes of all heads", kind, b12x)
    shuffling = V1 + "rocm_aiter_fa.AiterFlashAttentionBackend"
    for page, backend, fields in (
        ("NVFP4, FlashInfer", V1 + "flashinfer.FlashInferBackend", nvfp4),
        ("NVFP4, MSA", MODELS + "minimax_m3.nvidia.sparse_attention_msa."
         "MiniMaxM3SparseMSANvfp4Backend", nvfp4),
        ("ROCM_ATTN, keys in chunks", V1 + "rocm_attn.RocmAttentionBackend", slots_of_all),
        ("ROCM_AITER_FA", shuffling, heads()),
        ("ROCM_AITER_FA shuffled", shuffling, slots_of_all),
        ("unknown backend", "acme.attention.Backend", heads()),
        ("no backend", None, heads()),
    ):  # fmt: skip
        yield Row("vLLM", page, "full", on_vllm("FullAttentionSpec", backend, fields))
    cpu = V1 + "cpu_attn.CPUAttentionBackend"
    for isa in ("vec", "amx", None):
        name = f"CPU_ATTN, {isa or 'no isa'}"
        yield Row("vLLM", name, "full", on_vllm("FullAttentionSpec", cpu, heads(), isa))
    turboquant = V1 + "turboquant_attn.TurboQuantAttentionBackend"
    for variant in ("rows", "e4b15", "scales apart", None):
        made = on_vllm("FullAttentionSpec", turboquant, packed, variant)
        yield Row("vLLM", f"TurboQuant, {variant or 'no variant'}", "full", made)
    ultraquant = V1 + "ultraquant_attn.UltraQuantAttentionBackend"
    yield Row("vLLM", "UltraQuant", "full", on_vllm("FullAttentionSpec", ultraquant, packed))
    fp8 = on_vllm("FullAttentionSpec", FLASH, heads(kv_quant_mode="FP8_PER_TENSOR"))
    yield Row("vLLM", "fp8, no type", "full", fp8)
    indexer = V1 + "mla.indexer.DeepseekV32IndexerBackend"
    record = heads(state_content_bytes=SIZE + 8)
    ds4 = MODELS + "deepseek_v4.sparse_mla.DeepseekV4FlashMLABackend"
    flashmla = V1 + "mla.flashmla_sparse.FlashMLASparseBackend"
    for variant in ("rows", "shuffled", None):
        made = on_vllm("MLAAttentionSpec", indexer, heads(cache_role="INDEXER"), variant)
        yield Row("vLLM", f"indexer, {variant or 'no variant'}", "MLA", made)
    whole = heads(cache_role="INDEXER", head_size=128 + 4)
    for page, variant, dtype in (
        ("keys and scales", "rows", None),
        ("keys and MX scales", "mx", None),
        ("keys of e4m3fnuz and scales", "rows", "float8_e4m3fnuz"),
        ("keys shuffled", "shuffled", None),
    ):
        made = on_vllm("MLAAttentionSpec", indexer, whole, variant, dtype)
        yield Row("vLLM", f"index pages, {page}", "MLA", made)
    yield Row("vLLM", "DeepSeek V4 records", "MLA", on_vllm("MLAAttentionSpec", ds4, record))
    yield Row("vLLM", "DeepSeek V3.2 records", "MLA", on_vllm("MLAAttentionSpec", flashmla, record))
    yield from backend_rows()
    yield from cache_type_rows()
    for cls in ("RSWASpec", "HiddenStateCacheSpec", "SinkFullAttentionSpec"):
        yield Row("vLLM", "rows", cls, on_vllm(cls, FLASH, heads()))
    yield state("MAMBA1", lambda local: ((8 * local, 3), (8 * local, 4)))
    yield state("MAMBA2", lambda local: ((8 * local + 8, 3), (2 * local, 4, 4)))
    yield state("GDN_ATTN", lambda local: ((24 * local, 3), (2 * local, 4, 8)))
    yield state("SHORT_CONV", lambda local: ((8 * local, 2),))
    yield state("LINEAR", lambda local: ((local, 4, 4),))
    yield state("SHORT_CONV", lambda _: ((8, 2),), tp_replicated=True)
    yield state("KDA", lambda local: ((8 * local, 3), (local, 4, 4)))
    yield from sglang_rows()
    for name, page, kind, *how in MEMORIES:
        yield Row(name, page, kind, read(kind, *how))


@attrs.frozen
class Meaning:
    """One line of the second table.

    Attributes:
        engine: The engine.
        keys: What its model does with keys.
        known: How the adapter knows it.
        read: A function that lets the adapter read it. It returns fields of the spec.
    """

    engine: str
    keys: str
    known: str
    read: Callable[[], dict[str, Any]]


class Attention:
    """The module around an attention layer, as the models of vLLM and SGLang have it."""

    def __init__(self, **attributes: Any) -> None:
        rotary = {"is_neox_style": True, "rotary_dim": SIZE, "head_size": SIZE}
        self.rotary_emb = engine_object("RotaryEmbedding", **rotary)
        self.attn = self.use_rope = True
        vars(self).update(attributes)


class Unknown(Attention):
    """A class that the adapters do not know."""


# This class applies its rotary embedding only in some layers.
Attention.__module__, Attention.__qualname__ = (
    "vllm.model_executor.models.granite",
    "GraniteAttention",
)


def of_module(
    kind: type[Attention] = Attention, *, latent: bool = False, **attributes: Any
) -> Callable[[], dict[str, Any]]:
    """Return the function that reads the meaning of keys from a module of vLLM or SGLang."""

    def read() -> dict[str, Any]:
        module = FieldReader("module", kind(**attributes))
        content = key_content_of(module, SIZE, latent=latent)
        if content is None:
            raise kvspec.SpecError("key_content", None, "a meaning that the module shows")
        return {"key_content": content}

    return read


def of_keys(order: str) -> Callable[[], dict[str, Any]]:
    """Return the function that finds the rotation of keys that a model computes."""
    draw = np.random.default_rng(0)
    places = {"halves": (0, SIZE // 2, 1), "pairs": (0, 1, 2), "none": (0, 0, 0)}
    start, apart, step = places.get(order, (0, 3, 1))

    def keys(position: int, base: Any) -> Any:
        turned = base.copy()
        for couple in range(SIZE // 2 if apart else 0):
            one = start + couple * step
            z = (base[:, one] + 1j * base[:, one + apart]) * np.exp(1j * position * 0.5**couple)
            turned[:, one], turned[:, one + apart] = z.real, z.imag
        return turned

    def read() -> dict[str, Any]:
        base = draw.normal(size=(8, SIZE))
        rows = [keys(position, base) for position in (7, 1, 0)]
        return {"key_content": rotation_of("keys", rows, 1e-12)}

    return read


def vllm_scales(**attributes: Any) -> Callable[[], dict[str, Any]]:
    """Return the function that reads the scales of a quantised layer of vLLM."""

    def read() -> dict[str, Any]:
        layer = {"kv_cache_dtype": "fp8", "_k_scale": 0.5, "_v_scale": 0.25, **attributes}
        context = {"layers.0": engine_object("Attention", **layer)}
        fields = engine_object(
            "VllmConfig",
            compilation_config=engine_object("Compilation", static_forward_context=context),
        )
        config: Any = engine_object("Config", layers=["layers.0"])
        scales = scales_of(FieldReader("vllm_config", fields), [config])
        return {"scales_digest": kvspec.scales_digest(scales)}

    return read


def sglang_scales() -> dict[str, Any]:
    """Let SGLang's backend read a pool of 8 bits."""
    buffers = {name: [array((144, 2, SIZE))] for name in ("k_buffer", "v_buffer")}
    pool = engine_object("MHATokenToKVPool", page_size=16, dtype="float8_e4m3fn", **buffers)
    others = dict.fromkeys([field.name for field in attrs.fields(Surroundings)])
    describe(Surroundings(**{**others, "pool": pool}), BackendSettings(model="m"))
    raise AssertionError


def meanings() -> Iterator[Meaning]:
    """Yield all lines of the second table."""
    pairs = engine_object("Rotary", is_neox_style=False, rotary_dim=SIZE, head_size=SIZE)
    part = engine_object("Rotary", is_neox_style=False, rotary_dim=SIZE // 2, head_size=SIZE // 2)
    for engine in ("vLLM", "SGLang"):
        for keys, known, read in (
            ("rotated halves", "is_neox_style; the class applies rotary_emb", of_module()),
            ("rotated pairs", "is_neox_style; the class applies rotary_emb",
             of_module(rotary_emb=pairs)),
            ("normalised", "a module k_norm, or of another known name", of_module(k_norm=object())),
            ("not in this layer", "the condition of the class is false", of_module(use_rope=False)),
            ("no positions", "rotary_emb is None", of_module(rotary_emb=None)),
            ("perhaps rotated", "the class is not known", of_module(Unknown)),
            ("other order", "rotary_emb without is_neox_style", of_module(rotary_emb=object())),
            ("part of a key", "rotary_emb is smaller than a key", of_module(rotary_emb=part)),
            ("MLA", "is_neox_style; the rotated part is last",
             of_module(rotary_emb=part, latent=True)),
        ):  # fmt: skip
            yield Meaning(engine, keys, known, read)
    yield Meaning("vLLM", "fp8, scales of a file", "_k_scale, _v_scale of the layer", vllm_scales())
    yield Meaning("vLLM", "NVFP4, scales of a file", "_k_scale, _v_scale of the layer",
                  vllm_scales(kv_cache_dtype="nvfp4"))  # fmt: skip
    yield Meaning("vLLM", "fp8, scales of a batch", "calculate_kv_scales",
                  vllm_scales(calculate_kv_scales=True))  # fmt: skip
    yield Meaning("SGLang", "fp8", "dtype of the pool", sglang_scales)
    for engine in ("Hugging Face", "llama.cpp"):
        for keys, order in (
            ("rotated halves", "halves"),
            ("rotated pairs", "pairs"),
            ("not in this layer", "none"),
            ("other order", "thirds"),
        ):
            yield Meaning(engine, keys, "keys computed at three positions", of_keys(order))


ROTATED, PLAIN = KeyContent(rotary="halves", rotary_size=SIZE), KeyContent(rotary="none")
ORDERS = {"halves": "pairs", "pairs": "halves", "none": "none"}


def altered(fields: dict[str, Any], trial: str) -> dict[str, Any]:
    """Return the fields of a consumer with another meaning."""
    content = fields.get("key_content", ROTATED)
    changed = {
        "other order": attrs.evolve(content, rotary=ORDERS[content.rotary]),
        "not rotated": attrs.evolve(PLAIN, normalized=content.normalized),
        "other norm": attrs.evolve(content, normalized=not content.normalized),
    }
    if trial == "other scales":
        return {**fields, "scales_digest": "00"}
    return {**fields, "key_content": changed.get(trial, content)}


MEANING_TRIALS = ("other order", "not rotated", "other norm", "other scales")


def meaning_cells(meaning: Meaning) -> tuple[str, ...]:
    """Return what is stored, and the verdict of each trial."""
    try:
        fields = meaning.read()
    except kvspec.SpecError as error:
        return (f"refused: {error.field}", *("" for _ in MEANING_TRIALS))
    content = fields.get("key_content", ROTATED)
    stop = f" {content.rotary_start}..{content.rotary_stop}" if content.rotary_size else ""
    stored = content.rotary + stop + (", normalised" if content.normalized else "")
    if "scales_digest" in fields:
        stored += ", scales " + fields["scales_digest"][:6]
    cells = [stored]
    for trial in MEANING_TRIALS:
        ends = [{"key_content": content, **fields}, altered(fields, trial)]
        specs = [{"key_content": ROTATED, **end} for end in ends]
        kind = "MLA" if meaning.keys == "MLA" else "full"
        sides = [with_meaning(kind, **spec) for spec in specs]
        found = tried(*sides)
        same = specs[0] == specs[1]
        cells.append("permuted" if found == "exact" and not same else "same" if same else found)
    return tuple(cells)


def with_meaning(kind: str, **fields: Any) -> Side:
    """Return a side of one layer whose keys have the meaning in *fields*."""
    sizes: Any = {"block_size": 16, "head_size": SIZE, "dtype": "float8_e4m3fn", **fields}
    spec: Any = kvspec.MLAAttentionSpec(**sizes)
    if kind == "full":
        spec = kvspec.FullAttentionSpec(**sizes, total_num_kv_heads=HEADS)
    group = kvspec.KVCacheGroup(name="g", layers=NAMES[:1], spec=spec)
    engine = kvspec.EngineSpec(groups=[group])
    cache, storage = kvspec.allocate(engine, RankId(), 9)
    KEPT.append(storage)
    return Side(engine, {RankId(): cache})


def tables(engine: kvspec.EngineSpec, first: int) -> dict[str, list[int]]:
    """Return enough block ids for each group, beginning with place *first* of the ids 1 to 8."""
    ids = {}
    for group in engine.groups:
        tokens = group.own_parts[0].per_token
        count = -(-TOKENS // engine.virtual_block(group)) if tokens else 1
        ids[group.name] = [1 + (first + place) % 8 for place in range(count)]
    return ids


VERDICTS: dict[tuple[kvspec.EngineSpec, kvspec.EngineSpec], str] = {}


def verdict(row: Row, tp: int, block: int) -> str:
    """Return ``exact``, or ``refused`` with the field that the error names."""
    try:
        sides = row.make(1, 16), row.make(tp, block)
    except kvspec.SpecError as error:
        return f"refused: {error.field}"
    if row.engine != "vLLM class":
        return tried(*sides)
    # Many backends write equal pages, and here the memory follows from the engine.
    engines = sides[0].engine, sides[1].engine
    if engines not in VERDICTS:
        VERDICTS[engines] = tried(*sides)
    return VERDICTS[engines]


def tried(producer: Side, consumer: Side) -> str:
    """Return the verdict of a transfer between two sides."""
    try:
        plan = kvspec.plan_transfer(producer.engine, consumer.engine)
        request = kvspec.TransferRequest(
            request_id="border",
            num_tokens=TOKENS,
            encoder_tokens=TOKENS,
            producer_blocks=tables(producer.engine, 0),
            consumer_blocks=tables(consumer.engine, 5),
        )
        wrong = kvspec.verify(plan, producer.caches, consumer.caches, request, independent=True)
    except kvspec.SpecError as error:
        return f"refused: {error.field}"
    except kvspec.MismatchError as error:
        return f"refused: {error.mismatches[0].field}"
    return "exact" if wrong is None else f"WRONG: {wrong}"


def show(lines: list[tuple[str, ...]]) -> None:
    """Print lines in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())


def main() -> None:
    """Print both tables."""
    lines = [("engine", "page", "kind", *TRIALS)]
    lines += [
        (row.engine, row.page, row.kind, *(verdict(row, *trial) for trial in TRIALS.values()))
        for row in rows()
    ]
    show(lines)
    print()
    heads = ("engine", "keys", "known by", "stored", *MEANING_TRIALS)
    show([heads] + [(m.engine, m.keys, m.known, *meaning_cells(m)) for m in meanings()])


if __name__ == "__main__":
    main()
