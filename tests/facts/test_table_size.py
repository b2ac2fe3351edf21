"""A table is not many times larger than one with a row for each token."""

from __future__ import annotations

from itertools import product

import pytest

import kvspec

TOKENS = 1024
# Rows of parts of a tile double the descriptors. Rows of 1, 4, 16, ... tiles add once for each.
MOST = 8


def engine(block: int, page_format: str, layout: str, tp: int) -> kvspec.EngineSpec:
    """Return an engine with two layers, and keys and values of 8 elements of 4 bytes."""
    spec = kvspec.FullAttentionSpec(
        block_size=block,
        total_num_kv_heads=4,
        head_size=8,
        dtype="float32",
        page_format=page_format,
    )
    group = kvspec.KVCacheGroup(name="full", layers=["a", "b"], spec=spec)
    parallel = kvspec.ParallelConfig(tp_size=tp)
    return kvspec.EngineSpec(groups=[group], parallel=parallel, layout=layout)


def most_descriptors(cache: kvspec.RankCache, heads: int, chunks: int) -> int:
    """Return the descriptors of all tokens if each chunk of each key and value had its own."""
    layers = cache.engine.groups[0].layers
    return MOST * len(layers) * TOKENS * heads * (chunks + 1)


@pytest.mark.parametrize("block", [1, 16, 64, 256])
@pytest.mark.parametrize("other", [1, 16, 64])
def test_a_table_of_any_block_sizes_is_not_much_larger_than_the_memory(
    block: int, other: int
) -> None:
    """With rows of all lengths, blocks of 64 and 1 had two thousand times as many descriptors."""
    formats = (("plain", "LBHNC"), ("plain", "LKBNHC"), ("keys-transposed", "LBKHNC"))
    for (form, layout), (other_form, other_layout), tp in product(formats, formats, (1, 4)):
        engines = engine(block, form, layout, tp), engine(other, other_form, other_layout, 4)
        sizes = TOKENS // block, TOKENS // other
        ranks = kvspec.RankId(), kvspec.RankId()
        (producer, _), (consumer, _) = (
            kvspec.allocate(one, rank, num_blocks=count)
            for one, rank, count in zip(engines, ranks, sizes, strict=True)
        )
        table = kvspec.build_table(kvspec.plan_transfer(*engines), producer, consumer)
        # Each pair of ranks moves one head. Transposed keys are cut into their 8 elements.
        chunks = 8 if "keys-transposed" in (form, other_form) else 1
        for rows, cache in ((table.producer_rows, producer), (table.consumer_rows, consumer)):
            assert int(rows[:, 4].sum()) <= most_descriptors(cache, 1, chunks)
