"""Pages of caches in host memory and on a GPU: each has the same bytes."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest

import kvspec
from kvspec.stored import ModelIdentity, PromptIdentity
from kvspec.stored.file_objects import FileObjects
from kvspec.stored.placement import StoredSpec
from kvspec.stored.store import PageStore
from kvspec.testing import oracle

MODEL = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")
TOKENS, PAGE, BLOCKS = 24, 8, 16
LAYERS = ("layers.0", "layers.1")


def has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    return bool(find_spec("torch") and importlib.import_module("torch").cuda.is_available())


def on_host(storage: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a storage in host memory."""
    return {
        name: flat.copy() if isinstance(flat, np.ndarray) else flat.cpu().numpy()
        for name, flat in storage.items()
    }


def put(storage: dict[str, Any], host: dict[str, Any]) -> None:
    """Write the bytes of *host* into a storage."""
    for name, flat in storage.items():
        flat[:] = host[name] if isinstance(flat, np.ndarray) else flat.new_tensor(host[name])


GPU = pytest.param(
    "cuda:0",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="torch sees no GPU")],
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("layouts", [("LBHNC", "BLNHC"), ("LBNHC", "LBKHNC")])
def test_page_of_one_engine_is_loaded_by_another(
    tmp_path: Path, device: str, layouts: tuple[str, str]
) -> None:
    """TP 2 stores, TP 3 loads with other blocks. The oracle compares all memory of the loader."""
    producer, consumer = (
        builders.engine(
            builders.gqa(6, block_size=block, head_size=8), layers=LAYERS, layout=layout, tp=tp
        )
        for block, layout, tp in zip((4, 8), layouts, (2, 3), strict=True)
    )
    request = kvspec.TransferRequest(
        request_id="r",
        num_tokens=TOKENS,
        producer_blocks={"g": [7, 2, 9, 4, 1, 15]},
        consumer_blocks={"g": [3, 14, 6]},
    )
    placement = StoredSpec.of(producer, page_tokens=PAGE, head_groups=2)
    store = PageStore(placement, MODEL, FileObjects(tmp_path))
    names = store.names(range(TOKENS), PromptIdentity.of_text())
    for rank in producer.parallel.ranks:
        cache, storage = kvspec.allocate(producer, rank, BLOCKS, device)
        host = on_host(storage)
        oracle.fill(producer, rank, host, BLOCKS, request.producer_blocks, request)
        put(storage, host)
        saved = store.rank_pages(cache).save(names, 0, len(names), request.producer_blocks)
        assert len(saved.written) == len(names)
    with store.lookup(names, consumer) as hit:
        assert hit.num_tokens == TOKENS
        for rank in consumer.parallel.ranks:
            cache, storage = kvspec.allocate(consumer, rank, BLOCKS, device)
            before = on_host(storage)
            tables = request.consumer_blocks
            oracle.spoil(consumer, rank, before, BLOCKS, tables, request)
            put(storage, before)
            store.rank_pages(cache).load(hit, hit.num_pages, tables)
            after = on_host(storage)
            faults = oracle.check(consumer, rank, before, after, BLOCKS, tables, request)
            assert faults == []
