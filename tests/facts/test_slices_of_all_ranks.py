"""Test that the slices of all ranks together are the copies of the plan, byte for byte."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from builders import engine, gqa, request
from moved import allocated, memory

import kvspec
from kvspec.testing.world import described

BLOCKS, TOKENS = {"full": [3, 0, 2]}, 48
SIZES = [
    (heads, *tp) for heads in (1, 2, 4, 5) for tp in product((1, 2, 3, 8), repeat=2)
]  # KV heads, producer TP, consumer TP


def arrays(caches: Any) -> dict[int, np.ndarray[Any, Any]]:
    """Return the one tensor of each rank with axes block, head, token, byte: layout LBHNC."""
    views = {}
    for rank, cache in caches.items():
        (flat,) = memory(cache).values()
        region = cache.regions[0]
        views[rank.tp] = flat.reshape(region.num_blocks, region.units, 16, -1)
    return views


@pytest.mark.parametrize(("heads", "producer_tp", "consumer_tp"), SIZES)
def test_union_of_slices_moves_the_bytes_of_the_plan(
    heads: int, producer_tp: int, consumer_tp: int
) -> None:
    """One engine is filled by views of slices, an equal one by the descriptors of the plan."""
    spec, kept = gqa(heads), []  # type: ignore[var-annotated]
    group = kvspec.KVCacheGroup(name="full", layers=["l"], spec=spec)
    sides = [engine(group, tp=size) for size in (producer_tp, consumer_tp)]
    sources, targets = (allocated(side, BLOCKS, kept) for side in sides)
    there, here = arrays(sources), arrays(targets)
    for tp, array in there.items():
        array[:] = np.random.default_rng(tp).integers(0, 256, array.shape)

    sliced = {tp: np.zeros_like(array) for tp, array in here.items()}
    for tp, own in sliced.items():
        for part in spec.get_tp_transfer_slices(tp, consumer_tp, producer_tp):
            own[:, part.local_slice] = there[part.remote_rank][:, part.remote_slice]

    plan = kvspec.plan_transfer(*sides)
    transfer = request(TOKENS, BLOCKS, BLOCKS)
    for rank, cache in targets.items():
        here[rank.tp][:] = 0
        for source in plan.sources(rank):
            table = kvspec.build_table(plan, sources[source], cache)
            for start, stop, length in described(table, transfer):
                copy(memory(sources[source]), start, memory(cache), stop, length)
    for tp, array in here.items():
        assert np.array_equal(array[BLOCKS["full"]], sliced[tp][BLOCKS["full"]])
        assert array[BLOCKS["full"]].any()


def copy(source: Any, start: int, target: Any, stop: int, length: int) -> None:
    """Copy bytes between two memories, each a mapping of one address to its bytes."""
    ((source_base, sent),) = source.items()
    ((target_base, held),) = target.items()
    at, to = start - int(source_base, 16), stop - int(target_base, 16)
    held[to : to + length] = sent[at : at + length]
