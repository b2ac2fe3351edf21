"""Test the I/O size of one block against the table published with vLLM's pull request #30207.

There are two layouts. In LKBHNC each K or V plane of each layer is separate. In BLKHNC all layers
of a block are adjacent ("cross-layer blocks"). The table's KB and MB are KiB and MiB. Its MiB are
rounded to two decimals, and a tie is rounded down: 0.875 is printed as 0.87, 0.4375 as 0.44.
Blocks have 16 tokens in bfloat16 unless a row has another size.
"""

from __future__ import annotations

from decimal import ROUND_HALF_DOWN, Decimal

import pytest

import kvspec
from kvspec import models
from kvspec.models import catalogue

FACTS = [
    # model, TP size, block size, KB of a plane, MB of all layers
    ("DeepSeek-R1-Distill-Qwen-32B", 2, 16, 16, "2"),
    ("DeepSeek-V2-Lite-Chat", 1, 64, 72, "1.9"),
    ("Llama-3.1-8B", 1, 16, 32, "2"),
    ("Llama-3.2-1B", 1, 16, 16, "0.5"),
    ("Llama-3.1-70B", 4, 16, 8, "1.25"),  # the table names no TP size; 4 gives its numbers
    ("Mistral-7B-v0.2", 1, 16, 32, "2"),
    ("Mistral-Small-24B-2501", 1, 16, 32, "2.5"),
    ("Qwen2.5-1.5B", 1, 16, 8, "0.44"),
    ("Qwen2.5-3B", 1, 16, 8, "0.56"),
    ("Qwen2.5-7B", 1, 16, 16, "0.87"),
    ("Qwen3-0.6B", 1, 16, 32, "1.75"),
    ("Qwen3-1.7B", 1, 16, 32, "1.75"),
    ("Qwen3-4B-2507", 1, 16, 32, "2.25"),
    ("Qwen3-32B", 2, 16, 16, "2"),
    ("Qwen3-8B", 1, 16, 32, "2.25"),  # the table differs: see the last test
]
NUM_BLOCKS = 3


def mib(size: int) -> Decimal:
    """Return *size* bytes in MiB, rounded as in the table."""
    return (Decimal(size) / 2**20).quantize(Decimal("0.01"), ROUND_HALF_DOWN)


def regions(name: str, tp_size: int, block_size: int, layout: str) -> tuple[kvspec.Region, ...]:
    """Return the regions of the model's last rank in *layout*."""
    engine = kvspec.EngineSpec(
        groups=models.from_config(catalogue.config(name), block_size=block_size),
        parallel=kvspec.ParallelConfig(tp_size=tp_size),
        layout=layout,
    )
    cache, _ = kvspec.allocate(engine, engine.parallel.ranks[-1], NUM_BLOCKS)
    return cache.regions


def plane_and_block(name: str, tp_size: int, block_size: int) -> tuple[int, int]:
    """Return the bytes of one plane of one block, and of all layers of one block."""
    (group,) = models.from_config(catalogue.config(name), block_size=block_size)
    page = group.spec.page_size_bytes(tp_rank=0, tp_size=tp_size)
    return page // len(group.spec.parts), page * len(group.layers)


@pytest.mark.parametrize(("name", "tp_size", "block_size", "plane", "block"), FACTS)
def test_page_sizes_equal_published_sizes(
    name: str, tp_size: int, block_size: int, plane: int, block: str
) -> None:
    """The sizes are those of one block on one rank: one plane of one layer, and all layers."""
    plane_bytes, block_bytes = plane_and_block(name, tp_size, block_size)
    assert plane * 2**10 == plane_bytes
    assert Decimal(block) == mib(block_bytes)


@pytest.mark.parametrize(("name", "tp_size", "block_size", "plane", "block"), FACTS)
def test_block_stride_in_lkbhnc_is_one_plane(
    name: str, tp_size: int, block_size: int, plane: int, block: str
) -> None:
    """A block of a plane is contiguous, so the block stride is its I/O size."""
    planes = regions(name, tp_size, block_size, "LKBHNC")
    assert {plane * 2**10} == {region.block_stride for region in planes}
    sizes = {region.units * region.states * region.content_bytes for region in planes}
    assert {plane * 2**10} == sizes
    assert Decimal(block) == mib(sum(region.block_stride for region in planes))


@pytest.mark.parametrize(("name", "tp_size", "block_size", "plane", "block"), FACTS)
def test_block_stride_in_blkhnc_is_all_layers(
    name: str, tp_size: int, block_size: int, plane: int, block: str
) -> None:
    """The planes of all layers are adjacent in a block."""
    planes = regions(name, tp_size, block_size, "BLKHNC")
    (stride,) = {region.block_stride for region in planes}
    assert Decimal(block) == mib(stride)
    bases = sorted(region.base for region in planes)
    assert [bases[0] + i * plane * 2**10 for i in range(len(planes))] == bases
    assert stride == len(planes) * plane * 2**10


def test_published_sizes_of_qwen3_8b_are_those_of_seven_heads() -> None:
    """The table has 28 KB and 1.97 MB: 7 KV heads. The model has 8: 32 KB and 2.25 MB."""
    config = catalogue.config("Qwen3-8B")
    assert (36, 8) == (config["num_hidden_layers"], config["num_key_value_heads"])
    plane, block = plane_and_block("Qwen3-8B", 1, 16)
    assert (32 * 2**10, Decimal("2.25")) == (plane, mib(block))
    assert (28 * 2**10, Decimal("1.97")) == (plane * 7 // 8, mib(block * 7 // 8))
