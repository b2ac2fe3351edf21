"""Tests that `verify` finds the same with few blocks as with all blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import attrs
import builders
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from judged import caches, law_1

import kvspec
from kvspec.check.ownership import Owners
from kvspec.check.places import Places
from kvspec.check.sample import BlockSample
from kvspec.descriptors.runs import RowSet
from kvspec.descriptors.selection import NumberedRows, Picked, SplitGroup
from kvspec.descriptors.tiles import Tiles
from kvspec.testing import strategies
from kvspec.testing.world import World, world

VERIFY = sys.modules["kvspec.check.verify"]
QUARTER = settings(max_examples=max(8, settings.default.max_examples // 4))


def verified(here: World, **options: Any) -> kvspec.CounterExample | None:
    """Return what `verify` finds of the library's own descriptors."""
    return kvspec.verify(here.plan, *caches(here), here.case.request, **options)


def of_all_blocks(here: World) -> kvspec.CounterExample | None:
    """Return what `verify` finds without a sample."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockSample, "of", lambda *_: None)
        return verified(here)


def altered_tiles(tiles: Tiles, how: str, at: int) -> Tiles:
    """Return *tiles* with a fault in one of them."""
    side, tile = at % 2, at % len(tiles)
    if how == "no tile":
        return tiles.take(np.delete(np.arange(len(tiles)), tile))
    changed = {name: getattr(tiles, name).copy() for name in ("block", "tile", "ids")}
    if how == "exchanged":  # Two tiles go to the blocks of each other.
        changed["block"][1, [tile, tile - 1]] = changed["block"][1, [tile - 1, tile]]
    else:
        changed[how][side, tile] += 1
    return Tiles(**changed)


def altered_runs(rows: RowSet, how: str, at: int) -> RowSet | None:
    """Return *rows* with a fault in one of its runs, or None if no run is left."""
    run, side = at % len(rows), at % 2
    columns = ("producer_address", "consumer_address", "length")
    runs = {name: getattr(rows, name).copy() for name in columns}
    if how == "stride":
        name = ("producer", "consumer")[side]
        layout = getattr(rows, name)
        changed: Any = {name: attrs.evolve(layout, block_stride=layout.block_stride + 1)}
        return attrs.evolve(rows, **changed)
    if how in ("no run", "run twice"):
        order = [*range(len(rows)), run]
        kept = [each for each in order if each != run] if how == "no run" else order
        runs = {name: values[kept] for name, values in runs.items()}
    elif how == "swapped":
        runs["producer_address"][[run, run - 1]] = runs["producer_address"][[run - 1, run]]
    elif how == "reversed":
        runs["producer_address"] = runs["producer_address"][::-1].copy()
    else:
        column = "length" if how == "shorter" else columns[side]
        runs[column][run] += {"shorter": -1, "earlier": -1, "later": int(runs["length"][run])}[how]
    return attrs.evolve(rows, **runs) if len(runs["length"]) else None


def altered(picked: Picked, how: str, at: int) -> list[Picked]:
    """Return *picked* with a fault in one of its runs or tiles."""
    numbered, tiles = picked
    if how == "doubled":
        return [picked, picked]
    if how in TILE_FAULTS:
        return [(numbered, altered_tiles(tiles, how, at))]
    rows = altered_runs(numbered.rows, how, at)
    return [] if rows is None else [(attrs.evolve(numbered, rows=rows), tiles)]


TILE_FAULTS = ("no tile", "block", "tile", "exchanged")
RUN_FAULTS = (
    "no run", "run twice", "stride", "swapped", "reversed", "shorter", "earlier", "later",
)  # fmt: skip
HOW = ("doubled", *TILE_FAULTS, *RUN_FAULTS)


@contextmanager
def fault(edge: object, how: str, at: int) -> Iterator[None]:
    """Plant a fault in what the library moves over *edge*."""
    right = SplitGroup.picked

    def wrong(group: SplitGroup, *arguments: Any) -> list[Picked]:
        picked = right(group, *arguments)
        if group.edge is not edge or not picked:
            return picked
        number = at % len(picked)
        return picked[:number] + altered(picked[number], how, at) + picked[number + 1 :]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitGroup, "picked", wrong)
        yield


# Twelve blocks of each side, most of which look alike.
LONG = builders.case(
    builders.engine(builders.gqa(2, block_size=4), tp=2, layout="LBNHC"),
    builders.engine(builders.gqa(2, block_size=8), layout="LBHNC"),
    builders.request(46, [3, 5, 0, 9, 1, 7, 2, 10, 4, 8, 11, 6], [4, 2, 5, 0, 3, 1]),
)


@QUARTER
@given(strategies.cases() | strategies.sharing_cases(), st.sampled_from(HOW), st.integers(0, 2**16))
@example(LONG, "no tile", 17)
@example(LONG, "block", 30)
@example(LONG, "tile", 31)
@example(LONG, "stride", 0)
@example(LONG, "stride", 1)
def test_verify_finds_a_planted_fault_as_in_all_blocks(
    case: strategies.Case, how: str, at: int
) -> None:
    """Blocks that look alike hide no fault, and no right block is called wrong."""
    here = world(case, blank=True)
    edges = here.plan.edges
    with fault(edges[at % len(edges)], how, at):
        assert (of_all_blocks(here) is None) == (verified(here) is None)


def two_layers(layout: str, **fields: Any) -> kvspec.EngineSpec:
    """Return an engine of two layers with blocks of 4 tokens."""
    defaults = {"block_size": 4, "head_size": 16, "dtype": "uint8"}
    kernel = fields.pop("kernel_block_size", None)
    spec = builders.gqa(2, **defaults | fields)
    group = builders.group(spec, "l.0", "l.1", kernel_block_size=kernel)
    return builders.engine(group, layout=layout)


LAYOUTS = {
    "heads and tokens": (two_layers("LBNHC"), two_layers("LBHNC")),
    "layers in blocks": (two_layers("BLHNC"), two_layers("LKBNHC", block_size=8)),
    "blocks inside": (two_layers("LHNBC"), two_layers("LBHNC")),
    "transposed keys": (
        two_layers("LBKHNC", page_format="keys-transposed", head_size=4),
        two_layers("LBNHC", head_size=4),
    ),
    "kernel blocks": (
        two_layers("LBNHC"),
        two_layers("LBNHC", block_size=8, kernel_block_size=4),
    ),
    "packed keys": (
        two_layers("LBKHNC", page_format="x-packed", head_size=32),
        two_layers("LBHNC", head_size=32),
    ),
}


@pytest.mark.parametrize("sides", LAYOUTS.values(), ids=LAYOUTS)
def test_verify_and_law_1_find_each_planted_fault(
    sides: tuple[kvspec.EngineSpec, kvspec.EngineSpec],
) -> None:
    """All blocks have the fault, or one block that no other one looks like."""
    long = sides[1].groups[0].spec.block_size == 8
    asked = builders.request(20, [3, 5, 0, 9, 1], [4, 2, 7] if long else [4, 2, 7, 0, 6])
    case = builders.case(*sides, asked)
    here = world(case)
    assert None is verified(here)
    missed = list[tuple[str, int]]()
    for how, at in zip(HOW * 2, cycle((2, 5)), strict=False):
        with fault(here.plan.edges[0], how, at):
            found = verified(here)
            rows = {(p, c): table.descriptors(asked) for p, c, table in here.tables()}
        # Without a block's stride, and without a tile's place, nothing differs.
        same = all(
            np.array_equal(rows[p, c], table.descriptors(asked)) for p, c, table in here.tables()
        )
        given = kvspec.verify(here.plan, *caches(here), asked, rows)
        right = found is None, given is None, not law_1(here, rows)
        if right != (same,) * 3:
            missed.append((how, at))
    assert [] == missed


def of_altered(alter: Callable[[NumberedRows, Tiles], list[Picked]]) -> Any:
    """Return the sample if *alter* changes the last numbered rows that move."""
    side, _ = LAYOUTS["heads and tokens"]
    asked = builders.request(12, [3, 0, 1], [4, 2, 6])
    here = world(builders.case(side, side, asked), blank=True)
    (table,) = (table for *_, table in here.tables())
    (*others, last) = table.tiles(here.case.request)
    producer, consumer = (
        Places(
            Owners(cache.engine), cache, here.case.consumer, here.case.request, frozenset(), tables
        )
        for cache, tables in (
            (table.producer, here.case.request.producer_blocks),
            (table.consumer, here.case.request.consumer_blocks),
        )
    )
    rank = kvspec.RankId()
    return BlockSample.of(consumer, {rank: producer}, {rank: [*others, *alter(*last)]})


def shifted(rows: NumberedRows, tiles: Tiles, blocks: int) -> list[Picked]:
    """Move the runs by *blocks*, and the tiles back."""
    changed = attrs.evolve(
        rows.rows,
        consumer_address=rows.rows.consumer_address + blocks * rows.rows.consumer.block_stride,
    )
    block = tiles.block - np.array([[0], [blocks]])
    return [(attrs.evolve(rows, rows=changed), attrs.evolve(tiles, block=block))]


def far_away(rows: NumberedRows, tiles: Tiles) -> list[Picked]:
    """Move the tiles out of the pool."""
    return [(rows, attrs.evolve(tiles, block=tiles.block + np.array([[0], [1 << 20]])))]


def test_no_sample_stands_for_runs_and_tiles_outside_of_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks are then verified one by one."""
    assert of_altered(lambda *right: [right]) is not None
    assert of_altered(lambda *right: shifted(*right, 2)) is None
    assert of_altered(far_away) is None
    right = RowSet.offsets
    monkeypatch.setattr(RowSet, "offsets", lambda *both: right(*both) + np.array([[0], [1]]))
    assert of_altered(lambda *right: [right]) is None


