"""Test pages that other engines stored, against pages that their own code made.

`vllm_canonical_pages.json.gz` was recorded by `tests/support/canonical_writer.py` with vLLM 0.32,
whose code of canonical pages equals that of vLLM 0.33. `sglang_unified_pages.json.gz` was recorded
by `tests/support/unified_writer.py` with SGLang 0.5.23.
"""

from __future__ import annotations

import ctypes
import gzip
import json
from pathlib import Path
from typing import Any

import foreign_folders as made
import numpy as np
import pytest
import unified_writer as sglang
from canonical_writer import BLOCK, LAYERS

import kvspec
from kvspec.errors import SpecError
from kvspec.stored import ModelIdentity
from kvspec.stored.store import PageStore

FOLDER = Path(__file__).parents[1] / "goldens"
RECORDED = json.loads(gzip.decompress((FOLDER / "vllm_canonical_pages.json.gz").read_bytes()))
VLLM: list[dict[str, Any]] = RECORDED["rows"]
MODEL = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")


def name_of_row(row: dict[str, Any]) -> str:
    """Return the id of a case."""
    stated = {key: value for key, value in row.items() if key not in ("page", "paths", "objects")}
    return "-".join(map(str, stated.values())).replace(" ", "")


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("row", VLLM, ids=name_of_row)
def test_vllm_files_have_each_element_in_its_place(
    row: dict[str, Any], blocks: int, tmp_path: Path
) -> None:
    """Also if the row of the writer was longer, so that vLLM itself would delete the file."""
    folder = made.folder_of(tmp_path, made.fields_of(row, blocks))
    if blocks == 1:
        assert [f"{folder}", f"{made.file_of(folder)}"] == [
            f"{tmp_path}{path}" for path in row["paths"]
        ]
    pages = made.opened(folder, row)
    (stored,) = pages.placement.objects
    assert BLOCK * row["dcp"] * blocks == pages.placement.page_tokens
    for copies in (1, 2, 40):
        content = made.write_row(made.file_of(folder), row, blocks, copies)
        before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
        payload = made.read(pages, stored)
        assert 0 == made.wrong_elements(pages, stored, payload)
        assert before == sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
        assert content == made.file_of(folder).read_bytes()
        pages._tails_checked.clear()


def test_names_of_prompt_are_the_hashes_of_vllm(tmp_path: Path) -> None:
    """A file of three blocks has the hash of the last one."""
    row = VLLM[0]
    for blocks, expected in ((1, RECORDED["hashes"]), (3, RECORDED["hashes"][2:])):
        (tmp_path / str(blocks)).mkdir()
        folder = made.folder_of(tmp_path / str(blocks), made.fields_of(row, blocks))
        pages = made.opened(folder, row)
        assert tuple(expected) == pages.names(range(1000, 1014))
        assert pages.names([1] * 12, seed="7") != pages.names([1] * 12)
    with pytest.raises(SpecError) as caught:
        pages.names([1, "2"])
    assert "token_ids" == caught.value.field


@pytest.mark.parametrize("row", RECORDED["mooncake"], ids=name_of_row)
def test_mooncake_shards_have_each_element_in_its_place(row: dict[str, Any]) -> None:
    pages, objects = made.shards(row)
    assert row["shards"] == len(pages.placement.objects) == len(objects)
    for stored in pages.placement.objects:
        assert 0 == made.wrong_elements(pages, stored, made.read(pages, stored))


SGLANG: list[dict[str, Any]] = json.loads(
    gzip.decompress((FOLDER / "sglang_unified_pages.json.gz").read_bytes())
)["rows"]


