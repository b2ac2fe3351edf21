"""The true bytes of one request in a cache, for worlds that compare each request on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvspec.memory.allocation import allocate
from kvspec.testing import fill, logical_views
from kvspec.testing.oracle import expected

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from kvspec import BlockTable, EngineSpec, RankId, TransferRequest

# The byte in blocks that no request owns.
RUBBISH = 0xEE


def truth(
    engine: EngineSpec,
    rank: RankId,
    tables: Mapping[str, BlockTable],
    request: TransferRequest,
    seed: int,
    *,
    producer: bool,
) -> Iterator[tuple[tuple[str, str, str], NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_]]]:
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
