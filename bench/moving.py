"""B7: a whole transfer over NIXL in one machine, against one raw read of the same bytes.

The whole transfer is what one consumer rank does for a request: look up the ids of every source,
read, wait, and tell the producer. The raw read is as many bytes in one descriptor a source.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import works
from timing import Options, Row, interleaved, told

from kvspec import RankId, allocate, build_table, lay_out, plan_transfer
from kvspec.memory.regions import Memory

TARGET = RankId()
TIMEOUT = 60.0
CASES = (
    ("blocks of all layers, 256 KiB", ("BLHNC", "BLHNC"), (4, 4), 16, 16, 4096, 1.25),
    ("blocks of one layer, 64 KiB", ("LBHNC", "LBHNC"), (4, 4), 64, 16, 4096, 2.0),
    ("heads first to rows first, 256 B", ("LBKHNC", "LKBNHC"), (8, 2), 16, 16, 512, 4.0),
)
"""What, layouts, TP sizes, block size, layers, tokens, and the budget: time over a raw read's."""


def work_of(case: tuple[Any, ...]) -> works.Work:
    """Return the work of one of `CASES`: 8 heads, blocks shuffled."""
    name, layouts, sizes, block, layers, tokens, _ = case
    spec = works.heads(8, block)
    return works.Work(
        name=name, layers=layers, spec=spec, tp_sizes=sizes, tokens=tokens, layouts=layouts
    )


def b7(options: Options) -> Iterator[Row]:
    """Whole transfers of long, middling and the shortest runs."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    try:
        import nixl_cu13  # noqa: F401, PLC0415 - NIXL is optional
    except ImportError:
        yield Row(budget="B7", what="whole transfer / raw read", ours="", other="no nixl")
        return
    for case in CASES:
        yield _measured(options, work_of(case), case[-1])


def _measured(options: Options, work: works.Work, limit: float) -> Row:
    mine, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(theirs, work), daemon=True)
    process.start()
    theirs.close()
    try:
        whole, raw, count, nbytes = _against(options, work, mine)
    finally:
        process.kill()
        process.join()
    return Row(
        budget="B7",
        what=f"{work.name}: {count} posted, {nbytes / 2**20:.3g} MiB (other: one read a source)",
        ours=told(whole),
        other=told(raw),
        ratio=f"{whole / raw:.3g}",
        wanted=f"<= {limit}",
        met=whole <= limit * raw,
    )


def serve(pipe: Connection, work: works.Work) -> None:
    """Be the producer: all source ranks of one consumer rank, until the pipe is closed."""
    from kvspec.nixl import NixlRank  # noqa: PLC0415 - only this process and `_against` need it

    producer, consumer = work.engines()
    sources = plan_transfer(producer, consumer).sources(TARGET)
    made = [allocate(producer, source, work.pools[0]) for source in sources]
    with NixlRank(secret=b"") as rank:
        for cache, storage in made:
            for each in storage.values():
                each[:] = 1  # touched: an untouched page costs the reader a fault
            rank.register(cache.memory, owner=storage)
        pipe.send((rank.metadata(), [cache.memory[0].address for cache, _ in made]))
        while True:
            time.sleep(0.001)
            rank.notifications()
            if pipe.poll() and pipe.recv() is None:
                return


def _against(options: Options, work: works.Work, pipe: Connection) -> tuple[float, float, int, int]:
    """Return the seconds of a whole transfer and of a raw read, descriptors posted, and bytes."""
    from kvspec.nixl import NixlRank  # noqa: PLC0415

    producer, consumer = work.engines()
    plan, request = plan_transfer(producer, consumer), work.request()
    cache, storage = allocate(consumer, TARGET, work.pools[1])
    for each in storage.values():
        each[:] = 2
    with NixlRank(secret=b"", polled=True, telemetry=True) as rank:
        rank.register(cache.memory, owner=storage)
        metadata, bases = pipe.recv()
        peer = rank.connect(metadata)
        lists = []
        for source, base in zip(plan.sources(TARGET), bases, strict=True):
            far = lay_out(producer, source, work.pools[0], base)
            table = build_table(plan, far, cache)
            remote = rank.prepare(table.producer_rows, peer=peer)
            lists.append((table, rank.prepare(table.consumer_rows), remote))
        posted: list[int] = []

        def whole() -> float:
            started = time.perf_counter()
            reads = []
            for table, local, remote in lists:
                theirs, ours = table.select(request)
                reads.append(
                    rank.read(local, ours, remote, theirs, request="bench", timeout=TIMEOUT)
                )
            for each in reads:
                each.wait()
            rank.notify(peer, b"done")
            posted[:] = [each.posted or 0 for each in reads]
            return time.perf_counter() - started

        nbytes = sum(int(table.descriptors(request)[:, 2].sum()) for table, _, _ in lists)
        raw = _raw(rank, peer, cache.memory[0], bases, nbytes)
        seconds = interleaved(options.times(16), whole, raw)
        pipe.send(None)
    return seconds[0], seconds[1], sum(posted), nbytes


def _raw(rank: Any, peer: str, own: Memory, bases: list[int], nbytes: int) -> Any:  # noqa: ANN401
    """Return a timer of one read of *nbytes*, a descriptor for each source."""
    import numpy as np  # noqa: PLC0415

    share = nbytes // len(bases)
    far = np.array([[base, share, 0, share, 1] for base in bases], np.uint64)
    near = np.array([[own.address + i * share, share, 0, share, 1] for i in range(len(bases))])
    lists = rank.prepare(near.astype(np.uint64)), rank.prepare(far, peer=peer)
    ids = np.arange(len(bases), dtype=np.int32)

    def run() -> float:
        started = time.perf_counter()
        rank.read(lists[0], ids, lists[1], ids, request="raw", timeout=TIMEOUT).wait()
        return time.perf_counter() - started

    return run
