"""Describe one part of one layer in memory, and the memory that contains it.

Invariant: a `Region` has a base address, the bytes of a content and their order, four strides and
four counts (blocks, units, states, chunks). Besides its kind of memory, nothing else affects
transfer rows.

How it works:
    Two regions may store the bytes of one content in different orders: in chunks (page formats), or
    in segments (the order of a key's elements). `common_runs` cuts a content into runs that are
    contiguous in both. In this example, one side stores a key of 4 elements as pairs (a A b B) and
    the other as halves (a b A B):

        >>> pairs = Region(group="g", layer="l", part="k", base=0, num_blocks=1, block_stride=16,
        ...     unit_stride=16, state_stride=4, content_bytes=4, units=1, states=4,
        ...     segments=((0, 1, 2, 2), (1, 1, 2, 2)))
        >>> common_runs(pairs, attrs.evolve(pairs, segments=()))
        ((0, 1, (0, 0)), (1, 1, (2, 1)), (2, 1, (1, 2)), (3, 1, (3, 3)))
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.errors import SpecError
from kvspec.inputs import MOST, positive_int
from kvspec.specs.key_content import Segment

# Bytes of a content, number of chunks, bytes from one chunk to the next, and segments.
_Shape = tuple[int, int, int, tuple[Segment, ...]]
# First byte of the content, bytes, and the distance from the content's address in each region.
ContentRun = tuple[int, int, tuple[int, ...]]

MEMORY_TYPES = ("DRAM", "VRAM", "FILE")
# An address in a file is its descriptor, followed by this many bits of the offset. So addresses in
# two files differ, and no code has to compare devices. Files have less than 8 TiB.
FILE_OFFSET_BITS = 43


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
        state_stride: Bytes from one state of a block to the next.
        content_bytes: Bytes of one state of one unit.
        units: Number of units that the rank holds.
        states: Number of states of a block.
        chunks: Number of equal chunks that the content of one state is divided into.
        chunk_stride: Bytes from one chunk to the next.
        memory_type: `DRAM`, or `VRAM` for the memory of a GPU.
        device: Index of the GPU. 0 for `DRAM`.
        segments: Where a state stores its bytes, see `kvspec.specs.key_content`. `RankCache` sets
            them from its engine.

    >>> keys = Region(group="g", layer="l", part="k", base=1000, num_blocks=4, block_stride=64,
    ...     unit_stride=32, state_stride=8, content_bytes=8, units=2, states=4)
    >>> keys.address(block=1, unit=1, state=2)
    1112
    >>> keys.locate(1112 + 5)
    (1, 1, 2, 5)
    >>> keys.address_range
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
    segments: tuple[Segment, ...] = ()

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
        """Return the distance of a stored *byte* of the content from the content's address."""
        chunk, rest = divmod(byte, self.chunk_bytes)
        return chunk * self.chunk_stride + rest

    @property
    def shape(self) -> _Shape:
        """All that decides where the bytes of a content lie."""
        return self.content_bytes, self.chunks, self.chunk_stride, self.segments

    def locate(self, address: int) -> tuple[int, int, int, int] | None:
        """Return (block, unit, state, byte) of an *address*, or None if no content lies there.

        The byte is counted as it is stored.
        """
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
    def address_range(self) -> range:
        """The addresses from the first byte of the region to the end of its last content."""
        last = self.address(self.num_blocks - 1, self.units - 1, self.states - 1)
        return range(self.base, last + self.chunk_offset(self.content_bytes - 1) + 1)


