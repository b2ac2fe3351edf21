"""Run a plan between real processes, with one session for each rank of two engines.

`run_transfer` starts the ranks, moves the cache of one engine to the other, and compares every byte
of each consumer with the byte oracle. `run_launched` is one rank of such a run on several machines.
`run_recovery` moves many requests and kills ranks meanwhile. `kvspec transfer` prints their
reports.
"""

from kvspec.run.job import Job, Mode
from kvspec.run.launched import LAUNCHERS, Place, run_launched
from kvspec.run.local import check_job, run_transfer
from kvspec.run.recovery import check_kills, run_recovery
from kvspec.run.report import Compared, Failure, Figures, Moved, RankReport, Report
from kvspec.run.transfer_rank import STAGES

__all__ = [
    "LAUNCHERS",
    "STAGES",
    "Compared",
    "Failure",
    "Figures",
    "Job",
    "Mode",
    "Moved",
    "Place",
    "RankReport",
    "Report",
    "check_job",
    "check_kills",
    "run_launched",
    "run_recovery",
    "run_transfer",
]
