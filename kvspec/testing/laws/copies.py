"""The laws of bytes: whole requests, copied as the system says and judged by the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvspec.testing.carve import logical_views
from kvspec.testing.laws.system import Trial, copied, deliver
from kvspec.testing.positions import excluded_layers, rows_of
from kvspec.testing.world import Copy, Pair, World, finest, world

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvspec.engines.engine import EngineSpec
    from kvspec.memory.rank_cache import RankCache
    from kvspec.ownership.parallel import RankId
    from kvspec.testing.case import Case
    from kvspec.testing.laws.system import Copies
    from kvspec.testing.world import Held


def cover(trial: Trial) -> Iterator[str]:
    """Yield each byte that is wrong after the transfer, and each that is written twice."""
    moved: list[dict[Pair, list[tuple[int, int]]]] = []
    for name, copies in trial.copies():
        deliver(trial.world, copies)
        for fault in (*_twice(copies), *trial.world.differences()):
            yield f"{name}: {fault}"
        moved.append({pair: _bytes(found) for pair, found in copies.items()})
    if moved[1:] and moved[0] != moved[1]:
        yield "descriptors and ids do not move the same bytes"


def _twice(copies: Copies) -> Iterator[str]:
    """Yield a consumer rank's first byte that two copies write."""
    written: dict[RankId, list[tuple[int, int]]] = {}
    for (_, consumer), found in copies.items():
        written.setdefault(consumer, []).extend((b, b + length) for _, b, length in found)
    for consumer, spans in written.items():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            if start < end:
                yield f"consumer {consumer}: the byte at address {start:#x} is written twice"
                break


def _bytes(copies: list[Copy]) -> list[tuple[int, int]]:
    """Return (source, place) of every byte, ascending."""
    return sorted((a + i, b + i) for a, b, length in copies for i in range(length))


def two_hops(trial: Trial, other: Trial) -> Iterator[str]:
    """Yield what is wrong after the way over *other*'s consumer, if anything arrived there."""
    if not any(trial.system.ways()):
        return
    there, here = _hops(trial.case, other.case)
    for name, way in trial.system.ways():
        for hop, each in (("first", there), ("second", here)):
            deliver(each, copied(each, way))
            yield from (f"{name}, {hop} hop: {fault}" for fault in each.differences())


def _hops(case: Case, other: Case) -> tuple[World, World]:
    """Return the way to *other*'s consumer, and from there: its consumers are its producers."""
    still = excluded_layers(case.producer) | excluded_layers(case.consumer)
    middle = _excluding(other.consumer, still)
    tables, pool = other.request.consumer_blocks, other.consumer_pool
    if case.replica_policy.topology is not None:  # its nodes are those of other ranks
        case = attrs.evolve(case, replica_policy="spread")
    first = attrs.evolve(case.request, consumer_blocks=tables)
    second = attrs.evolve(case.request, producer_blocks=tables)
    there = world(attrs.evolve(case, consumer=middle, consumer_pool=pool, request=first))
    back = attrs.evolve(case, producer=middle, producer_pool=pool, request=second)
    return there, world(back, there.consumers)


def _excluding(engine: EngineSpec, still: set[str]) -> EngineSpec:
    """Return *engine*, excluding the layers *still* that it has."""
    groups = tuple(
        attrs.evolve(group, excluded=tuple(each for each in group.layers if each in still))
        for group in engine.groups
    )
    return attrs.evolve(engine, groups=groups)


def invariance(trial: Trial, other: Trial) -> Iterator[str]:
    """Yield the first content that arrives otherwise between *other*'s engines, of one model."""
    for (name, copies), (_, others) in zip(trial.copies(), other.copies(), strict=True):
        deliver(trial.world, copies)
        deliver(other.world, others)
        arrived = [_arrived(each.world) for each in (trial, other)]
        for key in sorted(arrived[0].keys() | arrived[1].keys()):
            one, two = (found.get(key, set()) for found in arrived)
            if one != two or len(one) > 1:
                layer, part, unit, row = key
                yield f"{name}: layer {layer}, part {part}, unit {unit}, row {row}: {one} and {two}"
                break


def _arrived(here: World) -> dict[tuple[str, str, int, int], set[bytes]]:
    """Return what live contents of all consumer ranks are: by layer, part, unit, token or row."""
    found: dict[tuple[str, str, int, int], set[bytes]] = {}
    case = here.case
    tables, pool = case.request.consumer_blocks, case.consumer_pool
    for rank, (_, storage) in here.consumers.items():
        views = logical_views(case.consumer, rank, storage, pool)
        for rows in rows_of(case.consumer, rank, tables, case.request, source=case.producer):
            numbers = rows.token if rows.part.per_token else rows.row
            for at in rows.live.nonzero()[0]:
                contents = views[rows.key][rows.block[at], :, rows.row[at]]
                for unit, content in zip(rows.units, contents, strict=True):
                    key = (*rows.key[1:], unit, int(numbers[at]))
                    found.setdefault(key, set()).add(content.tobytes())
    return found


def bounds(trial: Trial) -> Iterator[str]:
    """Yield each copy, and each row from its first to its last, that is not in one memory."""
    system = trial.system
    if not any(system.ways()):
        return
    there = trial.world
    here = World(trial.case, _finest(there.producers), _finest(there.consumers), there.before)
    for name, way in system.ways():
        for (p, c), copies in copied(here, way).items():
            sides = here.producers[p][0], here.consumers[c][0]
            for copy in copies:
                for side, start in zip(sides, copy, strict=False):
                    if copy[2] < 1 or not _in_one(side, start, start + copy[2]):
                        yield f"{name}: {p} -> {c}: {copy[2]} bytes at {start:#x} of {side.rank}"
            lists = system.prepared(here, p, c) if name == "ids" and system.prepared else None
            if lists is not None:
                for side, rows in zip(
                    sides, (lists.producer_rows, lists.consumer_rows), strict=True
                ):
                    yield from (f"{p} -> {c}: {fault}" for fault in _rows_outside(side, rows))


def _rows_outside(cache: RankCache, rows: npt.NDArray[np.uint64]) -> Iterator[str]:
    if rows.dtype != np.uint64 or rows.ndim != 2:  # noqa: PLR2004 - rows of five
        yield f"rows of {rows.dtype}, {rows.shape}: expected uint64 of shape (n, 5)"
        return
    for address, length, device, stride, count in rows.tolist():
        end = address + (count - 1) * stride + length
        wrong = device != cache.memory[0].device or min(count, length) < 1
        if wrong or not _in_one(cache, address, end):
            yield f"row {(address, length, device, stride, count)} of {cache.rank}"


def _finest(side: Held) -> Held:
    return {rank: (finest(cache), storage) for rank, (cache, storage) in side.items()}


def _in_one(cache: RankCache, start: int, stop: int) -> bool:
    """Return whether the bytes from *start* to *stop* lie in one memory of *cache*."""
    return any(m.address <= start and stop <= m.address + m.length for m in cache.memory)
