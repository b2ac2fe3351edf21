"""What vLLM's own allocator makes of hybrid models is read, and moves between unequal TP sizes.

Recorded by running vLLM 0.32 on tiny models of nine hybrid and state-space families and one of
windows: its planner's config, its allocator's tensors, and the states that each layer cut of them.
A state layer's tensor is raw bytes, ``[blocks, 1, 1, bytes]``; layers of different groups lie over
one another. The attention layers' pages are taken to be plain here.
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
    """Return what distinguishes a row."""
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
    given = dict(recorded)
    cls = getattr(like, given.pop("cls"))
    if "shapes" in given:
        given["shapes"] = tuple(map(tuple, given["shapes"]))
        given["dtypes"] = tuple(given["dtypes"])
    return cls(**given)


def engine_of(row: dict[str, Any]) -> kvspec.EngineSpec:
    """Return the engine that the adapter reads; only a short convolution's order is said."""
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
    """Return every rank's cache over tensors as registered, and the memory behind each."""
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
def test_states_lie_where_vllm_s_layers_cut_them(row: dict[str, Any]) -> None:
    """The first part of each state begins where the layer's own view of it does, row by row."""
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
    """Return tables whose ids are of one group each, since groups lie over one another."""
    found, free = {}, list(range(1, 40))
    if reverse:
        free.reverse()
    for group in engine.groups:
        state = not group.own_parts[0].per_token
        count = 1 if state else -(-num_tokens // group.spec.block_size)
        found[group.name], free = free[:count], free[count:]
    return found


def other_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the same model with another TP size, a larger one if there is one."""
    others = [each for each in ROWS if each["model"] == row["model"] and each["tp"] != row["tp"]]
    return max(others, key=lambda each: (each["tp"] > row["tp"], each["conv"], -each["tp"]))


PAIRS = [(row, other_of(row)) for row in ROWS]


@pytest.mark.parametrize(
    ("row", "other"), PAIRS, ids=[f"{name_of(p)}-to-{name_of(c)}" for p, c in PAIRS]
)
def test_every_hybrid_moves_between_unequal_tp(row: dict[str, Any], other: dict[str, Any]) -> None:
    """Every byte arrives, whichever order the conv states lie in on either side."""
    producer, consumer = engine_of(row), engine_of(other)
    sides = [caches_of(row, producer), caches_of(other, consumer)]
    request = request_of(
        300, tables(producer, 300, reverse=False), tables(consumer, 300, reverse=True)
    )
    assert [] == moved(producer, consumer, request, (sides[0][0], sides[1][0]))


def test_every_kind_is_recorded() -> None:
    """64 configurations of ten families, 56 of them with states, each moved to another TP size."""
    assert 64 == len(PAIRS) == len(ROWS)
    assert 56 == sum(bool(row["bound"]) for row in ROWS)
    assert {1: 35, 2: 21, 4: 8} == Counter(row["tp"] for row in ROWS)
    kinds = {spec.get("mamba_type", spec["cls"]) for row in ROWS for _, spec in row["groups"]}
    states = {"MAMBA1", "MAMBA2", "GDN_ATTN", "SHORT_CONV"}
    assert states | {"FullAttentionSpec", "SlidingWindowSpec"} == kinds
