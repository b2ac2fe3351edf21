"""Is it right: checkers that go through what should be there, and not through what came."""

from kvspec.check import digests, reference
from kvspec.check.proof import prove

__all__ = [
    "digests",
    "prove",
    "reference",
]
