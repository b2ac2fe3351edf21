"""In any layout, each byte of a group's storage lies in exactly one region or in padding.

Padding lies at the end of each page and has the size by which the page was padded. Regions lie
where the letters of the layout place them. The oracle cuts the same regions out of the storage
without strides, so both sides compute them independently.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvspec.check.counting import rank_layers, rank_units
from kvspec.engines.engine import EngineSpec
from kvspec.memory.allocation import allocate
from kvspec.memory.rank_cache import Region
from kvspec.ownership.parallel import RankId
from kvspec.testing.carve import logical_views
from kvspec.testing.engines import groups
from kvspec.testing.strategies import engines

MODEL = groups()


@st.composite
def one_engine(draw: st.DrawFn) -> EngineSpec:
    """Draw an engine of any model: every kind of layer, layout, sharding and padding."""
    return draw(engines(draw(MODEL), largest=4))


def offsets(region: Region, base: int) -> np.ndarray:
    """Return the offset from *base* of every byte of *region*.

    The array has the shape (blocks, units, states, bytes of content).
    """
    shape = region.num_blocks, region.units, region.states, region.content_bytes
    strides = region.block_stride, region.unit_stride, region.state_stride
    axes = [np.arange(n) * stride for n, stride in zip(shape, strides, strict=False)]
    axes.append(np.array([region.chunk_offset(byte) for byte in range(region.content_bytes)]))
    at = np.full(shape, region.base - base)
    for axis, steps in enumerate(axes):
        at += steps.reshape([-1 if place == axis else 1 for place in range(4)])
    return at


# Null blocks are drawn among the first three, so a pool needs at least three blocks.
@given(one_engine(), st.integers(3, 5))
def test_regions_contain_each_byte_once(engine: EngineSpec, num_blocks: int) -> None:
    """Count the regions that hold each byte, and compare their places with the oracle."""
    for rank in engine.parallel.ranks:
        cache, storage = allocate(engine, rank, num_blocks)
        views = logical_views(engine, rank, storage, num_blocks)
        for group in engine.groups:
            if not rank_layers(engine, rank, group):
                assert group.name not in storage
                continue
            flat = storage[group.name]
            seen = np.zeros(flat.size, np.int64)
            for region in (region for region in cache.regions if region.group == group.name):
                at = offsets(region, flat.ctypes.data)
                assert 0 <= at.min() <= at.max() < flat.size
                np.add.at(seen, at.ravel(), 1)
                # 251 is a prime: bytes at a distance of a power of two get different values.
                flat[:] = np.arange(flat.size) % 251
                view = views[group.name, region.layer, region.part]
                assert np.array_equal(flat[at], view)
            assert seen.max(initial=0) <= 1
            assert padding(engine, group.name, rank, num_blocks, seen) == seen.size - seen.sum()


def padding(engine: EngineSpec, name: str, rank: RankId, num_blocks: int, seen: np.ndarray) -> int:
    """Return the expected bytes of padding in a group.

    A rank that holds nothing of a group has a storage of one byte, which counts as padding.
    """
    group = engine.group(name)
    if not seen.any() and seen.size == 1:
        return 1
    total = 0
    for layer in rank_layers(engine, rank, group):
        spec = group.spec.of_layer(layer)
        if spec.page_size_padded is not None:
            held = [(p, len(rank_units(engine, rank, p, group))) for p in spec.parts]
            real = sum(units * p.states * p.content_bytes for p, units in held)
            total += num_blocks * (spec.page_size_padded - real)
    return total
