"""Move bytes with NIXL: one agent for each rank, and its transfers."""

from kvspec.nixl.rank import NixlRank
from kvspec.nixl.staging.rule import Staging
from kvspec.nixl.transfer import Transfer

__all__ = [
    "NixlRank",
    "Staging",
    "Transfer",
]
