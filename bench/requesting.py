"""B11 to B13 and B16: the cost of one request until it is posted.

Figures are CPU time, because an engine's own thread pays it. `by_hand` imitates the fast path of
vLLM 0.32's NIXL connector for equal blocks and layouts. For each request and side, block ids arrive
as lists. The groups of all regions become an array, and the first id of each is summed up. The id
of a descriptor is the first id of its region plus the block. Only whole blocks move, only their
number is checked, and there is one handle. The code is independent of vLLM and written for these
works alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import cast

import attrs
import numpy as np
import works
from timing import Options, Row, Timer, cpu, interleaved, readable

import kvspec
from kvspec import DescriptorTable
from kvspec.nixl import NixlRank, Transfer
from kvspec.nixl.agent import Agent, Prepared
from kvspec.nixl.rows import checked_rows
from kvspec.nixl.transfer import InFlightTransfers

PLAIN = works.Work(
    name="80 layers, TP 4 -> 4, blocks of 16",
    layers=80,
    spec=works.heads(8, 16),
    tp_sizes=(4, 4),
    tokens=1_000,
)
FULL_BLOCKS = 1_024  # tokens
LATENT = attrs.evolve(PLAIN, name="latents, TP 8 -> 1", spec=works.LATENT, tp_sizes=(8, 1))
FOUR = attrs.evolve(PLAIN, name="80 layers, TP 8 -> 2, four sources", tp_sizes=(8, 2))
LONG = attrs.evolve(works.W1, name="W1's model, a million tokens", tokens=1_000_000)


class NoAgent:
    """An agent that posts nothing."""

    name = "none"

    def make(self, *_: object) -> int:
        """Return an invented handle."""
        return 1

    make_plain = make


class Lanes:
    """All tables of one consumer rank and their prepared lists.

    With *stack*, NIXL prepares the lists and makes handles. Without it, `NoAgent` does.
    """

    def __init__(self, work: works.Work, stack: ExitStack | None = None) -> None:
        self.work = work
        producer, consumer = work.engines()
        plan = kvspec.plan_transfer(producer, consumer)
        target = consumer.parallel.ranks[0]
        self.blocks = tuple(table.tolist() for table in work.tables())
        if stack is not None:
            self._allocated(plan, target, stack)
            return
        sources, targets = (
            dict(works.caches(engine, pool, side))
            for side, (engine, pool) in enumerate(
                zip((producer, consumer), work.pools, strict=True)
            )
        )
        self.agent = cast("Agent", NoAgent())
        self.tables = [
            kvspec.build_table(plan, sources[source], targets[target])
            for source in plan.sources(target)
        ]
        self.lists = [self._lists(table) for table in self.tables]

    @property
    def transfers(self) -> InFlightTransfers:
        """The transfers of the agent. None is started."""
        return InFlightTransfers(self.agent)

    def _lists(self, table: DescriptorTable) -> tuple[Prepared, Prepared]:
        local, remote = (
            Prepared(self.agent, checked_rows(rows), "DRAM", peer, 1, rows)
            for rows, peer in ((table.consumer_rows, None), (table.producer_rows, "peer"))
        )
        return local, remote

    def _allocated(
        self, plan: kvspec.TransferPlan, target: kvspec.RankId, stack: ExitStack
    ) -> None:
        near, far = (stack.enter_context(NixlRank(secret=b"")) for _ in range(2))
        cache, storage = kvspec.allocate(plan.consumer, target, self.work.pools[1])
        near.register(cache.memory, owner=storage)
        sources = []
        for source in plan.sources(target):
            source_cache, owner = kvspec.allocate(plan.producer, source, self.work.pools[0])
            far.register(source_cache.memory, owner=owner)
            sources.append(source_cache)
        peer = near.connect(far.metadata())
        self.agent = near._agent  # noqa: SLF001 - it makes handles without posting
        self.tables = [kvspec.build_table(plan, source, cache) for source in sources]
        self.lists = [
            (near.prepare(table.consumer_rows), near.prepare(table.producer_rows, peer=peer))
            for table in self.tables
        ]

    def request(self) -> kvspec.TransferRequest:
        """Return the request, as a connector makes it."""
        return kvspec.TransferRequest(
            request_id="r",
            num_tokens=self.work.tokens,
            producer_blocks={works.GROUP: self.blocks[0]},
            consumer_blocks={works.GROUP: self.blocks[1]},
        )

    def whole(self) -> list[int]:
        """Build the request, select, check, merge and make every handle; return the handles."""
        request, handles = self.request(), []
        for table, (local, remote) in zip(self.tables, self.lists, strict=True):
            selection = table.select(request)
            transfer = Transfer(self.transfers, "READ", (local, selection, remote, None), "r", 1.0)
            handles += [transfer.make(batch) for batch in transfer.batches]
        return handles

    def by_hand(self) -> list[int]:
        """Compute ids as a connector for equal engines does; make one handle for each source."""
        created, regions = [], self.work.layers
        for local, remote in self.lists:
            sides, checked = [], []
            for pool, blocks in zip(self.work.pools, self.blocks, strict=True):
                blocks_of, groups = [pool] * regions, np.asarray([0] * regions, np.int32)
                begins, total = np.cumsum([0, *blocks_of[:-1]]), sum(blocks_of)
                block_ids = np.concatenate([np.asarray(each, np.int32) for each in (blocks,)])
                sides.append((begins[:, None] + block_ids[None, :]).ravel())
                checked.append((len(groups), total, len(sides[-1])))
            if checked[0][2] != checked[1][2]:
                raise ValueError(checked)
            handles = local.handle, remote.handle
            pairs = (handles[0], sides[1]), (handles[1], sides[0])
            created.append(self.agent.make("READ", *pairs, ("", "r")))
        return created

    def timed(self, work: Callable[[], list[int]]) -> Timer:
        """Return a timer of *work* in this thread's CPU time; its handles are released after."""

        def run() -> float:
            started = time.thread_time()
            handles = work()
            taken = time.thread_time() - started
            for handle in handles:
                self.agent.release(handle)
            return taken

        return run


