"""Tests that each region of a cache lies in one memory, and no descriptor crosses a boundary."""

from __future__ import annotations

import pytest
from builders import engine, request
from hypothesis import example, given
from hypothesis import strategies as st

import kvspec
from kvspec import Memory, RankId
from tests.support.refused import refusal

LATENT = kvspec.MLAAttentionSpec(block_size=1, head_size=4, dtype="uint8")
ENGINE = engine(LATENT, layers=("a", "b"))


def region(layer: str, base: int, memory_type: str = "DRAM", device: int = 0) -> kvspec.Region:
    """Return a region of 16 bytes: 4 blocks of one row of 4 bytes."""
    return kvspec.Region(
        group="g", layer=layer, part="latent", base=base, num_blocks=4, block_stride=4,
        unit_stride=0, state_stride=0, content_bytes=4, units=1, states=1,
        memory_type=memory_type, device=device,
    )  # fmt: skip


def accepted(first: int, second: int, *memory: Memory, home: tuple[str, int] = ("DRAM", 0)) -> bool:
    """Return whether a cache with regions at two addresses is accepted in *memory*."""
    try:
        cache_at(first, second, *memory, home=home)
    except kvspec.SpecError:
        return False
    return True


def cache_at(
    first: int, second: int, *memory: Memory, home: tuple[str, int] = ("DRAM", 0)
) -> kvspec.RankCache:
    """Return the cache of two layers at two addresses."""
    regions = region("a", first, *home), region("b", second, *home)
    return kvspec.RankCache(ENGINE, RankId(), regions, memory)


HOMES = (("DRAM", 0), ("VRAM", 0), ("VRAM", 1))
MEMORIES = st.lists(
    st.builds(
        lambda address, length, home: Memory(address, length, *home),
        st.integers(0, 40), st.sampled_from((1, 4, 15, 16, 17, 32, 48)), st.sampled_from(HOMES),
    ),
    max_size=5,
)  # fmt: skip


def partly_overlap(first: Memory, second: Memory) -> bool:
    """Return whether two memories of one home share bytes, and neither contains the other."""
    a, b = (set(range(memory.address, memory.end)) for memory in (first, second))
    same = (first.memory_type, first.device) == (second.memory_type, second.device)
    return same and bool(a & b and a - b and b - a)


def contains(larger: Memory, smaller: Memory) -> bool:
    """Return whether a longer memory of the same home contains another memory."""
    same = (larger.memory_type, larger.device) == (smaller.memory_type, smaller.device)
    inside = larger.address <= smaller.address and smaller.end <= larger.end
    return same and inside and larger.length > smaller.length


@given(MEMORIES, st.integers(0, 40), st.integers(0, 40), st.sampled_from(HOMES))
@example([Memory(8, 40), Memory(10, 2)], 8, 32, HOMES[0])
@example([Memory(0, 4), Memory(0, 32), Memory(1, 4)], 0, 16, HOMES[0])
@example([Memory(8, 40), Memory(10, 2)], 8, 33, HOMES[0])
@example([Memory(9, 40)], 8, 32, HOMES[0])
@example([Memory(0, 24), Memory(8, 8), Memory(8, 40)], 4, 32, HOMES[0])
def test_cache_accepts_regions_only_inside_one_memory(
    memories: list[Memory], first: int, second: int, home: tuple[str, int]
) -> None:
    """The memory must have the type and the device of the region.

    Memories inside a larger memory may overlap in any way.
    """
    separate = abs(first - second) >= 16
    same_home = [memory for memory in memories if (memory.memory_type, memory.device) == home]
    inside = all(
        any(
            set(range(address, address + 16)) <= set(range(memory.address, memory.end))
            for memory in same_home
        )
        for address in (first, second)
    )
    outer = [
        memory for memory in memories if not any(contains(larger, memory) for larger in memories)
    ]
    torn = any(partly_overlap(a, b) for a in outer for b in outer)
    assert (separate and inside and not torn) == accepted(first, second, *memories, home=home)


