"""Read plans and tables: explain them, count what they move, and simulate policies."""

from kvspec.analysis.counts import Link, Load, Traffic, traffic
from kvspec.analysis.explanation import explain
from kvspec.analysis.simulation import LinkTime, PolicyLoad, Simulation, simulate

__all__ = [
    "Link",
    "LinkTime",
    "Load",
    "PolicyLoad",
    "Simulation",
    "Traffic",
    "explain",
    "simulate",
    "traffic",
]
