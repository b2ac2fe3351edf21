"""Which pages leave a store that is full: never one whose successors stay."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import kvspec
from kvspec.stored import (
    FileObjects,
    MemoryObjects,
    ModelIdentity,
    Objects,
    PageStore,
    PromptIdentity,
    StoredSpec,
)

PAGE, BLOCK, PAGES = 8, 4, 5


@pytest.mark.parametrize("kind", ["memory", "files"])
@pytest.mark.parametrize("seed", range(4))
def test_each_stored_page_has_the_pages_before_it(kind: str, seed: int, tmp_path: Path) -> None:
    """Prompts are saved step by step and looked up, in a store with room for some of them."""
    chance = random.Random(seed)
    spec = kvspec.MLAAttentionSpec(block_size=BLOCK, head_size=16, dtype="uint8")
    group = kvspec.KVCacheGroup(name="g", layers=["l.0"], spec=spec)
    engine = kvspec.EngineSpec(groups=[group])
    placement = StoredSpec.of(engine, page_tokens=PAGE)
    size = placement.page_bytes + (4096 if kind == "files" else 0)
    limit = 3 * PAGES * size
    objects: Objects = (
        MemoryObjects(limit) if kind == "memory" else FileObjects(tmp_path, limit=limit)
    )
    model = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")
    store = PageStore(placement, model, objects)
    cache, _ = kvspec.allocate(engine, kvspec.RankId(), num_blocks=PAGES * PAGE // BLOCK)
    pages = store.rank_pages(cache)
    tables = {"g": range(PAGES * PAGE // BLOCK)}
    prompts = [
        store.names(range(prompt * 1000, prompt * 1000 + PAGES * PAGE), PromptIdentity.of_text())
        for prompt in range(9)
    ]
    hits = lost = 0
    for _ in range(40):
        names = chance.choice(prompts)
        with store.lookup(names, engine) as hit:
            hits += hit.num_pages
            first = hit.num_pages
        for at in range(first, PAGES, 2):
            pages.save(names, at, min(2, PAGES - at), tables)
        assert all(store.has(names, placement.objects))
        for other in prompts:
            there = store.has(other, placement.objects)
            assert there == sorted(there, reverse=True)
            lost += not all(there)
    assert hits
    assert lost
