"""Sums of regions do not depend on how the rows are gathered, nor on the compiled loop."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspec import Region
from kvspec.digests import compile_digest, compiled, regions
from kvspec.digests.definition import unit_hash, weights_of
from kvspec.digests.regions import RegionRows, all_row_digests, unit_sums
from kvspec.testing import Case, strategies
from kvspec.testing.world import described, world
from tests.laws.test_digest import sides, wanted

# Strides of block, unit and state, in contents: what lies inside what.
LAYOUTS = {
    "tokens in heads": (16, 4, 1),
    "heads in tokens": (16, 1, 4),
    "keys and values alternate": (32, 8, 2),
    "blocks with space between": (40, 4, 1),
    "heads outermost": (4, 64, 1),
}
UNITS, STATES, BLOCKS = 4, 4, 16


def region(layout: str, size: int, memory: np.ndarray) -> Region:
    """Return a region over *memory* whose contents have *size* bytes."""
    block, unit, state = (stride * size for stride in LAYOUTS[layout])
    return Region(
        group="g", layer="l", part="k", base=memory.ctypes.data, num_blocks=BLOCKS,
        block_stride=block, unit_stride=unit, state_stride=state, content_bytes=size,
        units=UNITS, states=STATES,
    )  # fmt: skip


def plain_digest(content: bytes, unit: int, number: int) -> int:
    """Return the digest of one row, word by word."""

    def mixed(word: int) -> int:
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            word = (word ^ (word >> 33)) * multiplier % 2**64
        return word ^ (word >> 33)

    total = 0
    for at in range(0, len(content), 8):
        weight = int(weights_of(at // 8 + 1)[-1])
        product = int.from_bytes(content[at : at + 8], "little") * weight % 2**64
        total += (product ^ (product >> 47)) * weight
    return mixed(total % 2**64 ^ mixed(number ^ unit_hash("l", "k", unit)))


@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from([3, 8, 16, 24]),
    st.integers(0, UNITS - 1),
    st.integers(1, UNITS),
    st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=4, unique=True),
    st.integers(0, 5),
    st.integers(0, 15),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 64, 1 << 17]),
)
@settings(max_examples=60, deadline=None)
def test_digests_of_rows_equal_those_word_by_word(
    layout: str, size: int, unit: int, units: int, blocks: list[int], skip: int, count: int,
    step: int, many: int,
) -> None:  # fmt: skip
    """For parts of blocks, whole blocks, every other row, some units, and steps of any size."""
    memory = np.random.default_rng(7).integers(0, 256, 4096 * size, np.uint8)
    memory = memory[: 1024 * size]
    here = region(layout, size, memory)
    own = range(unit, min(unit + units, UNITS))
    block = np.repeat(blocks, STATES)[skip : skip + count : step]
    row = np.tile(np.arange(STATES), len(blocks))[skip : skip + count : step]
    rows = RegionRows(block, row, np.arange(len(block)) * step + skip)
    wanted_digests = [
        [
            plain_digest(
                memory[(at := here.address(b, u, r) - here.base) : at + size].tobytes(),
                u + 10, number,
            )
            for u in own
        ]
        for b, r, number in zip(block.tolist(), row.tolist(), rows.number.tolist(), strict=True)
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "MANY_BYTES", many)
        chunks = [*all_row_digests(here, own, unit + 10, rows)]
        found = [digests for chunk in chunks for digests in chunk.tolist()]
        assert wanted_digests == found
        totals = [sum(column) % 2**64 for column in zip(*wanted_digests, strict=True)]
        for kernel in (None, compiled._add_rows):
            patch.setattr(compiled, "_kernels", [kernel] if kernel else [])
            with np.errstate(over="ignore"):
                sums = [*unit_sums(here, own, unit + 10, rows)]
            assert not sums or totals == np.sum(sums, axis=0, dtype=np.uint64).tolist()


@given(strategies.cases())
@settings(max_examples=20)
def test_compiled_digests_equal_those_of_numpy(case: Case) -> None:
    """The cases have all kinds of specs. Without numba, Python runs the loop uncompiled."""
    here = world(case)
    here.execute(described)
    selection = wanted(here.plan, case.request)
    sums = sides(here, selection)
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        patch.setattr(compiled, "_kernels", [compiled._add_rows])
        assert sums == sides(here, selection)


def test_compile_digest_compiles_once_where_numba_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "_kernels", [])
    pytest.importorskip("numba")
    assert compile_digest()
    first = compiled.kernel()
    assert compile_digest()
    assert first is compiled.kernel()


def test_compile_digest_without_numba_returns_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_kernels", [])
    monkeypatch.setitem(sys.modules, "numba", None)  # To import it fails.
    assert not compile_digest()
    assert compiled.kernel() is None
