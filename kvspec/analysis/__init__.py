"""Inspect plans and tables: explain them, count their bytes, and compare replica policies."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvspec.analysis.simulation import Simulation, simulate

__all__ = [
    "Simulation",
    "simulate",
]


# `import kvspec` loads this package for `explain` and `traffic`, which need no simulation.
def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class or a function
    if name not in __all__:
        raise AttributeError(f"module 'kvspec.analysis' has no attribute {name!r}")
    return getattr(import_module("kvspec.analysis.simulation"), name)
