"""Facts that planted faults showed to be untested: one small test each."""

from __future__ import annotations

import attrs
import pytest

from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig, RankId, plan_memory
from kvspec.check import counting
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
