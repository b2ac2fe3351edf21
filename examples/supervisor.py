"""Restart engines: killed ranks, queued jobs, tickets of the old start, and a router that retries.

`python examples/supervisor.py` prints what happens to each job. Each rank is a process. This one is
the supervisor and the scheduler of both engines, and the router.

- If one rank dies, its engine has lost a part of each prompt. All its ranks start with a new epoch.
- Jobs that wait in the queue have no blocks. They run on the new start.
- A ticket is valid for one start of its producer and for one load. A router that retries asks for
  a new ticket, and aborts the old id: else the producer holds the prompt until its lease ends.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import time
from multiprocessing.managers import BaseManager
from typing import Any

import kvspec
from kvspec.models import catalogue
from kvspec.nixl import NixlRank
from kvspec.session import Session, new_remote_id
from kvspec.tickets import PrefillTicket, RankAgreement

ATTEMPTS = 3
# The errors of a call if the process of a rank has ended.
DEAD = (EOFError, OSError)
TOKENS, SENT, RECEIVED = 40, {"full": [5, 1, 2]}, {"full": [1, 4, 6]}


def spec(tp_size: int) -> kvspec.EngineSpec:
    """Return an engine with full attention."""
    groups = kvspec.models.from_config(catalogue.config("Qwen3-8B"), block_size=16)
    return kvspec.EngineSpec(groups=groups, parallel=kvspec.ParallelConfig(tp_size=tp_size))


class Rank(Session):
    """The session of one rank, in a process of its own."""

    def __init__(self, name: str, tp_size: int, tp: int, epoch: int) -> None:
        cache, memory = kvspec.allocate(spec(tp_size), kvspec.RankId(tp=tp), num_blocks=8)
        own: Any = {"engine_id": name, "epoch": epoch, "owner": memory, "background": True}
        super().__init__(NixlRank(), cache, heartbeat=0.5, lease=5, **own)

    def place(self) -> tuple[str, int]:
        """Return the address and the process of this rank."""
        return self.channel.address, os.getpid()


BaseManager.register("rank", Rank, method_to_typeid={"load": "opened"})
BaseManager.register("opened", exposed=("poll", "cancel"))


class Engine:
    """The supervisor of one engine: it knows the processes of all ranks."""

    def __init__(self, name: str, tp_size: int) -> None:
        self.name, self.tp_size, self.managers = name, tp_size, list[Any]()
        self.start()

    def start(self) -> None:
        """End what is left of the last start, and start all ranks with one new epoch."""
        for manager in self.managers:
            manager.shutdown()
        spawn = multiprocessing.get_context("spawn")
        self.managers = [BaseManager(ctx=spawn) for _ in range(self.tp_size)]
        epoch, self.ranks = time.time_ns(), list[Any]()
        for tp, manager in enumerate(self.managers):
            manager.start()
            self.ranks.append(manager.rank(self.name, self.tp_size, tp, epoch))
        self.addresses, self.pids = zip(*(rank.place() for rank in self.ranks), strict=True)

    def watch(self) -> None:
        """Start the engine again if any of its ranks does not answer."""
        try:
            for rank in self.ranks:
                rank.place()
        except DEAD:
            print(f"{self.name}: a rank has died, all ranks start again")
            self.start()

    def abort(self, ticket: PrefillTicket) -> None:
        """Free a held prompt. A new start does not know the ticket, and then nothing happens."""
        for rank in self.ranks:
            rank.abort(ticket.remote_id)

    def ask(self, job: str) -> PrefillTicket:
        """Compute a prompt, hold it on all ranks, and return its ticket."""
        remote_id = new_remote_id(job)
        for rank in self.ranks:
            rank.hold(remote_id, lease=10, blocks=SENT)
        common: Any = {"engine_id": self.name, "addresses": self.addresses, "tables": SENT}
        return PrefillTicket(remote_id=remote_id, computed_tokens=TOKENS, **common)


def load(decode: Engine, ticket: PrefillTicket) -> str:
    """Load a prompt on all ranks, and return the state on which they agree."""
    request = ticket.request(new_remote_id("load"), TOKENS, RECEIVED)
    loads = {tp: r.load(request, ticket=ticket, timeout=8) for tp, r in enumerate(decode.ranks)}
    agreement = RankAgreement(loads)
    while agreement.state == "moving":
        for tp, each in loads.items():
            agreement.report(tp, each.poll())
        for tp in agreement.to_cancel:
            loads[tp].cancel()
        time.sleep(0.01)
    return agreement.state


def serve(prefill: Engine, decode: Engine, job: str) -> str:
    """Do as a router does: get a ticket, let it be loaded, and try again with a new one."""
    for attempt in range(1, ATTEMPTS + 1):
        ticket = None
        try:
            ticket = prefill.ask(job)
            if load(decode, ticket) == "done":
                return f"done in attempt {attempt}"
        except DEAD:  # The supervisor finds out who it was.
            for engine in (prefill, decode):
                engine.watch()
        if ticket is not None:
            prefill.abort(ticket)
    return "failed"


def main() -> None:
    """Kill a rank of each engine while jobs wait."""
    os.environ.setdefault("KVSPEC_SECRET", secrets.token_hex())
    prefill, decode = Engine("prefill", 2), Engine("decode", 1)
    old, queue = prefill.ask("job 0"), ["job 0", "job 1", "job 2"]
    os.kill(prefill.pids[1], signal.SIGKILL)
    print(f"{queue[0]}:", serve(prefill, decode, queue.pop(0)))
    print("job 0, ticket of the old start:", load(decode, old))
    os.kill(decode.pids[0], signal.SIGKILL)
    while queue:
        print(f"{queue[0]}:", serve(prefill, decode, queue.pop(0)))
    old = prefill.ask("job 3")
    prefill.abort(old)
    print("job 3, aborted ticket:", load(decode, old))
    for rank in (*prefill.ranks, *decode.ranks):
        rank.close()


if __name__ == "__main__":
    main()
