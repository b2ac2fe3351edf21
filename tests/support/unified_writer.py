"""Write objects with SGLang's own code of unified keys and of its host layout.

Usage, with a Python that has SGLang: `python unified_writer.py FILE [--grid]`. FILE receives the
golden values of `tests/stored/test_foreign_pages.py`, or all cases for the test of each night.
"""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

SIZE = 8  # Elements of a key: SGLang's kernels move 16 bytes.
PAGE = 4
LAYERS = 5
MODEL = "org/model"
HASH = "0123456789abcdef" * 4


def case(
    heads: int, tp: int, group: int | None, partition: int = 0, stages: tuple[int, ...] = (LAYERS,)
) -> dict[str, Any]:
    """Return one case. *heads* is 0 for latents, *stages* are the layers of each stage."""
    return {"heads": heads, "tp": tp, "group": group, "partition": partition, "stages": [*stages]}


def grid() -> Iterator[dict[str, Any]]:
    """Yield all cases, whether SGLang accepts them or not."""
    for heads, tp, group, (partition, stages) in itertools.product(
        (1, 2, 4, 6, 8),
        (1, 2, 3, 4, 8),
        (1, 2, 3, 4),
        ((0, (5,)), (0, (2, 3)), (2, (5,)), (2, (2, 3)), (2, (4, 1)), (2, (3, 2)), (5, (5,))),
    ):
        yield case(heads, tp, group, partition, stages)
    for tp, (partition, stages) in itertools.product(
        (1, 2, 4), ((0, (5,)), (0, (2, 3)), (2, (4, 1)))
    ):
        yield case(0, tp, None, partition, stages)


def sample() -> list[dict[str, Any]]:
    """Return the cases of the golden values."""
    return [
        case(4, 2, 2),
        case(4, 2, 1, 2),
        case(4, 1, 2, 2, (4, 1)),
        case(6, 3, 2, 0, (2, 3)),
        case(2, 8, 1),
        case(0, 4, None),
        case(0, 2, None, 2, (4, 1)),
    ]


def objects(case: dict[str, Any]) -> dict[str, list[int]] | None:
    """Return the objects of one page by key, as numbers of elements, or None if SGLang refuses."""
    from sglang.srt.mem_cache.hicache_key_scheme import plan_unified_kv  # noqa: PLC0415
    from sglang.srt.mem_cache.pool_host.page_unified import PageUnifiedLayout  # noqa: PLC0415

    found: dict[str, list[int]] = {}
    heads, tp = case["heads"], case["tp"]
    own = max(1, heads // tp)
    if heads and max(heads, tp) % min(heads, tp):
        return None  # SGLang cannot load such a model.
    start = 0
    for stage, count in enumerate(case["stages"]):
        for rank in range(tp):
            try:
                plan = plan_unified_kv(
                    model_id=MODEL, dtype="float16", page_size=PAGE, rank_replicated=not heads,
                    local_kv_heads=own, attn_tp_rank=rank, attn_tp_size=tp, attn_cp_size=1,
                    start_layer=start, end_layer=start + count,
                    is_final_stage=stage == len(case["stages"]) - 1, head_group=case["group"],
                    layer_partition=case["partition"] or None,
                )  # fmt: skip
            except (ValueError, NotImplementedError):
                return None
            layout = PageUnifiedLayout(
                page_size=PAGE, layer_num=count, head_num=own, head_group_num=plan.head_group_num,
                head_dim=SIZE, itemsize=2, is_mla=not heads,
            )  # fmt: skip
            page = filled(layout, range(start, start + count), first_head(heads, tp, rank))
            content = page.reshape(-1).view(np.uint8)
            for number, suffix in enumerate(plan.suffixes):
                layer, group = divmod(number, plan.head_group_num)
                offset, length = layout.chunk_span(plan.layer_ranges[layer], group)
                chunk = content[offset : offset + length].view(np.uint16).tolist()
                if found.setdefault(f"{HASH}_{suffix}", chunk) != chunk:
                    raise ValueError(f"{case}: two ranks store other bytes under {suffix}")
        start += count
    return found


def first_head(heads: int, tp: int, rank: int) -> int:
    """Return the first head of a rank."""
    if not heads:
        return 0
    return rank // (tp // heads) if tp > heads else rank * (heads // tp)


def filled(layout: Any, layers: range, head: int) -> Any:
    """Return one page of a host pool, in the shape of SGLang's buffer."""
    page = np.zeros(layout.page_dims(1), np.uint16)[0]
    at = np.arange(SIZE)
    for place, layer in enumerate(layers):
        for token in range(PAGE):
            if layout.is_mla:
                page[place, token] = number(0, token, 0, at, layer)
                continue
            for group, part, inside in np.ndindex(page.shape[0], 2, page.shape[4]):
                own = head + group * layout.heads_per_group + inside
                page[group, place, part, token, inside] = number(part, token, own, at, layer)
    return page


def number(part: int, token: int, head: int, at: Any, layer: int) -> Any:
    """Return the number of an element."""
    return (((layer * 2 + part) * PAGE + token) * 8 + head) * SIZE + at


def load_sglang() -> None:
    """Let two modules of SGLang be imported without all of SGLang, which needs a GPU's packages."""
    found = find_spec("sglang")
    home = Path(((found and found.submodule_search_locations) or [""])[0])
    for name in ("", ".srt", ".srt.mem_cache", ".srt.mem_cache.pool_host"):
        package = ModuleType(f"sglang{name}")
        package.__path__ = [str(home.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package


if __name__ == "__main__":
    load_sglang()
    cases = grid() if sys.argv[2:] == ["--grid"] else sample()
    rows = [{**one, "objects": objects(one)} for one in cases]
    text = json.dumps({"sglang": version("sglang"), "rows": rows}).encode()
    Path(sys.argv[1]).write_bytes(gzip.compress(text, mtime=0))