def common_runs(*regions: Region) -> tuple[ContentRun, ...]:
    """Return the longest runs of a content that are contiguous in all *regions*.

    If all regions have equal segments, bytes are counted as they are stored. Otherwise they are
    counted in the common order.

    Returns:
        For each run its first byte in the content, its length in bytes, and its distance from
        the address of the content in each region.

    >>> keys = Region(group="g", layer="l", part="k", base=0, num_blocks=1, block_stride=0,
    ...     unit_stride=0, state_stride=2, content_bytes=8, units=1, states=4, chunks=4,
    ...     chunk_stride=8)
    >>> rows = attrs.evolve(keys, state_stride=8, chunks=1)
    >>> common_runs(keys, rows)
    ((0, 2, (0, 0)), (2, 2, (8, 2)), (4, 2, (16, 4)), (6, 2, (24, 6)))
    """
    return _common_runs(tuple(region.shape for region in regions))


# Most layers have the same shapes, and a content may have hundreds of runs.
@lru_cache(maxsize=1024)
def _common_runs(shapes: tuple[_Shape, ...]) -> tuple[ContentRun, ...]:
    if len({segments for *_, segments in shapes}) == 1:
        shapes = tuple((*shape[:3], ()) for shape in shapes)
    sides = [list(_runs(shape)) for shape in shapes]
    starts = sorted({byte for side in sides for byte, _ in side})
    offsets = []
    for side in sides:
        # The last run that begins at or before each start contains it.
        index = np.searchsorted([byte for byte, _ in side], starts, "right") - 1
        runs = [side[at] for at in index.tolist()]
        offsets.append([at + start - byte for start, (byte, at) in zip(starts, runs, strict=True)])
    sizes = np.diff(starts, append=shapes[0][0]).tolist()
    return tuple(zip(starts, sizes, zip(*offsets, strict=True), strict=True))


def _runs(shape: _Shape) -> Iterator[tuple[int, int]]:
    """Yield where the contiguous runs of one content begin: byte of the content, and distance."""
    content, chunks, chunk_stride, segments = shape
    chunk_bytes, byte = content // chunks, 0
    for start, size, count, stride in segments or ((0, content, 1, content),):
        for stored in range(start, start + count * stride, stride):
            # A chunk may end inside of an element's run.
            at = stored
            while at < stored + size:
                chunk, rest = divmod(at, chunk_bytes)
                yield byte, chunk * chunk_stride + rest
                step = min(chunk_bytes - rest, stored + size - at)
                byte, at = byte + step, at + step


def check_memory_type(value: object) -> None:
    """Raise `SpecError` if *value* is not one of `MEMORY_TYPES`."""
    if not isinstance(value, str) or value not in MEMORY_TYPES:
        raise SpecError("memory_type", value, " or ".join(MEMORY_TYPES))


@attrs.frozen
class Memory:
    """A range of memory to register with the transport.

    Attributes:
        address: Address of the first byte.
        length: Length in bytes.
        memory_type: `DRAM`, `VRAM` for the memory of a GPU, or `FILE` (see `of_file`).
        device: Index of the GPU, or the descriptor of the file. 0 for `DRAM`.

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
        check_memory_type(self.memory_type)
        if self.end > MOST:
            raise SpecError("length", self.length, f"an end of at most {MOST}")
        last = max(self.address, self.end - 1)
        if self.memory_type == "FILE" and not (
            self.address >> FILE_OFFSET_BITS == last >> FILE_OFFSET_BITS == self.device
        ):
            rule = f"the file descriptor {self.device}, followed by an offset below 8 TiB"
            raise SpecError("address", self.address, rule)

    @classmethod
    def of_file(cls, descriptor: int, length: int) -> Memory:
        """Return the first *length* bytes of an open file.

        The address of byte *i* is the sum of `address` and *i*, as in any memory.

        >>> Memory.of_file(3, 4096).address == 3 << FILE_OFFSET_BITS
        True
        """
        positive_int("descriptor", descriptor, most=(MOST >> FILE_OFFSET_BITS) - 1)
        return cls(descriptor << FILE_OFFSET_BITS, length, "FILE", descriptor)

    @property
    def end(self) -> int:
        """Address of the last byte, plus one."""
        return self.address + self.length
