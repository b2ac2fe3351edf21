"""Test a connector: the laws of a transfer, the byte oracle, drawn cases, and NIXL without NIXL.

    name                                        use
    `kit`                                       judge a connector in all cases that it supports
    `laws`                                      judge a connector in one case
    `strategies`                                draw cases with Hypothesis
    `fill`                                      write true bytes to the memory of your own ranks
    `oracle.spoil`, `expected`, `check`         compare the memory of your own ranks byte by byte
    `logical_views`                             the memory of a rank as arrays of blocks and tokens
    `FakeNixl`                                  test code that uses NIXL, without NIXL

Importing this package imports neither Hypothesis nor torch. `kvspec.testing.strategies` needs the
extra `testing`.
"""

from importlib import import_module
from types import ModuleType

from kvspec.testing import laws
from kvspec.testing.carve import logical_views
from kvspec.testing.case import Case
from kvspec.testing.fake_nixl import FakeNixl
from kvspec.testing.oracle import fill

__all__ = [
    "Case",
    "FakeNixl",
    "fill",
    "laws",
    "logical_views",
]


# `kit` and `strategies` are imported on first use. Strategies need Hypothesis.
def __getattr__(name: str) -> ModuleType:
    if name not in ("kit", "strategies"):
        raise AttributeError(f"module 'kvspec.testing' has no attribute {name!r}")
    return import_module(f"kvspec.testing.{name}")
