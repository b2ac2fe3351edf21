"""Check that a transfer is right: `verify`, differences between digests, and an exhaustive proof.

Invariant: each checker goes through the bytes that should arrive. No checker uses the runs and rows
of the descriptor table to decide which bytes are right.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvspec.check import differences
    from kvspec.check.proof import prove

__all__ = [
    "differences",
    "prove",
]


# `import kvspec` loads this package for `verify`. The rest is loaded on first use, which makes that
# import a fifth faster.
def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module or a function
    if name == "prove":
        return import_module("kvspec.check.proof").prove
    if name == "differences":
        return import_module("kvspec.check.differences")
    raise AttributeError(f"module 'kvspec.check' has no attribute {name!r}")
