"""Print which page formats of which engines, by kind of layer, move exactly or are refused by name.

Law: every cell is tried when this is run, over arrays made as that engine makes its own, and has
one of two verdicts. A cell is *exact* if `verify` finds no byte that is not right.
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
TRIALS = {"as it is": (1, 16), "other blocks": (1, 32), "other TP": (2, 16)}
"""What the consumer has where the producer has TP 1 and blocks of 16 tokens."""


@attrs.frozen
class Side:
    """One engine with the cache of every rank."""

    engine: kvspec.EngineSpec
    caches: dict[RankId, kvspec.RankCache]


@attrs.frozen
class Row:
    """One line: what it is, and how a side of it is made, given TP ranks and tokens of a block."""

    engine: str
    page: str
    kind: str
    make: Callable[[int, int], Side]


KEPT: list[Any] = []
"""A cache knows addresses only, so somebody has to keep the arrays."""


def array(shape: tuple[int, ...], dtype: Any = np.uint8) -> Any:
    """Return an array that stays."""
    KEPT.append(np.zeros(shape, dtype))
    return KEPT[-1]


def another_s(name: str, **fields: Any) -> Any:
    """Return an object of a class called *name*, as an engine would hand it over."""
    return type(name, (), fields)()


def on_vllm(
    cls: str,
    backend: str | None,
    fields: Callable[[int, int], dict[str, Any]],
    variants: str | None = None,
) -> Callable[[int, int], Side]:
    """Return how a side of vLLM is made of one layer."""

    def make(tp: int, block: int) -> Side:
        local = HEADS // tp
        given = {"block_size": block, "head_size": SIZE, "dtype": "uint8", "num_kv_heads": local}
        spec = another_s(cls, **{**given, **fields(local, block)})
        group = another_s("KVCacheGroupSpec", layer_names=["layers.0"], kv_cache_spec=spec)
        config = another_s("KVCacheConfig", kv_cache_groups=[group])
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
    """Return how a side of SGLang is made of one pool; its page is the block."""

    def pool(name: str, heads: int, page: int) -> Any:
        shape = (9 * page, 1, SIZE) if "MLA" in name else (9 * page, heads, SIZE)
        buffers = {"kv_buffer": [array(shape)]}
        if "MHA" in name:
            buffers = {"k_buffer": [array(shape)], "v_buffer": [array(shape)]}
        return another_s(name, page_size=page, dtype="uint8", start_layer=0, **buffers, **fields)

    def make(tp: int, block: int) -> Side:
        parallel = sglang.parallel_config(tp * dcp, dcp_size=dcp)
        caches, page = {}, block // dcp
        pools = {}
        for rank in parallel.ranks:
            heads = HEADS // parallel.tp_size
            pools[rank] = pool(cls, heads, page)
            if cls == "SWAKVPool":
                halves = [pool("MHATokenToKVPool", heads, page) for _ in "fw"]
                pools[rank] = another_s(
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
MEMORIES: tuple[tuple[str, str, str, str, str | None, Any, Any], ...] = (
    # engine, page, kind, layout, axes, shape by heads of a rank and block, one layer's view
    ("TensorRT-LLM", "pool, HND", "full", "BLKHNC", "BK(HNC)",
     lambda h, n: (9, 2, 2, h * n * C), lambda a, i: a[:, i]),
    ("TensorRT-LLM", "pool, NHD", "full", "BLKNHC", "BK(NHC)",
     lambda h, n: (9, 2, 2, h * n * C), lambda a, i: a[:, i]),
    ("TensorRT-LLM", "pool, order not said", "full", "BLKNHC", None,
     lambda h, n: (9, 2, 2, h * n * C), lambda a, i: a[:, i]),
    ("TensorRT-LLM", "pool", "MLA", "BLKNHC", "BK(NC)",
     lambda _, n: (9, 2, 1, n * C), lambda a, i: a[:, i]),
    ("LMCache", "chunks", "full", "BKLNHC", "BKN(HC)",
     lambda h, n: (9, 2, 2, n, h * C), lambda a, i: a[:, :, i]),
    ("LMCache", "chunk, packed by head", "full", "LBNHC", "(BN)(HC)",
     lambda h, n: (1, 2, 9 * n, 2 * h * C), lambda a, i: a[0, i]),
    ("LMCache", "chunk, packed by kind", "full", "LBNKHC", "(BN)(KHC)",
     lambda h, n: (1, 2, 9 * n, 2 * h * C), lambda a, i: a[0, i]),
    ("LMCache", "chunk, packing not said", "full", "LBNHC", None,
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
"""Memory that needs no adapter, as docs/adapters.md reads it."""


def read(kind: str, layout: str, axes: str | None, shape: Any, view: Any) -> Any:
    """Return how a side is made of one array of two layers."""

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
    """Return the fields of a spec that do not depend on TP or blocks."""
    return lambda _local, _block: more


def state(kind: str, shapes: Callable[[int], Any], **more: Any) -> Row:
    """Return the line of a recurrent state of so many bytes on one of TP ranks."""

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
    """Return two head slots: the keys and the values of all heads of a rank."""
    return {"num_head_slots": 2, "state_content_bytes": local * SIZE}


def nvfp4(local: int, _: int) -> dict[str, Any]:
    """Return two head slots for each head: half a byte an element, a byte of scale for 16."""
    return {
        "kv_quant_mode": "NVFP4",
        "num_head_slots": 2 * local,
        "state_content_bytes": SIZE // 2 + SIZE // 16,
    }


def rows() -> Iterator[Row]:
    """Yield every line."""
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
        ("of a backend not known", "acme.attention.Backend", heads()),
        ("of a backend not said", None, heads()),
    ):  # fmt: skip
        yield Row("vLLM", page, "full", on_vllm("FullAttentionSpec", backend, fields))
    cpu = V1 + "cpu_attn.CPUAttentionBackend"
    for isa in ("vec", "amx", None):
        name = f"CPU_ATTN, {isa or 'isa not said'}"
        yield Row("vLLM", name, "full", on_vllm("FullAttentionSpec", cpu, heads(), isa))
    turboquant = V1 + "turboquant_attn.TurboQuantAttentionBackend"
    for variant in ("rows", "e4b15", "scales apart", None):
        made = on_vllm("FullAttentionSpec", turboquant, packed, variant)
        yield Row("vLLM", f"TurboQuant, {variant or 'order not said'}", "full", made)
    ultraquant = V1 + "ultraquant_attn.UltraQuantAttentionBackend"
    yield Row("vLLM", "UltraQuant", "full", on_vllm("FullAttentionSpec", ultraquant, packed))
    fp8 = on_vllm("FullAttentionSpec", FLASH, heads(kv_quant_mode="FP8_PER_TENSOR"))
    yield Row("vLLM", "fp8, which one not said", "full", fp8)
    indexer = V1 + "mla.indexer.DeepseekV32IndexerBackend"
    record = heads(state_content_bytes=SIZE + 8)
    ds4 = MODELS + "deepseek_v4.sparse_mla.DeepseekV4FlashMLABackend"
    flashmla = V1 + "mla.flashmla_sparse.FlashMLASparseBackend"
    for variant in ("rows", "shuffled", None):
        made = on_vllm("MLAAttentionSpec", indexer, heads(cache_role="INDEXER"), variant)
        yield Row("vLLM", f"indexer, {variant or 'order not said'}", "MLA", made)
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
        yield Row("SGLang", "of its own", cls, on_sglang(cls))
    for name, page, kind, *how in MEMORIES:
        yield Row(name, page, kind, read(kind, *how))


def tables(engine: kvspec.EngineSpec, first: int) -> dict[str, list[int]]:
    """Return blocks enough for every group, from *first* on and around."""
    found = {}
    for group in engine.groups:
        tokens = group.own_parts[0].per_token
        count = -(-TOKENS // engine.virtual_block(group)) if tokens else 1
        found[group.name] = [1 + (first + place) % 8 for place in range(count)]
    return found


def verdict(row: Row, tp: int, block: int) -> str:
    """Return ``exact``, or the field by which the transfer is refused."""
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
