"""Write and read the addresses of one rank's cache in few numbers.

Invariant: the message repeats nothing that the engine determines (groups, contents, units, rows),
so it cannot contradict the engine. The cache that is read back has passed `RankCache`: each region
is inside its memory, and no content overlaps another.

How it works:
    A cache has thousands of regions, but few kinds of them. Each list of values is written as a
    table of distinct values and their numbers. Addresses become steps from one region to the next,
    and all steps are divided by their greatest common divisor, `unit`.

    For example, one memory at address 1000 has three layers. Each has the parts k and v, in blocks
    of equal shape:

        layer     k at    v at    steps         steps / 100
        l.0       1000    1100    0, 100        0, 1
        l.1       1200    1300    100, 100      1, 1
        l.2       1400    1500    100, 100      1, 1

    The step of the first region in a memory counts from the begin of the memory. Each other step
    counts from the region before. `written_regions` returns:

        shapes    one shape, number 0
        cells     0: (k, shape 0, +1 memory), (v, shape 0, +0)      the first layer
                  1: (k, shape 0, +0), (v, shape 0, +0)             all other layers
        paces     0: (0, 1)    1: (1, 1)
        unit      100
        layers    (l.0, cells 0, paces 0), (l.1, cells 1, paces 1), (l.2, cells 1, paces 1)

    So 80 layers need 80 triples of small numbers, and two entries in each table. Memories are
    written in the same way by `written_memory`: kinds, runs of equal kinds, and the gaps between
    them. `read_memory` and `read_cache` reverse both, and check each number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from math import gcd
from typing import TypeVar

from kvspec.engines.engine import EngineSpec, HeldPart
from kvspec.errors import SpecError, WireError
from kvspec.memory.rank_cache import Memory, RankCache, Region
from kvspec.ownership.parallel import RankId
from kvspec.wire.decode import Decoder, refuse

H = TypeVar("H", bound=Hashable)

# The regions of one layer: part, number of the shape, memories between this region and the last.
Cells = tuple[tuple[str, int, int], ...]
# Number of blocks, and the strides of blocks, units, states and chunks.
Shape = tuple[int, int, int, int, int]
# A unit in bytes, and multiples of it.
Steps = tuple[int, tuple[int, ...]]
# Shapes, cells, steps from region to region in units, the unit in bytes, and for each layer the
# numbers of its name, cells and steps.
Places = tuple[list[Shape], list[Cells], list[tuple[int, ...]], int, list[tuple[int, int, int]]]
# Kinds of memory (length, type, device), runs (kind, count), and the gaps between the memories.
MemoryRuns = tuple[list[tuple[int, str, int]], list[tuple[int, int]], Steps]


def written_memory(memory: Sequence[Memory]) -> MemoryRuns:
    """Return the memories as tables and steps. See the module docstring."""
    kinds, numbers = _tabled((each.length, each.memory_type, each.device) for each in memory)
    ends = [0, *(each.end for each in memory)]
    gaps = [each.address - end for each, end in zip(memory, ends, strict=False)]
    return kinds, [(number, len(list(same))) for number, same in groupby(numbers)], _steps(gaps)


def written_regions(cache: RankCache) -> Places:
    """Return the regions of *cache* as tables and steps. See the module docstring."""
    numbers = {layer: number for number, layer in enumerate(cache.engine.homes)}
    shapes, shape_of = _tabled(
        (
            each.num_blocks,
            each.block_stride,
            each.unit_stride,
            each.state_stride,
            each.chunk_stride,
        )
        for each in cache.regions
    )
    homes = _homes(cache)
    starts = [cache.memory[home].address for home in homes]
    steps = [
        region.base - (start if home != last else before)
        for region, start, before, (last, home) in zip(
            cache.regions,
            starts,
            [0, *(each.base for each in cache.regions)],
            pairwise([-1, *homes]),
            strict=False,
        )
    ]
    unit = gcd(*steps) or 1
    on = [home - last for last, home in pairwise([-1, *homes])]
    places = range(len(cache.regions))
    layers = [list(same) for _, same in groupby(places, lambda n: cache.regions[n].layer)]
    cells, cells_of = _tabled(
        tuple((cache.regions[n].part, shape_of[n], on[n]) for n in layer) for layer in layers
    )
    paces, pace_of = _tabled(tuple(steps[n] // unit for n in layer) for layer in layers)
    named = (numbers[cache.regions[layer[0]].layer] for layer in layers)
    return shapes, cells, paces, unit, list(zip(named, cells_of, pace_of, strict=True))


def _homes(cache: RankCache) -> list[int]:
    """Return, for each region, the number of the memory that contains it."""
    reach: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
    for number, each in sorted(enumerate(cache.memory), key=lambda item: item[1].address):
        starts, numbers = reach.setdefault((each.memory_type, each.device), ([], []))
        starts.append(each.address)
        numbers.append(number)
    found = []
    for region in cache.regions:
        starts, numbers = reach[region.memory_type, region.device]
        found.append(numbers[bisect_right(starts, region.base) - 1])
    return found


def _tabled(values: Iterable[H]) -> tuple[list[H], list[int]]:
    """Return the distinct values, and the number of each value among them."""
    numbers: dict[H, int] = {}
    places = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), places


def _steps(steps: list[int]) -> Steps:
    unit = gcd(*steps) or 1
    return unit, tuple(step // unit for step in steps)


def read_memory(path: str, decoder: Decoder, memories: MemoryRuns) -> tuple[Memory, ...]:
    """Return the memories of a message."""
    kinds, runs, (unit, gaps) = memories
    found: list[Memory] = []
    end = 0
    for number, count in runs:
        # A count is one small number, but each memory takes work: charge it before the loop.
        decoder.charge(path, count)
        if not 0 <= number < len(kinds) or len(found) + count > len(gaps):
            raise WireError(
                f"{path}.runs",
                (number, count),
                "a known kind, and a count with a gap for each memory",
            )
        for _ in range(count):
            address = end + gaps[len(found)] * unit
            try:
                found.append(Memory(address, *kinds[number]))
            except SpecError as error:
                refuse(f"{path}[{len(found)}]", error, "memory")
            end = found[-1].end
    if len(found) != len(gaps):
        raise WireError(f"{path}.gaps", len(gaps), f"{len(found)} gaps, one for each memory")
    return tuple(found)


def read_cache(
    path: str, engine: EngineSpec, rank: RankId, memory: tuple[Memory, ...], places: Places
) -> RankCache:
    """Return the cache of a message."""
    try:
        engine.parallel.check_rank(rank)
        return RankCache(engine, rank, tuple(_regions(path, engine, rank, memory, places)), memory)
    except SpecError as error:
        refuse("cache", error, "a cache")


def _regions(
    path: str, engine: EngineSpec, rank: RankId, memory: tuple[Memory, ...], places: Places
) -> Iterator[Region]:
    """Yield the regions of a message. The engine determines all but their addresses and strides."""
    shapes, cells, paces, unit, layers = places
    held, names = engine.held(rank), tuple(engine.homes)
    home, base = -1, 0
    for at, (layer, cell, pace) in enumerate(layers):
        where = f"{path}[{at}]"
        for number, table in ((layer, names), (cell, cells), (pace, paces)):
            _known(where, number, table)
        if len(cells[cell]) != len(paces[pace]):
            raise WireError(where, len(paces[pace]), f"{len(cells[cell])} steps, one for each part")
        for (part, shape, on), step in zip(cells[cell], paces[pace], strict=True):
            home += on
            _known(where, shape, shapes)
            _known(where, home, memory)
            base = (memory[home].address if on else base) + step * unit
            wanted = held.get((names[layer], part))
            if wanted is None:
                raise WireError(where, f"{names[layer]}.{part}", f"a part that {rank} holds")
            yield _region(names[layer], part, base, shapes[shape], wanted, memory[home])


def _known(path: str, number: int, table: Sequence[object]) -> None:
    if not 0 <= number < len(table):
        raise WireError(path, number, f"a number below {len(table)}")


def _region(
    layer: str, part: str, base: int, shape: Shape, wanted: HeldPart, memory: Memory
) -> Region:
    blocks, block_stride, unit_stride, state_stride, chunk_stride = shape
    return Region(
        group=wanted.group,
        layer=layer,
        part=part,
        base=base,
        num_blocks=blocks,
        block_stride=block_stride,
        unit_stride=unit_stride,
        state_stride=state_stride,
        content_bytes=wanted.content_bytes,
        units=wanted.units,
        states=wanted.states,
        chunks=wanted.chunks,
        chunk_stride=chunk_stride,
        memory_type=memory.memory_type,
        device=memory.device,
    )
