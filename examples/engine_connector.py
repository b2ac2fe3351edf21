"""The connector of two whole engines: several processes, a router, an abort and windows.

`python examples/engine_connector.py` prints the outcome of three prompts. The cache of gpt-oss-20b
moves from two ranks to three. Each rank is a process with a session. This process is the scheduler
of both engines and the router, where only JSON travels. Checksums are compared.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import time
from multiprocessing.managers import BaseManager
from typing import Any

import kvspec
from kvspec.models import catalogue
from kvspec.nixl import NixlRank
from kvspec.session import Session, new_remote_id
from kvspec.tickets import PrefillTicket, RankAgreement, ReleaseAgreement

TOKENS, NULL = 200, 0
# A window of 128 tokens no longer reads the first block of 64, so the null block is in its place.
SENT = {"full": [5, 1, 2, 7], "sliding_window": [NULL, 6, 3, 4]}
RECEIVED = {"full": [1, 4, 6, 3], "sliding_window": [NULL, 2, 5, 7]}


def engine(tp_size: int) -> kvspec.EngineSpec:
    """Return an engine: half of its layers have full attention, the others a window."""
    groups = kvspec.models.from_config(catalogue.config("gpt-oss-20b"), block_size=64)
    parallel = kvspec.ParallelConfig(tp_size=tp_size)
    return kvspec.EngineSpec(groups=groups, parallel=parallel, null_block=NULL)


class Rank(Session):
    """The session of one rank, in a process of its own."""

    def __init__(self, name: str, tp_size: int, tp: int, epoch: int) -> None:
        cache, memory = kvspec.allocate(engine(tp_size), kvspec.RankId(tp=tp), num_blocks=8)
        for array in memory.values():  # The model has computed something.
            array[:] = tp + 1 if name == "prefill" else 0
        own: Any = {"engine_id": name, "epoch": epoch, "owner": memory}
        super().__init__(NixlRank(), cache, background=True, **own)

    def address(self) -> str:
        """Return where other ranks reach this one."""
        return self.channel.address


# A manager starts a process and passes calls on. `load` returns a load that stays in its process.
BaseManager.register("rank", Rank, method_to_typeid={"load": "opened"})
BaseManager.register("opened", exposed=("poll", "cancel"))


def start(name: str, tp_size: int) -> list[Any]:
    """Start all ranks of an engine with one epoch. NIXL does not survive a fork: spawn them."""
    epoch = time.time_ns()
    managers = [BaseManager(ctx=multiprocessing.get_context("spawn")) for _ in range(tp_size)]
    for manager in managers:
        manager.start()
    return [manager.rank(name, tp_size, tp, epoch) for tp, manager in enumerate(managers)]


def main() -> None:
    """Move three prompts. The client of the second one goes away before it is loaded."""
    os.environ.setdefault("KVSPEC_SECRET", secrets.token_hex())  # All ranks inherit it.
    prefill, decode = start("prefill", 2), start("decode", 3)
    common: Any = {"engine_id": "prefill", "addresses": [rank.address() for rank in prefill]}
    releases = ReleaseAgreement(range(len(prefill)))
    for number in range(3):
        releases.hold(remote_id := new_remote_id(f"prompt-{number}"))
        for rank in prefill:
            rank.hold(remote_id, lease=30, blocks=SENT)
            if number == 1:
                rank.abort(remote_id)
        common |= {"remote_id": remote_id, "computed_tokens": TOKENS, "tables": SENT}
        params = json.dumps(PrefillTicket(**common).to_params())  # What the router passes on.
        ticket = PrefillTicket.from_params(json.loads(params))
        request = ticket.request(remote_id, TOKENS - 1, RECEIVED)
        loads = [rank.load(request, ticket=ticket, timeout=20, checksum=True) for rank in decode]
        agreement = RankAgreement(loads)
        while agreement.state == "moving":  # In each step of the decode engine.
            for load in loads:
                agreement.report(load, load.poll())
            for load in agreement.to_cancel:
                load.cancel()
            time.sleep(0.01)
        # After a failure, an engine computes the blocks in `undefined_blocks` of each load again.
        while releases.held:  # The blocks are free when they are free on all ranks.
            for tp, rank in enumerate(prefill):
                releases.report(tp, rank.settled().freed)
        print(f"prompt {number}: {agreement.state}, and its blocks are free")
    for rank in (*decode, *prefill):
        rank.close()  # A process that continues closes `rank.nixl` next.


if __name__ == "__main__":
    main()
