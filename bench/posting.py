"""READ: the cost of one `read` for the calling thread, compared with NIXL's own calls.

It is the CPU time of a read of one descriptor of one token, until the call returns. Every read has
this cost. Over shared memory the read has ended by then, so both sides also release its handle.
Otherwise waiting for the read and releasing its handle are not included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import works
from requesting import PLAIN
from timing import Options, Row, Timer, interleaved, readable

import kvspec
from kvspec.nixl import NixlRank, Transfer
from kvspec.nixl.agent import Agent

# The smallest request: one token of one head in one layer.
ONE = attrs.evolve(PLAIN, layers=1, spec=works.heads(1, 1), tp_sizes=(1, 1), tokens=1)
# Timeout of a read. None comes near it.
SECONDS = 10.0
# A read may take as many times as long as NIXL's own calls.
LIMIT = 3.0


def read_cost(options: Options) -> Iterator[Row]:
    """Time `read` of one descriptor, given as a selection and as ids."""
    producer, consumer = ONE.engines()
    plan = kvspec.plan_transfer(producer, consumer)
    rank = consumer.parallel.ranks[0]
    with NixlRank(secret=b"") as far, NixlRank(secret=b"") as near:
        caches = []
        for engine, pool, side in zip((producer, consumer), ONE.pools, (far, near), strict=True):
            cache, storage = kvspec.allocate(engine, rank, pool)
            side.register(cache.memory, owner=storage)
            caches.append(cache)
        table = kvspec.build_table(plan, *caches)
        peer = near.connect(far.metadata())
        local = near.prepare(table.consumer_rows)
        remote = near.prepare(table.producer_rows, peer=peer)
        selection = table.select(_request())
        ids = selection.consumer_ids, selection.producer_ids

        def by_selection() -> Transfer:
            return near.read(local, selection, remote, request="r", timeout=SECONDS)

        def by_ids() -> Transfer:
            return near.read(local, ids[0], remote, ids[1], request="r", timeout=SECONDS)

        agent = near._agent  # noqa: SLF001 - NIXL itself, with nothing around it
        sides = (local.handle, ids[0]), (remote.handle, ids[1])
        timers = _posted(by_selection), _posted(by_ids), _raw(agent, *sides)
        one, plain, other = interleaved(options.times(1000), *timers)
    for what, ours in (("a selection", one), ("ids", plain)):
        yield Row(
            budget="READ",
            what=f"read() of one descriptor, by {what}, until posted; other: NIXL's own calls",
            ours=readable(ours),
            other=readable(other),
            ratio=f"{ours / other:.2f}",
            required=f"<= {LIMIT:g}",
            met=ours / other <= LIMIT,
        )


def _request() -> kvspec.TransferRequest:
    return kvspec.TransferRequest(
        request_id="r",
        num_tokens=ONE.tokens,
        producer_blocks={works.GROUP: [0]},
        consumer_blocks={works.GROUP: [0]},
    )


def _posted(read: Callable[[], Transfer]) -> Timer:
    """Return a timer of *read*. The wait comes after the clock has stopped."""

    def run() -> float:
        started = time.thread_time()
        transfer = read()
        taken = time.thread_time() - started
        transfer.wait()
        return taken

    return run


def _raw(agent: Agent, *sides: tuple[int, Any]) -> Timer:
    """Return a timer that makes and posts one handle of NIXL, and releases it if it has ended."""
    nixl, native = agent._nb, agent._native  # noqa: SLF001 - NIXL itself
    success = nixl.NIXL_SUCCESS.value

    def run() -> float:
        started = time.thread_time()
        handle = native.makeXferReq(nixl.NIXL_READ, *sides[0], *sides[1], "", [], False)  # noqa: FBT003
        if native.postXferReq(handle).value == success:
            native.releaseXferReq(handle)
            return time.thread_time() - started
        taken = time.thread_time() - started
        while native.getXferStatus(handle).value != success:
            pass
        native.releaseXferReq(handle)
        return taken

    return run
