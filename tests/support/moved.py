"""A small executor: two engines in one process, real caches, and every byte judged by the oracle.

Caches are allocated or passed in, so that tensors in a place that no layout describes can be moved
too. The place of a part comes from its region, and the expected bytes come from the oracle.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from builders import request

import kvspec
from kvspec.testing import oracle
from kvspec.testing.oracle import ViewsOf
from kvspec.testing.world import described, inside, selected

Bytes = npt.NDArray[np.uint8]
Caches = Mapping[kvspec.RankId, kvspec.RankCache]


def memory(cache: kvspec.RankCache) -> dict[str, Bytes]:
    """Return the bytes of a cache's memory, by address, without copying them."""
    return {
        hex(m.address): np.ctypeslib.as_array((ctypes.c_uint8 * m.length).from_address(m.address))
        for m in cache.memory
    }


def views_of(cache: kvspec.RankCache) -> ViewsOf:
    """Return a function that shows the parts of *cache* in its memory, or in a copy of it."""

    def views(storage: Mapping[str, Bytes]) -> dict[tuple[str, str, str], Bytes]:
        parts = {}
        for region in cache.regions:
            name, start = inside(
                memory(cache), region.address_range.start, len(region.address_range)
            )
            shape = (region.num_blocks, region.units, region.states, region.content_bytes)
            strides = (region.block_stride, region.unit_stride, region.state_stride, 1)
            parts[region.group, region.layer, region.part] = np.lib.stride_tricks.as_strided(
                storage[name][start:], shape, strides
            )
        return parts

    return views


def allocated(engine: kvspec.EngineSpec, blocks: Mapping[str, Any], kept: list[Any]) -> Caches:
    """Allocate every rank with enough blocks for the tables; append the storage to *kept*."""
    most = dict.fromkeys(blocks, 0)
    for name, table in blocks.items():
        ids = getattr(table, "block_ids", table)
        most[name] = max([*map(int, ids), 0]) + 2
    caches = {}
    for rank in engine.parallel.ranks:
        caches[rank], storage = kvspec.allocate(engine, rank, most)
        kept.append(storage)
    return caches


def moved(
    producer: kvspec.EngineSpec,
    consumer: kvspec.EngineSpec,
    request: kvspec.TransferRequest,
    caches: tuple[Caches, Caches] | None = None,
    views: tuple[Mapping[kvspec.RankId, ViewsOf], ...] = ({}, {}),
    **options: Any,
) -> list[str]:
    """Move one request between all ranks, by descriptors and by ids; return every fault.

    Args:
        producer: The producer's engine.
        consumer: The consumer's engine.
        request: The request to move.
        caches: Caches of both sides by rank. Allocated by default.
        views: Functions that show the parts of a rank in its memory, if they differ from the
            regions of its cache.
        **options: Options of `plan_transfer`.
    """
    kept: list[Any] = []
    plan = kvspec.plan_transfer(producer, consumer, **options)
    if caches is None:
        caches = (
            allocated(producer, request.producer_blocks, kept),
            allocated(consumer, request.consumer_blocks, kept),
        )
    sources, targets = caches
    for rank, cache in sources.items():
        blocks = request.producer_blocks
        shown = views[0].get(rank, views_of(cache))
        oracle.fill(producer, rank, memory(cache), shown, blocks, request)
    faults = []
    for rank, cache in targets.items():
        shown = views[1].get(rank, views_of(cache))
        held, rest = memory(cache), (shown, request.consumer_blocks, request)
        for copies in (described, selected):
            oracle.spoil(consumer, rank, held, *rest)
            before = {name: flat.copy() for name, flat in held.items()}
            for source in plan.sources(rank):
                sent = memory(sources[source])
                table = kvspec.build_table(plan, sources[source], cache)
                for start, stop, length in copies(table, request):
                    inside(sent, start, length), inside(held, stop, length)
                    ctypes.memmove(stop, start, length)
            faults += oracle.check(consumer, rank, before, held, *rest, source=producer)
    return faults


def blocks_for(engine: kvspec.EngineSpec, num_tokens: int, seed: int = 0) -> dict[str, list[int]]:
    """Return a table of scattered blocks for each group; a state has one slot."""
    tables = {}
    for group in engine.groups:
        tokens = any(part.tokens_per_state for part in group.spec.parts)
        virtual = engine.virtual_block(group)
        count = -(-num_tokens // virtual) if tokens else 1
        order = np.random.default_rng(seed + len(tables)).permutation(count + 2)
        first = 0 if engine.null_block is None else engine.null_block + 1
        tables[group.name] = [first + int(block) for block in order[:count]]
    return tables


def moves(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, num_tokens: int, **more: Any
) -> list[str]:
    """Move a request of *num_tokens* over scattered blocks; return every fault."""
    options = {k: more.pop(k) for k in ("replica_policy", "common_states") if k in more}
    tables = blocks_for(producer, num_tokens), blocks_for(consumer, num_tokens, 50)
    return moved(producer, consumer, request(num_tokens, *tables, **more), **options)
