"""Tests of `kvspec.descriptors.tiles`: the tokens that rows of a request move, and their places."""

from __future__ import annotations

from collections import Counter
from math import gcd
from typing import Any

import attrs
import builders
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspec import BlockTable, RankId
from kvspec.descriptors.paging import BlockLayout, Paging, RowKind, TokenSplit
from kvspec.descriptors.tiles import EVERY_TOKEN, EdgeTables, row_starts, tiles
from kvspec.errors import SpecError
from kvspec.ownership.stripes import WHOLE, Stripe
from kvspec.ownership.tokens import BlockCyclic
from kvspec.plan.edges import Edge

EDGE = Edge(
    producer=RankId(), consumer=RankId(), producer_group="g", group="g", layers=(), slices=()
)
REQUEST = builders.request(1, [0], [0])  # Only recurrent states read it.


def split_of(sizes: tuple[int, int], **more: Any) -> TokenSplit:
    """Return how tokens in blocks of *sizes* tokens are cut, if every rank owns all tokens."""
    sides = [Paging(size, size, EVERY_TOKEN) for size in sizes]
    fields = {"stripe": WHOLE, "tile": gcd(*sizes), "tokens_per_state": 1, "producer": sides[0]}
    return TokenSplit(**fields | {"consumer": sides[1]} | more)


