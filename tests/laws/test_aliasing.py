"""Tests that a cache is accepted only if no two of its contents share a byte."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import attrs
import builders
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvspec
from kvspec import RankId
from kvspec.descriptors.table import sharing
from kvspec.memory.aliasing import meetings
from kvspec.testing import strategies
from tests.support.refused import refusal

pytestmark = pytest.mark.uncovered

BLOCK, HEADS, SIZE = 2, 2, 2
SPEC = builders.gqa(HEADS, block_size=BLOCK, head_size=SIZE, head_size_v=1, dtype="uint8")
MEMORY = kvspec.Memory(0, 2**40)


def engine(groups: int, kernel: int | None = None) -> kvspec.EngineSpec:
    """Return an engine of *groups* groups of one layer. The last group has kernel blocks."""
    members = [builders.group(SPEC, name, name=name) for name in "abc"[:groups]]
    members[-1] = attrs.evolve(members[-1], kernel_block_size=kernel)
    return builders.engine(*members)


def content(region: kvspec.Region, block: int) -> Iterator[int]:
    """Yield the addresses of one block in memory, once for each content that contains them."""
    for unit, row in product(range(region.units), range(region.states)):
        start = region.address(block, unit, row)
        yield from range(start, start + region.content_bytes)


def nested(region: kvspec.Region) -> bool:
    """Return whether each stride covers everything that the smaller strides reach."""
    reach = region.content_bytes
    axes = [(region.block_stride, region.num_blocks), (region.unit_stride, region.units),
            (region.state_stride, region.states)]  # fmt: skip
    for stride, count in sorted(axis for axis in axes if axis[1] > 1):
        if stride < reach:
            return False
        reach += stride * (count - 1)
    return True


def separate(cache_engine: kvspec.EngineSpec, regions: list[kvspec.Region]) -> bool:
    """Return whether bytes are shared only by block i of one group and block i of another."""
    kernel_blocks_per_block = {
        group.name: group.kernel_blocks_per_block for group in cache_engine.groups
    }
    contents: dict[str, Counter[int]] = {}
    blocks: dict[tuple[str, int], set[int]] = {}
    for region in regions:
        for block in range(region.num_blocks):
            addresses = list(content(region, block))
            contents.setdefault(region.group, Counter()).update(addresses)
            key = region.group, block // kernel_blocks_per_block[region.group]
            blocks.setdefault(key, set()).update(addresses)
    if any(count > 1 for counts in contents.values() for count in counts.values()):
        return False
    return not any(
        first[0] != second[0] and first[1] != second[1] and blocks[first] & blocks[second]
        for first, second in combinations(blocks, 2)
    )


def sharing_pairs(regions: list[kvspec.Region]) -> set[frozenset[str]]:
    """Return each pair of groups that have a byte in common."""
    groups: dict[str, set[int]] = {}
    for region in regions:
        for block in range(region.num_blocks):
            groups.setdefault(region.group, set()).update(content(region, block))
    return {
        frozenset(pair) for pair in combinations(groups, 2) if groups[pair[0]] & groups[pair[1]]
    }


def same_strides(
    cache_engine: kvspec.EngineSpec, first: kvspec.Region, second: kvspec.Region
) -> bool:
    """Return whether two regions repeat equally: blocks of a table, units and rows."""
    axes = []
    for region in (first, second):
        kernel_blocks_per_block = cache_engine.group(region.group).kernel_blocks_per_block
        count = region.num_blocks // kernel_blocks_per_block
        block_stride = region.block_stride * kernel_blocks_per_block if count > 1 else 0
        axes.append((count, block_stride, region.unit_stride, region.state_stride))
    return axes[0] == axes[1]


Strides = tuple[int, int, int, int]

STRIDES = st.sampled_from((0, 1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 18, 24, 36, 48))
ANY_STRIDES = st.tuples(STRIDES, STRIDES, STRIDES, st.sampled_from((1, 2, 3, 4)))


@st.composite
def exchanged_strides(draw: st.DrawFn) -> Strides:
    """Draw block, unit and row stride from one set of nested strides, in any order.

    Each axis counts two, so that two groups with different orders may fill the same memory.
    """
    block, unit, row = draw(st.permutations((3, 6, 12)))
    return block, unit, row, 2


@st.composite
def regions(draw: st.DrawFn, cache_engine: kvspec.EngineSpec) -> list[kvspec.Region]:
    """Draw the regions of *cache_engine* at near addresses, often with common strides."""
    drawn = []
    common = draw(ANY_STRIDES)
    # Groups whose axes are exchanged share whole blocks only if their parts lie side by side.
    side_by_side = draw(st.booleans())
    for group in cache_engine.groups:
        exchanged = draw(exchanged_strides())
        base = draw(st.sampled_from((0, 3, 24)))
        for part in group.in_memory(group.layers[0]).parts:
            if side_by_side:
                strides = exchanged
            else:
                strides = draw(ANY_STRIDES) if draw(st.booleans()) else common
                base = draw(st.integers(0, 60))
            block, unit, row, count = strides
            drawn.append(
                kvspec.Region(
                    group=group.name, layer=group.layers[0], part=part.name,
                    base=base, num_blocks=count * group.kernel_blocks_per_block,
                    block_stride=block, unit_stride=unit, state_stride=row,
                    content_bytes=part.content_bytes, units=HEADS, states=part.states,
                )
            )  # fmt: skip
            base += part.content_bytes
    return drawn


@given(st.data(), st.integers(1, 3), st.sampled_from((None, None, 1)))
@settings(max_examples=20 * settings.default.max_examples)
def test_rank_cache_accepts_regions_only_if_no_byte_is_shared(
    data: st.DataObject, groups: int, kernel: int | None
) -> None:
    """The cache may reject separate regions only if they do not nest or their strides differ."""
    cache_engine = engine(groups, kernel)
    drawn = data.draw(regions(cache_engine))
    try:
        kvspec.RankCache(cache_engine, RankId(), drawn, (MEMORY,))
    except kvspec.SpecError:
        if not separate(cache_engine, drawn) or not all(map(nested, drawn)):
            return
        overlapping = [
            (first, second)
            for first, second in combinations(drawn, 2)
            if {byte for block in range(first.num_blocks) for byte in content(first, block)}
            & {byte for block in range(second.num_blocks) for byte in content(second, block)}
        ]
        assert any(not same_strides(cache_engine, *pair) for pair in overlapping)
    else:
        assert separate(cache_engine, drawn)
        assert sharing_pairs(drawn) == {
            frozenset(pair)
            for groups in sharing(kvspec.RankCache(cache_engine, RankId(), drawn, (MEMORY,)))
            for pair in combinations(groups, 2)
        }


def region(part: str, **fields: int) -> kvspec.Region:
    """Return a region of layer a: keys of two bytes or values of one, with *fields* replaced."""
    size = {"k": SIZE, "v": 1}[part]
    base: dict[str, Any] = {
        "group": "a", "layer": "a", "part": part, "base": 0, "num_blocks": 3, "block_stride": 12,
        "unit_stride": 6, "state_stride": 3, "content_bytes": size, "units": HEADS,
        "states": BLOCK,
    }  # fmt: skip
    return kvspec.Region(**base | fields)


def of_group(name: str, *group_regions: kvspec.Region) -> list[kvspec.Region]:
    """Return the regions as regions of the only layer of group *name*."""
    return [attrs.evolve(member, group=name, layer=name) for member in group_regions]


def rejected_pair(cache_engine: kvspec.EngineSpec, regions: list[kvspec.Region]) -> str:
    """Return the pair of parts that the error names when the cache rejects *regions*."""
    error = refusal(lambda: kvspec.RankCache(cache_engine, RankId(), regions, (MEMORY,)))
    assert error.field == "tensors"
    return str(error.value)


GOOD = (region("k"), region("v", base=2))


def cache_of(*members: kvspec.Region) -> kvspec.RankCache:
    """Return a cache of one group with these regions."""
    return kvspec.RankCache(engine(1), RankId(), members, (MEMORY,))


@pytest.mark.parametrize(
    "members",
    [
        GOOD,
        # Heads outermost: the keys of 3 blocks, then the values of 3 blocks. The block strides
        # differ, and the regions interleave.
        (region("k", unit_stride=18, block_stride=4, state_stride=2),
         region("v", base=12, unit_stride=18, block_stride=2, state_stride=1)),
        # The values lie in the gaps between the rows of the keys.
        (region("k", block_stride=40, unit_stride=20, state_stride=10),
         region("v", base=2, block_stride=1, unit_stride=20, state_stride=40)),
    ],
)  # fmt: skip
def test_rank_cache_accepts_interleaved_regions_with_different_strides(
    members: tuple[kvspec.Region, ...],
) -> None:
    """Regions may interleave if each byte belongs to one content."""
    assert separate(engine(1), list(members))
    assert 2 == len(cache_of(*members).regions)


def test_rank_cache_accepts_equal_blocks_beside_regions_of_other_strides() -> None:
    """The values compare the keys of both groups block by block, which coincide."""
    keys = region("k", base=6, num_blocks=2, unit_stride=2, state_stride=16)
    first = [keys, region("v", num_blocks=1, block_stride=0, unit_stride=3, state_stride=12)]
    second = [keys, region("v", base=1, num_blocks=1, block_stride=0, unit_stride=1)]
    regions = [*of_group("a", *first), *of_group("b", *second)]
    assert separate(engine(2), regions)
    kvspec.RankCache(engine(2), RankId(), regions, (MEMORY,))
    shifted = [*regions[:2], attrs.evolve(regions[2], base=18), regions[3]]
    assert not separate(engine(2), shifted)
    with pytest.raises(kvspec.SpecError, match="coincide or lie apart"):
        kvspec.RankCache(engine(2), RankId(), shifted, (MEMORY,))


@pytest.mark.parametrize(
    "members",
    [
        (GOOD[0], region("v")),  # The values lie on the keys.
        (region("k", unit_stride=0), GOOD[1]),
        (region("k", block_stride=0), GOOD[1]),
        (region("k", state_stride=0), GOOD[1]),
        (GOOD[0], region("v", base=1)),  # One byte too early.
        (GOOD[0], region("v", base=3)),  # One byte too late.
    ],
)
def test_rank_cache_rejects_overlapping_regions_of_one_group(
    members: tuple[kvspec.Region, ...],
) -> None:
    """A byte of one group belongs to one content."""
    assert not separate(engine(1), list(members))
    assert rejected_pair(engine(1), list(members)) in {"a.k and a.k", "a.k and a.v"}


def test_rank_cache_rejects_regions_with_too_many_blocks_to_compare() -> None:
    """A hundred thousand blocks of two strides are assumed to share bytes."""
    many = {"num_blocks": 100_000, "unit_stride": 2, "state_stride": 4}
    keys = region("k", block_stride=100, **many)
    values = region("v", base=8, block_stride=200, num_blocks=50_000, unit_stride=1, state_stride=2)
    assert 2 == len(cache_of(attrs.evolve(keys, num_blocks=10), values).regions)
    assert "a.k and a.v" == rejected_pair(engine(1), [keys, values])


@pytest.mark.parametrize("blocks", [2**16, 2**16 + 1, 10**5])
def test_rank_cache_rejects_groups_with_too_many_blocks_to_compare(blocks: int) -> None:
    """Blocks of 12 and of 10 bytes share bytes, whether they are compared or not."""
    groups = [
        kvspec.KVCacheGroup(
            name=name,
            layers=[f"{name}.0"],
            spec=kvspec.MLAAttentionSpec(
                block_size=1, head_size=8, dtype="uint8", page_size_padded=page
            ),
        )
        for name, page in (("a", 12), ("b", 10))
    ]
    both = kvspec.EngineSpec(groups=groups)
    planned = kvspec.plan_memory(both, RankId(), num_blocks=blocks)
    at_zero = [attrs.evolve(each, base=0) for each in planned.regions]
    memory = (kvspec.Memory(0, 12 * blocks),)
    error = refusal(lambda: kvspec.RankCache(both, RankId(), at_zero, memory))
    assert ("tensors", "a.0.latent and b.0.latent") == (error.field, error.value)


@pytest.mark.parametrize("step", [1, -1])
def test_rank_cache_rejects_groups_whose_blocks_and_heads_are_exchanged(step: int) -> None:
    """Block 0, head 1 of group a lies at address 4. So does block 1, head 0 of group b."""
    parts = {"v": 2, "k": 0}
    blocks_outermost = {"num_blocks": 2, "block_stride": 40, "unit_stride": 4, "state_stride": 8}
    heads_outermost = {"num_blocks": 2, "block_stride": 4, "unit_stride": 40, "state_stride": 8}
    first = [region(part, base=base, **blocks_outermost) for part, base in parts.items()]
    second = [region(part, base=base, **heads_outermost) for part, base in parts.items()]
    same = [*of_group("a", *first), *of_group("b", *first)]
    assert 4 == len(kvspec.RankCache(engine(2), RankId(), same, (MEMORY,)).regions)
    exchanged = [*of_group("a", *first), *of_group("b", *second)][::step]
    assert not separate(engine(2), exchanged)
    assert set("ab") == set(re.findall(r"\b[ab]\b", rejected_pair(engine(2), exchanged)))


def test_rank_cache_compares_groups_with_the_widest_region_of_a_page() -> None:
    """Groups b and c lie side by side in a page of group a. Block i of c lies in a's block i+1."""
    cache_engine = engine(3)
    wide = {"unit_stride": 8, "state_stride": 4, "block_stride": 16}
    side_by_side = [region("k", **wide), region("v", base=2, **wide)]
    same = [member for name in "abc" for member in of_group(name, *side_by_side)]
    assert 6 == len(kvspec.RankCache(cache_engine, RankId(), same, (MEMORY,)).regions)
    first = of_group(
        "a",
        region("k", block_stride=16, unit_stride=4, state_stride=2),
        region("v", base=8, block_stride=16, unit_stride=2, state_stride=1),
    )
    second = of_group("b", region("k", **wide), region("v", base=3, **wide))
    third = of_group("c", region("k", base=16, **wide), region("v", base=16 + 2, **wide))
    pair = rejected_pair(cache_engine, [*first, *second, *third])
    assert 2 == len(set(re.findall(r"\b[abc]\b", pair)))


