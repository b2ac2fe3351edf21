"""Tools that judge a transfer: the byte oracle and the laws here, drawn cases in `strategies`.

Importing this package imports neither hypothesis nor torch; `kvspec.testing.strategies` needs the
`testing` extra.
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


def __getattr__(name: str) -> ModuleType:
    if name != "strategies":
        raise AttributeError(f"module 'kvspec.testing' has no attribute {name!r}")
    return import_module("kvspec.testing.strategies")
