"""The laws of a whole connector, which has moved the bytes of a request itself.

Laws 1 (exact cover) and 10 (bounds).

How it works:
    The connector gets a `World` whose ranks have guard bytes on both sides of their memory:

        guard bytes    memory of a rank              guard bytes
        a5 a5 ... a5   blocks of all groups          a5 a5 ... a5

    After it has returned, the oracle compares the memory of the consumers. The memory of the
    producers and all guard bytes must be as before. A write further away than the guard bytes is
    not found, and may end the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.testing.laws.system import GUARD
from kvspec.testing.world import GUARD_BYTE, snapshot, world

if TYPE_CHECKING:
    from kvspec.ownership.parallel import RankId
    from kvspec.testing.laws.system import Trial
    from kvspec.testing.world import Storage, World


def cover(trial: Trial) -> Iterator[str]:
    """Yield each wrong byte of a consumer, and each rank of the producer that was changed."""
    after = trial.after_connector
    if after is None:
        return
    yield from (f"connector: {fault}" for fault in after.differences())
    before = snapshot(world(trial.case).producers)
    yield from (f"connector: {fault}" for fault in changed_producers(after, before))


def changed_producers(after: World, before: Mapping[RankId, Storage]) -> Iterator[str]:
    """Yield the first byte of each group of a producer rank that is not as it was *before*."""
    for rank, (_, storage) in after.producers.items():
        for group, flat in storage.items():
            changed = np.flatnonzero(flat != before[rank][group]).tolist()
            if changed:
                yield (
                    f"producer {rank}, group {group}, byte {changed[0]} of the storage: this byte"
                    " must not change"
                )


def bounds(trial: Trial) -> Iterator[str]:
    """Yield the first byte outside of the memory of each rank that was written."""
    after = trial.after_connector
    if after is not None:
        yield from (f"connector: {fault}" for fault in writes_outside(after))


def writes_outside(after: World) -> Iterator[str]:
    """Yield, for each rank, the first guard byte beside its memory that has changed."""
    for role, ranks in (("producer", after.producers), ("consumer", after.consumers)):
        for rank, (cache, _) in ranks.items():
            owners: Any = cache.owner
            (whole,) = owners
            wrong = np.flatnonzero(whole != GUARD_BYTE)
            outside = wrong[(wrong < GUARD) | (wrong >= len(whole) - GUARD)].tolist()
            if outside:
                yield (
                    f"{role} {rank}: expected writes inside the memory of this rank, got"
                    f" a write {_where(outside[0], len(whole))}"
                )


def _where(byte: int, size: int) -> str:
    """Return where a guard byte lies, seen from the memory of its rank."""
    if byte < GUARD:
        return f"{GUARD - byte} bytes before it"
    return f"{byte - (size - GUARD) + 1} bytes after it"
