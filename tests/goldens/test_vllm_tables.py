"""Test that block tables, slots and pipeline stages equal those of vLLM.

The rows were recorded by running vLLM 0.32: the layers of its pipeline stages, the slots of its
slot-mapping kernel under context parallelism, and the tables of its KVCacheManager. These tables
are those of a producer at the end of a request and of a consumer. Block 0 is the null block.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm_like as like
from builders import request as request_of
from moved import allocated, moved
from refused import refusal
from vllm_like import config, state

import kvspec
from kvspec.adapters import vllm

RECORDED: dict[str, Any] = json.loads(
    gzip.decompress((Path(__file__).parent / "vllm_tables.json.gz").read_bytes())
)
HEADS = {"num_kv_heads": 2, "head_size": 4, "dtype": "bfloat16"}
LATENT = {"head_size": 8, "dtype": "bfloat16"}


def test_layers_of_stages_equal_vllms() -> None:
    """Models of various depths are divided into up to 8 stages."""
    assert 396 == len(RECORDED["stages"])
    for layers, size, counts in RECORDED["stages"]:
        stages = vllm.stages(layers, size)
        assert counts == [len(numbers) for numbers in stages]
        assert list(range(layers)) == [number for numbers in stages for number in numbers]


@pytest.mark.parametrize(
    "row",
    RECORDED["slots"],
    ids=lambda row: f"{row['dcp']}-{row['interleave']}-{row['block_size']}",
)
def test_slots_of_tokens_equal_vllms(row: dict[str, Any]) -> None:
    """The tokens of the model are sharded over ranks. Every rank has all tokens of the draft."""
    block = row["block_size"]
    groups = [
        (["layers.0"], like.MLAAttentionSpec(block_size=block, **LATENT)),
        (["draft.0"], like.FullAttentionSpec(block_size=block, **HEADS, dcp_sharded=False)),
    ]
    engine = like.engine_spec(
        config(*groups),
        parallel=kvspec.ParallelConfig(
            tp_size=row["dcp"], dcp_size=row["dcp"], interleave_size=row["interleave"]
        ),
        total_num_kv_heads=2 * row["dcp"],
    )
    for rank, by_group in row["slots"].items():
        for group, ids, slots in zip(engine.groups, row["tables"], by_group, strict=True):
            context = engine.context(group, kvspec.RankId(tp=int(rank)))
            positions = np.arange(len(slots))
            local = context.local(positions)
            first_slots = np.asarray(ids)[np.minimum(local // block, len(ids) - 1)] * block
            expected = np.where(context.owns(positions), first_slots + local % block, -1)
            assert expected.tolist() == slots


KINDS = {
    "window": ("SlidingWindowSpec", ("sliding_window", "extra_retained_tokens")),
    "window MLA": ("SlidingWindowMLASpec", ("sliding_window",)),
    "chunked local": ("ChunkedLocalAttentionSpec", ("attention_chunk_size",)),
    "full": ("FullAttentionSpec", ()),
    "mla": ("MLAAttentionSpec", ()),
    "mamba none": ("MambaSpec", ()),
    "mamba align": ("MambaSpec", ()),
}
CASES = [case for case in RECORDED["tables"] if case["name"] in KINDS and case["num_tokens"] > 1]

CASE_NAMES = [f"{number}-{case['name']}" for number, case in enumerate(CASES)]


def spec_of(case: dict[str, Any]) -> Any:
    """Return the spec of a recorded table."""
    cls, fields = KINDS[case["name"]]
    if cls == "MambaSpec":
        more = {"mamba_cache_mode": case["mamba_cache_mode"]}
        spec = state("mamba1", ((8, 3), (8, 4)), **more)
        return replace(spec, block_size=case["block_size"])
    sizes = LATENT if "MLA" in cls else HEADS
    more = {name: case[name] for name in fields if name in case}
    return getattr(like, cls)(block_size=case["block_size"], **sizes, **more)


def lost_of(case: dict[str, Any], engine: kvspec.EngineSpec) -> list[int]:
    """Return the tokens that the last token reads and the producer has dropped.

    A state never loses a token.
    """
    if case["name"].startswith("mamba"):
        return []
    live = engine.groups[0].spec.live_tokens(case["num_tokens"] - 1)
    ids = case["producer_at_finish"]
    return [token for token in live if not ids[token // case["block_size"]]]


@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_tokens_of_vllms_tables_move_unless_dropped(case: dict[str, Any]) -> None:
    """All tokens but the last move into the consumer's table.

    The producer may have dropped a token that the last one still reads, because its window has
    moved on by a block. Then the request is rejected with the tokens. A producer of states stops
    before the last token, so its table equals the consumer's.
    """
    both, count = config((["layers.0"], spec_of(case))), case["num_tokens"] - 1
    engine = like.engine_spec(both)
    tables = case["producer_at_finish"], case["consumer_async_all_but_one"]
    if case["name"].startswith("mamba"):
        tables = tables[1], tables[1]
    producer, consumer = (vllm.block_tables(engine, both, [table], count) for table in tables)
    request = request_of(count, producer, consumer)
    storage: list[Any] = []
    caches = allocated(engine, producer, storage), allocated(engine, consumer, storage)
    lost = lost_of(case, engine)
    if not lost:
        assert [] == moved(engine, engine, request, caches)
        return
    error = refusal(lambda: moved(engine, engine, request, caches), kvspec.MismatchError)
    (mismatch,) = error.mismatches
    assert mismatch.field.startswith("producer_blocks[")
    assert str(lost[0]) in mismatch.why


@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_loses_a_token_predicts_dropped_tokens(case: dict[str, Any]) -> None:
    """The result is that of a whole prompt. A state always includes the last token."""
    engine = like.engine_spec(config((["layers.0"], spec_of(case))))
    lost = case["name"].startswith("mamba") or bool(lost_of(case, engine))
    if not case["decoded"]:
        assert lost == vllm.loses_a_token(engine, case["num_tokens"])


def test_every_kind_of_table_is_recorded() -> None:
    """The tables are of states in both modes, windows and chunks. Some have dropped live tokens."""
    kinds = Counter(case["name"] for case in CASES)
    assert KINDS.keys() == kinds.keys()
    assert min(kinds.values()) >= 8
    lossy = Counter(
        case["name"]
        for case in CASES
        if lost_of(case, like.engine_spec(config((["layers.0"], spec_of(case)))))
    )
    assert {"window", "window MLA", "chunked local"} == lossy.keys()
    assert kinds["window"] > 2 * lossy["window"]
