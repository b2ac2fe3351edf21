"""Test the end of a request, if dead tokens may move: they do if that takes less time."""

from __future__ import annotations

import attrs
import pytest
from builders import engine, gqa, request
from hypothesis import given, settings

import kvspec
from kvspec import DescriptorTable, RankId
from kvspec.analysis.fewest import descriptor_counts
from kvspec.descriptors import runs
from kvspec.testing import Case, laws, strategies
from kvspec.testing.laws import KVSPEC, LAWS


def table_of(layout: str, tp: tuple[int, int], block_size: int) -> DescriptorTable:
    """Return the table between the first ranks, of one layer with two heads of 128 elements."""
    spec = gqa(2, block_size=block_size, head_size=128)
    sides = [engine(spec, tp=size, layout=layout) for size in tp]
    caches = [kvspec.plan_memory(side, RankId(), 10, 1 << 30 + at) for at, side in enumerate(sides)]
    return kvspec.build_table(kvspec.plan_transfer(*sides), *caches, dead_tokens=True)


TAILS = [
    # layout, TP sizes, block size, tokens; descriptors, their bytes and their dead bytes
    # K and V of one head of one token are 512 bytes. A descriptor costs as much as about 32 KiB.
    ("LBNHC", (2, 1), 128, 129, 129, 129 * 512, 0),  # a row for each token
    ("LBHNC", (2, 1), 128, 129, 2, 129 * 512, 0),  # tokens of one head are adjacent on both sides
    ("LBNHC", (1, 1), 128, 129, 2, 129 * 1024, 0),  # 127 dead tokens of 1 KiB are cut off
    ("LBNHC", (1, 1), 128, 228, 2, 256 * 1024, 28 * 1024),  # 28 KiB cost less than a descriptor
    ("LBNHC", (1, 1), 128, 220, 2, 220 * 1024, 0),  # 36 KiB cost more
    ("LBNHC", (1, 1), 16, 17, 2, 32 * 1024, 15 * 1024),  # a block of 16 KiB is never cut
    ("LBHNC", (1, 1), 128, 129, 3, 129 * 1024, 0),  # two more descriptors cost less than 127 KiB
    ("LBHNC", (1, 1), 16, 17, 2, 32 * 1024, 15 * 1024),  # and more than 15 KiB
]


@pytest.mark.parametrize(("layout", "tp", "block", "tokens", "count", "nbytes", "dead"), TAILS)
def test_last_block_is_cut_if_that_is_cheaper(
    layout: str, tp: tuple[int, int], block: int, tokens: int, count: int, nbytes: int, dead: int
) -> None:
    """The blocks are not adjacent on either side. The moved bytes and dead bytes are counted."""
    table = table_of(layout, tp, block)
    load = request(tokens, [3, 5], [7, 2])
    moved = table.descriptors(load)
    assert (count, nbytes) == (len(moved), int(moved[:, 2].sum()))
    assert (count, dead) == (descriptor_counts(table, load)[0], table.dead_bytes(load))
    text = kvspec.explain(table, request=load)
    assert ("dead" in text) == (dead > 0)
    assert not dead or f"{dead:,}" in text


@settings(max_examples=settings.default.max_examples // 2)
@given(strategies.twins())
def test_last_blocks_that_are_always_cut_keep_the_laws(twins: tuple[Case, Case]) -> None:
    """A descriptor costs as much as one byte. Law 8 is left out, because it counts descriptors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "DESCRIPTOR_BYTES", 1)
        of = [law for law in LAWS if law.number in {1, 4, 9, 10, 11, 13}]
        assert [] == laws.broken(attrs.evolve(KVSPEC, moves=None, tells=None), *twins, of=of)


def test_dead_bytes_are_moved_bytes_without_wanted_bytes() -> None:
    """The last block is cut or not, depending on the number of tokens."""
    for block in (16, 64, 128):
        table = table_of("LBNHC", (1, 1), block)
        for tokens in (1, block - 1, block, block + 1, 2 * block):
            load = request(tokens, [3, 5], [7, 2])
            moved = int(table.descriptors(load)[:, 2].sum())
            assert 1024 * tokens == moved - table.dead_bytes(load)
