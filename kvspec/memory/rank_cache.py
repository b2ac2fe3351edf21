"""One rank's cache in memory: a region for every part of every layer it holds.

Law: every region lies inside one memory, and no byte belongs to two contents. What has to be
registered is the distinct memory behind the regions, each once, by what it really is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs

from kvspec.engines.engine import EngineSpec, HeldPart
from kvspec.errors import SpecError
from kvspec.inputs import MOST, instance, positive_int, sequence
from kvspec.memory.aliasing import check_separate
from kvspec.memory.from_tensors import read
from kvspec.memory.region import MEMORY_TYPES, Memory, Region
from kvspec.ownership.parallel import RankId

__all__ = ["MEMORY_TYPES", "Memory", "RankCache", "Region"]


def _check_region(region: Region, wanted: HeldPart) -> None:
    """Check that *region* has the sizes of the engine's part."""
    if region.group != wanted.group:
        field = f"regions['{region.layer}.{region.part}'].group"
        raise SpecError(field, region.group, f"{wanted.group!r}, the layer's group")
    home = (region.memory_type, region.device)
    if not isinstance(home[0], str) or type(home[1]) is not int:
        field = f"regions['{region.layer}.{region.part}']"
        raise SpecError(field, home, "a memory_type (a text) and a device (an int)")
    sizes = (region.content_bytes, region.units, region.states, region.chunks)
    right = (wanted.content_bytes, wanted.units, wanted.states, wanted.chunks)
    strides = (region.block_stride, region.unit_stride, region.state_stride, region.chunk_stride)
    counts = (region.base, *strides)
    plain = set(map(type, (*sizes, *counts, region.num_blocks))) == {int}
    # All is well, nearly always, and this is asked of every region: so no messages until it is not.
    if plain and sizes == right and min(counts) >= 0 < region.num_blocks <= MOST >= max(counts):
        return
    for name in ("content_bytes", "units", "states", "chunks"):
        size, fits = getattr(region, name), getattr(wanted, name)
        if type(size) is not int or size != fits:
            field = f"regions['{region.layer}.{region.part}'].{name}"
            raise SpecError(field, size, f"{fits}, as the engine's part has")
    named = ("block_stride", "unit_stride", "state_stride", "chunk_stride")
    for name in ("num_blocks", "base", *named):
        field = f"regions['{region.layer}.{region.part}'].{name}"
        positive_int(field, getattr(region, name), least=int(name == "num_blocks"))


def _regions(value: object) -> tuple[Region, ...]:
    return tuple(
        instance("regions", each, Region) for each in sequence("regions", value, "Regions")
    )


def _memories(value: object) -> tuple[Memory, ...]:
    return tuple(instance("memory", each, Memory) for each in sequence("memory", value, "Memories"))


