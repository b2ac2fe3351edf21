"""What regions share is counted byte by byte, and a cache is accepted where that allows it."""

from __future__ import annotations

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
from kvspec.memory.aliasing import meetings
from kvspec.testing import strategies

BLOCK, HEADS, SIZE = 2, 2, 2
SPEC = builders.gqa(HEADS, block_size=BLOCK, head_size=SIZE, head_size_v=1, dtype="uint8")
MEMORY = kvspec.Memory(0, 2**40)


def engine(groups: int, kernel: int | None = None) -> kvspec.EngineSpec:
    """Return an engine of so many groups of one layer, the last of them in kernel blocks."""
    found = [builders.group(SPEC, name, name=name) for name in "abc"[:groups]]
    found[-1] = attrs.evolve(found[-1], kernel_block_size=kernel)
    return builders.engine(*found)


def content(region: kvspec.Region, block: int) -> Iterator[int]:
    """Yield the addresses of one block in memory, each as often as a content has it."""
    for unit, row in product(range(region.units), range(region.states)):
        at = region.address(block, unit, row)
        yield from range(at, at + region.content_bytes)


def nested(region: kvspec.Region) -> bool:
    """Whether each stride steps over what the smaller ones reach: anything else is refused."""
    reach = region.content_bytes
    strides = [(region.block_stride, region.num_blocks), (region.unit_stride, region.units),
               (region.state_stride, region.states)]  # fmt: skip
    for stride, count in sorted(each for each in strides if each[1] > 1):
        if stride < reach:
            return False
        reach += stride * (count - 1)
    return True


def right(cache_engine: kvspec.EngineSpec, regions: list[kvspec.Region]) -> bool:
    """Whether no byte belongs to two contents, but block i of one group and of another."""
    kernel_blocks_per_block = {
        group.name: group.kernel_blocks_per_block for group in cache_engine.groups
    }
    own: dict[str, Counter[int]] = {}
    blocks: dict[tuple[str, int], set[int]] = {}
    for region in regions:
        for block in range(region.num_blocks):
            addresses = list(content(region, block))
            own.setdefault(region.group, Counter()).update(addresses)
            key = region.group, block // kernel_blocks_per_block[region.group]
            blocks.setdefault(key, set()).update(addresses)
    if any(count > 1 for each in own.values() for count in each.values()):
        return False
    return not any(
        one[0] != other[0] and one[1] != other[1] and blocks[one] & blocks[other]
        for one, other in combinations(blocks, 2)
    )


def same_blocks(cache_engine: kvspec.EngineSpec, one: kvspec.Region, other: kvspec.Region) -> bool:
    """Whether two regions have as many blocks of a table, as far apart."""
    tables = []
    for region in (one, other):
        kernel_blocks_per_block = cache_engine.group(region.group).kernel_blocks_per_block
        count = region.num_blocks // kernel_blocks_per_block
        tables.append((count, region.block_stride * kernel_blocks_per_block if count > 1 else 0))
    return tables[0] == tables[1]


STRIDES = st.sampled_from((0, 1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 18, 24, 36, 48))


@st.composite
def regions(draw: st.DrawFn, where: kvspec.EngineSpec) -> list[kvspec.Region]:
    """Draw the regions of *where* anywhere, near each other; often with one set of strides."""
    found = []
    common = draw(st.tuples(STRIDES, STRIDES, STRIDES, st.sampled_from((1, 2, 3, 4))))
    for group in where.groups:
        for part in group.in_memory(group.layers[0]).parts:
            own = draw(st.booleans()) and draw(
                st.tuples(STRIDES, STRIDES, STRIDES, st.sampled_from((1, 2, 3, 4)))
            )
            block, unit, row, count = own or common
            found.append(
                kvspec.Region(
                    group=group.name, layer=group.layers[0], part=part.name,
                    base=draw(st.integers(0, 60)), num_blocks=count * group.kernel_blocks_per_block,
                    block_stride=block, unit_stride=unit, state_stride=row,
                    content_bytes=part.content_bytes, units=HEADS, states=part.states,
                )
            )  # fmt: skip
    return found


@given(st.data(), st.integers(1, 3), st.sampled_from((None, None, 1)))
@settings(max_examples=20 * settings.default.max_examples)
def test_a_cache_is_accepted_where_no_byte_is_shared(
    data: st.DataObject, groups: int, kernel: int | None
) -> None:
    """By hand, anywhere: a cache is refused exactly if two contents share a byte.

    But for regions that do not nest, and groups whose blocks differ and share any byte.
    """
    where = engine(groups, kernel)
    found = data.draw(regions(where))
    try:
        kvspec.RankCache(where, RankId(), found, (MEMORY,))
    except kvspec.SpecError:
        if not right(where, found) or not all(map(nested, found)):
            return
        shared = [
            (one, other)
            for one, other in combinations(found, 2)
            if {at for block in range(one.num_blocks) for at in content(one, block)}
            & {at for block in range(other.num_blocks) for at in content(other, block)}
        ]
        assert any(
            not same_blocks(where, *pair) or pair[0].group != pair[1].group for pair in shared
        )
    else:
        assert right(where, found)