def b11(options: Options) -> Iterator[Row]:
    """Time one request until NIXL has made its handles, compared with the same by hand.

    Both move the same bytes if the blocks are full. If the last block is half full, we move its
    live tokens, and the other moves it whole. These rows have no limit.
    """
    for work, limit in ((PLAIN, 1.5), (LATENT, 1.5), (FOUR, 2.0)):
        for spec, fragments in (("in order", 0), ("shuffled", 1)):
            for tokens, end in ((FULL_BLOCKS, ""), (work.tokens, ", last block half full")):
                with ExitStack() as stack:
                    changed = attrs.evolve(work, fragments=fragments, tokens=tokens)
                    lanes = Lanes(changed, stack)
                    timers = lanes.timed(lanes.whole), lanes.timed(lanes.by_hand)
                    ours, other = interleaved(options.times(400), *timers)
                yield Row(
                    budget="B11",
                    what=f"one request, {work.name}, {spec}{end}; other: by hand, unchecked",
                    ours=readable(ours),
                    other=readable(other),
                    ratio=f"{ours / other:.2f}",
                    required="" if end else f"<= {limit}",
                    met=None if end else ours <= limit * other,
                )


def b12(options: Options) -> Iterator[Row]:
    """Time checking and merging a large selection."""
    lanes = Lanes(works.W1)
    (table, *_), ((local, remote), *_) = lanes.tables, lanes.lists
    selection = table.select(lanes.request())

    def joined() -> object:
        return Transfer(lanes.transfers, "READ", (local, selection, remote, None), "r", 1.0)

    (ours,) = interleaved(options.times(16), cpu(joined))
    what = f"check and merge W1, shuffled: {len(selection):,} ids of one source"
    # The first version took 101 to 115 ms. Checks by tile instead of by id are far fewer.
    yield budgeted("B12", what, ours, 4e-3)


def b13(options: Options) -> Iterator[Row]:
    """Time `select`, for each descriptor."""
    lanes = Lanes(works.W1)
    request, table = lanes.request(), lanes.tables[0]
    many = len(table.select(request))
    (ours,) = interleaved(options.times(16), cpu(lambda: table.select(works.afresh(request))))
    # Writing the ids alone takes 0.4 to 1.6 ns each.
    yield budgeted("B13", "select W1, a descriptor", ours / many, 2.5e-9)


def b16(options: Options) -> Iterator[Row]:
    """Time a very long request."""
    lanes = Lanes(LONG)
    (ours,) = interleaved(options.times(8), cpu(lanes.whole))
    yield budgeted("B16", f"{LONG.name}, TP 8 -> 4, shuffled, until posted", ours, 0.1)


def budgeted(name: str, what: str, seconds: float, limit: float) -> Row:
    """Return the row of a figure with an absolute limit."""
    return Row(
        budget=name,
        what=what,
        ours=readable(seconds),
        required=f"<= {readable(limit)}",
        met=seconds <= limit,
    )