@pytest.mark.parametrize("files", [False, True], ids=["mapping", "files"])
@pytest.mark.parametrize("row", SGLANG, ids=name_of_row)
def test_sglang_objects_have_each_element_in_its_place(
    row: dict[str, Any], files: bool, tmp_path: Path
) -> None:
    objects = {key: np.array(page, np.uint16).tobytes() for key, page in row["objects"].items()}
    if files:
        for key, content in objects.items():
            (tmp_path / f"{key}.bin").write_bytes(content)
    pages = made.unified(row, tmp_path if files else objects)
    names = {pages.name_of(sglang.HASH, stored) for stored in pages.placement.objects}
    assert names <= objects.keys()
    # Ranks that hold the same head store the same bytes under several keys.
    assert len(objects) == len(names) * max(1, row["tp"] // (row["heads"] or row["tp"]))
    for stored in pages.placement.objects:
        payload = made.read(pages, stored, sglang.HASH)
        assert 0 == made.wrong_elements(pages, stored, payload, sglang.number)


@pytest.mark.parametrize(
    ("row", "engine"),
    [
        (VLLM[1], {"tp_size": 2, "layout": "LBNHC", "block_size": 2}),
        (VLLM[6], {"tp_size": 1, "layout": "LBKHNC", "block_size": 8}),
        (VLLM[12], {"tp_size": 2, "layout": "LBHNC", "block_size": 4}),
    ],
    ids=lambda value: str(value.get("layout", "")),
)
def test_engine_of_other_sizes_loads_foreign_pages(
    row: dict[str, Any], engine: dict[str, Any], tmp_path: Path
) -> None:
    """The pages are a store of kvspec: the scheduler finds them, and each rank loads its part."""
    folder = made.folder_of(tmp_path, made.fields_of(row))
    made.write_row(made.file_of(folder), row, copies=3)
    pages = made.opened(folder, row)
    store = PageStore(pages.placement, MODEL, pages)
    group = kvspec.KVCacheGroup(
        name="own", layers=LAYERS, spec=made.spec_of(row, block_size=engine["block_size"])
    )
    reader = kvspec.EngineSpec(
        groups=[group],
        parallel=kvspec.ParallelConfig(tp_size=engine["tp_size"]),
        layout=engine["layout"],
    )
    with store.lookup([made.PAGE, "f" * 64], reader) as hit:
        assert (1, BLOCK * row["dcp"]) == (hit.num_pages, hit.num_tokens)
        tables = {"own": [5, 1, 3, 2][: -(-hit.num_tokens // engine["block_size"])]}
        for rank in reader.parallel.ranks:
            cache, _ = kvspec.allocate(reader, rank, 6)
            store.rank_pages(cache).load(hit, 1, tables)
            assert hit.num_tokens == right_tokens(cache, tables["own"], hit.num_tokens)


def right_tokens(cache: kvspec.RankCache, blocks: list[int], tokens: int) -> int:
    """Count the leading tokens of a cache whose elements are all right."""
    for token in range(tokens):
        block, state = blocks[token // cache.regions[0].states], token % cache.regions[0].states
        for region in cache.regions:
            part = cache.part_of(region)[0]
            units = cache.engine.units(cache.engine.groups[0], part, cache.rank)
            for unit in range(region.units):
                address = region.address(block, unit, state)
                found = np.frombuffer(ctypes.string_at(address, region.content_bytes), np.uint16)
                layer = LAYERS.index(region.layer)
                expected = made.vllm_number(
                    int(region.part == "v"), token, units[unit], np.arange(len(found)), layer
                )
                if not np.array_equal(expected, found):
                    return token
    return tokens


def test_keys_that_are_rotated_in_pairs_arrive_in_the_order_of_the_reader(tmp_path: Path) -> None:
    """A stored page of kvspec has halves, and vLLM's file has what its kernels write."""
    row = {"heads": 2, "tp": 1, "encoding": "packed", "family": "nhd", "dcp": 1}
    content = {
        order: kvspec.KeyContent(rotary=order, rotary_start=2, rotary_size=4)
        for order in ("pairs", "halves")
    }
    spec = {
        order: made.spec_of(row, head_size=8, key_content=value) for order, value in content.items()
    }
    groups = {
        order: kvspec.KVCacheGroup(name="g", layers=LAYERS, spec=each)
        for order, each in spec.items()
    }
    folder = made.folder_of(tmp_path, made.fields_of(row))
    numbers = np.arange(3 * BLOCK * 2 * 16, dtype=np.uint16)
    path = made.file_of(folder)
    path.parent.mkdir(parents=True)
    path.write_bytes(numbers.tobytes() + bytes(4096 - numbers.nbytes))
    pages = made.opened(folder, row, groups=[groups["pairs"]])
    store = PageStore(pages.placement, MODEL, pages)
    whole = numbers.reshape(3, BLOCK, 2, 16)
    for order in ("pairs", "halves"):
        reader = kvspec.EngineSpec(groups=[groups[order]], layout="LBNHC")
        cache, arrays = kvspec.allocate(reader, kvspec.RankId(), 1)
        store.rank_pages(cache).load([made.PAGE], 1, {"g": [0]})
        expected = whole
        if order == "halves":
            expected = whole[..., [0, 1, 2, 4, 3, 5, *range(6, 16)]]
        assert np.array_equal(expected, arrays["g"].view(np.uint16).reshape(whole.shape))


def test_groups_that_share_tensors_are_read_from_their_own_places(tmp_path: Path) -> None:
    """The layers of a window lie in the tensors of the other group, as vLLM registers them."""
    row = {**VLLM[0], "dcp": 1}
    names = ["a.0", "a.1", "w.0", "w.1"]
    stated = [
        {"tokens_per_block": BLOCK, "layer_names": names[:2]},
        {"tokens_per_block": BLOCK, "layer_names": names[2:]},
    ]
    folder = made.folder_of(tmp_path, {**made.fields_of(row), "kv_cache_groups": stated})
    size = len(row["page"]) * 2
    for group in (0, 1):
        path = made.file_of(folder, group=group)
        path.parent.mkdir(parents=True)
        rows = [
            np.array(row["page"], np.uint16) + made.PER_LAYER * (2 * group + at) for at in (0, 1)
        ]
        path.write_bytes(np.concatenate(rows).tobytes() + bytes(4096 - 2 * size))
    window = kvspec.SlidingWindowSpec(
        block_size=BLOCK,
        total_num_kv_heads=4,
        head_size=made.SIZE,
        dtype="float16",
        sliding_window=8,
    )
    groups = [
        kvspec.KVCacheGroup(name="full", layers=names[:2], spec=made.spec_of(row)),
        kvspec.KVCacheGroup(name="window", layers=names[2:], spec=window),
    ]
    with pytest.raises(SpecError) as caught:
        made.opened(folder, row, groups=groups)
    assert "shared_by" == caught.value.field
    # The first layer of each tensor was registered in the order of the layers.
    pages = made.opened(folder, row, groups=groups, shared_by=[["a.1", "w.0"], ["a.0", "w.1"]])
    found = {
        stored.group: made.read(pages, stored).view(np.uint16) for stored in pages.placement.objects
    }
    first = {name: int(found["full"][at * size // 2]) for at, name in enumerate(names[:2])}
    first |= {name: int(found["window"][at * size // 2]) for at, name in enumerate(names[2:])}
    # w.0 is in the second tensor, with a.1, and w.1 in the first one.
    assert {
        "a.0": 0,
        "a.1": made.PER_LAYER,
        "w.0": 3 * made.PER_LAYER,
        "w.1": 2 * made.PER_LAYER,
    } == first
