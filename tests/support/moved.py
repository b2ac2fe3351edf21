"""A small executor: two engines in one process, `memmove` as transport, every byte compared.

Producer ranks hold bytes that are a hash of (layer, part, global unit, token, byte) and noise
elsewhere; afterwards every byte of every consumer's memory is what it was, unless a live, uncached
token of the request lies there. Which row holds which token is counted here, position by position.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

import kvspec

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Caches = Mapping[kvspec.RankId, kvspec.RankCache]
Copy = tuple[int, int, int]


def content(layer: str, part: str, units: range, rows: Ints, size: int) -> Bytes:
    """Return the true bytes [unit, row, byte] of global *units* and of *rows* (tokens)."""
    key = np.uint64(zlib.crc32(f"{layer}/{part}".encode()) * 0x9E3779B97F4A7C15 % 2**64)
    word = key ^ np.arange(units.start, units.stop, dtype=np.uint64)[:, None, None]
    for other in (rows.astype(np.uint64)[None, :, None], np.arange(size, dtype=np.uint64)):
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB) + other
    word = (word ^ (word >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return (word >> np.uint64(56)).astype(np.uint8)


def memory(cache: kvspec.RankCache) -> dict[int, Bytes]:
    """Return the bytes of a cache's memory, by address; they are not copied."""
    return {
        m.address: np.ctypeslib.as_array((ctypes.c_uint8 * m.length).from_address(m.address))
        for m in cache.memory
    }


def owner(held: Mapping[int, Bytes], address: int, length: int) -> tuple[Bytes, int]:
    """Return the array that holds *length* bytes at *address*, and where in it they begin."""
    for start, flat in held.items():
        if start <= address and address + length <= start + flat.size:
            return flat, address - start
    raise AssertionError(f"{length} bytes at {address:#x} are in no memory of this rank")


Rows = tuple[kvspec.Region, range, Ints, Ints, Ints, Ints]


