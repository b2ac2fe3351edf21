"""Fill the cache of a rank before a run, and compare it with the byte oracle afterwards.

Invariant: only the oracle decides which bytes are right. Several requests share one cache: each
adds its own bytes. Bytes that no request may change are compared as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.memory.allocation import allocate
from kvspec.ownership.parallel import RankId
from kvspec.run.job import Job, Side
from kvspec.run.report import Compared
from kvspec.testing import fill, logical_views
from kvspec.testing.oracle import check, expected, spoil

Bytes = NDArray[np.uint8]
Storage = dict[str, Bytes]
Marks = dict[str, NDArray[np.bool_]]
Key = tuple[str, str, str]
RUBBISH = 0xEE
"""The byte in blocks that no request has filled."""
MAX_LINES = 5
"""Number of wrong bytes of each request that a rank describes."""
_POISON = 8  # added to a seed, so that random bytes of producers differ from those of consumers


@attrs.frozen
class Contents:
    """The bytes of one rank of a job, by group."""

    job: Job
    side: Side
    rank: RankId

    def before(self, sizes: dict[str, int]) -> Storage:
        """Return what the rank holds before the run. *sizes* has the bytes of each group.

        A producer holds the true bytes of each request, and random bytes in all other places. A
        consumer holds random bytes, and no true byte of a request, not even of cached tokens.
        """
        storage = {name: np.empty(size, np.uint8) for name, size in sizes.items()}
        first = self._request(0)
        first["seed"] += _POISON if self.side == "producer" else 0
        spoil(self.job.engine(self.side), self.rank, storage, **first)
        if self.side == "producer":
            return self.after(storage)[0]
        # A random byte may be true by chance. Then it would not show that nothing was written.
        true, _ = self.after(storage, cached=False)
        return {name: np.where(flat == true[name], ~flat, flat) for name, flat in storage.items()}

    def after(self, storage: Storage, *, cached: bool = True) -> tuple[Storage, Storage]:
        """Return *storage* with the true bytes of all requests, and a mask of the free bytes.

        If *cached*, the consumer keeps the bytes of its cached tokens. Free bytes may have any
        value.
        """
        engine, free = self.job.engine(self.side), dict.fromkeys(storage, np.zeros(1, np.uint8))
        for number in range(self.job.requests):
            options = self._request(number)
            if not cached:
                options["request"] = attrs.evolve(options["request"], cached_tokens=0)
            storage, may = expected(engine, self.rank, storage, **options)
            free = {name: flat | free[name] for name, flat in may.items()}
        return storage, free

    def judge(self, before: Storage, after: Storage) -> Compared:
        """Compare every byte that a consumer rank holds after the run with what it must hold."""
        must, free = self.after(before)
        fixed = {name: flat == 0 for name, flat in free.items()}
        wrong = {name: (after[name] != flat) & fixed[name] for name, flat in must.items()}
        new = {name: (before[name] != flat) & fixed[name] for name, flat in must.items()}
        judged, count, arriving = (
            sum(int(np.count_nonzero(flat)) for flat in flats.values())
            for flats in (fixed, wrong, new)
        )
        return Compared(
            judged=judged,
            arriving=arriving,
            free=sum(flat.size for flat in must.values()) - judged,
            wrong=count,
            lines=tuple(self._lines(must, after, wrong)) if count else (),
        )

    def tamper(self, after: Storage) -> None:
        """Change one byte of the last token, or of the state, of the first request."""
        tables = self._request(0)["tables"]
        for (group, _, _), view in self._views(after).items():
            own = tables[group].block_ids
            if len(own) and view.shape[1]:
                view[own[-1], 0, (self.job.tokens - 1) % view.shape[2], 0] ^= 0xFF
                return

    def _request(self, number: int) -> dict[str, Any]:
        """Return the arguments by which the oracle knows request *number*."""
        request = self.job.moves[number]
        tables = request.producer_blocks if self.side == "producer" else request.consumer_blocks
        blocks, seed = self.job.num_blocks(self.side), self.job.content_seed(number)
        return {"num_blocks": blocks, "tables": tables, "request": request, "seed": seed}

    def _views(self, storage: Storage) -> dict[tuple[str, str, str], Bytes]:
        blocks = self.job.num_blocks(self.side)
        return logical_views(self.job.engine(self.side), self.rank, storage, blocks)

    def _lines(self, must: Storage, after: Storage, wrong: Marks) -> Iterator[str]:
        """Describe the first wrong bytes: those of each request, then those of no request."""
        for number, request in enumerate(self.job.moves):
            own = {name: np.zeros_like(flat) for name, flat in must.items()}
            for (group, _, _), view in self._views(own).items():
                view[self._request(number)["tables"][group].block_ids] = 1
            inside = {name: flat & (own[name] == 1) for name, flat in wrong.items()}
            wrong = {name: flat & (own[name] == 0) for name, flat in wrong.items()}
            yield from self._words(must, after, inside, number, request.request_id)
        yield from self._words(must, after, wrong, 0, "no request")

    def _words(
        self, must: Storage, after: Storage, wrong: Marks, number: int, name: str
    ) -> Iterator[str]:
        """Yield the oracle's description of the first *wrong* bytes, as bytes of one request."""
        seen = {group: flat.copy() for group, flat in must.items()}
        for group, flat in seen.items():
            first = np.flatnonzero(wrong[group])[:MAX_LINES]
            flat[first] = after[group][first]
        engine, request = self.job.engine(self.side), self._request(number)
        for line in check(engine, self.rank, must, seen, **request, limit=MAX_LINES):
            yield f"{name}: {line}"


