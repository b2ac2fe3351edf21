"""Print for each engine, page format and kind of layer whether it moves exactly or is refused.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np

import kvspec
from kvspec import RankId
from kvspec.adapters import sglang, vllm

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
    variants: str | None = None,
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
            variants=variants,
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
                heads = 1 if "MLA" in cls else getattr(spec, "num_head_slots", None) or local
                content = getattr(spec, "state_content_bytes", None) or SIZE * (
                    1 if "MLA" in cls else 2
                )
                tensor = array((9, heads, block, content))
            caches[rank] = vllm.rank_cache(engine, rank, {"layers.0": tensor})
        return Side(engine, caches)

    return make


def on_sglang(cls: str, dcp: int = 1, **fields: Any) -> Callable[[int, int], Side]:
    """Return the function that builds a side of SGLang with one pool, whose pages are blocks."""

    def pool(name: str, heads: int, page: int) -> Any:
        shape = (9 * page, 1, SIZE) if "MLA" in name else (9 * page, heads, SIZE)
        buffers = {"kv_buffer": [array(shape)]}
        if "MHA" in name:
            buffers = {"k_buffer": [array(shape)], "v_buffer": [array(shape)]}
        return engine_object(
            name, page_size=page, dtype="uint8", start_layer=0, **buffers, **fields
        )

    def make(tp: int, block: int) -> Side:
        # SGLang's context ranks are TP ranks, and a block spans all of them.
        parallel = sglang.parallel_config(tp * dcp, dcp_size=dcp)
        caches, page = {}, block // dcp
        pools = {}
        for rank in parallel.ranks:
            heads = HEADS // parallel.tp_size
            pools[rank] = pool(cls, heads, page)
            if cls == "SWAKVPool":
                halves = [pool("MHATokenToKVPool", heads, page) for _ in "fw"]
                pools[rank] = engine_object(
                    cls,
                    full_kv_pool=halves[0],
                    swa_kv_pool=halves[1],
                    layers_mapping={0: (0, False), 1: (0, True)},
                )
        engine = sglang.engine_spec(
            pools[RankId()], parallel=parallel, total_num_kv_heads=HEADS, sliding_window=24
        )
        for rank in parallel.ranks:
            caches[rank] = sglang.rank_cache(engine, rank, pools[rank])
        return Side(engine, caches)

    return make


NAMES = ("layers.0", "layers.1")
C = SIZE

# Memory of engines without an adapter, read as docs/adapters.md describes.
MEMORIES: tuple[tuple[str, str, str, str, str | None, Any, Any], ...] = (
    # engine, page, kind, layout, axes, shape by heads of a rank and block, one layer's view
    ("TensorRT-LLM", "pool, HND", "full", "BLKHNC", "BK(HNC)",
     lambda h, n: (9, 2, 2, h * n * C), lambda a, i: a[:, i]),
    ("TensorRT-LLM", "pool, NHD", "full", "BLKNHC", "BK(NHC)",
     lambda h, n: (9, 2, 2, h * n * C), lambda a, i: a[:, i]),
    ("TensorRT-LLM", "pool, no axes", "full", "BLKNHC", None,
     lambda h, n: (9, 2, 2, h * n * C), lambda a, i: a[:, i]),
    ("TensorRT-LLM", "pool", "MLA", "BLKNHC", "BK(NC)",
     lambda _, n: (9, 2, 1, n * C), lambda a, i: a[:, i]),
    ("LMCache", "chunks", "full", "BKLNHC", "BKN(HC)",
     lambda h, n: (9, 2, 2, n, h * C), lambda a, i: a[:, :, i]),
    ("LMCache", "chunk, packed by head", "full", "LBNHC", "(BN)(HC)",
     lambda h, n: (1, 2, 9 * n, 2 * h * C), lambda a, i: a[0, i]),
    ("LMCache", "chunk, packed by kind", "full", "LBNKHC", "(BN)(KHC)",
     lambda h, n: (1, 2, 9 * n, 2 * h * C), lambda a, i: a[0, i]),
    ("LMCache", "chunk, packed, no axes", "full", "LBNHC", None,
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


def read(kind: str, layout: str, axes: str | None, shape: Any, view: Any) -> Any:
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
    yield Row("vLLM", "DeepSeek V4 records", "MLA", on_vllm("MLAAttentionSpec", ds4, record))
    yield Row("vLLM", "DeepSeek V3.2 records", "MLA", on_vllm("MLAAttentionSpec", flashmla, record))
    for cls in ("RSWASpec", "HiddenStateCacheSpec", "SinkFullAttentionSpec", "CircularBufferSpec"):
        yield Row("vLLM", "rows", cls, on_vllm(cls, FLASH, heads()))
    yield state("MAMBA1", lambda local: ((8 * local, 3), (8 * local, 4)))
    yield state("MAMBA2", lambda local: ((8 * local + 8, 3), (2 * local, 4, 4)))
    yield state("GDN_ATTN", lambda local: ((24 * local, 3), (2 * local, 4, 8)))
    yield state("SHORT_CONV", lambda local: ((8 * local, 2),))
    yield state("LINEAR", lambda local: ((local, 4, 4),))
    yield state("SHORT_CONV", lambda _: ((8, 2),), tp_replicated=True)
    yield state("KDA", lambda local: ((8 * local, 3), (local, 4, 4)))
    yield Row("SGLang", "slots", "full", on_sglang("MHATokenToKVPool"))
    yield Row("SGLang", "slots", "full and window", on_sglang("SWAKVPool"))
    yield Row("SGLang", "slots", "MLA", on_sglang("MLATokenToKVPool"))
    yield Row("SGLang", "slots, DCP 2", "MLA", on_sglang("MLATokenToKVPool", 2))
    yield Row("SGLang", "slots, DCP 2", "full", on_sglang("MHATokenToKVPool", 2))
    yield Row("SGLang", "vectorized_5d", "full",
              on_sglang("MHATokenToKVPool", kv_cache_layout="vectorized_5d"))  # fmt: skip
    for cls in sorted(sglang.engine.NOT_YET):
        yield Row("SGLang", "other pools", cls, on_sglang(cls))
    for name, page, kind, *how in MEMORIES:
        yield Row(name, page, kind, read(kind, *how))


def tables(engine: kvspec.EngineSpec, first: int) -> dict[str, list[int]]:
    """Return enough block ids for each group, beginning with place *first* of the ids 1 to 8."""
    ids = {}
    for group in engine.groups:
        tokens = group.own_parts[0].per_token
        count = -(-TOKENS // engine.virtual_block(group)) if tokens else 1
        ids[group.name] = [1 + (first + place) % 8 for place in range(count)]
    return ids


def verdict(row: Row, tp: int, block: int) -> str:
    """Return ``exact``, or ``refused`` with the field that the error names."""
    try:
        producer, consumer = row.make(1, 16), row.make(tp, block)
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


def main() -> None:
    """Print the table."""
    lines = [("engine", "page", "kind", *TRIALS)]
    lines += [
        (row.engine, row.page, row.kind, *(verdict(row, *trial) for trial in TRIALS.values()))
        for row in rows()
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())


if __name__ == "__main__":
    main()
