"""Fill the cache of a rank before a run, and compare it with the byte oracle afterwards.

Invariant: only the oracle decides which bytes are right. Several requests share one cache: each
adds its own bytes. Bytes that no request may change are compared as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import attrs
import numpy as np
from numpy.typing import NDArray

from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.ownership.parallel import RankId
from kvspec.run.job import Job, Side
from kvspec.run.report import Compared
from kvspec.testing import logical_views
from kvspec.testing.oracle import content_of, differences
from kvspec.testing.positions import PartRows, rows_of

Bytes = NDArray[np.uint8]
Storage = dict[str, Bytes]
MAX_LINES = 5
"""Number of wrong bytes that a rank describes."""


@attrs.frozen
class Contents:
    """The bytes of one rank of a job, by group."""

    job: Job
    side: Side
    rank: RankId

    def before(self, sizes: dict[str, int]) -> Storage:
        """Return what the rank holds before the run. *sizes* has the bytes of each group.

        A producer holds the true bytes of each request, and random bytes in all other places. A
        consumer holds random bytes, and no true byte of a request, not even of cached tokens. So a
        byte that is not written shows, and so does a cached byte that is written.
        """
        number = list(self.job.ranks()).index((self.side, self.rank))
        drawn = np.random.default_rng([self.job.seed, number])
        storage = {name: drawn.integers(256, size=n, dtype=np.uint8) for name, n in sizes.items()}
        views = self._views(storage)
        for rows, true in self._rows():
            view, known = views[rows.key], rows.known
            if self.side == "producer":
                view[rows.block[known], :, rows.row[known]] = true[known]
            else:
                now = view[rows.block, :, rows.row]
                view[rows.block, :, rows.row] = np.where(now == true, ~true, now)
        return storage

    def after(self, before: Storage) -> tuple[Storage, Storage]:
        """Return what the rank must hold after the run, and a mask of the free bytes.

        Free bytes may have any value. No byte of a producer may change.
        """
        must = {name: flat.copy() for name, flat in before.items()}
        free = {name: np.zeros_like(flat) for name, flat in before.items()}
        must_views, free_views = self._views(must), self._views(free)
        for rows, true in self._rows() if self.side == "consumer" else ():
            live, dead = rows.live, rows.dead
            must_views[rows.key][rows.block[live], :, rows.row[live]] = true[live]
            free_views[rows.key][rows.block[dead], :, rows.row[dead]] = 1
        return must, free

    def judge(self, before: Storage, after: Storage) -> Compared:
        """Compare every byte that a rank holds after the run with what it must hold."""
        must, free = self.after(before)
        judged = arriving = faults = 0
        wrong: Storage = {}
        for name, flat in must.items():
            fixed = free[name] == 0
            wrong[name] = ((after[name] != flat) & fixed).view(np.uint8)
            judged += int(np.count_nonzero(fixed))
            arriving += int(np.count_nonzero((before[name] != flat) & fixed))
            faults += int(np.count_nonzero(wrong[name]))
        lines: Iterator[str] = iter(())
        if faults:
            views = [self._views(storage) for storage in (wrong, must, after)]
            # Nothing arrives at a producer.
            arrives = self.side == "consumer"
            of_parts = [replace(rows, live=rows.live & arrives) for rows, _ in self._rows()]
            name = f"{self.side} {self.rank}"
            lines = differences(name, of_parts, views, wrong, must, after)
        return Compared(
            judged=judged,
            arriving=arriving,
            free=sum(map(len, must.values())) - judged,
            wrong=faults,
            lines=tuple(islice(lines, MAX_LINES)),
        )

    def tamper(self, after: Storage) -> None:
        """Change one byte that must have one value: of the last row that arrives, if there is one.

        Other bytes of the same block may have any value, for example behind the last token.
        """
        views = self._views(after)
        for rows, _ in self._rows():
            for at in np.flatnonzero(rows.live)[-1:] if len(rows.units) else ():
                views[rows.key][rows.block[at], 0, rows.row[at], 0] ^= 0xFF
                return
        name, free = next(iter(self.after(after)[1].items()))
        after[name][np.argmin(free)] ^= 0xFF

    def _rows(self) -> Iterator[tuple[PartRows, Bytes]]:
        """Yield the rows of all requests, with their true bytes."""
        engine, producer = self.job.engine(self.side), self.side == "producer"
        for number, request in enumerate(self.job.moves):
            seed = self.job.content_seed(number)
            yield from true_rows(engine, self.rank, request, seed, producer=producer)

    def _views(self, storage: Storage) -> dict[tuple[str, str, str], Bytes]:
        blocks = self.job.num_blocks(self.side)
        return logical_views(self.job.engine(self.side), self.rank, storage, blocks)


def true_rows(
    engine: EngineSpec, rank: RankId, request: TransferRequest, seed: int, *, producer: bool
) -> Iterator[tuple[PartRows, Bytes]]:
    """Yield the rows of a request on one rank, part by part.

    The cost depends on the request, not on the size of the cache. The second value has the true
    bytes of the rows, of shape (rows, units, bytes).
    """
    tables = request.producer_blocks if producer else request.consumer_blocks
    seen = request.state_tokens if producer else None
    for rows in rows_of(engine, rank, tables, request, seen):
        yield rows, content_of(rows, seed)
