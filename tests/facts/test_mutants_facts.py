"""Facts that planted faults showed to be untested: one small test each."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from kvspec import (
    BlockTable,
    EngineSpec,
    KVCacheGroup,
    MLAAttentionSpec,
    ParallelConfig,
    RankId,
    plan_memory,
)
from kvspec.check import counting
from kvspec.check.ownership import Owners
from kvspec.check.places import Places
from kvspec.engines import stages
from kvspec.ownership.stripes import WHOLE, times_held


@pytest.mark.parametrize("stripes", [2, 3, 4])
def test_times_held_is_two_if_blocks_are_held_more_often(stripes: int) -> None:
    """The caller counts a range at most twice."""
    assert times_held([WHOLE] * stripes) == 2


def test_representation_of_a_cache_leaves_out_the_owner() -> None:
    """The owner may be a list of tensors, whose text is long."""
    spec = MLAAttentionSpec(block_size=2, head_size=8, dtype="uint8")
    group = KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    engine = EngineSpec(groups=[group], parallel=ParallelConfig())
    cache = attrs.evolve(plan_memory(engine, RankId(), num_blocks=2), owner="tensors")
    assert "tensors" not in repr(cache)


@pytest.mark.parametrize("name", ["layer², part 3", "layers.07.attn", "mtp", "l٣"])
def test_first_number_of_a_layer_has_two_equal_readers(name: str) -> None:
    """A superscript is a digit for `str.isdigit`, but no number for `int`."""
    assert counting._number(name) == stages._number(name)


def places(table: BlockTable) -> Places:
    """Return the places of a request on a rank with 8 blocks of 4 tokens."""
    spec = MLAAttentionSpec(block_size=4, head_size=8, dtype="uint8")
    group = KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    engine = EngineSpec(groups=[group], parallel=ParallelConfig())
    return Places(Owners(engine), plan_memory(engine, RankId(), num_blocks=8), {"full": table})


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [(range(8, 12), [3]), (range(8, 13), [3, 5]), (range(11, 12), [3]), (range(12, 16), [5])],
)
def test_written_blocks_end_with_the_last_wanted_position(wanted: range, ids: list[int]) -> None:
    """A range that ends with a block does not write the next block."""
    side = places(BlockTable([3, 5], first_token=8))
    group = side.owners.engine.groups[0]
    assert side.written(group, group.spec.parts[0], wanted).tolist() == ids


def test_pool_contains_the_ids_below_its_number_of_blocks() -> None:
    """The first id beyond the pool is outside."""
    side = places(BlockTable([3]))
    group, region = side.owners.engine.groups[0], side.cache.regions[0]
    inside = side._in_pool(group, region, np.array([-1, 0, 7, 8]))
    assert inside.tolist() == [False, True, True, False]
