"""State-space caches agree with vLLM's own split of them, and where they differ vLLM is wrong.

vLLM keeps the conv state dim-first ("DS") and cuts it into projections by byte offsets; kvspec has
a part for each. A Mamba2 model with fewer groups than TP ranks keeps whole copies of B and C on
every rank, but vLLM scales their offsets with the TP ratio as if they were sharded: those rows are
counted and our answer is proven channel by channel instead.
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


def channels(spec: kvspec.MambaSpec, part: str, tp_size: int, rank: int) -> list[int]:
    """Return the global units of *part* that a rank holds, sharded pack by pack."""
    found = next(each for each in spec.parts if each.name == part)
    packs = found.units // found.granularity
    copies = max(1, tp_size // packs)
    sharded: list[list[int]] = [[] for _ in range(tp_size // copies)]
    for pack in range(packs):
        sharded[pack // (packs // len(sharded))].append(pack)
    held = sharded[rank // copies]
    return [pack * found.granularity + unit for pack in held for unit in range(found.granularity)]


def remote_bytes(
    spec: kvspec.MambaSpec, tp_size: int, remote_tp: int, rank: int
) -> dict[str, list[tuple[int, int]]]:
    """Return, by conv part, (byte offset in the remote conv state, bytes) of each source rank."""
    found: dict[str, list[tuple[int, int]]] = {}
    for each in spec.get_tp_transfer_slices(rank, tp_size, remote_tp):
        regions = regions_of(spec, remote_tp, each.remote_rank)
        first = conv(regions)[0].base
        for part in each.parts:
            region = regions[part]
            offset = region.base - first + each.remote_range.start * region.unit_stride
            found.setdefault(part, []).append((offset, len(each.remote_range) * region.unit_stride))
    return {part: runs for part, runs in found.items() if part.startswith("conv")}


@pytest.mark.parametrize("row", LOADED, ids=IDS)
def test_every_rank_s_state_is_vllm_s(row: list[Any]) -> None:
    """Widths, sizes, page and dim-first offsets of every projection are vLLM's on every rank."""
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


def fate(row: list[Any], remote_tp: int) -> str:
    """Return what there is to compare for one (local TP, remote TP) of a model."""
    model, dtypes, tp_size = row[:3]
    if any(each[:3] == [model, dtypes, remote_tp] and len(each) == 4 for each in ROWS):
        return "no such remote"
    groups = TABLE["models"][model].get("n_groups", math.inf)
    if tp_size != remote_tp and groups < max(tp_size, remote_tp):
        return "wrong"
    return "right"


@pytest.mark.parametrize("row", LOADED, ids=IDS)
def test_remote_offsets_are_vllm_s_where_it_is_right(row: list[Any]) -> None:
    """The remote bytes of every projection are vLLM's; where vLLM is wrong they differ, always."""
    model, dtypes, tp_size, *_, remotes = row
    spec = spec_of(model, *dtypes)
    for remote_tp, position, recorded in remotes:
        verdict = fate(row, remote_tp)
        if verdict == "no such remote":
            continue
        ratio = max(1, tp_size // remote_tp)
        sources = max(1, remote_tp // tp_size)
        theirs = [[tuple(each)] * sources for each in recorded]
        for rank in range(position, tp_size, ratio):
            ours = list(remote_bytes(spec, tp_size, remote_tp, rank).values())
            assert (verdict == "right") == (theirs == ours)


@pytest.mark.parametrize("row", LOADED, ids=IDS)
def test_every_channel_is_read_from_a_rank_that_holds_it(row: list[Any]) -> None:
    """Where vLLM is wrong too: each local channel once, at the place of the same global channel."""
    model, dtypes, tp_size, *_, remotes = row
    spec = spec_of(model, *dtypes)
    for remote_tp in {each[0] for each in remotes if fate(row, each[0]) != "no such remote"}:
        for rank in range(tp_size):
            read: dict[str, list[tuple[int, int]]] = {part.name: [] for part in spec.parts}
            for each in spec.get_tp_transfer_slices(rank, tp_size, remote_tp):
                for part in each.parts:
                    there = channels(spec, part, remote_tp, each.remote_rank)
                    read[part] += zip(
                        each.local_range, there[each.remote_range.start :], strict=False
                    )
            for part, pairs in read.items():
                assert list(enumerate(channels(spec, part, tp_size, rank))) == sorted(pairs)


def test_one_group_on_two_ranks_by_hand() -> None:
    """Bamba, TP 1 to TP 2: rank 1 reads its half of x, and all of B and all of C.

    The producer's conv state is x (8192 channels), B, C (128 each), 3 rows of bfloat16. vLLM reads
    C's bytes (at 49920) as B, and the SSM state (at 51456, past the conv state's 50688) as C.
    """
    spec = spec_of("bamba-9b", "bfloat16", "bfloat16")
    theirs = next(
        offsets
        for row in LOADED
        if row[:3] == ["bamba-9b", ["bfloat16", "bfloat16"], 2]
        for remote_tp, position, offsets in row[8]
        if (remote_tp, position) == (1, 1)
    )
    wrong = [[24576, 24576], [49920, 768], [51456, 768]]
    assert wrong == theirs
    right = {"conv_x": [(24576, 24576)], "conv_b": [(49152, 768)], "conv_c": [(49920, 768)]}
    assert right == remote_bytes(spec, 2, 1, 1)


@pytest.mark.parametrize("row", [row for row in ROWS if len(row) == 4], ids=str)
def test_what_vllm_refuses_is_sharded_unevenly(row: list[Any]) -> None:
    """At TP 3 and 6 vLLM refuses to shard; here whole heads are sharded and none is lost."""
    model, dtypes, tp_size, reason = row
    spec = spec_of(model, *dtypes)
    assert "is not divisible by" in reason
    for part in spec.parts:
        held = {
            unit
            for rank in range(tp_size)
            for each in spec.get_tp_transfer_slices(rank, tp_size, 1)
            if part.name in each.parts
            for unit in each.global_range
        }
        assert set(range(part.units)) == held


def test_every_row_of_vllm_has_its_fate() -> None:
    """56 splits: 40 equal, 16 refused by vLLM. 560 remotes: 344 equal, 192 where vLLM is wrong.

    The other 24 are remote TP sizes at which vLLM itself cannot load the model.
    """
    fates = Counter(fate(row, each[0]) for row in LOADED for each in row[8])
    expected = {"right": 344, "wrong": 192, "no such remote": 24}
    assert expected == fates
    assert len(ROWS) == 56
    assert len(LOADED) == 40
