"""Make directories as vLLM's tiered offloading does, and open them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from canonical_writer import BLOCK, HASH, LAYERS, SIZE, element

import kvspec
from kvspec.adapters.vllm.stored_pages import CanonicalPages

__all__ = ["BLOCK", "LAYERS", "SIZE", "element"]

PAGE = HASH.hex()
PER_LAYER, PER_TOKEN = 1 << 12, 16 * SIZE  # Distances of the numbers of two layers, two tokens.


def sized(kind: type[kvspec.AttentionSpec], **more: Any) -> kvspec.AttentionSpec:
    """Return a small spec of *kind*."""
    return kind(**{"block_size": BLOCK, "head_size": SIZE, "dtype": "float16", **more})


def spec_of(row: dict[str, Any], **more: Any) -> kvspec.AttentionSpec:
    """Return the spec of the layers of a case."""
    if not row["heads"]:
        return sized(kvspec.MLAAttentionSpec, **more)
    return sized(kvspec.FullAttentionSpec, **{"total_num_kv_heads": row["heads"], **more})


def groups_of(row: dict[str, Any], **more: Any) -> list[kvspec.KVCacheGroup]:
    """Return one group of all layers."""
    return [kvspec.KVCacheGroup(name="group0", layers=LAYERS, spec=spec_of(row, **more))]


def fields_of(row: dict[str, Any], blocks: int = 1) -> dict[str, Any]:
    """Return vLLM's `config.json` of a case."""
    fields: dict[str, Any] = {
        "model_name": "org/model",
        "tokens_per_hash": BLOCK * row["dcp"],
        "blocks_per_file": blocks,
        "tp_size": row["tp"] if row["dcp"] > 1 else 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": row["dcp"],
        "dtype": "float16",
        "kv_cache_groups": [{"tokens_per_block": BLOCK * row["dcp"], "layer_names": LAYERS}],
        "inference_engine": "vllm",
        "canonical_format": f"v1-{row['family']}",
    }
    if row["dcp"] > 1:
        fields["parallel_agnostic"] = False
    return fields


def folder_of(root: Path, fields: dict[str, Any]) -> Path:
    """Make vLLM's directory for *fields*."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = root / f"{fields['model_name'].replace('/', '_')}_{digest}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True))
    return folder


def file_of(folder: Path, page: str = PAGE, group: int = 0) -> Path:
    """Return the path of the file of a page."""
    return folder.with_name(f"{folder.name}_r0") / page[:3] / f"{page[3:5]}_g{group}/{page}.bin"


def write_row(path: Path, row: dict[str, Any], blocks: int = 1, copies: int = 1) -> bytes:
    """Write the file of a page of all layers. *copies* workers hold the same heads."""
    numbers = np.array(row["page"], np.uint16)
    tokens = BLOCK * row["dcp"] * PER_TOKEN
    cells = [
        numbers + PER_LAYER * layer + tokens * block
        for layer in range(len(LAYERS))
        for block in range(blocks)
    ]
    content = np.concatenate(cells).astype(np.uint16).tobytes()
    content += bytes(-(-len(content) * copies // 4096) * 4096 - len(content))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return content


def opened(folder: Path, row: dict[str, Any], **changed: Any) -> CanonicalPages:
    """Return the pages in *folder*."""
    arguments: dict[str, Any] = {
        "model": "org/model",
        "encoding": row["encoding"],
        "accept_unverified": True,
        "interleave_size": 2 if row["dcp"] > 1 else None,
    }
    return CanonicalPages(folder, **{"groups": groups_of(row), **arguments, **changed})
