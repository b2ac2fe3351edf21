"""Test that caches of vLLM's hybrid models move between unequal TP sizes.

The rows were recorded by running vLLM 0.32 on tiny models of nine hybrid and state-space families
and one family with windows. A row has the config of vLLM's planner, the tensors of its allocator,
and the states that each layer cuts from them. The tensor of a state layer is raw bytes,
``[blocks, 1, 1, bytes]``. Layers of different groups share memory. The test assumes plain pages of
the attention layers.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm_like as like
from builders import request as request_of
from moved import moved

import kvspec
from kvspec.adapters import vllm

ROWS: list[dict[str, Any]] = json.loads(
    gzip.decompress((Path(__file__).parent / "vllm_hybrids.json.gz").read_bytes())
)["rows"]
ITEMSIZE = {"int8": 1, "bfloat16": 2, "float32": 4}


def name_of(row: dict[str, Any]) -> str:
    """Return a unique name of a row."""
    more = [row["layout"], *(["prefix"] if row["prefix"] else []), f"rank{row['rank']}"]
    return f"{row['model']}-tp{row['tp']}-{row['conv']}-{'-'.join(more)}"


def config_of(row: dict[str, Any]) -> like.KVCacheConfig:
    """Return the recorded config."""
    tensors = [
        like.KVCacheTensor(size, layers, offset, layer_stride, block_stride)
        for size, layers, offset, layer_stride, block_stride in row["tensors"]
    ]
    groups = [like.KVCacheGroupSpec(layers, spec_of(spec)) for layers, spec in row["groups"]]
    return like.KVCacheConfig(row["num_blocks"], tensors, groups)


def spec_of(recorded: dict[str, Any]) -> Any:
    """Return a recorded spec."""
    fields = dict(recorded)
    cls = getattr(like, fields.pop("cls"))
    if "shapes" in fields:
        fields["shapes"] = tuple(map(tuple, fields["shapes"]))
        fields["dtypes"] = tuple(fields["dtypes"])
    return cls(**fields)


def engine_of(row: dict[str, Any]) -> kvspec.EngineSpec:
    """Return the engine from the adapter. Only a short convolution needs *conv_layout*."""
    return like.engine_spec(
        config_of(row),
        parallel=kvspec.ParallelConfig(tp_size=row["tp"]),
        total_num_kv_heads=row["kv_heads"],
        layout=row["layout"],
        tp_rank=row["rank"],
        n_groups=row["n_groups"],
        conv_layout=row["conv"] if row["model"] == "lfm2" else None,
    )


def caches_of(row: dict[str, Any], engine: kvspec.EngineSpec) -> Any:
    """Return the cache of every rank with the registered tensors, and its memory."""
    caches, memory = {}, {}
    for rank in engine.parallel.ranks:
        flat = memory[rank] = np.zeros(row["tensors"][0][0], np.uint8)
        tensors = {
            layer: np.ndarray(
                shape,
                {1: np.int8, 2: np.uint16}[ITEMSIZE[dtype]],
                flat,
                offset,
                [stride * ITEMSIZE[dtype] for stride in strides],
            )
            for layer, (offset, shape, strides, dtype) in row["registered"].items()
        }
        caches[rank] = vllm.rank_cache(engine, rank, tensors, config=config_of(row))
    return caches, memory


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_states_are_at_addresses_of_vllms_views(row: dict[str, Any]) -> None:
    """The first part of each state has the base and the strides of the layer's own view."""
    engine = engine_of(row)
    caches, memory = caches_of(row, engine)
    rank = kvspec.RankId(tp=row["rank"])
    cache, start = caches[rank], memory[rank].ctypes.data
    for layer, views in row["bound"].items():
        page = row["registered"][layer][0] + start
        parts = engine.homes[layer].spec.parts
        firsts = [next(p for p in parts if p.tensor == t) for t in dict.fromkeys(
            part.tensor for part in parts)]  # fmt: skip
        assert len(views) == len(firsts)
        for part, (offset, shape, strides, dtype) in zip(firsts, views, strict=True):
            region, size = cache.region(layer, part.name), ITEMSIZE[dtype]
            assert page + offset == region.base
            assert strides[0] * size == region.block_stride
            assert shape[0] == region.num_blocks
            if part.tensor == "ssm":
                assert strides[1] * size == region.unit_stride == region.content_bytes
                continue
            unit, state = (1, 2) if row["conv"] == "DS" else (2, 1)
            assert strides[unit] * size == region.unit_stride
            assert strides[state] * size == region.state_stride
            assert size == region.content_bytes


def tables(engine: kvspec.EngineSpec, num_tokens: int, reverse: bool) -> dict[str, list[int]]:
    """Return tables without common ids, because the groups share memory."""
    blocks, free = {}, list(range(1, 40))
    if reverse:
        free.reverse()
    for group in engine.groups:
        is_state = not group.own_parts[0].per_token
        count = 1 if is_state else -(-num_tokens // group.spec.block_size)
        blocks[group.name], free = free[:count], free[count:]
    return blocks


def other_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the same model with another TP size, preferably a larger one."""
    others = [
        other for other in ROWS if other["model"] == row["model"] and other["tp"] != row["tp"]
    ]
    return max(others, key=lambda other: (other["tp"] > row["tp"], other["conv"], -other["tp"]))


PAIRS = [(row, other_of(row)) for row in ROWS]


@pytest.mark.parametrize(
    ("row", "other"), PAIRS, ids=[f"{name_of(row)}-to-{name_of(other)}" for row, other in PAIRS]
)
def test_hybrid_moves_between_unequal_tp(row: dict[str, Any], other: dict[str, Any]) -> None:
    """Every byte arrives, also if the orders of the conv states differ."""
    producer, consumer = engine_of(row), engine_of(other)
    sides = [caches_of(row, producer), caches_of(other, consumer)]
    request = request_of(
        300, tables(producer, 300, reverse=False), tables(consumer, 300, reverse=True)
    )
    assert [] == moved(producer, consumer, request, (sides[0][0], sides[1][0]))


def test_every_kind_of_state_is_recorded() -> None:
    """64 configurations of ten families move, and 56 of them have states."""
    assert 64 == len(PAIRS) == len(ROWS)
    assert 56 == sum(bool(row["bound"]) for row in ROWS)
    assert {1: 35, 2: 21, 4: 8} == Counter(row["tp"] for row in ROWS)
    kinds = {spec.get("mamba_type", spec["cls"]) for row in ROWS for _, spec in row["groups"]}
    states = {"MAMBA1", "MAMBA2", "GDN_ATTN", "SHORT_CONV"}
    assert states | {"FullAttentionSpec", "SlidingWindowSpec"} == kinds
