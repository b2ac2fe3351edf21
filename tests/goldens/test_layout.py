"""Page sizes, strides and views agree with those that vLLM's own code computes.

What kvspec refuses or does not model is listed with its reason and counted: no row is lost.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
from builders import engine

import kvspec

GOLDENS = Path(__file__).parent
PAGES: dict[str, Any] = json.loads((GOLDENS / "vllm_page_sizes.json").read_text())
STRIDES: dict[str, Any] = json.loads((GOLDENS / "vllm_layout_strides.json").read_text())
VIEWS: dict[str, Any] = json.loads((GOLDENS / "vllm_kv_views.json").read_text())
CONV: dict[str, Any] = json.loads((GOLDENS / "vllm_conv_split.json").read_text())
NUM_BLOCKS = 8
DTYPE_BYTES = {"bfloat16": 2, "uint8": 1, "int8": 1}

NOT_MODELLED = {
    "frac": "a fraction of a token per state: states finer than tokens are not modelled",
    "enc": "encoder-only attention keeps no cache between steps, so there is nothing to move",
    "sink": "sink tokens stand in no request's block table",
    "circ": "a circular buffer is a compressor's scratch space, not cache",
}
"""Families of vLLM's page size table for which there is no spec."""

STATES = {str(row[4]): CONV["models"][row[0]] for row in CONV["rows"] if row[2] == 1}
"""The models whose state shapes vLLM's tables give: Qwen3-Next, Bamba, Nemotron-H and Jamba."""


def state_of(arguments: dict[str, Any]) -> kvspec.MambaSpec:
    """Return the spec of a state with vLLM's *shapes* and *dtypes*."""
    padded = arguments.get("page_size_padded")
    if arguments["shapes"] == [[4]]:
        state = kvspec.MambaSpec.replicated_state(state_bytes=16)
        return attrs.evolve(state, page_size_padded=padded)
    sizes = dict(STATES[str(arguments["shapes"])])
    make = getattr(kvspec.MambaSpec, sizes.pop("kind"))
    conv, ssm = arguments["dtypes"]
    spec: kvspec.MambaSpec = make(**sizes, dtype=conv, ssm_dtype=ssm, page_size_padded=padded)
    return spec


