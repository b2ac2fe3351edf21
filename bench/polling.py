"""POLL: the CPU time of one poll of a session that has many loads in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from timing import Options, Row, cpu, interleaved, readable

import kvspec
from kvspec.nixl import NixlRank
from kvspec.session import Load, Session, new_remote_id
from kvspec.testing import FakeNixl

LOADS, BLOCK, LAYERS, LIMIT = 64, 16, 32, 1e-3
"""Loads in flight, tokens of a block, layers, and the seconds that a poll may take."""


def engine(tp_size: int) -> kvspec.EngineSpec:
    """Return an engine of one group."""
    spec = kvspec.FullAttentionSpec(
        block_size=BLOCK, total_num_kv_heads=2, head_size=8, dtype="float16"
    )
    names = [f"layers.{number}" for number in range(LAYERS)]
    group = kvspec.KVCacheGroup(name="full", layers=names, spec=spec)
    return kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=tp_size))


def polled(options: Options) -> Iterator[Row]:
    """Poll a consumer whose loads read from two producer ranks. No byte arrives during it."""
    with ExitStack() as stack:
        net = stack.enter_context(FakeNixl())
        sessions = list[Session]()
        for engine_id, spec in (("P", engine(2)), ("D", engine(1))):
            for rank in spec.parallel.ranks:
                cache, storage = kvspec.allocate(spec, rank, LOADS + 1)
                nixl = stack.enter_context(NixlRank(prefix=f"{engine_id}-", secret=b""))
                session = Session(nixl, cache, engine_id=engine_id, epoch=1, owner=storage)
                sessions.append(stack.enter_context(session))
        *producers, consumer = sessions
        consumer.connect([producer.introduction for producer in producers])
        net.fate = lambda _: None
        loads = [_load(consumer, number) for number in range(1, LOADS + 1)]
        (ours,) = interleaved(options.times(200), cpu(consumer.poll))
        if any(load.poll() != "moving" for load in loads):
            raise RuntimeError("a load has ended, so the poll had less work than the row describes")
        for flight in net.moving:
            flight.land()
    what = f"CPU of `Session.poll` with {LOADS} loads that read, of 2 ranks each"
    met, limit = ours <= LIMIT, f"<= {readable(LIMIT)}"
    yield Row(budget="POLL", what=what, ours=readable(ours), required=limit, met=met)


def _load(consumer: Session, number: int) -> Load:
    """Begin a load of one block."""
    request = kvspec.TransferRequest(
        request_id=f"{number}",
        num_tokens=BLOCK,
        producer_blocks={"full": [number]},
        consumer_blocks={"full": [number]},
    )
    remote_id = new_remote_id(request.request_id)
    return consumer.load(request, remote_id=remote_id, timeout=3600.0)
