"""Move one request between two processes: a producer with two ranks and a consumer with one.

```sh
KVSPEC_SECRET=$(openssl rand -hex 32) python docs/two_processes.py
```

The pipe between the processes stands for a router: only the JSON of a prefill ticket travels on it.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from multiprocessing.connection import Connection

import kvspec
from kvspec.nixl import NixlRank
from kvspec.session import Session, new_remote_id
from kvspec.tickets import PrefillTicket

TOKENS, TABLE, LAYERS = 40, [5, 9, 2], ["layers.0", "layers.1"]


def engine(tp_size: int) -> kvspec.EngineSpec:
    """Return an engine with four KV heads."""
    spec = kvspec.FullAttentionSpec(
        block_size=16, total_num_kv_heads=4, head_size=64, dtype="float16"
    )
    group = kvspec.KVCacheGroup(name="full", layers=LAYERS, spec=spec)
    return kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=tp_size))


def open_session(
    engine_id: str, own: kvspec.EngineSpec, rank: kvspec.RankId, epoch: int
) -> Session:
    """Open the session of one rank, whose memory contains the number of the rank plus one."""
    cache, storage = kvspec.allocate(own, rank, num_blocks=64)
    for array in storage.values():
        array[:] = rank.tp + 1 if engine_id == "prefill" else 0
    return Session(
        NixlRank(), cache, engine_id=engine_id, epoch=epoch, owner=storage, background=True
    )


def producer(router: Connection) -> None:
    """Hold a request until the consumer has read it."""
    own, epoch = engine(2), time.time_ns()
    sessions = [open_session("prefill", own, rank, epoch) for rank in own.parallel.ranks]
    remote_id = new_remote_id("cmpl-1")
    for session in sessions:  # The prompt has been computed.
        session.hold(remote_id, lease=30)
    ticket = PrefillTicket(
        engine_id="prefill",
        addresses=tuple(session.channel.address for session in sessions),
        remote_id=remote_id,
        computed_tokens=TOKENS,
        tables={"full": TABLE},
    )
    router.send(json.dumps(ticket.to_params()))
    for session in sessions:
        while session.held:  # An engine calls poll() in each step instead.
            time.sleep(0.001)
        print("producer, freed:", "done" if session.settled().done else "expired", flush=True)
    for session in sessions:
        session.close()
        session.nixl.close()


def consumer(router: Connection) -> None:
    """Read the request that the ticket names."""
    own = engine(1)
    session = open_session("decode", own, kvspec.RankId(), time.time_ns())
    ticket = PrefillTicket.from_params(json.loads(router.recv()))
    blocks = {"full": kvspec.BlockTable([11, 12, 40])}
    request = ticket.request("cmpl-1", num_tokens=TOKENS, blocks=blocks)
    load = session.load(request, ticket=ticket, timeout=10)
    load.wait()
    print("consumer:", load.poll(), flush=True)
    session.close()
    session.nixl.close()


def main() -> None:
    """Start both processes with *spawn*: NIXL and sessions do not survive a fork."""
    spawn = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe()
    processes = [
        spawn.Process(target=producer, args=(near,)),
        spawn.Process(target=consumer, args=(far,)),
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
