"""The execution layer: one rank's NIXL agent, and what it moves."""

from kvspec.nixl.calibration import calibrated
from kvspec.nixl.choice import explain_cost
from kvspec.nixl.costs import Costs
from kvspec.nixl.in_flight import Event, NixlStats
from kvspec.nixl.rank import NixlRank
from kvspec.nixl.staging_buffer import Staging
from kvspec.nixl.transfer import Transfer
from kvspec.nixl.transfer_spec import Operation, Prepared

__all__ = [
    "Costs",
    "Event",
    "NixlRank",
    "NixlStats",
    "Operation",
    "Prepared",
    "Staging",
    "Transfer",
    "calibrated",
    "explain_cost",
]