def region(part: str, **fields: int) -> kvspec.Region:
    """Return a region of layer a: keys of two bytes, values of one, unless said."""
    size = {"k": SIZE, "v": 1}[part]
    base: dict[str, Any] = {
        "group": "a", "layer": "a", "part": part, "base": 0, "num_blocks": 3, "block_stride": 12,
        "unit_stride": 6, "state_stride": 3, "content_bytes": size, "units": HEADS,
        "states": BLOCK,
    }  # fmt: skip
    return kvspec.Region(**base | fields)


GOOD = (region("k"), region("v", base=2))


def made(*found: kvspec.Region) -> kvspec.RankCache:
    """Return a cache made by hand."""
    return kvspec.RankCache(engine(1), RankId(), found, (MEMORY,))


@pytest.mark.parametrize(
    "found",
    [
        GOOD,
        # heads outermost, keys of 3 blocks and then values of 3: other block strides, interleaved
        (region("k", unit_stride=18, block_stride=4, state_stride=2),
         region("v", base=12, unit_stride=18, block_stride=2, state_stride=1)),
        # values in what the keys' rows leave free, 3 blocks to the keys' one
        (region("k", block_stride=40, unit_stride=20, state_stride=10),
         region("v", base=2, block_stride=1, unit_stride=20, state_stride=40)),
    ],
)  # fmt: skip
def test_interleaved_regions_are_accepted(found: tuple[kvspec.Region, ...]) -> None:
    """Keys and values of other sizes, whose blocks have other strides, share no byte."""
    assert right(engine(1), list(found))
    assert 2 == len(made(*found).regions)


@pytest.mark.parametrize(
    "found",
    [
        (GOOD[0], region("v")),  # values over keys
        (region("k", unit_stride=0), GOOD[1]),
        (region("k", block_stride=0), GOOD[1]),
        (region("k", state_stride=0), GOOD[1]),
        (GOOD[0], region("v", base=1)),  # one byte too early
        (GOOD[0], region("v", base=3)),  # one byte too late
    ],
)
def test_regions_made_by_hand_may_not_overlap(found: tuple[kvspec.Region, ...]) -> None:
    """A cache made by hand obeys what one read from tensors does."""
    assert not right(engine(1), list(found))
    with pytest.raises(kvspec.SpecError, match="regions of one group that do not overlap"):
        made(*found)


def test_more_than_can_be_compared_is_refused() -> None:
    """Blocks of two strides, a hundred thousand of each, are taken to meet where they may."""
    many = {"num_blocks": 100_000, "unit_stride": 2, "state_stride": 4}
    keys = region("k", block_stride=100, **many)
    values = region("v", base=8, block_stride=200, num_blocks=50_000, unit_stride=1, state_stride=2)
    assert 2 == len(made(attrs.evolve(keys, num_blocks=10), values).regions)
    with pytest.raises(kvspec.SpecError, match="do not overlap"):
        made(keys, values)


def test_what_shares_a_page_is_held_against_the_widest() -> None:
    """Of three groups, b and c lie in a's page side by side: c's blocks stand in a's next ones."""
    where = engine(3)
    wide = {"unit_stride": 8, "state_stride": 4, "block_stride": 16}

    def group(name: str, base: int) -> list[kvspec.Region]:
        placed = [
            region("k", base=base, **wide),
            region("v", base=base + 2, **wide),
        ]
        return [attrs.evolve(each, group=name, layer=name) for each in placed]

    same = [*group("a", 0), *group("b", 0), *group("c", 0)]
    assert 6 == len(kvspec.RankCache(where, RankId(), same, (MEMORY,)).regions)
    values = {"block_stride": 16, "unit_stride": 2, "state_stride": 1}
    inside = [
        region("k", base=0, block_stride=16, unit_stride=4, state_stride=2),
        region("v", base=8, **values),
        attrs.evolve(region("k", base=0, **wide), group="b", layer="b", states=BLOCK),
    ]
    next_page = [
        attrs.evolve(region("k", base=16, **wide), group="c", layer="c"),
        attrs.evolve(region("v", base=16 + 2, **wide), group="c", layer="c"),
    ]
    rest = attrs.evolve(region("v", base=3, **wide), group="b", layer="b")
    with pytest.raises(kvspec.SpecError, match="coincide or lie apart"):
        kvspec.RankCache(where, RankId(), [*inside, rest, *next_page], (MEMORY,))


@given(strategies.cases() | strategies.sharing_cases())
def test_what_is_allocated_is_apart(case: strategies.Case) -> None:
    """Every layout's own regions are accepted: `allocate` makes them through the same check."""
    for where, pool in ((case.producer, case.producer_pool), (case.consumer, case.consumer_pool)):
        for rank in where.parallel.ranks:
            cache = kvspec.plan_memory(where, rank, pool, shared=case.shared)
            kernel_blocks_per_block = {
                group.name: group.kernel_blocks_per_block for group in where.groups
            }
            for one, other, same in meetings(cache.regions, kernel_blocks_per_block):
                assert case.shared
                assert one.group != other.group
                assert same
