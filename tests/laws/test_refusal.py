"""Tests of law 11: an impossible transfer is rejected before anything is posted.

Plans reject engines, `build_table` rejects memory, and `select` rejects block tables.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from builders import engine
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec.testing import strategies

pytestmark = pytest.mark.uncovered

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
def test_plan_rejects_layers_with_one_different_field(
    make: Any, fields: dict[str, Any], field: str, value: Any
) -> None:
    """The mismatch has the field, both values and a reason."""
    producer, consumer = make(**fields), make(**fields | {field: value})
    (mismatch,) = mismatches_between(producer, consumer)
    assert field in mismatch.field
    assert {getattr(producer, field), getattr(consumer, field)} == {
        mismatch.producer,
        mismatch.consumer,
    }
    assert mismatch.why


@pytest.mark.parametrize(
    "field", ["num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"]
)
def test_plan_rejects_states_with_a_different_size(field: str) -> None:
    """The mismatches have the values of the parts that do not fit."""
    producer = kvspec.MambaSpec.mamba2(**STATE)  # type: ignore[arg-type]
    consumer = kvspec.MambaSpec.mamba2(**STATE | {field: STATE[field] * 2})  # type: ignore[arg-type, operator]
    for mismatch in mismatches_between(producer, consumer):
        assert mismatch.producer != mismatch.consumer
        assert mismatch.why


def mismatches_between(
    producer: kvspec.LayerSpec, consumer: kvspec.LayerSpec
) -> tuple[kvspec.Mismatch, ...]:
    """Return the mismatches of a plan between two layers."""
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec.plan_transfer(engine(producer), engine(consumer))
    for mismatch in caught.value.mismatches:
        values = repr(mismatch.producer), repr(mismatch.consumer)
        for fact in (mismatch.field, *values, mismatch.why):
            assert fact in str(caught.value)
    assert caught.value.mismatches
    return caught.value.mismatches


def test_plan_rejects_parts_with_different_names() -> None:
    """Keys and values do not match one opaque part."""
    opaque = kvspec.FullAttentionSpec(**BASE, state_content_bytes=8)  # type: ignore[arg-type]
    mismatches_between(kvspec.FullAttentionSpec(**BASE), opaque)  # type: ignore[arg-type]
    parts = [
        kvspec.Part(name=name, units=2, states=1, content_bytes=2, tokens_per_state=0)
        for name in ("ssm", "state")
    ]
    (mismatch,) = mismatches_between(*(kvspec.MambaSpec(state_parts=(part,)) for part in parts))
    assert (("ssm",), ("state",)) == (mismatch.producer, mismatch.consumer)


def test_plan_rejects_different_kinds_and_layers_of_one_side() -> None:
    """A layer on one side only is a mismatch too."""
    full = kvspec.FullAttentionSpec(**BASE)  # type: ignore[arg-type]
    window = kvspec.SlidingWindowSpec(**BASE, sliding_window=4)  # type: ignore[arg-type]
    chunked = kvspec.ChunkedLocalAttentionSpec(**BASE, attention_chunk_size=4)  # type: ignore[arg-type]
    cross = kvspec.CrossAttentionSpec(**BASE)  # type: ignore[arg-type]
    for other in (chunked, cross):
        (mismatch,) = mismatches_between(window, other)
        assert "l" in mismatch.field
    # Cross attention is full attention too, but its tokens are those of the encoder.
    mismatches_between(full, cross)
    engines = [engine(full, layers=layers) for layers in (("a", "b"), ("a", "draft"))]
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec.plan_transfer(*engines)
    assert [("b.layer", None), ("draft.layer", None)] == [
        (mismatch.field, mismatch.consumer if mismatch.field[0] == "b" else mismatch.producer)
        for mismatch in caught.value.mismatches
    ]


@given(strategies.engine_pairs(), st.sampled_from(("total_num_kv_heads", "head_size", "dtype")))
def test_plan_finds_the_only_different_field_of_an_engine(engines: Engines, field: str) -> None:
    """The other layers of the engine are not mismatches."""
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
    # A page format cuts keys of 16 bytes, and the rotated elements of a key must lie inside of it.
    value = {"total_num_kv_heads": 7, "head_size": 80, "dtype": "float32"}[field]
    spec = attrs.evolve(group.spec, page_size_padded=None, **{field: value})
    groups = list(producer.groups)
    groups[index] = attrs.evolve(
        group, spec=spec, shardings={}
    )  # The shardings are for other units.
    parallel = kvspec.ParallelConfig(tp_size=producer.parallel.tp_size)
    changed = attrs.evolve(producer, groups=tuple(groups), parallel=parallel)
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec.plan_transfer(changed, consumer)
    (mismatch,) = caught.value.mismatches
    assert field in mismatch.field
    assert value in {mismatch.producer, mismatch.consumer}


# Memory and block tables.

PLAIN: dict[str, Any] = {"total_num_kv_heads": 2, "head_size": 1, "dtype": "uint8"}


def table_of(spec: kvspec.LayerSpec) -> kvspec.DescriptorTable:
    """Return the table between two engines of one rank, one layer and six blocks."""
    side = engine(spec)
    caches = [kvspec.allocate(side, kvspec.RankId(), 6)[0] for _ in range(2)]
    return kvspec.build_table(kvspec.plan_transfer(side, side), *caches)


def refused(spec: kvspec.LayerSpec, **fields: Any) -> kvspec.KVSpecError:
    """Return the error that both `select` and `descriptors` raise for a request."""
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
    ("producer", "cached", "held"),
    [
        (kvspec.BlockTable([0, 1]), 0, range(8)),
        (kvspec.BlockTable([1, 2], 4), 0, range(4, 12)),
        (kvspec.BlockTable([2], 8), 5, range(8, 12)),
        (kvspec.BlockTable([]), 11, range(0)),
    ],
    ids=["end", "start", "before a cached boundary", "empty"],
)
def test_select_rejects_tokens_that_the_producer_lacks(
    producer: kvspec.BlockTable, cached: int, held: range
) -> None:
    """The mismatch contains the positions of the producer's table and those required."""
    spec = kvspec.FullAttentionSpec(block_size=4, **PLAIN)
    error = refused(spec, producer_blocks={"g": producer}, cached_tokens=cached)
    assert isinstance(error, kvspec.MismatchError)
    assert [("producer_blocks['g']", held, range(cached, 12))] == [
        (mismatch.field, mismatch.producer, mismatch.consumer) for mismatch in error.mismatches
    ]


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"consumer_blocks": {"g": [3, 4]}}, "consumer_blocks['g']", range(8)),
        ({"consumer_blocks": {"g": kvspec.BlockTable([4, 5], 4)}}, "consumer_blocks['g']",
         range(4, 12)),
        ({"consumer_blocks": {}}, "consumer_blocks", []),
        ({"producer_blocks": {"h": [0, 1, 2]}}, "producer_blocks", ["h"]),
        ({"producer_blocks": {"g": [0, 1, 6]}}, "producer_blocks['g']", 6),
        ({"consumer_blocks": {"g": [3, -1, 5]}}, "consumer_blocks['g']", -1),
        ({"consumer_blocks": {"g": [3, 4, 3]}}, "consumer_blocks['g']", 3),
        ({"producer_blocks": {"g": kvspec.BlockTable([0, 1, 2], 2)}, "cached_tokens": 2},
         "producer_blocks['g'].first_token", 2),
    ],
    ids=["short", "late", "none", "other group", "beyond the pool", "negative", "twice", "odd"],
)  # fmt: skip
def test_select_rejects_impossible_block_tables(
    fields: dict[str, Any], field: str, value: object
) -> None:
    """Such a table would move other bytes, or none."""
    error = refused(kvspec.FullAttentionSpec(block_size=4, **PLAIN), **fields)
    assert isinstance(error, kvspec.SpecError)
    assert (field, value) == (error.field, error.value)


