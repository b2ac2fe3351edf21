"""One part of one layer in memory, and the memory that it lies in.

Law: a region is a base address and three strides; nothing else is known of memory.
"""

from __future__ import annotations

from functools import cached_property

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import MOST, positive_int


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
        if not isinstance(self.memory_type, str) or self.memory_type not in MEMORY_TYPES:
            raise SpecError("memory_type", self.memory_type, " or ".join(MEMORY_TYPES))
        if self.end > MOST:
            raise SpecError("length", self.length, f"an end of at most {MOST}")

    @property
    def end(self) -> int:
        """Address of the last byte, plus one."""
        return self.address + self.length
