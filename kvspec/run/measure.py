"""Measure the costs of real transfers between two processes of this machine, direct and staged.

Invariant: a measurement does what a connector does, a read of a request over NIXL. The least of
several tries counts, because other programs use the machine as well. If the transport copies while
it posts, the time is that of the processor.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import attrs
import numpy as np

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.descriptors.selection import Selection
from kvspec.descriptors.table import build_table
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import TransferError, TransferState
from kvspec.memory.allocation import allocate, plan_memory
from kvspec.nixl import NixlRank, Staging
from kvspec.nixl.costs import Costs
from kvspec.nixl.fitting import Sample, fit
from kvspec.nixl.transfer_spec import Prepared
from kvspec.ownership.parallel import RankId
from kvspec.plan.plan import plan_transfer
from kvspec.specs import FullAttentionSpec

RANK = RankId()
TIMEOUT = 60.0
SMALL = 1 << 20  # bytes of a batch, so that what each costs is known from what an order costs


@attrs.frozen(kw_only=True)
class Probe:
    """A request of *blocks* shuffled blocks of *tokens*: heads first to *layout*, eight heads.

    Its runs are one head of a token each, or, in the same layout, whole blocks.
    """

    head_size: int
    tokens: int
    blocks: int
    layout: str = "LBKHNC"

    @property
    def engines(self) -> tuple[EngineSpec, EngineSpec]:
        """The producer and the consumer."""
        spec = FullAttentionSpec(
            block_size=self.tokens,
            total_num_kv_heads=8,
            head_size=self.head_size,
            dtype="bfloat16",
        )
        group = KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
        producer, consumer = (
            EngineSpec(groups=[group], layout=layout) for layout in ("LBKHNC", self.layout)
        )
        return producer, consumer

    @property
    def request(self) -> TransferRequest:
        """All blocks, in an order of its own on the consumer."""
        shuffled = np.random.default_rng(self.blocks).permutation(self.blocks)
        return TransferRequest(
            request_id="calibrate",
            num_tokens=self.tokens * self.blocks,
            producer_blocks={"full": range(self.blocks)},
            consumer_blocks={"full": BlockTable(shuffled)},
        )


def probes(most: int = 16 << 20) -> Iterator[Probe]:
    """Yield requests of *most* bytes, of a quarter and a sixteenth, with runs of all lengths."""
    for nbytes in (most, most // 4, most // 16):
        for size in (64, 128, 512):
            blocks = max(1, nbytes // (2 * 8 * 2 * size * 16))
            yield Probe(head_size=size, tokens=16, blocks=blocks, layout="LBKNHC")
        for block in (1 << 12, 1 << 14, 1 << 16, 1 << 18):
            tokens = block // (2 * 8 * 2 * 64)
            yield Probe(head_size=64, tokens=tokens, blocks=max(1, nbytes // block))


def serve(pipe: Connection, wanted: tuple[Probe, ...]) -> None:
    """Be the producer of each probe, until the pipe is closed."""
    with NixlRank(secret=b"") as rank:
        for probe in wanted:
            cache, storage = allocate(probe.engines[0], RANK, probe.blocks)
            for memory in storage.values():
                memory[:] = 1  # an untouched page costs the reader a fault
            rank.register(cache.memory, owner=storage)
            pipe.send((rank.metadata(), cache.memory[0].address))
        while not pipe.poll(0.001):
            rank.notifications()


@contextmanager
def _served(wanted: tuple[Probe, ...]) -> Iterator[list[tuple[bytes, int]]]:
    """Start the producer's process, and end it; yield what it told of each probe."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(other, wanted), daemon=True)
    process.start()
    other.close()
    try:
        told = []
        for _ in wanted:
            if not pipe.poll(TIMEOUT):
                message = f"the other process gave no answer for {TIMEOUT} s"
                raise TransferError(message, state=TransferState.TIMEOUT)
            told.append(pipe.recv())
        yield told
    except EOFError as error:
        message = "the other process died"
        raise TransferError(message, state=TransferState.PEER_LOST) from error
    finally:
        pipe.close()
        process.join(1)
        process.kill()


def measure(
    wanted: tuple[Probe, ...], tries: int = 7, progress: Callable[[int], object] = lambda _: None
) -> list[tuple[Sample, ...]]:
    """Return of each probe the least that it took directly, staged, and staged in small batches."""
    found = []
    with _served(wanted) as told:
        for probe, (metadata, base) in zip(wanted, told, strict=True):
            found.append(_measured(probe, metadata, base, tries))
            progress(1)
    return found


def _measured(probe: Probe, metadata: bytes, base: int, tries: int) -> tuple[Sample, ...]:
    producer, consumer = probe.engines
    cache, storage = allocate(consumer, RANK, probe.blocks)
    for memory in storage.values():
        memory[:] = 2
    far = plan_memory(producer, RANK, probe.blocks, base)
    table = build_table(plan_transfer(producer, consumer), far, cache)
    samples = []
    costs = Costs()
    ways = (
        None,
        Staging(always=True, costs=costs),
        Staging(always=True, costs=costs, slot_bytes=SMALL),
    )
    for staging in ways:
        with NixlRank(secret=b"", polled=True, telemetry=True, staging=staging) as rank:
            rank.register(cache.memory, owner=storage)
            peer = rank.connect(metadata, TIMEOUT)
            sides = rank.prepare(table.consumer_rows), rank.prepare(table.producer_rows, peer=peer)
            tried = [_timed(rank, table.select(probe.request), sides) for _ in range(tries + 1)]
            samples.append(min(tried, key=lambda one: one.seconds))
    return tuple(samples)


def _timed(rank: NixlRank, selection: Selection, sides: tuple[Prepared, Prepared]) -> Sample:
    """Return what one read takes."""
    started = time.perf_counter(), time.process_time()
    read = rank.read(sides[0], selection, sides[1], request="calibrate", timeout=TIMEOUT)
    at_once = not read.live_handles
    read.wait()
    seconds = (time.process_time if at_once else time.perf_counter)() - started[at_once]
    posted, stage = read.posted or read.runs, read.spec.stage
    counts = {"descriptors": posted, "handles": read.handles}
    if stage is None:
        return Sample(seconds=seconds, nbytes=read.nbytes, **counts)
    ranges = stage.ranges
    more = {"nbytes": ranges.read, "runs": ranges.runs, "permuted": ranges.nbytes}
    return Sample(seconds=seconds, **counts, **more)


def fitted(samples: list[tuple[Sample, ...]]) -> Costs:
    """Return the costs that fit what was measured."""
    return fit((one for pair in samples for one in pair), origin="measured just now")
