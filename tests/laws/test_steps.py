"""Law 13 over schedules that are drawn: by layer and by token, in any number of steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from builders import case, engine, gqa, request
from hypothesis import given, settings
from hypothesis import strategies as st

import kvspec
from kvspec import RankId, SpecError
from kvspec.testing import Case, strategies
from kvspec.testing.laws import KVSPEC
from kvspec.testing.laws.steps import Schedule, schedule_of, scheduled
from kvspec.testing.laws.system import Trial
from kvspec.testing.world import world


@st.composite
def schedules(draw: st.DrawFn, drawn: Case) -> Schedule:
    """Draw steps of each layer or of some together, each to its own frontiers, in one order."""
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
def test_any_schedule_is_the_whole_request(data: st.DataObject, drawn: Case) -> None:
    """All is right at the end, nothing was written twice, nothing was read before it was there."""
    assert [] == list(scheduled(Trial(KVSPEC, drawn), data.draw(schedules(drawn))))


def asked(**more: Any) -> Case:
    """Return ten tokens in blocks of four."""
    sides = [engine(gqa(2, block_size=4, head_size=2, dtype="uint8"), tp=tp) for tp in (2, 1)]
    return case(*sides, request(10, [1, 2, 3], [3, 1, 2], **more))


def table_of(drawn: Case, **more: Any) -> kvspec.DescriptorTable:
    """Return the table of the first pair of ranks."""
    here = world(drawn)
    sides = here.producers[RankId()][0], here.consumers[RankId()][0]
    return kvspec.build_table(here.plan, *sides, **more)


def test_a_block_that_is_cut_waits() -> None:
    """Of six tokens written, the first block moves; then, of ten, the rest."""
    drawn = asked()
    table = table_of(drawn)
    steps = [range(6), range(6, 10)]
    sizes = [int(table.descriptors(drawn.request, tokens=step)[:, 2].sum()) for step in steps]
    whole = int(table.descriptors(drawn.request)[:, 2].sum())
    assert [16, 24] == sizes
    assert whole == sum(sizes)


def test_an_encoder_of_no_prompt_moves() -> None:
    """The step of no tokens is the last one of a prompt of none; the encoder's come with it."""
    spec = kvspec.CrossAttentionSpec(block_size=4, total_num_kv_heads=1, head_size=2, dtype="uint8")
    drawn = case(engine(spec), engine(spec), request(0, [1], [2], encoder_tokens=1))
    assert [] == list(scheduled(Trial(KVSPEC, drawn), schedule_of(drawn)))


def test_by_group() -> None:
    """Each group has its own frontier; one that is not named does not move."""
    drawn = asked()
    (group,) = (group.name for group in drawn.consumer.groups)
    table = table_of(drawn)
    both = [table.select(drawn.request, tokens=step) for step in (range(8), {group: range(8)})]
    assert np.array_equal(both[0], both[1])
    assert 0 == len(table.select(drawn.request, tokens={})[0])


def test_a_producers_table_need_only_reach_what_is_written() -> None:
    """Blocks that the producer has not taken yet are no fault; of the last step they are."""
    drawn = case(asked().producer, asked().consumer, request(10, [1, 2], [3, 1, 2]))
    table = table_of(drawn)
    assert 0 < len(table.select(drawn.request, tokens=range(8))[0])
    with pytest.raises(kvspec.MismatchError, match=r"does not hold tokens 8\.\.9"):
        table.select(drawn.request, tokens=range(8, 10))


WRONG = [
    (5, "tokens=5: expected a range of positions"),
    (range(0, 8, 2), r"tokens=range\(0, 8, 2\)"),
    (range(-1, 3), r"tokens=range\(-1, 3\)"),
    ({"elsewhere": range(3)}, r"tokens=\['elsewhere'\]: expected groups of the consumer"),
]


@pytest.mark.parametrize(("tokens", "message"), WRONG)
def test_wrong_positions_are_refused(tokens: Any, message: str) -> None:
    """By name, before anything is selected."""
    drawn = asked()
    with pytest.raises(SpecError, match=message):
        table_of(drawn).select(drawn.request, tokens=tokens)


@pytest.mark.parametrize("layers", [["l.9"], 7, [["l.0"]], "l.0"])
def test_wrong_layers_are_refused(layers: Any) -> None:
    """A name that the consumer does not have, and what is no list of names."""
    with pytest.raises(SpecError, match="layers"):
        table_of(asked(), layers=layers)
