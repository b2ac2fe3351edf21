"""Placements, certificates, and what a rank saves and loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import kvspec
from kvspec import EngineSpec, KVCacheGroup, MismatchError, ParallelConfig, RankId, SpecError
from kvspec.stored import (
    LoadError,
    MemoryObjects,
    ModelIdentity,
    ObjectKey,
    PageObject,
    PageStore,
    PromptIdentity,
    StoredSpec,
    plan_load,
    plan_store,
)

FULL = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=4, head_size=4, dtype="uint8")
LATENT = kvspec.MLAAttentionSpec(block_size=4, head_size=8, dtype="uint8")
STATE = kvspec.MambaSpec.short_conv(conv_dim=4, conv_kernel=3, dtype="uint8")
WINDOW = kvspec.SlidingWindowSpec(
    block_size=4, total_num_kv_heads=4, head_size=4, dtype="uint8", sliding_window=8
)
MODEL = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")


def engine(
    *specs: Any,
    tp: int = 1,
    layers: int = 2,
    null: int | None = None,
    **sizes: Any,
) -> EngineSpec:
    groups = [
        KVCacheGroup(name=f"g{n}", layers=[f"l.{i}.{n}" for i in range(layers)], spec=spec)
        for n, spec in enumerate(specs)
    ]
    parallel = ParallelConfig(tp_size=tp, **sizes)
    return EngineSpec(groups=groups, parallel=parallel, null_block=null)


def test_default_placement_does_not_depend_on_the_engine() -> None:
    placements = {
        StoredSpec.of(engine(FULL, LATENT, tp=tp), page_tokens=8).digest for tp in (1, 2, 8)
    }
    other = engine(attrs.evolve(FULL, block_size=8), LATENT)
    placements.add(StoredSpec.of(other, page_tokens=8).digest)
    assert len(placements) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"page_tokens": 16},
        {"head_groups": 2},
        {"layout": "BLHNC"},
        {"layer_ranges": [["l.0.0"], ["l.1.0"]]},
        {"context_size": 2},
        {"context_size": 2, "interleave_size": 2},
        {"groups": engine(attrs.evolve(FULL, head_size=8)).groups},
        {"groups": engine(attrs.evolve(FULL, dtype="int8")).groups},
        {"groups": engine(attrs.evolve(FULL, head_size_v=2)).groups},
        {"groups": engine(attrs.evolve(FULL, scales_digest="0" * 32)).groups},
        {"groups": engine(attrs.evolve(FULL, key_content=kvspec.KeyContent(rotary="none"))).groups},
        {"groups": engine(FULL, layers=3).groups},
    ],
)
def test_digest_differs_for_each_difference(change: Mapping[str, Any]) -> None:
    fields: dict[str, Any] = {"groups": engine(FULL).groups, "page_tokens": 8}
    digests = {StoredSpec(**one).digest for one in (fields, fields | dict(change))}
    assert len(digests) == 2


def test_digest_has_a_tolerance_for_angles() -> None:
    def digest(*angles: float, order: str = "halves") -> str:
        content = kvspec.KeyContent(rotary=order, rotary_size=4, frequencies=angles)
        spec = attrs.evolve(FULL, key_content=content)
        return StoredSpec.of(engine(spec), page_tokens=8).digest

    assert digest(1.0, 0.01) == digest(1.0, 0.01 * (1 + 1e-7))
    assert digest(1.0, 0.01) == digest(1.0, 0.01, order="pairs")
    assert digest(1.0, 0.01) != digest(1.0, 0.01 * (1 + 1e-4))


def test_store_refuses_angles_that_only_have_equal_sums() -> None:
    """The name has three sums of the angles. The description of the space has all of them."""
    angles = [10000 ** (-at / 8) for at in range(8)]
    other = [angle * factor for angle, factor in zip(angles, (1.1, 1.1**-2, 1.1), strict=False)]
    placements = []
    for each in (angles, [*other, *angles[3:]]):
        content = kvspec.KeyContent(rotary="halves", rotary_size=16, frequencies=each)
        spec = attrs.evolve(FULL, head_size=16, key_content=content)
        placements.append(StoredSpec.of(engine(spec), page_tokens=8))
    assert placements[0].digest == placements[1].digest
    model = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")
    objects = MemoryObjects()
    for _ in range(2):
        PageStore(placements[0], model, objects)
    with pytest.raises(MismatchError, match="frequencies"):
        PageStore(placements[1], model, objects)


def test_placement_is_equal_after_json() -> None:
    stages = [["l.0.0", "l.0.1", "l.0.2"], ["l.1.0", "l.1.1", "l.1.2"]]
    one = StoredSpec.of(engine(FULL, LATENT, STATE), page_tokens=8, layer_ranges=stages)
    other = StoredSpec.from_params(json.loads(json.dumps(one.to_params())))
    assert (other, other.digest) == (one, one.digest)


def test_latent_and_state_are_stored_once() -> None:
    placement = StoredSpec.of(engine(FULL, LATENT, STATE), page_tokens=8, head_groups=4)
    objects = {group: 0 for group, _ in placement.objects}
    for group, _ in placement.objects:
        objects[group] += 1
    assert objects == {"full": 4, "latent": 1, "state": 4}
    assert placement.page_bytes == 8 * 2 * (4 * 8 + 8) + 2 * 4 * 2


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (
            kvspec.CircularBufferSpec(
                block_size=8, head_size=4, dtype="uint8", num_kv_heads=1, compress_ratio=4,
                overlap=False,
            ),
            "ring",
        ),
        (
            kvspec.CrossAttentionSpec(
                block_size=4, total_num_kv_heads=1, head_size=4, dtype="uint8"
            ),
            "prompt",
        ),
    ],
)  # fmt: skip
def test_placement_refuses_what_has_no_pages(spec: kvspec.LayerSpec, word: str) -> None:
    with pytest.raises(SpecError, match=word) as caught:
        StoredSpec.of(engine(spec), page_tokens=8)
    assert caught.value.field == "groups['g0'].spec"


@pytest.mark.parametrize(
    ("own", "sizes", "field", "word"),
    [
        (engine(FULL, tp=4), {"head_groups": 2}, "head_groups", "4"),
        (engine(FULL, pp_size=2), {}, "layer_ranges", "2 stages"),
        (engine(LATENT, tp=2, dcp_size=2), {}, "context_size", "2"),
    ],
)
def test_store_names_what_to_choose(
    own: EngineSpec, sizes: Mapping[str, Any], field: str, word: str
) -> None:
    placement = StoredSpec.of(own, page_tokens=8, **sizes)
    with pytest.raises(SpecError, match=word) as caught:
        plan_store(own, placement)
    assert caught.value.field == field
    plan_load(placement, own)  # It can still load.


def test_store_refuses_excluded_layer() -> None:
    own = engine(FULL)
    placement = StoredSpec.of(own, page_tokens=8)
    drafts = attrs.evolve(own, groups=[attrs.evolve(own.groups[0], excluded=["l.1.0"])])
    with pytest.raises(SpecError, match=r"excludes layer 'l\.1\.0'"):
        plan_store(drafts, placement)


def test_store_refuses_opaque_pages_of_unequal_sizes() -> None:
    opaque = attrs.evolve(FULL, page_format="opaque:flash", page_block_size=4)
    placement = StoredSpec.of(engine(opaque, tp=2), page_tokens=8)
    assert placement.head_groups == 2
    plan_store(engine(opaque, tp=2), placement)
    with pytest.raises(MismatchError, match="mix all heads"):
        plan_load(placement, engine(opaque, tp=4))


def test_replicas_take_turns() -> None:
    own = engine(FULL, LATENT, tp=8)
    plan = plan_store(own, StoredSpec.of(own, page_tokens=8, head_groups=4))
    written = dict.fromkeys(own.parallel.ranks, 0)
    for page in range(8):
        for stored in plan.placement.objects:
            written[plan.writer(*stored, page)] += 1
    # 4 objects of 8 pages by 8 ranks, and 8 objects of latents.
    assert set(written.values()) == {5}
    assert plan.writers[PageObject("latent", RankId())] == own.parallel.ranks


def test_store_plan_is_a_table() -> None:
    own = engine(FULL, tp=8)
    text = str(plan_store(own, StoredSpec.of(own, page_tokens=8, head_groups=4)))
    assert text.splitlines()[:2] == [
        "a page of 8 tokens: 4 objects, 512 B, copied in pieces of at least 4 B",
        "  full tp0: 128 B, by tp0, tp1 take turns",
    ]


Tables = Mapping[str, Sequence[int]]


def saved(own: EngineSpec, tables: Tables, pages: int, **options: Any) -> tuple[Any, ...]:
    """Save the first pages of a prompt of random bytes. Return store, names and what was saved."""
    placement = StoredSpec.of(own, page_tokens=8, head_groups=own.parallel.tp_size)
    store = PageStore(placement, MODEL, MemoryObjects())
    names = store.names(range(8 * pages), PromptIdentity.of_text())
    results = []
    for rank in own.parallel.ranks:
        cache, storage = kvspec.allocate(own, rank, 20)
        for array in storage.values():
            array[:] = np.random.default_rng(rank.tp).integers(1, 255, array.size)
        results.append(store.rank_pages(cache).save(names, 0, pages, tables, **options))
    return store, names, results


def test_save_leaves_out_pages_that_a_window_has_passed() -> None:
    own = engine(FULL, WINDOW, null=0)
    tables = {"g0": [1, 2, 3, 4, 5, 6], "g1": [0, 7, 8, 9, 10, 11]}
    store, names, [result] = saved(own, tables, 3)
    assert result.not_whole == {"window-8": (0,)}
    assert {key.group for key in result.written if key.page == names[0]} == {"full"}
    assert store.lookup(names, own).num_pages == 3  # The window reads pages 2 and later only.
    assert store.lookup(names[:1], own).num_pages == 0
    assert "window-8" not in store.explain(names, own)
    assert "g1: page 0 (tokens 0 to 7) is not stored" in store.explain(names[:1], own)


def test_save_stores_states_of_one_table_at_page_ends() -> None:
    own = engine(FULL, STATE)
    tables = {"g0": [1, 2, 3, 4, 5, 6], "g1": [7]}
    states = {"g1": {4: 3, 8: 4, 24: 7}}
    store, names, [result] = saved(own, tables, 3, states_at=states)
    assert result.not_whole == {"state": (1,)}
    assert [store.lookup(names[:n], own).num_pages for n in (1, 2, 3)] == [1, 1, 3]


def test_save_writes_an_object_once() -> None:
    own = engine(FULL, tp=2)
    store, names, results = saved(own, {"g0": [1, 2, 3, 4]}, 2)
    assert sum(len(result.written) for result in results) == 2 * len(store.placement.objects)
    cache, _ = kvspec.allocate(own, RankId(), 20)
    again = store.rank_pages(cache).save(names, 0, 2, {"g0": [1, 2, 3, 4]})
    assert not again.written
    assert again.nbytes == 0
    assert set(again.already_stored) == set(results[0].written)


def damaged(objects: MemoryObjects, key: ObjectKey) -> None:
    payload, expected = objects._pages[key[:2]][key]
    objects._pages[key[:2]][key] = bytes([payload[0] ^ 1]) + payload[1:], expected


@pytest.mark.parametrize("fault", ["damaged", "removed"])
def test_load_names_the_pages_in_the_cache(fault: str) -> None:
    own = engine(FULL, tp=2)
    store, names, results = saved(own, {"g0": [1, 2, 3, 4, 5, 6]}, 3)
    key = next(key for key in results[0].written if key.page == names[1])
    hit = store.lookup(names, own)
    if fault == "damaged":
        damaged(store.objects, key)
    else:
        store.objects.remove([key])
    cache, storage = kvspec.allocate(own, RankId(), 20)
    pages = store.rank_pages(cache, buffer_bytes=1)
    with pytest.raises(LoadError, match=fault if fault == "damaged" else "absent") as caught:
        pages.load(hit, 3, {"g0": [1, 2, 3, 4, 5, 6]})
    assert (caught.value.loaded, caught.value.missing) == (range(1), range(1, 3))
    page = storage["g0"].reshape(2, 20, -1)
    assert page[:, 1:3].all()
    assert not page[:, 3:].any()


def test_no_page_counts_as_loaded_if_the_window_of_a_shorter_prefix_is_absent() -> None:
    own = engine(FULL, WINDOW, null=0)
    tables = {"g0": [1, 2, 3, 4, 5, 6], "g1": [7, 8, 9, 10, 11, 12]}
    store, names, [result] = saved(own, tables, 3)
    hit = store.lookup(names, own)
    store.objects.remove([key for key in result.written if key.page == names[2]])
    cache, _ = kvspec.allocate(own, RankId(), 20)
    with pytest.raises(LoadError, match="absent") as caught:
        store.rank_pages(cache, buffer_bytes=1).load(hit, 3, tables)
    assert (caught.value.loaded, caught.value.missing) == (range(0), range(3))


def test_an_engine_that_equals_the_placement_loads() -> None:
    """The engine and the virtual engine are equal, so the plan does not show the direction."""
    placement = StoredSpec(groups=engine(FULL).groups, page_tokens=8, head_groups=2)
    own, store = placement.engine, PageStore(placement, MODEL, MemoryObjects())
    names = store.names(range(24), PromptIdentity.of_text())
    for rank in own.parallel.ranks:
        cache, arrays = kvspec.allocate(own, rank, 8)
        group = placement.groups[0].name
        arrays[group][:] = np.random.default_rng(rank.tp).integers(1, 255, arrays[group].size)
        store.rank_pages(cache).save(names, 0, 3, {group: [3, 1, 2]})
        other, loaded = kvspec.allocate(own, rank, 8)
        store.rank_pages(other).load(names, 3, {group: [4, 6, 7]})
        before, after = (array[group].reshape(8, -1) for array in (arrays, loaded))
        assert (before[[3, 1, 2]] == after[[4, 6, 7]]).all()


def test_lookup_pins_what_a_load_reads() -> None:
    own = engine(FULL)
    store, names, [result] = saved(own, {"g0": [1, 2, 3, 4]}, 2)
    assert isinstance(store.objects, MemoryObjects)
    with store.lookup(names, own) as hit:
        assert store.objects._pinned() == {key[:2] for key in result.written}
        assert hit.num_tokens == 16
    assert not store.objects._pinned()


def test_wrong_arguments_are_refused() -> None:
    own = engine(FULL, STATE)
    store, names, _ = saved(own, {"g0": [1, 2, 3, 4], "g1": [0]}, 2)
    cache, _ = kvspec.allocate(own, RankId(), 20)
    pages = store.rank_pages(cache)
    calls: dict[str, Callable[[], object]] = {
        "num_pages": lambda: pages.load(names, 3, {}),
        "tables": lambda: pages.save(names, 0, 1, {}),
        "states_at": lambda: pages.save(names, 0, 1, {"g0": [1, 2]}, {"g0": {8: 1}}),
        "pin_seconds": lambda: store.lookup(names, own, pin_seconds=-1),
    }
    for field, call in calls.items():
        with pytest.raises(SpecError) as caught:
            call()
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("tables", "states", "field"),
    [
        ({"g1": [1, 2, 30, 4]}, [5, 6], "tables['g1']"),
        ({"g1": [1, 2, -3, 4]}, [5, 6], "tables['g1']"),
        ({"g1": [1, 2, 1, 4]}, [5, 6], "tables['g1']"),
        ({"g0": [1, 2, 3, 1]}, [5, 6], "tables['g0']"),
        ({}, [5, 99], "states_at['g2']"),
        ({}, [5, 5], "states_at['g2']"),
        ({}, [5, 0], "states_at['g2']"),
    ],
    ids=["too large", "negative", "twice", "twice in the first", "state", "one state", "null"],
)
def test_a_save_with_a_wrong_block_in_any_group_writes_nothing(
    tables: dict[str, list[int]], states: list[int], field: str
) -> None:
    own = engine(FULL, WINDOW, STATE, null=0)
    store = PageStore(StoredSpec.of(own, page_tokens=8), MODEL, MemoryObjects())
    names = store.names(range(16), PromptIdentity.of_text())
    cache, _ = kvspec.allocate(own, RankId(), 20)
    pages = store.rank_pages(cache, buffer_bytes=1)
    right = {"g0": [1, 2, 3, 4], "g1": [1, 2, 3, 4]}
    for _ in range(2):
        with pytest.raises(SpecError) as caught:
            pages.save(names, 0, 2, right | tables, {"g2": dict(zip((8, 16), states, strict=True))})
        assert field == caught.value.field
        assert [] == [*store.objects.stored_objects()]
    assert 6 == len(pages.save(names, 0, 2, right, {"g2": {8: 5, 16: 6}}).written)


@pytest.mark.parametrize(("chunked", "loaded"), [(False, 0), (True, 6)])
def test_pages_count_as_loaded_if_a_shorter_prefix_needs_no_earlier_page(
    *, chunked: bool, loaded: int
) -> None:
    """A window of a shorter prefix begins earlier. A chunk begins at the same token."""
    spec: Any = attrs.evolve(WINDOW, sliding_window=14)
    if chunked:
        sizes = {"block_size": 4, "total_num_kv_heads": 4, "head_size": 8, "dtype": "float16"}
        spec = kvspec.ChunkedLocalAttentionSpec(attention_chunk_size=40, **sizes)
    own = engine(spec)
    store, names, [result] = saved(own, {"g0": range(1, 15)}, 7)
    store.objects.remove([key for key in result.written if key.page == names[6]])
    cache, _ = kvspec.allocate(own, RankId(), 20)
    with pytest.raises(LoadError, match="absent") as caught:
        store.rank_pages(cache, buffer_bytes=1).load(names, 7, {"g0": range(1, 15)})
    assert range(loaded) == caught.value.loaded
    assert range(loaded, 7) == caught.value.missing


CHUNKED = kvspec.ChunkedLocalAttentionSpec(
    block_size=4, total_num_kv_heads=4, head_size=4, dtype="uint8", attention_chunk_size=24
)


@pytest.mark.parametrize("page", range(7))
@pytest.mark.parametrize("other", [FULL, WINDOW, CHUNKED, STATE])
@pytest.mark.parametrize("stages", [False, True])
def test_each_rank_can_continue_behind_the_fewest_loaded_pages(
    page: int, other: Any, *, stages: bool
) -> None:
    """A rank whose layers need all pages must not offer a prefix that another stage lacks."""
    own = engine(FULL, other, layers=1)
    tables = {"g0": range(1, 15), "g1": [15] if other is STATE else range(1, 15)}
    states = {"g1": {8 * n: n for n in range(1, 8)}} if other is STATE else {}
    store, names, [result] = saved(own, tables, 7, states_at=states)
    if stages:
        parallel = ParallelConfig(pp_size=2, stages=[["l.0.0"], ["l.0.1"]])
        own = attrs.evolve(own, parallel=parallel)

    def load(count: int) -> tuple[int, list[Any]]:
        """Load *count* pages on each rank. Return the fewest pages, and the memories."""
        fewest, memories = count, list[Any]()
        for rank in own.parallel.ranks:
            cache, storage = kvspec.allocate(own, rank, 20)
            memories.append(storage)
            try:
                store.rank_pages(cache, buffer_bytes=1).load(names, count, tables)
            except LoadError as error:
                fewest = min(fewest, error.loaded.stop)
        return fewest, memories

    right = [load(count)[1] for count in range(8)]
    keys = [key for key in result.written if key.page == names[page]]
    for key in keys:
        damaged(store.objects, key)
        fewest, memories = load(7)
        for expected, actual in zip(right[fewest], memories, strict=True):
            for name, array in expected.items():
                read = array != 0
                assert (array[read] == actual[name][read]).all(), (key.group, fewest)
        damaged(store.objects, key)


def test_other_spaces_name_the_field_of_the_placement() -> None:
    objects = MemoryObjects()
    for change in ({"page_tokens": 16}, {"head_groups": 2}, {"layout": "BLHNC"}):
        PageStore(StoredSpec.of(engine(FULL), **{"page_tokens": 8} | change), MODEL, objects)
    int8 = engine(attrs.evolve(FULL, dtype="int8"))
    PageStore(StoredSpec.of(int8, page_tokens=8), MODEL, objects)
    split = StoredSpec.of(engine(FULL, LATENT), page_tokens=8)
    PageStore(split, attrs.evolve(MODEL, revision="r2"), objects)
    lines = PageStore(StoredSpec.of(engine(FULL), page_tokens=8), MODEL, objects).other_spaces()
    fields = ["page_tokens: 16", "head_groups: 2", "layout: 'BLHNC'", ".dtype: offered 'int8'"]
    for field, line in zip([*fields, "revision: 'r2'"], lines, strict=True):
        assert field in line


@pytest.mark.parametrize("place", ["s3://key:secret@bucket", Path("/mnt/kv"), None])
def test_a_store_needs_objects_and_no_path(place: Any) -> None:
    with pytest.raises(SpecError) as caught:
        PageStore(StoredSpec.of(engine(FULL), page_tokens=8), MODEL, place)
    assert caught.value.field == "objects"
    assert "secret" not in str(caught.value)


def test_plans_call_the_sides_engine_and_placement() -> None:
    own, other = engine(FULL), engine(attrs.evolve(FULL, dtype="int8"))
    placement = StoredSpec.of(own, page_tokens=8)
    for sides, plan in (
        (("placement", "engine"), lambda: plan_load(placement, other)),
        (("engine", "placement"), lambda: plan_store(other, placement)),
    ):
        with pytest.raises(MismatchError) as caught:
            plan()
        assert {sides} == {each.sides for each in caught.value.mismatches}


@pytest.mark.parametrize("sizes", [{}, {"cached_tokens": 16}])
def test_a_load_that_cannot_continue_lacks_all_pages_that_are_not_cached(
    sizes: dict[str, int],
) -> None:
    own = engine(WINDOW)
    store, names, [result] = saved(own, {"g0": range(1, 15)}, 7)
    store.objects.remove([key for key in result.written if key.page == names[6]])
    cache, _ = kvspec.allocate(own, RankId(), 20)
    with pytest.raises(LoadError) as caught:
        store.rank_pages(cache).load(names, 7, {"g0": range(1, 15)}, **sizes)
    first = sizes.get("cached_tokens", 0) // 8
    assert (range(first, first), range(first, 7)) == (caught.value.loaded, caught.value.missing)


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("group", "wrong"),
    [
        *(("g0", [1, 2, 3, 4, 5, bad]) for bad in (-1, 0, 1, 20, 2**40)),
        *(("g1", [7, 8, 9, 10, 11, bad]) for bad in (-1, 0, 11, 20)),
        ("g0", [1, 2, 3]),
        ("g1", [7, 8, 9]),
        ("g1", None),
        *(("g2", ids) for ids in ([], [-1], [0], [20], [1, 2])),
    ],
)
def test_load_refuses_a_wrong_table_before_any_byte_is_written(
    group: str, wrong: list[int] | None, buffer_bytes: int
) -> None:
    """Also if the wrong block belongs to the last batch."""
    own = engine(FULL, WINDOW, STATE, null=0)
    tables: dict[str, Any] = {"g0": [1, 2, 3, 4, 5, 6], "g1": [7, 8, 9, 10, 11, 12]}
    store, names, _ = saved(own, tables, 3, states_at={"g2": {24: 13}})
    cache, storage = kvspec.allocate(own, RankId(), 20)
    pages = store.rank_pages(cache, buffer_bytes=buffer_bytes)
    with pytest.raises(SpecError) as caught:
        pages.load(names, 3, {**tables, "g2": [13], group: wrong})
    assert wrong is None or caught.value.field == f"tables[{group!r}]"
    assert not any(array.any() for array in storage.values())
    assert pages.load(names, 3, {**tables, "g2": [13]}).pages == range(3)