def tables_of(wanted: range, sizes: tuple[int, int], **more: Any) -> EdgeTables:
    """Return tables of ascending blocks that contain the tokens *wanted*."""
    sides = [BlockTable([*range(3, 3 + -(-wanted.stop // size))]) for size in sizes]
    return EdgeTables(
        EDGE, wanted=wanted, moves=(wanted,), cached=more.pop("cached", 0),
        tokens=more.pop("tokens", None), recurrent=False, producer=sides[0], consumer=sides[1],
    )  # fmt: skip


def rows(wanted: range, sizes: tuple[int, int] = (4, 8), **more: Any) -> dict[tuple[int, int], Any]:
    """Return the first consumer tokens of all rows of a request, by (skip, tokens)."""
    allowed = more.pop("moves_whole", None)
    split = {name: more.pop(name) for name in ("tokens_per_state", "stripe") if name in more}
    starts = row_starts(
        REQUEST, tables_of(wanted, sizes, **more), split_of(sizes, **split), allowed
    )
    return {tuple(kind): own.tolist() for kind, (_, own) in starts.items()}


def always(_: RowKind) -> bool:
    """Let all dead tokens move."""
    return True


CASES: list[tuple[dict[str, Any], dict[tuple[int, int], list[int]]]] = [
    ({"wanted": range(8)}, {(0, 4): [0, 4]}),
    ({"wanted": range(15)}, {(0, 4): [0, 4, 8], (0, 3): [12]}),
    ({"wanted": range(5, 15), "cached": 5}, {(1, 3): [5], (0, 4): [8], (0, 3): [12]}),
    # Both ends are one tile.
    ({"wanted": range(5, 7), "cached": 5}, {(1, 2): [5]}),
    ({"wanted": range(5, 8)}, {(1, 3): [5]}),
    # Dead tokens move, but not over a cached one.
    ({"wanted": range(5, 15), "moves_whole": always}, {(0, 4): [4, 8, 12]}),
    (
        {"wanted": range(5, 15), "cached": 5, "moves_whole": always},
        {(1, 3): [5], (0, 4): [8, 12]},
    ),
    ({"wanted": range(5, 7), "cached": 5, "moves_whole": always}, {(1, 2): [5]}),
    # A state of two tokens moves whole.
    ({"wanted": range(5, 13), "tokens_per_state": 2}, {(0, 4): [4, 8], (0, 2): [12]}),
    # Every second block of the consumer moves over another edge.
    ({"wanted": range(5, 23), "stripe": Stripe(1, 2)}, {(0, 4): [8, 12]}),
    # One step moves the tiles that end in it, and the last step moves the rest.
    ({"wanted": range(1, 11), "tokens": range(7)}, {(1, 3): [1]}),
    ({"wanted": range(1, 11), "tokens": range(7, 11)}, {(0, 4): [4], (0, 3): [8]}),
]


@pytest.mark.parametrize(("given_", "expected"), CASES)
def test_first_and_last_tile_move_in_part(
    given_: dict[str, Any], expected: dict[tuple[int, int], list[int]]
) -> None:
    """The tile has 4 tokens: blocks of the producer have 4, and blocks of the consumer 8."""
    assert expected == rows(**given_)


@given(st.data())
def test_steps_move_each_wanted_state_once(data: st.DataObject) -> None:
    """Blocks, states, prefixes and steps are drawn. Each row lies in one tile."""
    draw = data.draw
    sizes = draw(st.sampled_from([(4, 4), (4, 8), (6, 4), (12, 8), (5, 5)]))
    tile = gcd(*sizes)
    tokens_per_state = draw(st.sampled_from([n for n in range(1, tile + 1) if tile % n == 0]))
    stop = draw(st.integers(1, 40))
    start = draw(st.integers(0, stop - 1)) // tokens_per_state * tokens_per_state
    ends = sorted({0, *draw(st.lists(st.integers(1, stop))), stop})
    moved: Counter[int] = Counter()
    for step in map(range, ends, ends[1:]):
        for (skip, count), starts in rows(
            range(start, stop), sizes, cached=start, tokens=step, tokens_per_state=tokens_per_state
        ).items():
            for token in starts:
                assert (token - skip) % tile == 0
                assert skip + count <= tile
                moved.update(range(token, token + count))
    assert Counter(range(start, -(-stop // tokens_per_state) * tokens_per_state)) == moved


def test_ranks_that_shard_alike_count_their_own_tokens() -> None:
    """Context rank 1 of 2 owns the tokens 2, 3, 6, 7, 10 and 11, which are its tokens 0 to 5."""
    context = BlockCyclic(1, 2, 2)
    side = Paging(4, 4, context)
    starts = row_starts(
        REQUEST,
        tables_of(range(11), (8, 8)),
        split_of((4, 4), producer=side, consumer=side),
    )
    found = {tuple(kind): own.tolist() for kind, (own, _) in starts.items()}
    assert {(0, 4): [0], (0, 1): [4]} == found


LAYOUT = BlockLayout(num_blocks=10, block_stride=100, tiles=2, tile_stride=40)


def test_tiles_are_in_the_order_of_the_producers_ids() -> None:
    """Blocks 7, 2 and 5 of the producer have two tiles each, which are blocks of the consumer."""
    tables = attrs.evolve(
        tables_of(range(24), (8, 4)),
        producer=BlockTable([7, 2, 5]),
        consumer=BlockTable([0, 1, 2, 3, 4, 6]),
    )
    split = split_of((8, 4))
    [(_, starts)] = row_starts(REQUEST, tables, split).items()
    layouts = LAYOUT, attrs.evolve(LAYOUT, tiles=1, tile_stride=0)
    found = tiles(tables, split, starts, layouts)
    assert [[2, 5, 7, 2, 5, 7], [2, 4, 0, 3, 6, 1]] == found.block.tolist()
    assert [[0, 0, 0, 1, 1, 1], [0] * 6] == found.tile.tolist()
    assert [[2, 5, 7, 12, 15, 17], [2, 4, 0, 3, 6, 1]] == found.ids.tolist()


def test_block_outside_the_memory_is_refused_only_if_it_moves() -> None:
    """The memory has 10 blocks, and the first block of the producer's table is cached."""
    tables = attrs.evolve(
        tables_of(range(4, 8), (4, 4), cached=4), producer=BlockTable([np.int64(99), 3])
    )
    split = split_of((4, 4))
    layouts = (attrs.evolve(LAYOUT, tiles=1, tile_stride=0),) * 2
    [(_, starts)] = row_starts(REQUEST, tables, split).items()
    assert [[3], [4]] == tiles(tables, split, starts, layouts).block.tolist()
    tables = attrs.evolve(tables, producer=BlockTable([3, 99]))
    with pytest.raises(SpecError) as caught:
        tiles(tables, split, starts, layouts)
    assert ("producer_blocks['g']", 99) == (caught.value.field, caught.value.value)
