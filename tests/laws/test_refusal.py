"""Law 11: what cannot be moved is refused early and by name, never moved in part.

What engines disagree about at plan time, memory in `build_table`, block tables in `select`.
"""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest
from builders import engine
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec.testing import strategies

Engines = tuple[kvspec.EngineSpec, kvspec.EngineSpec]

BASE = {"block_size": 2, "total_num_kv_heads": 4, "head_size": 2, "dtype": "bfloat16"}
STATE = {
    "num_heads": 4, "head_dim": 2, "n_groups": 2, "state_size": 2, "conv_kernel": 3,
    "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "fields", "field", "value"),
    [
        (kvspec.FullAttentionSpec, BASE, "total_num_kv_heads", 8),
        (kvspec.FullAttentionSpec, BASE, "head_size", 4),
        (kvspec.FullAttentionSpec, BASE, "head_size_v", 4),
        (kvspec.FullAttentionSpec, BASE, "dtype", "float16"),
        (kvspec.FullAttentionSpec, BASE, "tokens_per_state", 2),
        (kvspec.FullAttentionSpec, BASE, "state_content_bytes", 8),
        (kvspec.SlidingWindowSpec, BASE | {"sliding_window": 4}, "sliding_window", 8),
        (kvspec.ChunkedLocalAttentionSpec, BASE | {"attention_chunk_size": 4},
         "attention_chunk_size", 8),
    ],
)  # fmt: skip
def test_a_changed_field_is_a_mismatch(
    make: Any, fields: dict[str, Any], field: str, value: Any
) -> None:
    """Two valid engines that disagree about the model are refused: field, both values, reason."""
    one, two = make(**fields), make(**fields | {field: value})
    (found,) = refusal(one, two)
    assert field in found.field
    assert {getattr(one, field), getattr(two, field)} == {found.producer, found.consumer}
    assert found.why


@pytest.mark.parametrize(
    "field", ["num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"]
)
def test_a_changed_state_is_a_mismatch(field: str) -> None:
    """States that differ in any size are refused, with the parts that do not fit."""
    one = kvspec.MambaSpec.mamba2(**STATE)  # type: ignore[arg-type]
    two = kvspec.MambaSpec.mamba2(**STATE | {field: STATE[field] * 2})  # type: ignore[arg-type, operator]
    for found in refusal(one, two):
        assert found.producer != found.consumer
        assert found.why


def refusal(one: kvspec.LayerSpec, two: kvspec.LayerSpec) -> tuple[kvspec.Mismatch, ...]:
    """Return what the plan from a layer *one* to a layer *two* is refused for."""
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec.plan_transfer(engine(one), engine(two))
    for each in caught.value.mismatches:
        for word in (each.field, repr(each.producer), repr(each.consumer), each.why):
            assert word in str(caught.value)
    assert caught.value.mismatches
    return caught.value.mismatches


def test_changed_part_names_are_a_mismatch() -> None:
    """K and V against one opaque part, and states with parts of other names, do not pair."""
    opaque = kvspec.FullAttentionSpec(**BASE, state_content_bytes=8)  # type: ignore[arg-type]
    refusal(kvspec.FullAttentionSpec(**BASE), opaque)  # type: ignore[arg-type]
    parts = [
        kvspec.Part(name=name, units=2, states=1, content_bytes=2, tokens_per_state=0)
        for name in ("ssm", "state")
    ]
    (found,) = refusal(*(kvspec.MambaSpec(state_parts=(part,)) for part in parts))
    assert (("ssm",), ("state",)) == (found.producer, found.consumer)


def test_changed_kinds_and_layers_are_mismatches() -> None:
    """Another kind of layer, or a layer on one side only, is refused by name."""
    full = kvspec.FullAttentionSpec(**BASE)  # type: ignore[arg-type]
    window = kvspec.SlidingWindowSpec(**BASE, sliding_window=4)  # type: ignore[arg-type]
    chunked = kvspec.ChunkedLocalAttentionSpec(**BASE, attention_chunk_size=4)  # type: ignore[arg-type]
    cross = kvspec.CrossAttentionSpec(**BASE)  # type: ignore[arg-type]
    for other in (chunked, cross):
        (found,) = refusal(window, other)
        assert "l" in found.field
    refusal(full, cross)  # a kind of full attention, but of other tokens
    engines = [engine(full, layers=layers) for layers in (("a", "b"), ("a", "draft"))]
    with pytest.raises(kvspec.MismatchError, match=r"(?s)b.*draft|draft.*b"):
        kvspec.plan_transfer(*engines)


@given(strategies.engine_pairs(), st.sampled_from(("total_num_kv_heads", "head_size", "dtype")))
def test_every_mismatch_is_listed_at_once(engines: Engines, field: str) -> None:
    """One changed field of any layer among others is found, and nothing else is blamed."""
    producer, consumer = engines
    index = next(
        (
            i
            for i, each in enumerate(producer.groups)
            if type(each.spec) is kvspec.FullAttentionSpec and "draft" not in each.name
        ),
        None,
    )
    if index is None:
        return
    group = producer.groups[index]
    value = {"total_num_kv_heads": 7, "head_size": 5, "dtype": "float32"}[field]
    spec = attrs.evolve(group.spec, page_size_padded=None, **{field: value})
    groups = list(producer.groups)
    groups[index] = attrs.evolve(group, spec=spec, shardings={})  # shardings of other units
    parallel = kvspec.ParallelConfig(tp_size=producer.parallel.tp_size)
    changed = attrs.evolve(producer, groups=tuple(groups), parallel=parallel)
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec.plan_transfer(changed, consumer)
    (found,) = caught.value.mismatches
    assert field in found.field
    assert value in {found.producer, found.consumer}


