"""Test the pages of vLLM's kernels that are not rows of tokens.

The place of each element in a page of two heads was recorded by running vLLM 0.32. The pages are
those of `reshape_and_cache` of CPU attention, and of the views of paged attention on ROCm.
"""

from __future__ import annotations

import ctypes
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm_like as like
from builders import request as request_of

import kvspec
from kvspec.adapters import vllm

ROWS: list[dict[str, Any]] = json.loads(
    gzip.decompress((Path(__file__).parent / "vllm_pages.json.gz").read_bytes())
)["rows"]
V1 = "vllm.v1.attention.backends."
BACKENDS = {
    "CPU_ATTN": V1 + "cpu_attn.CPUAttentionBackend",
    "ROCM_ATTN": V1 + "rocm_attn.RocmAttentionBackend",
    "plain": like.FLASH,
}
NAMES = [
    f"{row['backend']}-{row['isa']}-{row['dtype']}-{row['block_size']}x{row['head_size']}"
    for row in ROWS
]
RANK = kvspec.RankId()
Side = tuple[kvspec.EngineSpec, dict[kvspec.RankId, kvspec.RankCache], list[Any]]


def side(row: dict[str, Any], backend: str, block: int, tp: int = 1) -> Side:
    """Return an engine, its caches, and the registered arrays of 9 blocks each."""
    local, size, dtype = row["heads"] // tp, row["head_size"], row["dtype"]
    width = like.ITEMSIZE[dtype]
    more: dict[str, Any] = {}
    if backend == "ROCM_ATTN":
        more = {"num_head_slots": 2, "state_content_bytes": local * size * width}
    spec = like.FullAttentionSpec(
        block_size=block, num_kv_heads=local, head_size=size, dtype=dtype, **more
    )
    engine = like.engine_spec(
        like.config((["layer.0"], spec)),
        parallel=kvspec.ParallelConfig(tp_size=tp),
        total_num_kv_heads=row["heads"],
        backends=BACKENDS[backend],
        variants=row["isa"],
    )
    caches, arrays = {}, []
    for rank in engine.parallel.ranks:
        shape = (9, spec.slots, block, spec.content // width)
        arrays.append(np.zeros(shape, like.NUMPY[width]))
        caches[rank] = vllm.rank_cache(engine, rank, {"layer.0": arrays[-1]})
    return engine, caches, arrays


def places(backend: str, block: int, heads: int, row: dict[str, Any], part: str) -> Any:
    """Return the place of each element [token, head, dim] in a page, worked out by hand."""
    size, x = row["head_size"], 16 // like.ITEMSIZE[row["dtype"]]
    token, head, dim = np.ogrid[:block, :heads, :size]
    if backend == "plain":
        return ((head * block + token) * 2 + (part == "v")) * size + dim
    if backend == "CPU_ATTN":
        first = head * 2 * block * size
        return first + (dim * block + token if part == "k" else (block + token) * size + dim)
    if part == "k":
        return ((head * (size // x) + dim // x) * block + token) * x + dim % x
    return ((heads + head) * size + dim) * block + token


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_elements_are_at_places_of_kernel(row: dict[str, Any]) -> None:
    """Every element of keys and values is compared with the recorded place."""
    block, heads, size = row["block_size"], row["heads"], row["head_size"]
    _, caches, arrays = side(row, row["backend"], block)
    page, width = arrays[0].ctypes.data, like.ITEMSIZE[row["dtype"]]
    for part in "kv":
        region = caches[RANK].region("layer.0", part)
        elements = [
            (region.address(0, head, token) + region.chunk_offset(dim * width) - page) // width
            for token in range(block)
            for head in range(heads)
            for dim in range(size)
        ]
        # The values of ROCm were recorded from the beginning of their own plane.
        second = row["backend"] == "ROCM_ATTN" and part == "v"
        recorded = np.array(row[part]) + (block * heads * size if second else 0)
        assert recorded.tolist() == elements
        assert recorded.tolist() == places(row["backend"], block, heads, row, part).ravel().tolist()


TOKENS, CACHED = 77, 5


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
@pytest.mark.parametrize(("backend", "block", "tp"), [("plain", 16, 2), ("same", 64, 1)])
def test_pages_move_to_other_block_size_or_plain_pages(
    row: dict[str, Any], backend: str, block: int, tp: int
) -> None:
    """The target has blocks of 64 of the same kind, or plain rows of 16 tokens on two ranks."""
    backends = row["backend"], row["backend"] if backend == "same" else backend
    blocks = row["block_size"], block
    producer, consumer = side(row, backends[0], blocks[0]), side(row, backends[1], block, tp)
    tables = [[8 - at for at in range(-(-TOKENS // size))] for size in blocks]
    request = request_of(TOKENS, {"group0": tables[0]}, {"group0": tables[1]}, cached_tokens=CACHED)
    source = producer[2][0].reshape(9, -1)
    source[:] = np.random.default_rng(1).integers(1, 2**15, source.shape).astype(source.dtype)
    plan = kvspec.plan_transfer(producer[0], consumer[0])
    for rank, cache in consumer[1].items():
        table = kvspec.build_table(plan, producer[1][RANK], cache)
        for start, end, length in table.descriptors(request).tolist():
            ctypes.memmove(end, start, length)
        target, local = consumer[2][rank.tp].reshape(9, -1), row["heads"] // tp
        for part in "kv":
            source_places = places(backends[0], blocks[0], row["heads"], row, part)
            target_places = places(backends[1], block, local, row, part)
            for token in range(TOKENS):
                own = slice(rank.tp * local, (rank.tp + 1) * local)
                source_block = source[tables[0][token // blocks[0]]]
                sent = source_block[source_places[token % blocks[0], own]]
                received = target[tables[1][token // block]][target_places[token % block]]
                assert np.array_equal(received, sent if token >= CACHED else np.zeros_like(sent))