def test_select_rejects_a_cached_prefix_that_ends_inside_a_row() -> None:
    """One row stands for four tokens, and the consumer has cached six."""
    spec = kvspec.FullAttentionSpec(block_size=8, tokens_per_state=4, **PLAIN)
    error = refused(spec, producer_blocks={"g": [0, 1]}, cached_tokens=6)
    assert isinstance(error, kvspec.SpecError)
    assert ("cached_tokens", 6) == (error.field, error.value)


def test_select_rejects_a_state_of_other_tokens() -> None:
    """A state after 13 tokens cannot become the state after 12 tokens."""
    spec = kvspec.MambaSpec.replicated_state(state_bytes=4)
    slots: dict[str, Any] = {"producer_blocks": {"g": [0]}, "consumer_blocks": {"g": [1]}}
    error = refused(spec, **slots, state_tokens=13)
    assert isinstance(error, kvspec.MismatchError)
    assert {12, 13} == {error.mismatches[0].producer, error.mismatches[0].consumer}
    two_slots = refused(spec, **slots | {"consumer_blocks": {"g": [1, 2]}})
    assert isinstance(two_slots, kvspec.SpecError)
    assert ("consumer_blocks['g']", [1, 2]) == (two_slots.field, two_slots.value)


def test_build_table_rejects_the_cache_of_another_engine() -> None:
    """Equal parallel sizes are not enough."""
    spec = kvspec.FullAttentionSpec(block_size=4, **PLAIN)
    engines = [engine(spec, layout=layout) for layout in ("LBHNC", "LBNHC")]
    own_cache, other_cache = (kvspec.allocate(each, kvspec.RankId(), 2)[0] for each in engines)
    plan = kvspec.plan_transfer(engines[0], engines[0])
    for caches, side in (
        ((own_cache, other_cache), "consumer"),
        ((other_cache, own_cache), "producer"),
    ):
        with pytest.raises(kvspec.MismatchError) as caught:
            kvspec.build_table(plan, *caches)
        (mismatch,) = caught.value.mismatches
        assert f"{side}_cache.engine.layout" == mismatch.field
        assert ("LBHNC", "LBNHC") == (mismatch.producer, mismatch.consumer)
