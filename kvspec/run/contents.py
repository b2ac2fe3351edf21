"""What a rank's cache holds before a run, and what the byte oracle says of it afterwards.

Law: right and wrong are the oracle's alone. Several requests are one after the other in one cache:
each adds its own true bytes, and what none of them may change is compared too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvspec.ownership.parallel import RankId
from kvspec.run.job import Job, Side
from kvspec.run.report import Compared
from kvspec.testing import check, expected, logical_views, spoil

Bytes = NDArray[np.uint8]
Storage = dict[str, Bytes]
MAX_LINES = 5
"""Wrong bytes that a rank tells, of each request."""
_POISON = 8  # added to a seed: producers' poison is neither the truth nor the consumers' poison


def before(job: Job, side: Side, rank: RankId, sizes: dict[str, int]) -> Storage:
    """Return what a rank holds before the run, *sizes* being the bytes of each group.

    A consumer holds bytes that are wrong wherever a request must write; a producer the true bytes
    of each request, and poison in all other places.
    """
    storage = {name: np.empty(size, np.uint8) for name, size in sizes.items()}
    seed = job.content_seed(0) + (_POISON if side == "producer" else 0)
    request = job.moves[0]
    tables = request.producer_blocks if side == "producer" else request.consumer_blocks
    spoil(job.engine(side), rank, storage, job.num_blocks(side), tables, request, seed=seed)
    return _after(job, side, rank, storage)[0] if side == "producer" else storage


def _after(job: Job, side: Side, rank: RankId, storage: Storage) -> tuple[Storage, Storage]:
    """Return *storage* with every request's true bytes in it, and a mask of the free bytes."""
    free: Storage = {name: np.zeros_like(flat) for name, flat in storage.items()}
    for at, request in enumerate(job.moves):
        tables = request.producer_blocks if side == "producer" else request.consumer_blocks
        engine, blocks = job.engine(side), job.num_blocks(side)
        seed = job.content_seed(at)
        storage, may = expected(engine, rank, storage, blocks, tables, request, seed=seed)
        free = {name: flat | may[name] for name, flat in free.items()}
    return storage, free


def judge(job: Job, rank: RankId, storage: Storage, after: Storage) -> Compared:
    """Compare every byte that a consumer rank holds *after* the run with what it must hold.

    *storage* is what it held before.
    """
    must, free = _after(job, "consumer", rank, storage)
    wrong = {name: (after[name] != flat) & (free[name] == 0) for name, flat in must.items()}
    count = sum(int(np.count_nonzero(flat)) for flat in wrong.values())
    loose = sum(int(np.count_nonzero(flat)) for flat in free.values())
    total = sum(flat.size for flat in must.values())
    lines = _told(job, rank, must, after, wrong) if count else []
    return Compared(judged=total - loose, free=loose, wrong=count, lines=tuple(lines))


def tamper(job: Job, rank: RankId, after: Storage) -> None:
    """Change one byte of the last token, or of the state, of the first request."""
    request, blocks = job.moves[0], job.num_blocks("consumer")
    for key, view in logical_views(job.consumer, rank, after, blocks).items():
        own = request.consumer_blocks[key[0]].block_ids
        if len(own) and view.shape[1]:
            view[own[-1], 0, (job.tokens - 1) % view.shape[2], 0] ^= 0xFF
            return


def _told(
    job: Job, rank: RankId, must: Storage, after: Storage, wrong: dict[str, NDArray[np.bool_]]
) -> list[str]:
    """Return the first wrong bytes in words: each request's own, then those of no request."""
    engine, blocks = job.consumer, job.num_blocks("consumer")
    found: list[str] = []
    rest = {name: flat.copy() for name, flat in wrong.items()}
    for at, request in enumerate(job.moves):
        own = {name: np.zeros_like(flat) for name, flat in must.items()}
        for (group, _, _), view in logical_views(engine, rank, own, blocks).items():
            view[request.consumer_blocks[group].block_ids] = 1
        mine = {name: flat & (own[name] == 1) for name, flat in rest.items()}
        rest = {name: flat & (own[name] == 0) for name, flat in rest.items()}
        lines = _lines(job, rank, must, after, mine, at)
        found += [f"{request.request_id}: {line}" for line in lines]
    return found + [f"no request: {line}" for line in _lines(job, rank, must, after, rest, 0)]


def _lines(
    job: Job,
    rank: RankId,
    must: Storage,
    after: Storage,
    wrong: dict[str, NDArray[np.bool_]],
    at: int,
) -> list[str]:
    """Return the oracle's words for the first *wrong* bytes, seen from request number *at*."""
    seen: Storage = {}
    for name, flat in must.items():
        first = np.flatnonzero(wrong[name])[:MAX_LINES]
        seen[name] = flat.copy()
        seen[name][first] = after[name][first]
    engine, request = job.engine("consumer"), job.moves[at]
    tables, seed = request.consumer_blocks, job.content_seed(at)
    blocks = job.num_blocks("consumer")
    return check(engine, rank, must, seen, blocks, tables, request, seed=seed, limit=MAX_LINES)
