"""Tools that judge a transfer: the byte oracle and the laws here, drawn cases in `strategies`.

Importing this package imports neither hypothesis nor torch; `kvspec.testing.strategies` needs the
`testing` extra.
"""

from importlib import import_module
from types import ModuleType

from kvspec.testing import laws
from kvspec.testing.carve import logical_views, rank_units, shard_units
from kvspec.testing.case import Case
from kvspec.testing.fake_nixl import FakeAgent, FakeFlight, FakeLife, FakeNixl
from kvspec.testing.oracle import check, content, expected, fill, spoil
from kvspec.testing.positions import live_positions

__all__ = [
    "Case",
    "FakeAgent",
    "FakeFlight",
    "FakeLife",
    "FakeNixl",
    "check",
    "content",
    "expected",
    "fill",
    "laws",
    "live_positions",
    "logical_views",
    "rank_units",
    "shard_units",
    "spoil",
]


def __getattr__(name: str) -> ModuleType:
    if name != "strategies":
        raise AttributeError(f"module 'kvspec.testing' has no attribute {name!r}")
    return import_module("kvspec.testing.strategies")
