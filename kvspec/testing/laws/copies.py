"""The laws of bytes: whole requests, copied as the system describes and judged by the oracle.

Laws 1 (exact cover), 4 (two hops), 9 (layout invariance) and 10 (bounds).

How it works:
    Each law executes the copies of the system in the memory of a `World`, and lets the oracle
    compare the memory of each consumer rank byte by byte. Example of law 4: a case moves a request
    from engine A (TP 4) to engine B (TP 2), and the other case ends at engine C (TP 3).

        first hop     A -> C, with the block tables that the other case has for C
        second hop    C -> B, out of the memory that the first hop wrote

    After both hops the consumer B must hold the same bytes as after the direct transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvspec.testing import oracle
from kvspec.testing.carve import logical_views
from kvspec.testing.laws.system import NothingToJudgeError, Trial, copied, deliver
from kvspec.testing.positions import excluded_layers, rows_of
from kvspec.testing.world import ByteCopy, Pair, Storage, World, finest, inside, world

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvspec.engines.engine import EngineSpec
    from kvspec.memory.rank_cache import RankCache
    from kvspec.ownership.parallel import RankId
    from kvspec.testing.case import Case
    from kvspec.testing.laws.system import CopiesByPair
    from kvspec.testing.world import Held


def cover(trial: Trial) -> Iterator[str]:
    """Yield each byte that is wrong after the transfer, that two copies write, or that is foreign.

    `kvspec.verify` has the same definition of a wrong byte.
    """
    moved: list[dict[Pair, list[tuple[int, int]]]] = []
    for name, copies in trial.copies():
        deliver(trial.world, copies)
        here = trial.world
        for fault in (*_twice(here, copies), *here.differences(), *_foreign(here, copies)):
            yield f"{name}: {fault}"
        moved.append({pair: _bytes(pair_copies) for pair, pair_copies in copies.items()})
    if moved[1:] and moved[0] != moved[1]:
        p, c = next(pair for pair in moved[0] if moved[0][pair] != moved[1].get(pair))
        yield (
            f"producer {p}, consumer {c}: expected ids that move the same bytes as the descriptors,"
            " got other bytes"
        )


def _twice(here: World, copies: CopiesByPair) -> Iterator[str]:
    """Yield the first byte of each consumer rank that two copies write."""
    written: dict[RankId, list[tuple[int, int, str]]] = {}
    for (producer, consumer), pair_copies in copies.items():
        written.setdefault(consumer, []).extend(
            (b, b + length, f"{length} bytes from producer {producer}, address {a:#x}")
            for a, b, length in pair_copies
        )
    for consumer, ranges in written.items():
        for (_, end, first), (start, _, second) in pairwise(sorted(ranges)):
            if start < end:
                where = f"consumer {consumer}, {_place(here.consumers[consumer][0], start)}"
                yield f"{where}: expected 1 write, got 2: {first}, and {second}"
                break


def _foreign(here: World, copies: CopiesByPair) -> Iterator[str]:
    """Yield the first dead byte of each pair of ranks whose source is not the request's own.

    A live byte with another source is wrong, so the oracle finds it.
    """
    own: dict[RankId, Storage] = {}
    for (producer, consumer), pair_copies in copies.items():
        dead, (cache, storage) = here.right(consumer)[1], here.producers[producer]
        for a, b, length in pair_copies:
            name, at = inside(here.consumers[consumer][1], b, length)
            written = dead[name][at : at + length]
            if not written.any():
                continue
            if producer not in own:
                own[producer] = own_bytes(here, producer)
            name, at = inside(storage, a, length)
            foreign = np.flatnonzero(written > own[producer][name][at : at + length])
            if len(foreign):
                where = f"producer {producer}, {_place(cache, a + int(foreign[0]))}"
                yield f"{where}: expected reads of the request's blocks, got one of a dead byte"
                break


def own_bytes(here: World, producer: RankId) -> Storage:
    """Return a mask of the bytes of a producer rank that belong to the request."""
    case, storage = here.case, here.producers[producer][1]
    # Cached tokens are the request's own as well.
    request = attrs.evolve(case.request, cached_tokens=0)
    own = oracle.each_array(storage, np.zeros_like)
    views = logical_views(case.producer, producer, own, case.producer_pool)
    tables = request.producer_blocks
    for rows in rows_of(case.producer, producer, tables, request, source=case.consumer):
        mark = rows.live | rows.dead if rows.part.per_token else rows.known & rows.live.any()
        views[rows.key][rows.block[mark], :, rows.row[mark]] = 1
    return own


def _place(cache: RankCache, address: int) -> str:
    """Return which content of a rank lies at *address*, for a message."""
    for region in cache.regions:
        if (place := region.locate(address)) is not None:
            block, unit, row, byte = place
            number = cache.part_of(region)[1][unit]
            where = f"unit {number}, block {block}, row {row}, byte {byte}"
            return f"layer {region.layer}, part {region.part}, {where}"
    return f"address {address:#x}"


def _bytes(copies: list[ByteCopy]) -> list[tuple[int, int]]:
    """Return (producer address, consumer address) of each byte, sorted."""
    return sorted((a + i, b + i) for a, b, length in copies for i in range(length))


def two_hops(trial: Trial, other: Trial) -> Iterator[str]:
    """Yield each wrong byte of a transfer through the consumer of *other*."""
    if not any(trial.system.ways()):
        return
    third, fits = other.case.consumer, trial.system.supports.fit
    if not fits(trial.case.producer, third) or not fits(third, trial.case.consumer):
        raise NothingToJudgeError("the system does not support a transfer through the third engine")
    first, second = _hops(trial.case, other.case)
    for name, way in trial.system.ways():
        for hop, hop_world in (("first", first), ("second", second)):
            deliver(hop_world, copied(hop_world, name, way))
            yield from (f"{name}, {hop} hop: {fault}" for fault in hop_world.differences())


def _hops(case: Case, other: Case) -> tuple[World, World]:
    """Return the worlds of both hops. The consumers of the first are the producers of the second.

    The engine in the middle excludes all layers that do not move in *case*.
    """
    excluded = excluded_layers(case.producer) | excluded_layers(case.consumer)
    middle = _excluding(other.consumer, excluded)
    tables, pool = other.request.consumer_blocks, other.consumer_pool
    # A topology contains the ranks of the two engines, and the middle engine has other ranks.
    if case.replica_policy.topology is not None:
        case = attrs.evolve(case, replica_policy="spread")
    to_middle = attrs.evolve(case.request, consumer_blocks=tables)
    from_middle = attrs.evolve(case.request, producer_blocks=tables)
    first = world(attrs.evolve(case, consumer=middle, consumer_pool=pool, request=to_middle))
    onward = attrs.evolve(case, producer=middle, producer_pool=pool, request=from_middle)
    return first, world(onward, first.consumers)


def _excluding(engine: EngineSpec, layers: set[str]) -> EngineSpec:
    """Return *engine*, which excludes those of its layers that are in *layers*."""
    groups = tuple(
        attrs.evolve(group, excluded=tuple(name for name in group.layers if name in layers))
        for group in engine.groups
    )
    return attrs.evolve(engine, groups=groups)


def invariance(trial: Trial, other: Trial) -> Iterator[str]:
    """Yield the first content that differs between *trial* and *other*, or between two ranks."""
    for (name, copies), (_, other_copies) in zip(trial.copies(), other.copies(), strict=True):
        deliver(trial.world, copies)
        deliver(other.world, other_copies)
        arrived = [_arrived(side.world) for side in (trial, other)]
        for key in sorted(arrived[0].keys() | arrived[1].keys()):
            first, second = (contents.get(key, set()) for contents in arrived)
            if first != second or len(first) > 1:
                layer, part, unit, row = key
                yield (
                    f"{name}: consumers, layer {layer}, part {part}, unit {unit}, token or row "
                    f"{row}: expected equal bytes in both cases, got {_hex(first)} and "
                    f"{_hex(second)}"
                )
                break


def _hex(contents: set[bytes]) -> str:
    """Return the bytes of all *contents* for a message, or "nothing"."""
    return " or ".join(sorted(content.hex() for content in contents)) or "nothing"


def _arrived(here: World) -> dict[tuple[str, str, int, int], set[bytes]]:
    """Return the live contents of all consumer ranks, by layer, part, unit, and token or row.

    A key has several contents if replicas differ.
    """
    arrived: dict[tuple[str, str, int, int], set[bytes]] = {}
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
                    arrived.setdefault(key, set()).add(content.tobytes())
    return arrived


def bounds(trial: Trial) -> Iterator[str]:
    """Yield each copy and each row that does not lie in one memory of its side.

    The memories of each rank are cut as finely as possible, so that adjacent memories are not one.
    """
    system = trial.system
    if not any(system.ways()):
        return
    whole = trial.world
    here = World(trial.case, _finest(whole.producers), _finest(whole.consumers), whole.before)
    for name, way in system.ways():
        for (p, c), copies in copied(here, name, way).items():
            sides = here.producers[p][0], here.consumers[c][0]
            for copy in copies:
                for role, side, start in zip(("producer", "consumer"), sides, copy, strict=False):
                    if not _in_one(side, start, start + copy[2]):
                        yield (
                            f"{name}: {role} {side.rank}, address {start:#x}: expected a copy "
                            f"inside one memory, got {copy[2]} bytes"
                        )
            lists = system.prepared(here, p, c) if name == "ids" and system.prepared else None
            if lists is not None:
                yield from (
                    f"{name}: {fault}"
                    for role, side, rows in (
                        ("producer", sides[0], lists.producer_rows),
                        ("consumer", sides[1], lists.consumer_rows),
                    )
                    for fault in _rows_outside(role, side, rows)
                )


def _rows_outside(role: str, cache: RankCache, rows: npt.NDArray[np.uint64]) -> Iterator[str]:
    """Yield each row that does not lie in one memory of *cache* with all its bytes."""
    where = f"{role} {cache.rank}"
    for address, length, device, stride, count in rows.tolist():
        end = address + (count - 1) * stride + length
        wrong = device != cache.memory[0].device or min(count, length) < 1
        if wrong or not _in_one(cache, address, end):
            row = (address, length, device, stride, count)
            yield f"{where}: expected a row inside one memory of its device, got {row}"


def _finest(side: Held) -> Held:
    """Return *side* with the memory of each rank cut as finely as its regions allow."""
    return {rank: (finest(cache), storage) for rank, (cache, storage) in side.items()}


def _in_one(cache: RankCache, start: int, stop: int) -> bool:
    """Return whether the bytes from *start* to *stop* lie in one memory of *cache*."""
    return any(m.address <= start and stop <= m.address + m.length for m in cache.memory)