@given(st.permutations([Memory(84, 16), Memory(100, 16), Memory(116, 16), Memory(102, 3)]))
def test_boundaries_are_addresses_where_two_memories_meet(memory: list[Memory]) -> None:
    """The order of the memories does not matter. An enclosed memory makes no boundary."""
    assert (100, 116) == cache_at(84, 100, *memory).boundaries


def test_boundaries_ignore_memories_around_them() -> None:
    """Host memory and memory of a second GPU have addresses around the boundary."""
    gpu = Memory(100, 16, "VRAM"), Memory(116, 16, "VRAM")
    for other in (Memory(90, 60), Memory(90, 60, "VRAM", 1), Memory(116, 16, "VRAM", 1)):
        cache = cache_at(100, 116, *gpu, other, home=("VRAM", 0))
        assert (116,) == cache.boundaries
    single = cache_at(100, 116, Memory(100, 32, "VRAM"), Memory(116, 16), home=("VRAM", 0))
    assert () == single.boundaries


def on_two_gpus(first: int, second: int) -> kvspec.RankCache:
    """Return a cache whose second layer is on another GPU."""
    memory = Memory(first, 16, "VRAM"), Memory(second, 16, "VRAM", 1)
    regions = region("a", first, "VRAM"), region("b", second, "VRAM", 1)
    return kvspec.RankCache(ENGINE, RankId(), regions, memory)


def test_descriptors_are_divided_where_memories_of_two_gpus_meet() -> None:
    """The layers touch in address, but each of them has its own device."""
    two, one = on_two_gpus(100, 116), cache_at(100, 116, Memory(100, 32, "VRAM"), home=HOMES[1])
    assert (116,) == two.boundaries == on_two_gpus(116, 100).boundaries
    plan = kvspec.plan_transfer(ENGINE, ENGINE)
    whole, begun = request(4, range(4), range(4)), request(1, [0], range(4))
    for pair in ((two, two), (two, one), (one, two)):
        table = kvspec.build_table(plan, *pair)
        assert [[100, 100, 16], [116, 116, 16]] == table.descriptors(whole).tolist()
    unwritten = kvspec.build_table(plan, one, two).unwritten_ranges(begun)
    assert [[104, 12], [120, 12]] == unwritten.tolist()


@pytest.mark.parametrize(("first", "second"), [(100, 100), (100, 115), (115, 100)])
def test_cache_rejects_equal_addresses_on_two_gpus(first: int, second: int) -> None:
    """A transfer identifies bytes by address. The later region is named."""
    error = refusal(lambda: on_two_gpus(first, second))
    layer = "a" if first > second else "b"
    assert (f"regions['{layer}.latent'].device", int(layer == "b")) == (error.field, error.value)
    both = Memory(100, 32), Memory(100, 32, "VRAM")
    regions = region("a", 100), region("b", 100, "VRAM")
    assert kvspec.RankCache(ENGINE, RankId(), regions, both).regions  # Host memory is another type.


def test_descriptors_are_divided_at_a_boundary() -> None:
    """The layers touch on both sides. Two GPU memories need two descriptors."""
    around = Memory(0, 1000)
    two = cache_at(
        100, 116, Memory(100, 16, "VRAM"), Memory(116, 16, "VRAM"), around, home=HOMES[1]
    )
    one = cache_at(100, 116, Memory(100, 32, "VRAM"), around, home=HOMES[1])
    plan = kvspec.plan_transfer(ENGINE, ENGINE)
    rows = [
        kvspec.build_table(plan, *pair).descriptors(request(4, range(4), range(4))).tolist()
        for pair in ((one, one), (two, one), (one, two))
    ]
    assert [[[100, 100, 32]], *[[[100, 100, 16], [116, 116, 16]]] * 2] == rows


def test_cache_rejects_memories_that_partly_overlap() -> None:
    """It would be unclear which of the two registrations a descriptor belongs to."""
    error = refusal(lambda: cache_at(100, 116, Memory(100, 20), Memory(116, 16)))
    assert ("memory", Memory(116, 16)) == (error.field, error.value)
