"""The execution layer: one rank's NIXL agent, and what it moves."""

from kvspec.nixl.rank import NixlRank
from kvspec.nixl.transfer import Prepared, Transfer

__all__ = ["NixlRank", "Prepared", "Transfer"]
