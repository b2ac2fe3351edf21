"""The law of long runs, law 8: copies are as long as possible, and none is useless.

How it works:
    Each copy costs time, so copies that are adjacent on both sides must be one copy. `maximal`
    checks descriptors. Example of two copies that should be one copy of 16 bytes:

        producer address    consumer address    bytes
        1000                5000                8
        1008                5008                8

    `minimal` checks ids. Ids can only pick descriptors of prepared rows. If the rows contain one
    descriptor that covers both copies, the ids must pick it, even if it moves a few other bytes.
    That is legal if all other bytes are live and true. It is fast if there are fewer than
    `MOST_OTHER_BYTES`. Dead bytes do not count as such: the producer's memory may hold NaN there.

    Copies that begin or end inside of one content are not judged so. If the two sides order the
    elements of a key differently, each element moves alone, and the last one of a head may touch
    the next head. So the prepared runs of several tokens overlap those of one token.

    Copies of a ring are not judged so either: in a full ring, two copies are adjacent at the row of
    the first position, but their positions are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.check.counting import is_ring
from kvspec.testing.carve import count_kernel_blocks, logical_views, stored_views
from kvspec.testing.oracle import each_array
from kvspec.testing.positions import rows_of
from kvspec.testing.world import ByteCopy, PreparedLists, World, inside

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvspec.ownership.parallel import RankId
    from kvspec.testing.laws.system import Trial
    from kvspec.testing.world import Storage


# One longer copy may be slower than several copies if it moves this many other bytes.
MOST_OTHER_BYTES = 16 << 10


def maximal(trial: Trial) -> Iterator[str]:
    """Yield each pair of descriptors of one group that are adjacent on both sides."""
    for (p, c), copies in dict(trial.copies()).get("descriptors", {}).items():
        here = trial.world
        owners = _owners(here, c)
        starts: dict[int, set[tuple[int, int]]] = {}
        for source, place, length in copies:
            name, offset = inside(here.consumers[c][1], place, length)
            starts.setdefault(owners[name][offset], set()).add((source, place))
        for source, place, length in copies:
            name, offset = inside(here.consumers[c][1], place, length)
            if (source + length, place + length) in starts[owners[name][offset]]:
                yield (
                    f"producer {p}, consumer {c}, group {name}: expected 1 copy, got 2 that meet "
                    f"at byte {offset + length} of the storage"
                )


def minimal(trial: Trial) -> Iterator[str]:
    """Yield copies to a block without a live byte, and copies that one descriptor could replace."""
    ask = trial.system.prepared
    if ask is None:
        return
    here = trial.world
    live_bytes, in_live_block = cache(here.live), cache(partial(_in_live_block, here))
    names = cache(partial(_names, here))
    for (p, c), copies in dict(trial.copies())["ids"].items():
        sent, kept = here.producers[p][1], here.consumers[c][1]
        for _, place, length in copies:
            name, offset = inside(kept, place, length)
            if not in_live_block(c)[name][offset : offset + length].all():
                yield (
                    f"producer {p}, consumer {c}, group {name}, byte {offset}: expected no copy to "
                    f"a block without a live byte, got {length} bytes"
                )
        lists = ask(here, p, c)
        wider = () if lists is None else _wider(lists, copies, _whole(here, c, copies))
        owners = _owners(here, c)
        for (source, place, length), covered in wider:
            group, start = inside(sent, source, length)
            name, offset = inside(kept, place, length)
            if is_ring(here.case.consumer.groups[owners[name][offset]].spec):
                continue
            origin, there = slice(start, start + length), slice(offset, offset + length)
            must, _, live = (flats[name][there] for flats in live_bytes(c))
            # A longer copy may move true bytes to live places, and nothing to dead places.
            legal = (sent[group][origin] == must) & live
            if legal.all() and np.array_equal(
                names("producer", p)[group][origin], names("consumer", c)[name][there]
            ):
                yield (
                    f"producer {p}, consumer {c}, group {name}, byte {offset}: expected 1 copy, "
                    f"got {covered}"
                )


def _owners(here: World, rank: RankId) -> dict[str, npt.NDArray[np.int64]]:
    """Return a number for each byte of a consumer rank: that of the group with a live row there.

    Groups may share one memory. Bytes of other blocks have -1.
    """
    case = here.case
    numbers: Any = _numbers(here.consumers[rank][1])
    views = stored_views(case.consumer, rank, numbers, case.consumer_pool)
    names = [group.name for group in case.consumer.groups]
    tables = case.request.consumer_blocks
    for rows in rows_of(case.consumer, rank, tables, case.request, source=case.producer):
        views[rows.key][rows.block[rows.live]] = names.index(rows.key[0])
    return dict(numbers)


def _numbers(storage: Storage) -> dict[str, Any]:
    """Return an array of -1 for each group. Groups that share one memory share the array."""
    return each_array(storage, lambda flat: np.full(flat.size, -1))


def _in_live_block(here: World, rank: RankId) -> dict[str, npt.NDArray[np.bool_]]:
    """Return a mask of a consumer rank's bytes. True if a byte of the same block is live."""
    _, _, live = here.live(rank)
    return {name: np.isin(block, block[live[name]]) for name, block in _blocks(here, rank).items()}


