"""Run many requests through the processes of two engines, with faults.

Invariant: no request is lost or wrong, and no resource leaks. This command runs for longer and
prints the figures:

    python tests/support/session_soak.py --requests 1000
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sessions import engine

from kvspec.run import Figures, Job
from kvspec.run.recovery import check_kills, recover
from kvspec.run.soak import FAULTS


def soak(
    requests: int, faults: int, seed: int = 0, tls: str = "all", *, pushed: bool = False
) -> Figures:
    """Return the figures of *requests* with *faults*, in which the kinds of faults take turns."""
    job = Job(
        producer=engine(4, heads=4, block=8, size=512),
        consumer=engine(2, heads=4, block=4, size=512),
        tokens=60,
        requests=requests,
        mode="push" if pushed else "pull",
        seed=seed,
        timeout=24 * 3600.0,  # A soak is ended by its number of requests, not by its job's timeout.
    )
    kinds = [FAULTS[number % len(FAULTS)] for number in range(faults)]
    return recover(job, check_kills(job, 0), kinds, tls=tls, one_in=20, timeout=4.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=70)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tls", default="all", help="UCX_TLS of the processes: all, tcp")
    parser.add_argument("--push", action="store_true", help="producers write")
    options = parser.parse_args()
    print(soak(options.requests, options.faults, options.seed, options.tls, pushed=options.push))  # noqa: T201
