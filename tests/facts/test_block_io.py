"""The I/O size of one block, against the table published with vLLM's pull request #30207.

Two layouts: each K or V plane of each layer apart (LKBHNC), and all layers of a block side by side
(BLKHNC, "cross-layer blocks"). The table gives KB and MB; they are KiB and MiB, the latter rounded
to two decimals, a tie towards zero (0.875 is given as 0.87, 0.4375 as 0.44). Blocks of 16 tokens
in bfloat16 unless a row says otherwise.
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
    ("Qwen3-8B", 1, 16, 32, "2.25"),  # see the last test: the table says otherwise
]
NUM_BLOCKS = 3


def mib(size: int) -> Decimal:
    """Return *size* bytes in MiB as the table rounds them."""
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
    """Return the bytes of one plane of one block, and of all layers of a block, by the parts."""
    (group,) = models.from_config(catalogue.config(name), block_size=block_size)
    page = group.spec.page_size_bytes(tp_rank=0, tp_size=tp_size)
    return page // len(group.spec.parts), page * len(group.layers)


@pytest.mark.parametrize(("name", "tp_size", "block_size", "plane", "block"), FACTS)
def test_parts_have_the_published_sizes(
    name: str, tp_size: int, block_size: int, plane: int, block: str
) -> None:
    """One plane of one layer, and all layers, of one block on one rank."""
    plane_bytes, block_bytes = plane_and_block(name, tp_size, block_size)
    assert plane * 2**10 == plane_bytes
    assert Decimal(block) == mib(block_bytes)


@pytest.mark.parametrize(("name", "tp_size", "block_size", "plane", "block"), FACTS)
def test_planes_of_blocks_lie_apart_in_lkbhnc(
    name: str, tp_size: int, block_size: int, plane: int, block: str
) -> None:
    """A block of a plane is contiguous there, so the block stride is its I/O size."""
    found = regions(name, tp_size, block_size, "LKBHNC")
    assert {plane * 2**10} == {each.block_stride for each in found}
    whole = {each.units * each.states * each.content_bytes for each in found}
    assert {plane * 2**10} == whole
    assert Decimal(block) == mib(sum(each.block_stride for each in found))


@pytest.mark.parametrize(("name", "tp_size", "block_size", "plane", "block"), FACTS)
def test_layers_of_a_block_lie_together_in_blkhnc(
    name: str, tp_size: int, block_size: int, plane: int, block: str
) -> None:
    """The block stride spans all layers and planes, each where the one before it ends."""
    found = regions(name, tp_size, block_size, "BLKHNC")
    (stride,) = {each.block_stride for each in found}
    assert Decimal(block) == mib(stride)
    bases = sorted(each.base for each in found)
    assert [bases[0] + i * plane * 2**10 for i in range(len(found))] == bases
    assert stride == len(found) * plane * 2**10


def test_the_tables_qwen3_8b_contradicts_its_published_config() -> None:
    """The table says 28 KB and 1.97 MB, which is 7 KV heads; the model has 8: 32 KB, 2.25 MB."""
    config = catalogue.config("Qwen3-8B")
    assert (36, 8) == (config["num_hidden_layers"], config["num_key_value_heads"])
    plane, block = plane_and_block("Qwen3-8B", 1, 16)
    assert (32 * 2**10, Decimal("2.25")) == (plane, mib(block))
    assert (28 * 2**10, Decimal("1.97")) == (plane * 7 // 8, mib(block * 7 // 8))
