"""Write pages with vLLM's own code of canonical pages.

Usage, with a Python that has vLLM: `python canonical_writer.py FILE`. FILE receives the golden
values of `tests/stored/test_foreign_pages.py`. The test of each night imports this module instead.

Each element of a cache is a number that depends on what it is: the key or value, its token, its
head and its place in the head. A golden page lists the numbers in the order of its bytes.
"""

from __future__ import annotations

import ctypes
import gzip
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 2  # Elements of a key, of a value, and of a latent.
BLOCK = 4  # Tokens of a block of one context rank.
LAYERS = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn"]
HASH = hashlib.sha256(b"block").digest()


def case(
    heads: int, tp: int, encoding: str, family: str, dcp: int = 1, pcp: int = 1
) -> dict[str, Any]:
    """Return one case. *heads* is 0 for latents."""
    interleave = 2 if dcp * pcp > 1 else 1
    return {
        "heads": heads, "tp": tp, "encoding": encoding, "family": family, "dcp": dcp, "pcp": pcp,
        "interleave": interleave,
    }  # fmt: skip


def grid(most: int) -> Iterator[dict[str, Any]]:
    """Yield all cases of sizes up to *most*, whether vLLM has pages of them or not."""
    sizes = range(1, most + 1)
    for heads, tp, encoding, family in itertools.product(
        sizes, sizes, ("packed", "split"), ("nhd", "hnd")
    ):
        yield case(heads, tp, encoding, family)
    for heads, tp, encoding, family, dcp, pcp in itertools.product(
        (1, 2, 4), (1, 2, 4, 8), ("packed", "split"), ("nhd", "hnd"), (1, 2, 4), (1, 2)
    ):
        if dcp * pcp > 1 and tp % dcp == 0:
            yield case(heads, tp, encoding, family, dcp, pcp)
    for tp, dcp in itertools.product((1, 2, 3, 4, 8), (1, 2, 4)):
        if tp % dcp == 0:
            yield case(0, tp, "packed", "nhd", dcp)


def sample() -> list[dict[str, Any]]:
    """Return the cases of the golden values."""
    plain = [
        case(heads, tp, encoding, family)
        for heads, tp in ((4, 2), (2, 8), (3, 1))
        for encoding in ("packed", "split")
        for family in ("nhd", "hnd")
    ]
    context = [case(2, 4, "packed", "hnd", 2), case(2, 4, "split", "nhd", 2)]
    return [*plain, *context, case(0, 4, "packed", "nhd"), case(0, 4, "packed", "nhd", 2)]


def element(part: int, token: Any, head: Any, at: Any) -> Any:
    """Return the number of an element: of its part (K 0, V 1), token, head and place."""
    return ((part * 64 + token) * 16 + head) * SIZE + at


