"""What one block of one rank looks like in memory: stretches of bytes, and where they are drawn.

Law: a stretch is contiguous and holds one part of one layer; where it lies comes from the regions
alone. All of a side is drawn to one scale.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import islice

import attrs
import numpy as np

from kvspec.memory.rank_cache import Memory, RankCache, Region
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Ints

_OMITTED = 30.0
"""Pixels of a gap that is left out, or fewer where there are many."""


@attrs.frozen
class Stretch:
    """Contiguous bytes of one part of one layer: *units* of the model, counted as sharded."""

    memory: int
    start: int
    stop: int
    layer: str
    part: str
    units: range


@attrs.frozen
class Window:
    """A block of a cache, and which of its tokens are shown; of a state, all of it."""

    cache: RankCache
    block: int
    tokens: range

    def stretches(self, layers: Collection[str], *, by_unit: bool) -> list[Stretch]:
        """Return the stretches of *layers* as they lie; those of one unit apart if *by_unit*."""
        memories: dict[Memory, int] = {}
        found: list[Stretch] = []
        for region in (each for each in self.cache.regions if each.layer in layers):
            home = next(m for m in self.cache.memory if 0 <= region.base - m.address < m.length)
            number = memories.setdefault(home, len(memories))
            found += self._of(region, number, by_unit=by_unit)
        return sorted(found, key=lambda each: (each.memory, each.start))

    def _of(self, region: Region, memory: int, *, by_unit: bool) -> list[Stretch]:
        part, first = self.part(region)
        size = part.tokens_per_state
        rows = np.arange(region.states)
        if part.per_token:
            rows = rows[self.tokens.start // size : -(-self.tokens.stop // size)]
        units = np.arange(region.units)
        grid = units[:, None] * region.unit_stride + rows * region.state_stride
        address = grid[..., None] + np.arange(region.chunks) * region.chunk_stride
        address = (address + region.address(self.block, 0, 0)).ravel()
        packs = np.repeat((units + first) // part.granularity, len(rows) * region.chunks)
        order = np.argsort(address, kind="stable")
        separate = np.diff(address[order]) != region.chunk_bytes
        if by_unit:
            separate |= np.diff(packs[order]) != 0
        return [
            Stretch(
                memory,
                int(address[own[0]]),
                int(address[own[-1]]) + region.chunk_bytes,
                region.layer,
                region.part,
                range(int(packs[own].min()), int(packs[own].max()) + 1),
            )
            for own in np.split(order, np.flatnonzero(separate) + 1)
        ]

    def part(self, region: Region) -> tuple[Part, int]:
        """Return the part that lies in *region*, and the first unit of the model that does."""
        engine = self.cache.engine
        group = engine.group(region.group)
        parts = group.spec.of_layer(region.layer).parts
        part = next(part for part in parts if part.name == region.part)
        return part, engine.units(group, part, self.cache.rank).start


@attrs.frozen(slots=False)
class Axis:
    """Stretches side by side, *lefts* in pixels, at *scale* pixels a byte.

    *omitted*: which of the gaps between them, each before a stretch but the first, are left out.
    """

    stretches: list[Stretch]
    lefts: list[float]
    scale: float
    omitted: list[bool]

    @staticmethod
    def of(stretches: list[Stretch], left: float, width: float) -> Axis:
        """Lay *stretches* out on *width* pixels from *left*; long gaps are left out."""
        starts, stops = np.array([(each.start, each.stop) for each in stretches], np.int64).T
        sizes, gaps = stops - starts, starts[1:] - stops[:-1]
        omitted = np.diff([each.memory for each in stretches]) != 0
        omitted |= gaps > sizes.sum() // 8
        out = int(omitted.sum())
        mark = min(_OMITTED, width / 2 / max(out, 1))
        scale = float((width - mark * out) / (sizes.sum() + gaps[~omitted].sum()))
        steps = sizes[:-1] * scale + np.where(omitted, mark, gaps * scale)
        lefts = left + np.concatenate([[0.0], np.cumsum(steps)])
        return Axis(stretches, lefts.tolist(), scale, omitted.tolist())

    def __iter__(self) -> Iterator[tuple[Stretch, float, float]]:
        """Yield every stretch, and where it begins and ends in pixels."""
        for stretch, left in zip(self.stretches, self.lefts, strict=True):
            yield stretch, left, left + (stretch.stop - stretch.start) * self.scale

    def gaps(self) -> Iterator[tuple[float, float, bool]]:
        """Yield where each gap begins and ends in pixels, and whether it is left out."""
        for (_, _, end), (_, begin, _), omitted in zip(
            self, islice(self, 1, None), self.omitted, strict=False
        ):
            if omitted or begin - end > self.scale / 2:
                yield end, begin, omitted

    @cached_property
    def chunks(self) -> list[tuple[Stretch, float]]:
        """The stretches that touch as one, as they are drawn, each with where it begins."""
        chunks: list[tuple[Stretch, float]] = []
        for own, left, _ in self:
            last, begin = chunks[-1] if chunks else (own, left)
            if (last.memory, last.stop) == (own.memory, own.start):
                chunks[-1] = attrs.evolve(last, stop=own.stop), begin
            else:
                chunks.append((own, left))
        return chunks

    def cut(self, runs: Ints, column: int) -> Ints:
        """Return *runs* cut to what is drawn here.

        Each is (producer address, consumer address, length, number); *column* has the addresses.
        """
        chunks = np.array(sorted((each.start, each.stop) for each, _ in self.chunks), np.int64)
        begin, end = runs[:, column], runs[:, column] + runs[:, 2]
        first = np.searchsorted(chunks[:, 1], begin, side="right")
        count = np.searchsorted(chunks[:, 0], end, side="left") - first
        row = np.repeat(np.arange(len(runs)), count)
        chunk = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first, count)
        start = np.maximum(begin[row], chunks[chunk, 0])
        length = np.minimum(end[row], chunks[chunk, 1]) - start
        skip = start - begin[row]
        return np.stack([runs[row, 0] + skip, runs[row, 1] + skip, length, runs[row, 3]], axis=1)

    def span(self, start: int, length: int) -> tuple[float, float]:
        """Return the pixels of some bytes of one chunk."""
        own, begin = next(each for each in self.chunks if each[0].start <= start < each[0].stop)
        left = begin + (start - own.start) * self.scale
        return left, left + length * self.scale

    def units(self, start: int, length: int) -> set[int]:
        """Return the units that lie in some bytes."""
        inside = (e for e in self.stretches if e.start < start + length and start < e.stop)
        return {unit for stretch in inside for unit in stretch.units}
