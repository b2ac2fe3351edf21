"""Test what readers of foreign pages refuse, by the field that is missing or wrong."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_folders as made
import numpy as np
import pytest

import kvspec
from kvspec.adapters.sglang.stored_pages import UnifiedPages
from kvspec.adapters.vllm.lmcache_chunks import LMCacheChunks
from kvspec.adapters.vllm.mooncake_pages import MooncakeShards
from kvspec.errors import SpecError, StoreError
from kvspec.stored.objects import ObjectContents, ObjectKey
from tests.support.asked import has, pin

ROW = {"heads": 2, "tp": 1, "encoding": "packed", "family": "hnd", "dcp": 1}
DCP = {**ROW, "tp": 4, "dcp": 2}
KEY = ObjectKey("0" * 64, made.PAGE, "group0", "tp0")
NUMBERS = {**ROW, "page": [*range(4 * 2 * 2 * 2)]}


def spec(kind: type[kvspec.AttentionSpec], **more: Any) -> list[kvspec.KVCacheGroup]:
    """Return one group of layers with a spec of *kind*."""
    return [kvspec.KVCacheGroup(name="group0", layers=made.LAYERS, spec=made.sized(kind, **more))]


@pytest.mark.parametrize(
    ("row", "changed", "field"),
    [
        (ROW, {"accept_unverified": False}, "accept_unverified"),
        (ROW, {"accept_unverified": 1}, "accept_unverified"),
        (ROW, {"model": "org/other"}, "model"),
        (ROW, {"encoding": None}, "encoding"),
        (ROW, {"encoding": "split in two"}, "encoding"),
        (ROW, {"groups": []}, "groups"),
        (ROW, {"groups": [7]}, "groups"),
        (ROW, {"shared_by": [["model.layers.0.attn"]]}, "shared_by"),
        (DCP, {"interleave_size": None}, "interleave_size"),
        (DCP, {"interleave_size": 3}, "interleave_size"),
    ],
)
def test_canonical_pages_name_the_argument_that_is_missing_or_wrong(
    row: dict[str, Any], changed: dict[str, Any], field: str, tmp_path: Path
) -> None:
    folder = made.folder_of(tmp_path, made.fields_of(row))
    with pytest.raises(SpecError) as caught:
        made.opened(folder, row, **changed)
    assert field == caught.value.field


@pytest.mark.parametrize(
    "groups",
    [
        made.groups_of(ROW, dtype="bfloat16"),
        made.groups_of(ROW, head_size_v=4),
        made.groups_of(ROW, page_format="keys-transposed"),
        made.groups_of(ROW, scale_dtype="float32", dtype="float16"),
        spec(kvspec.SlidingWindowMLASpec, sliding_window=8),
        spec(kvspec.CrossAttentionSpec, total_num_kv_heads=2),
        [kvspec.KVCacheGroup(name="g", layers=made.LAYERS[:2], spec=made.spec_of(ROW))],
        [kvspec.KVCacheGroup(name="g", layers=[*made.LAYERS, "x"], spec=made.spec_of(ROW))],
    ],
    ids=["dtype", "values", "format", "scales", "latent window", "cross", "layer", "more layers"],
)
def test_canonical_pages_refuse_layers_that_the_files_cannot_have(
    groups: list[kvspec.KVCacheGroup], tmp_path: Path
) -> None:
    folder = made.folder_of(tmp_path, made.fields_of(ROW))
    with pytest.raises(SpecError):
        made.opened(folder, ROW, groups=groups)


@pytest.mark.parametrize(
    ("changed", "problem", "field"),
    [
        ({"canonical_format": "v1-lhbnc"}, "foreign", "canonical_format"),
        ({"canonical_format": None}, "foreign", "canonical_format"),
        ({"inference_engine": "other"}, "foreign", "inference_engine"),
        ({"pp_size": 2}, "foreign", "pp_size"),
        ({"pcp_size": 2}, "foreign", "pcp_size"),
        ({"tp_size": True}, "version", "tp_size"),
        ({"kv_cache_groups": []}, "version", "kv_cache_groups"),
        ({"kv_cache_groups": [{"layer_names": ["a"]}]}, "version", "kv_cache_groups"),
        ({"revision": "abc"}, "version", "fields"),
        ({"dtype": ...}, "version", "fields"),
    ],
)
def test_directory_of_another_format_is_refused(
    changed: dict[str, Any], problem: str, field: str, tmp_path: Path
) -> None:
    fields = {k: v for k, v in {**made.fields_of(ROW), **changed}.items() if v is not ...}
    folder = made.folder_of(tmp_path, fields)
    with pytest.raises(StoreError) as caught:
        made.opened(folder, ROW)
    assert (problem, field) == (caught.value.problem, caught.value.field)


def test_direct_layout_without_format_is_refused(tmp_path: Path) -> None:
    """These files have the memory of one rank, which they do not describe."""
    fields = made.fields_of(ROW)
    del fields["canonical_format"]
    with pytest.raises(StoreError) as caught:
        made.opened(made.folder_of(tmp_path, fields), ROW)
    assert ("foreign", "canonical_format") == (caught.value.problem, caught.value.field)


def test_heads_that_vllm_stores_whole_for_each_rank_are_refused(tmp_path: Path) -> None:
    """At TP 4 and DCP 2, 3 heads have no canonical page. The directory does not state that."""
    row = {**DCP, "heads": 3}
    folder = made.folder_of(tmp_path, made.fields_of(row))
    with pytest.raises(SpecError, match="tp_size=4 and dcp_size=2"):
        made.opened(folder, row)


def change(folder: Path, what: str) -> None:
    """Damage the description of a directory."""
    path = folder / "config.json"
    if what == "field":
        path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
    elif what == "text":
        path.write_text("{")
    elif what == "list":
        path.write_text("[]")
    elif what == "link":
        path.rename(folder / "other.json")
        path.symlink_to("other.json")
    elif what == "absent":
        path.unlink()


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("field", "damaged"), ("text", "damaged"), ("list", "damaged"), ("link", "unsafe"),
        ("absent", "absent"),
    ],
)  # fmt: skip
def test_description_that_was_changed_is_refused(what: str, problem: str, tmp_path: Path) -> None:
    folder = made.folder_of(tmp_path, made.fields_of(ROW))
    change(folder, what)
    with pytest.raises(StoreError) as caught:
        made.opened(folder, ROW)
    assert problem == caught.value.problem


def truncate(path: Path) -> None:
    os.truncate(path, 4096 - 512)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


@pytest.mark.parametrize(
    ("damage", "problem", "field"),
    [
        (truncate, "damaged", "length"),
        (lambda path: os.truncate(path, 0), "damaged", "length"),
        (lambda path: os.truncate(path, 8192 + 1), "damaged", "length"),
        (lambda path: path.write_bytes(bytes(8191) + b"x"), "foreign", "length"),
        (replace_by_link, "unsafe", "file"),
        (lambda path: path.chmod(0o646), "unsafe", "mode"),
        (lambda path: (path.unlink(), path.mkdir()), "unsafe", "mode"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "unsafe", "mode"),
        (Path.unlink, "absent", "file"),
    ],
    ids=["short", "empty", "odd", "more bytes", "link", "mode", "folder", "fifo", "absent"],
)
def test_file_that_is_not_a_row_is_refused_and_stays(
    damage: Callable[[Path], object], problem: str, field: str, tmp_path: Path
) -> None:
    folder = made.folder_of(tmp_path, made.fields_of(ROW))
    path = made.file_of(folder)
    made.write_row(path, NUMBERS)
    damage(path)
    before = sorted(tmp_path.rglob("*"))
    pages = made.opened(folder, ROW)
    into = np.zeros(pages.placement.object_bytes("group0", kvspec.RankId()), np.uint8)
    with pytest.raises(StoreError) as caught:
        pages.read(KEY, memoryview(into))
    assert (problem, field) == (caught.value.problem, caught.value.field)
    assert before == sorted(tmp_path.rglob("*"))


def test_fewer_heads_than_the_files_have_are_found_by_the_bytes_behind(tmp_path: Path) -> None:
    row = {**NUMBERS, "heads": 4, "page": [*range(1, 1 + 4 * 2 * 2 * 2 * 64)]}
    folder = made.folder_of(tmp_path, made.fields_of(ROW))
    made.write_row(made.file_of(folder), row)
    with pytest.raises(StoreError) as caught:
        made.opened(folder, ROW).read(KEY, memoryview(bytearray(192)))
    assert ("foreign", "length") == (caught.value.problem, caught.value.field)


@pytest.mark.parametrize(
    ("key", "field"),
    [
        (KEY._replace(page="../../" + "0" * 58), "key.page"),
        (KEY._replace(page="0" * 31), "key.page"),
        (KEY._replace(page=7), "key.page"),
        (KEY._replace(group="group1"), "key"),
        (KEY._replace(chunk="tp1"), "key"),
        (tuple(KEY), "key"),
    ],
)
def test_key_that_no_page_has_is_refused(key: Any, field: str, tmp_path: Path) -> None:
    pages = made.opened(made.folder_of(tmp_path, made.fields_of(ROW)), ROW)
    calls = [lambda: pages.read(key, memoryview(bytearray(192)))]
    if isinstance(key, ObjectKey):
        calls.append(lambda: has(pages, [key]))
    for call in calls:
        with pytest.raises(SpecError) as caught:
            call()
        assert field == caught.value.field


def test_foreign_store_is_never_written(tmp_path: Path) -> None:
    pages = made.opened(made.folder_of(tmp_path, made.fields_of(ROW)), ROW)
    made.write_row(made.file_of(pages.folder), NUMBERS)
    payload = memoryview(bytes(192))
    for call in (
        lambda: pages.write(KEY, payload, ObjectContents.of_bytes(192)),
        lambda: pages.remove([KEY]),
        lambda: pages.remove([]),
    ):
        with pytest.raises(StoreError) as caught:
            call()
        assert "foreign" == caught.value.problem
    with pytest.raises(SpecError) as wrong:
        pages.read(KEY, memoryview(bytearray(191)))
    assert "into" == wrong.value.field
    assert [True] == pin(pages, [KEY], "owner", 9) == has(pages, [KEY])
    pages.unpin("owner")
    pages.describe("0" * 64, {})
    assert ({}, []) == (pages.spaces(), [*pages.stored_objects()])


def group(heads: int = 4, **more: Any) -> kvspec.KVCacheGroup:
    """Return a group of three layers."""
    spec = made.sized(kvspec.FullAttentionSpec, total_num_kv_heads=heads, **more)
    return kvspec.KVCacheGroup(name="full", layers=made.LAYERS, spec=spec)


LATENTS = kvspec.KVCacheGroup(
    name="full", layers=made.LAYERS, spec=made.sized(kvspec.MLAAttentionSpec)
)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"model_id": ""}, "model_id"),
        ({"model_id": None}, "model_id"),
        ({"page_size": 0}, "page_size"),
        ({"head_group": None}, "head_group"),
        ({"head_group": 3}, "head_group"),
        ({"total_kv_heads": 6}, "total_kv_heads"),
        ({"total_kv_heads": 8, "head_group": 2}, "total_kv_heads"),
        ({"group": LATENTS}, "head_group"),
        ({"layer_partition": -1}, "layer_partition"),
        ({"stages": [made.LAYERS[1:], made.LAYERS[:1]]}, "stages"),
        ({"stages": [made.LAYERS], "layer_partition": 2}, "stages"),
        ({"group": spec(kvspec.SlidingWindowMLASpec, sliding_window=8)[0]}, "group.spec"),
        ({"accept_unverified": False}, "accept_unverified"),
    ],
)
def test_unified_pages_name_the_argument_that_is_missing_or_wrong(
    changed: dict[str, Any], field: str
) -> None:
    arguments = {"model_id": "m", "page_size": 4, "head_group": 2, "accept_unverified": True}
    given = {"objects": {}, "group": group(), **arguments, **changed}
    with pytest.raises(SpecError) as caught:
        UnifiedPages(**given)
    assert field == caught.value.field


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"layout": "lhbnc"}, "layout"),
        ({"layout": None}, "layout"),
        ({"store_tp_size": 3}, "store_tp_size"),
        ({"group": LATENTS}, "group.spec"),
        ({"model": 7}, "model"),
        ({"objects": []}, "objects"),
        ({"accept_unverified": False}, "accept_unverified"),
    ],
)
def test_mooncake_shards_name_the_argument_that_is_missing_or_wrong(
    changed: dict[str, Any], field: str
) -> None:
    arguments = {
        "model": "m", "block_size": 4, "store_tp_size": 2, "layout": "lbhnc",
        "accept_unverified": True,
    }  # fmt: skip
    given = {"objects": {}, "group": group(), **arguments, **changed}
    with pytest.raises(SpecError) as caught:
        MooncakeShards(**given)
    assert field == caught.value.field


@pytest.mark.parametrize("kind", [UnifiedPages, MooncakeShards])
def test_object_of_another_length_is_refused(kind: Any) -> None:
    objects: dict[str, bytes] = {}
    more = {"model_id": "m", "page_size": 4, "head_group": 2}
    if kind is MooncakeShards:
        more = {"model": "m", "block_size": 4, "store_tp_size": 2, "layout": "lbhnc"}
    pages = kind(objects, group(), accept_unverified=True, **more)
    stored = pages.placement.objects[1]
    key = ObjectKey("0" * 64, made.PAGE, stored.group, str(stored.chunk))
    into = memoryview(bytearray(pages.placement.object_bytes(*stored)))
    assert [False] == has(pages, [key])
    for content, problem in ((None, "absent"), (b"short", "damaged"), (bytes(into.nbytes), "")):
        if content is not None:
            objects[pages.name_of(made.PAGE, stored)] = content
        if problem:
            with pytest.raises(StoreError) as caught:
                pages.read(key, into)
            assert problem == caught.value.problem
    pages.read(key, into)


def chunks(workers: int, **changed: Any) -> tuple[LMCacheChunks, dict[str, Any], dict[str, Any]]:
    """Return LMCache's chunks of 4 heads on *workers* workers, and all bytes and metadata."""
    local = max(1, 4 // workers)
    objects, metadata = {}, {}
    for worker in range(workers):
        first = worker * 4 // workers
        part, layer, token, head, at = np.ogrid[:2, :3, :4, first : first + local, : made.SIZE]
        numbers = made.element(part, token, head, at) + made.PER_LAYER * layer
        content = numbers.astype(np.uint16).tobytes()
        key = f"org/model@{workers}@{worker}@{made.PAGE}@half"
        objects[key] = content
        metadata[key] = struct.pack("<7i", len(content), 1, 2, 2, 3, 4, local * made.SIZE)
    arguments = {"model": "org/model", "world_size": workers, "chunk_size": 4}
    given = {"group": group(), "accept_unverified": True, **arguments, **changed}
    return LMCacheChunks(objects, metadata, **given), objects, metadata


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_lmcache_chunks_have_each_element_in_its_place(workers: int) -> None:
    pages, _, _ = chunks(workers)
    assert min(4, workers) == len(pages.placement.objects)
    for stored in pages.placement.objects:
        payload = np.zeros(pages.placement.object_bytes(*stored), np.uint8)
        key = ObjectKey("0" * 64, made.PAGE, stored.group, str(stored.chunk))
        assert [True] == has(pages, [key])
        pages.read(key, memoryview(payload))
        for region in pages._regions[stored]:
            layer = made.LAYERS.index(region.layer)
            for unit, state in np.ndindex(region.units, region.states):
                at = region.address(0, unit, state)
                head = stored.chunk.tp * region.units + unit
                expected = made.element(int(region.part == "v"), state, head, np.arange(made.SIZE))
                found = payload[at : at + region.content_bytes].view(np.uint16)
                assert np.array_equal(expected + made.PER_LAYER * layer, found)


@pytest.mark.parametrize(
    ("place", "value", "problem", "field"),
    [
        (0, 7, "damaged", "length"),
        (1, 6, "version", "format"),
        (1, 2, "version", "format"),
        (2, 3, "foreign", "dtype"),
        (3, 1, "foreign", "shape"),
        (4, 4, "foreign", "shape"),
        (5, 3, "foreign", "shape"),
        (6, 9, "foreign", "shape"),
    ],
)
def test_lmcache_chunk_with_other_metadata_is_refused(
    place: int, value: int, problem: str, field: str
) -> None:
    pages, objects, metadata = chunks(1)
    (name,) = objects
    numbers = [*struct.unpack("<7i", metadata[name])]
    numbers[place] = value
    metadata[name] = struct.pack("<7i", *numbers)
    key = ObjectKey("0" * 64, made.PAGE, "full", "tp0")
    into = memoryview(bytearray(pages.placement.page_bytes))
    with pytest.raises(StoreError) as caught:
        pages.read(key, into)
    assert (problem, field) == (caught.value.problem, caught.value.field)
    metadata[name] = b"short"
    with pytest.raises(StoreError) as caught:
        pages.read(key, into)
    assert ("version", "metadata") == (caught.value.problem, caught.value.field)
    del metadata[name]
    with pytest.raises(StoreError) as caught:
        pages.read(key, into)
    assert ("absent", "metadata") == (caught.value.problem, caught.value.field)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"metadata": None}, "metadata"),
        ({"group": LATENTS}, "group.spec"),
        ({"group": group(dtype="uint8")}, "group.spec"),
        ({"world_size": 3}, "world_size"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"model": None}, "model"),
        ({"accept_unverified": False}, "accept_unverified"),
    ],
)
def test_lmcache_chunks_name_the_argument_that_is_missing_or_wrong(
    changed: dict[str, Any], field: str
) -> None:
    arguments = {"model": "m", "world_size": 2, "chunk_size": 4, "accept_unverified": True}
    given = {"objects": {}, "metadata": {}, "group": group(), **arguments, **changed}
    with pytest.raises(SpecError) as caught:
        LMCacheChunks(**given)
    assert field == caught.value.field
