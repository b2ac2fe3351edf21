"""Run many requests through the processes of two engines, with faults.

Invariant: no request is lost or wrong, and no resource leaks. This command runs for longer and
prints the figures:

    python tests/support/session_soak.py --requests 1000
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

from faulty_ranks import FaultyEngine, LossyRank, go_on, stop
from two_engines import engine

from kvspec.run.job import Job, Side
from kvspec.run.recovery import KILLS, OpenRequest, Recovery, Unanswered
from kvspec.run.report import Figures

FAULTS = (
    *KILLS, "stop producer", "stop consumer", "deregister producer", "abort", "cancel", "late",
)  # fmt: skip
"""The faults that a soak injects while a request is open."""


class LossyEngine(FaultyEngine):
    """An engine of ranks that lose and repeat messages."""

    rank_type = LossyRank


class Soak(Recovery):
    """A recovery run with all `FAULTS`, and with short timeouts."""

    engine_type = LossyEngine
    timeout = 4.0

    def start_request(self, fault: str) -> None:
        """Send a request and inject *fault* meanwhile."""
        self.fault = fault
        super().start_request(fault)

    def hold(self, opened: OpenRequest, seed: int) -> None:
        """Hold a request. With the fault "late", it is freed and overwritten before it is read."""
        if self.fault != "late":
            super().hold(opened, seed)
            return
        self.engines["producer"].ask("hold", opened.remote_id, opened.request, seed, lease=0.05)
        time.sleep(0.2)
        self.release()

    def inject(self, fault: str, opened: OpenRequest, unanswered: Unanswered) -> None:
        """Inject one of `FAULTS` while a request is open."""
        super().inject(fault, opened, unanswered)
        verb, _, of = fault.partition(" ")
        side: Side = "producer" if of == "producer" else "consumer"
        if verb == "stop":
            rank = self.drawn.choice(self.engines[side].ranks)
            stop(rank)
            time.sleep(self.drawn.choice((0.3, 5.0)))  # The second is longer than the lease.
            go_on(rank)
        elif verb == "deregister":
            self.collect(opened, unanswered)
            self.drawn.choice(self.engines[side].ranks).ask("shut")
            time.sleep(0.3)
            self.look()
            self.start(side)
        elif verb == "abort":
            self.engines["producer"].ask("abort", opened.remote_id)
        elif verb == "cancel":
            self.collect(opened, unanswered)
            self.engines["consumer"].ranks[0].ask("cancel", opened.request.request_id)


def soak(requests: int, faults: int, seed: int = 0, tls: str = "all") -> Figures:
    """Return the figures of *requests* with *faults*, in which the kinds of faults take turns."""
    job = Job(
        producer=engine(4, heads=4, block=8, size=512),
        consumer=engine(2, heads=4, block=4, size=512),
        tokens=60,
        requests=requests,
        seed=seed,
        timeout=24 * 3600.0,  # A soak is ended by its number of requests, not by its job's timeout.
    )
    kinds = [FAULTS[number % len(FAULTS)] for number in range(faults)]
    with patch.dict(os.environ, UCX_TLS=tls):
        return Soak(job).run(kinds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=70)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tls", default="all", help="UCX_TLS of the processes: all, tcp")
    options = parser.parse_args()
    print(soak(options.requests, options.faults, options.seed, options.tls))  # noqa: T201