def attention_of(cls: str, arguments: dict[str, Any]) -> kvspec.LayerSpec:
    """Return the spec with vLLM's arguments; its KV heads are those of a model at TP 1.

    A backend's `num_head_slots` (slots for K and V) is a layout with K planes here; a NVFP4 head
    with its scales is as many bytes as its slot.
    """
    given = dict(arguments)
    heads, quant = given.pop("num_kv_heads"), given.pop("kv_quant_mode", None)
    if given.pop("num_head_slots", None) is not None:
        content = given.pop("state_content_bytes")
        given |= {"head_size": content, "dtype": "uint8"} if quant == "NVFP4" else {}
    if "MLA" not in cls:
        given["total_num_kv_heads"] = heads
    if multiple := given.pop("alignment", None):
        page = getattr(kvspec, cls)(**given).page_size_bytes()
        given["page_size_padded"] = -(-page // multiple) * multiple
    spec: kvspec.LayerSpec = getattr(kvspec, cls)(**given)
    return spec


def page_rows(*families: str) -> list[tuple[str, dict[str, Any], list[Any]]]:
    """Return (vLLM's class, arguments given, the answers) of the rows of *families*."""
    rows = []
    for family, *row in PAGES["rows"]:
        cls, names = PAGES["families"][family]
        if family in families:
            given = {k: v for k, v in zip(names, row, strict=False) if v is not None}
            rows.append((cls, given, row[len(names) :]))
    return rows


def leaves_a_rest(arguments: dict[str, Any]) -> bool:
    """Return whether the tokens of a block are no whole number of states."""
    return bool(arguments["block_size"] % arguments.get("tokens_per_state", 1))


BACKENDS = tuple(name for name in PAGES["families"] if name.startswith("backend:"))
ATTENTION = ("full", "asym", "sw", "chunked", "mla", "swmla", "padded", *BACKENDS)


@pytest.mark.parametrize("family", ATTENTION)
def test_an_attention_page_is_vllm_s(family: str) -> None:
    """Units, states, content and page bytes are vLLM's; a padding below the page is refused."""
    for cls, arguments, (slots, states, content, page) in page_rows(family):
        if arguments.get("head_size_v") == 0 or leaves_a_rest(arguments):
            continue
        spec = attention_of(cls, arguments)
        assert slots * content == sum(part.units * part.content_bytes for part in spec.parts)
        assert [states] * len(spec.parts) == [part.states for part in spec.parts]
        if "num_head_slots" not in arguments:
            assert [slots] * len(spec.parts) == [part.units for part in spec.parts]
        if page == "refused":
            with pytest.raises(
                kvspec.SpecError, match=r"expected at least the \d+ bytes of the page"
            ):
                spec.page_size_bytes()
            continue
        assert page == spec.page_size_bytes()


def test_a_cache_without_values_is_one_opaque_part() -> None:
    """`head_size_v=0` is refused; the same page is that of a content of one key's bytes."""
    rows = [row for row in page_rows("asym") if row[1]["head_size_v"] == 0]
    for cls, arguments, (_, states, content, page) in rows:
        with pytest.raises(kvspec.SpecError, match="head_size_v=0: expected"):
            attention_of(cls, arguments)
        del arguments["head_size_v"]
        spec = attention_of(cls, arguments | {"state_content_bytes": content})
        assert [("kv", states)] == [(part.name, part.states) for part in spec.parts]
        assert page == spec.page_size_bytes()
    assert len(rows) == 6


def test_states_that_do_not_fill_a_block_are_refused() -> None:
    """A block that is no whole number of states is refused; vLLM drops its last tokens."""
    rows = [row for row in page_rows(*ATTENTION, "tps") if leaves_a_rest(row[1])]
    for cls, arguments, (_, states, _, _) in rows:
        assert arguments["block_size"] > states * arguments["tokens_per_state"]
        with pytest.raises(kvspec.SpecError, match="expected a multiple of tokens_per_state="):
            attention_of(cls, arguments)
    assert len(rows) == 8


def test_a_state_s_page_is_vllm_s() -> None:
    """A state's page is the sum of its parts, padded; a padding below that is refused."""
    for _, arguments, (_, _, content, page) in page_rows("mamba"):
        spec = state_of(arguments)
        assert content == sum(p.units * p.states * p.content_bytes for p in spec.parts)
        if page == "refused":
            with pytest.raises(
                kvspec.SpecError, match="expected at least the 16 bytes of the page"
            ):
                spec.page_size_bytes()
        else:
            assert page == spec.page_size_bytes()


def test_a_uniform_group_s_page_is_vllm_s() -> None:
    """A group's page is the sum of its layers'; what vLLM does not unify is refused.

    vLLM also puts MLA and full attention into one group (2 rows), since one of its classes derives
    from the other; here a group has one kind, and the page is that of two groups.
    """
    outcomes = []
    for _, arguments, (*_, page) in page_rows("uniform"):
        layers = {
            name: attention_of(given.pop("class"), given)
            for name, given in copy.deepcopy(arguments["specs"]).items()
        }
        try:
            group = kvspec.UniformTypeKVCacheSpecs(specs=layers)
        except kvspec.SpecError:
            outcomes.append("two groups" if page != "not unified" else "both refuse")
            assert page in (sum(each.page_size_bytes() for each in layers.values()), "not unified")
        else:
            outcomes.append("equal")
            assert page == group.page_size_bytes()
    assert sorted(outcomes) == ["both refuse"] * 2 + ["equal"] * 3 + ["two groups"] * 2


def test_every_page_size_row_has_its_fate() -> None:
    """616 rows: 566 equal, 10 refused by both, 16 (6 + 8 + 2) here alone, 24 not modelled."""
    counts = Counter(row[0] for row in PAGES["rows"])
    assert {*ATTENTION, *NOT_MODELLED, "tps", "mamba", "uniform"} == set(counts)
    expected = (616, 24)
    assert expected == (counts.total(), sum(counts[family] for family in NOT_MODELLED))
    refused = {"padded": 6, "mamba": 2}
    assert refused == Counter(row[0] for row in PAGES["rows"] if row[-1] == "refused")


def spec_of(name: str, block_size: int) -> kvspec.LayerSpec:
    """Return the spec *name* of the stride tables with blocks of *block_size* tokens."""
    given = dict(STRIDES["specs"][name])
    cls = given.pop("class")
    if cls == "MambaSpec":
        return state_of(given)
    if "page_size_padded" in given:
        given["page_size_padded"] = given["page_size_padded"][str(block_size)]
    return attention_of(cls, given | {"block_size": block_size})


def letters(name: str, layout: str) -> str:
    """Return our name of vLLM's *layout* for the spec *name*.

    Two slots are planes of K and V with all heads in the content; two a head, planes around heads.
    """
    slots = STRIDES["specs"][name].get("num_head_slots")
    if slots is None:
        return layout
    planes = layout.replace("H", "K" if slots == 2 else "KH")
    return planes[:-1] + "HC" if slots == 2 else planes


def regions_of(
    spec: kvspec.LayerSpec, layout: str, num_layers: int, num_blocks: int
) -> tuple[list[list[kvspec.Region]], int]:
    """Return every layer's regions in order of its parts, and the bytes of the group's storage."""
    layers = tuple(f"layers.{i}" for i in range(num_layers))
    side = engine(spec, layers=layers, layout=layout)
    cache, storage = kvspec.allocate(side, kvspec.RankId(), num_blocks=num_blocks)
    found = [[each for each in cache.regions if each.layer == layer] for layer in layers]
    return found, storage["g"].nbytes


def check_layer(
    name: str, regions: list[kvspec.Region], shape: list[int], strides: list[int]
) -> None:
    """Compare one layer's regions with vLLM's *shape* [B, H, N, C] and *strides* [B, H, N].

    The stride of the one head of a padded page addresses nothing, and is not compared.
    """
    first, last = regions[0], regions[-1]
    blocks, slots, states, content = shape
    block, slot, state = strides
    separate = last.base - first.base
    given = STRIDES["specs"][name]
    assert {(blocks, block)} == {(each.num_blocks, each.block_stride) for each in regions}
    if given["class"] == "MambaSpec":
        sizes = [each.units * each.states * each.content_bytes for each in regions]
        assert (sum(sizes[:-1]), content) == (separate, sum(sizes))
        return
    assert {(states, state)} == {(each.states, each.state_stride) for each in regions}
    if given.get("num_head_slots") == 2:
        assert (slot, content) == (separate, first.units * first.content_bytes)
        assert {first.content_bytes} == {each.unit_stride for each in regions}
        return
    if slots > 1 or "page_size_padded" not in given:
        assert {slot} == {each.unit_stride for each in regions}
    if given.get("num_head_slots") is not None:
        assert (slots, content) == (2 * first.units, first.content_bytes)
        assert separate == first.units * slot
        return
    assert (slots, content) == (first.units, sum(each.content_bytes for each in regions))
    assert separate == (first.content_bytes if len(regions) == 2 else 0)


@pytest.mark.parametrize("row", STRIDES["rows"], ids=lambda row: "-".join(map(str, row[:3])))
def test_strides_are_vllm_s(row: list[Any]) -> None:
    """Strides of L, B, H and N are vLLM's in each of its six layouts; so is the whole size.

    Where vLLM cuts a block into kernel blocks, those are the blocks in memory: so they are the
    blocks here, and there are more of them; vLLM refuses that for a padded page. Both refuse a
    padding that is not at a page's end.
    """
    name, block_size, kernel_size, shape, by_layers = row
    num_blocks = NUM_BLOCKS * block_size // (kernel_size or block_size)
    for num_layers, by_layout in zip(STRIDES["num_layers"], by_layers, strict=True):
        for layout, strides in zip(STRIDES["layouts"], by_layout, strict=True):
            if strides == "refused: padded page, kernel blocks":
                continue
            spec = spec_of(name, kernel_size or block_size)
            if strides == "refused: padding inside the page's tail":
                with pytest.raises(kvspec.SpecError, match="page_size_padded"):
                    regions_of(spec, letters(name, layout), num_layers, num_blocks)
                continue
            layers, size = regions_of(spec, letters(name, layout), num_layers, num_blocks)
            outer = strides[0] * num_layers if layout[0] == "L" else strides[1] * num_blocks
            assert outer == size
            for regions in layers:
                check_layer(name, regions, shape, strides[1:])
            assert {strides[0]} >= {two[0].base - one[0].base for one, two in pairwise(layers)}


@pytest.mark.parametrize("row", VIEWS["rows"], ids=lambda row: "-".join(map(str, row[:2])))
def test_views_are_vllm_s(row: list[Any]) -> None:
    """Each layer's byte offset and strides in the one flat buffer are vLLM's, and its size."""
    name, block_size, dtype, shape, by_layout = row
    item = DTYPE_BYTES[dtype]
    for layout, view in zip(VIEWS["layouts"], by_layout, strict=True):
        if view is None:
            continue
        size, offsets, strides = view
        spec = spec_of(name, block_size)
        layers, ours = regions_of(spec, letters(name, layout), len(offsets), NUM_BLOCKS)
        assert size == ours
        assert offsets == [regions[0].base - layers[0][0].base for regions in layers]
        in_bytes = [item * stride for stride in strides[:3]]
        for regions in layers:
            check_layer(name, regions, [*shape[:3], item * shape[3]], in_bytes)


def test_every_stride_row_has_its_fate() -> None:
    """1,152 strides: 1,096 equal, 8 refused by both, 48 unsayable here; 296 views, all equal."""
    strides = [
        each for *_, by_layers in STRIDES["rows"] for by_layout in by_layers for each in by_layout
    ]
    refused = Counter(each.removeprefix("refused: ") for each in strides if isinstance(each, str))
    expected = {"padded page, kernel blocks": 48, "padding inside the page's tail": 8}
    assert (1152, expected) == (len(strides), refused)
    assert sum(view is not None for *_, views in VIEWS["rows"] for view in views) == 296
