"""Run a plan between real processes: one NIXL agent for every rank of two engines.

`run_transfer` starts the ranks, lets one side move the other's cache and has every byte of every
consumer compared with the byte oracle. `run_recovery` lets sessions move many requests, and kills
ranks meanwhile. `kvspec transfer` prints what they report.
"""

from kvspec.run.job import Job
from kvspec.run.launched import LAUNCHERS, GoneError, Place, run_launched
from kvspec.run.launcher import check_job, run_transfer
from kvspec.run.recovery import check_kills, run_recovery
from kvspec.run.report import Compared, Failure, Figures, Moved, RankReport, Report
from kvspec.run.worker import STAGES

__all__ = [
    "LAUNCHERS",
    "STAGES",
    "Compared",
    "Failure",
    "Figures",
    "GoneError",
    "Job",
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
