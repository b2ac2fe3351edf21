"""Test that state-space caches are split as vLLM splits them, except where vLLM is wrong.

vLLM keeps the conv state dim-first ("DS") and cuts it into projections by byte offsets. kvspec has
one part for each projection. A Mamba2 model with fewer groups than TP ranks has whole copies of B
and C on every rank. vLLM scales their offsets with the TP ratio, as if they were sharded. These
rows are counted, and kvspec's result is checked channel by channel instead.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from builders import engine

import kvspec

TABLE: dict[str, Any] = json.loads((Path(__file__).parent / "vllm_conv_split.json").read_text())
ROWS: list[list[Any]] = TABLE["rows"]
LOADED = [row for row in ROWS if len(row) > 4]
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
IDS = [f"{row[0]}-{row[1][1]}-tp{row[2]}" for row in LOADED]


@cache
def spec_of(model: str, conv_dtype: str, ssm_dtype: str) -> kvspec.MambaSpec:
    """Return the spec of one of the table's models."""
    shape = dict(TABLE["models"][model])
    make = getattr(kvspec.MambaSpec, shape.pop("kind"))
    spec = make(**shape, dtype=conv_dtype, ssm_dtype=ssm_dtype)
    assert isinstance(spec, kvspec.MambaSpec)
    return spec


@cache
def regions_of(spec: kvspec.MambaSpec, tp_size: int, rank: int) -> dict[str, kvspec.Region]:
    """Return a rank's regions of one layer by part, the conv state dim-first."""
    ranked, _ = kvspec.allocate(engine(spec, tp=tp_size), kvspec.RankId(tp=rank), num_blocks=1)
    return {region.part: region for region in ranked.regions}


def conv(regions: dict[str, kvspec.Region]) -> list[kvspec.Region]:
    """Return the regions of the conv projections in order."""
    return [region for part, region in regions.items() if part.startswith("conv")]


def region_bytes(region: kvspec.Region) -> int:
    """Return the bytes that one block of *region* holds."""
    return region.units * region.states * region.content_bytes