def test_few_of_many_equal_blocks_are_verified() -> None:
    """One token is cached, so the first and the last block look different."""
    samples = list[Any]()
    right = BlockSample.of

    def record(*arguments: Any) -> Any:
        samples.append(right(*arguments))
        return samples[-1]

    asked = attrs.evolve(LONG.request, cached_tokens=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockSample, "of", record)
        assert None is verified(world(attrs.evolve(LONG, request=asked), blank=True))
    assert [[0, 1, 5]] == [sample.places.chosen["g"].tolist() for sample in samples]


def test_verify_lists_few_descriptors_of_a_long_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cost does not grow with the tokens."""
    spec, tokens = builders.gqa(4, head_size=128), 16_000
    sides = [
        builders.engine(spec, layers=["l.0", "l.1"], tp=tp, layout=letters)
        for tp, letters in ((2, "LKBNHC"), (1, "BLHNC"))
    ]
    blocks = np.arange(tokens // 16)
    caches = [
        {
            rank: kvspec.plan_memory(each, rank, len(blocks), (side * 8 + at) << 40)
            for at, rank in enumerate(each.parallel.ranks)
        }
        for side, each in enumerate(sides, 1)
    ]
    asked = builders.request(tokens - 3, blocks[::-1], np.roll(blocks, 5))
    checked, right = list[int](), VERIFY._writes

    def record(moved: Any) -> Any:
        writes = right(moved)
        checked.append(len(writes[1]))
        return writes

    monkeypatch.setattr(VERIFY, "_writes", record)
    assert None is kvspec.verify(kvspec.plan_transfer(*sides), *caches, asked)
    assert 0 < sum(checked) < tokens
