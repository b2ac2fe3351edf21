"""Read plans and tables: explain them, count what they move, and simulate policies."""

from kvspec.analysis.simulation import Simulation, simulate

__all__ = [
    "Simulation",
    "simulate",
]
