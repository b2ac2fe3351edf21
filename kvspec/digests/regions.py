"""Digest the rows of one region, at their addresses in host memory.

Invariant: a sum covers exactly the rows and units that are passed, whatever the layout is.

How it works:
    numpy gathers rows into one array, and sums the array. Many short runs are slow to gather. So
    rows that lie side by side are gathered as one run. With 16 tokens in a block and 8 heads of
    256 bytes, a run is one of these:

        layout     a part of a block            whole blocks
        ---------  ---------------------------  ----------------------------
        N, H, C    8 heads of a token: 2 KiB    the whole block: 32 KiB
        H, N, C    one row: 256 bytes           the whole block: 32 KiB

    The compiled loop gathers nothing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import lru_cache

import attrs
import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kvspec.digests.compiled import Kernel, kernel
from kvspec.digests.definition import (
    WORD,
    Words,
    content_sums,
    row_digests,
    unit_hash,
    weights_of,
)
from kvspec.memory.region import Region
from kvspec.ownership.tokens import Ints
from kvspec.specs.key_content import Segment

Bytes = npt.NDArray[np.uint8]
# Name, length and stride in bytes.
_NamedAxis = tuple[str, int, int]

# Bytes that numpy sums at once, in about 0.2 ms. With 128 KiB, the calls of numpy take half of the
# time. Larger temporary arrays leave the cache of a core.
MANY_BYTES = 1 << 19
# Bytes that the compiled loop sums at once, in about 0.2 ms.
MORE_BYTES = 1 << 20


@attrs.frozen
class RegionRows:
    """Rows of a region.

    Attributes:
        block: Kernel block of each row.
        row: Number of each row in its block.
        number: First token of each row, or the number of a state's row.
    """

    block: Ints
    row: Ints
    number: Ints

    def __len__(self) -> int:
        return len(self.block)

    def __getitem__(self, some: slice | npt.NDArray[np.bool_]) -> RegionRows:
        return RegionRows(self.block[some], self.row[some], self.number[some])


def unit_sums(region: Region, own: range, first: int, rows: RegionRows) -> Iterator[Words]:
    """Yield sums of some rows for each unit. All of them add up to the digests of the units.

    Each sum takes a short time, so a caller can do other work between them.

    Args:
        region: The region.
        own: Numbers of the units among the rank's own units.
        first: Number of the first of these units in the model.
        rows: The rows.
    """
    compiled = kernel()
    if compiled is not None and _has_words(region):
        yield from _compiled_sums(compiled, region, own, first, rows)
    else:
        for digests in all_row_digests(region, own, first, rows):
            yield digests.sum(axis=0, dtype=np.uint64)


def all_row_digests(region: Region, own: range, first: int, rows: RegionRows) -> Iterator[Words]:
    """Yield the digests of some rows, of shape (rows, units), in the order of *rows*.

    The arguments are those of `unit_sums`.
    """
    hashes, states = _hashes(region, first, len(own)), region.states
    many = max(1, MANY_BYTES // (region.content_bytes * len(own)))
    whole = _whole_blocks(rows, states) if _is_plain(region) and many >= states else range(0)
    parts, blocks = _axes(region, len(own), whole=False), _axes(region, len(own), whole=True)
    for row_range, axes, count in (
        (range(whole.start), parts, many),
        (whole, blocks, many // states * states),
        (range(whole.stop, len(rows)), parts, many),
    ):
        stored = _stored(own.start, axes) if row_range else []
        for at in range(row_range.start, row_range.stop, max(1, count)):
            some = rows[at : min(at + count, row_range.stop)]
            content = _words(_gathered(stored, some, axes))
            sums = content_sums(content, np.empty_like(content))
            yield row_digests(axes.by_row(sums), some.number.astype(np.uint64), hashes)


def _compiled_sums(
    compiled: Kernel, region: Region, own: range, first: int, rows: RegionRows
) -> Iterator[Words]:
    memory, weights = _memory(region).view(np.uint64), weights_of(region.content_bytes // WORD)
    hashes = _hashes(region, first, len(own))
    many = max(1, MORE_BYTES // (region.content_bytes * len(own)))
    for at in range(0, len(rows), many):
        some = rows[at : at + many]
        starts = some.block * region.block_stride + some.row * region.state_stride
        starts = (starts + own.start * region.unit_stride) // WORD
        totals, numbers = np.zeros(len(own), np.uint64), some.number.astype(np.uint64)
        compiled(memory, weights, starts, numbers, hashes, region.unit_stride // WORD, totals)
        yield totals


def _has_words(region: Region) -> bool:
    """Return whether each content of *region* is a row of aligned words, in the common order."""
    strides = region.block_stride, region.unit_stride, region.state_stride
    sizes = region.base, region.content_bytes, *strides
    return _is_plain(region) and not any(size % WORD for size in sizes)


def _is_plain(region: Region) -> bool:
    """Return whether each content of *region* is stored in one run, in the common order."""
    return region.chunks == 1 and not region.segments


def _whole_blocks(rows: RegionRows, states: int) -> range:
    """Return the places in *rows* of all rows of whole blocks, or none.

    The first rows and the last rows of a request may be parts of blocks. If two context ranks share
    the tokens, a block may lack every other row.
    """
    starts = np.flatnonzero(rows.row[:states] == 0)
    if not len(starts):
        return range(0)
    start = int(starts[0])
    blocks = (len(rows) - start) // states
    row_range = range(start, start + blocks * states)
    row = rows.row[row_range.start : row_range.stop].reshape(blocks, states)
    block = rows.block[row_range.start : row_range.stop].reshape(blocks, states)
    same = (row == np.arange(states)).all() and (block == block[:, :1]).all()
    return row_range if same else range(0)


@attrs.frozen
class _Axes:
    """The axes of contents that are gathered together, and what is contiguous in memory.

    Attributes:
        region: The region.
        outer: Axes that count runs, each as its name, its length and its stride.
        inner: Axes inside a contiguous run, from the largest stride to the smallest.
        whole: Whether the contents of a whole block are gathered together.
    """

    region: Region
    outer: tuple[_NamedAxis, ...]
    inner: tuple[_NamedAxis, ...]
    whole: bool

    @property
    def run_bytes(self) -> int:
        """Bytes of a contiguous run."""
        return self.region.chunk_bytes * math.prod(length for _, length, _ in self.inner)

    def by_row(self, sums: Words) -> Words:
        """Return the sums of gathered contents in the shape (rows, units)."""
        names = ["block", *(name for name, _, _ in (*self.outer, *self.inner))]
        lengths = [length for _, length, _ in (*self.outer, *self.inner)]
        order = ["block", "state", "unit"] if self.whole else ["block", "unit"]
        ordered = sums.reshape(-1, *lengths).transpose([names.index(name) for name in order])
        return ordered.reshape(-1, ordered.shape[-1])


def _axes(region: Region, units: int, *, whole: bool) -> _Axes:
    """Return the axes of *units* units of a row, or of a whole block.

    >>> keys = Region(group="g", layer="l", part="k", base=0, num_blocks=4, block_stride=64,
    ...     unit_stride=32, state_stride=8, content_bytes=8, units=2, states=4)
    >>> _axes(keys, 2, whole=False).run_bytes, _axes(keys, 2, whole=True).run_bytes
    (8, 64)
    """
    outer: list[_NamedAxis] = [("unit", units, region.unit_stride)]
    if whole:
        outer.append(("state", region.states, region.state_stride))
    inner, size = list[_NamedAxis](), region.chunk_bytes
    while adjacent := [
        axis for axis in outer if _is_plain(region) and (axis[1] == 1 or axis[2] == size)
    ]:
        inner.insert(0, adjacent[0])
        outer.remove(adjacent[0])
        size *= adjacent[0][1]
    return _Axes(region, tuple(outer), tuple(inner), whole)


def _stored(unit: int, axes: _Axes) -> list[npt.NDArray[np.void]]:
    """Return the runs of each chunk in memory, from *unit* on. An index selects rows of them.

    numpy copies one element of many bytes faster than many elements.
    """
    region = axes.region
    shape = [(region.num_blocks, region.block_stride)]
    if not axes.whole:
        shape.append((region.states, region.state_stride))
    shape += [(length, stride) for _, length, stride in axes.outer]
    lengths, strides = zip(*shape, strict=True)
    memory, stored = _memory(region), list[npt.NDArray[np.void]]()
    for chunk in range(region.chunks):
        start = unit * region.unit_stride + chunk * region.chunk_stride
        first = memory[start : start + axes.run_bytes].view(f"V{axes.run_bytes}")
        stored.append(as_strided(first, lengths, strides, writeable=False))
    return stored


def _gathered(stored: list[npt.NDArray[np.void]], rows: RegionRows, axes: _Axes) -> Bytes:
    """Return the bytes of *rows*, of shape (contents, bytes)."""
    region = axes.region
    index = (rows.block[:: region.states],) if axes.whole else (rows.block, rows.row)
    flat = [np.ascontiguousarray(runs[index]).reshape(-1).view(np.uint8) for runs in stored]
    chunks = [chunk.reshape(-1, region.chunk_bytes) for chunk in flat]
    content = chunks[0] if len(chunks) == 1 else np.concatenate(chunks, axis=1)
    return content.take(_stored_bytes(region.segments), axis=1) if region.segments else content


def _words(content: Bytes) -> Words:
    """Return contents as 8-byte words, padded with zeros."""
    if short := -content.shape[1] % WORD:
        content = np.pad(content, ((0, 0), (0, short)))
    return content.view("<u8")


@lru_cache(maxsize=64)
def _stored_bytes(segments: tuple[Segment, ...]) -> Ints:
    """Return where a row stores each byte of its content.

    >>> _stored_bytes(((0, 2, 2, 4), (2, 2, 2, 4))).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    return np.concatenate(
        [
            (start + np.arange(count)[:, None] * stride + np.arange(size)).ravel()
            for start, size, count, stride in segments
        ]
    )


def _memory(region: Region) -> Bytes:
    """Return the memory of *region* as an array of bytes."""
    addresses = region.address_range
    return np.ctypeslib.as_array((ctypes.c_uint8 * len(addresses)).from_address(addresses.start))


def _hashes(region: Region, first: int, units: int) -> Words:
    numbers = range(first, first + units)
    return np.array([unit_hash(region.layer, region.part, unit) for unit in numbers], np.uint64)
