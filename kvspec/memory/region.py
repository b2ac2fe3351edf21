"""One part of one layer in memory, and the memory that it lies in.

Law: a region is a base address and three strides; nothing else is known of memory.
"""

from __future__ import annotations

from functools import cached_property
from math import gcd

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import MOST, positive_int


@attrs.frozen(kw_only=True)
class Region:
    """One part of one layer in one rank's memory.

    Strides and *content_bytes* are bytes; *units* counts the rank's own, *states* the rows of a
    block. A row's content lies in so many equal *chunks*, *chunk_stride* apart. *device* is the
    index of the device that holds *memory_type* ``VRAM``.
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
    chunks: int = 1
    chunk_stride: int = 0
    memory_type: str = "DRAM"
    device: int = 0

    def address(self, block: int, unit: int, state: int) -> int:
        """Return where one (unit, state)'s content begins; *unit* counts the rank's own."""
        return (
            self.base
            + block * self.block_stride
            + unit * self.unit_stride
            + state * self.state_stride
        )

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk of the content: those that lie together."""
        return self.content_bytes // self.chunks

    def chunk_offset(self, byte: int) -> int:
        """Return how far a *byte* of the content lies from where the content begins."""
        chunk, rest = divmod(byte, self.chunk_bytes)
        return chunk * self.chunk_stride + rest

    def locate(self, address: int) -> tuple[int, int, int, int] | None:
        """Return (block, unit, state, byte) of an address, or None if no content lies there."""
        rest = address - self.base
        axes = sorted(
            [
                (self.block_stride, self.num_blocks, 0),
                (self.unit_stride, self.units, 1),
                (self.state_stride, self.states, 2),
                (self.chunk_stride, self.chunks, 3),
            ],
            reverse=True,
        )
        found = [0, 0, 0, 0]
        for stride, count, axis in axes:
            if count > 1:
                found[axis], rest = divmod(rest, stride)
                if not 0 <= found[axis] < count:
                    return None
        if not 0 <= rest < self.chunk_bytes:
            return None
        block, unit, state, chunk = found
        return block, unit, state, chunk * self.chunk_bytes + rest

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """All but where it begins: regions of one shape repeat alike in memory."""
        strides = (self.num_blocks, self.block_stride, self.unit_stride, self.state_stride)
        sizes = (self.content_bytes, self.states, self.chunks, self.chunk_stride)
        return (*strides, *sizes, self.memory_type, self.device)

    @property
    def extent(self) -> range:
        """From the region's first address to the end of its last content."""
        last = self.address(self.num_blocks - 1, self.units - 1, self.states - 1)
        return range(self.base, last + self.chunk_offset(self.content_bytes - 1) + 1)


def common_chunks(one: Region, other: Region) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of the longest chunks that lie together on both sides, and where they begin.

    >>> keys = Region(group="g", layer="l", part="k", base=0, num_blocks=1, block_stride=0,
    ...     unit_stride=0, state_stride=2, content_bytes=8, units=1, states=4, chunks=4,
    ...     chunk_stride=8)
    >>> rows = attrs.evolve(keys, state_stride=8, chunks=1)
    >>> common_chunks(keys, rows)
    (2, (0, 2, 4, 6))
    """
    size = gcd(one.chunk_bytes, other.chunk_bytes)
    return size, tuple(range(0, one.content_bytes, size))


MEMORY_TYPES = ("DRAM", "VRAM")


@attrs.frozen
class Memory:
    """One distinct chunk of memory to register: address and length in bytes."""

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
