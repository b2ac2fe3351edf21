"""Test that page sizes, strides and views equal those that vLLM's own code computes.

Rows that kvspec rejects or does not model are counted, with the reason.
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
from refused import refusal

import kvspec

GOLDENS = Path(__file__).parent
PAGES: dict[str, Any] = json.loads((GOLDENS / "vllm_page_sizes.json").read_text())
STRIDES: dict[str, Any] = json.loads((GOLDENS / "vllm_layout_strides.json").read_text())
VIEWS: dict[str, Any] = json.loads((GOLDENS / "vllm_kv_views.json").read_text())
CONV: dict[str, Any] = json.loads((GOLDENS / "vllm_conv_split.json").read_text())
NUM_BLOCKS = 8
DTYPE_BYTES = {"bfloat16": 2, "uint8": 1, "int8": 1}

NOT_MODELLED = {
    "frac": "a state is at least one token, not a fraction of one",
    "enc": "encoder-only attention does not keep a cache between steps",
    "sink": "the block table of a request does not contain sink tokens",
    "circ": "a circular buffer is scratch space of a compressor",
}
"""Families of vLLM's page size table without a spec in kvspec, and why."""

STATES = {str(row[4]): CONV["models"][row[0]] for row in CONV["rows"] if row[2] == 1}
"""Models with state shapes in vLLM's tables: Qwen3-Next, Bamba, Nemotron-H and Jamba."""


def state_of(arguments: dict[str, Any]) -> kvspec.MambaSpec:
    """Return the spec of a state with vLLM's *shapes* and *dtypes*."""
    padded = arguments.get("page_size_padded")
    if arguments["shapes"] == [[4]]:
        state = kvspec.MambaSpec.replicated_state(state_bytes=16)
        return attrs.evolve(state, page_size_padded=padded)
    sizes = dict(STATES[str(arguments["shapes"])])
    make = getattr(kvspec.MambaSpec, sizes.pop("kind"))
    conv, ssm = arguments["dtypes"]
    spec: kvspec.MambaSpec = make(**sizes, dtype=conv, ssm_dtype=ssm)
    return attrs.evolve(spec, page_size_padded=padded)


