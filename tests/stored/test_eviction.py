"""The pages that leave a full store: the least recently used, and each after its successors."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import threading
from contextlib import closing, suppress
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
from kvspec.stored.index import IndexUnavailable, PageIndex
from kvspec.stored.objects import ObjectContents
from tests.support.asked import SIZE, SPACE, has, key, put

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


def test_uses_are_counted_in_their_order_and_few_are_kept(tmp_path: Path) -> None:
    """The index keeps a row for each prompt that was used, until pages must leave."""
    objects = FileObjects(tmp_path, limit=1 << 40)
    order = [*range(100)]
    put(objects, *order)
    random.Random(1).shuffle(order)
    for page in (*order[50:], *order):
        objects.use(SPACE, [key(page).page, key(page + 1000).page])
    with closing(sqlite3.connect(f"{objects.root}/index-1/pages.sqlite3")) as sql:
        kept = sql.execute("SELECT count(*) FROM pins").fetchone()[0]
    assert 0 < kept <= 64
    for number, page in enumerate(order):
        assert objects.num_bytes() == (100 - number) * (SIZE + 4096)
        assert objects.free_bytes(1) == 1
        assert not any(has(objects, [key(page)]))
    objects.close()


def test_other_processes_use_the_index_while_many_pages_leave(tmp_path: Path) -> None:
    """A limit that was lowered lets many pages leave, and a scheduler waits for its lookups."""
    objects, other = FileObjects(tmp_path), FileObjects(tmp_path)
    count = 1100
    small = ObjectContents.of_bytes(1)
    for first in range(0, count, 100):
        pages = range(first, first + 100)
        objects.write_all([(key(page), memoryview(b"x")) for page in pages], small)
    other._index = PageIndex(other.root, 0o700, lock_seconds=0.0)
    thread = threading.Thread(target=objects.free_bytes, args=(1 << 40,))
    thread.start()
    sizes = set()
    while thread.is_alive():
        with suppress(IndexUnavailable):
            other._index.pin(bytes.fromhex(SPACE + key(count).page), "reader", 5)
            sizes.add(other.num_bytes())
    thread.join()
    assert len(sizes - {0, count * 4097}) >= 3
    assert not [*objects.stored_objects()]


def test_pages_that_cannot_be_deleted_now_leave_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has no descriptor left, so it cannot look whether a file is its own."""
    store = FileObjects(tmp_path)
    put(store, *range(6))
    total = store.num_bytes()
    opened, failing = os.open, [key(page).page for page in (0, 1, 2)]

    def open_some(path: str, *arguments: int) -> int:
        if any(page in path for page in failing):
            raise OSError(errno.EMFILE, "too many open files")
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", open_some)
    assert store.free_bytes(total // 3) == 0
    assert store.num_bytes() == total
    assert store.free_bytes(total // 3) == 1
    assert store.num_bytes() == total // 6 * 5
    failing.clear()
    assert store.free_bytes(total) == 5
    assert store.num_bytes() == 0
    assert not [*store.stored_objects()]


def test_pages_that_may_not_be_deleted_count_for_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileObjects(tmp_path)
    put(store, 0, 1)
    total, unlink = store.num_bytes(), os.unlink

    def refuse(path: str) -> None:
        if key(0).page in path:
            raise PermissionError(errno.EPERM, "the file is immutable")
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    assert store.free_bytes(total) == 1
    assert store.num_bytes() == total // 2
    assert has(store, [key(0), key(1)]) == [True, False]
