"""The law of long runs: nothing that could be one copy is two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.testing.carve import block_split, logical_views
from kvspec.testing.laws.system import copied
from kvspec.testing.positions import rows_of
from kvspec.testing.world import Copy, PreparedLists, World, inside, world

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvspec.ownership.parallel import RankId
    from kvspec.testing.case import Case
    from kvspec.testing.laws.system import System


def maximal(system: System, case: Case) -> Iterator[str]:
    """Yield each two descriptors of one group that touch on both sides."""
    if system.descriptors is None:
        return
    here = world(case)
    for (p, c), copies in copied(here, system.descriptors).items():
        found: dict[str, set[tuple[int, int]]] = {}
        for source, place, length in copies:
            name, _ = inside(here.consumers[c][1], place, length)
            found.setdefault(name, set()).add((source, place))
        for source, place, length in copies:
            name, offset = inside(here.consumers[c][1], place, length)
            if (source + length, place + length) in found[name]:
                end = offset + length
                yield f"{p} -> {c}: one copy ends and one begins at byte {end} of group {name}"


def minimal(system: System, case: Case) -> Iterator[str]:
    """Yield ids that move a block without a live byte, or what one longer copy of a row could."""
    if system.prepared is None:
        return
    here = world(case)
    for (p, c), copies in copied(here, dict(system.ways())["ids"]).items():
        lists = system.prepared(here, p, c)
        if lists is None:
            continue
        must, may, live = here.live(c)
        block = _blocks(here, c)
        for _, place, length in copies:
            name, offset = inside(here.consumers[c][1], place, length)
            moved = set(block[name][offset : offset + length].tolist())
            if not moved <= set(block[name][live[name]].tolist()):
                yield f"{p} -> {c}: {length} bytes to byte {offset} of group {name}: nothing lives"
        for wide in set(_wider(lists, copies)):
            covered = [copy for copy in copies if _within(copy, wide)]
            source, place, length = wide
            group, start = inside(here.producers[p][1], source, length)
            name, offset = inside(here.consumers[c][1], place, length)
            there = slice(offset, offset + length)
            right = here.producers[p][1][group][start : start + length] == must[name][there]
            legal = (right & live[name][there]) | (may[name][there] == 1)
            if len(covered) > 1 and legal.all():
                sent = _names(here, "producer", p)[group][start : start + length]
                if (sent == _names(here, "consumer", c)[name][there]).all():
                    yield f"{p} -> {c}: {len(covered)} copies at byte {offset} of {name}, not 1"


def _blocks(here: World, rank: RankId) -> dict[str, npt.NDArray[np.int64]]:
    """Return the block that each byte of a consumer rank's storage belongs to."""
    found: Any = {name: np.full(flat.size, -1) for name, flat in here.consumers[rank][1].items()}
    views = logical_views(here.case.consumer, rank, found, here.case.consumer_pool)
    for key, view in views.items():
        split = block_split(here.case.consumer.group(key[0]))
        view[:] = (np.arange(len(view)) // split)[:, None, None, None]
    return dict(found)


def _names(here: World, side: str, rank: RankId) -> dict[str, npt.NDArray[np.int64]]:
    """Return a number for each byte of the request's blocks, of equal layer, part, unit and row.

    Bytes of one side with the same name are the same content, dead or alive; 0: not the request's.
    """
    case = here.case
    engine, storage = getattr(case, side), getattr(here, f"{side}s")[rank][1]
    tables = getattr(case.request, f"{side}_blocks")
    found: Any = {name: np.zeros(flat.size, np.int64) for name, flat in storage.items()}
    views = logical_views(engine, rank, found, getattr(case, f"{side}_pool"))
    for rows in rows_of(engine, rank, tables, case.request):
        numbers = rows.token if rows.part.per_token else rows.row
        for unit, own in enumerate(rows.units):
            for number, block, row in zip(numbers, rows.block, rows.row, strict=True):
                for byte in range(rows.part.content_bytes):
                    name = (rows.key[1:], own, int(number), byte)
                    views[rows.key][block, unit, row, byte] = hash(name)
    return dict(found)


def _within(copy: Copy, wide: Copy) -> bool:
    """Return whether *copy* is part of the copy *wide*."""
    (a, b, length), (x, y, total) = copy, wide
    return a - x == b - y and a - x >= 0 and a - x + length <= total


def _wider(lists: PreparedLists, copies: list[Copy]) -> Iterator[Copy]:
    """Yield the longer copies that a pair of rows of *lists* could make around each of *copies*."""
    for place_row in lists.consumer_rows.tolist():
        at, total, _, stride, count = place_row
        for source, place, length in copies:
            block = (place - at) // stride if stride else 0
            start = at + block * stride
            if length < total and 0 <= block < count and place + length <= start + total:
                origin = source - (place - start)
                for base, size, _, step, many in lists.producer_rows.tolist():
                    index, rest = divmod(origin - base, step) if step else (0, origin - base)
                    if size == total and rest == 0 and 0 <= index < many:
                        yield origin, start, total
