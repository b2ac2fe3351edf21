"""A cache's memories: every region lies inside one, and no descriptor over the boundary of two."""

from __future__ import annotations

import pytest
from builders import engine, request
from hypothesis import example, given
from hypothesis import strategies as st

import kvspec
from kvspec import Memory, RankId

LATENT = kvspec.MLAAttentionSpec(block_size=1, head_size=4, dtype="uint8")
ENGINE = engine(LATENT, layers=("a", "b"))


def region(layer: str, base: int, memory_type: str = "DRAM", device: int = 0) -> kvspec.Region:
    """Return a region of 16 bytes: 4 blocks of one row of 4."""
    return kvspec.Region(
        group="g", layer=layer, part="latent", base=base, num_blocks=4, block_stride=4,
        unit_stride=0, state_stride=0, content_bytes=4, units=1, states=1,
        memory_type=memory_type, device=device,
    )  # fmt: skip


def cache(one: int, other: int, *memory: Memory, home: tuple[str, int] = ("DRAM", 0)) -> bool:
    """Return whether regions at *one* and *other* are accepted in *memory*."""
    try:
        made(one, other, *memory, home=home)
    except kvspec.SpecError:
        return False
    return True


def made(
    one: int, other: int, *memory: Memory, home: tuple[str, int] = ("DRAM", 0)
) -> kvspec.RankCache:
    """Return the cache of two layers at *one* and *other*."""
    regions = region("a", one, *home), region("b", other, *home)
    return kvspec.RankCache(ENGINE, RankId(), regions, memory)


HOMES = (("DRAM", 0), ("VRAM", 0), ("VRAM", 1))
MEMORIES = st.lists(
    st.builds(
        lambda address, length, home: Memory(address, length, *home),
        st.integers(0, 40), st.sampled_from((1, 4, 15, 16, 17, 32, 48)), st.sampled_from(HOMES),
    ),
    max_size=5,
)  # fmt: skip


def partly(one: Memory, other: Memory) -> bool:
    """Whether two memories of one home share bytes, and neither holds all of the other."""
    a, b = (set(range(each.address, each.end)) for each in (one, other))
    same = (one.memory_type, one.device) == (other.memory_type, other.device)
    return same and bool(a & b and a - b and b - a)


def holds(one: Memory, other: Memory) -> bool:
    """Whether a longer memory of the same home has all of another's bytes."""
    same = (one.memory_type, one.device) == (other.memory_type, other.device)
    inside = one.address <= other.address and other.end <= one.end
    return same and inside and one.length > other.length


@given(MEMORIES, st.integers(0, 40), st.integers(0, 40), st.sampled_from(HOMES))
@example([Memory(8, 40), Memory(10, 2)], 8, 32, HOMES[0])
@example([Memory(0, 4), Memory(0, 32), Memory(1, 4)], 0, 16, HOMES[0])
@example([Memory(8, 40), Memory(10, 2)], 8, 33, HOMES[0])
@example([Memory(9, 40)], 8, 32, HOMES[0])
@example([Memory(0, 24), Memory(8, 8), Memory(8, 40)], 4, 32, HOMES[0])
def test_a_region_lies_inside_one_memory(
    memories: list[Memory], one: int, other: int, home: tuple[str, int]
) -> None:
    """It is accepted exactly if some memory of its type and device holds all of its bytes.

    Memories that another holds whole may overlap in any way.
    """
    separate = abs(one - other) >= 16
    own = [each for each in memories if (each.memory_type, each.device) == home]
    inside = all(
        any(set(range(at, at + 16)) <= set(range(each.address, each.end)) for each in own)
        for at in (one, other)
    )
    outer = [each for each in memories if not any(holds(larger, each) for larger in memories)]
    torn = any(partly(a, b) for a in outer for b in outer)
    assert (separate and inside and not torn) == cache(one, other, *memories, home=home)


@given(st.permutations([Memory(84, 16), Memory(100, 16), Memory(116, 16), Memory(102, 3)]))
def test_a_boundary_is_where_memories_of_one_device_meet(memory: list[Memory]) -> None:
    """Whatever else lies around, in whatever order; an enclosed memory makes none."""
    assert (100, 116) == made(84, 100, *memory).boundaries


def test_other_memory_neither_makes_nor_hides_a_boundary() -> None:
    """Host memory whose addresses lie around two GPU memories that meet; and a second GPU's."""
    gpu = Memory(100, 16, "VRAM"), Memory(116, 16, "VRAM")
    for other in (Memory(90, 60), Memory(90, 60, "VRAM", 1), Memory(116, 16, "VRAM", 1)):
        found = made(100, 116, *gpu, other, home=("VRAM", 0))
        assert (116,) == found.boundaries
    alone = made(100, 116, Memory(100, 32, "VRAM"), Memory(116, 16), home=("VRAM", 0))
    assert () == alone.boundaries


def test_no_descriptor_lies_over_a_boundary() -> None:
    """Both layers touch on both sides; where two GPU memories meet, they are two descriptors."""
    around = Memory(0, 1000)
    two = made(100, 116, Memory(100, 16, "VRAM"), Memory(116, 16, "VRAM"), around, home=HOMES[1])
    one = made(100, 116, Memory(100, 32, "VRAM"), around, home=HOMES[1])
    plan = kvspec.plan_transfer(ENGINE, ENGINE)
    rows = [
        kvspec.build_table(plan, *pair).descriptors(request(4, range(4), range(4))).tolist()
        for pair in ((one, one), (two, one), (one, two))
    ]
    assert [[[100, 100, 32]], *[[[100, 100, 16], [116, 116, 16]]] * 2] == rows


def test_memories_that_share_some_bytes_are_refused() -> None:
    """Two registrations that overlap are one allocation's; which one a descriptor is in differs."""
    with pytest.raises(kvspec.SpecError, match="memories that lie apart or one inside the other"):
        made(100, 116, Memory(100, 20), Memory(116, 16))