def side_by_side(*bases: int) -> list[kvspec.Region]:
    """Return groups a, b and c of one block of 16 bytes each, at these addresses."""
    return [
        member
        for name, base in zip("abc", bases, strict=False)
        for member in of_group(
            name,
            region("k", base=base, num_blocks=1, block_stride=0, unit_stride=8, state_stride=4),
            region("v", base=base + 2, num_blocks=1, block_stride=0, unit_stride=8, state_stride=4),
        )
    ]


def test_groups_that_share_memory_only_with_a_third_one_are_in_two_sets() -> None:
    """The second half of a lies on the first half of b, and the second half of b on that of c."""
    cache = kvspec.RankCache(engine(3), RankId(), side_by_side(0, 8, 16), (MEMORY,))
    assert (frozenset("ab"), frozenset("bc")) == sharing(cache)
    assert 3 == len({member.group for member in cache.regions})


@given(strategies.cases() | strategies.sharing_cases())
def test_plan_memory_separates_regions_of_every_layout(case: strategies.Case) -> None:
    """Only groups that share memory by design share bytes, and only in blocks with the same id."""
    for side, pool in ((case.producer, case.producer_pool), (case.consumer, case.consumer_pool)):
        for rank in side.parallel.ranks:
            cache = kvspec.plan_memory(side, rank, pool, shared=case.shared)
            kernel_blocks_per_block = {
                group.name: group.kernel_blocks_per_block for group in side.groups
            }
            for first, second, same_blocks in meetings(cache.regions, kernel_blocks_per_block):
                assert case.shared
                assert first.group != second.group
                assert same_blocks
