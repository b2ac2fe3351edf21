"""Inspect plans and tables: explain them, count their bytes, and compare replica policies."""

from kvspec.analysis.simulation import Simulation, simulate

__all__ = [
    "Simulation",
    "simulate",
]
