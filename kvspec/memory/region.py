"""Describe one part of one layer in memory, and the memory that contains it.

Invariant: a `Region` has a base address, the bytes of a content, four strides and four counts
(blocks, units, states, chunks). Besides its kind of memory, nothing else affects transfer rows.
"""

from __future__ import annotations

from math import gcd

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.errors import SpecError
from kvspec.inputs import MOST, positive_int

MEMORY_TYPES = ("DRAM", "VRAM")


@attrs.frozen(kw_only=True)
class Region:
    """One part of one layer in the memory of one rank.

    Attributes:
        group: Name of the group.
        layer: Name of the layer.
        part: Name of the part, such as `k`.
        base: Address of the first content.
        num_blocks: Number of blocks in memory. These are kernel blocks if a block of the block
            table consists of several kernel blocks.
        block_stride: Bytes from one block to the next.
        unit_stride: Bytes from one unit to the next.
        state_stride: Bytes from one row of a block to the next.
        content_bytes: Bytes of one row of one unit.
        units: Number of units that the rank holds.
        states: Number of rows of a block.
        chunks: Number of equal chunks that the content of one row is divided into.
        chunk_stride: Bytes from one chunk to the next.
        memory_type: `DRAM`, or `VRAM` for the memory of a GPU.
        device: Index of the GPU. 0 for `DRAM`.

    >>> keys = Region(group="g", layer="l", part="k", base=1000, num_blocks=4, block_stride=64,
    ...     unit_stride=32, state_stride=8, content_bytes=8, units=2, states=4)
    >>> keys.address(block=1, unit=1, state=2)
    1112
    >>> keys.locate(1112 + 5)
    (1, 1, 2, 5)
    >>> keys.extent
    range(1000, 1256)
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
        """Return the address of one content. *unit* counts the units that the rank holds."""
        return (
            self.base
            + block * self.block_stride
            + unit * self.unit_stride
            + state * self.state_stride
        )

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk of a content. They are contiguous in memory."""
        return self.content_bytes // self.chunks

    def chunk_offset(self, byte: int) -> int:
        """Return the distance of a *byte* of the content from the address of the content."""
        chunk, rest = divmod(byte, self.chunk_bytes)
        return chunk * self.chunk_stride + rest

    def locate(self, address: int) -> tuple[int, int, int, int] | None:
        """Return (block, unit, state, byte) of an *address*, or None if no content lies there."""
        rest = address - self.base
        # Each stride covers everything that the smaller strides reach. So the index along the
        # widest axis is known first.
        axes = sorted(
            [
                (self.block_stride, self.num_blocks, 0),
                (self.unit_stride, self.units, 1),
                (self.state_stride, self.states, 2),
                (self.chunk_stride, self.chunks, 3),
            ],
            reverse=True,
        )
        indices = [0, 0, 0, 0]
        for stride, count, axis in axes:
            if count > 1:
                indices[axis], rest = divmod(rest, stride)
                if not 0 <= indices[axis] < count:
                    return None
        if not 0 <= rest < self.chunk_bytes:
            return None
        block, unit, state, chunk = indices
        return block, unit, state, chunk * self.chunk_bytes + rest

    def addresses(self) -> npt.NDArray[np.int64]:
        """Return the addresses of all chunks of block 0, by unit, state and chunk."""
        units = np.arange(self.units)[:, None, None] * self.unit_stride
        states = np.arange(self.states)[:, None] * self.state_stride
        return self.base + units + states + np.arange(self.chunks) * self.chunk_stride

    @property
    def extent(self) -> range:
        """The addresses from the first byte of the region to the end of its last content."""
        last = self.address(self.num_blocks - 1, self.units - 1, self.states - 1)
        return range(self.base, last + self.chunk_offset(self.content_bytes - 1) + 1)


def common_chunks(one: Region, other: Region) -> tuple[int, tuple[int, ...]]:
    """Return the longest chunks of a content that are contiguous in both regions.

    Returns:
        The bytes of each chunk, and the first byte of each chunk in the content.

    >>> keys = Region(group="g", layer="l", part="k", base=0, num_blocks=1, block_stride=0,
    ...     unit_stride=0, state_stride=2, content_bytes=8, units=1, states=4, chunks=4,
    ...     chunk_stride=8)
    >>> rows = attrs.evolve(keys, state_stride=8, chunks=1)
    >>> common_chunks(keys, rows)
    (2, (0, 2, 4, 6))
    """
    size = gcd(one.chunk_bytes, other.chunk_bytes)
    return size, tuple(range(0, one.content_bytes, size))


@attrs.frozen
class Memory:
    """A range of memory to register with the transport.

    Attributes:
        address: Address of the first byte.
        length: Length in bytes.
        memory_type: `DRAM`, or `VRAM` for the memory of a GPU.
        device: Index of the GPU. 0 for `DRAM`.

    >>> Memory(4096, 100).end
    4196
    """

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
