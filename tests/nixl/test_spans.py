"""Spans of bytes against a set of integers, byte by byte."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvspec.nixl.spans import Spans

LENGTHS = st.lists(st.integers(1, 4), max_size=8)


@st.composite
def drawn(draw: st.DrawFn) -> list[range]:
    """Draw disjoint spans, in order, that may touch."""
    spans, place = [], 0
    for length in draw(LENGTHS):
        start = place + draw(st.integers(0, 3))
        spans.append(range(start, place := start + length))
    return spans


def made(spans: list[range]) -> Spans:
    """Return them as `Spans`."""
    start, end = ([*numbers] for numbers in ((s.start for s in spans), (s.stop for s in spans)))
    return Spans(np.array(start, np.int64), np.array(end, np.int64))


def members(spans: list[range]) -> set[int]:
    """Return their bytes, one by one."""
    return {byte for span in spans for byte in span}


@given(drawn(), drawn().flatmap(st.permutations))
def test_spans_meet_where_they_share_a_byte(spans: list[range], asked: list[range]) -> None:
    """The spans that are asked about come in any order."""
    other = made(asked)
    wanted = bool(members(spans) & members(asked))
    assert wanted == made(spans).meets(other.start, other.end)


@given(drawn(), st.data())
def test_spans_that_are_added_can_be_taken_away(spans: list[range], data: st.DataObject) -> None:
    """Of any sharding of disjoint spans to two, each comes back when the other goes."""
    first = [span for span in spans if data.draw(st.booleans())]
    second = [span for span in spans if span not in first]
    one, other = made(first), made(second)
    both = one.plus(other)
    assert [*zip(both.start.tolist(), both.end.tolist(), strict=True)] == [
        (span.start, span.stop) for span in spans
    ]
    rest = both.minus(one)
    assert (other.start.tolist(), other.end.tolist()) == (rest.start.tolist(), rest.end.tolist())