def channels(spec: kvspec.MambaSpec, part_name: str, tp_size: int, rank: int) -> list[int]:
    """Return the global units of a part that a rank holds.

    They are sharded in packs of `granularity` units.
    """
    part = next(part for part in spec.parts if part.name == part_name)
    num_packs = part.units // part.granularity
    copies = max(1, tp_size // num_packs)
    sharded: list[list[int]] = [[] for _ in range(tp_size // copies)]
    for pack in range(num_packs):
        sharded[pack // (num_packs // len(sharded))].append(pack)
    packs = sharded[rank // copies]
    return [pack * part.granularity + unit for pack in packs for unit in range(part.granularity)]


def remote_bytes(
    spec: kvspec.MambaSpec, tp_size: int, remote_tp: int, rank: int
) -> dict[str, list[tuple[int, int]]]:
    """Return, by conv part, (byte offset in the remote conv state, bytes) of each source rank."""
    runs_by_part: dict[str, list[tuple[int, int]]] = {}
    for slice_ in spec.get_tp_transfer_slices(rank, tp_size, remote_tp):
        regions = regions_of(spec, remote_tp, slice_.remote_rank)
        first = conv(regions)[0].base
        for part in slice_.parts:
            region = regions[part]
            offset = region.base - first + slice_.remote_range.start * region.unit_stride
            length = len(slice_.remote_range) * region.unit_stride
            runs_by_part.setdefault(part, []).append((offset, length))
    return {part: runs for part, runs in runs_by_part.items() if part.startswith("conv")}


@pytest.mark.parametrize("row", LOADED, ids=IDS)
def test_state_of_every_rank_equals_vllms(row: list[Any]) -> None:
    """The widths, sizes, page and dim-first offsets of every projection are equal."""
    model, dtypes, tp_size, page, shapes, widths, sizes, local, _ = row
    spec = spec_of(model, *dtypes)
    for rank in range(tp_size):
        regions = regions_of(spec, tp_size, rank)
        parts = conv(regions)
        base = parts[0].base
        assert page == spec.page_size_bytes(rank, tp_size)
        assert widths == [region.units for region in parts]
        assert shapes[0] == [sum(region.units for region in parts), parts[0].states]
        assert math.prod(shapes[1]) * DTYPE_BYTES[dtypes[1]] == region_bytes(regions["ssm"])
        assert sizes == [sum(map(region_bytes, parts)), region_bytes(regions["ssm"])]
        assert local == [[region.base - base, region_bytes(region)] for region in parts]
        assert sizes[0] == regions["ssm"].base - base
        assert all(region.unit_stride == region.states * 2 for region in parts)


def comparison_of(row: list[Any], remote_tp: int) -> str:
    """Return whether vLLM is right or wrong for one (local TP, remote TP) of a model.

    "no such remote" if vLLM cannot load the model with *remote_tp*.
    """
    model, dtypes, tp_size = row[:3]
    if any(other[:3] == [model, dtypes, remote_tp] and len(other) == 4 for other in ROWS):
        return "no such remote"
    groups = TABLE["models"][model].get("n_groups", math.inf)
    if tp_size != remote_tp and groups < max(tp_size, remote_tp):
        return "wrong"
    return "right"


@pytest.mark.parametrize("row", LOADED, ids=IDS)
def test_remote_offsets_equal_vllms_exactly_if_vllm_is_right(row: list[Any]) -> None:
    """The remote bytes of every projection are compared. If vLLM is wrong, they differ."""
    model, dtypes, tp_size, *_, remotes = row
    spec = spec_of(model, *dtypes)
    for remote_tp, position, recorded in remotes:
        comparison = comparison_of(row, remote_tp)
        if comparison == "no such remote":
            continue
        ratio = max(1, tp_size // remote_tp)
        sources = max(1, remote_tp // tp_size)
        theirs = [[tuple(run)] * sources for run in recorded]
        for rank in range(position, tp_size, ratio):
            ours = list(remote_bytes(spec, tp_size, remote_tp, rank).values())
            assert (comparison == "right") == (theirs == ours)


@pytest.mark.parametrize("row", LOADED, ids=IDS)
def test_every_channel_is_read_once_from_its_place(row: list[Any]) -> None:
    """The remote place holds the same global channel, also for rows where vLLM is wrong."""
    model, dtypes, tp_size, *_, remotes = row
    spec = spec_of(model, *dtypes)
    remote_sizes = {remote[0] for remote in remotes}
    for remote_tp in remote_sizes:
        if comparison_of(row, remote_tp) == "no such remote":
            continue
        for rank in range(tp_size):
            read: dict[str, list[tuple[int, int]]] = {part.name: [] for part in spec.parts}
            for slice_ in spec.get_tp_transfer_slices(rank, tp_size, remote_tp):
                for part in slice_.parts:
                    remote_channels = channels(spec, part, remote_tp, slice_.remote_rank)
                    read[part] += zip(
                        slice_.local_range,
                        remote_channels[slice_.remote_range.start :],
                        strict=False,
                    )
            for part, pairs in read.items():
                assert list(enumerate(channels(spec, part, tp_size, rank))) == sorted(pairs)


def test_remote_bytes_of_one_group_on_two_ranks() -> None:
    """Bamba moves from TP 1 to TP 2: rank 1 reads its half of x, and all of B and C.

    The producer's conv state has x (8192 channels), B and C (128 each) in 3 rows of bfloat16. vLLM
    reads C's bytes (at 49920) as B. It reads the SSM state (at 51456) as C, because the conv state
    ends at 50688.
    """
    spec = spec_of("bamba-9b", "bfloat16", "bfloat16")
    of_vllm = next(
        offsets
        for row in LOADED
        if row[:3] == ["bamba-9b", ["bfloat16", "bfloat16"], 2]
        for remote_tp, position, offsets in row[8]
        if (remote_tp, position) == (1, 1)
    )
    wrong = [[24576, 24576], [49920, 768], [51456, 768]]
    assert wrong == of_vllm
    right = {"conv_x": [(24576, 24576)], "conv_b": [(49152, 768)], "conv_c": [(49920, 768)]}
    assert right == remote_bytes(spec, 2, 1, 1)


@pytest.mark.parametrize("row", [row for row in ROWS if len(row) == 4], ids=str)
def test_uneven_sizes_that_vllm_rejects_keep_all_units(row: list[Any]) -> None:
    """VLLM rejects TP 3 and 6. kvspec shards whole heads, and every unit has an owner."""
    model, dtypes, tp_size, reason = row
    spec = spec_of(model, *dtypes)
    assert "divisible" in reason  # of vLLM's recorded error
    for part in spec.parts:
        owned = {
            unit
            for rank in range(tp_size)
            for slice_ in spec.get_tp_transfer_slices(rank, tp_size, 1)
            if part.name in slice_.parts
            for unit in slice_.global_range
        }
        assert set(range(part.units)) == owned


def test_every_row_of_vllm_is_counted() -> None:
    """VLLM accepts 40 of 56 splits. In 344 of 560 remotes it is right, and in 192 wrong.

    The other 24 remotes have TP sizes with which vLLM cannot load the model.
    """
    comparisons = Counter(comparison_of(row, remote[0]) for row in LOADED for remote in row[8])
    expected = {"right": 344, "wrong": 192, "no such remote": 24}
    assert expected == comparisons
    assert len(ROWS) == 56
    assert len(LOADED) == 40
