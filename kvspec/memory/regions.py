"""One rank's cache in memory: a region for every part of every layer it holds.

Law: a region is a base address and three strides; nothing else is known of memory. What has to be
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
from kvspec.ownership.parallel import RankId


@attrs.frozen(kw_only=True)
class Region:
    """One part of one layer in one rank's memory.

    Strides and *content_bytes* are bytes; *units* counts the rank's own, *states* the rows of a
    block. *device* is the index of the device that holds *memory_type* ``VRAM``.
    """

    group: str
    layer: str
    part: str
    base: int
    num_blocks: int
    block_stride: int
    unit_stride: int
    state_stride: int
    content_bytes: int
    units: int
    states: int
    memory_type: str = "DRAM"
    device: int = 0

    def address(self, block: int, unit: int, state: int) -> int:
        """Return the address of one (unit, state)'s content; *unit* counts the rank's own."""
        return (
            self.base
            + block * self.block_stride
            + unit * self.unit_stride
            + state * self.state_stride
        )

    def locate(self, address: int) -> tuple[int, int, int, int] | None:
        """Return (block, unit, state, byte) of an address, or None if no content lies there."""
        rest = address - self.base
        axes = sorted(
            [
                (self.block_stride, self.num_blocks, 0),
                (self.unit_stride, self.units, 1),
                (self.state_stride, self.states, 2),
            ],
            reverse=True,
        )
        found = [0, 0, 0]
        for stride, count, axis in axes:
            if count > 1:
                found[axis], rest = divmod(rest, stride)
                if not 0 <= found[axis] < count:
                    return None
        return (*found, rest) if 0 <= rest < self.content_bytes else None  # type: ignore[return-value]

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """All but where it begins: regions of one shape repeat alike in memory."""
        strides = (self.num_blocks, self.block_stride, self.unit_stride, self.state_stride)
        return (*strides, self.content_bytes, self.states, self.memory_type, self.device)

    @property
    def extent(self) -> range:
        """From the region's first address to the end of its last content."""
        last = self.address(self.num_blocks - 1, self.units - 1, self.states - 1)
        return range(self.base, last + self.content_bytes)


MEMORY_TYPES = ("DRAM", "VRAM")


@attrs.frozen
class Memory:
    """One distinct piece of memory to register: address and length in bytes."""

    address: int
    length: int
    memory_type: str = "DRAM"
    device: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("address", "length", "device"):
            positive_int(name, getattr(self, name), least=0)
        if self.memory_type not in MEMORY_TYPES:
            raise SpecError("memory_type", self.memory_type, " or ".join(MEMORY_TYPES))
        if self.end > MOST:
            raise SpecError("length", self.length, f"an end of at most {MOST}")

    @property
    def end(self) -> int:
        """Address of the last byte, plus one."""
        return self.address + self.length


def _check_region(region: Region, wanted: HeldPart) -> None:
    """Check that *region* has the sizes of the engine's part."""
    if region.group != wanted.group:
        field = f"regions['{region.layer}.{region.part}'].group"
        raise SpecError(field, region.group, f"{wanted.group!r}, the layer's group")
    sizes = (region.content_bytes, region.units, region.states)
    right = (wanted.content_bytes, wanted.units, wanted.states)
    counts = (region.base, region.block_stride, region.unit_stride, region.state_stride)
    plain = set(map(type, (*sizes, *counts, region.num_blocks))) == {int}
    # All is well, nearly always, and this is asked of every region: so no messages until it is not.
    fit = min(counts) >= 0 < region.num_blocks <= MOST and max(counts) <= MOST
    if plain and fit and sizes == right:
        return
    for name in ("content_bytes", "units", "states"):
        size, fits = getattr(region, name), getattr(wanted, name)
        if type(size) is not int or size != fits:
            field = f"regions['{region.layer}.{region.part}'].{name}"
            raise SpecError(field, size, f"{fits}, as the engine's part has")
    for name in ("num_blocks", "base", "block_stride", "unit_stride", "state_stride"):
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
            if key in seen:
                raise SpecError("regions", ".".join(key), "each part of a layer once")
            if key not in wanted:
                raise SpecError("regions", ".".join(key), f"parts of layers that {self.rank} has")
            seen.add(key)
            _check_region(each, wanted[key])
        for key in wanted.keys() - seen:
            if key[0] not in excluded:
                told = f"a region for each part that {self.rank} has, {'.'.join(key)} too"
                raise SpecError("regions", sorted(map(".".join, seen)), told)
        self._check_inside()

    def _check_inside(self) -> None:
        """Check that every region lies inside one piece of the memory given."""
        reach: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        for memory in sorted(self.memory, key=lambda each: each.address):
            starts, stops = reach.setdefault((memory.memory_type, memory.device), ([], []))
            starts.append(memory.address)
            stops.append(max(memory.end, stops[-1] if stops else 0))
        for each in self.regions:
            starts, stops = reach.get((each.memory_type, each.device), ([], []))
            extent = each.extent
            at = bisect_right(starts, extent.start)
            if not at or stops[at - 1] < extent.stop:
                field = f"regions['{each.layer}.{each.part}']"
                raise SpecError(field, extent, "a region inside the memory given")

    @cached_property
    def seams(self) -> tuple[int, ...]:
        """Addresses where one memory ends and another begins: no descriptor lies over one."""
        found: list[int] = []
        reached = 0
        for each in sorted(self.memory, key=lambda memory: memory.address):
            if each.address == reached:
                found.append(each.address)
            reached = max(reached, each.end)
        return tuple(found)

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
        """Return the cache that *tensors*, by layer, hold; see `kvspec.memory.tensors.read`."""
        from kvspec.memory.tensors import read  # noqa: PLC0415 - it imports this module's values

        return read(engine, rank, tensors, axes)
