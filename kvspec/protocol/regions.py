"""Where one rank's cache lies, in few numbers: what repeats is written once.

Law: nothing is sent that the engine already says (groups, contents, units, rows), so nothing of it
can be contradicted. What comes back passed `RankCache`: inside its memory, no content over another.
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
from kvspec.protocol.decode import Decoder, refuse

H = TypeVar("H", bound=Hashable)

Cells = tuple[tuple[str, int, int], ...]
"""The regions of one layer: part, number of its shape, how many memories on it lies."""
Shape = tuple[int, int, int, int, int]
"""Blocks, and the strides of blocks, units, states and chunks."""
Steps = tuple[int, tuple[int, ...]]
"""A unit in bytes, and numbers of them."""
Places = tuple[list[Shape], list[Cells], list[tuple[int, ...]], int, list[tuple[int, int, int]]]
"""Shapes; cells; steps from region to region; their unit; numbers of layer, cells and steps."""
MemoryRuns = tuple[list[tuple[int, str, int]], list[tuple[int, int]], Steps]
"""Kinds of memory (length, type, device); their numbers, as runs; gaps from end to beginning."""


def written_memory(memory: Sequence[Memory]) -> MemoryRuns:
    """Return the memories, few numbers for many that are alike."""
    kinds, numbers = _tabled((each.length, each.memory_type, each.device) for each in memory)
    ends = [0, *(each.end for each in memory)]
    gaps = [each.address - end for each, end in zip(memory, ends, strict=False)]
    return kinds, [(number, len(list(same))) for number, same in groupby(numbers)], _steps(gaps)


def written_regions(cache: RankCache) -> Places:
    """Return the regions of *cache*: by layer its parts, strides, and steps between them."""
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
    """Return, for each region, the number of the memory in which it begins."""
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
    """Return the distinct values, and for each value its number among them."""
    numbers: dict[H, int] = {}
    places = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), places


def _steps(steps: list[int]) -> Steps:
    unit = gcd(*steps) or 1
    return unit, tuple(step // unit for step in steps)


def read_memory(path: str, decoder: Decoder, memories: MemoryRuns) -> tuple[Memory, ...]:
    """Return the memories that a message tells of."""
    kinds, runs, (unit, gaps) = memories
    found: list[Memory] = []
    end = 0
    for number, count in runs:
        decoder.charge(path, count)
        if not 0 <= number < len(kinds) or len(found) + count > len(gaps):
            raise WireError(f"{path}.runs", (number, count), "as many gaps, and kinds, as memories")
        for _ in range(count):
            address = end + gaps[len(found)] * unit
            try:
                found.append(Memory(address, *kinds[number]))
            except SpecError as error:
                refuse(f"{path}[{len(found)}]", error, "memory")
            end = found[-1].end
    if len(found) != len(gaps):
        raise WireError(f"{path}.gaps", len(gaps), f"{len(found)}, as many as memories")
    return tuple(found)


def read_cache(
    path: str, engine: EngineSpec, rank: RankId, memory: tuple[Memory, ...], places: Places
) -> RankCache:
    """Return the cache whose regions a message tells of."""
    try:
        engine.parallel.check_rank(rank)
        return RankCache(engine, rank, tuple(_regions(path, engine, rank, memory, places)), memory)
    except SpecError as error:
        refuse("cache", error, "a cache")


def _regions(
    path: str, engine: EngineSpec, rank: RankId, memory: tuple[Memory, ...], places: Places
) -> Iterator[Region]:
    """Yield the regions, each with what the engine says of its part."""
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
