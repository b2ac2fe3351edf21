"""Describe the KV cache of one rank: a region for each part of each layer that the rank holds.

Invariant: every region lies inside the memory of the cache, and no byte belongs to two contents
that a request may use at the same time.
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
from kvspec.memory.region import Memory, Region
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part

__all__ = ["Memory", "RankCache", "Region"]


def _check_region(region: Region, expected: HeldPart) -> None:
    """Check that *region* has the sizes of the engine's part, and that all numbers are ints."""
    if region.group != expected.group:
        field = f"regions['{region.layer}.{region.part}'].group"
        raise SpecError(field, region.group, f"{expected.group!r}, the layer's group")
    device = (region.memory_type, region.device)
    if not isinstance(device[0], str) or type(device[1]) is not int:
        field = f"regions['{region.layer}.{region.part}']"
        raise SpecError(field, device, "a memory_type (a text) and a device (an int)")
    sizes = (region.content_bytes, region.units, region.states, region.chunks)
    expected_sizes = (
        expected.content_bytes,
        expected.units,
        expected.states,
        expected.chunks,
    )
    strides = (region.block_stride, region.unit_stride, region.state_stride, region.chunk_stride)
    distances = (region.base, *strides)
    only_ints = set(map(type, (*sizes, *distances, region.num_blocks))) == {int}
    # An engine has thousands of regions, and nearly all are valid. So the field names and messages
    # below are made only after this single test has failed.
    if (
        only_ints
        and sizes == expected_sizes
        and 0 <= min(distances) <= max(distances) <= MOST
        and 0 < region.num_blocks <= MOST
    ):
        return
    for name in ("content_bytes", "units", "states", "chunks"):
        size, expected_size = getattr(region, name), getattr(expected, name)
        if type(size) is not int or size != expected_size:
            field = f"regions['{region.layer}.{region.part}'].{name}"
            raise SpecError(field, size, f"{expected_size}, as the engine's part has")
    named = ("block_stride", "unit_stride", "state_stride", "chunk_stride")
    for name in ("num_blocks", "base", *named):
        field = f"regions['{region.layer}.{region.part}'].{name}"
        positive_int(field, getattr(region, name), least=int(name == "num_blocks"))


def _regions(value: object) -> tuple[Region, ...]:
    members = sequence("regions", value, "Regions")
    return tuple(instance("regions", member, Region) for member in members)


def _memories(value: object) -> tuple[Memory, ...]:
    members = sequence("memory", value, "Memories")
    return tuple(instance("memory", member, Memory) for member in members)


