"""Tests of law 13 over drawn schedules: by layer and by token, in any number of steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from builders import case, engine, gqa, request
from hypothesis import given, settings
from hypothesis import strategies as st

import kvspec
from kvspec import RankId
from kvspec.testing import Case, strategies
from kvspec.testing.laws import KVSPEC
from kvspec.testing.laws.steps import Schedule, schedule_of, scheduled
from kvspec.testing.laws.system import Trial
from kvspec.testing.world import world
from tests.support.refused import refusal


@st.composite
def schedules(draw: st.DrawFn, drawn: Case) -> Schedule:
    """Draw steps of one or more layers, each with frontiers of its own, in one order."""
    names = [layer for group in drawn.consumer.groups for layer in group.layers]
    steps = []
    while names:
        many = draw(st.integers(1, len(names)))
        layers, names = frozenset(names[:many]), names[many:]
        total = drawn.request.num_tokens
        cuts = draw(st.sets(st.integers(0, total), max_size=4)) | {0, total}
        ends = pairwise(sorted(cuts)) if total else [(0, 0)]
        steps += [(layers, range(*pair)) for pair in ends]
    return sorted(steps, key=lambda step: step[1].stop)


@given(st.data(), strategies.cases() | strategies.sharing_cases())
@settings(max_examples=settings.default.max_examples // 2)
def test_any_schedule_moves_the_whole_request_once(data: st.DataObject, drawn: Case) -> None:
    """No step writes a byte twice, or reads a byte before the producer has written it."""
    assert [] == list(scheduled(Trial(KVSPEC, drawn), data.draw(schedules(drawn))))


def ten_tokens(**more: Any) -> Case:
    """Return a request of ten tokens in blocks of four."""
    sides = [engine(gqa(2, block_size=4, head_size=2, dtype="uint8"), tp=tp) for tp in (2, 1)]
    return case(*sides, request(10, [1, 2, 3], [3, 1, 2], **more))


def table_of(drawn: Case, **more: Any) -> kvspec.DescriptorTable:
    """Return the table of the first pair of ranks."""
    here = world(drawn)
    sides = here.producers[RankId()][0], here.consumers[RankId()][0]
    return kvspec.build_table(here.plan, *sides, **more)


def test_step_moves_only_blocks_that_are_complete() -> None:
    """After six tokens the first block moves. After ten tokens the rest moves."""
    drawn = ten_tokens()
    table = table_of(drawn)
    steps = [range(6), range(6, 10)]
    sizes = [int(table.descriptors(drawn.request, tokens=step)[:, 2].sum()) for step in steps]
    whole = int(table.descriptors(drawn.request)[:, 2].sum())
    assert [16, 24] == sizes
    assert whole == sum(sizes)


def test_step_of_an_empty_prompt_moves_the_encoder_tokens() -> None:
    """The step of no tokens is the last step of an empty prompt."""
    spec = kvspec.CrossAttentionSpec(block_size=4, total_num_kv_heads=1, head_size=2, dtype="uint8")
    drawn = case(engine(spec), engine(spec), request(0, [1], [2], encoder_tokens=1))
    assert [] == list(scheduled(Trial(KVSPEC, drawn), schedule_of(drawn)))


def test_select_moves_only_groups_with_a_frontier() -> None:
    """Each group has its own frontier."""
    drawn = ten_tokens()
    (group,) = (group.name for group in drawn.consumer.groups)
    table = table_of(drawn)
    both = [table.select(drawn.request, tokens=step) for step in (range(8), {group: range(8)})]
    assert np.array_equal(both[0].ids, both[1].ids)
    assert 0 == len(table.select(drawn.request, tokens={}))


def test_step_requires_only_producer_blocks_that_are_written() -> None:
    """A missing block is an error only in the step that needs it."""
    drawn = case(ten_tokens().producer, ten_tokens().consumer, request(10, [1, 2], [3, 1, 2]))
    table = table_of(drawn)
    assert 0 < len(table.select(drawn.request, tokens=range(8)))
    with pytest.raises(kvspec.MismatchError) as caught:
        table.select(drawn.request, tokens=range(8, 10))
    assert [("producer_blocks['g']", range(8), range(10))] == [
        (mismatch.field, mismatch.producer, mismatch.consumer)
        for mismatch in caught.value.mismatches
    ]


WRONG = [
    (5, 5),
    (range(0, 8, 2), range(0, 8, 2)),
    (range(-1, 3), range(-1, 3)),
    ({"elsewhere": range(3)}, ["elsewhere"]),
]


@pytest.mark.parametrize(("tokens", "value"), WRONG)
def test_select_rejects_invalid_positions(tokens: Any, value: object) -> None:
    """The positions are not a range, or belong to an unknown group."""
    drawn = ten_tokens()
    error = refusal(lambda: table_of(drawn).select(drawn.request, tokens=tokens))
    assert ("tokens", value) == (error.field, error.value)


@pytest.mark.parametrize("layers", [["l.9"], 7, [["l.0"]], "l.0"])
def test_build_table_rejects_invalid_layers(layers: Any) -> None:
    """The consumer lacks the layer, or the value is not a sequence of names."""
    assert "layers" == refusal(lambda: table_of(ten_tokens(), layers=layers)).field
