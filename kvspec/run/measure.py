"""Measure the costs of real transfers between two processes of this machine, direct and staged.

Invariant: a measurement does what a connector does, a read of a request over NIXL. The least of
several tries counts, because other programs use the machine as well. If the transport copies while
it posts, the time is that of the processor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import log

import attrs

from kvspec.descriptors.selection import Selection
from kvspec.descriptors.table import build_table
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import TransferError, TransferState
from kvspec.memory.allocation import allocate, plan_memory
from kvspec.nixl import NixlRank, Staging
from kvspec.nixl.agent import Prepared
from kvspec.ownership.parallel import RankId
from kvspec.run.job import Job
from kvspec.run.rank_client import Ranks
from kvspec.specs import FullAttentionSpec

LOG = logging.getLogger(__name__)
RANK = RankId()
HEADS = 8
SOURCE = "LBKHNC"  # the layout of the producer
JOB_TIMEOUT = 60.0


@attrs.frozen(kw_only=True)
class Sample:
    """The measured times of one probe.

    Attributes:
        mean: Mean bytes of a run.
        nbytes: Bytes of all runs.
        direct: Seconds of a direct read.
        staged: Seconds of a staged read.
    """

    mean: float
    nbytes: int
    direct: float
    staged: float


def probes(most: int = 16 << 20) -> Iterator[Job]:
    """Yield requests of *most* bytes and of a quarter, with runs of all lengths."""
    for nbytes in (most, most // 4):
        for size in (64, 128, 512):
            # In another layout, each run is one head of one token.
            yield _probe(nbytes, head_size=size, tokens=16, layout="LBKNHC")
        for block in (1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 16):
            # In the same layout, each run is the keys or the values of a block.
            yield _probe(nbytes, head_size=64, tokens=block // (HEADS * 64 * 2), layout=SOURCE)


def _probe(nbytes: int, *, head_size: int, tokens: int, layout: str) -> Job:
    """Return one request of about *nbytes*, in blocks of *tokens* tokens."""
    spec = FullAttentionSpec(
        block_size=tokens, total_num_kv_heads=HEADS, head_size=head_size, dtype="bfloat16"
    )
    group = KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    producer, consumer = (
        EngineSpec(groups=[group], layout=letters) for letters in (SOURCE, layout)
    )
    blocks = max(1, nbytes // (2 * tokens * HEADS * head_size * 2))
    return Job(producer=producer, consumer=consumer, tokens=tokens * blocks, requests=1)


class ProbeServer:
    """The producer of the probes. The body of a process that `measure` starts."""

    def __init__(self) -> None:
        self.rank = NixlRank(secret=b"")

    def serve(self, probe: Job) -> tuple[bytes, int]:
        """Allocate the producer's memory. Return the rank's metadata and the memory's address."""
        cache, storage = allocate(probe.producer, RANK, probe.num_blocks("producer"))
        for memory in storage.values():
            memory[:] = 1  # The first access to a page costs the reader a fault.
        self.rank.register(cache.memory, owner=storage)
        return self.rank.metadata(), cache.memory[0].address


def measure(jobs: Sequence[Job], tries: int = 7) -> list[Sample]:
    """Return the least times of each probe, directly and staged."""
    samples: list[Sample] = []
    with Ranks() as ranks:
        ranks.add("producer of the probes", ProbeServer, ())
        for probe in jobs:
            try:
                metadata, base = ranks.ranks[0].ask("serve", probe)
            except (ConnectionError, TimeoutError) as error:
                raise TransferError(str(error), state=TransferState.PEER_LOST) from error
            samples.append(_measured(probe, metadata, base, tries))
            LOG.info("measured %d of %d requests", len(samples), len(jobs))
    return samples


def _measured(probe: Job, metadata: bytes, base: int, tries: int) -> Sample:
    cache, storage = allocate(probe.consumer, RANK, probe.num_blocks("consumer"))
    for memory in storage.values():
        memory[:] = 2  # The first access to a page costs a fault.
    far = plan_memory(probe.producer, RANK, probe.num_blocks("producer"), base)
    table, (request,) = build_table(probe.plan, far, cache), probe.moves
    least = []
    for staging in (None, Staging(always=True)):
        with NixlRank(secret=b"", polled=True, staging=staging) as rank:
            rank.register(cache.memory, owner=storage)
            peer = rank.connect(metadata, JOB_TIMEOUT)
            sides = rank.prepare(table.consumer_rows), rank.prepare(table.producer_rows, peer=peer)
            least.append(min(_timed(rank, table.select(request), sides) for _ in range(tries + 1)))
    lengths = table.descriptors(request)[:, 2]
    nbytes = int(lengths.sum())
    return Sample(mean=nbytes / len(lengths), nbytes=nbytes, direct=least[0], staged=least[1])


def _timed(rank: NixlRank, selection: Selection, sides: tuple[Prepared, Prepared]) -> float:
    """Return the seconds of one read."""
    started = time.perf_counter(), time.process_time()
    read = rank.read(sides[0], selection, sides[1], request="calibrate", timeout=JOB_TIMEOUT)
    at_once = not read.live_handles
    read.wait()
    return (time.process_time if at_once else time.perf_counter)() - started[at_once]


def threshold(samples: Sequence[Sample]) -> int:
    """Return the `Staging.stage_below` with which *samples* take the least time.

    Each sample counts by the factor that it loses against its faster way, so short transfers count
    as much as long ones.

    >>> def sample(mean, direct, staged):
    ...     return Sample(mean=mean, nbytes=10 * mean, direct=direct, staged=staged)
    >>> threshold([sample(256, 9.0, 1.0), sample(4096, 2.0, 1.0), sample(16384, 1.0, 2.0)])
    8192
    >>> threshold([sample(256, 1.0, 2.0), sample(4096, 1.0, 3.0)])
    0
    """
    means = sorted({sample.mean for sample in samples})
    between = [round((shorter * longer) ** 0.5) for shorter, longer in pairwise(means)]

    def loss(limit: int) -> float:
        taken = (
            (s.staged if s.mean < limit else s.direct) / min(s.direct, s.staged) for s in samples
        )
        return sum(map(log, taken))

    candidates: tuple[int, ...] = (0, *between, 2 * round(means[-1]))
    return min(candidates, key=loss)
