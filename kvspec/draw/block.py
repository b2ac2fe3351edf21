"""What one block of one rank looks like in memory: stretches of bytes, in the order they lie.

Law: a stretch is contiguous and holds one part of one layer; where it lies comes from the regions
alone. Nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs
import numpy as np

from kvspec.memory.regions import RankCache, Region
from kvspec.ownership.intervals import shift
from kvspec.ownership.tokens import Ints


@attrs.frozen
class Stretch:
    """Contiguous bytes of one part of one layer: *units* of the model, counted as dealt."""

    memory: int
    start: int
    stop: int
    layer: str
    part: str
    units: range

    def __len__(self) -> int:
        return self.stop - self.start


@attrs.define
class Window:
    """Which block of a side is shown, and which of its rows."""

    cache: RankCache
    block: int
    first_state: int
    states: int

    def stretches(self, layers: Sequence[str], *, by_unit: bool) -> list[Stretch]:
        """Return the stretches of *layers*, ascending; those of one unit apart if *by_unit*."""
        chosen = set(layers)
        regions = [each for each in self.cache.regions if each.layer in chosen]
        found: list[Stretch] = []
        for region in regions:
            found += self._of(region, by_unit=by_unit)
        return sorted(found, key=lambda each: (each.memory, each.start))

    def _of(self, region: Region, *, by_unit: bool) -> list[Stretch]:
        tokens, piece, first = self._part(region)
        states = np.arange(region.states)
        if tokens:
            states = states[self.first_state : self.first_state + self.states]
        units = np.arange(region.units)
        grid = units[:, None] * region.unit_stride + states[None, :] * region.state_stride
        address = (grid + region.address(self.block, 0, 0)).ravel()
        pieces = np.repeat((units + first) // piece, len(states))
        order = np.argsort(address, kind="stable")
        address, pieces = address[order], pieces[order]
        breaks = address[1:] != address[:-1] + region.content_bytes
        if by_unit:
            breaks |= pieces[1:] != pieces[:-1]
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        stops = np.concatenate([starts[1:], [len(address)]])
        memory = self._memory(region)
        return [
            Stretch(
                memory,
                int(address[a]),
                int(address[b - 1]) + region.content_bytes,
                region.layer,
                region.part,
                range(int(pieces[a:b].min()), int(pieces[a:b].max()) + 1),
            )
            for a, b in zip(starts.tolist(), stops.tolist(), strict=True)
        ]

    def _part(self, region: Region) -> tuple[int, int, int]:
        """Return tokens of a row, units dealt at a time, and the first unit of the model."""
        engine, rank = self.cache.engine, self.cache.rank
        group = engine.group(region.group)
        parts = group.spec.of_layer(region.layer).parts
        part = next(each for each in parts if each.name == region.part)
        first = engine.units(group, part, rank).start
        return part.tokens_per_state, part.deal_in, first

    def _memory(self, region: Region) -> int:
        for at, each in enumerate(self.cache.memory):
            if each.address <= region.base < each.address + each.length:
                return at
        return len(self.cache.memory)


@attrs.frozen
class Placed:
    """A stretch and where it is drawn, from *left* to *right*."""

    stretch: Stretch
    left: float
    right: float


@attrs.frozen
class Break:
    """Bytes between two stretches that are left out, or drawn empty if *true* to scale."""

    left: float
    right: float
    size: int | None
    true: bool


def place(
    stretches: Sequence[Stretch], left: float, width: float, mark: float
) -> tuple[list[Placed], list[Break]]:
    """Lay stretches side by side on *width* pixels, long gaps cut to *mark* pixels."""
    shown = sum(map(len, stretches))
    gaps: list[int | None] = [
        after.start - before.stop if after.memory == before.memory else None
        for before, after in pairwise(stretches)
    ]
    true = [gap is not None and gap <= shown // 8 for gap in gaps]
    drawn = shown + sum(gap or 0 for gap, keep in zip(gaps, true, strict=True) if keep)
    scale = max(width - mark * true.count(False), width / 3) / max(drawn, 1)
    placed: list[Placed] = []
    breaks: list[Break] = []
    x = left
    for at, each in enumerate(stretches):
        if at and gaps[at - 1] != 0:
            gap = gaps[at - 1]
            wide = (gap or 0) * scale if true[at - 1] else mark
            breaks.append(Break(x, x + wide, gap, true[at - 1]))
            x += wide
        placed.append(Placed(each, x, x + len(each) * scale))
        x = placed[-1].right
    return placed, breaks


@attrs.frozen
class Chunk:
    """Stretches that follow each other without a gap: addresses, and pixels."""

    bytes: range
    left: float
    right: float

    def span(self, part: range) -> tuple[float, float]:
        """Return the pixels of some of its bytes."""
        scale = (self.right - self.left) / len(self.bytes)
        start = self.left + (part.start - self.bytes.start) * scale
        return start, start + len(part) * scale


def chunks(placed: Sequence[Placed]) -> list[Chunk]:
    """Return the chunks of a side, ascending by address."""
    found: list[Chunk] = []
    for each in placed:
        own = range(each.stretch.start, each.stretch.stop)
        if found and found[-1].bytes.stop == own.start and found[-1].right == each.left:
            last = found.pop()
            found.append(Chunk(range(last.bytes.start, own.stop), last.left, each.right))
        else:
            found.append(Chunk(own, each.left, each.right))
    return sorted(found, key=lambda each: each.bytes.start)


def meeting(rows: Ints, column: int, shown: Sequence[Chunk]) -> Ints:
    """Return the rows (producer address, consumer address, length) that touch what is shown."""
    starts = np.array([each.bytes.start for each in shown], np.int64)
    stops = np.array([each.bytes.stop for each in shown], np.int64)
    at = np.searchsorted(stops, rows[:, column], side="right")
    inside = at < len(shown)
    first = starts[np.minimum(at, len(shown) - 1)]
    return rows[inside & (first < rows[:, column] + rows[:, 2])]


def clipped(
    row: tuple[int, int, int], shown: tuple[Sequence[Chunk], Sequence[Chunk]]
) -> list[tuple[tuple[float, float], tuple[float, float], range]]:
    """Return where one run is seen on both sides: pixels, pixels, and bytes of the run."""
    sides: list[list[tuple[range, Chunk]]] = []
    for base, side in zip(row, shown, strict=False):
        inside = []
        for chunk in side:
            start, stop = max(chunk.bytes.start, base), min(chunk.bytes.stop, base + row[2])
            if start < stop:
                inside.append((range(start - base, stop - base), chunk))
        sides.append(inside)
    found = []
    for ours, mine in sides[0]:
        for theirs, other in sides[1]:
            part = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
            if part:
                spans = mine.span(shift(part, row[0])), other.span(shift(part, row[1]))
                found.append((*spans, part))
    return found