def local_page(case: dict[str, Any], rank: int) -> Any:
    """Return the block of one worker, in the order of vLLM's tensor: (tensor, page)."""
    import torch  # noqa: PLC0415 - only this Python has it

    heads, tp, cp = case["heads"], case["tp"], case["dcp"] * case["pcp"]
    tp_rank, context = rank % tp, (rank // tp) * case["dcp"] + rank % tp % case["dcp"]
    own = max(1, heads // tp)
    first = tp_rank // max(1, tp // heads) if heads < tp and heads else tp_rank * own
    local = np.arange(BLOCK)
    chunk, inside = np.divmod(local, case["interleave"])
    token = (chunk * cp + context) * case["interleave"] + inside
    if not heads:
        page = element(0, token[:, None], 0, np.arange(SIZE))
        return None, page.astype(np.uint16)
    token, head, at = np.ix_(token, first + np.arange(own), np.arange(SIZE))
    kv = np.stack([element(part, token, head, at) for part in (0, 1)])  # K N H C
    if case["encoding"] == "packed":
        packed = np.concatenate(list(kv), axis=-1)  # N H 2C
        memory = packed if case["family"] == "nhd" else packed.swapaxes(0, 1)
        memory = np.ascontiguousarray(memory[None]).astype(np.int16)
        tensor = torch.from_numpy(memory)
        tensor = tensor.permute(0, 2, 1, 3) if case["family"] == "nhd" else tensor
    else:
        memory = kv if case["family"] == "nhd" else kv.swapaxes(1, 2)
        memory = np.ascontiguousarray(memory[None]).astype(np.int16)
        tensor = torch.from_numpy(memory)
        tensor = tensor if case["family"] == "nhd" else tensor.permute(0, 1, 3, 2, 4)
    return tensor, memory.view(np.uint16)


def canonical_page(case: dict[str, Any]) -> list[int] | None:
    """Return the page that vLLM makes of the blocks of all workers, or None if it has none."""
    import torch  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import (  # noqa: PLC0415
        canonical_mapping as vllm,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec  # noqa: PLC0415

    heads, tp = case["heads"], case["tp"]
    ranks = range(tp * case["pcp"])
    if heads:
        spec = FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=max(1, heads // tp),
            head_size=SIZE,
            dtype=torch.int16,
        )
    else:
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=SIZE, dtype=torch.int16)
    mappings, pages = [], []
    for rank in ranks:
        context = vllm._RankContext(
            tp_size=tp, dcp_size=case["dcp"], pcp_size=case["pcp"], interleave=case["interleave"],
            total_kv_heads=heads or 1, rank=rank,
        )  # fmt: skip
        tensor, page = local_page(case, rank)
        mapping = vllm._layer_mapping(spec, tensor, 1, context)
        if mapping is None:
            return None
        mappings.append(mapping)
        pages.append(page.reshape(-1).view(np.uint8))
    vllm._verify_tiling("layer", mappings)
    size = mappings[0].canonical_page_size_bytes
    results = []
    for block in range(mappings[0].num_writers):
        canonical = np.zeros(size, np.uint8)
        for mapping, page in zip(mappings, pages, strict=True):
            if mapping.is_writer(block):
                copy_runs(mapping.runs, page, canonical)
        results.append(canonical.view(np.uint16).tolist())
    # Ranks with the same bytes take turns, which must not change them.
    if any(result != results[0] for result in results):
        raise ValueError(f"{case}: the page depends on its writer")
    return results[0]


def mooncake_cases(most: int) -> Iterator[dict[str, Any]]:
    """Yield all cases of shards that Mooncake's store shares between TP sizes."""
    for heads, tp, shards in itertools.product(range(1, most + 1), repeat=3):
        if heads % shards == 0 and shards % tp == 0:
            for family in ("nhd", "hnd"):
                yield {**case(heads, tp, "packed", family), "shards": shards}


def mooncake_objects(case: dict[str, Any], layers: int, key: bytes) -> dict[str, list[int]]:
    """Return the objects that vLLM's connector for Mooncake's store writes for one block."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (  # noqa: PLC0415
        data as vllm,
    )

    kind = {"nhd": vllm.LBNHCStoreLayout, "hnd": vllm.LBHNCStoreLayout}[case["family"]]
    objects: dict[str, list[int]] = {}
    for rank in range(case["tp"]):
        namespace = kind.shared_namespace(case["shards"], 1)
        metadata = vllm.KeyMetadata("model", rank, 0, 0, 0, store_namespace=namespace)
        store = kind(metadata, BLOCK, BLOCK, case["tp"], case["shards"], rank, case["heads"])
        tensor, _ = local_page(case, rank)
        caches = [tensor + layer * 4096 for layer in range(layers)]
        store.register_kv_caches(caches, 1)
        for shard in store.local_shard_ids:
            addresses, sizes, _ = store.prepare_values([(0, BLOCK)], [0], [shard])
            pieces = map(ctypes.string_at, addresses[0], sizes[0])
            numbers = np.frombuffer(b"".join(pieces), np.uint16)
            objects[store.key_for(shard, key)] = numbers.tolist()
    return objects


def directory(case: dict[str, Any]) -> list[str]:
    """Return the directory and the file that vLLM makes for a case, without their root."""
    from vllm.v1.kv_offload.base import OffloadKey, make_offload_key  # noqa: PLC0415
    from vllm.v1.kv_offload.file_mapper import FileMapper  # noqa: PLC0415

    mapper = FileMapper(
        root_dir="", model_name="org/model", tokens_per_hash=BLOCK * case["dcp"],
        blocks_per_file=1, tp_size=case["tp"], pp_size=1, pcp_size=1, dcp_size=case["dcp"], rank=0,
        dtype="float16", parallel_agnostic=case["dcp"] == 1,
        kv_cache_groups=[{"tokens_per_block": BLOCK * case["dcp"], "layer_names": LAYERS}],
        canonical_format=f"v1-{case['family']}",
    )  # fmt: skip
    key: OffloadKey = make_offload_key(HASH, 0)
    return [mapper.base_path, mapper.get_file_name(key)]


def block_hashes(tokens: list[int]) -> list[str]:
    """Return vLLM's hash of each whole block of a prompt."""
    from vllm.utils.hashing import sha256  # noqa: PLC0415
    from vllm.v1.core import kv_cache_utils as vllm  # noqa: PLC0415

    vllm.init_none_hash(sha256)
    last, hashes = None, []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        last = vllm.hash_block_tokens(sha256, last, tokens[start : start + BLOCK])
        hashes.append(last.hex())
    return hashes


def copy_runs(runs: Any, page: Any, canonical: Any) -> None:
    """Copy what a worker writes."""
    for run in runs:
        for number in range(run.num_fragments):
            source = run.local_offset + number * run.local_stride
            target = run.canonical_offset + number * run.canonical_stride
            canonical[target : target + run.fragment_size] = page[
                source : source + run.fragment_size
            ]


def deletes_longer_rows(folder: Path) -> dict[str, Any]:
    """Let vLLM's tier store a row of one page and load it as a row of two, as at twice the TP."""
    from vllm.v1.kv_offload.tiering.fs import io  # noqa: PLC0415

    path, row = folder / "row.bin", memoryview(bytearray(4096)).cast("B")
    io._store_block(str(path), row, 0, len(row), use_o_direct=False)
    stored = path.exists()
    longer = memoryview(bytearray(8192)).cast("B")
    try:
        io._load_block(str(path), longer, 0, len(longer), use_o_direct=False)
    except OSError as error:
        return {"stored": stored, "error": str(error), "left": path.exists()}
    return {"stored": stored, "error": "", "left": path.exists()}


def golden() -> dict[str, Any]:
    """Return the golden values."""
    sizes = {(4, 1, 2), (4, 2, 4), (3, 1, 3)}
    return {
        "hashes": block_hashes([*range(1000, 1014)]),
        "rows": [{**one, "page": canonical_page(one), "paths": directory(one)} for one in sample()],
        "mooncake": [
            {**one, "objects": mooncake_objects(one, len(LAYERS), HASH)}
            for one in mooncake_cases(4)
            if (one["heads"], one["tp"], one["shards"]) in sizes
        ],
    }


def everything(folder: Path) -> dict[str, Any]:
    """Return all cases for the test of each night."""
    return {
        "rows": [{**one, "page": canonical_page(one)} for one in grid(16)],
        "mooncake": [
            {**one, "objects": mooncake_objects(one, len(LAYERS), HASH)}
            for one in mooncake_cases(8)
        ],
        "io": deletes_longer_rows(folder),
    }


if __name__ == "__main__":
    import vllm

    target = Path(sys.argv[1])
    values = everything(target.parent) if sys.argv[2:] == ["--grid"] else golden()
    text = json.dumps({"vllm": vllm.__version__, **values}).encode()
    target.write_bytes(gzip.compress(text, mtime=0))
