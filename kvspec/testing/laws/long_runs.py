"""The law of long runs: nothing that could be one copy is two."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.testing.carve import count_kernel_blocks, logical_views
from kvspec.testing.positions import rows_of
from kvspec.testing.world import Copy, PreparedLists, World, inside

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvspec.ownership.parallel import RankId
    from kvspec.testing.laws.system import Trial


DEAR = 16 << 10
"""Bytes more from which on one longer copy may be worse than several."""


def maximal(trial: Trial) -> Iterator[str]:
    """Yield each two descriptors of one group that touch on both sides."""
    for (p, c), copies in dict(trial.copies()).get("descriptors", {}).items():
        here = trial.world
        found: dict[str, set[tuple[int, int]]] = {}
        for source, place, length in copies:
            name, _ = inside(here.consumers[c][1], place, length)
            found.setdefault(name, set()).add((source, place))
        for source, place, length in copies:
            name, offset = inside(here.consumers[c][1], place, length)
            if (source + length, place + length) in found[name]:
                end = offset + length
                yield f"{p} -> {c}: one copy ends and one begins at byte {end} of group {name}"


def minimal(trial: Trial) -> Iterator[str]:
    """Yield ids that move a block without a live byte, or what one longer copy of a row could."""
    ask = trial.system.prepared
    if ask is None:
        return
    here = trial.world
    wants, alive = cache(here.live), cache(partial(_alive, here))
    names = cache(partial(_names, here))
    for (p, c), copies in dict(trial.copies())["ids"].items():
        sent, kept = here.producers[p][1], here.consumers[c][1]
        for _, place, length in copies:
            name, offset = inside(kept, place, length)
            if not alive(c)[name][offset : offset + length].all():
                yield f"{p} -> {c}: {length} bytes to byte {offset} of group {name}: nothing lives"
        lists = ask(here, p, c)
        for (source, place, length), covered in () if lists is None else _wider(lists, copies):
            group, start = inside(sent, source, length)
            name, offset = inside(kept, place, length)
            origin, there = slice(start, start + length), slice(offset, offset + length)
            must, may, live = (flats[name][there] for flats in wants(c))
            legal = ((sent[group][origin] == must) & live) | (may == 1)
            if legal.all() and np.array_equal(
                names("producer", p)[group][origin], names("consumer", c)[name][there]
            ):
                yield f"{p} -> {c}: {covered} copies at byte {offset} of {name}, not 1"


def _alive(here: World, rank: RankId) -> dict[str, npt.NDArray[np.bool_]]:
    """Return of each byte of a consumer's storage whether any of its block must arrive."""
    _, _, live = here.live(rank)
    return {name: np.isin(block, block[live[name]]) for name, block in _blocks(here, rank).items()}


def _blocks(here: World, rank: RankId) -> dict[str, npt.NDArray[np.int64]]:
    """Return the block that each byte of a consumer rank's storage belongs to."""
    found: Any = {name: np.full(flat.size, -1) for name, flat in here.consumers[rank][1].items()}
    views = logical_views(here.case.consumer, rank, found, here.case.consumer_pool)
    for key, view in views.items():
        kernel_blocks_per_block = count_kernel_blocks(here.case.consumer.group(key[0]))
        view[:] = (np.arange(len(view)) // kernel_blocks_per_block)[:, None, None, None]
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


def _wider(lists: PreparedLists, copies: list[Copy]) -> Iterator[tuple[Copy, int]]:
    """Yield each copy that a pair of rows of *lists* could make of several, and of how many."""
    source, place, length = np.array(copies, np.int64).reshape(-1, 3).T
    by_size: dict[int, list[tuple[int, int, int]]] = {}
    for base, size, _, step, many in lists.producer_rows.tolist():
        by_size.setdefault(size, []).append((base, step, many))
    found = set()
    for base, total, _, stride, count in lists.consumer_rows.tolist():
        block = (place - base) // stride if stride else np.zeros_like(place)
        start = base + block * stride
        around = (length < total) & (start <= place) & (place + length <= start + total)
        around &= (block >= 0) & (block < count)
        origin = source - place + start
        for wide in set(zip(origin[around].tolist(), start[around].tolist(), strict=True)):
            if any(_begins(wide[0], *row) for row in by_size.get(total, ())):
                found.add((*wide, total))
    for x, y, total in found:
        within = (source - x == place - y) & (source >= x) & (source + length <= x + total)
        if within.sum() > 1 and total - length[within].sum() < DEAR:
            yield (x, y, total), int(within.sum())


def _begins(address: int, base: int, stride: int, count: int) -> bool:
    """Return whether one of the *count* descriptors of a row begins at *address*."""
    index, rest = divmod(address - base, stride) if stride else (0, address - base)
    return rest == 0 and 0 <= index < count
