"""Engines of `vllm_serving` that store their pages in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_serving import BLOCKS, Engine, Request, until

import kvspec
from kvspec.stored.file_objects import FileObjects
from kvspec.stored.plans import whole_engine
from kvspec.testing import oracle

TABLES = [1, 2, 3, 4], [8, 5, 6, 7]
"""Blocks of 14 tokens, 4 in each. The window group has blocks of its own."""
PASSED = [1, 2, 3, 4], [0, 5, 6, 7]
"""The same after 14 tokens: the window of 8 has passed the first block."""


def engine(name: str, directory: Path, tp: int = 1, block: int = 4, **more: Any) -> Engine:
    """Return an engine that stores pages of 4 tokens in *directory*."""
    sizes = {"page_tokens": 4, "head_groups": 6}
    store = {"directory": str(directory), **sizes, **more.pop("store", {})}
    return Engine(name, tp, block, store=store, **{"revision": "1", **more})


def moved(num_tokens: int, *tables: list[int], cached: int = 0) -> kvspec.TransferRequest:
    """Return the request that fills *tables*, or loads them."""
    groups = dict(zip(("group0", "group1"), tables, strict=True))
    return kvspec.TransferRequest(
        request_id="m",
        num_tokens=num_tokens,
        cached_tokens=cached,
        producer_blocks=groups,
        consumer_blocks=groups,
    )


def computed(engine: Engine, name: str = "a", num_tokens: int = 14, **fields: Any) -> Request:
    """Let *engine* compute a prompt in two steps, and store its pages. It has not ended."""
    request = Request(name, num_tokens)
    vars(request).update(fields)
    spec, filled = whole_engine(engine.spec), moved(num_tokens, *TABLES)
    for rank, storage in engine.storage.items():
        oracle.fill(spec, rank, storage, BLOCKS, filled.producer_blocks, filled)
    engine.tables[name] = TABLES
    engine.scheduler.on_new_request(request)
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    for count in (6, num_tokens - 6):
        engine.step(**{name: count})
        request.num_computed_tokens += count
    engine.tables[name] = PASSED
    return request


def ended(engine: Engine, request: Request) -> None:
    """End *request*, and wait until its pages are stored."""
    engine.scheduler.request_finished_all_groups(request, engine.tables[request.request_id])
    until(lambda: not engine.scheduler.has_pending_push_work(), engine)
    assert [] == engine.pool.used()


def stored(directory: Path) -> list[tuple[str, int]]:
    """Return the groups of the stored objects, and how many there are of each."""
    groups = [entry.key.group for entry in FileObjects(directory).stored_objects()]
    return [(group, groups.count(group)) for group in sorted(set(groups))]
