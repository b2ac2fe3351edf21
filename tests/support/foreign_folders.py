"""Make stores as other programs do, open them, and compare each element of an object."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import unified_writer as sglang
from canonical_writer import BLOCK, HASH, LAYERS, SIZE, element

import kvspec
from kvspec.adapters.sglang.stored_pages import UnifiedPages
from kvspec.adapters.vllm.mooncake_pages import MooncakeShards
from kvspec.adapters.vllm.stored_pages import CanonicalPages
from kvspec.stored.objects import ObjectKey
from tests.support.asked import has

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


def vllm_number(part: int, token: int, head: int, at: Any, layer: int) -> Any:
    """Return the number of an element in the recorded pages of vLLM."""
    return element(part, token, head, at) + PER_LAYER * layer


def read(pages: Any, stored: Any, page: str = PAGE) -> np.ndarray:
    """Return the payload of an object."""
    payload = np.zeros(pages.placement.object_bytes(*stored), np.uint8)
    key = ObjectKey("0" * 64, page, stored.group, str(stored.chunk))
    assert [True] == has(pages, [key])
    pages.read(key, memoryview(payload))
    return payload


def wrong_elements(
    pages: Any, stored: Any, payload: np.ndarray, number: Callable[..., Any] = vllm_number
) -> int:
    """Count the elements of an object that are not where the virtual engine has them."""
    wrong, seen = 0, 0
    engine = pages.placement.engine
    for cell in pages._regions[stored]:
        (part,) = (p for p in pages._layers[cell.layer].parts if p.name == cell.part)
        units = engine.units(engine.group(stored.group), part, stored.chunk)
        layer = pages.placement.groups[0].layers.index(cell.layer)
        for unit in range(cell.units):
            for state in range(cell.states):
                at = cell.address(0, unit, state)
                found = payload[at : at + cell.content_bytes].view(np.uint16)
                place = np.arange(len(found))
                expected = number(int(cell.part == "v"), state, units[unit], place, layer)
                wrong += int(np.count_nonzero(found != expected))
                seen += cell.content_bytes
    return wrong + abs(payload.size - seen)


def shards(row: dict[str, Any]) -> tuple[MooncakeShards, dict[str, bytes]]:
    """Return the pages of a case, and the objects."""
    objects = {key: np.array(page, np.uint16).tobytes() for key, page in row["objects"].items()}
    layout = {"nhd": "lbnhc", "hnd": "lbhnc"}[row["family"]]
    (group,) = groups_of(row)
    pages = MooncakeShards(
        objects, group, model="org/model", block_size=BLOCK, store_tp_size=row["shards"],
        layout=layout, accept_unverified=True,
    )  # fmt: skip
    return pages, objects


def unified(row: dict[str, Any], objects: Any, **changed: Any) -> UnifiedPages:
    """Return the pages of a case."""
    names = [f"model.layers.{number}" for number in range(sglang.LAYERS)]
    sizes: dict[str, Any] = {"block_size": 1, "head_size": sglang.SIZE, "dtype": "float16"}
    spec: kvspec.AttentionSpec = kvspec.MLAAttentionSpec(**sizes)
    if row["heads"]:
        spec = kvspec.FullAttentionSpec(total_num_kv_heads=row["heads"], **sizes)
    group = kvspec.KVCacheGroup(name="full", layers=names, spec=spec)
    starts = [sum(row["stages"][:stage]) for stage in range(len(row["stages"]))]
    bounds = zip(starts, row["stages"], strict=True)
    stages = [names[start : start + count] for start, count in bounds]
    copied = row["heads"] and row["tp"] > row["heads"]
    arguments = {
        "model_id": sglang.MODEL,
        "page_size": sglang.PAGE,
        "head_group": row["group"] if row["heads"] else None,
        "layer_partition": row["partition"],
        "stages": None if row["partition"] else stages,
        "total_kv_heads": row["tp"] if copied else None,
        "accept_unverified": True,
    }
    return UnifiedPages(objects, group, **{**arguments, **changed})