class MemoryOwners(tuple[object, ...]):
    """Objects that own the memory of a cache. A reference keeps the memory allocated.

    A copy refers to the same objects. A pickle is empty: addresses mean nothing in another process,
    and the objects may be tensors of many GB.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type[MemoryOwners], tuple[()]]:
        return MemoryOwners, ()

    def __deepcopy__(self, memo: object) -> MemoryOwners:
        return self


def _owners(value: object) -> MemoryOwners:
    if isinstance(value, MemoryOwners):
        return value
    return MemoryOwners(() if value is None else (value,))


@attrs.frozen
class RankCache:
    """The KV cache of one rank.

    `allocate`, `plan_memory` and `from_tensors` make a cache. A connector that knows its addresses
    can also make the regions by hand.

    Attributes:
        engine: The engine.
        rank: The rank.
        regions: One region for each part of each layer that the rank holds.
        memory: The memory that contains the regions. This is what the transport registers.
        owner: The object that owns the memory, such as a list of tensors, in a tuple. The cache
            keeps a reference to it, so the memory is not freed before the cache. The owner is not
            compared, and a pickle has none.

    Raises:
        SpecError: If a region is missing, contradicts the engine or lies outside the memory. Also
            if two regions share bytes, except in blocks with the same id of different groups, or if
            regions of two devices have the same addresses.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig, plan_memory
    >>> spec = MLAAttentionSpec(block_size=2, head_size=8, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    >>> engine = EngineSpec(groups=[group], parallel=ParallelConfig())
    >>> cache = plan_memory(engine, RankId(), num_blocks=10)
    >>> cache.memory
    (Memory(address=0, length=160, memory_type='DRAM', device=0),)
    >>> [(region.layer, region.part, region.block_stride) for region in cache.regions]
    [('layers.0', 'latent', 16)]
    """

    engine: EngineSpec
    rank: RankId
    regions: tuple[Region, ...] = attrs.field(converter=_regions)
    memory: tuple[Memory, ...] = attrs.field(converter=_memories)
    owner: MemoryOwners = attrs.field(
        default=None, converter=_owners, kw_only=True, eq=False, repr=False
    )

    def __attrs_post_init__(self) -> None:
        instance("engine", self.engine, EngineSpec).parallel.check_rank(self.rank)
        held_parts = self.engine.held(self.rank)
        excluded = set(self.engine.excluded)
        seen: set[tuple[str, str]] = set()
        for region in self.regions:
            key = (region.layer, region.part)
            if not isinstance(region.layer, str) or not isinstance(region.part, str):
                raise SpecError("regions", key, "names of a layer and of a part")
            if key in seen:
                raise SpecError("regions", ".".join(key), "each part of a layer once")
            if key not in held_parts:
                raise SpecError("regions", ".".join(key), f"parts of layers that {self.rank} has")
            seen.add(key)
            _check_region(region, held_parts[key])
            self._check_null_block(region)
        for key in held_parts:
            if key not in seen and key[0] not in excluded:
                expected = f"a region for each part that {self.rank} has, {'.'.join(key)} too"
                raise SpecError("regions", sorted(map(".".join, seen)), expected)
        # Segments follow from the engine, so they are neither sent to peers nor written by hand.
        regions = tuple(
            region
            if region.segments == (segments := held_parts[region.layer, region.part].segments)
            else attrs.evolve(region, segments=segments)
            for region in self.regions
        )
        object.__setattr__(self, "regions", regions)
        self._check_inside()
        self._check_devices()
        check_separate(
            self.regions,
            {group.name: group.kernel_blocks_per_block for group in self.engine.groups},
        )

    def _check_null_block(self, region: Region) -> None:
        """Check that the engine's null block is one of the region's blocks."""
        null = self.engine.null_block
        blocks = region.num_blocks // self.engine.group(region.group).kernel_blocks_per_block
        if null is not None and null >= blocks:
            expected = f"less than the {blocks} blocks of {region.layer}.{region.part}"
            raise SpecError("null_block", null, expected)

    def _check_inside(self) -> None:
        """Check that each region lies inside one of the memories."""
        # By device: the start of each memory, and the farthest end of the memories up to it.
        bounds: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        for device, memories in self._by_device.items():
            starts, stops = bounds.setdefault(device, ([], []))
            for memory in memories:
                reached = stops[-1] if stops else 0
                if memory.address < reached < memory.end:
                    expected = "memories that lie apart or one inside the other"
                    raise SpecError("memory", memory, expected)
                starts.append(memory.address)
                stops.append(max(memory.end, reached))
        for region in self.regions:
            starts, stops = bounds.get((region.memory_type, region.device), ([], []))
            addresses = region.address_range
            preceding = bisect_right(starts, addresses.start)
            if not preceding or stops[preceding - 1] < addresses.stop:
                field = f"regions['{region.layer}.{region.part}']"
                raise SpecError(field, addresses, "a region inside the memory given")

    def _check_devices(self) -> None:
        """Check that regions of two devices do not overlap in address.

        CUDA gives all devices of a process different addresses. So a transfer identifies the bytes
        of one memory type by address alone.
        """
        if len(self._by_device) == 1:
            return
        reached: dict[tuple[str, int], int] = {}
        for region in sorted(self.regions, key=lambda region: region.address_range.start):
            addresses, device = region.address_range, (region.memory_type, region.device)
            for (memory_type, other), stop in reached.items():
                is_other = memory_type == region.memory_type and other != region.device
                if is_other and stop > addresses.start:
                    rule = f"has addresses of a region on device {other}: they must differ"
                    field = f"regions['{region.layer}.{region.part}'].device"
                    raise SpecError(field, region.device, rule=rule)
            reached[device] = max(reached.get(device, 0), addresses.stop)

    @cached_property
    def _by_device(self) -> dict[tuple[str, int], list[Memory]]:
        """The memories of each type and device, by ascending address, enclosing ones first."""
        by_device: dict[tuple[str, int], list[Memory]] = {}
        for memory in sorted(self.memory, key=lambda memory: (memory.address, -memory.length)):
            by_device.setdefault((memory.memory_type, memory.device), []).append(memory)
        return by_device

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """Addresses where one memory ends and another memory of the same type begins.

        No descriptor may cross a boundary: the transport registers the two memories separately.
        The two memories may be on different devices.
        """
        starts, stops = set[tuple[str, int]](), set[tuple[str, int]]()
        for (memory_type, _), memories in self._by_device.items():
            reached = 0
            for memory in memories:
                if memory.end > reached:  # Otherwise, another memory encloses it.
                    starts.add((memory_type, memory.address))
                    stops.add((memory_type, memory.end))
                    reached = memory.end
        return tuple(sorted({address for _, address in starts & stops}))

    @cached_property
    def _by_part(self) -> dict[tuple[str, str], Region]:
        return {(region.layer, region.part): region for region in self.regions}

    def region(self, layer: str, part: str) -> Region:
        """Return the region of one part of one layer.

        Raises:
            SpecError: If the rank does not have that part.
        """
        region = self._by_part.get((instance("layer", layer, str), instance("part", part, str)))
        if region is None:
            raise SpecError("region", f"{layer}.{part}", f"a part of a layer that {self.rank} has")
        return region

    def part_of(self, region: Region) -> tuple[Part, range]:
        """Return the part that *region* contains, and the units of the model that it holds."""
        group = self.engine.group(region.group)
        parts = group.spec.of_layer(region.layer).parts
        part = next(part for part in parts if part.name == region.part)
        return part, self.engine.units(group, part, self.rank)

    @staticmethod
    def from_tensors(
        engine: EngineSpec,
        rank: RankId,
        tensors: Mapping[str, Any],
        axes: str | Mapping[str, str],
    ) -> RankCache:
        """Return the cache that consists of an engine's own tensors.

        Nothing is copied. The cache keeps a reference to each tensor. A memory that the tensor
        itself only borrows, such as a GPU allocation of another library, must stay allocated.

        Args:
            engine: The engine.
            rank: The rank that holds the tensors.
            tensors: For each layer a torch tensor or a numpy array, or a mapping from the name of a
                part or tensor (``"k"``, ``"v"``, ``"conv"``, ``"ssm"``) to one. Each size must
                equal the size of the engine's part: pass a view if a tensor is larger. A tensor
                that contains both k and v has them along ``K``, or packed in ``C``.
            axes: The letters of a tensor's dimensions, outermost first: ``B`` blocks, ``K`` the K
                and V planes, ``H`` heads (units), ``N`` tokens (states) of a block, ``P`` chunks
                of the content, ``C`` content. Pass one string for all tensors, or a mapping from
                the name of a part or tensor to its letters. In the mapping, the name of a group
                applies to all its other tensors. The letters of one dimension with several axes
                stand in brackets: SGLang's ``[slots, heads, size]`` is ``(BN)HC``. An axis whose
                letter is missing has size 1. Several of the last dimensions may be ``C``.

        Returns:
            The cache.

        Raises:
            SpecError: If a tensor contradicts the engine or another tensor, or is not a dense
                tensor on a CPU or GPU. The error names the layer.

        >>> import numpy as np
        >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig
        >>> spec = MLAAttentionSpec(block_size=2, head_size=8, dtype="uint8")
        >>> group = KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
        >>> engine = EngineSpec(groups=[group], parallel=ParallelConfig())
        >>> tensor = np.zeros((10, 2, 8), np.uint8)
        >>> cache = RankCache.from_tensors(engine, RankId(), {"layers.0": tensor}, axes="BNC")
        >>> cache.region("layers.0", "latent").num_blocks
        10
        """
        regions, memory = read(engine, rank, tensors, axes)
        owner = [tuple(t.values()) if isinstance(t, Mapping) else t for t in tensors.values()]
        return RankCache(engine, rank, regions, memory, owner=owner)
