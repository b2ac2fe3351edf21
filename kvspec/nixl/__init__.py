"""Move bytes with NIXL: one agent for each rank, its transfers, and the costs of a machine."""

from kvspec.nixl.choice import explain_cost
from kvspec.nixl.costs import Costs
from kvspec.nixl.rank import NixlRank
from kvspec.nixl.staging_buffer import Staging
from kvspec.nixl.transfer import Transfer

__all__ = [
    "Costs",
    "NixlRank",
    "Staging",
    "Transfer",
    "explain_cost",
]
