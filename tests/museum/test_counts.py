"""How many pairs of TP sizes vLLM's push mode, vLLM's stored pages and SGLang's keys serve.

vLLM can load 610 triples of producer ranks, consumer ranks and KV heads, of sizes up to 16. The
rules of vLLM 0.33 and SGLang 0.5.23 are rebuilt here. The numbers of triples are those of runs of
their own functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
from exhibits_of_ranks import file_row, one_reader_a_head, reads_whole_rows, right_slices
from toy import HeadSlice, Slices, gqa, head_reads, transfer

import kvspec
from kvspec.testing.kit import Verdict
from kvspec.testing.kit.guard import Guard
from kvspec.testing.kit.judging import look
from kvspec.testing.laws import LAWS


def triples(largest: int) -> list[tuple[int, int, int]]:
    """Return (heads, producer ranks, consumer ranks) that vLLM can load."""
    sizes = range(1, largest + 1)
    return [
        (heads, p, d)
        for heads, p, d in product(sizes, repeat=3)
        if all(heads % size == 0 or size % heads == 0 for size in (p, d))
    ]


def push(heads: int, p: int, d: int, rank: int) -> Iterator[HeadSlice]:
    """Push equal heads of a producer rank once, as vLLM's push mode does.

    A pull must not read a head twice. So a push leaves out the consumer ranks that share a head, if
    they are more than the producer ranks. vLLM refuses this for plain attention, but not for models
    with states. It refuses sizes of which neither divides the other.
    """
    if max(p, d) % min(p, d):
        raise kvspec.MismatchError([])
    yield from (one_reader_a_head if d > p else right_slices)(heads, p, d, rank)


def keys(heads: int, p: int, d: int, rank: int) -> Iterator[HeadSlice]:
    """Find a page by a name with the number of heads: those of a rank times the ranks, in SGLang.

    Engines whose names differ share no page. They compute it again, so nothing is wrong.
    """
    if file_row(heads, p) != file_row(heads, d):
        raise kvspec.MismatchError([])
    yield from right_slices(heads, p, d, rank)


def counts(slices: Slices, largest: int) -> dict[str, int]:
    """Return how often law 1 gives which verdict."""
    guard, found = Guard(head_reads(slices), 20.0), Counter[str]()
    for heads, p, d in triples(largest):
        case = transfer(gqa(heads, block_size=1), tp=(p, d))
        found[str(look(guard, LAWS[:1], case)[1][0])] += 1
    return dict(found)


NUMBERS = {
    "vLLM's push mode": (push, {"exact": 290, "refused": 234, "wrong": 86}),
    "vLLM's canonical pages": (reads_whole_rows, {"exact": 414, "wrong": 196}),
    "SGLang's unified keys": (keys, {"exact": 218, "refused": 392}),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_triples_by_arithmetic_have_the_numbers_of_the_runs(name: str) -> None:
    """The same counts without a law: which rows, names or readers differ."""
    all_of_them = triples(16)
    assert len(all_of_them) == 610
    served = {
        "vLLM's push mode": lambda heads, p, d: d <= max(heads, p) and max(p, d) % min(p, d) == 0,
        "vLLM's canonical pages": lambda heads, p, d: file_row(heads, d) <= file_row(heads, p),
        "SGLang's unified keys": lambda heads, p, d: file_row(heads, d) == file_row(heads, p),
    }[name]
    assert NUMBERS[name][1]["exact"] == sum(served(*triple) for triple in all_of_them)


@pytest.mark.parametrize("name", NUMBERS)
def test_smallest_triple_that_is_not_served_has_one_head_and_two_ranks(name: str) -> None:
    slices, _ = NUMBERS[name]
    guard = Guard(head_reads(slices), 20.0)
    case = transfer(gqa(1, block_size=1), tp=(1, 2))
    assert look(guard, LAWS[:1], case)[1][0] in (Verdict.WRONG, Verdict.REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_law_1_judges_all_triples_as_the_runs_did(name: str) -> None:
    slices, expected = NUMBERS[name]
    assert expected == counts(slices, 16)