# Law 11: refusal of memory and of block tables, before anything is posted.

PLAIN: dict[str, Any] = {"total_num_kv_heads": 2, "head_size": 1, "dtype": "uint8"}


def table_of(spec: kvspec.LayerSpec) -> kvspec.DescriptorTable:
    """Return the table between two engines of one rank, one layer and six blocks."""
    side = engine(spec)
    caches = [kvspec.allocate(side, kvspec.RankId(), 6)[0] for _ in range(2)]
    return kvspec.build_table(kvspec.plan_transfer(side, side), *caches)


def refused(spec: kvspec.LayerSpec, **fields: Any) -> kvspec.KVSpecError:
    """Return the one error with which both `select` and `descriptors` refuse a request."""
    known: dict[str, Any] = {
        "request_id": "r",
        "num_tokens": 12,
        "producer_blocks": {"g": [0, 1, 2]},
        "consumer_blocks": {"g": [3, 4, 5]},
    }
    request = kvspec.TransferRequest(**known | fields)
    table = table_of(spec)
    errors = []
    for way in (table.select, table.descriptors):
        with pytest.raises(kvspec.KVSpecError) as caught:
            way(request)
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    return errors[0]


@pytest.mark.parametrize(
    ("producer", "cached", "missing"),
    [
        (kvspec.BlockTable([0, 1]), 0, "8..11"),
        (kvspec.BlockTable([1, 2], 4), 0, "0..3"),
        (kvspec.BlockTable([2], 8), 5, "5..7"),
        (kvspec.BlockTable([]), 11, "11..11"),
    ],
    ids=["end", "start", "before a cached boundary", "empty"],
)
def test_tokens_that_the_producer_lacks(
    producer: kvspec.BlockTable, cached: int, missing: str
) -> None:
    """Consumer tokens that the producer's table does not hold are a mismatch that names them."""
    spec = kvspec.FullAttentionSpec(block_size=4, **PLAIN)
    error = refused(spec, producer_blocks={"g": producer}, cached_tokens=cached)
    assert isinstance(error, kvspec.MismatchError)
    assert f"tokens {missing}" in str(error)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"consumer_blocks": {"g": [3, 4]}}, "consumer_blocks"),
        ({"consumer_blocks": {"g": kvspec.BlockTable([4, 5], 4)}}, "consumer_blocks"),
        ({"consumer_blocks": {}}, "consumer_blocks"),
        ({"producer_blocks": {"h": [0, 1, 2]}}, "producer_blocks"),
        ({"producer_blocks": {"g": [0, 1, 6]}}, "producer_blocks.*=6"),
        ({"consumer_blocks": {"g": [3, -1, 5]}}, "consumer_blocks.*=-1"),
        ({"consumer_blocks": {"g": [3, 4, 3]}}, "consumer_blocks.*=3"),
        ({"producer_blocks": {"g": kvspec.BlockTable([0, 1, 2], 2)}, "cached_tokens": 2},
         "first_token"),
    ],
    ids=["short", "late", "none", "other group", "beyond the pool", "negative", "twice", "odd"],
)  # fmt: skip
def test_impossible_block_tables(fields: dict[str, Any], words: str) -> None:
    """A table that cannot be is refused by its name: it would move other bytes, or none."""
    error = refused(kvspec.FullAttentionSpec(block_size=4, **PLAIN), **fields)
    assert re.search(words, str(error))


def test_a_part_of_a_row_cannot_be_cached() -> None:
    """Where one row stands for four tokens, the fifth token cannot be cached without the sixth."""
    spec = kvspec.FullAttentionSpec(block_size=8, tokens_per_state=4, **PLAIN)
    error = refused(spec, producer_blocks={"g": [0, 1]}, cached_tokens=6)
    assert "6" in str(error)


def test_a_state_is_never_rewound() -> None:
    """A state that has seen other tokens than the consumer wants is a mismatch of both counts."""
    spec = kvspec.MambaSpec.replicated_state(state_bytes=4)
    slots: dict[str, Any] = {"producer_blocks": {"g": [0]}, "consumer_blocks": {"g": [1]}}
    error = refused(spec, **slots, state_tokens=13)
    assert isinstance(error, kvspec.MismatchError)
    assert {12, 13} == {error.mismatches[0].producer, error.mismatches[0].consumer}
    assert "slot" in str(refused(spec, **slots | {"consumer_blocks": {"g": [1, 2]}}))


def test_another_engines_cache_is_refused() -> None:
    """A table is built for the plan's own engines only: equal parallel sizes are not enough."""
    spec = kvspec.FullAttentionSpec(block_size=4, **PLAIN)
    engines = [engine(spec, layout=layout) for layout in ("LBHNC", "LBNHC")]
    ours, theirs = (kvspec.allocate(each, kvspec.RankId(), 2)[0] for each in engines)
    plan = kvspec.plan_transfer(engines[0], engines[0])
    for caches in ((ours, theirs), (theirs, ours)):
        with pytest.raises(kvspec.MismatchError, match="engine"):
            kvspec.build_table(plan, *caches)