def attention_of(cls: str, arguments: dict[str, Any]) -> kvspec.LayerSpec:
    """Return the spec with vLLM's arguments; its KV heads are those of a model at TP 1.

    In kvspec a backend's `num_head_slots` (slots for K and V) is a layout with K planes. A NVFP4
    head with its scales has the size of its slot.
    """
    fields = dict(arguments)
    heads, quant = fields.pop("num_kv_heads"), fields.pop("kv_quant_mode", None)
    if fields.pop("num_head_slots", None) is not None:
        content = fields.pop("state_content_bytes")
        fields |= {"head_size": content, "dtype": "uint8"} if quant == "NVFP4" else {}
    if "MLA" not in cls:
        fields["total_num_kv_heads"] = heads
    if multiple := fields.pop("alignment", None):
        page = getattr(kvspec, cls)(**fields).page_size_bytes()
        fields["page_size_padded"] = -(-page // multiple) * multiple
    spec: kvspec.LayerSpec = getattr(kvspec, cls)(**fields)
    return spec


def page_rows(*families: str) -> list[tuple[str, dict[str, Any], list[Any]]]:
    """Return (vLLM's class, its arguments, the results) of the rows of *families*."""
    rows = []
    for family, *row in PAGES["rows"]:
        cls, names = PAGES["families"][family]
        if family in families:
            arguments = {k: v for k, v in zip(names, row, strict=False) if v is not None}
            rows.append((cls, arguments, row[len(names) :]))
    return rows


def has_partial_state(arguments: dict[str, Any]) -> bool:
    """Return whether the last state of a block would have fewer tokens than the others."""
    return bool(arguments["block_size"] % arguments.get("tokens_per_state", 1))


BACKENDS = tuple(name for name in PAGES["families"] if name.startswith("backend:"))
ATTENTION = ("full", "asym", "sw", "chunked", "mla", "swmla", "padded", *BACKENDS)


@pytest.mark.parametrize("family", ATTENTION)
def test_attention_page_sizes_equal_vllms(family: str) -> None:
    """Units, states, content and page bytes are equal. A padding below the page is rejected."""
    for cls, arguments, (slots, states, content, page) in page_rows(family):
        if arguments.get("head_size_v") == 0 or has_partial_state(arguments):
            continue
        spec = attention_of(cls, arguments)
        assert slots * content == sum(part.units * part.content_bytes for part in spec.parts)
        assert [states] * len(spec.parts) == [part.states for part in spec.parts]
        if "num_head_slots" not in arguments:
            assert [slots] * len(spec.parts) == [part.units for part in spec.parts]
        if page == "refused":
            error = refusal(spec.page_size_bytes)
            assert ("page_size_padded", arguments["page_size_padded"]) == (error.field, error.value)
            continue
        assert page == spec.page_size_bytes()


def test_cache_without_values_is_one_opaque_part() -> None:
    """`head_size_v=0` is rejected. A content with the bytes of one key has the same page."""
    rows = [row for row in page_rows("asym") if row[1]["head_size_v"] == 0]
    for cls, arguments, (_, states, content, page) in rows:
        error = refusal(lambda cls=cls, arguments=arguments: attention_of(cls, arguments))
        assert ("head_size_v", 0) == (error.field, error.value)
        del arguments["head_size_v"]
        spec = attention_of(cls, arguments | {"state_content_bytes": content})
        assert [("kv", states)] == [(part.name, part.states) for part in spec.parts]
        assert page == spec.page_size_bytes()
    assert len(rows) == 6


def test_spec_rejects_block_with_partial_state() -> None:
    """A block must have whole states. vLLM ignores the last tokens of such a block."""
    rows = [row for row in page_rows(*ATTENTION, "tps") if has_partial_state(row[1])]
    for cls, arguments, (_, states, _, _) in rows:
        assert arguments["block_size"] > states * arguments["tokens_per_state"]
        error = refusal(lambda cls=cls, arguments=arguments: attention_of(cls, arguments))
        assert ("block_size", arguments["block_size"]) == (error.field, error.value)
        assert "tokens_per_state" in str(error)
    assert len(rows) == 8


def test_state_page_sizes_equal_vllms() -> None:
    """A page is the sum of its parts, padded. A padding below that sum is rejected."""
    for _, arguments, (_, _, content, page) in page_rows("mamba"):
        spec = state_of(arguments)
        assert content == sum(p.units * p.states * p.content_bytes for p in spec.parts)
        if page == "refused":
            error = refusal(spec.page_size_bytes)
            assert ("page_size_padded", arguments["page_size_padded"]) == (error.field, error.value)
            assert "16" in str(error)
        else:
            assert page == spec.page_size_bytes()


def test_uniform_group_page_sizes_equal_vllms() -> None:
    """The page of a group is the sum of its layers' pages. Both reject the same two rows.

    vLLM also puts MLA and full attention into one group (2 rows), because one of its classes is
    derived from the other. In kvspec these are two groups, and the sum of their pages is equal.
    """
    outcomes = []
    for _, arguments, (*_, page) in page_rows("uniform"):
        layers = {
            name: attention_of(fields.pop("class"), fields)
            for name, fields in copy.deepcopy(arguments["specs"]).items()
        }
        try:
            group = kvspec.UniformTypeKVCacheSpecs(specs=layers)
        except kvspec.SpecError:
            outcomes.append("two groups" if page != "not unified" else "both reject")
            assert page in (sum(spec.page_size_bytes() for spec in layers.values()), "not unified")
        else:
            outcomes.append("equal")
            assert page == group.page_size_bytes()
    assert sorted(outcomes) == ["both reject"] * 2 + ["equal"] * 3 + ["two groups"] * 2


def test_every_page_size_row_is_counted() -> None:
    """616 rows: 566 equal, 10 rejected by both, 16 (6 + 8 + 2) by kvspec only, 24 not modelled."""
    counts = Counter(row[0] for row in PAGES["rows"])
    assert {*ATTENTION, *NOT_MODELLED, "tps", "mamba", "uniform"} == set(counts)
    expected = (616, 24)
    assert expected == (counts.total(), sum(counts[family] for family in NOT_MODELLED))
    refused = {"padded": 6, "mamba": 2}
    assert refused == Counter(row[0] for row in PAGES["rows"] if row[-1] == "refused")


def spec_of(name: str, block_size: int) -> kvspec.LayerSpec:
    """Return the spec *name* of the stride tables with blocks of *block_size* tokens."""
    fields = dict(STRIDES["specs"][name])
    cls = fields.pop("class")
    if cls == "MambaSpec":
        return state_of(fields)
    if "page_size_padded" in fields:
        fields["page_size_padded"] = fields["page_size_padded"][str(block_size)]
    return attention_of(cls, fields | {"block_size": block_size})


def letters(name: str, layout: str) -> str:
    """Return the letters of vLLM's *layout* for the spec *name*.

    Two slots are planes of K and V with all heads in one content. Two slots per head are planes
    that contain the heads.
    """
    slots = STRIDES["specs"][name].get("num_head_slots")
    if slots is None:
        return layout
    planes = layout.replace("H", "K" if slots == 2 else "KH")
    return planes[:-1] + "HC" if slots == 2 else planes


def regions_of(
    spec: kvspec.LayerSpec, layout: str, num_layers: int, num_blocks: int
) -> tuple[list[list[kvspec.Region]], int]:
    """Return the regions of every layer in order of its parts, and the bytes of the storage."""
    layers = tuple(f"layers.{i}" for i in range(num_layers))
    side = engine(spec, layers=layers, layout=layout)
    cache, storage = kvspec.allocate(side, kvspec.RankId(), num_blocks=num_blocks)
    regions = [[region for region in cache.regions if region.layer == layer] for layer in layers]
    return regions, storage["g"].nbytes


def check_layer(
    name: str, regions: list[kvspec.Region], shape: list[int], strides: list[int]
) -> None:
    """Compare one layer's regions with vLLM's *shape* [B, H, N, C] and *strides* [B, H, N].

    The head stride of a padded page with one head is not compared, because it is never used.
    """
    first, last = regions[0], regions[-1]
    blocks, slots, states, content = shape
    block, slot, state = strides
    separate = last.base - first.base
    fields = STRIDES["specs"][name]
    assert {(blocks, block)} == {(region.num_blocks, region.block_stride) for region in regions}
    if fields["class"] == "MambaSpec":
        sizes = [region.units * region.states * region.content_bytes for region in regions]
        assert (sum(sizes[:-1]), content) == (separate, sum(sizes))
        return
    assert {(states, state)} == {(region.states, region.state_stride) for region in regions}
    if fields.get("num_head_slots") == 2:
        assert (slot, content) == (separate, first.units * first.content_bytes)
        assert {first.content_bytes} == {region.unit_stride for region in regions}
        return
    if slots > 1 or "page_size_padded" not in fields:
        assert {slot} == {region.unit_stride for region in regions}
    if fields.get("num_head_slots") is not None:
        assert (slots, content) == (2 * first.units, first.content_bytes)
        assert separate == first.units * slot
        return
    assert (slots, content) == (first.units, sum(region.content_bytes for region in regions))
    assert separate == (first.content_bytes if len(regions) == 2 else 0)


@pytest.mark.parametrize("row", STRIDES["rows"], ids=lambda row: "-".join(map(str, row[:3])))
def test_strides_equal_vllms(row: list[Any]) -> None:
    """The strides of L, B, H and N and the whole size are equal in each of vLLM's six layouts.

    If vLLM divides a block into kernel blocks, the kernel blocks are the blocks in memory, so the
    test has more and smaller blocks. vLLM rejects kernel blocks of a padded page. Both reject a
    padding that is not at the end of a page.
    """
    name, block_size, kernel_size, shape, by_layers = row
    num_blocks = NUM_BLOCKS * block_size // (kernel_size or block_size)
    for num_layers, by_layout in zip(STRIDES["num_layers"], by_layers, strict=True):
        for layout, strides in zip(STRIDES["layouts"], by_layout, strict=True):
            if strides == "refused: padded page, kernel blocks":
                continue
            spec = spec_of(name, kernel_size or block_size)
            if strides == "refused: padding inside the page's tail":
                ours = letters(name, layout)
                error = refusal(
                    lambda spec=spec, ours=ours, num_layers=num_layers: regions_of(
                        spec, ours, num_layers, num_blocks
                    )
                )
                assert "page_size_padded" == error.field
                continue
            layers, size = regions_of(spec, letters(name, layout), num_layers, num_blocks)
            outer = strides[0] * num_layers if layout[0] == "L" else strides[1] * num_blocks
            assert outer == size
            for regions in layers:
                check_layer(name, regions, shape, strides[1:])
            assert {strides[0]} >= {
                after[0].base - layer[0].base for layer, after in pairwise(layers)
            }


@pytest.mark.parametrize("row", VIEWS["rows"], ids=lambda row: "-".join(map(str, row[:2])))
def test_views_equal_vllms(row: list[Any]) -> None:
    """The size of the flat buffer and each layer's byte offset and strides in it are equal."""
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


def test_every_stride_and_view_is_counted() -> None:
    """1,152 strides: 1,096 equal, 8 rejected by both, 48 not modelled. All 296 views are equal."""
    strides = [
        stride
        for *_, by_layers in STRIDES["rows"]
        for by_layout in by_layers
        for stride in by_layout
    ]
    refused = Counter(
        stride.removeprefix("refused: ") for stride in strides if isinstance(stride, str)
    )
    expected = {"padded page, kernel blocks": 48, "padding inside the page's tail": 8}
    assert (1152, expected) == (len(strides), refused)
    assert sum(view is not None for *_, views in VIEWS["rows"] for view in views) == 296
