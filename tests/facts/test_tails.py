"""What the end of a request moves: dead tokens stay where that takes less time."""

from __future__ import annotations

import attrs
import pytest
from builders import engine, gqa, request
from hypothesis import given, settings

import kvspec
from kvspec import DescriptorTable, RankId
from kvspec.descriptors import runs
from kvspec.testing import Case, laws, strategies
from kvspec.testing.laws import KVSPEC, LAWS


def table_of(layout: str, tp: tuple[int, int], block_size: int) -> DescriptorTable:
    """Return the table of the first ranks: two heads of 128 elements, one layer."""
    spec = gqa(2, block_size=block_size, head_size=128)
    sides = [engine(spec, tp=size, layout=layout) for size in tp]
    caches = [kvspec.plan_memory(side, RankId(), 10, 1 << 30 + at) for at, side in enumerate(sides)]
    return kvspec.build_table(kvspec.plan_transfer(*sides), *caches)


TAILS = [
    # layout, TP sizes, block, tokens; descriptors, bytes and dead bytes of them, by hand
    # A token of one head is 512 bytes, K and V together.
    ("LBNHC", (2, 1), 128, 129, 129, 129 * 512, 0),  # a run for each token, in one block and one
    ("LBHNC", (2, 1), 128, 129, 2, 129 * 512, 0),  # one head's tokens lie together on both sides
    ("LBNHC", (1, 1), 128, 129, 2, 129 * 1024, 0),  # 127 dead tokens of 1 KiB: 127 KiB
    ("LBNHC", (1, 1), 128, 228, 2, 256 * 1024, 28 * 1024),  # 28 KiB take less than a descriptor
    ("LBNHC", (1, 1), 128, 220, 2, 220 * 1024, 0),  # 36 KiB take more
    ("LBNHC", (1, 1), 16, 17, 2, 32 * 1024, 15 * 1024),  # no block of 16 KiB is worth it
    ("LBHNC", (1, 1), 128, 129, 2, 256 * 1024, 127 * 1024),  # two heads apart: two rows, not one
]


@pytest.mark.parametrize(("layout", "tp", "block", "tokens", "count", "nbytes", "dead"), TAILS)
def test_tails(
    layout: str, tp: tuple[int, int], block: int, tokens: int, count: int, nbytes: int, dead: int
) -> None:
    """Blocks lie apart on both sides; what moves, and how much of it is dead, is counted."""
    table = table_of(layout, tp, block)
    wanted = request(tokens, [3, 5], [7, 2])
    moved = table.descriptors(wanted)
    assert (count, nbytes) == (len(moved), int(moved[:, 2].sum()))
    assert (count, dead) == (table.counts(wanted)[0], table.dead_bytes(wanted))
    told = f"{dead:,} of the bytes belong to dead tokens of the last block"
    assert (told in kvspec.explain(table, request=wanted)) == (dead > 0)


@settings(max_examples=settings.default.max_examples // 2)
@given(strategies.twins())
def test_tails_that_are_always_cut_keep_the_laws(twins: tuple[Case, Case]) -> None:
    """Where a descriptor more takes as long as one byte; law 8 counts descriptors alone."""
    before, runs.DESCRIPTOR_BYTES = runs.DESCRIPTOR_BYTES, 1
    try:
        of = [law for law in LAWS if law.number in {1, 4, 9, 10, 11, 13}]
        assert [] == laws.broken(attrs.evolve(KVSPEC, moves=None, tells=None), *twins, of=of)
    finally:
        runs.DESCRIPTOR_BYTES = before


def test_what_is_dead_is_what_nobody_wants() -> None:
    """Of a request that is cut or not, moved bytes without the dead are the live ones."""
    for block in (16, 64, 128):
        table = table_of("LBNHC", (1, 1), block)
        for tokens in (1, block - 1, block, block + 1, 2 * block):
            wanted = request(tokens, [3, 5], [7, 2])
            moved = int(table.descriptors(wanted)[:, 2].sum())
            assert 1024 * tokens == moved - table.dead_bytes(wanted)