@attrs.frozen
class RankCache:
    """Where one rank's cache lies: its *regions*, and the *memory* that holds them."""

    engine: EngineSpec
    rank: RankId
    regions: tuple[Region, ...] = attrs.field(converter=_regions)
    memory: tuple[Memory, ...] = attrs.field(converter=_memories)

    def __attrs_post_init__(self) -> None:
        instance("engine", self.engine, EngineSpec).parallel.check_rank(self.rank)
        wanted = self.engine.held(self.rank)
        excluded = set(self.engine.excluded)
        seen: set[tuple[str, str]] = set()
        for each in self.regions:
            key = (each.layer, each.part)
            if not isinstance(each.layer, str) or not isinstance(each.part, str):
                raise SpecError("regions", key, "names of a layer and of a part")
            if key in seen:
                raise SpecError("regions", ".".join(key), "each part of a layer once")
            if key not in wanted:
                raise SpecError("regions", ".".join(key), f"parts of layers that {self.rank} has")
            seen.add(key)
            _check_region(each, wanted[key])
            self._check_null_block(each)
        for key in wanted.keys() - seen:
            if key[0] not in excluded:
                told = f"a region for each part that {self.rank} has, {'.'.join(key)} too"
                raise SpecError("regions", sorted(map(".".join, seen)), told)
        self._check_inside()
        check_separate(
            self.regions,
            {group.name: group.kernel_blocks_per_block for group in self.engine.groups},
        )

    def _check_null_block(self, region: Region) -> None:
        """Check that the engine's null block is one of the region's blocks."""
        null = self.engine.null_block
        blocks = region.num_blocks // self.engine.group(region.group).kernel_blocks_per_block
        if null is not None and null >= blocks:
            told = f"less than the {blocks} blocks of {region.layer}.{region.part}"
            raise SpecError("null_block", null, told)

    def _check_inside(self) -> None:
        """Check that every region lies inside one chunk of the memory given."""
        reach: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        for home, memories in self._by_home.items():
            starts, stops = reach.setdefault(home, ([], []))
            for memory in memories:
                reached = stops[-1] if stops else 0
                if memory.address < reached < memory.end:
                    wanted = "memories that lie apart or one inside the other"
                    raise SpecError("memory", memory, wanted)
                starts.append(memory.address)
                stops.append(max(memory.end, reached))
        for each in self.regions:
            starts, stops = reach.get((each.memory_type, each.device), ([], []))
            extent = each.extent
            at = bisect_right(starts, extent.start)
            if not at or stops[at - 1] < extent.stop:
                field = f"regions['{each.layer}.{each.part}']"
                raise SpecError(field, extent, "a region inside the memory given")

    @cached_property
    def _by_home(self) -> dict[tuple[str, int], list[Memory]]:
        """The memories of each type and device, by ascending address, enclosing ones first."""
        found: dict[tuple[str, int], list[Memory]] = {}
        for memory in sorted(self.memory, key=lambda each: (each.address, -each.length)):
            found.setdefault((memory.memory_type, memory.device), []).append(memory)
        return found

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """Addresses where one memory ends and another of its type and device begins.

        No descriptor lies over one.
        """
        found: set[int] = set()
        for memories in self._by_home.values():
            reached = 0
            for each in memories:
                if each.address == reached:
                    found.add(each.address)
                reached = max(reached, each.end)
        return tuple(sorted(found))

    @cached_property
    def _by_part(self) -> dict[tuple[str, str], Region]:
        return {(each.layer, each.part): each for each in self.regions}

    def region(self, layer: str, part: str) -> Region:
        """Return the region of one part of one layer."""
        found = self._by_part.get((instance("layer", layer, str), instance("part", part, str)))
        if found is None:
            raise SpecError("region", f"{layer}.{part}", f"a part of a layer that {self.rank} has")
        return found

    @staticmethod
    def from_tensors(
        engine: EngineSpec,
        rank: RankId,
        tensors: Mapping[str, Any],
        axes: str | Mapping[str, str] | None = None,
    ) -> RankCache:
        """Return the cache that *tensors* hold.

        *tensors*: for each layer a torch tensor or numpy array, or a mapping from a part's or
        tensor's name (``"k"``, ``"v"``, ``"conv"``, ``"ssm"``) to one. Extents are those of the
        engine's parts exactly: of a larger tensor, give the view that is the cache. A tensor that
        holds both k and v has them along ``K``, or packed in ``C``.

        *axes*: the letters of a tensor's dimensions in order, outermost first: ``B`` blocks, ``K``
        the K and V planes, ``H`` heads (units), ``N`` tokens (states) of a block, ``P`` chunks of
        the content, ``C`` content; for all tensors, or by the name of a part, a tensor or, for what
        they do not name, a group. Where several axes lie in one dimension they stand in brackets:
        SGLang's ``[slots, heads, size]`` is ``(BN)HC``. A letter that is not there has extent 1;
        the last dimensions may all be ``C``. Unless *axes* are given, they are the layout's without
        L (of a state, B first), which has to be the only order that fits the shape.

        Raises `SpecError` naming the layer for whatever contradicts the engine or the other
        tensors; nothing is copied, and whoever made the tensors keeps them.
        """
        regions, memory = read(engine, rank, tensors, axes)
        return RankCache(engine, rank, regions, memory)