def truth(
    engine: EngineSpec,
    rank: RankId,
    tables: Mapping[str, BlockTable],
    request: TransferRequest,
    seed: int,
    *,
    producer: bool,
) -> Iterator[tuple[Key, NDArray[np.int64], Bytes, NDArray[np.bool_]]]:
    """Yield the true bytes of one request in a cache. The cost does not depend on the cache.

    Args:
        engine: The engine of the rank.
        rank: The rank.
        tables: The block tables of this side, without null blocks.
        request: The request.
        seed: Seed of the contents.
        producer: Whether the engine is the producer. If not, cached tokens are `RUBBISH`.

    Yields:
        For each part: its key in `logical_views`, the blocks of the request, their true bytes, and
        which of these bytes count.
    """
    # The oracle fills a small cache that contains only the blocks of the request.
    first = 0 if engine.null_block is None else engine.null_block + 1
    own = {
        name: attrs.evolve(table, block_ids=np.arange(first, first + len(table.block_ids)))
        for name, table in tables.items()
    }
    blocks = {name: max(1, first + len(table.block_ids)) for name, table in own.items()}
    _, storage = allocate(engine, rank, blocks)
    for flat in storage.values():
        flat[:] = RUBBISH
    if producer:
        fill(engine, rank, storage, blocks, own, request, seed=seed)
        free = {name: np.zeros_like(flat) for name, flat in storage.items()}
    else:
        storage, free = expected(engine, rank, storage, blocks, own, request, seed=seed)
    loose = logical_views(engine, rank, free, blocks)
    for key, view in logical_views(engine, rank, storage, blocks).items():
        name, kernel_blocks_per_block = key[0], len(view) // blocks[key[0]]
        at = in_memory(own[name].block_ids, kernel_blocks_per_block)
        yield (
            key,
            in_memory(tables[name].block_ids, kernel_blocks_per_block),
            view[at],
            loose[key][at] == 0,
        )


def in_memory(ids: NDArray[np.int64], kernel_blocks_per_block: int) -> NDArray[np.int64]:
    """Return the kernel blocks of the blocks *ids*, in order."""
    return (ids[:, None] * kernel_blocks_per_block + np.arange(kernel_blocks_per_block)).reshape(-1)
