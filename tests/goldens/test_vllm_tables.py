"""Block tables, slots and stages are where vLLM itself has them.

Recorded by running vLLM 0.32: the layers of its pipeline stages, the slots that its slot-mapping
kernel gives every position under context parallelism, and the tables that its KVCacheManager keeps
of a producer at a request's end and of a consumer, 0 being the null block.
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
from vllm_like import config, state

import kvspec
from kvspec.adapters import vllm

RECORDED: dict[str, Any] = json.loads(
    gzip.decompress((Path(__file__).parent / "vllm_tables.json.gz").read_bytes())
)
HEADS = {"num_kv_heads": 2, "head_size": 4, "dtype": "bfloat16"}
LATENT = {"head_size": 8, "dtype": "bfloat16"}


def test_stages_have_vllm_s_layers() -> None:
    """Up to 40 layers and beyond, on up to 8 stages."""
    assert 396 == len(RECORDED["stages"])
    for layers, size, counts in RECORDED["stages"]:
        found = vllm.stages(layers, size)
        assert counts == [len(numbers) for numbers in found]
        assert list(range(layers)) == [number for numbers in found for number in numbers]


@pytest.mark.parametrize(
    "row",
    RECORDED["slots"],
    ids=lambda row: f"{row['dcp']}-{row['interleave']}-{row['block_size']}",
)
def test_every_token_has_vllm_s_slot(row: dict[str, Any]) -> None:
    """Of a sharded target and of a draft that runs whole: which rank has it, and in which slot."""
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
            found = np.asarray(ids)[np.minimum(local // block, len(ids) - 1)] * block
            wanted = np.where(context.owns(positions), found + local % block, -1)
            assert wanted.tolist() == slots


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
    """Return the tokens that the last one reads and the producer has dropped; a state has none."""
    if case["name"].startswith("mamba"):
        return []
    live = engine.groups[0].spec.live_tokens(case["num_tokens"] - 1)
    ids = case["producer_at_finish"]
    return [token for token in live if not ids[token // case["block_size"]]]


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{c['name']}" for n, c in enumerate(CASES)])
def test_what_vllm_s_tables_hold_arrives(case: dict[str, Any]) -> None:
    """All tokens but the last move into the table of a consumer that loads so many.

    Where the producer has dropped a token that the last one still reads (its window began a block
    ago), nothing is moved, and the tokens are named. A producer of states stops before the last
    token, so that its table is the consumer's.
    """
    both, count = config((["layers.0"], spec_of(case))), case["num_tokens"] - 1
    engine = like.engine_spec(both)
    ids = case["producer_at_finish"], case["consumer_async_all_but_one"]
    if case["name"].startswith("mamba"):
        ids = ids[1], ids[1]
    producer, consumer = (vllm.block_tables(engine, both, [each], count) for each in ids)
    request = request_of(count, producer, consumer)
    kept: list[Any] = []
    caches = allocated(engine, producer, kept), allocated(engine, consumer, kept)
    lost = lost_of(case, engine)
    if not lost:
        assert [] == moved(engine, engine, request, caches)
        return
    with pytest.raises(kvspec.MismatchError, match=f"the null block for tokens {lost[0]}"):
        moved(engine, engine, request, caches)


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{c['name']}" for n, c in enumerate(CASES)])
def test_what_vllm_has_dropped_is_known_before(case: dict[str, Any]) -> None:
    """Of a whole prompt; a state has always seen the last token."""
    engine = like.engine_spec(config((["layers.0"], spec_of(case))))
    lost = case["name"].startswith("mamba") or bool(lost_of(case, engine))
    if not case["decoded"]:
        assert lost == vllm.loses_a_token(engine, case["num_tokens"])


def test_every_kind_of_table_is_recorded() -> None:
    """States in both modes; windows and chunks, some of which have dropped what is still read."""
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
