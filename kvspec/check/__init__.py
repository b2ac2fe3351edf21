"""Is it right: checkers that go through what should be there, and not through what came."""

from kvspec.check import digests, reference
from kvspec.check.checker import CounterExample, Kind
from kvspec.check.proof import Proof, prove
from kvspec.check.verify import verify

__all__ = ["CounterExample", "Kind", "Proof", "digests", "prove", "reference", "verify"]