def rows_of(
    cache: kvspec.RankCache, tables: Mapping[str, kvspec.BlockTable], request: Any
) -> Iterator[Rows]:
    """Yield (region, global units, block, row, token, state of it) of the request's own rows.

    The last is 1 where the token is live and uncached, 0 where it is cached, -1 where it is dead.
    """
    engine, rank = cache.engine, cache.rank
    for region in cache.regions:
        group = engine.group(region.group)
        spec, table = group.spec.of_layer(region.layer), tables[region.group]
        part = next(p for p in group.in_memory(region.layer).parts if p.name == region.part)
        units = engine.units(group, part, rank)
        wanted, cached = request.wanted(region.group, spec), request.cached(region.group, spec)
        if not part.tokens_per_state:
            block = np.repeat(_slot(table, group.spec.block_size, request), part.states)
            row = np.tile(np.arange(part.states), len(block) // part.states)
            live = np.full(len(block), 1 if wanted else 0)
            yield region, units, block, row, row, live
            continue
        context = engine.context(group, rank)
        first = np.arange(0, group.spec.block_size, part.tokens_per_state)
        local = np.arange(len(table.block_ids))[:, None] * group.spec.block_size + first
        own = table.first_token // context.size + local
        run, rest = np.divmod(own, context.interleave)
        token = (run * context.size + context.rank) * context.interleave + rest
        ids = np.asarray(table.block_ids)[:, None] * group.split + first // group.memory_block_size
        row = np.broadcast_to(first % group.memory_block_size // part.tokens_per_state, ids.shape)
        last = token + part.tokens_per_state - 1
        live = np.where((token < wanted.stop) & (last >= wanted.start), 1, -1)
        live = np.where((live == -1) & (token < cached), 0, live) if wanted else np.zeros_like(live)
        yield region, units, *(each.ravel() for each in (ids, row, token, live))


def _slot(table: kvspec.BlockTable, block_size: int, request: Any) -> Ints:
    ids = np.asarray(table.block_ids, np.int64)
    if len(ids) < 2 or not request.num_tokens:
        return ids[:1]
    at = (request.num_tokens - 1 - table.first_token) // block_size
    return ids[at : at + 1]


def _addresses(region: kvspec.Region, units: range, block: Ints, row: Ints) -> Ints:
    """Return the addresses [unit, row] of the contents."""
    unit = np.arange(len(units))[:, None] * region.unit_stride
    return region.base + unit + block * region.block_stride + row * region.state_stride


def _each(region: kvspec.Region, at: Ints, held: Mapping[int, Bytes]) -> tuple[Bytes, Ints]:
    """Return the array that holds a region, and the offsets [unit, row, byte] in it."""
    flat, start = owner(held, region.extent.start, len(region.extent))
    offsets = at[:, :, None] - region.extent.start + start + np.arange(region.content_bytes)
    return flat, offsets


def fill(cache: kvspec.RankCache, tables: Mapping[str, Any], request: Any) -> None:
    """Give a producer rank the true bytes of its tables' tokens, and noise elsewhere."""
    held = memory(cache)
    for flat in held.values():
        flat[:] = np.random.default_rng(flat.size).integers(0, 256, flat.size, np.uint8)
    for region, units, block, row, token, _ in rows_of(cache, tables, request):
        known = np.flatnonzero(token < request.num_tokens) if token is not row else slice(None)
        flat, at = _each(region, _addresses(region, units, block[known], row[known]), held)
        flat[at] = content(region.layer, region.part, units, token[known], region.content_bytes)


def faults(
    cache: kvspec.RankCache,
    before: Mapping[int, Bytes],
    tables: Mapping[str, Any],
    request: Any,
    excluded: Collection[str] = (),
) -> list[str]:
    """Return what is wrong on one consumer rank: a line for each region, then for other bytes."""
    held, found = memory(cache), []
    must = {start: flat.copy() for start, flat in before.items()}
    free = {start: np.zeros(flat.size, np.bool_) for start, flat in before.items()}
    for region, units, block, row, token, live in rows_of(cache, tables, request):
        for state in (-1, 1) if region.layer not in excluded else ():
            rows = np.flatnonzero(live == state)
            at = _addresses(region, units, block[rows], row[rows])
            if state == 1:
                flat, offsets = _each(region, at, must)
                size = region.content_bytes
                true = content(region.layer, region.part, units, token[rows], size)
                flat[offsets] = true
                wrong = _each(region, at, held)[0][offsets] != true
                if wrong.any():
                    which = sorted({int(token[rows][i]) for i in np.nonzero(wrong)[1]})
                    name = f"{cache.rank} {region.layer}.{region.part}"
                    found.append(f"{name}: {int(wrong.sum())} bytes, tokens {which[:8]}")
            else:
                flat, offsets = _each(region, at, free)  # type: ignore[arg-type]
                flat[offsets] = True
    for start, flat in held.items():
        other = int(((flat != must[start]) & ~free[start]).sum())
        if other and not found:
            found.append(f"{cache.rank}: {other} bytes changed that had to stay")
    return found


def descriptors(table: kvspec.DescriptorTable, request: Any) -> list[Copy]:
    """Return the copies (producer address, consumer address, length) of `descriptors`."""
    return [(int(a), int(b), int(c)) for a, b, c in table.descriptors(request)]


def selected(table: kvspec.DescriptorTable, request: Any) -> list[Copy]:
    """Return the copies that the ids of `select` mean."""
    sides = []
    for rows, ids in zip(
        (table.producer_rows, table.consumer_rows), table.select(request), strict=True
    ):
        address, length, _, stride, count = rows.astype(np.int64).T
        starts = np.concatenate([[0], np.cumsum(count)])
        at = np.searchsorted(starts, ids.astype(np.int64), side="right") - 1
        sides.append((address[at] + (ids - starts[at]) * stride[at], length[at]))
    assert sides[0][1].tolist() == sides[1][1].tolist()
    return list(zip(*(each.tolist() for each in (sides[0][0], *sides[1])), strict=True))


def allocated(engine: kvspec.EngineSpec, blocks: Mapping[str, Any], kept: list[Any]) -> Caches:
    """Allocate every rank with blocks enough for the tables; storage is appended to *kept*."""
    most = dict.fromkeys(blocks, 0)
    for name, table in blocks.items():
        ids = getattr(table, "block_ids", table)
        most[name] = max([*map(int, ids), 0]) + 2
    found = {}
    for rank in engine.parallel.ranks:
        found[rank], storage = kvspec.allocate(engine, rank, most)
        kept.append(storage)
    return found


def moved(
    producer: kvspec.EngineSpec,
    consumer: kvspec.EngineSpec,
    request: kvspec.TransferRequest,
    caches: tuple[Caches, Caches] | None = None,
    **options: Any,
) -> list[str]:
    """Move one request between all ranks, twice; return every fault: empty if all is right.

    *caches*: of both sides by rank; allocated unless given. *options* go to `plan_transfer`. The
    bytes of `descriptors` and of `select` are checked alike.
    """
    kept: list[Any] = []
    plan = kvspec.plan_transfer(producer, consumer, **options)
    if caches is None:
        caches = (
            allocated(producer, request.producer_blocks, kept),
            allocated(consumer, request.consumer_blocks, kept),
        )
    ours, theirs = caches
    for cache in ours.values():
        fill(cache, request.producer_blocks, request)
    excluded = {*producer.excluded, *consumer.excluded}
    found = []
    for rank, cache in theirs.items():
        held = memory(cache)
        for copies in (descriptors, selected):
            for flat in held.values():
                flat[:] = np.random.default_rng(7).integers(0, 256, flat.size, np.uint8)
            before = {start: flat.copy() for start, flat in held.items()}
            for source in plan.sources(rank):
                sent = memory(ours[source])
                for a, b, length in copies(kvspec.build_table(plan, ours[source], cache), request):
                    owner(sent, a, length), owner(held, b, length)
                    ctypes.memmove(b, a, length)
            found += faults(cache, before, request.consumer_blocks, request, excluded)
    return found


def request_of(
    num_tokens: int, producer_blocks: Any, consumer_blocks: Any, **more: Any
) -> kvspec.TransferRequest:
    """Return a request; what is not given has its default."""
    return kvspec.TransferRequest(
        request_id="r",
        num_tokens=num_tokens,
        producer_blocks=producer_blocks,
        consumer_blocks=consumer_blocks,
        **more,
    )


def blocks_for(engine: kvspec.EngineSpec, num_tokens: int, seed: int = 0) -> dict[str, list[int]]:
    """Return a table of scattered blocks for each group; one slot for a state."""
    found = {}
    for group in engine.groups:
        tokens = any(part.tokens_per_state for part in group.spec.parts)
        virtual = engine.virtual_block(group)
        count = -(-num_tokens // virtual) if tokens else 1
        order = np.random.default_rng(seed + len(found)).permutation(count + 2)
        first = 0 if engine.null_block is None else engine.null_block + 1
        found[group.name] = [first + int(each) for each in order[:count]]
    return found


def moves(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, num_tokens: int, **more: Any
) -> list[str]:
    """Move a request of *num_tokens* over scattered blocks; return every fault."""
    options = {k: more.pop(k) for k in ("replicas", "salt", "common_states") if k in more}
    tables = blocks_for(producer, num_tokens), blocks_for(consumer, num_tokens, 50)
    return moved(producer, consumer, request_of(num_tokens, *tables, **more), **options)
