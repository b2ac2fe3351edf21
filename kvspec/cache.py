"""One rank's cache in memory: a region for every part of every layer it holds.

Law: a region is a base address and three strides; nothing else is known of memory. What has to be
registered is the distinct memory behind the regions, each once, by what it really is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from kvspec.engine import EngineSpec, KVCacheGroup
from kvspec.errors import SpecError
from kvspec.layout import place
from kvspec.parallel import RankId
from kvspec.ranges import positive_int
from kvspec.slices import Part


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


@attrs.frozen
class Memory:
    """One distinct piece of memory to register: address and length in bytes."""

    address: int
    length: int
    memory_type: str = "DRAM"
    device: int = 0


@attrs.frozen
class RankCache:
    """Where one rank's cache lies: its *regions*, and the *memory* that holds them."""

    engine: EngineSpec
    rank: RankId
    regions: tuple[Region, ...]
    memory: tuple[Memory, ...]

    def __attrs_post_init__(self) -> None:
        self.engine.parallel.check_rank(self.rank)
        spans = [(range(m.address, m.address + m.length), m) for m in self.memory]
        for each in self.regions:
            kind = (each.memory_type, each.device)
            extent = each.extent
            if not any(
                span.start <= extent.start
                and extent.stop <= span.stop
                and kind == (memory.memory_type, memory.device)
                for span, memory in spans
            ):
                name = f"{each.layer}.{each.part}"
                raise SpecError(f"regions[{name!r}]", extent, "a region inside the memory given")

    @cached_property
    def _by_part(self) -> dict[tuple[str, str], Region]:
        return {(each.layer, each.part): each for each in self.regions}

    def region(self, layer: str, part: str) -> Region:
        """Return the region of one part of one layer."""
        found = self._by_part.get((layer, part))
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
        """Return the cache that *tensors*, keyed by layer, hold; see `kvspec.tensors.read`."""
        from kvspec.tensors import read  # noqa: PLC0415 - it imports this module's values

        return read(engine, rank, tensors, axes)


def allocate(
    engine: EngineSpec,
    rank: RankId,
    num_blocks: int | Mapping[str, int],
    device: str = "cpu",
) -> tuple[RankCache, dict[str, Any]]:
    """Allocate one rank's cache and return it with its storage, keyed by group name.

    *num_blocks*: blocks of every group, or of each by name. Storage is one flat array of bytes for
    each group: zeroed numpy ``uint8`` on ``"cpu"``, a torch ``uint8`` tensor on a GPU such as
    ``"cuda:0"``.
    """
    engine.parallel.check_rank(rank)
    regions: list[Region] = []
    memory: list[Memory] = []
    storage: dict[str, Any] = {}
    for group in engine.groups:
        count = num_blocks.get(group.name) if isinstance(num_blocks, Mapping) else num_blocks
        count = positive_int(f"num_blocks[{group.name!r}]", count)
        placed, size = _placed(engine, group, rank, count)
        storage[group.name], span = _array(size, device)
        memory.append(span)
        regions += (
            Region(
                group=group.name,
                layer=each.layer,
                part=each.part.name,
                base=span.address + each.offset,
                num_blocks=count,
                block_stride=each.block_stride,
                unit_stride=each.unit_stride,
                state_stride=each.state_stride,
                content_bytes=each.part.content_bytes,
                units=each.units,
                states=each.part.states,
                memory_type=span.memory_type,
                device=span.device,
            )
            for each in placed
            if each.units
        )
    return RankCache(engine, rank, tuple(regions), tuple(memory)), storage


def _placed(engine: EngineSpec, group: KVCacheGroup, rank: RankId, num_blocks: int) -> Any:  # noqa: ANN401
    def local_units(part: Part) -> int:
        return len(engine.parallel.deal(part.units, part.deal_in).ranges[rank.tp])

    layers = [(layer, group.spec.of_layer(layer)) for layer in group.layers]
    return place(engine.layout_of(group), layers, local_units, num_blocks)


def _array(size: int, device: str) -> tuple[Any, Memory]:
    if device == "cpu":
        array = np.zeros(max(size, 1), dtype=np.uint8)
        return array, Memory(array.ctypes.data, array.nbytes)
    import torch  # noqa: PLC0415 - only a GPU needs it, and it starts slowly

    tensor = torch.zeros(max(size, 1), dtype=torch.uint8, device=device)
    return tensor, Memory(tensor.data_ptr(), tensor.numel(), "VRAM", tensor.device.index or 0)