def _blocks(here: World, rank: RankId) -> dict[str, npt.NDArray[np.int64]]:
    """Return the block of each byte of a consumer rank. Padding has -1."""
    blocks: Any = _numbers(here.consumers[rank][1])
    # The oracle cuts an array of numbers like it cuts storage, so no address is computed.
    views = logical_views(here.case.consumer, rank, blocks, here.case.consumer_pool)
    for key, view in views.items():
        kernel_blocks_per_block = count_kernel_blocks(here.case.consumer.group(key[0]))
        view[:] = (np.arange(len(view)) // kernel_blocks_per_block)[:, None, None, None]
    return dict(blocks)


def _names(here: World, side: str, rank: RankId) -> dict[str, npt.NDArray[np.int64]]:
    """Return a number for each byte of a rank, which names its layer, part, unit, row and byte.

    Bytes with equal numbers are the same content, live or dead. Bytes outside of the request's
    blocks have 0.
    """
    case = here.case
    engine, storage = getattr(case, side), getattr(here, f"{side}s")[rank][1]
    tables = getattr(case.request, f"{side}_blocks")
    named: Any = each_array(storage, lambda flat: np.zeros(flat.size, np.int64))
    views = logical_views(engine, rank, named, getattr(case, f"{side}_pool"))
    for rows in rows_of(engine, rank, tables, case.request):
        numbers = rows.token if rows.part.per_token else rows.row
        for unit, own in enumerate(rows.units):
            for number, block, row in zip(numbers, rows.block, rows.row, strict=True):
                for byte in range(rows.part.content_bytes):
                    name = (rows.key[1:], own, int(number), byte)
                    views[rows.key][block, unit, row, byte] = hash(name)
    return dict(named)


def _whole(here: World, rank: RankId, copies: list[ByteCopy]) -> npt.NDArray[np.bool_]:
    """Return a mask of *copies* to a consumer rank. True if a copy cuts no content."""
    case, storage = here.case, here.consumers[rank][1]
    # For each byte of a content its index there. Padding and other blocks have -1.
    places: Any = _numbers(storage)
    views = stored_views(case.consumer, rank, places, case.consumer_pool)
    tables = case.request.consumer_blocks
    for rows in rows_of(case.consumer, rank, tables, case.request, source=case.producer):
        view = views[rows.key]
        view[rows.block[rows.live]] = np.arange(view.shape[-1])
    # A byte is inner if it continues the content of the byte before it.
    inner = {
        name: np.append((place > 0) & (np.diff(place, prepend=-1) == 1), [False])
        for name, place in places.items()
    }
    whole = []
    for _, place, length in copies:
        name, offset = inside(storage, place, length)
        whole.append(not (inner[name][offset] or inner[name][offset + length]))
    return np.array(whole, bool)


def _wider(
    lists: PreparedLists, copies: list[ByteCopy], whole: npt.NDArray[np.bool_]
) -> Iterator[tuple[ByteCopy, int]]:
    """Yield each copy that could replace several *copies*, and the number of those.

    A copy is possible if both sides have a row with a descriptor of its size at its address, and
    if it replaces only copies that are *whole*.
    """
    source, place, length = np.array(copies, np.int64).reshape(-1, 3).T
    rows_by_size: dict[int, list[tuple[int, int, int]]] = {}
    for base, size, _, stride, count in lists.producer_rows.tolist():
        rows_by_size.setdefault(size, []).append((base, stride, count))
    candidates = set()
    for base, size, _, stride, count in lists.consumer_rows.tolist():
        block = (place - base) // stride if stride else np.zeros_like(place)
        start = base + block * stride
        # The copies that lie inside of a longer descriptor of this row, which begins at `start`.
        around = (length < size) & (start <= place) & (place + length <= start + size)
        around &= (block >= 0) & (block < count)
        origin = source - place + start
        for wide in set(zip(origin[around].tolist(), start[around].tolist(), strict=True)):
            if any(_begins(wide[0], *row) for row in rows_by_size.get(size, ())):
                candidates.add((*wide, size))
    for wide_source, wide_place, size in candidates:
        within = (source - wide_source == place - wide_place) & (source >= wide_source)
        within &= source + length <= wide_source + size
        replaced = int(within.sum())
        near = size - length[within].sum() < MOST_OTHER_BYTES
        if replaced > 1 and near and whole[within].all():
            yield (wide_source, wide_place, size), replaced


def _begins(address: int, base: int, stride: int, count: int) -> bool:
    """Return whether a descriptor of the row (*base*, *stride*, *count*) begins at *address*."""
    index, rest = divmod(address - base, stride) if stride else (0, address - base)
    return rest == 0 and 0 <= index < count
